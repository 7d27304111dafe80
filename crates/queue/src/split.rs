//! Several queues driven as one.

use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::time::{Duration, Instant};

use dmalane_dma::OfProcess;

use crate::{
    CacheHint, Cancelled, Capabilities, Completion, Direction, HostSlice, Limits, OpError, Operation, Piece, Policy,
    Queue, QueueAddr, Refusal, Refused, StopReason, Ticket, Work, wait_with,
};

/// The longest sleep on one queue while others have operations in flight: the time of the two smallest pieces of a
/// fast queue (2 x 256 KiB at 12 GB/s), so that no queue runs dry for long.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Drives several queues as one, in the process that made it: a child of `fork` is refused, and drops nothing of them.
///
/// A [`Policy`] says which queue moves which piece of a copy, and a copy ends when its last piece has. All other
/// operations (fills, comparisons, copies within the device, gather lists, anything with a shape) go whole to the queue
/// that has the fewest in flight, of those that the policy uses. Fences are kept here: what is submitted behind one
/// waits until everything before it has ended.
pub struct Split<Q: Queue> {
    queues: OfProcess<Vec<Q>>,
    policy: Box<dyn Policy>,
    /// The time since some fixed moment, for the rates that the policy measures. Never goes back.
    now: Box<dyn Fn() -> Duration + Send>,
    copies: BTreeMap<u64, Copy<Q::Addr>>,
    /// Per queue: the operations in flight, oldest first.
    flying: Vec<VecDeque<(Ticket, Assigned)>>,
    /// Per queue: a piece that it had no room for.
    held: Vec<Option<(Piece, Operation<Q::Addr>)>>,
    /// A fence, and what was submitted behind it.
    late: VecDeque<(u64, Operation<Q::Addr>)>,
    /// Ended, and not given back yet.
    ended: Vec<Completion<Q::Addr>>,
    /// Accepted, and not given back yet.
    in_flight: usize,
    next: u64,
    /// The queue that [`Queue::wait`] sleeps on next.
    next_wait: usize,
    scratch: Vec<Completion<Q::Addr>>,
}

/// An operation that a queue was given.
#[derive(Clone, Copy)]
enum Assigned {
    /// Of a copy.
    Piece(Piece),
    /// An operation as it was submitted, by its number.
    Whole(u64),
}

/// A copy in flight: one operation, or those that it was cut into.
struct Copy<A> {
    len: u64,
    parts: Vec<Part<A>>,
    /// Bytes of pieces that have not ended, and of those that no queue was given.
    missing: u64,
    /// The failure that lies first, and the bytes before it.
    failed: Option<(u64, OpError)>,
}

/// A part of a copy that no queue has.
struct Part<A> {
    /// The bytes in front of it.
    offset: u64,
    operation: Operation<A>,
    /// No queue is given it any more: one had it, or it was cancelled.
    over: bool,
}

impl<A: QueueAddr> Copy<A> {
    /// Takes a piece out of the parts that no queue was given. An operation that is not cut is taken as it is.
    fn take(&mut self, piece: &Piece) -> Operation<A> {
        let holds =
            |part: &Part<A>| !part.over && (part.offset..part.offset + part.operation.bytes()).contains(&piece.offset);
        let i = self.parts.iter().position(holds).expect("a policy hands out each byte once");
        let Part { offset, mut operation, .. } = self.parts.swap_remove(i);
        if offset < piece.offset {
            let (before, rest) = cut(operation, piece.offset - offset);
            self.parts.push(Part { offset, operation: before, over: false });
            operation = rest;
        }
        if piece.len < operation.bytes() {
            let (front, after) = cut(operation, piece.len);
            self.parts.push(Part { offset: piece.offset + piece.len, operation: after, over: false });
            operation = front;
        }
        assert_eq!(operation.bytes(), piece.len, "a policy hands out each byte once");
        operation
    }

