//! The register page: the words that client and daemon share without messages.
//!
//! Each word has one writer, except the wake-up request, which both sides swap. The daemon trusts none of them: the
//! card checks the doorbell, and a client that overwrites the daemon's words only misleads itself.

use dmalane_dma::SharedBuf;

/// Bytes of the page.
pub(crate) const PAGE_BYTES: usize = 8192;
/// Bytes from the words of one queue to those of the next, so that no two writers share a cache line.
const STRIDE: usize = 256;
const DOORBELL: usize = 0;
const STATUS: usize = 64;
const INTERRUPT: usize = 128;
/// After the words of 16 queues.
const ASLEEP: usize = 4096;

/// The register page of a function.
pub(crate) struct Page(SharedBuf);

impl Page {
    /// The page of this memory; `None` when it is too short.
    pub(crate) fn of(buf: SharedBuf) -> Option<Self> {
        (buf.len() >= PAGE_BYTES).then_some(Self(buf))
    }

    #[inline]
    fn load(&self, offset: usize) -> u32 {
        self.0.as_volatile_slice().load_u32(offset).expect("an aligned word of the page")
    }

    #[inline]
    fn swap(&self, offset: usize, value: u32) -> u32 {
        self.0.as_volatile_slice().swap_u32(offset, value).expect("an aligned word of the page")
    }

    #[inline]
    pub(crate) fn doorbell(&self, queue: usize) -> u32 {
        self.load(queue * STRIDE + DOORBELL)
    }

    /// Writes the doorbell; true when the daemon sleeps and needs a kick.
    #[inline]
    pub(crate) fn ring(&self, queue: usize, value: u32) -> bool {
        // A swap, so that either the daemon sees the doorbell in its last check or this sees that it sleeps.
        self.swap(queue * STRIDE + DOORBELL, value);
        self.load(ASLEEP) != 0
    }

    #[inline]
    pub(crate) fn status(&self, queue: usize) -> u32 {
        self.load(queue * STRIDE + STATUS)
    }

    #[inline]
    pub(crate) fn set_status(&self, queue: usize, value: u32) {
        self.0.as_volatile_slice().store_u32(queue * STRIDE + STATUS, value).expect("an aligned word of the page");
    }

    /// 1 while the client requests to be woken by the next completion.
    pub(crate) fn wakeup_wanted(&self, queue: usize) -> u32 {
        self.load(queue * STRIDE + INTERRUPT)
    }

    /// Replaces the wake-up request and returns the old one. The daemon clears it after it has written completions; the
    /// client sets it before its last check for them.
    #[inline]
    pub(crate) fn swap_wakeup_wanted(&self, queue: usize, value: u32) -> u32 {
        self.swap(queue * STRIDE + INTERRUPT, value)
    }

    /// Announces whether the daemon sleeps, and so does not poll the doorbells.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.swap(ASLEEP, asleep.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_queue_has_its_own_wake_up_request() {
        let page = Page::of(SharedBuf::sparse("page", PAGE_BYTES).unwrap()).unwrap();
        assert_eq!(page.swap_wakeup_wanted(1, 1), 0);
        assert_eq!([0, 1, 15].map(|queue| page.wakeup_wanted(queue)), [0, 1, 0]);
        assert_eq!((page.swap_wakeup_wanted(0, 0), page.swap_wakeup_wanted(1, 0)), (0, 1));
    }
}
