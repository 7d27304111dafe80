//! The ways in which requests reach the kernel.

use std::time::{Duration, Instant};

use super::workers::Workers;
use crate::Fallback;
use crate::error::errno;
use crate::ring::{Request, Ring};

/// Moves requests: by `pread` and `pwrite` on threads, or through io_uring.
pub(crate) enum Mover {
    Workers { workers: Workers, depth: usize, busy: usize },
    Ring(Box<Ring>),
}

impl Mover {
    /// Threads, for `depth` requests at once.
    ///
    /// # Errors
    /// When none can be started.
    pub fn workers(depth: usize, threads: usize) -> Result<Self, Fallback> {
        let workers = Workers::new(threads).map_err(|e| Fallback::Thread(errno(&e)))?;
        Ok(Self::Workers { workers, depth, busy: 0 })
    }

    /// A ring, for `depth` requests at once.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn ring(depth: usize) -> Result<Self, Fallback> {
        Ok(Self::Ring(Box::new(Ring::new(depth)?)))
    }

    /// True when no further request fits.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Workers { depth, busy, .. } => busy >= depth,
            Self::Ring(ring) => ring.is_full() || ring.is_dead(),
        }
    }

    /// Requests that were pushed and not reaped.
    pub fn busy(&self) -> usize {
        match self {
            Self::Workers { busy, .. } => *busy,
            Self::Ring(ring) => ring.busy(),
        }
    }

    /// Takes a request; gives it back when there is no room.
    pub fn push(&mut self, request: Request) -> Result<(), Request> {
        if self.is_full() {
            return Err(request);
        }
        match self {
            Self::Workers { workers, busy, .. } => {
                *busy += 1;
                workers.push(request);
                Ok(())
            }
            Self::Ring(ring) => ring.push(request),
        }
    }

    /// Tells the kernel about everything that was pushed, and waits for a completion at most as long as `wait` says.
    ///
    /// # Errors
    /// When the kernel refuses: this mover is not usable any more.
    pub fn enter(&mut self, wait: Option<Duration>) -> Result<(), Fallback> {
        match self {
            Self::Workers { workers, .. } => {
                if let Some(timeout) = wait {
                    workers.wait(timeout);
                }
                Ok(())
            }
            Self::Ring(ring) => ring.enter(wait).map_err(|e| Fallback::RingFailed(errno(&e))),
        }
    }

    /// The next request that has ended, with its result.
    pub fn reap(&mut self) -> Option<(Request, i32)> {
        match self {
            Self::Workers { workers, busy, .. } => workers.reap().inspect(|_| *busy -= 1),
            Self::Ring(ring) => ring.reap(),
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
            Self::Ring(ring) => {
                ring.cancel_all();
                std::iter::from_fn(|| ring.take_back()).collect()
            }
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
                let _ = self.push(request);
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
