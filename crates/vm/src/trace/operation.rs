//! One line of a trace as an operation.

use std::fmt;
use std::prelude::v1::*;

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment};
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::header::RawSegment;
use super::number::{Number, decimal};
use super::plain::plain_json;
use super::{Line, MAX_BATCH, TraceRefusal};

/// The operation of a line. Buffer objects are named by their ids; nothing has been looked up or checked against a VM.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum TraceOperation {
    /// Makes a buffer object, or goes on making it.
    Bo {
        /// Its id.
        id: u64,
        /// Where its bytes are; they follow those of earlier lines.
        segments: Vec<Segment<CardAddr>>,
        /// True when the next line goes on with it.
        more: bool,
    },
    /// Gives a buffer object up; it lives on where it is bound.
    Destroy {
        /// Its id.
        id: u64,
    },
    /// Binds a part of a buffer object.
    Bind {
        /// Where.
        va: DeviceVa,
        /// The buffer's id.
        bo: u64,
        /// The first byte of it.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Rights of the device.
        access: Access,
    },
    /// Binds some bytes of a buffer object again and again.
    Repeat {
        /// Where.
        va: DeviceVa,
        /// The buffer's id.
        bo: u64,
        /// The first byte of those that repeat.
        offset: u64,
        /// Bytes that repeat.
        page: u64,
        /// Bytes.
        len: u64,
        /// Rights of the device.
        access: Access,
    },
    /// Makes a range read as zeroes.
    Null {
        /// Where.
        va: DeviceVa,
        /// Bytes.
        len: u64,
    },
    /// Removes what is bound in a range.
    Unbind {
        /// Where.
        va: DeviceVa,
        /// Bytes.
        len: u64,
    },
    /// Removes every binding of a buffer object.
    UnbindBo {
        /// The buffer's id.
        bo: u64,
    },
    /// A hint that a range will be used.
    Prefetch {
        /// Where.
        va: DeviceVa,
        /// Bytes.
        len: u64,
    },
    /// Makes larger leaves where what is bound continues.
    Merge {
        /// Where.
        va: DeviceVa,
        /// Bytes.
        len: u64,
    },
    /// Several of these, applied whole or not at all.
    Batch(Vec<TraceOperation>),
    /// The same for the driver itself, in the reserved part.
    Reserved(Vec<TraceOperation>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Op {
    #[default]
    Bo,
    Destroy,
    Bind,
    Repeat,
    Null,
    Unbind,
    UnbindBo,
    Prefetch,
    Merge,
    Batch,
    Reserved,
}

/// The fields of all operations. One flat struct, because serde would hold a tagged enum twice in memory.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    op: Op,
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "decimal")]
    id: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    va: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "decimal")]
    bo: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offset: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    page: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    len: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    access: Option<Letters>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    segments: Option<Vec<RawSegment>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    more: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ops: Option<Ops>,
}

/// The operations of a batch: of one that is too long only their number.
struct Ops {
    list: Vec<Fields>,
    count: usize,
}

impl Serialize for Ops {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.list.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Ops {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Ops;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of operations")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ops, A::Error> {
                let mut ops = Ops { list: Vec::new(), count: 0 };
                while ops.count < MAX_BATCH {
                    let Some(fields) = seq.next_element()? else { return Ok(ops) };
                    ops.list.push(fields);
                    ops.count += 1;
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    ops.count += 1;
                }
                Ok(ops)
            }
        }
        d.deserialize_seq(Read)
    }
}

#[derive(Clone, Copy)]
struct Letters(Access);

impl Serialize for Letters {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Letters {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map(Self).map_err(|why| serde::de::Error::custom(format_args!("{text:?}: {why}")))
    }
}

