//! Access to memory that a device, another process or another thread may change at any time.
//!
//! No Rust reference into such memory is ever created, and no Rust load, store or atomic touches it: every access is
//! made by the instructions of [`processor`](crate::processor). Words of different sizes may therefore be read and
//! written at one place, and bytes may be copied while others write them. An aligned word is read and written whole; a
//! copy that races may be torn.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use crate::processor::{self, CopyHint};

/// Makes everything that this thread copied with [`CopyHint::StreamUnordered`] visible before what it stores from now
/// on.
#[inline]
pub fn stream_fence() {
    processor::stream_fence();
}

/// Splits an access to `len` bytes of a device's memory at `at` into the widest aligned words of 8, 4, 2 and 1 bytes,
/// in order, as ranges of the access. Many devices answer a register only in one access of its width.
fn aligned_words(at: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let start = next;
        let fits = |width: &usize| start + width <= len && at.wrapping_add(start).is_multiple_of(*width);
        next += [8, 4, 2, 1].into_iter().find(fits)?;
        Some(start..next)
    })
}

/// A range of shared memory: bounds-checked and copyable, accessed without references.
#[derive(Clone, Copy)]
pub struct VolatileSlice<'a> {
    ptr: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a ()>,
}

// SAFETY: a view is a pointer to memory that outlives `'a` (contract of `from_raw`); every access goes through
// `processor`, whose loads, stores and copies are made for memory that others change.
unsafe impl Send for VolatileSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for VolatileSlice<'_> {}

