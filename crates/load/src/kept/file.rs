//! A file of a kept model.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use dmalane_dma::{BufferSlice, Registrar, SharedBuf, lock};
use dmalane_file::FileHandle;
use dmalane_queue::Registered;

use super::error::KeepError;
use crate::clock::Clocks;
use crate::fill::{InPlace, register};
use crate::model::Block;

/// A file in memory that nobody can change: its bytes, from the first byte of the memory on.
pub struct KeptFile {
    /// Its bytes.
    pub len: u64,
    /// The memory.
    pub block: Arc<Block>,
    pub(crate) handle: FileHandle,
    on_devices: Mutex<OnDevices>,
}

/// The memory of a file as devices read it, and its registrations by the device's number.
#[derive(Default)]
struct OnDevices {
    memory: Option<BufferSlice>,
    registered: BTreeMap<u64, Registered>,
}

impl KeptFile {
    /// Maps a memfd that holds a file of `len` bytes; `path` is its name in messages.
    ///
    /// # Errors
    /// [`KeepError::Bad`] for a memfd that somebody may change, or that is shorter.
    pub fn new(path: impl Into<PathBuf>, fd: OwnedFd, len: u64) -> Result<Self, KeepError> {
        let path = path.into();
        let bad = |why: String| KeepError::Bad { what: path.display().to_string(), why };
        let buf = SharedBuf::import_sealed(fd.as_fd()).map_err(|e| bad(e.to_string()))?;
        if len > buf.len() as u64 {
            return Err(bad(format!("it has {} bytes, and not {len}", buf.len())));
        }
        let handle = FileHandle::new(File::from(fd), path);
        Ok(Self { len, block: Block::kept(buf), handle, on_devices: Mutex::default() })
    }
}

/// The kept files that are registered with a device: until it is gone, or they are.
pub(crate) struct RegisteredFiles {
    device: u64,
    files: Vec<Weak<KeptFile>>,
}

impl RegisteredFiles {
    /// None yet, of the device of this number.
    pub(crate) fn of(device: u64) -> Self {
        Self { device, files: Vec::new() }
    }

    /// The memory of a file, which the device reads where it is; `None` where it cannot, or where it is not registered
    /// and `add` is false.
    pub(crate) fn memory(
        &mut self,
        file: &Arc<KeptFile>,
        add: bool,
        bus: &dyn Registrar,
        clocks: &mut Clocks,
    ) -> Option<InPlace> {
        let on_devices = &mut *lock(&file.on_devices);
        if !add && !on_devices.registered.contains_key(&self.device) {
            return None;
        }
        if on_devices.memory.is_none() {
            let sealed = SharedBuf::import_read_only(file.handle.file().ok()?.as_fd()).ok()?;
            on_devices.memory = Some(sealed.into_slice());
        }
        let memory = on_devices.memory.as_ref()?;
        let registered = match on_devices.registered.entry(self.device) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => {
                let Ok(registered) = register(bus, &memory.reference(), clocks) else {
                    // It may work another time.
                    if on_devices.registered.is_empty() {
                        on_devices.memory = None;
                    }
                    return None;
                };
                self.files.retain(|file| file.strong_count() > 0);
                self.files.push(Arc::downgrade(file));
                new.insert(registered).clone()
            }
        };
        Some(InPlace(memory.duplicate(0..memory.len()).ok()?, registered))
    }
}

impl Drop for RegisteredFiles {
    fn drop(&mut self) {
        for file in self.files.iter().filter_map(Weak::upgrade) {
            lock(&file.on_devices).registered.remove(&self.device);
        }
    }
}

dmalane_dma::debug_as!(KeptFile, |it| "KeptFile({}, {} bytes)", it.handle.path().display(), it.len);
