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

/// A card by name.
pub(super) trait CardSpec: Spec {
    /// How it is driven.
    fn card(&mut self) -> &mut CardOptions;
    /// The same.
    fn driven(&self) -> &CardOptions;
}

impl CardOptions {
    /// The options of a card by name.
    pub(super) fn options<S: CardSpec>() -> [SpecOption<S>; 3] {
        [
            SpecOption::valued(
                "ring",
                "N",
                "entries of each DMA ring, a power of two from 2 to 65536",
                |spec, text| {
                    let ring = number(text, 2..=1 << 16).ok().filter(|entries: &usize| entries.is_power_of_two());
                    spec.card().ring = Some(ring.ok_or("not a power of two from 2 to 65536")?);
                    Ok(())
                },
                |spec| Some(spec.driven().ring?.to_string()),
            ),
            SpecOption::flag(
                "flat",
                "no page tables: addresses are card addresses",
                |spec, _| {
                    spec.card().flat = true;
                    Ok(())
                },
                |spec| spec.driven().flat.then(String::new),
            ),
            SpecOption::valued(
                "va-bits",
                "N",
                "bits of device virtual addresses, 32 to 47 [47]",
                |spec, text| number(text, 32..=47).map(|it| spec.card().va_bits = Some(it)),
                |spec| Some(spec.driven().va_bits?.to_string()),
            ),
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
