//! Buffers that leave the process: as descriptors that a command inherits, or over a Unix socket.

use std::ffi::OsString;
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::{Args, ValueEnum};
use dmalane::dma::export_dma_buf;
use dmalane::load::fill::FilledBuf;
use rustix::cmsg_space;
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::failure::Failure;

/// A receiver that takes nothing for this long has failed.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Exit statuses of shells for a command that cannot be run, and for one that is not there.
const NOT_RUN: [u8; 2] = [126, 127];

/// The options that hand the memory on.
#[derive(Args)]
#[command(next_help_heading = "To another process")]
pub struct Export {
    /// Run COMMAND in place of dmalane, with the memory as an open descriptor that it can map
    ///
    /// Its number is in DMALANE_FD, its bytes in DMALANE_SIZE (for several files, lists with spaces), and memfd or
    /// dma-buf in DMALANE_KIND.
    #[arg(long, value_enum, requires = "command", conflicts_with_all = ["device", "map", "repeat", "send_to"])]
    export: Option<As>,

    /// Send the memory to the process that listens at this Unix socket
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["device", "map", "repeat"])]
    send_to: Option<PathBuf>,

    /// The command of --export, with its arguments
    #[arg(value_name = "COMMAND", last = true, requires = "export")]
    command: Vec<OsString>,
}

/// How a command gets the memory.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum As {
    /// A descriptor that it inherits.
    Fd,
}

/// The receiver of the memory.
pub enum Receiver {
    /// A program and its arguments.
    Command(Command),
    /// A process that listened at this path.
    Socket(UnixStream, PathBuf),
}

impl Export {
    /// Whether the memory must be shareable.
    pub fn shares(&self) -> bool {
        self.export.is_some() || self.send_to.is_some()
    }

    /// Whether stdout is the command's.
    pub fn runs_command(&self) -> bool {
        self.export.is_some()
    }

    /// The receiver, if there is one; a socket is connected to.
    pub fn receiver(&self) -> Result<Option<Receiver>, Failure> {
        if let Some(path) = &self.send_to {
            let socket = UnixStream::connect(path).and_then(|socket| {
                socket.set_write_timeout(Some(TIMEOUT))?;
                Ok(socket)
            });
            let failed = |e| Failure::because(format!("cannot connect to {}", path.display()), &e);
            return Ok(Some(Receiver::Socket(socket.map_err(failed)?, path.clone())));
        }
        let Some((program, arguments)) = self.command.split_first() else { return Ok(None) };
        let mut command = Command::new(program);
        command.args(arguments);
        Ok(Some(Receiver::Command(command)))
    }
}

/// Buffers as descriptors.
pub struct Exported {
    kind: Kind,
    buffers: Vec<Buffer>,
}

/// The kind of a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Memfd = 1,
    DmaBuf = 2,
}

struct Buffer {
    fd: OwnedFd,
    bytes: u64,
    checksum: Option<u64>,
}

impl Exported {
    /// Makes descriptors of buffers, which are those of their heap: memfds or dma-bufs. `dma_buf` wraps memfds.
    pub fn new(buffers: &[FilledBuf], dma_buf: bool) -> Result<Self, Failure> {
        let export = |buffer: &FilledBuf| {
            let fd = match dma_buf {
                true => export_dma_buf(&buffer.shared().reference()),
                false => match buffer.shared().export() {
                    Some(fd) => fd.try_clone_to_owned(),
                    None => Err(io::ErrorKind::Unsupported.into()),
                },
            };
            let fd = fd.map_err(|e| Failure::because("the memory cannot be exported", &e))?;
            Ok(Buffer { fd, bytes: buffer.len() as u64, checksum: buffer.checksum() })
        };
        let buffers: Vec<Buffer> = buffers.iter().map(export).collect::<Result<_, Failure>>()?;
        // Each of our memfds has this seal; a dma-buf has no seals.
        let sealed = |buffer: &Buffer| fcntl_get_seals(&buffer.fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let memfds = buffers.iter().all(sealed);
        Ok(Self { kind: if memfds { Kind::Memfd } else { Kind::DmaBuf }, buffers })
    }

    /// Replaces this process by the command, or sends everything to the socket.
    pub fn hand_to(self, receiver: Receiver) -> Result<ExitCode, Failure> {
        match receiver {
            Receiver::Command(command) => self.run(command),
            Receiver::Socket(socket, path) => match self.send(&socket) {
                Ok(()) => Ok(ExitCode::SUCCESS),
                Err(e) => Err(Failure::because(format!("cannot send the memory to {}", path.display()), &e)),
            },
        }
    }

    /// Becomes the command, which so has our process ID, exit status and signals. Returns what kept it from starting.
    fn run(self, mut command: Command) -> Result<ExitCode, Failure> {
        for Buffer { fd, .. } in &self.buffers {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        let list = |number: &dyn Fn(&Buffer) -> u64| {
            self.buffers.iter().map(|buffer| number(buffer).to_string()).collect::<Vec<_>>().join(" ")
        };
        let error = command
            .env("DMALANE_FD", list(&|buffer| buffer.fd.as_raw_fd() as u64))
            .env("DMALANE_SIZE", list(&|buffer| buffer.bytes))
            .env("DMALANE_KIND", if self.kind == Kind::Memfd { "memfd" } else { "dma-buf" })
            .exec();
        let status = NOT_RUN[usize::from(error.kind() == io::ErrorKind::NotFound)];
        let program = command.get_program().to_string_lossy().into_owned();
        Err(Failure::because(format!("cannot run {program}"), &error).status(status))
    }

    /// Sends a message with a descriptor for each buffer; `docs/formats/descriptors.md` describes it.
    fn send(&self, socket: &UnixStream) -> io::Result<()> {
        for (index, buffer) in self.buffers.iter().enumerate() {
            let message = self.message(index, buffer);
            let sent = send_with(socket, &message, buffer.fd.as_fd())?;
            let mut socket = socket;
            socket.write_all(&message[sent..])?;
        }
        Ok(())
    }

    fn message(&self, index: usize, buffer: &Buffer) -> [u8; 48] {
        let mut message = [0; 48];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            message[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(b"dmalane\0");
        for word in [1, self.kind as u32, index as u32, self.buffers.len() as u32] {
            put(&word.to_le_bytes());
        }
        put(&buffer.bytes.to_le_bytes());
        put(&buffer.checksum.unwrap_or(0).to_le_bytes());
        put(&u32::from(buffer.checksum.is_some()).to_le_bytes());
        message
    }
}

/// Sends `message`, or its beginning, with a descriptor; returns the bytes sent.
fn send_with(socket: &UnixStream, message: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    Ok(sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?)
}
