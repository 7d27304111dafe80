//! `dmalane bar-map`: what it costs to map a BAR for DMA.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane::addr::{Access, PageSize};
use dmalane::vfio::{Backend, BarAlignment, Bdf, Container, PciDevice, page_sizes};
use serde::Serialize;

use crate::failure::Failure;
use crate::{output, size};

/// What was asked for.
#[derive(Debug)]
pub struct BarMapArgs {
    /// The device.
    pub device: Bdf,
    /// Which BAR; the largest otherwise.
    pub region: Option<u32>,
    /// How the kernel is asked; the best way that there is otherwise.
    pub way: Option<Backend>,
    /// Where in this process.
    pub align: BarAlignment,
    /// How many times for DMA.
    pub times: u32,
    /// As JSON.
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    device: String,
    region: u32,
    bytes: u64,
    /// As asked for.
    align: String,
    kernel: String,
    kernel_page_sizes: Vec<u64>,
    /// How the device was opened.
    opened_by: String,
    /// What iommufd lacked, where it was not taken because of that.
    passed_over: Option<String>,
    /// How the BAR was mapped for DMA.
    way: String,
    /// What the address was aligned to, relative to the BAR.
    alignment: u64,
    /// Into this process.
    mmap_ns: u64,
    munmap_ns: u64,
    runs: Vec<Run>,
}

/// For DMA, and back.
#[derive(Serialize)]
struct Run {
    map_ns: u64,
    unmap_ns: u64,
}

/// Maps, unmaps, and reports.
pub fn run(args: &BarMapArgs) -> Result<ExitCode, Failure> {
    let container = args.way.map_or_else(Container::new, Container::with_backend);
    let device = container.open(&args.device)?;
    let region = match args.region {
        Some(region) => region,
        None => {
            largest(&device).ok_or_else(|| Failure::new(format!("{} has no BAR that can be mapped", args.device)))?
        }
    };
    let began = Instant::now();
    let bar = Arc::new(device.map_bar(region, None, args.align)?);
    let mmap_ns = nanos(began.elapsed());
    let mut way = String::new();
    let mut runs = Vec::new();
    for _ in 0..args.times {
        let peer = container.map_peer(&bar, 0..bar.len(), Access::RW)?;
        way = peer.method().to_string();
        let map_ns = nanos(peer.map_time());
        let began = Instant::now();
        drop(peer);
        runs.push(Run { map_ns, unmap_ns: nanos(began.elapsed()) });
    }
    let (bytes, alignment) = (bar.len(), bar.alignment().bytes());
    let began = Instant::now();
    drop(bar);
    let report = Report {
        schema: 1,
        command: "bar-map",
        device: device.bdf().to_string(),
        region,
        bytes,
        align: name(args.align),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        kernel_page_sizes: page_sizes().iter().map(PageSize::bytes).collect(),
        opened_by: container.backend().map_or_else(String::new, |way| way.to_string()),
        passed_over: container.iommufd_error().map(ToString::to_string),
        way,
        alignment,
        mmap_ns,
        munmap_ns: nanos(began.elapsed()),
        runs,
    };
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The largest BAR all of which can be mapped.
fn largest(device: &PciDevice) -> Option<u32> {
    let whole = device.regions().iter().filter(|r| r.index < 6 && r.mappable.contains(&(0..r.len)));
    whole.max_by_key(|r| r.len).map(|r| r.index)
}

fn name(placement: BarAlignment) -> String {
    match placement {
        BarAlignment::LargestPage => "auto".to_owned(),
        BarAlignment::Any => "none".to_owned(),
        BarAlignment::Exactly(page) => page.to_string(),
    }
}

fn text(report: &Report) -> String {
    let ms = |ns: u64| format!("{:.3} ms", ns as f64 / 1e6);
    let sizes: Vec<_> = report.kernel_page_sizes.iter().map(|n| size::binary(*n)).collect();
    let mut text = format!(
        "{} region {}: {}, Linux {}, opened by {}\n",
        report.device,
        report.region,
        size::binary(report.bytes),
        output::plain(&report.kernel),
        report.opened_by,
    );
    if let Some(why) = &report.passed_over {
        text += &format!("not by iommufd: {}\n", output::plain(why));
    }
    text += &format!(
        "aligned to {} ({}; this kernel has pages of {})\n\nmmap {}, munmap {}\n",
        size::binary(report.alignment),
        report.align,
        sizes.join(", "),
        ms(report.mmap_ns),
        ms(report.munmap_ns)
    );
    for run in &report.runs {
        text += &format!("for DMA by {}: map {}, unmap {}\n", report.way, ms(run.map_ns), ms(run.unmap_ns));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_run() {
        let report = Report {
            schema: 1,
            command: "bar-map",
            device: "0000:01:00.0".into(),
            region: 2,
            bytes: 32 << 30,
            align: name(BarAlignment::LargestPage),
            kernel: "7.2".into(),
            kernel_page_sizes: vec![4096, 1 << 21, 1 << 30],
            opened_by: Backend::Type1.to_string(),
            passed_over: Some("there is none".into()),
            way: "type1".into(),
            alignment: 1 << 30,
            mmap_ns: 12_000,
            munmap_ns: 5_400,
            runs: vec![Run { map_ns: 9_048, unmap_ns: 1_361_000_000 }],
        };
        let text = text(&report);
        let wanted = "0000:01:00.0 region 2: 32 GiB, Linux 7.2, opened by type1\nnot by iommufd: there is none\n\
             aligned to 1 GiB (auto; this kernel has pages of 4 KiB, 2 MiB, 1 GiB)\n\n\
             mmap 0.012 ms, munmap 0.005 ms\nfor DMA by type1: map 0.009 ms, unmap 1361.000 ms\n";
        assert_eq!(text, wanted);
        assert_eq!(serde_json::to_value(&report).unwrap()["runs"][0]["map_ns"], 9048);
    }
}
