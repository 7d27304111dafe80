//! Many files at once: they are opened and their headers parsed on as many threads as that needs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// For this time the caller's thread alone does the first ones, which shows whether a thread works or waits.
const TRIED: Duration = Duration::from_millis(1);
/// Threads where each waits for a disk, a server or another process most of the time, at most.
const WAITING: usize = 64;

/// Processor time of this thread.
pub(crate) fn worked() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Calls `f` with each item, on several threads where there are many or a call takes long, and returns what it returns
/// in the order of the items.
///
/// # Errors
/// That of the first item that has failed. Others may not have been tried.
pub fn in_parallel<T: Send, R: Send, E: Send>(
    items: Vec<T>,
    f: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let count = items.len();
    let (items, results): (Vec<_>, Vec<_>) =
        items.into_iter().map(|item| (Mutex::new(Some(item)), Mutex::new(None))).unzip();
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    // Items are taken in order, so that all before one that has failed are tried.
    let one = || {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let Some(item) = items.get(i).filter(|_| !failed.load(Ordering::Relaxed)) else { return false };
        let item: Option<T> = item.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = item.map(&f);
        if matches!(result, Some(Err(_))) {
            failed.store(true, Ordering::Relaxed);
        }
        *results[i].lock().unwrap_or_else(PoisonError::into_inner) = result;
        true
    };
    std::thread::scope(|scope| {
        let (begun, before) = (Instant::now(), worked());
        while begun.elapsed() < TRIED && one() {}
        let waits = worked().saturating_sub(before) * 4 < begun.elapsed();
        let threads = if waits { WAITING } else { std::thread::available_parallelism().map_or(1, |n| n.get()) };
        for _ in 1..threads.min(count.saturating_sub(next.load(Ordering::Relaxed)) + 1) {
            let name = std::thread::Builder::new().name("dmalane-open".to_owned());
            // Fewer threads only take longer.
            if name.spawn_scoped(scope, || while one() {}).is_err() {
                break;
            }
        }
        while one() {}
    });
    let results = results.into_iter().map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner));
    // Those behind the first failure that were not tried are never reached.
    results.flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn results_come_in_order_and_the_first_failure_is_told() {
        for count in [0, 1, 2, 1000] {
            let doubled = in_parallel((0..count).collect(), |n| Ok::<_, ()>(2 * n)).unwrap();
            assert_eq!(doubled, (0..count).map(|n| 2 * n).collect::<Vec<_>>());
        }
        for _ in 0..20 {
            let error = in_parallel((0..5000).collect(), |n: usize| if n < 1234 { Ok(n) } else { Err(n) });
            assert_eq!(error, Err(1234));
        }
    }

    #[test]
    fn what_waits_is_done_at_the_same_time() {
        // Nobody passes before all have come, but for the first one, which is alone.
        let all = Barrier::new(WAITING);
        let wait = |n| {
            match n {
                0 => std::thread::sleep(2 * TRIED),
                _ => drop(all.wait()),
            }
            Ok::<_, ()>(n)
        };
        assert_eq!(in_parallel((0..=WAITING).collect(), wait).unwrap().len(), WAITING + 1);
    }
}
