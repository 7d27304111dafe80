//! Why a page table refused.

use core::fmt;

use dmalane_addr::{Access, Address, PageSize};

/// An address with the name of its space, for messages. One error type serves input and output addresses of every
/// page table, so the kind of address is kept as data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct NamedAddr {
    /// [`Address::SPACE`] of the address.
    pub space: &'static str,
    /// The address as a number, [as people write it](Address::shown).
    pub bits: u64,
}

impl NamedAddr {
    /// The address with the name of its space.
    pub fn of<A: Address>(addr: A) -> Self {
        Self { space: A::SPACE, bits: addr.shown() }
    }
}

impl fmt::Display for NamedAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:#x}", self.space, self.bits)
    }
}

/// A length in a message; nothing where the start alone is wrong.
struct Length(u64);

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, ", length {:#x}", self.0) }
    }
}

/// Why a page table refused. It translates what it did before the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// A length of zero.
    Empty {
        /// Where the range was to start, input or output.
        at: NamedAddr,
    },
    /// A start or a length that is not a multiple of the format's granule.
    Misaligned {
        /// Where the range starts, input or output.
        at: NamedAddr,
        /// Bytes; 0 when it is the start alone that is wrong.
        len: u64,
        /// The format's smallest page.
        granule: PageSize,
    },
    /// Input addresses beyond [`Format::INPUT_BITS`](crate::Format::INPUT_BITS).
    InputRange {
        /// Where the range starts, or where the call had come to.
        at: NamedAddr,
        /// Bytes from there; 0 when it is the start alone that is wrong.
        len: u64,
        /// Bits that the format translates.
        bits: u32,
    },
    /// Output addresses beyond [`Format::OUTPUT_BITS`](crate::Format::OUTPUT_BITS).
    OutputRange {
        /// Where the range starts.
        at: NamedAddr,
        /// Bytes.
        len: u64,
        /// Bits that an entry holds.
        bits: u32,
    },
    /// The format has no entry with exactly these rights.
    Unsupported {
        /// The rights asked for.
        access: Access,
        /// [`Format::NAME`](crate::Format::NAME).
        format: &'static str,
    },
    /// Something is mapped there already.
    Overlap {
        /// The lowest address of the request that is taken.
        at: NamedAddr,
    },
    /// No memory for another table.
    NoTables {
        /// The input address that needed the table.
        at: NamedAddr,
    },
    /// A hole in the table that was to be mapped through.
    NotMapped {
        /// The lowest address of the hole, in the space of that table.
        at: NamedAddr,
    },
    /// The table that was to be mapped through permits less than what was asked for, or is another kind of memory.
    Denied {
        /// The lowest such address, in the space of that table.
        at: NamedAddr,
        /// The rights asked for.
        access: Access,
        /// The rights there.
        permitted: Access,
    },
    /// The format has no bit that says that a page was written.
    NoDirtyBit {
        /// [`Format::NAME`](crate::Format::NAME).
        format: &'static str,
    },
    /// The memory has no tables of the sizes that the format needs.
    TableSize {
        /// The size of a table.
        table: PageSize,
        /// The size of the root.
        root: PageSize,
    },
    /// [`Tables::allocate`](crate::Tables::allocate) gave an address that no entry of the format can hold.
    TableAddress {
        /// The table's address.
        at: NamedAddr,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { at } => write!(f, "an empty range at {at}"),
            Self::Misaligned { at, len, granule } => write!(f, "{at}{}: not a multiple of {granule}", Length(*len)),
            Self::InputRange { at, len, bits } => {
                write!(f, "{at}{}: beyond {bits} bits of input address", Length(*len))
            }
            Self::OutputRange { at, len, bits } => {
                write!(f, "{at}, length {len:#x}: beyond {bits} bits of output address")
            }
            Self::Unsupported { access, format } => write!(f, "{format} cannot express access {access}"),
            Self::Overlap { at } => write!(f, "{at} is already mapped"),
            Self::NoTables { at } => write!(f, "no memory for a page table below {at}"),
            Self::NotMapped { at } => write!(f, "{at} is not mapped"),
            Self::Denied { at, access, permitted } => write!(f, "{at} permits {permitted}, not {access}"),
            Self::NoDirtyBit { format } => write!(f, "{format} does not record writes"),
            Self::TableSize { table, root } => {
                write!(f, "this table memory cannot provide tables of {table} with a root of {root}")
            }
            Self::TableAddress { at } => {
                write!(f, "a page table at {at} is not aligned to its size or does not fit the format's entries")
            }
        }
    }
}

impl core::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_addr::Iova;

    #[test]
    fn a_start_that_is_wrong_has_no_length() {
        let at = NamedAddr::of(Iova::new(0x1001));
        let said = |len| alloc::format!("{}", Error::Misaligned { at, len, granule: PageSize::SIZE_4K });
        assert!(said(0).contains("0x1001: not a multiple of 4 KiB"), "{}", said(0));
        assert!(said(0x2000).contains("0x1001, length 0x2000: not"), "{}", said(0x2000));
    }
}
