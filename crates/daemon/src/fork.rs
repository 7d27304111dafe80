//! Processes for clients, forked by a process that does nothing else.
//!
//! A client's memory is mapped in a process of its own. To map a client's file, and to touch its pages, may take as
//! long as the client likes: the kernel waits for other processes that use the file, and nobody else may map or unmap
//! anything in the same process meanwhile. And a process that a client brings down, by taking back pages or memory,
//! takes no other client with it.
//!
//! The daemon may have threads, whose locks a forked process would find locked for ever. So it first forks a process
//! that has one thread, and forks all others. `unsafe` is for fork(2), signal handlers and _exit(2).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use dmalane_dma::{receive_with_fds, send_with_fds};
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{ForkResult, fork};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    DumpableBehavior, Pid, WaitOptions, getpid, getppid, set_dumpable_behavior, set_parent_process_death_signal,
    waitpid,
};

use crate::table::Table;

/// Where the socket to the daemon is in the process that forks; what is above is closed.
const SOCKET: i32 = 3;
/// The shortest slice that the kernel knows, in nanoseconds.
const SLICE: u64 = 100_000;
/// Raised for processes of clients, so that the kernel ends one of them and not the daemon when memory runs out.
const OOM_SCORE_ADJ: &str = "500";

/// The process that forks those of clients. They end with it, and it ends with this value.
pub(crate) struct Forker {
    socket: Option<OwnedFd>,
    pid: Pid,
}

impl Forker {
    /// Starts it. In the process for a client, `serve` gets the client's seat and socket, and the end of a pair whose
    /// other one the daemon has.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(serve: impl Fn(usize, OwnedFd, OwnedFd)) -> io::Result<Self> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // SAFETY: the child uses nothing that another thread may have locked but the allocator, whose locks fork(3) of
        // the C library sets free; and it never returns.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => {
                Ok(Self { socket: Some(ours), pid: Pid::from_raw(child.as_raw()).expect("no child has number 0") })
            }
            ForkResult::Child => {
                let _ = catch_unwind(AssertUnwindSafe(|| run(theirs, &serve)));
                exit(1)
            }
        }
    }

    /// Forks a process for the client of a seat. It begins when the caller has closed the client's socket and sent a
    /// byte to the other end of `control`.
    ///
    /// # Errors
    /// The kernel's. If the fork itself fails, the sockets are closed.
    pub(crate) fn fork(&self, seat: usize, client: &OwnedFd, control: &OwnedFd) -> Result<(), Errno> {
        let socket = self.socket.as_ref().expect("taken on drop");
        let fds = [client.as_fd(), control.as_fd()];
        send_with_fds(socket, &seat.to_ne_bytes(), &fds, SendFlags::NOSIGNAL).map(drop)
    }

    #[cfg(test)]
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Its process has ended, which is a bug or the work of the kernel's OOM killer.
    pub(crate) fn is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let socket = self.socket.as_ref().expect("taken on drop");
        // Without flags, only the end of the connection is reported.
        poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }
}

impl Drop for Forker {
    fn drop(&mut self) {
        self.socket = None;
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// Forks processes until the daemon's end of the socket is closed.
fn run(socket: OwnedFd, serve: &impl Fn(usize, OwnedFd, OwnedFd)) {
    // What the daemon has open, such as sockets of its own, must not stay open here.
    let keep = socket.as_raw_fd();
    // SAFETY: plain system calls. No value in this process closes a descriptor above 2 but those made from here on:
    // nothing that the daemon had is dropped in a process that never returns.
    let socket = unsafe {
        if keep != SOCKET {
            libc::dup3(keep, SOCKET, libc::O_CLOEXEC);
        }
        std::mem::forget(socket);
        close_from(SOCKET + 1);
        OwnedFd::from_raw_fd(SOCKET)
    };
    // The daemon alone decides when it ends. Ended children need no wait.
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGCHLD] {
        handle(signal, SigHandler::SigIgn);
    }
    let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
    let mut number = [0; size_of::<usize>()];
    while let Ok(got) = receive_with_fds(&socket, &mut number, RecvFlags::empty()) {
        if got.len == 0 {
            return;
        }
        // Without them, for lack of memory, the daemon hears that the client's process has ended.
        let Ok([client, control]) = <[OwnedFd; 2]>::try_from(got.fds) else { continue };
        let Ok((closed, open)) = pipe_with(PipeFlags::CLOEXEC) else { continue };
        let (parent, seat) = (getpid(), usize::from_ne_bytes(number));
        // SAFETY: this process has one thread.
        if let Ok(ForkResult::Child) = unsafe { fork() } {
            drop((socket, open));
            // The kernel ends this process with its parent, which may have ended before it was asked to.
            let _ = set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            if getppid() == Some(parent) {
                let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ);
                let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
                // What the client has sent may take minutes to close: this process does that, as the last that has the
                // socket. The parent has closed it when the pipe ends, the daemon when it says so.
                let _ = rustix::io::read(&closed, &mut [0; 1]);
                let _ = rustix::net::recv(&control, &mut [0; 1], RecvFlags::empty());
                drop(closed);
                serve(seat, client, control);
            }
            exit(0);
        }
        drop((client, control));
        drop((open, closed));
    }
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
    // SAFETY: the handlers here are `SigIgn` and `missing_page`, which calls only functions that are safe in handlers.
    let _ = unsafe { sigaction(signal, &SigAction::new(handler, SaFlags::empty(), SigSet::empty())) };
}

/// Where the handler says that it was called.
static ENDING: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

extern "C" fn missing_page(_: libc::c_int) {
    // SAFETY: null, or a word of the table that `end_at_missing_pages` keeps.
    if let Some(word) = unsafe { ENDING.load(Ordering::SeqCst).as_ref() } {
        word.store(1, Ordering::SeqCst);
    }
    exit(1)
}

/// Has this process end when it accesses a page that is missing ([`crate::guard`]), and say so in the table.
pub(crate) fn end_at_missing_pages(table: &Arc<Table>, seat: usize) {
    // Never freed: the handler may be called until the end of the process.
    let table = Arc::into_raw(table.clone());
    // SAFETY: the reference that `into_raw` has made is kept.
    ENDING.store(ptr::from_ref(unsafe { &*table }.missed(seat)).cast_mut(), Ordering::SeqCst);
    handle(Signal::SIGBUS, SigHandler::Handler(missing_page));
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

/// struct sched_attr of linux/sched/types.h, as it was at first.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for a processor soon and for a short time (Linux 6.12): a thread that waits for its turn is not to wait for
/// the end of what another may run at a time.
pub(crate) fn ask_for_short_slices() {
    let attributes = Attributes { size: size_of::<Attributes>() as u32, runtime: SLICE, ..Attributes::default() };
    // SAFETY: a structure of the size that it states, which the kernel reads.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}
