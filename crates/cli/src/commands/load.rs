//! `dmalane load`: files into device memory.

mod report;
mod sample;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use dmalane::file::FileQueue;
use dmalane::load::{BadAlign, CONTAINERS, DriveOptions, Error, Input, Manifest, ModelSet, Select, TensorAlign};
use dmalane::queue::QueueChoice;
use dmalane::{DeviceSpec, HostModel, ModelOptions, OpenDevice, OpenFile, OpenOptions, Placement};

use crate::device::{self, Consent};
use crate::failure::Failure;
use crate::model;
use crate::output::{self, Outputs};
use crate::progress::Progress;
use crate::room;
use crate::runs::{self, MeasuredRuns, RunOptions};
use crate::size::Size;
use crate::source::{self, Copied};
use report::{Outcome, Run};

const EXAMPLES: &str = "\
Examples:
  dmalane load --sample 1GiB --verify -v
  dmalane load model.safetensors --verify --json
  dmalane load shard-*.safetensors --placement hbm -v
  dmalane load model.safetensors --repeat 5 --json
  dmalane load models/minilm --verify           all shards of a model
  dmalane load model.gguf --list
  dmalane load model.safetensors --tensors '*.bias' --verify
  dmalane load model.safetensors --dry-run --list
  dmalane load model.safetensors --manifest model.manifest     check while loading
  zcat model.safetensors.gz | dmalane load -
  dmalane load weights.bin --buffered --chunk 4MiB
  dmalane load model.safetensors --trace out.json --report out.html    what was done when
  dmalane load model.safetensors -d vfio:0000:01:00.0 --verify
  dmalane load model.safetensors -d vfio-user:/tmp/card   see dmalane card serve --help
  dmalane load model.safetensors --list           a line per tensor, with its device addresses:
    tensor           dtype  shape      bytes   device VA
    encoder.0.bias   F32    [384]       1536   0x100000000..0x100000600

These files are parsed: FORMATS.
Any other file is loaded as one run of bytes.
To keep tensors on a device, load from a program (Rust, C or Python); dmalane read --export hands a file in host \
memory to another process.
A directory, or a *.safetensors.index.json, stands for the files of the model.
Addresses are START..END, without END. Rates are in GB/s (10^9 bytes), sizes in GiB (2^30).

Exit status: 0 loaded (and verified), 1 bad file or mismatch, 2 usage error.";

/// Load files into device memory.
///
/// Parses model files and binds each tensor at its own device address. Loads any other file as one run of bytes.
/// Measures and checks: the device memory is freed when the command ends.
#[derive(Args)]
#[command(
    after_help = EXAMPLES.replace("FORMATS", &titles().join(", ")),
    group(ArgGroup::new("input").args(["files", "sample"]).required(true)),
    override_usage = "dmalane load [OPTIONS] <FILE>...\n       dmalane load [OPTIONS] --sample <SIZE>"
)]
pub(crate) struct Load {
    /// Files to load, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Make a safetensors file of this size, 4KiB or more, and load that
    #[arg(long, value_name = "SIZE", value_parser = sample::size, allow_hyphen_values = true)]
    #[arg(conflicts_with = "manifest")]
    sample: Option<Size>,

    #[arg(short, long, default_value = "soft", value_parser = device::NAME, hide_possible_values = true)]
    #[arg(env = "DMALANE_DEVICE", hide_env_values = true, help = device::help("The device to load to"))]
    device: DeviceSpec,

    /// List the header's metadata, and the tensors with their device addresses; --json always does
    #[arg(long)]
    list: bool,

    /// Load only tensors whose names match, such as '*.bias'; may be given several times
    ///
    /// In a pattern * stands for any characters, ? for one, `[ab]` for one of these. With --no-checksum and without
    /// --manifest, only these tensors are read of the files, else all bytes, to hash them.
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    tensors: Vec<glob::Pattern>,

    /// Print what would be loaded where, and load nothing
    #[arg(long, conflicts_with_all = ["verify", "manifest", "trace", "report", "repeat", "cold"])]
    dry_run: bool,

    /// Read every tensor back through the device's MMU and compare it with the file
    #[arg(long)]
    verify: bool,

    /// DMA channels to use: auto, one, or several like 0,1
    #[arg(long, value_name = "CHANNELS", default_value = "auto", help_heading = "Device")]
    mm_channel: QueueChoice,

