//! Runs of `load` and `read`: their times, stages and outputs, as both tell them.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use dmalane::OpenFile;
use dmalane::dma::PageBacking;
use dmalane::file::residency;
use dmalane::load::fill::FillOptions;
use dmalane::load::{Stage, StageReport, StageTimeline};
use rustix::fs::Advice;
use serde_json::{Value, json};

use crate::commands::doctor::why_not;
use crate::failure::Failure;
use crate::layout::{Table, bottleneck, count, good, unbroken, wrap};
use crate::model::ReadMode;
use crate::output::{OutputFormat, Outputs, Replace};
use crate::progress;
use crate::report::{Page, RateBar, Section};
use crate::size::{Size, between, binary, duration, per_second, rate};
use crate::source::Copied;
use crate::timeline::{self, TimelineOptions};

/// The meaning of the stages' columns.
const MEANING: &str = "busy: time with work under way in the stage; stages overlap. wall: time in which a worker only \
                       worked on the stage or waited for it, summed over the workers. -: less than 1 MiB moved.";
/// The meaning of those about references.
const OF_REFERENCES: &str = " disturbed: the reference was exceeded by more than 20 %, so the machine was busy when it \
                             was measured.";

/// A reference that is exceeded by as much was measured while the machine did something else.
const DISTURBED: f64 = 1.2;

/// How much of a reference was reached, for people.
pub fn reached(got: f64, best: f64) -> String {
    if got > best * DISTURBED { "disturbed".to_owned() } else { format!("{:.0} %", got / best * 100.0) }
}

/// A rate over fewer bytes measures start-up time.
pub const LEAST: u64 = 1 << 20;

/// The options of commands that measure how files are read.
#[derive(Args)]
pub struct RunOptions {
    /// Compare the files with this manifest, which `dmalane manifest` makes
    #[arg(long, value_name = "FILE")]
    pub manifest: Option<PathBuf>,

    #[command(flatten)]
    pub format: OutputFormat,

    /// Do it N times, and report the run with the median time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// Drop the files from the page cache before each run, and print the average time
    #[arg(long, help_heading = "Reading")]
    cold: bool,

    #[command(flatten)]
    pub mode: ReadMode,

    /// Do not hash the data
    #[arg(long, help_heading = "Reading")]
    no_checksum: bool,

    /// Bytes allocated and read together, from 4KiB to 1GiB [default: 16MiB for load, 2MiB for read]
    #[arg(long, value_name = "SIZE", value_parser = between(Size::kib(4), Size::gib(1)), allow_hyphen_values = true)]
    #[arg(help_heading = "Reading")]
    chunk: Option<Size>,

    /// Reads in flight of each thread, 1 to 64 [default: as many as help]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "Reading")]
    iodepth: Option<u8>,

    /// Threads that read, at most: 1 to 64 [default: as many as help]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "Reading")]
    threads: Option<u8>,

    #[command(flatten, next_help_heading = "Outputs")]
    pub timeline: TimelineOptions,

    #[command(flatten)]
    pub replace: Replace,
}

impl RunOptions {
    /// Whether all bytes are hashed.
    pub fn hashes(&self) -> bool {
        !self.no_checksum || self.manifest.is_some()
    }

