//! Where an operation is cut into kernel reads.
//!
//! ```text
//! file    ...|....|....|....|....|....|...      | every `offset` bytes
//! op            ======================
//! reads         --DDDDDDDDDDDDDDDDDDD--         D direct, - buffered
//! ```

/// Alignment that the file system demands of direct I/O. Both are powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Align {
    /// Memory addresses are multiples of this.
    pub memory: usize,
    /// File offsets and lengths are multiples of this.
    pub offset: usize,
}

impl Align {
    /// Bytes to the first place where both the memory address and the file offset are aligned; `None` when there is no
    /// such place.
    fn head(self, addr: usize, at: u64) -> Option<usize> {
        let mismatch = (addr as u64 ^ at) & (self.memory.min(self.offset) as u64 - 1);
        if mismatch != 0 {
            return None;
        }
        // Where the coarser one of the two is aligned, the finer one is as well, since they agree.
        Some(if self.offset >= self.memory {
            (at.wrapping_neg() & (self.offset as u64 - 1)) as usize
        } else {
            addr.wrapping_neg() & (self.memory - 1)
        })
    }

    /// True when both are aligned here.
    pub fn allows(self, addr: usize, at: u64, len: usize) -> bool {
        addr.is_multiple_of(self.memory) && at.is_multiple_of(self.offset as u64) && len.is_multiple_of(self.offset)
    }
}

/// The length of the first kernel read of an operation of `len` > 0 bytes at `at` into memory at `addr`, and whether it
/// may be direct. `block` is a multiple of both alignments.
pub(crate) fn first(addr: usize, at: u64, len: usize, block: usize, align: Option<Align>) -> (usize, bool) {
    let most = len.min(block);
    let Some((align, head)) = align.and_then(|a| Some((a, a.head(addr, at)?))) else {
        return (most, false);
    };
    if head > 0 {
        return (head.min(most), false);
    }
    match most & !(align.offset - 1) {
        0 => (most, false),
        middle => (middle, true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(mut addr: usize, mut at: u64, mut len: usize, block: usize, align: Option<Align>) -> Vec<(usize, bool)> {
        let mut cuts = Vec::new();
        while len > 0 {
            let (n, direct) = first(addr, at, len, block, align);
            cuts.push((n, direct));
            (addr, at, len) = (addr + n, at + n as u64, len - n);
        }
        cuts
    }

    #[test]
    fn head_and_tail_are_buffered() {
        let align = Some(Align { memory: 512, offset: 4096 });
        let cuts = all(0x10200, 0x200, 0x6100, 1 << 16, align);
        assert_eq!(cuts, [(0xe00, false), (0x5000, true), (0x300, false)]);
        assert_eq!(all(0x10200, 0x201, 0x6100, 1 << 16, align), [(0x6100, false)], "never aligned together");
        assert_eq!(all(0x10200, 0x200, 0x100, 1 << 16, align), [(0x100, false)], "ends within its head");
        assert_eq!(all(0, 0, 0x30000, 1 << 16, align), [(0x10000, true); 3]);
    }

    proptest! {
        #[test]
        fn cuts_add_up_and_keep_the_rules(
            addr in 0usize..1 << 20, at in 0u64..1 << 20, len in 1usize..1 << 20,
            memory in 0u32..=12, offset in 9u32..=16,
            congruent: bool,
        ) {
            let align = Align { memory: 1 << memory, offset: 1 << offset };
            let at = if congruent { (at & !0xffff) | (addr as u64 & 0xffff) } else { at };
            let (mut pos, mut buffered) = (0, 0);
            for (n, direct) in all(addr, at, len, 1 << 16, Some(align)) {
                prop_assert!(n > 0 && n <= 1 << 16);
                prop_assert!(!direct || align.allows(addr + pos, at + pos as u64, n));
                buffered += if direct { 0 } else { n };
                pos += n;
            }
            prop_assert_eq!(pos, len);
            if congruent {
                prop_assert!(buffered < 2 << memory.max(offset), "{} bytes were not read directly", buffered);
            }
        }
    }
}
