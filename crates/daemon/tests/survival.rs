//! Clients and daemons are killed during transfers: nothing leaks, and the survivor gets an error.
//!
//! The processes to be killed run this program with the same test; the environment variable with a socket marks them.

mod daemon;

use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::{Daemon, memfd_mappings, one, open_files, settles_at};
use dmalane_addr::Access;
use dmalane_card::{Card, CardQueue};
use dmalane_daemon::wire::Code;
use dmalane_daemon::{Client, ClientError, ClientLimits, ClientOptions, Config, Listener, Server};
use dmalane_dma::{BufferSlice, Heap, MemfdHeap, Mmio, Registrar, SharedBuf, error_chain};
use dmalane_queue::conformance::Random;
use dmalane_queue::{
    Cancelled, Completion, DeviceAddr, Direction, HostSlice, OpError, Operation, Queue, QueueAddr, Refusal, Registered,
    StopReason,
};

const SOCKET: &str = "DMALANE_TEST_SOCKET";
const MIB: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// Starts the same test as another process, and waits until it prints that it has begun.
fn spawn(what: &str, socket: &Path) -> (Child, impl BufRead + use<>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", what, "--nocapture", "--test-threads=1"]).env(SOCKET, socket);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("begun") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the child ended");
    }
    (child, lines)
}

/// A client with its card, queue and registered buffer.
struct Driven {
    client: Client,
    card: Card<Client>,
    queue: CardQueue<Client>,
    part: Option<BufferSlice>,
    via: Registered,
}

impl Driven {
    fn new(client: Client, len: usize) -> Self {
        let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
        let queue = card.queue(0).unwrap();
        let buf = MemfdHeap::new().allocate(len).unwrap().share();
        Self::with(client, card, queue, buf)
    }

    fn with(client: Client, card: Card<Client>, queue: CardQueue<Client>, buf: SharedBuf) -> Self {
        let via = Registered::new(&client, &buf, Access::RW).unwrap();
        Self { client, card, queue, part: Some(buf.into_slice()), via }
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::Card(self.card.layout().hbm.first()).advance(offset).unwrap()
    }

    fn copy(&mut self, direction: Direction) -> Result<(), OpError> {
        let part = self.part.take().unwrap();
        let operation = Operation::copy(direction, (part, self.via.clone()), self.at(0));
        let _ticket = self.queue.submit(operation).unwrap();
        let mut ended = Vec::new();
        while ended.is_empty() {
            self.queue.wait(&mut ended, LONG);
        }
        let Completion { operation, result, .. } = ended.remove(0);
        self.part = Some(operation.into_slice().unwrap());
        result
    }

    /// Writes new bytes to the card, reads them back and compares.
    fn round(&mut self, random: &mut Random) {
        let len = self.part.as_ref().unwrap().len();
        let block: Vec<u8> = random.bytes(4096);
        let write = |part: &mut BufferSlice, byte: u8| {
            for at in (0..len).step_by(4096) {
                let mut block = block.clone();
                block[0] = (at >> 12) as u8 ^ byte;
                part.write(at, &block).unwrap();
            }
        };
        write(self.part.as_mut().unwrap(), 0);
        self.copy(Direction::FromHost).unwrap();
        let fresh = vec![0xee; len];
        self.part.as_mut().unwrap().write(0, &fresh).unwrap();
        self.copy(Direction::ToHost).unwrap();
        let mut got = vec![0; len];
        self.part.as_ref().unwrap().read(0, &mut got).unwrap();
        for (i, there) in got.chunks(4096).enumerate() {
            assert!(there[0] == i as u8 && there[1..] == block[1..], "page {i}");
        }
    }
}

