//! Tests of memory that a device reads and writes by messages, against a scripted other side.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova};
use dmalane_dma::{AnonHeap, DeviceMem, Heap, HeldMem, Mapping, MemfdHeap, PageKind, Registrar, SharedBuf};

use crate::client::tests::SHORT;
use crate::server::serve_with;
use crate::wire::{Body, Command, ERROR, Fields, MAX_DATA, MAX_PUSHED, Message, NO_REPLY, REPLY, receive, send};
use crate::{ClientMemory, ClientPort, Error, RegionSpec, ServedDevice, UserBus, serve};

const LONG: Duration = Duration::from_secs(30);
const FAULT: u32 = libc::EFAULT as u32;
const INVALID: u32 = libc::EINVAL as u32;

/// A device's process without regions, which answers all requests; those of one kind after it was called for them.
struct Process {
    stream: UnixStream,
    answers: Receiver<Message>,
}

impl Process {
    fn new(on_reset: impl Fn(&UnixStream) + Send + 'static) -> (Self, UnixStream) {
        Self::on(Command::Reset, on_reset)
    }

    fn on(command: Command, call: impl Fn(&UnixStream) + Send + 'static) -> (Self, UnixStream) {
        let (client, stream) = UnixStream::pair().unwrap();
        let (to, answers) = channel();
        let ours = stream.try_clone().unwrap();
        thread::spawn(move || Self::answer(&ours, &to, command, call));
        (Self { stream, answers }, client)
    }

    fn answer(stream: &UnixStream, to: &Sender<Message>, command: Command, call: impl Fn(&UnixStream)) {
        while let Ok(Some(message)) = receive(stream) {
            let body = match Command::from_number(message.command).unwrap() {
                _ if message.flags & REPLY != 0 => {
                    to.send(message).unwrap();
                    continue;
                }
                Command::Version => Body::default().u32(1 << 16),
                Command::DeviceInfo => Body::default().u32(16).u32(2).u32(0).u32(0),
                Command::IrqInfo => Body::default().u32(16).u32(0).u32(2).u32(0),
                _ => Body::default(),
            };
            if message.flags & REPLY == 0 && message.command == command as u16 {
                call(stream);
            }
            if send(stream, message.id, message.command, REPLY, 0, &body.0, &[]).is_err() {
                return;
            }
        }
    }

    /// The error number and the bytes of the answer to a request.
    fn ask(&self, command: Command, body: Body) -> (u32, Vec<u8>) {
        send(&self.stream, 77, command as u16, 0, 0, &body.0, &[]).unwrap();
        let answer = self.answers.recv_timeout(LONG).expect("an answer");
        assert_eq!((answer.id, answer.command), (77, command as u16));
        assert_eq!(answer.flags & ERROR != 0, answer.error != 0);
        if answer.error == 0 {
            assert_eq!(answer.body[..16], body.0[..16], "the place");
        }
        (answer.error, answer.body.get(16..).unwrap_or_default().to_vec())
    }

    fn read(&self, at: u64, count: u64) -> (u32, Vec<u8>) {
        self.ask(Command::DmaRead, Body::default().u64(at).u64(count))
    }

    fn write(&self, at: u64, bytes: &[u8]) -> u32 {
        self.ask(Command::DmaWrite, Body::default().u64(at).u64(bytes.len() as u64).bytes(bytes)).0
    }
}

fn bytes_of(buf: &SharedBuf, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buf.as_volatile_slice().sub(at, len).unwrap().read(&mut bytes);
    bytes
}

fn buffer(heap: &dyn Heap, len: usize, byte: u8) -> SharedBuf {
    let buf = heap.allocate(len).unwrap().share();
    buf.as_volatile_slice().fill(byte);
    buf
}

fn map(bus: &UserBus, bufs: &[&SharedBuf], access: Access) -> (Mapping, u64) {
    let pinned = bufs.iter().map(|buf| bus.pin(&buf.reference()).unwrap()).collect();
    let mapping = bus.map_list(pinned, access).unwrap();
    let at = mapping.span().first().bits();
    (mapping, at)
}

