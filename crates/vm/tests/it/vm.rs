//! The VM against a page-by-page model, and the ways in which one binding can cut another.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, Segment, SgIndex, Span};
use dmalane_iopt::{Arm64S1_4k, Format, HeapTables, TablePool, TableShape, Tables, X86_64_4Level};
use dmalane_vm::{AnyVm, BindRequest, BindingTarget, Bo, Committed, Error, PlanError, Vm};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;

/// Tables that hold the VM to its reservations: what was not reserved cannot be had, and a reservation of more than
/// `allow` fails.
#[derive(Debug)]
struct Strict {
    heap: HeapTables<CardAddr>,
    reserved: usize,
    allow: usize,
}

impl Strict {
    fn new() -> Self {
        Self { heap: HeapTables::new(CardAddr::new(1 << 40)), reserved: 1, allow: usize::MAX }
    }
}

impl Tables for Strict {
    type Addr = CardAddr;

    fn allocate(&mut self) -> Option<CardAddr> {
        self.reserved = self.reserved.checked_sub(1)?;
        self.heap.allocate()
    }
    fn free(&mut self, table: CardAddr) {
        self.heap.free(table);
    }
    fn load(&self, table: CardAddr, index: usize) -> u64 {
        self.heap.load(table, index)
    }
    fn store(&mut self, table: CardAddr, index: usize, entry: u64) {
        self.heap.store(table, index, entry);
    }
    fn reserve(&mut self, tables: usize) -> bool {
        if tables > self.allow {
            return false;
        }
        self.reserved = tables;
        true
    }
}

fn va(page: u64) -> DeviceVa {
    DeviceVa::new(page * PAGE)
}

fn span(page: u64, pages: u64) -> Span<DeviceVa> {
    Span::new(va(page), pages * PAGE).unwrap()
}

/// A buffer of these runs, in pages.
fn bo(id: u64, runs: &[(u64, u64)]) -> Arc<Bo> {
    let segment = |&(frame, pages): &(u64, u64)| Segment { addr: CardAddr::new(frame * PAGE), len: pages * PAGE };
    Arc::new(Bo::of_segments(id, runs.iter().map(segment)).unwrap())
}

fn bind(page: u64, bo: &Arc<Bo>, offset: u64, pages: u64, access: Access) -> BindRequest {
    BindRequest::Bind { va: va(page), bo: bo.clone(), offset: offset * PAGE, len: pages * PAGE, access }
}

/// First page, pages, buffer, page of the buffer, access.
type Row = (u64, u64, u64, u64, Access);

/// The bindings; those that repeat count as one for each page.
fn bindings<F: Format, T: Tables>(vm: &Vm<F, T>) -> Vec<Row> {
    let mut rows = Vec::new();
    for b in vm.bindings() {
        let (first, pages) = (b.span.first().bits() / PAGE, b.span.len() / PAGE);
        match &b.to {
            BindingTarget::Bo { bo, offset } => rows.push((first, pages, bo.id(), offset / PAGE, b.access)),
            BindingTarget::Repeat { bo, offset, page } => {
                let repeat = page / PAGE;
                rows.extend((first..first + pages).map(|p| (p, 1, bo.id(), offset / PAGE + p % repeat, b.access)));
            }
            BindingTarget::Null => {
                rows.extend((first..first + pages).map(|p| (p, 1, NULL_BO, p % NULL_PAGES, b.access)))
            }
            _ => unreachable!("no other targets"),
        }
    }
    rows
}

/// Stands for the null page where a buffer is named: 4 pages that all null ranges show.
const NULL_BO: u64 = 99;
const NULL_PAGES: u64 = 4;
const NULL_FRAME: u64 = 77_000;

/// Everything that can be seen of a VM.
fn snapshot<F: Format>(vm: &Vm<F, Strict>) -> impl PartialEq + use<F> {
    let runs: Vec<_> = vm.runs(vm.range()).collect();
    (bindings(vm), runs, vm.page_table().tables().heap.in_use())
}

fn run<F: Format, T: Tables>(vm: &mut Vm<F, T>, requests: impl IntoIterator<Item = BindRequest>) -> Committed<T::Addr> {
    vm.plan(requests).unwrap().commit()
}

/// Page of the VM -> buffer, page of the buffer, access.
type Model = BTreeMap<u64, (u64, u64, Access)>;

fn apply(model: &mut Model, request: &BindRequest) {
    match request {
        BindRequest::Bind { va, bo, offset, len, access } => {
            for i in 0..len / PAGE {
                model.insert(va.bits() / PAGE + i, (bo.id(), offset / PAGE + i, *access));
            }
        }
        BindRequest::Repeat { va, bo, offset, page, len, access } => {
            for i in 0..len / PAGE {
                model.insert(va.bits() / PAGE + i, (bo.id(), offset / PAGE + i % (page / PAGE), *access));
            }
        }
        BindRequest::Null { va, len } => {
            for at in va.bits() / PAGE..(va.bits() + len) / PAGE {
                model.insert(at, (NULL_BO, at % NULL_PAGES, Access::READ));
            }
        }
        BindRequest::Unbind(span) => {
            model.retain(|page, _| !span.contains(va(*page)));
        }
        BindRequest::UnbindBo(bo) => model.retain(|_, (id, ..)| *id != bo.id()),
        BindRequest::Prefetch(_) => {}
        _ => unreachable!("no other requests"),
    }
}

