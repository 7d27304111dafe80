//! Files by name onto a device.

use std::path::{Path, PathBuf};

use dmalane_file::{FileOptions, FileQueue};
use dmalane_load::{Input, Loaded, Manifest, OpenDevice, Placement};
use thiserror::Error;

use crate::open_file;

/// Loads files onto a device: every tensor is bound at its own device virtual address.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # dmalane::load::write_sample(&mut std::fs::File::create(&path)?, 1 << 20, 1)?;
/// use dmalane::{Load, Placement};
///
/// let mut device = dmalane::open("soft")?;
/// let model = Load::files([&path]).placement(Placement::HBM).verify(true).onto(&mut device)?;
/// println!("{:?} after {:?}", model["embeddings.weight"].va, model.report.wall);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`OpenDevice::load`] is the same for files that are open already, with queues of one's own.
pub struct Load<'a> {
    paths: Vec<PathBuf>,
    options: FileOptions,
    placement: Placement,
    manifest: Manifest,
    verify: bool,
    progress: Box<dyn FnMut(u64) + Send + 'a>,
}

/// Reason why files were not loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file could not be opened.
    #[error(transparent)]
    Open(#[from] dmalane_file::Error),
    /// A load or verification failed. After a failed load nothing is left on the device.
    #[error(transparent)]
    Load(#[from] dmalane_load::Error),
}

impl<'a> Load<'a> {
    /// Files by name. Those of a known [container](dmalane_load::Container) are parsed, any other one is loaded as one
    /// run of bytes.
    pub fn files<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self {
            paths: paths.into_iter().map(|path| path.as_ref().to_owned()).collect(),
            options: FileOptions::default(),
            placement: Placement::Default,
            manifest: Manifest::default(),
            verify: false,
            progress: Box::new(|_| {}),
        }
    }

    /// Sets how the files are opened; direct I/O where it is supported by default.
    pub fn options(mut self, options: FileOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the device memory that gets the tensors; the first region by default.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Compares the files with a manifest while they are read; without files it is no manifest. Of files that differ
    /// nothing stays on the device.
    pub fn manifest(mut self, manifest: Manifest) -> Self {
        self.manifest = manifest;
        self
    }

    /// Sets whether every tensor is read back through the device's address space and compared with its file.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Calls `progress` with the number of bytes that have been read since the last call; it must not panic.
    pub fn progress(mut self, progress: impl FnMut(u64) + Send + 'a) -> Self {
        self.progress = Box::new(progress);
        self
    }

    /// Loads the files.
    ///
    /// # Errors
    /// [`LoadError`]. Files that fail to verify are unloaded.
    pub fn onto(mut self, device: &mut OpenDevice) -> Result<Loaded, LoadError> {
        let open = |path| open_file(path, self.options);
        let mut inputs = self.paths.iter().map(open).collect::<Result<Vec<Input<FileQueue>>, _>>()?;
        let mut loaded = device.load_checked(&mut inputs, &self.placement, &self.manifest, &mut *self.progress)?;
        if self.verify {
            match device.verify(&loaded, &mut inputs, &mut |_| {}) {
                Ok(verified) => loaded.report.verified = Some(verified),
                Err(error) => {
                    // The reason for the failure matters more than a second one while cleaning up.
                    let _ = device.unload(loaded);
                    return Err(error.into());
                }
            }
        }
        Ok(loaded)
    }
}