/// While the client does nothing, since memory without a descriptor is mapped.
#[test]
fn memory_is_lent_within_its_bounds_and_rights() {
    let (process, client) = Process::new(|_| ());
    let bus = UserBus::over(client).unwrap();
    let heap = AnonHeap::starting_at(PageKind::Base);
    let (first, second) = (buffer(&heap, 8192, 1), buffer(&heap, 4096, 2));
    let memfd = buffer(&MemfdHeap::starting_at(PageKind::Base), 4096, 3);
    let (both, at) = map(&bus, &[&first, &second], Access::RW);
    let (readable, to_read) = map(&bus, &[&memfd], Access::READ);
    let (writable, to_write) = map(&bus, &[&memfd], Access::WRITE);
    // Across buffers, all of it, nothing, and one byte.
    let whole = process.read(at, 12288);
    assert_eq!((whole.0, &whole.1[..8192], &whole.1[8192..]), (0, &[1; 8192][..], &[2; 4096][..]));
    assert_eq!((process.read(at + 100, 0), process.read(at + 8191, 2)), ((0, vec![]), (0, vec![1, 2])));
    assert_eq!(process.write(at + 8190, b"abcd"), 0);
    assert_eq!((bytes_of(&first, 8189, 3), bytes_of(&second, 0, 3)), (b"\x01ab".to_vec(), b"cd\x02".to_vec()));
    // What is mapped for one is not for the other.
    assert_eq!((process.read(to_read, 1), process.write(to_read, b"x")), ((0, vec![3]), FAULT));
    assert_eq!((process.read(to_write, 1).0, process.write(to_write, b"y")), (FAULT, 0));
    assert_eq!(bytes_of(&memfd, 0, 2), b"y\x03");
    // Beyond the ends.
    let end = [at + 12288, to_read + 4096, to_write + 4096].into_iter().max().unwrap();
    for (from, count) in [(at - 1, 1), (end, 1), (end - 1, 2), (at, 1 << 20), (0, 1), (u64::MAX, 1), (u64::MAX - 3, 8)]
    {
        assert_eq!(process.read(from, count).0, FAULT, "{from:#x} + {count}");
        assert_eq!(process.write(from, &vec![9; count as usize]), FAULT, "{from:#x} + {count}");
    }
    // Bytes that are not there, or too many of them.
    for count in [MAX_DATA as u64 + 1, u64::MAX, 5, 3] {
        assert_eq!(process.ask(Command::DmaWrite, Body::default().u64(at).u64(count).bytes(b"1234")).0, INVALID);
    }
    assert_eq!((process.read(at, MAX_DATA as u64 + 1).0, process.read(at, u64::MAX).0), (INVALID, INVALID));
    assert_eq!(process.ask(Command::DmaRead, Body::default().u64(at)).0, INVALID);
    assert_eq!(bytes_of(&first, 0, 8), [1; 8]);
    // Without an answer: that to the next request is the next.
    let silent = Body::default().u64(at).u64(2).bytes(b"no");
    send(&process.stream, 5, Command::DmaWrite as u16, NO_REPLY, 0, &silent.0, &[]).unwrap();
    assert_eq!(process.read(at, 3), (0, b"no\x01".to_vec()));
    // Unmapped.
    drop((both, writable));
    assert_eq!((process.read(at, 1).0, process.write(to_write, b"z"), process.read(to_read, 1).0), (FAULT, FAULT, 0));
    drop(readable);
    // Nothing keeps the memory.
    assert_eq!(
        (heap.stats().live, {
            drop((first, second));
            heap.stats().live
        }),
        (12288, 0)
    );
}

#[test]
fn memory_is_lent_while_a_request_waits_and_from_then_on() {
    let (tell, at) = channel::<u64>();
    let (process, client) = Process::new(move |stream| {
        let body = Body::default().u64(at.recv().unwrap()).u64(2);
        send(stream, 9, Command::DmaRead as u16, 0, 0, &body.0, &[]).unwrap();
        let answer = receive(stream).unwrap().unwrap();
        assert_eq!((answer.id, answer.flags, &answer.body[16..]), (9, REPLY, &[4, 4][..]));
    });
    let bus = UserBus::over(client).unwrap();
    let memfd = buffer(&MemfdHeap::starting_at(PageKind::Base), 4096, 4);
    let (mapping, at) = map(&bus, &[&memfd], Access::RW);
    tell.send(at).unwrap();
    bus.reset().unwrap();
    assert_eq!((process.read(at + 4095, 1), process.write(at, b"x")), ((0, vec![4]), 0));
    drop(mapping);
}

