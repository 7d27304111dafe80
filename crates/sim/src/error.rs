//! Errors of the software card and its host.

use dmalane_addr::{CardAddr, Iova, Span};
use thiserror::Error;

/// An error of the software card or its host.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The memory that stands for the card's could not be had.
    #[error(transparent)]
    Memory(#[from] dmalane_dma::Error),
    /// A card that cannot be made.
    #[error("a card with {setting} of {value}: {rule}")]
    BadConfig {
        /// The setting that is invalid.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// The values that it can have.
        rule: &'static str,
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
    #[error("no memory for the card's at {at}")]
    NoMemory {
        /// The start of the block that could not be had.
        at: CardAddr,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// No thread for a channel's worker.
    #[error("cannot start a worker")]
    NoThread(#[source] std::io::Error),
    /// The IOMMU's page tables refused the mapping.
    #[error("cannot map {span}")]
    PageTable {
        /// Where the buffer was to appear.
        span: Span<Iova>,
        /// The error of the page table.
        source: dmalane_iopt::Error,
    },
}

impl From<Error> for dmalane_dma::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Memory(error) => error,
            error => Self::Backend(Box::new(error)),
        }
    }
}
