//! Slices of tensors: the runs of bytes that they consist of, and how they are read.

use std::ops::Range;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use dmalane_dma::{CopyHint, Heap};

use super::block::{Block, HostTensor, model_heap};
use super::plan::{PAGE, Plan};
use super::reader::Reader;
use crate::container::Tensor;
use crate::error::Error;
use crate::fill::{Extent, Job, Watch};

/// Ranges of a slice that are at least this long are read where they go; shorter ones are gathered.
const DIRECT_RUN: u64 = 128 << 10;
/// Bytes between two ranges that are rather read than skipped, and that are read together, at most.
const GAP: u64 = 64 << 10;
const GATHER: u64 = 8 << 20;

/// Reads a range of each dimension of a tensor. The result has the shape `shape`, which has as many elements.
pub(super) fn read(
    reader: &Reader,
    (file, index): (usize, usize),
    ranges: &[Range<u64>],
    shape: Vec<u64>,
    watch: &mut Watch<'_>,
) -> Result<HostTensor, Error> {
    let of = &reader.files[file];
    of.check_parts()?;
    of.check_rows()?;
    let tensor = &of.contents().tensors[index];
    let bits = u64::from(
        tensor
            .element_bits()
            .ok_or_else(|| Error::BadSlice(format!("tensors of the type {:?} cannot be sliced", tensor.dtype)))?,
    );
    let (runs, run) = runs(&tensor.shape, ranges, bits).map_err(Error::BadSlice)?;
    let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
    let total = runs.len() as u64 * run;
    if elements.and_then(|n| n.checked_mul(bits)) != total.checked_mul(8) {
        return Err(Error::BadSlice("the shape does not have the elements of the ranges".to_owned()));
    }
    let at = tensor.at.bits();
    if total > 0 && run < DIRECT_RUN && runs.len() > 1 {
        let block = gather(reader, file, tensor, &runs, run, watch)?;
        return Ok(HostTensor::new(tensor, shape, block, 0, total));
    }
    let element = (bits / 8).max(1);
    if let (Some(block), [start]) = (of.kept(), &runs[..])
        && (at + start).is_multiple_of(element)
    {
        return Ok(HostTensor::new(tensor, shape, block.clone(), at + start, total));
    }
    // As in the file, so that direct I/O puts the bytes in place.
    let first = runs.first().map_or(0, |start| (at + start) & (PAGE - 1));
    let first = if first.is_multiple_of(element) { first } else { 0 };
    let extent = |(n, start): (usize, &u64)| {
        let (at, to) = (FileOffset::new(at + start), first + n as u64 * run);
        Extent { source: 0, at, len: run, buffer: 0, to }
    };
    let extents = runs.iter().enumerate().filter(|_| run > 0).map(extent).collect();
    let len = if total > 0 { first + total } else { 0 };
    let plan = Plan { tensors: 0..0, places: Vec::new(), extents, len, kept: None };
    let charge = reader.budget.take(Some(&tensor.name), plan.memory())?;
    let (block, _) = reader.read_one(file, plan, charge, watch)?;
    Ok(HostTensor::new(tensor, shape, block, first.min(len), total))
}

/// The runs of consecutive bytes that a slice of a tensor consists of: where each starts in the tensor, and the bytes
/// of each.
fn runs(shape: &[u64], ranges: &[Range<u64>], bits: u64) -> Result<(Vec<u64>, u64), String> {
    if ranges.len() != shape.len() {
        return Err(format!("{} ranges for {} dimensions", ranges.len(), shape.len()));
    }
    if let Some((range, dim)) =
        ranges.iter().zip(shape).find(|(range, dim)| range.start > range.end || range.end > **dim)
    {
        return Err(format!("{}..{} does not lie within a dimension of {dim}", range.start, range.end));
    }
    if ranges.iter().any(|range| range.start == range.end) {
        return Ok((Vec::new(), 0));
    }
    // Dimensions from `inner` on make one run; all behind it are whole. No product overflows: each is at most the
    // elements of the tensor, which is not empty.
    let inner = (0..shape.len()).rev().find(|i| ranges[*i] != (0..shape[*i])).unwrap_or(0);
    let below = |i: usize| shape[i + 1..].iter().product::<u64>();
    let bytes = |elements: u64| match (elements * bits).is_multiple_of(8) {
        true => Ok(elements * bits / 8),
        false => Err(format!("a slice of elements of {bits} bits starts and ends at whole bytes")),
    };
    let Some(Range { start: first, end: stop }) = ranges.get(inner).cloned() else { return Ok((vec![0], bytes(1)?)) };
    let run = bytes((stop - first) * below(inner))?;
    let mut starts = vec![first * below(inner)];
    for outer in (0..inner).rev() {
        let step = below(outer);
        starts = ranges[outer].clone().flat_map(|n| starts.iter().map(move |at| at + n * step)).collect();
    }
    Ok((starts.into_iter().map(bytes).collect::<Result<_, _>>()?, run))
}