/// A client that moves bytes, cancels, maps and unmaps until it is killed.
fn client_to_be_killed(socket: &Path) -> ! {
    let client = Client::connect(ClientOptions::new(socket)).unwrap();
    let mut random = Random(client.number());
    let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
    let mut queues: Vec<_> = (0..card.channels()).map(|i| card.queue(i).unwrap()).collect();
    let at = DeviceAddr::Card(card.layout().ddr.first());
    let mut ready: Vec<HostSlice> = Vec::new();
    for i in 0..8 {
        let buf = match i % 2 {
            0 => client.buffer(MIB).unwrap(),
            _ => MemfdHeap::new().allocate(MIB).unwrap().share(),
        };
        let via = Registered::new(&client, &buf, Access::RW).unwrap();
        ready.push((buf.into_slice(), via).into());
    }
    println!("begun");
    let mut ended = Vec::new();
    let mut registered = Vec::new();
    loop {
        for queue in &mut queues {
            while let Some(host) = ready.pop() {
                let direction = if random.below(2) == 0 { Direction::FromHost } else { Direction::ToHost };
                let place = at.advance(random.below(64) * MIB as u64).unwrap();
                match queue.submit(Operation::copy(direction, host, place)) {
                    Ok(ticket) if random.below(16) == 0 => {
                        if let Cancelled::Removed(operation) = queue.cancel(ticket) {
                            ready.extend(operation.into_host());
                        }
                    }
                    Ok(_) => {}
                    Err(rejected) => {
                        assert_eq!(rejected.reason, Refusal::Full);
                        ready.extend(rejected.operation.into_host());
                        break;
                    }
                }
                if random.below(3) == 0 {
                    break;
                }
            }
            if random.below(4) == 0 {
                queue.wait(&mut ended, Duration::from_millis(1));
            } else {
                queue.poll(&mut ended);
            }
            for end in ended.drain(..) {
                ready.extend(end.operation.into_host());
            }
        }
        // Map and unmap other memory meanwhile.
        if random.below(64) == 0 {
            let buf = MemfdHeap::new().allocate(64 << 10).unwrap().share();
            registered.push(Registered::new(&client, &buf, Access::READ).unwrap());
            if registered.len() > 8 {
                registered.clear();
            }
        }
    }
}

/// Runs a daemon until it is killed.
fn daemon_to_be_killed(socket: &Path) {
    let listener = Listener::bind(socket, 0o600, false).unwrap();
    let server = Server::new(Config::default(), |event| println!("{}", event.text)).unwrap();
    let (_stop, stopped) = std::os::unix::net::UnixStream::pair().unwrap();
    println!("begun");
    server.run(listener, stopped.as_fd()).unwrap();
}

/// Kills 200 clients, or as many as `DMALANE_KILLS` says; `scripts/kill-clients` runs it longer.
#[test]
fn clients_are_killed_during_transfers() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        client_to_be_killed(Path::new(&socket));
    }
    let kills: u64 = std::env::var("DMALANE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let daemon = Daemon::start(Config::default());
    let (files, mappings) = (open_files(), memfd_mappings());
    let going = AtomicBool::new(true);
    let rounds = std::thread::scope(|s| {
        // Another client, whose bytes must not change.
        let other = s.spawn(|| {
            let mut driven = Driven::new(daemon.connect(), 512 << 10);
            let (mut random, mut rounds) = (Random(1), 0u64);
            while going.load(Ordering::Relaxed) {
                driven.round(&mut random);
                rounds += 1;
                std::thread::sleep(Duration::from_micros(200));
            }
            rounds
        });
        let mut random = Random(7);
        let (mut busy, start) = (0, Instant::now());
        for i in 0..kills {
            let (mut child, _lines) = spawn("clients_are_killed_during_transfers", &daemon.path);
            let pid = child.id();
            // Most while they move bytes, the others whenever it happens.
            if i % 4 > 0 {
                daemon.wait_for("a client moves bytes", |r| r.clients.iter().any(|c| c.pid == pid && c.moved() > 0));
            }
            std::thread::sleep(Duration::from_micros(random.below(4000)));
            busy += u64::from(daemon.status().clients.iter().any(|c| c.pid == pid && c.moved() > 0));
            child.kill().unwrap();
            child.wait().unwrap();
            let what = "the resources of a killed client are released";
            daemon.wait_for(what, |r| r.clients.iter().all(|c| c.pid != pid));
        }
        going.store(false, Ordering::Relaxed);
        let rounds = other.join().unwrap();
        println!(
            "{kills} killed in {:?}, {busy} during a transfer; another client completed {rounds} rounds",
            start.elapsed()
        );
        assert!(busy >= kills / 2, "{busy}");
        rounds
    });
    assert!(rounds > 1, "{rounds}");
    daemon.wait_until_empty();
    settles_at((files, mappings));
    daemon.end_empty();
}

