//! The conformance suite for all heaps, and tests of particular ones.

use super::*;
use crate::sys::{HUGE, page};
use crate::{CpuBuf, Error, HeapStats, NoPages, PageKind, SharedBuf};

const PAGE_KINDS: [PageKind; 4] = [PageKind::Hugetlb1G, PageKind::Hugetlb2M, PageKind::Transparent, PageKind::Base];

/// Where a heap's buffers below 1 MiB come from.
#[derive(Clone, Copy, PartialEq)]
enum Small {
    /// They have base pages of their own.
    Alone,
    /// They may be cut out of larger ones.
    Cut,
}

/// True when each byte has this value. By slices: without optimization, a loop over bytes takes seconds in a guest.
fn all(bytes: &[u8], value: u8) -> bool {
    bytes.chunks(4096).all(|chunk| *chunk == [value; 4096][..chunk.len()])
}

/// The suite for every heap; a new heap needs one line below.
fn conformance(heap: &dyn Heap, small: Small) {
    let best = heap.capabilities().best_pages;
    for refused in [0, usize::MAX] {
        assert!(matches!(heap.allocate(refused), Err(Error::BadLength(n)) if n == refused));
        assert!(matches!(heap.reserve(refused), Err(Error::BadLength(n)) if n == refused));
    }
    assert!(heap.allocate(1 << 60).is_err(), "more than the address space");
    assert_eq!(heap.stats(), HeapStats::default(), "a refused buffer is not counted");
    let lengths = [1, 4096, 4097, (1 << 20) - 1, 1 << 20, (2 << 20) + 1, 5 << 20];
    for len in lengths {
        let mut buf = heap.allocate(len).unwrap();
        assert!(buf.len() >= len && buf.len().is_multiple_of(page()));
        assert!(all(&buf, 0), "zeroed");
        buf.fill(0xa5);
        let size = buf.len();
        assert_eq!(heap.stats().live, size);
        let shared = buf.share();
        assert_eq!((shared.len(), heap.stats().live), (size, size), "sharing moves no memory");
        let buf = shared.into_cpu().unwrap();
        assert!(all(&buf, 0xa5));
        // Every better kind is listed with a reason, best first.
        let better: Vec<_> = buf.backing().passed_over.iter().map(|(kind, _)| *kind).collect();
        let top = PAGE_KINDS.iter().position(|k| *k == best).unwrap();
        let had = PAGE_KINDS.iter().position(|k| *k == buf.backing().kind).unwrap();
        assert_eq!(better, PAGE_KINDS[top..had]);
        let too_small = |why: &NoPages| *why == NoPages::SmallBuffer;
        assert!(
            buf.backing().passed_over.iter().all(|(_, why)| too_small(why) == (len < HUGE / 2) || small == Small::Cut)
        );
        if len < HUGE / 2 && small == Small::Alone {
            assert_eq!(buf.backing().kind, PageKind::Base);
        }
    }
    for len in lengths {
        let mut reserved = heap.reserve(len).unwrap();
        let (size, fresh) = (reserved.len(), reserved.is_fresh());
        assert!(size >= len && size - len < HUGE && reserved.left() == size);
        assert!(size - len < page() || len >= 4 << 20, "small ones are not rounded up to huge pages");
        assert_eq!(heap.stats().live, size);
        assert!(reserved.next(0).is_none());
        let mut slices = Vec::new();
        while let Some(absent) = reserved.next(1_000_000) {
            assert_eq!(absent.offset() + absent.len() + reserved.left(), size);
            let mut slice = absent.populate().unwrap();
            if fresh {
                let zero = slice.with_bytes(|bytes| all(bytes, 0));
                assert_eq!(zero, Some(true), "new pages are zero");
            }
            slice.write(0, b"x").unwrap();
            slices.push(slice);
        }
        drop(reserved);
        let whole = slices.into_iter().reduce(|a, b| a.join(b).unwrap()).unwrap().into_whole().unwrap();
        assert_eq!((whole.len(), heap.stats().live), (size, size));
        // Half of it, and then no more.
        let mut half = heap.reserve(len).unwrap();
        drop(half.next(len / 2 + 1).unwrap().populate().unwrap());
        assert!(half.populate().is_err(), "some of it was taken");
        assert_eq!(heap.reserve(len).unwrap().populate().unwrap().len(), size);
    }
    let (a, b) = (heap.allocate(4096).unwrap(), heap.allocate(4096).unwrap());
    drop((a, b));
    let stats = heap.stats();
    assert_eq!((stats.live, stats.buffers), (0, 9 + 3 * lengths.len()));
    assert!(stats.peak >= 5 << 20);
    capabilities(heap);
}

