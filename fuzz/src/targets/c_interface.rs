//! Calls of the C interface in any order, with numbers that name nothing, null pointers and arrays of any bytes: each
//! call succeeds or gives an error number with a text, and what was created can be destroyed.
//!
//! `unsafe` because that is what calling C functions is. Pointers are null, or those of Rust values that live through
//! the call, with their lengths.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_void};
use std::os::fd::AsRawFd;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use super::vm_array::operation;
use dmalane_capi::*;
use dmalane_dma::fuzzing::FuzzInput;
use rustix::fs::{MemfdFlags, memfd_create};

const CALLS: usize = 60;
const PAGE: u64 = 4096;
const LEN: u64 = 2048 * PAGE;
const BASE: u64 = 512 * PAGE;
/// Bytes of the file that is read.
const FILE: usize = 40_000;
const ENOENT: i32 = 2;
const ENOTRECOVERABLE: i32 = 131;

/// Calls a function of the interface, and checks the number that it gives.
macro_rules! c {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: every pointer in this file is null or that of a value that lives through the call and is as long as
        // the call is told; callbacks have the types of the header, and descriptors are open.
        checked(unsafe { $name($($argument),*) })
    }};
}

/// The number of a call: 0, or that of an error with a text.
fn checked(number: i32) -> i32 {
    let mut text = [0u8; 64];
    // SAFETY: there is room for as many bytes.
    let len = unsafe { dml_last_error(text.as_mut_ptr().cast(), text.len()) };
    assert!(number == 0 || number < 0 && len > 0, "{number} with {len} bytes of text");
    assert!(text.contains(&0), "the text ends");
    assert_ne!(number, -ENOTRECOVERABLE, "{}", String::from_utf8_lossy(&text));
    number
}

/// Calls of a callback.
static RELEASED: AtomicU32 = AtomicU32::new(0);

extern "C" fn released(_: *mut c_void, _: u32) {
    RELEASED.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn told(user: *mut c_void, va: u64, len: u64) {
    assert!(!user.is_null() && va.checked_add(len).is_some());
}

/// A configuration of a later version of the header.
#[repr(C)]
struct Longer {
    config: DmlVmConfig,
    more: [u64; 2],
}

/// The objects that the calls of an input have made. The first of each list names nothing.
struct Made {
    device: u64,
    vms: Vec<u64>,
    bos: Vec<u32>,
    buffers: Vec<u64>,
    /// Callbacks that were set.
    callbacks: u32,
}

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let input = &mut FuzzInput::new(data);
    let file = memfd_create("c-interface", MemfdFlags::CLOEXEC).expect("a memfd");
    let contents: Vec<u8> = (0..FILE).map(|i| (i % 251) as u8).collect();
    rustix::io::write(&file, &contents).expect("room");
    RELEASED.store(0, Ordering::Relaxed);
    let mut device = 0;
    assert_eq!(c!(dml_device_create(&mut device)), 0);
    let mut made = Made { device, vms: vec![0], bos: vec![0], buffers: vec![0], callbacks: 0 };
    for _ in 0..CALLS {
        if input.is_empty() {
            break;
        }
        match input.u8() % 16 {
            0 | 1 => made.create_bo(input),
            2 | 3 => made.create_vm(input),
            4..=7 => made.bind(input),
            8 | 9 => made.look(input),
            10 => {
                let handle = pick(&made.bos, input);
                let set = c!(dml_bo_on_release(made.device, handle, (input.u8() != 0).then_some(released), null_mut()));
                made.callbacks += u32::from(set == 0);
            }
            11 => {
                let at = usize::from(input.u8()) % made.bos.len();
                let handle = made.bos[at];
                assert_eq!(c!(dml_bo_destroy(made.device, handle)) == 0, handle != 0);
                if handle != 0 {
                    made.bos.swap_remove(at);
                    assert_eq!(c!(dml_bo_destroy(made.device, handle)), -ENOENT, "destroyed twice");
                }
            }
            12 => {
                let at = usize::from(input.u8()) % made.vms.len();
                let vm = made.vms[at];
                assert_eq!(c!(dml_vm_destroy(vm)) == 0, vm != 0);
                if vm != 0 {
                    made.vms.swap_remove(at);
                    assert_eq!(c!(dml_vm_destroy(vm)), -ENOENT, "destroyed twice");
                }
            }
            13 => drop(c!(dml_vm_set_null_page(pick(&made.vms, input), input.number(), input.number()))),
            14 => made.read(input, file.as_raw_fd(), &contents),
            _ => {
                let mut exported = -2;
                let buffer = pick(&made.buffers, input);
                if c!(dml_buffer_export(buffer, &mut exported)) == 0 {
                    // SAFETY: the call gave a descriptor that is now this function's alone.
                    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(exported) });
                } else {
                    assert_eq!(exported, -1);
                }
            }
        }
    }
    for vm in made.vms.into_iter().skip(1) {
        assert_eq!(c!(dml_vm_destroy(vm)), 0);
    }
    for buffer in made.buffers.into_iter().skip(1) {
        assert_eq!(c!(dml_buffer_destroy(buffer)), 0);
    }
    assert_eq!(c!(dml_device_destroy(device)), 0);
    assert_eq!(c!(dml_device_destroy(device)), -ENOENT);
    assert_eq!(RELEASED.load(Ordering::Relaxed), made.callbacks, "each callback is called once");
}

