//! VMs as drivers have them: with a reserved part, pages far apart.

use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, Segment, Span};
use dmalane_iopt::{AgxUat, FormatId, HeapTables, X86_64_4Level};
use dmalane_vm::array::{ArrayOperation, Reason};
use dmalane_vm::{AnyVm, BindRequest, Bo, Errno, Error, Handles, Vm, any_vm};
use zerocopy::IntoBytes;

const PAGE: u64 = 16 << 10;
/// Pages of a table.
const TABLE: u64 = 2048;
const RW: Access = Access::RW;

type TestVm = Vm<AgxUat, HeapTables<CardAddr>>;

fn span(page: u64, pages: u64) -> Span<DeviceVa> {
    Span::new(DeviceVa::new(page * PAGE), pages * PAGE).unwrap()
}

/// Of 2^22 pages, `reserved` pages from the one in the middle of the second table on are for the driver.
fn vm(reserved: u64) -> TestVm {
    let reserved = span(TABLE + TABLE / 2, reserved);
    Vm::with_reserved(span(0, 1 << 22), reserved, HeapTables::new(CardAddr::new(0))).unwrap()
}

fn bo(id: u64, pages: u64) -> Bo {
    Bo::of_segments(id, [Segment { addr: CardAddr::new(id << 36), len: pages * PAGE }]).unwrap()
}

fn bind(page: u64, bo: &Arc<Bo>, offset: u64, pages: u64) -> BindRequest {
    BindRequest::Bind {
        va: DeviceVa::new(page * PAGE),
        bo: bo.clone(),
        offset: offset * PAGE,
        len: pages * PAGE,
        access: RW,
    }
}

fn rows(vm: &TestVm) -> Vec<(u64, u64)> {
    vm.bindings().map(|b| (b.span.first().bits() / PAGE, b.span.len() / PAGE)).collect()
}

/// The driver's bindings and those of others, which continue each other in a buffer, are taken away each by its owner.
#[test]
fn unbinding_a_buffer_stays_on_its_side_of_the_reserved_part() {
    let half = TABLE / 2;
    for reserved in [half, 3 * TABLE] {
        let (mut vm, bo) = (vm(reserved), Arc::new(bo(1, 8 * TABLE)));
        let end = TABLE + half + reserved;
        let outside = [bind(TABLE, &bo, 0, half), bind(end, &bo, half + reserved, 2 * TABLE)];
        let done = vm.plan(outside).unwrap().commit();
        vm.invalidated(done);
        let done = vm.plan_reserved([bind(TABLE + half, &bo, half, reserved)]).unwrap().commit();
        assert!(done.is_empty());
        vm.invalidated(done);
        let sides = [(TABLE, half), (TABLE + half, reserved), (end, 2 * TABLE)];
        // They are not one binding, nor one leaf.
        vm.merge(vm.range(), |_| ()).unwrap();
        assert_eq!(rows(&vm), sides);

        let done = vm.plan([BindRequest::UnbindBo(bo.clone())]).unwrap().commit();
        assert_eq!(done.unmapped_bytes(), (half + 2 * TABLE) * PAGE);
        vm.invalidated(done);
        assert_eq!(rows(&vm), [sides[1]]);
        assert_eq!(vm.bound_bytes(&bo), reserved * PAGE);
        let mapped: u64 = vm.runs(vm.range()).map(|run| run.len).sum();
        assert_eq!(mapped, reserved * PAGE, "the page table says the same");
        // Also where that is all that there is to say.
        let done = vm.plan([BindRequest::UnbindBo(bo.clone())]).unwrap().commit();
        assert_eq!((done.is_empty(), done.unmapped_bytes()), (true, 0));
        vm.invalidated(done);

        // And the other way round.
        let done = vm.plan([bind(TABLE, &bo, 0, half)]).unwrap().commit();
        vm.invalidated(done);
        let done = vm.plan_reserved([BindRequest::UnbindBo(bo.clone())]).unwrap().commit();
        assert_eq!(done.unmapped_bytes(), reserved * PAGE);
        vm.invalidated(done);
        assert_eq!(rows(&vm), [sides[0]]);
    }
}

