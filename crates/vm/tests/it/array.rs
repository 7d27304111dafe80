//! Arrays of operations as bytes: what is decoded, and what is wrong by name and number.

use std::ops::ControlFlow;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, SgIndex, SgTable, Span};
use dmalane_iopt::{AgxUat, HeapTables};
use dmalane_vm::array::{ArrayError, ArrayOperation, Reason};
use dmalane_vm::{AnyVm, Bo, Errno, Error, Handles, MappedSource, Plan, Vm};
use zerocopy::IntoBytes;

const PAGE: u64 = 16 << 10;
const STRIDE: usize = ArrayOperation::BYTES;
const RW: u32 = ArrayOperation::READ | ArrayOperation::WRITE;

fn operation(flags: u32, handle: u32, offset: u64, range: u64, addr: u64) -> ArrayOperation {
    ArrayOperation {
        flags: flags.into(),
        handle: handle.into(),
        offset: offset.into(),
        range: range.into(),
        addr: addr.into(),
    }
}

/// A VM, a buffer of 64 pages with its handle, and a handle that names nothing any more.
/// The name of the variant, of an error of the VM that of its own.
fn variant(reason: &Reason) -> String {
    let text = format!("{reason:?}");
    let text = text.strip_prefix("Vm(").unwrap_or(&text);
    text.chars().take_while(char::is_ascii_alphanumeric).collect()
}

fn setup() -> (Vm<AgxUat, HeapTables<CardAddr>>, Handles, u32, u32) {
    let range = Span::new(DeviceVa::new(16 * PAGE), 1 << 36).unwrap();
    let reserved = Span::new(DeviceVa::new(20 * PAGE), 4 * PAGE).unwrap();
    let vm = Vm::with_reserved(range, reserved, HeapTables::new(CardAddr::new(0))).unwrap();
    let mut handles = Handles::new();
    let mut sg = SgTable::new();
    sg.push(CardAddr::new(1 << 32), 64 * PAGE).unwrap();
    let stale = handles.insert(Arc::new(Bo::new(6, SgIndex::from_table(&SgTable::new()).unwrap()))).unwrap();
    handles.remove(stale).unwrap();
    let handle = handles.insert(Arc::new(Bo::new(7, SgIndex::from_table(&sg).unwrap()))).unwrap();
    (vm, handles, handle, stale)
}

#[test]
fn the_layout_is_the_documented_one() {
    let op = operation(0x0403_0201, 0x0807_0605, 0x100f_0e0d_0c0b_0a09, 0x1817_1615_1413_1211, 0x201f_1e1d_1c1b_1a19);
    assert_eq!(op.as_bytes(), (1..=32).collect::<Vec<u8>>());
    assert_eq!(align_of::<ArrayOperation>(), 1, "an array may lie anywhere");
}

#[test]
fn an_array_binds_and_unbinds() {
    let (mut vm, handles, handle, _) = setup();
    let ops = [
        operation(ArrayOperation::BIND | RW, handle, 0, 64 * PAGE, 32 * PAGE),
        operation(ArrayOperation::UNBIND, 0, 0, PAGE, 40 * PAGE),
        operation(ArrayOperation::BIND | ArrayOperation::READ, handle, 63 * PAGE, PAGE, 41 * PAGE),
    ];
    // At an odd address, with a stride that is longer by a tail of zeros.
    for (stride, shift) in [(STRIDE, 1), (STRIDE + 8, 3), (STRIDE + 1, 0)] {
        let mut bytes = vec![0; shift];
        for op in ops {
            bytes.extend(op.as_bytes());
            bytes.resize(bytes.len() + stride - STRIDE, 0);
        }
        bytes.extend([0xff; 5]); // behind the array: not ours
        let committed = vm.plan_array(&bytes[shift..], stride, ops.len(), &handles).unwrap().commit();
        vm.invalidated(committed);
        let bound: Vec<_> = vm
            .bindings()
            .map(|b| (b.span.first().bits() / PAGE, b.span.len() / PAGE, b.offset() / PAGE, b.access))
            .collect();
        let rest = (42, 54, 10, Access::RW);
        assert_eq!(bound, [(32, 8, 0, Access::RW), (41, 1, 63, Access::READ), rest]);
    }
}

