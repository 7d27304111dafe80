//! Entry point of the fuzz target: a hostile client of a served device.
//!
//! Accepts any bytes, panics when a guarantee is broken, and ends quickly. Only for fuzzing.

use std::cell::RefCell;
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use dmalane_addr::Iova;
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{DeviceMem, Heap, HeldMem, MemfdHeap, PageKind, SharedBuf};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;

use crate::wire::{Body, ERROR, Fields, HEADER, MAX_DATA, NO_REPLY, REPLY, receive, send};
use crate::{ClientMemory, ClientPort, MappableFile, RegionSpec, ServedDevice, serve};

/// Maximum messages of one run; all of them fit into a socket that is not read.
const MESSAGES: usize = 40;
/// Maximum bytes of a message after its fields.
const TAIL: usize = 700;
const INTERRUPTS: u32 = 4;
const REGISTERS: u64 = 4096;
const MEMORY: u64 = 64 << 10;

/// Resources that all runs share.
struct Resources {
    /// Files to send: memory of several lengths, and other kinds of files.
    files: Vec<OwnedFd>,
    /// The mappable memory of the device.
    memory: SharedBuf,
    _files_memory: Vec<SharedBuf>,
}

fn resources() -> Resources {
    let memfd = |len| MemfdHeap::starting_at(PageKind::Base).allocate(len).expect("a memfd").share();
    let buffers: Vec<_> = [4096, 16 << 10, 2 << 20].map(memfd).into();
    let lent = |buf: &SharedBuf| buf.export().expect("a memfd").try_clone_to_owned().expect("a descriptor");
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&unsealed, 8192).expect("a length");
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
    let mut files: Vec<_> = buffers.iter().map(lent).collect();
    files.extend([unsealed, event(), event(), pipe, sparse()]);
    Resources { files, memory: memfd(MEMORY as usize), _files_memory: buffers }
}

/// A sealed memfd as long as half of the address space.
fn sparse() -> OwnedFd {
    let file = rustix::fs::memfd_create("sparse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::fs::ftruncate(&file, 1 << 46).expect("a length");
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).expect("a seal");
    file
}

thread_local! {
    static RESOURCES: RefCell<Resources> = RefCell::new(resources());
}

/// A device with registers, a memory that a client may map, and a DMA engine that runs as soon as its registers are
/// written.
struct Device<'a> {
    registers: Vec<u8>,
    memory: &'a SharedBuf,
    port: ClientPort,
    events: Vec<Option<OwnedFd>>,
    resets: u32,
}

impl Device<'_> {
    /// Checks that the requested bytes are within an accessible region.
    fn check_request(&self, region: u32, offset: u64, len: usize) {
        let spec = self.region(region);
        let end = offset.checked_add(len as u64).expect("an end");
        assert!(spec.accessible && end <= spec.len && len <= MAX_DATA, "region {region}: {len} bytes at {offset:#x}");
    }

    /// Registers 0 and 1 are an address and a length. Inverts these bytes of host memory.
    fn run(&mut self) {
        let mut fields = Fields(&self.registers);
        let (at, len) = (fields.u64().unwrap_or(0), fields.u64().unwrap_or(0).min(64 << 10));
        let mut bytes = vec![0; len as usize];
        if self.port.hold().read_bytes(Iova::new(at), &mut bytes).is_ok() {
            bytes.iter_mut().for_each(|b| *b = !*b);
            if let Err(fault) = self.port.hold().write_bytes(Iova::new(at), &bytes) {
                assert!(fault.at.bits() >= at && fault.at.bits() - at < len && fault.done <= len);
            }
        }
    }
}

