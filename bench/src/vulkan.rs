//! A GPU through Vulkan: copies by a queue and binds by an address space, beside the same work written by hand.
//!
//! Both take turns. Destinations are scattered, so that no two regions can be merged. The bytes read back are compared.
//! Loads are compared with a program whose one thread reads into imported buffers while another copies them to the GPU.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use dmalane::addr::{Access, CardAddr, FileOffset, SgIndex};
use dmalane::device::{Bounce, Device, DeviceMemory, Placement};
use dmalane::dma::{BufferSlice, Heap};
use dmalane::file::{FileQueue, Mode};
use dmalane::load::{DriveOptions, write_sample};
use dmalane::queue::{
    Completion, DeviceAddr, DeviceQueue, Direction, HostSlice, Operation, Queue, Refusal, Registered,
};
use dmalane::vm::{BindRequest, Bo};
use dmalane::vulkan::{VulkanDevice, VulkanOptions};
use dmalane::{FileOptions, OpenDevice, OpenOptions, open_file};
use dmalane_vulkan::by_hand::{ByHand, Imported};

use crate::report::{Details, Report};

#[derive(clap::Args)]
pub struct Options {
    /// The GPU: its number, a part of its name, or its UUID
    #[arg(long, default_value = "0")]
    gpu: String,

    /// Rounds of each case of copies; the median counts
    #[arg(long, default_value_t = 15)]
    rounds: usize,

    /// Rounds of each case of binds: some drivers take 100 us a bind
    #[arg(long, default_value_t = 3)]
    bind_rounds: usize,

    /// Rounds of each case of loads; none with 0
    #[arg(long, default_value_t = 5)]
    load_rounds: usize,

    /// Bytes of the file that is loaded
    #[arg(long, default_value_t = 1 << 30)]
    size: u64,

    /// Where the file is made; it must be on a disk
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target"))]
    folder: PathBuf,
}

pub const LONG: Duration = Duration::from_secs(60);
/// Pages that are bound.
const PAGES: u64 = 4096;

pub fn run(options: &Options) -> Result<Report, Box<dyn Error>> {
    let mut report = Report::new("vulkan");
    for sparse in [false, true] {
        let how = VulkanOptions { sparse, ..VulkanOptions::default() };
        let mut device = match VulkanDevice::open(&options.gpu, &how) {
            Ok(device) => device,
            Err(e) => {
                report.say(format!("SKIPPED: {e}"));
                return Ok(report);
            }
        };
        match sparse {
            false => {
                report.say(format!("{}: {}", device.gpu(), device.info().notes.join("; ")));
                copies(&mut device, options.rounds, &mut report)?;
                if options.load_rounds > 0 {
                    loads(&device, options, &mut report)?;
                }
            }
            true if device.sparse_pages().is_some() => binds(&mut device, options.bind_rounds, &mut report)?,
            true => report.say("SKIPPED: no binds: the driver has no sparse binding".to_owned()),
        }
    }
    Ok(report)
}

