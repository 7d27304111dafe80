//! The card's channels take the suite that every channel takes.

use std::sync::Arc;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Span};
use dmalane_card::{Card, CardChannel, CardQueue, CardTables};
use dmalane_dma::{AnonHeap, BufferSlice, Heap};
use dmalane_iopt::{Arm64S1_4k, Format, PageTable, X86_64_4Level};
use dmalane_queue::conformance::{Fixture, suite};
use dmalane_queue::conformance_queue;
use dmalane_queue::{AddressPolicy, BalancePolicy, Channel, DeviceAddr, DeviceFar, Fenced, Registered, Split};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

const MIB: u64 = 1 << 20;
const FAR_LEN: u64 = MIB;
/// Device virtual addresses under test; nothing is mapped above `FAR_LEN`.
const VA: DeviceVa = DeviceVa::new(0x12_3456_0000);

type Bus<F> = SoftBus<F, X86_64_4Level>;
type Mmu<F> = PageTable<X86_64_4Level, DeviceVa, CardAddr, CardTables<Bus<F>>>;

/// A card with one buffer registered for all operations of a test.
struct Bench<F: Format> {
    bus: Arc<Bus<F>>,
    card: Card<Bus<F>>,
    heap: AnonHeap,
    registered: Vec<Registered>,
    /// Where the far end is in card memory, in pieces of equal length.
    pieces: Vec<CardAddr>,
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
        let mut this = Self { bus, card, heap, registered: Vec::new(), pieces: Vec::new(), mmu: None };
        if virtually {
            // Pages of 4 KiB, in backward order through the second half of DDR: nothing lies where it seems to.
            let tables = this.card.tables(Span::new(this.card.layout().hbm.first(), MIB).unwrap()).unwrap();
            let mut mmu = Mmu::new(tables).unwrap();
            for page in 0..FAR_LEN / 4096 {
                let to = CardAddr::new(ddr_end - (page + 1) * 4096);
                let va = VA.checked_add(page * 4096).unwrap();
                mmu.map(va, to, 4096, Access::RW).unwrap();
                this.pieces.push(to);
            }
            this.card.set_mmu_root(mmu.root()).unwrap();
            this.mmu = Some(mmu);
        } else {
            // The end of DDR, so that one byte more is one too many.
            this.pieces.push(CardAddr::new(ddr_end - FAR_LEN));
        }
        this
    }

    fn pieces(&self, offset: u64, len: usize, mut each: impl FnMut(CardAddr, std::ops::Range<usize>)) {
        let size = FAR_LEN / self.pieces.len() as u64;
        let (mut at, end) = (offset, offset + len as u64);
        while at < end {
            let n = (size - at % size).min(end - at);
            let to = self.pieces[(at / size) as usize].checked_add(at % size).unwrap();
            each(to, (at - offset) as usize..(at - offset + n) as usize);
            at += n;
        }
    }
}

/// What kind of channel is under test.
trait Kind<F: Format> {
    type Channel: Channel<Far = DeviceFar>;
    fn channel(card: &Card<Bus<F>>) -> Self::Channel;
}

struct One;
struct Both;
struct Balanced;

impl<F: Format> Kind<F> for One {
    type Channel = CardChannel<Bus<F>>;
    fn channel(card: &Card<Bus<F>>) -> Self::Channel {
        card.channel(1).unwrap()
    }
}

impl<F: Format> Kind<F> for Both {
    type Channel = Split<CardChannel<Bus<F>>, AddressPolicy>;
    fn channel(card: &Card<Bus<F>>) -> Self::Channel {
        Split::new(vec![card.channel(0).unwrap(), card.channel(1).unwrap()], AddressPolicy::new(card.areas()))
    }
}

struct Signalling;

impl<F: Format> Kind<F> for Signalling {
    type Channel = Fenced<CardChannel<Bus<F>>>;
    fn channel(card: &Card<Bus<F>>) -> Self::Channel {
        Fenced::new(card.channel(0).unwrap())
    }
}

impl<F: Format> Kind<F> for Balanced {
    type Channel = Split<CardChannel<Bus<F>>, BalancePolicy>;
    fn channel(card: &Card<Bus<F>>) -> Self::Channel {
        Split::new(vec![card.channel(0).unwrap(), card.channel(1).unwrap()], BalancePolicy::new(card.areas()))
    }
}

struct Under<F: Format, K>(Bench<F>, std::marker::PhantomData<K>);

impl<F: Format, K: Kind<F>> Fixture for Under<F, K> {
    type Channel = K::Channel;

    fn channel(&mut self) -> K::Channel {
        self.0.registered.clear();
        K::channel(&self.0.card)
    }

    fn far_len(&self) -> u64 {
        FAR_LEN
    }

