//! Calls of the CUDA driver, and the objects that they make, which own what the GPU uses.
//!
//! Three rules make the calls sound. Function types are those of `cuda.h` (CUDA 11.2 to 13), and the library is never
//! unloaded. A [`Stream`] owns each [`Operation`] from [`Stream::begin`] until the driver has confirmed that everything
//! before it on the stream has ended; what it cannot confirm is never freed. A copy names device memory only inside
//! ranges that this process has mapped through the same [`Context`] ([`Context::check`]), since the driver also takes
//! addresses of pinned host memory; such a range is unmapped only after all streams of the context have ended.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ushort, c_void};
use std::num::NonZeroUsize;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use dmalane_addr::{CardAddr, DeviceVa};
use dmalane_dma::{BufferRef, DriverMemory};
use dmalane_queue::{Completion, DeviceAddr, Direction, OpError, Operation, QueueAddr, Refusal, Ticket};
use libloading::Library;

use crate::error::NOT_READY;
use crate::{Error, LIBRARY, LIBRARY_VARIABLE};

type Code = c_uint;
/// A `CUcontext`, `CUstream` or `CUevent`.
type Handle = *mut c_void;
/// A `CUdeviceptr`.
type Pointer = u64;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProp {
    /// 1: pinned.
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    compression: c_uchar,
    rdma: c_uchar,
    usage: c_ushort,
    reserved: [c_uchar; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDesc {
    location: Location,
    /// 1: read, 3: read and write.
    flags: c_int,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2D {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

/// One side of a `CUDA_MEMCPY2D`.
#[repr(C)]
struct Side {
    x: usize,
    y: usize,
    /// 1: host, 2: device.
    kind: c_uint,
    host: *mut c_void,
    device: Pointer,
    array: Handle,
    pitch: usize,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Default)]
struct CopyAttributes {
    /// 1: in stream order.
    order: c_int,
    from: Location,
    to: Location,
    flags: c_uint,
}

macro_rules! calls {
    (
        needed { $($name:ident = $symbol:literal ($($arg:ty),*);)* }
        optional { $($may:ident = $may_symbol:literal ($($may_arg:ty),*);)* }
    ) => {
        /// The functions of the driver.
        struct Calls {
            // SAFETY: called by `call!` and `may_call!` only, which say why the arguments are right.
            $($name: unsafe extern "C" fn($($arg),*) -> Code,)*
            // SAFETY: as above.
            $($may: Option<unsafe extern "C" fn($($may_arg),*) -> Code>,)*
        }

        impl Calls {
            fn of(library: &Library, named: &str) -> Result<Self, Error> {
                Ok(Self {
                    // SAFETY: the type is that of the function in `cuda.h`; symbols are versioned by their names.
                    $($name: unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map(|f| *f).map_err(|_| {
                        Error::Symbol { library: named.to_owned(), symbol: $symbol }
                    })?,)*
                    // SAFETY: as above.
                    $($may: unsafe { library.get(concat!($may_symbol, "\0").as_bytes()) }.map(|f| *f).ok(),)*
                })
            }
        }

        /// The names of the functions, for errors.
        #[allow(non_upper_case_globals, dead_code)]
        mod name {
            $(pub(super) const $name: &str = $symbol;)*
            $(pub(super) const $may: &str = $may_symbol;)*
        }
    };
}

calls! {
    needed {
        error_name = "cuGetErrorName" (Code, *mut *const c_char);
        error_string = "cuGetErrorString" (Code, *mut *const c_char);
        init = "cuInit" (c_uint);
        driver_version = "cuDriverGetVersion" (*mut c_int);
        device_count = "cuDeviceGetCount" (*mut c_int);
        device = "cuDeviceGet" (*mut c_int, c_int);
        device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
        device_uuid = "cuDeviceGetUuid" (*mut [c_uchar; 16], c_int);
        device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
        device_pci = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
        retain = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
        release = "cuDevicePrimaryCtxRelease_v2" (c_int);
        push = "cuCtxPushCurrent_v2" (Handle);
        pop = "cuCtxPopCurrent_v2" (*mut Handle);
        memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        alloc = "cuMemAlloc_v2" (*mut Pointer, usize);
        free = "cuMemFree_v2" (Pointer);
        host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        host_unregister = "cuMemHostUnregister" (*mut c_void);
        host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_free = "cuMemFreeHost" (*mut c_void);
        to_device = "cuMemcpyHtoDAsync_v2" (Pointer, *const c_void, usize, Handle);
        to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, Pointer, usize, Handle);
        within = "cuMemcpyDtoDAsync_v2" (Pointer, Pointer, usize, Handle);
        copy_2d = "cuMemcpy2DAsync_v2" (*const Copy2D, Handle);
        set_8 = "cuMemsetD8Async" (Pointer, c_uchar, usize, Handle);
        set_32 = "cuMemsetD32Async" (Pointer, c_uint, usize, Handle);
        set_2d_8 = "cuMemsetD2D8Async" (Pointer, usize, c_uchar, usize, usize, Handle);
        set_2d_32 = "cuMemsetD2D32Async" (Pointer, usize, c_uint, usize, usize, Handle);
        stream_create = "cuStreamCreate" (*mut Handle, c_uint);
        stream_destroy = "cuStreamDestroy_v2" (Handle);
        stream_synchronize = "cuStreamSynchronize" (Handle);
        stream_query = "cuStreamQuery" (Handle);
        stream_wait = "cuStreamWaitEvent" (Handle, Handle, c_uint);
        event_create = "cuEventCreate" (*mut Handle, c_uint);
        event_destroy = "cuEventDestroy_v2" (Handle);
        event_record = "cuEventRecord" (Handle, Handle);
        event_query = "cuEventQuery" (Handle);
    }
    optional {
        granularity = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, c_int);
        address_reserve = "cuMemAddressReserve" (*mut Pointer, usize, usize, Pointer, u64);
        address_free = "cuMemAddressFree" (Pointer, usize);
        create = "cuMemCreate" (*mut u64, usize, *const AllocationProp, u64);
        release_memory = "cuMemRelease" (u64);
        map = "cuMemMap" (Pointer, usize, usize, u64, u64);
        unmap = "cuMemUnmap" (Pointer, usize);
        set_access = "cuMemSetAccess" (Pointer, usize, *const AccessDesc, usize);
        range_handle = "cuMemGetHandleForAddressRange" (*mut c_void, Pointer, usize, c_int, u64);
        batch = "cuMemcpyBatchAsync_v2"
            (*const Pointer, *const Pointer, *const usize, usize, *const CopyAttributes, *const usize, usize, Handle);
        batch_with_index = "cuMemcpyBatchAsync"
            (*const Pointer, *const Pointer, *const usize, usize, *const CopyAttributes, *const usize, usize,
             *mut usize, Handle);
    }
}

/// Calls a function of the driver: `call!(driver.name(arguments))`; its error names the function.
macro_rules! call {
    ($driver:ident . $name:ident ($($arg:expr),*)) => {
        // SAFETY: pointers among the arguments are to variables that outlive the call; handles are live, since the
        // objects here that own them pass them (see the rules at the top of the file).
        $driver.check(name::$name, unsafe { ($driver.calls.$name)($($arg),*) })
    };
}

/// As [`call!`], for a function that the driver may not have.
macro_rules! may_call {
    ($driver:ident . $name:ident ($($arg:expr),*)) => {
        match $driver.calls.$name {
            // SAFETY: as in `call!`.
            Some(function) => $driver.check(name::$name, unsafe { function($($arg),*) }),
            None => Err(Error::Symbol { library: $driver.library.clone(), symbol: name::$name }),
        }
    };
}

/// The driver: a loaded library.
pub(crate) struct Driver {
    calls: Calls,
    library: String,
    /// Host memory that is registered, by address; all contexts of the process see the same.
    registered: Mutex<BTreeMap<usize, Registration>>,
}

/// Host memory that the driver has pinned.
struct Registration {
    len: usize,
    users: usize,
    /// In which it was registered.
    context: Arc<Context>,
}

/// Properties of a GPU that the driver reports without a context on it.
pub(crate) struct Properties {
    pub(crate) device: c_int,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    pub(crate) pci: String,
    pub(crate) memory: u64,
    pub(crate) driver_version: i32,
}

/// Attributes of a GPU (`CUdevice_attribute`).
#[derive(Clone, Copy)]
pub(crate) enum Attribute {
    /// The longest pitch of a two-dimensional copy.
    MaxPitch = 11,
    CopyEngines = 40,
    HostRegister = 99,
    VirtualMemory = 102,
    RdmaWithVirtualMemory = 110,
    DmaBuf = 124,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver {
    /// The driver in this library; `None` for the one of [`LIBRARY_VARIABLE`], else [`LIBRARY`]. A library is loaded
    /// once and stays.
    pub(crate) fn open(library: Option<&str>) -> Result<&'static Self, Error> {
        static LOADED: Mutex<Vec<&'static Driver>> = Mutex::new(Vec::new());
        let named = || std::env::var(LIBRARY_VARIABLE).ok().filter(|path| !path.is_empty());
        let library = library.map(str::to_owned).or_else(named).unwrap_or_else(|| LIBRARY.to_owned());
        let mut loaded = lock(&LOADED);
        let known = loaded.iter().find(|driver| driver.library == library).copied();
        let driver = match known {
            Some(driver) => driver,
            None => {
                // SAFETY: the initialisers of the driver's library are run, as in every program that is linked with it;
                // a library that the user names instead is trusted as a preloaded one is.
                let loading = unsafe { Library::new(&library) };
                let file = loading.map_err(|e| Error::Library { library: library.clone(), why: e.to_string() })?;
                // Never unloaded: the driver has threads of its own.
                let file: &'static Library = Box::leak(Box::new(file));
                let calls = Calls::of(file, &library)?;
                let driver: &'static Self = Box::leak(Box::new(Self { calls, library, registered: Mutex::default() }));
                loaded.push(driver);
                driver
            }
        };
        drop(loaded);
        call!(driver.init(0))?;
        Ok(driver)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: called below, with pointers to variables.
        let text = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = ptr::null();
            // SAFETY: the driver stores a pointer to a constant string, or null for a code that it does not know.
            let known = unsafe { function(code, &raw mut text) } == 0 && !text.is_null();
            // SAFETY: such a string.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.calls.error_name).unwrap_or_else(|| "unknown".to_owned());
        let text = text(self.calls.error_string).unwrap_or_else(|| "unknown error".to_owned());
        Err(Error::Call { call, code, name, text })
    }

    /// The number of GPUs.
    pub(crate) fn count(&self) -> Result<u32, Error> {
        let mut count = 0;
        call!(self.device_count(&raw mut count))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Reads the properties of a GPU.
    pub(crate) fn properties(&self, number: u32) -> Result<Properties, Error> {
        let (mut device, mut version, mut memory) = (0, 0, 0usize);
        call!(self.device(&raw mut device, c_int::try_from(number).unwrap_or(c_int::MAX)))?;
        call!(self.driver_version(&raw mut version))?;
        call!(self.device_memory(&raw mut memory, device))?;
        let mut uuid = [0; 16];
        call!(self.device_uuid(&raw mut uuid, device))?;
        let mut text: [c_char; 256] = [0; 256];
        call!(self.device_name(text.as_mut_ptr(), 256, device))?;
        let name = string(&text);
        call!(self.device_pci(text.as_mut_ptr(), 256, device))?;
        Ok(Properties { device, name, uuid, pci: string(&text), memory: memory as u64, driver_version: version })
    }

    /// An attribute of a GPU; 0 when the driver does not know it.
    pub(crate) fn attribute(&self, device: c_int, attribute: Attribute) -> i32 {
        let mut value = 0;
        call!(self.device_attribute(&raw mut value, attribute as c_int, device)).map_or(0, |()| value)
    }

    /// True when the driver has the functions of virtual memory.
    pub(crate) fn has_virtual_memory(&self) -> bool {
        let c = &self.calls;
        let all = [c.granularity.is_some(), c.address_reserve.is_some(), c.address_free.is_some(), c.create.is_some()];
        let more = [c.release_memory.is_some(), c.map.is_some(), c.unmap.is_some(), c.set_access.is_some()];
        all.into_iter().chain(more).all(|has| has)
    }

    /// True when the driver has the function that exports memory.
    pub(crate) fn has_dma_buf(&self) -> bool {
        self.calls.range_handle.is_some()
    }

    /// True when many copies can be given to the driver in one call.
    pub(crate) fn has_batches(&self) -> bool {
        self.calls.batch.is_some() || self.calls.batch_with_index.is_some()
    }
}

fn string(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The primary context of a GPU, which all users of the GPU in this process share.
pub(crate) struct Context {
    driver: &'static Driver,
    device: c_int,
    raw: RawHandle,
    /// Streams that may use what is mapped.
    streams: Mutex<Vec<RawHandle>>,
    mapped: RwLock<Mapped>,
    /// Set for good when a call says that the context is broken.
    broken: AtomicBool,
}

/// A handle of the driver; the driver may be called with it from every thread.
#[derive(Clone, Copy, PartialEq)]
struct RawHandle(Handle);
// SAFETY: the driver's functions are thread-safe, and the handle itself is only a number here.
unsafe impl Send for RawHandle {}
// SAFETY: as above.
unsafe impl Sync for RawHandle {}

/// Ranges of device addresses that may be used, by their first; no two overlap.
type Mapped = BTreeMap<u64, Range>;

/// A range of device addresses and its mapping.
struct Range {
    len: u64,
    kind: RangeKind,
    writable: bool,
    /// The memory, in chunks of `chunk` bytes; empty where the range does not own it.
    handles: Vec<u64>,
    chunk: u64,
    /// It was to be unmapped, and streams did not say that they had ended: nothing may use it any more.
    closed: bool,
}

/// Purpose of a range of device addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RangeKind {
    /// Memory that was allocated.
    Memory,
    /// Memory that is seen at another address, too.
    Bound,
}

/// Keeps the context current on this thread.
struct Current<'a>(&'a Context);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let (driver, mut raw) = (self.0.driver, ptr::null_mut());
        // A context that was pushed can be popped.
        let _ = call!(driver.pop(&raw mut raw));
    }
}

