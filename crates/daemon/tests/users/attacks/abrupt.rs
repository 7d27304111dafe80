//! Attacks by clients that stop, die, or come and leave many at a time.

use super::*;

use rustix::net::Shutdown;
use rustix::process::{Pid, Signal, kill_process};

/// Ends one direction of a socket whose function has work, and leaves it so until its turn comes again.
pub(super) fn half_closed(path: &Path) -> ! {
    let memfd = sparse(MIB);
    rustix::fs::fallocate(&memfd, FallocateFlags::empty(), 0, MIB as u64).unwrap();
    let new = || {
        let socket = opened(path).ok()?;
        send_map_of(&socket, &memfd, MIB);
        let _all_sent = (0..8).all(|_| send(&socket, &ClientRequest::Status { first: 0 }, &[]));
        Some(socket)
    };
    with_all(
        4,
        || (Shutdown::Read, new()),
        |(how, socket)| {
            *how = if *how == Shutdown::Read { Shutdown::Write } else { Shutdown::Read };
            if let Some(socket) = socket {
                let _ = rustix::net::shutdown(&*socket, *how);
            }
            *socket = new();
        },
    )
}

/// Opens functions over all connections, and leaves with all at once.
pub(super) fn function_bursts(path: &Path) -> ! {
    let together = std::sync::Barrier::new(connections());
    with_all(
        connections(),
        || (),
        |()| {
            let function = opened(path);
            together.wait();
            drop(function);
        },
    )
}

/// Processes that are killed while the card copies their memory.
pub(super) fn killed_clients(path: &Path) -> ! {
    if is_child() {
        let mut copies = Copies::new(client(path, 2 << 20), MIB, 4, |copy| copy);
        println!("copying");
        loop {
            copies.run(Duration::from_secs(1));
        }
    }
    with_all(
        4,
        || (),
        |()| {
            let mut process = child(Stdio::null(), 1);
            process.wait_for("copying");
            std::thread::sleep(Duration::from_millis(2));
        },
    )
}

/// Processes that are stopped and go on: in the middle of copies and of requests, with answers that they have not read.
pub(super) fn stopped_clients(path: &Path) -> ! {
    if is_child() {
        let make = || (opened(path).ok(), Copies::new(client(path, 2 << 20), MIB, 4, |copy| copy));
        with_all(4, make, |(socket, copies)| {
            copies.run(Duration::from_millis(1));
            let Some(asking) = socket else { return *socket = opened(path).ok() };
            let sent = (0..16).filter(|_| send(asking, &ClientRequest::Status { first: 0 }, &[])).count();
            if sent < 16 || (0..12).any(|_| receive(asking).is_err()) {
                *socket = None;
            }
        });
    }
    let mut processes: Vec<Other> = (0..4).map(|_| child(Stdio::null(), (connections() / 8).max(4))).collect();
    processes.iter_mut().for_each(|process| drop(process.wait_for("attacking")));
    println!("attacking");
    for process in processes.iter().cycle() {
        for signal in [Signal::STOP, Signal::CONT] {
            kill_process(Pid::from_child(&process.0), signal).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    unreachable!()
}
