//! A thousand scripted faults: exactly the right error each time, and nothing leaked. Alone in its process, since it
//! counts what the process has.

mod script;

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, Heap, MemfdHeap, PageKind, Pool};
use dmalane_load::fill::{BufferMemory, Extent, FillError, FillOptions, Job, Sink, fill};
use dmalane_queue::OpError;
use script::{Fault, HELD, Random, Script, kib, noise};

const SOURCE: u64 = 300_000;

/// Descriptors, mappings, and KiB of locked memory of this process.
fn held() -> (usize, usize, u64) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memfds = maps.lines().filter(|l| l.contains("memfd:")).count();
    (fds, memfds, kib("VmLck"))
}

fn round(seed: u64, sources: &[std::sync::Arc<Vec<u8>>], heap: &dyn Heap) {
    let mut random = Random(seed);
    // Every byte of every source once, so that every fault is met.
    let mut job = Job::default();
    for source in 0..sources.len() {
        let shift = random.below(5000);
        job.buffers.push(SOURCE + shift);
        let cut = random.below(SOURCE);
        let extent = |at, len| Extent { source, at: FileOffset::new(at), len, buffer: source, to: at + shift };
        job.extents.extend([extent(cut, SOURCE - cut), extent(0, cut)]);
    }
    let faulty = random.below(sources.len() as u64) as usize;
    let place = random.below(SOURCE);
    let fault = match seed % 4 {
        0 => Fault::End,
        1 => Fault::Dead,
        _ => Fault::Errno([5, 6, 12, 61, 110, 116][random.below(6) as usize]),
    };
    let workers = 1 + random.below(2);
    let capacity = 1 + random.below(5) as usize;
    let mut workers: Vec<Vec<Script>> = (0..workers)
        .map(|worker| {
            let faults = |i| if i == faulty { vec![(place, fault.clone())] } else { Vec::new() };
            let channel = |(i, s): (usize, &std::sync::Arc<Vec<u8>>)| {
                Script::new(s.clone(), capacity, seed ^ worker ^ i as u64, faults(i))
            };
            sources.iter().enumerate().map(channel).collect()
        })
        .collect();
    let options = FillOptions {
        chunk: 4096 + random.below(100_000),
        block: 4096 + random.below(60_000),
        checksum: seed.is_multiple_of(3),
        ..FillOptions::default()
    };
    let failed =
        fill(Sink::Memory(BufferMemory::of(heap)), &job, &mut workers, &options, &mut |_| ControlFlow::Continue(()))
            .unwrap_err();
    let FillError::Read { source_index, at, error } = &failed else { panic!("seed {seed}: {failed:?}") };
    assert_eq!(*source_index, faulty, "seed {seed}");
    assert!(at.bits() <= place, "the read began before it failed");
    match (&fault, error) {
        (Fault::Errno(want), OpError::Io { at, errno }) => assert_eq!((at.bits(), errno), (place, want)),
        (Fault::End, OpError::EndOfFile { at, missing }) => assert!(at.bits() == place && *missing > 0),
        (Fault::Dead, OpError::Stopped(reason)) => assert_eq!(reason.to_string(), "by script"),
        other => panic!("seed {seed}: {other:?}"),
    }
    assert_eq!(HELD.load(Ordering::Relaxed), 0, "seed {seed}: everything in flight was waited for");
    assert_eq!(heap.stats().live, 0, "seed {seed}");
}

#[test]
fn a_thousand_faults() {
    let sources: Vec<_> = (0..2).map(|i| noise(i, SOURCE as usize)).collect();
    let pool = Pool::new(MemfdHeap::starting_at(PageKind::Base), 2 << 20);
    let heaps: &[&dyn Heap] = &[&AnonHeap::starting_at(PageKind::Base), &MemfdHeap::starting_at(PageKind::Base), &pool];
    // Things that are made once, such as the allocator's arenas and thread stacks, are made now.
    (0..30).for_each(|seed| round(seed, &sources, heaps[seed as usize % heaps.len()]));
    pool.trim(0);
    let (before, shared, anonymous) = (held(), kib("RssShmem"), kib("RssAnon"));
    (0..1000).for_each(|seed| round(seed, &sources, heaps[seed as usize % heaps.len()]));
    pool.trim(0);
    assert_eq!(held(), before, "descriptors, memfd mappings, locked memory");
    assert_eq!(kib("RssShmem"), shared, "KiB of memfds");
    // One leaked buffer in a thousand rounds would be 300 KB; the allocator keeps a little.
    let after = kib("RssAnon");
    assert!(after < anonymous + 1024, "{anonymous} -> {after} KiB");
}
