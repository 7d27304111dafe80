//! Messages with descriptors over Unix sockets, from peers that are not trusted.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Most descriptors that the kernel passes in one message (SCM_MAX_FD): with room for all, the kernel closes none.
const MOST: usize = 253;

/// Bytes that were received, with what came with them.
#[derive(Debug)]
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
