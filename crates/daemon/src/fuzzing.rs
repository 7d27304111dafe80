//! An entry point for fuzzers: a client that sends arbitrary messages.
//!
//! Accepts any bytes, panics when a guarantee is broken, and ends quickly. Only for fuzzing.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{Heap, MemfdHeap, PageKind, SharedBuf};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::config::{ClientLimits, Config};
use crate::connection::Connection;
use crate::state::{Peer, ServerState};
use crate::wire::{
    ClientRequest, ClientStatus, FAILED, FunctionFiles, MAX_FDS, MAX_MESSAGE, MapSegment, MessageHeader, VERSION,
};
use zerocopy::{FromBytes, FromZeros};

/// Most messages in one run.
const MESSAGES: usize = 64;
const BYTES: u64 = 1 << 20;

/// State that all runs share.
struct Fixed {
    state: ServerState,
    /// Buffers that a client may send.
    memfds: Vec<SharedBuf>,
    /// Files that the daemon must refuse.
    wrong: Vec<OwnedFd>,
    /// Of functions.
    files: FunctionFiles,
}

fn fixed() -> Fixed {
    let limits = ClientLimits { ddr: 2 << 20, hbm: 4 << 20, queues: 2, buffers: 4, bytes: BYTES };
    // A function and a touched block: what comes after that is refused.
    let memory = Some(4 << 20);
    let config = Config { ddr: 2 << 20, hbm: 4 << 20, limits, memory, user_percent: 100, ..Config::default() };
    let memfd = |len| MemfdHeap::starting_at(PageKind::Base).allocate(len).expect("a memfd").share();
    let odd = rustix::fs::memfd_create("odd", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::fs::fcntl_add_seals(&odd, SealFlags::SHRINK).expect("a seal");
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&unsealed, 8192).expect("a length");
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd");
    Fixed {
        state: ServerState::new(config).expect("a table"),
        memfds: [4096, 16 << 10, 64 << 10, 2 << 20].map(memfd).into(),
        wrong: vec![odd, unsealed, event],
        files: FunctionFiles::new().expect("files"),
    }
}

thread_local! {
    static FIXED: RefCell<Fixed> = RefCell::new(fixed());
}

/// Handles messages of one client: raw bytes, or requests with fields from the input, each with some descriptors.
///
/// # Panics
/// When an answer is malformed, a refusal changed anything, a client exceeds a limit, or resources leak.
pub fn fuzz_messages(data: &[u8]) {
    FIXED.with_borrow(|fixed| run(fixed, FuzzInput::new(data)));
}

