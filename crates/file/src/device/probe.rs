//! Finding out whether requests do what they say: writes and reads back at an address that is not 0.
//!
//! Looks for known faults of drivers: data at the wrong address (a stock XDMA driver's asynchronous
//! calls use the offset within the memory instead of that within the file, so they go to address 0), completions that
//! count something else than bytes (a stock QDMA driver's say 1 for one range of memory), requests that never end. What
//! was there is put back.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dmalane_dma::{AnonHeap, BufferSlice, Heap};

use super::backend::Mover;
use crate::Fallback;
use crate::ring::{Ask, Request};

/// Bytes of a block, and of a probe.
const BLOCK: usize = 4096;
pub(crate) const LEN: usize = 4 * BLOCK;
/// Timeout of each step of a probe.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The unit in which a completion counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Count {
    /// Bytes, as it should.
    Bytes,
    /// 1 for a request that was done.
    Requests,
}

/// Moves requests, each once, and waits for all: a [`Mover`], or a driver with a known fault in a test.
pub(crate) trait Moves {
    fn all(&mut self, requests: Vec<Request>) -> Result<Vec<(Request, i32)>, Fallback>;

    /// Waits for requests that have not ended in time, whatever becomes of them; false when some still have not.
    fn settle(&mut self) -> bool {
        true
    }
}

impl Moves for Mover {
    fn all(&mut self, requests: Vec<Request>) -> Result<Vec<(Request, i32)>, Fallback> {
        Mover::all(self, requests, TIMEOUT)
    }

    fn settle(&mut self) -> bool {
        Mover::settle(self, TIMEOUT)
    }
}

/// A device to be probed.
pub(crate) struct Target<'a> {
    pub h2c: &'a Arc<File>,
    pub c2h: &'a Arc<File>,
    /// Where: at least [`LEN`], so that it does not overlap with what lies at 0.
    pub at: u64,
}

/// Why what was tried is not to be used, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ProbeError {
    /// It does not do what it should.
    Unfit(String),
    /// The bytes from before the probe are lost, or may still be there.
    Damage(String),
}

/// Probes one mover with the help of one that is trusted (which may be the same kind).
///
/// # Errors
/// Why the one that was tried is not to be used.
pub(crate) fn probe(target: &Target<'_>, safe: &mut dyn Moves, tried: &mut dyn Moves) -> Result<Count, ProbeError> {
    let mut probe = Probe { target, safe, tried, count: None };
    let unread = |at: u64| move |why| ProbeError::Unfit(format!("what is at {at:#x} cannot be read: {why}"));
    let here = probe.safe_read(target.at).map_err(unread(target.at))?;
    let zero = probe.safe_read(0).map_err(unread(0))?;
    let found = probe.run();
    let damage = |what: String| {
        let before = found.as_ref().err().map_or(String::new(), |found| format!("; found: {found}"));
        Err(ProbeError::Damage(what + &before))
    };
    // A request that ends late must not overwrite the bytes that are put back.
    if !(probe.tried.settle() & probe.safe.settle()) {
        let at = target.at;
        return damage(format!("the request still is with the kernel, so what was at {at:#x} and 0 was not put back"));
    }
    // Put back whatever was found, and look.
    for (at, bytes) in [(target.at, &here), (0, &zero)] {
        let now = probe.safe_read(at);
        if now.as_ref() != Ok(bytes) {
            let back = probe.safe_write(at, bytes).and_then(|()| probe.safe_read(at));
            if back.as_ref() != Ok(bytes) {
                return damage(format!("what was at {at:#x} cannot be put back"));
            }
        }
    }
    found.map_err(ProbeError::Unfit)?;
    Ok(probe.count.unwrap_or(Count::Bytes))
}

struct Probe<'a> {
    target: &'a Target<'a>,
    safe: &'a mut dyn Moves,
    tried: &'a mut dyn Moves,
    count: Option<Count>,
}

