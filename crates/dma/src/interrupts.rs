//! Eventfds of a device's interrupts.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

/// One eventfd for each interrupt of a device: what a bus needs to implement [`Mmio::wait`](crate::Mmio::wait).
pub struct InterruptEvents(Vec<OwnedFd>);

impl InterruptEvents {
    /// Creates `count` eventfds that do not block and count from 0.
    ///
    /// # Errors
    /// The kernel's, such as too many open files.
    pub fn new(count: u32) -> io::Result<Self> {
        let new = || Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self((0..count).map(|_| new()).collect::<io::Result<_>>()?))
    }

    /// The eventfds, in the order of the interrupts.
    pub fn events(&self) -> &[OwnedFd] {
        &self.0
    }

    /// Waits until an interrupt is raised, for at most `timeout`; true when one was. Resets the counts.
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut polls: Vec<_> = self.0.iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
        let timeout = timeout.try_into().ok();
        if !matches!(rustix::event::poll(&mut polls, timeout.as_ref()), Ok(1..)) {
            return false;
        }
        let raised: Vec<bool> = polls.iter().map(|poll| poll.revents().contains(PollFlags::IN)).collect();
        for (event, raised) in self.0.iter().zip(raised) {
            if raised {
                // Another thread may have read it meanwhile.
                let _ = rustix::io::read(event, &mut [0; 8]);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_resets_the_events() {
        let interrupts = InterruptEvents::new(2).unwrap();
        let raise = |n: usize| rustix::io::write(&interrupts.events()[n], &1u64.to_ne_bytes()).unwrap();
        let now = Duration::from_millis(1);
        assert!(!interrupts.wait(now));
        raise(0);
        assert!(interrupts.wait(now) && !interrupts.wait(now), "reset");
        raise(1);
        raise(0);
        assert!(interrupts.wait(now) && !interrupts.wait(now), "both");
    }
}
