//! The files of one model: which of a folder's files they are, which of their tensors count, and whether all are there.

mod file;
mod hub;
mod index;
mod names;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::file::SetFile;
use self::names::{LISTED, Name, choose, listed, missing};
use crate::container::{CONTAINERS, CONVERT, Model, gguf, short};
use crate::error::Error;
use crate::kept;

/// Extensions of PyTorch's checkpoints.
const TORCH: [&str; 4] = ["bin", "ckpt", "pt", "pth"];

/// The files that a path stands for.
#[derive(Clone, Debug, Default)]
pub struct ModelSet {
    /// In the order of their names.
    pub files: Vec<SetFile>,
    /// Files beside them that are no part of the model, each with why.
    pub left_out: Vec<(PathBuf, String)>,
    /// Files of the model that are not there.
    pub missing: Vec<PathBuf>,
    /// The path of which some are missing first, and which.
    lacks: Option<(PathBuf, String)>,
}

/// Whether a file of this name lists the files of a model: `*.safetensors.index.json`, or that of a variant.
pub fn is_index(path: &Path) -> bool {
    index::name_of_index(path).is_some()
}

impl ModelSet {
    /// The files of models, named by several paths.
    ///
    /// # Errors
    /// As of [`ModelSet::find`].
    pub fn of<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self, Error> {
        let set = Self::there(paths)?;
        match &set.lacks {
            Some((path, why)) => Err(unknown(path, io::ErrorKind::NotFound, why.clone())),
            None => Ok(set),
        }
    }

    /// The same, where files of the models may be [missing](Self::missing).
    ///
    /// # Errors
    /// As of [`ModelSet::find`].
    pub fn there<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self, Error> {
        let mut all = Self::default();
        for path in paths {
            let Self { files, left_out, missing, lacks } = Self::look(path.as_ref())?;
            all.files.extend(files);
            all.left_out.extend(left_out);
            all.missing.extend(missing);
            all.lacks = all.lacks.or(lacks);
        }
        Ok(all)
    }

    /// The files of a model: those that an index lists; for a directory, those of its index, or else the model among
    /// the files of the first kind in [`CONTAINERS`] that it has and that a directory may stand for; for the first part
    /// of a split GGUF all parts; and for anything else the path itself. Where there is no file of that path, and it is
    /// the name of a model, `org/name` or `org/name@revision`, those of the model in the local cache of Hugging Face's
    /// libraries (`HF_HUB_CACHE`, `HF_HOME`). `kept:NAME` are the files of a model that a [keeper](crate::kept) lends.
    ///
    /// # Errors
    /// [`Error::File`] for a directory or an index that cannot be read, and where the files of one model cannot be told
    /// or are not all there; [`Error::Format`] for a bad index.
    pub fn find(path: &Path) -> Result<Self, Error> {
        Self::of([path])
    }

    /// Whether these paths are its files themselves: no directory, index or other name stands for some.
    pub fn is_named_by(&self, paths: &[PathBuf]) -> bool {
        self.files.iter().map(|file| &file.path).chain(&self.missing).eq(paths)
    }

    fn look(path: &Path) -> Result<Self, Error> {
        if let Some(name) = kept::name_in(path) {
            return Ok(Self { files: kept::attach(name)?.into_files(), ..Self::default() });
        }
        if is_index(path) {
            return Self::of_index(path);
        }
        let found = path.metadata();
        if found.as_ref().is_ok_and(Metadata::is_dir) {
            return Self::of_folder(path);
        }
        if found.is_err()
            && let Some(folder) = in_cache(path)?
        {
            return Self::of_folder(&folder);
        }
        let files = match Name::of(path).shard.filter(|_| gguf::CONTAINER.is_name(path)) {
            Some(shard) if shard.number == 1 => Name::siblings(path, shard),
            Some(shard) => {
                let first = Name::siblings(path, shard).swap_remove(0);
                let why = format!("it is part {} of {}: name the first, {}", shard.number, shard.of, first.display());
                return Err(unknown(path, io::ErrorKind::InvalidInput, why));
            }
            None => return Ok(Self { files: vec![SetFile::whole(path.to_owned())], ..Self::default() }),
        };
        let set = Self::of_shards(path, path, files.into_iter().filter(|file| file.exists()).collect());
        match &set.lacks {
            // Not a part is there of such a name.
            Some((path, why)) if set.files.is_empty() => Err(unknown(path, io::ErrorKind::NotFound, why.clone())),
            _ => Ok(set),
        }
    }

