//! Indices: which file of a model has which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::container::{FormatError, MAX_HEADER, short};
use crate::error::Error;

/// The part that names of indices have, as `save_pretrained` of Hugging Face's libraries writes them: the name of a
/// variant may follow.
const INDEX: &str = ".safetensors.index.";

/// An index: which file holds which tensor.
/// Format: <https://huggingface.co/docs/safetensors/main/en/metadata_parsing#sharded-model>.
#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "by_file")]
    weight_map: BTreeMap<String, BTreeSet<String>>,
}

/// Files of a model, at most.
pub(super) const MAX_FILES: u32 = 200_000;

/// The tensors of each file.
fn by_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, BTreeSet<String>>, D::Error> {
    struct Values;
    impl<'de> Visitor<'de> for Values {
        type Value = BTreeMap<String, BTreeSet<String>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with a file for each tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut files = Self::Value::new();
            while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                files.entry(file).or_default().insert(tensor);
                if files.len() > MAX_FILES as usize {
                    return Err(A::Error::custom(format!("more than {MAX_FILES} files")));
                }
            }
            Ok(files)
        }
    }
    deserializer.deserialize_map(Values)
}

/// The stem of an index's name, and the variant that it is of.
pub(super) fn name_of_index(path: &Path) -> Option<(String, Option<String>)> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let (stem, rest) = name.rsplit_once(INDEX)?;
    let variant = rest.strip_suffix("json")?.strip_suffix('.');
    (rest == "json" || variant.is_some_and(|v| !v.is_empty())).then(|| (stem.to_owned(), variant.map(str::to_owned)))
}

/// The files that an index lists, beside it, with the tensors that each has for the model.
///
/// # Errors
/// [`Error::File`], [`Error::Format`].
pub(super) fn read(index: &Path) -> Result<Vec<(PathBuf, BTreeSet<String>)>, Error> {
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
    names.into_iter().map(|(name, tensors)| Ok((place(name)?, tensors))).collect()
}
