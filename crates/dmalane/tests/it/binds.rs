//! Binds on the software card: fences that transfers and bind queues share, and a load that is recorded and replayed.

use std::fs::File;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane::addr::{Access, Address, CardAddr, DeviceVa, SgIndex, SgTable, Span, Timeline};
use dmalane::card::Card;
use dmalane::dma::{AnonHeap, BufferSlice, Heap};
use dmalane::iopt::{FormatId, X86_64_4Level};
use dmalane::load::{Placement, write_sample};
use dmalane::queue::{Completion, DeviceAddr, Direction, OpError, Operation, Queue, Registered};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};
use dmalane::vm::trace::{Lines, Recorder, Replay, TraceHeader};
use dmalane::vm::{AnyVm, BindQueue, BindRequest, Bo, Mapped, QueueError, Submission, Vm};
use dmalane::{FileOptions, open_file};

const MIB: u64 = 1 << 20;

/// A registered buffer with the same byte everywhere.
fn buffer(bus: &SoftBus, len: usize, fill: u8) -> (BufferSlice, Registered) {
    let mut buf = AnonHeap::new().allocate(len).unwrap();
    buf.fill(fill);
    let buf = buf.share();
    let via = Registered::new(bus, &buf, Access::RW).unwrap();
    (buf.into_slice(), via)
}

fn transfer(part: BufferSlice, direction: Direction, at: DeviceAddr, via: &Registered) -> Operation {
    Operation::copy(direction, (part, via.clone()), at)
}

fn wait(channel: &mut impl Queue<Addr = DeviceAddr>) -> Vec<Completion> {
    let mut done = Vec::new();
    while channel.in_flight() > 0 {
        channel.wait(&mut done, Duration::from_secs(10));
    }
    done
}

#[test]
fn a_transfer_gates_a_bind_and_a_bind_gates_a_transfer() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let bus = Arc::new(SoftBus::new(host, CardConfig::default()).unwrap());
    let card = Card::open(bus.clone(), &AnonHeap::new()).unwrap();
    let ddr = card.layout().ddr;
    let range = Span::new(DeviceVa::new(4 << 30), 1 << 40).unwrap();
    let tables = card.tables(ddr.sub(ddr.len() - MIB, MIB).unwrap()).unwrap();
    let mut vm = Vm::<X86_64_4Level, _>::new(range, tables).unwrap();
    card.set_mmu_root(vm.page_table().root()).unwrap();
    let mut channel = card.queue(0).unwrap();
    let mut queue = BindQueue::new(0, 16);
    let (copied, bound) = (Timeline::new(), Timeline::new());
    let area = ddr.sub(0, 4 * MIB).unwrap();
    let mut sg = SgTable::new();
    sg.push(area.first(), area.len()).unwrap();
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&sg).unwrap()));
    let va = DeviceVa::new(vm.range().first().bits() + 64 * MIB);
    let bind = |offset| BindRequest::Bind { va, bo: bo.clone(), offset, len: MIB, access: Access::RW };
    let mut ended = Vec::new();

    for (step, fill) in [(1, 0x11), (2, 0x22)] {
        let offset = (step - 1) * MIB;
        let (up, via) = buffer(&bus, MIB as usize, fill);
        let to = DeviceAddr::Card(area.first().checked_add(offset).unwrap());
        let batch = Submission {
            requests: vec![bind(offset)],
            wait: vec![copied.fence(step)],
            signal: vec![bound.signaller(step)],
        };
        let ticket = queue.submit(batch).unwrap();
        let moved = copied.signaller(step);
        let _ = channel.submit(transfer(up, Direction::FromHost, to, &via)).unwrap();
        queue.poll(&mut vm, &mut ended);
        assert!(ended.is_empty() && queue.to_invalidate().is_none(), "the bytes are not there yet");
        assert!(wait(&mut channel).iter().all(|c| c.result.is_ok()));
        moved.signal();
        queue.poll(&mut vm, &mut ended);
        if step == 2 {
            // The first binding was replaced: its fence waits for the card to forget it.
            assert!(ended.is_empty() && !bound.fence(2).is_signalled());
            assert_eq!(queue.to_invalidate().unwrap().unmapped_bytes(), MIB);
            card.invalidate_mmu().unwrap();
            ended.extend(queue.invalidated(&mut vm));
        }
        let end = ended.pop().unwrap();
        assert!(end.ticket == ticket && end.result.is_ok() && bound.fence(step).is_signalled());

        // The card's MMU sees the bindings.
        let (down, via) = buffer(&bus, MIB as usize, 0);
        let _ = channel.submit(transfer(down, Direction::ToHost, DeviceAddr::Va(va), &via)).unwrap();
        let [done] = wait(&mut channel).try_into().unwrap_or_else(|_| panic!("one operation"));
        done.result.unwrap();
        let mut bytes = vec![0; MIB as usize];
        done.operation.into_slice().unwrap().as_volatile_slice().read(&mut bytes);
        assert!(bytes.iter().all(|b| *b == fill), "step {step}");
    }

    // A transfer that fails takes the bind with it that relied on it.
    let (up, via) = buffer(&bus, 4096, 1);
    let nowhere = DeviceAddr::Card(CardAddr::new(1 << 60));
    let mut batch = Submission { requests: vec![bind(3 * MIB)], ..Submission::default() };
    batch.wait.push(copied.fence(3));
    batch.signal.push(bound.signaller(3));
    let _ = queue.submit(batch).unwrap();
    let moved = copied.signaller(3);
    let _ = channel.submit(transfer(up, Direction::FromHost, nowhere, &via)).unwrap();
    let done = wait(&mut channel);
    assert!(matches!(done[0].result, Err(OpError::NoCardMemory(_))), "{:?}", done[0].result);
    drop(moved);
    queue.poll(&mut vm, &mut ended);
    assert_eq!(ended[0].result, Err(QueueError::Fence));
    assert!(bound.fence(3).has_failed() && !bound.fence(2).has_failed());
    assert_eq!(vm.bindings().next().unwrap().offset(), MIB, "what was bound before still is");
}