/// Numbers below `n` in an order in which none follows the one before it.
pub fn scattered(n: u64) -> impl Iterator<Item = u64> {
    let step = (n / 2..).find(|s| gcd(*s, n) == 1 && *s > 0).unwrap_or(1);
    (0..n).map(move |i| i * step % n)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub fn byte(i: usize) -> u8 {
    (i ^ (i >> 8) ^ (i >> 16)) as u8
}

fn copies(device: &mut VulkanDevice, rounds: usize, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    let mut by_hand = ByHand::new(device)?;
    for (name, len) in [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("16 MiB", 16 << 20u64)] {
        let copies = ((256u64 << 20) / len).min(1000);
        let total = copies * len;
        let table = memory.allocate(total, &Placement::Default)?;
        let at = table.segments().next().ok_or("no memory")?.addr;
        let mut buf = heap.allocate(total as usize)?;
        buf.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
        let buf = buf.share();
        let via = Registered::new(&*registrar, &buf, Access::RW)?;
        let imported = by_hand.import(&buf.reference())?;
        let mut rest = buf.into_slice();
        let mut slices: Vec<_> = (0..copies).filter_map(|_| rest.split_off_front(len as usize)).collect();
        for direction in [Direction::FromHost, Direction::ToHost] {
            let to = if direction == Direction::FromHost { "to the GPU" } else { "to the host" };
            let case = format!("{copies} x {name}, {to}");
            if direction == Direction::ToHost {
                slices.iter().for_each(|slice| slice.as_volatile_slice().fill(0));
            }
            let (mut ours, mut hand) = (Vec::new(), Vec::new());
            // The first round makes memory present.
            for round in 0..=rounds {
                let begun = Instant::now();
                slices = by_queue(&mut *queues[0], direction, slices, &via, at, len)?;
                let took = begun.elapsed().as_secs_f64();
                let begun = Instant::now();
                let regions = scattered(copies).zip(0..).map(|(place, i)| (i * len, place * len, len));
                by_hand.copy(device, direction, &imported, at, regions)?;
                if round > 0 {
                    ours.push(took);
                    hand.push(begun.elapsed().as_secs_f64());
                }
            }
            let details = Details { items: Some(copies), ..Details::default() };
            let a = report.detailed_row(&case, "ours: a queue", total, &ours, details);
            let b = report.detailed_row(&case, "by hand: one command buffer", total, &hand, details);
            report.at_least(&format!("{case}: rate beside by hand"), if len < 64 << 10 { 0.9 } else { 0.95 }, b / a);
        }
        let mut bytes = vec![0; len as usize];
        for (k, slice) in slices.iter().enumerate() {
            slice.read(0, &mut bytes).ok_or("a slice of other length")?;
            if let Some(i) = (0..bytes.len()).find(|i| bytes[*i] != byte(k * len as usize + i)) {
                return Err(format!("copy {k} of {len} bytes differs at {i}").into());
            }
        }
        drop((slices, rest, via, imported));
        memory.free(table.segments())?;
    }
    Ok(())
}

/// Submits all copies, rings once and waits; gives the slices back in order.
pub fn by_queue(
    queue: &mut DeviceQueue,
    direction: Direction,
    slices: Vec<BufferSlice>,
    via: &Registered,
    at: CardAddr,
    len: u64,
) -> Result<Vec<BufferSlice>, Box<dyn Error>> {
    let count = slices.len();
    let mut done: Vec<Completion> = Vec::with_capacity(count);
    for (slice, place) in slices.into_iter().zip(scattered(count as u64)) {
        let to = DeviceAddr::Card(at + place * len);
        let mut operation = Operation::copy(direction, HostSlice::from((slice, via.clone())), to);
        while let Err(refused) = queue.submit(operation) {
            if refused.reason != Refusal::Full {
                return Err(refused.reason.into());
            }
            queue.wait(&mut done, LONG);
            operation = refused.operation;
        }
    }
    queue.flush();
    while done.len() < count {
        if queue.wait(&mut done, LONG) == 0 {
            return Err("a copy did not end".into());
        }
    }
    if let Some(error) = done.iter().find_map(|c| c.result.as_ref().err()) {
        return Err(error.clone().into());
    }
    let mut slices: Vec<_> = done.into_iter().filter_map(|c| c.operation.into_slice()).collect();
    slices.sort_by_key(BufferSlice::offset);
    Ok(slices)
}

/// Files onto the GPU, cached and not. Both sides allocate the GPU's memory for each load, and neither hashes.
fn loads(device: &VulkanDevice, options: &Options, report: &mut Report) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(&options.folder)?;
    let mut file = tempfile::Builder::new().suffix(".safetensors").tempfile_in(&options.folder)?;
    write_sample(file.as_file_mut(), options.size, 1)?;
    file.as_file().sync_all()?;
    let mut memory = device.memory();
    let mut by_hand = [(8, 2 << 20), (4, 16 << 20)]
        .into_iter()
        .map(|(count, len)| Loader::new(device, options.size, count, len))
        .collect::<Result<Vec<_>, _>>()?;
    let mut drive = DriveOptions::default();
    drive.fill.checksum = false;
    let how = OpenOptions { drive, flat: true, ..OpenOptions::default() };
    let mut ours = how.open(&format!("vulkan:{}", options.gpu).parse()?)?;
    for (case, mode) in [("load, not cached", Mode::Direct), ("load, cached", Mode::Buffered)] {
        let mut samples: [Vec<f64>; 3] = Default::default();
        // The first round makes buffers present.
        for round in 0..=options.load_rounds {
            let last = round == options.load_rounds;
            for (i, samples) in samples.iter_mut().enumerate() {
                match mode {
                    Mode::Direct => rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?,
                    _ => drop(std::io::copy(&mut File::open(file.path())?, &mut std::io::sink())?),
                }
                let took = match by_hand.get_mut(i) {
                    Some(by_hand) => by_hand.load(device, &mut memory, file.path(), mode, last)?,
                    None => load_by_device(&mut ours, file.path(), mode, last)?,
                };
                if round > 0 {
                    samples.push(took);
                }
            }
        }
        let mut fastest = f64::INFINITY;
        for (by_hand, samples) in by_hand.iter().zip(&samples) {
            let variant = format!("by hand: {} buffers of {} MiB", by_hand.slots.len(), by_hand.len >> 20);
            fastest = fastest.min(report.row(case, &variant, options.size, samples));
        }
        let ours = report.row(case, "ours: load", options.size, &samples[2]);
        report.at_least(&format!("{case}: rate beside the faster by hand"), 0.9, fastest / ours);
    }
    Ok(())
}

