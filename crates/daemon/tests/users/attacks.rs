//! Attacks of a hostile user with 48 connections.

mod abrupt;
mod files;
mod words;

use super::*;

use dmalane_addr::Iova;
use dmalane_card::regs::{self, BAR_MEMORY};
use dmalane_card::{CompletionEntry, Descriptor, Task};
use dmalane_dma::{Mapping, Mmio, SharedBuf};

const GIB: usize = 1 << 30;

/// Runs as the hostile user until it is killed.
type Attack = fn(&Path) -> !;

/// So many of the attacks are none: they show what is left beside work that harms nobody, or needs no daemon.
pub(crate) const COMPARISONS: usize = 5;

/// By name.
pub(crate) const ATTACKS: &[(&str, Attack)] = &[
    ("spinning", spinning),
    ("copying", copying),
    ("freeing", freeing),
    ("neighbour", neighbour),
    ("crowd", crowd),
    ("mixed", mixed),
    ("reconnects", reconnects),
    ("broken-messages", broken_messages),
    ("status-flood", status_flood),
    ("map-churn", map_churn),
    ("scattered-maps", scattered_maps),
    ("iotlb-misses", iotlb_misses),
    ("byte-rows", byte_rows),
    ("zero-pitch", zero_pitch),
    ("fences", fences),
    ("cancelled-bytes", cancelled_bytes),
    ("empty-doorbells", empty_doorbells),
    ("idle-functions", idle_functions),
    ("resets", resets),
    ("first-touches", first_touches),
    ("punched-pages", punched_pages),
    ("large-punches", large_punches),
    ("failing-copies", failing_copies),
    ("late-differences", late_differences),
    ("blocking-closes", blocking_closes),
    ("poll-waiters", poll_waiters),
    ("refused-peers", refused_peers),
    ("gigabyte-punches", gigabyte_punches),
    ("pauses", pauses),
    ("returns", returns),
    ("mappings", files::mappings),
    ("busy-files", files::busy_files),
    ("growing-files", files::growing_files),
    ("huge-pages", files::huge_pages),
    ("unmap-bursts", files::unmap_bursts),
    ("punched-rings", files::punched_rings),
    ("touched-everywhere", touched_everywhere),
    ("kicks", words::kicks),
    ("scribbled-pages", words::scribbled_pages),
    ("punched-registers", words::punched_registers),
    ("flipping-doorbells", words::flipping_doorbells),
    ("unread-calls", words::unread_calls),
    ("call-waiters", words::call_waiters),
    ("half-closed", abrupt::half_closed),
    ("function-bursts", abrupt::function_bursts),
    ("killed-clients", abrupt::killed_clients),
    ("stopped-clients", abrupt::stopped_clients),
];

/// Connections of the hostile user: fewer in the test that only looks whether others are served.
fn connections() -> usize {
    std::env::var(CLIENTS).map_or(48, |n| n.parse().unwrap())
}

/// Makes all connections, and then acts on them in turn, in `threads` threads.
fn with_all<T: Send>(threads: usize, make: impl Fn() -> T, act: impl Fn(&mut T) + Sync) -> ! {
    let mut all: Vec<T> = (0..connections()).map(|_| make()).collect();
    println!("attacking");
    let act = &act;
    std::thread::scope(|s| {
        for some in all.chunks_mut(connections() / threads) {
            s.spawn(move || {
                loop {
                    some.iter_mut().for_each(act);
                }
            });
        }
    });
    unreachable!()
}

/// A function with a ring of its own, whose slots have the same descriptors again and again.
pub(crate) struct Ring {
    client: Client,
    log2: u32,
    words: Vec<u64>,
    /// Of the ring with its completions, and of the data.
    memory: [(Mapping, SharedBuf); 2],
}

