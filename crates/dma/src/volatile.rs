//! Access to memory that a device or another thread may change at any time.
//!
//! No reference into such memory is ever created. Single words are accessed with atomics. Bulk copies on x86-64 are
//! inline assembly, which the compiler treats as an external agent like the device itself: a race yields torn data but
//! no undefined behaviour. On other processors bulk copies are `ptr::copy`, which works in practice but is formally a
//! data race.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Whether a copy should leave the bytes in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CopyHint {
    /// The destination will be used soon: ordinary stores.
    #[default]
    Keep,
    /// The destination will not be used soon: stores that bypass the cache, where the processor has them.
    Stream,
    /// As [`CopyHint::Stream`], but what this thread stores next may become visible to others before these bytes do,
    /// until it calls [`stream_fence`]: for many copies that are published together.
    StreamUnordered,
}

/// Makes everything that this thread copied with [`CopyHint::StreamUnordered`] visible before what it stores from now
/// on.
pub fn stream_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence touches no memory; SSE is part of x86-64.
    unsafe {
        std::arch::asm!("sfence", options(nostack, preserves_flags));
    }
}

/// A range of shared memory: bounds-checked and copyable, accessed without references.
#[derive(Clone, Copy)]
pub struct VolatileSlice<'a> {
    ptr: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a ()>,
}

// SAFETY: a view is a pointer to memory that outlives `'a` (contract of `from_raw`); every access goes through atomics
// or copies that are made for memory that others change.
unsafe impl Send for VolatileSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for VolatileSlice<'_> {}

impl<'a> VolatileSlice<'a> {
    /// # Safety
    /// `ptr..ptr + len` stays mapped, readable and writable for `'a`, and no Rust reference into it is used during
    /// `'a`.
    #[inline]
    pub(crate) unsafe fn from_raw(ptr: NonNull<u8>, len: usize) -> Self {
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
        unsafe { copy(self.ptr.as_ptr(), source.ptr.as_ptr(), source.len, hint) }
    }

    /// Copies out, from the front.
    ///
    /// # Panics
    /// When `into` is longer than this view.
    #[inline]
    pub fn read(&self, into: &mut [u8]) {
        assert!(into.len() <= self.len, "a read of {} bytes from {}", into.len(), self.len);
        // SAFETY: the source is mapped and long enough (assertion above), the destination is a live `&mut`.
        unsafe { copy(into.as_mut_ptr(), self.ptr.as_ptr(), into.len(), CopyHint::Keep) }
    }

    /// Copies in, at the front.
    ///
    /// # Panics
    /// When `from` is longer than this view.
    pub fn write(&self, from: &[u8]) {
        assert!(from.len() <= self.len, "a write of {} bytes into {}", from.len(), self.len);
        // SAFETY: the destination is mapped and long enough (assertion above), the source is a live `&`.
        unsafe { copy(self.ptr.as_ptr(), from.as_ptr(), from.len(), CopyHint::Keep) }
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        let block = [byte; 4096];
        let mut at = 0;
        while at < self.len {
            let n = block.len().min(self.len - at);
            // SAFETY: `at + n <= self.len` by the line above.
            unsafe { copy(self.ptr.as_ptr().add(at), block.as_ptr(), n, CopyHint::Keep) };
            at += n;
        }
    }

    /// Hands the bytes to `f` in blocks, through a small buffer that stays in the cache.
    pub fn for_each_block(&self, mut f: impl FnMut(&[u8])) {
        let mut block = [0u8; 16384];
        let mut at = 0;
        while at < self.len {
            let n = block.len().min(self.len - at);
            // SAFETY: `at + n <= self.len` and `n <= block.len()` by the line above.
            unsafe { copy(block.as_mut_ptr(), self.ptr.as_ptr().add(at), n, CopyHint::Keep) };
            f(&block[..n]);
            at += n;
        }
    }

    /// The offset of the first byte that differs, over the length of the shorter range; `None` when they are equal.
    /// Bytes that change meanwhile may count as either.
    pub fn first_difference(&self, other: VolatileSlice<'_>) -> Option<usize> {
        let (mut mine, mut theirs) = ([0u8; 4096], [0u8; 4096]);
        let len = self.len.min(other.len);
        let mut at = 0;
        while at < len {
            let n = mine.len().min(len - at);
            self.sub(at, n)?.read(&mut mine[..n]);
            other.sub(at, n)?.read(&mut theirs[..n]);
            if mine[..n] != theirs[..n] {
                return mine.iter().zip(&theirs).position(|(a, b)| a != b).map(|i| at + i);
            }
            at += n;
        }
        None
    }

    /// Fills the range with the repeated little-endian bytes of `pattern`. [`CopyHint::Stream`] bypasses the cache.
    pub fn fill_pattern(&self, pattern: u64, hint: CopyHint) {
        let mut block = [0u8; 8192];
        for eight in block.as_chunks_mut::<8>().0 {
            *eight = pattern.to_le_bytes();
        }
        let mut at = 0;
        while at < self.len {
            let n = block.len().min(self.len - at);
            // SAFETY: `at + n <= self.len` and `n <= block.len()` by the line above.
            unsafe { copy(self.ptr.as_ptr().add(at), block.as_ptr(), n, hint) };
            at += n;
        }
    }

