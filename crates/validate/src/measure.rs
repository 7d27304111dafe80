//! A validation: for each memory, buffer and kind of pages first the comparison, then the figures.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use dmalane_addr::CardAddr;
use dmalane_device::size::Size;
use dmalane_dma::PageKind;
use dmalane_queue::{AddressPolicy, BalancePolicy, DeviceQueue, Direction, Policy, Split};

use crate::error::ValidateError;
use crate::place::{Layout, Memories};
use crate::report::{Figure, Integrity, ValidateEvent, ValidateReport};
use crate::settings::{Allocation, Directions, Pages, Phase, Stop, ValidateSettings};
use crate::target::{Reference, TestedDevice};
use crate::walk::Walk;
use crate::workers::{Job, Worker, go, rate};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
/// To the device.
const UP: Direction = Direction::FromHost;
const DOWN: Direction = Direction::ToHost;
/// Rounds of a group of figures: at least as many as there are directions.
const ROUNDS: usize = 16;
/// The difference between the round of a figure and that of the pass after it.
const LAST: u64 = 1 << 16;
/// A reference that is exceeded by as much was measured while the machine did something else: it is measured again.
const DISTURBED: f64 = 1.2;

/// New bytes to write, and none of those to be read in the buffers.
fn refill(workers: &mut [Worker], round: u64) {
    for (thread, worker) in workers.iter_mut().enumerate() {
        for (i, walk) in worker.walks.iter_mut().enumerate() {
            walk.direction = walk.measured;
            walk.fill(seed(thread, i, round));
        }
    }
}

/// The seed of the bytes of a buffer: a number for each thread, of which there are 256 at most (two directions in two
/// memories), walk and use, so that none is taken for another.
fn seed(thread: usize, walk: usize, round: u64) -> u64 {
    round << 16 | (thread as u64) << 8 | walk as u64
}

/// Measures a device, into a report that has what was measured before an error, too. The device's content from
/// [`ValidateSettings::starting_offset`] on is overwritten.
///
/// # Errors
/// [`ValidateError`] when something cannot be measured. Bytes that are wrong are no error but a report that has not
/// [passed](ValidateReport::passed).
pub fn run(
    target: &TestedDevice,
    settings: &ValidateSettings,
    report: &mut ValidateReport,
    watch: &mut dyn FnMut(ValidateEvent),
) -> Result<(), ValidateError> {
    settings.check()?;
    let channels = channels(target, settings)?;
    let offset = settings.starting_offset.unwrap_or(0);
    let phases = if settings.phases.is_empty() { target.phases() } else { settings.phases.clone() };
    let mut layout = Layout {
        memories: target.memories,
        offset,
        stride: settings.stride,
        paired: (settings.allocation == Allocation::Paired).then_some(settings.region_stride),
    };
    let one = matches!(target.memories, Memories::One(_)) || target.is_driven();
    if layout.paired == Some(None) && one {
        // Of all that there is, not of what is allocated below.
        layout.paired = Some(Some(target.least() / 2 / PAGE * PAGE));
    }
    let slots = 2 * (settings.threads * settings.iodepth) as u64;
    // Before anything is measured: do all of them fit? The last first, so that an error says how much all need.
    for &phase in &phases {
        for &buffer in &settings.buffers {
            let places = |slot| match settings.is_positional() {
                true => memories(phase).iter().try_for_each(|m| layout.at_position(*m, slot, slots, buffer).map(drop)),
                false => layout.places(phase, slot, slots, buffer).map(drop),
            };
            (0..slots).rev().try_for_each(places)?;
        }
    }
    let largest = settings.buffers.iter().max().copied().unwrap_or(0);
    *report = ValidateReport { reference: target.reference.name(), ..ValidateReport::default() };
    room(target, settings, slots * largest)?;
    // Sums that fit: the layouts were checked above.
    let end = match settings.is_positional() && one {
        true => layout.end(slots, largest)?,
        false => offset + slots * largest,
    };
    target.may_overwrite(offset, end - offset)?;
    let allocated = target.allocate(end, &phases)?;
    if let Some(allocated) = &allocated {
        layout.memories = allocated.memories();
    }
    cases(target, settings, (&channels, &phases, layout), report, watch)
}

