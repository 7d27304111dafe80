//! Attacks by the words and descriptors that a client shares with the daemon.

use super::*;

/// A function, with its register page, its kick and the end of its call.
fn opened_whole(path: &Path) -> (OwnedFd, [OwnedFd; 3]) {
    let files = FunctionFiles::new().unwrap();
    let open = ClientRequest::Open { ddr: 2 << 20, hbm: 4 << 20, queues: 1 };
    let once = || {
        let socket = dial(path)?;
        ask(&socket, &ClientRequest::Hello { min: 1, max: 9 }, &[]).ok()?;
        ask(&socket, &open, &files.fds()).ok()?;
        Some(socket)
    };
    let socket = std::iter::repeat_with(once).find_map(|socket| socket).unwrap();
    let page = files.page.export().unwrap().try_clone_to_owned().unwrap();
    let FunctionFiles { kick, call, .. } = files;
    (socket, [page, kick, call])
}

/// Kicks the daemon although there is no work, and fills the kick's counter.
pub(super) fn kicks(path: &Path) -> ! {
    with_all(
        connections(),
        || opened_whole(path),
        |(_, [_, kick, _])| {
            for add in [1_u64; 1000].into_iter().chain([u64::MAX - 2000]) {
                let _ = rustix::io::write(&*kick, &add.to_ne_bytes());
            }
            let _ = rustix::io::read(&*kick, &mut [0; 8]);
        },
    )
}

/// Writes all words of its register page, those of the daemon too.
pub(super) fn scribbled_pages(path: &Path) -> ! {
    let make = || {
        let (socket, [page, kick, _]) = opened_whole(path);
        (socket, kick, SharedBuf::import(page).unwrap())
    };
    with_all(4, make, |(_, kick, words)| {
        for value in 0..1000_u32 {
            for word in [0, 64, 128, 4096] {
                words.as_volatile_slice().store_u32(word, value.wrapping_mul(0x9e37_79b9)).unwrap();
            }
        }
        let _ = rustix::io::write(&*kick, &1_u64.to_ne_bytes());
    })
}

/// Gives its register pages back to the kernel, while the daemon looks at each of them for work.
pub(super) fn punched_registers(path: &Path) -> ! {
    with_all(
        4,
        || opened_whole(path),
        |function| {
            let (socket, [page, kick, _]) = &*function;
            punch(page, 8192);
            let _ = rustix::io::write(kick, &1_u64.to_ne_bytes());
            if ask(socket, &ClientRequest::Status { first: 0 }, &[]).is_err() {
                *function = opened_whole(path);
            }
        },
    )
}

/// Changes its doorbell between values that ask for nothing, for little, and for more than the ring has.
pub(super) fn flipping_doorbells(path: &Path) -> ! {
    let make = || Ring::new(client(path, 2 << 20), 4, MIB, |host| vec![to_card(host, 0, 64)]);
    with_all(connections(), make, |ring| {
        for _ in 0..1000 {
            for doorbell in [0, 16, 1 << 31, u32::MAX, 8] {
                let _ = ring.set(regs::CH_DOORBELL, doorbell);
            }
        }
        if !ring.restart() {
            *ring = make();
        }
    })
}

/// Asks to be called after each copy of a few bytes, and reads no call.
pub(super) fn unread_calls(path: &Path) -> ! {
    let make = || Ring::new(client(path, 2 << 20), 8, MIB, |host| vec![to_card(host, 0, 64)]);
    with_all(4, make, |ring| {
        let head = ring.register(regs::CH_HEAD);
        for more in 1..=256 {
            ring.set(regs::CH_INTERRUPT, 1).unwrap();
            ring.set(regs::CH_DOORBELL, head.wrapping_add(more)).unwrap();
        }
    })
}

/// A queue that asks to be called after each copy, where thousands look at the other end of its call: the daemon wakes
/// all of them.
pub(super) fn call_waiters(path: &Path) -> ! {
    use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
    let make = || {
        let (socket, [page, kick, call]) = opened_whole(path);
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate(3 << 12).unwrap().share();
        buf.as_volatile_slice().fill(0);
        send_map_of(&socket, &buf.export().unwrap().try_clone_to_owned().unwrap(), buf.len());
        let at = u64::from_le_bytes(*receive_body(&socket).unwrap().first_chunk().unwrap());
        for (i, word) in Descriptor::from(to_card(at + 8192, 0, 64)).encode().into_iter().cycle().take(512).enumerate()
        {
            buf.as_volatile_slice().store_u64(8 * i, word).unwrap();
        }
        let (ring, completions) =
            ([regs::CH_RING, regs::CH_RING + 4], [regs::CH_COMPLETIONS, regs::CH_COMPLETIONS + 4]);
        let words = [(regs::CH_RING_LOG2, 7), (ring[0], at), (ring[1], at >> 32), (completions[0], at + 4096)];
        for (register, value) in words.into_iter().chain([(completions[1], at >> 32), (regs::CH_CONTROL, 1)]) {
            let offset = regs::channel(0, register);
            ask(&socket, &ClientRequest::Write { bar: BAR_REGISTERS, offset, value: value as u32 }, &[]).unwrap();
        }
        let waiter = || {
            let waiter = create(CreateFlags::CLOEXEC).ok()?;
            add(&waiter, &call, EventData::new_u64(0), EventFlags::IN).ok().map(|()| waiter)
        };
        let waiters: Vec<OwnedFd> = (0..4000).map_while(|_| waiter()).collect();
        (socket, SharedBuf::import(page).unwrap(), kick, call, 0, buf, waiters)
    };
    let mut all: Vec<_> = (0..4).map(|_| make()).collect();
    println!("attacking");
    loop {
        for (_, page, kick, call, doorbell, ..) in &mut all {
            let called = rustix::net::recv(&*call, &mut [0; 8], rustix::net::RecvFlags::DONTWAIT).is_ok();
            if called || *doorbell == 0 {
                *doorbell += 1;
                for (word, value) in [(128, 1), (0, *doorbell)] {
                    page.as_volatile_slice().swap_u32(word, value).unwrap();
                }
                let _ = rustix::io::write(&*kick, &1_u64.to_ne_bytes());
            }
        }
    }
}
