//! Unix sockets for peers that are not trusted: at a path, and messages with descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, lstat, unlink};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

/// A connection to the SEQPACKET socket at a path, with a timeout for each message that is received and one for each
/// that is sent; to be accepted takes no longer than that, either. `None` is for ever.
///
/// # Errors
/// The kernel's: `EAGAIN` where nobody accepts in time.
pub fn connect_seqpacket(path: &Path, receive: Option<Duration>, send: Option<Duration>) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for (timeout, most) in [(Timeout::Recv, receive), (Timeout::Send, send)] {
        set_socket_timeout(&socket, timeout, most)?;
    }
    retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

/// The file of a socket, which is removed on drop, unless another one has taken its path.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
}

impl SocketFile {
    /// Creates a socket of this type, for which `listen` is still to be called, at a path with this file mode. Replaces
    /// a socket at which no process listens any more.
    ///
    /// # Errors
    /// `EADDRINUSE` where a process listens, `EEXIST` where another file is; the kernel's.
    pub fn bind(path: &Path, kind: SocketType, mode: Mode) -> Result<(OwnedFd, Self), Errno> {
        let make = || socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (socket, address) = (make()?, SocketAddrUnix::new(path)?);
        // Set the mode before the socket has a name, so that it is never too permissive.
        rustix::fs::fchmod(&socket, mode)?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                // Connecting to a file that is no socket fails with ECONNREFUSED too.
                check_socket(&lstat(path)?)?;
                // Non-blocking: a listener whose backlog is full answers EAGAIN.
                let probe = make()?;
                rustix::io::ioctl_fionbio(&probe, true)?;
                match rustix::net::connect(probe, &address) {
                    Err(Errno::CONNREFUSED) => {}
                    Ok(()) | Err(Errno::AGAIN) => return Err(Errno::ADDRINUSE),
                    Err(e) => return Err(e),
                }
                unlink(path)?;
                rustix::net::bind(&socket, &address)?;
            }
            other => other?,
        }
        // Restore the bits that the umask cleared.
        let file = set_mode(path, mode)?;
        Ok((socket, Self { path: path.to_owned(), file }))
    }

    /// Removes the file, unless another one has taken its path: for a program that exits without a drop.
    pub fn remove(&self) {
        if lstat(&self.path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.file) {
            let _ = unlink(&self.path);
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

fn check_socket(stat: &Stat) -> Result<(), Errno> {
    if FileType::from_raw_mode(stat.st_mode) == FileType::Socket { Ok(()) } else { Err(Errno::EXIST) }
}

/// Sets the mode of a socket, through no symbolic link: somebody may have put one there in its place. Returns the
/// device and inode.
fn set_mode(path: &Path, mode: Mode) -> Result<(u64, u64), Errno> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&file)?;
    check_socket(&stat)?;
    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Most descriptors that the kernel passes in one message (SCM_MAX_FD): with room for all, the kernel closes none.
const MOST: usize = 253;

/// Bytes that were received, with what came with them.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReceivedBytes {
    /// How many; 0 at the end of the connection.
    pub len: usize,
    /// The descriptors, closed on exec.
    pub fds: Vec<OwnedFd>,
    /// The message was longer than the buffer, or this process may not open as many descriptors: some are missing.
    pub is_cut: bool,
}

/// Receives once from a Unix socket: the next message, or what there is of a stream.
///
/// # Errors
/// The kernel's.
pub fn receive_with_fds(socket: impl AsFd, into: &mut [u8], flags: RecvFlags) -> Result<ReceivedBytes, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(into)];
    let got = retry_on_intr(|| recvmsg(&socket, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC))?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let is_cut = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(ReceivedBytes { len: got.bytes, fds: rights.flatten().collect(), is_cut })
}

/// Sends once to a Unix socket, without a SIGPIPE, and returns how many bytes: of a message all.
///
/// # Errors
/// The kernel's; `ETOOMANYREFS` for more descriptors than the kernel passes at once.
pub fn send_with_fds(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    retry_on_intr(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL))
}

#[cfg(test)]
mod tests {
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
}
