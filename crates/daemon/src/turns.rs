//! Whose turn it is: clients' processes let the card work for one client at a time.
//!
//! Deficit round robin (Shreedhar, Varghese: "Efficient Fair Queuing Using Deficit Round Robin", 1995), over users. In
//! each round a user may spend a quantum. A step costs the bytes that the card says it did, or the time that it took
//! where that is more. Overspend is carried into the next rounds, also of users who have nothing to do then. Other work
//! for a user, such as mapping memory, is charged to the user's rounds. The clients of a user share its rounds by
//! bytes: the one that has had least is next, and the user pays for the time until that one has its processor.
//!
//! The queues of a user with few operations in flight are empty until its client has seen that these ended. Rounds take
//! no time then, and would pay at once whatever the others owe, so that these fill each gap, and the client has to wait
//! for a processor. So in such a gap debts are paid by the time that passes, as are those of users without work. And
//! who has worked for a while keeps its turn for a moment, and pays for that.
//!
//! Turns are for fairness, not for exclusion: who has a turn and neither spends nor ends it is passed over, since its
//! process may have been killed, or wait in the kernel for a file of its client. It pays for that time when it is back.

use zerocopy::FromBytes;

/// Clients that can be connected, with the operator's, and some that have left while their processes end.
pub(crate) const SEATS: usize = 1024 + 4 + 256;
/// A user may spend this in a round: a millisecond, or as many bytes. With half of it, what passes between the turns of
/// two processes, each of which has to get a processor and then fills its caches, takes a fifth of the time and more.
const QUANTUM: i64 = 1_000_000 * NANOSECOND_COST;
/// Bytes charged for each nanosecond of a step. No memory copies as fast, so users share time, whether they copy or do
/// what the card does not see. With less, a user who copies fast gets less time than others.
const NANOSECOND_COST: i64 = 64;
/// The most that a user can owe for work that is not the card's, 64 ms: who maps memory all the time, and then stops,
/// is served again soon.
const MAX_OTHER_COST: i64 = 64_000_000 * NANOSECOND_COST;
/// The most that a user can have left, of rounds for which its clients have got no processor.
const MAX_CREDIT: i64 = 4 * QUANTUM;
/// The most that a user can owe at all, a minute: a step does not take as long.
const MAX_DEBT: i64 = 60_000_000_000 * NANOSECOND_COST;
/// While a user owes more than this, 1 ms, its requests wait beside other users.
const MAX_AHEAD: i64 = 1_000_000 * NANOSECOND_COST;
/// A request counts as a debt of this, 500 us, until it has ended: of a user with many clients few begin at once.
const REQUEST: i64 = 500_000 * NANOSECOND_COST;
/// A user whose last step is no longer ago than this may come back at any moment: its client may have to wait for a
/// processor before it submits its next operation.
const GAP: u64 = 5_000_000;
/// How long a client whose queues are empty keeps its turn: its processor may have been busy.
const HOLD: u64 = 100_000;
/// Nanoseconds after which a turn in which nothing was spent is passed over: twice what a step takes.
pub(crate) const STUCK: u64 = 2_000_000;
/// Of many that wait, each looks again after [`STUCK`] times this at most.
const MAX_WAITS: u64 = 8;
/// The most that a user pays for passing its turn from one of its clients to another: waking a process takes less.
const MAX_PASS: u64 = 50_000;
/// The shortest wait for the time that pays a debt.
const MIN_WAIT: u64 = 50_000;

/// Whose turn it is, and what users owe. All times are in nanoseconds of one clock. All zeros: nobody is there.
#[derive(FromBytes)]
#[repr(C)]
pub(crate) struct Turns {
    /// The seat whose turn it is, and 1; 0 for none.
    holder: u32,
    /// The share whose round it is.
    cursor: u32,
    /// When the turn was given or taken, or its last step ended.
    since: u64,
    /// 1 once the client has taken its turn: its process may have to wait for a processor first.
    taken: u32,
    /// 1 until then if another client of its user had it before.
    passed_on: u32,
    /// When somebody was last chosen, or nobody could be.
    chosen: u64,
    /// Shares and places up to the last one that was ever in use.
    end: u64,
    /// For tests: not 0 while nobody gets a turn, and nobody pays.
    #[cfg(test)]
    pub(crate) paused: u64,
    shares: [Share; SEATS],
    places: [Place; SEATS],
}

/// The balance of a user: what is left of a round, or owed.
#[derive(FromBytes)]
#[repr(C)]
struct Share {
    user: u32,
    /// Connections of the user; where there are none, debts are kept while there is room.
    clients: u32,
    /// Connections that have work.
    wanting: u64,
    /// Bytes left in this round; negative after what cost more.
    deficit: i64,
    /// For requests that have begun; paid with debts, so that those that never end keep no others back for ever.
    pending: i64,
    /// When the last step began and ended; 0 for none.
    began: u64,
    ended: u64,
    /// Bytes that the client that was last chosen had been served before.
    level: u64,
}

