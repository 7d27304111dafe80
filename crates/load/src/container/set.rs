//! A model of several files: a directory, or an index of shards.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::format_error::FormatError;
use super::kinds::CONTAINERS;
use super::text::{MAX_HEADER, short};
use crate::error::Error;

/// How the names of indices end, as `save_pretrained` of Hugging Face's libraries writes them.
const INDEX: &str = ".safetensors.index.json";

/// An index: which file holds which tensor.
/// Format: <https://huggingface.co/docs/safetensors/main/en/metadata_parsing#sharded-model>.
#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "values")]
    weight_map: BTreeSet<String>,
}

/// Files of a model, at most.
const MAX_FILES: usize = 10_000;

/// The values of a map of texts: the names of its tensors are not needed, and may be many.
fn values<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    struct Values;
    impl<'de> Visitor<'de> for Values {
        type Value = BTreeSet<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with a file for each tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BTreeSet<String>, A::Error> {
            let mut files = BTreeSet::new();
            while let Some((_, file)) = map.next_entry::<IgnoredAny, String>()? {
                files.insert(file);
                if files.len() > MAX_FILES {
                    return Err(A::Error::custom(format!("more than {MAX_FILES} files")));
                }
            }
            Ok(files)
        }
    }
    deserializer.deserialize_map(Values)
}

/// The files of a model, in the order of their names: those that an index (`*.safetensors.index.json`) lists; for a
/// directory, those of the index in it, or else all its files of the first kind in [`CONTAINERS`] that it has and
/// that a directory may stand for; and for anything else the path itself.
///
/// # Errors
/// [`Error::File`] for a directory or an index that cannot be read, a directory without a model, or one with several
/// indices; [`Error::Format`] for a bad index.
pub fn model_files(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |what| move |source| Error::File { path: path.to_owned(), what, source };
    if is_index(path) {
        return shards(path);
    }
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(path).map_err(failed("list it"))? {
        let entry = entry.map_err(failed("list it"))?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && !entry.path().is_dir() {
            names.insert(entry.path());
        }
    }
    let indices: Vec<&PathBuf> = names.iter().filter(|name| is_index(name)).collect();
    match indices[..] {
        [] => {}
        [index] => return shards(index),
        [first, second, ..] => {
            let several = format!("it has several indices, among them {} and {}", first.display(), second.display());
            return Err(failed("find its model")(std::io::Error::other(several)));
        }
    }
    let mut wanted = vec![format!("*{INDEX}")];
    for kind in CONTAINERS.iter().filter(|kind| kind.in_folders) {
        let found: Vec<PathBuf> = names.iter().filter(|name| kind.is_name(name)).cloned().collect();
        if !found.is_empty() {
            return Ok(found);
        }
        wanted.extend(kind.extensions.iter().map(|extension| format!("*.{extension}")));
    }
    let last = wanted.pop().unwrap_or_default();
    let none = format!("it holds no {} or {last} file", wanted.join(", "));
    Err(failed("find its model")(std::io::Error::new(std::io::ErrorKind::NotFound, none)))
}

/// Whether a file of this name lists the files of a model.
pub fn is_index(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(INDEX))
}

/// The files that an index lists, beside it.
fn shards(index: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::File { path: index.to_owned(), what: "read it", source };
    let bad = |defect: FormatError| Error::Format { path: index.to_owned(), source: defect.within("bad index") };
    let file = File::open(index).map_err(failed)?;
    let mut text = Vec::new();
    file.take(MAX_HEADER + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_HEADER {
        return Err(bad(FormatError::too_long(MAX_HEADER)));
    }
    let Index { weight_map: names } = serde_json::from_slice(&text).map_err(|e| bad(e.into()))?;
    if names.is_empty() {
        return Err(bad(FormatError::no_files()));
    }
    let folder = index.parent().unwrap_or(Path::new(""));
    let place = |name: String| {
        // A model that was downloaded must not name files elsewhere.
        match Path::new(&name).components().collect::<Vec<_>>()[..] {
            [Component::Normal(_)] => Ok(folder.join(name)),
            _ => {
                let text = format!("{:?} is not the name of a file beside it", short(&name));
                Err(bad(FormatError::new(text)))
            }
        }
    };
    names.into_iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn write(folder: &Path, names: &[&str]) {
        names.iter().for_each(|name| fs::write(folder.join(name), "x").unwrap());
    }

    fn index(files: &[&str]) -> String {
        let map: BTreeMap<String, &str> = files.iter().enumerate().map(|(i, f)| (format!("t{i}"), *f)).collect();
        serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string()
    }

    fn found(path: &Path) -> Result<Vec<String>, String> {
        let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        model_files(path).map(|files| files.iter().map(name).collect()).map_err(|e| e.to_string())
    }

    #[test]
    fn directories_and_indices_stand_for_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(found(folder.path()).unwrap_err().contains("holds no *.safetensors.index.json"));
        write(folder.path(), &["config.json", "b.gguf", "a.gguf"]);
        fs::create_dir(at("dir.safetensors")).unwrap();
        assert_eq!(found(folder.path()).unwrap(), ["a.gguf", "b.gguf"]);
        write(
            folder.path(),
            &["consolidated.safetensors", ".hidden.safetensors", "s-2.safetensors", "s-1.safetensors"],
        );
        assert_eq!(found(folder.path()).unwrap(), ["consolidated.safetensors", "s-1.safetensors", "s-2.safetensors"]);
        fs::write(
            at("model.safetensors.index.json"),
            index(&["s-2.safetensors", "s-1.safetensors", "s-2.safetensors"]),
        )
        .unwrap();
        for path in [folder.path(), &at("model.safetensors.index.json")] {
            assert_eq!(found(path).unwrap(), ["s-1.safetensors", "s-2.safetensors"]);
        }
        assert_eq!(found(&at("config.json")).unwrap(), ["config.json"]);
        assert_eq!(found(&at("missing")).unwrap(), ["missing"], "whoever opens it says so");
        write(folder.path(), &["other.safetensors.index.json"]);
        assert!(found(folder.path()).unwrap_err().contains("several indices"));
    }

    #[test]
    fn a_bad_index_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors.index.json");
        for (text, says) in [
            (String::new(), "it ends too early"),
            ("[]".to_owned(), "a list "),
            ("{}".to_owned(), "weight_map"),
            (r#"{"weight_map": {"t": 5}}"#.to_owned(), "5 instead of a string"),
            (index(&[]), "lists no files"),
            (index(&["../elsewhere.safetensors"]), "not the name of a file beside it"),
            (index(&["/etc/shadow"]), "not the name of a file beside it"),
            (index(&["sub/x.safetensors"]), "not the name of a file beside it"),
            (index(&[".."]), "not the name of a file beside it"),
            (index(&[""]), "not the name of a file beside it"),
        ] {
            fs::write(&path, text).unwrap();
            let error = found(&path).unwrap_err();
            assert!(error.contains(says) && error.contains("m.safetensors.index.json"), "{error}");
        }
    }
}
