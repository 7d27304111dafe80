//! The card's queues, and what wraps them, take the suite that every queue takes.

use std::sync::Arc;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Span};
use dmalane_card::{Card, CardQueue, CardTables};
use dmalane_dma::{AnonHeap, Heap};
use dmalane_iopt::{Arm64S1_4k, Format, PageTable, X86_64_4Level};
use dmalane_queue::conformance::{Fixture, suite};
use dmalane_queue::{
    AddressPolicy, BalancePolicy, DeviceAddr, DeviceQueue, HostSlice, Queue, Registered, SharedHandle, SharedOptions,
    SharedQueue, Split,
};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

const MIB: u64 = 1 << 20;
const TARGET_LEN: u64 = MIB / 2;
/// Device virtual addresses under test; nothing is mapped above `TARGET_LEN`.
const VA: DeviceVa = DeviceVa::new(0x12_3456_0000);

type Bus<F> = SoftBus<F, X86_64_4Level>;
type Mmu<F> = PageTable<X86_64_4Level, DeviceVa, CardAddr, CardTables<Bus<F>>>;

/// A card and the target of a test.
struct Bench<F: Format> {
    bus: Arc<Bus<F>>,
    card: Card<Bus<F>>,
    heap: AnonHeap,
    /// Where the target is in card memory, in fragments of equal length.
    fragments: Vec<CardAddr>,
    mmu: Option<Mmu<F>>,
}

impl<F: Format> Bench<F> {
    fn new(fragmentation: f64, workers: Workers, virtually: bool) -> Self {
        let host = SoftHost::new(HostConfig { fragmentation, ..HostConfig::default() }).unwrap();
        let config = CardConfig { ddr: 16 * MIB, hbm: 16 * MIB, channels: 2, workers };
        let bus = Arc::new(SoftBus::new(host, config).unwrap());
        let heap = AnonHeap::new();
        let card = Card::open_with_rings(bus.clone(), &heap, 32).unwrap();
        let ddr_end = card.layout().ddr.last().bits() + 1;
        let mut this = Self { bus, card, heap, fragments: Vec::new(), mmu: None };
        if virtually {
            // Pages of 4 KiB, in backward order through the second half of DDR: nothing lies where it seems to.
            let tables = this.card.tables(Span::new(this.card.layout().hbm.first(), MIB).unwrap()).unwrap();
            let mut mmu = Mmu::new(tables).unwrap();
            for page in 0..TARGET_LEN / 4096 {
                let to = CardAddr::new(ddr_end - (page + 1) * 4096);
                let va = VA.checked_add(page * 4096).unwrap();
                mmu.map(va, to, 4096, Access::RW).unwrap();
                this.fragments.push(to);
            }
            this.card.set_mmu_root(mmu.root()).unwrap();
            this.mmu = Some(mmu);
        } else {
            // The end of DDR, so that one byte more is one too many.
            this.fragments.push(CardAddr::new(ddr_end - TARGET_LEN));
        }
        this
    }

    fn fragments(&self, offset: u64, len: usize, mut each: impl FnMut(CardAddr, std::ops::Range<usize>)) {
        let size = TARGET_LEN / self.fragments.len() as u64;
        let (mut at, end) = (offset, offset + len as u64);
        while at < end {
            let n = (size - at % size).min(end - at);
            let to = self.fragments[(at / size) as usize].checked_add(at % size).unwrap();
            each(to, (at - offset) as usize..(at - offset + n) as usize);
            at += n;
        }
    }
}

/// The kind of queue under test.
trait Kind<F: Format> {
    type Queue: Queue<Addr = DeviceAddr>;
    fn queue(card: &Card<Bus<F>>) -> Self::Queue;
}

struct One;
struct Both;
struct Balanced;
struct Shared;
struct Boxed;

impl<F: Format> Kind<F> for One {
    type Queue = CardQueue<Bus<F>>;
    fn queue(card: &Card<Bus<F>>) -> Self::Queue {
        card.queue(1).unwrap()
    }
}

impl<F: Format> Kind<F> for Both {
    type Queue = Split<CardQueue<Bus<F>>>;
    fn queue(card: &Card<Bus<F>>) -> Self::Queue {
        Split::new(vec![card.queue(0).unwrap(), card.queue(1).unwrap()], Box::new(AddressPolicy::new(card.areas())))
    }
}

