//! A device's process that enforces its limits as SPDK and libvfio-user do: tests of the client.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use dmalane_addr::Access;
use dmalane_dma::{Error as DmaError, Heap, MemfdHeap, Mmio, PageKind, Registrar};
use vfio_bindings::bindings::vfio as abi;

use crate::wire::{Body, Command, ERROR, Fields, MAX_DATA, Message, REPLY, receive, send};
use crate::{Error, ProtocolError, UserBus};

const VECTORS: u32 = 16;
const BAR: usize = 4096;
/// States of migration.
const STOP: u32 = 1;
const RUNNING: u32 = 2;
const STOP_COPY: u32 = 3;
const RESUMING: u32 = 4;

/// The process, with what it was asked for.
#[derive(Default)]
struct Strict {
    /// What it announces, and enforces.
    fds: usize,
    data: u64,
    page: u64,
    most_mapped: Option<usize>,
    vectors: BTreeSet<u32>,
    bar: Vec<u8>,
    config: Vec<u8>,
    mapped: BTreeMap<u64, u64>,
    /// All mappings: address, length, place in the file.
    maps: Vec<[u64; 3]>,
    refused: Vec<Command>,
    largest: u64,
    /// Migration: whether it runs, what it saves and how much of that was read, and what was restored.
    state: u32,
    saved: Vec<u8>,
    read: usize,
    restored: Vec<u8>,
}

impl Strict {
    /// Answers a request; `None` refuses it.
    fn answer(&mut self, command: Command, message: &Message) -> Option<Vec<u8>> {
        let (mut fields, fds, body) = (Fields(&message.body), message.fds.len(), Body::default());
        if fds > self.fds {
            return None;
        }
        let bytes = |this: &mut Self, region| match region {
            0 => Some(std::mem::take(&mut this.bar)),
            7 => Some(std::mem::take(&mut this.config)),
            _ => None,
        };
        match command {
            Command::DeviceInfo => Some(body.u32(16).u32(3).u32(9).u32(5).0),
            Command::RegionInfo => {
                let index = fields.0.get(8..).map(Fields)?.u32()?;
                let len = [BAR as u64, 0, 0, 0, 0, 0, 0, 256, 0].get(index as usize)?;
                Some(body.u32(32).u32(3).u32(index).u32(0).u64(*len).u64(0).0)
            }
            Command::IrqInfo => Some(body.u32(16).u32(1).u32(abi::VFIO_PCI_MSIX_IRQ_INDEX).u32(VECTORS).0),
            Command::SetIrqs => {
                let mut next = || fields.u32();
                let (_argsz, flags, _index, start, count) = (next()?, next()?, next()?, next()?, next()?);
                let wanted = abi::VFIO_IRQ_SET_DATA_EVENTFD | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
                if flags != wanted || fds != count as usize || count == 0 || start + count > VECTORS {
                    return None;
                }
                self.vectors.extend(start..start + count);
                Some(Vec::new())
            }
            Command::RegionRead | Command::RegionWrite => {
                let (offset, region, count) = (fields.u64()?, fields.u32()?, fields.u32()?);
                self.largest = self.largest.max(count.into());
                let mut all = bytes(self, region)?;
                let at = offset as usize..offset as usize + count as usize;
                let ok = match command {
                    // The command register is read as two bytes, whatever the count.
                    Command::RegionWrite if region == 7 => (offset, count) == (4, 2),
                    _ => u64::from(count) <= self.data,
                };
                let answer = body.u64(offset).u32(region).u32(count);
                let answer = match command {
                    Command::RegionRead => answer.bytes(&all[at]).0,
                    _ if fields.0.len() != count as usize => return None,
                    _ => {
                        all[at].copy_from_slice(fields.0);
                        answer.0
                    }
                };
                if region == 0 {
                    self.bar = all
                } else {
                    self.config = all
                }
                ok.then_some(answer)
            }
            Command::DmaMap => {
                let (_argsz, _flags) = (fields.u32()?, fields.u32()?);
                let (offset, at, len) = (fields.u64()?, fields.u64()?, fields.u64()?);
                let aligned = (offset | at | len).is_multiple_of(self.page);
                self.maps.push([at, len, offset]);
                let room = self.most_mapped.is_none_or(|most| self.mapped.len() < most);
                (aligned && room && fds == 1 && self.mapped.insert(at, len).is_none()).then(Vec::new)
            }
            Command::DmaUnmap => {
                let (argsz, flags, at, len) = (fields.u32()?, fields.u32()?, fields.u64()?, fields.u64()?);
                // Only what was mapped, and whole.
                self.mapped.remove(&at).filter(|mapped| *mapped == len)?;
                Some(body.u32(argsz).u32(flags).u64(at).u64(len).0)
            }
            // All of it, as a function's own reset does.
            Command::Reset => {
                self.config.fill(0);
                self.state = RUNNING;
                Some(Vec::new())
            }
            Command::Feature => {
                let next = [fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?];
                // Through what lies between; not from saving or restoring into itself.
                let goes = (STOP..=RESUMING).contains(&next[2]) && (next[2] != self.state || next[2] <= RUNNING);
                (self.state, self.read) = (next[2], 0);
                (goes && next[..2] == [16, 1 << 17 | 2]).then(|| message.body.clone())
            }
            Command::MigrationRead => {
                let (argsz, size) = (fields.u32()?, fields.u32()?);
                let part = self.read..self.saved.len().min(self.read + size as usize);
                self.read = part.end;
                let fits = self.state == STOP_COPY && u64::from(size) <= self.data && argsz == 8 + size;
                let len = part.len() as u32;
                fits.then(|| body.u32(8 + len).u32(len).bytes(&self.saved[part]).0)
            }
            Command::MigrationWrite => {
                let (argsz, size) = (fields.u32()?, fields.u32()?);
                self.restored.extend(fields.0);
                let fits = self.state == RESUMING && u64::from(size) <= self.data && argsz == 8 + size;
                (fits && fields.0.len() == size as usize).then(Vec::new)
            }
            _ => None,
        }
    }
}