impl<'a> VolatileSlice<'a> {
    /// A view of memory that is not this crate's: a driver's, say.
    ///
    /// # Safety
    /// `ptr..ptr + len` stays mapped, readable and writable for `'a`, and no Rust reference into it is used during
    /// `'a`.
    #[inline]
    pub unsafe fn from_raw(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, memory: PhantomData }
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a view of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address as the kernel needs it in a system call that fills or reads the memory. Not to be dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The sub-range of `len` bytes at `offset`; `None` unless it lies within.
    #[inline]
    pub fn sub(&self, offset: usize, len: usize) -> Option<VolatileSlice<'a>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset <= self.len` was just checked, so the result stays within the mapping.
        let ptr = unsafe { self.ptr.add(offset) };
        Some(VolatileSlice { ptr, len, memory: PhantomData })
    }

    /// Copies from `source` to the front of this view. Overlapping views give unspecified bytes.
    ///
    /// # Panics
    /// When `source` is longer than this view.
    #[inline]
    pub fn copy_from(&self, source: VolatileSlice<'_>, hint: CopyHint) {
        assert!(source.len <= self.len, "a copy of {} bytes into {}", source.len, self.len);
        // SAFETY: both ranges are mapped (contract of `from_raw`) and `source.len` fits both (assertion above).
        unsafe { processor::copy(self.ptr.as_ptr(), source.ptr.as_ptr(), source.len, hint) }
    }

    /// Copies out, from the front.
    ///
    /// # Panics
    /// When `into` is longer than this view.
    #[inline]
    pub fn read(&self, into: &mut [u8]) {
        assert!(into.len() <= self.len, "a read of {} bytes from {}", into.len(), self.len);
        // SAFETY: the source is mapped and long enough (assertion above), the destination is a live `&mut`.
        unsafe { processor::copy(into.as_mut_ptr(), self.ptr.as_ptr(), into.len(), CopyHint::Keep) }
    }

    /// Copies in, at the front.
    ///
    /// # Panics
    /// When `from` is longer than this view.
    pub fn write(&self, from: &[u8]) {
        assert!(from.len() <= self.len, "a write of {} bytes into {}", from.len(), self.len);
        // SAFETY: the destination is mapped and long enough (assertion above), the source is a live `&`.
        unsafe { processor::copy(self.ptr.as_ptr(), from.as_ptr(), from.len(), CopyHint::Keep) }
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        self.fill_pattern(u64::from_ne_bytes([byte; 8]), CopyHint::Keep);
    }

    /// The range in pieces of `bytes`, the last one perhaps shorter.
    fn pieces(&self, bytes: usize) -> impl Iterator<Item = VolatileSlice<'a>> {
        (0..self.len).step_by(bytes).map_while(move |at| self.sub(at, bytes.min(self.len - at)))
    }

    /// Hands the bytes to `f` in blocks, through a small buffer that stays in the cache.
    pub fn for_each_block(&self, mut f: impl FnMut(&[u8])) {
        let mut block = [0u8; 16384];
        for piece in self.pieces(block.len()) {
            let bytes = &mut block[..piece.len];
            piece.read(bytes);
            f(bytes);
        }
    }

    /// The offset of the first byte that differs, over the length of the shorter range; `None` when they are equal.
    /// Bytes that change meanwhile may count as either.
    pub fn first_difference(&self, other: VolatileSlice<'_>) -> Option<usize> {
        let (mut mine, mut theirs) = ([0u8; 4096], [0u8; 4096]);
        let (len, block) = (self.len.min(other.len), mine.len());
        for (i, (a, b)) in self.sub(0, len)?.pieces(block).zip(other.sub(0, len)?.pieces(block)).enumerate() {
            a.read(&mut mine[..a.len]);
            b.read(&mut theirs[..b.len]);
            if mine[..a.len] != theirs[..a.len] {
                return mine.iter().zip(&theirs).position(|(a, b)| a != b).map(|at| i * block + at);
            }
        }
        None
    }

    /// Fills the range with the repeated little-endian bytes of `pattern`. [`CopyHint::Stream`] bypasses the cache.
    pub fn fill_pattern(&self, pattern: u64, hint: CopyHint) {
        let block = [pattern.to_le_bytes(); 1024];
        for piece in self.pieces(size_of_val(&block)) {
            // SAFETY: the piece is mapped (contract of `from_raw`), and no longer than the block.
            unsafe { processor::copy(piece.ptr.as_ptr(), block.as_ptr().cast(), piece.len, hint) };
        }
    }

    /// Reads an aligned 32-bit word; what was written before the matching [`VolatileSlice::store_u32`] is visible.
    /// `None` when it does not lie within, or is not aligned.
    pub fn load_u32(&self, offset: usize) -> Option<u32> {
        let at = self.word(offset)?;
        // SAFETY: within the mapping and aligned (`word`).
        Some(unsafe { processor::load_u32(at) })
    }

    /// Writes an aligned 32-bit word, after everything that this thread wrote before. `None` as for
    /// [`VolatileSlice::load_u32`].
    #[must_use = "None says that nothing was written"]
    pub fn store_u32(&self, offset: usize, value: u32) -> Option<()> {
        let at = self.word(offset)?;
        // SAFETY: within the mapping and aligned (`word`).
        unsafe { processor::store_u32(at, value) };
        Some(())
    }

    /// Reads an aligned 64-bit word, as [`VolatileSlice::load_u32`].
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Option<u64> {
        let at = self.word(offset)?;
        // SAFETY: within the mapping and aligned (`word`).
        Some(unsafe { processor::load_u64(at) })
    }

    /// Writes an aligned 64-bit word, as [`VolatileSlice::store_u32`].
    #[inline]
    #[must_use = "None says that nothing was written"]
    pub fn store_u64(&self, offset: usize, value: u64) -> Option<()> {
        let at = self.word(offset)?;
        // SAFETY: within the mapping and aligned (`word`).
        unsafe { processor::store_u64(at, value) };
        Some(())
    }

    /// Reads bytes from `offset` on, aligned words of 16, 32 and 64 bits in one access each, since the other side may
    /// write them at any time. `None` for bytes that do not lie within.
    pub fn read_words(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        self.sub(offset, into.len())?;
        for word in aligned_words(self.ptr.addr().get().wrapping_add(offset), into.len()) {
            let (at, into) = (offset + word.start, &mut into[word]);
            match into.len() {
                8 => into.copy_from_slice(&self.load_u64(at)?.to_le_bytes()),
                4 => into.copy_from_slice(&self.load_u32(at)?.to_le_bytes()),
                // SAFETY: within the mapping and aligned (`word`).
                2 => into.copy_from_slice(&unsafe { processor::load_u16(self.word(at)?) }.to_le_bytes()),
                len => self.sub(at, len)?.read(into),
            }
        }
        Some(())
    }

    /// Writes bytes from `offset` on, as [`VolatileSlice::read_words`] reads them.
    #[must_use = "None says that nothing was written"]
    pub fn write_words(&self, offset: usize, from: &[u8]) -> Option<()> {
        self.sub(offset, from.len())?;
        for word in aligned_words(self.ptr.addr().get().wrapping_add(offset), from.len()) {
            let at = offset + word.start;
            match from[word] {
                [a, b, c, d, e, f, g, h] => self.store_u64(at, u64::from_le_bytes([a, b, c, d, e, f, g, h]))?,
                [a, b, c, d] => self.store_u32(at, u32::from_le_bytes([a, b, c, d]))?,
                // SAFETY: within the mapping and aligned (`word`).
                [a, b] => unsafe { processor::store_u16(self.word(at)?, u16::from_le_bytes([a, b])) },
                ref bytes => self.sub(at, bytes.len())?.write(bytes),
            }
        }
        Some(())
    }

    /// Replaces an aligned 32-bit word and returns the old one, in one total order with all other swaps: when two sides
    /// each swap their own word and then read the other's, at least one sees the other's write. `None` as for
    /// [`VolatileSlice::load_u32`].
    #[must_use = "None says that nothing was written"]
    pub fn swap_u32(&self, offset: usize, value: u32) -> Option<u32> {
        let at = self.word(offset)?;
        // SAFETY: within the mapping and aligned (`word`).
        Some(unsafe { processor::swap_u32(at, value) })
    }

    /// Faults the page of `offset` in for writing without changing it. Out of range does nothing.
    pub(crate) fn touch(&self, offset: usize) {
        if let Some(at) = self.word(offset & !3) {
            // SAFETY: within the mapping and aligned (`word`).
            unsafe { processor::touch_u32(at) };
        }
    }

    /// Where the word at `offset` lies; `None` unless all of it is in the range and it is aligned.
    #[inline]
    fn word<T>(&self, offset: usize) -> Option<*mut T> {
        let at = self.sub(offset, size_of::<T>())?.ptr.cast();
        at.is_aligned().then_some(at.as_ptr())
    }
}

