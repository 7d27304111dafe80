//! The worker of a client: a thread of its process that runs the queues of its function in the client's turns. Also
//! the processor time of threads, for which users pay.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::FromZeros;

use crate::fork::{ask_for_short_slices, exit};
use crate::function::Function;
use crate::log::Ending;
use crate::socket;
use crate::table::{Table, now};
use crate::turns::Step;
use crate::wire::ClientStatus;

/// Largest and smallest limit of a step's cost; the limit halves while steps take long.
const MAX_STEP: u64 = 1 << 20;
const MIN_STEP: u64 = 32 << 10;
/// Where steps take longer than these nanoseconds, the next ones are shorter: a user whose few operations end sooner
/// than that has no work until the client has seen it, and waits for the step of another user then.
const STEP_TIME: u64 = 200_000;
/// Steps that take longer than they have a processor, by this many nanoseconds, were interrupted.
const MEASURED: u64 = 20_000;
/// The longest sleep, in case a wake-up is lost, in nanoseconds.
const MAX_SLEEP: u64 = 1_000_000_000;
/// A call takes more processor time than this only where a client has thousands of waiters, and then the next call is
/// not made for so many times as long: what one step costs stays small, and so does its share.
const LONG_CALL: Duration = Duration::from_micros(50);
const CALL_REST: u32 = 16;

/// The function that a worker serves, and what wakes it: the client's kicks, and requests that change its work.
pub(crate) struct Alarm {
    /// Once the client has opened it.
    pub function: OnceLock<Function>,
    quit: AtomicBool,
    /// Eventfd of this process; not shared with the client.
    wake: OwnedFd,
    epoll: OwnedFd,
}

