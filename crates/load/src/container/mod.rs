//! Containers: kinds of files, and the tensors in them.
//!
//! Each kind is a module with its properties, `KIND`, and `parse(file)`, which returns the [`Model`] of a file. A new
//! kind: see *A container* in `CONTRIBUTING.md`.

mod defect;
pub mod gguf;
mod lfs;
pub mod npy;
pub mod raw;
pub mod safetensors;
mod set;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use dmalane_addr::{Address, FileOffset};
use thiserror::Error;

use crate::Error as LoadError;
use safetensors::{MAX_HEADER, short};

pub use defect::Defect;
pub(crate) use lfs::lfs_pointer;
pub use lfs::refuse_lfs_pointer;
pub use set::{is_index, model_files};

/// Declares the kinds, in the order in which they are tried. `Raw` is the last: detection ends with it by name, and the
/// fuzz target `header_cost` and its seeds count the kinds before it.
macro_rules! containers {
    ($($(#[$about:meta])* $name:ident in $module:ident,)*) => {
        /// A kind of file.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum Container {
            $($(#[$about])* $name,)*
        }

        impl Container {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Its name in reports and manifests.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($module),)*
                }
            }

            pub(crate) fn kind(self) -> &'static Kind {
                match self {
                    $(Self::$name => &$module::KIND,)*
                }
            }

            fn parse(self, file: &ContainerFile<'_>) -> Result<Model, LoadError> {
                match self {
                    $(Self::$name => $module::parse(file),)*
                }
            }
        }
    };
}

containers! {
    /// Tensors behind a JSON header.
    Safetensors in safetensors,
    /// Tensors behind a binary header, as llama.cpp has them.
    Gguf in gguf,
    /// One array, as NumPy saves it.
    Npy in npy,
    /// One run of bytes.
    Raw in raw,
}

impl Container {
    /// The kind of a file with this name and these first bytes, of which there are [`HEAD`] unless it is shorter.
    pub fn detect(path: &Path, head: &[u8]) -> Self {
        Self::ALL.iter().find(|of| of.kind().claims(path, head)).copied().unwrap_or(Self::Raw)
    }

    /// Its name for people.
    pub fn title(self) -> &'static str {
        self.kind().title
    }
}

/// Properties of a kind of file.
pub(crate) struct Kind {
    /// Its name for people.
    title: &'static str,
    /// The extensions by which a file is of this kind, whatever its first bytes are: without the right ones it is
    /// damaged. None that other files have, too.
    extensions: &'static [&'static str],
    /// The first bytes, [`HEAD`] at most, by any of which a file is of this kind, whatever its name is.
    magic: &'static [&'static [u8]],
    /// Whether a directory may stand for its files with these extensions.
    in_folders: bool,
}

impl Kind {
    /// Whether a file with this name and these first bytes is of this kind.
    fn claims(&self, path: &Path, head: &[u8]) -> bool {
        self.magic.iter().any(|magic| head.starts_with(magic)) || self.is_name(path)
    }

    /// Whether a file's name has an extension of this kind, in capitals or not.
    fn is_name(&self, path: &Path) -> bool {
        path.extension().is_some_and(|found| self.extensions.iter().any(|wanted| found.eq_ignore_ascii_case(wanted)))
    }
}

/// Bytes by which a kind may be recognized.
pub const HEAD: usize = 16;

/// A file to parse.
pub(crate) struct ContainerFile<'a> {
    pub(crate) path: &'a Path,
    pub(crate) file: &'a File,
    /// Bytes in it.
    pub(crate) len: u64,
}

impl ContainerFile<'_> {
    /// Detects the kind of the file.
    pub(crate) fn kind(&self) -> Result<Container, LoadError> {
        let head = self.read(0, self.len.min(HEAD as u64))?;
        lfs::refuse(self, &head)?;
        Ok(Container::detect(self.path, &head))
    }

    /// Detects the kind of the file and parses it.
    pub(crate) fn model(&self) -> Result<Model, LoadError> {
        let model = self.kind()?.parse(self)?;
        model.check().map_err(|e| self.bad(e))?;
        Ok(model)
    }

    /// Reads bytes that lie within the file.
    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, LoadError> {
        let mut bytes = vec![0; usize::try_from(len).map_err(|_| self.failed(io::ErrorKind::FileTooLarge.into()))?];
        self.file.read_exact_at(&mut bytes, at).map_err(|source| self.failed(source))?;
        Ok(bytes)
    }

    fn failed(&self, source: io::Error) -> LoadError {
        LoadError::File { path: self.path.to_owned(), what: "read its header", source }
    }

    fn bad(&self, source: FormatError) -> LoadError {
        LoadError::Format { path: self.path.to_owned(), source }
    }
}

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements as the header spells it ("F32"); empty for a blob. Tensors of a file share it.
    pub dtype: Arc<str>,
    /// Its shape; empty for a scalar and for a blob.
    pub shape: Box<[u64]>,
    /// Where its bytes start in the file.
    pub at: FileOffset,
    /// Bytes; may be 0.
    pub len: u64,
}