#[test]
fn every_kind() {
    let (mut vm, handles, bo, _) = setup();
    vm.set_null_page(CardAddr::new(1 << 30), PAGE).unwrap();
    let ops = [
        operation(ArrayOperation::BIND | RW, bo, 0, 4 * PAGE, 32 * PAGE),
        operation(ArrayOperation::NULL, 0, 0, 2 * PAGE, 33 * PAGE),
        operation(ArrayOperation::REPEAT | RW, bo, 9 * PAGE, 4 * PAGE, 40 * PAGE),
        operation(ArrayOperation::REPEAT | ArrayOperation::READ | 15 << 16, bo, 10 * PAGE, 4 * PAGE, 48 * PAGE),
        operation(ArrayOperation::PREFETCH, 0, 0, PAGE, 32 * PAGE),
    ];
    let bytes = ops.as_bytes();
    let committed = vm.plan_array(bytes, STRIDE, ops.len(), &handles).unwrap().commit();
    assert_eq!(committed.prefetches().map(|s| s.first().bits() / PAGE).collect::<Vec<_>>(), [32]);
    vm.invalidated(committed);
    let page = |vm: &Vm<AgxUat, HeapTables<CardAddr>>, page: u64| {
        vm.lookup(DeviceVa::new(page * PAGE)).map(|leaf| (leaf.to.bits() / PAGE, leaf.access))
    };
    let (first, null) = ((1 << 32) / PAGE, (1 << 30) / PAGE);
    let seen: Vec<_> = [32, 33, 34, 35, 40, 43, 48, 49, 50].map(|n| page(&vm, n).unwrap()).into();
    let (rw, r) = (|n| (n, Access::RW), |n| (n, Access::READ));
    let again = [rw(first + 9), rw(first + 9), r(first + 10), r(first + 11), r(first + 10)];
    assert_eq!(seen[..4], [rw(first), r(null), r(null), rw(first + 3)]);
    assert_eq!(seen[4..], again);
    // The bindings, as runs.
    let mut runs = Vec::new();
    AnyVm::mapping(&vm, vm.range(), &mut |run| {
        runs.push((run.span.first().bits() / PAGE, run.span.len() / PAGE, run.source));
        ControlFlow::Continue(())
    });
    let from = |page: u64| MappedSource::Bo { bo: 7, offset: page * PAGE };
    let repeat = |page: u64, pages: u64| MappedSource::Repeat { bo: 7, offset: page * PAGE, page: pages * PAGE };
    let expected = [
        (32, 1, from(0)),
        (33, 2, MappedSource::Null),
        (35, 1, from(3)),
        (40, 4, repeat(9, 1)),
        (48, 4, repeat(10, 2)),
    ];
    assert_eq!(runs, expected);
    let unbind = operation(ArrayOperation::UNBIND_BO, bo, 0, 0, 0);
    let committed = vm.plan_array(unbind.as_bytes(), STRIDE, 1, &handles).unwrap().commit();
    vm.invalidated(committed);
    assert_eq!(vm.bindings().map(|b| b.span.first().bits() / PAGE).collect::<Vec<_>>(), [33]);
}

#[test]
fn an_empty_array_is_fine_whatever_else_is_said() {
    let (mut vm, handles, ..) = setup();
    for (bytes, stride) in [([].as_slice(), 0), (&[], usize::MAX), (&[1, 2, 3], 7)] {
        assert!(vm.plan_array(bytes, stride, 0, &handles).unwrap().commit().is_empty());
    }
}