/// The first question comes while something is mapped or unmapped, by a process that was given descriptors.
#[test]
fn who_has_asked_meanwhile_is_answered_from_then_on() {
    for command in [Command::DmaMap, Command::DmaUnmap] {
        let (process, client) = Process::on(command, |stream| {
            let body = Body::default().u64(0).u64(1);
            send(stream, 9, Command::DmaRead as u16, 0, 0, &body.0, &[]).unwrap();
            let answer = receive(stream).unwrap().unwrap();
            assert_eq!((answer.id, answer.flags, answer.error), (9, REPLY | ERROR, FAULT));
        });
        let bus = UserBus::over(client).unwrap();
        let memfd = buffer(&MemfdHeap::starting_at(PageKind::Base), 4096, 4);
        let (mapping, at) = map(&bus, &[&memfd], Access::RW);
        drop(map(&bus, &[&memfd], Access::RW));
        assert_eq!(process.read(at, 1), (0, vec![4]), "after {command:?}");
        drop(mapping);
    }
}

#[test]
fn a_process_that_asks_without_end_times_out() {
    let (_process, client) = Process::new(|stream| {
        let body = Body::default().u64(0).u64(1);
        while send(stream, 9, Command::DmaRead as u16, 0, 0, &body.0, &[]).is_ok() {}
    });
    let bus = UserBus::with_timeout(client, SHORT).unwrap();
    let began = Instant::now();
    let error = bus.reset().unwrap_err();
    assert!(matches!(error, Error::Unanswered { command: Command::Reset, .. }), "{error}");
    assert!(began.elapsed() < LONG);
}

#[test]
fn a_process_that_talks_nonsense_meanwhile_is_left() {
    for (command, flags) in [(Command::DmaRead, REPLY), (Command::Reset, 0), (Command::Version, REPLY)] {
        let (process, client) = Process::new(|_| ());
        let bus = UserBus::over(client).unwrap();
        let buf = buffer(&AnonHeap::new(), 4096, 0);
        let (mapping, _) = map(&bus, &[&buf], Access::RW);
        send(&process.stream, 1, command as u16, flags, 0, &[], &[]).unwrap();
        // It finds the connection closed.
        process.stream.set_read_timeout(Some(LONG)).unwrap();
        while process.answers.recv_timeout(LONG).is_ok() {}
        assert!(matches!(bus.reset().unwrap_err(), Error::Unanswered { .. }));
        drop(mapping);
    }
}

/// A device with a region of 1 MiB.
struct Large(Vec<u8>);

impl ServedDevice for Large {
    fn region(&self, index: u32) -> RegionSpec {
        RegionSpec { len: if index == 0 { self.0.len() as u64 } else { 0 }, accessible: index == 0 }
    }

    fn read(&mut self, _: u32, offset: u64, into: &mut [u8]) -> bool {
        into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
        true
    }

    fn write(&mut self, _: u32, offset: u64, from: &[u8]) -> bool {
        self.0[offset as usize..][..from.len()].copy_from_slice(from);
        true
    }

    fn interrupts(&self) -> u32 {
        0
    }

    fn set_interrupts(&mut self, _: u32, _: Vec<Option<OwnedFd>>) {}

    fn reset(&mut self) -> bool {
        true
    }
}

/// A served device, whose client encodes its messages itself and has mapped two pages without a file.
fn with_client(
    version: u32,
    capabilities: &str,
    timeout: Duration,
    test: impl FnOnce(&UnixStream, ClientPort, &ClientMemory),
) {
    let (client, stream) = UnixStream::pair().unwrap();
    client.set_read_timeout(Some(LONG)).unwrap();
    let memory = ClientMemory::new();
    let served = memory.clone();
    let server = thread::spawn(move || serve_with(timeout, stream, &mut Large(vec![0; 1 << 20]), &served));
    let hello = Body::default().u32(version << 16).bytes(capabilities.as_bytes()).bytes(&[0]);
    for (command, body) in [(Command::Version, hello), (Command::DmaMap, page(1)), (Command::DmaMap, page(2))] {
        send(&client, 1, command as u16, 0, 0, &body.0, &[]).unwrap();
        assert_eq!(receive(&client).unwrap().unwrap().flags, REPLY);
    }
    test(&client, memory.port(), &memory);
    drop(client);
    server.join().unwrap().unwrap();
}

fn page(number: u64) -> Body {
    Body::default().u32(32).u32(3).u64(0).u64(number << 12).u64(4096)
}

/// The next question: its number, what it is, its place, its count and its bytes.
fn question(client: &UnixStream) -> (u16, Command, u64, u64, Vec<u8>) {
    let asked = receive(client).unwrap().unwrap();
    let mut fields = Fields(&asked.body);
    let (at, count) = (fields.u64().unwrap(), fields.u64().unwrap());
    assert_eq!((asked.flags, asked.fds.len()), (0, 0));
    (asked.id, Command::from_number(asked.command).unwrap(), at, count, fields.0.to_vec())
}

