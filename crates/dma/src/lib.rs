//! Memory that CPU and device share.
#![doc = include_str!("../README.md")]
//! A shared buffer hands out no slices, so this does not compile:
//!
//! ```compile_fail,E0608
//! use dmalane_dma::{AnonHeap, Heap};
//! let shared = AnonHeap::new().allocate(4096).unwrap().share();
//! let first = shared[0];
//! ```

#[macro_use]
mod debug;

mod account;
mod buf;
mod device;
mod error;
mod first_touch;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod heap;
mod interrupts;
mod lock;
mod memory;
mod mmio;
mod pagemap;
mod pages;
mod peer;
mod process;
mod processor;
mod quarantine;
mod registrar;
mod room;
mod slice;
mod socket;
mod sys;
mod volatile;

pub use account::HeapStats;
pub use buf::{CpuBuf, SharedBuf};
pub use device::{DeviceMem, DmaFault, FaultReason, HeldMem};
pub use error::{Error, error_chain};
pub use heap::{
    Absent, AnonHeap, DmaHeap, DriverHeap, Heap, HeapCapabilities, MemfdHeap, Needs, PageHeap, Picked, Pool, PoolStats,
    Reserved, export_dma_buf, export_dma_buf_range, pick,
};
pub use interrupts::InterruptEvents;
pub use memory::BufferRef;
pub use mmio::Mmio;
pub use pagemap::physical_runs;
pub use pages::{NoPages, PageBacking, PageKind};
pub use peer::{PeerError, trusted_users};
pub use process::Forked;
pub use processor::CopyHint;
pub use quarantine::{quarantine, quarantined_bytes};
pub use registrar::{Mapping, Pinned, Registrar, Undo};
pub use room::{Room, memlock_left, memory_limit, room};
pub use slice::BufferSlice;
pub use sys::{DriverMemory, FileMapping, RawMemory};
pub use volatile::{VolatileSlice, stream_fence};

// For the other crates of dmalane alone.
#[doc(hidden)]
pub use {
    lock::lock,
    peer::check_peer,
    process::{OfProcess, process_id},
    room::room_at,
    socket::{ReceivedBytes, SocketFile, connect_seqpacket, receive_with_fds, send_with_fds},
};
