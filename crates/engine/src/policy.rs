//! Which channel moves which bytes of a transfer.

use dmalane_addr::{Address, CardAddr, Span};

use crate::Far;

/// The next `len` bytes of a transfer, for one channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Which channel, from 0.
    pub channel: usize,
    /// Bytes.
    pub len: u64,
}

/// Cuts transfers into pieces.
pub trait Policy<F>: Send {
    /// Appends the pieces of a transfer of `len` bytes (at least 1) at `far`, in order. Their lengths, none 0, add
    /// up to `len`.
    fn cut(&mut self, far: &F, len: u64, channels: usize, pieces: &mut Vec<Piece>);
}

/// How transfers to an area of card memory go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// Either channel reaches it equally well: each transfer is shared out equally.
    Shared,
    /// It hangs off this channel.
    Channel(usize),
}

/// An area of card memory and the way to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    /// Which addresses.
    pub span: Span<CardAddr>,
    /// Which way.
    pub route: Route,
}

/// Routes by placement: DDR is shared between the channels, each half of HBM hangs off one.
///
/// The rule is that of the SLASH driver for the Alveo V80 (Xilinx SLASH, pull request 126: "DDR splits in half; HBM
/// routes by its half-memory boundary"). Transfers below [`AddressPolicy::WHOLE_BELOW`] are not worth cutting; they take
/// the channels in turn. What has no card address (a device virtual address) is shared.
#[derive(Clone, Debug)]
pub struct AddressPolicy {
    areas: Vec<Area>,
    only: Option<usize>,
    turn: usize,
}

impl AddressPolicy {
    /// Transfers shorter than this (bytes) are not cut.
    pub const WHOLE_BELOW: u64 = 128 << 10;

    /// A policy for a card with these areas.
    pub fn new(areas: Vec<Area>) -> Self {
        Self { areas, only: None, turn: 0 }
    }

    /// Sends everything over one channel instead.
    pub fn only(channel: usize) -> Self {
        Self { areas: Vec::new(), only: Some(channel), turn: 0 }
    }

    fn share_out(&mut self, len: u64, channels: usize, pieces: &mut Vec<Piece>) {
        let turn = self.turn % channels;
        self.turn = turn + 1;
        if len < Self::WHOLE_BELOW {
            pieces.push(Piece { channel: turn, len });
            return;
        }
        // Cut at 4 KiB so that no page is split between channels.
        let step = (len / channels as u64).next_multiple_of(4096);
        let mut left = len;
        for channel in 0..channels {
            let n = if channel + 1 == channels { left } else { step.min(left) };
            if n > 0 {
                pieces.push(Piece { channel, len: n });
                left -= n;
            }
        }
    }
}

impl<F: Far> Policy<F> for AddressPolicy {
    fn cut(&mut self, far: &F, len: u64, channels: usize, pieces: &mut Vec<Piece>) {
        if let Some(only) = self.only {
            pieces.push(Piece { channel: only.min(channels - 1), len });
            return;
        }
        let mut left = len;
        let mut at = far.card_addr();
        while left > 0 {
            let area = at.and_then(|a| self.areas.iter().find(|area| area.span.contains(a)).map(|area| (a, area)));
            let Some((a, &Area { span, route })) = area else {
                self.share_out(left, channels, pieces);
                return;
            };
            // Bytes to the end of the area; the difference is below the length, so the sum cannot wrap for len > 0.
            let n = left.min((span.last().bits() - a.bits()).saturating_add(1));
            match route {
                Route::Shared => self.share_out(n, channels, pieces),
                Route::Channel(c) => pieces.push(Piece { channel: c.min(channels - 1), len: n }),
            }
            left -= n;
            at = a.checked_add(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    struct At(CardAddr);

    impl Far for At {
        fn advance(&self, bytes: u64) -> Option<Self> {
            self.0.checked_add(bytes).map(At)
        }
        fn card_addr(&self) -> Option<CardAddr> {
            Some(self.0)
        }
    }

    const MIB: u64 = 1 << 20;

    fn policy() -> AddressPolicy {
        let area = |start, route| Area { span: Span::new(CardAddr::new(start), 64 * MIB).unwrap(), route };
        AddressPolicy::new(vec![
            area(0, Route::Shared),
            area(256 * MIB, Route::Channel(0)),
            area(320 * MIB, Route::Channel(1)),
        ])
    }

    fn cut(p: &mut AddressPolicy, at: u64, len: u64) -> Vec<(usize, u64)> {
        let mut pieces = Vec::new();
        p.cut(&At(CardAddr::new(at)), len, 2, &mut pieces);
        pieces.into_iter().map(|p| (p.channel, p.len)).collect()
    }

    #[test]
    fn ddr_is_halved_and_hbm_goes_by_its_boundary() {
        let mut p = policy();
        assert_eq!(cut(&mut p, 0, 8 * MIB), [(0, 4 * MIB), (1, 4 * MIB)]);
        assert_eq!(cut(&mut p, 256 * MIB, 8 * MIB), [(0, 8 * MIB)]);
        assert_eq!(cut(&mut p, 320 * MIB, 8 * MIB), [(1, 8 * MIB)]);
        assert_eq!(cut(&mut p, 319 * MIB, 3 * MIB), [(0, MIB), (1, 2 * MIB)], "across the boundary");
        let small: Vec<_> = (0..3).map(|_| cut(&mut p, 0, 4096)[0].0).collect();
        assert!(small[0] != small[1] && small[0] == small[2], "small transfers take turns: {small:?}");
        assert_eq!(cut(&mut AddressPolicy::only(1), 0, 8 * MIB), [(1, 8 * MIB)]);
    }

    proptest! {
        #[test]
        fn pieces_add_up(at in 0u64..500 * MIB, len in 1u64..400 * MIB, top: bool) {
            let at = if top { u64::MAX - len + 1 } else { at };
            let pieces = cut(&mut policy(), at, len);
            prop_assert!(pieces.iter().all(|p| p.0 < 2 && p.1 > 0));
            prop_assert_eq!(pieces.iter().map(|p| p.1).sum::<u64>(), len);
        }
    }
}
