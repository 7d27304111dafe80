//! Everything that a DMA engine can be asked for, and how it ends.

use dmalane_addr::Address;
use dmalane_dma::BufferSlice;
use thiserror::Error;

use crate::{DeviceAddr, Direction, OpError, Refusal, Registered, Ticket};

/// A part of host memory, and the registration through which the device reaches it.
///
/// The operation owns a share of the registration, so a buffer cannot be deregistered while it is in flight.
#[derive(Debug)]
pub struct HostPart {
    /// The bytes.
    pub part: BufferSlice,
    /// The registration that they lie in.
    pub via: Registered,
}

/// What is known about the processor's cache: which of two ways to copy is the faster one.
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
/// A pitch is the distance in bytes from the start of a row to the start of the next. It may be shorter than a row: what is
/// written twice then has the bytes of the later row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Bytes of a row.
    pub row: u64,
    /// Rows.
    pub rows: u32,
    /// Pitch in host memory, and of the source of [`Work::Within`].
    pub near_pitch: u64,
    /// Pitch in device memory, and of the destination of [`Work::Within`].
    pub far_pitch: u64,
}

impl Shape {
    /// Bytes that are moved: `row * rows`.
    pub fn bytes(&self) -> Option<u64> {
        self.row.checked_mul(self.rows.into())
    }

    /// Bytes from the start of the first row to the end of the last, at this pitch; `None` when there is no row or it does not
    /// fit 64 bits.
    pub fn extent(&self, pitch: u64) -> Option<u64> {
        u64::from(self.rows.checked_sub(1)?).checked_mul(pitch)?.checked_add(self.row).filter(|_| self.row > 0)
    }
}

/// Host memory in several pieces against device memory in several pieces: the first bytes of the one list go with the first
/// bytes of the other, wherever either is cut.
#[derive(Debug)]
pub struct Gather {
    /// Which way.
    pub direction: Direction,
    /// Host memory, in order.
    pub host: Vec<HostPart>,
    /// Device memory, in order: where, and how many bytes. As many bytes in all as the host's side.
    pub device: Vec<(DeviceAddr, u64)>,
}

/// What is to be done.
#[derive(Debug)]
pub enum Work {
    /// Copy between host and device.
    Copy {
        /// Which way.
        direction: Direction,
        /// The host's side. With a [`Shape`], all of its rows.
        host: HostPart,
        /// The device's side.
        at: DeviceAddr,
    },
    /// Compare host memory with device memory; neither is changed. Ends with [`OpError::Differs`] where they differ.
    Compare {
        /// The host's side. With a [`Shape`], all of its rows.
        host: HostPart,
        /// The device's side.
        at: DeviceAddr,
    },
    /// Copy between two lists of pieces, as one operation.
    Gather(Box<Gather>),
    /// Copy from device memory to device memory. Overlapping ranges give unspecified bytes.
    Within {
        /// The source.
        from: DeviceAddr,
        /// The destination.
        to: DeviceAddr,
        /// Bytes, with a [`Shape`] those of all rows.
        len: u64,
    },
    /// Fill device memory with eight bytes again and again, beginning with the first (the lowest of `pattern`) at `at`, and at
    /// the start of every row.
    Fill {
        /// Where.
        at: DeviceAddr,
        /// Bytes, with a [`Shape`] those of all rows. Any number: the last repetition may be cut short.
        len: u64,
        /// The eight bytes.
        pattern: u64,
    },
    /// Nothing: it ends when everything that was submitted to the channel before it has, and what is submitted after it
    /// begins later.
    Fence,
}

/// Something for a [`Queue`](crate::Queue) to do. Owns the host memory that it is about.
#[derive(Debug)]
pub struct Operation {
    /// What.
    pub work: Work,
    /// Two-dimensional; not for [`Work::Gather`] and [`Work::Fence`].
    pub shape: Option<Box<Shape>>,
    /// How to copy.
    pub cache: CacheHint,
}

impl Operation {
    /// Copies between host and device, `part` whole.
    pub fn copy(direction: Direction, part: BufferSlice, via: Registered, at: DeviceAddr) -> Self {
        Work::Copy { direction, host: HostPart { part, via }, at }.into()
    }

    /// Compares `part` with device memory.
    pub fn compare(part: BufferSlice, via: Registered, at: DeviceAddr) -> Self {
        Work::Compare { host: HostPart { part, via }, at }.into()
    }

    /// Copies within the device.
    pub fn within(from: DeviceAddr, to: DeviceAddr, len: u64) -> Self {
        Work::Within { from, to, len }.into()
    }

    /// Fills device memory.
    pub fn fill(at: DeviceAddr, len: u64, pattern: u64) -> Self {
        Work::Fill { at, len, pattern }.into()
    }

