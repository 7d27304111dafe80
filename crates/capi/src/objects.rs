//! The objects behind the numbers that C holds.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

pub(crate) use dmalane::dma::lock;
use dmalane_addr::{Address, CardAddr, DeviceVa, SgIndex, SgTable, Span};
use dmalane_iopt::{FormatId, HeapTables, UnknownFormat};
use dmalane_vm::{AnyVm, Bo, Errno, Handles, MappedSource, any_vm};

use crate::types::{DmlLeaf, DmlRun, DmlSegment, DmlVmConfig};

/// Error of a call: an error number with a text.
pub(crate) struct Refused(pub(crate) Number, pub(crate) String);

/// An error number of Linux: positive.
#[derive(Clone, Copy)]
pub(crate) struct Number(pub(crate) i32);

impl From<Errno> for Number {
    fn from(errno: Errno) -> Self {
        Self(errno.number())
    }
}

impl Refused {
    pub(crate) fn new(number: impl Into<Number>, text: impl Display) -> Self {
        Self(number.into(), text.to_string())
    }
}

/// Number of `EBUSY`.
pub(crate) const EBUSY: i32 = 16;

/// Number of `ENOTRECOVERABLE`: the library has a bug.
const NOT_RECOVERABLE: i32 = 131;

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The names of asm-generic/errno.h in the order of their numbers, from 1 on, each with a zero behind it.
const NAMES: &str = "EPERM\0ENOENT\0ESRCH\0EINTR\0EIO\0ENXIO\0E2BIG\0ENOEXEC\0EBADF\0ECHILD\0EAGAIN\0ENOMEM\0EACCES\0\
    EFAULT\0ENOTBLK\0EBUSY\0EEXIST\0EXDEV\0ENODEV\0ENOTDIR\0EISDIR\0EINVAL\0ENFILE\0EMFILE\0ENOTTY\0ETXTBSY\0EFBIG\0\
    ENOSPC\0ESPIPE\0EROFS\0EMLINK\0EPIPE\0EDOM\0ERANGE\0EDEADLK\0ENAMETOOLONG\0ENOLCK\0ENOSYS\0ENOTEMPTY\0ELOOP\0\0\
    ENOMSG\0EIDRM\0ECHRNG\0EL2NSYNC\0EL3HLT\0EL3RST\0ELNRNG\0EUNATCH\0ENOCSI\0EL2HLT\0EBADE\0EBADR\0EXFULL\0ENOANO\0\
    EBADRQC\0EBADSLT\0\0EBFONT\0ENOSTR\0ENODATA\0ETIME\0ENOSR\0ENONET\0ENOPKG\0EREMOTE\0ENOLINK\0EADV\0ESRMNT\0ECOMM\0\
    EPROTO\0EMULTIHOP\0EDOTDOT\0EBADMSG\0EOVERFLOW\0ENOTUNIQ\0EBADFD\0EREMCHG\0ELIBACC\0ELIBBAD\0ELIBSCN\0ELIBMAX\0\
    ELIBEXEC\0EILSEQ\0ERESTART\0ESTRPIPE\0EUSERS\0ENOTSOCK\0EDESTADDRREQ\0EMSGSIZE\0EPROTOTYPE\0ENOPROTOOPT\0\
    EPROTONOSUPPORT\0ESOCKTNOSUPPORT\0EOPNOTSUPP\0EPFNOSUPPORT\0EAFNOSUPPORT\0EADDRINUSE\0EADDRNOTAVAIL\0ENETDOWN\0\
    ENETUNREACH\0ENETRESET\0ECONNABORTED\0ECONNRESET\0ENOBUFS\0EISCONN\0ENOTCONN\0ESHUTDOWN\0ETOOMANYREFS\0ETIMEDOUT\0\
    ECONNREFUSED\0EHOSTDOWN\0EHOSTUNREACH\0EALREADY\0EINPROGRESS\0ESTALE\0EUCLEAN\0ENOTNAM\0ENAVAIL\0EISNAM\0\
    EREMOTEIO\0EDQUOT\0ENOMEDIUM\0EMEDIUMTYPE\0ECANCELED\0ENOKEY\0EKEYEXPIRED\0EKEYREVOKED\0EKEYREJECTED\0\
    EOWNERDEAD\0ENOTRECOVERABLE\0ERFKILL\0EHWPOISON\0";

/// The name of an error number, positive or negative, with a zero behind it; empty where Linux has none.
pub(crate) fn name(number: i32) -> &'static str {
    let place = number.unsigned_abs().wrapping_sub(1) as usize;
    let none = NAMES.len() - 1; // the last zero
    NAMES.split_terminator('\0').nth(place).unwrap_or(&NAMES[none..none])
}

