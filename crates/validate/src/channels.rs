//! The channel of each buffer, as `auto`, one number, or a list with an entry for each buffer position.

use std::str::FromStr;

use dmalane_queue::{BadQueueChoice, parse_queues};

/// The channel of each buffer position.
///
/// One entry holds for all positions. A longer list has an entry for each position, two for each thread: with both
/// directions at once, thread `t` reads at position `2t` and writes at position `2t + 1`; with one direction, thread
/// `t` uses position `t`. `None` leaves the choice to the policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Channels(Vec<Option<usize>>);

impl Default for Channels {
    fn default() -> Self {
        Self(vec![None])
    }
}

impl Channels {
    /// The same channel for all positions.
    pub fn only(channel: usize) -> Self {
        Self(vec![Some(channel)])
    }

    /// An entry for each position; `None` for a list without entries.
    pub fn list(entries: Vec<Option<usize>>) -> Option<Self> {
        (!entries.is_empty()).then_some(Self(entries))
    }

    /// The entries: one, or one for each position.
    pub fn entries(&self) -> &[Option<usize>] {
        &self.0
    }

    /// True when each position has an entry of its own.
    pub(crate) fn per_position(&self) -> bool {
        self.0.len() > 1
    }

    /// The channel of a position; `None` where the policy chooses.
    pub(crate) fn at(&self, position: usize) -> Option<usize> {
        match self.0[..] {
            [all] => all,
            ref list => list.get(position).copied().flatten(),
        }
    }
}

impl FromStr for Channels {
    type Err = BadQueueChoice;

    /// `auto` or a channel's number, or several of them with commas between them.
    fn from_str(text: &str) -> Result<Self, BadQueueChoice> {
        parse_queues(text).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_an_entry_for_each_position() {
        assert_eq!("auto".parse(), Ok(Channels::default()));
        let list: Channels = "0,auto".parse().unwrap();
        assert_eq!([0, 1, 2].map(|position| list.at(position)), [Some(0), None, None]);
        assert_eq!([0, 9].map(|position| Channels::only(3).at(position)), [Some(3), Some(3)]);
    }
}
