//! Which of a device's queues move its bytes.

use std::str::FromStr;

use thiserror::Error;

/// Which of a device's queues move its bytes: one entry for all of them, or a list. `None` leaves the choice to a
/// policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueChoice(Vec<Option<usize>>);

impl Default for QueueChoice {
    /// All queues, by policy.
    fn default() -> Self {
        Self(vec![None])
    }
}

impl QueueChoice {
    /// This queue alone.
    pub fn only(queue: usize) -> Self {
        Self(vec![Some(queue)])
    }

    /// The entries, at least one.
    pub fn entries(&self) -> &[Option<usize>] {
        &self.0
    }

    /// The queue of a position, for which a list has an entry each; `None` where the policy chooses.
    pub fn at(&self, position: usize) -> Option<usize> {
        match self.0[..] {
            [all] => all,
            ref list => list.get(position).copied().flatten(),
        }
    }
}

impl FromStr for QueueChoice {
    type Err = BadQueueChoice;

    /// `auto` (`None`) or a queue's number, or several of them with commas between them.
    fn from_str(text: &str) -> Result<Self, BadQueueChoice> {
        let entry = |word: &str| match word.trim() {
            word if word.eq_ignore_ascii_case("auto") => Some(None),
            word if word.starts_with(|c: char| c.is_ascii_digit()) => word.parse().ok().map(Some),
            _ => None,
        };
        text.split(',').map(entry).collect::<Option<_>>().map(Self).ok_or_else(|| BadQueueChoice(text.to_owned()))
    }
}

/// Not a list of queues.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0:?} is neither `auto` nor a channel nor a list of channels like 0,1")]
pub struct BadQueueChoice(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_chosen_by_number() {
        assert_eq!("auto".parse(), Ok(QueueChoice::default()));
        assert_eq!("1".parse(), Ok(QueueChoice::only(1)));
        let list: QueueChoice = "0,1, 0,AUTO".parse().unwrap();
        assert_eq!(list.entries(), [Some(0), Some(1), Some(0), None]);
        for bad in ["", "all", "0,", ",0", "-1", "+1", "0;1", "99999999999999999999999"] {
            assert_eq!(bad.parse::<QueueChoice>(), Err(BadQueueChoice(bad.to_owned())));
        }
    }

    #[test]
    fn lists_have_an_entry_for_each_position() {
        let list: QueueChoice = "0,auto".parse().unwrap();
        assert_eq!([0, 1, 2].map(|position| list.at(position)), [Some(0), None, None]);
        assert_eq!([0, 9].map(|position| QueueChoice::only(3).at(position)), [Some(3), Some(3)]);
    }
}
