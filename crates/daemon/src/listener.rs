//! The socket that a daemon listens on.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::ServerError;
use crate::socket;

/// Default path of the daemon's socket.
pub const SOCKET: &str = "/run/dmalane/dmalaned.sock";

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    /// `None` once it is handed to the process that accepts.
    pub(crate) socket: Option<OwnedFd>,
    /// File to remove on drop.
    path: Option<PathBuf>,
}

impl Listener {
    /// Creates a socket at `path` with this file mode (0o660: owner and group may connect). Replaces the socket of a
    /// daemon that no longer runs.
    ///
    /// # Errors
    /// [`ServerError::Listen`], [`ServerError::InUse`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, ServerError> {
        let failed = |e: Errno| ServerError::Listen { path: path.to_owned(), source: e.into() };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let make = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = make().map_err(failed)?;
        let mode = Mode::from_bits_truncate(mode & 0o777);
        // Set the mode before the socket has a name, so that it is never too permissive.
        rustix::fs::fchmod(&socket, mode).map_err(failed)?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                // Connecting to a file that is no socket fails with ECONNREFUSED too.
                let there = rustix::fs::lstat(path).map_err(failed)?;
                if FileType::from_raw_mode(there.st_mode) != FileType::Socket {
                    return Err(failed(Errno::EXIST));
                }
                // Non-blocking: a listener whose backlog is full answers EAGAIN.
                let probe = make().map_err(failed)?;
                rustix::io::ioctl_fionbio(&probe, true).map_err(failed)?;
                match rustix::net::connect(probe, &address) {
                    Err(Errno::CONNREFUSED) => {}
                    Ok(()) | Err(Errno::AGAIN) => return Err(ServerError::InUse(path.to_owned())),
                    Err(e) => return Err(failed(e)),
                }
                rustix::fs::unlink(path).map_err(failed)?;
                rustix::net::bind(&socket, &address).map_err(failed)?;
            }
            other => other.map_err(failed)?,
        }
        // Restore the bits that the umask cleared.
        set_mode(path, mode).map_err(failed)?;
        // Before anybody can connect: a refused peer must not have descriptors under way, whose close may block.
        socket::pass_rights(&socket, false);
        rustix::net::listen(&socket, 64).map_err(failed)?;
        Ok(Self { socket: Some(socket), path: Some(path.to_owned()) })
    }

    /// The socket, unless a daemon serves it already.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
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
        Ok(Self { socket: Some(socket), path: None })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = rustix::fs::unlink(path);
        }
    }
}

/// Sets the mode of a socket, through no symbolic link: somebody may have put one there in its place.
fn set_mode(path: &Path, mode: Mode) -> Result<(), Errno> {
    use rustix::fs::{OFlags, fstat, open};
    let file = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::Socket {
        return Err(Errno::EXIST);
    }
    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_mode_is_set_through_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, link) = (folder.path().join("victim"), folder.path().join("link"));
        std::fs::write(&victim, "").unwrap();
        let mode = || std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&victim).unwrap().permissions());
        let before = mode();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        for path in [&victim, &link] {
            assert_eq!(set_mode(path, Mode::from_bits_truncate(0o777)), Err(Errno::EXIST));
        }
        assert_eq!(mode(), before);
        // Not even one to a socket.
        let (socket, link) = (folder.path().join("socket"), folder.path().join("to-socket"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        assert_eq!(set_mode(&link, Mode::from_bits_truncate(0o777)), Err(Errno::EXIST));
    }

    #[test]
    fn only_one_daemon_listens_on_a_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::bind(&path, 0o640).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o640);
        assert!(matches!(Listener::bind(&path, 0o600), Err(ServerError::InUse(_))));
        drop(first);
        assert!(!path.exists());
        // The socket of a killed daemon is replaced; another file is not.
        let left = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&left, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(left);
        drop(Listener::bind(&path, 0o600).unwrap());
        std::fs::write(&path, b"precious").unwrap();
        assert!(Listener::bind(&path, 0o600).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let wrong = UnixStream::pair().unwrap().0;
        assert!(matches!(Listener::from_socket(wrong.into()), Err(ServerError::WrongSocket)));
    }
}
