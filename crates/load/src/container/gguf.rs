//! GGUF: tensors behind a binary header, as llama.cpp and its relatives have them.
//!
//! Format: "GGUF" in the documentation of <https://github.com/ggml-org/ggml>, versions 2 and 3, little-endian. A header
//! of typed key-value pairs and tensor descriptions is followed by the tensors' bytes, each at a multiple of
//! `general.alignment`. Block sizes are those of ggml's type traits.

use std::fmt::{Display, LowerExp};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dmalane_addr::FileOffset;

use super::file::ContainerFile;
use super::format_error::FormatError;
use super::model::{Container, Model};
use super::tensor::{Tensor, TypeNames};
use super::text::{MAX_HEADER, MAX_PAIRS};
use crate::error::Error;

/// The first bytes of every GGUF file.
const MAGIC: &[u8] = b"GGUF";
/// Bytes that a tensor starts at a multiple of, unless the file says otherwise.
const ALIGNMENT: u64 = 32;
/// The most dimensions of a tensor; ggml has 4.
const MAX_DIMS: u32 = 8;
/// The most types that are unknown; ggml has some forty in all.
const MAX_UNKNOWN: u64 = 64;
/// Values of which a text longer than this is left out of [`Model::metadata`].
const MAX_TEXT: u64 = 4096;

/// Arrays within arrays, at most.
const MAX_DEPTH: u32 = 64;

/// The types of elements: number, name, elements of a block, bytes of a block.
const TYPES: &[(u32, &str, u64, u64)] = &[
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
];

/// The kind.
pub static CONTAINER: Container = Container {
    name: "gguf",
    title: "GGUF",
    extensions: &["gguf"],
    magic: &[MAGIC],
    resembles: None,
    in_folders: true,
    parse_header: Some(parse_bytes),
    parse,
};

/// The tensors of a file.
pub(super) fn parse(file: &ContainerFile<'_>) -> Result<Model, Error> {
    let input = BufReader::with_capacity(256 << 10, Bytes { file: file.file, at: 0 });
    parse_header(input, file.len).map_err(|stop| match stop {
        HeaderError::Format(error) => file.bad(error),
        HeaderError::Io(error) => file.failed(error),
    })
}

/// The bytes of a file from its first one on, whatever its position.
struct Bytes<'a> {
    file: &'a std::fs::File,
    at: u64,
}

