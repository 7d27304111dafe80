//! The worker: one thread that runs the queues of all functions in turn.
//!
//! Deficit round robin (Shreedhar, Varghese: "Efficient Fair Queuing Using Deficit Round Robin", 1995), over users and
//! then over the functions of each. In each round a user may spend a quantum of bytes. Overspend is carried into the
//! next rounds, also of users who have nothing to do then. Work of other threads for a user, such as mapping memory, is
//! charged to the user's share of the worker.
//!
//! The client of a user may wait for a processor while its queues are empty. Its user is owed as much as others are
//! served meanwhile, up to [`MAX_CREDIT`], and has the worker for longer when it comes back.
//!
//! The queues of a user with few operations in flight are empty until its client has seen that these ended. In such a
//! gap, the debts of other users are paid by the time that passes, and not by rounds, which take no time then. If
//! rounds paid them, the others would fill the gap, and with few processors the client would have to wait for one.

use std::cell::Cell;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use rustix::event::{EventfdFlags, PollFd, Timespec, epoll, eventfd};

use crate::function::Function;
use crate::pool::thread_time;

/// Bytes of a round: what a step may cost.
const QUANTUM: i64 = 1 << 20;
/// Bytes charged for each nanosecond of a step. No memory copies as fast, so users share the worker's time, whether
/// they copy or do what the card does not see, such as touching pages that the client has given back to the kernel.
/// With less, a user who copies fast gets less time than others.
const NANOSECOND_COST: i64 = 64;
/// Time between two readings of the thread's usage, since each takes 0.1 us or more. A shorter step is
/// charged for the time that it took.
const SAMPLE_TIME: Duration = Duration::from_micros(20);
/// The most that a user can owe for work of other threads, 64 ms: who maps memory all the time, and then stops, is
/// served again soon.
const MAX_OTHER_COST: i64 = 64_000_000 * NANOSECOND_COST;
/// While a user owes more than this for work of other threads, 1 ms, they do no more of it beside other users. Up to as
/// much more is paid at a time.
const MAX_AHEAD: i64 = 1_000_000 * NANOSECOND_COST;
/// The most that a user is owed for what others were served while its queues were empty, 4 ms: about as long as its
/// client waits for a processor. Used up to [`MAX_AHEAD`] in a round, so that others with short steps do not wait for
/// all of it.
const MAX_CREDIT: i64 = 4_000_000 * NANOSECOND_COST;
/// The longest that others wait for a user whose queues are empty, however long that user's operations took.
const MAX_GAP: Duration = Duration::from_millis(2);
/// A user who owes more than this, 2 ms, has had steps that waited, and waits for others up to [`LONG_GAP`].
const LONG_DEBT: i64 = 2_000_000 * NANOSECOND_COST;
/// So long a client may wait for a processor before it submits its next operation.
const LONG_GAP: Duration = Duration::from_millis(10);
/// The worker spins, and does not sleep, in a gap that ends sooner than this: to sleep takes as long.
const SHORT_GAP: Duration = Duration::from_micros(50);
/// Largest and smallest limit of a step's cost; the limit halves while steps take long.
const MAX_STEP: u64 = 1 << 20;
const MIN_STEP: u64 = 32 << 10;
/// Where steps take longer than this, the next ones are shorter: a user whose few operations end sooner than that has
/// no work for the worker until the client has seen it, and waits for the step of another user then.
const STEP_TIME: Duration = Duration::from_micros(200);
/// A step that cost fewer bytes than this in each nanosecond did more than copy: no memory is so slow.
const SLOW: u128 = 2;
/// Kicks in a row without work after which the function's kicks are ignored for [`IGNORE_TIME`]: each takes a
/// processor that another client may wait for.
const EMPTY_KICKS: u32 = 32;
/// The worker looks at the doorbells of a function whose kicks are ignored after this time at the latest.
const IGNORE_TIME: Duration = Duration::from_millis(5);
/// The longest sleep, in case a wake-up is lost.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// The functions that the worker runs, with the descriptors that wake it.
pub(crate) struct RunQueue {
    functions: Mutex<Vec<Arc<Function>>>,
    /// Number of changes of the list.
    changes: AtomicU64,
    /// Debts of users for other threads' work. The worker takes them from their rounds.
    charges: Mutex<HashMap<u32, i64>>,
    /// There are charges.
    charged: AtomicBool,
    /// Eventfd: readable when a user who owed more than [`MAX_AHEAD`] does so no more.
    paid: OwnedFd,
    quit: AtomicBool,
    /// Eventfd that the control thread writes; not shared with clients.
    wake: OwnedFd,
    epoll: OwnedFd,
    /// For a test: the worker runs no queue, and nobody pays.
    #[cfg(test)]
    pub(crate) paused: AtomicBool,
    /// For a test: the worker has seen that it is paused, so that no step is under way.
    #[cfg(test)]
    pub(crate) parked: AtomicBool,
}

