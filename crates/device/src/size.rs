//! Sizes and rates as people write them: GB is 10^9 bytes, GiB is 2^30.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

const DECIMAL: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
const BINARY: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A number of bytes, read from `16MiB`, `90MB`, `1.5GiB` or `4096`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size(u64);

impl Size {
    /// This number of bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `n` GiB.
    pub const fn gib(n: u32) -> Self {
        Self((n as u64) << 30)
    }

    /// `n` KiB.
    pub const fn kib(n: u32) -> Self {
        Self((n as u64) << 10)
    }

    /// In bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// Why a text is not a size. The text itself is not repeated: clap quotes it.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0}")]
pub struct SizeError(String);

fn refused<T>(why: impl Into<String>) -> Result<T, SizeError> {
    Err(SizeError(why.into()))
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        if text.starts_with('-') && text[1..].starts_with(|c: char| c.is_ascii_digit()) {
            return refused("a size cannot be negative");
        }
        let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let (whole, parts) = match number.split_once('.') {
            Some((whole, parts)) => (whole, Some(parts)),
            None => (number, None),
        };
        if whole.is_empty() || parts.is_some_and(|p| p.is_empty() || p.contains('.')) {
            return refused("not a size; write for example 16MiB, 1.5GiB, 90MB or 4096");
        }
        let unit = unit_bytes(unit.trim_start())?;
        // Only digits are left, so this can fail in one way.
        let bytes = whole.parse().ok().and_then(|whole: u128| whole.checked_mul(unit));
        let mut bytes = bytes.unwrap_or(u128::MAX);
        if let Some(parts) = parts {
            if unit == 1 {
                return refused("a byte has no parts; give a unit such as MiB or a whole number");
            }
            // Digits beyond the 18th are worth less than a byte of the largest unit, and would overflow the product.
            let parts = &parts[..parts.len().min(18)];
            let numerator: u128 = parts.parse().unwrap_or(0);
            bytes = bytes.saturating_add(numerator * unit / 10u128.pow(parts.len() as u32));
        }
        let size = u64::try_from(bytes).map(Self);
        size.or_else(|_| refused("too large: a size is at most 2^64 - 1 bytes"))
    }
}

/// Reads a size that must not be 0.
pub fn nonzero(text: &str) -> Result<Size, SizeError> {
    match text.parse()? {
        Size(0) => refused("the size must be at least 1 byte"),
        size => Ok(size),
    }
}

/// A parser of sizes from `least` to `most`.
pub fn between(least: Size, most: Size) -> impl Fn(&str) -> Result<Size, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse::<Size>() {
        Ok(size) if (least.0..=most.0).contains(&size.0) => Ok(size),
        Ok(_) => Err(format!("not from {least} to {most}")),
        Err(e) => Err(e.to_string()),
    }
}

/// A parser of seconds from `least` to an hour.
pub fn seconds(least: f64) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(seconds) if (least..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("not a number of seconds from {least} to 3600, such as 0.5")),
    }
}

/// Upper case as printed, or all lower case: `Gb`, a gigabit, is neither.
fn unit_bytes(unit: &str) -> Result<u128, SizeError> {
    if unit.is_empty() {
        return Ok(1);
    }
    for (base, names) in [(1000u128, DECIMAL), (1024, BINARY)] {
        for (power, name) in names.iter().enumerate() {
            if unit == *name || unit == name.to_ascii_lowercase() || unit == name.to_ascii_uppercase() && base == 1000 {
                return Ok(base.pow(power as u32));
            }
        }
    }
    let mut letters = unit.chars();
    match (letters.next(), letters.next()) {
        (Some(prefix), None) if "kmgtpeKMGTPE".contains(prefix) => {
            let upper = prefix.to_ascii_uppercase();
            refused(format!("{prefix} could mean {upper}B (a power of 10) or {upper}iB (a power of 2); say which"))
        }
        _ => refused(format!(
            "no such unit: {unit}; use kB, MB, GB, TB (powers of 10), KiB, MiB, GiB, TiB (powers of 2) or none for \
             bytes"
        )),
    }
}

/// Exact, as it may be typed again; with `#`, for sentences: `16 MiB`.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let power = if self.0 == 0 { 0 } else { (self.0.trailing_zeros() / 10).min(6) };
        let value = self.0 >> (power * 10);
        match (f.alternate(), power) {
            (true, _) => write!(f, "{value} {}", BINARY[power as usize]),
            (false, 0) => write!(f, "{value}"),
            (false, _) => write!(f, "{value}{}", BINARY[power as usize]),
        }
    }
}

/// `bytes` in `time` as GB/s, below 0.1 GB/s as MB/s.
pub fn rate(bytes: u64, time: Duration) -> String {
    let rate = bytes as f64 / time.as_secs_f64();
    match time.is_zero() {
        true => "-".to_owned(),
        false if rate < 1e8 => format!("{} MB/s", giga(rate * 1e3)),
        false => per_second(rate),
    }
}

/// Bytes per second as GB/s.
pub fn per_second(rate: f64) -> String {
    format!("{} GB/s", giga(rate))
}

/// `value` in units of 10^9, to three digits: `1.75`, `0.0123`. Nine digits after the point at most.
pub fn giga(value: f64) -> String {
    let giga = value / 1e9;
    let before = if giga > 0.0 { giga.log10().floor() as i32 } else { 0 };
    format!("{giga:.*}", (2 - before).clamp(0, 9) as usize)
}

