//! Everything that a DMA engine can be asked for.

use dmalane_addr::{Access, Iova, Span};
use dmalane_dma::{BufferSlice, Registrar};

use crate::{Capabilities, DeviceAddr, Direction, Limits, QueueAddr, Refusal, Registered};

/// A slice of host memory, and the registration through which the device reaches it.
///
/// The operation holds the registration, so a buffer cannot be deregistered while it is in flight.
#[derive(Debug)]
pub struct HostSlice {
    /// The bytes.
    pub slice: BufferSlice,
    /// The registration that they lie in; `None` for a queue that needs none.
    pub via: Option<Registered>,
}

impl HostSlice {
    /// Where the device sees the bytes; `None` when there are none, or the registration is missing or of other memory.
    #[inline]
    pub fn iova(&self) -> Option<Span<Iova>> {
        self.via.as_ref()?.iova_of(&self.slice)
    }

    /// True when there are bytes outside of the registration.
    #[inline]
    fn strays(&self) -> bool {
        !self.slice.is_empty() && self.via.as_ref().is_some_and(|via| via.iova_of(&self.slice).is_none())
    }

    /// For queues that need registrations: checks that the one of this slice is for the device behind `bus` and permits
    /// `wanted`.
    ///
    /// # Errors
    /// [`Refusal::NotRegistered`], [`Refusal::NotPermitted`].
    #[inline]
    pub fn check(&self, bus: &(impl Registrar + ?Sized), wanted: Access) -> Result<(), Refusal> {
        let mapping = self.via.as_ref().ok_or(Refusal::NotRegistered)?.mapping();
        if mapping.iova_of(&self.slice).is_none() || !bus.owns(mapping) {
            return Err(Refusal::NotRegistered);
        }
        if mapping.access().contains(wanted) { Ok(()) } else { Err(Refusal::NotPermitted) }
    }
}

impl From<BufferSlice> for HostSlice {
    /// Without a registration.
    fn from(slice: BufferSlice) -> Self {
        Self { slice, via: None }
    }
}

impl From<(BufferSlice, Registered)> for HostSlice {
    fn from((slice, via): (BufferSlice, Registered)) -> Self {
        Self { slice, via: Some(via) }
    }
}

/// The caller's knowledge about the processor's cache: which of two kinds of stores is faster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheHint {
    /// The device decides, by the length and by what it has moved lately.
    #[default]
    Auto,
    /// The bytes are in the cache, or will be used at once: ordinary stores.
    Hot,
    /// They are not, and will not: stores that bypass the cache.
    Cold,
}

/// Makes an operation two-dimensional: `rows` rows of `row` bytes each, at different distances on both sides.
///
/// A pitch is the distance in bytes from the start of a row to the start of the next. It may be shorter than a row:
/// what is written twice then has the bytes of the later row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Bytes of a row.
    pub row: u64,
    /// Rows.
    pub rows: u32,
    /// Pitch in host memory, and of the source of [`Work::Within`].
    pub host_pitch: u64,
    /// Pitch in device memory, and of the destination of [`Work::Within`].
    pub device_pitch: u64,
}

impl Shape {
    /// Bytes that are moved: `row * rows`.
    pub fn bytes(&self) -> Option<u64> {
        self.row.checked_mul(self.rows.into())
    }

    /// Bytes from the start of the first row to the end of the last, at this pitch; `None` when there is no row or it
    /// does not fit 64 bits.
    pub fn extent(&self, pitch: u64) -> Option<u64> {
        u64::from(self.rows.checked_sub(1)?).checked_mul(pitch)?.checked_add(self.row).filter(|_| self.row > 0)
    }
}

/// A list of slices of host memory and a list of ranges of device memory, of the same length in bytes. The fragments of
/// the two lists need not match.
#[derive(Debug)]
pub struct GatherList<A = DeviceAddr> {
    /// The direction.
    pub direction: Direction,
    /// Host memory, in order.
    pub host: Vec<HostSlice>,
    /// Device memory, in order: addresses and bytes.
    pub device: Vec<(A, u64)>,
}

impl<A> GatherList<A> {
    /// The number of copies that it stands for: a new one begins where a slice or a range of either list does.
    pub fn parts(&self) -> usize {
        let mut host = self.host.iter().map(|host| host.slice.len() as u64);
        let mut device = self.device.iter().map(|(_, len)| *len);
        let (mut parts, mut a, mut b) = (0, host.next(), device.next());
        while let (Some(left), Some(right)) = (a, b) {
            parts += 1;
            let len = left.min(right);
            a = if left > len { Some(left - len) } else { host.next() };
            b = if right > len { Some(right - len) } else { device.next() };
        }
        parts
    }
}

