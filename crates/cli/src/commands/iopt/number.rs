//! Addresses and lengths: JSON numbers, or texts that may be hexadecimal.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A whole number up to 64 bits. Written as `"0x1000"`, since not every reader keeps all digits of a number above 2^53;
/// read from that, `"4096"` or `4096`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Number(pub u64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl FromStr for Number {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let (digits, radix) = match text.strip_prefix("0x") {
            Some(digits) => (digits, 16),
            None => (text, 10),
        };
        // from_str_radix would take a sign.
        if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
            return Err("not a number; write for example 0x80000000 or 4096");
        }
        u64::from_str_radix(digits, radix).map(Self).map_err(|_| "more than 64 bits")
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number from 0 to 2^64 - 1, as 4096 or \"0x1000\"")
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Number, E> {
                Ok(Number(value))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Number, E> {
                text.parse().map_err(|_| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }
        d.deserialize_any(Read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_texts() {
        let read = |text: &str| serde_json::from_str::<Number>(text).ok().map(|n| n.0);
        for (text, value) in [
            ("0", 0),
            ("\"0x10\"", 16),
            ("\"16\"", 16),
            ("18446744073709551615", u64::MAX),
            ("\"0xFFFFffffFFFFffff\"", u64::MAX),
        ] {
            assert_eq!(read(text), Some(value), "{text}");
        }
        for text in
            ["-1", "1.5", "1e3", "18446744073709551616", "\"\"", "\"0x\"", "\"+1\"", "\"1a\"", "\"-1\"", "null", "[]"]
        {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(serde_json::to_string(&Number(u64::MAX)).unwrap(), "\"0xffffffffffffffff\"");
    }
}
