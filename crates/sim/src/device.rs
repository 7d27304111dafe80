//! The software card: its registers, its channels, and the threads that may run them.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use dmalane_addr::CardAddr;
use dmalane_dma::DeviceMem;
use dmalane_iopt::{Format, X86_64_4Level};

use crate::Error;
use crate::memory::CardMemory;
use crate::mmu::Mmu;
use crate::queue::{Inside, Queue, Registers, STEP_COST, Stepped};
use dmalane_card::regs;

/// How often a worker looks for work before it sleeps: some tens of microseconds, as long as it takes to wake it.
const SPINS: u32 = 1024;
/// The first sleep of a worker: it may have skipped a channel that a helper was just leaving.
const FIRST_SLEEP: Duration = Duration::from_millis(5);
/// The longest one, twice as long as the one before while nobody wakes it.
const LONGEST_SLEEP: Duration = Duration::from_millis(640);

/// Which threads a software card works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Workers {
    /// None: the card works while somebody polls.
    #[default]
    Inline,
    /// One for all channels; who polls helps with the channels that it is not at.
    One,
    /// One for each channel; a polling thread only tries the lock.
    PerChannel,
}

/// How a software card is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardConfig {
    /// Bytes of DDR: a multiple of 2 MiB, at most 256 GiB. Only what is touched costs anything.
    pub ddr: u64,
    /// Bytes of HBM: a multiple of 4 MiB, at most 256 GiB.
    pub hbm: u64,
    /// DMA channels, 1 to 16.
    pub channels: u32,
    /// Which threads the card works on.
    pub workers: Workers,
}

impl Default for CardConfig {
    /// 32 GiB each of DDR and HBM and two channels, as an Alveo V80 has them; no threads.
    fn default() -> Self {
        Self { ddr: 32 << 30, hbm: 32 << 30, channels: 2, workers: Workers::Inline }
    }
}

/// A card in software: a register file, DDR and HBM, an MMU with tables of format `F`, and channels that reach host
/// memory through one [`DeviceMem`] port each.
pub struct SoftCard<M, F: Format = X86_64_4Level> {
    core: Arc<Core<M, F>>,
    helps: bool,
    workers: Vec<JoinHandle<()>>,
}

struct Core<M, F> {
    inside: Inside<F>,
    channels: Vec<Channel<M>>,
    interrupt: Box<dyn Fn(usize) + Send + Sync>,
    quit: AtomicBool,
}

struct Channel<M> {
    regs: Registers,
    queue: Mutex<Queue<M>>,
    /// The thread that sleeps when the channel is idle.
    worker: OnceLock<Thread>,
}

impl<M: DeviceMem + 'static, F: Format> SoftCard<M, F> {
    /// A card whose channels reach host memory through the ports that `port` makes, and that calls `interrupt` with the
    /// number of a channel for an interrupt, from any thread.
    ///
    /// # Errors
    /// [`Error::BadConfig`] unless there are 1 to 16 channels; [`Error::NoThread`].
    pub fn new(
        memory: CardMemory,
        (channels, workers): (u32, Workers),
        mut port: impl FnMut() -> M,
        interrupt: impl Fn(usize) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        if !(1..=regs::MAX_CHANNELS).contains(&channels) {
            return Err(Error::BadConfig { setting: "channels", value: channels.into(), rule: "must be 1 to 16" });
        }
        let channel =
            |_| Channel { regs: Registers::default(), queue: Mutex::new(Queue::new(port())), worker: OnceLock::new() };
        let core = Arc::new(Core {
            inside: Inside { memory, mmu: Mmu::new() },
            channels: (0..channels).map(channel).collect(),
            interrupt: Box::new(interrupt),
            quit: AtomicBool::new(false),
        });
        let mut card = Self { core, helps: workers != Workers::PerChannel, workers: Vec::new() };
        let channels = channels as usize;
        let threads = match workers {
            Workers::Inline => 0,
            Workers::One => 1,
            Workers::PerChannel => channels,
        };
        for thread in 0..threads {
            let core = card.core.clone();
            // Its channels: every `threads`th.
            let mine = (thread..channels).step_by(threads);
            let spawned = thread::Builder::new().name(format!("dmalane-card-{thread}")).spawn({
                let mine = mine.clone();
                move || core.run(mine)
            });
            // On failure the drop of `card` ends the threads before.
            let handle = spawned.map_err(Error::NoThread)?;
            for index in mine {
                let _ = card.core.channels[index].worker.set(handle.thread().clone());
            }
            card.workers.push(handle);
        }
        Ok(card)
    }

    /// The card's memories, behind the back of its channels.
    pub fn memory(&self) -> &CardMemory {
        &self.core.inside.memory
    }

    /// Lets each channel that nobody else is running do a bounded amount of work (32 descriptors, 1 MiB), and says
    /// whether any was done. With a worker for each channel this does nothing.
    pub fn progress(&self) -> bool {
        let channels = 0..self.core.channels.len();
        self.helps && channels.fold(false, |did, i| self.core.try_step(i, (STEP_COST, true)).is_some() | did)
    }

    /// Lets one channel do a bounded amount of work, for a thread that divides its time among channels, of several
    /// cards perhaps: 32 descriptors and [a cost](Stepped::cost) of `most`, at most 1 MiB. `None` when the channel has
    /// nothing to do, another thread is at it, or there is none with this number; and while the host is changing
    /// translations, which may take longer than others should wait.
    pub fn step(&self, channel: usize, most: u64) -> Option<Stepped> {
        (channel < self.core.channels.len()).then(|| self.core.try_step(channel, (most, false)))?
    }

    /// False where a step of this channel would do nothing.
    pub fn wants_step(&self, channel: usize) -> bool {
        self.core.channels.get(channel).is_some_and(|channel| channel.regs.want_a_step())
    }

    /// True when the card has threads, so that it works although nobody calls [`SoftCard::progress`].
    pub fn works_alone(&self) -> bool {
        !self.workers.is_empty()
    }

    /// Reads a register, or 32 bits of card memory; `None` where there is none.
    pub fn read32(&self, bar: u8, offset: u64) -> Option<u32> {
        match bar {
            regs::BAR_REGISTERS => self.core.read_register(offset),
            regs::BAR_MEMORY if offset.is_multiple_of(4) => {
                let mut bytes = [0; 4];
                self.memory().read(CardAddr::new(offset), &mut bytes).ok()?;
                Some(u32::from_le_bytes(bytes))
            }
            _ => None,
        }
    }

    /// Writes a register, or 32 bits of card memory; `None` where there is none. Writing a read-only register does
    /// nothing.
    #[must_use = "None says that nothing was written"]
    pub fn write32(&self, bar: u8, offset: u64, value: u32) -> Option<()> {
        match bar {
            regs::BAR_REGISTERS => self.core.write_register(offset, value),
            regs::BAR_MEMORY if offset.is_multiple_of(4) => {
                self.memory().write(CardAddr::new(offset), &value.to_le_bytes()).ok()
            }
            _ => None,
        }
    }
}

