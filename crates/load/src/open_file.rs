//! Files that are open for reading: a name, a descriptor, and a header that is parsed once.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use dmalane_file::FileHandle;
use rustix::io::Errno;

use crate::container::{self, Container, ContainerFile, Model};
use crate::error::Error;
use crate::fill::LATE;
use crate::kept::KeptFile;
use crate::parallel::worked;
use crate::set::SetFile;

/// A file that is open for reading: a regular file or a block device.
///
/// Its header is parsed when it is first asked for, and not again. A copy is the same file.
#[derive(Clone)]
pub struct OpenFile {
    /// Its name in messages; the extension may tell its kind.
    pub path: PathBuf,
    pub(crate) handle: FileHandle,
    /// The tensors that an index lists for it: in a model, the others do not count.
    pub listed: Option<Arc<BTreeSet<String>>>,
    /// Some of its tensors do not count, and are not loaded.
    is_selected: bool,
    /// The memory that holds it.
    pub(crate) kept: Option<Arc<KeptFile>>,
    pub(crate) parsed: OnceLock<Arc<Model>>,
    /// To read its header took longer than from a local disk.
    is_late: OnceLock<()>,
}

impl OpenFile {
    /// A file that is open already, and its name in messages.
    pub fn new(path: impl Into<PathBuf>, file: File) -> Self {
        Self::of_handle(FileHandle::new(file, path))
    }

    /// Opens a file by name. Where many are open it is closed, and opened again when it is needed.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let failed = |source| Error::File { path: path.to_owned(), what: "open it", source };
        FileHandle::open(path).map(Self::of_handle).map_err(failed)
    }

    /// A file that was opened by this name just now, as [`OpenFile::open`] opens it.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn named(path: &Path, file: File) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), what: "read its size", source };
        FileHandle::named(file, path).map(Self::of_handle).map_err(failed)
    }

    /// Opens a file of a model.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn of(file: &SetFile) -> Result<Self, Error> {
        let opened = match &file.kept {
            Some(kept) => Self { kept: Some(kept.clone()), ..Self::of_handle(kept.handle.clone()) },
            None => Self::open(&file.path)?,
        };
        Ok(Self { listed: file.listed.clone(), ..opened })
    }

    pub(crate) fn of_handle(handle: FileHandle) -> Self {
        let path = handle.path().to_owned();
        Self {
            path,
            handle,
            listed: None,
            is_selected: false,
            kept: None,
            parsed: OnceLock::new(),
            is_late: OnceLock::new(),
        }
    }

    /// The file, opened again if it was closed.
    ///
    /// # Errors
    /// [`Error::Changed`] when another file has its name by now, or it was changed; [`Error::File`].
    pub fn file(&self) -> Result<Arc<File>, Error> {
        self.handle.file().map_err(|source| self.not_there(source))
    }

    /// Checks that the file is still the one that was opened.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.handle.check().map_err(|source| self.not_there(source))
    }

    fn not_there(&self, source: io::Error) -> Error {
        if Errno::from_io_error(&source) != Some(Errno::STALE) {
            return self.error("open it", source);
        }
        let now = std::fs::metadata(&self.path).map_or(0, |meta| meta.len());
        Error::Changed { path: self.path.clone(), before: self.handle.len_when_opened().unwrap_or(0), now }
    }

    /// Leaves out the tensors whose names do not count.
    pub(crate) fn retain(&mut self, counts: impl Fn(&str) -> bool) -> Result<(), Error> {
        let model = self.model()?;
        if model.tensors.iter().any(|tensor| !counts(&tensor.name)) {
            let tensors = model.tensors.iter().filter(|tensor| counts(&tensor.name)).cloned().collect();
            let model = Arc::new(Model { tensors, ..(**model).clone() });
            (self.parsed, self.is_selected) = (OnceLock::from(model), true);
        }
        Ok(())
    }

    /// Whether only some of its tensors count.
    pub fn is_selected(&self) -> bool {
        self.is_selected
    }

    /// Whether the source was seen to have latency.
    pub(crate) fn is_late(&self) -> bool {
        self.is_late.get().is_some()
    }

    /// Bytes in it now.
    ///
    /// # Errors
    /// [`Error::File`] when the kernel does not tell.
    pub fn size(&self) -> Result<u64, Error> {
        if let Some(kept) = &self.kept {
            return Ok(kept.len);
        }
        let meta = self.metadata()?;
        if !meta.file_type().is_block_device() {
            return Ok(meta.len());
        }
        // A block device has no length of its own. The position may be someone else's too.
        let mut file = &*self.file()?;
        let position = file.stream_position();
        let size = position.and_then(|at| Ok((file.seek(SeekFrom::End(0))?, file.seek(SeekFrom::Start(at))?).0));
        size.map_err(|source| self.error("read its size", source))
    }

    /// Refuses a file that had another size before.
    pub(crate) fn check_size(&self, before: u64) -> Result<(), Error> {
        let now = self.size()?;
        if now == before { Ok(()) } else { Err(Error::Changed { path: self.path.clone(), before, now }) }
    }

    pub(crate) fn metadata(&self) -> Result<Metadata, Error> {
        self.handle.metadata().map_err(|source| self.error("read its size", source))
    }

    pub(crate) fn error(&self, what: &'static str, source: io::Error) -> Error {
        Error::File { path: self.path.clone(), what, source }
    }

    /// The kind of the file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Format`].
    pub fn container(&self) -> Result<&'static Container, Error> {
        container::kind(&ContainerFile::new(&self.path, &*self.file()?, self.size()?))
    }

    /// Refuses a file of no known kind, by what it is.
    pub(crate) fn refuse_raw(&self) -> Result<(), Error> {
        container::refuse_raw(&ContainerFile::new(&self.path, &*self.file()?, self.size()?))
    }

    /// Bytes in it when its header was parsed, or now.
    pub(crate) fn known_size(&self) -> Result<u64, Error> {
        self.parsed.get().map_or_else(|| self.size(), |model| Ok(model.len))
    }

    /// The tensors of the file that count, as its [`Container`] has them.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::File`].
    pub fn model(&self) -> Result<&Arc<Model>, Error> {
        if let Some(model) = self.parsed.get() {
            return Ok(model);
        }
        let (file, len, begun, before) = (self.file()?, self.size()?, Instant::now(), worked());
        let model = container::parse(&ContainerFile::new(&self.path, &file, len))?;
        // To parse it takes time too.
        if begun.elapsed().saturating_sub(worked().saturating_sub(before)) >= LATE {
            self.is_late.get_or_init(|| ());
        }
        Ok(self.parsed.get_or_init(|| Arc::new(model)))
    }
}

dmalane_dma::debug_as!(OpenFile, |it| "OpenFile {{ handle: {:?}, .. }}", it.handle);

/// The kernel's name of an open file.
pub(crate) fn name(file: &File) -> PathBuf {
    let fd = file.as_raw_fd();
    std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_else(|_| PathBuf::from(format!("file descriptor {fd}")))
}
