//! The messages between daemon and client: `docs/formats/daemon.md` in code.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the messages that this crate speaks.
pub const VERSION: u16 = 1;
/// "DMLD": the first field of a greeting.
pub const MAGIC: u32 = 0x444c_4d44;
/// Bytes of a message, at most.
pub const MAX_MESSAGE: usize = 4096;
/// Descriptors that come with a message, at most.
pub const MAX_FDS: usize = 64;
/// Segments of a mapping, at most.
pub const MAX_SEGMENTS: usize = 128;
/// Bytes that one message writes to card memory, at most.
pub const MAX_BYTES: usize = 2048;
/// Rows in an answer about the daemon's clients, at most.
pub const MAX_ROWS: usize = 32;

/// Set in the opcode of an answer.
pub const ANSWER: u32 = 1 << 31;
/// The opcode of an answer that says what was wrong.
pub const FAILED: u32 = u32::MAX;

const HELLO: u32 = 1;
const OPEN: u32 = 2;
const READ: u32 = 3;
const WRITE: u32 = 4;
const WRITE_BYTES: u32 = 5;
const MAP: u32 = 6;
const UNMAP: u32 = 7;
const BUFFER: u32 = 8;
const CLOSE: u32 = 9;
const STATUS: u32 = 10;

/// How every message begins.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct Header {
    /// Bytes of the message, this included.
    pub size: U32,
    /// What it is.
    pub opcode: U32,
    /// Of a request: a number of the client's choice. Of an answer: that of the request.
    pub seqno: U64,
}

