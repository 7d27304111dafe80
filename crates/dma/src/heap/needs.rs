//! What a buffer is needed for, and which heap gives that.

use std::fmt;
use std::sync::Arc;

use super::{AnonHeap, DmaHeap, Heap, MemfdHeap, PageKind};
use crate::{Error, memlock_left};

/// What the buffers of a heap can be used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Abilities {
    /// Another process can map them, by a file descriptor.
    pub shareable: bool,
    /// Files can be read into them with direct I/O.
    pub direct_io: bool,
    /// io_uring can register them.
    pub registrable: bool,
    /// Drivers can import them, as a dma-buf.
    pub dma_buf: bool,
    /// The best pages that they may have.
    pub best_pages: PageKind,
}

impl fmt::Display for Abilities {
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

/// What a caller needs of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// Another process is to map it.
    pub shareable: bool,
    /// It is to be read into directly, past the page cache.
    pub direct_io: bool,
    /// It is to be registered with io_uring.
    pub registrable: bool,
    /// So many bytes are to be registered or pinned at one time. More than this process may lock (RLIMIT_MEMLOCK) is
    /// refused, whatever the heap.
    pub pinned: u64,
    /// A driver is to import it as a dma-buf.
    pub dma_buf: bool,
    /// All of its pages are to be of this NUMA node.
    pub node: Option<u32>,
    /// Where the ladder of page kinds starts; the best for most uses when it is not said.
    pub pages: Option<PageKind>,
}

impl Needs {
    /// What of this a heap lacks; `None` when it has everything.
    fn lacking(&self, has: &Abilities) -> Option<&'static str> {
        [
            (self.shareable, has.shareable, "cannot be shared with another process"),
            (self.direct_io, has.direct_io, "takes no direct I/O"),
            (self.registrable, has.registrable, "cannot be registered with io_uring"),
            (self.dma_buf, has.dma_buf, "cannot become a dma-buf"),
        ]
        .into_iter()
        .find_map(|(needed, had, why)| (needed && !had).then_some(why))
    }
}

/// A heap that was chosen, and why none that comes before it.
pub struct Picked {
    /// The heap.
    pub heap: Arc<dyn Heap>,
    /// Each heap that would have been better, and what it lacks.
    pub passed_over: Vec<(&'static str, String)>,
}

impl fmt::Display for Picked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.heap.name(), self.heap.abilities())?;
        for (name, why) in &self.passed_over {
            write!(f, "; not {name}: {why}")?;
        }
        Ok(())
    }
}

/// The fastest heap that gives what is needed: anonymous memory, then a memfd (which `/dev/udmabuf` makes a dma-buf),
/// then the kernel's own dma-buf heap.
///
/// # Errors
/// [`Error::NoHeap`] with what each lacks; [`Error::PinLimit`], with what would help, when less may be locked than is
/// to be pinned.
pub fn pick(needs: Needs) -> Result<Picked, Error> {
    pick_within(needs, memlock_left())
}

fn pick_within(needs: Needs, left: Option<u64>) -> Result<Picked, Error> {
    if let Some(limit) = left.filter(|left| needs.pinned > *left) {
        // What is pinned already is off the limit.
        return Err(Error::PinLimit { wanted: needs.pinned, pinned: 0, limit });
    }
    let best = needs.pages.unwrap_or(PageKind::Hugetlb2M);
    type Open<'a> = &'a dyn Fn() -> std::io::Result<Arc<dyn Heap>>;
    let dma_heap = || -> std::io::Result<Arc<dyn Heap>> {
        match needs.node {
            Some(_) => Err(std::io::Error::other("cannot be bound to a NUMA node")),
            None => Ok(Arc::new(DmaHeap::open("system")?)),
        }
    };
    let heaps: [(&'static str, Open<'_>); 3] = [
        ("anonymous", &|| Ok(Arc::new(AnonHeap::starting_at(best).bound_to(needs.node)))),
        ("memfd", &|| Ok(Arc::new(MemfdHeap::starting_at(best).bound_to(needs.node)))),
        ("dma-heap", &dma_heap),
    ];
    let mut passed_over = Vec::new();
    for (name, open) in heaps {
        let why = match open() {
            Ok(heap) => match needs.lacking(&heap.abilities()) {
                None => return Ok(Picked { heap, passed_over }),
                Some("cannot become a dma-buf") if name == "memfd" => "there is no /dev/udmabuf for it".to_owned(),
                Some(why) => why.to_owned(),
            },
            Err(e) => e.to_string(),
        };
        passed_over.push((name, why));
    }
    Err(Error::NoHeap(passed_over))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_of_heaps() {
        let plain = pick(Needs { direct_io: true, registrable: true, ..Needs::default() }).unwrap();
        assert_eq!((plain.heap.name(), plain.passed_over.len()), ("anonymous", 0));
        let shared = pick(Needs { shareable: true, direct_io: true, ..Needs::default() }).unwrap();
        assert_eq!(shared.heap.name(), "memfd");
        assert_eq!(shared.passed_over, [("anonymous", "cannot be shared with another process".to_owned())]);
        assert!(shared.to_string().starts_with("memfd (up to hugetlb 2 MiB, direct I/O, "), "{shared}");
        // Here or there, a driver gets a buffer that it can import, or is told why not.
        match pick(Needs { dma_buf: true, ..Needs::default() }) {
            Ok(picked) => assert!(picked.heap.abilities().dma_buf),
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
        assert_eq!(base.heap.abilities().best_pages, PageKind::Base);
    }
}