fn agree<F: Format>(vm: &Vm<F, Strict>, model: &Model, bos: &[Arc<Bo>]) -> Result<(), TestCaseError> {
    let mut bound = Model::new();
    for (first, pages, bo, offset, access) in bindings(vm) {
        for i in 0..pages {
            prop_assert_eq!(bound.insert(first + i, (bo, offset + i, access)), None, "bindings overlap");
        }
    }
    prop_assert!(&bound == model, "bindings differ");
    let mut mapped = BTreeMap::new();
    for run in vm.runs(vm.range()) {
        for i in 0..run.len / PAGE {
            mapped.insert(run.at.bits() / PAGE + i, (run.to.bits() + i * PAGE, run.access));
        }
    }
    let card = |bo: u64, page: u64| {
        if bo == NULL_BO {
            (NULL_FRAME + page) * PAGE
        } else {
            bos[bo as usize].sg().segment_at(page * PAGE).unwrap().addr.bits()
        }
    };
    let expected: BTreeMap<_, _> =
        model.iter().map(|(&va, &(bo, page, access))| (va, (card(bo, page), access))).collect();
    prop_assert!(mapped == expected, "the page table differs");
    Ok(())
}

const RANGE_PAGES: u64 = 4 * 512;
const FIRST: u64 = 512; // the first block of the space is not part of the VM

/// Buffers of random requests: contiguous and aligned, in single pages, blocks that are not in order.
fn buffers() -> Vec<Arc<Bo>> {
    let scattered: Vec<_> = (0..600).map(|i| (100_000 + 2 * (i * 7 % 600), 1)).collect();
    vec![bo(0, &[(4 * 512, 4 * 512)]), bo(1, &scattered), bo(2, &[(40 * 512, 512), (3, 40), (20 * 512, 700)])]
}

#[derive(Clone, Debug)]
enum Ask {
    Bind {
        page: u64,
        bo: usize,
        offset: u64,
        pages: u64,
        access: Access,
    },
    Repeat {
        page: u64,
        bo: usize,
        offset: u64,
        /// Logarithm of the pages that repeat.
        repeat: u32,
        times: u64,
    },
    Null {
        page: u64,
        pages: u64,
    },
    Unbind {
        page: u64,
        pages: u64,
    },
    UnbindBo(usize),
    /// A request that is wrong in itself.
    Bad(u8),
}

fn near_block() -> impl Strategy<Value = u64> {
    (0u64..4, prop_oneof![3 => Just(0), 2 => 0u64..4, 1 => 509u64..512, 1 => 0u64..512]).prop_map(|(b, p)| b * 512 + p)
}

fn pages() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 1u64..5, 2 => Just(512), 1 => 510u64..520, 1 => 1u64..1400]
}

fn ask(bad: u32) -> impl Strategy<Value = Ask> {
    let access = prop_oneof![Just(Access::RW), Just(Access::READ), Just(Access::READ | Access::EXEC)];
    prop_oneof![
        6 => (near_block(), 0usize..3, near_block(), pages(), access)
            .prop_map(|(page, bo, offset, pages, access)| Ask::Bind { page, bo, offset, pages, access }),
        1 => (near_block(), 0usize..3, near_block(), 0u32..4, 1u64..300)
            .prop_map(|(page, bo, offset, repeat, times)| Ask::Repeat { page, bo, offset, repeat, times }),
        1 => (near_block(), pages()).prop_map(|(page, pages)| Ask::Null { page, pages }),
        3 => (near_block(), pages()).prop_map(|(page, pages)| Ask::Unbind { page, pages }),
        1 => (0usize..3).prop_map(Ask::UnbindBo),
        bad => (0u8..9).prop_map(Ask::Bad),
    ]
}

fn request(ask: &Ask, bos: &[Arc<Bo>]) -> BindRequest {
    match *ask {
        Ask::Bind { page, bo, offset, pages, access } => {
            // Fit into the buffer and the VM; refusals have a test of their own.
            let size = bos[bo].len() / PAGE;
            let offset = offset % size;
            let pages = pages.min(size - offset).min(RANGE_PAGES - page);
            bind(FIRST + page, &bos[bo], offset, pages, access)
        }
        Ask::Unbind { page, pages } => BindRequest::Unbind(span(FIRST + page, pages.min(RANGE_PAGES - page))),
        Ask::Repeat { page, bo, offset, repeat, times } => {
            let (page, repeat) = ((FIRST + page) >> repeat << repeat, 1 << repeat);
            BindRequest::Repeat {
                va: va(page),
                bo: bos[bo].clone(),
                offset: (offset % (bos[bo].len() / PAGE - repeat + 1)) * PAGE,
                page: repeat * PAGE,
                len: times.min((FIRST + RANGE_PAGES - page) / repeat) * repeat * PAGE,
                access: Access::RW,
            }
        }
        Ask::Null { page, pages } => {
            BindRequest::Null { va: va(FIRST + page), len: pages.min(RANGE_PAGES - page) * PAGE }
        }
        Ask::UnbindBo(bo) => BindRequest::UnbindBo(bos[bo].clone()),
        Ask::Bad(n) => bad(n, bos).0,
    }
}

type Expected = fn(&Error) -> bool;

