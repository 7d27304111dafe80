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
/// A nanosecond of a step costs its user at least so many bytes, more than any memory copies in one: so users share the
/// worker's time, whether they copy or do what is slow for reasons that the card does not see, such as pages of a
/// buffer that the client has given back to the kernel. With less, a user who copies fast gets less time than others.
const NANOSECOND_COST: i64 = 64;
/// The thread's usage is read again after so much time, since each reading takes 0.1 us or more. A shorter step is
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
/// After so many kicks in a row that bring no work, the function's kicks are ignored for [`IGNORE_TIME`]: each takes a
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
    /// What the user is owed for what others were served while it had nothing to do.
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

/// What was done in a round, of a user or of a function.
#[derive(Clone, Copy, Default)]
struct Served {
    cost: i64,
    /// What it paid out of the quantum of a round, for debts and for this round's steps; of a user.
    paid: i64,
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
    let mut paid = 0_i64;
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
        paid += if user.idle { 0 } else { served.paid };
        (all.stepped, all.owed) = (all.stepped.max(served.stepped), all.owed | served.owed);
    }
    if paid > 0 {
        credit(users, paid, (clock.now)());
    }
    (all, held)
}

/// Owes those who had nothing to do in a round what each of the others paid in it, if they had a step not long ago.
fn credit(users: &mut [UserTurn], paid: i64, now: Instant) {
    let is_present = |user: &UserTurn| !user.turns.is_empty() && user.is_recent(now);
    let others = users.iter().filter(|user| is_present(user)).count().saturating_sub(1).max(1);
    for user in users.iter_mut().filter(|user| user.idle) {
        user.credit = if is_present(user) { (user.credit + paid / others as i64).min(MAX_CREDIT) } else { 0 };
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

    /// Until when a user who owes so much waits: who owes more than a round, no longer than time takes to pay it. So
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

/// The least that so much time costs.
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

    /// The time that a user pays for a step that took so long and has just ended: not that of other processes, which
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
        all.paid = QUANTUM.min(-debt) + all.cost.min(available);
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
mod tests {
    use dmalane_addr::{Access, CardAddr, Iova, Span};
    use dmalane_card::regs::{self, BAR_REGISTERS};
    use dmalane_card::{Descriptor, Task};
    use dmalane_dma::{Heap, Mapping, MemfdHeap, Registrar};
    use dmalane_queue::{DeviceAddr, Direction};

    use super::*;
    use crate::config::{Budget, ClientLimits, Config};

    /// A function whose queues are full of copies of this length while the test refills them.
    struct Backlog {
        turn: UserTurn,
        len: u32,
        tails: Vec<u32>,
        /// The client's descriptors.
        fds: Vec<OwnedFd>,
        _mappings: Vec<Mapping>,
    }

    const ENTRIES: u32 = 64;

    impl Backlog {
        fn new(len: u32, queues: u32, budget: &Arc<Budget>) -> Self {
            Self::of(len, None, queues, budget)
        }

        /// With `rows`, every second descriptor gives the next a shape with this many rows of `len` bytes at this pitch
        /// on the card.
        fn of(len: u32, rows: Option<(u32, u64)>, queues: u32, budget: &Arc<Budget>) -> Self {
            let limits = ClientLimits::default();
            let ddr = rows.map_or(4 << 20, |(rows, pitch)| u64::from(rows) * pitch.max(4 << 10)).max(4 << 20);
            let account = Arc::new(crate::account::Account::new(u64::MAX, u64::MAX));
            let made = Function::new(&limits, ddr, 4 << 20, queues, 0, (budget, &account));
            let (function, fds) = made.map_err(|e| e.1).unwrap();
            if rows.is_none_or(|(_, pitch)| pitch == 2) {
                // First touches are for the tests that are about them.
                function.card().memory().populate(Span::new(CardAddr::new(0), 4 << 20).unwrap()).unwrap();
            }
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
                        Some((rows, card_pitch)) if slot % 2 == 0 => {
                            let shape = Task::Shape { host_pitch: 0, card_pitch, rows };
                            Descriptor { chained: true, ..shape.into() }
                        }
                        _ => copy,
                    };
                    for (i, word) in descriptor.encode().into_iter().enumerate() {
                        memory.as_volatile_slice().store_u64(32 * slot as usize + 8 * i, word).unwrap();
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
                function.step(queue as usize, MAX_STEP);
            }
            let turn = Turn::of(Arc::new(function));
            let turn = UserTurn::of(0, vec![turn]);
            Self { turn, len, tails: vec![0; queues as usize], fds, _mappings: mappings }
        }

        fn function(&self) -> &Function {
            &self.turn.turns[0].function
        }

        /// A round, in which no time passes.
        fn serve(&mut self) -> bool {
            let now = Instant::now();
            self.turn.serve(&Clock::new(&|| now, &at_work())).busy()
        }

        /// Refills the rings and returns the bytes copied so far.
        fn refill(&mut self) -> u64 {
            self.refill_to(ENTRIES)
        }

        /// The same, but for so many entries that wait.
        fn refill_to(&mut self, waiting: u32) -> u64 {
            let mut moved = 0;
            for (queue, tail) in self.tails.iter_mut().enumerate() {
                let function = &self.turn.turns[0].function;
                let head = regs::channel(queue as u32, regs::CH_HEAD);
                let head = function.card().read32(BAR_REGISTERS, head).unwrap();
                *tail = head + waiting;
                function.page().ring(queue, *tail);
                moved += u64::from(head) * u64::from(self.len);
            }
            moved
        }
    }

    /// A thread that has never waited, and all of whose time was its own: more at each call than a test takes.
    fn at_work() -> impl Fn() -> Usage {
        let calls = Cell::new(0);
        move || Usage { time: Duration::from_secs(3600) * calls.replace(calls.get() + 1), waits: 0 }
    }

    /// A user with the functions of these.
    fn user_of(backlogs: &[Backlog]) -> UserTurn {
        let turn = |backlog: &Backlog| Turn::of(backlog.turn.turns[0].function.clone());
        UserTurn::of(1, backlogs.iter().map(turn).collect())
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
                        backlog.serve();
                        assert!(backlog.turn.deficit <= QUANTUM);
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
        let mut rows = Backlog::of(1, Some((4096, 2)), 1, &budget);
        let mut much = Backlog::new(1 << 20, 1, &budget);
        let mut copied = 0;
        for _ in 0..64 {
            rows.refill();
            copied = much.refill();
            rows.serve();
            much.serve();
        }
        assert!(copied >= 60 << 20, "{copied}");
        let copied_rows = rows.function().moved();
        // 2048 rows in a round: each counts as 512 bytes. Fewer where rows take long: their time counts too.
        assert!((1 << 11..=66 << 11).contains(&copied_rows), "{copied_rows} rows in 64 rounds");
    }

    #[test]
    fn first_touches_are_charged_to_who_touches() {
        let budget = Arc::new(Budget::new(&Config::default()));
        // 128 rows of one byte, each in a block of its own: all of them would be one step if only bytes counted.
        let mut attack = Backlog::of(1, Some((128, 2 << 20)), 1, &budget);
        let mut victim = Backlog::new(1 << 20, 1, &budget);
        let mut copied = 0;
        for round in 1..=64 {
            attack.refill();
            copied = victim.refill();
            attack.serve();
            victim.serve();
            // 2 MiB that are made present cost as much as copying 8 MiB.
            let (touched, _) = attack.function().card().memory().touched();
            assert!(touched <= (round + 8) << 20 >> 2 | 2 << 20, "{touched} bytes after {round} rounds");
        }
        assert!(copied >= 52 << 20, "{copied}");
        assert!(attack.function().card().memory().touched().0 >= 14 << 20, "the attacker gets its share");
    }

    #[test]
    fn debts_are_paid_while_idle_and_by_new_functions() {
        let budget = Arc::new(Budget::new(&Config::default()));
        // One block at a time, with nothing else to do in between.
        let mut attack = Backlog::of(1, Some((1, 0)), 1, &budget);
        attack.refill();
        attack.serve();
        assert!(attack.turn.deficit < -6 * QUANTUM, "{}", attack.turn.deficit);
        attack.turn.turns.clear();
        for _ in 0..7 {
            assert!(attack.serve(), "who owes is not idle");
        }
        assert!(!attack.serve() && attack.turn.deficit == 0, "{}", attack.turn.deficit);
    }

    #[test]
    fn slow_steps_are_charged_by_their_time() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut slow = Backlog::new(4096, 1, &budget);
        slow.refill();
        slow.serve();
        slow.refill();
        let (start, calls) = (Instant::now(), std::cell::Cell::new(0));
        let clock = || {
            calls.set(calls.get() + 1);
            start + Duration::from_millis(calls.get())
        };
        slow.turn.serve(&Clock::new(&clock, &at_work()));
        // 1 ms, twice: one step, for 122 rounds.
        assert_eq!(calls.get(), 3, "the clock, and the beginning and the end of the step");
        let owed = -slow.turn.deficit / QUANTUM;
        assert_eq!(owed, 2 * 1_000_000 * NANOSECOND_COST / QUANTUM - 1);
    }

    #[test]
    fn steps_that_take_long_become_short() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut one = Backlog::new(1 << 20, 1, &budget);
        let (start, passed) = (Instant::now(), Cell::new(Duration::ZERO));
        let mut after = |tick, rounds| {
            let now = || {
                passed.set(passed.get() + tick);
                start + passed.get()
            };
            for _ in 0..rounds {
                one.refill();
                one.turn.serve(&Clock::new(&now, &at_work()));
            }
            (one.turn.turns[0].most, one.refill())
        };
        assert_eq!(after(Duration::from_micros(40), 10).0, MAX_STEP);
        let (most, before) = after(Duration::from_millis(1), 2000);
        assert_eq!(most, MIN_STEP);
        // A copy of 1 MiB takes 32 such steps.
        let (_, copied) = after(Duration::from_micros(100), 2000);
        assert!((1..=8).contains(&((copied - before) >> 20)), "{} bytes", copied - before);
        assert_eq!(after(Duration::from_micros(1), 100).0, MAX_STEP);
    }

    /// A user with 64 copies to do, and one whose operations the test submits; time passes where the test says so.
    fn two_users() -> ([Backlog; 2], [UserTurn; 2]) {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut backlogs = [0, 1].map(|_| Backlog::new(4096, 1, &budget));
        backlogs[0].refill();
        let users = backlogs.each_ref().map(|backlog| user_of(std::slice::from_ref(backlog)));
        (backlogs, users)
    }

    #[test]
    fn who_owes_waits_for_a_user_between_two_operations() {
        let ([mut backlog, mut other], mut users) = two_users();
        let (start, passed) = (Instant::now(), Cell::new(Duration::ZERO));
        let (now, usage) = (|| start + passed.get(), at_work());
        let clock = Clock::new(&now, &usage);
        let us = Duration::from_micros;
        let moved = |users: &[UserTurn; 2]| users[0].turns[0].function.moved();
        let until = |users: &mut [UserTurn; 2], at| {
            passed.set(at);
            round(users, &clock).1.map(|end| end - start)
        };
        // The other user's operations have taken 200 us and ended at the start.
        let owes = |users: &mut [UserTurn; 2], debt| {
            (users[0].deficit, users[0].idle, users[0].paid) = (-cost_of(debt), false, Some(start));
            (users[1].stepped, users[1].burst) = (Some(start), us(200));
        };
        // Until the debt is paid, if that comes first, and in any case for half of what the operations took.
        for (debt, ends, last, paid) in [
            (150, [150, 150, 150], 140, true),
            (90, [90, 90, 100], 100, true),
            (10, [100, 100, 100], 100, true),
            (0, [100, 100, 100], 100, true),
            (500, [200, 200, 200], 200, false),
        ] {
            owes(&mut users, us(debt));
            let before = moved(&users);
            let seen = [1, 60, 80].map(|at| until(&mut users, us(at)));
            assert_eq!((seen, moved(&users)), (ends.map(|end| Some(us(end))), before), "{debt}");
            assert_eq!(until(&mut users, us(last)), None, "{debt}");
            assert_eq!(moved(&users) > before, paid, "{debt}");
            backlog.refill();
        }
        // Long debts wait longer.
        owes(&mut users, us(100_000));
        assert_eq!([us(1), us(9_000)].map(|at| until(&mut users, at)), [Some(LONG_GAP); 2]);
        assert_eq!(until(&mut users, LONG_GAP), None);
        // However long the other user has worked without a gap.
        for _ in 0..200 {
            (users[1].idle, users[1].deficit) = (false, 0);
            other.refill_to(1);
            passed.set(passed.get() + us(1_000));
            users[1].serve(&Clock::new(&|| start + passed.replace(passed.get() + us(500)), &usage));
        }
        assert_eq!(users[1].burst, MAX_GAP);
        // Nobody waits for a user without functions.
        owes(&mut users, us(0));
        users[1].idle = true;
        let turns = std::mem::take(&mut users[1].turns);
        assert_eq!(until(&mut users, us(1)), None);
        (users[1].turns, users[0].idle) = (turns, false);
        // Who has nothing to do waits for nobody.
        (users[0].deficit, users[0].idle) = (0, true);
        users[1].stepped = Some(start + LONG_GAP);
        assert_eq!(until(&mut users, LONG_GAP), None);
    }

    #[test]
    fn long_debts_take_their_time_while_another_user_works() {
        let ([_slow, mut other], mut users) = two_users();
        let (start, passed) = (Instant::now(), Cell::new(Duration::ZERO));
        let (now, usage) = (|| start + passed.get(), at_work());
        let clock = Clock::new(&now, &usage);
        let ms = Duration::from_millis;
        let moved = |users: &[UserTurn; 2], i: usize| users[i].turns[0].function.moved();
        (users[0].deficit, users[0].idle, users[0].paid) = (-cost_of(ms(100)), false, Some(start));
        users[1].stepped = Some(start);
        // The client of the other user has one operation at a time, and nine milliseconds between them. Rounds pay only
        // while that operation is under way.
        while moved(&users, 0) == 0 {
            let before = moved(&users, 1);
            other.refill_to(1);
            let not_held = (0..7000).filter(|_| round(&mut users, &clock).1.is_none()).count();
            assert!(not_held <= 2 || passed.get() >= ms(97), "{not_held} rounds after {passed:?}");
            assert!(moved(&users, 1) > before, "the other user's work goes on");
            passed.set(passed.get() + ms(9));
        }
        assert_eq!(passed.get(), ms(108));
    }

    /// The debt of a user after one step of 10 ms, in rounds, where the thread then reports this usage.
    fn owed_after_a_step(before: impl Fn(&Clock<'_>), usage: &dyn Fn() -> Usage) -> i64 {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut slow = Backlog::new(4096, 1, &budget);
        slow.refill_to(1);
        let (start, calls) = (Instant::now(), Cell::new(0));
        let now = || {
            calls.set(calls.get() + 1);
            start + Duration::from_millis(10) * calls.get()
        };
        let clock = Clock::new(&now, usage);
        before(&clock);
        slow.turn.serve(&clock);
        -slow.turn.deficit / QUANTUM
    }

    #[test]
    fn steps_are_charged_for_the_processor_time_and_waits_of_their_own() {
        let usage = Cell::new(Usage { time: Duration::ZERO, waits: 0 });
        // Reads of the usage: when the clock is made, when the turn begins, and after the step.
        for (what, step, ms) in [
            ("worked, such as to wake thousands of waiters", (10, 0), 10),
            ("another process had the processor", (1, 0), 1),
            ("waited", (1, 1), 10),
        ] {
            let reads = Cell::new(0);
            let read = || {
                reads.set(reads.get() + 1);
                let (worked, waits) = if reads.get() < 3 { (0, 0) } else { step };
                let Usage { time, waits: before } = usage.get();
                Usage { time: time + Duration::from_millis(worked), waits: before + waits }
            };
            // Twice, for it copied 4 KiB alone.
            let (owed, rounds) = (owed_after_a_step(|_| {}, &read), 2 * ms * 61);
            assert!((rounds - 9..=rounds + 9).contains(&owed), "{what}: {owed} rounds for {ms} ms");
        }
    }

    #[test]
    fn a_client_whose_socket_has_thousands_of_waiters_is_woken_no_more() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut one = Backlog::new(4096, 1, &budget);
        let (call, stop) = (one.fds[1].try_clone().unwrap(), AtomicBool::new(false));
        let each =
            8000.min(rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(8000)) as usize;
        let waits = || {
            // As many as the limit of descriptors allows, over the threads.
            let mut fds = vec![PollFd::new(&call, rustix::event::PollFlags::IN); each];
            while !stop.load(Ordering::Relaxed) {
                let _ = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
                crate::socket::drain(&call);
            }
        };
        let calls = std::thread::scope(|s| {
            (0..160_000 / each).for_each(|_| drop(s.spawn(waits)));
            let called = (0..200).find(|_| {
                std::thread::sleep(Duration::from_millis(50));
                one.refill_to(1);
                one.function().page().swap_wakeup_wanted(0, 1);
                one.serve();
                one.function().calls_take_long()
            });
            stop.store(true, Ordering::Relaxed);
            called
        });
        assert!(calls.is_some_and(|calls| calls >= 3), "{calls:?}");
        // The worker goes on without: nothing is sent.
        one.refill_to(1);
        one.function().page().swap_wakeup_wanted(0, 1);
        assert!(one.serve());
        let mut fds = [PollFd::new(&call, rustix::event::PollFlags::IN)];
        crate::socket::drain(&call);
        assert_eq!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(0));
    }

    #[test]
    fn nobody_pays_for_what_another_users_step_waited_for() {
        let usage = Cell::new(Usage { time: Duration::ZERO, waits: 0 });
        let another = |clock: &Clock<'_>| {
            // A step of a millisecond that waits.
            let start = (clock.now)();
            usage.set(Usage { time: Duration::from_micros(10), waits: 1 });
            clock.charged(start + Duration::from_millis(1), Duration::from_millis(1));
        };
        // Another process has the processor during the next step.
        assert!(owed_after_a_step(another, &|| usage.get()) < 9);
        // The kernel's count: a thread that sleeps has waited, and has not worked.
        let before = Usage::of_this_thread();
        std::thread::sleep(Duration::from_millis(50));
        let after = Usage::of_this_thread();
        assert!(after.waits > before.waits && after.time - before.time < Duration::from_millis(50));
    }

    #[test]
    fn work_of_other_threads_is_charged() {
        let queue = RunQueue::new().unwrap();
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut backlog = Backlog::new(1 << 20, 1, &budget);
        backlog.refill();
        let mut users = vec![backlog.turn];
        let now = Instant::now();
        let round = |users: &mut Vec<UserTurn>| {
            queue.take_charges(users);
            users.iter_mut().fold(false, |did, user| user.serve(&Clock::new(&|| now, &at_work())).busy() | did)
        };
        // 1 ms of another thread is 61 rounds of the worker; user 5 has no function, and owes all the same.
        for (user, ms) in [(0, 1), (5, 4), (6, 100), (6, 100)] {
            queue.charge(user, Duration::from_millis(ms));
        }
        assert_eq!([0, 5, 6, 7].map(|user| queue.owes(user)), [false, true, true, false]);
        assert_eq!(queue.charges()[&6], MAX_OTHER_COST, "more than can be owed is dropped");
        let moved = |users: &[UserTurn]| users[0].turns[0].function.moved();
        for paid in 1..=61 {
            assert!(round(&mut users));
            assert_eq!(moved(&users), 0, "first the debt, which {paid} rounds have not paid");
        }
        assert!(round(&mut users) && moved(&users) > 0 && queue.owes(5));
        let is_readable = || {
            let mut fds = [PollFd::from_borrowed_fd(queue.paid(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&Timespec::default())) == Ok(1)
        };
        assert!(!is_readable());
        while queue.owes(5) {
            round(&mut users);
        }
        assert!(is_readable() && queue.owes(6));
        queue.take_paid();
        assert!(!is_readable());
        while queue.charged.load(Ordering::SeqCst) {
            round(&mut users);
        }
        assert!(queue.charges().is_empty() && !queue.owes(6));
        // Paid debts leave nothing of a user without functions.
        queue.refresh(&mut users);
        assert!(users.iter().all(|turn| turn.user != 5));
    }

    #[test]
    fn nothing_but_work_keeps_the_worker_awake() {
        let (queue, spin) = (Arc::new(RunQueue::new().unwrap()), Duration::from_millis(50));
        let running = queue.clone();
        let worker = std::thread::spawn(move || {
            running.run(spin);
            thread_time()
        });
        // Each wakes it, for a user who owes some rounds, and sooner than it would sleep.
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(10));
            queue.charge(7, Duration::from_micros(100));
        }
        queue.quit();
        let worked = worker.join().unwrap();
        assert!(worked < 5 * spin, "{worked:?} of a second");
    }

    #[test]
    fn kicks_without_work_are_ignored_for_a_while() {
        let (queue, budget) = (RunQueue::new().unwrap(), Arc::new(Budget::new(&Config::default())));
        let mut backlog = Backlog::new(4096, 1, &budget);
        let function = backlog.turn.turns[0].function.clone();
        queue.add(function.clone()).unwrap();
        let (mut users, now, usage) = (Vec::new(), Instant::now(), at_work());
        queue.refresh(&mut users);
        // The first is that of the eventfd itself, which may be readable.
        queue.sleep(Duration::ZERO, &mut users);
        let kick = |users: &mut Vec<UserTurn>| {
            crate::socket::kick(function.kick());
            queue.sleep(Duration::ZERO, users);
            let heard = users[0].turns[0].kicked;
            round(users, &Clock::new(&|| now, &usage));
            heard
        };
        users[0].turns[0].kicked = false;
        for _ in 0..EMPTY_KICKS {
            assert_eq!(queue.ignore_empty_kicks(&mut users), None);
            assert!(kick(&mut users));
        }
        assert!(queue.ignore_empty_kicks(&mut users).is_some());
        assert!(!kick(&mut users) && queue.ignore_empty_kicks(&mut users).is_some());
        // One more chance after a while.
        users[0].turns[0].ignored = Some(now);
        assert!(queue.ignore_empty_kicks(&mut users).is_none() && kick(&mut users));
        assert!(queue.ignore_empty_kicks(&mut users).is_some());
        // Work is seen all the same, and forgives once the time is over.
        backlog.refill_to(1);
        assert!(!kick(&mut users) && queue.ignore_empty_kicks(&mut users).is_some());
        users[0].turns[0].ignored = Some(now);
        for _ in 0..EMPTY_KICKS {
            assert_eq!(queue.ignore_empty_kicks(&mut users), None);
            assert!(kick(&mut users));
        }
        assert!(queue.ignore_empty_kicks(&mut users).is_some());
        // A function that is gone is not listened to again, though its client keeps the descriptor.
        queue.remove(&function);
        users[0].turns[0].ignored = Some(now);
        assert!(queue.ignore_empty_kicks(&mut users).is_none() && !kick(&mut users));
    }

    #[test]
    fn users_and_not_clients_get_equal_shares() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut many = (0..5).map(|_| Backlog::new(256 << 10, 1, &budget)).collect::<Vec<_>>();
        let mut one = Backlog::new(256 << 10, 1, &budget);
        let mut user = user_of(&many);
        let (mut theirs, mut copied, now) = ([0; 5], 0, Instant::now());
        for _ in 0..60 {
            for (backlog, moved) in many.iter_mut().zip(&mut theirs) {
                *moved = backlog.refill();
            }
            copied = one.refill();
            user.serve(&Clock::new(&|| now, &at_work()));
            one.serve();
        }
        let all: u64 = theirs.iter().sum();
        assert!(copied * 10 >= all * 9 && all * 10 >= copied * 9, "{theirs:?} {copied}");
        assert!(theirs.iter().all(|moved| moved * 5 * 10 >= all * 8), "{theirs:?}");
    }

    #[test]
    fn functions_of_a_user_share_by_bytes_where_the_time_of_each_step_ends_a_round() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut two = [64 << 10, 1 << 20].map(|len| Backlog::new(len, 1, &budget));
        let mut user = user_of(&two);
        let (start, calls) = (Instant::now(), std::cell::Cell::new(0));
        // 100 us: more than a round.
        let clock = || {
            calls.set(calls.get() + 1);
            start + Duration::from_micros(100) * calls.get()
        };
        let mut moved = [0; 2];
        for _ in 0..4000 {
            // A step takes all that waits, up to a round of bytes: of the short copies one at a time.
            moved = [two[0].refill_to(1), two[1].refill()];
            user.serve(&Clock::new(&clock, &at_work()));
        }
        // Sixteen short copies in a row, then a long one.
        assert!(moved[0].abs_diff(moved[1]) <= 2 << 20 && moved[0] > 16 << 20, "{moved:?}");
    }

    #[test]
    fn who_pauses_catches_up_with_others_within_limits() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut two = [0, 1].map(|_| Backlog::new(1 << 20, 1, &budget));
        let mut users = two.each_ref().map(|backlog| user_of(std::slice::from_ref(backlog)));
        let (start, passed, usage) = (Instant::now(), Cell::new(Duration::ZERO), at_work());
        let now = || start + passed.get();
        let clock = Clock::new(&now, &usage);
        // A MiB is a round's. So many are copied in a round in which the second user has so many to copy.
        let mut copied = |waiting: u32| {
            let moved = |two: &[Backlog; 2]| two.each_ref().map(|one| one.function().moved() >> 20);
            let before = moved(&two);
            two[0].refill();
            two[1].refill_to(waiting);
            round(&mut users, &clock);
            let after = moved(&two);
            [0, 1].map(|i| after[i] - before[i])
        };
        assert_eq!(copied(1), [1, 1]);
        for _ in 0..8 {
            assert_eq!(copied(0), [1, 0]);
        }
        assert_eq!(copied(3), [1, 3], "what is left of the credit stays");
        assert_eq!([copied(64), copied(64)], [[1, 6], [1, 1]], "what the other user had, and no more");
        // A pause without end, and what nobody has to wait for in a round.
        (0..500).for_each(|_| assert_eq!(copied(0)[1], 0));
        let (credit, part) = ((MAX_CREDIT >> 20) as u64, (MAX_AHEAD >> 20) as u64);
        let after: Vec<_> = (0..8).map(|_| copied(64)).collect();
        let all: u64 = after.iter().map(|[_, second]| second).sum();
        assert!(all.abs_diff(credit + 8) <= 1, "{after:?}");
        assert!(after.iter().all(|[first, second]| *first == 1 && *second <= part + 2), "{after:?}");
        // It is gone for longer, and then nothing is owed, whether somebody was served meanwhile or not.
        for rounds in [1, 0] {
            while copied(0)[1] > 0 {}
            copied(1);
            copied(0);
            passed.set(passed.get() + LONG_GAP);
            (0..rounds).for_each(|_| assert_eq!(copied(0)[1], 0));
            assert_eq!(copied(64), [1, 1], "{rounds}");
        }
    }

    #[test]
    fn who_pauses_is_owed_what_each_of_several_users_had() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut three = [0, 1, 2].map(|_| Backlog::new(1 << 20, 1, &budget));
        let mut users = three.each_ref().map(|backlog| user_of(std::slice::from_ref(backlog)));
        let (now, usage) = (Instant::now(), at_work());
        let now = || now;
        let clock = Clock::new(&now, &usage);
        let mut copied = |waiting: u32| {
            let before = three[2].function().moved();
            three[0].refill();
            three[1].refill();
            three[2].refill_to(waiting);
            round(&mut users, &clock);
            (three[2].function().moved() - before) >> 20
        };
        assert_eq!(copied(1), 1);
        (0..8).for_each(|_| assert_eq!(copied(0), 0));
        assert_eq!([copied(64), copied(64)], [9, 1]);
    }

    #[test]
    fn who_comes_back_while_others_are_in_debt_gains_nothing() {
        for waiting in (1..=64).step_by(3) {
            let budget = Arc::new(Budget::new(&Config::default()));
            // A long copy takes 100 us and costs what six rounds allow.
            let mut two = [1 << 20, 64 << 10].map(|len| Backlog::new(len, 1, &budget));
            let mut users = two.each_ref().map(|backlog| user_of(std::slice::from_ref(backlog)));
            let functions = two.each_ref().map(|backlog| backlog.turn.turns[0].function.clone());
            let (start, waited, usage) = (Instant::now(), Cell::new(Duration::ZERO), at_work());
            let moved = || functions.each_ref().map(|function| function.moved());
            let now = || start + waited.get() + Duration::from_nanos((moved().iter().sum::<u64>() * 100_000) >> 20);
            let clock = Clock::new(&now, &usage);
            let mut before = moved();
            for _ in 0..2000 {
                two[0].refill();
                // The second user waits until the first one has had a step without it.
                if moved()[0] > before[0] && users[1].idle {
                    two[1].refill_to(waiting);
                    before = moved();
                }
                let until_now = moved();
                round(&mut users, &clock);
                if moved() == until_now {
                    waited.set(waited.get() + Duration::from_micros(10));
                }
            }
            let [first, second] = moved();
            assert!(second * 4 <= first * 5, "{waiting} copies: {second} beside {first}");
        }
    }

    #[test]
    fn who_is_served_by_other_threads_is_owed_nothing() {
        let (queue, budget) = (RunQueue::new().unwrap(), Arc::new(Budget::new(&Config::default())));
        let mut users = vec![Backlog::new(4096, 1, &budget).turn];
        users[0].credit = MAX_CREDIT;
        queue.charge(users[0].user, Duration::from_micros(1));
        queue.take_charges(&mut users);
        assert_eq!(users[0].credit, 0);
    }

    #[test]
    fn idle_functions_accumulate_no_credit() {
        let budget = Arc::new(Budget::new(&Config::default()));
        let mut one = Backlog::new(64 << 10, 1, &budget);
        for _ in 0..100 {
            assert!(!one.serve());
        }
        assert_eq!(one.turn.deficit, 0);
        one.refill();
        one.serve();
        assert!(one.refill() <= 2 << 20, "at most one round after a hundred idle ones");
    }
}
