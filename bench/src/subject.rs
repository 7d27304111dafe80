//! One way to do a job: what every variant offers, ours, and the floor.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmalane::addr::{Access, CardAddr, Iova, PhysAddr, Span};
use dmalane::card::{Card, CardTables};
use dmalane::dma::Registrar;
use dmalane::iopt::{Arm64S1_4k, Format, HeapTables, PageTable, TablePool, Tables};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};
use zerocopy::FromZeros;

use crate::job::{BASE, Call, Job, PAGE};

/// A variant of a page-table bench.
pub trait Subject {
    /// As it is printed: `ours`, `before`, `floor` or `peer:X`, with more after a comma.
    fn name(&self) -> &str;

    /// New, empty tables; the memory of the old ones is ready to be used again.
    fn reset(&mut self);

    /// Maps every list of the job.
    fn map(&mut self, job: &Job);

    /// Takes away what each call mapped, call by call.
    fn unmap(&mut self, job: &Job);

    /// Where an address leads.
    fn find(&self, at: u64) -> Option<u64>;

    /// Where it leads as a walker of ours reads the tables, if another implementation made them.
    fn walked(&self, _at: u64) -> Option<Option<u64>> {
        None
    }

    /// The sum of where these addresses lead, all of which are mapped.
    fn find_all(&self, at: &[u64]) -> u64;

    /// Tables in use, where the variant can tell.
    fn tables(&self) -> Option<usize> {
        None
    }
}

/// The timed call. Callgrind counts what happens below it, so it is kept as a function of its own.
#[inline(never)]
pub fn timed_map(subject: &mut dyn Subject, job: &Job) {
    subject.map(black_box(job));
    black_box("map"); // or the compiler makes one function of this and the next
}

/// The same for taking away.
#[inline(never)]
pub fn timed_unmap(subject: &mut dyn Subject, job: &Job) {
    subject.unmap(black_box(job));
}

/// The same for looking up.
#[inline(never)]
pub fn timed_find(subject: &dyn Subject, at: &[u64]) -> u64 {
    subject.find_all(black_box(at))
}

/// Compares every leaf of a mapped job with its list.
pub fn check_mapped(subject: &dyn Subject, job: &Job) -> Result<(), String> {
    for (at, to) in job.places() {
        for found in [Some(subject.find(at)), subject.walked(at)].into_iter().flatten() {
            if found != Some(to) {
                return Err(format!("{}, {}: {at:#x} leads to {found:x?}, not {to:#x}", job.name, subject.name()));
            }
        }
    }
    let end = job.calls.iter().map(|c| c.at + c.len).max().unwrap_or(BASE);
    for at in [BASE - PAGE, end] {
        if let Some(found) = subject.find(at).or(subject.walked(at).flatten()) {
            return Err(format!("{}, {}: {at:#x} leads to {found:#x}, not nowhere", job.name, subject.name()));
        }
    }
    Ok(())
}

/// Nothing of the job is left.
pub fn check_unmapped(subject: &dyn Subject, job: &Job) -> Result<(), String> {
    match job.places().find_map(|(at, _)| subject.find(at).map(|to| (at, to))) {
        None => Ok(()),
        Some((at, to)) => Err(format!("{}, {}: {at:#x} still leads to {to:#x}", job.name, subject.name())),
    }
}

/// How [`Ours`] is called.
#[derive(Clone, Copy, PartialEq)]
pub enum Shape {
    /// One `map_sg` for each list.
    List,
    /// One `map` for each entry of the list.
    Entry,
}

/// `dmalane-iopt`, called without layers.
pub struct Ours<F: Format, T: Tables = HeapTables<PhysAddr>> {
    name: String,
    shape: Shape,
    /// `None` only while it is being replaced.
    table: Option<PageTable<F, Iova, PhysAddr, T>>,
}

/// Table memory that a device walks, with one owner.
pub type Pool = &'static mut TablePool<'static, PhysAddr>;

