//! Which of a device's queues move its bytes.

use std::str::FromStr;

use thiserror::Error;

/// Which of a device's queues move its bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum QueueChoice {
    /// All of them, by where the bytes go; also by measured rates where they work at the same time.
    #[default]
    Auto,
    /// This one alone.
    Only(usize),
    /// These alone, by measured rates.
    List(Vec<usize>),
}

impl QueueChoice {
    /// The queues that may be used, an empty list for all of them.
    pub fn list(&self) -> &[usize] {
        match self {
            Self::Auto => &[],
            Self::Only(queue) => std::slice::from_ref(queue),
            Self::List(queues) => queues,
        }
    }
}

impl FromStr for QueueChoice {
    type Err = BadQueueChoice;

    /// `auto`, a queue's number, or several with commas between them.
    fn from_str(text: &str) -> Result<Self, BadQueueChoice> {
        match parse_queues(text)?[..] {
            [None] => Ok(Self::Auto),
            [Some(only)] => Ok(Self::Only(only)),
            ref list => {
                let list: Option<Vec<_>> = list.iter().copied().collect();
                list.map(Self::List).ok_or_else(|| BadQueueChoice(text.to_owned()))
            }
        }
    }
}

/// Reads `auto` (`None`) or a queue's number, or several of them with commas between them: at least one.
///
/// # Errors
/// The text is none of these.
pub fn parse_queues(text: &str) -> Result<Vec<Option<usize>>, BadQueueChoice> {
    let entry = |word: &str| match word.trim() {
        word if word.eq_ignore_ascii_case("auto") => Some(None),
        word if word.starts_with(|c: char| c.is_ascii_digit()) => word.parse().ok().map(Some),
        _ => None,
    };
    text.split(',').map(entry).collect::<Option<Vec<_>>>().ok_or_else(|| BadQueueChoice(text.to_owned()))
}

/// Not a list of queues, or one that mixes queues with `auto` where that has no meaning.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0:?} is neither `auto` nor a channel nor a list of channels like 0,1")]
pub struct BadQueueChoice(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_chosen_by_number() {
        assert_eq!("auto".parse(), Ok(QueueChoice::Auto));
        assert_eq!("1".parse(), Ok(QueueChoice::Only(1)));
        assert_eq!("1, 0".parse(), Ok(QueueChoice::List(vec![1, 0])));
        let lists = ["auto", "1", "1,0"].map(|text| text.parse::<QueueChoice>().unwrap().list().to_vec());
        assert_eq!(lists, [vec![], vec![1], vec![1, 0]]);
        assert_eq!(parse_queues("0,1, 0,AUTO"), Ok(vec![Some(0), Some(1), Some(0), None]));
        for bad in ["", "all", "0,", ",0", "-1", "+1", "0;1", "99999999999999999999999"] {
            let error = bad.parse::<QueueChoice>().unwrap_err();
            assert_eq!((&error, parse_queues(bad)), (&BadQueueChoice(bad.to_owned()), Err(error.clone())), "{error}");
        }
        assert_eq!("0,auto".parse::<QueueChoice>(), Err(BadQueueChoice("0,auto".to_owned())), "one or the other");
    }
}
