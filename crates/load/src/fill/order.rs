//! The order of hashing: that of the bytes in their buffer, whatever order they arrive in.

use std::collections::{BTreeMap, BTreeSet};

use dmalane_dma::SharedBuf;

use super::fragment::Fragment;
use super::hash::{Hasher, Hashes};
use super::options::FillOptions;

/// The fragments of the buffers that have arrived, and those whose turn it is to be hashed.
///
/// A buffer is ready while its next bytes to be hashed are there and nobody hashes it. [`Order::begin`] takes its
/// hasher, so that there is one turn of each buffer at a time, and [`Order::end`] brings it back.
pub(super) struct Order {
    buffers: Vec<Arrived>,
    ready: BTreeSet<usize>,
}

/// The fragments of a buffer that are there.
struct Arrived {
    /// By offset. While a fragment is being hashed or is with the sink, it is not here.
    fragments: BTreeMap<usize, Fragment>,
    len: usize,
    hash: Option<Box<Hasher>>,
    /// Bytes hashed.
    hashed: usize,
}

/// A fragment whose turn it is.
pub(super) struct Turn {
    pub buffer: usize,
    pub hash: Box<Hasher>,
    pub fragment: Fragment,
    /// Bytes to hash: those behind the end of the buffer are not.
    pub len: usize,
}

impl Order {
    /// Buffers of these lengths, of which nothing has arrived.
    pub fn new(lens: &[u64], options: &FillOptions) -> Self {
        let arrived = |(buffer, len): (usize, &u64)| Arrived {
            fragments: BTreeMap::new(),
            len: *len as usize,
            hash: Hasher::new(options, buffer).map(Box::new),
            hashed: 0,
        };
        Self { buffers: lens.iter().enumerate().map(arrived).collect(), ready: BTreeSet::new() }
    }

    /// Keeps a fragment that is not to be hashed any more.
    pub fn keep(&mut self, fragment: Fragment) {
        self.buffers[fragment.tag.buffer].fragments.insert(fragment.tag.offset, fragment);
    }

    /// Takes a fragment that is to be hashed when its turn comes.
    pub fn add(&mut self, fragment: Fragment) {
        let buffer = fragment.tag.buffer;
        self.keep(fragment);
        self.make_ready(buffer);
    }

    /// Whether it is the turn of any fragment.
    pub fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The fragment whose turn it is, of the first buffer that is ready.
    pub fn begin(&mut self) -> Option<Turn> {
        let buffer = self.ready.pop_first()?;
        let arrived = &mut self.buffers[buffer];
        let (at, len) = (arrived.hashed, arrived.len);
        let (hash, fragment) = (arrived.hash.take()?, arrived.fragments.remove(&at)?);
        let len = fragment.slice.len().min(len - at);
        Some(Turn { buffer, hash, fragment, len })
    }

    /// Ends the turn of a buffer, which is hashed up to `hashed` now.
    pub fn end(&mut self, buffer: usize, hashed: usize, hash: Box<Hasher>) {
        let arrived = &mut self.buffers[buffer];
        (arrived.hashed, arrived.hash) = (hashed, Some(hash));
        self.make_ready(buffer);
    }

    /// Whether more bytes than `leaves` of a buffer can be hashed.
    pub fn is_behind(&self, leaves: usize) -> bool {
        self.ready.iter().any(|buffer| {
            let Arrived { fragments, hashed, .. } = &self.buffers[*buffer];
            let mut end = *hashed;
            let next = fragments.range(end..).map(|(offset, fragment)| (*offset, fragment.end()));
            next.take_while(|(offset, to)| *offset == std::mem::replace(&mut end, *to))
                .any(|(_, to)| to - hashed > leaves)
        })
    }

    /// The hashes of each buffer, and the buffer itself if all of it is here.
    pub fn into_buffers(self) -> impl Iterator<Item = (Hashes, Option<SharedBuf>)> {
        self.buffers.into_iter().map(|Arrived { fragments, hash, .. }| {
            let slices = fragments.into_values().map(|fragment| Some(fragment.slice));
            let joined = slices.reduce(|a, b| a?.join(b?).ok()).flatten();
            (hash.map_or_else(Hashes::default, |hash| hash.finish()), joined.and_then(|slice| slice.into_whole().ok()))
        })
    }

    fn make_ready(&mut self, buffer: usize) {
        let Arrived { fragments, len, hash, hashed } = &self.buffers[buffer];
        if hash.is_some() && hashed < len && fragments.contains_key(hashed) {
            self.ready.insert(buffer);
        }
    }
}