impl Alarm {
    pub(crate) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self { function: OnceLock::new(), quit: AtomicBool::new(false), wake, epoll })
    }

    /// Wakes the worker.
    pub(crate) fn wake(&self) {
        // The write fails only when the counter is full, and then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Has the worker run the queues of this function, also when the client kicks.
    pub(crate) fn serve(&self, function: Function) -> rustix::io::Result<()> {
        // Edge-triggered: each write to the eventfd is an edge, so it need not be read. A read could block, because
        // the client shares the file and can clear O_NONBLOCK.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &function.kick, epoll::EventData::new_u64(0), flags)?;
        let _ = self.function.set(function);
        self.wake();
        Ok(())
    }

    fn sleep(&self, nanoseconds: u64) {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 4];
        let time = Timespec::try_from(Duration::from_nanos(nanoseconds)).ok();
        let _ = epoll::wait(&self.epoll, &mut events, time.as_ref());
        // Never blocks.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

/// How long it spins before it sleeps, in nanoseconds.
const SPIN: u64 = 100_000;

/// The thread that runs a function's queues.
pub(crate) struct Worker {
    alarm: Arc<Alarm>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts it for the client of a seat, before there is a function.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(alarm: Arc<Alarm>, table: Arc<Table>, seat: usize) -> std::io::Result<Self> {
        let mine = alarm.clone();
        let run = move || {
            ask_for_short_slices();
            while mine.function.get().is_none() && !mine.quit.load(Ordering::SeqCst) {
                mine.sleep(MAX_SLEEP);
            }
            let Some(function) = mine.function.get() else { return };
            let mut running =
                Running { alarm: &mine, function, table, seat, next: 0, most: MAX_STEP, calls: Calls::default() };
            if catch_unwind(AssertUnwindSafe(|| running.run())).is_err() {
                // The card is only as far as the panic, and nobody runs it on.
                exit(Ending::Bug as i32);
            }
        };
        let thread = Some(thread::Builder::new().name("dmalaned-worker".to_owned()).spawn(run)?);
        Ok(Self { alarm, thread })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.alarm.quit.store(true, Ordering::SeqCst);
        self.alarm.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Running<'a> {
    alarm: &'a Alarm,
    function: &'a Function,
    table: Arc<Table>,
    seat: usize,
    /// The queue whose turn it is.
    next: usize,
    /// The limit of the next step's cost.
    most: u64,
    calls: Calls,
}

impl Running<'_> {
    fn run(&mut self) {
        let (mut idle, mut asleep) = (None, false);
        while !self.alarm.quit.load(Ordering::SeqCst) {
            if self.function.has_work() && self.work() {
                idle = None;
            } else if self.table.was_last(self.seat) && now().saturating_sub(*idle.get_or_insert_with(now)) < SPIN {
                // One process at most spins, for a client that rings again soon.
                std::hint::spin_loop();
                continue;
            } else if !asleep {
                // Announce the sleep, look once more, then sleep: a doorbell that this look misses comes with a kick.
                asleep = true;
                self.function.page.set_asleep(true);
                continue;
            } else {
                // What the queues' work has taken is paid for.
                take_time();
                self.alarm.sleep(self.calls.wait());
                self.call();
                // Kicks without work cost their user, and are looked after less often while it owes.
                if !self.function.has_work() {
                    self.table.charge(self.seat, take_time());
                    if self.table.owes(self.seat) {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            }
            if std::mem::take(&mut asleep) {
                self.function.page.set_asleep(false);
            }
        }
    }

    /// Runs the queues in this client's turns until nothing is left to do; false if there was nothing.
    fn work(&mut self) -> bool {
        let mut worked = false;
        while !self.alarm.quit.load(Ordering::SeqCst) {
            let (table, seat) = (self.table.clone(), self.seat);
            table.take_turn(seat, || self.call());
            let (mut clock, mut busy) = (StepClock::new(), 0);
            loop {
                let at_once = self.step();
                let Some(bytes) = at_once.or_else(|| self.hold(busy)) else {
                    if busy > 0 {
                        self.table.spend(self.seat, &clock.ended(0));
                    }
                    self.table.end_turn(self.seat, worked);
                    return worked;
                };
                let step = clock.ended(bytes);
                worked = true;
                busy += step.busy;
                // The time of another includes that for which it was waited.
                if at_once.is_some() {
                    self.pace(step.busy, bytes);
                }
                self.show();
                if !self.table.spend(self.seat, &step) {
                    break;
                }
            }
        }
        self.table.end_turn(self.seat, worked);
        worked
    }

    /// A step of the next queue that has work. Returns its cost in bytes.
    fn step(&mut self) -> Option<u64> {
        let queues = self.function.queues;
        (0..queues).find_map(|_| {
            let queue = self.next;
            self.next = (queue + 1) % queues;
            let (cost, calls) = self.function.step(queue, self.most)?;
            self.calls.are_due |= calls;
            self.calls.make(|| socket::call(&self.function.call));
            Some(cost)
        })
    }

    /// Makes a call that is due, outside of a step. Returns after how many nanoseconds there may be another.
    fn call(&mut self) -> u64 {
        if let Some(took) = self.calls.make(|| socket::call(&self.function.call)) {
            self.table.charge(self.seat, took);
        }
        self.calls.wait()
    }

    /// Keeps the turn of a client that has worked for some time in it, and has no more: for half of that at most.
    fn hold(&mut self, busy: u64) -> Option<u64> {
        let most = if busy > 0 { self.table.hold(self.seat).min(busy / 2) } else { 0 };
        let start = now();
        while now().saturating_sub(start) < most && !self.alarm.quit.load(Ordering::SeqCst) {
            if self.function.has_work() {
                return self.step();
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Makes steps shorter while they take long.
    fn pace(&mut self, took: u64, cost: u64) {
        if took > STEP_TIME {
            self.most = (self.most / 2).max(MIN_STEP);
        } else if took < STEP_TIME / 4 && cost >= self.most / 2 {
            self.most = (self.most * 2).min(MAX_STEP);
        }
    }

    /// Shows what the function counts.
    fn show(&self) {
        let mut counted = ClientStatus::new_zeroed();
        self.function.count_into(&mut counted);
        self.table.show_counted(self.seat, counted);
    }
}

/// Calls of a client.
#[derive(Default)]
struct Calls {
    /// It has asked for one.
    are_due: bool,
    /// When it may be made.
    next: u64,
}

impl Calls {
    /// Makes a call that is due, and returns how much of a processor it took.
    fn make(&mut self, call: impl FnOnce()) -> Option<Duration> {
        if !self.are_due || now() < self.next {
            return None;
        }
        let before = thread_time();
        call();
        let took = thread_time().saturating_sub(before);
        let rest = if took > LONG_CALL { CALL_REST * took } else { Duration::ZERO };
        let rest = u64::try_from(rest.as_nanos()).unwrap_or(u64::MAX);
        *self = Self { are_due: false, next: now().saturating_add(rest) };
        Some(took)
    }

    /// How long the worker may sleep.
    fn wait(&self) -> u64 {
        if self.are_due { self.next.saturating_sub(now()).min(MAX_SLEEP) } else { MAX_SLEEP }
    }
}

/// Measures steps.
struct StepClock {
    began: u64,
    /// Processor time of this thread.
    worked: Duration,
    /// How often this thread has waited in the kernel.
    waits: i64,
}

impl StepClock {
    fn new() -> Self {
        Self { began: now(), worked: thread_time(), waits: waits() }
    }

    /// A step with this cost has ended, and the next one begins. Who waits in the kernel, for pages or for a file of
    /// the client, pays for that; who has lost its processor to others does not.
    fn ended(&mut self, bytes: u64) -> Step {
        let ended = now();
        let began = std::mem::replace(&mut self.began, ended);
        let worked = thread_time();
        let used = u64::try_from((worked - std::mem::replace(&mut self.worked, worked)).as_nanos()).unwrap_or(u64::MAX);
        let mut busy = ended - began;
        if busy > used + MEASURED {
            let waits = waits();
            if waits == std::mem::replace(&mut self.waits, waits) {
                busy = used;
            }
        }
        Step { bytes, began, ended, busy }
    }
}

fn waits() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

/// Processor time of this thread so far.
pub(crate) fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Processor time of this thread since the last call.
pub(crate) fn take_time() -> Duration {
    thread_local!(static TAKEN: Cell<Duration> = const { Cell::new(Duration::ZERO) });
    let now = thread_time();
    now.saturating_sub(TAKEN.replace(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_long_calls_has_fewer() {
        let spin = |time| {
            let before = thread_time();
            while thread_time() - before < time {
                std::hint::spin_loop();
            }
        };
        let (mut calls, mut made) = (Calls::default(), 0);
        let mut call = |calls: &mut Calls, time| {
            calls.are_due = true;
            calls.make(|| {
                spin(time);
                made += 1;
            });
            made
        };
        let long = Duration::from_secs(1) / CALL_REST;
        assert_eq!([Duration::ZERO, long, Duration::ZERO].map(|time| call(&mut calls, time)), [1, 2, 2]);
        assert!((500_000_000..=MAX_SLEEP).contains(&calls.wait()), "until it is made");
        calls.next = now();
        assert_eq!((call(&mut calls, Duration::ZERO), calls.are_due, calls.wait()), (3, false, MAX_SLEEP));
    }

    /// A step that waits in the kernel costs the time that it takes; processor time is paid in any case.
    #[test]
    fn who_waits_in_the_kernel_pays_for_it() {
        const TIME: Duration = Duration::from_millis(20);
        let nanoseconds = TIME.as_nanos() as u64;
        let mut clock = StepClock::new();
        thread::sleep(TIME);
        let step = clock.ended(7);
        assert!(step.bytes == 7 && step.busy >= nanoseconds && step.busy == step.ended - step.began);
        let worked = thread_time();
        while thread_time() - worked < TIME {
            std::hint::spin_loop();
        }
        let step = clock.ended(0);
        assert!((nanoseconds..=step.ended - step.began).contains(&step.busy));
    }
}
