//! A model of vrtd over the model of the driver: answers its messages with the daemon's checks and its allocator.
//!
//! Source: SLASH, branch `dev`, `vrt/vrtd/src/serve.c`, `allocator.c` and `auth.c`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, listen, recv, sendmsg, socket_with, socketpair,
};

use super::{Answer, DriverModel, FileId};
use crate::kernel::Request;
use crate::regions::{DDR, HBM};
use crate::vrtd::{BLOCK, REGION, wide, word};

/// Return codes (`enum vrtd_ret`).
const BAD_REQUEST: u16 = 3;
const INVALID: u16 = 4;
const NO_SUCH: u16 = 5;
const FAILED: u16 = 6;
const DENIED: u16 = 7;
const BUSY: u16 = 8;

/// Changes an answer before it is sent: the request's number, the whole message, and the files.
pub type Tamper = dyn FnMut(u16, &mut Vec<u8>, &mut Vec<OwnedFd>) + Send;

/// A model of the daemon with one card. Clones are the same one.
#[derive(Clone)]
pub struct Vrtd(Arc<Mutex<State>>);

struct State {
    model: DriverModel,
    node: FileId,
    /// The connection that owns each block of 64 MiB, by its address; 0 for another user.
    owners: BTreeMap<u64, u64>,
    lent: Vec<Lent>,
    denied: BTreeSet<&'static str>,
    tamper: Box<Tamper>,
    connections: u64,
    requests: BTreeMap<u16, u64>,
}

struct Lent {
    connection: u64,
    at: u64,
    len: u64,
    pair: u32,
}

/// The body of an answer, with its file.
type Body = (Vec<u8>, Option<OwnedFd>);

impl Vrtd {
    /// The daemon of the model's card; it has opened the driver's node.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(model: &DriverModel) -> io::Result<Self> {
        let state = State {
            model: model.clone(),
            node: model.open_node()?.0,
            owners: BTreeMap::new(),
            lent: Vec::new(),
            denied: BTreeSet::new(),
            tamper: Box::new(|_, _, _| {}),
            connections: 0,
            requests: BTreeMap::new(),
        };
        Ok(Self(Arc::new(Mutex::new(state))))
    }

    /// The clients' role lacks this permission from now on: `query`, `qdma` or `buffer`.
    pub fn deny(&self, permission: &'static str) {
        self.lock().denied.insert(permission);
    }

    /// From now on `tamper` changes the answers.
    pub fn tamper(&self, tamper: impl FnMut(u16, &mut Vec<u8>, &mut Vec<OwnedFd>) + Send + 'static) {
        self.lock().tamper = Box::new(tamper);
    }

    /// Another user takes memory of the card.
    pub fn occupy(&self, at: u64, len: u64) {
        let blocks = (at / BLOCK..(at + len).div_ceil(BLOCK)).map(|block| (block * BLOCK, 0));
        self.lock().owners.extend(blocks);
    }

    /// Address and bytes of the memory that is lent.
    pub fn lent(&self) -> Vec<(u64, u64)> {
        self.lock().lent.iter().map(|lent| (lent.at, lent.len)).collect()
    }

    /// Requests by their numbers.
    pub fn requests(&self) -> BTreeMap<u16, u64> {
        self.lock().requests.clone()
    }

    /// A connection to the daemon.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let this = self.clone();
        thread::Builder::new().name("vrtd".into()).spawn(move || this.serve(&ours))?;
        Ok(theirs)
    }

    /// Accepts connections at a path, until the process ends.
    ///
    /// # Errors
    /// The kernel's.
    pub fn listen(&self, path: &Path) -> io::Result<()> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        // As SLASH's unit vrtd.socket has it: roles decide what a user may do.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        listen(&socket, 16)?;
        let this = self.clone();
        let serve = move || {
            while let Ok(client) = accept_with(&socket, SocketFlags::CLOEXEC) {
                let this = this.clone();
                thread::spawn(move || this.serve(&client));
            }
        };
        thread::Builder::new().name("vrtd".into()).spawn(serve).map(drop)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a client until it disconnects, and frees what it had.
    fn serve(&self, client: &OwnedFd) {
        let connection = {
            let mut state = self.lock();
            state.connections += 1;
            state.connections
        };
        let mut message = [0; 4096];
        while let Ok((len @ 8.., _)) = recv(client, &mut message, rustix::net::RecvFlags::empty()) {
            let header = |at: usize| u16::from_ne_bytes([message[at], message[at + 1]]);
            if usize::from(header(0)) + 8 != len {
                break;
            }
            let opcode = header(2);
            let mut state = self.lock();
            *state.requests.entry(opcode).or_default() += 1;
            let (ret, (body, file)) = match state.answer(connection, opcode, &message[8..len]) {
                Ok(answer) => (0, answer),
                Err(ret) => (ret, (Vec::new(), None)),
            };
            let mut reply = (body.len() as u16).to_ne_bytes().to_vec();
            reply.extend(ret.to_ne_bytes());
            reply.extend(&message[4..8]);
            reply.extend(body);
            let mut files: Vec<OwnedFd> = file.into_iter().collect();
            (state.tamper)(opcode, &mut reply, &mut files);
            drop(state);
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !files.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&files));
            }
            if sendmsg(client, &[IoSlice::new(&reply)], &mut control, SendFlags::NOSIGNAL).is_err() {
                break;
            }
        }
        let mut state = self.lock();
        while let Some(at) = state.lent.iter().position(|lent| lent.connection == connection) {
            state.close(at);
        }
    }
}

