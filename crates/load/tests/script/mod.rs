//! A queue over bytes in memory that reorders, and fails by script.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_load::fill::{Extent, Job, Target, Targets};
use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, Limits, OpError, Operation, Queue, QueueAddr, Refusal, Refused, StopReason,
    Ticket, Work,
};

/// Each buffer goes to one place as a whole.
#[allow(dead_code)] // not all of the tests that share this file have a device
pub struct Places(pub Vec<DeviceAddr>);

impl Targets for Places {
    fn buffers(&self) -> usize {
        self.0.len()
    }

    fn cut(&self, buffer: usize, range: Range<u64>, max_len: u64, out: &mut VecDeque<Target>) -> Result<(), Refusal> {
        let mut at = range.start;
        while at < range.end {
            let len = max_len.min(range.end - at);
            let to = self.0[buffer].advance(at).ok_or(Refusal::PastTheTop)?;
            out.push_back(Target { len, to: Some(to) });
            at += len;
        }
        Ok(())
    }
}

/// The fault when the byte at an offset is read.
#[derive(Clone, PartialEq, Debug)]
#[allow(dead_code)] // one of the tests that share this file needs none of them
pub enum Fault {
    /// The kernel fails the read.
    Errno(i32),
    /// The file ends there.
    End,
    /// The queue refuses everything from then on.
    Dead,
}

/// Slices that queues have taken and not given back, over all of them.
pub static HELD: AtomicUsize = AtomicUsize::new(0);

/// A source in memory.
pub struct Script {
    bytes: Arc<Vec<u8>>,
    faults: Vec<(u64, Fault)>,
    capacity: usize,
    random: u64,
    waiting: Vec<(Ticket, Operation<FileOffset>)>,
    next: u64,
    dead: bool,
}

impl Script {
    pub fn new(bytes: Arc<Vec<u8>>, capacity: usize, seed: u64, faults: Vec<(u64, Fault)>) -> Self {
        Self { bytes, faults, capacity, random: seed | 1, waiting: Vec::new(), next: 0, dead: false }
    }

    fn pick(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % n
    }

    /// The first fault within a read, as the error that a file queue would give.
    pub fn error(fault: &Fault, at: u64, end: u64) -> OpError {
        match fault {
            Fault::Errno(errno) => OpError::Io { at: FileOffset::new(at), errno: *errno },
            Fault::End => OpError::EndOfFile { at: FileOffset::new(at), missing: end - at },
            Fault::Dead => OpError::Stopped(StopReason::Requested("by script".into())),
        }
    }

    fn end_one(&mut self) -> Completion<FileOffset> {
        let i = self.pick(self.waiting.len());
        let (ticket, mut operation) = self.waiting.swap_remove(i);
        let len = operation.bytes();
        let Work::Copy { at, host, .. } = &mut operation.work else { panic!("a read") };
        let (at, end) = (at.bits(), at.bits() + len);
        let hit = self.faults.iter().filter(|(place, _)| (at..end).contains(place)).min_by_key(|(place, _)| *place);
        let result = match hit {
            Some((place, fault)) => {
                self.dead |= *fault == Fault::Dead;
                Err(Self::error(fault, *place, end))
            }
            None => {
                host.slice.write(0, &self.bytes[at as usize..end as usize]).unwrap();
                Ok(())
            }
        };
        HELD.fetch_sub(1, Ordering::Relaxed);
        let bytes = if result.is_ok() { len } else { 0 };
        Completion { ticket, operation, result, bytes }
    }
}

impl Queue for Script {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, max_len: u64::MAX, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::TO_HOST
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        let reason = match () {
            () if self.dead => Refusal::Stopped(StopReason::Requested("by script".into())),
            () if self.waiting.len() >= self.capacity => Refusal::Full,
            () => {
                self.next += 1;
                HELD.fetch_add(1, Ordering::Relaxed);
                self.waiting.push((Ticket::new(self.next), operation));
                return Ok(Ticket::new(self.next));
            }
        };
        Err(Refused { operation, reason })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        if self.waiting.is_empty() || self.pick(3) == 0 {
            return 0;
        }
        let n = 1 + self.pick(self.waiting.len());
        for _ in 0..n {
            let ended = self.end_one();
            done.push(ended);
        }
        n
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, _: Duration) -> usize {
        if self.waiting.is_empty() {
            return 0;
        }
        let ended = self.end_one();
        done.push(ended);
        1
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        HELD.fetch_sub(self.waiting.len(), Ordering::Relaxed);
    }
}

/// Numbers from a seed.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n.max(1)
    }
}

pub fn noise(seed: u64, len: usize) -> Arc<Vec<u8>> {
    let mut random = Random(seed);
    Arc::new((0..len).map(|_| random.below(256) as u8).collect())
}

/// The contents of buffers after a job: the slow version.
#[allow(dead_code)] // one of the tests that share this file needs none of them
pub fn naive(job: &Job, sources: &[Arc<Vec<u8>>]) -> Vec<Vec<u8>> {
    let mut buffers: Vec<Vec<u8>> = job.buffers.iter().map(|len| vec![0; *len as usize]).collect();
    for e in &job.extents {
        let from = &sources[e.source][e.at.bits() as usize..][..e.len as usize];
        buffers[e.buffer][e.to as usize..][..e.len as usize].copy_from_slice(from);
    }
    buffers
}

/// Extents scattered over some buffers, with gaps, in no order.
#[allow(dead_code)] // one of the tests that share this file needs none of them
pub fn random_job(random: &mut Random, sources: usize, source_len: u64) -> Job {
    let mut job = Job::default();
    for buffer in 0..=random.below(3) as usize {
        let len = random.below(60_000);
        let mut to = random.below(3000);
        while to < len {
            let n = random.below(20_000).min(len - to).min(source_len);
            let at = FileOffset::new(random.below(source_len - n + 1));
            job.extents.push(Extent { source: random.below(sources as u64) as usize, at, len: n, buffer, to });
            to += n + random.below(2) * random.below(9000);
        }
        job.buffers.push(len);
    }
    for i in (1..job.extents.len()).rev() {
        job.extents.swap(i, random.below(i as u64 + 1) as usize);
    }
    job
}

/// KiB in a line of `/proc/self/status`.
#[allow(dead_code)] // not all of the tests that share this file count memory
pub fn kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
}
