//! The messages of vfio-user, and their way over a socket.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// What a message is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub(super) enum Command {
    Version = 1,
    DmaMap = 2,
    DmaUnmap = 3,
    DeviceInfo = 4,
    RegionInfo = 5,
    IrqInfo = 7,
    SetIrqs = 8,
    RegionRead = 9,
    RegionWrite = 10,
    Reset = 13,
}

impl Command {
    pub(super) fn from_number(number: u16) -> Option<Self> {
        use Command::*;
        [Version, DmaMap, DmaUnmap, DeviceInfo, RegionInfo, IrqInfo, SetIrqs, RegionRead, RegionWrite, Reset]
            .into_iter()
            .find(|c| *c as u16 == number)
    }
}

/// Bytes in front of each message: id, command, length of all, flags, error number.
pub(super) const HEADER: usize = 16;
/// Bytes of a region in one message, at most; both sides say so at the beginning.
pub(super) const MAX_DATA: usize = 1 << 20;
/// Bytes of a message, at most.
const MAX_MESSAGE: usize = MAX_DATA + 4096;
/// Descriptors that come with a message, at most. QEMU takes no more for an answer.
pub(super) const MAX_FDS: usize = 16;
/// Flags of a header.
pub(super) const REPLY: u32 = 1;
pub(super) const NO_REPLY: u32 = 1 << 4;
pub(super) const ERROR: u32 = 1 << 5;

/// A message, as it came.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) id: u16,
    pub(super) command: u16,
    pub(super) flags: u32,
    pub(super) error: u32,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// Reads numbers off the front of a message's body.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }
}

/// Writes numbers one behind the other.
#[derive(Default)]
pub(super) struct Body(pub(super) Vec<u8>);

impl Body {
    pub(super) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The next message; `None` when the other side has closed the socket between two.
///
/// # Errors
/// `InvalidData` for a length that cannot be; the socket's.
pub(super) fn receive(stream: &mut UnixStream) -> io::Result<Option<Message>> {
    let mut header = [0; HEADER];
    let mut fds = Vec::new();
    let mut got = 0;
    while got < HEADER {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut header[got..])];
        let n = match recvmsg(&*stream, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.flags.contains(ReturnFlags::CTRUNC) => {
                return Err(broken("too many descriptors, for a message or for this process"));
            }
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if fds.len() > MAX_FDS {
            return Err(broken("too many descriptors"));
        }
        match n {
            0 if got == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => got += n,
        }
    }
    let fields = &mut Fields(&header);
    let cut = || broken("a header that is cut");
    let (id, command) = (fields.u16().ok_or_else(cut)?, fields.u16().ok_or_else(cut)?);
    let (len, flags, error) =
        (fields.u32().ok_or_else(cut)?, fields.u32().ok_or_else(cut)?, fields.u32().ok_or_else(cut)?);
    let len = len as usize;
    if !(HEADER..=MAX_MESSAGE).contains(&len) {
        return Err(broken("a message shorter than its header, or longer than any may be"));
    }
    let mut body = vec![0; len - HEADER];
    stream.read_exact(&mut body)?;
    Ok(Some(Message { id, command, flags, error, body, fds }))
}

/// Sends a message.
///
/// # Errors
/// The socket's.
pub(super) fn send(
    stream: &mut UnixStream,
    id: u16,
    command: u16,
    flags: u32,
    error: u32,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let len = u32::try_from(HEADER + body.len()).map_err(|_| broken("a message too long to send"))?;
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(id.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    bytes.extend([len, flags, error].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(broken("too many descriptors to send"));
    }
    // The descriptors go with the first byte; the rest may need further calls.
    let sent = loop {
        match sendmsg(&*stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    stream.write_all(&bytes[sent..])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn messages_go_and_come() {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let body = vec![7; 100_000];
        std::thread::scope(|s| {
            s.spawn(|| {
                send(
                    &mut a,
                    5,
                    Command::DmaMap as u16,
                    0,
                    0,
                    &Body::default().u32(1).u64(2).bytes(b"x").0,
                    &[file.as_fd(), file.as_fd()],
                )
                .unwrap();
                send(&mut a, 6, 99, ERROR | REPLY, 22, &body, &[]).unwrap();
                drop(a);
            });
            let first = receive(&mut b).unwrap().unwrap();
            assert_eq!((first.id, first.command, first.fds.len()), (5, 2, 2));
            let mut fields = Fields(&first.body);
            assert_eq!((fields.u32(), fields.u64(), fields.0, fields.u32()), (Some(1), Some(2), &b"x"[..], None));
            let second = receive(&mut b).unwrap().unwrap();
            assert_eq!((second.flags, second.error, second.body.len()), (ERROR | REPLY, 22, 100_000));
            assert!(Command::from_number(second.command).is_none());
            assert!(receive(&mut b).unwrap().is_none(), "closed");
        });
    }

    #[test]
    fn nonsense_is_an_error() {
        let header = |len: u32| [&[0; 4][..], &len.to_le_bytes(), &[0; 8]].concat();
        for bytes in
            [vec![1, 2, 3], header(15), header(0), header(u32::MAX), header(MAX_MESSAGE as u32 + 1), header(40)]
        {
            let (mut a, mut b) = UnixStream::pair().unwrap();
            a.write_all(&bytes).unwrap();
            drop(a);
            assert!(receive(&mut b).is_err(), "{bytes:?}");
        }
    }
}
