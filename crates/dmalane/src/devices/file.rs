//! A file, a block device or a DMA driver's node as device memory.

use std::error::Error;

use dmalane_file::{FileDevice, FileDeviceOptions, FileDevicePaths};

use super::kind::{Ability, OpenResult, Spec};
use super::option::SpecOption;
use crate::open_options::OpenOptions;

/// One file, or one for each direction: `file:PATH`.
#[derive(Clone, PartialEq, Debug)]
pub struct FileSpec {
    /// The files.
    pub paths: FileDevicePaths,
    /// How they are opened.
    pub options: FileDeviceOptions,
}

impl Spec for FileSpec {
    const NAME: &'static str = "file";
    const SYNTAX: &'static str = "file:PATH";
    const ABOUT: &'static str = "a file, block device or DMA driver's node as device memory";
    const ABILITIES: &'static [Ability] = &[Ability::KeepsData];
    const COMMAS: bool = true;

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        match what {
            "" => Err("a path is missing".into()),
            _ => Ok(Self { paths: FileDevicePaths::same(what), options: FileDeviceOptions::default() }),
        }
    }

    fn options() -> Vec<SpecOption<Self>> {
        vec![
            SpecOption::valued(
                "c2h",
                "PATH",
                "the file to read from, where that is not the file to write to",
                |spec: &mut Self, text| {
                    spec.paths.c2h = text.into();
                    Ok(())
                },
            )
            .with_commas(),
            SpecOption::flag("direct", "direct I/O, past the page cache", |spec: &mut Self| spec.options.direct = true),
        ]
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let (overwrite, threads) =
            (self.options.overwrite || options.overwrite, options.threads.unwrap_or(self.options.threads));
        Ok(Box::new(FileDevice::open(self.paths.clone(), FileDeviceOptions { overwrite, threads, ..self.options })?))
    }
}
