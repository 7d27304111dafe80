//! Why a daemon cannot start or continue.

use std::io;
use std::path::PathBuf;

use crate::config::BadConfig;

/// Why a daemon cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// An invalid setting.
    #[error(transparent)]
    Config(#[from] BadConfig),
    /// The socket could not be created.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another process listens on this path.
    #[error("another process is listening at {}", .0.display())]
    InUse(PathBuf),
    /// The inherited socket has the wrong type.
    #[error(
        "the inherited socket is not a listening Unix socket of type SEQPACKET (ListenSequentialPacket= in a unit)"
    )]
    WrongSocket,
    /// A system call that the server needs failed.
    #[error("cannot serve")]
    Io(#[from] io::Error),
    /// The process that starts those of clients has ended, and they with it: it was killed.
    #[error("the process that starts those of clients was killed")]
    ForkerDied,
}
