//! Errors by name and by number.

use crate::Error;

/// The number of an error as Linux has it (`include/uapi/asm-generic/errno.h`), for interfaces that speak in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
#[non_exhaustive]
pub enum Errno {
    /// The request would reach into a range that is not the caller's.
    Perm = 1,
    /// There is no such object.
    NoEnt = 2,
    /// More than this version understands.
    TooBig = 7,
    /// No memory for it.
    NoMem = 12,
    /// There is such an object already.
    Exist = 17,
    /// An array that ends before its last operation does.
    Fault = 14,
    /// A request that is wrong in itself.
    Inval = 22,
    /// A range that reaches out of what it lies in.
    Range = 34,
    /// A range that wraps around the address space.
    Overflow = 75,
    /// A request that the page-table format cannot express.
    NotSup = 95,
    /// It was given up before it was done.
    Canceled = 125,
}

impl Errno {
    /// Its number: positive.
    pub const fn number(self) -> i32 {
        self as i32
    }

    /// Its name: `EINVAL`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Perm => "EPERM",
            Self::NoEnt => "ENOENT",
            Self::TooBig => "E2BIG",
            Self::NoMem => "ENOMEM",
            Self::Fault => "EFAULT",
            Self::Exist => "EEXIST",
            Self::Inval => "EINVAL",
            Self::Range => "ERANGE",
            Self::Overflow => "EOVERFLOW",
            Self::NotSup => "EOPNOTSUPP",
            Self::Canceled => "ECANCELED",
        }
    }
}

/// Gives an error type a name and a number, from its `name_and_number`.
macro_rules! named {
    ($error:ty) => {
        impl $error {
            /// A name for programs, which stays when the message changes: `beyond_bo`.
            pub fn name(&self) -> &'static str {
                self.name_and_number().0
            }

            /// The number that kernels give for it, or that comes nearest.
            pub fn errno(&self) -> Errno {
                self.name_and_number().1
            }
        }
    };
}
pub(crate) use named;

named!(Error);

impl Error {
    fn name_and_number(&self) -> (&'static str, Errno) {
        match self {
            Self::Empty { .. } => ("empty", Errno::Inval),
            Self::Wraps { .. } => ("wraps", Errno::Overflow),
            Self::Misaligned { .. } => ("misaligned", Errno::Inval),
            Self::MisalignedOffset { .. } => ("misaligned_offset", Errno::Inval),
            Self::OutsideVm { .. } => ("outside_vm", Errno::Range),
            Self::Reserved { .. } => ("reserved", Errno::Perm),
            Self::NoReserved { .. } => ("no_reserved", Errno::Perm),
            Self::NoNullPage { .. } => ("no_null_page", Errno::NotSup),
            Self::NullPage { .. } => ("bad_null_page", Errno::Inval),
            Self::RepeatPage { .. } => ("bad_repeat", Errno::Inval),
            Self::BoTooLarge { .. } => ("bo_too_large", Errno::TooBig),
            Self::BeyondBo { .. } => ("beyond_bo", Errno::Range),
            Self::Segment { .. } => ("bad_segment", Errno::Inval),
            Self::Unsupported { .. } => ("unsupported_access", Errno::NotSup),
            Self::NoTables { .. } => ("no_tables", Errno::NoMem),
            Self::NoMemory { .. } => ("no_memory", Errno::NoMem),
            Self::New { .. } => ("bad_vm", Errno::Inval),
        }
    }
}