/// A new connection, once the new daemon is there.
fn again(reconnect: impl Fn() -> Result<Client, ClientError>) -> Client {
    let start = Instant::now();
    loop {
        match reconnect() {
            Err(ClientError::Connect { .. } | ClientError::Disconnected(_)) if start.elapsed() < LONG => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.unwrap(),
        }
    }
}

fn is_disconnected(error: &dmalane_dma::Error) -> bool {
    matches!(error, dmalane_dma::Error::Backend(e) if matches!(e.downcast_ref(), Some(ClientError::Disconnected(_))))
}

/// Submits `count` copies and returns `count`.
fn many_in_flight(driven: &mut Driven, count: usize) -> usize {
    let mut rest = driven.part.take().unwrap();
    let size = rest.len() / count;
    for i in 0..count {
        let (part, more) = rest.split_at(size).unwrap();
        rest = more;
        let at = driven.at((i * size) as u64);
        let _ticket =
            driven.queue.submit(Operation::copy(Direction::FromHost, (part, driven.via.clone()), at)).unwrap();
    }
    driven.queue.flush();
    count
}

/// Processes that this one has forked.
fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

/// A process that has not ended; one that nobody has waited for has.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|fields| !fields.is_empty() && !fields.starts_with(['Z', 'X']))
}

