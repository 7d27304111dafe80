//! Safetensors: tensors behind a JSON header.
//!
//! Format: <https://github.com/huggingface/safetensors#format>: 8 bytes little-endian header length, a JSON header of
//! {name: {dtype, shape, data_offsets}}, then the data, which the tensors cover without holes or overlaps. This
//! module accepts the headers that the crate `safetensors` accepts, within limits, and does not look into other fields.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use dmalane_addr::FileOffset;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::file::ContainerFile;
use super::format_error::FormatError;
use super::model::{Container, Model};
use super::tensor::{Tensor, TypeNames};
use super::text::{MAX_HEADER, MAX_PAIRS, short};
use crate::error::Error;

/// The length field in front of the header.
const PREFIX: u64 = 8;

/// The kind: it has no magic number.
pub static CONTAINER: Container = Container {
    name: "safetensors",
    title: "safetensors",
    extensions: &["safetensors"],
    magic: &[],
    resembles: Some(resembles),
    in_folders: true,
    parse_header: Some(|header, file, _| parse_header(header, file)),
    parse,
};

/// Whether a file begins as a header of a possible length does: an object, with text or nothing in it.
fn resembles(head: &[u8]) -> bool {
    let Some((prefix, text)) = head.split_first_chunk() else { return false };
    let len = u64::from_le_bytes(*prefix);
    let rest = text.strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
    (2..=MAX_HEADER).contains(&len) && rest.is_some_and(|rest| matches!(rest, [] | [b'"' | b'}', ..]))
}

