//! The functions of the driver with their C types, and the handle through which tests control them.
//!
//! Pointers are those that callers of a C library pass: to variables that live through the call. Host memory of copies
//! is used only while it is registered (or, where the GPU cannot register any, as long as callers keep it, which is
//! their duty with the real driver, too).
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_uint, c_void};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::model::*;

thread_local! {
    /// The contexts of this thread, the current one last.
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// Whether calls of this thread end graphs that others capture: 0 if they do, 2 if not.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

/// The context of a device, as a pointer.
fn context_of(device: c_int) -> u64 {
    0x5000 + device as u64
}

/// Bytes of a row that lie at a place, for reading or writing.
fn move_bytes(state: &State, job: &Job) {
    for r in 0..job.rows {
        let mut row = vec![0u8; job.row as usize];
        match &job.from {
            Source::Value(value) => row.iter_mut().zip(value.iter().cycle()).for_each(|(to, from)| *to = *from),
            Source::Place(Place::Host(at), pitch) => {
                let from = (*at + (r * pitch) as usize) as *const u8;
                // SAFETY: registered, which `bad_use` has checked under the lock that is held: who registers memory
                // keeps it until it is unregistered.
                unsafe { std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), row.len()) };
            }
            Source::Place(Place::Device(at), pitch) => device(state, at + r * pitch, &mut row, false),
        }
        match job.to {
            Place::Host(at) => {
                let to = (at + (r * job.to_pitch) as usize) as *mut u8;
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, row.len()) };
            }
            Place::Device(at) => device(state, at + r * job.to_pitch, &mut row, true),
        }
    }
}

/// Reads or writes device memory, which may lie in several mappings.
fn device(state: &State, at: u64, bytes: &mut [u8], write: bool) {
    let mut done = 0;
    while done < bytes.len() {
        let next = at + done as u64;
        let Some((first, mapping)) = state.mapped.range(..=next).next_back() else { return };
        let offset = (next - first) as usize;
        let n = (mapping.len as usize - offset).min(bytes.len() - done);
        if mapping.outside {
            let (here, there) =
                (bytes[done..done + n].as_mut_ptr(), std::ptr::with_exposed_provenance_mut::<u8>(next as usize));
            let (from, to) = if write { (here.cast_const(), there) } else { (there.cast_const(), here) };
            // SAFETY: `here` has n bytes (indexed above); who gave memory by "adopt" keeps its n bytes at `there` until
            // it takes them back, as those do who register memory.
            unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
            done += n;
            continue;
        }
        let mut memory = mapping.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.copy(offset, &mut bytes[done..done + n], write);
        done += n;
    }
}

type Result<T = ()> = std::result::Result<T, Code>;

/// Runs a call that needs an initialised driver.
fn call(name: &str, body: impl FnOnce(&mut State) -> Result) -> Code {
    let mut state = MODEL.lock();
    let code = match state.enter(name) {
        Some(code) => code,
        None if !state.initialised => NOT_INITIALIZED,
        None => body(&mut state).err().unwrap_or(0),
    };
    drop(state);
    MODEL.notify();
    code
}

/// Runs a call that needs a current context, too.
fn with_context(name: &str, body: impl FnOnce(&mut State) -> Result) -> Code {
    call(name, |state| {
        if current() == 0 {
            state.violation(format!("{name} without a current context"));
            return Err(INVALID_CONTEXT);
        }
        if state.settings.capturing && CAPTURE_MODE.get() != 2 {
            state.violation(format!("{name} ended a graph that is captured"));
        }
        body(state)
    })
}

/// The current context of this thread; 0 for none.
fn current() -> u64 {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Runs a call that undoes something: it is done even when it is made to fail.
fn undo(name: &str, body: impl FnOnce(&mut State) -> Result) -> Code {
    let mut state = MODEL.lock();
    let failed = state.enter(name);
    let done = body(&mut state).err().unwrap_or(0);
    drop(state);
    MODEL.notify();
    failed.unwrap_or(done)
}

/// Stores a result of a call.
fn put<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: callers pass a pointer to a variable of this type.
    unsafe { to.write(value) };
    Ok(())
}

fn put_text(to: *mut c_char, room: c_int, text: &str) -> Result {
    let bytes = text.bytes().chain([0]).take(usize::try_from(room).unwrap_or(0));
    // SAFETY: callers pass an array of `room` characters.
    bytes.enumerate().for_each(|(i, byte)| unsafe { to.add(i).write(byte as c_char) });
    Ok(())
}

fn check_device(state: &State, device: c_int) -> Result {
    if (0..state.settings.gpus as c_int).contains(&device) { Ok(()) } else { Err(INVALID_DEVICE) }
}

/// Gives jobs to a stream: checked now, done later.
fn queue(state: &mut State, stream: *mut c_void, jobs: Vec<Job>) -> Result {
    let id = stream as u64;
    if state.streams.get(&id).is_none_or(|stream| stream.destroyed) {
        state.violation(format!("a copy on stream {id:#x}, which does not exist"));
        return Err(INVALID_HANDLE);
    }
    if state.streams.get(&id).is_some_and(|stream| stream.context != current()) {
        state.violation(format!("a copy on stream {id:#x} of another context"));
        return Err(INVALID_HANDLE);
    }
    for job in &jobs {
        if job.row == 0 || job.rows == 0 {
            return Err(INVALID_VALUE);
        }
        state.unregistered += state.unregistered_of(job);
        if let Some(why) = state.bad_use(job, current()) {
            if why.contains("not registered") {
                state.violation(why);
            }
            return Err(INVALID_VALUE);
        }
    }
    let stream = state.streams.get_mut(&id).ok_or(INVALID_HANDLE)?;
    stream.given += jobs.len() as u64;
    let given = Instant::now();
    stream.jobs.extend(jobs.into_iter().map(|job| Item::Job(job, given)));
    Ok(())
}

