//! Buffers filled by any job are what the slow version makes of it, whatever order the reads end in.

mod script;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, Heap, MemfdHeap, PageKind, Pool};
use dmalane_file::FileOptions;
use dmalane_load::fill::{BufferMemory, Event, Extent, FillError, FillOptions, Job, Sink, fill};
use dmalane_load::{Difference, Manifest, Problem, Read, ReadOptions, open_file};
use dmalane_queue::{Capabilities, Completion, Limits, Operation, Queue, Refused, Ticket, Work};
use script::{Random, Script, naive, noise, random_job};
use sha2::{Digest, Sha256};
use twox_hash::XxHash3_64;

#[test]
fn any_job_gives_what_the_slow_version_gives() {
    let sources: Vec<_> = (0..3).map(|i| noise(i, 50_000)).collect();
    let heaps: &[&dyn Heap] = &[
        &AnonHeap::starting_at(PageKind::Base),
        &MemfdHeap::starting_at(PageKind::Base),
        &Pool::new(AnonHeap::new(), 1 << 20),
        &Pool::new(MemfdHeap::starting_at(PageKind::Base), 1 << 20),
    ];
    let mut recycled = 0;
    for seed in 0..600 {
        let mut random = Random(seed);
        let job = random_job(&mut random, 3, 50_000);
        let capacity = 1 + random.below(6) as usize;
        let mut workers: Vec<Vec<Script>> = (0..=random.below(3))
            .map(|worker| sources.iter().map(|s| Script::new(s.clone(), capacity, seed ^ worker, Vec::new())).collect())
            .collect();
        let options = FillOptions {
            chunk: random.below(40_000),
            block: random.below(20_000),
            checksum: seed % 2 == 0,
            ..FillOptions::default()
        };
        let heap = heaps[seed as usize % heaps.len()];
        let (mut arrived, mut allocated) = (0, 0);
        let mut missing: Vec<u64> = job.extents.iter().map(|e| e.len).collect();
        let mut watch = |event: Event| {
            match event {
                Event::Arrived { buffer, offset, len } => {
                    arrived += len;
                    let whole = |e: &Extent| e.buffer == buffer && e.to <= offset && offset + len <= e.to + e.len;
                    missing[job.extents.iter().position(whole).unwrap()] -= len;
                }
                Event::Allocated { len, .. } => allocated += len,
                _ => {}
            }
            ControlFlow::Continue(())
        };
        let memory = BufferMemory { direct: random.below(4) > 0, ..BufferMemory::of(heap) };
        let filled = fill(Sink::Memory(memory), &job, &mut workers, &options, &mut watch).unwrap();
        assert_eq!(arrived, job.bytes());
        assert!(missing.iter().all(|bytes| *bytes == 0), "every extent has arrived");
        recycled += usize::from(filled.report.recycled);
        assert_eq!(allocated, filled.buffers.iter().map(|b| b.shared().len() as u64).sum::<u64>());
        let expected = naive(&job, &sources);
        assert_eq!(filled.buffers.len(), expected.len());
        for (buf, want) in filled.buffers.into_iter().zip(expected) {
            assert_eq!(buf.len(), want.len());
            assert_eq!(buf.checksum(), options.checksum.then(|| XxHash3_64::oneshot(&want)), "seed {seed}");
            let cpu = buf.into_shared().into_cpu().unwrap();
            assert!(cpu[..want.len()] == want, "seed {seed}");
            assert!(cpu[want.len()..].iter().all(|b| *b == 0), "what follows is zero");
        }
        assert_eq!(heap.stats().live, 0);
    }
    assert!(recycled > 100, "{recycled} of 300");
}

/// A queue that notes how far into its memory the furthest read goes.
struct Furthest(Script, Arc<AtomicUsize>);

impl Queue for Furthest {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        if let Work::Copy { host, .. } = &operation.work {
            self.1.fetch_max(host.slice.offset() + host.slice.len(), Ordering::Relaxed);
        }
        self.0.submit(operation)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        self.0.poll(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        self.0.wait(done, timeout)
    }
}

/// A queue whose reads end once another one has been asked for some.
struct Follows(Script, Option<Arc<AtomicUsize>>, Arc<AtomicUsize>);

impl Queue for Follows {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        let ticket = self.0.submit(operation)?;
        self.2.fetch_add(1, Ordering::Relaxed);
        Ok(ticket)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        self.wait(done, Duration::ZERO)
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        if self.1.as_ref().is_some_and(|other| other.load(Ordering::Relaxed) == 0) {
            std::thread::sleep(timeout.min(Duration::from_millis(1)));
            return 0;
        }
        self.0.wait(done, timeout)
    }
}

