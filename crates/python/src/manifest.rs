//! Manifests of files: made, and compared with the files; and how files are read.

use std::path::PathBuf;

use dmalane::FileOptions;
use dmalane::file::Mode;
use dmalane::load::{Inputs, Manifest, ModelSet};
use pyo3::prelude::*;
use serde_json::json;

use crate::failure::Failure;
use crate::interrupt;

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

/// Hashes every tensor, header and gap of files: the JSON of a manifest.
#[pyfunction]
pub(crate) fn manifest(py: Python<'_>, paths: Vec<PathBuf>, sha256: bool) -> PyResult<String> {
    let set = ModelSet::of(&paths).map_err(Failure::from)?;
    let mut inputs = Inputs::open(set, &paths, FileOptions::default()).map_err(Failure::from)?;
    let made = interrupt::run(py, inputs.bytes(), None, |progress| {
        Manifest::of(&mut inputs.files, sha256, &mut |n| progress.advance(n)).map_err(Failure::from)
    })?;
    Ok(made?.to_json())
}

/// Compares files with a manifest: the object of docs/formats/json.md, without times.
#[pyfunction]
pub(crate) fn verify(py: Python<'_>, paths: Vec<PathBuf>, manifest: ManifestOf) -> PyResult<String> {
    let manifest = manifest.read()?;
    let set = ModelSet::there(&paths).map_err(Failure::from)?;
    let mut inputs = Inputs::open(set, &paths, FileOptions::default()).map_err(Failure::from)?;
    let (bytes, unchecked) = (inputs.bytes(), inputs.unchecked(&manifest));
    let found = interrupt::run(py, bytes, None, |progress| {
        inputs.verify(Some(&manifest), &mut |n| progress.advance(n)).map_err(Failure::from)
    })??;
    let verified = found.is_empty();
    let object = json!({
        "schema": 1, "command": "verify", "verified": verified, "bytes": bytes, "unchecked_files": unchecked,
        "differences": found,
    });
    Ok(object.to_string())
}

/// Whether files are read past the page cache.
pub(crate) fn mode(direct: Option<bool>) -> Mode {
    match direct {
        None => Mode::Auto,
        Some(true) => Mode::Direct,
        Some(false) => Mode::Buffered,
    }
}
