//! The worker: one thread that runs the queues of all functions in turn.
//!
//! Deficit round robin (Shreedhar, Varghese: "Efficient Fair Queuing Using Deficit Round Robin", 1995), over users and
//! then over the functions of each. In each round a user may spend a quantum. A step costs the bytes that the card says
//! it did, or the time that it took where that is more. Overspend is carried into the next rounds, also of users who
//! have nothing to do then. Work of other threads for a user, such as mapping memory, is charged to the user's rounds.
//!
//! The queues of a user with few operations in flight are empty until its client has seen that these ended. Rounds take
//! no time then, and would pay at once whatever the others owe, so that these fill each gap, and the client has to wait
//! for a processor. So in such a gap debts are paid by the time that passes.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};

use crate::function::Function;

/// Bytes of a round: what a step may cost.
const QUANTUM: i64 = 1 << 20;
/// Bytes charged for each nanosecond of a step. No memory copies as fast, so users share the worker's time, whether
/// they copy or do what the card does not see, such as touching pages that the client has given back to the kernel.
/// With less, a user who copies fast gets less time than others.
const NANOSECOND_COST: i64 = 64;
/// The most that a user can owe for work of other threads, 64 ms: who maps memory all the time, and then stops, is
/// served again soon.
const MAX_OTHER_COST: i64 = 64_000_000 * NANOSECOND_COST;
/// While a user owes more than this for work of other threads, 1 ms, they do no more of it beside other users. Up to as
/// much more is paid at a time.
const MAX_AHEAD: i64 = 1_000_000 * NANOSECOND_COST;
/// A user whose last step is no longer ago than this may come back at any moment: its client may have to wait for a
/// processor before it submits its next operation.
const GAP: Duration = Duration::from_millis(5);
/// The worker spins, and does not sleep, where a debt is paid sooner than this: to sleep takes as long.
const SHORT_GAP: Duration = Duration::from_micros(50);
/// Largest and smallest limit of a step's cost; the limit halves while steps take long.
const MAX_STEP: u64 = 1 << 20;
const MIN_STEP: u64 = 32 << 10;
/// Where steps take longer than this, the next ones are shorter: a user whose few operations end sooner than that has
/// no work for the worker until the client has seen it, and waits for the step of another user then.
const STEP_TIME: Duration = Duration::from_micros(200);
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
    /// When the last steps began and ended.
    stepped: Option<(Instant, Instant)>,
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
}

/// Work done in a round, of a user or of a function.
#[derive(Clone, Copy, Default)]
struct Served {
    cost: i64,
    /// A queue had work.
    stepped: bool,
    /// Something is owed for what was done before.
    owed: bool,
    /// When time will have paid the first of the debts that it pays.
    paid: Option<Duration>,
}

impl Served {
    /// There was something to do.
    fn busy(self) -> bool {
        self.stepped || self.owed
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
        epoll::add(&self.epoll, function.kick(), epoll::EventData::new_u64(0), flags)
    }

    /// Removes a function.
    pub(crate) fn remove(&self, function: &Arc<Function>) {
        self.change(|functions| {
            // With the list, so that the worker does not listen again: the client keeps the file open.
            let _ = epoll::delete(&self.epoll, function.kick());
            functions.retain(|f| !Arc::ptr_eq(f, function));
        });
    }

