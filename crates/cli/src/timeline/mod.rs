//! Timelines of a run: which work was under way when, as a file for trace viewers and in the report.

mod trace;

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use dmalane::load::StageTimeline;

use crate::failure::Failure;
use crate::output::{self, Outputs};
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

    /// The files that are written, each with its option.
    pub fn paths(&self) -> [(&'static str, Option<&PathBuf>); 2] {
        [("--trace", self.trace.as_ref()), ("--report", self.report.as_ref())]
    }
}

/// Writes the timeline and the page, where they were asked for. `done` says what was done before, should that fail.
pub fn write(outputs: &Outputs, timeline: &StageTimeline, page: &Page<'_>, done: &str) -> Result<(), Failure> {
    outputs.write("--trace", done, || trace::chrome(timeline, page.command, Machine::this().json()))?;
    page.write(outputs, done)
}
