//! Errors of the engine as Python exceptions of `dmalane.errors`, with their fields.

use std::path::Path;

use dmalane::load::fill::FillError;
use dmalane::load::{Difference, Error as LoadError};
use dmalane::queue::OpError;
use dmalane::{ModelError, OpenError, ReadError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Of errors that we have made without asking the kernel.
const ENOENT: i32 = 2;
const EEXIST: i32 = 17;

/// An error that becomes a Python exception when it reaches the interpreter.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The class in `dmalane.errors`, or Python's own `ValueError`.
    class: &'static str,
    message: String,
    fields: Vec<(&'static str, Field)>,
}

#[derive(Debug)]
enum Field {
    Number(u64),
    Text(String),
}

impl Failure {
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), fields: Vec::new() }
    }

    pub(crate) fn number(mut self, name: &'static str, value: u64) -> Self {
        self.fields.push((name, Field::Number(value)));
        self
    }

    pub(crate) fn text(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, Field::Text(value.into())));
        self
    }

    fn path(self, path: &Path) -> Self {
        self.text("path", path.display().to_string())
    }

    pub(crate) fn io(self, source: &std::io::Error) -> Self {
        let ours = match source.kind() {
            std::io::ErrorKind::NotFound => Some(ENOENT),
            std::io::ErrorKind::AlreadyExists => Some(EEXIST),
            _ => None,
        };
        match source.raw_os_error().or(ours) {
            Some(errno) => self.number("errno", u64::from(errno.unsigned_abs())),
            None => self,
        }
    }

    /// Bytes that the limit does not allow.
    pub(crate) fn limit(wanted: u64, limit: u64, message: impl Into<String>) -> Self {
        Self::new("MemoryLimitError", message).number("wanted", wanted).number("limit", limit)
    }

    /// The file was closed.
    pub(crate) fn closed() -> Self {
        Self::new("ClosedError", "it is closed")
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        if failure.class == "ValueError" {
            return PyValueError::new_err(failure.message);
        }
        Python::attach(|py| {
            let made = || {
                let class = py.import("dmalane.errors")?.getattr(failure.class)?;
                let fields = PyDict::new(py);
                for (name, field) in &failure.fields {
                    match field {
                        Field::Number(n) => fields.set_item(name, n)?,
                        Field::Text(text) => fields.set_item(name, text)?,
                    }
                }
                class.call((&failure.message,), Some(&fields))
            };
            match made() {
                Ok(exception) => PyErr::from_value(exception),
                // Without its package the extension has no classes of its own.
                Err(_) => PyRuntimeError::new_err(failure.message),
            }
        })
    }
}

fn of_operation(failure: Failure, error: &OpError) -> Failure {
    match error {
        OpError::Io { at, errno } => {
            failure.number("offset", at.bits()).number("errno", u64::from(errno.unsigned_abs()))
        }
        OpError::EndOfFile { at, .. } => failure.number("offset", at.bits()),
        _ => failure,
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let message = error.to_string();
        match error {
            ReadError::Open { path, source } => Self::new("FileError", message).path(&path).io(&source),
            ReadError::Read { path, error } => of_operation(Self::new("FileError", message).path(&path), &error),
            ReadError::PastEnd { path, size, .. } => {
                Self::new("ChangedError", message).path(&path).number("size", size)
            }
            ReadError::Changed { path, before, now } => {
                Self::new("ChangedError", message).path(&path).number("before", before).number("size", now)
            }
            ReadError::Limit { wanted, limit } => Self::limit(wanted, limit, message),
            ReadError::Fill(FillError::NoRoom { wanted, left, .. }) => Self::limit(wanted, left, message),
            ReadError::Fill(FillError::Cancelled { .. }) => Self::new("CancelledError", message),
            ReadError::Fill(FillError::Memory { .. }) => Self::new("OutOfMemoryError", message),
            ReadError::Fill(FillError::Map { .. } | FillError::Transfer { .. } | FillError::Refused { .. }) => {
                Self::new("DeviceError", message)
            }
            ReadError::File(_) => Self::new("FileError", message),
            _ => Self::new("Error", message),
        }
    }
}

