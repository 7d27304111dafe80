//! The choice of a heap that meets requirements.

use std::fmt;
use std::sync::Arc;

use super::{AnonHeap, DmaHeap, Heap, MemfdHeap, Needs};
use crate::{Error, PageKind, error_chain};

/// The chosen heap, with the reasons against better ones.
pub struct Picked {
    /// The chosen heap.
    pub heap: Arc<dyn Heap>,
    /// Each better heap, with the reason against it.
    pub passed_over: Vec<(&'static str, String)>,
}

impl fmt::Display for Picked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.heap.name(), self.heap.capabilities())?;
        for (name, why) in &self.passed_over {
            write!(f, "; not {name}: {why}")?;
        }
        Ok(())
    }
}

/// Chooses the fastest heap that meets the requirements: anonymous memory, then memfds (which `/dev/udmabuf` turns into
/// dma-bufs), then the kernel's dma-buf heap.
///
/// # Errors
/// [`Error::NoHeap`] with the reason for each heap.
pub fn pick(needs: Needs) -> Result<Picked, Error> {
    let best = needs.pages.unwrap_or(PageKind::Hugetlb2M);
    type Open<'a> = &'a dyn Fn() -> Result<Arc<dyn Heap>, String>;
    let heaps: [(&'static str, Open<'_>); 3] = [
        ("anonymous", &|| Ok(Arc::new(AnonHeap::starting_at(best)))),
        ("memfd", &|| Ok(Arc::new(MemfdHeap::starting_at(best)))),
        ("dma-heap", &|| Ok(Arc::new(DmaHeap::open("system").map_err(|e| error_chain(&e))?))),
    ];
    let suitable = |heap: Arc<dyn Heap>| match needs.missing(&heap.capabilities()) {
        None => Ok(heap),
        Some(why) => Err(why.to_owned()),
    };
    let mut passed_over = Vec::new();
    for (name, open) in heaps {
        match open().and_then(suitable) {
            Ok(heap) => return Ok(Picked { heap, passed_over }),
            Err(why) => passed_over.push((name, why)),
        }
    }
    Err(Error::NoHeap(passed_over))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_the_first_suitable_heap() {
        let plain = pick(Needs::default()).unwrap();
        assert_eq!((plain.heap.name(), plain.passed_over.len()), ("anonymous", 0));
        let shared = pick(Needs { shareable: true, ..Needs::default() }).unwrap();
        assert_eq!(shared.heap.name(), "memfd");
        assert_eq!(shared.passed_over, [("anonymous", "cannot be shared with another process".to_owned())]);
        assert!(shared.to_string().starts_with("memfd (up to hugetlb 2 MiB, shareable, "), "{shared}");
        // Either a heap with dma-bufs is chosen, or the error names the reasons.
        match pick(Needs { dma_buf: true, ..Needs::default() }) {
            Ok(picked) => assert!(picked.heap.capabilities().dma_buf),
            Err(e) => {
                let text = e.to_string();
                assert!(text.contains("memfd: there is no /dev/udmabuf for it"), "{text}");
                assert!(text.contains("dma-heap: /dev/dma_heap/system: "), "{text}");
                println!("SKIPPED: {e}");
            }
        }
        let base = pick(Needs { pages: Some(PageKind::Base), ..Needs::default() }).unwrap();
        assert_eq!(base.heap.capabilities().best_pages, PageKind::Base);
    }
}