/// A user, with the functions of all of the user's clients.
struct UserTurn {
    user: u32,
    /// Bytes left in this round; negative after a step that cost more than was left.
    deficit: i64,
    /// Bytes that the user may spend beyond the quantum, since others were served while it had nothing to do.
    credit: i64,
    /// When the last step ended.
    stepped: Option<Instant>,
    /// Time of the steps since the user last had nothing to do, [`MAX_GAP`] at most.
    burst: Duration,
    /// There was nothing to do in the last round.
    idle: bool,
    /// Until when the user's debt has been paid.
    paid: Option<Instant>,
    /// The user waits for another one.
    held: bool,
    turns: Vec<Turn>,
    /// The function whose turn it is.
    next: usize,
}

struct Turn {
    function: Arc<Function>,
    /// As that of the user, in the rounds of the user.
    deficit: i64,
    /// The queue whose turn it is.
    next: usize,
    /// The turn was cut short by the user's limit, and continues in the user's next round.
    continues: bool,
    /// The limit of the next step's cost.
    most: u64,
    /// The client has kicked, and the function's turn has not come since.
    kicked: bool,
    /// Kicks in a row that brought no work.
    empty_kicks: u32,
    /// Until when kicks are ignored.
    ignored: Option<Instant>,
}

/// Measures how long steps take, and what part of that time their users pay for.
struct Clock<'a> {
    now: &'a dyn Fn() -> Instant,
    usage: &'a dyn Fn() -> Usage,
    /// When the usage was read last, and its value.
    last: Cell<(Instant, Usage)>,
}

/// Usage of this thread so far.
#[derive(Clone, Copy)]
struct Usage {
    /// Processor time.
    time: Duration,
    /// How often it has waited: it loses the processor to others without that.
    waits: i64,
}

/// Work done in a round, of a user or of a function.
#[derive(Clone, Copy, Default)]
struct Served {
    cost: i64,
    /// Of a user: bytes of the quantum of a round that its debts and its steps took.
    used: i64,
    /// When the last step ended, if a queue had work.
    stepped: Option<Instant>,
    /// Time of the steps.
    took: Duration,
    /// Something is owed for what was done before.
    owed: bool,
}

impl Served {
    /// There was something to do.
    fn busy(self) -> bool {
        self.stepped.is_some() || self.owed
    }
}

