//! Runs a program under a seccomp filter that asks this process: openings of a V80's node and ioctls of its driver are
//! answered by a model of the driver, everything else by the kernel.
//!
//! The program is not changed and has no privileges: where this process is root's, it runs as the user nobody.
//! `unsafe` is for the calls of seccomp, which no library has.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use dmalane_slash::Request;
use dmalane_slash::model::{Answer, DriverModel, FileId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// The user that has no rights, and its group.
const NOBODY: u32 = 65534;

/// The node that the program finds.
pub const NODE: &str = "/dev/slash_qdma_ctl0";

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// Requests of a listener (linux/seccomp.h): `_IOWR('!', 0, ...)` and so on.
const RECV: u32 = 3 << 30 | (size_of::<libc::seccomp_notif>() as u32) << 16 | (b'!' as u32) << 8;
const SEND: u32 = 3 << 30 | (size_of::<libc::seccomp_notif_resp>() as u32) << 16 | (b'!' as u32) << 8 | 1;
const ADDFD: u32 = 1 << 30 | (size_of::<libc::seccomp_notif_addfd>() as u32) << 16 | (b'!' as u32) << 8 | 3;

/// Bytes that a program has asked `pread64` for, by what they are read into.
#[derive(Clone, Copy, Default, Debug)]
pub struct Reads {
    /// Buffers of the driver.
    pub buffers: u64,
    /// All other memory.
    pub elsewhere: u64,
}

/// Asks this process about `openat` and about ioctls whose type is 'v'; all else is allowed. To count reads, asks about
/// `pread64` too, and refuses io_uring, whose reads no filter sees.
fn filter(counts: bool) -> Vec<libc::sock_filter> {
    let op = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equal) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let end = |answer| op(libc::BPF_RET | libc::BPF_K, answer, 0, 0);
    // The low half of the second argument, the ioctl's number.
    let second = if cfg!(target_endian = "little") { 24 } else { 28 };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut program = vec![
        op(load, 4, 0, 0),
        op(equal, ARCH, 1, 0),
        end(libc::SECCOMP_RET_ALLOW),
        op(load, 0, 0, 0),
        op(equal, libc::SYS_openat as u32, 0, 1),
        end(libc::SECCOMP_RET_USER_NOTIF),
    ];
    if counts {
        program.extend([
            op(equal, libc::SYS_pread64 as u32, 0, 1),
            end(libc::SECCOMP_RET_USER_NOTIF),
            op(equal, libc::SYS_io_uring_setup as u32, 0, 1),
            end(refused),
        ]);
    }
    program.extend([
        op(equal, libc::SYS_ioctl as u32, 0, 3),
        op(load, second, 0, 0),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0xff00, 0, 0),
        op(equal, u32::from(b'v') << 8, 1, 0),
        end(libc::SECCOMP_RET_ALLOW),
        end(libc::SECCOMP_RET_USER_NOTIF),
    ]);
    program
}

/// The directory that keeps others from this program and what lies beside it, where this process is root's.
pub fn closed_to_others() -> Option<PathBuf> {
    let ours = std::env::current_exe().unwrap();
    let closed = |place: &&Path| place.metadata().is_ok_and(|place| place.mode() & 1 == 0);
    ours.ancestors().find(closed).filter(|_| rustix::process::geteuid().is_root()).map(Path::to_owned)
}

/// Runs a program to its end, as a user without rights unless that one cannot reach it. `None`, with the reason
/// printed, where the kernel refuses such filters.
///
/// With `reads`, the program gets no io_uring, and what it reads by `pread64` is counted.
pub fn run(model: &DriverModel, command: &mut Command, reads: Option<&mut Reads>) -> Option<Output> {
    match closed_to_others() {
        None if rustix::process::geteuid().is_root() => drop(command.uid(NOBODY).gid(NOBODY)),
        None => {}
        Some(closed) => println!("as root, because {} is closed to other users", closed.display()),
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut program = filter(reads.is_some());
    let socket = theirs.as_raw_fd();
    let install = move || {
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: the kernel reads the program, which lives through the call; these calls take no other memory.
        let listener = unsafe {
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
                return Err(io::Error::last_os_error());
            }
            let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
        };
        if listener < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows it.
        let listener = unsafe { OwnedFd::from_raw_fd(listener as i32) };
        // SAFETY: the socket is open in this child of the process that made it, until it executes the program.
        let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(socket) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        let fds = [listener.as_fd()];
        message.push(SendAncillaryMessage::ScmRights(&fds));
        rustix::net::sendmsg(socket, &[IoSlice::new(&[0])], &mut message, SendFlags::empty())?;
        Ok(())
    };
    // SAFETY: between fork and exec the function makes system calls only; it takes no lock and allocates nothing.
    unsafe { command.pre_exec(install) };
    let child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(e) => {
            println!("SKIPPED: the kernel refuses a seccomp filter with a listener: {e}");
            return None;
        }
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(&ours, &mut [IoSliceMut::new(&mut [0])], &mut message, RecvFlags::CMSG_CLOEXEC).unwrap();
    let fds = message.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let listener = fds.flatten().next().expect("the child has sent its listener");
    let model = model.clone();
    let server = thread::spawn(move || serve(&listener, &model));
    let output = child.wait_with_output().unwrap();
    let read = server.join().expect("the supervisor");
    if let Some(reads) = reads {
        *reads = read;
    }
    Some(output)
}

