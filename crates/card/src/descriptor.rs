//! Descriptors, completions, and their bytes.

use dmalane_addr::{CardAddr, DeviceVa, Iova};
use dmalane_queue::{CacheHint, DeviceAddr, Direction};

use crate::regs::MAX_LEN;

const H2C: u8 = 1;
const C2H: u8 = 2;
const WITHIN: u8 = 3;
const FILL: u8 = 4;
const COMPARE: u8 = 5;
const SHAPE: u8 = 6;
const FENCE: u8 = 7;
/// Flag: the card side is a device virtual address.
const VIRTUAL: u8 = 1;
/// Flag: the source of a copy within the card is a device virtual address.
const VIRTUAL_SOURCE: u8 = 1 << 1;
/// Flag: the next descriptor belongs to the same operation.
const CHAINED: u8 = 1 << 2;
/// Flags: how to copy.
const HOT: u8 = 1 << 4;
const COLD: u8 = 2 << 4;
const CACHE: u8 = 3 << 4;

/// The task of a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Copy between host and card.
    Copy {
        /// The direction.
        direction: Direction,
        /// Where in host memory.
        host: Iova,
        /// Where in card memory.
        card: DeviceAddr,
        /// Bytes: 1 to [`MAX_LEN`].
        len: u32,
    },
    /// Copy within the card.
    Within {
        /// The source.
        from: DeviceAddr,
        /// The destination.
        to: DeviceAddr,
        /// Bytes: 1 to [`MAX_LEN`].
        len: u32,
    },
    /// Fill card memory with eight bytes again and again.
    Fill {
        /// The eight bytes, the lowest first.
        pattern: u64,
        /// Where.
        card: DeviceAddr,
        /// Bytes: 1 to [`MAX_LEN`].
        len: u32,
    },
    /// Compare host memory with card memory.
    Compare {
        /// Where in host memory.
        host: Iova,
        /// Where in card memory.
        card: DeviceAddr,
        /// Bytes: 1 to [`MAX_LEN`].
        len: u32,
    },
    /// Make rows of the next descriptor, whose length is that of one row.
    Shape {
        /// Bytes from row to row in host memory or in the source.
        host_pitch: u64,
        /// Bytes from row to row in card memory or in the destination.
        card_pitch: u64,
        /// Rows: 1 to [`MAX_LEN`], and at most that many bytes in all.
        rows: u32,
    },
    /// Nothing; what comes after begins when what came before has ended.
    Fence,
}

/// One entry of a descriptor ring, as the host asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The task.
    pub task: Task,
    /// The next descriptor belongs to the same operation: it is skipped when this one fails.
    pub chained: bool,
    /// How to copy.
    pub cache: CacheHint,
    /// Comes back in the completion.
    pub cookie: u32,
}

/// A descriptor that makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed {
    /// The cookie that it carries, whatever else is wrong.
    pub cookie: u32,
    /// It says that the next descriptor belongs to it.
    pub chained: bool,
    /// The first fault.
    pub status: Status,
}

impl From<Task> for Descriptor {
    /// On its own, with nothing known about the cache, and cookie 0.
    fn from(task: Task) -> Self {
        Self { task, chained: false, cache: CacheHint::Auto, cookie: 0 }
    }
}

impl Descriptor {
    /// Bytes of a descriptor.
    pub const BYTES: usize = 32;

    /// The descriptor as four little-endian words, in order.
    #[inline]
    pub fn encode(&self) -> [u64; 4] {
        let place = |at: DeviceAddr, flag: u8| match at {
            DeviceAddr::Card(a) => (a.bits(), 0),
            DeviceAddr::Va(a) => (a.bits(), flag),
        };
        let (opcode, host_word, (card_word, virtually), len) = match self.task {
            Task::Copy { direction, host, card, len } => {
                let opcode = if direction == Direction::FromHost { H2C } else { C2H };
                (opcode, host.bits(), place(card, VIRTUAL), len)
            }
            Task::Within { from, to, len } => {
                let ((host_word, a), (card_word, b)) = (place(from, VIRTUAL_SOURCE), place(to, VIRTUAL));
                (WITHIN, host_word, (card_word, a | b), len)
            }
            Task::Fill { pattern, card, len } => (FILL, pattern, place(card, VIRTUAL), len),
            Task::Compare { host, card, len } => (COMPARE, host.bits(), place(card, VIRTUAL), len),
            Task::Shape { host_pitch, card_pitch, rows } => (SHAPE, host_pitch, (card_pitch, 0), rows),
            Task::Fence => (FENCE, 0, (0, 0), 0),
        };
        let cache = match self.cache {
            CacheHint::Auto => 0,
            CacheHint::Hot => HOT,
            CacheHint::Cold => COLD,
        };
        let flags = virtually | cache | if self.chained { CHAINED } else { 0 };
        let head = u64::from(opcode) | u64::from(flags) << 8 | u64::from(self.cookie) << 32;
        [head, host_word, card_word, u64::from(len)]
    }

