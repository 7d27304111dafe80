//! Serves the software card as a PCI device to another process, over vfio-user.

use std::fs;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane_card::regs;
use dmalane_dma::{SocketFile, lock};
use dmalane_iopt::X86_64_4Level;
use dmalane_sim::{CardConfig, CardMemory, SoftCard};
use dmalane_vfio_user::{ClientMemory, ClientPort, MappableFile, RegionSpec, ServeError, ServedDevice, serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::SocketType;
use thiserror::Error;

use crate::config_space::{Bar, COMMAND, COMMAND_MASTER, COMMAND_MEMORY, CONFIG_LEN, ConfigSpace};

/// Vendor and device number of the card. The vendor number is not assigned by PCI-SIG.
pub const CARD_PCI_ID: (u16, u16) = (0x4c44, 0x0001);

/// The regions besides those of the card: the table of MSI-X, and the configuration space.
const TABLE: u32 = 4;
const CONFIG: u32 = 7;
const TABLE_LEN: u64 = 4096;
const PENDING: u32 = 2048;
/// Offsets of the capability for MSI-X; of the capability "advanced features", with which a function of conventional
/// PCI is reset alone, and of its control and status.
const MSIX: u8 = 0x40;
const FEATURES: u8 = 0x50;
const FEATURES_CONTROL: usize = FEATURES as usize + 4;
const FEATURES_STATUS: usize = FEATURES as usize + 5;
const REGISTERS_LEN: u64 = 64 << 10;
/// Timeout of a reset.
const RESET_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the card cannot be served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CardServerError {
    /// The socket cannot be created.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// The path of the socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Accepting a client failed.
    #[error("cannot accept a client")]
    Accept(#[source] io::Error),
    /// The card cannot be created.
    #[error(transparent)]
    Card(#[from] dmalane_sim::Error),
}

/// Serves software cards at a socket, to one client at a time. Each client gets a new card, with empty memory.
///
/// QEMU from 10.1 on attaches it as `vfio-user-pci`; [`UserBus`](dmalane_vfio_user::UserBus) is a client in Rust.
/// Clients are not trusted: a bad message ends at most its own connection. Memory of a client is a memfd that is
/// sealed against shrinking, as QEMU's is, or it is read and written by messages.
pub struct CardServer {
    // Dropped before the socket is closed, so that its inode is not yet another's.
    file: SocketFile,
    listener: UnixListener,
    config: CardConfig,
}

type Card = SoftCard<ClientPort, X86_64_4Level>;

/// A client that has connected to a [`CardServer`].
pub struct CardClient<'a> {
    server: &'a CardServer,
    stream: UnixStream,
}

impl CardServer {
    /// Listens at a path, to which only this user may connect. A socket file that no process listens at is replaced.
    ///
    /// # Errors
    /// [`CardServerError::Listen`], also when another file is at the path; [`CardServerError::Card`] for an invalid
    /// configuration.
    pub fn bind(path: &Path, config: CardConfig) -> Result<Self, CardServerError> {
        // Check the configuration now, not when a client is waiting.
        drop(CardModel::new(config, &ClientMemory::new())?);
        let listen = |source: Errno| CardServerError::Listen { path: path.to_owned(), source: source.into() };
        let (listener, file) = SocketFile::bind(path, SocketType::STREAM, Mode::RUSR | Mode::WUSR).map_err(listen)?;
        rustix::net::listen(&listener, 16).map_err(listen)?;
        Ok(Self { file, listener: listener.into(), config })
    }

    /// Removes the file of the socket, unless another one has taken its path: for a program that exits without a drop.
    pub fn remove_socket(&self) {
        self.file.remove();
    }

    /// Waits for a client.
    ///
    /// # Errors
    /// [`CardServerError::Accept`].
    pub fn accept(&self) -> Result<CardClient<'_>, CardServerError> {
        let (stream, _) = self.listener.accept().map_err(CardServerError::Accept)?;
        Ok(CardClient { server: self, stream })
    }
}

impl CardClient<'_> {
    /// Serves the client until it disconnects. The inner result is that of the connection.
    ///
    /// # Errors
    /// [`CardServerError::Card`].
    pub fn serve(self) -> Result<Result<(), ServeError>, CardServerError> {
        let memory = ClientMemory::new();
        let mut model = CardModel::new(self.server.config, &memory)?;
        Ok(serve(self.stream, &mut model, &memory))
    }
}

