//! Files as a [`Device`]: one region of memory, no MMU, and a queue.

use std::sync::Arc;

use dmalane_addr::{CardAddr, Span};
use dmalane_device::{AddressSpace, BackingFiles, Device, DeviceInfo, DeviceMemory, FlatSpace, Region, contents};
use dmalane_dma::Registrar;
use dmalane_queue::DeviceQueue;

use super::opened::Opened;
use super::protected::Protected;
use super::{FileDeviceError, FileDeviceOptions, FileDevicePaths, FileDeviceQueue};

/// A device that is a file, or two: one region of memory, no MMU, and a queue.
pub struct FileDevice {
    opened: Arc<Opened>,
    regions: Vec<Region>,
    queue: Option<FileDeviceQueue>,
    space: FlatSpace,
}

impl FileDevice {
    /// Opens the files.
    ///
    /// A block device is opened exclusively, so that a mounted one is not overwritten. The length of a file is its
    /// length now: nothing is written past it.
    ///
    /// # Errors
    /// [`FileDeviceError`].
    pub fn open(paths: FileDevicePaths, options: FileDeviceOptions) -> Result<Self, FileDeviceError> {
        let opened = Arc::new(Opened::new(paths, options)?);
        // A character device does not say how long it is: as long as a file can be.
        let len = opened.len.unwrap_or(i64::MAX as u64);
        let span = Span::new(CardAddr::new(0), len & !0xfff).expect("a page at least, which was checked");
        let queue = Some(FileDeviceQueue::open(opened.clone())?);
        Ok(Self { opened, regions: vec![Region::new("device", span)], queue, space: FlatSpace::new() })
    }

    /// Addresses, lengths and host memory are multiples of this: 1 unless [`FileDeviceOptions::direct`].
    pub fn alignment(&self) -> usize {
        self.opened.align.map_or(1, |a| a.memory.max(a.offset))
    }

    /// A queue. There can be any number of them; only within one queue do operations wait for others on the same
    /// addresses.
    ///
    /// # Errors
    /// [`FileDeviceError::NoQueue`] when the kernel refuses threads.
    pub fn queue(&self) -> Result<FileDeviceQueue, FileDeviceError> {
        FileDeviceQueue::open(self.opened.clone())
    }
}

impl Device for FileDevice {
    fn info(&self) -> DeviceInfo {
        let FileDevicePaths { h2c, c2h } = &self.opened.paths;
        let name = match h2c == c2h {
            true => format!("file:{}", h2c.display()),
            false => format!("file:{},c2h={}", h2c.display(), c2h.display()),
        };
        let cache = if self.opened.options.direct { "direct" } else { "buffered" };
        let notes = vec![format!("by {cache} I/O, pread and pwrite on threads")];
        DeviceInfo { name, notes, processors: 1, ..DeviceInfo::default() }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn memory(&self) -> DeviceMemory {
        let memory = DeviceMemory::new(&self.regions);
        if self.opened.options.overwrite {
            return memory;
        }
        match contents::reopen(&self.opened.h2c) {
            Ok(Some(file)) => memory.driven_by(Protected::new(file, self.opened.paths.h2c.clone())),
            // A character device, or a file that may only be written: nobody can say what it holds.
            _ => memory,
        }
    }

    /// Gives registrations their names; queues also take memory without a registration.
    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.opened.registrar.clone())
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        self.queue.take().map(|queue| Box::new(queue) as Box<DeviceQueue>).into_iter().collect()
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut self.space
    }

    fn backing_files(&self) -> Option<BackingFiles> {
        Some(BackingFiles { written: self.opened.h2c.clone(), read: self.opened.c2h.clone() })
    }
}

dmalane_dma::debug_as!(FileDevice, |it| "FileDevice({})", it.opened.paths.h2c.display());
