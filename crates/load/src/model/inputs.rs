//! Files by name that are read as they are, models or not.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use dmalane_file::{FileOptions, FileQueue};

use crate::blob::{name, verify_names};
use crate::difference::{Difference, Problem};
use crate::error::Error;
use crate::input::{Input, open_inputs};
use crate::manifest::Manifest;
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;
use crate::set::{ModelSet, SetFile};

/// The files of models, as [`ModelSet::find`] finds them, with the queues that read them.
#[derive(Default)]
pub struct Inputs {
    /// The files.
    pub files: Vec<Input<FileQueue>>,
    /// A directory or an index stands for some of them.
    pub whole: bool,
    /// Files of these models that are not there.
    pub missing: Vec<PathBuf>,
}

impl Inputs {
    /// Opens files that need not be models, and for which these paths stand.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Open`].
    pub fn open(set: ModelSet, named: &[PathBuf], options: FileOptions) -> Result<Self, Error> {
        let open =
            |file: &SetFile| if file.kept.is_some() { OpenFile::of(file) } else { OpenFile::regular(&file.path) };
        let files = in_parallel(set.files.iter().collect(), open)?;
        Self::of_files(files, set, named, options)
    }

    /// The same of the files of a set that are open already.
    ///
    /// # Errors
    /// As of [`Inputs::open`].
    pub fn of_files(
        files: Vec<OpenFile>,
        set: ModelSet,
        named: &[PathBuf],
        options: FileOptions,
    ) -> Result<Self, Error> {
        let files = open_inputs(files, options)?;
        Ok(Self { files, whole: !set.is_named_by(named), missing: set.missing })
    }

    /// Compares the files with a manifest ([`Manifest::verify`]), or with their names ([`verify_names`]). Those that
    /// are missing are differences, too.
    ///
    /// # Errors
    /// As of [`Manifest::verify`].
    pub fn verify(
        &mut self,
        manifest: Option<&Manifest>,
        progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
    ) -> Result<Vec<Difference>, Error> {
        let mut differences = match manifest {
            Some(manifest) => manifest.verify(&mut self.files, self.whole, progress)?,
            None => verify_names(&mut self.files, progress)?,
        };
        let missing: BTreeMap<String, &Path> = self.missing.iter().map(|path| (name(path), &**path)).collect();
        differences.retain(|of| !matches!(of.problem, Problem::Missing(_)) || !missing.contains_key(&of.file));
        let differs = |(name, path): (String, &Path)| Problem::Missing(std::fs::read_link(path).ok()).of(name);
        differences.extend(missing.into_iter().map(differs));
        Ok(differences)
    }

    /// How many files of a manifest are not compared with it, because they are not named.
    pub fn unchecked(&self, manifest: &Manifest) -> usize {
        if self.whole { 0 } else { manifest.others(&self.files).count() }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|input| input.source.size().ok()).fold(0, u64::saturating_add)
    }
}
