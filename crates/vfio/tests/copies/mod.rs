//! Copies by a device: over pages of each size, beside faults, and the suite that every queue takes.

use super::*;

/// Copies from one address to another, and compares the destination and its surroundings with the expected bytes.
fn verify_dma(edu: &Edu, buf: &SharedBuf, seams: &[usize]) {
    let mapping = map(edu.bus(), buf, Access::RW);
    let len = buf.len();
    let mut channel = edu.queue();
    let at = |offset: usize| mapping.span().first().checked_add(offset as u64).unwrap();
    for (round, &seam) in seams.iter().enumerate() {
        // From before the seam to after it, to a distant address.
        let (from, n) = (seam.saturating_sub(777).min(len - 2048), 2048 - round % 7);
        let to = (seam + len / 2 + 4097 * round) % (len - 4096);
        let around = 1 << 16;
        let window = to.saturating_sub(around)..(to + n + around).min(len);
        buf.as_volatile_slice().sub(window.start, window.len()).unwrap().fill(0xee);
        let bytes = pattern(round as u64 + 1, n);
        buf.as_volatile_slice().sub(from, n).unwrap().write(&bytes);
        let mut expected = vec![0; window.len()];
        buf.as_volatile_slice().sub(window.start, window.len()).unwrap().read(&mut expected);
        expected[to - window.start..][..n].copy_from_slice(&bytes);
        edu.copy(Direction::FromHost, at(from), CardAddr::new(1), n as u64).unwrap();
        edu.copy(Direction::ToHost, at(to), CardAddr::new(1), n as u64).unwrap();
        let mut got = vec![0; window.len()];
        buf.as_volatile_slice().sub(window.start, window.len()).unwrap().read(&mut got);
        assert!(got == expected, "{n} bytes from {from:#x} to {to:#x} of {len:#x}");
    }
    assert_eq!(channel.poll(&mut Vec::new()), 0);
}

fn check_dma(heap: &dyn Heap, kind: PageKind, len: usize, page: usize) {
    let buf = heap.allocate(len).unwrap();
    assert_eq!(buf.backing().kind, kind, "{:?}", buf.backing().passed_over);
    let seams: Vec<usize> = (0..8).map(|i| (i * page) % len).chain([1000, len]).collect();
    verify_dma(&edu(edus()[0]), &buf.share(), &seams);
}

#[test]
fn dma_over_pages_of_the_kernel() {
    check_dma(&AnonHeap::starting_at(PageKind::Base), PageKind::Base, 1 << 20, page());
    check_dma(&MemfdHeap::starting_at(PageKind::Base), PageKind::Base, 1 << 20, page());
}

/// iommufd maps memory with a file by that file, unless it is told not to.
#[test]
fn dma_over_memory_that_is_mapped_by_its_address() {
    let container = container();
    container.map_by_address();
    let edu = edu_in(&container, edus()[0]);
    let buf = MemfdHeap::starting_at(PageKind::Base).allocate(1 << 20).unwrap().share();
    verify_dma(&edu, &buf, &[0, 1000, page(), 1 << 20]);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
}

#[test]
fn dma_over_pages_of_2m() {
    check_dma(&AnonHeap::starting_at(PageKind::Hugetlb2M), PageKind::Hugetlb2M, 16 << 20, 2 << 20);
    check_dma(&MemfdHeap::starting_at(PageKind::Hugetlb2M), PageKind::Hugetlb2M, 16 << 20, 2 << 20);
    if page() == 4096 {
        check_dma(&AnonHeap::starting_at(PageKind::Transparent), PageKind::Transparent, 16 << 20, 2 << 20);
    }
}

#[test]
fn dma_over_a_page_of_1g() {
    check_dma(&AnonHeap::starting_at(PageKind::Hugetlb1G), PageKind::Hugetlb1G, 1 << 30, 100 << 20);
    check_dma(&MemfdHeap::starting_at(PageKind::Hugetlb1G), PageKind::Hugetlb1G, 1 << 30, 100 << 20);
}

