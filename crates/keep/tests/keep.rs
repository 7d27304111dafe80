//! A keeper and its clients, in one process.

use std::fs::File;
use std::io::Write;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dmalane_dma::{error_chain, receive_with_fds, send_with_fds};
use dmalane_keep::{Holder, Keeper, KeeperConfig, Listener, Store, hold};
use dmalane_load::fill::FillError;
use dmalane_load::kept::wire::{KeepRefusal, KeeperAnswer, Message};
use dmalane_load::kept::{self, KeepError, KeepOptions, KeptEntry, KeptModel, KeptPlaces, Stamp};
use dmalane_load::{Error, HostModel, Manifest, ModelOptions, OpenFile, write_sample};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};

/// A keeper of this process, which ends with it.
struct Served {
    folder: tempfile::TempDir,
    stop: Option<UnixStream>,
    keeper: Option<JoinHandle<std::io::Result<()>>>,
    log: Arc<Mutex<Vec<String>>>,
}

impl Served {
    fn new(config: KeeperConfig) -> Self {
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = log.clone();
        Self::with(Keeper::new(config, move |line: &str| lines.lock().unwrap().push(line.to_owned())), log)
    }

    fn with(keeper: Keeper, log: Arc<Mutex<Vec<String>>>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("socket"), 0o600, true).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let keeper = std::thread::spawn(move || keeper.run(listener, stopped.as_fd()));
        Self { folder, stop: Some(stop), keeper: Some(keeper), log }
    }

    fn of_bytes(memory: u64) -> Self {
        Self::new(KeeperConfig { memory, ..KeeperConfig::default() })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn client(&self) -> kept::KeeperClient {
        kept::KeeperClient::connect(&self.socket()).unwrap()
    }

    /// A sample of some bytes.
    fn sample(&self, name: &str, bytes: u64, seed: u64) -> PathBuf {
        let path = self.folder.path().join(format!("{name}.safetensors"));
        write_sample(&mut File::create(&path).unwrap(), bytes, seed).unwrap();
        path
    }

    fn keep(&self, path: &Path, more: KeepOptions) -> Result<KeptModel, Error> {
        let options = KeepOptions { socket: Some(self.socket()), ..more };
        kept::keep(None, [path], &options, |_| ControlFlow::Continue(())).map(|(model, _)| model)
    }

    fn names(&self) -> Vec<String> {
        self.client().list().unwrap().models.into_iter().map(|model| model.name).collect()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.keeper.take().unwrap().join().unwrap().unwrap();
    }
}

fn open(client: &kept::KeeperClient, name: &str, options: ModelOptions) -> HostModel {
    let files = client.attach(name).unwrap().into_files();
    HostModel::of_files(files.iter().map(|file| OpenFile::of(file).unwrap()), options).unwrap()
}

