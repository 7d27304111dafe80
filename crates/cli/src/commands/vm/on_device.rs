//! A replay through the address space of a device, beside the bind manager's own tables.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use dmalane::addr::{Address, DeviceVa, SgIndex, Span};
use dmalane::device::{AddressSpace, AddressSpaceKind, Device, DeviceMemory, Placement, SpaceError};
use dmalane::error_chain;
use dmalane::vm::trace::{Ask, Asked, RefusedLine, Times};
use dmalane::vm::{AnyVm, BindRequest, Bo};
use serde_json::json;

use super::report::{each_of, times_json};
use crate::failure::Failure;
use crate::layout::{Table, count, plain};
use crate::output;
use crate::size;

/// Most operations that are kept.
const MAX_OPERATIONS: usize = 1 << 22;
/// Binds that lie closer together than this share one range of the device.
const GAP: u64 = 2 << 20;

/// The operations of a trace, those of its batches one by one. They are kept, because where they lie must be known
/// before the first is applied.
#[derive(Default)]
pub struct Operations {
    requests: Vec<(u64, BindRequest)>,
    skipped: u64,
    /// Lines of the trace, as a replay without a device counts its operations.
    lines: u64,
}

impl Operations {
    /// Reads all operations of a trace. A line that is refused whatever the device says ends it.
    pub fn read(lines: impl Iterator<Item = io::Result<(u64, Asked)>>, name: &str) -> Result<Self, Failure> {
        let mut this = Self::default();
        for line in lines {
            let cut = |e: io::Error| Failure::because(format!("{name} cannot be read to its end"), &e);
            let (at, asked) = line.map_err(cut)?;
            this.lines += 1;
            let bad = |refused: RefusedLine| {
                let why = error_chain(&refused.refusal);
                Failure::new(format!("{name}: line {at}: {}", plain(&why)))
            };
            match asked.what.map_err(bad)? {
                Ask::Nothing => {}
                Ask::Merge(_) => this.skipped += 1,
                Ask::Single(request) => this.add(at, request),
                Ask::Batch { requests, .. } => requests.into_iter().for_each(|request| this.add(at, request)),
            }
            if this.requests.len() > MAX_OPERATIONS {
                return Err(Failure::new(format!("{name} has more than {MAX_OPERATIONS} operations"))
                    .hint("without -d a trace may be of any length"));
            }
        }
        Ok(this)
    }

    fn add(&mut self, line: u64, request: BindRequest) {
        match request {
            BindRequest::Bind { .. } | BindRequest::Unbind(_) | BindRequest::Prefetch(_) => {
                self.requests.push((line, request));
            }
            // No driver's address space has these.
            _ => self.skipped += 1,
        }
    }

    /// Spans of all binds, those that are close to each other joined.
    fn ranges(&self) -> Vec<Span<DeviceVa>> {
        let mut spans: Vec<(u64, u64)> = Vec::new();
        for (_, request) in &self.requests {
            if let BindRequest::Bind { va, len, .. } = request {
                spans.push((va.bits(), va.bits() + (len - 1)));
            }
        }
        spans.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (first, last) in spans {
            match joined.last_mut() {
                Some(before) if first.saturating_sub(before.1) <= GAP => before.1 = before.1.max(last),
                _ => joined.push((first, last)),
            }
        }
        joined.into_iter().filter_map(|(first, last)| Span::new(DeviceVa::new(first), last - first + 1)).collect()
    }
}

/// A range of the trace, and where it is on the device.
struct Window {
    trace: Span<DeviceVa>,
    device: Span<DeviceVa>,
}

/// The requests of a trace as the device gets them: at its addresses, of its memory, in its pages.
struct Translated {
    /// Keeps what was allocated.
    _memory: DeviceMemory,
    windows: Vec<Window>,
    requests: Vec<(u64, BindRequest)>,
    bos: u64,
    bytes: u64,
}

