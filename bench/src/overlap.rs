//! A file from a disk to a GPU over a link, each of a modelled rate: read onto the GPU and loaded, beside the slower of
//! the two alone.
//!
//! The disk is a FUSE server of ours, the GPU the CUDA driver in software, whose copies take the time that a link of
//! some rate needs and move nothing. Rates are those of real machines, divided by `--slower`, so that this machine's
//! processors can keep up. Rows take turns, round by round; hashes and copied bytes are compared.

use std::error::Error;
use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use dmalane::dma::{AnonHeap, PageKind, Pool};
use dmalane::load::{Manifest, ModelOptions, Part, write_sample};
use dmalane::{FileOptions, HostModel, LoadOptions, OpenOptions};
use dmalane_fake_cuda::Fake;
use twox_hash::XxHash3_64;

use crate::late::Server;
use crate::report::Report;
use crate::slow::{forget, raw};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the file
    #[arg(long, default_value_t = 256 << 20)]
    size: u64,

    /// GB/s of the disk
    #[arg(long, value_delimiter = ',', default_values_t = [2.0, 8.0, 20.0])]
    disk: Vec<f64>,

    /// GB/s of the link
    #[arg(long, value_delimiter = ',', default_values_t = [5.0, 25.0, 55.0])]
    link: Vec<f64>,

    /// Microseconds until the disk answers
    #[arg(long, default_value_t = 100)]
    latency: u64,

    /// Rates are divided by this
    #[arg(long, default_value_t = 20.0)]
    slower: f64,

    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("overlap");
    let files = tempfile::tempdir()?;
    let mut file = File::create(files.path().join("f.safetensors"))?;
    write_sample(&mut file, options.size, 1)?;
    let right = XxHash3_64::oneshot(&std::fs::read(files.path().join("f.safetensors"))?);
    let fake = Fake::turn();
    fake.set("memory", 2 * options.size + (256 << 20));
    fake.set("idle", 1);
    for disk in &options.disk {
        let rate = disk * 1e9 / options.slower;
        let server = Server::start(files.path(), Duration::from_micros(options.latency), rate as u64, false)?;
        case((*disk, rate), &server.path().join("f.safetensors"), right, &fake, options, &mut report)?;
    }
    fake.set("idle", 0);
    Ok(report)
}

/// The rows of a disk.
fn case(
    (disk, rate): (f64, f64),
    path: &Path,
    right: u64,
    fake: &Fake,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let heap = Pool::new(AnonHeap::starting_at(PageKind::Transparent), 2 * options.size as usize);
    let mut device = OpenOptions::default().open(&format!("cuda:0,lib={}", fake.path()).parse()?)?;
    let model = HostModel::open([path], ModelOptions::default())?;
    let manifest = Manifest::of(&mut model.inputs(FileOptions::default())?, false, &mut |_| ControlFlow::Continue(()))?;
    let parts: Vec<Part> = model
        .tensors()
        .filter(|tensor| tensor.len > 0)
        .map(|tensor| Part { name: tensor.name.clone(), bytes: 0..tensor.len, to: tensor.at.bits() })
        .collect();
    let bytes: u64 = parts.iter().map(|part| part.bytes.end).sum();
    let place = device.memory_mut().reserve(options.size)?.first().into();
    let mut alone = Vec::new();
    let mut samples = vec![[Vec::new(), Vec::new()]; options.link.len()];
    for round in 0..=options.rounds {
        forget(path)?;
        let (took, hash) = raw(path, options.size, 16, &heap, true)?;
        if hash != right {
            return Err("the raw reads have other bytes".into());
        }
        if round > 0 {
            alone.push(took.as_secs_f64());
        }
        for (link, samples) in options.link.iter().zip(&mut samples) {
            fake.set("link", (link * 1e9 / options.slower) as u64);
            for (way, samples) in samples.iter_mut().enumerate() {
                forget(path)?;
                let copied = fake.copied();
                let begin = Instant::now();
                let options = ModelOptions { manifest: manifest.clone(), ..ModelOptions::default() };
                let model = HostModel::open([path], options)?;
                let took = if way == 0 {
                    model.read_parts_onto(&mut device, place, &parts, &mut |_| ControlFlow::Continue(()))?;
                    begin.elapsed()
                } else {
                    let loaded = model.load_onto(&mut device, &LoadOptions::default(), |_| {})?;
                    let took = begin.elapsed();
                    device.unload(loaded)?;
                    took
                };
                let copied = fake.copied() - copied;
                if copied < bytes {
                    return Err(format!("{copied} of {bytes} bytes were copied").into());
                }
                if round > 0 {
                    samples.push(took.as_secs_f64());
                }
            }
        }
    }
    let reads = report.row(&format!("disk {disk} GB/s"), "raw reads, 16 at a time", options.size, &alone);
    report.note(&format!("disk {disk} GB/s"), "raw reads / the modelled rate", options.size as f64 / rate / reads);
    for (link, samples) in options.link.iter().zip(&samples) {
        let case = format!("disk {disk} GB/s, link {link} GB/s");
        let slowest = reads.max(bytes as f64 / (link * 1e9 / options.slower));
        for (what, samples) in ["read onto the GPU, verified", "load, verified"].iter().zip(samples) {
            let ours = report.row(&case, what, options.size, samples);
            let name = format!("{case}: {what} / the slower of disk and link");
            report.of_rounds(samples.len()).at_least(&name, 0.95, slowest / ours);
        }
    }
    fake.set("link", 0);
    Ok(())
}