impl Context {
    /// Retains the primary context.
    pub(crate) fn new(driver: &'static Driver, device: c_int) -> Result<Arc<Self>, Error> {
        let mut raw = ptr::null_mut();
        call!(driver.retain(&raw mut raw, device))?;
        Ok(Arc::new(Self {
            driver,
            device,
            raw: RawHandle(raw),
            streams: Mutex::default(),
            mapped: RwLock::default(),
            broken: AtomicBool::new(false),
        }))
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn device(&self) -> c_int {
        self.device
    }

    fn current(&self) -> Result<Current<'_>, Error> {
        let driver = self.driver;
        call!(driver.push(self.raw.0))?;
        Ok(Current(self))
    }

    /// As [`Context::current`], tried twice: to leave something behind is worse.
    fn current_to_undo(&self) -> Result<Current<'_>, Error> {
        self.current().or_else(|_| self.current())
    }

    /// Remembers an error that breaks the context.
    fn note<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result
            && e.is_fatal()
        {
            self.broken.store(true, Ordering::Release);
        }
        result
    }

    fn mapped(&self) -> RwLockReadGuard<'_, Mapped> {
        self.mapped.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn mapped_mut(&self) -> RwLockWriteGuard<'_, Mapped> {
        self.mapped.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free and total memory, in bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let (mut free, mut total) = (0usize, 0usize);
        call!(driver.memory_info(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    fn property(&self) -> AllocationProp {
        AllocationProp {
            kind: 1,
            handle_types: 0,
            location: Location { kind: ON_DEVICE, id: self.device },
            win32: ptr::null_mut(),
            compression: 0,
            // Without it network cards cannot reach the memory.
            rdma: u8::from(self.driver.attribute(self.device, Attribute::RdmaWithVirtualMemory) == 1),
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Bytes that allocations and mappings are multiples of.
    pub(crate) fn granularity(&self) -> Result<u64, Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let (mut bytes, property) = (0usize, self.property());
        // 0: the smallest.
        may_call!(driver.granularity(&raw mut bytes, &raw const property, 0))?;
        Ok(bytes as u64)
    }

    /// Allocates plain memory.
    fn allocate(self: &Arc<Self>, len: u64) -> Result<u64, Error> {
        let (driver, _current) = (self.driver, self.current()?);
        let mut at = 0;
        call!(driver.alloc(&raw mut at, len as usize))?;
        Ok(at)
    }

    /// Allocates memory in chunks of `chunk` bytes and maps it at an address of a [`Window`] of this context. Both
    /// lengths are multiples of the granularity, and `len` of `chunk`.
    fn map_new(&self, at: u64, len: u64, chunk: u64) -> Result<(), Error> {
        let mut mapped = self.mapped_mut();
        if overlaps(&mapped, at, len) {
            return Err(Error::Memory(format!("memory at {at:#x} is allocated already")));
        }
        let (driver, _current) = (self.driver, self.current()?);
        let property = self.property();
        let mut handles = Vec::new();
        let mut make = || {
            for i in 0..len / chunk {
                let mut handle = 0;
                may_call!(driver.create(&raw mut handle, chunk as usize, &raw const property, 0))?;
                handles.push(handle);
                may_call!(driver.map(at + i * chunk, chunk as usize, 0, handle, 0))?;
            }
            self.set_access(at, len, true)
        };
        if let Err(e) = self.note(make()) {
            // Steps that cannot be undone after an error stay with the driver.
            if !handles.is_empty() {
                let _ = may_call!(driver.unmap(at, (handles.len() as u64 * chunk) as usize));
            }
            handles.into_iter().for_each(|handle| drop(may_call!(driver.release_memory(handle))));
            return Err(e);
        }
        mapped.insert(at, Range { len, kind: RangeKind::Memory, writable: true, handles, chunk, closed: false });
        Ok(())
    }

    fn set_access(&self, at: u64, len: u64, writable: bool) -> Result<(), Error> {
        let driver = self.driver;
        let location = Location { kind: ON_DEVICE, id: self.device };
        let access = AccessDesc { location, flags: if writable { 3 } else { 1 } };
        may_call!(driver.set_access(at, len as usize, &raw const access, 1))
    }

    /// Maps memory that was allocated at `from`, whole chunks of it, at `at`, too, which lies in a [`Window`] of this
    /// context; nothing is mapped there.
    fn map_again(&self, at: u64, from: &[(u64, u64)], writable: bool) -> Result<(), Error> {
        let mut mapped = self.mapped_mut();
        let len: u64 = from.iter().map(|(_, len)| len).sum();
        if overlaps(&mapped, at, len) {
            return Err(Error::Memory(format!("something is mapped at {at:#x} already")));
        }
        let (driver, _current) = (self.driver, self.current()?);
        let mut done = 0;
        let mut make = || {
            for (first, len) in from {
                let mut next = *first;
                while next < first + len {
                    let (handle, chunk) = chunk_at(&mapped, next, first + len)
                        .ok_or_else(|| Error::Memory(format!("no whole chunk of memory was allocated at {next:#x}")))?;
                    may_call!(driver.map(at + done, chunk as usize, 0, handle, 0))?;
                    (done, next) = (done + chunk, next + chunk);
                }
            }
            self.set_access(at, len, writable)
        };
        if let Err(e) = self.note(make()) {
            if done > 0 {
                let _ = may_call!(driver.unmap(at, done as usize));
            }
            return Err(e);
        }
        mapped
            .insert(at, Range { len, kind: RangeKind::Bound, writable, handles: Vec::new(), chunk: 0, closed: false });
        Ok(())
    }

    /// Unmaps all ranges within these addresses, and frees what they own, once all streams have ended what they got.
    /// The calls that undo something also report errors of earlier work, so they count as done.
    ///
    /// # Errors
    /// When a stream does not say that it has ended: then the memory stays mapped, though nothing new begins to use it.
    fn unmap(&self, at: u64, len: u64) -> Result<(), Error> {
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        let end = at.saturating_add(len);
        let mut mapped = self.mapped_mut();
        cut(&mut mapped, at);
        cut(&mut mapped, end);
        if mapped.range(at..end).next().is_none() {
            return Ok(());
        }
        // From here on nothing begins to use it; what has begun ends.
        mapped.range_mut(at..end).for_each(|(_, range)| range.closed = true);
        drop(mapped);
        self.settle()?;
        let mut mapped = self.mapped_mut();
        let inside: Vec<u64> = mapped.range(at..at.saturating_add(len)).map(|(first, _)| *first).collect();
        let mut result = Ok(());
        for (first, range) in inside.iter().filter_map(|first| mapped.remove_entry(first)) {
            result = result.and(self.note(may_call!(driver.unmap(first, range.len as usize))));
            for handle in range.handles {
                result = result.and(self.note(may_call!(driver.release_memory(handle))));
            }
        }
        result
    }

    /// Waits until all streams have ended what they were given. Each is asked twice, in case that only the call failed.
    fn settle(&self) -> Result<(), Error> {
        let (driver, _current) = (self.driver, self.current_to_undo()?);
        let streams = lock(&self.streams).clone();
        let wait = |stream: &RawHandle| call!(driver.stream_synchronize(stream.0));
        streams.iter().try_for_each(|stream| self.note(wait(stream).or_else(|_| wait(stream))))
    }

    /// A dma-buf of device memory, whole pages of the host.
    pub(crate) fn dma_buf(&self, at: u64, len: u64) -> Result<OwnedFd, Error> {
        self.check(at, len, RangeKind::Memory, false)
            .map_err(|at| Error::Memory(format!("no memory was allocated at {at:#x}")))?;
        let (driver, _current) = (self.driver, self.current()?);
        let mut fd: c_int = -1;
        // 1: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
        may_call!(driver.range_handle((&raw mut fd).cast(), at, len as usize, 1, 0))?;
        // SAFETY: the driver has stored a new descriptor, which is nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Checks that a range of device memory may be used; the error is the first address that may not.
    fn check(&self, at: u64, len: u64, kind: RangeKind, write: bool) -> Result<(), u64> {
        check(&self.mapped(), at, len, kind, write)
    }
}

/// The handle of the chunk of memory that begins at `at` and ends before `end`, and its length.
fn chunk_at(mapped: &Mapped, at: u64, end: u64) -> Option<(u64, u64)> {
    let (first, range) = mapped.range(..=at).next_back()?;
    let offset = at - first;
    let whole = offset < range.len && offset.is_multiple_of(range.chunk.max(1)) && end - at >= range.chunk;
    let handle = range.handles.get(usize::try_from(offset / range.chunk.max(1)).ok()?)?;
    whole.then_some((*handle, range.chunk))
}

/// The kind of an address, and its number.
fn kind(at: DeviceAddr) -> (RangeKind, u64) {
    match at {
        DeviceAddr::Card(at) => (RangeKind::Memory, at.bits()),
        DeviceAddr::Va(at) => (RangeKind::Bound, at.bits()),
    }
}

/// Makes two ranges of one that is bound across `at`. Each of its pages was mapped by a call of its own, so each can be
/// unmapped alone.
fn cut(mapped: &mut Mapped, at: u64) {
    let Some((first, range)) = mapped.range_mut(..at).next_back() else { return };
    let before = at - first;
    if range.kind != RangeKind::Bound || before >= range.len {
        return;
    }
    let (len, kind) = (range.len - before, RangeKind::Bound);
    let behind = Range { len, kind, writable: range.writable, handles: Vec::new(), chunk: 0, closed: range.closed };
    range.len = before;
    mapped.insert(at, behind);
}

fn overlaps(mapped: &Mapped, at: u64, len: u64) -> bool {
    let last = at.saturating_add(len);
    mapped.range(..last).next_back().is_some_and(|(first, range)| first + range.len > at)
}

fn check(mapped: &Mapped, at: u64, len: u64, kind: RangeKind, write: bool) -> Result<(), u64> {
    let end = at.checked_add(len).ok_or(at)?;
    let mut next = at;
    while next < end {
        let found = mapped.range(..=next).next_back().filter(|(first, range)| {
            next - **first < range.len && range.kind == kind && !range.closed && (range.writable || !write)
        });
        let (first, range) = found.ok_or(next)?;
        next = first + range.len; // no overflow: the driver maps no range past the top
    }
    Ok(())
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = self.driver;
        // The driver has nothing to tell that would help here.
        let _ = call!(driver.release(self.device));
    }
}

/// Device addresses that belong to this process, in which memory can be mapped.
pub(crate) struct Window {
    context: Arc<Context>,
    at: u64,
    len: u64,
    /// One allocation, which is all there, instead of addresses.
    plain: bool,
}

impl Window {
    /// Reserves addresses; `len` is a multiple of the granularity.
    pub(crate) fn reserve(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut at = 0;
        // 0: aligned as the driver likes, anywhere, without flags.
        may_call!(driver.address_reserve(&raw mut at, len as usize, 0, 0, 0))?;
        Ok(Self { context: context.clone(), at, len, plain: false })
    }

    /// One allocation of plain memory, for GPUs without virtual memory.
    pub(crate) fn allocate(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let at = context.allocate(len)?;
        let range =
            Range { len, kind: RangeKind::Memory, writable: true, handles: Vec::new(), chunk: 0, closed: false };
        context.mapped_mut().insert(at, range);
        Ok(Self { context: context.clone(), at, len, plain: true })
    }

    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn holds(&self, at: u64, len: u64) -> Result<(), Error> {
        let offset = at.checked_sub(self.at).filter(|_| !self.plain);
        let inside = offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len);
        if inside { Ok(()) } else { Err(Error::Memory(format!("{at:#x} is not an address of this device"))) }
    }

    /// Allocates memory in chunks of `chunk` bytes and maps it in the window.
    pub(crate) fn map_new(&self, at: u64, len: u64, chunk: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        self.context.map_new(at, len, chunk)
    }

    /// Maps memory that is allocated at these addresses and lengths in the window, too.
    pub(crate) fn map_again(&self, at: u64, from: &[(u64, u64)], writable: bool) -> Result<(), Error> {
        self.holds(at, from.iter().map(|(_, len)| len).sum())?;
        self.context.map_again(at, from, writable)
    }

    /// Unmaps everything in a part of the window and frees what it owns; see [`Context::unmap`].
    pub(crate) fn unmap(&self, at: u64, len: u64) -> Result<(), Error> {
        self.holds(at, len)?;
        self.context.unmap(at, len)
    }

    fn end(&self) -> Result<(), Error> {
        let (context, driver) = (&self.context, self.context.driver);
        if self.plain {
            context.mapped_mut().range_mut(self.at..=self.at).for_each(|(_, range)| range.closed = true);
            context.settle()?;
            let _current = context.current_to_undo()?;
            context.mapped_mut().remove(&self.at);
            return call!(driver.free(self.at));
        }
        // Memory that a stream may still use stays mapped, and its addresses stay reserved.
        context.unmap(self.at, self.len)?;
        let _current = context.current_to_undo()?;
        may_call!(driver.address_free(self.at, self.len as usize))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Memory that a stream may still use stays with the driver.
        let _ = self.end();
    }
}

/// Host memory that the driver has pinned; unpinned with the last value for it.
pub(crate) struct Registered {
    context: Arc<Context>,
    at: usize,
    /// Keeps the memory.
    _buffer: BufferRef,
}

impl Registered {
    /// Registers a range of a buffer for all GPUs of the process, unless it lies in one that is.
    pub(crate) fn new(
        context: &Arc<Context>,
        buffer: &BufferRef,
        range: std::ops::Range<usize>,
    ) -> Result<Self, Error> {
        let outside = range.start >= range.end || range.end > buffer.len();
        let (first, len) = (buffer.address() + range.start, range.len());
        if outside {
            return Err(Error::Memory(format!("bytes {range:?} of a buffer of {}", buffer.len())));
        }
        let driver = context.driver;
        let mut registered = lock(&driver.registered);
        let near = registered.range_mut(..first + len).next_back().filter(|(at, near)| *at + near.len > first);
        let at = match near {
            Some((at, near)) if *at <= first && first + len <= at + near.len => {
                near.users += 1;
                *at
            }
            Some(_) => return Err(Error::Overlap { first, last: first + len - 1 }),
            None => {
                let _current = context.current()?;
                // 1: CU_MEMHOSTREGISTER_PORTABLE, pinned for all contexts.
                context.note(call!(driver.host_register(first as *mut c_void, len, 1)))?;
                registered.insert(first, Registration { len, users: 1, context: context.clone() });
                first
            }
        };
        Ok(Self { context: context.clone(), at, _buffer: buffer.clone() })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let driver = self.context.driver;
        let mut registered = lock(&driver.registered);
        let Some(registration) = registered.get_mut(&self.at) else { return };
        registration.users -= 1;
        if registration.users == 0
            && let Some(registration) = registered.remove(&self.at)
            && let Ok(_current) = registration.context.current_to_undo()
        {
            // Nothing is left to be done about an error: operations that use the memory hold it.
            let _ = call!(driver.host_unregister(self.at as *mut c_void));
        }
    }
}

/// Host memory that the driver has allocated, pinned for all contexts.
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    start: NonNull<u8>,
    len: NonZeroUsize,
}