/// Runs a call and converts its result to 0 or a negative error number.
pub(crate) fn call(run: impl FnOnce() -> Result<(), Refused>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(run));
    tell_released();
    let (number, text) = match result {
        Ok(Ok(())) => return 0,
        Ok(Err(Refused(Number(number), text))) => (number, format!("{}: {text}", name(number))),
        Err(_) => (NOT_RECOVERABLE, "ENOTRECOVERABLE: a bug in dmalane; its message went to stderr".to_owned()),
    };
    set_last_error(text);
    -number
}

/// Makes this the text of the last error of the thread, for a call that succeeds.
pub(crate) fn set_last_error(text: String) {
    // While the thread exits, the text is no longer available.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
}

/// The text of this thread's last error.
pub(crate) fn with_last_error<R>(look: impl Fn(&str) -> R) -> R {
    LAST_ERROR.try_with(|last| look(&last.borrow())).unwrap_or_else(|_| look(""))
}

/// The callback by which C learns that a buffer object is gone.
pub(crate) type Release = Box<dyn FnOnce() + Send + Sync>;

/// Notifies C when the buffer object's memory may be reused.
#[derive(Default)]
struct Owner {
    release: OnceLock<Release>,
}

thread_local! {
    /// Callbacks of buffer objects that a call of this thread has let go of.
    static RELEASED: RefCell<Vec<Release>> = const { RefCell::new(Vec::new()) };
}

impl Drop for Owner {
    /// The callback may call this library, so it waits until no lock is held.
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            let mut release = Some(release);
            let _ = RELEASED.try_with(|released| released.borrow_mut().extend(release.take()));
            if let Some(release) = release {
                release(); // while the thread exits, which holds no lock
            }
        }
    }
}

/// Calls what waits.
fn tell_released() {
    // One by one: a callback that calls this library comes here too.
    while let Some(release) = RELEASED.try_with(|released| released.borrow_mut().pop()).ok().flatten() {
        release();
    }
}

/// A callback to C about a range.
pub(crate) type Callback = Arc<dyn Fn(DeviceVa, u64) + Send + Sync>;

/// The optional callbacks of a VM.
#[derive(Default)]
pub(crate) struct Callbacks {
    /// The device must forget the range.
    pub(crate) invalidate: Option<Callback>,
    /// The device may use the range soon.
    pub(crate) prefetch: Option<Callback>,
}

/// Buffer objects and the VMs that bind them.
struct Device {
    bos: Mutex<Handles>,
}

struct OneVm {
    device: Arc<Device>,
    vm: Mutex<Box<dyn AnyVm + Send>>,
    tell: Callbacks,
}

/// Objects by number. Numbers are never reused.
pub(crate) struct Numbered<T> {
    next: u64,
    objects: BTreeMap<u64, Arc<T>>,
}

impl<T> Numbered<T> {
    pub(crate) const fn new() -> Self {
        Self { next: 1, objects: BTreeMap::new() }
    }

    pub(crate) fn add(&mut self, object: T) -> u64 {
        let number = self.next;
        self.next += 1;
        self.objects.insert(number, Arc::new(object));
        number
    }

    pub(crate) fn get(&self, number: u64, what: &str) -> Result<Arc<T>, Refused> {
        self.objects.get(&number).cloned().ok_or_else(|| none(number, what))
    }

    /// Takes an object, which stays while another call uses it.
    pub(crate) fn take(&mut self, number: u64, what: &str) -> Result<T, Refused> {
        let object = self.objects.remove(&number).ok_or_else(|| none(number, what))?;
        Arc::try_unwrap(object).map_err(|object| {
            self.objects.insert(number, object);
            Refused::new(Number(EBUSY), format_args!("another call uses {what} {number}"))
        })
    }
}

/// Forgets an object. It is dropped without the lock, which may take long.
pub(crate) fn remove<T>(objects: &Mutex<Numbered<T>>, number: u64, what: &str) -> Result<(), Refused> {
    let object = lock(objects).objects.remove(&number);
    object.map(drop).ok_or_else(|| none(number, what))
}

pub(crate) fn none(number: u64, what: &str) -> Refused {
    Refused::new(Errno::NoEnt, format_args!("there is no {what} {number}"))
}

static DEVICES: Mutex<Numbered<Device>> = Mutex::new(Numbered::new());
static VMS: Mutex<Numbered<OneVm>> = Mutex::new(Numbered::new());

/// Locks a VM; an error when a panic may have left it inconsistent.
fn lock_vm(vm: &OneVm) -> Result<MutexGuard<'_, Box<dyn AnyVm + Send>>, Refused> {
    let broken = |_| Refused::new(Errno::Canceled, "an earlier call on this VM failed because of a bug in the library");
    vm.vm.lock().map_err(broken)
}