impl Ring {
    /// A ring of 2^`log2` slots, with the descriptors that `make` makes for `len` bytes of mapped memory at an address.
    pub(crate) fn new(client: Client, log2: u32, len: usize, make: impl Fn(u64) -> Vec<Task>) -> Self {
        let mapped = |len| {
            let buf = client.buffer(len).unwrap();
            (client.map(client.pin(&buf.reference()).unwrap(), Access::RW).unwrap(), buf)
        };
        let first = (Descriptor::BYTES << log2).next_multiple_of(4096);
        let memory = [mapped(first + (CompletionEntry::BYTES << log2)), mapped(len)];
        let [at, host] = memory.each_ref().map(|(mapping, _)| mapping.span().first().bits());
        let words = make(host).into_iter().flat_map(|task| Descriptor::from(task).encode()).collect();
        let this = Self { client, log2, words, memory };
        this.write_descriptors();
        let set = |register, value| this.set(register, value).unwrap();
        set(regs::CH_RING_LOG2, log2);
        for (register, at) in [(regs::CH_RING, at), (regs::CH_COMPLETIONS, at + first as u64)] {
            set(register, at as u32);
            set(register + 4, (at >> 32) as u32);
        }
        set(regs::CH_CONTROL, 1);
        this
    }

    fn write_descriptors(&self) {
        for (i, word) in self.words.iter().cycle().take(4 << self.log2).enumerate() {
            self.memory[0].1.as_volatile_slice().store_u64(8 * i, *word).unwrap();
        }
    }

    fn set(&self, register: u64, value: u32) -> Result<(), dmalane_dma::Error> {
        self.client.write32(BAR_REGISTERS, regs::channel(0, register), value)
    }

    fn register(&self, register: u64) -> u32 {
        self.client.read32(BAR_REGISTERS, regs::channel(0, register)).unwrap()
    }

    /// Starts the queue again if it has halted; false when the connection has ended.
    fn restart(&self) -> bool {
        let read = |register| self.client.read32(BAR_REGISTERS, regs::channel(0, register));
        let stopped = || loop {
            match read(regs::CH_STATUS) {
                Ok(0) => return true,
                Ok(_) => std::thread::yield_now(),
                Err(_) => return false,
            }
        };
        match read(regs::CH_STATUS) {
            Ok(1) => true,
            Ok(_) => self.set(regs::CH_CONTROL, 0).is_ok() && stopped() && self.set(regs::CH_CONTROL, 1).is_ok(),
            Err(_) => false,
        }
    }

    /// The card has done all.
    fn is_empty(&self) -> bool {
        self.register(regs::CH_HEAD) == self.register(regs::CH_DOORBELL)
    }

    /// Has the card do all of the ring once more.
    pub(crate) fn fill(&self) {
        assert!(self.try_fill(), "the connection has ended");
    }

    /// The same; false when the connection has ended.
    fn try_fill(&self) -> bool {
        let head = self.client.read32(BAR_REGISTERS, regs::channel(0, regs::CH_HEAD));
        head.is_ok_and(|head| self.set(regs::CH_DOORBELL, head.wrapping_add(1 << self.log2)).is_ok())
    }
}

/// A copy of `len` bytes from this IOVA to an offset of the card's memory.
pub(crate) fn to_card(host: u64, offset: u64, len: u32) -> Task {
    let card = START.advance(offset).unwrap();
    Task::Copy { direction: Direction::FromHost, host: Iova::new(host), card, len }
}

