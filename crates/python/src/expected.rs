//! Hashes that the tensors of files must have, from a manifest, compared in the pass that reads.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use dmalane::addr::FileOffset;
use dmalane::dma::AnonHeap;
use dmalane::load::fill::{Digest, Extent, HashRegions, Job};
use dmalane::load::{Difference, Error as LoadError, Manifest, ManifestFile, ManifestRegion};
use dmalane::{Read, ReadOptions};
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::open::{Plan, Source};

/// A manifest as Python has it: its JSON, or the path of its file.
#[derive(FromPyObject)]
pub(crate) enum ManifestOf {
    Json(Vec<u8>),
    Path(PathBuf),
}

impl ManifestOf {
    pub(crate) fn read(self) -> Result<Manifest, Failure> {
        match self {
            Self::Json(text) => Manifest::parse(&text).map_err(|e| Failure::new("FormatError", e.to_string())),
            Self::Path(path) => Ok(Manifest::read(&path)?),
        }
    }
}

/// The part of a manifest that is about a file.
pub(crate) struct Expected {
    file: ManifestFile,
    /// For each tensor of the file, its region.
    regions: Vec<usize>,
}

/// Finds what the manifest has of each file, and compares all that is not in a tensor: headers and gaps.
pub(crate) fn expect(manifest: &Manifest, files: &[Source]) -> Result<Vec<Expected>, Failure> {
    let lens = files.iter().map(|file| (&*file.path, file.model.len));
    let found = manifest.expect(lens)?;
    let mut all = Vec::new();
    for (file, source) in found.files().iter().zip(files) {
        check_outside(file, source)?;
        let named = file.regions.iter().enumerate().filter_map(|(i, region)| Some((&*region.part.tensor()?.name, i)));
        let named: HashMap<&str, usize> = named.collect();
        // The header is the one that was hashed. So only a manifest that somebody edited lacks a tensor.
        let place = |tensor: &Arc<dmalane::load::Tensor>| {
            let at = *named.get(&*tensor.name)?;
            let ManifestRegion { start, end, .. } = file.regions[at];
            (start == tensor.at.bits() && end - start == tensor.len).then_some(at)
        };
        let regions = source.model.tensors.iter().map(|tensor| {
            place(tensor).ok_or_else(|| {
                let message = format!("{}: tensor {:?} is not in the manifest", source.name(), tensor.name);
                Failure::new("IntegrityError", message).text("path", source.name()).text("tensor", &*tensor.name)
            })
        });
        all.push(Expected { regions: regions.collect::<Result<_, _>>()?, file: (*file).clone() });
    }
    Ok(all)
}

/// Compares the regions of a file that are no tensors.
fn check_outside(file: &ManifestFile, source: &Source) -> Result<(), Failure> {
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
    let read = Read::sources(vec![source.open()?]).options(options).job(job).into_memory(&AnonHeap::new())?;
    let digests = read.filled.buffers.iter().flat_map(|buffer| buffer.digests());
    refuse(outside.into_iter().zip(digests).filter_map(|(region, digest)| file.differs(region, digest)).collect())
}

/// A tensor that has bytes, in a buffer: its file, its number there, and where it begins and ends.
pub(crate) type Placed<'a> = (&'a Source, usize, u64, u64);

/// The tensors of a plan that have bytes.
pub(crate) fn placed<'a>(source: &'a Source, plan: &Plan) -> Vec<Placed<'a>> {
    let all = plan.tensors.clone().zip(&plan.places);
    let ends = all.map(|(n, place)| (source, n, *place, place + source.model.tensors[n].len));
    ends.filter(|(_, _, at, end)| at < end).collect()
}

/// The ranges to hash in buffers, each of tensors in the order of their places; `None` where nothing is expected.
pub(crate) fn hash_regions(buffers: &[Vec<Placed<'_>>]) -> Option<Arc<HashRegions>> {
    let expected = buffers.iter().flatten().filter_map(|(source, ..)| source.expected.as_ref());
    let sha256 = expected.clone().flat_map(|e| &e.file.regions).any(|region| region.digest.sha256.is_some());
    expected.clone().next()?;
    // Every other range is a tensor; those between are bytes that no tensor has.
    let ends = |tensors: &Vec<Placed<'_>>| tensors.iter().flat_map(|(_, _, at, end)| [*at, *end]).collect();
    Some(Arc::new(HashRegions { ends: buffers.iter().map(ends).collect(), sha256 }))
}

/// Compares the hashes of buffers, for each those of its [`hash_regions`].
pub(crate) fn check<'d>(
    buffers: &[Vec<Placed<'_>>],
    digests: impl IntoIterator<Item = &'d [Digest]>,
) -> Result<(), Failure> {
    let mut differences = Vec::new();
    for (tensors, digests) in buffers.iter().zip(digests) {
        for ((source, n, ..), found) in tensors.iter().zip(digests.iter().skip(1).step_by(2)) {
            let Some(Expected { file, regions }) = &source.expected else { continue };
            differences.extend(file.differs(&file.regions[regions[*n]], found));
        }
    }
    refuse(differences)
}

fn refuse(differences: Vec<Difference>) -> Result<(), Failure> {
    if differences.is_empty() { Ok(()) } else { Err(LoadError::Differs { differences }.into()) }
}
