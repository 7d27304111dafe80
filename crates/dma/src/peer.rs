//! The user behind a Unix socket that memory of this process is sent over.

use std::os::fd::AsFd;

use rustix::net::sockopt::socket_peercred;
use thiserror::Error;

/// Why the process behind a socket gets no memory of this one.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// It belongs to another user.
    #[error("the socket belongs to user {uid}, and not to {}", names(.trusted))]
    Untrusted {
        /// The user that called listen(2).
        uid: u32,
        /// The users that were expected.
        trusted: Vec<u32>,
    },
    /// The kernel does not say whose it is.
    #[error("the kernel does not say whose the socket is")]
    Unknown(#[source] rustix::io::Errno),
}

fn names(users: &[u32]) -> String {
    users.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
}

/// Users to whom a process that gets memory of this one may belong, unless others are named: root, and the user of this
/// process.
pub fn trusted_users() -> Vec<u32> {
    vec![0, rustix::process::geteuid().as_raw()]
}

/// Refuses a connected Unix socket that none of these users listens on: root does under socket activation. No users
/// means anyone.
///
/// # Errors
/// [`PeerError`].
pub fn check_peer(socket: impl AsFd, trusted: &[u32]) -> Result<(), PeerError> {
    if trusted.is_empty() {
        return Ok(());
    }
    let uid = socket_peercred(socket).map_err(PeerError::Unknown)?.uid.as_raw();
    match trusted.contains(&uid) {
        true => Ok(()),
        false => Err(PeerError::Untrusted { uid, trusted: trusted.to_vec() }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_users_that_are_trusted_get_memory() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let me = rustix::process::geteuid().as_raw();
        assert_eq!(check_peer(&ours, &trusted_users()), Ok(()));
        assert_eq!(check_peer(&ours, &[]), Ok(()));
        let error = check_peer(&ours, &[54_321, 54_322]).unwrap_err();
        assert_eq!(error, PeerError::Untrusted { uid: me, trusted: vec![54_321, 54_322] });
        let text = format!("the socket belongs to user {me}, and not to 54321 or 54322");
        assert_eq!(error.to_string(), text);
    }
}
