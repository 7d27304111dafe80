//! Allocating and reading at once, from real files: every way gives the same bytes.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use dmalane::addr::FileOffset;
use dmalane::dma::{AnonHeap, Heap, MemfdHeap, PageKind, Pool};
use dmalane::file::{Mode, Moved};
use dmalane::load::Error as LoadError;
use dmalane::load::fill::{Event, Extent, FillError, FillOptions, Job};
use dmalane::queue::OpError;
use dmalane::{AllocRead, OpenFile, Read, ReadFiles, ReadOptions, alloc_and_read};
use proptest::prelude::*;
use tempfile::NamedTempFile;

const DISK: &str = env!("CARGO_TARGET_TMPDIR");

fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn file(data: &[u8]) -> NamedTempFile {
    let file = NamedTempFile::new_in(DISK).unwrap();
    std::fs::write(file.path(), data).unwrap();
    file
}

fn forget(file: &NamedTempFile) {
    file.as_file().sync_all().unwrap();
    rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn bytes(read: &AllocRead) -> Vec<u8> {
    let mut bytes = vec![0; read.buffer.len()];
    read.buffer.as_volatile_slice().read(&mut bytes);
    bytes
}

fn small() -> ReadOptions {
    let fill =
        FillOptions { chunk: 256 << 10, block: 64 << 10, depth: Some(4), checksum: true, ..FillOptions::default() };
    ReadOptions { fill, ..ReadOptions::default() }
}

#[test]
fn every_method_gives_the_same_bytes() {
    let heaps: &[&dyn Heap] = &[
        &AnonHeap::new(),
        &AnonHeap::starting_at(PageKind::Base),
        &MemfdHeap::new(),
        &Pool::new(MemfdHeap::starting_at(PageKind::Base), 64 << 20),
    ];
    for len in [1, 65_537, 1 << 20, 2_000_003] {
        let data = noise(len);
        let file = file(&data);
        for (i, heap) in heaps.iter().enumerate() {
            for mode in [Mode::Auto, Mode::Buffered, Mode::Direct] {
                for chunk in [small().fill.chunk, u64::MAX] {
                    for threads in [None, Some(3)] {
                        forget(&file);
                        let mut options = ReadOptions { mode, threads, ..small() };
                        options.fill.chunk = chunk;
                        let opened = File::open(file.path()).unwrap();
                        let read = match alloc_and_read(*heap, &opened, .., &options) {
                            Err(LoadError::Open(e)) if mode == Mode::Direct => {
                                println!("SKIPPED: {e}");
                                continue;
                            }
                            read => read.unwrap(),
                        };
                        assert!(bytes(&read) == data, "{len} {mode:?} {chunk} heap {i}: {}", read.method);
                        assert_eq!(
                            read.method.moved.direct + read.method.moved.buffered,
                            len as u64,
                            "{}",
                            read.method
                        );
                        let hash = read.buffer.checksum().unwrap();
                        assert_eq!(hash, twox_hash::XxHash3_64::oneshot(&data));
                        let memfd = read.buffer.shared().export().map(|fd| fd.try_clone_to_owned().unwrap());
                        assert_eq!(memfd.is_some(), heap.capabilities().shareable);
                        if let Some(memfd) = memfd {
                            // Another process would see the same, and nothing behind it.
                            let (memfd, mut seen) = (File::from(memfd), vec![0; read.buffer.shared().len()]);
                            memfd.read_exact_at(&mut seen, 0).unwrap();
                            assert!(seen[..len] == data && seen[len..].iter().all(|b| *b == 0));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_cached_is_copied_and_what_is_not_is_read_past_the_cache() {
    let data = noise(4 << 20);
    let file = file(&data);
    let opened = File::open(file.path()).unwrap();
    let heap = AnonHeap::new();
    file.as_file().sync_all().unwrap();
    let warm = alloc_and_read(&heap, &opened, .., &small()).unwrap();
    if warm.method.cached.is_none() {
        return println!("SKIPPED: the kernel does not say what is cached (cachestat, Linux 6.5)");
    }
    assert!(warm.method.reason.contains("100 % in the page cache: copied from there"), "{}", warm.method);
    assert_eq!(warm.method.moved.direct, 0);
    forget(&file);
    let cold = alloc_and_read(&heap, &opened, .., &small()).unwrap();
    if cold.method.cached.is_some_and(|cached| cached.cached > 0) || !cold.method.how.direct {
        return println!("SKIPPED: this file system does no direct I/O or keeps its pages: {}", cold.method);
    }
    assert!(cold.method.reason.contains("0 % in the page cache: read past it"), "{}", cold.method);
    assert_eq!(cold.method.moved.buffered, 0, "aligned from end to end");
    // Small files too: the fast path for what is cached, one direct read for what is not.
    let cold = alloc_and_read(&heap, &opened, ..512 << 10, &small()).unwrap();
    assert!(cold.method.moved.direct == 512 << 10 && cold.method.reason.contains("fast path"), "{}", cold.method);
    let tiny = alloc_and_read(&heap, &opened, 5..100, &small()).unwrap();
    assert!(tiny.method.reason.contains("95 bytes are too few"), "{}", tiny.method);
    assert!(bytes(&tiny) == data[5..100]);
    // A direct read leaves the file as its owner had it: to be read ahead of.
    std::io::Read::read_exact(&mut &opened, &mut [0; 100_000]).unwrap();
    let ahead = dmalane::file::residency(&opened, 0, 4 << 20).unwrap();
    assert!(ahead.cached > 100_000 + 4096, "{ahead:?}");
}

#[test]
fn of_a_half_cached_file_each_half_is_read_in_its_own_way() {
    let data = noise(8 << 20);
    let file = file(&data);
    let opened = File::open(file.path()).unwrap();
    for heap in [&AnonHeap::new() as &dyn Heap, &MemfdHeap::starting_at(PageKind::Base)] {
        let half = 4 << 20;
        let half_cached = || {
            forget(&file);
            rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::Random).unwrap();
            for at in (half..data.len()).step_by(4096) {
                opened.read_exact_at(&mut [0], at as u64).unwrap();
            }
            alloc_and_read(&heap, &opened, .., &small()).unwrap()
        };
        // Kernels that reclaim in advance may take pages away at any time.
        let as_meant = |read: &AllocRead| read.method.cached.is_some_and(|cached| cached.cached == half as u64);
        let mut read = half_cached();
        for _ in 0..9 {
            if !as_meant(&read) {
                read = half_cached();
            }
        }
        if !as_meant(&read) || !read.method.how.direct {
            return println!("SKIPPED: no direct I/O, or not half of it is cached: {}", read.method);
        }
        assert!(bytes(&read) == data);
        let said = "50 % in the page cache: copied from there, the rest read past it";
        assert!(read.method.reason.contains(said), "{}", read.method);
        assert_eq!(read.method.moved, Moved { direct: half as u64, buffered: half as u64 }, "{}", read.method);
        // A load chooses in the same way, as long as the kernel keeps the pages.
        let mut input = dmalane::open_file(file.path(), dmalane::FileOptions::default()).unwrap();
        let slice = AnonHeap::new().allocate(data.len()).unwrap().share().into_slice();
        let operation = dmalane::queue::Operation::read(slice, FileOffset::new(0));
        let back = dmalane::queue::run(&mut input.queue, operation, Duration::from_secs(60)).unwrap();
        assert!(back.into_slice().unwrap().with_bytes(|bytes| bytes == data).unwrap());
        match dmalane::file::residency(&opened, half as u64, half as u64) {
            Ok(seen) if seen.cached == half as u64 => {
                assert_eq!(input.queue.moved(), read.method.moved, "{}", input.queue.how());
            }
            _ => println!("SKIPPED: the kernel has given pages up"),
        }
    }
}

#[test]
fn pages_that_are_not_on_the_disk_yet_do_not_decide_for_the_rest_of_the_file() {
    let data = noise(8 << 20);
    let file = file(&data);
    forget(&file);
    file.as_file().write_all_at(&data[..4096], 0).unwrap();
    let mut input = dmalane::open_file(file.path(), dmalane::FileOptions::default()).unwrap();
    let seen = dmalane::file::residency(&input.source.file().unwrap(), 0, 8 << 20).unwrap_or_default();
    if seen.dirty == 0 || seen.cached > 1 << 20 || !input.queue.how().direct {
        return println!("SKIPPED: {}, or nothing is dirty: {seen:?}", input.queue.how());
    }
    let slice = AnonHeap::new().allocate(data.len()).unwrap().share().into_slice();
    let operation = dmalane::queue::Operation::read(slice, FileOffset::new(0));
    let back = dmalane::queue::run(&mut input.queue, operation, Duration::from_secs(60)).unwrap();
    assert!(back.into_slice().unwrap().with_bytes(|bytes| bytes == data).unwrap());
    assert_eq!(input.queue.moved(), Moved { direct: 6 << 20, buffered: 2 << 20 }, "a block of 2 MiB");
}

#[test]
fn cached_files_are_written_to_memfds() {
    let data = noise(3_000_001);
    let file = file(&data);
    let opened = File::open(file.path()).unwrap();
    let heap = MemfdHeap::starting_at(PageKind::Base);
    let modes = [Mode::Auto, Mode::Buffered].into_iter();
    let ranges = [(0..data.len(), 1), (4096..data.len(), 3), (5..2_900_000, 2)];
    for (mode, (range, threads)) in modes.flat_map(|mode| ranges.clone().map(|range| (mode, range))) {
        let options = ReadOptions { mode, threads: Some(threads), ..small() };
        let read = alloc_and_read(&heap, &opened, range.start as u64..range.end as u64, &options).unwrap();
        if read.method.cached.is_none() {
            return println!("SKIPPED: the kernel does not say what is cached");
        }
        assert!(bytes(&read) == data[range.clone()], "{range:?} {threads}");
        assert_eq!(read.buffer.checksum(), Some(twox_hash::XxHash3_64::oneshot(&data[range.clone()])));
        assert_eq!(read.method.moved, Moved { direct: 0, buffered: range.len() as u64 });
        let how = read.method.to_string();
        assert!(threads > 1 || how.contains(&format!("{} bytes copied to the memfd", range.len())), "{how}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn scattered_lists_from_real_files(
        pieces in prop::collection::vec((0usize..3, 0u64..250_000, 0u64..150_000, 0u64..9000), 1..12),
        chunk in 1u64..300_000, direct: bool, threads in 1usize..4, aligned: bool,
    ) {
        let data: Vec<_> = (0..3).map(|i| noise(400_000 + i * 1000)).collect();
        let files: Vec<_> = data.iter().map(|d| file(d)).collect();
        let sources: Vec<_> = files.iter().map(|f| OpenFile::open(f.path()).unwrap()).collect();
        let (mut job, mut to) = (Job { buffers: vec![0, 0], extents: Vec::new() }, 0);
        let mut want = [Vec::new(), Vec::new()];
        for (i, (source, at, len, gap)) in pieces.into_iter().enumerate() {
            let at = if aligned { at & !4095 } else { at };
            let buffer = usize::from(i >= 5);
            if i == 5 { to = 0 }
            to += if aligned { gap & !4095 } else { gap };
            job.extents.push(Extent { source, at: FileOffset::new(at), len, buffer, to });
            want[buffer].resize(to as usize, 0);
            want[buffer].extend_from_slice(&data[source][at as usize..(at + len) as usize]);
            to += len;
            if aligned { to = to.next_multiple_of(4096) }
            job.buffers[buffer] = to;
        }
        for (w, len) in want.iter_mut().zip(&job.buffers) {
            w.resize(*len as usize, 0);
        }
        let mode = if direct { Mode::Auto } else { Mode::Buffered };
        if direct { files.iter().for_each(forget) }
        let mut options = ReadOptions { mode, threads: Some(threads), ..small() };
        options.fill.chunk = chunk;
        let mut arrived = 0;
        let heap = MemfdHeap::starting_at(PageKind::Base);
        let mut watch = |event| {
            if let Event::Arrived { len, .. } = event {
                arrived += len;
            }
            ControlFlow::Continue(())
        };
        let read = Read::sources(sources).job(job.clone()).options(options).watch(&mut watch);
        let ReadFiles { filled, .. } = read.into_memory(&heap).unwrap();
        prop_assert_eq!(arrived, job.bytes());
        for (buffer, want) in filled.buffers.iter().zip(&want) {
            let mut got = vec![0; buffer.len()];
            buffer.as_volatile_slice().read(&mut got);
            prop_assert!(got == *want);
        }
    }
}

#[test]
fn holes_are_zero() {
    let mut file = NamedTempFile::new_in(DISK).unwrap();
    file.as_file().set_len(3 << 20).unwrap();
    file.seek(SeekFrom::Start(2 << 20)).unwrap();
    file.write_all(b"island").unwrap();
    let pool = Pool::new(AnonHeap::new(), 8 << 20);
    for mode in [Mode::Auto, Mode::Buffered] {
        forget(&file);
        // Recycled memory is not zero by itself.
        pool.allocate(3 << 20).unwrap().fill(0xff);
        let opened = File::open(file.path()).unwrap();
        let read = alloc_and_read(&pool, &opened, .., &ReadOptions { mode, ..small() }).unwrap();
        assert!(read.report.recycled);
        let mut want = vec![0; 3 << 20];
        want[2 << 20..][..6].copy_from_slice(b"island");
        assert!(bytes(&read) == want, "{mode:?}");
    }
}

#[test]
fn ranges_and_their_ends() {
    let data = noise(2_000_000);
    let file = file(&data);
    let opened = File::open(file.path()).unwrap();
    let heap = AnonHeap::new();
    let read = |range: (std::ops::Bound<u64>, std::ops::Bound<u64>)| alloc_and_read(&heap, &opened, range, &small());
    use std::ops::Bound::{Excluded, Included, Unbounded};
    for (range, want) in [
        ((Unbounded, Unbounded), 0..2_000_000),
        ((Included(5), Excluded(1_500_000)), 5..1_500_000),
        ((Excluded(4), Included(1_499_999)), 5..1_500_000),
        ((Included(1_999_999), Unbounded), 1_999_999..2_000_000),
        ((Included(2_000_000), Unbounded), 0..0),
        ((Included(3_000_000), Unbounded), 0..0),
        ((Included(7), Excluded(7)), 0..0),
        ((Included(7), Excluded(5)), 0..0),
    ] {
        assert!(bytes(&read(range).unwrap()) == data[want], "{range:?}");
    }
    for end in [2_000_001, u64::MAX] {
        let e = read((Included(0), Excluded(end))).unwrap_err();
        assert!(matches!(e, LoadError::PastEnd { size: 2_000_000, end: e, .. } if e == end), "{e}");
    }
    let e = alloc_and_read(&heap, &opened, .., &ReadOptions { limit: Some(1 << 20), ..small() }).unwrap_err();
    assert!(matches!(e, LoadError::Limit { wanted: 2_000_000, limit: 1_048_576, .. }), "{e}");
    // A message names the file, though only a descriptor was given.
    let e = alloc_and_read(&heap, &File::open("/").unwrap(), .., &small()).unwrap_err();
    assert_eq!(e.to_string(), "cannot read /: it is a directory, not a file");
    assert_eq!(heap.stats().live, 0);
}

#[test]
fn a_file_replaced_while_it_is_read_is_the_one_that_was_opened() {
    let data = noise(4 << 20);
    let file = file(&data);
    forget(&file);
    let sources = vec![OpenFile::open(file.path()).unwrap()];
    let other = NamedTempFile::new_in(DISK).unwrap();
    std::fs::write(other.path(), vec![0; 4 << 20]).unwrap();
    let mut replace = Some(other);
    let mut watch = |event: Event| {
        if let (Event::Arrived { .. }, Some(other)) = (event, replace.take()) {
            std::fs::rename(other.path(), file.path()).unwrap();
        }
        ControlFlow::Continue(())
    };
    let read = Read::sources(sources).options(small()).watch(&mut watch);
    let ReadFiles { filled, .. } = read.into_memory(&AnonHeap::new()).unwrap();
    assert_eq!(filled.buffers[0].checksum(), Some(twox_hash::XxHash3_64::oneshot(&data)));
}

#[test]
fn a_file_that_changes_its_size() {
    for mode in [Mode::Auto, Mode::Buffered] {
        for (new, grows) in [(5 << 20, true), (3 << 20, false)] {
            let file = file(&noise(4 << 20));
            forget(&file);
            let sources = vec![OpenFile::open(file.path()).unwrap()];
            let mut once = true;
            let mut watch = |event: Event| {
                if matches!(event, Event::Arrived { .. }) && std::mem::take(&mut once) {
                    file.as_file().set_len(new).unwrap();
                }
                ControlFlow::Continue(())
            };
            let heap = AnonHeap::new();
            let options = ReadOptions { mode, threads: Some(1), ..small() };
            let read = Read::sources(sources).options(options).watch(&mut watch);
            let e = read.into_memory(&heap).unwrap_err();
            match e {
                LoadError::Changed { before, now, .. } if grows => assert_eq!((before, now), (4 << 20, new)),
                LoadError::Read { source: OpError::EndOfFile { at, .. }, .. } if !grows => assert_eq!(at.bits(), new),
                e => panic!("{e}"),
            }
            assert_eq!(heap.stats().live, 0);
        }
    }
}

#[test]
fn files_without_offsets_are_refused() {
    let heap = MemfdHeap::starting_at(PageKind::Base);
    let (pipe, _to) = rustix::pipe::pipe().unwrap();
    let (socket, _to) = std::os::unix::net::UnixStream::pair().unwrap();
    let zero = File::open("/dev/zero").unwrap();
    for (file, kind) in [
        (File::from(pipe), "FIFO"),
        (File::from(std::os::fd::OwnedFd::from(socket)), "socket"),
        (zero, "character device"),
    ] {
        for refused in [alloc_and_read(&heap, &file, .., &small()), alloc_and_read(&heap, &file, ..100_000, &small())] {
            let error = refused.unwrap_err().to_string();
            assert!(error.ends_with(&format!("it is a {kind}, not a file")), "{error}");
        }
    }
    assert_eq!(heap.stats().live, 0);
}

/// A block device that shows a file, made with the rights of root; it ends with this value.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Option<Self> {
        let made = std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(made.stdout).ok()?.trim().to_owned();
        (made.status.success() && !name.is_empty()).then_some(Self(name))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn block_devices() {
    let data = noise(8 << 20);
    let file = file(&data);
    let Some(made) = Loop::new(file.path()) else {
        return println!("SKIPPED: losetup makes no block device here, which takes root");
    };
    let device = match File::open(&made.0) {
        Ok(device) => device,
        Err(e) => return println!("SKIPPED: {} cannot be opened: {e}", made.0),
    };
    for mode in [Mode::Auto, Mode::Direct, Mode::Buffered] {
        let options = ReadOptions { mode, ..small() };
        let read = alloc_and_read(&AnonHeap::new(), &device, 4096..4096 + (3 << 20), &options).unwrap();
        assert!(bytes(&read) == data[4096..4096 + (3 << 20)], "{mode:?}");
    }
}

#[test]
fn more_than_the_machine_has_is_refused() {
    let file = NamedTempFile::new_in(DISK).unwrap();
    if let Err(e) = file.as_file().set_len(1 << 42) {
        return println!("SKIPPED: no file of 4 TiB: {e}");
    }
    let heap = AnonHeap::starting_at(PageKind::Base);
    let e = alloc_and_read(&heap, &File::open(file.path()).unwrap(), .., &small()).unwrap_err();
    assert!(matches!(&e, LoadError::Fill(FillError::NoRoom { .. } | FillError::Memory { .. })), "{e}");
    assert!(Path::new(DISK).exists());
}
