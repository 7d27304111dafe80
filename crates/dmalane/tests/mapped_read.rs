//! Reading with every chunk mapped for a device as soon as it is allocated, and with faults at every step of that.

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicUsize, Ordering};

use dmalane::addr::{Access, FileOffset};
use dmalane::dma::{AnonHeap, BufferRef, DeviceMem, Error, Heap, HeldMem, Mapping, Pinned, Registrar};
use dmalane::load::Error as LoadError;
use dmalane::load::Stage;
use dmalane::load::fill::{Event, Extent, FillError, FillOptions, Job};
use dmalane::sim::{HostConfig, SoftHost};
use dmalane::{OpenFile, Read, ReadFiles, ReadOptions};
use tempfile::NamedTempFile;

const LEN: usize = 3_000_001;
const CHUNK: u64 = 256 << 10;

fn file(seed: u64) -> (NamedTempFile, Vec<u8>) {
    let data: Vec<u8> = (0..LEN as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let file = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), &data).unwrap();
    file.as_file().sync_all().unwrap();
    let _ = rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed);
    (file, data)
}

fn options(threads: usize) -> ReadOptions {
    let fill = FillOptions { chunk: CHUNK, block: 64 << 10, depth: Some(4), checksum: true, ..FillOptions::default() };
    ReadOptions { threads: Some(threads), fill, ..ReadOptions::default() }
}

/// A host that refuses its n-th call of `pin_range` and `map_list`, counted together.
struct Failing {
    host: SoftHost,
    calls: AtomicUsize,
    fail: usize,
}

impl Failing {
    fn new(fail: usize) -> Self {
        Self { host: SoftHost::new(HostConfig::default()).unwrap(), calls: AtomicUsize::new(0), fail }
    }

    fn call(&self) -> Result<(), Error> {
        let n = self.calls.fetch_add(1, Ordering::Relaxed);
        if n == self.fail { Err(Error::OutOfFrames { wanted: 1, limit: n as u64 }) } else { Ok(()) }
    }

    fn pinned(&self) -> u64 {
        self.host.stats().pinned_frames
    }
}

impl Registrar for Failing {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        self.call()?;
        self.host.pin_range(buffer, range)
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        self.call()?;
        self.host.map_list(pinned, access)
    }

    fn pin_limit(&self) -> Option<u64> {
        self.host.pin_limit()
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.host.owns(mapping)
    }
}

fn read(
    registrar: &Failing,
    heap: &AnonHeap,
    paths: &[&NamedTempFile],
    access: Access,
    threads: usize,
) -> Result<ReadFiles, LoadError> {
    let paths = paths.iter().map(|file| file.path());
    Read::files(paths).options(options(threads)).mapped(registrar, access).into_memory(heap)
}

#[test]
fn the_device_sees_every_chunk() {
    let ((a, a_bytes), (b, b_bytes)) = (file(1), file(2));
    for (access, threads) in [(Access::READ, 1), (Access::RW, 1), (Access::READ, 3)] {
        let (registrar, heap) = (Failing::new(usize::MAX), AnonHeap::new());
        let read = read(&registrar, &heap, &[&a, &b], access, threads).unwrap();
        let mut device = registrar.host.port();
        for ((chunks, data), buffer) in read.filled.mappings.iter().zip([&a_bytes, &b_bytes]).zip(&read.filled.buffers)
        {
            assert!(chunks.len() > LEN / CHUNK as usize, "one for each chunk");
            let mut seen = Vec::new();
            for mapping in chunks.iter().map(|chunk| chunk.mapping()) {
                let mut bytes = vec![0; mapping.span().len() as usize];
                device.hold().read_bytes(mapping.span().first(), &mut bytes).unwrap();
                seen.extend(bytes);
            }
            assert_eq!(seen.len(), buffer.shared().len(), "all of the buffer, once");
            assert!(seen[..LEN] == data[..] && seen[LEN..].iter().all(|b| *b == 0));
            assert_eq!(buffer.checksum(), Some(twox_hash::XxHash3_64::oneshot(data)));
        }
        let bytes: u64 = read.filled.buffers.iter().map(|b| b.shared().len() as u64).sum();
        for stage in [Stage::Register, Stage::Map] {
            let reported = read.filled.report.stages.iter().find(|s| s.stage == stage).unwrap();
            assert!(reported.bytes == bytes && !reported.busy.is_zero());
        }
        assert_eq!(registrar.pinned() * 4096, bytes);
        drop(read);
        assert_eq!((registrar.pinned(), heap.stats().live), (0, 0));
    }
}

