//! The I/O backends, by which requests reach the kernel.

use std::collections::HashMap;
use std::time::{Duration, Instant};
use std::{fmt, io};

use dmalane_addr::Iova;
use dmalane_device::NoIommu;
use dmalane_dma::memlock_left;
use dmalane_queue::Registered;

use super::workers::Workers;
use crate::Fallback;
use crate::error::errno;
use crate::ring::{Ask, Request, Ring};

/// How requests reach the kernel, best last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum IoBackend {
    /// `pread` and `pwrite` on threads.
    Workers,
    /// io_uring.
    Uring,
    /// io_uring, with the pages of registered buffers looked up once.
    Fixed,
}

impl IoBackend {
    /// All of them, best first.
    pub const ALL: [Self; 3] = [Self::Fixed, Self::Uring, Self::Workers];
}

impl fmt::Display for IoBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Workers => "pread and pwrite on threads",
            Self::Uring => "io_uring",
            Self::Fixed => "io_uring with fixed buffers",
        })
    }
}

/// Fixed buffers of a ring, at most.
const FIXED: u16 = 64;

/// Moves requests: a backend at work.
pub(crate) enum Mover {
    Workers { workers: Workers, depth: usize, busy: usize },
    Ring { ring: Box<Ring>, fixed: Option<Fixed> },
}

/// The registrations that a ring has as fixed buffers.
#[derive(Default)]
pub(crate) struct Fixed {
    numbers: HashMap<Iova, u16>,
    /// Requests in flight with each.
    uses: HashMap<u16, usize>,
    /// Refused by the kernel: not asked again.
    refused: Vec<Iova>,
    /// [`NoIommu::undone`] when the registrations were last looked through.
    seen: u64,
    /// Why the kernel refused one.
    why: Option<Fallback>,
    /// The kernel has ever taken one.
    any: bool,
}

impl Mover {
    /// # Errors
    /// Why this backend cannot be had.
    pub fn new(backend: IoBackend, depth: usize, threads: usize) -> Result<Self, Fallback> {
        Ok(match backend {
            IoBackend::Workers => {
                let workers = Workers::new(threads).map_err(|e| Fallback::Thread(errno(&e)))?;
                Self::Workers { workers, depth, busy: 0 }
            }
            IoBackend::Uring => Self::Ring { ring: Box::new(Ring::new(depth)?), fixed: None },
            IoBackend::Fixed => {
                Self::Ring { ring: Box::new(Ring::with_fixed(depth, FIXED)?), fixed: Some(Fixed::default()) }
            }
        })
    }

