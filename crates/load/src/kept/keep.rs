//! Reads a model into memory that a keeper holds.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dmalane_addr::{PageSize, Span};
use dmalane_device::Placement;
use dmalane_dma::MemfdHeap;
use dmalane_file::{FileOptions, Mode};
use rustix::fs::FlockOperation;

use super::client::{Attached, KeeperClient, Lent, manifest_of, socket_path};
use super::describe::{KeptEntry, KeptModel, KeptPlaces, NOT_SHARED, SCHEMA, Stamp, check_name, sealed_text};
use super::error::KeepError;
use super::on_device::map_onto;
use super::times::{KeptTimes, micros};
use super::wire::KeepRefusal;
use crate::device::{Loaded, OpenDevice};
use crate::difference::Difference;
use crate::error::Error;
use crate::fill::{Digest, Event, FillError, FilledBuf, HashRegions};
use crate::input::open_inputs;
use crate::manifest::{Expected, Manifest, ManifestRegion, refuse};
use crate::model::{HostModel, ModelOptions};
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;
use crate::read::{Read, ReadOptions};
use crate::set::{ModelSet, SetFile};

/// How often a process that waits for another one to keep a model looks for it.
const TURN: Duration = Duration::from_millis(20);
/// How often a model is kept whose place another one takes before it can be attached to.
const TRIES: u32 = 3;
/// How long memory of a device may take to become free, and takes mostly.
const FREED_WITHIN: Duration = Duration::from_secs(2);
const FREED_MOSTLY_WITHIN: Duration = Duration::from_millis(50);
/// How long a keeper that has no room on a device is asked again: models may be let go meanwhile.
const ROOM_WITHIN: Duration = Duration::from_millis(250);
/// Bytes that the texts of a model take beside their names.
const TEXTS: u64 = 64 << 10;

/// How a model is kept.
#[derive(Clone, Default)]
pub struct KeepOptions {
    /// Its name; by default that of its folder, or of its first file.
    pub name: Option<String>,
    /// Lend it to other users, too.
    pub shared: bool,
    /// Hashes that the files must have; without files it is no manifest.
    pub manifest: Manifest,
    /// Past the page cache or through it.
    pub mode: Mode,
    /// The keeper's socket; by default the user's ([`socket_path`]).
    pub socket: Option<PathBuf>,
}

impl KeepOptions {
    fn name_for(&self, paths: &[PathBuf]) -> Result<String, KeepError> {
        let name = self.name.clone().unwrap_or_else(|| name_of(paths));
        let no_name = |why| KeepError::Bad { what: "the name of the model".to_owned(), why };
        check_name(&name).map(|()| name.clone()).map_err(no_name)
    }

    /// A model that was lent, if it is of these files as they are, with the hashes that are wanted, in memory of this
    /// device or of the host.
    fn accept(&self, lent: Lent, device: Option<&str>, files: &[OpenFile]) -> Result<Option<Lent>, Error> {
        let Lent { model, manifest, .. } = &lent;
        let mut is_same = model.device.as_deref() == device && files.len() == model.files.len();
        for (kept, file) in model.files.iter().zip(files) {
            is_same = is_same && kept.from == stamp(file)? && has_same_tensors(kept, file)?;
        }
        if !is_same {
            return Ok(None);
        }
        let lens = model.files.iter().map(|file| (Path::new(&file.name), file.bytes));
        let expected = self.manifest.expect(lens)?;
        if !expected.is_empty() {
            let has_sha256 =
                |mut regions: std::slice::Iter<'_, ManifestRegion>| regions.any(|r| r.digest.sha256.is_some());
            let found = manifest_of(model, manifest)?;
            let is_wanted = expected.iter().flatten().any(|file| has_sha256(file.regions.iter()));
            if is_wanted && !found.files.iter().all(|file| has_sha256(file.regions.iter())) {
                return Ok(None);
            }
            refuse(differences(&expected, &found))?;
        }
        Ok(Some(lent))
    }

    fn keeper(&self) -> Result<KeeperClient, KeepError> {
        KeeperClient::connect(&self.socket.clone().unwrap_or_else(socket_path))
    }
}