#[test]
fn a_stopped_process_of_a_client_ends_with_the_daemon() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return daemon_to_be_killed(Path::new(&socket));
    }
    let _one = one();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (mut daemon, _lines) = spawn("a_stopped_process_of_a_client_ends_with_the_daemon", &path);
    let client = Client::connect(ClientOptions::new(&path)).unwrap();
    let [forker] = children(daemon.id())[..] else { panic!("one process that forks") };
    let [process] = children(forker)[..] else { panic!("one client") };
    let score = std::fs::read_to_string(format!("/proc/{process}/oom_score_adj")).unwrap();
    assert_eq!(score.trim(), "500", "it ends before the daemon when memory runs out");
    let pid = rustix::process::Pid::from_raw(process as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let start = Instant::now();
    while [forker, process].into_iter().any(lives) || client.gone().is_none() {
        assert!(start.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Its operations are neither ended nor lost when it goes on.
#[test]
fn a_daemon_that_is_stopped_is_lost_until_it_goes_on() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return daemon_to_be_killed(Path::new(&socket));
    }
    let _one = one();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (mut daemon, _lines) = spawn("a_daemon_that_is_stopped_is_lost_until_it_goes_on", &path);
    let timeout = Duration::from_secs(2);
    let client = Client::connect(ClientOptions { timeout, ..ClientOptions::new(&path) }).unwrap();
    let mut driven = Driven::new(client, MIB);
    let mut processes = vec![daemon.id()];
    let mut next = 0;
    while let Some(pid) = processes.get(next) {
        processes.extend(children(*pid));
        next += 1;
    }
    let all = |signal| {
        for pid in processes.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
            rustix::process::kill_process(pid, signal).unwrap();
        }
    };
    let mut ended = Vec::new();
    let (start, mut checked) = (Instant::now(), 0);
    // While it runs, one that has nothing to do for longer than the time limit is there.
    while start.elapsed() < timeout * 2 {
        driven.queue.wait(&mut ended, Duration::from_millis(100));
        checked += 1;
    }
    assert!(checked > 10 && driven.queue.halted().is_none());
    all(rustix::process::Signal::STOP);
    std::thread::sleep(Duration::from_millis(100)); // its threads go on for a moment
    let count = many_in_flight(&mut driven, 16);
    let start = Instant::now();
    while driven.queue.halted().is_none() {
        driven.queue.wait(&mut ended, Duration::from_millis(100));
        assert!(start.elapsed() < LONG);
    }
    assert!(start.elapsed() >= timeout && matches!(driven.queue.halted(), Some(StopReason::Lost(_))));
    assert_eq!((ended.len(), driven.queue.in_flight()), (0, count), "the card may still access the memory");
    assert!(!driven.queue.restart());
    assert!(driven.client.gone().is_none() && driven.client.buffer(MIB).is_ok());
    let start = Instant::now();
    let asked = driven.client.read32(0, 0);
    assert!(asked.is_err() && start.elapsed() < timeout, "nobody waits for it again: {asked:?}");
    all(rustix::process::Signal::CONT);
    while driven.queue.in_flight() > 0 {
        driven.queue.wait(&mut ended, Duration::from_millis(100));
        assert!(start.elapsed() < LONG);
    }
    assert_eq!(ended.len(), count);
    assert!(driven.queue.restart());
    driven.part = Some(ended.remove(0).operation.into_slice().unwrap());
    ended.clear();
    let count = many_in_flight(&mut driven, 1);
    while ended.len() < count {
        driven.queue.wait(&mut ended, LONG);
    }
    assert_eq!(ended[0].result, Ok(()));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

#[test]
fn a_daemon_is_killed_and_started_again() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return daemon_to_be_killed(Path::new(&socket));
    }
    let _one = one();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let files = open_files();
    let mut random = Random(3);
    let (mut child, mut lines) = spawn("a_daemon_is_killed_and_started_again", &path);
    let mut driven = Driven::new(Client::connect(ClientOptions::new(&path)).unwrap(), 64 * MIB);
    let mut fastest_drop = Duration::MAX;
    for round in 0..10 {
        let bytes = random.bytes(4096);
        driven.part.as_mut().unwrap().write(0, &bytes).unwrap();
        let count = many_in_flight(&mut driven, 64);
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        child.kill().unwrap();
        let start = Instant::now();
        let mut ended = Vec::new();
        while driven.queue.in_flight() > 0 {
            match round % 2 {
                0 => driven.queue.poll(&mut ended),
                _ => driven.queue.wait(&mut ended, LONG),
            };
            assert!(start.elapsed() < LONG);
        }
        child.wait().unwrap();
        // Each completes once; errors say what happened and what to do.
        assert_eq!(ended.len(), count);
        let mut whole: Option<BufferSlice> = None;
        for Completion { operation, result, .. } in ended {
            match result {
                Ok(()) => {}
                Err(OpError::Stopped(StopReason::Lost(why))) => {
                    let said = error_chain(&*why);
                    assert!(said.contains("is gone") && said.ends_with("open the device again"), "{said}");
                }
                Err(e) => panic!("{e}"),
            }
            let part = operation.into_slice().unwrap();
            whole = Some(match whole {
                None => part,
                Some(whole) => whole.join(part).unwrap(),
            });
        }
        let Driven { client, card, queue, via, .. } = driven;
        // All may have been done before. The process of this client ends after the daemon, and then its connection.
        while client.gone().is_none() {
            assert!(start.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(1));
        }
        let buf = whole.unwrap().into_whole().unwrap();
        let error = Registered::new(&client, &buf, Access::RW).map(drop).unwrap_err();
        assert!(is_disconnected(&error), "{error}");
        // The process that accepts connections ends after the daemon too, and until then the kernel takes them.
        loop {
            match Client::connect(ClientOptions::new(&path)).map(drop) {
                Err(ClientError::Connect { .. }) => break,
                Err(ClientError::Disconnected(_)) if start.elapsed() < LONG => {}
                other => panic!("no daemon is running: {other:?}"),
            }
        }
        let start = Instant::now();
        drop((queue, via));
        fastest_drop = fastest_drop.min(start.elapsed());
        assert_eq!(card.quarantined(), 0);
        drop(card);
        // A new daemon replaces the socket of the old one, and the client uses the same buffer.
        let (new, reconnected) = std::thread::scope(|s| {
            let reconnecting = s.spawn(|| again(|| Client::connect(ClientOptions::new(&path))));
            (spawn("a_daemon_is_killed_and_started_again", &path), reconnecting.join().unwrap())
        });
        (child, lines) = new;
        drop(client);
        let card = Card::open(Arc::new(reconnected.clone()), &MemfdHeap::new()).unwrap();
        let queue = card.queue(0).unwrap();
        let mut there = vec![0; 4096];
        buf.as_volatile_slice().read(&mut there);
        assert!(there == bytes, "the buffer keeps its contents");
        driven = Driven::with(reconnected, card, queue, buf);
        driven.copy(Direction::FromHost).unwrap();
        driven.part.as_mut().unwrap().write(0, &[0; 4096]).unwrap();
        driven.copy(Direction::ToHost).unwrap();
        driven.part.as_ref().unwrap().read(0, &mut there).unwrap();
        assert!(there == bytes);
    }
    // Each would wait for a second and more; and one of ten may wait for a processor as long.
    assert!(fastest_drop < Duration::from_millis(500), "no daemon to wait for: {fastest_drop:?}");
    drop(driven);
    child.kill().unwrap();
    child.wait().unwrap();
    drop((child, lines));
    assert_eq!(open_files(), files);
}

