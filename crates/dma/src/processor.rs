//! Loads, stores and copies as single instructions, for memory outside of Rust's abstract machine.
//!
//! Memory that a device reads and writes is not Rust's: the language has no rule for a copy that races with a device,
//! and forbids atomics of different sizes at one place. Therefore nothing here is a Rust access to that memory. Each
//! function is inline assembly, which the compiler must take for an exchange with an external agent: it can neither
//! assume what the memory contains nor move other accesses across it. Then only the behaviour of the processor matters:
//! an aligned load or store of a word is one access, of whatever size, and a copy is many.
//!
//! In terms of the abstract machine, each function is an acquire fence after a message from the agent that keeps the
//! memory, or a release fence before one to it (a copy: both). Who borrows the memory as a slice ([`CpuBuf`],
//! [`BufferSlice::with_bytes`]) takes it from that agent, and nobody else has access meanwhile.
//!
//! [`CpuBuf`]: crate::CpuBuf
//! [`BufferSlice::with_bytes`]: crate::BufferSlice::with_bytes
#![allow(unsafe_code)]

use std::arch::asm;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("memory that a device shares needs instructions of x86-64 or AArch64: add those of this processor here");

/// Whether a copy should leave the bytes in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum CopyHint {
    /// The destination will be used soon: ordinary stores.
    #[default]
    Keep,
    /// The destination will not be used soon: stores that bypass the cache, where the processor has them.
    Stream,
    /// As [`CopyHint::Stream`], but what this thread stores next may become visible to others before these bytes do,
    /// until it calls [`stream_fence`](crate::stream_fence): for many copies that are published together.
    StreamUnordered,
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::{CopyHint, asm};

    /// Makes streaming stores visible before later stores.
    #[inline]
    pub(crate) fn stream_fence() {
        // SAFETY: a fence touches no memory; SSE is part of x86-64.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) }
    }

    /// Reads a word in one access, before what this thread reads or writes next.
    ///
    /// # Safety
    /// `at` is aligned, and its word readable.
    #[inline]
    pub(crate) unsafe fn load_u32(at: *const u32) -> u32 {
        let value;
        // SAFETY: reads the word at `at`, which the caller vouches for. The processor keeps loads in order.
        unsafe { asm!("mov {0:e}, dword ptr [{1}]", out(reg) value, in(reg) at, options(nostack, preserves_flags)) }
        value
    }

    /// As [`load_u32`], a word of 16 bits.
    ///
    /// # Safety
    /// As for [`load_u32`].
    #[inline]
    pub(crate) unsafe fn load_u16(at: *const u16) -> u16 {
        let value;
        // SAFETY: as in `load_u32`.
        unsafe { asm!("mov {0:x}, word ptr [{1}]", out(reg) value, in(reg) at, options(nostack, preserves_flags)) }
        value
    }

    /// As [`load_u32`], a word of 64 bits.
    ///
    /// # Safety
    /// As for [`load_u32`].
    #[inline]
    pub(crate) unsafe fn load_u64(at: *const u64) -> u64 {
        let value;
        // SAFETY: as in `load_u32`.
        unsafe { asm!("mov {0}, qword ptr [{1}]", out(reg) value, in(reg) at, options(nostack, preserves_flags)) }
        value
    }

    /// Writes a word in one access, after what this thread read or wrote before.
    ///
    /// # Safety
    /// `at` is aligned, and its word writable.
    #[inline]
    pub(crate) unsafe fn store_u32(at: *mut u32, value: u32) {
        // SAFETY: writes the word at `at`, which the caller vouches for. The processor keeps stores in order, and
        // behind earlier loads.
        unsafe { asm!("mov dword ptr [{0}], {1:e}", in(reg) at, in(reg) value, options(nostack, preserves_flags)) }
    }

    /// As [`store_u32`], a word of 16 bits.
    ///
    /// # Safety
    /// As for [`store_u32`].
    #[inline]
    pub(crate) unsafe fn store_u16(at: *mut u16, value: u16) {
        // SAFETY: as in `store_u32`.
        unsafe { asm!("mov word ptr [{0}], {1:x}", in(reg) at, in(reg) value, options(nostack, preserves_flags)) }
    }

    /// As [`store_u32`], a word of 64 bits.
    ///
    /// # Safety
    /// As for [`store_u32`].
    #[inline]
    pub(crate) unsafe fn store_u64(at: *mut u64, value: u64) {
        // SAFETY: as in `store_u32`.
        unsafe { asm!("mov qword ptr [{0}], {1}", in(reg) at, in(reg) value, options(nostack, preserves_flags)) }
    }

    /// Replaces a word in one access and returns the old one. Nothing moves across it, in either direction.
    ///
    /// # Safety
    /// `at` is aligned, and its word readable and writable.
    #[inline]
    pub(crate) unsafe fn swap_u32(at: *mut u32, mut value: u32) -> u32 {
        // SAFETY: reads and writes the word at `at`, which the caller vouches for; `xchg` with memory always locks.
        unsafe {
            asm!("xchg dword ptr [{0}], {1:e}", in(reg) at, inout(reg) value, options(nostack, preserves_flags));
        }
        value
    }

    /// Writes a word with what it contains, in one access, so that its page is present.
    ///
    /// # Safety
    /// As for [`swap_u32`].
    #[inline]
    pub(crate) unsafe fn touch_u32(at: *mut u32) {
        // SAFETY: as in `swap_u32`; the locked operation changes no bit.
        unsafe { asm!("lock or dword ptr [{0}], 0", in(reg) at, options(nostack)) }
    }

    /// Streaming stores cost a fence; below this many bytes they cannot win.
    const STREAM_FROM: usize = 4096;

    /// # Safety
    /// `from..from + len` is readable and `to..to + len` writable.
    #[inline]
    pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, len: usize, hint: CopyHint) {
        let mut done = 0;
        if hint != CopyHint::Keep && len >= STREAM_FROM && std::arch::is_x86_feature_detected!("avx") {
            // Streaming stores want an aligned destination: the head goes by ordinary stores.
            let head = to.align_offset(64);
            let body = (len - head) & !127;
            // SAFETY: `head < 64`, so `body` is at least 128, and `head + body <= len`: all within what the caller
            // vouches for.
            unsafe {
                copy_rep(to, from, head);
                copy_stream(to.add(head), from.add(head), body);
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
    #[inline]
    unsafe fn copy_rep(to: *mut u8, from: *const u8, len: usize) {
        // SAFETY: writes `to..to + len` and reads `from..from + len`, which the caller vouches for; the direction flag
        // is clear on entry to inline assembly (Rust reference, "Inline assembly").
        unsafe {
            asm!(
                "rep movsb",
                inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// Copies `len` bytes with streaming stores, which nothing orders before later stores yet.
    ///
    /// # Safety
    /// As for [`copy`]; `to` is a multiple of 32, `len` a multiple of 128 and not 0, and the processor has AVX.
    unsafe fn copy_stream(to: *mut u8, from: *const u8, len: usize) {
        // SAFETY: the loop reads and writes exactly `len` bytes, 128 at a time, which the caller vouches for, as for
        // AVX.
        unsafe {
            asm!(
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
                out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _,
                out("ymm13") _, out("ymm14") _, out("ymm15") _,
                options(nostack)
            );
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::{CopyHint, asm};

    /// Orders nothing: copies make no streaming stores here, and their bytes are ordered by the store that publishes
    /// them.
    #[inline]
    pub(crate) fn stream_fence() {}

    /// Reads a word in one access, before what this thread reads or writes next.
    ///
    /// # Safety
    /// `at` is aligned, and its word readable.
    #[inline]
    pub(crate) unsafe fn load_u32(at: *const u32) -> u32 {
        let value;
        // SAFETY: reads the word at `at`, which the caller vouches for.
        unsafe { asm!("ldar {0:w}, [{1}]", out(reg) value, in(reg) at, options(nostack, preserves_flags)) }
        value
    }

    /// As [`load_u32`], a word of 16 bits.
    ///
    /// # Safety
    /// As for [`load_u32`].
    #[inline]
    pub(crate) unsafe fn load_u16(at: *const u16) -> u16 {
        let value;
        // SAFETY: as in `load_u32`.
        unsafe { asm!("ldarh {0:w}, [{1}]", out(reg) value, in(reg) at, options(nostack, preserves_flags)) }
        value
    }

    /// As [`load_u32`], a word of 64 bits.
    ///
    /// # Safety
    /// As for [`load_u32`].
    #[inline]
    pub(crate) unsafe fn load_u64(at: *const u64) -> u64 {
        let value;
        // SAFETY: as in `load_u32`.
        unsafe { asm!("ldar {0:x}, [{1}]", out(reg) value, in(reg) at, options(nostack, preserves_flags)) }
        value
    }

    /// Writes a word in one access, after what this thread read or wrote before.
    ///
    /// # Safety
    /// `at` is aligned, and its word writable.
    #[inline]
    pub(crate) unsafe fn store_u32(at: *mut u32, value: u32) {
        // SAFETY: writes the word at `at`, which the caller vouches for.
        unsafe { asm!("stlr {1:w}, [{0}]", in(reg) at, in(reg) value, options(nostack, preserves_flags)) }
    }

    /// As [`store_u32`], a word of 16 bits.
    ///
    /// # Safety
    /// As for [`store_u32`].
    #[inline]
    pub(crate) unsafe fn store_u16(at: *mut u16, value: u16) {
        // SAFETY: as in `store_u32`.
        unsafe { asm!("stlrh {1:w}, [{0}]", in(reg) at, in(reg) value, options(nostack, preserves_flags)) }
    }

    /// As [`store_u32`], a word of 64 bits.
    ///
    /// # Safety
    /// As for [`store_u32`].
    #[inline]
    pub(crate) unsafe fn store_u64(at: *mut u64, value: u64) {
        // SAFETY: as in `store_u32`.
        unsafe { asm!("stlr {1:x}, [{0}]", in(reg) at, in(reg) value, options(nostack, preserves_flags)) }
    }

    /// Replaces a word in one access and returns the old one. Nothing moves across it, in either direction.
    ///
    /// # Safety
    /// `at` is aligned, and its word readable and writable.
    #[inline]
    pub(crate) unsafe fn swap_u32(at: *mut u32, value: u32) -> u32 {
        let old;
        // SAFETY: reads and writes the word at `at`, which the caller vouches for, until no other access came between.
        unsafe {
            asm!(
                "2:",
                "ldaxr {old:w}, [{at}]",
                "stlxr {failed:w}, {value:w}, [{at}]",
                "cbnz {failed:w}, 2b",
                "dmb ish",
                at = in(reg) at, value = in(reg) value, old = out(reg) old, failed = out(reg) _,
                options(nostack, preserves_flags)
            );
        }
        old
    }

    /// Writes a word with what it contains, in one access, so that its page is present.
    ///
    /// # Safety
    /// As for [`swap_u32`].
    #[inline]
    pub(crate) unsafe fn touch_u32(at: *mut u32) {
        // SAFETY: as in `swap_u32`; what is written is what was read.
        unsafe {
            asm!(
                "2:",
                "ldxr {old:w}, [{at}]",
                "stxr {failed:w}, {old:w}, [{at}]",
                "cbnz {failed:w}, 2b",
                at = in(reg) at, old = out(reg) _, failed = out(reg) _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// Copies bytes, from the first to the last.
    ///
    /// # Safety
    /// `from..from + len` is readable and `to..to + len` writable.
    pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, len: usize, _hint: CopyHint) {
        // SAFETY: reads and writes `len` bytes of each, which the caller vouches for: blocks of 64 while as many are
        // left, then words of 8, then bytes.
        unsafe {
            asm!(
                "subs {len}, {len}, #64",
                "b.lo 3f",
                "2:",
                "ldp {a:q}, {b:q}, [{from}]",
                "ldp {c:q}, {d:q}, [{from}, #32]",
                "add {from}, {from}, #64",
                "stp {a:q}, {b:q}, [{to}]",
                "stp {c:q}, {d:q}, [{to}, #32]",
                "add {to}, {to}, #64",
                "subs {len}, {len}, #64",
                "b.hs 2b",
                "3:",
                "add {len}, {len}, #64",
                "subs {len}, {len}, #8",
                "b.lo 5f",
                "4:",
                "ldr {word:x}, [{from}], #8",
                "str {word:x}, [{to}], #8",
                "subs {len}, {len}, #8",
                "b.hs 4b",
                "5:",
                "adds {len}, {len}, #8",
                "b.eq 7f",
                "6:",
                "ldrb {word:w}, [{from}], #1",
                "strb {word:w}, [{to}], #1",
                "subs {len}, {len}, #1",
                "b.ne 6b",
                "7:",
                to = inout(reg) to => _, from = inout(reg) from => _, len = inout(reg) len => _, word = out(reg) _,
                a = out(vreg) _, b = out(vreg) _, c = out(vreg) _, d = out(vreg) _,
                options(nostack)
            );
        }
    }
}