impl Probe<'_> {
    fn run(&mut self) -> Result<(), String> {
        let at = self.target.at;
        let zero = self.safe_read(0)?;
        // In one request of several blocks, and in several at once.
        for (seed, fragments) in [(1, 1), (2, LEN / BLOCK)] {
            let bytes = pattern(seed);
            self.try_all(true, &bytes, fragments)?;
            let (there, at_zero) = (self.safe_read(at)?, self.safe_read(0)?);
            if at_zero != zero {
                return Err(format!("a write to {at:#x} went to address 0"));
            }
            if there != bytes {
                return Err(format!("a write to {at:#x} did not arrive there"));
            }
            // Other bytes than the request would find if it read what was just written.
            let bytes = pattern(seed + 100);
            self.safe_write(at, &bytes)?;
            let got = self.try_all(false, &bytes, fragments)?;
            if got != bytes {
                let instead = if got == zero { " but those at address 0" } else { "" };
                return Err(format!("a read from {at:#x} did not bring the bytes that are there{instead}"));
            }
        }
        Ok(())
    }

    /// Moves the bytes by what is tried, and gives those that it read.
    fn try_all(&mut self, write: bool, bytes: &[u8], fragments: usize) -> Result<Vec<u8>, String> {
        let mut slice = fresh()?;
        if write {
            slice.write(0, bytes).ok_or(NO_MEMORY)?;
        }
        let (call, at) = (if write { "a write" } else { "a read" }, self.target.at);
        let requests = self.requests(slice, at, fragments, write);
        let mut ended = self.tried.all(requests).map_err(undone(call, at))?;
        for (request, result) in &ended {
            let count = match result {
                1 => Count::Requests,
                _ => answered(call, request, *result)?,
            };
            if *self.count.get_or_insert(count) != count {
                let len = request.slice.len();
                return Err(format!("{call} of {len} bytes was answered once with its length and once with 1"));
            }
        }
        ended.sort_by_key(|(request, _)| request.index);
        bytes_of(ended)
    }

    fn safe_read(&mut self, at: u64) -> Result<Vec<u8>, String> {
        let requests = self.requests(fresh()?, at, 1, false);
        bytes_of(self.safe_all("pread", at, requests)?)
    }

    fn safe_write(&mut self, at: u64, bytes: &[u8]) -> Result<(), String> {
        let mut slice = fresh()?;
        slice.write(0, bytes).ok_or(NO_MEMORY)?;
        let requests = self.requests(slice, at, 1, true);
        self.safe_all("pwrite", at, requests).map(drop)
    }

    /// Moves requests by what is trusted, each as a whole.
    fn safe_all(&mut self, call: &str, at: u64, requests: Vec<Request>) -> Result<Vec<(Request, i32)>, String> {
        let ended = self.safe.all(requests).map_err(undone(call, at))?;
        ended.iter().try_for_each(|(request, result)| answered(call, request, *result).map(drop))?;
        Ok(ended)
    }

    fn requests(&self, slice: BufferSlice, at: u64, fragments: usize, write: bool) -> Vec<Request> {
        let (ask, file) = if write { (Ask::Write, self.target.h2c) } else { (Ask::Read, self.target.c2h) };
        let (step, mut rest) = (slice.len() / fragments, slice);
        let mut cut = || rest.split_off_front(step);
        let cut = (0..fragments).map_while(|_| cut());
        cut.enumerate()
            .map(|(index, slice)| {
                let at = at + (index * step) as u64;
                Request { ask, op: 0, index, direct: false, file: file.clone(), slice, at, done: 0 }
            })
            .collect()
    }
}

/// Exactly a probe's bytes of memory, aligned as direct I/O may want it.
fn fresh() -> Result<BufferSlice, String> {
    let buf = AnonHeap::new().allocate(LEN).ok();
    Ok(buf.and_then(|buf| buf.share().into_slice().split_off_front(LEN)).ok_or(NO_MEMORY)?)
}

const NO_MEMORY: &str = "no memory for a probe";

/// The reason where the kernel did not do a request.
fn undone(call: &str, at: u64) -> impl Fn(Fallback) -> String {
    move |source| format!("{call} at {at:#x}: {source}")
}