/// The trace's pages, each as `scale` bytes for one.
fn translate(operations: &Operations, device: &mut dyn Device, scale: u64) -> Result<Translated, Failure> {
    let too_large = || Failure::new("the trace reaches beyond 64 bits in the device's pages");
    let space_failed = |e: SpaceError| Failure::because("the device has no addresses for the trace", &e);
    let times = |n: u64| n.checked_mul(scale).ok_or_else(too_large);
    let mut memory = device.memory();
    // By address: an id is used again once its buffer was destroyed.
    let mut on_device: BTreeMap<*const Bo, Arc<Bo>> = BTreeMap::new();
    let (mut bytes, mut first_table) = (0, None);
    for (_, request) in &operations.requests {
        let BindRequest::Bind { bo, .. } = request else { continue };
        if on_device.contains_key(&Arc::as_ptr(bo)) {
            continue;
        }
        let len = times(bo.len())?;
        let table = memory.allocate(len, &Placement::Default);
        let table = table.map_err(|e| Failure::because("the device has no memory for the trace's buffers", &e))?;
        let index = SgIndex::from_table(&table).map_err(|e| Failure::because("too many segments", &e))?;
        on_device.insert(Arc::as_ptr(bo), Arc::new(Bo::new(on_device.len() as u64 + 1, index)));
        bytes += len;
        first_table.get_or_insert(table);
    }
    let table = first_table.ok_or_else(|| Failure::new("the trace binds nothing"))?;
    let space = device.address_space();
    let reserve = |trace: Span<DeviceVa>| {
        let device = space.reserve(&table, times(trace.len())?).map_err(space_failed)?;
        Ok(Window { trace, device })
    };
    let windows = operations.ranges().into_iter().map(reserve).collect::<Result<Vec<_>, Failure>>()?;
    // The parts of a span that lie in windows; binds lie in one.
    let place = |span: Span<DeviceVa>| {
        let behind = windows.partition_point(|w| w.trace.last() < span.first());
        windows[behind..].iter().take_while(move |w| w.trace.first() <= span.last()).filter_map(move |w| {
            let first = span.first().max(w.trace.first());
            let last = span.last().min(w.trace.last());
            let at = w.device.first().checked_add((first.bits() - w.trace.first().bits()) * scale)?;
            Span::new(at, (last.bits() - first.bits() + 1) * scale)
        })
    };
    let mut requests = Vec::with_capacity(operations.requests.len());
    for (line, request) in &operations.requests {
        match request {
            BindRequest::Bind { va, bo, offset, len, access } => {
                let at = Span::new(*va, *len).and_then(|span| place(span).next());
                let (Some(at), Some(bo)) = (at, on_device.get(&Arc::as_ptr(bo)).cloned()) else { continue };
                let (va, offset, len) = (at.first(), times(*offset)?, at.len());
                requests.push((*line, BindRequest::Bind { va, bo, offset, len, access: *access }));
            }
            BindRequest::Unbind(span) => {
                requests.extend(place(*span).map(|span| (*line, BindRequest::Unbind(span))));
            }
            BindRequest::Prefetch(span) => {
                requests.extend(place(*span).map(|span| (*line, BindRequest::Prefetch(span))));
            }
            _ => {}
        }
    }
    Ok(Translated { _memory: memory, windows, requests, bos: on_device.len() as u64, bytes })
}

/// The times of one way to apply the operations.
#[derive(Clone, Copy, PartialEq)]
enum Class {
    Bind,
    Unbind,
    Other,
}

fn class(request: &BindRequest) -> Class {
    match request {
        BindRequest::Bind { .. } => Class::Bind,
        BindRequest::Unbind(_) => Class::Unbind,
        _ => Class::Other,
    }
}

/// Applies requests of one class that follow each other together, up to `batch` of them, and takes the time. `apply` is
/// told whether requests of another class follow, or none. Also gives how many times it was called.
fn measure(
    requests: &[BindRequest],
    batch: usize,
    mut apply: impl FnMut(&[BindRequest], bool) -> Result<(), Failure>,
) -> Result<(Times, u64), Failure> {
    let (mut times, mut calls) = (Times::default(), 0);
    let mut rest = requests;
    while let Some(first) = rest.first() {
        let kind = class(first);
        let is_first = kind == Class::Bind && times.first_bind.operations == 0;
        let most = if is_first { 1 } else { batch };
        let n = rest.iter().take(most).take_while(|r| class(r) == kind).count();
        let (group, behind) = rest.split_at(n);
        (rest, calls) = (behind, calls + 1);
        let is_last = rest.first().is_none_or(|next| class(next) != kind);
        let start = Instant::now();
        apply(group, is_last)?;
        let took = start.elapsed();
        let timed = match kind {
            Class::Bind if is_first => &mut times.first_bind,
            Class::Bind => &mut times.other_binds,
            Class::Unbind => &mut times.unbinds,
            Class::Other => &mut times.others,
        };
        timed.operations += group.len() as u64;
        timed.took += took;
    }
    Ok((times, calls))
}

/// Unbinds all, between two ways.
fn clear(space: &mut dyn AddressSpace, windows: &[Window]) -> Result<(), Failure> {
    let all: Vec<_> = windows.iter().map(|w| BindRequest::Unbind(w.device)).collect();
    space.apply(&all).and_then(|()| space.settle()).map_err(|e| Failure::because("cannot unbind", &e))
}

/// Makes an empty VM in tables of this program.
type MakeTables<'a> = dyn FnMut() -> Result<Box<dyn AnyVm + Send>, Failure> + 'a;