pub(crate) fn create_device() -> u64 {
    lock(&DEVICES).add(Device { bos: Mutex::default() })
}

pub(crate) fn destroy_device(device: u64) -> Result<(), Refused> {
    remove(&DEVICES, device, "device")
}

/// A range of addresses; this error where it is none.
fn span(va: u64, len: u64, errno: Errno) -> Result<Span<DeviceVa>, Refused> {
    let none = || Refused::new(errno, format_args!("{len:#x} bytes from {va:#x} on"));
    Span::new(DeviceVa::new(va), len).ok_or_else(none)
}

/// Makes an empty VM of the format of this name.
pub(crate) fn create_vm(device: u64, format: &str, config: &DmlVmConfig, tell: Callbacks) -> Result<u64, Refused> {
    let DmlVmConfig { va, len, reserved_va, reserved_len, table_limit, break_before_make, .. } = *config;
    let device = lock(&DEVICES).get(device, "device")?;
    let span = |va, len| span(va, len, Errno::Overflow);
    let range = span(va, len)?;
    let reserved = if (reserved_va, reserved_len) == (0, 0) { None } else { Some(span(reserved_va, reserved_len)?) };
    let format: FormatId = format.parse().map_err(|e: UnknownFormat| Refused::new(Errno::Inval, e))?;
    let limit = if table_limit == 0 { usize::MAX } else { usize::try_from(table_limit).unwrap_or(usize::MAX) };
    let mut vm = any_vm(format, range, reserved, HeapTables::with_limit(CardAddr::new(0), limit))?;
    match (break_before_make, tell.invalidate.clone()) {
        (0, _) => {}
        (1, Some(invalidate)) => {
            vm.break_before_make(Some(Box::new(move |span| invalidate(span.first(), span.len()))));
        }
        (1, None) => return Err(Refused::new(Errno::Inval, "break-before-make without `invalidate`")),
        (other, _) => return Err(Refused::new(Errno::Inval, format_args!("break_before_make is {other}, not 0 or 1"))),
    }
    Ok(lock(&VMS).add(OneVm { device, vm: Mutex::new(vm), tell }))
}

pub(crate) fn destroy_vm(vm: u64) -> Result<(), Refused> {
    remove(&VMS, vm, "VM")
}

pub(crate) fn set_null_page(vm: u64, pa: u64, len: u64) -> Result<(), Refused> {
    let vm = lock(&VMS).get(vm, "VM")?;
    lock_vm(&vm)?.set_null_page(CardAddr::new(pa), len)?;
    Ok(())
}

pub(crate) fn create_bo(device: u64, segments: impl Iterator<Item = DmlSegment>) -> Result<u32, Refused> {
    let device = lock(&DEVICES).get(device, "device")?;
    let mut sg = SgTable::new();
    for (i, DmlSegment { pa, len }) in segments.enumerate() {
        let bad = |errno, why| Refused::new(errno, format_args!("segment {i}: {len:#x} bytes from {pa:#x} on {why}"));
        if len == 0 {
            return Err(bad(Errno::Inval, "are none"));
        }
        sg.push(CardAddr::new(pa), len).ok_or_else(|| bad(Errno::Overflow, "go beyond 64 bits"))?;
    }
    // Its id is its handle, so that messages and runs name it as C does.
    let index = SgIndex::from_table(&sg).map_err(|e| Refused::new(Errno::NoMem, e))?;
    let handle =
        lock(&device.bos).insert_with(|handle| Arc::new(Bo::new(handle.into(), index).with_owner(Owner::default())));
    handle.ok_or_else(|| Refused::new(Errno::NoMem, "no more buffer objects"))
}

pub(crate) fn destroy_bo(device: u64, handle: u32) -> Result<(), Refused> {
    let device = lock(&DEVICES).get(device, "device")?;
    let removed = lock(&device.bos).remove(handle);
    removed.map(drop).ok_or_else(|| none(handle.into(), "buffer object"))
}

fn find_bo(device: u64, handle: u32) -> Result<Arc<Bo>, Refused> {
    let device = lock(&DEVICES).get(device, "device")?;
    let bo = lock(&device.bos).get(handle).cloned();
    bo.ok_or_else(|| none(handle.into(), "buffer object"))
}

/// Has C told when the memory of a buffer object may be used again.
pub(crate) fn on_release(device: u64, handle: u32, release: Release) -> Result<(), Refused> {
    let bo = find_bo(device, handle)?;
    let set = bo.owner::<Owner>().is_some_and(|owner| owner.release.set(release).is_ok());
    if set { Ok(()) } else { Err(Refused::new(Errno::Exist, "the buffer object has a callback already")) }
}

