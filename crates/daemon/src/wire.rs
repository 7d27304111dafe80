//! The messages between daemon and client, as `docs/formats/daemon.md` describes them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dmalane_dma::SharedBuf;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::page::PAGE_BYTES;

/// Protocol version of this crate.
pub const VERSION: u32 = 8;
/// "DMLD": the first field of a hello request.
pub const MAGIC: u64 = 0x444c_4d44;
/// Most bytes of a message.
pub const MAX_MESSAGE: usize = 4096;
/// Most descriptors in a message.
pub const MAX_FDS: usize = 64;
/// Most segments of a mapping.
pub const MAX_SEGMENTS: usize = 128;
/// Most bytes that one message writes to card memory.
pub const MAX_BYTES: usize = 2048;
/// Most rows in a status answer.
pub const MAX_ROWS: usize = 32;

/// Bit that is set in the opcode of an answer.
pub const ANSWER: u32 = 1 << 31;
/// Opcode of the answer to a refused request.
pub const FAILED: u32 = u32::MAX;

const HELLO: u32 = 1;
const OPEN: u32 = 2;
const READ: u32 = 3;
const WRITE: u32 = 4;
const WRITE_BYTES: u32 = 5;
const MAP: u32 = 6;
const UNMAP: u32 = 7;
const STATUS: u32 = 8;

/// The header of every message.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct MessageHeader {
    /// Bytes of the message, including the header.
    pub size: U32,
    /// Kind of message.
    pub opcode: U32,
    /// In a request: a number that the client chooses. In an answer: the number of its request.
    pub seqno: U64,
}

/// A range of a memfd, as part of a mapping.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct MapSegment {
    /// Index of the memfd among the descriptors of the message.
    pub fd: U32,
    /// 0.
    pub reserved: U32,
    /// Offset of the first byte; a multiple of 4096.
    pub offset: U64,
    /// Length in bytes; a multiple of 4096.
    pub len: U64,
}

/// The fields after the header of every request. Fields without a meaning are 0.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Default)]
#[repr(C)]
struct Fields {
    at: U64,
    amount: U64,
    index: U32,
    value: U32,
}

/// A request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientRequest<'a> {
    /// Negotiates the version; must be the first request.
    Hello {
        /// Lowest version that the client supports.
        min: u32,
        /// Highest version that the client supports.
        max: u32,
    },
    /// Opens a function of the card. 0 requests the limit of a client.
    Open {
        /// Bytes of DDR.
        ddr: u64,
        /// Bytes of HBM.
        hbm: u64,
        /// Queues.
        queues: u32,
    },
    /// Reads a register.
    Read {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, in bytes.
        offset: u64,
    },
    /// Writes a register.
    Write {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, in bytes.
        offset: u64,
        /// Value to write.
        value: u32,
    },
    /// Writes bytes through a memory BAR.
    WriteBytes {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, in bytes.
        offset: u64,
        /// Bytes to write.
        bytes: &'a [u8],
    },
    /// Maps segments at contiguous IOVAs, with one descriptor for each memfd.
    Map {
        /// Bit 0: the card may read; bit 1: it may write.
        access: u32,
        /// Segments to map, in order.
        segments: &'a [MapSegment],
    },
    /// Removes a mapping.
    Unmap {
        /// First IOVA of the mapping.
        iova: u64,
    },
    /// Queries the daemon's status.
    Status {
        /// Lowest client number to include.
        first: u64,
    },
}

