//! Each gather is registered and mapped for a device while the ones before it are being read, and may go on to it from
//! there.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::Access;
use dmalane_dma::{BufferSlice, Error, Heap, Registrar};
use dmalane_load::fill::{Event, Filled, Job, Onward, Watch};
use dmalane_load::{OpenDevice, Stage, StageReport};
use dmalane_queue::{DeviceAddr, Queue, Registered};

use super::{ReadError, ReadMethod, ReadOptions, ReadSource, all};

/// Buffers that were filled, and that a device can reach.
#[derive(Debug)]
pub struct MappedRead {
    /// The buffers. Its report has the stages [`Stage::Register`] and [`Stage::Map`] too, and [`Stage::Transfer`] where
    /// they went on to a device.
    pub filled: Filled,
    /// How each source was read.
    pub ways: Vec<ReadMethod>,
    /// For each buffer its gathers, in order, one behind the other: together they are all of it. Dropped, they are
    /// unmapped and unpinned.
    pub gathers: Vec<Vec<Registered>>,
}

/// Mappings of a read, at most (one more for each buffer): a kernel takes 65535 in all (`dma_entry_limit` of
/// `vfio_iommu_type1`). Gathers are longer where there would be more.
const MAPPINGS: u64 = 1 << 14;

/// [`read_all`](super::read_all), with every gather pinned and mapped by `registrar` as soon as its memory is there:
/// one call of each for a gather, while reads into the gathers before it are in flight.
///
/// The device sees a gather from the moment that `watch` is told that it was allocated, and may use the bytes of an
/// extent from the moment that it is told that it is complete. With an access that lets the device write, checksums are
/// of what it has left there.
///
/// # Errors
/// [`ReadError`]; [`ReadError::Map`] where the registrar refuses, and then as after any other error nothing is left
/// mapped, pinned or in flight.
pub fn read_mapped(
    heap: &dyn Heap,
    registrar: &dyn Registrar,
    access: Access,
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
) -> Result<MappedRead, ReadError> {
    mapped(heap, registrar, access, None, sources, job, options, watch)
}

/// [`read_mapped`], and the device gets the buffers: the transfer of a piece to it begins as soon as its bytes have
/// arrived (and were hashed, with [`ReadOptions::checksum`]), while what lies behind it is being read or allocated. The
/// first byte of a buffer goes to the place in `to` that has its number, the others follow; bytes that no extent names
/// go there as zeroes. The device may only read.
///
/// The device's queue has nothing in flight. `watch` is called with what has arrived on the device
/// ([`Event::OnDevice`]), and with an extent that is complete when the device has all of it. When this returns, it has
/// everything; the buffers are there too, and still mapped.
///
/// ```
/// use dmalane::queue::DeviceAddr;
/// use dmalane::load::fill::Job;
/// use dmalane::dma::AnonHeap;
/// use dmalane::{ReadOptions, ReadSource, read_to_device};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.bin");
/// std::fs::write(&path, vec![7; 5_000_000])?;
/// let source = ReadSource::open(&path)?;
/// let job = Job::whole(&[source.size()?]);
/// let mut device = dmalane::open("soft")?;
/// let to = [DeviceAddr::Card(device.memory_mut().reserve(job.bytes())?.first())];
/// let mut started = 0;
/// let mut watch = |event| {
///     if let dmalane::load::fill::Event::OnDevice { .. } = event {
///         started += 1;
///     }
///     std::ops::ControlFlow::Continue(())
/// };
/// let heap = AnonHeap::new();
/// let read = read_to_device(&heap, &mut device, &to, &[source], &job, &ReadOptions::default(), &mut watch)?;
/// println!("{}", read.filled.report);
/// assert!(started >= 3, "in pieces of at most 2 MiB");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`read_mapped`], and [`FillError::Transfer`](dmalane_load::fill::FillError::Transfer) or
/// [`FillError::Refused`](dmalane_load::fill::FillError::Refused) where the device fails, or ends nothing for half a
/// minute: then its queue is stopped. Reads and transfers in flight have ended by then; a transfer that the device does
/// not let go of stays in flight, and keeps its memory and its mapping.
pub fn read_to_device(
    heap: &dyn Heap,
    device: &mut OpenDevice,
    to: &[DeviceAddr],
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
) -> Result<MappedRead, ReadError> {
    let (registrar, polled) = (device.registrar().clone(), device.info().polled);
    mapped(heap, &*registrar, Access::READ, Some((device.queue_mut(), polled, to)), sources, job, options, watch)
}

