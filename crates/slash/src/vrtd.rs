//! SLASH's daemon vrtd, which lends a card: its messages, and the card's memory that it grants.
//!
//! Queue pairs are added, started, stopped and opened by messages; buffers and transfers are calls on the files that
//! come with the answers, made directly. Memory is granted in blocks of 64 MiB to 512 MiB at addresses that vrtd
//! chooses, and the queues refuse all other addresses.
//!
//! Source: SLASH, branch `dev`, `vrt/vrtd/include/vrtd/wire.h`, `vrt/vrtd/src/serve.c` and `allocator.h`. Nothing that
//! the daemon says is believed: lengths, addresses, numbers of files and sequence numbers are checked.

use std::error::Error as AnyError;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use dmalane_addr::{CardAddr, Span};
use dmalane_device::{End, MemoryGrants, Region};
use dmalane_dma::{check_peer, connect_seqpacket, receive_with_fds, send_with_fds, trusted_users};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};

use crate::Error;
use crate::abi::{self, halves};
use crate::kernel::{Calls, Handle, Kernel, Request};
use crate::regions::HBM;

/// The socket of vrtd as it is installed.
pub const VRTD_SOCKET: &str = "/run/vrtd.sock";

/// Bytes of a message at most.
const MAX_MESSAGE: usize = 4096;
/// The longest wait for an answer: vrtd answers nobody while it resets a card.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Cards that are listed at most.
const MAX_CARDS: u32 = 64;
/// Bytes of the least block of memory.
pub(crate) const BLOCK: u64 = 64 << 20;
/// Bytes of a region of vrtd's allocator, in which a block lies.
pub(crate) const REGION: u64 = 512 << 20;

/// A card of a vrtd: `SOCKET#N`, where either part may be left out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VrtdName {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The number of the card.
    pub card: u32,
}

impl FromStr for VrtdName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Vrtd { socket: text.into(), source: io::Error::other("the number of a card follows #") };
        let (socket, card) = match text.rsplit_once('#') {
            Some((socket, card)) => (socket, card.parse().ok().filter(|_| !card.starts_with('+')).ok_or_else(bad)?),
            None => (text, 0),
        };
        Ok(Self { socket: if socket.is_empty() { VRTD_SOCKET } else { socket }.into(), card })
    }
}

impl fmt::Display for VrtdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.socket.display(), self.card)
    }
}

/// A card that a vrtd lends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VrtdCard {
    /// The daemon's name of it.
    pub name: String,
    /// Its PCI address, without the function.
    pub pci: String,
}

/// Lists the cards of a vrtd.
///
/// # Errors
/// [`Error::Vrtd`]: no such socket, no permission, or answers that cannot be.
pub fn vrtd_cards(socket: &Path) -> Result<Vec<VrtdCard>, Error> {
    let daemon = Daemon::connect(&VrtdName { socket: socket.to_owned(), card: 0 })?;
    let of = |source| Error::Vrtd { socket: socket.to_owned(), source };
    let number = daemon.ask(Ask::Devices, &[0], 4).map_err(of)?.body;
    let number = word(&number, 0);
    let card = |n: u32| -> io::Result<VrtdCard> {
        let body = daemon.ask(Ask::Device, &n.to_ne_bytes(), DEVICE_INFO)?.body;
        Ok(VrtdCard { name: printable(&body[..128]), pci: printable(&body[128..160]) })
    };
    (0..number.min(MAX_CARDS)).map(card).collect::<io::Result<_>>().map_err(of)
}

/// Bytes of the answer about a device: name, PCI address, four IDs of 16 bits, shell, JTAG.
const DEVICE_INFO: usize = 128 + 32 + 8 + 2;

/// A text that ends at its first zero; what cannot be printed is left out.
fn printable(bytes: &[u8]) -> String {
    let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
    text.iter().filter(|b| b.is_ascii_graphic() || **b == b' ').map(|b| *b as char).collect()
}

