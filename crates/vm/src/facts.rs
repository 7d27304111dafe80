//! What a VM asks of its format beside the shape of tables and entries.

use core::ops::Range;

use dmalane_addr::{Access, DeviceVa};
use dmalane_iopt::{Error, Format, FormatId, TableEstimate, with_format};

use crate::Bo;

/// Constants of a format, and its functions. Where a format stands in for another
/// ([`Format::STANDS_IN`]), a VM has those of the other.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) name: &'static str,
    pub(crate) input_bits: u32,
    pub(crate) output_bits: u32,
    pub(crate) supports: fn(Access) -> bool,
    /// Why some bytes of a buffer cannot be mapped, if they cannot.
    pub(crate) check: fn(&Bo, Range<u64>) -> Result<(), Error>,
}

impl Facts {
    #[inline(always)]
    pub(crate) const fn of<F: Format>() -> &'static Self {
        const {
            &Self {
                name: F::NAME,
                input_bits: F::INPUT_BITS,
                output_bits: F::OUTPUT_BITS,
                supports: F::supports,
                check: check::<F>,
            }
        }
    }

    pub(crate) fn of_id(format: FormatId) -> &'static Self {
        with_format!(format, F => Self::of::<F>())
    }
}

fn check<F: Format>(bo: &Bo, bytes: Range<u64>) -> Result<(), Error> {
    let part = bo.sg().runs(bytes).into_iter().flatten();
    TableEstimate::<F>::new().map_sg(DeviceVa::new(0), part)
}