/// Checks that a heap's buffers support the uses that it declares.
fn capabilities(heap: &dyn Heap) {
    let can = heap.capabilities();
    let shared = heap.allocate(1 << 20).unwrap().share();
    assert_eq!(shared.export().is_some(), can.shareable);
    match crate::export_dma_buf(&shared.reference()) {
        Ok(_) => assert!(can.dma_buf),
        // The kernel's udmabuf may refuse pages of a kind.
        Err(e) => assert!(!can.dma_buf || e.to_string().starts_with("/dev/udmabuf"), "{e}"),
    }
    assert_eq!(shared.into_cpu().is_ok(), !can.shareable, "exported for good");
}

macro_rules! conformance {
    ($($name:ident: $heap:expr, $small:ident;)*) => {$(
        #[test]
        fn $name() {
            conformance(&$heap, Small::$small);
        }
    )*};
}

conformance! {
    anonymous_1g: AnonHeap::starting_at(PageKind::Hugetlb1G), Alone;
    anonymous: AnonHeap::starting_at(PageKind::Hugetlb2M), Alone;
    anonymous_transparent: AnonHeap::starting_at(PageKind::Transparent), Alone;
    anonymous_base: AnonHeap::starting_at(PageKind::Base), Alone;
    memfd_1g: MemfdHeap::starting_at(PageKind::Hugetlb1G), Alone;
    memfd: MemfdHeap::starting_at(PageKind::Hugetlb2M), Alone;
    memfd_transparent: MemfdHeap::starting_at(PageKind::Transparent), Alone;
    memfd_base: MemfdHeap::starting_at(PageKind::Base), Alone;
    pool_of_anonymous: Pool::new(AnonHeap::new(), 64 << 20), Cut;
    pool_of_memfd: Pool::new(MemfdHeap::new(), 64 << 20), Cut;
    pool_that_keeps_nothing: Pool::new(AnonHeap::new(), 0), Cut;
    pool_of_a_pool: Pool::new(Pool::new(AnonHeap::new(), 64 << 20), 64 << 20), Cut;
}

#[test]
fn a_driver() {
    let allocate = |len| {
        let len = std::num::NonZeroUsize::new(len).ok_or(Error::BadLength(len))?;
        let source = |source| Error::Allocate { len: len.get(), kind: "a driver's memory", source };
        let region = crate::sys::Region::anonymous(len, PageKind::Base).map_err(source)?;
        // Drivers give memory that was in use before.
        region.as_volatile_slice().fill(0x77);
        Ok(region)
    };
    let heap = DriverHeap::new("driver", allocate);
    conformance(&heap, Small::Alone);
    assert!(heap.reserve(page()).unwrap().is_present() && !MemfdHeap::new().reserve(page()).unwrap().is_present());
    // Pooled buffers go back to the pool, and fragments of them keep them.
    conformance(&Pool::new(DriverHeap::new("driver", allocate), 64 << 20), Small::Cut);
}

#[test]
fn dma_heap() {
    match DmaHeap::open("system") {
        Ok(heap) => conformance(&heap, Small::Alone),
        Err(e) => println!("SKIPPED: no dma-buf heap: {e}"),
    }
}

#[test]
fn udmabuf() {
    let buf = MemfdHeap::new().allocate(1 << 20).unwrap().share();
    match crate::export_dma_buf(&buf.reference()) {
        Ok(_fd) => assert!(buf.into_cpu().is_err(), "exported"),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => println!("SKIPPED: no udmabuf: {e}"),
        Err(e) => panic!("{e}"),
    }
    let anonymous = AnonHeap::new().allocate(4096).unwrap().share();
    assert!(crate::export_dma_buf(&anonymous.reference()).is_err());
}

