//! Tables of a format that is known at run time, as bytes. The walk is compiled once, and for each format no more than
//! the bits of its entries.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use dmalane_addr::{Access, Address, Iova, PageSize, PhysAddr, Segment};

use crate::format::{Kind, index, input_len, shift};
use crate::map::{bad_segment, check_room, check_start, checked};
use crate::{Error, Format, FormatId, NamedAddr, Registers, TableShape};

/// Tables of a format that is known at run time, made once, to be written somewhere: those that a
/// [`PageTable`](crate::PageTable) makes in a [`TablePool`](crate::TablePool), the root first. A program that chooses
/// among all formats is much smaller with it.
///
/// ```
/// # use dmalane_addr::{Access, Iova, PhysAddr};
/// # use dmalane_iopt::{FormatId, TableImage};
/// let mut image = TableImage::new(FormatId::x86_64_4level, PhysAddr::new(0x8000_0000), 1 << 20)?;
/// image.map(Iova::new(0), PhysAddr::new(0), 4 << 20, Access::RW)?;
/// assert_eq!((image.tables(), image.bytes().len()), (3, 3 * 4096)); // two leaves of 2 MiB
/// # Ok::<(), dmalane_iopt::Error>(())
/// ```
#[derive(Debug)]
pub struct TableImage {
    format: FormatId,
    entries: Entries,
    base: u64,
    limit: u64,
    bytes: Vec<u8>,
    /// Where the tables below the root are in the image: by level, and by what they translate in units of its size.
    tables: BTreeMap<(u32, u64), usize>,
    /// One of them, that of the last leaf.
    last: ((u32, u64), usize),
    /// The ranges that are mapped: starts and ends.
    mapped: BTreeMap<u64, u64>,
    /// Leaves, by the logarithm of their size.
    leaves: [u64; 64],
}

impl TableImage {
    /// The root alone, at `base`; there will be at most `limit` bytes.
    ///
    /// # Errors
    /// [`Error::TableAddress`] where `base` is no place for a root, and [`Error::NoTables`] where there is no room.
    pub fn new(format: FormatId, base: PhysAddr, limit: u64) -> Result<Self, Error> {
        let TableShape { root, last, .. } = format.facts().shape;
        let limit = limit.min((last + 1).saturating_sub(base.bits()));
        if base.bits() > last || limit >= root.bytes() && !base.is_aligned(root) {
            return Err(Error::TableAddress { at: NamedAddr::of(base) });
        }
        let (base, bytes, last) = (base.bits(), Vec::new(), Default::default());
        let (tables, mapped) = (BTreeMap::new(), BTreeMap::new());
        let entries = with_format!(format, F => Entries::of::<F>());
        let mut image = Self { format, entries, base, limit, bytes, tables, last, mapped, leaves: [0; 64] };
        image.allocate(root, 0)?;
        Ok(image)
    }

    /// Maps as [`PageTable::map`](crate::PageTable::map) does.
    ///
    /// # Errors
    /// The same; but something of it may be mapped then, and the image is of no more use.
    pub fn map(&mut self, at: Iova, to: PhysAddr, len: u64, access: Access) -> Result<(), Error> {
        with_format!(self.format, F => check::<F>(at, to, len, access))?;
        let (mut at, mut out, end) = (at.bits(), to.bits(), at.bits() + len);
        let before = self.mapped.range(..=at).next_back().filter(|(_, end)| **end > at);
        let taken = before.map(|_| at).or_else(|| self.mapped.range(at..end).next().map(|(start, _)| *start));
        self.mapped.insert(at, end);
        let sizes = self.format.facts().page_sizes.bits();
        while at < end {
            let fits = (at | out).trailing_zeros().min((end - at).ilog2());
            let log2 = (sizes & u64::MAX >> (63 - fits)).ilog2();
            if let Some(taken) = taken.filter(|taken| *taken - at < 1 << log2) {
                return Err(Error::Overlap { at: NamedAddr::of(Iova::new(taken)) });
            }
            let level = (self.entries.level)(log2);
            let (table, page) = (self.table_for(at, level)?, (self.entries.shift)(level));
            for offset in (0..1 << (log2 - page)).map(|entry| entry << page) {
                let kind = Kind { level, group: log2 > page };
                let entry = (self.entries.leaf)(kind, out + offset, access);
                self.store(table, level, at + offset, entry);
            }
            self.leaves[log2 as usize] += 1;
            (at, out) = (at + (1 << log2), out + (1 << log2));
        }
        Ok(())
    }

