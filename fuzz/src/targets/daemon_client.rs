//! A client of a hostile daemon: whatever it answers, the client gets errors, and ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::Access;
use dmalane_card::Card;
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_daemon::wire::{ANSWER, ClientRequest, FAILED, MAX_MESSAGE, VERSION, message};
use dmalane_daemon::{Client, ClientOptions, status};
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{Heap, MemfdHeap, Mmio, PageKind, Registrar, SharedBuf};
use crate::{send, socket_path};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, recv, shutdown,
    socket_with,
};

const ANSWERS: usize = 200;

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let path = socket_path("daemon-client");
    let _ = std::fs::remove_file(&path);
    let kind = SocketType::SEQPACKET;
    let listener = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("a path")).expect("a free path");
    listen(&listener, 4).expect("a listener");
    std::thread::scope(|scope| {
        let daemon = scope.spawn(|| {
            let mut daemon = Daemon { input: FuzzInput::new(data), answers: 0, files: files() };
            while let Ok(client) = accept(&listener) {
                daemon.serve(&client);
            }
        });
        use_it(&path);
        // Ends the wait for a further client.
        let _ = shutdown(&listener, Shutdown::Both);
        daemon.join().expect("the daemon of this target does not panic");
    });
    let _ = std::fs::remove_file(&path);
}

/// All that a client does.
fn use_it(path: &std::path::Path) {
    let options = ClientOptions { timeout: Duration::from_secs(2), ..ClientOptions::new(path) };
    let _ = status(&ClientOptions::new(path));
    let Ok(client) = Client::connect(options) else { return };
    let _ = (client.read32(BAR_REGISTERS, regs::ID), client.read32(9, u64::MAX));
    let _ = client.write32(BAR_REGISTERS, regs::channel(0, regs::CH_DOORBELL), 1);
    let _ = client.write_bytes(BAR_MEMORY, 4096, &[1; 5000]);
    let buf = MemfdHeap::starting_at(PageKind::Base).allocate(16 << 10).expect("a memfd").share();
    if let Ok(buffer) = client.buffer(4096) {
        // As long as it says, and it stays so.
        assert!(buffer.len() >= 4096);
        buffer.as_volatile_slice().fill(1);
    }
    let mapping = client.pin(&buf.reference()).and_then(|pinned| client.map(pinned, Access::RW));
    if let Ok(mapping) = &mapping {
        assert_eq!(mapping.span().len(), buf.len() as u64);
    }
    let _ = (client.progress(), client.wait(Duration::from_micros(10)));
    drop(mapping);
    if let Ok(card) = Card::open(Arc::new(client.clone()), &MemfdHeap::starting_at(PageKind::Base)) {
        drop(card.queue(0).map(|mut queue| dmalane_queue::Queue::poll(&mut queue, &mut Vec::new())));
    }
    let _ = client.gone();
}

struct Files {
    page: SharedBuf,
    odd: OwnedFd,
    kick: OwnedFd,
}

fn files() -> Files {
    let page = MemfdHeap::starting_at(PageKind::Base).allocate(8192).expect("a memfd").share();
    let odd = rustix::fs::memfd_create("odd", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    Files { page, odd, kick }
}

struct Daemon<'a> {
    input: FuzzInput<'a>,
    answers: usize,
    files: Files,
}

impl Daemon<'_> {
    fn serve(&mut self, client: &OwnedFd) {
        let mut buffer = [0; MAX_MESSAGE];
        // Closing the connection is the answer when there is nothing left to say.
        while let Ok((_, n)) = recv(client, &mut buffer[..], RecvFlags::empty()) {
            self.answers += 1;
            if n == 0 || self.answers > ANSWERS || self.input.is_empty() {
                break;
            }
            let Ok((seqno, request)) = ClientRequest::decode(&buffer[..n]) else { panic!("the client is not hostile") };
            self.answer(client, seqno, &request);
        }
    }

    fn answer(&mut self, client: &OwnedFd, seqno: u64, request: &ClientRequest<'_>) {
        let Self { input, files, .. } = self;
        let how = input.u8();
        let word = |n: u64| n.to_le_bytes();
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        let mut body = match request {
            ClientRequest::Hello { .. } => {
                let version = u64::from(VERSION) | 1 << 32;
                [version, 7, 1 << 21, 1 << 22, 1 << 20, 4].map(word).concat()
            }
            ClientRequest::Map { .. } => word(input.number() & !4095).to_vec(),
            ClientRequest::Status { .. } => vec![input.u8(); 72 + usize::from(input.u8()) * 8],
            ClientRequest::Read { offset, .. } => {
                let value = match *offset {
                    regs::ID => regs::ID_VALUE,
                    regs::VERSION => regs::VERSION_VALUE,
                    regs::CHANNELS => 1,
                    regs::RING_LOG2_MAX => 8,
                    regs::LEN_MAX => regs::MAX_LEN,
                    regs::DDR_LEN => 1 << 20,
                    _ => u32::from(input.u8()),
                };
                word(value.into()).to_vec()
            }
            _ => Vec::new(),
        };
        let mut opcode = request.opcode() | ANSWER;
        match how {
            0..0xa0 => {}
            0xa0..0xb0 => {
                opcode = FAILED;
                body = input.bytes(usize::from(how & 15) * 4).to_vec();
            }
            0xb0..0xc0 => body.truncate(usize::from(input.u8()) % (body.len() + 1)),
            0xc0..0xd0 => {
                let len = usize::from(input.u8());
                body.extend(input.bytes(len));
            }
            0xd0..0xe0 if !body.is_empty() => {
                let at = usize::from(input.u8()) % body.len();
                body[at] = input.u8();
            }
            0xe0..0xe8 => fds.clear(),
            0xe8..0xf0 => fds.extend([files.odd.as_fd(), files.kick.as_fd()]),
            0xf0..0xf4 => fds = vec![files.odd.as_fd(); usize::from(input.u8() % 80)],
            0xf4..0xf8 => fds.iter_mut().for_each(|fd| *fd = files.odd.as_fd()),
            _ => opcode = input.u32(),
        }
        let mut answer = message(opcode, if how == 0xff { input.number() } else { seqno }, &body);
        if how == 0xfe {
            let len = usize::from(input.u16()) % 5000;
            answer = input.bytes(len).to_vec();
        }
        if how == 0xfd {
            // The register page is the daemon's to write at any time.
            files.page.as_volatile_slice().fill(input.u8());
        }
        send(client, &answer, &fds);
    }
}
