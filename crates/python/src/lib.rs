//! The extension module of the Python package `dmalane`: files into memory that Python objects own or borrow.
//!
//! The package (`python/dmalane`) is the interface for users, and converts to NumPy and PyTorch. This module has what
//! needs the engine: [`memory`] is the only file with `unsafe`.

mod device;
mod failure;
mod interrupt;
mod memory;
mod open;
mod report;
mod stream;

use pyo3::prelude::*;

/// What `python/dmalane` imports.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<memory::Tensor>()?;
    module.add_class::<memory::Buffer>()?;
    module.add_class::<open::Files>()?;
    module.add_function(wrap_pyfunction!(open::alloc_and_read, module)?)?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<device::Device>()?;
    module.add_class::<device::DeviceTensor>()?;
    module.add_class::<device::Registration>()?;
    Ok(())
}