/// Which bytes of which descriptor a mapping shows.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Segment {
    /// The place of the memfd among the descriptors of the message, from 0.
    pub fd: U32,
    /// 0.
    pub reserved: U32,
    /// The first byte; a multiple of 4096.
    pub offset: U64,
    /// Bytes; a multiple of 4096.
    pub len: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HelloBody {
    magic: U32,
    min: U16,
    max: U16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OpenBody {
    ddr: U64,
    hbm: U64,
    queues: U32,
    reserved: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RegisterBody {
    offset: U64,
    bar: U32,
    /// The value of a write, the bytes that follow, or 0.
    value: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MapBody {
    access: U32,
    count: U32,
}

/// What a client asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// First of all: which versions the client speaks.
    Hello {
        /// The lowest.
        min: u16,
        /// The highest.
        max: u16,
    },
    /// A function of the card. 0 asks for as much as a client may have.
    Open {
        /// Bytes of DDR.
        ddr: u64,
        /// Bytes of HBM.
        hbm: u64,
        /// Queues.
        queues: u32,
    },
    /// A register.
    Read {
        /// Which base address register.
        bar: u8,
        /// Offset in it.
        offset: u64,
    },
    /// A register to be written.
    Write {
        /// Which base address register.
        bar: u8,
        /// Offset in it.
        offset: u64,
        /// What to write.
        value: u32,
    },
    /// Bytes to be written through a memory BAR.
    WriteBytes {
        /// Which base address register.
        bar: u8,
        /// Offset in it.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Memory to be shown to the card, one segment behind the other, with a descriptor for each memfd.
    Map {
        /// Bit 0: the card may read; bit 1: it may write.
        access: u32,
        /// What to show.
        segments: &'a [Segment],
    },
    /// A mapping to be taken away, by its first IOVA.
    Unmap {
        /// Where it begins.
        iova: u64,
    },
    /// A buffer to be made.
    Buffer {
        /// Its bytes.
        len: u64,
    },
    /// A buffer to be forgotten.
    Close {
        /// Its number.
        id: u64,
    },
    /// What the daemon is doing.
    Status {
        /// Clients with a smaller number are left out.
        first: u64,
    },
}

/// A message that is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed {
    /// The number that it carries, if it is long enough to carry one.
    pub seqno: u64,
    /// The opcode is not known; else what is wrong.
    pub unknown: bool,
    /// What is wrong with it.
    pub why: &'static str,
}

impl<'a> Request<'a> {
    /// Takes a message apart, as it came out of the socket.
    ///
    /// # Errors
    /// [`Malformed`]: whatever is not exactly as the format says.
    pub fn decode(message: &'a [u8]) -> Result<(u64, Self), Malformed> {
        let Ok((header, body)) = Header::ref_from_prefix(message) else {
            return Err(Malformed { seqno: 0, unknown: false, why: "shorter than a header" });
        };
        let seqno = header.seqno.get();
        let bad = |why| Malformed { seqno, unknown: false, why };
        if header.size.get() as usize != message.len() {
            return Err(bad("its size is not what its header says"));
        }
        let length = "its length is wrong for what it asks";
        let register = |body: &'a [u8]| -> Result<(u8, u64, u32, &'a [u8]), Malformed> {
            let (b, rest) = RegisterBody::ref_from_prefix(body).map_err(|_| bad(length))?;
            let bar = u8::try_from(b.bar.get()).map_err(|_| bad("there is no such BAR"))?;
            Ok((bar, b.offset.get(), b.value.get(), rest))
        };
        let number = |body| U64::ref_from_bytes(body).map(|n: &U64| n.get()).map_err(|_| bad(length));
        let request = match header.opcode.get() {
            HELLO => {
                let b = HelloBody::ref_from_bytes(body).map_err(|_| bad(length))?;
                if b.magic.get() != MAGIC {
                    return Err(bad("its greeting is not that of a client of dmalaned"));
                }
                Self::Hello { min: b.min.get(), max: b.max.get() }
            }
            OPEN => {
                let b = OpenBody::ref_from_bytes(body).map_err(|_| bad(length))?;
                if b.reserved.get() != 0 {
                    return Err(bad("a reserved field is not 0"));
                }
                Self::Open { ddr: b.ddr.get(), hbm: b.hbm.get(), queues: b.queues.get() }
            }
            READ => match register(body)? {
                (bar, offset, 0, []) => Self::Read { bar, offset },
                _ => return Err(bad(length)),
            },
            WRITE => match register(body)? {
                (bar, offset, value, []) => Self::Write { bar, offset, value },
                _ => return Err(bad(length)),
            },
            WRITE_BYTES => match register(body)? {
                (bar, offset, len, bytes) if len as usize == bytes.len() && bytes.len() <= MAX_BYTES => {
                    Self::WriteBytes { bar, offset, bytes }
                }
                _ => return Err(bad(length)),
            },
            MAP => {
                let (b, rest) = MapBody::ref_from_prefix(body).map_err(|_| bad(length))?;
                let count = b.count.get() as usize;
                if !(1..=MAX_SEGMENTS).contains(&count) {
                    return Err(bad("a mapping has 1 to 128 segments"));
                }
                let segments =
                    <[Segment]>::ref_from_bytes(rest).ok().filter(|s| s.len() == count).ok_or(bad(length))?;
                if segments.iter().any(|s| s.reserved.get() != 0) {
                    return Err(bad("a reserved field is not 0"));
                }
                Self::Map { access: b.access.get(), segments }
            }
            UNMAP => Self::Unmap { iova: number(body)? },
            BUFFER => Self::Buffer { len: number(body)? },
            CLOSE => Self::Close { id: number(body)? },
            STATUS => Self::Status { first: number(body)? },
            _ => return Err(Malformed { seqno, unknown: true, why: "there is no such request" }),
        };
        Ok((seqno, request))
    }

    /// The opcode.
    pub fn opcode(&self) -> u32 {
        match self {
            Self::Hello { .. } => HELLO,
            Self::Open { .. } => OPEN,
            Self::Read { .. } => READ,
            Self::Write { .. } => WRITE,
            Self::WriteBytes { .. } => WRITE_BYTES,
            Self::Map { .. } => MAP,
            Self::Unmap { .. } => UNMAP,
            Self::Buffer { .. } => BUFFER,
            Self::Close { .. } => CLOSE,
            Self::Status { .. } => STATUS,
        }
    }

    /// The message, ready to be sent. Lists longer than a message may have make one that is refused.
    pub fn encode(&self, seqno: u64) -> Vec<u8> {
        let mut body = Vec::new();
        let mut put = |bytes: &[u8]| body.extend_from_slice(bytes);
        let register = |bar: u8, offset: u64, value: u32| RegisterBody {
            offset: offset.into(),
            bar: u32::from(bar).into(),
            value: value.into(),
        };
        match *self {
            Self::Hello { min, max } => {
                put(HelloBody { magic: MAGIC.into(), min: min.into(), max: max.into() }.as_bytes());
            }
            Self::Open { ddr, hbm, queues } => {
                let reserved = U32::ZERO;
                put(OpenBody { ddr: ddr.into(), hbm: hbm.into(), queues: queues.into(), reserved }.as_bytes());
            }
            Self::Read { bar, offset } => put(register(bar, offset, 0).as_bytes()),
            Self::Write { bar, offset, value } => put(register(bar, offset, value).as_bytes()),
            Self::WriteBytes { bar, offset, bytes } => {
                put(register(bar, offset, bytes.len() as u32).as_bytes());
                put(bytes);
            }
            Self::Map { access, segments } => {
                put(MapBody { access: access.into(), count: (segments.len() as u32).into() }.as_bytes());
                put(segments.as_bytes());
            }
            Self::Unmap { iova: n } | Self::Buffer { len: n } | Self::Close { id: n } | Self::Status { first: n } => {
                put(U64::new(n).as_bytes());
            }
        }
        message(self.opcode(), seqno, &body)
    }
}

/// A message of a header and what follows it.
pub fn message(opcode: u32, seqno: u64, body: &[u8]) -> Vec<u8> {
    let size = (size_of::<Header>() + body.len()) as u32;
    let mut out = Header { size: size.into(), opcode: opcode.into(), seqno: seqno.into() }.as_bytes().to_vec();
    out.extend_from_slice(body);
    out
}

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
#[non_exhaustive]
pub enum Code {
    /// The message is not as the format says.
    Malformed = 1,
    /// There is no such request.
    Unknown = 2,
    /// No version that both speak.
    Version = 3,
    /// This user may not, or not yet.
    NotPermitted = 4,
    /// More than the client, or all of them together, may have.
    Quota = 5,
    /// There is no such register, mapping or buffer.
    NoSuchThing = 6,
    /// A descriptor that is not what it should be.
    BadDescriptor = 7,
    /// It is in use.
    Busy = 8,
    /// The machine could not.
    Failed = 9,
}

impl Code {
    const ALL: [Self; 9] = [
        Self::Malformed,
        Self::Unknown,
        Self::Version,
        Self::NotPermitted,
        Self::Quota,
        Self::NoSuchThing,
        Self::BadDescriptor,
        Self::Busy,
        Self::Failed,
    ];

    /// The code of this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| *code as u32 == number)
    }
}

