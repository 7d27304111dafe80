//! State of the driver: contexts, memory, mappings, streams and their pending jobs.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

pub(crate) type Code = u32;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ALREADY_REGISTERED: Code = 712;
pub(crate) const NOT_REGISTERED: Code = 713;
pub(crate) const LAUNCH_FAILED: Code = 719;
pub(crate) const NOT_SUPPORTED: Code = 801;

/// Bytes that allocations and mappings are multiples of, as on the GPUs that there are.
pub(crate) const GRANULE: u64 = 2 << 20;

/// The driver.
#[derive(Default)]
pub(crate) struct Model {
    state: Mutex<State>,
    /// Something was queued, done or changed.
    changed: Condvar,
}

pub(crate) static MODEL: std::sync::LazyLock<Model> = std::sync::LazyLock::new(Model::default);

/// An allocation.
pub(crate) type Memory = Arc<Mutex<Bytes>>;

/// The bytes of an allocation.
pub(crate) enum Bytes {
    Own(Vec<u8>),
    /// In a memfd, which other processes get: its bytes, and whether it came from another process.
    Shared(File, u64, bool),
}

impl Default for Bytes {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Bytes {
    /// Those that take memory of the GPU here: memory of another process is counted there.
    fn counted(&self) -> u64 {
        match self {
            Self::Own(bytes) => bytes.len() as u64,
            Self::Shared(_, len, came) => {
                if *came {
                    0
                } else {
                    *len
                }
            }
        }
    }

    /// Copies some of them, as many as `here` has, from or to `here`.
    pub fn copy(&mut self, offset: usize, here: &mut [u8], write: bool) {
        match (self, write) {
            (Self::Own(bytes), true) => bytes[offset..offset + here.len()].copy_from_slice(here),
            (Self::Own(bytes), false) => here.copy_from_slice(&bytes[offset..offset + here.len()]),
            (Self::Shared(file, ..), true) => file.write_all_at(here, offset as u64).expect("memory"),
            (Self::Shared(file, ..), false) => file.read_exact_at(here, offset as u64).expect("memory"),
        }
    }
}

fn again(file: &File) -> std::io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A descriptor of its own of memory, with a lock by which is known whether any process still has it.
pub(crate) fn locked(file: &File) -> std::io::Result<File> {
    let file = again(file)?;
    flock(&file, FlockOperation::NonBlockingLockShared)?;
    Ok(file)
}

fn is_held(file: &File) -> bool {
    again(file).is_ok_and(|file| flock(file, FlockOperation::NonBlockingLockExclusive).is_err())
}

/// Memory at device addresses.
pub(crate) struct Mapping {
    pub len: u64,
    pub memory: Memory,
    /// Readable, writable.
    pub access: (bool, bool),
    /// The context of the GPU that may use it.
    pub context: u64,
    /// Its bytes are the caller's own, at these addresses: memory of a framework that allocated it itself.
    pub outside: bool,
}

/// A range that an operation uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// Host memory, by address.
    Host(usize),
    /// Device memory, by address.
    Device(u64),
}

/// One job of a stream: rows of a copy, or of a value.
pub(crate) struct Job {
    pub to: Place,
    pub from: Source,
    pub row: u64,
    pub rows: u64,
    pub to_pitch: u64,
}

/// Something that a stream comes to.
pub(crate) enum Item {
    /// And when it was given.
    Job(Job, Instant),
    /// Waits until a stream has done a number of jobs.
    Wait(u64, u64),
}

/// Where the bytes of a job come from.
pub(crate) enum Source {
    Place(Place, u64),
    Value(Vec<u8>),
}

impl Job {
    /// The ranges that it uses: place, bytes, whether it writes.
    pub fn uses(&self) -> Vec<(Place, u64, bool)> {
        let extent = |pitch: u64| (self.rows - 1) * pitch + self.row;
        let mut uses = vec![(self.to, extent(self.to_pitch), true)];
        if let Source::Place(place, pitch) = self.from {
            uses.push((place, extent(pitch), false));
        }
        uses
    }
}

