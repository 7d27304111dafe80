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
    #[error("no keeper answers at {} ({})", path.display(), match source.kind() {
        std::io::ErrorKind::PermissionDenied => "does its --mode let this user connect?",
        _ => "dmalaned keep starts one; DMALANE_KEEP names another socket; the Python package has no dmalaned: an \
              archive of a release has it, and in a clone of dmalane `cargo install --path crates/cli`",
    })]
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
    /// A model is in other memory.
    #[error("{name:?} is kept in memory of {device}{}", match here {
        Some(here) => format!(", and this device is {here}"),
        None => " alone: programs attach to it there (dmalane.attach(device=), dml_target_attach, \
                 attach_onto); `dmalane keep` without -d keeps it in host memory, too".to_owned(),
    })]
    Elsewhere {
        /// The name of the model.
        name: String,
        /// The device in whose memory it is, or the host.
        device: String,
        /// The device that was to read it, if one was.
        here: Option<String>,
    },
    /// Memory of a device cannot be lent or taken.
    #[error("cannot {what}")]
    Device {
        /// The attempt ("lend its memory").
        what: &'static str,
        /// The answer of the device.
        source: Box<dyn std::error::Error + Send + Sync>,
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