/// Checks that a request was answered with its length.
fn answered(call: &str, request: &Request, answer: i32) -> Result<Count, String> {
    let (len, at) = (request.slice.len(), request.at);
    match usize::try_from(answer) {
        Ok(n) if n == len => Ok(Count::Bytes),
        Ok(_) => Err(format!("{call} of {len} bytes at {at:#x} was answered with {answer}")),
        Err(_) => {
            let error = io::Error::from_raw_os_error(-answer);
            Err(format!("{call} of {len} bytes at {at:#x} failed: {error}"))
        }
    }
}

fn bytes_of(ended: Vec<(Request, i32)>) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(LEN);
    for (request, _) in ended {
        let mut these = vec![0; request.slice.len()];
        request.slice.read(0, &mut these).ok_or(NO_MEMORY)?;
        bytes.extend(these);
    }
    Ok(bytes)
}

/// Bytes that are the same nowhere else within the probe nor in another one.
fn pattern(seed: u64) -> Vec<u8> {
    let word = |i: u64| (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_le_bytes();
    (0..LEN as u64 / 8).flat_map(word).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// The fault of a scripted driver.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Fault {
        None,
        /// As stock XDMA's asynchronous calls: the device address is the offset in the memory.
        AddressZero,
        ReadsFromZero,
        /// As stock QDMA's: the number of fragments of memory.
        CountsRequests,
        CountsRequestsOfReads,
        CountsShort,
        CountsLong,
        /// An error that becomes 0.
        ErrorAsZero,
        /// Only the first block is done, and all is reported.
        FirstLengthOnly,
        Fails,
        Stuck,
        /// A write is done, but only after the time is over.
        Late,
        /// A write is never known to be done.
        Never,
        /// Writes do nothing.
        Deaf,
        /// All addresses are the first block.
        Wraps,
        /// A write of what was there before fails, as on a disk with a bad sector.
        NotBack,
    }

    /// A device, and a write that it has still to do.
    struct Driver(Fault, Rc<RefCell<Vec<u8>>>, Option<Request>);

    impl Moves for Driver {
        fn all(&mut self, requests: Vec<Request>) -> Result<Vec<(Request, i32)>, Fallback> {
            let mut memory = self.1.borrow_mut();
            let mut ended = Vec::new();
            for mut request in requests {
                let (len, write) = (request.slice.len(), request.ask == Ask::Write);
                let first = request.index * len;
                let (mut at, mut n, mut result) = (request.at as usize, len, len as i32);
                match self.0 {
                    Fault::None => {}
                    Fault::AddressZero => at = first,
                    Fault::ReadsFromZero if !write => at = first,
                    Fault::CountsRequests => result = 1,
                    Fault::CountsRequestsOfReads if !write => result = 1,
                    Fault::CountsShort => result -= 8,
                    Fault::CountsLong => result += 8,
                    Fault::ErrorAsZero => (n, result) = (0, 0),
                    Fault::FirstLengthOnly => n = n.min(BLOCK),
                    Fault::Fails => result = -5,
                    Fault::Stuck => return Err(Fallback::NoAnswer(TIMEOUT)),
                    Fault::Late | Fault::Never => {
                        self.2 = Some(request);
                        return Err(Fallback::NoAnswer(TIMEOUT));
                    }
                    Fault::Deaf if write => n = 0,
                    Fault::Wraps => at %= BLOCK,
                    Fault::NotBack if write => {
                        let mut bytes = vec![0; len];
                        request.slice.read(0, &mut bytes).unwrap();
                        if bytes == contents()[at..at + len] {
                            (n, result) = (0, -5);
                        }
                    }
                    _ => {}
                }
                if write {
                    let mut bytes = vec![0; n];
                    request.slice.read(0, &mut bytes).unwrap();
                    memory[at..at + n].copy_from_slice(&bytes);
                } else {
                    request.slice.write(0, &memory[at..at + n]).unwrap();
                }
                ended.push((request, result));
            }
            ended.reverse(); // in whatever order
            Ok(ended)
        }

        fn settle(&mut self) -> bool {
            if let Some(late) = self.2.take() {
                let at = late.at as usize;
                late.slice.read(0, &mut self.1.borrow_mut()[at..at + late.slice.len()]).unwrap();
            }
            self.0 != Fault::Never
        }
    }

    fn contents() -> Vec<u8> {
        (0..1 << 20).map(|i: u32| (i ^ i >> 9) as u8).collect()
    }

    fn probe_of(fault: Fault, safe: Fault) -> (Result<Count, ProbeError>, bool) {
        let before = contents();
        let memory = Rc::new(RefCell::new(before.clone()));
        let file = Arc::new(File::open("/dev/null").unwrap());
        let target = Target { h2c: &file, c2h: &file, at: 0x8000 };
        let driver = |fault| Driver(fault, memory.clone(), None);
        let found = probe(&target, &mut driver(safe), &mut driver(fault));
        let same = *memory.borrow() == before;
        (found, same)
    }

    #[test]
    fn each_documented_fault_is_found_and_the_memory_put_back() {
        let cases = [
            (Fault::None, Ok(Count::Bytes)),
            (Fault::CountsRequests, Ok(Count::Requests)),
            (Fault::AddressZero, Err("a write to 0x8000 went to address 0")),
            (Fault::ReadsFromZero, Err("but those at address 0")),
            (Fault::CountsRequestsOfReads, Err("once with its length and once with 1")),
            (Fault::CountsShort, Err("was answered with 16376")),
            (Fault::CountsLong, Err("was answered with 16392")),
            (Fault::ErrorAsZero, Err("was answered with 0")),
            (Fault::FirstLengthOnly, Err("did not arrive")),
            (Fault::Fails, Err("Input/output error")),
            (Fault::Stuck, Err("no answer within 5s")),
            (Fault::Late, Err("no answer within 5s")),
            (Fault::Deaf, Err("did not arrive")),
            (Fault::Wraps, Err("went to address 0")),
        ];
        for (fault, expected) in cases {
            let (found, same) = probe_of(fault, Fault::None);
            match expected {
                Ok(count) => assert_eq!(found, Ok(count), "{fault:?}"),
                Err(why) => {
                    let Err(ProbeError::Unfit(said)) = found else { panic!("{fault:?}: {found:?}") };
                    assert!(said.contains(why), "{fault:?}: {said}");
                }
            }
            assert!(same, "{fault:?}: what was there is there again");
        }
    }

    #[test]
    fn what_cannot_be_put_back_is_not_just_a_reason() {
        let (found, same) = probe_of(Fault::None, Fault::NotBack);
        assert_eq!(found, Err(ProbeError::Damage("what was at 0x8000 cannot be put back".to_owned())));
        assert!(!same);
    }

    #[test]
    fn what_never_ends_is_not_raced() {
        let (found, _) = probe_of(Fault::Never, Fault::None);
        let Err(ProbeError::Damage(said)) = found else { panic!("{found:?}") };
        assert!(said.contains("still is with the kernel") && said.contains("; found: a write at 0x8000"), "{said}");
        assert!(said.ends_with("no answer within 5s"), "{said}");
    }

    #[test]
    fn a_device_whose_plain_calls_do_not_work_is_no_device() {
        for fault in [Fault::CountsShort, Fault::ErrorAsZero, Fault::Fails, Fault::Stuck, Fault::CountsRequests] {
            let (found, same) = probe_of(fault, fault);
            assert!(found.is_err() && same, "{fault:?}: {found:?}");
        }
        let (found, _) = probe_of(Fault::Wraps, Fault::Wraps);
        assert_eq!(found, Err(ProbeError::Unfit("a write to 0x8000 went to address 0".to_owned())));
        let (found, _) = probe_of(Fault::Deaf, Fault::Deaf);
        assert_eq!(found, Err(ProbeError::Unfit("a write to 0x8000 did not arrive there".to_owned())));
    }
}