impl RunQueue {
    pub(crate) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(u64::MAX), epoll::EventFlags::IN)?;
        Ok(Self {
            functions: Mutex::default(),
            changes: AtomicU64::new(1),
            charges: Mutex::default(),
            charged: AtomicBool::new(false),
            paid: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
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

    fn charges(&self) -> MutexGuard<'_, HashMap<u32, i64>> {
        self.charges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges a user for the time of another thread. Wakes the worker for a round or more: debts are paid while it has
    /// nothing to do.
    pub(crate) fn charge(&self, user: u32, took: Duration) {
        let mut charges = self.charges();
        let owed = charges.entry(user).or_insert(0);
        *owed = owed.saturating_add(cost_of(took)).min(MAX_OTHER_COST);
        let wakes = *owed >= QUANTUM;
        self.charged.store(true, Ordering::SeqCst);
        drop(charges);
        if wakes {
            self.wake();
        }
    }

    /// True while other threads should do nothing for this user.
    pub(crate) fn owes(&self, user: u32) -> bool {
        self.charges().get(&user).is_some_and(|owed| *owed > MAX_AHEAD)
    }

    /// Becomes readable when [`RunQueue::owes`] changes to false for a user.
    pub(crate) fn paid(&self) -> BorrowedFd<'_> {
        self.paid.as_fd()
    }

    /// Forgets that a user has paid.
    pub(crate) fn take_paid(&self) {
        let _ = rustix::io::read(&self.paid, &mut [0u8; 8]);
    }

    /// Adds a function to those that the worker runs.
    pub(crate) fn add(&self, function: Arc<Function>) -> std::io::Result<()> {
        self.listen(&function)?;
        self.change(|functions| functions.push(function));
        Ok(())
    }

    fn listen(&self, function: &Arc<Function>) -> rustix::io::Result<()> {
        // Edge-triggered: each write to the eventfd is an edge, so it need not be read. A read could block, because
        // the client shares the file and can clear O_NONBLOCK.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, function.kick(), epoll::EventData::new_u64(number_of(function)), flags)
    }

    /// Removes a function.
    pub(crate) fn remove(&self, function: &Arc<Function>) {
        self.change(|functions| {
            // With the list, so that the worker does not listen again: the client keeps the file open.
            let _ = epoll::delete(&self.epoll, function.kick());
            functions.retain(|f| !Arc::ptr_eq(f, function));
        });
    }

    /// Ignores functions whose kicks bring no work, and listens to them again after [`IGNORE_TIME`]. Returns when the
    /// first of these times ends.
    fn ignore_empty_kicks(&self, users: &mut [UserTurn]) -> Option<Instant> {
        let now = Instant::now();
        for turn in users.iter_mut().flat_map(|user| &mut user.turns) {
            match turn.ignored {
                Some(end) if end > now => {}
                Some(_) => {
                    let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
                    let is_there = functions.iter().any(|f| Arc::ptr_eq(f, &turn.function));
                    // Where the kernel has no memory for it, it is tried again later.
                    let heard = !is_there || self.listen(&turn.function).is_ok();
                    turn.ignored = (!heard).then(|| now + IGNORE_TIME);
                    // One more kick that brings no work is enough.
                    turn.empty_kicks = turn.empty_kicks.min(EMPTY_KICKS - 1);
                }
                None if turn.empty_kicks >= EMPTY_KICKS => {
                    let _ = epoll::delete(&self.epoll, turn.function.kick());
                    turn.ignored = Some(now + IGNORE_TIME);
                }
                None => {}
            }
        }
        users.iter().flat_map(|user| &user.turns).filter_map(|turn| turn.ignored).min()
    }

    /// Runs the queues until [`RunQueue::quit`]. Spins for `spin` before it sleeps.
    pub(crate) fn run(&self, spin: Duration) {
        let mut users: Vec<UserTurn> = Vec::new();
        let mut seen = 0;
        let mut idle: Option<Instant> = None;
        // Whether a sleep was announced, and when it has to end for those to whom it was not.
        let (mut asleep, mut unannounced) = (false, None::<Instant>);
        let clock = Clock::new(&Instant::now, &Usage::of_this_thread);
        let set_asleep = |users: &[UserTurn], asleep: bool| {
            // Not to users who wait for others, nor to those whose kicks are ignored: the worker will look.
            let users = users.iter().filter(|user| !asleep || !user.held);
            let turns = users.flat_map(|user| &user.turns).filter(|turn| !asleep || turn.ignored.is_none());
            turns.for_each(|turn| turn.function.page().set_asleep(asleep));
        };
        // Otherwise the kernel would let a wait of 100 us take 50 us more.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        while !self.quit.load(Ordering::SeqCst) {
            #[cfg(test)]
            if self.paused.load(Ordering::SeqCst) {
                self.parked.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if self.changes.load(Ordering::SeqCst) != seen {
                seen = self.refresh(&mut users);
                clock.sample(Instant::now());
            }
            if self.charged.load(Ordering::SeqCst) {
                self.take_charges(&mut users);
                // Waiting for locks is no user's.
                clock.sample(Instant::now());
            }
            let (all, held) = round(&mut users, &clock);
            let end = held.into_iter().chain(unannounced.filter(|_| asleep)).min();
            let longest = end.map_or(MAX_SLEEP, |end| end.saturating_duration_since(Instant::now()).min(MAX_SLEEP));
            // Spinning is for clients that ring again soon. What else wakes the worker must not keep it awake: the
            // client that it has just called may wait for its processor.
            if all.stepped.is_some() {
                idle = None;
            } else if all.owed {
                // Rounds in which nobody has work pay it.
            } else if longest < SHORT_GAP || held.is_none() && idle.get_or_insert_with(Instant::now).elapsed() < spin {
                std::hint::spin_loop();
            } else if !asleep {
                // Announce the sleep, check once more, then sleep: a doorbell that the check misses comes with a kick.
                // A function that is added in between was told nothing, but `change` wakes after it has counted.
                asleep = true;
                unannounced = self.ignore_empty_kicks(&mut users).into_iter().chain(held).min();
                set_asleep(&users, true);
                continue;
            } else {
                self.sleep(longest, &mut users);
                clock.sample(Instant::now()); // it has waited for work
            }
            if std::mem::take(&mut asleep) {
                set_asleep(&users, false);
            }
        }
    }

    fn refresh(&self, users: &mut Vec<UserTurn>) -> u64 {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.changes.load(Ordering::SeqCst);
        let now = functions.clone();
        drop(functions);
        for user in users.iter_mut() {
            user.turns.retain(|turn| now.iter().any(|f| Arc::ptr_eq(f, &turn.function)));
        }
        // Debts outlive functions: a new connection is no new credit.
        users.retain(|user| !user.turns.is_empty() || user.deficit < 0);
        for function in now {
            let known = users.iter().flat_map(|user| &user.turns).any(|turn| Arc::ptr_eq(&function, &turn.function));
            if known {
                continue;
            }
            let user = function.user();
            turn_of(users, user).turns.push(Turn::of(function));
        }
        number
    }

    /// Takes what users owe for the work of other threads from their next round.
    fn take_charges(&self, users: &mut Vec<UserTurn>) {
        let mut charges = self.charges();
        let mut paid = false;
        charges.retain(|user, owed| {
            let (before, turn) = (*owed, turn_of(users, *user));
            if turn.deficit <= -MAX_AHEAD {
                return true;
            }
            *owed -= before.min(MAX_AHEAD + turn.deficit);
            turn.deficit -= before - *owed;
            turn.credit = 0; // it has been served, by another thread
            paid |= before > MAX_AHEAD && *owed <= MAX_AHEAD;
            *owed > 0
        });
        self.charged.store(!charges.is_empty(), Ordering::SeqCst);
        drop(charges);
        if paid {
            let _ = rustix::io::write(&self.paid, &1u64.to_ne_bytes());
        }
    }

    fn sleep(&self, longest: Duration, users: &mut [UserTurn]) {
        let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: i64::from(longest.subsec_nanos()) };
        // `epoll_wait` has milliseconds, and `epoll_pwait2` is missing in older kernels.
        let mut ready = [PollFd::new(&self.epoll, rustix::event::PollFlags::IN)];
        let _ = rustix::event::poll(&mut ready, Some(&longest));
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
        let (events, _) = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default())).unwrap_or_default();
        for turn in users.iter_mut().flat_map(|user| &mut user.turns) {
            turn.kicked |= events.iter().any(|event| event.data.u64() == number_of(&turn.function));
        }
        let mut ready = [PollFd::new(&self.wake, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut ready, Some(&Timespec::default())).is_ok_and(|n| n > 0) {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
    }
}

