//! The table that the processes of a daemon share: all of them have it mapped.
//!
//! `unsafe` is for mapping it, and for its lock: a process may be killed at any time, and the kernel unlocks a robust
//! mutex of POSIX for the next one, which the lock of the standard library is not.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use nix::libc;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::turns::{SEATS, Step, Turns};
use crate::wire::ClientStatus;

/// How long a worker that was woken spins for its turn: the last step of another's.
const SPIN: u64 = 150_000;
/// How long a process sleeps at least and at most before it looks again whether its user has paid. Twice as long each
/// time, since of many that look one may begin.
const PAUSES: [Duration; 2] = [Duration::from_micros(250), Duration::from_millis(16)];

/// A table in memory that this process shares with those that it forks.
pub(crate) struct Table(NonNull<Shared>);

#[repr(C)]
struct Shared {
    lock: UnsafeCell<libc::pthread_mutex_t>,
    turns: UnsafeCell<Turns>,
    /// The seat that had the last turn.
    last: AtomicU32,
    /// Seats up to the last one that was ever taken.
    end: AtomicU32,
    /// Counts, for each seat, how often it may have got its turn.
    turned: [AtomicU32; SEATS],
    seats: [Seat; SEATS],
}

/// Words of a row, and those that change with each step.
const ROW: usize = size_of::<ClientStatus>() / 8;
const COUNTED: [usize; 4] = [
    offset_of!(ClientStatus, h2c) / 8,
    offset_of!(ClientStatus, c2h) / 8,
    offset_of!(ClientStatus, in_flight) / 8,
    offset_of!(ClientStatus, faults) / 8,
];

/// A client, as all processes know it. None of this needs the lock: a status waits for nobody.
#[repr(C)]
pub(crate) struct Seat {
    /// As of the last request or step. A seat whose client has no number is free.
    row: [AtomicU64; ROW],
    /// The amounts that the client has taken of each account.
    pub taken: [AtomicU64; 3],
    /// The user who pays.
    user: AtomicU32,
    /// 1 once its resources are released: it counts no more, and its process ends.
    released: AtomicU32,
}

impl Seat {
    pub(crate) fn row(&self) -> ClientStatus {
        zerocopy::transmute!(self.row.each_ref().map(|word| word.load(Relaxed)))
    }

    pub(crate) fn user(&self) -> u32 {
        self.user.load(Relaxed)
    }

    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Relaxed) == 1
    }

    fn show(&self, row: ClientStatus, words: impl IntoIterator<Item = usize>) {
        let row: [u64; ROW] = zerocopy::transmute!(row);
        words.into_iter().for_each(|word| self.row[word].store(row[word], Relaxed));
    }
}

