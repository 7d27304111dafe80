//! The functions that C calls, as `include/dmalane.h` declares them.
//!
//! `unsafe` is what this file is for: pointers come from C. Each is looked at in [`bytes`], [`put`], [`text`] or
//! [`config`], which refuse null and lengths that no object can have; that there is as much memory as C says is the
//! contract of every function here. Nothing keeps a pointer beyond the call but the callbacks of a VM with their
//! `user`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::mem::offset_of;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;
use std::time::Duration;

use dmalane::load::fill::FilledBuf;
use dmalane_addr::{CardAddr, Segment};
use dmalane_vm::Errno;

use crate::buffers::{self, Request};
use crate::models::{self, Described, Placed};
use crate::objects::{self, Callback, Callbacks, Refused, call};
use crate::targets;

/// The version of what the header describes.
pub const DML_ABI_VERSION: u32 = 1;

/// `struct dml_segment`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlSegment {
    /// Where the segment begins.
    pub pa: u64,
    /// Bytes, not 0.
    pub len: u64,
}

/// A callback of C for `len` bytes at `va`.
pub type Function = extern "C" fn(user: *mut c_void, va: u64, len: u64);

/// A callback of C for a buffer object that is gone, by the handle that it had.
pub type ReleaseFunction = extern "C" fn(user: *mut c_void, handle: u32);

/// `struct dml_vm_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlVmConfig {
    /// `sizeof(struct dml_vm_config)` as the caller knows it.
    pub size: u64,
    /// The name of the page-table format, such as "x86-64-4level".
    pub format: *const c_char,
    /// The first address.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// The first address of the reserved part.
    pub reserved_va: u64,
    /// Bytes of it; both 0 for none.
    pub reserved_len: u64,
    /// Page tables at most; 0 for no limit.
    pub table_limit: u64,
    /// Makes the device forget `len` bytes at `va`; null when there is no device.
    pub invalidate: Option<Function>,
    /// Called for each `DML_PREFETCH`; may be null.
    pub prefetch: Option<Function>,
    /// First argument of both callbacks.
    pub user: *mut c_void,
}

/// `struct dml_leaf`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlLeaf {
    /// Physical address.
    pub pa: u64,
    /// Bytes from there to the end of the leaf.
    pub left: u64,
    /// The size of the leaf.
    pub leaf: u64,
    /// `DML_READ`, `DML_WRITE`, `DML_EXEC`.
    pub access: u32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_run`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlRun {
    /// The first address.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// The byte of the buffer object there.
    pub offset: u64,
    /// Where that is.
    pub pa: u64,
    /// The size of the leaves.
    pub leaf: u64,
    /// Bytes that repeat, or 0.
    pub repeat: u64,
    /// The handle of the buffer object; 0 for a null range.
    pub handle: u32,
    /// `DML_READ`, `DML_WRITE`, `DML_EXEC`.
    pub access: u32,
}

/// `struct dml_read_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlReadConfig {
    /// `sizeof(struct dml_read_config)` as the caller knows it.
    pub size: u64,
    /// `DML_READ_SHAREABLE` and its like.
    pub flags: u32,
    /// Worker threads; 0 to choose automatically.
    pub threads: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes; 0 for all to the end.
    pub len: u64,
    /// Chunk size in bytes; 0 for the default.
    pub chunk: u64,
    /// Bytes of memory at most; 0 for no limit.
    pub limit: u64,
    /// Milliseconds at most; 0 for no limit.
    pub timeout_ms: u64,
}

/// `struct dml_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlRange {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes; 0 for all to the end.
    pub len: u64,
    /// Offset in the buffer.
    pub to: u64,
    /// An open file.
    pub fd: i32,
    /// Which of the buffers.
    pub buffer: u32,
}

/// `struct dml_filled`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlFilled {
    /// The bytes, until the buffer is destroyed.
    pub data: *mut c_void,
    /// Length in bytes.
    pub len: u64,
    /// XXH3-64 of them; 0 unless asked for.
    pub checksum: u64,
}

