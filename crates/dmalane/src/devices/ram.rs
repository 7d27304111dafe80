//! Plain memory of this process.

use std::error::Error;

use dmalane_device::RamDevice;

use super::kind::{OpenResult, Spec};
use super::option::bytes;
use crate::open_options::OpenOptions;

/// Plain memory of a size, `ram:SIZE`.
#[derive(Clone, PartialEq, Debug)]
pub struct RamSpec {
    /// Bytes.
    pub bytes: u64,
}

impl Spec for RamSpec {
    const NAME: &'static str = "ram";
    const SYNTAX: &'static str = "ram:SIZE";
    const ABOUT: &'static str = "plain memory of this process";

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        Ok(Self { bytes: bytes(what)? })
    }

    fn open(&self, _: &OpenOptions) -> OpenResult {
        Ok(Box::new(RamDevice::new(self.bytes)?))
    }
}
