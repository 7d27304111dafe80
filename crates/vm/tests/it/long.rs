//! Long random sequences against a model that knows one page at a time.
//!
//! `DMALANE_VM_OPERATIONS=10000000 cargo test --release -p dmalane-vm --test it long:: -- --nocapture` runs as many
//! as the variable says with each format; by default few. `RUSTFLAGS="--cfg every_format"` takes all formats.

use std::sync::Arc;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, SgIndex, SgTable, Span};
use dmalane_iopt::{Format, HeapTables, Tables};
use dmalane_vm::{BindRequest, BindingTarget, Bo, Error, Vm};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    /// Often small, sometimes anything.
    fn size(&mut self, most: u64) -> u64 {
        let bits = self.below(u64::from(64 - most.leading_zeros()) + 1);
        1 + self.below((1 << bits).min(most))
    }
}

/// The contents of a page, and where they are.
type Page = Option<(u64, u64, CardAddr, Access)>;

/// Stands for the null page where a buffer is named.
const NULL: u64 = u64::MAX;

struct Run<F: Format> {
    vm: Vm<F, Limited>,
    model: Vec<Page>,
    bos: Vec<Arc<Bo>>,
    base: u64,
    random: Random,
    refused: u64,
    merged: usize,
    /// Batches that only unbound.
    unbound: u64,
}

/// Tables that can refuse to be reserved, and of which there are no more than were promised.
#[derive(Debug)]
struct Limited {
    heap: HeapTables<CardAddr>,
    allow: usize,
    promised: usize,
}

impl Tables for Limited {
    type Addr = CardAddr;

    fn prepare(&mut self, shape: dmalane_iopt::TableShape) -> bool {
        self.heap.prepare(shape)
    }
    fn allocate_root(&mut self) -> Option<CardAddr> {
        self.heap.allocate_root()
    }
    fn free_root(&mut self, root: CardAddr) {
        self.heap.free_root(root);
    }
    fn allocate(&mut self) -> Option<CardAddr> {
        self.promised = self.promised.checked_sub(1)?;
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
        let done = tables <= self.allow && self.heap.reserve(tables);
        self.promised = if done { tables } else { self.promised };
        done
    }
}

impl<F: Format> Run<F> {
    const CHUNK: u64 = 1 << F::INDEX_BITS;
    /// Beyond all buffers.
    const NULL_PAGE: CardAddr = CardAddr::new(1 << (F::OUTPUT_BITS - 1));

    fn new(seed: u64) -> Self {
        let granule = F::GRANULE.bytes();
        // A little more than what one table of the last level but one translates, so that all levels change.
        let pages = 4 * Self::CHUNK;
        let base = (Self::CHUNK * (Self::CHUNK - 2)).min((1 << F::INPUT_BITS) / granule - pages);
        let range = Span::new(DeviceVa::new(base * granule), pages * granule).unwrap();
        let mut vm =
            Vm::new(range, Limited { heap: HeapTables::new(CardAddr::new(0)), allow: usize::MAX, promised: 0 })
                .unwrap();
        vm.set_null_page(Self::NULL_PAGE, granule).unwrap();
        let mut random = Random(seed);
        let mut bos = Vec::new();
        for id in 0..12 {
            // Contiguous and aligned; in runs; in single pages.
            let mut sg = SgTable::new();
            let pages = if id < 4 { 4 * Self::CHUNK } else { 1 + random.below(2 * Self::CHUNK) };
            let mut frame = (id + 1) * 64 * Self::CHUNK;
            while sg.len() < pages * granule {
                let left = pages - sg.len() / granule;
                let run = match id {
                    0..4 => left,
                    4..8 => random.size(40).min(left),
                    _ => 1,
                };
                sg.push(CardAddr::new(frame * granule), run * granule).unwrap();
                frame += run + u64::from(id >= 4) * (1 + random.below(3));
            }
            bos.push(Arc::new(Bo::new(id, SgIndex::from_table(&sg).unwrap())));
        }
        Self { vm, model: vec![None; pages as usize], bos, base, random, refused: 0, merged: 0, unbound: 0 }
    }

    fn va(&self, page: u64) -> DeviceVa {
        DeviceVa::new((self.base + page) * F::GRANULE.bytes())
    }

    fn card(bo: &Bo, page: u64) -> CardAddr {
        bo.sg().segment_at(page * F::GRANULE.bytes()).unwrap().addr
    }