    fn far(&mut self, offset: u64, part: &BufferSlice) -> DeviceFar {
        let registered = self.0.registered.iter().find(|r| r.iova_of(part).is_some());
        let via = registered.expect("a part of a registered buffer").clone();
        let at = match self.0.mmu {
            None => DeviceAddr::Card(self.0.pieces[0].checked_add(offset).unwrap()),
            Some(_) => DeviceAddr::Va(VA.checked_add(offset).unwrap()),
        };
        DeviceFar { at, via }
    }

    fn part(&mut self, len: usize) -> BufferSlice {
        let buf = self.0.heap.allocate(len).unwrap().share();
        self.0.registered.push(Registered::new(&*self.0.bus, &buf, Access::RW).unwrap());
        buf.into_part().split_at(len).unwrap().0
    }

    fn forget(&mut self) {
        self.0.registered.clear();
    }

    fn peek(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let memory = self.0.bus.memory();
        self.0.pieces(offset, len, |at, range| memory.read(at, &mut bytes[range]).unwrap());
        bytes
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        let memory = self.0.bus.memory();
        self.0.pieces(offset, bytes.len(), |at, range| memory.write(at, &bytes[range]).unwrap());
    }
}

fn takes_the_suite<F: Format, K: Kind<F>>(workers: bool, virtually: bool) {
    for fragmentation in [0.0, 1.0] {
        let mut under = Under::<F, K>(Bench::new(fragmentation, workers.into(), virtually), std::marker::PhantomData);
        suite(&mut under);
        assert_eq!(under.0.card.quarantined(), 0);
        under.0.registered.clear();
        let stats = under.0.bus.host().stats();
        assert_eq!(stats.pinned_frames, 4, "only the rings are left: one page each");
    }
}

macro_rules! conformance {
    ($($name:ident: $format:ty, $kind:ty, workers $workers:literal, virtual $virtually:literal;)*) => {$(
        #[test]
        fn $name() {
            takes_the_suite::<$format, $kind>($workers, $virtually);
        }
    )*};
}

conformance! {
    inline: Arm64S1_4k, One, workers false, virtual false;
    inline_x86: X86_64_4Level, One, workers false, virtual false;
    workers: Arm64S1_4k, One, workers true, virtual false;
    workers_x86: X86_64_4Level, One, workers true, virtual false;
    by_va: Arm64S1_4k, One, workers false, virtual true;
    by_va_workers_x86: X86_64_4Level, One, workers true, virtual true;
    fenced: Arm64S1_4k, Signalling, workers false, virtual false;
    split: Arm64S1_4k, Both, workers false, virtual false;
    split_workers_x86: X86_64_4Level, Both, workers true, virtual false;
    balanced: Arm64S1_4k, Balanced, workers false, virtual false;
    balanced_workers_x86: X86_64_4Level, Balanced, workers true, virtual false;
    split_by_va: X86_64_4Level, Both, workers false, virtual true;
}

impl<F: Format> conformance_queue::Fixture for Bench<F> {
    type Queue = CardQueue<Bus<F>>;

    fn queue(&mut self) -> Self::Queue {
        self.card.queue(1).unwrap()
    }

    fn far_len(&self) -> u64 {
        FAR_LEN
    }

    fn far(&self, offset: u64) -> DeviceAddr {
        match self.mmu {
            None => DeviceAddr::Card(self.pieces[0].checked_add(offset).unwrap()),
            Some(_) => DeviceAddr::Va(VA.checked_add(offset).unwrap()),
        }
    }

    fn host(&mut self, len: usize) -> (BufferSlice, Registered) {
        // Neither at the start nor at the end of its buffer.
        let buf = self.heap.allocate(len + 30).unwrap().share();
        let via = Registered::new(&*self.bus, &buf, Access::RW).unwrap();
        let (_, rest) = buf.into_part().split_at(13).unwrap();
        (rest.split_at(len).unwrap().0, via)
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; FAR_LEN as usize];
        self.pieces(0, bytes.len(), |at, range| self.bus.memory().read(at, &mut bytes[range]).unwrap());
        bytes
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.pieces(0, bytes.len(), |at, range| self.bus.memory().write(at, &bytes[range]).unwrap());
    }
}

#[test]
fn queues() {
    for workers in [Workers::Inline, Workers::One, Workers::PerChannel] {
        for (fragmentation, virtually) in [(0.0, false), (1.0, true)] {
            let mut bench = Bench::<Arm64S1_4k>::new(fragmentation, workers, virtually);
            conformance_queue::suite(&mut bench);
            assert_eq!((bench.card.quarantined(), bench.bus.host().stats().pinned_frames), (0, 4), "only the rings");
        }
    }
}
