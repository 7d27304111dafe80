//! Why a kept model cannot be had.

use std::path::PathBuf;

use dmalane_dma::PeerError;
use thiserror::Error;

use super::wire::KeepRefusal;

/// Reason why a kept model cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeepError {
    /// No keeper answers.
    #[error("no keeper answers at {} (dmalaned keep starts one)", path.display())]
    NoKeeper {
        /// Its socket.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The keeper belongs to a user who is not trusted.
    #[error("the keeper is not trusted")]
    Peer(#[from] PeerError),
    /// The keeper has refused.
    #[error("{why}")]
    Refused {
        /// Why.
        kind: KeepRefusal,
        /// In words.
        why: String,
    },
    /// What has come is not what was promised.
    #[error("{what}: {why}")]
    Bad {
        /// Which part of it.
        what: String,
        /// The defect.
        why: String,
    },
    /// A model cannot be kept.
    #[error("cannot {what}")]
    System {
        /// The attempt ("seal its memory").
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}