    /// With `--cold`, drops files from the page cache, and adds to `cold`.
    pub fn drop_cached<'a>(
        &self,
        files: impl IntoIterator<Item = &'a OpenFile>,
        cold: &mut Option<Cold>,
    ) -> Result<(), Failure> {
        if !self.cold {
            return Ok(());
        }
        let mut cached = 0u64;
        for file in files {
            let of = |open: &File| -> io::Result<u64> {
                // Pages that are dirty are not dropped.
                match open.sync_data() {
                    // A file system without writes.
                    Err(e) if !matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::ReadOnlyFilesystem) => {
                        return Err(e);
                    }
                    _ => {}
                }
                rustix::fs::fadvise(open, 0, None, Advice::DontNeed)?;
                Ok(residency(open, 0, open.metadata()?.len())?.cached)
            };
            let failed = |e| Failure::because(format!("cannot drop {} from the page cache", file.path.display()), &e);
            cached = cached.saturating_add(of(&*file.file()?).map_err(failed)?);
        }
        let before = cold.map_or(0, |cold| cold.cached);
        *cold = Some(Cold { cached: before.max(cached) });
        Ok(())
    }

    /// How memory is filled.
    pub fn fill(&self, default: FillOptions) -> FillOptions {
        let chunk = self.chunk.map_or(default.chunk, Size::bytes);
        let depth = self.iodepth.map(usize::from);
        FillOptions { chunk, depth, checksum: !self.no_checksum, timeline: self.timeline.any(), ..default }
    }

    /// Threads that read, at most.
    pub fn threads(&self) -> Option<usize> {
        self.threads.map(usize::from)
    }
}

/// Runs that each began with the files dropped from the page cache.
#[derive(Clone, Copy)]
pub struct Cold {
    /// Bytes that were cached all the same when a run began, at most.
    cached: u64,
}

/// The median run of some, and what was checked and written.
pub struct MeasuredRuns {
    /// "load" or "read".
    pub command: &'static str,
    /// Bytes read.
    pub bytes: u64,
    /// The time of each run, in order.
    pub walls: Vec<Duration>,
    /// The files were dropped from the page cache before each run.
    pub cold: Option<Cold>,
    /// The stages that took part, with the verification as the last.
    pub stages: Vec<MeasuredStage>,
    /// The copies that were made before the first run.
    pub copied: Copied,
    /// The manifest that the files were compared with.
    pub manifest: Option<PathBuf>,
}

/// A stage of the median run.
pub struct MeasuredStage {
    /// Its times and bytes.
    pub report: StageReport,
    /// Its share of the time, of allocating, reading and hashing that of the workers; verification follows it.
    pub share: Option<f64>,
    /// Bytes per second that the machine reached alone.
    pub reference: Option<f64>,
}

/// The number of the run in the middle; of an even number, the faster of the two. There must be one.
pub fn median(walls: &[Duration]) -> usize {
    sorted(walls)[(walls.len() - 1) / 2]
}

fn sorted(walls: &[Duration]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..walls.len()).collect();
    order.sort_by_key(|run| walls[*run]);
    order
}

impl MeasuredStage {
    /// A stage of a run: the time that this took, and its workers, over which the times of what they do at once are
    /// summed.
    pub fn new(report: StageReport, (wall, workers): (Duration, usize)) -> Self {
        let at_once =
            if matches!(report.stage, Stage::Allocate | Stage::Read | Stage::Checksum) { workers.max(1) } else { 1 };
        let share = report.wall.as_secs_f64() / (wall.as_secs_f64() * at_once as f64);
        let share = Some(share).filter(|share| report.stage != Stage::Verify && share.is_finite());
        Self { report, share, reference: None }
    }

    /// Bytes per second, where it moved any to speak of.
    pub fn rate(&self) -> Option<f64> {
        let StageReport { stage, busy, bytes, .. } = self.report;
        let moves = !matches!(stage, Stage::Parse | Stage::Register | Stage::Map | Stage::Bind);
        (moves && bytes >= LEAST && !busy.is_zero()).then(|| bytes as f64 / busy.as_secs_f64())
    }

    fn json(&self) -> Value {
        json!({
            "stage": self.report.stage.to_string(),
            "busy_s": self.report.busy.as_secs_f64(),
            "wall_s": self.report.wall.as_secs_f64(),
            "share": self.share,
            "bytes": self.report.bytes,
            "in_flight": self.report.in_flight,
            "bytes_per_s": self.rate(),
            "reference_bytes_per_s": self.reference,
        })
    }

    fn bar(&self) -> Option<RateBar> {
        let StageReport { stage, .. } = self.report;
        let name = (stage != Stage::Allocate).then(|| stage.to_string())?;
        Some(RateBar { name, colour: stage as usize, got: self.rate()?, reference: self.reference })
    }
}

