//! The same walks over a card in this process and over one in a daemon, and two clients of a daemon beside each other.
//!
//! In both cases two threads: one polls, pinned to one processor, and a worker that it does not help moves the bytes on
//! another. Rounds take turns. The received bytes are compared after each case.

use std::collections::VecDeque;
use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dmalane::addr::{Access, Address, CardAddr};
use dmalane::card::{Card, CardQueue};
use dmalane::daemon::{Client, ClientLimits, ClientOptions, Config, Listener, Server};
use dmalane::dma::{BufferSlice, Heap, MemfdHeap, Mmio, PageKind, SharedBuf};
use dmalane::queue::{CacheHint, Completion, DeviceAddr, Direction, Operation, Queue, Registered};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

use crate::clock::{pin_to, time};
use crate::memory::past_the_caches;
use crate::report::{Details, Report};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 15)]
    rounds: usize,

    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,

    /// Be the daemon, at this socket, until stdin ends
    #[arg(long, hide = true)]
    serve: Option<PathBuf>,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Operations in flight.
const DEPTH: usize = 32;

/// A daemon in a process of its own.
struct Daemon {
    child: Child,
    /// Closed, it ends.
    _stdin: Option<ChildStdin>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("socket");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["daemon", "--serve"]).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
        if line.trim() != "serving" {
            return Err("the daemon does not come up".into());
        }
        Ok(Self { _stdin: child.stdin.take(), child, path, _folder: folder })
    }

    fn connect(&self) -> Result<Client> {
        Ok(Client::connect(ClientOptions::new(&self.path))?)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self._stdin.take());
        let _ = self.child.wait();
    }
}

/// Serves until stdin ends, on the processor of workers.
fn serve(path: &Path) -> Result<()> {
    pin_to(1);
    let limits = ClientLimits { ddr: 2 * past_the_caches() as u64, hbm: 4 << 20, queues: 1, ..ClientLimits::default() };
    let listener = Listener::bind(path, 0o600, false)?;
    let server = Server::new(Config { limits, ..Config::default() }, |_| {})?;
    let (stop, stopped) = std::os::unix::net::UnixStream::pair()?;
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        drop(stop);
    });
    println!("serving");
    server.run(listener, stopped.as_fd())?;
    Ok(())
}

/// A card on some bus, and a buffer.
struct Side<B: Mmio> {
    bus: Arc<B>,
    card: Card<B>,
    via: Registered,
    part: Option<BufferSlice>,
}

impl<B: Mmio> Side<B> {
    fn new(bus: B, len: usize) -> Result<Self> {
        let bus = Arc::new(bus);
        let card = Card::open(bus.clone(), &*bus.heap(None))?;
        let buf = buffer(len)?;
        let via = Registered::new(&*bus, &buf, Access::RW)?;
        Ok(Self { bus, card, via, part: Some(buf.into_slice()) })
    }

    /// Cuts the first `region` bytes into operations.
    fn walk(&mut self, direction: Direction, size: usize, region: usize, hint: CacheHint) -> Result<Walk<B>> {
        let part = self.part.take().ok_or("no buffer")?;
        let (mut rest, tail) = part.split_at(region).map_err(|_| "a short buffer")?;
        let mut ready = Vec::new();
        for at in (0..region).step_by(size) {
            let (part, more) = rest.split_at(size).map_err(|_| "a region of whole copies")?;
            rest = more;
            let place = self.card.layout().ddr.first().checked_add(at as u64).ok_or("no such place")?;
            ready.push(Operation::copy(direction, (part, self.via.clone()), DeviceAddr::Card(place)).hint(hint));
        }
        Ok(Walk { queue: self.card.queue(0)?, back: Vec::with_capacity(ready.len()), ready, ended: Vec::new(), tail })
    }

    /// Puts the parts together again, and compares what lies on the card with them by way of another buffer.
    fn check(&mut self, walk: Walk<B>) -> Result<()> {
        let Walk { mut queue, ready, tail, .. } = walk;
        let mut whole: Option<BufferSlice> = None;
        for operation in ready {
            let part = operation.into_slice().ok_or("an operation without a part")?;
            whole = Some(match whole {
                None => part,
                Some(whole) => whole.join(part).map_err(|_| "parts out of order")?,
            });
        }
        let whole = whole.ok_or("no parts")?;
        let other = MemfdHeap::starting_at(PageKind::Transparent).allocate(whole.len())?.share();
        let via = Registered::new(&*self.bus, &other, Access::RW)?;
        let at = DeviceAddr::Card(self.card.layout().ddr.first());
        let _ticket =
            queue.submit(Operation::copy(Direction::ToHost, (other.into_slice(), via), at)).map_err(|e| e.reason)?;
        let mut ended = Vec::new();
        while ended.is_empty() {
            queue.wait(&mut ended, Duration::from_secs(10));
        }
        let end = ended.pop().ok_or("one")?;
        end.result?;
        let there = end.operation.into_slice().ok_or("its part")?;
        if let Some(at) = whole.as_volatile_slice().first_difference(there.as_volatile_slice()) {
            return Err(format!("byte {at} differs").into());
        }
        let mut block = [0; 64];
        whole.read(0, &mut block).ok_or("a short part")?;
        if block.iter().all(|b| *b == block[0]) {
            return Err("nothing was moved".into());
        }
        self.part = Some(whole.join(tail).map_err(|_| "a piece is missing")?);
        Ok(())
    }
}