    /// The files of a model that are there. If they are shards, of which `one` is one, others may be missing.
    fn of_shards(path: &Path, one: &Path, files: Vec<PathBuf>) -> Self {
        let there: HashSet<&Path> = files.iter().map(PathBuf::as_path).collect();
        let shard = Name::of(one).shard;
        let (missing, why) = shard.and_then(|shard| missing(one, shard, |file| there.contains(file))).unzip();
        let files = files.into_iter().map(SetFile::whole).collect();
        let lacks = why.map(|why| (path.to_owned(), why));
        Self { files, missing: missing.unwrap_or_default(), lacks, ..Self::default() }
    }

    fn of_folder(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), what: "list it", source };
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            // Of a link, its end counts.
            let is_dir =
                entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink() && entry.path().is_dir());
            if !hidden && !is_dir {
                names.insert(entry.path());
            }
        }
        let indices: Vec<PathBuf> = names.iter().filter(|name| is_index(name)).cloned().collect();
        if let Some(chosen) = choose_index(&indices).map_err(|why| unknown(path, io::ErrorKind::InvalidInput, why))? {
            let mut set = Self::of_index(&chosen)?;
            let files: BTreeSet<&PathBuf> = set.files.iter().map(|file| &file.path).chain(&set.missing).collect();
            let others = names.iter().filter(|name| is_model(name) && !files.contains(name));
            set.left_out = others.map(|name| (name.clone(), "not listed by the index".to_owned())).collect();
            return Ok(set);
        }
        for kind in CONTAINERS.iter().filter(|kind| kind.in_folders) {
            let found: Vec<PathBuf> = names.iter().filter(|name| kind.is_name(name)).cloned().collect();
            if found.is_empty() {
                continue;
            }
            let chosen = choose(found).map_err(|why| unknown(path, io::ErrorKind::InvalidInput, why));
            let (files, left_out) = chosen?;
            return Ok(Self { left_out, ..Self::of_shards(path, &files[0].clone(), files) });
        }
        let mut wanted = vec!["*.safetensors.index.json".to_owned()];
        let kinds = CONTAINERS.iter().filter(|kind| kind.in_folders);
        wanted.extend(kinds.flat_map(|kind| kind.extensions).map(|extension| format!("*.{extension}")));
        let last = wanted.pop().unwrap_or_default();
        let mut why = format!("it holds no {} or {last} file", wanted.join(", "));
        let is_of_torch = |name: &&PathBuf| name.extension().is_some_and(|end| TORCH.iter().any(|of| end == *of));
        if let Some(name) = names.iter().filter(is_of_torch).find_map(|name| name.file_name()) {
            why += &format!("; {} may be a checkpoint of PyTorch: {CONVERT}", name.display());
        }
        Err(unknown(path, io::ErrorKind::NotFound, why))
    }

    fn of_index(path: &Path) -> Result<Self, Error> {
        let (mut set, mut names) = (Self::default(), Vec::new());
        for (file, tensors) in index::read(path)? {
            // A link of a download cache may lead nowhere.
            if file.exists() {
                set.files.push(SetFile { path: file, listed: Some(Arc::new(tensors)), kept: None });
                continue;
            }
            let link = fs::read_link(&file).map_or(String::new(), |to| format!(" (a link to {})", to.display()));
            names.push(format!("{}{link}", file.file_name().unwrap_or_default().to_string_lossy()));
            set.missing.push(file);
        }
        let what = if names.len() == 1 { "a file that is" } else { "files that are" };
        let why = format!("it lists {what} not there: {}; is the download complete?", listed(&names));
        set.lacks = (!names.is_empty()).then(|| (path.to_owned(), why));
        Ok(set)
    }
}

