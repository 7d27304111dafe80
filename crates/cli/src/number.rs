//! Numbers on the command line.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Returns a parser of whole numbers in `range`.
pub fn within<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| match (*range.start(), *range.end()) {
            (0, u64::MAX) => "not a whole number".to_owned(),
            (least, u64::MAX) => format!("not a whole number of at least {least}"),
            (least, most) => format!("not a whole number from {least} to {most}"),
        })
    }
}

/// Returns a parser of seconds from `least` to an hour.
pub fn seconds(least: f64) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(seconds) if (least..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("not a number of seconds from {least} to 3600, such as 0.5")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_is_in_the_message() {
        let threads = within::<u8>(1..=64);
        assert_eq!((threads("1"), threads("64")), (Ok(1), Ok(64)));
        for bad in ["", "0", "65", "-1", "1.5", "x", "18446744073709551616"] {
            assert_eq!(threads(bad).unwrap_err(), "not a whole number from 1 to 64", "{bad}");
        }
        assert_eq!(within::<u64>(1..=u64::MAX)("0").unwrap_err(), "not a whole number of at least 1");
        assert_eq!(within::<u64>(0..=u64::MAX)("x").unwrap_err(), "not a whole number");
    }
}
