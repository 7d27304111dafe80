//! A client of a keeper.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_dma::{check_peer, connect_seqpacket, receive_with_fds, send_with_fds, trusted_users};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::describe::{KeptEntry, KeptModel, PREFIX};
use super::error::KeepError;
use super::file::KeptFile;
use super::wire::{KeepRefusal, KeeperAnswer, KeeperAsk, KeptList, MAX_FDS, MAX_MESSAGE, Message, VERSION, parse};
use crate::manifest::Manifest;
use crate::set::SetFile;

/// The variable that names the keeper's socket.
const VARIABLE: &str = "DMALANE_KEEP";
/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long a model is waited for whose bytes the keeper is comparing with its manifest.
const CHECKED_WITHIN: Duration = Duration::from_millis(1500);

/// The name in a path of the form `kept:NAME`, where there is no such file.
pub fn name_in(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(PREFIX).filter(|_| !path.exists())
}

/// The socket of the user's keeper: `DMALANE_KEEP`, or `dmalane/keep.sock` in `XDG_RUNTIME_DIR` or /run.
pub fn socket_path() -> PathBuf {
    let named = |variable| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    named(VARIABLE)
        .unwrap_or_else(|| named("XDG_RUNTIME_DIR").unwrap_or_else(|| PathBuf::from("/run")).join("dmalane/keep.sock"))
}

/// A model that was lent: what it is, and its descriptors. The first is of its description.
pub(super) struct Lent {
    pub model: KeptModel,
    pub first: OwnedFd,
    pub manifest: OwnedFd,
    pub files: Vec<OwnedFd>,
}

impl Lent {
    pub fn new(fds: Vec<OwnedFd>) -> Result<Self, KeepError> {
        let mut fds = fds.into_iter();
        let bad = |why: String| KeepError::Bad { what: "a kept model".to_owned(), why };
        let (first, manifest) = fds.next().zip(fds.next()).ok_or_else(|| bad("it has no description".to_owned()))?;
        let model = KeptModel::read(&first)?;
        if fds.len() + 2 != model.descriptors() {
            return Err(bad(format!("it has {} descriptors, and {} have come", model.descriptors(), fds.len() + 2)));
        }
        Ok(Self { model, first, manifest, files: fds.collect() })
    }

    /// Refuses one that is not in memory of this device, or of the host.
    pub fn on(self, here: Option<&str>) -> Result<Self, KeepError> {
        let Self { model: KeptModel { name, device, .. }, .. } = &self;
        if device.as_deref() == here {
            return Ok(self);
        }
        let device = device.as_deref().unwrap_or("the host").to_owned();
        Err(KeepError::Elsewhere { name: name.clone(), device, here: here.map(str::to_owned) })
    }
}

/// A model that was lent, and its memory.
#[derive(Debug)]
pub struct Attached {
    /// What it is.
    pub model: KeptModel,
    files: Vec<SetFile>,
    manifest: OwnedFd,
}

impl Attached {
    /// Maps the memory of a model: its description, its manifest, and its files.
    ///
    /// # Errors
    /// [`KeepError::Bad`].
    pub fn new(fds: Vec<OwnedFd>) -> Result<Self, KeepError> {
        Self::of(Lent::new(fds)?)
    }

    pub(super) fn of(lent: Lent) -> Result<Self, KeepError> {
        let Lent { model, manifest, files, .. } = lent.on(None)?;
        let file = |(entry, fd): (&KeptEntry, OwnedFd)| {
            let path = model.path(entry);
            let kept = Some(Arc::new(KeptFile::new(&path, fd, entry.bytes)?));
            Ok(SetFile { path, listed: entry.listed().map(Arc::new), kept })
        };
        let files = model.files.iter().zip(files).map(file).collect::<Result<_, KeepError>>()?;
        Ok(Self { model, files, manifest })
    }

    /// Its files, in memory.
    pub fn files(&self) -> &[SetFile] {
        &self.files
    }

    /// Its files, in memory.
    pub fn into_files(self) -> Vec<SetFile> {
        self.files
    }

