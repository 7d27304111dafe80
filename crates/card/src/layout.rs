//! A card's memories.

use dmalane_addr::{CardAddr, Span};
use dmalane_device::Region;
use dmalane_queue::Route;

/// A card's memories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardLayout {
    /// DDR, which every channel reaches equally well.
    pub ddr: Span<CardAddr>,
    /// HBM.
    pub hbm: Span<CardAddr>,
    /// The first address of HBM's second half.
    pub hbm_half: CardAddr,
}

/// DDR, which every channel reaches equally well, and the halves of HBM, each by a channel of its own.
pub(crate) fn regions(layout: CardLayout) -> Vec<Region> {
    let CardLayout { ddr, hbm, hbm_half } = layout;
    let low = Span::inclusive(hbm.first(), CardAddr::new(hbm_half.bits() - 1)).expect("the driver has checked it");
    let high = Span::inclusive(hbm_half, hbm.last()).expect("the driver has checked it");
    let half = |name, span, channel| Region::new(name, span).in_group("hbm").by(Route::Channel(channel));
    vec![Region::new("ddr", ddr), half("hbm0", low, 0), half("hbm1", high, 1)]
}