/// The tensors of a file.
pub(super) fn parse(file: &ContainerFile<'_>) -> Result<Model, Error> {
    if file.len == 0 {
        return Err(file.bad(FormatError::new("the file is empty")));
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
    let header = u64::from_le_bytes(prefix);
    let defect = match len.checked_sub(PREFIX) {
        None => format!("the file has {len} bytes, a safetensors file starts with 8 bytes of header length"),
        Some(left) if header > left => return Err(beyond_end(header, left)),
        _ if header > MAX_HEADER => {
            format!(
                "the header length at file offset 0 says {header} bytes, more than the {MAX_HEADER} that are allowed"
            )
        }
        _ => return Ok(header),
    };
    Err(FormatError::new(defect))
}

fn beyond_end(header: u64, left: u64) -> FormatError {
    let text =
        format_args!("the header length at file offset 0 says {header} bytes, but only {left} follow in the file");
    FormatError::new(text)
}

/// The tensors of a safetensors file of `len` bytes with this header.
///
/// Takes time in proportion to the header, and memory of at most about four times its size.
///
/// # Errors
/// [`FormatError`]; every tensor lies within the file, and together they cover all of it behind the header. Shapes have
/// at most [`MAX_DIMS`] dimensions, and there are at most [`MAX_PAIRS`] pairs of metadata.
pub fn parse_header(header: &[u8], len: u64) -> Result<Model, FormatError> {
    let data = (header.len() as u64).checked_add(PREFIX).filter(|d| *d <= len);
    let data = data.ok_or_else(|| beyond_end(header.len() as u64, len.saturating_sub(PREFIX)))?;
    let text = std::str::from_utf8(header).map_err(|e| FormatError::not_utf8(PREFIX + e.valid_up_to() as u64))?;
    // To know where each description begins takes twice as long, which only messages are worth.
    model(text, data, len, false).or_else(|_| model(text, data, len, true))
}

/// The tensors of a header in front of `data`, whose errors say `places` of descriptions.
fn model(text: &str, data: u64, len: u64, places: bool) -> Result<Model, FormatError> {
    let Entries { tensors: mut entries, metadata } = entries(text, places)?;
    // Hashes take less memory than names; where two are equal, it takes longer.
    let (hasher, mut hashes) = (RandomState::new(), HashSet::with_capacity(entries.len()));
    if !entries.iter().all(|entry| hashes.insert(hasher.hash_one(&entry.name))) {
        // Of two tensors of one name the last counts, as in the format's own library.
        entries.reverse();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries.dedup_by(|later, first| later.name == first.name);
    }
    drop(hashes);
    // By position; names make the order of zero-size tensors the same in every run.
    entries.sort_unstable_by(|a, b| (a.info.data_offsets, &a.name).cmp(&(b.info.data_offsets, &b.name)));
    let mut tensors: Vec<Arc<Tensor>> = Vec::with_capacity(entries.len());
    let mut types = TypeNames(Vec::new());
    let mut end = 0;
    for Entry { name, info, at } in entries {
        let wrong = |source: FormatError| source.in_tensor(&name, place(at));
        let (start, stop) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if let Some(defect) = misfit(&info) {
            return Err(wrong(defect));
        }
        if stop > len - data {
            return Err(FormatError::beyond_end(&name, data.saturating_add(stop), len));
        }
        match (start.cmp(&end), tensors.last()) {
            (Ordering::Equal, _) => {}
            (Ordering::Less, Some(before)) => {
                let before = short(&before.name);
                let text =
                    format_args!("it starts at data offset {start}, within tensor {before:?}, which ends at {end}");
                return Err(wrong(FormatError::new(text)));
            }
            _ => {
                let len = start.abs_diff(end);
                let text = format!("{len} bytes in front of its data offset {start} belong to no tensor");
                return Err(wrong(FormatError::new(text)));
            }
        }
        end = stop;
        tensors.push(Arc::new(Tensor {
            name: name.into(),
            dtype: types.get(info.dtype, Dtype::to_string),
            shape: info.shape.dims,
            // Neither sum exceeds `len`.
            at: FileOffset::new(data + start),
            len: stop - start,
        }));
    }
    if data + end != len {
        return Err(FormatError::trailing(data + end, len));
    }
    Ok(Model { len, tensors, metadata, by_columns: false, container: &CONTAINER })
}

/// Dimensions of a tensor, at most. NumPy and PyTorch allow as many.
pub const MAX_DIMS: usize = 64;

/// The contents of a header.
#[derive(Default)]
struct Entries {
    /// In the order of the header.
    tensors: Vec<Entry>,
    metadata: Option<Vec<(String, String)>>,
}

/// A tensor that was described.
struct Entry {
    name: Box<str>,
    info: Info,
    /// Where its description starts in the header, which is not that long, if that was asked for.
    at: u32,
}

/// Parses all of a header.
fn entries(text: &str, places: bool) -> Result<Entries, FormatError> {
    let (mut entries, mut wrong) = (Entries::default(), None);
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = json.deserialize_map(Descriptions { text, places, entries: &mut entries, wrong: &mut wrong });
    match parsed.and_then(|()| json.end()) {
        Ok(()) => Ok(entries),
        Err(e) => Err(wrong.unwrap_or_else(|| FormatError::from(e).within("bad header (file offset 8 on)"))),
    }
}

/// Takes the descriptions of a header one by one.
struct Descriptions<'a> {
    text: &'a str,
    places: bool,
    entries: &'a mut Entries,
    /// A better reason than the parser can give.
    wrong: &'a mut Option<FormatError>,
}

impl<'de> Visitor<'de> for Descriptions<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a field for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<Box<str>>()? {
            if &*name == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(A::Error::duplicate_field("__metadata__"));
                }
                self.entries.metadata = map.next_value::<Option<Pairs>>()?.map(|pairs| pairs.0);
                continue;
            }
            if !self.places {
                let info = map.next_value()?;
                self.entries.tensors.push(Entry { name, info, at: 0 });
                continue;
            }
            let value: &RawValue = map.next_value()?;
            // A slice of the text.
            let at = value.get().as_ptr().addr() - self.text.as_ptr().addr();
            let at = u32::try_from(at).map_err(A::Error::custom)?;
            match serde_json::from_str(value.get()) {
                Ok(info) => self.entries.tensors.push(Entry { name, info, at }),
                Err(e) => {
                    *self.wrong = Some(FormatError::from(e).in_tensor(&name, place(at)));
                    return Err(A::Error::custom("a bad tensor"));
                }
            }
        }
        Ok(())
    }
}

/// The offset in the file of a byte of the header.
fn place(at: u32) -> FileOffset {
    FileOffset::new(PREFIX + u64::from(at))
}

