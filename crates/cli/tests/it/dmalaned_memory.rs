//! The daemon's memory: under attack, in control groups, what it uses stays what it accounts for, and the kernel kills
//! none of its processes; clients that come and go leave nothing.
//!
//! The attacker is this program again, in a group of its own; environment variables tell it what to do.

use std::collections::BTreeSet;
use std::error::Error;
use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use dmalane::addr::Access;
use dmalane::card::Card;
use dmalane::daemon::wire::{ClientRequest, FAILED, FunctionFiles, MAX_MESSAGE, MapSegment};
use dmalane::daemon::{Client, ClientOptions, can_watch_memory, status};
use dmalane::dma::{MemfdHeap, SharedBuf, error_chain};
use dmalane::queue::{DeviceAddr, Direction, Operation, Queue, Registered};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use serde_json::Value;

use crate::group::{Group, Version};

/// The daemon's socket, for the attacker.
const SOCKET: &str = "DMALANE_TEST_SOCKET";
/// The attack, for the attacker.
const ATTACK: &str = "DMALANE_TEST_ATTACK";
/// Rounds of each attack: 20, or as many as this variable says.
const ROUNDS: &str = "DMALANE_MEMORY_ROUNDS";

const MIB: usize = 1 << 20;
/// Limits of the groups of daemon and attacker.
const LIMITS: [u64; 2] = [600 << 20, 200 << 20];
/// How much more the daemon may use than before the attack and than card memory that clients have got since.
const BOUND: u64 = 16 << 20;
/// Time after which something that is waited for does not come.
const LONG: Duration = Duration::from_secs(60);
/// Descriptors that the attacker keeps at most.
const KEPT: usize = 512;

/// Runs one round; the error says why the daemon has ended it.
type Round = fn(&mut Attacker) -> Result<(), Box<dyn Error>>;

const ATTACKS: [(&str, Round); 4] = [
    ("holes", Attacker::maps_holes),
    ("punched", Attacker::punches),
    ("retouched", Attacker::touches_again),
    ("descriptors", Attacker::keeps_descriptors),
];

struct Attacker {
    path: std::path::PathBuf,
    kept: Vec<OwnedFd>,
    socket: Option<OwnedFd>,
}

impl Attacker {
    /// Runs the rounds of an attack, and waits to be killed with what it has.
    fn run(path: &Path) -> ! {
        let name = std::env::var(ATTACK).unwrap();
        let (_, round) = ATTACKS.into_iter().find(|(known, _)| *known == name).unwrap();
        let mut this = Self { path: path.to_owned(), kept: Vec::new(), socket: None };
        let (mut refused, mut reasons) = (0, BTreeSet::new());
        for done in 1..=rounds() {
            if let Err(e) = round(&mut this) {
                (refused, this.socket) = (refused + 1, None);
                reasons.extend((reasons.len() < 4).then(|| error_chain(&*e)));
            }
            println!("round {done}");
        }
        this.socket = None;
        println!("done: {refused} rounds were refused: {reasons:?}");
        loop {
            std::thread::park();
        }
    }

    fn keep(&mut self, fd: OwnedFd) {
        if self.kept.len() == KEPT {
            self.kept.clear();
        }
        self.kept.push(fd);
    }

    /// Maps and unmaps 100 MiB of holes, and keeps the descriptor.
    fn maps_holes(&mut self) -> Result<(), Box<dyn Error>> {
        let fd = memfd(100 * MIB);
        self.keep(fd.try_clone()?);
        self.map_and_unmap(&fd, 100 * MIB)
    }

    /// As 64 files, each with one page.
    fn keeps_descriptors(&mut self) -> Result<(), Box<dyn Error>> {
        let mut refused = Ok(());
        for _ in 0..64 {
            let fd = memfd(MIB);
            rustix::io::pwrite(&fd, &[1], 0)?;
            self.keep(fd.try_clone()?);
            refused = refused.and(self.map_and_unmap(&fd, MIB));
        }
        refused
    }

    /// Maps 100 MiB that it has touched and gives the pages back; then the card reads all of it.
    fn punches(&mut self) -> Result<(), Box<dyn Error>> {
        let mapped = MappedBuffer::new(&self.path, 100 * MIB)?;
        self.keep(mapped.fd.try_clone()?);
        mapped.punch()?;
        mapped.copy_to_card()
    }