fn run(fixed: &Fixed, mut input: FuzzInput<'_>) {
    let Fixed { state, memfds, wrong, files } = fixed;
    let peer = Peer { pid: 1, uid: 1, user: 1, admin: false };
    let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("a socket");
    let row = ClientStatus { client: 1, ..ClientStatus::new_zeroed() };
    let seat = state.table.sit(1, row).expect("a free seat");
    let mut connection = Connection::new(seat, 1, peer, socket.into()).expect("an epoll");
    if input.u8() & 1 == 0 {
        let hello = ClientRequest::Hello { min: VERSION, max: VERSION }.encode(1);
        connection.handle(state, &hello, &mut Vec::new());
        let open = ClientRequest::Open { ddr: 0, hbm: 0, queues: 0 }.encode(2);
        let mut files = files.fds().iter().map(|fd| fd.try_clone_to_owned().expect("a descriptor")).collect();
        connection.handle(state, &open, &mut files);
        assert_eq!(connection.errors, 0);
    }
    let mut iovas: Vec<u64> = Vec::new();
    for seqno in 3..3 + MESSAGES as u64 {
        if input.is_empty() {
            break;
        }
        let kind = input.u8() % 12;
        let mut segments = Vec::new();
        let count = if kind == 6 { usize::from(input.u8() % 4) } else { 0 };
        for _ in 0..count {
            let fd = u32::from(input.u8() % 4);
            segments.push(MapSegment {
                fd: fd.into(),
                reserved: 0.into(),
                offset: input.number().into(),
                len: input.number().into(),
            });
        }
        let request = match kind {
            0 => ClientRequest::Hello { min: input.u16().into(), max: input.u16().into() },
            1 => ClientRequest::Open { ddr: input.number(), hbm: input.number(), queues: u32::from(input.u8()) },
            2 => ClientRequest::Read { bar: input.u8() % 4, offset: u64::from(input.u16()) },
            // No worker runs the card's queues here, so register writes have no further effect.
            3 => ClientRequest::Write {
                bar: input.u8() % 4,
                offset: u64::from(input.u16()),
                value: u32::from(input.u16()),
            },
            4 => ClientRequest::WriteBytes { bar: input.u8() % 4, offset: input.number(), bytes: &[7; 64] },
            5 | 7 => ClientRequest::Unmap {
                iova: iovas.get(usize::from(input.u8())).copied().unwrap_or_else(|| input.number()),
            },
            6 => ClientRequest::Map { access: u32::from(input.u8()), segments: &segments },
            _ => ClientRequest::Status { first: input.number() },
        };
        let message = match kind {
            10 => {
                let len = usize::from(input.u16()) % (MAX_MESSAGE + 1);
                input.bytes(len).to_vec()
            }
            11 => {
                let mut bytes = request.encode(seqno);
                let at = usize::from(input.u8()) % bytes.len();
                bytes[at] ^= input.u8();
                bytes
            }
            _ => request.encode(seqno),
        };
        let mut fds = Vec::new();
        for _ in 0..if kind == 6 { input.u8() % 5 } else { u8::from(input.u8() == 1) } {
            let which = usize::from(input.u8());
            let fd = match which % 4 {
                0 => wrong[which / 4 % wrong.len()].try_clone(),
                _ => memfds[which / 4 % memfds.len()].export().expect("a memfd").try_clone_to_owned(),
            };
            fds.extend(fd);
        }
        assert!(fds.len() <= MAX_FDS);
        let before = connection.row().resources();
        let errors = connection.errors;
        let answer = connection.handle(state, &message, &mut fds);
        let header = well_formed(&answer);
        if connection.errors > errors {
            assert_eq!(header.opcode.get(), FAILED);
            assert_eq!(connection.row().resources(), before, "a refusal changes nothing");
        } else {
            let first = answer[size_of::<MessageHeader>()..].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
            match ClientRequest::decode(&message).map(|(_, request)| request) {
                Ok(ClientRequest::Map { .. }) => iovas.push(first),
                Ok(_) => {}
                Err(_) => panic!("{header:?} answers a malformed request"),
            }
        }
        let now = connection.row();
        assert!(
            now.buffers <= 4 && now.bytes <= BYTES && now.mappings <= 64 && now.ddr + now.hbm <= 6 << 20,
            "{now:?}"
        );
        let frames = connection.alarm.function.get().map_or(0, |f| f.host.stats().pinned_frames);
        assert!(now.mappings > 0 || frames == 0, "frames without a mapping");
    }
    let alarm = connection.alarm.clone();
    drop(connection);
    if let Some(function) = alarm.function.get() {
        assert_eq!(function.host.stats().pinned_frames, 0, "frames stay pinned");
    }
    assert_eq!(Arc::strong_count(&alarm), 1, "the function is still referenced");
    drop(alarm);
    let accounts = &state.accounts;
    let used = [&accounts.memory, &accounts.ddr, &accounts.hbm].map(|a| a.in_use(None));
    assert_eq!(used, [0; 3], "memory or card memory leaked");
    state.table.stand(seat);
}

fn well_formed(bytes: &[u8]) -> MessageHeader {
    assert!(bytes.len() <= MAX_MESSAGE);
    let (header, _) = MessageHeader::read_from_prefix(bytes).expect("a header");
    assert_eq!(header.size.get() as usize, bytes.len());
    header
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_input_is_handled() {
        dmalane_dma::fuzzing::smoke(300, super::fuzz_messages);
    }
}
