//! Devices that can be validated.

use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_addr::{CardAddr, SgTable, Span};
use dmalane_device::{BackingFiles, Device, DeviceMemory, DriverCopies, Placement, Region, areas};
use dmalane_dma::Registrar;
use dmalane_queue::{Area, Class, DeviceAddr, DeviceQueue, Queue, Route, SharedHandle, SharedOptions, SharedQueue};

use crate::backup::{Backup, Original, claim};
use crate::link::{Half, Limit, Link, Slow, assumptions};
use crate::place::Memories;
use crate::{Phase, ValidateError};

/// A modelled link is this many times slower than what it stands for: its rates must be far below what the machine
/// copies.
pub const SLOWER: f64 = 50.0;

/// The treatment of the contents of a device that is made of files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Contents {
    /// A measurement of a device that holds data is refused. A file of zeroes or holes holds none; a character device
    /// always may.
    #[default]
    Refuse,
    /// They are overwritten.
    Overwrite,
    /// They are backed up on disk before anything is written, and restored at the end. A regular file's backup lies
    /// beside it as `.NAME.dmalane-backup`, a block device's in `/var/lib/dmalane` (root's) or the user's
    /// `~/.local/state/dmalane`; after SIGKILL the next [`TestedDevice::new`] with the same device finds and restores
    /// it, unless the device was written since. Character devices cannot be restored, and are refused.
    Restore,
}

/// A device with its queues, ready to be measured.
pub struct TestedDevice {
    /// A description for people.
    pub name: String,
    /// The modelled link, for people.
    link: Option<String>,
    pub(crate) registrar: Arc<dyn Registrar>,
    pub(crate) queues: Vec<SharedQueue<Box<DeviceQueue>>>,
    pub(crate) memories: Memories,
    /// The memory of a device whose driver allocates it: only what is allocated may be used.
    driven: Option<Mutex<DeviceMemory>>,
    pub(crate) areas: Vec<Area>,
    pub(crate) reference: Reference,
    /// Its queues work at the same time.
    pub(crate) concurrent: bool,
    /// See [`TIMEOUT`].
    pub(crate) timeout: Duration,
    /// It is to be left alone.
    pub(crate) cancelled: Arc<AtomicBool>,
    contents: Contents,
    recovered: Option<PathBuf>,
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
    /// The optimum of a modelled link.
    Optimum { link: Link, halves: Halves },
}

/// The halves of a card's memories.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Halves {
    ddr: Span<CardAddr>,
    hbm: [Span<CardAddr>; 2],
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

    /// The halves of a card.
    pub fn halves(self) -> Option<Halves> {
        match self {
            Self::Card { ddr, hbm } => Some(Halves { ddr, hbm }),
            Self::One(_) => None,
        }
    }
}

impl Halves {
    pub fn of(&self, at: CardAddr) -> Half {
        let upper = |span: Span<CardAddr>| at.bits() - span.first().bits() >= span.len() / 2;
        match () {
            () if self.ddr.contains(at) && !upper(self.ddr) => Half::Ddr0,
            () if self.ddr.contains(at) => Half::Ddr1,
            () if self.hbm[1].contains(at) => Half::Hbm1,
            () => Half::Hbm0,
        }
    }

    /// The first address of a half, and its bytes.
    pub fn span(&self, half: Half) -> (CardAddr, u64) {
        let ddr = self.ddr.len() / 2;
        match half {
            Half::Ddr0 => (self.ddr.first(), ddr),
            Half::Ddr1 => (CardAddr::new(self.ddr.first().bits() + ddr), ddr),
            Half::Hbm0 => (self.hbm[0].first(), self.hbm[0].len()),
            Half::Hbm1 => (self.hbm[1].first(), self.hbm[1].len()),
        }
    }
}

/// The links that can be emulated, by name: `half-egress-14` and so on.
pub fn emulations() -> Vec<(String, Link)> {
    assumptions::all()
        .into_iter()
        .chain(assumptions::v80())
        .map(|a| (a.name.replace(' ', "-"), slower(&a.link)))
        .collect()
}

/// The same link with each of its rates divided by [`SLOWER`].
fn slower(link: &Link) -> Link {
    let limit = |l: &Limit| Limit { capacity: l.capacity.iter().map(|(t, c)| (*t, c / SLOWER)).collect(), ..l.clone() };
    let limits = link.limits().iter().map(limit).collect();
    Link::new(link.channels(), limits, link.latency()).expect("positive rates stay positive")
}

