//! The order of hashing: that of the bytes in their buffer, whatever order they arrive in; or in each of its lanes.

use std::collections::{BTreeMap, BTreeSet};

use dmalane_dma::SharedBuf;

use super::fragment::Fragment;
use super::hash::{Hasher, Hashes};
use super::options::FillOptions;

/// Bytes of a lane, at least.
pub(super) const LANE: u64 = 16 << 20;

/// The fragments of the buffers that have arrived, and those whose turn it is to be hashed.
///
/// A buffer is hashed in one lane or, by several threads at once, in lanes that end with regions. A lane is ready while
/// its next bytes to be hashed are there and nobody hashes it. [`Order::begin`] takes its hasher, so that there is one
/// turn of each lane at a time, and [`Order::end`] brings it back.
pub(super) struct Order {
    buffers: Vec<Arrived>,
    /// Buffers, and which lane of each.
    ready: BTreeSet<(usize, usize)>,
}

/// The fragments of a buffer that are there.
struct Arrived {
    /// By offset. While a fragment is being hashed or is with the sink, it is not here.
    fragments: BTreeMap<usize, Fragment>,
    lanes: Vec<Lane>,
}

/// A part of a buffer that is hashed in order.
struct Lane {
    /// Behind the last byte that is hashed.
    end: usize,
    hash: Option<Box<Hasher>>,
    /// Up to where it was hashed.
    hashed: usize,
}

/// A fragment whose turn it is.
pub(super) struct Turn {
    /// Its buffer, and which lane of it.
    pub at: (usize, usize),
    pub hash: Box<Hasher>,
    pub fragment: Fragment,
    /// Bytes to hash: those behind the end of the buffer are not.
    pub len: usize,
}

impl Lane {
    /// The lanes of a buffer: one, or as many of `least` bytes as its regions allow.
    fn of(options: &FillOptions, buffer: usize, len: u64, least: Option<u64>) -> Vec<Self> {
        let ends = options.hash_regions.as_ref().and_then(|all| all.ends.get(buffer)).map_or(&[][..], Vec::as_slice);
        let (mut lanes, mut at, mut first) = (Vec::new(), 0, 0);
        let mut add = |at: u64, end: u64, regions| {
            let hash = Hasher::new(options, buffer, at, regions).map(Box::new);
            lanes.push(Self { end: end as usize, hash, hashed: at as usize });
        };
        // The checksum of the buffer is that of its bytes in order.
        if let Some(least) = least.filter(|_| !options.checksum && ends.is_sorted()) {
            for (region, end) in ends.iter().enumerate() {
                if end.saturating_sub(at) >= least && end.saturating_add(least) <= len {
                    add(at, *end, first..region + 1);
                    (at, first) = (*end, region + 1);
                }
            }
        }
        add(at, len, first..ends.len());
        lanes
    }
}

impl Order {
    /// Buffers of these lengths, of which nothing has arrived, in lanes of so many bytes if several threads hash.
    pub fn new(lens: &[u64], options: &FillOptions, lanes: Option<u64>) -> Self {
        let arrived = |(buffer, len): (usize, &u64)| Arrived {
            fragments: BTreeMap::new(),
            lanes: Lane::of(options, buffer, *len, lanes),
        };
        Self { buffers: lens.iter().enumerate().map(arrived).collect(), ready: BTreeSet::new() }
    }

    /// Where the lanes of each buffer end.
    pub fn lanes(&self) -> Vec<Vec<usize>> {
        self.buffers.iter().map(|buffer| buffer.lanes.iter().map(|lane| lane.end).collect()).collect()
    }

    /// Keeps a fragment that is not to be hashed any more.
    pub fn keep(&mut self, fragment: Fragment) {
        self.buffers[fragment.tag.buffer].fragments.insert(fragment.tag.offset, fragment);
    }

    /// Takes a fragment that is to be hashed when its turn comes.
    pub fn add(&mut self, mut fragment: Fragment) {
        let buffer = fragment.tag.buffer;
        let lanes = &self.buffers[buffer].lanes;
        // What lies behind the end of the buffer stays with the last one.
        let first = lanes.partition_point(|lane| lane.end <= fragment.tag.offset).min(lanes.len() - 1);
        let ends: Vec<usize> = lanes[first..lanes.len() - 1].iter().map(|lane| lane.end).collect();
        let (mut lane, until) = (first, fragment.end());
        for end in ends.into_iter().take_while(|end| *end < until) {
            if let Some(mut front) = fragment.split_off_front(end - fragment.tag.offset) {
                // It is one read.
                front.tag.is_read = false;
                self.keep(front);
                self.make_ready((buffer, lane));
                lane += 1;
            }
        }
        self.keep(fragment);
        self.make_ready((buffer, lane));
    }

    /// Whether it is the turn of any fragment.
    pub fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The fragment whose turn it is, of the first lane that is ready.
    pub fn begin(&mut self) -> Option<Turn> {
        let at = self.ready.pop_first()?;
        let Arrived { fragments, lanes } = &mut self.buffers[at.0];
        let lane = &mut lanes[at.1];
        let (hash, fragment) = (lane.hash.take()?, fragments.remove(&lane.hashed)?);
        let len = fragment.slice.len().min(lane.end - lane.hashed);
        Some(Turn { at, hash, fragment, len })
    }

