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
    #[error("a card with {setting} of {value}: {}", setting.rule())]
    BadConfig {
        /// The setting that is invalid.
        setting: CardSetting,
        /// Its value.
        value: u64,
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
    /// The IOMMU's page tables refused the mapping.
    #[error("cannot map {span}: {source}")]
    PageTable {
        /// Where the buffer was to appear.
        span: Span<Iova>,
        /// The error of the page table.
        source: dmalane_iopt::Error,
    },
}

/// A setting of [`CardConfig`](crate::CardConfig) that has a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CardSetting {
    /// Bytes of DDR.
    Ddr,
    /// Bytes of HBM.
    Hbm,
    /// DMA channels.
    Channels,
}

impl CardSetting {
    /// The values that it can have, for people.
    pub fn rule(self) -> &'static str {
        match self {
            Self::Ddr => "must be a multiple of 2 MiB, neither zero nor above 256 GiB",
            Self::Hbm => "must be a multiple of 4 MiB, neither zero nor above 256 GiB",
            Self::Channels => "must be 1 to 16",
        }
    }
}

impl std::fmt::Display for CardSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ddr => "DDR",
            Self::Hbm => "HBM",
            Self::Channels => "channels",
        })
    }
}

impl From<Error> for dmalane_dma::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Memory(error) => error,
            error => Self::Backend(Box::new(error)),
        }
    }
}
