//! The driver's checks and answers, and the card behind them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Barrier, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use libc::{EBADF, EBUSY, EFAULT, EINVAL, ENODEV, ENOENT, ENOTTY};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::abi::{self, halves};

use crate::kernel::{Calls, Handle, Kernel, Request, Transfer};
use crate::regions::{DDR, HBM};

/// Queue pairs that the driver has at most.
const PAIRS: u32 = 256;
/// Bytes of the host's page in the model.
const PAGE: u64 = 4096;

/// How a call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The call fails with this error number. A transfer has moved some of its bytes then, and goes on.
    Fails(i32),
    /// A transfer returns fewer bytes than were asked for, and goes on.
    Short,
    /// A transfer returns more bytes than were asked for.
    Excess,
    /// A transfer does not return before its queue pair is stopped.
    Hangs,
    /// The card is gone: this call and all later ones fail with ENODEV, and nothing moves any more.
    Gone,
}

/// Decides what goes wrong with a call.
pub type Script = dyn FnMut(Request) -> Option<Fault> + Send;

/// A version of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    /// Bytes of the structure of INFO.
    pub info: u32,
    /// Bits of capabilities in INFO.
    pub caps: u32,
    /// Bytes of the structure of QPAIR_ADD, which are part of its number.
    pub pair_add: u32,
    /// The driver allocates buffers.
    pub buffers: bool,
    /// The hint of BUF_CREATE.
    pub hint: u32,
    /// The granule of BUF_CREATE.
    pub granule: u32,
    /// Most transfers that are io_uring commands at the same time; 0 for none.
    pub commands: usize,
}

impl Version {
    /// The newest version that is known.
    pub const KNOWN: Self =
        Self { info: 52, caps: 0, pair_add: 36, buffers: true, hint: abi::HINT_V80, granule: PAGE as u32, commands: 0 };
}

/// A file of the driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileId(u64);

/// The answer to a call.
#[derive(Debug)]
pub enum Answer {
    /// A number.
    Number(u64),
    /// A new file, which the caller gets.
    File(FileId, OwnedFd),
}

/// Counts of calls and bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Calls by name.
    pub calls: BTreeMap<&'static str, u64>,
    /// Bytes moved by each memory channel, 1 and 2.
    pub channels: BTreeMap<u32, u64>,
    /// Bytes moved out of or into buffers of at most 16 pages, which are those of the queues.
    pub small: u64,
    /// Buffers that exist, and existed at most.
    pub buffers: (u64, u64),
    /// Sizes of the rings, to the card, from it and for completions, of each queue pair that was added.
    pub rings: Vec<[u32; 3]>,
}

/// A model of the driver. Clones are the same one.
#[derive(Clone)]
pub struct DriverModel(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    /// A queue pair was stopped.
    stopped: Condvar,
}

struct State {
    version: Version,
    script: Box<Script>,
    barrier: Box<dyn FnMut() -> Option<Arc<Barrier>> + Send>,
    files: BTreeMap<FileId, Kind>,
    pairs: BTreeMap<u32, PairState>,
    memory: File,
    going_on: Vec<GoingOn>,
    counts: Counts,
    violations: Vec<String>,
    gone: bool,
    next: u64,
}

enum Kind {
    Node,
    Pairs(Vec<u32>),
    Buffer { file: File, len: u64 },
}

struct PairState {
    directions: u32,
    channel: u32,
    running: bool,
}

/// A transfer that the driver gave up and the card did not.
struct GoingOn {
    pair: u32,
    buffer: FileId,
}

/// A part of a transfer that was checked.
struct Moved {
    pair: u32,
    direction: u32,
    buffer: FileId,
    offset: u64,
    place: u64,
    len: u64,
}

