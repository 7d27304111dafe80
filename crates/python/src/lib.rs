//! The extension module of the Python package `dmalane`: files into memory that Python objects own or borrow.
//!
//! The package (`python/dmalane`) is the interface for users, and converts to NumPy and PyTorch. This module has what
//! needs the engine: `memory.rs` is the only file with `unsafe`.

mod device;
mod failure;
mod interrupt;
mod machine;
mod manifest;
mod memory;
mod of_process;
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
    module.add_function(wrap_pyfunction!(memory::remade_tensor, module)?)?;
    module.add_class::<open::Files>()?;
    module.add_function(wrap_pyfunction!(open::alloc_and_read, module)?)?;
    module.add_function(wrap_pyfunction!(save::save_file, module)?)?;
    module.add_function(wrap_pyfunction!(manifest::manifest, module)?)?;
    module.add_function(wrap_pyfunction!(manifest::verify, module)?)?;
    module.add_function(wrap_pyfunction!(machine::cached_share, module)?)?;
    module.add_function(wrap_pyfunction!(machine::room, module)?)?;
    module.add_class::<open::Stream>()?;
    module.add_class::<device::Device>()?;
    module.add_class::<device::DeviceTensor>()?;
    Ok(())
}