#[test]
fn only_the_driver_reaches_the_reserved_part() {
    let (mut vm, bo) = (vm(TABLE), Arc::new(bo(1, 8 * TABLE)));
    let first = TABLE + TABLE / 2;
    let inside = [bind(first, &bo, 0, 1), BindRequest::Unbind(span(first + 1, 3)), bind(first, &bo, 0, TABLE)];
    let across =
        [bind(first - 1, &bo, 0, 2), BindRequest::Unbind(span(first + TABLE - 1, 2)), bind(0, &bo, 0, 4 * TABLE)];
    let outside = [bind(first - 1, &bo, 0, 1), BindRequest::Unbind(span(first + TABLE, 3))];
    for request in inside.iter().chain(&across) {
        let error = vm.plan([request.clone()]).unwrap_err().error;
        assert!(matches!(error, Error::Reserved { .. }), "{request:?}: {error}");
        if let BindRequest::Bind { va, bo, offset, len, access } = request {
            assert!(matches!(vm.bind(*va, bo, *offset, *len, *access), Err(Error::Reserved { .. })));
        }
    }
    for request in across.iter().chain(&outside) {
        let error = vm.plan_reserved([request.clone()]).unwrap_err().error;
        assert!(matches!(error, Error::Reserved { .. }), "{request:?}: {error}");
    }
    for (plan, requests) in [(true, inside.as_slice()), (false, &outside)] {
        let plan = if plan { vm.plan_reserved(requests.to_vec()) } else { vm.plan(requests.to_vec()) };
        let done = plan.unwrap().commit();
        vm.invalidated(done);
    }
    // A page unbound by the short way is not one of the driver's either.
    assert!(matches!(vm.unbind(span(first, 1)), Err(Error::Reserved { .. })));
    assert_eq!(rows(&vm), [(first - 1, 1), (first, TABLE)]);

    // As an array, and where there is no reserved part.
    let mut handles = Handles::new();
    let handle = handles.insert(bo.clone()).unwrap();
    let unbind =
        ArrayOperation { flags: ArrayOperation::UNBIND_BO.into(), handle: handle.into(), ..ArrayOperation::default() };
    let done = vm.apply_array(unbind.as_bytes(), ArrayOperation::BYTES, 1, Box::new(&handles), true).unwrap();
    vm.invalidated(done);
    assert_eq!(rows(&vm), [(first - 1, 1)]);
    let mut whole = TestVm::new(span(0, 1 << 20), HeapTables::new(CardAddr::new(0))).unwrap();
    let reason =
        whole.apply_array(unbind.as_bytes(), ArrayOperation::BYTES, 1, Box::new(&handles), true).unwrap_err().reason;
    assert_eq!(reason.errno(), Errno::Perm, "{reason}");
    assert!(matches!(whole.plan_reserved([bind(0, &bo, 0, 1)]).unwrap_err().error, Error::NoReserved { .. }));
}

/// Pages that are bound one by one take short ways, which end where others do: none leads into the reserved part, out
/// of it, or out of the VM.
#[test]
fn single_pages_end_where_their_part_of_the_vm_does() {
    let (first, reserved, end) = (TABLE / 2, TABLE + TABLE / 2, 3 * TABLE - 9);
    let range = span(first, end - first);
    let vm = || TestVm::with_reserved(range, span(reserved, 8), HeapTables::new(CardAddr::new(0))).unwrap();
    let bo = Arc::new(bo(1, 8));
    for (inside, outside) in
        [(first, first - 1), (reserved - 1, reserved), (reserved + 8, reserved + 7), (end - 1, end)]
    {
        let mut vm = vm();
        for n in (0..4).rev() {
            let page = if inside < outside { inside - n } else { inside + n };
            let done = vm.bind(DeviceVa::new(page * PAGE), &bo, 0, PAGE, RW).unwrap();
            vm.invalidated(done);
        }
        assert!(vm.bind(DeviceVa::new(outside * PAGE), &bo, 0, PAGE, RW).is_err(), "{outside} after {inside}");
        assert_eq!(vm.bindings().count(), 4);
    }
    for (outside, driver) in [(reserved, false), (reserved + 8, true), (end, false)] {
        let mut vm = vm();
        let mut plan = |requests: &[BindRequest]| {
            let plan = if driver { vm.plan_reserved(requests.to_vec()) } else { vm.plan(requests.to_vec()) };
            plan.map(|plan| drop(plan.commit())).map_err(|e| e.index)
        };
        let binds: Vec<_> = (outside - 6..=outside).map(|page| bind(page, &bo, 0, 1)).collect();
        let unbinds: Vec<_> = (outside - 6..=outside).map(|page| BindRequest::Unbind(span(page, 1))).collect();
        // The first one makes the buffer known.
        for (requests, refused) in [(&binds[..1], None), (&binds, Some(6)), (&binds[..6], None), (&unbinds, Some(6))] {
            assert_eq!(plan(requests).err(), refused, "{outside}");
        }
    }
}