    /// Notes a failure after `bytes` bytes.
    fn fail(&mut self, bytes: u64, error: OpError) {
        if self.failed.as_ref().is_none_or(|(first, _)| bytes < *first) {
            self.failed = Some((bytes, error));
        }
    }

    /// The whole operation again.
    fn into_operation(mut self) -> Operation<A> {
        self.parts.sort_unstable_by_key(|part| part.offset);
        self.parts.into_iter().map(|part| part.operation).reduce(join).expect("a copy is not empty")
    }
}

/// Makes two copies of one, the first of `len` bytes.
fn cut<A: QueueAddr>(operation: Operation<A>, len: u64) -> (Operation<A>, Operation<A>) {
    let (direction, HostSlice { slice, via }, at, cache) = parts_of(operation);
    let (front, rest) = slice.split_at(len as usize).expect("shorter than the slice");
    let after = at.advance(len).expect("within the copy, whose end was checked");
    let copy = |slice, via, at| Operation::copy(direction, HostSlice { slice, via }, at).hint(cache);
    (copy(front, via.clone(), at), copy(rest, via, after))
}

/// Makes one copy of two neighbours.
fn join<A: QueueAddr>(front: Operation<A>, rest: Operation<A>) -> Operation<A> {
    let (direction, HostSlice { slice, via }, at, cache) = parts_of(front);
    let slice = slice.join(parts_of(rest).1.slice).expect("neighbours");
    Operation::copy(direction, HostSlice { slice, via }, at).hint(cache)
}

fn parts_of<A>(operation: Operation<A>) -> (Direction, HostSlice, A, CacheHint) {
    let Operation { work: Work::Copy { direction, host, at }, cache, .. } = operation else {
        unreachable!("pieces are copies")
    };
    (direction, host, at, cache)
}

impl<Q: Queue> Split<Q> {
    /// Drives `queues` as one.
    ///
    /// # Panics
    /// When there are no queues, or one of them has operations in flight.
    pub fn new(queues: Vec<Q>, policy: Box<dyn Policy>) -> Self {
        let begun = Instant::now();
        Self::with_clock(queues, policy, move || begun.elapsed())
    }

    /// As [`Split::new`], with another clock: it says the time since some fixed moment, and never goes back.
    ///
    /// # Panics
    /// As [`Split::new`].
    pub fn with_clock(queues: Vec<Q>, policy: Box<dyn Policy>, now: impl Fn() -> Duration + Send + 'static) -> Self {
        assert!(!queues.is_empty(), "a split needs a queue");
        assert!(queues.iter().all(|q| q.in_flight() == 0), "a split needs its queues for itself");
        let n = queues.len();
        Self {
            queues: OfProcess::new(queues),
            policy,
            now: Box::new(now),
            copies: BTreeMap::new(),
            flying: (0..n).map(|_| VecDeque::new()).collect(),
            held: (0..n).map(|_| None).collect(),
            late: VecDeque::new(),
            ended: Vec::new(),
            in_flight: 0,
            next: 0,
            next_wait: 0,
            scratch: Vec::new(),
        }
    }

    /// The queues.
    pub fn queues(&self) -> &[Q] {
        &self.queues
    }

    /// Why nothing works in a child of `fork`: the queues are those of its parent.
    fn forked(&self) -> Option<StopReason> {
        self.queues.check().err().map(|e| StopReason::Lost(e.into()))
    }