/// The number of a function's kicks: its address, while it is in the list.
fn number_of(function: &Arc<Function>) -> u64 {
    Arc::as_ptr(function).addr() as u64
}

/// Runs one round of all users but those who wait for another one. With when the first of these is looked at again.
fn round(users: &mut [UserTurn], clock: &Clock<'_>) -> (Served, Option<Instant>) {
    let (mut all, mut held) = (Served::default(), None::<Instant>);
    let gaps = Gaps::of(users);
    let mut used = 0_i64;
    for user in users.iter_mut() {
        user.held = false;
        if user.deficit <= 0 && !user.idle {
            let now = (clock.now)();
            user.pay(gaps.end(-user.deficit, now).is_some(), now);
            let end = gaps.end(-user.deficit, now);
            user.held = end.is_some();
            if let Some(end) = end {
                held = Some(held.map_or(end, |held| held.min(end)));
                continue;
            }
        }
        let served = user.serve(clock);
        used += if user.idle { 0 } else { served.used };
        (all.stepped, all.owed) = (all.stepped.max(served.stepped), all.owed | served.owed);
    }
    if used > 0 {
        credit(users, used, (clock.now)());
    }
    (all, held)
}

/// Owes users who had nothing to do in a round as much of it as each of the others used, if their last step is recent.
fn credit(users: &mut [UserTurn], used: i64, now: Instant) {
    let is_present = |user: &UserTurn| !user.turns.is_empty() && user.is_recent(now);
    let others = users.iter().filter(|user| is_present(user)).count().saturating_sub(1).max(1);
    for user in users.iter_mut().filter(|user| user.idle) {
        user.credit = if is_present(user) { (user.credit + used / others as i64).min(MAX_CREDIT) } else { 0 };
    }
}

