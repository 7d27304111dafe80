//! Fences: a counter that only grows, and points on it.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

/// A counter that only grows. Producers signal it when work is done; consumers wait for a [`Fence`] on it.
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
///
/// Failed work signals too, so that no consumer waits for ever: [`Timeline::fail`] advances the timeline like
/// [`Timeline::signal`] and marks all fences from that value on as failed permanently. Later work on a timeline is
/// assumed to depend on earlier work; put independent work on another timeline.
#[derive(Clone, Debug)]
pub struct Timeline(Arc<State>);

#[derive(Debug)]
struct State {
    value: AtomicU64,
    /// The lowest point that failed; `u64::MAX` when none has, so that the very last point cannot fail.
    failed: AtomicU64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self(Arc::new(State { value: AtomicU64::new(0), failed: AtomicU64::new(u64::MAX) }))
    }
}

impl Timeline {
    /// A timeline at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The highest value signalled so far.
    pub fn value(&self) -> u64 {
        self.0.value.load(Ordering::Acquire)
    }

    /// Advances the timeline to `value`; a lower value than the current one has no effect. Writes before the call are
    /// visible to any thread that sees the fence signalled.
    pub fn signal(&self, value: u64) {
        self.0.value.fetch_max(value, Ordering::AcqRel);
    }

    /// As [`signal`](Self::signal), but marks the fence at `value` and all later ones as failed. `value` must be below
    /// `u64::MAX`, where a failure is not recorded.
    pub fn fail(&self, value: u64) {
        // Record the failure first: a thread that sees the point reached also sees the failure.
        self.0.failed.fetch_min(value, Ordering::AcqRel);
        self.signal(value);
    }

    /// The fence that is signalled once the timeline reaches `value`.
    pub fn fence(&self, value: u64) -> Fence {
        Fence { timeline: self.clone(), value }
    }

    /// The signaller of `value`, for the producer of the work.
    pub fn signaller(&self, value: u64) -> Signaller {
        Signaller { fence: self.fence(value), signalled: false }
    }
}

/// A point on a [`Timeline`].
#[derive(Clone, Debug)]
pub struct Fence {
    timeline: Timeline,
    value: u64,
}

impl Fence {
    /// True once the timeline has reached this point, also by a failure.
    pub fn is_signalled(&self) -> bool {
        self.timeline.value() >= self.value
    }

    /// True when the fence is signalled and its work, or earlier work on the timeline, has failed.
    pub fn has_failed(&self) -> bool {
        self.is_signalled() && self.timeline.0.failed.load(Ordering::Acquire) <= self.value
    }

    /// The point on the timeline.
    pub fn value(&self) -> u64 {
        self.value
    }
}

/// Signals a point on a [`Timeline`]. Dropping it without a signal fails the point, so that no thread waits for
/// abandoned work.
///
/// ```
/// use dmalane_addr::Timeline;
/// let timeline = Timeline::new();
/// timeline.signaller(1).signal();
/// drop(timeline.signaller(2));
/// assert!(timeline.fence(1).is_signalled() && !timeline.fence(1).has_failed());
/// assert!(timeline.fence(2).is_signalled() && timeline.fence(2).has_failed());
/// ```
#[must_use = "dropping it fails its point"]
#[derive(Debug)]
pub struct Signaller {
    fence: Fence,
    signalled: bool,
}

impl Signaller {
    /// Signals the point.
    pub fn signal(mut self) {
        self.signalled = true;
        self.fence.timeline.signal(self.fence.value);
    }

    /// The fence of the point.
    pub fn fence(&self) -> &Fence {
        &self.fence
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        if !self.signalled {
            self.fence.timeline.fail(self.fence.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_decreases() {
        let t = Timeline::new();
        t.signal(5);
        t.signal(3);
        assert_eq!(t.value(), 5);
        assert!(t.fence(5).is_signalled() && !t.fence(6).is_signalled());
    }

    #[test]
    fn a_failure_is_permanent_and_does_not_affect_earlier_points() {
        let t = Timeline::new();
        let (before, at, after) = (t.fence(1), t.fence(2), t.fence(3));
        t.signal(1);
        t.fail(2);
        assert!(before.is_signalled() && !before.has_failed());
        assert!(at.is_signalled() && at.has_failed());
        assert!(!after.is_signalled() && !after.has_failed(), "not reached, so nothing is known of it");
        t.signaller(3).signal();
        assert!(after.has_failed());
        t.fail(9);
        assert!(!before.has_failed() && t.value() == 9);
    }
}