/// The whole path, from opening the file on. `verify` compares every byte afterwards.
fn load_by_device(device: &mut OpenDevice, path: &Path, mode: Mode, verify: bool) -> Result<f64, Box<dyn Error>> {
    let begun = Instant::now();
    let mut inputs = [open_file(path, FileOptions::for_mode(mode))?];
    let loaded = device.load(&mut inputs, &Placement::Default, &mut |_| {})?;
    let seconds = begun.elapsed().as_secs_f64();
    if verify {
        device.verify(&loaded, &mut inputs, &mut |_| {})?;
    }
    device.unload(loaded)?;
    Ok(seconds)
}

/// A loader written by hand: a thread reads into a few buffers, which are copied by a command buffer each.
struct Loader {
    by_hand: ByHand,
    size: u64,
    len: u64,
    imported: Vec<Imported>,
    slots: Vec<Slot>,
}

/// A buffer, and its place in `imported`.
struct Slot(usize, BufferSlice);

impl Loader {
    fn new(device: &VulkanDevice, size: u64, count: usize, len: u64) -> Result<Self, Box<dyn Error>> {
        let (by_hand, heap) = (ByHand::new(device)?, device.registrar().heap(None));
        let (imported, slots) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut this = Self { by_hand, size, len, imported, slots };
        for i in 0..count {
            let buffer = heap.allocate(usize::try_from(len)?)?.share();
            this.imported.push(this.by_hand.import(&buffer.reference())?);
            this.slots.push(Slot(i, buffer.into_slice()));
        }
        Ok(this)
    }

    /// Loads, from the allocation of the GPU's memory on. `compare` compares every byte afterwards.
    fn load(
        &mut self,
        device: &VulkanDevice,
        memory: &mut DeviceMemory,
        path: &Path,
        mode: Mode,
        compare: bool,
    ) -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        let (size, len) = (self.size, self.len);
        let table = memory.allocate(size, &Placement::Default)?;
        let first =
            table.segments().next().filter(|s| s.len >= size).ok_or("no contiguous memory: use a smaller --size")?;
        let to = first.addr;
        let (free, emptied) = sync_channel(self.slots.len());
        let (filled, ready) = sync_channel(self.slots.len());
        self.slots.drain(..).try_for_each(|slot| free.send(slot))?;
        self.slots = std::thread::scope(|scope| -> Result<_, Box<dyn Error>> {
            // Dropped before the scope waits for the reader, which may wait for them.
            let (free, ready) = (free, ready);
            let reader = scope.spawn(move || {
                let read = read(path, mode, size, len, &emptied, &filled);
                read.map(|()| emptied).map_err(|e| e.to_string())
            });
            while let Ok((slot, at)) = ready.recv() {
                let region = std::iter::once((0, at, len.min(size - at)));
                self.by_hand.copy(device, Direction::FromHost, &self.imported[slot.0], to, region)?;
                free.send(slot)?;
            }
            Ok(reader.join().map_err(|_| "the reader panicked")??.try_iter().collect())
        })?;
        let seconds = begun.elapsed().as_secs_f64();
        if compare {
            let (file, Slot(i, slice)) = (File::open(path)?, self.slots.first().ok_or("no buffer")?);
            let (mut got, mut want) = (vec![0; len as usize], vec![0; len as usize]);
            for at in (0..size).step_by(len as usize) {
                let n = len.min(size - at);
                let region = std::iter::once((0, at, n));
                self.by_hand.copy(device, Direction::ToHost, &self.imported[*i], to, region)?;
                slice.read(0, &mut got[..n as usize]).ok_or("a short buffer")?;
                file.read_exact_at(&mut want[..n as usize], at)?;
                if got[..n as usize] != want[..n as usize] {
                    return Err(format!("the GPU's bytes from {at} on are not the file's").into());
                }
            }
        }
        memory.free(table.segments())?;
        Ok(seconds)
    }
}

/// Reads a file into the buffers that arrive, as many at a time as there are, and hands them on in any order.
fn read(
    path: &Path,
    mode: Mode,
    size: u64,
    len: u64,
    emptied: &Receiver<Slot>,
    filled: &SyncSender<(Slot, u64)>,
) -> Result<(), Box<dyn Error>> {
    let mut queue = FileQueue::open(path, FileOptions::for_mode(mode))?;
    let (mut at, mut done, mut reading) = (0, Vec::new(), Vec::new());
    while at < size || !reading.is_empty() {
        while at < size {
            let slot = if reading.is_empty() { Some(emptied.recv()?) } else { emptied.try_recv().ok() };
            let Some(Slot(i, slice)) = slot else { break };
            let (part, rest) = slice.split_at(len.min(size - at) as usize).map_err(|_| "a short buffer")?;
            let mut operation = Operation::read(part, FileOffset::new(at));
            let ticket = loop {
                operation = match queue.submit(operation) {
                    Ok(ticket) => break ticket,
                    Err(full) if full.reason == Refusal::Full => full.operation,
                    Err(refused) => return Err(refused.reason.into()),
                };
                queue.wait(&mut done, LONG);
            };
            reading.push((ticket, i, rest, at));
            at += len;
        }
        queue.wait(&mut done, LONG);
        for c in done.drain(..) {
            c.result?;
            let k = reading.iter().position(|r| r.0 == c.ticket).ok_or("an unknown ticket")?;
            let (_, i, rest, at) = reading.swap_remove(k);
            let part = c.operation.into_slice().ok_or("a read")?;
            filled.send((Slot(i, part.join(rest).map_err(|_| "parts of two buffers")?), at))?;
        }
    }
    Ok(())
}

