//! Break-before-make: no valid entry is written over another one that the device may remember.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, Span};
use dmalane_iopt::{Format, HeapTables, TableShape, Tables};
use dmalane_vm::{BindRequest, Bo, Vm};

/// Heap tables that remember what a device may: each valid entry since it was last made to forget.
struct Watched {
    heap: HeapTables<CardAddr>,
    /// Bytes of an entry and of a table.
    sizes: (u64, u64),
    device: Arc<Mutex<Device>>,
}

#[derive(Default)]
struct Device {
    present: HashMap<u64, u64>,
    /// Entries that were cleared, and that it was not made to forget since.
    stale: HashMap<u64, u64>,
    /// Valid entries that were written over others.
    mistakes: usize,
    invalidations: usize,
}

impl Device {
    fn forget(&mut self) {
        self.stale.clear();
        self.invalidations += 1;
    }
}

impl Tables for Watched {
    type Addr = CardAddr;

    fn prepare(&mut self, shape: TableShape) -> bool {
        self.heap.prepare(shape)
    }
    fn allocate_root(&mut self) -> Option<CardAddr> {
        self.heap.allocate_root()
    }
    fn free_root(&mut self, root: CardAddr) {
        self.heap.free_root(root);
    }
    fn allocate(&mut self) -> Option<CardAddr> {
        self.heap.allocate()
    }
    fn free(&mut self, table: CardAddr) {
        let mut device = self.device.lock().unwrap();
        for at in (table.bits()..table.bits() + self.sizes.1).step_by(self.sizes.0 as usize) {
            device.present.remove(&at);
            device.stale.remove(&at);
        }
        self.heap.free(table);
    }
    fn load(&self, table: CardAddr, index: usize) -> u64 {
        self.heap.load(table, index)
    }
    fn store(&mut self, table: CardAddr, index: usize, entry: u64) {
        let mut device = self.device.lock().unwrap();
        for first in (0..8).step_by(self.sizes.0 as usize) {
            let (at, entry) = (table.bits() + 8 * index as u64 + first, part(entry, first, self.sizes.0));
            if entry == 0 {
                let gone = device.present.remove(&at).map(|old| (at, old));
                device.stale.extend(gone);
            } else {
                let stale = device.stale.remove(&at);
                let old = device.present.insert(at, entry).or(stale);
                device.mistakes += usize::from(old.is_some_and(|old| old != entry));
            }
        }
        self.heap.store(table, index, entry);
    }
    fn reserve(&mut self, tables: usize) -> bool {
        self.heap.reserve(tables)
    }
}

/// So many bytes of a word.
fn part(word: u64, first: u64, bytes: u64) -> u64 {
    word >> (8 * first) & (u64::MAX >> (64 - 8 * bytes))
}

/// Random batches, of leaves of this size and more. Gives the mistakes and the invalidations, those of the caller
/// included.
fn batches<F: Format>(page: u64, breaking: bool, count: usize) -> (usize, usize) {
    let entries = 1 << F::INDEX_BITS;
    let pages = 3 * entries; // that are bound
    let device = Arc::new(Mutex::new(Device::default()));
    let sizes = (F::ENTRY_BYTES, TableShape::of::<F>().table.bytes());
    let tables = Watched { heap: HeapTables::new(CardAddr::new(1 << 28)), sizes, device: device.clone() };
    let mut vm = Vm::<F, _>::new(Span::new(DeviceVa::new(0), 4 * entries * page).unwrap(), tables).unwrap();
    if breaking {
        let device = device.clone();
        vm.break_before_make(Some(Box::new(move |_| device.lock().unwrap().forget())));
    }
    let bo = |id: u64| {
        let segment = Segment { addr: CardAddr::new(id * 4 * entries * page), len: pages * page };
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
        let (first, count) = match random(4) {
            0 => (random(3) * entries, entries),
            1 => (random(pages / 16 - 4) * 16, 16 * (1 + random(4))),
            2 => (random(pages - 600), 1 + random(600)),
            _ => (random(pages), 1),
        };
        let (va, len) = (DeviceVa::new(first * page), count * page);
        let bo = bos[random(2) as usize].clone();
        match random(8) {
            0 => BindRequest::UnbindBo(bo),
            1..4 => BindRequest::Unbind(Span::new(va, len).unwrap()),
            _ => BindRequest::Bind { va, bo, offset: first * page, len, access: Access::RW },
        }
    };
    for _ in 0..count {
        let committed = match random(3) {
            0 => vm.unbind(Span::new(DeviceVa::new(random(pages) * page), page).unwrap()).unwrap(),
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
    macro_rules! each {
        ($($name:ident: $format:ty;)*) => { $(check::<$format>();)* };
    }
    fn check<F: Format>() {
        let page = F::GRANULE.bytes();
        // And the level above, where it has groups.
        let above = Some(page << F::INDEX_BITS).filter(|above| {
            F::LEVELS > 2
                && F::GROUP_BITS[F::LEVELS as usize - 2] > 0
                && above.ilog2() + F::INDEX_BITS + 2 <= F::INPUT_BITS
        });
        for page in [page].into_iter().chain(above) {
            let (mistakes, _) = batches::<F>(page, true, 100);
            assert_eq!(mistakes, 0, "{}, {page:#x}", F::NAME);
            let (mistakes, _) = batches::<F>(page, false, 60);
            assert!(mistakes > 20, "{}, {page:#x}: {mistakes}", F::NAME);
        }
    }
    crate::geometries::geometries!(each);
}
