//! The parts of files that a load reads: all of a file, or the blocks in which its selected tensors lie; and their
//! places on the device.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use dmalane_queue::{DeviceAddr, QueueAddr, Refusal};

use crate::container::{Model, Tensor};
use crate::engine::describe;
use crate::error::Error;
use crate::fill::{Extent, FillError, Job, Target, Targets};

/// Reads begin and end at multiples of this, as direct I/O needs it.
const BLOCK: u64 = 4096;
/// Parts that are nearer to each other are read as one: that takes less time than another read.
const GAP: u64 = 64 << 10;

/// The parts of files that are read, each file's in order and apart: a job with a buffer for each file, in which they
/// follow each other.
pub(crate) struct Parts {
    job: Job,
    /// For each buffer the number of its first extent.
    first: Vec<usize>,
}

impl Parts {
    /// The parts of files, each with its length: those in which these tensors lie, or all of a file without any.
    pub fn new<'a>(files: impl IntoIterator<Item = (u64, Option<&'a [Arc<Tensor>]>)>) -> Self {
        Self::of_ranges(files.into_iter().map(|(len, tensors)| match tensors {
            Some(tensors) => (len, tensors.iter().map(|t| t.at.bits()..t.at.bits() + t.len).collect()),
            None => (len, std::iter::once(0..len).collect()),
        }))
    }

    /// The parts of files, each with its length, in which these ranges lie, which are in order.
    pub fn of_ranges(files: impl IntoIterator<Item = (u64, Vec<Range<u64>>)>) -> Self {
        let mut all = Self { job: Job::default(), first: Vec::new() };
        for (source, (len, ranges)) in files.into_iter().enumerate() {
            all.first.push(all.job.extents.len());
            all.add(source, ranges, len);
            all.job.buffers.push(all.of(source).last().map_or(0, |last| last.to + last.len));
        }
        all
    }

    /// Adds the blocks of a file of `len` bytes in which these ranges lie, which are in order.
    fn add(&mut self, source: usize, ranges: impl IntoIterator<Item = Range<u64>>, len: u64) {
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            let (start, end) = (range.start / BLOCK * BLOCK, range.end.next_multiple_of(BLOCK).min(len));
            let extents = &mut self.job.extents;
            match extents[self.first[source]..].last_mut() {
                Some(last) if start <= last.at.bits() + last.len + GAP => last.len = last.len.max(end - last.at.bits()),
                last => {
                    let to = last.map_or(0, |last| last.to + last.len);
                    extents.push(Extent { source, at: FileOffset::new(start), len: end - start, buffer: source, to });
                }
            }
        }
    }

    /// The parts of a file.
    fn of(&self, buffer: usize) -> &[Extent] {
        let end = self.first.get(buffer + 1).copied().unwrap_or(self.job.extents.len());
        &self.job.extents[self.first[buffer]..end]
    }

    /// The job that reads them.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// The job that reads the first `most` bytes of them.
    pub fn first(self, most: u64) -> Job {
        let (mut left, mut job) = (most, self.job);
        for part in &mut job.extents {
            part.len = part.len.min(left);
            left -= part.len;
        }
        job.extents.retain(|part| part.len > 0);
        let mut buffers = vec![0; job.buffers.len()];
        job.extents.iter().for_each(|part| buffers[part.buffer] += part.len);
        Job { buffers, ..job }
    }

    /// The ranges of the file that a range of its buffer holds.
    pub fn in_file(&self, buffer: usize, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let parts = self.of(buffer);
        let first = parts.partition_point(|part| part.to + part.len <= range.start);
        parts[first..].iter().take_while(move |part| part.to < range.end).map(move |part| {
            let at = |offset: u64| part.at.bits() + (offset.clamp(part.to, part.to + part.len) - part.to);
            at(range.start)..at(range.end)
        })
    }

    /// The offset in its buffer of a byte of a file, which a part has.
    pub fn offset(&self, buffer: usize, at: u64) -> u64 {
        let parts = self.of(buffer);
        let part = parts.partition_point(|part| part.at.bits() <= at).checked_sub(1).map(|n| &parts[n]);
        part.map_or(0, |part| part.to + (at - part.at.bits()))
    }

    /// Where in the file the byte at an offset of its buffer is.
    pub fn at(&self, buffer: usize, offset: u64) -> FileOffset {
        FileOffset::new(self.in_file(buffer, offset..offset + 1).next().map_or(offset, |range| range.start))
    }

    /// An error of the job, about the files that `about` knows.
    pub fn describe<'a>(&self, error: FillError, about: impl Fn(usize) -> (PathBuf, Option<&'a Model>)) -> Error {
        let in_file = match error {
            FillError::Transfer { buffer, offset, error } => {
                FillError::Transfer { buffer, offset: self.at(buffer, offset).bits(), error }
            }
            other => other,
        };
        describe(in_file, about)
    }
}

