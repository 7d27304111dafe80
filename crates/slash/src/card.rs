//! An open card: the driver's calls as methods.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane_dma::lock;

use crate::Error;
use crate::abi::{self, PairOp};
use crate::buffers::Buffers;
use crate::kernel::{Calls, Handle, Kernel, Request, Transfer};

/// An open door to the driver: its node, or its daemon's socket.
pub(crate) struct Card {
    kernel: Arc<dyn Kernel>,
    door: Arc<Handle>,
}

impl Card {
    pub(crate) fn new(kernel: Arc<dyn Kernel>, door: Arc<Handle>) -> Self {
        Self { kernel, door }
    }

    /// Asks the driver what it is; an unknown version is refused. Gives the bytes of its answer (20, or, since July
    /// 2026, 52), and the PCI address of the card's DMA function, if it says.
    pub(crate) fn info(&self) -> Result<(u32, Option<String>), Error> {
        let mut words = [0; abi::INFO_WORDS];
        let call = self.kernel.call(&self.door, Request::Info, &mut words);
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
        Ok((size, pci))
    }

    /// Adds and starts a queue pair on a memory channel, and opens its file.
    pub(crate) fn pair(self: &Arc<Self>, channel: u32, ring: u32) -> Result<Pair, Error> {
        let mut words = [0; abi::ADD_WORDS];
        words[1..7].copy_from_slice(&[abi::MODE_MM, abi::DIR_BOTH, channel, ring, ring, ring]);
        let call = self.kernel.call(&self.door, Request::PairAdd, &mut words);
        call.map_err(|e| Error::call(Request::PairAdd, e))?;
        let qid = words[abi::ADD_QID];
        // Undone on drop, should a later call fail.
        let added = Added { card: self.clone(), qid, state: Mutex::new(State::Stopped) };
        added.start().map_err(|e| Error::call(Request::PairOp, e))?;
        let mut words = [0; abi::FD_WORDS];
        words[1..3].copy_from_slice(&[qid, abi::CLOEXEC]);
        let file = self.kernel.open(&self.door, Request::PairFile, &mut words);
        let file = Arc::new(file.map_err(|e| Error::call(Request::PairFile, e))?);
        Ok(Pair { added, file })
    }
}

/// How long libqdma waits for what the card has begun (QDMA_Q_PEND_LIST_COMPLETION_TIMEOUT), less a tick of its clock.
/// Then it forgets that and reports success, so a STOP that took longer proves nothing.
const FORGETS: Duration = Duration::from_millis(980);

/// The state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Running,
    Stopped,
    /// Stopped, but what the card had begun may go on.
    Doubtful,
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
        self.card.kernel.call(&self.card.door, Request::PairOp, &mut words).map(drop)
    }

    fn start(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if *state != State::Running {
            self.op(PairOp::Start)?;
            *state = State::Running;
        }
        Ok(())
    }

    fn stop(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if *state == State::Running {
            let begun = Instant::now();
            self.op(PairOp::Stop)?;
            *state = if begun.elapsed() < FORGETS { State::Stopped } else { State::Doubtful };
        }
        match *state {
            State::Doubtful => {
                Err(io::Error::other("the driver gave up waiting for transfers that the card had begun"))
            }
            _ => Ok(()),
        }
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
    file: Arc<Handle>,
}

impl Pair {
    /// The heap of buffers that this pair's file gives.
    pub(crate) fn buffers(&self) -> Buffers {
        Buffers::new(&self.added.card.kernel, &self.file)
    }

    /// Its transfers: in flight at the same time where the driver has that, else one after the other.
    pub(crate) fn calls(&self) -> Box<dyn Calls> {
        let kernel = &self.added.card.kernel;
        let one = || Blocking { kernel: kernel.clone(), file: self.file.clone(), begun: None };
        kernel.calls(&self.file).unwrap_or_else(|| Box::new(one()))
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

/// One call at a time, made when its end is waited for.
struct Blocking {
    kernel: Arc<dyn Kernel>,
    file: Arc<Handle>,
    begun: Option<(u64, Transfer)>,
}

impl Calls for Blocking {
    fn depth(&self) -> usize {
        1
    }

    fn begin(&mut self, number: u64, argument: Transfer) {
        self.begun = Some((number, argument));
    }

    fn end(&mut self, _: Option<Duration>) -> io::Result<Option<(u64, io::Result<u64>)>> {
        let Some((number, mut argument)) = self.begun.take() else { return Ok(None) };
        Ok(Some((number, self.kernel.call(&self.file, Request::Transfer, &mut argument))))
    }
}
