//! The interface to the service manager and the kernel: notifications and limits.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Notifies the service manager (sd_notify(3)), if there is one.
pub fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    // Errors are ignored: the service manager then waits until its own timeout.
    let sent: io::Result<usize> = address.and_then(|to| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &to));
    drop(sent);
}

/// Raises the limit of open files to the maximum, since each buffer needs a descriptor. Returns the limit; `None`
/// when there is none.
pub fn raise_file_limit() -> Option<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // On failure the lower limit stays, and some clients may be refused.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    getrlimit(Resource::Nofile).current
}
