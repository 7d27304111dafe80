//! Distributes transfers by the measured rates of the channels.
//!
//! Work waits in one list per direction and area of card memory; a channel that has room is given a piece. The size
//! of a piece follows from one idea, the *level*: if all bytes that are waiting or in flight were divided in
//! proportion to the channels' rates, all channels would end at the same time. The *deficit* of a channel is what is
//! missing to its proportion.
//!
//! - Little work (below 8 MiB): the channel takes all of its deficit. That is a split in proportion to the rates.
//! - Much work: a fraction of it, so that pieces shrink towards the end, from 4 MiB to 256 KiB, two in flight on
//!   each channel. That is guided self-scheduling (Polychronopoulos and Kuck, "Guided Self-Scheduling", IEEE
//!   Transactions on Computers, 1987), and it needs no known rate: a faster channel asks again sooner.
//!
//! While no rates are known, the address policy applies: areas that are shared are halved, the others belong to their
//! channel, and only much work, whose pieces are small, lets another channel help.

use std::collections::VecDeque;
use std::time::Duration;

use dmalane_addr::CardAddr;

use crate::policy::{WHOLE_BELOW, for_each_area};
use crate::{Area, Direction, Piece, Policy, Route};

/// Since whenever the clock began; a difference is enough for 584 years.
type Nanos = u64;

/// Least bytes waiting for which work is handed out in pieces.
const BULK: u64 = 8 << 20;
/// The largest and the smallest piece of much work.
const LARGEST: u64 = 4 << 20;
const SMALLEST: u64 = 256 << 10;
/// The largest piece while several areas have work: channels that swap areas overlap for the time of a piece.
const SPREAD: u64 = 512 << 10;
/// Channels swap areas when this many times more is left in the other area, and its channel is this many times slower.
const BEHIND: f64 = 1.1;
/// Largest piece: the channel's deficit divided by this.
const FRACTION: f64 = 6.0;
/// Pieces in flight on a channel and direction: one that runs and one that follows.
const DEPTH: usize = 2;
/// Short pieces do not count as long as they are no more than this together, so that many small transfers can be in
/// flight.
const SHORT: u64 = 512 << 10;
/// Only pieces of this length say something about a rate; shorter ones measure latency.
const TELLING: u64 = 64 << 10;
/// A rate expires when it was not measured again for this time. A channel that was slow then gets another chance.
const FORGET: Nanos = 100_000_000;
/// Weight of a new measurement in a rate.
const NEW: f64 = 0.5;

/// Starts with the rule of [`AddressPolicy`](crate::AddressPolicy), then uses measured rates: a split in proportion to
/// them below 8 MiB, guided self-scheduling above.
#[derive(Clone, Debug)]
pub struct BalancePolicy {
    rules: Rules,
    backlogs: [Backlog; 2],
    /// The direction that is looked at first, so that neither starves.
    first: usize,
}

/// The fixed configuration.
#[derive(Clone, Debug)]
struct Rules {
    areas: Vec<Area>,
    /// The channels that may be used; an empty list for all.
    only: Vec<usize>,
}

/// One direction.
#[derive(Clone, Debug, Default)]
struct Backlog {
    /// Per area, the last one for what lies in none: what no channel was given yet.
    queues: Vec<VecDeque<Piece>>,
    /// Per area: the bytes of its queue.
    left: Vec<u64>,
    /// The bytes of all queues.
    waiting: u64,
    /// Much work came in, and not all of it was handed out yet.
    bulk: bool,
    channels: Vec<Load>,
    /// How often in a row a channel left work to another although nothing was in flight.
    declined: usize,
}

/// The work of one channel in one direction.
#[derive(Clone, Debug, Default)]
struct Load {
    flights: VecDeque<Flight>,
    /// The bytes of all flights.
    bytes: u64,
    /// When the last piece ended.
    idle_since: Nanos,
    /// Per area, then once for all of them together.
    rates: Vec<Option<Rate>>,
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    piece: Piece,
    area: usize,
    since: Nanos,
}

/// How well an area suits a channel; the greatest is best: no other channel works there; it is not shared; the channel
/// works there already; the bytes left there per channel; it is the channel's own.
type Merit = (bool, bool, bool, f64, bool);

/// Bytes per nanosecond, and when it was measured.
#[derive(Clone, Copy, Debug)]
struct Rate {
    value: f64,
    at: Nanos,
}

impl BalancePolicy {
    /// A policy for a card with these areas, over all channels.
    pub fn new(areas: Vec<Area>) -> Self {
        Self { rules: Rules { areas, only: Vec::new() }, backlogs: Default::default(), first: 0 }
    }

    /// Uses these channels alone, wherever the bytes go. Channels that do not exist are passed over; when none is left,
    /// all are used.
    pub fn only(channels: &[usize]) -> Self {
        Self { rules: Rules { areas: Vec::new(), only: channels.to_vec() }, ..Self::new(Vec::new()) }
    }

    /// The rate (bytes per second) that was last measured for a channel in one direction, over all areas.
    pub fn rate(&self, channel: usize, direction: Direction) -> Option<f64> {
        let load = self.backlogs[index_of(direction)].channels.get(channel)?;
        load.rates.last()?.map(|r| r.value * 1e9)
    }
}

