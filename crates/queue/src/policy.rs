//! Which channel moves which bytes of a transfer.

use std::collections::VecDeque;
use std::time::Duration;

use dmalane_addr::{Address, CardAddr, Span};

use crate::Direction;

/// Bytes of a transfer for one channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Which transfer, by the number that [`Policy::arrive`] was given.
    pub transfer: u64,
    /// The first byte, counted from the start of the transfer.
    pub offset: u64,
    /// Bytes, at least 1.
    pub len: u64,
}

/// Distributes transfers over channels. Knows neither buffers nor queues, only numbers and the time, so that the same
/// policy runs over a card and in a simulation.
///
/// Its driver ([`Split`](crate::Split)) announces each transfer, asks for the next piece of every channel that has
/// room until there are none, and reports when a piece has ended.
pub trait Policy: Send {
    /// A transfer of `len` bytes (at least 1) at `at` (`None`: it has no address of card memory) has arrived; there are
    /// `channels` channels. From now on its bytes are handed out by [`Policy::next`], each exactly once.
    fn arrive(&mut self, transfer: u64, direction: Direction, at: Option<CardAddr>, len: u64, channels: usize);

    /// Chooses the next piece for `channel`; `None`: nothing for now. Once every piece handed out has ended,
    /// some channel must be given a piece as long as there are bytes left.
    fn next(&mut self, channel: usize, now: Duration) -> Option<Piece>;

    /// A piece that `channel` was given is over; `moved` says whether its bytes were moved.
    fn ended(&mut self, channel: usize, piece: &Piece, now: Duration, moved: bool);

    /// Hands out no more of this transfer. Pieces that were handed out still end.
    fn forget(&mut self, transfer: u64);

    /// Whether `channel`, of `channels`, may be given operations that are not cut. It is true for at least one.
    fn uses(&self, channel: usize, channels: usize) -> bool {
        let _ = (channel, channels);
        true
    }
}

/// How transfers to an area of card memory go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// Every channel reaches it equally well: each transfer is shared out equally.
    Shared,
    /// It hangs off this channel.
    Channel(usize),
}

/// An area of card memory and its route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    /// Which addresses.
    pub span: Span<CardAddr>,
    /// How transfers reach it.
    pub route: Route,
}

/// Transfers shorter than this (bytes) are not worth cutting.
pub(crate) const WHOLE_BELOW: u64 = 128 << 10;

/// Calls `each` for every range of a transfer that lies in one area: with the index of the area (`None` outside of
/// all), the offset and the length.
pub(crate) fn for_each_area(
    areas: &[Area],
    mut at: Option<CardAddr>,
    len: u64,
    mut each: impl FnMut(Option<usize>, u64, u64),
) {
    let mut offset = 0;
    while offset < len {
        let found = at.and_then(|a| areas.iter().position(|area| area.span.contains(a)).map(|i| (a, i)));
        let Some((a, i)) = found else {
            return each(None, offset, len - offset);
        };
        // Bytes to the end of the area; the difference is below the length, so the sum cannot wrap for len > 0.
        let n = (len - offset).min((areas[i].span.last().bits() - a.bits()).saturating_add(1));
        each(Some(i), offset, n);
        offset += n;
        at = a.checked_add(n);
    }
}

/// Routes by placement alone: DDR is shared between the channels, each half of HBM hangs off one.
///
/// The rule is that of the SLASH driver for the Alveo V80 (Xilinx SLASH, pull request 126: "DDR splits in half; HBM
/// routes by its half-memory boundary"). Short transfers (below 128 KiB) take the channels in turn. An operation
/// without a card address (at a device virtual address) is shared. [`BalancePolicy`](crate::BalancePolicy) starts from
/// this rule and learns.
#[derive(Clone, Debug)]
pub struct AddressPolicy {
    areas: Vec<Area>,
    only: Option<usize>,
    turn: usize,
    /// Per channel: what it was given and has not taken yet.
    queues: Vec<VecDeque<Piece>>,
}

impl AddressPolicy {
    /// A policy for a card with these areas.
    pub fn new(areas: Vec<Area>) -> Self {
        Self { areas, only: None, turn: 0, queues: Vec::new() }
    }

    /// A policy that sends everything over one channel.
    pub fn only(channel: usize) -> Self {
        Self { only: Some(channel), ..Self::new(Vec::new()) }
    }

    fn distribute(turn: &mut usize, piece: Piece, queues: &mut [VecDeque<Piece>]) {
        let channels = queues.len();
        let first = *turn % channels;
        *turn = first + 1;
        if piece.len < WHOLE_BELOW {
            queues[first].push_back(piece);
            return;
        }
        // Cut at 4 KiB so that no page is split between channels.
        let step = piece.len.div_ceil(channels as u64).next_multiple_of(4096);
        let mut left = piece;
        for queue in queues {
            let len = step.min(left.len);
            if len > 0 {
                queue.push_back(Piece { len, ..left });
                left = Piece { offset: left.offset + len, len: left.len - len, ..left };
            }
        }
    }
}