/// Applies all operations one by one, each waited for, in batches, and the same in our tables. Prints the times.
pub fn run(
    operations: &Operations,
    name: &str,
    (mut device, batch): (Box<dyn Device>, usize),
    (format, tables): (&'static str, &mut MakeTables<'_>),
    json: bool,
) -> Result<(), Failure> {
    let title = device.info().name;
    let kind = match device.address_space().kind() {
        AddressSpaceKind::Flat => {
            return Err(Failure::new(format!("{title} binds nothing: its addresses are those of its memory")));
        }
        AddressSpaceKind::PageTables { format } => format,
        AddressSpaceKind::Driver { name } => name,
    };
    let (page, granule) = (device.address_space().page().bytes(), tables()?.granule().bytes());
    let scale = (page / granule).max(1);
    let translated = translate(operations, &mut *device, scale)?;
    let space = device.address_space();

    // What the device refuses is found out first, without a clock: all ways are timed with the same operations, on a
    // device that has bound all of them before.
    let (mut good, mut refused_lines, mut first_refused) = (Vec::new(), BTreeSet::new(), None);
    let failed = |e: SpaceError| Failure::because("the device failed", &e);
    for (line, request) in &translated.requests {
        match space.apply(std::slice::from_ref(request)) {
            Ok(()) => good.push(request.clone()),
            Err(e @ SpaceError::Invalidate(_)) => return Err(failed(e)),
            Err(e) => {
                refused_lines.insert(*line);
                first_refused.get_or_insert_with(|| (*line, error_chain(&e)));
            }
        }
    }
    let refused = translated.requests.len() - good.len();
    // As a replay without a device counts: a line is an operation.
    let (lines, refused_lines) = (operations.lines, refused_lines.len());
    let mut on_device = |batch: usize, waits: bool| {
        clear(space, &translated.windows)?;
        measure(&good, batch, |group, is_last| {
            space.apply(group).map_err(failed)?;
            // Without waiting for the last bind, the unbind behind it, which is waited for, would be charged with all.
            if waits || is_last {
                space.settle().map_err(failed)?;
            }
            Ok(())
        })
    };
    let (one_by_one, _) = on_device(1, false)?;
    let (waited, _) = on_device(1, true)?;
    let (batched, batches) = on_device(batch, true)?;
    clear(space, &translated.windows)?;

    // The tables refuse other operations, and a batch with one of these as a whole: they are left out, too.
    let mut original: Vec<_> = operations.requests.iter().map(|(_, request)| request.clone()).collect();
    let mut vm = tables()?;
    original.retain(|request| vm.apply(vec![request.clone()], false).map(|done| vm.invalidated(done)).is_ok());
    drop(vm);
    let mut in_tables = |batch: usize| {
        let mut vm = tables()?;
        let measured = measure(&original, batch, |group, _| {
            let done = vm.apply(group.to_vec(), false);
            vm.invalidated(done.map_err(|e| Failure::because("the tables of dmalane failed", &e.error))?);
            Ok(())
        });
        measured.map(|(times, _)| times)
    };
    let (tables_one_by_one, tables_batched) = (in_tables(1)?, in_tables(batch)?);

    if json {
        let times = json!({
            "one_by_one": times_json(&one_by_one),
            "waited": times_json(&waited),
            "batched": times_json(&batched),
            "tables_one_by_one": times_json(&tables_one_by_one),
            "tables_batched": times_json(&tables_batched),
        });
        let Translated { windows, bos, bytes, .. } = &translated;
        let device = json!({
            "name": title,
            "kind": kind,
            "page_bytes": page,
            "scale": scale,
            "ranges": windows.len(),
            "bos": bos,
            "bytes": bytes,
            "batch": batch,
            "batches": batches,
            "lines": lines,
            "operations": translated.requests.len(),
            "refused": refused,
            "skipped": operations.skipped,
            "times": times,
        });
        let command = "vm replay";
        output::print_json(
            &json!({ "schema": 1, "command": command, "trace": name, "format": format, "device": device }),
        )?;
    } else {
        let mut text = format!("{}: {kind}, pages of {}", plain(&title), size::binary(page));
        if scale > 1 {
            let _ = write!(text, " (each stands for {} of the trace)", size::binary(granule));
        }
        let _ = writeln!(
            text,
            "\n{}, {refused_lines} refused, {} skipped; on the device {} and {}",
            count(lines as usize, "operation"),
            operations.skipped,
            count((waited.first_bind.operations + waited.other_binds.operations) as usize, "bind"),
            count(waited.unbinds.operations as usize, "unbind"),
        );
        let mut table = Table::new("lrrr", ["ns per operation", "first bind", "other binds", "unbinds"]);
        for (what, times) in [
            ("device, one by one".to_owned(), &one_by_one),
            ("device, one by one, each waited for".to_owned(), &waited),
            (format!("device, in batches of {batch} at most ({batches}), each waited for"), &batched),
            (format!("{format} tables of dmalane, one by one"), &tables_one_by_one),
            (format!("{format} tables of dmalane, in batches"), &tables_batched),
        ] {
            let cells = [&times.first_bind, &times.other_binds, &times.unbinds]
                .map(|timed| each_of(timed).map_or_else(|| "-".to_owned(), |(ns, _)| format!("{ns:.1}")));
            let [first, others, unbinds] = cells;
            table.row([what, first, others, unbinds]);
        }
        text += &table.text();
        output::print_text(&text)?;
    }
    match first_refused {
        None => Ok(()),
        Some((line, why)) => Err(Failure::new(format!(
            "{name}: {refused_lines} of {} refused, the first in line {line}: {}",
            count(lines as usize, "operation"),
            plain(&why)
        ))),
    }
}
