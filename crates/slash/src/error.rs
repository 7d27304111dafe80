//! Errors of the driver, with what helps against them.

use std::io;
use std::path::PathBuf;

use dmalane_addr::CardAddr;
use dmalane_dma::PeerError;
use thiserror::Error;

use crate::kernel::Request;

/// Why a card cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The node cannot be opened.
    #[error("cannot open {}{}", path.display(), opening(source))]
    Open {
        /// The driver's node.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The daemon vrtd cannot be used.
    #[error("cannot use vrtd at {}{}", socket.display(), connecting(source))]
    Vrtd {
        /// Its socket.
        socket: PathBuf,
        /// The kernel's error, or what is wrong with its answers.
        source: io::Error,
    },
    /// The process behind the daemon's socket is another user's.
    #[error("cannot use vrtd at {}", socket.display())]
    WrongServer {
        /// Its socket.
        socket: PathBuf,
        /// Whose it is.
        source: PeerError,
    },
    /// The driver's interface is one that this program does not know.
    #[error(
        "the driver's interface is not known: {found}. This program knows INFO of 20 bytes, 52 bytes (since July 2026) \
         and buffers that the driver allocates (since June 2026)"
    )]
    Version {
        /// The version that was found.
        found: String,
    },
    /// A call failed.
    #[error("{call} failed{}", calling(call, source))]
    Call {
        /// The driver's name of the call.
        call: &'static str,
        /// The driver's error.
        source: io::Error,
    },
    /// The driver returned an invalid answer.
    #[error("{call} answered with {what}")]
    Answer {
        /// The driver's name of the call.
        call: &'static str,
        /// The answer.
        what: String,
    },
    /// Transfers cannot be started.
    #[error("the driver cannot start transfers (TRANSFER)")]
    NoBegin(#[source] io::Error),
    /// The driver does not say how transfers ended.
    #[error("the driver does not say how transfers ended (TRANSFER)")]
    NoEnd(#[source] io::Error),
    /// The driver moved a different number of bytes than requested.
    #[error("the driver moved {moved} of {wanted} bytes (TRANSFER)")]
    Short {
        /// Bytes of the transfer.
        wanted: u64,
        /// The answer.
        moved: u64,
    },
    /// A transfer failed on the way.
    #[error("{len} bytes at {at} and on are in an unknown state")]
    Unknown {
        /// Bytes of the transfer.
        len: u64,
        /// Its first address on the card.
        at: CardAddr,
        /// The failure.
        source: Box<Error>,
    },
    /// A queue failed, and may still use its buffers.
    #[error("the queue cannot be stopped ({stopping}): its buffers are never freed")]
    Unstoppable {
        /// The failure.
        #[source]
        failure: Box<Error>,
        /// Why it cannot be stopped.
        stopping: io::Error,
    },
    /// A buffer of the driver cannot be mapped.
    #[error("cannot map a buffer of the driver")]
    Map(#[source] io::Error),
    /// Host memory that is not the driver's.
    #[error("the card reaches only buffers that its driver allocates: take memory of the device's own heap")]
    Foreign,
    /// A ring size that does not exist.
    #[error("ring size {0} does not exist: they have the numbers 0 to 15")]
    Ring(u32),
    /// A text that names no card.
    #[error("{0:?} is not the number N of a node /dev/slash_qdma_ctlN")]
    Name(String),
    /// The queue's thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

impl Error {
    pub(crate) fn call(request: Request, source: io::Error) -> Self {
        Self::Call { call: request.name(), source }
    }

    /// The kind of the kernel's error where there is one, so that callers recognise it.
    pub(crate) fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Call { source, .. } | Self::Map(source) => source.kind(),
            _ => io::ErrorKind::Other,
        }
    }
}

/// Fixes of errors of connecting to the daemon.
fn connecting(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ECONNREFUSED) => "; is it running (sudo systemctl enable --now vrtd.socket)?",
        Some(libc::EACCES) => "; the socket is closed to this user: sudo usermod -aG vrt $USER",
        _ => "",
    }
}

/// Fixes of errors of opening a node.
fn opening(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT) => "; is the module loaded (modprobe slash) and the card there (lspci -d 10ee:)?",
        Some(libc::EACCES | libc::EPERM) => {
            "; the node is closed to this user: run as root, or open the node (docs/how-to/v80.md#permissions)"
        }
        Some(libc::ENODEV) => "; the driver is removing the card",
        _ => "",
    }
}

/// Fixes of errors of calls.
fn calling(call: &str, error: &io::Error) -> &'static str {
    match (call, error.raw_os_error()) {
        ("QPAIR_ADD", Some(libc::ENOTTY)) => "; the module is older than July 2026 (no aperture_size): update SLASH",
        ("BUF_CREATE", Some(libc::ENOTTY)) => {
            "; the module is older than June 2026 (it has no buffers of its own): update SLASH"
        }
        ("INFO", Some(libc::ENOTTY)) => "; this is no node of SLASH",
        ("QPAIR_ADD", Some(libc::EBUSY)) => {
            "; all 256 queue pairs are taken: a process that was killed leaves its own until the module is loaded again"
        }
        (_, Some(libc::ENODEV)) => "; the driver is removing or resetting the card",
        (_, Some(libc::ETIME | libc::ETIMEDOUT)) => "; the card did not answer within the driver's 10 s",
        _ => "",
    }
}
