//! A batch as an array of bytes: operations with a stride, as kernels take them.
//!
//! The layout is written down in `docs/formats/vm-array.md`. As in the Linux drivers for Apple and Mali GPUs
//! (`include/uapi/drm/asahi_drm.h`, `panthor_drm.h`), the caller gives the stride of its operations, so that a caller
//! and a library of different age understand each other. Operations shorter than ours are refused; of
//! longer ones the part that we do not know must be zero.

use alloc::vec::Vec;

use dmalane_addr::{Access, DeviceVa, PageSize, Span};
use dmalane_iopt::{Format, Tables};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::vm::Batch;
use crate::{BindRequest, Errno, Error, Handles, Plan, PlanError, Vm};

/// One operation of an array, little-endian, without padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ArrayOperation {
    /// The kind of operation and its options: see the constants.
    pub flags: U32,
    /// Which buffer object; 0 where the operation has none.
    pub handle: U32,
    /// The first byte of the buffer object.
    pub offset: U64,
    /// Bytes.
    pub range: U64,
    /// The first device virtual address.
    pub addr: U64,
}

impl ArrayOperation {
    /// Bytes of an operation.
    pub const BYTES: usize = size_of::<Self>();

    /// The device may read.
    pub const READ: u32 = 1 << 0;
    /// The device may write.
    pub const WRITE: u32 = 1 << 1;
    /// The device may fetch programs.
    pub const EXEC: u32 = 1 << 2;
    /// [`Access::PRIVILEGED`].
    pub const PRIVILEGED: u32 = 1 << 3;
    /// [`Access::UNCACHED`].
    pub const UNCACHED: u32 = 1 << 4;
    /// [`Access::MMIO`].
    pub const MMIO: u32 = 1 << 5;

    /// Where the kind of operation begins in the flags.
    pub const KIND_SHIFT: u32 = 8;
    /// The bits of the kind.
    pub const KIND_MASK: u32 = 0xf << Self::KIND_SHIFT;
    /// Binds `range` bytes of the buffer from `offset` on at `addr`.
    pub const BIND: u32 = 0 << Self::KIND_SHIFT;
    /// Unbinds `range` bytes at `addr`; has no handle and no offset.
    pub const UNBIND: u32 = 1 << Self::KIND_SHIFT;
    /// Removes every binding of the buffer; has only a handle.
    pub const UNBIND_BO: u32 = 2 << Self::KIND_SHIFT;
    /// Makes `range` bytes at `addr` a null range; has no handle, no offset and no access.
    pub const NULL: u32 = 3 << Self::KIND_SHIFT;
    /// As `BIND`, but of one page at `offset`, again and again.
    pub const REPEAT: u32 = 4 << Self::KIND_SHIFT;
    /// A hint that `range` bytes at `addr` will be used; has no handle, no offset and no access.
    pub const PREFETCH: u32 = 5 << Self::KIND_SHIFT;

    /// Where the logarithm of the page size of `REPEAT` begins in the flags; 0 there means the format's smallest page.
    pub const PAGE_SHIFT: u32 = 16;
    /// The bits of that logarithm.
    pub const PAGE_MASK: u32 = 0x3f << Self::PAGE_SHIFT;

    const KNOWN: u32 = Self::ACCESS | Self::KIND_MASK | Self::PAGE_MASK;
    const RIGHTS: u32 = Self::READ | Self::WRITE | Self::EXEC;
    const ACCESS: u32 = Self::RIGHTS | Self::PRIVILEGED | Self::UNCACHED | Self::MMIO;

    #[inline]
    fn access(&self) -> Access {
        // The bits are the same.
        const { assert!(Self::READ == Access::READ.bits() as u32 && Self::WRITE == Access::WRITE.bits() as u32) }
        const { assert!(Self::EXEC == Access::EXEC.bits() as u32 && Self::MMIO == Access::MMIO.bits() as u32) }
        const { assert!(Self::PRIVILEGED == Access::PRIVILEGED.bits() as u32) }
        const { assert!(Self::UNCACHED == Access::UNCACHED.bits() as u32) }
        Access::from_bits_truncate((self.flags.get() & Self::ACCESS) as u8)
    }