    /// Decodes a descriptor. The bytes come from memory that anybody may have written, so everything is checked, and
    /// no address range of the result wraps.
    ///
    /// # Errors
    /// [`Malformed`] names the first thing that is wrong.
    #[inline]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        let (head, host_word, card_word, tail) = (word(0), word(1), word(2), word(3));
        let cookie = (head >> 32) as u32;
        let flags = (head >> 8) as u8;
        let chained = flags & CHAINED != 0;
        let refuse = |status| Err(Malformed { cookie, chained, status });
        let opcode = head as u8;
        let known = match opcode {
            H2C | C2H | COMPARE | FILL => VIRTUAL | CHAINED | CACHE,
            WITHIN => VIRTUAL | VIRTUAL_SOURCE | CHAINED | CACHE,
            SHAPE | FENCE => CHAINED,
            _ => return refuse(Status::BadOpcode),
        };
        let cache = match flags & CACHE {
            0 => CacheHint::Auto,
            HOT => CacheHint::Hot,
            COLD => CacheHint::Cold,
            _ => return refuse(Status::BadFlags),
        };
        if flags & !known != 0 || (head >> 16) as u16 != 0 || tail >> 32 != 0 {
            return refuse(Status::BadFlags);
        }
        let len = tail as u32;
        if opcode == FENCE {
            return match (host_word, card_word, len) {
                (0, 0, 0) => Ok(Self { task: Task::Fence, chained, cache, cookie }),
                _ => refuse(Status::BadFlags),
            };
        }
        if len == 0 || len > MAX_LEN {
            return refuse(Status::BadLength);
        }
        let last = u64::from(len) - 1;
        let host_is_an_address = !matches!(opcode, FILL | SHAPE);
        if opcode != SHAPE
            && (card_word.checked_add(last).is_none() || host_is_an_address && host_word.checked_add(last).is_none())
        {
            return refuse(Status::Wraps);
        }
        let place = |at: u64, flag: u8| match flags & flag {
            0 => DeviceAddr::Card(CardAddr::new(at)),
            _ => DeviceAddr::Va(DeviceVa::new(at)),
        };
        let (host, card) = (Iova::new(host_word), place(card_word, VIRTUAL));
        let task = match opcode {
            H2C => Task::Copy { direction: Direction::FromHost, host, card, len },
            C2H => Task::Copy { direction: Direction::ToHost, host, card, len },
            COMPARE => Task::Compare { host, card, len },
            WITHIN => Task::Within { from: place(host_word, VIRTUAL_SOURCE), to: card, len },
            FILL => Task::Fill { pattern: host_word, card, len },
            _ => Task::Shape { host_pitch: host_word, card_pitch: card_word, rows: len },
        };
        Ok(Self { task, chained, cache, cookie })
    }
}

/// A copy between host memory and a card address, without a shape: what most descriptors are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlainCopy {
    /// The direction.
    pub direction: Direction,
    /// Where in host memory.
    pub host: Iova,
    /// Where in card memory.
    pub card: CardAddr,
    /// Bytes: 1 to [`MAX_LEN`].
    pub len: u32,
    /// The next descriptor belongs to the same operation.
    pub chained: bool,
    /// How to copy.
    pub cache: CacheHint,
    /// Comes back in the completion.
    pub cookie: u32,
}