/// `time` in seconds, below 10 ms in milliseconds.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 0.01 { format!("{:.2} ms", seconds * 1e3) } else { format!("{seconds:.3} s") }
}

/// `bytes` to three digits in powers of 2: `16 MiB`.
pub fn binary(bytes: u64) -> String {
    rounded(bytes, f64::round)
}

/// As [`binary`], rounded up: for needs, so that one that exceeds what there is never looks equal to it.
pub fn binary_up(bytes: u64) -> String {
    rounded(bytes, f64::ceil)
}

fn rounded(bytes: u64, round: fn(f64) -> f64) -> String {
    let (mut power, mut unit) = (0, 1u64);
    // A value that would round up to a whole next unit is shown in that unit: 1 MiB, never 1024 KiB.
    while power < 6 && bytes as f64 / unit as f64 >= 1023.5 {
        power += 1;
        unit *= 1024;
    }
    let value = bytes as f64 / unit as f64;
    let digits = match value {
        _ if bytes.is_multiple_of(unit) => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    let scale = 10f64.powi(digits as i32);
    format!("{:.digits$} {}", round(value * scale) / scale, BINARY[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<u64, SizeError> {
        text.parse().map(Size::bytes)
    }

    #[test]
    fn powers_of_ten_are_not_powers_of_two() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("16MiB", 16 << 20),
            (" 16 MiB ", 16 << 20),
            ("16mib", 16 << 20),
            ("1GiB", 1 << 30),
            ("1GB", 1_000_000_000),
            ("90MB", 90_000_000),
            ("90mb", 90_000_000),
            ("5kB", 5000),
            ("5KB", 5000),
            ("5KiB", 5120),
            ("1.5GiB", 3 << 29),
            ("90.9MB", 90_900_000),
            ("0.1KiB", 102),
            ("007MB", 7_000_000),
            ("1.00000000000000000000000000000000000000000000000001GiB", 1 << 30),
            ("15EiB", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_its_own_reason() {
        for (text, why) in [
            ("", "not a size;"),
            ("MiB", "not a size;"),
            ("abc", "not a size;"),
            (".5GiB", "not a size;"),
            ("5.GiB", "not a size;"),
            ("1.2.3MB", "not a size;"),
            ("+5", "not a size;"),
            ("--json", "not a size;"),
            ("\u{663}MB", "not a size;"),
            ("-5MiB", "cannot be negative"),
            ("-1", "cannot be negative"),
            ("4096.5", "has no parts"),
            ("1.0B", "has no parts"),
            ("1e9", "no such unit: e9;"),
            ("0x1000", "no such unit: x1000;"),
            ("1 000", "no such unit: 000;"),
            ("1,5GB", "no such unit: ,5GB;"),
            ("1Gb", "no such unit: Gb;"),
            ("1Gib", "no such unit: Gib;"),
            ("1XB", "no such unit: XB;"),
            ("1\u{e9}", "no such unit: \u{e9};"),
            ("16M", "M could mean MB"),
            ("16g", "g could mean GB"),
            ("16EiB", "too large"),
            ("18446744073709551616", "too large"),
            ("99999999999999999999999999999999999999EiB", "too large"),
            ("999999999999999999999999999999999999999999999999", "too large"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(nonzero("0MiB").unwrap_err().to_string().contains("at least 1 byte"));
        assert_eq!(nonzero("1"), Ok(Size(1)));
    }

    #[test]
    fn what_is_printed_can_be_typed_again() {
        for bytes in [0, 1, 1023, 1024, 1025, 3 << 29, 16 << 20, 64 << 30, 15 << 60, u64::MAX] {
            let text = Size(bytes).to_string();
            assert_eq!(parse(&text), Ok(bytes), "{text}");
        }
        assert_eq!(Size::gib(64).to_string(), "64GiB");
        assert_eq!(Size(4097).to_string(), "4097");
        assert_eq!([4097, 132 << 10].map(|bytes| format!("{:#}", Size(bytes))), ["4097 B", "132 KiB"]);
    }

    #[test]
    fn three_digits_and_the_unit_that_was_meant() {
        for (bytes, text) in [
            (0, "0 B"),
            (1000, "1000 B"),
            (1024, "1 KiB"),
            (16 << 20, "16 MiB"),
            (90_868_376, "86.7 MiB"),
            (999_999, "977 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (9_999_999, "9.54 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(binary(bytes), text);
        }
        let up = [7, 1024, 1025, 8_400_896, 1 << 20, (1 << 20) - 1, 3 << 29, 1 << 40].map(binary_up);
        assert_eq!(up, ["7 B", "1 KiB", "1.01 KiB", "8.02 MiB", "1 MiB", "1.00 MiB", "1.50 GiB", "1 TiB"]);
        assert_eq!(rate(2_430_000_000, Duration::from_secs(1)), "2.43 GB/s");
        assert_eq!(rate(10_000_000, Duration::from_secs(1)), "10.0 MB/s");
        assert_eq!(rate(1 << 20, Duration::from_secs(1)), "1.05 MB/s");
        assert_eq!(rate(1, Duration::from_secs(1)), "0.00000100 MB/s");
        assert_eq!([0.0, 12.34e9, 123.4e9, 1234e9].map(giga), ["0.00", "12.3", "123", "1234"]);
        assert_eq!(rate(1, Duration::ZERO), "-");
        assert_eq!(duration(Duration::from_micros(9990)), "9.99 ms");
        assert_eq!(duration(Duration::from_micros(10_400)), "0.010 s");
    }
}