/// A bad request and the error it must give.
fn bad(n: u8, bos: &[Arc<Bo>]) -> (BindRequest, Expected) {
    let odd = [(0x1000, 100), (0x8000, 2 * PAGE - 100)].map(|(at, len)| Segment { addr: CardAddr::new(at), len });
    let odd = Arc::new(Bo::of_segments(9, odd).unwrap());
    let far = bo(8, &[((1 << 40) - 1, 2)]); // reaches 2^52
    let (good, at) = (&bos[0], va(FIRST));
    let bind_bytes = |va: DeviceVa, bo: &Arc<Bo>, offset, len| BindRequest::Bind {
        va,
        bo: bo.clone(),
        offset,
        len,
        access: Access::RW,
    };
    match n {
        0 => (bind(FIRST, good, 0, 0, Access::RW), |e| matches!(e, Error::Empty { .. })),
        1 => (bind_bytes(at, good, 0, PAGE + 1), |e| matches!(e, Error::Misaligned { .. })),
        2 => (bind_bytes(at, good, 1, PAGE), |e| matches!(e, Error::MisalignedOffset { offset: 1, .. })),
        3 => (bind_bytes(at, good, !0xfff, PAGE), |e| matches!(e, Error::BeyondBo { .. })),
        4 => (bind(FIRST - 1, good, 0, 2, Access::RW), |e| matches!(e, Error::OutsideVm { .. })),
        5 => {
            (bind(FIRST, good, 0, 2, Access::WRITE), |e| matches!(e, Error::Unsupported { access: Access::WRITE, .. }))
        }
        6 => (bind(FIRST, &odd, 0, 2, Access::RW), |e| matches!(e, Error::Segment { bo: 9, .. })),
        7 => (bind(FIRST, &far, 0, 2, Access::RW), |e| matches!(e, Error::Segment { bo: 8, .. })),
        8 => (BindRequest::Unbind(Span::new(at, 5).unwrap()), |e| matches!(e, Error::Misaligned { .. })),
        9 => (bind_bytes(DeviceVa::new(!0xfff), good, 0, 2 * PAGE), |e| matches!(e, Error::Wraps { .. })),
        10 => (bind_bytes(DeviceVa::new(!0xfff), good, 0, PAGE), |e| matches!(e, Error::OutsideVm { .. })),
        11 => (bind_bytes(at, good, PAGE, good.len()), |e| matches!(e, Error::BeyondBo { .. })),
        12 => (bind_bytes(at, good, 0, u64::MAX), |e| matches!(e, Error::Wraps { .. } | Error::BeyondBo { .. })),
        13 => (BindRequest::Unbind(span(FIRST, RANGE_PAGES + 1)), |e| matches!(e, Error::OutsideVm { .. })),
        _ => (bind_bytes(at + 8, good, 0, PAGE), |e| matches!(e, Error::Misaligned { .. })),
    }
}

fn new_vm<F: Format>() -> Vm<F, Strict> {
    let mut vm = Vm::new(span(FIRST, RANGE_PAGES), Strict::new()).unwrap();
    vm.set_null_page(CardAddr::new(NULL_FRAME * PAGE), NULL_PAGES * PAGE).unwrap();
    vm
}

fn random_batches<F: Format>(batches: &[Vec<Ask>]) -> Result<(), TestCaseError> {
    let bos = buffers();
    let mut vm = new_vm::<F>();
    let mut model = Model::new();
    for batch in batches {
        let requests: Vec<BindRequest> = batch.iter().map(|a| request(a, &bos)).collect();
        let before = snapshot(&vm);
        if batch.iter().any(|a| matches!(a, Ask::Bad(_))) {
            prop_assert!(vm.plan(requests).is_err());
            prop_assert!(snapshot(&vm) == before, "a refused batch left a trace");
            continue;
        }
        // Every amount of memory that is not enough.
        let mut refused = 0;
        for allow in 0.. {
            vm.tables_mut().allow = allow;
            match vm.plan(requests.clone()) {
                Ok(dropped) => {
                    drop(dropped);
                    break;
                }
                Err(PlanError { error: Error::NoTables { tables, .. }, .. }) => prop_assert!(tables > allow),
                Err(e) => prop_assert!(false, "{e}"),
            }
            refused += 1;
            prop_assert!(refused < 1000);
        }
        prop_assert!(snapshot(&vm) == before, "a failed or dropped plan left a trace");

        let old = model.clone();
        requests.iter().for_each(|r| apply(&mut model, r));
        let committed = run(&mut vm, requests);
        for (page, was) in &old {
            if model.get(page) != Some(was) {
                prop_assert!(committed.spans().any(|s| s.contains(va(*page))), "page {page} not invalidated");
            }
        }
        vm.invalidated(committed);
        agree(&vm, &model, &bos)?;
    }
    vm.tables_mut().allow = usize::MAX;
    let range = vm.range();
    let committed = run(&mut vm, [BindRequest::Unbind(range)]);
    vm.invalidated(committed);
    agree(&vm, &Model::new(), &bos)?;
    prop_assert_eq!(vm.page_table().tables().heap.in_use(), 1, "only the root is left");
    prop_assert!(bos.iter().all(|bo| Arc::strong_count(bo) == 1), "a binding outlived its unbind");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_batches_x86(batches in prop::collection::vec(prop::collection::vec(ask(1), 0..6), 1..8)) {
        random_batches::<X86_64_4Level>(&batches)?;
    }

    #[test]
    fn random_batches_arm(batches in prop::collection::vec(prop::collection::vec(ask(0), 1..6), 1..8)) {
        random_batches::<Arm64S1_4k>(&batches)?;
    }
}

