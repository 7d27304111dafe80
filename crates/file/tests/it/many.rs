//! Many files: queues that share a ring, and files that are closed meanwhile.

use std::fs;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, Heap};
use dmalane_file::{FileHandle, FileOptions, FileQueue, Io, Mode, SharedReads};
use dmalane_queue::{Completion, OpError, Operation, Queue, drain, run};

const LONG: Duration = Duration::from_secs(30);
const LEN: usize = 10_000;

fn read_of(len: usize) -> Operation<FileOffset> {
    let whole = AnonHeap::new().allocate(len).unwrap().share().into_slice();
    Operation::read(whole.split_at(len).unwrap().0, FileOffset::new(0))
}

fn is_of(completion: &Completion<FileOffset>, byte: u8) -> bool {
    let mut bytes = vec![0; LEN];
    completion.operation.hosts()[0].slice.read(0, &mut bytes).unwrap();
    completion.result.is_ok() && bytes.iter().all(|b| *b == byte)
}

/// Files of one byte each, again and again, and queues of them that share their reads.
fn files(count: u8, options: FileOptions) -> (tempfile::TempDir, Vec<FileQueue>) {
    let (folder, reads) = (tempfile::tempdir().unwrap(), SharedReads::default());
    let queue = |i: u8| {
        let path = folder.path().join(i.to_string());
        fs::write(&path, vec![i; LEN]).unwrap();
        FileQueue::of_handle(FileHandle::open(path).unwrap(), options).unwrap().sharing(&reads)
    };
    let queues = (0..count).map(queue).collect();
    (folder, queues)
}

#[test]
fn each_queue_gets_its_own_of_a_shared_ring() {
    for mode in [Mode::Auto, Mode::Buffered] {
        // Fewer fit into the ring than are submitted.
        let (_folder, mut queues) = files(50, FileOptions { depth: 4, mode, ..FileOptions::default() });
        for queue in &mut queues {
            let _ticket = queue.submit(read_of(LEN)).unwrap();
            queue.flush();
        }
        for (i, queue) in queues.iter_mut().enumerate().rev() {
            let done = drain(queue, LONG);
            assert!(done.len() == 1 && is_of(&done[0], i as u8), "{i} {mode:?}");
        }
    }
}

#[test]
fn a_wait_ends_when_something_has_ended_for_another_queue() {
    let (_folder, mut queues) = files(2, FileOptions { mode: Mode::Buffered, ..FileOptions::default() });
    let (first, second) = queues.split_at_mut(1);
    let _ticket = second[0].submit(read_of(LEN)).unwrap();
    second[0].poll(&mut Vec::new());
    // The second one's read ends, whoever waits.
    let _ticket = first[0].submit(read_of(LEN)).unwrap();
    let (begun, mut done) = (Instant::now(), Vec::new());
    while done.is_empty() {
        first[0].wait(&mut done, LONG);
    }
    assert!(begun.elapsed() < LONG / 2);
    assert!(is_of(&done[0], 0));
}

#[test]
fn a_queue_that_is_dropped_leaves_the_others_theirs() {
    let (_folder, mut queues) = files(8, FileOptions::default());
    for queue in &mut queues {
        let _ticket = queue.submit(read_of(LEN)).unwrap();
        queue.flush();
    }
    let mut left = queues.split_off(4);
    drop(queues);
    for (i, queue) in left.iter_mut().enumerate() {
        assert!(is_of(&drain(queue, LONG)[0], i as u8 + 4));
    }
    assert_eq!(dmalane_dma::quarantined_bytes(), 0);
}

/// Opens files until `handle` is closed.
fn close(folder: &tempfile::TempDir, handle: &FileHandle) -> Vec<FileHandle> {
    let path = folder.path().join("other");
    fs::write(&path, "x").unwrap();
    let mut others = Vec::new();
    while format!("{handle:?}").contains("open: true") {
        others.push(FileHandle::open(&path).unwrap());
        assert!(others.len() <= 4096);
    }
    others
}

#[test]
fn a_closed_file_is_opened_again_if_it_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for io in [Io::Auto, Io::Pread] {
        fs::write(&path, vec![7; LEN]).unwrap();
        let handle = FileHandle::open(&path).unwrap();
        let mut queue = FileQueue::of_handle(handle.clone(), FileOptions { io, ..FileOptions::default() }).unwrap();
        for _ in 0..2 {
            let _others = close(&folder, &handle);
            assert_eq!(handle.metadata().unwrap().len(), LEN as u64);
            handle.check().unwrap();
            let _ticket = queue.submit(read_of(LEN)).unwrap();
            assert!(is_of(&drain(&mut queue, LONG)[0], 7));
        }
        let others = close(&folder, &handle);
        fs::rename(&path, folder.path().join("old")).unwrap();
        fs::write(&path, vec![8; LEN]).unwrap();
        assert_eq!(handle.check().unwrap_err().raw_os_error(), Some(116));
        // Each is told, those that come while the first one has not been.
        for _ in 0..3 {
            let _ticket = queue.submit(read_of(LEN)).unwrap();
        }
        let done = drain(&mut queue, LONG);
        let stale = |c: &Completion<FileOffset>| matches!(c.result, Err(OpError::Io { errno, .. }) if errno == 116);
        assert!(done.len() == 3 && done.iter().all(stale), "{done:?}");
        fs::rename(folder.path().join("old"), &path).unwrap();
        assert!(run(&mut queue, read_of(LEN), LONG).is_ok(), "the file that it was");
        drop(others);
    }
}

#[test]
fn a_file_without_a_name_stays_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![7; LEN]).unwrap();
    let handle = FileHandle::new(fs::File::open(&path).unwrap(), "lent");
    fs::remove_file(&path).unwrap();
    let path = folder.path().join("other");
    fs::write(&path, "x").unwrap();
    let _others: Vec<_> = (0..4200).map(|_| FileHandle::open(&path).unwrap()).collect();
    let mut queue = FileQueue::of_handle(handle.clone(), FileOptions::default()).unwrap();
    assert!(!handle.is_named() && run(&mut queue, read_of(LEN), LONG).is_ok());
}
