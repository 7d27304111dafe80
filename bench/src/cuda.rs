//! A GPU through CUDA: copies by a queue and binds by an address space, beside the same work by calls of the driver
//! alone.
//!
//! Both take turns. The driver's copies go back to back on a stream, one call for each; its binds are a `cuMemMap` for
//! each page and a `cuMemSetAccess` for each batch. The bytes that arrive are compared, and each page is known by its
//! number.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use dmalane::DeviceSpec;
use dmalane::addr::{Access, DeviceVa, SgIndex, Span};
use dmalane::cuda::{Binds, CudaDevice};
use dmalane::device::{Bounce, Device, DriverCopy, Placement};
use dmalane::devices::cuda::CudaSpec;
use dmalane::dma::{BufferSlice, Heap};
use dmalane::queue::{DeviceAddr, DeviceQueue, Direction, Registered};
use dmalane::vm::{BindRequest, Bo};

use crate::report::{Details, Report};
use crate::vulkan::{LONG, by_queue, byte, scattered};

#[derive(clap::Args)]
pub struct Options {
    /// The GPU, as `cuda:` names it: its number or UUID, and `,lib=PATH` for another library of the driver
    #[arg(long, default_value = "0")]
    gpu: String,

    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 15)]
    rounds: usize,

    /// Bytes of a case of copies, or 1000 copies where that is less
    #[arg(long, default_value_t = 256 << 20)]
    size: u64,

    /// Pages that are bound
    #[arg(long, default_value_t = 512)]
    pages: u64,
}

pub fn run(options: &Options) -> Result<Report, Box<dyn Error>> {
    let mut report = Report::new("cuda");
    let spec: DeviceSpec = format!("cuda:{}", options.gpu).parse()?;
    let spec = spec.get::<CudaSpec>().ok_or("no GPU")?;
    let open = |binds| CudaDevice::open(&spec.gpu, spec.library.as_deref(), binds);
    let mut device = match open(Binds::Flat) {
        Ok(device) => device,
        Err(e) => {
            report.say(format!("SKIPPED: {e}"));
            return Ok(report);
        }
    };
    report.say(format!("{}: {}", device.info().name, device.info().notes.join("; ")));
    copies(&mut device, options, &mut report)?;
    drop(device);
    binds(&mut open(Binds::CuMemMap)?, options, &mut report)?;
    Ok(report)
}

fn copies(device: &mut CudaDevice, options: &Options, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    let failed = |e: Box<dyn Error + Send + Sync>| -> Box<dyn Error> { e };
    let mut driver = device.driver_copies().map_err(failed)?.ok_or("the device has no copies by its driver")?;
    let sizes = [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("16 MiB", 16 << 20u64)];
    for (name, len) in sizes.into_iter().filter(|(_, len)| *len <= options.size) {
        let copies = (options.size / len).min(1000);
        let total = copies * len;
        let table = memory.allocate(total, &Placement::Default)?;
        let at = table.segments().next().ok_or("no memory")?.addr;
        let buf = heap.allocate(total as usize)?.share();
        let via = Registered::new(&*registrar, &buf, Access::RW)?;
        let mut rest = buf.into_slice();
        let mut slices: Vec<_> = (0..copies).filter_map(|_| rest.split_off_front(len as usize)).collect();
        // Each side writes and reads bytes of its own.
        let (mut ours, mut alone) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for round in 0..=options.rounds {
            for side in 0..2u8 {
                fill(&slices, side, round);
                for (i, direction) in [Direction::FromHost, Direction::ToHost].into_iter().enumerate() {
                    let copy = |(place, i): (u64, u64)| {
                        let at = at + place * len;
                        DriverCopy { direction, host: via.clone(), offset: i * len, at, len }
                    };
                    let all: Vec<_> = scattered(copies).zip(0..).map(copy).collect();
                    let begun = Instant::now();
                    match side {
                        0 => slices = by_queue(&mut *queues[0], direction, slices, &via, at, len)?,
                        _ => driver.copy(&all, 1).map_err(failed)?,
                    }
                    let took = begun.elapsed().as_secs_f64();
                    // The first round makes memory present.
                    if round > 0 {
                        if side == 0 { &mut ours[i] } else { &mut alone[i] }.push(took);
                    }
                    match direction {
                        Direction::FromHost => slices.iter().for_each(|slice| slice.as_volatile_slice().fill(0)),
                        Direction::ToHost => compare(&slices, side, round)?,
                    }
                }
            }
        }
        for (i, to) in ["to the GPU", "to the host"].into_iter().enumerate() {
            let case = format!("{copies} x {name}, {to}");
            let details = Details { items: Some(copies), ..Details::default() };
            let a = report.detailed_row(&case, "ours: a queue", total, &ours[i], details);
            let b = report.detailed_row(&case, "the driver alone: a stream", total, &alone[i], details);
            report.note(&case, "rate beside the driver alone", b / a);
        }
        drop((slices, rest, via));
        memory.free(table.segments())?;
    }
    Ok(())
}

/// The byte `i` of a round of one side.
fn expected(side: u8, round: usize, i: usize) -> u8 {
    byte(i) ^ (round as u8) << 1 ^ side
}

fn fill(slices: &[BufferSlice], side: u8, round: usize) {
    let mut at = 0;
    for slice in slices {
        let bytes: Vec<u8> = (at..at + slice.len()).map(|i| expected(side, round, i)).collect();
        slice.as_volatile_slice().write(&bytes);
        at += slice.len();
    }
}