/// Checks every byte of one page: only the copied bytes changed.
#[test]
fn a_page_of_1g_byte_by_byte() {
    const CHUNK: usize = 1 << 20;
    const LEN: usize = 1 << 30;
    let mut expected = pattern(5, CHUNK);
    let heap = MemfdHeap::starting_at(PageKind::Hugetlb1G);
    let edu = edu(edus()[0]);
    let container = edu.bus().device().container().clone();
    let mut buf = heap.allocate(LEN).unwrap();
    assert_eq!((buf.backing().kind, buf.len()), (PageKind::Hugetlb1G, LEN), "{:?}", buf.backing().passed_over);
    // The first bytes of each MiB are its number.
    let number = |bytes: &mut [u8], i: usize| bytes[..8].copy_from_slice(&i.to_le_bytes());
    for (i, chunk) in buf.chunks_mut(CHUNK).enumerate() {
        number(&mut expected, i);
        chunk.copy_from_slice(&expected);
    }
    let buf = buf.share();
    let mapping = map(edu.bus(), &buf, Access::RW);
    let at = |offset: usize| mapping.span().first().checked_add(offset as u64).unwrap();
    // From one end to the other, from there to the middle, and from the middle to the front.
    let copies = [(3, LEN - 2048, 2048), (LEN - 2048, LEN / 2 - 1001, 2003), (LEN / 2 + 4096, 0, 1)];
    for (from, to, len) in copies {
        edu.copy(Direction::FromHost, at(from), CardAddr::new(1), len as u64).unwrap();
        edu.copy(Direction::ToHost, at(to), CardAddr::new(1), len as u64).unwrap();
    }
    drop(mapping);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps()), (0, 0));
    let buf = buf.into_cpu().unwrap();
    // The offset of a byte before the copies.
    let origin = |at: usize| {
        let mut place = at;
        for (from, to, len) in copies.into_iter().rev() {
            if (to..to + len).contains(&place) {
                place = from + (place - to);
            }
        }
        place
    };
    for (i, chunk) in buf.chunks(CHUNK).enumerate() {
        number(&mut expected, i);
        let first = i * CHUNK;
        let mut wanted = expected.clone();
        for at in copies.into_iter().flat_map(|(_, to, len)| to.max(first)..(to + len).min(first + CHUNK)) {
            let place = origin(at);
            wanted[at - first] = match place % CHUNK {
                k @ 0..8 => (place / CHUNK).to_le_bytes()[k],
                k => expected[k],
            };
        }
        let wrong = || chunk.iter().zip(&wanted).position(|(got, wanted)| got != wanted).map(|k| first + k);
        assert!(*chunk == wanted[..], "at {:#x?}", wrong());
    }
}

