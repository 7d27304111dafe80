//! Plain slices to and from a device, through one registered buffer.

use std::time::Duration;

use dmalane_addr::Access;
use dmalane_dma::{BufferSlice, Heap, Registrar, VolatileSlice};
use dmalane_queue::{
    Capabilities, DeviceAddr, DeviceQueue, Direction, OpError, Operation, QueueAddr, Refusal, Registered, RunError,
    drain, run,
};
use thiserror::Error;

/// A registered buffer through which bytes go to a device and back, one operation at a time.
///
/// The queue must have nothing else in flight.
#[derive(Debug)]
pub struct Bounce {
    /// `None` once an operation has kept it.
    slice: Option<BufferSlice>,
    via: Registered,
    timeout: Duration,
}

/// Why bytes were not moved.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IoError {
    /// Host memory or its registration.
    #[error(transparent)]
    Memory(#[from] dmalane_dma::Error),
    /// An operation was refused, failed or did not end in time; a device that has not let go of the buffer keeps it.
    #[error("cannot access {at}")]
    Failed {
        /// Where on the device it begins.
        at: DeviceAddr,
        /// How.
        #[source]
        error: OpError,
    },
    /// An earlier operation has kept the buffer; a new one is needed.
    #[error("the device has not given the buffer back")]
    Lost,
}

impl Bounce {
    /// Registers a buffer of `len` bytes of `heap`. Each operation may take as long as `timeout`.
    ///
    /// # Errors
    /// Those of the heap and the registrar.
    pub fn new(
        registrar: &dyn Registrar,
        heap: &dyn Heap,
        len: usize,
        timeout: Duration,
    ) -> Result<Self, dmalane_dma::Error> {
        let buf = heap.allocate(len)?.share();
        let via = Registered::new(registrar, &buf, Access::RW)?;
        Ok(Self { slice: Some(buf.into_slice()), via, timeout })
    }

    /// Bytes that one operation moves at most; 0 once the buffer was lost.
    pub fn len(&self) -> usize {
        self.slice.as_ref().map_or(0, BufferSlice::len)
    }

    /// True once an operation that did not end has kept the buffer.
    pub fn is_empty(&self) -> bool {
        self.slice.is_none()
    }

    /// Writes `bytes` to the device at `at`.
    ///
    /// # Errors
    /// [`IoError`]; some of the bytes may have been written.
    pub fn write(&mut self, queue: &mut DeviceQueue, at: DeviceAddr, bytes: &[u8]) -> Result<(), IoError> {
        let mut fill = |done: u64, view: VolatileSlice<'_>| -> Result<(), IoError> {
            view.write(&bytes[done as usize..][..view.len()]);
            Ok(())
        };
        self.each(queue, Direction::FromHost, at, bytes.len() as u64, &mut fill)
    }

    /// Reads from the device at `at` until `into` is full.
    ///
    /// # Errors
    /// [`IoError`]; some of the bytes may have been read.
    pub fn read(&mut self, queue: &mut DeviceQueue, at: DeviceAddr, into: &mut [u8]) -> Result<(), IoError> {
        let len = into.len() as u64;
        self.read_each(queue, at, len, &mut |done, view| -> Result<(), IoError> {
            view.read(&mut into[done as usize..][..view.len()]);
            Ok(())
        })
    }

    /// Reads `len` bytes from the device at `at`, and hands `sink` each chunk with its offset.
    ///
    /// # Errors
    /// [`IoError`], and what `sink` returns.
    pub fn read_each<E: From<IoError>>(
        &mut self,
        queue: &mut DeviceQueue,
        at: DeviceAddr,
        len: u64,
        sink: &mut dyn FnMut(u64, VolatileSlice<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.each(queue, Direction::ToHost, at, len, sink)
    }

    /// Copies `len` bytes within the device: by the device itself where it can, else through the buffer.
    ///
    /// # Errors
    /// [`IoError`]; some of the bytes may have been copied.
    pub fn copy(&mut self, queue: &mut DeviceQueue, from: DeviceAddr, to: DeviceAddr, len: u64) -> Result<(), IoError> {
        let within = queue.capabilities().contains(Capabilities::WITHIN);
        let step = if within { queue.limits().max_len } else { self.step(queue)? };
        let mut done = 0;
        while done < len {
            let n = step.min(len - done);
            let (source, target) = (place(from, done)?, place(to, done)?);
            if within {
                run(queue, Operation::within(source, target, n), self.timeout).map_err(|e| failed(e, source).0)?;
            } else {
                self.slice = Some(self.one(queue, Direction::ToHost, source, n as usize)?);
                self.slice = Some(self.one(queue, Direction::FromHost, target, n as usize)?);
            }
            done += n;
        }
        Ok(())
    }

    /// Moves `len` bytes chunk after chunk: `work` fills each before it is written, or uses it after it was read.
    fn each<E: From<IoError>>(
        &mut self,
        queue: &mut DeviceQueue,
        direction: Direction,
        at: DeviceAddr,
        len: u64,
        work: &mut dyn FnMut(u64, VolatileSlice<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let step = self.step(queue)?;
        let mut done = 0;
        while done < len {
            let n = step.min(len - done) as usize;
            let here = place(at, done)?;
            let mut call = |slice: &BufferSlice| match slice.as_volatile_slice().sub(0, n) {
                Some(view) => work(done, view),
                None => Ok(()),
            };
            if direction == Direction::FromHost {
                call(self.slice.as_ref().ok_or(IoError::Lost)?)?;
            }
            let whole = self.one(queue, direction, here, n)?;
            let used = if direction == Direction::ToHost { call(&whole) } else { Ok(()) };
            self.slice = Some(whole);
            used?;
            done += n as u64;
        }
        Ok(())
    }

    /// Bytes of one operation.
    fn step(&self, queue: &DeviceQueue) -> Result<u64, IoError> {
        let slice = self.slice.as_ref().ok_or(IoError::Lost)?;
        Ok(queue.limits().max_len.min(slice.len() as u64))
    }

    /// Moves the first `n` bytes of the buffer, and gives it back.
    fn one(
        &mut self,
        queue: &mut DeviceQueue,
        direction: Direction,
        at: DeviceAddr,
        n: usize,
    ) -> Result<BufferSlice, IoError> {
        let whole = self.slice.take().ok_or(IoError::Lost)?;
        let (front, rest) = whole.split_at(n).map_err(|whole| {
            self.slice = Some(whole);
            IoError::Lost
        })?;
        // Operations that did not end in time before may have ended since.
        if queue.in_flight() > 0 {
            drain(queue, Duration::ZERO);
        }
        let operation = Operation::copy(direction, (front, self.via.clone()), at);
        let joined = |front: Option<BufferSlice>| front.and_then(|front| front.join(rest).ok());
        match run(queue, operation, self.timeout) {
            Ok(operation) => joined(operation.into_slice()).ok_or(IoError::Lost),
            Err(error) => {
                let (error, front) = failed(error, at);
                self.slice = joined(front);
                Err(error)
            }
        }
    }
}

fn place(at: DeviceAddr, offset: u64) -> Result<DeviceAddr, IoError> {
    at.advance(offset).ok_or(IoError::Failed { at, error: OpError::Refused(Refusal::PastTheTop) })
}

/// The error of an operation, and its buffer if that came back.
fn failed(RunError { operation, error }: RunError<DeviceAddr>, at: DeviceAddr) -> (IoError, Option<BufferSlice>) {
    (IoError::Failed { at, error }, operation.and_then(Operation::into_slice))
}
