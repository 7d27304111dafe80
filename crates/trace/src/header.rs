//! The first line of a trace.

use std::io::BufRead;

use dmalane_addr::{CardAddr, DeviceVa, Span};
use dmalane_iopt::{Format, HeapTables, TableShape};
use dmalane_vm::{AnyVm, Vm};
use serde::{Deserialize, Serialize};

use crate::number::Number;
use crate::{Line, Lines, TraceError};

/// What the field `trace` of the first line says.
pub const FORMAT: &str = "dmalane-vm";
/// The version that is written, and the only one that is read.
pub const VERSION: u64 = 1;

/// Memory for the page tables of a VM that is replayed into. What needs more is refused.
const TABLE_BYTES: u64 = 256 << 20;

/// The first line of a trace: which VM it was recorded from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// The name of the page-table format, if it matters.
    pub format: Option<String>,
    /// What the VM covers; the whole input range of the format if it does not say.
    pub range: Option<Span<DeviceVa>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    trace: String,
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    va: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    len: Option<Number>,
}

impl Header {
    /// Reads the first line.
    ///
    /// # Errors
    /// [`TraceError`] when it is not that of a trace, or has another version.
    pub fn read<R: BufRead>(lines: &mut Lines<R>) -> Result<Self, TraceError> {
        match lines.next()? {
            None => Err(TraceError::NoHeader("the file is empty".to_owned())),
            Some(Line::TooLong) => Err(TraceError::NoHeader("it is far too long".to_owned())),
            Some(Line::Bytes(bytes)) => Self::parse(bytes),
        }
    }

    fn parse(bytes: &[u8]) -> Result<Self, TraceError> {
        // The version before the fields, which may be others in another version.
        #[derive(Deserialize)]
        struct Version {
            trace: String,
            version: u64,
        }
        let no_header = |e: serde_json::Error| TraceError::NoHeader(e.to_string());
        let Version { trace, version } = serde_json::from_slice(bytes).map_err(no_header)?;
        if trace != FORMAT {
            return Err(TraceError::NoHeader(format!("it is a trace of {trace:?}, not of {FORMAT:?}")));
        }
        if version != VERSION {
            return Err(TraceError::Version(version));
        }
        let Raw { format, va, len, .. } = serde_json::from_slice(bytes).map_err(no_header)?;
        let range = match (va, len) {
            (None, None) => None,
            (Some(Number(va)), Some(Number(len))) => {
                Some(Span::new(DeviceVa::new(va), len).ok_or(TraceError::Range { va, len })?)
            }
            _ => return Err(TraceError::NoHeader("va and len go together".to_owned())),
        };
        Ok(Self { format, range })
    }

    /// The line, without its end.
    pub(crate) fn line(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(&Raw {
            trace: FORMAT.to_owned(),
            version: VERSION,
            format: self.format.clone(),
            va: self.range.map(|r| Number(r.first().bits())),
            len: self.range.map(|r| Number(r.len())),
        })
    }

    /// An empty VM of format `F` with the range of the header. Its tables take at most 256 MiB.
    ///
    /// # Errors
    /// [`TraceError::Vm`] when the range does not fit the format.
    pub fn vm<F: Format>(&self) -> Result<Box<dyn AnyVm + Send>, TraceError> {
        let whole = Span::new(DeviceVa::new(0), 1 << F::INPUT_BITS).expect("at most 63 bits");
        let limit = TABLE_BYTES / TableShape::of::<F>().table.bytes();
        let tables = HeapTables::<CardAddr>::with_limit(CardAddr::new(0), limit as usize);
        Ok(Box::new(Vm::<F, _>::new(self.range.unwrap_or(whole), tables)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for header in [
            Header::default(),
            Header { format: Some("agx-uat".to_owned()), range: Span::new(DeviceVa::new(1 << 63), 1 << 63) },
        ] {
            assert_eq!(Header::parse(header.line().unwrap().as_bytes()).unwrap(), header);
        }
    }

    #[test]
    fn what_is_no_header() {
        for (line, says) in [
            ("", "EOF"),
            ("{}", "missing field `trace`"),
            ("[1]", "not the first line"),
            (r#"{"trace":"x","version":1}"#, "a trace of \"x\""),
            (r#"{"trace":"dmalane-vm","version":2,"more":1}"#, "version 2; only 1"),
            (r#"{"trace":"dmalane-vm","version":1,"more":1}"#, "unknown field `more`"),
            (r#"{"trace":"dmalane-vm","version":1,"va":1}"#, "go together"),
            (r#"{"trace":"dmalane-vm","version":1,"va":1,"len":0}"#, "cannot be"),
            (r#"{"trace":"dmalane-vm","version":1,"va":2,"len":"0xffffffffffffffff"}"#, "cannot be"),
        ] {
            let error = Header::parse(line.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
