//! Operations as steps, each of which is one call of the driver.

use dmalane_queue::{DeviceAddr, Direction, GatherList, HostSlice, Operation, QueueAddr, Refusal, Shape, Work};

/// Calls that one operation may need, at most: rows that overlap, and pitches beyond the driver's, take one for each.
const MOST: u64 = 4096;

/// Rows of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rows {
    /// Bytes of each.
    pub(crate) row: u64,
    /// How many, at least one.
    pub(crate) count: u64,
    /// From one to the next, in the source and in the destination: at least a row.
    pub(crate) pitches: (u64, u64),
}

impl Rows {
    fn one(row: u64) -> Self {
        Self { row, count: 1, pitches: (row, row) }
    }

    /// From the first byte to behind the last one, with this pitch.
    pub(crate) fn extent(&self, pitch: u64) -> u64 {
        (self.count - 1) * pitch + self.row
    }
}

/// One call of the driver on a stream. Host memory begins at `offset` of slice `host` of an operation; its pitch is the
/// first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A copy.
    Copy { direction: Direction, host: usize, offset: u64, at: DeviceAddr, rows: Rows },
    /// Within the device.
    Within { from: DeviceAddr, to: DeviceAddr, rows: Rows },
    /// Bytes of one value.
    Bytes { at: DeviceAddr, value: u8, rows: Rows },
    /// Words of four bytes of one value; all numbers are multiples of four.
    Words { at: DeviceAddr, value: u32, rows: Rows },
}

impl Step {
    fn rows(&self) -> &Rows {
        match self {
            Self::Copy { rows, .. }
            | Self::Within { rows, .. }
            | Self::Bytes { rows, .. }
            | Self::Words { rows, .. } => rows,
        }
    }

    /// Bytes that it moves or sets.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows().row * self.rows().count
    }

    /// The device memory that it uses: first address, bytes, and whether it writes.
    pub(crate) fn device(&self) -> [Option<(DeviceAddr, u64, bool)>; 2] {
        let rows = self.rows();
        let there = rows.extent(rows.pitches.1);
        match *self {
            Self::Copy { direction, at, .. } => [Some((at, there, direction == Direction::FromHost)), None],
            Self::Within { from, to, .. } => {
                [Some((from, rows.extent(rows.pitches.0), false)), Some((to, there, true))]
            }
            Self::Bytes { at, .. } | Self::Words { at, .. } => [Some((at, there, true)), None],
        }
    }
}

/// The first and last address of memory that a use of addresses may reach: where they are bound, any.
pub(crate) fn memory(at: DeviceAddr, len: u64) -> (u64, u64) {
    match at {
        DeviceAddr::Card(at) => (at.bits(), at.bits().saturating_add(len - 1)),
        DeviceAddr::Va(_) => (0, u64::MAX),
    }
}

/// The address `bytes` further on. [`Operation::check`] has made sure that it exists.
fn plus(at: DeviceAddr, bytes: u64) -> DeviceAddr {
    at.advance(bytes).unwrap_or(at)
}

/// The steps of an operation that [`Operation::admit`] has passed. `longest`: the longest pitch that the driver takes.
///
/// # Errors
/// [`Refusal::TooLong`] for shapes that would need more than 4096 calls.
pub(crate) fn steps(operation: &Operation, longest: u64, steps: &mut Vec<Step>) -> Result<(), Refusal> {
    steps.clear();
    let shape = operation.shape.as_deref();
    match (&operation.work, shape) {
        (Work::Copy { direction, host, at }, _) => {
            let (direction, at) = (*direction, *at);
            by_rows(shape, host.slice.len() as u64, longest, steps, |offset, there, rows| Step::Copy {
                direction,
                host: 0,
                offset,
                at: plus(at, there),
                rows,
            })?;
        }
        (Work::Within { from, to, len }, _) => by_rows(shape, *len, longest, steps, |from_here, there, rows| {
            Step::Within { from: plus(*from, from_here), to: plus(*to, there), rows }
        })?,
        (Work::Fill { at, len, pattern }, None) => fill(*at, *len, *pattern, steps),
        (Work::Fill { at, pattern, .. }, Some(shape)) => fill_rows(*at, *pattern, shape, longest, steps)?,
        (Work::Gather(gather), _) => scatter(gather, operation.hosts(), steps),
        (Work::Fence | Work::Compare { .. }, _) => {}
    }
    Ok(())
}

/// Refuses shapes of too many rows, where each takes a call or more.
fn few(shape: &Shape, each: u64) -> Result<(), Refusal> {
    let (len, max) = (u64::from(shape.rows) * each, MOST);
    if len > max {
        Err(Refusal::TooLong { len: shape.bytes().unwrap_or(u64::MAX), max: max / each * shape.row })
    } else {
        Ok(())
    }
}