    /// Gives the queues what the policy has for them. `fresh` is a copy that was just submitted: when its first
    /// piece is refused, nothing of it is in flight, and the reason is returned. When that is accepted, the rest
    /// waits for the next poll: nothing begins before, and by then the policy knows what else was submitted.
    fn feed(&mut self, fresh: Option<u64>) -> Result<(), Refusal> {
        let mut now = None;
        loop {
            let mut any = false;
            for i in 0..self.queues.len() {
                let queue = &mut self.queues[i];
                let (piece, operation) = match self.held[i].take() {
                    Some(held) => held,
                    // A full queue is not asked for, so that its work stays free for others to take.
                    None if queue.in_flight() >= queue.limits().capacity => continue,
                    None => {
                        let now = *now.get_or_insert_with(|| (self.now)());
                        let Some(piece) = self.policy.next(i, now) else { continue };
                        let copy = self.copies.get_mut(&piece.transfer).expect("a copy in flight");
                        (piece, copy.take(&piece))
                    }
                };
                match queue.submit(operation) {
                    Ok(ticket) => {
                        self.flying[i].push_back((ticket, Assigned::Piece(piece)));
                        if fresh == Some(piece.transfer) {
                            return Ok(());
                        }
                        any = true;
                    }
                    Err(Refused { operation, reason: Refusal::Full }) => {
                        self.held[i] = Some((piece, operation));
                        // The queue would have accepted it, as far as is known.
                        if fresh == Some(piece.transfer) {
                            return Ok(());
                        }
                    }
                    Err(Refused { operation, reason }) if fresh == Some(piece.transfer) => {
                        self.put_back(i, piece, operation, false);
                        return Err(reason);
                    }
                    Err(Refused { operation, reason }) => {
                        any = true;
                        self.settle(i, piece, operation, Err(reason.into()), 0);
                    }
                }
            }
            if !any {
                return Ok(());
            }
        }
    }

    /// Puts a piece that is over back into its copy.
    fn put_back(
        &mut self,
        queue: usize,
        piece: Piece,
        operation: Operation<Q::Addr>,
        moved: bool,
    ) -> &mut Copy<Q::Addr> {
        self.policy.ended(queue, &piece, (self.now)(), moved);
        let copy = self.copies.get_mut(&piece.transfer).expect("a copy outlives its pieces");
        copy.parts.push(Part { offset: piece.offset, operation, over: true });
        copy.missing -= piece.len;
        copy
    }

    /// A piece has ended.
    fn settle(
        &mut self,
        queue: usize,
        piece: Piece,
        operation: Operation<Q::Addr>,
        result: Result<(), OpError>,
        bytes: u64,
    ) {
        let copy = self.put_back(queue, piece, operation, result.is_ok());
        if let Err(error) = result {
            copy.fail(piece.offset + bytes, error);
        }
        self.end(piece.transfer);
    }

    /// Ends a copy if all of its pieces have ended.
    fn end(&mut self, id: u64) {
        let Entry::Occupied(copy) = self.copies.entry(id) else { return };
        if copy.get().missing > 0 {
            return;
        }
        let mut copy = copy.remove();
        let failed = copy.failed.take();
        let operation = copy.into_operation();
        let (result, bytes) = match failed {
            None => (Ok(()), operation.bytes()),
            Some((bytes, error)) => (Err(error), bytes),
        };
        self.ended.push(Completion { ticket: Ticket::new(id), operation, result, bytes });
    }

    /// Gives an operation to the queues: a copy in pieces, any other whole.
    fn begin(&mut self, id: u64, operation: Operation<Q::Addr>) -> Result<(), Refused<Q::Addr>> {
        let (Work::Copy { direction, at, .. }, None) = (&operation.work, &operation.shape) else {
            let n = self.queues.len();
            let used = (0..n).filter(|i| self.policy.uses(*i, n));
            let i = used.min_by_key(|i| self.queues[*i].in_flight()).unwrap_or(0);
            let ticket = self.queues[i].submit(operation)?;
            self.flying[i].push_back((ticket, Assigned::Whole(id)));
            return Ok(());
        };
        let len = operation.bytes();
        self.policy.arrive(id, *direction, at.card_addr(), len, self.queues.len());
        let parts = vec![Part { offset: 0, operation, over: false }];
        self.copies.insert(id, Copy { len, parts, missing: len, failed: None });
        // The first piece decides whether the copy is acceptable at all; the rest differ only in their addresses.
        self.feed(Some(id)).map_err(|reason| {
            self.policy.forget(id);
            let operation = self.copies.remove(&id).expect("just inserted").into_operation();
            Refused { operation, reason }
        })
    }