/// In how many VMs a buffer object is bound.
pub(crate) fn bound_vms(device: u64, handle: u32) -> Result<u64, Refused> {
    Ok(find_bo(device, handle)?.bound_vms() as u64)
}

/// Bytes of a buffer object that are bound in a VM.
pub(crate) fn bound_bytes(vm: u64, handle: u32) -> Result<u64, Refused> {
    let one = lock(&VMS).get(vm, "VM")?;
    let bo = lock(&one.device.bos).get(handle).cloned().ok_or_else(|| none(handle.into(), "buffer object"))?;
    Ok(lock_vm(&one)?.bound_bytes(&bo))
}

/// Makes larger leaves in a range where what is bound continues.
pub(crate) fn merge(vm: u64, va: u64, len: u64) -> Result<(), Refused> {
    let one = lock(&VMS).get(vm, "VM")?;
    let span = span(va, len, Errno::Inval)?;
    // With the lock held: the entries are clear while the device forgets.
    lock_vm(&one)?.merge(span, &mut |span| {
        if let Some(invalidate) = &one.tell.invalidate {
            invalidate(span.first(), span.len());
        }
    })?;
    Ok(())
}

pub(crate) fn bind(vm: u64, bytes: &[u8], stride: usize, count: usize, reserved: bool) -> Result<(), Refused> {
    let one = lock(&VMS).get(vm, "VM")?;
    let committed = {
        let mut vm = lock_vm(&one)?;
        vm.apply_array(bytes, stride, count, Box::new(lock(&one.device.bos)), reserved)?
    };
    // Without the lock: the callback may query the VM.
    if let Some(invalidate) = &one.tell.invalidate {
        committed.spans().for_each(|span| invalidate(span.first(), span.len()));
    }
    if let Some(prefetch) = &one.tell.prefetch {
        committed.prefetches().for_each(|span| prefetch(span.first(), span.len()));
    }
    lock_vm(&one)?.invalidated(committed);
    Ok(())
}

pub(crate) fn lookup(vm: u64, va: u64) -> Result<DmlLeaf, Refused> {
    let vm = lock(&VMS).get(vm, "VM")?;
    let at = DeviceVa::new(va);
    let leaf = lock_vm(&vm)?.lookup(at);
    let found = leaf.and_then(|leaf| {
        let (pa, size) = (leaf.translate(at)?.bits(), leaf.size.bytes());
        let left = size - at.offset_from(leaf.at)?;
        Some(DmlLeaf { pa, left, leaf: size, access: leaf.access.bits().into(), zero: 0 })
    });
    found.ok_or_else(|| Refused::new(Errno::NoEnt, format_args!("nothing is bound at {va:#x}")))
}

pub(crate) fn runs(vm: u64, va: u64, len: u64, each: &mut dyn FnMut(DmlRun)) -> Result<(), Refused> {
    let vm = lock(&VMS).get(vm, "VM")?;
    let span = span(va, len, Errno::Inval)?;
    lock_vm(&vm)?.mapping(span, &mut |run| {
        // An id is a handle here.
        let (handle, offset, repeat) = match run.source {
            MappedSource::Bo { bo, offset } => (bo as u32, offset, 0),
            MappedSource::Repeat { bo, offset, page } => (bo as u32, offset, page),
            _ => (0, 0, 0),
        };
        let (va, len) = (run.span.first().bits(), run.span.len());
        let (pa, leaf, access) = (run.to.bits(), run.leaf.bytes(), run.access.bits().into());
        each(DmlRun { va, len, offset, pa, leaf, repeat, handle, access });
        ControlFlow::Continue(())
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_number() {
        assert_eq!(call(|| panic!("on purpose")), -NOT_RECOVERABLE);
        assert!(with_last_error(|text| text.starts_with("ENOTRECOVERABLE")));
        assert_eq!(call(|| Ok(())), 0);
        assert_eq!(call(|| Err(Refused::new(Errno::NoEnt, "it"))), -2);
        assert!(with_last_error(|text| text == "ENOENT: it"));
    }

    #[test]
    fn what_another_call_uses_keeps_its_number() {
        let mut objects = Numbered::new();
        let number = objects.add("buffer");
        let used = objects.get(number, "buffer").ok();
        let refused = objects.take(number, "buffer").err().map(|Refused(Number(number), _)| number);
        assert_eq!((refused, used.as_deref()), (Some(EBUSY), Some(&"buffer")));
        drop(used);
        assert_eq!(objects.take(number, "buffer").ok(), Some("buffer"));
        assert!(objects.take(number, "buffer").is_err());
    }
}
