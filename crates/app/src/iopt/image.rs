//! Table memory that is a file: written in one go, read back without trust.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use dmalane::addr::PhysAddr;
use dmalane::iopt::Tables;

use crate::failure::Failure;
use crate::size;

/// Tables one after the other from a base address on, in the order in which they were asked for. The first is the root.
pub struct ImageTables {
    base: u64,
    /// Bytes of a table, a power of two.
    table: usize,
    bytes: Vec<u8>,
    freed: Vec<u64>,
}

impl ImageTables {
    /// Where `build` stops: 128 GiB by 4 KiB pages.
    pub const MOST_BYTES: u64 = 256 << 20;

    /// No tables yet. `table` is the size of each.
    pub fn new(base: u64, table: usize) -> Self {
        Self { base, table, bytes: Vec::new(), freed: Vec::new() }
    }

    /// Takes the image out: entries in little-endian order. The tables are gone then.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Tables in use.
    pub fn count(&self) -> u64 {
        (self.bytes.len() / self.table - self.freed.len()) as u64
    }

    fn place(&self, table: PhysAddr, index: usize) -> usize {
        (table.bits() - self.base) as usize + index * 8
    }
}

impl Tables for ImageTables {
    type Addr = PhysAddr;

    fn allocate(&mut self) -> Option<PhysAddr> {
        if let Some(table) = self.freed.pop() {
            let at = self.place(PhysAddr::new(table), 0);
            self.bytes[at..at + self.table].fill(0);
            return Some(PhysAddr::new(table));
        }
        let len = self.bytes.len();
        let table = self.base.checked_add(len as u64)?;
        if (len + self.table) as u64 > Self::MOST_BYTES {
            return None;
        }
        self.bytes.try_reserve(self.table).ok()?;
        self.bytes.resize(len + self.table, 0);
        Some(PhysAddr::new(table))
    }

    fn free(&mut self, table: PhysAddr) {
        self.freed.push(table.bits());
    }

    fn load(&self, table: PhysAddr, index: usize) -> u64 {
        let at = self.place(table, index);
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("8 bytes"))
    }

    fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
        let at = self.place(table, index);
        self.bytes[at..at + 8].copy_from_slice(&entry.to_le_bytes());
    }

    fn reserve(&mut self, tables: usize) -> bool {
        let bytes = tables.saturating_sub(self.freed.len()).saturating_mul(self.table);
        self.bytes.len() as u64 + bytes as u64 <= Self::MOST_BYTES && self.bytes.try_reserve(bytes).is_ok()
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
        // Asked by name, not by descriptor: to open a FIFO would wait for its writer.
        if !fs::metadata(path).map_err(trouble)?.is_file() {
            return Err(Failure::new(format!("{} is not a regular file", path.display())));
        }
        let mut bytes = Vec::new();
        File::open(path).and_then(|f| f.take(Self::MOST_BYTES + 1).read_to_end(&mut bytes)).map_err(trouble)?;
        if bytes.len() as u64 > Self::MOST_BYTES {
            return Err(Failure::new(format!("{} is larger than {}", path.display(), size::binary(Self::MOST_BYTES)))
                .hint("cut out the piece of memory that holds the tables"));
        }
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
        let mut tables = ImageTables::new(0x8000, 4096);
        assert!(tables.reserve(2) && !tables.reserve(1 << 17));
        let (a, b) = (tables.allocate().unwrap(), tables.allocate().unwrap());
        assert_eq!((a.bits(), b.bits(), tables.count()), (0x8000, 0x9000, 2));
        tables.store(b, 511, 7);
        assert_eq!((tables.load(b, 511), tables.bytes[0x1ff8]), (7, 7));
        tables.free(b);
        assert_eq!((tables.count(), tables.allocate()), (1, Some(b)));
        assert_eq!(tables.load(b, 511), 0);
    }
}
