//! What a measurement must know of the machine: what is cached, and how much memory is left.

use std::fs::File;
use std::path::PathBuf;

use dmalane::file::residency;
use pyo3::prelude::*;

/// The share of a file that is in the page cache, from 0 to 1; None where the kernel does not say.
#[pyfunction]
pub(crate) fn cached_share(path: PathBuf) -> PyResult<Option<f64>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    Ok(residency(&file, 0, len).ok().map(|cached| cached.share()))
}

/// Bytes of memory that can be allocated now; None where the kernel does not say.
#[pyfunction]
pub(crate) fn room() -> Option<u64> {
    dmalane::dma::room().map(|room| room.bytes)
}
