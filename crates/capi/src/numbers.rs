//! The error numbers that C gets.

use std::error::Error as StdError;

use dmalane::device::{MemoryError, SpaceError};
use dmalane::file;
use dmalane::load::Error as LoadError;
use dmalane::load::fill::FillError;
use dmalane::load::kept::KeepError;
use dmalane::load::kept::wire::KeepRefusal;
use dmalane::queue::{OpError, Refusal, StopReason};
use dmalane::{OpenError, error_chain, is_lost};
use dmalane_vm::Errno;
use dmalane_vm::array::ArrayError;

use crate::objects::{Number, Refused};

// Numbers of asm-generic/errno.h that the bind manager has no use for.
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
pub(crate) const ENODEV: i32 = 19;
const EISDIR: i32 = 21;
const ESPIPE: i32 = 29;
const ENODATA: i32 = 61;
const EBADMSG: i32 = 74;
const ETIMEDOUT: i32 = 110;
pub(crate) const EALREADY: i32 = 114;
const ESTALE: i32 = 116;
const ECANCELED: i32 = 125;

/// The kernel's number behind an error.
fn kernels(error: &(dyn StdError + 'static)) -> Option<Number> {
    let mut causes = std::iter::successors(Some(error), |&e| e.source());
    causes.find_map(|e| e.downcast_ref::<std::io::Error>()?.raw_os_error()).map(Number)
}

/// The number of an error of the operating system, which a driver's error may wrap.
pub(crate) fn os(error: &std::io::Error) -> Number {
    match kernels(error) {
        Some(number) => number,
        // Found out without asking the kernel.
        None if error.kind() == std::io::ErrorKind::NotFound => Errno::NoEnt.into(),
        None => Number(EIO),
    }
}

/// The number of an error about a file that was to be opened.
pub(crate) fn number_of_file(error: &file::Error) -> Number {
    match error {
        file::Error::Open { source, .. } => os(source),
        file::Error::NotAFile { kind: "directory", .. } => Number(EISDIR),
        file::Error::NotAFile { .. } => Number(ESPIPE),
        file::Error::NoDirect { .. } | file::Error::NoUring { .. } => Errno::NotSup.into(),
        _ => Number(EIO),
    }
}

fn number_of_stop(reason: &StopReason) -> Number {
    match reason {
        StopReason::Requested(_) => Errno::Canceled.into(),
        StopReason::Timeout(_) => Number(ETIMEDOUT),
        StopReason::Lost(_) => Number(ENODEV),
        _ => Number(EIO),
    }
}

pub(crate) fn number_of_refusal(reason: &Refusal) -> Number {
    match reason {
        Refusal::Full => Number(EAGAIN),
        Refusal::TooLong { .. } | Refusal::TooManyParts { .. } => Errno::TooBig.into(),
        Refusal::PastTheTop => Errno::Overflow.into(),
        Refusal::NotPermitted => Errno::Perm.into(),
        Refusal::Unsupported(_) => Errno::NotSup.into(),
        Refusal::Stopped(reason) => number_of_stop(reason),
        _ => Errno::Inval.into(),
    }
}

pub(crate) fn number_of(error: &OpError) -> Number {
    match error {
        OpError::Fault(_) | OpError::MmuFault(_) | OpError::NoCardMemory(_) => Errno::Fault.into(),
        OpError::EndOfFile { .. } => Number(ENODATA),
        OpError::Io { errno, .. } => Number(*errno),
        OpError::Differs { .. } => Number(EBADMSG),
        OpError::Cancelled => Errno::Canceled.into(),
        OpError::Stopped(reason) => number_of_stop(reason),
        OpError::Refused(reason) => number_of_refusal(reason),
        _ => Number(EIO),
    }
}

/// The number for an error of a device's driver: that of a lost device, or else this one.
fn number_of_driver(error: &(dyn StdError + 'static), otherwise: Number) -> Number {
    match error.downcast_ref() {
        Some(dmalane::vulkan::Error::NoAddresses { .. }) => Errno::NoMem.into(),
        _ if is_lost(error) => Number(ENODEV),
        _ => otherwise,
    }
}

fn number_of_memory(error: &MemoryError) -> Number {
    match error {
        MemoryError::NoRegion { .. } => Errno::Inval.into(),
        MemoryError::Driver { source, .. } => number_of_driver(&**source, Errno::NoMem.into()),
        MemoryError::Full { .. } => Errno::NoMem.into(),
        _ => Number(EIO),
    }
}

fn number_of_host(error: &dmalane::dma::Error) -> Number {
    use dmalane::dma::Error;
    match error {
        Error::BadLength(_) | Error::NotPages { .. } | Error::BadRange { .. } => Errno::Inval.into(),
        Error::NoHeap(_) | Error::WholeBuffers | Error::ForeignPin => Errno::NotSup.into(),
        Error::Allocate { source, .. } | Error::Import(source) => os(source),
        Error::Backend(source) => number_of_driver(&**source, Number(EIO)),
        _ => Errno::NoMem.into(),
    }
}

fn number_of_space(error: &SpaceError) -> Number {
    match error {
        SpaceError::Exhausted(_) => Errno::NoMem.into(),
        SpaceError::Fragmented(_) | SpaceError::NoTables => Errno::NotSup.into(),
        SpaceError::TooShort { .. } => Errno::Range.into(),
        SpaceError::Elsewhere(_) => Errno::Inval.into(),
        SpaceError::NotReserved(_) => Errno::NoEnt.into(),
        SpaceError::Vm(error) => error.errno().into(),
        SpaceError::Invalidate(source) | SpaceError::Refused(source) | SpaceError::Driver(source) => {
            number_of_driver(&**source, Number(EIO))
        }
        _ => Number(EIO),
    }
}

fn number_of_open(error: &OpenError) -> Number {
    match error {
        OpenError::Spec(_) => Errno::Inval.into(),
        OpenError::Device { source, .. } => number_of_driver(&**source, kernels(&**source).unwrap_or(Number(ENODEV))),
        _ => Number(ENODEV),
    }
}

/// Converts errors of these types, each with its function that gives the number.
macro_rules! refused {
    ($($error:ty: $number:expr),* $(,)?) => {$(
        impl From<$error> for Refused {
            fn from(error: $error) -> Self {
                Self::new(($number)(&error), error_chain(&error))
            }
        }
    )*};
}

refused! {
    LoadError: number_of_load,
    OpenError: number_of_open,
    MemoryError: number_of_memory,
    SpaceError: number_of_space,
    dmalane::dma::Error: number_of_host,
    dmalane::dma::Forked: |_| Number(ENODEV),
    dmalane_vm::Error: dmalane_vm::Error::errno,
    ArrayError: |error: &ArrayError| error.reason.errno(),
}

/// The number of an error of files: of opening, reading, loading or verifying them.
pub(crate) fn number_of_load(error: &LoadError) -> Number {
    match error {
        LoadError::Format { .. }
        | LoadError::BadSlice(_)
        | LoadError::OwnMemory { .. }
        | LoadError::Fill(FillError::Job(_)) => Errno::Inval.into(),
        LoadError::File { source, .. } => os(source),
        LoadError::Open(error) => number_of_file(error),
        LoadError::Read { source, .. } | LoadError::Transfer { source, .. } => number_of(source),
        LoadError::PastEnd { .. } => Number(ENODATA),
        LoadError::Changed { .. } => Number(ESTALE),
        LoadError::DeviceMemory { source, .. } => number_of_memory(source),
        LoadError::Bind { source, .. } => number_of_space(source),
        LoadError::Memory(error) => number_of_host(error),
        LoadError::Limit { .. } | LoadError::Fill(FillError::NoRoom { .. } | FillError::Memory { .. }) => {
            Errno::NoMem.into()
        }
        LoadError::Fill(FillError::Deadline { .. }) => Number(ETIMEDOUT),
        LoadError::Fill(FillError::Cancelled { .. }) | LoadError::Closed => Number(ECANCELED),
        LoadError::Mismatch { .. } | LoadError::Differs { .. } | LoadError::Unlisted { .. } => Number(EBADMSG),
        LoadError::Forked(_) => Number(ENODEV),
        LoadError::NoTensor(_) => Errno::NoEnt.into(),
        LoadError::Unchecked => Errno::NotSup.into(),
        LoadError::Kept(error) => number_of_keep(error),
        _ => Number(EIO),
    }
}

fn number_of_keep(error: &KeepError) -> Number {
    match error {
        KeepError::NoKeeper { source, .. } | KeepError::System { source, .. } => os(source),
        KeepError::Refused { kind: KeepRefusal::Absent, .. } => Errno::NoEnt.into(),
        KeepError::Refused { kind: KeepRefusal::Ambiguous, .. } | KeepError::Elsewhere { .. } => Errno::Inval.into(),
        KeepError::Device { source, .. } => number_of_driver(&**source, Errno::NotSup.into()),
        _ => Number(EIO),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dmalane::daemon::ClientError;
    use dmalane::{Placement, cuda, vulkan};

    use super::*;

    #[test]
    fn a_device_that_is_lost_is_gone_whatever_notices_it() {
        let lost = || StopReason::Lost("the GPU is lost".into());
        let load = |reason| LoadError::Transfer {
            path: "model".into(),
            at: dmalane::addr::FileOffset::new(0),
            tensor: None,
            source: OpError::Stopped(reason),
        };
        let vulkan = vulkan::CallError { call: "vkQueueBindSparse", result: Default::default() };
        let cuda = || cuda::Error::Call { call: "cuMemMap", code: 1, name: String::new(), text: String::new() };
        let cuda_lost = || cuda::Error::Lost(Box::new(cuda()));
        let none = Errno::NoMem.number();
        // As a card's driver passes it on.
        let daemon = || {
            let silent = ClientError::Timeout { path: "socket".into(), after: Duration::from_secs(10) };
            dmalane::card::Error::Bus(silent.into())
        };
        let errors: [(&dyn Fn() -> Box<dyn StdError + Send + Sync>, _, _); 5] = [
            (&|| daemon().into(), ENODEV, ENODEV),
            (&|| vulkan::Error::Lost(vulkan).into(), ENODEV, ENODEV),
            (&|| cuda_lost().into(), ENODEV, ENODEV),
            (&|| vulkan::Error::Call(vulkan).into(), EIO, none),
            (&|| cuda().into(), EIO, none),
        ];
        for (error, number, of_memory) in errors {
            let numbers = [
                number_of_space(&SpaceError::Driver(error())),
                number_of_space(&SpaceError::Invalidate(error())),
                number_of_host(&dmalane::dma::Error::Backend(error())),
            ];
            assert!(numbers.iter().all(|n| n.0 == number), "{}", error());
            let memory = MemoryError::Driver { len: 1, placement: Placement::Default, source: error() };
            assert_eq!(number_of_memory(&memory).0, of_memory, "{memory}");
        }
        let numbers = [
            number_of(&OpError::Stopped(lost())),
            number_of_refusal(&Refusal::Stopped(lost())),
            Refused::from(load(lost())).0,
        ];
        assert!(numbers.iter().all(|number| number.0 == ENODEV));
        assert_eq!(Refused::from(load(StopReason::Timeout(Duration::from_millis(5)))).0.0, ETIMEDOUT);
        assert_eq!(Refused::from(load(StopReason::Driver("a call failed".into()))).0.0, EIO);
    }
}