#[test]
fn a_dma_buf_shares_the_pages_of_its_memfd() {
    let memfd = MemfdHeap::starting_at(PageKind::Base).allocate(1 << 20).unwrap().share();
    let dma_buf = match crate::export_dma_buf(&memfd.reference()) {
        Ok(fd) => SharedBuf::import_dma_buf(fd).unwrap(),
        Err(e) => return println!("SKIPPED: no udmabuf: {e}"),
    };
    assert_eq!(dma_buf.len(), 1 << 20);
    memfd.as_volatile_slice().sub(4096, 5).unwrap().write(b"memfd");
    let mut got = [0; 7];
    dma_buf.cpu_access(false, |view| view.sub(4096, 5).unwrap().read(&mut got[..5])).unwrap();
    assert_eq!(&got[..5], b"memfd");
    dma_buf.cpu_access(true, |view| view.sub(8192, 7).unwrap().write(b"dma-buf")).unwrap();
    memfd.as_volatile_slice().sub(8192, 7).unwrap().read(&mut got);
    assert_eq!(&got, b"dma-buf");
    assert!(dma_buf.into_cpu().is_err(), "exported");
    // The error for a buffer above the module's limit names the limit.
    let large = MemfdHeap::starting_at(PageKind::Base).allocate((64 << 20) + 4096).unwrap().share();
    let refused = crate::export_dma_buf(&large.reference()).unwrap_err();
    assert!(refused.to_string().contains("size_limit_mb"), "{refused}");
    // Its parts are not above it, in whole pages.
    large.as_volatile_slice().sub(64 << 20, 4).unwrap().write(b"last");
    let last = (64 << 20) + 1..(64 << 20) + 4096;
    let (fd, has) = crate::export_dma_buf_range(&large.reference(), last).unwrap();
    assert_eq!(has, 64 << 20..large.len());
    let part = SharedBuf::import_dma_buf(fd).unwrap();
    part.cpu_access(false, |view| view.sub(0, 4).unwrap().read(&mut got[..4])).unwrap();
    assert_eq!((&got[..4], part.len()), (&b"last"[..], 4096));
    for range in [4096..4096, 4096..large.len() + 1] {
        assert!(crate::export_dma_buf_range(&large.reference(), range).is_err());
    }
    // One of the kernel's heaps.
    if let Ok(heap) = DmaHeap::open("system") {
        let buf = heap.allocate(8192).unwrap().share();
        buf.cpu_access(true, |view| view.write(b"heap")).unwrap();
        let again = SharedBuf::import_dma_buf(buf.export().unwrap().try_clone_to_owned().unwrap()).unwrap();
        again.cpu_access(false, |view| view.sub(0, 4).unwrap().read(&mut got[..4])).unwrap();
        assert_eq!((&got[..4], again.len()), (&b"heap"[..], 8192));
        assert_eq!(crate::export_dma_buf_range(&buf.reference(), 4096..8192).unwrap().1, 0..8192, "all of it");
    }
}

#[test]
fn other_memory_is_not_a_dma_buf() {
    let anonymous = AnonHeap::new().allocate(4096).unwrap().share();
    let memfd = MemfdHeap::starting_at(PageKind::Base).allocate(4096).unwrap().share();
    for buf in [&anonymous, &memfd] {
        let refused = buf.cpu_access(true, |_| panic!("called")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::Unsupported);
    }
    let fd = memfd.export().unwrap().try_clone_to_owned().unwrap();
    let refused = SharedBuf::import_dma_buf(fd).map(drop).unwrap_err();
    let text = crate::error_chain(&refused);
    assert!(text.contains("not a dma-buf"), "{text}");
}

