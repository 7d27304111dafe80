//! Attaching to kept models of several sizes, beside loading the same file from the page cache.
//!
//! Each model has 200 tensors, whatever its size. The keeper is a thread of this process, over a socket as any other.
//! An attach ends with the tensors: their names, shapes and addresses. Rounds take the sizes and the load in turn. All
//! bytes are compared with the file in the first round.
//!
//! The same file then goes to devices, each time by a new client: from the kept memory, once more by that client, which
//! has registered it, and through staging buffers from the page cache. Beside it is the rate that the device has at
//! best: of a GPU, whose link is modelled, copies by its driver alone; of memory, one thread copying.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use dmalane::addr::Access;
use dmalane::device::{DriverCopy, Placement};
use dmalane::dma::Heap;
use dmalane::keep::{Keeper, KeeperConfig, Listener};
use dmalane::load::kept::{self, KeepOptions};
use dmalane::load::{DriveOptions, HostModel, HostTensor, Manifest, ModelOptions, OpenDevice, OpenFile};
use dmalane::queue::{Direction, Registered};
use dmalane::{DeviceSpec, FileOptions, OpenOptions};
use dmalane_fake_cuda::Fake;

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

    /// GB/s of the modelled links of a GPU
    #[arg(long, value_delimiter = ',', default_values_t = [12.0, 25.0])]
    links: Vec<f64>,
}

/// Tensors of each model.
const TENSORS: u64 = 200;
/// Attaches to each of them in a round.
const ATTACHES: usize = 5;

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

/// Attaches to a model and loads it onto a device from its memory, and then again; or loads the same `file` of the page
/// cache, twice. Without a manifest to compare with, nothing is hashed: the keeper's hash names the model.
fn load_onto(device: &mut OpenDevice, socket: &Path, name: &str, file: Option<&Path>, check: bool) -> Result<[f64; 2]> {
    let (mut begun, staged) = (Instant::now(), file.is_some());
    let file = match file {
        Some(path) => OpenFile::open(path)?,
        None => OpenFile::of(&kept::KeeperClient::connect(socket)?.attach(name)?.files()[0])?,
    };
    let mut inputs = [file.into_input(FileOptions::default())?];
    let mut took = [0.0; 2];
    for (n, took) in took.iter_mut().enumerate() {
        let loaded = device.load(&mut inputs, &Placement::Default, &mut |_| {})?;
        *took = begun.elapsed().as_secs_f64();
        if check {
            device.verify(&loaded, &mut inputs, &mut |_| {})?;
            // The comparison leaves staging buffers to the device.
            if n == 0 && (loaded.report.staging.0 > 0) != staged {
                return Err(format!("{name}: the way of its bytes is not the one that is measured").into());
            }
        }
        device.unload(loaded)?;
        begun = Instant::now();
    }
    Ok(took)
}