fn buffer(len: usize) -> Result<SharedBuf> {
    // Reserved huge pages cannot be lent to a daemon: both sides do without.
    let mut buf = MemfdHeap::starting_at(PageKind::Transparent).allocate(len)?;
    for (i, word) in buf.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    }
    Ok(buf.share())
}

/// A walk by a queue: its operations in the order of their addresses.
struct Walk<B: Mmio> {
    queue: CardQueue<B>,
    ready: Vec<Operation>,
    back: Vec<Operation>,
    ended: Vec<Completion>,
    tail: BufferSlice,
}

impl<B: Mmio> Walk<B> {
    /// Over the region, at most 32 operations in flight, polling.
    fn once(&mut self) {
        let Self { queue, ready, back, ended, .. } = self;
        let mut collect = |ended: &mut Vec<Completion>| {
            back.extend(ended.drain(..).map(|e| {
                assert_eq!(e.result, Ok(()));
                e.operation
            }));
        };
        for operation in ready.drain(..) {
            while queue.in_flight() == DEPTH {
                queue.poll(ended);
                collect(ended);
            }
            let _ticket = queue.submit(operation).expect("room");
        }
        while queue.in_flight() > 0 {
            queue.poll(ended);
            collect(ended);
        }
        std::mem::swap(ready, back);
    }
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("daemon");
    if let Some(path) = &options.serve {
        serve(path)?;
        std::process::exit(0);
    }
    let daemon = Daemon::start()?;
    // On a thread of its own: `pin_to` counts the processors that the main thread may use.
    std::thread::scope(|s| -> std::result::Result<(), String> {
        let walks = s.spawn(|| one_client(options, &daemon, &mut report).map_err(|e| e.to_string()));
        walks.join().map_err(|_| "a walk panicked".to_owned())?
    })?;
    for (name, sizes) in [("64K and 64K", [64 * KIB; 2]), ("1M and 1M", [MIB; 2]), ("64K and 1M", [64 * KIB, MIB])] {
        let name = format!("two clients, {name}");
        if name.contains(&options.only) {
            two_clients(options, &daemon, &name, sizes, &mut report)?;
        }
    }
    let left = dmalane::daemon::status(&ClientOptions::new(&daemon.path))?;
    if left.clients.iter().any(|client| client.errors > 0) {
        return Err(format!("the daemon counted errors: {left:?}").into());
    }
    Ok(report)
}

fn one_client(options: &Options, daemon: &Daemon, report: &mut Report) -> Result<()> {
    // The worker is tied to the processor that its maker is tied to.
    pin_to(1);
    let host = SoftHost::new(HostConfig::default())?;
    let cold = past_the_caches();
    let config = CardConfig { workers: Workers::PerChannel, ddr: 2 * cold as u64, hbm: 4 << 20, channels: 1 };
    let bus: SoftBus = SoftBus::new(host, config)?;
    pin_to(0);
    let mut inside = Side::new(bus, cold)?;
    let mut outside = Side::new(daemon.connect()?, cold)?;
    for direction in [Direction::FromHost, Direction::ToHost] {
        let way = if direction == Direction::FromHost { "h2c" } else { "c2h" };
        for (size, region, hint, heat) in [
            (4 * KIB, 128 * KIB, CacheHint::Hot, "4K hot"),
            (64 * KIB, 2 * MIB, CacheHint::Hot, "64K hot"),
            (MIB, 32 * MIB, CacheHint::Auto, "1M warm"),
            (64 * KIB, cold, CacheHint::Cold, "64K cold"),
            (MIB, cold, CacheHint::Cold, "1M cold"),
            (8 * MIB, cold, CacheHint::Cold, "8M cold"),
        ] {
            let label = format!("{way} {heat}");
            if !label.contains(&options.only) {
                continue;
            }
            let mut here = inside.walk(direction, size, region, hint)?;
            let mut there = outside.walk(direction, size, region, hint)?;
            let turns = (cold / region).min(32);
            let (mut mine, mut theirs) = (Vec::new(), Vec::new());
            for round in 0..options.rounds + 1 {
                // Once beforehand: a worker that slept is awake, and what is hot is in the cache.
                let sample = |walk: &mut dyn FnMut()| {
                    walk();
                    time(|| (0..turns).for_each(|_| walk()))
                };
                // Who is first changes from round to round.
                let (a, b) = if round % 2 == 0 {
                    let a = sample(&mut || here.once());
                    (a, sample(&mut || there.once()))
                } else {
                    let b = sample(&mut || there.once());
                    (sample(&mut || here.once()), b)
                };
                if round > 0 {
                    mine.push(a);
                    theirs.push(b);
                }
            }
            inside.check(here).map_err(|e| format!("{label}, in process: {e}"))?;
            outside.check(there).map_err(|e| format!("{label}, through the daemon: {e}"))?;
            let total = (turns * region) as u64;
            let items = Details { items: Some(total / size as u64), ..Details::default() };
            let a = report.detailed_row(&label, "in process", total, &mine, items);
            let b = report.detailed_row(&label, "through the daemon", total, &theirs, items);
            let mut ratios: Vec<f64> = theirs.iter().zip(&mine).map(|(t, m)| t / m).collect();
            ratios.sort_by(f64::total_cmp);
            let ratio = ratios[ratios.len() / 2];
            if size >= 64 * KIB {
                report.at_most(&format!("{label}: through the daemon / in process"), 1.05, ratio);
            } else {
                report.note(&label, "through the daemon / in process", ratio);
            }
            report.note(&label, "GB/s in process", total as f64 / a / 1e9);
            report.note(&label, "GB/s through the daemon", total as f64 / b / 1e9);
        }
    }
    Ok(())
}