    /// The request that it encodes, checked where that needs no VM.
    fn request(&self, granule: PageSize, handles: &Handles) -> Result<BindRequest, Reason> {
        let flags = self.flags.get();
        let (offset, range) = (self.offset.get(), self.range.get());
        let va = DeviceVa::new(self.addr.get());
        if flags & !Self::KNOWN != 0 {
            return Err(Reason::UnknownFlags { flags });
        }
        let kind = flags & Self::KIND_MASK;
        let zero = |field: &'static str, value: u64| match value {
            0 => Ok(()),
            value => Err(Reason::NotZero { field, value }),
        };
        // Fields that this kind does not use must be 0; a later version may give them a meaning.
        let (has_bo, has_offset, has_span, has_access) = match kind {
            Self::BIND | Self::REPEAT => (true, true, true, true),
            Self::UNBIND_BO => (true, false, false, false),
            Self::UNBIND | Self::NULL | Self::PREFETCH => (false, false, true, false),
            _ => return Err(Reason::UnknownFlags { flags }),
        };
        if !has_bo {
            zero("handle", self.handle.get().into())?;
        }
        if !has_offset {
            zero("offset", offset)?;
        }
        if !has_span {
            zero("range", range)?;
            zero("addr", va.bits())?;
        }
        if !has_access {
            zero("access", (flags & Self::ACCESS).into())?;
        }
        if kind != Self::REPEAT {
            zero("page", (flags & Self::PAGE_MASK).into())?;
        }
        let bo = || {
            let handle = self.handle.get();
            handles.get(handle).cloned().ok_or(Reason::NoHandle { handle })
        };
        let span = || match Span::new(va, range) {
            Some(span) => Ok(span),
            None if range == 0 => Err(Reason::Vm(Error::Empty { va })),
            None => Err(Reason::Vm(Error::Wraps { va, len: range })),
        };
        let access = self.access();
        if has_access && access.rights().is_empty() {
            return Err(Reason::NoAccess);
        }
        Ok(match kind {
            Self::BIND => BindRequest::Bind { va, bo: bo()?, offset, len: range, access },
            Self::UNBIND => BindRequest::Unbind(span()?),
            Self::UNBIND_BO => BindRequest::UnbindBo(bo()?),
            Self::NULL => BindRequest::Null { va, len: range },
            Self::PREFETCH => BindRequest::Prefetch(span()?),
            Self::REPEAT => {
                let page = match (flags & Self::PAGE_MASK) >> Self::PAGE_SHIFT {
                    0 => granule.bytes(),
                    log2 => 1 << log2, // of at most 63
                };
                BindRequest::Repeat { va, bo: bo()?, offset, page, len: range, access }
            }
            _ => return Err(Reason::UnknownFlags { flags }),
        })
    }
}

/// Why one operation of an array, or the array itself, was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// A stride below the size of an operation.
    #[error("a stride of {stride} bytes, below the {} of an operation", ArrayOperation::BYTES)]
    Stride {
        /// Bytes from one operation to the next.
        stride: usize,
    },
    /// Fewer bytes than the operations take.
    #[error("{count} operations of {stride} bytes in an array of {bytes}")]
    Short {
        /// Operations.
        count: usize,
        /// Bytes from one operation to the next.
        stride: usize,
        /// Bytes that there are.
        bytes: usize,
    },
    /// Something behind the fields that this version knows.
    #[error("byte {at} of it is {value:#x}, in a field that this version does not know")]
    UnknownField {
        /// Which byte of the operation.
        at: usize,
        /// Value of that byte.
        value: u8,
    },
    /// A bit that this version does not know, or an unknown kind.
    #[error("flags {flags:#x} are unknown")]
    UnknownFlags {
        /// All flags.
        flags: u32,
    },
    /// A field that must be zero for this kind.
    #[error("{field} is {value:#x} and must be 0 for this kind of operation")]
    NotZero {
        /// Which field, or which part of the flags.
        field: &'static str,
        /// Value of the field.
        value: u64,
    },
    /// A bind that permits nothing.
    #[error("a bind without read, write or execute")]
    NoAccess,
    /// A handle that names nothing, or not any more.
    #[error("there is no buffer object with handle {handle:#x}")]
    NoHandle {
        /// The handle.
        handle: u32,
    },
    /// The VM refused.
    #[error(transparent)]
    Vm(#[from] Error),
}