impl Rules {
    fn uses(&self, channel: usize, channels: usize) -> bool {
        self.only.contains(&channel) || !self.only.iter().any(|&c| c < channels)
    }

    /// The channel that an area hangs off.
    fn home(&self, area: usize, channels: usize) -> Option<usize> {
        match self.areas.get(area)?.route {
            Route::Channel(home) => Some(home.min(channels - 1)),
            Route::Shared => None,
        }
    }
}

fn index_of(direction: Direction) -> usize {
    match direction {
        Direction::ToHost => 0,
        Direction::FromHost => 1,
    }
}

impl Load {
    /// A rate that still holds: this area's, or else that of the channel.
    fn rate(&self, area: usize, now: Nanos) -> Option<f64> {
        let fresh = |r: &Option<Rate>| r.filter(|r| now.saturating_sub(r.at) < FORGET).map(|r| r.value);
        fresh(&self.rates[area]).or_else(|| fresh(self.rates.last()?))
    }

    fn explored(&self, area: usize, now: Nanos) -> bool {
        self.rates[area].is_some_and(|r| now.saturating_sub(r.at) < FORGET)
    }

    /// The bytes in flight that have not been moved yet, by the rate.
    fn unmoved(&self, rate: Option<f64>, now: Nanos) -> f64 {
        let head = self.flights.front().map_or(0.0, |f| {
            let ran = now.saturating_sub(f.since.max(self.idle_since)) as f64;
            (ran * rate.unwrap_or(0.0)).min(f.piece.len as f64)
        });
        self.bytes as f64 - head
    }

    fn has_room(&self) -> bool {
        self.flights.len() < DEPTH || self.bytes < SHORT
    }

    fn measure(&mut self, area: usize, value: f64, at: Nanos) {
        let all = self.rates.len() - 1;
        for slot in [area, all] {
            let old = self.rates[slot].filter(|r| at.saturating_sub(r.at) < FORGET);
            let value = old.map_or(value, |old| old.value + NEW * (value - old.value));
            self.rates[slot] = Some(Rate { value, at });
        }
    }
}

impl Backlog {
    fn fit(&mut self, areas: usize, channels: usize) {
        self.queues.resize_with(areas, VecDeque::new);
        self.left.resize(areas, 0);
        self.channels.resize_with(channels, Load::default);
        for load in &mut self.channels {
            load.rates.resize(areas + 1, None);
        }
    }

    /// Chooses the next piece for `channel` in this direction.
    fn next(&mut self, rules: &Rules, channel: usize, now: Nanos) -> Option<Piece> {
        if self.waiting == 0 || !self.channels.get(channel)?.has_room() {
            return None;
        }
        let idle = self.channels.iter().all(|c| c.flights.is_empty());
        let found = self.choose(rules, channel, now).and_then(|area| {
            let front = *self.queues[area].front()?;
            Some((area, front, self.length(rules, channel, area, front.len, now)?))
        });
        let Some((area, front, len)) = found else {
            self.declined += usize::from(idle);
            return None;
        };
        self.declined = 0;
        let piece = Piece { len, ..front };
        let queue = &mut self.queues[area];
        if len == front.len {
            queue.pop_front();
        } else {
            queue[0] = Piece { offset: front.offset + len, len: front.len - len, ..front };
        }
        self.left[area] -= len;
        self.waiting -= len;
        self.bulk &= self.waiting > 0;
        let load = &mut self.channels[channel];
        load.flights.push_back(Flight { piece, area, since: now });
        load.bytes += len;
        Some(piece)
    }

    /// Every channel has left the work to another one: then the channel that is asked takes it.
    fn all_declined(&self) -> bool {
        self.declined + 1 >= self.channels.len()
    }

    /// Whether a channel may move bytes of an area at all.
    fn reaches(&self, rules: &Rules, channel: usize, area: usize, now: Nanos) -> bool {
        let channels = self.channels.len();
        let own = rules.home(area, channels).is_none_or(|home| home == channel);
        rules.uses(channel, channels) && (own || self.bulk || self.channels[channel].explored(area, now))
    }

