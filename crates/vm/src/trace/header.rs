//! The first line of a trace.

use std::io::BufRead;
use std::prelude::v1::*;

use dmalane_addr::{CardAddr, DeviceVa, Segment, Span};
use dmalane_iopt::{FormatId, HeapTables};
use serde::{Deserialize, Serialize};

use super::number::Number;
use super::plain::plain_json;
use super::{Line, Lines, TraceError, VERSION};
use crate::{AnyVm, any_vm};

/// Value of the field `trace` of the first line.
pub const FORMAT: &str = "dmalane-vm";

/// Memory for the page tables of a VM that is replayed into. A trace that needs more is refused.
const TABLE_BYTES: u64 = 256 << 20;

/// The first line of a trace: which VM it was recorded from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TraceHeader {
    /// The name of the page-table format, if it matters.
    pub format: Option<String>,
    /// Address range of the VM; by default the whole input range of the format.
    pub range: Option<Span<DeviceVa>>,
    /// The part of it that is reserved for the driver.
    pub reserved: Option<Span<DeviceVa>>,
    /// The page that null ranges map; without it there can be no null range.
    pub null_page: Option<Segment<CardAddr>>,
    /// True for changes by break-before-make ([`Vm::break_before_make`](crate::Vm::break_before_make)).
    pub break_before_make: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    trace: String,
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    range: Option<RawSpan>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reserved: Option<RawSpan>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    null_page: Option<RawSegment>,
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    break_before_make: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSpan {
    va: Number,
    len: Number,
}

impl RawSpan {
    fn of(span: Span<DeviceVa>) -> Self {
        Self { va: Number(span.first().bits()), len: Number(span.len()) }
    }

    fn span(self) -> Result<Span<DeviceVa>, TraceError> {
        let Self { va: Number(va), len: Number(len) } = self;
        Span::new(DeviceVa::new(va), len).ok_or(TraceError::Range { va, len })
    }
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawSegment {
    pa: Number,
    len: Number,
}

impl RawSegment {
    pub(super) fn of(segment: &Segment<CardAddr>) -> Self {
        Self { pa: Number(segment.addr.bits()), len: Number(segment.len) }
    }

    pub(super) fn segment(self) -> Segment<CardAddr> {
        Segment { addr: CardAddr::new(self.pa.0), len: self.len.0 }
    }
}

impl TraceHeader {
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
        let no_header = |e: serde_json::Error| TraceError::NoHeader(plain_json(&e, "operation"));
        let Version { trace, version } = serde_json::from_slice(bytes).map_err(no_header)?;
        if trace != FORMAT {
            return Err(TraceError::NoHeader(format!("it is a trace of {trace:?}, not of {FORMAT:?}")));
        }
        if version != VERSION {
            return Err(TraceError::Version(version));
        }
        let Raw { format, range, reserved, null_page, break_before_make, .. } =
            serde_json::from_slice(bytes).map_err(no_header)?;
        Ok(Self {
            format,
            range: range.map(RawSpan::span).transpose()?,
            reserved: reserved.map(RawSpan::span).transpose()?,
            null_page: null_page.map(RawSegment::segment),
            break_before_make,
        })
    }

    /// The line, without its end.
    pub(crate) fn line(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(&Raw {
            trace: FORMAT.to_owned(),
            version: VERSION,
            format: self.format.clone(),
            range: self.range.map(RawSpan::of),
            reserved: self.reserved.map(RawSpan::of),
            null_page: self.null_page.as_ref().map(RawSegment::of),
            break_before_make: self.break_before_make,
        })
    }

    /// An empty VM of a format with the range of the header. Its tables take at most 256 MiB.
    ///
    /// # Errors
    /// [`TraceError::Vm`] when the range, the reserved part or the null page does not fit the format.
    pub fn vm(&self, format: FormatId) -> Result<Box<dyn AnyVm + Send>, TraceError> {
        let whole = Span::new(DeviceVa::new(0), 1 << format.input_bits()).expect("at most 63 bits");
        let limit = TABLE_BYTES / format.table_shape().table.bytes();
        let tables = HeapTables::with_limit(CardAddr::new(0), limit as usize);
        let mut vm = any_vm(format, self.range.unwrap_or(whole), self.reserved, tables)?;
        if let Some(page) = self.null_page {
            vm.set_null_page(page.addr, page.len)?;
        }
        if self.break_before_make {
            vm.break_before_make(Some(Box::new(|_| ()))); // no device remembers anything
        }
        Ok(vm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for header in [
            TraceHeader::default(),
            TraceHeader {
                format: Some("agx-uat".to_owned()),
                range: Span::new(DeviceVa::new(1 << 63), 1 << 63),
                reserved: Span::new(DeviceVa::new(3), 4),
                null_page: Some(Segment { addr: CardAddr::new(1 << 32), len: 1 << 14 }),
                break_before_make: true,
            },
        ] {
            assert_eq!(TraceHeader::parse(header.line().unwrap().as_bytes()).unwrap(), header);
        }
    }

    #[test]
    fn what_is_no_header() {
        for (line, says) in [
            ("", "ends too early"),
            ("{}", "there is no field \"trace\""),
            ("[1]", "not the first line"),
            (r#"{"trace":"x","version":1}"#, "a trace of \"x\""),
            (r#"{"trace":"dmalane-vm","version":2,"more":1}"#, "version 2; only 1"),
            (r#"{"trace":"dmalane-vm","version":1,"more":1}"#, "unknown field \"more\""),
            (r#"{"trace":"dmalane-vm","version":1,"range":{"va":1}}"#, "there is no field \"len\""),
            (r#"{"trace":"dmalane-vm","version":1,"range":{"va":1,"len":0}}"#, "cannot be"),
            (r#"{"trace":"dmalane-vm","version":1,"reserved":{"va":2,"len":"0xffffffffffffffff"}}"#, "cannot be"),
        ] {
            let error = TraceHeader::parse(line.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn a_vm_as_the_header_says() {
        let span = |va, len| Span::new(DeviceVa::new(va), len);
        let page = |len| Some(Segment { addr: CardAddr::new(1 << 32), len });
        let header = |range, reserved, null_page| TraceHeader { range, reserved, null_page, ..TraceHeader::default() };
        let vm = |h: TraceHeader| h.vm(FormatId::agx_uat).map(|vm| vm.range());
        assert_eq!(vm(TraceHeader::default()).unwrap(), span(0, 1 << 39).unwrap());
        let good = header(span(1 << 20, 1 << 30), span(1 << 20, 1 << 14), page(1 << 14));
        assert_eq!(vm(good.clone()).unwrap(), span(1 << 20, 1 << 30).unwrap());
        for bad in [
            TraceHeader { range: span(1 << 20, 4096), ..good.clone() },
            TraceHeader { range: span(0, 1 << 40), ..good.clone() },
            TraceHeader { reserved: span(0, 1 << 14), ..good.clone() },
            TraceHeader { null_page: page(4096), ..good.clone() },
            TraceHeader { null_page: page(0), ..good },
        ] {
            assert!(matches!(vm(bad.clone()), Err(TraceError::Vm(_))), "{bad:?}");
        }
    }
}