/// The work of an operation.
#[derive(Debug)]
pub enum Work<A = DeviceAddr> {
    /// Copy between host and device.
    Copy {
        /// The direction.
        direction: Direction,
        /// The host's side. With a [`Shape`], all of its rows.
        host: HostSlice,
        /// The device's side.
        at: A,
    },
    /// Compare host memory with device memory; neither is changed. Ends with
    /// [`OpError::Differs`](crate::OpError::Differs) where they differ.
    Compare {
        /// The host's side. With a [`Shape`], all of its rows.
        host: HostSlice,
        /// The device's side.
        at: A,
    },
    /// Copy between two lists, as one operation.
    Gather(Box<GatherList<A>>),
    /// Copy from device memory to device memory. The two sides do not overlap ([`Refusal::Overlap`]): not in their
    /// addresses, and where different addresses are bound to the same memory the bytes there are unspecified. Rows may
    /// lie between each other where both pitches are equal.
    Within {
        /// The source.
        from: A,
        /// The destination.
        to: A,
        /// Bytes, with a [`Shape`] those of all rows.
        len: u64,
    },
    /// Fill device memory with a repeated pattern of eight bytes, whose first (the lowest of `pattern`) lies at `at`,
    /// and at the start of every row.
    Fill {
        /// Where.
        at: A,
        /// Bytes, with a [`Shape`] those of all rows. Any number: the last repetition may be cut short.
        len: u64,
        /// The eight bytes.
        pattern: u64,
    },
    /// Nothing: it ends when everything that was submitted before it has, and what is submitted after it begins later.
    Fence,
}

/// Something for a [`Queue`](crate::Queue) to do. Owns the host memory that it is about.
#[derive(Debug)]
pub struct Operation<A = DeviceAddr> {
    /// The kind of work and its operands.
    pub work: Work<A>,
    /// Two-dimensional; not for [`Work::Gather`] and [`Work::Fence`].
    pub shape: Option<Box<Shape>>,
    /// How to copy.
    pub cache: CacheHint,
}

impl<A: QueueAddr> Operation<A> {
    /// Copies between `host` and as many bytes at `at`.
    #[inline]
    pub fn copy(direction: Direction, host: impl Into<HostSlice>, at: A) -> Self {
        Work::Copy { direction, host: host.into(), at }.into()
    }

    /// Reads from `at` into `host`.
    #[inline]
    pub fn read(host: impl Into<HostSlice>, at: A) -> Self {
        Self::copy(Direction::ToHost, host, at)
    }

    /// Writes `host` to `at`.
    #[inline]
    pub fn write(host: impl Into<HostSlice>, at: A) -> Self {
        Self::copy(Direction::FromHost, host, at)
    }

    /// Compares `host` with device memory.
    pub fn compare(host: impl Into<HostSlice>, at: A) -> Self {
        Work::Compare { host: host.into(), at }.into()
    }

    /// Copies within the device.
    pub fn within(from: A, to: A, len: u64) -> Self {
        Work::Within { from, to, len }.into()
    }

    /// Fills device memory.
    pub fn fill(at: A, len: u64, pattern: u64) -> Self {
        Work::Fill { at, len, pattern }.into()
    }

    /// Copies between two lists.
    pub fn gather(direction: Direction, host: Vec<HostSlice>, device: Vec<(A, u64)>) -> Self {
        Work::Gather(Box::new(GatherList { direction, host, device })).into()
    }

    /// Orders what comes after behind what came before.
    pub fn fence() -> Self {
        Work::Fence.into()
    }

    /// The same in two dimensions.
    #[must_use]
    pub fn shaped(self, shape: Shape) -> Self {
        Self { shape: Some(Box::new(shape)), ..self }
    }

    /// The same, with what is known about the cache.
    #[must_use]
    pub fn hint(self, cache: CacheHint) -> Self {
        Self { cache, ..self }
    }

    /// The bytes that it moves, fills or compares; 0 for a fence.
    #[inline]
    pub fn bytes(&self) -> u64 {
        match (&self.shape, &self.work) {
            (Some(shape), _) => shape.bytes().unwrap_or(u64::MAX),
            (None, Work::Copy { host, .. } | Work::Compare { host, .. }) => host.slice.len() as u64,
            (None, Work::Gather(g)) => g.host.iter().map(|h| h.slice.len() as u64).sum(),
            (None, Work::Within { len, .. } | Work::Fill { len, .. }) => *len,
            (None, Work::Fence) => 0,
        }
    }

