//! The device that what has arrived goes on to, with `dmalane read --device`.

use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use dmalane::addr::{Access, PageSize};
use dmalane::card::{CardConfig, SoftBus};
use dmalane::engine::{self, Channel, DeviceAddr, DeviceFar, Direction, Far, Registered, Transfer};
use dmalane::load::fill::{Filled, Job, Watch};
use dmalane::mem::{Heap, HostConfig};
use dmalane::{MappedRead, ReadError, ReadOptions, ReadSource, SoftConfig, SoftDevice, SoftParts, read_to_device};

use crate::failure::Failure;
use crate::load::no_card;
use crate::size::binary;

/// HBM of the card: what is read goes to DDR.
const HBM: u64 = 4 << 20;
/// Bytes that are read back at a time.
const STEP: usize = 2 << 20;
/// A card in software ends what it has begun long before.
const PATIENCE: Duration = Duration::from_secs(30);

/// The devices that can get what has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Device {
    /// The software card, inside this process.
    Soft,
}

/// A card with room for some buffers.
pub struct Target {
    card: SoftParts,
    bus: Arc<SoftBus>,
    /// Where each of them goes.
    to: Vec<DeviceAddr>,
}

impl Target {
    /// Makes the card, with so many bytes of DDR, and takes room for buffers of these lengths.
    pub fn open(device: Device, ddr: u64, buffers: &[u64]) -> Result<Self, Failure> {
        let Device::Soft = device;
        let config = SoftConfig {
            card: CardConfig { ddr, hbm: HBM, ..CardConfig::default() },
            // Synthetic memory costs nothing until it is pinned.
            host: HostConfig { memory: 16 << 40, ..HostConfig::default() },
            ..SoftConfig::default()
        };
        let (mut card, bus) = SoftDevice::parts(config).map_err(|e| no_card(&e, ddr, HBM))?;
        let mut to = Vec::new();
        for len in buffers {
            // A buffer of no bytes goes nowhere.
            let place = PageSize::SIZE_4K.round_up((*len).max(1)).and_then(|len| card.memory.reserve(len).ok());
            let place = place.ok_or_else(|| {
                let message = format!("the card has no {} left for a file", binary(*len));
                Failure::new(message).hint(format!("--card-ddr makes it larger than {}", binary(ddr)))
            })?;
            to.push(DeviceAddr::Card(place.first()));
        }
        Ok(Self { card, bus, to })
    }

    /// Reads, and lets the card have what has arrived.
    pub fn read(
        &mut self,
        heap: &dyn Heap,
        sources: &[ReadSource],
        job: &Job,
        options: &ReadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<MappedRead, ReadError> {
        read_to_device(heap, &*self.bus, &mut self.card.channel, &self.to, sources, job, options, watch)
    }

    /// Reads everything back from the card and compares it.
    pub fn verify(&mut self, filled: &Filled) -> Result<(), Failure> {
        let cannot = |e: &(dyn std::error::Error + 'static)| Failure::because("cannot read back from the card", e);
        let buf = self.card.heap.allocate(STEP).map_err(|e| cannot(&e))?.share();
        let via = Registered::new(&*self.bus, &buf, Access::RW).map_err(|e| cannot(&e))?;
        let step = STEP.min(usize::try_from(self.card.channel.limits().max_len).unwrap_or(STEP));
        let mut whole = Some(buf.into_part());
        for (buffer, to) in filled.buffers.iter().zip(&self.to) {
            let mut at = 0;
            while at < buffer.len() {
                let n = step.min(buffer.len() - at);
                let far = DeviceFar { at: *to, via: via.clone() }.advance(at as u64);
                let split = whole.take().and_then(|part| part.split_at(n).ok());
                let (Some(far), Some((part, rest))) = (far, split) else {
                    return Err(Failure::new("cannot read back from the card: a buffer is missing"));
                };
                let transfer = Transfer { part, direction: Direction::ToHost, far };
                let back = engine::run(&mut self.card.channel, transfer, PATIENCE).map_err(|e| cannot(&e))?.part;
                let same = buffer.view().sub(at, n).is_some_and(|view| view.first_difference(back.view()).is_none());
                if !same {
                    let message = format!("the card does not have what was read, from byte {at} of a buffer on");
                    return Err(Failure::new(message).hint("please report it"));
                }
                whole = back.join(rest).ok();
                at += n;
            }
        }
        Ok(())
    }
}