impl PinnedMemory {
    /// Allocates whole pages.
    pub(crate) fn allocate(context: &Arc<Context>, len: usize) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut at = ptr::null_mut();
        // 1: CU_MEMHOSTALLOC_PORTABLE, pinned for all contexts.
        context.note(call!(driver.host_alloc(&raw mut at, len, 1)))?;
        match (NonNull::new(at.cast::<u8>()), NonZeroUsize::new(len)) {
            (Some(start), Some(len)) if start.addr().get().is_multiple_of(4096) && len.get().is_multiple_of(4096) => {
                Ok(Self { context: context.clone(), start, len })
            }
            _ => {
                let _ = call!(driver.host_free(at));
                Err(Error::Memory(format!("the driver's host memory of {len} bytes at {at:p} is not whole pages")))
            }
        }
    }
}

// SAFETY: it is plain memory, not tied to a thread; the context is made current by whom uses it.
unsafe impl Send for PinnedMemory {}
// SAFETY: it gives only its address.
unsafe impl Sync for PinnedMemory {}

// SAFETY: the memory is mapped until it is freed, which is the drop of this. The kernel initialises what it gives to
// the driver. Start and length were checked to be whole pages and do not change.
unsafe impl DriverMemory for PinnedMemory {
    fn span(&self) -> (NonNull<u8>, NonZeroUsize) {
        (self.start, self.len)
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let driver = self.context.driver;
        if let Ok(_current) = self.context.current_to_undo() {
            // Nothing is left to be done about an error: operations that use the memory hold it.
            let _ = call!(driver.host_free(self.start.as_ptr().cast()));
        }
    }
}

