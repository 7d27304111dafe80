//! Who is at the other end of a socket.

use std::os::fd::AsFd;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::io::Errno;

use crate::config::Config;

/// A client, as the kernel knew it when it connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    pub pid: u32,
    pub uid: u32,
    /// The user who is charged: the owner of a subordinate user, or `uid`.
    pub user: u32,
    /// Root, or the daemon's own user: sees all clients in the status.
    pub admin: bool,
}

impl Peer {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd, config: &Config) -> Result<Self, Errno> {
        // Not rustix's version: it rejects process 0, which the kernel reports for a process in another namespace.
        let credentials = getsockopt(&socket, PeerCredentials).map_err(|e| Errno::from_raw_os_error(e as i32))?;
        let uid = credentials.uid();
        Ok(Self {
            pid: u32::try_from(credentials.pid()).unwrap_or(0),
            uid,
            user: config.user_of(uid),
            admin: uid == 0 || uid == rustix::process::geteuid().as_raw(),
        })
    }
}
