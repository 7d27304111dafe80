//! A VM of a format chosen at run time does what one of the format's type does, to the last leaf and table.

use std::ops::ControlFlow;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, Span};
use dmalane_iopt::{AgxUat, AmdV1, Arm64S1, Arm64S2, Armv7, Format, FormatId, HeapTables, RiscvSv, X86_64};
use dmalane_vm::{AnyVm, BindRequest, Bo, Mapped, Vm, any_vm};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

fn mapping(vm: &dyn AnyVm) -> Vec<Mapped> {
    let mut all = Vec::new();
    vm.mapping(vm.range(), &mut |run| {
        all.push(run);
        ControlFlow::Continue(())
    });
    all
}

const FEW: usize = 24;
const MANY: usize = 4096;

/// Contiguous buffers that start at a multiple of the second page size, of the third, of neither; a scattered one; one
/// that lies beyond the output addresses of the format in part.
fn buffers<F: Format>() -> Vec<Arc<Bo>> {
    let granule = F::GRANULE.bytes();
    let pages = 4 << F::INDEX_BITS;
    let sizes: Vec<u64> = F::PAGE_SIZES.iter().map(|size| size.bytes()).collect();
    let starts = [*sizes.get(1).unwrap_or(&0), *sizes.get(2).unwrap_or(&0), granule];
    let mut lists: Vec<Vec<Segment<CardAddr>>> =
        starts.iter().map(|&at| vec![Segment { addr: CardAddr::new(at), len: pages * granule }]).collect();
    lists.push((0..pages).map(|n| Segment { addr: CardAddr::new(3 * n * granule), len: granule }).collect());
    let end = 1u64 << F::OUTPUT_BITS;
    lists.push(vec![Segment { addr: CardAddr::new(end - 64 * granule), len: 128 * granule }]);
    (1..).zip(lists).map(|(id, list)| Arc::new(Bo::of_segments(id, list).unwrap())).collect()
}

/// The same batches for both, with as many tables as `limit`. Where the root of the format is several tables in a row,
/// the other VM has a level more: then there must be enough tables, and the spans to invalidate may be longer.
fn agree<F: Format>(format: FormatId, limit: usize, batches: usize) {
    let granule = F::GRANULE.bytes();
    let whole = 1u64 << F::INPUT_BITS;
    let range = Span::new(DeviceVa::new(granule), whole - granule).unwrap();
    let reserved = Span::new(DeviceVa::new(whole / 2), granule << F::INDEX_BITS).unwrap();
    let tables = || HeapTables::with_limit(CardAddr::new(0), limit);
    let mut vms: [Box<dyn AnyVm>; 2] = [
        Box::new(Vm::<F, _>::with_reserved(range, reserved, tables()).unwrap()),
        any_vm(format, range, Some(reserved), tables()).unwrap(),
    ];
    for vm in &mut vms {
        assert_eq!((vm.granule(), vm.range()), (F::GRANULE, range));
        vm.set_null_page(CardAddr::new(0), granule << F::INDEX_BITS).unwrap();
    }
    let bos = buffers::<F>();
    let mut random = Random(F::INPUT_BITS.into());
    let chunk = 1u64 << F::INDEX_BITS;
    let (mut done, mut refused) = (0, 0);
    for _ in 0..batches {
        // Around the reserved part, at the end of the addresses, and in few places else.
        let places = [whole / 2 - chunk * granule, whole / 2, whole - 8 * chunk * granule, 16 * chunk * granule];
        let span = |random: &mut Random| {
            let (first, pages) = match random.below(3) {
                0 => (random.below(8) * chunk, (1 + random.below(4)) * chunk),
                1 => (random.below(8 * chunk), 1 + random.below(2 * chunk)),
                _ => (random.below(8 * chunk), 1),
            };
            let at = places[random.below(4) as usize] + first * granule;
            (DeviceVa::new(at), pages.min(4 * chunk) * granule)
        };
        let accesses = [Access::RW, Access::READ, Access::WRITE, Access::RW | Access::EXEC, Access::RW | Access::MMIO];
        let requests: Vec<BindRequest> = (0..1 + random.below(3))
            .filter_map(|_| {
                let (va, len) = span(&mut random);
                let (bo, access) =
                    (&bos[random.below(5) as usize], accesses[random.below(5).saturating_sub(1) as usize]);
                let bo = Arc::clone(bo);
                Some(match random.below(8) {
                    0..4 => {
                        // Such that large leaves are possible.
                        let offset = va.bits() % (4 * chunk * granule);
                        let len = len.min(bo.len().saturating_sub(offset)).max(granule);
                        BindRequest::Bind { va, bo, offset, len, access }
                    }
                    4 => BindRequest::Null { va, len },
                    5 => BindRequest::Repeat { va, bo, offset: 0, page: 2 * granule, len, access },
                    6 => BindRequest::UnbindBo(bo),
                    _ => BindRequest::Unbind(Span::new(va, len)?),
                })
            })
            .collect();
        let reserved = random.below(8) == 0;
        let [typed, any] = vms.each_mut().map(|vm| {
            vm.apply(requests.clone(), reserved).map(|committed| {
                let (spans, unmapped): (Vec<_>, _) = (committed.spans().collect(), committed.unmapped_bytes());
                vm.invalidated(committed);
                (spans, unmapped)
            })
        });
        let (typed, any) = match limit {
            MANY => (typed.map(|(_, bytes)| (vec![], bytes)), any.map(|(_, bytes)| (vec![], bytes))),
            _ => (typed, any),
        };
        assert_eq!(typed, any, "{format}: {requests:?}");
        if any.is_ok() {
            done += 1
        } else {
            refused += 1
        }
        if random.below(16) == 0 {
            let (va, len) = span(&mut random);
            let [typed, any] = vms.each_mut().map(|vm| Span::new(va, len).map(|span| vm.merge(span, &mut |_| ())));
            assert_eq!(typed, any, "{format}");
        }
        for _ in 0..8 {
            let (va, _) = span(&mut random);
            assert_eq!(vms[0].lookup(va), vms[1].lookup(va), "{format}: {va}");
        }
    }
    let [typed, any] = vms.each_mut().map(|vm| {
        let bound: Vec<u64> = bos.iter().map(|bo| vm.bound_bytes(bo)).collect();
        (mapping(&**vm), vm.binding_count(), bound, vm.lookup(DeviceVa::new(whole + whole / 2)))
    });
    assert_eq!(typed, any, "{format}");
    assert_eq!(any.3, None, "beyond the addresses of {format}");
    assert!(done > batches / 8 && refused > batches / 16, "{format}: {done} done, {refused} refused");
}

macro_rules! formats {
    ($($name:ident: $format:ty, $limit:expr;)*) => {$(
        #[test]
        fn $name() {
            agree::<$format>(FormatId::$name, $limit, 300);
        }
    )*};
}
formats! {
    agx_uat: AgxUat, FEW;
    amd_v1_3level_groups: AmdV1<3, true>, FEW;
    arm64_s1_16k_contiguous: Arm64S1<14, 48, true>, FEW;
    arm64_s1_64k_48_52_contiguous_dirty: Arm64S1<16, 48, true, 52, true>, FEW;
    arm64_s2_4k_40_contiguous: Arm64S2<12, 40, true>, MANY;
    arm64_s2_16k_40: Arm64S2<14, 40>, MANY;
    armv7_short: Armv7, FEW;
    riscv_sv48_napot: RiscvSv<4, true>, FEW;
    x86_64_5level: X86_64<5>, FEW;
}
