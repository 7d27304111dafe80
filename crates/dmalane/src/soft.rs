//! A card that is ready to be loaded: the software card, or one behind any bus.

use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::{CardAddr, DeviceVa, PageSize, Span};
use dmalane_card::{Card, CardConfig, CardLayout, CardQueue, CardTables, SoftBus, Workers};
use dmalane_dma::{AnonHeap, Heap, HostBus, HostConfig, MemfdHeap, PageKind, SoftHost};
use dmalane_iopt::{Format, X86_64_4Level};
use dmalane_load::{CardMemory, Device, DeviceParts};
use dmalane_queue::{AddressPolicy, BalancePolicy, Policy, QueueChoice, Split};
use dmalane_vm::Vm;
use thiserror::Error;

/// The channel of a card behind the bus `B`: its queues driven as one.
pub type JoinedChannel<B> = Split<CardQueue<B>, Box<dyn Policy>>;

/// What a [`CardDevice`] is made of.
pub type CardParts<B> = DeviceParts<JoinedChannel<B>, X86_64_4Level, CardTables<B>>;

/// The channel of the software card.
pub type SoftChannel = JoinedChannel<SoftBus>;

/// What a [`SoftDevice`] is made of.
pub type SoftParts = CardParts<SoftBus>;

/// How the software card and its host are made.
#[derive(Clone)]
pub struct SoftConfig {
    /// The card; sizes are rounded up to what it can have.
    pub card: CardConfig,
    /// The host that it is plugged into.
    pub host: HostConfig,
    /// Where staging buffers come from.
    pub heap: Arc<dyn Heap>,
    /// Bytes of a staging buffer (`--gather`).
    pub gather: u64,
    /// Which channels move the bytes.
    pub mm_channel: QueueChoice,
}

impl Default for SoftConfig {
    /// Anonymous memory from the top of the ladder, 16 MiB per staging buffer, both channels.
    fn default() -> Self {
        Self {
            card: CardConfig::default(),
            host: HostConfig::default(),
            heap: Arc::new(AnonHeap::new()),
            gather: 16 << 20,
            mm_channel: QueueChoice::Auto,
        }
    }
}

/// How a card is driven whose bus there is already.
#[derive(Clone)]
pub struct CardUse {
    /// Where staging buffers and rings come from: memory that the bus can map.
    pub heap: Arc<dyn Heap>,
    /// Bytes of a staging buffer.
    pub gather: u64,
    /// Which channels move the bytes.
    pub mm_channel: QueueChoice,
    /// The channels work at the same time, so that they may be balanced (`docs/bench/policy.md`).
    pub apart: bool,
    /// The card works in this thread, inside `poll`.
    pub inline: bool,
}

impl CardUse {
    /// For a card behind [`open_pci_card`](crate::open_pci_card): its channels work at the same time, and the kernel pins any memory.
    pub fn vfio() -> Self {
        Self { heap: Arc::new(AnonHeap::new()), apart: true, ..Self::default() }
    }

    /// For a card behind [`connect_pci_card`](crate::connect_pci_card): its channels work at the same time, and its process must be able to
    /// have the memory.
    pub fn vfio_user() -> Self {
        Self { apart: true, ..Self::default() }
    }
}

impl Default for CardUse {
    /// For a card that works by itself, one channel after the other, as a daemon's does; memfds of at most transparent huge pages, which
    /// another process can have; the rest as in [`SoftConfig`].
    fn default() -> Self {
        let SoftConfig { gather, mm_channel, .. } = SoftConfig::default();
        let heap = Arc::new(MemfdHeap::starting_at(PageKind::Transparent));
        Self { heap, gather, mm_channel, apart: false, inline: false }
    }
}

