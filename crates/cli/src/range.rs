//! A range of bytes on the command line: START..END.

use std::fmt;
use std::str::FromStr;

use crate::size::Size;

/// Bytes of a file or of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Range {
    /// The first byte.
    pub start: u64,
    /// The byte after the last; the end of the whole if `None`.
    pub end: Option<u64>,
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (start, end) = text.split_once("..").ok_or("write START..END; either may be left out")?;
        let bound = |text: &str| match text {
            "" => Ok(None),
            text => text.parse::<Size>().map(|size| Some(size.bytes())).map_err(|e| format!("{text}: {e}")),
        };
        match (bound(start)?.unwrap_or(0), bound(end)?) {
            (start, Some(end)) if start == end => Err("it is empty: END is not included".to_owned()),
            (start, Some(end)) if start > end => Err("it ends before it starts".to_owned()),
            (start, end) => Ok(Self { start, end }),
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.end.map_or(String::new(), |end| end.to_string());
        write!(f, "{}..{end}", self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let range = str::parse::<Range>;
        assert_eq!(range("4096..1MiB"), Ok(Range { start: 4096, end: Some(1 << 20) }));
        assert_eq!(range("1GiB.."), Ok(Range { start: 1 << 30, end: None }));
        assert_eq!(range("..9"), Ok(Range { start: 0, end: Some(9) }));
        assert_eq!(range(".."), Ok(Range::default()));
        assert_eq!(range("1KiB..").unwrap().to_string(), "1024..");
        for bad in ["", "5", "5..5", "6..5", "x..", "..16M", "-1.."] {
            assert!(range(bad).is_err(), "{bad}");
        }
        assert!(range("5..5").unwrap_err().contains("empty") && range("6..5").unwrap_err().contains("before"));
    }
}
