//! BARs that are mapped for the DMA of other devices.
//!
//! `unsafe` where devices get access to a BAR: it is memory that no reference of this process leads into.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova, Lease, Span};
use rustix::io::Errno;

use crate::container::{Inner, Kernel, explain};
use crate::error::RegionError;
use crate::gate::Revocable;
use crate::{BarMap, Error, VfioContainer, sys};

/// Part of a BAR that is mapped for the devices of a container. Unmapped on drop; keeps the BAR mapped in this process
/// until then.
pub struct PeerMapping {
    span: Span<Iova>,
    access: Access,
    /// Offset in the mapping of the BAR.
    start: u64,
    /// `None` only during drop.
    lease: Option<Lease<Iova>>,
    container: Arc<Inner>,
    /// Dropped after `PeerMapping::drop` has unmapped.
    bar: Arc<BarMap>,
    method: &'static str,
    map_time: Duration,
    live: Arc<Revocable>,
}

impl VfioContainer {
    /// Maps part of a BAR of a device (the same or another one) for the devices of this container, for peer-to-peer
    /// DMA.
    ///
    /// With type 1 the kernel walks the mapping of the BAR in this process. With iommufd the BAR is mapped as a
    /// dma-buf; when its device is reset, or its memory is disabled, the kernel removes the mapping
    /// ([`PeerMapping::is_mapped`]), and it must be renewed ([`PeerMapping::renew`]).
    ///
    /// # Errors
    /// As [`VfioContainer::map_at`]; [`Error::Region`] when the range is not within `bar`, or the device does not
    /// respond; [`Error::NoDmaBuf`].
    pub fn map_peer(&self, bar: &Arc<BarMap>, range: Range<u64>, access: Access) -> Result<PeerMapping, Error> {
        let len = range.end.checked_sub(range.start).filter(|len| *len > 0 && range.end <= bar.len());
        let len = len.ok_or_else(|| bar.error(RegionError::OutOfRange))?;
        if !(range.start | range.end | bar.range().start).is_multiple_of(sys::base_page()) {
            return Err(bar.error(RegionError::NotWholePages));
        }
        let container = &self.0;
        let mut state = container.lock();
        let (method, congruent) = match container.kernel.get().ok_or(Error::Unopened)? {
            Kernel::Type1(_) => ("type1", bar.address() as u64 + range.start),
            // The physical address of a BAR is a multiple of its length.
            Kernel::Iommufd(_) => ("dma-buf", bar.range().start + range.start),
        };
        let lease = state.iovas.allocate(congruent, len)?;
        let span = lease.span();
        match map_bar(container, bar, range.start, span, access) {
            Ok((live, map_time)) => Ok(PeerMapping {
                span,
                access,
                start: range.start,
                lease: Some(lease),
                container: container.clone(),
                bar: bar.clone(),
                method,
                map_time,
                live,
            }),
            Err(e) => {
                state.iovas.free(lease);
                Err(e)
            }
        }
    }
}

impl PeerMapping {
    /// False after the kernel has removed the mapping, because the device of the BAR was reset, or did not respond for
    /// a while: its memory was disabled, or it was in a low-power state. Accesses of other devices are stopped by the
    /// IOMMU then. Type 1 keeps its mappings.
    pub fn is_mapped(&self) -> bool {
        self.live.is_live()
    }

    /// Maps the range again, at the same IOVAs, if the kernel has removed the mapping.
    ///
    /// # Errors
    /// As [`VfioContainer::map_peer`]; [`Error::Region`] while the device does not
    /// respond.
    pub fn renew(&mut self) -> Result<(), Error> {
        if self.is_mapped() {
            return Ok(());
        }
        let _state = self.container.lock();
        // iommufd keeps the IOVAs of a mapping that it has emptied.
        if let Some(kernel) = self.container.kernel.get() {
            kernel.unmap(self.span)?;
        }
        let (live, map_time) = map_bar(&self.container, &self.bar, self.start, self.span, self.access)?;
        (self.live, self.map_time) = (live, map_time);
        Ok(())
    }

    /// The IOVAs of the range.
    pub fn span(&self) -> Span<Iova> {
        self.span
    }

    /// The BAR.
    pub fn bar(&self) -> &BarMap {
        &self.bar
    }

    /// How the BAR was mapped: "type1" by the process's page table, "dma-buf" without one, through iommufd.
    pub fn method(&self) -> &'static str {
        self.method
    }

    /// Time that the kernel took to map it.
    #[doc(hidden)]
    pub fn map_time(&self) -> Duration {
        self.map_time
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        self.live.end();
        if let Some(lease) = self.lease.take() {
            // The memory is the device's; a refused unmap keeps its IOVAs.
            let _ended = self.container.release(lease);
        }
    }
}

impl fmt::Debug for PeerMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerMapping")
            .field("span", &self.span)
            .field("method", &self.method)
            .field("map_time", &self.map_time)
            .finish_non_exhaustive()
    }
}

/// Maps part of a BAR, and measures the kernel.
fn map_bar(
    container: &Inner,
    bar: &BarMap,
    start: u64,
    span: Span<Iova>,
    access: Access,
) -> Result<(Arc<Revocable>, Duration), Error> {
    if start.checked_add(span.len()).is_none_or(|end| end > bar.len()) {
        return Err(bar.error(RegionError::OutOfRange));
    }
    // No reset until the mapping is registered.
    let _gate = bar.device().responding(bar.region())?;
    let va = bar.address() + start as usize;
    let began = Instant::now();
    let kernel = container.kernel.get().ok_or(Error::Unopened)?;
    match kernel {
        // SAFETY: memory of the BAR, as was checked above, to which nobody has references (`BarMemory`). The kernel
        // pins it, so that it stays the device's even if the BAR is unmapped here.
        Kernel::Type1(_) => unsafe { container.map_span(va, None, span, access)? },
        Kernel::Iommufd(space) => {
            let dma_buf = bar.dma_buf()?;
            // SAFETY: as above; the dma-buf is of this BAR.
            let mapped = unsafe { space.map_dma_buf(dma_buf, start, span, access) };
            mapped.map_err(|source| match Errno::from_io_error(&source) {
                Some(Errno::NODEV) => bar.error(RegionError::Disabled),
                _ => explain(source, (bar.range().start + start) as usize, span, access),
            })?;
        }
    }
    let map_time = began.elapsed();
    let live = Arc::new(Revocable::new(span.len(), container.mapped.clone()));
    if let Kernel::Iommufd(_) = kernel {
        bar.device().gate().register(&live);
    }
    Ok((live, map_time))
}
