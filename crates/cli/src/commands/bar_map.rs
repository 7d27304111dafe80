//! `dmalane bar-map`: the time that it takes to map a BAR for DMA.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use dmalane::addr::{Access, PageSize};
use dmalane::vfio::{Backend, BarAlignment, Bdf, Container, PciDevice, page_sizes};
use serde::Serialize;

use crate::failure::Failure;
use crate::number::within;
use crate::{output, size};

const EXAMPLES: &str = "\
Examples:
  dmalane bar-map -d vfio:0000:01:00.0                          aligned to the largest page
  dmalane bar-map -d vfio:0000:01:00.0 --align none --times 10  where mmap puts it, 10 times
  dmalane bar-map -d vfio:0000:01:00.0 --region 2 --align 2M --json
  dmalane bar-map -d vfio:0000:01:00.0 --backend type1          not through iommufd

The device must be bound to vfio-pci; `dmalane devices` lists those that are.

Exit status: 0 mapped and unmapped, 1 no such device, no permission or the kernel refused, 2 usage error.";

/// Map a BAR of a device for DMA and measure how long that takes.
///
/// Maps the BAR into this process, then through the IOMMU, as for another device or a guest. Linux 6.15 and later maps
/// it with the page size of the process's mapping, so the time depends on the address. Through iommufd (Linux 7) the
/// BAR is mapped as a dma-buf, and the address does not matter.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct BarMap {
    /// The device: vfio:DOMAIN:BUS:DEVICE.FUNCTION
    #[arg(short, long, value_name = "DEVICE", value_parser = device)]
    device: Bdf,

    /// The BAR, from 0 to 5 [default: the largest that can be mapped]
    #[arg(long, value_name = "N", value_parser = within::<u32>(0..=5))]
    region: Option<u32>,

    /// Kernel interface that opens the device [default: iommufd where this user can open it, else type1; see `dmalane
    /// doctor`]
    #[arg(long, value_enum)]
    backend: Option<Backend>,

    /// Alignment of the address: 4K, 2M, 1G (exactly that), auto (the largest page size of this kernel that fits),
    /// none (the address that mmap chooses)
    #[arg(long, value_name = "ALIGN", default_value = "auto", value_parser = align)]
    align: BarAlignment,

    /// Times to map for DMA and unmap, from 1 to 1000, as a guest does while it boots
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within::<u32>(1..=1000))]
    times: u32,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
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
    backend: String,
    /// Why iommufd was not used, where that is not what was asked for.
    iommufd_error: Option<String>,
    /// How the BAR was mapped for DMA.
    method: String,
    /// The alignment of the address, relative to the BAR.
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

impl BarMap {
    /// Maps, unmaps, and reports.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let container = self.backend.map_or_else(Container::new, Container::with_backend);
        let device = container.open(&self.device)?;
        let region = match self.region {
            Some(region) => region,
            None => largest(&device)
                .ok_or_else(|| Failure::new(format!("{} has no BAR that can be mapped", self.device)))?,
        };
        let began = Instant::now();
        let bar = Arc::new(device.map_bar(region, None, self.align)?);
        let mmap_ns = nanos(began.elapsed());
        let mut method = String::new();
        let mut runs = Vec::new();
        for _ in 0..self.times {
            let peer = container.map_peer(&bar, 0..bar.len(), Access::RW)?;
            method = peer.method().to_string();
            let map_ns = nanos(peer.map_time());
            let began = Instant::now();
            drop(peer);
            runs.push(Run { map_ns, unmap_ns: nanos(began.elapsed()) });
        }
        let (bytes, alignment) = (bar.len(), bar.alignment().bytes());
        let began = Instant::now();
        drop(bar);
        let report = Report {
            schema: 2,
            command: "bar-map",
            device: device.bdf().to_string(),
            region,
            bytes,
            align: name(self.align),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            kernel_page_sizes: page_sizes().iter().map(PageSize::bytes).collect(),
            backend: container.backend().map_or_else(String::new, |backend| backend.to_string()),
            iommufd_error: container.iommufd_error().map(ToString::to_string),
            method,
            alignment,
            mmap_ns,
            munmap_ns: nanos(began.elapsed()),
            runs,
        };
        if self.json {
            output::print_json(&report)?;
        } else {
            output::print(&text(&report))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn device(text: &str) -> Result<Bdf, String> {
    let bdf = text.strip_prefix("vfio:").ok_or("not a VFIO device: write vfio:0000:01:00.0")?;
    bdf.parse().map_err(|e: dmalane::vfio::BadBdf| e.to_string())
}

fn align(text: &str) -> Result<BarAlignment, &'static str> {
    let wrong = "not an alignment: 4K, 16K, 2M, 32M, 1G (a power of two), auto or none";
    let unit = |suffix: char| match suffix {
        'K' => Some(10),
        'M' => Some(20),
        'G' => Some(30),
        _ => None,
    };
    match text {
        "auto" => return Ok(BarAlignment::LargestPage),
        "none" => return Ok(BarAlignment::Any),
        _ => {}
    }
    let shift = text.chars().last().and_then(unit).ok_or(wrong)?;
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong)?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| (4 << 10..=512 << 30).contains(bytes));
    bytes.and_then(PageSize::new).map(BarAlignment::Exactly).ok_or(wrong)
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
        report.backend,
    );
    if let Some(why) = &report.iommufd_error {
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
        text += &format!("for DMA by {}: map {}, unmap {}\n", report.method, ms(run.map_ns), ms(run.unmap_ns));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_run() {
        let report = Report {
            schema: 2,
            command: "bar-map",
            device: "0000:01:00.0".into(),
            region: 2,
            bytes: 32 << 30,
            align: name(BarAlignment::LargestPage),
            kernel: "7.2".into(),
            kernel_page_sizes: vec![4096, 1 << 21, 1 << 30],
            backend: Backend::Type1.to_string(),
            iommufd_error: Some("there is none".into()),
            method: "type1".into(),
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

    #[test]
    fn devices_and_alignments() {
        assert_eq!(device("vfio:01:00.0").unwrap().to_string(), "0000:01:00.0");
        assert!(device("soft").unwrap_err().contains("vfio:0000:01:00.0"));
        assert!(device("vfio:x").is_err());
        assert_eq!(align("auto"), Ok(BarAlignment::LargestPage));
        assert_eq!(align("none"), Ok(BarAlignment::Any));
        assert_eq!(align("4K"), Ok(BarAlignment::Exactly(PageSize::SIZE_4K)));
        assert_eq!(align("1024M"), Ok(BarAlignment::Exactly(PageSize::SIZE_1G)));
        for wrong in ["", "K", "3M", "1K", "-4K", "4", "4k", "1024G", "99999999999999999999G", "é", "0M"] {
            assert!(align(wrong).is_err(), "{wrong:?}");
        }
    }
}