impl MeasuredRuns {
    /// The time of the median run.
    pub fn wall(&self) -> Duration {
        self.walls[median(&self.walls)]
    }

    /// The mean of all runs.
    fn average(&self) -> Duration {
        self.walls.iter().sum::<Duration>() / u32::try_from(self.walls.len()).unwrap_or(u32::MAX).max(1)
    }

    /// The object that `--json` prints, with the command's `own` fields, described in `docs/formats/json.md`.
    pub fn json(&self, own: Value) -> Value {
        let (order, seconds) = (sorted(&self.walls), |run: usize| self.walls[run].as_secs_f64());
        let wall = self.wall().as_secs_f64();
        let mut all = json!({
            "schema": 5,
            "command": self.command,
            "wall_s": wall,
            "bytes_per_s": if wall > 0.0 { self.bytes as f64 / wall } else { 0.0 },
            "copied_first_bytes": self.copied.bytes,
            "copied_first_s": self.copied.time.as_secs_f64(),
            "manifest": self.manifest.as_ref().map(|path| path.to_string_lossy()),
            "bottleneck": self.bottleneck().map(|(stage, _)| stage),
            "runs_s": self.walls.iter().map(Duration::as_secs_f64).collect::<Value>(),
            "median_s": wall,
            "fastest_s": seconds(order[0]),
            "slowest_s": seconds(order[order.len() - 1]),
            "average_s": self.average().as_secs_f64(),
            "cold_cached_bytes": self.cold.map(|cold| cold.cached),
            "stages": self.stages.iter().map(MeasuredStage::json).collect::<Value>(),
        });
        if let (Value::Object(all), Value::Object(own)) = (&mut all, own) {
            all.extend(own);
        }
        all
    }

    fn bottleneck(&self) -> Option<(String, f64)> {
        bottleneck(self.stages.iter().filter_map(|s| Some((s.report.stage, s.share?))))
    }

    /// The line that names the bottleneck, and `what` with time and rate, without a line end.
    pub fn answer(&self, what: &str) -> (String, String) {
        let line = |(stage, share)| format!("Bottleneck: {stage} ({:.0} % of wall time)\n", share * 100.0);
        let (took, rate) = (duration(self.wall()), rate(self.bytes, self.wall()));
        (self.bottleneck().map_or(String::new(), line), format!("{what} in {took}: {rate}"))
    }

    /// The answer, what was checked, and the stages, for people.
    pub fn text(&self, what: &str) -> String {
        let (bottleneck, answer) = self.answer(what);
        let mut out = bottleneck + &answer;
        if self.stages.iter().any(|stage| stage.report.stage == Stage::Verify) {
            out += &format!(", {}", good("verified"));
        }
        if self.manifest.is_some() {
            out += &format!(", {}", good("as in the manifest"));
        }
        out.push('\n');
        if let n @ 2.. = self.walls.len() {
            let order = sorted(&self.walls);
            let [fastest, slowest] = [order[0], order[n - 1]].map(|run| duration(self.walls[run]));
            let median = duration(self.wall());
            out += &format!("Median of {n} runs: {median}; fastest {fastest}, slowest {slowest}\n");
        }
        if let Some(Cold { cached }) = self.cold {
            let (average, n) = (thousands(self.average().as_nanos()), count(self.walls.len(), "cold run"));
            let stayed = match cached {
                0 => String::new(),
                n => format!("; {} stayed in the page cache", binary(n)),
            };
            out += &format!("Average of {n}: {average} ns{stayed}\n");
        }
        out + &self.copied.text() + "\n" + &self.table().text() + "\n"
    }

