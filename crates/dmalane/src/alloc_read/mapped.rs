//! Each gather is registered and mapped for a device while the ones before it are being read.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use dmalane_addr::Access;
use dmalane_load::fill::{Event, Filled, Job, Watch};
use dmalane_load::{Stage, StageReport};
use dmalane_mem::{Error, Heap, HostBus, Mapping};

use super::{ReadError, ReadOptions, ReadSource, Way, read_all};

/// Buffers that were filled, and that a device can reach.
#[derive(Debug)]
pub struct MappedRead {
    /// The buffers. Its report has the stages [`Stage::Register`] and [`Stage::Map`] too.
    pub filled: Filled,
    /// How each source was read.
    pub ways: Vec<Way>,
    /// For each buffer its gathers, in order, one behind the other: together they are all of it. Dropped, they are unmapped and unpinned.
    pub mappings: Vec<Vec<Mapping>>,
}

/// Mappings of a read, at most (one more for each buffer): a kernel takes 65535 in all (`dma_entry_limit` of `vfio_iommu_type1`). Gathers
/// are longer where there would be more.
const MAPPINGS: u64 = 1 << 14;

/// [`read_all`], with every gather pinned and mapped for the device of `bus` as soon as its memory is there: one call of each for a
/// gather, while reads into the gathers before it are in flight.
///
/// The device sees a gather from the moment that `watch` is told that it was allocated, and may use the bytes of an extent from the moment
/// that it is told that it is complete. With an access that lets the device write, checksums are of what it has left there.
///
/// # Errors
/// [`ReadError`]; [`ReadError::Map`] where the bus refuses, and then as after any other error nothing is left mapped, pinned or in
/// flight.
pub fn read_mapped(
    heap: &dyn Heap,
    bus: &dyn HostBus,
    access: Access,
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
) -> Result<MappedRead, ReadError> {
    let mut gathers: Vec<Vec<(u64, Mapping)>> = job.buffers.iter().map(|_| Vec::new()).collect();
    let (mut registering, mut mapping, mut bytes) = (Duration::ZERO, Duration::ZERO, 0);
    let wanted = job.buffers.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    within_pin_limit(bus, wanted).map_err(|source| ReadError::Map { buffer: 0, offset: 0, source })?;
    let gather = options.gather.max(wanted.div_ceil(MAPPINGS).checked_next_power_of_two().unwrap_or(u64::MAX));
    let options = &ReadOptions { gather, ..options.clone() };
    let mut refused = None;
    let mut each = |event: Event| {
        if let Event::Allocated { buffer, offset, len, share } = &event {
            let range = *offset as usize..(*offset + *len) as usize;
            let start = Instant::now();
            let mapped = bus.pin_range(share, range).and_then(|pinned| {
                registering += start.elapsed();
                let start = Instant::now();
                let mapped = bus.map_list(vec![pinned], access);
                mapping += start.elapsed();
                mapped
            });
            match mapped {
                Ok(mapping) => gathers[*buffer].push((*offset, mapping)),
                Err(source) => {
                    refused.get_or_insert((*buffer, *offset, source));
                    return ControlFlow::Break(());
                }
            }
            bytes += len;
        }
        watch(event)
    };
    let read = read_all(heap, sources, job, options, &mut each);
    if let Some((buffer, offset, source)) = refused {
        return Err(ReadError::Map { buffer, offset, source });
    }
    let (mut filled, ways) = read?;
    let stage = |stage, busy| StageReport { stage, busy, held: busy, bytes };
    filled.report.stages.extend([stage(Stage::Register, registering), stage(Stage::Map, mapping)]);
    filled.report.stages.sort_by_key(|s| s.stage as usize);
    // Lanes take gathers in order, and tell of them in the order in which they are there.
    let mut mappings = Vec::new();
    for mut of_buffer in gathers {
        of_buffer.sort_by_key(|(offset, _)| *offset);
        mappings.push(of_buffer.into_iter().map(|(_, mapping)| mapping).collect());
    }
    Ok(MappedRead { filled, ways, mappings })
}

/// Refuses what could never be pinned, before any of it is read.
fn within_pin_limit(bus: &dyn HostBus, wanted: u64) -> Result<(), Error> {
    match bus.pin_limit() {
        Some(limit) if wanted > limit => Err(Error::PinLimit { wanted, pinned: 0, limit }),
        _ => Ok(()),
    }
}
