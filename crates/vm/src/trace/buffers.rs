//! The buffer objects of a trace, and the memory that they may take.

use std::collections::BTreeMap;
use std::prelude::v1::*;
use std::sync::{Arc, Weak};

use dmalane_addr::{Address, CardAddr, Segment, SgIndex, SgTable};

use super::{MAX_BOS, MAX_SCATTERED, MAX_SEGMENTS, TraceRefusal};
use crate::Bo;

/// A buffer of no more segments needs no index that grows with its length.
const FEW: usize = 4;

/// Buffer objects by id.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    whole: BTreeMap<u64, Arc<Bo>>,
    /// Those that more lines will add to.
    unfinished: BTreeMap<u64, SgTable<CardAddr>>,
    /// Those that were destroyed: they live on where they are bound.
    destroyed: Vec<Weak<Bo>>,
    /// Memory that all of them take, or took before some of `destroyed` were gone.
    takes: Takes,
}

#[derive(Clone, Copy, Debug, Default)]
struct Takes {
    count: usize,
    segments: usize,
    scattered: u64,
}

impl Takes {
    /// With `segments` more segments, and bytes that are scattered.
    fn and(self, count: usize, segments: usize, scattered: u64) -> Self {
        Self {
            count: self.count + count,
            segments: self.segments + segments,
            scattered: self.scattered.saturating_add(scattered),
        }
    }

    fn check(self) -> Result<Self, TraceRefusal> {
        match self {
            t if t.count > MAX_BOS => Err(TraceRefusal::TooManyBos),
            t if t.segments > MAX_SEGMENTS => Err(TraceRefusal::TooManySegments),
            t if t.scattered > MAX_SCATTERED => Err(TraceRefusal::TooScattered),
            t => Ok(t),
        }
    }
}

/// The bytes of a buffer that count as scattered.
fn scattered(segments: usize, len: u64) -> u64 {
    if segments > FEW { len } else { 0 }
}

impl Buffers {
    pub(crate) fn get(&self, id: u64) -> Result<&Arc<Bo>, TraceRefusal> {
        self.whole.get(&id).ok_or(TraceRefusal::NoBo { bo: id })
    }

    /// Makes a buffer object, or adds to one. A line that is refused changes nothing; but when there is no memory for
    /// the index, what earlier lines said of the buffer is gone too.
    pub(crate) fn add(&mut self, id: u64, segments: &[Segment<CardAddr>], more: bool) -> Result<(), TraceRefusal> {
        if self.whole.contains_key(&id) {
            return Err(TraceRefusal::DuplicateBo { bo: id });
        }
        // All of the line is checked before any of it is kept.
        let (mut len, mut count) = self.unfinished.get(&id).map_or((0, 0), |sg| (sg.len(), sg.segment_count()));
        for (index, s) in segments.iter().enumerate() {
            let bad = || TraceRefusal::BadSegment { bo: id, index, pa: s.addr.bits(), len: s.len };
            let last = s.len.checked_sub(1).and_then(|last| s.addr.checked_add(last));
            len = len.checked_add(s.len).filter(|_| last.is_some()).ok_or_else(bad)?;
        }
        count += segments.len();
        let new = usize::from(!self.unfinished.contains_key(&id));
        let bytes = if more { 0 } else { scattered(count, len) };
        let and = |takes: Takes| takes.and(new, segments.len(), bytes).check();
        self.takes = match and(self.takes) {
            Ok(takes) => takes,
            // Perhaps some are gone by now.
            Err(_) => and(self.recount())?,
        };
        let mut sg = self.unfinished.remove(&id).unwrap_or_default();
        for s in segments {
            sg.push(s.addr, s.len).expect("checked above");
        }
        if more {
            self.unfinished.insert(id, sg);
        } else {
            let index = SgIndex::from_table(&sg).map_err(|source| TraceRefusal::NoMemory { bo: id, source })?;
            self.whole.insert(id, Arc::new(Bo::new(id, index)));
        }
        Ok(())
    }

    pub(crate) fn destroy(&mut self, id: u64) -> Result<(), TraceRefusal> {
        match self.whole.remove(&id) {
            Some(bo) => self.destroyed.push(Arc::downgrade(&bo)),
            None => drop(self.unfinished.remove(&id).ok_or(TraceRefusal::NoBo { bo: id })?),
        }
        Ok(())
    }

    /// Counts again what they take now. Takes as many steps as there may be buffers.
    fn recount(&mut self) -> Takes {
        self.destroyed.retain(|bo| bo.strong_count() > 0);
        let dead = self.destroyed.iter().filter_map(Weak::upgrade);
        let whole = self.whole.values().cloned().chain(dead).map(|bo| (bo.sg().segment_count(), bo.len()));
        let takes = whole.fold(Takes::default(), |t, (segments, len)| t.and(1, segments, scattered(segments, len)));
        self.takes = self.unfinished.values().fold(takes, |t, sg| t.and(1, sg.segment_count(), 0));
        self.takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(n: usize, len: u64) -> Vec<Segment<CardAddr>> {
        (0..n as u64).map(|i| Segment { addr: CardAddr::new(i * 2 * len), len }).collect()
    }

    #[test]
    fn what_is_gone_makes_room() {
        let mut all = Buffers::default();
        let one = segments(1, 4096);
        for id in 0..3 * MAX_BOS as u64 {
            all.add(id, &one, id % 2 == 0).unwrap();
            all.destroy(id).unwrap();
        }
        assert!(all.destroyed.len() <= MAX_BOS && all.whole.is_empty());
        for id in 0..MAX_BOS as u64 {
            all.add(id, &one, false).unwrap();
        }
        assert_eq!(all.add(1 << 20, &one, false), Err(TraceRefusal::TooManyBos));
        // Destroyed, with a reference left.
        let held = all.get(7).unwrap().clone();
        all.destroy(7).unwrap();
        assert_eq!(all.add(1 << 20, &one, false), Err(TraceRefusal::TooManyBos));
        drop(held);
        assert_eq!(all.add(1 << 20, &one, false), Ok(()));
    }

    #[test]
    fn segments_and_scattered_bytes_have_a_most() {
        let mut all = Buffers::default();
        let half = segments(MAX_SEGMENTS / 2, 4096);
        all.add(1, &half, true).unwrap();
        all.add(1, &half, true).unwrap();
        assert_eq!(all.add(1, &half[..1], true), Err(TraceRefusal::TooManySegments));
        assert_eq!(all.add(2, &half[..1], true), Err(TraceRefusal::TooManySegments));
        all.destroy(1).unwrap();

        // Five segments make an index that grows with their length; four do not.
        all.add(3, &segments(4, 1 << 50), false).unwrap();
        let fifth = (MAX_SCATTERED / 5) & !4095;
        all.add(4, &segments(5, fifth), false).unwrap();
        assert_eq!(all.add(5, &segments(5, 4096), false), Err(TraceRefusal::TooScattered));
        all.destroy(4).unwrap();
        all.add(5, &segments(5, 4096), false).unwrap();
        assert_eq!(all.add(6, &segments(5, 1 << 60), false), Err(TraceRefusal::TooScattered));
    }
}
