//! Eventfds of a device's interrupts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

/// One eventfd for each interrupt of a device: what a bus needs to implement [`Mmio::wait`](crate::Mmio::wait)
/// and [`Mmio::event`](crate::Mmio::event).
pub struct InterruptEvents {
    events: Vec<OwnedFd>,
    /// The eventfds that [`InterruptEvents::lend`] returned, which their borrowers read.
    lent: Vec<AtomicBool>,
}

impl InterruptEvents {
    /// Creates `count` eventfds that do not block and count from 0.
    ///
    /// # Errors
    /// The kernel's, such as too many open files.
    pub fn new(count: u32) -> io::Result<Self> {
        let new = || Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let events = (0..count).map(|_| new()).collect::<io::Result<Vec<_>>>()?;
        let lent = events.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Self { events, lent })
    }

    /// The eventfds, in the order of the interrupts.
    pub fn events(&self) -> &[OwnedFd] {
        &self.events
    }

    /// Waits until an interrupt is raised, for at most `timeout`; true when one was. Resets the counts, except those of
    /// lent eventfds, which their borrowers read.
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut polls: Vec<_> = self.events.iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
        let timeout = timeout.try_into().ok();
        if !matches!(rustix::event::poll(&mut polls, timeout.as_ref()), Ok(1..)) {
            return false;
        }
        let raised: Vec<bool> = polls.iter().map(|poll| poll.revents().contains(PollFlags::IN)).collect();
        for ((event, lent), raised) in self.events.iter().zip(&self.lent).zip(raised) {
            if raised && !lent.load(Ordering::Relaxed) {
                // Another thread may have read it meanwhile.
                let _ = rustix::io::read(event, &mut [0; 8]);
            }
        }
        true
    }

    /// Lends the eventfd of an interrupt to a caller that will read it; numbers past the end share the last one. `None`
    /// when there are no interrupts.
    pub fn lend(&self, number: usize) -> Option<BorrowedFd<'_>> {
        let at = number.min(self.events.len().checked_sub(1)?);
        self.lent[at].store(true, Ordering::Relaxed);
        Some(self.events[at].as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_events_are_not_reset() {
        let interrupts = InterruptEvents::new(2).unwrap();
        let raise = |n: usize| rustix::io::write(&interrupts.events()[n], &1u64.to_ne_bytes()).unwrap();
        let now = Duration::from_millis(1);
        assert!(!interrupts.wait(now));
        raise(0);
        assert!(interrupts.wait(now) && !interrupts.wait(now), "reset");
        let lent = interrupts.lend(1).unwrap();
        raise(1);
        assert!(interrupts.wait(now) && interrupts.wait(now), "not reset");
        let mut count = [0; 8];
        rustix::io::read(lent, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(!interrupts.wait(now));
        assert!(interrupts.lend(99).is_some() && InterruptEvents::new(0).unwrap().lend(0).is_none());
    }
}