    /// The same with 64 MiB, every second page of which it touches again while the card reads.
    fn touches_again(&mut self) -> Result<(), Box<dyn Error>> {
        let mapped = MappedBuffer::new(&self.path, 64 * MIB)?;
        mapped.punch()?;
        let fd = mapped.fd.try_clone()?;
        // What it touches is its own, in a group that has no room for more files.
        self.kept.truncate(1);
        self.kept.insert(0, fd.try_clone()?);
        std::thread::scope(|s| {
            s.spawn(|| (0..64u64 << 20).step_by(8192).all(|at| rustix::io::pwrite(&fd, &[2], at).is_ok()));
            mapped.copy_to_card().map_err(|e| error_chain(&*e))
        })?;
        Ok(())
    }

    /// By messages of its own: the client library touches what it maps.
    fn map_and_unmap(&mut self, fd: &OwnedFd, len: usize) -> Result<(), Box<dyn Error>> {
        let socket = match &self.socket {
            Some(socket) => socket,
            None => self.socket.insert(opened(&self.path)?),
        };
        let all = MapSegment { fd: 0.into(), reserved: 0.into(), offset: 0.into(), len: (len as u64).into() };
        let answer = ask(socket, &ClientRequest::Map { access: 3, segments: &[all] }, &[fd.as_fd()])?;
        let iova = u64::from_le_bytes(answer[..8].try_into()?);
        ask(socket, &ClientRequest::Unmap { iova }, &[])?;
        Ok(())
    }
}

fn rounds() -> u32 {
    std::env::var(ROUNDS).map_or(20, |n| n.parse().unwrap())
}

fn options(path: &Path) -> ClientOptions {
    ClientOptions { ddr: 2 << 20, hbm: 4 << 20, queues: 1, timeout: LONG, ..ClientOptions::new(path) }
}

fn memfd(len: usize) -> OwnedFd {
    let fd = rustix::fs::memfd_create("attack", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

/// A buffer that was touched and is mapped for the card.
struct MappedBuffer {
    client: Client,
    buf: SharedBuf,
    via: Registered,
    fd: OwnedFd,
}

impl MappedBuffer {
    fn new(path: &Path, len: usize) -> Result<Self, Box<dyn Error>> {
        let client = Client::connect(options(path))?;
        let buf = client.buffer(len)?;
        buf.as_volatile_slice().fill(1);
        let via = Registered::new(&client, &buf, Access::RW)?;
        let fd = buf.export().ok_or("no memfd")?.try_clone_to_owned()?;
        Ok(Self { client, buf, via, fd })
    }

    /// Gives all pages back to the kernel.
    fn punch(&self) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.fd, flags, 0, self.buf.len() as u64)
    }

    /// Has the card read the buffer, a mebibyte at a time.
    fn copy_to_card(self) -> Result<(), Box<dyn Error>> {
        let card = Card::open(Arc::new(self.client), &MemfdHeap::new())?;
        let (mut queue, at) = (card.queue(0)?, DeviceAddr::Card(card.layout().ddr.first()));
        let (parts, mut rest) = (self.buf.len() / MIB, self.buf.into_slice());
        for _ in 0..parts {
            let (part, more) = rest.split_at(MIB).map_err(|_| "too short")?;
            let operation = Operation::copy(Direction::FromHost, (part, self.via.clone()), at);
            let _ticket = queue.submit(operation).map_err(|rejected| rejected.reason)?;
            queue.flush();
            let mut ended = Vec::new();
            while queue.in_flight() > 0 {
                queue.wait(&mut ended, LONG);
            }
            ended.into_iter().try_for_each(|completion| completion.result)?;
            rest = more;
        }
        Ok(())
    }
}

/// A function, opened without the client library.
fn opened(path: &Path) -> Result<OwnedFd, Box<dyn Error>> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    ask(&socket, &ClientRequest::Hello { min: 1, max: 9 }, &[])?;
    ask(&socket, &ClientRequest::Open { ddr: 2 << 20, hbm: 4 << 20, queues: 1 }, &FunctionFiles::new()?.fds())?;
    Ok(socket)
}

