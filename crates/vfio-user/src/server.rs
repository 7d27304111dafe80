//! The device's side of vfio-user.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::{Access, Iova, Span};
use rustix::io::Errno;
use thiserror::Error;
use vfio_bindings::bindings::vfio as abi;

use crate::ClientMemory;
use crate::capabilities::Announced;
use crate::link::Link;
use crate::wire::{Body, Command, ERROR, Fields, MAX_DATA, Message, NO_REPLY, REPLY, receive, send};

/// A region of a served device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionSpec {
    /// Bytes; 0 for one that the device does not have.
    pub len: u64,
    /// The client may read and write it.
    pub accessible: bool,
}

/// A file that contains a region at the same offsets, and the areas of it that clients can map. They access the rest
/// through messages.
pub struct MappableFile<'a> {
    /// The file: a memfd sealed against shrinking, which is safe for a client to map.
    pub file: BorrowedFd<'a>,
    /// Multiples of 4 KiB, within the region, in order.
    pub areas: Vec<Range<u64>>,
}

/// The implementation of a served device. Regions have the numbers of VFIO for PCI: 0 to 5 are BARs, 7 is the
/// configuration space.
pub trait ServedDevice {
    /// The region with this number.
    fn region(&self, index: u32) -> RegionSpec;

    /// The areas of a region that a client may map instead of sending messages. The device is not notified of writes to
    /// them.
    fn mappable(&self, _region: u32) -> Option<MappableFile<'_>> {
        None
    }

    /// Reads a region; the range has been checked. `false` where nothing can be read.
    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> bool;

    /// Writes a region; the range has been checked. `false` where nothing can be written.
    fn write(&mut self, region: u32, offset: u64, from: &[u8]) -> bool;

    /// The number of MSI-X interrupts.
    fn interrupts(&self) -> u32;

    /// Sets the eventfds of the interrupts from `first`; `None` disables an interrupt.
    fn set_interrupts(&mut self, first: u32, events: Vec<Option<OwnedFd>>);

    /// Stops and resets the device. After `true` the device accesses no memory until it is started again; `false` when
    /// it did not stop in time.
    fn reset(&mut self) -> bool;
}

/// Why serving a client ended before it closed the socket.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket failed, or the client sent a malformed message ([`io::ErrorKind::InvalidData`]).
    #[error("the client's socket failed")]
    Socket(#[from] io::Error),
    /// The first message was not a version message with a supported version and sound capabilities.
    #[error("the client's first message has no supported version (0.x), or unsound capabilities")]
    Version,
}

/// The numbers of regions and of interrupt kinds that VFIO defines for PCI.
const REGIONS: u32 = abi::VFIO_PCI_NUM_REGIONS;
const KINDS: u32 = abi::VFIO_PCI_NUM_IRQS;
/// The minor version of the protocol: 0.1.
const MINOR: u16 = 1;

/// Timeout for a client's version message, for the rest of a message, and for a client to read an answer. Between
/// requests a client may wait as long as it likes.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a client to answer when it is asked for its memory: devices stop within five seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);

/// Serves a client until it closes the socket, or until it takes more than ten seconds to send its version or the rest
/// of a message, or to read an answer. At the end the device is reset and everything is unmapped.
///
/// Memory that the client maps without a file is read and written by messages, from the threads of the device. Where
/// the client has not answered after four seconds, the access is a fault.
///
/// An invalid request is answered with an error number and has no effect.
///
/// # Errors
/// [`ServeError`]
pub fn serve(stream: UnixStream, device: &mut dyn ServedDevice, memory: &ClientMemory) -> Result<(), ServeError> {
    serve_with(TIMEOUT, stream, device, memory)
}

pub(crate) fn serve_with(
    timeout: Duration,
    stream: UnixStream,
    device: &mut dyn ServedDevice,
    memory: &ClientMemory,
) -> Result<(), ServeError> {
    let mut server = Server { device, memory };
    let served = server.run(stream, timeout);
    // A device that does not stop loses its memory too: `clear` waits for accesses in progress.
    let _ = server.device.reset();
    server.device.set_interrupts(0, (0..server.device.interrupts()).map(|_| None).collect());
    memory.clear();
    served
}

