//! Pipes, sockets and terminals as a queue: plain reads, one after the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_queue::{
    Capabilities, Completion, Limits, OpError, Operation, Queue, QueueState, Refusal, Refused, Ticket, Work, wait_with,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// As many bytes as a pipe holds.
const BOUNCE: usize = 64 << 10;

/// A source that has no offsets, read in order: offset 0 is the next byte that comes.
///
/// Operations are served in the order of their offsets. Bytes before the first operation are skipped; an operation for
/// bytes that have passed fails. Bytes are copied once more than from a file.
pub struct StreamQueue {
    file: File,
    capacity: usize,
    ops: BTreeMap<(u64, u64), (Operation<FileOffset>, usize)>,
    position: u64,
    state: QueueState,
    bounce: Box<[u8]>,
}

impl StreamQueue {
    /// Reads from `file` on from where it is.
    pub fn new(file: File, capacity: usize) -> Self {
        let bounce = vec![0; BOUNCE].into_boxed_slice();
        Self {
            file,
            capacity: capacity.max(1),
            ops: BTreeMap::new(),
            position: 0,
            state: QueueState::default(),
            bounce,
        }
    }

    /// Bytes that have come so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    fn end(&mut self, key: (u64, u64), result: Result<(), OpError>, done: &mut Vec<Completion<FileOffset>>) {
        if let Some((operation, filled)) = self.ops.remove(&key) {
            let completion = Completion { ticket: Ticket::new(key.1), operation, result, bytes: filled as u64 };
            self.state.ended();
            done.push(completion);
        }
    }

    /// Is there something to read, or an end, within this time?
    fn ready(&self, timeout: Duration) -> bool {
        let timeout = Timespec { tv_sec: timeout.as_secs().min(3600) as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        // A file that cannot be polled can be read at any time.
        rustix::event::poll(&mut fds, Some(&timeout)).map_or_else(|e| e != Errno::INTR, |n| n > 0)
    }

    /// One read, for the first operation.
    fn step(&mut self, done: &mut Vec<Completion<FileOffset>>) {
        let Some((&key, (operation, filled))) = self.ops.iter_mut().next() else { return };
        let Work::Copy { host, .. } = &mut operation.work else { return };
        let (start, len) = (key.0, host.slice.len());
        let at = start + *filled as u64;
        if at < self.position {
            let error = OpError::Passed { position: FileOffset::new(self.position) };
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
                    let written = host.slice.write(*filled, &self.bounce[..n]);
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

impl Queue for StreamQueue {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, max_len: i64::MAX as u64, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::TO_HOST
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        let mut start = 0;
        let begins = |operation: &Operation<FileOffset>| match &operation.work {
            Work::Copy { host, at, .. } if at.bits().checked_add(host.slice.len() as u64).is_some() => {
                start = at.bits();
                Ok(())
            }
            _ => Err(Refusal::PastTheTop),
        };
        if let Err(reason) = self.state.check(&operation, self.capabilities(), self.limits(), begins) {
            return Err(Refused { operation, reason });
        }
        let ticket = self.state.accept();
        self.ops.insert((start, ticket.number()), (operation, 0));
        Ok(ticket)
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        let before = done.len();
        while !self.ops.is_empty() && done.len() == before && self.ready(Duration::ZERO) {
            self.step(done);
        }
        done.len() - before
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        wait_with(self, done, timeout, |this, left| {
            this.ready(left);
        })
    }
}

impl std::fmt::Debug for StreamQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamQueue(at {}, {} in flight)", FileOffset::new(self.position), self.ops.len())
    }
}