fn copy(to: Place, from: Place, len: usize) -> Job {
    let row = len as u64;
    Job { to, from: Source::Place(from, row), row, rows: 1, to_pitch: row }
}

macro_rules! functions {
    ($($(#[$attribute:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
        $(#[$attribute])*
        // SAFETY: no other symbol of a test has this name; the real driver is not loaded beside this one.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> Code $body
    )*};
}

const PORTABLE: c_uint = 1;
const READ_ONLY: c_uint = 8;

/// Whether the memory at an address of this process may be written.
fn is_written(at: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let rights = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (first, end) = range.split_once('-')?;
        let range = usize::from_str_radix(first, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        range.contains(&at).then(|| rest.as_bytes().get(1) == Some(&b'w'))
    };
    maps.lines().find_map(rights).unwrap_or(false)
}

/// Of [`Settings`]: attributes of `CUdevice_attribute`.
fn attribute(settings: &Settings, attribute: c_int) -> c_int {
    match attribute {
        11 => c_int::MAX,
        40 => 2,
        99 => settings.host_register.into(),
        113 => settings.read_only_register.into(),
        102 | 103 | 110 | 124 => settings.virtual_memory.into(),
        _ => 0,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Property {
    kind: c_int,
    handle_types: c_int,
    location: (c_int, c_int),
    rest: [u64; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    location: (c_int, c_int),
    flags: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Side {
    x: usize,
    y: usize,
    kind: c_uint,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy2D {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

impl Side {
    fn place(&self) -> Result<Place> {
        match (self.kind, self.x, self.y, self.array) {
            (1, 0, 0, 0) => Ok(Place::Host(self.host)),
            (2, 0, 0, 0) => Ok(Place::Device(self.device)),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn set(name: &str, at: u64, value: &[u8], row: u64, rows: u64, pitch: u64, stream: *mut c_void) -> Code {
    with_context(name, |state| {
        let unit = value.len() as u64;
        if !at.is_multiple_of(unit) || (rows > 1 && (!pitch.is_multiple_of(unit) || pitch < row)) {
            return Err(INVALID_VALUE);
        }
        let job = Job { to: Place::Device(at), from: Source::Value(value.to_vec()), row, rows, to_pitch: pitch };
        queue(state, stream, vec![job])
    })
}

functions! {
    fn cuGetErrorName(code: Code, to: *mut *const c_char) {
        let name: &'static CStr = match code {
            0 => c"CUDA_SUCCESS",
            INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            100 => c"CUDA_ERROR_NO_DEVICE",
            NOT_READY => c"CUDA_ERROR_NOT_READY",
            ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
            NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
            999 => c"CUDA_ERROR_UNKNOWN",
            _ => return INVALID_VALUE,
        };
        put(to, name.as_ptr()).err().unwrap_or(0)
    }
    fn cuGetErrorString(code: Code, to: *mut *const c_char) {
        let text = if code == OUT_OF_MEMORY { c"out of memory" } else { c"an error of the fake driver" };
        put(to, text.as_ptr()).err().unwrap_or(0)
    }
    fn cuInit(flags: c_uint) {
        let mut state = MODEL.lock();
        if let Some(code) = state.enter("cuInit") {
            return code;
        }
        if !std::mem::replace(&mut state.initialised, true) {
            for one in std::env::var(SETTINGS).iter().flat_map(|all| all.split(';')) {
                assert!(control(&mut state, one) >= 0, "{SETTINGS}: the fake driver does not know {one:?}");
            }
        }
        if flags == 0 { if state.settings.gpus == 0 { 100 } else { 0 } } else { INVALID_VALUE }
    }
    fn cuDriverGetVersion(to: *mut c_int) {
        call("cuDriverGetVersion", |_| put(to, 13000))
    }
    fn cuDeviceGetCount(to: *mut c_int) {
        call("cuDeviceGetCount", |state| put(to, state.settings.gpus as c_int))
    }
    fn cuDeviceGet(to: *mut c_int, number: c_int) {
        call("cuDeviceGet", |state| check_device(state, number).and_then(|()| put(to, number)))
    }
    fn cuDeviceGetName(to: *mut c_char, room: c_int, device: c_int) {
        call("cuDeviceGetName", |state| check_device(state, device).and_then(|()| put_text(to, room, "Fake GPU")))
    }
    fn cuDeviceGetUuid(to: *mut [c_uchar; 16], device: c_int) {
        call("cuDeviceGetUuid", |state| {
            let number = if state.settings.parts { 0 } else { device as u8 };
            check_device(state, device).and_then(|()| put(to, [0xa0 + number; 16]))
        })
    }
    fn cuDeviceGetUuid_v2(to: *mut [c_uchar; 16], device: c_int) {
        call("cuDeviceGetUuid_v2", |state| {
            let kind = if state.settings.parts { 0xb0 } else { 0xa0 };
            check_device(state, device).and_then(|()| put(to, [kind + device as u8; 16]))
        })
    }
    fn cuDeviceGetPCIBusId(to: *mut c_char, room: c_int, device: c_int) {
        let text = format!("0000:0{device}:00.0");
        call("cuDeviceGetPCIBusId", |state| check_device(state, device).and_then(|()| put_text(to, room, &text)))
    }
    fn cuDeviceGetAttribute(to: *mut c_int, which: c_int, device: c_int) {
        call("cuDeviceGetAttribute", |state| {
            check_device(state, device).and_then(|()| put(to, attribute(&state.settings, which)))
        })
    }
    fn cuDeviceTotalMem_v2(to: *mut usize, device: c_int) {
        call("cuDeviceTotalMem_v2", |state| {
            check_device(state, device).and_then(|()| put(to, state.settings.memory as usize))
        })
    }
    fn cuDevicePrimaryCtxRetain(to: *mut u64, device: c_int) {
        call("cuDevicePrimaryCtxRetain", |state| {
            check_device(state, device)?;
            *state.retained.entry(device).or_default() += 1;
            put(to, context_of(device))
        })
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        undo("cuDevicePrimaryCtxRelease_v2", |state| {
            let Some(count) = state.retained.get_mut(&device).filter(|count| **count > 0) else {
                state.violation(format!("the context of device {device} was released more often than retained"));
                return Err(INVALID_CONTEXT);
            };
            *count -= 1;
            if *count == 0 && !state.registered.is_empty() {
                state.violation("a context was released with host memory registered".to_owned());
            }
            Ok(())
        })
    }
    fn cuCtxPushCurrent_v2(context: u64) {
        call("cuCtxPushCurrent_v2", |state| {
            let device = context.wrapping_sub(0x5000) as c_int;
            if state.retained.get(&device).is_none_or(|count| *count == 0) {
                state.violation("a context was used after its release".to_owned());
                return Err(INVALID_CONTEXT);
            }
            CURRENT.with_borrow_mut(|stack| stack.push(context));
            state.pushed += 1;
            Ok(())
        })
    }
    fn cuCtxPopCurrent_v2(to: *mut u64) {
        undo("cuCtxPopCurrent_v2", |state| match CURRENT.with_borrow_mut(Vec::pop) {
            Some(context) => {
                state.pushed = state.pushed.saturating_sub(1);
                put(to, context)
            }
            None => {
                state.violation("cuCtxPopCurrent without a context".to_owned());
                Err(INVALID_CONTEXT)
            }
        })
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        call("cuThreadExchangeStreamCaptureMode", |_| {
            // SAFETY: callers pass a pointer to a number.
            put(mode, CAPTURE_MODE.replace(unsafe { *mode }))
        })
    }
    fn cuCtxSynchronize() {
        let code = with_context("cuCtxSynchronize", |_| Ok(()));
        if code != 0 {
            return code;
        }
        let (context, mut state) = (current(), MODEL.lock());
        let works = |state: &State| state.streams.values().any(|s| s.context == context && s.done < s.given);
        while state.broken().is_none() && works(&state) {
            state = MODEL.wait(state);
        }
        state.broken().filter(|_| works(&state)).unwrap_or(0)
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        with_context("cuMemGetInfo_v2", |state| {
            put(free, (state.settings.memory - state.used()) as usize)?;
            put(total, state.settings.memory as usize)
        })
    }
    fn cuMemHostRegister_v2(at: usize, len: usize, flags: c_uint) {
        with_context("cuMemHostRegister_v2", |state| {
            if !state.settings.host_register {
                return Err(NOT_SUPPORTED);
            }
            let is_known = [PORTABLE, PORTABLE | READ_ONLY].contains(&flags);
            if at == 0 || !at.is_multiple_of(4096) || len == 0 || !len.is_multiple_of(4096) || !is_known {
                state.violation(format!("registration of {len} bytes at {at:#x} with flags {flags}"));
                return Err(INVALID_VALUE);
            }
            let read_only = flags & READ_ONLY > 0;
            if read_only && !state.settings.read_only_register {
                return Err(NOT_SUPPORTED);
            }
            // Pages of a mapping that may be written are copied when a driver pins them, if its writes are its own.
            if is_written(at) == read_only {
                state.violation(format!("registration at {at:#x} of memory that is writable: {}", !read_only));
                return Err(INVALID_VALUE);
            }
            let near = state.registered.range(..at + len).next_back();
            if near.is_some_and(|(first, has)| first + has > at) {
                return Err(ALREADY_REGISTERED);
            }
            state.registered.insert(at, len);
            Ok(())
        })
    }
    fn cuMemHostAlloc(to: *mut usize, len: usize, flags: c_uint) {
        with_context("cuMemHostAlloc", |state| {
            let layout = Layout::from_size_align(len, 4096).map_err(|_| INVALID_VALUE)?;
            if len == 0 || flags != 1 {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the layout is not empty.
            let at = unsafe { alloc_zeroed(layout) }.expose_provenance();
            if at == 0 {
                return Err(OUT_OF_MEMORY);
            }
            state.pinned.insert(at, len);
            put(to, at)
        })
    }
    fn cuMemFreeHost(at: usize) {
        undo("cuMemFreeHost", |state| match state.pinned.remove(&at) {
            Some(len) => {
                if state.is_busy(Place::Host(at), len as u64) {
                    state.violation(format!("host memory at {at:#x} was freed while a stream used it"));
                }
                let layout = Layout::from_size_align(len, 4096).map_err(|_| INVALID_VALUE)?;
                // SAFETY: it was allocated with this layout, and is freed once, since it was in the list.
                unsafe { dealloc(std::ptr::with_exposed_provenance_mut(at), layout) };
                Ok(())
            }
            None => {
                state.violation(format!("{at:#x} was freed and is no host memory of the driver"));
                Err(INVALID_VALUE)
            }
        })
    }
    fn cuMemHostUnregister(at: usize) {
        undo("cuMemHostUnregister", |state| match state.registered.remove(&at) {
            Some(len) => {
                if state.is_busy(Place::Host(at), len as u64) {
                    state.violation(format!("host memory at {at:#x} was unregistered while a stream used it"));
                }
                Ok(())
            }
            None => {
                state.violation(format!("host memory at {at:#x} was unregistered and is not registered"));
                Err(NOT_REGISTERED)
            }
        })
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, len: usize, stream: *mut c_void) {
        with_context("cuMemcpyHtoDAsync_v2", |state| {
            queue(state, stream, vec![copy(Place::Device(to), Place::Host(from), len)])
        })
    }
    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, len: usize, stream: *mut c_void) {
        with_context("cuMemcpyDtoHAsync_v2", |state| {
            queue(state, stream, vec![copy(Place::Host(to), Place::Device(from), len)])
        })
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) {
        with_context("cuMemcpyDtoDAsync_v2", |state| {
            queue(state, stream, vec![copy(Place::Device(to), Place::Device(from), len)])
        })
    }
    fn cuMemcpyBatchAsync_v2(
        to: *const u64,
        from: *const u64,
        lens: *const usize,
        count: usize,
        attributes: *const c_int,
        first: *const usize,
        sets: usize,
        stream: *mut c_void,
    ) {
        with_context("cuMemcpyBatchAsync_v2", |state| {
            // SAFETY: callers pass arrays of `count` elements, and as many sets of attributes as they say.
            let (to, from, lens, order, first) = unsafe {
                let array = |p| std::slice::from_raw_parts(p, count);
                (array(to), array(from), std::slice::from_raw_parts(lens, count), *attributes, *first)
            };
            if sets != 1 || order != 1 || first != 0 || count == 0 {
                return Err(INVALID_VALUE);
            }
            let is_device = |state: &State, at: u64| {
                state.mapped.range(..=at).next_back().is_some_and(|(first, m)| at - first < m.len)
            };
            let place = |state: &State, at| {
                if is_device(state, at) { Place::Device(at) } else { Place::Host(at as usize) }
            };
            let jobs = (0..count).map(|i| copy(place(state, to[i]), place(state, from[i]), lens[i]));
            // A batch has no order: the last first.
            let mut jobs: Vec<Job> = jobs.collect();
            jobs.reverse();
            queue(state, stream, jobs)
        })
    }
    fn cuMemcpy2DAsync_v2(copy: *const Copy2D, stream: *mut c_void) {
        with_context("cuMemcpy2DAsync_v2", |state| {
            // SAFETY: callers pass a pointer to this structure.
            let Copy2D { from, to, width, height } = unsafe { *copy };
            if from.pitch < width || to.pitch < width {
                return Err(INVALID_VALUE);
            }
            let source = Source::Place(from.place()?, from.pitch as u64);
            let (row, rows) = (width as u64, height as u64);
            let job = Job { to: to.place()?, from: source, row, rows, to_pitch: to.pitch as u64 };
            queue(state, stream, vec![job])
        })
    }
    fn cuMemsetD8Async(at: u64, value: c_uchar, len: usize, stream: *mut c_void) {
        set("cuMemsetD8Async", at, &[value], len as u64, 1, len as u64, stream)
    }
    fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: *mut c_void) {
        set("cuMemsetD32Async", at, &value.to_le_bytes(), 4 * count as u64, 1, 4 * count as u64, stream)
    }
    fn cuMemsetD2D8Async(at: u64, pitch: usize, value: c_uchar, row: usize, rows: usize, stream: *mut c_void) {
        set("cuMemsetD2D8Async", at, &[value], row as u64, rows as u64, pitch as u64, stream)
    }
    fn cuMemsetD2D32Async(at: u64, pitch: usize, value: c_uint, row: usize, rows: usize, stream: *mut c_void) {
        set("cuMemsetD2D32Async", at, &value.to_le_bytes(), 4 * row as u64, rows as u64, pitch as u64, stream)
    }
    fn cuStreamCreate(to: *mut u64, flags: c_uint) {
        with_context("cuStreamCreate", |state| {
            if flags > 1 {
                return Err(INVALID_VALUE);
            }
            let id = state.number();
            state.streams.insert(id, Stream { context: current(), ..Stream::default() });
            std::thread::spawn(move || MODEL.work(id, move_bytes));
            put(to, id)
        })
    }
    fn cuStreamDestroy_v2(stream: u64) {
        undo("cuStreamDestroy_v2", |state| match state.streams.get_mut(&stream).filter(|s| !s.destroyed) {
            Some(stream) => {
                stream.destroyed = true;
                if stream.waiters > 0 {
                    state.violation("a stream was destroyed while a thread waited for it".to_owned());
                }
                Ok(())
            }
            None => {
                state.violation(format!("stream {stream:#x} was destroyed and does not exist"));
                Err(INVALID_HANDLE)
            }
        })
    }
    fn cuStreamQuery(stream: u64) {
        with_context("cuStreamQuery", |state| match state.streams.get(&stream) {
            Some(stream) if stream.done == stream.given => Ok(()),
            Some(_) => Err(NOT_READY),
            None => Err(INVALID_HANDLE),
        })
    }
    fn cuStreamSynchronize(stream: u64) {
        let code = with_context("cuStreamSynchronize", |state| {
            match state.streams.get_mut(&stream).filter(|s| !s.destroyed) {
                Some(stream) => stream.waiters += 1,
                // The real driver uses memory that it has freed.
                None => {
                    state.violation(format!("a thread waits for stream {stream:#x}, which does not exist"));
                    return Err(INVALID_HANDLE);
                }
            }
            Ok(())
        });
        if code != 0 {
            return code;
        }
        let mut state = MODEL.lock();
        while state.broken().is_none() && state.streams.get(&stream).is_some_and(|s| s.done < s.given) {
            state = MODEL.wait(state);
        }
        let code = state.broken().filter(|_| state.streams.get(&stream).is_some_and(|s| s.done < s.given));
        if let Some(stream) = state.streams.get_mut(&stream) {
            stream.waiters -= 1;
        }
        code.unwrap_or(0)
    }
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) {
        with_context("cuStreamWaitEvent", |state| {
            let recorded = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
            let waits = state.streams.get_mut(&stream).filter(|s| !s.destroyed).ok_or(INVALID_HANDLE)?;
            if flags != 0 {
                return Err(INVALID_VALUE);
            }
            if let Some((other, given)) = recorded {
                waits.given += 1;
                waits.jobs.push_back(Item::Wait(other, given));
            }
            Ok(())
        })
    }
    fn cuEventCreate(to: *mut u64, _flags: c_uint) {
        with_context("cuEventCreate", |state| {
            let id = state.number();
            state.events.insert(id, None);
            put(to, id)
        })
    }
    fn cuEventDestroy_v2(event: u64) {
        undo("cuEventDestroy_v2", |state| match state.events.remove(&event) {
            Some(_) => Ok(()),
            None => {
                state.violation(format!("event {event:#x} was destroyed and does not exist"));
                Err(INVALID_HANDLE)
            }
        })
    }
    fn cuEventRecord(event: u64, stream: u64) {
        with_context("cuEventRecord", |state| {
            let given = state.streams.get(&stream).ok_or(INVALID_HANDLE)?.given;
            *state.events.get_mut(&event).ok_or(INVALID_HANDLE)? = Some((stream, given));
            Ok(())
        })
    }
    fn cuEventQuery(event: u64) {
        with_context("cuEventQuery", |state| match state.events.get(&event) {
            None => Err(INVALID_HANDLE),
            Some(None) => Ok(()),
            Some(Some((stream, given))) => {
                let done = state.streams.get(stream).is_none_or(|s| s.done >= *given);
                if done { Ok(()) } else { Err(NOT_READY) }
            }
        })
    }
    fn cuMemGetAllocationGranularity(to: *mut usize, property: *const Property, _option: c_int) {
        call("cuMemGetAllocationGranularity", |state| {
            check_property(state, property)?;
            put(to, GRANULE as usize)
        })
    }
    fn cuMemAddressReserve(to: *mut u64, len: usize, align: usize, hint: u64, flags: u64) {
        call("cuMemAddressReserve", |state| {
            if len == 0 || !(len as u64).is_multiple_of(GRANULE) || align != 0 || hint != 0 || flags != 0 {
                return Err(INVALID_VALUE);
            }
            let at = state.number() << 36;
            state.reserved.insert(at, len as u64);
            put(to, at)
        })
    }
    fn cuMemAddressFree(at: u64, len: usize) {
        undo("cuMemAddressFree", |state| {
            let mapped = state.mapped.range(at..at + len as u64).next().is_some();
            if mapped || state.reserved.remove(&at) != Some(len as u64) {
                state.violation(format!("{len} bytes of addresses at {at:#x} were freed (mapped: {mapped})"));
                return Err(INVALID_VALUE);
            }
            Ok(())
        })
    }
    fn cuMemCreate(to: *mut u64, len: usize, property: *const Property, flags: u64) {
        with_context("cuMemCreate", |state| {
            check_property(state, property)?;
            if len == 0 || !(len as u64).is_multiple_of(GRANULE) || flags != 0 {
                return Err(INVALID_VALUE);
            }
            if state.used() + len as u64 > state.settings.memory {
                return Err(OUT_OF_MEMORY);
            }
            let handle = state.number();
            // Not zeroes, which would hide what was never written; where nothing is, memory that is not touched.
            let fill = if state.settings.idle { 0 } else { 0xcd };
            // SAFETY: callers pass a pointer to this structure, which was checked above.
            let Property { handle_types, location, .. } = unsafe { *property };
            let bytes = match handle_types {
                0 => Bytes::Own(vec![fill; len]),
                _ => Bytes::Shared(shareable(len, fill).map_err(|_| OUT_OF_MEMORY)?, len as u64, false),
            };
            state.handles.insert(handle, (len as u64, Arc::new(Mutex::new(bytes)), context_of(location.1)));
            put(to, handle)
        })
    }
    fn cuMemExportToShareableHandle(to: *mut c_int, handle: u64, kind: c_int, flags: u64) {
        call("cuMemExportToShareableHandle", |state| {
            let (len, memory, context) = live(state, handle, "exported")?;
            match &*memory.lock().unwrap_or_else(PoisonError::into_inner) {
                Bytes::Shared(file, _, false) if kind == 1 && flags == 0 => {
                    let wrap = |file: File| Ok(wrap(&file, context - context_of(0), len)?);
                    let wrapped = locked(file).and_then(wrap).map_err(|_| NOT_SUPPORTED)?;
                    state.lent.push((Arc::downgrade(&memory), file.try_clone().map_err(|_| NOT_SUPPORTED)?, len));
                    put(to, wrapped.into_raw_fd())
                }
                _ => Err(INVALID_VALUE),
            }
        })
    }
    fn cuMemImportFromShareableHandle(to: *mut u64, fd: usize, kind: c_int) {
        with_context("cuMemImportFromShareableHandle", |state| {
            let fd = c_int::try_from(fd).ok().filter(|fd| *fd >= 0 && kind == 1).ok_or(INVALID_VALUE)?;
            // SAFETY: callers pass a descriptor that they keep open during the call.
            let (file, device, len) = unwrap(unsafe { BorrowedFd::borrow_raw(fd) }).ok_or(INVALID_VALUE)?;
            check_device(state, device)?;
            let handle = state.number();
            let memory = Arc::new(Mutex::new(Bytes::Shared(file, len, true)));
            state.handles.insert(handle, (len, memory, context_of(device)));
            put(to, handle)
        })
    }
    fn cuMemGetAllocationPropertiesFromHandle(to: *mut Property, handle: u64) {
        call("cuMemGetAllocationPropertiesFromHandle", |state| {
            let (_, memory, context) = live(state, handle, "asked about")?;
            let shared = matches!(&*memory.lock().unwrap_or_else(PoisonError::into_inner), Bytes::Shared(..));
            let location = (1, (context - context_of(0)) as c_int);
            put(to, Property { kind: 1, handle_types: shared.into(), location, rest: [0, 1 << 8] })
        })
    }
    fn cuMemRelease(handle: u64) {
        undo("cuMemRelease", |state| match state.handles.remove(&handle) {
            Some(_) => Ok(()),
            None => {
                state.violation(format!("memory {handle:#x} was released and does not exist"));
                Err(INVALID_VALUE)
            }
        })
    }
    fn cuMemMap(at: u64, len: usize, offset: usize, handle: u64, flags: u64) {
        with_context("cuMemMap", |state| {
            let (has, memory, context) = live(state, handle, "mapped")?;
            let came = matches!(&*memory.lock().unwrap_or_else(PoisonError::into_inner), Bytes::Shared(_, _, true));
            if came && context != current() {
                state.violation(format!("memory {handle:#x} of another process was mapped for another GPU"));
                return Err(INVALID_DEVICE);
            }
            let len = len as u64;
            if offset != 0 || len != has {
                return Err(NOT_SUPPORTED);
            }
            let reserved = state.reserved.range(..=at).next_back();
            let inside = reserved.is_some_and(|(first, has)| at - first + len <= *has);
            let over = state.mapped.range(..at + len).next_back().is_some_and(|(first, m)| first + m.len > at);
            if !inside || over || !at.is_multiple_of(GRANULE) || flags != 0 {
                return Err(INVALID_VALUE);
            }
            state.mapped.insert(at, Mapping { len, memory, access: (false, false), context, outside: false });
            Ok(())
        })
    }
    fn cuMemUnmap(at: u64, len: usize) {
        undo("cuMemUnmap", |state| {
            let end = at + len as u64;
            let inside: Vec<(u64, u64)> = state.mapped.range(at..end).map(|(first, m)| (*first, m.len)).collect();
            let cut = inside.last().is_some_and(|(first, has)| first + has > end)
                || state.mapped.range(..at).next_back().is_some_and(|(first, m)| first + m.len > at);
            if cut {
                state.violation(format!("a part of a mapping was unmapped at {at:#x}"));
                return Err(INVALID_VALUE);
            }
            // As the real driver: only what is mapped as a whole.
            if inside.iter().map(|(_, has)| has).sum::<u64>() != len as u64 {
                return Err(INVALID_VALUE);
            }
            if state.is_busy(Place::Device(at), len as u64) {
                state.violation(format!("memory at {at:#x} was unmapped while a stream used it"));
            }
            inside.iter().for_each(|(first, _)| drop(state.mapped.remove(first)));
            Ok(())
        })
    }
    fn cuMemSetAccess(at: u64, len: usize, access: *const AccessDesc, count: usize) {
        with_context("cuMemSetAccess", |state| {
            // SAFETY: callers pass a pointer to `count` of these.
            let access = unsafe { *access };
            if count != 1 || access.location.0 != 1 || !matches!(access.flags, 1 | 3) {
                return Err(INVALID_VALUE);
            }
            let end = at + len as u64;
            let all: u64 = state.mapped.range(at..end).map(|(_, m)| m.len).sum();
            let to = context_of(access.location.1);
            if all != len as u64 || state.mapped.range(at..end).any(|(_, m)| m.context != to) {
                return Err(INVALID_VALUE);
            }
            state.mapped.range_mut(at..end).for_each(|(_, m)| m.access = (true, access.flags == 3));
            Ok(())
        })
    }
    fn cuPointerGetAttribute(to: *mut c_void, attribute: c_int, at: u64) {
        with_context("cuPointerGetAttribute", |state| {
            let found = state.mapped.range(..=at).next_back().filter(|(first, m)| at - **first < m.len);
            let (first, m) = found.ok_or(INVALID_VALUE)?;
            match attribute {
                2 => put(to.cast(), 2u32),
                8 => put(to.cast(), false),
                9 => put(to.cast(), (m.context - context_of(0)) as c_int),
                11 => put(to.cast(), *first),
                12 => put(to.cast(), m.len as usize),
                _ => Err(INVALID_VALUE),
            }
        })
    }
    fn cuMemGetHandleForAddressRange(to: *mut c_int, at: u64, len: usize, kind: c_int, flags: u64) {
        with_context("cuMemGetHandleForAddressRange", |state| {
            let job = copy(Place::Device(at), Place::Device(at), len);
            let odd = !at.is_multiple_of(4096) || !len.is_multiple_of(4096) || len == 0;
            if odd || state.bad_use(&job, current()).is_some() || kind != 1 || flags != 0 {
                return Err(INVALID_VALUE);
            }
            let file = std::fs::File::open("/dev/null").map_err(|_| NOT_SUPPORTED)?;
            put(to, file.into_raw_fd())
        })
    }
}

fn check_property(state: &mut State, property: *const Property) -> Result {
    if !state.settings.virtual_memory {
        return Err(NOT_SUPPORTED);
    }
    // SAFETY: callers pass a pointer to this structure.
    let Property { kind, handle_types, location, rest } = unsafe { *property };
    // The byte behind that of compression: network cards reach only memory that was allocated so.
    if rest[1].to_le_bytes()[1] != 1 && state.is_whole() {
        state.violation("memory without gpuDirectRDMACapable, which the GPU has".to_owned());
    }
    let is_known = (kind, location.0) == (1, 1) && matches!(handle_types, 0 | 1);
    if is_known { check_device(state, location.1) } else { Err(INVALID_VALUE) }
}

/// The memory of a handle that must not have been released: with one that was, the real driver crashes.
fn live(state: &mut State, handle: u64, what: &str) -> Result<(u64, Memory, u64)> {
    let found = state.handles.get(&handle).cloned();
    found.ok_or_else(|| {
        state.violation(format!("memory {handle:#x} was {what} and does not exist"));
        INVALID_VALUE
    })
}

/// Memory that other processes can have.
fn shareable(len: usize, fill: u8) -> std::io::Result<File> {
    let file = File::from(rustix::fs::memfd_create("fake-cuda", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.set_len(len as u64)?;
    if fill != 0 {
        file.write_all_at(&vec![fill; len], 0)?;
    }
    Ok(file)
}

/// A descriptor from which memory, its device and its length are had, and nothing else: like the real driver's, it is
/// no memfd, cannot be opened anew and has no length. It is a socket in which a message lies that is never taken out.
fn wrap(file: &File, device: u64, len: u64) -> rustix::io::Result<OwnedFd> {
    let (inside, outside) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [file.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let text = format!("fake-cuda {device} {len}");
    sendmsg(&inside, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::empty())?;
    Ok(outside)
}

/// The contents of a descriptor that [`wrap`] has made: the memory, its device and its length.
fn unwrap(fd: BorrowedFd<'_>) -> Option<(File, c_int, u64)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let (mut control, mut text) = (RecvAncillaryBuffer::new(&mut space), [0; 64]);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(fd, &mut [IoSliceMut::new(&mut text)], &mut control, flags).ok()?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })?;
    let words: Vec<&str> = std::str::from_utf8(&text[..got.bytes]).ok()?.split(' ').collect();
    let ["fake-cuda", device, len] = words[..] else { return None };
    Some((file.into(), device.parse().ok()?, len.parse().ok()?))
}

/// Does what a command of [`Fake`] says: a word and numbers.
// SAFETY: no other symbol of a test has this name.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_control(command: *const c_char) -> i64 {
    // SAFETY: `Fake` passes a string.
    let command = unsafe { CStr::from_ptr(command) }.to_string_lossy();
    let answer = control(&mut MODEL.lock(), &command);
    MODEL.notify();
    answer
}

fn control(state: &mut State, command: &str) -> i64 {
    let words: Vec<&str> = command.split(' ').collect();
    let number = |i: usize| words.get(i).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    match words[0] {
        "fail" | "break" => state.fail(words[1], number(2), number(3) as Code, words[0] == "break"),
        "heal" => state.heal(),
        "happened" => return state.faults_happened().into(),
        "memory" => state.settings.memory = number(1),
        "gpus" => state.settings.gpus = number(1) as u32,
        "parts" => state.settings.parts = number(1) > 0,
        "virtual-memory" => state.settings.virtual_memory = number(1) > 0,
        "host-register" => state.settings.host_register = number(1) > 0,
        "read-only-register" => state.settings.read_only_register = number(1) > 0,
        "hold" => state.settings.held = number(1) > 0,
        "lose" => state.settings.lost = number(1),
        "adopt" => {
            let (len, context) = (number(2), context_of(0));
            let mapping = Mapping { len, memory: Memory::default(), access: (true, true), context, outside: true };
            state.mapped.insert(number(1), mapping);
        }
        "disown" => {
            if state.mapped.get(&number(1)).is_some_and(|m| state.is_busy(Place::Device(number(1)), m.len)) {
                state.violation(format!("memory at {:#x} was taken back while a stream used it", number(1)));
            }
            state.mapped.remove(&number(1));
        }
        "copied" => return state.copied as i64,
        "unregistered" => return state.unregistered as i64,
        "link" => state.settings.link = number(1),
        "idle" => state.settings.idle = number(1) > 0,
        "capture" => state.settings.capturing = number(1) > 0,
        "delay" => state.settings.delay = Duration::from_micros(number(1)),
        "calls" => return state.calls.get(words[1]).map_or(0, |n| *n as i64),
        "reset" => {
            // Threads of streams that were left hanging end, since their numbers are never given again.
            *state = state.anew();
        }
        _ => return -1,
    }
    0
}

/// The variable of the environment with commands that the driver begins with, `;` between them.
const SETTINGS: &str = "FAKE_CUDA_SETTINGS";
/// That of the file to which it adds what it has counted when the process ends: a line each, a name and a number.
const COUNTS: &str = "FAKE_CUDA_COUNTS";

// SAFETY: a list of functions of this type, which are called when the process ends.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_THE_END: extern "C" fn() = write_counts;

extern "C" fn write_counts() {
    let Ok(path) = std::env::var(COUNTS) else { return };
    let state = MODEL.lock();
    let bytes = [("copied", state.copied), ("unregistered", state.unregistered)];
    let violations = ("violations", state.violations.len() as u64);
    let calls = state.calls.iter().map(|(name, count)| (&**name, *count));
    let lines: String = bytes.into_iter().chain([violations]).chain(calls).map(|(n, v)| format!("{n} {v}\n")).collect();
    let file = File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(lines.as_bytes())).expect("the counts are written");
}

/// Writes leaks, violations and the names of all calls to `to`: a line each.
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_report(to: *mut c_char, room: usize) -> i64 {
    let mut state = MODEL.lock();
    let leaks = state.leaks();
    let violations = std::mem::take(&mut state.violations);
    let names: Vec<String> = state.calls.keys().cloned().collect();
    let text = format!("{leaks}\n{}\n{}", violations.join("; "), names.join(" "));
    drop(state);
    let room = c_int::try_from(room).unwrap_or(c_int::MAX);
    put_text(to, room, &text).map_or(-1, |()| 0)
}

/// The fake driver as a test sees it: where its library lies, and what it does next.
pub struct Fake {
    // SAFETY: called with a string that lives through the call.
    control: unsafe extern "C" fn(*const c_char) -> i64,
    // SAFETY: called with an array and its length.
    report: unsafe extern "C" fn(*mut c_char, usize) -> i64,
    path: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

/// Observations of the fake driver.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    /// Objects that were created and not destroyed.
    pub leaks: String,
    /// Errors of callers.
    pub violations: String,
    /// The names of all functions that were called.
    pub calls: Vec<String>,
}

impl Fake {
    /// Waits until no other test of this process uses the fake driver, and begins anew: one GPU with 256 MiB.
    ///
    /// # Panics
    /// When the library was not built.
    pub fn turn() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let path = library();
        // SAFETY: the library has no initialisers of its own.
        let loaded = unsafe { libloading::Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // Never unloaded, as the real one.
        let loaded: &'static libloading::Library = Box::leak(Box::new(loaded));
        // SAFETY: the functions above, of this very crate, have these types.
        let (control, report) = unsafe { (loaded.get(b"fake_cuda_control\0"), loaded.get(b"fake_cuda_report\0")) };
        let missing = "the library of this crate has its functions";
        let fake = Self { control: *control.expect(missing), report: *report.expect(missing), path, _turn: turn };
        fake.command("reset");
        fake
    }

    /// The path of the library.
    pub fn path(&self) -> &str {
        self.path.to_str().expect("a path of ASCII letters")
    }

    fn command(&self, command: &str) -> i64 {
        let text = CString::new(command).expect("no zeroes");
        // SAFETY: a string that lives through the call.
        let done = unsafe { (self.control)(text.as_ptr()) };
        assert!(done >= 0, "the fake driver does not know {command:?}");
        done
    }

    /// Makes the n-th call of a function from now on fail.
    pub fn fail(&self, call: &str, nth: u64, code: u32) {
        self.command(&format!("fail {call} {nth} {code}"));
    }

    /// The same, and all calls after it: the context is broken, and streams do nothing more.
    pub fn fail_for_good(&self, call: &str, nth: u64, code: u32) {
        self.command(&format!("break {call} {nth} {code}"));
    }

    /// Lets all calls work again.
    pub fn heal(&self) {
        self.command("heal");
    }

    /// True when every call that was to fail has failed.
    pub fn has_failed(&self) -> bool {
        self.command("happened") == 1
    }

    /// How often a function was called.
    pub fn calls(&self, call: &str) -> u64 {
        self.command(&format!("calls {call}")) as u64
    }

    /// Bytes that were copied from host memory.
    pub fn copied(&self) -> u64 {
        self.command("copied") as u64
    }

    /// Bytes of copies that were asked for from and to host memory that is not registered.
    pub fn unregistered(&self) -> u64 {
        self.command("unregistered") as u64
    }

    /// Changes the GPU, before it is opened: `memory` in bytes, `gpus`; `virtual-memory` and `host-register`: 0 or 1.
    /// At any time: `link`, the bytes a second that copies from and to the host move, 0 for no limit; `idle`, 1 for
    /// copies that take their time and move nothing.
    pub fn set(&self, what: &str, to: u64) {
        self.command(&format!("{what} {to}"));
    }

    /// Does not make the n-th copy from now on, which ends like others.
    pub fn lose(&self, nth: u64) {
        self.command(&format!("lose {nth}"));
    }

    /// Lets streams do nothing, or go on.
    pub fn hold(&self, hold: bool) {
        self.command(&format!("hold {}", u8::from(hold)));
    }

    /// Takes the driver's observations since the last call; waits for threads of streams that are ending.
    pub fn seen(&self) -> Seen {
        let mut text = vec![0u8; 1 << 20];
        // SAFETY: an array of that many characters.
        unsafe { (self.report)(text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).expect("ends with a zero").to_string_lossy().into_owned();
        let mut lines = text.split('\n');
        let mut line = || lines.next().unwrap_or_default().to_owned();
        let (leaks, violations, calls) = (line(), line(), line());
        Seen { leaks, violations, calls: calls.split_whitespace().map(str::to_owned).collect() }
    }

    /// Fails unless nothing was done wrong and nothing is left.
    ///
    /// # Panics
    /// Then.
    pub fn assert_clean(&self, when: &str) {
        let Seen { leaks, violations, .. } = self.seen();
        assert!(leaks.is_empty() && violations.is_empty(), "{when}: left are {leaks:?}; violations: {violations:?}");
    }
}

/// The library that cargo builds beside the tests.
///
/// # Panics
/// When it was not built.
pub fn library() -> PathBuf {
    let name = "libdmalane_fake_cuda";
    // By the name that it was started with: `scripts/mesa` starts it through another loader of libraries.
    let exe = std::env::args_os().next().and_then(|name| std::path::absolute(name).ok()).expect("a test is a file");
    let folder = exe.parent().expect("in a folder");
    let mut found: Vec<_> = [folder.to_owned(), folder.join("deps")]
        .iter()
        .filter_map(|folder| folder.read_dir().ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "so"))
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(name)))
        .collect();
    // The one that was built last, if there are several.
    found.sort_by_key(|path| path.metadata().and_then(|m| m.modified()).ok());
    let missing = || panic!("no {name}.so in {}", folder.display());
    found.pop().unwrap_or_else(missing)
}
