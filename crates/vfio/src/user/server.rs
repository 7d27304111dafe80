//! The device's side of vfio-user.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use dmalane_addr::{Access, Iova, Span};
use rustix::io::Errno;
use thiserror::Error;
use vfio_bindings::bindings::vfio as abi;

use super::ClientMemory;
use super::wire::{Body, Command, ERROR, Fields, MAX_DATA, Message, NO_REPLY, REPLY, receive, send};

/// A region of a device that is served: its length, and what may be done with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionSpec {
    /// Bytes; 0 for one that the device does not have.
    pub len: u64,
    /// It may be read and written.
    pub usable: bool,
}

/// A device that is served. Regions are numbered as VFIO numbers those of PCI: 0 to 5 are BARs, 7 is the configuration space.
pub trait Model {
    /// The region with this number.
    fn region(&self, index: u32) -> RegionSpec;

    /// Reads a region, whose length has been checked. `false` where there is nothing to read.
    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> bool;

    /// Writes a region, whose length has been checked. `false` where there is nothing to write.
    fn write(&mut self, region: u32, offset: u64, from: &[u8]) -> bool;

    /// How many MSI-X interrupts there are.
    fn interrupts(&self) -> u32;

    /// Interrupts from `first` on raise these eventfds from now on; `None` for one that is off.
    fn set_interrupts(&mut self, first: u32, events: Vec<Option<OwnedFd>>);

    /// Ends whatever the device is doing. When it returns, the device accesses no memory.
    fn reset(&mut self);
}

/// Why serving a client ended before it closed the socket.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket failed, or what came over it are no messages.
    #[error("the client's socket: {0}")]
    Socket(#[from] io::Error),
    /// The first message was not a greeting in a version that this speaks.
    #[error("the client did not begin with a version that this speaks (0.x)")]
    Version,
}

/// Regions that VFIO has for PCI, and kinds of interrupts.
const REGIONS: u32 = abi::VFIO_PCI_NUM_REGIONS;
const KINDS: u32 = abi::VFIO_PCI_NUM_IRQS;

/// Answers a client until it closes the socket. Whatever becomes of it, the device is reset at the end and nothing stays mapped.
///
/// A request that cannot be carried out is answered with an error number and changes nothing.
///
/// # Errors
/// [`ServeError`]
pub fn serve(mut stream: UnixStream, model: &mut dyn Model, memory: &ClientMemory) -> Result<(), ServeError> {
    let mut server = Server { model, memory };
    let served = server.run(&mut stream);
    server.model.reset();
    server.model.set_interrupts(0, (0..server.model.interrupts()).map(|_| None).collect());
    memory.clear();
    served
}

struct Server<'a> {
    model: &'a mut dyn Model,
    memory: &'a ClientMemory,
}

