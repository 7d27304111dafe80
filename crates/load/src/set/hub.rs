//! Models by their names in the local cache of Hugging Face's libraries: `org/name`, or `org/name@revision`.
//!
//! Layout: <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.

use std::env;
use std::fs;
use std::path::{Component, Path, PathBuf};

use super::names::listed;

/// A model by its name.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Name<'a> {
    org: &'a str,
    name: &'a str,
    revision: Option<&'a str>,
}

impl<'a> Name<'a> {
    /// The name that a path may be; `None` for any other path. Whether there is a file of that path is for the caller
    /// to say.
    pub(super) fn of(path: &'a Path) -> Option<Self> {
        let [Component::Normal(org), Component::Normal(name)] = path.components().collect::<Vec<_>>()[..] else {
            return None;
        };
        let (org, name) = (org.to_str()?, name.to_str()?);
        let (name, revision) = name.split_once('@').map_or((name, None), |(name, revision)| (name, Some(revision)));
        let fits = |text: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain) && !text.contains("--")
        };
        (fits(org) && fits(name) && revision.is_none_or(fits)).then_some(Self { org, name, revision })
    }

    /// The folder of the model's files in a cache; `None` where the cache does not have the model.
    ///
    /// # Errors
    /// Why it cannot be told, as a sentence.
    pub(super) fn folder_in(&self, cache: &Path) -> Result<Option<PathBuf>, String> {
        let model = cache.join(format!("models--{}--{}", self.org, self.name));
        if !model.is_dir() {
            return Ok(None);
        }
        let snapshots = model.join("snapshots");
        let snapshot = |revision: &str| {
            let folder = snapshots.join(revision);
            // What a file of the cache says is the name of a folder in it, and no way out of it.
            let plain = matches!(Path::new(revision).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
            (plain && folder.is_dir()).then_some(folder)
        };
        let revision = self.revision.unwrap_or("main");
        let commit = fs::read_to_string(model.join("refs").join(revision)).unwrap_or_default();
        if let Some(folder) = snapshot(commit.trim()).or_else(|| snapshot(revision)) {
            return Ok(Some(folder));
        }
        let mut there: Vec<String> = fs::read_dir(&snapshots)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        there.sort();
        let has = if there.is_empty() { "none".to_owned() } else { listed(&there) };
        Err(format!(
            "{} has no revision {revision} of it, but {has}: write {}/{}@REVISION",
            model.display(),
            self.org,
            self.name
        ))
    }
}

/// The folder of the cache, as `huggingface_hub` finds it; `None` without a home.
pub(super) fn cache() -> Option<PathBuf> {
    let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // Services and containers set variables without a shell, which would have replaced the `~`.
    let set = |name| match var(name)? {
        path if path.starts_with("~") => Some(var("HOME")?.join(path.strip_prefix("~").ok()?)),
        path => Some(path),
    };
    let home =
        || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).map(|dir| dir.join("huggingface"));
    // The second is the older name of the first.
    set("HF_HUB_CACHE")
        .or_else(|| set("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(set("HF_HOME").or_else(home)?.join("hub")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let name = |path| Name::of(Path::new(path));
        assert_eq!(name("org/name"), Some(Name { org: "org", name: "name", revision: None }));
        let revision = Some("v1.0");
        assert_eq!(name("org/a.b-c_d@v1.0"), Some(Name { org: "org", name: "a.b-c_d", revision }));
        for path in ["name", "/org/name", "a/b/c", "../name", "org/..", "org/na me", "org/a--b", "org/n@", "-a/b", ""] {
            assert_eq!(name(path), None, "{path}");
        }
    }

    #[test]
    fn revisions_are_found() {
        let cache = tempfile::tempdir().unwrap();
        let at = |name: &str| cache.path().join("models--org--name").join(name);
        let folder = |path: &str| Name::of(Path::new(path)).unwrap().folder_in(cache.path());
        assert_eq!(folder("org/name"), Ok(None));
        fs::create_dir_all(at("refs")).unwrap();
        assert!(folder("org/name").unwrap_err().contains("has no revision main of it, but none"));
        for commit in ["aaaa", "bbbb"] {
            fs::create_dir_all(at("snapshots").join(commit)).unwrap();
        }
        let error = folder("org/name").unwrap_err();
        assert!(error.contains("but aaaa, bbbb: write org/name@REVISION"), "{error}");
        fs::write(at("refs/main"), "bbbb\n").unwrap();
        fs::write(at("refs/v1"), "aaaa").unwrap();
        for (path, commit) in [("org/name", "bbbb"), ("org/name@v1", "aaaa"), ("org/name@aaaa", "aaaa")] {
            assert_eq!(folder(path), Ok(Some(at("snapshots").join(commit))), "{path}");
        }
        // A cache is hostile: its text leads nowhere else.
        fs::write(at("refs/main"), "../../..").unwrap();
        assert!(folder("org/name").is_err());
    }
}
