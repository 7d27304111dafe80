//! Loading: places files on the device, runs the engine with staging buffers, and binds each tensor when it is whole.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Instant;

use dmalane_addr::FileOffset;
use dmalane_device::Placement;
use dmalane_queue::Queue;

use crate::clock::Clocks;
use crate::device::{Loaded, LoadedFile, OpenDevice};
use crate::engine::queues;
use crate::error::Error;
use crate::fill::{self, Event, FillError, FillOptions, Filled, Job, Sink, Targets, ToDevice, Watch, Workers};
use crate::input::Input;
use crate::manifest::{Compared, Manifest, check, hash_regions, whole};
use crate::open_file::OpenFile;
use crate::parts::{Parts, Places};
use crate::report::Report;
use crate::stage::Stage;

impl OpenDevice {
    /// Loads files: when this returns, every tensor is on the device and bound, for reading, at its own device virtual
    /// address. `progress` is called with the number of bytes that have been read since the last call; it must not
    /// panic.
    ///
    /// # Errors
    /// [`Error`]. Operations in flight have been waited for, and nothing stays bound or allocated on the device; only
    /// when the device does not finish its transfers within [`FillOptions::timeout`],
    /// their destination is never used again ([`OpenDevice::abandoned_bytes`]).
    pub fn load<S: Queue<Addr = FileOffset>>(
        &mut self,
        inputs: &mut [Input<S>],
        placement: &Placement,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Loaded, Error> {
        self.load_checked(inputs, placement, &Manifest::default(), progress)
    }

    /// As [`OpenDevice::load`]: hashes the regions of the files as their bytes arrive, and compares them with a
    /// manifest. An empty manifest is none.
    ///
    /// # Errors
    /// As of [`OpenDevice::load`], and [`Error::Differs`]; then nothing stays on the device.
    pub fn load_checked<S: Queue<Addr = FileOffset>>(
        &mut self,
        inputs: &mut [Input<S>],
        placement: &Placement,
        manifest: &Manifest,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Loaded, Error> {
        let start = Instant::now();
        let epoch = self.options.fill.epoch(start);
        let mut parse = Clocks::recording("start", epoch);
        epoch.into_iter().for_each(|epoch| self.record_channels(epoch));
        let lens = inputs.iter().map(|input| input.source.size()).collect::<Result<Vec<u64>, _>>()?;
        let expected = manifest.expect(inputs.iter().map(|input| &*input.source.path).zip(lens))?;
        let mut files = parse.time(Stage::Parse, || self.place_files(inputs, placement))?.files;
        let largest = files.iter().map(|file| file.model.len).max().unwrap_or(0);
        let places = files.iter().filter_map(|file| file.bo.as_ref()).flat_map(|bo| bo.sg().segments());
        let to_come = self.to_come(places.map(|segment| (segment.addr, segment.len)));
        let room = to_come.as_ref().map_or(Ok(()), |(new, _)| {
            let both = "the device, whose memory is this machine's, and the buffers";
            fill::ask(new.saturating_add(self.staging.to_come(largest)), both).map_err(Error::from)
        });
        let result = room.and_then(|()| self.stream(start, inputs, &mut files, &whole(&expected), progress));
        if let (Ok(_), Some((_, used))) = (&result, to_come) {
            self.used = used;
        }
        let wall = start.elapsed();
        let mut loaded = Loaded { files, report: Report::default() };
        let (clocks, workers, transfers, bytes) = match result {
            Ok((clocks, workers, transfers, bytes)) => {
                parse.add(clocks);
                (&mut parse, workers, transfers, bytes)
            }
            Err(e) => {
                // Slots may be incomplete now. They are cheap to make again.
                self.staging.clear();
                match self.queue.in_flight() {
                    // The first error matters more than one of unloading.
                    0 => drop(self.unload(loaded)),
                    _ => self.abandon(loaded),
                }
                return Err(e);
            }
        };
        clocks.tracks(self.channel_tracks());
        loaded.report = Report {
            bytes,
            wall,
            stages: clocks.stages().collect(),
            workers,
            timeline: clocks.timeline(),
            segments: self.staging_pages().map(|p| p.segment_count() as u64).sum(),
            staging: self.staging.size(),
            device_leaves: self.address_space().leaf_counts(),
            transfers,
            heap_peak: self.heap().stats().peak as u64,
            ..Report::default()
        };
        Ok(loaded)
    }

    /// As [`fill()`](fill::fill), through the staging buffers onto the device: `targets` says where the bytes of each
    /// buffer go. The buffers take at most `limit` bytes, which is no less than
    /// [`Staging::bounds`](crate::fill::Staging::bounds).
    pub(crate) fn fill_staged<S: Queue<Addr = FileOffset>>(
        &mut self,
        (targets, limit): (&dyn Targets, u64),
        sources: &[OpenFile],
        job: &Job,
        workers: Workers<'_, S>,
        options: &FillOptions,
        watch: &mut Watch<'_>,
    ) -> Result<Filled, FillError> {
        self.register_kept(sources.iter(), job, &mut Clocks::default());
        let Self { queue, info, staging, .. } = self;
        // Of full length at once, so that they are registered once, however small what is read first is.
        staging.prepare(u64::MAX);
        staging.keep_within(limit);
        fill::ask(staging.to_come(u64::MAX), "the staging buffers")?;
        let to = ToDevice { queue, polled: info.polled, processors: info.processors, targets };
        let start = Instant::now();
        let filled = fill::run(start, Sink::Staging(staging, Some(to)), job, workers, options, watch);
        let filled = filled.map(|done| done.filled(start, job));
        self.staging.in_place.clear();
        if filled.is_err() {
            // Slots may be incomplete now.
            self.staging.clear();
        }
        filled
    }

    /// Gives each tensor its place on the device and its device virtual address, as [`OpenDevice::load`] does, and
    /// moves nothing. [`OpenDevice::unload`] gives the places back.
    ///
    /// # Errors
    /// As of [`OpenDevice::load`]; nothing stays allocated.
    pub fn place_files<S>(&mut self, inputs: &[Input<S>], placement: &Placement) -> Result<Loaded, Error> {
        let mut files: Vec<LoadedFile> = Vec::new();
        let mut sources = inputs.iter().map(|input| &input.source);
        sources.try_for_each(|source| self.refuse_own(&source.path, || source.metadata()))?;
        for input in inputs {
            match input.source.model().and_then(|model| self.place(input.source.path.clone(), model.clone(), placement))
            {
                Ok(file) => files.push(file),
                Err(e) => {
                    // The reason for the failure matters more than a second one while cleaning up.
                    let _ = self.unload(Loaded { files, report: Report::default() });
                    return Err(e);
                }
            }
        }
        Ok(Loaded { files, report: Report::default() })
    }

    /// Moves the bytes of files that have their places, and binds their tensors. Of a file of which tensors are
    /// selected it reads only those, unless all of it is to be hashed. Returns the numbers of workers, of transfers,
    /// and of bytes that were read.
    fn stream<S: Queue<Addr = FileOffset>>(
        &mut self,
        start: Instant,
        inputs: &mut [Input<S>],
        files: &mut [LoadedFile],
        compared: &[Vec<Compared<'_>>],
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(Clocks, usize, u64, u64), Error> {
        let mut options = self.options.fill.clone();
        options.hash_regions = hash_regions(compared).or(options.hash_regions);
        let hashed = options.checksum || options.hash_regions.is_some();
        let parts = Parts::new(inputs.iter().zip(&*files).map(|(input, file)| input.wanted(&file.model, hashed)));
        let places = &Places { parts, runs: files.iter().map(LoadedFile::places).collect() };
        let (parts, job) = (&places.parts, places.parts.job());
        let mut missing: Vec<Vec<u64>> =
            files.iter().map(|f| f.layout.runs.iter().map(|run| run.filled).collect()).collect();
        let (mut binds, mut transfers, mut failed) = (Clocks::recording("binds", options.epoch(start)), 0, None);
        let whole_files = self.binds_whole_files();
        self.register_kept(inputs.iter().map(|input| &input.source), job, &mut binds);
        let Self { queue, device, info, staging, stop, .. } = self;
        let stop = stop.clone();
        staging.prepare(job.buffers.iter().copied().max().unwrap_or(0));
        let placed = &*files;
        let mut watch = |event: Event| match event {
            Event::Arrived { len, .. } => {
                progress(len);
                let stopped = stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed));
                if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            Event::OnDevice { buffer, offset, len } => {
                transfers += 1;
                let file = &placed[buffer];
                // A transfer is part of one run.
                let run = file.layout.places[file.model.index_at(parts.at(buffer, offset))].run as usize;
                let left = &mut missing[buffer][run];
                *left -= len;
                if *left == 0 {
                    binds.bytes(Stage::Bind, file.layout.runs[run].bound);
                    // The first failure is the one that is told, whatever ends after it.
                    if !whole_files && failed.is_none() {
                        failed = binds.time(Stage::Bind, || file.bind(run, device.address_space())).err();
                    }
                }
                if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            _ => ControlFlow::Continue(()),
        };
        let to = ToDevice { queue, polled: info.polled, processors: info.processors, targets: places };
        let (mut queues, late) = queues(inputs);
        let workers = Workers { queues: &mut queues, all: false, late };
        let result = fill::run(start, Sink::Staging(staging, Some(to)), job, workers, &options, &mut watch);
        self.staging.in_place.clear();
        if let Some(error) = failed {
            return Err(error);
        }
        let about = |file: usize| (files[file].path.clone(), Some(&*files[file].model));
        let mut done = result.map_err(|error| parts.describe(error, about))?;
        inputs.iter().zip(&*files).try_for_each(|(input, file)| input.source.check_size(file.model.len))?;
        check(compared, done.hashes.iter().map(|hashes| &*hashes.digests))?;
        for (file, hashes) in files.iter_mut().zip(done.hashes) {
            (file.checksum, file.digests) = (hashes.checksum, hashes.digests);
        }
        done.clocks.add(binds);
        Ok((done.clocks, done.workers, transfers, job.bytes()))
    }
}