/// Ranges of a file with the places of their first bytes, in order and apart.
pub(crate) type Runs = Vec<(Range<u64>, DeviceAddr)>;

/// Adds a range behind those that are there: to the last one, if it follows that in the file and on the device.
pub(crate) fn add_run(runs: &mut Runs, range: Range<u64>, to: DeviceAddr) {
    match runs.last_mut() {
        Some((last, at)) if last.end == range.start && at.advance(last.end - last.start) == Some(to) => {
            last.end = range.end;
        }
        _ => runs.push((range, to)),
    }
}

/// The places on the device of ranges of files, and the parts that are read for them.
pub(crate) struct Places {
    pub parts: Parts,
    pub runs: Vec<Runs>,
}

impl Places {
    /// Of files, each with its length, of which only these runs are read.
    pub fn new(files: impl IntoIterator<Item = (u64, Runs)>) -> Self {
        let (lens, runs): (Vec<u64>, Vec<Runs>) = files.into_iter().unzip();
        let ranges = runs.iter().map(|runs| runs.iter().map(|(range, _)| range.clone()).collect());
        Self { parts: Parts::of_ranges(lens.into_iter().zip(ranges)), runs }
    }
}

impl Targets for Places {
    fn buffers(&self) -> usize {
        self.runs.len()
    }

    fn cut(&self, buffer: usize, range: Range<u64>, max_len: u64, out: &mut VecDeque<Target>) -> Result<(), Refusal> {
        let runs = &self.runs[buffer];
        for Range { start: mut at, end } in self.parts.in_file(buffer, range) {
            let first = runs.partition_point(|(range, _)| range.end <= at);
            for (range, to) in runs[first..].iter().take_while(|(range, _)| range.start < end) {
                let (start, stop) = (range.start.max(at), range.end.min(end));
                if start > at {
                    out.push_back(Target { len: start - at, to: None });
                }
                at = start;
                while at < stop {
                    let len = (stop - at).min(max_len);
                    let to = to.advance(at - range.start).ok_or(Refusal::PastTheTop)?;
                    out.push_back(Target { len, to: Some(to) });
                    at += len;
                }
            }
            if at < end {
                out.push_back(Target { len: end - at, to: None });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_once_and_found_again() {
        let parts = |ranges: &[Range<u64>]| {
            let mut parts = Parts { job: Job::default(), first: vec![0] };
            parts.add(0, ranges.iter().cloned(), 150_000);
            parts
        };
        let of =
            |ranges: &[Range<u64>]| parts(ranges).of(0).iter().map(|p| (p.at.bits(), p.len, p.to)).collect::<Vec<_>>();
        assert_eq!(of(&[0..150_000, 150_000..150_000]), [(0, 150_000, 0)]);
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[5..5, 9000..9001]), [(8192, 4096, 0)]);
        assert_eq!(of(&[100..200, 300..5000, 8192..8193, 149_999..150_000]), [(0, 12_288, 0), (147_456, 2544, 12_288)]);
        assert_eq!(of(&[100..200, 69_632..69_633]), [(0, 73_728, 0)], "a gap that is read");
        assert_eq!(of(&[100..200, 73_728..73_729]), [(0, 4096, 0), (73_728, 4096, 4096)]);
        let parts = parts(&[100..200, 100_000..110_000]);
        assert_eq!(parts.in_file(0, 4000..4100).collect::<Vec<_>>(), [4000..4096, 98_304..98_308]);
        assert_eq!((parts.at(0, 4095).bits(), parts.at(0, 4096).bits()), (4095, 98_304));
        assert_eq!((parts.offset(0, 4095), parts.offset(0, 98_304), parts.offset(0, 110_000)), (4095, 4096, 15_792));
        let mut parts = parts;
        parts.job.buffers.push(4096 + 12_288);
        let job = parts.first(4000);
        assert_eq!((job.buffers, job.extents.len()), (vec![4000], 1));
        let job = Parts::new([(7, None), (9, Some(&[][..])), (5, None)]).first(10);
        assert_eq!((job.buffers, job.extents.len()), (vec![7, 0, 3], 2));
        let whole = Parts::new([(7, None), (9, None)]);
        assert_eq!((&*whole.job().buffers, whole.of(1)[0].buffer), (&[7, 9][..], 1));
    }
}
