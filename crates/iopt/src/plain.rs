//! Mapping by single leaves: the obvious way, for tables that are written once.

use dmalane_addr::{Access, Address, Segment, Span};

use crate::format::{encode_template, index, leaf_kind, page_size};
use crate::map::{Extent, bad_segment, check_room, check_start, checked};
use crate::{Error, Format, NamedAddr, PageTable, Tables, slots};

impl<F: Format, I: Address, O: Address, T: Tables> PageTable<F, I, O, T> {
    /// Maps the same leaves as [`map`](Self::map), one after another. It is less code, which counts in a program that
    /// has it for each of many formats.
    ///
    /// # Errors
    /// Those of `map`, but the leaves and tables that were made before the error stay.
    pub fn map_plainly(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error> {
        if !F::supports(access) {
            return Err(Error::Unsupported { access, format: F::NAME });
        }
        check_start::<F, I>(at, self.input_len())?;
        let now = checked::<F, O>(Segment { addr: to, len }).map_err(bad_segment::<F, O>)?;
        check_room::<I>(at.bits(), len, self.input_len())?;
        self.made.clear();
        let mapped = self.map_leaves(at.bits(), now, access);
        if mapped.is_err() {
            self.cursor.forget(self.root_level()); // it may be on the way to a table that is not there
        }
        mapped
    }

    fn map_leaves(&mut self, mut at: u64, mut now: Extent, access: Access) -> Result<(), Error> {
        let mut limit = u64::MAX;
        while now.len > 0 {
            let kind = leaf_kind::<F>(at | now.out, now.len, limit, self.page_sizes());
            let (table, blank) = self.table_for(at, kind.level)?;
            let first = index::<F>(at, kind.level);
            let entries = first..first + kind.entries::<F>();
            let page = page_size::<F>(kind.level).bytes();
            let taken = if blank { None } else { self.first_taken(table, kind.level, entries.clone()) };
            if let Some(taken) = taken {
                let taken = at + (taken - first) as u64 * page;
                if let Some(run) = Span::new(I::new(taken), page).and_then(|entry| self.runs(entry).next()) {
                    return Err(Error::Overlap { at: NamedAddr::of(run.at) });
                }
                // An empty table: a group goes by single leaves, a single leaf by what the table holds.
                limit = if kind.group { page } else { page - 1 };
                continue;
            }
            let template = encode_template::<F>(kind, access);
            self.write_run(table, kind, entries.clone(), &mut now, (template, blank));
            slots::clean::<F, T>(&mut self.tables, table, entries.clone());
            if blank {
                self.link_table(at, kind.level, entries.len())?;
            }
            self.count(kind, 1);
            at += kind.size::<F>().bytes();
            limit = u64::MAX;
        }
        Ok(())
    }
}
