//! The driver of a card: what it has, and its channels.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, PageSize, Span};
use dmalane_dma::{self as mem, Heap, Mmio, SharedBuf};
use dmalane_queue::{Area, Capabilities, Registered};

use crate::card_device::regions;
use crate::regs::{self, BAR_REGISTERS};
use crate::{CardQueue, CardTables, CompletionEntry, Descriptor, Error};

/// Timeout for the card to stop, start or reset.
pub(crate) const ANSWER: Duration = Duration::from_secs(1);
/// Entries per ring, unless asked otherwise.
const RING: usize = 256;

/// A card's memories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardLayout {
    /// DDR, which every channel reaches equally well.
    pub ddr: Span<CardAddr>,
    /// HBM.
    pub hbm: Span<CardAddr>,
    /// The first address of HBM's second half.
    pub hbm_half: CardAddr,
}

/// A card that was found, checked and reset. One at a time: opening a card again resets it under the first.
pub struct Card<B: Mmio> {
    bus: Arc<B>,
    layout: CardLayout,
    max_len: u64,
    capabilities: Capabilities,
    mmu_format: Option<&'static str>,
    rings: Arc<Shelf>,
}

/// The rings of the channels that nobody drives, and a count of what was given up.
pub(crate) struct Shelf {
    rings: Mutex<Vec<Option<Rings>>>,
    quarantined: AtomicUsize,
}

/// The two rings of a channel. The card cannot write the first.
pub(crate) struct Rings {
    pub descriptors: SharedBuf,
    pub completions: SharedBuf,
    pub log2: u8,
    registered: [Registered; 2],
}

impl<B: Mmio> Card<B> {
    /// Finds the card on `bus`, resets it, and takes memory from `heap` for rings of 256 entries.
    ///
    /// # Errors
    /// [`Error::NotACard`], [`Error::Version`], [`Error::BadCapability`], [`Error::Timeout`]; [`Error::Bus`] when a
    /// register does not answer or a ring cannot be had.
    pub fn open(bus: Arc<B>, heap: &dyn Heap) -> Result<Self, Error> {
        Self::open_with_rings(bus, heap, RING)
    }

    /// The same, with rings of another length: as many operations can be in flight on each channel.
    ///
    /// # Errors
    /// As [`Card::open`], and [`Error::RingSize`].
    pub fn open_with_rings(bus: Arc<B>, heap: &dyn Heap, entries: usize) -> Result<Self, Error> {
        let device = Device(&*bus);
        let id = device.read(regs::ID)?;
        if id != regs::ID_VALUE {
            return Err(Error::NotACard(id));
        }
        let version = device.read(regs::VERSION)?;
        if version >> 16 != regs::VERSION_VALUE >> 16 {
            return Err(Error::Version(version));
        }
        let layout = device.layout()?;
        let channels = device.checked("CHANNELS", regs::CHANNELS, 1, regs::MAX_CHANNELS)?;
        let max_len = device.checked("LEN_MAX", regs::LEN_MAX, 4096, regs::MAX_LEN)?;
        let ring_log2 = device.checked("RING_LOG2_MAX", regs::RING_LOG2_MAX, 1, regs::MAX_RING_LOG2)?;
        let max = 1 << ring_log2;
        if !entries.is_power_of_two() || !(2..=max).contains(&entries) {
            return Err(Error::RingSize { entries, max });
        }
        let mmu_format = regs::format_name(device.read(regs::MMU_FORMAT)?);
        device.write(regs::CONTROL, 1)?;
        device.until("reset", || Ok(device.read(regs::CONTROL)? & 1 == 0))?;
        let rings = (0..channels).map(|_| Rings::new(&*bus, heap, entries).map(Some)).collect::<Result<_, _>>()?;
        let rings = Arc::new(Shelf { rings: Mutex::new(rings), quarantined: AtomicUsize::new(0) });
        // A card of version 1.0 copies and does nothing else.
        let copies = Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::STOP | Capabilities::ORDERED;
        let capabilities = if version & 0xffff == 0 { copies } else { Capabilities::all() };
        Ok(Self { bus, layout, max_len: max_len.into(), capabilities, mmu_format, rings })
    }

    /// The bus that the card is on.
    pub fn bus(&self) -> &Arc<B> {
        &self.bus
    }

    /// The card's memories.
    pub fn layout(&self) -> CardLayout {
        self.layout
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.rings.lock().len()
    }

    /// How transfers go, for [`AddressPolicy`](dmalane_queue::AddressPolicy): DDR over every channel, each half of HBM
    /// over its own.
    pub fn areas(&self) -> Vec<Area> {
        dmalane_device::areas(&regions(self.layout))
    }

    /// Starts a DMA channel and gives its queue. After the queue was dropped it can be started again.
    ///
    /// # Errors
    /// [`Error::NoChannel`], [`Error::ChannelTaken`]; [`Error::Timeout`] or [`Error::Bus`] when the card does not
    /// answer.
    pub fn queue(&self, index: usize) -> Result<CardQueue<B>, Error> {
        let channels = self.channels();
        let taken = match self.rings.lock().get_mut(index) {
            None => return Err(Error::NoChannel { index, channels }),
            Some(slot) => slot.take(),
        };
        let rings = taken.ok_or(Error::ChannelTaken(index))?;
        CardQueue::start(self.bus.clone(), self.rings.clone(), rings, index, self.max_len, self.capabilities)
    }

    /// Table memory for the card's MMU in part of the card's memory, which must be used for nothing else.
    ///
    /// # Errors
    /// [`Error::NoTables`] unless the span lies in one of the card's memories and holds a whole aligned table.
    pub fn tables(&self, span: Span<CardAddr>) -> Result<CardTables<B>, Error> {
        let CardLayout { ddr, hbm, .. } = self.layout;
        let tables = (ddr.covers(&span) || hbm.covers(&span)).then(|| CardTables::new(self.bus.clone(), span));
        tables.flatten().ok_or(Error::NoTables(span))
    }