fn mapping(vm: &dyn AnyVm) -> Vec<Mapped> {
    let mut all = Vec::new();
    vm.mapping(vm.range(), &mut |run| {
        all.push(run);
        ControlFlow::Continue(())
    });
    all
}

#[test]
fn a_recorded_load_replays_to_the_same_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a.safetensors", "b.safetensors"].map(|name| folder.path().join(name));
    for (path, size) in paths.iter().zip([9 * MIB + 123, 3 * MIB]) {
        write_sample(&mut File::create(path).unwrap(), size, size).unwrap();
    }
    for placement in [Placement::DDR, Placement::HBM] {
        let mut device = dmalane::open("soft").unwrap();
        let space = device.address_space();
        let header = TraceHeader { range: Some(space.vm().unwrap().range()), ..TraceHeader::default() };
        let recorder = Arc::new(Mutex::new(Some(Recorder::new(Vec::new(), &header).unwrap())));
        let shared = recorder.clone();
        let observes = space.observe(Box::new(move |requests| {
            shared.lock().unwrap().as_mut().unwrap().record(requests).unwrap();
        }));
        assert!(observes);
        let mut inputs = paths.each_ref().map(|path| open_file(path, FileOptions::default()).unwrap());
        let mut loaded = device.load(&mut inputs, &placement, &mut |_| {}).unwrap();
        // One is unloaded again: that is in the trace too.
        let first = loaded.files.remove(0);
        device.unload_file(first).unwrap();

        let text = recorder.lock().unwrap().take().unwrap().finish().unwrap();
        let mut lines = Lines::new(text.as_slice());
        let header = TraceHeader::read(&mut lines).unwrap();
        let mut replay = Replay::new(header.vm(FormatId::x86_64_4level).unwrap());
        while let Some(line) = lines.next().unwrap() {
            assert_eq!(replay.step(line).unwrap().name(), "ok");
        }
        let card = mapping(device.address_space().vm().unwrap());
        assert!(!card.is_empty());
        assert_eq!(mapping(replay.vm()), card);
        let span: Span<DeviceVa> = loaded.files[0].ranges[0];
        assert!(card.iter().all(|run| span.covers(&run.span)), "only the second file is bound");
    }
}