    /// The capabilities that a queue needs for it.
    #[inline]
    pub fn needs(&self) -> Capabilities {
        let shape = if self.shape.is_some() { Capabilities::SHAPE } else { Capabilities::empty() };
        shape
            | match &self.work {
                Work::Copy { direction, .. } => Capabilities::copy(*direction),
                Work::Compare { .. } => Capabilities::COMPARE,
                Work::Gather(g) => Capabilities::GATHER | Capabilities::copy(g.direction),
                Work::Within { .. } => Capabilities::WITHIN,
                Work::Fill { .. } => Capabilities::FILL,
                Work::Fence => Capabilities::FENCE,
            }
    }

    /// The host memory.
    pub fn hosts(&self) -> &[HostSlice] {
        match &self.work {
            Work::Copy { host, .. } | Work::Compare { host, .. } => std::slice::from_ref(host),
            Work::Gather(g) => &g.host,
            Work::Within { .. } | Work::Fill { .. } | Work::Fence => &[],
        }
    }

    /// The direction of a copy or gather list; `None` for other work.
    pub fn direction(&self) -> Option<Direction> {
        match &self.work {
            Work::Copy { direction, .. } => Some(*direction),
            Work::Gather(g) => Some(g.direction),
            _ => None,
        }
    }

    /// For queues that need registrations: checks those of all host memory, as [`HostSlice::check`] does.
    ///
    /// # Errors
    /// [`Refusal::NotRegistered`], [`Refusal::NotPermitted`].
    pub fn check_registered(&self, registrar: &(impl Registrar + ?Sized)) -> Result<(), Refusal> {
        let access = self.direction().map_or(Access::READ, Direction::host_access); // a comparison reads
        self.hosts().iter().try_for_each(|host| host.check(registrar, access))
    }

    /// The host memory back, in the order in which it was given.
    pub fn into_host(self) -> Vec<HostSlice> {
        match self.work {
            Work::Copy { host, .. } | Work::Compare { host, .. } => vec![host],
            Work::Gather(g) => g.host,
            Work::Within { .. } | Work::Fill { .. } | Work::Fence => Vec::new(),
        }
    }

    /// The host memory of a copy or comparison; `None` for other work.
    #[inline]
    pub fn into_slice(self) -> Option<BufferSlice> {
        match self.work {
            Work::Copy { host, .. } | Work::Compare { host, .. } => Some(host.slice),
            _ => None,
        }
    }

    /// For implementations of [`Queue`](crate::Queue): refuses what a queue with these capabilities and limits cannot
    /// do, and what [`Operation::check`] says.
    ///
    /// # Errors
    /// [`Refusal::Unsupported`], those of [`Operation::check`], [`Refusal::TooLong`], [`Refusal::TooManyParts`].
    #[inline]
    pub fn admit(&self, capabilities: Capabilities, limits: Limits) -> Result<(), Refusal> {
        // Nearly every operation is a plain copy with nothing wrong.
        if let Self { work: Work::Copy { direction, host, at }, shape: None, .. } = self
            && let len @ 1.. = host.slice.len() as u64
            && len <= limits.max_len
            && limits.max_parts > 0
            && capabilities.contains(Capabilities::copy(*direction))
            && at.advance(len - 1).is_some()
            && !host.strays()
        {
            return Ok(());
        }
        self.admit_any(capabilities, limits)
    }

    fn admit_any(&self, capabilities: Capabilities, limits: Limits) -> Result<(), Refusal> {
        let missing = self.needs() - capabilities;
        if !missing.is_empty() {
            return Err(Refusal::Unsupported(missing));
        }
        self.check()?;
        let (len, max) = (self.bytes(), limits.max_len);
        if len > max {
            return Err(Refusal::TooLong { len, max });
        }
        let (parts, max) = (if let Work::Gather(g) = &self.work { g.parts() } else { 1 }, limits.max_parts);
        if parts > max { Err(Refusal::TooManyParts { parts, max }) } else { Ok(()) }
    }

