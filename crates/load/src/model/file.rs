//! A file of a model: its name, its header, and the hashes that it must have.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::SeekFrom;

use crate::container::{FormatError, Model, gguf};
use crate::error::Error;
use crate::manifest::ManifestFile;
use crate::open_file::{OpenFile, Select};

/// A file of a model. It is opened for each read, so that a model of 1000 files needs no 1000 descriptors.
pub struct ModelFile {
    path: PathBuf,
    contents: Arc<Model>,
    /// Device, inode, bytes and time of the last change when the header was read.
    identity: (u64, u64, u64, i64, i64),
    /// A file that has no name to open it by.
    kept: Option<File>,
    listed: Option<Arc<BTreeSet<String>>>,
    /// Which of its tensors count; `None` for all.
    select: Option<Select>,
    /// Bytes behind its last tensor that belong to none.
    pub(super) behind: u64,
    /// The part of a manifest that is about it: a region for each of its tensors, in their order.
    pub(super) expected: Option<ManifestFile>,
}

/// Bytes of these ranges, which lie in order, that are in holes of a file. Where the file system does not tell, none.
fn holes(file: &File, ranges: impl Iterator<Item = Range<u64>>) -> u64 {
    let next = |from: SeekFrom| rustix::fs::seek(file, from).ok();
    let (mut bytes, mut hole) = (0, 0..0);
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            if hole.end <= at {
                // The next hole, and where data begins again: behind the last data is nothing more.
                let Some(start) = next(SeekFrom::Hole(at)) else { return bytes };
                hole = start..next(SeekFrom::Data(start)).unwrap_or(u64::MAX);
            }
            bytes += hole.end.min(range.end).saturating_sub(hole.start.max(at));
            at = hole.end;
        }
    }
    bytes
}

fn identity(meta: &Metadata) -> (u64, u64, u64, i64, i64) {
    (meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
}

impl ModelFile {
    /// Reads the header of a file, and keeps it open where its name does not open it again.
    pub(super) fn new(file: OpenFile) -> Result<Self, Error> {
        let contents = file.model()?.clone();
        let meta = file.file.metadata().map_err(|source| file.error("read its size", source))?;
        let OpenFile { path, file, listed, by_name, .. } = file;
        let kept = (!by_name).then_some(file);
        let (behind, identity) = (gguf::behind(&contents), identity(&meta));
        Ok(Self { path, contents, identity, kept, listed, select: None, behind, expected: None })
    }

    /// Bytes of its tensors that the file system has no blocks for, or none that were written. 0 where the file is not
    /// the one that was parsed.
    pub(super) fn hole(&self) -> u64 {
        let Ok(OpenFile { file, .. }) = self.open() else { return 0 };
        let tensors = self.contents.tensors.iter().map(|tensor| tensor.at.bits()..tensor.at.bits() + tensor.len);
        // The position may be someone else's too.
        let position = rustix::fs::tell(&file);
        let bytes = holes(&file, tensors);
        let _ = position.map(|at| rustix::fs::seek(&file, SeekFrom::Start(at)));
        bytes
    }

    /// Leaves out the tensors that an index does not list for it, and those that are not selected.
    pub(super) fn retain(&mut self, select: Option<Select>) {
        let listed = self.listed.clone();
        let counts = move |name: &str| {
            listed.as_ref().is_none_or(|listed| listed.contains(name)) && select.as_ref().is_none_or(|f| f(name))
        };
        let tensors = &self.contents.tensors;
        if tensors.iter().any(|tensor| !counts(&tensor.name)) {
            let tensors = tensors.iter().filter(|tensor| counts(&tensor.name)).cloned().collect();
            self.contents = Arc::new(Model { tensors, ..(*self.contents).clone() });
            self.select = Some(Arc::new(counts));
        }
    }

    /// The tensors that an index lists for it.
    pub(super) fn listed(&self) -> Option<&BTreeSet<String>> {
        self.listed.as_deref()
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length, its kind, its tensors and its metadata.
    pub fn contents(&self) -> &Arc<Model> {
        &self.contents
    }

    /// Opens the file, which must be the one that was parsed.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::File`].
    pub fn open(&self) -> Result<OpenFile, Error> {
        let failed = |what, source| Error::File { path: self.path.clone(), what, source };
        let same = |meta: Metadata| {
            let (now, before) = (identity(&meta), self.identity);
            // Writes to a block device change its time. The number of a file that is gone may be another's.
            let device = meta.file_type().is_block_device() && (now.0, now.1) == (before.0, before.1);
            let same = device || now == before;
            same.then_some(()).ok_or(Error::Changed { path: self.path.clone(), before: before.2, now: now.2 })
        };
        let file = match &self.kept {
            Some(file) => file.try_clone(),
            None => {
                // Before it is opened: a pipe that took its place would wait for a writer.
                same(fs::metadata(&self.path).map_err(|e| failed("open it", e))?)?;
                File::open(&self.path)
            }
        };
        let file = file.map_err(|e| failed("open it", e))?;
        same(file.metadata().map_err(|e| failed("read its size", e))?)?;
        Ok(OpenFile::parsed(&self.path, file, self.contents.clone(), self.select.clone()))
    }

    /// The file is not what a model may have.
    pub(super) fn bad(&self, source: FormatError) -> Error {
        Error::Format { path: self.path.clone(), source }
    }

    /// Refuses arrays by columns: tensors are stored by rows.
    pub(super) fn check_rows(&self) -> Result<(), Error> {
        let refused = || self.bad(FormatError::new("its array is stored by columns, which numpy.load reads"));
        if self.contents.by_columns { Err(refused()) } else { Ok(()) }
    }

    /// Refuses to read a part of a tensor whose hash is to be checked.
    pub(super) fn check_parts(&self) -> Result<(), Error> {
        if self.expected.is_some() { Err(Error::Unchecked) } else { Ok(()) }
    }
}