impl DriverModel {
    /// A card with empty memory.
    ///
    /// # Errors
    /// The kernel's, when it has no memory.
    pub fn new(version: Version) -> io::Result<Self> {
        let memory = File::from(memfd_create("slash-card", MemfdFlags::CLOEXEC)?);
        memory.set_len(DDR.1 + HBM.1)?;
        let state = State {
            version,
            script: Box::new(|_| None),
            barrier: Box::new(|| None),
            files: BTreeMap::new(),
            pairs: BTreeMap::new(),
            memory,
            going_on: Vec::new(),
            counts: Counts::default(),
            violations: Vec::new(),
            gone: false,
            next: 1,
        };
        Ok(Self(Arc::new(Inner { state: Mutex::new(state), stopped: Condvar::new() })))
    }

    /// The same, and from now on `script` decides what goes wrong.
    pub fn fail(&self, script: impl FnMut(Request) -> Option<Fault> + Send + 'static) {
        self.lock().script = Box::new(script);
    }

    /// From now on each transfer waits at the barrier that `barrier` gives, if any, before it is looked at.
    pub fn before_transfers(&self, barrier: impl FnMut() -> Option<Arc<Barrier>> + Send + 'static) {
        self.lock().barrier = Box::new(barrier);
    }

    /// The driver's calls within this process.
    pub fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::new(self.clone())
    }

    /// Opens the node for this process.
    ///
    /// # Errors
    /// The kernel's.
    pub fn node(&self) -> io::Result<Handle> {
        let (id, file) = self.open_node()?;
        Ok(self.handle(id, file))
    }

    /// Opens the node for another process.
    ///
    /// # Errors
    /// The kernel's; ENODEV once the card is gone.
    pub fn open_node(&self) -> io::Result<(FileId, OwnedFd)> {
        let mut state = self.lock();
        match state.gone {
            true => Err(io::Error::from_raw_os_error(ENODEV)),
            false => state.file("slash-ctl", |_| Kind::Node),
        }
    }

    /// Closes a file, as its last owner does.
    pub fn close(&self, id: FileId) {
        let mut state = self.lock();
        if state.going_on.iter().any(|g| g.buffer == id) {
            state.violations.push(format!("buffer {id:?} was closed while the card used it"));
            state.going_on.retain(|g| g.buffer != id);
        }
        if matches!(state.files.remove(&id), Some(Kind::Buffer { .. })) {
            state.counts.buffers.0 -= 1;
        }
    }

    /// Closes the buffers that another process has no longer.
    pub fn close_buffers(&self, has: impl Fn(FileId) -> bool) {
        let state = self.lock();
        let buffers = state.files.iter().filter(|(id, kind)| matches!(kind, Kind::Buffer { .. }) && !has(**id));
        let closed: Vec<FileId> = buffers.map(|(id, _)| *id).collect();
        drop(state);
        closed.into_iter().for_each(|id| self.close(id));
    }

    /// True while the card goes on with a transfer that the driver gave up.
    pub fn goes_on(&self) -> bool {
        !self.lock().going_on.is_empty()
    }

    /// Buffers that were closed too early, in words.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Counts of calls and bytes.
    pub fn counts(&self) -> Counts {
        self.lock().counts.clone()
    }

    /// Queue pairs that were added and not deleted.
    pub fn pairs(&self) -> usize {
        self.lock().pairs.len()
    }

    /// Reads the card's memory.
    ///
    /// # Panics
    /// When there is none at the address.
    pub fn peek(&self, at: u64, into: &mut [u8]) {
        let place = place(at, into.len() as u64).expect("card memory");
        self.lock().memory.read_exact_at(into, place).expect("a memfd");
    }

    /// Writes the card's memory.
    ///
    /// # Panics
    /// When there is none at the address.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        let place = place(at, bytes.len() as u64).expect("card memory");
        self.lock().memory.write_all_at(bytes, place).expect("a memfd");
    }

    /// Answers an ioctl. `argument` is as much as the caller can read of its argument, at least as long as that says;
    /// `file_of` gives the files of the caller's descriptors.
    ///
    /// # Errors
    /// The error number.
    pub fn answer(
        &self,
        on: FileId,
        number: u32,
        argument: &mut [u8],
        file_of: &dyn Fn(i32) -> Option<FileId>,
    ) -> Result<Answer, i32> {
        let mut state = self.lock();
        let request = state.request(on, number)?;
        if request == Request::Transfer
            && let Some(barrier) = (state.barrier)()
        {
            drop(state);
            barrier.wait();
            state = self.lock();
        }
        *state.counts.calls.entry(request.name()).or_default() += 1;
        if state.gone {
            return Err(ENODEV);
        }
        let fault = (state.script)(request);
        match fault {
            Some(Fault::Gone) => {
                state.gone = true;
                state.going_on.clear();
                return Err(ENODEV);
            }
            Some(Fault::Fails(errno)) if request != Request::Transfer => return Err(errno),
            _ => {}
        }
        let size = word(argument, 0).ok_or(EFAULT)?;
        let least = match request {
            Request::Info => 4,
            Request::PairAdd => 28,
            Request::PairOp | Request::PairFile => 12,
            Request::BufferCreate => 16,
            Request::Transfer => 8,
        };
        if size < least {
            return Err(EINVAL);
        }
        // Fields that only the caller's structure has are cleared, fields that it lacks are zero.
        let ours = match request {
            Request::Info => state.version.info as usize,
            other => other.bytes(),
        };
        let given = argument.get(..size as usize).ok_or(EFAULT)?;
        let mut bytes = vec![0; ours];
        let common = given.len().min(ours);
        bytes[..common].copy_from_slice(&given[..common]);
        let answer = match request {
            Request::Info => state.info(&mut bytes),
            Request::PairAdd => state.pair_add(&mut bytes),
            Request::PairOp => state.pair_op(&bytes),
            Request::PairFile => state.pair_file(&bytes),
            Request::BufferCreate => state.buffer_create(&mut bytes),
            Request::Transfer => {
                let parts = state.parts(on, &bytes, file_of)?;
                if fault == Some(Fault::Hangs) {
                    state.going_on.extend(parts.iter().map(|p| GoingOn { pair: p.pair, buffer: p.buffer }));
                    let runs = |s: &mut State| !s.gone && parts.iter().any(|p| s.runs(p.pair));
                    drop(self.0.stopped.wait_while(state, runs).unwrap_or_else(PoisonError::into_inner));
                    return Err(libc::ECANCELED);
                }
                return state.transfer(&parts, fault).map(Answer::Number);
            }
        }?;
        if request == Request::PairOp {
            self.0.stopped.notify_all();
        }
        let len = (ours as u32).to_ne_bytes();
        bytes[..4].copy_from_slice(&len);
        argument[..size as usize].fill(0);
        argument[..common].copy_from_slice(&bytes[..common]);
        Ok(answer)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self, id: FileId, file: OwnedFd) -> Handle {
        Handle::of_model(Watched { file, id, model: self.clone() })
    }

    /// As [`DriverModel::answer`] for the words of this process.
    fn ioctl(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Answer> {
        *argument.first_mut().ok_or(io::ErrorKind::InvalidInput)? = argument.len() as u32 * 4;
        let mut bytes: Vec<u8> = argument.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let answer = match id_of(on.as_fd().as_raw_fd()) {
            Some(on) => self.answer(on, request.number(), &mut bytes, &id_of),
            None => Err(ENOTTY),
        };
        for (word, four) in argument.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes(four.try_into().unwrap_or_default());
        }
        answer.map_err(io::Error::from_raw_os_error)
    }
}