#[test]
fn dma_after_unmap_is_stopped_and_reported_while_others_run() {
    let container = container();
    let [bad, good] = edus().map(|bdf| edu_in(&container, bdf));
    let allocate = || AnonHeap::new().allocate(page()).unwrap().share();
    let before = container.mappings_left().unwrap();
    let mut log = FaultLog::open().unwrap();
    // Revoked while the registration still exists.
    let buf = allocate();
    buf.as_volatile_slice().fill(0x11);
    let (registered, write) = transfer(bad.bus(), buf, Direction::ToHost);
    let span = registered.mapping().span();
    assert_eq!(container.revoke(span).unwrap(), page() as u64);
    let mut channel = bad.queue().with_faults(FaultLog::open().unwrap(), bad.bus().bdf());
    let _ticket = channel.submit(write).unwrap();
    channel.poll(&mut Vec::new());
    // The other device works in the meantime.
    let (_registered, other) = transfer(good.bus(), allocate(), Direction::FromHost);
    run(&mut good.queue(), other, LONG).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        channel.wait(&mut done, LONG);
    }
    match &done[0].result {
        Err(OpError::Fault(fault)) => {
            assert_eq!((fault.at, fault.wanted), (span.first(), Access::WRITE));
            println!("{fault}");
        }
        other => panic!("{other:?}"),
    }
    let mut bytes = vec![0; 1024];
    done.remove(0).operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 0x11), "nothing was written");
    drop((done, registered, channel));
    // Unmapped by dropping the mapping. An SMMU reports each word of a copy, and the kernel prints ten reports in five
    // seconds.
    let pause = || std::thread::sleep(Duration::from_secs(6));
    pause();
    let buf = allocate();
    let mapping = map(bad.bus(), &buf, Access::RW);
    let at = mapping.span().first();
    bad.copy(Direction::FromHost, at, CardAddr::new(0), 64).unwrap();
    drop(mapping);
    bad.copy(Direction::FromHost, at, CardAddr::new(0), 64).unwrap();
    pause();
    // Mapped for reading only.
    let mapping = map(bad.bus(), &buf, Access::READ);
    buf.as_volatile_slice().fill(0x22);
    bad.copy(Direction::ToHost, mapping.span().first(), CardAddr::new(0), 64).unwrap();
    buf.as_volatile_slice().sub(0, 64).unwrap().read(&mut bytes[..64]);
    assert!(bytes[..64].iter().all(|b| *b == 0x22));
    let mut seen = log.take();
    seen.dedup_by_key(|f| (f.bdf, f.at.align_down(page_size()), f.write));
    seen.iter().for_each(|f| println!("{}", f.line));
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert!(seen.iter().all(|f| f.bdf == bad.bus().bdf()));
    assert_eq!(seen.iter().map(|f| f.write).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(seen[1].at, at);
    drop((mapping, _registered));
    assert_eq!(
        (container.mappings_left().unwrap(), container.mapped_bytes(), container.failed_unmaps()),
        (before, 0, 0)
    );
}

/// An `edu` in the conformance suite.
struct EduFixture {
    edu: Edu,
    heap: AnonHeap,
    /// To access the device's memory without the channel.
    spare: SharedBuf,
    window: Mapping,
}

impl EduFixture {
    fn fragments(&self, len: usize, direction: Direction, mut each: impl FnMut(&SharedBuf, usize, usize)) {
        for start in (0..len).step_by(2048) {
            let n = (len - start).min(2048);
            if direction == Direction::FromHost {
                each(&self.spare, start, n);
            }
            let card = CardAddr::new(start as u64);
            self.edu.copy(direction, self.window.span().first(), card, n as u64).unwrap();
            if direction == Direction::ToHost {
                each(&self.spare, start, n);
            }
        }
    }
}

impl Fixture for EduFixture {
    type Queue = EduQueue;

    fn queue(&mut self) -> EduQueue {
        self.edu.queue()
    }

    fn target_len(&self) -> u64 {
        self.edu.memory()
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::Card(CardAddr::new(offset))
    }

    fn host(&mut self, len: usize) -> HostSlice {
        let buf = self.heap.allocate(len).unwrap().share();
        let via = Registered::new(&**self.edu.bus(), &buf, Access::RW).unwrap();
        // Exactly `len` bytes: an operation has at most 2048.
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.edu.memory() as usize];
        self.fragments(bytes.len(), Direction::ToHost, |spare, start, n| {
            spare.as_volatile_slice().sub(0, n).unwrap().read(&mut bytes[start..start + n]);
        });
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.fragments(bytes.len(), Direction::FromHost, |spare, start, n| {
            spare.as_volatile_slice().sub(0, n).unwrap().write(&bytes[start..start + n]);
        });
    }

    fn rounds(&self) -> u64 {
        10
    }
}

#[test]
fn conformance() {
    let edu = edu(edus()[0]);
    let heap = AnonHeap::new();
    let spare = heap.allocate(page()).unwrap().share();
    let window = map(edu.bus(), &spare, Access::RW);
    let container = edu.bus().device().container().clone();
    let mut fixture = EduFixture { edu, heap, spare, window };
    suite(&mut fixture);
    drop(fixture);
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
}