impl PlainCopy {
    /// [`Descriptor::decode`] of such a copy in a quarter of the instructions. `None` for every other descriptor, and
    /// for one that `decode` refuses.
    #[inline]
    pub fn decode(bytes: &[u8; Descriptor::BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        let (head, host_word, card_word, len) = (word(0), word(1), word(2), word(3));
        let direction = match head as u32 & !(u32::from(CACHE | CHAINED) << 8) {
            opcode if opcode == u32::from(H2C) => Direction::FromHost,
            opcode if opcode == u32::from(C2H) => Direction::ToHost,
            _ => return None,
        };
        let flags = (head >> 8) as u8;
        let cache = match flags & CACHE {
            0 => CacheHint::Auto,
            HOT => CacheHint::Hot,
            COLD => CacheHint::Cold,
            _ => return None,
        };
        let last = len.checked_sub(1).filter(|last| *last < u64::from(MAX_LEN))?;
        if host_word.checked_add(last).is_none() || card_word.checked_add(last).is_none() {
            return None;
        }
        let (host, card, cookie) = (Iova::new(host_word), CardAddr::new(card_word), (head >> 32) as u32);
        Some(Self { direction, host, card, len: len as u32, chained: flags & CHAINED != 0, cache, cookie })
    }
}

macro_rules! codes {
    ($(#[doc = $doc:literal])* $name:ident: $repr:ty {
        $($(#[doc = $d:literal])* $variant:ident = $code:literal, $text:literal;)*
    }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        #[repr($repr)]
        pub enum $name {
            $($(#[doc = $d])* $variant = $code,)*
        }

        impl $name {
            /// The code.
            pub const fn code(self) -> $repr {
                self as $repr
            }

            /// The meaning of a code; `None` for an unknown one.
            pub const fn from_code(code: $repr) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $text,)*
                })
            }
        }
    };
}

codes! {
    /// How a descriptor ended.
    Status: u8 {
        /// Every byte was moved.
        Ok = 0, "done";
        /// Unknown opcode.
        BadOpcode = 1, "unknown opcode";
        /// Unknown flags, or reserved bytes that are not zero.
        BadFlags = 2, "unknown flags";
        /// No bytes, or more than a descriptor may move.
        BadLength = 3, "bad length";
        /// A range that wraps around its address space.
        Wraps = 4, "wrapping range";
        /// No card memory there; the detail is the card address.
        NoCardMemory = 5, "no card memory";
        /// The MMU refused; the detail is the device virtual address.
        MmuFault = 6, "MMU fault";
        /// The IOMMU maps nothing there; the detail is the IOVA.
        HostNotMapped = 7, "host memory not mapped";
        /// The IOMMU does not permit the access; the detail is the IOVA.
        HostNotPermitted = 8, "host memory not permitted";
        /// Another fault of the IOMMU; the detail is the IOVA.
        HostFault = 9, "host memory fault";
        /// The card's memory could not be made present; the detail is the card address.
        OutOfMemory = 10, "card memory not available";
        /// Ended as CANCEL asked; the detail is the number of bytes that were done.
        Cancelled = 11, "cancelled";
        /// An earlier descriptor of the same operation failed.
        Skipped = 12, "skipped";
        /// A comparison found a difference; the detail is its offset.
        Differs = 13, "different";
        /// A shape that is not followed by what it could shape, or of more bytes than a descriptor may move.
        BadShape = 14, "bad shape";
    }
}

codes! {
    /// Why a channel halted.
    Halt: u32 {
        /// A ring size, or the place of a ring, that cannot be.
        BadRing = 1, "bad ring registers";
        /// The doorbell claims more descriptors than the ring holds.
        BadDoorbell = 2, "bad doorbell";
        /// The IOMMU refused a read of the descriptor ring.
        RingFault = 3, "the descriptor ring is not readable";
        /// The IOMMU refused a write to the completion ring.
        CompletionFault = 4, "the completion ring is not writable";
    }
}

/// The end of one descriptor, as the card reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompletionEntry {
    /// The descriptor's cookie.
    pub cookie: u32,
    /// A [`Status`] code, as it was found in memory.
    pub status: u8,
    /// [`CompletionEntry::sequence_of`] the descriptor's number.
    pub sequence: u32,
}

impl CompletionEntry {
    /// Bytes of an entry: a 64-bit detail (see [`Status`]; only written when the status is not Ok), then the word.
    pub const BYTES: usize = 16;

    /// The mark of the descriptor with this number (from 0, modulo 2^32). Slot `number % size` held another mark one
    /// lap before, and zero before the first: so the driver sees an entry arrive and need not clear it afterwards.
    pub const fn sequence_of(number: u32) -> u32 {
        number.wrapping_add(1) & 0xff_ffff
    }

    /// The last word of the entry, which is written last and atomically.
    pub const fn word(&self) -> u64 {
        self.cookie as u64 | (self.status as u64) << 32 | (self.sequence as u64) << 40
    }

