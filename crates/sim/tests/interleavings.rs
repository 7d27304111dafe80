//! Every interleaving of channels that touch card memory at the same time, tried one after another by `loom`, with
//! every value that the orderings allow for each load. The source of `Present` is compiled once more here, with loom's
//! atomics. Broken by hand, and found each time: `contains` or `insert` with `Relaxed`, `insert` that is always true.

use std::sync::Arc;

use loom::sync::atomic;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

#[path = "../src/present.rs"]
mod present;

use present::Present;

struct Memory {
    present: Present,
    /// 1 when the kernel has found the page of a block.
    pages: [AtomicU64; 2],
    /// Blocks that the allowance was asked for and did not get back.
    taken: AtomicU64,
}

impl Memory {
    /// As `make_present` of card memory does.
    fn touch(&self, block: usize) {
        if self.present.contains(block as u64) {
            assert_eq!(self.pages[block].load(Ordering::Relaxed), 1, "an access would find no page");
            return;
        }
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.pages[block].store(1, Ordering::Relaxed);
        if !self.present.insert(block as u64) {
            self.taken.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_block_that_is_present_has_its_page_and_is_charged_once() {
    loom::model(|| {
        let memory = Arc::new(Memory {
            present: Present::new(2),
            pages: [AtomicU64::new(0), AtomicU64::new(0)],
            taken: AtomicU64::new(0),
        });
        let other = memory.clone();
        let channel = thread::spawn(move || (0..2).for_each(|block| other.touch(block)));
        for _ in 0..2 {
            memory.touch(0);
        }
        channel.join().unwrap();
        assert_eq!((memory.present.count(), memory.taken.load(Ordering::Relaxed)), (2, 2));
    });
}
