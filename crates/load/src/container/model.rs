//! Contents of a file, and its kind.

use std::path::Path;
use std::sync::Arc;

use dmalane_addr::{Address, FileOffset};

use super::file::ContainerFile;
use super::format_error::FormatError;
use super::tensor::Tensor;
use super::text::short;
use crate::error::Error;

/// A kind of file: how it is recognized, and how it is parsed. Two kinds have different names.
pub struct Container {
    /// Its name in reports and manifests.
    pub name: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// The extensions by which a file is of this kind, whatever its first bytes are: without the right ones it is
    /// damaged. None that other files have, too.
    pub extensions: &'static [&'static str],
    /// The first bytes, [`HEAD`](super::HEAD) at most, by any of which a file is of this kind, whatever its name is.
    pub magic: &'static [&'static [u8]],
    /// Whether a file begins as one of this kind, where no magic number says.
    pub resembles: Option<fn(head: &[u8]) -> bool>,
    /// Whether a directory may stand for its files with these extensions: their tensors have names of their own.
    pub in_folders: bool,
    /// Parses a header of this kind: its bytes, the bytes of the file, and the name of a file that is one array. `None`
    /// for files without a header alone: those of others are fuzzed by it.
    pub parse_header: Option<ParseHeader>,
    /// Parses a file of this kind.
    pub(super) parse: fn(&ContainerFile<'_>) -> Result<Model, Error>,
}

/// A parser of headers.
pub type ParseHeader = fn(header: &[u8], file: u64, name: &str) -> Result<Model, FormatError>;

impl Container {
    /// Whether a file with this name and these first bytes is of this kind.
    pub(super) fn claims(&self, path: &Path, head: &[u8]) -> bool {
        self.begins(head) || self.is_name(path)
    }

    /// Whether a file with these first bytes is of this kind, whatever its name is.
    pub(super) fn begins(&self, head: &[u8]) -> bool {
        self.magic.iter().any(|magic| head.starts_with(magic)) || self.resembles.is_some_and(|of| of(head))
    }

    /// Whether a file's name has an extension of this kind, in capitals or not.
    pub(crate) fn is_name(&self, path: &Path) -> bool {
        path.extension().is_some_and(|found| self.extensions.iter().any(|wanted| found.eq_ignore_ascii_case(wanted)))
    }
}

impl PartialEq for Container {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Container {}

dmalane_dma::debug_as!(Container, |it| "{}", it.name);

/// Contents of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Model {
    /// Bytes of the file.
    pub len: u64,
    /// Tensors in the order of their bytes, as [`Model::check`] wants them.
    pub tensors: Vec<Arc<Tensor>>,
    /// The header's free-form text pairs, sorted by key; `None` for a blob and where the header has none.
    pub metadata: Option<Vec<(String, String)>>,
    /// Whether the file has its arrays by columns: the shapes here are those of the transposed arrays, by rows.
    pub by_columns: bool,
    /// The kind of file.
    pub container: &'static Container,
}

impl Model {
    /// Checks what loading relies on: no tensor begins before the one in front of it ends, not even one of no bytes,
    /// and all of them lie within the file.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn check(&self) -> Result<(), FormatError> {
        let mut before = FileOffset::new(0);
        for Tensor { name, at, len, .. } in self.tensors.iter().map(|tensor| &**tensor) {
            if *at < before {
                let (name, at) = (short(name), *at);
                let text =
                    format_args!("tensor {name:?} starts at {at}, within the tensor before it, which ends at {before}");
                return Err(FormatError::new(text).about_tensor(&name).at(at));
            }
            before = at
                .checked_add(*len)
                .filter(|end| end.bits() <= self.len)
                .ok_or_else(|| FormatError::beyond_end(name, at.bits().saturating_add(*len), self.len))?;
        }
        Ok(())
    }

    /// The tensor that holds the byte at `at`, else `None`.
    pub fn tensor_at(&self, at: FileOffset) -> Option<&Tensor> {
        self.tensors.get(self.index_at(at)).filter(|t| t.at <= at).map(|t| &**t)
    }

    /// The index of the first tensor that ends behind `at`: the one that holds the byte at `at`, if any does.
    pub(crate) fn index_at(&self, at: FileOffset) -> usize {
        self.tensors.partition_point(|t| t.at.bits() + t.len <= at.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::super::raw;
    use super::*;

    #[test]
    fn tensors_follow_each_other_within_the_file() {
        let check = |tensors: &[(u64, u64)]| {
            let tensor = |(i, (at, len)): (usize, &(u64, u64))| {
                let (name, at) = (i.to_string(), FileOffset::new(*at));
                Arc::new(Tensor { name, dtype: Arc::default(), shape: Box::default(), at, len: *len })
            };
            let tensors = tensors.iter().enumerate().map(tensor).collect();
            let model = Model { len: 100, tensors, metadata: None, by_columns: false, container: &raw::CONTAINER };
            model.check().map_err(|e| e.to_string())
        };
        for good in [&[][..], &[(100, 0)], &[(0, 100)], &[(8, 0), (8, 0), (8, 8), (16, 0), (20, 80), (100, 0)]] {
            assert_eq!(check(good), Ok(()), "{good:?}");
        }
        for (bad, says) in [
            (&[(0, 64), (32, 0)][..], "tensor \"1\" starts at file offset 32, within"),
            (&[(0, 64), (63, 10)], "ends at file offset 64"),
            (&[(50, 0), (49, 0)], "\"1\" starts"),
            (&[(8, 93)], "has only 100 bytes"),
            (&[(0, 100), (101, 0)], "tensor \"1\" ends at file offset 101"),
            (&[(8, u64::MAX)], "has only"),
            (&[(u64::MAX, u64::MAX), (0, 1)], "has only"),
        ] {
            let error = check(bad).unwrap_err();
            assert!(error.contains(says), "{error}, not {says}");
        }
    }
}