    /// The name of the page-table format that the card's MMU walks ([`Format::NAME`](dmalane_iopt::Format::NAME));
    /// `None` when the driver does not know it.
    pub fn mmu_format(&self) -> Option<&'static str> {
        self.mmu_format
    }

    /// Turns the MMU on with the tables below `root`, and forgets all translations.
    ///
    /// # Errors
    /// [`Error::Bus`], [`Error::Timeout`].
    pub fn set_mmu_root(&self, root: CardAddr) -> Result<(), Error> {
        let device = Device(&*self.bus);
        device.write64(regs::MMU_ROOT, root.bits())?;
        device.write(regs::MMU_CONTROL, 1)?;
        device.until("turn its MMU on", || Ok(device.read(regs::MMU_CONTROL)? & 1 == 1))
    }

    /// Makes the MMU forget all translations. When this returns, no access by an old one is under way.
    ///
    /// # Errors
    /// [`Error::Bus`], [`Error::Timeout`].
    pub fn invalidate_mmu(&self) -> Result<(), Error> {
        let device = Device(&*self.bus);
        device.write(regs::MMU_INVALIDATE, 1)?;
        device.until("forget its translations", || Ok(device.read(regs::MMU_INVALIDATE)? == 0))
    }

    /// Operations whose memory will never be released, because the card did not confirm that it had stopped.
    pub fn quarantined(&self) -> usize {
        self.rings.quarantined.load(Ordering::Relaxed)
    }
}

impl<B: Mmio> std::fmt::Debug for Card<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Card").field("layout", &self.layout).field("channels", &self.channels()).finish_non_exhaustive()
    }
}

impl Shelf {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Option<Rings>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the rings of a channel that has stopped.
    pub(crate) fn put_back(&self, index: usize, rings: Rings) {
        if let Some(slot) = self.lock().get_mut(index) {
            *slot = Some(rings);
        }
    }

    /// Counts operations that are lost for good.
    pub(crate) fn quarantine(&self, operations: usize) {
        self.quarantined.fetch_add(operations, Ordering::Relaxed);
    }
}

impl Rings {
    fn new(bus: &impl Mmio, heap: &dyn Heap, entries: usize) -> Result<Self, mem::Error> {
        let descriptors = heap.allocate(entries * Descriptor::BYTES)?.share();
        let completions = heap.allocate(entries * CompletionEntry::BYTES)?.share();
        let registered =
            [Registered::new(bus, &descriptors, Access::READ)?, Registered::new(bus, &completions, Access::RW)?];
        Ok(Self { descriptors, completions, log2: entries.trailing_zeros() as u8, registered })
    }

    /// The IOVAs of the descriptor ring and of the completion ring.
    pub(crate) fn iovas(&self) -> [u64; 2] {
        [0, 1].map(|i: usize| self.registered[i].mapping().span().first().bits())
    }
}

/// A card's registers.
pub(crate) struct Device<'a, B>(pub &'a B);

impl<B: Mmio> Device<'_, B> {
    pub(crate) fn read(&self, offset: u64) -> Result<u32, mem::Error> {
        self.0.read32(BAR_REGISTERS, offset)
    }

    pub(crate) fn read64(&self, offset: u64) -> Result<u64, mem::Error> {
        Ok(u64::from(self.read(offset)?) | u64::from(self.read(offset + 4)?) << 32)
    }

    pub(crate) fn write(&self, offset: u64, value: u32) -> Result<(), mem::Error> {
        self.0.write32(BAR_REGISTERS, offset, value)
    }

    pub(crate) fn write64(&self, offset: u64, value: u64) -> Result<(), mem::Error> {
        self.write(offset, value as u32)?;
        self.write(offset + 4, (value >> 32) as u32)
    }

    /// Waits, at most [`ANSWER`], for the card to do something that takes it a moment.
    pub(crate) fn until(&self, what: &'static str, mut done: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
        let start = Instant::now();
        while !done()? {
            if start.elapsed() > ANSWER {
                return Err(Error::Timeout { what, after: ANSWER });
            }
            if !self.0.progress() {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn checked(&self, register: &'static str, offset: u64, min: u32, max: u32) -> Result<u32, Error> {
        let value = self.read(offset)?;
        match (min..=max).contains(&value) {
            true => Ok(value),
            false => Err(Error::BadCapability { register, value: value.into() }),
        }
    }

    /// The card's memory regions, after validating its registers.
    fn layout(&self) -> Result<CardLayout, Error> {
        let span = |register, base, len| -> Result<Span<CardAddr>, Error> {
            let len = self.read64(len)?;
            let span = Span::new(CardAddr::new(self.read64(base)?), len);
            span.filter(|s| s.is_aligned(PageSize::SIZE_4K)).ok_or(Error::BadCapability { register, value: len })
        };
        let ddr = span("DDR_LEN", regs::DDR_BASE, regs::DDR_LEN)?;
        let hbm = span("HBM_LEN", regs::HBM_BASE, regs::HBM_LEN)?;
        if ddr.intersect(&hbm).is_some() {
            return Err(Error::BadCapability { register: "HBM_BASE", value: hbm.first().bits() });
        }
        let hbm_half = CardAddr::new(self.read64(regs::HBM_HALF)?);
        if !hbm.contains(hbm_half) || hbm_half == hbm.first() || !hbm_half.is_aligned(PageSize::SIZE_4K) {
            return Err(Error::BadCapability { register: "HBM_HALF", value: hbm_half.bits() });
        }
        Ok(CardLayout { ddr, hbm, hbm_half })
    }
}