#[test]
fn a_pool_reuses_buffers() {
    let pool = Pool::new(AnonHeap::starting_at(PageKind::Base), 8 << 20);
    let address = |heap: &Pool, len| {
        let mut buf = heap.allocate(len).unwrap();
        buf.fill(7);
        (buf.as_ptr().addr(), buf.len())
    };
    let (first, _) = address(&pool, 1 << 20);
    assert_eq!(pool.pool_stats(), PoolStats { cached: 1 << 20, cached_buffers: 1, misses: 1, ..PoolStats::default() });
    assert_eq!(address(&pool, 1 << 20).0, first, "recycled");
    assert_eq!(address(&pool, (1 << 20) - 5000).1, 1 << 20, "almost as long");
    assert_ne!(address(&pool, 4096).1, 1 << 20, "not a large one for a small need");
    assert!(pool.allocate(1 << 20).unwrap().iter().all(|b| *b == 0), "cleared");
    // A pool is bounded: the oldest goes.
    let many: Vec<_> = (0..9).map(|_| pool.allocate(1 << 20).unwrap()).collect();
    assert_eq!(pool.pool_stats().cached, page());
    drop(many);
    let stats = pool.pool_stats();
    assert_eq!((stats.cached, stats.cached_buffers, stats.freed), (8 << 20, 8, 2));
    drop(pool.allocate(16 << 20).unwrap());
    assert_eq!((pool.pool_stats().cached, pool.pool_stats().freed), (8 << 20, 3), "larger than the bound");
    pool.trim(3 << 20);
    assert_eq!(pool.pool_stats().cached, 3 << 20);
    // Buffers that outlive the pool are freed, not kept.
    let last = pool.allocate(1 << 20).unwrap();
    drop(pool);
    drop(last);
}

#[test]
fn a_pool_caches_neither_exported_nor_incomplete_buffers() {
    let pool = Pool::new(MemfdHeap::new(), 64 << 20);
    let buf = pool.allocate(1 << 20).unwrap().share();
    assert!(buf.export().is_some());
    drop(buf);
    assert_eq!(pool.pool_stats().cached, 0, "exported");
    let mut reserved = pool.reserve(4 << 20).unwrap();
    let slice = reserved.next(1 << 20).unwrap().populate().unwrap();
    drop((slice, reserved));
    assert_eq!((pool.pool_stats().cached, pool.stats().live), (0, 0), "three quarters have no pages");
    drop(pool.reserve(4 << 20).unwrap().populate().unwrap());
    assert_eq!(pool.pool_stats().cached, 4 << 20);
    let recycled = pool.reserve(4 << 20).unwrap();
    assert!(!recycled.is_fresh());
    drop(recycled);
    assert_eq!(pool.pool_stats().cached, 4 << 20, "still present, whether used or not");
}

