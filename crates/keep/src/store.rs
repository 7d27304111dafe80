//! Where descriptors of models live on when their keeper is gone: the service manager's store (`FDSTORE=1` of
//! sd_notify(3)), or a process that does nothing but hold them.
//!
//! Each descriptor has a name, `keep.NUMBER.USER.INDEX`: its model, whose it is, and its place in it.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dmalane_daemon::{Listener, pass_rights};
use dmalane_dma::{connect_seqpacket, receive_with_fds, send_with_fds};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, sendmsg_addr,
};

/// The longest message.
const MAX_MESSAGE: usize = 256;
/// How long the holder may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take to take what it is sent: all clients of the keeper wait meanwhile.
const TAKEN_WITHIN: Duration = Duration::from_secs(1);
/// The first descriptor that a service manager passes.
const FIRST: i32 = 3;

/// A place for descriptors that outlives the keeper.
#[derive(Debug)]
pub enum Store {
    /// There is none: models are gone with the keeper.
    None,
    /// The service manager's: the socket of its notifications, and what it passed at the start.
    Manager(OwnedFd, PathBuf, Vec<(String, OwnedFd)>),
    /// A process that holds them, and the way to start another one.
    Holder(OwnedFd, Holder),
}

/// A model that is held: its number, its user, its descriptors.
pub(crate) type Stored = (u64, u32, Vec<OwnedFd>);

/// The way to a process that holds descriptors.
#[derive(Clone, Debug)]
pub struct Holder {
    /// Where it listens.
    pub path: PathBuf,
    /// Starts it there.
    pub start: fn(&Path) -> std::io::Result<()>,
}

/// Descriptors with their names that the service manager has passed to this process: none but the first time.
pub fn inherited() -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let is_mine = number("LISTEN_PID") == Some(std::process::id());
    let count = number("LISTEN_FDS").and_then(|n| i32::try_from(n).ok()).filter(|_| is_mine).unwrap_or(0);
    if count == 0 || TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':').map(str::to_owned);
    let is_open = |fd: &i32| Path::new(&format!("/proc/self/fd/{fd}")).exists();
    let take = |fd| {
        // SAFETY: the descriptor is open (checked above), and this process's by the protocol of sd_listen_fds(3), which
        // names it (LISTEN_PID). Nobody else takes it: this happens once (`TAKEN`).
        (names.next().unwrap_or_default(), unsafe { OwnedFd::from_raw_fd(fd) })
    };
    (FIRST..FIRST.saturating_add(count)).filter(is_open).map(take).collect()
}

