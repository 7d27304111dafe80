//! The driver of a card: what it has, and its channels.

use std::sync::Arc;

use dmalane_addr::{CardAddr, Span};
use dmalane_dma::{Heap, Mmio, lock};
use dmalane_queue::Area;

use crate::layout::regions;
use crate::registers::Registers;
use crate::rings::{Rings, Shelf};
use crate::{CardLayout, CardQueue, CardTables, Error, regs};

/// Entries per ring, unless asked otherwise.
const RING: usize = 256;

/// A card that was found, checked and reset. One at a time: opening a card again resets it under the first.
pub struct Card<B: Mmio> {
    bus: Arc<B>,
    layout: CardLayout,
    max_len: u64,
    mmu_format: Option<&'static str>,
    rings: Arc<Shelf>,
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
        let registers = Registers(&*bus);
        let id = registers.read(regs::ID)?;
        if id != regs::ID_VALUE {
            return Err(Error::NotACard(id));
        }
        let version = registers.read(regs::VERSION)?;
        if version >> 16 != regs::VERSION_VALUE >> 16 {
            return Err(Error::Version(version));
        }
        let layout = registers.layout()?;
        let channels = registers.checked("CHANNELS", regs::CHANNELS, 1, regs::MAX_CHANNELS)?;
        let max_len = registers.checked("LEN_MAX", regs::LEN_MAX, 4096, regs::MAX_LEN)?;
        let ring_log2 = registers.checked("RING_LOG2_MAX", regs::RING_LOG2_MAX, 1, regs::MAX_RING_LOG2)?;
        let max = 1 << ring_log2;
        if !entries.is_power_of_two() || !(2..=max).contains(&entries) {
            return Err(Error::RingSize { entries, max });
        }
        let mmu_format = regs::format_name(registers.read(regs::MMU_FORMAT)?);
        registers.write(regs::CONTROL, 1)?;
        registers.until("reset", || Ok(registers.read(regs::CONTROL)? & 1 == 0))?;
        let rings = (0..channels).map(|_| Rings::new(&*bus, heap, entries).map(Some)).collect::<Result<_, _>>()?;
        let rings = Arc::new(Shelf::new(rings));
        Ok(Self { bus, layout, max_len: max_len.into(), mmu_format, rings })
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
        lock(&self.rings.rings).len()
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
        let taken = match lock(&self.rings.rings).get_mut(index) {
            None => return Err(Error::NoChannel { index, channels }),
            Some(slot) => slot.take(),
        };
        let rings = taken.ok_or(Error::ChannelTaken(index))?;
        CardQueue::start(self.bus.clone(), self.rings.clone(), rings, index, self.max_len)
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
        let registers = Registers(&*self.bus);
        registers.write64(regs::MMU_ROOT, root.bits())?;
        registers.write(regs::MMU_CONTROL, 1)?;
        registers.until("turn its MMU on", || Ok(registers.read(regs::MMU_CONTROL)? & 1 == 1))
    }

    /// Makes the MMU forget all translations. When this returns, no access by an old one is under way.
    ///
    /// # Errors
    /// [`Error::Bus`], [`Error::Timeout`].
    pub fn invalidate_mmu(&self) -> Result<(), Error> {
        let registers = Registers(&*self.bus);
        registers.write(regs::MMU_INVALIDATE, 1)?;
        registers.until("forget its translations", || Ok(registers.read(regs::MMU_INVALIDATE)? == 0))
    }

    /// Operations whose memory will never be released, because the card did not confirm that it had stopped.
    pub fn quarantined(&self) -> usize {
        self.rings.quarantined()
    }
}

dmalane_dma::debug_as!(Card<B>, [B: Mmio], |it| "Card({:?}, {} channels)", it.layout, it.channels());
