//! Errors of the engine as Python exceptions of `dmalane.errors`, with their fields.

use std::io::{self, ErrorKind};
use std::path::Path;

use dmalane::addr::FileOffset;
use dmalane::load::fill::FillError;
use dmalane::load::{Error as LoadError, Problem};
use dmalane::queue::OpError;
use dmalane::{OpenError, error_chain};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The `errno` of errors with words of their own.
const BY_KIND: [(ErrorKind, i32); 7] = [
    (ErrorKind::NotFound, 2),
    (ErrorKind::PermissionDenied, 13),
    (ErrorKind::AlreadyExists, 17),
    (ErrorKind::NotADirectory, 20),
    (ErrorKind::IsADirectory, 21),
    (ErrorKind::StorageFull, 28),
    (ErrorKind::ReadOnlyFilesystem, 30),
];

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

    pub(crate) fn path(self, path: &Path) -> Self {
        self.text("path", path.display().to_string())
    }

    fn tensor(self, name: Option<&str>) -> Self {
        name.into_iter().fold(self, |failure, name| failure.text("tensor", name))
    }

    fn offset(self, at: Option<FileOffset>) -> Self {
        at.into_iter().fold(self, |failure, at| failure.number("offset", at.bits()))
    }

    pub(crate) fn io(self, source: &io::Error) -> Self {
        let of_kind = || BY_KIND.iter().find(|(kind, _)| *kind == source.kind()).map(|(_, errno)| *errno);
        match source.raw_os_error().or_else(of_kind) {
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

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        use dmalane::file::Error::Open;
        let failure = |class| Self::new(class, error_chain(&error));
        match &error {
            LoadError::Format { path, source } => {
                let (tensor, at) = source.about();
                failure("FormatError").path(path).tensor(tensor).offset(at)
            }
            LoadError::File { path, source, .. } | LoadError::Open(Open { path, source }) => {
                failure("FileError").path(path).io(source)
            }
            LoadError::Open(_) => failure("FileError"),
            LoadError::Read { path, at, tensor, source } => {
                let at = match source {
                    OpError::Io { at, .. } | OpError::EndOfFile { at, .. } => at,
                    _ => at,
                };
                let failure = failure("FileError").path(path).offset(Some(*at)).tensor(tensor.as_deref());
                match source {
                    OpError::Io { errno, .. } => failure.number("errno", u64::from(errno.unsigned_abs())),
                    _ => failure,
                }
            }
            LoadError::PastEnd { path, size, .. } => failure("ChangedError").path(path).number("size", *size),
            LoadError::Changed { path, before, now } => {
                failure("ChangedError").path(path).number("before", *before).number("size", *now)
            }
            LoadError::Limit { tensor, wanted, used, limit } => {
                Self::limit(*wanted, *limit, error_chain(&error)).number("used", *used).tensor(tensor.as_deref())
            }
            LoadError::Fill(FillError::NoRoom { wanted, left, .. }) => Self::limit(*wanted, *left, error_chain(&error)),
            LoadError::Fill(FillError::Cancelled { .. }) => failure("CancelledError"),
            LoadError::Fill(FillError::Job(_) | FillError::Deadline { .. }) => failure("Error"),
            LoadError::Memory(_) | LoadError::Fill(FillError::Memory { .. }) => failure("OutOfMemoryError"),
            LoadError::DeviceMemory { path, .. } => failure("OutOfMemoryError").path(path),
            LoadError::Transfer { path, at, tensor, .. } => {
                failure("DeviceError").path(path).offset(Some(*at)).tensor(tensor.as_deref())
            }
            LoadError::Differs { differences } => {
                let failure = failure("IntegrityError");
                let Some(first) = differences.first() else { return failure };
                let failure = failure.text("path", &first.file);
                let Problem::Changed { part, start, .. } = &first.problem else { return failure };
                let failure = failure.number("offset", *start);
                failure.tensor(part.tensor().map(|tensor| &*tensor.name))
            }
            LoadError::Unlisted { path, tensor } => failure("IntegrityError").path(path).tensor(Some(tensor)),
            LoadError::NoTensor(name) => failure("UnknownTensorError").tensor(Some(name)),
            LoadError::BadSlice(_) | LoadError::Unchecked => failure("ValueError"),
            LoadError::Kept(_) => failure("KeptError"),
            LoadError::Closed => Self::closed(),
            _ => failure("DeviceError"),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        Self::new("DeviceError", error_chain(&error))
    }
}

impl From<dmalane::dma::Error> for Failure {
    fn from(error: dmalane::dma::Error) -> Self {
        Self::new("OutOfMemoryError", error_chain(&error))
    }
}

impl From<dmalane::device::IoError> for Failure {
    fn from(error: dmalane::device::IoError) -> Self {
        Self::new("DeviceError", error_chain(&error))
    }
}