/// The folder of a model that a path names, where no file is of that path.
fn in_cache(path: &Path) -> Result<Option<PathBuf>, Error> {
    if path.to_str().is_some_and(|text| text.contains("://")) {
        let why = "it is a URL: download the file first (hf download ORG/NAME)".to_owned();
        return Err(unknown(path, io::ErrorKind::Unsupported, why));
    }
    // `folder/model.gguf` is a file, and none of a model's name.
    let name = hub::Name::of(path).filter(|_| !CONTAINERS.iter().any(|kind| kind.is_name(path)));
    let Some((name, cache)) = name.zip(hub::cache()) else { return Ok(None) };
    let folder = name.folder_in(&cache).map_err(|why| unknown(path, io::ErrorKind::NotFound, why))?;
    if folder.is_none() && path.parent().is_none_or(|parent| !parent.is_dir()) {
        let name = path.display();
        let why = format!("there is no such file, and {} has no such model: hf download {name}", cache.display());
        return Err(unknown(path, io::ErrorKind::NotFound, why));
    }
    Ok(folder)
}

/// Whether a folder may stand for a file of this name.
fn is_model(path: &Path) -> bool {
    CONTAINERS.iter().any(|kind| kind.in_folders && kind.is_name(path))
}

/// The index of a folder, where it has any: that of a whole model, and of no variant.
fn choose_index(indices: &[PathBuf]) -> Result<Option<PathBuf>, String> {
    let plain = indices.iter().filter(|path| index::name_of_index(path).is_some_and(|(_, variant)| variant.is_none()));
    let plain: Vec<&PathBuf> = plain.collect();
    let whole: Vec<&PathBuf> = plain.iter().copied().filter(|path| names::is_whole(path)).collect();
    match (&whole[..], &plain[..], indices) {
        (_, _, []) => Ok(None),
        ([one], ..) | (_, [one], _) => Ok(Some((*one).clone())),
        (_, [], [one]) => Ok(Some(one.clone())),
        _ => {
            let names = indices.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
            Err(format!("it has several indices: name one of {}", listed(&names)))
        }
    }
}

fn unknown(path: &Path, kind: io::ErrorKind, why: String) -> Error {
    Error::File { path: path.to_owned(), what: "find its model", source: io::Error::new(kind, why) }
}

/// Checks, where all headers are known, that nothing of a model is missing: what an index lists is in the file for
/// which it lists it, and a split GGUF has all its parts.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn check(files: &[(&Path, Option<&BTreeSet<String>>, &Model)]) -> Result<(), Error> {
    for (path, listed_for, model) in files {
        let Some(wanted) = listed_for else { continue };
        let has: BTreeSet<&str> = model.tensors.iter().map(|tensor| &*tensor.name).collect();
        let mut missing: Vec<String> = Vec::new();
        for name in wanted.iter().filter(|name| !has.contains(&***name)) {
            // Those that the message shows are looked for in the other files.
            let holds = |(_, _, model): &&(&Path, Option<&BTreeSet<String>>, &Model)| {
                model.tensors.iter().any(|tensor| tensor.name == *name)
            };
            let other = files.iter().filter(|_| missing.len() < LISTED).find(holds);
            let other = other.and_then(|(other, ..)| other.file_name());
            let place = other.map_or(String::new(), |other| format!(" (it is in {})", other.to_string_lossy()));
            missing.push(format!("{:?}{place}", short(name)));
        }
        if !missing.is_empty() {
            let what = if missing.len() == 1 { "a tensor" } else { "tensors" };
            let why = format!("the index lists {what} that it does not have: {}", listed(&missing));
            return Err(unknown(path, io::ErrorKind::InvalidData, why));
        }
    }
    check_split(files.iter().map(|(path, _, model)| (*path, *model)))
}

/// Tensors that an index does not list, in the files that it lists: a sentence for each file that has some.
pub(crate) fn unlisted(files: &[(&Path, Option<&BTreeSet<String>>, &Model)]) -> Vec<String> {
    let others = files.iter().filter_map(|(path, listed, model)| {
        let names = model.tensors.iter().map(|tensor| &*tensor.name);
        let others: Vec<&str> = listed.map(|listed| names.filter(|name| !listed.contains(*name)).collect())?;
        (!others.is_empty()).then_some((path, others))
    });
    let mut others: Vec<_> = others.collect();
    if others.is_empty() {
        return Vec::new();
    }
    let all: HashSet<&str> = files.iter().filter_map(|(_, listed, _)| *listed).flatten().map(|name| &**name).collect();
    // A stale copy of a tensor that is listed for another file is no loss.
    others.iter_mut().for_each(|(_, names)| names.retain(|name| !all.contains(name)));
    let note = |(path, names): (&&Path, Vec<&str>)| {
        let what = if names.len() == 1 { "a tensor is" } else { "tensors are" };
        let names: Vec<_> = names.iter().map(|name| format!("{:?}", short(name))).collect();
        format!("{}: {what} left out that the index does not list: {}", path.display(), listed(&names))
    };
    others.into_iter().filter(|(_, names)| !names.is_empty()).map(note).collect()
}

