//! A file of a model: its name, its header, and the hashes that it must have.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::SeekFrom;

use super::block::Block;
use crate::container::{FormatError, Model, gguf};
use crate::error::Error;
use crate::manifest::ManifestFile;
use crate::open_file::OpenFile;

/// Chooses tensors by name.
pub type Select = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A file of a model. It is closed where many others are used after it, and opened again when it is read.
pub struct ModelFile {
    /// Its header is parsed.
    file: OpenFile,
    /// Bytes behind its last tensor that belong to none.
    pub(super) behind: u64,
    /// The part of a manifest that is about it: a region for each of its tensors, in their order.
    pub(super) expected: Option<ManifestFile>,
}

/// Bytes of these ranges, which lie in order, that are in holes of a file. Where the file system does not tell, none.
fn holes(file: &File, ranges: impl Iterator<Item = Range<u64>>) -> u64 {
    let next = |from: SeekFrom| rustix::fs::seek(file, from).ok();
    let (mut bytes, mut hole, mut ends) = (0, 0..0, true);
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            if hole.end <= at {
                let Some(start) = next(SeekFrom::Hole(at)) else { return bytes };
                (hole, ends) = (start..u64::MAX, false);
            }
            if !ends && hole.start < range.end {
                // Where data begins again: behind the last data is nothing more.
                (hole.end, ends) = (next(SeekFrom::Data(hole.start)).unwrap_or(u64::MAX), true);
            }
            bytes += hole.end.min(range.end).saturating_sub(hole.start.max(at));
            at = at.max(hole.end);
        }
    }
    bytes
}

impl ModelFile {
    /// Reads the header of a file.
    pub(super) fn new(file: OpenFile) -> Result<Self, Error> {
        let behind = gguf::behind(file.model()?);
        Ok(Self { file, behind, expected: None })
    }

    /// Bytes of its tensors that the file system has no blocks for, or none that were written. 0 where the file is not
    /// the one that was parsed.
    pub(super) fn hole(&self) -> u64 {
        let Ok(file) = self.open().and_then(|opened| opened.file()) else { return 0 };
        let tensors = self.contents().tensors.iter().map(|tensor| tensor.at.bits()..tensor.at.bits() + tensor.len);
        // The position of a file that was given may be someone else's too.
        let position = (!self.file.handle.is_named()).then(|| rustix::fs::tell(&file));
        let bytes = holes(&file, tensors);
        let _ = position.map(|at| at.map(|at| rustix::fs::seek(&file, SeekFrom::Start(at))));
        bytes
    }

    /// Leaves out the tensors that an index does not list for it, and those that are not selected.
    pub(super) fn retain(&mut self, select: Option<&Select>) -> Result<(), Error> {
        let listed = self.file.listed.clone();
        self.file
            .retain(|name| listed.as_ref().is_none_or(|listed| listed.contains(name)) && select.is_none_or(|f| f(name)))
    }

    /// The memory that has it already, where its bytes need not be compared with a manifest.
    pub(super) fn kept(&self) -> Option<&Arc<Block>> {
        self.file.kept.as_ref().filter(|_| self.expected.is_none()).map(|kept| &kept.block)
    }

    /// Whether two tensors may have one plan: of a kept file, both lie in memory as they are to be, or both are copied.
    pub(super) fn are_alike(&self, a: usize, b: usize) -> bool {
        let is_aligned = |n: usize| self.contents().tensors[n].is_aligned();
        self.kept().is_none() || is_aligned(a) == is_aligned(b)
    }

    /// The tensors that an index lists for it.
    pub(super) fn listed(&self) -> Option<&BTreeSet<String>> {
        self.file.listed.as_deref()
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Its length, its kind, its tensors and its metadata.
    pub fn contents(&self) -> &Arc<Model> {
        self.file.parsed.get().expect("it is parsed at first")
    }

    /// Opens the file, which must be the one that was parsed.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::File`].
    pub fn open(&self) -> Result<OpenFile, Error> {
        self.file.check()?;
        Ok(self.file.clone())
    }

    /// The file is not what a model may have.
    pub(super) fn bad(&self, source: FormatError) -> Error {
        Error::Format { path: self.path().to_owned(), source }
    }

    /// Refuses arrays by columns: tensors are stored by rows.
    pub(super) fn check_rows(&self) -> Result<(), Error> {
        let refused = || self.bad(FormatError::new("its array is stored by columns, which numpy.load reads"));
        if self.contents().by_columns { Err(refused()) } else { Ok(()) }
    }

    /// Refuses to read a part of a tensor whose hash is to be checked.
    pub(super) fn check_parts(&self) -> Result<(), Error> {
        if self.expected.is_some() { Err(Error::Unchecked) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn bytes_of_tensors_in_holes_are_counted() {
        const PAGE: u64 = 4096;
        let mut x = 1u64;
        let mut random = |n: u64| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 33) % n
        };
        for _ in 0..200 {
            let file: File = rustix::fs::memfd_create("holes", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
            let written: Vec<bool> = (0..16).map(|_| random(2) == 0).collect();
            file.set_len(16 * PAGE).unwrap();
            for (page, _) in written.iter().enumerate().filter(|(_, written)| **written) {
                file.write_all_at(&[1], page as u64 * PAGE).unwrap();
            }
            let mut ends: Vec<u64> = (0..8).map(|_| random(16 * PAGE + 1)).collect();
            ends.sort_unstable();
            let ranges: Vec<_> = ends.chunks(2).map(|ends| ends[0]..ends[1]).collect();
            let missing = |at: &u64| !written[(*at / PAGE) as usize];
            let expected: usize = ranges.iter().map(|range| range.clone().filter(missing).count()).sum();
            assert_eq!(holes(&file, ranges.iter().cloned()), expected as u64, "{written:?} {ranges:?}");
        }
    }
}
