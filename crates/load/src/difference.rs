//! Differences between files and their manifest.

use std::fmt;
use std::sync::Arc;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::container::{FormatError, Tensor};

/// The kind of a region of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RegionKind {
    /// Everything before the first tensor; all of a file without tensors.
    Header,
    /// A tensor.
    Tensor(Arc<Tensor>),
    /// Bytes between tensors, or behind the last one.
    Gap,
}

impl RegionKind {
    /// `header`, `tensor` or `gap`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Tensor(_) => "tensor",
            Self::Gap => "gap",
        }
    }

    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            Self::Header | Self::Gap => None,
        }
    }
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Escaped: a name may hold characters that drive a terminal.
            Self::Tensor(tensor) => write!(f, "tensor {:?}", tensor.name),
            other => f.write_str(other.kind()),
        }
    }
}

/// A difference between a manifest and the files that it describes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Difference {
    /// A region has other bytes.
    Changed {
        /// The file.
        file: String,
        /// The kind of the region.
        part: RegionKind,
        /// File offset of its first byte.
        start: u64,
        /// File offset behind its last byte.
        end: u64,
    },
    /// A file is too short.
    Short {
        /// The file.
        file: String,
        /// Its length in the manifest.
        expected: u64,
        /// Its length.
        found: u64,
        /// The region in which it ends.
        part: RegionKind,
    },
    /// Bytes follow the end of a file.
    Long {
        /// The file.
        file: String,
        /// Its length in the manifest.
        expected: u64,
        /// Its length.
        found: u64,
    },
    /// In place of the file there is a pointer of Git LFS to it: it was not downloaded.
    LfsPointer {
        /// The file.
        file: String,
        /// Bytes of the file that was not downloaded, as the pointer says.
        size: u64,
    },
    /// A file is named by another SHA-256 than its bytes have.
    Name {
        /// The file.
        file: String,
        /// The SHA-256 of its bytes.
        found: [u8; 32],
    },
    /// The manifest has a file that is not there.
    Missing {
        /// The file.
        file: String,
    },
    /// The manifest does not have a file that is there.
    Unlisted {
        /// The file.
        file: String,
    },
}

impl Difference {
    /// The file that it is about.
    pub fn file(&self) -> &str {
        let (Self::Changed { file, .. }
        | Self::Short { file, .. }
        | Self::Long { file, .. }
        | Self::LfsPointer { file, .. }
        | Self::Name { file, .. }
        | Self::Missing { file }
        | Self::Unlisted { file }) = self;
        file
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed { file, part, start, end } => write!(f, "{file}: {part} differs (bytes {start}..{end})"),
            Self::Short { file, expected, found, part } => {
                write!(f, "{file}: ends within {part}: {found} of {expected} bytes are there")
            }
            Self::Long { file, expected, found } => {
                write!(f, "{file}: {} bytes follow its end at {expected}", found.saturating_sub(*expected))
            }
            Self::LfsPointer { file, size } => {
                write!(f, "{file}: {}", FormatError::lfs_pointer(*size))
            }
            Self::Name { file, found } => {
                let hash: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
                write!(f, "{file}: its bytes have SHA-256 {hash}, not the one by which the file is named")
            }
            Self::Missing { file } => write!(f, "{file}: is missing"),
            Self::Unlisted { file } => write!(f, "{file}: is not in the manifest"),
        }
    }
}

impl Serialize for Difference {
    /// As docs/formats/json.md describes it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (problem, part, place, lengths) = match self {
            Self::Changed { part, start, end, .. } => ("changed", Some(part), Some((start, end)), None),
            Self::Short { expected, found, part, .. } => ("short", Some(part), None, Some((expected, found))),
            Self::Long { expected, found, .. } => ("long", None, None, Some((expected, found))),
            Self::LfsPointer { .. } => ("lfs_pointer", None, None, None),
            Self::Name { .. } => ("name", None, None, None),
            Self::Missing { .. } => ("missing", None, None, None),
            Self::Unlisted { .. } => ("unlisted", None, None, None),
        };
        let mut fields = serializer.serialize_struct("Difference", 8)?;
        fields.serialize_field("file", self.file())?;
        fields.serialize_field("problem", problem)?;
        fields.serialize_field("part", &part.map(RegionKind::kind))?;
        fields.serialize_field("tensor", &part.and_then(RegionKind::tensor).map(|tensor| &tensor.name))?;
        fields.serialize_field("start", &place.map(|(start, _)| start))?;
        fields.serialize_field("end", &place.map(|(_, end)| end))?;
        fields.serialize_field("expected_bytes", &lengths.map(|(expected, _)| expected))?;
        fields.serialize_field("found_bytes", &lengths.map(|(_, found)| found))?;
        fields.end()
    }
}
