//! An open card: the driver's calls as methods.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;
use crate::abi::{self, PairOp, Part};
use crate::buffers::Buffers;
use crate::kernel::{Handle, Kernel, Request};

/// The driver's description of itself and of the card.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Info {
    /// Bytes of the structure that the driver has: 20, or, since July 2026, 52.
    pub size: u32,
    /// Bits of abilities; no version sets any.
    pub caps: u32,
    /// The PCI address of the card's DMA function; `None` for drivers that do not say.
    pub pci: Option<String>,
}

/// An open node of the driver.
pub(crate) struct Card {
    kernel: Arc<dyn Kernel>,
    node: Arc<Handle>,
    pub buffers: Arc<Buffers>,
}

impl Card {
    pub(crate) fn new(kernel: Arc<dyn Kernel>, node: Handle) -> Self {
        let node = Arc::new(node);
        Self { buffers: Arc::new(Buffers::new(&kernel, &node)), kernel, node }
    }

    /// Asks the driver what it is; an unknown version is refused.
    pub(crate) fn info(&self) -> Result<Info, Error> {
        let mut words = [0; abi::INFO_WORDS];
        let call = self.kernel.call(&self.node, Request::Info, &mut words);
        call.map_err(|e| Error::call(Request::Info, e))?;
        let [size, _, _, _, caps] = [0, 1, 2, 3, 4].map(|i| words[i]);
        if !abi::INFO_SIZES.contains(&size) {
            return Err(Error::Version { found: format!("INFO has {size} bytes, caps {caps:#x}") });
        }
        if caps != 0 {
            return Err(Error::Version { found: format!("INFO of {size} bytes has unknown caps {caps:#x}") });
        }
        let (first, count) = abi::INFO_BDF;
        let bytes: Vec<u8> = words[first..first + count].iter().flat_map(|w| w.to_ne_bytes()).collect();
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
        // The text comes from the driver and is printed.
        let pci = Some(text).filter(|t| !t.is_empty() && t.chars().all(|c| c.is_ascii_graphic()));
        Ok(Info { size, caps, pci })
    }

    /// Adds and starts a queue pair for each of these memory channels, and opens one file for all of them.
    pub(crate) fn pairs(self: &Arc<Self>, channels: &[u32], ring: u32) -> Result<Vec<Pair>, Error> {
        // Each is undone on drop, should a later call fail.
        let mut added: Vec<Added> = Vec::new();
        for channel in channels {
            let mut words = [0; abi::ADD_WORDS];
            words[1..7].copy_from_slice(&[abi::MODE_MM, abi::DIR_BOTH, *channel, ring, ring, ring]);
            let call = self.kernel.call(&self.node, Request::PairAdd, &mut words);
            call.map_err(|e| Error::call(Request::PairAdd, e))?;
            let pair = Added { card: self.clone(), qid: words[abi::ADD_QID], state: Mutex::new(State::Stopped) };
            if added.iter().any(|other| other.qid == pair.qid) {
                let what = format!("queue pair {} twice", pair.qid);
                return Err(Error::Answer { call: Request::PairAdd.name(), what });
            }
            pair.start().map_err(|e| Error::call(Request::PairOp, e))?;
            added.push(pair);
        }
        let mut words = [0; abi::FD_WORDS];
        (words[2], words[3]) = (abi::CLOEXEC, added.len() as u32);
        for (word, pair) in words[4..].iter_mut().zip(&added) {
            *word = pair.qid;
        }
        let file = self.kernel.open(&self.node, Request::PairFile, &mut words);
        let file = Arc::new(file.map_err(|e| Error::call(Request::PairFile, e))?);
        let pair = |(index, added)| Pair { added, index: index as u32, file: file.clone() };
        Ok(added.into_iter().enumerate().map(pair).collect())
    }
}

/// The state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Running,
    Stopped,
}

/// A queue pair that was added. Dropping it stops and deletes it.
struct Added {
    card: Arc<Card>,
    qid: u32,
    state: Mutex<State>,
}

impl Added {
    fn op(&self, op: PairOp) -> io::Result<()> {
        let mut words = [0, self.qid, op as u32];
        self.card.kernel.call(&self.card.node, Request::PairOp, &mut words).map(drop)
    }

    fn change(&self, to: State, op: PairOp) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state != to {
            self.op(op)?;
            *state = to;
        }
        Ok(())
    }

    fn start(&self) -> io::Result<()> {
        self.change(State::Running, PairOp::Start)
    }

    fn stop(&self) -> io::Result<()> {
        self.change(State::Stopped, PairOp::Stop)
    }
}

impl Drop for Added {
    fn drop(&mut self) {
        // The driver would keep the pair until the module is unloaded; if it refuses, nothing else can be done.
        let _ = self.stop();
        let _ = self.op(PairOp::Delete);
    }
}

/// A queue pair that moves bytes.
pub(crate) struct Pair {
    added: Added,
    /// Which of the pairs behind `file`.
    pub index: u32,
    file: Arc<Handle>,
}

impl Pair {
    /// Moves the parts, two at most, and returns once all have ended, or the driver gave up.
    pub(crate) fn transfer(&self, parts: &[Part]) -> io::Result<u64> {
        let mut words = [0; abi::TRANSFER_WORDS];
        words[1] = parts.len() as u32;
        for (place, part) in words[2..].chunks_exact_mut(abi::PART_WORDS).zip(parts) {
            place.copy_from_slice(&part.words());
        }
        self.added.card.kernel.call(&self.file, Request::Transfer, &mut words)
    }

    /// Starts it, unless it runs.
    pub(crate) fn start(&self) -> io::Result<()> {
        self.added.start()
    }

    /// Stops it, unless it was stopped: afterwards the card uses no buffer of earlier transfers.
    pub(crate) fn stop(&self) -> io::Result<()> {
        self.added.stop()
    }
}