impl<M, F: Format> Drop for SoftCard<M, F> {
    /// Joins the workers; each finishes its step first.
    fn drop(&mut self) {
        self.core.quit.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            let _ = worker.join();
        }
    }
}

dmalane_dma::debug_as!(SoftCard<M, F>, [M, F: Format], |it| "SoftCard {{ memory: {:?}, .. }}", it.core.inside.memory);

impl<M: DeviceMem, F: Format> Core<M, F> {
    fn run(&self, channels: impl Iterator<Item = usize> + Clone) {
        let (mut idle, mut sleep) = (0, FIRST_SLEEP);
        while !self.quit.load(Ordering::SeqCst) {
            if channels.clone().fold(false, |did, index| self.try_step(index, (STEP_COST, true)).is_some() | did) {
                (idle, sleep) = (0, FIRST_SLEEP);
            } else if idle < SPINS {
                idle += 1;
                std::hint::spin_loop();
            } else {
                // An unpark since the last park makes this return at once, so no doorbell is slept through.
                let since = Instant::now();
                thread::park_timeout(sleep);
                sleep = if since.elapsed() < sleep { FIRST_SLEEP } else { (2 * sleep).min(LONGEST_SLEEP) };
            }
        }
    }

    fn try_step(&self, index: usize, limits: (u64, bool)) -> Option<Stepped> {
        let channel = &self.channels[index];
        if !channel.regs.want_a_step() {
            return None;
        }
        let mut queue = match channel.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        queue.step(&channel.regs, &self.inside, limits, || (self.interrupt)(index))
    }

    fn read_register(&self, offset: u64) -> Option<u32> {
        if let Some((channel, register)) = self.channel(offset) {
            return channel.regs.read(register);
        }
        let Inside { memory, mmu } = &self.inside;
        let hbm = memory.hbm();
        Some(match offset {
            regs::ID => regs::ID_VALUE,
            regs::VERSION => regs::VERSION_VALUE,
            regs::CHANNELS => self.channels.len() as u32,
            regs::RING_LOG2_MAX => regs::MAX_RING_LOG2,
            regs::LEN_MAX => regs::MAX_LEN,
            regs::MMU_FORMAT => regs::format_code(F::NAME),
            regs::CONTROL => u32::from(self.channels.iter().any(|c| c.regs.is_stopping())),
            regs::MMU_CONTROL => u32::from(mmu.is_on()),
            // Writing it has waited for accesses under way.
            regs::MMU_INVALIDATE => 0,
            _ => {
                let value = match offset & !4 {
                    regs::DDR_BASE => memory.ddr().first().bits(),
                    regs::DDR_LEN => memory.ddr().len(),
                    regs::HBM_BASE => hbm.first().bits(),
                    regs::HBM_LEN => hbm.len(),
                    regs::HBM_HALF => hbm.first().bits() + hbm.len() / 2,
                    regs::MMU_ROOT => mmu.root().load(Ordering::Relaxed),
                    _ => return None,
                };
                half(value, offset)?
            }
        })
    }

