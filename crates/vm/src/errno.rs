//! Errors by number.

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
}

impl Error {
    /// The number that kernels give for it, or that comes nearest.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Empty { .. } | Self::Misaligned { .. } | Self::MisalignedOffset { .. } => Errno::Inval,
            Self::NullPage { .. } | Self::RepeatPage { .. } | Self::Segment { .. } | Self::New { .. } => Errno::Inval,
            Self::Wraps { .. } => Errno::Overflow,
            Self::OutsideVm { .. } | Self::BeyondBo { .. } => Errno::Range,
            Self::Reserved { .. } | Self::NoReserved { .. } => Errno::Perm,
            Self::NoNullPage { .. } | Self::Unsupported { .. } => Errno::NotSup,
            Self::BoTooLarge { .. } => Errno::TooBig,
            Self::NoTables { .. } | Self::NoMemory { .. } => Errno::NoMem,
        }
    }
}
