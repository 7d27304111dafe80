//! Models in host memory, behind the numbers that C holds.

use std::ops::{ControlFlow, Range};
use std::sync::Mutex;

use dmalane::load::{HostTensor, Next, Tensor, TensorStream};
use dmalane::{HostModel, ModelOptions};
use dmalane_vm::Errno;

use crate::buffers;
use crate::objects::{Numbered, Refused, lock, none, remove};
use crate::types::{DmlFilled, DmlModelConfig, DmlModelTensor};

static MODELS: Mutex<Numbered<HostModel>> = Mutex::new(Numbered::new());
static TENSORS: Mutex<Numbered<HostTensor>> = Mutex::new(Numbered::new());
static STREAMS: Mutex<Numbered<Mutex<TensorStream>>> = Mutex::new(Numbered::new());

/// How often a stream that waits looks whether memory has come back.
const EVERY: std::time::Duration = std::time::Duration::from_millis(40);

/// A tensor in host memory: its number and its bytes.
type Placed = (u64, DmlFilled);

/// Opens files; directories and indices stand for theirs.
pub(crate) fn open(paths: &[&str], config: &DmlModelConfig) -> Result<u64, Refused> {
    if config.zero != 0 {
        return Err(Refused::new(Errno::Inval, "a field that is not 0"));
    }
    let mode = buffers::mode(config.flags)?;
    let memory_limit = (config.memory_limit > 0).then_some(config.memory_limit);
    let model = HostModel::open(paths, ModelOptions { mode, memory_limit, ..ModelOptions::default() })?;
    Ok(lock(&MODELS).add(model))
}

pub(crate) fn get(model: u64) -> Result<std::sync::Arc<HostModel>, Refused> {
    lock(&MODELS).get(model, "model")
}

/// The tensor with this number, in the order of the files and of their bytes, and its name.
pub(crate) fn describe(model: u64, index: u64) -> Result<(DmlModelTensor, String), Refused> {
    let model = get(model)?;
    let found = model.tensors().nth(usize::try_from(index).unwrap_or(usize::MAX));
    type_of(found.ok_or_else(|| none(index, "tensor"))?)
}

/// The type and the shape of a tensor, and its name.
pub(crate) fn type_of(tensor: &Tensor) -> Result<(DmlModelTensor, String), Refused> {
    let (name, dims) = (tensor.name.clone(), tensor.dims());
    let mut described = DmlModelTensor {
        len: tensor.len,
        name_len: name.len() as u64,
        dims: dims.len() as u64,
        ..DmlModelTensor::default()
    };
    let shape = described.shape.get_mut(..dims.len());
    let shape = shape.ok_or_else(|| Refused::new(Errno::Overflow, format_args!("{} dimensions", dims.len())))?;
    shape.copy_from_slice(&dims);
    // The last byte stays a zero.
    let room = described.dtype.len() - 1;
    described.dtype.iter_mut().zip(tensor.dtype.bytes().take(room)).for_each(|(to, byte)| *to = byte);
    Ok((described, name))
}

/// Reads a tensor, or a slice of one.
pub(crate) fn read(model: u64, name: &str, ranges: Option<&[Range<u64>]>) -> Result<Placed, Refused> {
    let model = get(model)?;
    let mut go = |_| ControlFlow::Continue(());
    let tensor = match ranges {
        None => model.read(name, &mut go)?,
        Some(ranges) => {
            let shape = ranges.iter().map(|range| range.end.saturating_sub(range.start)).collect();
            model.slice(name, ranges, shape, &mut go)?
        }
    };
    Ok(add(tensor))
}

fn add(tensor: HostTensor) -> Placed {
    let filled = DmlFilled { data: tensor.as_volatile_slice().as_ptr().cast(), len: tensor.len as u64, checksum: 0 };
    (lock(&TENSORS).add(tensor), filled)
}

/// Begins to read all tensors in the order of their bytes.
pub(crate) fn stream(model: u64) -> Result<u64, Refused> {
    let stream = get(model)?.stream(None)?;
    Ok(lock(&STREAMS).add(Mutex::new(stream)))
}

/// The next tensor of a stream, with its name.
pub(crate) fn next(number: u64) -> Result<(String, Placed), Refused> {
    let stream = lock(&STREAMS).get(number, "stream")?;
    let mut stream = lock(&stream);
    loop {
        match stream.next_within(EVERY)? {
            Next::Tensor(tensor) => return Ok((tensor.tensor.name.clone(), add(tensor))),
            Next::End => return Err(Refused::new(Errno::NoEnt, "no tensor is left")),
            // Another thread may have destroyed it meanwhile.
            Next::Pending | Next::NeedsMemory => drop(lock(&STREAMS).get(number, "stream")?),
        }
    }
}

pub(crate) fn release(tensor: u64) -> Result<(), Refused> {
    remove(&TENSORS, tensor, "tensor")
}

pub(crate) fn end_stream(stream: u64) -> Result<(), Refused> {
    remove(&STREAMS, stream, "stream")
}

pub(crate) fn close(model: u64) -> Result<(), Refused> {
    remove(&MODELS, model, "model")
}
