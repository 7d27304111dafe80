//! Each gather is registered and mapped for a device while the ones before it are being read, and may go on to it from
//! there.

use dmalane_addr::Access;
use dmalane_dma::{Heap, Registrar};
use dmalane_load::OpenDevice;
use dmalane_load::fill::{Filled, Job, Sink, Stays, Watch};
use dmalane_queue::{DeviceAddr, Registered};

use super::{ReadError, ReadMethod, ReadOptions, ReadSource, all};

/// Buffers that were filled, and that a device can reach.
#[derive(Debug)]
pub struct MappedRead {
    /// The buffers. Its report has the stages `Stage::Register` and `Stage::Map` too, and `Stage::Transfer` where
    /// they went on to a device.
    pub filled: Filled,
    /// How each source was read.
    pub ways: Vec<ReadMethod>,
    /// For each buffer its gathers, in order, one behind the other: together they are all of it. Dropped, they are
    /// unmapped and unpinned.
    pub gathers: Vec<Vec<Registered>>,
}

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
    mapped(heap, registrar, access, Sink::Memory, sources, job, options, watch)
}

/// [`read_mapped`], and the device gets the buffers: the transfer of a piece to it begins as soon as its bytes have
/// arrived (and were hashed, with [`ReadOptions::checksum`]), while what lies behind it is being read or allocated. The
/// first byte of a buffer goes to the place in `to` that has its number, the others follow; bytes that no extent names
/// go there as zeroes. The device may only read.
///
/// The device's queue has nothing in flight. `watch` is called with the bytes that have arrived on the device
/// ([`Event::OnDevice`](dmalane_load::fill::Event::OnDevice)), and with an extent that is complete when the device has
/// all of it. When this returns, it has everything; the buffers are there too, and still mapped.
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
    let sink = Sink::Device { queue: device.queue_mut(), polled, targets: &to };
    mapped(heap, &*registrar, Access::READ, sink, sources, job, options, watch)
}

#[allow(clippy::too_many_arguments)]
fn mapped(
    heap: &dyn Heap,
    registrar: &dyn Registrar,
    access: Access,
    sink: Sink<'_>,
    sources: &[ReadSource],
    job: &Job,
    options: &ReadOptions,
    watch: &mut Watch<'_>,
) -> Result<MappedRead, ReadError> {
    let memory = Stays { heap, register: Some((registrar, access)) };
    let (mut filled, ways) = all(memory, sink, sources, job, options, watch, true)?;
    let gathers = std::mem::take(&mut filled.mappings);
    Ok(MappedRead { filled, ways, gathers })
}