    /// Ends fences, and begins what waits behind them.
    fn pass_fences(&mut self) {
        while let Some((id, operation)) = self.late.pop_front() {
            let (operation, result) = if matches!(operation.work, Work::Fence) {
                if !self.copies.is_empty() || self.flying.iter().any(|flying| !flying.is_empty()) {
                    return self.late.push_front((id, operation));
                }
                let stopped = self.queues.iter().find_map(Queue::halted);
                (operation, stopped.map_or(Ok(()), |reason| Err(OpError::Stopped(reason))))
            } else {
                match self.begin(id, operation) {
                    Ok(()) => continue,
                    Err(Refused { operation, reason: Refusal::Full }) => return self.late.push_front((id, operation)),
                    Err(Refused { operation, reason }) => (operation, Err(reason.into())),
                }
            };
            self.ended.push(Completion { ticket: Ticket::new(id), operation, result, bytes: 0 });
        }
    }

    /// Settles the completions in `scratch`, all of one queue.
    fn absorb(&mut self, queue: usize) {
        let mut scratch = std::mem::take(&mut self.scratch);
        for Completion { ticket, operation, result, bytes } in scratch.drain(..) {
            let flying = &mut self.flying[queue];
            let place = flying.iter().position(|(known, _)| *known == ticket);
            match place.and_then(|i| flying.remove(i)).expect("a ticket of this queue").1 {
                Assigned::Piece(piece) => self.settle(queue, piece, operation, result, bytes),
                Assigned::Whole(id) => {
                    self.ended.push(Completion { ticket: Ticket::new(id), operation, result, bytes });
                }
            }
        }
        self.scratch = scratch;
    }

    fn collect(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        if self.forked().is_some() {
            return 0;
        }
        // Only a fresh copy can be refused.
        let _ = self.feed(None);
        for i in 0..self.queues.len() {
            self.queues[i].poll(&mut self.scratch);
            self.absorb(i);
        }
        self.pass_fences();
        let _ = self.feed(None);
        let n = self.ended.len();
        self.in_flight -= n;
        done.append(&mut self.ended);
        n
    }

    /// Cancels the parts of a copy that no queue has started; the rest ends by itself.
    fn cancel_copy(&mut self, id: u64) -> Cancelled<Q::Addr> {
        self.policy.forget(id);
        let copy = self.copies.get_mut(&id).expect("looked up");
        let mut withheld = Vec::new();
        for part in copy.parts.iter_mut().filter(|part| !part.over) {
            part.over = true;
            withheld.push((part.offset, part.operation.bytes()));
        }
        copy.missing -= withheld.iter().map(|(_, len)| len).sum::<u64>();
        let mut asked = false;
        for i in 0..self.queues.len() {
            if let Some((piece, operation)) = self.held[i].take_if(|(piece, _)| piece.transfer == id) {
                self.put_back(i, piece, operation, false);
                withheld.push((piece.offset, piece.len));
            }
            for (ticket, assigned) in std::mem::take(&mut self.flying[i]) {
                match assigned {
                    Assigned::Piece(piece) if piece.transfer == id => match self.queues[i].cancel(ticket) {
                        Cancelled::Removed(operation) => {
                            self.put_back(i, piece, operation, false);
                            withheld.push((piece.offset, piece.len));
                            continue;
                        }
                        answer => asked |= matches!(answer, Cancelled::Requested),
                    },
                    _ => {}
                }
                self.flying[i].push_back((ticket, assigned));
            }
        }
        let Some((first, _)) = withheld.iter().min() else {
            return if asked { Cancelled::Requested } else { Cancelled::TooLate };
        };
        let copy = self.copies.get_mut(&id).expect("not ended yet");
        if withheld.iter().map(|(_, len)| len).sum::<u64>() == copy.len {
            let copy = self.copies.remove(&id).expect("just seen");
            self.in_flight -= 1;
            return Cancelled::Removed(copy.into_operation());
        }
        copy.fail(*first, OpError::Cancelled);
        self.end(id);
        Cancelled::Requested
    }
}

