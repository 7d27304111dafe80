//! Processes: what forks them, and ends them.
//!
//! A client's memory is mapped in a process of its own. To map a client's file, and to touch its pages, may take as
//! long as the client likes: the kernel waits for other processes that use the file, and nobody else may map or unmap
//! anything in the same process meanwhile. And a process that a client brings down, by taking back pages or memory,
//! takes no other client with it.
//!
//! The daemon may have threads, whose locks a forked process would find locked for ever. So it first forks a process
//! that has one thread, and forks all others. `unsafe` is for fork(2), signal handlers and _exit(2).
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{ForkResult, fork};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{DumpableBehavior, Pid, getpid, getppid, set_dumpable_behavior, set_parent_process_death_signal};

use crate::log::Ending;

/// Where the socket to the daemon is in the process that forks; what is above is closed.
const SOCKET: i32 = 3;
/// The shortest slice that the kernel knows, in nanoseconds.
const SLICE: u64 = 100_000;

/// Forks the process that forks all others. It ignores signals that end a program: the daemon alone decides when it
/// ends. It has no descriptor of the daemon's but this one and the standard ones.
///
/// # Errors
/// The kernel's.
pub(crate) fn fork_first(socket: OwnedFd, run: impl FnOnce(OwnedFd)) -> Result<Pid, Errno> {
    // SAFETY: the child uses nothing that another thread may have locked but the allocator, whose locks fork(3) of the
    // C library sets free; and it never returns.
    match unsafe { fork() }.map_err(errno)? {
        ForkResult::Parent { child } => Ok(Pid::from_raw(child.as_raw()).expect("no child has number 0")),
        ForkResult::Child => {
            // SAFETY: plain system calls. No value in this process closes a descriptor above 2 but those made from
            // here on: nothing that the daemon had is dropped in a process that never returns.
            let socket = unsafe {
                if socket.as_raw_fd() != SOCKET {
                    libc::dup3(socket.as_raw_fd(), SOCKET, libc::O_CLOEXEC);
                }
                std::mem::forget(socket);
                close_from(SOCKET + 1);
                OwnedFd::from_raw_fd(SOCKET)
            };
            for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
                handle(signal, SigHandler::SigIgn);
            }
            let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
            let _ = catch_unwind(AssertUnwindSafe(|| run(socket)));
            exit(Ending::Bug as i32)
        }
    }
}

/// Forks a process that has these descriptors alone: to close them may take any time. It begins when this process has
/// closed them, ends with this process, and its exit status is what `run` returns. It can be traced or read by no other
/// process of its user. This process has one thread.
///
/// # Errors
/// The kernel's, with the descriptors.
pub(crate) fn fork_apart(
    fds: Vec<OwnedFd>,
    run: impl FnOnce(Vec<OwnedFd>) -> Ending,
) -> Result<Pid, (Errno, Vec<OwnedFd>)> {
    let (closed, open) = match pipe_with(PipeFlags::CLOEXEC) {
        Ok(pipe) => pipe,
        Err(e) => return Err((e, fds)),
    };
    let parent = getpid();
    // SAFETY: this process has one thread.
    match unsafe { fork() } {
        Err(e) => Err((errno(e), fds)),
        Ok(ForkResult::Parent { child }) => {
            drop(fds);
            Ok(Pid::from_raw(child.as_raw()).expect("no child has number 0"))
        }
        Ok(ForkResult::Child) => {
            drop(open);
            // The kernel ends this process with its parent, which may have ended before it was asked to.
            let _ = set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            if getppid() != Some(parent) {
                exit(Ending::Killed as i32);
            }
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            let ending = catch_unwind(AssertUnwindSafe(|| {
                let _ = rustix::io::read(&closed, &mut [0; 1]);
                run(fds)
            }));
            exit(ending.unwrap_or(Ending::Bug) as i32)
        }
    }
}

fn errno(e: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(e as i32)
}

/// Closes all descriptors from this one on.
fn close_from(first: i32) {
    // SAFETY: a plain system call; see `run`.
    if unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) } != 0 {
        // Before Linux 5.9.
        let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let numbers: Vec<i32> = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        for number in numbers.into_iter().filter(|number| *number >= first) {
            // SAFETY: as above.
            unsafe { libc::close(number) };
        }
    }
}

/// Ends this process without what a process does at its end: others of its kind do that, or it is the daemon's.
pub(crate) fn exit(status: i32) -> ! {
    // SAFETY: no precondition; it returns to nobody.
    unsafe { libc::_exit(status) }
}

fn handle(signal: Signal, handler: SigHandler) {
    // SAFETY: the handlers here are `SigIgn` and `bad_access`, which calls only functions that are safe in handlers.
    let _ = unsafe { sigaction(signal, &SigAction::new(handler, SaFlags::empty(), SigSet::empty())) };
}

extern "C" fn bad_access(_: libc::c_int) {
    exit(Ending::MissingPage as i32)
}

/// Has this process end, and say why, when it accesses a page of its client that is missing.
pub(crate) fn end_at_missing_pages() {
    handle(Signal::SIGBUS, SigHandler::Handler(bad_access));
}

/// Gives memory that is free in this process back to the kernel: tables of large mappings, which are on nobody's
/// account any more.
pub(crate) fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no precondition.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Asks for a processor soon and for a short time (Linux 6.12): a thread that waits for its turn is not to wait for
/// the end of what another may run at a time.
pub(crate) fn ask_for_short_slices() {
    // SAFETY: zeros are such a structure, of numbers; the kernel reads it, and as many bytes as it states.
    unsafe {
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        (attributes.size, attributes.sched_runtime) = (size_of::<libc::sched_attr>() as u32, SLICE);
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::SharedBuf;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use rustix::process::{WaitOptions, waitpid};

    use super::*;
    use crate::guard::Guard;

    #[test]
    fn an_access_to_a_missing_page_is_said() {
        if !crate::can_watch_memory() {
            println!("SKIPPED: userfaultfd is not allowed here");
            return;
        }
        let fd = memfd_create("hole", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 64 << 10).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        // The child uses nothing that another test may have locked.
        let child = fork_apart(vec![fd], |mut fds| {
            end_at_missing_pages();
            let (buf, guard) = (SharedBuf::import(fds.remove(0)).unwrap(), Guard::new().unwrap());
            guard.watch(&buf).unwrap();
            buf.as_volatile_slice().load_u32(4096);
            Ending::Disconnected
        });
        let (_, status) = waitpid(Some(child.unwrap()), WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(Ending::MissingPage as i32));
    }
}
