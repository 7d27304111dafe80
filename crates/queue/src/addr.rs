//! The addresses that operations of a queue name.

use std::fmt::{self, Debug};

use dmalane_addr::{Address, CardAddr, DeviceVa, FileOffset};

/// The address space of a queue's target: [`FileOffset`] for files, [`DeviceAddr`] for devices.
pub trait QueueAddr: Copy + Debug + Send + Sync + 'static {
    /// The address `bytes` further on, or `None` past the top of its space.
    fn advance(self, bytes: u64) -> Option<Self>;

    /// The address as a number.
    fn bits(self) -> u64;

    /// The address as one of card memory, for policies that route by placement.
    fn card_addr(self) -> Option<CardAddr> {
        None
    }
}

impl QueueAddr for FileOffset {
    fn advance(self, bytes: u64) -> Option<Self> {
        self.checked_add(bytes)
    }

    fn bits(self) -> u64 {
        Address::bits(self)
    }
}

/// An address of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceAddr {
    /// The address of the memory itself.
    Card(CardAddr),
    /// An address that the device's MMU translates.
    Va(DeviceVa),
}

impl fmt::Display for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Card(at) => fmt::Display::fmt(at, f),
            Self::Va(at) => fmt::Display::fmt(at, f),
        }
    }
}

impl QueueAddr for DeviceAddr {
    #[inline]
    fn advance(self, bytes: u64) -> Option<Self> {
        Some(match self {
            Self::Card(a) => Self::Card(a.checked_add(bytes)?),
            Self::Va(a) => Self::Va(a.checked_add(bytes)?),
        })
    }

    #[inline]
    fn bits(self) -> u64 {
        match self {
            Self::Card(a) => a.bits(),
            Self::Va(a) => a.bits(),
        }
    }

    #[inline]
    fn card_addr(self) -> Option<CardAddr> {
        match self {
            Self::Card(a) => Some(a),
            Self::Va(_) => None,
        }
    }
}

impl From<CardAddr> for DeviceAddr {
    fn from(at: CardAddr) -> Self {
        Self::Card(at)
    }
}

impl From<DeviceVa> for DeviceAddr {
    fn from(at: DeviceVa) -> Self {
        Self::Va(at)
    }
}