    /// Its manifest.
    ///
    /// # Errors
    /// [`KeepError::Bad`] where it is not the one that its hash is of.
    pub fn manifest(&self) -> Result<Manifest, KeepError> {
        manifest_of(&self.model, &self.manifest)
    }
}

/// The manifest of a model, if it is the one that its hash is of.
pub(super) fn manifest_of(model: &KeptModel, manifest: &OwnedFd) -> Result<Manifest, KeepError> {
    let bad = |why: String| KeepError::Bad { what: format!("the manifest of {:?}", model.name), why };
    let text = super::read_text(manifest, crate::manifest::MAX_MANIFEST)?;
    let manifest = Manifest::parse(&text).map_err(|e| bad(e.to_string()))?;
    if manifest.id() != model.id {
        return Err(bad(format!("its hash is {}, and not {}", manifest.id(), model.id)));
    }
    Ok(manifest)
}

/// Attaches to a model of the user's keeper. Nothing is read, copied or compared.
///
/// # Errors
/// [`KeepError`].
pub fn attach(name: &str) -> Result<Attached, KeepError> {
    KeeperClient::connect(&socket_path())?.attach(name)
}

/// A connection to a keeper.
#[derive(Debug)]
pub struct KeeperClient {
    socket: OwnedFd,
    path: PathBuf,
}

impl KeeperClient {
    /// Connects to the keeper of a socket, which must be this user's or root's.
    ///
    /// # Errors
    /// [`KeepError::NoKeeper`], [`KeepError::Peer`].
    pub fn connect(path: &Path) -> Result<Self, KeepError> {
        let failed = |e: Errno| KeepError::NoKeeper { path: path.to_owned(), source: e.into() };
        let socket = connect_seqpacket(path, Some(TIMEOUT), Some(TIMEOUT)).map_err(failed)?;
        check_peer(&socket, &trusted_users())?;
        Ok(Self { socket, path: path.to_owned() })
    }