/// The eventfds of a client, one for each channel.
#[derive(Clone)]
struct Events(Arc<Mutex<Vec<Vector>>>);

#[derive(Clone, Default)]
struct Vector {
    event: Option<Arc<OwnedFd>>,
    /// The eventfd to which a channel is writing.
    raising: Option<Arc<OwnedFd>>,
}

impl Events {
    /// Raises the interrupt of a channel.
    ///
    /// The write may block: `O_NONBLOCK` is a flag of the file, which the client shares and may clear at any time, and
    /// no other call raises an eventfd. So only a channel's worker calls this, without locks that the server needs, and
    /// [`Events::release`] unblocks it.
    fn raise(&self, channel: usize) {
        let event = lock(&self.0).get_mut(channel).and_then(|vector| {
            vector.raising = vector.event.clone();
            vector.raising.clone()
        });
        let Some(event) = event else { return };
        // A full eventfd is already readable for the client.
        if has_room(&event) {
            let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
        }
        if let Some(vector) = lock(&self.0).get_mut(channel) {
            vector.raising = None;
        }
    }

    /// Drains the full eventfds to which a channel may be writing; true while a channel may still be blocked. A client
    /// that reads its eventfds has no full ones.
    fn release(&self) -> bool {
        let raising: Vec<_> = lock(&self.0).iter().filter_map(|vector| vector.raising.clone()).collect();
        for event in raising.iter().filter(|event| !has_room(event)) {
            // Offset -1, since an eventfd has no position. This call never blocks, whatever the flag.
            let mut count = [0; 8];
            let _ = rustix::io::preadv2(event, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
        }
        !raising.is_empty()
    }
}

/// True when a write to an eventfd would not block now.
fn has_room(event: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(event, PollFlags::OUT)], Some(&Timespec::default())).is_ok_and(|n| n > 0)
}

/// True for an eventfd: writes to other files could block.
fn is_eventfd(file: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::read_link(link).is_ok_and(|what| what.as_os_str() == "anon_inode:[eventfd]")
}

struct CardModel {
    card: Arc<Card>,
    memory: ClientMemory,
    events: Events,
    /// Bus mastering: without it the card neither accesses memory nor raises interrupts, which are writes too.
    bus_master: Arc<AtomicBool>,
    memory_len: u64,
    config: ConfigSpace,
    table: Box<[u8; TABLE_LEN as usize]>,
}

