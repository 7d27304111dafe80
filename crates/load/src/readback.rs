//! Reading back through the device's own MMU, to compare.

use std::hash::Hasher;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_device::IoError;
use dmalane_dma::VolatileSlice;
use dmalane_queue::{Queue, QueueAddr};
use twox_hash::XxHash3_64;

use crate::again::Reread;
use crate::device::{Loaded, LoadedFile, OpenDevice};
use crate::difference::Difference;
use crate::error::Error;
use crate::fill::{Digest, FillError, broken};
use crate::input::Input;
use crate::manifest::Manifest;

impl OpenDevice {
    /// Reads a tensor from the device by its device virtual address and hands its bytes to `sink`, chunk after chunk,
    /// with their offset in the tensor.
    ///
    /// # Errors
    /// [`Error::Transfer`] when the device cannot read it; what `sink` returns; [`FillError::Cancelled`] where it was
    /// told to stop ([`OpenDevice::stop_when`]).
    ///
    /// # Panics
    /// When the file has no tensor `index`.
    pub fn read_back(
        &mut self,
        file: &LoadedFile,
        index: usize,
        sink: &mut dyn FnMut(u64, VolatileSlice<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.check(file)?;
        let loaded = file.tensor(index);
        let Some(va) = loaded.va else { return Ok(()) };
        let at = self.address_space().at(va.first());
        let stop = self.stop.clone();
        let (bounce, queue) = self.bounce(file.model.len)?;
        let read = bounce.read_each(queue, at, va.len(), &mut |done, view| {
            if stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(Stopped::Sink(FillError::Cancelled { done, of: va.len() }.into()));
            }
            sink(done, view).map_err(Stopped::Sink)
        });
        self.resident.sample(va.len(), &**self.device);
        read.map_err(|stopped| {
            let (place, source) = match stopped {
                Stopped::Sink(error) => return error,
                Stopped::Read(IoError::Memory(source)) => return Error::Memory(source),
                Stopped::Read(IoError::Failed { at, error }) => (at, error),
                Stopped::Read(other) => (at, broken(other)),
            };
            let (path, tensor) = (file.path.clone(), Some(loaded.tensor.name.clone()));
            Error::Transfer {
                path,
                at: FileOffset::new(loaded.tensor.at.bits() + (place.bits() - at.bits())),
                tensor,
                source,
            }
        })
    }

    /// Reads every tensor back by its address on the device, compares it with its file, and returns how long that took.
    /// `progress` is called with the number of bytes compared since the last call.
    ///
    /// The file is read again by its queue, as fast as for the load, ahead of what the device gives back.
    ///
    /// # Errors
    /// [`Error::Mismatch`] names the first byte that differs; [`Error::Read`]; [`Error::Transfer`];
    /// [`Error::OtherInputs`] unless `inputs` are the files of `loaded` in the same order.
    pub fn verify<S: Queue<Addr = FileOffset>>(
        &mut self,
        loaded: &Loaded,
        inputs: &mut [Input<S>],
        progress: &mut dyn FnMut(u64),
    ) -> Result<Duration, Error> {
        let start = Instant::now();
        if !loaded.files.iter().map(|f| &f.path).eq(inputs.iter().map(|i| &i.source.path)) {
            return Err(Error::OtherInputs {
                loaded: loaded.files.iter().map(|f| f.path.clone()).collect(),
                inputs: inputs.iter().map(|i| i.source.path.clone()).collect(),
            });
        }
        for (file, input) in loaded.files.iter().zip(inputs) {
            self.check(file)?;
            let (model, queue) = (&file.model, &mut input.queue);
            let mut again = Reread::new(queue, &file.path, model, &mut self.staging, self.options.fill.timeout)?;
            let result = self.compare(file, &mut again, progress);
            again.finish(&mut self.staging);
            result?;
        }
        Ok(start.elapsed())
    }

    /// Reads every tensor back and compares its hash with that in the manifest of the files.
    pub(crate) fn differences(&mut self, loaded: &Loaded, manifest: &Manifest) -> Result<Vec<Difference>, Error> {
        let mut differences = Vec::new();
        for (file, of) in loaded.files.iter().zip(&manifest.files) {
            // In the same order; the manifest may have more.
            let mut regions = of.regions.iter();
            for (index, tensor) in file.model.tensors.iter().enumerate() {
                let region = regions.find(|region| region.part.tensor() == Some(tensor)).ok_or_else(|| {
                    let (path, tensor) = (file.path.clone(), tensor.name.clone());
                    Error::Unlisted { path, tensor }
                })?;
                let (mut hash, mut bytes) = (XxHash3_64::with_seed(0), Vec::new());
                self.read_back(file, index, &mut |_, view| {
                    bytes.resize(view.len(), 0);
                    view.read(&mut bytes);
                    hash.write(&bytes);
                    Ok(())
                })?;
                differences.extend(of.differs(region, &Digest { xxh3: hash.finish(), sha256: None }));
            }
        }
        Ok(differences)
    }

    /// Compares the tensors of one file.
    fn compare<S: Queue<Addr = FileOffset>>(
        &mut self,
        file: &LoadedFile,
        again: &mut Reread<'_, S>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        for (index, tensor) in file.model.tensors.iter().enumerate() {
            self.read_back(file, index, &mut |offset, view| {
                let from = tensor.at.bits() + offset;
                if let Some(n) = again.first_difference(from, view)? {
                    return Err(Error::Mismatch {
                        path: file.path.clone(),
                        tensor: tensor.name.clone(),
                        offset: offset + n,
                        at: FileOffset::new(from + n),
                    });
                }
                progress(view.len() as u64);
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Why reading back ended early.
enum Stopped {
    Read(IoError),
    Sink(Error),
}

impl From<IoError> for Stopped {
    fn from(error: IoError) -> Self {
        Self::Read(error)
    }
}
