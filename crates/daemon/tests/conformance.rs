//! Queues over the daemon take the suite that every queue takes.

mod daemon;

use std::sync::Arc;
use std::time::Duration;

use daemon::Daemon;
use dmalane_addr::{Access, Address, CardAddr, DeviceVa, Span};
use dmalane_card::{Card, CardQueue, CardTables};
use dmalane_daemon::{Client, Config};
use dmalane_dma::{BufferSlice, Heap, MemfdHeap};
use dmalane_iopt::{PageTable, X86_64_4Level};
use dmalane_queue::{DeviceAddr, Direction, HostSlice, Operation, Queue, Registered, conformance};

const MIB: u64 = 1 << 20;
const TARGET_LEN: u64 = MIB;
/// Device virtual addresses under test; nothing is mapped above `TARGET_LEN`.
const VA: DeviceVa = DeviceVa::new(0x12_3456_0000);

type Mmu = PageTable<X86_64_4Level, DeviceVa, CardAddr, CardTables<Client>>;

struct Bench {
    daemon: Daemon,
    client: Client,
    card: Card<Client>,
    heap: MemfdHeap,
    /// Where the target is in card memory, in fragments of equal length.
    fragments: Vec<CardAddr>,
    mmu: Option<Mmu>,
    /// Reads and writes the target without the queue under test.
    back: Option<(CardQueue<Client>, BufferSlice, Registered)>,
}

impl Bench {
    fn new(virtually: bool) -> Self {
        let daemon = Daemon::start(Config::default());
        let client = daemon.connect();
        let heap = MemfdHeap::new();
        let card = Card::open_with_rings(Arc::new(client.clone()), &heap, 32).unwrap();
        let ddr_end = card.layout().ddr.last().bits() + 1;
        let buf = client.buffer(TARGET_LEN as usize).unwrap();
        let via = Registered::new(&client, &buf, Access::RW).unwrap();
        let back = Some((card.queue(0).unwrap(), buf.into_slice(), via));
        let (fragments, mmu) = (Vec::new(), None);
        let mut this = Self { daemon, client, card, heap, fragments, mmu, back };
        if virtually {
            let tables = this.card.tables(Span::new(this.card.layout().hbm.first(), MIB).unwrap()).unwrap();
            let mut mmu = Mmu::new(tables).unwrap();
            for page in 0..TARGET_LEN / 4096 {
                let to = CardAddr::new(ddr_end - (page + 1) * 4096);
                mmu.map(VA.checked_add(page * 4096).unwrap(), to, 4096, Access::RW).unwrap();
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

    fn target(&self, offset: u64) -> DeviceAddr {
        match self.mmu {
            None => DeviceAddr::Card(self.fragments[0].checked_add(offset).unwrap()),
            Some(_) => DeviceAddr::Va(VA.checked_add(offset).unwrap()),
        }
    }

    /// Moves all of the target, fragment by fragment.
    fn all(&mut self, direction: Direction) {
        let (mut queue, mut rest, via) = self.back.take().unwrap();
        let size = TARGET_LEN as usize / self.fragments.len();
        let (mut ended, mut whole): (Vec<_>, Option<BufferSlice>) = (Vec::new(), None);
        for at in &self.fragments {
            let (part, more) = rest.split_at(size).unwrap();
            rest = more;
            let _ticket = queue.submit(Operation::copy(direction, (part, via.clone()), DeviceAddr::Card(*at))).unwrap();
            while queue.in_flight() == 32 || (queue.in_flight() > 0 && rest.is_empty()) {
                queue.wait(&mut ended, Duration::from_secs(10));
            }
            for end in ended.drain(..) {
                assert_eq!(end.result, Ok(()));
                let part = end.operation.into_slice().unwrap();
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
        let mut bytes = vec![0; TARGET_LEN as usize];
        self.back.as_ref().unwrap().1.read(0, &mut bytes).unwrap();
        bytes
    }

    fn poke_all(&mut self, bytes: &[u8]) {
        self.back.as_mut().unwrap().1.write(0, bytes).unwrap();
        self.all(Direction::FromHost);
    }

    /// Drops the client's objects and checks that the daemon releases them.
    fn end(self) {
        let Self { daemon, client, card, mmu, back, .. } = self;
        assert_eq!(card.quarantined(), 0);
        let report = dmalane_daemon::status(&dmalane_daemon::ClientOptions::new(&daemon.path)).unwrap();
        let row = report.clients.iter().find(|c| c.client == client.number()).unwrap();
        assert_eq!((row.errors, row.closing, row.in_flight), (0, 0, 0));
        drop((mmu, back));
        let report = dmalane_daemon::status(&dmalane_daemon::ClientOptions::new(&daemon.path)).unwrap();
        let row = report.clients.iter().find(|c| c.client == client.number()).unwrap();
        assert_eq!(row.mappings, 4, "only the rings stay mapped");
        drop((card, client));
        daemon.end_empty();
    }
}

impl conformance::Fixture for Bench {
    type Queue = CardQueue<Client>;

    fn queue(&mut self) -> Self::Queue {
        self.card.queue(1).unwrap()
    }

    fn target_len(&self) -> u64 {
        TARGET_LEN
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        self.target(offset)
    }

    fn host(&mut self, len: usize) -> HostSlice {
        // Neither at the start nor at the end of its buffer.
        let buf = self.heap.allocate(len + 30).unwrap().share();
        let via = Registered::new(&self.client, &buf, Access::RW).unwrap();
        let (_, rest) = buf.into_slice().split_at(13).unwrap();
        (rest.split_at(len).unwrap().0, via).into()
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
        conformance::suite(&mut bench);
        bench.end();
    }
}
