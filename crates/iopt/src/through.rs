//! Mapping what another table translates.

use core::cell::Cell;
use core::iter::from_fn;

use dmalane_addr::{Access, Address, Segment, Span};

use crate::map::Source;
use crate::{Error, Format, NamedAddr, PageTable, Tables};

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Maps from `at` on what `source` translates `span` to, and gives the number of bytes: what a process may see of a
    /// device's memory becomes reachable for another device, or two stages become one.
    ///
    /// This goes through the source leaf by leaf, whatever its format: 32 GiB in leaves of 1 GiB are 32 steps. The
    /// leaves made here are as large as alignment allows, and may be larger or smaller than those of the source.
    ///
    /// An access that names no kind of memory takes that of the source's first leaf, if the format has bits for it:
    /// registers of a device are not cached here either.
    ///
    /// # Errors
    /// [`Error::NotMapped`] at the first hole of the source; [`Error::Denied`] where it does not
    /// [permit](Access::permits) `access`, or is another kind of memory than its first leaf, if that kind is taken;
    /// otherwise as [`map_sg`](Self::map_sg). The table is then as it was.
    pub fn map_through<G: Format, M: Address, U: Tables>(
        &mut self,
        at: I,
        source: &PageTable<G, M, O, U>,
        span: Span<M>,
        access: Access,
    ) -> Result<u64, Error> {
        let kinds = Access::MMIO | Access::UNCACHED;
        let kind = source.runs(span).next().map_or(Access::empty(), |run| run.access & kinds);
        let takes_kind = !access.intersects(kinds) && F::supports(access | kind);
        let access = if takes_kind { access | kind } else { access };
        let denied = Cell::new(None);
        let mut runs = source.runs(span);
        let mut due = span.first().bits();
        let mut next = || {
            let run = runs.next().filter(|run| run.at.bits() == due)?;
            if !run.access.permits(access) || takes_kind && run.access & kinds != kind {
                denied.set(Some(run.access));
                return None;
            }
            due = due.wrapping_add(run.len); // beyond the last byte of the space there is no run
            Some(Segment { addr: run.to, len: run.len })
        };
        // Leaves that continue each other are joined here and not by `map_sg`: one alone may be below a granule.
        let mut pending = None;
        let segments = from_fn(|| {
            let mut joined = pending.take().or_else(&mut next)?;
            loop {
                pending = next();
                match pending {
                    Some(more) if joined.addr.checked_add(joined.len) == Some(more.addr) => joined.len += more.len,
                    _ => return Some(joined),
                }
            }
        });
        self.map_source(at, Source::new(segments), access, |mapped| {
            if mapped == span.len() {
                return Ok(());
            }
            let at = NamedAddr { bits: span.first().bits() + mapped, ..NamedAddr::of(span.first()) };
            Err(match denied.get() {
                Some(permitted) => Error::Denied { at, access, permitted },
                None => Error::NotMapped { at },
            })
        })
    }
}
