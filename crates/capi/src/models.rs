//! Models in host memory, behind the numbers that C holds.

use std::ops::{ControlFlow, Range};
use std::sync::Mutex;

use dmalane::load::{HostTensor, Next, TensorStream};
use dmalane::{HostModel, ModelOptions};
use dmalane_vm::Errno;

use crate::buffers;
use crate::objects::{Numbered, Refused, lock};

static MODELS: Mutex<Numbered<HostModel>> = Mutex::new(Numbered::new());
static TENSORS: Mutex<Numbered<HostTensor>> = Mutex::new(Numbered::new());
static STREAMS: Mutex<Numbered<Mutex<TensorStream>>> = Mutex::new(Numbered::new());

/// How often a stream that waits looks whether memory has come back.
const EVERY: std::time::Duration = std::time::Duration::from_millis(40);

/// A tensor of a model, as C sees it.
pub(crate) struct Described {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) len: u64,
}

/// A tensor in host memory: its number, the address of its bytes, and how many there are.
pub(crate) type Placed = (u64, *mut u8, u64);

/// Opens files; directories and indices stand for theirs.
pub(crate) fn open(paths: &[&str], flags: u32, memory_limit: u64) -> Result<u64, Refused> {
    let mode = buffers::mode(flags)?;
    let memory_limit = (memory_limit > 0).then_some(memory_limit);
    let model = HostModel::open(paths, ModelOptions { mode, memory_limit, ..ModelOptions::default() })?;
    Ok(lock(&MODELS).add(model))
}

pub(crate) fn get(model: u64) -> Result<std::sync::Arc<HostModel>, Refused> {
    lock(&MODELS).get(model, "model")
}

/// The tensor with this number, in the order of the files and of their bytes.
pub(crate) fn describe(model: u64, index: u64) -> Result<Described, Refused> {
    let model = get(model)?;
    let found = model.tensors().nth(usize::try_from(index).unwrap_or(usize::MAX));
    let tensor = found.ok_or_else(|| crate::objects::none(index, "tensor"))?;
    let (name, dtype) = (tensor.name.clone(), tensor.dtype.to_string());
    Ok(Described { name, dtype, shape: tensor.dims(), len: tensor.len })
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
    let (at, len) = (tensor.as_volatile_slice().as_ptr(), tensor.len as u64);
    (lock(&TENSORS).add(tensor), at, len)
}

/// Begins to read all tensors in the order of their bytes.
pub(crate) fn stream(model: u64) -> Result<u64, Refused> {
    let stream = get(model)?.stream(None)?;
    Ok(lock(&STREAMS).add(Mutex::new(stream)))
}

/// The next tensor of a stream, with its name; `None` at the end.
pub(crate) fn next(stream: u64) -> Result<Option<(String, Placed)>, Refused> {
    let stream = lock(&STREAMS).get(stream, "stream")?;
    let mut stream = lock(&stream);
    loop {
        match stream.next_within(EVERY)? {
            Next::Tensor(tensor) => return Ok(Some((tensor.tensor.name.clone(), add(tensor)))),
            Next::End => return Ok(None),
            Next::Pending | Next::NeedsMemory => {}
        }
    }
}

pub(crate) fn release(tensor: u64) -> Result<(), Refused> {
    let tensor = lock(&TENSORS).remove_object(tensor, "tensor")?;
    drop(tensor);
    Ok(())
}

pub(crate) fn end_stream(stream: u64) -> Result<(), Refused> {
    let stream = lock(&STREAMS).remove_object(stream, "stream")?;
    drop(stream);
    Ok(())
}

pub(crate) fn close(model: u64) -> Result<(), Refused> {
    let model = lock(&MODELS).remove_object(model, "model")?;
    drop(model);
    Ok(())
}

/// The longest shape that C gets.
pub(crate) const DIMS: usize = 8;

/// A shape for C.
pub(crate) fn shape(of: &[u64]) -> Result<[u64; DIMS], Refused> {
    let mut shape = [0; DIMS];
    let room = shape.get_mut(..of.len());
    let room = room.ok_or_else(|| Refused::new(Errno::Overflow, format_args!("{} dimensions", of.len())))?;
    room.copy_from_slice(of);
    Ok(shape)
}
