//! Interrupts of a device as eventfds.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

/// One eventfd for each interrupt.
pub(crate) struct Interrupts {
    events: Vec<OwnedFd>,
    /// Those that somebody else reads too.
    lent: Vec<AtomicBool>,
}

/// A new eventfd that counts from 0.
pub(crate) fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Interrupts {
    /// `count` of them.
    pub(crate) fn new(count: u32) -> io::Result<Self> {
        let events = (0..count).map(|_| event()).collect::<io::Result<Vec<_>>>()?;
        let lent = events.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Self { events, lent })
    }

    /// The eventfds, by number.
    pub(crate) fn events(&self) -> &[OwnedFd] {
        &self.events
    }

    /// Waits until one has counted, at most so long. Of one that was lent only looks: whoever has it reads it.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let mut polls: Vec<_> = self.events.iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
        let timeout = timeout.try_into().ok();
        if !matches!(rustix::event::poll(&mut polls, timeout.as_ref()), Ok(1..)) {
            return false;
        }
        let counted: Vec<bool> = polls.iter().map(|poll| poll.revents().contains(PollFlags::IN)).collect();
        for ((event, lent), counted) in self.events.iter().zip(&self.lent).zip(counted) {
            if counted && !lent.load(Ordering::Relaxed) {
                // Another thread may have read it meanwhile.
                let _ = rustix::io::read(event, &mut [0; 8]);
            }
        }
        true
    }

    /// Lends the eventfd of an interrupt; who has none of his own gets the last.
    pub(crate) fn lend(&self, number: usize) -> Option<BorrowedFd<'_>> {
        let at = number.min(self.events.len().checked_sub(1)?);
        self.lent[at].store(true, Ordering::Relaxed);
        Some(self.events[at].as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lent_is_not_read() {
        let interrupts = Interrupts::new(2).unwrap();
        let raise = |n: usize| rustix::io::write(&interrupts.events()[n], &1u64.to_ne_bytes()).unwrap();
        let now = Duration::from_millis(1);
        assert!(!interrupts.wait(now));
        raise(0);
        assert!(interrupts.wait(now) && !interrupts.wait(now), "read");
        let lent = interrupts.lend(1).unwrap();
        raise(1);
        assert!(interrupts.wait(now) && interrupts.wait(now), "left alone");
        let mut count = [0; 8];
        rustix::io::read(lent, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(!interrupts.wait(now));
        assert!(interrupts.lend(99).is_some() && Interrupts::new(0).unwrap().lend(0).is_none());
    }
}