    /// True when no further request fits.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Workers { depth, busy, .. } => busy >= depth,
            Self::Ring { ring, .. } => ring.is_full() || ring.is_dead(),
        }
    }

    /// Requests that were pushed and not reaped.
    pub fn busy(&self) -> usize {
        match self {
            Self::Workers { busy, .. } => *busy,
            Self::Ring { ring, .. } => ring.busy(),
        }
    }

    /// Takes a request, with the registration of its buffer if there is one; gives it back when there is no room.
    pub fn push(&mut self, mut request: Request, via: Option<(&Registered, &NoIommu)>) -> Result<(), Request> {
        match self {
            Self::Workers { .. } if self.is_full() => Err(request),
            Self::Workers { workers, busy, .. } => {
                *busy += 1;
                workers.push(request);
                Ok(())
            }
            Self::Ring { ring, .. } if ring.is_full() || ring.is_dead() => Err(request),
            Self::Ring { ring, fixed } => {
                if let (Some(fixed), Some((via, registrar))) = (fixed, via) {
                    request.ask = fixed.ask(ring, &request, via, registrar);
                }
                ring.push(request)
            }
        }
    }

    /// Tells the kernel about everything that was pushed, and waits for a completion at most as long as `wait` says.
    ///
    /// # Errors
    /// When the kernel refuses: this backend is not usable any more.
    pub fn enter(&mut self, wait: Option<Duration>) -> Result<(), Fallback> {
        match self {
            Self::Workers { workers, .. } => {
                if let Some(timeout) = wait {
                    workers.wait(timeout);
                }
                Ok(())
            }
            Self::Ring { ring, .. } => ring.enter(wait).map_err(|e| Fallback::RingFailed(errno(&e))),
        }
    }

    /// The next request that has ended, with its result.
    pub fn reap(&mut self) -> Option<(Request, i32)> {
        match self {
            Self::Workers { workers, busy, .. } => workers.reap().inspect(|_| *busy -= 1),
            Self::Ring { ring, fixed } => ring.reap().inspect(|(request, _)| {
                if let (Some(fixed), Ask::ReadFixed(n) | Ask::WriteFixed(n)) = (fixed, request.ask)
                    && let Some(uses) = fixed.uses.get_mut(&n)
                {
                    *uses -= 1;
                }
            }),
        }
    }

    /// Asks the kernel to cancel what it can, and gives back what it has not begun.
    pub fn cancel_all(&mut self) -> Vec<Request> {
        match self {
            Self::Workers { workers, busy, .. } => {
                let back = workers.take_back();
                *busy -= back.len();
                back
            }
            Self::Ring { ring, .. } => {
                ring.cancel_all();
                std::iter::from_fn(|| ring.take_back()).collect()
            }
        }
    }

    /// Frees fixed buffers whose registrations are gone.
    pub fn release_stale(&mut self, registrar: &NoIommu) {
        if let Self::Ring { ring, fixed: Some(fixed) } = self {
            fixed.release_stale(ring, registrar);
        }
    }

    /// Why requests do not use fixed buffers although they should, and the backend that they use on the whole.
    pub fn failure(&self) -> Option<(&Fallback, IoBackend)> {
        match self {
            Self::Ring { fixed: Some(fixed), .. } => {
                Some((fixed.why.as_ref()?, if fixed.any { IoBackend::Fixed } else { IoBackend::Uring }))
            }
            _ => None,
        }
    }

    /// Moves some requests, each once, and waits for all of them.
    ///
    /// # Errors
    /// When one has not ended in time; the mover still has it.
    pub fn all(&mut self, requests: Vec<Request>, timeout: Duration) -> Result<Vec<(Request, i32)>, Fallback> {
        let deadline = Instant::now() + timeout;
        let (mut left, mut ended) = (requests.into_iter().peekable(), Vec::new());
        while left.peek().is_some() || self.busy() > 0 {
            while !self.is_full()
                && let Some(request) = left.next()
            {
                // There is room: it was asked for just now.
                let _ = self.push(request, None);
            }
            self.enter(Some(deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(100))))?;
            ended.extend(std::iter::from_fn(|| self.reap()));
            if self.busy() > 0 && Instant::now() >= deadline {
                self.cancel_all();
                return Err(Fallback::NoAnswer(timeout));
            }
        }
        Ok(ended)
    }
}

impl Mover {
    /// Cancels and drops all that was pushed; false when some has not ended in time.
    pub fn settle(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        if self.busy() > 0 {
            self.cancel_all();
        }
        while self.busy() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            // A ring that cannot be entered does not report its requests.
            if left.is_zero() || self.enter(Some(left.min(Duration::from_millis(100)))).is_err() {
                while self.reap().is_some() {}
                return self.busy() == 0;
            }
            while self.reap().is_some() {}
        }
        true
    }
}

impl Fixed {
    /// The form of a request that uses the registration's fixed buffer, if it can have one.
    fn ask(&mut self, ring: &Ring, request: &Request, via: &Registered, registrar: &NoIommu) -> Ask {
        self.release_stale(ring, registrar);
        let iova = via.mapping().span().first();
        let number = match self.numbers.get(&iova) {
            Some(number) => *number,
            None if self.refused.contains(&iova) => return request.ask,
            None => {
                let Some(free) = (0..FIXED).find(|n| !self.numbers.values().any(|used| used == n)) else {
                    return request.ask;
                };
                if let Err(e) = ring.fix(free, &request.slice, via.mapping().pinned().range()) {
                    self.why.get_or_insert_with(|| {
                        let left = (e.kind() == io::ErrorKind::OutOfMemory).then(memlock_left).flatten();
                        Fallback::FixedBuffer { errno: errno(&e), left }
                    });
                    self.refused.push(iova);
                    return request.ask;
                }
                self.any = true;
                self.numbers.insert(iova, free);
                self.uses.insert(free, 0);
                free
            }
        };
        *self.uses.entry(number).or_default() += 1;
        if request.ask.is_write() { Ask::WriteFixed(number) } else { Ask::ReadFixed(number) }
    }

    fn release_stale(&mut self, ring: &Ring, registrar: &NoIommu) {
        let now = registrar.undone();
        if now == self.seen {
            return;
        }
        let mut all = true;
        self.refused.retain(|iova| registrar.is_live(*iova));
        self.numbers.retain(|iova, number| {
            if registrar.is_live(*iova) {
                return true;
            }
            // A request in flight keeps the pages itself; its number is free once it has ended.
            let idle = self.uses.get(number).is_none_or(|n| *n == 0);
            all &= idle;
            !(idle && ring.unfix(*number).is_ok())
        });
        if all {
            self.seen = now;
        }
    }
}