/// Refuses buffers that there is no memory for, with those of the reference, and a card of this process.
fn room(target: &TestedDevice, settings: &ValidateSettings, buffers: u64) -> Result<(), ValidateError> {
    let needed = match target.reference {
        // Of its threads, one may stand for the device's.
        Reference::Copies => {
            let one_more = if target.helped { buffers / settings.threads as u64 } else { 0 };
            buffers.saturating_mul(3).saturating_add(one_more)
        }
        _ => buffers.saturating_mul(2),
    };
    // Huge pages may be reserved ones, which are not part of what there is room for.
    let small = settings.pages.contains(&Pages::Small);
    match dmalane_dma::room().filter(|room| small && needed > room.bytes) {
        Some(room) => Err(ValidateError::NoMemoryFor { needed, have: room.bytes, limited_by: room.limited_by }),
        None => Ok(()),
    }
}

/// All of them, one after the other.
fn cases(
    target: &TestedDevice,
    settings: &ValidateSettings,
    (channels, phases, layout): (&[usize], &[Phase], Layout),
    report: &mut ValidateReport,
    watch: &mut dyn FnMut(ValidateEvent),
) -> Result<(), ValidateError> {
    let cases = phases.len() * settings.buffers.len() * settings.pages.len();
    let directions = settings.directions.len();
    let compared = if settings.is_positional() { directions } else { 1 };
    watch(ValidateEvent::Steps(cases * (directions + compared)));
    for &phase in phases {
        for &buffer in &settings.buffers {
            let alone = settings.threads * settings.iodepth == 1;
            if phase == Phase::Both && buffer == PAGE && alone && !settings.is_positional() {
                report.left_out.push("HBM+DDR with one buffer of one page: there is nothing to share out".into());
                continue;
            }
            for &pages in &settings.pages {
                if pages == Pages::Huge && buffer < HUGE {
                    report
                        .left_out
                        .push(format!("{phase}, {:#}, {pages}: a buffer is less than one", Size::new(buffer)));
                    continue;
                }
                let case = Case { target, settings, channels, layout, phase, buffer, pages };
                case.run(report, watch)?;
            }
        }
    }
    Ok(())
}

impl ValidateSettings {
    /// Refuses settings that make sense on no device.
    ///
    /// # Errors
    /// [`ValidateError::Bad`]
    pub fn check(&self) -> Result<(), ValidateError> {
        let bad = |what, value, why| Err(ValidateError::Bad { what, value, why });
        if !(1..=64).contains(&self.threads) {
            return bad("threads", self.threads as u64, "not from 1 to 64");
        }
        if !(1..=64).contains(&self.iodepth) {
            return bad("iodepth", self.iodepth as u64, "not from 1 to 64");
        }
        if let Some(&buffer) = self.buffers.iter().find(|buffer| !(PAGE..=1 << 30).contains(*buffer)) {
            return bad("buffer-size", buffer, "not from 4 KiB to 1 GiB");
        }
        let mut sizes: Vec<_> = self.buffers.iter().map(|buffer| ("buffer-size", *buffer)).collect();
        sizes.extend(self.starting_offset.map(|offset| ("starting-offset", offset)));
        sizes.extend(self.stride.map(|stride| ("offset", stride)));
        if let Some((what, value)) = sizes.into_iter().find(|(_, value)| !value.is_multiple_of(PAGE)) {
            return bad(what, value, "not a multiple of 4 KiB");
        }
        if let Some(stride) = self.stride.filter(|stride| self.buffers.iter().any(|buffer| buffer > stride)) {
            return bad("offset", stride, "less than a buffer, so buffers would overlap");
        }
        if let Some(stride) = self.region_stride.filter(|stride| *stride == 0 || !stride.is_multiple_of(PAGE)) {
            return bad("channel-region-stride", stride, "not a multiple of 4 KiB above 0");
        }
        match self.stop() {
            Stop::After(0) => bad("iterations", 0, "less than 1"),
            Stop::For(time) if time.is_zero() => bad("duration", 0, "no time to measure anything"),
            _ => Ok(()),
        }
    }
}