impl ServedDevice for Device<'_> {
    fn region(&self, index: u32) -> RegionSpec {
        let len = [REGISTERS, 0, MEMORY, 0, 0, 0, 0, 256, 1 << 20].get(index as usize).copied().unwrap_or(0);
        RegionSpec { len, accessible: len > 0 && index != 8 }
    }

    fn mappable(&self, region: u32) -> Option<MappableFile<'_>> {
        let file = self.memory.export()?;
        (region == 2).then_some(MappableFile { file, areas: vec![0..0x1000, 0x2000..MEMORY] })
    }

    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> bool {
        self.check_request(region, offset, into.len());
        let from = self.registers.get(offset as usize..offset as usize + into.len());
        match (region, from) {
            (0, Some(from)) => into.copy_from_slice(from),
            (2, _) => self.memory.as_volatile_slice().sub(offset as usize, into.len()).expect("within").read(into),
            _ => return false,
        }
        true
    }

    fn write(&mut self, region: u32, offset: u64, from: &[u8]) -> bool {
        self.check_request(region, offset, from.len());
        match region {
            0 => self.registers[offset as usize..][..from.len()].copy_from_slice(from),
            2 => self.memory.as_volatile_slice().sub(offset as usize, from.len()).expect("within").write(from),
            _ => return false,
        }
        if region == 0 && offset < 16 {
            self.run();
        }
        true
    }

    fn interrupts(&self) -> u32 {
        INTERRUPTS
    }

    fn set_interrupts(&mut self, first: u32, events: Vec<Option<OwnedFd>>) {
        let first = first as usize;
        assert!(first + events.len() <= self.events.len(), "interrupts {first} and {} more", events.len());
        for (slot, event) in self.events[first..].iter_mut().zip(events) {
            *slot = event;
        }
    }

    fn reset(&mut self) -> bool {
        self.resets += 1;
        self.registers.fill(0);
        true
    }
}

/// A message to send: command, flags, body, and the files that go with it.
struct Sent {
    command: u16,
    flags: u32,
    body: Vec<u8>,
    files: Vec<usize>,
}

/// Builds a request from the input.
fn request(input: &mut FuzzInput<'_>) -> Sent {
    let body = Body::default;
    let small = |input: &mut FuzzInput<'_>| u32::from(input.u8());
    let (command, body) = match input.u8() % 12 {
        0 => (1, body().u32(small(input)).bytes(b"{}\0")),
        1 | 2 => {
            let (flags, offset, at, len) = (small(input), input.number(), input.number(), input.number());
            (2, body().u32(32).u32(flags).u64(offset).u64(at).u64(len))
        }
        3 => (3, body().u32(24).u32(small(input) % 4).u64(input.number()).u64(input.number())),
        4 => (4, body().u32(16).u32(0).u32(0).u32(0)),
        5 => (5, body().u32(small(input) * 4).u32(0).u32(small(input) % 12).u32(0).u64(0).u64(0)),
        6 => (7, body().u32(16).u32(0).u32(small(input) % 8).u32(0)),
        7 => {
            // Each flag of the header (data type and action), set or not.
            let chosen = small(input);
            let flags = (0..6).filter(|i| (chosen >> i) & 1 == 1).fold(0, |flags, i| flags | (1 << i));
            let (index, start, count) = (small(input) % 8, small(input) % 8, small(input) % 8);
            (8, body().u32(20).u32(flags).u32(index).u32(start).u32(count))
        }
        8 => (9, body().u64(input.number()).u32(small(input) % 10).u32(u32::from(input.u16()))),
        9 => {
            // Mostly to the registers that start the DMA engine.
            let offset = if input.u8() < 200 { 0 } else { input.number() };
            let (region, count) = (small(input) % 10, 8 * (small(input) % 5));
            let data: Vec<u8> = (0..count / 8).flat_map(|_| input.number().to_le_bytes()).collect();
            let claimed = if input.u8() < 250 { count } else { u32::from(input.u16()) };
            (10, body().u64(offset).u32(region).u32(claimed).bytes(&data))
        }
        10 => (13, body()),
        _ => {
            let command = input.u16();
            let len = usize::from(input.u16()) % TAIL;
            (command, body().bytes(input.bytes(len)))
        }
    };
    let flags = if input.u8() == 7 { NO_REPLY | u32::from(input.u16()) << 16 } else { 0 };
    let count = match command {
        2 => 1 + input.u8() % 2,
        8 => input.u8() % 6,
        _ => u8::from(input.u8() == 1),
    };
    let files = (0..count).map(|_| usize::from(input.u8())).collect();
    Sent { command, flags, body: body.0, files }
}

/// Sends a client's messages all at once: requests built from the input, some with descriptors, and arbitrary bytes.
///
/// # Panics
/// When a request outside of the device reaches it, an answer is malformed, or state of the client is left.
pub fn fuzz_client(data: &[u8]) {
    RESOURCES.with_borrow(|resources| run(resources, FuzzInput::new(data)));
}

