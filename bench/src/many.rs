//! Models of many files: read and loaded, beside `cat`s of the same files, and threads that open, read and close them.
//!
//! The files are cached, or served by the late server, where each name, open and read takes its time. Rows take turns,
//! round by round; what was loaded is compared with the files.

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dmalane::device::RamDevice;
use dmalane::load::{LoadOptions, ModelOptions, ModelSet};
use dmalane::{HostModel, OpenDevice};
use twox_hash::XxHash3_64;

use crate::late::Server;
use crate::memory;
use crate::mt19937::Mt19937;
use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Files and bytes of each, in turn: cached
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 4 << 10, 1000, 1 << 20])]
    cached: Vec<usize>,

    /// Files and bytes of each, served late
    #[arg(long, value_delimiter = ',', default_values_t = [400, 4 << 10])]
    late: Vec<usize>,

    /// Milliseconds until a request of the late server is answered
    #[arg(long, default_value_t = 5.0)]
    latency: f64,

    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,
}

/// `cat`s that run at once, and share the files.
const CATS: [usize; 2] = [2, 64];
/// Threads of the raw readers.
const THREADS: [usize; 3] = [1, 2, 64];
/// The last of them keeps what it reads, in new memory.
const OTHERS: usize = CATS.len() + THREADS.len() + 1;

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("many");
    for shape in options.cached.chunks_exact(2) {
        let folder = tempfile::tempdir()?;
        let right = write(folder.path(), shape[0], shape[1])?;
        let case = format!("{} files of {} KiB, cached", shape[0], shape[1] >> 10);
        source(&case, shape, right, || Ok((folder.path().to_owned(), None)), options, &mut report)?;
    }
    for shape in options.late.chunks_exact(2) {
        let folder = tempfile::tempdir()?;
        let right = write(folder.path(), shape[0], shape[1])?;
        let case = format!("{} files of {} KiB, {} ms", shape[0], shape[1] >> 10, options.latency);
        // A new one each time: the kernel knows nothing of it.
        let served = || {
            let server = Server::start(folder.path(), Duration::from_secs_f64(options.latency / 1e3), 1 << 32, true)?;
            Ok((server.path().to_owned(), Some(server)))
        };
        source(&case, shape, right, served, options, &mut report)?;
    }
    Ok(report)
}