/// The record of a page far from all others does not take a table's worth of memory.
#[test]
fn pages_far_apart_take_little_memory() {
    const PAGES: u64 = 1000;
    let (mut vm, bo) = (vm(1), Arc::new(bo(1, TABLE)));
    for n in 0..PAGES {
        let done = vm.bind(DeviceVa::new(n * TABLE * PAGE + PAGE * (n % 64)), &bo, n * PAGE, PAGE, RW).unwrap();
        vm.invalidated(done);
    }
    let each = vm.bookkeeping_bytes() as u64 / PAGES;
    // A cache line, and 8 bytes for each of 32 pages.
    assert!((64 + 256..=512).contains(&each), "{each} bytes a binding");
    assert_eq!(vm.bindings().count() as u64, PAGES);
}

/// A batch may unbind one page of a range and then bind the whole range, even after it has bound other ranges whole.
#[test]
fn a_batch_unbinds_a_page_and_binds_all_around_it() {
    let (mut vm, bo) = (vm(1), Arc::new(bo(1, 2 * TABLE)));
    let done = vm.plan([bind(4 * TABLE + 3, &bo, 0, 2)]).unwrap().commit();
    vm.invalidated(done);
    let batch = [
        bind(6 * TABLE, &bo, 0, TABLE),
        BindRequest::Unbind(span(4 * TABLE + 3, 1)),
        bind(4 * TABLE, &bo, TABLE, TABLE),
    ];
    let done = vm.plan(batch).unwrap().commit();
    vm.invalidated(done);
    assert_eq!(rows(&vm), [(4 * TABLE, TABLE), (6 * TABLE, TABLE)]);
}

/// Two pages of each table, as far from each other as can be, and then those between them.
#[test]
fn pages_at_both_ends_of_a_table_take_little_memory() {
    const TABLES: u64 = 500;
    let (mut vm, bo) = (vm(1), Arc::new(bo(1, TABLE)));
    let bind = |vm: &mut TestVm, page: u64, offset: u64| {
        let done = vm.bind(DeviceVa::new(page * PAGE), &bo, offset * PAGE, PAGE, RW).unwrap();
        vm.invalidated(done);
    };
    for n in 0..TABLES {
        bind(&mut vm, n * TABLE + n % 32, n);
        bind(&mut vm, (n + 1) * TABLE - 1 - n % 32, n);
    }
    let each = vm.bookkeeping_bytes() as u64 / (2 * TABLES);
    assert!(each <= 512, "{each} bytes a binding");
    let found: Vec<_> =
        (0..TABLES).flat_map(|n| [(n * TABLE + n % 32, 1), ((n + 1) * TABLE - 1 - n % 32, 1)]).collect();
    assert_eq!(rows(&vm), found);
    // In an order that adds to what is there in front, behind and far away.
    for page in (0..TABLE).map(|i| i * 997 % TABLE) {
        bind(&mut vm, 3 * TABLE + page, page);
    }
    assert!(rows(&vm).contains(&(3 * TABLE, TABLE)));
    let done = vm.plan([BindRequest::UnbindBo(bo.clone())]).unwrap().commit();
    vm.invalidated(done);
    assert_eq!((rows(&vm), Arc::strong_count(&bo)), (Vec::new(), 1));
}

