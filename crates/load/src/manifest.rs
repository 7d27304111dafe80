//! Manifests: hashes of every tensor of a model, and of every byte between them, to find and name damage.
//!
//! A [`Manifest`] cuts each file into consecutive regions: the header, the tensors, and the gaps between them. Files
//! are compared with it while they are loaded ([`OpenDevice::load_checked`](crate::OpenDevice::load_checked)), or
//! alone ([`Manifest::verify`]). docs/formats/manifest.md describes the JSON.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use dmalane_queue::Queue;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::blob::{digest, hex, name, verify_names};
use crate::container::{self, CONTAINERS, FormatError, Model, Tensor, lfs_pointer, raw, short};
use crate::difference::{Difference, Problem, RegionKind};
use crate::error::Error;
use crate::fill::{Digest, HashRegions};
use crate::input::Input;
use crate::open_file::OpenFile;

/// The version of the format.
const SCHEMA: u64 = 1;
/// Tells a manifest from other JSON.
const COMMAND: &str = "manifest";
/// The longest manifest that is read, in bytes: more than one of a million tensors has.
pub(crate) const MAX_MANIFEST: u64 = 256 << 20;

/// A region of a file, with its hashes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestRegion {
    /// Its kind.
    pub part: RegionKind,
    /// File offset of its first byte.
    pub start: u64,
    /// File offset behind its last byte.
    pub end: u64,
    /// Its hashes.
    pub digest: Digest,
}

/// A file of a manifest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestFile {
    /// Its name, without a directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The kind of file ("safetensors"), for readers.
    pub format: String,
    /// Its regions, from its first to its last byte without a hole.
    pub regions: Vec<ManifestRegion>,
}

/// Hashes of the files of a model.
///
/// ```
/// use dmalane_load::Manifest;
///
/// let text = r#"{"schema": 1, "command": "manifest", "files": [{"name": "empty.bin", "bytes": 0, "format": "raw",
///     "regions": []}]}"#;
/// assert_eq!(Manifest::parse(text.as_bytes())?.files[0].name, "empty.bin");
/// # Ok::<(), dmalane_load::FormatError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Manifest {
    /// The files, each with another name.
    pub files: Vec<ManifestFile>,
}

impl ManifestFile {
    /// The regions of a file, without their hashes.
    fn of(name: String, model: &Model) -> Self {
        let mut regions: Vec<ManifestRegion> = Vec::new();
        let mut at = 0;
        let mut add = |part, start, end| {
            regions.push(ManifestRegion { part, start, end, digest: Digest { xxh3: 0, sha256: None } });
        };
        for (i, tensor) in model.tensors.iter().enumerate() {
            let start = tensor.at.bits().max(at);
            if start > at {
                add(if i == 0 { RegionKind::Header } else { RegionKind::Gap }, at, start);
            }
            at = start + tensor.len;
            add(RegionKind::Tensor(tensor.clone()), start, at);
        }
        if at < model.len {
            add(if model.tensors.is_empty() { RegionKind::Header } else { RegionKind::Gap }, at, model.len);
        }
        Self { name, bytes: model.len, format: model.container.name.to_owned(), regions }
    }

    /// The file as far as the manifest describes it.
    pub(crate) fn contents(&self) -> Model {
        let tensors = self.regions.iter().filter_map(|region| match &region.part {
            RegionKind::Tensor(tensor) => Some(tensor.clone()),
            RegionKind::Header | RegionKind::Gap => None,
        });
        let container = CONTAINERS.iter().find(|kind| kind.name == self.format).copied().unwrap_or(&raw::CONTAINER);
        Model { len: self.bytes, tensors: tensors.collect(), metadata: None, by_columns: false, container }
    }

    /// Its regions, in a buffer that holds the whole file.
    fn compared(&self) -> Vec<Compared<'_>> {
        self.regions.iter().map(|region| (region.end, Some((self, region)))).collect()
    }

    /// Whether the file has another length than it should.
    fn other_length(&self, found: u64) -> Option<Difference> {
        let expected = self.bytes;
        let problem = match found.cmp(&expected) {
            std::cmp::Ordering::Less => {
                let part = self.regions.iter().find(|region| region.end > found)?.part.clone();
                Problem::Short { expected, found, part }
            }
            std::cmp::Ordering::Equal => return None,
            std::cmp::Ordering::Greater => Problem::Long { expected, found },
        };
        Some(problem.of(&self.name))
    }

    /// The difference between one of its regions and the hashes that it was found to have.
    pub fn differs(&self, region: &ManifestRegion, found: &Digest) -> Option<Difference> {
        let ManifestRegion { part, start, end, digest } = region;
        let changed = || Problem::Changed { part: part.clone(), start: *start, end: *end }.of(&self.name);
        (!digest.agrees(found)).then(changed)
    }
}

