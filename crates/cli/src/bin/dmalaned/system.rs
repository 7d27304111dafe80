//! The interface to the service manager and the kernel's limits.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};

use dmalane_cli::failure::Failure;
use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Returns a socket that becomes readable on SIGTERM and SIGINT.
pub fn stop_signal() -> Result<UnixStream, Failure> {
    let (stopped, stop) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, stop.try_clone()?)?;
    }
    Ok(stopped)
}

/// The socket that the service manager passed (`LISTEN_FDS` of sd_listen_fds(3)), if any.
pub fn passed_socket() -> Result<Option<OwnedFd>, Failure> {
    let mut passed = ListenFd::from_env();
    if passed.len() > 1 {
        return Err(Failure::new(format!("the service manager passed {} sockets; one is expected", passed.len())));
    }
    let (unix, seqpacket) = (1, 5); // AF_UNIX and SOCK_SEQPACKET of linux/socket.h and linux/net.h
    match passed.take_custom(0, unix, seqpacket, "a listening Unix socket of type SEQPACKET") {
        Ok(socket) => Ok(socket),
        Err(e) => Err(Failure::because("the socket from the service manager has the wrong type", &e)
            .hint("the unit needs ListenSequentialPacket=")),
    }
}

/// Notifies the service manager (sd_notify(3)), if any.
pub fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    // On an error the service manager waits until its own timeout.
    let sent: io::Result<usize> = address.and_then(|to| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &to));
    drop(sent);
}

/// Raises the limit of open files to the hard limit, because each buffer is a descriptor. Returns it, `None` if
/// unlimited.
pub fn raise_file_limit() -> Option<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // On an error some clients are refused later.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    getrlimit(Resource::Nofile).current
}

/// Reads `vm.overcommit_memory`.
pub fn overcommit() -> Option<String> {
    std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()
}