    fn request(&mut self, model: &mut [Page]) -> BindRequest {
        let (granule, pages) = (F::GRANULE.bytes(), model.len() as u64);
        let mut first = self.random.below(pages);
        if self.random.below(4) == 0 {
            first &= !(Self::CHUNK - 1);
        }
        let len = match self.random.below(8) {
            0 => Self::CHUNK,
            _ => self.random.size(pages),
        }
        .min(pages - first);
        let bo = self.bos[self.random.below(12) as usize].clone();
        let bo_pages = bo.len() / granule;
        let access = if self.random.below(3) == 0 { Access::READ } else { Access::RW };
        let (va, span) = (self.va(first), Span::new(self.va(first), len * granule).unwrap());
        match self.random.below(16) {
            0..8 => {
                let len = len.min(bo_pages);
                let mut offset = self.random.below(bo_pages - len + 1);
                if self.random.below(2) == 0 {
                    offset &= !(Self::CHUNK - 1);
                }
                for i in 0..len {
                    model[(first + i) as usize] = Some((bo.id(), offset + i, Self::card(&bo, offset + i), access));
                }
                BindRequest::Bind { va, bo, offset: offset * granule, len: len * granule, access }
            }
            8 => {
                let repeat = 1 << self.random.below(4).min(u64::from(bo_pages.ilog2()));
                let (first, len) = ((first / repeat) * repeat, len.div_ceil(repeat) * repeat);
                let len = len.min(pages - first);
                let offset = self.random.below(bo_pages - repeat + 1);
                for at in first..first + len {
                    let page = offset + at % repeat; // the base is a multiple of it too
                    model[at as usize] = Some((bo.id(), page, Self::card(&bo, page), access));
                }
                let (va, offset) = (self.va(first), offset * granule);
                BindRequest::Repeat { va, bo, offset, page: repeat * granule, len: len * granule, access }
            }
            9 => {
                model[first as usize..(first + len) as usize].fill(Some((NULL, 0, Self::NULL_PAGE, Access::READ)));
                BindRequest::Null { va, len: len * granule }
            }
            10 => {
                for page in model.iter_mut() {
                    *page = page.filter(|(id, ..)| *id != bo.id());
                }
                BindRequest::UnbindBo(bo)
            }
            11 => BindRequest::Prefetch(span),
            _ => {
                model[first as usize..(first + len) as usize].fill(None);
                BindRequest::Unbind(span)
            }
        }
    }

    /// Binds of single pages one after another, which a plan takes together as far as it can.
    fn single_pages(&mut self, model: &mut [Page]) -> Vec<BindRequest> {
        let granule = F::GRANULE.bytes();
        let first = self.random.below(model.len() as u64);
        let last = (first + self.random.below(50)).min(model.len() as u64 - 1);
        let mut bo = self.bos[self.random.below(12) as usize].clone();
        let mut access = Access::RW;
        let each = (first..=last).map(|page| {
            if self.random.below(16) == 0 {
                bo = self.bos[self.random.below(12) as usize].clone();
                access ^= Access::WRITE;
            }
            let offset = self.random.below(bo.len() / granule);
            model[page as usize] = Some((bo.id(), offset, Self::card(&bo, offset), access));
            BindRequest::Bind { va: self.va(page), bo: bo.clone(), offset: offset * granule, len: granule, access }
        });
        each.collect()
    }

    fn check(&self, what: &str) {
        let granule = F::GRANULE.bytes();
        let mut bound: Vec<Page> = vec![None; self.model.len()];
        for b in self.vm.bindings() {
            let first = b.span.first().bits() / granule - self.base;
            for i in 0..b.span.len() / granule {
                let page = match &b.to {
                    BindingTarget::Bo { bo, offset } => (bo.id(), offset / granule + i, bo),
                    BindingTarget::Repeat { bo, offset, page } => {
                        (bo.id(), offset / granule + (first + i) % (page / granule), bo)
                    }
                    _ => {
                        bound[(first + i) as usize] = Some((NULL, 0, Self::NULL_PAGE, b.access));
                        continue;
                    }
                };
                bound[(first + i) as usize] = Some((page.0, page.1, Self::card(page.2, page.1), b.access));
            }
        }
        assert!(bound == self.model, "{what}: the bindings differ from the model");
        let mut mapped = vec![None; self.model.len()];
        for run in self.vm.runs(self.vm.range()) {
            for at in 0..run.len / granule {
                let page = run.at.bits() / granule - self.base + at;
                mapped[page as usize] = Some((run.to.checked_add(at * granule).unwrap(), run.access));
            }
        }
        let expected: Vec<_> = self.model.iter().map(|page| page.map(|(_, _, to, access)| (to, access))).collect();
        assert!(mapped == expected, "{what}: the page table differs from the model");
    }