/// `struct dml_target_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlTargetInfo {
    /// Bytes of free device memory.
    pub free: u64,
    /// Size of the smallest page of its address space.
    pub page: u64,
    /// Bytes of one operation at most.
    pub max_len: u64,
    /// Operations in flight at most.
    pub capacity: u64,
    /// `DML_TARGET_FLAT` and its like.
    pub flags: u32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_target_op`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlTargetOp {
    /// `DML_TO_DEVICE` and its like.
    pub kind: u32,
    /// Rows, or 0.
    pub rows: u32,
    /// Comes back with the completion.
    pub user: u64,
    /// Bytes; with rows, those of one.
    pub len: u64,
    /// Device virtual address.
    pub at: u64,
    /// Host memory.
    pub memory: u64,
    /// Offset in the host memory.
    pub offset: u64,
    /// Pattern or source.
    pub value: u64,
    /// Pitch in host memory, or at the source.
    pub memory_pitch: u64,
    /// Pitch on the device.
    pub pitch: u64,
}

/// Bytes of an operation without rows and value: what a stride has at least.
const SHORTEST: usize = offset_of!(DmlTargetOp, value);

/// `struct dml_completion`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlCompletion {
    /// As it was submitted.
    pub user: u64,
    /// Bytes that are known to be done.
    pub bytes: u64,
    /// 0 or a negative error number.
    pub result: i32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_tensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlTensor {
    /// Device virtual address; 0 for a tensor of no bytes.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// Length of its name in bytes, without the terminating zero.
    pub name_len: u64,
}

/// `struct dml_model_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlModelConfig {
    /// `sizeof(struct dml_model_config)` as the caller knows it.
    pub size: u64,
    /// Bytes of host memory that its tensors may take at a time; 0 for no limit.
    pub memory_limit: u64,
    /// `DML_READ_DIRECT`, `DML_READ_BUFFERED` or 0.
    pub flags: u32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_model_tensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlModelTensor {
    /// Bytes.
    pub len: u64,
    /// Length of its name in bytes, without the terminating zero.
    pub name_len: u64,
    /// Dimensions.
    pub dims: u64,
    /// Its shape.
    pub shape: [u64; models::DIMS],
    /// The type of its elements ("F32"), with a terminating zero; empty for bytes without a type.
    pub dtype: [u8; 16],
}

/// `struct dml_slice`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlSlice {
    /// The first element.
    pub start: u64,
    /// The element behind the last one.
    pub stop: u64,
}

/// `DML_LOAD_VERIFY`.
const LOAD_VERIFY: u32 = 1;

/// Memory that C passes for reading, as a slice.
///
/// # Safety
/// `at` is null, or there are `len` bytes that are not written to while the slice is in use.
unsafe fn bytes<'a>(at: *const c_void, len: usize) -> Result<&'a [u8], Refused> {
    if len == 0 {
        return Ok(&[]);
    }
    if at.is_null() || isize::try_from(len).is_err() {
        return Err(fault(format_args!("{len} bytes at {at:p}")));
    }
    // SAFETY: not null and no longer than an object can be, checked above; the caller says that the bytes are there and
    // stay as they are. Bytes need no alignment.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), len) })
}

/// Writes a result to memory of C.
///
/// # Safety
/// `to` is null, or points to writable memory for a `T` that no other code accesses during the call.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Refused> {
    if to.is_null() {
        return Err(fault(format_args!("no room for the result: a null pointer")));
    }
    // SAFETY: not null, checked above; the caller says that there is room. `write_unaligned` needs no alignment.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// A text of C's.
///
/// # Safety
/// `at` is null, or the address of a text that ends with a zero byte and is not written to while the slice is in use.
unsafe fn text<'a>(at: *const c_char) -> Result<&'a str, Refused> {
    if at.is_null() {
        return Err(fault(format_args!("a null pointer instead of a text")));
    }
    // SAFETY: not null, checked above; the caller says that a zero byte ends it and that it stays as it is.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str().map_err(|e| refused(Errno::Inval, format_args!("{text:?}: {e}")))
}

/// A text of C's that may be missing.
///
/// # Safety
/// As for [`text`].
unsafe fn optional<'a>(at: *const c_char) -> Result<Option<&'a str>, Refused> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: of the caller.
    unsafe { text(at) }.map(Some)
}

/// Writes a text and a zero to memory of C, cut to `size` bytes.
///
/// # Safety
/// `to` is null, or there is room for `size` bytes that nobody else uses during the call.
unsafe fn put_text(to: *mut c_char, size: usize, text: &str) {
    if to.is_null() || size == 0 {
        return;
    }
    let mut end = text.len().min(size - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: not null, checked above; `end` is below `size`, the room that the caller says is there, which is not part
    // of a text of ours.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), end);
        to.add(end).write(0);
    }
}

/// Writes a tensor and its name to memory of C.
///
/// # Safety
/// As for [`put`] and [`put_text`].
unsafe fn put_tensor(
    to: *mut DmlTensor,
    name: *mut c_char,
    size: usize,
    found: (DmlTensor, String),
) -> Result<(), Refused> {
    // SAFETY: of the caller.
    unsafe { put_text(name, size, &found.1) };
    // SAFETY: of the caller.
    unsafe { put(to, found.0) }
}

fn tensor(load: u64, name: Option<&str>, index: u64) -> Result<(DmlTensor, String), Refused> {
    targets::tensor(load, name, index, |found| {
        let name = found.tensor.name.clone();
        let va = found.va.map_or(0, |span| span.first().bits());
        (DmlTensor { va, len: found.tensor.len, name_len: name.len() as u64 }, name)
    })
}

/// Bytes that a configuration has at most, in later versions too: a size that was never set is mostly above it.
const LONGEST_CONFIG: usize = 4096;