/// The channels that are used.
fn channels(target: &TestedDevice, settings: &ValidateSettings) -> Result<Vec<usize>, ValidateError> {
    let has = target.channels();
    let entries = settings.channels.entries();
    let positions = 2 * settings.threads;
    if entries.len() != 1 && entries.len() != positions {
        return Err(ValidateError::ChannelCount { entries: entries.len(), positions });
    }
    if let Some(wanted) = entries.iter().flatten().copied().find(|channel| *channel >= has) {
        return Err(ValidateError::NoChannel { wanted, has });
    }
    let named: BTreeSet<usize> = entries.iter().flatten().copied().collect();
    match entries.contains(&None) {
        true => Ok((0..has).collect()),
        false => Ok(named.into_iter().collect()),
    }
}

/// The memories in which a phase has buffers of its own at each position.
fn memories(phase: Phase) -> &'static [Phase] {
    match phase {
        Phase::Both => &[Phase::Hbm, Phase::Ddr],
        Phase::Hbm => &[Phase::Hbm],
        Phase::Ddr => &[Phase::Ddr],
        Phase::Device => &[Phase::Device],
    }
}

/// Workers with the kind of their pages; or why there are no such pages.
type MaybeWorkers = Result<(Vec<Worker>, PageKind), String>;

/// One memory, buffer and kind of pages.
struct Case<'a> {
    target: &'a TestedDevice,
    settings: &'a ValidateSettings,
    channels: &'a [usize],
    layout: Layout,
    phase: Phase,
    buffer: u64,
    pages: Pages,
}

