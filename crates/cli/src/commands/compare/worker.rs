//! One load by a loader of this program, in the process of its own that `dmalane compare` has started.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use dmalane::dma::{AnonHeap, Heap, Needs, PageKind, pick};
use dmalane::file::Mode;
use dmalane::load::fill::FilledBuf;
use dmalane::{Read as ReadFiles, ReadOptions};
use sha2::{Digest, Sha256};

use super::loaders::Sample;
use crate::failure::Failure;
use crate::output;

/// The loaders.
pub const NAMES: [&str; 6] = ["dmalane", "dmalane-memfd", "dmalane-direct", "dmalane-buffered", "plain-read", "cat"];

/// Bytes that are hashed or copied at a time; for `cat` what coreutils' cat reads at a time.
const STEP: usize = 128 << 10;

/// The bytes that a loader has loaded.
enum Loaded {
    Filled(Vec<FilledBuf>),
    Plain(Vec<Vec<u8>>),
    /// Nothing was kept; the bytes are hashed as they are read.
    Gone,
}

/// Loads `files` by a loader, and prints what it took.
pub fn run(name: &str, hash: bool, files: &[PathBuf]) -> Result<ExitCode, Failure> {
    touch_memory();
    let (before, start) = (cpu_seconds()?, Instant::now());
    let (loaded, memory) = match name {
        "dmalane" => with_engine(files, Mode::Auto, false)?,
        "dmalane-memfd" => with_engine(files, Mode::Auto, true)?,
        "dmalane-direct" => with_engine(files, Mode::Direct, false)?,
        "dmalane-buffered" => with_engine(files, Mode::Buffered, false)?,
        "plain-read" => {
            let read = files.iter().map(fs::read).collect::<io::Result<_>>()?;
            (Loaded::Plain(read), "private memory".to_owned())
        }
        "cat" => {
            let mut block = vec![0; STEP];
            for path in files {
                let mut file = File::open(path)?;
                while file.read(&mut block)? > 0 {}
            }
            (Loaded::Gone, "nothing is kept".to_owned())
        }
        _ => return Err(Failure::usage(format!("no loader is called {name}"))),
    };
    let (seconds, cpu_s) = (start.elapsed().as_secs_f64(), cpu_seconds()? - before);
    let sha256 = if hash { Some(loaded.digest(files)?) } else { None };
    let dma_ready = !matches!(loaded, Loaded::Gone);
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let sample = Sample { version, seconds, cpu_s, peak_rss_bytes: peak()?, memory, dma_ready, sha256 };
    output::print(&format!("{}\n", serde_json::to_string(&sample)?))?;
    Ok(ExitCode::SUCCESS)
}

/// Touches and frees memory, so that the load finds pages that a virtual machine's host has given: it takes back what a
/// guest leaves free for two seconds, and each GB costs a second or more when it is used again.
fn touch_memory() {
    let bytes = std::env::var("DMALANE_COMPARE_TOUCH").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    // The peak of this process is counted from here on, where the kernel can do that.
    let reset = || fs::write("/proc/self/clear_refs", "5");
    if bytes > 0 && reset().is_ok() {
        let _ = AnonHeap::starting_at(PageKind::Transparent).allocate(bytes).map(drop);
        let _ = reset();
    }
}

fn with_engine(files: &[PathBuf], mode: Mode, shareable: bool) -> Result<(Loaded, String), Failure> {
    let heap = pick(Needs { shareable, pages: Some(PageKind::Hugetlb2M), ..Needs::default() })?.heap;
    let read = ReadFiles::files(files).options(ReadOptions { mode, ..ReadOptions::default() });
    let filled = read.into_memory(&*heap as &dyn Heap)?.filled;
    let pages = filled.report.backing.as_ref().map_or(String::new(), |backing| format!(", {} pages", backing.kind));
    let whose = if shareable { "shareable" } else { "private" };
    Ok((Loaded::Filled(filled.buffers), format!("{whose} memory{pages}")))
}

impl Loaded {
    /// SHA-256 of the tensors' bytes, as [`digest`] takes it.
    fn digest(&self, files: &[PathBuf]) -> io::Result<String> {
        let mut hash = Sha256::new();
        match self {
            Self::Gone => return digest(files),
            Self::Plain(all) => {
                for (bytes, path) in all.iter().zip(files) {
                    let from = start(path, |into| bytes.get(..8).map(|head| into.copy_from_slice(head)).is_some());
                    hash.update(bytes.get(from as usize..).unwrap_or_default());
                }
            }
            Self::Filled(buffers) => {
                let mut block = vec![0; STEP];
                for (buffer, path) in buffers.iter().zip(files) {
                    let view = buffer.as_volatile_slice();
                    let head = |into: &mut [u8; 8]| view.sub(0, 8).map(|view| view.read(into)).is_some();
                    let mut at = start(path, head) as usize;
                    while at < buffer.len() {
                        let n = STEP.min(buffer.len() - at);
                        let Some(chunk) = view.sub(at, n) else { break };
                        chunk.read(&mut block[..n]);
                        hash.update(&block[..n]);
                        at += n;
                    }
                }
            }
        }
        Ok(hex(hash))
    }
}

/// Where the bytes of the tensors begin: behind the header of a safetensors file, at 0 in any other. `head` reads the
/// first 8 bytes, if there are that many.
fn start(path: &Path, head: impl FnOnce(&mut [u8; 8]) -> bool) -> u64 {
    let mut bytes = [0; 8];
    match path.extension().is_some_and(|extension| extension == "safetensors") && head(&mut bytes) {
        true => u64::from_le_bytes(bytes).saturating_add(8),
        false => 0,
    }
}

/// SHA-256 of the bytes of the tensors of files, in order, by plain reads.
pub fn digest(files: &[PathBuf]) -> io::Result<String> {
    let (mut hash, mut block) = (Sha256::new(), vec![0; STEP]);
    for path in files {
        let file = File::open(path)?;
        let mut at = start(path, |into| file.read_exact_at(into, 0).is_ok());
        loop {
            match file.read_at(&mut block, at)? {
                0 => break,
                n => {
                    hash.update(&block[..n]);
                    at += n as u64;
                }
            }
        }
    }
    Ok(hex(hash))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Processor time of this process, to a tick of 10 ms.
fn cpu_seconds() -> io::Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The program's name is in parentheses; user and system time are the 12th and 13th field behind it.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The most memory that this process had: resident pages, and huge pages, which are not counted among them.
fn peak() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    Ok(field("VmHWM") + field("HugetlbPages"))
}
