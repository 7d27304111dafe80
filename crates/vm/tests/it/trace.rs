//! Traces replayed: hostile ones get errors by name, recorded ones give the same VM.

use std::io::{BufReader, Read};
use std::ops::ControlFlow;
use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, SgIndex, SgTable, Span};
use dmalane_iopt::{AgxUat, FormatId, HeapTables};
use dmalane_vm::trace::{
    Line, Lines, MAX_BATCH, MAX_BOS, MAX_LINE, Recorder, Replay, TraceHeader, TraceOperation, TraceRefusal,
};
use dmalane_vm::{AnyVm, BindRequest, Bo, Mapped, MappedSource, Vm};
use proptest::prelude::*;

const PAGE: u64 = 16 << 10;

fn replay() -> Replay {
    let range = Span::new(DeviceVa::new(PAGE), (1 << 39) - PAGE);
    let reserved = Span::new(DeviceVa::new(1 << 30), 1 << 20);
    let null_page = Some(dmalane_addr::Segment { addr: CardAddr::new(1 << 33), len: PAGE });
    let mut replay = Replay::new(
        TraceHeader { range, reserved, null_page, ..TraceHeader::default() }.vm(FormatId::agx_uat).unwrap(),
    );
    let bo = r#"{"op":"bo","id":1,"segments":[{"pa":"0x100000000","len":"0x40000"}]}"#;
    assert_eq!(step(&mut replay, bo), "ok");
    replay
}

