//! A list of buffer sizes as `first,last,MUL|ADD`.

use std::str::FromStr;

use thiserror::Error;

/// How one size leads to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Times this, 2 or more.
    Mul(u64),
    /// Plus this many bytes, 1 or more.
    Add(u64),
}

/// Sizes from one to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sweep {
    first: u64,
    last: u64,
    step: Step,
}

/// Sizes that are measured in one run, at most.
const MOST: usize = 1000;

/// Why a sweep is none.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BadSweep {
    /// The words are not three.
    #[error("a sweep is FIRST,LAST,MUL or FIRST,LAST,ADD, for example 4KiB,64MiB,MUL")]
    Words,
    /// A size that is none.
    #[error("{0}")]
    Size(String),
    /// Neither MUL nor ADD.
    #[error("{0:?} is neither MUL (times 2), MUL4 (times 4), ADD (plus FIRST) nor ADD1MiB (plus 1 MiB)")]
    Step(String),
    /// It would go on for ever.
    #[error("the sweep never ends: {0}")]
    Endless(&'static str),
    /// The last comes before the first.
    #[error("the sweep ends before it begins")]
    Backwards,
    /// More than 1000 sizes.
    #[error("the sweep has more than {MOST} sizes")]
    TooMany,
}

impl Sweep {
    /// From `first` to `last`, both included when the steps hit it.
    ///
    /// # Errors
    /// [`BadSweep`] when it would not end, or not soon.
    pub fn new(first: u64, last: u64, step: Step) -> Result<Self, BadSweep> {
        match step {
            _ if first == 0 => return Err(BadSweep::Endless("it begins with 0")),
            Step::Mul(0 | 1) => return Err(BadSweep::Endless("each size is the one before times 0 or 1")),
            Step::Add(0) => return Err(BadSweep::Endless("each size is the one before plus 0")),
            _ if last < first => return Err(BadSweep::Backwards),
            _ => {}
        }
        let this = Self { first, last, step };
        if this.iter().take(MOST + 1).count() > MOST { Err(BadSweep::TooMany) } else { Ok(this) }
    }

    /// Reads `first,last,step`; `size` reads one size.
    ///
    /// # Errors
    /// [`BadSweep`].
    pub fn parse(text: &str, size: impl Fn(&str) -> Result<u64, String>) -> Result<Self, BadSweep> {
        let [first, last, step] = text.split(',').map(str::trim).collect::<Vec<_>>()[..] else {
            return Err(BadSweep::Words);
        };
        let size = |text: &str| size(text).map_err(|e| BadSweep::Size(format!("{text}: {e}")));
        let (first, last) = (size(first)?, size(last)?);
        let bad = || BadSweep::Step(step.to_owned());
        let step = match (step.strip_prefix("MUL"), step.strip_prefix("ADD")) {
            (Some(""), _) => Step::Mul(2),
            (Some(n), _) => Step::Mul(n.parse().map_err(|_| bad())?),
            (_, Some("")) => Step::Add(first),
            (_, Some(n)) => Step::Add(size(n)?),
            _ => return Err(bad()),
        };
        Self::new(first, last, step)
    }

    /// The sizes.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let next = |now: &u64| match self.step {
            Step::Mul(n) => now.checked_mul(n),
            Step::Add(n) => now.checked_add(n),
        };
        std::iter::successors(Some(self.first), next).take_while(|n| *n <= self.last)
    }
}

impl FromStr for Sweep {
    type Err = BadSweep;

    /// With sizes in bytes.
    fn from_str(text: &str) -> Result<Self, BadSweep> {
        Self::parse(text, |n| n.parse().map_err(|_| "not a number of bytes".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_listed() {
        let list = |text: &str| text.parse::<Sweep>().map(|s| s.iter().collect::<Vec<_>>());
        assert_eq!(list("4096,32768,MUL"), Ok(vec![4096, 8192, 16384, 32768]));
        assert_eq!(list("4096,30000,MUL"), Ok(vec![4096, 8192, 16384]));
        assert_eq!(list("4096,70000,MUL4"), Ok(vec![4096, 16384, 65536]));
        assert_eq!(list("4096,16384,ADD"), Ok(vec![4096, 8192, 12288, 16384]));
        assert_eq!(list("1,10,ADD4"), Ok(vec![1, 5, 9]));
        assert_eq!(list("7,7,MUL"), Ok(vec![7]));
        assert_eq!(list("9223372036854775808,18446744073709551615,MUL").unwrap().len(), 1, "up to the top");
    }

    #[test]
    fn what_never_ends_is_refused() {
        let error = |text: &str| text.parse::<Sweep>().unwrap_err();
        for text in ["0,10,MUL", "0,10,ADD4", "1,10,MUL1", "1,10,MUL0", "1,10,ADD0"] {
            assert!(matches!(error(text), BadSweep::Endless(_)), "{text}");
        }
        assert_eq!(error("10,1,MUL"), BadSweep::Backwards);
        assert_eq!(error("1,1000000,ADD"), BadSweep::TooMany);
        for text in ["", "1,2", "1,2,MUL,3"] {
            assert_eq!(error(text), BadSweep::Words, "{text}");
        }
        for text in ["1,2,TIMES", "1,2,MULx", "1,2,mul", "1,2,"] {
            assert!(matches!(error(text), BadSweep::Step(_)), "{text}");
        }
        assert!(matches!(error("1,x,MUL"), BadSweep::Size(_)) && matches!(error("1,9,ADDx"), BadSweep::Size(_)));
    }
}