impl Manifest {
    /// Hashes files. With `sha256`, those that are named by theirs are [compared with it](verify_names) first: a
    /// manifest of damaged files would call them right. `progress` is called with the number of bytes that have been
    /// read since the last call, and may end the work; it must not panic. Memory: 48 to 144 MiB of buffers, and what
    /// the tensors' names take.
    ///
    /// # Errors
    /// [`Error`]: files that are no models, that cannot be read, that change meanwhile, or that have the same name;
    /// [`Error::Differs`] for a name that is another hash; work that `progress` has ended.
    pub fn of<S: Queue<Addr = FileOffset>>(
        inputs: &mut [Input<S>],
        sha256: bool,
        progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
    ) -> Result<Self, Error> {
        if sha256 {
            refuse(verify_names(inputs, &mut |_| progress(0))?)?;
        }
        let mut manifest = Self::unhashed(inputs.iter().map(|input| &input.source))?;
        let lens: Vec<u64> = manifest.files.iter().map(|file| file.bytes).collect();
        let digests = digest(inputs, &lens, Some(manifest.to_hash(sha256)), progress)?;
        inputs.iter().zip(lens).try_for_each(|(input, len)| input.source.check_size(len))?;
        manifest.set_digests(digests.iter().map(Vec::as_slice));
        Ok(manifest)
    }

