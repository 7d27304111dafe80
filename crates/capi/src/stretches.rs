//! The bytes of a memory that operations in flight use: any number may read a byte, or one may write it.

use std::collections::BTreeMap;

/// Stretches of bytes that operations use, by their first byte: its end, and how many read it; 0: one writes it.
#[derive(Default)]
pub(crate) struct Stretches(BTreeMap<usize, (usize, usize)>);

impl Stretches {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes a range for an operation that writes it, or reads it. False, without any change, where another writes some
    /// of it, or reads what this one writes.
    pub(crate) fn take(&mut self, first: usize, end: usize, writes: bool) -> bool {
        if first >= end {
            return true;
        }
        let mut used = self.0.range(..end).rev().take_while(|(_, (to, _))| *to > first);
        if used.any(|(_, (_, readers))| writes || *readers == 0) {
            return false;
        }
        if writes {
            self.0.insert(first, (end, 0));
            return true;
        }
        self.divide(first);
        self.divide(end);
        let mut at = first;
        while at < end {
            let next = self.0.range(at..end).next().map_or(end, |(next, _)| *next);
            // Read already, or free as far as the next stretch.
            let (to, readers) = self.0.entry(at).or_insert((next, 0));
            *readers += 1;
            at = *to;
        }
        true
    }

    /// Gives back a range that was taken.
    pub(crate) fn give_back(&mut self, first: usize, end: usize) {
        let mut at = first;
        while let Some((to, readers)) = self.0.get_mut(&at).filter(|_| at < end) {
            let (to, last) = (*to, *readers <= 1);
            *readers = readers.saturating_sub(1);
            if last {
                self.0.remove(&at);
            }
            at = to;
        }
    }

    /// Divides the stretch that goes on at a byte.
    fn divide(&mut self, at: usize) {
        if let Some((_, (end, readers))) = self.0.range_mut(..at).next_back().filter(|(_, (end, _))| *end > at) {
            let rest = (std::mem::replace(end, at), *readers);
            self.0.insert(at, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random ranges, compared with a count for each byte.
    #[test]
    fn they_are_what_a_count_for_each_byte_says() {
        const LEN: usize = 64;
        let (mut stretches, mut taken) = (Stretches::default(), Vec::new());
        let mut bytes = [(0, false); LEN];
        let mut seed = 1_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for _ in 0..100_000 {
            if random(3) == 0 && !taken.is_empty() {
                let (first, end, writes) = taken.swap_remove(random(taken.len()));
                stretches.give_back(first, end);
                for (readers, written) in &mut bytes[first..end] {
                    if writes { *written = false } else { *readers -= 1 }
                }
            } else {
                let (first, writes) = (random(LEN), random(4) == 0);
                let end = first + random((LEN - first + 1).min(20));
                let free = bytes[first..end].iter().all(|(readers, written)| !written && (!writes || *readers == 0));
                assert_eq!(stretches.take(first, end, writes), free, "{first}..{end}, {writes}");
                if free {
                    taken.push((first, end, writes));
                    for (readers, written) in &mut bytes[first..end] {
                        if writes { *written = true } else { *readers += 1 }
                    }
                }
            }
            assert_eq!(stretches.is_empty(), bytes == [(0, false); LEN]);
        }
    }
}