    fn send(&self, ask: &KeeperAsk, fds: &[BorrowedFd<'_>]) -> Result<(), KeepError> {
        let failed = |source: std::io::Error| KeepError::NoKeeper { path: self.path.clone(), source };
        let message = Message { version: VERSION, body: ask };
        let text = serde_json::to_vec(&message).map_err(|e| failed(e.into()))?;
        send_with_fds(&self.socket, &text, fds, SendFlags::empty()).map(drop).map_err(|e| failed(e.into()))
    }

    fn answer(&self) -> Result<(KeeperAnswer, Vec<OwnedFd>), KeepError> {
        let failed = |source: std::io::Error| KeepError::NoKeeper { path: self.path.clone(), source };
        let mut text = [0; MAX_MESSAGE];
        let got = receive_with_fds(&self.socket, &mut text, RecvFlags::empty()).map_err(|e| failed(e.into()))?;
        let bad = |why: String| KeepError::Bad { what: format!("the answer of {}", self.path.display()), why };
        if got.len == 0 {
            return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
        }
        if got.is_cut {
            return Err(bad("this process may not open as many descriptors (ulimit -n)".to_owned()));
        }
        match parse(&text[..got.len]).map_err(bad)? {
            KeeperAnswer::Refused { kind, why } => Err(KeepError::Refused { kind, why }),
            answer => Ok((answer, got.fds)),
        }
    }

    fn ask(&self, ask: &KeeperAsk, fds: &[BorrowedFd<'_>]) -> Result<(KeeperAnswer, Vec<OwnedFd>), KeepError> {
        self.send(ask, fds)?;
        self.answer()
    }

    /// Attaches to a model: its name, the beginning of its hash (8 digits or more), or `USER:NAME` for one that another
    /// user shares.
    ///
    /// # Errors
    /// [`KeepError`].
    pub fn attach(&self, name: &str) -> Result<Attached, KeepError> {
        self.attach_rather(name, None)
    }

    /// As [`attach`](Self::attach). Of several of that name, the one in memory of this device
    /// ([`Lending::device`](dmalane_device::Lending::device)) is meant, for [`attach_onto`](Self::attach_onto).
    ///
    /// # Errors
    /// [`KeepError`]: for one in memory of a device [`KeepError::Elsewhere`].
    pub fn attach_rather(&self, name: &str, device: Option<&str>) -> Result<Attached, KeepError> {
        Attached::of(self.lent(name, device)?)
    }

    /// A model with its descriptors.
    pub(super) fn lent(&self, name: &str, device: Option<&str>) -> Result<Lent, KeepError> {
        let bad = |why: String| KeepError::Bad { what: format!("{PREFIX}{name}"), why };
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        let (begun, mut all, mut of_model) = (Instant::now(), Vec::new(), None);
        loop {
            let device = device.map(str::to_owned);
            let ask = KeeperAsk::Attach { name: name.to_owned(), from: all.len(), device };
            match self.ask(&ask, &[]) {
                // Another model has the name by now: all that came is of the one before.
                Ok((KeeperAnswer::Lent { number, .. }, _)) if of_model.is_some_and(|before| before != number) => {
                    (all, of_model) = (Vec::new(), None);
                }
                Ok((KeeperAnswer::Lent { of, number }, fds)) if !fds.is_empty() => {
                    of_model = Some(number);
                    all.extend(fds);
                    if all.len() >= of {
                        break;
                    }
                }
                Ok((answer, _)) => return Err(bad(format!("the keeper's answer was {answer:?}"))),
                Err(KeepError::Refused { kind: KeepRefusal::Checking, .. }) if begun.elapsed() < CHECKED_WITHIN => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error),
            }
        }
        Lent::new(all)
    }

    /// Asks for room, which is this connection's, for a model whose files are there or in memory of a device.
    ///
    /// # Errors
    /// [`KeepError`].
    pub fn room(&self, bytes: u64, on_device: bool) -> Result<(), KeepError> {
        self.ask(&KeeperAsk::Room { bytes, on_device }, &[]).map(drop)
    }

    /// Has this user's models in memory of a device make room there for one of this name: those to which nobody is
    /// attached, another one of its name first, then those that were used longest ago. Their memory is free soon after.
    ///
    /// # Errors
    /// [`KeepError`]; they have fewer `bytes`, and stay.
    pub(super) fn room_on(&self, device: &str, bytes: u64, name: &str) -> Result<(), KeepError> {
        let (device, name) = (device.to_owned(), name.to_owned());
        self.ask(&KeeperAsk::DeviceRoom { device, bytes, name }, &[]).map(drop)
    }

    /// Has a model kept: its description, its manifest, and its files, all in sealed memfds, or its files in memory of
    /// a device. Returns the hash of another model, if it takes the place of one.
    ///
    /// # Errors
    /// [`KeepError`].
    pub fn keep(&self, fds: &[OwnedFd]) -> Result<Option<String>, KeepError> {
        let mut parts = fds.chunks(MAX_FDS).peekable();
        while let Some(part) = parts.next() {
            let fds: Vec<_> = part.iter().map(AsFd::as_fd).collect();
            self.send(&KeeperAsk::Keep { more: parts.peek().is_some() }, &fds)?;
        }
        match self.answer()?.0 {
            KeeperAnswer::Kept { replaced } => Ok(replaced),
            _ => Ok(None),
        }
    }

    /// Has one of the user's own models lent no more. Its memory is free once nobody is attached.
    ///
    /// # Errors
    /// [`KeepError`].
    pub fn drop_model(&self, name: &str) -> Result<(), KeepError> {
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        self.ask(&KeeperAsk::Drop { name: name.to_owned() }, &[]).map(drop)
    }

    /// The models that are lent to this user.
    ///
    /// # Errors
    /// [`KeepError`].
    pub fn list(&self) -> Result<KeptList, KeepError> {
        let bad = |why: String| KeepError::Bad { what: format!("the answer of {}", self.path.display()), why };
        match self.ask(&KeeperAsk::List, &[])? {
            (KeeperAnswer::List, fds) if fds.len() == 1 => {
                let text = super::read_text(&fds[0], u64::from(u32::MAX))?;
                serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))
            }
            (answer, _) => Err(bad(format!("{answer:?}"))),
        }
    }
}
