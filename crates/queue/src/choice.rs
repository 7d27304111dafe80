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
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let queues = text.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
        match queues.map_err(|_| BadQueueChoice(text.to_owned()))?[..] {
            [only] => Ok(Self::Only(only)),
            ref list => Ok(Self::List(list.to_vec())),
        }
    }
}

/// Not a choice of queues.
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
        assert_eq!("1,0".parse(), Ok(QueueChoice::List(vec![1, 0])));
        let lists = ["auto", "1", "1,0"].map(|text| text.parse::<QueueChoice>().unwrap().list().to_vec());
        assert_eq!(lists, [vec![], vec![1], vec![1, 0]]);
        for bad in ["", "all", "0,", "-1", "0;1"] {
            let error = bad.parse::<QueueChoice>().unwrap_err();
            assert_eq!(error, BadQueueChoice(bad.to_owned()), "{error}");
        }
    }
}
