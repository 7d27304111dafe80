//! The worker: one thread that runs the queues of all functions, in turns.
//!
//! Deficit round robin (Shreedhar, Varghese: "Efficient Fair Queuing Using Deficit Round Robin", 1995): in each round a function may
//! spend a quantum of bytes, and what it spends too much it lacks in the next. A function with nothing to do saves nothing up.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, Timespec, epoll, eventfd};

use crate::function::Function;

/// Bytes of a round: as many as the largest step.
const QUANTUM: i64 = 1 << 20;
/// The longest sleep: nothing depends on it.
const NAP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The functions that the worker runs, and what wakes it.
pub(crate) struct RunQueue {
    functions: Mutex<Vec<Arc<Function>>>,
    /// Counts changes of the list.
    changes: AtomicU64,
    quit: AtomicBool,
    /// Written by the control thread; nobody else has it.
    nudge: OwnedFd,
    epoll: OwnedFd,
    /// For a test: the worker stands still.
    #[cfg(test)]
    pub(crate) paused: AtomicBool,
}

struct Turn {
    function: Arc<Function>,
    /// What is left of this round; less than nothing, but by no more than a quantum, where the last step cost more than that.
    deficit: i64,
    next: usize,
}

impl RunQueue {
    pub(crate) fn new() -> std::io::Result<Self> {
        let nudge = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &nudge, epoll::EventData::new_u64(u64::MAX), epoll::EventFlags::IN)?;
        Ok(Self {
            functions: Mutex::default(),
            changes: AtomicU64::new(1),
            quit: AtomicBool::new(false),
            nudge,
            epoll,
            #[cfg(test)]
            paused: AtomicBool::new(false),
        })
    }

    /// Wakes the worker.
    pub(crate) fn nudge(&self) {
        // It fails only when the counter is full: then it is readable anyway.
        let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
    }

    pub(crate) fn quit(&self) {
        self.quit.store(true, Ordering::SeqCst);
        self.nudge();
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Function>>)) {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut functions);
        self.changes.fetch_add(1, Ordering::SeqCst);
        drop(functions);
        self.nudge();
    }

    /// Has the worker run a function from now on.
    pub(crate) fn add(&self, function: Arc<Function>) -> std::io::Result<()> {
        // By edges: each write to an eventfd is one, so that nobody needs to read it. Reading could block: whether it may is a flag that the
        // client shares.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, function.kick(), epoll::EventData::new_u64(0), flags)?;
        self.change(|functions| functions.push(function));
        Ok(())
    }

    /// Has the worker let go of a function.
    pub(crate) fn remove(&self, function: &Arc<Function>) {
        let _ = epoll::delete(&self.epoll, function.kick());
        self.change(|functions| functions.retain(|f| !Arc::ptr_eq(f, function)));
    }

    /// Runs until told to quit.
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
            // First the word, then a last look, then sleep: a doorbell that the look does not see is one that comes with a call.
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
        let _ = epoll::wait(&self.epoll, &mut events, Some(&NAP));
        let mut ready = [PollFd::new(&self.nudge, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut ready, Some(&Timespec::default())).is_ok_and(|n| n > 0) {
            let _ = rustix::io::read(&self.nudge, &mut [0u8; 8]);
        }
    }
}

impl Turn {
    /// One round of a function.
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
    use crate::config::{Budget, Config, Limits};

    /// A function whose queues are full of copies of this length, as long as it is told so.
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

        /// With `rows`, every second descriptor gives the next a shape of so many rows, and `len` is that of a row.
        fn of(len: u32, rows: Option<u32>, queues: u32, budget: &Arc<Budget>) -> Self {
            let limits = Limits::default();
            let made = Function::new(&limits, 4 << 20, 4 << 20, queues, 0, budget);
            let (function, _bells) = made.map_err(|e| e.1).unwrap();
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

        /// Fills the rings again, and gives the bytes moved so far.
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
    fn who_always_has_work_gets_as_much_as_another() {
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
                // What is under way is not counted: of four MiB in 64.
                assert!(a.min(b) / a.max(b) > 0.9, "{lens:?} {queues:?}: {moved:?}");
            }
        }
    }

    #[test]
    fn who_copies_single_bytes_gets_no_more_time_than_who_copies_much() {
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
        let pieces = rows.turn.function.moved();
        // 2048 rows in a round: each counts as 512 bytes.
        assert!((60 << 11..=66 << 11).contains(&pieces), "{pieces} rows in 64 rounds");
    }

    #[test]
    fn who_has_nothing_to_do_saves_nothing_up() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut one = Backlog::new(64 << 10, 1, &budget);
        for _ in 0..100 {
            assert!(!one.turn.serve());
        }
        assert_eq!(one.turn.deficit, 0);
        one.refill();
        one.turn.serve();
        assert!(one.refill() <= 2 << 20, "a round's worth, after a hundred idle ones");
    }
}