/// A client's part in the turns.
#[derive(FromBytes)]
#[repr(C)]
struct Place {
    /// The client's share, and 1; 0 where there is no client.
    share: u32,
    /// 1 while there is work.
    wants: u32,
    /// The charge for a turn that was passed over, until the client says what it has cost.
    charged: i64,
    /// Bytes served so far; of those that had no work, as if they had been served as the others of the user.
    served: u64,
}

/// A step of a client's queues. Times are in nanoseconds.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// The cost in bytes, as the card says it.
    pub bytes: u64,
    pub began: u64,
    pub ended: u64,
    /// The time for which the client's user pays: not that in which others had the processor.
    pub busy: u64,
}

impl Step {
    fn cost(&self) -> i64 {
        i64::try_from(self.bytes).unwrap_or(i64::MAX).max(cost_of(self.busy))
    }
}

impl Share {
    /// Has more left, but not more than a round.
    fn earn(&mut self, allowance: i64) {
        self.pending = self.pending.saturating_sub(allowance).max(0);
        let most = if self.wanting > 0 { QUANTUM } else { 0 };
        self.deficit = self.deficit.saturating_add(allowance).min(most.max(self.deficit));
    }

    fn owe(&mut self, cost: i64) {
        self.deficit = self.deficit.saturating_sub(cost).max(-MAX_DEBT);
    }
}

/// The least cost of this time.
fn cost_of(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX).saturating_mul(NANOSECOND_COST)
}

impl Turns {
    /// A client of this user has come.
    pub(crate) fn join(&mut self, seat: usize, user: u32) {
        let shares = &mut self.shares;
        let known = shares.iter().position(|s| s.user == user && (s.clients > 0 || s.deficit < 0));
        let index = known.unwrap_or_else(|| {
            // One that is free, or else whose owner has left with the least debt.
            let left = (0..SEATS).filter(|i| shares[*i].clients == 0);
            let index =
                left.max_by_key(|i| (shares[*i].deficit, std::cmp::Reverse(*i))).expect("fewer users than seats");
            shares[index] =
                Share { user, clients: 0, wanting: 0, deficit: 0, pending: 0, began: 0, ended: 0, level: 0 };
            index
        });
        shares[index].clients += 1;
        self.places[seat] = Place { share: index as u32 + 1, wants: 0, charged: 0, served: shares[index].level };
        self.end = self.end.max(index.max(seat) as u64 + 1);
    }

    /// A client has gone.
    pub(crate) fn leave(&mut self, seat: usize, now: u64) {
        self.pay_turn(seat, now);
        self.rest(seat, now, false);
        let share = self.share_of(seat);
        share.clients = share.clients.saturating_sub(1);
        self.places[seat].share = 0;
    }

    /// Counts again, after a process was killed while it changed something.
    pub(crate) fn mend(&mut self) {
        let Self { shares, places, .. } = self;
        for (i, share) in shares.iter_mut().enumerate() {
            let of = || places.iter().filter(|place| place.share as usize == i + 1);
            share.clients = of().count() as u32;
            share.wanting = of().filter(|place| place.wants != 0).count() as u64;
        }
        self.end = SEATS as u64;
        self.holder = 0;
    }

    /// The seat whose turn it is.
    pub(crate) fn holder(&self) -> Option<usize> {
        (self.holder as usize).checked_sub(1)
    }

    /// A client has work.
    pub(crate) fn want(&mut self, seat: usize, now: u64) {
        let share = self.index_of(seat);
        let (place, share) = (&mut self.places[seat], &mut self.shares[share]);
        if place.wants == 0 {
            place.wants = 1;
            place.served = place.served.max(share.level);
            share.wanting += 1;
        }
        if self.holder() != Some(seat) {
            self.look(now);
        }
        if self.holder() == Some(seat) {
            let passing = u64::from(self.passed_on) * now.saturating_sub(self.since).min(MAX_PASS);
            self.share_of(seat).owe(cost_of(passing));
            (self.since, self.taken, self.passed_on) = (now, 1, 0);
        }
    }

    /// Chooses somebody where there is no turn, or one that is stuck.
    pub(crate) fn look(&mut self, now: u64) {
        if let Some(holder) = self.holder() {
            if now.saturating_sub(self.since) <= STUCK {
                return;
            }
            if self.taken == 1 {
                self.pay_turn(holder, now);
                self.wants_nothing(holder);
            } else {
                // It has not got a processor yet, and has its rounds later.
                let share = self.share_of(holder);
                share.deficit = (share.deficit + QUANTUM).min(MAX_CREDIT);
                return self.next_round(now, false, None);
            }
        }
        self.choose(now, false);
    }

