//! The structures of `include/dmalane.h`, as C passes them and gets them.

use std::ffi::{c_char, c_void};

/// The longest shape that C gets.
pub(crate) const DIMS: usize = 8;

/// `struct dml_segment`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlSegment {
    /// Where the segment begins.
    pub pa: u64,
    /// Bytes, not 0.
    pub len: u64,
}

/// A callback of C for `len` bytes at `va`.
pub type Function = extern "C" fn(user: *mut c_void, va: u64, len: u64);

/// A callback of C for a buffer object that is gone, by the handle that it had.
pub type ReleaseFunction = extern "C" fn(user: *mut c_void, handle: u32);

/// `struct dml_vm_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlVmConfig {
    /// `sizeof(struct dml_vm_config)` as the caller knows it.
    pub size: u64,
    /// The name of the page-table format, such as "x86-64-4level".
    pub format: *const c_char,
    /// The first address.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// The first address of the reserved part.
    pub reserved_va: u64,
    /// Bytes of it; both 0 for none.
    pub reserved_len: u64,
    /// Page tables at most; 0 for no limit.
    pub table_limit: u64,
    /// Makes the device forget `len` bytes at `va`; null when there is no device.
    pub invalidate: Option<Function>,
    /// Called for each `DML_PREFETCH`; may be null.
    pub prefetch: Option<Function>,
    /// First argument of both callbacks.
    pub user: *mut c_void,
    /// 1 for break-before-make, else 0.
    pub break_before_make: u64,
}

/// `struct dml_leaf`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlLeaf {
    /// Physical address.
    pub pa: u64,
    /// Bytes from there to the end of the leaf.
    pub left: u64,
    /// The size of the leaf.
    pub leaf: u64,
    /// `DML_READ`, `DML_WRITE`, `DML_EXEC`.
    pub access: u32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_run`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlRun {
    /// The first address.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// The byte of the buffer object there.
    pub offset: u64,
    /// Where that is.
    pub pa: u64,
    /// The size of the leaves.
    pub leaf: u64,
    /// Bytes that repeat, or 0.
    pub repeat: u64,
    /// The handle of the buffer object; 0 for a null range.
    pub handle: u32,
    /// `DML_READ`, `DML_WRITE`, `DML_EXEC`.
    pub access: u32,
}

/// `struct dml_read_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlReadConfig {
    /// `sizeof(struct dml_read_config)` as the caller knows it.
    pub size: u64,
    /// `DML_READ_SHAREABLE` and its like.
    pub flags: u32,
    /// Worker threads; 0 to choose automatically.
    pub threads: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes; 0 for all to the end.
    pub len: u64,
    /// Chunk size in bytes; 0 for the default.
    pub chunk: u64,
    /// Bytes of memory at most; 0 for no limit.
    pub limit: u64,
    /// Milliseconds at most; 0 for no limit.
    pub timeout_ms: u64,
}

/// `struct dml_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlRange {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes; 0 for all to the end.
    pub len: u64,
    /// Offset in the buffer.
    pub to: u64,
    /// An open file.
    pub fd: i32,
    /// Which of the buffers.
    pub buffer: u32,
}

/// `struct dml_filled`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlFilled {
    /// The bytes, until the buffer is destroyed.
    pub data: *mut c_void,
    /// Length in bytes.
    pub len: u64,
    /// XXH3-64 of them; 0 unless asked for.
    pub checksum: u64,
}

/// No buffer.
pub(crate) const NOTHING: DmlFilled = DmlFilled { data: std::ptr::null_mut(), len: 0, checksum: 0 };

/// `struct dml_target_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlTargetInfo {
    /// Bytes of free device memory.
    pub free: u64,
    /// Size of the smallest page of its address space.
    pub page: u64,
    /// Bytes of one operation at most.
    pub max_len: u64,
    /// Operations in flight at most.
    pub capacity: u64,
    /// Parts of a gather list at most.
    pub max_parts: u64,
    /// `DML_TARGET_FLAT` and its like.
    pub flags: u32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_target_op`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlTargetOp {
    /// `DML_TO_DEVICE` and its like.
    pub kind: u32,
    /// Rows, or 0.
    pub rows: u32,
    /// Comes back with the completion.
    pub user: u64,
    /// Bytes; with rows, those of one.
    pub len: u64,
    /// Device virtual address.
    pub at: u64,
    /// Host memory.
    pub memory: u64,
    /// Offset in the host memory.
    pub offset: u64,
    /// Pattern or source.
    pub value: u64,
    /// Pitch in host memory, or at the source.
    pub memory_pitch: u64,
    /// Pitch on the device.
    pub pitch: u64,
}

/// `struct dml_completion`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlCompletion {
    /// As it was submitted.
    pub user: u64,
    /// Bytes that are known to be done.
    pub bytes: u64,
    /// 0 or a negative error number.
    pub result: i32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_tensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlTensor {
    /// Device virtual address; 0 for a tensor of no bytes.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// Length of its name in bytes, without the terminating zero.
    pub name_len: u64,
}

/// `struct dml_model_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlModelConfig {
    /// `sizeof(struct dml_model_config)` as the caller knows it.
    pub size: u64,
    /// Bytes of host memory that its tensors may take at a time; 0 for no limit.
    pub memory_limit: u64,
    /// `DML_READ_DIRECT`, `DML_READ_BUFFERED` or 0.
    pub flags: u32,
    /// 0.
    pub zero: u32,
}

/// `struct dml_model_tensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmlModelTensor {
    /// Bytes.
    pub len: u64,
    /// Length of its name in bytes, without the terminating zero.
    pub name_len: u64,
    /// Dimensions.
    pub dims: u64,
    /// Its shape.
    pub shape: [u64; DIMS],
    /// The type of its elements ("F32"), with a terminating zero; empty for bytes without a type.
    pub dtype: [u8; 16],
}

/// `struct dml_slice`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DmlSlice {
    /// The first element.
    pub start: u64,
    /// The element behind the last one.
    pub stop: u64,
}
