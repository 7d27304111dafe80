//! Containers: kinds of files, and the tensors in them.
//!
//! Each kind is a module with a [`Container`], which says how it is recognized and parsed, and a line of
//! [`CONTAINERS`]. A new kind: see *A container* in `CONTRIBUTING.md`.

mod file;
mod foreign;
mod format_error;
pub mod gguf;
mod lfs;
mod model;
pub mod npy;
pub mod raw;
pub mod safetensors;
mod tensor;
mod text;

use std::path::Path;

pub(crate) use file::ContainerFile;
pub use file::HEAD;
pub(crate) use foreign::CONVERT;
pub use format_error::FormatError;
pub(crate) use lfs::lfs_pointer;
pub use lfs::refuse_lfs_pointer;
pub use model::{Container, Model};
pub use tensor::{Tensor, element_bits};
pub(crate) use text::short;
pub use text::{MAX_HEADER, MAX_PAIRS};

use crate::error::Error;

/// All kinds, in the order in which they are tried. `raw`, the last, takes what no other does; the first byte of the
/// fuzz target `header_cost` counts the kinds before it.
pub const CONTAINERS: &[&Container] = &[&safetensors::CONTAINER, &gguf::CONTAINER, &npy::CONTAINER, &raw::CONTAINER];

/// The kind of a file with this name and these first bytes, of which there are [`HEAD`] unless it is shorter. The name
/// comes first.
pub fn detect(path: &Path, head: &[u8]) -> &'static Container {
    let named = CONTAINERS.iter().find(|of| of.is_name(path));
    named.or_else(|| CONTAINERS.iter().find(|of| of.claims(path, head))).copied().unwrap_or(&raw::CONTAINER)
}

/// Detects the kind of a file.
pub(crate) fn kind(file: &ContainerFile<'_>) -> Result<&'static Container, Error> {
    let head = file.read(0, file.len.min(HEAD as u64))?;
    if let Some(size) = lfs::size(file, &head)? {
        return Err(file.bad(FormatError::lfs_pointer(size)));
    }
    let kind = detect(file.path, &head);
    if kind.is_name(file.path) {
        foreign::refuse(kind, &head, CONTAINERS).map_err(|e| file.bad(e))?;
    }
    Ok(kind)
}

/// In words, what a file is that begins so; empty for what nothing is known of.
pub(crate) fn what(head: &[u8]) -> String {
    foreign::what(&head[..head.len().min(HEAD)], CONTAINERS)
}

/// Refuses a file of no known kind, by what it is.
pub(crate) fn refuse_raw(file: &ContainerFile<'_>) -> Result<(), Error> {
    let kind = kind(file)?;
    if *kind != raw::CONTAINER {
        return Ok(());
    }
    let head = file.read(0, file.len.min(HEAD as u64))?;
    let known: Vec<_> = CONTAINERS.iter().filter(|known| **known != kind).map(|known| known.title).collect();
    foreign::refuse(kind, &head, CONTAINERS)
        .and_then(|()| Err(FormatError::new(format_args!("this is no file of a known kind ({})", known.join(", ")))))
        .map_err(|e| file.bad(e))
}

/// Detects the kind of a file and parses it.
pub(crate) fn parse(file: &ContainerFile<'_>) -> Result<Model, Error> {
    let model = (kind(file)?.parse)(file)?;
    model.check().map_err(|e| file.bad(e))?;
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_known_by_any_of_its_extensions_and_first_bytes() {
        const KIND: Container = Container {
            name: "",
            title: "",
            parse_header: None,
            parse: raw::CONTAINER.parse,
            extensions: &["one", "two"],
            magic: &[b"MAGIC", b"magic"],
            resembles: None,
            in_folders: true,
        };
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
    fn a_name_of_one_kind_and_first_bytes_of_another_are_refused() {
        for of in CONTAINERS.iter().filter(|of| !of.magic.is_empty()) {
            for other in CONTAINERS.iter().filter(|other| *other != of && !other.extensions.is_empty()) {
                let (path, mut head) = (format!("a.{}", other.extensions[0]), of.magic[0].to_vec());
                head.resize(HEAD, 0);
                assert_eq!(detect(Path::new(&path), &head), *other, "{path}");
                assert!(foreign::refuse(other, &head, CONTAINERS).is_err(), "{path} begins as {of:?}");
            }
        }
    }

    #[test]
    fn no_two_kinds_claim_the_same_files() {
        for of in CONTAINERS {
            let Container { extensions, magic, .. } = of;
            for magic in *magic {
                assert!((1..=HEAD).contains(&magic.len()), "{of:?}: {magic:?} is not of 1 to {HEAD} bytes");
            }
            for other in CONTAINERS.iter().filter(|other| *other != of) {
                let others = other;
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
}