fn run(resources: &Resources, mut input: FuzzInput<'_>) {
    let (mut client, server) = UnixStream::pair().expect("a socket");
    let (mut requested, mut broken) = (Vec::new(), false);
    if input.u8() & 7 != 0 {
        send(&client, 0, 1, 0, 0, &Body::default().u32(u32::from(input.u8()) << 16).0, &[]).expect("room");
        requested.push((0, 1));
    }
    for id in 1..=MESSAGES as u16 {
        if input.is_empty() {
            break;
        }
        let how = input.u8();
        if how & 0xf8 == 0xe0 && !requested.is_empty() {
            // An answer, whatever was asked.
            let (command, len) = (11 + u16::from(input.u8() & 1), usize::from(input.u16()) % TAIL);
            let body = Body::default().u64(input.number()).u64(input.number()).bytes(input.bytes(len));
            let flags = if input.u8() < 200 { REPLY } else { REPLY | ERROR };
            send(&client, 1 + u16::from(how & 7), command, flags, 0, &body.0, &[]).expect("room");
            continue;
        }
        if how == 255 {
            // Bytes that are not a message.
            broken = true;
            let len = usize::from(input.u16()) % TAIL;
            let sent = client.write_all(input.bytes(len));
            sent.expect("room");
            continue;
        }
        let mut sent = request(&mut input);
        if how >= 250 && !sent.body.is_empty() {
            let at = usize::from(input.u8()) % sent.body.len();
            sent.body[at] ^= input.u8();
        } else if how >= 240 {
            sent.body.truncate(usize::from(input.u8()) % (sent.body.len() + 1));
        }
        let fds: Vec<BorrowedFd<'_>> =
            sent.files.iter().map(|i| resources.files[i % resources.files.len()].as_fd()).collect();
        send(&client, id, sent.command, sent.flags, 0, &sent.body, &fds).expect("room");
        // The first message is answered whatever its flags.
        if (sent.flags & NO_REPLY == 0 || (requested.is_empty() && id == 1)) && !broken {
            requested.push((id, sent.command));
        }
    }
    client.shutdown(Shutdown::Write).expect("a socket");
    let memory = ClientMemory::new();
    let mut device = Device {
        registers: vec![0; REGISTERS as usize],
        memory: &resources.memory,
        port: memory.port(),
        events: (0..INTERRUPTS).map(|_| None).collect(),
        resets: 0,
    };
    let (served, answers) = std::thread::scope(|scope| {
        let answers = scope.spawn(move || answers(&mut client));
        (serve(server, &mut device, &memory), answers.join().expect("a reader"))
    });
    // One answer for each request, in order, and for all of them if no message was malformed.
    let expected = requested.get(..answers.len()).unwrap_or(&requested);
    assert!(broken || answers[..expected.len()] == *expected, "{answers:?} to {requested:?}");
    assert!(broken || served.is_err() || answers == requested, "{answers:?} to {requested:?}");
    assert!(device.resets > 0 && device.events.iter().all(Option::is_none), "state of the client is left");
    assert_eq!(memory.mappings(), 0);
}

/// Returns the answers as (id, command) until the socket is closed, or reset because unread messages were left.
fn answers(client: &mut UnixStream) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    loop {
        let answer = match receive(client) {
            Ok(Some(answer)) => answer,
            Ok(None) => return found,
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return found,
            Err(e) => panic!("no well-formed answer: {e}"),
        };
        if (11..=12).contains(&answer.command) && answer.flags == 0 {
            // The device asks for memory.
            assert!(answer.fds.is_empty() && answer.body.len() >= 16, "{answer:?}");
            continue;
        }
        assert!(answer.flags & REPLY != 0 && (answer.flags & ERROR != 0) == (answer.error != 0), "{answer:?}");
        assert!(answer.error == 0 || answer.body.is_empty(), "{answer:?}");
        assert!(HEADER + answer.body.len() <= MAX_DATA + 4096 && answer.fds.len() <= 1);
        found.push((answer.id, answer.command));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_input_breaks_no_guarantee() {
        dmalane_dma::fuzzing::smoke(300, super::fuzz_client);
    }
}