fn watch(_: dmalane_load::fill::Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn who_attaches_has_the_tensors_without_reading_them() {
    let served = Served::of_bytes(1 << 30);
    let path = served.sample("m", 4 << 20, 1);
    let model = served.keep(&path, KeepOptions::default()).unwrap();
    assert_eq!((&*model.name, model.files.len()), ("m", 1));
    let read = HostModel::open([&path], ModelOptions::default()).unwrap();
    // No memory is charged, however little there may be.
    let limit = ModelOptions { memory_limit: Some(64 << 10), ..ModelOptions::default() };
    let lent = open(&served.client(), "m", limit);
    let all = lent.read_all(None, &mut watch).unwrap();
    for tensor in &all {
        let name = &tensor.tensor.name;
        assert_eq!(tensor.to_vec(), read.read(name, &mut watch).unwrap().to_vec(), "{name}");
        let again = lent.read(name, &mut watch).unwrap();
        let at = |of: &dmalane_load::HostTensor| of.as_volatile_slice().as_ptr();
        assert_eq!(at(&again) == at(tensor), tensor.block.is_kept(), "{name}: the same memory");
        assert!(tensor.block.is_kept() || tensor.len < 1024, "{name}");
    }
    assert!(lent.memory().0 <= 4096, "only what lies badly is copied");
    // Also one after the other, and in slices that lie together.
    assert_eq!(
        lent.stream(None).unwrap().map(|tensor| tensor.unwrap().len).sum::<usize>(),
        all.iter().map(|t| t.len).sum::<usize>()
    );
    let first = all.iter().find(|tensor| tensor.shape.len() == 2 && tensor.len > 1024).unwrap();
    let (name, bytes) = (&first.tensor.name, first.len as u64 / first.shape[1]);
    let part = lent.slice(name, &[0..1, 2..10], vec![8], &mut watch).unwrap();
    let at = first.as_volatile_slice().as_ptr().wrapping_add(2 * bytes as usize);
    assert_eq!((part.as_volatile_slice().as_ptr(), part.len as u64), (at, 8 * bytes));
}

#[test]
fn tensors_that_lie_badly_are_copied() {
    let served = Served::of_bytes(1 << 30);
    let path = served.folder.path().join("odd.safetensors");
    // The header has an odd length, so no F32 lies at a multiple of 4.
    let mut header = br#"{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.to_vec();
    header.resize(header.len() + (9 - header.len() % 8), b' ');
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.write_all(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    served.keep(&path, KeepOptions::default()).unwrap();
    let tensor = open(&served.client(), "odd", ModelOptions::default()).read("t", &mut watch).unwrap();
    assert_eq!(tensor.to_vec(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(tensor.as_volatile_slice().as_ptr().addr().is_multiple_of(4));
    assert!(!tensor.block.is_kept());
}

#[test]
fn a_hash_names_it_and_its_manifest_is_right() {
    let served = Served::of_bytes(1 << 30);
    let path = served.sample("a", 1 << 20, 1);
    let model = served.keep(&path, KeepOptions::default()).unwrap();
    let mut inputs = [dmalane_load::open_file(&path, Default::default()).unwrap()];
    let manifest = Manifest::of(&mut inputs, true, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(manifest.id(), model.id, "with or without SHA-256");
    let lent = served.client().attach(&model.id[..8]).unwrap();
    assert_eq!(lent.manifest().unwrap().id(), model.id);
    assert!(matches!(
        served.client().attach(&model.id[..7]),
        Err(KeepError::Refused { kind: KeepRefusal::Absent, .. })
    ));
    // A manifest of other bytes keeps nothing.
    let other = served.sample("b", 1 << 20, 2);
    std::fs::rename(&other, served.folder.path().join("a.safetensors")).unwrap();
    let wrong = served
        .keep(&path, KeepOptions { manifest: manifest.clone(), name: Some("w".into()), ..KeepOptions::default() });
    assert!(matches!(wrong, Err(Error::Differs { .. })), "{wrong:?}");
    assert_eq!(served.names(), ["a"]);
    // Nor does what is no model, or has no name.
    let junk = served.folder.path().join("junk.safetensors");
    std::fs::write(&junk, b"no header").unwrap();
    assert!(served.keep(&junk, KeepOptions::default()).is_err());
    for name in ["", "a b", "a:b", "ä"] {
        assert!(
            served.keep(&path, KeepOptions { name: Some(name.into()), ..KeepOptions::default() }).is_err(),
            "{name}"
        );
    }
}

#[test]
fn who_is_attached_keeps_it_and_others_make_room() {
    let served = Served::of_bytes(7 << 20);
    let models: Vec<PathBuf> = ["a", "b", "c", "d"].map(|name| served.sample(name, 2 << 20, 1)).into();
    for path in &models[..3] {
        served.keep(path, KeepOptions::default()).unwrap();
    }
    assert_eq!(served.names(), ["a", "b", "c"]);
    let tensors = open(&served.client(), "a", ModelOptions::default()).read_all(None, &mut watch).unwrap();
    // The oldest one is in use by its mapping alone; the next oldest goes.
    served.keep(&models[3], KeepOptions::default()).unwrap();
    assert_eq!(served.names(), ["a", "c", "d"]);
    let list = served.client().list().unwrap();
    assert_eq!((list.evicted, list.models[0].attached, list.models[1].attached), (1, true, false));
    let bytes: Vec<Vec<u8>> = tensors.iter().map(dmalane_load::HostTensor::to_vec).collect();
    served.client().drop_model("a").unwrap();
    assert!(tensors.iter().zip(&bytes).all(|(tensor, bytes)| tensor.to_vec() == *bytes), "it is still there");
    // Nothing makes room for what can never fit.
    let big = served.sample("big", 8 << 20, 1);
    let error = served.keep(&big, KeepOptions::default()).unwrap_err();
    assert!(error.to_string().contains("do not fit"), "{error}");
    assert_eq!(served.names(), ["c", "d"]);
    // Nor while all are in use.
    let _held = ["c", "d"].map(|name| served.client().attach(name).unwrap());
    let six = served.sample("six", 6 << 20, 1);
    assert!(served.keep(&six, KeepOptions::default()).is_err());
    assert_eq!(served.names(), ["c", "d"]);
}

#[test]
fn what_was_dropped_counts_until_nobody_uses_it() {
    let served = Served::of_bytes(5 << 20);
    let path = served.sample("a", 2 << 20, 1);
    let mut held = Vec::new();
    for _ in 0..2 {
        served.keep(&path, KeepOptions::default()).unwrap();
        held.push(open(&served.client(), "a", ModelOptions::default()).read_all(None, &mut watch).unwrap());
        served.client().drop_model("a").unwrap();
    }
    assert!(served.client().list().unwrap().used > 4 << 20);
    let refused = served.keep(&path, KeepOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("do not fit"), "{refused}");
    drop(held);
    served.keep(&path, KeepOptions::default()).unwrap();
}

#[test]
fn models_of_one_name_are_told_apart_by_their_files() {
    let served = Served::of_bytes(64 << 20);
    let paths = ["a", "b"].map(|name| {
        std::fs::create_dir(served.folder.path().join(name)).unwrap();
        let path = served.folder.path().join(name).join("fp16.safetensors");
        write_sample(&mut File::create(&path).unwrap(), 1 << 20, name.len() as u64 + u64::from(name == "a")).unwrap();
        path
    });
    let ids = paths.clone().map(|path| served.keep(&path, KeepOptions::default()).unwrap().id);
    assert_ne!(ids[0], ids[1]);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (served, path, id) = (&served, &paths[n % 2], &ids[n % 2]);
            scope.spawn(move || {
                for _ in 0..20 {
                    let options = KeepOptions { socket: Some(served.socket()), ..KeepOptions::default() };
                    match kept::attach_or_keep([path], &options, |_| ControlFlow::Continue(())) {
                        Ok(lent) => assert_eq!(&lent.model.id, id),
                        // The other one has taken its place between two messages, or each time that it was kept.
                        Err(Error::Kept(KeepError::Refused { kind: KeepRefusal::Absent, .. })) => {}
                        Err(error) if error_chain(&error).contains("other models of its name took its place") => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    // An index that leaves tensors out is another model.
    let folder = served.folder.path().join("indexed");
    std::fs::create_dir(&folder).unwrap();
    std::fs::rename(&paths[0], folder.join("m.safetensors")).unwrap();
    let index = folder.join("m.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map":{"empty":"m.safetensors"}}"#).unwrap();
    let options =
        || KeepOptions { socket: Some(served.socket()), name: Some("i".to_owned()), ..KeepOptions::default() };
    for (path, tensors) in [(index, 1), (folder.join("m.safetensors"), 5)] {
        let lent = kept::attach_or_keep([&path], &options(), |_| ControlFlow::Continue(())).unwrap();
        let files = lent.files().iter().map(|file| OpenFile::of(file).unwrap());
        assert_eq!(HostModel::of_files(files, ModelOptions::default()).unwrap().tensors().count(), tensors);
    }
    // Also under names of their own, beside each other: their hash is the same.
    let named = |name: &str| KeepOptions { name: Some(name.to_owned()), ..options() };
    for (name, path, tensors) in [("x", "m.safetensors.index.json", 1), ("y", "m.safetensors", 5)] {
        let lent = kept::attach_or_keep([folder.join(path)], &named(name), |_| ControlFlow::Continue(())).unwrap();
        let files = lent.files().iter().map(|file| OpenFile::of(file).unwrap());
        assert_eq!(HostModel::of_files(files, ModelOptions::default()).unwrap().tensors().count(), tensors);
    }
}

#[test]
fn who_waits_for_another_process_to_read_it_can_stop() {
    let served = Served::of_bytes(64 << 20);
    let path = served.sample("m", 1 << 20, 1);
    let reading = File::open(&path).unwrap();
    rustix::fs::flock(&reading, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let options = KeepOptions { socket: Some(served.socket()), ..KeepOptions::default() };
    let mut asked = 0;
    let stopped = kept::attach_or_keep([&path], &options, |_| {
        asked += 1;
        if asked < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert!(matches!(stopped, Err(Error::Fill(dmalane_load::fill::FillError::Cancelled { .. }))), "{stopped:?}");
    assert_eq!(served.names(), [""; 0]);
    drop(reading);
    kept::attach_or_keep([&path], &options, |_| ControlFlow::Continue(())).unwrap();
}

#[test]
fn a_new_model_takes_the_place_of_its_name() {
    let served = Served::of_bytes(1 << 30);
    let named = || KeepOptions { name: Some("m".to_owned()), ..KeepOptions::default() };
    let first = served.keep(&served.sample("a", 1 << 20, 1), named()).unwrap();
    let before = served.client().attach("m").unwrap();
    let second = served.keep(&served.sample("b", 1 << 20, 2), named()).unwrap();
    assert_ne!(first.id, second.id);
    assert_eq!(served.client().attach("m").unwrap().model.id, second.id);
    assert_eq!((before.model.id.clone(), before.manifest().unwrap().id()), (first.id.clone(), first.id));
    assert_eq!(served.names(), ["m"]);
}

/// A model as its owner describes it, with sealed memory of some bytes.
fn described(model: &KeptModel, manifest: &[u8], files: &[&[u8]]) -> Vec<OwnedFd> {
    let texts = [serde_json::to_vec(model).unwrap(), manifest.to_vec()];
    let mut fds: Vec<OwnedFd> = texts.iter().map(|text| kept::sealed_text("text", text).unwrap()).collect();
    for bytes in files {
        let mut file = bytes.to_vec();
        file.resize(file.len().next_multiple_of(4096), 0);
        fds.push(kept::sealed_text("file", &file).unwrap());
    }
    fds
}

#[test]
fn what_is_shared_is_hashed_first() {
    let served = Served::of_bytes(1 << 30);
    let path = served.sample("s", 1 << 20, 1);
    let right = served.keep(&path, KeepOptions { shared: true, ..KeepOptions::default() }).unwrap();
    served.client().attach("s").unwrap();
    // The same manifest over other bytes.
    let mut inputs = [dmalane_load::open_file(&path, Default::default()).unwrap()];
    let manifest = Manifest::of(&mut inputs, false, &mut |_| ControlFlow::Continue(())).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let wrong = KeptModel { name: "wrong".to_owned(), ..right.clone() };
    let start = Instant::now();
    served.client().keep(&described(&wrong, manifest.to_json().as_bytes(), &[&bytes])).unwrap();
    // Its owner has it at once; the keeper finds out soon.
    while served.names().contains(&"wrong".to_owned()) {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    assert!(served.log.lock().unwrap().iter().any(|line| line.contains("\"wrong\"") && line.contains("goes")));
    // And another manifest under the same hash.
    let mut edited = manifest.clone();
    edited.files[0].regions[0].digest.xxh3 ^= 1;
    let wrong = KeptModel { name: "edited".to_owned(), ..right };
    served.client().keep(&described(&wrong, edited.to_json().as_bytes(), &[&std::fs::read(&path).unwrap()])).unwrap();
    while served.names().contains(&"edited".to_owned()) {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn an_owner_may_say_whose_its_model_is() {
    let served = Served::of_bytes(1 << 30);
    served.keep(&served.sample("own", 1 << 20, 1), KeepOptions::default()).unwrap();
    let client = served.client();
    let row = &client.list().unwrap().models[0];
    assert!(!row.shared);
    client.attach(&format!("{}:own", row.user)).unwrap();
    // Of another user there is none.
    assert!(client.attach(&format!("{}:own", row.user ^ 1)).is_err());
}

/// A socket to the keeper that speaks no protocol.
fn raw(served: &Served) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(served.socket()).unwrap()).unwrap();
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(Duration::from_secs(60)),
    )
    .unwrap();
    socket
}

/// The descriptors that a keeper lends, without a client's mappings.
fn lent(served: &Served, name: &str) -> Vec<OwnedFd> {
    let (socket, mut text) = (raw(served), [0; 8192]);
    let ask = format!(r#"{{"version":1,"ask":"attach","name":"{name}","from":0}}"#);
    send_with_fds(&socket, ask.as_bytes(), &[], SendFlags::empty()).unwrap();
    receive_with_fds(&socket, &mut text, RecvFlags::CMSG_CLOEXEC).unwrap().fds
}

/// The keeper's answer; `None` at the end of the connection.
fn answered(socket: &OwnedFd) -> Option<KeeperAnswer> {
    let mut text = [0; 8192];
    let got = receive_with_fds(socket, &mut text, RecvFlags::empty()).ok()?;
    (got.len > 0).then(|| serde_json::from_slice::<Message<KeeperAnswer>>(&text[..got.len]).unwrap().body)
}

#[test]
fn hostile_clients_are_refused_and_change_nothing() {
    let served = Served::of_bytes(64 << 20);
    let path = served.sample("m", 1 << 20, 1);
    let model = served.keep(&path, KeepOptions::default()).unwrap();
    let say = |text: &[u8], fds: &[OwnedFd]| {
        let socket = raw(&served);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        send_with_fds(&socket, text, &fds, SendFlags::empty()).unwrap();
        answered(&socket)
    };
    let is_bad =
        |answer: Option<KeeperAnswer>| matches!(answer, Some(KeeperAnswer::Refused { kind: KeepRefusal::Bad, .. }));
    for text in ["x", "{}", r#"{"version":1}"#, r#"{"version":1,"ask":"other"}"#, r#"{"version":2,"ask":"list"}"#] {
        assert!(is_bad(say(text.as_bytes(), &[])), "{text}");
    }
    assert!(is_bad(say(&[b'x'; 8000], &[])));
    let keep = br#"{"version":1,"ask":"keep","more":false}"#;
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 4096).unwrap();
    let short = KeptModel { name: "x".to_owned(), ..model.clone() };
    let none = KeptModel { files: Vec::new(), ..short.clone() };
    let path_in_name = KeptModel { name: "../x y".to_owned(), ..model.clone() };
    for (what, fds) in [
        ("nothing", vec![]),
        ("a pipe", vec![pipe]),
        ("memory that is not sealed", vec![open]),
        ("no JSON", vec![kept::sealed_text("t", b"{").unwrap()]),
        ("a file too few", described(&short, b"", &[])),
        ("a file too many", described(&short, b"", &[b"1", b"2"])),
        ("no files", described(&none, b"", &[])),
        ("a bad name", described(&path_in_name, b"", &[b"1"])),
    ] {
        assert!(is_bad(say(keep, &fds)), "{what}");
    }
    // A model that is beyond the limit, and room for one.
    let huge = rustix::fs::memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&huge, 1 << 40).unwrap();
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&huge, seals).unwrap();
    let mut fds = described(&short, b"", &[]);
    fds.push(huge);
    let refused = say(keep, &fds);
    assert!(matches!(refused, Some(KeeperAnswer::Refused { kind: KeepRefusal::Room, .. })), "{refused:?}");
    for bytes in [65 << 20, u64::MAX] {
        let refused = say(format!(r#"{{"version":1,"ask":"room","bytes":{bytes}}}"#).as_bytes(), &[]);
        assert!(matches!(refused, Some(KeeperAnswer::Refused { kind: KeepRefusal::Room, .. })), "{refused:?}");
    }
    // Room is promised for as long as the connection lasts.
    let first = served.client();
    first.room(60 << 20, false).unwrap();
    assert!(served.client().room(10 << 20, false).is_err());
    drop(first);
    let start = Instant::now();
    while served.client().room(10 << 20, false).is_err() {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    // Who never reads is not waited for, and who attaches meanwhile is served.
    let silent = raw(&served);
    while rustix::net::send(&silent, br#"{"version":1,"ask":"list"}"#, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        .is_ok()
    {}
    let start = Instant::now();
    assert_eq!(served.client().attach("m").unwrap().model, model);
    assert!(start.elapsed() < Duration::from_secs(2));
    // Who has it may lock it for itself, which keeps nobody from it.
    let lent = served.client().attach("m").unwrap();
    let file = OpenFile::of(&lent.files()[0]).unwrap().file().unwrap();
    rustix::fs::flock(&*file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    served.client().attach("m").unwrap();
    drop((lent, file));
    // Many who connect and say nothing.
    let idle: Vec<OwnedFd> = (0..100).map(|_| raw(&served)).collect();
    assert_eq!(served.names(), ["m"]);
    drop(idle);
}

#[test]
fn no_hostile_client_delays_others_for_long() {
    let served = Served::of_bytes(64 << 20);
    let path = served.sample("m", 1 << 20, 1);
    served.keep(&path, KeepOptions::default()).unwrap();
    let expected = open(&served.client(), "m", ModelOptions::default()).read_all(None, &mut watch).unwrap();
    let expected: Vec<u8> = expected.iter().flat_map(|tensor| tensor.to_vec()).collect();
    // On what is lent, and opened anew for writing.
    let refused = |change: &dyn Fn(BorrowedFd<'_>) -> rustix::io::Result<()>| {
        for fd in lent(&served, "m") {
            assert!(change(fd.as_fd()).is_err());
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
            if let Ok(anew) = File::options().read(true).write(true).open(path) {
                assert!(change(anew.as_fd()).is_err());
            }
        }
    };
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    let flood = |text: &[u8], fds: usize| {
        let (socket, fds) = (raw(&served), vec![pipe.as_fd(); fds]);
        for _ in 0..8 {
            let _ = send_with_fds(&socket, text, &fds, SendFlags::DONTWAIT);
        }
        socket
    };
    let list = br#"{"version":1,"ask":"list"}"#;
    let slow = std::sync::Mutex::new(std::collections::VecDeque::new());
    let attacks: [(&str, &(dyn Fn() + Sync)); 9] = [
        ("nothing", &|| std::thread::sleep(Duration::from_millis(1))),
        ("write", &|| refused(&|fd| rustix::io::pwrite(fd, b"x", 0).map(drop))),
        ("shrink", &|| refused(&|fd| rustix::fs::ftruncate(fd, 0))),
        ("punch", &|| refused(&|fd| rustix::fs::fallocate(fd, punch, 0, 4096))),
        ("seal", &|| refused(&|fd| rustix::fs::fcntl_add_seals(fd, SealFlags::FUTURE_WRITE))),
        ("flood", &|| drop(flood(b"x", 0))),
        ("flood of questions", &|| drop(flood(list, 0))),
        ("flood of descriptors", &|| drop(flood(br#"{"version":1,"ask":"keep","more":true}"#, 16))),
        ("slow reads", &|| {
            let mut slow = slow.lock().unwrap();
            slow.push_back(flood(list, 0));
            slow.truncate(50);
        }),
    ];
    for (name, attack) in attacks {
        let done = std::sync::atomic::AtomicBool::new(false);
        let mut times = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..1000).for_each(|_| attack());
                done.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let start = Instant::now();
                // The attacker is the same user, whose connections may be too many for a moment; no call hangs.
                let _ = kept::KeeperClient::connect(&served.socket()).and_then(|keeper| keeper.attach("m"));
                times.push(start.elapsed());
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        slow.lock().unwrap().clear();
        times.sort();
        let at = |part: usize| times[(times.len() - 1) * part / 100];
        println!("{name}: {} attaches, half in {:?}, 99 % in {:?}, all in {:?}", times.len(), at(50), at(99), at(100));
        assert!(at(100) < Duration::from_secs(30), "{name}");
    }
    // Connections of the attacker may still be waiting to be accepted.
    let begun = Instant::now();
    while kept::KeeperClient::connect(&served.socket()).and_then(|keeper| keeper.attach("m")).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    let now = open(&served.client(), "m", ModelOptions::default()).read_all(None, &mut watch).unwrap();
    assert!(now.iter().flat_map(|tensor| tensor.to_vec()).eq(expected), "a byte has changed");
}

#[test]
fn a_write_to_a_tensor_is_ones_own() {
    let served = Served::of_bytes(64 << 20);
    let path = served.sample("m", 1 << 20, 1);
    served.keep(&path, KeepOptions::default()).unwrap();
    // A write to the tensors is this process's alone.
    let model = open(&served.client(), "m", ModelOptions::default());
    let name = model.tensors().next().unwrap().name.clone();
    let tensor = model.read(&name, &mut watch).unwrap();
    let before = tensor.to_vec();
    tensor.as_volatile_slice().sub(0, 1).unwrap().write(&[!before[0]]);
    let other = open(&served.client(), "m", ModelOptions::default()).read(&name, &mut watch).unwrap();
    assert_eq!(other.to_vec(), before);
}

#[test]
fn a_model_of_many_files_comes_in_several_messages() {
    let served = Served::of_bytes(256 << 20);
    let folder = served.folder.path().join("many");
    std::fs::create_dir(&folder).unwrap();
    for n in 1..=300 {
        let mut header = format!(r#"{{"t{n}":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}}}"#).into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut file = File::create(folder.join(format!("m-{n:05}-of-00300.safetensors"))).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&header).unwrap();
        file.write_all(&[1, 2, (n % 256) as u8]).unwrap();
    }
    let model = served.keep(&folder, KeepOptions::default()).unwrap();
    assert_eq!((model.files.len(), &*model.name), (300, "many"));
    let lent = open(&served.client(), "many", ModelOptions::default());
    for n in [1, 250, 300] {
        assert_eq!(lent.read(&format!("t{n}"), &mut watch).unwrap().to_vec(), [1, 2, (n % 256) as u8]);
    }
}

#[test]
fn of_memory_of_a_device_only_the_texts_are_looked_at() {
    let served = Served::of_bytes(2 << 20);
    let client = served.client();
    // It serves by now, and takes descriptors.
    assert!(client.list().unwrap().models.is_empty());
    // A pipe: nothing could be sealed, locked or opened anew, and its other end sees when it is closed.
    let (memory, mut end) = std::io::pipe().unwrap();
    let entry = KeptEntry {
        name: "m.safetensors".to_owned(),
        bytes: 1 << 30,
        listed: None,
        from: Stamp::default(),
        placed: Some(KeptPlaces { bytes: 1 << 30, pieces: Vec::new(), offsets: vec![0; 1000] }),
    };
    let device = Some("GPU-a0".to_owned());
    let model = |shared, device: &Option<String>| KeptModel {
        schema: 1,
        name: "on-gpu".to_owned(),
        id: "a".repeat(64),
        shared,
        device: device.clone(),
        took: Default::default(),
        files: vec![entry.clone()],
    };
    let keep = |model: &KeptModel, memory: &[OwnedFd]| {
        let text = |text: &[u8]| kept::sealed_text("text", text).unwrap();
        let mut fds = vec![text(&serde_json::to_vec(model).unwrap()), text(b"{}")];
        fds.extend(memory.iter().map(|fd| fd.try_clone().unwrap()));
        served.client().keep(&fds).map_err(|e| error_chain(&e))
    };
    let memory = [OwnedFd::from(memory)];
    let pieces = |lens: &[u64]| {
        let mut model = model(false, &device);
        model.files[0].placed.as_mut().unwrap().pieces = lens.to_vec();
        model
    };
    assert_eq!(pieces(&[1 << 29, 1 << 29]).descriptors(), 4);
    for (wrong, memory, says) in [
        (model(true, &device), &memory[..], "no other user may"),
        (model(false, &None), &memory, "the same kind of memory"),
        (model(false, &device), &[], "2 descriptors for 1 files"),
        (pieces(&[1 << 29, 1 << 29]), &memory, "3 descriptors for 1 files"),
        (pieces(&[1 << 29]), &memory, "the pieces of its memory"),
        (pieces(&[u64::MAX, (1 << 30) + 1]), &memory, "the pieces of its memory"),
    ] {
        let refused = keep(&wrong, memory).unwrap_err();
        assert!(refused.contains(says), "{refused}");
    }
    keep(&model(false, &device), &memory).unwrap();
    drop(memory);
    let list = client.list().unwrap();
    let row = &list.models[0];
    assert_eq!((row.device.as_deref(), row.bytes, row.attached), (Some("GPU-a0"), 1 << 30, false));
    assert!(list.used < 1 << 20, "it takes no host memory, but for its texts: {}", list.used);
    let elsewhere = client.attach("on-gpu").unwrap_err();
    assert!(matches!(elsewhere, KeepError::Elsewhere { here: None, .. }), "{elsewhere}");
    // It makes no room for others, since that would free none.
    for seed in 0..3 {
        let path = served.sample("host", 1 << 20, seed);
        served.keep(&path, KeepOptions { name: Some(format!("host{seed}")), ..KeepOptions::default() }).unwrap();
    }
    assert_eq!(served.names(), ["on-gpu", "host2"]);
    end.write_all(b"x").unwrap();
    // One of the same name in the host's memory is another one, and is dropped with it.
    let path = served.sample("host", 1 << 20, 3);
    let again = || {
        let options = KeepOptions { socket: Some(served.socket()), name: Some("on-gpu".into()), ..Default::default() };
        kept::attach_or_keep([&path], &options, |_| ControlFlow::Continue(())).unwrap()
    };
    assert_eq!((again().model.device, again().model.name), (None, "on-gpu".to_owned()));
    assert_eq!(served.names().iter().filter(|name| *name == "on-gpu").count(), 2);
    end.write_all(b"x").unwrap();
    client.drop_model("on-gpu").unwrap();
    assert_eq!(served.names(), Vec::<String>::new());
    let begun = Instant::now();
    while end.write_all(b"x").is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is closed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How often a holder was started.
static STARTS: AtomicU32 = AtomicU32::new(0);

/// Starts a process that holds models, as a thread: the first one ends with the first descriptor that it gets, the
/// second one takes longer to start than any client waits.
fn start_slowly(path: &Path) -> std::io::Result<()> {
    let second = STARTS.fetch_add(1, Ordering::Relaxed) > 0;
    if second {
        std::thread::sleep(Duration::from_secs(3));
        let _ = std::fs::remove_file(path);
    }
    let listener = Listener::bind(path, 0o600, true).unwrap();
    std::thread::spawn(move || {
        if second {
            return hold(&listener).unwrap();
        }
        let keeper = rustix::net::accept(listener.socket()).unwrap();
        let mut text = [0; 256];
        while receive_with_fds(&keeper, &mut text, RecvFlags::empty()).unwrap().fds.is_empty() {
            let _ = send_with_fds(&keeper, b"end", &[], SendFlags::empty());
        }
    });
    Ok(())
}

#[test]
fn nobody_waits_for_another_holder() {
    let holder = tempfile::tempdir().unwrap();
    let holder = Holder { path: holder.path().join("held"), start: start_slowly };
    let config = KeeperConfig { memory: 1 << 30, ..KeeperConfig::default() };
    let store = || Store::of_holder(holder.clone()).unwrap();
    let served = Served::with(Keeper::new(config.clone(), |_| {}).with_store(store()), Arc::default());
    let paths = [1, 2].map(|seed| served.sample(&format!("m{seed}"), 1 << 20, seed));
    let begun = Instant::now();
    served.keep(&paths[0], KeepOptions::default()).unwrap();
    served.keep(&paths[1], KeepOptions::default()).unwrap();
    served.client().drop_model("m1").unwrap();
    assert!(begun.elapsed() < Duration::from_secs(3) && served.names() == ["m2"]);
    while STARTS.load(Ordering::Relaxed) < 2 || begun.elapsed() < Duration::from_secs(4) {
        assert_eq!(served.names(), ["m2"]);
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(served);
    let served = Served::with(Keeper::new(config, |_| {}).with_store(store()), Arc::default());
    assert_eq!(served.names(), ["m2"]);
    served.client().attach("m2").unwrap().check(&mut |_| ControlFlow::Continue(())).unwrap();
    let stopped = served.client().attach("m2").unwrap().check(&mut |_| ControlFlow::Break(())).unwrap_err();
    assert!(matches!(stopped, Error::Fill(FillError::Cancelled { .. })), "{stopped}");
}
