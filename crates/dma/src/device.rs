//! The device's side of host memory.

use dmalane_addr::{Access, Iova};
use thiserror::Error;

use crate::{CopyHint, VolatileSlice};

/// Host memory as a device model accesses it: by IOVA, as the IOMMU permits.
///
/// Every access is made while the device holds the translations ([`DeviceMem::hold`]).
pub trait DeviceMem: Send {
    /// A guard that holds the translations.
    type Held<'a>: HeldMem
    where
        Self: 'a;

    /// Keeps all translations unchanged until the result is dropped. An unmap waits for that, so hold them for no
    /// longer than a copy of a few MiB takes.
    fn hold(&mut self) -> Self::Held<'_>;

    /// As [`DeviceMem::hold`] without waiting: `None` while another thread changes translations.
    fn try_hold(&mut self) -> Option<Self::Held<'_>> {
        Some(self.hold())
    }
}

/// The stretches of an access add up to it.
const WITHIN: &str = "a stretch of the access";

/// Host memory while its translations are held.
pub trait HeldMem {
    /// Calls `each` with one stretch of host memory after the other, from `at` on for `len` bytes: the offset of the
    /// stretch in the access, and its bytes. Ends early when `each` returns false. All accesses below are made by this.
    ///
    /// # Errors
    /// [`DmaFault`] names the first IOVA that may not be accessed as `wanted`; `each` was called for the bytes before
    /// it, and for none elsewhere.
    fn access(
        &mut self,
        at: Iova,
        len: usize,
        wanted: Access,
        each: impl FnMut(usize, VolatileSlice<'_>) -> bool,
    ) -> Result<(), DmaFault>;

    /// Page-table entries read so far for translations that were not cached, by all holds of this port: what they cost
    /// the host, for those who charge for it. 0 where translations are not counted.
    #[inline]
    fn entries_read(&self) -> u64 {
        0
    }

    /// Copies from host memory at `from` into `into` (all of it).
    ///
    /// # Errors
    /// As [`HeldMem::access`].
    #[inline]
    fn read(&mut self, from: Iova, into: VolatileSlice<'_>, hint: CopyHint) -> Result<(), DmaFault> {
        self.access(from, into.len(), Access::READ, |done, bytes| {
            into.sub(done, bytes.len()).expect(WITHIN).copy_from(bytes, hint);
            true
        })
    }

    /// Copies `from` (all of it) into host memory at `into`.
    ///
    /// # Errors
    /// As [`HeldMem::access`].
    #[inline]
    fn write(&mut self, into: Iova, from: VolatileSlice<'_>, hint: CopyHint) -> Result<(), DmaFault> {
        self.access(into, from.len(), Access::WRITE, |done, bytes| {
            bytes.copy_from(from.sub(done, bytes.len()).expect(WITHIN), hint);
            true
        })
    }

    /// Compares host memory at `at` with `with` (all of it): the offset of the first byte that differs, or `None`.
    ///
    /// # Errors
    /// As [`HeldMem::access`], unless a difference was found before.
    fn compare(&mut self, at: Iova, with: VolatileSlice<'_>) -> Result<Option<usize>, DmaFault> {
        let mut found = None;
        self.access(at, with.len(), Access::READ, |done, bytes| {
            let with = with.sub(done, bytes.len()).expect(WITHIN);
            found = bytes.first_difference(with).map(|offset| done + offset);
            found.is_none()
        })?;
        Ok(found)
    }

    /// Copies a few bytes, such as a descriptor, from host memory.
    ///
    /// # Errors
    /// As [`HeldMem::access`].
    fn read_bytes(&mut self, from: Iova, into: &mut [u8]) -> Result<(), DmaFault> {
        self.access(from, into.len(), Access::READ, |done, bytes| {
            bytes.read(&mut into[done..done + bytes.len()]);
            true
        })
    }

    /// Copies a few bytes, such as a completion, into host memory.
    ///
    /// # Errors
    /// As [`HeldMem::access`].
    fn write_bytes(&mut self, into: Iova, from: &[u8]) -> Result<(), DmaFault> {
        self.access(into, from.len(), Access::WRITE, |done, bytes| {
            bytes.write(&from[done..done + bytes.len()]);
            true
        })
    }

    /// Writes one aligned 64-bit word atomically, after everything written before. This publishes a completion.
    ///
    /// # Errors
    /// As [`HeldMem::write`]; a word that is not aligned is [`FaultReason::Misaligned`].
    fn write_word(&mut self, into: Iova, value: u64) -> Result<(), DmaFault> {
        self.write_words(into, &[Some(value)])
    }

    /// Writes every word that is not `None` as [`HeldMem::write_word`] does; word `i` goes to `into + 8 * i`. The
    /// provided method needs stretches that begin and end at words.
    ///
    /// # Errors
    /// As there; words before the fault may have been written or not.
    fn write_words(&mut self, into: Iova, words: &[Option<u64>]) -> Result<(), DmaFault> {
        if !into.bits().is_multiple_of(8) {
            return Err(DmaFault { at: into, wanted: Access::WRITE, reason: FaultReason::Misaligned, done: 0 });
        }
        self.access(into, 8 * words.len(), Access::WRITE, |done, bytes| {
            for (i, word) in words[done / 8..][..bytes.len() / 8].iter().enumerate() {
                if let Some(word) = word {
                    bytes.store_u64(8 * i, *word).expect("an aligned word of the stretch");
                }
            }
            true
        })
    }
}

/// An access that the IOMMU refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("device fault: {wanted} access to {at} {reason}")]
pub struct DmaFault {
    /// The first IOVA that was refused.
    pub at: Iova,
    /// The access that the device attempted.
    pub wanted: Access,
    /// Why it was refused.
    pub reason: FaultReason,
    /// Bytes that were copied before.
    pub done: u64,
}

/// Why an access was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultReason {
    /// Nothing is mapped there.
    NotMapped,
    /// The mapping does not permit the access.
    NotPermitted,
    /// The access runs past the top of the IOVA space.
    PastTheTop,
    /// The address of a word is not a multiple of its size.
    Misaligned,
}

impl std::fmt::Display for FaultReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "is not mapped",
            Self::NotPermitted => "is not permitted by the mapping",
            Self::PastTheTop => "runs past the top of the IOVA space",
            Self::Misaligned => "is not aligned",
        })
    }
}
