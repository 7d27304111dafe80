//! The software card on the bus of a software host.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::DevicePort;
use crate::SoftHost;
use dmalane_addr::{Access, CardAddr};
use dmalane_dma::{self as mem, BufferRef, Mapping, Mmio, Pinned, Registrar};
use dmalane_iopt::{Arm64S1_4k, Format, X86_64_4Level};

use crate::memory::CardMemory;
use crate::{CardConfig, Error, SoftCard};
use dmalane_card::regs::BAR_MEMORY;

/// A [`SoftCard`] behind the IOMMU of a [`SoftHost`]. The IOMMU's tables have format `F`, those of the card's MMU
/// format `M`.
pub struct SoftBus<F: Format = Arm64S1_4k, M: Format = X86_64_4Level> {
    card: SoftCard<DevicePort<F>, M>,
    host: SoftHost<F>,
    interrupts: Arc<Interrupts>,
}

impl<F: Format, M: Format> SoftBus<F, M> {
    /// Puts a new card into `host`.
    ///
    /// # Errors
    /// Those of [`CardMemory::new`] and [`SoftCard::new`].
    pub fn new(host: SoftHost<F>, config: CardConfig) -> Result<Self, Error> {
        let interrupts = Arc::<Interrupts>::default();
        let raised = interrupts.clone();
        let memory = CardMemory::new(config.ddr, config.hbm)?;
        let card = SoftCard::new(memory, (config.channels, config.workers), || host.port(), move |_| raised.raise())?;
        Ok(Self { card, host, interrupts })
    }

    /// The host: its counters and faults.
    pub fn host(&self) -> &SoftHost<F> {
        &self.host
    }

    /// The card's memories, behind the back of its channels.
    pub fn memory(&self) -> &CardMemory {
        self.card.memory()
    }
}

impl<F: Format, M: Format> Registrar for SoftBus<F, M> {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, mem::Error> {
        self.host.pin_range(buffer, range)
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, mem::Error> {
        self.host.map_list(pinned, access)
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.host.owns(mapping)
    }
}

impl<F: Format, M: Format> Mmio for SoftBus<F, M> {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, mem::Error> {
        self.card.read32(bar, offset).ok_or(mem::Error::NoRegister { bar, offset, bytes: 4 })
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), mem::Error> {
        self.card.write32(bar, offset, value).ok_or(mem::Error::NoRegister { bar, offset, bytes: 4 })
    }

    /// Writes card memory through BAR 2. Whole aligned 64-bit words are written each atomically, in order.
    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), mem::Error> {
        if bar != BAR_MEMORY {
            return Err(mem::Error::NoRegister { bar, offset, bytes: bytes.len() as u64 });
        }
        self.memory().write(CardAddr::new(offset), bytes).map_err(|e| match e {
            Error::NoMemory { source, .. } => mem::Error::Allocate { len: bytes.len(), kind: "card memory", source },
            _ => mem::Error::NoRegister { bar, offset, bytes: bytes.len() as u64 },
        })
    }

    #[inline]
    fn write64(&self, bar: u8, offset: u64, value: u64) -> Result<(), mem::Error> {
        if bar == BAR_MEMORY && self.memory().store(CardAddr::new(offset), value) {
            return Ok(());
        }
        self.write_bytes(bar, offset, &value.to_le_bytes())
    }

    fn progress(&self) -> bool {
        self.card.progress()
    }

    fn works_alone(&self) -> bool {
        self.card.works_alone()
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.interrupts.wait(timeout)
    }
}

dmalane_dma::debug_as!(SoftBus<F, M>, [F: Format, M: Format], |it| "SoftBus {{ card: {:?}, .. }}", it.card);

/// The card's interrupts: one line, pending until somebody has waited for it.
#[derive(Default)]
struct Interrupts {
    pending: Mutex<bool>,
    raised: Condvar,
}

impl Interrupts {
    fn raise(&self) {
        *self.pending.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.raised.notify_all();
    }

    fn wait(&self, timeout: Duration) -> bool {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut pending, _) =
            self.raised.wait_timeout_while(pending, timeout, |p| !*p).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *pending)
    }
}
