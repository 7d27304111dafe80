//! Fences: a counter that only grows, and points on it.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

/// A counter that only grows. Whoever does work signals it; whoever needs the work holds a [`Fence`] on it.
///
/// The same idea as a timeline semaphore in Vulkan or a `dma_fence` context in Linux.
///
/// ```
/// use dmalane_addr::Timeline;
/// let timeline = Timeline::new();
/// let fence = timeline.fence(2);
/// timeline.signal(1);
/// assert!(!fence.is_signalled());
/// timeline.signal(3);
/// assert!(fence.is_signalled());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<AtomicU64>);

impl Timeline {
    /// A timeline at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The highest value signalled so far.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Moves the timeline up to `value`; a lower value than the present one changes nothing. What was written before
    /// the call is visible to whoever sees the fence signalled.
    pub fn signal(&self, value: u64) {
        self.0.fetch_max(value, Ordering::AcqRel);
    }

    /// The fence that is signalled once the timeline reaches `value`.
    pub fn fence(&self, value: u64) -> Fence {
        Fence { timeline: self.clone(), value }
    }
}

/// A point on a [`Timeline`].
#[derive(Clone, Debug)]
pub struct Fence {
    timeline: Timeline,
    value: u64,
}

impl Fence {
    /// True once the timeline has reached this point.
    pub fn is_signalled(&self) -> bool {
        self.timeline.value() >= self.value
    }

    /// The point on the timeline.
    pub fn value(&self) -> u64 {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_goes_back() {
        let t = Timeline::new();
        t.signal(5);
        t.signal(3);
        assert_eq!(t.value(), 5);
        assert!(t.fence(5).is_signalled() && !t.fence(6).is_signalled());
    }
}