impl<Q: Queue> Queue for Split<Q> {
    type Addr = Q::Addr;

    /// The queues' capacities together; the shortest of their longest operations and lists.
    fn limits(&self) -> Limits {
        let limits = self.queues.iter().map(Queue::limits);
        limits
            .reduce(|a, b| Limits {
                capacity: a.capacity + b.capacity,
                max_len: a.max_len.min(b.max_len),
                max_parts: a.max_parts.min(b.max_parts),
            })
            .expect("at least one queue")
    }

    /// The capabilities of all queues, and fences; not the order of a single queue.
    fn capabilities(&self) -> Capabilities {
        let all = self.queues.iter().fold(Capabilities::all(), |all, queue| all & queue.capabilities());
        (all - Capabilities::ORDERED) | Capabilities::FENCE
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, operation: Operation<Q::Addr>) -> Result<Ticket, Refused<Q::Addr>> {
        if let Some(reason) = self.forked() {
            return Err(Refused { operation, reason: Refusal::Stopped(reason) });
        }
        let limits = self.limits();
        if let Err(reason) = operation.admit(self.capabilities(), limits) {
            return Err(Refused { operation, reason });
        }
        if self.in_flight >= limits.capacity {
            return Err(Refused { operation, reason: Refusal::Full });
        }
        let id = self.next;
        if !self.late.is_empty() || matches!(operation.work, Work::Fence) {
            if let Some(reason) = self.halted() {
                return Err(Refused { operation, reason: Refusal::Stopped(reason) });
            }
            self.late.push_back((id, operation));
        } else {
            self.begin(id, operation)?;
        }
        self.next += 1;
        self.in_flight += 1;
        Ok(Ticket::new(id))
    }

    fn flush(&mut self) {
        if self.forked().is_some() {
            return;
        }
        self.pass_fences();
        // Only a fresh copy can be refused.
        let _ = self.feed(None);
        self.queues.iter_mut().for_each(Queue::flush);
    }

    fn poll(&mut self, done: &mut Vec<Completion<Q::Addr>>) -> usize {
        self.collect(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion<Q::Addr>>, timeout: Duration) -> usize {
        wait_with(self, done, timeout, |this, left| {
            if this.forked().is_some() {
                return std::thread::sleep(left.min(POLL_INTERVAL));
            }
            // There is no sleep on several queues at once: sleep briefly on each in turn, or as long as allowed on the
            // only one.
            let n = this.queues.len();
            let busy = |i: &usize| this.queues[*i].in_flight() > 0;
            let Some(i) = (0..n).map(|k| (this.next_wait + k) % n).find(busy) else { return };
            let alone = (0..n).filter(busy).count() == 1;
            this.next_wait = i + 1;
            this.queues[i].wait(&mut this.scratch, if alone { left } else { left.min(POLL_INTERVAL) });
            this.absorb(i);
        })
    }

    /// Halted when one queue has, since every copy may need it; but not while another one still has operations to end.
    fn halted(&self) -> Option<StopReason> {
        if let Some(reason) = self.forked() {
            return Some(reason);
        }
        let works = |queue: &Q| queue.in_flight() > 0 && queue.halted().is_none();
        if self.queues.iter().any(works) { None } else { self.queues.iter().find_map(Queue::halted) }
    }

    fn stop(&mut self, reason: StopReason) {
        if self.forked().is_some() {
            return;
        }
        self.queues.iter_mut().for_each(|queue| queue.stop(reason.clone()));
    }

    /// Restarts all queues that have stopped.
    fn restart(&mut self) -> bool {
        if self.forked().is_none() && self.in_flight == 0 && self.queues.iter().any(|queue| queue.halted().is_some()) {
            return self.queues.iter_mut().all(|queue| queue.halted().is_none() || queue.restart());
        }
        false
    }

    /// Cancels the parts of a copy that no queue has started; if some have started, the copy ends with
    /// [`OpError::Cancelled`].
    fn cancel(&mut self, ticket: Ticket) -> Cancelled<Q::Addr> {
        let id = ticket.number();
        if self.forked().is_some() {
            return Cancelled::TooLate;
        }
        if let Some((_, operation)) =
            self.late.iter().position(|(late, _)| *late == id).and_then(|at| self.late.remove(at))
        {
            self.in_flight -= 1;
            return Cancelled::Removed(operation);
        }
        if self.copies.contains_key(&id) {
            return self.cancel_copy(id);
        }
        for (queue, flying) in self.queues.iter_mut().zip(&mut self.flying) {
            let whole = |(_, assigned): &(Ticket, Assigned)| matches!(assigned, Assigned::Whole(known) if *known == id);
            let Some(place) = flying.iter().position(whole) else { continue };
            return match queue.cancel(flying[place].0) {
                Cancelled::Removed(operation) => {
                    flying.remove(place);
                    self.in_flight -= 1;
                    Cancelled::Removed(operation)
                }
                Cancelled::Requested => Cancelled::Requested,
                Cancelled::TooLate | Cancelled::Unknown => Cancelled::TooLate,
            };
        }
        if self.ended.iter().any(|end| end.ticket == ticket) { Cancelled::TooLate } else { Cancelled::Unknown }
    }
}

#[cfg(test)]
mod tests {
    use dmalane_addr::CardAddr;