    /// The area that a channel is to work on. Channels spread over the areas, each stays where it is, and one without
    /// work helps where most bytes are left.
    ///
    /// When a fast channel would be done with its area long before a slow one with its own, both would end up in the
    /// slow one's, whose memory may be too slow for both. So they swap areas at the moment from which both end together
    /// (the level algorithm for machines of different speeds: Horvath, Lam and Sethi, Journal of the ACM, 1977).
    fn choose(&self, rules: &Rules, channel: usize, now: Nanos) -> Option<usize> {
        // The area of the piece that the channel was given last.
        let place = |c: usize| self.channels[c].flights.back().map(|f| f.area);
        let others = |area: usize| {
            let there = move |c: &usize| *c != channel && place(*c) == Some(area);
            (0..self.channels.len()).filter(there)
        };
        let here = place(channel);
        let mut best: Option<(Merit, usize)> = None;
        for area in (0..self.queues.len()).filter(|&a| self.left[a] > 0) {
            if !self.reaches(rules, channel, area, now) {
                continue;
            }
            let home = rules.home(area, self.channels.len());
            let company = others(area).count();
            if let Some(home) = home
                && home != channel
                && company == 0
                && self.channels[home].flights.is_empty()
                && !self.all_declined()
            {
                continue; // its own channel is idle and will be asked
            }
            let alone = company == 0;
            let per_head = self.left[area] as f64 / (1 + company) as f64;
            // Shared areas are left for the end, when the channels have to work side by side.
            let key = (alone, home.is_some(), here == Some(area), per_head, home == Some(channel));
            if best.is_none_or(|(k, _)| key > k) {
                best = Some((key, area));
            }
        }
        let ((alone, _, stays, ..), area) = best?;
        let exchange = || {
            let mine = self.channels[channel].rate(area, now)?;
            (0..self.channels.len()).find_map(|other| {
                let there = place(other)?;
                let its = self.channels[other].rate(there, now)?;
                let both_end = self.left[there] as f64 >= self.left[area] as f64 * BEHIND + SPREAD as f64;
                let apart = rules.areas.get(there).is_some_and(|a| a.route != Route::Shared);
                let worth_it = apart && mine > BEHIND * its && both_end && self.reaches(rules, channel, there, now);
                (worth_it && others(there).count() == 1).then_some(there)
            })
        };
        if alone && stays { exchange().or(Some(area)) } else { Some(area) }
    }

    /// Bytes, of `len`, that a channel takes; `None` when another channel should.
    fn length(&self, rules: &Rules, channel: usize, area: usize, len: u64, now: Nanos) -> Option<u64> {
        let peers = || (0..self.channels.len()).filter(|&c| self.reaches(rules, c, area, now));
        if peers().count() < 2 {
            return Some(len.min(if self.bulk { LARGEST } else { u64::MAX }));
        }
        let (mut known, mut sum, mut unknown, mut total) = (0.0, 0.0, 0.0, self.waiting as f64);
        for load in peers().map(|c| &self.channels[c]) {
            let rate = load.rate(area, now);
            match rate {
                Some(rate) => (known, sum) = (known + 1.0, sum + rate),
                None => unknown += 1.0,
            }
            total += load.unmoved(rate, now);
        }
        // A channel without a rate counts as fast as the others on average.
        let mean = if known == 0.0 { 1.0 } else { sum / known };
        sum += unknown * mean;
        let deficit = |load: &Load| {
            let rate = load.rate(area, now);
            total * rate.unwrap_or(mean) / sum - load.unmoved(rate, now)
        };
        let me = &self.channels[channel];
        let mine = deficit(me);
        // In turn where all are equal: the channel that was idle longest comes first.
        let after = |c: usize| {
            let it = &self.channels[c];
            let by_need = deficit(it).total_cmp(&mine);
            by_need.then(me.idle_since.cmp(&it.idle_since)).then(channel.cmp(&c)).is_le()
        };
        let most_behind = peers().all(|c| c == channel || after(c));
        if len < WHOLE_BELOW {
            return (most_behind || self.all_declined()).then_some(len);
        }
        let least = if self.bulk { SMALLEST } else { WHOLE_BELOW / 2 };
        if mine < least as f64 / 2.0 && !most_behind && !self.all_declined() {
            return None;
        }
        let spread = (0..self.queues.len()).filter(|&a| self.left[a] > 0).count() > 1;
        let want = match (self.bulk, me.rate(area, now)) {
            (false, _) => mine,
            // A slow channel would take long for its first piece.
            (true, None) => least as f64,
            (true, Some(_)) => (mine / FRACTION).min(if spread { SPREAD } else { LARGEST } as f64),
        };
        // Cut at 4 KiB so that no page is split between channels. A short rest goes along.
        let want = (want.max(least as f64) as u64).next_multiple_of(4096);
        Some(if want.saturating_add(least / 2) >= len { len } else { want })
    }
}

impl Policy for BalancePolicy {
    fn arrive(&mut self, transfer: u64, direction: Direction, at: Option<CardAddr>, len: u64, channels: usize) {
        let Self { rules: Rules { areas, .. }, backlogs, .. } = self;
        if backlogs[0].channels.len() < channels.max(1) {
            backlogs.iter_mut().for_each(|backlog| backlog.fit(areas.len() + 1, channels));
        }
        let backlog = &mut backlogs[index_of(direction)];
        for_each_area(areas, at, len, |area, offset, len| {
            let area = area.unwrap_or(areas.len());
            backlog.queues[area].push_back(Piece { transfer, offset, len });
            backlog.left[area] += len;
            backlog.waiting += len;
        });
        backlog.bulk |= backlog.waiting >= BULK;
    }

    fn next(&mut self, channel: usize, now: Duration) -> Option<Piece> {
        let Self { rules, backlogs, first } = self;
        let now = now.as_nanos() as Nanos;
        let found = [*first, 1 - *first].into_iter().find_map(|i| Some((i, backlogs[i].next(rules, channel, now)?)));
        let (i, piece) = found?;
        *first = 1 - i;
        Some(piece)
    }

