//! The device's side: one address, translated as an MMU does it.

use core::fmt;

use dmalane_addr::{Access, PageSize};

use crate::format::{Kind, MAX_LEVELS, index, shift};
use crate::{Entry, Foreign, Format, slots};

/// Result of a walk that found a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Walked {
    /// The output address of the very byte asked for.
    pub to: u64,
    /// The page size of the leaf.
    pub size: PageSize,
    /// Access that all levels together permit, and the kind of memory.
    pub access: Access,
}

/// Why a walk stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultKind {
    /// The entry is not valid.
    NotPresent,
    /// The entry is valid, and nothing that the format has: it is reserved at its level, grants nothing to anybody, or
    /// is of a kind that is not read here.
    NotUnderstood,
    /// There is a leaf, but all levels together grant nothing to an access of this kind.
    Denied,
    /// An entry that cannot be fetched: the memory refused its address.
    BadTable,
    /// The input address has more bits than the format translates.
    OutOfRange,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotPresent => "no mapping",
            Self::NotUnderstood => "an entry that is valid, but not understood",
            Self::Denied => "no permission",
            Self::BadTable => "a table that cannot be read",
            Self::OutOfRange => "an address beyond the format's range",
        })
    }
}

impl core::error::Error for FaultKind {}

/// A translation fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WalkFault {
    /// The input address.
    pub at: u64,
    /// The level of the entry that stopped the walk, 0 being the root.
    pub level: u32,
    /// Why.
    pub kind: FaultKind,
}

impl fmt::Display for WalkFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "translation fault at {:#x}, level {}: {}", self.at, self.level, self.kind)
    }
}

impl core::error::Error for WalkFault {}

/// Translates input address `at` by the tables below the one at `root`, for an unprivileged access, as those of devices
/// are by default. Limits that entries of tables set for all below them apply.
///
/// `load` fetches the little-endian 64-bit word at an address of table memory, a multiple of 8, or refuses with `None`;
/// a word of a format with 4-byte entries holds two of them. Nothing about the tables is
/// trusted: any bit pattern gives a translation or a fault after at most [`Format::LEVELS`] loads.
#[inline]
pub fn walk<F: Format>(root: u64, at: u64, load: impl FnMut(u64) -> Option<u64>) -> Result<Walked, WalkFault> {
    let (level, leaf, mut walked) = walk_privileged_to::<F>(root, at, load)?;
    if walked.access.contains(Access::PRIVILEGED) {
        let rights = F::unprivileged(leaf);
        if rights.is_empty() {
            return Err(WalkFault { at, level, kind: FaultKind::Denied });
        }
        walked.access = (walked.access - Access::RIGHTS - Access::PRIVILEGED) | rights;
    }
    Ok(walked)
}

/// The same for any access: a leaf for privileged accesses is given with [`Access::PRIVILEGED`].
#[inline]
pub fn walk_privileged<F: Format>(
    root: u64,
    at: u64,
    load: impl FnMut(u64) -> Option<u64>,
) -> Result<Walked, WalkFault> {
    walk_privileged_to::<F>(root, at, load).map(|(.., walked)| walked)
}

/// The same, behind the level of the leaf and the leaf as the tables above it limit it.
#[inline]
fn walk_privileged_to<F: Format>(
    root: u64,
    at: u64,
    mut load: impl FnMut(u64) -> Option<u64>,
) -> Result<(u32, u64, Walked), WalkFault> {
    let fault = |level, kind| Err(WalkFault { at, level, kind });
    if F::WALK_BITS < 64 && at >> F::WALK_BITS != 0 {
        return fault(0, FaultKind::OutOfRange);
    }
    let mut above = [0; MAX_LEVELS];
    let (mut table, mut skip_to) = (root, 0);
    for level in 0..F::LEVELS {
        if level < skip_to {
            continue;
        }
        let i = if level == 0 { (at >> shift::<F>(0)) as usize } else { index::<F>(at, level) };
        let address = table.checked_add(i as u64 * F::ENTRY_BYTES);
        let Some(entry) = address.and_then(|a| slots::fetch::<F>(a, &mut load)) else {
            return fault(level, FaultKind::BadTable);
        };
        let limited = || above[..level as usize].iter().fold(entry, |leaf, table| F::inherit(*table, leaf));
        match F::decode(level, entry) {
            Entry::Invalid => match F::foreign(level, entry) {
                None if F::is_present(entry) => return fault(level, FaultKind::NotUnderstood),
                None => return fault(level, FaultKind::NotPresent),
                Some(Foreign::Table { next, level: to }) => {
                    let between = (1 << shift::<F>(level)) - (1 << shift::<F>(to - 1));
                    if at & between != 0 {
                        return fault(level, FaultKind::NotPresent);
                    }
                    above[level as usize..to as usize].fill(entry); // its limits once or more are the same
                    (table, skip_to) = (next, to);
                }
                Some(Foreign::Leaf { .. }) => {
                    let limited = limited();
                    let Some(Foreign::Leaf { out, size, access }) = F::foreign(level, limited) else {
                        return fault(level, FaultKind::Denied);
                    };
                    return Ok((level, limited, Walked { to: out | at & (size.bytes() - 1), size, access }));
                }
            },
            Entry::Table(next) => {
                above[level as usize] = entry;
                table = next;
            }
            Entry::Leaf { .. } => {
                let limited = limited();
                let Entry::Leaf { out, access } = F::decode(level, limited) else {
                    return fault(level, FaultKind::Denied);
                };
                let size = Kind::of::<F>(level, entry).size::<F>();
                return Ok((level, limited, Walked { to: out | at & (size.bytes() - 1), size, access }));
            }
        }
    }
    fault(F::LEVELS - 1, FaultKind::NotPresent)
}