/// One step for all rows where the driver takes them in one call, else one for each; one for the `len` bytes of a copy
/// that has no shape. `step` gets offsets in the source and in the destination.
fn by_rows(
    shape: Option<&Shape>,
    len: u64,
    longest: u64,
    steps: &mut Vec<Step>,
    step: impl Fn(u64, u64, Rows) -> Step,
) -> Result<(), Refusal> {
    let Some(shape) = shape else {
        steps.push(step(0, 0, Rows::one(len)));
        return Ok(());
    };
    let (row, count, pitches) = (shape.row, shape.rows.into(), (shape.host_pitch, shape.device_pitch));
    if [pitches.0, pitches.1].iter().all(|pitch| (row..=longest).contains(pitch)) {
        steps.push(step(0, 0, Rows { row, count, pitches }));
    } else {
        few(shape, 1)?;
        steps.extend((0..count).map(|r| step(r * pitches.0, r * pitches.1, Rows::one(row))));
    }
    Ok(())
}

/// Fills `len` bytes with the eight of `pattern`. The driver repeats one byte, or one word of four at a multiple of
/// four; longer patterns are columns of words, or of bytes where they lie odd.
fn fill(at: DeviceAddr, len: u64, pattern: u64, steps: &mut Vec<Step>) {
    let bytes = pattern.to_le_bytes();
    let word = |half: usize| u32::from_le_bytes([bytes[half], bytes[half + 1], bytes[half + 2], bytes[half + 3]]);
    if bytes.iter().all(|b| *b == bytes[0]) {
        steps.push(Step::Bytes { at, value: bytes[0], rows: Rows::one(len) });
        return;
    }
    let aligned = at.bits().is_multiple_of(4);
    let whole = len / 4 * 4;
    if aligned && word(0) == word(4) && whole > 0 {
        steps.push(Step::Words { at, value: word(0), rows: Rows::one(whole) });
    } else if aligned {
        for half in [0, 4] {
            let count = (whole / 4).saturating_sub(half as u64 / 4).div_ceil(2);
            if count > 0 {
                let rows = Rows { row: 4, count, pitches: (8, 8) };
                steps.push(Step::Words { at: plus(at, half as u64), value: word(half), rows });
            }
        }
    } else {
        for (column, value) in (0u64..).zip(bytes) {
            let count = len.saturating_sub(column).div_ceil(8);
            if count > 0 {
                let rows = Rows { row: 1, count, pitches: (8, 8) };
                steps.push(Step::Bytes { at: plus(at, column), value, rows });
            }
        }
        return;
    }
    for i in whole..len {
        steps.push(Step::Bytes { at: plus(at, i), value: bytes[(i % 8) as usize], rows: Rows::one(1) });
    }
}

fn fill_rows(at: DeviceAddr, pattern: u64, shape: &Shape, longest: u64, steps: &mut Vec<Step>) -> Result<(), Refusal> {
    let Shape { row, rows, device_pitch: pitch, .. } = *shape;
    let (count, pitches) = (u64::from(rows), (pitch, pitch));
    let same = pattern.to_le_bytes().windows(2).all(|pair| pair[0] == pair[1]);
    if !(row..=longest).contains(&pitch) {
        few(shape, 13)?; // what `fill` needs at most
        (0..count).for_each(|r| fill(plus(at, r * pitch), row, pattern, steps));
    } else if same {
        steps.push(Step::Bytes { at, value: pattern as u8, rows: Rows { row, count, pitches } });
    } else {
        // The first row, then as many rows again as there are.
        fill(at, row, pattern, steps);
        let mut done = 1;
        while done < count {
            let more = done.min(count - done);
            let rows = Rows { row, count: more, pitches };
            steps.push(Step::Within { from: at, to: plus(at, done * pitch), rows });
            done += more;
        }
    }
    Ok(())
}

/// Copies between two lists that are cut differently.
fn scatter(gather: &GatherList, hosts: &[HostSlice], steps: &mut Vec<Step>) {
    let (mut index, mut offset) = (0, 0);
    for (at, len) in &gather.device {
        let mut done = 0;
        while done < *len {
            let Some(host) = hosts.get(index) else { return };
            let n = (host.slice.len() as u64 - offset).min(len - done);
            if n > 0 {
                let at = plus(*at, done);
                steps.push(Step::Copy { direction: gather.direction, host: index, offset, at, rows: Rows::one(n) });
            }
            (done, offset) = (done + n, offset + n);
            if offset == host.slice.len() as u64 {
                (index, offset) = (index + 1, 0);
            }
        }
    }
}
