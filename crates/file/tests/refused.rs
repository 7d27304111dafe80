//! A kernel that refuses a ring. Alone in its process, since it takes away all further file descriptors.

use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, Heap};
use dmalane_file::{Error, Fallback, FileHandle, FileOptions, FileQueue, Io};
use dmalane_queue::{Operation, run};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::NamedTempFile;

#[test]
fn without_a_ring_files_are_read_one_block_at_a_time() {
    let data: Vec<u8> = (0..1_000_000u32).map(|i| (i ^ i >> 8) as u8).collect();
    let file = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), &data).unwrap();
    let mut channel = FileQueue::open(file.path(), FileOptions::default()).unwrap();
    let opened = file.reopen().unwrap();
    let mode = dmalane_file::Mode::Buffered;

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    let demanded = FileQueue::of_handle(
        FileHandle::new(opened, file.path()),
        FileOptions { io: Io::Uring, mode, ..FileOptions::default() },
    );
    let part = AnonHeap::new().allocate(data.len()).unwrap().share().into_slice().split_at(data.len()).unwrap().0;
    let read = Operation::read(part, FileOffset::new(0));
    let read = run(&mut channel, read, Duration::from_secs(30)).unwrap();
    setrlimit(Resource::Nofile, limit).unwrap();

    assert!(matches!(demanded, Err(Error::NoUring { .. })));
    let mut bytes = vec![0; data.len()];
    read.into_slice().unwrap().read(0, &mut bytes).unwrap();
    assert!(bytes == data);
    let how = channel.how();
    assert!(!how.uring && matches!(how.reasons.last(), Some(Fallback::Ring { .. })), "{how}");
}
