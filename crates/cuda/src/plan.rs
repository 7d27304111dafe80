//! Operations as steps, each of which is one call of the driver.

use dmalane_queue::{DeviceAddr, Direction, GatherList, HostSlice, Operation, QueueAddr, Refusal, Shape, Work};

/// Calls that one operation may need, at most: rows that overlap, and pitches beyond the driver's, take one for each.
const MOST: u64 = 4096;

/// One call of the driver on a stream. Host memory is the range `offset..` of slice `host` of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A copy of `len` bytes.
    Copy { direction: Direction, host: usize, offset: u64, at: DeviceAddr, len: u64 },
    /// `rows` rows of `row` bytes; pitches are at least as long.
    Rows { direction: Direction, host: usize, offset: u64, at: DeviceAddr, row: u64, rows: u64, pitches: (u64, u64) },
    /// Within the device.
    Within { from: DeviceAddr, to: DeviceAddr, len: u64 },
    /// Within the device: rows, with the pitches of source and destination.
    RowsWithin { from: DeviceAddr, to: DeviceAddr, row: u64, rows: u64, pitches: (u64, u64) },
    /// `len` times a byte.
    Bytes { at: DeviceAddr, value: u8, len: u64 },
    /// `count` times a word of four bytes, at a multiple of four.
    Words { at: DeviceAddr, value: u32, count: u64 },
    /// `rows` times `row` bytes of one value, `pitch` apart.
    ByteRows { at: DeviceAddr, value: u8, row: u64, rows: u64, pitch: u64 },
    /// `rows` words, `pitch` bytes apart; both are multiples of four.
    WordRows { at: DeviceAddr, value: u32, rows: u64, pitch: u64 },
}

impl Step {
    /// Bytes that it moves or sets.
    pub(crate) fn bytes(&self) -> u64 {
        match *self {
            Self::Copy { len, .. } | Self::Within { len, .. } | Self::Bytes { len, .. } => len,
            Self::Rows { row, rows, .. } | Self::RowsWithin { row, rows, .. } | Self::ByteRows { row, rows, .. } => {
                row * rows
            }
            Self::Words { count, .. } => 4 * count,
            Self::WordRows { rows, .. } => 4 * rows,
        }
    }

