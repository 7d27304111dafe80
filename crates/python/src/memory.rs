//! Memory that Python objects share: blocks, and the tensors and buffers that lend them by the buffer protocol and
//! DLPack. DLPack lends memory of GPUs, too.
//!
//! No Rust reference into a block is ever made: Python may write its bytes at any time, on any thread. The engine
//! fills a block before the first Python object of it exists; after that only `VolatileSlice`s touch it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportAbi, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase, OpaqueContext};
use dmalane::dma::{AnonHeap, Heap, PageKind, SharedBuf, lock};
use dmalane::load::container::element_bits;
use dmalane::load::{Block, HostTensor, model_heap};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::device::OnCuda;
use crate::failure::Failure;
use crate::interrupt;

/// A slice of a block, until it is released, and the number of buffers that Python has of it.
pub(crate) struct BlockSlice {
    block: Mutex<Option<Arc<Block>>>,
    offset: usize,
    len: usize,
    exports: AtomicUsize,
}

impl BlockSlice {
    /// # Panics
    /// When the slice does not lie within the block.
    fn new(block: Arc<Block>, offset: usize, len: usize) -> Self {
        assert!(offset.checked_add(len).is_some_and(|end| end <= block.len()), "a slice lies within its block");
        Self { block: Mutex::new(Some(block)), offset, len, exports: AtomicUsize::new(0) }
    }

    /// The block, unless it was released.
    fn block(&self) -> Result<Arc<Block>, Failure> {
        lock(&self.block).clone().ok_or_else(|| Failure::new("ClosedError", "its memory was released"))
    }

    fn address(&self) -> Result<usize, Failure> {
        Ok(self.block()?.as_volatile_slice().as_ptr().addr() + self.offset)
    }

    /// Lets go of the block; refused while Python has buffers of it.
    fn release(&self) -> PyResult<()> {
        let mut block = lock(&self.block);
        match self.exports.load(Ordering::Acquire) {
            0 => {
                *block = None;
                Ok(())
            }
            n => Err(PyBufferError::new_err(format!("{n} buffers of it are in use"))),
        }
    }

    /// Copies the bytes out.
    fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let block = self.block()?;
        PyBytes::new_with(py, self.len, |into| {
            if let Some(view) = block.as_volatile_slice().sub(self.offset, self.len) {
                view.read(into);
            }
            Ok(())
        })
    }

    /// Fills a Python buffer view. `owner` is the object that holds this slice.
    ///
    /// # Safety
    /// `view` is null or points to a `Py_buffer` to be filled, as in `bf_getbuffer`.
    unsafe fn get_buffer(&self, owner: *mut ffi::PyObject, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        // The lock is held until the buffer is counted, so that `release` cannot come between.
        let guard = lock(&self.block);
        let Some(block) = &*guard else {
            // SAFETY: not null (above); CPython demands a null `obj` of a request that fails.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(Failure::new("ClosedError", "its memory was released").into());
        };
        let at = block.as_volatile_slice().as_ptr().wrapping_add(self.offset).cast();
        // `new` has checked that the part lies within the block, and a block is at most `isize::MAX` bytes.
        let len = self.len as ffi::Py_ssize_t;
        // Whoever asks for writable memory gets it: what is written to kept memory is a copy of this process's own.
        let read_only = c_int::from(block.is_kept() && flags & ffi::PyBUF_WRITABLE == 0);
        // SAFETY: `view` is valid (contract). `at..at + len` lies within the block (checked by `new`), which `owner`
        // keeps alive: the view holds a reference to `owner`, and `release` refuses while the view is counted.
        let rc = unsafe { ffi::PyBuffer_FillInfo(view, owner, at, len, read_only, flags) };
        if rc != 0 {
            return Err(Python::attach(|py| PyErr::fetch(py)));
        }
        self.exports.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn release_buffer(&self) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }
}

