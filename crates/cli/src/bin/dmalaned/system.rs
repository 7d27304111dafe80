//! What a service manager gives a daemon, and wants to hear from it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};

use dmalane_cli::failure::Failure;
use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};

/// What becomes readable when the process is told to end.
pub fn until_told_to_end() -> Result<UnixStream, Failure> {
    let (told, tell) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, tell.try_clone()?)?;
    }
    Ok(told)
}

/// The socket that was handed over (`LISTEN_FDS` of sd_listen_fds(3)), if one was.
pub fn handed_over() -> Result<Option<OwnedFd>, Failure> {
    let mut handed = ListenFd::from_env();
    if handed.len() > 1 {
        return Err(Failure::new(format!("{} sockets were handed over, and one is expected", handed.len())));
    }
    let (unix, seqpacket) = (1, 5); // AF_UNIX and SOCK_SEQPACKET of linux/socket.h and linux/net.h
    match handed.take_custom(0, unix, seqpacket, "a listening Unix socket of type SEQPACKET") {
        Ok(socket) => Ok(socket),
        Err(e) => Err(Failure::because("the socket that was handed over is of another kind", &e)
            .hint("the unit needs ListenSequentialPacket=")),
    }
}

/// Tells a service manager (sd_notify(3)), if there is one.
pub fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    // It is only news: without it the service manager waits until its own time-out.
    let sent: io::Result<usize> = address.and_then(|to| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &to));
    drop(sent);
}

/// Buffers are descriptors, so that many clients need many: as many as this user may have. Gives how many that are, `None` without a limit.
pub fn raise_file_limit() -> Option<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // With fewer, some clients are refused.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    getrlimit(Resource::Nofile).current
}

/// What the kernel says of `vm.overcommit_memory`.
pub fn overcommit() -> Option<String> {
    std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()
}