    /// Copies between two lists.
    pub fn gather(direction: Direction, host: Vec<HostPart>, device: Vec<(DeviceAddr, u64)>) -> Self {
        Work::Gather(Box::new(Gather { direction, host, device })).into()
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
            (None, Work::Copy { host, .. } | Work::Compare { host, .. }) => host.part.len() as u64,
            (None, Work::Gather(g)) => g.host.iter().map(|h| h.part.len() as u64).sum(),
            (None, Work::Within { len, .. } | Work::Fill { len, .. }) => *len,
            (None, Work::Fence) => 0,
        }
    }

    /// What a queue must be able to do for it.
    #[inline]
    pub fn needs(&self) -> Abilities {
        let shape = if self.shape.is_some() { Abilities::SHAPE } else { Abilities::empty() };
        shape
            | match &self.work {
                Work::Copy { direction, .. } => Abilities::copy(*direction),
                Work::Compare { .. } => Abilities::COMPARE,
                Work::Gather(g) => Abilities::GATHER | Abilities::copy(g.direction),
                Work::Within { .. } => Abilities::WITHIN,
                Work::Fill { .. } => Abilities::FILL,
                Work::Fence => Abilities::FENCE,
            }
    }

    /// The host memory back, in the order in which it was given.
    pub fn into_parts(self) -> Vec<HostPart> {
        match self.work {
            Work::Copy { host, .. } | Work::Compare { host, .. } => vec![host],
            Work::Gather(g) => g.host,
            Work::Within { .. } | Work::Fill { .. } | Work::Fence => Vec::new(),
        }
    }

    /// Refuses what no queue can do: no bytes, sides of different lengths, a range past the top of its space, a shape that is none.
    /// What is left to a queue is whether it *can*, and whether the registration lets it.
    ///
    /// # Errors
    /// [`Refusal`]: [`Empty`](Refusal::Empty), [`Mismatch`](Refusal::Mismatch), [`PastTheTop`](Refusal::PastTheTop).
    pub fn check(&self) -> Result<(), Refusal> {
        let fits = |at: &DeviceAddr, extent: u64| match extent.checked_sub(1) {
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
                let len = host.part.len() as u64;
                if extent(|s| s.near_pitch, len)? != len {
                    return Err(Refusal::Mismatch);
                }
                fits(at, extent(|s| s.far_pitch, len)?)
            }
            Work::Within { from, to, len } => {
                fits(from, extent(|s| s.near_pitch, *len)?)?;
                fits(to, extent(|s| s.far_pitch, *len)?)?;
                if rows_add_up(*len) { Ok(()) } else { Err(Refusal::Mismatch) }
            }
            Work::Fill { at, len, .. } => {
                fits(at, extent(|s| s.far_pitch, *len)?)?;
                if rows_add_up(*len) { Ok(()) } else { Err(Refusal::Mismatch) }
            }
            Work::Gather(_) | Work::Fence if shape.is_some() => Err(Refusal::Mismatch),
            Work::Gather(g) => {
                let mut device = 0u64;
                for (at, len) in &g.device {
                    fits(at, *len)?;
                    device = device.checked_add(*len).ok_or(Refusal::Mismatch)?;
                }
                if g.host.is_empty() || g.host.iter().any(|h| h.part.is_empty()) {
                    return Err(Refusal::Empty);
                }
                if device == self.bytes() { Ok(()) } else { Err(Refusal::Mismatch) }
            }
            Work::Fence => Ok(()),
        }
    }
}

impl From<Work> for Operation {
    fn from(work: Work) -> Self {
        Self { work, shape: None, cache: CacheHint::Auto }
    }
}

bitflags::bitflags! {
    /// What a queue can do.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct Abilities: u32 {
        /// Copy from host to device.
        const FROM_HOST = 1;
        /// Copy from device to host.
        const TO_HOST = 1 << 1;
        /// [`Work::Within`].
        const WITHIN = 1 << 2;
        /// [`Work::Fill`].
        const FILL = 1 << 3;
        /// [`Work::Compare`].
        const COMPARE = 1 << 4;
        /// [`Shape`].
        const SHAPE = 1 << 5;
        /// [`Work::Gather`].
        const GATHER = 1 << 6;
        /// [`Work::Fence`].
        const FENCE = 1 << 7;
        /// [`Queue::cancel`](crate::Queue::cancel) of what the device has begun with.
        const CANCEL = 1 << 8;
    }
}

impl Abilities {
    /// That of copying this way.
    pub fn copy(direction: Direction) -> Self {
        match direction {
            Direction::FromHost => Self::FROM_HOST,
            Direction::ToHost => Self::TO_HOST,
        }
    }
}

/// An operation that ended, with its host memory.
#[derive(Debug)]
pub struct Ended {
    /// What [`Queue::enqueue`](crate::Queue::enqueue) returned.
    pub ticket: Ticket,
    /// The operation, exactly as it was submitted.
    pub operation: Operation,
    /// Ok when every byte was done.
    pub result: Result<(), OpError>,
    /// Bytes, counted from the front, that are known to be done: all of them when the result is Ok.
    pub bytes: u64,
}

/// An operation that was not accepted, given back whole.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct Rejected {
    /// The operation as it was submitted.
    pub operation: Operation,
    /// Why.
    pub reason: Refusal,
}

impl DeviceAddr {
    /// The place `bytes` further on, or `None` past the top of its space.
    #[inline]
    pub fn advance(self, bytes: u64) -> Option<Self> {
        Some(match self {
            Self::Card(a) => Self::Card(a.checked_add(bytes)?),
            Self::Va(a) => Self::Va(a.checked_add(bytes)?),
        })
    }
}