    /// The regions of files whose hashes are to be [set](Self::set_digests).
    pub(crate) fn unhashed<'a>(sources: impl IntoIterator<Item = &'a OpenFile>) -> Result<Self, Error> {
        let mut files = Vec::new();
        for source in sources {
            let name = name(&source.path);
            let bad = |defect| Error::Format { path: source.path.clone(), source: bad(defect) };
            check_name(&name).map_err(bad)?;
            if files.iter().any(|file: &ManifestFile| file.name == name) {
                return Err(bad(FormatError::twice("file", &name)));
            }
            files.push(ManifestFile::of(name, source.model()?));
        }
        Ok(Self { files })
    }

    /// All regions, each file in a buffer of its own.
    pub(crate) fn to_hash(&self, sha256: bool) -> Arc<HashRegions> {
        let ends = self.files.iter().map(|file| file.regions.iter().map(|region| region.end).collect());
        Arc::new(HashRegions { ends: ends.collect(), sha256 })
    }

    /// Sets the hashes of all regions, for each file in their order.
    pub(crate) fn set_digests<'a>(&mut self, digests: impl Iterator<Item = &'a [Digest]>) {
        for (file, digests) in self.files.iter_mut().zip(digests) {
            for (region, digest) in file.regions.iter_mut().zip(digests) {
                region.digest = digest.clone();
            }
        }
    }

    /// What the files are, in 64 hexadecimal digits: the SHA-256 of the manifest as JSON, without the SHA-256 of its
    /// regions and with the files in the order of their names.
    pub fn id(&self) -> String {
        let mut plain = self.clone();
        plain.files.sort_by(|a, b| a.name.cmp(&b.name));
        plain.files.iter_mut().flat_map(|file| &mut file.regions).for_each(|region| region.digest.sha256 = None);
        Sha256::digest(plain.to_json()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Hashes files as [`Manifest::of`] does, and returns where they differ, in the order of the files and their bytes.
    /// Files need not be models any more. With `all`, files of the manifest that are not among them are differences.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Read`] for files that cannot be read.
    pub fn verify<S: Queue<Addr = FileOffset>>(
        &self,
        inputs: &mut [Input<S>],
        all: bool,
        progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
    ) -> Result<Vec<Difference>, Error> {
        let mut differences = Vec::new();
        let files = self.matching(inputs.iter().map(|input| &*input.source.path));
        let (mut lens, mut found, mut pointers) = (Vec::new(), Vec::new(), Vec::new());
        for (input, file) in inputs.iter().zip(&files) {
            let len = input.source.size()?;
            let pointer = lfs_pointer(&input.source.path, &*input.source.file()?)?;
            found.push(len);
            // Of a pointer, no byte is one of the file.
            lens.push(file.as_ref().filter(|_| pointer.is_none()).map_or(0, |file| file.bytes.min(len)));
            pointers.push(pointer);
        }
        let compared = whole(&files);
        let digests = digest(inputs, &lens, hash_regions(&compared), progress)?;
        for (i, (input, file)) in inputs.iter().zip(&files).enumerate() {
            let Some(file) = file else {
                differences.push(Problem::Unlisted.of(name(&input.source.path)));
                continue;
            };
            if let Some(size) = pointers[i] {
                differences.push(Problem::LfsPointer(size).of(&file.name));
                continue;
            }
            let hashed = compared[i].iter().take_while(|(end, _)| *end <= lens[i]);
            differences.extend(changed(hashed.zip(&digests[i])));
            differences.extend(file.other_length(found[i]));
        }
        if all {
            differences.extend(self.others(inputs).map(|file| Problem::Missing(None).of(file)));
        }
        Ok(differences)
    }

    /// The names of its files that are not among these.
    pub(crate) fn others<S>(&self, inputs: &[Input<S>]) -> impl Iterator<Item = &str> {
        let names: HashSet<String> = inputs.iter().map(|input| name(&input.source.path)).collect();
        let is_renamed = self.only(inputs.len()).is_some();
        self.files.iter().map(|file| &*file.name).filter(move |name| !is_renamed && !names.contains(*name))
    }

    /// Its only file, if it is compared with a single one: that may have been renamed.
    fn only(&self, files: usize) -> Option<&ManifestFile> {
        self.files.first().filter(|_| self.files.len() == 1 && files == 1)
    }

    /// The files of these names, each of the manifest if it has one of that name. A single file may have been renamed,
    /// and goes by the name that it has now.
    fn matching<'a>(&self, paths: impl ExactSizeIterator<Item = &'a Path>) -> Expected<'_> {
        let only = self.only(paths.len());
        let names: BTreeMap<&str, &ManifestFile> = self.files.iter().map(|file| (&*file.name, file)).collect();
        let find = |name: String| match names.get(&*name) {
            Some(file) => Some(Cow::Borrowed(*file)),
            None => only.map(|file| Cow::Owned(ManifestFile { name, ..file.clone() })),
        };
        paths.map(name).map(find).collect()
    }

    /// The part of the manifest that is about each of these files, which have these lengths; nothing in an empty one.
    ///
    /// # Errors
    /// [`Error::Differs`]: files of other lengths, or of names that the manifest does not have.
    pub(crate) fn expect<'a>(&self, files: impl Iterator<Item = (&'a Path, u64)>) -> Result<Expected<'_>, Error> {
        if self.files.is_empty() {
            return Ok(Vec::new());
        }
        let (paths, found): (Vec<&Path>, Vec<u64>) = files.unzip();
        let matching = self.matching(paths.iter().copied());
        let check = |((path, file), found): ((&&Path, &Option<Cow<'_, ManifestFile>>), u64)| match file {
            Some(file) => file.other_length(found),
            None => Some(Problem::Unlisted.of(name(path))),
        };
        refuse(paths.iter().zip(&matching).zip(found).filter_map(check).collect())?;
        Ok(matching)
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Format`] for a file that is no manifest.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), what: "read it", source };
        Self::read_from(File::open(path).map_err(failed)?, path)
    }

    /// Reads a manifest from a file that is open; `path` is its name in errors.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn read_from(from: impl Read, path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), what: "read it", source };
        let refused = |source| Error::Format { path: path.to_owned(), source };
        let mut text = Vec::new();
        from.take(MAX_MANIFEST + 1).read_to_end(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_MANIFEST {
            return Err(refused(no_manifest(&text, FormatError::too_long(MAX_MANIFEST))));
        }
        Self::parse(&text).map_err(refused)
    }

    /// Parses a manifest.
    ///
    /// # Errors
    /// [`FormatError`]: no JSON, a newer version, regions that leave a hole, overlap or do not end where the
    /// file does, names that occur twice, file names that are paths or that would look like others.
    pub fn parse(text: &[u8]) -> Result<Self, FormatError> {
        let json: JsonManifest = serde_json::from_slice(text).map_err(|e| {
            let newer = serde_json::from_slice::<JsonSchema>(text).is_ok_and(|head| head.schema > SCHEMA);
            let newer = newer.then(|| bad(FormatError::new("it is of a newer version of dmalane")));
            newer.unwrap_or_else(|| no_manifest(text, e.into()))
        })?;
        if json.schema != SCHEMA || json.command != COMMAND {
            let JsonManifest { schema, command, .. } = json;
            let command = short(&command);
            let text = format!("schema {schema} and command {command:?}, not those of a manifest");
            return Err(bad(FormatError::new(text)));
        }
        if json.files.is_empty() {
            return Err(bad(FormatError::no_files()));
        }
        let mut names = HashSet::new();
        let mut files = Vec::new();
        for file in json.files {
            check_name(&file.name).map_err(bad)?;
            if !names.insert(file.name.clone()) {
                return Err(bad(FormatError::twice("file", &file.name)));
            }
            let name = file.name.clone();
            files.push(file.check().map_err(|e| bad(e.within(format_args!("file {name:?}"))))?);
        }
        Ok(Self { files })
    }

    /// The manifest as JSON, a region a line.
    pub fn to_json(&self) -> String {
        let mut text = format!("{{\n  \"schema\": {SCHEMA},\n  \"command\": \"{COMMAND}\",\n  \"files\": [");
        for (i, file) in self.files.iter().enumerate() {
            // Writing to a String cannot fail, and neither can strings and numbers as JSON.
            let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
            let (name, format) = (quoted(&file.name), quoted(&file.format));
            let comma = if i == 0 { "" } else { "," };
            let _ = write!(text, "{comma}\n    {{\n      \"name\": {name},\n      \"bytes\": {},\n", file.bytes);
            let _ = write!(text, "      \"format\": {format},\n      \"regions\": [");
            for (i, region) in file.regions.iter().enumerate() {
                let json = serde_json::to_string(&JsonRegion::from(region)).unwrap_or_default();
                let _ = write!(text, "{}\n        {json}", if i == 0 { "" } else { "," });
            }
            text.push_str("\n      ]\n    }");
        }
        text.push_str("\n  ]\n}\n");
        // What JSON leaves as it is and a terminal obeys.
        let obeyed = |c: char| c != '\n' && (c.is_control() || is_invisible(c));
        match text.contains(obeyed) {
            true => {
                text.chars().map(|c| if obeyed(c) { format!("\\u{:04x}", u32::from(c)) } else { c.into() }).collect()
            }
            false => text,
        }
    }
}

/// The part of a manifest that is about each of some files, as far as it has them.
pub(crate) type Expected<'a> = Vec<Option<Cow<'a, ManifestFile>>>;

/// A range of a buffer that is hashed: where it ends, and the region of a file that it is to be, if any.
pub(crate) type Compared<'a> = (u64, Option<(&'a ManifestFile, &'a ManifestRegion)>);

/// The ranges of buffers that hold whole files.
pub(crate) fn whole<'a>(files: &'a Expected<'_>) -> Vec<Vec<Compared<'a>>> {
    files.iter().map(|file| file.as_ref().map_or(Vec::new(), |file| file.compared())).collect()
}

/// The ranges to hash in each of some buffers; `None` where nothing is expected.
pub(crate) fn hash_regions(buffers: &[Vec<Compared<'_>>]) -> Option<Arc<HashRegions>> {
    let mut regions = buffers.iter().flatten().filter_map(|(_, region)| *region).peekable();
    regions.peek()?;
    let sha256 = regions.any(|(_, region)| region.digest.sha256.is_some());
    let ends = buffers.iter().map(|ranges| ranges.iter().map(|(end, _)| *end).collect());
    Some(Arc::new(HashRegions { ends: ends.collect(), sha256 }))
}

/// Compares the hashes of buffers, for each those of its ranges.
pub(crate) fn check<'d>(
    buffers: &[Vec<Compared<'_>>],
    digests: impl Iterator<Item = &'d [Digest]>,
) -> Result<(), Error> {
    refuse(changed(buffers.iter().zip(digests).flat_map(|(ranges, digests)| ranges.iter().zip(digests))))
}

/// The regions that have other hashes than they should.
fn changed<'a>(hashed: impl Iterator<Item = (&'a Compared<'a>, &'a Digest)>) -> Vec<Difference> {
    hashed.filter_map(|((_, region), found)| region.and_then(|(file, region)| file.differs(region, found))).collect()
}

/// The error of files that differ from their manifest, if they do.
pub(crate) fn refuse(differences: Vec<Difference>) -> Result<(), Error> {
    if differences.is_empty() { Ok(()) } else { Err(Error::Differs { differences }) }
}

/// Refuses names that lead out of the directory of a model, and those that a reader could take for others.
fn check_name(name: &str) -> Result<(), FormatError> {
    let misleading = |c: char| c.is_control() || c == char::REPLACEMENT_CHARACTER || is_invisible(c);
    let plain = !name.is_empty() && name.len() <= 255 && name != "." && name != ".." && !name.contains('/');
    match plain && !name.contains(misleading) {
        true => Ok(()),
        false => {
            let text = format!("{:?} is not a file name that a manifest may have", short(name));
            Err(FormatError::new(text))
        }
    }
}

/// A defect of a manifest.
fn bad(defect: FormatError) -> FormatError {
    defect.within("bad manifest")
}

/// A defect of what was to be a manifest. If it does not begin as one, what it is is said, too.
fn no_manifest(text: &[u8], defect: FormatError) -> FormatError {
    let (head, command) = (&text[..text.len().min(256)], format!("{COMMAND:?}"));
    if head.windows(command.len()).any(|part| part == command.as_bytes()) {
        return bad(defect);
    }
    let what = container::what(head);
    let but = if what.is_empty() { what } else { format!(", but {what}") };
    FormatError::new(format!("this is no manifest{but} ({defect}): `dmalane manifest MODEL` writes one"))
}

/// Characters that change the direction or the look of the text around them.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The version alone.
#[derive(Deserialize)]
struct JsonSchema {
    schema: u64,
}

#[derive(Deserialize)]
struct JsonManifest {
    schema: u64,
    command: String,
    files: Vec<JsonFile>,
}

#[derive(Deserialize)]
struct JsonFile {
    name: String,
    bytes: u64,
    format: String,
    regions: Vec<JsonRegion>,
}

#[derive(Serialize, Deserialize)]
struct JsonRegion {
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shape: Option<Vec<u64>>,
    start: u64,
    end: u64,
    xxh3: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

impl From<&ManifestRegion> for JsonRegion {
    fn from(region: &ManifestRegion) -> Self {
        let tensor = region.part.tensor();
        Self {
            kind: region.part.kind().to_owned(),
            name: tensor.map(|t| t.name.clone()),
            dtype: tensor.map(|t| t.dtype.to_string()),
            shape: tensor.map(|t| t.shape.to_vec()),
            start: region.start,
            end: region.end,
            xxh3: format!("{:016x}", region.digest.xxh3),
            sha256: region.digest.sha256.as_ref().map(|hash| hash.iter().map(|byte| format!("{byte:02x}")).collect()),
        }
    }
}

impl JsonFile {
    fn check(self) -> Result<ManifestFile, FormatError> {
        let Self { name, bytes, format, regions: json } = self;
        if i64::try_from(bytes).is_err() {
            let text = format!("its size, {bytes} bytes, is more than any file has");
            return Err(FormatError::new(text));
        }
        let (mut at, mut regions): (u64, Vec<ManifestRegion>) = (0, Vec::new());
        for (region, json) in json.into_iter().enumerate() {
            let checked = json.check().map_err(|e| e.within(format_args!("region {region}")))?;
            let ManifestRegion { start, end, .. } = checked;
            if start != at || end < start {
                let text = format!(
                    "region {region} is {start}..{end}, and the one before it ends at {at}: regions follow without \
                     holes"
                );
                return Err(FormatError::new(text));
            }
            at = end;
            regions.push(checked);
        }
        let mut names: Vec<&str> = regions.iter().filter_map(|region| region.part.tensor()).map(|t| &*t.name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(FormatError::twice("tensor", twice[0]));
        }
        match at == bytes {
            true => Ok(ManifestFile { name, bytes, format, regions }),
            false => Err(FormatError::new(format_args!("its regions end at {at}, and it has {bytes} bytes"))),
        }
    }
}

impl JsonRegion {
    fn check(self) -> Result<ManifestRegion, FormatError> {
        let Self { kind, name, dtype, shape, start, end, xxh3, sha256 } = self;
        let part = match (&*kind, name) {
            ("header", None) => RegionKind::Header,
            ("gap", None) => RegionKind::Gap,
            ("tensor", Some(name)) => RegionKind::Tensor(Arc::new(Tensor {
                name,
                dtype: dtype.unwrap_or_default().into(),
                shape: shape.unwrap_or_default().into(),
                at: FileOffset::new(start),
                len: end.saturating_sub(start),
            })),
            ("tensor", None) => return Err(FormatError::new("a tensor without a name")),
            ("header" | "gap", Some(_)) => return Err(FormatError::new(format_args!("a {kind} with a name"))),
            _ => {
                let text = format!("kind {:?}, not header, tensor or gap", short(&kind));
                return Err(FormatError::new(text));
            }
        };
        let no_hash = |hash, digits| FormatError::new(format_args!("{hash} is not {digits} hexadecimal digits"));
        let xxh3 = hex::<8>(&xxh3).map(u64::from_be_bytes).ok_or_else(|| no_hash("xxh3", 16))?;
        let sha256 = match sha256.as_deref().map(hex::<32>) {
            Some(None) => return Err(no_hash("sha256", 64)),
            other => other.flatten().map(Box::new),
        };
        Ok(ManifestRegion { part, start, end, digest: Digest { xxh3, sha256 } })
    }
}
