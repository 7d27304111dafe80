//! A cached file into memory that nobody has touched: loaded onto a new device, beside a read into a new buffer and a
//! copy of it.
//!
//! All rows open the file, and end when their memory is given back. Rows take turns, round by round; checksums are
//! compared.

use std::error::Error;
use std::fs::File;
use std::time::Instant;

use dmalane::dma::{AnonHeap, CopyHint, Heap, VolatileSlice};
use dmalane::load::{LoadOptions, ModelOptions, write_sample};
use dmalane::{HostModel, OpenOptions, ReadOptions, alloc_and_read};
use twox_hash::XxHash3_64;

use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the file
    #[arg(long, default_value_t = 205_000_000)]
    size: u64,

    /// Devices, with a space between two
    #[arg(long, value_delimiter = ' ', default_values_t = ["soft", "soft,flat", "ram:1GiB"].map(String::from))]
    devices: Vec<String>,

    /// Rounds; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("fresh");
    let mut file = tempfile::Builder::new().suffix(".safetensors").tempfile()?;
    write_sample(file.as_file_mut(), options.size, 1)?;
    let right = XxHash3_64::oneshot(&std::fs::read(file.path())?);
    let case = format!("{:.0} MB, cached", options.size as f64 / 1e6);
    let (mut reads, mut copies, mut loads) = (Vec::new(), Vec::new(), vec![Vec::new(); options.devices.len()]);
    let heap = AnonHeap::new();
    let target = heap.allocate(options.size as usize)?.share();
    for round in 0..=options.rounds {
        let begin = Instant::now();
        let read = alloc_and_read(&heap, &File::open(file.path())?, .., &ReadOptions::default())?;
        let took = begin.elapsed();
        let buffer = read.buffer.as_volatile_slice().sub(0, options.size as usize).ok_or("a short read")?;
        let begin = Instant::now();
        target.as_volatile_slice().copy_from(buffer, CopyHint::Stream);
        let copied = begin.elapsed().as_secs_f64();
        let hash = |buffer: VolatileSlice<'_>| {
            let mut bytes = vec![0; buffer.len()];
            buffer.read(&mut bytes);
            XxHash3_64::oneshot(&bytes)
        };
        if round == 0 && hash(buffer) != right {
            return Err("the read has other bytes".into());
        }
        let begin = Instant::now();
        drop(read);
        if round > 0 {
            reads.push((took + begin.elapsed()).as_secs_f64());
            copies.push(copied);
        }
        for (device, samples) in options.devices.iter().zip(&mut loads) {
            let begin = Instant::now();
            let mut device = OpenOptions::default().open(&device.parse()?)?;
            let model = HostModel::open([file.path()], ModelOptions::default())?;
            let verify = round == 0;
            let loaded = model.load_onto(&mut device, &LoadOptions { verify, ..LoadOptions::default() }, |_| {})?;
            let checksum = loaded.files[0].checksum;
            drop((loaded, model, device));
            // The first round is read back.
            if round > 0 {
                samples.push(begin.elapsed().as_secs_f64());
            }
            if checksum != Some(right) {
                return Err("the load has other bytes".into());
            }
        }
    }
    let floor = report.row(&case, "floor: read into a new buffer", options.size, &reads)
        + report.row(&case, "floor: one copy of it", options.size, &copies);
    for (device, samples) in options.devices.iter().zip(&loads) {
        let ours = report.row(&case, &format!("ours: load, {device}"), options.size, samples);
        report.of_rounds(samples.len()).at_most(&format!("{device}: load / (read + one copy)"), 1.3, ours / floor);
    }
    Ok(report)
}
