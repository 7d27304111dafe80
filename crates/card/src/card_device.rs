//! A card as a [`Device`]: its regions, its queues, and page tables for its MMU.

use std::ops::RangeInclusive;
use std::sync::Arc;

use dmalane_addr::{DeviceVa, PageSize, Span};
use dmalane_device::{AddressSpace, Counters, Device, DeviceInfo, FlatSpace, PageTableSpace, Region};
use dmalane_dma::{Mmio, Registrar};
use dmalane_iopt::{Format, X86_64_4Level};
use dmalane_queue::DeviceQueue;
use dmalane_vm::Vm;

use crate::layout::regions;
use crate::{Card, Error};

/// Our card behind a bus `B`: the software card, a PCI function, a card that another process serves.
pub struct CardDevice<B: Mmio> {
    bus: Arc<B>,
    info: DeviceInfo,
    regions: Vec<Region>,
    queues: Vec<Box<DeviceQueue>>,
    space: Box<dyn AddressSpace>,
    counters: Arc<dyn Fn() -> Counters + Send + Sync>,
}

/// How a card is driven.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CardUse {
    /// Its name, for people.
    pub name: String,
    /// The threads of a card in software, for people; `None` for another card.
    pub threads: Option<String>,
    /// Processors that it needs for itself, as in [`DeviceInfo`].
    pub processors: usize,
    /// [`DeviceInfo::helped`].
    pub helped: bool,
    /// Its queues work at the same time, so that they may be balanced (`docs/bench/policy.md`).
    pub concurrent: bool,
    /// Entries of each ring; `None` for what the driver chooses.
    pub ring: Option<usize>,
    /// Leaves the MMU alone: addresses are card addresses, and no memory is taken for page tables.
    pub flat: bool,
    /// Bits of device virtual addresses, 32 to 47; `None` for 47.
    pub va_bits: Option<u8>,
}

/// Bits of the addresses that buffers are bound at.
const VA_BITS: RangeInclusive<u8> = 32..=47;
/// The first of these addresses where they have more than 33 bits, so that a truncated address is a wrong one.
const VA_FIRST: u64 = 4 << 30;
/// The least memory that page tables get.
const TABLES_AT_LEAST: u64 = 128 << 10;

impl<B: Mmio + 'static> CardDevice<B> {
    /// Finds the card on `bus`, resets it, and starts its queues.
    ///
    /// # Errors
    /// Those of [`Card::open`] and [`Card::queue`]; [`Error::OtherMmu`], [`Error::TooSmall`], [`Error::Vm`].
    pub fn open(bus: Arc<B>, how: CardUse) -> Result<Self, Error> {
        let heap = bus.heap(None);
        let driver = match how.ring {
            None => Card::open(bus.clone(), &*heap)?,
            Some(entries) => Card::open_with_rings(bus.clone(), &*heap, entries)?,
        };
        let queue = |i| Ok::<Box<DeviceQueue>, Error>(Box::new(driver.queue(i)?));
        let queues = (0..driver.channels()).map(queue).collect::<Result<Vec<_>, _>>()?;
        let entries = queues.first().map_or(0, |q| q.limits().capacity);
        let channels = if queues.len() == 1 { "1 channel".to_owned() } else { format!("{} channels", queues.len()) };
        let threads = how.threads.map_or(String::new(), |threads| format!("{threads}, "));
        let info = DeviceInfo {
            name: how.name,
            notes: vec![format!("{channels}, {threads}rings of {entries}")],
            polled: !bus.works_alone(),
            concurrent: how.concurrent,
            processors: how.processors,
            helped: how.helped,
            tensor_align: 0,
        };
        let mut regions = regions(driver.layout());
        let space: Box<dyn AddressSpace> = match how.flat {
            true => Box::new(FlatSpace::new()),
            false => Box::new(page_tables(driver, &mut regions, how.va_bits)?),
        };
        Ok(Self { bus, info, regions, queues, space, counters: Arc::new(Counters::default) })
    }

    /// The same device with counters, for a bus that has some.
    #[must_use]
    pub fn counted(self, counters: impl Fn() -> Counters + Send + Sync + 'static) -> Self {
        Self { counters: Arc::new(counters), ..self }
    }

    /// The bus that the card is on.
    pub fn bus(&self) -> &Arc<B> {
        &self.bus
    }
}

impl<B: Mmio + 'static> Device for CardDevice<B> {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        self.bus.clone()
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        std::mem::take(&mut self.queues)
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut *self.space
    }

    fn counters(&self) -> Counters {
        (self.counters)()
    }
}

dmalane_dma::debug_as!(CardDevice<B>, [B: Mmio], |it| "CardDevice({:?}, {:?})", it.info, it.regions);

/// Page tables at the end of the longest region, which is as much shorter afterwards.
fn page_tables<B: Mmio + 'static>(
    driver: Card<B>,
    regions: &mut [Region],
    va_bits: Option<u8>,
) -> Result<PageTableSpace<X86_64_4Level, crate::CardTables<B>>, Error> {
    if driver.mmu_format() != Some(X86_64_4Level::NAME) {
        return Err(Error::OtherMmu(driver.mmu_format()));
    }
    // One table of 4 KiB maps 2 MiB of addresses, of which tensors with their gaps leave half unused at worst: a 256th.
    // Twice that, to be safe.
    let all: u64 = regions.iter().map(|r| r.span.len()).fold(0, u64::saturating_add);
    let bytes = (all / 128).max(TABLES_AT_LEAST).next_multiple_of(PageSize::SIZE_4K.bytes());
    // The last of equals is taken by `max_by_key`: the first region.
    let longest = regions.iter_mut().rev().max_by_key(|r| r.span.len()).ok_or(Error::TooSmall { needed: bytes })?;
    let rest =
        longest.span.len().checked_sub(bytes).filter(|rest| *rest > 0).ok_or(Error::TooSmall { needed: bytes })?;
    let split = (longest.span.sub(0, rest), longest.span.sub(rest, bytes));
    let (Some(front), Some(tables)) = split else { return Err(Error::TooSmall { needed: bytes }) };
    longest.span = front;
    let bits = va_bits.unwrap_or(*VA_BITS.end()).clamp(*VA_BITS.start(), *VA_BITS.end());
    let first = VA_FIRST.min(1 << (bits - 2));
    let range = Span::new(DeviceVa::new(first), (1 << bits) - first).expect("not empty");
    let vm = Vm::<X86_64_4Level, _>::new(range, driver.tables(tables)?);
    if vm.is_err() {
        // A card that is lost has no memory for tables either, and is the reason then.
        driver.invalidate_mmu()?;
    }
    let vm = vm?;
    driver.set_mmu_root(vm.page_table().root())?;
    Ok(PageTableSpace::new(vm, move || Ok(driver.invalidate_mmu()?)))
}
