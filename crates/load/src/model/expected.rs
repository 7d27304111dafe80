//! Hashes that the tensors of files must have, from a manifest, compared in the pass that reads.

use std::collections::HashMap;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use dmalane_dma::AnonHeap;

use super::file::ModelFile;
use super::plan::Plan;
use crate::container::Tensor;
use crate::error::Error;
use crate::fill::{Extent, FilledBuf, Job};
use crate::manifest::{Compared, Manifest, ManifestFile, ManifestRegion, check, hash_regions};
use crate::read::{Read, ReadOptions};

/// Finds what the manifest has of each file, and compares all that is not in a tensor: headers and gaps.
pub(super) fn expect(manifest: &Manifest, files: &mut [ModelFile]) -> Result<(), Error> {
    let found = manifest.expect(files.iter().map(|file| (file.path(), file.contents().len)))?;
    for (file, of) in found.into_iter().flatten().zip(files) {
        check_outside(&file, of)?;
        let named = file.regions.iter().filter_map(|region| Some((&*region.part.tensor()?.name, region)));
        let named: HashMap<&str, &ManifestRegion> = named.collect();
        let region = |tensor: &Arc<Tensor>| {
            let is_it = |r: &&&ManifestRegion| r.start == tensor.at.bits() && r.end - r.start == tensor.len;
            // The header is the one that was hashed. So only a manifest that somebody edited lacks a tensor.
            let unlisted = || Error::Unlisted { path: of.path().to_owned(), tensor: tensor.name.clone() };
            named.get(&*tensor.name).filter(is_it).map(|region| (*region).clone()).ok_or_else(unlisted)
        };
        let regions = of.contents().tensors.iter().map(region).collect::<Result<_, _>>()?;
        let (name, format) = (file.name.clone(), file.format.clone());
        of.expected = Some(ManifestFile { name, bytes: file.bytes, format, regions });
    }
    Ok(())
}

/// Compares the regions of a file that are no tensors.
fn check_outside(file: &ManifestFile, of: &ModelFile) -> Result<(), Error> {
    let (mut ranges, mut extents, mut to) = (Vec::new(), Vec::new(), 0);
    for region in file.regions.iter().filter(|region| region.part.tensor().is_none()) {
        let ManifestRegion { start, end, .. } = region;
        extents.push(Extent { source: 0, at: FileOffset::new(*start), len: end - start, buffer: 0, to });
        to += end - start;
        ranges.push((to, Some((file, region))));
    }
    if to == 0 {
        return Ok(());
    }
    let (mut options, ranges) = (ReadOptions::default(), [ranges]);
    options.fill.hash_regions = hash_regions(&ranges);
    let job = Job { buffers: vec![to], extents };
    let read = Read::sources(vec![of.open()?]).options(options).job(job).into_memory(&AnonHeap::new())?;
    check(&ranges, read.filled.buffers.iter().map(FilledBuf::digests))
}

/// A tensor in a buffer: its file, its number there, and where it begins and ends.
pub(super) type Placed<'a> = (&'a ModelFile, usize, u64, u64);

/// The ranges of a buffer that tensors are, in the order of their places, and those between, which no tensor has.
pub(super) fn compared<'a>(tensors: impl IntoIterator<Item = Placed<'a>>) -> Vec<Compared<'a>> {
    let region = |file: &'a ModelFile, n: usize| file.expected.as_ref().map(|of| (of, &of.regions[n]));
    let with_bytes = tensors.into_iter().filter(|(_, _, at, end)| at < end);
    with_bytes.flat_map(|(file, n, at, end)| [(at, None), (end, region(file, n))]).collect()
}

/// The ranges of a plan's buffer.
pub(super) fn of_plan<'a>(file: &'a ModelFile, plan: &Plan) -> Vec<Compared<'a>> {
    let all = plan.tensors.clone().zip(&plan.places);
    compared(all.map(|(n, place)| (file, n, *place, place + file.contents().tensors[n].len)))
}
