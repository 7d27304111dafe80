//! The far end of a card's channel.

use dmalane_addr::{CardAddr, DeviceVa};

use crate::{Far, Registered};

/// A place in a card's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceAddr {
    /// By the address of the memory itself.
    Card(CardAddr),
    /// By an address that the card's MMU translates.
    Va(DeviceVa),
}

/// A place in a card's memory, and the registration through which the card reaches the host's side.
///
/// The operation owns a share of the registration, so a buffer cannot be deregistered while it is in flight.
#[derive(Clone, Debug)]
pub struct DeviceFar {
    /// Where on the card.
    pub at: DeviceAddr,
    /// The registered buffer that the operation's part is a part of.
    pub via: Registered,
}

impl Far for DeviceFar {
    fn advance(&self, bytes: u64) -> Option<Self> {
        Some(Self { at: self.at.advance(bytes)?, via: self.via.clone() })
    }

    fn card_addr(&self) -> Option<CardAddr> {
        match self.at {
            DeviceAddr::Card(a) => Some(a),
            DeviceAddr::Va(_) => None,
        }
    }
}