/// Why a card could not be made or opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SoftError {
    /// Host memory, or the bus.
    #[error(transparent)]
    Host(#[from] dmalane_dma::Error),
    /// The card or its driver.
    #[error(transparent)]
    Card(#[from] dmalane_card::Error),
    /// The card's memory has no room for page tables.
    #[error("the card is too small: {0}")]
    Memory(#[from] dmalane_load::Error),
    /// The device's virtual address space.
    #[error(transparent)]
    Vm(#[from] dmalane_vm::Error),
    /// An MMU that the bindings cannot be written for.
    #[error("the card's MMU walks {}, and only {} can be written", .0.unwrap_or("tables of an unknown format"), X86_64_4Level::NAME)]
    OtherMmu(Option<&'static str>),
    /// A channel that the card does not have.
    #[error("the card has no channel {wanted}, it has {has}")]
    NoChannel {
        /// Which was asked for.
        wanted: usize,
        /// How many there are.
        has: usize,
    },
}

/// A card behind the bus `B`, ready to be loaded.
pub struct CardDevice<B: HostBus> {
    /// What files are loaded onto.
    pub device: Device<JoinedChannel<B>, X86_64_4Level, CardTables<B>>,
    /// The bus between host and card. That of the software card has the host's counters and faults, and the card's memory behind its back.
    pub bus: Arc<B>,
}

/// The software card behind the IOMMU of a software host, ready to be loaded.
pub type SoftDevice = CardDevice<SoftBus>;

/// Where tensors are bound: 128 TiB from 4 GiB up, so that a truncated address is a wrong one.
const VA_FIRST: u64 = 4 << 30;
const VA_LAST: u64 = (1 << 47) - 1;
/// The card is a thread or this thread: it ends what it has begun long before.
const PATIENCE: Duration = Duration::from_secs(30);
/// The smallest share of a card that tables get.
const TABLES_AT_LEAST: u64 = 128 << 10;

impl CardDevice<SoftBus> {
    /// Makes the host, plugs the card in, and opens it.
    ///
    /// # Errors
    /// [`SoftError`].
    pub fn open(config: SoftConfig) -> Result<Self, SoftError> {
        let (parts, bus) = Self::parts(config)?;
        Ok(Self { device: Device::new(parts), bus })
    }

    /// As [`SoftDevice::open`], but before the parts become a [`Device`]: to put something of one's own in place of one.
    ///
    /// # Errors
    /// [`SoftError`].
    pub fn parts(config: SoftConfig) -> Result<(SoftParts, Arc<SoftBus>), SoftError> {
        let SoftConfig { mut card, host, heap, gather, mm_channel } = config;
        card.ddr = whole(card.ddr, 2 << 20);
        card.hbm = whole(card.hbm, 4 << 20);
        let host: SoftHost = SoftHost::new(host)?;
        let bus = Arc::new(SoftBus::new(host, card)?);
        // Without a thread for each, what channels seem to differ in is only whom a thread looks at first.
        let (apart, inline) = (card.workers == Workers::PerChannel, card.workers == Workers::Inline);
        Ok((parts(bus.clone(), CardUse { heap, gather, mm_channel, apart, inline })?, bus))
    }
}

impl<B: HostBus + 'static> CardDevice<B> {
    /// Finds the card on `bus`, resets it, and opens it. It has nothing loaded.
    ///
    /// # Errors
    /// [`SoftError`].
    pub fn on(bus: Arc<B>, how: CardUse) -> Result<Self, SoftError> {
        Ok(Self { device: Device::new(parts(bus.clone(), how)?), bus })
    }

    /// As [`CardDevice::on`], but before the parts become a [`Device`].
    ///
    /// # Errors
    /// [`SoftError`].
    pub fn parts_on(bus: Arc<B>, how: CardUse) -> Result<CardParts<B>, SoftError> {
        parts(bus, how)
    }
}

/// Rounds up, where that can be done.
fn whole(bytes: u64, to: u64) -> u64 {
    bytes.div_ceil(to).saturating_mul(to)
}

fn parts<B: HostBus + 'static>(bus: Arc<B>, how: CardUse) -> Result<CardParts<B>, SoftError> {
    let CardUse { heap, gather, mm_channel, apart, inline } = how;
    let driver = Card::open(bus.clone(), &*heap)?;
    if driver.mmu_format() != Some(X86_64_4Level::NAME) {
        return Err(SoftError::OtherMmu(driver.mmu_format()));
    }
    let channels = (0..driver.channels()).map(|i| driver.queue(i)).collect::<Result<Vec<_>, _>>()?;
    if let Some(&wanted) = mm_channel.list().iter().find(|&&c| c >= channels.len()) {
        return Err(SoftError::NoChannel { wanted, has: channels.len() });
    }
    let policy: Box<dyn Policy> = match mm_channel.list() {
        [] if !apart => Box::new(AddressPolicy::new(driver.areas())),
        [] => Box::new(BalancePolicy::new(driver.areas())),
        list => Box::new(BalancePolicy::only(list)),
    };
    let layout = driver.layout();
    let mut memory = CardMemory::new(Some(layout.ddr), halves(layout));
    // One table of 4 KiB maps 2 MiB of addresses, of which tensors with their gaps leave half unused at worst: one part in
    // 256. Twice that, to be safe.
    let tables = (memory.free_bytes() / 128).max(TABLES_AT_LEAST);
    let tables = memory.reserve(PageSize::SIZE_4K.round_up(tables).unwrap_or(tables))?;
    let range = Span::inclusive(DeviceVa::new(VA_FIRST), DeviceVa::new(VA_LAST)).expect("a constant span");
    let vm = Vm::new(range, driver.tables(tables)?)?;
    driver.set_mmu_root(vm.page_table().root())?;
    let invalidate = Box::new(move || Ok(driver.invalidate_mmu()?));
    let channel = Split::new(channels, policy);
    Ok(DeviceParts { bus, heap, channel, vm, memory, invalidate, inline, gather, patience: PATIENCE })
}

/// The two halves of HBM; `None` for a card whose boundary lies outside of it.
fn halves(layout: CardLayout) -> Option<[Span<CardAddr>; 2]> {
    let low = Span::inclusive(layout.hbm.first(), CardAddr::new(layout.hbm_half.bits().checked_sub(1)?))?;
    Some([low, Span::inclusive(layout.hbm_half, layout.hbm.last())?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_that_is_not_there_is_an_error() {
        let config = |mm_channel| SoftConfig { mm_channel, ..SoftConfig::default() };
        let error = SoftDevice::open(config(QueueChoice::List(vec![0, 5]))).err().unwrap();
        assert!(matches!(error, SoftError::NoChannel { wanted: 5, has: 2 }), "{error}");
        assert!(SoftDevice::open(config(QueueChoice::List(vec![1, 0]))).is_ok());
    }
}