impl Server<'_> {
    fn run(&mut self, stream: &mut UnixStream) -> Result<(), ServeError> {
        let Some(first) = receive(stream)? else { return Ok(()) };
        let major = Fields(&first.body).u16();
        if first.command != Command::Version as u16 || major != Some(0) {
            refuse(stream, &first, Errno::INVAL)?;
            return Err(ServeError::Version);
        }
        // Major 0, minor 1, and what we can take, as JSON that ends with a zero.
        let text = format!(
            r#"{{"capabilities":{{"max_msg_fds":{},"max_data_xfer_size":{MAX_DATA},"pgsizes":4096}}}}"#,
            super::wire::MAX_FDS
        );
        let body = Body::default().u32(1 << 16).bytes(text.as_bytes()).bytes(&[0]);
        send(stream, first.id, first.command, REPLY, 0, &body.0, &[])?;
        while let Some(mut message) = receive(stream)? {
            let fds = std::mem::take(&mut message.fds);
            let done = Command::from_number(message.command).ok_or(Errno::NOTSUP);
            match done.and_then(|command| self.carry_out(command, &message, fds)) {
                _ if message.flags & NO_REPLY != 0 => {}
                Ok(body) => send(stream, message.id, message.command, REPLY, 0, &body, &[])?,
                Err(errno) => refuse(stream, &message, errno)?,
            }
        }
        Ok(())
    }

    /// The body of the answer.
    fn carry_out(&mut self, command: Command, message: &Message, fds: Vec<OwnedFd>) -> Result<Vec<u8>, Errno> {
        let mut fields = Fields(&message.body);
        self.answer(command, &mut fields, fds, message)
    }

    fn answer(
        &mut self,
        command: Command,
        fields: &mut Fields<'_>,
        fds: Vec<OwnedFd>,
        message: &Message,
    ) -> Result<Vec<u8>, Errno> {
        const CUT: Errno = Errno::INVAL;
        let body = Body::default();
        match command {
            // Only at the beginning.
            Command::Version => Err(Errno::INVAL),
            Command::DeviceInfo => {
                let flags = abi::VFIO_DEVICE_FLAGS_PCI | abi::VFIO_DEVICE_FLAGS_RESET;
                Ok(body.u32(16).u32(flags).u32(REGIONS).u32(KINDS).0)
            }
            Command::RegionInfo => {
                let (_argsz, _flags, index) =
                    (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
                if index >= REGIONS {
                    return Err(Errno::INVAL);
                }
                let region = self.model.region(index);
                let usable = abi::VFIO_REGION_INFO_FLAG_READ | abi::VFIO_REGION_INFO_FLAG_WRITE;
                let flags = if region.usable { usable } else { 0 };
                // No capabilities; where it begins in a file is 0, since none comes with it.
                Ok(body.u32(32).u32(flags).u32(index).u32(0).u64(region.len).u64(0).0)
            }
            Command::IrqInfo => {
                let (_argsz, _flags, index) =
                    (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
                if index >= KINDS {
                    return Err(Errno::INVAL);
                }
                let count = if index == abi::VFIO_PCI_MSIX_IRQ_INDEX { self.model.interrupts() } else { 0 };
                let flags = abi::VFIO_IRQ_INFO_EVENTFD | abi::VFIO_IRQ_INFO_NORESIZE;
                Ok(body.u32(16).u32(flags).u32(index).u32(count).0)
            }
            Command::SetIrqs => {
                let _argsz = fields.u32().ok_or(CUT)?;
                let mut next = || fields.u32().ok_or(CUT);
                let (flags, index, start, count) = (next()?, next()?, next()?, next()?);
                self.set_irqs(flags, index, start, count, fds).map(|()| Vec::new())
            }
            Command::DmaMap => {
                let (_argsz, flags) = (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
                let mut next = || fields.u64().ok_or(CUT);
                let (offset, address, size) = (next()?, next()?, next()?);
                let span = Span::new(Iova::new(address), size).ok_or(Errno::INVAL)?;
                let mut access = Access::empty();
                access.set(Access::READ, flags & 1 != 0);
                access.set(Access::WRITE, flags & 2 != 0);
                // Without one the client wants to be asked for each access, over the socket: not done here.
                let fd = fds.into_iter().next().ok_or(Errno::NOTSUP)?;
                self.memory.map(span, access, fd, offset).map(|()| Vec::new())
            }
            Command::DmaUnmap => {
                let (argsz, flags) = (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
                let (address, size) = (fields.u64().ok_or(CUT)?, fields.u64().ok_or(CUT)?);
                match flags {
                    0 => self.memory.unmap(Span::new(Iova::new(address), size).ok_or(Errno::INVAL)?)?,
                    abi::VFIO_DMA_UNMAP_FLAG_ALL if (address, size) == (0, 0) => self.memory.clear(),
                    _ => return Err(Errno::INVAL),
                }
                Ok(body.u32(argsz).u32(flags).u64(address).u64(size).0)
            }
            Command::RegionRead | Command::RegionWrite => {
                let offset = fields.u64().ok_or(CUT)?;
                let (region, count) = (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
                let spec = if region < REGIONS { self.model.region(region) } else { RegionSpec::default() };
                let end = offset.checked_add(count.into()).filter(|end| *end <= spec.len);
                if count as usize > MAX_DATA || end.is_none() || !spec.usable {
                    return Err(Errno::INVAL);
                }
                let answer = body.u64(offset).u32(region).u32(count);
                if command == Command::RegionRead {
                    let mut data = vec![0; count as usize];
                    return match self.model.read(region, offset, &mut data) {
                        true => Ok(answer.bytes(&data).0),
                        false => Err(Errno::IO),
                    };
                }
                let data = fields.0.get(..count as usize).ok_or(CUT)?;
                if self.model.write(region, offset, data) { Ok(answer.0) } else { Err(Errno::IO) }
            }
            Command::Reset => {
                let _ = message;
                self.model.reset();
                Ok(Vec::new())
            }
        }
    }

    fn set_irqs(&mut self, flags: u32, index: u32, start: u32, count: u32, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        if index != abi::VFIO_PCI_MSIX_IRQ_INDEX {
            // Nothing to set, so nothing to refuse when it is turned off.
            return if fds.is_empty() && index < KINDS { Ok(()) } else { Err(Errno::INVAL) };
        }
        let there = self.model.interrupts();
        let end = start.checked_add(count).filter(|end| *end <= there).ok_or(Errno::INVAL)?;
        match flags & abi::VFIO_IRQ_SET_DATA_TYPE_MASK {
            abi::VFIO_IRQ_SET_DATA_NONE if flags & abi::VFIO_IRQ_SET_ACTION_TRIGGER != 0 && count == 0 => {
                self.model.set_interrupts(0, (0..there).map(|_| None).collect());
            }
            // Masking is the client's: it leaves its eventfd alone.
            abi::VFIO_IRQ_SET_DATA_NONE => {}
            abi::VFIO_IRQ_SET_DATA_EVENTFD if fds.len() as u32 == end - start => {
                self.model.set_interrupts(start, fds.into_iter().map(Some).collect());
            }
            abi::VFIO_IRQ_SET_DATA_EVENTFD if fds.is_empty() => {
                self.model.set_interrupts(start, (start..end).map(|_| None).collect());
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }
}

fn refuse(stream: &mut UnixStream, message: &Message, errno: Errno) -> io::Result<()> {
    send(stream, message.id, message.command, REPLY | ERROR, errno.raw_os_error() as u32, &[], &[])
}