/// DLPack's codes of the types of safetensors.
const TYPES: &[(&str, DLDataTypeCode)] = &[
    ("BOOL", DLDataTypeCode::BOOL),
    ("U8", DLDataTypeCode::UINT),
    ("I8", DLDataTypeCode::INT),
    ("U16", DLDataTypeCode::UINT),
    ("I16", DLDataTypeCode::INT),
    ("U32", DLDataTypeCode::UINT),
    ("I32", DLDataTypeCode::INT),
    ("U64", DLDataTypeCode::UINT),
    ("I64", DLDataTypeCode::INT),
    ("F16", DLDataTypeCode::FLOAT),
    ("BF16", DLDataTypeCode::BFLOAT),
    ("F32", DLDataTypeCode::FLOAT),
    ("F64", DLDataTypeCode::FLOAT),
    ("C64", DLDataTypeCode::COMPLEX),
    ("F8_E5M2", DLDataTypeCode::FLOAT8_E5M2),
    ("F8_E4M3", DLDataTypeCode::FLOAT8_E4M3FN),
    ("F8_E8M0", DLDataTypeCode::FLOAT8_E8M0FNU),
    ("F8_E4M3FNUZ", DLDataTypeCode::FLOAT8_E4M3FNUZ),
    ("F8_E5M2FNUZ", DLDataTypeCode::FLOAT8_E5M2FNUZ),
    ("F6_E2M3", DLDataTypeCode::FLOAT6_E2M3FN),
    ("F6_E3M2", DLDataTypeCode::FLOAT6_E3M2FN),
    ("F4", DLDataTypeCode::FLOAT4_E2M1FN),
];

/// A tensor in host memory: its bytes with their name, type and shape.
///
/// It lends its bytes without a copy: as a writable buffer of bytes (`memoryview(t)`) and by DLPack.
#[pyclass(frozen, weakref, module = "dmalane")]
pub(crate) struct Tensor {
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    dtype: String,
    shape: Vec<u64>,
    pub(crate) slice: BlockSlice,
}

impl Tensor {
    pub(crate) fn new(of: HostTensor) -> Self {
        let HostTensor { tensor, shape, block, offset, len } = of;
        let slice = BlockSlice::new(block, offset, len);
        Self { name: tensor.name.clone(), dtype: tensor.dtype.to_string(), shape, slice }
    }

    fn described(&self) -> Described<'_> {
        Described { dtype: &self.dtype, shape: &self.shape, nbytes: self.slice.len as u64 }
    }

    fn managed<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let block = self.slice.block()?;
        let data = block.as_volatile_slice().as_ptr().wrapping_add(self.slice.offset).cast();
        let flags = self.flags();
        // SAFETY: the bytes lie within the block (checked by `BlockSlice::new`), which stays mapped while it is
        // referred to. They are shared and no copy, and to be written unless they are kept, as the flags say.
        unsafe { self.described().managed(block, data, DLDevice::CPU, flags) }
    }
}

/// Name, type, shape and bytes of a tensor.
type Parts<'a, 'py> = (&'a str, &'a str, &'a [u64], Bound<'py, PyBytes>);

/// Makes a tensor of a copy of its bytes, as `pickle` and `copy` do.
#[pyfunction]
pub(crate) fn remade_tensor(name: String, dtype: String, shape: Vec<u64>, data: &[u8]) -> PyResult<Tensor> {
    // Others read as many bytes as the shape says.
    if let Some(bits) = element_bits(&dtype) {
        let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let bytes = elements.and_then(|n| Some(n.checked_mul(bits.into())?.div_ceil(8)));
        if bytes != Some(data.len() as u64) {
            let message = format!("{} bytes are no tensor of type {dtype} and shape {shape:?}", data.len());
            return Err(PyValueError::new_err(message));
        }
    }
    let buf = model_heap().allocate(data.len().max(1)).map_err(Failure::from)?.share();
    let block = Block::new(buf);
    if let Some(view) = block.as_volatile_slice().sub(0, data.len()) {
        view.write(data);
    }
    Ok(Tensor { name, dtype, shape, slice: BlockSlice::new(block, 0, data.len()) })
}

/// A tensor, as far as DLPack describes it apart from its memory.
#[derive(Clone, Copy)]
pub(crate) struct Described<'a> {
    pub(crate) dtype: &'a str,
    pub(crate) shape: &'a [u64],
    pub(crate) nbytes: u64,
}