/// The description of a tensor. Fields of other names are passed over.
#[derive(Deserialize)]
struct Info {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

/// The dimensions of a tensor.
struct Shape {
    dims: Box<[u64]>,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let (mut dims, mut n) = ([0; MAX_DIMS], 0);
                while let Some(dim) = seq.next_element::<usize>()? {
                    let place = dims.get_mut(n);
                    let too_many = || A::Error::custom(format!("more than {MAX_DIMS} dimensions"));
                    *place.ok_or_else(too_many)? = dim as u64;
                    n += 1;
                }
                Ok(Shape { dims: dims[..n].into() })
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

/// Pairs of text, sorted; of two with one key the last.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs: Vec<(String, String)> = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.len() == MAX_PAIRS {
                        return Err(A::Error::custom(format!("more than {MAX_PAIRS} pairs of metadata")));
                    }
                    pairs.push(pair);
                }
                // The last of one key comes first, and the others go.
                pairs.reverse();
                pairs.sort_by(|a, b| a.0.cmp(&b.0));
                pairs.dedup_by(|later, first| later.0 == first.0);
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Texts)
    }
}

/// The contradiction within a tensor, if any: its shape and type do not give the bytes that it claims.
fn misfit(info: &Info) -> Option<FormatError> {
    let (start, end) = info.data_offsets;
    // Elements first, as the format's own library does: a shape that overflows is bad even if it has a zero.
    let elements = info.shape.dims.iter().try_fold(1usize, |n, d| n.checked_mul(usize::try_from(*d).ok()?));
    let bits = elements.and_then(|elements| elements.checked_mul(info.dtype.bitsize()));
    let elements = || format!("{} of shape {}", info.dtype, shape(info));
    let defect = match (end.checked_sub(start), bits) {
        (None, _) => format!("it ends at {end}, before it starts at {start} (data offsets)"),
        (_, None) => format!("the size of shape {} overflows", shape(info)),
        (_, Some(bits)) if !bits.is_multiple_of(8) => {
            format!("{} takes {bits} bits, which are no whole bytes", elements())
        }
        (Some(claimed), Some(bits)) if bits / 8 != claimed => {
            let bytes = bits / 8;
            format!("{} takes {bytes} bytes, but its data offsets {start}..{end} hold {claimed}", elements())
        }
        _ => return None,
    };
    Some(FormatError::new(defect))
}

