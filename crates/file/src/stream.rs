//! Pipes, sockets and terminals as a channel: plain reads, one after the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_queue::{Channel, Completion, Direction, Limits, OpError, Refusal, Refused, Ticket, Transfer};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// As many bytes as a pipe holds.
const BOUNCE: usize = 64 << 10;

/// A source that has no offsets, read in order: offset 0 is the next byte that comes.
///
/// Operations are served in the order of their offsets. Bytes that nobody asked for are skipped when an operation further on is the
/// first one there is; an operation for bytes that have passed fails. Bytes take one copy more than from a file.
pub struct StreamChannel {
    file: File,
    capacity: usize,
    ops: BTreeMap<(u64, u64), (Transfer<FileOffset>, usize)>,
    position: u64,
    next: u64,
    bounce: Box<[u8]>,
}

impl StreamChannel {
    /// Reads from `file` on from where it is.
    pub fn new(file: File, capacity: usize) -> Self {
        let bounce = vec![0; BOUNCE].into_boxed_slice();
        Self { file, capacity: capacity.max(1), ops: BTreeMap::new(), position: 0, next: 0, bounce }
    }

    /// Bytes that have come so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    fn end(&mut self, key: (u64, u64), result: Result<(), OpError>, done: &mut Vec<Completion<FileOffset>>) {
        if let Some((transfer, _)) = self.ops.remove(&key) {
            done.push(Completion { ticket: Ticket::new(key.1), transfer, result });
        }
    }

    /// Is there something to read, or an end, within this time?
    fn ready(&self, timeout: Duration) -> bool {
        let timeout = Timespec { tv_sec: timeout.as_secs().min(3600) as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        // What cannot be waited for can be read at any time.
        rustix::event::poll(&mut fds, Some(&timeout)).map_or_else(|e| e != Errno::INTR, |n| n > 0)
    }

    /// One read, for the first operation.
    fn step(&mut self, done: &mut Vec<Completion<FileOffset>>) {
        let Some((&key, (transfer, filled))) = self.ops.iter_mut().next() else { return };
        let (start, len) = (key.0, transfer.part.len());
        let at = start + *filled as u64;
        if at < self.position {
            let error = OpError::Stopped(format!("the stream is at {} already", FileOffset::new(self.position)));
            return self.end(key, Err(error), done);
        }
        let skip = at - self.position;
        let want = if skip > 0 { usize::try_from(skip).unwrap_or(BOUNCE) } else { len - *filled }.min(BOUNCE);
        match self.file.read(&mut self.bounce[..want]) {
            Ok(0) => {
                let missing = start + len as u64 - self.position;
                let error = OpError::EndOfFile { at: FileOffset::new(self.position), missing };
                self.end(key, Err(error), done);
            }
            Ok(n) => {
                self.position += n as u64;
                if skip == 0 {
                    let written = transfer.part.write(*filled, &self.bounce[..n]);
                    debug_assert!(written.is_some(), "no more was read than fits");
                    *filled += n;
                    if *filled == len {
                        self.end(key, Ok(()), done);
                    }
                }
            }
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                self.end(key, Err(OpError::Io { at: FileOffset::new(at), errno }), done);
            }
        }
    }
}

impl Channel for StreamChannel {
    type Far = FileOffset;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, max_len: i64::MAX as u64 }
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn submit(&mut self, transfer: Transfer<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        let end = transfer.far.bits().checked_add(transfer.part.len() as u64);
        let reason = match end {
            _ if transfer.direction != Direction::ToHost => Refusal::Unsupported(transfer.direction),
            _ if transfer.part.is_empty() => Refusal::Empty,
            None => Refusal::PastTheTop,
            _ if self.ops.len() >= self.capacity => Refusal::Full,
            _ => {
                let id = self.next;
                self.next += 1;
                self.ops.insert((transfer.far.bits(), id), (transfer, 0));
                return Ok(Ticket::new(id));
            }
        };
        Err(Refused { transfer, reason })
    }

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        let before = done.len();
        while !self.ops.is_empty() && done.len() == before && self.ready(Duration::ZERO) {
            self.step(done);
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ended = self.poll(done);
            let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
            if ended > 0 || self.ops.is_empty() || left.is_zero() {
                return ended;
            }
            self.ready(left);
        }
    }
}

impl std::fmt::Debug for StreamChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamChannel(at {}, {} in flight)", FileOffset::new(self.position), self.ops.len())
    }
}