/// One call of the driver on a stream. Host memory is the range `offset..` of slice `host` of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A copy of `len` bytes.
    Copy { direction: Direction, host: usize, offset: u64, at: DeviceAddr, len: u64 },
    /// `rows` rows of `row` bytes; pitches are at least as long.
    Rows { direction: Direction, host: usize, offset: u64, at: DeviceAddr, row: u64, rows: u64, pitches: (u64, u64) },
    /// Within the device.
    Within { from: DeviceAddr, to: DeviceAddr, len: u64 },
    /// Within the device: rows, with the pitches of source and destination.
    RowsWithin { from: DeviceAddr, to: DeviceAddr, row: u64, rows: u64, pitches: (u64, u64) },
    /// `len` times a byte.
    Bytes { at: DeviceAddr, value: u8, len: u64 },
    /// `count` times a word of four bytes, at a multiple of four.
    Words { at: DeviceAddr, value: u32, count: u64 },
    /// `rows` times `row` bytes of one value, `pitch` apart.
    ByteRows { at: DeviceAddr, value: u8, row: u64, rows: u64, pitch: u64 },
    /// `rows` words, `pitch` bytes apart; both are multiples of four.
    WordRows { at: DeviceAddr, value: u32, rows: u64, pitch: u64 },
}

impl Step {
    /// Bytes that it moves or sets.
    pub(crate) fn bytes(&self) -> u64 {
        match *self {
            Self::Copy { len, .. } | Self::Within { len, .. } | Self::Bytes { len, .. } => len,
            Self::Rows { row, rows, .. } | Self::RowsWithin { row, rows, .. } | Self::ByteRows { row, rows, .. } => {
                row * rows
            }
            Self::Words { count, .. } => 4 * count,
            Self::WordRows { rows, .. } => 4 * rows,
        }
    }