fn binds(device: &mut VulkanDevice, rounds: usize, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let page = device.sparse_pages().ok_or("no sparse binding")?;
    let (len, mut memory, mut queues) = (page.bytes(), device.memory(), device.take_queues());
    let registrar = device.registrar();
    let mut bounce = Bounce::new(&*registrar, &*registrar.heap(None), 1 << 20, LONG)?;
    let table = memory.allocate(PAGES * len, &Placement::Default)?;
    let first = table.segments().next().ok_or("no memory")?.addr;
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table)?));
    // Each page has its number, by which it is known again.
    for place in 0..PAGES {
        let at = DeviceAddr::Card(first + place * len);
        bounce.write(&mut *queues[0], at, &place.to_le_bytes())?;
    }
    let mut by_hand = ByHand::new(device)?;
    let places: Vec<u64> = scattered(PAGES).collect();
    let details = Details { items: Some(PAGES), ..Details::default() };
    for batch in [1u64, 16, 256, 4096] {
        let mut samples: [Vec<f64>; 6] = Default::default();
        // How long a driver takes depends on what it did just before. So the two binds that are compared, by hand and
        // ours, each come behind a bind by hand where all was unbound at once and an unbind of all at once. The round
        // before the first prepares page tables.
        for round in 0..=rounds {
            for (k, step) in [0, 1, 2, 3, 0, 3, 0, 3].into_iter().enumerate() {
                let begun = Instant::now();
                match step {
                    3 => by_hand.bind(device, page, first, [(0, PAGES, None)].into_iter())?,
                    _ => {
                        for (k, part) in places.chunks(batch as usize).enumerate() {
                            let pages = part.iter().zip(k as u64 * batch..);
                            let binds = pages.map(|(place, i)| (i, 1, (step != 1).then_some(*place)));
                            by_hand.bind(device, page, first, binds)?;
                        }
                    }
                }
                by_hand.settle()?;
                // The first bind comes behind ours, the second behind single binds.
                if round > 0 && (step != 0 || k == 6) {
                    samples[step].push(begun.elapsed().as_secs_f64());
                }
            }
            let space = device.address_space();
            let range = space.reserve(&table, PAGES * len)?;
            let at = |i: u64| range.first() + i * len;
            let bind = |(place, i): (&u64, u64)| {
                let (bo, offset) = (bo.clone(), place * len);
                BindRequest::Bind { va: at(i), bo, offset, len, access: Access::RW }
            };
            let whole: Vec<_> = places.iter().zip(0..).map(bind).collect();
            let begun = Instant::now();
            whole.chunks(batch as usize).try_for_each(|part| space.apply(part))?;
            space.settle()?;
            let took = begun.elapsed().as_secs_f64();
            let mut number = [0; 8];
            for (i, place) in places.iter().enumerate() {
                bounce.read(&mut *queues[0], DeviceAddr::Va(at(i as u64)), &mut number)?;
                if u64::from_le_bytes(number) != *place {
                    return Err(format!("page {i} is not page {place} of the buffer").into());
                }
            }
            let begun = Instant::now();
            device.address_space().release(range)?;
            if round > 0 {
                samples[4].push(took);
                samples[5].push(begun.elapsed().as_secs_f64());
            }
        }
        let case = format!("{PAGES} x {page}, batches of {batch}");
        let rows = [
            "by hand: bind where all was unbound at once",
            "by hand: unbind page by page",
            "by hand: bind where pages were unbound",
            "by hand: unbind all at once",
            "ours: bind by an address space",
            "ours: unbind all at once",
        ];
        let mut row = |i: usize| report.detailed_row(&case, rows[i], PAGES * len, &samples[i], details);
        let [driver, _, _, _, ours, _] = [0, 1, 2, 3, 4, 5].map(&mut row);
        match batch {
            4096 => report.at_most(&format!("{case}: time of binds beside by hand"), 1.1, ours / driver),
            _ => report.note(&case, "time of binds beside by hand", ours / driver),
        }
    }
    memory.free(table.segments())?;
    Ok(())
}
