//! The output of `dmalane vm`, line by line: a trace may be longer than memory.

use std::io::{self, BufWriter, Stdout, Write};
use std::ops::ControlFlow;

use dmalane::error_chain;
use dmalane::iopt::FormatId;
use dmalane::vm::trace::{Number, Outcome, Replay, Timed, Times};
use dmalane::vm::{AnyVm, Mapped, MappedSource};
use serde::Serialize;
use serde_json::{Value, json};

use crate::layout::{count, fit_to, limit, plain};
use crate::size;

/// Writes the report; `finish` returns the first error of writing.
pub struct ReplayReport {
    out: BufWriter<Stdout>,
    json: bool,
    /// Columns of a line of text.
    columns: Option<usize>,
    /// The next element of a list is its first.
    first: bool,
    result: io::Result<()>,
}

/// Times as JSON has them.
fn times_json(times: &Times) -> Value {
    let timed = |timed: &Timed| {
        let (ns_per_operation, mops) = each_of(timed).unzip();
        let ns = u64::try_from(timed.took.as_nanos()).unwrap_or(u64::MAX);
        json!({ "operations": timed.operations, "ns": ns, "ns_per_operation": ns_per_operation, "mops": mops })
    };
    json!({
        "first_bind": timed(&times.first_bind),
        "other_binds": timed(&times.other_binds),
        "unbinds": timed(&times.unbinds),
        "others": timed(&times.others),
    })
}

/// Times as text: a line for each kind of operation.
pub fn times_text(times: &Times) -> String {
    let mut out = format!(" first bind: {}ns\n", times.first_bind.took.as_nanos());
    for (what, each, timed) in [
        ("other binds", "bind", &times.other_binds),
        ("unbinds", "unbind", &times.unbinds),
        ("others", "operation", &times.others),
    ] {
        if let Some((ns, rate)) = each_of(timed) {
            out += &format!(" {what}: {}ns per {each}: {ns:.1}ns {rate:.6}Mop/s\n", timed.took.as_nanos());
        }
    }
    out
}

/// Nanoseconds for each operation, and million operations in a second; none where there were none.
fn each_of(timed: &Timed) -> Option<(f64, f64)> {
    let ns = timed.took.as_secs_f64() * 1e9 / timed.operations as f64;
    (timed.operations > 0 && ns > 0.0).then_some((ns, 1e3 / ns))
}

impl ReplayReport {
    /// Begins the report.
    pub fn new(trace: &str, format: FormatId, vm: &dyn AnyVm, json: bool) -> Self {
        let columns = limit().filter(|_| !json);
        let mut report = Self { out: BufWriter::new(io::stdout()), json, columns, first: true, result: Ok(()) };
        if json {
            let range = json!({ "va": Number(vm.range().first().bits()), "len": vm.range().len() });
            let head = json!({
                "schema": 1,
                "command": "vm replay",
                "trace": trace,
                "format": format.name(),
                "range": range,
            });
            // Its end follows the results.
            let text = head.to_string();
            report.write(|out| write!(out, "{},\"results\":[", text.strip_suffix('}').unwrap_or(&text)));
        }
        report
    }

    /// Writes whole lines, or parts of JSON.
    fn write(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.result.is_err() {
            return;
        }
        self.result = match self.columns {
            None => write(&mut self.out),
            Some(columns) => {
                let mut lines = Vec::new();
                let written = write(&mut lines);
                written.and_then(|()| self.out.write_all(fit_to(&String::from_utf8_lossy(&lines), columns).as_bytes()))
            }
        };
    }

    /// An element of the list that is being written.
    fn element(&mut self, element: &impl Serialize) {
        let comma = if self.first { "" } else { "," };
        self.first = false;
        self.write(|out| {
            write!(out, "{comma}\n  ")?;
            Ok(serde_json::to_writer(out, element)?)
        });
    }

