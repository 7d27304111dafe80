//! Which formats there are, each as functions that know it by its type.

use std::fmt;
use std::path::Path;

use dmalane::addr::{Access, Iova, PageSize, PhysAddr};
use dmalane::iopt::{self, *};
use dmalane::trace::{Header, TraceError};
use dmalane::vm::AnyVm;

use super::image::{Image, ImageTables};
use super::spec::{Mapping, wrong};
use crate::failure::Failure;
use crate::size;

/// Every format. A new one joins by a line.
pub const FORMATS: &[Format] = &[
    Format::of::<Arm64S1_4k>(),
    Format::named::<Arm64S1<12, 39>>("arm64-s1-4k-39"),
    Format::of::<Arm64S1_16k>(),
    Format::of::<Arm64S1_64k>(),
    Format::of::<Arm64S1<12, 48, true>>(),
    Format::of::<Arm64S1<14, 48, true>>(),
    Format::of::<Arm64S1<16, 48, true>>(),
    Format::of::<Arm64S1<12, 52, false, 52>>(),
    Format::of::<Arm64S1<14, 52, false, 52>>(),
    Format::of::<Arm64S1<16, 52, false, 52>>(),
    Format::of::<Arm64S2_4k>(),
    Format::of::<Arm64S2_16k>(),
    Format::of::<Arm64S2_64k>(),
    Format::of::<Arm64S2<12, 52, false, 52>>(),
    Format::of::<Arm64S2<14, 52, false, 52>>(),
    Format::of::<Arm64S2<16, 52, false, 52>>(),
    Format::named::<Arm64S2<12, 40>>("arm64-s2-4k-40"),
    Format::named::<Arm64S2<14, 40>>("arm64-s2-16k-40"),
    Format::named::<Arm64S2<16, 40>>("arm64-s2-64k-40"),
    Format::named::<Arm64S2<12, 40, true>>("arm64-s2-4k-40-contiguous"),
    Format::named::<Arm64S2<14, 40, true>>("arm64-s2-16k-40-contiguous"),
    Format::named::<Arm64S2<16, 40, true>>("arm64-s2-64k-40-contiguous"),
    Format::of::<Armv7>(),
    Format::of::<X86_64_4Level>(),
    Format::of::<X86_64_5Level>(),
    Format::of::<VtdSecond39>(),
    Format::of::<VtdSecond48>(),
    Format::of::<VtdSecond57>(),
    Format::of::<AmdV1<3>>(),
    Format::of::<AmdV1_4Level>(),
    Format::of::<AmdV1<5>>(),
    Format::of::<AmdV1<6>>(),
    Format::of::<AmdV1<4, true>>(),
    Format::of::<RiscvSv39>(),
    Format::of::<RiscvSv48>(),
    Format::of::<RiscvSv57>(),
    Format::of::<RiscvSv<3, true>>(),
    Format::of::<RiscvSv<4, true>>(),
    Format::of::<RiscvSv<5, true>>(),
    Format::of::<AgxUat>(),
];

/// A format by name.
#[derive(Clone, Copy)]
pub struct Format {
    /// As on the command line.
    pub name: &'static str,
    /// Builds tables from `base` on.
    pub build: fn(&[Mapping], base: u64) -> Result<Built, Refused>,
    /// Translates one address by the tables below `root`.
    pub walk: fn(&Image, root: u64, at: u64) -> Result<Walked, WalkFault>,
    /// Everything that the tables below `root` map.
    pub dump: fn(&Image, root: u64) -> Result<Vec<Run>, Endless>,
    /// An empty VM as the first line of a trace says.
    pub vm: fn(&Header) -> Result<Box<dyn AnyVm + Send>, TraceError>,
}

impl Format {
    const fn of<F: iopt::Format>() -> Self {
        Self::named::<F>(F::NAME)
    }

    /// For a format with another number of bits, which the crate does not name.
    const fn named<F: iopt::Format>(name: &'static str) -> Self {
        Self { name, build: build::<F>, walk: walk::<F>, dump: dump::<F>, vm: Header::vm::<F> }
    }
}

/// Tables, ready to be written.
pub struct Built {
    /// The image.
    pub bytes: Vec<u8>,
    /// Where the root is.
    pub root: u64,
    /// Tables in the image.
    pub tables: u64,
    /// Leaves of each page size.
    pub leaves: Vec<(PageSize, u64)>,
    /// What to program.
    pub registers: Vec<Register>,
}

