//! Buffers that were filled, and the report of how.

use std::time::Duration;

use dmalane_dma::{PageBacking, SharedBuf, VolatileSlice};

use super::hash::{Digest, Hashes};
use crate::stage::StageReport;
use crate::timeline::StageTimeline;

/// A buffer that was filled.
#[derive(Debug)]
pub struct FilledBuf {
    buf: SharedBuf,
    len: usize,
    checksum: Option<u64>,
    digests: Vec<Digest>,
}

impl FilledBuf {
    /// A buffer that was filled by other means; `None` when it is shorter than `len`.
    pub fn new(buf: SharedBuf, len: usize, checksum: Option<u64>) -> Option<Self> {
        (len <= buf.len()).then_some(Self { buf, len, checksum, digests: Vec::new() })
    }

    /// A buffer that the engine filled, of which `len` bytes were asked for.
    pub(super) fn hashed(buf: SharedBuf, len: usize, Hashes { checksum, digests }: Hashes) -> Self {
        Self { buf, len, checksum, digests }
    }

    /// Bytes that were asked for. The buffer may be a little longer; what follows is zero.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of which no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.buf.as_volatile_slice().sub(0, self.len).expect("a buffer is at least as long as was asked for")
    }

    /// XXH3-64 of the bytes, if that was asked for.
    pub fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// The hashes of its regions, in order, if
    /// [`FillOptions::hash_regions`](super::FillOptions::hash_regions) asked for them.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }

    /// The buffer, to be pinned, mapped or exported.
    pub fn shared(&self) -> &SharedBuf {
        &self.buf
    }

    /// The buffer. [`SharedBuf::into_cpu`] makes slices of it.
    pub fn into_shared(self) -> SharedBuf {
        self.buf
    }
}

/// Times and bytes of a job.
#[derive(Clone, Debug, Default)]
pub struct FillReport {
    /// Bytes read.
    pub bytes: u64,
    /// From the reservation to the last byte.
    pub wall: Duration,
    /// Until the first read could begin: the memory of the first chunk was there.
    pub first_chunk: Duration,
    /// The stages that moved any bytes, in the order of the path. Times are summed over the workers.
    pub stages: Vec<StageReport>,
    /// The most workers at once.
    pub workers: usize,
    /// The pages behind the first buffer, and why not better ones.
    pub backing: Option<PageBacking>,
    /// The memory was recycled: the pages of at least one buffer were there already.
    pub recycled: bool,
    /// The timeline, if [`FillOptions::timeline`](super::FillOptions::timeline) asked for it.
    pub timeline: Option<StageTimeline>,
}

/// Buffers that were filled, in the order of [`Job::buffers`](super::Job::buffers): all, or none of staging buffers.
#[derive(Debug)]
pub struct Filled {
    /// The buffers.
    pub buffers: Vec<FilledBuf>,
    /// The hashes of the regions of each buffer that did not stay.
    pub(crate) gone: Vec<Vec<Digest>>,
    /// Times and bytes.
    pub report: FillReport,
}