    /// Refuses what no queue can do: no bytes, sides of different lengths, a range past the top of its space, a shape
    /// without rows, a copy within device memory whose sides overlap, a registration of other memory than that of the
    /// operation. (Whether there is one, and whose it is, [`Operation::check_registered`] says.)
    ///
    /// # Errors
    /// [`Refusal`]: [`Empty`](Refusal::Empty), [`Mismatch`](Refusal::Mismatch), [`PastTheTop`](Refusal::PastTheTop),
    /// [`Overlap`](Refusal::Overlap), [`NotRegistered`](Refusal::NotRegistered).
    pub fn check(&self) -> Result<(), Refusal> {
        if self.hosts().iter().any(HostSlice::strays) {
            return Err(Refusal::NotRegistered);
        }
        let fits = |at: &A, extent: u64| match extent.checked_sub(1) {
            None => Err(Refusal::Empty),
            Some(last) if at.advance(last).is_none() => Err(Refusal::PastTheTop),
            Some(_) => Ok(()),
        };
        // The extent on one side: that of the rows, or simply the bytes.
        let shape = self.shape.as_deref();
        let extent = |pitch: fn(&Shape) -> u64, len: u64| match shape {
            None => Ok(len),
            Some(s) if s.row == 0 || s.rows == 0 => Err(Refusal::Empty),
            Some(s) => s.extent(pitch(s)).filter(|_| s.bytes().is_some()).ok_or(Refusal::PastTheTop),
        };
        let rows_add_up = |len: u64| shape.is_none_or(|s| s.bytes() == Some(len));
        match &self.work {
            Work::Copy { host, at, .. } | Work::Compare { host, at } => {
                let len = host.slice.len() as u64;
                if extent(|s| s.host_pitch, len)? != len {
                    return Err(Refusal::Mismatch);
                }
                fits(at, extent(|s| s.device_pitch, len)?)
            }
            Work::Within { from, to, len } => {
                fits(from, extent(|s| s.host_pitch, *len)?)?;
                fits(to, extent(|s| s.device_pitch, *len)?)?;
                let same_space = from.card_addr().is_some() == to.card_addr().is_some();
                match rows_add_up(*len) {
                    false => Err(Refusal::Mismatch),
                    true if same_space && overlap(from.bits(), to.bits(), *len, shape) => Err(Refusal::Overlap),
                    true => Ok(()),
                }
            }
            Work::Fill { at, len, .. } => {
                fits(at, extent(|s| s.device_pitch, *len)?)?;
                if rows_add_up(*len) { Ok(()) } else { Err(Refusal::Mismatch) }
            }
            Work::Gather(_) | Work::Fence if shape.is_some() => Err(Refusal::Mismatch),
            Work::Gather(g) => {
                let mut device = 0u64;
                for (at, len) in &g.device {
                    fits(at, *len)?;
                    device = device.checked_add(*len).ok_or(Refusal::Mismatch)?;
                }
                if g.host.is_empty() || g.host.iter().any(|h| h.slice.is_empty()) {
                    return Err(Refusal::Empty);
                }
                if device == self.bytes() { Ok(()) } else { Err(Refusal::Mismatch) }
            }
            Work::Fence => Ok(()),
        }
    }
}

/// True where the sides of a copy within one space have bytes in common. Rows with different pitches count as all that
/// lies between them.
fn overlap(from: u64, to: u64, len: u64, shape: Option<&Shape>) -> bool {
    let distance = from.abs_diff(to);
    let Some(shape @ &Shape { row, host_pitch, device_pitch, .. }) = shape else { return distance < len };
    let first = if from < to { host_pitch } else { device_pitch };
    if shape.extent(first).is_some_and(|extent| extent <= distance) {
        return false;
    }
    let between_rows = || distance % host_pitch >= row && host_pitch - distance % host_pitch >= row;
    host_pitch != device_pitch || host_pitch < row || !between_rows()
}

impl<A> From<Work<A>> for Operation<A> {
    fn from(work: Work<A>) -> Self {
        Self { work, shape: None, cache: CacheHint::Auto }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rows_with_bytes_in_common_overlap() {
        let bytes = |from: u64, shape: &Shape, pitch: u64| -> BTreeSet<u64> {
            (0..u64::from(shape.rows)).flat_map(|n| from + n * pitch..from + n * pitch + shape.row).collect()
        };
        let (mut shared, mut apart) = (0, 0);
        for n in 0_u64..14 * 14 * 4 * 4 * 7 * 7 {
            let mut rest = n;
            let mut below = |most: u64| {
                let value = rest % most;
                rest /= most;
                value
            };
            let (from, to, row, rows) = (below(14), below(14), 1 + below(4), 1 + below(4) as u32);
            let shape = Shape { row, rows, host_pitch: below(7), device_pitch: below(7) };
            let right = !bytes(from, &shape, shape.host_pitch).is_disjoint(&bytes(to, &shape, shape.device_pitch));
            let found = overlap(from, to, row * u64::from(rows), Some(&shape));
            assert!(found || !right, "{from} to {to}, {shape:?}");
            // What lies between rows counts where pitches differ.
            let exact = shape.host_pitch == shape.device_pitch && shape.host_pitch >= row;
            assert!(!exact || found == right, "{from} to {to}, {shape:?}");
            if exact {
                *if found { &mut shared } else { &mut apart } += 1;
            }
            assert_eq!(overlap(from, to, row, None), from.abs_diff(to) < row);
        }
        assert!(shared > 1000 && apart > 1000);
    }
}
