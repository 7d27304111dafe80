//! Pipes and sockets, read in order.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, BufferSlice, Heap};
use dmalane_file::StreamChannel;
use dmalane_queue::{Channel, Direction, OpError, Refusal, Transfer, drain};

const LONG: Duration = Duration::from_secs(30);

fn to_host(at: u64, len: usize) -> Transfer<FileOffset> {
    let part = AnonHeap::new().allocate(len).unwrap().share().into_part().split_at(len).unwrap().0;
    Transfer { part, direction: Direction::ToHost, far: FileOffset::new(at) }
}

fn bytes(part: &BufferSlice) -> Vec<u8> {
    let mut bytes = vec![0; part.len()];
    part.read(0, &mut bytes).unwrap();
    bytes
}

fn reads_in_order(from: OwnedFd, to: OwnedFd) {
    let data: Vec<u8> = (0..1_000_000u32).map(|i| (i ^ i >> 8) as u8).collect();
    let mut channel = StreamChannel::new(File::from(from), 4);
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
    let order: Vec<u64> = done.iter().map(|c| c.transfer.far.bits()).collect();
    assert_eq!(order, [0, 200_000, 500_000, 900_000]);
    for c in &done[..3] {
        let at = c.transfer.far.bits() as usize;
        assert_eq!(c.result, Ok(()));
        assert!(bytes(&c.transfer.part) == data[at..at + c.transfer.part.len()]);
    }
    let early = OpError::EndOfFile { at: FileOffset::new(1_000_000), missing: 100_000 };
    assert_eq!((&done[3].result, channel.position()), (&Err(early), 1_000_000));
    let _ticket = channel.submit(to_host(7, 1)).unwrap();
    let done = drain(&mut channel, LONG);
    assert!(matches!(&done[0].result, Err(OpError::Stopped(why)) if why.contains("already")));
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
    let mut channel = StreamChannel::new(File::from(from), 4);
    let _ticket = channel.submit(to_host(0, 10)).unwrap();
    let start = Instant::now();
    assert_eq!(channel.wait(&mut Vec::new(), Duration::from_millis(20)), 0);
    assert!(start.elapsed() >= Duration::from_millis(20) && start.elapsed() < LONG);
    let write = Transfer { direction: Direction::FromHost, ..to_host(0, 1) };
    assert_eq!(channel.submit(write).unwrap_err().reason, Refusal::Unsupported(Direction::FromHost));
    assert_eq!(channel.submit(to_host(u64::MAX, 1)).unwrap_err().reason, Refusal::PastTheTop);
}
