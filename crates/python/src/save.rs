//! Writing safetensors files, and other targets, from memory of Python.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::PathBuf;

use dmalane::load::Output;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PySlice;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::failure::Failure;

/// Bytes that are copied out of Python's memory at a time, with the interpreter's lock.
const BLOCK: usize = 1 << 20;

/// Name, type, shape, and the bytes as a `memoryview` of format "B".
type Described<'py> = (String, String, Vec<usize>, Bound<'py, PyAny>);

/// Writes a file with these tensors, in the order and with the header of the crate `safetensors`. It appears whole or
/// not at all. Returns its bytes.
#[pyfunction]
#[pyo3(signature = (path, tensors, metadata, overwrite))]
pub(crate) fn save_file(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<Described<'_>>,
    metadata: Option<HashMap<String, String>>,
    overwrite: bool,
) -> PyResult<u64> {
    let mut sorted = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let dtype: Dtype = serde_json::from_value(dtype.clone().into())
            .map_err(|_| PyTypeError::new_err(format!("tensor {name:?}: safetensors has no type {dtype:?}")))?;
        let len = bytes.len()?;
        sorted.push((name, dtype, shape, bytes, len));
    }
    // As the library's own writer: by alignment, then by name.
    sorted.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let (mut infos, mut end) = (Vec::new(), 0usize);
    for (name, dtype, shape, _, len) in &sorted {
        let start = end;
        end = end.checked_add(*len).ok_or_else(|| PyValueError::new_err("the sizes do not fit 64 bits"))?;
        infos.push((name.clone(), TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (start, end) }));
    }
    let header = Metadata::new(metadata, infos).map_err(|e| PyValueError::new_err(e.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|e| PyValueError::new_err(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut raised = None;
    let output = Output::new(&path).replace(overwrite);
    let written = output.write_with(|out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        let mut write = |_, block: &[u8]| {
            out.write_all(block).map_err(|e| {
                Failure::new("FileError", format!("{}: cannot write: {e}", path.display())).path(&path).io(&e)
            })
        };
        sorted.iter().try_for_each(|(.., bytes, _)| each_block(py, bytes, &mut write)).map_err(|error| {
            raised = Some(error);
            io::Error::other("the tensors cannot be read")
        })
    });
    match (raised, written) {
        (Some(error), _) => Err(error),
        (None, written) => {
            written.map_err(Failure::from)?;
            Ok(8 + header.len() as u64 + end as u64)
        }
    }
}

/// Copies the bytes of a `memoryview` of format "B" out block by block, and hands each, with its offset, to `sink`,
/// without the interpreter's lock.
pub(crate) fn each_block(
    py: Python<'_>,
    bytes: &Bound<'_, PyAny>,
    mut sink: impl FnMut(usize, &[u8]) -> Result<(), Failure> + Send,
) -> PyResult<()> {
    let len = bytes.len()?;
    let mut block = vec![0; BLOCK.min(len)];
    let mut done = 0;
    while done < len {
        let n = block.len().min(len - done);
        let (from, to) = (isize::try_from(done)?, isize::try_from(done + n)?);
        let part = bytes.get_item(PySlice::new(py, from, to, 1))?;
        PyBuffer::<u8>::get(&part)?.copy_to_slice(py, &mut block[..n])?;
        py.detach(|| sink(done, &block[..n]))?;
        py.check_signals()?;
        done += n;
    }
    Ok(())
}