#[test]
fn a_daemon_that_shuts_down_stops_queues_first() {
    let mut daemon = Daemon::start(Config::default());
    let client = daemon.connect();
    let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new()).unwrap();
    let queue = card.queue(0).unwrap();
    let buf = client.buffer(16 * MIB).unwrap();
    buf.as_volatile_slice().write(b"stays");
    let mut driven = Driven::with(client, card, queue, buf);
    let count = many_in_flight(&mut driven, 16);
    daemon.stop();
    let mut ended = Vec::new();
    while driven.queue.in_flight() > 0 {
        driven.queue.wait(&mut ended, LONG);
    }
    assert_eq!(ended.len(), count);
    let mut bytes = [0; 5];
    ended.remove(0).operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"stays", "buffers keep their bytes");
    assert!(matches!(driven.client.gone(), Some(ClientError::Disconnected(_))));
}

#[test]
fn dropped_objects_are_released_in_the_daemon() {
    let daemon = Daemon::start(Config::default());
    let (files, mappings) = (open_files(), memfd_mappings());
    let client = daemon.connect();
    let row = |daemon: &Daemon| daemon.status().clients.into_iter().find(|c| c.client == client.number()).unwrap();
    let buf = client.buffer(MIB).unwrap();
    let via = Registered::new(&client, &buf, Access::RW).unwrap();
    // Two ranges of one memfd are one buffer.
    let own = MemfdHeap::new().allocate(MIB).unwrap().share();
    let ranges =
        [0..4096, 8192..16384].map(|r| Registered::of_range(&client, &own.reference(), r, Access::READ).unwrap());
    // Both in one mapping.
    let both = Registered::of_list(&client, &[&own, &buf], Access::RW).unwrap();
    assert_eq!(both.mapping().span().len(), 2 * MIB as u64);
    let now = row(&daemon);
    assert_eq!((now.buffers, now.mappings, now.bytes, now.errors), (2, 4, 2 * MIB as u64, 0));
    drop((via, both));
    let now = row(&daemon);
    assert_eq!((now.buffers, now.mappings, now.bytes), (1, 2, MIB as u64));
    drop(ranges);
    let now = row(&daemon);
    assert_eq!((now.buffers, now.mappings, now.bytes), (0, 0, 0));
    drop(buf);
    drop((client, own));
    daemon.wait_until_empty();
    settles_at((files, mappings));
    daemon.end_empty();
}

#[test]
fn completions_wake_a_waiter() {
    let daemon = Daemon::start(Config::default());
    let mut driven = Driven::new(daemon.connect(), MIB);
    let mut random = Random(5);
    for _ in 0..200 {
        let part = driven.part.take().unwrap();
        let operation = Operation::copy(Direction::FromHost, (part, driven.via.clone()), driven.at(0));
        let _ticket = driven.queue.submit(operation).unwrap();
        let mut ended = Vec::new();
        assert_eq!(driven.queue.wait(&mut ended, Duration::from_secs(60)), 1, "the call arrives");
        driven.part = Some(ended.remove(0).operation.into_slice().unwrap());
        // Shorter and longer than the worker spins.
        std::thread::sleep(Duration::from_micros(random.below(300)));
    }
    drop(driven);
    daemon.end_empty();
}

