//! Reasons why a file cannot be parsed.

use std::fmt::Display;

use dmalane_addr::FileOffset;
use thiserror::Error;

use super::text::short;
use crate::plain::plain_json;

/// Reason why a file cannot be parsed: a defect of its header, of the description of a tensor in it, of an index or of
/// a manifest. Texts are quoted from the file, cut to 200 characters.
#[derive(Debug, Error)]
#[error("{text}")]
pub struct FormatError {
    text: String,
    tensor: Option<String>,
    at: Option<FileOffset>,
}

impl FormatError {
    pub(crate) fn new(text: impl Display) -> Self {
        Self { text: text.to_string(), tensor: None, at: None }
    }

    /// The same, as a reason why this part of the file is bad.
    pub(crate) fn within(self, part: impl Display) -> Self {
        Self { text: format!("{part}: {}", self.text), ..self }
    }

    /// The same, about this place in the file.
    pub(crate) fn at(self, at: FileOffset) -> Self {
        Self { at: Some(at), ..self }
    }

    /// The same, about this tensor.
    pub(crate) fn about_tensor(self, name: &str) -> Self {
        Self { tensor: Some(short(name)), ..self }
    }

    /// In the description of this tensor, which begins at `at`.
    pub(crate) fn in_tensor(self, name: &str, at: FileOffset) -> Self {
        let part = format!("bad header: tensor {:?} (described at {at})", short(name));
        self.within(part).about_tensor(name).at(at)
    }

    /// The tensor and the place in the file that it is about, as far as it is about any.
    pub fn about(&self) -> (Option<&str>, Option<FileOffset>) {
        (self.tensor.as_deref(), self.at)
    }

    pub(crate) fn too_long(limit: u64) -> Self {
        Self::new(format_args!("it has more than the {limit} bytes that are allowed"))
    }

    pub(crate) fn too_many(what: &str, count: u64, limit: u64) -> Self {
        Self::new(format_args!("{count} {what}, more than {limit}"))
    }

    /// The file ends within its header.
    pub(crate) fn cut_off(at: u64, len: u64) -> Self {
        Self::new(format_args!("{len} bytes at {} are beyond the end of the file", FileOffset::new(at)))
    }

    pub(crate) fn overflow() -> Self {
        Self::new("the size of its data does not fit 64 bits")
    }

    pub(crate) fn twice(what: &str, name: &str) -> Self {
        Self::new(format_args!("{what} {:?} is listed twice", short(name)))
    }

    pub(crate) fn no_files() -> Self {
        Self::new("it lists no files")
    }

    pub(crate) fn version(found: u32, supported: &str) -> Self {
        Self::new(format_args!("version {found} is not supported; supported: {supported}"))
    }

    /// The header is no text from `at` on.
    pub(crate) fn not_utf8(at: u64) -> Self {
        let at = FileOffset::new(at);
        Self::new(format_args!("the header is not UTF-8 at {at}")).at(at)
    }

    pub(crate) fn beyond_end(tensor: &str, end: u64, len: u64) -> Self {
        let (name, end) = (short(tensor), FileOffset::new(end));
        let text = format!("tensor {name:?} ends at {end}, but the file has only {len} bytes");
        Self::new(text).about_tensor(tensor).at(end)
    }

    /// Bytes from `end` on that no tensor has.
    pub(crate) fn trailing(end: u64, len: u64) -> Self {
        let (at, extra) = (FileOffset::new(end), len - end);
        Self::new(format_args!("{extra} bytes follow the last tensor, from {at} on")).at(at)
    }

    /// A file of another kind than its name says.
    pub(crate) fn foreign(what: &str, hint: &str) -> Self {
        Self::new(format_args!("this is {what}: {hint}"))
    }

    /// A stand-in for a large file that was never downloaded.
    pub(crate) fn lfs_pointer(size: u64) -> Self {
        Self::new(format_args!("it is a Git LFS pointer to a file of {size} bytes, not that file; run: git lfs pull"))
    }
}

/// In plain words: parser errors name Rust types.
impl From<serde_json::Error> for FormatError {
    fn from(error: serde_json::Error) -> Self {
        Self::new(plain_json(&error, "dtype"))
    }
}