/// Writes a model of files of a tensor each, and returns the sums of the hashes of the files and of the tensors.
fn write(folder: &Path, files: usize, size: usize) -> Result<(u64, u64)> {
    let (mut random, mut sum) = (Mt19937::new(1), (0u64, 0u64));
    for i in 1..=files {
        let len = size - 128;
        let header = format!(r#"{{"t{i}":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
        let mut bytes = 120u64.to_le_bytes().to_vec();
        write!(bytes, "{header:<120}")?;
        bytes.extend((0..len.div_ceil(4)).flat_map(|_| random.number().to_le_bytes()).take(len));
        let hashes = [&bytes[..], &bytes[128..]].map(XxHash3_64::oneshot);
        sum = (sum.0.wrapping_add(hashes[0]), sum.1.wrapping_add(hashes[1]));
        fs::write(folder.join(format!("model-{i:05}-of-{files:05}.safetensors")), bytes)?;
    }
    Ok(sum)
}

/// The rows of a model, which `open` makes available anew.
fn source(
    case: &str,
    shape: &[usize],
    right: (u64, u64),
    open: impl Fn() -> Result<(PathBuf, Option<Server>)>,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let bytes = (shape[0] * shape[1]) as u64;
    let ram = RamDevice::new(bytes + (shape[0] as u64 + 2) * (16 << 10))?;
    let mut device = OpenDevice::new(Box::new(ram), Default::default())?;
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); OTHERS + 2];
    for round in 0..=options.rounds {
        for row in 0..samples.len() {
            let (folder, _server) = open()?;
            if row == OTHERS || row == OTHERS - 1 {
                // What is read goes to new memory.
                memory::find(bytes as usize * 5 / 4);
            }
            let begin = Instant::now();
            let (took, sum) = match row.checked_sub(OTHERS) {
                None => match row.checked_sub(CATS.len()) {
                    // It has no sum: what it writes is not read.
                    None => (cat(&folder, CATS[row])?, right.0),
                    Some(row) => raw(&folder, *THREADS.get(row).unwrap_or(&2), row == THREADS.len())?,
                },
                Some(0) => {
                    let model = HostModel::open([&folder], ModelOptions::default())?;
                    let tensors = model.read_all(None, &mut |_| std::ops::ControlFlow::Continue(()))?;
                    let took = begin.elapsed();
                    // As the other rows' sum where the bytes are those of the files.
                    let sums = tensors.iter().map(|tensor| XxHash3_64::oneshot(&tensor.to_vec()));
                    (took, sums.fold(0, u64::wrapping_add).wrapping_sub(right.1).wrapping_add(right.0))
                }
                Some(_) => {
                    let model = HostModel::open([&folder], ModelOptions::default())?;
                    let loaded = model.load_onto(&mut device, &LoadOptions::default(), |_| {})?;
                    let took = begin.elapsed();
                    let sums = loaded.files.iter().map(|file| file.checksum.unwrap_or(0));
                    let sum = sums.fold(0, u64::wrapping_add);
                    device.unload(loaded)?;
                    (took, sum)
                }
            };
            if sum != right.0 {
                return Err(format!("{case}: row {row} read other bytes").into());
            }
            // The first round touches memory.
            if round > 0 {
                samples[row].push(took.as_secs_f64());
            }
        }
    }
    let mut best = f64::INFINITY;
    for (cats, samples) in CATS.iter().zip(&samples) {
        best = best.min(report.row(case, &format!("cat, {cats} at once"), bytes, samples));
    }
    for (threads, samples) in THREADS.iter().zip(&samples[CATS.len()..]) {
        report.row(case, &format!("raw: open, read, close; {threads} threads"), bytes, samples);
    }
    let new = report.row(case, "raw: the same into new memory; 2 threads", bytes, &samples[OTHERS - 1]);
    for (what, samples) in ["read", "load"].iter().zip(&samples[OTHERS..]) {
        let ours = report.row(case, &format!("ours: {what}"), bytes, samples);
        report.of_rounds(samples.len()).at_most(&format!("{case}: {what} / the best cats"), 2.0, ours / best);
        if *what == "read" {
            report.of_rounds(samples.len()).at_most(&format!("{case}: read / the same memory"), 2.0, ours / new);
        }
    }
    Ok(())
}

/// Has all files of a folder read by as many `cat`s.
fn cat(folder: &Path, processes: usize) -> Result<Duration> {
    let begin = Instant::now();
    let files: Vec<PathBuf> = ModelSet::find(folder)?.files.into_iter().map(|file| file.path).collect();
    let cats = files
        .chunks(files.len().div_ceil(processes))
        .map(|files| Command::new("cat").args(files).stdout(Stdio::null()).spawn());
    for mut cat in cats.collect::<std::io::Result<Vec<_>>>()? {
        if !cat.wait()?.success() {
            return Err("cat failed".into());
        }
    }
    Ok(begin.elapsed())
}

/// Reads all files of a folder, each into memory that was touched before, or into new memory that is kept until all are
/// read; their hashes are summed up.
fn raw(folder: &Path, threads: usize, keeps: bool) -> Result<(Duration, u64)> {
    let begin = Instant::now();
    let files: Vec<PathBuf> = ModelSet::find(folder)?.files.into_iter().map(|file| file.path).collect();
    let next = AtomicUsize::new(0);
    let read = || -> std::io::Result<(u64, Vec<Vec<u8>>)> {
        let (mut bytes, mut kept, mut sum) = (Vec::new(), Vec::new(), 0u64);
        while let Some(path) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            bytes.clear();
            fs::File::open(path)?.read_to_end(&mut bytes)?;
            // As a load does.
            sum = sum.wrapping_add(XxHash3_64::oneshot(&bytes));
            if keeps {
                kept.push(std::mem::take(&mut bytes));
            }
        }
        Ok((sum, kept))
    };
    let sums = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<std::io::Result<Vec<_>>>()
    })?;
    Ok((begin.elapsed(), sums.into_iter().map(|(sum, _)| sum).fold(0, u64::wrapping_add)))
}