/// A backup that was restored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// Its path.
    pub backup: PathBuf,
    /// It is still there, because it may be of another file or disk: who knows better removes it. Others are gone.
    pub stays: bool,
    /// The bytes of the device that were restored; others are as they were.
    pub range: Range<u64>,
    /// The path of a backup of the contents that were replaced, in the same form: renamed to `backup`, it can be
    /// restored too.
    pub replaced: PathBuf,
}

/// Restores the backup that a killed run left of a device which is made of files, although the device was written
/// since or is another one.
///
/// # Errors
/// [`ValidateError::NoBackup`], [`ValidateError::NeverBackedUp`], [`ValidateError::Recover`],
/// [`ValidateError::Backup`]; those of [`claim`].
pub fn recover(device: &dyn Device) -> Result<Recovered, ValidateError> {
    let none = || ValidateError::NeverBackedUp(device.info().name);
    let files = device.backing_files().ok_or_else(none)?;
    claim(&files)?;
    Original::of(&files.written)?.ok_or_else(none)?.recover_over()
}

impl TestedDevice {
    /// Takes the queues of a device that nothing else uses: it is [claimed](claim). `contents` says what becomes of
    /// what a device that is made of files holds; that of other devices is lost. A backup of a run that was killed is
    /// restored first, whatever `contents` says, unless the device holds something that is neither in the backup nor
    /// what a run writes.
    ///
    /// # Errors
    /// [`ValidateError::Lost`], [`ValidateError::Recover`], [`ValidateError::Backup`], [`ValidateError::Left`],
    /// [`ValidateError::DriverCopies`], those of [`claim`]; nothing was written.
    pub fn new(device: Box<dyn Device>, contents: Contents) -> Result<Self, ValidateError> {
        Self::with(device, contents, |queues| Ok(queues.into_iter().map(share).collect()))
    }

    /// A card that seems to hang off the modelled link of this name, one of [`emulations`]. `catch_up`: with how much
    /// the link catches up when its threads did not get to run, `None` for a millisecond. It moves as much more after
    /// idle time. For [`fit_link`](crate::fit_link) on busy machines.
    ///
    /// # Errors
    /// [`ValidateError::NoEmulation`], [`ValidateError::TooManyChannels`]; [`ValidateError::NothingToFit`] for a device
    /// that is not a card with DDR and HBM.
    pub fn emulated(device: Box<dyn Device>, name: &str, catch_up: Option<Duration>) -> Result<Self, ValidateError> {
        let links = emulations();
        let known = links.iter().map(|(name, _)| name.clone()).collect();
        let found = links.into_iter().find(|(known, _)| known == name);
        let (_, link) = found.ok_or_else(|| ValidateError::NoEmulation { name: name.to_owned(), known })?;
        let halves = Memories::of(device.regions()).halves().ok_or(ValidateError::NothingToFit)?;
        let half = move |at: DeviceAddr| match at {
            DeviceAddr::Card(at) => halves.of(at),
            DeviceAddr::Va(_) => Half::Ddr0,
        };
        let burst = catch_up.unwrap_or(Duration::from_millis(1));
        let mut target = Self::with(device, Contents::Overwrite, |queues| {
            let (wanted, most) = (queues.len(), link.channels());
            match wanted > most {
                true => Err(ValidateError::TooManyChannels { wanted, most }),
                false => Ok(Slow::catching_up(queues, link.clone(), burst, half).into_iter().map(share).collect()),
            }
        })?;
        target.name = format!("{} behind the modelled link {name}", target.name);
        target.link = Some(format!("the rates of the link {name} are those of its assumption divided by {SLOWER}"));
        target.reference = Reference::Optimum { link, halves };
        target.concurrent = true;
        Ok(target)
    }