#[test]
fn absent_memory_takes_the_bytes_of_a_file() {
    use crate::FileMapping;
    use std::io::Write;
    use std::os::fd::AsFd;
    let data: Vec<u8> = (0..100_000u32).map(|i| (i >> 3) as u8).collect();
    let mut file = std::fs::File::from(rustix::fs::memfd_create("source", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.write_all(&data).unwrap();
    let mapping = FileMapping::new(file.as_fd(), 0..100_000).unwrap();
    let heap = MemfdHeap::starting_at(PageKind::Base);
    for (at, len) in [(0usize, 5 * page()), (777, 3 * page()), (4097, 2 * page() - 5)] {
        let mut reserved = heap.reserve(9 * page()).unwrap();
        let before = reserved.next(page()).unwrap().populate().unwrap();
        let absent = reserved.next(len.next_multiple_of(page())).unwrap();
        let mut slice = absent.copy_from_file(&mapping, at as u64, len).unwrap();
        let same = slice.with_bytes(|bytes| bytes[..len] == data[at..at + len] && bytes[len..].iter().all(|b| *b == 0));
        assert_eq!(same, Some(true), "{at} {len}");
        let whole = before.join(slice).unwrap();
        let rest = reserved.next(usize::MAX).unwrap().populate().unwrap();
        drop(reserved);
        let whole = whole.join(rest).unwrap().into_whole().unwrap().into_cpu().unwrap();
        assert!(whole[..page()].iter().chain(&whole[page() + len..]).all(|b| *b == 0), "nothing beside it");
    }
    // Refused: the memory can be populated as if nothing had happened.
    let refused = |heap: &dyn Heap, at, len: usize| {
        let absent = heap.reserve(4 * page()).unwrap().next(2 * page()).unwrap();
        let (absent, why) = absent.copy_from_file(&mapping, at, len).unwrap_err();
        assert_eq!(absent.populate().unwrap().len(), 2 * page());
        why.kind()
    };
    use std::io::ErrorKind::Unsupported;
    let pool = Pool::new(MemfdHeap::new(), 1 << 20);
    drop(pool.allocate(4 * page()).unwrap());
    let private = AnonHeap::starting_at(PageKind::Base);
    let absent = private.reserve(4 * page()).unwrap().next(2 * page()).unwrap();
    let mut slice = absent.copy_from_file(&mapping, 777, page() + 5).unwrap();
    let same = |b: &[u8]| b[..page() + 5] == data[777..][..page() + 5] && b[page() + 5..].iter().all(|b| *b == 0);
    assert_eq!(slice.with_bytes(|bytes| same(bytes)), Some(true), "read into");
    assert_eq!(refused(&private, 99_999, 2 * page()), std::io::ErrorKind::UnexpectedEof);
    assert_eq!(refused(&pool, 0, page()), Unsupported, "a page would keep its bytes");
    assert_eq!(refused(&pool, 99_999, 2 * page()), std::io::ErrorKind::UnexpectedEof);
    let from = pool.allocate(4 * page()).unwrap().share();
    from.as_volatile_slice().write(&data[..4 * page()]);
    let other = pool.allocate(4 * page()).unwrap().share();
    other.as_volatile_slice().fill(0xff);
    drop(other);
    for ways in [[true, false], [false, true]] {
        let mut reserved = pool.reserve(4 * page()).unwrap();
        assert!(!reserved.is_fresh() && reserved.is_present() && reserved.is_better_copied_to());
        // From a file, and from other memory, in either order.
        let mut filled = ways.map(|file| {
            let absent = reserved.next(2 * page()).unwrap();
            match file {
                true => absent.copy_from_file(&mapping, 777, page() + 5).unwrap(),
                false => absent.copy_from(from.as_volatile_slice().sub(777, page() + 5).unwrap()).unwrap(),
            }
        });
        let as_wanted = filled.each_mut().map(|slice| slice.with_bytes(|bytes| same(bytes)));
        assert_eq!(as_wanted, [Some(true); 2], "recycled pages have these bytes, and zeroes behind them");
        filled.iter().for_each(|slice| slice.as_volatile_slice().fill(0xff));
    }
    assert_eq!(refused(&heap, 0, page()), Unsupported, "a page would stay absent");
    let _ = refused(&heap, 99_999, 2 * page());
    let _ = refused(&heap, 1 << 40, 2 * page());
    let _ = refused(&heap, u64::MAX, 2 * page());
    // A file that became shorter, and a mapping that does not begin with it.
    rustix::fs::ftruncate(&file, 10_000).unwrap();
    let at = |at: u64| heap.reserve(1).unwrap().next(page()).unwrap().copy_from_file(&mapping, at, page());
    assert!(at(60_000).is_err(), "no longer there");
    // Within a page the mapping goes on with zeroes.
    let cut = |len: usize| {
        let absent = heap.reserve(10 * page()).unwrap().next(len.next_multiple_of(page())).unwrap();
        absent.copy_from_file(&mapping, 0, len)
    };
    assert_eq!(cut(10_001).unwrap_err().1.kind(), std::io::ErrorKind::UnexpectedEof);
    assert_eq!(cut(10_000).unwrap().with_bytes(|bytes| bytes[..10_000] == data[..10_000]), Some(true));
    let later = FileMapping::new(file.as_fd(), 70_000..80_000).unwrap();
    let absent = heap.reserve(1).unwrap().next(page()).unwrap();
    assert!(absent.copy_from_file(&later, 0, page()).is_err(), "before the mapping");
    assert!(FileMapping::new(file.as_fd(), 5..5).is_err());
    assert!(FileMapping::new(std::fs::File::open("/").unwrap().as_fd(), 0..5).is_err(), "a directory");
}

#[test]
fn pages_that_are_there_already_are_written() {
    use crate::sys::Region;
    let len = 6 * page();
    let from = AnonHeap::starting_at(PageKind::Base).allocate(len).unwrap().share();
    from.as_volatile_slice().write(&(0u8..=250).cycle().take(len).collect::<Vec<_>>());
    for there in [0, 1, 3, 5] {
        let region = Region::memfd("test", std::num::NonZeroUsize::new(len).unwrap(), PageKind::Base).unwrap();
        region.populate(there * page(), page()).unwrap();
        region.write_from_view(0, from.as_volatile_slice()).unwrap();
        assert_eq!(region.as_volatile_slice().first_difference(from.as_volatile_slice()), None, "page {there}");
    }
}

#[test]
fn threads_fill_absent_memory_from_other_memory() {
    let len = 40 * page() + 5;
    let mut from = AnonHeap::starting_at(PageKind::Base).allocate(len).unwrap();
    from[..len].iter_mut().enumerate().for_each(|(i, b)| *b = (i >> 4) as u8 | 1);
    let (want, from) = (from[..len].to_vec(), from.share());
    let heap = MemfdHeap::starting_at(PageKind::Base);
    let mut reserved = heap.reserve(len).unwrap();
    assert!(reserved.is_better_copied_to() && !AnonHeap::new().reserve(len).unwrap().is_better_copied_to());
    let ranges: Vec<_> = std::iter::from_fn(|| reserved.next(7 * page())).collect();
    let fill = |absent: Absent| {
        let (offset, all) = (absent.offset(), absent.len());
        let bytes = from.as_volatile_slice().sub(offset, all.min(len - offset)).unwrap();
        // Where only one may write at a time, the others populate, as those who call this do.
        absent.copy_from(bytes).unwrap_or_else(|(absent, why)| {
            assert_eq!(why.kind(), std::io::ErrorKind::WouldBlock, "{why}");
            let there = absent.populate().unwrap();
            there.as_volatile_slice().sub(0, bytes.len()).unwrap().copy_from(bytes, crate::CopyHint::Keep);
            there
        })
    };
    let filled: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranges.into_iter().map(|range| scope.spawn(|| fill(range))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    drop(reserved);
    let whole = filled.into_iter().map(Some).reduce(|a, b| a?.join(b?).ok()).flatten().unwrap();
    let cpu = whole.into_whole().unwrap().into_cpu().unwrap();
    assert!(cpu[..len] == want && cpu[len..].iter().all(|b| *b == 0));
}

/// Number of present pages in a range of virtual addresses.
fn present(at: usize, len: usize) -> usize {
    let mut words = vec![0; len / page() * 8];
    let map = std::fs::File::open("/proc/self/pagemap").unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&map, &mut words, (at / page() * 8) as u64).unwrap();
    words.as_chunks::<8>().0.iter().filter(|word| u64::from_ne_bytes(**word) >> 63 == 1).count()
}

#[test]
fn a_pool_cuts_small_buffers_out_of_huge_pages() {
    let pool = Pool::new(AnonHeap::new(), 8 << 20);
    // Whole pages of 4 KiB and of 16 KiB, four times in a huge one.
    const LEN: usize = 496 << 10;
    let pages = LEN / page();
    let one = pool.reserve(LEN).unwrap();
    if one.backing().kind == PageKind::Base {
        return println!("SKIPPED: no huge pages here: {:?}", one.backing());
    }
    let transparent = one.backing().kind == PageKind::Transparent;
    assert!(one.is_fresh() && one.len() == LEN);
    let stats = PoolStats { cached: HUGE - LEN, cached_buffers: 4, misses: 1, ..PoolStats::default() };
    assert_eq!((pool.pool_stats(), pool.stats().live), (stats, LEN), "three fragments and the rest");
    let mut all = vec![one.populate().unwrap().into_cpu().unwrap()];
    all.extend((0..3).map(|_| pool.allocate(LEN).unwrap()));
    assert_eq!((pool.pool_stats().hits, pool.pool_stats().cached), (3, HUGE - 4 * LEN));
    // Pieces are disjoint, and those of one huge page.
    for (i, buf) in all.iter_mut().enumerate() {
        assert!(buf.iter().all(|b| *b == 0));
        buf.fill(i as u8 + 1);
    }
    assert!(all.iter().enumerate().all(|(i, buf)| buf.iter().all(|b| *b == i as u8 + 1)));
    let page = |buf: &CpuBuf| buf.as_ptr().addr() / HUGE;
    assert!(all.iter().all(|buf| page(buf) == page(&all[0])));
    // A fragment outlives the others, the trimmed ones and the pool.
    let last = all.pop().unwrap();
    let (trimmed, kept) = (all[1].as_ptr().addr(), last.as_ptr().addr());
    drop(all);
    assert_eq!((present(trimmed, LEN), present(kept, LEN)), (pages, pages));
    pool.trim(0);
    // A reserved huge page is freed as a whole, with its last fragment.
    let left = if transparent { 0 } else { pages };
    assert_eq!(
        (present(trimmed, LEN), present(kept, LEN)),
        (left, pages),
        "trimmed memory is freed while another fragment is in use"
    );
    let next = pool.allocate(LEN).unwrap();
    assert_ne!(page(&next), page(&last), "a page with a fragment in use is not reused");
    drop((next, pool));
    assert!(last.iter().all(|b| *b == 4));
}

/// Memory that a pool keeps is given back where the heap below has none left.
#[test]
fn a_pool_that_runs_out_frees_what_it_keeps() {
    struct Refuses(AnonHeap, std::sync::atomic::AtomicBool);
    impl Heap for Refuses {
        fn allocate(&self, len: usize) -> Result<CpuBuf, Error> {
            self.0.allocate(len)
        }
        fn reserve(&self, len: usize) -> Result<Reserved, Error> {
            // Once.
            let refuses = self.1.swap(false, std::sync::atomic::Ordering::Relaxed);
            if refuses { Err(Error::BadLength(len)) } else { self.0.reserve(len) }
        }
        fn capabilities(&self) -> HeapCapabilities {
            self.0.capabilities()
        }
        fn stats(&self) -> HeapStats {
            self.0.stats()
        }
        fn name(&self) -> &'static str {
            "refuses"
        }
    }
    let below = std::sync::Arc::new(Refuses(AnonHeap::new(), false.into()));
    let pool = Pool::new(below.clone(), 16 << 20);
    drop(pool.allocate(2 << 20).unwrap());
    assert!(pool.pool_stats().cached > 0);
    below.1.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!((pool.reserve(4 << 20).unwrap().len(), pool.pool_stats().cached), (4 << 20, 0));
    below.1.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(pool.reserve(8 << 20), Err(Error::BadLength(_))), "nothing is left to free");
}

#[test]
fn a_pool_respects_its_limit_and_splits_only_private_memory() {
    let tight = Pool::new(AnonHeap::new(), 2 << 20);
    drop(tight.allocate(1 << 20).unwrap());
    assert!(tight.pool_stats().cached <= 2 << 20);
    drop((0..5).map(|_| tight.allocate(300 << 10).unwrap()).collect::<Vec<_>>());
    assert!(tight.pool_stats().cached <= 2 << 20, "{:?}", tight.pool_stats());
    let none = Pool::new(AnonHeap::new(), 1 << 20);
    assert_eq!(
        none.allocate(512 << 10).unwrap().backing().kind,
        PageKind::Base,
        "a huge page is more than it may keep"
    );
    let shared = Pool::new(MemfdHeap::new(), 8 << 20);
    let buf = shared.allocate(512 << 10).unwrap().share();
    let fd = buf.export().unwrap();
    assert_eq!(rustix::fs::fstat(fd).unwrap().st_size, 512 << 10, "an exported buffer contains no other buffer");
}
