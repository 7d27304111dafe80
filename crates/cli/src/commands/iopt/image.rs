//! Table memory that is a file: written in one go, read back without trust.

use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use dmalane::addr::PhysAddr;
use dmalane::iopt::{TableShape, Tables};

use crate::failure::Failure;
use crate::size;
use crate::source::{self, SourceFile};

/// Tables one after the other from a base address on, in the order in which they were asked for. The first is the root.
pub struct ImageTables {
    base: u64,
    shape: TableShape,
    bytes: Vec<u8>,
    freed: Vec<PhysAddr>,
    /// Tables that were ever made.
    made: u64,
}

impl ImageTables {
    /// Where `build` stops: 128 GiB by 4 KiB pages.
    pub const MOST_BYTES: u64 = 256 << 20;

    /// No tables yet.
    pub fn new(base: u64) -> Self {
        Self { base, shape: TableShape::ALL_4K, bytes: Vec::new(), freed: Vec::new(), made: 0 }
    }

    /// Takes the image out: entries in little-endian order. The tables are gone then.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Tables in use.
    pub fn count(&self) -> u64 {
        self.made - self.freed.len() as u64
    }

    fn grow(&mut self, bytes: u64) -> Option<PhysAddr> {
        let len = self.bytes.len() as u64;
        let table = self.base.checked_add(len)?;
        if len + bytes > Self::MOST_BYTES {
            return None;
        }
        self.bytes.try_reserve(bytes as usize).ok()?;
        // `resize` takes 30 ns a byte without optimization.
        self.bytes.extend_from_slice(&vec![0; bytes as usize]);
        self.made += 1;
        Some(PhysAddr::new(table))
    }

    /// Where a word of a table is.
    fn word(&self, table: PhysAddr, index: usize) -> Range<usize> {
        let at = (table.bits() - self.base) as usize + index * 8;
        at..at + 8
    }
}

impl Tables for ImageTables {
    type Addr = PhysAddr;

    fn prepare(&mut self, shape: TableShape) -> bool {
        self.shape = shape;
        true
    }

    fn allocate_root(&mut self) -> Option<PhysAddr> {
        self.grow(self.shape.root.bytes())
    }

    fn free_root(&mut self, _: PhysAddr) {
        // Only a page table that is given up does so, and its image is not used.
    }

    fn allocate(&mut self) -> Option<PhysAddr> {
        let Some(table) = self.freed.pop() else { return self.grow(self.shape.table.bytes()) };
        let at = self.word(table, 0).start;
        self.bytes[at..at + self.shape.table.bytes() as usize].fill(0);
        Some(table)
    }

    fn free(&mut self, table: PhysAddr) {
        self.freed.push(table);
    }

    fn load(&self, table: PhysAddr, index: usize) -> u64 {
        u64::from_le_bytes(self.bytes[self.word(table, index)].try_into().expect("8 bytes"))
    }

    fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
        let word = self.word(table, index);
        self.bytes[word].copy_from_slice(&entry.to_le_bytes());
    }

    fn reserve(&mut self, tables: usize) -> bool {
        let fresh = tables.saturating_sub(self.freed.len()) as u64;
        let bytes = fresh.saturating_mul(self.shape.table.bytes());
        bytes.saturating_add(self.bytes.len() as u64) <= Self::MOST_BYTES
            && self.bytes.try_reserve(bytes as usize).is_ok()
    }
}

/// A file seen as memory. Nothing about its content is assumed.
pub struct Image {
    base: u64,
    bytes: Vec<u8>,
}

impl Image {
    /// The largest file that is read.
    const MOST_BYTES: u64 = 4 << 30;

    /// Reads the file whose first byte lies at `base`.
    pub fn read(path: &Path, base: u64) -> Result<Self, Failure> {
        let trouble = |e| Failure::because(format!("cannot read {}", path.display()), &e);
        let too_large = || {
            Failure::new(format!("{} is larger than {}", path.display(), size::binary(Self::MOST_BYTES)))
                .hint("cut out the piece of memory that holds the tables")
        };
        if source::is_stdin(path) {
            let mut bytes = Vec::new();
            let read = SourceFile::open(path)?.file.take(Self::MOST_BYTES + 1).read_to_end(&mut bytes);
            return match read.map_err(trouble)? as u64 {
                0..=Self::MOST_BYTES => Ok(Self { base, bytes }),
                _ => Err(too_large()),
            };
        }
        // Asked by name, not by descriptor: to open a FIFO would wait for its writer.
        let metadata = fs::metadata(path).map_err(trouble)?;
        if !metadata.is_file() {
            return Err(Failure::new(format!("{} is not a regular file", path.display())));
        }
        if metadata.len() > Self::MOST_BYTES {
            return Err(too_large());
        }
        let bytes = fs::read(path).map_err(trouble)?;
        Ok(Self { base, bytes })
    }

    /// Bytes in the file.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The entry at an address, unless it is misaligned or not all of it lies in the file.
    pub fn entry(&self, at: u64) -> Option<u64> {
        if !at.is_multiple_of(8) {
            return None;
        }
        let at = usize::try_from(at.checked_sub(self.base)?).ok()?;
        let bytes = self.bytes.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane::addr::PageSize;

    #[test]
    fn entries_at_the_edges() {
        let image = Image { base: 0x1000, bytes: (0u8..20).collect() };
        assert_eq!(image.entry(0x1000), Some(0x0706_0504_0302_0100));
        assert_eq!(image.entry(0x1008), Some(0x0f0e_0d0c_0b0a_0908));
        for at in [0, 0xff8, 0x1004, 0x1010, 0x1018, u64::MAX - 7] {
            assert_eq!(image.entry(at), None, "{at:#x}");
        }
        let top = Image { base: u64::MAX - 7, bytes: vec![1; 16] };
        assert_eq!((top.entry(u64::MAX - 7), top.entry(0)), (Some(0x0101_0101_0101_0101), None));
    }

    #[test]
    fn tables_follow_each_other_and_come_back_zeroed() {
        let mut tables = ImageTables::new(0x8000);
        assert!(tables.prepare(TableShape { root: PageSize::SIZE_16K, table: PageSize::SIZE_4K }));
        let (root, a) = (tables.allocate_root().unwrap(), tables.allocate().unwrap());
        assert_eq!((root.bits(), a.bits(), tables.count()), (0x8000, 0xc000, 2));
        assert!(tables.reserve(2) && !tables.reserve(1 << 17) && !tables.reserve(usize::MAX));
        tables.store(a, 511, 7);
        assert_eq!((tables.load(a, 511), tables.bytes[0x4ff8]), (7, 7));
        tables.free(a);
        assert_eq!((tables.count(), tables.allocate()), (1, Some(a)));
        assert_eq!(tables.load(a, 511), 0);
    }
}
