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
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use dmalane_vm::Errno;

use crate::objects::{self, Callback, Callbacks, Refused, call};
use crate::types::*;
use crate::{buffers, models, targets};

/// The version of what the header describes.
pub const DML_ABI_VERSION: u32 = 1;

/// Bytes of an operation without rows and value: what a stride has at least.
const SHORTEST: usize = offset_of!(DmlTargetOp, value);

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

/// Writes a text and a zero to memory of C, cut to `size` bytes, and returns what the text is the name of.
///
/// # Safety
/// `to` is null, or there is room for `size` bytes that nobody else uses during the call.
unsafe fn put_text<T>(to: *mut c_char, size: usize, text: &str, of: T) -> T {
    if to.is_null() || size == 0 {
        return of;
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
    of
}

/// Writes what `make` returns to memory of C; where it fails, `none` stays there.
///
/// # Safety
/// As for [`put`].
unsafe fn give<T>(to: *mut T, none: T, make: impl FnOnce() -> Result<T, Refused>) -> Result<(), Refused> {
    // SAFETY: of the caller.
    unsafe { put(to, none)? };
    let made = make()?;
    // SAFETY: of the caller. Were it refused here, it would have been above.
    unsafe { put(to, made) }
}

/// As [`give`], two values of one call.
///
/// # Safety
/// As for [`put`].
unsafe fn give_both<A, B>(
    (to, and): (*mut A, *mut B),
    (none, nothing): (A, B),
    make: impl FnOnce() -> Result<(A, B), Refused>,
) -> Result<(), Refused> {
    // SAFETY: of the caller.
    unsafe { put(to, none)? };
    // SAFETY: of the caller.
    unsafe { give(and, nothing, || make().and_then(|(first, second)| put(to, first).map(|()| second))) }
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

/// The bytes of `count` structures of C's, `stride` apart.
///
/// # Safety
/// `at` is null, or there are `count` strides that are not written to while the slice is in use.
unsafe fn strides<'a>(at: *const c_void, stride: usize, count: usize) -> Result<&'a [u8], Refused> {
    // An array that is longer than memory is told from one that is not there.
    let len = count.checked_mul(stride).ok_or_else(|| fault(format_args!("{count} times {stride} bytes")))?;
    // SAFETY: of the caller.
    unsafe { bytes(at, len) }
}

/// An array of C's.
///
/// # Safety
/// As for [`strides`], while the iterator is in use. `T` is a number, a pointer, or a structure of the header of such.
unsafe fn array<'a, T: Copy + 'a>(
    at: *const T,
    count: usize,
) -> Result<impl ExactSizeIterator<Item = T> + 'a, Refused> {
    // SAFETY: of the caller.
    let bytes = unsafe { strides(at.cast(), size_of::<T>(), count)? };
    // SAFETY: each chunk has the bytes of a `T`, for which any bits are right, as the caller says.
    Ok(bytes.chunks_exact(size_of::<T>()).map(|one| unsafe { one.as_ptr().cast::<T>().read_unaligned() }))
}

/// An operation from its bytes, at least [`SHORTEST`]; what is not there is 0.
fn target_op(bytes: &[u8]) -> Result<DmlTargetOp, Refused> {
    let (known, unknown) = bytes.split_at(bytes.len().min(size_of::<DmlTargetOp>()));
    if unknown.iter().any(|b| *b != 0) {
        return Err(refused(Errno::TooBig, "fields of an operation that this version does not know"));
    }
    let mut operation = DmlTargetOp::default();
    // SAFETY: `known` is at most as long as the operation, which has numbers alone: any bits are right for them.
    unsafe { (&raw mut operation).cast::<u8>().copy_from_nonoverlapping(known.as_ptr(), known.len()) };
    Ok(operation)
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
        unsafe { give(device, 0, || Ok(objects::create_device())) }
    }

    /// Destroys a device. Its VMs exist until they are destroyed.
    fn dml_device_destroy(device: u64) {
        objects::destroy_device(device)
    }

    /// Creates a buffer object of `count` segments.
    fn dml_bo_create(device: u64, segments: *const DmlSegment, count: usize, handle: *mut u32) {
        // SAFETY: the contract of the function: `count` segments are there.
        unsafe { give(handle, 0, || objects::create_bo(device, array(segments, count)?)) }
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
        let make = || {
            // SAFETY: the contract of the function; the header says that `size` is the first field.
            let c = unsafe { self::config(config)? };
            // SAFETY: the contract of the function: the text stays as it is during the call.
            let format = unsafe { text(c.format)? };
            let user = c.user.expose_provenance(); // a number, so that it may go from thread to thread
            let callback = |function: Function| -> Callback {
                Arc::new(move |va, len| function(std::ptr::with_exposed_provenance_mut(user), va.bits(), len))
            };
            let tell = Callbacks { invalidate: c.invalidate.map(callback), prefetch: c.prefetch.map(callback) };
            objects::create_vm(device, format, &c, tell)
        };
        // SAFETY: the contract of the function.
        unsafe { give(vm, 0, make) }
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
        // SAFETY: the contract of the function: `count` strides are there.
        objects::bind(vm, unsafe { strides(operations, stride, count)? }, stride, count, false)
    }

    /// As `dml_vm_bind`, for the driver itself: within the reserved part.
    fn dml_vm_bind_reserved(vm: u64, operations: *const c_void, stride: usize, count: usize) {
        // SAFETY: the contract of the function: `count` strides are there.
        objects::bind(vm, unsafe { strides(operations, stride, count)? }, stride, count, true)
    }

    /// Makes larger leaves where what is bound continues.
    fn dml_vm_merge(vm: u64, va: u64, len: u64) {
        objects::merge(vm, va, len)
    }

    /// Counts the bytes of a buffer object that are bound in a VM.
    fn dml_bo_bound_bytes(vm: u64, handle: u32, count: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { give(count, 0, || objects::bound_bytes(vm, handle)) }
    }

    /// In how many VMs a buffer object is bound.
    fn dml_bo_bindings(device: u64, handle: u32, count: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { give(count, 0, || objects::bound_vms(device, handle)) }
    }

    /// Where an address leads.
    fn dml_vm_lookup(vm: u64, va: u64, leaf: *mut DmlLeaf) {
        // SAFETY: the contract of the function.
        unsafe { give(leaf, DmlLeaf::default(), || objects::lookup(vm, va)) }
    }

    /// Allocates a buffer and reads a file into it while it is being allocated.
    fn dml_alloc_and_read(fd: i32, config: *const DmlReadConfig, buffer: *mut u64, filled: *mut DmlFilled) {
        // SAFETY: the contract of the function; the header says that `size` is the first field, and that the file is
        // open and stays so during the call.
        let make = || unsafe { buffers::alloc_and_read(file(fd)?, &self::config(config)?) };
        // SAFETY: the contract of the function.
        unsafe { give_both((buffer, filled), (0, NOTHING), make) }
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
        let request = unsafe { self::config(config)? };
        // SAFETY: the contract of the function: `count` ranges are there.
        let ranges = unsafe { array(ranges, count)? };
        // SAFETY: the header says that each is open and stays so during the call.
        let ranges = ranges.map(|range| unsafe { file(range.fd) }.map(|file| (file, range)));
        let made = buffers::read_ranges(&ranges.collect::<Result<Vec<_>, _>>()?, &request, buffer_count)?;
        for (i, (number, made)) in made.into_iter().enumerate() {
            // SAFETY: the contract of the function.
            unsafe { put(place(filled, i), made)? };
            // SAFETY: the contract of the function.
            unsafe { put(place(buffers, i), number)? };
        }
        Ok(())
    }

    /// A descriptor of the memory of a buffer, for another process or driver.
    fn dml_buffer_export(buffer: u64, fd: *mut i32) {
        // SAFETY: the contract of the function.
        unsafe { give(fd, -1, || buffers::export(buffer).map(IntoRawFd::into_raw_fd)) }
    }

    /// A dma-buf of the memory of a buffer, for another driver.
    fn dml_buffer_export_dma_buf(buffer: u64, fd: *mut i32) {
        // SAFETY: the contract of the function.
        unsafe { give(fd, -1, || buffers::export_dma_buf(buffer).map(IntoRawFd::into_raw_fd)) }
    }

    /// Frees a buffer; its bytes are gone.
    fn dml_buffer_destroy(buffer: u64) {
        buffers::destroy(buffer)
    }

    /// Opens a device by name.
    fn dml_target_open(name: *const c_char, target: *mut u64) {
        // SAFETY: the contract of the function: the text stays as it is during the call.
        unsafe { give(target, 0, || targets::open(text(name)?)) }
    }

    /// Properties of a device.
    fn dml_target_info(target: u64, info: *mut DmlTargetInfo) {
        // SAFETY: the contract of the function.
        unsafe { give(info, DmlTargetInfo::default(), || targets::info(target)) }
    }

    /// Closes a device.
    fn dml_target_close(target: u64) {
        targets::close(target)
    }

    /// Allocates host memory and registers it with a device.
    fn dml_memory_create(target: u64, len: u64, memory: *mut u64, data: *mut *mut c_void) {
        // SAFETY: the contract of the function.
        unsafe { give_both((memory, data), (0, null_mut()), || targets::create_memory(target, len)) }
    }

    /// Registers a buffer that was read from a file with a device.
    fn dml_memory_register(target: u64, buffer: u64, memory: *mut u64, data: *mut *mut c_void) {
        // SAFETY: the contract of the function.
        unsafe { give_both((memory, data), (0, null_mut()), || targets::register_buffer(target, buffer)) }
    }

    /// Deregisters host memory and frees it.
    fn dml_memory_destroy(memory: u64) {
        targets::destroy_memory(memory)
    }

    /// Allocates device memory.
    fn dml_target_allocate(target: u64, len: u64, placement: *const c_char, handle: *mut u32) {
        // SAFETY: the contract of the function: the text stays as it is during the call.
        unsafe { give(handle, 0, || targets::allocate(target, len, optional(placement)?)) }
    }

    /// Frees device memory.
    fn dml_target_free(target: u64, handle: u32) {
        targets::free(target, handle)
    }

    /// Reserves device virtual addresses for device memory.
    fn dml_target_reserve(target: u64, handle: u32, len: u64, va: *mut u64, reserved: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { give_both((va, reserved), (0, 0), || targets::reserve(target, handle, len)) }
    }

    /// Unbinds what is bound in a reserved range, and gives the range back.
    fn dml_target_release(target: u64, va: u64) {
        targets::release(target, va)
    }

    /// Applies `count` operations, `stride` bytes apart, in the address space of a device.
    fn dml_target_bind(target: u64, operations: *const c_void, stride: usize, count: usize) {
        // SAFETY: the contract of the function: `count` strides are there.
        targets::bind(target, unsafe { strides(operations, stride, count)? }, stride, count)
    }

    /// Submits `count` operations, `stride` bytes apart, until one is refused.
    fn dml_target_submit(target: u64, operations: *const c_void, stride: usize, count: usize, accepted: *mut usize) {
        // SAFETY: the contract of the function.
        unsafe { put(accepted, 0)? };
        if count > 0 && stride < SHORTEST {
            return Err(refused(Errno::Inval, format_args!("a stride of {stride} bytes, below {SHORTEST}")));
        }
        // SAFETY: the contract of the function: `count` strides are there.
        let bytes = unsafe { strides(operations, stride, count)? };
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
        let result = targets::poll(target, capacity, Duration::from_millis(timeout_ms), &mut |ended, text| {
            failed = text.or_else(|| failed.take());
            // SAFETY: below `capacity`, as `poll` says, so within the room of the contract.
            unsafe { put(done.add(n), ended)? };
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
        // SAFETY: the contract of the function: the texts stay as they are during the call.
        unsafe { give(load, 0, || targets::load(target, text(path)?, optional(placement)?, flags)) }
    }

    /// A tensor of a load, in the order of the file.
    fn dml_load_tensor(load: u64, index: u64, tensor: *mut DmlTensor, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        let called = |(found, called): (_, String)| unsafe { put_text(name, size, &called, found) };
        // SAFETY: the contract of the function.
        unsafe { give(tensor, DmlTensor::default(), || targets::tensor(load, None, index).map(called)) }
    }

    /// Attaches to a model that is kept in memory of a device.
    fn dml_target_attach(target: u64, name: *const c_char, flags: u32, load: *mut u64) {
        // SAFETY: the contract of the function: the text stays as it is during the call.
        unsafe { give(load, 0, || targets::attach(target, text(name)?, flags)) }
    }

    /// Type and shape of a tensor of a load, in the order of the file.
    fn dml_load_type(load: u64, index: u64, tensor: *mut DmlModelTensor, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        let called = |(found, called): (_, String)| unsafe { put_text(name, size, &called, found) };
        // SAFETY: the contract of the function.
        unsafe { give(tensor, DmlModelTensor::default(), || targets::describe(load, index).map(called)) }
    }

    /// The tensor of this name of a load.
    fn dml_load_find(load: u64, name: *const c_char, tensor: *mut DmlTensor) {
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let find = || unsafe { targets::tensor(load, Some(text(name)?), 0) };
        // SAFETY: the contract of the function.
        unsafe { give(tensor, DmlTensor::default(), || find().map(|(found, _)| found)) }
    }

    /// Opens files of tensors.
    fn dml_model_open(
        paths: *const *const c_char,
        count: usize,
        config: *const DmlModelConfig,
        model: *mut u64,
    ) {
        let open = || {
            // SAFETY: the contract of the function; the header says that `size` is the first field.
            let config = unsafe { self::config(config)? };
            // SAFETY: the contract of the function: `count` pointers are there, each null or that of a text that stays
            // as it is during the call.
            let paths = unsafe { array(paths, count)?.map(|path| text(path)).collect::<Result<Vec<_>, _>>()? };
            models::open(&paths, &config)
        };
        // SAFETY: the contract of the function.
        unsafe { give(model, 0, open) }
    }

    /// A tensor of a model, in the order of the files and of the bytes in them.
    fn dml_model_tensor(model: u64, index: u64, tensor: *mut DmlModelTensor, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        let called = |(found, called): (_, String)| unsafe { put_text(name, size, &called, found) };
        // SAFETY: the contract of the function.
        unsafe { give(tensor, DmlModelTensor::default(), || models::describe(model, index).map(called)) }
    }

    /// Reads a tensor of a model.
    fn dml_model_read(model: u64, name: *const c_char, tensor: *mut u64, filled: *mut DmlFilled) {
        // SAFETY: the contract of the function: the text stays as it is during the call.
        let read = || unsafe { models::read(model, text(name)?, None) };
        // SAFETY: the contract of the function.
        unsafe { give_both((tensor, filled), (0, NOTHING), read) }
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
        let read = || {
            // SAFETY: the contract of the function: `count` slices are there.
            let slices = unsafe { array(slices, count)? };
            let ranges: Vec<_> = slices.map(|slice| slice.start..slice.stop).collect();
            // SAFETY: the contract of the function: the text stays as it is during the call.
            models::read(model, unsafe { text(name)? }, Some(&ranges))
        };
        // SAFETY: the contract of the function.
        unsafe { give_both((tensor, filled), (0, NOTHING), read) }
    }

    /// Begins to read all tensors of a model.
    fn dml_model_stream(model: u64, stream: *mut u64) {
        // SAFETY: the contract of the function.
        unsafe { give(stream, 0, || models::stream(model)) }
    }

    /// The next tensor of a stream.
    fn dml_stream_next(stream: u64, tensor: *mut u64, filled: *mut DmlFilled, name: *mut c_char, size: usize) {
        // SAFETY: the contract of the function.
        let called = |(called, found): (String, _)| unsafe { put_text(name, size, &called, found) };
        // SAFETY: the contract of the function.
        unsafe { give_both((tensor, filled), (0, NOTHING), || models::next(stream).map(called)) }
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
        // SAFETY: the contract of the function: the text stays as it is during the call.
        unsafe { give(load, 0, || targets::load_open(target, model, optional(placement)?, flags)) }
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
                // SAFETY: below `capacity`, checked above, so within the room of the contract.
                result = unsafe { put(place(runs, n), run) };
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

/// The name of an error number, positive or negative: "EINVAL"; "" for one that Linux does not have. It stays valid.
// SAFETY: all names begin with `dml_`, which is ours; the linker would refuse two of one.
#[unsafe(no_mangle)]
pub extern "C" fn dml_error_name(number: i32) -> *const c_char {
    objects::name(number).as_ptr().cast()
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
        unsafe { put_text(text, size, last, last.len()) }
    })
}
