//! Devices that can be validated.

use std::os::unix::fs::FileTypeExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_addr::{CardAddr, SgTable, Span};
use dmalane_device::{BackingFiles, Device, DeviceMemory, DriverCopies, Placement, Region, areas, contents};
use dmalane_dma::Registrar;
use dmalane_queue::{Area, DeviceAddr, DeviceQueue, Queue, Route, SharedHandle, SharedOptions, SharedQueue};

use crate::error::ValidateError;
use crate::place::Memories;
use crate::settings::Phase;

/// A device with its queues, ready to be measured.
pub struct TestedDevice {
    /// A description for people.
    pub name: String,
    pub(crate) registrar: Arc<dyn Registrar>,
    pub(crate) queues: Vec<SharedQueue<Box<DeviceQueue>>>,
    pub(crate) memories: Memories,
    /// The memory of a device whose driver allocates it: only what is allocated may be used.
    driven: Option<Mutex<DeviceMemory>>,
    pub(crate) areas: Vec<Area>,
    pub(crate) reference: Reference,
    /// Its queues work at the same time.
    pub(crate) concurrent: bool,
    /// A thread of the device copies beside those that poll.
    pub(crate) helped: bool,
    /// See [`TIMEOUT`].
    pub(crate) timeout: Duration,
    /// It is to be left alone.
    pub(crate) cancelled: Arc<AtomicBool>,
    overwrite: bool,
    /// The owner of the queues; dropped after them.
    device: Box<dyn Device>,
}

/// Memory that was allocated for a measurement.
pub(crate) struct Allocated<'a> {
    memory: MutexGuard<'a, DeviceMemory>,
    tables: Vec<SgTable<CardAddr>>,
    memories: Memories,
}

impl Allocated<'_> {
    /// The memory, instead of all that the device has.
    pub const fn memories(&self) -> Memories {
        self.memories
    }

    /// Allocates `len` bytes in a region, or all of it where it has less; one range.
    fn add(&mut self, region: &Region, len: u64) -> Result<Option<Span<CardAddr>>, ValidateError> {
        let placement = Placement::Named(region.name.clone());
        let table =
            self.memory.allocate(len.min(region.span.len()), &placement).map_err(ValidateError::DeviceMemory)?;
        let span = table.segments().next().and_then(|s| Span::new(s.addr, s.len));
        self.tables.push(table);
        Ok(span)
    }
}

impl Drop for Allocated<'_> {
    fn drop(&mut self) {
        for table in &self.tables {
            let freed = self.memory.free(table.segments());
            debug_assert!(freed.is_ok(), "it was allocated there");
        }
    }
}

/// The reference that is measured beside a figure.
pub(crate) enum Reference {
    /// Copies in memory.
    Copies,
    /// Plain calls on the same files.
    Files(BackingFiles),
    /// Copies by the device's driver.
    Driver(Mutex<Box<dyn DriverCopies>>),
}

impl Memories {
    /// A card with DDR and two halves of HBM, or else the first region.
    pub fn of(regions: &[Region]) -> Self {
        let named = |name: &str| regions.iter().find(|r| r.name == name).map(|r| r.span);
        match (named("ddr"), named("hbm0"), named("hbm1")) {
            (Some(ddr), Some(low), Some(high)) => Self::Card { ddr, hbm: [low, high] },
            _ => Self::One(regions.first().map(|r| r.span)),
        }
    }

    /// Bytes of the least of them.
    pub fn least(self) -> u64 {
        match self {
            Self::One(memory) => memory.map_or(0, |memory| memory.len()),
            Self::Card { ddr, hbm } => ddr.len().min(hbm[0].len() + hbm[1].len()),
        }
    }
}

impl TestedDevice {
    /// Takes the queues of a device that nothing else uses: its file is [locked](contents::lock). What that
    /// file holds is lost only with `overwrite`, without which a file must hold zeroes or holes; the contents of other
    /// devices are lost.
    ///
    /// # Errors
    /// [`ValidateError::Lost`], [`ValidateError::Lock`], [`ValidateError::DriverCopies`]; nothing was written.
    pub fn new(mut device: Box<dyn Device>, overwrite: bool) -> Result<Self, ValidateError> {
        let info = device.info();
        let reference = match device.backing_files() {
            None => match device.driver_copies().map_err(ValidateError::DriverCopies)? {
                Some(copies) => Reference::Driver(Mutex::new(copies)),
                None => Reference::Copies,
            },
            Some(files) => {
                let is_lost = |file: &std::fs::File| file.metadata().is_ok_and(|m| m.file_type().is_char_device());
                if !overwrite && (is_lost(&files.written) || is_lost(&files.read)) {
                    return Err(ValidateError::Lost(info.name));
                }
                contents::lock(&files.written)?;
                Reference::Files(files)
            }
        };
        let memory = device.memory();
        Ok(Self {
            name: info.name,
            registrar: device.registrar(),
            queues: device.take_queues().into_iter().map(share).collect(),
            memories: Memories::of(device.regions()),
            driven: memory.is_driven().then(|| Mutex::new(memory)),
            areas: areas(device.regions()),
            reference,
            concurrent: info.concurrent,
            helped: info.helped,
            timeout: TIMEOUT,
            cancelled: Arc::default(),
            overwrite,
            device,
        })
    }

