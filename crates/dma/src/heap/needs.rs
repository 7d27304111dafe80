//! Requirements on buffers, and the choice of a heap that meets them.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::{AnonHeap, DmaHeap, Heap, MemfdHeap, PageKind};
use crate::memlock_left;

/// Uses for which the buffers of a heap are suitable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HeapCapabilities {
    /// Another process can map them, by a file descriptor.
    pub shareable: bool,
    /// Files can be read into them with direct I/O.
    pub direct_io: bool,
    /// io_uring can register them.
    pub registrable: bool,
    /// Drivers can import them, as a dma-buf.
    pub dma_buf: bool,
    /// The best page kind.
    pub best_pages: PageKind,
}

impl fmt::Display for HeapCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {}", self.best_pages)?;
        for (can, what) in [
            (self.direct_io, "direct I/O"),
            (self.registrable, "io_uring registration"),
            (self.shareable, "shareable"),
            (self.dma_buf, "dma-buf"),
        ] {
            write!(f, "{}{what}", if can { ", " } else { ", no " })?;
        }
        Ok(())
    }
}

/// Requirements on a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// Another process can map it.
    pub shareable: bool,
    /// Files can be read into it with direct I/O.
    pub direct_io: bool,
    /// io_uring can register it.
    pub registrable: bool,
    /// Bytes that will be registered or pinned at one time. More than this process may lock (RLIMIT_MEMLOCK) is an
    /// error for every heap.
    pub pinned: u64,
    /// A driver can import it as a dma-buf.
    pub dma_buf: bool,
    /// NUMA node of all pages; `None` for any.
    pub node: Option<u32>,
    /// First page kind of the fallback chain; `None` for reserved 2 MiB pages.
    pub pages: Option<PageKind>,
}

impl Needs {
    /// The first requirement that a heap does not meet; `None` when it meets all.
    fn missing(&self, has: &HeapCapabilities) -> Option<Unsuitable> {
        [
            (self.shareable, has.shareable, Unsuitable::NotShareable),
            (self.direct_io, has.direct_io, Unsuitable::NoDirectIo),
            (self.registrable, has.registrable, Unsuitable::NotRegistrable),
            (self.dma_buf, has.dma_buf, Unsuitable::NoDmaBuf),
        ]
        .into_iter()
        .find_map(|(needed, had, why)| (needed && !had).then_some(why))
    }
}

/// Why a heap does not meet the requirements.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Unsuitable {
    /// [`Needs::shareable`].
    #[error("cannot be shared with another process")]
    NotShareable,
    /// [`Needs::direct_io`].
    #[error("takes no direct I/O")]
    NoDirectIo,
    /// [`Needs::registrable`].
    #[error("cannot be registered with io_uring")]
    NotRegistrable,
    /// [`Needs::dma_buf`].
    #[error("cannot become a dma-buf")]
    NoDmaBuf,
    /// [`Needs::dma_buf`], of a memfd.
    #[error("there is no /dev/udmabuf for it")]
    NoUdmabuf,
    /// [`Needs::node`].
    #[error("cannot be bound to a NUMA node")]
    NoNode,
    /// The kernel does not offer it: the path, and the kernel's words.
    #[error("{0}")]
    Kernel(String),
}

/// The chosen heap, with the reasons against better ones.
pub struct Picked {
    /// The chosen heap.
    pub heap: Arc<dyn Heap>,
    /// Each better heap, with the requirement that it does not meet.
    pub passed_over: Vec<(&'static str, Unsuitable)>,
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
/// [`NoHeap`](crate::Error::NoHeap) with the reason for each heap; [`PinLimit`](crate::Error::PinLimit) when `pinned`
/// exceeds the lock limit.
pub fn pick(needs: Needs) -> Result<Picked, crate::Error> {
    pick_within(needs, memlock_left())
}

fn pick_within(needs: Needs, left: Option<u64>) -> Result<Picked, crate::Error> {
    if let Some(limit) = left.filter(|left| needs.pinned > *left) {
        // `left` already excludes memory that is pinned.
        return Err(crate::Error::PinLimit { wanted: needs.pinned, pinned: 0, limit });
    }
    let best = needs.pages.unwrap_or(PageKind::Hugetlb2M);
    type Open<'a> = &'a dyn Fn() -> Result<Arc<dyn Heap>, Unsuitable>;
    let dma_heap = || -> Result<Arc<dyn Heap>, Unsuitable> {
        match needs.node {
            Some(_) => Err(Unsuitable::NoNode),
            None => Ok(Arc::new(DmaHeap::open("system").map_err(|e| Unsuitable::Kernel(e.to_string()))?)),
        }
    };
    let heaps: &[(&'static str, Open<'_>)] = &[
        ("anonymous", &|| Ok(Arc::new(AnonHeap::starting_at(best).bound_to(needs.node)))),
        ("memfd", &|| Ok(Arc::new(MemfdHeap::starting_at(best).bound_to(needs.node)))),
        ("dma-heap", &dma_heap),
    ];
    let mut passed_over = Vec::new();
    for &(name, open) in heaps {
        let why = match open() {
            Ok(heap) => match needs.missing(&heap.capabilities()) {
                None => return Ok(Picked { heap, passed_over }),
                Some(Unsuitable::NoDmaBuf) if name == "memfd" => Unsuitable::NoUdmabuf,
                Some(why) => why,
            },
            Err(why) => why,
        };
        passed_over.push((name, why));
    }
    Err(crate::Error::NoHeap(passed_over))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_the_first_suitable_heap() {
        let plain = pick(Needs { direct_io: true, registrable: true, ..Needs::default() }).unwrap();
        assert_eq!((plain.heap.name(), plain.passed_over.len()), ("anonymous", 0));
        let shared = pick(Needs { shareable: true, direct_io: true, ..Needs::default() }).unwrap();
        assert_eq!(shared.heap.name(), "memfd");
        assert_eq!(shared.passed_over, [("anonymous", Unsuitable::NotShareable)]);
        assert!(shared.to_string().starts_with("memfd (up to hugetlb 2 MiB, direct I/O, "), "{shared}");
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
        let much = Needs { registrable: true, pinned: 8 << 20, ..Needs::default() };
        assert!(pick_within(much, None).is_ok() && pick_within(much, Some(8 << 20)).is_ok());
        let refused = pick_within(much, Some((8 << 20) - 1)).err().map(|e| e.to_string()).unwrap();
        assert!(refused.contains("cannot pin 8388608 bytes") && refused.contains("ulimit -l"), "{refused}");
        let base = pick(Needs { pages: Some(PageKind::Base), ..Needs::default() }).unwrap();
        assert_eq!(base.heap.capabilities().best_pages, PageKind::Base);
    }
}