/// A buffer is unbound as a whole also where another one, which had its number before, was bound and is no more.
#[test]
fn a_buffer_that_takes_the_place_of_another_one() {
    let (mut vm, at) = (vm(1), 4 * TABLE);
    let one = |vm: &mut TestVm, page: u64, bo: &Arc<Bo>| {
        let done = vm.bind(DeviceVa::new(page * PAGE), bo, 0, PAGE, RW).unwrap();
        vm.invalidated(done);
    };
    let unbind = |vm: &mut TestVm, bo: Arc<Bo>| {
        let done = vm.plan([BindRequest::UnbindBo(bo)]).unwrap().commit();
        vm.invalidated(done);
    };
    let bos: Vec<_> = (1..5).map(|id| Arc::new(bo(id, 1))).collect();
    for (first, others) in [(&bos[0], &bos[1..2]), (&bos[0], &bos[1..3]), (&bos[1], &bos[..1])] {
        one(&mut vm, at, first);
        others.iter().zip(at + 1..).for_each(|(bo, page)| one(&mut vm, page, bo));
        let kept = rows(&vm).len() - 1;
        unbind(&mut vm, first.clone());
        // In many places, so that not each of them is noted; at last where the other one was.
        (0..100).for_each(|n| one(&mut vm, (10 + n) * TABLE, &bos[3]));
        one(&mut vm, at + 9, &bos[3]);
        unbind(&mut vm, bos[3].clone());
        assert_eq!((rows(&vm).len(), Arc::strong_count(&bos[3])), (kept, 1));
        bos.iter().for_each(|bo| unbind(&mut vm, bo.clone()));
        assert_eq!(rows(&vm), []);
    }
}

/// A page that is bound and unbound where nothing else is does not make and free a table each time, and what is bound
/// there next can have a large leaf all the same.
#[test]
fn one_page_alone_keeps_its_table() {
    let (mut vm, bo) = (vm(1), Arc::new(bo(1, 2 * TABLE)));
    let at = 4 * TABLE;
    for n in 0..10 {
        let done = vm.bind(DeviceVa::new((at + n) * PAGE), &bo, n * PAGE, PAGE, RW).unwrap();
        vm.invalidated(done);
        let done = vm.unbind(span(at + n, 1)).unwrap();
        assert_eq!((done.unmapped_bytes(), done.tables().len()), (PAGE, 0));
        assert_eq!(done.spans().collect::<Vec<_>>(), [span(at + n, 1)]);
        vm.invalidated(done);
        assert_eq!((Arc::strong_count(&bo), vm.bindings().count(), vm.lookup(DeviceVa::new(at * PAGE))), (1, 0, None));
    }
    let in_use = |vm: &TestVm| vm.page_table().tables().in_use();
    assert_eq!(in_use(&vm), 3, "the root, and the tables down to the page");
    // That is one table, not each that a page was bound in.
    for n in [9, 8, 7, 4] {
        let done = vm.bind(DeviceVa::new(n * TABLE * PAGE), &bo, 0, PAGE, RW).unwrap();
        vm.invalidated(done);
        let done = vm.unbind(span(n * TABLE, 1)).unwrap();
        vm.invalidated(done);
        assert_eq!(in_use(&vm), 3);
    }
    // It goes when all of its pages are bound.
    let done = vm.plan([bind(at, &bo, 0, TABLE)]).unwrap().commit();
    assert_eq!(done.tables().len(), 1);
    vm.invalidated(done);
    let done = vm.plan([BindRequest::UnbindBo(bo.clone())]).unwrap().commit();
    vm.invalidated(done);
    assert_eq!(in_use(&vm), 1);
    // A plan that is dropped leaves it as it was.
    let done = vm.bind(DeviceVa::new(at * PAGE), &bo, 0, PAGE, RW).unwrap();
    vm.invalidated(done);
    let done = vm.unbind(span(at, 1)).unwrap();
    vm.invalidated(done);
    drop(vm.plan([bind(at + 1, &bo, 0, 3)]).unwrap());
    let done = vm.plan([BindRequest::Unbind(span(3 * TABLE, 5 * TABLE))]).unwrap().commit();
    vm.invalidated(done);
    assert_eq!(in_use(&vm), 1);

    // It is not in the way of a large leaf.
    let range = Span::new(DeviceVa::new(0), 1 << 40).unwrap();
    let mut vm = Vm::<X86_64_4Level, _>::new(range, HeapTables::new(CardAddr::new(0))).unwrap();
    let (va, whole) = (DeviceVa::new(1 << 30), 2 << 20);
    let done = vm.bind(va, &bo, 0, 4096, RW).unwrap();
    vm.invalidated(done);
    let done = vm.unbind(Span::new(va, 4096).unwrap()).unwrap();
    vm.invalidated(done);
    let done = vm.bind(va, &bo, 0, whole, RW).unwrap();
    assert_eq!(done.tables().len(), 1);
    vm.invalidated(done);
    assert_eq!(vm.lookup(va).unwrap().size.bytes(), whole);
}

