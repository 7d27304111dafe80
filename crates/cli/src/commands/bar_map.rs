//! `dmalane bar-map`: the time that it takes to map a BAR for DMA.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use dmalane::addr::{Access, PageSize};
use dmalane::devices::vfio::VfioSpec;
use dmalane::error_chain;
use dmalane::vfio::{Backend, BarAlignment, Bdf, PciDevice, VfioContainer, page_sizes};
use serde::Serialize;

use crate::device;
use crate::failure::Failure;
use crate::layout::plain;
use crate::output;
use crate::range::Range;
use crate::size::{self, Size};

const EXAMPLES: &str = "\
Examples:
  dmalane bar-map -d vfio:0000:01:00.0                          aligned to the largest page
  dmalane bar-map -d vfio:0000:01:00.0 --align none --times 10  where mmap puts it, 10 times
  dmalane bar-map -d vfio:0000:01:00.0 --region 2 --align 2MiB --json
  dmalane bar-map -d vfio:0000:01:00.0 --range 2MiB..1GiB       part of the BAR
  dmalane bar-map -d vfio:0000:01:00.0 -d vfio:0000:02:00.0     each BAR for both devices
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
pub(crate) struct BarMap {
    /// The device: vfio:DOMAIN:BUS:DEVICE.FUNCTION; repeat it to map the BARs of several devices in one IOMMU address
    /// space, for all of them
    #[arg(short, long = "device", value_name = "DEVICE", value_parser = vfio, required = true)]
    devices: Vec<Bdf>,

    /// The BAR, from 0 to 5 [default: the largest that can be mapped]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=5))]
    region: Option<u32>,

    /// Only this part of the BAR, in whole pages: 4KiB..1GiB; either end may be left out
    #[arg(long, value_name = "START..END")]
    range: Option<Range>,

    /// Kernel interface that opens the device [default: iommufd where this user can open it, else type1; see `dmalane
    /// doctor`]
    #[arg(long, value_enum)]
    backend: Option<Backend>,

    /// Alignment of the address: 4KiB, 2MiB, 1GiB (exactly that), auto (the largest page size of this kernel that
    /// fits), none (the address that mmap chooses)
    #[arg(long, value_name = "ALIGN", default_value = "auto", value_parser = align)]
    align: BarAlignment,

    /// Times to map for DMA and unmap, from 1 to 1000, as a guest does while it boots
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    times: u32,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    /// As asked for.
    align: String,
    kernel: String,
    kernel_page_sizes: Vec<u64>,
    /// How the devices were opened.
    backend: String,
    /// Why iommufd was not used, where that is not what was asked for.
    iommufd_error: Option<String>,
    bars: Vec<Bar>,
}

#[derive(Serialize)]
struct Bar {
    device: String,
    region: u32,
    /// The first byte of the BAR that was mapped.
    start: u64,
    bytes: u64,
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
        let container = self.backend.map_or_else(VfioContainer::new, VfioContainer::with_backend);
        let opened: Vec<_> = self.devices.iter().map(|bdf| container.open(bdf)).collect::<Result<_, _>>()?;
        let bars = opened.iter().map(|device| self.measure(&container, device)).collect::<Result<_, _>>()?;
        let report = Report {
            schema: 3,
            command: "bar-map",
            align: name(self.align),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            kernel_page_sizes: page_sizes().iter().map(PageSize::bytes).collect(),
            backend: container.backend().map_or_else(String::new, |backend| backend.to_string()),
            iommufd_error: container.iommufd_error().map(|why| error_chain(why)),
            bars,
        };
        output::tell(self.json, || &report, || text(&report))
    }

    /// Maps one BAR and unmaps it.
    fn measure(&self, container: &VfioContainer, device: &PciDevice) -> Result<Bar, Failure> {
        let region = self.region.or_else(|| largest(device));
        let region = region.ok_or_else(|| Failure::new(format!("{} has no BAR that can be mapped", device.bdf())))?;
        let len = device.regions().get(region as usize).map_or(0, |found| found.len);
        let range = self.range.map(|range| range.start..range.end.unwrap_or(len));
        let began = Instant::now();
        let bar = Arc::new(device.map_bar(region, range, self.align)?);
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
        let (start, bytes, alignment) = (bar.range().start, bar.len(), bar.alignment().bytes());
        let began = Instant::now();
        drop(bar);
        let munmap_ns = nanos(began.elapsed());
        let device = device.bdf().to_string();
        Ok(Bar { device, region, start, bytes, method, alignment, mmap_ns, munmap_ns, runs })
    }
}

fn vfio(text: &str) -> Result<Bdf, String> {
    let bdf = device::parse(text)?.get::<VfioSpec>().map(|spec| spec.bdf);
    bdf.ok_or_else(|| "not a VFIO device: write vfio:0000:01:00.0".to_owned())
}

