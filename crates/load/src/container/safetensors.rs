//! Safetensors files.
//!
//! Format: <https://github.com/huggingface/safetensors#format>: 8 bytes little-endian header length, a JSON header of
//! {name: {dtype, shape, data_offsets}}, then the data, which the tensors cover without holes or overlaps. The crate
//! `safetensors` parses the header.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;

use dmalane_addr::FileOffset;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::value::RawValue;

use super::{Container, ContainerFile, FormatError, Model, Tensor};
use crate::Error;

/// The longest header that is accepted, in bytes: the limit of the format's own library.
pub const MAX_HEADER: u64 = 100_000_000;

/// The length field in front of the header.
const PREFIX: u64 = 8;

/// True for files named `*.safetensors`: the format has no magic number.
pub(super) fn detect(path: &Path, _head: &[u8]) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"))
}

/// The tensors of a file.
pub(super) fn parse(file: &ContainerFile<'_>) -> Result<Model, Error> {
    if file.len == 0 {
        return Err(file.bad(FormatError::Empty));
    }
    let mut prefix = [0; PREFIX as usize];
    let have = file.read(0, file.len.min(PREFIX))?;
    prefix[..have.len()].copy_from_slice(&have);
    let header = header_len(prefix, file.len).map_err(|e| file.bad(e))?;
    parse_header(&file.read(PREFIX, header)?, file.len).map_err(|e| file.bad(e))
}

/// Bytes of the header, from the first 8 bytes of a file of `len` bytes; they start at offset 8.
///
/// # Errors
/// [`FormatError`] when that many cannot be there.
pub fn header_len(prefix: [u8; 8], len: u64) -> Result<u64, FormatError> {
    let left = len.checked_sub(PREFIX).ok_or(FormatError::NoPrefix { len })?;
    let header = u64::from_le_bytes(prefix);
    match header {
        _ if header > left => Err(FormatError::HeaderBeyondEnd { header, left }),
        _ if header > MAX_HEADER => Err(FormatError::HeaderTooLong { header }),
        _ => Ok(header),
    }
}

/// The tensors of a safetensors file of `len` bytes with this header.
///
/// # Errors
/// [`FormatError`]; every tensor lies within the file, and together they cover all of it behind the header.
pub fn parse_header(header: &[u8], len: u64) -> Result<Model, FormatError> {
    let data = (header.len() as u64).checked_add(PREFIX).filter(|d| *d <= len);
    let data =
        data.ok_or(FormatError::HeaderBeyondEnd { header: header.len() as u64, left: len.saturating_sub(PREFIX) })?;
    let text = std::str::from_utf8(header)
        .map_err(|e| FormatError::NotUtf8 { at: FileOffset::new(PREFIX + e.valid_up_to() as u64) })?;
    let parsed: Metadata = serde_json::from_str(text).map_err(|e| explain(text, &e))?;
    let mut tensors = Vec::new();
    let mut covered = data;
    let infos = parsed.tensors();
    for (name, info) in in_order(&infos) {
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if end > len - data {
            let end = FileOffset::new(data.saturating_add(end));
            return Err(FormatError::TensorBeyondEnd { tensor: short(name), end, len });
        }
        // The parser has checked this too; what follows relies on it. Neither sum exceeds `len`.
        if end < start || data + start != covered {
            let reason = "its bytes overlap or leave a hole".into();
            return Err(FormatError::Tensor { tensor: short(name), at: FileOffset::new(PREFIX), reason });
        }
        covered = data + end;
        tensors.push(Arc::new(Tensor {
            name: name.to_owned(),
            dtype: info.dtype.to_string(),
            shape: info.shape.iter().map(|d| *d as u64).collect(),
            at: FileOffset::new(data + start),
            len: end - start,
        }));
    }
    if covered != len {
        return Err(FormatError::TrailingBytes { at: FileOffset::new(covered), extra: len - covered });
    }
    let metadata = parsed.metadata().as_ref().map(|m| {
        let mut pairs: Vec<_> = m.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        pairs.sort();
        pairs
    });
    Ok(Model { len, tensors, metadata, container: Container::Safetensors })
}

/// The header of a file with the tensors of `model`, padded with spaces to 8 bytes as the format's own
/// writer does.
pub(crate) fn header(model: &Model) -> io::Result<Vec<u8>> {
    let mut map = serde_json::Map::new();
    if let Some(pairs) = &model.metadata {
        let pairs = pairs.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
        map.insert("__metadata__".into(), serde_json::Value::Object(pairs));
    }
    // Some tensors of a file may have been left out: those that are here follow each other.
    let mut begin = 0;
    for t in &model.tensors {
        let dtype: Dtype = serde_json::from_value(t.dtype.clone().into())?;
        let shape = t.shape.iter().map(|d| *d as usize).collect();
        let info = TensorInfo { dtype, shape, data_offsets: (begin, begin + t.len as usize) };
        begin += t.len as usize;
        map.insert(t.name.clone(), serde_json::to_value(info)?);
    }
    let mut header = serde_json::to_vec(&map)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

fn in_order<'a>(infos: &'a HashMap<String, &'a TensorInfo>) -> Vec<(&'a str, &'a TensorInfo)> {
    let mut tensors: Vec<_> = infos.iter().map(|(name, info)| (name.as_str(), *info)).collect();
    // By position; names make the order of zero-size tensors the same in every run.
    tensors.sort_unstable_by(|a, b| a.1.data_offsets.cmp(&b.1.data_offsets).then_with(|| a.0.cmp(b.0)));
    tensors
}

