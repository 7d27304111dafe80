//! Devices that can be validated.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::link::{Half, Limit, Link, Slow, assumptions};
use dmalane_addr::{CardAddr, Span};
use dmalane_card::{Card, CardConfig, CardQueue, SoftBus, Workers};
use dmalane_dma::{AnonHeap, Heap, HostBus, HostConfig, MemfdHeap, PageKind, SoftHost};
use dmalane_file::{FileDevice, FileDeviceOptions, FileDevicePaths};
use dmalane_queue::{Area, Class, DeviceAddr, DeviceQueue, Queue, Route, SharedHandle, SharedLimits, SharedQueue};

use crate::kept::Kept;
use crate::place::Memories;
use crate::{Phase, ValidateError};

/// A modelled link is this many times slower than what it stands for: its rates must be far below what the machine copies.
pub const SLOWER: f64 = 50.0;

/// A device with its channels, ready to be measured.
pub struct Target {
    /// What it is, for people.
    pub name: String,
    /// How it is driven, for people; a line each.
    pub notes: Vec<String>,
    pub(crate) bus: Arc<dyn HostBus>,
    pub(crate) queues: Vec<SharedQueue<Box<DeviceQueue>>>,
    pub(crate) memories: Memories,
    pub(crate) areas: Vec<Area>,
    pub(crate) ceiling: Ceiling,
    /// Its channels work at the same time.
    pub(crate) apart: bool,
    /// Its bus can map only what another process can have.
    lent: bool,
    /// See [`PATIENCE`].
    pub(crate) patience: Duration,
    /// It is to be left alone.
    pub(crate) told: Arc<AtomicBool>,
}

/// What is measured beside a figure.
pub(crate) enum Ceiling {
    /// Copies in memory.
    Copies,
    /// Plain calls on the same files.
    Files(FileDevice),
    /// The optimum of a modelled link.
    Optimum { link: Link, halves: Halves },
}

/// The halves of a card's memories.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Halves {
    ddr: Span<CardAddr>,
    hbm: [Span<CardAddr>; 2],
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

/// How the software card is made for a validation.
#[derive(Clone, Debug, Default)]
pub struct SoftTarget {
    /// The card; sizes are rounded up to what it can have.
    pub card: CardConfig,
    /// The host that it is plugged into.
    pub host: HostConfig,
    /// Entries of each ring; `None` for what the driver chooses.
    pub ring: Option<usize>,
    /// The name of a link that the card seems to hang off, one of [`emulations`].
    pub emulate: Option<String>,
    /// With how much a modelled link catches up when its threads did not get to run; `None` for a millisecond. It moves as much
    /// more after idle time. For [`fit_link`](crate::fit_link) on busy machines.
    pub catch_up: Option<Duration>,
}

/// The links that can be emulated, by name: `half-egress-14` and so on.
pub fn emulations() -> Vec<(String, Link)> {
    assumptions::all().into_iter().map(|a| (a.name.replace(' ', "-"), slower(&a.link))).collect()
}

/// The same link with each of its rates divided by [`SLOWER`].
fn slower(link: &Link) -> Link {
    let limit = |l: &Limit| Limit { capacity: l.capacity.iter().map(|(t, c)| (*t, c / SLOWER)).collect(), ..l.clone() };
    let limits = link.limits().iter().map(limit).collect();
    Link::new(link.channels(), limits, link.latency()).expect("positive rates stay positive")
}

/// A card that was just opened.
struct Opened<B: HostBus> {
    driver: Card<B>,
    channels: Vec<CardQueue<B>>,
    halves: Halves,
    /// Of each ring.
    entries: usize,
}

impl<B: HostBus> Opened<B> {
    fn new(bus: &Arc<B>, heap: &dyn Heap, ring: Option<usize>) -> Result<Self, ValidateError> {
        let driver = match ring {
            None => Card::open(bus.clone(), heap)?,
            Some(entries) => Card::open_with_rings(bus.clone(), heap, entries)?,
        };
        let layout = driver.layout();
        let channels = (0..driver.channels()).map(|i| driver.queue(i)).collect::<Result<Vec<_>, _>>()?;
        let lower = Span::inclusive(layout.hbm.first(), CardAddr::new(layout.hbm_half.bits() - 1));
        let upper = Span::inclusive(layout.hbm_half, layout.hbm.last());
        let hbm = [lower, upper].map(|half| half.expect("the driver has checked the boundary"));
        let entries = channels.first().map_or(0, |c| c.limits().capacity);
        Ok(Self { driver, channels, halves: Halves { ddr: layout.ddr, hbm }, entries })
    }
}

