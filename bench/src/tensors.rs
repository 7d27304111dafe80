//! Files of many small tensors: loaded, beside files of the same bytes in one tensor.
//!
//! The files are cached. Each load has a device of its own, from its opening to its end; rows take turns, round by
//! round. The checksums are compared, and the last load of each row is read back by the addresses of its tensors.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use dmalane::load::{LoadOptions, ModelOptions};
use dmalane::{HostModel, OpenOptions};
use twox_hash::XxHash3_64;

use crate::mt19937::Mt19937;
use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Tensors and bytes of each, in turn
    #[arg(long, value_delimiter = ',', default_values_t = [200_000, 1 << 10, 200_000, 1000, 1_000_000, 32])]
    shapes: Vec<u64>,

    /// Devices, with a space between two
    #[arg(long, value_delimiter = ' ', default_values_t = ["soft", "ram:2GiB"].map(String::from))]
    devices: Vec<String>,

    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("tensors");
    for shape in options.shapes.chunks_exact(2) {
        let folder = tempfile::tempdir()?;
        let (tensors, each) = (shape[0], shape[1]);
        let files = [("one", 1), ("many", tensors)].map(|(name, tensors)| {
            let path = folder.path().join(format!("{name}.safetensors"));
            write(&path, tensors, shape[0] * each / tensors).map(|()| path)
        });
        let [one, many] = files;
        let files = [one?, many?];
        let right = files.each_ref().map(fs::read).map(|bytes| bytes.map(|bytes| XxHash3_64::oneshot(&bytes)));
        let [one, many] = right;
        let right = [one?, many?];
        for device in &options.devices {
            let case = format!("{tensors} tensors of {each} bytes, {device}");
            let (mut samples, mut loads) = ([Vec::new(), Vec::new()], [Load::default(); 2]);
            for round in 0..=options.rounds {
                for row in 0..2 {
                    let load = Load::of(device, &files[row], round == options.rounds)?;
                    if load.checksum != right[row] {
                        return Err(format!("{case}: row {row} loaded other bytes").into());
                    }
                    loads[row] = load;
                    // The first round touches memory.
                    if round > 0 && round < options.rounds || options.rounds == 1 {
                        samples[row].push(load.seconds);
                    }
                }
            }
            let bytes = tensors * each;
            let one = report.row(&case, "floor: one tensor of these bytes", bytes, &samples[0]);
            let many = report.row(&case, "ours: many tensors", bytes, &samples[1]);
            let memory = loads[1].device_bytes as f64 / loads[0].device_bytes as f64;
            report.note(&case, "device memory: many / one", memory);
            report.note(&case, "ns of a tensor", (many - one) / tensors as f64 * 1e9);
            if each == 1 << 10 {
                report.at_most(&format!("{case}: device memory, many / one"), 1.3, memory);
                report.of_rounds(samples[0].len()).at_most(&format!("{case}: time, many / one"), 2.0, many / one);
            }
        }
    }
    Ok(report)
}

#[derive(Clone, Copy, Default)]
struct Load {
    seconds: f64,
    checksum: u64,
    device_bytes: u64,
}

impl Load {
    fn of(device: &str, path: &Path, verify: bool) -> Result<Self> {
        let begin = Instant::now();
        let mut device = OpenOptions::default().open(&device.parse()?)?;
        let model = HostModel::open([path], ModelOptions::default())?;
        let options = LoadOptions { verify, ..LoadOptions::default() };
        let loaded = model.load_onto(&mut device, &options, |_| {})?;
        let measured = begin.elapsed();
        let (checksum, device_bytes) = (loaded.files[0].checksum.unwrap_or(0), loaded.files[0].device_bytes());
        let end = Instant::now();
        drop((loaded, model, device));
        Ok(Self { seconds: (measured + end.elapsed()).as_secs_f64(), checksum, device_bytes })
    }
}

/// Writes a file of `tensors` tensors of `each` bytes.
fn write(path: &Path, tensors: u64, each: u64) -> Result<()> {
    let mut random = Mt19937::new(1);
    let mut header = String::from("{");
    for i in 0..tensors {
        let (comma, first) = (if i > 0 { "," } else { "" }, i * each);
        let end = first + each;
        header +=
            &format!(r#"{comma}"layers.{i}.weight":{{"dtype":"U8","shape":[{each}],"data_offsets":[{first},{end}]}}"#);
    }
    header.push('}');
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for _ in 0..(tensors * each).div_ceil(4) {
        file.write_all(&random.number().to_le_bytes())?;
    }
    Ok(file.flush()?)
}
