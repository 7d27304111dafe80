//! Queues and channels over the daemon take the suites that every queue and every channel takes.

mod daemon;

use std::sync::Arc;
use std::time::Duration;

use daemon::Daemon;
use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Span};
use dmalane_card::{Card, CardChannel, CardQueue, CardTables};
use dmalane_daemon::{Client, Config};
use dmalane_dma::{BufferSlice, Heap, MemfdHeap};
use dmalane_iopt::{PageTable, X86_64_4Level};
use dmalane_queue::{
    Channel, DeviceAddr, DeviceFar, Direction, Operation, Queue, Registered, conformance, conformance_queue,
};

const MIB: u64 = 1 << 20;
const FAR_LEN: u64 = MIB;
/// Device virtual addresses under test; nothing is mapped above `FAR_LEN`.
const VA: DeviceVa = DeviceVa::new(0x12_3456_0000);

type Mmu = PageTable<X86_64_4Level, DeviceVa, CardAddr, CardTables<Client>>;

struct Bench {
    daemon: Daemon,
    client: Client,
    card: Card<Client>,
    heap: MemfdHeap,
    registered: Vec<Registered>,
    /// Where the far end is in card memory, in pieces of equal length.
    pieces: Vec<CardAddr>,
    mmu: Option<Mmu>,
    /// Looks at the far end behind the back of the queue under test.
    back: Option<(CardQueue<Client>, BufferSlice, Registered)>,
}

impl Bench {
    fn new(virtually: bool) -> Self {
        let daemon = Daemon::start(Config::default());
        let client = daemon.connect();
        let heap = MemfdHeap::new();
        let card = Card::open_with_rings(Arc::new(client.clone()), &heap, 32).unwrap();
        let ddr_end = card.layout().ddr.last().bits() + 1;
        let buf = client.buffer(FAR_LEN as usize).unwrap();
        let via = Registered::new(&client, &buf, Access::RW).unwrap();
        let back = Some((card.queue(0).unwrap(), buf.into_part(), via));
        let (pieces, mmu, registered) = (Vec::new(), None, Vec::new());
        let mut this = Self { daemon, client, card, heap, registered, pieces, mmu, back };
        if virtually {
            let tables = this.card.tables(Span::new(this.card.layout().hbm.first(), MIB).unwrap()).unwrap();
            let mut mmu = Mmu::new(tables).unwrap();
            for page in 0..FAR_LEN / 4096 {
                let to = CardAddr::new(ddr_end - (page + 1) * 4096);
                mmu.map(VA.checked_add(page * 4096).unwrap(), to, 4096, Access::RW).unwrap();
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

    fn at(&self, offset: u64) -> DeviceAddr {
        match self.mmu {
            None => DeviceAddr::Card(self.pieces[0].checked_add(offset).unwrap()),
            Some(_) => DeviceAddr::Va(VA.checked_add(offset).unwrap()),
        }
    }

    /// Moves all of the far end, piece by piece.
    fn all(&mut self, direction: Direction) {
        let (mut queue, mut rest, via) = self.back.take().unwrap();
        let size = FAR_LEN as usize / self.pieces.len();
        let (mut ended, mut whole): (Vec<_>, Option<BufferSlice>) = (Vec::new(), None);
        for at in &self.pieces {
            let (part, more) = rest.split_at(size).unwrap();
            rest = more;
            let _ticket = queue.enqueue(Operation::copy(direction, part, via.clone(), DeviceAddr::Card(*at))).unwrap();
            while queue.in_flight() == 32 || (queue.in_flight() > 0 && rest.is_empty()) {
                queue.wait(&mut ended, Duration::from_secs(10));
            }
            for end in ended.drain(..) {
                assert_eq!(end.result, Ok(()));
                let part = end.operation.into_parts().remove(0).part;
                whole = Some(match whole.take() {
                    None => part,
                    Some(whole) => whole.join(part).unwrap(),
                });
            }
        }
        self.back = Some((queue, whole.unwrap(), via));
    }

    fn peek_all(&mut self) -> Vec<u8> {
        self.all(Direction::ToHost);
        let mut bytes = vec![0; FAR_LEN as usize];
        self.back.as_ref().unwrap().1.read(0, &mut bytes).unwrap();
        bytes
    }

    fn poke_all(&mut self, bytes: &[u8]) {
        self.back.as_mut().unwrap().1.write(0, bytes).unwrap();
        self.all(Direction::FromHost);
    }

    /// Ends the client, and counts what is left of it.
    fn end(self) {
        let Self { daemon, client, card, registered, mmu, back, .. } = self;
        assert_eq!(card.quarantined(), 0);
        let report = dmalane_daemon::report(&daemon.path).unwrap();
        let row = report.clients.iter().find(|c| c.client == client.number()).unwrap();
        assert_eq!((row.errors, row.closing), (0, false));
        drop((registered, mmu, back));
        let report = dmalane_daemon::report(&daemon.path).unwrap();
        let row = report.clients.iter().find(|c| c.client == client.number()).unwrap();
        assert_eq!(row.mappings, 4, "only the rings are left");
        drop((card, client));
        daemon.end_empty();
    }
}

impl conformance_queue::Fixture for Bench {
    type Queue = CardQueue<Client>;

    fn queue(&mut self) -> Self::Queue {
        self.card.queue(1).unwrap()
    }

    fn far_len(&self) -> u64 {
        FAR_LEN
    }

    fn far(&self, offset: u64) -> DeviceAddr {
        self.at(offset)
    }

    fn host(&mut self, len: usize) -> (BufferSlice, Registered) {
        // Neither at the start nor at the end of its buffer.
        let buf = self.heap.allocate(len + 30).unwrap().share();
        let via = Registered::new(&self.client, &buf, Access::RW).unwrap();
        let (_, rest) = buf.into_part().split_at(13).unwrap();
        (rest.split_at(len).unwrap().0, via)
    }

    fn peek(&mut self) -> Vec<u8> {
        self.peek_all()
    }

    fn poke(&mut self, bytes: &[u8]) {
        self.poke_all(bytes);
    }
}

#[test]
fn queues() {
    for virtually in [false, true] {
        let mut bench = Bench::new(virtually);
        conformance_queue::suite(&mut bench);
        bench.end();
    }
}

struct Plain(Bench);

impl conformance::Fixture for Plain {
    type Channel = CardChannel<Client>;

    fn channel(&mut self) -> Self::Channel {
        self.0.registered.clear();
        self.0.card.channel(1).unwrap()
    }

    fn far_len(&self) -> u64 {
        FAR_LEN
    }

    fn far(&mut self, offset: u64, part: &BufferSlice) -> <Self::Channel as Channel>::Far {
        let registered = self.0.registered.iter().find(|r| r.iova_of(part).is_some());
        DeviceFar { at: self.0.at(offset), via: registered.expect("a part of a registered buffer").clone() }
    }

    fn part(&mut self, len: usize) -> BufferSlice {
        let buf = self.0.heap.allocate(len).unwrap().share();
        self.0.registered.push(Registered::new(&self.0.client, &buf, Access::RW).unwrap());
        buf.into_part().split_at(len).unwrap().0
    }

    fn forget(&mut self) {
        self.0.registered.clear();
    }

    fn peek(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.0.peek_all()[offset as usize..][..len].to_vec()
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        let mut all = self.0.peek_all();
        all[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        self.0.poke_all(&all);
    }
}

#[test]
fn channels() {
    for virtually in [false, true] {
        let mut bench = Plain(Bench::new(virtually));
        conformance::suite(&mut bench);
        bench.0.end();
    }
}
