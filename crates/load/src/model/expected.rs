//! Hashes that the tensors of files must have, from a manifest, compared in the pass that reads.

use std::collections::HashMap;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use dmalane_dma::AnonHeap;

use super::file::ModelFile;
use super::plan::Plan;
use crate::container::Tensor;
use crate::error::Error;
use crate::fill::{Digest, Extent, HashRegions, Job};
use crate::manifest::{Manifest, ManifestFile, ManifestRegion, refuse};
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
    let outside: Vec<&ManifestRegion> = file.regions.iter().filter(|region| region.part.tensor().is_none()).collect();
    let (mut ends, mut extents, mut to) = (Vec::new(), Vec::new(), 0);
    for ManifestRegion { start, end, .. } in &outside {
        extents.push(Extent { source: 0, at: FileOffset::new(*start), len: end - start, buffer: 0, to });
        to += end - start;
        ends.push(to);
    }
    if to == 0 {
        return Ok(());
    }
    let sha256 = outside.iter().any(|region| region.digest.sha256.is_some());
    let mut options = ReadOptions::default();
    options.fill.hash_regions = Some(Arc::new(HashRegions { ends: vec![ends], sha256 }));
    let job = Job { buffers: vec![to], extents };
    let read = Read::sources(vec![of.open()?]).options(options).job(job).into_memory(&AnonHeap::new())?;
    let digests = read.filled.buffers.iter().flat_map(|buffer| buffer.digests());
    refuse(outside.into_iter().zip(digests).filter_map(|(region, digest)| file.differs(region, digest)).collect())
}

/// A tensor that has bytes, in a buffer: its file, its number there, and where it begins and ends.
pub(super) type Placed<'a> = (&'a ModelFile, usize, u64, u64);

/// The tensors of a plan that have bytes.
pub(super) fn placed<'a>(file: &'a ModelFile, plan: &Plan) -> Vec<Placed<'a>> {
    let all = plan.tensors.clone().zip(&plan.places);
    let ends = all.map(|(n, place)| (file, n, *place, place + file.contents().tensors[n].len));
    ends.filter(|(_, _, at, end)| at < end).collect()
}

/// The ranges to hash in buffers, each of tensors in the order of their places; `None` where nothing is expected.
pub(super) fn hash_regions(buffers: &[Vec<Placed<'_>>]) -> Option<Arc<HashRegions>> {
    let expected = buffers.iter().flatten().filter_map(|(file, ..)| file.expected.as_ref());
    let sha256 = expected.clone().flat_map(|file| &file.regions).any(|region| region.digest.sha256.is_some());
    expected.clone().next()?;
    // Every other range is a tensor; those between are bytes that no tensor has.
    let ends = |tensors: &Vec<Placed<'_>>| tensors.iter().flat_map(|(_, _, at, end)| [*at, *end]).collect();
    Some(Arc::new(HashRegions { ends: buffers.iter().map(ends).collect(), sha256 }))
}

/// Compares the hashes of buffers, for each those of its [`hash_regions`].
pub(super) fn check<'d>(
    buffers: &[Vec<Placed<'_>>],
    digests: impl IntoIterator<Item = &'d [Digest]>,
) -> Result<(), Error> {
    let mut differences = Vec::new();
    for (tensors, digests) in buffers.iter().zip(digests) {
        for ((file, n, ..), found) in tensors.iter().zip(digests.iter().skip(1).step_by(2)) {
            let expected = file.expected.as_ref();
            differences.extend(expected.and_then(|expected| expected.differs(&expected.regions[*n], found)));
        }
    }
    refuse(differences)
}