impl Reason {
    /// The number that kernels give for it, or that comes nearest.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Stride { .. } | Self::UnknownFlags { .. } | Self::NotZero { .. } | Self::NoAccess => Errno::Inval,
            Self::Short { .. } => Errno::Fault,
            Self::UnknownField { .. } => Errno::TooBig,
            Self::NoHandle { .. } => Errno::NoEnt,
            Self::Vm(error) => error.errno(),
        }
    }
}

/// Why an array was refused. The VM is as it was.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArrayError {
    /// Which operation, from 0; `None` when it is the array as a whole.
    pub index: Option<usize>,
    /// Why.
    pub reason: Reason,
}

impl From<PlanError> for ArrayError {
    fn from(refused: PlanError) -> Self {
        Self { index: Some(refused.index), reason: refused.error.into() }.of_all()
    }
}

impl ArrayError {
    /// The same: but memory is missing for the whole, not for the operation that was looked at last.
    fn of_all(self) -> Self {
        let of_all = matches!(self.reason, Reason::Vm(Error::NoTables { .. } | Error::NoMemory { .. }));
        Self { index: self.index.filter(|_| !of_all), ..self }
    }
}

impl core::fmt::Display for ArrayError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.index {
            Some(index) => write!(f, "operation {index}: {}", self.reason),
            None => self.reason.fmt(f),
        }
    }
}

impl core::error::Error for ArrayError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        self.reason.source()
    }
}

/// The operations of an array that are left.
struct Operations<'a> {
    /// As many strides.
    bytes: &'a [u8],
    /// At least the size of an operation.
    stride: usize,
}

impl<'a> Operations<'a> {
    fn new(bytes: &'a [u8], stride: usize, count: usize) -> Result<Self, ArrayError> {
        let whole = |reason| ArrayError { index: None, reason };
        if count == 0 {
            return Ok(Self { bytes: &[], stride });
        }
        if stride < ArrayOperation::BYTES {
            return Err(whole(Reason::Stride { stride }));
        }
        let all = count.checked_mul(stride).and_then(|len| bytes.get(..len));
        let bytes = all.ok_or(whole(Reason::Short { count, stride, bytes: bytes.len() }))?;
        Ok(Self { bytes, stride })
    }

    /// The next operation and what is behind its fields; [`pass`](Self::pass) goes on to the one after it.
    #[inline]
    fn peek(&self) -> Option<(&'a ArrayOperation, &'a [u8])> {
        let (operation, _) = ArrayOperation::ref_from_prefix(self.bytes).ok()?;
        Some((operation, self.bytes.get(ArrayOperation::BYTES..self.stride)?))
    }

    #[inline]
    fn pass(&mut self) {
        self.bytes = self.bytes.get(self.stride..).unwrap_or_default();
    }

    #[inline]
    fn next(&mut self) -> Option<Result<&'a ArrayOperation, Reason>> {
        let (operation, tail) = self.peek()?;
        self.pass();
        Some(match tail.iter().enumerate().find(|(_, byte)| **byte != 0) {
            Some((i, &value)) => Err(Reason::UnknownField { at: ArrayOperation::BYTES + i, value }),
            None => Ok(operation),
        })
    }
}