debug_as!(VolatileSlice<'_>, |it| "VolatileSlice({} bytes)", it.len);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnonHeap, Heap};
    use proptest::prelude::*;

    #[test]
    fn words_are_as_wide_as_alignment_and_length_allow() {
        let widths = |at, len| aligned_words(at, len).map(|word| word.len()).collect::<Vec<_>>();
        for (at, len, wanted) in [
            (0, 0, &[][..]),
            (0, 1, &[1]),
            (0, 2, &[2]),
            (2, 4, &[2, 2]),
            (4, 4, &[4]),
            (4, 8, &[4, 4]),
            (8, 8, &[8]),
            (1, 15, &[1, 2, 4, 8]),
            (0, 15, &[8, 4, 2, 1]),
            (4, 16, &[4, 8, 4]),
        ] {
            assert_eq!(widths(at, len), wanted, "{len} bytes at {at}");
        }
        for (at, len) in (0..32).flat_map(|at| (0..40).map(move |len| (at, len))) {
            let mut end = 0;
            for word in aligned_words(at, len) {
                let (start, width) = (at + word.start, word.len());
                assert!(word.start == end && start.is_multiple_of(width));
                assert!(width == 8 || !start.is_multiple_of(2 * width) || word.start + 2 * width > len);
                end = word.end;
            }
            assert_eq!(end, len);
        }
    }

    /// Bytes come out as they went in, wherever they begin, also of a view that begins anywhere.
    #[test]
    fn words_are_read_and_written_anywhere() {
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        let bytes: Vec<u8> = (1..40).collect();
        for (view, offset, len) in (0..9).flat_map(|v| (0..9).flat_map(move |o| (0..40).map(move |len| (v, o, len)))) {
            let view = slice.as_volatile_slice().sub(view, 64).unwrap();
            view.fill(0);
            view.write_words(offset, &bytes[..len]).unwrap();
            let mut back = [0xff; 64];
            view.read_words(0, &mut back).unwrap();
            assert_eq!(back[offset..][..len], bytes[..len]);
            assert!(back[..offset].iter().chain(&back[offset + len..]).all(|byte| *byte == 0));
        }
        let view = slice.as_volatile_slice();
        assert_eq!((view.read_words(4090, &mut [0; 7]), view.write_words(usize::MAX, &[0; 2])), (None, None));
    }

    /// Two threads write a word of each width, all of its bits equal: nobody reads a part of one.
    #[test]
    fn a_word_is_never_read_in_part() {
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        let view = slice.as_volatile_slice();
        for width in [2, 4, 8] {
            view.fill(0);
            std::thread::scope(|scope| {
                let writer =
                    |byte: u8| move || (0..100_000).for_each(|_| view.write_words(8, &[byte; 8][..width]).unwrap());
                let writers = [scope.spawn(writer(0)), scope.spawn(writer(0xff))];
                while !writers.iter().all(|writer| writer.is_finished()) {
                    let mut word = [0; 8];
                    view.read_words(8, &mut word[..width]).unwrap();
                    assert!(word[..width].iter().all(|byte| *byte == word[0]), "{word:?}");
                }
            });
        }
    }

    #[test]
    fn refuses_access_out_of_range() {
        let buf = AnonHeap::new().allocate(4096).unwrap().share();
        let slice = buf.into_slice();
        let view = slice.as_volatile_slice();
        assert!(view.sub(4096, 0).is_some() && view.sub(4096, 1).is_none() && view.sub(usize::MAX, 2).is_none());
        assert_eq!(format!("{view:?}"), "VolatileSlice(4096 bytes)");
        assert_eq!(view.load_u64(4), None, "unaligned");
        assert_eq!(view.load_u64(4092), None, "beyond the end");
        assert_eq!(view.store_u32(4096, 1), None);
        assert_eq!((view.swap_u32(4096, 1), view.swap_u32(2, 1)), (None, None));
        assert_eq!((view.swap_u32(4, 1), view.swap_u32(4, 2), view.load_u32(4)), (Some(0), Some(1), Some(2)));
        view.store_u64(8, 0x1122_3344_5566_7788).unwrap();
        assert_eq!(view.load_u32(8), Some(0x5566_7788));
    }

    #[test]
    #[should_panic(expected = "a copy of 10 bytes into 9")]
    fn refuses_a_copy_that_does_not_fit() {
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        let view = slice.as_volatile_slice();
        view.sub(0, 9).unwrap().copy_from(view.sub(100, 10).unwrap(), CopyHint::Keep);
    }

    #[test]
    #[should_panic(expected = "a read of")]
    fn refuses_a_read_that_does_not_fit() {
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        slice.as_volatile_slice().sub(0, 9).unwrap().read(&mut [0; 10]);
    }

    #[test]
    #[should_panic(expected = "a write of")]
    fn refuses_a_write_that_does_not_fit() {
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        slice.as_volatile_slice().sub(0, 9).unwrap().write(&[0; 10]);
    }

    #[test]
    fn a_word_is_written_whole_and_read_in_either_size() {
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        let view = slice.as_volatile_slice();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..200_000u64 {
                    view.store_u64(64, i | i << 32).unwrap();
                }
            });
            let (mut low, mut high) = (0, 0);
            while low < 199_999 || high < 199_999 {
                let word = view.load_u64(64).unwrap();
                assert_eq!(word as u32, (word >> 32) as u32, "torn: {word:#x}");
                let halves = (view.load_u32(64).unwrap(), view.load_u32(68).unwrap());
                assert!(low <= halves.0 && high <= halves.1, "an older value came after a newer one");
                (low, high) = halves;
            }
        });
        view.store_u32(68, 7).unwrap();
        assert_eq!(view.load_u64(64), Some(199_999 | 7 << 32), "the other half stays");
        view.touch(64);
        assert_eq!(view.load_u64(64), Some(199_999 | 7 << 32), "a touch changes nothing");
    }

    #[test]
    fn of_two_that_swap_and_then_look_one_sees_the_other() {
        const ROUNDS: u32 = 20_000;
        let slice = AnonHeap::new().allocate(4096).unwrap().share().into_slice();
        let view = slice.as_volatile_slice();
        let together = std::sync::Barrier::new(2);
        let side = |mine: usize, theirs: usize| {
            let mut saw = Vec::new();
            for round in 1..=ROUNDS {
                if round % 64 == 1 {
                    together.wait();
                }
                view.swap_u32(mine, round).unwrap();
                saw.push(view.load_u32(theirs).unwrap());
            }
            saw
        };
        let (a, b) = std::thread::scope(|scope| {
            let other = scope.spawn(|| side(128, 0));
            (side(0, 128), other.join().unwrap())
        });
        for round in 1..=ROUNDS {
            let seen = (a[round as usize - 1], b[round as usize - 1]);
            assert!(seen.0 >= round || seen.1 >= round, "round {round}: each missed the other: {seen:?}");
        }
    }

    #[test]
    fn a_message_is_complete_once_its_flag_is_seen() {
        let slice = AnonHeap::new().allocate(8192).unwrap().share().into_slice();
        let view = slice.as_volatile_slice();
        let line = |round: u32| (round as usize % 32) * 128;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=20_000u32 {
                    let message = [round as u8; 100];
                    view.sub(4096 + line(round), 100).unwrap().write(&message);
                    view.store_u32(0, round).unwrap();
                    while view.load_u32(64).unwrap() + 16 < round {
                        std::hint::spin_loop();
                    }
                }
            });
            let mut next = 1;
            while next <= 20_000u32 {
                if view.load_u32(0).unwrap() < next {
                    std::hint::spin_loop();
                    continue;
                }
                let mut message = [0; 100];
                view.sub(4096 + line(next), 100).unwrap().read(&mut message);
                assert_eq!(message, [next as u8; 100]);
                view.store_u32(64, next).unwrap();
                next += 1;
            }
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn copies_agree_with_slices(
            from in 0usize..300, to in 0usize..300, len in 0usize..20_000, seed: u8,
            hint in prop::sample::select(vec![CopyHint::Keep, CopyHint::Stream, CopyHint::StreamUnordered]),
        ) {
            let heap = AnonHeap::new();
            let (mut a, b) = (heap.allocate(1 << 15).unwrap(), heap.allocate(1 << 15).unwrap());
            for (i, x) in a.iter_mut().enumerate() {
                *x = (i as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((i >> 8) as u8);
            }
            let mut want = vec![0u8; b.len()];
            want[to..to + len].copy_from_slice(&a[from..from + len]);
            let (a, b) = (a.share().into_slice(), b.share().into_slice());
            b.as_volatile_slice().sub(to, len).unwrap().copy_from(a.as_volatile_slice().sub(from, len).unwrap(), hint);
            let mut got = vec![0u8; want.len()];
            b.as_volatile_slice().read(&mut got);
            prop_assert!(got == want);
            let mut blocks = Vec::new();
            b.as_volatile_slice().for_each_block(|block| blocks.extend_from_slice(block));
            prop_assert!(blocks == want);
            b.as_volatile_slice().sub(to, len).unwrap().fill(7);
            want[to..to + len].fill(7);
            b.as_volatile_slice().read(&mut got);
            prop_assert!(got == want);
            let pattern = u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, seed]);
            b.as_volatile_slice().sub(to, len).unwrap().fill_pattern(pattern, hint);
            for (byte, with) in want[to..to + len].iter_mut().zip(pattern.to_le_bytes().into_iter().cycle()) {
                *byte = with;
            }
            b.as_volatile_slice().read(&mut got);
            prop_assert!(got == want);
            a.as_volatile_slice().copy_from(b.as_volatile_slice(), CopyHint::Keep);
            prop_assert_eq!(a.as_volatile_slice().first_difference(b.as_volatile_slice()), None);
            if let Some(byte) = a.as_volatile_slice().sub(to + len / 2, 1).filter(|_| len > 0) {
                byte.fill(want[to + len / 2] ^ 0x40);
                prop_assert_eq!(a.as_volatile_slice().first_difference(b.as_volatile_slice()), Some(to + len / 2));
            }
        }
    }
}