    /// How long a client that has work waits at most until it looks again. Of many, one at a time is enough.
    pub(crate) fn wait_of(&self, seat: usize) -> u64 {
        let share = self.places[seat].share;
        let wanting = self.places[..self.end()].iter().filter(|place| place.wants == 1).count() as u64;
        let first = self.places[..seat].iter().all(|place| place.wants == 0 || place.share != share);
        match self.holder {
            0 if first => {
                let owed = -self.shares[self.index_of(seat)].deficit / NANOSECOND_COST;
                u64::try_from(owed).unwrap_or(0).clamp(MIN_WAIT, STUCK)
            }
            _ => STUCK * wanting.clamp(1, MAX_WAITS),
        }
    }

    /// A step of a client has ended. True while its turn goes on.
    pub(crate) fn spend(&mut self, seat: usize, step: &Step) -> bool {
        let place = &mut self.places[seat];
        place.served = place.served.saturating_add(step.bytes);
        let charged = std::mem::take(&mut place.charged);
        let share = self.share_of(seat);
        share.deficit = share.deficit.saturating_add(charged).min(MAX_CREDIT);
        share.owe(step.cost());
        (share.began, share.ended) = (step.began, step.ended);
        let left = share.deficit;
        if self.holder() != Some(seat) {
            return false;
        }
        self.since = step.ended;
        if left <= 0 {
            self.choose(step.ended, true);
        }
        self.holder() == Some(seat)
    }

    /// How long a client with empty queues may keep its turn for work that comes at once. Not if nobody waits, or
    /// another client of its user has work.
    pub(crate) fn hold(&self, seat: usize) -> u64 {
        let index = self.index_of(seat);
        let share = &self.shares[index];
        let left = u64::try_from(share.deficit / NANOSECOND_COST).unwrap_or(0);
        let others = || self.shares[..self.end()].iter().enumerate().any(|(i, other)| i != index && other.wanting > 0);
        if self.holder() == Some(seat) && share.wanting == 1 && others() { left.min(HOLD) } else { 0 }
    }

    /// Who is likely to be next, if the turn of a client ends with another step as the last one.
    pub(crate) fn next_after(&self, seat: usize, step: &Step) -> Option<usize> {
        let (index, last) = (self.index_of(seat), step.cost());
        let wants = |i: &usize| self.shares[*i].wanting > 0 && self.shares[*i].deficit > -QUANTUM;
        let others = (index + 1..self.end()).chain(0..index);
        others.take_while(|_| self.shares[index].deficit <= last).find(wants).map(|next| self.least_served(next))
    }

    /// A client has no work, or ends its turn; `worked` unless nothing was done in it.
    pub(crate) fn rest(&mut self, seat: usize, now: u64, worked: bool) {
        self.wants_nothing(seat);
        let share = self.share_of(seat);
        if share.wanting == 0 {
            share.deficit = share.deficit.min(0);
        }
        if self.holder() == Some(seat) {
            self.choose(now, worked);
        }
    }

    /// Charges a user for other work, in nanoseconds.
    pub(crate) fn charge(&mut self, seat: usize, took: u64) {
        let share = self.share_of(seat);
        let least = share.deficit.min(-MAX_OTHER_COST);
        share.owe(cost_of(took));
        share.deficit = share.deficit.max(least);
    }

    /// As [`Self::owes`]; where that is nothing, a request of the client begins.
    pub(crate) fn begin(&mut self, seat: usize, now: u64) -> Option<u64> {
        let owed = self.owes(seat, now);
        if owed.is_none() {
            self.share_of(seat).pending += REQUEST;
        }
        owed
    }

    /// A request has ended, and took so many nanoseconds.
    pub(crate) fn settle(&mut self, seat: usize, took: u64, now: u64) {
        // The time until now pays for what was before.
        self.look(now);
        let share = self.share_of(seat);
        share.pending = (share.pending - REQUEST).max(0);
        self.charge(seat, took);
    }

    /// While nothing else should be done for the user of a client, since it owes and there are other users: the least
    /// time until that is paid.
    pub(crate) fn owes(&mut self, seat: usize, now: u64) -> Option<u64> {
        self.look(now);
        let user = self.index_of(seat);
        let others = || self.shares[..self.end()].iter().enumerate().any(|(i, s)| i != user && s.clients > 0);
        let ahead = -MAX_AHEAD - (self.shares[user].deficit - self.shares[user].pending);
        (ahead > 0 && others()).then(|| ahead.unsigned_abs() / NANOSECOND_COST.unsigned_abs())
    }