impl Tensor {
    /// Its shape; of bytes without a type it is their number.
    pub fn dims(&self) -> Vec<u64> {
        if self.dtype.is_empty() { vec![self.len] } else { self.shape.to_vec() }
    }

    /// Bits of an element of a type of safetensors; `None` for GGUF's blocks and for bytes without a type.
    pub fn element_bits(&self) -> Option<u8> {
        element_bits(&self.dtype)
    }
}

/// As [`Tensor::element_bits`], of a type by its name.
pub fn element_bits(dtype: &str) -> Option<u8> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

/// The names of types, each once: a file may have millions of tensors.
struct TypeNames<T>(Vec<(T, Arc<str>)>);

impl<T: PartialEq> TypeNames<T> {
    /// The name of this type, which `name` makes when it is new.
    fn get(&mut self, of: T, name: impl FnOnce(&T) -> String) -> Arc<str> {
        if let Some((_, name)) = self.0.iter().find(|(known, _)| *known == of) {
            return name.clone();
        }
        let name: Arc<str> = name(&of).into();
        self.0.push((of, name.clone()));
        name
    }
}

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
    pub container: Container,
}

/// Reason why a file cannot be parsed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A file of no bytes.
    #[error("the file is empty")]
    Empty,
    /// Not even the length of the header.
    #[error("the file has {len} bytes, a safetensors file starts with 8 bytes of header length")]
    NoPrefix {
        /// Bytes of the file.
        len: u64,
    },
    /// The header would reach beyond the end of the file.
    #[error("the header length at file offset 0x0 says {header} bytes, but only {left} follow in the file")]
    HeaderBeyondEnd {
        /// Bytes of the header as the file says.
        header: u64,
        /// Bytes after the length field.
        left: u64,
    },
    /// The header is longer than the format allows.
    #[error("the header length at file offset 0x0 says {header} bytes, more than the {MAX_HEADER} that are allowed")]
    HeaderTooLong {
        /// Bytes of the header as the file says.
        header: u64,
    },
    /// The header is not text.
    #[error("the header is not UTF-8 at {at}")]
    NotUtf8 {
        /// The first bad byte.
        at: FileOffset,
    },
    /// The header does not parse, or describes an impossible layout.
    #[error("bad header (file offset 0x8 on): {0}")]
    Header(#[source] Defect),
    /// The header of a file of this kind does not parse.
    #[error("bad {} header: {source}", of.title())]
    InHeader {
        /// Which kind.
        of: Container,
        /// The reason.
        source: Defect,
    },
    /// An index of shards does not parse.
    #[error("bad index: {0}")]
    Index(#[source] Defect),
    /// A manifest does not parse, or contradicts itself.
    #[error("bad manifest: {0}")]
    Manifest(#[source] Defect),
    /// A stand-in for a large file that was never downloaded.
    #[error("it is a Git LFS pointer to a file of {size} bytes, not that file; run: git lfs pull")]
    LfsPointer {
        /// Bytes of the file, as the pointer says.
        size: u64,
    },
    /// One tensor of the header is wrong.
    #[error("bad header: tensor {tensor:?} (described at {at}): {source}")]
    Tensor {
        /// Which tensor.
        tensor: String,
        /// Where its description starts in the file.
        at: FileOffset,
        /// The reason.
        source: Defect,
    },
    /// A tensor reaches beyond the end of the file.
    #[error("tensor {tensor:?} ends at {end}, but the file has only {len} bytes")]
    TensorBeyondEnd {
        /// Which tensor.
        tensor: String,
        /// Where it would end.
        end: FileOffset,
        /// Bytes of the file.
        len: u64,
    },
    /// A tensor begins before the one in front of it ends.
    #[error("tensor {tensor:?} starts at {at}, within the tensor before it, which ends at {end}")]
    Overlap {
        /// Which tensor.
        tensor: String,
        /// Where it starts.
        at: FileOffset,
        /// Where the one before it ends.
        end: FileOffset,
    },
    /// Bytes that no tensor covers.
    #[error("{extra} bytes follow the last tensor, from {at} on")]
    TrailingBytes {
        /// Where they start.
        at: FileOffset,
        /// Number of bytes.
        extra: u64,
    },
}

impl FormatError {
    /// The tensor and the place in the file that it is about, as far as it is about any.
    pub fn about(&self) -> (Option<&str>, Option<FileOffset>) {
        match self {
            Self::Tensor { tensor, at, .. } | Self::Overlap { tensor, at, .. } => (Some(tensor), Some(*at)),
            Self::TensorBeyondEnd { tensor, end, .. } => (Some(tensor), Some(*end)),
            Self::TrailingBytes { at, .. } | Self::NotUtf8 { at } => (None, Some(*at)),
            Self::Empty
            | Self::NoPrefix { .. }
            | Self::HeaderBeyondEnd { .. }
            | Self::HeaderTooLong { .. }
            | Self::Header(_)
            | Self::InHeader { .. }
            | Self::Index(_)
            | Self::Manifest(_)
            | Self::LfsPointer { .. } => (None, None),
        }
    }
}

impl Model {
    /// Checks what loading relies on: no tensor begins before the one in front of it ends, not even one of no bytes,
    /// and all of them lie within the file.
    ///
    /// # Errors
    /// [`FormatError::Overlap`], [`FormatError::TensorBeyondEnd`].
    pub fn check(&self) -> Result<(), FormatError> {
        let mut before = FileOffset::new(0);
        for Tensor { name, at, len, .. } in self.tensors.iter().map(|tensor| &**tensor) {
            if *at < before {
                return Err(FormatError::Overlap { tensor: short(name), at: *at, end: before });
            }
            before = at.checked_add(*len).filter(|end| end.bits() <= self.len).ok_or_else(|| {
                let end = FileOffset::new(at.bits().saturating_add(*len));
                FormatError::TensorBeyondEnd { tensor: short(name), end, len: self.len }
            })?;
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
    use super::*;

    #[test]
    fn a_kind_is_known_by_any_of_its_extensions_and_first_bytes() {
        const KIND: Kind =
            Kind { title: "", extensions: &["one", "two"], magic: &[b"MAGIC", b"magic"], in_folders: true };
        for (name, head, claimed) in [
            ("a.one", "", true),
            ("a.TWO", "other", true),
            ("a.bin", "MAGIC 1", true),
            ("a.bin", "magic 2", true),
            ("two", "MAGI", false),
            ("a.two.bin", "", false),
        ] {
            assert_eq!(KIND.claims(Path::new(name), head.as_bytes()), claimed, "{name} {head}");
        }
    }

    #[test]
    fn no_two_kinds_claim_the_same_files() {
        for of in Container::ALL {
            let Kind { extensions, magic, .. } = of.kind();
            for magic in *magic {
                assert!((1..=HEAD).contains(&magic.len()), "{of:?}: {magic:?} is not of 1 to {HEAD} bytes");
            }
            for other in Container::ALL.iter().filter(|other| *other != of) {
                let others = other.kind();
                for (ours, theirs) in magic.iter().flat_map(|ours| others.magic.iter().map(move |m| (ours, m))) {
                    assert!(!theirs.starts_with(ours), "{theirs:?} of {other:?} begins as {ours:?} of {of:?}");
                }
                for extension in *extensions {
                    let is = |theirs: &&str| theirs.eq_ignore_ascii_case(extension);
                    assert!(!others.extensions.iter().any(is), "{extension} is of {of:?} and {other:?}");
                }
            }
        }
    }

    #[test]
    fn tensors_follow_each_other_within_the_file() {
        let check = |tensors: &[(u64, u64)]| {
            let tensor = |(i, (at, len)): (usize, &(u64, u64))| {
                let (name, at) = (i.to_string(), FileOffset::new(*at));
                Arc::new(Tensor { name, dtype: Arc::default(), shape: Box::default(), at, len: *len })
            };
            let tensors = tensors.iter().enumerate().map(tensor).collect();
            let model = Model { len: 100, tensors, metadata: None, by_columns: false, container: Container::Raw };
            model.check().map_err(|e| e.to_string())
        };
        for good in [&[][..], &[(100, 0)], &[(0, 100)], &[(8, 0), (8, 0), (8, 8), (16, 0), (20, 80), (100, 0)]] {
            assert_eq!(check(good), Ok(()), "{good:?}");
        }
        for (bad, says) in [
            (&[(0, 64), (32, 0)][..], "tensor \"1\" starts at file offset 0x20, within"),
            (&[(0, 64), (63, 10)], "ends at file offset 0x40"),
            (&[(50, 0), (49, 0)], "\"1\" starts"),
            (&[(8, 93)], "has only 100 bytes"),
            (&[(0, 100), (101, 0)], "tensor \"1\" ends at file offset 0x65"),
            (&[(8, u64::MAX)], "has only"),
            (&[(u64::MAX, u64::MAX), (0, 1)], "has only"),
        ] {
            let error = check(bad).unwrap_err();
            assert!(error.contains(says), "{error}, not {says}");
        }
    }
}
