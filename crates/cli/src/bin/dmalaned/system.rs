//! The interface to the service manager and the kernel: signals, inherited sockets, notifications and limits.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};

use dmalane_cli::failure::Failure;
use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};

/// A socket that becomes readable on SIGTERM or SIGINT.
pub fn termination() -> Result<UnixStream, Failure> {
    let (receiver, sender) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
    }
    Ok(receiver)
}

/// The socket that the service manager passed (`LISTEN_FDS` of sd_listen_fds(3)), if any.
pub fn inherited_socket() -> Result<Option<OwnedFd>, Failure> {
    let mut inherited = ListenFd::from_env();
    if inherited.len() > 1 {
        return Err(Failure::new(format!("{} sockets were passed, but one is expected", inherited.len())));
    }
    let (unix, seqpacket) = (1, 5); // AF_UNIX and SOCK_SEQPACKET of linux/socket.h and linux/net.h
    match inherited.take_custom(0, unix, seqpacket, "a listening Unix socket of type SEQPACKET") {
        Ok(socket) => Ok(socket),
        Err(e) => Err(Failure::because("the inherited socket has the wrong type", &e)
            .hint("the unit needs ListenSequentialPacket=")),
    }
}

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

/// Contents of `vm.overcommit_memory`.
pub fn overcommit() -> Option<String> {
    std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()
}

/// The least limit of memory among the control groups that this process is in, of version 2 or 1. Above `memory.high`
/// the kernel does not kill, but slows every thread down.
pub fn memory_limit() -> Option<u64> {
    limit_of(&std::fs::read_to_string("/proc/self/cgroup").ok()?, &|path| std::fs::read_to_string(path).ok())
}

/// [`memory_limit`], by the contents of `/proc/self/cgroup` and a way to read files.
fn limit_of(groups: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let (root, files, path): (_, &[&str], _) = match line.splitn(3, ':').collect::<Vec<_>>()[..] {
            ["0", "", path] => ("/sys/fs/cgroup", &["memory.max", "memory.high"], path),
            [_, controllers, path] if controllers.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", &["memory.limit_in_bytes"], path)
            }
            _ => continue,
        };
        let mut group = path.trim_end_matches('/');
        loop {
            let texts = files.iter().filter_map(|file| read(&format!("{root}{group}/{file}")));
            // Version 1 says "none" with a huge number.
            let limits = texts.filter_map(|text| text.trim().parse().ok()).filter(|limit| *limit < 1 << 60);
            least = least.into_iter().chain(limits).min();
            let Some((parent, _)) = group.rsplit_once('/') else { break };
            group = parent;
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::limit_of;

    #[test]
    fn the_least_limit_of_all_groups_counts() {
        let read = |path: &str| {
            let text = match path {
                "/sys/fs/cgroup/system.slice/dmalaned.service/memory.max" => "max\n",
                "/sys/fs/cgroup/system.slice/memory.max" => "3221225472\n",
                "/sys/fs/cgroup/system.slice/high.service/memory.max" => "2147483648\n",
                "/sys/fs/cgroup/system.slice/high.service/memory.high" => "2013265920\n",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes" => "1048576\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes" => "9223372036854771712\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(limit_of("0::/system.slice/dmalaned.service\n", &read), Some(3 << 30));
        assert_eq!(limit_of("0::/system.slice/high.service\n", &read), Some(1920 << 20));
        assert_eq!(limit_of("5:cpu:/\n4:memory:/a\n0::/\n", &read), Some(1 << 20));
        for none in ["0::/\n", "4:memory:/\n", "", "nonsense"] {
            assert_eq!(limit_of(none, &read), None, "{none}");
        }
    }
}