/// Until when others wait for users who have nothing to do at the moment, but may come back.
#[derive(Default)]
struct Gaps {
    /// Who owes no more than a round: half as long as such a user's last operations took.
    short: Option<Instant>,
    /// Who owes more: as long as they took.
    full: Option<Instant>,
    /// Who has a long debt.
    long: Option<Instant>,
}

impl Gaps {
    fn of(users: &[UserTurn]) -> Self {
        let mut all = Self::default();
        for user in users.iter().filter(|user| user.idle && !user.turns.is_empty()) {
            let Some(end) = user.stepped else { continue };
            all.short = all.short.max(Some(end + user.burst / 2));
            all.full = all.full.max(Some(end + user.burst));
            all.long = all.long.max(Some(end + LONG_GAP));
        }
        all
    }

    /// Until when a user with this debt waits: who owes more than a round, no longer than time takes to pay it. So
    /// others have about 0.4 of the time even beside a user who comes back at the last moment each time.
    fn end(&self, debt: i64, now: Instant) -> Option<Instant> {
        let end = match debt {
            debt if debt > LONG_DEBT => self.long,
            debt if debt > QUANTUM => self.full,
            _ => self.short,
        };
        let paid = now + Duration::from_nanos((debt / NANOSECOND_COST) as u64);
        end.filter(|end| *end > now).map(|end| if debt > QUANTUM { end.min(paid) } else { end })
    }
}

/// The turn of a user, which may be new.
fn turn_of(users: &mut Vec<UserTurn>, user: u32) -> &mut UserTurn {
    let found = users.iter().position(|turn| turn.user == user).unwrap_or_else(|| {
        users.push(UserTurn::of(user, Vec::new()));
        users.len() - 1
    });
    &mut users[found]
}

/// The least cost of this time.
fn cost_of(took: Duration) -> i64 {
    i64::try_from(took.as_nanos()).unwrap_or(i64::MAX).saturating_mul(NANOSECOND_COST)
}

impl Usage {
    fn of_this_thread() -> Self {
        let waits = getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches());
        Self { time: thread_time(), waits }
    }
}

impl<'a> Clock<'a> {
    fn new(now: &'a dyn Fn() -> Instant, usage: &'a dyn Fn() -> Usage) -> Self {
        Self { now, usage, last: Cell::new((now(), usage())) }
    }

    /// Reads the usage: what came before is no step's. Returns the former value.
    fn sample(&self, now: Instant) -> Usage {
        self.last.replace((now, (self.usage)())).1
    }

    /// At the beginning of steps, so that what came before counts for little.
    fn begin(&self, now: Instant) {
        if now.duration_since(self.last.get().0) > SAMPLE_TIME {
            self.sample(now);
        }
    }

    /// The time that a user pays for a step of this length that has just ended: not that of other processes, which
    /// may have had the processor. But a client can have a step wait, for a page of its buffer that it is giving back
    /// to the kernel, or that a control group of its own has swapped out: such a step is charged for all of its time.
    fn charged(&self, now: Instant, took: Duration) -> Duration {
        if now.duration_since(self.last.get().0) <= SAMPLE_TIME {
            return took;
        }
        let (before, (_, after)) = (self.sample(now), self.last.get());
        if after.waits == before.waits { took.min(after.time.saturating_sub(before.time)) } else { took }
    }
}

impl UserTurn {
    fn of(user: u32, turns: Vec<Turn>) -> Self {
        let (stepped, burst, idle, paid, held) = (None, Duration::ZERO, true, None, false);
        Self { user, deficit: 0, credit: 0, stepped, burst, idle, paid, held, turns, next: 0 }
    }

    /// The user's debt is paid until now: by the time that has passed, or else by this round.
    fn pay(&mut self, by_time: bool, now: Instant) {
        let since = self.paid.replace(now).unwrap_or(now);
        if by_time {
            self.deficit = self.deficit.saturating_add(cost_of(now.saturating_duration_since(since))).min(0);
        }
    }