/// Makes a request of the listener.
fn ioctl<T>(listener: &OwnedFd, request: u32, argument: &mut T) -> io::Result<i32> {
    // SAFETY: the request's number has the length of `T` (each is used with the structure that it was made from), and
    // the structures have no pointers.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), request as _, &raw mut *argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Answers until no process has the filter any more.
fn serve(listener: &OwnedFd, model: &DriverModel) -> Reads {
    let mut reads = Reads::default();
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => drop(result.unwrap()),
        }
        if !ready[0].revents().contains(PollFlags::IN) {
            return reads;
        }
        // SAFETY: a structure of integers, which may be zero; the kernel demands that it is.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // The thread may be gone since.
        if ioctl(listener, RECV, &mut asked).is_err() {
            continue;
        }
        let reply = match i64::from(asked.data.nr) {
            libc::SYS_openat => opened(model, &asked),
            libc::SYS_pread64 => {
                let [_, address, len, ..] = asked.data.args;
                let (buffer, rest) = in_a_buffer(asked.pid, address, len);
                (reads.buffers, reads.elsewhere) = (reads.buffers + buffer, reads.elsewhere + rest);
                Reply::Kernel
            }
            _ => called(model, &asked),
        };
        let mut answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error: 0, flags: 0 };
        match reply {
            Reply::Kernel => answer.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
            Reply::Number(n) => answer.val = n as i64,
            Reply::Error(errno) => answer.error = -errno,
            Reply::File(file) => {
                let mut add = libc::seccomp_notif_addfd {
                    id: asked.id,
                    flags: libc::SECCOMP_ADDFD_FLAG_SEND as u32,
                    srcfd: file.as_raw_fd() as u32,
                    newfd: 0,
                    newfd_flags: libc::O_CLOEXEC as u32,
                };
                // The answer is the new descriptor.
                let _ = ioctl(listener, ADDFD, &mut add);
                continue;
            }
        }
        let _ = ioctl(listener, SEND, &mut answer);
    }
}

/// The result of a system call.
enum Reply {
    /// The kernel's own answer.
    Kernel,
    Number(u64),
    Error(i32),
    File(OwnedFd),
}

/// The memory of the thread that asks.
fn memory(asked: &libc::seccomp_notif) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/{}/mem", asked.pid))
}

/// How many of these bytes of a process lie in a mapped buffer of the driver, and how many do not.
fn in_a_buffer(pid: u32, address: u64, len: u64) -> (u64, u64) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let overlap = |line: &str| {
        let range = line.split_once(" rw-s ").filter(|(_, rest)| rest.contains("/memfd:slash-buf-"))?.0;
        let (first, end) = range.split_once('-')?;
        let (first, end) = (u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        Some(end.min(address + len).saturating_sub(first.max(address)))
    };
    let inside = maps.lines().filter_map(overlap).sum();
    (inside, len - inside)
}

fn opened(model: &DriverModel, asked: &libc::seccomp_notif) -> Reply {
    let mut path = [0; 64];
    let read = memory(asked).and_then(|memory| memory.read_at(&mut path, asked.data.args[1]));
    let path = path[..read.unwrap_or(0)].split(|b| *b == 0).next().unwrap_or_default();
    if path != NODE.as_bytes() {
        return Reply::Kernel;
    }
    match model.open_node() {
        Ok((_, file)) => Reply::File(file),
        Err(e) => Reply::Error(e.raw_os_error().unwrap_or(libc::EIO)),
    }
}

fn called(model: &DriverModel, asked: &libc::seccomp_notif) -> Reply {
    let [fd, number, address, ..] = asked.data.args;
    let file_of = |fd: i32| {
        let link = std::fs::read_link(format!("/proc/{}/fd/{fd}", asked.pid)).ok()?;
        FileId::of_link(&link.to_string_lossy())
    };
    let Some(on) = file_of(fd as i32) else { return Reply::Kernel };
    // No answer tells when the program closes a buffer. Those that it has closed need not take memory here for ever.
    if number as u32 == Request::BufferCreate.number() {
        let files = std::fs::read_dir(format!("/proc/{}/fd", asked.pid)).into_iter().flatten().flatten();
        let fds = files.filter_map(|file| file.file_name().to_str()?.parse().ok());
        let open: HashSet<FileId> = fds.filter_map(file_of).collect();
        model.close_buffers(|buffer| open.contains(&buffer));
    }
    let Ok(memory) = memory(asked) else { return Reply::Error(libc::EFAULT) };
    let mut size = [0; 4];
    if memory.read_exact_at(&mut size, address).is_err() {
        return Reply::Error(libc::EFAULT);
    }
    let mut argument = vec![0; u32::from_ne_bytes(size).min(4096) as usize];
    if memory.read_exact_at(&mut argument, address).is_err() {
        return Reply::Error(libc::EFAULT);
    }
    match model.answer(on, number as u32, &mut argument, &file_of) {
        Err(errno) => Reply::Error(errno),
        Ok(_) if memory.write_all_at(&argument, address).is_err() => Reply::Error(libc::EFAULT),
        Ok(Answer::Number(n)) => Reply::Number(n),
        Ok(Answer::File(_, file)) => Reply::File(file),
    }
}
