//! The memory map of a V80.

use dmalane_addr::{CardAddr, Span};
use dmalane_device::Region;
use dmalane_queue::Route;

/// First address and bytes of the card's DDR.
pub const DDR: (u64, u64) = (0x600_0000_0000, 32 << 30);
/// First address and bytes of the card's HBM, both halves.
pub const HBM: (u64, u64) = (0x40_0000_0000, 32 << 30);

/// The regions: DDR, and the halves of the HBM, each by a channel of its own.
pub(crate) fn regions() -> [Region; 3] {
    let span = |first, len| Span::new(CardAddr::new(first), len).expect("a constant span");
    let half = HBM.1 / 2;
    [
        Region::new("ddr", span(DDR.0, DDR.1)),
        Region::new("hbm0", span(HBM.0, half)).in_group("hbm").by(Route::Channel(0)),
        Region::new("hbm1", span(HBM.0 + half, half)).in_group("hbm").by(Route::Channel(1)),
    ]
}
