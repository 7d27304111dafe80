//! Timelines of a run: which work was under way when, as a file for trace viewers and in the report.

mod trace;

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use dmalane::device::BackingFiles;
use dmalane::load::{Output, StageTimeline};

use crate::failure::Failure;
use crate::output;
use crate::report::{Machine, Page};

/// The options of commands that record a timeline.
#[derive(Args)]
pub struct TimelineOptions {
    /// Write a timeline of reads, copies and binds to this file, for ui.perfetto.dev or Chrome's about:tracing
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    pub trace: Option<PathBuf>,

    /// Write a page (HTML) with the timeline, the stages, the machine and the command
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(output::not_stdout))]
    pub report: Option<PathBuf>,
}

impl TimelineOptions {
    /// Whether a timeline is recorded.
    pub fn any(&self) -> bool {
        self.trace.is_some() || self.report.is_some()
    }

    /// The files that are written, which must be two.
    pub fn files(&self, replace: output::Replace) -> Result<Files, Failure> {
        let output = |path: &Option<PathBuf>| path.as_ref().map(|path| replace.output(path));
        let files = Files { trace: output(&self.trace), report: output(&self.report) };
        output::check_apart(files.each()).map(|()| files)
    }
}

/// The files that are written.
#[derive(Clone)]
pub struct Files {
    trace: Option<Output>,
    report: Option<Output>,
}

impl Files {
    /// A report alone.
    pub fn report(to: Option<Output>) -> Self {
        Self { trace: None, report: to }
    }

    /// Each of them with its option.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, &Output)> {
        [("--trace", &self.trace), ("--report", &self.report)].into_iter().filter_map(|(o, to)| Some((o, to.as_ref()?)))
    }

    /// Refuses what cannot be written.
    pub fn check(&self) -> Result<(), Failure> {
        for (to, what) in [(&self.trace, "cannot write the timeline"), (&self.report, "cannot write the report")] {
            to.iter().try_for_each(|to| to.check()).map_err(|e| output::refused(what, &e))?;
        }
        Ok(())
    }

    /// Each of them changed by `f`.
    pub fn map(self, f: impl Fn(Output) -> Output) -> Self {
        Self { trace: self.trace.map(&f), report: self.report.map(&f) }
    }

    /// Never in place of the files behind a device; refuses what cannot be written.
    pub fn excluding_device(self, device: Option<BackingFiles>) -> Result<Self, Failure> {
        let files = device.iter().flat_map(|files| [&files.written, &files.read]);
        let metas = files.map(|file| file.metadata()).collect::<Result<Vec<_>, _>>()?;
        let files = self.map(|to| metas.iter().fold(to, |to, meta| to.excluding(Path::new("device memory"), meta)));
        files.check().map(|()| files)
    }

    /// Writes them. `done` says what was done before, should that fail.
    pub fn write(&self, timeline: &StageTimeline, page: &Page<'_>, done: &str) -> Result<(), Failure> {
        if let Some(to) = &self.trace {
            let trace = trace::chrome(timeline, page.command, Machine::this().json())?;
            to.write(&trace).map_err(|e| output::refused(format!("cannot write the timeline ({done})"), &e))?;
        }
        self.write_report(page, done)
    }

    /// Writes the report.
    pub fn write_report(&self, page: &Page<'_>, done: &str) -> Result<(), Failure> {
        let Some(to) = &self.report else { return Ok(()) };
        let written = to.write(page.html(&Machine::this()).as_bytes());
        written.map_err(|e| output::refused(format!("cannot write the report ({done})"), &e))
    }
}
