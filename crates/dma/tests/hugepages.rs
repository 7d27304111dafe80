//! Tests heaps when reserved huge pages run out. Runs only on request, since it reserves pages for the whole machine.

use std::fs;

use dmalane_dma::{AnonHeap, Heap, MemfdHeap, NoPages, PageKind};

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const HUGE: usize = 2 << 20;

/// Restores the machine's number of reserved pages on drop.
struct Restore(String);

impl Drop for Restore {
    fn drop(&mut self) {
        fs::write(RESERVED, &self.0).expect("it could be written before");
    }
}

/// KiB of reserved huge pages that this process has mapped.
fn hugetlb_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("HugetlbPages:"));
    line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn heaps_fall_back_when_reserved_pages_run_out() {
    if std::env::var_os("DMALANE_TEST_HUGEPAGES").is_none() {
        return println!(
            "SKIPPED: DMALANE_TEST_HUGEPAGES=1 lets this test reserve 8 MiB of huge pages for a moment, as root"
        );
    }
    let before = fs::read_to_string(RESERVED).unwrap().trim().to_owned();
    if before != "0" {
        return println!("SKIPPED: {before} huge pages are reserved, and may be in use");
    }
    let _restore = Restore(before);
    if let Err(e) = fs::write(RESERVED, "4") {
        return println!("SKIPPED: {RESERVED}: {e}");
    }
    if fs::read_to_string(RESERVED).unwrap().trim() != "4" {
        return println!("SKIPPED: the kernel has no 4 huge pages to reserve");
    }
    let heaps: [&dyn Heap; 2] = [&AnonHeap::new(), &MemfdHeap::new()];
    for heap in heaps {
        // Three of four pages are reserved, though not present yet: later reservations cannot get them.
        let mut first = heap.reserve(3 * HUGE).unwrap();
        assert_eq!(first.backing().kind, PageKind::Hugetlb2M);
        let one = first.next(HUGE).unwrap().populate().unwrap();
        let second = heap.reserve(3 * HUGE).unwrap();
        assert!(second.backing().kind != PageKind::Hugetlb2M, "two are missing");
        let (kind, why) = &second.backing().passed_over[0];
        assert!(*kind == PageKind::Hugetlb2M && matches!(why, NoPages::NotReserved { pages: 3, .. }), "{why}");
        let second = second.populate().unwrap();
        let third = heap.reserve(2 * HUGE).unwrap();
        assert!(third.backing().kind != PageKind::Hugetlb2M, "one is left");
        let rest = first.next(2 * HUGE).unwrap().populate().unwrap();
        assert_eq!(hugetlb_kib(), 3 * HUGE as u64 / 1024);
        drop((one, rest, first, second, third));
        assert_eq!((hugetlb_kib(), heap.stats().live), (0, 0));
    }
}