    /// Reads an aligned 32-bit word; what was written before the matching [`VolatileSlice::store_u32`] is visible.
    /// `None` when it does not lie within, or is not aligned.
    pub fn load_u32(&self, offset: usize) -> Option<u32> {
        Some(self.atomic_u32(offset)?.load(Ordering::Acquire))
    }

    /// Writes an aligned 32-bit word, after everything that this thread wrote before. `None` as for
    /// [`VolatileSlice::load_u32`].
    #[must_use = "None says that nothing was written"]
    pub fn store_u32(&self, offset: usize, value: u32) -> Option<()> {
        self.atomic_u32(offset)?.store(value, Ordering::Release);
        Some(())
    }

    /// Reads an aligned 64-bit word, as [`VolatileSlice::load_u32`].
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Option<u64> {
        Some(self.atomic_u64(offset)?.load(Ordering::Acquire))
    }

    /// Writes an aligned 64-bit word, as [`VolatileSlice::store_u32`].
    #[inline]
    #[must_use = "None says that nothing was written"]
    pub fn store_u64(&self, offset: usize, value: u64) -> Option<()> {
        self.atomic_u64(offset)?.store(value, Ordering::Release);
        Some(())
    }

    /// Replaces an aligned 32-bit word and returns the old one, in one total order with all other swaps: when two sides
    /// each swap their own word and then read the other's, at least one sees the other's write. `None` as for
    /// [`VolatileSlice::load_u32`].
    #[must_use = "None says that nothing was written"]
    pub fn swap_u32(&self, offset: usize, value: u32) -> Option<u32> {
        Some(self.atomic_u32(offset)?.swap(value, Ordering::SeqCst))
    }

    /// Faults the page of `offset` in for writing without changing it. Out of range does nothing.
    pub(crate) fn touch(&self, offset: usize) {
        if let Some(word) = self.atomic_u32(offset & !3) {
            word.fetch_or(0, Ordering::Relaxed);
        }
    }

    fn atomic_u32(&self, offset: usize) -> Option<&AtomicU32> {
        let ptr = self.sub(offset, 4)?.ptr.as_ptr();
        if !ptr.addr().is_multiple_of(4) {
            return None;
        }
        // SAFETY: in bounds (`sub`), aligned (checked above), and mapped for the view's life (contract of `from_raw`).
        // Other accesses to the word meanwhile are such atomics too, or bulk copies, which Rust's rules do not cover
        // (see the top of this file for processors where they do).
        Some(unsafe { AtomicU32::from_ptr(ptr.cast()) })
    }

    #[inline]
    fn atomic_u64(&self, offset: usize) -> Option<&AtomicU64> {
        let ptr = self.sub(offset, 8)?.ptr.as_ptr();
        if !ptr.addr().is_multiple_of(8) {
            return None;
        }
        // SAFETY: as in `atomic_u32`.
        Some(unsafe { AtomicU64::from_ptr(ptr.cast()) })
    }
}

impl std::fmt::Debug for VolatileSlice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VolatileSlice({} bytes)", self.len)
    }
}

/// Streaming stores cost a fence; below this many bytes they cannot win.
#[cfg(target_arch = "x86_64")]
const STREAM_FROM: usize = 4096;

/// # Safety
/// `from..from + len` is readable and `to..to + len` writable.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy(to: *mut u8, from: *const u8, len: usize, hint: CopyHint) {
    let mut done = 0;
    if hint != CopyHint::Keep && len >= STREAM_FROM {
        // Streaming stores want an aligned destination: the head goes by ordinary stores.
        let head = to.align_offset(64);
        let body = (len - head) & !127;
        // SAFETY: `head < 64 <= len`, and `head + body <= len`: all within what the caller vouches for.
        unsafe {
            copy_rep(to, from, head);
            if body > 0 && std::arch::is_x86_feature_detected!("avx") {
                copy_stream_avx(to.add(head), from.add(head), body);
            } else {
                copy_stream(to.add(head), from.add(head), body);
            }
        }
        done = head + body;
        if hint == CopyHint::Stream {
            stream_fence();
        }
    }
    // SAFETY: `done <= len`: the rest of what the caller vouches for.
    unsafe { copy_rep(to.add(done), from.add(done), len - done) }
}

