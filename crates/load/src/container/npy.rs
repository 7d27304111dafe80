//! NumPy's `.npy` files: one array behind a short header.
//!
//! Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>, versions 1 to 3: a magic number,
//! the length of the header, and a Python dictionary with the type, the order and the shape, then the array's bytes.

use std::sync::Arc;

use dmalane_addr::FileOffset;

use super::file::ContainerFile;
use super::format_error::FormatError;
use super::model::{Container, Model};
use super::tensor::Tensor;
use super::text::short;
use crate::error::Error;

/// The first bytes of every file.
const MAGIC: &[u8] = b"\x93NUMPY";
/// The most bytes of a header; NumPy itself reads 10000.
const MAX_HEADER: u64 = 64 << 10;

/// The kind.
pub static CONTAINER: Container = Container {
    name: "npy",
    title: "NumPy",
    extensions: &["npy"],
    magic: &[MAGIC],
    resembles: None,
    in_folders: false,
    parse_header: Some(parse_header),
    parse,
};

/// The array of a file, with the file's name without its extension.
pub(super) fn parse(file: &ContainerFile<'_>) -> Result<Model, Error> {
    let head = file.read(0, file.len.min(12 + MAX_HEADER))?;
    let name = file.path.file_stem().unwrap_or_default().to_string_lossy();
    parse_header(&head, file.len, &name).map_err(|e| file.bad(e))
}

/// The array of a file of `len` bytes that begins with `head`: all of it, or 64 KiB and 12 bytes.
///
/// # Errors
/// [`FormatError`]; the array's bytes are all that follows the header.
pub fn parse_header(head: &[u8], len: u64, name: &str) -> Result<Model, FormatError> {
    let bad = |source: FormatError| source.within("bad NumPy header");
    let wrong = |text: &str| bad(FormatError::new(text));
    let cut_off = |at: u64, len: u64| bad(FormatError::cut_off(at, len));
    let version = *head
        .get(MAGIC.len())
        .filter(|_| head.starts_with(MAGIC))
        .ok_or_else(|| wrong("it does not start with the magic number of NumPy"))?;
    let word = |n: usize| head.get(8..8 + n).ok_or_else(|| cut_off(8, n as u64));
    let (start, text) = match version {
        1 => (10, word(2)?.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))),
        2 | 3 => (12, word(4)?.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))),
        found => return Err(bad(FormatError::version(found.into(), "1 to 3"))),
    };
    if text > MAX_HEADER {
        return Err(bad(FormatError::too_long(MAX_HEADER)));
    }
    let data = start + text;
    let text = head.get(start as usize..data as usize).ok_or_else(|| cut_off(start, text))?;
    let text = std::str::from_utf8(text).map_err(|e| FormatError::not_utf8(start + e.valid_up_to() as u64))?;
    let value = |key: &'static str| {
        let after = text.split_once(&format!("'{key}'")).map(|(_, after)| after.trim_start());
        let value = after.and_then(|after| Some(after.strip_prefix(':')?.trim_start()));
        value.ok_or_else(|| wrong(&format!("it has no {key:?}")))
    };
    let descr = value("descr")?;
    let descr = descr.strip_prefix('\'').and_then(|rest| Some(rest.split_once('\'')?.0));
    let descr = descr.ok_or_else(|| wrong("arrays of records are not supported"))?;
    let (dtype, bytes) =
        element(descr).ok_or_else(|| wrong(&format!("the type {:?} is not supported", short(descr))))?;
    let by_columns = value("fortran_order")?.starts_with("True");
    let shape = value("shape")?.strip_prefix('(').and_then(|rest| Some(rest.split_once(')')?.0));
    let bad_shape = || wrong("its shape is not a tuple of numbers");
    let shape = shape.ok_or_else(bad_shape)?;
    let dims = shape.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    // Python 2 wrote `(2L, 3L)`.
    let dims = dims.map(|dim| dim.strip_suffix('L').unwrap_or(dim).parse());
    let mut shape: Box<[u64]> = dims.collect::<Result<_, _>>().map_err(|_| bad_shape())?;
    let size = shape.iter().try_fold(bytes, |n: u64, dim| n.checked_mul(*dim));
    let end = size.and_then(|size| data.checked_add(size)).ok_or_else(|| bad(FormatError::overflow()))?;
    if end > len {
        return Err(FormatError::beyond_end(name, end, len));
    }
    if end < len {
        return Err(FormatError::trailing(end, len));
    }
    // With elements along one dimension at most there is no order. By columns, the bytes are those of the transposed
    // array by rows.
    let by_columns = by_columns && shape.iter().filter(|dim| **dim != 1).count() > 1 && !shape.contains(&0);
    if by_columns {
        shape.reverse();
    }
    let (name, dtype, at) = (name.to_owned(), dtype.into(), FileOffset::new(data));
    let tensors = vec![Arc::new(Tensor { name, dtype, shape, at, len: end - data })];
    let metadata = by_columns.then(|| vec![("fortran_order".to_owned(), "True".to_owned())]);
    Ok(Model { len, tensors, metadata, by_columns, container: &CONTAINER })
}