/// How long the driver of a GPU takes for as many bytes, by itself.
fn driver_alone(spec: &DeviceSpec, bytes: u64) -> Result<f64> {
    const PIECE: u64 = 16 << 20;
    let device = OpenOptions::default().device(spec)?;
    let (registrar, mut memory) = (device.registrar(), device.memory());
    let buffer = registrar.heap(None).allocate(PIECE as usize)?.share();
    let host = Registered::new(&*registrar, &buffer, Access::RW)?;
    let at = memory.allocate(PIECE, &Placement::Default)?.segments().next().ok_or("no memory")?.addr;
    let failed = |e: Box<dyn Error + Send + Sync>| -> Box<dyn Error> { e };
    let mut driver = device.driver_copies().map_err(failed)?.ok_or("no copies by its driver")?;
    let copy = DriverCopy { direction: Direction::FromHost, host, offset: 0, at, len: PIECE };
    let begun = Instant::now();
    driver.copy(&[copy], bytes.div_ceil(PIECE)).map_err(failed)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// The rows of loads onto devices.
fn onto_devices(options: &Options, socket: &Path, (mib, file): (u64, &Path), report: &mut Report) -> Result<()> {
    let (fake, name, bytes) = (Fake::turn(), mib.to_string(), mib << 20);
    fake.set("memory", bytes + (256 << 20));
    let memory = bytes + (64 << 20);
    let gpu = || format!("cuda:0,lib={}", fake.path());
    let mut devices = vec![(format!("ram:{memory}"), None), (format!("soft,ddr={memory}"), None)];
    devices.extend(options.links.iter().map(|link| (gpu(), Some(*link))));
    for (device, link) in devices {
        let spec: DeviceSpec = device.parse()?;
        let case = link.map_or_else(|| spec.kind().name.to_owned(), |link| format!("cuda, link {link} GB/s"));
        for (setting, value) in [("idle", 0), ("link", 0), ("delay", 20)] {
            fake.set(setting, value);
        }
        let mut drive = DriveOptions::default();
        drive.fill.checksum = false;
        let mut device = OpenOptions { drive, ..OpenOptions::default() }.open(&spec)?;
        let (mut ours, mut again, mut before, mut alone) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 0..=options.rounds {
            let [first, second] = load_onto(&mut device, socket, &name, None, round == 0)?;
            let [staged, _] = load_onto(&mut device, socket, &name, Some(file), round == 0)?;
            if round > 0 {
                ours.push(first);
                again.push(second);
                before.push(staged);
            }
            if let Some(link) = link {
                fake.set("idle", 1);
                // A stream of a GPU begins its next copy at once.
                fake.set("delay", 0);
                fake.set("link", (link * 1e9) as u64);
                alone.push(driver_alone(&spec, bytes)?);
            } else {
                let lent = kept::KeeperClient::connect(socket)?.attach(&name)?;
                let mut inputs = [OpenFile::of(&lent.files()[0])?.into_input(FileOptions::default())?];
                let rates = device.reference_rates(&mut inputs, &Manifest::default())?;
                alone.push(bytes as f64 / rates.copy);
            }
        }
        let ours = report.row(&case, "load, from the kept memory", bytes, &ours);
        let again = report.row(&case, "again, by the same client", bytes, &again);
        let before = report.row(&case, "load, through staging buffers", bytes, &before);
        let alone = report.row(&case, "the device at best", bytes, &alone);
        report.note(&case, "a client's first load / at best", alone / ours);
        report.of_rounds(options.rounds).at_least(&format!("{case}: later loads / at best"), 0.95, alone / again);
        report.note(&case, "through staging buffers / at best", alone / before);
    }
    Ok(())
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("keep");
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let (stop, stopped) = UnixStream::pair()?;
    let listener = Listener::bind(&socket, 0o600, true)?;
    let keeper = Keeper::new(KeeperConfig { memory: u64::MAX, ..KeeperConfig::default() }, |_| {});
    let keeper = std::thread::spawn(move || keeper.run(listener, stopped.as_fd()));
    let path = |mib: u64| folder.path().join(format!("{mib}.safetensors"));
    for mib in &options.sizes {
        write(&path(*mib), mib << 20)?;
        let options = KeepOptions { socket: Some(socket.clone()), ..KeepOptions::default() };
        kept::keep(None, [path(*mib)], &options, |_| ControlFlow::Continue(()))?;
    }
    let loaded = options.sizes.iter().copied().find(|mib| *mib >= 1024);
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); options.sizes.len()];
    let (mut loads, mut most_read) = (Vec::new(), 0);
    for round in 0..=options.rounds {
        // Each size comes first as often: the load has just emptied the processor's caches.
        for turn in 0..options.sizes.len() * ATTACHES {
            let n = (turn + round) % options.sizes.len();
            let (mib, samples) = (&options.sizes[n], &mut samples[n]);
            let before = read_so_far()?;
            let start = Instant::now();
            let (_model, lent) = attach(&socket, &mib.to_string())?;
            let took = start.elapsed().as_secs_f64();
            most_read = most_read.max(read_so_far()? - before);
            if round == 0 && turn < options.sizes.len() {
                let file = HostModel::open([path(*mib)], ModelOptions::default())?;
                for tensor in &lent {
                    let there = file.read(&tensor.tensor.name, &mut |_| ControlFlow::Continue(()))?;
                    if there.to_vec() != tensor.to_vec() {
                        return Err(format!("{} MiB: tensor {:?} differs", mib, tensor.tensor.name).into());
                    }
                }
            }
            if round > 0 {
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
    if let Some(mib) = loaded {
        onto_devices(options, &socket, (mib, &path(mib)), &mut report)?;
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
