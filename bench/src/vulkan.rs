//! A GPU through Vulkan: copies by a queue and binds by an address space, beside the same work written by hand.
//!
//! Both take turns. Destinations are scattered, so that no two regions can be merged. What is read back is compared.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane::addr::{Access, CardAddr, DeviceVa, SgIndex};
use dmalane::device::{Bounce, Device, Placement};
use dmalane::dma::{BufferSlice, Heap};
use dmalane::queue::{Completion, DeviceAddr, DeviceQueue, Direction, HostSlice, Operation, Refusal, Registered};
use dmalane::vm::{BindRequest, Bo};
use dmalane::vulkan::{VulkanDevice, VulkanOptions};
use dmalane_vulkan::by_hand::ByHand;

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
}

const LONG: Duration = Duration::from_secs(60);
/// Pages that are bound.
const PAGES: u64 = 4096;

pub fn run(options: &Options) -> Result<Report, Box<dyn Error>> {
    let mut report = Report::new("vulkan");
    for sparse in [false, true] {
        let how = VulkanOptions { sparse, validation: None, ..VulkanOptions::default() };
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
            }
            true if device.sparse_pages().is_some() => binds(&mut device, options.bind_rounds, &mut report)?,
            true => report.say("SKIPPED: no binds: the driver has no sparse binding".to_owned()),
        }
    }
    Ok(report)
}

/// Numbers below `n` in an order in which none follows the one before it.
fn scattered(n: u64) -> impl Iterator<Item = u64> {
    let step = (n / 2..).find(|s| gcd(*s, n) == 1 && *s > 0).unwrap_or(1);
    (0..n).map(move |i| i * step % n)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn byte(i: usize) -> u8 {
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
                slices.iter().for_each(|slice| slice.view().fill(0));
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
fn by_queue(
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
        let to = DeviceAddr::Card(CardAddr::new(at.bits() + place * len));
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
        let at = DeviceAddr::Card(CardAddr::new(first.bits() + place * len));
        bounce.write(&mut *queues[0], at, &place.to_le_bytes())?;
    }
    let mut by_hand = ByHand::new(device)?;
    let places: Vec<u64> = scattered(PAGES).collect();
    let details = Details { items: Some(PAGES), ..Details::default() };
    for batch in [1u64, 16, 256, 4096] {
        let mut samples: [Vec<f64>; 6] = Default::default();
        // A driver may have more to set up where all was unbound at once, as ours unbinds: so by hand does both, and
        // the first bind of a round, behind that, is compared. The round before the first prepares page tables.
        for round in 0..=rounds {
            for (step, sample) in samples.iter_mut().enumerate().take(4) {
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
                if round > 0 {
                    sample.push(begun.elapsed().as_secs_f64());
                }
            }
            let space = device.address_space();
            let range = space.reserve(&table, PAGES * len)?;
            let at = |i: u64| DeviceVa::new(range.first().bits() + i * len);
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
            device.address_space().unbind(range)?;
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
