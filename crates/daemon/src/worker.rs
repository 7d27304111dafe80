//! The worker: one thread that runs the queues of all functions in turn.
//!
//! Deficit round robin (Shreedhar, Varghese: "Efficient Fair Queuing Using Deficit Round Robin", 1995): in each round a
//! function may spend a quantum of bytes, and overspend is carried into the next round. An idle function accumulates
//! no credit.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, Timespec, epoll, eventfd};

use crate::function::Function;

/// Bytes of a round: the size of the largest step.
const QUANTUM: i64 = 1 << 20;
/// The longest sleep, in case a wake-up is lost.
const MAX_SLEEP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The functions that the worker runs, with the descriptors that wake it.
pub(crate) struct RunQueue {
    functions: Mutex<Vec<Arc<Function>>>,
    /// Number of changes of the list.
    changes: AtomicU64,
    quit: AtomicBool,
    /// Eventfd that the control thread writes; not shared with clients.
    wake: OwnedFd,
    epoll: OwnedFd,
    /// For a test: the worker runs no queue.
    #[cfg(test)]
    pub(crate) paused: AtomicBool,
    /// For a test: the worker has seen that it is paused, so that no step is under way.
    #[cfg(test)]
    pub(crate) parked: AtomicBool,
}

struct Turn {
    function: Arc<Function>,
    /// Bytes left in this round; negative, by at most a quantum, after a step that cost more than was left.
    deficit: i64,
    next: usize,
}

