//! Reports as Python dictionaries.

use dmalane::ReadMethod;
use dmalane::dma::PageBacking;
use dmalane::load::fill::FillReport;
use dmalane::load::{Report, StageReport};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// A report of reads: the methods for the files, and times that add up over several jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reads {
    pub(crate) fill: Option<FillReport>,
    /// The name of each file and how it was read, in the order of the first read.
    pub(crate) files: Vec<(String, ReadMethod)>,
}

impl Reads {
    /// Adds a job and the files that it read.
    pub(crate) fn add(&mut self, report: FillReport, files: impl IntoIterator<Item = (String, ReadMethod)>) {
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
                                (s.busy + stage.busy, s.wall + stage.wall, s.bytes + stage.bytes)
                        }
                        None => sum.stages.push(stage),
                    }
                }
            }
        }
        for (path, method) in files {
            match self.files.iter_mut().find(|(name, _)| *name == path) {
                None => self.files.push((path, method)),
                Some((_, before)) => {
                    before.moved.direct += method.moved.direct;
                    before.moved.buffered += method.moved.buffered;
                    (before.how, before.reason) = (method.how, method.reason);
                }
            }
        }
    }

    pub(crate) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("bytes", self.fill.as_ref().map_or(0, |fill| fill.bytes))?;
        dict.set_item("wall_s", self.fill.as_ref().map_or(0.0, |fill| fill.wall.as_secs_f64()))?;
        dict.set_item("stages", stages(py, self.fill.as_ref().map_or(&[], |fill| &fill.stages))?)?;
        if let Some(fill) = &self.fill {
            dict.set_item("first_chunk_s", fill.first_chunk.as_secs_f64())?;
            dict.set_item("workers", fill.workers)?;
            dict.set_item("recycled", fill.recycled)?;
            if let Some(backing) = &fill.backing {
                dict.set_item("pages", pages(py, backing)?)?;
            }
        }
        let files = PyList::empty(py);
        for (path, method) in &self.files {
            let file = PyDict::new(py);
            file.set_item("path", path)?;
            file.set_item("direct", method.how.direct)?;
            file.set_item("io_uring", method.how.uring)?;
            file.set_item("reason", &method.reason)?;
            let fallbacks: Vec<String> = method.how.reasons.iter().map(ToString::to_string).collect();
            file.set_item("fallbacks", fallbacks)?;
            file.set_item("direct_bytes", method.moved.direct)?;
            file.set_item("buffered_bytes", method.moved.buffered)?;
            file.set_item("cached_share", method.cached.map(|cached| cached.share()))?;
            files.append(file)?;
        }
        dict.set_item("files", files)?;
        Ok(dict)
    }
}

/// A report of a load onto a device.
pub(crate) fn of_load<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("wall_s", report.wall.as_secs_f64())?;
    dict.set_item("stages", stages(py, &report.stages)?)?;
    dict.set_item("staging_buffers", report.staging.0)?;
    dict.set_item("staging_bytes", report.staging.1)?;
    dict.set_item("transfers", report.transfers)?;
    Ok(dict)
}

fn stages<'py>(py: Python<'py>, stages: &[StageReport]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for stage in stages {
        let dict = PyDict::new(py);
        dict.set_item("stage", stage.stage.to_string())?;
        dict.set_item("busy_s", stage.busy.as_secs_f64())?;
        dict.set_item("wall_s", stage.wall.as_secs_f64())?;
        dict.set_item("bytes", stage.bytes)?;
        list.append(dict)?;
    }
    Ok(list)
}

fn pages<'py>(py: Python<'py>, backing: &PageBacking) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("kind", backing.kind.to_string())?;
    let passed_over: Vec<(String, String)> =
        backing.passed_over.iter().map(|(kind, why)| (kind.to_string(), why.to_string())).collect();
    dict.set_item("passed_over", passed_over)?;
    Ok(dict)
}