impl Fields {
    /// The names of the fields that are there.
    fn present(&self) -> impl Iterator<Item = &'static str> {
        let all = [
            ("id", self.id.is_some()),
            ("va", self.va.is_some()),
            ("bo", self.bo.is_some()),
            ("offset", self.offset.is_some()),
            ("page", self.page.is_some()),
            ("len", self.len.is_some()),
            ("access", self.access.is_some()),
            ("segments", self.segments.is_some()),
            ("more", self.more.is_some()),
            ("ops", self.ops.is_some()),
        ];
        all.into_iter().filter_map(|(name, there)| there.then_some(name))
    }

    fn operation(self, in_batch: bool) -> Result<TraceOperation, (Option<usize>, TraceRefusal)> {
        let op = self.op.name();
        let here = |refusal| (None, refusal);
        if in_batch && matches!(self.op, Op::Bo | Op::Destroy | Op::Merge | Op::Batch | Op::Reserved) {
            return Err(here(TraceRefusal::NotInBatch { op }));
        }
        if let Some(field) = self.present().find(|field| !self.op.fields().contains(field)) {
            return Err(here(TraceRefusal::UnexpectedField { op, field }));
        }
        let need = |value: Option<Number>, field| match value {
            Some(Number(value)) => Ok(value),
            None => Err(here(TraceRefusal::MissingField { op, field })),
        };
        let missing = |field| here(TraceRefusal::MissingField { op, field });
        let va = || need(self.va, "va").map(DeviceVa::new);
        Ok(match self.op {
            Op::Bo => {
                let id = need(self.id, "id")?;
                let raw = self.segments.ok_or(missing("segments"))?;
                let segments = raw.into_iter().map(RawSegment::segment).collect();
                TraceOperation::Bo { id, segments, more: self.more.unwrap_or(false) }
            }
            Op::Destroy => TraceOperation::Destroy { id: need(self.id, "id")? },
            Op::Bind => TraceOperation::Bind {
                va: va()?,
                bo: need(self.bo, "bo")?,
                offset: self.offset.map_or(0, |n| n.0),
                len: need(self.len, "len")?,
                access: self.access.ok_or(missing("access"))?.0,
            },
            Op::Repeat => TraceOperation::Repeat {
                va: va()?,
                bo: need(self.bo, "bo")?,
                offset: self.offset.map_or(0, |n| n.0),
                page: need(self.page, "page")?,
                len: need(self.len, "len")?,
                access: self.access.ok_or(missing("access"))?.0,
            },
            Op::Null => TraceOperation::Null { va: va()?, len: need(self.len, "len")? },
            Op::Unbind => TraceOperation::Unbind { va: va()?, len: need(self.len, "len")? },
            Op::UnbindBo => TraceOperation::UnbindBo { bo: need(self.bo, "bo")? },
            Op::Prefetch => TraceOperation::Prefetch { va: va()?, len: need(self.len, "len")? },
            Op::Merge => TraceOperation::Merge { va: va()?, len: need(self.len, "len")? },
            Op::Batch | Op::Reserved => {
                let ops = self.ops.ok_or(missing("ops"))?;
                if ops.count > MAX_BATCH {
                    return Err(here(TraceRefusal::BatchTooLong { count: ops.count }));
                }
                let each = ops.list.into_iter().enumerate();
                let each = each.map(|(i, f)| f.operation(true).map_err(|(_, refusal)| (Some(i), refusal)));
                let each = each.collect::<Result<_, _>>()?;
                if self.op == Op::Batch { TraceOperation::Batch(each) } else { TraceOperation::Reserved(each) }
            }
        })
    }

    fn of(operation: &TraceOperation) -> Self {
        let number = |n: u64| Some(Number(n));
        let mut fields = Self { op: operation.op(), ..Self::default() };
        match operation {
            TraceOperation::Bo { id, segments, more } => {
                fields.id = number(*id);
                fields.segments = Some(segments.iter().map(RawSegment::of).collect());
                fields.more = more.then_some(true);
            }
            TraceOperation::Destroy { id } => fields.id = number(*id),
            TraceOperation::Bind { va, bo, offset, len, access } => {
                fields.va = number(va.bits());
                fields.bo = number(*bo);
                fields.offset = number(*offset);
                fields.len = number(*len);
                fields.access = Some(Letters(*access));
            }
            TraceOperation::Repeat { va, bo, offset, page, len, access } => {
                fields.va = number(va.bits());
                fields.bo = number(*bo);
                fields.offset = number(*offset);
                fields.page = number(*page);
                fields.len = number(*len);
                fields.access = Some(Letters(*access));
            }
            TraceOperation::UnbindBo { bo } => fields.bo = number(*bo),
            TraceOperation::Null { va, len }
            | TraceOperation::Unbind { va, len }
            | TraceOperation::Merge { va, len }
            | TraceOperation::Prefetch { va, len } => {
                fields.va = number(va.bits());
                fields.len = number(*len);
            }
            TraceOperation::Batch(ops) | TraceOperation::Reserved(ops) => {
                fields.ops = Some(Ops { list: ops.iter().map(Self::of).collect(), count: ops.len() });
            }
        }
        fields
    }
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::Bo => "bo",
            Self::Destroy => "destroy",
            Self::Bind => "bind",
            Self::Repeat => "repeat",
            Self::Null => "null",
            Self::Unbind => "unbind",
            Self::UnbindBo => "unbind_bo",
            Self::Prefetch => "prefetch",
            Self::Merge => "merge",
            Self::Batch => "batch",
            Self::Reserved => "reserved",
        }
    }

    /// The fields that it may have.
    fn fields(self) -> &'static [&'static str] {
        match self {
            Self::Bo => &["id", "segments", "more"],
            Self::Destroy => &["id"],
            Self::Bind => &["va", "bo", "offset", "len", "access"],
            Self::Repeat => &["va", "bo", "offset", "page", "len", "access"],
            Self::Null | Self::Unbind | Self::Prefetch | Self::Merge => &["va", "len"],
            Self::UnbindBo => &["bo"],
            Self::Batch | Self::Reserved => &["ops"],
        }
    }
}

impl TraceOperation {
    /// The name in the field `op`.
    pub fn name(&self) -> &'static str {
        self.op().name()
    }

    fn op(&self) -> Op {
        match self {
            Self::Bo { .. } => Op::Bo,
            Self::Destroy { .. } => Op::Destroy,
            Self::Bind { .. } => Op::Bind,
            Self::Repeat { .. } => Op::Repeat,
            Self::Null { .. } => Op::Null,
            Self::Unbind { .. } => Op::Unbind,
            Self::UnbindBo { .. } => Op::UnbindBo,
            Self::Prefetch { .. } => Op::Prefetch,
            Self::Merge { .. } => Op::Merge,
            Self::Batch(_) => Op::Batch,
            Self::Reserved(_) => Op::Reserved,
        }
    }

    /// The operation in a line.
    ///
    /// # Errors
    /// Why the line is refused, and for which operation of a batch, from 0.
    pub fn parse(line: Line<'_>) -> Result<Self, (Option<usize>, TraceRefusal)> {
        let bytes = match line {
            Line::Bytes(bytes) => bytes,
            Line::TooLong => return Err((None, TraceRefusal::LineTooLong)),
        };
        // serde would take a list of the fields' values too.
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return Err((None, TraceRefusal::BadLine("not an object".to_owned())));
        }
        let fields: Fields =
            serde_json::from_slice(bytes).map_err(|e| (None, TraceRefusal::BadLine(plain_json(&e, "operation"))))?;
        fields.operation(false)
    }

    /// The line that says so, without its end.
    pub fn line(&self) -> String {
        serde_json::to_string(&Fields::of(self)).expect("no map with odd keys, and writing to memory does not fail")
    }
}
