//! The regions of a device's memory.

use std::borrow::Cow;

use dmalane_addr::{CardAddr, PageSize, Span};
use dmalane_queue::{Area, Route};

/// Part of a device's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its name, unique on the device ("ddr", "hbm0").
    pub name: Cow<'static, str>,
    /// The name that regions of one kind share ("hbm"); its own name for a region that stands alone.
    pub group: Cow<'static, str>,
    /// Its addresses.
    pub span: Span<CardAddr>,
    /// Allocations start at multiples of this, and are multiples of it.
    pub granule: PageSize,
    /// Which queues reach it.
    pub route: Route,
}

impl Region {
    /// A region that stands alone and that every queue reaches, allocated in pages of 4 KiB.
    pub const fn new(name: &'static str, span: Span<CardAddr>) -> Self {
        Self {
            name: Cow::Borrowed(name),
            group: Cow::Borrowed(name),
            span,
            granule: PageSize::SIZE_4K,
            route: Route::Shared,
        }
    }

    /// The same region as one of a group.
    #[must_use]
    pub fn in_group(self, group: &'static str) -> Self {
        Self { group: Cow::Borrowed(group), ..self }
    }

    /// The same region, reached as `route` says.
    #[must_use]
    pub fn by(self, route: Route) -> Self {
        Self { route, ..self }
    }
}

/// The regions as a [`Policy`](dmalane_queue::Policy) sees them.
pub fn areas(regions: &[Region]) -> Vec<Area> {
    regions.iter().map(|r| Area { span: r.span, route: r.route }).collect()
}
