//! `dmalane vm`: binds and unbinds without a device.

mod report;

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::ExitCode;

use dmalane::trace::{Header, Lines, Replay, TraceError};

use crate::failure::Failure;
use crate::iopt::{FORMATS, Format};
use crate::output;
use report::Report;

/// Replays a trace and prints what became of it.
pub fn replay(trace: &Path, format: Option<&'static Format>, json: bool) -> Result<ExitCode, Failure> {
    let (name, from): (_, Box<dyn BufRead>) = if trace.as_os_str() == "-" {
        ("stdin".to_owned(), Box::new(io::stdin().lock()))
    } else {
        let name = trace.display().to_string();
        let file = File::open(trace).map_err(|e| Failure::because(format!("cannot read {name}"), &e))?;
        (name, Box::new(BufReader::with_capacity(1 << 16, file)))
    };
    let wrong = |e: TraceError| Failure::because(format!("{name} cannot be replayed"), &e);
    let mut lines = Lines::new(from);
    let header = Header::read(&mut lines).map_err(wrong)?;
    let format = format.map_or_else(|| of_trace(&header, &name), Ok)?;
    let mut replay = Replay::new((format.vm)(&header).map_err(wrong)?);

    let mut report = Report::new(&name, format, replay.vm(), json);
    let (mut operations, mut refused, mut first_refused) = (0u64, 0u64, 0);
    let mut stopped = None;
    loop {
        let line = match lines.next() {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(e) => {
                stopped = Some(e);
                break;
            }
        };
        let Some(outcome) = replay.step(line) else { continue };
        operations += 1;
        if outcome.result.is_err() {
            refused += 1;
            first_refused = if refused == 1 { lines.number() } else { first_refused };
        }
        report.outcome(lines.number(), &outcome);
    }
    output::written(report.finish(replay.vm(), operations, refused, stopped.as_ref()))?;
    if let Some(error) = stopped {
        return Err(Failure::because(format!("{name} cannot be read to its end"), &error));
    }
    if refused > 0 {
        let plural = if operations == 1 { "" } else { "s" };
        let message = format!("{name}: {refused} of {operations} operation{plural} refused");
        return Err(Failure::new(format!("{message}, the first in line {first_refused}")));
    }
    Ok(ExitCode::SUCCESS)
}

/// The format that a trace names.
fn of_trace(header: &Header, name: &str) -> Result<&'static Format, Failure> {
    let Some(format) = &header.format else {
        return Err(Failure::new(format!("{name} does not say which page-table format it is for"))
            .hint("name one with --format; --help lists them"));
    };
    FORMATS.iter().find(|f| f.name == format).ok_or_else(|| {
        Failure::new(format!("{name} is for the page-table format {format:?}, which is unknown"))
            .hint("name another with --format; --help lists them")
    })
}
