//! The socket that a daemon listens on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dmalane_dma::SocketFile;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};

use crate::ServerError;
use crate::socket;

/// Default path of the daemon's socket.
pub const SOCKET: &str = "/run/dmalane/dmalaned.sock";

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) file: Option<SocketFile>,
}

impl Listener {
    /// Creates a socket at `path` with this file mode (0o660: owner and group may connect). Replaces the socket of a
    /// daemon that no longer runs. `rights` says whether first messages may have descriptors: not those for a daemon
    /// that shares a card, where a refused peer could have some under way whose close blocks.
    ///
    /// # Errors
    /// [`ServerError::Listen`], [`ServerError::InUse`].
    pub fn bind(path: &Path, mode: u32, rights: bool) -> Result<Self, ServerError> {
        let failed = |e: Errno| match e {
            Errno::ADDRINUSE => ServerError::InUse(path.to_owned()),
            e => ServerError::Listen { path: path.to_owned(), source: e.into() },
        };
        let mode = Mode::from_bits_truncate(mode & 0o777);
        let (socket, file) = SocketFile::bind(path, SocketType::SEQPACKET, mode).map_err(failed)?;
        // Before anybody can connect.
        socket::pass_rights(&socket, rights);
        rustix::net::listen(&socket, 64).map_err(failed)?;
        Ok(Self { socket, file: Some(file) })
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Uses an inherited listening socket (socket activation).
    ///
    /// # Errors
    /// [`ServerError::WrongSocket`].
    pub fn from_socket(socket: OwnedFd) -> Result<Self, ServerError> {
        use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
        let right = socket_type(&socket) == Ok(SocketType::SEQPACKET)
            && socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && socket_acceptconn(&socket) == Ok(true);
        if !right {
            return Err(ServerError::WrongSocket);
        }
        socket::pass_rights(&socket, false);
        // Peers that have connected before may have sent some.
        Ok(Self { socket, file: None })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::net::SocketAddrUnix;

    use super::*;

    #[test]
    fn only_one_daemon_listens_on_a_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::bind(&path, 0o640, false).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o640);
        assert!(matches!(Listener::bind(&path, 0o600, false), Err(ServerError::InUse(_))));
        drop(first);
        assert!(!path.exists());
        // The socket of a killed daemon is replaced; another file is not.
        let left = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&left, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(left);
        drop(Listener::bind(&path, 0o600, false).unwrap());
        std::fs::write(&path, b"precious").unwrap();
        assert!(Listener::bind(&path, 0o600, false).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let wrong = UnixStream::pair().unwrap().0;
        assert!(matches!(Listener::from_socket(wrong.into()), Err(ServerError::WrongSocket)));
    }
}
