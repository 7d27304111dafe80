//! What a queue can do, and how much.

use dmalane_addr::Access;

/// The direction of a copy, seen from host memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Into host memory: a file read; device to host (C2H).
    ToHost,
    /// Out of host memory: a file write; host to device (H2C).
    FromHost,
}

impl Direction {
    /// The access of the device to host memory.
    #[inline]
    pub fn host_access(self) -> Access {
        match self {
            Self::ToHost => Access::WRITE,
            Self::FromHost => Access::READ,
        }
    }
}

/// The capacity of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Operations in flight, at most. A gather list or a shape may count as more than one.
    pub capacity: usize,
    /// Bytes per operation, at most.
    pub max_len: u64,
    /// Parts of a gather list, at most ([`GatherList::parts`](crate::GatherList::parts)); `usize::MAX` for any number.
    pub max_parts: usize,
}

bitflags::bitflags! {
    /// Capabilities of a queue.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct Capabilities: u32 {
        /// Copy from host to device.
        const FROM_HOST = 1;
        /// Copy from device to host.
        const TO_HOST = 1 << 1;
        /// [`Work::Within`](crate::Work::Within).
        const WITHIN = 1 << 2;
        /// [`Work::Fill`](crate::Work::Fill).
        const FILL = 1 << 3;
        /// [`Work::Compare`](crate::Work::Compare).
        const COMPARE = 1 << 4;
        /// [`Shape`](crate::Shape).
        const SHAPE = 1 << 5;
        /// [`Work::Gather`](crate::Work::Gather).
        const GATHER = 1 << 6;
        /// [`Work::Fence`](crate::Work::Fence).
        const FENCE = 1 << 7;
        /// [`Queue::cancel`](crate::Queue::cancel) of what the device has begun with.
        const CANCEL = 1 << 8;
        /// [`Queue::stop`](crate::Queue::stop) and [`Queue::restart`](crate::Queue::restart).
        const STOP = 1 << 9;
        /// Operations end in the order in which they were submitted, and have the effect that they have one after the
        /// other.
        const ORDERED = 1 << 10;
    }
}

impl Capabilities {
    /// Those of the copy engines of a GPU, used in order.
    pub const COPY_ENGINE: Self = Self::FROM_HOST
        .union(Self::TO_HOST)
        .union(Self::WITHIN)
        .union(Self::FILL)
        .union(Self::SHAPE)
        .union(Self::GATHER)
        .union(Self::FENCE)
        .union(Self::STOP)
        .union(Self::ORDERED);

    /// The capability to copy in this direction.
    pub fn copy(direction: Direction) -> Self {
        match direction {
            Direction::FromHost => Self::FROM_HOST,
            Direction::ToHost => Self::TO_HOST,
        }
    }
}
