//! Errors of the driver of a card.

use std::time::Duration;

use dmalane_addr::{CardAddr, Iova, Span};
use dmalane_iopt::{Format, X86_64_4Level};
use thiserror::Error;

use crate::Halt;

/// An error of the driver.
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
        /// Its value.
        value: u64,
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
        /// Number of channels of the card.
        channels: usize,
    },
    /// The channel is in use, or was given up on because it could not be stopped.
    #[error("channel {0} is in use, or could not be stopped")]
    ChannelTaken(usize),
    /// The card did not answer in time.
    #[error("the card did not {what} within {after:?}")]
    Timeout {
        /// The action that it should have taken.
        what: &'static str,
        /// Time that the driver waited.
        after: Duration,
    },
    /// A span for page tables that is not in the card's memory or holds no whole table.
    #[error("{0} is no place for page tables")]
    NoTables(Span<CardAddr>),
    /// An MMU whose tables cannot be written.
    #[error(
        "the card's MMU walks {}, and only {} can be written",
        .0.unwrap_or("tables of an unknown format"), X86_64_4Level::NAME
    )]
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

/// Why a channel of the card stopped; the cause in a [`StopReason`](dmalane_queue::StopReason) of its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The card halted it.
    #[error("{halt}, {at}")]
    Halted {
        /// Why.
        halt: Halt,
        /// The IOVA that it is about.
        at: Iova,
    },
    /// A status or an error that the register map does not have.
    #[error("status {status:#x}, error {code:#x}")]
    UnknownStatus {
        /// The channel's status register.
        status: u32,
        /// Its error register.
        code: u32,
    },
    /// The card wrote a completion where none was due.
    #[error("the card wrote {word:#x} as completion of descriptor {number}")]
    NotDue {
        /// The word in the completion ring.
        word: u64,
        /// The descriptor whose completion is next.
        number: u64,
    },
    /// A completion with an unknown status or a foreign cookie, or of a descriptor that was not submitted.
    #[error("the card completed descriptor {number} with {word:#x}")]
    BadCompletion {
        /// The word in the completion ring.
        word: u64,
        /// The descriptor.
        number: u64,
    },
    /// The card is gone.
    #[error("the card's registers read as ones, as those of a device that is gone")]
    Gone,
}
