//! What can go wrong with a card.

use std::time::Duration;

use dmalane_addr::{CardAddr, Span};
use dmalane_iopt::{Format, X86_64_4Level};
use thiserror::Error;

/// An error of the software card or of the driver.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Memory, a mapping or a register could not be had.
    #[error(transparent)]
    Bus(#[from] dmalane_dma::Error),
    /// The device is something else.
    #[error("the device's ID register reads {0:#x}, not that of a dmalane card")]
    NotACard(u32),
    /// A register map with another major version.
    #[error("the card has register map {}.{}, the driver knows 1.x", .0 >> 16, .0 & 0xffff)]
    Version(u32),
    /// The card says something about itself that cannot be.
    #[error("the card's {register} register reads {value:#x}, which cannot be")]
    BadCapability {
        /// Which register.
        register: &'static str,
        /// What it reads as.
        value: u64,
    },
    /// A card that cannot be made.
    #[error("a card with {what} of {value}: {rule}")]
    BadConfig {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it should be.
        rule: &'static str,
    },
    /// A ring must have a power of two of entries, from 2 to what the card takes.
    #[error("a ring of {entries} entries; the card takes powers of two from 2 to {max}")]
    RingSize {
        /// Entries asked for.
        entries: usize,
        /// Most entries.
        max: usize,
    },
    /// The card has no such channel.
    #[error("there is no channel {index}, the card has {channels}")]
    NoChannel {
        /// Which one, from 0.
        index: usize,
        /// How many there are.
        channels: usize,
    },
    /// The channel is in use, or was given up on because it could not be stopped.
    #[error("channel {0} is in use, or could not be stopped")]
    ChannelTaken(usize),
    /// The card did not answer in time.
    #[error("the card did not {what} within {after:?}")]
    Timeout {
        /// What it should have done.
        what: &'static str,
        /// How long the driver waited.
        after: Duration,
    },
    /// Card memory that does not exist.
    #[error("the card has no {len} bytes of memory at {at}")]
    Outside {
        /// Where the access starts.
        at: CardAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// The machine has no memory left to stand for the card's.
    #[error("no memory for the card's at {at}: {source}")]
    NoMemory {
        /// The start of the block that could not be had.
        at: CardAddr,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// No thread for a channel's worker.
    #[error("cannot start a worker: {0}")]
    NoThread(std::io::Error),
    /// A span for page tables that is not in the card's memory or holds no whole table.
    #[error("{0} is no place for page tables")]
    NoTables(Span<CardAddr>),
    /// An MMU whose tables cannot be written.
    #[error("the card's MMU walks {}, and only {} can be written", .0.unwrap_or("tables of an unknown format"), X86_64_4Level::NAME)]
    OtherMmu(Option<&'static str>),
    /// A card whose memory has no room for page tables.
    #[error("the card is too small: its page tables need {needed} bytes of one memory, and more for buffers")]
    TooSmall {
        /// Bytes of page tables.
        needed: u64,
    },
    /// The card's virtual address space.
    #[error(transparent)]
    Vm(#[from] dmalane_vm::Error),
}
