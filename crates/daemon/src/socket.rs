//! Messages with descriptors over a SEQPACKET socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::wire::{MAX_FDS, MAX_MESSAGE};

/// Descriptors that the kernel puts into one message at most (SCM_MAX_FD): with room for all of them it closes none itself.
const KERNEL_FDS: usize = 253;

/// What came out of a socket.
pub(crate) enum Received {
    /// A message: its bytes are the first so many of the buffer.
    Message(usize),
    /// Longer than a message may be, or with more descriptors than may come with one, or than this process may have.
    TooMuch,
    /// The other side is gone, or says that it wants to go.
    End,
    /// Nothing now.
    Nothing,
}

/// Takes one message, if there is one. The descriptors that come with it are added to `fds`, also those of what is too much; they are closed on the
/// next `exec`.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8; MAX_MESSAGE],
    fds: &mut Vec<OwnedFd>,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
        Err(e) => return Err(e),
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Ok(Received::TooMuch);
    }
    Ok(if got.bytes == 0 { Received::End } else { Received::Message(got.bytes) })
}

/// Sends one message.
pub(crate) fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, !wait);
    loop {
        match sendmsg(&socket, &[IoSlice::new(message)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

/// Kicks the daemon. The write fails only when the eventfd's count is full, which takes a client that never stops kicking.
pub(crate) fn kick(fd: impl AsFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Calls a client: sends eight bytes, or nothing when its socket is full of unread calls.
pub(crate) fn call(fd: impl AsFd) {
    let _ = rustix::net::send(fd, &1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Reads a bounded number of pending calls. For the client: a message from a socket can carry descriptors.
pub(crate) fn drain(fd: impl AsFd) {
    let mut left = 64;
    while left > 0 && rustix::net::recv(&fd, &mut [0u8; 8], RecvFlags::DONTWAIT).is_ok_and(|(n, _)| n > 0) {
        left -= 1;
    }
}