impl<F: Format> Kind<F> for Balanced {
    type Queue = Split<CardQueue<Bus<F>>>;
    fn queue(card: &Card<Bus<F>>) -> Self::Queue {
        Split::new(vec![card.queue(0).unwrap(), card.queue(1).unwrap()], Box::new(BalancePolicy::new(card.areas())))
    }
}

impl<F: Format> Kind<F> for Shared {
    type Queue = SharedHandle<CardQueue<Bus<F>>>;
    fn queue(card: &Card<Bus<F>>) -> Self::Queue {
        let limits = SharedOptions { inside: 16, each: 100, ..SharedOptions::default() };
        SharedQueue::new(card.queue(0).unwrap(), limits).handle()
    }
}

impl<F: Format> Kind<F> for Boxed {
    type Queue = Box<DeviceQueue>;
    fn queue(card: &Card<Bus<F>>) -> Self::Queue {
        Box::new(card.queue(0).unwrap())
    }
}

struct Under<F: Format, K>(Bench<F>, std::marker::PhantomData<K>);

impl<F: Format, K: Kind<F>> Fixture for Under<F, K> {
    type Queue = K::Queue;

    fn queue(&mut self) -> K::Queue {
        K::queue(&self.0.card)
    }

    fn target_len(&self) -> u64 {
        TARGET_LEN
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        match self.0.mmu {
            None => DeviceAddr::Card(self.0.fragments[0].checked_add(offset).unwrap()),
            Some(_) => DeviceAddr::Va(VA.checked_add(offset).unwrap()),
        }
    }

    fn host(&mut self, len: usize) -> HostSlice {
        // Neither at the start nor at the end of its buffer.
        let buf = self.0.heap.allocate(len + 30).unwrap().share();
        let via = Registered::new(&*self.0.bus, &buf, Access::RW).unwrap();
        let (_, rest) = buf.into_slice().split_at(13).unwrap();
        (rest.split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; TARGET_LEN as usize];
        let memory = self.0.bus.memory();
        self.0.fragments(0, bytes.len(), |at, range| memory.read(at, &mut bytes[range]).unwrap());
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        let memory = self.0.bus.memory();
        self.0.fragments(0, bytes.len(), |at, range| memory.write(at, &bytes[range]).unwrap());
    }
}

fn takes_the_suite<F: Format, K: Kind<F>>(workers: Workers, virtually: bool) {
    for fragmentation in [0.0, 1.0] {
        let mut under = Under::<F, K>(Bench::new(fragmentation, workers, virtually), std::marker::PhantomData);
        suite(&mut under);
        assert_eq!(under.0.card.quarantined(), 0);
        let stats = under.0.bus.host().stats();
        assert_eq!(stats.pinned_frames, 4, "only the rings are left: one page each");
    }
}

macro_rules! conformance {
    ($($name:ident: $format:ty, $kind:ty, $workers:ident, virtual $virtually:literal;)*) => {$(
        #[test]
        fn $name() {
            takes_the_suite::<$format, $kind>(Workers::$workers, $virtually);
        }
    )*};
}

conformance! {
    inline: Arm64S1_4k, One, Inline, virtual false;
    inline_x86: X86_64_4Level, One, Inline, virtual false;
    one_worker: Arm64S1_4k, One, One, virtual false;
    workers: Arm64S1_4k, One, PerChannel, virtual false;
    workers_x86: X86_64_4Level, One, PerChannel, virtual false;
    by_va: Arm64S1_4k, One, Inline, virtual true;
    by_va_one_worker: Arm64S1_4k, One, One, virtual true;
    by_va_workers_x86: X86_64_4Level, One, PerChannel, virtual true;
    boxed: Arm64S1_4k, Boxed, Inline, virtual false;
    shared: Arm64S1_4k, Shared, Inline, virtual false;
    shared_workers: Arm64S1_4k, Shared, PerChannel, virtual false;
    split: Arm64S1_4k, Both, Inline, virtual false;
    split_workers_x86: X86_64_4Level, Both, PerChannel, virtual false;
    balanced: Arm64S1_4k, Balanced, Inline, virtual false;
    balanced_workers_x86: X86_64_4Level, Balanced, PerChannel, virtual false;
    split_by_va: X86_64_4Level, Both, Inline, virtual true;
}
