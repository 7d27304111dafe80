//! Options of every kind of card that the driver of crate `card` drives.

use dmalane_card::CardUse;

use super::kind::Spec;
use super::option::{SpecOption, number};
use crate::open_options::OpenOptions;

/// How a card is driven.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CardOptions {
    /// Entries of each ring, a power of two from 2 to 65536; `None` for what the driver chooses.
    pub ring: Option<usize>,
    /// Leaves the MMU alone, as [`OpenOptions::flat`].
    pub flat: bool,
    /// Bits of device virtual addresses, 32 to 47; `None` for 47.
    pub va_bits: Option<u8>,
}

impl CardOptions {
    /// The options of a card by name, whose own are found by `of`.
    pub(super) fn options<S: Spec>(of: fn(&mut S) -> &mut Self) -> [SpecOption<S>; 3] {
        [
            SpecOption::valued(
                "ring",
                "N",
                "entries of each DMA ring, a power of two from 2 to 65536",
                move |spec, text| {
                    let ring = number(text, 2..=1 << 16).ok().filter(|entries: &usize| entries.is_power_of_two());
                    of(spec).ring = Some(ring.ok_or("not a power of two from 2 to 65536")?);
                    Ok(())
                },
            ),
            SpecOption::flag("flat", "no page tables: addresses are card addresses", move |spec| of(spec).flat = true),
            SpecOption::valued("va-bits", "N", "bits of device virtual addresses, 32 to 47 [47]", move |spec, text| {
                number(text, 32..=47).map(|it| of(spec).va_bits = Some(it))
            }),
        ]
    }

    /// How a card called `name` is driven.
    pub(super) fn used(&self, name: String, concurrent: bool, options: &OpenOptions) -> CardUse {
        CardUse {
            name,
            concurrent,
            threads: None,
            processors: 0,
            ring: self.ring,
            flat: self.flat || options.flat,
            va_bits: self.va_bits,
        }
    }
}
