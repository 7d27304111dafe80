//! Page tables of a format that is known at run time.

use std::fmt;
use std::path::Path;

use dmalane::addr::{Access, Iova, PageSize, PhysAddr};
use dmalane::iopt::{self, Error, FaultKind, Format, FormatId, TableImage, WalkFault, Walked, with_format};

use super::image::Image;
use super::spec::{SpecMapping, wrong};
use crate::failure::Failure;
use crate::size;

/// The largest image that is built: 128 GiB by 4 KiB pages.
const MOST_BYTES: u64 = 256 << 20;

/// Builds the tables of a specification from `base` on.
pub fn build(format: FormatId, spec: &Path, mappings: &[SpecMapping], base: u64) -> Result<TableImage, Failure> {
    let mut image = TableImage::new(format, PhysAddr::new(base), MOST_BYTES).map_err(|e| {
        Failure::because(format!("there can be no tables at --base {base:#x}"), &e)
            .hint(format!("the root is aligned to its size, here {}", format.facts().shape.root))
    })?;
    for (i, m) in mappings.iter().enumerate() {
        let mapped = image.map(Iova::new(m.va.0), PhysAddr::new(m.pa.0), m.len.0, m.access);
        mapped.map_err(|e| match e {
            Error::Overlap { at } => {
                let other = mappings[..i].iter().position(|m| at.bits.wrapping_sub(m.va.0) < m.len.0);
                let other = other.map_or(String::new(), |other| format!(" by mappings[{other}]"));
                wrong(spec, format!("mappings[{i}]: {:#x} is already mapped{other}", at.bits))
            }
            Error::NoTables { at } => {
                let most = size::binary(MOST_BYTES);
                wrong(spec, format!("mappings[{i}]: at {:#x} the tables outgrow {most}", at.bits))
                    .hint("addresses and lengths that are multiples of a larger page take fewer tables")
            }
            e => wrong(spec, format!("mappings[{i}]: {e}")),
        })?;
    }
    Ok(image)
}

/// Translates one address by the tables below `root`, for an unprivileged access if `user`.
pub fn walk(format: FormatId, image: &Image, root: u64, user: bool, at: u64) -> Result<Walked, WalkFault> {
    with_format!(format, F => walk_as::<F>(image, root, user, at))
}

fn walk_as<F: Format>(image: &Image, root: u64, user: bool, at: u64) -> Result<Walked, WalkFault> {
    let load = |entry| image.entry(entry);
    if user { iopt::walk::<F>(root, at, load) } else { iopt::walk_privileged::<F>(root, at, load) }
}

/// The contents of tables.
#[derive(Default)]
pub struct Dumped {
    /// Their mappings.
    pub runs: Vec<DumpRun>,
    /// Entries that are valid, but not understood ([`FaultKind::NotUnderstood`]).
    pub not_understood: u64,
}

/// A part of the input space that leaves of one size map to a part of the output space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DumpRun {
    /// Input address.
    pub va: u64,
    /// Output address.
    pub pa: u64,
    /// Size of each leaf.
    pub page: PageSize,
    /// Leaves.
    pub count: u64,
    /// Bytes. Less than the leaves have where a group of entries as one leaf is not whole.
    pub len: u64,
    /// The access that they permit.
    pub access: Access,
}

impl DumpRun {
    /// True when `next` goes on where this one ends.
    fn continues(&self, next: &Self) -> bool {
        let end = |start: u64| start.checked_add(self.len);
        end(self.va) == Some(next.va)
            && end(self.pa) == Some(next.pa)
            && (self.page, self.access) == (next.page, next.access)
    }
}

/// Why a dump gave up.
#[derive(Debug, PartialEq, Eq)]
pub enum Endless {
    /// After this number of entries, many times those of the image.
    Entries(u64),
    /// More than [`MOST_RUNS`].
    Runs,
}

/// Runs that a dump prints.
const MOST_RUNS: usize = 1 << 20;

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entries(n) => write!(f, "no end after {n} entries, far more than the image holds"),
            Self::Runs => write!(f, "more than {MOST_RUNS} separate runs"),
        }
    }
}

/// Entries that a dump of the image may look at. A tree takes each once, and one that also maps itself, as some kernels
/// do, once more for each level.
fn most_entries(image: &Image) -> u64 {
    image.len() + 4096
}

/// Everything that the tables below `root` map, for unprivileged accesses if `user`.
///
/// Walks from each leaf or hole to the next. That is a few loads more than a descent of its own would take, and leaves
/// a single piece of code that says what tables mean. It is compiled once, and only the walk for each format.
pub fn dump(format: FormatId, image: &Image, root: u64, user: bool) -> Result<Dumped, Endless> {
    let (mut dumped, mut at) = (Dumped::default(), 0);
    let runs = &mut dumped.runs;
    for _ in 0..most_entries(image) {
        let step = match walk(format, image, root, user, at) {
            Ok(leaf) => {
                let len = leaf.size.bytes() - (at & (leaf.size.bytes() - 1));
                let run = DumpRun { va: at, pa: leaf.to, len, page: leaf.size, count: 1, access: leaf.access };
                match runs.last_mut() {
                    Some(last) if last.continues(&run) => {
                        last.count += 1;
                        last.len += len;
                    }
                    _ => runs.push(run),
                }
                if runs.len() > MOST_RUNS {
                    return Err(Endless::Runs);
                }
                len
            }
            Err(WalkFault { kind: FaultKind::OutOfRange, .. }) => return Ok(dumped),
            Err(fault) => {
                dumped.not_understood += u64::from(fault.kind == FaultKind::NotUnderstood);
                let bytes = with_format!(format, F => entry_bytes::<F>(fault.level));
                bytes - (at & (bytes - 1))
            }
        };
        match at.checked_add(step) {
            Some(next) => at = next,
            None => return Ok(dumped),
        }
    }
    Err(Endless::Entries(most_entries(image)))
}

/// Input bytes that one entry of a level is for.
const fn entry_bytes<F: Format>(level: u32) -> u64 {
    F::GRANULE.bytes() << ((F::LEVELS - 1 - level) * F::INDEX_BITS)
}