#[test]
fn it_is_mapped_before_it_is_announced_and_while_the_rest_is_read() {
    let (a, _) = file(3);
    let (registrar, heap) = (Failing::new(usize::MAX), AnonHeap::new());
    let half = LEN as u64 / 2;
    let extent = |at, len| Extent { source: 0, at: FileOffset::new(at), len, buffer: 0, to: at };
    let job = Job { buffers: vec![LEN as u64], extents: vec![extent(0, half), extent(half, LEN as u64 - half)] };
    let (mut order, mut first_arrival, mut last_mapped) = (Vec::new(), 0, 0);
    let mut watch = |event: Event| {
        match event {
            Event::Allocated { offset, len, .. } => {
                assert!(registrar.pinned() * 4096 >= offset + len, "pinned when it is told of");
                last_mapped = offset;
            }
            Event::Arrived { .. } if first_arrival == 0 => first_arrival = registrar.pinned() * 4096,
            Event::Complete { extent } => order.push(extent),
            _ => {}
        }
        ControlFlow::Continue(())
    };
    let read = Read::files([a.path()]).job(job).options(options(1)).mapped(&registrar, Access::READ);
    drop(read.watch(&mut watch).into_memory(&heap).unwrap());
    assert_eq!(order, [0, 1], "the first half is ready first");
    assert!(first_arrival < LEN as u64, "bytes had arrived before the last chunk was mapped");
    assert!(last_mapped > half);
}

#[test]
fn a_refusal_at_any_step_undoes_everything() {
    let (a, _) = file(4);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for threads in [1, 3] {
        // Twelve chunks or a little more, two calls for each.
        for fail in 0..24 {
            let (registrar, heap) = (Failing::new(fail), AnonHeap::new());
            let error = read(&registrar, &heap, &[&a], Access::RW, threads).unwrap_err();
            let LoadError::Fill(FillError::Map { buffer: 0, offset, source: Error::OutOfFrames { limit, .. } }) = error
            else {
                panic!("{error}");
            };
            assert!(limit == fail as u64 && offset <= LEN as u64 && offset.is_multiple_of(4096));
            assert_eq!((registrar.pinned(), heap.stats().live), (0, 0), "call {fail}");
        }
    }
    // Other tests of this process open files too, so only a leak at each of the 48 would be seen.
    assert!(descriptors() < 48);
}

#[test]
fn what_can_never_be_pinned_is_not_read() {
    let (a, _) = file(5);
    let (registrar, heap) = (Failing::new(usize::MAX), AnonHeap::new());
    registrar.host.set_pin_limit(1 << 20);
    let error = read(&registrar, &heap, &[&a], Access::READ, 1).unwrap_err();
    assert!(error.to_string().contains("ulimit -l"), "{error}");
    assert_eq!((registrar.calls.load(Ordering::Relaxed), heap.stats().buffers), (0, 0));
    // An error of the file comes as it is, and whatever was mapped goes.
    registrar.host.set_pin_limit(u64::MAX);
    let sources = vec![OpenFile::open(a.path()).unwrap()];
    let cancel = |event: Event| match event {
        Event::Arrived { .. } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let read = Read::sources(sources).options(options(1)).mapped(&registrar, Access::READ);
    let error = read.watch(cancel).into_memory(&heap).unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
    assert_eq!((registrar.pinned(), heap.stats().live), (0, 0));
}