    /// The device memory that it uses: first address, bytes, and whether it writes.
    pub(crate) fn device(&self) -> [Option<(DeviceAddr, u64, bool)>; 2] {
        let extent = |row: u64, rows: u64, pitch: u64| (rows - 1) * pitch + row;
        match *self {
            Self::Copy { direction, at, len, .. } => [Some((at, len, direction == Direction::FromHost)), None],
            Self::Rows { direction, at, row, rows, pitches: (_, pitch), .. } => {
                [Some((at, extent(row, rows, pitch), direction == Direction::FromHost)), None]
            }
            Self::Within { from, to, len } => [Some((from, len, false)), Some((to, len, true))],
            Self::RowsWithin { from, to, row, rows, pitches } => {
                [Some((from, extent(row, rows, pitches.0), false)), Some((to, extent(row, rows, pitches.1), true))]
            }
            Self::Bytes { at, len, .. } => [Some((at, len, true)), None],
            Self::Words { at, count, .. } => [Some((at, 4 * count, true)), None],
            Self::ByteRows { at, row, rows, pitch, .. } => [Some((at, extent(row, rows, pitch), true)), None],
            Self::WordRows { at, rows, pitch, .. } => [Some((at, extent(4, rows, pitch), true)), None],
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
        (Work::Copy { direction, host, at }, None) => {
            steps.push(Step::Copy { direction: *direction, host: 0, offset: 0, at: *at, len: host.slice.len() as u64 });
        }
        (Work::Copy { direction, at, .. }, Some(shape)) => copy_rows(*direction, *at, shape, longest, steps)?,
        (Work::Within { from, to, len }, None) => steps.push(Step::Within { from: *from, to: *to, len: *len }),
        (Work::Within { from, to, .. }, Some(shape)) => rows_within(*from, *to, shape, longest, steps)?,
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

fn copy_rows(
    direction: Direction,
    at: DeviceAddr,
    shape: &Shape,
    longest: u64,
    steps: &mut Vec<Step>,
) -> Result<(), Refusal> {
    let Shape { row, rows, host_pitch, device_pitch } = *shape;
    let pitches = (host_pitch, device_pitch);
    if fits(shape, longest) {
        steps.push(Step::Rows { direction, host: 0, offset: 0, at, row, rows: rows.into(), pitches });
        return Ok(());
    }
    few(shape, 1)?;
    let one =
        |r: u64| Step::Copy { direction, host: 0, offset: r * host_pitch, at: plus(at, r * device_pitch), len: row };
    steps.extend((0..u64::from(rows)).map(one));
    Ok(())
}

fn rows_within(
    from: DeviceAddr,
    to: DeviceAddr,
    shape: &Shape,
    longest: u64,
    steps: &mut Vec<Step>,
) -> Result<(), Refusal> {
    let Shape { row, rows, host_pitch, device_pitch } = *shape;
    if fits(shape, longest) {
        steps.push(Step::RowsWithin { from, to, row, rows: rows.into(), pitches: (host_pitch, device_pitch) });
        return Ok(());
    }
    few(shape, 1)?;
    let one = |r: u64| Step::Within { from: plus(from, r * host_pitch), to: plus(to, r * device_pitch), len: row };
    steps.extend((0..u64::from(rows)).map(one));
    Ok(())
}

/// True when the driver takes all rows in one call.
fn fits(shape: &Shape, longest: u64) -> bool {
    [shape.host_pitch, shape.device_pitch].iter().all(|pitch| (shape.row..=longest).contains(pitch))
}

/// Fills `len` bytes with the eight of `pattern`. The driver repeats one byte, or one word of four at a multiple of
/// four; longer patterns are columns of words, or of bytes where they lie odd.
fn fill(at: DeviceAddr, len: u64, pattern: u64, steps: &mut Vec<Step>) {
    let bytes = pattern.to_le_bytes();
    let word = |half: usize| u32::from_le_bytes([bytes[half], bytes[half + 1], bytes[half + 2], bytes[half + 3]]);
    if bytes.iter().all(|b| *b == bytes[0]) {
        steps.push(Step::Bytes { at, value: bytes[0], len });
        return;
    }
    let aligned = at.bits().is_multiple_of(4);
    let whole = len / 4 * 4;
    if aligned && word(0) == word(4) && whole > 0 {
        steps.push(Step::Words { at, value: word(0), count: whole / 4 });
    } else if aligned {
        for half in [0, 4] {
            let rows = (whole / 4).saturating_sub(half as u64 / 4).div_ceil(2);
            if rows > 0 {
                steps.push(Step::WordRows { at: plus(at, half as u64), value: word(half), rows, pitch: 8 });
            }
        }
    } else {
        for (column, value) in (0u64..).zip(bytes) {
            let rows = len.saturating_sub(column).div_ceil(8);
            if rows > 0 {
                steps.push(Step::ByteRows { at: plus(at, column), value, row: 1, rows, pitch: 8 });
            }
        }
        return;
    }
    for i in whole..len {
        steps.push(Step::Bytes { at: plus(at, i), value: bytes[(i % 8) as usize], len: 1 });
    }
}

fn fill_rows(at: DeviceAddr, pattern: u64, shape: &Shape, longest: u64, steps: &mut Vec<Step>) -> Result<(), Refusal> {
    let Shape { row, rows, device_pitch: pitch, .. } = *shape;
    let rows = u64::from(rows);
    let same = pattern.to_le_bytes().windows(2).all(|pair| pair[0] == pair[1]);
    if !(row..=longest).contains(&pitch) {
        few(shape, 13)?; // what `fill` needs at most
        (0..rows).for_each(|r| fill(plus(at, r * pitch), row, pattern, steps));
    } else if same {
        steps.push(Step::ByteRows { at, value: pattern as u8, row, rows, pitch });
    } else {
        // The first row, then as many rows again as there are.
        fill(at, row, pattern, steps);
        let mut done = 1;
        while done < rows {
            let more = done.min(rows - done);
            let to = plus(at, done * pitch);
            steps.push(Step::RowsWithin { from: at, to, row, rows: more, pitches: (pitch, pitch) });
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
                steps.push(Step::Copy { direction: gather.direction, host: index, offset, at, len: n });
            }
            (done, offset) = (done + n, offset + n);
            if offset == host.slice.len() as u64 {
                (index, offset) = (index + 1, 0);
            }
        }
    }
}
