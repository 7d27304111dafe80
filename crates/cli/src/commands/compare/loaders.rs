//! Loaders, and how each is run in a process of its own.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::worker;
use crate::failure::Failure;

/// Loads by one of the loaders of Python.
const PEERS: &str = include_str!("peers.py");
/// The loaders in it.
const OF_PYTHON: [&str; 10] = [
    "dmalane-python",
    "mmap",
    "numpy-fromfile",
    "safetensors-mmap",
    "safetensors-clone",
    "safetensors-pread",
    "runai-model-streamer",
    "fastsafetensors",
    "kvikio",
    "nixl-posix",
];
/// A worker that prints more than this is not listened to.
const MOST_OUTPUT: u64 = 1 << 20;
/// The longest sleep between looks at a worker.
const MAX_DELAY: Duration = Duration::from_millis(20);

/// A loader.
#[derive(Clone)]
pub struct Loader {
    pub name: String,
    program: OsString,
    /// The arguments before the files: with hashing, and timed without.
    hashing: Vec<OsString>,
    timed: Vec<OsString>,
    /// The message for a program that is not installed.
    hint: &'static str,
}

/// The times and memory of a load, as the loader prints them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// The version of the library.
    #[serde(default)]
    pub version: String,
    /// From the first call until all bytes are there.
    pub seconds: f64,
    /// Processor time of the process meanwhile.
    pub cpu_s: f64,
    /// The most memory that the process had.
    pub peak_rss_bytes: u64,
    /// Which memory the bytes are in.
    pub memory: String,
    /// Whether a driver can pin it.
    pub dma_ready: bool,
    /// SHA-256 of the tensors' bytes, in order; of all bytes of a file that is not a safetensors file.
    #[serde(default)]
    pub sha256: Option<String>,
}

/// Why a loader did not load.
#[derive(Deserialize)]
struct Skipped {
    skipped: String,
}

/// The loaders of this program.
pub fn ours() -> Result<Vec<Loader>, Failure> {
    let program = std::env::current_exe().map_err(|e| Failure::because("cannot find this program", &e))?;
    // In the Python package this process is an interpreter, whose first words say what it runs; and its own name, by
    // which it finds its packages, is a link.
    let mut words = std::env::args_os().take_while(|word| word != "compare");
    let first = words.next();
    let words: Vec<OsString> = words.collect();
    let program = first.filter(|_| !words.is_empty()).unwrap_or_else(|| program.into_os_string());
    let loader = |name: &&str| {
        let own = ["compare", "--worker", *name].map(OsString::from);
        let timed: Vec<OsString> = words.iter().cloned().chain(own).collect();
        let hashing = timed.iter().cloned().chain(["--hash".into()]).collect();
        Loader { name: (*name).to_owned(), program: program.clone(), hashing, timed, hint: "" }
    };
    Ok(worker::NAMES.iter().map(loader).collect())
}

/// The loaders of a Python.
pub fn of_python(python: &Path) -> Vec<Loader> {
    let loader = |name: &&str| {
        let with = |hash: &str| ["-c", PEERS, name, hash].iter().map(OsString::from).collect();
        let (hashing, timed) = (with("hash"), with("-"));
        let hint = "; --python PATH names another one";
        Loader { name: (*name).to_owned(), program: python.into(), hashing, timed, hint }
    };
    OF_PYTHON.iter().map(loader).collect()
}

/// Parses NAME=COMMAND.
pub fn custom(text: &str) -> Result<Loader, String> {
    let Some((name, command)) = text.split_once('=') else { return Err("not NAME=COMMAND".to_owned()) };
    let mut words = command.split_whitespace().map(OsString::from);
    let (Some(program), false) = (words.next(), name.is_empty()) else { return Err("not NAME=COMMAND".to_owned()) };
    let timed: Vec<OsString> = words.collect();
    Ok(Loader { name: name.to_owned(), program, hashing: timed.clone(), timed, hint: "" })
}

impl Loader {
    /// Runs it once, with `touch` bytes of memory touched before; else says why it does not.
    pub fn run(&self, files: &[PathBuf], hash: bool, touch: u64, timeout: Duration) -> Result<Sample, String> {
        let mut command = Command::new(&self.program);
        command.args(if hash { &self.hashing } else { &self.timed }).args(files);
        command.env("DMALANE_COMPARE_HASH", if hash { "1" } else { "0" });
        command.env("DMALANE_COMPARE_TOUCH", touch.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = self.program.to_string_lossy();
        let mut child = command.spawn().map_err(|e| format!("cannot run {program}: {e}{}", self.hint))?;
        let reader = |pipe: Option<Box<dyn Read + Send>>| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = pipe.map(|pipe| pipe.take(MOST_OUTPUT).read_to_end(&mut text));
                text
            })
        };
        let out = reader(child.stdout.take().map(|pipe| Box::new(pipe) as _));
        let err = reader(child.stderr.take().map(|pipe| Box::new(pipe) as _));
        let deadline = Instant::now() + timeout;
        let mut delay = Duration::from_millis(1);
        let status = loop {
            match child.try_wait().map_err(|e| e.to_string())? {
                Some(status) => break status,
                None if Instant::now() >= deadline => {
                    let _ = child.kill().and_then(|()| child.wait());
                    return Err(format!("did not end within {} s", timeout.as_secs()));
                }
                None => std::thread::sleep(delay),
            }
            delay = (delay * 2).min(MAX_DELAY);
        };
        let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
        let out = String::from_utf8_lossy(&out);
        // Libraries may have printed something before.
        let line = out.lines().rfind(|line| line.trim_start().starts_with('{')).unwrap_or_default();
        if let Ok(Skipped { skipped }) = serde_json::from_str(line) {
            return Err(short(&skipped));
        }
        match serde_json::from_str::<Sample>(line) {
            Ok(sample) if status.success() && sample.seconds > 0.0 => Ok(sample),
            Ok(_) if status.success() => Err("says that it took no time".to_owned()),
            parsed => {
                let said = String::from_utf8_lossy(&err);
                let said = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
                Err(match (parsed, said) {
                    (Err(e), "") if status.success() => short(&format!("prints no result: {e}")),
                    (_, "") => format!("fails ({status})"),
                    (_, said) => short(&format!("fails ({status}): {said}")),
                })
            }
        }
    }
}

/// Text of others, as long as a line of a report.
fn short(text: &str) -> String {
    crate::layout::plain(&text.chars().take(300).collect::<String>())
}
