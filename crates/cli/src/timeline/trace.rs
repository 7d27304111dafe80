//! A timeline in the Trace Event Format, which Perfetto and Chrome's `about:tracing` open.
//!
//! Format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use std::time::Duration;

use dmalane::load::{StageSpan, StageTimeline};
use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::Failure;

/// The whole file.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    display_time_unit: &'static str,
    other_data: Value,
    trace_events: Vec<Event<'a>>,
}

/// An event of one of the two kinds that are used.
#[derive(Serialize)]
#[serde(untagged)]
enum Event<'a> {
    /// A span.
    Complete {
        ph: &'static str,
        name: String,
        cat: &'static str,
        pid: u32,
        tid: usize,
        /// In microseconds.
        ts: f64,
        dur: f64,
        args: Args,
    },
    /// The name or the place of a row.
    Metadata { ph: &'static str, name: &'a str, pid: u32, tid: usize, args: Value },
}

#[derive(Serialize)]
struct Args {
    bytes: u64,
    count: u64,
}

/// The timeline of a command as JSON. `about` says how it was called, and where.
pub fn chrome(timeline: &StageTimeline, command: &str, about: Value) -> Result<Vec<u8>, Failure> {
    let process = json!({"name": command});
    let mut trace_events = vec![Event::Metadata { ph: "M", name: "process_name", pid: 1, tid: 0, args: process }];
    let mut tid = 0;
    for track in &timeline.tracks {
        for (i, row) in track.rows().into_iter().enumerate() {
            tid += 1;
            // A thread of the format shows spans that overlap as calls of each other, so each row is a thread.
            let name = if i == 0 { track.name.clone() } else { format!("{} ({})", track.name, i + 1) };
            for (key, args) in
                [("thread_name", json!({"name": name})), ("thread_sort_index", json!({"sort_index": tid}))]
            {
                trace_events.push(Event::Metadata { ph: "M", name: key, pid: 1, tid, args });
            }
            trace_events.extend(row.iter().map(|work| complete(work, tid)));
        }
    }
    Ok(serde_json::to_vec(&Trace { display_time_unit: "ms", other_data: about, trace_events })?)
}

fn complete(work: &StageSpan, tid: usize) -> Event<'static> {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Event::Complete {
        ph: "X",
        name: work.stage.to_string(),
        cat: "stage",
        pid: 1,
        tid,
        ts: us(work.start),
        dur: us(work.end.saturating_sub(work.start)),
        args: Args { bytes: work.bytes, count: work.count },
    }
}