    /// Device memory for the tensors, such as ddr, hbm or hbm-half [default: the first region]
    ///
    /// A region by its name; a group, such as hbm, to stripe over its regions; or hbm-half for one region of a group.
    #[arg(long, value_name = "REGION", default_value = "default", hide_default_value = true, help_heading = "Device")]
    placement: Placement,

    /// Start tensors at multiples of this, of at most 2 MiB [default: 64, or 256 on GPUs; 4 KiB from 16 KiB on]
    ///
    /// From 4 KiB on each tensor has pages of its own, so that a program that runs past its end faults.
    #[arg(long, value_name = "SIZE", value_parser = align, help_heading = "Device")]
    align: Option<TensorAlign>,

    #[command(flatten)]
    run: RunOptions,

    #[command(flatten, next_help_heading = "Device")]
    consent: Consent,
}

impl Load {
    /// Loads, and prints the result.
    pub fn run(mut self) -> Result<ExitCode, Failure> {
        let options = self.open_options();
        self.consent.check(&self.device)?;
        let named: Vec<PathBuf> = self.files.iter().chain(&self.run.manifest).cloned().collect();
        source::check(&named)?;
        let set = model::set(&self.files)?;
        self.files = set.files.iter().map(|file| file.path.clone()).collect();
        // A file that is read is named as such before anybody is told to use --force.
        let read = output::named_files(named.iter().chain(&self.files));
        let outputs = Outputs::new(self.run.replace, self.run.timeline.paths())?.excluding(&read)?;
        // Before the card is touched: a file that cannot be opened resets none. A sample must know how large the card
        // is.
        let mut copied = Copied::default();
        let files = match self.sample {
            None => Some(self.open_files(&set, &mut copied)?),
            Some(_) => None,
        };
        let mut device = device::open(&self.device, &options)?;
        let unknown = device.memory_mut().allocate(0, &self.placement).err();
        if let Some(unknown) = unknown {
            return Err(Failure::usage(format!("--placement {}: {unknown}", self.placement)));
        }
        let (mut inputs, odd) = match files {
            Some(files) => files,
            None => (self.make_sample(&mut device)?, Vec::new()),
        };
        let outputs = outputs.excluding(&output::device_files(device.backing_files())?)?;
        // The manifest too, and both before anything is asked of the device.
        let other = |e: Error| Failure::from(e).hint("name another file to read, or another device");
        read.iter().try_for_each(|(path, meta)| device.refuse_own(path, || Ok(meta.clone()))).map_err(other)?;
        if self.dry_run {
            return self.plan(&mut device, &inputs);
        }
        let manifest = model::manifest(self.run.manifest.as_deref())?;
        let (mut all, mut cold) = (Vec::new(), None);
        for _ in 1..self.run.repeat {
            self.run.drop_cached(inputs.iter().map(|input| &input.source), &mut cold)?;
            all.push(self.load_onto(&mut device, &mut inputs, &manifest)?);
            // A device may be open once.
            drop(device);
            device = device::open(&self.device, &options)?;
        }
        self.run.drop_cached(inputs.iter().map(|input| &input.source), &mut cold)?;
        all.push(self.load_onto(&mut device, &mut inputs, &manifest)?);
        let walls: Vec<_> = all.iter().map(|run| run.loaded.report.wall).collect();
        let run = all.swap_remove(runs::median(&walls));
        let runs = MeasuredRuns {
            command: "load",
            bytes: run.loaded.report.bytes,
            walls,
            cold,
            stages: report::stages(&run.loaded),
            copied,
            manifest: self.run.manifest.clone(),
        };
        let (spec, left_out) = (self.device.clone(), set.left_out);
        let mut outcome = Outcome { device: spec, inputs, left_out, odd, run, runs, references: None };
        let mut measured = Ok(());
        if self.run.format.verbose || self.run.timeline.report.is_some() {
            let bar = Progress::steps("measure references", self.run.format.shows_progress());
            for _ in 0..2 {
                bar.more_steps(1);
                bar.step("reading and copying alone".to_owned());
                let rates = device.reference_rates(&mut outcome.inputs, &manifest);
                let failed = |e| Failure::because("cannot measure the reference rates (the files are loaded)", &e);
                measured = rates.map(|rates| outcome.refer_to(rates)).map_err(failed);
                // A machine that was busy meanwhile gave less than it can.
                if measured.is_err() || !outcome.runs.exceeds_references() {
                    break;
                }
            }
            bar.finish();
        }
        // What was found out is told, whatever becomes of the files.
        let about = (&*outcome.device.to_string(), &*report::answer(&outcome), report::files(&outcome));
        let written = outcome.runs.write(&outputs, outcome.run.loaded.report.timeline.as_ref(), about);
        let text = || report::text(&outcome, self.run.format.verbose, self.list);
        let told = output::tell(self.run.format.json, || report::json(&outcome), text)?;
        measured.and(written).map(|()| told)
    }