#[test]
fn refusals_by_name_and_number() {
    let (mut vm, handles, bo, stale) = setup();
    let at = 32 * PAGE;
    let table: &[(&str, ArrayOperation, &str, Errno)] = &[
        ("bit 6", operation(RW | 64, bo, 0, PAGE, at), "UnknownFlags", Errno::Inval),
        ("mmio alone", operation(ArrayOperation::MMIO, bo, 0, PAGE, at), "NoAccess", Errno::Inval),
        ("mmio on AGX", operation(RW | ArrayOperation::MMIO, bo, 0, PAGE, at), "Unsupported", Errno::NotSup),
        ("bit 31", operation(RW | 1 << 31, bo, 0, PAGE, at), "UnknownFlags", Errno::Inval),
        ("bit 23", operation(RW | 1 << 23, bo, 0, PAGE, at), "UnknownFlags", Errno::Inval),
        ("kind 15", operation(RW | 15 << 8, bo, 0, PAGE, at), "UnknownFlags", Errno::Inval),
        ("kind 6", operation(6 << 8, 0, 0, PAGE, at), "UnknownFlags", Errno::Inval),
        ("a page on a bind", operation(RW | 14 << 16, bo, 0, PAGE, at), "NotZero", Errno::Inval),
        ("no access", operation(ArrayOperation::BIND, bo, 0, PAGE, at), "NoAccess", Errno::Inval),
        ("unbind with a handle", operation(ArrayOperation::UNBIND, bo, 0, PAGE, at), "NotZero", Errno::Inval),
        ("unbind with an offset", operation(ArrayOperation::UNBIND, 0, PAGE, PAGE, at), "NotZero", Errno::Inval),
        ("unbind with access", operation(ArrayOperation::UNBIND | RW, 0, 0, PAGE, at), "NotZero", Errno::Inval),
        ("unbind all with an address", operation(ArrayOperation::UNBIND_BO, bo, 0, 0, at), "NotZero", Errno::Inval),
        ("unbind all with a length", operation(ArrayOperation::UNBIND_BO, bo, 0, PAGE, 0), "NotZero", Errno::Inval),
        ("null with access", operation(ArrayOperation::NULL | 1, 0, 0, PAGE, at), "NotZero", Errno::Inval),
        ("prefetch with a handle", operation(ArrayOperation::PREFETCH, bo, 0, PAGE, at), "NotZero", Errno::Inval),
        ("handle 0", operation(RW, 0, 0, PAGE, at), "NoHandle", Errno::NoEnt),
        ("a stale handle", operation(RW, stale, 0, PAGE, at), "NoHandle", Errno::NoEnt),
        ("a handle of nobody", operation(RW, u32::MAX, 0, PAGE, at), "NoHandle", Errno::NoEnt),
        ("no bytes", operation(RW, bo, 0, 0, at), "Empty", Errno::Inval),
        ("unbind of no bytes", operation(ArrayOperation::UNBIND, 0, 0, 0, at), "Empty", Errno::Inval),
        ("wraps", operation(RW, bo, 0, PAGE, u64::MAX), "Wraps", Errno::Overflow),
        ("unbind that wraps", operation(ArrayOperation::UNBIND, 0, 0, u64::MAX, at), "Wraps", Errno::Overflow),
        ("outside", operation(RW, bo, 0, PAGE, 15 * PAGE), "OutsideVm", Errno::Range),
        ("far outside", operation(RW, bo, 0, PAGE, 1 << 63), "OutsideVm", Errno::Range),
        ("unbind outside", operation(ArrayOperation::UNBIND, 0, 0, PAGE, 0), "OutsideVm", Errno::Range),
        ("beyond", operation(RW, bo, PAGE, 64 * PAGE, at), "BeyondBo", Errno::Range),
        ("offset 2^63", operation(RW, bo, 1 << 63, PAGE, at), "BeyondBo", Errno::Range),
        ("offset and length wrap", operation(RW, bo, !(PAGE - 1), PAGE, at), "BeyondBo", Errno::Range),
        ("repeat beyond", operation(ArrayOperation::REPEAT | RW, bo, 64 * PAGE, PAGE, at), "BeyondBo", Errno::Range),
        (
            "repeat of half a page",
            operation(ArrayOperation::REPEAT | RW | 13 << 16, bo, 0, PAGE, at),
            "RepeatPage",
            Errno::Inval,
        ),
        (
            "repeat of 2^63",
            operation(ArrayOperation::REPEAT | RW | 63 << 16, bo, 0, PAGE, at),
            "RepeatPage",
            Errno::Inval,
        ),
        ("null outside", operation(ArrayOperation::NULL, 0, 0, PAGE, 0), "OutsideVm", Errno::Range),
        ("null without a null page", operation(ArrayOperation::NULL, 0, 0, PAGE, at), "NoNullPage", Errno::NotSup),
        ("prefetch outside", operation(ArrayOperation::PREFETCH, 0, 0, PAGE, 0), "OutsideVm", Errno::Range),
        ("in the reserved part", operation(RW, bo, 0, 2 * PAGE, 19 * PAGE), "Reserved", Errno::Perm),
        (
            "unbind in the reserved part",
            operation(ArrayOperation::UNBIND, 0, 0, PAGE, 20 * PAGE),
            "Reserved",
            Errno::Perm,
        ),
        ("4 KiB", operation(RW, bo, 0, 4096, at), "Misaligned", Errno::Inval),
        ("an odd address", operation(RW, bo, 0, PAGE, at + 4096), "Misaligned", Errno::Inval),
        ("an odd offset", operation(RW, bo, 4096, PAGE, at), "MisalignedOffset", Errno::Inval),
    ];
    let good = operation(RW, bo, 0, PAGE, at);
    for (what, bad, name, errno) in table {
        let bytes = [good.as_bytes(), bad.as_bytes(), good.as_bytes()].concat();
        let error = vm.plan_array(&bytes, STRIDE, 3, &handles).map(drop).unwrap_err();
        assert_eq!((&*variant(&error.reason), error.reason.errno()), (*name, *errno), "{what}: {error}");
        assert_eq!((error.index, vm.bindings().count()), (Some(1), 0), "{what}");
        // The same array without it is fine.
        let _ = vm.plan_array(&bytes, STRIDE, 1, &handles).unwrap();
    }
}