    /// Where the table at `level` is that translates `at`, made if need be.
    fn table_for(&mut self, at: u64, level: u32) -> Result<usize, Error> {
        if level == 0 {
            return Ok(0);
        }
        let key = (level, at >> (self.entries.shift)(level - 1));
        if self.last.0 != key {
            let found = self.tables.get(&key).copied();
            self.last = (key, found.map_or_else(|| self.add_table(key, at), Ok)?);
        }
        Ok(self.last.1)
    }

    /// Adds the table of this key.
    fn add_table(&mut self, key: (u32, u64), at: u64) -> Result<usize, Error> {
        let above = self.table_for(at, key.0 - 1)?;
        let table = self.allocate(self.format.facts().shape.table, at)?;
        let next = self.base + table as u64;
        self.store(above, key.0 - 1, at, (self.entries.table)(key.0 - 1, next));
        self.tables.insert(key, table);
        Ok(table)
    }

    /// Room for a table, the first one for `at`.
    fn allocate(&mut self, size: PageSize, at: u64) -> Result<usize, Error> {
        let next = self.bytes.len();
        if self.limit - (next as u64) < size.bytes() {
            return Err(Error::NoTables { at: NamedAddr::of(Iova::new(at)) });
        }
        self.bytes.resize(next + size.bytes() as usize, 0);
        Ok(next)
    }

    fn store(&mut self, table: usize, level: u32, at: u64, entry: u64) {
        let bytes = self.entries.bytes;
        let first = table + (self.entries.index)(at, level) * bytes;
        self.bytes[first..first + bytes].copy_from_slice(&entry.to_le_bytes()[..bytes]);
    }

    /// The tables, to be found at the base.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The number of tables, the root included.
    pub fn tables(&self) -> usize {
        self.tables.len() + 1
    }

    /// The number of leaves of each page size, smallest size first.
    pub fn leaf_counts(&self) -> impl Iterator<Item = (PageSize, u64)> {
        self.format.facts().page_sizes.iter().map(|size| (size, self.leaves[size.log2() as usize]))
    }

    /// Registers to program into a device so that it walks these tables ([`Format::registers`]).
    pub fn registers(&self) -> Registers {
        with_format!(self.format, F => F::registers(self.base))
    }
}

/// The entries of a format.
#[derive(Debug)]
struct Entries {
    bytes: usize,
    /// The level of a leaf of this size, as a logarithm.
    level: fn(u32) -> u32,
    shift: fn(u32) -> u32,
    index: fn(u64, u32) -> usize,
    table: fn(u32, u64) -> u64,
    leaf: fn(Kind, u64, Access) -> u64,
}

impl Entries {
    fn of<F: Format>() -> Self {
        Self {
            bytes: F::ENTRY_BYTES as usize,
            level: |log2| F::LEVELS - 1 - (log2 - u32::from(F::GRANULE.log2())) / F::INDEX_BITS,
            shift: shift::<F>,
            index: index::<F>,
            table: F::encode_table,
            leaf: |kind, out, access| match kind.group {
                true => F::encode_member(kind.level, out, access),
                false => F::encode_leaf(kind.level, out, access),
            },
        }
    }
}

fn check<F: Format>(at: Iova, to: PhysAddr, len: u64, access: Access) -> Result<(), Error> {
    if !F::supports(access) {
        return Err(Error::Unsupported { access, format: F::NAME });
    }
    check_start::<F, _>(at, input_len::<F>())?;
    checked::<F, _>(Segment { addr: to, len }).map_err(bad_segment::<F, _>)?;
    check_room::<Iova>(at.bits(), len, input_len::<F>())
}