/// Reads the files of a model into sealed memory, hashes them, and gives them to a keeper. The room is asked for first.
/// Memory of a `device` is compared with the hashes of the files once they are there ([`KeeperClient::attach_onto`]);
/// where it is full, models that are kept there and to which nobody is attached make room, one of its name first.
/// Returns the model, and the hash of another one of its name, if it takes the place of one.
///
/// # Errors
/// [`Error`]; [`Error::Kept`] where the keeper refuses, where the device cannot lend its memory or has none left, and
/// for models in it that are to be shared.
pub fn keep<P: AsRef<Path>>(
    device: Option<&mut OpenDevice>,
    paths: impl IntoIterator<Item = P>,
    options: &KeepOptions,
    watch: impl FnMut(Event) -> ControlFlow<()> + Send,
) -> Result<(KeptModel, Option<String>), Error> {
    let paths: Vec<PathBuf> = paths.into_iter().map(|path| path.as_ref().to_owned()).collect();
    let (name, files) = (options.name_for(&paths)?, open(&paths)?);
    if options.shared && device.is_some() {
        return Err(KeepError::Bad { what: "--shared".to_owned(), why: NOT_SHARED.to_owned() }.into());
    }
    check_model(&files)?;
    keep_files(&options.keeper()?, name, &files, options, device, watch)
}

/// Attaches to a model that was kept from these files, which have not changed since, or else keeps it first.
///
/// # Errors
/// As of [`keep`], and of [`KeeperClient::attach`].
pub fn attach_or_keep<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
    options: &KeepOptions,
    watch: impl FnMut(Event) -> ControlFlow<()> + Send,
) -> Result<Attached, Error> {
    let wanted = Wanted::new(None, paths, options)?;
    let lent = wanted.lent(&wanted.name)?;
    Ok(Attached::of(lent.map_or_else(|| wanted.keep(None, watch), Ok)?)?)
}

/// As [`attach_or_keep`], in memory of a device, as [`KeeperClient::attach_onto`]; `None` if there is no such model,
/// and it is not to be kept first.
///
/// # Errors
/// As of [`keep`], and of [`KeeperClient::attach_onto`].
pub fn attach_or_keep_on<P: AsRef<Path>>(
    device: &mut OpenDevice,
    paths: impl IntoIterator<Item = P>,
    options: &KeepOptions,
    keep: bool,
    watch: impl FnMut(Event) -> ControlFlow<()> + Send,
) -> Result<Option<Loaded>, Error> {
    let wanted = Wanted::new(Some(device), paths, options)?;
    let lent = match wanted.lent(&wanted.name)? {
        None if keep => Some(wanted.keep(Some(device), watch)?),
        lent => lent,
    };
    lent.map(|lent| map_onto(device, lent, false)).transpose()
}

/// A model that is wanted of a keeper: its name there, its files, and the device in whose memory it is to be.
struct Wanted<'a> {
    name: String,
    keeper: KeeperClient,
    files: Vec<OpenFile>,
    device: Option<String>,
    options: &'a KeepOptions,
}

impl<'a> Wanted<'a> {
    fn new<P: AsRef<Path>>(
        device: Option<&OpenDevice>,
        paths: impl IntoIterator<Item = P>,
        options: &'a KeepOptions,
    ) -> Result<Self, Error> {
        let device = device.map(|device| device.lending().map(|lending| lending.device().to_owned()));
        let device = device.transpose().map_err(cannot_lend)?;
        let paths: Vec<PathBuf> = paths.into_iter().map(|path| path.as_ref().to_owned()).collect();
        let (name, keeper) = (options.name_for(&paths)?, options.keeper()?);
        Ok(Self { name, keeper, files: open(&paths)?, device, options })
    }

