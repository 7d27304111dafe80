//! A GPU through CUDA: copies by a queue beside the same copies by calls of the driver alone.
//!
//! Both take turns. The driver's copies go back to back on a stream, one call for each. The bytes that arrive are
//! compared.

use std::error::Error;
use std::time::Instant;

use dmalane::DeviceSpec;
use dmalane::addr::{Access, CardAddr};
use dmalane::cuda::CudaDevice;
use dmalane::device::{Device, DriverCopy, Placement};
use dmalane::devices::cuda::CudaSpec;
use dmalane::dma::{BufferSlice, Heap};
use dmalane::queue::{Direction, Registered};

use crate::report::{Details, Report};
use crate::vulkan::{by_queue, byte, scattered};

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
}

pub fn run(options: &Options) -> Result<Report, Box<dyn Error>> {
    let mut report = Report::new("cuda");
    let spec: DeviceSpec = format!("cuda:{}", options.gpu).parse()?;
    let spec = spec.get::<CudaSpec>().ok_or("no GPU")?;
    let mut device = match CudaDevice::open(&spec.gpu, spec.library.as_deref()) {
        Ok(device) => device,
        Err(e) => {
            report.say(format!("SKIPPED: {e}"));
            return Ok(report);
        }
    };
    report.say(format!("{}: {}", device.info().name, device.info().notes.join("; ")));
    copies(&mut device, options, &mut report)?;
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
                        let at = CardAddr::new(at.bits() + place * len);
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

#[cfg(test)]
mod tests {
    use dmalane_fake_cuda::Fake;

    use super::*;

    #[test]
    fn answers_are_right_and_a_lost_copy_is_found() {
        let fake = Fake::turn();
        let gpu = format!("0,lib={}", fake.path());
        let options = Options { gpu, rounds: 1, size: 1 << 20 };
        let text = run(&options).unwrap().text();
        assert!(text.contains("16 x 64 KiB, to the host"), "{text}");
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