    /// The device memory that it uses: first address, bytes, and whether it writes.
    pub(crate) fn device(&self) -> [Option<(DeviceAddr, u64, bool)>; 2] {
        let extent = |row: u64, rows: u64, pitch: u64| (rows - 1) * pitch + row;
        match *self {
            Self::Copy { direction, at, len, .. } => [Some((at, len, direction == Direction::FromHost)), None],
            Self::Rows { direction, at, row, rows, pitches: (_, pitch), .. } => {
                [Some((at, extent(row, rows, pitch), direction == Direction::FromHost)), None]
            }
            Self::Within { from, to, len } => [Some((from, len, false)), Some((to, len, true))],
            Self::RowsWithin { from, to, row, rows, pitches } => {
                [Some((from, extent(row, rows, pitches.0), false)), Some((to, extent(row, rows, pitches.1), true))]
            }
            Self::Bytes { at, len, .. } => [Some((at, len, true)), None],
            Self::Words { at, count, .. } => [Some((at, 4 * count, true)), None],
            Self::ByteRows { at, row, rows, pitch, .. } => [Some((at, extent(row, rows, pitch), true)), None],
            Self::WordRows { at, rows, pitch, .. } => [Some((at, extent(4, rows, pitch), true)), None],
        }
    }
}

/// Copies of one direction that go to the driver in one call. Their order is left to the driver, so no two of them
/// write the same memory.
struct Batch {
    direction: Direction,
    parts: Vec<Part>,
}