/// The first fault of an array is the one that is reported, whichever of array and VM finds it.
#[test]
fn the_first_fault_of_an_array() {
    let (mut vm, bo) = (vm(1), Arc::new(bo(1, 8)));
    let mut handles = Handles::new();
    let handle = handles.insert(bo).unwrap();
    let operation = |flags: u32, addr: u64| ArrayOperation {
        flags: flags.into(),
        handle: handle.into(),
        range: PAGE.into(),
        addr: addr.into(),
        ..ArrayOperation::default()
    };
    let bind = ArrayOperation::BIND | ArrayOperation::READ;
    let array = [operation(bind, 0), operation(bind, 5), operation(u32::MAX, 0)];
    let error = vm.plan_array(array.as_bytes(), ArrayOperation::BYTES, 3, &handles).unwrap_err();
    assert_eq!(error.index, Some(1));
    assert!(matches!(error.reason, Reason::Vm(Error::Misaligned { .. })), "{error}");
    assert_eq!(rows(&vm), []);
}

/// Merging gives a leaf back that an unbind has split, once its pages are bound again.
#[test]
fn a_split_leaf_heals() {
    let range = Span::new(DeviceVa::new(0), 1 << 40).unwrap();
    let mut vm: Box<dyn AnyVm> =
        Box::new(Vm::<X86_64_4Level, _>::new(range, HeapTables::new(CardAddr::new(0))).unwrap());
    let bo = Arc::new(Bo::of_segments(1, [Segment { addr: CardAddr::new(1 << 30), len: 1 << 30 }]).unwrap());
    let (all, one) = (Span::new(DeviceVa::new(1 << 30), 1 << 30).unwrap(), DeviceVa::new((1 << 30) + (5 << 12)));
    let bind = |va, offset, len| BindRequest::Bind { va, bo: bo.clone(), offset, len, access: RW };
    let steps =
        [bind(all.first(), 0, all.len()), BindRequest::Unbind(Span::new(one, 4096).unwrap()), bind(one, 5 << 12, 4096)];
    for request in steps {
        let done = vm.apply(vec![request], false).unwrap();
        vm.invalidated(done);
    }
    assert_eq!((vm.granule(), vm.range()), (PageSize::SIZE_4K, range));
    assert_eq!(vm.lookup(one).unwrap().size.bytes(), 4096);
    let mut gone = Vec::new();
    assert_eq!(vm.merge(all, &mut |span| gone.push(span)).unwrap(), 2, "tables");
    assert_eq!(vm.lookup(one).unwrap().size.bytes(), 1 << 30);
    assert_eq!(gone.len(), 2);
    assert_eq!((vm.binding_count(), vm.bound_bytes(&bo)), (1, 1 << 30));
}

/// So does a group of entries, of every size and format, that was broken in a bind of less than a table; groups of two
/// buffers stay two.
#[test]
fn a_split_group_heals() {
    let mut groups = 0;
    for format in FormatId::ALL.iter().copied() {
        // Entries and their groups take turns. Tables have more entries than groups have.
        for sizes in format
            .facts()
            .page_sizes
            .iter()
            .collect::<Vec<_>>()
            .chunks_exact(2)
            .filter(|s| s[1].bytes() <= s[0].bytes() << 7)
        {
            a_split_group_of_this_size_heals(format, sizes[0].bytes(), sizes[1]);
            groups += 1;
        }
    }
    assert!(groups > 30, "{groups}");
}

