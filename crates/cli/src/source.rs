//! Files to read from: by name, from standard input, and what has no size that can be believed.

use std::fs::{File, FileType, Metadata};
use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dmalane::file::open_at_once;
use rustix::fs::makedev;

use crate::failure::Failure;
use crate::size::{binary, duration};

/// The name of standard input on the command line.
const STDIN: &str = "-";

/// Whether this is the name of standard input.
pub fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == STDIN
}

/// Which file standard input is.
pub fn stdin_metadata() -> io::Result<Metadata> {
    File::from(io::stdin().as_fd().try_clone_to_owned()?).metadata()
}

/// Refuses to read standard input twice.
pub fn check<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), Failure> {
    match paths.into_iter().filter(|path| is_stdin(path)).count() {
        0 | 1 => Ok(()),
        _ => Err(Failure::usage("standard input (-) can be read once").hint("a file of that name is ./-")),
    }
}

/// Copies into temporary files, made before anything was measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copied {
    /// Of all files.
    pub bytes: u64,
    /// Of all files.
    pub time: Duration,
}

impl Copied {
    /// Adds the copy of another file.
    pub fn add(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.time = self.time.saturating_add(other.time);
    }

    /// A line for people; nothing where nothing was copied.
    pub fn text(&self) -> String {
        match self.bytes {
            0 => String::new(),
            bytes => format!(
                "Copied to a temporary file first: {} in {}, which the time above does not contain\n",
                binary(bytes),
                duration(self.time)
            ),
        }
    }
}

/// A file that is open for reading.
pub struct SourceFile {
    pub file: File,
    /// Its name in messages and results.
    pub path: PathBuf,
    /// The copy that it is.
    pub copied: Copied,
    stdin: bool,
}

impl SourceFile {
    /// Opens a file; `-` is standard input.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let stdin = is_stdin(path);
        let opened = match stdin {
            true => io::stdin().as_fd().try_clone_to_owned().map(File::from),
            false => open_at_once(path),
        };
        let file = opened.map_err(|e| Failure::because(format!("cannot open {}", path.display()), &e))?;
        let path = if stdin { PathBuf::from("stdin") } else { path.to_owned() };
        Ok(Self { file, path, copied: Copied::default(), stdin })
    }

    /// Whether it is standard input.
    pub fn is_stdin(&self) -> bool {
        self.stdin
    }

    /// Whether it ends where its size says: pipes have no size, and files that the kernel generates as they are read
    /// have a wrong one.
    pub fn has_size(&self) -> bool {
        let kind = self.file.metadata().map(|meta| meta.file_type());
        // A directory is refused where it is read.
        kind.is_ok_and(|kind| kind.is_dir() || kind.is_block_device() || kind.is_file() && !self.is_generated())
    }

    /// Whether reading it never ends, as `/dev/zero` does. `/dev/null` is empty.
    fn is_endless(&self) -> bool {
        let is_device = |meta: Metadata| meta.file_type().is_char_device() && meta.rdev() != makedev(1, 3);
        !self.file.is_terminal() && self.file.metadata().is_ok_and(is_device)
    }

    /// Refuses, if it is empty, what is so because nobody writes to it.
    fn check_empty(&self) -> Result<(), Failure> {
        let is_pipe = |kind: FileType| is_stream(&kind) && !kind.is_char_device();
        match !self.stdin && self.file.metadata().is_ok_and(|meta| is_pipe(meta.file_type())) {
            true => Err(Failure::new(format!("{} is a pipe that nobody writes to", self.path.display()))),
            false => Ok(()),
        }
    }

    fn is_generated(&self) -> bool {
        rustix::fs::fstatfs(&self.file).is_ok_and(|s| GENERATED.contains(&(s.f_type as u32)))
    }

    /// Its contents, to be read once from front to back.
    pub fn reader(self) -> Result<BufReader<File>, Failure> {
        self.check_end()?;
        let (may_be_empty, path) = (self.check_empty(), self.path);
        let mut from = BufReader::with_capacity(1 << 16, self.file);
        let begun = from.fill_buf().map_err(|e| Failure::because(format!("cannot read {}", path.display()), &e))?;
        if begun.is_empty() {
            may_be_empty?;
        }
        Ok(from)
    }

    /// All that it holds, at most `most` bytes.
    pub fn read(self, most: u64) -> Result<Vec<u8>, Failure> {
        let (path, size) = (self.path.clone(), self.file.metadata().map_or(0, |meta| meta.len()));
        let mut bytes = Vec::new();
        if size <= most {
            let read = self.reader()?.take(most + 1).read_to_end(&mut bytes);
            read.map_err(|e| Failure::because(format!("cannot read {}", path.display()), &e))?;
        }
        match size.max(bytes.len() as u64) > most {
            true => Err(Failure::new(format!("{} has more than {}", path.display(), binary(most)))),
            false => Ok(bytes),
        }
    }

    /// Refuses what never ends.
    fn check_end(&self) -> Result<(), Failure> {
        match self.is_endless() {
            true => Err(Failure::new(format!("{} is a character device, which has no end", self.path.display()))),
            false => Ok(()),
        }
    }

    /// The same bytes in a file with a size: what has none is read to its end, into a temporary file without a name.
    pub fn with_size(self) -> Result<Self, Failure> {
        if self.has_size() {
            let path = if self.stdin { stdin_name(&self.file) } else { self.path };
            return Ok(Self { path, ..self });
        }
        self.check_end()?;
        let path = self.path.display();
        let start = Instant::now();
        let mut copy = tempfile::tempfile().map_err(|e| trouble("create", &path.to_string(), &e))?;
        let bytes = io::copy(&mut &self.file, &mut copy).map_err(|e| trouble("write", &path.to_string(), &e))?;
        if bytes == 0 {
            self.check_empty()?;
        }
        let path = if self.stdin { stdin_name(&copy) } else { self.path };
        let copied = Copied { bytes, time: start.elapsed() };
        Ok(Self { file: copy, path, copied, ..self })
    }
}

/// True for pipes, sockets and character devices, which have no offsets.
fn is_stream(kind: &FileType) -> bool {
    !kind.is_file() && !kind.is_block_device() && !kind.is_dir()
}

fn trouble(what: &str, path: &str, e: &io::Error) -> Failure {
    let folder = std::env::temp_dir();
    Failure::because(format!("cannot {what} a temporary copy of {path} in {}", folder.display()), e)
        .hint("another folder can be set with TMPDIR")
}

/// The name of what was read from standard input. A safetensors file is known by its name.
fn stdin_name(file: &File) -> PathBuf {
    PathBuf::from(if is_safetensors(file) { "stdin.safetensors" } else { "stdin" })
}

/// Whether the bytes look like a safetensors file: the length of a JSON object comes first.
fn is_safetensors(file: &File) -> bool {
    let mut head = [0; 9];
    let len = file.metadata().map_or(0, |meta| meta.len());
    file.read_exact_at(&mut head, 0).is_ok()
        && head[8] == b'{'
        && u64::from_le_bytes(std::array::from_fn(|i| head[i])) <= len - 8
}

/// The file systems proc, sysfs, cgroup2, debugfs and tracefs, whose files have no true size.
const GENERATED: [u32; 5] = [0x9fa0, 0x6265_6572, 0x6367_7270, 0x6462_6720, 0x7472_6163];