impl Policy for AddressPolicy {
    fn arrive(&mut self, transfer: u64, _: Direction, at: Option<CardAddr>, len: u64, channels: usize) {
        let Self { areas, only, turn, queues } = self;
        queues.resize_with(channels.max(1), VecDeque::new);
        let last = queues.len() - 1;
        if let Some(only) = *only {
            return queues[only.min(last)].push_back(Piece { transfer, offset: 0, len });
        }
        for_each_area(areas, at, len, |area, offset, len| {
            let piece = Piece { transfer, offset, len };
            match area.map(|i| areas[i].route) {
                Some(Route::Channel(c)) => queues[c.min(last)].push_back(piece),
                Some(Route::Shared) | None => Self::distribute(turn, piece, queues),
            }
        });
    }

    fn next(&mut self, channel: usize, _: Duration) -> Option<Piece> {
        self.queues.get_mut(channel)?.pop_front()
    }

    fn ended(&mut self, _: usize, _: &Piece, _: Duration, _: bool) {}

    fn forget(&mut self, transfer: u64) {
        for queue in &mut self.queues {
            queue.retain(|p| p.transfer != transfer);
        }
    }

    fn uses(&self, channel: usize, channels: usize) -> bool {
        self.only.is_none_or(|only| only.min(channels - 1) == channel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn policy() -> AddressPolicy {
        let area = |start, route| Area { span: Span::new(CardAddr::new(start), 64 * MIB).unwrap(), route };
        AddressPolicy::new(vec![
            area(0, Route::Shared),
            area(256 * MIB, Route::Channel(0)),
            area(320 * MIB, Route::Channel(1)),
        ])
    }

    /// The pieces in the order of their offsets, each with its channel.
    fn cut(p: &mut AddressPolicy, at: u64, len: u64) -> Vec<(usize, Piece)> {
        p.arrive(7, Direction::FromHost, Some(CardAddr::new(at)), len, 2);
        let mut pieces = Vec::new();
        for c in 0..2 {
            while let Some(piece) = p.next(c, Duration::ZERO) {
                pieces.push((c, piece));
            }
        }
        pieces.sort_by_key(|(_, p)| p.offset);
        pieces
    }

    fn lengths(p: &mut AddressPolicy, at: u64, len: u64) -> Vec<(usize, u64)> {
        cut(p, at, len).into_iter().map(|(c, p)| (c, p.len)).collect()
    }

    #[test]
    fn ddr_is_halved_and_hbm_goes_by_its_boundary() {
        let mut p = policy();
        assert_eq!(lengths(&mut p, 0, 8 * MIB), [(0, 4 * MIB), (1, 4 * MIB)]);
        assert_eq!(lengths(&mut p, 256 * MIB, 8 * MIB), [(0, 8 * MIB)]);
        assert_eq!(lengths(&mut p, 320 * MIB, 8 * MIB), [(1, 8 * MIB)]);
        assert_eq!(lengths(&mut p, 319 * MIB, 3 * MIB), [(0, MIB), (1, 2 * MIB)], "across the boundary");
        let small: Vec<_> = (0..3).map(|_| lengths(&mut p, 0, 4096)[0].0).collect();
        assert!(small[0] != small[1] && small[0] == small[2], "small transfers take turns: {small:?}");
        assert_eq!(lengths(&mut AddressPolicy::only(1), 0, 8 * MIB), [(1, 8 * MIB)]);
    }

    #[test]
    fn short_transfers_and_short_rests_are_not_cut() {
        let mut p = policy();
        assert_eq!(lengths(&mut p, 0, WHOLE_BELOW - 1), [(0, WHOLE_BELOW - 1)]);
        assert_eq!(lengths(&mut p, 0, WHOLE_BELOW), [(0, 64 << 10), (1, 64 << 10)]);
        assert_eq!(lengths(&mut p, 0, WHOLE_BELOW + 1), [(0, 68 << 10), (1, (60 << 10) + 1)]);
        // Nothing is left for the last of many channels.
        p.arrive(1, Direction::ToHost, Some(CardAddr::new(0)), WHOLE_BELOW, 40);
        let given = (0..40).map(|c| p.next(c, Duration::ZERO).map(|f| (f.offset, f.len)));
        assert!(given.enumerate().all(|(c, got)| got == (c < 32).then_some((c as u64 * 4096, 4096))));
        // A channel that does not exist stands for the last.
        assert_eq!(lengths(&mut AddressPolicy::only(7), 0, 8 * MIB), [(1, 8 * MIB)]);
    }

    #[test]
    fn what_is_forgotten_is_not_handed_out() {
        let mut p = policy();
        p.arrive(1, Direction::ToHost, Some(CardAddr::new(0)), MIB, 2);
        p.arrive(2, Direction::ToHost, Some(CardAddr::new(0)), MIB, 2);
        p.forget(1);
        let next = |p: &mut AddressPolicy, c| p.next(c, Duration::ZERO).map(|p| p.transfer);
        assert_eq!([next(&mut p, 0), next(&mut p, 0), next(&mut p, 1)], [Some(2), None, Some(2)]);
    }

    proptest! {
        #[test]
        fn pieces_add_up(at in 0u64..500 * MIB, len in 1u64..400 * MIB, top: bool) {
            let at = if top { u64::MAX - len + 1 } else { at };
            let mut expected = 0;
            for (channel, piece) in cut(&mut policy(), at, len) {
                prop_assert!(channel < 2 && piece.len > 0 && piece.offset == expected && piece.transfer == 7);
                expected += piece.len;
            }
            prop_assert_eq!(expected, len);
        }
    }
}