/// One of a list; the first is mostly not meant.
fn pick<T: Copy>(list: &[T], input: &mut FuzzInput<'_>) -> T {
    let n = usize::from(input.u8());
    if n < 8 { list[0] } else { list[n % list.len()] }
}

impl Made {
    fn create_bo(&mut self, input: &mut FuzzInput<'_>) {
        let segment = |input: &mut FuzzInput<'_>| DmlSegment { pa: input.number(), len: input.number() };
        let segments: Vec<DmlSegment> = (0..input.u8() % 5).map(|_| segment(input)).collect();
        let (at, count) = match input.u8() {
            0 => (null(), segments.len()),
            1 => (segments.as_ptr(), usize::MAX / 4),
            _ => (segments.as_ptr(), segments.len()),
        };
        let mut handle = u32::MAX;
        match c!(dml_bo_create(self.device, at, count, &mut handle)) {
            0 => self.bos.push(handle),
            _ => assert_eq!(handle, 0),
        }
    }

    fn create_vm(&mut self, input: &mut FuzzInput<'_>) {
        let formats = ["x86-64-4level", "agx-uat", "riscv-sv39", "arm64-s1-4k", "no-format", ""];
        let format = CString::new(formats[usize::from(input.u8()) % formats.len()]).expect("no zero byte");
        let wild = input.u8();
        let number = |input: &mut FuzzInput<'_>, usual| if wild & 0xf == 1 { input.number() } else { usual };
        let config = DmlVmConfig {
            size: match wild >> 4 {
                1 => input.number() % (size_of::<Longer>() as u64 + 1),
                2 => input.number() | 4097,
                _ => size_of::<DmlVmConfig>() as u64,
            },
            format: if wild == 0 { null() } else { format.as_ptr() },
            va: number(input, BASE),
            len: number(input, LEN),
            reserved_va: number(input, u64::from(wild >> 7) * BASE),
            reserved_len: number(input, u64::from(wild >> 7) * 64 * PAGE),
            table_limit: u64::from(input.u8() % 32),
            invalidate: (wild & 2 == 0).then_some(told),
            prefetch: (wild & 4 == 0).then_some(told),
            user: std::ptr::without_provenance_mut(1),
            break_before_make: 0,
        };
        // A caller that knows more fields; sizes above those bytes are too long for any configuration.
        let longer = Longer { config, more: [u64::from(wild == 0x11), 0] };
        let mut vm = u64::MAX;
        match c!(dml_vm_create(self.device, (&raw const longer).cast(), &mut vm)) {
            0 => self.vms.push(vm),
            _ => assert_eq!(vm, 0),
        }
    }