impl Read for Bytes<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(into, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// Why a header was not parsed.
#[derive(Debug)]
pub enum HeaderError {
    /// It is bad.
    Format(FormatError),
    /// It could not be read.
    Io(io::Error),
}

/// The tensors of a file of `len` bytes, of which `input` yields the bytes in order. Reads the header, at most 100 MB,
/// and keeps of it the tensors and those values that are short texts or numbers.
///
/// # Errors
/// [`HeaderError`]. Whether tensors overlap or leave the file is left to [`Model::check`].
pub fn parse_header(input: impl BufRead, len: u64) -> Result<Model, HeaderError> {
    Header { input, at: 0, len: len.min(MAX_HEADER), file: len }.model()
}

/// The same, of a header in memory, whose end is the only error of reading.
fn parse_bytes(header: &[u8], len: u64, _: &str) -> Result<Model, FormatError> {
    parse_header(header, len).map_err(|error| match error {
        HeaderError::Format(error) => error,
        HeaderError::Io(_) => in_header(FormatError::cut_off(header.len() as u64, 1)),
    })
}

fn bad<T>(source: FormatError) -> Result<T, HeaderError> {
    Err(HeaderError::Format(in_header(source)))
}

fn in_header(source: FormatError) -> FormatError {
    source.within("bad GGUF header")
}

/// The header as it is read, front to back.
struct Header<R> {
    input: R,
    /// Bytes read so far.
    at: u64,
    /// Bytes that the header may have.
    len: u64,
    /// Bytes of the file.
    file: u64,
}

impl<R: BufRead> Header<R> {
    fn model(&mut self) -> Result<Model, HeaderError> {
        if self.array::<4>()? != *MAGIC {
            return bad(FormatError::new("it does not start with GGUF"));
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return bad(match version.swap_bytes() {
                2..=3 => FormatError::new("it is a big-endian file, which is not supported"),
                _ => FormatError::version(version, "2 and 3"),
            });
        }
        // The least: a tensor is the length of its name, dimensions, type and offset; a pair that of its key, and a
        // type and a value.
        let (tensors, pairs) = (self.count(24)?, self.count(13)?);
        if pairs > MAX_PAIRS as u64 {
            return bad(FormatError::too_many("pairs of metadata", pairs, MAX_PAIRS as u64));
        }
        let (mut alignment, mut metadata) = (ALIGNMENT, Vec::with_capacity(pairs as usize));
        for _ in 0..pairs {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            if key == "general.alignment" {
                const U32: u32 = 4;
                let text = format_args!("general.alignment is of type {kind}, not of type {U32} (a 32-bit number)");
                let known = value.as_deref().filter(|_| kind == U32).and_then(|v| v.parse().ok());
                alignment = known.ok_or_else(|| HeaderError::Format(in_header(FormatError::new(text))))?;
            }
            metadata.push((key, value));
        }
        if alignment == 0 || alignment % 8 != 0 {
            let text = format!("general.alignment is {alignment}, which is not a multiple of 8");
            return bad(FormatError::new(text));
        }
        // As many as the file has bytes for.
        let mut described = Vec::with_capacity(tensors as usize);
        let no_type: Arc<str> = Arc::default();
        for _ in 0..tensors {
            described.push(self.tensor(&no_type)?);
        }
        let Some(start) = self.at.checked_next_multiple_of(alignment) else { return bad(FormatError::overflow()) };
        let tensors = place(described, start, alignment, self.file).map_err(HeaderError::Format)?;
        metadata.sort_unstable();
        if let Some(twice) = metadata.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return bad(FormatError::twice("key", &twice[0].0));
        }
        let metadata = Some(metadata.into_iter().filter_map(|(key, value)| Some((key, value?))).collect());
        Ok(Model { len: self.file, tensors, metadata, by_columns: false, container: &CONTAINER })
    }

    /// Reads a tensor as its description has it: `at` counts from the start of the tensors' bytes, and `len` is where
    /// the description is in the file, below its type. A file may have millions of tensors: no more is kept of each.
    fn tensor(&mut self, no_type: &Arc<str>) -> Result<Arc<Tensor>, HeaderError> {
        const { assert!(MAX_HEADER <= u32::MAX as u64) };
        let described = self.at << 32;
        let name = self.text()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            let defect = FormatError::too_many("dimensions", dims.into(), MAX_DIMS.into());
            return Err(HeaderError::Format(defect.in_tensor(&name, FileOffset::new(described >> 32))));
        }
        // The file names the fastest dimension first; shapes here name it last.
        let mut shape = (0..dims).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let (len, at) = (described | u64::from(self.u32()?), FileOffset::new(self.u64()?));
        Ok(Arc::new(Tensor { name, dtype: no_type.clone(), shape: shape.into(), at, len }))
    }

    /// Reads a value, as text where it is a short scalar or text.
    fn value(&mut self, kind: u32, depth: u32) -> Result<Option<String>, HeaderError> {
        let text = match kind {
            0 => self.array::<1>()?[0].to_string(),
            1 => i8::from_le_bytes(self.array()?).to_string(),
            2 => u16::from_le_bytes(self.array()?).to_string(),
            3 => i16::from_le_bytes(self.array()?).to_string(),
            4 => self.u32()?.to_string(),
            5 => i32::from_le_bytes(self.array()?).to_string(),
            6 => float(f32::from_le_bytes(self.array()?)),
            7 => (self.array::<1>()?[0] != 0).to_string(),
            8 => {
                let len = self.u64()?;
                if len > MAX_TEXT {
                    return self.skip(len).map(|()| None);
                }
                // Of a name every byte counts; a value is for people.
                String::from_utf8_lossy(&self.bytes_of(len)?).into_owned()
            }
            9 => return self.skip_array(depth).map(|()| None),
            10 => self.u64()?.to_string(),
            11 => i64::from_le_bytes(self.array()?).to_string(),
            12 => float(f64::from_le_bytes(self.array()?)),
            kind => return self.unknown("a value", kind),
        };
        Ok(Some(text))
    }

    /// A value, or an array of values, of a type that the format does not have.
    fn unknown<T>(&self, what: &str, kind: u32) -> Result<T, HeaderError> {
        bad(FormatError::new(format_args!("{what} of unknown type {kind} at {}", FileOffset::new(self.at))))
    }

    fn skip_array(&mut self, depth: u32) -> Result<(), HeaderError> {
        let kind = self.u32()?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => 0,
            9 if depth < MAX_DEPTH => 0,
            9 => return bad(FormatError::new(format_args!("arrays lie more than {MAX_DEPTH} deep in each other"))),
            _ => return self.unknown("an array", kind),
        };
        // Texts and arrays start with their length.
        let count = self.count(if width == 0 { 8 } else { width })?;
        if width > 0 {
            return self.skip(count * width);
        }
        for _ in 0..count {
            match kind {
                8 => {
                    let len = self.u64()?;
                    self.skip(len)?;
                }
                _ => self.skip_array(depth + 1)?,
            }
        }
        Ok(())
    }

    /// A number of things of at least `least` bytes each, which must fit the rest of the header.
    fn count(&mut self, least: u64) -> Result<u64, HeaderError> {
        let count = self.u64()?;
        match count.checked_mul(least) {
            Some(bytes) if bytes <= self.len - self.at => Ok(count),
            _ => {
                let at = FileOffset::new(self.at - 8);
                bad(FormatError::new(format_args!("a count of {count} at {at} is more than the file can hold")))
            }
        }
    }

    fn text(&mut self) -> Result<String, HeaderError> {
        let len = self.u64()?;
        self.text_of(len)
    }

    fn text_of(&mut self, len: u64) -> Result<String, HeaderError> {
        let at = self.at;
        String::from_utf8(self.bytes_of(len)?)
            .map_err(|e| HeaderError::Format(FormatError::not_utf8(at + e.utf8_error().valid_up_to() as u64)))
    }

    fn bytes_of(&mut self, len: u64) -> Result<Vec<u8>, HeaderError> {
        self.has(len)?;
        let mut bytes = vec![0; len as usize];
        self.input.read_exact(&mut bytes).map_err(HeaderError::Io)?;
        self.at += len;
        Ok(bytes)
    }

    fn skip(&mut self, len: u64) -> Result<(), HeaderError> {
        self.has(len)?;
        let skipped = io::copy(&mut self.input.by_ref().take(len), &mut io::sink()).map_err(HeaderError::Io)?;
        self.at += len;
        if skipped == len { Ok(()) } else { Err(HeaderError::Io(io::ErrorKind::UnexpectedEof.into())) }
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        self.array().map(u64::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        self.has(N as u64)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(HeaderError::Io)?;
        self.at += N as u64;
        Ok(bytes)
    }

    /// Refuses what does not follow in the header.
    fn has(&self, len: u64) -> Result<(), HeaderError> {
        if len <= self.len - self.at {
            return Ok(());
        }
        bad(match self.len < self.file {
            true => FormatError::too_long(MAX_HEADER),
            false => FormatError::cut_off(self.at, len),
        })
    }
}

