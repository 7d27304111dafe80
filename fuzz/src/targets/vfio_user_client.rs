//! A client of a hostile device over vfio-user: whatever the device answers, the bus gives errors, and ends.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dmalane_addr::Access;
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{Heap, MemfdHeap, Mmio, PageKind, Registrar, SharedBuf};
use crate::send;
use dmalane_vfio_user::UserBus;

const ANSWERS: usize = 200;
const REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        scope.spawn(|| Device { input: FuzzInput::new(data), stream: theirs, files: files(), mapped: 0 }.serve());
        use_it(ours);
    });
}

/// All that a driver does.
fn use_it(stream: UnixStream) {
    let Ok(bus) = UserBus::over(stream) else { return };
    let _ = bus.id();
    for region in 0..9 {
        let len = bus.region_len(region);
        for area in bus.mapped_areas(region).to_vec() {
            assert!(area.start < area.end && area.end <= len, "{area:?} of a region of {len} bytes");
            let mut bytes = [0; 16];
            let _ = bus.read_region(region, area.end.saturating_sub(16), &mut bytes);
            let _ = bus.write_region(region, area.start, &bytes);
        }
        let mut bytes = [0; 64];
        let _ = bus.read_region(region, 0, &mut bytes);
        let _ = bus.write_region(region, len.saturating_sub(8), &[1; 8]);
        assert!(bus.read_region(region, len, &mut [0]).is_err(), "beyond the end of region {region}");
    }
    let _ = (bus.read32(0, 0), bus.write32(0, 4, 1), bus.write_bytes(2, 8, &[1; 100]));
    // Memory that a device does not give back is leaked with its descriptor: after a thousand there are none.
    let Ok(buf) = MemfdHeap::starting_at(PageKind::Base).allocate(16 << 10) else { return };
    let buf = buf.share();
    let mapping = bus.pin(&buf.reference()).and_then(|pinned| bus.map(pinned, Access::RW));
    let before = bus.mapped_bytes();
    assert!(before == if mapping.is_ok() { buf.len() as u64 } else { 0 });
    let _ = (bus.progress(), bus.wait(Duration::from_micros(10)));
    let _ = bus.reset();
    drop(mapping);
    assert_eq!(bus.mapped_bytes(), 0);
}

struct Files {
    memory: SharedBuf,
    unsealed: OwnedFd,
}

fn files() -> Files {
    let memory = MemfdHeap::starting_at(PageKind::Base).allocate(64 << 10).expect("a memfd").share();
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&unsealed, 64 << 10).expect("a length");
    Files { memory, unsealed }
}

struct Device<'a> {
    input: FuzzInput<'a>,
    stream: UnixStream,
    files: Files,
    /// Where the client has mapped memory.
    mapped: u64,
}

