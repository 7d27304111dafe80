//! The channel of each buffer, as `auto`, one number, or a list with an entry for each buffer position.

use std::str::FromStr;

use thiserror::Error;

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
    type Err = BadChannels;

    /// `auto` or a channel's number, or several of them with commas between them.
    fn from_str(text: &str) -> Result<Self, BadChannels> {
        let entry = |word: &str| match word.trim() {
            word if word.eq_ignore_ascii_case("auto") => Some(None),
            word if word.starts_with(|c: char| c.is_ascii_digit()) => word.parse().ok().map(Some),
            _ => None,
        };
        let entries: Option<Vec<_>> = text.split(',').map(entry).collect();
        entries.map(Self).ok_or_else(|| BadChannels(text.to_owned()))
    }
}

/// Not a list of channels.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0:?} is neither `auto` nor a channel nor a list of them like 0,1,auto")]
pub struct BadChannels(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_an_entry_for_each_position() {
        let parsed = |text: &str| text.parse::<Channels>().map(|channels| channels.0);
        assert_eq!(parsed("auto"), Ok(vec![None]));
        assert_eq!(parsed("1"), Ok(vec![Some(1)]));
        assert_eq!(parsed("0,1, 0,AUTO"), Ok(vec![Some(0), Some(1), Some(0), None]));
        for bad in ["", "all", "0,", ",0", "-1", "+1", "0;1", "99999999999999999999999"] {
            assert_eq!(parsed(bad), Err(BadChannels(bad.to_owned())), "{bad:?}");
        }
        let list: Channels = "0,auto".parse().unwrap();
        assert_eq!([0, 1, 2].map(|position| list.at(position)), [Some(0), None, None]);
        assert_eq!([0, 9].map(|position| Channels::only(3).at(position)), [Some(3), Some(3)]);
    }
}