    /// The last step was not long before this moment.
    fn is_recent(&self, now: Instant) -> bool {
        self.stepped.is_some_and(|end| now.saturating_duration_since(end) < LONG_GAP)
    }

    /// Runs one round of a user.
    fn serve(&mut self, clock: &Clock<'_>) -> Served {
        let debt = self.deficit.min(0);
        self.deficit = (self.deficit + QUANTUM).min(QUANTUM);
        let available = self.deficit.max(0);
        if self.credit > 0 && self.deficit > 0 {
            self.credit = if self.is_recent((clock.now)()) { self.credit } else { 0 };
            let part = self.credit.min(MAX_AHEAD);
            self.credit -= part;
            self.deficit += part;
        }
        let (mut all, mut idle) = (Served::default(), 0);
        while self.deficit > 0 && idle < self.turns.len() {
            self.next %= self.turns.len();
            let turn = &mut self.turns[self.next];
            let served = turn.serve(self.deficit, clock);
            self.deficit -= served.cost;
            self.next += usize::from(!turn.continues);
            idle = if served.busy() { 0 } else { idle + 1 };
            all.cost += served.cost;
            all.stepped = all.stepped.max(served.stepped);
            all.took += served.took;
            all.owed |= served.owed;
        }
        if all.stepped.is_some() {
            self.burst = (all.took + if self.idle { Duration::ZERO } else { self.burst }).min(MAX_GAP);
            (self.stepped, self.paid) = (all.stepped, all.stepped);
        }
        // Not what it cost: who spent more than a round allows pays in the next ones, in which others are served too.
        all.used = QUANTUM.min(-debt) + all.cost.min(available);
        all.owed |= self.deficit <= 0;
        let left = (self.deficit - QUANTUM).max(0);
        (self.credit, self.deficit) = (self.credit + left, self.deficit - left);
        self.idle = !all.busy();
        self.deficit = if self.idle { 0 } else { self.deficit };
        all
    }
}

impl Turn {
    fn of(function: Arc<Function>) -> Self {
        let (next, continues, kicked, empty_kicks, ignored) = (0, false, false, 0, None);
        Self { function, deficit: 0, next, continues, most: MAX_STEP, kicked, empty_kicks, ignored }
    }

    /// Runs one round of a function, or as much as the user may still spend.
    fn serve(&mut self, most: i64, clock: &Clock<'_>) -> Served {
        let queues = self.function.queues();
        if !std::mem::take(&mut self.continues) {
            self.deficit = (self.deficit + QUANTUM).min(QUANTUM);
        }
        if self.deficit <= 0 {
            return Served { owed: true, ..Served::default() };
        }
        let mut all = Served::default();
        let mut before = (clock.now)();
        clock.begin(before);
        loop {
            let mut any = false;
            for _ in 0..queues {
                let queue = self.next;
                self.next = (queue + 1) % queues;
                if let Some(cost) = self.function.step(queue, self.most) {
                    (self.kicked, self.empty_kicks) = (false, 0);
                    let after = (clock.now)();
                    let took = after.duration_since(before);
                    (all.stepped, any, before) = (Some(after), true, after);
                    all.took += took;
                    if took > STEP_TIME {
                        self.most = (self.most / 2).max(MIN_STEP);
                    } else if took < STEP_TIME / 4 && cost.unsigned_abs() >= self.most / 2 {
                        self.most = (self.most * 2).min(MAX_STEP);
                    }
                    let charged = clock.charged(after, took);
                    // Twice where the kernel had to find pages for it: they push what others copy out of the caches.
                    let slow = (cost as u128) < charged.as_nanos() * SLOW;
                    let least = cost_of(charged * if slow { 2 } else { 1 });
                    // Functions of a user share by the card's measure alone.
                    self.deficit -= cost;
                    all.cost += cost.max(least);
                    if self.deficit <= 0 || all.cost >= most {
                        self.continues = self.deficit > 0;
                        return all;
                    }
                }
            }
            if !any {
                self.empty_kicks += u32::from(std::mem::take(&mut self.kicked));
                self.deficit = 0;
                return all;
            }
        }
    }
}

#[cfg(test)]
mod tests;