/// The type of little-endian elements in the words of safetensors, and the bytes of one.
fn element(descr: &str) -> Option<(&'static str, u64)> {
    let kind = match descr.split_at_checked(1)? {
        ("<" | "|", kind) => kind,
        // The order of bytes matters to more than one of them.
        (">" | "=", kind) if kind.ends_with('1') => kind,
        _ => return None,
    };
    Some(match kind {
        "b1" => ("BOOL", 1),
        "i1" => ("I8", 1),
        "i2" => ("I16", 2),
        "i4" => ("I32", 4),
        "i8" => ("I64", 8),
        "u1" => ("U8", 1),
        "u2" => ("U16", 2),
        "u4" => ("U32", 4),
        "u8" => ("U64", 8),
        "f2" => ("F16", 2),
        "f4" => ("F32", 4),
        "f8" => ("F64", 8),
        "c8" => ("C64", 8),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::detect;
    use std::path::Path;

    /// A file as `numpy.save` writes it.
    fn file(version: u8, dictionary: &str, data: usize) -> Vec<u8> {
        let mut bytes = [MAGIC, &[version, 0]].concat();
        let width = if version == 1 { 2 } else { 4 };
        let text = (dictionary.len() + 1).next_multiple_of(64) - 8 - width + 64;
        bytes.extend(&(text as u32).to_le_bytes()[..width]);
        bytes.extend(format!("{dictionary:<0$}\n", text - 1).bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Result<Model, String> {
        parse_header(bytes, bytes.len() as u64, "weights").map_err(|e| e.to_string())
    }

    #[test]
    fn a_file_that_is_only_called_so_is_damaged() {
        for head in [&b""[..], b"PK\x03\x04"] {
            assert_eq!(detect(Path::new("weights.npy"), head), &CONTAINER);
            assert!(parsed(head).unwrap_err().contains("does not start with the magic number"));
        }
    }

    #[test]
    fn arrays_are_found() {
        for (version, descr, order, shape, dims, dtype, bytes) in [
            (1, "<f4", "False", "(3, 4)", vec![3, 4], "F32", 48),
            (1, "<f4", "True", "(3, 4)", vec![4, 3], "F32", 48),
            (2, "|b1", "True", "(5,)", vec![5], "BOOL", 5),
            (1, "<f4", "False", "(3L, 4L)", vec![3, 4], "F32", 48),
            (3, "<c8", "False", "()", vec![], "C64", 8),
            (1, "<i8", "False", "(0, 9)", vec![0, 9], "I64", 0),
            (1, ">u1", "False", "(2,)", vec![2], "U8", 2),
        ] {
            let dictionary = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
            let bytes_of_file = file(version, &dictionary, bytes);
            let model = parsed(&bytes_of_file).unwrap();
            let tensor = &model.tensors[0];
            assert_eq!((&*tensor.name, &*tensor.dtype, &*tensor.shape), ("weights", dtype, &*dims), "{dictionary}");
            assert_eq!((tensor.at.bits() + tensor.len, tensor.len), (bytes_of_file.len() as u64, bytes as u64));
            let by_columns = order == "True" && dims.iter().filter(|dim| **dim != 1).count() > 1 && !dims.contains(&0);
            assert_eq!((model.metadata.is_some(), model.by_columns), (by_columns, by_columns));
            assert_eq!(detect(Path::new("x"), &bytes_of_file[..16]), &CONTAINER);
            // Every prefix, and every changed byte of the header, has an answer.
            for cut in 0..bytes_of_file.len() {
                assert!(parsed(&bytes_of_file[..cut]).is_err(), "{cut} bytes");
            }
            for at in 0..bytes_of_file.len() - bytes {
                for flip in [1, 0x80, 0xff] {
                    let mut changed = bytes_of_file.clone();
                    changed[at] ^= flip;
                    if let Ok(model) = parsed(&changed) {
                        assert_eq!(model.tensors[0].at.bits() + model.tensors[0].len, changed.len() as u64);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let of = |descr: &str, shape: &str| {
            let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}");
            parsed(&file(1, &text, 8)).unwrap_err()
        };
        for (error, says) in [
            (of("'<f4'", "(1,)"), "4 bytes follow"),
            (of("'<f4'", "(9,)"), "has only"),
            (of("'<f8'", "(18446744073709551615, 2)"), "does not fit 64 bits"),
            (of("'<f8'", "(-1,)"), "not a tuple of numbers"),
            (of("'<f8'", "1"), "not a tuple"),
            (of("'>f8'", "(1,)"), "\">f8\" is not supported"),
            (of("'|O'", "(1,)"), "is not supported"),
            (of("[('a', '<f4')]", "(1,)"), "records"),
            (parsed(&file(1, "{}", 8)).unwrap_err(), "no \"descr\""),
            (parsed(&file(4, "{}", 8)).unwrap_err(), "version 4"),
            (parsed(b"\x93NUMPY\x02\0\xff\xff\xff\xff").unwrap_err(), "more than the 65536"),
        ] {
            assert!(error.contains(says), "{error}, not {says}");
        }
    }
}