/// Reads many short runs of a tensor: those that lie close together with what lies between them.
fn gather(
    reader: &Reader,
    file: usize,
    tensor: &Tensor,
    runs: &[u64],
    run: u64,
    watch: &mut Watch<'_>,
) -> Result<Arc<Block>, Error> {
    let (at, total) = (tensor.at.bits(), runs.len() as u64 * run);
    let charge = reader.budget.take(Some(&tensor.name), total.next_multiple_of(PAGE))?;
    let of = &reader.files[file];
    let buf = model_heap().allocate(total as usize)?.share();
    let (mut first, mut to) = (0, 0);
    while first < runs.len() {
        let mut end = first + 1;
        while end < runs.len()
            && runs[end] + run - runs[first] <= GATHER
            && runs[end].saturating_sub(runs[end - 1] + run) <= GAP
        {
            end += 1;
        }
        let (start, len) = (at + runs[first], runs[end - 1] + run - runs[first]);
        // As in the file, so that direct I/O puts the bytes in place.
        let front = start & (PAGE - 1);
        let extent = Extent { source: 0, at: FileOffset::new(start), len, buffer: 0, to: front };
        let job = Job { buffers: vec![front + len], extents: vec![extent] };
        for scratch in reader.run(&[of], job, &[Vec::new()], watch)? {
            let scratch = scratch.as_volatile_slice();
            for of_run in &runs[first..end] {
                let (from, run) = ((front + of_run - runs[first]) as usize, run as usize);
                if let Some((to, from)) = buf.as_volatile_slice().sub(to, run).zip(scratch.sub(from, run)) {
                    to.copy_from(from, CopyHint::Keep);
                }
                to += run;
            }
        }
        first = end;
    }
    Ok(Block::charged(buf, Some(charge)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The reference visits every element.
        #[test]
        fn runs_are_the_elements_of_the_slice(
            dims in prop::collection::vec((1u64..6, 0u64..6, 0u64..6), 0..4),
        ) {
            let shape: Vec<u64> = dims.iter().map(|(dim, ..)| *dim).collect();
            let ranges: Vec<Range<u64>> =
                dims.iter().map(|(dim, a, b)| (*a.min(b)).min(*dim)..(*a.max(b)).min(*dim)).collect();
            let (runs, run) = runs(&shape, &ranges, 8).unwrap();
            let found: Vec<u64> = runs.iter().flat_map(|start| *start..start + run).collect();
            let all = shape.iter().product::<u64>();
            let within = |n: &u64| {
                let mut rest = *n;
                shape.iter().zip(&ranges).rev().all(|(dim, range)| {
                    let at = rest % dim;
                    rest /= dim;
                    range.contains(&at)
                })
            };
            prop_assert_eq!(found, (0..all).filter(within).collect::<Vec<_>>());
        }
    }

    #[test]
    fn bad_ranges_are_refused() {
        let of_four = |start, end, bits| runs(&[4], &[Range { start, end }], bits);
        assert!(runs(&[4], &[], 8).is_err());
        assert!(of_four(3, 2, 8).is_err());
        assert!(of_four(0, 5, 8).is_err());
        assert!(of_four(1, 2, 4).is_err(), "half a byte");
        assert_eq!(of_four(2, 4, 4), Ok((vec![1], 1)));
    }
}