    /// Decodes the word.
    pub const fn from_word(word: u64) -> Self {
        Self { cookie: word as u32, status: (word >> 32) as u8, sequence: (word >> 40) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(words: [u64; 4]) -> [u8; 32] {
        std::array::from_fn(|i| words[i / 8].to_le_bytes()[i % 8])
    }

    #[test]
    fn the_bytes_are_those_of_the_format_page() {
        let task = Task::Copy {
            direction: Direction::FromHost,
            card: DeviceAddr::Va(DeviceVa::new(0x1122_3344_5566)),
            host: Iova::new(0xa1a2_a3a4),
            len: 0x1000,
        };
        let descriptor = Descriptor { cookie: 0xc0c1_c2c3, ..Descriptor::from(task) };
        let want: [u8; 32] = [
            1, 1, 0, 0, 0xc3, 0xc2, 0xc1, 0xc0, 0xa4, 0xa3, 0xa2, 0xa1, 0, 0, 0, 0, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
            0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(bytes(descriptor.encode()), want);
        let (card, va) = (DeviceAddr::Card(CardAddr::new(0x22)), DeviceAddr::Va(DeviceVa::new(0x11)));
        let source_va = Task::Within { from: va, to: card, len: 3 };
        for (task, words) in [
            (source_va, [3 | 0x26 << 8 | 9 << 32, 0x11, 0x22, 3]),
            (Task::Fill { pattern: 0x11, card: va, len: 3 }, [4 | 0x25 << 8 | 9 << 32, 0x11, 0x11, 3]),
            (Task::Compare { host: Iova::new(0x33), card, len: 3 }, [5 | 0x24 << 8 | 9 << 32, 0x33, 0x22, 3]),
        ] {
            let descriptor = Descriptor { task, chained: true, cache: CacheHint::Cold, cookie: 9 };
            assert_eq!(descriptor.encode(), words);
            assert_eq!(Descriptor::decode(&bytes(words)), Ok(descriptor));
        }
        let shape = Task::Shape { host_pitch: 1, card_pitch: 2, rows: 3 };
        assert_eq!(Descriptor { chained: true, ..shape.into() }.encode(), [6 | 4 << 8, 1, 2, 3]);
        assert_eq!(Descriptor::from(Task::Fence).encode(), [7, 0, 0, 0]);
        let completion = CompletionEntry { cookie: 0xc0c1_c2c3, status: 7, sequence: 0x01_0203 };
        assert_eq!(completion.word().to_le_bytes(), [0xc3, 0xc2, 0xc1, 0xc0, 7, 3, 2, 1]);
        assert_eq!((CompletionEntry::sequence_of(0), CompletionEntry::sequence_of(0xff_ffff)), (1, 0));
        assert_eq!(CompletionEntry::sequence_of(u32::MAX), 0);
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        let good = [1 | 9 << 32, 0x1000, 0x2000, 4096];
        assert!(Descriptor::decode(&bytes(good)).is_ok());
        for (word, value, status) in [
            (0, 0, Status::BadOpcode),
            (0, 8, Status::BadOpcode),
            (0, 1 | 2 << 8, Status::BadFlags),
            (0, 1 | 8 << 8, Status::BadFlags),
            (0, 1 | 0x30 << 8, Status::BadFlags),
            (0, 6 | 1 << 8, Status::BadFlags),
            (0, 7, Status::BadFlags),
            (0, 1 | 1 << 16, Status::BadFlags),
            (3, 1 | 1 << 32, Status::BadFlags),
            (3, 0, Status::BadLength),
            (3, u64::from(MAX_LEN) + 1, Status::BadLength),
            (1, u64::MAX - 4094, Status::Wraps),
            (2, u64::MAX, Status::Wraps),
        ] {
            let mut words = good;
            words[word] = value;
            assert_eq!(Descriptor::decode(&bytes(words)).unwrap_err().status, status, "word {word} = {value:#x}");
        }
        // A range may end with the last address.
        for word in [1, 2] {
            let mut words = good;
            words[word] = u64::MAX - 4095;
            assert!(Descriptor::decode(&bytes(words)).is_ok(), "word {word}");
        }
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same(mut words: [u64; 4], likely: bool) {
            if likely {
                words[0] = (words[0] & 0xffff_ffff_0000_3700) | (1 + words[0] % 7);
                words[3] &= 0x1fff_ffff;
            }
            if let Ok(d) = Descriptor::decode(&bytes(words)) {
                prop_assert_eq!(d.encode(), words);
            }
        }

        #[test]
        fn plain_copies_decode_as_all_do(
            mut words: [u64; 4],
            opcode in 0u64..4,
            flags in prop::sample::select(vec![0u64, 1, 4, 0x10, 0x14, 0x20, 0x24, 0x30, 0x34, 0x40]),
            reserved in prop::sample::select(vec![0u64, 0, 0, 1 << 16]),
            len in prop::sample::select(vec![0, 1, 4096, u64::from(MAX_LEN), u64::from(MAX_LEN) + 1, 1 << 32 | 1]),
            high: bool,
        ) {
            words[0] = words[0] & !0xffff_ffff | reserved | flags << 8 | opcode;
            words[3] = len;
            if high {
                words[1] |= !0xfff;
            }
            let all = match Descriptor::decode(&bytes(words)) {
                Ok(Descriptor {
                    task: Task::Copy { direction, host, card: DeviceAddr::Card(card), len },
                    chained,
                    cache,
                    cookie,
                }) => Some(PlainCopy { direction, host, card, len, chained, cache, cookie }),
                _ => None,
            };
            prop_assert_eq!(PlainCopy::decode(&bytes(words)), all);
        }

        #[test]
        fn completions_survive_their_word(word: u64) {
            prop_assert_eq!(CompletionEntry::from_word(word).word(), word);
        }
    }
}
