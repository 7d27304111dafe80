//! Tests of the worker: shares, debts, gaps and charges, with a clock that the tests move.

use std::cell::Cell;

use dmalane_addr::{Access, CardAddr, Iova, Span};
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_card::{Descriptor, Task};
use dmalane_dma::{Heap, Mapping, MemfdHeap, Registrar};
use dmalane_queue::{DeviceAddr, Direction};

use super::*;
use crate::account::Accounts;
use crate::config::{ClientLimits, Config};
use crate::thread::thread_time;

/// A function whose queues are full of copies of this length while the test refills them.
struct Backlog {
    turn: UserTurn,
    len: u32,
    tails: Vec<u32>,
    /// The client's descriptors.
    _fds: Vec<OwnedFd>,
    _mappings: Vec<Mapping>,
}

const ENTRIES: u32 = 64;

impl Backlog {
    fn new(len: u32, queues: u32, accounts: &Accounts) -> Self {
        Self::of(len, None, queues, accounts)
    }

    /// With `rows`, every second descriptor gives the next a shape with this many rows of `len` bytes at this pitch
    /// on the card.
    fn of(len: u32, rows: Option<(u32, u64)>, queues: u32, accounts: &Accounts) -> Self {
        let limits = ClientLimits::default();
        let ddr = rows.map_or(4 << 20, |(rows, pitch)| u64::from(rows) * pitch.max(4 << 10)).max(4 << 20);
        let made = Function::new(&limits, ddr, 4 << 20, queues, 0, accounts);
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
        Self { turn, len, tails: vec![0; queues as usize], _fds: fds, _mappings: mappings }
    }

    fn function(&self) -> &Function {
        &self.turn.turns[0].function
    }

