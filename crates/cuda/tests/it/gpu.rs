//! A GPU with its queues taken, and plain calls on it.

use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::{Access, CardAddr, SgTable, Span};
use dmalane_cuda::{Binds, CudaDevice, Error};
use dmalane_device::{Device, DeviceMemory, Placement};
use dmalane_dma::{AnonHeap, Heap, Registrar, error_chain};
use dmalane_fake_cuda::Fake;
use dmalane_queue::{DeviceAddr, DeviceQueue, HostSlice, Operation, Registered, run};

pub const LONG: Duration = Duration::from_secs(60);

/// A GPU by name, the library of its driver, and how it binds.
#[derive(Clone)]
pub struct Name {
    pub gpu: String,
    pub library: Option<String>,
    pub binds: Binds,
}

impl Name {
    pub fn open(&self) -> Result<CudaDevice, Error> {
        CudaDevice::open(&self.gpu, self.library.as_deref(), self.binds)
    }
}

/// The name of the fake driver's first GPU.
pub fn named(fake: &Fake, binds: Binds) -> Name {
    Name { gpu: "0".to_owned(), library: Some(fake.path().to_owned()), binds }
}

/// The GPU of this machine, if the tests are to use it: `DMALANE_TEST_CUDA=0` runs them on GPU 0 of the real driver.
pub fn real(binds: Binds) -> Option<Name> {
    Some(Name { gpu: std::env::var("DMALANE_TEST_CUDA").ok()?, library: None, binds })
}

/// A device and what belongs to it, in the order in which it is dropped.
pub struct Gpu {
    pub queues: Vec<Box<DeviceQueue>>,
    pub memory: DeviceMemory,
    pub registrar: Arc<dyn Registrar>,
    pub device: CudaDevice,
}

impl Gpu {
    pub fn open(name: &Name) -> Result<Self, Error> {
        let mut device = name.open()?;
        let mut queues = device.take_queues();
        queues.push(device.open_queue()?);
        Ok(Self { queues, memory: device.memory(), registrar: device.registrar(), device })
    }

    /// Allocates one range.
    pub fn allocate(&mut self, len: u64) -> Result<(SgTable<CardAddr>, Span<CardAddr>), String> {
        let table = self.memory.allocate(len, &Placement::Default).map_err(|e| error_chain(&e))?;
        let only = table.segments().next().and_then(|s| Span::new(s.addr, s.len)).unwrap();
        Ok((table, only))
    }

    /// A registered slice of exactly these bytes.
    pub fn host(&self, bytes: &[u8]) -> Result<HostSlice, String> {
        let mut buf = AnonHeap::new().allocate(bytes.len()).unwrap();
        buf[..bytes.len()].copy_from_slice(bytes);
        let buf = buf.share();
        let via = Registered::new(&*self.registrar, &buf, Access::RW).map_err(|e| error_chain(&e))?;
        Ok((buf.into_slice().split_at(bytes.len()).unwrap().0, via).into())
    }

    pub fn run(&mut self, queue: usize, operation: Operation) -> Result<Operation, String> {
        run(&mut *self.queues[queue], operation, LONG).map_err(|e| error_chain(&e))
    }

    pub fn write(&mut self, queue: usize, at: DeviceAddr, bytes: &[u8]) -> Result<(), String> {
        let host = self.host(bytes)?;
        self.run(queue, Operation::write(host, at)).map(drop)
    }

    pub fn read(&mut self, queue: usize, at: DeviceAddr, len: u64) -> Result<Vec<u8>, String> {
        let host = self.host(&vec![0xa5; len as usize])?;
        let slice = self.run(queue, Operation::read(host, at))?.into_slice().unwrap();
        let mut bytes = vec![0; len as usize];
        slice.read(0, &mut bytes).unwrap();
        Ok(bytes)
    }
}
