//! Numbers and layouts of the driver's interface, as words of 32 bits.
//!
//! Source: SLASH, branch `dev`, `driver/libslash/include/slash/uapi/slash_interface.h`. Every argument begins with its
//! length in bytes, which the driver uses to serve callers with older and newer structures.

/// Words of an argument of INFO: more than any known version has, so that the driver's own length comes back.
pub const INFO_WORDS: usize = 32;
/// Lengths of the structure of INFO: without and, since July 2026, with the PCI address.
pub const INFO_SIZES: [u32; 2] = [20, 52];
/// Words before the PCI address in INFO, and words of that.
pub const INFO_BDF: (usize, usize) = (5, 8);

/// Words of QPAIR_ADD.
pub const ADD_WORDS: usize = 9;
/// The word in which QPAIR_ADD returns the queue pair's number.
pub const ADD_QID: usize = 7;
/// Memory-mapped mode.
pub const MODE_MM: u32 = 0;
/// Both directions: H2C and C2H.
pub const DIR_BOTH: u32 = 0b11;
/// Ring sizes are indices below this.
pub const RING_SIZES: u32 = 16;

/// Words of Q_OP.
pub const OP_WORDS: usize = 3;

/// Words of GET_FD.
pub const FD_WORDS: usize = 6;
/// The one flag of calls that return a file: close it on exec (O_CLOEXEC).
pub const CLOEXEC: u32 = 0o2_000_000;

/// Words of BUF_CREATE.
pub const BUF_WORDS: usize = 6;
/// The words in which BUF_CREATE returns the granule and the hint.
pub const BUF_GRANULE: usize = 4;
/// The hint that the two channels should share the work as it is usual for a V80.
pub const HINT_V80: u32 = 2;
/// The hint that one queue pair should do all the work.
pub const HINT_SINGLE: u32 = 1;

/// Words of TRANSFER: length, count and the ranges.
pub const TRANSFER_WORDS: usize = 2 + MAX_RANGES * RANGE_WORDS;
/// Words of a range of a transfer.
pub const RANGE_WORDS: usize = 10;
/// Parts of a transfer at most, which is also the number of queue pairs behind one file.
pub const MAX_RANGES: usize = 2;

/// An operation on a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairOp {
    Start = 0,
    Stop = 1,
    Delete = 2,
}

/// The direction of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DmaDirection {
    HostToCard = 1,
    CardToHost = 2,
}

/// A range of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferRange {
    /// Which of the file's queue pairs.
    pub pair: u32,
    pub direction: DmaDirection,
    /// The buffer's file.
    pub buffer: i32,
    /// A multiple of the granule.
    pub offset: u64,
    /// The card's address.
    pub at: u64,
    pub len: u64,
}

impl TransferRange {
    /// The words of a range.
    fn words(&self) -> [u32; RANGE_WORDS] {
        let [offset, at, len] = [self.offset, self.at, self.len].map(halves);
        let buffer = u32::from_ne_bytes(self.buffer.to_ne_bytes());
        [self.pair, self.direction as u32, buffer, 0, offset[0], offset[1], at[0], at[1], len[0], len[1]]
    }
}

/// The argument of a transfer of these ranges, two at most.
pub fn transfer(ranges: &[TransferRange]) -> [u32; TRANSFER_WORDS] {
    let mut words = [0; TRANSFER_WORDS];
    words[..2].copy_from_slice(&[TRANSFER_WORDS as u32 * 4, ranges.len() as u32]);
    for (place, range) in words[2..].chunks_exact_mut(RANGE_WORDS).zip(ranges) {
        place.copy_from_slice(&range.words());
    }
    words
}

/// The two words of a 64-bit field.
pub fn halves(value: u64) -> [u32; 2] {
    let (low, high) = (value as u32, (value >> 32) as u32);
    if cfg!(target_endian = "little") { [low, high] } else { [high, low] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_drivers_layout() {
        let range = TransferRange {
            pair: 1,
            direction: DmaDirection::CardToHost,
            buffer: -1,
            offset: 4096,
            at: 0x600_0000_0000,
            len: 5,
        };
        let words = range.words();
        assert_eq!(words[..4], [1, 2, u32::MAX, 0]);
        assert_eq!((words[4..6].to_vec(), words[8..].to_vec()), (halves(4096).to_vec(), halves(5).to_vec()));
        assert_eq!(words[6..8], halves(0x600_0000_0000));
        assert_eq!((TRANSFER_WORDS * 4, RANGE_WORDS * 4), (88, 40));
    }
}