impl<'a> ClientRequest<'a> {
    /// Decodes a message, and returns its number and the request.
    ///
    /// # Errors
    /// For every deviation from the format, with the number of the request: 0 when the message is too short to have
    /// one.
    pub fn decode(message: &'a [u8]) -> Result<(u64, Self), (u64, Denied)> {
        let header = MessageHeader::ref_from_prefix(message);
        let seqno = header.as_ref().map_or(0, |(header, _)| header.seqno.get());
        let refused = |code, why| (seqno, Denied(code, format!("a message of {} bytes: {why}", message.len())));
        let bad = |why| refused(Code::Malformed, why);
        let (header, body) = header.map_err(|_| bad("shorter than a header"))?;
        if header.size.get() as usize != message.len() {
            return Err(bad("its size differs from its header"));
        }
        let opcode = header.opcode.get();
        if !(HELLO..=STATUS).contains(&opcode) {
            return Err(refused(Code::Unknown, "there is no such request"));
        }
        let fields = Fields::ref_from_prefix(body).map_err(|_| bad("shorter than a request"))?;
        let (Fields { at, amount, index, value }, rest) = fields;
        let request = match (opcode, at.get(), amount.get(), index.get(), value.get(), rest) {
            (HELLO, MAGIC, 0, min, max, []) => Self::Hello { min, max },
            (OPEN, ddr, hbm, queues, 0, []) => Self::Open { ddr, hbm, queues },
            (READ, offset, 0, bar @ ..=0xff, 0, []) => Self::Read { bar: bar as u8, offset },
            (WRITE, offset, 0, bar @ ..=0xff, value, []) => Self::Write { bar: bar as u8, offset, value },
            (WRITE_BYTES, offset, 0, bar @ ..=0xff, 0, bytes) if bytes.len() <= MAX_BYTES => {
                Self::WriteBytes { bar: bar as u8, offset, bytes }
            }
            (MAP, 0, 0, access, 0, segments) => {
                let segments = <[MapSegment]>::ref_from_bytes(segments).ok();
                let segments = segments.filter(|all| (1..=MAX_SEGMENTS).contains(&all.len()));
                let segments = segments.filter(|all| all.iter().all(|segment| segment.reserved.get() == 0));
                Self::Map {
                    access,
                    segments: segments.ok_or_else(|| bad("a mapping has 1 to 128 segments of 24 bytes"))?,
                }
            }
            (UNMAP, iova, 0, 0, 0, []) => Self::Unmap { iova },
            (STATUS, first, 0, 0, 0, []) => Self::Status { first },
            _ => return Err(bad("its length, or a field of it, is wrong for its opcode")),
        };
        Ok((seqno, request))
    }

    /// The opcode.
    pub fn opcode(&self) -> u32 {
        self.parts().0
    }

    /// The opcode, the fields, and the rest of the message.
    fn parts(&self) -> (u32, u64, u64, u32, u32, &[u8]) {
        match *self {
            Self::Hello { min, max } => (HELLO, MAGIC, 0, min, max, &[]),
            Self::Open { ddr, hbm, queues } => (OPEN, ddr, hbm, queues, 0, &[]),
            Self::Read { bar, offset } => (READ, offset, 0, bar.into(), 0, &[]),
            Self::Write { bar, offset, value } => (WRITE, offset, 0, bar.into(), value, &[]),
            Self::WriteBytes { bar, offset, bytes } => (WRITE_BYTES, offset, 0, bar.into(), 0, bytes),
            Self::Map { access, segments } => (MAP, 0, 0, access, 0, segments.as_bytes()),
            Self::Unmap { iova } => (UNMAP, iova, 0, 0, 0, &[]),
            Self::Status { first } => (STATUS, first, 0, 0, 0, &[]),
        }
    }

    /// Encodes the message. The receiver refuses it when a list exceeds the limits of the format.
    pub fn encode(&self, seqno: u64) -> Vec<u8> {
        let (opcode, at, amount, index, value, rest) = self.parts();
        let fields = Fields { at: at.into(), amount: amount.into(), index: index.into(), value: value.into() };
        message(opcode, seqno, &[fields.as_bytes(), rest].concat())
    }
}

/// Builds a message from its header fields and body.
pub fn message(opcode: u32, seqno: u64, body: &[u8]) -> Vec<u8> {
    let size = (size_of::<MessageHeader>() + body.len()) as u32;
    let mut out = MessageHeader { size: size.into(), opcode: opcode.into(), seqno: seqno.into() }.as_bytes().to_vec();
    out.extend_from_slice(body);
    out
}

/// Why a request was refused.
#[derive(TryFromBytes, Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
#[non_exhaustive]
pub enum Code {
    /// The message violates the format.
    Malformed = 1,
    /// The opcode is unknown.
    Unknown = 2,
    /// Client and daemon have no common version.
    Version = 3,
    /// The user may not do this, or not yet.
    NotPermitted = 4,
    /// A limit of the client, of its user or of the card is exceeded.
    Quota = 5,
    /// There is no such register or mapping.
    NoSuchThing = 6,
    /// A descriptor is missing or of the wrong kind.
    BadDescriptor = 7,
    /// The object is in use.
    Busy = 8,
    /// The daemon's machine could not do it.
    Failed = 9,
}

impl Code {
    /// The code with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::try_read_from_bytes(&number.to_ne_bytes()).ok()
    }
}

/// Why a request is refused, as a code and as a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Denied(pub Code, pub String);

impl Denied {
    /// Refuses, with this text, what does not hold.
    pub(crate) fn unless(holds: bool, code: Code, text: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self(code, text())) }
    }
}

