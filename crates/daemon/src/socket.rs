//! Sends and receives messages with descriptors over a SEQPACKET socket.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use dmalane_dma::{receive_with_fds, send_with_fds};
use nix::libc;
use nix::sys::socket::SetSockOpt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::wire::{MAX_FDS, MAX_MESSAGE};

/// `SO_PASSRIGHTS` of asm-generic/socket.h, since Linux 6.16: whether a socket takes descriptors.
const SO_PASSRIGHTS: libc::c_int = 83;

#[derive(Clone, Copy)]
struct PassRights;
nix::setsockopt_impl!(PassRights, libc::SOL_SOCKET, SO_PASSRIGHTS, bool, nix::sys::socket::sockopt::SetBool);

/// Lets the peer send descriptors, or not: then it gets EPERM. Sockets that a listener accepts inherit the option at
/// connect(2). Before Linux 6.16, which does not know it, every socket takes descriptors.
pub fn pass_rights(socket: impl AsFd, pass: bool) {
    let _ = PassRights.set(&socket, &pass);
}

/// Waits until one of these descriptors is readable or at its end, or for this time. Returns which of them are.
pub(crate) fn readable<const N: usize>(fds: [Option<BorrowedFd<'_>>; N], time: Option<Duration>) -> [bool; N] {
    let mut polled: Vec<_> = fds.iter().flatten().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let _ = poll(&mut polled, time.and_then(|time| Timespec::try_from(time).ok()).as_ref());
    let mut ready = polled.iter().map(|fd| !fd.revents().is_empty());
    fds.map(|fd| fd.is_some() && ready.next() == Some(true))
}

/// Result of receiving from a socket.
pub(crate) enum Received {
    /// A message with this many bytes.
    Message(usize),
    /// A message that is too long, or has more descriptors than the format or the process's limit allows.
    TooMuch,
    /// The peer has closed the connection, or sent an empty message.
    End,
    /// No message is available now.
    Nothing,
}

/// Receives one message if one is available. Adds its descriptors, with close-on-exec set, to `fds`, also those of a
/// message that is too long.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8; MAX_MESSAGE],
    fds: &mut Vec<OwnedFd>,
) -> Result<Received, Errno> {
    let mut take = || receive_with_fds(&socket, buffer, RecvFlags::DONTWAIT);
    // A peer that leaves messages unread resets the connection. The kernel reports that once, before messages that the
    // peer sent earlier, such as the reason of a refusal.
    let got = match take().or_else(|e| if e == Errno::CONNRESET { take() } else { Err(e) }) {
        Ok(got) => got,
        Err(Errno::AGAIN) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
        Err(e) => return Err(e),
    };
    fds.extend(got.fds);
    if got.is_cut || fds.len() > MAX_FDS {
        return Ok(Received::TooMuch);
    }
    Ok(if got.len == 0 { Received::End } else { Received::Message(got.len) })
}

/// Sends one message.
pub(crate) fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> Result<(), Errno> {
    let flags = if wait { SendFlags::empty() } else { SendFlags::DONTWAIT };
    send_with_fds(socket, message, fds, flags).map(drop)
}

/// Kicks the daemon. The write fails only when the eventfd's count is full, and then the daemon is awake anyway.
pub(crate) fn kick(fd: impl AsFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Calls a client: sends eight bytes, or nothing while the socket is full of unread calls.
pub(crate) fn call(fd: impl AsFd) {
    let _ = rustix::net::send(fd, &1u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Reads a bounded number of pending calls. Only for the client: a message from a client could carry descriptors.
pub(crate) fn drain(fd: impl AsFd) {
    let mut left = 64;
    while left > 0 && rustix::net::recv(&fd, &mut [0u8; 8], RecvFlags::DONTWAIT).is_ok_and(|(n, _)| n > 0) {
        left -= 1;
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn a_bounded_number_of_calls_is_read_at_once() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (client, daemon) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (0..70).for_each(|_| call(&daemon));
        drain(&client);
        let left = || rustix::net::recv(&client, &mut [0u8; 8], RecvFlags::empty());
        let left: Vec<usize> = std::iter::from_fn(|| left().ok()).map(|(n, _)| n).collect();
        assert_eq!(left, [8; 6]);
    }

    #[test]
    fn the_last_message_arrives_before_the_reset() {
        let (client, daemon) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        send(&client, b"hello", &[], false).unwrap();
        send(&daemon, b"refused", &[], false).unwrap();
        drop(daemon);
        let (mut buffer, mut fds) = ([0; MAX_MESSAGE], Vec::new());
        assert!(matches!(receive(&client, &mut buffer, &mut fds), Ok(Received::Message(7))));
        assert!(matches!(receive(&client, &mut buffer, &mut fds), Ok(Received::End)));
    }
}