#[test]
fn the_array_itself() {
    let (mut vm, handles, bo, _) = setup();
    let op = operation(RW, bo, 0, PAGE, 32 * PAGE);
    let bytes = [op.as_bytes(), op.as_bytes()].concat();
    let mut refused =
        |bytes: &[u8], stride, count| vm.plan_array(bytes, stride, count, &handles).map(drop).unwrap_err();
    for stride in [0, 1, STRIDE - 1] {
        let error = refused(&bytes, stride, 1);
        assert_eq!((error.index, &error.reason), (None, &Reason::Stride { stride }));
        assert_eq!(error.reason.errno(), Errno::Inval);
    }
    for (stride, count) in [(STRIDE, 3), (STRIDE + 1, 2), (usize::MAX, 1), (usize::MAX, usize::MAX), (STRIDE, 1 << 60)]
    {
        let error = refused(&bytes, stride, count);
        assert_eq!(error.reason, Reason::Short { count, stride, bytes: 64 });
        assert_eq!((error.reason.errno().number(), error.reason.errno()), (14, Errno::Fault));
    }
    let mut longer = bytes.clone();
    longer[STRIDE + 9] = 3;
    let error = refused(&longer, 2 * STRIDE, 1);
    assert_eq!(error.index, Some(0));
    assert_eq!(error.reason, Reason::UnknownField { at: STRIDE, value: 3 });
    assert_eq!((error.reason.errno().number(), error.reason.errno()), (7, Errno::TooBig));
    assert_eq!(error.to_string(), "operation 0: byte 32 of it is 0x3, in a field that this version does not know");
}