// SAFETY: the table is not bound to a thread: its fields are atomic but for `lock`, a mutex that any thread of any
// process may use, and `turns`, which only the lock's owner accesses (`Table::locked`).
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// An empty table.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new() -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), size_of::<Shared>(), access, MapFlags::SHARED) }?;
        let table = Self(NonNull::new(at.cast()).expect("no mapping is at address 0"));
        let mut attributes = MaybeUninit::uninit();
        let of = attributes.as_mut_ptr();
        // SAFETY: the attributes are made by the first call before the others use them; the mutex is zeros that nobody
        // else has seen.
        let results = unsafe {
            [
                libc::pthread_mutexattr_init(of),
                libc::pthread_mutexattr_setpshared(of, libc::PTHREAD_PROCESS_SHARED),
                libc::pthread_mutexattr_setrobust(of, libc::PTHREAD_MUTEX_ROBUST),
                libc::pthread_mutex_init(table.shared().lock.get(), of),
                libc::pthread_mutexattr_destroy(of),
            ]
        };
        match results.into_iter().find(|result| *result != 0) {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => Ok(table),
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped until drop, at a page's beginning, with as many bytes, which were zeros at first; any bytes
        // are such a value. All that changes is atomic or in an `UnsafeCell`.
        unsafe { self.0.as_ref() }
    }

    /// Has `change` work on the turns, which nobody else does meanwhile. Where a process was killed that had them
    /// locked, their counts are mended first.
    pub(crate) fn locked<T>(&self, change: impl FnOnce(&mut Turns) -> T) -> T {
        let mutex = self.shared().lock.get();
        // SAFETY: made by `new`, and never destroyed or moved.
        let result = unsafe { libc::pthread_mutex_lock(mutex) };
        assert!(result == 0 || result == libc::EOWNERDEAD, "the lock of the table: {result}");
        let _locked = Locked(mutex);
        // SAFETY: whoever has the mutex has the turns, and this reference ends before it is unlocked.
        let turns = unsafe { &mut *self.shared().turns.get() };
        if result == libc::EOWNERDEAD {
            turns.mend();
            // SAFETY: locked by this thread, by a call that gave EOWNERDEAD.
            unsafe { libc::pthread_mutex_consistent(mutex) };
        }
        change(turns)
    }

    /// Changes the turns, and wakes who has got one, but for the client of `seat`, whose worker calls this.
    fn turns<T>(&self, seat: Option<usize>, change: impl FnOnce(&mut Turns) -> T) -> T {
        let (before, result, after) = self.locked(|turns| (turns.holder(), change(turns), turns.holder()));
        if let Some(next) = after.filter(|_| before != after && after != seat) {
            let word = &self.shared().turned[next];
            word.fetch_add(1, Ordering::Release);
            let _ = futex::wake(word, futex::Flags::empty(), 1);
        }
        result
    }

    /// Waits for the turn of a client that has work. Again and again it does `meanwhile`, which returns after how many
    /// nanoseconds that has to be done again.
    pub(crate) fn take_turn(&self, seat: usize, mut meanwhile: impl FnMut() -> u64) {
        let word = &self.shared().turned[seat];
        loop {
            let seen = word.load(Ordering::Acquire);
            let wait = self.turns(Some(seat), |turns| {
                turns.want(seat, now());
                (turns.holder() != Some(seat)).then(|| turns.wait_of(seat))
            });
            let Some(wait) = wait else { break };
            let wait = Timespec::try_from(Duration::from_nanos(wait.min(meanwhile()))).ok();
            let woken = futex::wait(word, futex::Flags::empty(), seen, wait.as_ref());
            // Woken shortly before its turn: it has its processor when that comes.
            let start = now();
            while woken.is_ok() && word.load(Ordering::Acquire) == seen && now() - start < SPIN {
                std::hint::spin_loop();
            }
        }
        self.shared().last.store(seat as u32, Relaxed);
    }

    /// Nobody has had a turn since this client's last one.
    pub(crate) fn was_last(&self, seat: usize) -> bool {
        self.shared().last.load(Relaxed) == seat as u32
    }

    /// A step of a client has ended. True while its turn goes on.
    pub(crate) fn spend(&self, seat: usize, step: &Step) -> bool {
        let (goes_on, next) = self.turns(Some(seat), |turns| {
            let goes_on = turns.spend(seat, step);
            (goes_on, turns.next_after(seat, step).filter(|_| goes_on))
        });
        if let Some(next) = next {
            let _ = futex::wake(&self.shared().turned[next], futex::Flags::empty(), 1);
        }
        goes_on
    }

    /// How long a client whose queues are empty may keep its turn, in nanoseconds.
    pub(crate) fn hold(&self, seat: usize) -> u64 {
        self.locked(|turns| turns.hold(seat))
    }

    /// Ends the turn of a client that has no more work; `worked` unless nothing was done in it.
    pub(crate) fn end_turn(&self, seat: usize, worked: bool) {
        self.turns(Some(seat), |turns| turns.rest(seat, now(), worked));
    }

    /// Charges the user of a client for other work than the card's.
    pub(crate) fn charge(&self, seat: usize, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.turns(None, |turns| turns.charge(seat, took));
    }

    /// True while nothing else should be done for the user of a client: it owes, and there are other users.
    pub(crate) fn owes(&self, seat: usize) -> bool {
        self.turns(None, |turns| turns.owes(seat, now())).is_some()
    }

    /// Waits while the user of a client owes, and begins a request, which [`Self::settle`] ends; false when it
    /// `is_over` before.
    pub(crate) fn begin(&self, seat: usize, is_over: impl Fn() -> bool) -> bool {
        let [mut least, most] = PAUSES;
        while let Some(owed) = self.turns(None, |turns| turns.begin(seat, now())) {
            if is_over() {
                return false;
            }
            std::thread::sleep(Duration::from_nanos(owed).max(least).min(most));
            least = (2 * least).min(most);
        }
        true
    }

    /// Ends a request of a client, which took so long.
    pub(crate) fn settle(&self, seat: usize, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.turns(None, |turns| turns.settle(seat, took, now()));
    }

    /// Takes a free seat for a client of this user with this row. One process does that.
    pub(crate) fn sit(&self, user: u32, row: ClientStatus) -> Option<usize> {
        let (index, seat) = self.shared().seats.iter().enumerate().find(|(_, seat)| seat.row().client == 0)?;
        self.locked(|turns| turns.join(index, user));
        seat.user.store(user, Relaxed);
        seat.released.store(0, Relaxed);
        seat.show(row, 0..ROW);
        self.shared().end.fetch_max(index as u32 + 1, Relaxed);
        Some(index)
    }

    /// The resources of a client are released.
    pub(crate) fn release(&self, seat: usize) {
        self.seat(seat).released.store(1, Relaxed);
    }

    /// Frees a seat, and what its client had taken.
    pub(crate) fn stand(&self, seat: usize) {
        self.turns(None, |turns| turns.leave(seat, now()));
        let seat = self.seat(seat);
        seat.taken.iter().for_each(|taken| taken.store(0, Relaxed));
        seat.row[0].store(0, Relaxed);
    }

    pub(crate) fn seat(&self, seat: usize) -> &Seat {
        &self.shared().seats[seat]
    }

    /// The clients, with their seats.
    pub(crate) fn seats(&self) -> impl Iterator<Item = (usize, &Seat)> {
        let seats = &self.shared().seats[..self.shared().end.load(Relaxed) as usize];
        seats.iter().enumerate().filter(|(_, seat)| seat.row[0].load(Relaxed) != 0)
    }

    /// Shows the state of a client.
    pub(crate) fn show(&self, seat: usize, row: ClientStatus) {
        self.seat(seat).show(row, 0..ROW);
    }

    /// Shows what the queues of a client count.
    pub(crate) fn show_counted(&self, seat: usize, row: ClientStatus) {
        self.seat(seat).show(row, COUNTED);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; references to it borrow this value.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<Shared>()) };
    }
}

