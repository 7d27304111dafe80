//! What a kept model is, as it says itself.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use super::error::KeepError;
use super::times::KeptTimes;

/// The version of the JSON.
pub(super) const SCHEMA: u64 = 1;
/// The longest description that is read: it may list each tensor of an index.
const MAX_DESCRIPTION: u64 = 64 << 20;
/// Why memory of a device is not lent to other users.
pub(super) const NOT_SHARED: &str =
    "memory of a device cannot be sealed: whoever attaches could write to it, so no other user may";
/// The letters before the name of a kept model where a path is expected.
pub(super) const PREFIX: &str = "kept:";
/// The longest name of a file, in bytes.
const MAX_FILE_NAME: usize = 255;
/// The longest name, in bytes.
const MAX_NAME: usize = 200;

/// A kept model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeptModel {
    /// The version of this JSON: 1.
    pub schema: u64,
    /// The name that its owner gave it.
    pub name: String,
    /// What it is: the hash of its manifest ([`Manifest::id`](crate::Manifest::id)).
    pub id: String,
    /// Whether it is lent to other users.
    pub shared: bool,
    /// The device in whose memory it is; `None` for host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// How long it took to be kept.
    #[serde(default)]
    pub took: KeptTimes,
    /// Its files, each in a memfd or in memory of a device of its own.
    pub files: Vec<KeptEntry>,
}

/// A file of a kept model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeptEntry {
    /// Its name, without a folder.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// The tensors that an index lists for it; the others do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<Vec<String>>,
    /// The file that it was read from.
    pub from: Stamp,
    /// Where its tensors are, of a file in memory of a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<KeptPlaces>,
}

/// The memory of a file on a device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct KeptPlaces {
    /// Bytes of the memory; 0 where there is none, because no tensor has any bytes.
    pub bytes: u64,
    /// The bytes of each of its descriptors, where there is more than one, because the driver has limits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<u64>,
    /// Where each tensor begins in it, in the order of the manifest.
    pub offsets: Vec<u64>,
}

/// A file as the kernel told it apart from all others, and from what it was before.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Stamp {
    /// Device.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
    /// Bytes.
    pub len: u64,
    /// When it was last written: seconds and nanoseconds.
    pub modified: [i64; 2],
    /// When it was last changed in any way.
    pub changed: [i64; 2],
}

impl KeptPlaces {
    /// The bytes of each of its descriptors.
    pub(super) fn lens(&self) -> &[u64] {
        match (&self.pieces[..], self.bytes) {
            ([], 0) => &[],
            ([], _) => std::slice::from_ref(&self.bytes),
            (pieces, _) => pieces,
        }
    }
}

impl KeptEntry {
    /// See the field.
    pub(super) fn listed(&self) -> Option<BTreeSet<String>> {
        self.listed.as_ref().map(|names| names.iter().cloned().collect())
    }
}

impl Stamp {
    /// Of a file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(file: &File) -> std::io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            dev: meta.dev(),
            ino: meta.ino(),
            len: meta.len(),
            modified: [meta.mtime(), meta.mtime_nsec()],
            changed: [meta.ctime(), meta.ctime_nsec()],
        })
    }
}

impl KeptModel {
    /// The bytes of its files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// The bytes of its files in memory of a device.
    pub fn device_bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| file.placed.as_ref()).fold(0, |sum, of| sum.saturating_add(of.bytes))
    }

    /// Its descriptors: this description, its manifest, and those of the memory of each file.
    pub fn descriptors(&self) -> usize {
        2 + self.files.iter().map(|file| file.placed.as_ref().map_or(1, |places| places.lens().len())).sum::<usize>()
    }

    /// A file of it as a path.
    pub(super) fn path(&self, file: &KeptEntry) -> PathBuf {
        PathBuf::from(format!("{PREFIX}{}/{}", self.name, file.name))
    }

    /// Reads the description of a kept model.
    ///
    /// # Errors
    /// [`KeepError::Bad`].
    pub fn read(fd: &OwnedFd) -> Result<Self, KeepError> {
        let bad = |why: String| KeepError::Bad { what: "the description of a kept model".to_owned(), why };
        let text = read_text(fd, MAX_DESCRIPTION)?;
        let model: Self = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        if model.schema != SCHEMA {
            return Err(bad(format!("it is of version {}, and not {SCHEMA}", model.schema)));
        }
        check_name(&model.name).map_err(bad)?;
        let is_hash =
            model.id.len() == 64 && model.id.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        if !is_hash {
            return Err(bad("its hash is not 64 hexadecimal digits".to_owned()));
        }
        if model.files.iter().any(|file| file.name.len() > MAX_FILE_NAME) {
            return Err(bad(format!("a name of a file is longer than {MAX_FILE_NAME} bytes")));
        }
        if model.files.is_empty() {
            return Err(bad("it has no files".to_owned()));
        }
        let wrong =
            |of: &KeptPlaces| of.lens().iter().try_fold(0_u64, |sum, len| sum.checked_add(*len)) != Some(of.bytes);
        if model.files.iter().filter_map(|file| file.placed.as_ref()).any(wrong) {
            return Err(bad("the pieces of its memory do not add up to its bytes".to_owned()));
        }
        if model.files.iter().any(|file| file.placed.is_some() != model.device.is_some()) {
            return Err(bad("its files are not all in the same kind of memory".to_owned()));
        }
        if model.device.is_some() && model.shared {
            return Err(bad(NOT_SHARED.to_owned()));
        }
        Ok(model)
    }
}

/// Refuses what is no name of a kept model.
///
/// # Errors
/// Why it is none.
pub fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    match name.len() {
        1..=MAX_NAME if name.chars().all(fits) => Ok(()),
        _ => Err(format!("{name:?} is no name: 1 to {MAX_NAME} letters, digits, \".\", \"_\", \"-\" and \"/\"")),
    }
}

/// A sealed memfd that holds a text.
///
/// # Errors
/// The kernel's.
pub fn sealed_text(name: &str, text: &[u8]) -> std::io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.write_all(text)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    Ok(file.into())
}

/// The text in a sealed memfd, from another process.
///
/// # Errors
/// [`KeepError::Bad`] for a file that somebody may change, or of more than `most` bytes.
pub fn read_text(fd: &OwnedFd, most: u64) -> Result<Vec<u8>, KeepError> {
    let bad = |why: String| KeepError::Bad { what: "the text of a kept model".to_owned(), why };
    // Asked first: of any other file, even its length may take for ever.
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| bad("it is no memfd".to_owned()))?;
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW) {
        return Err(bad("it is not sealed".to_owned()));
    }
    let len = rustix::fs::fstat(fd).map_err(|e| bad(e.to_string()))?.st_size as u64;
    if len > most {
        return Err(bad(format!("it has {len} bytes, and may have {most}")));
    }
    let mut text = vec![0; len as usize];
    // Without another descriptor: where there is none left, the text is as good as before.
    let mut done = 0;
    while done < text.len() {
        match rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut text[done..], done as u64)) {
            Ok(0) => return Err(bad("it ends too early".to_owned())),
            Ok(n) => done += n,
            Err(e) => return Err(bad(e.to_string())),
        }
    }
    Ok(text)
}
