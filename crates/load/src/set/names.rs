//! Names of files in a folder tell which of them are one model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::index::MAX_FILES;

/// A file's name without its extension: `model.fp16-00001-of-00002` is shard 1 of 2 of `model.fp16`, and so is
/// `model-00001-of-00002.fp16`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Name {
    pub stem: String,
    pub shard: Option<Shard>,
}

/// One file of several that are one model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shard {
    /// From 1.
    pub number: u32,
    pub of: u32,
    /// Digits of each number, at least.
    width: usize,
}

/// Digits of the numbers of shards that libraries write, where these have no more.
const WIDTH: usize = 5;

impl Name {
    pub(super) fn of(path: &Path) -> Self {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let parts = || {
            let (front, of) = name.rsplit_once("-of-")?;
            let (stem, number) = front.rsplit_once('-')?;
            let (of, variant) = of.split_once('.').map_or((of, None), |(of, variant)| (of, Some(variant)));
            let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            if !is_number(number) || !is_number(of) {
                return None;
            }
            // Libraries write both with five digits at least.
            let width = if number.starts_with('0') { number.len() } else { number.len().min(WIDTH) };
            let is_so_long = |text: &str| text.len() == width || (width >= WIDTH && !text.starts_with('0'));
            if number.len() > of.len() || !is_so_long(of) {
                return None;
            }
            let shard = Shard { number: number.parse().ok()?, of: of.parse().ok()?, width };
            let stem = variant.map_or(stem.to_owned(), |variant| format!("{stem}.{variant}"));
            // A name is hostile: it must not ask for a list of billions.
            let fits = shard.of <= MAX_FILES && (1..=shard.of).contains(&shard.number);
            fits.then_some(Self { stem, shard: Some(shard) })
        };
        parts().unwrap_or_else(|| Self { stem: name.clone(), shard: None })
    }

    /// The paths of all shards, of which `path` is one.
    pub(super) fn siblings(path: &Path, shard: Shard) -> Vec<PathBuf> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let text = |number: u32| format!("-{number:0width$}-of-", width = shard.width);
        let (front, back) = name.rsplit_once(&text(shard.number)).unwrap_or((&name, ""));
        (1..=shard.of).map(|number| path.with_file_name(format!("{front}{}{back}", text(number)))).collect()
    }
}

/// The files of a folder that are one model, and those that are not of it, each with why.
type Chosen = (Vec<PathBuf>, Vec<(PathBuf, String)>);

/// Why files of this stem are no part of the model, if they are none.
type Rule<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The stems that libraries give to a whole model.
const WHOLE: [&str; 2] = ["model", "diffusion_pytorch_model"];

/// Whether an index of this name is that of a whole model.
pub(super) fn is_whole(index: &Path) -> bool {
    super::index::name_of_index(index).is_some_and(|(stem, _)| WHOLE.contains(&&*stem))
}

/// Chooses the model among files of one kind, in the order of their names.
///
/// # Errors
/// Why it cannot, as a sentence.
pub(super) fn choose(files: Vec<PathBuf>) -> Result<Chosen, String> {
    let mut groups: BTreeMap<(String, Option<u32>), Vec<PathBuf>> = BTreeMap::new();
    for path in files {
        let Name { stem, shard } = Name::of(&path);
        groups.entry((stem, shard.map(|shard| shard.of))).or_default().push(path);
    }
    let mut left_out = Vec::new();
    let is_whole = |stem: &str| WHOLE.contains(&stem);
    let stems: BTreeSet<String> = groups.keys().map(|(stem, _)| stem.clone()).collect();
    // `qwen2.5` is no variant of `qwen2`.
    let base = |stem: &str| {
        let (base, _) = stem.split_once('.')?;
        (is_whole(base) && stems.contains(base)).then(|| base.to_owned())
    };
    let has_whole = stems.iter().any(|stem| is_whole(stem));
    // One rule after the other, as long as there are several.
    let rules: [&Rule<'_>; 4] = [
        &|stem| base(stem).map(|base| format!("a variant of {base}")),
        &|stem| stem.starts_with("adapter").then(|| "an adapter".to_owned()),
        &|stem| stem.starts_with("mmproj").then(|| "a projector".to_owned()),
        &|stem| (has_whole && !is_whole(stem)).then(|| "not of the model beside it".to_owned()),
    ];
    for rule in rules {
        let others = groups.keys().filter(|(stem, _)| rule(stem).is_none()).count();
        if groups.len() > 1 && others > 0 {
            groups.retain(|(stem, _), files| {
                let Some(why) = rule(stem) else { return true };
                left_out.extend(files.iter().map(|file| (file.clone(), why.clone())));
                false
            });
        }
    }
    if groups.len() > 1 {
        let ranks = groups.keys().all(|(stem, _)| stem.contains("-rank-"));
        let what = if ranks { "files of several ranks" } else { "several models" };
        let first: Vec<String> = groups.values().map(|files| name_of(&files[0])).collect();
        return Err(format!("it holds {what}: name the files of one of {}", listed(&first)));
    }
    let files: Vec<PathBuf> = groups.into_values().flatten().collect();
    left_out.sort();
    Ok((files, left_out))
}