impl Described<'_> {
    pub(crate) fn dlpack_type(&self) -> PyResult<DLDataType> {
        let code = TYPES.iter().find(|(name, _)| *name == self.dtype).map(|(_, code)| *code);
        match (code, element_bits(self.dtype)) {
            // DLPack packs them otherwise than safetensors does, or says nothing about it.
            (_, Some(6 | 4)) => {
                Err(PyBufferError::new_err(format!("DLPack has no layout for the packed type {}", self.dtype)))
            }
            (Some(code), Some(bits)) => Ok(DLDataType::scalar(code, bits)),
            _ => Err(PyBufferError::new_err(format!("DLPack has no type for {:?}", self.dtype))),
        }
    }

    /// # Safety
    /// The bytes of the tensor are at `data` of `device`, as `flags` say, while `owner` lives.
    unsafe fn managed<M: ManagedTensorBase>(
        &self,
        owner: impl OpaqueContext,
        data: *mut c_void,
        device: DLDevice,
        flags: DlpackFlags,
    ) -> PyResult<Managed<M>> {
        let dtype = self.dlpack_type()?;
        let shape = self.shape.iter().map(|d| i64::try_from(*d)).collect::<Result<Vec<i64>, _>>();
        let shape = shape.map_err(|_| PyBufferError::new_err("a dimension does not fit 63 bits"))?;
        let element = u64::from(dtype.bits) / 8;
        if self.shape.iter().try_fold(element, |n, dim| n.checked_mul(*dim)) != Some(self.nbytes) {
            let message = format!("{} elements of shape {:?} are not {} bytes", self.dtype, self.shape, self.nbytes);
            return Err(PyBufferError::new_err(message));
        }
        let made = Dynamic::compact(shape.as_slice()).initialize_as::<M>(owner);
        let mut made = made.map_err(|e| PyBufferError::new_err(e.to_string()))?;
        made.set_data(data).set_device(device).set_dtype(dtype);
        // SAFETY: shape and strides are copies of their own, and the strides compact. Shape and type make the tensor's
        // bytes (checked above), and those stay until the deleter drops `owner`, as the flags say (contract).
        Ok(unsafe {
            made.set_flags_unchecked(flags);
            made.finish()
        })
    }

    /// A capsule of these bytes, which are nobody else's.
    ///
    /// # Panics
    /// When they are fewer than the tensor's.
    pub(crate) fn export_copy(&self, py: Python<'_>, abi: ExportAbi, copy: SharedBuf) -> PyResult<Py<PyAny>> {
        assert!(copy.len() as u64 >= self.nbytes, "the copy is whole");
        let (block, flags) = (Block::new(copy), DlpackFlags::IS_COPIED);
        let data = block.as_volatile_slice().as_ptr().cast();
        match abi {
            ExportAbi::Versioned => {
                // SAFETY: the block has the bytes (checked above), and is nobody else's.
                let made = unsafe { self.managed::<DLManagedTensorVersioned>(block, data, DLDevice::CPU, flags) };
                Ok(made?.into_pyobject(py)?.unbind())
            }
            ExportAbi::Legacy => {
                // SAFETY: as above; this structure has no flags.
                let made = unsafe { self.managed::<DLManagedTensor>(block, data, DLDevice::CPU, flags) };
                Ok(made?.into_pyobject(py)?.unbind())
            }
        }
    }
}

impl DlpackExporter for Tensor {
    fn device(&self) -> DLDevice {
        DLDevice::CPU
    }

    fn flags(&self) -> DlpackFlags {
        let is_kept = self.slice.block().is_ok_and(|block| block.is_kept());
        if is_kept { DlpackFlags::READ_ONLY } else { DlpackFlags::empty() }
    }

    fn prepare_export(&self, _: Python<'_>, _: &ExportRequest<'_>) -> PyResult<()> {
        Ok(())
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.managed()
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.managed()
    }
}

impl OnCuda<'_> {
    fn managed<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let tensor = self.tensor;
        // A pointer of the GPU: nothing on the host follows it.
        let data = std::ptr::without_provenance_mut(tensor.address().unwrap_or(0) as usize);
        // SAFETY: a `DeviceTensor` has the address of its tensor in the files of its owner, and those are unloaded when
        // the owner is dropped, after the work of the GPU. The flags are those of the bind.
        unsafe { tensor.described().managed(tensor.owner().clone(), data, self.device(), self.flags()) }
    }
}

impl DlpackExporter for OnCuda<'_> {
    fn device(&self) -> DLDevice {
        self.device
    }

    fn flags(&self) -> DlpackFlags {
        if self.tensor.owner().read_only { DlpackFlags::READ_ONLY } else { DlpackFlags::empty() }
    }

    /// Nothing is to be done: a load returns when the driver has said that its copies have ended, so work on any stream
    /// of the consumer comes after them.
    fn prepare_export(&self, _: Python<'_>, request: &ExportRequest<'_>) -> PyResult<()> {
        request.cuda_stream().map(drop)
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.managed()
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.managed()
    }
}