    /// Prints what a load would do.
    fn plan(&self, device: &mut OpenDevice, inputs: &[Input<FileQueue>]) -> Result<ExitCode, Failure> {
        let placed = device.place_files(inputs, &self.placement);
        let placed = placed.map_err(|e| room::load_failure(&e))?;
        let (name, text) = (self.device.to_string(), |name: &str| report::plan_text(name, &placed, inputs, self.list));
        let told = output::tell(self.run.format.json, || report::plan_json(&name, &placed), || text(&name))?;
        device.unload(placed)?;
        Ok(told)
    }

    /// How the device is opened.
    fn open_options(&self) -> OpenOptions {
        OpenOptions {
            drive: DriveOptions {
                queues: self.mm_channel.clone(),
                align: self.align.unwrap_or_default(),
                fill: self.run.fill(DriveOptions::default().fill),
                ..DriveOptions::default()
            },
            ..self.consent.open_options()
        }
    }

    /// Loads onto a device, and writes the outputs.
    fn load_onto(
        &self,
        device: &mut OpenDevice,
        inputs: &mut [Input<FileQueue>],
        manifest: &Manifest,
    ) -> Result<Run, Failure> {
        let before = device.counters().touched;
        let bar = Progress::new("load", self.run.format.shows_progress());
        bar.set_length(match !self.run.hashes() && !self.tensors.is_empty() {
            // Nearly: the blocks around them are read too.
            true => inputs.iter().filter_map(|i| i.source.model().ok()).flat_map(|m| &m.tensors).map(|t| t.len).sum(),
            false => inputs.iter().filter_map(|i| i.source.model().ok()).fold(0, |sum, m| sum.saturating_add(m.len)),
        });
        let result = device.load_checked(inputs, &self.placement, manifest, &mut |n| bar.advance(n));
        let refused = |e| match model::differs("nothing was loaded", &e) {
            Some(failure) => failure,
            None => room::load_failure(&e),
        };
        let mut loaded = result.map_err(refused)?;
        bar.finish();
        let counters = device.counters();
        let iommu = counters.iommu;
        let touched = counters.touched.zip(before).map(|(now, then)| now.saturating_sub(then));
        if self.verify {
            let bar = Progress::new("verify", self.run.format.shows_progress());
            bar.set_length(loaded.report.bytes);
            let result = device.verify(&loaded, inputs, &mut |n| bar.advance(n));
            loaded.set_verified(result.map_err(|e| verify_failure(&e))?);
            bar.finish();
        }
        let heap_peak = device.heap().stats().peak as u64;
        Ok(Run {
            loaded,
            space: device.address_space().kind(),
            backing: device.staging_backing().cloned(),
            iommu,
            touched,
            heap_peak,
            notes: device.notes(),
        })
    }

    /// The files, without the tensors that `--tensors` does not name, and what is odd about them.
    fn open_files(&self, set: &ModelSet, copied: &mut Copied) -> Result<(Vec<Input<FileQueue>>, Vec<String>), Failure> {
        let files = model::open_all(&set.files, copied)?;
        // Before it is chosen by what is cached how they are read.
        self.run.drop_cached(&files, &mut None)?;
        let patterns = self.tensors.clone();
        let select: Select = Arc::new(move |name| patterns.iter().any(|pattern| pattern.matches(name)));
        let select = (!self.tensors.is_empty()).then_some(select);
        let options = ModelOptions { mode: self.run.mode.mode(), select, ..ModelOptions::default() };
        let model = HostModel::of_files(files, options).map_err(model::cannot_use)?;
        if model.files().is_empty() {
            let patterns: Vec<_> = self.tensors.iter().map(|pattern| pattern.as_str()).collect();
            let failure = Failure::new(format!("no tensor is called {}", patterns.join(" or ")));
            return Err(failure.hint("dmalane load FILE --dry-run --list shows the names"));
        }
        let mut inputs = model.inputs(self.run.mode.options()).map_err(model::cannot_use)?;
        if let Some(threads) = self.run.threads() {
            inputs.iter_mut().for_each(|input| input.more.truncate(threads - 1));
        }
        Ok((inputs, model.notes()))
    }

