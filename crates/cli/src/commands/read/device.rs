//! The target device of `dmalane read --device`.

use std::sync::Arc;
use std::time::Duration;

use dmalane::addr::{Access, PageSize};
use dmalane::dma::{Heap, Mmio};
use dmalane::load::fill::{Filled, Job, Watch};
use dmalane::queue::{self, DeviceAddr, Operation, Queue, QueueAddr, Registered};
use dmalane::sim::CardConfig;
use dmalane::{
    CardDevice, CardParts, CardUse, MappedRead, ReadError, ReadOptions, ReadSource, SoftConfig, SoftDevice,
    read_to_device,
};

use crate::device::{CARD_DDR, Device, OnBus, cannot_open, large_host, no_soft_card};
use crate::failure::Failure;
use crate::size::binary;

/// HBM of the software card, or asked of a daemon: what is read goes to DDR.
const HBM: u64 = 4 << 20;
/// Bytes that are read back at a time.
const STEP: usize = 2 << 20;
/// A software card completes a transfer long before this.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A card with room for some buffers, behind whichever bus.
pub trait Target {
    /// Reads, and transfers each chunk to the card once it has arrived.
    fn read(
        &mut self,
        heap: &dyn Heap,
        sources: &[ReadSource],
        job: &Job,
        options: &ReadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<MappedRead, ReadError>;

    /// Reads everything back from the card and compares it.
    fn verify(&mut self, filled: &Filled) -> Result<(), Failure>;
}

/// Opens the card, with or of so many bytes of DDR, and takes room for buffers of these lengths.
pub fn open(device: &Device, ddr: Option<u64>, buffers: &[u64]) -> Result<Box<dyn Target>, Failure> {
    let hint = match device {
        Device::Soft => {
            let ddr = ddr.unwrap_or(CARD_DDR.bytes());
            let config = SoftConfig {
                card: CardConfig { ddr, hbm: HBM, ..CardConfig::default() },
                host: large_host(),
                ..SoftConfig::default()
            };
            let (card, bus) = SoftDevice::parts(config).map_err(|e| no_soft_card(&e, ddr, HBM))?;
            let hint = format!("--card-ddr makes it larger than {}", binary(ddr));
            return Ok(Box::new(On::new(card, bus, buffers, &hint)?));
        }
        Device::Daemon(_) => {
            "--card-ddr asks for more of the daemon's card, up to what a client may have (dmalaned --client-ddr)"
        }
        _ => "read less at a time with --range",
    };
    device.connect(ddr, Some(HBM), Opening { buffers, hint })
}

/// Opens a card that is not in this process.
struct Opening<'a> {
    buffers: &'a [u64],
    hint: &'a str,
}

impl OnBus for Opening<'_> {
    type Output = Box<dyn Target>;

    fn run<B: Mmio + 'static>(self, bus: Arc<B>, how: CardUse) -> Result<Box<dyn Target>, Failure> {
        let parts = CardDevice::parts_on(bus.clone(), how).map_err(|e| cannot_open(&e))?;
        Ok(Box::new(On::new(parts, bus, self.buffers, self.hint)?))
    }
}

/// A card on a bus.
struct On<B: Mmio> {
    card: CardParts<B>,
    bus: Arc<B>,
    /// Where each buffer goes.
    to: Vec<DeviceAddr>,
}

impl<B: Mmio + 'static> On<B> {
    fn new(mut card: CardParts<B>, bus: Arc<B>, buffers: &[u64], hint: &str) -> Result<Self, Failure> {
        let mut to = Vec::new();
        for len in buffers {
            // A buffer of no bytes goes nowhere.
            let place = PageSize::SIZE_4K.round_up((*len).max(1)).and_then(|len| card.memory.reserve(len).ok());
            let place = place.ok_or_else(|| {
                let message = format!("the card has no {} left for a file", binary(*len));
                Failure::new(message).hint(hint)
            })?;
            to.push(DeviceAddr::Card(place.first()));
        }
        Ok(Self { card, bus, to })
    }
}

impl<B: Mmio + 'static> Target for On<B> {
    fn read(
        &mut self,
        heap: &dyn Heap,
        sources: &[ReadSource],
        job: &Job,
        options: &ReadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<MappedRead, ReadError> {
        read_to_device(heap, &*self.bus, &mut self.card.channel, &self.to, sources, job, options, watch)
    }

    fn verify(&mut self, filled: &Filled) -> Result<(), Failure> {
        let cannot = |e: &(dyn std::error::Error + 'static)| Failure::because("cannot read back from the card", e);
        let buf = self.card.heap.allocate(STEP).map_err(|e| cannot(&e))?.share();
        let via = Registered::new(&*self.bus, &buf, Access::RW).map_err(|e| cannot(&e))?;
        let step = STEP.min(usize::try_from(self.card.channel.limits().max_len).unwrap_or(STEP));
        let mut whole = Some(buf.into_part());
        for (buffer, to) in filled.buffers.iter().zip(&self.to) {
            let mut at = 0;
            while at < buffer.len() {
                let n = step.min(buffer.len() - at);
                let from = to.advance(at as u64);
                let split = whole.take().and_then(|part| part.split_at(n).ok());
                let (Some(from), Some((part, rest))) = (from, split) else {
                    return Err(Failure::new("cannot read back from the card: a buffer is missing"));
                };
                let read = Operation::read((part, via.clone()), from);
                let back = queue::run(&mut self.card.channel, read, TIMEOUT).map_err(|e| cannot(&e))?.into_slice();
                let same = |back: &dmalane::dma::BufferSlice| {
                    buffer.view().sub(at, n).is_some_and(|view| view.first_difference(back.view()).is_none())
                };
                let Some(back) = back.filter(same) else {
                    let message = format!("the card's data differs from the data read, from byte {at} of a buffer on");
                    return Err(Failure::new(message).hint("please report it"));
                };
                whole = back.join(rest).ok();
                at += n;
            }
        }
        Ok(())
    }
}