/// Connects a client to a process that answers the version message with these data, and enforces its limits. The
/// process is given when the client has gone.
fn with(capabilities: &str, limits: (usize, u64, u64), test: impl FnOnce(Result<UserBus, Error>)) -> Strict {
    let (fds, data, page) = limits;
    let bar = (0..BAR).map(|i| i as u8).collect();
    with_state(
        Strict { fds, data, page, bar, config: vec![0; 256], state: RUNNING, ..Strict::default() },
        capabilities,
        test,
    )
}

fn with_state(state: Strict, capabilities: &str, test: impl FnOnce(Result<UserBus, Error>)) -> Strict {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let state = Arc::new(Mutex::new(state));
    let mut text = Body::default().u32(1 << 16).bytes(capabilities.as_bytes()).0;
    if !capabilities.is_empty() {
        text.push(0);
    }
    let shared = state.clone();
    let server = std::thread::spawn(move || {
        let mut state = shared.lock().unwrap();
        while let Ok(Some(message)) = receive(&theirs) {
            let command = Command::from_number(message.command).unwrap();
            let answer = if command == Command::Version { Some(text.clone()) } else { state.answer(command, &message) };
            if answer.is_none() {
                state.refused.push(command);
            }
            let (flags, errno) = if answer.is_some() { (REPLY, 0) } else { (REPLY | ERROR, libc::EINVAL as u32) };
            let body = answer.unwrap_or_default();
            send(&theirs, message.id, message.command, flags, errno, &body, &[]).unwrap();
        }
    });
    test(UserBus::over(ours));
    server.join().unwrap();
    Arc::into_inner(state).unwrap().into_inner().unwrap()
}