impl Case<'_> {
    fn run(&self, report: &mut ValidateReport, watch: &mut dyn FnMut(ValidateEvent)) -> Result<(), ValidateError> {
        let Self { phase, buffer, pages, settings, .. } = *self;
        let what = format!("{phase}, {:#}, {pages}", Size::new(buffer));
        // At positions, each direction has buffers of its own.
        let groups = match settings.is_positional() {
            true => settings.directions.chunks(1),
            false => settings.directions.chunks(settings.directions.len().max(1)),
        };
        let mut all: Option<Integrity> = None;
        let mut result = Ok(());
        for (round, directions) in (2..).step_by(ROUNDS).zip(groups) {
            watch(ValidateEvent::Step(format!("{what}: comparing")));
            let workers = match settings.is_positional() {
                true => self.at_positions(directions[0])?,
                false => self.packed()?,
            };
            let (mut workers, kind) = match workers {
                Ok(workers) => workers,
                Err(why) => {
                    report.left_out.push(format!("{what}: {why}"));
                    break;
                }
            };
            let mut integrity = self.compare(&mut workers)?;
            result = self.figures(&mut workers, (kind, directions, round), &mut integrity, report, watch);
            let right = integrity.ok == integrity.threads;
            all = Some(match all {
                Some(before) => before.and(integrity),
                None => integrity,
            });
            if result.is_err() || !right {
                break;
            }
        }
        report.integrity.extend(all);
        result
    }

    /// Measures each way, as long as the bytes are right.
    fn figures(
        &self,
        workers: &mut [Worker],
        (kind, of, first): (PageKind, &[Directions], u64),
        integrity: &mut Integrity,
        report: &mut ValidateReport,
        watch: &mut dyn FnMut(ValidateEvent),
    ) -> Result<(), ValidateError> {
        let Self { target, settings, phase, buffer, pages, .. } = *self;
        let mut say = |what| watch(ValidateEvent::Step(format!("{phase}, {:#}, {pages}: {what}", Size::new(buffer))));
        for (round, &directions) in (first..).zip(of) {
            if integrity.ok < integrity.threads {
                break;
            }
            say(match directions {
                Directions::Read => "reading",
                Directions::Write => "writing",
                Directions::Both => "reading and writing",
            });
            let active = |measured| directions.include(measured);
            let [up, down] = [UP, DOWN].map(active);
            refill(workers, round);
            self.go(workers, settings.stop(), active)?;
            let (write, read) = (rate(workers, UP).filter(|_| up), rate(workers, DOWN).filter(|_| down));
            let mut wrong = Vec::new();
            if down {
                wrong.extend(wrong_in(workers, DOWN, 1, "read from"));
            }
            // Whether passes after the first have moved anything does not show in buffers that were right after it. So
            // one more, with other bytes to write and none of those to be read in the buffers.
            let last = round + LAST;
            refill(workers, last);
            self.go(workers, Stop::After(1), active)?;
            if down {
                wrong.extend(wrong_in(workers, DOWN, 1, "read at last from"));
            }
            if up {
                self.read_back(workers, |measured| measured == UP)?;
                wrong.extend(wrong_in(workers, UP, last, "written at last to"));
            }
            if !wrong.is_empty() {
                integrity.wrong.extend(wrong);
                continue;
            }
            if target.cancelled.load(Ordering::Relaxed) {
                return Err(ValidateError::Interrupted);
            }
            let measured = || target.reference(workers, directions, buffer, settings.stop());
            let mut figure = Figure { phase, buffer, pages, kind, directions, read, write, reference: None };
            let mut reference = measured()?;
            // A machine that was busy meanwhile gave less than it can.
            if figure.total() > reference * DISTURBED {
                reference = reference.max(measured()?);
            }
            figure.reference = Some(reference).filter(|c| c.is_finite());
            report.figures.push(figure);
        }
        Ok(())
    }

    /// A worker for each thread, with packed buffers.
    fn packed(&self) -> Result<MaybeWorkers, ValidateError> {
        let Self { settings, layout, phase, buffer, .. } = *self;
        let of_thread = 2 * settings.iodepth as u64;
        let slots = of_thread * settings.threads as u64;
        self.workers((0..slots).step_by(of_thread as usize).map(|first| {
            let walk = move |slot| (if slot % 2 == 0 { UP } else { DOWN }, layout.places(phase, slot, slots, buffer));
            (settings.channels.at(0), (first..first + of_thread).map(walk))
        }))
    }

    /// A worker for each buffer: thread `t` has position `t`, or with both directions at once reads at position `2t`
    /// and writes at position `2t + 1`. Its further buffers lie at as many positions behind those of all.
    fn at_positions(&self, directions: Directions) -> Result<MaybeWorkers, ValidateError> {
        let Self { settings, channels, layout, phase, buffer, .. } = *self;
        let (slots, all) = (2 * settings.threads, 2 * settings.threads * settings.iodepth);
        let positions = if directions == Directions::Both { slots } else { settings.threads };
        let of_memory = |memory| (0..positions).map(move |position| (memory, position));
        self.workers(memories(phase).iter().flat_map(of_memory).enumerate().map(|(number, (memory, position))| {
            let measured = match directions {
                Directions::Read => DOWN,
                Directions::Write => UP,
                Directions::Both if position % 2 == 0 => DOWN,
                Directions::Both => UP,
            };
            let alternating = match (settings.allocation, settings.raw) {
                (Allocation::Paired, _) => Some(channels[position % channels.len()]),
                // In the order in which queues are made, as a driver numbers them.
                (_, true) => Some(channels[number % channels.len()]),
                _ => None,
            };
            let walk = move |at: usize| (measured, layout.at_position(*memory, at as u64, all as u64, buffer));
            (settings.channels.at(position).or(alternating), (position..all).step_by(slots).map(walk))
        }))
    }

    /// A worker for each of these channels (`None`: a policy over all) and lists of walks; or why there are no pages of
    /// this kind.
    fn workers<W>(&self, of: impl Iterator<Item = (Option<usize>, W)>) -> Result<MaybeWorkers, ValidateError>
    where
        W: Iterator<Item = (Direction, Result<Vec<(CardAddr, u64)>, ValidateError>)>,
    {
        let (mut workers, mut kind) = (Vec::new(), PageKind::Base);
        for (channel, each) in of {
            let mut walks = Vec::new();
            for (measured, places) in each {
                let (walk, of) = match self.walk(measured, &places?)? {
                    Ok(made) => made,
                    Err(why) => return Ok(Err(why)),
                };
                kind = of;
                walks.push(walk);
            }
            workers.push(Worker { queue: self.queue(channel), walks });
        }
        Ok(Ok((workers, kind)))
    }

    /// A buffer for these places, with the kind of its pages. Or why there are no such pages.
    fn walk(
        &self,
        measured: Direction,
        places: &[(CardAddr, u64)],
    ) -> Result<Result<(Walk, PageKind), String>, ValidateError> {
        let small = self.pages == Pages::Small;
        let heap = self.target.registrar.heap(small.then_some(PageKind::Base));
        let buf = heap.allocate(self.buffer as usize).map_err(ValidateError::Memory)?.share();
        let kind = buf.backing().kind;
        if !small && kind == PageKind::Base {
            let why = buf.backing().passed_over.iter().map(|(kind, why)| format!("{kind}: {why}"));
            return Ok(Err(why.collect::<Vec<_>>().join("; ")));
        }
        Ok(Ok((Walk::new(measured, buf, places, &*self.target.registrar)?, kind)))
    }

    /// A queue over one channel, or over all of them with a policy.
    fn queue(&self, channel: Option<usize>) -> Box<DeviceQueue> {
        let Self { target, channels, .. } = self;
        if let Some(channel) = channel {
            return Box::new(target.queue(channel));
        }
        let queues = channels.iter().map(|c| target.queue(*c)).collect();
        let areas = target.areas_for(channels);
        let policy: Box<dyn Policy> = match &channels[..] {
            [_] => Box::new(AddressPolicy::only(0)),
            // Channels that are one thread must not be balanced (docs/bench/policy.md).
            _ if target.concurrent => Box::new(BalancePolicy::new(areas)),
            _ => Box::new(AddressPolicy::new(areas)),
        };
        Box::new(Split::new(queues, policy))
    }

    fn go(
        &self,
        workers: &mut [Worker],
        stop: Stop,
        active: impl Fn(Direction) -> bool + Sync,
    ) -> Result<(), ValidateError> {
        let job = Job { phase: self.phase, stop, timeout: self.target.timeout, cancelled: &self.target.cancelled };
        go(workers, job, active)
    }

    /// Writes all buffers, then reads all back.
    fn compare(&self, workers: &mut [Worker]) -> Result<Integrity, ValidateError> {
        for (thread, worker) in workers.iter_mut().enumerate() {
            for (i, walk) in worker.walks.iter_mut().enumerate() {
                walk.direction = UP;
                walk.fill(seed(thread, i, 1));
            }
        }
        self.go(workers, Stop::After(1), |_| true)?;
        self.read_back(workers, |_| true)?;
        let mut wrong = Vec::new();
        let mut ok = 0;
        for (thread, worker) in workers.iter().enumerate() {
            let before = wrong.len();
            wrong.extend(wrong_of(worker, thread, |_| true, 1, "written and read back at"));
            ok += usize::from(wrong.len() == before);
        }
        let Self { phase, buffer, pages, .. } = *self;
        Ok(Integrity { phase, buffer, pages, ok, threads: workers.len(), wrong })
    }

    /// Reads what was written into buffers that held something else.
    fn read_back(&self, workers: &mut [Worker], which: impl Fn(Direction) -> bool + Sync) -> Result<(), ValidateError> {
        for (thread, worker) in workers.iter_mut().enumerate() {
            for (i, walk) in worker.walks.iter_mut().enumerate().filter(|(_, walk)| which(walk.measured)) {
                walk.direction = DOWN;
                walk.fill(!seed(thread, i, 0));
            }
        }
        self.go(workers, Stop::After(1), which)
    }
}

/// The first wrong byte of each buffer of a direction.
fn wrong_in(workers: &[Worker], of: Direction, round: u64, what: &str) -> Vec<String> {
    let each = workers.iter().enumerate();
    each.flat_map(|(thread, worker)| wrong_of(worker, thread, |measured| measured == of, round, what)).collect()
}

fn wrong_of(
    worker: &Worker,
    thread: usize,
    which: impl Fn(Direction) -> bool,
    round: u64,
    what: &str,
) -> impl Iterator<Item = String> {
    let walks = worker.walks.iter().enumerate().filter(move |(_, walk)| which(walk.measured));
    walks.filter_map(move |(i, walk)| {
        let byte = walk.wrong(seed(thread, i, round))?;
        let at = walk.address_of(byte);
        Some(format!("thread {thread}: byte {byte} of the buffer, {what} {at}, is wrong"))
    })
}