/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_rep(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: writes `to..to + len` and reads `from..from + len`, which the caller vouches for; the direction flag is
    // clear on entry to inline assembly (Rust reference, "Inline assembly").
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies `len` bytes with streaming stores, which nothing orders before later stores yet.
///
/// # Safety
/// As for [`copy`]; `to` is a multiple of 16 and `len` a multiple of 128.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_stream(to: *mut u8, from: *const u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: the loop reads and writes exactly `len` bytes, 128 at a time, which the caller vouches for. SSE2 is part
    // of x86-64.
    unsafe {
        std::arch::asm!(
            "2:",
            "prefetchnta [rsi + 1024]",
            "prefetchnta [rsi + 1088]",
            "movups xmm0, [rsi]",
            "movups xmm1, [rsi + 16]",
            "movups xmm2, [rsi + 32]",
            "movups xmm3, [rsi + 48]",
            "movups xmm4, [rsi + 64]",
            "movups xmm5, [rsi + 80]",
            "movups xmm6, [rsi + 96]",
            "movups xmm7, [rsi + 112]",
            "movntps [rdi], xmm0",
            "movntps [rdi + 16], xmm1",
            "movntps [rdi + 32], xmm2",
            "movntps [rdi + 48], xmm3",
            "movntps [rdi + 64], xmm4",
            "movntps [rdi + 80], xmm5",
            "movntps [rdi + 96], xmm6",
            "movntps [rdi + 112], xmm7",
            "add rsi, 128",
            "add rdi, 128",
            "sub rcx, 128",
            "jnz 2b",
            inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            options(nostack)
        );
    }
}

/// As [`copy_stream`] with 32-byte registers: measured a quarter faster from memory to memory.
///
/// # Safety
/// As for [`copy`]; `to` is a multiple of 32, `len` a multiple of 128 and not 0, and the processor has AVX.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_stream_avx(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the loop reads and writes exactly `len` bytes, 128 at a time, which the caller vouches for, as for AVX.
    unsafe {
        std::arch::asm!(
            "2:",
            "prefetchnta [rsi + 1024]",
            "prefetchnta [rsi + 1088]",
            "vmovups ymm0, [rsi]",
            "vmovups ymm1, [rsi + 32]",
            "vmovups ymm2, [rsi + 64]",
            "vmovups ymm3, [rsi + 96]",
            "vmovntps [rdi], ymm0",
            "vmovntps [rdi + 32], ymm1",
            "vmovntps [rdi + 64], ymm2",
            "vmovntps [rdi + 96], ymm3",
            "add rsi, 128",
            "add rdi, 128",
            "sub rcx, 128",
            "jnz 2b",
            "vzeroupper",
            inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _,
            // `vzeroupper` clears the upper halves of them all.
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _,
            out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _,
            out("ymm14") _, out("ymm15") _,
            options(nostack)
        );
    }
}

/// # Safety
/// `from..from + len` is readable and `to..to + len` writable.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(to: *mut u8, from: *const u8, len: usize, _hint: CopyHint) {
    // SAFETY: the caller vouches for both ranges; `copy` allows them to overlap.
    unsafe { std::ptr::copy(from, to, len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnonHeap, Heap};
    use proptest::prelude::*;

    #[test]
    fn refuses_access_out_of_range() {
        let buf = AnonHeap::new().allocate(4096).unwrap().share();
        let part = buf.into_part();
        let view = part.view();
        assert!(view.sub(4096, 0).is_some() && view.sub(4096, 1).is_none() && view.sub(usize::MAX, 2).is_none());
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
        let part = AnonHeap::new().allocate(4096).unwrap().share().into_part();
        let view = part.view();
        view.sub(0, 9).unwrap().copy_from(view.sub(100, 10).unwrap(), CopyHint::Keep);
    }

    #[test]
    #[should_panic(expected = "a read of")]
    fn refuses_a_read_that_does_not_fit() {
        let part = AnonHeap::new().allocate(4096).unwrap().share().into_part();
        part.view().sub(0, 9).unwrap().read(&mut [0; 10]);
    }

    #[test]
    #[should_panic(expected = "a write of")]
    fn refuses_a_write_that_does_not_fit() {
        let part = AnonHeap::new().allocate(4096).unwrap().share().into_part();
        part.view().sub(0, 9).unwrap().write(&[0; 10]);
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
            let (a, b) = (a.share().into_part(), b.share().into_part());
            b.view().sub(to, len).unwrap().copy_from(a.view().sub(from, len).unwrap(), hint);
            let mut got = vec![0u8; want.len()];
            b.view().read(&mut got);
            prop_assert!(got == want);
            let mut blocks = Vec::new();
            b.view().for_each_block(|block| blocks.extend_from_slice(block));
            prop_assert!(blocks == want);
            b.view().sub(to, len).unwrap().fill(7);
            want[to..to + len].fill(7);
            b.view().read(&mut got);
            prop_assert!(got == want);
            let pattern = u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, seed]);
            b.view().sub(to, len).unwrap().fill_pattern(pattern, hint);
            for (byte, with) in want[to..to + len].iter_mut().zip(pattern.to_le_bytes().into_iter().cycle()) {
                *byte = with;
            }
            b.view().read(&mut got);
            prop_assert!(got == want);
            a.view().copy_from(b.view(), CopyHint::Keep);
            prop_assert_eq!(a.view().first_difference(b.view()), None);
            if let Some(byte) = a.view().sub(to + len / 2, 1).filter(|_| len > 0) {
                byte.fill(want[to + len / 2] ^ 0x40);
                prop_assert_eq!(a.view().first_difference(b.view()), Some(to + len / 2));
            }
        }
    }
}