#[test]
fn a_full_queue_keeps_no_other_waiting() {
    let sources = [noise(1, 4 << 12), noise(2, 4 << 12)];
    let [first, second] = [0, 1].map(|_| Arc::new(AtomicUsize::new(0)));
    let queue = |i: usize, capacity| Script::new(sources[i].clone(), capacity, 1, Vec::new());
    let slow = Follows(queue(0, 1), Some(second.clone()), first);
    let mut workers = vec![vec![slow, Follows(queue(1, 4), None, second)]];
    let at = |n: u64| (FileOffset::new(n << 12), n << 12);
    let extents = (0..8).map(|n| {
        let (at, to) = at(n % 4);
        Extent { source: n as usize / 4, at, len: 1 << 12, buffer: n as usize / 4, to }
    });
    let job = Job { extents: extents.collect(), buffers: vec![4 << 12; 2] };
    let options = FillOptions {
        chunk: 1 << 15,
        block: 1 << 12,
        depth: Some(8),
        time_limit: Some(Duration::from_secs(60)),
        ..FillOptions::default()
    };
    let heap = AnonHeap::starting_at(PageKind::Base);
    let sink = Sink::Memory(BufferMemory::of(&heap));
    let filled = fill(sink, &job, &mut workers, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    for (buf, want) in filled.buffers.into_iter().zip(naive(&job, &sources)) {
        assert!(buf.into_shared().into_cpu().unwrap()[..] == want);
    }
}

#[test]
fn direct_reads_into_small_pages_behind_a_memfd_land_elsewhere() {
    let source = noise(5, 200_000);
    let job = Job::whole(&[200_000]);
    let memfd = || MemfdHeap::starting_at(PageKind::Base);
    // Memory, whether it is used for the second time, whether reads are direct, and whether they land elsewhere.
    let cases: [(&dyn Heap, bool, bool, bool); 5] = [
        (&memfd(), false, true, true),
        (&Pool::new(memfd(), 1 << 20), true, true, true),
        (&Pool::new(memfd(), 1 << 20), true, false, false),
        (&memfd(), false, false, false),
        (&Pool::new(AnonHeap::new(), 1 << 20), true, true, false),
    ];
    for (i, (heap, again, direct, elsewhere)) in cases.into_iter().enumerate() {
        if again {
            heap.allocate(200_000).unwrap().fill(0xff);
        }
        let furthest = Arc::new(AtomicUsize::new(0));
        let mut workers = [vec![Furthest(Script::new(source.clone(), 3, 1, Vec::new()), furthest.clone())]];
        let options = FillOptions { chunk: 40_960, block: 8192, ..FillOptions::default() };
        let memory = BufferMemory { direct, ..BufferMemory::of(heap) };
        let watch = &mut |_| ControlFlow::Continue(());
        let filled = fill(Sink::Memory(memory), &job, &mut workers, &options, watch).unwrap();
        assert_eq!(filled.report.recycled, again, "case {i}");
        let cpu = filled.buffers.into_iter().next().unwrap().into_shared().into_cpu().unwrap();
        assert!(cpu[..200_000] == **source && cpu[200_000..].iter().all(|b| *b == 0), "case {i}");
        let expected = if elsewhere { 40_960 } else { 200_000 };
        assert_eq!(furthest.load(Ordering::Relaxed), expected, "case {i}");
    }
}

#[test]
fn jobs_that_contradict_themselves() {
    let source = noise(1, 10_000);
    let extent = |at, len, to| Extent { source: 0, at: FileOffset::new(at), len, buffer: 0, to };
    let run = |job: &Job| {
        let mut workers = [vec![Script::new(source.clone(), 2, 1, Vec::new())]];
        let heap = AnonHeap::new();
        fill(Sink::Memory(BufferMemory::of(&heap)), job, &mut workers, &FillOptions::default(), &mut |_| {
            ControlFlow::Continue(())
        })
        .map(|_| ())
    };
    let bad = |extents: Vec<Extent>| match run(&Job { buffers: vec![8192], extents }) {
        Err(FillError::Job(bad)) => bad,
        other => panic!("{other:?}"),
    };
    let outside = |n| format!("extent {n} does not lie within its buffer and the valid file offsets");
    assert_eq!(bad(vec![Extent { source: 1, ..extent(0, 1, 0) }]), "extent 0 is of source 1, and there are 1");
    assert_eq!(bad(vec![Extent { buffer: 1, ..extent(0, 1, 0) }]), outside(0));
    assert_eq!(bad(vec![extent(0, 8193, 0)]), outside(0));
    assert_eq!(bad(vec![extent(0, 1, 0), extent(0, u64::MAX, 1)]), outside(1));
    assert_eq!(bad(vec![extent(u64::MAX, 1, 0)]), outside(0));
    assert_eq!(bad(vec![extent(i64::MAX as u64, 1, 0)]), outside(0));
    assert_eq!(bad(vec![extent(0, 10, 100), extent(0, 11, 90)]), "extents overlap at byte 100 of buffer 0");
    let huge = run(&Job { buffers: vec![u64::MAX], extents: Vec::new() });
    assert!(matches!(huge, Err(FillError::Job(text)) if text.contains("does not fit the address space")));
    let huge = run(&Job { buffers: vec![1 << 60], extents: Vec::new() });
    assert!(matches!(huge, Err(FillError::Memory { buffer: 0, .. })), "{huge:?}");
    run(&Job { buffers: vec![0, 5], extents: vec![extent(9, 0, 0)] }).unwrap();
    run(&Job::default()).unwrap();
}

#[test]
fn stopped_by_the_watch_and_by_the_clock() {
    let source = noise(2, 200_000);
    for workers in 1..3 {
        let heap = AnonHeap::starting_at(PageKind::Base);
        let channels = || vec![Script::new(source.clone(), 2, 7, Vec::new())];
        let options = FillOptions { chunk: 8192, block: 4096, ..FillOptions::default() };
        let job = Job::whole(&[200_000]);
        let mut seen = 0;
        let mut workers: Vec<_> = (0..workers).map(|_| channels()).collect();
        let stopped = fill(Sink::Memory(BufferMemory::of(&heap)), &job, &mut workers, &options, &mut |event| {
            if let Event::Arrived { len, .. } = event {
                seen += len;
            }
            if seen > 50_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let Err(FillError::Cancelled { done, of }) = stopped else { panic!("{stopped:?}") };
        assert!(of == 200_000 && done > 50_000 && done < 200_000);
        assert_eq!(heap.stats().live, 0);
        let past = FillOptions { time_limit: Some(Duration::ZERO), ..options };
        let late =
            fill(Sink::Memory(BufferMemory::of(&heap)), &job, &mut workers, &past, &mut |_| ControlFlow::Continue(()));
        assert!(matches!(late, Err(FillError::Deadline { of: 200_000, .. })), "{late:?}");
        assert_eq!(heap.stats().live, 0);
    }
}

/// Large files are hashed by several threads at once, through staging memory and into memory that stays.
#[test]
fn regions_of_a_large_file_have_the_hashes_of_their_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.safetensors");
    let lens = [9_000_001, 20 << 20, 17, 0, 16 << 20, 30_000_007, 1, 17_000_000, 3];
    let mut at = 0;
    let mut header = serde_json::Map::new();
    for (i, len) in lens.iter().enumerate() {
        let tensor = serde_json::json!({"dtype": "U8", "shape": [len], "data_offsets": [at, at + len]});
        header.insert(format!("t{i}"), tensor);
        at += len;
    }
    let text = serde_json::to_vec(&header).unwrap();
    let bytes = [&(text.len() as u64).to_le_bytes()[..], &text, &noise(1, at)].concat();
    std::fs::write(&path, &bytes).unwrap();
    let go_on = &mut |_| ControlFlow::Continue(());
    let open = || [open_file(&path, FileOptions::default()).unwrap()];
    let manifest = Manifest::of(&mut open(), true, go_on).unwrap();
    let regions = &manifest.files[0].regions;
    assert_eq!(regions.len(), lens.len() + 1, "the header, and each tensor");
    for region in regions {
        let part = &bytes[region.start as usize..region.end as usize];
        let right: [u8; 32] = Sha256::digest(part).into();
        assert_eq!((region.digest.xxh3, region.digest.sha256.as_deref()), (XxHash3_64::oneshot(part), Some(&right)));
    }
    let read = |checksum| {
        let mut options = ReadOptions::default();
        options.fill.checksum = checksum;
        Read::files([&path]).options(options).manifest(&manifest).into_memory(&AnonHeap::new())
    };
    for checksum in [true, false] {
        let [buffer] = &read(checksum).unwrap().filled.buffers[..] else { panic!("one buffer") };
        assert_eq!(buffer.checksum(), checksum.then(|| XxHash3_64::oneshot(&bytes)));
        let mut read = vec![0; bytes.len()];
        buffer.as_volatile_slice().read(&mut read);
        assert!(read == bytes);
    }
    let hit = regions.iter().rfind(|region| region.end - region.start > 1 << 20).unwrap();
    let mut damaged = bytes;
    damaged[hit.end as usize - 1] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let (part, start, end) = (hit.part.clone(), hit.start, hit.end);
    let difference =
        Difference { file: "large.safetensors".to_owned(), problem: Problem::Changed { part, start, end } };
    assert_eq!(manifest.verify(&mut open(), true, go_on).unwrap(), [difference]);
    assert!([true, false].into_iter().all(|checksum| read(checksum).is_err()));
}