/// The answer that a request was refused; its text follows.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Debug)]
#[repr(C)]
pub struct FailedAnswer {
    /// A [`Code`].
    pub code: U32,
    /// Bytes of the text.
    pub len: U32,
}

/// The answer to a greeting.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct HelloAnswer {
    /// The version from here on.
    pub version: U16,
    /// 0.
    pub reserved: [U16; 3],
    /// The number of this client.
    pub client: U64,
    /// Bytes of DDR that a client may have.
    pub ddr: U64,
    /// Bytes of HBM that a client may have.
    pub hbm: U64,
    /// Queues that a client may have.
    pub queues: U32,
    /// Buffers that a client may have.
    pub buffers: U32,
    /// Bytes of buffers that a client may have.
    pub bytes: U64,
}

/// The answer to `Open`. With it come the register page, the kick descriptor and a call descriptor for each queue.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct OpenAnswer {
    /// Bytes of DDR.
    pub ddr: U64,
    /// Bytes of HBM.
    pub hbm: U64,
    /// Queues.
    pub queues: U32,
    /// 0.
    pub reserved: U32,
}

/// The answer to `Map` and to `Buffer` (which comes with a memfd).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct PairAnswer {
    /// The first IOVA of a mapping, or the number of a buffer.
    pub first: U64,
    /// Bytes.
    pub len: U64,
}

/// What the daemon has done and holds, in an answer to `Status`; rows follow.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct TotalsAnswer {
    /// Seconds since the daemon was started.
    pub uptime: U64,
    /// Connections now.
    pub clients: U32,
    /// Clients whose queues have not confirmed that they stopped: what they had is kept.
    pub quarantined: U32,
    /// Clients that have come and opened a function.
    pub served: U64,
    /// Those of them that have gone, and everything of theirs was released.
    pub released: U64,
    /// Connections refused: not permitted, or too many.
    pub refused: U64,
    /// Requests answered.
    pub requests: U64,
    /// Requests refused.
    pub errors: U64,
    /// Card memory that clients have: DDR, in bytes.
    pub ddr: U64,
    /// HBM, in bytes.
    pub hbm: U64,
    /// Card memory that there is: DDR, in bytes.
    pub ddr_total: U64,
    /// HBM, in bytes.
    pub hbm_total: U64,
    /// Rows that follow.
    pub rows: U32,
    /// 1 when there are clients behind the last row.
    pub more: U32,
}

