//! Binds on the software card: a load that is recorded and replayed.

use std::fs::File;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use dmalane::addr::{DeviceVa, Span};
use dmalane::iopt::FormatId;
use dmalane::load::{Placement, write_sample};
use dmalane::vm::trace::{Lines, Recorder, Replay, TraceHeader};
use dmalane::vm::{AnyVm, Mapped};
use dmalane::{FileOptions, open_file};

const MIB: u64 = 1 << 20;

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
        for outcome in replay.lines(lines) {
            assert_eq!(outcome.unwrap().1.name(), "ok");
        }
        let card = mapping(device.address_space().vm().unwrap());
        assert!(!card.is_empty());
        assert_eq!(mapping(replay.vm()), card);
        let span: Span<DeviceVa> = loaded.files[0].ranges[0];
        assert!(card.iter().all(|run| span.covers(&run.span)), "only the second file is bound");
    }
}