/// The methods of a class, with those of every class whose bytes are a [`BlockSlice`]: a class has one block of them.
/// The buffer protocol's are not among them, because pyo3 does not accept `unsafe` methods made by a macro.
macro_rules! host_memory {
    ($class:ident { $($own:tt)* }) => {
        #[pymethods]
        impl $class {
            $($own)*

            #[getter]
            fn nbytes(&self) -> usize {
                self.slice.len
            }

            #[getter]
            fn address(&self) -> PyResult<usize> {
                Ok(self.slice.address()?)
            }

            fn release(&self) -> PyResult<()> {
                self.slice.release()
            }

            fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                self.slice.bytes(py)
            }

            fn __len__(&self) -> usize {
                self.slice.len
            }
        }
    };
}

host_memory!(Tensor {
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        self.described().dlpack_type()?;
        self.slice.block()?;
        export_dlpack(self, py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Whether other processes have the same memory: it is to be read alone.
    #[getter]
    fn kept(&self) -> bool {
        self.slice.block().is_ok_and(|block| block.is_kept())
    }

    #[getter]
    fn released(&self) -> bool {
        lock(&self.slice.block).is_none()
    }

    /// How `pickle` and `copy` make another: a copy of the bytes.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Parts<'_, 'py>)> {
        let make = py.import("dmalane._native")?.getattr("remade_tensor")?;
        Ok((make, (&self.name, &self.dtype, &self.shape, self.slice.bytes(py)?)))
    }

    fn __repr__(&self) -> String {
        format!("Tensor({:?}, {:?}, {:?})", self.name, self.dtype, self.shape)
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        (DLDevice::CPU.device_type.0, DLDevice::CPU.device_id)
    }

    /// # Safety
    /// As `bf_getbuffer` of CPython.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: what CPython passes on to `bf_getbuffer` (contract).
        unsafe { slf.get().slice.get_buffer(slf.as_ptr(), view, flags) }
    }

    /// # Safety
    /// As `bf_releasebuffer` of CPython.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.slice.release_buffer();
    }
});

/// Zeroed memory in whole pages, anonymous and aligned, that any driver can register.
#[pyclass(frozen, weakref, module = "dmalane")]
pub(crate) struct Buffer {
    pub(crate) slice: BlockSlice,
    pages: String,
}

impl Buffer {
    pub(crate) fn from_shared(buf: SharedBuf, len: usize) -> Self {
        let pages = buf.backing().kind.to_string();
        Self { slice: BlockSlice::new(Block::new(buf), 0, len), pages }
    }
}

host_memory!(Buffer {
    #[new]
    #[pyo3(signature = (size, *, align=4096, huge=true))]
    fn new(py: Python<'_>, size: usize, align: usize, huge: bool) -> PyResult<Self> {
        if !align.is_power_of_two() || align > 2 << 20 {
            return Err(PyValueError::new_err("align is a power of two of at most 2 MiB"));
        }
        if size == 0 {
            return Err(PyValueError::new_err("size is at least 1"));
        }
        let best = if huge { AnonHeap::new() } else { AnonHeap::starting_at(PageKind::Base) };
        // Buffers are aligned to pages: room to move within makes any larger alignment.
        let extra = if align > 4096 { align } else { 0 };
        let total = size.checked_add(extra).ok_or_else(|| PyValueError::new_err("size does not fit 64 bits"))?;
        let buf = interrupt::quietly(py, || best.allocate(total).map(|buf| buf.share()))?.map_err(Failure::from)?;
        let offset = buf.as_volatile_slice().as_ptr().addr().wrapping_neg() & (align - 1);
        let pages = buf.backing().kind.to_string();
        Ok(Self { slice: BlockSlice::new(Block::new(buf), offset, size), pages })
    }

    #[getter]
    fn pages(&self) -> &str {
        &self.pages
    }

    fn __repr__(&self) -> String {
        format!("Buffer({}, {})", self.slice.len, self.pages)
    }

    /// # Safety
    /// As `bf_getbuffer` of CPython.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: what CPython passes on to `bf_getbuffer` (contract).
        unsafe { slf.get().slice.get_buffer(slf.as_ptr(), view, flags) }
    }

    /// # Safety
    /// As `bf_releasebuffer` of CPython.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.slice.release_buffer();
    }
});