/// A number as text, which is short: written out, the smallest one has 326 characters.
fn float<F: Into<f64> + Display + LowerExp + Copy>(value: F) -> String {
    let size: f64 = value.into().abs();
    if size == 0.0 || !size.is_finite() || (1e-5..1e16).contains(&size) {
        value.to_string()
    } else {
        format!("{value:e}")
    }
}

/// Bytes of a file behind its last tensor and the padding of that: a file may have them, and has none as it is written.
/// 0 for other kinds of files.
pub(crate) fn behind(model: &Model) -> u64 {
    let Some(last) = model.tensors.last().filter(|_| model.container == &CONTAINER) else { return 0 };
    let pairs = model.metadata.iter().flatten();
    let alignment = pairs.filter(|(key, _)| key == "general.alignment").find_map(|(_, value)| value.parse().ok());
    let end = last.at.bits().saturating_add(last.len);
    model.len.saturating_sub(end.checked_next_multiple_of(alignment.unwrap_or(ALIGNMENT)).unwrap_or(end))
}

/// Puts described tensors in the order of their bytes, and completes them.
fn place(
    mut tensors: Vec<Arc<Tensor>>,
    start: u64,
    alignment: u64,
    file: u64,
) -> Result<Vec<Arc<Tensor>>, FormatError> {
    // Where several start at one place, those of no bytes come first.
    tensors.sort_unstable_by_key(|t| (t.at, !t.shape.contains(&0), t.len >> 32));
    let name = |i: &u32| &*tensors[*i as usize].name;
    let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
    by_name.sort_unstable_by_key(name);
    if let Some(twice) = by_name.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
        return Err(in_header(FormatError::twice("tensor", name(&twice[0]))));
    }
    drop(by_name);
    let (mut types, mut unknown) = (TypeNames(Vec::new()), 0);
    for i in 0..tensors.len() {
        let next = tensors.get(i + 1).map_or(Some(file), |next| start.checked_add(next.at.bits()));
        let Tensor { name, dtype, shape, at: first, len } = Arc::make_mut(&mut tensors[i]);
        let (at, number) = (FileOffset::new(*len >> 32), *len as u32);
        let wrong = |source: FormatError| source.in_tensor(name, at);
        let overflow = || wrong(FormatError::overflow());
        let offset = first.bits();
        *first = FileOffset::new(start.checked_add(offset).ok_or_else(overflow)?);
        if offset % alignment != 0 {
            return Err(wrong(FormatError::new(format_args!("offset {offset} is not a multiple of {alignment}"))));
        }
        (*dtype, *len) = match TYPES.iter().find(|known| known.0 == number) {
            Some((_, name, block, bytes)) => {
                let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim)).ok_or_else(overflow)?;
                if shape.last().is_some_and(|row| row % block != 0) {
                    let text = format!("a row is not made of whole blocks of {block} elements");
                    return Err(wrong(FormatError::new(text)));
                }
                (
                    types.get(number, |_| (*name).to_owned()),
                    elements.div_ceil(*block).checked_mul(*bytes).ok_or_else(overflow)?,
                )
            }
            // A type that came later: all bytes up to the next tensor.
            None => {
                let name = types.get(number, |number| {
                    unknown += 1;
                    format!("type {number}")
                });
                if unknown > MAX_UNKNOWN {
                    return Err(wrong(FormatError::too_many("unknown types", unknown, MAX_UNKNOWN)));
                }
                (name, next.and_then(|next| next.checked_sub(first.bits())).ok_or_else(overflow)?)
            }
        };
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::detect;
    use std::path::Path;

    /// Writes a header, the plain way.
    struct Writer(Vec<u8>);

    impl Writer {
        fn new(version: u32, tensors: u64, pairs: u64) -> Self {
            let mut this = Self(MAGIC.to_vec());
            this.0.extend(version.to_le_bytes());
            this.0.extend(tensors.to_le_bytes());
            this.0.extend(pairs.to_le_bytes());
            this
        }

        fn text(mut self, text: &str) -> Self {
            self.0.extend((text.len() as u64).to_le_bytes());
            self.0.extend(text.bytes());
            self
        }

        fn u32(mut self, value: u32) -> Self {
            self.0.extend(value.to_le_bytes());
            self
        }

        fn u64(mut self, value: u64) -> Self {
            self.0.extend(value.to_le_bytes());
            self
        }

        fn tensor(self, name: &str, dims: &[u64], dtype: u32, offset: u64) -> Self {
            let this = self.text(name).u32(dims.len() as u32);
            dims.iter().fold(this, |this, dim| this.u64(*dim)).u32(dtype).u64(offset)
        }

        /// The file: tensors' bytes of this length follow, aligned.
        fn file(mut self, alignment: usize, data: usize) -> Vec<u8> {
            self.0.resize(self.0.len().next_multiple_of(alignment) + data, 0);
            self.0
        }
    }

    fn parsed(file: &[u8]) -> Result<Model, String> {
        let model = parse_header(file, file.len() as u64).map_err(|e| match e {
            HeaderError::Format(e) => e.to_string(),
            HeaderError::Io(e) => e.to_string(),
        })?;
        model.check().map_err(|e| e.to_string())?;
        Ok(model)
    }

    /// Of tensors that start at one place, those of no bytes come first, in whichever order the header has them.
    #[test]
    fn tensors_of_no_bytes_share_a_place() {
        let w = Writer::new(3, 4, 0).tensor("full", &[16], 0, 0).tensor("empty", &[4, 0], 0, 0);
        let model = parsed(&w.tensor("next", &[8], 0, 64).tensor("none", &[0], 0, 64).file(32, 96)).unwrap();
        let names: Vec<_> = model.tensors.iter().map(|t| &*t.name).collect();
        assert_eq!(names, ["empty", "full", "none", "next"]);
        let start = model.tensors[0].at;
        assert_eq!(model.tensor_at(start).map(|t| &*t.name), Some("full"));
    }

    #[test]
    fn names_in_messages_are_cut() {
        let (name, header) = ("\u{7f}".repeat(1_000_000), |tensors| Writer::new(3, tensors, 0));
        let wrong = [
            header(2).tensor(&name, &[8], 0, 0).tensor(&name, &[8], 0, 32),
            header(1).tensor(&name, &[1; MAX_DIMS as usize + 1], 0, 0),
            header(1).tensor(&name, &[8], 0, 1),
            header(1).tensor(&name, &[1 << 20], 0, 0),
        ];
        for file in wrong {
            let error = parsed(&file.file(32, 64)).unwrap_err();
            assert!(error.len() < 2500 && error.contains("..."), "{}", error.len());
        }
    }

    fn model() -> Writer {
        // Every type of value, and arrays of arrays; two tensors, the second one first.
        let mut w = Writer::new(3, 3, 5).text("general.alignment").u32(4).u32(64);
        w = w.text("general.name").u32(8).text("tiny").text("scores").u32(9).u32(6).u64(3).u32(1).u32(2).u32(3);
        w = w.text("words").u32(9).u32(8).u64(2).text("a").text("bc");
        w = w.text("nested").u32(9).u32(9).u64(1).u32(0).u64(3);
        w.0.extend([1, 2, 3]);
        w.tensor("second", &[64, 2], 2, 128).tensor("first", &[8, 3], 0, 0).tensor("later", &[5], 77, 256)
    }

    #[test]
    fn tensors_and_short_values_are_found() {
        let file = model().file(64, 256 + 40);
        let model = parsed(&file).unwrap();
        let start = file.len() as u64 - 296;
        let found: Vec<_> =
            model.tensors.iter().map(|t| (&*t.name, &*t.dtype, t.shape.to_vec(), t.at.bits() - start, t.len)).collect();
        assert_eq!(
            found,
            [
                ("first", "F32", vec![3, 8], 0, 96),
                ("second", "Q4_0", vec![2, 64], 128, 72),
                ("later", "type 77", vec![5], 256, 40),
            ]
        );
        let pairs = [("general.alignment", "64"), ("general.name", "tiny")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!((model.metadata.as_deref(), model.container), (Some(&pairs[..]), &CONTAINER));
        assert_eq!(detect(Path::new("x.bin"), &file[..16]), &CONTAINER);
        // A web page that was saved under the file's name is damage, not a model of one run of bytes.
        assert_eq!(detect(Path::new("x.GGUF"), b"<!DOCTYPE html>"), &CONTAINER);
        assert!(parsed(b"<!DOCTYPE html>").is_err());
        assert_eq!([0.1f32, 0.0, 1e9, f32::MIN_POSITIVE].map(float), ["0.1", "0", "1000000000", "1.1754944e-38"]);
        assert_eq!([5e-324, -1e300, f64::NAN].map(float), ["5e-324", "-1e300", "NaN"]);
        // Version 2 has the same layout.
        let empty = Writer::new(2, 0, 0).file(32, 0);
        assert_eq!(parsed(&empty).unwrap().tensors, []);
    }

    #[test]
    fn every_prefix_and_every_changed_byte_is_an_answer() {
        let file = model().file(64, 256 + 40);
        for len in 0..file.len() - 296 {
            assert!(parsed(&file[..len]).is_err(), "{len} bytes");
        }
        for at in 0..file.len() - 296 {
            for flip in [1, 0x80, 0xff] {
                let mut bytes = file.clone();
                bytes[at] ^= flip;
                if let Ok(model) = parsed(&bytes) {
                    for pair in model.tensors.windows(2) {
                        assert!(pair[0].at.bits() + pair[0].len <= pair[1].at.bits(), "{at}");
                    }
                    assert!(model.tensors.iter().all(|t| t.at.bits() + t.len <= bytes.len() as u64));
                }
            }
        }
    }

    #[test]
    fn bytes_behind_the_last_tensor_are_counted() {
        let file = || Writer::new(3, 1, 0).tensor("t", &[8], 0, 0).file(32, 32);
        let aligned = Writer::new(3, 1, 1).text("general.alignment").u32(4).u32(64).tensor("t", &[8], 0, 0);
        for (file, wanted) in [
            (file(), 0),
            ([file(), b"behind".to_vec()].concat(), 6),
            ([file(), file()].concat(), file().len() as u64),
            (aligned.file(64, 64), 0),
            (Writer::new(3, 0, 0).file(32, 64), 0),
        ] {
            assert_eq!(behind(&parsed(&file).unwrap()), wanted);
        }
    }

    /// A value of arrays in arrays.
    fn deep(depth: u32) -> Writer {
        let w = Writer::new(3, 0, 1).text("a").u32(9);
        let w = (1..depth).fold(w, |w, _| w.u32(9).u64(1));
        w.u32(4).u64(1).u32(7)
    }

    #[test]
    fn values_that_other_readers_take_are_no_defect() {
        let mut w = Writer::new(3, 0, 1).text("k").u32(8).u64(3);
        w.0.extend([b'a', 0xff, b'b']);
        let model = parsed(&w.file(32, 0)).unwrap();
        assert_eq!(model.metadata.as_deref(), Some(&[("k".to_owned(), "a\u{fffd}b".to_owned())][..]));
        for depth in [1, 7, MAX_DEPTH] {
            parsed(&deep(depth).file(32, 0)).unwrap();
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let one = |w: Writer| parsed(&w.file(32, 4096)).unwrap_err();
        for (error, says) in [
            (one(Writer::new(1, 0, 0)), "version 1 is not supported"),
            (one(Writer::new(3 << 24, 0, 0)), "big-endian"),
            (one(Writer::new(3, 1 << 60, 0)), "more than the file can hold"),
            (one(Writer::new(3, 0, u64::MAX)), "more than the file can hold"),
            (one(Writer::new(3, 0, 1).text("a").u32(13).u64(0)), "unknown type 13"),
            (one(Writer::new(3, 0, 1).text("a").u32(8).u64(1 << 50)), "beyond the end"),
            (one(Writer::new(3, 0, 1).text("a").u32(9).u32(0).u64(1 << 62)), "more than the file can hold"),
            (one(Writer::new(3, 0, 1).text("general.alignment").u32(4).u32(12)), "not a multiple of 8"),
            (
                one(Writer::new(3, 0, 1).text("general.alignment").u32(5).u32(-32i32 as u32)),
                "is of type 5, not of type 4",
            ),
            (one(Writer::new(3, 0, 1).text("general.alignment").u32(8).text("32")), "is of type 8, not of type 4"),
            (one(Writer::new(3, 0, 2).text("k").u32(4).u32(1).text("k").u32(8).text("v")), "key \"k\""),
            (one(deep(MAX_DEPTH + 2)), "arrays lie more than 64 deep in each other"),
            (one(Writer::new(3, 1, 0).tensor("t", &[1; 9], 0, 0)), "9 dimensions"),
            (one(Writer::new(3, 1, 0).tensor("t", &[u64::MAX, 2], 0, 0)), "does not fit 64 bits"),
            (one(Writer::new(3, 1, 0).tensor("t", &[33], 2, 0)), "whole blocks of 32"),
            (one(Writer::new(3, 1, 0).tensor("t", &[8], 0, 8)), "not a multiple of 32"),
            (one(Writer::new(3, 1, 0).tensor("t", &[1024], 0, 32)), "has only"),
            (
                one(Writer::new(3, 2, 0).tensor("t", &[16], 0, 0).tensor("u", &[16], 0, 32)),
                "within the tensor before it",
            ),
            (
                one(Writer::new(3, 2, 0).tensor("t", &[16], 0, 0).tensor("empty", &[0], 0, 32)),
                "within the tensor before it",
            ),
            (one(Writer::new(3, 2, 0).tensor("t", &[8], 0, 0).tensor("t", &[8], 0, 32)), "listed twice"),
        ] {
            assert!(error.contains(says), "{error}, not {says}");
        }
    }
}
