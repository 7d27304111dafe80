//! A registrar that maps without a device, and a queue that ends operations when it is told to.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_addr::{Access, CardAddr, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{AnonHeap, BufferRef, BufferSlice, Error, Heap, Mapping, Pinned, Registrar, SharedBuf, Undo};
use dmalane_queue::{
    Cancelled, Capabilities, Completion, DeviceAddr, Limits, OpError, Operation, Queue, Refusal, Refused, Registered,
    StopReason, Ticket, Work,
};

/// Maps whatever it is given.
pub struct Bus(Arc<State>);

struct State {
    pinned: AtomicU64,
    iovas: Mutex<RangeCache<Iova>>,
}

impl Undo for State {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        self.pinned.fetch_sub(lease.span().len(), Ordering::Relaxed);
        self.iovas.lock().unwrap().free(lease);
        true
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl Default for Bus {
    fn default() -> Self {
        let space = Span::new(Iova::new(1 << 20), 1 << 32).unwrap();
        let iovas = Mutex::new(RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K)));
        Self(Arc::new(State { pinned: AtomicU64::new(0), iovas }))
    }
}

impl Bus {
    /// Bytes that are mapped now.
    pub fn pinned(&self) -> u64 {
        self.0.pinned.load(Ordering::Relaxed)
    }
}

impl Registrar for Bus {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        Ok(Pinned::new(buffer.clone(), range, None, self.0.clone()))
    }

    fn map_list(&self, list: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        let [pinned] = &list[..] else { return Err(Error::WholeBuffers) };
        let len = pinned.range().len() as u64;
        self.0.pinned.fetch_add(len, Ordering::Relaxed);
        let lease = self.0.iovas.lock().unwrap().allocate(len, PageSize::SIZE_4K)?;
        Ok(Mapping::new(list, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }
}

pub fn pages(n: usize) -> SharedBuf {
    AnonHeap::new().allocate(n * 4096).unwrap().share()
}

pub fn slice(len: usize) -> BufferSlice {
    pages(len.div_ceil(4096).max(1)).into_slice().split_at(len).unwrap().0
}

/// A read into new memory, told from others by its card address.
pub fn numbered(number: u64) -> Operation {
    Operation::read(slice(64), DeviceAddr::Card(CardAddr::new(number)))
}

pub fn number(operation: &Operation) -> u64 {
    match &operation.work {
        Work::Copy { at: DeviceAddr::Card(at), .. } | Work::Fill { at: DeviceAddr::Card(at), .. } => at.bits(),
        other => panic!("it has no number: {other:?}"),
    }
}

/// The operations that a [`Device`] got, and its orders.
#[derive(Default)]
pub struct Orders {
    /// Numbers of the operations in the order in which they came.
    pub got: Vec<u64>,
    /// Whether the registration of each had another holder when it came.
    pub shared: Vec<bool>,
    /// Operations that end at the next polls.
    pub end: usize,
    /// All further ones are refused with this.
    pub refuse: Option<Refusal>,
    pub flushed: usize,
    /// The timeouts of the waits so far, and the number of the wait in which everything ends.
    pub waits: Vec<Duration>,
    pub last_wait: usize,
}

/// A queue that ends its operations in order, when told to.
pub struct Device {
    pub orders: Arc<Mutex<Orders>>,
    flying: Vec<(Ticket, Operation)>,
    capacity: usize,
    stopped: Option<StopReason>,
}

impl Device {
    pub fn new(capacity: usize) -> (Self, Arc<Mutex<Orders>>) {
        let orders = Arc::<Mutex<Orders>>::default();
        (Self { orders: orders.clone(), flying: Vec::new(), capacity, stopped: None }, orders)
    }
}

impl Queue for Device {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, max_len: 1 << 16, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FROM_HOST | Capabilities::TO_HOST | Capabilities::FILL | Capabilities::STOP
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let mut orders = self.orders.lock().unwrap();
        let reason = match (&orders.refuse, &self.stopped) {
            (Some(reason), _) => reason.clone(),
            (None, Some(reason)) => Refusal::Stopped(reason.clone()),
            _ if self.flying.len() >= self.capacity => Refusal::Full,
            _ => {
                orders.got.push(number(&operation));
                let via = operation.hosts().iter().find_map(|host| host.via.as_ref());
                orders.shared.push(via.is_some_and(Registered::is_busy));
                let ticket = Ticket::new(1000 + orders.got.len() as u64);
                self.flying.push((ticket, operation));
                return Ok(ticket);
            }
        };
        Err(Refused { operation, reason })
    }

    fn flush(&mut self) {
        self.orders.lock().unwrap().flushed += 1;
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let mut orders = self.orders.lock().unwrap();
        let n = if self.stopped.is_some() { self.flying.len() } else { orders.end.min(self.flying.len()) };
        orders.end = orders.end.saturating_sub(n);
        for (ticket, operation) in self.flying.drain(..n) {
            let result = self.stopped.clone().map_or(Ok(()), |why| Err(OpError::Stopped(why)));
            done.push(Completion { ticket, operation, result, bytes: 64 });
        }
        n
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        let mut orders = self.orders.lock().unwrap();
        orders.waits.push(timeout);
        if orders.waits.len() == orders.last_wait {
            orders.end = usize::MAX;
        }
        drop(orders);
        self.poll(done)
    }

    fn halted(&self) -> Option<StopReason> {
        self.stopped.clone()
    }

    fn stop(&mut self, reason: StopReason) {
        self.stopped = Some(reason);
    }

    fn restart(&mut self) -> bool {
        self.flying.is_empty() && self.stopped.take().is_some()
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled {
        match self.flying.iter().position(|(of, _)| *of == ticket) {
            // The first is what the device works on.
            Some(0) => Cancelled::Requested,
            Some(place) => Cancelled::Removed(self.flying.remove(place).1),
            None => Cancelled::Unknown,
        }
    }
}