/// A request, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    Devices = 0,
    Device = 1,
    Info = 4,
    PairAdd = 5,
    PairOp = 6,
    PairFile = 7,
    BufferOpen = 10,
    BufferClose = 11,
}

impl Ask {
    /// The permission that vrtd demands, as its configuration names it.
    const fn permission(self) -> &'static str {
        match self {
            Self::Devices | Self::Device | Self::Info => "query-devices = yes",
            Self::PairAdd | Self::PairOp | Self::PairFile => "qdma = yes",
            Self::BufferOpen | Self::BufferClose => "buffer = yes",
        }
    }

    /// True when a file comes with the answer.
    const fn has_file(self) -> bool {
        matches!(self, Self::PairFile | Self::BufferOpen)
    }
}

/// The answer that memory is taken.
const BUSY: u16 = 8;

/// An answer other than success.
#[derive(Debug)]
struct Refused(Ask, u16);

impl AnyError for Refused {}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            3 => f.write_str("vrtd does not know the request: its version is another one"),
            4 => f.write_str("vrtd calls an argument invalid"),
            5 => f.write_str("vrtd has no such card, or the card has no queues"),
            6 => f.write_str("vrtd failed; its log says why (journalctl -u vrtd)"),
            7 => {
                let permission = self.0.permission();
                write!(
                    f,
                    "vrtd gives this user no permission: its role needs `{permission}` (/etc/vrt/vrtd.conf; users of \
                     group vrtadmin have all)"
                )
            }
            BUSY => f.write_str("vrtd is busy"),
            other => write!(f, "vrtd answered with the unknown code {other}"),
        }
    }
}

/// A successful answer, or [`BUSY`].
pub(crate) struct Reply {
    ret: u16,
    pub body: Vec<u8>,
    pub file: Option<OwnedFd>,
}

/// A connection to a vrtd, as the driver of one of its cards.
pub(crate) struct Daemon {
    pub socket: Arc<Handle>,
    card: u32,
    /// Makes the calls on the files that the daemon sends.
    files: Arc<dyn Kernel>,
    link: Mutex<Link>,
}

#[derive(Default)]
struct Link {
    /// The number of the last request.
    number: u32,
    /// An answer did not come, or was none: what comes next answers nobody knows what.
    broken: bool,
}

impl Daemon {
    /// Connects to the daemon of a card of this machine.
    pub(crate) fn connect(name: &VrtdName) -> Result<Self, Error> {
        let of = |e: Errno| Error::Vrtd { socket: name.socket.clone(), source: e.into() };
        let socket = connect_seqpacket(&name.socket, Some(TIMEOUT), Some(TIMEOUT)).map_err(of)?;
        // With socket activation the listener is of systemd, which is root's.
        check_peer(&socket, &trusted_users())
            .map_err(|source| Error::WrongServer { socket: name.socket.clone(), source })?;
        Self::over(socket, name.card, Arc::new(crate::sys::Linux)).map_err(of)
    }