    /// A round, in which no time passes.
    fn serve(&mut self) -> bool {
        let now = Instant::now();
        self.turn.serve(QUANTUM, &|| now).busy()
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

/// A user with the functions of these.
fn user_of(backlogs: &[Backlog]) -> UserTurn {
    let turn = |backlog: &Backlog| Turn::of(backlog.turn.turns[0].function.clone());
    UserTurn::of(1, backlogs.iter().map(turn).collect())
}

#[test]
fn busy_clients_get_equal_shares() {
    let accounts = Accounts::new(&Config::default());
    // Many short copies or few long ones, over one queue or several.
    for lens in [[16 << 10, 1 << 20], [64 << 10, 64 << 10], [1 << 20, 700_000], [4 << 20, 32 << 10]] {
        for queues in [[1, 1], [1, 4], [3, 2]] {
            let mut two = [0, 1].map(|i| Backlog::new(lens[i], queues[i], &accounts));
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
    let accounts = Accounts::new(&Config::default());
    let mut rows = Backlog::of(1, Some((4096, 2)), 1, &accounts);
    let mut much = Backlog::new(1 << 20, 1, &accounts);
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
    let accounts = Accounts::new(&Config::default());
    // 128 rows of one byte, each in a block of its own: all of them would be one step if only bytes counted.
    let mut attack = Backlog::of(1, Some((128, 2 << 20)), 1, &accounts);
    let mut victim = Backlog::new(1 << 20, 1, &accounts);
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
    let accounts = Accounts::new(&Config::default());
    // One block at a time, with nothing else to do in between.
    let mut attack = Backlog::of(1, Some((1, 0)), 1, &accounts);
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
fn who_disconnects_in_debt_comes_back_in_debt() {
    let queue = RunQueue::new().unwrap();
    let accounts = Accounts::new(&Config::default());
    let clients: Vec<_> = (0..2).map(|_| Backlog::new(1 << 20, 1, &accounts)).collect();
    let functions = [0, 1].map(|i: usize| clients[i].turn.turns[0].function.clone());
    let mut users = Vec::new();
    for (debt, left) in [(-5 * QUANTUM, Some(-5 * QUANTUM)), (-1, Some(-1)), (0, None), (QUANTUM, None)] {
        queue.add(functions[0].clone()).unwrap();
        queue.refresh(&mut users);
        assert_eq!((users.len(), users[0].turns.len()), (1, 1));
        users[0].deficit = debt;
        queue.remove(&functions[0]);
        queue.refresh(&mut users);
        assert_eq!(users.first().map(|user| (user.turns.len(), user.deficit)), left.map(|left| (0, left)));
        // Another connection of the user.
        queue.add(functions[1].clone()).unwrap();
        queue.refresh(&mut users);
        let found: Vec<_> = users.iter().map(|user| (user.turns.len(), user.deficit)).collect();
        assert_eq!(found, [(1, left.unwrap_or(0))]);
        queue.remove(&functions[1]);
        users[0].deficit = 0;
        queue.refresh(&mut users);
        assert!(users.is_empty());
    }
}

#[test]
fn slow_steps_are_charged_by_their_time() {
    let accounts = Accounts::new(&Config::default());
    let mut slow = Backlog::new(4096, 1, &accounts);
    slow.refill();
    slow.serve();
    slow.refill();
    let (start, calls) = (Instant::now(), std::cell::Cell::new(0));
    let clock = || {
        calls.set(calls.get() + 1);
        start + Duration::from_millis(calls.get())
    };
    slow.turn.serve(QUANTUM, &clock);
    // One step of 1 ms, for 61 rounds.
    assert_eq!(calls.get(), 2, "the beginning and the end of the step");
    let owed = -slow.turn.deficit / QUANTUM;
    assert_eq!(owed, 1_000_000 * NANOSECOND_COST / QUANTUM - 1);
}

#[test]
fn steps_that_take_long_become_short() {
    let accounts = Accounts::new(&Config::default());
    let mut one = Backlog::new(1 << 20, 1, &accounts);
    let (start, passed) = (Instant::now(), Cell::new(Duration::ZERO));
    let mut after = |tick, rounds| {
        let now = || {
            passed.set(passed.get() + tick);
            start + passed.get()
        };
        for _ in 0..rounds {
            one.refill();
            one.turn.serve(QUANTUM, &now);
        }
        (one.turn.turns[0].most, one.refill())
    };
    assert_eq!(after(Duration::from_micros(40), 10).0, MAX_STEP);
    let (most, before) = after(Duration::from_millis(1), 2000);
    assert_eq!(most, MIN_STEP);
    // A copy of 1 MiB takes 32 such steps.
    let (_, copied) = after(Duration::from_micros(100), 2000);
    assert!((1..=16).contains(&((copied - before) >> 20)), "{} bytes", copied - before);
    assert_eq!(after(Duration::from_micros(1), 100).0, MAX_STEP);
}

/// A user with 64 copies to do, and one whose operations the test submits; time passes where the test says so.
fn two_users() -> ([Backlog; 2], [UserTurn; 2]) {
    let accounts = Accounts::new(&Config::default());
    let mut backlogs = [0, 1].map(|_| Backlog::new(4096, 1, &accounts));
    backlogs[0].refill();
    let users = backlogs.each_ref().map(|backlog| user_of(std::slice::from_ref(backlog)));
    (backlogs, users)
}

#[test]
fn debts_are_paid_by_time_while_a_user_is_between_two_operations() {
    let ([mut backlog, _other], mut users) = two_users();
    let (start, passed) = (Instant::now() + GAP, Cell::new(Duration::ZERO));
    let now = || start + passed.get();
    let us = Duration::from_micros;
    // The first user has 64 copies to do and has just had a step of 200 us; the other user's last step ended
    // so long before. When the first one has work done, where rounds come at these times; and when it expects that.
    let mut served = |users: &mut [UserTurn; 2], before: Duration, times: &[u64]| {
        backlog.refill();
        let mut rounds = Rounds { last: Some((start, false)) };
        (users[0].deficit, users[0].stepped) = (-cost_of(us(200)), Some((start, start)));
        users[1].stepped = Some((start - GAP, start - before));
        let mut expected = None;
        for at in times {
            passed.set(us(*at));
            let round = rounds.next(users, now);
            if round.stepped {
                return (Some(*at), expected);
            }
            expected = round.paid.map(|left| *at + left.as_micros() as u64);
        }
        (None, expected)
    };
    let often: Vec<u64> = (1..=1000).collect();
    let (seldom, thirteen) = ([1, 150, 210], (Some(13), None));
    assert_eq!(served(&mut users, us(0), &often), (Some(201), None));
    assert_eq!(served(&mut users, us(0), &seldom), (Some(210), Some(200)));
    // Nobody comes back who has been away for longer, has no functions, or owes something itself: rounds pay.
    assert_eq!(served(&mut users, GAP, &often), thirteen);
    let turns = std::mem::take(&mut users[1].turns);
    assert_eq!(served(&mut users, us(0), &often), thirteen);
    users[1].turns = turns;
    users[1].deficit = -cost_of(us(1000));
    assert_eq!(served(&mut users, us(0), &often), thirteen);
}

#[test]
fn work_of_other_threads_is_charged() {
    let queue = RunQueue::new().unwrap();
    let accounts = Accounts::new(&Config::default());
    let mut backlog = Backlog::new(1 << 20, 1, &accounts);
    backlog.refill();
    let mut users = vec![backlog.turn];
    let now = Instant::now();
    let round = |users: &mut Vec<UserTurn>| {
        queue.take_charges(users);
        users.iter_mut().fold(false, |did, user| user.serve(QUANTUM, &|| now).busy() | did)
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
    while queue.owes(5) {
        round(&mut users);
    }
    assert!(queue.owes(6));
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
fn users_and_not_clients_get_equal_shares() {
    let accounts = Accounts::new(&Config::default());
    let mut many = (0..5).map(|_| Backlog::new(256 << 10, 1, &accounts)).collect::<Vec<_>>();
    let mut one = Backlog::new(256 << 10, 1, &accounts);
    let mut user = user_of(&many);
    let (mut theirs, mut copied, now) = ([0; 5], 0, Instant::now());
    for _ in 0..60 {
        for (backlog, moved) in many.iter_mut().zip(&mut theirs) {
            *moved = backlog.refill();
        }
        copied = one.refill();
        user.serve(QUANTUM, &|| now);
        one.serve();
    }
    let all: u64 = theirs.iter().sum();
    assert!(copied * 10 >= all * 9 && all * 10 >= copied * 9, "{theirs:?} {copied}");
    assert!(theirs.iter().all(|moved| moved * 5 * 10 >= all * 8), "{theirs:?}");
}

#[test]
fn functions_of_a_user_share_by_bytes_where_the_time_of_each_step_ends_a_round() {
    let accounts = Accounts::new(&Config::default());
    let mut two = [64 << 10, 1 << 20].map(|len| Backlog::new(len, 1, &accounts));
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
        user.serve(QUANTUM, &clock);
    }
    // Sixteen short copies in a row, then a long one.
    assert!(moved[0].abs_diff(moved[1]) <= 2 << 20 && moved[0] > 16 << 20, "{moved:?}");
}

#[test]
fn who_comes_back_while_others_are_in_debt_gains_nothing() {
    for waiting in (1..=64).step_by(3) {
        let accounts = Accounts::new(&Config::default());
        // A long copy takes 100 us and costs what six rounds allow.
        let mut two = [1 << 20, 64 << 10].map(|len| Backlog::new(len, 1, &accounts));
        let mut users = two.each_ref().map(|backlog| user_of(std::slice::from_ref(backlog)));
        let functions = two.each_ref().map(|backlog| backlog.turn.turns[0].function.clone());
        let (start, waited, mut rounds) = (Instant::now(), Cell::new(Duration::ZERO), Rounds { last: None });
        let moved = || functions.each_ref().map(|function| function.moved());
        let now = || start + waited.get() + Duration::from_nanos((moved().iter().sum::<u64>() * 100_000) >> 20);
        let (mut before, mut submitted) = (moved(), 0);
        for _ in 0..2000 {
            two[0].refill();
            // The second user waits until the first one has had a step without it.
            if moved()[0] > before[0] && moved()[1] == submitted {
                two[1].refill_to(waiting);
                submitted += u64::from(waiting) << 16;
                before = moved();
            }
            let until_now = moved();
            rounds.next(&mut users, now);
            if moved() == until_now {
                waited.set(waited.get() + Duration::from_micros(10));
            }
        }
        let [first, second] = moved();
        assert!(second * 4 <= first * 5, "{waiting} copies: {second} beside {first}");
    }
}

#[test]
fn idle_functions_accumulate_no_credit() {
    let accounts = Accounts::new(&Config::default());
    let mut one = Backlog::new(64 << 10, 1, &accounts);
    for _ in 0..100 {
        assert!(!one.serve());
    }
    assert_eq!(one.turn.deficit, 0);
    one.refill();
    one.serve();
    assert!(one.refill() <= 2 << 20, "at most one round after a hundred idle ones");
}