/// The shards of a set that are not there, if any, and the same as a sentence; `path` is one of the set.
pub(super) fn missing(path: &Path, shard: Shard, is_there: impl Fn(&Path) -> bool) -> Option<(Vec<PathBuf>, String)> {
    let missing: Vec<PathBuf> = Name::siblings(path, shard).into_iter().filter(|path| !is_there(path)).collect();
    let names: Vec<String> = missing.iter().map(|path| name_of(path)).collect();
    let (n, (parts, are)) = (names.len(), if names.len() == 1 { ("part", "is") } else { ("parts", "are") });
    let why = format!("{n} {parts} of {} {are} missing: {}; is the download complete?", shard.of, listed(&names));
    (n > 0).then_some((missing, why))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The most names in a message.
pub(super) const LISTED: usize = 10;

/// A list for people.
pub(super) fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(LISTED);
    let text = names[..names.len() - more].join(", ");
    if more > 0 { format!("{text} and {more} more") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn names_say_which_shard_they_are() {
        for (name, stem, shard) in [
            ("model.safetensors", "model", None),
            ("model-00001-of-00002.safetensors", "model", Some((1, 2))),
            ("model.fp16-00001-of-00002.safetensors", "model.fp16", Some((1, 2))),
            ("model-00002-of-00002.fp16.safetensors", "model.fp16", Some((2, 2))),
            ("q-Q4_K-00003-of-00003.gguf", "q-Q4_K", Some((3, 3))),
            // None of these is a shard.
            ("model-00003-of-00002.safetensors", "model-00003-of-00002", None),
            ("model-00000-of-00002.safetensors", "model-00000-of-00002", None),
            ("m-0000000001-of-4294967295.gguf", "m-0000000001-of-4294967295", None),
            ("m-00001-of-200001.gguf", "m-00001-of-200001", None),
            ("m-1-of-10.gguf", "m-1-of-10", None),
            ("m-000001-of-0100000.gguf", "m-000001-of-0100000", None),
            ("m-100000-of-200000.gguf", "m", Some((100_000, 200_000))),
            ("m-00001-of-100000.gguf", "m", Some((1, 100_000))),
            ("one-of-many.safetensors", "one-of-many", None),
            ("a-1-of-00002.safetensors", "a-1-of-00002", None),
            ("-of-.safetensors", "-of-", None),
        ] {
            let found = Name::of(Path::new(name));
            assert_eq!((&*found.stem, found.shard.map(|s| (s.number, s.of))), (stem, shard), "{name}");
        }
        let path = Path::new("dir/model-00002-of-00002.fp16.safetensors");
        let siblings = Name::siblings(path, Name::of(path).shard.unwrap());
        assert_eq!(
            siblings,
            paths(&["dir/model-00001-of-00002.fp16.safetensors", "dir/model-00002-of-00002.fp16.safetensors"])
        );
        for [last, first] in [
            ["m-100000-of-100001.gguf", "m-00001-of-100001.gguf"],
            ["m-000099-of-100001.gguf", "m-000001-of-100001.gguf"],
        ] {
            let siblings = Name::siblings(Path::new(last), Name::of(Path::new(last)).shard.unwrap());
            assert_eq!((siblings.len(), &*siblings[0]), (100_001, Path::new(first)));
        }
    }

    #[test]
    fn one_model_is_chosen_or_all_are_listed() {
        for (files, chosen, left_out) in [
            (&["a.st"][..], &["a.st"][..], &[][..]),
            (&["model.fp16.st", "model.st"], &["model.st"], &[("model.fp16.st", "a variant of model")]),
            (&["model.fp16.st"], &["model.fp16.st"], &[]),
            (&["consolidated.st", "model.st"], &["model.st"], &[("consolidated.st", "not of the model beside it")]),
            (&["adapter_model.st", "model.st"], &["model.st"], &[("adapter_model.st", "an adapter")]),
            (&["adapter_model.st"], &["adapter_model.st"], &[]),
            (&["m.gguf", "mmproj-m.gguf"], &["m.gguf"], &[("mmproj-m.gguf", "a projector")]),
            (
                &["model-1-of-2.st", "model-2-of-2.st", "model.fp16-1-of-1.st", "other.st"],
                &["model-1-of-2.st", "model-2-of-2.st"],
                &[("model.fp16-1-of-1.st", "a variant of model"), ("other.st", "not of the model beside it")],
            ),
        ] {
            let left_out = left_out.iter().map(|(file, why)| (PathBuf::from(file), (*why).to_owned())).collect();
            assert_eq!(choose(paths(files)), Ok((paths(chosen), left_out)), "{files:?}");
        }
        for (files, says) in [
            (&["a.st", "b.st"][..], "several models: name the files of one of a.st, b.st"),
            (&["qwen2.5.st", "qwen2.st"], "several models"),
            (&["model-rank-0-part-0.st", "model-rank-1-part-0.st"], "files of several ranks"),
            (&["model-1-of-1.st", "model.st"], "several models"),
        ] {
            let error = choose(paths(files)).unwrap_err();
            assert!(error.contains(says), "{files:?}: {error}");
        }
    }

    #[test]
    fn shards_that_are_missing_are_listed() {
        for (files, says) in [
            (&["m-1-of-3.st", "m-3-of-3.st"][..], "1 part of 3 is missing: m-2-of-3.st; is the download complete?"),
            (&["m-02-of-12.st"], "11 parts of 12 are missing: m-01-of-12.st, m-03-of-12.st"),
            (&["m-02-of-12.st"], "m-11-of-12.st and 1 more;"),
        ] {
            let files = paths(files);
            let shard = Name::of(&files[0]).shard.unwrap();
            let (missing, why) = missing(&files[0], shard, |path| files.iter().any(|file| file == path)).unwrap();
            assert_eq!(missing.len() + files.len(), shard.of as usize);
            assert!(why.contains(says), "{files:?}: {why}");
        }
        let shard = Name::of(Path::new("m-1-of-1.st")).shard.unwrap();
        assert_eq!(missing(Path::new("m-1-of-1.st"), shard, |_| true), None);
    }
}