impl Target {
    /// The software card.
    ///
    /// # Errors
    /// [`ValidateError`] when it cannot be had as it is asked for.
    pub fn soft(soft: SoftTarget) -> Result<Self, ValidateError> {
        let mut card = soft.card;
        card.ddr = card.ddr.next_multiple_of(4 << 20);
        card.hbm = card.hbm.next_multiple_of(4 << 20);
        let emulated = match &soft.emulate {
            None => None,
            Some(name) => {
                let links = emulations();
                let known = links.iter().map(|(name, _)| name.clone()).collect();
                let found = links.into_iter().find(|(known, _)| known == name);
                Some(found.ok_or_else(|| ValidateError::NoEmulation { name: name.clone(), known })?)
            }
        };
        let host: SoftHost = SoftHost::new(soft.host).map_err(ValidateError::Memory)?;
        let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, card)?);
        let Opened { driver, channels, halves, entries } = Opened::new(&bus, &AnonHeap::new(), soft.ring)?;
        let mut notes = vec![format!("{} channels, {:?} workers, rings of {entries}", channels.len(), card.workers)];
        let (queues, ceiling, name) = match emulated {
            None => (channels.into_iter().map(share).collect(), Ceiling::Copies, "software card".to_owned()),
            Some((name, link)) => {
                if channels.len() > link.channels() {
                    return Err(ValidateError::TooManyChannels { wanted: channels.len(), most: link.channels() });
                }
                notes.push(format!("the rates of the link {name} are those of its assumption divided by {SLOWER}"));
                let half = move |at: DeviceAddr| match at {
                    DeviceAddr::Card(at) => halves.of(at),
                    DeviceAddr::Va(_) => Half::Ddr0,
                };
                let burst = soft.catch_up.unwrap_or(Duration::from_millis(1));
                let slow = Slow::catching_up(channels, link.clone(), burst, half);
                let queues = slow.into_iter().map(share).collect();
                (queues, Ceiling::Optimum { link, halves }, format!("software card behind the modelled link {name}"))
            }
        };
        let memories = Memories::Card { ddr: halves.ddr, hbm: halves.hbm };
        let apart = soft.emulate.is_some() || card.workers == Workers::PerChannel;
        let (areas, patience, told) = (driver.areas(), PATIENCE, Arc::default());
        Ok(Self { name, notes, bus, queues, memories, areas, ceiling, apart, lent: false, patience, told })
    }

    /// A card behind any bus, such as that of a daemon, with rings of `ring` entries, `None` for the driver's choice. The heap is for
    /// the rings; buffers are memfds of ordinary or transparent huge pages. `concurrent`: the channels work at the same time, so they
    /// may be balanced.
    ///
    /// # Errors
    /// [`ValidateError::Card`].
    pub fn card<B: HostBus + 'static>(
        name: String,
        bus: Arc<B>,
        heap: &dyn Heap,
        concurrent: bool,
        ring: Option<usize>,
    ) -> Result<Self, ValidateError> {
        let Opened { driver, channels, halves, entries } = Opened::new(&bus, heap, ring)?;
        let notes = vec![format!("{} channels, rings of {entries}", channels.len())];
        let queues = channels.into_iter().map(share).collect();
        let memories = Memories::Card { ddr: halves.ddr, hbm: halves.hbm };
        let (areas, patience, told, ceiling) = (driver.areas(), PATIENCE, Arc::default(), Ceiling::Copies);
        Ok(Self { name, notes, bus, queues, memories, areas, ceiling, apart: concurrent, lent: true, patience, told })
    }

    /// A device that is a file, or two. What a regular file or a block device holds is put back after a measurement; what a
    /// character device holds is lost, so `lose` must say that it may be.
    ///
    /// # Errors
    /// [`ValidateError::Lost`] before anything is opened, [`ValidateError::FileDevice`].
    pub fn file(paths: FileDevicePaths, options: FileDeviceOptions, lose: bool) -> Result<Self, ValidateError> {
        let character = |path: &Path| path.metadata().is_ok_and(|m| m.file_type().is_char_device());
        if !lose && let Some(path) = [&paths.h2c, &paths.c2h].into_iter().find(|path| character(path)) {
            return Err(ValidateError::Lost(path.clone()));
        }
        let name = match paths.h2c == paths.c2h {
            true => format!("file:{}", paths.h2c.display()),
            false => format!("file:h2c={},c2h={}", paths.h2c.display(), paths.c2h.display()),
        };
        let node = FileDevice::open(paths, options)?;
        let notes = vec![format!("by {}", node.how())];
        let memories = Memories::One(node.memory_len());
        let bus = Arc::new(node.bus().clone());
        let queues = vec![share(node.queue()?)];
        let ceiling = Ceiling::Files(node);
        let (areas, patience, told) = (Vec::new(), PATIENCE, Arc::default());
        Ok(Self { name, notes, bus, queues, memories, areas, ceiling, apart: false, lent: false, patience, told })
    }

    /// Where buffers with the best pages of this kind come from; `None` for the best there are.
    pub(crate) fn heap(&self, best: Option<PageKind>) -> Box<dyn Heap> {
        match (self.lent, best) {
            (false, None) => Box::new(AnonHeap::new()),
            (false, Some(best)) => Box::new(AnonHeap::starting_at(best)),
            // Reserved huge pages cannot be lent.
            (true, best) => Box::new(MemfdHeap::starting_at(best.unwrap_or(PageKind::Transparent))),
        }
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.queues.len()
    }

    /// A handle of one of the queues.
    pub(crate) fn queue(&self, channel: usize) -> SharedHandle<Box<DeviceQueue>> {
        self.queues[channel].handle(Class::Normal)
    }

    /// What can be measured, in the order of a report.
    pub fn phases(&self) -> Vec<Phase> {
        match self.memories {
            Memories::Card { .. } => vec![Phase::Hbm, Phase::Ddr, Phase::Both],
            Memories::One(_) => vec![Phase::Device],
        }
    }

    /// The halves of a card.
    pub(crate) fn halves(&self) -> Option<Halves> {
        match self.memories {
            Memories::Card { ddr, hbm } => Some(Halves { ddr, hbm }),
            Memories::One(_) => None,
        }
    }

    /// The areas as a policy over these channels sees them.
    pub(crate) fn areas_for(&self, channels: &[usize]) -> Vec<Area> {
        let route = |route| match route {
            Route::Channel(c) => channels.iter().position(|of| *of == c).map_or(Route::Shared, Route::Channel),
            Route::Shared => Route::Shared,
        };
        self.areas.iter().map(|a| Area { span: a.span, route: route(a.route) }).collect()
    }

    /// What the device holds there, if it is a file that holds something for good.
    pub(crate) fn keep(&self, offset: u64, len: u64, beside: u64) -> Result<Option<Kept>, ValidateError> {
        match &self.ceiling {
            Ceiling::Files(node) => Kept::read(node.files().0, offset, len, beside),
            _ => Ok(None),
        }
    }

    /// True while the device still has what no thread waits for any more.
    pub(crate) fn hangs(&self) -> bool {
        self.queues.iter().any(|queue| queue.in_flight() > 0)
    }

    /// Ends what is measured, with [`ValidateError::Interrupted`], as soon as this is true. What was under way ends, and what is
    /// to be put back is put back.
    pub fn stop_when(&mut self, told: Arc<AtomicBool>) {
        self.told = told;
    }
}

/// Lets threads share a queue, with as many operations as it holds.
pub(crate) fn share(queue: impl Queue<Addr = DeviceAddr> + 'static) -> SharedQueue<Box<DeviceQueue>> {
    let capacity = queue.limits().capacity;
    SharedQueue::new(Box::new(queue), SharedLimits { inside: capacity, total: capacity })
}

/// How long nothing may end before a device counts as stuck, besides the time that a buffer takes at [`SLOWEST`].
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes per second that a device moves at least, unless it is stuck.
pub(crate) const SLOWEST: u64 = 4_000_000;