/// One client, in an answer to `Status`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct RowAnswer {
    /// Its number.
    pub client: U64,
    /// Process, as it was when it connected.
    pub pid: U32,
    /// User.
    pub uid: U32,
    /// Queues.
    pub queues: U32,
    /// Buffers.
    pub buffers: U32,
    /// Mappings.
    pub mappings: U32,
    /// 1 while it is being released.
    pub closing: U32,
    /// Bytes of its buffers.
    pub bytes: U64,
    /// DDR, in bytes.
    pub ddr: U64,
    /// HBM, in bytes.
    pub hbm: U64,
    /// Bytes moved for it.
    pub moved: U64,
    /// Requests of it that were refused.
    pub errors: U64,
}

/// The message that a request was refused.
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

    fn all() -> Vec<Request<'static>> {
        const SEGMENTS: [Segment; 2] = [
            Segment { fd: U32::ZERO, reserved: U32::ZERO, offset: U64::new(4096), len: U64::new(8192) },
            Segment { fd: U32::new(1), reserved: U32::ZERO, offset: U64::ZERO, len: U64::new(4096) },
        ];
        vec![
            Request::Hello { min: 1, max: 3 },
            Request::Open { ddr: 1 << 40, hbm: 5, queues: 2 },
            Request::Read { bar: 0, offset: 0x1004 },
            Request::Write { bar: 2, offset: u64::MAX, value: 7 },
            Request::WriteBytes { bar: 2, offset: 8, bytes: b"some bytes" },
            Request::Map { access: 3, segments: &SEGMENTS },
            Request::Unmap { iova: 0x10_0000 },
            Request::Buffer { len: 4096 },
            Request::Close { id: 9 },
            Request::Status { first: 0 },
        ]
    }

    #[test]
    fn requests_survive_the_way() {
        for (i, request) in all().into_iter().enumerate() {
            let bytes = request.encode(i as u64 + 5);
            assert_eq!(Request::decode(&bytes), Ok((i as u64 + 5, request)));
            assert!(bytes.len() <= MAX_MESSAGE);
            // Neither shorter nor longer.
            for cut in 0..bytes.len() {
                assert!(Request::decode(&bytes[..cut]).is_err());
            }
            let mut longer = bytes.clone();
            longer.push(0);
            assert!(Request::decode(&longer).is_err());
            longer[0] += 1;
            assert!(Request::decode(&longer).is_err(), "{request:?}");
        }
    }

    #[test]
    fn the_longest_lists_fit_a_message() {
        let segment = Segment { fd: U32::ZERO, reserved: U32::ZERO, offset: U64::ZERO, len: U64::new(4096) };
        let map = Request::Map { access: 1, segments: &[segment; MAX_SEGMENTS] }.encode(0);
        assert!(map.len() <= MAX_MESSAGE && Request::decode(&map).is_ok());
        let map = Request::Map { access: 1, segments: &[segment; MAX_SEGMENTS + 1] }.encode(0);
        assert!(Request::decode(&map).is_err());
        let bytes = Request::WriteBytes { bar: 2, offset: 0, bytes: &[1; MAX_BYTES] }.encode(0);
        assert!(bytes.len() <= MAX_MESSAGE && Request::decode(&bytes).is_ok());
        assert!(
            Request::decode(&Request::WriteBytes { bar: 2, offset: 0, bytes: &[1; MAX_BYTES + 1] }.encode(0)).is_err()
        );
        assert_eq!((size_of::<TotalsAnswer>(), size_of::<RowAnswer>(), size_of::<HelloAnswer>()), (96, 72, 48));
        let status = size_of::<Header>() + size_of::<TotalsAnswer>() + MAX_ROWS * size_of::<RowAnswer>();
        assert!(status <= MAX_MESSAGE, "{status}");
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        let message = failed(3, Code::Quota, &"ä".repeat(600));
        let (header, body) = Header::ref_from_prefix(&message).unwrap();
        assert_eq!((header.opcode.get(), header.seqno.get(), header.size.get() as usize), (FAILED, 3, message.len()));
        let (failed, text) = FailedAnswer::ref_from_prefix(body).unwrap();
        assert_eq!(Code::from_number(failed.code.get()), Some(Code::Quota));
        assert_eq!(std::str::from_utf8(text).unwrap().chars().count(), 512);
    }

    #[test]
    fn bytes_are_where_the_format_has_them() {
        let bytes = Request::Write { bar: 0, offset: 0x1020, value: 9 }.encode(0x1122);
        let want = [32, 0, 0, 0, 4, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0];
        assert_eq!(bytes[..16], want);
        assert_eq!(bytes[16..], [0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(Request::Hello { min: 1, max: 1 }.encode(0)[16..20], *b"DMLD");
    }
}
