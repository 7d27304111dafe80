//! A timeline in the Trace Event Format, which Perfetto and Chrome's `about:tracing` open.
//!
//! Format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use std::time::Duration;

use dmalane::load::{StageSpan, StageTimeline};
use serde_json::{Value, json};

use crate::failure::Failure;

/// The timeline of a command as JSON. `about` says how it was called, and where.
pub fn chrome(timeline: &StageTimeline, command: &str, about: Value) -> Result<Vec<u8>, Failure> {
    // The name or the place of a row.
    let metadata =
        |name: &str, tid: usize, args: Value| json!({ "ph": "M", "name": name, "pid": 1, "tid": tid, "args": args });
    let mut events = vec![metadata("process_name", 0, json!({ "name": command }))];
    let mut tid = 0;
    for track in &timeline.tracks {
        for (i, row) in track.rows().into_iter().enumerate() {
            tid += 1;
            // A thread of the format shows spans that overlap as calls of each other, so each row is a thread.
            let name = if i == 0 { track.name.clone() } else { format!("{} ({})", track.name, i + 1) };
            events.push(metadata("thread_name", tid, json!({ "name": name })));
            events.push(metadata("thread_sort_index", tid, json!({ "sort_index": tid })));
            events.extend(row.iter().map(|span| complete(span, tid)));
        }
    }
    let mut trace = json!({ "displayTimeUnit": "ms", "otherData": about });
    trace["traceEvents"] = Value::Array(events);
    Ok(serde_json::to_vec(&trace)?)
}

/// A span; times are in microseconds.
fn complete(span: &StageSpan, tid: usize) -> Value {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    json!({
        "ph": "X",
        "name": span.stage.to_string(),
        "cat": "stage",
        "pid": 1,
        "tid": tid,
        "ts": us(span.start),
        "dur": us(span.end.saturating_sub(span.start)),
        "args": { "bytes": span.bytes, "count": span.count },
    })
}
