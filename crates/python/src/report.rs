//! Reports as Python dictionaries.

use dmalane::dma::PageBacking;
use dmalane::load::{HostModel, Reads, Report, StageReport};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// A report of reads.
pub(crate) fn of_reads<'py>(py: Python<'py>, reads: &Reads) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", reads.fill.as_ref().map_or(0, |fill| fill.bytes))?;
    dict.set_item("wall_s", reads.fill.as_ref().map_or(0.0, |fill| fill.wall.as_secs_f64()))?;
    dict.set_item("stages", stages(py, reads.fill.as_ref().map_or(&[], |fill| &fill.stages))?)?;
    if let Some(fill) = &reads.fill {
        dict.set_item("first_chunk_s", fill.first_chunk.as_secs_f64())?;
        dict.set_item("workers", fill.workers)?;
        dict.set_item("recycled", fill.recycled)?;
        if let Some(backing) = &fill.backing {
            dict.set_item("pages", pages(py, backing)?)?;
        }
    }
    let files = PyList::empty(py);
    for (path, method) in &reads.files {
        let file = PyDict::new(py);
        file.set_item("path", path.display().to_string())?;
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

/// A report of a load onto a device.
pub(crate) fn of_load<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("wall_s", report.wall.as_secs_f64())?;
    dict.set_item("stages", stages(py, &report.stages)?)?;
    dict.set_item("workers", report.workers)?;
    dict.set_item("staging_buffers", report.staging.0)?;
    dict.set_item("staging_bytes", report.staging.1)?;
    dict.set_item("transfers", report.transfers)?;
    Ok(dict)
}

/// Adds the files beside those of the model, each with why it is no part of it, and what is odd about its own.
pub(crate) fn add_files(report: &Bound<'_, PyDict>, model: &HostModel) -> PyResult<()> {
    let left_out = model.left_out().iter().map(|(path, why)| (path.display().to_string(), why.as_str()));
    report.set_item("left_out", left_out.collect::<Vec<_>>())?;
    // Which looks into the files.
    let notes = report.py().detach(|| model.notes());
    report.set_item("notes", notes)
}

fn stages<'py>(py: Python<'py>, stages: &[StageReport]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for stage in stages {
        let dict = PyDict::new(py);
        dict.set_item("stage", stage.stage.to_string())?;
        dict.set_item("busy_s", stage.busy.as_secs_f64())?;
        dict.set_item("wall_s", stage.wall.as_secs_f64())?;
        dict.set_item("bytes", stage.bytes)?;
        dict.set_item("in_flight", stage.in_flight)?;
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