    use super::*;
    use crate::drain;
    use crate::wait::RELEASE_TIMEOUT;
    use crate::wait::fake::{Fake, operation};

    /// Half of a copy for each of two queues.
    #[derive(Default)]
    struct Halves(Vec<Option<Piece>>);

    impl Policy for Halves {
        fn arrive(&mut self, transfer: u64, _: Direction, _: Option<CardAddr>, len: u64, _: usize) {
            self.0 = [0, len / 2].map(|offset| Some(Piece { transfer, offset, len: len / 2 })).into();
        }

        fn next(&mut self, queue: usize, _: Duration) -> Option<Piece> {
            self.0[queue].take()
        }

        fn ended(&mut self, _: usize, _: &Piece, _: Duration, _: bool) {}

        fn forget(&mut self, _: u64) {}
    }

    #[test]
    fn a_split_uses_all_of_its_queues() {
        let split = Split::new(vec![Fake::default(), Fake::default()], Box::<Halves>::default());
        assert_eq!([0, 1].map(|queue| split.policy.uses(queue, 2)), [true; 2], "unless the policy says otherwise");
        assert_eq!(split.queues().len(), 2);
        let before = (split.now)();
        std::thread::sleep(Duration::from_millis(1));
        assert!((split.now)() >= before + Duration::from_millis(1));
    }

    #[test]
    fn a_halted_queue_does_not_condemn_one_that_works() {
        let mut split = Split::new(vec![Fake::default(), Fake::default()], Box::<Halves>::default());
        let _only = split.submit(operation()).unwrap();
        split.poll(&mut Vec::new());
        assert_eq!(split.queues.iter().map(Queue::in_flight).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(split.halted(), None);
        split.queues[0].stop(StopReason::Lost("gone".into()));
        assert_eq!(split.halted(), None, "the other one works");
        let begun = Instant::now();
        assert!(
            drain(&mut split, 3 * RELEASE_TIMEOUT).is_empty() && begun.elapsed() >= 3 * RELEASE_TIMEOUT,
            "it is waited for"
        );
        // Once it has ended its operations, nothing more is to be expected.
        split.queues[1].ends = true;
        split.poll(&mut Vec::new());
        assert_eq!(split.halted(), Some(StopReason::Lost("gone".into())));
        let (begun, long) = (Instant::now(), Duration::from_secs(60));
        assert!(drain(&mut split, long).is_empty() && begun.elapsed() < long / 2);
        split.queues[0].ends = true;
        assert_eq!(drain(&mut split, long).len(), 1);
    }
}