    /// The result of a line.
    pub fn outcome(&mut self, line: u64, outcome: &Outcome) {
        let message = outcome.result.as_ref().err().map(|refusal| error_chain(refusal));
        let errno = outcome.result.as_ref().err().map(|refusal| refusal.errno().name());
        if self.json {
            let done = outcome.result.as_ref().ok().map(|done| done.unmapped_bytes);
            let mut result = json!({ "line": line, "op": outcome.op, "result": outcome.name() });
            for (key, value) in [
                ("errno", errno.map(Value::from)),
                ("index", outcome.index.map(Value::from)),
                ("message", message.map(Value::from)),
                ("unmapped_bytes", done.filter(|bytes| *bytes > 0).map(Value::from)),
            ] {
                value.into_iter().for_each(|value| result[key] = value);
            }
            return self.element(&result);
        }
        self.write(|out| {
            write!(out, "line {line:<6} {:<9} {}", outcome.op.unwrap_or("-"), outcome.name())?;
            if let (Some(message), Some(errno)) = (message, errno) {
                let which = outcome.index.map_or(String::new(), |i| format!("operation {i}: "));
                write!(out, " ({errno}): {which}{}", plain(&message))?;
            }
            writeln!(out)
        });
    }

    /// The mappings, and the sums.
    pub fn finish(
        mut self,
        replay: &Replay,
        operations: u64,
        refused: u64,
        stopped: Option<&io::Error>,
        with_times: bool,
    ) -> io::Result<()> {
        let (vm, times) = (replay.vm(), with_times.then(|| replay.times()));
        if self.json {
            self.write(|out| write!(out, "\n],\"runs\":["));
            self.first = true;
        }
        let (mut runs, mut mapped) = (0u64, 0u64);
        vm.mapping(vm.range(), &mut |run| {
            runs += 1;
            mapped += run.span.len();
            self.run(&run);
            if self.result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        let bindings = vm.binding_count();
        if self.json {
            let stopped = stopped.map(ToString::to_string);
            self.write(|out| {
                write!(out, "\n],\"operations\":{operations},\"refused\":{refused},\"bindings\":{bindings},")?;
                write!(out, "\"mapped_bytes\":{mapped},\"stopped\":{}", serde_json::to_string(&stopped)?)?;
                match times {
                    Some(times) => writeln!(out, ",\"times\":{}}}", times_json(times)),
                    None => writeln!(out, "}}"),
                }
            });
        } else {
            self.write(|out| {
                let (operations, bindings) = (count(operations as usize, "operation"), count(bindings, "binding"));
                let (runs, mapped) = (count(runs as usize, "run"), size::binary(mapped));
                writeln!(out, "{operations}, {refused} refused; {bindings}, {runs}, {mapped} mapped")?;
                times.map_or(Ok(()), |times| out.write_all(times_text(times).as_bytes()))
            });
        }
        self.result.and_then(|()| self.out.flush())
    }

    fn run(&mut self, run: &Mapped) {
        let (bo, offset, repeat) = match run.source {
            MappedSource::Bo { bo, offset } => (Some(bo), Some(offset), None),
            MappedSource::Repeat { bo, offset, page } => (Some(bo), Some(offset), Some(page)),
            _ => (None, None, None),
        };
        let (first, to, leaf) = (run.span.first().bits(), run.to.bits(), run.leaf);
        if self.json {
            return self.element(&json!({
                "va": Number(first),
                "len": run.span.len(),
                "bo": bo,
                "offset": offset.map(Number),
                "repeat": repeat,
                "pa": Number(to),
                "access": run.access.to_string(),
                "leaf": leaf.bytes(),
            }));
        }
        self.write(|out| {
            write!(out, "{first:#x}..={:#x} -> {to:#x}  {}  {leaf} leaves  ", run.span.last(), run.access)?;
            match (bo, offset) {
                (Some(bo), Some(offset)) => write!(out, "bo {bo} + {offset:#x}")?,
                _ => write!(out, "null")?,
            }
            if let Some(page) = repeat {
                write!(out, ", {} again and again", size::binary(page))?;
            }
            writeln!(out)
        });
    }
}
