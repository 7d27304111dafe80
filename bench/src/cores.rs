//! Reads of a cached file by several workers, and what more processors would give.
//!
//! A queueing network says that, by mean value analysis (Reiser and Lavenberg, 1980): each worker copies chunks on a
//! processor of its own, and one at a time they do the rest, as if all of the engine's own work for a chunk were under
//! one lock; and hash, which is one stream a buffer; and memory is one for all. Times are measured with one worker, and
//! that of memory by plain reads of two threads; how two workers fare is compared.

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use dmalane::dma::{AnonHeap, PageKind, Pool};
use dmalane::{ReadOptions, alloc_and_read};
use twox_hash::XxHash3_64;

use crate::report::Report;
use crate::slow::{contents, hash_of, raw};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the file
    #[arg(long, default_value_t = 512 << 20)]
    size: u64,

    /// Rounds; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,

    /// GB/s that the memory takes in copies of all processors together, in the model
    #[arg(long, default_value_t = 200.0)]
    memory: f64,
}

/// Reads by so many workers, to be counted by strace.
#[derive(clap::Args)]
pub struct One {
    file: PathBuf,
    workers: usize,
    reads: usize,
}

const SMALL: u64 = 4 << 10;
const MIDDLE: u64 = 64 << 10;
const LARGE: u64 = 2 << 20;
const MODELLED: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Workers whose waits are counted.
const COUNTED: [usize; 4] = [1, 2, 4, 16];
const READS: usize = 8;

fn pool(size: u64) -> Pool {
    Pool::new(AnonHeap::starting_at(PageKind::Transparent), 2 * size as usize)
}

fn reads(workers: usize, chunk: u64, checksum: bool) -> ReadOptions {
    let mut options = ReadOptions { threads: Some(workers), ..ReadOptions::default() };
    (options.fill.chunk, options.fill.block, options.fill.checksum) = (chunk, chunk, checksum);
    // Who copies hashes: another thread would have no processor where all copy.
    options.fill.hash_thread = Some(false);
    options
}

/// Seconds for a chunk with each number of workers. `alone`: what each does beside the others; `turns`: what one does
/// at a time.
fn modelled(alone: f64, turns: &[f64]) -> impl Iterator<Item = (usize, f64)> + '_ {
    let mut waiting = vec![0.0; turns.len()];
    let mut next = move |workers: usize| {
        let stays: Vec<f64> = turns.iter().zip(&waiting).map(|(turn, queue)| turn * (1.0 + queue)).collect();
        let rate = workers as f64 / (alone + stays.iter().sum::<f64>());
        waiting = stays.iter().map(|stay| rate * stay).collect();
        1.0 / rate
    };
    (1..).map(move |workers| (workers, next(workers)))
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("cores");
    let folder = tempfile::tempdir()?;
    let (path, bytes) = (folder.path().join("f"), contents(options.size));
    std::fs::write(&path, &bytes)?;
    let right = XxHash3_64::oneshot(&bytes);
    drop(bytes);
    let heap = pool(options.size);
    let both = std::thread::available_parallelism().map_or(1, usize::from).min(2);
    let cases: Vec<(u64, bool, usize)> = [(SMALL, false), (MIDDLE, false), (LARGE, false), (LARGE, true)]
        .into_iter()
        .flat_map(|(chunk, checksum)| (1..=both).map(move |workers| (chunk, checksum, workers)))
        .collect();
    let (mut samples, mut plain) = (vec![Vec::new(); cases.len()], [Vec::new(), Vec::new()]);
    for round in 0..=options.rounds {
        for (threads, samples) in (1..).zip(&mut plain) {
            let (took, hash) = raw(&path, options.size, threads, &heap, false)?;
            if hash != right {
                return Err("a plain read has other bytes".into());
            }
            if round > 0 {
                samples.push(took.as_secs_f64());
            }
        }
        for ((chunk, checksum, workers), samples) in cases.iter().zip(&mut samples) {
            let begin = Instant::now();
            let read = alloc_and_read(&heap, &File::open(&path)?, .., &reads(*workers, *chunk, *checksum))?;
            let took = begin.elapsed().as_secs_f64();
            if read.buffer.checksum().is_some_and(|hash| hash != right) || hash_of(read.buffer.shared()) != right {
                return Err("a read has other bytes".into());
            }
            // The first round touches memory.
            if round > 0 {
                samples.push(took);
            }
        }
    }
    let kib = |chunk: u64| format!("{} KiB", chunk >> 10);
    let name = |chunk, checksum| format!("chunks of {}{}", kib(chunk), if checksum { ", checksum" } else { "" });
    let mut took = Vec::new();
    for ((chunk, checksum, workers), samples) in cases.iter().zip(&samples) {
        let variant = format!("ours: {workers} worker{}", if *workers > 1 { "s" } else { "" });
        took.push(report.row(&name(*chunk, *checksum), &variant, options.size, samples));
    }
    // Seconds for a chunk by one worker.
    let one = |chunk: u64, checksum: bool| {
        let case = cases.iter().position(|case| *case == (chunk, checksum, 1)).ok_or("no such case")?;
        Ok::<_, Box<dyn Error>>(took[case] * chunk as f64 / options.size as f64)
    };
    let chunks = options.size as f64 / LARGE as f64;
    let plain: Vec<f64> = (1..)
        .zip(&plain)
        .map(|(n, samples)| report.row("2 MiB", &format!("floor: plain reads by {n}"), options.size, samples) / chunks)
        .collect();
    // Two plain readers are as fast as they were if one at a time uses memory for so long.
    let memory = (plain[0] * (2.0 * plain[1] - plain[0]).max(0.0)).sqrt();
    // A chunk takes the engine's own time, and that of its bytes.
    let each = (one(LARGE, false)? - one(SMALL, false)?) / (LARGE - SMALL) as f64;
    let (engine, hash) = (one(SMALL, false)? - each * SMALL as f64, one(LARGE, true)? - one(LARGE, false)?);
    report.say(format!(
        "for a chunk: the engine's own work {:.2} us; 2 MiB copied {:.1} us, hashed {:.1} us",
        engine * 1e6,
        each * LARGE as f64 * 1e6,
        hash * 1e6
    ));
    for (chunk, checksum) in [(SMALL, false), (MIDDLE, false), (LARGE, false), (LARGE, true)] {
        let (case, hash) = (name(chunk, checksum), if checksum { hash } else { 0.0 });
        // Seconds for a chunk with each number of workers, where memory takes so long for 2 MiB.
        let all = |memory: f64| -> Result<Vec<(usize, f64)>> {
            let memory = memory * chunk as f64 / LARGE as f64;
            let alone = one(chunk, false)? - engine - memory;
            Ok(modelled(alone.max(0.0), &[engine, hash, memory]).take(64).collect())
        };
        if let Some(at) = cases.iter().position(|case| *case == (chunk, checksum, 2)) {
            let model = all(memory)?[1].1 * options.size as f64 / chunk as f64;
            let rounds = report.of_rounds(options.rounds);
            rounds.at_least(&format!("{case}: two workers / the model"), 0.9, model / took[at]);
        }
        if chunk == LARGE {
            let all = all(LARGE as f64 / options.memory / 1e9)?;
            for (workers, seconds) in all.into_iter().filter(|(workers, _)| MODELLED.contains(workers)) {
                report.row(&case, &format!("model: {workers} workers"), options.size, &[seconds * chunks]);
            }
        }
    }
    let copies = one(LARGE, false)?;
    let locked = modelled(copies - engine, &[engine]).nth(63).ok_or("64 workers")?.1;
    report.at_least("64 workers / 64 times one in the model, but for memory", 0.9, copies / locked / 64.0);
    waits(&path, options.size, &mut report)?;
    Ok(report)
}