/// Characters of a name or a reason that go into a message: headers are hostile, and may be one name of 100 MB.
const SHORT: usize = 200;

pub(crate) fn short(text: &str) -> String {
    match text.char_indices().nth(SHORT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// The parser does not always say which tensor it stumbled over, nor why: find the first that does not parse alone,
/// else the first that does not begin where the one before it ends. Tensors are taken apart one at a time, so that this
/// needs little more memory than the header.
fn explain(text: &str, error: &serde_json::Error) -> FormatError {
    let header = || FormatError::Header { reason: short(&error.to_string()) };
    let Ok(entries) = serde_json::from_str::<BTreeMap<String, &RawValue>>(text) else { return header() };
    // The raw values are slices of `text`.
    let place =
        |value: &RawValue| FileOffset::new(PREFIX + (value.get().as_ptr().addr() - text.as_ptr().addr()) as u64);
    let mut spans = Vec::new();
    for (name, value) in &entries {
        if name == "__metadata__" {
            continue;
        }
        let reason = match serde_json::from_str::<TensorInfo>(value.get()) {
            Err(e) => e.to_string(),
            Ok(info) => match misfit(&info) {
                Some(reason) => reason,
                None => {
                    spans.push((info.data_offsets, name, place(value)));
                    continue;
                }
            },
        };
        return FormatError::Tensor { tensor: short(name), at: place(value), reason: short(&reason) };
    }
    spans.sort_unstable();
    let (mut end, mut before) = (0, None);
    for ((start, stop), name, at) in spans {
        let reason = match (start.cmp(&end), before) {
            (Ordering::Less, Some(before)) => {
                format!("it starts at data offset {start}, within tensor {:?}, which ends at {end}", short(before))
            }
            (Ordering::Greater, _) => {
                format!("{} bytes in front of its data offset {start} belong to no tensor", start - end)
            }
            _ => {
                (end, before) = (stop, Some(name.as_str()));
                continue;
            }
        };
        return FormatError::Tensor { tensor: short(name), at, reason };
    }
    header()
}

/// The contradiction within a tensor, if any: its shape and type do not give the bytes that it claims.
fn misfit(info: &TensorInfo) -> Option<String> {
    let (start, end) = info.data_offsets;
    let Some(claimed) = end.checked_sub(start) else {
        return Some(format!("it ends at {end}, before it starts at {start} (data offsets)"));
    };
    let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, d| n.checked_mul(*d));
    match bits {
        None => Some(format!("the size of shape {} overflows", shape(info))),
        Some(bits) if bits.is_multiple_of(8) && bits / 8 != claimed => Some(format!(
            "{} of shape {} takes {} bytes, but its data offsets {start}..{end} hold {claimed}",
            info.dtype,
            shape(info),
            bits / 8
        )),
        Some(bits) if !bits.is_multiple_of(8) => {
            Some(format!("{} of shape {} takes {bits} bits, which are no whole bytes", info.dtype, shape(info)))
        }
        Some(_) => None,
    }
}

fn shape(info: &TensorInfo) -> String {
    let dims = &info.shape[..info.shape.len().min(8)];
    let more = if dims.len() < info.shape.len() {
        format!(" and {} more", info.shape.len() - dims.len())
    } else {
        String::new()
    };
    format!("{dims:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(header: &str, data: u64) -> Result<Model, FormatError> {
        parse_header(header.as_bytes(), 8 + header.len() as u64 + data)
    }

    fn entry(name: &str, start: u64, end: u64) -> String {
        format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end.saturating_sub(start))
    }

    #[test]
    fn reads_tensors_in_the_order_of_their_bytes() {
        let header = format!(
            r#"{{"__metadata__":{{"k":"v"}},{},{},{}}}"#,
            entry("b", 4, 10),
            entry("none", 4, 4),
            entry("a", 0, 4)
        );
        let model = text(&header, 10).unwrap();
        let names: Vec<_> = model.tensors.iter().map(|t| (t.name.as_str(), t.len)).collect();
        assert_eq!(names, [("a", 4), ("none", 0), ("b", 6)]);
        assert_eq!(model.metadata, Some(vec![("k".into(), "v".into())]));
        let data = 8 + header.len() as u64;
        let at = |o| model.tensor_at(FileOffset::new(data + o)).map(|t| t.name.as_str());
        assert_eq!((at(0), at(3), at(4), at(9), at(10)), (Some("a"), Some("a"), Some("b"), Some("b"), None));
        assert_eq!(model.tensor_at(FileOffset::new(7)), None);
    }

    #[test]
    fn every_kind_of_bad_file_has_its_own_message() {
        let message = |r: Result<Model, FormatError>| r.unwrap_err().to_string();
        let len = |prefix: u64, len| header_len(prefix.to_le_bytes(), len).unwrap_err().to_string();
        assert!(len(0, 1).contains("has 1 bytes"));
        assert!(len(100, 50).contains("says 100 bytes, but only 42 follow"));
        assert!(len(1 << 63, 50).contains("9223372036854775808"));
        assert!(len(MAX_HEADER + 1, u64::MAX).contains("more than the 100000000"));
        assert!(message(text("{", 0)).contains("bad header"));
        assert!(message(text("[1]", 0)).contains("bad header"));
        assert!(message(parse_header(b"{\"\xff\":1}", 100)).contains("not UTF-8 at file offset 0xa"));
        let two = |a: &str, b: &str| format!("{{{a},{b}}}");
        let overlap = message(text(&two(&entry("a", 0, 8), &entry("b", 4, 12)), 12));
        assert!(
            overlap.contains("tensor \"b\"") && overlap.contains("within tensor \"a\", which ends at 8"),
            "{overlap}"
        );
        // `{"a":{...},"b":` precedes the description of b.
        let at = 8 + 1 + entry("a", 0, 8).len() + 1 + 4;
        assert!(overlap.contains(&format!("file offset {at:#x}")), "{overlap}");
        let hole = message(text(&two(&entry("a", 0, 8), &entry("b", 9, 12)), 12));
        assert!(hole.contains("tensor \"b\"") && hole.contains("1 bytes in front"), "{hole}");
        let beyond = message(text(&two(&entry("a", 0, 8), &entry("b", 8, 12)), 10));
        assert!(beyond.contains("tensor \"b\" ends at file offset"), "{beyond}");
        let huge = format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, u64::MAX);
        assert!(message(text(&huge, 10)).contains("tensor \"a\""));
        let dtype = r#"{"w":{"dtype":"Q7","shape":[1],"data_offsets":[0,1]}}"#;
        let dtype = message(text(dtype, 1));
        assert!(dtype.contains("\"w\"") && dtype.contains("Q7"), "{dtype}");
        let size = r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#;
        assert!(message(text(size, 8)).contains("takes 12 bytes, but its data offsets 0..8 hold 8"));
        let part = r#"{"w":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#;
        assert!(message(text(part, 2)).contains("no whole bytes"));
        let backwards = r#"{"w":{"dtype":"U8","shape":[0],"data_offsets":[8,0]}}"#;
        assert!(message(text(backwards, 8)).contains("before it starts"));
        let overflow = r#"{"w":{"dtype":"F64","shape":[9223372036854775807,4],"data_offsets":[0,8]}}"#;
        assert!(message(text(overflow, 8)).contains("overflows"));
        let trailing = message(text(&format!("{{{}}}", entry("a", 0, 8)), 9));
        assert!(trailing.contains("1 bytes follow the last tensor"), "{trailing}");
        assert_eq!(text("{}", 0).unwrap().tensors, []);
    }

    #[test]
    fn messages_stay_short_however_long_the_header() {
        let long = "x".repeat(1 << 20);
        let shape = vec!["0"; 1 << 20].join(",");
        for header in [
            format!(r#"{{"{long}":{{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}}}"#),
            format!(r#"{{"a":{{"dtype":"{long}","shape":[1],"data_offsets":[0,1]}}}}"#),
            format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#),
            format!(r#"{{"{long}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#),
        ] {
            let message = text(&header, 0).unwrap_err().to_string();
            assert!(message.len() < 1000, "{} bytes", message.len());
        }
    }

    proptest! {
        /// Valid headers tile the file, and a header with one number changed is refused or still does.
        #[test]
        fn tensors_always_tile_the_file(
            sizes in prop::collection::vec(0u64..50, 0..8),
            change in any::<(prop::sample::Index, u64, bool)>(),
            extra in -2i64..3,
        ) {
            let mut at = 0;
            let mut numbers = Vec::new();
            for len in &sizes {
                numbers.extend([*len, at, at + len]);
                at += len;
            }
            let header = |n: &[u64]| {
                let entry = |(i, n): (usize, &[u64])| {
                    format!(r#""t{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}"#, n[0], n[1], n[2])
                };
                format!("{{{}}}", n.chunks(3).enumerate().map(entry).collect::<Vec<_>>().join(","))
            };
            let good = text(&header(&numbers), at).unwrap();
            prop_assert_eq!(good.tensors.iter().map(|t| t.len).sum::<u64>(), at);
            let (index, value, large) = change;
            if !numbers.is_empty() {
                let i = index.index(numbers.len());
                numbers[i] = if large { value } else { value % 100 };
            }
            if let Ok(model) = text(&header(&numbers), at.saturating_add_signed(extra)) {
                let mut next = model.len - model.tensors.iter().map(|t| t.len).sum::<u64>();
                for t in &model.tensors {
                    prop_assert_eq!(t.at.bits(), next);
                    next += t.len;
                }
                prop_assert_eq!(next, model.len);
            }
        }
    }
}