    fn ended(&mut self, channel: usize, piece: &Piece, now: Duration, moved: bool) {
        let now = now.as_nanos() as Nanos;
        for backlog in &mut self.backlogs {
            let Some(load) = backlog.channels.get_mut(channel) else { continue };
            let Some(i) = load.flights.iter().position(|f| f.piece == *piece) else { continue };
            let Some(flight) = load.flights.remove(i) else { continue };
            load.bytes -= piece.len;
            let took = now.saturating_sub(flight.since.max(load.idle_since));
            load.idle_since = now;
            if moved && piece.len >= TELLING && took > 0 {
                load.measure(flight.area, piece.len as f64 / took as f64, now);
            }
            return;
        }
    }

    fn forget(&mut self, transfer: u64) {
        for backlog in &mut self.backlogs {
            for (queue, left) in backlog.queues.iter_mut().zip(&mut backlog.left) {
                queue.retain(|p| p.transfer != transfer);
                let kept = queue.iter().map(|p| p.len).sum();
                backlog.waiting -= *left - kept;
                *left = kept;
            }
            backlog.bulk &= backlog.waiting > 0;
        }
    }

    fn uses(&self, channel: usize, channels: usize) -> bool {
        self.rules.uses(channel, channels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_addr::Span;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const MIB: u64 = 1 << 20;

    fn areas() -> Vec<Area> {
        let area = |start, route| Area { span: Span::new(CardAddr::new(start), 256 * MIB).unwrap(), route };
        vec![area(0, Route::Shared), area(1 << 30, Route::Channel(0)), area((1 << 30) + 256 * MIB, Route::Channel(1))]
    }

    fn arrive(p: &mut BalancePolicy, transfer: u64, at: u64, len: u64) {
        p.arrive(transfer, Direction::ToHost, Some(CardAddr::new(at)), len, 2);
    }

    fn next(p: &mut BalancePolicy, c: usize, us: u64) -> Option<Piece> {
        p.next(c, Duration::from_micros(us))
    }

    fn ended(p: &mut BalancePolicy, c: usize, piece: Piece, us: u64) {
        p.ended(c, &piece, Duration::from_micros(us), true);
    }

    #[test]
    fn rates_are_averaged_and_expire() {
        let mut backlog = Backlog::default();
        backlog.fit(2, 1);
        let load = &mut backlog.channels[0];
        let values = |load: &Load| load.rates.iter().map(|r| r.map(|r| r.value)).collect::<Vec<_>>();
        load.measure(0, 4.0, 10);
        load.measure(1, 8.0, 20);
        assert_eq!(values(load), [Some(4.0), Some(8.0), Some(6.0)], "the last one for both");
        assert_eq!((load.rate(0, FORGET + 9), load.explored(0, FORGET + 9)), (Some(4.0), true));
        assert_eq!((load.rate(0, FORGET + 10), load.explored(0, FORGET + 10)), (Some(6.0), false));
        assert_eq!((load.rate(0, FORGET + 20), load.explored(0, 10)), (None, true));
        load.measure(0, 2.0, FORGET + 10);
        assert_eq!(values(load), [Some(2.0), Some(8.0), Some(4.0)], "what has expired does not count");
    }

    #[test]
    fn what_is_unmoved_is_told_from_the_rate() {
        let flight = |len, since| Flight { piece: Piece { transfer: 1, offset: 0, len }, area: 0, since };
        let mut load = Load { bytes: 1500, idle_since: 200, ..Load::default() };
        load.flights = [flight(1000, 100), flight(500, 100)].into();
        assert_eq!([None, Some(2.0)].map(|rate| load.unmoved(rate, 300)), [1500.0, 1300.0]);
        assert_eq!(load.unmoved(Some(2.0), 10_000), 500.0, "no more than the first, whose end was not told");
        load.flights[0].since = 250;
        assert_eq!(load.unmoved(Some(2.0), 300), 1400.0);
        assert_eq!(Load::default().unmoved(Some(2.0), 300), 0.0);
        // Two, and more as long as they are short.
        let room = |bytes, n| Load { bytes, flights: vec![flight(1, 0); n].into(), ..Load::default() }.has_room();
        assert_eq!([room(SHORT, 1), room(SHORT, 2), room(SHORT - 1, 2), room(SHORT - 1, 9)], [true, false, true, true]);
    }

    #[test]
    fn the_rate_is_in_bytes_per_second() {
        let (mut p, pieces) = both_busy();
        ended(&mut p, 0, pieces[0], 100);
        let rate = p.rate(0, Direction::ToHost).unwrap();
        assert!((rate - 2.0 * MIB as f64 / 100e-6).abs() < 1.0, "{rate}");
        // Too short a piece says nothing, nor does one that took no time.
        for (len, took) in [(TELLING - 1, 1000), (MIB, 0)] {
            let mut p = BalancePolicy::only(&[0]);
            arrive(&mut p, 1, 0, len);
            let piece = next(&mut p, 0, 100).unwrap();
            ended(&mut p, 0, piece, 100 + took);
            assert_eq!(p.rate(0, Direction::ToHost), None);
        }
        let mut p = BalancePolicy::only(&[0]);
        arrive(&mut p, 1, 0, TELLING);
        let piece = next(&mut p, 0, 100).unwrap();
        ended(&mut p, 0, piece, 200);
        assert!(p.rate(0, Direction::ToHost).is_some());
    }

    #[test]
    fn channels_that_do_not_exist_are_passed_over() {
        let uses = |only: &[usize]| [0, 1].map(|channel| BalancePolicy::only(only).uses(channel, 2));
        assert_eq!([uses(&[]), uses(&[2]), uses(&[9])], [[true; 2]; 3]);
        assert_eq!([uses(&[0]), uses(&[1, 9])], [[true, false], [false, true]]);
        // An area of one that does not exist is the last one's.
        let span = Span::new(CardAddr::new(0), 256 * MIB).unwrap();
        let mut p = BalancePolicy::new(vec![Area { span, route: Route::Channel(7) }]);
        arrive(&mut p, 1, 0, MIB);
        assert!(next(&mut p, 0, 0).is_none() && next(&mut p, 1, 0).is_some());
    }

    #[test]
    fn before_there_are_rates_the_address_decides() {
        let mut p = BalancePolicy::new(areas());
        arrive(&mut p, 1, 0, 4 * MIB);
        assert_eq!(
            [next(&mut p, 0, 0).unwrap().len, next(&mut p, 1, 0).unwrap().len],
            [2 * MIB, 2 * MIB],
            "DDR is halved"
        );
        let mut p = BalancePolicy::new(areas());
        arrive(&mut p, 1, (1 << 30) + 256 * MIB, 4 * MIB);
        assert_eq!(next(&mut p, 0, 0), None);
        assert_eq!(next(&mut p, 1, 0).unwrap().len, 4 * MIB, "HBM goes to its own channel");
    }

    /// A policy whose two channels have a piece of DDR each.
    fn both_busy() -> (BalancePolicy, [Piece; 2]) {
        let mut p = BalancePolicy::new(areas());
        arrive(&mut p, 1, 0, 4 * MIB);
        let pieces = [0, 1].map(|channel| next(&mut p, channel, 0).unwrap());
        (p, pieces)
    }

    #[test]
    fn little_work_is_split_by_the_rates() {
        let (mut p, pieces) = both_busy();
        ended(&mut p, 0, pieces[0], 100);
        ended(&mut p, 1, pieces[1], 300);
        assert!(p.rate(0, Direction::ToHost).unwrap() > 2.9 * p.rate(1, Direction::ToHost).unwrap());
        assert_eq!(p.rate(0, Direction::FromHost), None);
        arrive(&mut p, 2, 0, 4 * MIB);
        assert_eq!([next(&mut p, 0, 400).unwrap().len, next(&mut p, 1, 400).unwrap().len], [3 * MIB, MIB]);
    }

    #[test]
    fn a_channel_without_a_rate_counts_as_fast_as_the_others() {
        let (mut p, pieces) = both_busy();
        ended(&mut p, 0, pieces[0], 100);
        p.ended(1, &pieces[1], Duration::from_micros(100), false);
        assert_eq!(p.rate(1, Direction::ToHost), None, "a piece that failed says nothing");
        arrive(&mut p, 2, 0, 4 * MIB);
        assert_eq!([next(&mut p, 0, 200).unwrap().len, next(&mut p, 1, 200).unwrap().len], [2 * MIB, 2 * MIB]);
    }

    #[test]
    fn one_long_piece_runs_and_one_follows() {
        let mut p = BalancePolicy::only(&[0]);
        (0..3).for_each(|i| arrive(&mut p, i, i * MIB, MIB));
        let first = next(&mut p, 0, 0).unwrap();
        assert!(next(&mut p, 0, 0).is_some() && next(&mut p, 0, 0).is_none());
        ended(&mut p, 0, first, 100);
        assert_eq!(p.backlogs[0].channels[0].bytes, MIB);
        assert!(next(&mut p, 0, 100).is_some());
    }

    #[test]
    fn much_work_is_cut_until_it_is_handed_out() {
        let mut p = BalancePolicy::only(&[0]);
        arrive(&mut p, 1, 0, 16 * MIB);
        let take = |p: &mut BalancePolicy| {
            let piece = next(p, 0, 0).unwrap();
            ended(p, 0, piece, 0);
            piece.len
        };
        assert_eq!([take(&mut p), take(&mut p), take(&mut p)], [LARGEST; 3]);
        // A little more does not make it little work.
        arrive(&mut p, 2, 0, 1);
        assert_eq!([take(&mut p), take(&mut p)], [LARGEST, 1]);
        arrive(&mut p, 3, 0, 6 * MIB);
        assert_eq!(take(&mut p), 6 * MIB);
        // Forgotten bytes no longer wait.
        arrive(&mut p, 4, 0, 16 * MIB);
        p.forget(4);
        arrive(&mut p, 5, 0, 6 * MIB);
        assert_eq!(take(&mut p), 6 * MIB);
    }

    #[test]
    fn an_old_rate_is_forgotten() {
        let mut p = BalancePolicy::new(areas());
        arrive(&mut p, 1, 0, 4 * MIB);
        let pieces = [next(&mut p, 0, 0).unwrap(), next(&mut p, 1, 0).unwrap()];
        ended(&mut p, 0, pieces[0], 100);
        ended(&mut p, 1, pieces[1], 100_000);
        arrive(&mut p, 2, 0, 4 * MIB);
        let late = 100_000 + FORGET / 1000;
        assert_eq!([next(&mut p, 0, late).unwrap().len, next(&mut p, 1, late).unwrap().len], [2 * MIB, 2 * MIB]);
    }

    #[test]
    fn one_channel_can_do_it_all() {
        let mut p = BalancePolicy::only(&[1]);
        arrive(&mut p, 1, 1 << 30, 4 * MIB);
        assert_eq!(next(&mut p, 0, 0), None);
        assert_eq!(next(&mut p, 1, 0), Some(Piece { transfer: 1, offset: 0, len: 4 * MIB }));
        let mut p = BalancePolicy::only(&[9]);
        arrive(&mut p, 1, 1 << 30, 4 * MIB);
        assert!(next(&mut p, 0, 0).is_some(), "a channel that does not exist is passed over");
    }

    #[test]
    fn many_small_transfers_can_be_under_way() {
        let mut p = BalancePolicy::new(areas());
        let mut given = [0; 2];
        for i in 0..64 {
            arrive(&mut p, i, i * 4096, 4096);
            let c = (0..2).find(|&c| next(&mut p, c, 0).is_some()).expect("room for small ones");
            given[c] += 1;
        }
        assert_eq!(given, [32, 32]);
    }

    /// A direction whose channels work on these areas (`None`: idle) at these rates; `left` is in MiB for each area.
    fn at_work(left: [u64; 4], places: &[Option<usize>], rates: &[f64]) -> Backlog {
        let mut backlog = Backlog { bulk: true, ..Backlog::default() };
        backlog.fit(left.len(), places.len());
        backlog.left = left.map(|mib| mib * MIB).into();
        let piece = Piece { transfer: 0, offset: 0, len: MIB };
        for (c, (load, place)) in backlog.channels.iter_mut().zip(places).enumerate() {
            load.flights.extend(place.map(|area| Flight { piece, area, since: 0 }));
            if let (Some(area), Some(rate)) = (place, rates.get(c)) {
                load.measure(*area, *rate, 0);
            }
        }
        backlog
    }

    /// The area that a channel is to work on, then.
    fn chosen(backlog: &Backlog, channel: usize) -> Option<usize> {
        backlog.choose(&BalancePolicy::new(areas()).rules, channel, 1)
    }

    #[test]
    fn channels_spread_over_the_areas() {
        let choose = |left, places: &[_], channel| chosen(&at_work(left, places, &[]), channel);
        assert_eq!(choose([0; 4], &[None, None], 0), None);
        // An area without company, though another one has more left.
        assert_eq!(choose([0, 30, 10, 0], &[Some(1), None], 1), Some(2));
        // Shared ones come last, those without work not at all.
        assert_eq!([0, 1].map(|c| choose([30, 10, 10, 30], &[None, None], c)), [Some(1), Some(2)]);
        assert_eq!(choose([30, 0, 0, 20], &[None, None], 0), Some(0));
        assert_eq!(choose([0, 0, 10, 0], &[Some(1), Some(0)], 0), Some(2));
        // A channel stays, or takes where most is left per head, or its own, or the first.
        assert_eq!(choose([0, 10, 20, 0], &[Some(1), Some(0)], 0), Some(1));
        assert_eq!(choose([0, 10, 20, 0], &[Some(2), Some(0)], 0), Some(2));
        let four = [None, Some(1), Some(2), Some(2)];
        assert_eq!([10, 12].map(|left| choose([0, left, 16, 0], &four, 0)), [Some(2), Some(1)]);
        let busy = [Some(0), Some(0), None];
        assert_eq!([0, 1, 2].map(|c| choose([0, 10, 10, 0], &busy, c)), [Some(1), Some(2), Some(1)]);
    }

    #[test]
    fn an_area_is_left_to_its_own_channel_while_that_is_idle() {
        let choose = |places: &[_], channel| chosen(&at_work([0, 10, 0, 0], places, &[]), channel);
        assert_eq!([0, 1].map(|channel| choose(&[None, None], channel)), [Some(1), None]);
        assert_eq!(choose(&[Some(0), None], 1), Some(1), "it is busy elsewhere");
        assert_eq!(choose(&[None, None, Some(1)], 1), Some(1), "another one is there already");
        let mut declined = at_work([0, 10, 0, 0], &[None, None], &[]);
        declined.declined = 1;
        assert_eq!(chosen(&declined, 1), Some(1), "it was asked in vain");
        // With little work it is, unless the channel is known to reach the area.
        let mut little = at_work([0, 10, 0, 0], &[Some(1), None], &[]);
        little.bulk = false;
        assert_eq!(chosen(&little, 1), None);
        little.channels[1].measure(1, 1.0, 0);
        assert_eq!(chosen(&little, 1), Some(1));
    }

    #[test]
    fn a_fast_channel_swaps_areas_with_a_slow_one_that_would_end_later() {
        let choose = |left, places: &[_], rates: &[f64]| chosen(&at_work(left, places, rates), 0);
        let apart = [Some(1), Some(2)];
        assert_eq!([11, 12].map(|left| choose([0, 10, left, 0], &apart, &[3.0, 2.0])), [Some(1), Some(2)]);
        // Not for a channel as fast, nor for one of which nothing is known.
        assert_eq!(choose([0, 10, 12, 0], &apart, &[2.0, 2.0]), Some(1));
        assert_eq!(choose([0, 10, 12, 0], &apart, &[BEHIND, 1.0]), Some(1));
        assert_eq!([&[][..], &[3.0]].map(|rates| choose([0, 10, 12, 0], &apart, rates)), [Some(1); 2]);
        // Not with a shared area, nor where several work, nor before the channel is at work itself.
        assert_eq!(choose([12, 10, 0, 0], &[Some(1), Some(0)], &[3.0, 2.0]), Some(1));
        assert_eq!(choose([0, 10, 12, 0], &[Some(1), Some(2), Some(2)], &[3.0, 2.0, 2.0]), Some(1));
        assert_eq!(choose([0, 10, 12, 0], &[Some(1), Some(1), Some(2)], &[3.0, 3.0, 2.0]), Some(1));
        let mut idle = at_work([0, 10, 12, 0], &apart, &[3.0, 2.0]);
        idle.channels[0].flights.clear();
        assert_eq!(chosen(&idle, 0), Some(1));
        // Not where the channel does not reach.
        let mut little = at_work([0, 10, 12, 0], &apart, &[3.0, 2.0]);
        little.bulk = false;
        assert_eq!(chosen(&little, 0), Some(1));
    }

    /// A policy that knows the rates (bytes per nanosecond) of its channels for shared memory.
    fn with_rates(rates: &[Option<f64>]) -> BalancePolicy {
        let mut p = BalancePolicy::new(areas());
        p.arrive(0, Direction::ToHost, None, 1, rates.len());
        p.forget(0);
        for (load, rate) in p.backlogs[0].channels.iter_mut().zip(rates) {
            rate.iter().for_each(|rate| load.measure(0, *rate, 0));
        }
        p
    }

    /// Bytes of the next piece of a channel, of a transfer to shared memory that has just arrived.
    fn first(rates: &[Option<f64>], len: u64, channel: usize) -> Option<u64> {
        let mut p = with_rates(rates);
        p.arrive(1, Direction::ToHost, Some(CardAddr::new(0)), len, rates.len());
        next(&mut p, channel, 0).map(|f| f.len)
    }

    #[test]
    fn little_work_is_divided_so_that_all_end_together() {
        let three = [Some(3.0), Some(1.0), None];
        assert_eq!([0, 1, 2].map(|c| first(&three, 6 * MIB, c)), [Some(3 * MIB), Some(MIB), Some(2 * MIB)]);
        // Bytes in flight count, less those already moved.
        let mut p = with_rates(&[Some(3.0), Some(1.0)]);
        arrive(&mut p, 1, 0, 4 * MIB);
        let pieces = [next(&mut p, 0, 0).unwrap(), next(&mut p, 1, 0).unwrap()];
        assert_eq!(pieces.map(|f| f.len), [3 * MIB, MIB]);
        let half = Duration::from_nanos(MIB / 2);
        p.ended(1, &pieces[1], half, false);
        arrive(&mut p, 2, 0, 4 * MIB);
        // Together 5.5 MiB are left, a quarter of them for the slow one.
        assert_eq!(p.next(1, half).unwrap().len, 11 * MIB / 8);
        assert_eq!(p.next(0, half).unwrap().len, 21 * MIB / 8);
    }

    #[test]
    fn pieces_are_not_too_short() {
        const KIB: u64 = 1 << 10;
        let two = |fast| [Some(fast), Some(1.0)];
        // Short transfers go whole, to the channel that is most behind.
        assert_eq!([0, 1].map(|c| first(&two(1.0), WHOLE_BELOW - 1, c)), [Some(WHOLE_BELOW - 1), None]);
        assert_eq!([0, 1].map(|c| first(&two(1.0), WHOLE_BELOW, c)), [Some(64 * KIB); 2]);
        // A share of half a piece is rounded up, less is left to the other one; a short rest goes along.
        assert_eq!([0, 1].map(|c| first(&two(3.0), 256 * KIB, c)), [Some(192 * KIB), Some(64 * KIB)]);
        assert_eq!([0, 1].map(|c| first(&two(7.0), 256 * KIB, c)), [Some(256 * KIB), Some(64 * KIB)]);
        assert_eq!([0, 1].map(|c| first(&two(15.0), 256 * KIB, c)), [Some(256 * KIB), None]);
        // The one that was idle for longest comes first.
        let mut p = with_rates(&two(1.0));
        p.backlogs[0].channels[0].idle_since = 1;
        arrive(&mut p, 1, 0, 4096);
        assert_eq!([0, 1].map(|c| next(&mut p, c, 0).is_some()), [false, true]);
    }

    #[test]
    fn work_that_all_left_to_others_is_taken() {
        let mut p = with_rates(&[Some(2.0), Some(1.0)]);
        for transfer in 1..3 {
            arrive(&mut p, transfer, 0, 4096);
            assert_eq!([(); 2].map(|()| next(&mut p, 1, 0).is_some()), [false, true]);
            let piece = Piece { transfer, offset: 0, len: 4096 };
            p.ended(1, &piece, Duration::ZERO, true);
        }
        // Who is asked while there is no work, or another channel has some, does not decline.
        assert_eq!([(); 3].map(|()| next(&mut p, 1, 0)), [None; 3]);
        arrive(&mut p, 3, 0, 4096);
        assert_eq!(next(&mut p, 1, 0), None);
        let mut p = with_rates(&[Some(2.0), Some(1.0)]);
        arrive(&mut p, 1, 0, 4096);
        assert!(next(&mut p, 0, 0).is_some());
        arrive(&mut p, 2, 0, 65536);
        assert_eq!([(); 3].map(|()| next(&mut p, 1, 0)), [None; 3], "the other one is at work");
    }

    #[test]
    fn much_work_is_cut_to_a_part_of_the_share() {
        let two = [Some(1.0), Some(1.0)];
        assert_eq!([24, 64].map(|mib| first(&two, mib * MIB, 0)), [Some(2 * MIB), Some(LARGEST)]);
        assert_eq!(first(&[None, None], 64 * MIB, 0), Some(SMALLEST), "its rate is not known yet");
        // While several areas have work, pieces are short.
        let mut p = with_rates(&two);
        arrive(&mut p, 1, 0, 64 * MIB);
        arrive(&mut p, 2, 1 << 30, 4096);
        assert_eq!(next(&mut p, 1, 0).unwrap().len, SPREAD);
    }

    #[test]
    fn what_is_forgotten_is_not_left_over() {
        let mut p = with_rates(&[None, None]);
        (1..3).for_each(|i| arrive(&mut p, i, 255 * MIB, i * 6 * MIB));
        p.forget(2);
        let backlog = &p.backlogs[0];
        assert_eq!((backlog.waiting, &backlog.left, backlog.bulk), (6 * MIB, &vec![MIB, 0, 0, 5 * MIB], true));
    }

    #[test]
    fn a_channel_may_be_added() {
        let mut p = with_rates(&[None, None]);
        assert!(next(&mut p, 2, 0).is_none());
        p.arrive(1, Direction::ToHost, Some(CardAddr::new(0)), 6 * MIB, 3);
        assert_eq!([0, 1, 2].map(|c| next(&mut p, c, 0).map(|f| f.len)), [Some(2 * MIB); 3]);
    }

    proptest! {
        /// Whatever the channels do, every byte is handed out once, and something always is as long as there are bytes.
        #[test]
        fn every_byte_once(
            transfers in prop::collection::vec((0u64..1900 * MIB, 1u64..60 * MIB, any::<bool>()), 1..12),
            channels in 1usize..5,
            only in prop::collection::vec(0usize..5, 0..3),
            restricted: bool,
            steps in prop::collection::vec((0usize..5, 0u64..3000), 1..50),
        ) {
            let mut p = if restricted { BalancePolicy::only(&only) } else { BalancePolicy::new(areas()) };
            let mut seen: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
            let mut flying: Vec<Vec<Piece>> = vec![Vec::new(); channels];
            let (mut now, mut step) = (0, steps.iter().cycle());
            let mut arriving = transfers.iter().enumerate();
            let mut left: u64 = transfers.iter().map(|t| t.1).sum();
            while left > 0 || flying.iter().any(|f| !f.is_empty()) {
                if let Some((i, &(at, len, to_host))) = arriving.next() {
                    let direction = if to_host { Direction::ToHost } else { Direction::FromHost };
                    p.arrive(i as u64, direction, Some(CardAddr::new(at)), len, channels);
                }
                // Two rounds, as a poll makes them.
                for c in (0..channels).chain(0..channels) {
                    while let Some(piece) = next(&mut p, c, now) {
                        prop_assert!(piece.len > 0 && piece.len <= left);
                        left -= piece.len;
                        seen.entry(piece.transfer).or_default().push((piece.offset, piece.len));
                        flying[c].push(piece);
                    }
                }
                let busy: Vec<usize> = (0..channels).filter(|&c| !flying[c].is_empty()).collect();
                prop_assert!(!busy.is_empty() || arriving.len() > 0, "{left} bytes are left lying");
                let &(pick, us) = step.next().unwrap();
                now += us;
                if !busy.is_empty() {
                    let c = busy[pick % busy.len()];
                    let k = pick % flying[c].len();
                    let piece = flying[c].remove(k);
                    ended(&mut p, c, piece, now);
                }
            }
            for (i, t) in transfers.iter().enumerate() {
                let mut pieces = seen.remove(&(i as u64)).unwrap();
                pieces.sort_unstable();
                let end = pieces.iter().try_fold(0, |end, &(at, len)| (at == end).then_some(end + len));
                prop_assert_eq!(end, Some(t.1));
            }
        }
    }
}