/// A stream: jobs that wait, and how many have been given to it and done.
#[derive(Default)]
pub(crate) struct Stream {
    pub jobs: VecDeque<Item>,
    pub given: u64,
    pub done: u64,
    /// Threads that wait for it.
    pub waiters: u32,
    pub context: u64,
    pub destroyed: bool,
}

/// A call that is to fail.
struct Fault {
    call: String,
    /// Counted from now on; 1 is the next.
    nth: u64,
    code: Code,
    sticky: bool,
}

/// How the GPU is.
pub(crate) struct Settings {
    pub memory: u64,
    pub virtual_memory: bool,
    pub host_register: bool,
    pub read_only_register: bool,
    pub gpus: u32,
    /// They are parts of one GPU.
    pub parts: bool,
    /// Before each job.
    pub delay: Duration,
    /// Streams do nothing.
    pub held: bool,
    /// Of the copies from now on, the one of this number is not made, though it ends like others; 0 for none.
    pub lost: u64,
    /// Bytes per second of each direction of the link to the host; 0 for no limit.
    pub link: u64,
    /// Copies end without being made, which takes no processor: for measurements.
    pub idle: bool,
    /// A graph is captured: calls of threads whose mode is not relaxed end it.
    pub capturing: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let delay = Duration::from_micros(20);
        Self {
            memory: std::env::var("FAKE_CUDA_MEMORY").ok().and_then(|n| n.parse().ok()).unwrap_or(256 << 20),
            virtual_memory: true,
            host_register: true,
            read_only_register: true,
            gpus: 1,
            parts: false,
            delay,
            held: false,
            lost: 0,
            link: 0,
            idle: false,
            capturing: false,
        }
    }
}

#[derive(Default)]
pub(crate) struct State {
    pub settings: Settings,
    pub initialised: bool,
    /// References to the primary contexts, by device.
    pub retained: BTreeMap<i32, u32>,
    /// Contexts that threads have made current and not given back.
    pub pushed: usize,
    /// Allocations: bytes, the memory, the context of their GPU.
    pub handles: BTreeMap<u64, (u64, Memory, u64)>,
    /// Memory that other processes may have, and its bytes.
    pub lent: Vec<(Weak<Mutex<Bytes>>, File, u64)>,
    pub reserved: BTreeMap<u64, u64>,
    pub mapped: BTreeMap<u64, Mapping>,
    pub registered: BTreeMap<usize, usize>,
    /// Host memory of the driver.
    pub pinned: BTreeMap<usize, usize>,
    pub streams: BTreeMap<u64, Stream>,
    /// The stream and the job after which each event has come; `None` before it was recorded.
    pub events: BTreeMap<u64, Option<(u64, u64)>>,
    pub violations: Vec<String>,
    /// Calls that were made, by name.
    pub calls: BTreeMap<String, u64>,
    /// Bytes that streams have copied from the host.
    pub copied: u64,
    /// Bytes of copies that were asked for from and to host memory that is not registered.
    pub unregistered: u64,
    /// Until when each direction of the link is in use: to the GPU, and to the host.
    link_until: [Option<Instant>; 2],
    faults: Vec<Fault>,
    sticky: Option<Code>,
    next: u64,
}

