//! A bind queue as GPU drivers offer it (`DRM_IOCTL_XE_VM_BIND`): batches that wait for a copy, applied in order.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dmalane::addr::{Access, CardAddr, DeviceVa, Segment, Span};
use dmalane::card::{Card, CardTables};
use dmalane::dma::{AnonHeap, Heap};
use dmalane::iopt::X86_64_4Level;
use dmalane::queue::{DeviceAddr, Operation, Registered, run};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};
use dmalane::vm::{BindRequest, Bo, Vm};

const MIB: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

type CardVm = Vm<X86_64_4Level, CardTables<SoftBus>>;

/// Signalled once, by whoever does the work.
#[derive(Clone, Default)]
struct Fence(Arc<AtomicBool>);

impl Fence {
    fn signal(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn is_signalled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Requests that are applied whole, or not at all.
struct Batch {
    requests: Vec<BindRequest>,
    wait: Vec<Fence>,
    done: Fence,
}

/// Applies batches from the head on, until one waits. A batch is over once the device has forgotten what it took away.
fn poll(
    waiting: &mut VecDeque<Batch>,
    vm: &mut CardVm,
    invalidate: impl Fn() -> Result<(), dmalane::card::Error>,
) -> Result<(), Box<dyn Error>> {
    while waiting.front().is_some_and(|batch| batch.wait.iter().all(Fence::is_signalled))
        && let Some(batch) = waiting.pop_front()
    {
        let committed = vm.plan(batch.requests)?.commit();
        if !committed.is_empty() {
            invalidate()?;
        }
        vm.invalidated(committed);
        batch.done.signal();
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let heap = AnonHeap::new();
    let bus = Arc::new(SoftBus::new(SoftHost::new(HostConfig::default())?, CardConfig::default())?);
    let card = Card::open(bus.clone(), &heap)?;
    let ddr = card.layout().ddr;
    let tables = card.tables(ddr.sub(ddr.len() - MIB, MIB).ok_or("a card without room for tables")?)?;
    let range = Span::new(DeviceVa::new(4 << 30), 1 << 40).ok_or("no range")?;
    let mut vm: CardVm = Vm::new(range, tables)?;
    card.set_mmu_root(vm.page_table().root())?;
    let mut channel = card.queue(0)?;

    let (mut waiting, va) = (VecDeque::new(), range.first());
    let memory = Segment { addr: ddr.first(), len: 2 * MIB };
    let bo = Arc::new(Bo::of_segments(1, [memory])?);
    for fill in [0x11, 0x22] {
        // Where the bytes of this round lie; the same addresses show them once they are there.
        let offset = (fill - 0x11) / 0x11 * MIB;
        let (copied, bound) = (Fence::default(), Fence::default());
        let bind = BindRequest::Bind { va, bo: bo.clone(), offset, len: MIB, access: Access::READ };
        waiting.push_back(Batch { requests: vec![bind], wait: vec![copied.clone()], done: bound.clone() });
        poll(&mut waiting, &mut vm, || card.invalidate_mmu())?;
        assert!(!bound.is_signalled(), "the bytes are not there yet");

        let buffer = |fill: u8| -> Result<_, dmalane::dma::Error> {
            let mut buffer = heap.allocate(MIB as usize)?;
            buffer.fill(fill);
            let buffer = buffer.share();
            let via = Registered::new(&*bus, &buffer, Access::RW)?;
            Ok((buffer.into_slice(), via))
        };
        let at = DeviceAddr::Card(CardAddr::new(ddr.first().bits() + offset));
        run(&mut channel, Operation::write(buffer(fill as u8)?, at), TIMEOUT)?;
        copied.signal();
        poll(&mut waiting, &mut vm, || card.invalidate_mmu())?;
        assert!(bound.is_signalled());

        let read = run(&mut channel, Operation::read(buffer(0)?, DeviceAddr::Va(va)), TIMEOUT)?;
        let mut byte = [0];
        read.into_slice().and_then(|slice| slice.read(0, &mut byte)).ok_or("no byte")?;
        assert_eq!(u64::from(byte[0]), fill);
        println!("{va} shows {:#x}", byte[0]);
    }
    Ok(())
}
