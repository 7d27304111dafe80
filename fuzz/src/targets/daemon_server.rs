//! A whole daemon with hostile clients at its socket: it answers others all the time, and keeps nothing of theirs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dmalane_daemon::wire::{ClientRequest, FunctionFiles, MAX_MESSAGE, MapSegment};
use dmalane_daemon::{ClientLimits, ClientOptions, Config, Listener, Server, status};
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{Heap, MemfdHeap, PageKind, SharedBuf};
use crate::{send, socket_path};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with};

const CLIENTS: usize = 4;
const MESSAGES: usize = 60;
const TIMEOUT: Duration = Duration::from_secs(10);

struct Fixed {
    path: PathBuf,
    memfds: Vec<SharedBuf>,
    wrong: Vec<OwnedFd>,
    files: FunctionFiles,
}

/// The daemon lives as long as the process.
fn fixed() -> &'static Fixed {
    static FIXED: OnceLock<Fixed> = OnceLock::new();
    FIXED.get_or_init(|| {
        let path = socket_path("daemon-server");
        let _ = std::fs::remove_file(&path);
        let limits = ClientLimits { ddr: 2 << 20, hbm: 4 << 20, queues: 2, buffers: 4, bytes: 1 << 20 };
        let config = Config {
            ddr: 8 << 20,
            hbm: 16 << 20,
            limits,
            clients: CLIENTS + 4,
            memory: Some(16 << 20),
            ..Config::default()
        };
        let listener = Listener::bind(&path, 0o600, false).expect("a listener");
        let server = Server::new(config, |_| ()).expect("a daemon");
        let (stop, stopped) = std::os::unix::net::UnixStream::pair().expect("a pair");
        std::mem::forget(stop);
        std::thread::spawn(move || server.run(listener, stopped.as_fd()).expect("the daemon runs"));
        let memfd = |len| MemfdHeap::starting_at(PageKind::Base).allocate(len).expect("a memfd").share();
        let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd");
        let files = FunctionFiles::new().expect("files");
        Fixed { path, memfds: [4096, 64 << 10, 2 << 20].map(memfd).into(), wrong: vec![unsealed, event], files }
    })
}

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let fixed = fixed();
    let input = &mut FuzzInput::new(data);
    let mut clients: [Option<OwnedFd>; CLIENTS] = Default::default();
    for seqno in 0..MESSAGES as u64 {
        if input.is_empty() {
            break;
        }
        let (which, kind) = (usize::from(input.u8()), input.u8());
        let Some(client) = &clients[which % CLIENTS] else {
            let client = connected(&fixed.path);
            if kind & 1 == 0 {
                send(&client, &ClientRequest::Hello { min: 1, max: 2 }.encode(1), &[]);
                send(&client, &ClientRequest::Open { ddr: 0, hbm: 0, queues: 0 }.encode(2), &fixed.files.fds());
            }
            clients[which % CLIENTS] = Some(client);
            continue;
        };
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        for _ in 0..input.u8() % 4 {
            let n = usize::from(input.u8());
            fds.push(match n % 4 {
                0 => fixed.wrong[n / 4 % fixed.wrong.len()].as_fd(),
                _ => fixed.memfds[n / 4 % fixed.memfds.len()].export().expect("a memfd"),
            });
        }
        let segment = |input: &mut FuzzInput<'_>| MapSegment {
            fd: u32::from(input.u8() % 3).into(),
            reserved: 0.into(),
            offset: input.number().into(),
            len: input.number().into(),
        };
        let message = match kind % 12 {
            0 => {
                // Away, with answers unread.
                clients[which % CLIENTS] = None;
                continue;
            }
            1 => {
                let len = usize::from(input.u16()) % MAX_MESSAGE;
                input.bytes(len).to_vec()
            }
            2 => vec![0; MAX_MESSAGE + 1],
            3 | 4 => {
                let segments: Vec<_> = (0..kind >> 6).map(|_| segment(input)).collect();
                ClientRequest::Map { access: u32::from(input.u8() % 4), segments: &segments }.encode(seqno)
            }
            5..=7 => ClientRequest::Unmap { iova: input.number() }.encode(seqno),
            8 => ClientRequest::Read { bar: 0, offset: u64::from(input.u16()) }.encode(seqno),
            9 => {
                let (offset, value) = (u64::from(input.u16() & 0x3ff), input.u32());
                ClientRequest::Write { bar: 0, offset, value }.encode(seqno)
            }
            10 => ClientRequest::WriteBytes { bar: 2, offset: input.number(), bytes: &[7; 64] }.encode(seqno),
            _ => ClientRequest::Status { first: input.number() }.encode(seqno),
        };
        send(client, &message, &fds);
        if kind & 0x10 != 0 {
            // Some answers are read; who reads none is disconnected.
            let _ = recv(client, &mut [0; MAX_MESSAGE][..], RecvFlags::DONTWAIT);
        }
    }
    // Others get answers while the clients are still there, and everything is given back when they are gone.
    let began = Instant::now();
    status(&ClientOptions::new(&fixed.path)).expect("the daemon answers");
    assert!(began.elapsed() < Duration::from_secs(2), "it took {:?}", began.elapsed());
    clients.iter_mut().for_each(|client| drop(client.take()));
    loop {
        let now = status(&ClientOptions::new(&fixed.path)).expect("the daemon answers");
        if now.clients.len() <= 1 && now.ddr.0 == 0 && now.hbm.0 == 0 {
            break;
        }
        assert!(began.elapsed() < TIMEOUT, "kept for nobody: {now:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn connected(path: &std::path::Path) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket");
    connect(&socket, &SocketAddrUnix::new(path).expect("a path")).expect("the daemon accepts");
    socket
}
