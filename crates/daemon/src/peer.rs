//! Who is at the other end of a socket. `unsafe` since the groups of a peer have no safe interface.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use nix::libc;
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
    /// May open functions.
    pub allowed: bool,
    /// Sees all clients in the status.
    pub admin: bool,
}

impl Peer {
    /// The peer of a connected socket, with what this daemon lets it do.
    pub fn of(socket: impl AsFd, config: &Config) -> Result<Self, Errno> {
        // Not rustix's version: it rejects process 0, which the kernel reports for a process in another namespace.
        let credentials = getsockopt(&socket, PeerCredentials).map_err(|e| Errno::from_raw_os_error(e as i32))?;
        let uid = credentials.uid();
        let mut groups = vec![credentials.gid()];
        groups.extend(supplementary(&socket)?);
        Ok(Self {
            pid: u32::try_from(credentials.pid()).unwrap_or(0),
            uid,
            user: config.user_of(uid),
            allowed: config.admits(uid, &groups),
            admin: config.is_admin(uid, &groups),
        })
    }
}

/// The supplementary groups that the peer had when it connected; none before Linux 4.13, which does not tell.
fn supplementary(socket: impl AsFd) -> Result<Vec<u32>, Errno> {
    // As many as most processes have; for more, the kernel says how many there are.
    let mut groups = vec![0u32; 32];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(&groups[..])).expect("256 KiB at most");
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: `bytes` is the length of `groups` (the line before); the kernel writes no more into it.
        let result = unsafe {
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, groups.as_mut_ptr().cast(), &raw mut bytes)
        };
        let count = bytes as usize / size_of::<u32>();
        match (result, nix::errno::Errno::last()) {
            (0, _) => groups.truncate(count),
            (_, nix::errno::Errno::ERANGE) if count > groups.len() => {
                groups.resize(count, 0);
                continue;
            }
            (_, nix::errno::Errno::ENOPROTOOPT) => groups.clear(),
            (_, e) => return Err(Errno::from_raw_os_error(e as i32)),
        }
        return Ok(groups);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_are_those_of_the_process_that_connected() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let own: Vec<u32> = rustix::process::getgroups().unwrap().into_iter().map(|group| group.as_raw()).collect();
        assert_eq!(supplementary(&socket), Ok(own));
    }
}