#[test]
fn a_million_operations_in_one_array() {
    let (mut vm, handles, bo, stale) = setup();
    let count = 1_000_000;
    let mut bytes = Vec::with_capacity(count * STRIDE);
    for i in 0..count as u64 {
        bytes.extend(operation(RW, bo, i % 64 * PAGE, PAGE, (32 + i) * PAGE).as_bytes());
    }
    // The last one is wrong: nothing stays.
    bytes[(count - 1) * STRIDE + 4..][..4].copy_from_slice(&stale.to_le_bytes());
    let error = vm.plan_array(&bytes, STRIDE, count, &handles).map(drop).unwrap_err();
    assert_eq!((error.index, error.reason), (Some(count - 1), Reason::NoHandle { handle: stale }));
    assert_eq!(vm.bindings().count(), 0);
    let committed = vm.plan_array(&bytes, STRIDE, count - 1, &handles).unwrap().commit();
    assert!(committed.is_empty());
    assert_eq!(vm.lookup(DeviceVa::new((32 + 999_998) * PAGE)).unwrap().to.bits(), (1 << 32) + 999_998 % 64 * PAGE);
    vm.invalidated(committed);
}

#[test]
fn names_are_all_different() {
    let va = DeviceVa::new(0);
    let errors = [Error::Empty { va }, Error::Wraps { va, len: 1 }, Error::NoNullPage { va }];
    assert_eq!(errors.map(|e| variant(&e.into())), ["Empty", "Wraps", "NoNullPage"]);
    assert_eq!(Errno::Inval.number(), 22);
}

proptest::proptest! {
    /// Unbinds that continue each other are planned at once: with the same result as the requests one by one.
    #[test]
    fn unbinds_that_continue_each_other(
        // How far the operation is from the end of the last one, its pages, and what it is.
        steps in proptest::collection::vec((0u64..8, 0u64..6, 0u32..12), 1..400),
        first in 24u64..2100,
    ) {
        let (mut vm, handles, bo, _) = setup();
        let mut other = setup();
        let all: Vec<_> = (0..70).map(|i| operation(RW, bo, 0, 64 * PAGE, (24 + i * 64) * PAGE)).collect();
        for (vm, handles) in [(&mut vm, &handles), (&mut other.0, &other.1)] {
            let committed = vm.plan_array(all.as_bytes(), STRIDE, all.len(), handles).unwrap().commit();
            vm.invalidated(committed);
        }
        let mut at = first;
        let ops: Vec<_> = steps
            .iter()
            .map(|&(gap, pages, kind)| {
                at += gap.saturating_sub(6); // most often none
                let (va, range) = (at * PAGE, pages.max(1) * PAGE);
                at += pages.max(1);
                match kind {
                    0 => operation(ArrayOperation::BIND | RW, bo, 0, range, va - PAGE),
                    1 if steps.len() > 300 => operation(ArrayOperation::UNBIND, 0, 0, range + 1, va),
                    1 => operation(ArrayOperation::UNBIND, 0, 0, 2100 * PAGE, va),
                    _ => operation(ArrayOperation::UNBIND, 0, 0, range, va),
                }
            })
            .collect();
        // One by one: an array of one operation takes no notice of the next.
        let requests: Vec<_> = ops
            .iter()
            .map(|op| dmalane_vm::array::requests(op.as_bytes(), STRIDE, 1, PageSize::SIZE_16K, &other.1))
            .map(|one| one.unwrap().remove(0))
            .collect();
        let by_array = vm.plan_array(ops.as_bytes(), STRIDE, ops.len(), &handles).map(Plan::commit);
        let by_requests = other.0.plan(requests).map(Plan::commit).map_err(ArrayError::from);
        match (by_array, by_requests) {
            (Ok(a), Ok(b)) => {
                proptest::prop_assert!(a.spans().eq(b.spans()));
                proptest::prop_assert_eq!(a.unmapped_bytes(), b.unmapped_bytes());
                proptest::prop_assert_eq!(a.tables().len(), b.tables().len());
                vm.invalidated(a);
                other.0.invalidated(b);
            }
            (a, b) => proptest::prop_assert_eq!(a.map(drop), b.map(drop)),
        }
        let seen = |vm: &Vm<_, _>| vm.bindings().map(|b| (b.span, b.offset(), b.access)).collect::<Vec<_>>();
        proptest::prop_assert_eq!(seen(&vm), seen(&other.0));
    }
}
