//! Reading back through the device's own MMU, to compare.

use std::hash::Hasher;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_device::{Bounce, IoError, PolledQueue};
use dmalane_dma::VolatileSlice;
use dmalane_queue::{Capabilities, Limits, OpError, Operation, Queue, QueueAddr, Work};
use twox_hash::XxHash3_64;

use crate::device::{JoinedQueue, Loaded, LoadedFile, LoadedTensor, OpenDevice};
use crate::difference::Difference;
use crate::engine::queues;
use crate::error::Error;
use crate::fill::{self, Digest, Event, FillError, FillOptions, Sink, ToDevice, Workers, broken};
use crate::input::Input;
use crate::manifest::Manifest;
use crate::parts::{Places, Runs, add_run};

impl OpenDevice {
    /// Reads a tensor from the device by its device virtual address and hands its bytes to `sink`, chunk after chunk,
    /// with their offset in the tensor.
    ///
    /// # Errors
    /// [`Error::Transfer`] when the device cannot read it; [`FillError::Cancelled`] where it was told to stop before
    /// ([`OpenDevice::stop_when`]).
    ///
    /// # Panics
    /// When the file has no tensor `index`.
    pub fn read_back(
        &mut self,
        file: &LoadedFile,
        index: usize,
        sink: &mut dyn FnMut(u64, VolatileSlice<'_>),
    ) -> Result<(), Error> {
        self.check(file)?;
        let loaded = file.tensor(index);
        let Some(va) = loaded.va else { return Ok(()) };
        let at = self.address_space().at(va.first());
        if self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(FillError::Cancelled { done: 0, of: va.len() }.into());
        }
        let (bounce, queue) = self.bounce(file.model.len)?;
        let read = bounce.read_each(queue, at, va.len(), &mut |done, view| -> Result<(), IoError> {
            sink(done, view);
            Ok(())
        });
        read.map_err(|error| {
            let (place, source) = match error {
                IoError::Memory(source) => return Error::Memory(source),
                IoError::Failed { at, error } => (at, error),
                other => (at, broken(other)),
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
    /// The files are read again as for a load, whose device compares.
    ///
    /// # Errors
    /// [`Error::Mismatch`] names a byte that differs; [`Error::Read`]; [`Error::Transfer`];
    /// [`Error::OtherInputs`] unless `inputs` are the files of `loaded` in the same order.
    pub fn verify<S: Queue<Addr = FileOffset>>(
        &mut self,
        loaded: &Loaded,
        inputs: &mut [Input<S>],
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Duration, Error> {
        let (start, files) = (Instant::now(), &loaded.files);
        if !files.iter().map(|f| &f.path).eq(inputs.iter().map(|i| &i.source.path)) {
            return Err(Error::OtherInputs {
                loaded: files.iter().map(|f| f.path.clone()).collect(),
                inputs: inputs.iter().map(|i| i.source.path.clone()).collect(),
            });
        }
        files.iter().try_for_each(|file| self.check(file))?;
        let space = self.device.address_space();
        let places = Places::new(files.iter().map(|file| {
            let mut runs = Runs::new();
            for (LoadedTensor { tensor, va }, at) in file.tensors().map(|loaded| (loaded, loaded.tensor.at.bits())) {
                va.iter().for_each(|va| add_run(&mut runs, at..at + tensor.len, space.at(va.first())));
            }
            (file.model.len, runs)
        }));
        let job = places.parts.job();
        self.staging.prepare(job.buffers.iter().copied().max().unwrap_or(0));
        self.bounce(self.staging.slot())?;
        let Self { queue, bounce, info, staging, options, .. } = self;
        let limits = Limits { capacity: 1, max_len: u64::MAX, max_parts: 1 };
        let compared = |operation: &Operation| compare(queue, bounce, operation);
        let mut queue = PolledQueue::new(Capabilities::FROM_HOST, limits, compared);
        let stop = self.stop.clone();
        let mut watch = |event| {
            if let Event::OnDevice { len, .. } = event {
                progress(len);
            }
            let stopped = stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed));
            if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let to = ToDevice { queue: &mut queue, polled: true, processors: info.processors, targets: &places };
        let FillOptions { block, timeout, .. } = options.fill;
        let options = FillOptions { block, timeout, ..FillOptions::default() };
        let sink = Sink::Staging(staging, Some(to));
        let (mut queues, late) = queues(inputs);
        let workers = Workers { queues: &mut queues, all: false, late };
        let Err(error) = fill::run(start, sink, job, workers, &options, &mut watch) else {
            return Ok(start.elapsed());
        };
        self.staging.clear();
        Err(match error {
            FillError::Transfer { buffer, offset, error: OpError::Differs { offset: n } } => {
                let (LoadedFile { path, model, .. }, at) = (&files[buffer], places.parts.at(buffer, offset + n));
                let tensor = &model.tensors[model.index_at(at)];
                let (path, offset) = (path.clone(), at.bits() - tensor.at.bits());
                Error::Mismatch { path, tensor: tensor.name.clone(), offset, at }
            }
            other => places.parts.describe(other, |n| (files[n].path.clone(), Some(&*files[n].model))),
        })
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
                })?;
                differences.extend(of.differs(region, &Digest { xxh3: hash.finish(), sha256: None }));
            }
        }
        Ok(differences)
    }
}

/// Compares what an operation would write with what the device has there.
fn compare(queue: &mut JoinedQueue, bounce: &mut Option<Bounce>, operation: &Operation) -> Result<(), OpError> {
    let (Work::Copy { host, at, .. }, Some(bounce)) = (&operation.work, bounce) else {
        return Err(broken("nothing to compare"));
    };
    let (at, file) = (*at, host.slice.as_volatile_slice());
    let compared = bounce.read_each(queue, at, file.len() as u64, &mut |done, device| {
        let differs = file.sub(done as usize, device.len()).map_or(Some(0), |file| file.first_difference(device));
        let found = |n| IoError::Failed { at, error: OpError::Differs { offset: done + n as u64 } };
        differs.map_or(Ok(()), |n| Err(found(n)))
    });
    compared.map_err(|error| match error {
        IoError::Failed { error, .. } => error,
        other => broken(other),
    })
}