/// A mapping has as many segments and buffers as fit a message, not one less.
#[test]
fn a_mapping_is_of_as_many_buffers_as_fit_a_message() {
    let daemon = Daemon::start(Config::default());
    let client = daemon.connect();
    let buffer = || MemfdHeap::new().allocate(4096).unwrap().share();
    let pin = |buf: &SharedBuf| client.pin_range(&buf.reference(), 0..4096).unwrap();
    let one = buffer();
    for (buffers, segments, fits) in [(64, 64, true), (65, 65, false), (1, 128, true), (1, 129, false)] {
        let list = if buffers > 1 { (0..buffers).map(|_| pin(&buffer())).collect() } else { vec![] };
        let again = (list.len()..segments).map(|_| pin(&one));
        let list: Vec<_> = list.into_iter().chain(again).collect();
        let mapping = client.map_list(list, Access::RW);
        assert_eq!(mapping.map(|m| m.span().len()).ok(), fits.then_some(segments as u64 * 4096), "{segments}");
    }
    drop((client, one));
    daemon.end_empty();
}

#[test]
fn a_wait_for_the_card_says_whether_something_came() {
    let mut daemon = Daemon::start(Config::default());
    let client = daemon.connect();
    assert!(!client.wait(Duration::ZERO));
    daemon.stop();
    assert!(client.wait(LONG), "the end of the connection");
    assert!(!client.wait(LONG), "nothing comes after it");
}

#[test]
fn limits_are_enforced() {
    let limits = ClientLimits { ddr: 64 << 20, hbm: 64 << 20, queues: 2, buffers: 8, bytes: 16 << 20 };
    // One user may have all of it, since all clients here are of one user.
    let config = Config { ddr: 128 << 20, hbm: 256 << 20, limits, user_percent: 100, ..Config::default() };
    let daemon = Daemon::start(config);
    let refused = |options: ClientOptions| match Client::connect(options) {
        Err(ClientError::Refused { text, .. }) => text,
        other => panic!("{other:?}"),
    };
    assert!(refused(ClientOptions { ddr: 66 << 20, ..daemon.options() }).contains("a client may have 67108864"));
    assert!(refused(ClientOptions { queues: 3, ..daemon.options() }).contains("queues"));
    assert!(refused(ClientOptions { hbm: 5, ..daemon.options() }).contains("must be a multiple of 4 MiB"));
    let first = daemon.connect();
    let second = Client::connect(ClientOptions { hbm: 4 << 20, queues: 1, ..daemon.options() }).unwrap();
    assert_eq!(second.queues(), 1);
    let report = daemon.status();
    assert_eq!((report.ddr, report.hbm), ((128 << 20, 128 << 20), (68 << 20, 256 << 20)));
    let text = refused(daemon.options());
    assert!(text.contains("all clients use 134217728 of 134217728 (--ddr)") && text.contains("wait until"), "{text}");
    drop(second);
    daemon.wait_for("card memory is released", |r| r.ddr.0 == 64 << 20);
    let second = daemon.connect();
    // Buffers.
    let map = |len| {
        let buf = first.buffer(len).unwrap();
        Registered::new(&first, &buf, Access::RW)
    };
    assert!(map(17 << 20).is_err());
    let large = map(16 << 20).unwrap();
    assert!(map(1).is_err());
    drop(large);
    let many: Vec<_> = (0..8).map(|_| map(4096).unwrap()).collect();
    assert!(map(1).is_err());
    drop(many);
    // Clients.
    let third = dmalane_daemon::Client::connect(ClientOptions { ddr: 2 << 20, hbm: 4 << 20, ..daemon.options() });
    assert!(matches!(third, Err(ClientError::Refused { .. })), "no DDR");
    drop((first, second));
    daemon.end_empty();
}

#[test]
fn one_user_cannot_take_all_connections() {
    let small = |path: &Path| ClientOptions { ddr: 2 << 20, hbm: 4 << 20, queues: 1, ..ClientOptions::new(path) };
    let daemon = Daemon::start(Config { clients: 4, ..Config::default() });
    let three: Vec<_> = (0..3).map(|_| Client::connect(small(&daemon.path)).unwrap()).collect();
    match Client::connect(small(&daemon.path)) {
        Err(ClientError::Refused { code: Code::Quota, text }) => assert!(text.contains("--user-share"), "{text}"),
        other => panic!("{other:?}"),
    }
    // The operator can still request the status.
    daemon.wait_for("three", |r| r.clients.iter().filter(|c| c.queues == 1).count() == 3);
    drop(three);
    daemon.end_empty();
    let daemon = Daemon::start(Config { clients: 4, user_percent: 100, ..Config::default() });
    drop((0..4).map(|_| Client::connect(small(&daemon.path)).unwrap()).collect::<Vec<_>>());
    daemon.end_empty();
}