impl Drop for CardModel {
    /// Unblocks the workers, which the card's drop then joins.
    fn drop(&mut self) {
        lock(&self.events.0).iter_mut().for_each(|vector| vector.event = None);
        while self.events.release() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl CardModel {
    fn new(config: CardConfig, memory: &ClientMemory) -> Result<Self, dmalane_sim::Error> {
        let channels = config.channels.min(regs::MAX_CHANNELS);
        let events = Events(Arc::new(Mutex::new(vec![Vector::default(); channels as usize])));
        let bus_master = Arc::<AtomicBool>::default();
        let interrupt = {
            let (events, bus_master) = (events.clone(), bus_master.clone());
            move |channel: usize| {
                if bus_master.load(Ordering::SeqCst) {
                    events.raise(channel)
                }
            }
        };
        memory.set_bus_master(false);
        // Compact, since HBM at its usual address would need a BAR of 512 GiB.
        let compact = CardMemory::compact(config.ddr, config.hbm)?;
        let threads = (config.channels, config.workers);
        let card = Arc::new(SoftCard::new(compact, threads, || memory.port(), interrupt)?);
        let end = card.memory().hbm().last().bits().max(card.memory().ddr().last().bits());
        // The length of a BAR is a power of two.
        let memory_len = (end + 1).next_power_of_two();
        Ok(Self {
            card,
            memory: memory.clone(),
            events,
            bus_master,
            memory_len,
            config: config_space(config.channels, memory_len),
            table: Box::new([0; TABLE_LEN as usize]),
        })
    }

    /// True while the card has not yet stopped after a request to stop.
    fn is_stopping(&self) -> bool {
        self.card.read32(regs::BAR_REGISTERS, regs::CONTROL) != Some(0)
    }

    /// True when the card responds at this region: at BARs only as the command register says.
    fn responds(&self, region: u32) -> bool {
        region == CONFIG || self.config.byte(COMMAND) & COMMAND_MEMORY != 0
    }

    /// Reads registers, as words of 32 bits.
    fn words(&self, bar: u8, offset: u64, into: &mut [u8]) -> bool {
        into.len().is_multiple_of(4)
            && into.chunks_exact_mut(4).zip((offset..).step_by(4)).all(|(word, at)| {
                self.card.read32(bar, at).map(|value| word.copy_from_slice(&value.to_le_bytes())).is_some()
            })
    }
}

impl ServedDevice for CardModel {
    fn region(&self, index: u32) -> RegionSpec {
        let len = match index {
            i if i == u32::from(regs::BAR_REGISTERS) => REGISTERS_LEN,
            i if i == u32::from(regs::BAR_MEMORY) => self.memory_len,
            TABLE => TABLE_LEN,
            CONFIG => CONFIG_LEN as u64,
            _ => 0,
        };
        RegionSpec { len, accessible: len > 0 }
    }

    /// The card's memory. A client's writes to the mapping have the same effect as a processor's writes through a BAR,
    /// but for the command register: a client unmaps what it disables.
    fn mappable(&self, region: u32) -> Option<MappableFile<'_>> {
        let lent = (region == u32::from(regs::BAR_MEMORY)).then(|| self.card.memory().lend())?;
        lent.map(|(file, areas)| MappableFile { file, areas: areas.to_vec() })
    }

    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> bool {
        let at = offset as usize..(offset as usize).saturating_add(into.len());
        match region {
            _ if !self.responds(region) => return false,
            CONFIG => {
                // A reset may take longer than its request.
                self.config.put(FEATURES_STATUS, &[u8::from(self.is_stopping())]);
                self.config.read(at.start, into);
            }
            TABLE => into.copy_from_slice(&self.table[at]),
            r if r == u32::from(regs::BAR_MEMORY) => {
                return self.card.memory().read(dmalane_addr::CardAddr::new(offset), into).is_ok();
            }
            _ => return self.words(regs::BAR_REGISTERS, offset, into),
        }
        true
    }

    fn write(&mut self, region: u32, offset: u64, from: &[u8]) -> bool {
        let at = offset as usize..(offset as usize).saturating_add(from.len());
        match region {
            _ if !self.responds(region) => false,
            CONFIG => {
                self.config.write(at.start, from);
                if at.contains(&COMMAND) {
                    let master = self.config.byte(COMMAND) & COMMAND_MASTER != 0;
                    self.bus_master.store(master, Ordering::SeqCst);
                    self.memory.set_bus_master(master);
                }
                if at.contains(&FEATURES_CONTROL) && from[FEATURES_CONTROL - at.start] & 1 == 1 {
                    let _ = self.reset();
                }
                true
            }
            TABLE => {
                self.table[at].copy_from_slice(from);
                true
            }
            r if r == u32::from(regs::BAR_MEMORY) => {
                self.card.memory().write(dmalane_addr::CardAddr::new(offset), from).is_ok()
            }
            _ => {
                let (words, rest) = from.as_chunks::<4>();
                rest.is_empty()
                    && words.iter().zip((offset..).step_by(4)).all(|(word, at)| {
                        self.card.write32(regs::BAR_REGISTERS, at, u32::from_le_bytes(*word)).is_some()
                    })
            }
        }
    }

    fn interrupts(&self) -> u32 {
        lock(&self.events.0).len() as u32
    }

    fn set_interrupts(&mut self, first: u32, events: Vec<Option<OwnedFd>>) {
        let mut vectors = lock(&self.events.0);
        for (vector, event) in vectors.iter_mut().skip(first as usize).zip(events) {
            vector.event = event.filter(is_eventfd).map(Arc::new);
        }
    }

    /// Leaves the configuration space as it is: for VFIO, a reset restores it.
    fn reset(&mut self) -> bool {
        let _ = self.card.write32(regs::BAR_REGISTERS, regs::CONTROL, 1);
        let began = Instant::now();
        while self.is_stopping() {
            if began.elapsed() >= RESET_TIMEOUT {
                return false;
            }
            self.events.release();
            self.card.progress();
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }
}

/// The configuration space of a processing accelerator, with the capabilities for MSI-X and for a reset of this
/// function alone.
fn config_space(vectors: u32, memory_len: u64) -> ConfigSpace {
    let bars = [
        Bar::Bits32(REGISTERS_LEN as u32),
        Bar::None,
        Bar::Bits64(memory_len),
        Bar::None,
        Bar::Bits32(TABLE_LEN as u32),
        Bar::None,
    ];
    let mut space = ConfigSpace::new(CARD_PCI_ID, 0x12_0000, bars);
    // Advanced features: six bytes, with the pending bit and the reset.
    space.add_capability(FEATURES, 0x13, &[6, 0b11]);
    // MSI-X: one entry for each channel (the field is their number less one), the table and the pending bits in BAR 4.
    // The bits that enable and mask it are the client's: it decides who gets its eventfds.
    let control = vectors.clamp(1, 2048) as u16 - 1;
    let places = [control.to_le_bytes().as_slice(), &TABLE.to_le_bytes(), &(PENDING | TABLE).to_le_bytes()].concat();
    space.add_capability(MSIX, 0x11, &places);
    space.allow(usize::from(MSIX) + 2, &0xc000_u16.to_le_bytes());
    space
}

#[cfg(test)]
mod tests {
    use dmalane_sim::Workers;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// The client fills an eventfd and clears its flag between the poll and the write.
    #[test]
    fn a_full_eventfd_does_not_block_the_card() {
        for flags in [EventfdFlags::empty(), EventfdFlags::SEMAPHORE] {
            let config = CardConfig { ddr: 2 << 20, hbm: 4 << 20, channels: 1, workers: Workers::PerChannel };
            let mut model = CardModel::new(config, &ClientMemory::new()).unwrap();
            let full = eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            model.set_interrupts(0, vec![Some(full.try_clone().unwrap())]);
            model.events.raise(0);
            let events = model.events.clone();
            let event = lock(&events.0)[0].event.clone().unwrap();
            lock(&events.0)[0].raising = Some(event.clone());
            let worker = std::thread::spawn(move || {
                rustix::io::write(&*event, &1u64.to_ne_bytes()).unwrap();
                lock(&events.0)[0].raising = None;
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!worker.is_finished(), "it blocks");
            drop(model);
            worker.join().unwrap();
        }
    }

    #[test]
    fn only_eventfds_are_raised() {
        let dir = tempfile::tempdir().unwrap();
        let file = fs::File::create(dir.path().join("anon_inode:[eventfd]")).unwrap();
        let (_, pipe) = rustix::pipe::pipe().unwrap();
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!([file.into(), pipe, event()].map(|file| is_eventfd(&file)), [false, false, true]);
    }
}
