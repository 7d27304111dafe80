//! Differences between files and their manifest.

use std::fmt;
use std::path::PathBuf;
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
pub struct Difference {
    /// The file that it is about.
    pub file: String,
    /// How it differs.
    pub problem: Problem,
}

/// How a file differs from its manifest.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Problem {
    /// A region has other bytes.
    Changed {
        /// The kind of the region.
        part: RegionKind,
        /// File offset of its first byte.
        start: u64,
        /// File offset behind its last byte.
        end: u64,
    },
    /// The file is too short.
    Short {
        /// Its length in the manifest.
        expected: u64,
        /// Its length.
        found: u64,
        /// The region in which it ends.
        part: RegionKind,
    },
    /// Bytes follow the end of the file.
    Long {
        /// Its length in the manifest.
        expected: u64,
        /// Its length.
        found: u64,
    },
    /// In place of the file there is a pointer of Git LFS to it: it was not downloaded. Bytes of the file, as the
    /// pointer says.
    LfsPointer(u64),
    /// The file is named by another SHA-256 than its bytes have, which is this.
    Name([u8; 32]),
    /// The file belongs to the model, or the manifest has it, and it is not there; where it is a link that leads
    /// nowhere, what to.
    Missing(Option<PathBuf>),
    /// The manifest does not have the file, and it is there.
    Unlisted,
}

impl Problem {
    /// The difference of a file that has it.
    pub(crate) fn of(self, file: impl Into<String>) -> Difference {
        Difference { file: file.into(), problem: self }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file)?;
        match &self.problem {
            Problem::Changed { part, start, end } => write!(f, "{part} differs (bytes {start}..{end})"),
            Problem::Short { expected, found, part } => {
                write!(f, "ends within {part}: {found} of {expected} bytes are there")
            }
            Problem::Long { expected, found } => {
                write!(f, "{} bytes follow its end at {expected}", found.saturating_sub(*expected))
            }
            Problem::LfsPointer(size) => write!(f, "{}", FormatError::lfs_pointer(*size)),
            Problem::Name(found) => {
                let hash: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
                write!(f, "its bytes have SHA-256 {hash}, not the one by which the file is named")
            }
            Problem::Missing(None) => f.write_str("is missing"),
            Problem::Missing(Some(to)) => write!(f, "is missing: it is a link to {}", to.display()),
            Problem::Unlisted => f.write_str("is not in the manifest"),
        }
    }
}

impl Serialize for Difference {
    /// As docs/formats/json.md describes it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (problem, part, place, lengths) = match &self.problem {
            Problem::Changed { part, start, end } => ("changed", Some(part), Some((start, end)), None),
            Problem::Short { expected, found, part } => ("short", Some(part), None, Some((expected, found))),
            Problem::Long { expected, found } => ("long", None, None, Some((expected, found))),
            Problem::LfsPointer(_) => ("lfs_pointer", None, None, None),
            Problem::Name(_) => ("name", None, None, None),
            Problem::Missing(_) => ("missing", None, None, None),
            Problem::Unlisted => ("unlisted", None, None, None),
        };
        let mut fields = serializer.serialize_struct("Difference", 9)?;
        fields.serialize_field("file", &self.file)?;
        fields.serialize_field("problem", problem)?;
        fields.serialize_field("part", &part.map(RegionKind::kind))?;
        fields.serialize_field("tensor", &part.and_then(RegionKind::tensor).map(|tensor| &tensor.name))?;
        fields.serialize_field("start", &place.map(|(start, _)| start))?;
        fields.serialize_field("end", &place.map(|(_, end)| end))?;
        fields.serialize_field("expected_bytes", &lengths.map(|(expected, _)| expected))?;
        fields.serialize_field("found_bytes", &lengths.map(|(_, found)| found))?;
        fields.serialize_field("message", &self.to_string())?;
        fields.end()
    }
}