    /// The sample that was asked for, if it fits the card.
    fn make_sample(&self, device: &mut OpenDevice) -> Result<Vec<Input<FileQueue>>, Failure> {
        let size = self.sample.map_or(0, Size::bytes);
        room::check_sample(size, device, &self.device, &self.placement)?;
        let file = OpenFile::new(sample::NAME, sample::make(size, self.run.format.shows_progress())?);
        Ok(vec![file.into_input(self.run.mode.options()).map_err(model::failure)?])
    }
}

fn pattern(text: &str) -> Result<glob::Pattern, String> {
    glob::Pattern::new(text).map_err(|e| format!("{} at character {}", e.msg, e.pos + 1))
}

fn align(text: &str) -> Result<TensorAlign, String> {
    let size = text.parse::<Size>().map_err(|e| e.to_string())?;
    size.bytes().try_into().map_err(|e: BadAlign| e.to_string())
}

/// The kinds of files that have tensors: all but the last.
fn titles() -> Vec<&'static str> {
    CONTAINERS[..CONTAINERS.len() - 1].iter().map(|kind| kind.title).collect()
}

fn verify_failure(error: &Error) -> Failure {
    let failure = Failure::because("the verification failed", error);
    match error {
        Error::Mismatch { .. } => failure.hint("was the file changed meanwhile? If not, please report it"),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;
    use dmalane::file::Mode;

    fn load(line: &str) -> Result<Load, clap::Error> {
        let words = std::iter::once("load").chain(line.split_whitespace());
        let command = Load::augment_args(clap::Command::new("load"));
        Load::from_arg_matches(&command.try_get_matches_from(words)?)
    }

    #[test]
    fn defaults() {
        let load = load("a b").unwrap();
        assert_eq!((&load.files[..], load.sample), (&["a", "b"].map(PathBuf::from)[..], None));
        assert_eq!((load.device.to_string(), load.run.mode.mode()), ("soft".to_owned(), Mode::Auto));
        assert_eq!((&load.mm_channel, load.placement.clone()), (&QueueChoice::default(), Placement::Default));
        assert_eq!(load.open_options().drive.fill.chunk, 16 << 20);
        assert!(!(load.verify || load.consent.overwrite || load.list) && load.run.repeat == 1);
        let format = load.run.format;
        assert!(!(format.verbose || format.json || format.quiet));
    }

    #[test]
    fn every_option() {
        let load = load(
            "--sample 1.5GiB -d soft -v --verify --buffered --chunk 2MiB --mm-channel 1 --placement hbm-striped \
             --trace trace --json -q --list",
        )
        .unwrap();
        assert_eq!(load.sample.map(Size::bytes), Some(3 << 29));
        assert_eq!((load.run.mode.mode(), &load.mm_channel), (Mode::Buffered, &QueueChoice::only(1)));
        assert_eq!(load.open_options().drive.fill.chunk, 2 << 20);
        assert_eq!(load.placement, Placement::HBM);
        assert_eq!(load.run.timeline.trace, Some("trace".into()));
        assert!(load.verify && load.list);
        assert!(load.run.format.verbose && load.run.format.json && load.run.format.quiet);
    }

    #[test]
    fn direct_io_is_an_option() {
        assert_eq!(load("a --direct").unwrap().run.mode.mode(), Mode::Direct);
    }

    #[test]
    fn usage_errors() {
        for line in [
            "",
            "a --sample 1MB",
            "a --direct --buffered",
            "a --chunk 0",
            "a --mm-channel both",
            "a --placement -half",
            "a -d gpu0",
            "a -d file:",
            "--sample 0",
            "--sample 4095",
            "a --trace -",
            "a -d soft,ddr=257GiB",
            "a -d soft,hbm=274877906945",
            "a --repeat 0",
        ] {
            assert!(load(line).is_err(), "{line}");
        }
    }
}
