//! Bits for reading and for writing, as several families of formats have them.

use dmalane_addr::Access;

/// The bits of an entry that grants `access`.
#[inline(always)]
pub(super) fn bits(access: Access, read: u64, write: u64) -> u64 {
    let bit = |right, bit| if access.contains(right) { bit } else { 0 };
    bit(Access::READ, read) | bit(Access::WRITE, write)
}

/// The rights that an entry grants, each by any of its bits.
#[inline(always)]
pub(super) fn rights(entry: u64, read: u64, write: u64) -> Access {
    let right = |bits, right| if entry & bits != 0 { right } else { Access::empty() };
    right(read, Access::READ) | right(write, Access::WRITE)
}