/// Counts calls that wait for another thread or wake it, by strace where it is installed.
fn waits(path: &Path, size: u64, report: &mut Report) -> Result<()> {
    let mut counts = Vec::new();
    for workers in COUNTED {
        let log = tempfile::NamedTempFile::new()?;
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-e", "trace=futex", "-o"]).arg(log.path()).arg(std::env::current_exe()?);
        strace.arg("one-cores").arg(path).args([workers.to_string(), READS.to_string()]);
        match strace.status() {
            Err(_) => {
                report.say("no strace: waits are not counted".to_owned());
                return Ok(());
            }
            Ok(status) if !status.success() => return Err(format!("strace: {status}").into()),
            Ok(_) => {}
        }
        let gib = READS as f64 * size as f64 / (1u64 << 30) as f64;
        let count = std::fs::read_to_string(log.path())?.matches("futex(").count() as f64 / gib;
        report.note("futex calls for a GiB", &format!("{workers} workers"), count);
        counts.push(count / workers as f64);
    }
    let most = counts.iter().skip(1).copied().fold(0.0, f64::max);
    report.at_most_in("futex calls for a GiB and worker", 64.0, most, "calls");
    Ok(())
}

/// Reads, and does nothing else that waits.
pub fn one(options: &One) -> Result<()> {
    let size = std::fs::metadata(&options.file)?.len();
    let heap = pool(size);
    for _ in 0..options.reads {
        alloc_and_read(&heap, &File::open(&options.file)?, .., &reads(options.workers, LARGE, false))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_knows_its_limits() {
        // Without turns, as many times as fast; with nothing else, as fast as one.
        assert!(modelled(1.0, &[]).take(64).all(|(n, took)| (took * n as f64 - 1.0).abs() < 1e-9));
        assert!(modelled(0.0, &[0.5]).take(64).all(|(_, took)| (took - 0.5).abs() < 1e-9));
        // Machine repairman with two machines, equal times: 1 / (1 + 1.5) each.
        assert!((modelled(1.0, &[1.0]).nth(1).unwrap().1 - 1.25).abs() < 1e-9);
        // The slowest turn is the limit.
        assert!((modelled(10.0, &[1.0, 2.0]).nth(199).unwrap().1 - 2.0).abs() < 0.01);
    }
}
