//! Sockets of other users.

use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

/// A user whom nothing of the tests belongs to.
const OTHER: u32 = 54_321;

/// Listens as another user, from a thread of that user: who connects is asked to trust it. `None` unless run by root.
fn listen_as_another(path: &Path, kind: SocketType) -> Option<OwnedFd> {
    let listen_as = || {
        let other = Uid::from_raw(OTHER);
        set_thread_res_uid(other, other, other).ok()?;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&socket, 8).unwrap();
        Some(socket)
    };
    thread::scope(|scope| scope.spawn(listen_as).join().unwrap())
}

#[test]
fn a_socket_of_another_user_gets_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    for (device, kind) in
        [("daemon", SocketType::SEQPACKET), ("vfio-user", SocketType::STREAM), ("vrtd", SocketType::SEQPACKET)]
    {
        let path = folder.path().join(device);
        let Some(_listener) = listen_as_another(&path, kind) else { return println!("SKIPPED: only root is others") };
        let error = dmalane::open(&format!("{device}:{}", path.display())).err().unwrap();
        let error = dmalane::error_chain(&error);
        assert!(error.contains(&format!("the socket belongs to user {OTHER}, and not to 0 or ")), "{error}");
    }
}