#[test]
fn a_client_is_asked_for_as_much_as_it_takes() {
    with_client(1, r#"{"capabilities":{"max_data_xfer_size":3000}}"#, LONG, |client, mut port, _| {
        let device = thread::spawn(move || {
            let mut bytes = vec![0; 5000];
            port.hold().read_bytes(Iova::new(0x1004), &mut bytes).unwrap();
            port.hold().write_bytes(Iova::new(0x1ffc), b"12345678").unwrap();
            port.hold().write_words(Iova::new(0x1000), &[Some(1), Some(2), None, Some(3)]).unwrap();
            assert!(port.hold().write_words(Iova::new(0x1004), &[Some(1)]).is_err());
            bytes
        });
        // Each mapping for itself, and no more than 3000 bytes at a time.
        for (at, count) in [(0x1004, 3000), (0x1bbc, 1092), (0x2000, 908)] {
            let (id, command, place, asked, data) = question(client);
            assert_eq!((command, place, asked, data.len()), (Command::DmaRead, at, count, 0));
            let body = Body::default().u64(place).u64(asked).bytes(&vec![asked as u8; asked as usize]);
            send(client, id, command as u16, REPLY, 0, &body.0, &[]).unwrap();
        }
        for (at, bytes) in [
            (0x1ffc, b"1234".to_vec()),
            (0x2000, b"5678".to_vec()),
            (0x1000, [1_u64, 2].iter().flat_map(|n| n.to_le_bytes()).collect()),
            (0x1018, 3_u64.to_le_bytes().to_vec()),
        ] {
            let (id, command, place, count, data) = question(client);
            assert_eq!((command, place, count), (Command::DmaWrite, at, bytes.len() as u64));
            assert_eq!(data, bytes);
            // QEMU answers with a header alone.
            send(client, id, command as u16, REPLY, 0, &[], &[]).unwrap();
        }
        let bytes = device.join().unwrap();
        let wanted = [vec![3000_u32 as u8; 3000], vec![1092_u32 as u8; 1092], vec![908_u32 as u8; 908]].concat();
        assert_eq!(bytes, wanted);
    });
}

#[test]
fn wrong_answers_and_none_are_faults() {
    let timeout = Duration::from_millis(500);
    with_client(1, "{}", timeout, |client, mut port, _| {
        let mut read = || {
            let mut bytes = [0; 8];
            let fault = port.hold().read_bytes(Iova::new(0x1008), &mut bytes).err();
            fault.map_or(Ok(bytes), |fault| Err(fault.at.bits()))
        };
        let place = |at: u64, count: u64| Body::default().u64(at).u64(count);
        let right = place(0x1008, 8).bytes(b"unbroken");
        let (dma_read, dma_write) = (Command::DmaRead as u16, Command::DmaWrite as u16);
        for (offset, command, flags, body) in [
            (0, dma_read, REPLY | ERROR, Body::default()),
            (0, dma_read, REPLY, Body::default()),
            (0, dma_read, REPLY, place(0x1008, 8).bytes(b"short")),
            (0, dma_read, REPLY, place(0x1008, 8).bytes(b"much longer")),
            (0, dma_read, REPLY, place(0x1000, 8).bytes(b"8 before")),
            (0, dma_read, REPLY, place(0x1008, 9).bytes(b"8 is not")),
            // A count of 32 bits.
            (0, dma_read, REPLY, Body::default().u64(0x1008).u32(8).bytes(b"too soon").u32(0)),
            (0, dma_write, REPLY, place(0x1008, 8).bytes(b"8 bytes!")),
            // Of another question.
            (1, dma_read, REPLY, place(0x1008, 8).bytes(b"8 bytes!")),
        ] {
            let answer = thread::scope(|scope| {
                let reader = scope.spawn(&mut read);
                let (id, ..) = question(client);
                send(client, id.wrapping_add(offset), command, flags, 0, &body.0, &[]).unwrap();
                reader.join().unwrap()
            });
            assert_eq!(answer, Err(0x1008), "{:?}", body.0);
        }
        // None, and then too late: it is no answer to the next question, which is answered.
        let began = Instant::now();
        assert_eq!(read(), Err(0x1008));
        assert!(began.elapsed() >= timeout && began.elapsed() < LONG);
        let (late, ..) = question(client);
        send(client, late, dma_read, REPLY, 0, &place(0x1008, 8).bytes(b"too late").0, &[]).unwrap();
        thread::scope(|scope| {
            let reader = scope.spawn(&mut read);
            let (id, ..) = question(client);
            send(client, id, dma_read, REPLY, 0, &right.0, &[]).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(*b"unbroken"));
        });
    });
}

