//! How a GPU is named.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A GPU, and the library that drives it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuName {
    /// Which GPU.
    pub which: Which,
    /// The library of the driver; `None` for that of [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE), else
    /// [`LIBRARY`](crate::LIBRARY).
    pub library: Option<String>,
}

/// One GPU among several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Which {
    /// In the driver's order.
    Number(u32),
    /// `GPU-` and 32 hexadecimal digits with hyphens, as `nvidia-smi -L` prints it, or the first of them.
    Uuid(String),
}

impl GpuName {
    /// A GPU by number.
    pub const fn number(number: u32) -> Self {
        Self { which: Which::Number(number), library: None }
    }
}

impl FromStr for Which {
    type Err = Error;

    /// Parses a number or a UUID.
    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Name(text.to_owned());
        let digits = |text: &str| text.len() >= 4 && text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        match text.strip_prefix("GPU-") {
            Some(uuid) if digits(uuid) => Ok(Self::Uuid(text.to_ascii_lowercase().replacen("gpu", "GPU", 1))),
            Some(_) => Err(bad()),
            None => text.parse().map(Self::Number).map_err(|_| bad()),
        }
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        assert_eq!("3".parse(), Ok(Which::Number(3)));
        assert_eq!("GPU-2918FC3F-fcbc".parse(), Ok(Which::Uuid("GPU-2918fc3f-fcbc".into())));
        for bad in ["", "x", "-1", "0,", "0,flat", "GPU-", "GPU-12", "GPU-xyzw", "4294967296"] {
            assert_eq!(bad.parse::<Which>(), Err(Error::Name(bad.to_owned())), "{bad}");
        }
    }
}