impl Device<'_> {
    /// Closing the connection is the answer when there is nothing left to say.
    fn serve(mut self) {
        for _ in 0..ANSWERS {
            let mut header = [0; 16];
            if self.input.is_empty() || self.stream.read_exact(&mut header).is_err() {
                return;
            }
            let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
            let len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
            let mut body = vec![0; len.checked_sub(16).expect("the client is not hostile")];
            if self.stream.read_exact(&mut body).is_err() {
                return;
            }
            if let (2, Some(at)) = (half(2), body.get(16..24)) {
                self.mapped = u64::from_le_bytes(at.try_into().expect("eight bytes"));
            }
            if !self.answer(half(0), half(2), &body) {
                return;
            }
        }
    }

    /// Asks for memory of the client, and reads its answer. False when there is none.
    fn ask(&mut self) -> bool {
        let Self { input, stream, mapped, .. } = self;
        let at = if input.u8() < 200 { mapped.wrapping_add(u64::from(input.u16() % 20_000)) } else { input.number() };
        let count = if input.u8() < 200 { u64::from(input.u16()) } else { input.number() };
        let (writes, cut) = (input.u8() & 1 == 1, input.u8() == 1);
        let mut body = [at.to_le_bytes(), count.to_le_bytes()].concat();
        body.resize(16 + if writes { count.min(4096) as usize } else { 0 } - usize::from(cut), 7);
        let head = [3, 0, 11 + u8::from(writes), 0];
        let words = [16 + body.len() as u32, 0, 0].map(u32::to_le_bytes).concat();
        send(&*stream, &[&head[..], &words, &body].concat(), &[]);
        let mut header = [0; 16];
        if stream.read_exact(&mut header).is_err() {
            return false;
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        assert_eq!((&header[..4], word(8) & REPLY, word(8) & ERROR != 0), (&head[..], REPLY, word(12) != 0));
        let wanted = if word(12) != 0 { 0 } else { 16 + if writes { 0 } else { count as usize } };
        assert_eq!(word(4) as usize, 16 + wanted, "{count} bytes at {at:#x}");
        let within = at >= *mapped && count <= 16 << 10 && at - *mapped <= (16 << 10) - count;
        assert!(word(12) != 0 || within || count == 0, "{count} bytes at {at:#x}");
        stream.read_exact(&mut vec![0; wanted]).is_ok()
    }

    /// False for an answer after which the client would wait for more, until it gives up after ten seconds.
    fn answer(&mut self, id: u16, command: u16, request: &[u8]) -> bool {
        let how = self.input.u8();
        if (0xf1..0xff).contains(&how) && !self.ask() {
            return false;
        }
        let Self { input, stream, files, .. } = self;
        let words = |list: &[u32]| list.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        let mut body = match command {
            1 => [&words(&[1 << 16])[..], b"{}\0"].concat(),
            4 => words(&[16, 2, u32::from(input.u8() % 12), 5]),
            5 => {
                // Flags, one capability of areas, and the file.
                let (flags, more) = (input.u8(), input.u8());
                let (len, areas) = (input.number() & 0xf_ffff, u32::from(more % 4));
                let first = words(&[200, u32::from(flags & 15), request.get(8).copied().unwrap_or(0).into(), 32]);
                let sizes = [len.to_le_bytes(), [0; 8]].concat();
                let list = words(&[1 | 1 << 16, u32::from(more >> 5) * 16, areas, 0]);
                let pairs = (0..areas).flat_map(|_| [input.number(), input.number()]).flat_map(u64::to_le_bytes);
                let pairs: Vec<u8> = pairs.collect();
                match more & 0x1c {
                    0 => {}
                    4 => fds.push(files.unsealed.as_fd()),
                    _ => fds.push(files.memory.export().expect("a memfd")),
                }
                [first, sizes, list, pairs].concat()
            }
            7 => words(&[16, 1, 2, u32::from(input.u8())]),
            9 => {
                let count = request.get(12..16).map_or(0, |n| u32::from_le_bytes([n[0], n[1], n[2], n[3]]));
                let read = vec![input.u8(); count.min(1 << 16) as usize];
                [&request[..request.len().min(16)], &read].concat()
            }
            10 => request[..request.len().min(16)].to_vec(),
            _ => request.to_vec(),
        };
        let (mut id, mut command, mut flags, mut error) = (id, command, REPLY, 0);
        match how {
            0..0xb0 => {}
            0xb0..0xc0 => (flags, error) = (REPLY | ERROR, u32::from(input.u8()) << (how & 15)),
            0xc0..0xd0 => body.truncate(usize::from(input.u8()) % (body.len() + 1)),
            0xd0..0xd8 => {
                let len = usize::from(input.u8());
                body.extend(input.bytes(len));
            }
            0xd8..0xe8 if !body.is_empty() => {
                let at = usize::from(input.u8()) % body.len();
                body[at] = input.u8();
            }
            0xe8..0xec => fds = vec![files.unsealed.as_fd(); usize::from(input.u8() % 20)],
            0xec..0xee => id ^= 1,
            0xee..0xf0 => command ^= 1,
            0xf0 => flags = input.u32(),
            _ => {}
        }
        let mut message = [id.to_le_bytes(), command.to_le_bytes()].concat();
        let len = 16 + body.len() as u32;
        message.extend(words(&[if how == 0xff { input.u32() } else { len }, flags, error]));
        message.extend(body);
        send(&*stream, &message, &fds);
        how != 0xff
    }
}