impl From<dmalane::file::Error> for Failure {
    fn from(error: dmalane::file::Error) -> Self {
        let failure = Self::new("FileError", error.to_string());
        match &error {
            dmalane::file::Error::Open { path, source } => failure.path(path).io(source),
            _ => failure,
        }
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        let message = error.to_string();
        match error {
            LoadError::Format { path, source } => {
                let (tensor, at) = source.about();
                let failure = Self::new("FormatError", message).path(&path);
                let failure = tensor.into_iter().fold(failure, |failure, tensor| failure.text("tensor", tensor));
                at.into_iter().fold(failure, |failure, at| failure.number("offset", at.bits()))
            }
            LoadError::File { path, source, .. } => Self::new("FileError", message).path(&path).io(&source),
            LoadError::Changed { path, before, now } => {
                Self::new("ChangedError", message).path(&path).number("before", before).number("size", now)
            }
            LoadError::Read { path, at, tensor, source } => {
                let failure = Self::new("FileError", message).path(&path);
                let failure = match source {
                    OpError::Io { .. } | OpError::EndOfFile { .. } => of_operation(failure, &source),
                    _ => failure.number("offset", at.bits()),
                };
                tensor.into_iter().fold(failure, |failure, tensor| failure.text("tensor", tensor))
            }
            LoadError::Transfer { path, at, tensor, .. } => {
                let failure = Self::new("DeviceError", message).path(&path).number("offset", at.bits());
                tensor.into_iter().fold(failure, |failure, tensor| failure.text("tensor", tensor))
            }
            LoadError::Differs { differences } => {
                let failure = Self::new("IntegrityError", message);
                let Some(first) = differences.first() else { return failure };
                let failure = failure.text("path", first.file());
                let Difference::Changed { part, start, .. } = first else { return failure };
                let failure = failure.number("offset", *start);
                part.tensor().into_iter().fold(failure, |failure, tensor| failure.text("tensor", &*tensor.name))
            }
            LoadError::Fill(FillError::NoRoom { wanted, left, .. }) => Self::limit(wanted, left, message),
            LoadError::DeviceMemory { path, .. } => Self::new("OutOfMemoryError", message).path(&path),
            LoadError::Memory(_) => Self::new("OutOfMemoryError", message),
            _ => Self::new("DeviceError", message),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        let message = error.to_string();
        match error {
            ModelError::Load(error) => error.into(),
            ModelError::Read(error) => error.into(),
            ModelError::Memory(error) => error.into(),
            ModelError::Twice { path, tensor, .. } => {
                Self::new("FormatError", message).path(&path).text("tensor", tensor)
            }
            ModelError::Replaced { path, before, now } => {
                Self::new("ChangedError", message).path(&path).number("before", before).number("size", now)
            }
            ModelError::NoTensor(name) => Self::new("UnknownTensorError", message).text("tensor", name),
            ModelError::Limit { wanted, used, limit } => Self::limit(wanted, limit, message).number("used", used),
            ModelError::Unlisted { path, tensor } => {
                Self::new("IntegrityError", message).path(&path).text("tensor", tensor)
            }
            ModelError::Unchecked => Self::new("IntegrityError", message),
            ModelError::BadSlice(_) => Self::new("ValueError", message),
            ModelError::Cancelled => Self::new("CancelledError", message),
            ModelError::Closed => Self::closed(),
            ModelError::Open(_) => Self::new("FileError", message),
            _ => Self::new("Error", message),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        Self::new("DeviceError", error.to_string())
    }
}

impl From<dmalane::dma::Error> for Failure {
    fn from(error: dmalane::dma::Error) -> Self {
        Self::new("OutOfMemoryError", error.to_string())
    }
}

impl From<dmalane::device::IoError> for Failure {
    fn from(error: dmalane::device::IoError) -> Self {
        Self::new("DeviceError", error.to_string())
    }
}
