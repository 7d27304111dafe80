//! The work of a queue and of an address space written by hand: what benches compare with.
//!
//! `unsafe` for `vkQueueBindSparse`: [`ByHand`] keeps what it names until it has happened.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use ash::vk;
use dmalane_addr::{CardAddr, PageSize};
use dmalane_dma::BufferRef;
use dmalane_queue::Direction;

use crate::channel::Channel;
use crate::gpu::{Buffer, Gpu, SparseBind, Timeline};
use crate::{CallError, Error, VulkanDevice};

const LONG: Duration = Duration::from_secs(60);
/// Bytes of the sparse buffer, where the driver has such long ones.
const LONGEST: u64 = 1 << 34;

/// Commands and binds without a queue or an address space of this crate.
pub struct ByHand {
    gpu: Arc<Gpu>,
    channel: Channel<()>,
    /// A sparse buffer of its own; made when it is used first.
    sparse: Option<Sparse>,
}

struct Sparse {
    buffer: Arc<Buffer>,
    /// Ranges are multiples of it.
    granule: u64,
    timeline: Timeline,
    value: u64,
    /// The memory that was bound, which so is not freed before.
    bound: Vec<Arc<Buffer>>,
}

/// Host memory that the GPU reaches.
pub struct Imported(Arc<Buffer>);

fn unsuitable(gpu: &Gpu, missing: &str) -> Error {
    Error::Unsuitable { name: gpu.info().name.clone(), missing: missing.to_owned() }
}

fn timed_out(call: &'static str) -> Error {
    CallError { call, result: vk::Result::TIMEOUT }.into()
}

impl ByHand {
    /// On the first queue of a device.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(device: &VulkanDevice) -> Result<Self, Error> {
        let gpu = device.shared().clone();
        Ok(Self { channel: Channel::new(&gpu, 0)?, gpu, sparse: None })
    }

    /// Imports a buffer.
    ///
    /// # Errors
    /// [`Error`], also where the driver cannot import.
    pub fn import(&self, buffer: &BufferRef) -> Result<Imported, Error> {
        Ok(Imported(self.gpu.import(buffer, 0, buffer.len())?))
    }

    /// Copies regions (offset in host memory, offset from `at`, bytes) in one command buffer, and waits.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Panics
    /// For a region that is not within both sides.
    pub fn copy(
        &mut self,
        device: &VulkanDevice,
        direction: Direction,
        host: &Imported,
        at: CardAddr,
        regions: impl Iterator<Item = (u64, u64, u64)>,
    ) -> Result<(), Error> {
        let memory = device.buffer_at(at).ok_or(Error::NotAllocated(at))?;
        let mut recording = self.channel.begin()?;
        let regions: Vec<_> = regions
            .map(|(host, device, size)| match direction {
                Direction::FromHost => vk::BufferCopy { src_offset: host, dst_offset: device, size },
                Direction::ToHost => vk::BufferCopy { src_offset: device, dst_offset: host, size },
            })
            .collect();
        match direction {
            Direction::FromHost => self.channel.copy(&mut recording, &host.0, &memory, &regions),
            Direction::ToHost => self.channel.copy(&mut recording, &memory, &host.0, &regions),
        }
        self.channel.show_host(&recording);
        self.channel.submit(recording, None, ()).map_err(|((), e)| e)?;
        let mut ended = false;
        while !ended {
            self.channel.wait(LONG)?;
            self.channel.ended(|()| ended = true)?;
        }
        Ok(())
    }

    /// Binds ranges of a sparse buffer by one `vkQueueBindSparse`: each the first page, how many there are, and the
    /// page from `at` on that the first gets, or none. [`ByHand::settle`] waits.
    ///
    /// # Errors
    /// [`Error`].
    pub fn bind(
        &mut self,
        device: &VulkanDevice,
        page: PageSize,
        at: CardAddr,
        binds: impl Iterator<Item = (u64, u64, Option<u64>)>,
    ) -> Result<(), Error> {
        if self.sparse.is_none() {
            let longest = self.gpu.info().max_buffer.min(LONGEST);
            let (buffer, granule) = self.gpu.sparse_buffer(longest / page.bytes() * page.bytes())?;
            let timeline = Timeline::new(&self.gpu)?;
            self.sparse = Some(Sparse { buffer, granule, timeline, value: 0, bound: Vec::new() });
        }
        let Sparse { buffer, granule, timeline, value, bound } = self.sparse.as_mut().expect("made above");
        if !page.bytes().is_multiple_of(*granule) {
            return Err(unsuitable(&self.gpu, "such small pages"));
        }
        let chunk = device.buffer_at(at).ok_or(Error::NotAllocated(at))?;
        let memory = chunk.memory().ok_or_else(|| unsuitable(&self.gpu, "memory behind its buffers"))?;
        let len = page.bytes();
        let binds: Vec<_> = binds
            .map(|(i, pages, from)| SparseBind {
                at: i * len,
                len: pages * len,
                memory: from.map(|from| (&**memory, from * len)),
            })
            .collect();
        if !bound.iter().any(|kept| Arc::ptr_eq(kept, &chunk)) {
            bound.push(chunk.clone());
        }
        *value += 1;
        // SAFETY: the drop waits before it gives up the buffer, its memory and the timeline; nothing uses the buffer.
        // Pages are whole granules, checked above, of memory of the device.
        unsafe { self.gpu.bind_sparse(&[(buffer.clone(), binds)], timeline, *value) }.map_err(Error::from)
    }

    /// Waits for all binds.
    ///
    /// # Errors
    /// [`Error`].
    pub fn settle(&self) -> Result<(), Error> {
        match &self.sparse {
            Some(sparse) if !sparse.timeline.wait(sparse.value, LONG)? => Err(timed_out("vkQueueBindSparse")),
            _ => Ok(()),
        }
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        if self.settle().is_err() && !self.gpu.has_bound() {
            std::mem::forget(self.sparse.take());
        }
    }
}