    fn end(&self) -> usize {
        self.end as usize
    }

    fn index_of(&self, seat: usize) -> usize {
        (self.places[seat].share as usize).saturating_sub(1)
    }

    fn share_of(&mut self, seat: usize) -> &mut Share {
        let index = self.index_of(seat);
        &mut self.shares[index]
    }

    /// Charges a user for a turn that ends although its client has not said so: it is passed over, or has gone.
    fn pay_turn(&mut self, seat: usize, now: u64) {
        if self.holder() == Some(seat) && self.taken == 1 {
            let cost = cost_of(now.saturating_sub(self.since));
            self.share_of(seat).owe(cost);
            self.places[seat].charged = cost;
        }
    }

    fn wants_nothing(&mut self, seat: usize) {
        let wanted = std::mem::take(&mut self.places[seat].wants);
        let share = self.share_of(seat);
        share.wanting = share.wanting.saturating_sub(wanted.into());
    }

    /// Chooses who is next: the user whose round it is while something of that is left. `worked`: a step was done since
    /// the last choice.
    fn choose(&mut self, now: u64, worked: bool) {
        let cursor = self.cursor as usize;
        let stays = cursor < self.end() && self.shares[cursor].wanting > 0 && self.shares[cursor].deficit > 0;
        self.next_round(now, worked, stays.then_some(cursor));
    }

    /// Gives the turn to this user, or begins the rounds of those after the one whose round it is.
    fn next_round(&mut self, now: u64, worked: bool, to: Option<usize>) {
        let before = std::mem::take(&mut self.holder);
        #[cfg(test)]
        if self.paused != 0 {
            return;
        }
        if let Some(index) = to {
            return self.give(index, before, now);
        }
        let passed = cost_of(now.saturating_sub(std::mem::replace(&mut self.chosen, now)));
        let (cursor, used) = (self.cursor as usize, self.end());
        // The time of its own turn pays nothing.
        let pays = |index: usize| if before != 0 && index == cursor { 0 } else { passed };
        // Who waits for no turn has taken processors, for a request or before its work ended: time pays for that.
        let nobody_waits = self.shares[..used].iter().all(|share| share.wanting == 0);
        for (index, share) in self.shares[..used].iter_mut().enumerate().filter(|(_, share)| share.wanting == 0) {
            share.earn(pays(index));
            if nobody_waits {
                share.deficit = share.deficit.max(-MAX_OTHER_COST);
            }
        }
        let wants = |turns: &Self, i: &usize| turns.shares[*i].wanting > 0;
        for index in (cursor + 1..used).chain(0..used.min(cursor + 1)) {
            if wants(self, &index) {
                let allowance = if !worked && self.in_gap(index) { pays(index) } else { QUANTUM };
                self.shares[index].earn(allowance);
                if self.shares[index].deficit > 0 {
                    return self.give(index, before, now);
                }
            }
        }
        // All owe: rounds in which nobody works take no time, but for those whose debts time pays.
        let can = |turns: &Self, i: &usize| wants(turns, i) && !turns.in_gap(*i);
        let least = (0..used).filter(|i| can(self, i)).map(|i| -self.shares[i].deficit / QUANTUM + 1).min();
        for index in 0..used {
            if can(self, &index) {
                self.shares[index].earn(least.unwrap_or(0) * QUANTUM);
            }
        }
        if let Some(next) = (0..used).find(|i| wants(self, i) && self.shares[*i].deficit > 0) {
            self.give(next, before, now);
        }
    }

    /// A user owes, and another, with neither work nor debts, has had a step that ended shortly before this one's last,
    /// or after it.
    fn in_gap(&self, index: usize) -> bool {
        let share = &self.shares[index];
        let returns = |other: &Share| {
            (other.clients > 0 && other.wanting == 0 && other.deficit >= 0)
                && (other.ended > 0 && other.ended + GAP > share.began)
        };
        share.deficit < 0 && self.shares[..self.end()].iter().enumerate().any(|(i, other)| i != index && returns(other))
    }

    /// The client of a user with work that was served least.
    fn least_served(&self, index: usize) -> usize {
        let wants = |i: &usize| self.places[*i].wants == 1 && self.places[*i].share as usize == index + 1;
        let wanting = (0..self.end()).filter(wants);
        wanting.min_by_key(|i| self.places[*i].served).expect("a client with work")
    }