/// The unmap waits for the access, and the access for an answer behind the unmap.
#[test]
fn an_answer_behind_a_request_is_found() {
    with_client(1, "{}", LONG, |client, mut port, memory| {
        let device = thread::spawn(move || port.hold().read_bytes(Iova::new(0x1000), &mut [0; 4]));
        let (id, command, at, count, _) = question(client);
        let unmap = Body::default().u32(24).u32(0).u64(0x1000).u64(4096);
        send(client, 8, Command::DmaUnmap as u16, 0, 0, &unmap.0, &[]).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert!(!device.is_finished(), "the unmap waits for it");
        let answer = Body::default().u64(at).u64(count).bytes(b"done");
        send(client, id, command as u16, REPLY, 0, &answer.0, &[]).unwrap();
        let unmapped = receive(client).unwrap().unwrap();
        assert_eq!((unmapped.id, unmapped.flags), (8, REPLY));
        device.join().unwrap().unwrap();
        assert_eq!(memory.mappings(), 1);
    });
}

/// Some clients of that version have the bytes of such a message elsewhere.
#[test]
fn a_client_of_version_0_0_is_asked_for_nothing() {
    with_client(0, "{}", LONG, |_, mut port, _| {
        assert!(port.hold().read_bytes(Iova::new(0x1000), &mut [0; 4]).is_err());
    });
}

#[test]
fn a_client_that_goes_away_ends_an_access() {
    let (client, stream) = UnixStream::pair().unwrap();
    let memory = ClientMemory::new();
    let (served, mut port) = (memory.clone(), memory.port());
    let server = thread::spawn(move || serve(stream, &mut Large(vec![0]), &served));
    for (command, body) in [(Command::Version, Body::default().u32(1 << 16)), (Command::DmaMap, page(1))] {
        send(&client, 1, command as u16, 0, 0, &body.0, &[]).unwrap();
        receive(&client).unwrap().unwrap();
    }
    let began = Instant::now();
    let device = thread::spawn(move || port.hold().write_bytes(Iova::new(0x1000), &[0; 4]));
    question(&client);
    drop(client);
    assert!(device.join().unwrap().is_err());
    server.join().unwrap().unwrap();
    assert!(began.elapsed() < Duration::from_secs(3), "the timeout is longer");
}

/// Large messages both ways at once, more than sockets hold, while memory is mapped and unmapped.
#[test]
fn both_sides_may_send_at_once() {
    const ROUNDS: usize = 100;
    let (client, stream) = UnixStream::pair().unwrap();
    let memory = ClientMemory::new();
    let (served, ports) = (memory.clone(), [memory.port(), memory.port()]);
    let server = thread::spawn(move || serve(stream, &mut Large(vec![0; 1 << 20]), &served));
    let bus = UserBus::over(client).unwrap();
    let buf = buffer(&AnonHeap::new(), 4 * MAX_PUSHED, 0);
    let (mapping, at) = map(&bus, &[&buf], Access::RW);
    thread::scope(|scope| {
        for (mut port, at) in ports.into_iter().zip([at, at + 2 * MAX_PUSHED as u64]) {
            scope.spawn(move || {
                for round in 0..ROUNDS as u8 {
                    let mut bytes = vec![round; 2 * MAX_PUSHED];
                    port.hold().write_bytes(Iova::new(at), &bytes).unwrap();
                    bytes.fill(0xff);
                    port.hold().read_bytes(Iova::new(at), &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == round));
                }
            });
        }
        for half in [0, 1 << 19] {
            let bus = &bus;
            scope.spawn(move || {
                for round in 0..ROUNDS as u8 {
                    let mut bytes = vec![round; 1 << 19];
                    bus.write_region(0, half, &bytes).unwrap();
                    bytes.fill(0xff);
                    bus.read_region(0, half, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == round));
                }
            });
        }
        for _ in 0..ROUNDS {
            let other = buffer(&AnonHeap::new(), 4096, 0);
            drop(map(&bus, &[&other], Access::READ));
        }
    });
    drop((mapping, bus));
    server.join().unwrap().unwrap();
}
