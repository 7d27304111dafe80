//! How the files of a model were read.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::fill::FillReport;
use crate::read::ReadMethod;

/// A report of reads: the methods for the files, and times that add up over several jobs.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    /// Times and bytes; `None` before the first read.
    pub fill: Option<FillReport>,
    /// Each file and how it was read, in the order of the first read.
    pub files: Vec<(PathBuf, ReadMethod)>,
    places: HashMap<PathBuf, usize>,
}

impl Reads {
    /// Adds a job and the files that it read.
    pub fn add(&mut self, report: FillReport, files: impl IntoIterator<Item = (PathBuf, ReadMethod)>) {
        match &mut self.fill {
            None => self.fill = Some(report),
            Some(sum) => {
                sum.bytes += report.bytes;
                sum.wall += report.wall;
                sum.workers = sum.workers.max(report.workers);
                sum.recycled |= report.recycled;
                for stage in report.stages {
                    match sum.stages.iter_mut().find(|s| s.stage == stage.stage) {
                        Some(s) => {
                            (s.busy, s.wall, s.bytes) =
                                (s.busy + stage.busy, s.wall + stage.wall, s.bytes + stage.bytes);
                            s.in_flight = s.in_flight.max(stage.in_flight);
                        }
                        None => sum.stages.push(stage),
                    }
                }
            }
        }
        for (path, method) in files {
            let place = *self.places.entry(path.clone()).or_insert(self.files.len());
            match self.files.get_mut(place) {
                None => self.files.push((path, method)),
                Some((_, before)) => {
                    before.moved.direct += method.moved.direct;
                    before.moved.buffered += method.moved.buffered;
                    (before.how, before.reason) = (method.how, method.reason);
                }
            }
        }
    }
}

/// Rates that the machine reaches at best with the files of a model, in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HostRates {
    /// Bytes that were read to measure.
    pub bytes: u64,
    /// Reading them as they are read now, into memory that is there.
    pub read: f64,
    /// Making that memory.
    pub first_touch: f64,
}