/// For each buffer its gathers by where they begin.
type Gathers = Vec<BTreeMap<u64, Registered>>;

#[allow(clippy::too_many_arguments)]
fn mapped(
    heap: &dyn Heap,
    registrar: &dyn Registrar,
    access: Access,
    device: Option<(&mut dyn Queue<Addr = DeviceAddr>, bool, &[DeviceAddr])>,
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
) -> Result<MappedRead, ReadError> {
    let gathers: Mutex<Gathers> = Mutex::new(job.buffers.iter().map(|_| BTreeMap::new()).collect());
    let locked = || -> MutexGuard<'_, Gathers> { gathers.lock().unwrap_or_else(PoisonError::into_inner) };
    let (mut registering, mut mapping, mut bytes) = (Duration::ZERO, Duration::ZERO, 0);
    let wanted = job.buffers.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    within_pin_limit(registrar, wanted).map_err(|source| ReadError::Map { buffer: 0, offset: 0, source })?;
    let gather = options.gather.max(wanted.div_ceil(MAPPINGS).checked_next_power_of_two().unwrap_or(u64::MAX));
    let options = &ReadOptions { gather, ..options.clone() };
    let mut refused = None;
    let mut each = |event: Event| {
        if let Event::Allocated { buffer, offset, len, reference } = &event {
            let range = *offset as usize..(*offset + *len) as usize;
            let start = Instant::now();
            let mapped = registrar.pin_range(reference, range).and_then(|pinned| {
                registering += start.elapsed();
                let start = Instant::now();
                let mapped = registrar.map_list(vec![pinned], access);
                mapping += start.elapsed();
                mapped
            });
            match mapped {
                Ok(mapping) => drop(locked()[*buffer].insert(*offset, Registered::from_mapping(mapping))),
                Err(source) => {
                    refused.get_or_insert((*buffer, *offset, source));
                    return ControlFlow::Break(());
                }
            }
            bytes += len;
        }
        watch(event)
    };
    // The gather that begins last before the part does: no part lies in two.
    let via = |buffer: usize, part: &BufferSlice| {
        locked().get(buffer)?.range(..=part.offset() as u64).next_back().map(|(_, gather)| gather.clone())
    };
    let onward = device.map(|(channel, inline, to)| Onward { channel, inline, to, via: &via });
    let read = all(heap, sources, job, options, onward, &mut each, true);
    if let Some((buffer, offset, source)) = refused {
        return Err(ReadError::Map { buffer, offset, source });
    }
    let (mut filled, ways) = read?;
    let stage = |stage, busy| StageReport { stage, busy, held: busy, bytes };
    filled.report.stages.extend([stage(Stage::Register, registering), stage(Stage::Map, mapping)]);
    filled.report.stages.sort_by_key(|s| s.stage as usize);
    let gathers = gathers.into_inner().unwrap_or_else(PoisonError::into_inner);
    let gathers = gathers.into_iter().map(|of_buffer| of_buffer.into_values().collect()).collect();
    Ok(MappedRead { filled, ways, gathers })
}

/// Refuses what could never be pinned, before any of it is read.
fn within_pin_limit(registrar: &dyn Registrar, wanted: u64) -> Result<(), Error> {
    match registrar.pin_limit() {
        Some(limit) if wanted > limit => Err(Error::PinLimit { wanted, pinned: 0, limit }),
        _ => Ok(()),
    }
}
