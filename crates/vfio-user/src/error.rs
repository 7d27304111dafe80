//! Errors of a device that another process serves.

use std::io;
use std::path::PathBuf;

use dmalane_addr::{Iova, RangeError};
use dmalane_dma::PeerError;
use thiserror::Error;

use crate::Command;

/// An error of the client's side of vfio-user.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// No process accepts connections at the socket.
    #[error("cannot connect to {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process behind the socket is another user's.
    #[error("cannot use {} (if the user of its server is right: -d vfio-user:SOCKET,server-uid=UID)", path.display())]
    WrongServer {
        /// The socket.
        path: PathBuf,
        /// Whose it is.
        source: PeerError,
    },
    /// The timeouts of the socket, or the eventfds of the interrupts, cannot be set up.
    #[error("cannot set up the connection to the device's process")]
    Setup(#[source] io::Error),
    /// The connection failed during a request, or the device's process took too long. The connection is closed.
    #[error("the device's process does not answer to {command:?}")]
    Unanswered {
        /// The request.
        command: Command,
        /// The socket's error.
        source: io::Error,
    },
    /// The device's process answered a request with an error number.
    #[error("the device's process refuses {command:?}")]
    Refused {
        /// The request.
        command: Command,
        /// The error of the answer.
        source: io::Error,
    },
    /// The region has no such bytes, as its description says.
    #[error("region {region} has {has} bytes: {len} bytes at {offset:#x} are beyond its end")]
    BeyondRegion {
        /// The region.
        region: u32,
        /// Its length in bytes.
        has: u64,
        /// Where the access begins.
        offset: u64,
        /// Bytes of the access.
        len: usize,
    },
    /// The device's process takes no more mappings; it has announced how many.
    #[error("the device's process takes at most {most} mappings: larger buffers need fewer")]
    TooManyMappings {
        /// Mappings that may exist at a time.
        most: u64,
    },
    /// The device's process broke the protocol.
    #[error("the device's process broke the protocol")]
    Protocol(#[from] ProtocolError),
    /// The state of the device cannot be written to where it is saved, or read from there.
    #[error("cannot write or read the saved state of the device")]
    State(#[source] io::Error),
    /// No range of IOVAs is free.
    #[error(transparent)]
    Iova(#[from] RangeError<Iova>),
}

/// How the device's process broke the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// Its version is not 0.x.
    #[error("it speaks another version than 0.x")]
    Version,
    /// A capability of its version message is no number, or too small to drive a device, or the data of that message is
    /// no JSON.
    #[error("it announced a bad {0} with its version")]
    Capability(&'static str),
    /// The device is not a PCI device.
    #[error("it serves a device that is not a PCI device")]
    NotPci,
    /// An answer has the id or command of another request, or is not marked as an answer.
    #[error("it answered another request than the one sent")]
    WrongAnswer,
    /// The description of a region has no length.
    #[error("it described a region without a length")]
    NoRegionLength,
    /// The answer to a read has more or fewer bytes than requested.
    #[error("it answered a read with the wrong number of bytes")]
    ReadLength,
}

#[cfg(test)]
#[test]
fn causes_are_printed_once() {
    let (path, command, source) = (PathBuf::from("socket"), Command::Reset, || io::Error::other("why"));
    for error in [
        Error::Connect { path: path.clone(), source: source() },
        Error::WrongServer { path, source: PeerError::Untrusted { uid: 1, trusted: vec![2] } },
        Error::Setup(source()),
        Error::Unanswered { command, source: source() },
        Error::Refused { command, source: source() },
        Error::State(source()),
        ProtocolError::Version.into(),
    ] {
        let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |&e| e.source());
        let texts: Vec<String> = chain.map(ToString::to_string).collect();
        assert!(texts.len() == 2 && !texts[0].contains(&texts[1]), "{texts:?}");
    }
}

impl From<Error> for dmalane_dma::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Iova(error) => Self::Iova(error),
            error => Self::Backend(Box::new(error)),
        }
    }
}
