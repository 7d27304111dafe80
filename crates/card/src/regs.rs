//! The register map: BAR 0, as `docs/formats/card.md` has it.
//!
//! All registers are 32 bits wide. A 64-bit quantity is two of them, the low half first (`X` and `X + 4`).

/// The BAR of the registers.
pub const BAR_REGISTERS: u8 = 0;
/// The BAR through which the host reaches card memory: offset = card address.
pub const BAR_MEMORY: u8 = 2;

/// The value of [`ID`] ("DMLC").
pub const ID_VALUE: u32 = 0x434c_4d44;
/// The value of [`VERSION`]: major in the upper half, minor in the lower. A driver accepts any minor of its major.
pub const VERSION_VALUE: u32 = 0x0001_0000;
/// Channels, at most.
pub const MAX_CHANNELS: u32 = 16;
/// Logarithm of the longest ring, in entries.
pub const MAX_RING_LOG2: u32 = 16;
/// Bytes per descriptor, at most: 1 GiB.
pub const MAX_LEN: u32 = 1 << 30;

/// Read-only: [`ID_VALUE`].
pub const ID: u64 = 0x00;
/// Read-only: [`VERSION_VALUE`].
pub const VERSION: u64 = 0x04;
/// Read-only: number of channels.
pub const CHANNELS: u64 = 0x08;
/// Read-only: logarithm of the longest ring in entries.
pub const RING_LOG2_MAX: u64 = 0x0c;
/// Read-only, 64 bits: first card address of DDR.
pub const DDR_BASE: u64 = 0x10;
/// Read-only, 64 bits: bytes of DDR.
pub const DDR_LEN: u64 = 0x18;
/// Read-only, 64 bits: first card address of HBM.
pub const HBM_BASE: u64 = 0x20;
/// Read-only, 64 bits: bytes of HBM.
pub const HBM_LEN: u64 = 0x28;
/// Read-only, 64 bits: first card address of HBM's second half.
pub const HBM_HALF: u64 = 0x30;
/// Read-only: bytes per descriptor, at most.
pub const LEN_MAX: u64 = 0x38;
/// Read-only: the format of the MMU's tables, see [`format_code`].
pub const MMU_FORMAT: u64 = 0x3c;
/// Bit 0: a write of 1 stops all channels and turns the MMU off. Reads as 1 while a channel is requested to stop
/// (here or by [`CH_CONTROL`]) and has not stopped yet. Card memory keeps its contents.
pub const CONTROL: u64 = 0x40;
/// 64 bits: card address of the MMU's root table. Takes effect with the next write to [`MMU_CONTROL`].
pub const MMU_ROOT: u64 = 0x48;
/// Bit 0: MMU on. A write takes over [`MMU_ROOT`] and forgets all translations.
pub const MMU_CONTROL: u64 = 0x50;
/// A write forgets all translations; reads as 0 once no access by an old one is under way.
pub const MMU_INVALIDATE: u64 = 0x54;

/// The registers of channel 0.
pub const CHANNEL_BASE: u64 = 0x1000;
/// Bytes from one channel's registers to the next's.
pub const CHANNEL_STRIDE: u64 = 0x100;

/// Per channel, bit 0: enable. A write of 0 stops the channel and clears its errors, which is done once
/// [`CH_STATUS`] reads 0; a write of 1 before that is ignored.
pub const CH_CONTROL: u64 = 0x00;
/// Per channel, read-only: [`STATUS_RUNNING`] and [`STATUS_HALTED`]. 0: stopped, no access to host memory is under way
/// and none will begin.
pub const CH_STATUS: u64 = 0x04;
/// Per channel, read-only: why it halted (a [`Halt`](crate::Halt)), 0 when it did not.
pub const CH_ERROR: u64 = 0x08;
/// Per channel: logarithm of the entries of both rings.
pub const CH_RING_LOG2: u64 = 0x0c;
/// Per channel, 64 bits: IOVA of the descriptor ring, a multiple of 4096.
pub const CH_RING: u64 = 0x10;
/// Per channel, 64 bits: IOVA of the completion ring, a multiple of 4096.
pub const CH_COMPLETIONS: u64 = 0x18;
/// Per channel: the number of descriptors written since the channel was started, modulo 2^32.
pub const CH_DOORBELL: u64 = 0x20;
/// Per channel, read-only: the number of descriptors completed, modulo 2^32.
pub const CH_HEAD: u64 = 0x24;
/// Per channel, bit 0: raise an interrupt after the next completion. The card clears it as it does.
pub const CH_INTERRUPT: u64 = 0x28;
/// Per channel, read-only, 64 bits: the IOVA at which the ring faulted.
pub const CH_ERROR_IOVA: u64 = 0x30;
/// Per channel, read-only, 64 bits: bytes moved host to card.
pub const CH_BYTES_H2C: u64 = 0x38;
/// Per channel, read-only, 64 bits: bytes moved card to host.
pub const CH_BYTES_C2H: u64 = 0x40;
/// Per channel, read-only, 64 bits: descriptors that completed without error.
pub const CH_OK: u64 = 0x48;
/// Per channel, read-only, 64 bits: descriptors that completed with an error.
pub const CH_FAILED: u64 = 0x50;
/// Per channel, 64 bits: a number of a descriptor, and 1 in the upper half. When the operation that begins
/// with that descriptor has not ended, the card ends it as soon as it comes to it. Cleared by the card, and by a stop.
pub const CH_CANCEL: u64 = 0x58;

/// Bit of [`CH_STATUS`]: takes descriptors.
pub const STATUS_RUNNING: u32 = 1;
/// Bit of [`CH_STATUS`]: gave up, see [`CH_ERROR`]; stop the channel to clear it.
pub const STATUS_HALTED: u32 = 2;

/// The offset of a channel's register.
pub const fn channel(index: u32, register: u64) -> u64 {
    CHANNEL_BASE + CHANNEL_STRIDE * index as u64 + register
}

/// The channel whose register is at this offset, and the register: the inverse of [`channel`].
#[inline]
pub fn channel_at(offset: u64) -> Option<(usize, u64)> {
    let offset = offset.checked_sub(CHANNEL_BASE)?;
    Some((usize::try_from(offset / CHANNEL_STRIDE).ok()?, offset % CHANNEL_STRIDE))
}

/// The code of a page-table format in [`MMU_FORMAT`]; 0 for one that has none.
pub fn format_code(name: &str) -> u32 {
    FORMATS.iter().position(|f| *f == name).map_or(0, |i| i as u32 + 1)
}

/// The page-table format with this code, by its name.
pub fn format_name(code: u32) -> Option<&'static str> {
    FORMATS.get(code.checked_sub(1)? as usize).copied()
}

const FORMATS: [&str; 2] = ["x86-64-4level", "arm64-s1-4k"];
