//! Memory that holds tensors: blocks, each charged to a limit, and the tensors in them.

use std::sync::{Arc, LazyLock};

use dmalane_dma::{AnonHeap, BufferRef, Pool, SharedBuf, VolatileSlice};

use super::budget::Charge;
use crate::container::Tensor;

/// Bytes of freed blocks that are kept for the next ones, whose pages then need not be mapped, zeroed and unmapped.
const CACHED_BYTES: usize = 8 << 20;

/// The heap that models are read into. The previous contents of a block are never visible: reads overwrite it or fail,
/// and the engine zeroes what no read fills.
pub fn model_heap() -> &'static Pool {
    static HEAP: LazyLock<Pool> = LazyLock::new(|| Pool::new(AnonHeap::new(), CACHED_BYTES));
    &HEAP
}

/// An allocation that tensors keep alive together. Its bytes count against the model's memory limit until it is
/// dropped.
pub struct Block {
    buf: SharedBuf,
    is_kept: bool,
    _charge: Option<Charge>,
}

impl Block {
    /// A block that no limit counts.
    pub fn new(buf: SharedBuf) -> Arc<Self> {
        Arc::new(Self { buf, is_kept: false, _charge: None })
    }

    /// Memory of a [kept](crate::kept) file, which no limit counts.
    pub(crate) fn kept(buf: SharedBuf) -> Arc<Self> {
        Arc::new(Self { buf, is_kept: true, _charge: None })
    }

    /// Whether other processes have the same memory: it is to be read alone. A write would copy its page.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    pub(super) fn charged(buf: SharedBuf, charge: Option<Charge>) -> Arc<Self> {
        Arc::new(Self { buf, is_kept: false, _charge: charge })
    }

    /// A reference to its memory, to pin and map it.
    pub fn reference(&self) -> BufferRef {
        self.buf.reference()
    }

    /// Its bytes, which devices and other processes may write at any time.
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.buf.as_volatile_slice()
    }

    /// Bytes of it: whole pages.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.buf.len()
    }
}

/// A tensor in host memory, or a slice of one.
#[derive(Clone)]
pub struct HostTensor {
    /// The tensor as the file has it.
    pub tensor: Arc<Tensor>,
    /// The shape of what is here; of bytes without a type it is their number.
    pub shape: Vec<u64>,
    /// The memory that it shares with others.
    pub block: Arc<Block>,
    /// Offset in the block of its first byte.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

impl HostTensor {
    /// # Panics
    /// When the bytes do not lie within the block.
    pub(super) fn new(tensor: &Arc<Tensor>, shape: Vec<u64>, block: Arc<Block>, offset: u64, len: u64) -> Self {
        let within = offset.checked_add(len).is_some_and(|end| end <= block.len() as u64);
        assert!(within, "a tensor lies within its block");
        Self { tensor: tensor.clone(), shape, block, offset: offset as usize, len: len as usize }
    }

    /// Its bytes.
    pub fn as_volatile_slice(&self) -> VolatileSlice<'_> {
        self.block.as_volatile_slice().sub(self.offset, self.len).expect("a tensor lies within its block")
    }

    /// A copy of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.as_volatile_slice().read(&mut bytes);
        bytes
    }
}