    /// The model of this name or hash, if it is that of the files.
    fn lent(&self, called: &str) -> Result<Option<Lent>, Error> {
        match self.keeper.lent(called, self.device.as_deref()) {
            Ok(lent) => self.options.accept(lent, self.device.as_deref(), &self.files),
            Err(KeepError::Refused { kind: KeepRefusal::Absent, .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The model, which is kept now, unless another process does so meanwhile.
    fn keep(
        &self,
        mut device: Option<&mut OpenDevice>,
        mut watch: impl FnMut(Event) -> ControlFlow<()> + Send,
    ) -> Result<Lent, Error> {
        let Self { name, keeper, files, options, .. } = self;
        // One process reads it, of those that begin together; the others then attach. Where a file cannot be locked,
        // each reads it.
        let lock = files.first().map(|file| std::fs::File::open(&file.path)).and_then(Result::ok);
        while lock.as_ref().is_some_and(|file| {
            rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK)
        }) {
            // Who waits may be told to stop, as who reads.
            if watch(Event::Arrived { buffer: 0, offset: 0, len: 0 }).is_break() {
                return Err(FillError::Cancelled { done: 0, of: bytes_of(files) }.into());
            }
            std::thread::sleep(TURN);
        }
        if let Some(lent) = self.lent(name)? {
            return Ok(lent);
        }
        check_model(files)?;
        for _ in 0..TRIES {
            let (model, _) = keep_files(keeper, name.clone(), files, options, device.as_deref_mut(), &mut watch)?;
            // Another model may have its name by now; one of the same hash may leave out other tensors.
            for called in [name, &model.id] {
                if let Some(lent) = self.lent(called)? {
                    return Ok(lent);
                }
            }
        }
        let why = "other models of its name took its place; give it a name of its own".to_owned();
        Err(KeepError::Bad { what: format!("the model {name:?}"), why }.into())
    }
}

/// Whether the same tensors of a file count, whether an index lists them or not.
fn has_same_tensors(kept: &KeptEntry, file: &OpenFile) -> Result<bool, Error> {
    let (kept, listed) = (kept.listed(), file.listed.as_deref());
    if kept.as_ref() == listed {
        return Ok(true);
    }
    let counts = |listed: Option<&BTreeSet<String>>, name: &str| listed.is_none_or(|listed| listed.contains(name));
    let is_same = |name: &str| counts(kept.as_ref(), name) == counts(listed, name);
    Ok(file.model()?.tensors.iter().all(|tensor| is_same(&tensor.name)))
}

fn open(paths: &[PathBuf]) -> Result<Vec<OpenFile>, Error> {
    in_parallel(ModelSet::of(paths)?.files, |file| OpenFile::of(&file))
}

/// Refuses what is no model.
fn check_model(files: &[OpenFile]) -> Result<(), Error> {
    let options = ModelOptions { refuse_raw: true, ..ModelOptions::default() };
    HostModel::of_files(files.to_vec(), options).map(drop)
}

fn bytes_of(files: &[OpenFile]) -> u64 {
    files.iter().filter_map(|file| file.size().ok()).fold(0, u64::saturating_add)
}

fn stamp(file: &OpenFile) -> Result<Stamp, Error> {
    let stamp = file.file().map(|file| Stamp::of(&file))?;
    stamp.map_err(|source| file.error("read its size", source))
}

/// Where files differ from what a manifest expects of each.
fn differences(expected: &Expected<'_>, found: &Manifest) -> Vec<Difference> {
    let mut differences = Vec::new();
    for (expected, found) in expected.iter().zip(&found.files) {
        for region in expected.iter().flat_map(|file| &file.regions) {
            let same = found.regions.iter().find(|of| (of.start, of.end) == (region.start, region.end));
            // Regions that the file does not have differ, too.
            let other = Digest { xxh3: !region.digest.xxh3, sha256: None };
            let digest = same.map_or(&other, |of| &of.digest);
            differences.extend(expected.as_ref().and_then(|file| file.differs(region, digest)));
        }
    }
    differences
}

fn keep_files(
    keeper: &KeeperClient,
    name: String,
    files: &[OpenFile],
    options: &KeepOptions,
    device: Option<&mut OpenDevice>,
    watch: impl FnMut(Event) -> ControlFlow<()> + Send,
) -> Result<(KeptModel, Option<String>), Error> {
    let mut manifest = Manifest::unhashed(files)?;
    let lens = files.iter().map(OpenFile::size).collect::<Result<Vec<_>, _>>()?;
    let expected = options.manifest.expect(files.iter().map(|file| &*file.path).zip(lens.iter().copied()))?;
    // In pages, with the texts beside them.
    let names = files.iter().filter_map(|file| file.listed.as_ref()).flat_map(|names| names.iter());
    let texts = manifest.to_json().len() + names.map(|name| name.len() + 8).sum::<usize>() + files.len() * 1024;
    // Hashes, and places in memory of a device.
    let texts = texts + manifest.files.iter().map(|file| file.regions.len()).sum::<usize>() * 128;
    // Memory of a device is not the keeper's.
    let in_memory = if device.is_none() { &lens[..] } else { &[] };
    let bytes = in_memory.iter().fold((texts as u64).saturating_add(TEXTS), |sum, len| {
        sum.saturating_add(len.checked_next_multiple_of(4096).unwrap_or(u64::MAX))
    });
    keeper.room(bytes, device.is_some())?;
    let sha256 = expected.iter().flatten().flat_map(|file| &file.regions).any(|r| r.digest.sha256.is_some());
    let regions = manifest.to_hash(sha256);
    let before = files.iter().map(stamp).collect::<Result<Vec<_>, _>>()?;
    let begun = Instant::now();
    let Memory { device, fds: memory, places, mut took } = match device {
        None => into_memory(files, options.mode, regions, &mut manifest, watch)?,
        Some(device) => onto_device(device, (keeper, &name), (files, options.mode), regions, &mut manifest, watch)?,
    };
    took.all = micros(begun.elapsed());
    for (file, before) in files.iter().zip(&before) {
        let now = stamp(file)?;
        if now != *before {
            return Err(Error::Changed { path: file.path.clone(), before: before.len, now: now.len });
        }
    }
    let differences = differences(&expected, &manifest);
    drop(expected);
    refuse(differences)?;
    let system = |what| move |source| KeepError::System { what, source };
    let entry = |(((file, from), bytes), placed): (((&OpenFile, Stamp), &u64), _)| KeptEntry {
        name: crate::blob::name(&file.path),
        bytes: *bytes,
        listed: file.listed.as_ref().map(|names| names.iter().cloned().collect()),
        from,
        placed,
    };
    let files = files.iter().zip(before).zip(&lens).zip(places).map(entry).collect();
    let model = KeptModel { schema: SCHEMA, name, id: manifest.id(), shared: options.shared, device, took, files };
    let text = serde_json::to_vec(&model).map_err(|e| system("describe it")(e.into()))?;
    let mut fds = Vec::new();
    for text in [&text[..], manifest.to_json().as_bytes()] {
        fds.push(sealed_text("dmalane-kept", text).map_err(system("describe it"))?);
    }
    fds.extend(memory);
    let replaced = keeper.keep(&fds)?;
    Ok((model, replaced))
}

/// Memory of files: of which device, its descriptors, where the tensors of each file are in it, and what it took.
struct Memory {
    device: Option<String>,
    fds: Vec<OwnedFd>,
    places: Vec<Option<KeptPlaces>>,
    took: KeptTimes,
}

/// Reads files into sealed memory of the host, with the hashes of their regions.
fn into_memory(
    files: &[OpenFile],
    mode: Mode,
    regions: Arc<HashRegions>,
    manifest: &mut Manifest,
    watch: impl FnMut(Event) -> ControlFlow<()> + Send,
) -> Result<Memory, Error> {
    let mut options = ReadOptions { mode, ..ReadOptions::default() };
    options.fill.hash_regions = Some(regions);
    let sources = files.to_vec();
    let read = Read::sources(sources).options(options).watch(watch).into_memory(&MemfdHeap::importable(None))?;
    let took = KeptTimes::of(&read.filled.report.stages);
    manifest.set_digests(read.filled.buffers.iter().map(FilledBuf::digests));
    let sealed = read.filled.buffers.into_iter().map(|buffer| buffer.into_shared().seal());
    let fds =
        sealed.collect::<Result<_, _>>().map_err(|source| KeepError::System { what: "seal its memory", source })?;
    Ok(Memory { device: None, fds, places: vec![None; files.len()], took })
}

/// Loads files into memory of a device that is lent, with the hashes of their regions, and compares what is there with
/// them.
fn onto_device(
    device: &mut OpenDevice,
    keeper: (&KeeperClient, &str),
    (files, mode): (&[OpenFile], Mode),
    regions: Arc<HashRegions>,
    manifest: &mut Manifest,
    mut watch: impl FnMut(Event) -> ControlFlow<()> + Send,
) -> Result<Memory, Error> {
    let lending = device.lending().map_err(cannot_lend)?;
    for file in files {
        if file.model()?.by_columns {
            let why = "its array is stored by columns, which no device has".to_owned();
            return Err(KeepError::Bad { what: file.path.display().to_string(), why }.into());
        }
    }
    let mut inputs = open_inputs(files.to_vec(), FileOptions::for_mode(mode))?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut progress = |len| {
        if watch(Event::Arrived { buffer: 0, offset: 0, len }).is_break() {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let stopped_before = device.stop.replace(stop.clone());
    let hashed_before = device.options.fill.hash_regions.replace(regions);
    let mut load = |device: &mut OpenDevice, had_less| {
        make_room(keeper, lending.device(), device, files, had_less)?;
        lending.allow(true);
        let loaded = device.load(&mut inputs, &Placement::Default, &mut progress);
        lending.allow(false);
        loaded
    };
    let loaded = match load(device, false) {
        // Other programs use the device, too.
        Err(Error::DeviceMemory { path, source }) if source.is_full() => match load(device, true) {
            Err(Error::Kept(KeepError::Refused { kind: KeepRefusal::Room, .. })) => {
                Err(Error::DeviceMemory { path, source })
            }
            loaded => loaded,
        },
        loaded => loaded,
    };
    (device.stop, device.options.fill.hash_regions) = (stopped_before, hashed_before);
    let loaded = loaded.map_err(|error| match error {
        Error::DeviceMemory { .. } => {
            KeepError::Device { what: "keep it in memory of the device", source: Box::new(error) }.into()
        }
        other => other,
    })?;
    manifest.set_digests(loaded.files.iter().map(|file| &*file.digests));
    let memory = lend(device, &loaded, manifest);
    // What was lent lives on; the device unmaps it here.
    device.unload(loaded)?;
    memory
}

/// Has models that are kept in memory of the device make room there for files, where that is full: at least a page of
/// the device's where the driver had less than it said.
fn make_room(
    (keeper, name): (&KeeperClient, &str),
    gpu: &str,
    device: &mut OpenDevice,
    files: &[OpenFile],
    had_less: bool,
) -> Result<(), Error> {
    let granule = device.regions().first().map_or(PageSize::SIZE_4K, |region| region.granule);
    let mut wanted = 0_u64;
    for file in files {
        let bytes = device.layout(file.model()?).and_then(|layout| granule.round_up(layout.bo_len));
        wanted = wanted.saturating_add(bytes.unwrap_or(u64::MAX));
    }
    if had_less {
        wanted = wanted.max(device.memory().free_bytes()).saturating_add(granule.bytes());
    }
    let (begun, mut asked) = (Instant::now(), None::<Instant>);
    while asked.is_none_or(|at| at.elapsed() < FREED_WITHIN) {
        let missing = wanted.saturating_sub(device.memory().free_bytes());
        if missing == 0 {
            break;
        }
        // What was let go just now may not be free yet.
        if asked.is_none() && begun.elapsed() > FREED_MOSTLY_WITHIN {
            match keeper.room_on(gpu, missing, name) {
                Err(KeepError::Refused { kind: KeepRefusal::Room, .. }) if begun.elapsed() < ROOM_WITHIN => {}
                answer => asked = answer.map(|()| Some(Instant::now()))?,
            }
        }
        std::thread::sleep(TURN);
    }
    // Where it is not free by now, the driver says how much is.
    Ok(())
}

/// Lends the memory of files that have the right bytes.
fn lend(device: &mut OpenDevice, loaded: &Loaded, manifest: &Manifest) -> Result<Memory, Error> {
    if let Some(first) = device.differences(loaded, manifest)?.first() {
        let (what, why) = ("the bytes that the device gave back".to_owned(), first.to_string());
        return Err(KeepError::Bad { what, why }.into());
    }
    let lending = device.lending().map_err(cannot_lend)?;
    let took = KeptTimes::of(&loaded.report.stages);
    let name = lending.device().to_owned();
    let mut memory = Memory { device: Some(name), fds: Vec::new(), places: Vec::new(), took };
    for file in &loaded.files {
        let segments = file.bo.iter().flat_map(|bo| bo.sg().segments());
        let spans: Vec<_> = segments.filter_map(|segment| Span::new(segment.addr, segment.len)).collect();
        if spans.len() > 1 {
            return Err(cannot_lend("a file lies in several pieces of it".into()).into());
        }
        let mut pieces = Vec::new();
        for span in &spans {
            for (fd, len) in lending.lend(*span).map_err(cannot_lend)? {
                memory.fds.push(fd);
                pieces.push(len);
            }
        }
        let bytes = spans.iter().map(Span::len).sum();
        let pieces = if pieces.len() > 1 { pieces } else { Vec::new() };
        let offsets = file.layout.places.iter().map(|place| place.bo_offset).collect();
        memory.places.push(Some(KeptPlaces { bytes, pieces, offsets }));
    }
    Ok(memory)
}

fn cannot_lend(source: Box<dyn std::error::Error + Send + Sync>) -> KeepError {
    KeepError::Device { what: "lend memory of the device", source }
}

/// Compares the bytes of a kept model with its manifest, and that with its hash.
///
/// # Errors
/// [`Error::Differs`]; [`Error::Kept`] where it is no kept model.
pub fn check(fds: Vec<OwnedFd>) -> Result<(), Error> {
    Attached::new(fds)?.check(&mut |_| ControlFlow::Continue(()))
}

impl Attached {
    /// Compares its bytes with its manifest, and that with its hash. `progress` is called with the number of bytes
    /// since the last call, and can end it.
    ///
    /// # Errors
    /// As of [`check`]; [`FillError::Cancelled`].
    pub fn check(&self, progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send)) -> Result<(), Error> {
        let open = |file: &SetFile| OpenFile::of(file)?.into_input(FileOptions::default());
        let mut inputs = self.files().iter().map(open).collect::<Result<Vec<_>, _>>()?;
        refuse(self.manifest()?.verify(&mut inputs, true, progress)?)
    }
}

/// The name of a model that has none: of a model in the local cache of Hugging Face's libraries its own, else that of
/// its folder, or of its file where that has one of its own. Other characters are replaced.
fn name_of(paths: &[PathBuf]) -> String {
    let Some(first) = paths.first() else { return String::new() };
    let path = std::path::absolute(first).unwrap_or_else(|_| first.clone());
    let named = |path: Option<&Path>| path.and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
    let folder = if path.is_dir() { Some(&*path) } else { path.parent() };
    let revisions = folder.and_then(Path::parent);
    let cached = named(revisions.and_then(Path::parent));
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let text = match cached.strip_prefix("models--").filter(|_| named(revisions) == "snapshots") {
        Some(name) => name.replace("--", "/"),
        None if !path.exists() && paths.len() == 1 => first.to_string_lossy().into_owned(),
        None if path.is_dir() || paths.len() > 1 || stem == "model" || stem.starts_with("model.") => named(folder),
        None => stem.into_owned(),
    };
    text.chars().map(|c| if c.is_ascii_alphanumeric() || "._-/".contains(c) { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_a_name_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        std::fs::create_dir_all(at("hub/models--org--it/snapshots/0f3a")).unwrap();
        std::fs::create_dir(at("my llama")).unwrap();
        for file in ["hub/models--org--it/snapshots/0f3a/model.safetensors", "my llama/model.safetensors", "q4.gguf"] {
            std::fs::write(at(file), "").unwrap();
        }
        for (paths, name) in [
            (&["hub/models--org--it/snapshots/0f3a"][..], "org/it"),
            (&["hub/models--org--it/snapshots/0f3a/model.safetensors"], "org/it"),
            (&["my llama"], "my-llama"),
            (&["my llama/model.safetensors"], "my-llama"),
            (&["my llama/a.safetensors", "my llama/b.safetensors"], "my-llama"),
            (&["q4.gguf"], "q4"),
        ] {
            assert_eq!(name_of(&paths.iter().map(|path| at(path)).collect::<Vec<_>>()), name, "{paths:?}");
        }
        // Not a path, but a name in that cache.
        assert_eq!(name_of(&["org/it".into()]), "org/it");
        assert_eq!(name_of(&[]), "");
    }
}
