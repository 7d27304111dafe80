//! The extension module of the Python package `dmalane`: files into memory that Python objects own or borrow.
//!
//! The package (`python/dmalane`) is the interface for users, and converts to NumPy and PyTorch. This module has what
//! needs the engine: `memory.rs` is the only file with `unsafe`.

mod device;
mod failure;
mod interrupt;
mod memory;
mod open;
mod report;
mod save;

use pyo3::prelude::*;

/// The native module that `python/dmalane` imports.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<memory::Tensor>()?;
    module.add_class::<memory::Buffer>()?;
    module.add_class::<open::Files>()?;
    module.add_function(wrap_pyfunction!(open::alloc_and_read, module)?)?;
    module.add_function(wrap_pyfunction!(save::save_file, module)?)?;
    module.add_function(wrap_pyfunction!(command_line, module)?)?;
    module.add_class::<open::Stream>()?;
    module.add_class::<device::Device>()?;
    module.add_class::<device::DeviceTensor>()?;
    module.add_class::<device::Registration>()?;
    Ok(())
}

/// Runs the program `dmalane` with these words, of which the first is its name. Returns its exit status.
#[pyfunction]
fn command_line(py: Python<'_>, words: Vec<std::ffi::OsString>) -> u8 {
    let status = py.detach(|| dmalane_cli::run(words));
    // An exit code has no number.
    (0..=u8::MAX).find(|n| std::process::ExitCode::from(*n) == status).unwrap_or(1)
}
