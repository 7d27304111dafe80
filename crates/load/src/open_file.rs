//! Files that are open for reading: a name, a descriptor, and a header that is parsed once.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::container::{self, Container, ContainerFile, Model};
use crate::error::Error;
use crate::set::SetFile;

/// Chooses tensors by name.
pub type Select = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A file that is open for reading: a regular file, a block device, or what can only be read from front to back.
///
/// Its header is parsed when it is first asked for, and not again.
pub struct OpenFile {
    /// Its name in messages; the extension may tell its kind.
    pub path: PathBuf,
    /// The file.
    pub file: File,
    /// The tensors that an index lists for it: in a model, the others do not count.
    pub listed: Option<Arc<BTreeSet<String>>>,
    /// Which of its tensors count, by their names; `None` for all. The others are not loaded.
    select: Option<Select>,
    parsed: OnceLock<Arc<Model>>,
    /// Its path opens it again.
    pub(crate) by_name: bool,
}

impl OpenFile {
    /// A file that is open already, and its name in messages.
    pub fn new(path: impl Into<PathBuf>, file: File) -> Self {
        Self { path: path.into(), file, listed: None, select: None, parsed: OnceLock::new(), by_name: false }
    }

    /// Opens a file by name.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| Error::File { path: path.to_owned(), what: "open it", source })?;
        Ok(Self { by_name: true, ..Self::new(path, file) })
    }

    /// Opens a file of a model.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn of(file: &SetFile) -> Result<Self, Error> {
        Ok(Self { listed: file.listed.clone(), ..Self::open(&file.path)? })
    }

    /// Opens a file whose header is known.
    pub(crate) fn parsed(path: &Path, file: File, model: Arc<Model>, select: Option<Select>) -> Self {
        Self { parsed: OnceLock::from(model), select, ..Self::new(path, file) }
    }

    /// Leaves out the tensors that are not selected.
    pub fn select(&mut self, select: Option<Select>) {
        (self.select, self.parsed) = (select, OnceLock::new());
    }

    /// Whether only some of its tensors count.
    pub fn is_selected(&self) -> bool {
        self.select.is_some()
    }

    /// Bytes in it now; 0 for pipes and sockets.
    ///
    /// # Errors
    /// [`Error::File`] when the kernel does not tell.
    pub fn size(&self) -> Result<u64, Error> {
        bytes_of(&self.file).map_err(|source| self.error("read its size", source))
    }

    pub(crate) fn error(&self, what: &'static str, source: io::Error) -> Error {
        Error::File { path: self.path.clone(), what, source }
    }

    /// The kind of the file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Format`].
    pub fn container(&self) -> Result<&'static Container, Error> {
        container::kind(&ContainerFile { path: &self.path, file: &self.file, len: self.size()? })
    }

    /// Refuses a file of no known kind, by what it is.
    pub(crate) fn refuse_raw(&self) -> Result<(), Error> {
        container::refuse_raw(&ContainerFile { path: &self.path, file: &self.file, len: self.size()? })
    }

    /// The selected tensors of the file, as its [`Container`] has them.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::File`].
    pub fn model(&self) -> Result<&Arc<Model>, Error> {
        if let Some(model) = self.parsed.get() {
            return Ok(model);
        }
        let file = ContainerFile { path: &self.path, file: &self.file, len: self.size()? };
        let mut model = container::parse(&file)?;
        if let Some(select) = &self.select {
            model.tensors.retain(|tensor| select(&tensor.name));
        }
        Ok(self.parsed.get_or_init(|| Arc::new(model)))
    }
}

impl std::fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenFile").field("path", &self.path).field("file", &self.file).finish_non_exhaustive()
    }
}

/// Bytes of a file or block device.
fn bytes_of(mut file: &File) -> io::Result<u64> {
    let meta = file.metadata()?;
    if !meta.file_type().is_block_device() {
        return Ok(meta.len());
    }
    // A block device has no length of its own. The position may be someone else's too.
    let position = file.stream_position()?;
    let size = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(position)).map(|_| size)
}

/// The kernel's name of an open file.
pub(crate) fn name(file: &File) -> PathBuf {
    let fd = file.as_raw_fd();
    std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_else(|_| PathBuf::from(format!("file descriptor {fd}")))
}