    fn bind(&mut self, input: &mut FuzzInput<'_>) {
        let (vm, kind) = (pick(&self.vms, input), input.u8());
        let (count, stride) = (usize::from(kind % 5), 32 + usize::from(input.u8() % 3) * 8);
        let mut bytes = Vec::new();
        for _ in 0..count {
            operation(input, PAGE, &self.bos, &mut bytes);
            bytes.resize(bytes.len().next_multiple_of(stride), 0);
        }
        if kind & 0xe0 == 0xe0 && !bytes.is_empty() {
            let at = usize::from(input.u16()) % bytes.len();
            bytes[at] ^= input.u8();
        }
        let at = if kind & 0xf0 == 0x10 { null() } else { bytes.as_ptr().cast() };
        match kind & 0x18 {
            0 => drop(c!(dml_vm_bind_reserved(vm, at, stride, count))),
            8 => drop(c!(dml_vm_merge(vm, input.number(), input.number()))),
            // More strides than memory has.
            16 if kind & 0x20 != 0 => assert_ne!(c!(dml_vm_bind(vm, at, usize::MAX / 2, 3)), 0),
            _ => drop(c!(dml_vm_bind(vm, at, stride, count))),
        }
    }

    /// Lookups and runs say the same, and nothing where nothing is.
    fn look(&mut self, input: &mut FuzzInput<'_>) {
        let (vm, handle) = (pick(&self.vms, input), pick(&self.bos, input));
        let (mut bytes, mut bindings) = (u64::MAX, u64::MAX);
        c!(dml_bo_bound_bytes(vm, handle, &mut bytes));
        c!(dml_bo_bindings(self.device, handle, &mut bindings));
        assert!(bytes <= LEN << 20 && bindings < self.vms.len() as u64 + 1, "{bytes} bytes, {bindings} VMs");
        let (va, len) = if input.u8() < 128 { (BASE, LEN) } else { (input.number(), input.number()) };
        let capacity = usize::from(input.u8() % 16);
        let mut runs = vec![DmlRun::default(); capacity];
        let mut count = usize::MAX;
        if c!(dml_vm_runs(vm, va, len, runs.as_mut_ptr(), capacity, &mut count)) != 0 {
            return assert_eq!(count, 0);
        }
        let mut end = va;
        for run in &runs[..count.min(capacity)] {
            assert!(run.va >= end && run.len > 0 && run.va - va + run.len <= len, "{run:?} from {va:#x}, {len:#x}");
            end = run.va + run.len;
            let mut leaf = DmlLeaf::default();
            assert_eq!(c!(dml_vm_lookup(vm, run.va, &mut leaf)), 0, "a run without a leaf: {run:?}");
            assert!((leaf.pa, leaf.access) == (run.pa, run.access) && leaf.left <= leaf.leaf, "{run:?} {leaf:?}");
        }
    }

    fn read(&mut self, input: &mut FuzzInput<'_>, fd: i32, contents: &[u8]) {
        let kind = input.u8();
        let (offset, len) = (u64::from(input.u16()), u64::from(input.u16()));
        let config = DmlReadConfig {
            size: size_of::<DmlReadConfig>() as u64 - u64::from(kind == 1),
            flags: u32::from(kind & 0xf) & !u32::from(kind & 0x80 == 0) << 1,
            threads: u32::from(kind >> 4) % 5,
            offset,
            len,
            chunk: u64::from(input.u8()) << 10,
            limit: if kind & 0x40 != 0 { u64::from(input.u16()) } else { 0 },
            timeout_ms: 0,
        };
        let (mut buffer, mut filled) = (u64::MAX, DmlFilled { data: null_mut(), len: 7, checksum: 7 });
        if c!(dml_alloc_and_read(fd, &config, &mut buffer, &mut filled)) != 0 {
            return assert_eq!((buffer, filled.data, filled.len), (0, null_mut::<c_char>().cast(), 0));
        }
        self.buffers.push(buffer);
        let from = offset as usize;
        let end = if len == 0 { contents.len() } else { from + len as usize };
        // SAFETY: `filled.len` bytes are there until the buffer is destroyed, and nobody writes to them.
        let got = unsafe { std::slice::from_raw_parts(filled.data.cast::<u8>(), filled.len as usize) };
        assert!(got == &contents[from.min(end)..end], "{len} bytes from {offset}");
    }
}