#[test]
fn a_look_at_one_page_does_not_walk_the_binding_around_it() {
    const PAGES: u64 = 1 << 17;
    let whole = Span::new(va(0), 1 << 40).unwrap();
    let mut vm = Vm::<X86_64_4Level, _>::new(whole, HeapTables::new(CardAddr::new(1 << 45))).unwrap();
    let bo = bo(1, &[(0, PAGES)]);
    // Page by page, so that there is a record of each; the first two stay free.
    let _ = run(&mut vm, (2..PAGES).map(|page| bind(page, &bo, page, 1, Access::READ)));
    let start = std::time::Instant::now();
    for _ in 0..2000 {
        let mut seen = Vec::new();
        for page in [0, 2, PAGES / 2] {
            AnyVm::mapping(&vm, span(page, 1), &mut |mapped| {
                seen.push(mapped.span);
                std::ops::ControlFlow::Continue(())
            });
        }
        assert_eq!(seen, [span(2, 1), span(PAGES / 2, 1)]);
    }
    // 6000 walks of the whole binding took 443 s.
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn every_refusal_leaves_the_vm_as_it_was() {
    let bos = buffers();
    let mut vm = new_vm::<X86_64_4Level>();
    let committed = run(&mut vm, [bind(FIRST, &bos[0], 0, 600, Access::RW)]);
    vm.invalidated(committed);
    let before = snapshot(&vm);
    for n in 0..15 {
        let (request, expected) = bad(n, &bos);
        // After requests that would change much.
        let batch = [BindRequest::Unbind(vm.range()), bind(FIRST + 3, &bos[1], 0, 9, Access::READ), request];
        let e = vm.plan(batch).unwrap_err();
        assert_eq!(e.index, 2);
        assert!(expected(&e.error), "{n}: {e:?}");
        assert!(snapshot(&vm) == before, "{n}");
    }
    // An output address beyond the format's, which is narrower here.
    let mut arm = new_vm::<Arm64S1_4k>();
    let e = arm.plan([bind(FIRST, &bo(5, &[((1 << 36) - 1, 2)]), 0, 2, Access::RW)]).unwrap_err().error;
    assert!(matches!(e, Error::Segment { bo: 5, source: dmalane_iopt::Error::OutputRange { .. }, .. }), "{e:?}");
}

#[test]
fn a_vm_that_cannot_be() {
    let tables = || HeapTables::new(CardAddr::new(0));
    let new = |first, len| Vm::<X86_64_4Level, _>::new(Span::new(DeviceVa::new(first), len).unwrap(), tables()).err();
    assert!(matches!(new(0, 1), Some(Error::Misaligned { .. })));
    assert!(matches!(new(0, (1 << 48) + PAGE), Some(Error::New { .. })));
    assert!(matches!(new(!0xfff, PAGE), Some(Error::New { .. })));
    assert_eq!(new(0, 1 << 48), None);
    let none = HeapTables::with_limit(CardAddr::new(0), 0);
    let e = Vm::<X86_64_4Level, _>::new(span(0, 1), none).unwrap_err();
    assert!(matches!(e, Error::New { source: dmalane_iopt::Error::NoTables { .. }, .. }));
}

/// The cases that Linux lists for its GPU VA manager (kernel documentation, "DRM GPUVM", "Split and Merge"), without
/// its merging. One binding of buffer 0 is at pages 4 to 7 from page 10 of the buffer; request pages; what must be
/// there.
/// Memory for tables, of each kind, that goes on behind the last address that an entry can name.
#[test]
fn table_memory_at_the_end_of_addresses() {
    fn fill<F: Format, T: Tables<Addr = CardAddr>>(tables: T, few: bool) {
        let range = Span::inclusive(DeviceVa::new(0), DeviceVa::new(u64::MAX >> (64 - F::INPUT_BITS))).unwrap();
        let page = F::GRANULE.bytes();
        let bo =
            Arc::new(Bo::of_segments(1, [Segment { addr: CardAddr::new(0), len: page << F::INDEX_BITS }]).unwrap());
        let mut vm = Vm::<F, _>::new(range, tables).unwrap();
        // Pages at both ends and between, then whole tables: a table each at least, until there is none.
        let (last, whole) = (range.last().bits() / page, 1 << F::INDEX_BITS);
        let places = (0..40).flat_map(|n| [(n * 3 * whole, 1), (last - n * 3 * whole, 1), (n * 3 * whole, whole)]);
        let (mut refused, all) = (0, 120);
        for (first, count) in places {
            let va = DeviceVa::new(first * page);
            let bind = BindRequest::Bind { va, bo: bo.clone(), offset: 0, len: count * page, access: Access::RW };
            match vm.apply(vec![bind], false) {
                Ok(committed) => vm.invalidated(committed),
                Err(e) => {
                    assert!(matches!(e.error, Error::NoTables { .. }), "{e:?}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 0 && (few || refused < all), "{}: {refused}", F::NAME);
        let committed = run(&mut vm, [BindRequest::Unbind(range)]);
        vm.invalidated(committed);
    }
    fn ends<F: Format>() {
        let root = TableShape::of::<F>().root.bytes();
        // More than there are addresses for.
        let words: Vec<_> = (0..12 * root / 8).map(|_| Default::default()).collect();
        for tables in [0, 1, F::LEVELS as u64] {
            let base = CardAddr::new((1 << F::OUTPUT_BITS) - (1 + tables) * root);
            let few = tables < F::LEVELS as u64;
            fill::<F, _>(HeapTables::new(base), few);
            fill::<F, _>(&mut TablePool::new::<F>(base, &words), few);
            fill::<F, _>(&TablePool::new::<F>(base, &words), few);
            fill::<F, _>(TablePool::new::<F>(base, &words).local(4), few);
        }
    }
    macro_rules! each {
        ($($name:ident: $format:ty;)*) => { $(ends::<$format>();)* };
    }
    crate::geometries::geometries!(each);
}

#[test]
fn split_cases() {
    const OLD: Access = Access::RW;
    const NEW: Access = Access::READ;
    type Case = (&'static str, u64, u64, &'static [Row], &'static [Row]);
    let cases: &[Case] = &[
        ("the same pages", 4, 4, &[(4, 4, 1, 0, NEW)], &[]),
        ("left part", 4, 2, &[(4, 2, 1, 0, NEW), (6, 2, 0, 12, OLD)], &[(6, 2, 0, 12, OLD)]),
        ("right part", 6, 2, &[(4, 2, 0, 10, OLD), (6, 2, 1, 0, NEW)], &[(4, 2, 0, 10, OLD)]),
        (
            "middle",
            5,
            2,
            &[(4, 1, 0, 10, OLD), (5, 2, 1, 0, NEW), (7, 1, 0, 13, OLD)],
            &[(4, 1, 0, 10, OLD), (7, 1, 0, 13, OLD)],
        ),
        ("over the left end", 3, 3, &[(3, 3, 1, 0, NEW), (6, 2, 0, 12, OLD)], &[(6, 2, 0, 12, OLD)]),
        ("over the right end", 6, 3, &[(4, 2, 0, 10, OLD), (6, 3, 1, 0, NEW)], &[(4, 2, 0, 10, OLD)]),
        ("over both ends", 3, 6, &[(3, 6, 1, 0, NEW)], &[]),
        ("from the left end on and over", 4, 5, &[(4, 5, 1, 0, NEW)], &[]),
        ("over and up to the right end", 3, 5, &[(3, 5, 1, 0, NEW)], &[]),
        ("just before", 2, 2, &[(2, 2, 1, 0, NEW), (4, 4, 0, 10, OLD)], &[(4, 4, 0, 10, OLD)]),
        ("just after", 8, 2, &[(4, 4, 0, 10, OLD), (8, 2, 1, 0, NEW)], &[(4, 4, 0, 10, OLD)]),
    ];
    let bos = [bo(0, &[(100, 20)]), bo(1, &[(200, 20)])];
    for &(name, page, pages, bound, unbound) in cases {
        for (request, expected) in
            [(bind(page, &bos[1], 0, pages, NEW), bound), (BindRequest::Unbind(span(page, pages)), unbound)]
        {
            let mut vm = Vm::<X86_64_4Level, _>::new(span(0, 100), Strict::new()).unwrap();
            let first = run(&mut vm, [bind(4, &bos[0], 10, 4, OLD)]);
            assert!(first.is_empty());
            vm.invalidated(first);
            let committed = run(&mut vm, [request]);
            assert_eq!(bindings(&vm), expected, "{name}");
            let cut = 4.max(page)..8.min(page + pages);
            assert_eq!(committed.unmapped_bytes(), cut.count() as u64 * PAGE, "{name}");
            assert_eq!(committed.is_empty(), page + pages <= 4 || page >= 8, "{name}");
            vm.invalidated(committed);
            let mut model = Model::new();
            for &(first, pages, bo, offset, access) in expected {
                model.extend((0..pages).map(|i| (first + i, (bo, offset + i, access))));
            }
            agree(&vm, &model, &bos).unwrap();
        }
    }
}

/// The same requests where the new binding shows the same buffer and continues the old one: both are one. With other
/// rights, or one page further in the buffer, they are not.
#[test]
fn contiguous_cases() {
    const RW: Access = Access::RW;
    let bo = bo(0, &[(100, 40)]);
    for (page, pages) in
        [(4, 4), (4, 2), (6, 2), (5, 2), (3, 3), (6, 3), (3, 6), (4, 5), (3, 5), (2, 2), (8, 2), (1, 2), (9, 2)]
    {
        for (shift, access) in [(0, RW), (1, RW), (0, Access::READ)] {
            let mut vm = Vm::<X86_64_4Level, _>::new(span(0, 100), Strict::new()).unwrap();
            let committed = run(&mut vm, [bind(4, &bo, 14, 4, RW)]);
            vm.invalidated(committed);
            let committed = run(&mut vm, [bind(page, &bo, 10 + page + shift, pages, access)]);
            vm.invalidated(committed);
            let end = page + pages;
            let one: Vec<Row> = match (shift, access) {
                // Apart from each other.
                (0, RW) if end < 4 => vec![(page, pages, 0, 10 + page, RW), (4, 4, 0, 14, RW)],
                (0, RW) if page > 8 => vec![(4, 4, 0, 14, RW), (page, pages, 0, 10 + page, RW)],
                (0, RW) => vec![(4.min(page), 8.max(end) - 4.min(page), 0, 10 + 4.min(page), RW)],
                _ => {
                    let old = [(4, page.clamp(4, 8)), (end.clamp(4, 8), 8)];
                    let mut rows: Vec<Row> = old.iter().map(|&(a, b)| (a, b - a, 0, 10 + a, RW)).collect();
                    rows.push((page, pages, 0, 10 + page + shift, access));
                    rows.retain(|row| row.1 > 0);
                    rows.sort_by_key(|row| row.0);
                    rows
                }
            };
            assert_eq!(bindings(&vm), one, "{pages} pages at {page}, {shift} further, {access}");
            let middle = page + pages / 2;
            // Both halves of a request in the middle of one binding, and back.
            let committed = run(&mut vm, [BindRequest::Unbind(span(middle, 1))]);
            vm.invalidated(committed);
            let access = if shift == 0 { access } else { RW };
            let committed = run(&mut vm, [bind(middle, &bo, 10 + middle + shift, 1, access)]);
            vm.invalidated(committed);
            assert_eq!(bindings(&vm), one);
        }
    }
}

#[test]
fn one_bind_over_several() {
    let bos = [bo(0, &[(100, 20)]), bo(1, &[(200, 20)])];
    let mut vm = Vm::<X86_64_4Level, _>::new(span(0, 100), Strict::new()).unwrap();
    let rw = Access::RW;
    let requests = [
        bind(0, &bos[0], 0, 4, rw),
        bind(5, &bos[0], 5, 2, rw),
        bind(8, &bos[0], 8, 4, rw),
        bind(2, &bos[1], 0, 8, rw),
    ];
    let committed = run(&mut vm, requests);
    assert_eq!(bindings(&vm), [(0, 2, 0, 0, rw), (2, 8, 1, 0, rw), (10, 2, 0, 10, rw)]);
    assert_eq!(committed.unmapped_bytes(), 6 * PAGE);
    vm.invalidated(committed);
}

#[test]
fn large_leaves_where_both_sides_are_aligned() {
    let big = bo(1, &[(1 << 18, 2 << 18)]); // 2 GiB at 1 GiB
    let mut vm = Vm::<Arm64S1_4k, _>::new(Span::new(va(0), 8 << 30).unwrap(), Strict::new()).unwrap();
    let committed = run(&mut vm, [bind(1 << 18, &big, 0, 2 << 18, Access::RW)]);
    assert!(committed.is_empty());
    vm.invalidated(committed);
    let counts = |vm: &Vm<Arm64S1_4k, Strict>| vm.page_table().leaf_counts().map(|(_, n)| n).collect::<Vec<_>>();
    assert_eq!(counts(&vm), [0, 0, 2]);

    // One page out of the middle of a leaf: the flush covers the whole leaf, which a TLB may hold as one.
    let hole = span((1 << 18) + 512 + 1, 1);
    let committed = run(&mut vm, [BindRequest::Unbind(hole)]);
    assert_eq!(committed.spans().collect::<Vec<_>>(), [Span::new(DeviceVa::new(1 << 30), 1 << 30).unwrap()]);
    assert_eq!(committed.unmapped_bytes(), PAGE);
    vm.invalidated(committed);
    assert_eq!(counts(&vm), [511, 511, 1]);
    assert_eq!(vm.bindings().count(), 2);
    assert_eq!(vm.lookup(hole.first()), None);
    let left = vm.lookup(DeviceVa::new(1 << 30)).unwrap();
    assert_eq!(
        (left.size, left.translate(DeviceVa::new((1 << 30) + 7))),
        (PageSize::SIZE_2M, Some(CardAddr::new((1 << 30) + 7)))
    );

    // Not aligned to each other: no large leaf.
    let committed = run(&mut vm, [BindRequest::Unbind(vm_range()), bind(512, &big, 1, 1024, Access::RW)]);
    vm.invalidated(committed);
    assert_eq!(counts(&vm), [1024, 0, 0]);
}

fn vm_range() -> Span<DeviceVa> {
    Span::new(va(0), 8 << 30).unwrap()
}

#[test]
fn pages_bound_one_by_one_become_a_large_leaf_again() {
    let (big, other) = (bo(1, &[(4 * 512, 1024)]), bo(2, &[(6 * 512, 512)]));
    let mut vm = new_vm::<X86_64_4Level>();
    let committed = run(&mut vm, (0..1024).map(|i| bind(FIRST + i, &big, i, 1, Access::RW)));
    vm.invalidated(committed);
    // Continues on the card, but in another buffer.
    let committed = run(&mut vm, (0..512).map(|i| bind(FIRST + 1024 + i, &other, i, 1, Access::RW)));
    vm.invalidated(committed);
    let counts = |vm: &Vm<X86_64_4Level, Strict>| vm.page_table().leaf_counts().map(|(_, n)| n).collect::<Vec<_>>();
    assert_eq!(counts(&vm), [3 * 512, 0, 0]);
    let before = bindings(&vm);
    let mut gone = Vec::new();
    assert_eq!(vm.merge(span(FIRST + 1, RANGE_PAGES - 1), |span| gone.push(span)).unwrap(), 2, "not the first table");
    assert_eq!(gone, [span(FIRST + 512, 512), span(FIRST + 1024, 512)]);
    assert_eq!(counts(&vm), [512, 2, 0]);
    assert_eq!(bindings(&vm), before);
    let committed = run(&mut vm, [BindRequest::Unbind(span(FIRST + 600, 1)), BindRequest::UnbindBo(other.clone())]);
    vm.invalidated(committed);
    assert_eq!(bindings(&vm), [(FIRST, 600, 1, 0, Access::RW), (FIRST + 601, 423, 1, 601, Access::RW)]);
    assert!(matches!(vm.merge(span(0, 600), |_| ()), Err(Error::OutsideVm { .. })));
}

/// Pieces that repeat without end are refused before anything goes through all of them.
#[test]
fn a_repetition_of_pieces_that_cannot_be() {
    let scattered: Vec<_> = (0..2048).map(|i| (2 * i, 1)).collect();
    let (bo, tables) = (bo(1, &scattered), HeapTables::with_limit(CardAddr::new(0), 1000));
    let mut vm = Vm::<X86_64_4Level, _>::new(span(0, 1 << 35), tables).unwrap();
    let repeat =
        |len| BindRequest::Repeat { va: va(0), bo: bo.clone(), offset: 0, page: 8 << 20, len, access: Access::RW };
    let e = vm.plan([repeat(1 << 47)]).unwrap_err();
    // Four tables for each of 2^24 times, less those above them that may be shared.
    assert!(matches!(e.error, Error::NoTables { tables, .. } if tables >= 1 << 24), "{e:?}");
    let committed = run(&mut vm, [repeat(64 << 20)]);
    vm.invalidated(committed);
    assert_eq!(vm.page_table().leaf_counts().map(|(_, n)| n).collect::<Vec<_>>(), [8 * 2048, 0, 0]);
}

#[test]
fn later_requests_of_a_batch_see_earlier_ones() {
    let bos = buffers();
    let mut vm = new_vm::<X86_64_4Level>();
    let rw = Access::RW;
    let batch = [
        bind(FIRST, &bos[0], 0, 512, rw),
        BindRequest::Unbind(span(FIRST + 10, 1)),
        bind(FIRST + 11, &bos[1], 0, 1, rw),
        BindRequest::Unbind(span(FIRST, 1)),
    ];
    let committed = run(&mut vm, batch);
    vm.invalidated(committed);
    assert_eq!(bindings(&vm), [(513, 9, 0, 1, rw), (523, 1, 1, 0, rw), (524, 500, 0, 12, rw)]);

    // The leaf that the last request splits was made by the first, above the second.
    let mut vm = new_vm::<X86_64_4Level>();
    let batch = [
        bind(FIRST + 1024, &bos[0], 0, 512, rw),
        bind(FIRST, &bos[0], 0, 512, rw),
        BindRequest::Unbind(span(FIRST + 1024 + 7, 1)),
    ];
    let committed = run(&mut vm, batch);
    vm.invalidated(committed);
    assert_eq!(vm.page_table().leaf_counts().map(|(_, n)| n).collect::<Vec<_>>(), [511, 1, 0]);
}

/// Consecutive small binds share their tables in the reservation as they do in the page table.
#[test]
fn a_long_batch_reserves_no_more_than_it_needs() {
    let bos = buffers();
    let mut vm = new_vm::<X86_64_4Level>();
    vm.tables_mut().allow = 2 + 4;
    let batch = (0..RANGE_PAGES).map(|i| bind(FIRST + i, &bos[1], i % 600, 1, Access::RW));
    let committed = run(&mut vm, batch);
    vm.invalidated(committed);
    // One page after another of a buffer of 600 pages: what continues is one binding.
    assert_eq!(vm.bindings().map(|b| b.span.len() / PAGE).collect::<Vec<_>>(), [600, 600, 600, 248]);
    // And 1 TiB of address space is unbound with what it takes to split two leaves.
    let mut vm = Vm::<X86_64_4Level, _>::new(Span::new(va(0), 1 << 40).unwrap(), Strict::new()).unwrap();
    let committed = run(&mut vm, [bind(0, &bos[0], 0, 2048, Access::RW)]);
    vm.invalidated(committed);
    vm.tables_mut().allow = 4;
    let committed = run(&mut vm, [BindRequest::Unbind(Span::new(va(1), (1 << 40) - BLOCK).unwrap())]);
    vm.invalidated(committed);
    assert_eq!(bindings(&vm), [(0, 1, 0, 0, Access::RW)]);
}

/// A table that one request empties must be reserved again for the next.
#[test]
fn a_batch_that_binds_unbinds_and_binds_again() {
    const GIB: u64 = 1 << 18; // pages
    let bos = buffers();
    let mut vm = Vm::<X86_64_4Level, _>::new(span(0, 4 * GIB), Strict::new()).unwrap();
    let again = || [bind(GIB, &bos[1], 0, 1, Access::RW), BindRequest::Unbind(span(GIB, GIB))];
    let committed = run(&mut vm, [again(), again(), again()].into_iter().flatten());
    assert_eq!(committed.tables().len(), 2 + 2 + 2 + 1, "two below the gigabyte each time, one above it at the end");
    vm.invalidated(committed);
    assert_eq!(vm.page_table().tables().heap.in_use(), 1);
}

/// Unbinds of single pages, which are planned as one, empty a table, which stays for the next.
#[test]
fn a_batch_that_empties_a_table_page_by_page_and_binds_again() {
    let bos = buffers();
    let mut vm = new_vm::<X86_64_4Level>();
    let committed = run(&mut vm, (0..512).map(|page| bind(FIRST + page, &bos[1], page, 1, Access::RW)));
    vm.invalidated(committed);
    (vm.tables_mut().reserved, vm.tables_mut().allow) = (0, 0);
    let unbinds = (0..512).map(|page| BindRequest::Unbind(span(FIRST + page, 1)));
    let committed = run(&mut vm, unbinds.chain([bind(FIRST + 7, &bos[1], 0, 1, Access::RW)]));
    vm.invalidated(committed);
    assert_eq!(bindings(&vm), [(FIRST + 7, 1, 1, 0, Access::RW)]);
}

/// Pages bound one by one are checked as others are, also where nothing else has to be planned for them.
#[test]
fn single_pages_are_refused_as_others_are() {
    let bos = buffers();
    let mut vm = new_vm::<X86_64_4Level>();
    for page in 0..4 {
        let committed = vm.bind(va(FIRST + page), &bos[0], page * PAGE, PAGE, Access::RW).unwrap();
        vm.invalidated(committed);
    }
    let mut refused =
        |at, offset| vm.bind(DeviceVa::new((FIRST + 4) * PAGE + at), &bos[0], offset, PAGE, Access::RW).unwrap_err();
    assert!(matches!(refused(8, 0), Error::Misaligned { .. }));
    assert!(matches!(refused(0, 8), Error::MisalignedOffset { .. }));
    assert!(matches!(refused(8, 8), Error::Misaligned { .. }));
    // Page after page of a buffer that ends within one.
    let odd = [Segment { addr: CardAddr::new(1 << 30), len: 2 * PAGE + 512 }];
    let odd = Arc::new(Bo::of_segments(1, odd).unwrap());
    let pages = (0..3).map(|page| bind(FIRST + 10 + page, &odd, page, 1, Access::RW));
    let e = vm.plan([bind(FIRST + 20, &odd, 0, 1, Access::RW)].into_iter().chain(pages)).unwrap_err();
    assert!(e.index == 3 && matches!(e.error, Error::BeyondBo { .. }), "{e:?}");
}

/// A request to repeat a page is one also where a bind would continue the last.
#[test]
fn a_page_that_repeats_once_is_one_that_repeats() {
    let (bos, mut vm) = (buffers(), new_vm::<X86_64_4Level>());
    let repeat = BindRequest::Repeat {
        va: va(FIRST + 1),
        bo: bos[0].clone(),
        offset: PAGE,
        page: PAGE,
        len: PAGE,
        access: Access::RW,
    };
    let rw = Access::RW;
    let committed = run(&mut vm, [bind(FIRST + 9, &bos[0], 0, 1, rw), bind(FIRST, &bos[0], 0, 1, rw), repeat]);
    vm.invalidated(committed);
    let to = vm.bindings().nth(1).unwrap().to;
    assert!(matches!(to, BindingTarget::Repeat { offset: PAGE, page: PAGE, .. }), "{to:?}");
}

#[test]
fn an_empty_batch_is_fine() {
    let mut vm = new_vm::<X86_64_4Level>();
    vm.tables_mut().allow = 0;
    let committed = run(&mut vm, []);
    assert!(committed.is_empty());
    vm.invalidated(committed);
}

/// A plan that is leaked is as if it had been dropped, whatever call comes next.
#[test]
fn a_leaked_plan_is_taken_back() {
    let small =
        Arc::new(Bo::new(1, SgIndex::try_new([Segment { addr: CardAddr::new(1 << 30), len: 8 * PAGE }]).unwrap()));
    let large =
        Arc::new(Bo::new(2, SgIndex::try_new([Segment { addr: CardAddr::new(1 << 31), len: 4 * BLOCK }]).unwrap()));
    type Next = fn(&mut Vm<X86_64_4Level, HeapTables<CardAddr>>, &Arc<Bo>);
    let next: [(&str, Next); 5] = [
        ("bind", |vm, small| {
            let done = vm.bind(va(512 * 9 + 1), small, 0, PAGE, Access::RW).unwrap();
            vm.invalidated(done);
        }),
        ("unbind", |vm, _| {
            let done = vm.unbind(span(512 * 4 + 7, 1)).unwrap();
            vm.invalidated(done);
        }),
        ("plan", |vm, small| {
            let plan = vm.plan([BindRequest::Prefetch(span(0, 1)), BindRequest::UnbindBo(small.clone())]).unwrap();
            let done = plan.commit();
            assert_eq!(done.prefetches().count(), 1);
            vm.invalidated(done);
        }),
        ("an empty plan", |vm, _| {
            let done = vm.plan([]).unwrap().commit();
            assert!(done.is_empty() && done.prefetches().next().is_none());
            vm.invalidated(done);
        }),
        ("merge", |vm, _| assert_eq!(vm.merge(span(512 * 4, 512 * 4), |_| ()), Ok(0))),
    ];
    for (name, next) in next {
        let run = |leak: bool| {
            let mut vm =
                Vm::<X86_64_4Level, _>::new(span(0, 1 << 20), HeapTables::new(CardAddr::new(1 << 40))).unwrap();
            for request in [bind(512 * 4, &large, 0, 4 * 512, Access::RW), bind(1, &small, 0, 2, Access::RW)] {
                let done = vm.plan([request]).unwrap().commit();
                vm.invalidated(done);
            }
            if leak {
                // New chunks, a leaf that would be split, a buffer that is not bound, all that there is to take away.
                let other = bo(3, &[(1 << 20, 1)]);
                std::mem::forget(vm.plan([
                    bind(512 * 9, &small, 0, 1, Access::RW),
                    BindRequest::Unbind(span(512 * 4 + 5, 1)),
                    bind(512 * 12, &other, 0, 1, Access::RW),
                    BindRequest::UnbindBo(small.clone()),
                    BindRequest::Prefetch(span(3, 1)),
                ]));
            }
            next(&mut vm, &small);
            let all = span(0, 1 << 20);
            let bindings: Vec<_> = vm.bindings().map(|b| (b.span, b.access)).collect();
            let runs: Vec<_> = vm.runs(all).collect();
            let bound = [vm.bound_bytes(&small), vm.bound_bytes(&large)];
            let done = vm.unbind(all).unwrap();
            vm.invalidated(done);
            (format!("{bindings:?} {runs:?} {bound:?}"), Arc::strong_count(&small), vm.runs(all).count())
        };
        assert_eq!(run(true), run(false), "{name}");
    }
}
