//! What a VM asks of its format beside the shape of tables and entries.

use dmalane_addr::Access;
use dmalane_iopt::{Format, FormatId, with_format};

/// Constants of a format, and its functions. Where a format stands in for another
/// ([`Format::STANDS_IN`]), a VM has those of the other.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) name: &'static str,
    pub(crate) input_bits: u32,
    pub(crate) output_bits: u32,
    pub(crate) supports: fn(Access) -> bool,
}

impl Facts {
    #[inline(always)]
    pub(crate) const fn of<F: Format>() -> &'static Self {
        const { &Self { name: F::NAME, input_bits: F::INPUT_BITS, output_bits: F::OUTPUT_BITS, supports: F::supports } }
    }

    pub(crate) fn of_id(format: FormatId) -> &'static Self {
        with_format!(format, F => Self::of::<F>())
    }
}