    fn with(
        mut device: Box<dyn Device>,
        contents: Contents,
        share: impl FnOnce(Vec<Box<DeviceQueue>>) -> Result<Vec<SharedQueue<Box<DeviceQueue>>>, ValidateError>,
    ) -> Result<Self, ValidateError> {
        let info = device.info();
        let mut recovered = None;
        let reference = match device.backing_files() {
            None => match device.driver_copies().map_err(ValidateError::DriverCopies)? {
                Some(copies) => Reference::Driver(Mutex::new(copies)),
                None => Reference::Copies,
            },
            Some(files) => {
                let is_lost = |file: &std::fs::File| file.metadata().is_ok_and(|m| m.file_type().is_char_device());
                if contents != Contents::Overwrite && (is_lost(&files.written) || is_lost(&files.read)) {
                    return Err(ValidateError::Lost(info.name));
                }
                if claim(&files)?.is_some()
                    && let Some(original) = Original::of(&files.written)?
                {
                    recovered = original.recover()?;
                }
                Reference::Files(files)
            }
        };
        let memory = device.memory();
        Ok(Self {
            name: info.name,
            link: None,
            registrar: device.registrar(),
            queues: share(device.take_queues())?,
            memories: Memories::of(device.regions()),
            driven: memory.is_driven().then(|| Mutex::new(memory)),
            areas: areas(device.regions()),
            reference,
            concurrent: info.concurrent,
            timeout: TIMEOUT,
            cancelled: Arc::default(),
            contents,
            recovered,
            device,
        })
    }

    /// How it is driven, as it is now, for people; a line each.
    pub fn notes(&self) -> Vec<String> {
        self.device.info().notes.into_iter().chain(self.link.clone()).collect()
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.queues.len()
    }

    /// A handle of one of the queues.
    pub(crate) fn queue(&self, channel: usize) -> SharedHandle<Box<DeviceQueue>> {
        self.queues[channel].handle(Class::Normal)
    }

    /// The possible measurements, in the order of a report.
    pub fn phases(&self) -> Vec<Phase> {
        match self.memories {
            Memories::Card { .. } => vec![Phase::Hbm, Phase::Ddr, Phase::Both],
            Memories::One(_) => vec![Phase::Device],
        }
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

    /// The halves of a card.
    pub(crate) fn halves(&self) -> Option<Halves> {
        self.memories.halves()
    }

    /// The areas as a policy over these channels sees them.
    pub(crate) fn areas_for(&self, channels: &[usize]) -> Vec<Area> {
        let route = |route| match route {
            Route::Channel(c) => channels.iter().position(|of| *of == c).map_or(Route::Shared, Route::Channel),
            Route::Shared => Route::Shared,
        };
        self.areas.iter().map(|a| Area { span: a.span, route: route(a.route) }).collect()
    }

    /// The backup of an earlier run that was restored, and is gone.
    pub fn recovered(&self) -> Option<&Path> {
        self.recovered.as_deref()
    }

    /// Backs up what the device holds there, if it is a file that holds something for good and is to be restored.
    pub(crate) fn back_up(&self, offset: u64, len: u64) -> Result<Option<Backup>, ValidateError> {
        let Reference::Files(files) = &self.reference else { return Ok(None) };
        if self.contents == Contents::Overwrite {
            return Ok(None);
        }
        let Some(original) = Original::of(&files.written)? else { return Ok(None) };
        match self.contents {
            Contents::Restore => original.back_up(offset, len).map(Some),
            _ if original.holds_data(offset, len)? => Err(ValidateError::HoldsData(self.name.clone())),
            _ => Ok(None),
        }
    }

    /// True while the device still has what no thread waits for any more.
    pub(crate) fn hangs(&self) -> bool {
        self.queues.iter().any(|queue| queue.in_flight() > 0)
    }

    /// Ends the measurement, with [`ValidateError::Interrupted`], as soon as this is true. Operations under way end,
    /// and content that is to be restored is restored.
    pub fn stop_when(&mut self, cancelled: Arc<AtomicBool>) {
        self.cancelled = cancelled;
    }
}

/// Time that threads that end wait for their buffers.
const DROP_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });

/// Lets threads share a queue, with as many operations as it holds.
pub(crate) fn share(queue: impl Queue<Addr = DeviceAddr> + 'static) -> SharedQueue<Box<DeviceQueue>> {
    let capacity = queue.limits().capacity;
    SharedQueue::new(Box::new(queue), SharedOptions { inside: capacity, total: capacity, drop_timeout: DROP_TIMEOUT })
}

/// Time without a completion after which a device counts as stuck, besides the time that a buffer takes at
/// [`SLOWEST`].
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes per second that a device moves at least, unless it is stuck.
pub(crate) const SLOWEST: u64 = 4_000_000;
