//! Calls of the CUDA driver, and the objects that they make, which own what the GPU uses.
//!
//! Three rules make the calls sound. Function types are those of `cuda.h` (CUDA 11.2 to 13), and the library is never
//! unloaded. A [`Stream`] owns each operation from [`Stream::begin`] until the driver has confirmed that everything
//! before it on the stream has ended; what it cannot confirm is never freed. A copy names device memory only inside
//! ranges that this process has mapped through the same [`Context`], or of which the driver says that they are memory
//! of its GPU ([`Borrowed`], `ranges::check`), since the driver also takes addresses of pinned host memory; a range
//! that was mapped is unmapped only after all work of the context has ended, that of other libraries too.
//!
//! The modules below this file call the driver through `call!` and `may_call!` alone.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ushort, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use dmalane_dma::lock;
use libloading::Library;

use crate::{Error, Gpu};

/// The library of the driver.
pub const LIBRARY: &str = "libcuda.so.1";
/// The environment variable that names another one.
pub const LIBRARY_VARIABLE: &str = "DMALANE_CUDA_LIB";

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
        capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_int);
        synchronize = "cuCtxSynchronize" ();
        memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
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
        granularity = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, c_int);
        address_reserve = "cuMemAddressReserve" (*mut Pointer, usize, usize, Pointer, u64);
        address_free = "cuMemAddressFree" (Pointer, usize);
        create = "cuMemCreate" (*mut u64, usize, *const AllocationProp, u64);
        release_memory = "cuMemRelease" (u64);
        map = "cuMemMap" (Pointer, usize, usize, u64, u64);
        unmap = "cuMemUnmap" (Pointer, usize);
        export = "cuMemExportToShareableHandle" (*mut c_void, u64, c_int, u64);
        import = "cuMemImportFromShareableHandle" (*mut u64, *mut c_void, c_int);
        property_of = "cuMemGetAllocationPropertiesFromHandle" (*mut AllocationProp, u64);
        set_access = "cuMemSetAccess" (Pointer, usize, *const AccessDesc, usize);
        stream_create = "cuStreamCreate" (*mut Handle, c_uint);
        stream_destroy = "cuStreamDestroy_v2" (Handle);
        stream_synchronize = "cuStreamSynchronize" (Handle);
        stream_query = "cuStreamQuery" (Handle);
        stream_wait = "cuStreamWaitEvent" (Handle, Handle, c_uint);
        event_create = "cuEventCreate" (*mut Handle, c_uint);
        event_destroy = "cuEventDestroy_v2" (Handle);
        event_record = "cuEventRecord" (Handle, Handle);
        event_query = "cuEventQuery" (Handle);
        pointer_attribute = "cuPointerGetAttribute" (*mut c_void, c_int, Pointer);
    }
    optional {
        part_uuid = "cuDeviceGetUuid_v2" (*mut [c_uchar; 16], c_int);
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
        $driver.check($crate::sys::name::$name, unsafe { ($driver.calls.$name)($($arg),*) })
    };
}

/// As [`call!`], for a function that the driver may not have.
macro_rules! may_call {
    ($driver:ident . $name:ident ($($arg:expr),*)) => {
        match $driver.calls.$name {
            // SAFETY: as in `call!`.
            Some(function) => $driver.check($crate::sys::name::$name, unsafe { function($($arg),*) }),
            None => Err($crate::Error::Symbol { library: $driver.library.clone(), symbol: $crate::sys::name::$name }),
        }
    };
}

mod back_to_back;
mod borrowed;
#[cfg(feature = "by-hand")]
mod by_hand;
mod context;
mod host;
mod ranges;
mod stream;
mod window;

pub(crate) use back_to_back::BackToBack;
pub(crate) use borrowed::Borrowed;
#[cfg(feature = "by-hand")]
pub use by_hand::PlainBinds;
pub(crate) use context::Context;
pub(crate) use host::{PinnedMemory, Pins, Registered};
pub(crate) use stream::Stream;
pub(crate) use window::Window;

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

/// Attributes of a GPU (`CUdevice_attribute`).
#[derive(Clone, Copy)]
pub(crate) enum Attribute {
    /// The longest pitch of a two-dimensional copy.
    MaxPitch = 11,
    CopyEngines = 40,
    HostRegister = 99,
    VirtualMemory = 102,
    PosixHandles = 103,
    RdmaWithVirtualMemory = 110,
    DmaBuf = 124,
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
        Err(Error::of_call(call, code, name, text))
    }

    /// The number of GPUs.
    pub(crate) fn count(&self) -> Result<u32, Error> {
        let mut count = 0;
        call!(self.device_count(&raw mut count))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Describes a GPU; also its `CUdevice`.
    pub(crate) fn gpu(&self, number: u32) -> Result<(Gpu, c_int), Error> {
        let (mut device, mut version, mut memory) = (0, 0, 0usize);
        call!(self.device(&raw mut device, c_int::try_from(number).unwrap_or(c_int::MAX)))?;
        call!(self.driver_version(&raw mut version))?;
        call!(self.device_memory(&raw mut memory, device))?;
        let (mut uuid, mut part) = ([0; 16], [0; 16]);
        call!(self.device_uuid(&raw mut uuid, device))?;
        if self.calls.part_uuid.is_some() {
            may_call!(self.part_uuid(&raw mut part, device))?;
        }
        // A part of a GPU (MIG) has one of its own, beside that of the whole.
        let (kind, uuid) = if part == uuid || part == [0; 16] { ("GPU", uuid) } else { ("MIG", part) };
        let mut text: [c_char; 256] = [0; 256];
        call!(self.device_name(text.as_mut_ptr(), 256, device))?;
        let name = string(&text);
        call!(self.device_pci(text.as_mut_ptr(), 256, device))?;
        let has = |attribute| self.attribute(device, attribute) > 0;
        let version = u32::try_from(version).unwrap_or(0);
        let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        let gpu = Gpu {
            number,
            name,
            uuid: format!("{kind}-{uuid}"),
            pci: string(&text),
            memory: memory as u64,
            driver: (version / 1000, version % 1000 / 10),
            virtual_memory: has(Attribute::VirtualMemory),
            dma_buf: self.calls.range_handle.is_some() && has(Attribute::DmaBuf),
            host_register: has(Attribute::HostRegister),
            copy_engines: u32::try_from(self.attribute(device, Attribute::CopyEngines)).unwrap_or(0),
        };
        Ok((gpu, device))
    }

    /// An attribute of a GPU; 0 when the driver does not know it.
    pub(crate) fn attribute(&self, device: c_int, attribute: Attribute) -> i32 {
        let mut value = 0;
        call!(self.device_attribute(&raw mut value, attribute as c_int, device)).map_or(0, |()| value)
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

/// A handle of the driver; the driver may be called with it from every thread.
#[derive(Clone, Copy)]
struct RawHandle(Handle);
// SAFETY: the driver's functions are thread-safe, and the handle itself is only a number here.
unsafe impl Send for RawHandle {}
// SAFETY: as above.
unsafe impl Sync for RawHandle {}
