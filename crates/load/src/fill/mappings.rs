//! Registrations of chunks whose memory stays.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use dmalane_addr::Access;
use dmalane_dma::{BufferSlice, Registrar};
use dmalane_queue::Registered;

use super::error::FillError;
use crate::clock::Clocks;
use crate::lock::locked;
use crate::stage::Stage;

/// Pins chunks and maps them for a device, if that was asked for, and keeps the registrations until the job has ended.
pub(super) struct Mappings<'a> {
    register: Option<(&'a dyn Registrar, Access)>,
    /// For each buffer the registrations of its chunks, by offset.
    buffers: Mutex<Vec<BTreeMap<usize, Registered>>>,
}

impl<'a> Mappings<'a> {
    pub fn new(register: Option<(&'a dyn Registrar, Access)>, buffers: usize) -> Self {
        Self { register, buffers: Mutex::new(vec![BTreeMap::new(); buffers]) }
    }

    /// Registers a chunk that is present; `None` if none are to be.
    pub fn add(
        &self,
        buffer: usize,
        slice: &BufferSlice,
        clocks: &mut Clocks,
    ) -> Result<Option<Registered>, FillError> {
        let Some((registrar, access)) = self.register else { return Ok(None) };
        let (offset, len) = (slice.offset(), slice.len());
        let map = |source| FillError::Map { buffer, offset: offset as u64, source };
        let (reference, range) = (slice.reference(), offset..offset + len);
        let pinned = clocks.time(Stage::Register, || registrar.pin_range(&reference, range)).map_err(map)?;
        let mapping = clocks.time(Stage::Map, || registrar.map_list(vec![pinned], access)).map_err(map)?;
        clocks.bytes(Stage::Register, len as u64);
        clocks.bytes(Stage::Map, len as u64);
        let registered = Registered::from_mapping(mapping);
        locked(&self.buffers)[buffer].insert(offset, registered.clone());
        Ok(Some(registered))
    }

    /// For each buffer its registrations, in order.
    pub fn into_lists(self) -> Vec<Vec<Registered>> {
        let buffers = self.buffers.into_inner().unwrap_or_else(PoisonError::into_inner);
        buffers.into_iter().map(|of_buffer| of_buffer.into_values().collect()).collect()
    }
}
