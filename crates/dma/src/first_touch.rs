//! Which pages new memory gets: huge ones, unless they were measured to be slow to come by.
//!
//! A huge page is made in less time than the 512 ordinary ones that it stands for, but not where a hypervisor takes
//! back what a guest leaves free: what the guest just used is in small pieces, and what is left in large ones the host
//! has to find anew, which takes it milliseconds each.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The measurements of this process.
pub(crate) static FIRST_TOUCH: FirstTouch = FirstTouch::new();

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Nanoseconds for 4 KiB from which on huge pages are slow: twice what ordinary ones take. At most a third of that is
/// usual, most of it the time to zero them.
const SLOW: u64 = 2000;

/// Memory is present already if it takes less for 4 KiB.
const PRESENT: u64 = 50;

/// Of how many ranges one is made of the pages that are slower so far, to measure them again.
const AGAIN: u64 = 64;

/// The cost of each kind of pages lately.
pub(crate) struct FirstTouch {
    /// Nanoseconds for 4 KiB in huge pages and in ordinary ones; 0 before they were measured.
    huge: AtomicU64,
    small: AtomicU64,
    /// Ranges made while huge pages were slow.
    turn: AtomicU64,
}

impl FirstTouch {
    const fn new() -> Self {
        Self { huge: AtomicU64::new(0), small: AtomicU64::new(0), turn: AtomicU64::new(0) }
    }

    /// Whether the next range is to be made of ordinary pages.
    fn small_now(&self) -> bool {
        let (huge, small) = (self.huge.load(Ordering::Relaxed), self.small.load(Ordering::Relaxed));
        if huge < SLOW {
            return false;
        }
        // Huge ones are worth more later.
        let small_is_better = small * 2 < huge;
        let again = self.turn.fetch_add(1, Ordering::Relaxed) % AGAIN == AGAIN - 1;
        small_is_better != again
    }

    /// Notes how long it took to make `len` bytes.
    fn took(&self, small: bool, len: usize, time: Duration) {
        // The first byte of a huge page makes all of it.
        let (mean, len) = if small { (&self.small, len) } else { (&self.huge, len.max(HUGE)) };
        let Some(now) = (time.as_nanos() as u64).checked_div(len as u64 / 4096).filter(|now| *now >= PRESENT) else {
            return;
        };
        let before = mean.load(Ordering::Relaxed);
        // One slow range is somebody else's turn on the processor.
        mean.store((before * 7 + now) / 8, Ordering::Relaxed);
    }

    /// Makes the pages of `len` bytes by `populate`, which is told whether they are to be ordinary ones.
    pub fn make<T>(&self, len: usize, populate: impl FnOnce(bool) -> T) -> T {
        let (small, begin) = (self.small_now(), Instant::now());
        let made = populate(small);
        self.took(small, len, begin.elapsed());
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes ranges of 2 MiB that take `huge` or `small` microseconds, and returns how many of them were huge.
    fn huge_of(touch: &FirstTouch, ranges: usize, huge: u64, small: u64) -> usize {
        let range = |_: &usize| {
            let is_small = touch.small_now();
            touch.took(is_small, 2 << 20, Duration::from_micros(if is_small { small } else { huge }));
            !is_small
        };
        (0..ranges).filter(range).count()
    }

    #[test]
    fn huge_pages_are_taken_unless_they_are_slow() {
        let touch = FirstTouch::new();
        assert_eq!(huge_of(&touch, 1000, 200, 600), 1000);
        // A range that lost the processor.
        assert_eq!(huge_of(&touch, 1, 5000, 600), 1);
        assert_eq!(huge_of(&touch, 100, 200, 600), 100);
        let slow = huge_of(&touch, 1000, 5000, 600);
        assert!((15..30).contains(&slow), "{slow}");
        // They are found to be fast again.
        let fast = huge_of(&touch, 2000, 200, 600);
        assert!(fast > 1000, "{fast}");
        assert_eq!(huge_of(&touch, 100, 200, 600), 100);
    }

    #[test]
    fn a_byte_of_a_huge_page_is_paid_as_the_page() {
        let touch = FirstTouch::new();
        (0..100).for_each(|_| touch.took(false, 4096, Duration::from_micros(200)));
        assert!(!touch.small_now());
    }

    #[test]
    fn where_all_pages_are_slow_they_are_huge() {
        let touch = FirstTouch::new();
        let slow = huge_of(&touch, 1000, 5000, 4500);
        assert!(slow > 950, "{slow}");
    }

    #[test]
    fn memory_that_is_present_is_no_measurement() {
        let touch = FirstTouch::new();
        assert_eq!(huge_of(&touch, 2, 5000, 600), 2);
        let slow = touch.huge.load(Ordering::Relaxed);
        for len in [100, 0, 2 << 20] {
            touch.took(false, len, Duration::from_micros(3));
        }
        assert_eq!(touch.huge.load(Ordering::Relaxed), slow);
        assert!(touch.small_now());
    }
}