/// A copy in a batch.
struct Part {
    kind: RangeKind,
    at: Pointer,
    here: Pointer,
    len: u64,
}

impl Default for Batch {
    fn default() -> Self {
        Self { direction: Direction::FromHost, parts: Vec::new() }
    }
}

/// Copies in a batch, at most.
const BATCH: usize = 64;
/// Bytes of a copy that goes into a batch, at most: longer ones gain nothing.
const BATCHED: u64 = 1 << 20;
/// Bytes after which an event is recorded, so that what has ended is seen while the rest runs.
const EVENT_BYTES: u64 = 4 << 20;
/// Operations after which an event is recorded.
const EVENT_OPERATIONS: usize = BATCH;

/// Operations on a stream of the driver, in order.
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: RawHandle,
    /// Begun, and followed by an event; `None` where none could be recorded.
    groups: VecDeque<(Option<RawHandle>, Vec<Completion>)>,
    /// Begun since then.
    open: Vec<Completion>,
    open_bytes: u64,
    batch: Batch,
    batches: bool,
    /// Calls that were made and are not known to have ended.
    calls: VecDeque<usize>,
    open_calls: usize,
    /// Events that can be recorded again.
    idle: Vec<RawHandle>,
    broken: Option<Error>,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut raw = ptr::null_mut();
        // 1: CU_STREAM_NON_BLOCKING, not ordered behind the work of others on the legacy stream.
        call!(driver.stream_create(&raw mut raw, 1))?;
        lock(&context.streams).push(RawHandle(raw));
        Ok(Self {
            context: context.clone(),
            raw: RawHandle(raw),
            groups: VecDeque::new(),
            open: Vec::new(),
            open_bytes: 0,
            batch: Batch::default(),
            batches: driver.has_batches(),
            calls: VecDeque::new(),
            open_calls: 0,
            idle: Vec::new(),
            broken: None,
        })
    }

    /// Calls that are not known to have ended; the driver blocks when they are about a thousand.
    pub(crate) fn calls(&self) -> usize {
        self.calls.iter().sum::<usize>() + self.open_calls
    }

    /// Why nothing on the stream works any more.
    pub(crate) fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    /// Lets what is begun here from now on wait for what was begun on another stream of the context.
    pub(crate) fn wait_for(&mut self, other: &mut Self) {
        other.record(true);
        let Some((event, _)) = other.groups.back() else { return };
        let (context, driver) = (self.context.clone(), self.context.driver);
        let waits = context.current().and_then(|_current| match event {
            Some(event) => call!(driver.stream_wait(self.raw.0, event.0, 0)),
            // No event could be recorded.
            None => call!(driver.stream_synchronize(other.raw.0)),
        });
        if let Err(e) = waits {
            // Nothing may run that had to wait.
            self.failed(e.clone());
            self.broken.get_or_insert(e);
        }
    }

    /// Begins an operation: takes its steps, in order, up to one that cannot be done. The operation is owned until
    /// [`Stream::ended`] gives it back.
    pub(crate) fn begin(&mut self, ticket: Ticket, operation: Operation, steps: &[Step]) {
        let context = self.context.clone();
        let (mut result, mut bytes) = (Ok(()), 0);
        match context.current() {
            Err(e) => result = Err(self.failed(e)),
            Ok(_current) => {
                // Locked, so that what was checked stays mapped until the driver has the copy: who unmaps closes the
                // range first, and then waits for the stream.
                let mapped = context.mapped();
                for step in steps {
                    if let Err(e) = self.step(&mapped, &operation, step) {
                        result = Err(e);
                        break;
                    }
                    bytes += step.bytes();
                }
            }
        }
        self.open_bytes += bytes;
        self.open.push(Completion { ticket, operation, result, bytes });
    }

    /// Takes an operation that cannot be done, so that it ends in its turn.
    pub(crate) fn give_up(&mut self, ticket: Ticket, operation: Operation, error: OpError) {
        self.open.push(Completion { ticket, operation, result: Err(error), bytes: 0 });
    }

    fn failed(&mut self, error: Error) -> OpError {
        let status = error.code();
        if error.is_fatal() && self.broken.is_none() {
            self.context.broken.store(true, Ordering::Release);
            self.broken = Some(error);
        }
        OpError::Device { status }
    }

    /// An error if nothing works any more.
    fn works(&self) -> Result<(), OpError> {
        self.broken.as_ref().map_or(Ok(()), |e| Err(OpError::Device { status: e.code() }))
    }

    fn step(&mut self, mapped: &Mapped, operation: &Operation, step: &Step) -> Result<(), OpError> {
        self.works()?;
        for (at, len, write) in step.device().into_iter().flatten() {
            let (kind, first) = kind(at);
            check(mapped, first, len, kind, write).map_err(|bad| match kind {
                RangeKind::Memory => OpError::NoCardMemory(CardAddr::new(bad)),
                RangeKind::Bound => OpError::MmuFault(DeviceVa::new(bad)),
            })?;
        }
        // The address of host memory that the operation owns.
        let host = |index: usize, offset: u64, len: u64| {
            let slice = operation.hosts().get(index).map(|host| &host.slice);
            let inside = offset.checked_add(len).zip(slice).filter(|(end, slice)| *end <= slice.len() as u64);
            let (_, slice) = inside.ok_or(OpError::Refused(Refusal::Mismatch))?;
            Ok::<usize, OpError>(slice.reference().address() + slice.offset() + offset as usize)
        };
        if let Step::Copy { direction, host: index, offset, at, len } = *step
            && self.batches
            && len <= BATCHED
        {
            let here = host(index, offset, len)? as Pointer;
            return self.add_to_batch(mapped, direction, here, at, len);
        }
        self.send_batch(mapped)?;
        let (driver, stream) = (self.context.driver, self.raw.0);
        let side = |kind, host: usize, device, pitch: u64| Side {
            x: 0,
            y: 0,
            kind,
            host: host as *mut c_void,
            device,
            array: ptr::null_mut(),
            pitch: pitch as usize,
        };
        self.open_calls += 1;
        let done = match *step {
            Step::Copy { direction, host: index, offset, at, len } => {
                let here = host(index, offset, len)? as *mut c_void;
                match direction {
                    Direction::FromHost => call!(driver.to_device(at.bits(), here, len as usize, stream)),
                    Direction::ToHost => call!(driver.to_host(here, at.bits(), len as usize, stream)),
                }
            }
            Step::Rows { direction, host: index, offset, at, row, rows, pitches } => {
                let here = host(index, offset, (rows - 1) * pitches.0 + row)?;
                let (host, device) = (side(1, here, 0, pitches.0), side(2, 0, at.bits(), pitches.1));
                let (from, to) = if direction == Direction::FromHost { (host, device) } else { (device, host) };
                let copy = Copy2D { from, to, width: row as usize, height: rows as usize };
                call!(driver.copy_2d(&raw const copy, stream))
            }
            Step::Within { from, to, len } => call!(driver.within(to.bits(), from.bits(), len as usize, stream)),
            Step::RowsWithin { from, to, row, rows, pitches } => {
                let (from, to) = (side(2, 0, from.bits(), pitches.0), side(2, 0, to.bits(), pitches.1));
                let copy = Copy2D { from, to, width: row as usize, height: rows as usize };
                call!(driver.copy_2d(&raw const copy, stream))
            }
            Step::Bytes { at, value, len } => call!(driver.set_8(at.bits(), value, len as usize, stream)),
            Step::Words { at, value, count } => call!(driver.set_32(at.bits(), value, count as usize, stream)),
            Step::ByteRows { at, value, row, rows, pitch } => {
                call!(driver.set_2d_8(at.bits(), pitch as usize, value, row as usize, rows as usize, stream))
            }
            Step::WordRows { at, value, rows, pitch } => {
                call!(driver.set_2d_32(at.bits(), pitch as usize, value, 1, rows as usize, stream))
            }
        };
        done.map_err(|e| self.failed(e))
    }

    fn add_to_batch(
        &mut self,
        mapped: &Mapped,
        direction: Direction,
        here: Pointer,
        at: DeviceAddr,
        len: u64,
    ) -> Result<(), OpError> {
        let (kind, at) = kind(at);
        // Each slice of host memory is one operation's alone, but device memory may be written twice.
        let twice = |part: &Part| direction == Direction::FromHost && part.at < at + len && at < part.at + part.len;
        let batch = &self.batch;
        if batch.direction != direction || batch.parts.len() >= BATCH || batch.parts.iter().any(twice) {
            self.send_batch(mapped)?;
        }
        self.batch.direction = direction;
        self.batch.parts.push(Part { kind, at, here, len });
        Ok(())
    }

    /// Gives the driver the copies that wait for it. When it refuses, all operations since the last event have failed:
    /// which of them had a part in the batch is not known.
    fn send_batch(&mut self, mapped: &Mapped) -> Result<(), OpError> {
        let Batch { direction, parts } = std::mem::take(&mut self.batch);
        if parts.is_empty() {
            return Ok(());
        }
        let sent = self.works().and_then(|()| self.send(mapped, direction, &parts));
        if let Err(error) = &sent {
            self.fail_open(error);
        }
        sent
    }

    /// Fails the operations that were begun since the last event.
    fn fail_open(&mut self, error: &OpError) {
        for begun in self.open.iter_mut().filter(|begun| begun.result.is_ok()) {
            (begun.result, begun.bytes) = (Err(error.clone()), 0);
        }
    }

    fn send(&mut self, mapped: &Mapped, direction: Direction, parts: &[Part]) -> Result<(), OpError> {
        let (driver, stream, count) = (self.context.driver, self.raw.0, parts.len());
        let to_device = direction == Direction::FromHost;
        for part in parts {
            // Again, since it may have been unmapped while it waited.
            check(mapped, part.at, part.len, part.kind, to_device)
                .map_err(|bad| OpError::NoCardMemory(CardAddr::new(bad)))?;
        }
        self.open_calls += count;
        let done = if let [Part { at, here, len, .. }] = *parts {
            match to_device {
                true => call!(driver.to_device(at, here as *const c_void, len as usize, stream)),
                false => call!(driver.to_host(here as *mut c_void, at, len as usize, stream)),
            }
        } else {
            let device: Vec<Pointer> = parts.iter().map(|part| part.at).collect();
            let host: Vec<Pointer> = parts.iter().map(|part| part.here).collect();
            let lens: Vec<usize> = parts.iter().map(|part| part.len as usize).collect();
            let (to, from) = if to_device { (&device, &host) } else { (&host, &device) };
            let (to, from, lens) = (to.as_ptr(), from.as_ptr(), lens.as_ptr());
            // One set of attributes, for all copies from the first on.
            let (attributes, first) = (CopyAttributes { order: 1, ..CopyAttributes::default() }, 0usize);
            let (attributes, first) = (&raw const attributes, &raw const first);
            if driver.calls.batch.is_some() {
                may_call!(driver.batch(to, from, lens, count, attributes, first, 1, stream))
            } else {
                let mut failed = 0usize;
                let failed = &raw mut failed;
                may_call!(driver.batch_with_index(to, from, lens, count, attributes, first, 1, failed, stream))
            }
        };
        done.map_err(|e| self.failed(e))
    }

    /// Lets the driver note the end of what has been begun. `all`: however little that is.
    pub(crate) fn record(&mut self, all: bool) {
        let enough = self.open_bytes >= EVENT_BYTES || self.open.len() >= EVENT_OPERATIONS;
        if self.open.is_empty() || !(all || enough) {
            return;
        }
        let context = self.context.clone();
        let event = match context.current() {
            Err(e) => {
                // Operations that wait in the batch were not begun.
                let error = self.failed(e);
                self.batch = Batch::default();
                self.fail_open(&error);
                None
            }
            Ok(_current) => {
                // A failure is noted with the operations.
                let _ = self.send_batch(&context.mapped());
                self.mark().map_err(|e| self.failed(e)).ok()
            }
        };
        self.groups.push_back((event, std::mem::take(&mut self.open)));
        self.calls.push_back(std::mem::take(&mut self.open_calls));
        self.open_bytes = 0;
    }

    fn mark(&mut self) -> Result<RawHandle, Error> {
        let driver = self.context.driver;
        let event = match self.idle.pop() {
            Some(event) => event,
            None => {
                let mut event = ptr::null_mut();
                // 2: CU_EVENT_DISABLE_TIMING.
                call!(driver.event_create(&raw mut event, 2))?;
                RawHandle(event)
            }
        };
        let recorded = call!(driver.event_record(event.0, self.raw.0));
        if recorded.is_err() {
            self.idle.push(event);
        }
        recorded.map(|()| event)
    }

    /// Appends what is known to have ended, in order.
    pub(crate) fn ended(&mut self, done: &mut Vec<Completion>) {
        if self.groups.is_empty() {
            return;
        }
        let context = self.context.clone();
        let Ok(_current) = context.current().map_err(|e| self.failed(e)) else { return };
        let driver = context.driver;
        while let Some((event, _)) = self.groups.front() {
            let state = match event {
                // After an error that the context does not survive, only an answer for all of the stream counts.
                Some(event) if self.broken.is_none() => call!(driver.event_query(event.0)),
                _ => call!(driver.stream_query(self.raw.0)),
            };
            match state {
                Ok(()) => {}
                Err(Error::Call { code: NOT_READY, .. }) => return,
                Err(e) => {
                    self.failed(e);
                    // That says nothing about the copies: ask for the whole stream next time.
                    let event = self.groups.front_mut().and_then(|(event, _)| event.take());
                    self.idle.extend(event);
                    return;
                }
            }
            if let Some((event, group)) = self.groups.pop_front() {
                self.calls.pop_front();
                self.idle.extend(event);
                done.extend(group);
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.record(true);
        let (context, driver) = (self.context.clone(), self.context.driver);
        let wait = || call!(driver.stream_synchronize(self.raw.0));
        let ended = context.current_to_undo().and_then(|_current| wait().or_else(|_| wait()));
        if ended.is_err() {
            // The GPU may still use the memory of these operations: it is never freed.
            self.groups.drain(..).for_each(std::mem::forget);
            std::mem::take(&mut self.open).into_iter().for_each(std::mem::forget);
        }
        if let Ok(_current) = context.current_to_undo() {
            for event in self.idle.drain(..).chain(self.groups.drain(..).filter_map(|(event, _)| event)) {
                let _ = call!(driver.event_destroy(event.0));
            }
            lock(&context.streams).retain(|stream| *stream != self.raw);
            let _ = call!(driver.stream_destroy(self.raw.0));
        }
    }
}
