//! The capabilities that one side announces to the other with its version.

use serde_json::Value;

use crate::ProtocolError;
use crate::wire::MAX_DATA;

/// The capabilities of a version message, JSON that may end with a zero.
pub(crate) struct Announced(Value);

impl Announced {
    pub(crate) fn parse(text: &[u8]) -> Result<Self, ProtocolError> {
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        match text {
            [] => Ok(Self(Value::Null)),
            _ => serde_json::from_slice(text).map(Self).map_err(|_| ProtocolError::Capability("version data")),
        }
    }

    /// A number that must not be less than `least`; `absent` where there is none.
    pub(crate) fn number(&self, name: &'static str, absent: u64, least: u64) -> Result<u64, ProtocolError> {
        match &self.0["capabilities"][name] {
            Value::Null => Ok(absent),
            value => value.as_u64().filter(|limit| *limit >= least).ok_or(ProtocolError::Capability(name)),
        }
    }

    /// Bytes of a region or of memory in a message to the other side: words of 64 bits stay whole.
    pub(crate) fn max_data(&self) -> Result<usize, ProtocolError> {
        Ok(self.number("max_data_xfer_size", 1 << 20, 8)?.min(MAX_DATA as u64) as usize & !7)
    }
}
