//! The register page: what both sides of a function look at without a message.
//!
//! Every word belongs to one side, but for the wish for a wake-up, which both swap. The daemon believes none of it: the
//! doorbell is checked by the card, and what a client writes where the daemon writes only deceives the client.

use dmalane_dma::{Error, SharedBuf, VolatileSlice};

/// Bytes of the page.
pub(crate) const BYTES: usize = 8192;
/// Bytes from one queue's words to the next's, so that no two sides write to one cache line.
const STRIDE: usize = 256;
const DOORBELL: usize = 0;
const STATUS: usize = 64;
const INTERRUPT: usize = 128;
/// Behind 16 queues.
const ASLEEP: usize = 4096;

/// The register page of a function.
pub(crate) struct Page(SharedBuf);

impl Page {
    /// A new one, all zeros.
    pub(crate) fn new() -> Result<Self, Error> {
        let buf = SharedBuf::sparse("dmalane-registers", BYTES)?;
        buf.populate(0, BYTES).map_err(|source| Error::Allocate { len: BYTES, kind: "a register page", source })?;
        Ok(Self(buf))
    }

    /// The one of the other side; `None` when it is too short.
    pub(crate) fn of(buf: SharedBuf) -> Option<Self> {
        (buf.len() >= BYTES).then_some(Self(buf))
    }

    pub(crate) fn buf(&self) -> &SharedBuf {
        &self.0
    }

    fn view(&self) -> VolatileSlice<'_> {
        self.0.view()
    }

    #[inline]
    fn load(&self, offset: usize) -> u32 {
        self.view().load_u32(offset).expect("an aligned word of the page")
    }

    #[inline]
    fn swap(&self, offset: usize, value: u32) -> u32 {
        self.view().swap_u32(offset, value).expect("an aligned word of the page")
    }

    #[inline]
    pub(crate) fn doorbell(&self, queue: usize) -> u32 {
        self.load(queue * STRIDE + DOORBELL)
    }

    /// Writes the doorbell, and says whether the daemon sleeps and wants to be woken.
    #[inline]
    pub(crate) fn ring(&self, queue: usize, value: u32) -> bool {
        // A swap, so that either the daemon sees the doorbell on its last look or this sees that it sleeps.
        self.swap(queue * STRIDE + DOORBELL, value);
        self.load(ASLEEP) != 0
    }

    #[inline]
    pub(crate) fn status(&self, queue: usize) -> u32 {
        self.load(queue * STRIDE + STATUS)
    }

    #[inline]
    pub(crate) fn set_status(&self, queue: usize, value: u32) {
        self.view().store_u32(queue * STRIDE + STATUS, value).expect("an aligned word of the page");
    }

    /// The client's wish to be woken when something has ended, as it is now.
    pub(crate) fn wish(&self, queue: usize) -> u32 {
        self.load(queue * STRIDE + INTERRUPT)
    }

    /// Sets the wish and gives the one before. The daemon takes it after it has written completions, the client sets it
    /// before its last look at them.
    #[inline]
    pub(crate) fn set_wish(&self, queue: usize, value: u32) -> u32 {
        self.swap(queue * STRIDE + INTERRUPT, value)
    }

    /// Says whether the daemon looks at doorbells.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.swap(ASLEEP, asleep.into());
    }
}