impl Model {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something has changed.
    pub fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Does the jobs of a stream, until it is destroyed and has none.
    pub fn work(&self, id: u64, copy: impl Fn(&State, &Job)) {
        loop {
            let mut state = self.lock();
            let delay = loop {
                let Some(stream) = state.streams.get(&id) else { return };
                if stream.jobs.is_empty() && stream.destroyed {
                    state.streams.remove(&id);
                    return;
                }
                // After an error that breaks the context, nothing is done any more.
                let ready = match stream.jobs.front() {
                    None => false,
                    Some(Item::Job(..)) => true,
                    Some(Item::Wait(other, given)) => state.streams.get(other).is_none_or(|s| s.done >= *given),
                };
                if ready && !state.settings.held && state.sticky.is_none() {
                    break state.settings.delay;
                }
                state = self.wait(state);
            };
            let until = state.on_the_link(id);
            drop(state);
            std::thread::sleep(delay);
            std::thread::sleep(until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now())));
            let mut state = self.lock();
            if state.sticky.is_some() || state.settings.held {
                continue;
            }
            let Some(item) = state.streams.get_mut(&id).and_then(|stream| stream.jobs.pop_front()) else { continue };
            if let Item::Job(job, _) = item {
                let context = state.streams.get(&id).map_or(0, |stream| stream.context);
                match state.bad_use(&job, context) {
                    Some(why) => {
                        state.violation(format!("when a stream came to it: {why}"));
                        state.sticky = Some(LAUNCH_FAILED);
                    }
                    None => match std::mem::replace(&mut state.settings.lost, 0) {
                        1 => {}
                        lost => {
                            state.settings.lost = lost.saturating_sub(1);
                            if !state.settings.idle {
                                copy(&state, &job);
                            }
                            if let Source::Place(Place::Host(_), _) = job.from {
                                state.copied += job.row * job.rows;
                            }
                        }
                    },
                }
            }
            if let Some(stream) = state.streams.get_mut(&id) {
                stream.done += 1;
            }
            drop(state);
            self.notify();
        }
    }
}

