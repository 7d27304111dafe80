//! Options of every kind of card that the driver of crate `card` drives.

use dmalane_card::CardUse;

use super::kind::Spec;
use super::option::{SpecOption, number};
use crate::open_options::OpenOptions;

/// The options of a card by name, whose own are found by `of`.
pub(super) fn options<S: Spec>(of: fn(&mut S) -> &mut CardUse) -> [SpecOption<S>; 2] {
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
    ]
}

/// How a card called `name` is driven.
pub(super) fn used(card: &CardUse, name: String, concurrent: bool, options: &OpenOptions) -> CardUse {
    CardUse { name, concurrent, flat: card.flat || options.flat, ..card.clone() }
}
