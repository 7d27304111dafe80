//! A file seen as memory. Nothing about its content is assumed.

use std::path::Path;

use crate::failure::Failure;
use crate::source::SourceFile;

/// The bytes of a file, and where the first one lies.
pub struct Image {
    base: u64,
    bytes: Vec<u8>,
}

impl Image {
    /// The largest file that is read.
    const MOST_BYTES: u64 = 4 << 30;

    /// Reads the file whose first byte lies at `base`.
    pub fn read(path: &Path, base: u64) -> Result<Self, Failure> {
        Ok(Self { base, bytes: SourceFile::open(path)?.read(Self::MOST_BYTES)? })
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
}