fn step(replay: &mut Replay, line: &str) -> &'static str {
    replay.step(Line::Bytes(line.as_bytes())).map_or("blank", |outcome| outcome.name())
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
fn hostile_lines_get_errors_by_name() {
    let mut replay = replay();
    let bind = r#"{"op":"bind","va":"0x8000","bo":1,"len":"0x4000","access":"rw"}"#;
    assert_eq!(step(&mut replay, bind), "ok");
    let before = mapping(replay.vm());
    let seg = |pa: &str, len: &str| format!(r#"{{"op":"bo","id":2,"segments":[{{"pa":{pa},"len":{len}}}]}}"#);
    let at = |va: &str, offset: &str, len: &str| {
        format!(r#"{{"op":"bind","va":{va},"bo":1,"offset":{offset},"len":{len},"access":"r"}}"#)
    };
    let again = |offset: &str, page: &str, len: &str| {
        format!(r#"{{"op":"repeat","va":"0x8000","bo":1,"offset":{offset},"page":{page},"len":{len},"access":"r"}}"#)
    };
    let table: Vec<(String, &str)> = vec![
        // not operations
        ("{".into(), "bad_line"),
        ("[]".into(), "bad_line"),
        ("null".into(), "bad_line"),
        ("\"bind\"".into(), "bad_line"),
        (r#"["bind",1,2]"#.into(), "bad_line"),
        (r#"{"op":"bind"}{"op":"bind"}"#.into(), "bad_line"),
        (r#"{"op":"frobnicate"}"#.into(), "bad_line"),
        (r#"{"va":0}"#.into(), "bad_line"),
        (r#"{"op":"unbind","op":"unbind","va":0,"len":1}"#.into(), "bad_line"),
        (r#"{"op":"unbind","va":0,"len":1,"size":1}"#.into(), "bad_line"),
        (r#"{"op":"unbind","va":-1,"len":1}"#.into(), "bad_line"),
        (r#"{"op":"unbind","va":1e3,"len":1}"#.into(), "bad_line"),
        (r#"{"op":"unbind","va":"0x10000000000000000","len":1}"#.into(), "bad_line"),
        (r#"{"op":"bind","va":0,"bo":1,"len":1,"access":"rr"}"#.into(), "bad_line"),
        ("[".repeat(100_000), "bad_line"),
        (r#"{"op":"batch","ops":"#.to_owned() + &"[".repeat(100_000), "bad_line"),
        (r#"{"op":"batch","ops":[{"op":"batch","ops":"#.repeat(1000), "bad_line"),
        (r#"{"op":"unbind","va":0}"#.into(), "missing_field"),
        (r#"{"op":"bind","va":0,"bo":1,"len":16384}"#.into(), "missing_field"),
        (r#"{"op":"batch"}"#.into(), "missing_field"),
        (r#"{"op":"unbind","va":0,"len":1,"bo":1}"#.into(), "unexpected_field"),
        (r#"{"op":"batch","ops":[{"op":"destroy","id":1}]}"#.into(), "not_in_batch"),
        (r#"{"op":"batch","ops":[{"op":"batch","ops":[]}]}"#.into(), "not_in_batch"),
        // buffer objects
        (r#"{"op":"bo","id":1,"segments":[]}"#.into(), "duplicate_bo"),
        (r#"{"op":"destroy","id":2}"#.into(), "no_bo"),
        (seg("0", "0"), "bad_segment"),
        (seg("18446744073709551615", "2"), "bad_segment"),
        (seg("1", "18446744073709551615").replace("}]}", "},{\"pa\":0,\"len\":1}]}"), "bad_segment"),
        // binds
        (at("32768", "0", "0"), "empty"),
        (at("\"0xffffffffffffc000\"", "0", "\"0x8000\""), "wraps"),
        (at("32768", "0", "\"0xffffffffffffffff\""), "wraps"),
        (at("0", "0", "16384"), "outside_vm"),
        (at("\"0x8000000000\"", "0", "16384"), "outside_vm"),
        (at("\"0x8000000000000000\"", "0", "16384"), "outside_vm"),
        (at("32768", "\"0x8000000000000000\"", "16384"), "beyond_bo"),
        (at("32768", "\"0xffffffffffffc000\"", "16384"), "beyond_bo"),
        (at("32768", "0", "\"0x44000\""), "beyond_bo"),
        (at("32768", "4096", "16384"), "misaligned_offset"),
        (at("32768", "0", "4096"), "misaligned"),
        (at("36864", "0", "16384"), "misaligned"),
        (at("32768", "0", "16384").replace("\"bo\":1", "\"bo\":7"), "no_bo"),
        (at("\"0x40000000\"", "0", "16384"), "reserved"),
        (at("\"0x3fffc000\"", "0", "\"0x8000\""), "reserved"),
        (r#"{"op":"null","va":"0x8000","len":0}"#.into(), "empty"),
        (r#"{"op":"null","va":"0x8000","len":"0xffffffffffffffff"}"#.into(), "wraps"),
        (r#"{"op":"null","va":"0x8000","len":1}"#.into(), "misaligned"),
        (r#"{"op":"null","va":"0x40000000","len":16384}"#.into(), "reserved"),
        (r#"{"op":"null","va":"0x8000","len":16384,"access":"r"}"#.into(), "unexpected_field"),
        (r#"{"op":"prefetch","va":"0x8000","len":1}"#.into(), "misaligned"),
        (r#"{"op":"prefetch","va":0,"len":16384}"#.into(), "outside_vm"),
        (r#"{"op":"unbind_bo","bo":2}"#.into(), "no_bo"),
        (r#"{"op":"unbind_bo"}"#.into(), "missing_field"),
        (again("0", "0", "16384"), "bad_repeat"),
        (again("0", "4096", "16384"), "bad_repeat"),
        (again("0", "\"0xc000\"", "\"0xc000\""), "bad_repeat"),
        (again("0", "\"0x8000000000000000\"", "16384"), "bad_repeat"),
        (again("0", "\"0x8000\"", "16384"), "bad_repeat"),
        (again("\"0x40000\"", "16384", "16384"), "beyond_bo"),
        (again("\"0xffffffffffffc000\"", "16384", "16384"), "beyond_bo"),
        (again("1", "16384", "16384"), "misaligned_offset"),
        (again("0", "16384", "0"), "empty"),
        (r#"{"op":"unbind","va":16384,"len":0}"#.into(), "empty"),
        (r#"{"op":"unbind","va":16384,"len":"0xffffffffffffffff"}"#.into(), "wraps"),
        (r#"{"op":"unbind","va":16384,"len":1}"#.into(), "misaligned"),
        (r#"{"op":"unbind","va":0,"len":16384}"#.into(), "outside_vm"),
    ];
    for (line, name) in &table {
        let outcome = replay.step(Line::Bytes(line.as_bytes())).unwrap();
        let head: String = line.chars().take(120).collect();
        assert_eq!(outcome.name(), *name, "{head}: {outcome:?}");
        assert!(outcome.result.unwrap_err().errno().number() > 0);
        // As one of a batch, with good ones around it, it takes them with it.
        if *name == "bad_line" || line.contains("\"batch\"") {
            continue;
        }
        let name = if line.contains("\"segments\"") || line.contains("\"destroy\"") { &"not_in_batch" } else { name };
        let unbind = r#"{"op":"unbind","va":"0x8000","len":"0x4000"}"#;
        let batch = format!(r#"{{"op":"batch","ops":[{unbind},{bind},{line},{bind}]}}"#);
        let outcome = replay.step(Line::Bytes(batch.as_bytes())).unwrap();
        assert_eq!((outcome.name(), outcome.index), (*name, Some(2)), "{batch}");
        assert_eq!(mapping(replay.vm()), before, "{batch}");
    }
    assert_eq!(step(&mut replay, "\u{fffd}"), "bad_line");
    assert_eq!(replay.step(Line::Bytes(b"{\"op\":\"\xff\"}")).unwrap().name(), "bad_line");
    assert_eq!(replay.step(Line::TooLong).unwrap().name(), "line_too_long");
    for blank in ["", "  ", "\t"] {
        assert_eq!(step(&mut replay, blank), "blank");
    }
    assert_eq!(mapping(replay.vm()), before);
}

#[test]
fn buffer_objects_over_several_lines_and_after_their_end() {
    let mut replay = replay();
    let bind = |bo: u64| format!(r#"{{"op":"bind","va":"0x10000","bo":{bo},"len":"0xc000","access":"rw"}}"#);
    let first =
        r#"{"op":"bo","id":2,"segments":[{"pa":"0x4000","len":16384},{"pa":"0x8000","len":16384}],"more":true}"#;
    assert_eq!(step(&mut replay, first), "ok");
    assert_eq!(step(&mut replay, &bind(2)), "no_bo", "not whole yet");
    let bad = r#"{"op":"bo","id":2,"segments":[{"pa":0,"len":16384},{"pa":0,"len":0}]}"#;
    assert_eq!(step(&mut replay, bad), "bad_segment");
    assert_eq!(step(&mut replay, r#"{"op":"bo","id":2,"segments":[{"pa":"0x40000","len":16384}]}"#), "ok");
    assert_eq!(step(&mut replay, &bind(2)), "ok");
    assert_eq!(step(&mut replay, r#"{"op":"destroy","id":2}"#), "ok");
    assert_eq!(step(&mut replay, &bind(2)), "no_bo");
    let runs = mapping(replay.vm());
    let from = |offset| MappedSource::Bo { bo: 2, offset };
    let seen: Vec<_> = runs.iter().map(|r| (r.span.first().bits(), r.span.len(), r.to.bits(), r.source)).collect();
    assert_eq!(seen, [(0x10000, 0x8000, 0x4000, from(0)), (0x18000, 0x4000, 0x40000, from(0x8000))]);
    // The id is free again.
    assert_eq!(step(&mut replay, r#"{"op":"bo","id":2,"segments":[]}"#), "ok");
    assert_eq!(step(&mut replay, &bind(2)), "beyond_bo");
}

#[test]
fn a_batch_has_a_most_and_a_line_too() {
    let mut replay = replay();
    let batch = |n: usize| {
        let op = r#"{"op":"unbind","va":16384,"len":16384}"#;
        format!(r#"{{"op":"batch","ops":[{}]}}"#, vec![op; n].join(","))
    };
    assert_eq!(step(&mut replay, &batch(0)), "ok");
    assert_eq!(step(&mut replay, &batch(MAX_BATCH)), "ok");
    let outcome = replay.step(Line::Bytes(batch(MAX_BATCH + 7).as_bytes())).unwrap();
    assert_eq!(outcome.result, Err(TraceRefusal::BatchTooLong { count: MAX_BATCH + 7 }));
    // A million operations in one batch, read as a stream.
    let million = batch(1_000_000);
    assert!(million.len() > MAX_LINE);
    let text = million + "\n" + &batch(2);
    let mut lines = Lines::new(BufReader::new(text.as_bytes()));
    let mut names = Vec::new();
    while let Some(line) = lines.next().unwrap() {
        names.push(replay.step(line).unwrap().name());
    }
    assert_eq!(names, ["line_too_long", "ok"]);
}

#[test]
fn memory_has_a_most() {
    let mut replay = Replay::new(TraceHeader::default().vm(FormatId::x86_64_4level).unwrap());
    for id in 0..MAX_BOS as u64 {
        let bo = TraceOperation::Bo { id, segments: Vec::new(), more: id % 2 == 0 };
        assert_eq!(replay.apply(&bo).name(), "ok");
    }
    let bo = |id| TraceOperation::Bo { id, segments: Vec::new(), more: false };
    assert_eq!(replay.apply(&bo(1 << 40)).name(), "too_many_bos");
    assert_eq!(replay.apply(&bo(0)).name(), "ok", "the rest of one that is there");
    assert_eq!(replay.apply(&TraceOperation::Destroy { id: 0 }).name(), "ok");
    // A buffer whose pages all need leaves of their own: more tables than there may be, and an error before any is
    // made.
    let len = 1 << 42;
    let segment = dmalane_addr::Segment { addr: CardAddr::new(4096), len };
    let huge = TraceOperation::Bo { id: 0, segments: vec![segment], more: false };
    assert_eq!(replay.apply(&huge).name(), "ok");
    let bind = TraceOperation::Bind { va: DeviceVa::new(0), bo: 0, offset: 0, len, access: Access::RW };
    assert_eq!(replay.apply(&bind).name(), "no_tables");
    // One page over all of the VM: not gone through to the end.
    // (Of large leaves, the tables for splitting them count too.)
    for (page, len, name) in [(4096, 1 << 47, "no_tables"), (2 << 20, 1 << 40, "no_tables"), (2 << 20, 1 << 36, "ok")] {
        let (va, offset, access) = (DeviceVa::new(0), (2 << 20) - 4096, Access::RW);
        let repeat = TraceOperation::Repeat { va, bo: 0, offset, page, len, access };
        assert_eq!(replay.apply(&repeat).name(), name);
    }
    assert_eq!(replay.apply(&TraceOperation::UnbindBo { bo: 0 }).name(), "ok");
    assert_eq!((replay.vm().binding_count(), mapping(replay.vm())), (0, vec![]));
}

#[test]
fn reading_stops_at_an_error_of_the_file() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("the disk is gone"))
        }
    }
    let mut lines = Lines::new(BufReader::new(b"a\n".as_slice().chain(Broken)));
    assert!(lines.next().unwrap().is_some() && lines.next().is_err());
}

/// A recorded VM.
type TestVm = Vm<AgxUat, HeapTables<CardAddr>>;

fn buffers() -> [Arc<Bo>; 3] {
    let bo = |id, pages: &[u64]| {
        let mut sg = SgTable::new();
        for page in pages {
            sg.push(CardAddr::new(page * PAGE), PAGE).unwrap();
        }
        Arc::new(Bo::new(id, SgIndex::from_table(&sg).unwrap()))
    };
    let scattered: Vec<_> = (0..64).map(|i| 10_000 + i * 37 % 64 * 2).collect();
    // The last two have the same id.
    [bo(1, &(2048..6144).collect::<Vec<_>>()), bo(2, &scattered), bo(2, &(0..64).collect::<Vec<_>>())]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_recorded_gives_the_same_vm(
        batches in prop::collection::vec(
            prop::collection::vec((0usize..10, 1u64..6000, 0u64..64, 1u64..3000), 0..5), 0..12),
    ) {
        let bos = buffers();
        let range = Span::new(DeviceVa::new(PAGE), (1 << 39) - PAGE).unwrap();
        let mut vm: TestVm = Vm::new(range, HeapTables::new(CardAddr::new(0))).unwrap();
        let null_page = dmalane_addr::Segment { addr: CardAddr::new(1 << 33), len: PAGE };
        vm.set_null_page(null_page.addr, null_page.len).unwrap();
        let (range, null_page) = (Some(range), Some(null_page));
        let header = TraceHeader { format: Some("agx-uat".into()), range, null_page, ..TraceHeader::default() };
        let mut recorder = Recorder::new(Vec::new(), &header).unwrap();
        for batch in batches {
            let requests: Vec<BindRequest> = batch.into_iter().map(|(which, page, offset, pages)| {
                let va = DeviceVa::new(page * PAGE);
                let span = Span::new(va, pages * PAGE).unwrap();
                match which {
                    0..3 => {
                        let len = (pages * PAGE).min(bos[which].len() - offset * PAGE);
                        let access = if offset % 2 == 0 { Access::RW } else { Access::READ };
                        BindRequest::Bind { va, bo: bos[which].clone(), offset: offset * PAGE, len, access }
                    }
                    3..6 => {
                        let page = PAGE << (offset % 3);
                        let (va, len) = (DeviceVa::new(va.bits() & !(page - 1) | page), pages * page);
                        let bo = bos[which - 3].clone();
                        BindRequest::Repeat { va, bo, offset: offset % 32 * PAGE, page, len, access: Access::READ }
                    }
                    6 => BindRequest::Null { va, len: span.len() },
                    7 => BindRequest::UnbindBo(bos[offset as usize % 3].clone()),
                    8 => BindRequest::Prefetch(span),
                    _ => BindRequest::Unbind(span),
                }
            }).collect();
            let committed = vm.plan(requests.clone()).unwrap().commit();
            vm.invalidated(committed);
            recorder.record(&requests).unwrap();
        }
        let text = recorder.finish().unwrap();
        let mut lines = Lines::new(text.as_slice());
        let read = TraceHeader::read(&mut lines).unwrap();
        prop_assert_eq!(&read, &header);
        let mut replay = Replay::new(read.vm(FormatId::agx_uat).unwrap());
        while let Some(line) = lines.next().unwrap() {
            prop_assert_eq!(replay.step(line).unwrap().name(), "ok");
        }
        let mut replayed = mapping(replay.vm());
        // Of two buffers with id 2 the later one has another id in the trace.
        for run in &mut replayed {
            if let MappedSource::Bo { bo, .. } | MappedSource::Repeat { bo, .. } = &mut run.source && *bo == u64::MAX {
                *bo = 2;
            }
        }
        prop_assert_eq!(replayed, mapping(&vm));
    }
}

/// A batch as long as the longest of the posted patch, and of several faults the first.
#[test]
fn long_batches_and_their_first_fault() {
    const BINDS: u64 = 99_999;
    const PAGE: u64 = 16 << 10;
    let mut replay = Replay::new(TraceHeader::default().vm(FormatId::agx_uat).unwrap());
    let segment = dmalane_addr::Segment { addr: CardAddr::new(1 << 32), len: BINDS * PAGE };
    let bo = TraceOperation::Bo { id: 1, segments: vec![segment], more: false };
    assert_eq!(replay.apply(&bo).name(), "ok");
    let bind = |n: u64, bo: u64, offset: u64| TraceOperation::Bind {
        va: DeviceVa::new(n * PAGE),
        bo,
        offset,
        len: PAGE,
        access: Access::RW,
    };
    // Each page one further than where it is: nothing continues anything.
    let batch: Vec<_> = (0..BINDS).map(|n| bind(n, 1, (n * 7919 % BINDS) * PAGE)).collect();
    let recorded = TraceOperation::Batch(batch).line();
    assert!(recorded.len() < MAX_LINE);
    let outcome = replay.step(Line::Bytes(recorded.as_bytes())).unwrap();
    assert_eq!((outcome.name(), replay.vm().binding_count() as u64), ("ok", BINDS));
    for (batch, index, name) in [
        (vec![bind(0, 1, 0), bind(0, 1, 1), bind(0, 9, 0), bind(0, 1, 1 << 60)], 1, "misaligned_offset"),
        (vec![bind(0, 1, 0), bind(0, 9, 0), bind(0, 1, 1)], 1, "no_bo"),
        (vec![bind(0, 1, 0), bind(0, 1, 1 << 60), bind(0, 9, 0)], 1, "beyond_bo"),
    ] {
        let outcome = replay.apply(&TraceOperation::Batch(batch));
        assert_eq!((outcome.name(), outcome.index), (name, Some(index)));
    }
    assert_eq!(replay.vm().binding_count() as u64, BINDS);
}

/// The driver's own batches, and a leaf that heals.
#[test]
fn reserved_batches_and_merges() {
    let mut replay = replay();
    let reserved = |op: &str| format!(r#"{{"op":"reserved","ops":[{op}]}}"#);
    let bind = r#"{"op":"bind","va":"0x40000000","bo":1,"len":"0x8000","access":"rw"}"#;
    assert_eq!(step(&mut replay, bind), "reserved");
    assert_eq!(step(&mut replay, &reserved(bind)), "ok");
    assert_eq!(step(&mut replay, r#"{"op":"unbind_bo","bo":1}"#), "ok");
    assert_eq!(replay.vm().binding_count(), 1, "only the driver takes it away");
    assert_eq!(
        step(&mut replay, &reserved(r#"{"op":"bind","va":"0x8000","bo":1,"len":"0x4000","access":"rw"}"#)),
        "reserved"
    );
    assert_eq!(step(&mut replay, &reserved(r#"{"op":"unbind_bo","bo":1}"#)), "ok");
    assert_eq!(replay.vm().binding_count(), 0);
    assert_eq!(step(&mut replay, &reserved(&reserved(bind))), "not_in_batch");

    let mut replay = Replay::new(TraceHeader::default().vm(FormatId::x86_64_4level).unwrap());
    let lines = [
        r#"{"op":"bo","id":2,"segments":[{"pa":"0x200000000","len":"0x200000"}]}"#,
        r#"{"op":"bind","va":"0x80000000","bo":2,"len":"0x200000","access":"rw"}"#,
        r#"{"op":"unbind","va":"0x80004000","len":"0x4000"}"#,
        r#"{"op":"bind","va":"0x80004000","bo":2,"offset":"0x4000","len":"0x4000","access":"rw"}"#,
    ];
    for line in lines {
        assert_eq!(step(&mut replay, line), "ok", "{line}");
    }
    let leaf = |replay: &Replay| mapping(replay.vm())[0].leaf.bytes();
    assert_eq!(leaf(&replay), 4096);
    assert_eq!(step(&mut replay, r#"{"op":"merge","va":"0x80000000","len":"0x200000"}"#), "ok");
    assert_eq!((leaf(&replay), mapping(replay.vm()).len()), (2 << 20, 1));
    assert_eq!(step(&mut replay, r#"{"op":"merge","va":"0x80000000","len":0}"#), "empty");
    assert_eq!(step(&mut replay, r#"{"op":"merge","va":"0x80000001","len":"0x4000"}"#), "misaligned");
    let merge = TraceOperation::Merge { va: DeviceVa::new(PAGE), len: PAGE };
    for operation in [merge.clone(), TraceOperation::Reserved(Vec::new())] {
        assert_eq!(TraceOperation::parse(Line::Bytes(operation.line().as_bytes())), Ok(operation));
    }
}
