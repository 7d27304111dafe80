//! Traces of what was bound in device virtual memory: recorded, and replayed into a VM.
//!
//! A trace is text, one JSON object a line; `docs/formats/vm-trace.md` says which. Nothing in it is trusted. [`Lines`]
//! reads it without holding more than a line, [`Replay`] does in a VM what each line asks for, and [`Recorder`] writes
//! what was asked of a VM.
//!
//! ```
//! use dmalane_iopt::FormatId;
//! use dmalane_vm::trace::{Lines, Replay, TraceHeader};
//!
//! let text = r#"{"trace":"dmalane-vm","version":1,"format":"agx-uat"}
//! {"op":"bo","id":1,"segments":[{"pa":"0x100000000","len":"0x10000"}]}
//! {"op":"bind","va":"0x4000","bo":1,"offset":0,"len":"0x10000","access":"rw"}
//! {"op":"bind","va":"0x4000","bo":1,"offset":"0x4000","len":"0x10000","access":"rw"}
//! "#;
//! let mut lines = Lines::new(text.as_bytes());
//! let header = TraceHeader::read(&mut lines)?;
//! let mut replay = Replay::new(header.vm(FormatId::agx_uat)?);
//! let outcomes = replay.lines(lines).collect::<Result<Vec<_>, _>>()?;
//! let results: Vec<_> = outcomes.iter().map(|(_line, outcome)| outcome.name()).collect();
//! assert_eq!(results, ["ok", "ok", "beyond_bo"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod buffers;
mod error;
mod header;
mod limits;
mod lines;
mod number;
mod operation;
mod plain;
mod record;
mod replay;

pub use error::{TraceError, TraceRefusal};
pub use header::{FORMAT, TraceHeader};
pub use limits::{MAX_BATCH, MAX_BOS, MAX_LINE, MAX_SCATTERED, MAX_SEGMENTS, VERSION};
pub use lines::{Line, Lines};
pub use number::Number;
pub use operation::TraceOperation;
pub use plain::plain_json;
pub use record::Recorder;
pub use replay::{Done, Outcome, Replay, Timed, Times};