impl State {
    /// A number that no object has.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        0x1000 + self.next
    }

    /// The state at the beginning, with new numbers.
    pub fn anew(&self) -> Self {
        Self { next: self.next, ..Self::default() }
    }

    /// Counts a call; the code with which it is to fail.
    pub fn enter(&mut self, call: &str) -> Option<Code> {
        *self.calls.entry(call.to_owned()).or_default() += 1;
        let mut failed = None;
        for fault in self.faults.iter_mut().filter(|fault| fault.call == call && fault.nth > 0) {
            fault.nth -= 1;
            if fault.nth == 0 {
                failed = Some(fault.code);
                if fault.sticky {
                    self.sticky = Some(fault.code);
                }
            }
        }
        failed.or(self.sticky)
    }

    pub fn fail(&mut self, call: &str, nth: u64, code: Code, sticky: bool) {
        self.faults.push(Fault { call: call.to_owned(), nth, code, sticky });
    }

    /// The error that breaks the context, if one does.
    pub fn broken(&self) -> Option<Code> {
        self.sticky
    }

    /// True when a fault has happened or was never asked for.
    pub fn faults_happened(&self) -> bool {
        self.faults.iter().all(|fault| fault.nth == 0)
    }

    /// True when no call was made to fail.
    pub fn is_whole(&self) -> bool {
        self.faults.is_empty()
    }

    /// Forgets faults, and that a context is broken.
    pub fn heal(&mut self) {
        self.faults.clear();
        self.sticky = None;
    }

    pub fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    /// Bytes of device memory in use.
    pub fn used(&self) -> u64 {
        // Allocations whose handle was released live as long as they are mapped.
        let mut seen: Vec<*const Mutex<Bytes>> = Vec::new();
        let mut used = 0;
        let ours = self.mapped.values().filter(|m| !m.outside).map(|m| &m.memory);
        let all = self.handles.values().map(|(_, memory, _)| memory).chain(ours);
        for memory in all {
            if !seen.contains(&Arc::as_ptr(memory)) {
                seen.push(Arc::as_ptr(memory));
                used += memory.lock().unwrap_or_else(PoisonError::into_inner).counted();
            }
        }
        // And what only others have.
        let held = self.lent.iter().filter(|(memory, file, _)| memory.strong_count() == 0 && is_held(file));
        used + held.map(|(.., len)| len).sum::<u64>()
    }

    /// When the link to the host has moved what a stream does next, which then has it until then.
    fn on_the_link(&mut self, stream: u64) -> Option<Instant> {
        let Some(Item::Job(job, given)) = self.streams.get(&stream)?.jobs.front() else { return None };
        let direction = match (job.to, &job.from) {
            (Place::Device(_), Source::Place(Place::Host(_), _)) => 0,
            (Place::Host(_), Source::Place(Place::Device(_), _)) => 1,
            _ => return None,
        };
        let rate = Some(self.settings.link).filter(|rate| *rate > 0)?;
        let takes = Duration::from_secs_f64((job.row * job.rows) as f64 / rate as f64);
        // From when it was given, however late the thread of the stream comes to it.
        let until = self.link_until[direction].map_or(*given, |until| until.max(*given)) + takes;
        self.link_until[direction] = Some(until);
        Some(until)
    }

    /// Finds an invalid access of a job in a context, if there is one, and describes it.
    pub fn bad_use(&self, job: &Job, context: u64) -> Option<String> {
        job.uses().into_iter().find_map(|(place, len, write)| match place {
            Place::Device(at) => {
                let mut next = at;
                while next < at + len {
                    let found = self.mapped.range(..=next).next_back().filter(|(first, m)| next - **first < m.len);
                    let Some((first, m)) = found else { return Some(format!("nothing is mapped at {next:#x}")) };
                    if m.context != context {
                        return Some(format!("{next:#x} is memory of another GPU"));
                    }
                    if !(if write { m.access.1 } else { m.access.0 }) {
                        return Some(format!("no access to {next:#x} (write: {write})"));
                    }
                    next = first + m.len;
                }
                None
            }
            Place::Host(at) if self.settings.host_register && !self.is_registered(at, len) => {
                Some(format!("host memory at {at:#x} is not registered"))
            }
            Place::Host(_) => None,
        })
    }

    fn is_registered(&self, at: usize, len: u64) -> bool {
        [&self.registered, &self.pinned].into_iter().any(|known| {
            let found = known.range(..=at).next_back();
            found.is_some_and(|(first, has)| at as u64 + len <= (*first + *has) as u64)
        })
    }

    /// Bytes of a job from and to host memory that is not registered.
    pub fn unregistered_of(&self, job: &Job) -> u64 {
        let is =
            |(place, len, _): &(Place, u64, bool)| matches!(place, Place::Host(at) if !self.is_registered(*at, *len));
        job.uses().iter().filter(|used| is(used)).count() as u64 * job.row * job.rows
    }

    /// True when a stream still has to use some of these bytes.
    pub fn is_busy(&self, place: Place, bytes: u64) -> bool {
        let overlaps = |(used, len, _): (Place, u64, bool)| match (place, used) {
            (Place::Host(a), Place::Host(b)) => (a as u64) < b as u64 + len && (b as u64) < a as u64 + bytes,
            (Place::Device(a), Place::Device(b)) => a < b + len && b < a + bytes,
            _ => false,
        };
        let items = self.streams.values().flat_map(|s| &s.jobs);
        items.into_iter().any(|item| matches!(item, Item::Job(job, _) if job.uses().into_iter().any(overlaps)))
    }

    /// Lists the objects that were created and not destroyed; empty when there are none.
    pub fn leaks(&self) -> String {
        let contexts: u32 = self.retained.values().sum();
        let counts = [
            ("contexts", contexts as usize),
            ("contexts that are current", self.pushed),
            ("allocations", self.handles.len()),
            ("reservations", self.reserved.len()),
            ("mappings", self.mapped.values().filter(|m| !m.outside).count()),
            ("registrations", self.registered.len()),
            ("host allocations", self.pinned.len()),
            ("streams", self.streams.values().filter(|s| !s.destroyed).count()),
            ("events", self.events.len()),
        ];
        let left = counts.into_iter().filter(|(_, n)| *n > 0);
        left.map(|(what, n)| format!("{n} {what}")).collect::<Vec<_>>().join(", ")
    }
}