/// A client; tried again for a while where what an earlier one had is not free yet.
pub(crate) fn client(path: &Path, ddr: u64) -> Client {
    let (start, timeout) = (Instant::now(), Duration::from_secs(60));
    loop {
        match Client::connect(ClientOptions { ddr, hbm: 4 << 20, queues: 1, timeout, ..ClientOptions::new(path) }) {
            Ok(client) => return client,
            Err(e) => assert!(start.elapsed() < timeout, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Gives the first bytes of a memory back to the kernel.
fn punch(memory: &impl AsFd, len: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(memory, flags, 0, len as u64).unwrap();
}

/// A process that takes part in this attack with these connections, and ends with this thread.
fn child(input: impl Into<Stdio>, connections: usize) -> Other {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(std::env::args_os().skip(1)).stdin(input).env(CLIENTS, connections.to_string());
    command.env(PARENT, std::process::id().to_string());
    Other::new(command)
}

/// True in a process that [`child`] has started.
fn is_child() -> bool {
    let Ok(parent) = std::env::var(PARENT) else { return false };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if now != Some(parent) {
        std::process::exit(1);
    }
    true
}

/// Has all connections do such operations again and again.
fn operating(path: &Path, len: usize, parts: usize, make: impl Fn(Operation) -> Operation) -> ! {
    let make_one = || Copies::new(client(path, 16 << 20), len, parts, &make);
    with_all(4, make_one, |copies| drop(copies.run(Duration::from_millis(1))))
}

/// A thread for each connection that needs no daemon.
fn spinning(_: &Path) -> ! {
    with_all(connections(), || (), |()| std::hint::spin_loop())
}

/// The same, but each copies a mebibyte of its own memory, which pushes what others copy out of the caches.
fn copying(_: &Path) -> ! {
    with_all(
        connections(),
        || (vec![1_u8; MIB], vec![0_u8; MIB]),
        |(from, to)| {
            std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
        },
    )
}

/// Takes a gigabyte of memory and gives it back, as [`gigabyte_punches`] does, but has nothing copied.
fn freeing(_: &Path) -> ! {
    let memory = rustix::fs::memfd_create("freeing", MemfdFlags::CLOEXEC).unwrap();
    println!("attacking");
    loop {
        take_gigabyte(&memory);
        free_gigabyte(&memory);
    }
}

/// Copies with four copies of 1 MiB in flight over one connection, as the other user does.
fn neighbour(path: &Path) -> ! {
    let mut copies = Copies::new(client(path, 16 << 20), MIB, 4, |copy| copy);
    println!("attacking");
    loop {
        copies.run(Duration::from_millis(100));
    }
}

/// The same over all connections, of which four copy at a time, for a millisecond.
fn crowd(path: &Path) -> ! {
    operating(path, MIB, 4, |copy| copy)
}

/// Copies 96 MiB over all connections, and pauses for 5 ms, for which it is owed something.
fn pauses(path: &Path) -> ! {
    let make = || Ring::new(client(path, 2 << 20), 4, MIB, |host| vec![to_card(host, 0, 128 << 10)]);
    let all: Vec<Ring> = (0..connections()).map(|_| make()).collect();
    in_bursts(&all, Duration::from_millis(5))
}

/// Copies 2 MiB, and comes back while others pay for what they had meanwhile.
fn returns(path: &Path) -> ! {
    let ring = Ring::new(client(path, 2 << 20), 5, MIB, |host| vec![to_card(host, 0, 64 << 10)]);
    in_bursts(&[ring], Duration::from_micros(100))
}

/// Has the card do all of these rings, and pauses, again and again.
fn in_bursts(all: &[Ring], pause: Duration) -> ! {
    println!("attacking");
    loop {
        all.iter().for_each(Ring::fill);
        while !all.iter().all(Ring::is_empty) {
            std::thread::sleep(Duration::from_micros(50));
        }
        std::thread::sleep(pause);
    }
}

/// Touches card memory, maps memory without pages, asks for the status, and copies.
fn mixed(path: &Path) -> ! {
    let (touching, mapping, asking, copying) = (8, 16, 8, 16);
    // Before this user owes anything: a queue has to start within a second.
    let mut all: Vec<_> = (0..copying).map(|_| Copies::new(client(path, 16 << 20), MIB, 4, |copy| copy)).collect();
    std::thread::scope(|s| {
        s.spawn(move || {
            loop {
                for _ in 0..touching {
                    let shape = Shape { row: 1, rows: 64, host_pitch: 65, device_pitch: 2 << 20 };
                    let mut copies = Copies::new(client(path, 128 << 20), 4096, 1, |copy| copy.shaped(shape));
                    copies.run(Duration::from_millis(1));
                }
            }
        });
        s.spawn(move || {
            loop {
                // Those before may wait until this user has paid, and count until then.
                let sockets: Vec<OwnedFd> = (0..mapping).filter_map(|_| opened(path).ok()).collect();
                for socket in &sockets {
                    let _sent = send_map(socket, 64 * MIB);
                }
            }
        });
        s.spawn(move || {
            let sockets: Vec<OwnedFd> = (0..asking).filter_map(|_| opened(path).ok()).collect();
            for socket in sockets.iter().cycle() {
                let _ = ask(socket, &ClientRequest::Status { first: 0 }, &[]);
            }
        });
        s.spawn(move || {
            println!("attacking");
            loop {
                for copies in &mut all {
                    copies.run(Duration::from_millis(1));
                }
            }
        });
    });
    unreachable!()
}

/// Opens functions and leaves at once.
fn reconnects(path: &Path) -> ! {
    with_all(connections(), || opened(path).ok(), |function| *function = opened(path).ok())
}

/// Sends messages that are cut short, too long, or carry descriptors for nothing, and reads no answers.
fn broken_messages(path: &Path) -> ! {
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    with_all(
        4,
        || opened(path).unwrap(),
        |socket| {
            let whole = ClientRequest::Status { first: 0 }.encode(1);
            let sent = [&whole[..20], &[0; MAX_MESSAGE + 1], &[0]].map(|bytes| {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                rustix::net::send(&*socket, bytes, flags) != Err(Errno::PIPE)
            });
            if sent.contains(&false) || !send(socket, &ClientRequest::Unmap { iova: 0 }, &[event.as_fd(); 60]) {
                opened(path).into_iter().for_each(|new| *socket = new);
            }
        },
    )
}

/// Asks for the status sixteen times before it reads the answers.
fn status_flood(path: &Path) -> ! {
    with_all(
        connections(),
        || opened(path).unwrap(),
        |socket| {
            assert!((0..16).all(|_| send(socket, &ClientRequest::Status { first: 0 }, &[])));
            (0..16).for_each(|_| drop(receive(socket)));
        },
    )
}

/// Maps and unmaps a buffer.
fn map_churn(path: &Path) -> ! {
    let make = || {
        let client = client(path, 2 << 20);
        let buf = client.buffer(2 * MIB).unwrap();
        (client, buf)
    };
    with_all(connections(), make, |(client, buf): &mut (Client, SharedBuf)| {
        drop(client.map(client.pin(&buf.reference()).unwrap(), Access::RW).unwrap());
    })
}

/// Maps lists of as many segments as a message has, each a page, in reverse order.
fn scattered_maps(path: &Path) -> ! {
    let pages = MAX_SEGMENTS as u64;
    let fd = touched(MAX_SEGMENTS << 12);
    let page = |i: u64| MapSegment { fd: 0.into(), reserved: 0.into(), offset: (i << 12).into(), len: 4096.into() };
    let segments: Vec<MapSegment> = (0..pages).rev().map(page).collect();
    with_all(
        connections(),
        || opened(path).ok(),
        |function| {
            let map = ClientRequest::Map { access: 3, segments: &segments };
            // Until it may have no more mappings.
            while function.as_ref().is_some_and(|socket| ask(socket, &map, &[fd.as_fd()]).is_ok()) {}
            *function = opened(path).ok();
        },
    )
}

/// Reads short rows, each from another page.
fn iotlb_misses(path: &Path) -> ! {
    let shape = Shape { row: 64, rows: 1024, host_pitch: 4096, device_pitch: 64 };
    operating(path, 1023 * 4096 + 64, 1, |copy| copy.shaped(shape))
}

/// Fills rows of one byte.
fn byte_rows(path: &Path) -> ! {
    let shape = Shape { row: 1, rows: 1 << 20, host_pitch: 0, device_pitch: 2 };
    operating(path, 4096, 4, |_| Operation::fill(START, 1 << 20, 7).shaped(shape))
}

/// Copies the same page 16384 times to the same place.
fn zero_pitch(path: &Path) -> ! {
    let shape = Shape { row: 4096, rows: 1 << 14, host_pitch: 0, device_pitch: 0 };
    operating(path, 4096, 4, |copy| copy.shaped(shape))
}

/// Waits for nothing, 64 times at once.
fn fences(path: &Path) -> ! {
    operating(path, 64, 64, |_| Operation::fence())
}

/// Submits copies of a byte and takes them back.
fn cancelled_bytes(path: &Path) -> ! {
    let make = || Copies::new(client(path, 2 << 20), 1, 64, |copy| copy);
    with_all(4, make, |copies| {
        let submit = |operation| copies.queue.submit(operation).unwrap();
        let tickets: Vec<_> = copies.ready.drain(..).map(submit).collect();
        copies.queue.flush();
        for ticket in tickets {
            if let Cancelled::Removed(operation) = copies.queue.cancel(ticket) {
                copies.ready.push(operation);
            }
        }
        let mut ended = Vec::new();
        while copies.queue.in_flight() > 0 {
            copies.queue.wait(&mut ended, Duration::from_secs(1));
        }
        copies.ready.extend(ended.into_iter().map(|completion| completion.operation));
    })
}

/// Rings although there is no work.
fn empty_doorbells(path: &Path) -> ! {
    let make = || {
        let client = client(path, 2 << 20);
        (client.clone(), Copies::new(client, 64, 1, |copy| copy))
    };
    with_all(4, make, |(client, _)| {
        client.write32(BAR_REGISTERS, regs::channel(0, regs::CH_DOORBELL), 0).unwrap();
        std::thread::yield_now();
    })
}

/// Has functions without work, with as many queues as a client may have by default.
fn idle_functions(path: &Path) -> ! {
    let make = || Client::connect(ClientOptions { ddr: 2 << 20, hbm: 4 << 20, queues: 2, ..ClientOptions::new(path) });
    let _all: Vec<Client> = (0..connections()).map(|_| make().unwrap()).collect();
    println!("attacking");
    loop {
        std::thread::park();
    }
}

/// Resets its functions, and has their translations forgotten.
fn resets(path: &Path) -> ! {
    with_all(
        connections(),
        || client(path, 2 << 20),
        |client| {
            for register in [regs::CONTROL, regs::MMU_INVALIDATE] {
                client.write32(BAR_REGISTERS, register, 1).unwrap();
            }
        },
    )
}

/// Writes a byte to each block of its card memory by message, and then connects again.
fn first_touches(path: &Path) -> ! {
    with_all(
        connections(),
        || client(path, 32 << 20),
        |one| {
            (0..16).for_each(|i| one.write_bytes(BAR_MEMORY, i << 21, &[1]).unwrap());
            *one = client(path, 32 << 20);
        },
    )
}

/// Has the card write a byte to each block of its memory, and then connects again.
fn touched_everywhere(path: &Path) -> ! {
    let shape = Shape { row: 1, rows: 64, host_pitch: 65, device_pitch: 1 << 20 };
    let make = || Copies::new(client(path, 64 << 20), 4096, 1, |copy| copy.shaped(shape));
    with_all(4, make, |copies| {
        copies.run(Duration::from_micros(1));
        *copies = make();
    })
}

/// Gives the pages of a mapped buffer back to the kernel before the card copies them.
fn punched_pages(path: &Path) -> ! {
    let make = || Copies::new(client(path, 16 << 20), MIB, 4, |copy| copy);
    with_all(4, make, |copies| {
        punch(&copies.memory, 4 << 20);
        if copies.run_while_it_works(Duration::from_micros(1)).is_none() {
            *copies = make();
        }
    })
}

/// Gives much memory back to the kernel while the card copies it: who touches it then waits for that.
fn large_punches(path: &Path) -> ! {
    let make = || Copies::new(client(path, 16 << 20), 4 * MIB, 4, |copy| copy);
    with_all(4, make, |copies| {
        if !copied_while(copies, |memory| punch(memory, 16 << 20)) {
            *copies = make();
        }
    })
}

/// The same with a gigabyte: who touches a page of it waits until the kernel has freed all.
fn gigabyte_punches(path: &Path) -> ! {
    const PARTS: usize = 8;
    let make = || Copies::new(client(path, 1 << 30), GIB / PARTS, PARTS, |copy| copy);
    let mut copies = make();
    println!("attacking");
    loop {
        take_gigabyte(&copies.memory);
        if !copied_while(&mut copies, free_gigabyte) {
            copies = make();
        }
    }
}

/// Has the card copy all parts, and does something to their memory meanwhile; false when the queue has stopped.
fn copied_while(copies: &mut Copies, act: impl FnOnce(&OwnedFd)) -> bool {
    let all: Vec<Operation> = copies.ready.drain(..).collect();
    let submitted = all.into_iter().all(|operation| copies.queue.submit(operation).is_ok());
    copies.queue.flush();
    act(&copies.memory);
    submitted && copies.run_while_it_works(Duration::from_micros(1)).is_some()
}

fn take_gigabyte(memory: &impl AsFd) {
    rustix::fs::fallocate(memory, FallocateFlags::empty(), 0, GIB as u64).unwrap();
}

fn free_gigabyte(memory: &impl AsFd) {
    punch(memory, GIB);
}

/// Connects beyond the limit of clients, and is refused.
fn refused_peers(path: &Path) -> ! {
    let greeted = || dial(path).filter(|socket| ask(socket, &ClientRequest::Hello { min: 1, max: 9 }, &[]).is_ok());
    let all: Vec<OwnedFd> = std::iter::from_fn(greeted).collect();
    assert!(all.len() >= connections());
    with_all(4, || (), |()| drop(dial(path).map(|socket| receive(&socket))))
}

/// Compares 1 MiB that differs in the last byte.
fn late_differences(path: &Path) -> ! {
    let make = || {
        let copies = Copies::new(client(path, 16 << 20), MIB, 4, |copy| match copy.work {
            Work::Copy { host, at, .. } => Operation::compare(host, at),
            _ => unreachable!("a copy"),
        });
        for part in 1..=4 {
            rustix::io::pwrite(&copies.memory, &[1], (part * MIB - 1) as u64).unwrap();
        }
        copies
    };
    with_all(4, make, |copies| drop(copies.run(Duration::from_millis(1))))
}

/// Copies 1 MiB up to an end that is not mapped, with a ring of its own.
fn failing_copies(path: &Path) -> ! {
    let make = || Ring::new(client(path, 2 << 20), 6, MIB, |host| vec![to_card(host + 4096, 0, 1 << 20)]);
    with_all(4, make, |ring| ring.fill())
}

/// Asks for the status, while many threads poll each of its sockets thousands of times: an answer wakes all of them.
fn poll_waiters(path: &Path) -> ! {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let make = || {
        let socket = Arc::new(opened(path).unwrap());
        for _ in 0..4 {
            let socket = socket.clone();
            std::thread::spawn(move || {
                let mut fds = vec![PollFd::new(&socket, PollFlags::IN); 15_000];
                let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
                // For a limit of 1024 descriptors, fewer.
                while poll(&mut fds, Some(&timeout)) == Err(Errno::INVAL) && fds.len() > 1 {
                    fds.truncate(fds.len() / 2);
                }
                while !fds[0].revents().contains(PollFlags::HUP) && poll(&mut fds, Some(&timeout)).is_ok() {}
            });
        }
        socket
    };
    with_all(4, make, |socket| {
        if !send(socket, &ClientRequest::Status { first: 0 }, &[]) || receive(socket).is_err() {
            *socket = make();
        }
    })
}

/// Sends descriptors whose close blocks.
fn blocking_closes(path: &Path) -> ! {
    with_all(
        connections(),
        || (opened(path).unwrap(), Vec::new()),
        |(socket, peers)| {
            let (blocking, peer) = lingering(1).pop().unwrap();
            peers.push(peer);
            if !send(socket, &ClientRequest::Status { first: 0 }, &[blocking.as_fd()]) {
                opened(path).into_iter().for_each(|new| *socket = new);
            }
            // Once the daemon has dropped its reference, this is the last one, and blocks.
            drop(blocking);
        },
    )
}