/// Two clients that always want more, for as long as the clock runs: what did each get?
fn two_clients(options: &Options, daemon: &Daemon, name: &str, sizes: [usize; 2], report: &mut Report) -> Result<()> {
    const REGION: usize = 32 * MIB;
    let mut ratios = Vec::new();
    let mut rates: [Vec<f64>; 2] = Default::default();
    for _ in 0..options.rounds.min(9) {
        let moved = [const { AtomicU64::new(0) }; 2];
        let (ready, counting, going) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(true));
        let client = |i: usize| -> std::result::Result<(), String> {
            let run = || -> Result<()> {
                let mut side = Side::new(daemon.connect()?, REGION)?;
                let mut walk = side.walk(Direction::FromHost, sizes[i], REGION, CacheHint::Cold)?;
                // In turns, so that all of them have been moved in the end.
                let mut waiting: VecDeque<Operation> = walk.ready.drain(..).collect();
                ready.fetch_add(1, Ordering::SeqCst);
                while going.load(Ordering::Relaxed) {
                    while walk.queue.in_flight() < DEPTH
                        && let Some(operation) = waiting.pop_front()
                    {
                        let _ticket = walk.queue.submit(operation).map_err(|e| e.reason)?;
                    }
                    walk.queue.wait(&mut walk.ended, Duration::from_millis(100));
                    for end in walk.ended.drain(..) {
                        end.result?;
                        if counting.load(Ordering::Relaxed) {
                            moved[i].fetch_add(end.bytes, Ordering::Relaxed);
                        }
                        waiting.push_back(end.operation);
                    }
                }
                while walk.queue.in_flight() > 0 {
                    walk.queue.wait(&mut walk.ended, Duration::from_millis(100));
                }
                walk.ready.extend(waiting.into_iter().chain(walk.ended.drain(..).map(|e| e.operation)));
                let first = |o: &Operation| match &o.work {
                    dmalane::queue::Work::Copy { at: DeviceAddr::Card(at), .. } => *at,
                    _ => CardAddr::new(0),
                };
                walk.ready.sort_by_key(first);
                side.check(walk)
            };
            run().map_err(|e| e.to_string())
        };
        let took = std::thread::scope(|s| -> Result<f64> {
            let clients = [s.spawn(|| client(0)), s.spawn(|| client(1))];
            let start = Instant::now();
            while ready.load(Ordering::SeqCst) < 2 && start.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(50));
            let took = time(|| {
                counting.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(400));
                counting.store(false, Ordering::SeqCst);
            });
            going.store(false, Ordering::SeqCst);
            for client in clients {
                client.join().map_err(|_| "a client panicked")??;
            }
            Ok(took)
        })?;
        let [a, b] = moved.map(|m| m.into_inner() as f64);
        ratios.push(a.min(b) / a.max(b));
        for (rates, bytes) in rates.iter_mut().zip([a, b]) {
            rates.push(took * (REGION as f64) / bytes.max(1.0));
        }
    }
    for (i, rates) in rates.iter().enumerate() {
        // As seconds for one region, so that the row's rate is right.
        report.row(name, &format!("client {}, pieces of {} KiB", i + 1, sizes[i] >> 10), REGION as u64, rates);
    }
    ratios.sort_by(f64::total_cmp);
    report.at_least(&format!("{name}: the smaller share / the larger"), 0.9, ratios[ratios.len() / 2]);
    report.note(name, "the worst round", ratios[0]);
    Ok(())
}