/// Where our tables claim to be.
pub const TABLES_AT: PhysAddr = PhysAddr::new(0x1000_0000);

impl<F: Format> Ours<F> {
    pub fn new(name: &str, shape: Shape) -> Self {
        Self::in_memory(name, shape, HeapTables::new(TABLES_AT))
    }
}

/// A pool, which stays for as long as the program runs.
fn pool() -> Pool {
    const TABLES: usize = 4096;
    pool_of(Vec::leak((0..TABLES * 512).map(|_| AtomicU64::new(0)).collect()))
}

/// A pool of this memory.
pub fn pool_of(words: &'static [AtomicU64]) -> Pool {
    Box::leak(Box::new(TablePool::new::<Arm64S1_4k>(TABLES_AT, words)))
}

impl Ours<Arm64S1_4k, Pool> {
    /// With tables in a pool with one owner.
    pub fn in_pool(name: &str, shape: Shape) -> Self {
        Self::in_memory(name, shape, pool())
    }
}

impl Ours<Arm64S1_4k, &'static TablePool<'static, PhysAddr>> {
    /// With tables in a pool that threads share.
    pub fn in_shared_pool(name: &str, shape: Shape) -> Self {
        Self::in_memory(name, shape, pool())
    }
}

impl Ours<Arm64S1_4k, CardTables<SoftBus>> {
    /// With tables in the memory of a software card.
    pub fn on_card(name: &str, shape: Shape) -> Result<Self, Box<dyn std::error::Error>> {
        let config = CardConfig { ddr: 64 << 20, hbm: 64 << 20, ..CardConfig::default() };
        let bus: Arc<SoftBus> = Arc::new(SoftBus::new(SoftHost::new(HostConfig::default())?, config)?);
        let card = Card::open(bus.clone(), &*bus.heap(None))?;
        let tables = card.tables(Span::new(CardAddr::new(0), 64 << 20).ok_or("no span")?)?;
        Ok(Self::in_memory(name, shape, tables))
    }
}

impl<F: Format, T: Tables> Ours<F, T> {
    pub fn in_memory(name: &str, shape: Shape, tables: T) -> Self {
        let table = PageTable::new(tables).expect("a root table");
        Self { name: name.to_owned(), shape, table: Some(table) }
    }

    fn table(&self) -> &PageTable<F, Iova, PhysAddr, T> {
        self.table.as_ref().expect("always there")
    }

    fn table_mut(&mut self) -> &mut PageTable<F, Iova, PhysAddr, T> {
        self.table.as_mut().expect("always there")
    }
}

impl<F: Format, T: Tables> Subject for Ours<F, T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn reset(&mut self) {
        self.table = self.table.take().map(|t| PageTable::new(t.into_tables()).expect("a root table"));
    }

    fn map(&mut self, job: &Job) {
        let shape = self.shape;
        let table = self.table_mut();
        for &call in &job.calls {
            let list = job.list(call);
            match shape {
                Shape::List => {
                    let len = table.map_sg(Iova::new(call.at), list.iter().copied(), Access::RW).expect("free");
                    assert_eq!(len, call.len);
                }
                Shape::Entry => {
                    let mut at = call.at;
                    for s in list {
                        table.map(Iova::new(at), s.addr, s.len, Access::RW).expect("free");
                        at += s.len;
                    }
                }
            }
        }
    }

    fn unmap(&mut self, job: &Job) {
        let table = self.table_mut();
        for call in &job.calls {
            let span = Span::new(Iova::new(call.at), call.len).expect("a span");
            let flush = table.unmap(span).expect("no cuts");
            assert_eq!(flush.bytes(), call.len);
            table.free_tables(flush);
        }
    }

    fn find(&self, at: u64) -> Option<u64> {
        self.table().translate(Iova::new(at)).map(|to| to.bits())
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        let table = self.table();
        at.iter().fold(0, |sum, &at| sum.wrapping_add(table.translate(Iova::new(at)).map_or(0, |to| to.bits())))
    }

    fn tables(&self) -> Option<usize> {
        Some(self.table().linked_tables() + 1)
    }
}