fn align(text: &str) -> Result<BarAlignment, &'static str> {
    match text {
        "auto" => Ok(BarAlignment::LargestPage),
        "none" => Ok(BarAlignment::Any),
        _ => {
            let size = text.parse().ok().map(Size::bytes).filter(|size| (4 << 10..=512 << 30).contains(size));
            size.and_then(PageSize::new)
                .map(BarAlignment::Exactly)
                .ok_or("not an alignment: 4KiB, 2MiB, 1GiB (a power of two), auto or none")
        }
    }
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
        BarAlignment::Exactly(page) => page.to_string(),
        _ => "none".to_owned(),
    }
}

fn text(report: &Report) -> String {
    let ms = |ns: u64| format!("{:.3} ms", ns as f64 / 1e6);
    let sizes: Vec<_> = report.kernel_page_sizes.iter().map(|n| size::binary(*n)).collect();
    let mut text =
        format!("Linux {} with pages of {}, opened by {}\n", plain(&report.kernel), sizes.join(", "), report.backend);
    if let Some(why) = &report.iommufd_error {
        text += &format!("not by iommufd: {}\n", plain(why));
    }
    for bar in &report.bars {
        let from = if bar.start == 0 { String::new() } else { format!(" from {} on", size::binary(bar.start)) };
        text += &format!(
            "\n{} region {}: {}{from}, aligned to {} ({})\nmmap {}, munmap {}\n",
            bar.device,
            bar.region,
            size::binary(bar.bytes),
            size::binary(bar.alignment),
            report.align,
            ms(bar.mmap_ns),
            ms(bar.munmap_ns)
        );
        for run in &bar.runs {
            text += &format!("for DMA by {}: map {}, unmap {}\n", bar.method, ms(run.map_ns), ms(run.unmap_ns));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_line_for_each_run() {
        let bar = |device: &str, start| Bar {
            device: device.into(),
            region: 2,
            start,
            bytes: (32 << 30) - start,
            method: "type1".into(),
            alignment: 1 << 30,
            mmap_ns: 12_000,
            munmap_ns: 5_400,
            runs: vec![Run { map_ns: 9_048, unmap_ns: 1_361_000_000 }],
        };
        let report = Report {
            schema: 3,
            command: "bar-map",
            align: name(BarAlignment::LargestPage),
            kernel: "7.2".into(),
            kernel_page_sizes: vec![4096, 1 << 21, 1 << 30],
            backend: Backend::Type1.to_string(),
            iommufd_error: Some("there is none".into()),
            bars: vec![bar("0000:01:00.0", 0), bar("0000:02:00.0", 16 << 30)],
        };
        let wanted = "Linux 7.2 with pages of 4 KiB, 2 MiB, 1 GiB, opened by type1\nnot by iommufd: there is none\n\n\
             0000:01:00.0 region 2: 32 GiB, aligned to 1 GiB (auto)\n\
             mmap 0.012 ms, munmap 0.005 ms\nfor DMA by type1: map 0.009 ms, unmap 1361.000 ms\n\n\
             0000:02:00.0 region 2: 16 GiB from 16 GiB on, aligned to 1 GiB (auto)\n\
             mmap 0.012 ms, munmap 0.005 ms\nfor DMA by type1: map 0.009 ms, unmap 1361.000 ms\n";
        assert_eq!(text(&report), wanted);
        assert_eq!(serde_json::to_value(&report).unwrap()["bars"][0]["runs"][0]["map_ns"], 9048);
    }

    #[test]
    fn several_devices_and_a_range() {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            command: BarMap,
        }
        let parse = |words: &str| Line::try_parse_from(words.split(' ')).map(|line| line.command);
        let found = parse("x -d vfio:01:00.0 -d vfio:02:00.0 --range 2MiB..").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found.devices.len(), 2);
        assert_eq!(found.range, Some(Range { start: 2 << 20, end: None }));
        assert!(parse("x --range 2MiB..").is_err() && parse("x -d vfio:01:00.0 --range 5..5").is_err());
    }

    #[test]
    fn devices_and_alignments() {
        assert_eq!(vfio("vfio:01:00.0").unwrap().to_string(), "0000:01:00.0");
        assert!(vfio("soft").unwrap_err().contains("vfio:0000:01:00.0"));
        assert!(vfio("vfio:x").is_err());
        assert_eq!(align("auto"), Ok(BarAlignment::LargestPage));
        assert_eq!(align("none"), Ok(BarAlignment::Any));
        assert_eq!(align("4KiB"), Ok(BarAlignment::Exactly(PageSize::SIZE_4K)));
        assert_eq!(align("1024MiB"), Ok(BarAlignment::Exactly(PageSize::SIZE_1G)));
        for wrong in ["", "KiB", "3MiB", "1KiB", "-4KiB", "4", "4k", "99999999999999999999GiB", "é", "0MiB"] {
            assert!(align(wrong).is_err(), "{wrong:?}");
        }
    }
}