impl Store {
    /// The store of the service manager, if it tells of one, with what it has passed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of_manager(passed: Vec<(String, OwnedFd)>) -> std::io::Result<Option<Self>> {
        let has_store = std::env::var("FDSTORE").is_ok_and(|n| n != "0");
        let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|_| has_store) else { return Ok(None) };
        let kind = SocketType::DGRAM;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        Ok(Some(Self::Manager(socket, path.into(), passed)))
    }

    /// A process that holds descriptors, started if there is none.
    ///
    /// # Errors
    /// The kernel's, or that of the start.
    pub fn of_holder(holder: Holder) -> std::io::Result<Self> {
        let connect = || connect_seqpacket(&holder.path, Some(TIMEOUT), Some(TAKEN_WITHIN));
        if let Ok(socket) = connect() {
            return Ok(Self::Holder(socket, holder));
        }
        (holder.start)(&holder.path)?;
        let begun = std::time::Instant::now();
        loop {
            match connect() {
                Ok(socket) => return Ok(Self::Holder(socket, holder)),
                Err(e) if begun.elapsed() > TIMEOUT => return Err(e.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// The way to the process that holds models.
    pub(crate) fn into_holder(self) -> Option<Holder> {
        if let Self::Holder(_, holder) = self { Some(holder) } else { None }
    }

    /// Another process in place of one that is gone, and what it holds. This may take several seconds.
    ///
    /// # Errors
    /// It cannot be started, or does not answer.
    pub(crate) fn replacing(holder: &Holder) -> std::io::Result<(Self, Vec<Stored>)> {
        let begun = std::time::Instant::now();
        loop {
            let mut store = Self::of_holder(holder.clone())?;
            // One that is ending may still have accepted a connection, and does not answer.
            if let (found, true) = store.take_back() {
                return Ok((store, found));
            }
            std::thread::sleep(Duration::from_millis(5));
            if begun.elapsed() > TIMEOUT {
                return Err(std::io::Error::other("it does not answer"));
            }
        }
    }

    fn tell(&self, text: &str, fds: &[&OwnedFd]) -> Result<(), Errno> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        match self {
            Self::None => Ok(()),
            Self::Holder(socket, _) => send_with_fds(socket, text.as_bytes(), &fds, SendFlags::empty()).map(drop),
            Self::Manager(socket, path, _) => {
                let address = match path.to_str().and_then(|path| path.strip_prefix('@')) {
                    Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
                    None => SocketAddrUnix::new(path)?,
                };
                let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
                control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
                let parts = [std::io::IoSlice::new(text.as_bytes())];
                sendmsg_addr(socket, &address, &parts, &mut control, SendFlags::NOSIGNAL).map(drop)
            }
        }
    }

    /// Puts the descriptors of a model away.
    ///
    /// # Errors
    /// The kernel's: then the model is lost with the keeper.
    pub(crate) fn put(&self, number: u64, user: u32, fds: &[OwnedFd]) -> Result<(), Errno> {
        for (index, fd) in fds.iter().enumerate() {
            let name = format!("keep.{number}.{user}.{index}");
            let text = match self {
                // Not polled: the manager closes what seems to be hung up, as memory of a device may.
                Self::Manager(..) => format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"),
                _ => format!("put {name}"),
            };
            self.tell(&text, &[fd])?;
        }
        Ok(())
    }

    /// Takes a model out again.
    ///
    /// # Errors
    /// The kernel's: then it stays there.
    pub(crate) fn remove(&self, number: u64, user: u32, count: usize) -> Result<(), Errno> {
        match self {
            Self::Manager(..) => {
                let mut told = Ok(());
                for index in 0..count {
                    // All of them, also after one that failed.
                    told = told.and(self.tell(&format!("FDSTOREREMOVE=1\nFDNAME=keep.{number}.{user}.{index}"), &[]));
                }
                told
            }
            _ => self.tell(&format!("remove keep.{number}."), &[]),
        }
    }

    /// The models that are there, each with its number and its user, and whether these are all. They stay there.
    pub(crate) fn take_back(&mut self) -> (Vec<Stored>, bool) {
        let mut is_all = true;
        let found = match self {
            Self::None => Vec::new(),
            Self::Manager(_, _, passed) => std::mem::take(passed),
            Self::Holder(socket, _) => match send_with_fds(&*socket, b"all", &[], SendFlags::empty()) {
                Ok(_) => {
                    let mut found = Vec::new();
                    is_all = loop {
                        match next(socket) {
                            Some((name, Some(fd))) => found.push((name, fd)),
                            Some((_, None)) => break true,
                            None => break false,
                        }
                    };
                    found
                }
                Err(_) => {
                    is_all = false;
                    Vec::new()
                }
            },
        };
        let mut models: BTreeMap<(u64, u32), BTreeMap<usize, OwnedFd>> = BTreeMap::new();
        for (name, fd) in found {
            let parts: Vec<&str> = name.split('.').collect();
            let ["keep", number, user, index] = parts[..] else { continue };
            if let (Ok(number), Ok(user), Ok(index)) = (number.parse(), user.parse(), index.parse()) {
                models.entry((number, user)).or_default().insert(index, fd);
            }
        }
        (models.into_iter().map(|((number, user), fds)| (number, user, fds.into_values().collect())).collect(), is_all)
    }

    /// The socket of a process that holds models, which becomes readable when that is gone.
    pub(crate) fn holder(&self) -> Option<BorrowedFd<'_>> {
        if let Self::Holder(socket, _) = self { Some(socket.as_fd()) } else { None }
    }

    /// The keeper ends in good order: nothing is to be held any more.
    pub(crate) fn end(&self) {
        if let Self::Holder(..) = self {
            let _ = self.tell("end", &[]);
        }
    }
}

/// The next descriptor that a holder has; at the end none.
fn next(socket: &OwnedFd) -> Option<(String, Option<OwnedFd>)> {
    let mut text = [0; MAX_MESSAGE];
    let got = receive_with_fds(socket, &mut text, RecvFlags::empty()).ok()?;
    let name = std::str::from_utf8(&text[..got.len]).ok()?.to_owned();
    (got.len > 0).then(|| (name, got.fds.into_iter().next()))
}

/// Holds descriptors for keepers of the same user, one after the other, until one ends in good order.
///
/// # Errors
/// The kernel's.
pub fn hold(listener: &Listener) -> std::io::Result<()> {
    let socket = listener.socket();
    pass_rights(socket, true);
    let mut held: Vec<(String, OwnedFd)> = Vec::new();
    loop {
        let keeper = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(keeper) => keeper,
            Err(Errno::CONNABORTED | Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        };
        if !socket_peercred(&keeper).is_ok_and(|peer| peer.uid == rustix::process::geteuid()) {
            continue;
        }
        let mut text = [0; MAX_MESSAGE];
        loop {
            let got = match receive_with_fds(&keeper, &mut text, RecvFlags::empty()) {
                Ok(got) if got.len > 0 => got,
                _ => break,
            };
            let said = std::str::from_utf8(&text[..got.len]).unwrap_or_default();
            match (said.split_once(' '), said) {
                (Some(("put", name)), _) => held.extend(got.fds.into_iter().next().map(|fd| (name.to_owned(), fd))),
                (Some(("remove", name)), _) => held.retain(|(known, _)| !known.starts_with(name)),
                (_, "all") => {
                    for (name, fd) in &held {
                        let _ = send_with_fds(&keeper, name.as_bytes(), &[fd.as_fd()], SendFlags::empty());
                    }
                    // Without a descriptor: there are no more.
                    let _ = send_with_fds(&keeper, b"end", &[], SendFlags::empty());
                }
                (_, "end") => return Ok(()),
                _ => {}
            }
        }
    }
}
