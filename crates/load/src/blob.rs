//! Hashes of files; and files that are named by theirs, as in the local cache of Hugging Face's libraries.
//!
//! Layout: <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_device::NoIommu;
use dmalane_dma::Registrar;
use dmalane_queue::Queue;

use crate::difference::{Difference, Problem};
use crate::engine::{describe, queues};
use crate::error::Error;
use crate::fill::{self, Digest, Event, FillOptions, HashRegions, Job, Sink, Staging, Workers};
use crate::input::Input;

/// Bytes of a staging buffer.
const CHUNK: u64 = 16 << 20;
/// Time to wait for reads in flight after a failure.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The SHA-256 that the bytes of a file must have by its name: it is, or links to, `blobs/` and 64 hexadecimal digits.
pub fn hash_in_name(path: &Path) -> Option<[u8; 32]> {
    let blob = path.canonicalize().ok()?;
    let is_blob = blob.parent()?.file_name()? == "blobs";
    hex(blob.file_name()?.to_str()?).filter(|_| is_blob)
}

/// The bytes of `2 * N` hexadecimal digits.
pub(crate) fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Vec<u32> = text.chars().take(2 * N + 1).map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    bytes.iter_mut().zip(digits.chunks(2)).for_each(|(byte, pair)| *byte = (pair[0] << 4 | pair[1]) as u8);
    Some(bytes)
}

/// Hashes files whose names are hashes, and returns those whose bytes have another one. Other files are not read.
///
/// # Errors
/// [`Error::File`], [`Error::Read`] for files that cannot be read; work that `progress` has ended.
pub fn verify_names<S: Queue<Addr = FileOffset>>(
    inputs: &mut [Input<S>],
    progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
) -> Result<Vec<Difference>, Error> {
    let expected: Vec<Option<[u8; 32]>> = inputs.iter().map(|input| hash_in_name(&input.source.path)).collect();
    let mut lens = Vec::new();
    for (input, expected) in inputs.iter().zip(&expected) {
        lens.push(if expected.is_some() { input.source.size()? } else { 0 });
    }
    if expected.iter().all(Option::is_none) {
        return Ok(Vec::new());
    }
    let regions = Arc::new(HashRegions { ends: lens.iter().map(|len| vec![*len]).collect(), sha256: true });
    let digests = digest(inputs, &lens, Some(regions), progress)?;
    let other = |((input, expected), digests): ((&Input<S>, &Option<[u8; 32]>), &Vec<_>)| {
        let found = *digests.first().and_then(|digest: &Digest| digest.sha256.clone())?;
        expected.filter(|expected| *expected != found).map(|_| Problem::Name(found).of(name(&input.source.path)))
    };
    Ok(inputs.iter().zip(&expected).zip(&digests).filter_map(other).collect())
}

/// Reads the first `lens` bytes of files through a few buffers, and hashes their regions.
pub(crate) fn digest<S: Queue<Addr = FileOffset>>(
    inputs: &mut [Input<S>],
    lens: &[u64],
    hash_regions: Option<Arc<HashRegions>>,
    progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
) -> Result<Vec<Vec<Digest>>, Error> {
    if inputs.is_empty() {
        return Ok(Vec::new());
    }
    let registrar = NoIommu::new();
    let mut staging = Staging::new(registrar.heap(None), Arc::new(registrar), CHUNK);
    staging.prepare(lens.iter().copied().max().unwrap_or(0));
    let options = FillOptions { block: u64::MAX, hash_regions, timeout: TIMEOUT, ..FillOptions::default() };
    let mut watch = |event| match event {
        Event::Arrived { len, .. } => progress(len),
        _ => ControlFlow::Continue(()),
    };
    let job = Job::whole(lens);
    let (mut queues, late) = queues(inputs);
    let (sink, workers) = (Sink::Staging(&mut staging, None), Workers { queues: &mut queues, all: false, late });
    let result = fill::run(Instant::now(), sink, &job, workers, &options, &mut watch);
    let done = result.map_err(|error| describe(error, |file| (inputs[file].source.path.clone(), None)))?;
    Ok(done.hashes.into_iter().map(|hashes| hashes.digests).collect())
}

/// The name of a file, without a directory.
pub(crate) fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