/// Why no tables were built.
pub enum Refused {
    /// The root, of this size, cannot be where it was to be.
    Base(Error, PageSize),
    /// A field of a mapping is not a multiple of the smallest page.
    Misaligned { mapping: usize, field: &'static str, value: u64, granule: PageSize },
    /// The tables refused a mapping.
    Mapping(usize, Error),
}

impl Refused {
    /// What to tell the user.
    pub fn failure(&self, spec: &Path, mappings: &[Mapping]) -> Failure {
        match *self {
            Self::Base(e, root) => {
                let aligned = format!("the root is aligned to its size, here {root}");
                Failure::because("there can be no tables at --base", &e).hint(aligned)
            }
            Self::Misaligned { mapping, field, value, granule } => {
                wrong(spec, format!("mappings[{mapping}].{field}: {value:#x} is not a multiple of {granule}"))
            }
            Self::Mapping(mapping, Error::Overlap { at }) => {
                let other = mappings[..mapping].iter().position(|m| at.bits.wrapping_sub(m.va) < m.len);
                let other = other.map_or(String::new(), |other| format!(" by mappings[{other}]"));
                wrong(spec, format!("mappings[{mapping}]: {:#x} is already mapped{other}", at.bits))
            }
            Self::Mapping(mapping, Error::NoTables { at }) => {
                let most = size::binary(ImageTables::MOST_BYTES);
                wrong(spec, format!("mappings[{mapping}]: at {:#x} the tables outgrow {most}", at.bits))
                    .hint("addresses and lengths that are multiples of a larger page take fewer tables")
            }
            Self::Mapping(mapping, e) => wrong(spec, format!("mappings[{mapping}]: {e}")),
        }
    }
}

fn build<F: iopt::Format>(mappings: &[Mapping], base: u64) -> Result<Built, Refused> {
    let tables = ImageTables::new(base);
    let mut table =
        PageTable::<F, Iova, PhysAddr, _>::new(tables).map_err(|e| Refused::Base(e, TableShape::of::<F>().root))?;
    for (i, m) in mappings.iter().enumerate() {
        for (field, value) in [("va", m.va), ("pa", m.pa), ("len", m.len)] {
            if !value.is_multiple_of(F::GRANULE.bytes()) {
                return Err(Refused::Misaligned { mapping: i, field, value, granule: F::GRANULE });
            }
        }
        let mapped = table.map(Iova::new(m.va), PhysAddr::new(m.pa), m.len, m.access);
        mapped.map_err(|e| Refused::Mapping(i, e))?;
    }
    let root = table.root().bits();
    Ok(Built {
        root,
        tables: table.tables().count(),
        leaves: table.leaf_counts().collect(),
        registers: F::registers(root),
        bytes: table.tables_mut().take(),
    })
}

fn walk<F: iopt::Format>(image: &Image, root: u64, at: u64) -> Result<Walked, WalkFault> {
    iopt::walk::<F>(root, at, |entry| image.entry(entry))
}

/// A part of the input space that leaves of one size map to a part of the output space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
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
    /// What they permit.
    pub access: Access,
}

impl Run {
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
    /// After so many entries, many times those of the image.
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

/// Walks from each leaf or hole to the next. That is a few loads more than a descent of its own would take, and leaves a
/// single piece of code that says what tables mean.
fn dump<F: iopt::Format>(image: &Image, root: u64) -> Result<Vec<Run>, Endless> {
    let mut runs: Vec<Run> = Vec::new();
    let mut at = 0;
    for _ in 0..most_entries(image) {
        let step = match walk::<F>(image, root, at) {
            Ok(leaf) => {
                let len = leaf.size.bytes() - (at & (leaf.size.bytes() - 1));
                let run = Run { va: at, pa: leaf.to, len, page: leaf.size, count: 1, access: leaf.access };
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
            Err(WalkFault { kind: FaultKind::OutOfRange, .. }) => return Ok(runs),
            Err(fault) => entry_bytes::<F>(fault.level),
        };
        match at.checked_add(step) {
            Some(next) => at = next,
            None => return Ok(runs),
        }
    }
    Err(Endless::Entries(most_entries(image)))
}

/// Input bytes that one entry of a level is for.
const fn entry_bytes<F: iopt::Format>(level: u32) -> u64 {
    F::GRANULE.bytes() << ((F::LEVELS - 1 - level) * F::INDEX_BITS)
}