/// The lock of the turns, which this unlocks on drop.
struct Locked(*mut libc::pthread_mutex_t);

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: locked by `Table::locked`, in this thread, where this value stays.
        unsafe { libc::pthread_mutex_unlock(self.0) };
    }
}

/// Nanoseconds of the clock that all processes share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn the_lock_excludes() {
        let table = Table::new().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        // Not atomic.
                        table.locked(|turns| turns.paused += 1);
                    }
                });
            }
        });
        assert_eq!(table.locked(|turns| turns.paused), 80_000);
    }

    #[test]
    fn who_ends_with_the_lock_leaves_a_table_that_works() {
        let table = Table::new().unwrap();
        let row = ClientStatus { client: 1, ..ClientStatus::new_zeroed() };
        let seat = table.sit(1, row).unwrap();
        take_turn(&table, seat);
        thread::scope(|scope| {
            // A robust mutex is unlocked for a thread that ends, as for a process.
            // SAFETY: as `Table::locked` does it.
            scope.spawn(|| unsafe { libc::pthread_mutex_lock(table.shared().lock.get()) });
        });
        assert_eq!(table.locked(|turns| turns.holder()), None, "whatever was changed is chosen anew");
        take_turn(&table, seat);
        assert_eq!(table.locked(|turns| turns.holder()), Some(seat));
    }

    #[test]
    fn who_waits_for_a_turn_gets_it_from_who_ends_it() {
        let table = Table::new().unwrap();
        let row = |client| ClientStatus { client, ..ClientStatus::new_zeroed() };
        let seats = [1, 2].map(|user| table.sit(user, row(user.into())).unwrap());
        assert_eq!(seats, [0, 1]);
        take_turn(&table, 0);
        thread::scope(|scope| {
            scope.spawn(|| take_turn(&table, 1));
            thread::sleep(Duration::from_micros(500));
            table.end_turn(0, true);
        });
        assert_eq!(table.locked(|turns| turns.holder()), Some(1));
        // A seat is free again, and who takes it has nothing of the client before.
        let seat = table.seat(1);
        seat.taken.iter().for_each(|taken| taken.store(7, Relaxed));
        table.stand(1);
        assert!(seat.taken.iter().all(|taken| taken.load(Relaxed) == 0) && table.seats().count() == 1);
        assert!(table.sit(2, row(3)) == Some(1) && !seat.is_released() && seat.row().client == 3);
    }

    #[test]
    fn who_owes_is_not_waited_for_when_its_connection_is_over() {
        let table = Table::new().unwrap();
        let row = |client| ClientStatus { client, ..ClientStatus::new_zeroed() };
        for user in [1, 2] {
            table.sit(user, row(user.into())).unwrap();
        }
        // More than once, since time pays debts: another process may have had the processor.
        let gives_up = |_| {
            take_turn(&table, 1);
            table.charge(0, Duration::from_secs(60));
            !table.begin(0, || true)
        };
        assert!((0..100).any(gives_up));
    }

    /// Nobody gets a turn, and nobody pays.
    fn of_two_users() -> Table {
        let table = Table::new().unwrap();
        for user in [1, 2] {
            table.sit(user, ClientStatus { client: user.into(), ..ClientStatus::new_zeroed() }).unwrap();
        }
        table.locked(|turns| turns.paused = 1);
        table
    }

    #[test]
    fn who_owes_may_wait_for_long() {
        let table = of_two_users();
        table.charge(0, Duration::from_secs(60));
        let looks = AtomicU32::new(0);
        // As many times as twice as long would be no time that there is.
        assert!(!table.begin(0, || looks.fetch_add(1, Relaxed) > 80));
    }

    #[test]
    fn who_waits_for_a_turn_does_other_things() {
        let table = of_two_users();
        let mut done = 0;
        table.take_turn(0, || {
            done += 1;
            table.locked(|turns| turns.paused = u64::from(done < 10));
            1000
        });
        assert!(done >= 10);
    }

    fn take_turn(table: &Table, seat: usize) {
        table.take_turn(seat, || u64::MAX);
    }
}
