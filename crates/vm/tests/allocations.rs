//! Memory that runs out: at every allocation of a plan in turn, and never in a commit.
#![allow(unsafe_code)]

mod geometries;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, SgIndex, SgTable, Span};
use dmalane_iopt::{Format, HeapTables, TablePool, TableShape, Tables};
use dmalane_vm::{BindRequest, Bo, Error, Vm};
use geometries::geometries;

/// The system's allocator, until it is told to fail.
struct Failing;

thread_local! {
    /// Allocations of this thread that still succeed.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

impl Failing {
    /// Counts an allocation; false when it shall fail.
    fn take() -> bool {
        LEFT.try_with(|left| match left.get() {
            u64::MAX => true,
            0 => false,
            n => {
                left.set(n - 1);
                true
            }
        })
        .unwrap_or(true)
    }
}

// SAFETY: hands every call on to the system's allocator as it is, or gives null, which says that there is no memory.
unsafe impl GlobalAlloc for Failing {
    // SAFETY: as in `GlobalAlloc`.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this very method.
        if Self::take() { unsafe { System.alloc(layout) } } else { std::ptr::null_mut() }
    }
    // SAFETY: as in `GlobalAlloc`.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract, and the memory came from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
    // SAFETY: as in `GlobalAlloc`.
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        if Self::take() { unsafe { System.realloc(ptr, layout, size) } } else { std::ptr::null_mut() }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Runs `f` with `n` allocations, and no more.
fn with_allocations<R>(n: u64, f: impl FnOnce() -> R) -> R {
    LEFT.set(n);
    let result = f();
    LEFT.set(u64::MAX);
    result
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// Evaluates an expression for each format of a list.
macro_rules! for_each {
    ($format:ident => $do:expr; $($name:ident: $each:ty;)*) => {
        [$({
            type $format = $each;
            $do
        }),*]
    };
}

/// Everything that can be seen of a VM.
fn snapshot<F: Format>(vm: &Vm<F, HeapTables<CardAddr>>) -> impl PartialEq + use<F> {
    let bound = |b: dmalane_vm::Binding| (b.span, b.bo().map(|bo| bo.id()), b.offset(), b.access);
    (vm.bindings().map(bound).collect::<Vec<_>>(), vm.runs(vm.range()).collect::<Vec<_>>())
}

/// Gives the number of failures.
fn run_out<F: Format>() -> u64 {
    let granule = F::GRANULE.bytes();
    let chunk = 1 << F::INDEX_BITS;
    let pages = 4 * chunk;
    let base = 8 * chunk;
    let mut random = Random(0x5eed);
    let bos: Vec<_> = (0..20)
        .map(|id| {
            let mut sg = SgTable::new();
            for i in 0..chunk {
                let frame = if id % 2 == 0 { (id + 1) * 2 * chunk + i } else { (100 + id) * chunk + i * 7 % chunk };
                sg.push(CardAddr::new(frame * granule), granule).unwrap();
            }
            Arc::new(Bo::new(id, SgIndex::from_table(&sg).unwrap()))
        })
        .collect();
    let va = |page: u64| DeviceVa::new((base + page) * granule);
    let range = Span::new(va(0), pages * granule).unwrap();
    let mut vm = Vm::<F, _>::new(range, HeapTables::new(CardAddr::new(0))).unwrap();
    vm.set_null_page(CardAddr::new(1 << (F::OUTPUT_BITS - 1)), granule).unwrap();
    let mut failures = 0;
    // Fewer where a table, and so a batch, is larger.
    for _ in 0..(12 * 512 / chunk).clamp(4, 12) {
        let batch: Vec<BindRequest> = (0..1 + random.below(5))
            .map(|_| {
                let first = random.below(pages);
                let most = if random.below(3) == 0 { 3 } else { 2 * chunk };
                let len = (1 + random.below(most)).min(pages - first);
                let bo = bos[random.below(20) as usize].clone();
                match random.below(10) {
                    0..5 => {
                        let (offset, len) = (random.below(chunk), len.min(chunk));
                        let offset = offset.min(chunk - len) * granule;
                        BindRequest::Bind { va: va(first), bo, offset, len: len * granule, access: Access::RW }
                    }
                    5 => BindRequest::Null { va: va(first), len: len * granule },
                    6 => BindRequest::Repeat {
                        va: va(first),
                        bo,
                        offset: 0,
                        page: granule,
                        len: len * granule,
                        access: Access::RW,
                    },
                    7 => BindRequest::UnbindBo(bo),
                    _ => BindRequest::Unbind(Span::new(va(first), len * granule).unwrap()),
                }
            })
            .collect();
        let before = snapshot(&vm);
        let mut batches: Vec<_> = (0..200).map(|_| batch.clone()).collect(); // made before memory runs out
        for n in 0.. {
            let batch = batches.pop().expect("no plan takes that number of allocations");
            match with_allocations(n, || vm.plan(batch).map(|plan| plan.commit())) {
                Ok(committed) => {
                    // All that was allowed was used by the plan, or more than enough was: the commit used none.
                    with_allocations(0, || vm.invalidated(committed));
                    break;
                }
                Err(e) => assert!(matches!(e.error, Error::NoTables { .. } | Error::NoMemory { .. }), "{e:?}"),
            }
            failures += 1;
            assert!(snapshot(&vm) == before, "{n} allocations: a plan that failed left a trace");
        }
    }
    drop(vm);
    assert!(bos.iter().all(|bo| Arc::strong_count(bo) == 1));
    failures
}

#[test]
fn a_plan_that_runs_out_of_memory_changes_nothing_and_a_commit_needs_none() {
    let failures = geometries!(for_each(F => run_out::<F>();));
    assert!(failures.iter().all(|&n| n > 10), "{failures:?}");
    println!("{} allocations failed", failures.iter().sum::<u64>());
}

/// Unbinds parts of large bindings without any memory.
fn split_without_memory<F: Format>() {
    let (granule, chunk) = (F::GRANULE.bytes(), 1u64 << F::INDEX_BITS);
    let base = 8 * chunk;
    let span = |page: u64, pages: u64| Span::new(DeviceVa::new((base + page) * granule), pages * granule).unwrap();
    let sg = SgIndex::try_new([Segment { addr: CardAddr::new(0), len: 4 * chunk * granule }]).unwrap();
    let bo = Arc::new(Bo::new(1, sg));
    let mut vm = Vm::<F, _>::new(span(0, 8 * chunk), HeapTables::new(CardAddr::new(0))).unwrap();
    for round in 0..3 {
        let committed = vm.bind(span(0, 1).first(), &bo, 0, 4 * chunk * granule, Access::RW).unwrap();
        vm.invalidated(committed);
        // Parts in the middle of a chunk, across the end of one, and all that is left.
        for (page, pages) in [(chunk / 2, 1), (2 * chunk - 3, 7), (3 * chunk + round, chunk / 2), (0, 8 * chunk)] {
            with_allocations(0, || {
                // A panic needs memory for its message.
                let unbound = vm.unbind(span(page, pages));
                LEFT.set(if unbound.is_ok() { 0 } else { u64::MAX });
                let committed = unbound.unwrap_or_else(|e| panic!("{}, round {round}: {e}", F::NAME));
                vm.invalidated(committed);
            });
        }
        assert_eq!(vm.bindings().count(), 0);
    }
}

#[test]
fn unbinding_a_part_of_a_large_binding_needs_no_memory() {
    geometries!(for_each(F => split_without_memory::<F>();));
}

/// Unbinds at random, each without any memory: one page, some pages or a buffer. Binds in between have memory.
fn unbind_at_random<F: Format, T: Tables<Addr = CardAddr>>(tables: T) {
    let (granule, chunk) = (F::GRANULE.bytes(), 1u64 << F::INDEX_BITS);
    // Where a model of that is small enough.
    let pages = if chunk <= 512 { chunk * chunk + 4 * chunk } else { 4 * chunk };
    let pages = pages.min(1 << (F::INPUT_BITS - u32::from(F::GRANULE.log2())));
    let span = |page: u64, pages: u64| Span::new(DeviceVa::new(page * granule), pages * granule).unwrap();
    let mut random = Random(0xcafe);
    let bos: Vec<_> = (0..6)
        .map(|id| {
            let (len, gap) = if id < 3 { (pages, 0) } else { (2 * chunk, 1) };
            let mut sg = SgTable::new();
            for i in 0..if gap == 0 { 1 } else { len } {
                let run = if gap == 0 { len } else { 1 };
                sg.push(CardAddr::new((i * (run + gap) + id * 4 * chunk) * granule), run * granule).unwrap();
            }
            Arc::new(Bo::new(id, SgIndex::from_table(&sg).unwrap()))
        })
        .collect();
    let mut vm = Vm::<F, T>::new(span(0, pages), tables).unwrap();
    let mut model: Vec<Option<(u64, u64)>> = vec![None; pages as usize];
    let without_memory = |vm: &mut Vm<F, T>, request: BindRequest| {
        with_allocations(0, || {
            let done = match request {
                BindRequest::Unbind(span) => vm.unbind(span),
                request => vm.plan([request]).map(|plan| plan.commit()).map_err(|e| e.error),
            };
            LEFT.set(if done.is_ok() { 0 } else { u64::MAX }); // a panic needs memory for its message
            vm.invalidated(done.unwrap_or_else(|e| panic!("{}: {e}", F::NAME)));
        });
    };
    let check = |vm: &Vm<F, T>, model: &[Option<(u64, u64)>]| {
        let mut at = 0;
        for b in vm.bindings() {
            let (first, len) = (b.span.first().bits() / granule, b.span.len() / granule);
            assert!(model[at as usize..first as usize].iter().all(Option::is_none), "{}: {:?}", F::NAME, b.span);
            let (id, page) = (b.bo().unwrap().id(), b.offset() / granule);
            let as_bound = (page..).zip(&model[first as usize..][..len as usize]).all(|(n, p)| *p == Some((id, n)));
            assert!(as_bound, "{}: {:?}", F::NAME, b.span);
            let va = |page: u64| DeviceVa::new(page * granule);
            for n in [0, len / 2, len - 1] {
                let to = b.bo().unwrap().sg().segment_at((page + n) * granule).unwrap().addr;
                let found = vm.lookup(va(first + n)).and_then(|leaf| leaf.translate(va(first + n)));
                assert_eq!(found, Some(to), "{}", F::NAME);
            }
            at = first + len;
        }
        assert!(model[at as usize..].iter().all(Option::is_none));
        let mapped: u64 = vm.runs(vm.range()).map(|run| run.len / granule).sum();
        assert_eq!(mapped, model.iter().flatten().count() as u64, "{}", F::NAME);
    };
    for round in 0..2 {
        for _ in 0..1 + random.below(4) {
            let bo = &bos[random.below(6) as usize];
            let most = pages.min(bo.len() / granule);
            let len = if random.below(2) == 0 { most } else { 1 + random.below(most) };
            let at = random.below(pages - len + 1);
            let at = if random.below(2) == 0 { at / chunk * chunk } else { at };
            let from = random.below(most - len + 1);
            let done = vm.bind(span(at, 1).first(), bo, from * granule, len * granule, Access::RW).unwrap();
            vm.invalidated(done);
            (from..from + len).zip(&mut model[at as usize..]).for_each(|(n, page)| *page = Some((bo.id(), n)));
        }
        for _ in 0..8 {
            if random.below(8) == 0 {
                let bo = &bos[random.below(6) as usize];
                without_memory(&mut vm, BindRequest::UnbindBo(bo.clone()));
                model.iter_mut().for_each(|page| *page = page.filter(|(id, _)| *id != bo.id()));
                continue;
            }
            let first = random.below(pages);
            let most = [1, chunk, pages][random.below(3) as usize].min(pages - first);
            let len = 1 + random.below(most);
            without_memory(&mut vm, BindRequest::Unbind(span(first, len)));
            model[first as usize..(first + len) as usize].fill(None);
        }
        if round % 2 == 0 {
            // A page of each table: everything is split.
            for page in (0..pages).step_by(chunk as usize).map(|page| page + random.below(chunk)) {
                without_memory(&mut vm, BindRequest::Unbind(span(page, 1)));
                model[page as usize] = None;
            }
        }
        check(&vm, &model);
    }
    without_memory(&mut vm, BindRequest::Unbind(span(0, pages)));
    assert_eq!((vm.bindings().count(), vm.page_table().mapped_bytes()), (0, 0), "{}", F::NAME);
    // Where handles share tables, those that the span covers in part stay.
    assert!(T::SHARED || vm.page_table().linked_tables() == 0, "{}", F::NAME);
}

#[test]
fn every_unbind_works_without_memory() {
    geometries!(for_each(F => unbind_at_random::<F, _>(HeapTables::new(CardAddr::new(0)));));
}

/// In tables that threads share, where empty ones stay.
fn unbind_at_random_in_a_pool<F: Format>() {
    let tables = if F::INDEX_BITS > 9 { 64 } else { 4096 };
    let words = tables * TableShape::of::<F>().table.bytes() / 8;
    let memory: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
    unbind_at_random::<F, _>(&TablePool::new::<F>(CardAddr::new(0), &memory));
}

#[test]
fn every_unbind_works_without_memory_in_a_pool_that_handles_share() {
    geometries!(for_each(F => unbind_at_random_in_a_pool::<F>();));
}