impl State {
    /// A call on the driver's node.
    fn driver(&self, request: Request, words: &mut [u32]) -> Result<Answer, u16> {
        words[0] = words.len() as u32 * 4;
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let answer = self.model.answer(self.node, request.number(), &mut bytes, &|_| None);
        words.iter_mut().enumerate().for_each(|(i, place)| *place = word(&bytes, i));
        answer.map_err(|_| FAILED)
    }

    fn answer(&mut self, connection: u64, opcode: u16, body: &[u8]) -> Result<Body, u16> {
        let (permission, least) = match opcode {
            0 => ("query", 1),
            1 | 4 => ("query", 4),
            5 => ("qdma", 40),
            6 | 7 => ("qdma", 12),
            10 => ("buffer", 32),
            11 => ("buffer", 20),
            _ => return Err(BAD_REQUEST),
        };
        if self.denied.contains(permission) {
            return Err(DENIED);
        }
        if body.len() < least {
            return Err(BAD_REQUEST);
        }
        if opcode != 0 && word(body, 0) != 0 {
            return Err(NO_SUCH);
        }
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
        match opcode {
            0 => Ok((bytes(&[1]), None)),
            1 => {
                let mut info = [0; 170];
                info[..3].copy_from_slice(b"v80");
                info[128..140].copy_from_slice(b"0000:61:00.0");
                Ok((info.to_vec(), None))
            }
            4 => {
                let mut words = [0; 13];
                self.driver(Request::Info, &mut words)?;
                Ok((bytes(&words)[..(words[0] as usize).min(52)].to_vec(), None))
            }
            5 => {
                let mut words: Vec<u32> = (1..10).map(|at| word(body, at)).collect();
                self.driver(Request::PairAdd, &mut words)?;
                Ok((bytes(&words), None))
            }
            6 => {
                self.driver(Request::PairOp, &mut [0, word(body, 1), word(body, 2)])?;
                Ok((vec![0], None))
            }
            7 => Ok((vec![0], Some(self.pair_file(word(body, 1))?))),
            10 => self.open(connection, body),
            _ => {
                let (at, len) = (wide(body, 4), wide(body, 12));
                let found = self.lent.iter().position(|l| (l.connection, l.at, l.len) == (connection, at, len));
                self.close(found.ok_or(NO_SUCH)?);
                Ok((vec![0], None))
            }
        }
    }

    fn pair_file(&self, qid: u32) -> Result<OwnedFd, u16> {
        match self.driver(Request::PairFile, &mut [0, qid, 0o2_000_000, 0, 0, 0])? {
            Answer::File(_, file) => Ok(file),
            Answer::Number(_) => Err(FAILED),
        }
    }

    fn open(&mut self, connection: u64, body: &[u8]) -> Result<Body, u16> {
        let [kind, direction, channel] = [1, 2, 3].map(|at| word(body, at));
        let (arg, size) = (wide(body, 16), wide(body, 24));
        // Regions of 512 MiB of which the request may take a part, in the order in which they are searched.
        let regions: Vec<u64> = match kind {
            0 => (0..64).map(|i| DDR.0 + i * REGION).collect(),
            1 if arg < 64 => vec![HBM.0 + arg * REGION],
            _ => return Err(INVALID),
        };
        if direction > 2 || channel > 2 || size == 0 || size > REGION {
            return Err(INVALID);
        }
        let blocks = size.div_ceil(BLOCK);
        let places = regions.iter().flat_map(|region| (0..=REGION / BLOCK - blocks).map(move |i| region + i * BLOCK));
        let free = |at: &u64| (0..blocks).all(|i| !self.owners.contains_key(&(at + i * BLOCK)));
        let at = places.into_iter().find(free).ok_or(BUSY)?;
        let mut words = [0, 0, 3, channel, 15, 15, 15, 0, 0];
        self.driver(Request::PairAdd, &mut words)?;
        let pair = words[7];
        self.driver(Request::PairOp, &mut [0, pair, 0])?;
        let file = self.pair_file(pair)?;
        self.owners.extend((0..blocks).map(|i| (at + i * BLOCK, connection)));
        self.lent.push(Lent { connection, at, len: blocks * BLOCK, pair });
        let mut answer = (blocks * BLOCK).to_ne_bytes().to_vec();
        answer.extend(at.to_ne_bytes());
        answer.extend(1u32.to_ne_bytes());
        Ok((answer, Some(file)))
    }

    /// Frees lent resources. Failures are only logged.
    fn close(&mut self, at: usize) {
        let lent = self.lent.remove(at);
        for op in [1, 2] {
            let _ = self.driver(Request::PairOp, &mut [0, lent.pair, op]);
        }
        self.owners.retain(|block, _| !(lent.at..lent.at + lent.len).contains(block));
    }
}
