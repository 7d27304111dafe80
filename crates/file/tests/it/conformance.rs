//! The suite that every queue takes, over every way to read a file.

use std::os::unix::fs::FileExt;
use std::path::Path;

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, Heap};
use dmalane_file::{Error, FileOptions, FileQueue, Io, Mode};
use dmalane_queue::{HostSlice, conformance};
use tempfile::NamedTempFile;

struct Fixture {
    file: NamedTempFile,
    options: FileOptions,
    align: usize,
}

/// Not a multiple of any block size.
const LEN: u64 = (1 << 20) + 777;

impl conformance::Fixture for Fixture {
    type Queue = FileQueue;

    fn queue(&mut self) -> FileQueue {
        FileQueue::open(self.file.path(), self.options).unwrap()
    }

    fn target_len(&self) -> u64 {
        LEN
    }

    fn at(&self, offset: u64) -> FileOffset {
        FileOffset::new(offset)
    }

    fn host(&mut self, len: usize) -> HostSlice {
        AnonHeap::new().allocate(len).unwrap().share().into_slice().split_at(len).unwrap().0.into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        self.file.as_file().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.file.as_file().write_all_at(bytes, 0).unwrap();
    }

    fn align(&self) -> usize {
        self.align
    }
}

fn suite(dir: &str, mode: Mode, io: Io) {
    let file = NamedTempFile::new_in(dir).unwrap();
    file.as_file().set_len(LEN).unwrap();
    let options = FileOptions { mode, io, depth: 32, block: 64 << 10 };
    match FileQueue::open(file.path(), options) {
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
