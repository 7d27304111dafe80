//! Addresses of PCI functions.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The address of a PCI function, domain, bus, device and function: `0000:01:00.0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text that is not the address of a PCI function.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "{0:?} is not a PCI function: write DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as in 0000:01:00.0 \
     (lspci -D lists them)"
)]
pub struct BadBdf(String);

impl FromStr for Bdf {
    type Err = BadBdf;

    /// Parses an address; the domain is 0 if it is omitted.
    fn from_str(text: &str) -> Result<Self, BadBdf> {
        parse(text).ok_or_else(|| BadBdf(text.chars().take(40).collect()))
    }
}

fn parse(text: &str) -> Option<Bdf> {
    // Check the digits, since from_str_radix accepts a sign.
    let hex = |digits: &str, most: usize| {
        let all = !digits.is_empty() && digits.len() <= most && digits.bytes().all(|b| b.is_ascii_hexdigit());
        all.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    };
    let (rest, function) = text.split_once('.')?;
    let mut fields = rest.rsplit(':');
    let (device, bus, domain) = (fields.next()?, fields.next()?, fields.next().unwrap_or("0"));
    if fields.next().is_some() {
        return None;
    }
    let (device, function) = (hex(device, 2)?, hex(function, 1)?);
    (device < 32 && function < 8).then_some(())?;
    Some(Bdf { domain: hex(domain, 8)?, bus: hex(bus, 2)? as u8, device: device as u8, function: function as u8 })
}

impl fmt::Display for Bdf {
    /// Formats the address as in sysfs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{}", self.domain, self.bus, self.device, self.function)
    }
}

dmalane_dma::debug_as!(Bdf, |it| "{it}");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for (text, name) in
            [("0000:01:00.0", "0000:01:00.0"), ("3a:1f.7", "0000:3a:1f.7"), ("10000:E1:00.0", "10000:e1:00.0")]
        {
            assert_eq!(text.parse::<Bdf>().unwrap().to_string(), name);
        }
        for wrong in
            ["", ".", "1.0", "01:00", "01:20.0", "01:00.8", "0:0:0:0.0", "+1:00.0", "001:00.0", "01:00.00", "../x:00.0"]
        {
            assert!(wrong.parse::<Bdf>().is_err(), "{wrong:?}");
        }
        assert!(BadBdf("x".into()).to_string().contains("0000:01:00.0"));
    }
}
