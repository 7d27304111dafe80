//! Encoding, sending and receiving of vfio-user messages.

use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use dmalane_dma::{receive_with_fds, send_with_fds};
use rustix::net::{RecvFlags, SendFlags};

/// A request of the protocol, with its number in the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[repr(u16)]
pub enum Command {
    /// Negotiates the version; the first message of a connection.
    Version = 1,
    /// Maps memory of the client for the device.
    DmaMap = 2,
    /// Unmaps memory of the client.
    DmaUnmap = 3,
    /// Queries the device.
    DeviceInfo = 4,
    /// Queries a region.
    RegionInfo = 5,
    /// Queries a kind of interrupts.
    IrqInfo = 7,
    /// Sets the eventfds of interrupts.
    SetIrqs = 8,
    /// Reads a region.
    RegionRead = 9,
    /// Writes a region.
    RegionWrite = 10,
    /// Reads memory of the client; sent by the device.
    DmaRead = 11,
    /// Writes memory of the client; sent by the device.
    DmaWrite = 12,
    /// Resets the device.
    Reset = 13,
    /// Gets or sets a feature of the device, such as whether it runs.
    Feature = 16,
    /// Reads the state of the device.
    MigrationRead = 17,
    /// Writes the state of the device.
    MigrationWrite = 18,
}

impl Command {
    pub(crate) fn from_number(number: u16) -> Option<Self> {
        use Command::*;
        let of_devices = [DeviceInfo, RegionInfo, IrqInfo, SetIrqs, RegionRead, RegionWrite, Reset];
        let others = [Version, DmaMap, DmaUnmap, DmaRead, DmaWrite, Feature, MigrationRead, MigrationWrite];
        of_devices.into_iter().chain(others).find(|c| *c as u16 == number)
    }
}

/// Bytes of a message's header: id, command, length of the message, flags, error number.
pub(crate) const HEADER: usize = 16;
/// Maximum bytes of a region in one message; both sides announce it in their version message.
pub(crate) const MAX_DATA: usize = 1 << 20;
/// Maximum bytes that one side sends without being asked for them: a message that fits into the buffer of a socket, so
/// that no side waits in a write for the other, which may be writing too.
pub(crate) const MAX_PUSHED: usize = 64 << 10;
/// Maximum bytes of a message.
const MAX_MESSAGE: usize = MAX_DATA + 4096;
/// Maximum descriptors of a message. QEMU accepts no more with an answer.
pub(crate) const MAX_FDS: usize = 16;
/// Flags of a header.
pub(crate) const REPLY: u32 = 1;
pub(crate) const NO_REPLY: u32 = 1 << 4;
pub(crate) const ERROR: u32 = 1 << 5;

/// A received message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) id: u16,
    pub(crate) command: u16,
    pub(crate) flags: u32,
    pub(crate) error: u32,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Reads numbers from the front of a message's body.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }
}

/// Builds a message's body, number after number.
#[derive(Default)]
pub(crate) struct Body(pub(crate) Vec<u8>);

impl Body {
    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
}

fn malformed(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// An error where a message that comes in pieces has taken longer since `began` than the stream may be read. The kernel
/// knows a timeout for each piece only.
fn in_time(stream: &UnixStream, began: Instant) -> io::Result<()> {
    match stream.read_timeout()? {
        Some(timeout) if began.elapsed() > timeout => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

/// Receives the next message; `None` when the other side has closed the socket between two messages. Waits for at most
/// twice the read timeout of the stream.
///
/// # Errors
/// `InvalidData` for a malformed message; `TimedOut` for one in pieces that takes too long; the socket's.
pub(crate) fn receive(mut stream: &UnixStream) -> io::Result<Option<Message>> {
    let began = Instant::now();
    let mut header = [0; HEADER];
    let mut fds = Vec::new();
    let mut received = 0;
    while received < HEADER {
        let part = receive_with_fds(stream, &mut header[received..], RecvFlags::empty())?;
        fds.extend(part.fds);
        if part.is_cut || fds.len() > MAX_FDS {
            return Err(malformed("too many descriptors for a message or for this process"));
        }
        match part.len {
            0 if received == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n if received + n == HEADER => break,
            n => received += n,
        }
        in_time(stream, began)?;
    }
    let fields = &mut Fields(&header);
    let truncated = || malformed("truncated header");
    let (id, command) = (fields.u16().ok_or_else(truncated)?, fields.u16().ok_or_else(truncated)?);
    let (len, flags, error) =
        (fields.u32().ok_or_else(truncated)?, fields.u32().ok_or_else(truncated)?, fields.u32().ok_or_else(truncated)?);
    let len = len as usize;
    if !(HEADER..=MAX_MESSAGE).contains(&len) {
        return Err(malformed("message length out of range"));
    }
    let mut body = vec![0; len - HEADER];
    let mut rest = &mut body[..];
    while !rest.is_empty() {
        match stream.read(rest) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) if n == rest.len() => break,
            Ok(n) => rest = &mut rest[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        in_time(stream, began)?;
    }
    Ok(Some(Message { id, command, flags, error, body, fds }))
}

/// Sends a message.
///
/// # Errors
/// The socket's.
pub(crate) fn send(
    mut stream: &UnixStream,
    id: u16,
    command: u16,
    flags: u32,
    error: u32,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let len = u32::try_from(HEADER + body.len()).map_err(|_| malformed("message too long to send"))?;
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(id.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    bytes.extend([len, flags, error].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(body);
    // The descriptors go with the first bytes; the rest may need further calls.
    let sent = send_with_fds(stream, &bytes, fds, SendFlags::empty())?;
    stream.write_all(&bytes[sent..])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn messages_are_sent_and_received() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let body = vec![7; 100_000];
        std::thread::scope(|s| {
            s.spawn(|| {
                send(
                    &a,
                    5,
                    Command::DmaMap as u16,
                    0,
                    0,
                    &Body::default().u32(1).u64(2).bytes(b"x").0,
                    &[file.as_fd(), file.as_fd()],
                )
                .unwrap();
                send(&a, 6, 99, ERROR | REPLY, 22, &body, &[]).unwrap();
                drop(a);
            });
            let first = receive(&b).unwrap().unwrap();
            assert_eq!((first.id, first.command, first.fds.len()), (5, 2, 2));
            let mut fields = Fields(&first.body);
            assert_eq!((fields.u32(), fields.u64(), fields.0, fields.u32()), (Some(1), Some(2), &b"x"[..], None));
            let second = receive(&b).unwrap().unwrap();
            assert_eq!((second.flags, second.error, second.body.len()), (ERROR | REPLY, 22, 100_000));
            assert!(Command::from_number(second.command).is_none());
            assert!(receive(&b).unwrap().is_none(), "closed");
        });
    }

    #[test]
    fn malformed_messages_are_errors() {
        let header = |len: u32| [&[0; 4][..], &len.to_le_bytes(), &[0; 8]].concat();
        for bytes in
            [vec![1, 2, 3], header(15), header(0), header(u32::MAX), header(MAX_MESSAGE as u32 + 1), header(40)]
        {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(&bytes).unwrap();
            drop(a);
            assert!(receive(&b).is_err(), "{bytes:?}");
        }
    }
}
