//! Arrays of binds as bytes: planned as they are and as requests, they do the same; what is refused changes nothing.

use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, Span};
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_iopt::{AgxUat, Format, HeapTables, X86_64_4Level};
use dmalane_vm::array::{ArrayOperation, requests};
use dmalane_vm::{BindRequest, Bo, Handles, Vm};

const PAGES: u64 = 2048;
const ARRAYS: usize = 12;

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    run::<X86_64_4Level>(data);
    run::<AgxUat>(data);
}

fn run<F: Format>(data: &[u8]) {
    let input = &mut FuzzInput::new(data);
    let page = F::GRANULE.bytes();
    let whole = Span::new(DeviceVa::new(512 * page), PAGES * page).expect("a span");
    let limit = usize::from(input.u8() % 32) + 4;
    let vm = || Vm::<F, _>::new(whole, HeapTables::with_limit(CardAddr::new(1 << 32), limit)).expect("a VM");
    let (mut direct, mut by_request) = (vm(), vm());
    let mut handles = Handles::new();
    let mut names = vec![0, u32::MAX];
    for pages in [1, 512, 1024] {
        let memory = Segment { addr: CardAddr::new(pages << 22), len: pages * page };
        let bo = Bo::of_segments(pages, [memory]).expect("a buffer object");
        names.push(handles.insert(Arc::new(bo)).expect("a handle"));
    }
    for _ in 0..ARRAYS {
        if input.is_empty() {
            break;
        }
        let (count, stride) = (usize::from(input.u8() % 9), 32 + usize::from(input.u8()) % 3 * 4);
        let mut bytes = Vec::new();
        for _ in 0..count {
            operation(input, page, &names, &mut bytes);
            bytes.resize(bytes.len().next_multiple_of(stride).max(stride), 0);
        }
        if input.u8() > 0xf0 && !bytes.is_empty() {
            let at = usize::from(input.u16()) % bytes.len();
            bytes[at] ^= input.u8();
        }
        let before = bindings(&direct);
        let one = direct.plan_array(&bytes, stride, count, &handles).map(|plan| drop(plan.commit()));
        let other = match requests(&bytes, stride, count, F::GRANULE, &handles) {
            Ok(requests) => by_request.plan(requests).map(|plan| drop(plan.commit())).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        assert_eq!(one.is_ok(), other.is_ok(), "{}: {one:?} and {other:?}", F::NAME);
        let now = bindings(&direct);
        assert!(now == bindings(&by_request), "{}: two ways, two results", F::NAME);
        assert!(one.is_ok() || now == before, "{}: refused and yet changed", F::NAME);
    }
    let _ = direct.plan([BindRequest::Unbind(whole)]).expect("all of it").commit();
    assert!(bindings(&direct).is_empty());
}

/// An operation of small numbers, so that they meet.
pub(super) fn operation(input: &mut FuzzInput<'_>, page: u64, names: &[u32], bytes: &mut Vec<u8>) {
    let (kind, more) = (input.u8(), input.u8());
    let mut flags = u32::from(kind % 7) << ArrayOperation::KIND_SHIFT;
    let uses_bo = matches!(kind % 7, 0 | 2 | 4);
    let handle = if uses_bo || more & 0x80 != 0 { names[usize::from(input.u8()) % names.len()] } else { 0 };
    let wild = more & 0x70 == 0x70;
    let number = |input: &mut FuzzInput<'_>| if wild { input.number() } else { u64::from(input.u16()) % 1200 * page };
    let (mut offset, mut range, mut addr) = (number(input), number(input), number(input).wrapping_add(512 * page));
    match kind % 7 {
        0 => flags |= u32::from(more & 7).max(1),
        2 => (offset, range, addr) = (0, 0, 0),
        4 => flags |= u32::from(more & 7).max(1) | u32::from(input.u8() % 24) << ArrayOperation::PAGE_SHIFT,
        _ => offset = 0,
    }
    bytes.extend(flags.to_le_bytes());
    bytes.extend(handle.to_le_bytes());
    [offset, range, addr].iter().for_each(|n| bytes.extend(n.to_le_bytes()));
}

/// Each binding: where, what it may, which buffer from where on.
fn bindings<F: Format>(vm: &Vm<F, HeapTables<CardAddr>>) -> Vec<(Span<DeviceVa>, Access, Option<u64>, u64)> {
    vm.bindings().map(|b| (b.span, b.access, b.bo().map(|bo| bo.id()), b.offset())).collect()
}
