//! Reasons why a file cannot be parsed.

use dmalane_addr::FileOffset;
use thiserror::Error;

use super::defect::Defect;
use super::text::MAX_HEADER;

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
    #[error("bad {of} header: {source}")]
    InHeader {
        /// The title of the kind.
        of: &'static str,
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
    /// A file of another kind than its name says.
    #[error("this is {what}: {hint}")]
    Foreign {
        /// What it is.
        what: String,
        /// What to do.
        hint: String,
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
            | Self::LfsPointer { .. }
            | Self::Foreign { .. } => (None, None),
        }
    }
}