/// Reads a configuration of the caller's size.
///
/// # Safety
/// `at` is null, or there are as many bytes as the 64-bit number there says, and nobody writes to them during the call.
/// `T` is one of the structures of the header that begin with their size: numbers, pointers, and callbacks that may be
/// null.
unsafe fn config<T: Copy>(at: *const T) -> Result<T, Refused> {
    // SAFETY: of the caller: at least the size is there.
    let head = unsafe { bytes(at.cast(), size_of::<u64>())? };
    let size = u64::from_ne_bytes(head.try_into().map_err(|_| fault("no configuration"))?);
    let known = size_of::<T>();
    let size = usize::try_from(size).map_err(|_| fault(format_args!("a configuration of {size} bytes")))?;
    if size < known {
        return Err(refused(Errno::Inval, format_args!("a configuration of {size} bytes, below {known}")));
    }
    if size > LONGEST_CONFIG {
        return Err(refused(Errno::TooBig, format_args!("a configuration of {size} bytes, above {LONGEST_CONFIG}")));
    }
    // SAFETY: of the caller: as many bytes as it says.
    let all = unsafe { bytes(at.cast(), size)? };
    if all[known..].iter().any(|b| *b != 0) {
        return Err(refused(Errno::TooBig, "fields of the configuration that this version does not know"));
    }
    // SAFETY: `all` has the bytes of one, checked above. Any bits are right for numbers and pointers; of a callback
    // null is `None`, and what else it is the caller says: the address of such a function.
    Ok(unsafe { at.read_unaligned() })
}

/// 64 bits at an offset of a structure of C's.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

/// 32 bits at an offset of a structure of C's.
fn half(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// An operation from its bytes, at least [`SHORTEST`]; what is not there is 0.
fn target_op(bytes: &[u8]) -> Result<targets::Request, Refused> {
    if bytes.iter().skip(size_of::<DmlTargetOp>()).any(|b| *b != 0) {
        return Err(refused(Errno::TooBig, "fields of an operation that this version does not know"));
    }
    Ok(targets::Request {
        kind: half(bytes, offset_of!(DmlTargetOp, kind)),
        rows: half(bytes, offset_of!(DmlTargetOp, rows)),
        user: number(bytes, offset_of!(DmlTargetOp, user)),
        len: number(bytes, offset_of!(DmlTargetOp, len)),
        at: number(bytes, offset_of!(DmlTargetOp, at)),
        memory: number(bytes, offset_of!(DmlTargetOp, memory)),
        offset: number(bytes, offset_of!(DmlTargetOp, offset)),
        value: number(bytes, offset_of!(DmlTargetOp, value)),
        memory_pitch: number(bytes, offset_of!(DmlTargetOp, memory_pitch)),
        pitch: number(bytes, offset_of!(DmlTargetOp, pitch)),
    })
}

/// An open file of C's.
///
/// # Safety
/// `fd` is negative, or an open descriptor that stays open while the result is in use.
unsafe fn file<'a>(fd: i32) -> Result<BorrowedFd<'a>, Refused> {
    if fd < 0 {
        return Err(refused(Errno::Inval, format_args!("{fd} is no file descriptor")));
    }
    // SAFETY: not -1, checked above; the caller says that it is open and stays so.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// The place of an element of an array of C's; null for none.
fn place<T>(array: *mut T, i: usize) -> *mut T {
    if array.is_null() { array } else { array.wrapping_add(i) }
}

/// No buffer.
const NOTHING: DmlFilled = DmlFilled { data: std::ptr::null_mut(), len: 0, checksum: 0 };

fn filled_by(made: &FilledBuf) -> DmlFilled {
    let view = made.as_volatile_slice();
    DmlFilled { data: view.as_ptr().cast(), len: view.len() as u64, checksum: made.checksum().unwrap_or(0) }
}

/// Writes a tensor in host memory to memory of C.
///
/// # Safety
/// As for [`put`].
unsafe fn put_placed(tensor: *mut u64, filled: *mut DmlFilled, (number, data, len): Placed) -> Result<(), Refused> {
    // SAFETY: of the caller.
    unsafe { put(filled, DmlFilled { data: data.cast(), len, checksum: 0 })? };
    // SAFETY: of the caller.
    unsafe { put(tensor, number) }
}

fn read_request(c: DmlReadConfig) -> Request {
    let DmlReadConfig { flags, threads, offset, len, chunk, limit, timeout_ms, .. } = c;
    Request { flags, threads, offset, len, chunk, limit, timeout_ms }
}

fn refused(errno: Errno, what: impl std::fmt::Display) -> Refused {
    Refused::new(errno, what)
}

fn fault(what: impl std::fmt::Display) -> Refused {
    refused(Errno::Fault, what)
}

/// Declares functions for C that give 0 or a negative error number, and let no panic through.
macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// Each pointer is null or points to as much memory as the header says, which nobody else writes to during the
        /// call, nor reads where it is written.
        // SAFETY: all names begin with `dml_`, which is ours; the linker would refuse two of one.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> i32 {
            call(|| $body)
        }
    )*};
}