fn compare(slices: &[BufferSlice], side: u8, round: usize) -> Result<(), Box<dyn Error>> {
    let (mut at, mut bytes) = (0, Vec::new());
    for slice in slices {
        bytes.resize(slice.len(), 0);
        slice.read(0, &mut bytes).ok_or("a slice of other length")?;
        if let Some(i) = (0..bytes.len()).find(|i| bytes[*i] != expected(side, round, at + i)) {
            let who = if side == 0 { "a queue" } else { "the driver alone" };
            return Err(format!("byte {} of copies by {who} differs", at + i).into());
        }
        at += slice.len();
    }
    Ok(())
}

fn binds(device: &mut CudaDevice, options: &Options, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let (pages, page) = (options.pages, device.address_space().page());
    let (len, mut memory, mut queues) = (page.bytes(), device.memory(), device.take_queues());
    let registrar = device.registrar();
    let mut bounce = Bounce::new(&*registrar, &*registrar.heap(None), 4096, LONG)?;
    let table = memory.allocate(pages * len, &Placement::Default)?;
    let first = table.segments().next().ok_or("no memory")?.addr;
    let span = Span::new(first, pages * len).ok_or("no pages")?;
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table)?));
    for place in 0..pages {
        let at = DeviceAddr::Card(first + place * len);
        bounce.write(&mut *queues[0], at, &place.to_le_bytes())?;
    }
    let mut alone = device.plain_binds(span, page)?;
    let places: Vec<u64> = scattered(pages).collect();
    let details = Details { items: Some(pages), ..Details::default() };
    for batch in [1, 16, pages].into_iter().filter(|batch| *batch <= pages) {
        let mut samples: [Vec<f64>; 4] = Default::default();
        for round in 0..=options.rounds {
            let mut took = [0.0; 4];
            let begun = Instant::now();
            for (k, part) in places.chunks(batch as usize).enumerate() {
                alone.bind(k as u64 * batch, part)?;
            }
            took[0] = begun.elapsed().as_secs_f64();
            alone.shown(|at| look(&mut bounce, &mut *queues[0], at, len, &places))??;
            let begun = Instant::now();
            alone.unbind(0, pages)?;
            took[1] = begun.elapsed().as_secs_f64();

            let space = device.address_space();
            let range = space.reserve(&table, pages * len)?;
            let bind = |(place, i): (&u64, u64)| {
                let (bo, va) = (bo.clone(), range.first() + i * len);
                BindRequest::Bind { va, bo, offset: place * len, len, access: Access::RW }
            };
            let whole: Vec<_> = places.iter().zip(0..).map(bind).collect();
            let begun = Instant::now();
            whole.chunks(batch as usize).try_for_each(|part| space.apply(part))?;
            space.settle()?;
            took[2] = begun.elapsed().as_secs_f64();
            look(&mut bounce, &mut *queues[0], range.first(), len, &places)?;
            let begun = Instant::now();
            device.address_space().release(range)?;
            took[3] = begun.elapsed().as_secs_f64();
            if round > 0 {
                samples.iter_mut().zip(took).for_each(|(samples, took)| samples.push(took));
            }
        }
        let case = format!("{pages} x {page}, batches of {batch}");
        let rows = [
            "the driver alone: bind",
            "the driver alone: unbind all at once",
            "ours: bind by an address space",
            "ours: unbind all at once",
        ];
        let mut row = |i: usize| report.detailed_row(&case, rows[i], pages * len, &samples[i], details);
        let [driver, driver_unbinds, ours, our_unbinds] = [0, 1, 2, 3].map(&mut row);
        report.note(&case, "time of binds beside the driver alone", ours / driver);
        report.note(&case, "time of unbinds beside the driver alone", our_unbinds / driver_unbinds);
    }
    drop(alone);
    memory.free(table.segments())?;
    Ok(())
}

/// Reads the number of each page through its bound address.
fn look(
    bounce: &mut Bounce,
    queue: &mut DeviceQueue,
    at: DeviceVa,
    len: u64,
    places: &[u64],
) -> Result<(), Box<dyn Error>> {
    let mut number = [0; 8];
    for (i, place) in places.iter().enumerate() {
        bounce.read(queue, DeviceAddr::Va(at + i as u64 * len), &mut number)?;
        if u64::from_le_bytes(number) != *place {
            return Err(format!("page {i} is not page {place} of the memory").into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dmalane_fake_cuda::Fake;

    use super::*;

    #[test]
    fn answers_are_right_and_a_lost_copy_is_found() {
        let fake = Fake::turn();
        let gpu = format!("0,lib={}", fake.path());
        let options = Options { gpu, rounds: 1, size: 1 << 20, pages: 16 };
        let text = run(&options).unwrap().text();
        for row in ["16 x 64 KiB, to the host", "16 x 2 MiB, batches of 16", "the driver alone: bind"] {
            assert!(text.contains(row), "{row}: {text}");
        }
        fake.assert_clean("after a run");
        // One of the first copies of 4 KiB, by the queue; and one by the driver, behind 256 up and 256 down.
        for (nth, who) in [(3, "a queue"), (512 + 3, "the driver alone")] {
            fake.lose(nth);
            let error = run(&options).err().unwrap().to_string();
            assert!(error.contains(who) && error.contains("differs"), "{error}");
            fake.assert_clean("after a wrong answer");
        }
    }
}
