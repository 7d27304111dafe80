//! Attaching to kept models of several sizes, beside loading the same file from the page cache.
//!
//! Each model has 200 tensors, whatever its size. The keeper is a thread of this process, over a socket as any other.
//! An attach ends with the tensors: their names, shapes and addresses. Rounds take the sizes and the load in turn. All
//! bytes are compared with the file in the first round.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use dmalane::keep::{Keeper, KeeperConfig, Listener};
use dmalane::load::kept::{self, KeepOptions};
use dmalane::load::{HostModel, HostTensor, ModelOptions, OpenFile};

use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Rounds; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,

    /// Sizes of models, in MiB; the first one of at least 1 GiB is loaded, too
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1024, 6144])]
    sizes: Vec<u64>,
}

/// Tensors of each model.
const TENSORS: u64 = 200;

/// Bytes that this process has read by system calls.
fn read_so_far() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/io")?;
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: ")).ok_or("no rchar")?;
    Ok(line.parse()?)
}

/// Writes a model of a number of tensors that is the same for all sizes.
fn write(path: &Path, bytes: u64) -> Result<()> {
    let each = bytes / TENSORS / 4 * 4;
    let mut header = String::from("{");
    for n in 0..TENSORS {
        let comma = if n == 0 { "" } else { "," };
        let (start, end) = (n * each, (n + 1) * each);
        header += &format!(
            r#"{comma}"layers.{n}.weight":{{"dtype":"F32","shape":[{}],"data_offsets":[{start},{end}]}}"#,
            each / 4
        );
    }
    header += "}";
    while header.len() % 8 > 0 {
        header.push(' ');
    }
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = bytes | 1;
    for _ in 0..TENSORS * each / 4 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        file.write_all(&((state >> 32) as u32).to_le_bytes())?;
    }
    Ok(file.flush()?)
}

fn tensors(model: &HostModel) -> Result<Vec<HostTensor>> {
    Ok(model.read_all(None, &mut |_| ControlFlow::Continue(()))?)
}

fn attach(socket: &Path, name: &str) -> Result<(HostModel, Vec<HostTensor>)> {
    let lent = kept::KeeperClient::connect(socket)?.attach(name)?;
    let files = lent.files().iter().map(OpenFile::of).collect::<std::result::Result<Vec<_>, _>>()?;
    let model = HostModel::of_files(files, ModelOptions::default())?;
    let tensors = tensors(&model)?;
    Ok((model, tensors))
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("keep");
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let (stop, stopped) = UnixStream::pair()?;
    let listener = Listener::bind_with(&socket, 0o600, true)?;
    let keeper = Keeper::new(KeeperConfig { memory: u64::MAX, ..KeeperConfig::default() }, |_| {});
    let keeper = std::thread::spawn(move || keeper.run(listener, stopped.as_fd()));
    let path = |mib: u64| folder.path().join(format!("{mib}.safetensors"));
    for mib in &options.sizes {
        write(&path(*mib), mib << 20)?;
        let options = KeepOptions { socket: Some(socket.clone()), ..KeepOptions::default() };
        kept::keep([path(*mib)], &options, |_| ControlFlow::Continue(()))?;
    }
    let loaded = options.sizes.iter().copied().find(|mib| *mib >= 1024);
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); options.sizes.len()];
    let (mut loads, mut most_read) = (Vec::new(), 0);
    for round in 0..=options.rounds {
        // Each size comes first as often: the load has just emptied the processor's caches.
        for n in 0..options.sizes.len() {
            let n = (n + round) % options.sizes.len();
            let (mib, samples) = (&options.sizes[n], &mut samples[n]);
            let before = read_so_far()?;
            let start = Instant::now();
            let (_model, lent) = attach(&socket, &mib.to_string())?;
            let took = start.elapsed().as_secs_f64();
            most_read = most_read.max(read_so_far()? - before);
            if round == 0 {
                let file = HostModel::open([path(*mib)], ModelOptions::default())?;
                for tensor in &lent {
                    let there = file.read(&tensor.tensor.name, &mut |_| ControlFlow::Continue(()))?;
                    if there.to_vec() != tensor.to_vec() {
                        return Err(format!("{} MiB: tensor {:?} differs", mib, tensor.tensor.name).into());
                    }
                }
            } else {
                samples.push(took);
            }
        }
        if let Some(mib) = loaded {
            let start = Instant::now();
            let model = HostModel::open([path(mib)], ModelOptions::default())?;
            let all = tensors(&model)?;
            let took = start.elapsed().as_secs_f64();
            drop(all);
            if round > 0 {
                loads.push(took);
            }
        }
    }
    drop(stop);
    keeper.join().map_err(|_| "the keeper panicked")??;
    let median = |samples: &[f64]| {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    for (mib, samples) in options.sizes.iter().zip(&samples) {
        report.row(&format!("{mib} MiB"), "attach", mib << 20, samples);
    }
    let medians: Vec<f64> = samples.iter().map(|samples| median(samples)).collect();
    let (least, most) = medians.iter().fold((f64::MAX, 0.0), |(a, b), m| (m.min(a), m.max(b)));
    report.at_most("the slowest size / the fastest", 1.5, most / least);
    report.at_most("the slowest size, ms", 10.0, most * 1e3);
    if let Some(mib) = loaded {
        report.row(&format!("{mib} MiB"), "load from the page cache", mib << 20, &loads);
        let of = options.sizes.iter().position(|size| *size == mib).map_or(0.0, |at| medians[at]);
        report.at_least(&format!("{mib} MiB: load / attach"), 30.0, median(&loads) / of);
    }
    // Headers and the description; the bytes of tensors are not read.
    report.note("all", "bytes read by an attach, at most", most_read as f64);
    Ok(report)
}