exported! {
    /// Creates a device: buffer objects, and VMs that bind them.
    fn dml_device_create(device: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(device, 0)? };
        // SAFETY: the same again.
        unsafe { put(device, objects::create_device()) }
    }

    /// Destroys a device. Its VMs exist until they are destroyed.
    fn dml_device_destroy(device: u64) {
        objects::destroy_device(device)
    }

    /// Creates a buffer object of `count` segments.
    fn dml_bo_create(device: u64, segments: *const DmlSegment, count: usize, handle: *mut u32) {
        // SAFETY: the contract of the function.
        unsafe { put(handle, 0)? };
        let len = count.checked_mul(size_of::<DmlSegment>()).ok_or_else(|| fault("too many segments"))?;
        // SAFETY: the contract of the function: `count` segments are there.
        let bytes = unsafe { bytes(segments.cast(), len)? };
        let each = bytes.chunks_exact(size_of::<DmlSegment>()).map(|segment| {
            let pa = number(segment, offset_of!(DmlSegment, pa));
            Segment { addr: CardAddr::new(pa), len: number(segment, offset_of!(DmlSegment, len)) }
        });
        let made = objects::create_bo(device, each)?;
        // SAFETY: the contract of the function.
        unsafe { put(handle, made) }
    }

    /// Destroys a buffer object's handle. The object exists while it is bound.
    fn dml_bo_destroy(device: u64, handle: u32) {
        objects::destroy_bo(device, handle)
    }

    /// Sets the function that is called when the memory of a buffer object may be used again.
    fn dml_bo_on_release(device: u64, handle: u32, release: Option<ReleaseFunction>, user: *mut c_void) {
        let release = release.ok_or_else(|| fault("no function"))?;
        let user = user.expose_provenance(); // a number, so that it may go from thread to thread
        let tell = move || release(std::ptr::with_exposed_provenance_mut(user), handle);
        objects::on_release(device, handle, Box::new(tell))
    }

    /// Creates an empty VM.
    fn dml_vm_create(device: u64, config: *const DmlVmConfig, vm: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(vm, 0)? };
        // SAFETY: the contract of the function; the header says that `size` is the first field.
        let c = unsafe { self::config(config)? };
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let format = unsafe { text(c.format)? };
        let user = c.user.expose_provenance(); // a number, so that it may go from thread to thread
        let callback = |function: Function| -> Callback {
            Arc::new(move |va, len| function(std::ptr::with_exposed_provenance_mut(user), va.bits(), len))
        };
        let tell = Callbacks { invalidate: c.invalidate.map(callback), prefetch: c.prefetch.map(callback) };
        let reserved = (c.reserved_va, c.reserved_len);
        let made = objects::create_vm(device, format, (c.va, c.len), reserved, c.table_limit, tell)?;
        // SAFETY: the contract of the function.
        unsafe { put(vm, made) }
    }

    /// Gives a VM up, with all that is bound in it.
    fn dml_vm_destroy(vm: u64) {
        objects::destroy_vm(vm)
    }

    /// Sets what null ranges show from now on.
    fn dml_vm_set_null_page(vm: u64, pa: u64, len: u64) {
        objects::set_null_page(vm, pa, len)
    }

    /// Applies `count` operations, `stride` bytes apart, all or none.
    fn dml_vm_bind(vm: u64, operations: *const c_void, stride: usize, count: usize) {
        // An array that is longer than memory is told from one that is not there.
        let len = count.checked_mul(stride).ok_or_else(|| fault(format_args!("{count} operations of {stride} bytes")))?;
        // SAFETY: the contract of the function: `count` strides are there.
        let bytes = unsafe { bytes(operations, len)? };
        objects::bind(vm, bytes, stride, count, false)
    }

    /// As `dml_vm_bind`, for the driver itself: within the reserved part.
    fn dml_vm_bind_reserved(vm: u64, operations: *const c_void, stride: usize, count: usize) {
        let len = count.checked_mul(stride).ok_or_else(|| fault(format_args!("{count} operations of {stride} bytes")))?;
        // SAFETY: the contract of the function: `count` strides are there.
        let bytes = unsafe { bytes(operations, len)? };
        objects::bind(vm, bytes, stride, count, true)
    }

    /// Makes larger leaves where what is bound continues.
    fn dml_vm_merge(vm: u64, va: u64, len: u64) {
        objects::merge(vm, va, len)
    }

    /// Counts the bytes of a buffer object that are bound in a VM.
    fn dml_bo_bound_bytes(vm: u64, handle: u32, count: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(count, 0)? };
        let bytes = objects::bound_bytes(vm, handle)?;
        // SAFETY: the same again.
        unsafe { put(count, bytes) }
    }

    /// In how many VMs a buffer object is bound.
    fn dml_bo_bindings(device: u64, handle: u32, count: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(count, 0)? };
        let vms = objects::bound_vms(device, handle)?;
        // SAFETY: the same again.
        unsafe { put(count, vms) }
    }

    /// Where an address leads.
    fn dml_vm_lookup(vm: u64, va: u64, leaf: *mut DmlLeaf) {
        // SAFETY: the contract of the function.
        unsafe { put(leaf, DmlLeaf::default())? };
        let found = objects::lookup(vm, va)?;
        let found = DmlLeaf {
            pa: found.pa,
            left: found.left,
            leaf: found.leaf,
            access: found.access.bits().into(),
            zero: 0,
        };
        // SAFETY: the contract of the function.
        unsafe { put(leaf, found) }
    }

    /// Allocates a buffer and reads a file into it while it is being allocated.
    fn dml_alloc_and_read(fd: i32, config: *const DmlReadConfig, buffer: *mut u64, filled: *mut DmlFilled) {
        // SAFETY: the contract of the function.
        unsafe { put(buffer, 0)? };
        // SAFETY: the contract of the function.
        unsafe { put(filled, NOTHING)? };
        // SAFETY: the contract of the function; the header says that `size` is the first field.
        let request = read_request(unsafe { self::config(config)? });
        // SAFETY: the header says that it is open and stays so during the call.
        let (number, made) = buffers::alloc_and_read(unsafe { file(fd)? }, &request)?;
        // SAFETY: the contract of the function.
        unsafe { put(filled, filled_by(&made))? };
        // SAFETY: the contract of the function.
        unsafe { put(buffer, number) }
    }

    /// Allocates buffers and reads ranges of files into them.
    fn dml_alloc_and_read_ranges(
        ranges: *const DmlRange,
        count: usize,
        config: *const DmlReadConfig,
        buffer_count: usize,
        buffers: *mut u64,
        filled: *mut DmlFilled,
    ) {
        for i in 0..buffer_count {
            // SAFETY: the contract of the function: there is room for `buffer_count`.
            unsafe { put(place(buffers, i), 0)? };
            // SAFETY: the same again.
            unsafe { put(place(filled, i), NOTHING)? };
        }
        // SAFETY: the contract of the function; the header says that `size` is the first field.
        let request = read_request(unsafe { self::config(config)? });
        let len = count.checked_mul(size_of::<DmlRange>()).ok_or_else(|| fault("too many ranges"))?;
        // SAFETY: the contract of the function: `count` ranges are there.
        let bytes = unsafe { bytes(ranges.cast(), len)? };
        let each = bytes.chunks_exact(size_of::<DmlRange>()).map(|range| {
            Ok(buffers::Range {
                // SAFETY: the header says that it is open and stays so during the call.
                file: unsafe { file(half(range, offset_of!(DmlRange, fd)).cast_signed())? },
                offset: number(range, offset_of!(DmlRange, offset)),
                len: number(range, offset_of!(DmlRange, len)),
                to: number(range, offset_of!(DmlRange, to)),
                buffer: half(range, offset_of!(DmlRange, buffer)),
            })
        });
        let ranges = each.collect::<Result<Vec<_>, Refused>>()?;
        let made = buffers::read_ranges(&ranges, &request, buffer_count)?;
        for (i, (number, made)) in made.into_iter().enumerate() {
            // SAFETY: the contract of the function.
            unsafe { put(place(filled, i), filled_by(&made))? };
            // SAFETY: the contract of the function.
            unsafe { put(place(buffers, i), number)? };
        }
        Ok(())
    }

    /// A descriptor of the memory of a buffer, for another process or driver.
    fn dml_buffer_export(buffer: u64, fd: *mut i32) {
        // SAFETY: the contract of the function.
        unsafe { put(fd, -1)? };
        let exported = buffers::export(buffer)?;
        // SAFETY: the contract of the function. Were it refused here, it would have been above.
        unsafe { put(fd, exported.into_raw_fd()) }
    }

    /// A dma-buf of the memory of a buffer, for another driver.
    fn dml_buffer_export_dma_buf(buffer: u64, fd: *mut i32) {
        // SAFETY: the contract of the function.
        unsafe { put(fd, -1)? };
        let exported = buffers::export_dma_buf(buffer)?;
        // SAFETY: the contract of the function. Were it refused here, it would have been above.
        unsafe { put(fd, exported.into_raw_fd()) }
    }

    /// Frees a buffer; its bytes are gone.
    fn dml_buffer_destroy(buffer: u64) {
        buffers::destroy(buffer)
    }

    /// Opens a device by name.
    fn dml_target_open(name: *const c_char, target: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(target, 0)? };
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let opened = targets::open(unsafe { text(name)? })?;
        // SAFETY: the contract of the function.
        unsafe { put(target, opened) }
    }

    /// Properties of a device.
    fn dml_target_info(target: u64, info: *mut DmlTargetInfo) {
        // SAFETY: the contract of the function.
        unsafe { put(info, DmlTargetInfo::default())? };
        let targets::Info { free, page, max_len, capacity, flags } = targets::info(target)?;
        // SAFETY: the contract of the function.
        unsafe { put(info, DmlTargetInfo { free, page, max_len, capacity, flags, zero: 0 }) }
    }

    /// Closes a device.
    fn dml_target_close(target: u64) {
        targets::close(target)
    }

    /// Allocates host memory and registers it with a device.
    fn dml_memory_create(target: u64, len: u64, memory: *mut u64, data: *mut *mut c_void) {
        // SAFETY: the contract of the function.
        unsafe { put(memory, 0)? };
        // SAFETY: the contract of the function.
        unsafe { put(data, std::ptr::null_mut())? };
        let (number, at) = targets::create_memory(target, len)?;
        // SAFETY: the contract of the function.
        unsafe { put(data, at.cast())? };
        // SAFETY: the contract of the function.
        unsafe { put(memory, number) }
    }

    /// Registers a buffer that was read from a file with a device.
    fn dml_memory_register(target: u64, buffer: u64, memory: *mut u64, data: *mut *mut c_void) {
        // SAFETY: the contract of the function.
        unsafe { put(memory, 0)? };
        // SAFETY: the contract of the function.
        unsafe { put(data, std::ptr::null_mut())? };
        let (number, at) = targets::register_buffer(target, buffer)?;
        // SAFETY: the contract of the function.
        unsafe { put(data, at.cast())? };
        // SAFETY: the contract of the function.
        unsafe { put(memory, number) }
    }

    /// Deregisters host memory and frees it.
    fn dml_memory_destroy(memory: u64) {
        targets::destroy_memory(memory)
    }

    /// Allocates device memory.
    fn dml_target_allocate(target: u64, len: u64, placement: *const c_char, handle: *mut u32) {
        // SAFETY: the contract of the function.
        unsafe { put(handle, 0)? };
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let allocated = targets::allocate(target, len, unsafe { optional(placement)? })?;
        // SAFETY: the contract of the function.
        unsafe { put(handle, allocated) }
    }

    /// Frees device memory.
    fn dml_target_free(target: u64, handle: u32) {
        targets::free(target, handle)
    }

    /// Reserves device virtual addresses for device memory.
    fn dml_target_reserve(target: u64, handle: u32, len: u64, va: *mut u64, reserved: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(va, 0)? };
        // SAFETY: the contract of the function.
        unsafe { put(reserved, 0)? };
        let range = targets::reserve(target, handle, len)?;
        // SAFETY: the contract of the function.
        unsafe { put(reserved, range.len())? };
        // SAFETY: the contract of the function.
        unsafe { put(va, range.first().bits()) }
    }

    /// Unbinds what is bound in a reserved range, and gives the range back.
    fn dml_target_release(target: u64, va: u64) {
        targets::release(target, va)
    }

    /// Applies `count` operations, `stride` bytes apart, in the address space of a device.
    fn dml_target_bind(target: u64, operations: *const c_void, stride: usize, count: usize) {
        let len = count.checked_mul(stride).ok_or_else(|| fault(format_args!("{count} operations of {stride} bytes")))?;
        // SAFETY: the contract of the function: `count` strides are there.
        let bytes = unsafe { bytes(operations, len)? };
        targets::bind(target, bytes, stride, count)
    }

    /// Submits `count` operations, `stride` bytes apart, until one is refused.
    fn dml_target_submit(target: u64, operations: *const c_void, stride: usize, count: usize, accepted: *mut usize) {
        // SAFETY: the contract of the function.
        unsafe { put(accepted, 0)? };
        if count > 0 && stride < SHORTEST {
            return Err(refused(Errno::Inval, format_args!("a stride of {stride} bytes, below {SHORTEST}")));
        }
        let len = count.checked_mul(stride).ok_or_else(|| fault(format_args!("{count} operations of {stride} bytes")))?;
        // SAFETY: the contract of the function: `count` strides are there.
        let bytes = unsafe { bytes(operations, len)? };
        let (n, result) = targets::submit(target, bytes.chunks_exact(stride.max(1)).map(target_op));
        // SAFETY: the contract of the function.
        unsafe { put(accepted, n)? };
        result
    }

    /// Cancels an operation.
    fn dml_target_cancel(target: u64, user: u64) {
        targets::cancel(target, user)
    }

    /// Collects completions.
    fn dml_target_poll(
        target: u64,
        done: *mut DmlCompletion,
        capacity: usize,
        timeout_ms: u64,
        count: *mut usize,
    ) {
        // SAFETY: the contract of the function.
        unsafe { put(count, 0)? };
        if done.is_null() {
            return Err(fault("no room for completions: a null pointer"));
        }
        let mut n = 0;
        let mut failed = None;
        let result = targets::poll(target, capacity, Duration::from_millis(timeout_ms), &mut |ended| {
            let targets::Ended { user, bytes, number, text } = ended;
            failed = text.or_else(|| failed.take());
            // SAFETY: below `capacity`, as `poll` says, so within the room that the caller says is there.
            unsafe { put(done.add(n), DmlCompletion { user, bytes, result: number, zero: 0 })? };
            n += 1;
            Ok(())
        });
        if let Some(text) = failed {
            objects::set_last_error(text);
        }
        // SAFETY: the contract of the function.
        unsafe { put(count, n)? };
        result
    }

    /// Stops the operations of a device.
    fn dml_target_stop(target: u64) {
        targets::stop(target)
    }

    /// Lets a device work again.
    fn dml_target_restart(target: u64) {
        targets::restart(target)
    }

    /// Loads a file onto a device.
    fn dml_target_load(target: u64, path: *const c_char, placement: *const c_char, flags: u32, load: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(load, 0)? };
        if flags & !LOAD_VERIFY != 0 {
            return Err(refused(Errno::Inval, format_args!("flags {flags:#x}")));
        }
        // SAFETY: the contract of the function: the texts stay as they are during the call.
        let (path, placement) = unsafe { (text(path)?, optional(placement)?) };
        let loaded = targets::load(target, path, placement, flags & LOAD_VERIFY != 0)?;
        // SAFETY: the contract of the function.
        unsafe { put(load, loaded) }
    }

    /// A tensor of a load, in the order of the file.
    fn dml_load_tensor(load: u64, index: u64, tensor: *mut DmlTensor, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        unsafe { put(tensor, DmlTensor::default())? };
        let found = self::tensor(load, None, index)?;
        // SAFETY: the contract of the function.
        unsafe { put_tensor(tensor, name, size, found) }
    }

    /// The tensor of this name of a load.
    fn dml_load_find(load: u64, name: *const c_char, tensor: *mut DmlTensor) {
        // SAFETY: the contract of the function.
        unsafe { put(tensor, DmlTensor::default())? };
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let found = self::tensor(load, Some(unsafe { text(name)? }), 0)?;
        // SAFETY: the contract of the function.
        unsafe { put(tensor, found.0) }
    }

    /// Opens files of tensors.
    fn dml_model_open(
        paths: *const *const c_char,
        count: usize,
        config: *const DmlModelConfig,
        model: *mut u64,
    ) {
        // SAFETY: the contract of the function.
        unsafe { put(model, 0)? };
        // SAFETY: the contract of the function; the header says that `size` is the first field.
        let config = unsafe { self::config(config)? };
        if config.zero != 0 {
            return Err(refused(Errno::Inval, "a field that is not 0"));
        }
        let len = count.checked_mul(size_of::<*const c_char>()).ok_or_else(|| fault("too many paths"))?;
        // SAFETY: the contract of the function: `count` pointers are there.
        let all = unsafe { bytes(paths.cast(), len)? };
        let each = all.chunks_exact(size_of::<usize>()).map(|at| {
            let at = std::ptr::with_exposed_provenance(number(at, 0) as usize);
            // SAFETY: the contract of the function: each is null or a text that stays as it is during the call.
            unsafe { text(at) }
        });
        let opened = models::open(&each.collect::<Result<Vec<_>, _>>()?, config.flags, config.memory_limit)?;
        // SAFETY: the contract of the function.
        unsafe { put(model, opened) }
    }

    /// A tensor of a model, in the order of the files and of the bytes in them.
    fn dml_model_tensor(model: u64, index: u64, tensor: *mut DmlModelTensor, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        unsafe { put(tensor, DmlModelTensor::default())? };
        let Described { name: called, dtype, shape, len } = models::describe(model, index)?;
        let (name_len, dims) = (called.len() as u64, shape.len() as u64);
        let mut found = DmlModelTensor { len, name_len, dims, ..DmlModelTensor::default() };
        found.shape = models::shape(&shape)?;
        let room = found.dtype.len() - 1;
        found.dtype.iter_mut().zip(dtype.bytes().take(room)).for_each(|(to, byte)| *to = byte);
        // SAFETY: the contract of the function.
        unsafe { put_text(name, size, &called) };
        // SAFETY: the contract of the function.
        unsafe { put(tensor, found) }
    }

    /// Reads a tensor of a model.
    fn dml_model_read(model: u64, name: *const c_char, tensor: *mut u64, filled: *mut DmlFilled) {
        // SAFETY: the contract of the function.
        unsafe { put_placed(tensor, filled, (0, std::ptr::null_mut(), 0))? };
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let placed = models::read(model, unsafe { text(name)? }, None)?;
        // SAFETY: the contract of the function.
        unsafe { put_placed(tensor, filled, placed) }
    }

    /// Reads a slice of a tensor of a model.
    fn dml_model_slice(
        model: u64,
        name: *const c_char,
        slices: *const DmlSlice,
        count: usize,
        tensor: *mut u64,
        filled: *mut DmlFilled,
    ) {
        // SAFETY: the contract of the function.
        unsafe { put_placed(tensor, filled, (0, std::ptr::null_mut(), 0))? };
        let len = count.checked_mul(size_of::<DmlSlice>()).ok_or_else(|| fault("too many ranges"))?;
        // SAFETY: the contract of the function: `count` slices are there.
        let all = unsafe { bytes(slices.cast(), len)? };
        let slice = |at: &[u8]| number(at, offset_of!(DmlSlice, start))..number(at, offset_of!(DmlSlice, stop));
        let ranges: Vec<_> = all.chunks_exact(size_of::<DmlSlice>()).map(slice).collect();
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let placed = models::read(model, unsafe { text(name)? }, Some(&ranges))?;
        // SAFETY: the contract of the function.
        unsafe { put_placed(tensor, filled, placed) }
    }

    /// Begins to read all tensors of a model.
    fn dml_model_stream(model: u64, stream: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(stream, 0)? };
        let begun = models::stream(model)?;
        // SAFETY: the contract of the function.
        unsafe { put(stream, begun) }
    }

    /// The next tensor of a stream.
    fn dml_stream_next(stream: u64, tensor: *mut u64, filled: *mut DmlFilled, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        unsafe { put_placed(tensor, filled, (0, std::ptr::null_mut(), 0))? };
        let (called, placed) = models::next(stream)?.ok_or_else(|| refused(Errno::NoEnt, "no tensor is left"))?;
        // SAFETY: the contract of the function.
        unsafe { put_text(name, size, &called) };
        // SAFETY: the contract of the function.
        unsafe { put_placed(tensor, filled, placed) }
    }

    /// Ends a stream.
    fn dml_stream_destroy(stream: u64) {
        models::end_stream(stream)
    }

    /// Frees a tensor in host memory.
    fn dml_host_tensor_destroy(tensor: u64) {
        models::release(tensor)
    }

    /// Closes a model. Its tensors and streams stay.
    fn dml_model_destroy(model: u64) {
        models::close(model)
    }

    /// Loads a model onto a device.
    fn dml_target_load_model(target: u64, model: u64, placement: *const c_char, flags: u32, load: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { put(load, 0)? };
        if flags & !LOAD_VERIFY != 0 {
            return Err(refused(Errno::Inval, format_args!("flags {flags:#x}")));
        }
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let placement = unsafe { optional(placement)? };
        let loaded = targets::load_open(target, model, placement, flags & LOAD_VERIFY != 0)?;
        // SAFETY: the contract of the function.
        unsafe { put(load, loaded) }
    }

    /// Unbinds and frees what a load brought to its device.
    fn dml_load_destroy(load: u64) {
        targets::unload(load)
    }

    /// Lists the bindings within `len` bytes at `va`: the first `capacity` runs, and the number of all of them.
    fn dml_vm_runs(vm: u64, va: u64, len: u64, runs: *mut DmlRun, capacity: usize, count: *mut usize) {
        // SAFETY: the contract of the function.
        unsafe { put(count, 0)? };
        let mut n = 0;
        let mut result = Ok(());
        objects::runs(vm, va, len, &mut |run| {
            if n < capacity && result.is_ok() {
                let (handle, offset, repeat) = objects::source(&run);
                let run = DmlRun {
                    va: run.span.first().bits(),
                    len: run.span.len(),
                    offset,
                    pa: run.to.bits(),
                    leaf: run.leaf.bytes(),
                    repeat,
                    handle,
                    access: run.access.bits().into(),
                };
                result = if runs.is_null() {
                    Err(fault("no room for the runs: a null pointer"))
                } else {
                    // SAFETY: below `capacity`, checked above, so within the room that the caller says is there.
                    unsafe { put(runs.add(n), run) }
                };
            }
            n += 1;
        })?;
        result?;
        // SAFETY: the contract of the function.
        unsafe { put(count, n) }
    }
}

/// The version of the library; the header it fits has the same.
// SAFETY: all names begin with `dml_`, which is ours; the linker would refuse two of one.
#[unsafe(no_mangle)]
pub extern "C" fn dml_abi_version() -> u32 {
    DML_ABI_VERSION
}

/// Writes what the last error of this thread was, cut to `size` bytes with the zero at the end, and gives the length
/// that it has without that. Gives 0 when there was none.
///
/// # Safety
/// `text` is null, or there is room for `size` bytes that nobody else uses during the call.
// SAFETY: all names begin with `dml_`, which is ours; the linker would refuse two of one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dml_last_error(text: *mut c_char, size: usize) -> usize {
    objects::with_last_error(|last| {
        // SAFETY: the contract of the function.
        unsafe { put_text(text, size, last) };
        last.len()
    })
}