/// The answer to a refused request; a text follows.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Debug)]
#[repr(C)]
pub struct FailedAnswer {
    /// A [`Code`].
    pub code: U32,
    /// Bytes of the text.
    pub len: U32,
}

/// The answer to `Hello`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct HelloAnswer {
    /// The version to use from now on.
    pub version: U32,
    /// Queues of a client, at most.
    pub queues: U32,
    /// The number of this client.
    pub client: U64,
}

// The structures of a status answer have native integers.
const _: () = assert!(cfg!(target_endian = "little"), "the daemon's protocol is little-endian");

/// The beginning of an answer to `Status`; a [`ClientStatus`] for each client follows.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
#[repr(C)]
pub struct StatusAnswer {
    /// Seconds since the daemon was started.
    pub uptime: u64,
    /// Bytes of DDR in use, and in total.
    pub ddr: [u64; 2],
    /// Bytes of HBM in use, and in total.
    pub hbm: [u64; 2],
    /// 1 when there are clients after the last one.
    pub more: u64,
}

/// The files that a client shares with its function. It makes them, so that they are its own in the kernel's accounts.
pub struct FunctionFiles {
    /// The register page.
    pub page: SharedBuf,
    /// Written to wake the daemon.
    pub kick: OwnedFd,
    /// The client's end of a socket pair, which becomes readable when the daemon calls.
    pub call: OwnedFd,
    theirs: OwnedFd,
}

impl FunctionFiles {
    /// New ones.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> std::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (call, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let page = SharedBuf::sparse("dmalane-registers", PAGE_BYTES).map_err(std::io::Error::other)?;
        page.populate(0, PAGE_BYTES)?;
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { page, kick, call, theirs })
    }

    /// The descriptors that `Open` carries: the page, the kick descriptor, and the daemon's end of the call.
    pub fn fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.page.export().expect("a memfd"), self.kick.as_fd(), self.theirs.as_fd()]
    }
}

/// The state of one client.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct ClientStatus {
    /// Number of the client.
    pub client: u64,
    /// Process that connected.
    pub pid: u32,
    /// User that connected.
    pub uid: u32,
    /// Queues; 0 for a client that has opened no function.
    pub queues: u32,
    /// Buffers.
    pub buffers: u32,
    /// Mappings.
    pub mappings: u32,
    /// 1 when the client has disconnected, and its resources are being released.
    pub closing: u32,
    /// Bytes of its buffers.
    pub bytes: u64,
    /// DDR, in bytes.
    pub ddr: u64,
    /// HBM, in bytes.
    pub hbm: u64,
    /// Bytes copied from the host to the card for this client.
    pub h2c: u64,
    /// Bytes copied from the card to the host for this client.
    pub c2h: u64,
    /// Refused requests of this client.
    pub errors: u64,
    /// Descriptors that its queues were given and have not completed.
    pub in_flight: u64,
    /// Accesses of its function to memory that was not mapped for it.
    pub faults: u64,
}

impl ClientStatus {
    /// Buffers and memory, for the log.
    pub(crate) fn resources(&self) -> String {
        let Self { buffers, bytes, mappings, .. } = self;
        let card = self.ddr + self.hbm;
        format!("{buffers} buffers ({bytes} bytes), {mappings} mappings, {card} bytes of card memory")
    }

    /// Bytes copied for this client in both directions.
    pub fn moved(&self) -> u64 {
        self.h2c.saturating_add(self.c2h)
    }
}