fn a_split_group_of_this_size_heals(format: FormatId, page: u64, group: PageSize) {
    let (base, len) = (8 * group.bytes(), 8 * group.bytes());
    let range = Span::new(DeviceVa::new(0), 4 * len).unwrap();
    let mut vm = any_vm(format, range, None, HeapTables::new(CardAddr::new(0))).unwrap();
    let bo = |id: u64| {
        let segment = Segment { addr: CardAddr::new(2 * id * len), len };
        Arc::new(Bo::of_segments(id, [segment]).unwrap())
    };
    let bos = [bo(1), bo(2)];
    let va = |groups: u64, pages: u64| DeviceVa::new(base + groups * group.bytes() + pages * page);
    let bind = |bo: usize, va: DeviceVa, len| {
        let offset = va.bits() - base;
        BindRequest::Bind { va, bo: bos[bo].clone(), offset, len, access: RW }
    };
    let requests = [
        bind(0, va(0, 0), 3 * group.bytes()),
        BindRequest::Unbind(Span::new(va(1, 3), page).unwrap()),
        bind(0, va(1, 3), page),
        bind(1, va(3, 0), group.bytes()),
        BindRequest::Unbind(Span::new(va(3, 0), 2 * page).unwrap()),
        bind(0, va(3, 0), page),
        bind(1, va(3, 1), page),
    ];
    for request in requests {
        let done = vm.apply(vec![request], false).unwrap();
        vm.invalidated(done);
    }
    let size = |vm: &dyn AnyVm, n| vm.lookup(va(n, 0)).unwrap().size;
    assert_eq!([0, 1, 2, 3].map(|n| size(&*vm, n) == group), [true, false, true, false], "{format}");
    let bindings = vm.binding_count();
    let mut gone = Vec::new();
    let within = Span::new(va(0, 1), 4 * group.bytes() - page).unwrap();
    assert_eq!(vm.merge(within, &mut |span| gone.push(span)), Ok(0), "no table goes");
    assert_eq!(gone, [Span::new(va(1, 0), group.bytes()).unwrap()], "{format}");
    assert_eq!([0, 1, 2, 3].map(|n| size(&*vm, n) == group), [true, true, true, false], "{format}");
    assert_eq!(vm.binding_count(), bindings);
}

/// Memory is given back when no device can reach it any more, and not before.
#[test]
fn the_owner_of_a_buffer_goes_last() {
    let (memory, mut vms) = (Arc::new(()), [vm(1), vm(1)]);
    let bo = Arc::new(bo(1, 8).with_owner(memory.clone()));
    assert!(bo.owner::<Arc<()>>().is_some_and(|owner| Arc::ptr_eq(owner, &memory)) && bo.owner::<u8>().is_none());
    for vm in &mut vms {
        let done = vm.plan([bind(0, &bo, 0, 8), bind(9, &bo, 0, 1)]).unwrap().commit();
        vm.invalidated(done);
    }
    let second = bo.clone();
    drop(bo);
    let weak = Arc::downgrade(&second);
    let bound_vms = || weak.upgrade().map(|bo| bo.bound_vms());
    assert_eq!(bound_vms(), Some(2));
    drop(vms[0].plan([bind(20, &second, 0, 1)]).unwrap());
    let done = vms[0].plan([BindRequest::UnbindBo(second)]).unwrap().commit();
    assert_eq!(bound_vms(), Some(2), "the device may remember it");
    vms[0].invalidated(done);
    assert_eq!(bound_vms(), Some(1));
    let done = vms[1].unbind(span(0, 9)).unwrap();
    vms[1].invalidated(done);
    assert_eq!(Arc::strong_count(&memory), 2, "a page is bound");
    let done = vms[1].unbind(span(9, 1)).unwrap();
    assert_eq!(Arc::strong_count(&memory), 2, "the device may remember it");
    vms[1].invalidated(done);
    assert_eq!((Arc::strong_count(&memory), bound_vms()), (1, None));
}