    /// Runs the queues until [`RunQueue::quit`]. Spins for `spin` before it sleeps.
    pub(crate) fn run(&self, spin: Duration) {
        let mut users: Vec<UserTurn> = Vec::new();
        let mut seen = 0;
        let mut idle: Option<Instant> = None;
        let mut asleep = false;
        let set_asleep = |users: &[UserTurn], asleep| {
            users.iter().flat_map(|user| &user.turns).for_each(|turn| turn.function.page().set_asleep(asleep));
        };
        let mut rounds = Rounds { last: None };
        while !self.quit.load(Ordering::SeqCst) {
            #[cfg(test)]
            if self.paused.load(Ordering::SeqCst) {
                self.parked.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if self.changes.load(Ordering::SeqCst) != seen {
                seen = self.refresh(&mut users);
            }
            if self.charged.load(Ordering::SeqCst) {
                self.take_charges(&mut users);
            }
            let all = rounds.next(&mut users, Instant::now);
            // Spinning is for clients that ring again soon. What else wakes the worker must not keep it awake: the
            // client that it has just called may wait for its processor.
            if all.stepped {
                idle = None;
            } else if all.owed && all.paid.is_none_or(|paid| paid < SHORT_GAP) {
                // Rounds in which nobody has work pay it.
            } else if idle.get_or_insert_with(Instant::now).elapsed() < spin {
                std::hint::spin_loop();
            } else if !asleep {
                // Announce the sleep, check once more, then sleep: a doorbell that the check misses comes with a kick.
                // A function that is added in between was told nothing, but `change` wakes after it has counted.
                asleep = true;
                set_asleep(&users, true);
                continue;
            } else {
                self.sleep(all.paid.map_or(MAX_SLEEP, |paid| paid.min(MAX_SLEEP)));
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
        charges.retain(|user, owed| {
            let (before, turn) = (*owed, turn_of(users, *user));
            if turn.deficit <= -MAX_AHEAD {
                return true;
            }
            *owed -= before.min(MAX_AHEAD + turn.deficit);
            turn.deficit -= before - *owed;
            *owed > 0
        });
        self.charged.store(!charges.is_empty(), Ordering::SeqCst);
    }

    fn sleep(&self, longest: Duration) {
        let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: i64::from(longest.subsec_nanos()) };
        // `epoll_wait` has milliseconds, and `epoll_pwait2` is missing in older kernels.
        let mut ready = [PollFd::new(&self.epoll, PollFlags::IN)];
        let _ = poll(&mut ready, Some(&longest));
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
        let _ = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default()));
        // Never blocks.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

/// The rounds of all users.
struct Rounds {
    /// When the last one began, and whether a queue had work in it.
    last: Option<(Instant, bool)>,
}

impl Rounds {
    /// Runs one round.
    fn next(&mut self, users: &mut [UserTurn], now: impl Fn() -> Instant) -> Served {
        let began = now();
        let empty = self.last.filter(|(_, worked)| !worked).map(|(last, _)| began.saturating_duration_since(last));
        let mut all = Served::default();
        for i in 0..users.len() {
            let since = users[i].stepped.map(|(start, _)| start);
            // With neither work nor debts, and with a step that ended shortly before this user's last one, or after it.
            let returns = |other: &UserTurn| {
                let ended = other.stepped.map(|(_, end)| end + GAP);
                ended > since && other.deficit >= 0 && !other.turns.is_empty()
            };
            let gap = users[i].deficit < 0 && users.iter().enumerate().any(|(j, other)| j != i && returns(other));
            let allowance = empty.filter(|_| gap).map_or(QUANTUM, cost_of);
            let start = now();
            let served = users[i].serve(allowance, &now);
            if served.stepped {
                users[i].stepped = Some((start, now()));
            }
            all.stepped |= served.stepped;
            all.owed |= served.owed;
            if gap && users[i].deficit < 0 {
                let paid = Duration::from_nanos((-users[i].deficit / NANOSECOND_COST) as u64);
                all.paid = Some(all.paid.map_or(paid, |soonest: Duration| soonest.min(paid)));
            }
        }
        self.last = Some((began, all.stepped));
        all
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

impl UserTurn {
    fn of(user: u32, turns: Vec<Turn>) -> Self {
        Self { user, deficit: 0, stepped: None, turns, next: 0 }
    }

    /// Runs one round of a user, who may spend as much more.
    fn serve(&mut self, allowance: i64, now: &dyn Fn() -> Instant) -> Served {
        self.deficit = self.deficit.saturating_add(allowance).min(QUANTUM);
        let (mut all, mut idle) = (Served::default(), 0);
        while self.deficit > 0 && idle < self.turns.len() {
            self.next %= self.turns.len();
            let turn = &mut self.turns[self.next];
            let served = turn.serve(self.deficit, now);
            self.deficit -= served.cost;
            self.next += usize::from(!turn.continues);
            idle = if served.busy() { 0 } else { idle + 1 };
            all.stepped |= served.stepped;
            all.owed |= served.owed;
        }
        all.owed |= self.deficit <= 0;
        self.deficit = if all.busy() { self.deficit } else { 0 };
        all
    }
}

impl Turn {
    fn of(function: Arc<Function>) -> Self {
        Self { function, deficit: 0, next: 0, continues: false, most: MAX_STEP }
    }

    /// Runs one round of a function, or as much as the user may still spend.
    fn serve(&mut self, most: i64, now: &dyn Fn() -> Instant) -> Served {
        let queues = self.function.queues();
        if !std::mem::take(&mut self.continues) {
            self.deficit = (self.deficit + QUANTUM).min(QUANTUM);
        }
        if self.deficit <= 0 {
            return Served { owed: true, ..Served::default() };
        }
        let mut all = Served::default();
        let mut before = now();
        loop {
            let mut any = false;
            for _ in 0..queues {
                let queue = self.next;
                self.next = (queue + 1) % queues;
                if let Some(cost) = self.function.step(queue, self.most) {
                    let after = now();
                    let took = after.duration_since(before);
                    (all.stepped, any, before) = (true, true, after);
                    if took > STEP_TIME {
                        self.most = (self.most / 2).max(MIN_STEP);
                    } else if took < STEP_TIME / 4 && cost.unsigned_abs() >= self.most / 2 {
                        self.most = (self.most * 2).min(MAX_STEP);
                    }
                    // Functions of a user share by the card's measure alone.
                    self.deficit -= cost;
                    all.cost += cost.max(cost_of(took));
                    if self.deficit <= 0 || all.cost >= most {
                        self.continues = self.deficit > 0;
                        return all;
                    }
                }
            }
            if !any {
                self.deficit = 0;
                return all;
            }
        }
    }
}

#[cfg(test)]
mod tests;