/// The no-check floor: entries stored one after the other into leaf tables that are there already, each by a 64-bit
/// store that a walking device sees whole.
pub struct Floor {
    /// Bits of an address within a leaf.
    shift: u32,
    entries: Box<[AtomicU64]>,
}

/// Some attributes, as an entry has them.
const BITS: u64 = 0x0060_0000_0000_0f43;
const ADDRESS: u64 = (1 << 48) - PAGE;

impl Floor {
    pub fn new(job: &Job) -> Self {
        let entries = <[_]>::new_box_zeroed_with_elems(job.leaves() as usize).expect("memory");
        Self { shift: job.leaf.ilog2(), entries }
    }

    fn slots(&self, call: Call) -> &[AtomicU64] {
        let first = ((call.at - BASE) >> self.shift) as usize;
        &self.entries[first..first + (call.len >> self.shift) as usize]
    }
}

impl Subject for Floor {
    fn name(&self) -> &str {
        "floor"
    }

    fn reset(&mut self) {
        self.entries.iter().for_each(|e| e.store(0, Ordering::Relaxed));
    }

    fn map(&mut self, job: &Job) {
        for &call in &job.calls {
            let (leaf, list) = (1 << self.shift, job.list(call));
            let slots = self.slots(call);
            if job.single {
                for (slot, s) in slots.iter().zip(list) {
                    slot.store(s.addr.bits() | BITS, Ordering::Relaxed);
                }
            } else {
                let mut rest = slots;
                for s in list {
                    let (now, then) = rest.split_at((s.len >> self.shift) as usize);
                    let mut entry = s.addr.bits() | BITS;
                    for slot in now {
                        slot.store(entry, Ordering::Relaxed);
                        entry += leaf;
                    }
                    rest = then;
                }
            }
        }
        black_box(&mut self.entries);
    }

    fn unmap(&mut self, job: &Job) {
        for &call in &job.calls {
            self.slots(call).iter().for_each(|e| e.store(0, Ordering::Relaxed));
        }
        black_box(&mut self.entries);
    }

    fn find(&self, at: u64) -> Option<u64> {
        let offset = at.checked_sub(BASE)?;
        let entry = self.entries.get((offset >> self.shift) as usize)?.load(Ordering::Relaxed);
        (entry != 0).then_some((entry & ADDRESS) + (offset & ((1 << self.shift) - 1)))
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}

/// The same with plain stores, which the compiler may widen: the floor of a table that is filled before it is linked.
pub struct VectorFloor {
    entries: Vec<u64>,
}

impl VectorFloor {
    pub fn new(job: &Job) -> Self {
        assert!(job.single);
        Self { entries: vec![0; job.leaves() as usize] }
    }
}

impl Subject for VectorFloor {
    fn name(&self) -> &str {
        "floor, not linked"
    }

    fn reset(&mut self) {
        self.entries.fill(0);
    }

    fn map(&mut self, job: &Job) {
        for &call in &job.calls {
            let first = ((call.at - BASE) / job.leaf) as usize;
            for (slot, s) in self.entries[first..].iter_mut().zip(job.list(call)) {
                *slot = s.addr.bits() | BITS;
            }
        }
        black_box(&mut self.entries);
    }

    fn unmap(&mut self, _: &Job) {
        self.entries.fill(0);
        black_box(&mut self.entries);
    }

    fn find(&self, at: u64) -> Option<u64> {
        let offset = at.checked_sub(BASE)?;
        let entry = *self.entries.get((offset / PAGE) as usize)?;
        (entry != 0).then_some((entry & ADDRESS) + offset % PAGE)
    }

    fn find_all(&self, at: &[u64]) -> u64 {
        at.iter().fold(0, |sum, &at| sum.wrapping_add(self.find(at).unwrap_or(0)))
    }
}