/// The requests of an array, for an address space that is not a [`Vm`]. `granule` is its smallest page, which a repeat
/// without a length of its own repeats.
///
/// # Errors
/// [`ArrayError`], of the first operation that is wrong in itself.
pub fn requests(
    bytes: &[u8],
    stride: usize,
    count: usize,
    granule: PageSize,
    handles: &Handles,
) -> Result<Vec<BindRequest>, ArrayError> {
    let mut operations = Operations::new(bytes, stride, count)?;
    let mut requests = Vec::new();
    while let Some(operation) = operations.next() {
        let request = operation.and_then(|operation| operation.request(granule, handles));
        requests.push(request.map_err(|reason| ArrayError { index: Some(requests.len()), reason })?);
    }
    Ok(requests)
}

impl<F: Format, T: Tables> Vm<F, T> {
    /// As [`Vm::plan`], for an array of operations.
    ///
    /// # Errors
    /// [`ArrayError`], of the first operation that cannot be carried out; the VM is as it was.
    pub fn plan_array(
        &mut self,
        bytes: &[u8],
        stride: usize,
        count: usize,
        handles: &Handles,
    ) -> Result<Plan<'_, F, T>, ArrayError> {
        self.plan_operations(bytes, stride, count, handles, false)
    }

    /// Plans each operation as soon as it is read, so that nothing is kept of it but its step.
    pub(crate) fn plan_operations(
        &mut self,
        bytes: &[u8],
        stride: usize,
        count: usize,
        handles: &Handles,
        reserved: bool,
    ) -> Result<Plan<'_, F, T>, ArrayError> {
        let mut operations = Operations::new(bytes, stride, count)?;
        let (plan, mut batch) = self.begin_plan(reserved); // takes back what follows, should it fail
        let failed = |left: usize, reason| {
            let index = count.saturating_sub(1 + left / stride.max(1));
            ArrayError { index: Some(index), reason }.of_all()
        };
        while let Some(operation) = operations.next() {
            let planned = operation.and_then(|operation| plan.vm.plan_operation(operation, handles, &mut batch));
            planned.map_err(|reason| failed(operations.bytes.len(), reason))?;
            plan.vm.plan_more_unbinds(&mut operations, &batch);
        }
        plan.vm.reserve(&batch).map_err(|error| failed(0, error.into()))?;
        Ok(plan)
    }

    /// Passes the next operations while they unbind what follows the last one, so that its step only grows.
    #[inline]
    fn plan_more_unbinds(&mut self, operations: &mut Operations<'_>, batch: &Batch) {
        let Some((mut last, end)) = self.growing_unbind(batch) else { return };
        let (log2, mask) = (F::GRANULE.log2(), F::GRANULE.bytes() - 1);
        while let Some((operation, tail)) = operations.peek()
            && operation.flags.get() == ArrayOperation::UNBIND
            && operation.handle.get() == 0
            && operation.offset.get() == 0
            && operation.addr.get() == (last + 1) << log2
            && let pages = operation.range.get() >> log2
            && operation.range.get() & mask == 0
            && 1 <= pages
            && pages <= end - last
            && tail.iter().all(|byte| *byte == 0)
        {
            last += pages;
            operations.pass();
        }
        self.grow_unbind(last);
    }

    /// Plans one operation. Those of which there are many go the short way.
    #[inline]
    fn plan_operation(
        &mut self,
        operation: &ArrayOperation,
        handles: &Handles,
        batch: &mut Batch,
    ) -> Result<(), Reason> {
        let flags = operation.flags.get();
        let (va, len, offset) = (DeviceVa::new(operation.addr.get()), operation.range.get(), operation.offset.get());
        if flags & !ArrayOperation::ACCESS == ArrayOperation::BIND
            && flags & ArrayOperation::RIGHTS != 0
            && let Some(bo) = handles.get(operation.handle.get())
        {
            return Ok(self.plan_bind(va, bo, offset, len, 0, operation.access(), batch)?);
        }
        if flags == ArrayOperation::UNBIND
            && operation.handle.get() == 0
            && offset == 0
            && let Some(span) = Span::new(va, len)
        {
            return Ok(self.plan_unbind(span, batch)?);
        }
        let request = operation.request(F::GRANULE, handles)?;
        Ok(self.plan_request(&request, batch)?)
    }
}