    /// The same over a socket that is connected, and other calls on files.
    pub(crate) fn over(socket: OwnedFd, card: u32, files: Arc<dyn Kernel>) -> rustix::io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT))?;
        set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT))?;
        Ok(Self { socket: Arc::new(Handle::new(socket)), card, files, link: Mutex::default() })
    }

    /// Asks, and expects success with `len` bytes of answer, or more of a newer version.
    pub(crate) fn ask(&self, ask: Ask, body: &[u8], len: usize) -> io::Result<Reply> {
        let reply = self.exchange(ask, body)?;
        if reply.ret != 0 {
            return Err(io::Error::other(Refused(ask, reply.ret)));
        }
        if reply.body.len() < len {
            let found = reply.body.len();
            return Err(io::Error::other(format!("vrtd answered with {found} bytes, not {len}: an unknown version")));
        }
        Ok(reply)
    }

    fn exchange(&self, ask: Ask, body: &[u8]) -> io::Result<Reply> {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        if link.broken {
            return Err(io::Error::other("the connection to vrtd has failed before"));
        }
        link.number = link.number.wrapping_add(1);
        let reply = self.send_and_receive(link.number, ask, body);
        link.broken = reply.is_err();
        reply
    }

    fn send_and_receive(&self, number: u32, ask: Ask, body: &[u8]) -> io::Result<Reply> {
        let mut message = (body.len() as u16).to_ne_bytes().to_vec();
        message.extend((ask as u16).to_ne_bytes());
        message.extend(number.to_ne_bytes());
        message.extend(body);
        let late = |e| match e {
            Errno::AGAIN => io::Error::other("vrtd does not answer"),
            other => other.into(),
        };
        send_with_fds(&*self.socket, &message, &[], SendFlags::empty()).map_err(late)?;
        let mut bytes = [0; MAX_MESSAGE];
        let mut got = receive_with_fds(&*self.socket, &mut bytes, RecvFlags::empty()).map_err(late)?;
        let bad = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if got.len == 0 {
            return bad("vrtd has closed the connection".into());
        }
        let header = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let (len, ret) = (usize::from(header(0)), header(2));
        if got.is_cut || got.len != 8 + len {
            return bad(format!("vrtd sent a message of {} bytes whose header says {len}", got.len));
        }
        if word(&bytes, 1) != number {
            return bad(format!("vrtd answered request {} instead of {number}", word(&bytes, 1)));
        }
        if got.fds.len() != usize::from(ret == 0 && ask.has_file()) {
            return bad(format!("vrtd sent {} files with answer {ret} to request {}", got.fds.len(), ask as u16));
        }
        Ok(Reply { ret, body: bytes[8..8 + len].to_vec(), file: got.fds.pop() })
    }

    /// A body that begins with the card's number.
    fn body(&self, words: &[u32]) -> Vec<u8> {
        [self.card].iter().chain(words).flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// A word of a message, zero where it has none.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(4 * at..4 * at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// The 64-bit field at a byte of a message, zero where it has none.
pub(crate) fn wide(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

impl Kernel for Daemon {
    fn call(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<u64> {
        match request {
            Request::Info => {
                let body = self.ask(Ask::Info, &self.body(&[]), abi::INFO_SIZES[0] as usize)?.body;
                // The driver's structure as vrtd knows it; its first word is its length.
                if word(&body, 0) as usize != body.len() || body.len() > size_of_val(argument) {
                    let (says, len) = (word(&body, 0), body.len());
                    return Err(io::Error::other(format!("vrtd answered with {len} bytes that say they are {says}")));
                }
                argument.iter_mut().enumerate().for_each(|(i, place)| *place = word(&body, i));
            }
            Request::PairAdd => {
                argument[0] = size_of_val(argument) as u32;
                let body = self.ask(Ask::PairAdd, &self.body(argument), size_of_val(argument))?.body;
                argument.iter_mut().enumerate().for_each(|(i, place)| *place = word(&body, i));
            }
            Request::PairOp => drop(self.ask(Ask::PairOp, &self.body(&argument[1..]), 1)?),
            Request::Transfer => return self.files.call(on, request, argument),
            Request::PairFile | Request::BufferCreate => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(0)
    }

    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle> {
        match request {
            Request::PairFile => {
                let reply = self.ask(Ask::PairFile, &self.body(&argument[1..3]), 1)?;
                reply.file.map(Handle::new).ok_or(io::ErrorKind::InvalidData.into())
            }
            request => self.files.open(on, request, argument),
        }
    }

    fn calls(&self, file: &Arc<Handle>) -> Option<Box<dyn Calls>> {
        self.files.calls(file)
    }
}

/// The card's memory that may be used, block by block.
#[derive(Default)]
pub(crate) struct Reach(RwLock<Vec<Span<CardAddr>>>);

impl Reach {
    pub(crate) fn of(spans: impl IntoIterator<Item = Span<CardAddr>>) -> Self {
        Self(RwLock::new(spans.into_iter().collect()))
    }

    /// The first address of `len` bytes from `at` on that may not be used; blocks that touch are one.
    pub(crate) fn check(&self, at: CardAddr, len: u64) -> Result<(), CardAddr> {
        let blocks = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let end = at.bits().checked_add(len.saturating_sub(1)).ok_or(at)?;
        let mut next = at;
        while let Some(block) = blocks.iter().find(|block| block.contains(next)) {
            if block.last().bits() >= end {
                return Ok(());
            }
            next = CardAddr::new(block.last().bits().checked_add(1).ok_or(at)?);
        }
        Err(next)
    }

    /// Adds a block; false when it overlaps with another one.
    fn add(&self, block: Span<CardAddr>) -> bool {
        let mut blocks = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let free = blocks.iter().all(|other| other.intersect(&block).is_none());
        if free {
            blocks.push(block);
        }
        free
    }

    fn remove(&self, block: Span<CardAddr>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|other| *other != block);
    }
}

/// Grants the card's memory as vrtd does.
pub(crate) struct Grants {
    pub daemon: Arc<Daemon>,
    pub reach: Arc<Reach>,
}

impl Grants {
    /// Asks for `len` bytes: of DDR, or of a region of the HBM. `None` when there is no such block.
    fn open(&self, region: &Region, hbm: Option<u64>, len: u64) -> Result<Option<Span<CardAddr>>, Error> {
        // Both directions, by one queue pair, which is not used: a pair of vrtd's cannot be seen to stop.
        let mut body = self.daemon.body(&[u32::from(hbm.is_some()), 0, 1]);
        body.extend([hbm.unwrap_or(0), len].iter().flat_map(|wide| wide.to_ne_bytes()));
        let of = |source| Error::Call { call: "BUFFER_OPEN", source };
        let reply = self.daemon.exchange(Ask::BufferOpen, &body).map_err(of)?;
        match reply.ret {
            0 => {}
            BUSY => return Ok(None),
            other => return Err(of(io::Error::other(Refused(Ask::BufferOpen, other)))),
        }
        let (got, at) = (wide(&reply.body, 0), wide(&reply.body, 8));
        let block = Span::new(CardAddr::new(at), got).filter(|block| {
            let fits = reply.body.len() >= 20 && (len..=REGION).contains(&got) && block.is_aligned(region.granule);
            fits && region.span.covers(block) && self.reach.add(*block)
        });
        let what = || format!("{got} bytes at {at:#x}: not memory of {} that is free", region.name);
        block.map(Some).ok_or_else(|| Error::Answer { call: "BUFFER_OPEN", what: what() })
    }
}

impl MemoryGrants for Grants {
    fn grant(
        &mut self,
        region: &Region,
        len: u64,
        end: End,
    ) -> Result<Option<Span<CardAddr>>, Box<dyn AnyError + Send + Sync>> {
        // vrtd chooses a place in DDR; in HBM it takes the first free one of the region that it is told.
        let (from, to) = (region.span.first().bits(), region.span.last().bits());
        let mut places: Vec<Option<u64>> = match region.group == "hbm" {
            true => ((from - HBM.0) / REGION..=(to - HBM.0) / REGION).map(Some).collect(),
            false => vec![None],
        };
        let mut ask = len.clamp(BLOCK, REGION).next_multiple_of(BLOCK);
        let mut least = BLOCK;
        if end == End::Last {
            places.reverse();
            // Only a whole region ends where the next one begins.
            (ask, least) = (REGION, REGION);
        }
        loop {
            for place in &places {
                if let Some(block) = self.open(region, *place, ask)? {
                    return Ok(Some(block));
                }
            }
            if ask == least {
                return Ok(None);
            }
            ask = (ask / 2).next_multiple_of(BLOCK);
        }
    }

    fn take_back(&mut self, block: Span<CardAddr>) {
        self.reach.remove(block);
        let wides = [block.first().bits(), block.len()].map(halves);
        // If it fails, vrtd frees the block when the connection ends.
        let _ = self.daemon.ask(Ask::BufferClose, &self.daemon.body(wides.as_flattened()), 1);
    }
}
