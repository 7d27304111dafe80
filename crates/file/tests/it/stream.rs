//! Pipes and sockets, read in order.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, Heap};
use dmalane_file::StreamQueue;
use dmalane_queue::{Capabilities, OpError, Operation, Queue, Refusal, Work, conformance, drain};

const LONG: Duration = Duration::from_secs(30);

fn to_host(at: u64, len: usize) -> Operation<FileOffset> {
    let part = AnonHeap::new().allocate(len).unwrap().share().into_slice().split_at(len).unwrap().0;
    Operation::read(part, FileOffset::new(at))
}

/// The offset of a read, and its bytes.
fn parts(operation: &Operation<FileOffset>) -> (usize, Vec<u8>) {
    let Work::Copy { at, .. } = &operation.work else { panic!("a read") };
    (at.bits() as usize, conformance::host_bytes(operation))
}

fn reads_in_order(from: OwnedFd, to: OwnedFd) {
    let data: Vec<u8> = (0..1_000_000u32).map(|i| (i ^ i >> 8) as u8).collect();
    let mut channel = StreamQueue::new(File::from(from), 4);
    // Submitted in no order, with a gap that nobody asks for.
    for (at, len) in [(500_000, 100_000), (0, 200_000), (200_000, 1), (900_000, 200_000)] {
        let _ticket = channel.submit(to_host(at, len)).unwrap();
    }
    assert_eq!(channel.submit(to_host(0, 1)).unwrap_err().reason, Refusal::Full);
    assert_eq!(channel.wait(&mut Vec::new(), Duration::from_millis(1)), 0, "nothing has come");
    let done = std::thread::scope(|s| {
        s.spawn(|| {
            let mut to = File::from(to);
            data.chunks(70_001).for_each(|chunk| to.write_all(chunk).unwrap());
        });
        drain(&mut channel, LONG)
    });
    let order: Vec<u64> = done.iter().map(|c| parts(&c.operation).0 as u64).collect();
    assert_eq!(order, [0, 200_000, 500_000, 900_000]);
    for c in &done[..3] {
        let (at, bytes) = parts(&c.operation);
        assert_eq!((&c.result, c.bytes), (&Ok(()), bytes.len() as u64));
        assert!(bytes == data[at..at + bytes.len()]);
    }
    let early = OpError::EndOfFile { at: FileOffset::new(1_000_000), missing: 100_000 };
    assert_eq!((&done[3].result, channel.position()), (&Err(early), 1_000_000));
    let _ticket = channel.submit(to_host(7, 1)).unwrap();
    let done = drain(&mut channel, LONG);
    assert!(matches!(&done[0].result, Err(OpError::Passed { .. })));
}

#[test]
fn pipes() {
    let (from, to) = rustix::pipe::pipe().unwrap();
    reads_in_order(from, to);
}

#[test]
fn sockets() {
    let (from, to) = std::os::unix::net::UnixStream::pair().unwrap();
    from.set_nonblocking(true).unwrap();
    reads_in_order(from.into(), to.into());
}

#[test]
fn a_writer_that_says_nothing_does_not_hold_a_reader_for_ever() {
    let (from, _to) = rustix::pipe::pipe().unwrap();
    let mut channel = StreamQueue::new(File::from(from), 4);
    let _ticket = channel.submit(to_host(0, 10)).unwrap();
    let start = Instant::now();
    assert_eq!(channel.wait(&mut Vec::new(), Duration::from_millis(20)), 0);
    assert!(start.elapsed() >= Duration::from_millis(20) && start.elapsed() < LONG);
    let write = Operation::write(to_host(0, 1).into_slice().unwrap(), FileOffset::new(0));
    assert_eq!(channel.submit(write).unwrap_err().reason, Refusal::Unsupported(Capabilities::FROM_HOST));
    assert_eq!(channel.submit(to_host(u64::MAX, 1)).unwrap_err().reason, Refusal::PastTheTop);
}
