//! `dmalane iopt`: page tables as memory images, built, walked and dumped.

mod formats;
mod image;
mod report;
mod spec;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::failure::Failure;

pub use formats::{FORMATS, Format};
use image::Image;
pub use spec::number;

/// Page tables in a file.
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// What its tables are written in.
    pub format: &'static Format,
    /// The address of the root table.
    pub root: u64,
    /// The address of the file's first byte.
    pub base: u64,
}

impl Source {
    fn read(&self) -> Result<Image, Failure> {
        let image = Image::read(&self.path, self.base)?;
        if image.entry(self.root).is_none() {
            return Err(Failure::new(format!(
                "the root at {:#x} is not in {}, which holds {:#x} bytes from {:#x} on",
                self.root,
                self.path.display(),
                image.len(),
                self.base
            ))
            .hint("--base is the address of the first byte of the image"));
        }
        Ok(image)
    }
}

/// Writes the tables of the specification in `spec` to `output`.
pub fn build(spec: &Path, format: &'static Format, output: &Path, base: u64, json: bool) -> Result<ExitCode, Failure> {
    let mappings = spec::read(spec)?;
    let built = (format.build)(&mappings, base).map_err(|refused| refused.failure(spec, &mappings))?;
    fs::write(output, &built.bytes).map_err(|e| Failure::because(format!("cannot write {}", output.display()), &e))?;
    report::built(format, output, base, &built, json)
}

/// Translates addresses by the tables of an image.
pub fn walk(source: &Source, at: impl Iterator<Item = u64>, json: bool) -> Result<ExitCode, Failure> {
    let image = source.read()?;
    let walks: Vec<_> = at.map(|at| (at, (source.format.walk)(&image, source.root, at))).collect();
    report::walked(source, &walks, json)
}

/// Prints what the tables of an image map.
pub fn dump(source: &Source, json: bool) -> Result<ExitCode, Failure> {
    let image = source.read()?;
    let runs = (source.format.dump)(&image, source.root).map_err(|endless| {
        Failure::new(format!("{}: {endless}", source.path.display()))
            .hint("tables that lead back to themselves map without end; is this the right format and root?")
    })?;
    report::dumped(source, &runs, json)
}