/// Sends a request; the body of the answer, or the text of a refusal.
fn ask(socket: &OwnedFd, request: &ClientRequest<'_>, fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    rustix::net::sendmsg(socket, &[IoSlice::new(&request.encode(1))], &mut control, SendFlags::NOSIGNAL)?;
    let mut bytes = [0; MAX_MESSAGE];
    let (n, _) = rustix::net::recv(socket, &mut bytes, RecvFlags::empty())?;
    let (header, body) = bytes[..n].split_at_checked(16).ok_or("the end of the connection")?;
    if header[4..8] == FAILED.to_le_bytes() {
        return Err(String::from_utf8_lossy(body.get(8..).unwrap_or_default()).into());
    }
    Ok(body.to_vec())
}

/// A process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon that listens at this path.
fn serve(mut command: Command, path: &Path) -> Running {
    command.arg("--socket").arg(path).args(["-q", "--mode", "600", "--clients", "64"]);
    Running(command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").spawn().unwrap())
}

/// A daemon in a group of its own. The process ends before the group is removed.
struct Daemon {
    process: Running,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
    group: Group,
    /// Bytes in use before the attack, and of card memory that clients had then.
    idle: [u64; 2],
}

impl Daemon {
    fn start(group: Group) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let process = serve(group.command(crate::dmalaned()), &path);
        let this = Self { process, path, _folder: folder, group, idle: [0; 2] };
        let start = Instant::now();
        while this.card_memory().is_err() {
            assert!(start.elapsed() < LONG, "the daemon does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        this
    }

    /// Bytes of card memory that its clients have, by `dmalaned status`.
    fn card_memory(&self) -> Result<u64, String> {
        let mut status = Command::new(crate::dmalaned());
        let output = status.args(["status", "--json", "--socket"]).arg(&self.path).output().unwrap();
        let json: Value = serde_json::from_slice(&output.stdout)
            .map_err(|_| format!("no status: {}", String::from_utf8_lossy(&output.stderr).trim()))?;
        Ok(["ddr_bytes", "hbm_bytes"].iter().filter_map(|field| json[field].as_u64()).sum())
    }

    /// Bytes in use beyond those before the attack and card memory that clients have got since.
    ///
    /// # Errors
    /// The fault of the daemon.
    fn excess(&mut self) -> Result<u64, String> {
        let before = self.card_memory();
        let used = self.group.used();
        let granted = before.and_then(|before| Ok(before.max(self.card_memory()?)));
        if let (0, Ok(None), Ok(granted)) = (self.group.killed(), self.process.0.try_wait(), &granted) {
            let [idle, had] = self.idle;
            return Ok(used.saturating_sub(idle + granted.saturating_sub(had)));
        }
        Err(format!(
            "{} processes of the daemon were killed, {} MiB in use; {}",
            self.group.killed(),
            used >> 20,
            granted.map_or_else(|e| e, |_| "it answers".to_owned())
        ))
    }
}

/// Runs an attack; gives the most that the daemon used beyond its account.
fn attacked(version: Version, test: &str, name: &str) -> Result<u64, String> {
    let [group, small] = [("daemon", LIMITS[0]), ("attacker", LIMITS[1])]
        .map(|(who, limit)| Group::new(version, &format!("{version:?}-{name}-{who}"), limit).unwrap());
    let mut daemon = Daemon::start(group);
    // Another client, which the attack is not to end.
    let bystander = Client::connect(options(&daemon.path)).unwrap();
    let buf = bystander.buffer(MIB).unwrap();
    buf.as_volatile_slice().fill(3);
    let _via = Registered::new(&bystander, &buf, Access::RW).unwrap();
    daemon.idle = [daemon.group.used(), daemon.card_memory().unwrap()];

    let mut command = small.command(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(SOCKET, &daemon.path).env(ATTACK, name);
    let mut attacker = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let output = BufReader::new(attacker.0.stdout.take().unwrap());
    let (send, lines) = channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
    let (mut most, mut round) = (0, "no round".to_owned());
    let done = loop {
        match lines.recv_timeout(Duration::from_millis(20)) {
            Ok(line) if line.contains("done: ") => break line,
            Ok(line) => round = line,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => panic!("{name}: the attacker ended after {round}"),
        }
        most = most.max(daemon.excess().map_err(|e| format!("{name}, after {round}: {e}"))?);
    };
    // What stays when the attacker's connections have ended, and its descriptors are open.
    let (start, mut last) = (Instant::now(), u64::MAX);
    while last > BOUND && start.elapsed() < Duration::from_secs(2) {
        last = daemon.excess().map_err(|e| format!("{name}, after {round}: {e}"))?;
    }
    println!("{version:?} {name}: {most} bytes beyond the account at most, {last} at the end; {done}");
    drop(attacker);
    drop(small);
    let gone = bystander.gone();
    match most.max(last) {
        _ if gone.is_some() => Err(format!("{name}: another client has lost its connection")),
        most if most > BOUND => Err(format!("{name}: {most} bytes beyond the account")),
        most => Ok(most),
    }
}

fn attacks_in_groups(version: Version, test: &str) {
    if let Some(path) = std::env::var_os(SOCKET) {
        Attacker::run(Path::new(&path));
    }
    if let Err(why) = Group::new(version, &format!("{version:?}-tried"), LIMITS[0]) {
        return println!("SKIPPED: {why}");
    }
    if !can_watch_memory() {
        return println!("SKIPPED: userfaultfd is not allowed here");
    }
    let failed: Vec<String> = ATTACKS.iter().filter_map(|(name, _)| attacked(version, test, name).err()).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn memory_attacks_in_control_groups_of_version_1() {
    attacks_in_groups(Version::V1, "dmalaned_memory::memory_attacks_in_control_groups_of_version_1");
}

#[test]
fn memory_attacks_in_control_groups_of_version_2() {
    attacks_in_groups(Version::V2, "dmalaned_memory::memory_attacks_in_control_groups_of_version_2");
}

/// Bytes of a process and of all that it has started, without programs and files, and their open descriptors.
fn held(process: u32) -> [u64; 2] {
    let status = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let number = |status: &str, name: &str| -> u64 {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map_or(0, |value| value.trim().trim_end_matches(" kB").parse().unwrap())
    };
    let names = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    let all: Vec<(u32, String)> =
        names.filter_map(|name| name.to_str()?.parse().ok()).map(|pid| (pid, status(pid))).collect();
    let (mut ours, mut known) = (vec![process], 0);
    while let Some(parent) = ours.get(known).copied() {
        let children = all.iter().filter(|(_, status)| number(status, "PPid") == u64::from(parent));
        ours.extend(children.map(|(pid, _)| *pid));
        known += 1;
    }
    let kib = |pid: &u32| ["RssAnon", "RssShmem", "VmPTE"].map(|name| number(&status(*pid), name)).iter().sum::<u64>();
    let open = |pid: &u32| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |all| all.count() as u64);
    [ours.iter().map(kib).sum::<u64>() << 10, ours.iter().map(open).sum()]
}

#[test]
fn a_thousand_clients_leave_no_memory_in_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let daemon = serve(Command::new(env!("CARGO_BIN_EXE_dmalaned")), &path);
    let start = Instant::now();
    while Client::connect(options(&path)).is_err() {
        assert!(start.elapsed() < LONG, "the daemon does not answer");
        std::thread::sleep(Duration::from_millis(5));
    }
    // What the daemon holds when so many clients have come and gone, as soon as that is little enough.
    let after = |clients: usize, enough: [u64; 2]| {
        for _ in 0..clients {
            let client = Client::connect(options(&path)).unwrap();
            let buf = client.buffer(64 << 10).unwrap();
            buf.as_volatile_slice().fill(1);
            drop(Registered::new(&client, &buf, Access::RW).unwrap());
        }
        // The last ones are still being released.
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        loop {
            let now = held(daemon.0.id());
            let gone = status(&options(&path)).unwrap().clients.len() == 1;
            if gone && now[0] <= enough[0] && now[1] <= enough[1] || start.elapsed() > Duration::from_secs(5) {
                return now;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    // What the first ones leave is used by the next.
    let [memory, descriptors] = after(100, [u64::MAX; 2]);
    let enough = [memory + (1 << 20), descriptors];
    let left = after(1000, enough);
    println!("{memory} bytes and {descriptors} descriptors, then {left:?}");
    assert!(
        left[0] <= enough[0] && left[1] <= enough[1],
        "{memory} bytes and {descriptors} descriptors, then {left:?}"
    );
}