    /// The stages.
    fn table(&self) -> Table {
        let head = ["stage", "busy ms", "wall ms", "of wall", "size", "rate", "reference", "reached"];
        let mut table = Table::new("lrrrrrrr", head);
        let none = || "-".to_owned();
        // A short run has more digits.
        let digits = if self.wall() < Duration::from_millis(10) { 3 } else { 1 };
        let ms = |time: Duration| format!("{:.digits$}", time.as_secs_f64() * 1e3);
        for s in &self.stages {
            let of_reference = s.rate().zip(s.reference);
            table.row([
                s.report.stage.to_string(),
                ms(s.report.busy),
                ms(s.report.wall),
                s.share.map_or_else(none, |share| format!("{:.1} %", share * 100.0)),
                binary(s.report.bytes),
                s.rate().map_or_else(none, per_second),
                of_reference.map_or(String::new(), |(_, best)| per_second(best)),
                of_reference.map_or(String::new(), |(got, best)| reached(got, best)),
            ]);
        }
        table
    }

    /// Whether a stage was so much faster than its reference that the reference was [disturbed](reached).
    pub fn exceeds_references(&self) -> bool {
        self.stages.iter().filter_map(|s| s.rate().zip(s.reference)).any(|(got, best)| got > best * DISTURBED)
    }

    /// The meaning of the stages' columns, and where the time of the whole command went, for `--verbose`.
    pub fn meaning(&self) -> String {
        let reads = self.stages.iter().find(|s| s.report.stage == Stage::Read).map_or(0, |s| s.report.in_flight);
        let referred = self.stages.iter().any(|s| s.reference.is_some());
        let references = if referred { OF_REFERENCES } else { "" };
        let meaning = format!("{MEANING}{references} Reads in flight at once, at most: {reads}.");
        format!("\n{}{}", wrap(&meaning, 0), progress::whole_time())
    }

    /// Writes the timeline and the page, if they were asked for.
    pub fn write(
        &self,
        outputs: &Outputs,
        timeline: Option<&StageTimeline>,
        (device, what, files): (&str, &str, Table),
    ) -> Result<(), Failure> {
        let Some(timeline) = timeline else { return Ok(()) };
        let (explanation, answer) = self.answer(what);
        let note =
            "Measured rates above references: what this machine reached in the same run when it did nothing else.";
        let page = Page {
            command: &format!("dmalane {}", self.command),
            device,
            answer: (answer, explanation),
            sections: vec![
                Section::Timeline(timeline, self.wall()),
                Section::Bars(self.stages.iter().filter_map(MeasuredStage::bar).collect(), note.to_owned()),
                Section::Table("Stages", self.table(), MEANING),
                Section::Table("Files", files, ""),
            ],
        };
        timeline::write(outputs, timeline, &page, &format!(" (after the {})", self.command))
    }
}

/// A number with commas, as in 1,520,790,492.
fn thousands(n: u128) -> String {
    let text = n.to_string();
    let from_end = |(i, digit): (usize, char)| {
        let comma = if i > 0 && (text.len() - i).is_multiple_of(3) { "," } else { "" };
        format!("{comma}{digit}")
    };
    text.chars().enumerate().map(from_end).collect()
}

/// A detail of `--verbose`, with its label.
pub fn detail(label: &str, text: &str) -> String {
    wrap(&format!("{label:<10} {text}"), 11)
}

/// The pages behind memory of `bytes` bytes, and why not better ones.
pub fn pages(backing: Option<&PageBacking>, bytes: u64) -> String {
    let Some(backing) = backing else { return String::new() };
    let passed_over = backing.passed_over.iter();
    let others = passed_over.map(|pages| detail("", &format!("not {}", why_not(pages, bytes, unbroken))));
    detail("pages", &backing.kind.to_string()) + &others.collect::<String>()
}

/// The same as JSON: the pages, and why not better ones.
pub fn pages_json(backing: Option<&PageBacking>, bytes: u64) -> (Option<String>, Value) {
    let passed_over = backing.iter().flat_map(|backing| &backing.passed_over);
    let others = passed_over.map(|pages| why_not(pages, bytes, str::to_owned));
    (backing.map(|backing| backing.kind.to_string()), others.collect())
}
