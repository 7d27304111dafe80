//! Break-before-make: no valid entry is written over another one that the device may remember.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, Span};
use dmalane_iopt::{Arm64S1, Arm64S1_4k, Format, HeapTables, Tables};
use dmalane_vm::{BindRequest, Bo, Vm};

const PAGE: u64 = 4096;
/// Pages that are bound.
const PAGES: u64 = 3 * 512;

/// Heap tables that remember what a device may: each valid entry since it was last made to forget.
struct Watched {
    heap: HeapTables<CardAddr>,
    device: Arc<Mutex<Device>>,
}

#[derive(Default)]
struct Device {
    remembered: BTreeMap<u64, u64>,
    present: BTreeMap<u64, u64>,
    /// Valid entries that were written over others.
    mistakes: usize,
    invalidations: usize,
}

impl Device {
    fn forget(&mut self) {
        self.remembered.clone_from(&self.present);
        self.invalidations += 1;
    }
}

impl Tables for Watched {
    type Addr = CardAddr;

    fn allocate(&mut self) -> Option<CardAddr> {
        self.heap.allocate()
    }
    fn free(&mut self, table: CardAddr) {
        let mut device = self.device.lock().unwrap();
        let words = table.bits()..table.bits() + PAGE;
        device.remembered.retain(|at, _| !words.contains(at));
        device.present.retain(|at, _| !words.contains(at));
        self.heap.free(table);
    }
    fn load(&self, table: CardAddr, index: usize) -> u64 {
        self.heap.load(table, index)
    }
    fn store(&mut self, table: CardAddr, index: usize, entry: u64) {
        let (at, mut device) = (table.bits() + 8 * index as u64, self.device.lock().unwrap());
        if entry == 0 {
            device.present.remove(&at);
        } else {
            device.mistakes += usize::from(device.remembered.insert(at, entry).is_some_and(|old| old != entry));
            device.present.insert(at, entry);
        }
        self.heap.store(table, index, entry);
    }
    fn reserve(&mut self, tables: usize) -> bool {
        self.heap.reserve(tables)
    }
}

/// Random batches. Gives the mistakes and the invalidations, those of the caller included.
fn batches<F: Format>(breaking: bool, count: usize) -> (usize, usize) {
    let device = Arc::new(Mutex::new(Device::default()));
    let tables = Watched { heap: HeapTables::new(CardAddr::new(1 << 40)), device: device.clone() };
    let mut vm = Vm::<F, _>::new(Span::new(DeviceVa::new(0), 1 << 30).unwrap(), tables).unwrap();
    if breaking {
        let device = device.clone();
        vm.break_before_make(Some(Box::new(move |_| device.lock().unwrap().forget())));
    }
    let bo = |id: u64| {
        let segment = Segment { addr: CardAddr::new(id << 30), len: PAGES * PAGE };
        Arc::new(Bo::of_segments(id, [segment]).unwrap())
    };
    let bos = [bo(1), bo(2)];
    let state = RefCell::new(1_u64);
    let random = |below: u64| {
        let mut state = state.borrow_mut();
        *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (*state >> 33) % below
    };
    let request = || {
        let (first, pages) = match random(4) {
            0 => (random(3) * 512, 512),
            1 => (random(90) * 16, 16 * (1 + random(4))),
            2 => (random(PAGES - 600), 1 + random(600)),
            _ => (random(PAGES), 1),
        };
        let (va, len) = (DeviceVa::new(first * PAGE), pages * PAGE);
        let bo = bos[random(2) as usize].clone();
        match random(8) {
            0 => BindRequest::UnbindBo(bo),
            1..4 => BindRequest::Unbind(Span::new(va, len).unwrap()),
            _ => BindRequest::Bind { va, bo, offset: first * PAGE, len, access: Access::RW },
        }
    };
    for _ in 0..count {
        let committed = match random(3) {
            0 => vm.unbind(Span::new(DeviceVa::new(random(PAGES) * PAGE), PAGE).unwrap()).unwrap(),
            _ => vm.plan((0..1 + random(4)).map(|_| request())).unwrap().commit(),
        };
        committed.spans().for_each(|_| device.lock().unwrap().forget());
        vm.invalidated(committed);
    }
    let device = device.lock().unwrap();
    (device.mistakes, device.invalidations)
}

#[test]
fn every_entry_is_broken_before_it_is_made() {
    assert_eq!(batches::<Arm64S1_4k>(true, 400).0, 0);
    assert_eq!(batches::<Arm64S1<12, 48, true>>(true, 400).0, 0);
    assert!(batches::<Arm64S1_4k>(false, 100).0 > 100);
    assert!(batches::<Arm64S1<12, 48, true>>(false, 100).0 > 100);
}