    /// Gives the turn, which `before` had, to a client of this user.
    fn give(&mut self, index: usize, before: u32, now: u64) {
        let seat = self.least_served(index);
        self.shares[index].level = self.places[seat].served;
        let passes_on = self.cursor as usize == index && before != 0 && before != seat as u32 + 1;
        (self.taken, self.passed_on) = (0, passes_on.into());
        (self.holder, self.cursor, self.since) = (seat as u32 + 1, index as u32, now);
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    const US: u64 = 1000;

    /// Turns of clients with as much work as their turns allow, and a clock that the tests move.
    struct Game {
        turns: Box<Turns>,
        now: u64,
        /// Bytes that the client of each seat was served.
        served: [u64; 8],
    }

    impl Game {
        /// A client for each of these users.
        fn of(users: &[u32]) -> Self {
            let mut turns = Box::new(Turns::new_zeroed());
            users.iter().enumerate().for_each(|(seat, user)| turns.join(seat, *user));
            Self { turns, now: 10 * GAP, served: [0; 8] }
        }

        fn want(&mut self, seats: &[usize]) {
            seats.iter().for_each(|seat| self.turns.want(*seat, self.now));
        }

        fn deficit(&self, seat: usize) -> i64 {
            self.turns.shares[self.turns.index_of(seat)].deficit
        }

        /// The client whose turn it is has a step, of the bytes and the time that `of` gives. Returns its seat.
        fn step(&mut self, of: impl Fn(usize) -> (u64, u64)) -> usize {
            let seat = self.turns.holder().expect("somebody's turn");
            let (bytes, time) = of(seat);
            let began = self.now;
            self.now += time;
            self.turns.spend(seat, &Step { bytes, began, ended: self.now, busy: time });
            self.served[seat] += bytes;
            seat
        }
    }

    #[test]
    fn users_and_not_clients_get_equal_shares() {
        // One client of a user, and five of another; steps of different lengths, which take no time.
        for bytes in [[4096, 1 << 20], [1 << 20, 64 << 10], [256 << 10, 256 << 10]] {
            let mut game = Game::of(&[1, 2, 2, 2, 2, 2]);
            game.want(&[0, 1, 2, 3, 4, 5]);
            while game.served.iter().sum::<u64>() < 64 * QUANTUM as u64 {
                game.step(|seat| (bytes[usize::from(seat > 0)], 0));
            }
            let [one, many @ ..] = game.served;
            let (all, quantum): (u64, u64) = (many.iter().sum(), QUANTUM as u64);
            assert!(one.abs_diff(all) <= 2 * quantum, "{bytes:?}: {:?}", game.served);
            assert!(many[..5].iter().all(|of| of.abs_diff(all / 5) <= 2 * quantum), "{bytes:?}: {many:?}");
        }
    }

    #[test]
    fn time_counts_where_it_costs_more_than_bytes() {
        let mut game = Game::of(&[1, 2]);
        game.want(&[0, 1]);
        let mut time = [0; 2];
        for _ in 0..20_000 {
            // A step of 1 ms that copies a page, beside copies of 1 MiB in 100 us.
            let before = game.now;
            let seat = game.step(|seat| if seat == 0 { (4096, 1000 * US) } else { (1 << 20, 100 * US) });
            time[seat] += game.now - before;
        }
        assert!(time[0].abs_diff(time[1]) * 20 < time[0] + time[1], "{time:?}");
    }

    #[test]
    fn who_has_no_work_gains_no_credit_and_pays_its_debts() {
        let mut game = Game::of(&[1, 2]);
        let quantum = QUANTUM as u64;
        game.want(&[0]);
        // Long alone: each step costs two rounds, and nobody waits.
        for _ in 0..100 {
            assert_eq!(game.step(|_| (2 * quantum, 10 * US)), 0);
        }
        game.want(&[1]);
        for _ in 0..100 {
            game.step(|_| (quantum, 10 * US));
        }
        assert!((48 * quantum..=52 * quantum).contains(&game.served[1]), "{:?}", game.served);
        // Debts of a user without work are paid by the rounds of others.
        game.turns.rest(0, game.now, true);
        game.turns.charge(0, 10_000 * US);
        for round in 0..12 {
            assert_eq!(game.step(|_| (quantum, 1000 * US)), 1);
            assert!(round > 7 || game.deficit(0) < 0, "after {round} rounds of ten");
        }
        assert_eq!(game.deficit(0), 0);
    }

    #[test]
    fn other_work_is_charged_up_to_a_limit_and_makes_requests_wait() {
        let mut game = Game::of(&[1, 2]);
        game.want(&[1]);
        game.turns.charge(0, 900 * US);
        assert_eq!(game.turns.owes(0, game.now), None, "a little is not waited for");
        game.turns.charge(0, 10_000_000 * US);
        assert_eq!(game.turns.owes(0, game.now), Some(63_000 * US));
        assert_eq!(game.deficit(0), -MAX_OTHER_COST);
        // Of a user who is alone nobody has a loss.
        game.turns.rest(1, game.now, false);
        game.turns.leave(1, game.now);
        game.turns.charge(0, 10_000 * US);
        assert_eq!(game.turns.owes(0, game.now), None);
    }

    #[test]
    fn who_worked_keeps_its_turn_for_a_moment_if_somebody_else_waits() {
        let mut game = Game::of(&[1, 2, 1]);
        game.want(&[0]);
        game.step(|_| (1 << 20, 100 * US));
        assert_eq!(game.turns.hold(0), 0, "nobody waits");
        game.want(&[1]);
        assert_eq!((game.turns.hold(0), game.turns.hold(1)), (HOLD, 0));
        // No longer than its round.
        game.step(|_| (1 << 20, 850 * US));
        assert_eq!(game.turns.hold(0), 50 * US);
        // The rest of its round is for another client of its user.
        game.want(&[2]);
        assert_eq!(game.turns.hold(0), 0);
    }

    #[test]
    fn of_a_user_with_many_clients_few_requests_begin_at_once() {
        let mut game = Game::of(&[1, 1, 1, 1, 1, 1, 2]);
        game.want(&[6]);
        let begun = |game: &mut Game| (0..6).filter(|seat| game.turns.begin(*seat, game.now).is_none()).count();
        assert_eq!(begun(&mut game), 3);
        (0..3).for_each(|seat| game.turns.settle(seat, 30 * US, game.now));
        assert_eq!((game.deficit(0), begun(&mut game)), (-cost_of(90 * US), 2));
        // Paid by rounds, it is not given back, and keeps no others back.
        for _ in 0..10 {
            game.step(|_| (QUANTUM as u64, 1000 * US));
        }
        assert_eq!((game.deficit(0), begun(&mut game)), (0, 3));
        game.turns.settle(0, 30 * US, game.now);
        assert_eq!(game.deficit(0), -cost_of(30 * US));
    }

    #[test]
    fn debts_for_requests_are_paid_by_time_beside_another_user() {
        let mut game = Game::of(&[1, 2]);
        let start = game.now;
        game.turns.settle(0, 10_000 * US, game.now);
        while game.turns.owes(0, game.now).is_some() {
            game.now += 10 * US;
            // However often somebody looks.
            assert_eq!(game.turns.owes(1, game.now), None);
        }
        assert!((8_900..=9_100).contains(&((game.now - start) / US)), "{}", (game.now - start) / US);
        // A step may have taken minutes; where nobody waits, no more than other work can cost is owed.
        game.turns.share_of(0).owe(cost_of(60_000_000 * US));
        assert!(game.turns.owes(0, game.now).is_some());
        game.now += 64_000 * US;
        assert_eq!(game.turns.owes(0, game.now), None);
    }

    #[test]
    fn short_operations_of_another_user_pay_for_little_other_work() {
        let mut game = Game::of(&[1, 2]);
        game.turns.look(game.now);
        game.turns.charge(0, 64_000 * US);
        for _ in 0..100 {
            game.want(&[1]);
            game.step(|_| (4096, 20 * US));
            game.turns.rest(1, game.now, true);
            game.now += 10 * US;
        }
        // 3 ms have passed, and not a hundred rounds.
        let owed = -game.deficit(0) / cost_of(US);
        assert!((60_000..62_000).contains(&owed), "{owed}");
    }

    #[test]
    fn debts_outlive_connections() {
        let mut game = Game::of(&[1, 2]);
        game.want(&[1]);
        game.turns.charge(0, 5_000 * US);
        let owed = game.deficit(0);
        game.turns.leave(0, game.now);
        game.turns.join(0, 1);
        assert_eq!(game.deficit(0), owed);
        // Another user at the same seat owes nothing.
        game.turns.leave(0, game.now);
        game.turns.join(0, 3);
        assert_eq!(game.deficit(0), 0);
    }

    #[test]
    fn debts_are_paid_by_time_while_a_user_is_between_two_operations() {
        // The first user has work and owes 2 ms, but for its round; the other's last step ended so long before.
        let paid = |before: u64, present: bool| {
            let mut game = Game::of(&[1, 2]);
            game.want(&[1]);
            game.step(|_| (4096, US));
            game.turns.rest(1, game.now, true);
            if !present {
                game.turns.leave(1, game.now);
            }
            game.now += before;
            game.want(&[0]);
            game.step(|_| (4096, 3000 * US));
            let (start, first) = (game.now, game.turns.holder());
            while game.turns.holder().is_none() {
                game.now += US;
                game.turns.look(game.now);
            }
            (first.is_some(), (game.now - start) / US)
        };
        // The round after the step pays 1 ms.
        let (at_once, after) = paid(0, true);
        assert!(!at_once && (990..=1010).contains(&after), "{after}");
        // Nobody comes back who has been away for longer, or has left: rounds pay.
        assert!(paid(GAP, true).0 && paid(0, false).0);
    }

    #[test]
    fn who_comes_back_waits_for_a_round_of_the_other_at_most() {
        let mut game = Game::of(&[1, 2]);
        game.want(&[0]);
        for _ in 0..1000 {
            // The first user copies whenever it may; the second has a short operation every 30 us.
            let (began, before) = (game.now, game.served[0]);
            game.want(&[1]);
            while game.turns.holder() == Some(0) {
                game.step(|_| (1 << 20, 100 * US));
            }
            assert!(game.served[0] - before <= 11 << 20 && game.now - began <= 1100 * US);
            assert_eq!(game.step(|_| (4096, US)), 1);
            game.turns.rest(1, game.now, true);
            game.now += 30 * US;
            game.turns.look(game.now);
            assert_eq!(game.turns.holder(), Some(0), "a short operation is a round too");
        }
    }

    #[test]
    fn a_turn_in_which_nothing_happens_is_passed_over() {
        let mut game = Game::of(&[1, 2]);
        game.want(&[0, 1, 0]);
        assert_eq!(game.turns.holder(), Some(0));
        game.now += STUCK;
        game.turns.look(game.now);
        assert_eq!(game.turns.holder(), Some(0));
        game.now += 1;
        game.turns.look(game.now);
        assert_eq!(game.turns.holder(), Some(1));
        // The first was charged for that time.
        assert!(game.deficit(0) <= QUANTUM - cost_of(STUCK + 1), "{}", game.deficit(0));
        // The second has not got a processor yet, and has its round later.
        let left = game.deficit(1);
        game.now += STUCK + 1;
        game.want(&[0]);
        assert_eq!((game.turns.holder(), game.deficit(1), game.turns.places[1].wants), (Some(1), left + QUANTUM, 1));
        game.turns.rest(0, game.now, false);
        // The first pays for what it says when it is back, and waits for its turn.
        for (busy, charged) in [(100 * US, cost_of(STUCK + 1)), (5000 * US, 0)] {
            let (owed, ended) = (game.deficit(0), game.now);
            assert!(!game.turns.spend(0, &Step { bytes: 4096, began: ended - busy, ended, busy }));
            assert_eq!(game.deficit(0), owed + charged - cost_of(busy));
        }
        // A client that is gone holds nobody up.
        game.turns.leave(1, game.now);
        game.want(&[0]);
        while game.turns.holder().is_none() {
            game.now += 10 * US;
            game.turns.look(game.now);
        }
        assert_eq!(game.turns.holder(), Some(0));
    }

    #[test]
    fn a_user_pays_for_passing_its_turn_to_another_of_its_clients() {
        let mut game = Game::of(&[1, 1, 2]);
        game.want(&[2, 0, 1]);
        let mut own = 0;
        for _ in 0..100_000 {
            // The first user's clients have one short operation each, and it takes 40 us until the other one has its
            // processor. The second copies whenever it may.
            let before = game.now;
            let seat = game.step(|seat| (1 << 20, if seat == 2 { 100 } else { 20 } * US));
            if seat == 2 {
                own += game.now - before;
            } else {
                game.turns.rest(seat, game.now, true);
                if game.turns.holder() == Some(1 - seat) {
                    game.now += 40 * US;
                    game.want(&[1 - seat]);
                }
                game.want(&[seat]);
            }
        }
        let all = game.now - 10 * GAP;
        assert!(own * 100 > all * 45, "{own} of {all} ns");
    }

    #[test]
    fn who_is_woken_late_pays_little_and_nothing_after_another_user() {
        // The first user's turn passes to its other client, or to the second user.
        for (next, cost) in [(1, cost_of(MAX_PASS)), (2, 0)] {
            let mut game = Game::of(&[1, 1, 2]);
            game.want(&[0, next]);
            game.turns.rest(0, game.now, true);
            assert_eq!(game.turns.holder(), Some(next));
            let before = game.deficit(next);
            game.now += 1000 * US;
            game.want(&[next]);
            assert_eq!(before - game.deficit(next), cost);
        }
    }

    /// Clients whose processes end in their turns, again and again.
    #[test]
    fn who_dies_in_its_turn_pays_for_it() {
        let mut game = Game::of(&[1, 2, 2, 2]);
        let mut own = 0;
        for _ in 0..10_000 {
            game.want(&[0, 1, 2, 3]);
            match game.turns.holder() {
                Some(0) => {
                    game.step(|_| (1 << 20, 100 * US));
                    own += 100;
                }
                Some(seat) => {
                    // Its end is seen after a millisecond.
                    game.now += 1000 * US;
                    game.turns.leave(seat, game.now);
                    game.turns.join(seat, 2);
                }
                None => game.now += 10 * US,
            }
        }
        let all = (game.now - 10 * GAP) / US;
        assert!(own * 100 > all * 45, "{own} of {all} us");
    }

    #[test]
    fn a_client_that_had_no_work_is_served_as_others_of_its_user_from_then_on() {
        let mut game = Game::of(&[1, 1]);
        game.want(&[0]);
        for _ in 0..100 {
            game.step(|_| (1 << 20, 100 * US));
        }
        let before = game.served;
        game.want(&[1]);
        for _ in 0..100 {
            game.step(|_| (1 << 20, 100 * US));
        }
        let [first, second] = [0, 1].map(|seat| game.served[seat] - before[seat]);
        assert!(first.abs_diff(second) <= QUANTUM as u64, "{first} {second}");
    }

    #[test]
    fn who_gets_no_processor_has_some_rounds_later_and_no_more() {
        let mut game = Game::of(&[1, 2]);
        game.want(&[0, 1]);
        for round in 0..100 {
            // The turns of both end, and nobody takes one: their processes are stopped.
            assert_eq!(game.turns.holder(), Some(round % 2));
            game.now += STUCK + 1;
            game.turns.taken = 0;
            game.turns.look(game.now);
        }
        for seat in [0, 1] {
            assert!((2 * QUANTUM..=MAX_CREDIT).contains(&game.deficit(seat)), "{}", game.deficit(seat));
        }
    }

    #[test]
    fn counts_are_mended() {
        let mut game = Game::of(&[1, 1, 2]);
        game.want(&[0, 2]);
        for share in game.turns.shares.iter_mut() {
            (share.clients, share.wanting) = (7, 9);
        }
        game.turns.mend();
        let counts: Vec<_> = game.turns.shares[..3].iter().map(|share| (share.clients, share.wanting)).collect();
        assert_eq!(counts, [(2, 1), (1, 1), (0, 0)]);
        assert_eq!(game.turns.holder(), None);
        game.turns.look(game.now);
        assert!(game.turns.holder().is_some());
    }

    /// Random events: the counts agree, and nobody with work waits for ever.
    #[test]
    fn random_events_leave_a_right_state() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for _ in 0..200 {
            let mut game = Game::of(&[]);
            let mut users: [Option<u32>; 8] = [None; 8];
            for _ in 0..400 {
                let seat = random(8) as usize;
                let turns = &mut game.turns;
                game.now += random(300) * US;
                match (random(7), users[seat]) {
                    (_, None) => {
                        let user = random(3) as u32;
                        turns.join(seat, user);
                        users[seat] = Some(user);
                    }
                    (0, _) => {
                        turns.leave(seat, game.now);
                        users[seat] = None;
                    }
                    (1, _) => turns.charge(seat, random(3000) * US),
                    (2, _) => turns.rest(seat, game.now, random(2) == 0),
                    (3 | 4, _) => turns.want(seat, game.now),
                    _ => {
                        let (bytes, busy) = (random(2 << 20), random(200) * US);
                        turns.spend(seat, &Step { bytes, began: game.now - busy, ended: game.now, busy });
                    }
                }
                for user in 0..3 {
                    let of = |seat: &usize| users[*seat] == Some(user);
                    let clients = (0..8).filter(of).count();
                    let wanting = (0..8).filter(of).filter(|seat| turns.places[*seat].wants == 1).count();
                    let shares = turns.shares.iter().filter(|share| share.user == user && share.clients > 0);
                    let found: Vec<_> = shares.map(|s| (s.clients as usize, s.wanting as usize)).collect();
                    assert_eq!(found, [(clients, wanting)][..usize::from(clients > 0)]);
                }
                assert!(turns.shares.iter().all(|share| share.deficit <= MAX_CREDIT));
                if let Some(holder) = turns.holder() {
                    assert!(turns.places[holder].wants == 1 && users[holder].is_some());
                }
            }
            let wanting: Vec<usize> = (0..8).filter(|seat| game.turns.places[*seat].wants == 1).collect();
            let before = game.served;
            for _ in 0..2000 {
                game.now += 100 * US;
                // Who was passed over comes back.
                game.want(&wanting);
                if game.turns.holder().is_some() {
                    game.step(|_| (1 << 20, 100 * US));
                }
            }
            assert!(wanting.iter().all(|seat| game.served[*seat] > before[*seat]), "{wanting:?} {:?}", game.served);
        }
    }
}