/// The parts of a split GGUF: `split.no` of `split.count`, and all tensors.
/// Format: <https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split>.
fn check_split<'a>(files: impl Iterator<Item = (&'a Path, &'a Model)>) -> Result<(), Error> {
    /// The parts of those that are split into as many.
    struct Split<'a> {
        first: &'a Path,
        parts: BTreeSet<u64>,
        tensors: u64,
        /// Tensors as the files say.
        all: Option<u64>,
    }
    let bad = |path: &Path, why| Err(unknown(path, io::ErrorKind::InvalidData, why));
    let mut sets: BTreeMap<u64, Split<'a>> = BTreeMap::new();
    for (path, model) in files {
        let value = |key: &str| {
            let pairs = model.metadata.as_ref().filter(|_| model.container == &gguf::CONTAINER)?;
            pairs.iter().find(|(name, _)| name == key)?.1.parse::<u64>().ok()
        };
        let Some(count) = value("split.count").filter(|count| *count > 1) else { continue };
        let new = || Split { first: path, parts: BTreeSet::new(), tensors: 0, all: None };
        let split = sets.entry(count).or_insert_with(new);
        let part = value("split.no").unwrap_or(0);
        if !split.parts.insert(part) {
            return bad(path, format!("it is part {} of {count}, and so is another file", part.saturating_add(1)));
        }
        split.tensors += model.tensors.len() as u64;
        split.all = split.all.or(value("split.tensors.count"));
    }
    let numbers = |parts: &mut dyn Iterator<Item = u64>| {
        listed(&parts.map(|n| n.saturating_add(1).to_string()).collect::<Vec<_>>())
    };
    for (count, Split { first, parts, tensors, all }) in sets {
        if (parts.len() as u64) < count {
            let missing = numbers(&mut (0..count.min(10_000)).filter(|part| !parts.contains(part)));
            let why = format!(
                "a GGUF split into {count} parts, of which this is {} and {missing} are missing: name the first part \
                 of a set that is whole",
                numbers(&mut parts.into_iter()),
            );
            return bad(first, why);
        }
        if let Some(all) = all.filter(|all| *all != tensors) {
            let why = format!("a GGUF split into {count} parts has {tensors} tensors in them, not the {all} it says");
            return bad(first, why);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, names: &[&str]) {
        names.iter().for_each(|name| fs::write(folder.join(name), "x").unwrap());
    }

    fn index(pairs: &[(&str, &str)]) -> String {
        let map: BTreeMap<&str, &str> = pairs.iter().copied().collect();
        serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string()
    }

    fn found(path: &Path) -> Result<Vec<String>, String> {
        let name = |file: &SetFile| file.path.file_name().unwrap().to_string_lossy().into_owned();
        ModelSet::find(path).map(|set| set.files.iter().map(name).collect()).map_err(|e| dmalane_dma::error_chain(&e))
    }

    #[test]
    fn directories_and_indices_stand_for_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(found(folder.path()).unwrap_err().contains("holds no *.safetensors.index.json"));
        write(folder.path(), &["config.json", "a.gguf"]);
        fs::create_dir(at("dir.safetensors")).unwrap();
        assert_eq!(found(folder.path()).unwrap(), ["a.gguf"]);
        write(folder.path(), &["s-1.safetensors", ".hidden.safetensors"]);
        assert_eq!(found(folder.path()).unwrap(), ["s-1.safetensors"]);
        write(folder.path(), &["s-2.safetensors", "old.safetensors"]);
        assert!(found(folder.path()).unwrap_err().contains("several models"));
        let text = index(&[("t", "s-2.safetensors"), ("u", "s-1.safetensors"), ("v", "s-2.safetensors")]);
        fs::write(at("m.safetensors.index.json"), &text).unwrap();
        for path in [folder.path(), &at("m.safetensors.index.json")] {
            assert_eq!(found(path).unwrap(), ["s-1.safetensors", "s-2.safetensors"]);
        }
        let set = ModelSet::find(folder.path()).unwrap();
        let listed = |i: usize| set.files[i].listed.as_ref().unwrap().iter().map(|s| &**s).collect::<Vec<_>>();
        assert_eq!((listed(0), listed(1)), (vec!["u"], vec!["t", "v"]));
        let left_out: Vec<_> = set.left_out.iter().map(|(path, why)| (path.clone(), &**why)).collect();
        assert_eq!(
            left_out,
            [(at("a.gguf"), "not listed by the index"), (at("old.safetensors"), "not listed by the index")]
        );
        assert_eq!(found(&at("config.json")).unwrap(), ["config.json"]);
        assert_eq!(found(&at("missing")).unwrap(), ["missing"], "whoever opens it says so");
        // A variant has an index of its own, and so has another layout of the model.
        fs::write(at("m.safetensors.index.fp16.json"), index(&[("t", "old.safetensors")])).unwrap();
        assert_eq!(found(folder.path()).unwrap(), ["s-1.safetensors", "s-2.safetensors"]);
        assert_eq!(found(&at("m.safetensors.index.fp16.json")).unwrap(), ["old.safetensors"]);
        write(folder.path(), &["other.safetensors.index.json"]);
        let several = found(folder.path()).unwrap_err();
        assert!(several.contains("several indices: name one of") && several.contains("other.safetensors"), "{several}");
        fs::write(at("model.safetensors.index.json"), index(&[("t", "old.safetensors")])).unwrap();
        assert_eq!(found(folder.path()).unwrap(), ["old.safetensors"]);
    }

    #[test]
    fn what_an_index_lists_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(folder.path(), &["a.safetensors"]);
        std::os::unix::fs::symlink("blobs/gone", at("c.safetensors")).unwrap();
        let text = index(&[("t", "a.safetensors"), ("u", "b.safetensors"), ("v", "c.safetensors")]);
        fs::write(at("m.safetensors.index.json"), text).unwrap();
        let error = found(folder.path()).unwrap_err();
        let says = "files that are not there: b.safetensors, c.safetensors (a link to blobs/gone); is the download";
        assert!(error.contains(says), "{error}");
    }

    #[test]
    fn a_bad_index_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors.index.json");
        let one = |file| index(&[("t", file)]);
        for (text, says) in [
            (String::new(), "it ends too early"),
            ("[]".to_owned(), "a list "),
            ("{}".to_owned(), "weight_map"),
            (r#"{"weight_map": {"t": 5}}"#.to_owned(), "5 instead of a string"),
            (index(&[]), "lists no files"),
            (one("../elsewhere.safetensors"), "not the name of a file beside it"),
            (one("/etc/shadow"), "not the name of a file beside it"),
            (one("sub/x.safetensors"), "not the name of a file beside it"),
            (one(".."), "not the name of a file beside it"),
            (one(""), "not the name of a file beside it"),
        ] {
            fs::write(&path, text).unwrap();
            let error = found(&path).unwrap_err();
            assert!(error.contains(says) && error.contains("m.safetensors.index.json"), "{error}");
        }
        for name in ["m.safetensors.index.json", "m.safetensors.index.fp16.json"] {
            assert!(is_index(Path::new(name)), "{name}");
        }
        for name in ["safetensors.index.json", "m.index.json", "m.safetensors.index.", "m.safetensors.index..json"] {
            assert!(!is_index(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn the_first_part_of_a_split_gguf_stands_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let at = |n: u32| folder.path().join(format!("q-{n:05}-of-00003.gguf"));
        write(folder.path(), &["q-00001-of-00003.gguf", "q-00003-of-00003.gguf"]);
        let error = found(&at(1)).unwrap_err();
        assert!(error.contains("1 part of 3 is missing: q-00002-of-00003.gguf"), "{error}");
        assert!(found(&at(3)).unwrap_err().contains("part 3 of 3: name the first"));
        fs::write(at(2), "x").unwrap();
        assert_eq!(found(&at(1)).unwrap().len(), 3);
        assert_eq!(found(folder.path()).unwrap().len(), 3);
    }
}
