//! `dmalane inspect`: the cached part of files, the page backing of a process.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use dmalane::dma::Pagemap;
use dmalane::file::residency;
use serde::Serialize;

use crate::failure::Failure;
use crate::layout::plain;
use crate::model;
use crate::output;
use crate::size::{self, Size, binary};
use crate::source::SourceFile;

const EXAMPLES: &str = "\
Examples:
  dmalane inspect model.safetensors    how much of the file is in the page cache
  dmalane inspect models/minilm        the same of each file of a model
  dmalane inspect $(pidof trainer)     the page backing of a process's large buffers
  dmalane inspect ./4711               a file whose name is a number
  dmalane inspect - < model.bin        the file behind standard input

Exit status: 0 inspected, 1 no such file or process, 2 usage error.";

/// Show how much of a file or a model is in the page cache, or the page backing of a process's buffers.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Inspect {
    /// A file, the directory or the index of a model, or the ID of a process; - for standard input
    #[arg(value_name = "FILE|PID")]
    what: PathBuf,

    /// Smallest mapping that counts as a buffer
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(1), value_parser = size::nonzero)]
    least: Size,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    /// Inspects and prints.
    pub fn run(self) -> Result<ExitCode, Failure> {
        match self.what.to_str().and_then(|text| text.parse::<u32>().ok()) {
            Some(pid) => {
                let found = process(pid, self.least.bytes())?;
                if self.json { output::print_json(&found)? } else { output::print_text(&found.text())? }
            }
            None => {
                let files = model::files(std::slice::from_ref(&self.what))?;
                let found = files.iter().map(|path| file(path)).collect::<Result<Vec<_>, _>>()?;
                match (&found[..], self.json) {
                    ([only], true) if files[0] == self.what => output::print_json(only)?,
                    (all, true) => output::print_json(&ModelReport::of(&self.what, all))?,
                    (all, false) => output::print_text(&ModelReport::of(&self.what, all).text())?,
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The cached part of a file or a model.
#[derive(Serialize)]
struct Cached {
    schema: u32,
    command: &'static str,
    kind: &'static str,
    path: String,
    bytes: u64,
    cached_bytes: u64,
    dirty_bytes: u64,
    cached_share: f64,
}

impl Cached {
    fn text(&self) -> String {
        let dirty = match self.dirty_bytes {
            0 => String::new(),
            dirty => format!(", {} not on the disk yet", binary(dirty)),
        };
        let (percent, cached, bytes) = (self.cached_share * 100.0, binary(self.cached_bytes), binary(self.bytes));
        format!("{percent:.1} % in the page cache: {cached} of {bytes}, {}{dirty}\n", plain(&self.path))
    }
}

#[derive(Serialize)]
struct FileReport {
    #[serde(flatten)]
    all: Cached,
    /// The cached share of each bin of the file.
    map: Vec<f64>,
}

#[derive(Serialize)]
struct ModelReport<'a> {
    #[serde(flatten)]
    all: Cached,
    files: &'a [FileReport],
}

impl<'a> ModelReport<'a> {
    fn of(path: &Path, files: &'a [FileReport]) -> Self {
        let sum = |count: fn(&Cached) -> u64| files.iter().map(|file| count(&file.all)).sum();
        let (bytes, cached_bytes): (u64, u64) = (sum(|file| file.bytes), sum(|file| file.cached_bytes));
        let all = Cached {
            schema: 1,
            command: "inspect",
            kind: "model",
            path: path.to_string_lossy().into_owned(),
            bytes,
            cached_bytes,
            dirty_bytes: sum(|file| file.dirty_bytes),
            cached_share: cached_bytes as f64 / bytes.max(1) as f64,
        };
        Self { all, files }
    }

    fn text(&self) -> String {
        let mut out = if self.files.len() > 1 { self.all.text() + "\n" } else { String::new() };
        for file in self.files {
            out.push_str(&file.text());
        }
        if self.files.iter().any(|file| !file.map.is_empty()) {
            out.push_str("# cached, + partly, . not\n");
        }
        out
    }
}

/// Bins of the cache map of a file.
const BINS: u64 = 64;

fn file(path: &Path) -> Result<FileReport, Failure> {
    let source = SourceFile::open(path)?;
    if !source.is_stdin() {
        model::refuse_lfs_pointer(path, &source.file)?;
    }
    let SourceFile { file, path, .. } = source;
    let name = path.display();
    let meta = file.metadata().map_err(|e| Failure::because(format!("cannot inspect {name}"), &e))?;
    if !meta.is_file() {
        return Err(Failure::new(format!("cannot inspect {name}: it is not a regular file")));
    }
    let bytes = meta.len();
    let ask = |offset, len| {
        residency(&file, offset, len).map_err(|e| {
            let failure = Failure::because(format!("the kernel does not report which part of {name} is cached"), &e);
            if e.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error()) {
                return failure.hint("this needs Linux 6.5 or later (cachestat)");
            }
            failure
        })
    };
    let whole = ask(0, bytes)?;
    let bin = bytes.div_ceil(BINS).next_multiple_of(4096);
    let mut map = Vec::new();
    let mut at = 0;
    while at < bytes {
        let len = bin.min(bytes - at);
        map.push(ask(at, len)?.share());
        at += len;
    }
    let all = Cached {
        schema: 1,
        command: "inspect",
        kind: "file",
        path: path.to_string_lossy().into_owned(),
        bytes,
        cached_bytes: whole.cached.min(bytes),
        dirty_bytes: whole.dirty.min(bytes),
        cached_share: whole.share(),
    };
    Ok(FileReport { all, map })
}

impl FileReport {
    fn text(&self) -> String {
        let mut out = self.all.text();
        let mark = |share: &f64| match share {
            s if *s <= 0.0 => '.',
            s if *s >= 1.0 => '#',
            _ => '+',
        };
        let map: String = self.map.iter().map(mark).collect();
        if !map.is_empty() {
            let _ = writeln!(out, "[{map}]");
        }
        out
    }
}

/// The buffers of a process.
#[derive(Serialize)]
struct ProcessReport {
    schema: u32,
    command: &'static str,
    kind: &'static str,
    pid: u32,
    /// The kernel told where the pages are.
    frames_known: bool,
    mappings: Vec<MappingReport>,
    /// Bytes of all mappings by the size of their pages.
    page_sizes: Vec<PageSizeReport>,
    /// Physically contiguous runs of all mappings, by size.
    runs: Vec<RunReport>,
}

#[derive(Serialize)]
struct MappingReport {
    start: u64,
    bytes: u64,
    present_bytes: u64,
    swapped_bytes: u64,
    huge_bytes: u64,
    page_bytes: u64,
    segments: Option<u64>,
    name: String,
}

#[derive(Serialize)]
struct PageSizeReport {
    page_bytes: u64,
    bytes: u64,
}

/// Runs of at least `from_bytes` and less than twice that.
#[derive(Serialize)]
struct RunReport {
    from_bytes: u64,
    count: u64,
    bytes: u64,
}

/// A mapping as `/proc/PID/smaps` describes it.
struct Mapping {
    start: u64,
    end: u64,
    name: String,
    /// KiB by the name of the field.
    fields: BTreeMap<String, u64>,
}

/// Bytes of the huge pages that the kernel gives without being asked; where it does not say, it has none.
fn transparent_page() -> u64 {
    let size = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    size.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(2 << 20)
}

fn process(pid: u32, least: u64) -> Result<ProcessReport, Failure> {
    let trouble = |e: &io::Error| {
        let failure = Failure::because(format!("cannot inspect process {pid}"), e);
        match e.kind() {
            // Root can be refused too: in a container without CAP_SYS_PTRACE.
            io::ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => {
                failure.hint("this process may not look into others: it lacks CAP_SYS_PTRACE")
            }
            io::ErrorKind::PermissionDenied => {
                failure.hint(format!("it belongs to another user: sudo dmalane inspect {pid}"))
            }
            io::ErrorKind::NotFound => {
                let failure = Failure::new(format!("there is no process {pid}"));
                failure.hint(format!("for a file of that name write ./{pid}"))
            }
            _ => failure,
        }
    };
    let smaps = std::fs::read(format!("/proc/{pid}/smaps")).map_err(|e| trouble(&e))?;
    let smaps = String::from_utf8_lossy(&smaps); // names may be any bytes
    let pagemap = Pagemap::of(pid).map_err(|e| trouble(&e))?;
    let mut report = ProcessReport {
        schema: 1,
        command: "inspect",
        kind: "process",
        pid,
        frames_known: false,
        mappings: Vec::new(),
        page_sizes: Vec::new(),
        runs: Vec::new(),
    };
    let (page_size, transparent) = (rustix::param::page_size() as u64, transparent_page());
    let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
    let mut runs: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for mapping in parse(&smaps) {
        if mapping.end - mapping.start < least || !is_buffer(&mapping.name) {
            continue;
        }
        let field = |name: &str| mapping.fields.get(name).map_or(0, |kib| kib.saturating_mul(1024));
        let (mut present, mut swapped, mut segments) = (0, 0, 0);
        let mut run = Run::default();
        let mut close = |run: &mut Run| {
            if run.len > 0 {
                segments += 1;
                let entry = runs.entry(run.len.ilog2()).or_default();
                *entry = (entry.0 + 1, entry.1 + run.len);
                run.len = 0;
            }
        };
        let scanned = pagemap.scan(mapping.start, mapping.end - mapping.start, |page| {
            present += u64::from(page.is_present());
            swapped += u64::from(page.is_swapped());
            match page.frame().map(|frame| frame.bits()) {
                Some(frame) if run.len > 0 && frame == run.next => {
                    run = Run { next: frame + page_size, len: run.len + page_size };
                }
                frame => {
                    close(&mut run);
                    run = frame.map_or(Run::default(), |frame| Run { next: frame + page_size, len: page_size });
                }
            }
        });
        // A mapping may be gone by now.
        if scanned.is_err() {
            continue;
        }
        close(&mut run);
        report.frames_known |= segments > 0;
        let page_bytes = field("KernelPageSize").max(page_size);
        let (huge, huge_page) = if page_bytes > page_size {
            (present * page_size, page_bytes)
        } else {
            (field("AnonHugePages") + field("ShmemPmdMapped") + field("FilePmdMapped"), transparent)
        };
        *sizes.entry(huge_page).or_default() += huge;
        *sizes.entry(page_size).or_default() += (present * page_size).saturating_sub(huge);
        report.mappings.push(MappingReport {
            start: mapping.start,
            bytes: mapping.end - mapping.start,
            present_bytes: present * page_size,
            swapped_bytes: swapped * page_size,
            huge_bytes: huge,
            page_bytes,
            segments: (segments > 0).then_some(segments),
            name: mapping.name,
        });
    }
    let size = |(page_bytes, bytes)| PageSizeReport { page_bytes, bytes };
    report.page_sizes = sizes.into_iter().filter(|(_, bytes)| *bytes > 0).map(size).collect();
    let run = |(log, (count, bytes))| RunReport { from_bytes: 1u64 << log, count, bytes };
    report.runs = runs.into_iter().map(run).collect();
    Ok(report)
}

/// Frames that follow each other.
#[derive(Default)]
struct Run {
    next: u64,
    len: u64,
}

/// Memory that a program fills, and not its code or a file that it has mapped.
fn is_buffer(name: &str) -> bool {
    name.is_empty() || name.starts_with("[heap]") || name.starts_with("[anon") || name.starts_with("/memfd:") || {
        name.starts_with("/dev/") || name.starts_with("/dmabuf") || name.starts_with("/anon_hugepage")
    }
}

/// Reads `/proc/PID/smaps`: a line `START-END perms offset dev inode name` and lines `Field: N kB` for each mapping.
fn parse(smaps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some(field) = first.strip_suffix(':') {
            if let (Some(mapping), Some(kib)) = (mappings.last_mut(), words.next().and_then(|n| n.parse().ok())) {
                mapping.fields.insert(field.to_owned(), kib);
            }
            continue;
        }
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let bounds = first.split_once('-').and_then(|(start, end)| Some((hex(start)?, hex(end)?)));
        if let Some((start, end)) = bounds.filter(|(start, end)| start < end) {
            let name = words.skip(4).collect::<Vec<_>>().join(" ");
            mappings.push(Mapping { start, end, name, fields: BTreeMap::new() });
        }
    }
    mappings
}

impl ProcessReport {
    fn text(&self) -> String {
        let present = self.mappings.iter().map(|m| m.present_bytes).sum();
        let huge: u64 = self.mappings.iter().map(|m| m.huge_bytes).sum();
        let mut out = format!(
            "{} in {} buffers of process {}, {} of it on huge pages\n",
            binary(present),
            self.mappings.len(),
            self.pid,
            binary(huge)
        );
        if self.mappings.is_empty() {
            return out;
        }
        // Writing to a String cannot fail.
        let _ = writeln!(out, "\n{:<18} {:>10} {:>10} {:>10} {:>9}  name", "at", "size", "present", "huge", "segments");
        for m in &self.mappings {
            let name = if m.name.is_empty() { "(anonymous)".to_owned() } else { plain(&m.name) };
            let _ = writeln!(
                out,
                "{:<#18x} {:>10} {:>10} {:>10} {:>9}  {name}",
                m.start,
                binary(m.bytes),
                binary(m.present_bytes),
                binary(m.huge_bytes),
                m.segments.map_or("-".to_owned(), |n| n.to_string()),
            );
        }
        let _ = writeln!(out, "\npages of   bytes");
        for p in &self.page_sizes {
            let _ = writeln!(out, "{:<10} {}", binary(p.page_bytes), binary(p.bytes));
        }
        if !self.frames_known {
            let _ = writeln!(out, "\nOnly root can see physical addresses: no runs.");
            return out;
        }
        let _ = writeln!(out, "\n{:<22} {:>9} {:>10}", "contiguous runs", "count", "bytes");
        let most = self.runs.iter().map(|r| r.bytes).max().unwrap_or(1).max(1);
        for r in &self.runs {
            let bar = "#".repeat((r.bytes as f64 / most as f64 * 30.0).ceil() as usize);
            let from = format!("{}..{}", binary(r.from_bytes), binary(r.from_bytes.saturating_mul(2)));
            let _ = writeln!(out, "{from:<22} {:>9} {:>10} {bar}", r.count, binary(r.bytes));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaps() {
        let text = "55d0-55f0 rw-p 00000000 00:00 0    [heap]\nSize:  128 kB\nKernelPageSize:        4 kB\nVmFlags: \
                    rd wr\n\
                    7f00-7f10 rw-s 00000000 00:01 99 /memfd:my buffer (deleted)\nAnonHugePages: 0 \
                    kB\nnonsense\n-\n9-1 x\n";
        let found = parse(text);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].start, found[0].end, found[0].name.as_str()), (0x55d0, 0x55f0, "[heap]"));
        assert_eq!((found[0].fields["Size"], found[0].fields["KernelPageSize"]), (128, 4));
        assert_eq!(found[1].name, "/memfd:my buffer (deleted)");
        assert!(
            is_buffer(&found[1].name) && is_buffer("") && !is_buffer("/usr/lib/libc.so.6") && !is_buffer("[stack]")
        );
    }
}