fn shape(info: &Info) -> String {
    let all = &info.shape.dims;
    let dims = &all[..all.len().min(8)];
    let more = if dims.len() < all.len() { format!(" and {} more", all.len() - dims.len()) } else { String::new() };
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
        assert!(message(parse_header(b"{\"\xff\":1}", 100)).contains("not UTF-8 at file offset 10"));
        let two = |a: &str, b: &str| format!("{{{a},{b}}}");
        let overlap = message(text(&two(&entry("a", 0, 8), &entry("b", 4, 12)), 12));
        assert!(
            overlap.contains("tensor \"b\"") && overlap.contains("within tensor \"a\", which ends at 8"),
            "{overlap}"
        );
        // `{"a":{...},"b":` precedes the description of b.
        let at = 8 + 1 + entry("a", 0, 8).len() + 1 + 4;
        assert!(overlap.contains(&format!("file offset {at}")), "{overlap}");
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

    /// We accept what the format's own library accepts, and otherwise only what is no JSON to it.
    #[test]
    fn accepts_what_the_format_s_own_library_accepts() {
        let agrees = |header: &[u8], data: usize| {
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header);
            file.resize(file.len() + data, 0);
            let theirs = safetensors::SafeTensors::read_metadata(&file);
            let ours = parse_header(header, file.len() as u64);
            let text = String::from_utf8_lossy(header);
            // What the library refuses of a field that nobody reads, it refuses everywhere: depth, large numbers.
            if ours.is_ok() && serde_json::from_slice::<serde_json::Value>(header).is_err() {
                return false;
            }
            assert_eq!(ours.is_ok(), theirs.is_ok(), "{text}: {ours:?}, the library: {theirs:?}");
            let (Ok(ours), Ok((_, theirs))) = (ours, theirs) else { return false };
            assert_eq!(ours.tensors.len(), theirs.tensors().len(), "{text}");
            for t in &ours.tensors {
                let info = theirs.info(&t.name).unwrap();
                let offset = (t.at.bits() as usize) - 8 - header.len();
                let shape: Vec<usize> = t.shape.iter().map(|d| *d as usize).collect();
                assert_eq!(
                    (&shape, offset, &*t.dtype),
                    (&info.shape, info.data_offsets.0, info.dtype.to_string().as_str())
                );
                assert_eq!(offset + t.len as usize, info.data_offsets.1);
            }
            let pairs = theirs.metadata().as_ref().map(|pairs| {
                let mut pairs: Vec<_> = pairs.clone().into_iter().collect();
                pairs.sort();
                pairs
            });
            assert_eq!(ours.metadata, pairs, "{text}");
            true
        };
        let with = |more: &str| format!(r#"{{"a":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]{more}}}}}"#);
        let field = |value: &str| with(&format!(r#","x":{value}"#));
        let nested = |n: usize| field(&format!("{}{}", "[".repeat(n), "]".repeat(n)));
        let maps = |n: usize| field(&format!("{}0{}", r#"{"y":"#.repeat(n), "}".repeat(n)));
        let mut headers: Vec<String> = [
            "1.5",
            "1e999",
            "-0",
            "18446744073709551616",
            "null",
            "true",
            r#""\ud800""#,
            r#""\u00e9""#,
            "[1,{\"y\":[]}]",
        ]
        .map(field)
        .into();
        headers.extend((120..131).flat_map(|n| [nested(n), maps(n)]));
        headers.extend(
            [
                r#"{"a":["U8",[2],[0,2]]}"#,
                r#"{"a":["U8",[2],[0,2],0]}"#,
                r#"{"a":["U8",[2]]}"#,
                r#"{"a":{"dtype":{"U8":null},"shape":[2],"data_offsets":[0,2]}}"#,
                r#"{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}"#,
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,3]}}"#,
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"dtype":"U8"}}"#,
                r#"{"__metadata__":null,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
                r#"{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
                r#"{"__metadata__":{"k":"1","k":"2"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
                r#"{"__metadata__":{"k":1},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
                r#"{"__metadata__":[],"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
                r#"{"a":{"dtype":"U8","shape":[4611686018427387904,0],"data_offsets":[0,0]},"b":["U8",[2],[0,2]]}"#,
                r#"{"a":{"dtype":"U8","shape":[9223372036854775807,4,0],"data_offsets":[0,0]}}"#,
                r#"{"\u0061\n":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}  "#,
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}x"#,
                r#"{"a":null}"#,
                "{}",
                "[]",
                "",
            ]
            .map(str::to_owned),
        );
        let two = |a: (&str, &str, u8, u8), b: (&str, &str, u8, u8)| {
            let one = |(name, dtype, from, to)| {
                let n = to - from;
                format!(r#""{name}":{{"dtype":"{dtype}","shape":[{n}],"data_offsets":[{from},{to}]}}"#)
            };
            format!("{{{},{}}}", one(a), one(b))
        };
        headers.extend([
            two(("a", "U8", 0, 2), ("a", "I8", 0, 2)),
            two(("a", "U8", 0, 1), ("a", "U8", 0, 2)),
            two(("b", "U8", 2, 2), ("a", "U8", 0, 2)),
        ]);
        let mut accepted = headers.iter().filter(|header| agrees(header.as_bytes(), 2)).count();
        assert!(accepted > 15, "{accepted}");
        // The same with a byte or two changed, taken away or doubled.
        let mut state = 1u64;
        let mut random = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let short: Vec<&String> = headers.iter().filter(|header| (1..200).contains(&header.len())).collect();
        for _ in 0..20_000 {
            let mut header = short[random(short.len())].clone().into_bytes();
            for _ in 0..=random(2) {
                let at = random(header.len());
                match random(3) {
                    0 => header[at] = br#"{}[]",:0129aexU-.\ "#[random(19)],
                    1 if header.len() > 1 => drop(header.remove(at)),
                    _ => header.insert(at, header[at]),
                }
            }
            accepted += usize::from(agrees(&header, 2));
        }
        assert!(accepted > 300, "{accepted}");
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