    /// How it is driven, as it is now, for people; a line each.
    pub fn notes(&self) -> Vec<String> {
        self.device.info().notes
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.queues.len()
    }

    /// A handle of one of the queues.
    pub(crate) fn queue(&self, channel: usize) -> SharedHandle<Box<DeviceQueue>> {
        self.queues[channel].handle()
    }

    /// The possible measurements, in the order of a report.
    pub fn phases(&self) -> Vec<Phase> {
        match self.memories {
            Memories::Card { .. } => vec![Phase::Hbm, Phase::Ddr, Phase::Both],
            Memories::One(_) => vec![Phase::Device],
        }
    }

    /// Bytes of the least of its memories; where a driver allocates, no more than it could now.
    pub(crate) fn least(&self) -> u64 {
        let room = |memory: &Mutex<DeviceMemory>| {
            memory.lock().unwrap_or_else(PoisonError::into_inner).room(&Placement::Default)
        };
        self.memories.least().min(self.driven.as_ref().map_or(u64::MAX, room))
    }

    /// True for a device whose memory must be allocated.
    pub(crate) const fn is_driven(&self) -> bool {
        self.driven.is_some()
    }

    /// Allocates `len` bytes in the first region of a device whose memory must be allocated, or in each memory of a
    /// card that these phases use; `None` for other devices, all of whose memory may be used.
    pub(crate) fn allocate(&self, len: u64, phases: &[Phase]) -> Result<Option<Allocated<'_>>, ValidateError> {
        let Some(driven) = &self.driven else { return Ok(None) };
        let memory = driven.lock().unwrap_or_else(PoisonError::into_inner);
        let regions: Vec<Region> = memory.regions().cloned().collect();
        let mut taken = Allocated { memory, tables: Vec::new(), memories: self.memories };
        let uses = |phase| phases.contains(&phase) || phases.contains(&Phase::Both);
        match &mut taken.memories.clone() {
            Memories::One(_) => {
                let first = regions.first().map(|region| taken.add(region, len)).transpose()?;
                taken.memories = Memories::One(first.flatten());
            }
            Memories::Card { ddr, hbm: [low, high] } => {
                for (memory, phase) in [(&mut *ddr, Phase::Ddr), (&mut *low, Phase::Hbm), (&mut *high, Phase::Hbm)] {
                    if let Some(region) = regions.iter().find(|r| r.span == *memory).filter(|_| uses(phase))
                        && let Some(span) = taken.add(region, len)?
                    {
                        *memory = span;
                    }
                }
                taken.memories = Memories::Card { ddr: *ddr, hbm: [*low, *high] };
            }
        }
        Ok(Some(taken))
    }

    /// The areas as a policy over these channels sees them.
    pub(crate) fn areas_for(&self, channels: &[usize]) -> Vec<Area> {
        let route = |route| match route {
            Route::Channel(c) => channels.iter().position(|of| *of == c).map_or(Route::Shared, Route::Channel),
            Route::Shared => Route::Shared,
        };
        self.areas.iter().map(|a| Area { span: a.span, route: route(a.route) }).collect()
    }

    /// Refuses to overwrite these bytes of a file where they hold data that are to be kept.
    pub(crate) fn may_overwrite(&self, offset: u64, len: u64) -> Result<(), ValidateError> {
        let Reference::Files(files) = &self.reference else { return Ok(()) };
        if self.overwrite {
            return Ok(());
        }
        let holds_data = |file| contents::holds_data(&file, offset, len);
        match contents::reopen(&files.written).and_then(|file| file.map_or(Ok(false), holds_data)) {
            Ok(false) => Ok(()),
            Ok(true) => Err(ValidateError::HoldsData(self.name.clone())),
            Err(e) => Err(ValidateError::Contents(e)),
        }
    }

    /// Ends the measurement, with [`ValidateError::Interrupted`], as soon as this is true. Operations under way end.
    pub fn stop_when(&mut self, cancelled: Arc<AtomicBool>) {
        self.cancelled = cancelled;
    }
}

/// Time that threads that end wait for their buffers.
const DROP_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });

/// Lets threads share a queue, with as many operations as it holds.
pub(crate) fn share(queue: impl Queue<Addr = DeviceAddr> + 'static) -> SharedQueue<Box<DeviceQueue>> {
    let capacity = queue.limits().capacity;
    SharedQueue::new(Box::new(queue), SharedOptions { inside: capacity, each: capacity, drop_timeout: DROP_TIMEOUT })
}

/// Time without a completion after which a device counts as stuck, besides the time that a buffer takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