/// Everything that a driver does with a bus.
fn drive(bus: Result<UserBus, Error>) {
    let bus = bus.unwrap();
    let mut bytes = vec![0; BAR];
    bus.read_region(0, 0, &mut bytes).unwrap();
    assert!(bytes.iter().enumerate().all(|(i, byte)| *byte == i as u8));
    bytes.reverse();
    bus.write_bytes(0, 0, &bytes).unwrap();
    bus.reset().unwrap();
    let mut command = [0; 2];
    bus.read_region(7, 4, &mut command).unwrap();
    assert_eq!(command, [6, 0], "it may access memory and responds at its BARs, as before the reset");
    let heap = bus.heap(Some(PageKind::Base));
    let buffers = [1, 5000, 70_000].map(|len| heap.allocate(len).unwrap().share());
    let pin = |i: usize| bus.pin(&buffers[i].reference()).unwrap();
    let single = bus.map(pin(1), Access::RW).unwrap();
    let list = bus.map_list((0..3).map(pin).collect(), Access::READ).unwrap();
    drop((list, single));
    assert_eq!(bus.mapped_bytes(), 0);
    drop(bus.map_list((1..3).map(pin).collect(), Access::READ).unwrap());
}

#[test]
fn announced_limits_are_kept() {
    const ALL: (usize, u64, u64) = (16, MAX_DATA as u64, 4096);
    for (capabilities, limits) in [
        // What is absent has the specification's values.
        ("", (1, ALL.1, ALL.2)),
        ("{}", (1, ALL.1, ALL.2)),
        (r#"{"capabilities":{}}"#, (1, ALL.1, ALL.2)),
        // One limit at a time.
        (r#"{"capabilities":{"max_msg_fds":1}}"#, (1, ALL.1, ALL.2)),
        (r#"{"capabilities":{"max_msg_fds":5}}"#, (5, ALL.1, ALL.2)),
        (r#"{"capabilities":{"max_msg_fds":1000000}}"#, ALL),
        (r#"{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":8}}"#, (16, 8, ALL.2)),
        (r#"{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":100}}"#, (16, 100, ALL.2)),
        (r#"{"capabilities":{"max_msg_fds":16,"pgsizes":65536}}"#, (16, ALL.1, 65536)),
        (r#"{"capabilities":{"max_msg_fds":16,"pgsizes":1075838976}}"#, (16, ALL.1, 2 << 20)),
        (r#"{"capabilities":{"max_msg_fds":16,"pgsizes":18446744073709551615}}"#, ALL),
        // libvfio-user's and SPDK's.
        (
            r#"{ "capabilities": { "max_msg_fds": 8, "max_data_xfer_size": 1048576, "migration": { "pgsize": 1 } } }"#,
            (8, ALL.1, ALL.2),
        ),
    ] {
        let state = with(capabilities, limits, drive);
        assert_eq!(state.refused, [], "{capabilities}");
        assert_eq!(state.vectors, (0..VECTORS).collect(), "{capabilities}");
        assert_eq!(state.largest, (BAR as u64).min(limits.1 & !7), "{capabilities}: no smaller than it must be");
        assert!(state.mapped.is_empty() && state.maps.len() == 6, "{capabilities}");
        assert!(state.bar.iter().rev().enumerate().all(|(i, byte)| *byte == i as u8));
        assert_eq!(state.config[4..6], [2, 0], "bus mastering is off again");
    }
}

#[test]
fn a_state_is_saved_and_restored() {
    // Of messages that are full, and one that is not; and nothing.
    for len in [0, 1, 95, 96, 97, 3 * 96, 1000] {
        let saved: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let capabilities = r#"{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":100}}"#;
        let start =
            Strict { fds: 16, data: 100, page: 4096, config: vec![0; 256], state: RUNNING, ..Strict::default() };
        let end = with_state(Strict { saved: saved.clone(), ..start }, capabilities, |bus| {
            let (bus, mut state) = (bus.unwrap(), Vec::new());
            bus.save(&mut state).unwrap();
            assert_eq!(state, saved);
            bus.restore(&saved[..]).unwrap();
            bus.resume().unwrap();
        });
        assert_eq!((end.restored, end.state, &end.refused[..]), (saved, RUNNING, &[][..]), "{len} bytes");
    }
}

/// It stays stopped, and the client may start it again.
#[test]
fn a_state_that_cannot_be_kept_is_an_error() {
    let start =
        Strict { fds: 16, data: 1 << 20, page: 4096, config: vec![0; 256], state: RUNNING, ..Strict::default() };
    let end = with_state(Strict { saved: vec![1; 50], ..start }, r#"{"capabilities":{"max_msg_fds":16}}"#, |bus| {
        let bus = bus.unwrap();
        let error = bus.save(&mut [0; 49][..]).unwrap_err();
        assert!(matches!(error, Error::State(_)), "{error}");
        bus.resume().unwrap();
    });
    assert_eq!(end.state, RUNNING);
}

#[test]
fn a_client_has_no_more_mappings_than_announced() {
    let start = Strict { fds: 16, data: 1 << 20, page: 4096, most_mapped: Some(2), ..Strict::default() };
    let start = Strict { config: vec![0; 256], state: RUNNING, ..start };
    let end = with_state(start, r#"{"capabilities":{"max_msg_fds":16,"max_dma_maps":2}}"#, |bus| {
        let bus = bus.unwrap();
        let buffer = bus.heap(Some(PageKind::Base)).allocate(4096).unwrap().share();
        let list =
            |count| bus.map_list((0..count).map(|_| bus.pin(&buffer.reference()).unwrap()).collect(), Access::RW);
        let error = list(3).err().unwrap();
        assert!(std::error::Error::source(&error).unwrap().to_string().contains("at most 2 mappings"), "{error:?}");
        let two = list(2).unwrap();
        assert!(list(1).is_err());
        drop(two);
        drop(list(1).unwrap());
    });
    assert_eq!((&end.refused[..], end.mapped.len()), (&[][..], 0));
}

#[test]
fn memory_that_is_not_of_its_pages_is_refused() {
    with(r#"{"capabilities":{"pgsizes":65536}}"#, (1, MAX_DATA as u64, 65536), |bus| {
        let bus = bus.unwrap();
        let small = MemfdHeap::starting_at(PageKind::Base).allocate(4096).unwrap().share();
        let error = bus.pin(&small.reference()).err().unwrap();
        assert!(matches!(error, DmaError::BadRange { page: 65536, .. }), "{error}");
        assert!(error.to_string().contains("the device has pages of 65536 bytes"), "{error}");
    });
}

#[test]
fn bad_capabilities_are_refused() {
    for (capabilities, what) in [
        ("{", "version data"),
        ("no JSON", "version data"),
        (r#"{"capabilities":{"max_msg_fds":0}}"#, "max_msg_fds"),
        (r#"{"capabilities":{"max_msg_fds":-1}}"#, "max_msg_fds"),
        (r#"{"capabilities":{"max_data_xfer_size":"1"}}"#, "max_data_xfer_size"),
        (r#"{"capabilities":{"max_data_xfer_size":8.5}}"#, "max_data_xfer_size"),
        (r#"{"capabilities":{"max_data_xfer_size":7}}"#, "max_data_xfer_size"),
        (r#"{"capabilities":{"max_dma_maps":0}}"#, "max_dma_maps"),
        (r#"{"capabilities":{"pgsizes":0}}"#, "pgsizes"),
        (r#"{"capabilities":{"pgsizes":2048}}"#, "pgsizes"),
        (r#"{"capabilities":{"pgsizes":9223372036854775808}}"#, "pgsizes"),
    ] {
        with(capabilities, (1, 1, 4096), |bus| {
            let error = bus.err().unwrap();
            let wanted = ProtocolError::Capability(what);
            assert!(matches!(&error, Error::Protocol(found) if *found == wanted), "{capabilities}: {error}");
        });
    }
}
