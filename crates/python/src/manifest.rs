//! Manifests of files: made, and compared with the files.

use std::path::PathBuf;

use dmalane::file::FileQueue;
use dmalane::load::container::model_files;
use dmalane::load::{Input, Manifest};
use dmalane::{FileOptions, open_file};
use pyo3::prelude::*;

use crate::expected::ManifestOf;
use crate::failure::Failure;
use crate::interrupt;

/// Files to hash.
struct Opened {
    inputs: Vec<Input<FileQueue>>,
    /// Their length.
    bytes: u64,
    /// A directory or an index stands for some of them.
    whole: bool,
}

impl Opened {
    fn new(paths: &[PathBuf]) -> Result<Self, Failure> {
        let mut opened = Self { inputs: Vec::new(), bytes: 0, whole: false };
        for path in paths {
            let found = model_files(path)?;
            opened.whole |= found[..] != [path.clone()];
            for file in found {
                let input = open_file(file, FileOptions::default())?;
                opened.bytes += input.file.metadata().map_or(0, |meta| meta.len());
                opened.inputs.push(input);
            }
        }
        Ok(opened)
    }
}

/// Hashes every tensor, header and gap of files: the JSON of a manifest.
#[pyfunction]
pub(crate) fn manifest(py: Python<'_>, paths: Vec<PathBuf>, sha256: bool) -> PyResult<String> {
    let Opened { mut inputs, bytes, .. } = Opened::new(&paths)?;
    let made = interrupt::run(py, bytes, None, |progress| {
        Manifest::of(&mut inputs, sha256, &mut |n| progress.advance(n)).map_err(Failure::from)
    })?;
    Ok(made?.to_json())
}

/// Compares files with a manifest: the differences as JSON.
#[pyfunction]
pub(crate) fn verify(py: Python<'_>, paths: Vec<PathBuf>, manifest: ManifestOf) -> PyResult<String> {
    let manifest = manifest.read()?;
    let Opened { mut inputs, bytes, whole } = Opened::new(&paths)?;
    let found = interrupt::run(py, bytes, None, |progress| {
        manifest.verify(&mut inputs, whole, &mut |n| progress.advance(n)).map_err(Failure::from)
    })?;
    serde_json::to_string(&found?).map_err(|e| Failure::new("Error", e.to_string()).into())
}
