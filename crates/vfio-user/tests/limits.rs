//! Peers that go beyond what was agreed: clients of a served device, and a device that describes itself wrongly. Both
//! are message by message, as the specification has them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use dmalane_addr::Access;
use dmalane_dma::{Heap, MemfdHeap, PageKind, Registrar, receive_with_fds, send_with_fds};
use dmalane_vfio_user::{ClientMemory, Command, RegionSpec, ServedDevice, UserBus, serve};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{RecvFlags, SendFlags};

const HEADER: usize = 16;
const EINVAL: u32 = 22;
/// Region 2 of the device, and its interrupts.
const LEN: u64 = 4096;
const INTERRUPTS: u32 = 2;
/// As many files a client may share at a time.
const FILES: u64 = 4096;

/// The words of a message.
fn words(of: &[u32]) -> Vec<u8> {
    of.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The same of words of 64 bits behind those of 32.
fn body(short: &[u32], long: &[u64]) -> Vec<u8> {
    words(short).into_iter().chain(long.iter().flat_map(|word| word.to_le_bytes())).collect()
}

fn send(stream: &UnixStream, (id, command): (u16, u16), flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
    let len = (HEADER + body.len()) as u32;
    let header = words(&[u32::from(id) | u32::from(command) << 16, len, flags, 0]);
    let message = [&header, body].concat();
    assert_eq!(send_with_fds(stream, &message, fds, SendFlags::empty()).unwrap(), message.len());
}

/// The number, the command and the error number of the next message; `None` at the end.
fn receive(stream: &UnixStream) -> Option<(u16, u16, u32)> {
    let mut bytes = [0; 4096];
    let n = receive_with_fds(stream, &mut bytes, RecvFlags::empty()).ok()?.len;
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    (n >= HEADER).then(|| (word(0) as u16, (word(0) >> 16) as u16, word(12)))
}

/// Fails where it is asked for more than it has.
struct Device;

impl ServedDevice for Device {
    fn region(&self, index: u32) -> RegionSpec {
        RegionSpec { len: if index == 2 { LEN } else { 0 }, accessible: index == 2 }
    }

    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> bool {
        assert!(region == 2 && offset + into.len() as u64 <= LEN);
        true
    }

    fn write(&mut self, region: u32, offset: u64, from: &[u8]) -> bool {
        assert!(region == 2 && offset + from.len() as u64 <= LEN);
        true
    }

    fn interrupts(&self) -> u32 {
        INTERRUPTS
    }

    fn set_interrupts(&mut self, first: u32, events: Vec<Option<OwnedFd>>) {
        assert!(first + events.len() as u32 <= INTERRUPTS);
    }

    fn reset(&mut self) -> bool {
        true
    }
}

/// Runs a test with a client that gets the error number of each answer, 0 for none; and with the memory of the device.
fn with_client(test: impl FnOnce(&dyn Fn(Command, &[u8], &[BorrowedFd<'_>]) -> u32, &ClientMemory)) {
    let (client, stream) = UnixStream::pair().unwrap();
    let memory = ClientMemory::new();
    let served = memory.clone();
    let server = thread::spawn(move || serve(stream, &mut Device, &served).unwrap());
    let ask = |command: Command, body: &[u8], fds: &[BorrowedFd<'_>]| {
        send(&client, (7, command as u16), 0, body, fds);
        receive(&client).expect("an answer").2
    };
    assert_eq!(ask(Command::Version, &[words(&[0]), b"{}\0".to_vec()].concat(), &[]), 0);
    test(&ask, &memory);
    drop(client);
    server.join().unwrap();
}

/// A sealed memfd of a page.
fn file() -> OwnedFd {
    let file = memfd_create("page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, rustix::param::page_size() as u64).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

fn map(at: u64) -> Vec<u8> {
    body(&[32, 3], &[0, at, 4096])
}

fn unmap(at: u64, len: u64) -> Vec<u8> {
    body(&[24, 0], &[at, len])
}

#[test]
fn a_device_is_asked_for_what_it_has_alone() {
    with_client(|ask, _| {
        let access = |offset: u64, count: u32| {
            let place = |data: &[u8]| [&body(&[], &[offset]), &words(&[2, count])[..], data].concat();
            let written = ask(Command::RegionWrite, &place(&vec![0; count as usize]), &[]);
            assert_eq!(ask(Command::RegionRead, &place(&[]), &[]), written, "{offset} + {count}");
            written
        };
        for (offset, count) in [(0, 4), (LEN - 4, 4), (LEN, 0)] {
            assert_eq!(access(offset, count), 0, "{offset} + {count}");
        }
        for (offset, count) in [(LEN - 4, 5), (LEN, 1), (LEN + 1, 0), (u64::MAX, 1)] {
            assert_eq!(access(offset, count), EINVAL, "{offset} + {count}");
        }
        // Event descriptors for MSI-X, which is kind 2, from an interrupt on.
        let set = |start, count| ask(Command::SetIrqs, &words(&[20, 1 << 2 | 1 << 5, 2, start, count]), &[]);
        assert_eq!([set(0, 2), set(1, 1), set(2, 0)], [0; 3]);
        assert_eq!([set(0, 3), set(2, 1), set(3, 0), set(u32::MAX, 2)], [EINVAL; 4]);
    });
}

#[test]
fn a_part_of_a_mapping_is_not_unmapped() {
    with_client(|ask, memory| {
        assert_eq!(ask(Command::DmaMap, &map(0x1000), &[file().as_fd()]), 0);
        // From its first byte, its last, and in the middle.
        for (at, len) in [(0x1000, 1), (0x1fff, 1), (0x1fff, 0x1001), (0xfff, 2), (0x1800, 8)] {
            assert_eq!(ask(Command::DmaUnmap, &unmap(at, len), &[]), EINVAL, "{at:#x} + {len:#x}");
        }
        assert_eq!(memory.mappings(), 1);
        assert_eq!(ask(Command::DmaUnmap, &unmap(0xfff, 0x1002), &[]), 0, "around it");
        assert_eq!(memory.mappings(), 0);
    });
}

#[test]
fn files_that_are_unmapped_count_no_more() {
    with_client(|ask, memory| {
        for number in 0..FILES + 10 {
            assert_eq!(ask(Command::DmaMap, &map(0x1000), &[file().as_fd()]), 0, "file {number}");
            assert_eq!(ask(Command::DmaUnmap, &unmap(0x1000, 4096), &[]), 0);
        }
        assert_eq!(memory.mappings(), 0);
    });
}

/// What a client finds mappable of region 0 of a device that describes it so: with a length, in a file of a page; and
/// these bytes behind the description.
fn areas(len: u64, capabilities: &[u8]) -> Vec<std::ops::Range<u64>> {
    let (stream, server) = UnixStream::pair().unwrap();
    let description = [words(&[4096, 1 | 2 | 4 | 8, 0, 32]), body(&[], &[len, 0]), capabilities.to_vec()].concat();
    thread::spawn(move || {
        let page = file();
        while let Some((id, command, _)) = receive(&server) {
            // A PCI device with one region, and no interrupts.
            let answer = match command {
                1 => [words(&[1 << 16]), b"{}\0".to_vec()].concat(),
                4 => words(&[16, 2, 1, 0]),
                5 => description.clone(),
                _ => words(&[16, 0, 2, 0]),
            };
            let fds = [page.as_fd()];
            send(&server, (id, command), 1, &answer, if command == 5 { &fds } else { &[] });
        }
    });
    let (done, connected) = channel();
    thread::spawn(move || done.send(UserBus::over(stream).unwrap()));
    let bus = connected.recv_timeout(Duration::from_secs(60)).expect("the client reads the description to its end");
    bus.mapped_areas(0).to_vec()
}

#[test]
fn a_client_maps_what_a_region_has_alone() {
    let page = rustix::param::page_size() as u64;
    // A capability of mappable areas, whose number is 1, at its place; the next one is at `next`.
    let listed = |next: u32, areas: &[u64]| [words(&[1 | 1 << 16, next, areas.len() as u32 / 2, 0]), body(&[], areas)];
    let (first, whole) = ([0, page], 0..page);
    assert_eq!(areas(page, &listed(0, &first).concat()), vec![whole.clone()]);
    // Longer than the file; than the region; nothing; and beyond the last address.
    for (len, area) in [(2 * page, [0, 2 * page]), (page / 2, [0, page]), (page, [8, 0]), (page, [page, page])] {
        assert_eq!(areas(len, &listed(0, &area).concat()), [], "{area:x?} of {len}");
    }
    // Unknown capabilities before it; and those whose next one is themselves, or before, which end the chain: then all
    // of the region is mappable.
    let unknown = |next: u32| words(&[9 | 1 << 16, next]);
    assert_eq!(areas(page, &[unknown(40), listed(0, &first).concat()].concat()), vec![whole.clone()]);
    for next in [32, 16, 33, u32::MAX] {
        let found = areas(page, &unknown(next));
        assert!(found.is_empty() || found == [whole.clone()], "{next}: {found:?}");
    }
}

/// A device that is gone accesses nothing any more; one that does not answer may.
#[test]
fn memory_of_a_device_that_does_not_answer_is_kept() {
    for is_gone in [false, true] {
        let (stream, server) = UnixStream::pair().unwrap();
        let timeout = stream.try_clone().unwrap();
        let device = thread::spawn(move || {
            while let Some((id, command, _)) = receive(&server) {
                // Without regions. It does not answer what comes after a mapping.
                let answer: &[u32] = if command == 4 { &[16, 2, 0, 0] } else { &[1 << 16, 0, 2, 0] };
                send(&server, (id, command), 1, &words(answer), &[]);
                if command == Command::DmaMap as u16 {
                    break;
                }
            }
            (!is_gone).then_some(server)
        });
        let bus = UserBus::over(stream).unwrap();
        timeout.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let heap = MemfdHeap::starting_at(PageKind::Base);
        let buf = heap.allocate(rustix::param::page_size()).unwrap().share();
        let mapping = bus.map(bus.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
        let server = device.join().unwrap();
        drop((mapping, buf));
        assert_eq!(heap.stats().live == 0, is_gone, "what may be accessed is not freed");
        drop((bus, server));
    }
}