    /// Binds a chunk in two pieces that continue each other, which `merge` can make one leaf of.
    fn bind_in_two(&mut self) {
        let granule = F::GRANULE.bytes();
        let chunk = self.random.below(self.model.len() as u64 / Self::CHUNK) * Self::CHUNK;
        let from = self.random.below(4) * Self::CHUNK;
        let bo = self.bos[self.random.below(4) as usize].clone();
        let cut = 1 + self.random.below(Self::CHUNK - 1);
        for pages in [0..cut, cut..Self::CHUNK] {
            let (at, offset) = (chunk + pages.start, from + pages.start);
            let len = (pages.end - pages.start) * granule;
            let committed = self.vm.bind(self.va(at), &bo, offset * granule, len, Access::RW).unwrap();
            self.vm.invalidated(committed);
            for page in pages {
                let to = Self::card(&bo, from + page);
                self.model[(chunk + page) as usize] = Some((bo.id(), from + page, to, Access::RW));
            }
        }
        if self.random.below(2) == 0 {
            let span = Span::new(self.va(chunk), Self::CHUNK * granule).unwrap();
            self.merged += self.vm.merge(span, |gone| assert!(span.covers(&gone))).unwrap();
        }
    }

    fn run(&mut self, operations: u64) {
        let mut done = 0;
        while done < operations {
            if self.random.below(8) == 0 {
                self.bind_in_two();
                done += 2;
            }
            let mut model = self.model.clone();
            let requests = if self.random.below(3) == 0 { 1 } else { self.random.size(12) };
            let mut batch: Vec<_> = (0..requests).map(|_| self.request(&mut model)).collect();
            if self.random.below(3) == 0 {
                batch.extend(self.single_pages(&mut model));
                batch.push(self.request(&mut model));
            }
            done += batch.len() as u64;
            if self.random.below(8) == 0 {
                self.vm.tables_mut().allow = self.random.below(4) as usize;
                match self.vm.plan(batch.clone()) {
                    Ok(plan) => drop(plan),
                    Err(e) => {
                        assert!(matches!(e.error, Error::NoTables { .. }), "{e:?}");
                        self.refused += 1;
                    }
                }
                self.vm.tables_mut().allow = usize::MAX;
                if self.random.below(8) == 0 {
                    self.check("a plan that failed or was dropped");
                }
            }
            // Unbinding takes nothing that is not there yet.
            let unbinds = |r: &BindRequest| matches!(r, BindRequest::Unbind(_) | BindRequest::UnbindBo(_));
            if batch.iter().all(unbinds) {
                self.vm.tables_mut().allow = 0;
                self.unbound += 1;
            }
            let committed = match &batch[..] {
                // These have a way of their own.
                [BindRequest::Bind { va, bo, offset, len, access }] => {
                    self.vm.bind(*va, bo, *offset, *len, *access).unwrap()
                }
                [BindRequest::Unbind(span)] => self.vm.unbind(*span).unwrap(),
                _ => self.vm.plan(batch).unwrap().commit(),
            };
            // Whatever changed, the device is told to forget.
            for (page, (old, new)) in self.model.iter().zip(&model).enumerate() {
                if old.is_some() && old != new {
                    let va = self.va(page as u64);
                    assert!(committed.spans().any(|span| span.contains(va)), "{va} is not invalidated");
                }
            }
            self.vm.invalidated(committed);
            self.vm.tables_mut().allow = usize::MAX;
            self.model = model;
            if self.random.below(8) == 0 {
                let first = self.random.below(self.model.len() as u64);
                let len = self.random.size(self.model.len() as u64 - first);
                let span = Span::new(self.va(first), len * F::GRANULE.bytes()).unwrap();
                self.merged += self.vm.merge(span, |gone| assert!(span.covers(&gone))).unwrap();
            }
            self.check("after a commit");
        }
        let range = self.vm.range();
        self.vm.tables_mut().allow = 0;
        let committed = self.vm.plan([BindRequest::Unbind(range)]).unwrap().commit();
        self.vm.invalidated(committed);
        assert_eq!(self.vm.page_table().tables().heap.in_use(), 1, "only the root is left");
        assert!(self.bos.iter().all(|bo| Arc::strong_count(bo) == 1), "a buffer is held");
    }
}

fn run<F: Format>() {
    // By default fewer where a table, and so an operation, is larger.
    let few = (300 * 512 / Run::<F>::CHUNK).clamp(30, 300);
    let operations = std::env::var("DMALANE_VM_OPERATIONS").map_or(few, |n| n.parse().expect("a number"));
    let seed = std::env::var("DMALANE_VM_SEED").map_or(0, |n| n.parse::<u64>().expect("a number"));
    let mut run = Run::<F>::new(0x9e37_79b9_7f4a_7c15 ^ seed);
    run.run(operations);
    println!(
        "{}: {operations} operations, {} plans refused for want of tables, {} tables merged, {} unbinds without memory",
        F::NAME,
        run.refused,
        run.merged,
        run.unbound
    );
}

macro_rules! long {
    ($($name:ident: $format:ty;)*) => {$(
        #[test]
        fn $name() {
            run::<$format>();
        }
    )*};
}

#[cfg(not(every_format))]
crate::geometries::geometries!(long);
#[cfg(every_format)]
dmalane_iopt::formats!(long);