/// The answer to a request.
struct Answer {
    body: Vec<u8>,
    file: Option<OwnedFd>,
}

struct Server<'a> {
    device: &'a mut dyn ServedDevice,
    memory: &'a ClientMemory,
}

impl Server<'_> {
    fn run(&mut self, stream: UnixStream, timeout: Duration) -> Result<(), ServeError> {
        stream.set_write_timeout(Some(timeout))?;
        stream.set_read_timeout(Some(timeout))?;
        let Some(first) = receive(&stream)? else { return Ok(()) };
        let mut fields = Fields(&first.body);
        let (major, minor) = (fields.u16(), fields.u16().unwrap_or(0));
        let max_data = Announced::parse(fields.0).and_then(|announced| announced.max_data());
        let (Some(0), Ok(max_data), true) = (major, max_data, first.command == Command::Version as u16) else {
            send(&stream, first.id, first.command, REPLY | ERROR, Errno::INVAL.raw_os_error() as u32, &[], &[])?;
            return Err(ServeError::Version);
        };
        // Major 0, a minor no higher than the client's (QEMU sends 0.0 and accepts no other), and our limits as JSON
        // that ends with a zero.
        let version = u32::from(minor.min(MINOR)) << 16;
        let text = format!(
            r#"{{"capabilities":{{"max_msg_fds":{},"max_data_xfer_size":{MAX_DATA},"pgsizes":4096}}}}"#,
            crate::wire::MAX_FDS
        );
        let body = Body::default().u32(version).bytes(text.as_bytes()).bytes(&[0]);
        send(&stream, first.id, first.command, REPLY, 0, &body.0, &[])?;
        let link = Arc::new(Link::new(stream, timeout.min(ANSWER_TIMEOUT), max_data));
        // QEMU announces 0.0. Its first vfio-user counts in 32 bits, which puts the bytes of memory in a message four
        // bytes before their place; 11.1 does not. Nothing tells them apart.
        self.memory.set_link((minor > 0).then(|| link.clone()));
        let served = self.answer_all(&link);
        link.end(None);
        self.memory.set_link(None);
        served
    }

    fn answer_all(&mut self, link: &Link) -> Result<(), ServeError> {
        while let Some(mut message) = link.request()? {
            let fds = std::mem::take(&mut message.fds);
            let done = Command::from_number(message.command).ok_or(Errno::NOTSUP);
            match done.and_then(|command| self.handle(command, &message, fds)) {
                _ if message.flags & NO_REPLY != 0 => {}
                Ok(Answer { body, file }) => {
                    link.answer(&message, 0, &body, file.as_ref().map(AsFd::as_fd).as_slice())?
                }
                Err(errno) => link.answer(&message, errno.raw_os_error() as u32, &[], &[])?,
            }
        }
        Ok(())
    }

    fn handle(&mut self, command: Command, message: &Message, fds: Vec<OwnedFd>) -> Result<Answer, Errno> {
        let mut fields = Fields(&message.body);
        match command {
            Command::RegionInfo => self.region_info(&mut fields),
            _ => self.answer(command, &mut fields, fds).map(|body| Answer { body, file: None }),
        }
    }

    /// Answers with the kernel's structure and a capability that lists the mappable areas. A client without room for it
    /// learns the required size and asks again.
    fn region_info(&mut self, fields: &mut Fields<'_>) -> Result<Answer, Errno> {
        const CUT: Errno = Errno::INVAL;
        const PLAIN: u32 = 32;
        let (argsz, _flags, index) = (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
        if index >= REGIONS {
            return Err(Errno::INVAL);
        }
        let region = self.device.region(index);
        let mut flags =
            if region.accessible { abi::VFIO_REGION_INFO_FLAG_READ | abi::VFIO_REGION_INFO_FLAG_WRITE } else { 0 };
        let mappable = self.device.mappable(index).filter(|m| !m.areas.is_empty());
        let Some(MappableFile { file, areas }) = mappable else {
            let body = Body::default().u32(PLAIN).u32(flags).u32(index).u32(0).u64(region.len).u64(0);
            return Ok(Answer { body: body.0, file: None });
        };
        flags |= abi::VFIO_REGION_INFO_FLAG_MMAP;
        let whole = PLAIN + 16 + 16 * areas.len() as u32;
        if argsz < whole {
            let body = Body::default().u32(whole).u32(flags).u32(index).u32(0).u64(region.len).u64(0);
            return Ok(Answer { body: body.0, file: None });
        }
        flags |= abi::VFIO_REGION_INFO_FLAG_CAPS;
        // The region begins where its file does. The capability: its number and version, no next one, how many areas.
        let body = Body::default().u32(whole).u32(flags).u32(index).u32(PLAIN).u64(region.len).u64(0);
        let body = body.u32(abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP | 1 << 16).u32(0).u32(areas.len() as u32).u32(0);
        let body = areas.iter().fold(body, |body, area| body.u64(area.start).u64(area.end - area.start));
        let file = file.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        Ok(Answer { body: body.0, file: Some(file) })
    }

    /// The body of the answer.
    fn answer(&mut self, command: Command, fields: &mut Fields<'_>, fds: Vec<OwnedFd>) -> Result<Vec<u8>, Errno> {
        const CUT: Errno = Errno::INVAL;
        let body = Body::default();
        match command {
            // Only at the beginning; what `handle` has taken; and what the device sends.
            Command::Version | Command::RegionInfo | Command::DmaRead | Command::DmaWrite => Err(Errno::INVAL),
            Command::Feature | Command::MigrationRead | Command::MigrationWrite => Err(Errno::NOTSUP),
            Command::DeviceInfo => {
                let flags = abi::VFIO_DEVICE_FLAGS_PCI | abi::VFIO_DEVICE_FLAGS_RESET;
                Ok(body.u32(16).u32(flags).u32(REGIONS).u32(KINDS).0)
            }
            Command::IrqInfo => {
                let (_argsz, _flags, index) =
                    (fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?, fields.u32().ok_or(CUT)?);
                if index >= KINDS {
                    return Err(Errno::INVAL);
                }
                let count = if index == abi::VFIO_PCI_MSIX_IRQ_INDEX { self.device.interrupts() } else { 0 };
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
                self.memory.map(span, access, fds.into_iter().next(), offset).map(|()| Vec::new())
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
                let spec = if region < REGIONS { self.device.region(region) } else { RegionSpec::default() };
                let end = offset.checked_add(count.into()).filter(|end| *end <= spec.len);
                if count as usize > MAX_DATA || end.is_none() || !spec.accessible {
                    return Err(Errno::INVAL);
                }
                let answer = body.u64(offset).u32(region).u32(count);
                if command == Command::RegionRead {
                    let mut data = vec![0; count as usize];
                    return match self.device.read(region, offset, &mut data) {
                        true => Ok(answer.bytes(&data).0),
                        false => Err(Errno::IO),
                    };
                }
                let data = fields.0.get(..count as usize).ok_or(CUT)?;
                if self.device.write(region, offset, data) { Ok(answer.0) } else { Err(Errno::IO) }
            }
            Command::Reset => {
                if self.device.reset() {
                    Ok(Vec::new())
                } else {
                    Err(Errno::TIMEDOUT)
                }
            }
        }
    }

    fn set_irqs(&mut self, flags: u32, index: u32, start: u32, count: u32, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        if index != abi::VFIO_PCI_MSIX_IRQ_INDEX {
            // Nothing to set, so nothing to refuse when it is turned off.
            return if fds.is_empty() && index < KINDS { Ok(()) } else { Err(Errno::INVAL) };
        }
        let there = self.device.interrupts();
        let end = start.checked_add(count).filter(|end| *end <= there).ok_or(Errno::INVAL)?;
        match flags & abi::VFIO_IRQ_SET_DATA_TYPE_MASK {
            abi::VFIO_IRQ_SET_DATA_NONE if flags & abi::VFIO_IRQ_SET_ACTION_TRIGGER != 0 && count == 0 => {
                self.device.set_interrupts(0, (0..there).map(|_| None).collect());
            }
            // Masking is the client's: it leaves its eventfd alone.
            abi::VFIO_IRQ_SET_DATA_NONE => {}
            abi::VFIO_IRQ_SET_DATA_EVENTFD if fds.len() as u32 == end - start => {
                self.device.set_interrupts(start, fds.into_iter().map(Some).collect());
            }
            abi::VFIO_IRQ_SET_DATA_EVENTFD if fds.is_empty() => {
                self.device.set_interrupts(start, (start..end).map(|_| None).collect());
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::SharedBuf;

    use super::*;

    /// A device with a region 2 of 64 KiB, whose second page is not mappable, that never stops.
    struct Stuck {
        memory: Vec<SharedBuf>,
        file: OwnedFd,
    }

    impl ServedDevice for Stuck {
        fn region(&self, index: u32) -> RegionSpec {
            RegionSpec { len: if index == 2 { 64 << 10 } else { 0 }, accessible: index == 2 }
        }

        fn mappable(&self, index: u32) -> Option<MappableFile<'_>> {
            (index == 2).then(|| MappableFile { file: self.file.as_fd(), areas: vec![0..0x1000, 0x2000..0x1_0000] })
        }

        fn read(&mut self, _: u32, offset: u64, into: &mut [u8]) -> bool {
            let slice = self.memory[0].as_volatile_slice().sub(offset as usize, into.len());
            slice.map(|slice| slice.read(into)).is_some()
        }

        fn write(&mut self, _: u32, offset: u64, from: &[u8]) -> bool {
            let slice = self.memory[0].as_volatile_slice().sub(offset as usize, from.len());
            slice.map(|slice| slice.write(from)).is_some()
        }

        fn interrupts(&self) -> u32 {
            0
        }

        fn set_interrupts(&mut self, _: u32, _: Vec<Option<OwnedFd>>) {}

        fn reset(&mut self) -> bool {
            false
        }
    }

    /// Runs a test with a client that encodes its messages itself.
    fn with_client(test: impl FnOnce(&mut dyn FnMut(Command, &[u8]) -> Message)) {
        if rustix::param::page_size() > 4096 {
            return println!("SKIPPED: areas of 4 KiB cannot be mapped on a kernel with larger pages");
        }
        let (client, stream) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let (memory, file) = SharedBuf::sparse_ranges("test", &[0..0x1000, 0x2000..0x1_0000]).unwrap();
            serve(stream, &mut Stuck { memory, file }, &ClientMemory::new())
        });
        let mut ask = move |command: Command, body: &[u8]| {
            send(&client, 7, command as u16, 0, 0, body, &[]).unwrap();
            receive(&client).unwrap().unwrap()
        };
        test(&mut ask);
        drop(ask);
        server.join().unwrap().unwrap();
    }

    fn info(argsz: u32, index: u32) -> Vec<u8> {
        Body::default().u32(argsz).u32(0).u32(index).u32(0).u64(0).u64(0).0
    }

    #[test]
    fn the_version_is_at_most_the_clients() {
        for (minor, wanted) in [(0, 0), (1, 1), (9, 1)] {
            with_client(|ask| {
                let answer = ask(Command::Version, &Body::default().u32(minor << 16).bytes(b"{}\0").0);
                let mut fields = Fields(&answer.body);
                assert_eq!((fields.u16(), fields.u16()), (Some(0), Some(wanted)));
            });
        }
    }

    #[test]
    fn mappable_areas_are_listed_if_the_client_has_room() {
        with_client(|ask| {
            ask(Command::Version, &Body::default().u32(0).bytes(b"{}\0").0);
            // As in the kernel: without room for the list, the answer is the required size, and no descriptor.
            let short = ask(Command::RegionInfo, &info(32, 2));
            let mut fields = Fields(&short.body);
            let (argsz, flags) = (fields.u32().unwrap(), fields.u32().unwrap());
            assert_eq!((argsz, flags, short.body.len(), short.fds.len()), (80, 7, 32, 0));
            let whole = ask(Command::RegionInfo, &info(argsz, 2));
            let mut fields = Fields(&whole.body);
            let head: Vec<_> = (0..4).map(|_| fields.u32().unwrap()).collect();
            assert_eq!((head, fields.u64(), fields.u64()), (vec![80, 15, 2, 32], Some(64 << 10), Some(0)));
            let capability: Vec<_> = (0..4).map(|_| fields.u32().unwrap()).collect();
            assert_eq!(capability, [0x1_0001, 0, 2, 0]);
            let areas: Vec<_> = (0..4).map(|_| fields.u64().unwrap()).collect();
            assert_eq!((areas, fields.0.len(), whole.fds.len()), (vec![0, 0x1000, 0x2000, 0xe000], 0, 1));
            // The file and the messages access the same bytes.
            let write = Body::default().u64(8).u32(2).u32(4).bytes(b"sent").0;
            assert_eq!(ask(Command::RegionWrite, &write).flags, REPLY);
            let mut bytes = [0; 4];
            rustix::io::pread(&whole.fds[0], &mut bytes, 8).unwrap();
            assert_eq!(&bytes, b"sent");
            rustix::io::pwrite(&whole.fds[0], b"seen", 16).unwrap();
            let read = ask(Command::RegionRead, &Body::default().u64(16).u32(2).u32(4).0);
            assert_eq!(&read.body[16..], b"seen");
            // A region without mappable areas, and one that does not exist.
            let plain = ask(Command::RegionInfo, &info(4096, 1));
            assert_eq!((&plain.body[..8], plain.fds.len()), (&[32, 0, 0, 0, 0, 0, 0, 0][..], 0));
            assert_eq!(ask(Command::RegionInfo, &info(4096, 99)).flags, REPLY | ERROR);
        });
    }

    #[test]
    fn a_client_that_does_not_send_or_read_times_out() {
        // Long enough for a client that greets at once.
        let timeout = Duration::from_secs(1);
        let serve = move |stream| {
            let (memory, file) = SharedBuf::sparse_ranges("test", &[0..0x1000, 0x2000..0x1_0000]).unwrap();
            serve_with(timeout, stream, &mut Stuck { memory, file }, &ClientMemory::new())
        };
        let is_late = |served| match served {
            Err(ServeError::Socket(e)) => e.kind() == io::ErrorKind::WouldBlock,
            _ => false,
        };
        let (_silent, stream) = UnixStream::pair().unwrap();
        assert!(is_late(serve(stream)));
        let (client, stream) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve(stream));
        send(&client, 1, Command::Version as u16, 0, 0, &Body::default().u32(0).0, &[]).unwrap();
        receive(&client).unwrap().unwrap();
        // After the version message the client is silent, and then it does not read.
        std::thread::sleep(timeout + timeout / 4);
        assert!(!server.is_finished());
        let read = Body::default().u64(0).u32(2).u32(0x1000).0;
        while send(&client, 1, Command::RegionRead as u16, 0, 0, &read, &[]).is_ok() {}
        assert!(is_late(server.join().unwrap()));
    }

    #[test]
    fn a_failed_reset_is_an_error() {
        with_client(|ask| {
            ask(Command::Version, &Body::default().u32(0).bytes(b"{}\0").0);
            let answer = ask(Command::Reset, &[]);
            assert_eq!((answer.flags, answer.error), (REPLY | ERROR, Errno::TIMEDOUT.raw_os_error() as u32));
        });
    }
}
