//! The operations of a queue that are in flight.

use std::collections::VecDeque;

use dmalane_queue::{Completion, Operation, Ticket};

/// Operations in a batch: as many as the card reports at once, and few enough to be moved up when it reports only some.
const BATCH: usize = 32;
/// A batch that takes the memory of a caller's list has at most this many.
const MOST: usize = 2 * BATCH;

/// Operations in flight, oldest first, each stored as the completion that it becomes unless it fails.
///
/// They lie in batches, so that operations that end together are moved together. Their numbers follow each other.
pub(crate) struct InFlight {
    /// Batches before the last one, oldest first; none is empty.
    full: VecDeque<Vec<Completion>>,
    /// The batch that the next operation is added to.
    last: Vec<Completion>,
    /// An empty batch, to be used again.
    spare: Option<Vec<Completion>>,
    /// The number of the oldest operation, and of the next one to come.
    oldest: u64,
    next: u64,
}

impl InFlight {
    pub(crate) fn new() -> Self {
        Self { full: VecDeque::new(), last: Vec::with_capacity(BATCH), spare: None, oldest: 0, next: 0 }
    }

    /// The number of the oldest operation; that of the next one where none is in flight.
    #[inline]
    pub(crate) fn oldest(&self) -> u64 {
        self.oldest
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        (self.next - self.oldest) as usize
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.oldest
    }

    /// Bytes of host memory that the operations in flight use.
    pub(crate) fn bytes(&self) -> u64 {
        let hosts = self.full.iter().flatten().chain(&self.last).flat_map(|ended| ended.operation.hosts());
        hosts.map(|host| host.slice.len() as u64).sum()
    }

    /// True for the number of an operation in flight.
    pub(crate) fn contains(&self, number: u64) -> bool {
        (self.oldest..self.next).contains(&number)
    }

    /// Adds an operation of `bytes` bytes, and gives its number: one more than that of the one before.
    #[inline(never)] // inlined, it copies the operation once more
    pub(crate) fn push(&mut self, operation: Operation, bytes: u64) -> u64 {
        let number = self.next;
        self.next += 1;
        if self.last.len() == self.last.capacity() {
            self.add_batch();
        }
        let ticket = Ticket::new(number);
        // Written where it stays: `push` would make it on the stack first.
        self.last.extend(std::iter::once_with(|| Completion { ticket, operation, result: Ok(()), bytes }));
        number
    }

    #[cold]
    fn add_batch(&mut self) {
        let next = self.spare.take().unwrap_or_else(|| Vec::with_capacity(BATCH));
        self.full.push_back(std::mem::replace(&mut self.last, next));
    }

    /// The batch of the oldest operation.
    fn first(&mut self) -> &mut Vec<Completion> {
        self.full.front_mut().unwrap_or(&mut self.last)
    }

    /// Forgets the first batch, which is empty, unless it is the last one.
    fn remove_first(&mut self) {
        if let Some(empty) = self.full.pop_front() {
            self.spare = Some(empty);
        }
    }

    /// The oldest operation.
    pub(crate) fn front(&self) -> Option<&Operation> {
        Some(&self.full.front().unwrap_or(&self.last).first()?.operation)
    }

    /// Removes the oldest operation: as the completion of one that ended well.
    pub(crate) fn pop(&mut self) -> Option<Completion> {
        if self.is_empty() {
            return None;
        }
        let batch = self.first();
        let oldest = batch.remove(0);
        if batch.is_empty() {
            self.remove_first();
        }
        self.oldest += 1;
        Some(oldest)
    }

    /// Moves the oldest `n` operations, or all if there are fewer, to the end of `done`, as completions of operations
    /// that ended well.
    #[inline]
    pub(crate) fn pop_into(&mut self, n: usize, done: &mut Vec<Completion>) {
        let mut left = n.min(self.len());
        self.oldest += left as u64;
        while left > 0 {
            let batch = self.first();
            let n = left.min(batch.len());
            if n < batch.len() {
                done.extend(batch.drain(..n));
            } else {
                // Exchanging the memory of the two lists costs less than moving each completion.
                match done.is_empty() && (BATCH..=MOST).contains(&done.capacity()) {
                    true => std::mem::swap(done, batch),
                    false => done.append(batch),
                }
                self.remove_first();
            }
            left -= n;
        }
    }

    /// Takes the operation with this number, and leaves a fence in its place.
    pub(crate) fn take(&mut self, number: u64) -> Option<Operation> {
        let mut index = usize::try_from(number.checked_sub(self.oldest)?).ok()?;
        for batch in self.full.iter_mut().chain([&mut self.last]) {
            match batch.get_mut(index) {
                Some(found) => return Some(std::mem::replace(&mut found.operation, Operation::fence())),
                None => index -= batch.len(),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_addr::CardAddr;
    use dmalane_queue::DeviceAddr;

    fn fill(len: u64) -> Operation {
        Operation::fill(DeviceAddr::Card(CardAddr::new(0)), len, 0)
    }

    /// The bytes that a completion stands for, once as the operation says and once as it was submitted.
    fn bytes(completion: &Completion) -> (u64, u64, u64) {
        assert_eq!(completion.result, Ok(()));
        (completion.ticket.number(), completion.operation.bytes(), completion.bytes)
    }

    #[test]
    fn operations_come_out_in_order() {
        let mut flying = InFlight::new();
        assert!(flying.pop().is_none() && flying.front().is_none());
        let (mut pushed, mut popped) = (0, 0);
        let mut done = Vec::new();
        // More go in than come out: one, some of a batch, just a batch, more than one.
        for (push, pop) in
            [(5, 1), (100, 7), (3, 20), (70, 32), (40, 33), (90, 64), (1, 1), (0, 1000), (33, 33), (2, 1)]
        {
            for _ in 0..push {
                assert_eq!(flying.push(fill(pushed + 1), pushed + 1), pushed);
                pushed += 1;
            }
            flying.pop_into(pop, &mut done);
            for completion in done.drain(..) {
                assert_eq!(bytes(&completion), (popped, popped + 1, popped + 1));
                popped += 1;
            }
            assert_eq!((flying.oldest(), flying.len() as u64), (popped, pushed - popped));
            assert_eq!(flying.front().map(Operation::bytes), (popped < pushed).then_some(popped + 1));
            if let Some(completion) = flying.pop() {
                assert_eq!(bytes(&completion), (popped, popped + 1, popped + 1));
                popped += 1;
            }
        }
        assert!(flying.is_empty());
        for n in 0..100 {
            flying.push(fill(n + 1), n + 1);
        }
        assert!(!flying.contains(popped - 1) && flying.contains(popped) && !flying.contains(popped + 100));
        for number in [0, 31, 32, 70, 99] {
            assert_eq!(flying.take(popped + number).map(|o| o.bytes()), Some(number + 1));
        }
        assert!(flying.take(popped + 100).is_none() && flying.take(popped - 1).is_none());
        let left: Vec<_> = std::iter::from_fn(|| flying.pop()).map(|c| c.operation.bytes()).collect();
        let fences = [0, 31, 32, 70, 99];
        assert!(left.iter().zip(0..).all(|(bytes, n)| *bytes == if fences.contains(&n) { 0 } else { n + 1 }));
        assert_eq!(left.len(), 100);
    }
}
