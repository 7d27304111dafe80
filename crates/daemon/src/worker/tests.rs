//! Tests of the worker: shares, debts, gaps, credit, charges and kicks, with a clock that the tests move.

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

    /// The same, for `waiting` entries.
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
    let each = 8000.min(rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(8000)) as usize;
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
    // A MiB is a round's. The number copied in a round in which the second user has `waiting` to copy.
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
    // After a long pause, the credit is at its limit, and each round allows a part of it.
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
