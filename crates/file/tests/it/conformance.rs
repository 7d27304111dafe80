//! The suite that every channel takes, over every way to read a file.

use std::os::unix::fs::FileExt;
use std::path::Path;

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, BufferSlice, Heap};
use dmalane_file::{Error, FileChannel, Io, Mode, Options};
use dmalane_queue::{Direction, conformance};
use tempfile::NamedTempFile;

struct Fixture {
    file: NamedTempFile,
    options: Options,
    align: usize,
}

/// Not a multiple of any block size.
const LEN: u64 = (1 << 20) + 777;

impl conformance::Fixture for Fixture {
    type Channel = FileChannel;

    fn channel(&mut self) -> FileChannel {
        FileChannel::open(self.file.path(), self.options).unwrap()
    }

    fn far_len(&self) -> u64 {
        LEN
    }

    fn far(&mut self, offset: u64, _: &BufferSlice) -> FileOffset {
        FileOffset::new(offset)
    }

    fn part(&mut self, len: usize) -> BufferSlice {
        AnonHeap::new().allocate(len).unwrap().share().into_part()
    }

    fn peek(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.as_file().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.file.as_file().write_all_at(bytes, offset).unwrap();
    }

    fn align(&self) -> usize {
        self.align
    }

    fn directions(&self) -> &[Direction] {
        &[Direction::ToHost]
    }
}

fn suite(dir: &str, mode: Mode, io: Io) {
    let file = NamedTempFile::new_in(dir).unwrap();
    file.as_file().set_len(LEN).unwrap();
    let options = Options { mode, io, depth: 32, block: 64 << 10 };
    match FileChannel::open(file.path(), options) {
        Err(e @ (Error::NoDirect { .. } | Error::NoUring { .. })) => return eprintln!("skipped: {e}"),
        opened => println!("{}", opened.unwrap().how()),
    }
    let mut fixture = Fixture { file, options, align: 1 };
    conformance::suite(&mut fixture);
    // Aligned as a disk wants it, so that direct reads are most of it.
    fixture.align = 4096;
    fixture.options.depth = 3;
    conformance::suite(&mut fixture);
}

const DISK: &str = env!("CARGO_TARGET_TMPDIR");

#[test]
fn direct() {
    suite(DISK, Mode::Direct, Io::Uring);
}

#[test]
fn direct_pread() {
    suite(DISK, Mode::Direct, Io::Pread);
}

#[test]
fn buffered() {
    suite(DISK, Mode::Buffered, Io::Uring);
}

#[test]
fn buffered_pread() {
    suite(DISK, Mode::Buffered, Io::Pread);
}

#[test]
fn tmpfs() {
    if Path::new("/dev/shm").exists() {
        suite("/dev/shm", Mode::Auto, Io::Auto);
    } else {
        eprintln!("skipped: no /dev/shm");
    }
}
