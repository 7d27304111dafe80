//! Reading, writing and awaiting a card's registers.

use std::time::{Duration, Instant};

use dmalane_addr::{Address, CardAddr, PageSize, Span};
use dmalane_dma::{self as mem, Mmio};

use crate::regs::{self, BAR_REGISTERS};
use crate::{CardLayout, Error};

/// Timeout for the card to stop, start or reset.
pub(crate) const ANSWER: Duration = Duration::from_secs(1);

/// A card's registers.
pub(crate) struct Registers<'a, B>(pub &'a B);

impl<B: Mmio> Registers<'_, B> {
    pub(crate) fn read(&self, offset: u64) -> Result<u32, mem::Error> {
        self.0.read32(BAR_REGISTERS, offset)
    }

    pub(crate) fn read64(&self, offset: u64) -> Result<u64, mem::Error> {
        Ok(u64::from(self.read(offset)?) | u64::from(self.read(offset + 4)?) << 32)
    }

    pub(crate) fn write(&self, offset: u64, value: u32) -> Result<(), mem::Error> {
        self.0.write32(BAR_REGISTERS, offset, value)
    }

    pub(crate) fn write64(&self, offset: u64, value: u64) -> Result<(), mem::Error> {
        self.write(offset, value as u32)?;
        self.write(offset + 4, (value >> 32) as u32)
    }

    /// Waits, at most [`ANSWER`], for the card to do something that takes it a moment.
    pub(crate) fn until(&self, what: &'static str, mut done: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
        let start = Instant::now();
        while !done()? {
            if start.elapsed() > ANSWER {
                return Err(Error::Timeout { what, after: ANSWER });
            }
            if !self.0.progress() {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    pub(crate) fn checked(&self, register: &'static str, offset: u64, min: u32, max: u32) -> Result<u32, Error> {
        let value = self.read(offset)?;
        match (min..=max).contains(&value) {
            true => Ok(value),
            false => Err(Error::BadCapability { register, value: value.into() }),
        }
    }

    /// The card's memory regions, after validating its registers.
    pub(crate) fn layout(&self) -> Result<CardLayout, Error> {
        let span = |register, base, len| -> Result<Span<CardAddr>, Error> {
            let len = self.read64(len)?;
            let span = Span::new(CardAddr::new(self.read64(base)?), len);
            span.filter(|s| s.is_aligned(PageSize::SIZE_4K)).ok_or(Error::BadCapability { register, value: len })
        };
        let ddr = span("DDR_LEN", regs::DDR_BASE, regs::DDR_LEN)?;
        let hbm = span("HBM_LEN", regs::HBM_BASE, regs::HBM_LEN)?;
        if ddr.intersect(&hbm).is_some() {
            return Err(Error::BadCapability { register: "HBM_BASE", value: hbm.first().bits() });
        }
        let hbm_half = CardAddr::new(self.read64(regs::HBM_HALF)?);
        if !hbm.contains(hbm_half) || hbm_half == hbm.first() || !hbm_half.is_aligned(PageSize::SIZE_4K) {
            return Err(Error::BadCapability { register: "HBM_HALF", value: hbm_half.bits() });
        }
        Ok(CardLayout { ddr, hbm, hbm_half })
    }
}