impl RunQueue {
    pub(crate) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(u64::MAX), epoll::EventFlags::IN)?;
        Ok(Self {
            functions: Mutex::default(),
            changes: AtomicU64::new(1),
            quit: AtomicBool::new(false),
            wake,
            epoll,
            #[cfg(test)]
            paused: AtomicBool::new(false),
            #[cfg(test)]
            parked: AtomicBool::new(false),
        })
    }

    /// Wakes the worker.
    pub(crate) fn wake(&self) {
        // The write fails only when the counter is full, and then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn quit(&self) {
        self.quit.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Function>>)) {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut functions);
        self.changes.fetch_add(1, Ordering::SeqCst);
        drop(functions);
        self.wake();
    }

    /// Adds a function to those that the worker runs.
    pub(crate) fn add(&self, function: Arc<Function>) -> std::io::Result<()> {
        // Edge-triggered: each write to the eventfd is an edge, so it need not be read. A read could block, because
        // the client shares the file and can clear O_NONBLOCK.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, function.kick(), epoll::EventData::new_u64(0), flags)?;
        self.change(|functions| functions.push(function));
        Ok(())
    }

    /// Removes a function.
    pub(crate) fn remove(&self, function: &Arc<Function>) {
        let _ = epoll::delete(&self.epoll, function.kick());
        self.change(|functions| functions.retain(|f| !Arc::ptr_eq(f, function)));
    }

    /// Runs the queues until [`RunQueue::quit`]. Spins for `spin` before it sleeps.
    pub(crate) fn run(&self, spin: Duration) {
        let mut turns: Vec<Turn> = Vec::new();
        let mut seen = 0;
        let mut idle: Option<Instant> = None;
        while !self.quit.load(Ordering::SeqCst) {
            if self.changes.load(Ordering::SeqCst) != seen {
                seen = self.refresh(&mut turns);
            }
            #[cfg(test)]
            if self.paused.load(Ordering::SeqCst) {
                self.parked.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if turns.iter_mut().fold(false, |did, turn| turn.serve() | did) {
                idle = None;
                continue;
            }
            let since = *idle.get_or_insert_with(Instant::now);
            if since.elapsed() < spin {
                std::hint::spin_loop();
                continue;
            }
            // Announce the sleep, check once more, then sleep: a doorbell that the check misses comes with a kick.
            turns.iter().for_each(|turn| turn.function.page().set_asleep(true));
            if !turns.iter_mut().fold(false, |did, turn| turn.serve() | did) {
                self.sleep();
            }
            turns.iter().for_each(|turn| turn.function.page().set_asleep(false));
            idle = None;
        }
    }

    fn refresh(&self, turns: &mut Vec<Turn>) -> u64 {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.changes.load(Ordering::SeqCst);
        let now = functions.clone();
        drop(functions);
        turns.retain(|turn| now.iter().any(|f| Arc::ptr_eq(f, &turn.function)));
        for function in now {
            if !turns.iter().any(|turn| Arc::ptr_eq(&function, &turn.function)) {
                turns.push(Turn { function, deficit: 0, next: 0 });
            }
        }
        number
    }

    fn sleep(&self) {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
        let _ = epoll::wait(&self.epoll, &mut events, Some(&MAX_SLEEP));
        let mut ready = [PollFd::new(&self.wake, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut ready, Some(&Timespec::default())).is_ok_and(|n| n > 0) {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
    }
}

impl Turn {
    /// Runs one round of a function; true when it did any work.
    fn serve(&mut self) -> bool {
        let queues = self.function.queues();
        self.deficit += QUANTUM;
        let mut worked = false;
        loop {
            let mut any = false;
            for _ in 0..queues {
                let queue = self.next;
                self.next = (queue + 1) % queues;
                if let Some(cost) = self.function.step(queue) {
                    (worked, any) = (true, true);
                    self.deficit -= cost;
                    if self.deficit <= 0 {
                        return true;
                    }
                }
            }
            if !any {
                self.deficit = 0;
                return worked;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::{Access, CardAddr, Iova};
    use dmalane_card::regs::{self, BAR_REGISTERS};
    use dmalane_card::{Descriptor, Task};
    use dmalane_dma::{Heap, Mapping, MemfdHeap, Registrar};
    use dmalane_queue::{DeviceAddr, Direction};

    use super::*;
    use crate::config::{Budget, ClientLimits, Config};

    /// A function whose queues are full of copies of this length while the test refills them.
    struct Backlog {
        turn: Turn,
        len: u32,
        tails: Vec<u32>,
        _mappings: Vec<Mapping>,
    }

    const ENTRIES: u32 = 64;

    impl Backlog {
        fn new(len: u32, queues: u32, budget: &Arc<Budget>) -> Self {
            Self::of(len, None, queues, budget)
        }

        /// With `rows`, every second descriptor gives the next a shape with this many rows of `len` bytes.
        fn of(len: u32, rows: Option<u32>, queues: u32, budget: &Arc<Budget>) -> Self {
            let limits = ClientLimits::default();
            let made = Function::new(&limits, 4 << 20, 4 << 20, queues, 0, budget);
            let (function, _client_fds) = made.map_err(|e| e.1).unwrap();
            let mut mappings = Vec::new();
            let mut map = |len: usize| {
                let buf = MemfdHeap::new().allocate(len).unwrap().share();
                let host = function.host();
                mappings.push(host.map(host.pin(&buf.reference()).unwrap(), Access::RW).unwrap());
                (mappings.last().unwrap().span().first(), buf)
            };
            let (data, _) = map(len as usize);
            for queue in 0..queues {
                let [(ring, memory), (completions, _)] = [map(4096), map(4096)];
                for slot in 0..ENTRIES {
                    let card = DeviceAddr::Card(CardAddr::new(0));
                    let copy = Descriptor::from(Task::Copy { direction: Direction::FromHost, host: data, card, len });
                    let descriptor = match rows {
                        Some(rows) if slot % 2 == 0 => {
                            let shape = Task::Shape { near_pitch: 0, far_pitch: 2, rows };
                            Descriptor { chained: true, ..shape.into() }
                        }
                        _ => copy,
                    };
                    for (i, word) in descriptor.encode().into_iter().enumerate() {
                        memory.view().store_u64(32 * slot as usize + 8 * i, word).unwrap();
                    }
                }
                let write = |register, value: u32| {
                    function.card().write32(BAR_REGISTERS, regs::channel(queue, register), value).unwrap();
                };
                write(regs::CH_RING_LOG2, ENTRIES.ilog2());
                for (register, at) in [(regs::CH_RING, ring), (regs::CH_COMPLETIONS, completions)] {
                    write(register, Iova::bits(at) as u32);
                    write(register + 4, (Iova::bits(at) >> 32) as u32);
                }
                write(regs::CH_CONTROL, 1);
                function.step(queue as usize);
            }
            let turn = Turn { function: Arc::new(function), deficit: 0, next: 0 };
            Self { turn, len, tails: vec![0; queues as usize], _mappings: mappings }
        }

        /// Refills the rings and returns the bytes copied so far.
        fn refill(&mut self) -> u64 {
            let mut moved = 0;
            for (queue, tail) in self.tails.iter_mut().enumerate() {
                let function = &self.turn.function;
                let head = regs::channel(queue as u32, regs::CH_HEAD);
                let head = function.card().read32(BAR_REGISTERS, head).unwrap();
                *tail = head + ENTRIES;
                function.page().ring(queue, *tail);
                moved += u64::from(head) * u64::from(self.len);
            }
            moved
        }
    }

    #[test]
    fn busy_clients_get_equal_shares() {
        let budget = Arc::new(Budget::new(&Config::default()));
        // Many short copies or few long ones, over one queue or several.
        for lens in [[16 << 10, 1 << 20], [64 << 10, 64 << 10], [1 << 20, 700_000], [4 << 20, 32 << 10]] {
            for queues in [[1, 1], [1, 4], [3, 2]] {
                let mut two = [0, 1].map(|i| Backlog::new(lens[i], queues[i], &budget));
                let mut moved = [0; 2];
                for _ in 0..64 {
                    for (backlog, moved) in two.iter_mut().zip(&mut moved) {
                        *moved = backlog.refill();
                        backlog.turn.serve();
                        assert!(backlog.turn.deficit > -QUANTUM && backlog.turn.deficit <= QUANTUM);
                    }
                }
                let [a, b] = moved.map(|m| m as f64);
                // Unfinished copies are not counted: up to 4 MiB of 64.
                assert!(a.min(b) / a.max(b) > 0.9, "{lens:?} {queues:?}: {moved:?}");
            }
        }
    }

    #[test]
    fn single_byte_copies_get_no_extra_time() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut rows = Backlog::of(1, Some(4096), 1, &budget);
        let mut much = Backlog::new(1 << 20, 1, &budget);
        let mut copied = 0;
        for _ in 0..64 {
            rows.refill();
            copied = much.refill();
            rows.turn.serve();
            much.turn.serve();
        }
        assert!(copied >= 60 << 20, "{copied}");
        let copied_rows = rows.turn.function.moved();
        // 2048 rows in a round: each counts as 512 bytes.
        assert!((60 << 11..=66 << 11).contains(&copied_rows), "{copied_rows} rows in 64 rounds");
    }

    #[test]
    fn idle_functions_accumulate_no_credit() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut one = Backlog::new(64 << 10, 1, &budget);
        for _ in 0..100 {
            assert!(!one.turn.serve());
        }
        assert_eq!(one.turn.deficit, 0);
        one.refill();
        one.turn.serve();
        assert!(one.refill() <= 2 << 20, "at most one round after a hundred idle ones");
    }
}
