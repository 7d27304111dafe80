//! Hashes of buffers and of regions of them, taken in order as the bytes arrive.

use std::hash::Hasher as _;
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use twox_hash::XxHash3_64;

use super::options::{FillOptions, HashRegions};

/// Hashes of a region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Digest {
    /// XXH3-64 with seed 0, as `xxhsum -H3` prints it: finds damage, but not forgery.
    pub xxh3: u64,
    /// SHA-256, if that was asked for.
    pub sha256: Option<Box<[u8; 32]>>,
}

impl Digest {
    /// Whether these hashes are of the same bytes as `other`. SHA-256 counts where both have it.
    pub fn agrees(&self, other: &Self) -> bool {
        self.xxh3 == other.xxh3 && self.sha256.as_ref().zip(other.sha256.as_ref()).is_none_or(|(a, b)| a == b)
    }
}

/// Hashes of a buffer.
#[derive(Default)]
pub(crate) struct Hashes {
    /// XXH3-64 of all of it.
    pub checksum: Option<u64>,
    /// Those of its regions.
    pub digests: Vec<Digest>,
}

/// Hashes a buffer and its regions, or some of its regions.
pub(super) struct Hasher {
    whole: Option<XxHash3_64>,
    regions: Option<Regions>,
}

struct Regions {
    all: Arc<HashRegions>,
    buffer: usize,
    /// The next region, and behind the last one.
    left: Range<usize>,
    /// Where the next bytes are in the buffer.
    at: u64,
    /// The region of which some bytes have come.
    open: Option<(XxHash3_64, Option<Sha256>)>,
    digests: Vec<Digest>,
}

impl Hasher {
    /// Whether there is anything to hash.
    pub fn is_wanted(options: &FillOptions) -> bool {
        options.checksum || options.hash_regions.is_some()
    }

    /// A hasher for a buffer, if one is wanted, or for these of its regions, which begin at `at`.
    pub fn new(options: &FillOptions, buffer: usize, at: u64, left: Range<usize>) -> Option<Self> {
        let regions = options.hash_regions.as_ref().filter(|all| buffer < all.ends.len());
        let regions =
            regions.map(|all| Regions { all: all.clone(), buffer, left, at, open: None, digests: Vec::new() });
        let whole = options.checksum.then(|| XxHash3_64::with_seed(0));
        Self::is_wanted(options).then_some(Self { whole, regions })
    }

    /// Takes the next bytes.
    pub fn write(&mut self, bytes: &[u8]) {
        if let Some(whole) = &mut self.whole {
            whole.write(bytes);
        }
        if let Some(regions) = &mut self.regions {
            regions.write(bytes);
        }
    }

    /// The hashes of everything that has come.
    pub fn finish(mut self) -> Hashes {
        if let Some(regions) = &mut self.regions {
            // Empty regions at the end have no bytes that would close them.
            regions.write(&[]);
        }
        Hashes {
            checksum: self.whole.map(|whole| whole.finish()),
            digests: self.regions.map_or(Vec::new(), |regions| regions.digests),
        }
    }
}

impl Regions {
    fn write(&mut self, mut bytes: &[u8]) {
        while let Some(end) = self.all.ends[self.buffer][..self.left.end].get(self.left.start) {
            let left = end.saturating_sub(self.at);
            let now;
            (now, bytes) = bytes.split_at(bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
            self.at += now.len() as u64;
            let whole = now.len() as u64 == left;
            if whole && self.open.is_none() {
                // Most regions are tensors that arrive as a whole: no state to set up.
                let sha256 = self.all.sha256.then(|| Box::new(Sha256::digest(now).into()));
                self.digests.push(Digest { xxh3: XxHash3_64::oneshot(now), sha256 });
                self.left.start += 1;
                continue;
            }
            if !now.is_empty() {
                let sha256 = self.all.sha256;
                let (xxh3, sha256) =
                    self.open.get_or_insert_with(|| (XxHash3_64::with_seed(0), sha256.then(Sha256::new)));
                xxh3.write(now);
                sha256.iter_mut().for_each(|sha256| sha256.update(now));
            }
            if !whole {
                return;
            }
            if let Some((xxh3, sha256)) = self.open.take() {
                let sha256 = sha256.map(|sha256| Box::new(sha256.finalize().into()));
                self.digests.push(Digest { xxh3: xxh3.finish(), sha256 });
            }
            self.left.start += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_have_the_hashes_of_their_bytes_however_they_arrive() {
        let bytes: Vec<u8> = (0..5000u32).map(|i| (i * 7 % 251) as u8).collect();
        let ends = vec![0, 8, 8, 1000, 1001, 4096, 4990, 4990];
        let want: Vec<Digest> = [0]
            .iter()
            .chain(&ends)
            .zip(&ends)
            .map(|(from, to)| {
                let region = &bytes[*from as usize..*to as usize];
                let sha256 = Some(Box::new(Sha256::digest(region).into()));
                Digest { xxh3: XxHash3_64::oneshot(region), sha256 }
            })
            .collect();
        let hash_regions = Arc::new(HashRegions { ends: vec![Vec::new(), ends], sha256: true });
        for step in [1, 7, 8, 999, 1000, 4096, 5000] {
            let options =
                FillOptions { hash_regions: Some(hash_regions.clone()), checksum: true, ..FillOptions::default() };
            let mut hasher = Hasher::new(&options, 1, 0, 0..8).unwrap();
            bytes.chunks(step).for_each(|piece| hasher.write(piece));
            let hashes = hasher.finish();
            assert_eq!((hashes.digests, hashes.checksum), (want.clone(), Some(XxHash3_64::oneshot(&bytes))));
            // Those of some alone.
            let options = FillOptions { checksum: false, ..options };
            let mut hasher = Hasher::new(&options, 1, 8, 2..5).unwrap();
            bytes[8..1001].chunks(step).for_each(|piece| hasher.write(piece));
            assert_eq!(hasher.finish().digests, want[2..5]);
        }
        let options = FillOptions { hash_regions: Some(hash_regions), ..FillOptions::default() };
        assert!(Hasher::new(&options, 0, 0, 0..0).unwrap().finish().digests.is_empty());
        assert!(Hasher::new(&FillOptions::default(), 0, 0, 0..0).is_none());
    }
}
