//! Where programs on a device see its memory.

use std::error::Error;

use dmalane_addr::{CardAddr, DeviceVa, PageSize, SgTable, Span};
use dmalane_queue::DeviceAddr;
use dmalane_vm::{AnyVm, BindRequest};
use thiserror::Error;

/// A device's virtual addresses: reserve a range for a buffer, bind parts of the buffer there, release the range.
pub trait AddressSpace: Send {
    /// Its kind.
    fn kind(&self) -> AddressSpaceKind;

    /// The smallest page: what binds start at and are multiples of.
    fn page(&self) -> PageSize {
        PageSize::SIZE_4K
    }

    /// Bytes of the longest range that can be reserved. A file that is longer gets several.
    fn longest(&self) -> u64 {
        u64::MAX
    }

    /// Bytes of the ranges that can still be reserved, all together, where a driver limits them.
    fn room(&self) -> u64 {
        u64::MAX
    }

    /// Takes `len` bytes of addresses for a buffer with these segments. In a [flat](AddressSpaceKind::Flat) space they
    /// are those of the buffer; elsewhere the range starts at a multiple of 2 MiB and may be longer than was asked for.
    ///
    /// # Errors
    /// [`SpaceError::Exhausted`]; [`SpaceError::Fragmented`] and [`SpaceError::TooShort`] in a flat space.
    fn reserve(&mut self, memory: &SgTable<CardAddr>, len: u64) -> Result<Span<DeviceVa>, SpaceError>;

    /// Unbinds everything in a range that was reserved, all of it, and gives the range back. When this returns, the
    /// device has forgotten what was bound there, so that the memory can be used for something else.
    ///
    /// # Errors
    /// [`SpaceError`]; the range stays reserved, and after [`SpaceError::Invalidate`] the memory must not be used
    /// again.
    fn release(&mut self, range: Span<DeviceVa>) -> Result<(), SpaceError>;

    /// Carries out requests within ranges that are reserved, whole or not at all; later ones see what earlier ones did,
    /// and what was bound before is replaced. When this returns, the device has forgotten what was taken away. New
    /// bindings may become visible later, but before any operation submitted after this call. In a
    /// [flat](AddressSpaceKind::Flat) space a buffer can be bound where it lies, which changes nothing.
    ///
    /// # Errors
    /// [`SpaceError::NotReserved`], [`SpaceError::Elsewhere`], [`SpaceError::NoTables`], [`SpaceError::Vm`],
    /// [`SpaceError::Refused`]: nothing has changed. After [`SpaceError::Driver`] and [`SpaceError::Invalidate`]
    /// nothing is bound where the requests were; after the latter the memory must not be used again.
    fn apply(&mut self, requests: &[BindRequest]) -> Result<(), SpaceError>;

    /// Waits until everything that was bound is seen by programs on the device.
    ///
    /// # Errors
    /// [`SpaceError::Driver`].
    fn settle(&mut self) -> Result<(), SpaceError> {
        Ok(())
    }

    /// How a queue reaches what is bound at `va`; in a [flat](AddressSpaceKind::Flat) space by its card address.
    fn at(&self, va: DeviceVa) -> DeviceAddr {
        DeviceAddr::Va(va)
    }

    /// Leaves of the page table by size; empty where there is none, or the driver does not tell.
    fn leaf_counts(&self) -> Vec<(PageSize, u64)> {
        Vec::new()
    }

    /// The VM behind the space, to look at; `None` where the tables are not ours.
    fn vm(&self) -> Option<&dyn AnyVm> {
        None
    }
}

/// The kinds of translation behind a device's virtual addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AddressSpaceKind {
    /// Page tables that this library writes.
    PageTables {
        /// The name of their format.
        format: &'static str,
    },
    /// Calls of the device's driver.
    Driver {
        /// The driver's name for them ("sparse binding").
        name: &'static str,
    },
    /// Nothing: virtual addresses are card addresses, and a buffer must be one segment.
    Flat,
}

/// Refuses what only page tables of ours can do: for spaces without, a driver's and flat ones.
///
/// # Errors
/// [`SpaceError::NoTables`] for null pages, pages that repeat, and attributes of memory.
pub fn without_tables(request: &BindRequest) -> Result<(), SpaceError> {
    match request {
        BindRequest::Bind { access, .. } if *access != access.rights() => Err(SpaceError::NoTables),
        BindRequest::Null { .. } | BindRequest::Repeat { .. } => Err(SpaceError::NoTables),
        _ => Ok(()),
    }
}

/// Why an address space did not do something.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// No range is free that is long enough.
    #[error("no {0} bytes are left in the device's virtual address space")]
    Exhausted(u64),
    /// A buffer of several segments in a flat space.
    #[error("the buffer has {0} segments, and this device has no MMU: its memory must be contiguous")]
    Fragmented(u64),
    /// A range that is longer than its buffer, in a flat space.
    #[error("a range of {len} bytes for a buffer of {has}, on a device without an MMU")]
    TooShort {
        /// Bytes asked for.
        len: u64,
        /// Bytes of the buffer.
        has: u64,
    },
    /// A bind in a flat space that is not where the buffer lies.
    #[error("this device has no MMU, so only what lies at {0} can be seen there")]
    Elsewhere(DeviceVa),
    /// A request that needs page tables of ours.
    #[error("without page tables of ours only parts of buffers are bound, with plain rights, and ranges unbound")]
    NoTables,
    /// A range that was not reserved, or not as a whole.
    #[error("{0} is not reserved")]
    NotReserved(Span<DeviceVa>),
    /// The page tables.
    #[error(transparent)]
    Vm(#[from] dmalane_vm::Error),
    /// The device could not be made to forget translations. Ranges that were unbound must not be used again.
    #[error("cannot invalidate the device's translations")]
    Invalidate(#[source] Box<dyn Error + Send + Sync>),
    /// The requests were refused before the driver was asked: its limits, or memory that is not there.
    #[error(transparent)]
    Refused(Box<dyn Error + Send + Sync>),
    /// The driver's call failed.
    #[error("the device's driver failed")]
    Driver(#[source] Box<dyn Error + Send + Sync>),
}
