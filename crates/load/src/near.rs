//! Names that were meant.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Names of a folder that are looked at, at most.
const NAMES: usize = 10_000;

/// An error about a path; where it is not there, with the path that is and that differs by few letters.
pub fn with_near_path(path: &Path, error: io::Error) -> io::Error {
    match (error.kind() == io::ErrorKind::NotFound).then(|| near(path)).flatten() {
        Some(near) => io::Error::new(error.kind(), format!("{error}; did you mean {}?", near.display())),
        None => error,
    }
}

fn near(path: &Path) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    for part in path.components() {
        let next = found.join(part);
        // Also a link that leads nowhere.
        if next.symlink_metadata().is_ok() {
            found = next;
            continue;
        }
        let folder = if found.as_os_str().is_empty() { Path::new(".") } else { &found };
        let names =
            fs::read_dir(folder).ok()?.take(NAMES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let names: Vec<String> = names.collect();
        found.push(nearest(part.as_os_str().to_str()?, names.iter().map(String::as_str))?);
    }
    (found != path).then_some(found)
}

/// The word that was meant, if one is like it: by few letters that were added, left out or changed.
pub fn nearest<'a>(word: &str, among: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = among.map(|other| (distance(word, other), other)).filter(|(n, other)| *n > 0 && *n <= other.len() / 3);
    near.min().map(|(_, other)| other)
}

/// Letters to add, leave out or change to make one of the other.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let best = (before + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            before = std::mem::replace(&mut row[j + 1], best);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_not_there_is_near_one_that_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        fs::create_dir_all(at("models/llama")).unwrap();
        for file in ["models/llama/model.safetensors", "models/mistral.gguf"] {
            fs::write(at(file), "").unwrap();
        }
        let missing = |path: &str| with_near_path(&at(path), fs::File::open(at(path)).unwrap_err()).to_string();
        for (path, meant) in [
            ("modles/llama", Some("models/llama")),
            ("models/lama", Some("models/llama")),
            ("modles/lama/model.safetensor", Some("models/llama/model.safetensors")),
            ("models/mistral.ggfu", Some("models/mistral.gguf")),
            ("models/qwen", None),
            ("modles/qwen", None),
            ("models/mistral.gguf/a", None),
        ] {
            let hint = meant.map_or(String::new(), |meant| format!("; did you mean {}?", at(meant).display()));
            assert!(missing(path).ends_with(&hint) && missing(path).contains("did you") == meant.is_some(), "{path}");
        }
        let refused = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(with_near_path(&at("models/lama"), refused).kind(), io::ErrorKind::PermissionDenied);
    }
}
