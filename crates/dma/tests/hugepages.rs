//! Reserved huge pages that run out. Alone in its process, since it reserves some for the whole machine: only when told
//! to.

use std::fs;

use dmalane_dma::{AnonHeap, Heap, MemfdHeap, PageKind, footprint};

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const HUGE: usize = 2 << 20;

/// Puts the machine's number of reserved pages back.
struct PutBack(String);

impl Drop for PutBack {
    fn drop(&mut self) {
        fs::write(RESERVED, &self.0).expect("it could be written before");
    }
}

#[test]
fn what_does_not_fit_takes_smaller_pages_and_what_fits_is_promised() {
    if std::env::var_os("DMALANE_TEST_HUGEPAGES").is_none() {
        return println!(
            "SKIPPED: DMALANE_TEST_HUGEPAGES=1 lets this test reserve 8 MiB of huge pages for a moment, as root"
        );
    }
    let before = fs::read_to_string(RESERVED).unwrap().trim().to_owned();
    if before != "0" {
        return println!("SKIPPED: {before} huge pages are reserved, and may be in use");
    }
    let _put_back = PutBack(before);
    if let Err(e) = fs::write(RESERVED, "4") {
        return println!("SKIPPED: {RESERVED}: {e}");
    }
    if fs::read_to_string(RESERVED).unwrap().trim() != "4" {
        return println!("SKIPPED: the kernel has no 4 huge pages to reserve");
    }
    let heaps: [&dyn Heap; 2] = [&AnonHeap::new(), &MemfdHeap::new()];
    for heap in heaps {
        // Three of four are promised, though none is there yet: who comes later does not get them.
        let mut first = heap.reserve(3 * HUGE).unwrap();
        assert_eq!(first.backing().kind, PageKind::Hugetlb2M);
        let one = first.next(HUGE).unwrap().populate().unwrap();
        let second = heap.reserve(3 * HUGE).unwrap();
        assert!(second.backing().kind != PageKind::Hugetlb2M, "two are missing");
        let (kind, why) = &second.backing().passed_over[0];
        assert!(*kind == PageKind::Hugetlb2M && why.contains("nr_hugepages"), "{why}");
        let second = second.populate().unwrap();
        let third = heap.reserve(2 * HUGE).unwrap();
        assert!(third.backing().kind != PageKind::Hugetlb2M, "one is left");
        let rest = first.next(2 * HUGE).unwrap().populate().unwrap();
        assert_eq!(footprint().unwrap().hugetlb, 3 * HUGE as u64);
        drop((one, rest, first, second, third));
        assert_eq!((footprint().unwrap().hugetlb, heap.stats().live), (0, 0));
    }
}
