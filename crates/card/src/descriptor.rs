//! Descriptors, completions, and their bytes.

use dmalane_addr::{Address, CardAddr, DeviceVa, Iova};
use dmalane_engine::{DeviceAddr, Direction};

use crate::regs::MAX_LEN;

const H2C: u8 = 1;
const C2H: u8 = 2;
/// Flag: the card side is a device virtual address.
const VIRTUAL: u8 = 1;

/// One copy, as the host asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Which way.
    pub direction: Direction,
    /// Where in card memory.
    pub card: DeviceAddr,
    /// Where in host memory.
    pub host: Iova,
    /// Bytes: 1 to [`MAX_LEN`].
    pub len: u32,
    /// Comes back in the completion.
    pub cookie: u32,
}

/// A descriptor that makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed {
    /// The cookie that it carries, whatever else is wrong.
    pub cookie: u32,
    /// What is wrong.
    pub status: Status,
}

impl Descriptor {
    /// Bytes of a descriptor.
    pub const BYTES: usize = 32;

    /// The descriptor as four little-endian words, in order.
    pub fn encode(&self) -> [u64; 4] {
        let opcode = match self.direction {
            Direction::FromHost => H2C,
            Direction::ToHost => C2H,
        };
        let (card, flags) = match self.card {
            DeviceAddr::Card(a) => (a.bits(), 0),
            DeviceAddr::Va(a) => (a.bits(), VIRTUAL),
        };
        let head = u64::from(opcode) | u64::from(flags) << 8 | u64::from(self.cookie) << 32;
        [head, self.host.bits(), card, u64::from(self.len)]
    }

    /// What the bytes mean. They come from memory that anybody may have written: everything about them is checked, and
    /// neither address range of the result wraps.
    ///
    /// # Errors
    /// [`Malformed`] names the first thing that is wrong.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| bytes[8 * i + b]));
        let (head, host, card, tail) = (word(0), Iova::new(word(1)), word(2), word(3));
        let cookie = (head >> 32) as u32;
        let refuse = |status| Err(Malformed { cookie, status });
        let direction = match head as u8 {
            H2C => Direction::FromHost,
            C2H => Direction::ToHost,
            _ => return refuse(Status::BadOpcode),
        };
        let flags = (head >> 8) as u8;
        let reserved = (head >> 16) as u16 != 0 || tail >> 32 != 0;
        if flags & !VIRTUAL != 0 || reserved {
            return refuse(Status::BadFlags);
        }
        let len = tail as u32;
        if len == 0 || len > MAX_LEN {
            return refuse(Status::BadLength);
        }
        let last = u64::from(len) - 1;
        if host.checked_add(last).is_none() || card.checked_add(last).is_none() {
            return refuse(Status::Wraps);
        }
        let card = match flags & VIRTUAL {
            0 => DeviceAddr::Card(CardAddr::new(card)),
            _ => DeviceAddr::Va(DeviceVa::new(card)),
        };
        Ok(Self { direction, card, host, len, cookie })
    }
}

macro_rules! codes {
    ($(#[doc = $doc:literal])* $name:ident: $repr:ty { $($(#[doc = $d:literal])* $variant:ident = $code:literal, $text:literal;)* }) => {
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

            /// What the code stands for, if anything.
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
pub struct Completion {
    /// The descriptor's cookie.
    pub cookie: u32,
    /// A [`Status`] code, as it was found in memory.
    pub status: u8,
    /// [`Completion::sequence_of`] the descriptor's number.
    pub sequence: u32,
}

impl Completion {
    /// Bytes of an entry: a 64-bit detail (see [`Status`]; only written when the status is not Ok), then the word.
    pub const BYTES: usize = 16;

    /// The mark of the descriptor with this number (from 0, modulo 2^32). Slot `number % size` held another mark one
    /// lap before, and zero before the first: so the driver sees an entry arrive and need not clear it afterwards.
    pub const fn sequence_of(number: u32) -> u32 {
        number.wrapping_add(1) & 0xff_ffff
    }

    /// The last word of the entry, which is written last and in one piece.
    pub const fn word(&self) -> u64 {
        self.cookie as u64 | (self.status as u64) << 32 | (self.sequence as u64) << 40
    }

    /// What the word says.
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
        let descriptor = Descriptor {
            direction: Direction::FromHost,
            card: DeviceAddr::Va(DeviceVa::new(0x1122_3344_5566)),
            host: Iova::new(0xa1a2_a3a4),
            len: 0x1000,
            cookie: 0xc0c1_c2c3,
        };
        let want: [u8; 32] = [
            1, 1, 0, 0, 0xc3, 0xc2, 0xc1, 0xc0, 0xa4, 0xa3, 0xa2, 0xa1, 0, 0, 0, 0, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
            0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(bytes(descriptor.encode()), want);
        let completion = Completion { cookie: 0xc0c1_c2c3, status: 7, sequence: 0x01_0203 };
        assert_eq!(completion.word().to_le_bytes(), [0xc3, 0xc2, 0xc1, 0xc0, 7, 3, 2, 1]);
        assert_eq!((Completion::sequence_of(0), Completion::sequence_of(0xff_ffff)), (1, 0));
        assert_eq!(Completion::sequence_of(u32::MAX), 0);
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        let good = [1 | 9 << 32, 0x1000, 0x2000, 4096];
        assert!(Descriptor::decode(&bytes(good)).is_ok());
        for (word, value, status) in [
            (0, 0, Status::BadOpcode),
            (0, 3, Status::BadOpcode),
            (0, 1 | 2 << 8, Status::BadFlags),
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
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same(mut words: [u64; 4], likely: bool) {
            if likely {
                words[0] = (words[0] & 0xffff_ffff_0000_0100) | (1 + (words[0] & 1));
                words[3] &= 0x1fff_ffff;
            }
            if let Ok(d) = Descriptor::decode(&bytes(words)) {
                prop_assert_eq!(d.encode(), words);
            }
        }

        #[test]
        fn completions_survive_their_word(word: u64) {
            prop_assert_eq!(Completion::from_word(word).word(), word);
        }
    }
}