#[test]
fn one_user_cannot_take_all_card_memory() {
    let daemon = Daemon::start(Config::default());
    let mut most: Vec<_> = (0..24).map(|_| daemon.connect()).collect();
    match Client::connect(daemon.options()) {
        Err(ClientError::Refused { code: Code::Quota, text }) => assert!(text.contains("--user-share"), "{text}"),
        other => panic!("{other:?}"),
    }
    let report = daemon.status();
    assert_eq!((report.ddr, report.hbm), ((24 << 30, 32 << 30), (24 << 30, 32 << 30)));
    drop(most.pop());
    daemon.wait_for("card memory is released", |r| r.ddr.0 == 23 << 30);
    most.push(daemon.connect());
    drop(most);
    daemon.end_empty();
}

/// The kernel reports process 0 for a client in another namespace.
#[test]
fn a_client_outside_of_the_daemons_pid_namespace_is_served() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return daemon_to_be_killed(Path::new(&socket));
    }
    let _one = one();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let what = "a_client_outside_of_the_daemons_pid_namespace_is_served";
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", what, "--nocapture", "--test-threads=1"]).env(SOCKET, &path);
    let mut child = match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(e) => return println!("SKIPPED: no unshare: {e}"),
    };
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    if !lines.any(|line| line.contains("begun")) {
        let output = child.wait_with_output().unwrap();
        return println!("SKIPPED: no pid namespace: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut driven = Driven::new(Client::connect(ClientOptions::new(&path)).unwrap(), MIB);
    driven.round(&mut Random(5));
    let report = dmalane_daemon::status(&dmalane_daemon::ClientOptions::new(&path)).unwrap();
    let row = report.clients.iter().find(|c| c.client == driven.client.number()).unwrap();
    assert_eq!((row.pid, row.queues), (0, 2), "{row:?}");
    drop(driven);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Connecting to a process that listens but never accepts, such as a hanging daemon, ends with a timeout.
#[test]
fn connecting_to_a_daemon_that_never_accepts_times_out() {
    let _one = one();
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let address = SocketAddrUnix::new(&path).unwrap();
    let make = |flags| socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let listener = make(SocketFlags::CLOEXEC);
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let mut waiting = Vec::new();
    loop {
        let socket = make(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        match connect(&socket, &address) {
            Ok(()) => waiting.push(socket),
            Err(e) => break assert_eq!(e, rustix::io::Errno::AGAIN),
        }
    }
    let timeout = Duration::from_millis(200);
    let refused = Client::connect(ClientOptions { timeout, ..ClientOptions::new(&path) }).err();
    assert!(matches!(refused, Some(ClientError::Timeout { after, .. }) if after == timeout), "{refused:?}");
}

/// A refusal of a request that timed out comes late, and is not taken for the answer to a later one.
#[test]
fn a_late_refusal_is_of_its_own_request() {
    let _one = one();
    use dmalane_daemon::wire::{ANSWER, ClientRequest, HelloAnswer, StatusAnswer, VERSION, failed, message};
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
    use rustix::net::{accept, bind, listen, recv, send, socket};
    use zerocopy::{FromZeros, IntoBytes};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    let daemon = std::thread::spawn(move || {
        for ahead in [0, 1] {
            let client = accept(&listener).unwrap();
            let mut bytes = [0; 4096];
            // The number and the opcode of the next request.
            let mut next = || {
                let (n, _) = recv(&client, &mut bytes, RecvFlags::empty()).unwrap();
                let (number, request) = ClientRequest::decode(&bytes[..n]).unwrap();
                (number, request.opcode() | ANSWER)
            };
            let (earlier, opcode) = next();
            let hello = HelloAnswer { version: VERSION.into(), queues: 1.into(), client: 1.into() };
            send(&client, &message(opcode, earlier, hello.as_bytes()), SendFlags::empty()).unwrap();
            let (number, opcode) = next();
            send(&client, &failed(earlier, Code::Busy, "late"), SendFlags::empty()).unwrap();
            let status = StatusAnswer { uptime: 7, ..StatusAnswer::new_zeroed() };
            send(&client, &message(opcode, number + ahead, status.as_bytes()), SendFlags::empty()).unwrap();
        }
    });
    let options = ClientOptions { timeout: LONG, ..ClientOptions::new(&path) };
    assert_eq!(dmalane_daemon::status(&options).unwrap().uptime, 7);
    // Nor is an answer to a request that was not sent yet.
    let refused = dmalane_daemon::status(&options);
    assert!(matches!(refused, Err(ClientError::BadAnswer { .. })), "{refused:?}");
    daemon.join().unwrap();
}

#[test]
fn what_a_client_copies_is_counted_by_direction() {
    let daemon = Daemon::start(Config::default());
    let mut driven = Driven::new(daemon.connect(), MIB);
    for direction in [Direction::FromHost, Direction::ToHost, Direction::FromHost] {
        driven.copy(direction).unwrap();
    }
    let (client, mib) = (driven.client.number(), MIB as u64);
    daemon
        .wait_for("both counts", |r| r.clients.iter().any(|c| c.client == client && (c.h2c, c.c2h) == (2 * mib, mib)));
    drop(driven);
    daemon.end_empty();
}

#[test]
fn card_memory_of_a_client_is_zeros_whoever_had_it_before() {
    let limits = ClientLimits { ddr: 32 << 20, hbm: 32 << 20, ..ClientLimits::default() };
    // All of the card for one client at a time, so that the next one gets what this one had.
    let daemon = Daemon::start(Config { ddr: 32 << 20, hbm: 32 << 20, limits, ..Config::default() });
    for round in 0..3u8 {
        let mut driven = Driven::new(daemon.connect(), 32 * MIB);
        driven.part.as_mut().unwrap().write(0, &[0xee; 64 << 10]).unwrap();
        driven.copy(Direction::ToHost).unwrap();
        let mut got = vec![1; 32 * MIB];
        driven.part.as_ref().unwrap().read(0, &mut got).unwrap();
        assert!(got.iter().all(|b| *b == 0), "round {round}");
        got.fill(0x80 | round);
        driven.part.as_mut().unwrap().write(0, &got).unwrap();
        driven.copy(Direction::FromHost).unwrap();
        drop(driven);
        daemon.wait_until_empty();
    }
    daemon.end_empty();
}

#[test]
fn memory_is_limited_for_users_and_for_all() {
    let limits = ClientLimits { ddr: 64 << 20, ..ClientLimits::default() };
    let daemon = Daemon::start(Config { memory: Some(48 << 20), user_percent: 67, limits, ..Config::default() });
    let (files, mappings) = (open_files(), memfd_mappings());
    let mut driven = Driven::new(daemon.connect(), 8 * MIB);
    // Another client of the same user.
    let second = daemon.connect();
    let large = second.buffer(24 * MIB).unwrap();
    // Mapped buffers are the client's own memory.
    drop(Registered::new(&second, &large, Access::RW).unwrap());
    drop((large, second));
    // Card memory counts when it is touched.
    driven.copy(Direction::FromHost).unwrap();
    // Exceeding the limit on the card is an error of one operation.
    let mut failed = 0;
    for i in 1..6u64 {
        let (part, at) = (driven.part.take().unwrap(), driven.at(i * 8 * MIB as u64));
        let operation = Operation::copy(Direction::FromHost, (part, driven.via.clone()), at);
        let _ticket = driven.queue.submit(operation).unwrap();
        let mut ended = Vec::new();
        while ended.is_empty() {
            driven.queue.wait(&mut ended, LONG);
        }
        let Completion { operation, result, .. } = ended.remove(0);
        driven.part = Some(operation.into_slice().unwrap());
        failed += u32::from(result.is_err());
    }
    assert!((3..=4).contains(&failed), "{failed}");
    drop(driven);
    daemon.wait_until_empty();
    settles_at((files, mappings));
    daemon.end_empty();
}