/// Builds the answer to a refused request. The text is cut to 1024 bytes.
pub fn failed(seqno: u64, code: Code, text: &str) -> Vec<u8> {
    let mut len = text.len().min(1024);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    let mut body = FailedAnswer { code: (code as u32).into(), len: (len as u32).into() }.as_bytes().to_vec();
    body.extend_from_slice(&text.as_bytes()[..len]);
    message(FAILED, seqno, &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<ClientRequest<'static>> {
        const SEGMENTS: [MapSegment; 2] = [
            MapSegment { fd: U32::ZERO, reserved: U32::ZERO, offset: U64::new(4096), len: U64::new(8192) },
            MapSegment { fd: U32::new(1), reserved: U32::ZERO, offset: U64::ZERO, len: U64::new(4096) },
        ];
        vec![
            ClientRequest::Hello { min: 1, max: 3 },
            ClientRequest::Open { ddr: 1 << 40, hbm: 5, queues: 2 },
            ClientRequest::Read { bar: 0, offset: 0x1004 },
            ClientRequest::Write { bar: 2, offset: u64::MAX, value: 7 },
            ClientRequest::WriteBytes { bar: 2, offset: 8, bytes: b"some bytes" },
            ClientRequest::Map { access: 3, segments: &SEGMENTS },
            ClientRequest::Unmap { iova: 0x10_0000 },
            ClientRequest::Status { first: 0 },
        ]
    }

    #[test]
    fn requests_decode_as_encoded() {
        for (i, request) in all().into_iter().enumerate() {
            let bytes = request.encode(i as u64 + 5);
            assert_eq!(ClientRequest::decode(&bytes), Ok((i as u64 + 5, request)));
            assert!(bytes.len() <= MAX_MESSAGE);
            // Neither shorter nor longer, but for bytes to write.
            let is_bytes = matches!(request, ClientRequest::WriteBytes { .. });
            for cut in (0..bytes.len()).filter(|cut| !is_bytes || *cut < 40) {
                let mut shorter = bytes[..cut].to_vec();
                assert!(ClientRequest::decode(&shorter).is_err());
                if let Some(size) = shorter.first_mut() {
                    *size = cut as u8;
                }
                // A mapping may be one of fewer segments.
                let decoded = ClientRequest::decode(&shorter).map(|(_, request)| request);
                assert!(decoded.is_err() || matches!(request, ClientRequest::Map { .. }), "{request:?} {cut}");
            }
            let mut longer = bytes.clone();
            longer.push(0);
            assert!(ClientRequest::decode(&longer).is_err());
            longer[0] += 1;
            assert!(ClientRequest::decode(&longer).is_err() || is_bytes, "{request:?}");
            // A field without a meaning is 0.
            for at in [24, 36] {
                let mut other = bytes.clone();
                other[at] ^= 0x80;
                let decoded = ClientRequest::decode(&other).map(|(_, request)| request);
                assert!(
                    decoded.is_err_and(|(_, refused)| refused.0 == Code::Malformed)
                        || ClientRequest::decode(&other).unwrap().1 != request
                );
            }
        }
    }

    #[test]
    fn the_longest_lists_fit_a_message() {
        let segment = MapSegment { fd: U32::ZERO, reserved: U32::ZERO, offset: U64::ZERO, len: U64::new(4096) };
        let map = ClientRequest::Map { access: 1, segments: &[segment; MAX_SEGMENTS] }.encode(0);
        assert!(map.len() <= MAX_MESSAGE && ClientRequest::decode(&map).is_ok());
        let map = ClientRequest::Map { access: 1, segments: &[segment; MAX_SEGMENTS + 1] }.encode(0);
        assert!(ClientRequest::decode(&map).is_err());
        let bytes = ClientRequest::WriteBytes { bar: 2, offset: 0, bytes: &[1; MAX_BYTES] }.encode(0);
        assert!(bytes.len() <= MAX_MESSAGE && ClientRequest::decode(&bytes).is_ok());
        assert!(
            ClientRequest::decode(
                &ClientRequest::WriteBytes { bar: 2, offset: 0, bytes: &[1; MAX_BYTES + 1] }.encode(0)
            )
            .is_err()
        );
        assert_eq!((size_of::<StatusAnswer>(), size_of::<ClientStatus>(), size_of::<HelloAnswer>()), (48, 96, 16));
        let status = size_of::<MessageHeader>() + size_of::<StatusAnswer>() + MAX_ROWS * size_of::<ClientStatus>();
        assert!(status <= MAX_MESSAGE, "{status}");
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let message = failed(3, Code::Quota, &"ä".repeat(600));
        let (header, body) = MessageHeader::ref_from_prefix(&message).unwrap();
        assert_eq!((header.opcode.get(), header.seqno.get(), header.size.get() as usize), (FAILED, 3, message.len()));
        let (failed, text) = FailedAnswer::ref_from_prefix(body).unwrap();
        assert_eq!(Code::from_number(failed.code.get()), Some(Code::Quota));
        assert_eq!(std::str::from_utf8(text).unwrap().chars().count(), 512);
    }

    #[test]
    fn encodes_fields_at_the_documented_offsets() {
        let bytes = ClientRequest::Write { bar: 0, offset: 0x1020, value: 9 }.encode(0x1122);
        let want = [40, 0, 0, 0, 4, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0];
        assert_eq!(bytes[..16], want);
        assert_eq!(bytes[16..], [0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(ClientRequest::Hello { min: 1, max: 1 }.encode(0)[16..20], *b"DMLD");
    }
}