/// The file behind a descriptor of this process, by the name of its memfd.
fn id_of(fd: i32) -> Option<FileId> {
    FileId::of_link(&std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?.to_string_lossy())
}

impl FileId {
    /// The file of a link of `/proc/PID/fd`.
    pub fn of_link(link: &str) -> Option<Self> {
        let name = link.strip_prefix("/memfd:slash-")?.strip_suffix(" (deleted)")?;
        name.rsplit('-').next()?.parse().ok().map(Self)
    }
}

impl Kernel for DriverModel {
    fn call(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<u64> {
        match self.ioctl(on, request, argument)? {
            Answer::Number(n) => Ok(n),
            Answer::File(..) => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn open(&self, on: &Handle, request: Request, argument: &mut [u32]) -> io::Result<Handle> {
        match self.ioctl(on, request, argument)? {
            Answer::File(id, file) => Ok(self.handle(id, file)),
            Answer::Number(_) => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn calls(&self, file: &Arc<Handle>) -> Option<Box<dyn Calls>> {
        let depth = self.lock().version.commands;
        let (ends, ended) = mpsc::channel();
        let (model, file) = (self.clone(), file.clone());
        (depth > 0).then(|| Box::new(Commands { model, file, depth, ends, ended }) as _)
    }
}

/// A file of the driver in this process, which the driver is told of when it is closed.
struct Watched {
    file: OwnedFd,
    id: FileId,
    model: DriverModel,
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.model.close(self.id);
    }
}

/// Transfers in flight, each of which has a thread.
struct Commands {
    model: DriverModel,
    file: Arc<Handle>,
    depth: usize,
    ends: mpsc::Sender<(u64, io::Result<u64>)>,
    ended: mpsc::Receiver<(u64, io::Result<u64>)>,
}

impl Calls for Commands {
    fn depth(&self) -> usize {
        self.depth
    }

    fn begin(&mut self, number: u64, mut argument: Transfer) {
        let (model, file, ends) = (self.model.clone(), self.file.clone(), self.ends.clone());
        std::thread::spawn(move || {
            let result = model.call(&file, Request::Transfer, &mut argument);
            // The queue may be gone.
            let _ = ends.send((number, result));
        });
    }

    fn end(&mut self, timeout: Option<Duration>) -> io::Result<Option<(u64, io::Result<u64>)>> {
        match timeout {
            Some(timeout) => Ok(self.ended.recv_timeout(timeout).ok()),
            None => Ok(self.ended.recv().ok()),
        }
    }
}

/// The place of card memory in its file.
fn place(at: u64, len: u64) -> Option<u64> {
    [(DDR, 0), (HBM, DDR.1)].iter().find_map(|((first, whole), start)| {
        let offset = at.checked_sub(*first)?;
        (offset.checked_add(len)? <= *whole).then_some(start + offset)
    })
}

/// A word of a structure.
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(4 * at..4 * at + 4)?.try_into().ok()?))
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(place) = bytes.get_mut(4 * at..4 * at + 4) {
        place.copy_from_slice(&value.to_ne_bytes());
    }
}

/// A 64-bit field of a structure.
fn wide(bytes: &[u8], at: usize) -> u64 {
    bytes.get(4 * at..4 * at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

impl State {
    /// The call of a number, as the file's driver knows it.
    fn request(&self, on: FileId, number: u32) -> Result<Request, i32> {
        let all = [
            Request::Info,
            Request::PairAdd,
            Request::PairOp,
            Request::PairFile,
            Request::BufferCreate,
            Request::Transfer,
        ];
        // QPAIR_ADD's number has the length of the structure of its version.
        let numbered = |r: &Request| match r {
            Request::PairAdd => (r.number() & !(0x3fff << 16)) | self.version.pair_add << 16,
            r => r.number(),
        };
        let request = all.into_iter().find(|r| numbered(r) == number).ok_or(ENOTTY)?;
        let known = match (self.files.get(&on).ok_or(EBADF)?, request) {
            (_, Request::BufferCreate) => self.version.buffers,
            (Kind::Node, Request::Transfer) => false,
            (Kind::Node, _) | (Kind::Pairs(_), Request::Transfer) => true,
            _ => false,
        };
        if matches!(self.files.get(&on), Some(Kind::Buffer { .. })) || !known { Err(ENOTTY) } else { Ok(request) }
    }

    fn file(&mut self, name: &str, kind: impl FnOnce(File) -> Kind) -> io::Result<(FileId, OwnedFd)> {
        let id = FileId(self.next);
        let file = memfd_create(format!("{name}-{}", id.0), MemfdFlags::CLOEXEC)?;
        self.next += 1;
        let kind = kind(File::from(file.try_clone()?));
        self.files.insert(id, kind);
        Ok((id, file))
    }

    fn info(&mut self, bytes: &mut [u8]) -> Result<Answer, i32> {
        bytes.fill(0);
        put(bytes, 4, self.version.caps);
        let bdf = b"0000:61:00.1";
        if let Some(place) = bytes.get_mut(20..20 + bdf.len()) {
            place.copy_from_slice(bdf);
        }
        Ok(Answer::Number(0))
    }

    fn pair_add(&mut self, bytes: &mut [u8]) -> Result<Answer, i32> {
        let [mode, directions, channel, h2c, c2h, cmpt] = [1, 2, 3, 4, 5, 6].map(|at| word(bytes, at).unwrap_or(0));
        let aperture = word(bytes, 8).unwrap_or(0);
        if directions == 0 || directions & !7 != 0 || mode > 1 || channel > 2 {
            return Err(EINVAL);
        }
        if [h2c, c2h, cmpt].iter().any(|ring| *ring >= abi::RING_SIZES) || aperture & aperture.wrapping_sub(1) != 0 {
            return Err(EINVAL);
        }
        let qid = (0..PAIRS).find(|qid| !self.pairs.contains_key(qid)).ok_or(EBUSY)?;
        let channel = if channel == 0 { (qid & 1) + 1 } else { channel };
        self.pairs.insert(qid, PairState { directions, channel, running: false });
        self.counts.rings.push([h2c, c2h, cmpt]);
        put(bytes, abi::ADD_QID, qid);
        Ok(Answer::Number(0))
    }

    fn pair_op(&mut self, bytes: &[u8]) -> Result<Answer, i32> {
        let [qid, op] = [1, 2].map(|at| word(bytes, at).unwrap_or(0));
        if op > 2 {
            return Err(EINVAL);
        }
        let pair = self.pairs.get_mut(&qid).ok_or(ENOENT)?;
        match op {
            0 if pair.running => return Err(EINVAL),
            0 => pair.running = true,
            1 if !pair.running => return Err(EINVAL),
            1 => pair.running = false,
            _ => drop(self.pairs.remove(&qid)),
        }
        if op > 0 {
            self.going_on.retain(|g| g.pair != qid);
        }
        Ok(Answer::Number(0))
    }

    fn pair_file(&mut self, bytes: &[u8]) -> Result<Answer, i32> {
        let [qid, flags, count] = [1, 2, 3].map(|at| word(bytes, at).unwrap_or(0));
        if flags & !abi::CLOEXEC != 0 || count as usize > abi::MAX_RANGES {
            return Err(EINVAL);
        }
        let ids: Vec<u32> = match count {
            0 => vec![qid],
            n => (0..n as usize).map(|i| word(bytes, 4 + i).unwrap_or(0)).collect(),
        };
        if ids.iter().any(|id| !self.pairs.contains_key(id)) {
            return Err(ENOENT);
        }
        self.file("slash-pair", |_| Kind::Pairs(ids)).map(|(id, file)| Answer::File(id, file)).map_err(errno)
    }

    fn buffer_create(&mut self, bytes: &mut [u8]) -> Result<Answer, i32> {
        let (flags, len) = (word(bytes, 1).unwrap_or(0), wide(bytes, 2));
        if flags & !abi::CLOEXEC != 0 || len == 0 || !len.is_multiple_of(PAGE) {
            return Err(EINVAL);
        }
        let (id, file) = self.file("slash-buf", |file| Kind::Buffer { file, len }).map_err(errno)?;
        let Some(Kind::Buffer { file: ours, .. }) = self.files.get(&id) else { return Err(EBADF) };
        if let Err(e) = ours.set_len(len) {
            self.files.remove(&id);
            return Err(errno(e));
        }
        let (now, most) = self.counts.buffers;
        self.counts.buffers = (now + 1, most.max(now + 1));
        put(bytes, abi::BUF_GRANULE, self.version.granule);
        put(bytes, abi::BUF_GRANULE + 1, self.version.hint);
        Ok(Answer::File(id, file))
    }

    fn runs(&self, pair: u32) -> bool {
        self.pairs.get(&pair).is_some_and(|p| p.running)
    }

    /// Checks the parts of a transfer.
    fn parts(&self, on: FileId, bytes: &[u8], file_of: &dyn Fn(i32) -> Option<FileId>) -> Result<Vec<Moved>, i32> {
        let Some(Kind::Pairs(pairs)) = self.files.get(&on) else { return Err(ENOTTY) };
        let count = word(bytes, 1).unwrap_or(0) as usize;
        if count == 0 || count > abi::MAX_RANGES {
            return Err(EINVAL);
        }
        let part = |i: usize| {
            let at = 2 + i * abi::RANGE_WORDS;
            let [index, direction, fd] = [0, 1, 2].map(|w| word(bytes, at + w).unwrap_or(0));
            let [offset, address, len] = [4, 6, 8].map(|w| wide(bytes, at + w));
            let pair = *pairs.get(index as usize).ok_or(EINVAL)?;
            if !(1..=2).contains(&direction) || len == 0 || len > u32::MAX.into() {
                return Err(EINVAL);
            }
            let buffer = file_of(fd as i32).ok_or(EBADF)?;
            let Some(Kind::Buffer { len: whole, .. }) = self.files.get(&buffer) else { return Err(EINVAL) };
            if !offset.is_multiple_of(PAGE) || offset.checked_add(len).is_none_or(|end| end > *whole) {
                return Err(EINVAL);
            }
            let state = self.pairs.get(&pair).ok_or(ENODEV)?;
            if state.directions & direction == 0 || !state.running {
                return Err(ENODEV);
            }
            // The hardware refuses an address where nothing is; the driver does not look.
            let place = place(address, len).ok_or(libc::EIO)?;
            Ok(Moved { pair, direction, buffer, offset, place, len })
        };
        (0..count).map(part).collect()
    }

    fn transfer(&mut self, parts: &[Moved], fault: Option<Fault>) -> Result<u64, i32> {
        let mut total = 0;
        for part in parts {
            // A transfer that fails has moved some of its bytes.
            let len = if fault.is_none() { part.len } else { part.len / 2 };
            self.copy(part, len).map_err(errno)?;
            total += part.len;
            if let Some(pair) = self.pairs.get(&part.pair) {
                *self.counts.channels.entry(pair.channel).or_default() += part.len;
            }
            if let Some(Kind::Buffer { len, .. }) = self.files.get(&part.buffer)
                && *len <= 16 * PAGE
            {
                self.counts.small += part.len;
            }
        }
        if fault.is_some() {
            self.going_on.extend(parts.iter().map(|p| GoingOn { pair: p.pair, buffer: p.buffer }));
        }
        match fault {
            None | Some(Fault::Gone | Fault::Hangs) => Ok(total),
            Some(Fault::Fails(errno)) => Err(errno),
            Some(Fault::Short) => Ok(total - 1),
            Some(Fault::Excess) => Ok(total + 1),
        }
    }

    fn copy(&self, part: &Moved, len: u64) -> io::Result<()> {
        let Some(Kind::Buffer { file, .. }) = self.files.get(&part.buffer) else { return Ok(()) };
        let mut bytes = vec![0; len.min(1 << 20) as usize];
        let mut done = 0;
        while done < len {
            let some = &mut bytes[..(len - done).min(1 << 20) as usize];
            let (host, card) = ((file, part.offset + done), (&self.memory, part.place + done));
            let (from, to) = if part.direction == 1 { (host, card) } else { (card, host) };
            from.0.read_exact_at(some, from.1)?;
            to.0.write_all_at(some, to.1)?;
            done += some.len() as u64;
        }
        Ok(())
    }
}

fn errno(error: io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// The words of a 64-bit field, for tests that make arguments by hand.
pub fn words_of(value: u64) -> [u32; 2] {
    halves(value)
}