    /// Ends the turn of a lane, which is hashed up to `hashed` now.
    pub fn end(&mut self, at: (usize, usize), hashed: usize, hash: Box<Hasher>) {
        let lane = &mut self.buffers[at.0].lanes[at.1];
        (lane.hashed, lane.hash) = (hashed, Some(hash));
        self.make_ready(at);
    }

    /// Whether more bytes than `leaves` of a lane can be hashed.
    pub fn is_behind(&self, leaves: usize) -> bool {
        self.ready.iter().any(|(buffer, lane)| {
            let Arrived { fragments, lanes } = &self.buffers[*buffer];
            let Lane { end: last, hashed, .. } = lanes[*lane];
            let mut end = hashed;
            let next = fragments.range(end..last).map(|(offset, fragment)| (*offset, fragment.end()));
            next.take_while(|(offset, to)| *offset == std::mem::replace(&mut end, *to))
                .any(|(_, to)| to - hashed > leaves)
        })
    }

    /// The hashes of each buffer, and the buffer itself if all of it is here.
    pub fn into_buffers(self) -> impl Iterator<Item = (Hashes, Option<SharedBuf>)> {
        self.buffers.into_iter().map(|Arrived { fragments, lanes }| {
            let slices = fragments.into_values().map(|fragment| Some(fragment.slice));
            let joined = slices.reduce(|a, b| a?.join(b?).ok()).flatten();
            let hashes = lanes.into_iter().filter_map(|lane| Some(lane.hash?.finish()));
            let hashes = hashes.reduce(|mut all, next| {
                all.digests.extend(next.digests);
                all
            });
            (hashes.unwrap_or_default(), joined.and_then(|slice| slice.into_whole().ok()))
        })
    }

    fn make_ready(&mut self, at: (usize, usize)) {
        let Arrived { fragments, lanes } = &self.buffers[at.0];
        let Lane { end, hash, hashed } = &lanes[at.1];
        if hash.is_some() && hashed < end && fragments.contains_key(hashed) {
            self.ready.insert(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dmalane_dma::{AnonHeap, Heap};

    use super::*;
    use crate::fill::fragment::Tag;
    use crate::fill::hash::Digest;
    use crate::fill::options::HashRegions;

    /// Fragments of any lengths in any order, hashed by several at once, against the hashes of each region.
    #[test]
    fn lanes_give_the_hashes_of_their_regions() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        let mut many = 0;
        for _ in 0..300 {
            let buf = AnonHeap::new().allocate(16 << 10).unwrap().share();
            let len = 1 + random(buf.len());
            let bytes: Vec<u8> = (0..buf.len()).map(|_| random(256) as u8).collect();
            buf.as_volatile_slice().write(&bytes);
            let mut ends: Vec<u64> = (0..random(20)).map(|_| random(len + 1) as u64).collect();
            ends.sort_unstable();
            let regions = HashRegions { ends: vec![ends.clone()], sha256: random(2) == 0 };
            let checksum = random(4) == 0;
            let options =
                FillOptions { hash_regions: Some(Arc::new(regions.clone())), checksum, ..FillOptions::default() };
            let mut order = Order::new(&[len as u64], &options, Some(1 + random(4096) as u64));
            many += usize::from(order.lanes()[0].len() > 2);
            assert!(!checksum || order.lanes() == [[len]]);
            let (mut fragments, mut rest, mut offset) = (Vec::new(), buf.into_slice(), 0);
            while let Some(slice) = rest.split_off_front((1 + random(5000)).min(rest.len())).filter(|s| !s.is_empty()) {
                let tag = Tag { buffer: 0, offset, is_read: true, slot: None, via: None, landed: None };
                offset += slice.len();
                fragments.push(Fragment { tag, slice });
            }
            let (mut turns, mut most) = (Vec::new(), 0);
            while !fragments.is_empty() || order.is_ready() || !turns.is_empty() {
                match random(3) {
                    0 if !fragments.is_empty() => {
                        let next = random(fragments.len());
                        order.add(fragments.swap_remove(next));
                    }
                    1 => turns.extend(order.begin()),
                    2 if !turns.is_empty() => {
                        let next = random(turns.len());
                        let Turn { at, mut hash, fragment, len } = turns.swap_remove(next);
                        hash.write(&bytes[fragment.tag.offset..fragment.tag.offset + len]);
                        order.end(at, fragment.end(), hash);
                        order.keep(fragment);
                    }
                    _ => {}
                }
                most = most.max(turns.len());
            }
            let (hashes, whole) = order.into_buffers().next().unwrap();
            assert_eq!(whole.unwrap().len(), bytes.len());
            let mut hasher = Hasher::new(&options, 0, 0, 0..ends.len()).unwrap();
            hasher.write(&bytes[..len]);
            let right = hasher.finish();
            assert_eq!((hashes.digests.len(), hashes.checksum), (ends.len(), right.checksum));
            let same = |(a, b): (&Digest, &Digest)| a == b;
            assert!(hashes.digests.iter().zip(&right.digests).all(same), "{ends:?}");
        }
        assert!(many > 50, "{many}");
    }
}