    /// `None` where there is no register.
    fn write_register(&self, offset: u64, value: u32) -> Option<()> {
        if let Some((channel, register)) = self.channel(offset) {
            channel.regs.write(register, value)?;
            if matches!(register, regs::CH_DOORBELL | regs::CH_CONTROL) {
                channel.wake();
            }
            return Some(());
        }
        let mmu = &self.inside.mmu;
        match offset {
            regs::CONTROL if value & 1 == 1 => {
                mmu.control(false);
                for channel in &self.channels {
                    channel.regs.control.store(0, Ordering::SeqCst);
                    channel.wake();
                }
            }
            regs::MMU_CONTROL => mmu.control(value & 1 == 1),
            regs::MMU_INVALIDATE => mmu.invalidate(),
            _ if offset & !4 == regs::MMU_ROOT => set_half(mmu.root(), offset, value)?,
            _ => return self.read_register(offset).map(drop),
        }
        Some(())
    }

    /// Which channel's register lies at an offset, and which register it is.
    fn channel(&self, offset: u64) -> Option<(&Channel<M>, u64)> {
        let (channel, register) = regs::channel_at(offset)?;
        Some((self.channels.get(channel)?, register))
    }
}

impl<M> Channel<M> {
    fn wake(&self) {
        if let Some(worker) = self.worker.get() {
            worker.unpark();
        }
    }
}

impl Registers {
    /// Told to stop, and not stopped yet.
    fn is_stopping(&self) -> bool {
        self.control.load(Ordering::SeqCst) == 0 && self.status.load(Ordering::SeqCst) != 0
    }

    fn read(&self, register: u64) -> Option<u32> {
        let narrow = |r: &AtomicU32| Some(r.load(Ordering::SeqCst));
        match register {
            regs::CH_CONTROL => narrow(&self.control),
            regs::CH_STATUS => narrow(&self.status),
            regs::CH_ERROR => narrow(&self.error),
            regs::CH_RING_LOG2 => narrow(&self.ring_log2),
            regs::CH_DOORBELL => narrow(&self.doorbell),
            regs::CH_HEAD => narrow(&self.head),
            regs::CH_INTERRUPT => narrow(&self.interrupt),
            _ => half(self.wide(register & !4)?.load(Ordering::Relaxed), register),
        }
    }

    fn write(&self, register: u64, value: u32) -> Option<()> {
        match register {
            regs::CH_DOORBELL => self.doorbell.store(value, Ordering::Release),
            regs::CH_CONTROL if value & 1 == 0 => self.control.store(0, Ordering::SeqCst),
            // Starting a channel that has not stopped yet would hide the stop from it.
            regs::CH_CONTROL if self.status.load(Ordering::SeqCst) == 0 => self.control.store(1, Ordering::SeqCst),
            regs::CH_RING_LOG2 => self.ring_log2.store(value, Ordering::Relaxed),
            regs::CH_INTERRUPT => {
                // The register before the driver's last check of the ring: see `Queue::step`.
                self.interrupt.swap(value & 1, Ordering::SeqCst);
            }
            _ => match register & !4 {
                regs::CH_RING => set_half(&self.ring, register, value)?,
                regs::CH_COMPLETIONS => set_half(&self.completions, register, value)?,
                regs::CH_CANCEL => set_half(&self.cancel, register, value)?,
                _ => return self.read(register).map(drop),
            },
        }
        Some(())
    }

    fn wide(&self, register: u64) -> Option<&AtomicU64> {
        Some(match register {
            regs::CH_RING => &self.ring,
            regs::CH_COMPLETIONS => &self.completions,
            regs::CH_ERROR_IOVA => &self.error_iova,
            regs::CH_CANCEL => &self.cancel,
            regs::CH_BYTES_H2C => &self.bytes_h2c,
            regs::CH_BYTES_C2H => &self.bytes_c2h,
            regs::CH_OK => &self.ok,
            regs::CH_FAILED => &self.failed,
            _ => return None,
        })
    }
}

/// The half of a 64-bit register that lies at `offset`; `None` unless that is a multiple of 4.
fn half(value: u64, offset: u64) -> Option<u32> {
    offset.is_multiple_of(4).then_some((value >> (8 * (offset & 4))) as u32)
}

fn set_half(register: &AtomicU64, offset: u64, value: u32) -> Option<()> {
    if !offset.is_multiple_of(4) {
        return None;
    }
    let shift = 8 * (offset & 4);
    let merge = |old: u64| Some(old & !(0xffff_ffff << shift) | u64::from(value) << shift);
    let _ = register.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
    Some(())
}
