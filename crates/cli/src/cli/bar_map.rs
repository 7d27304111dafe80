//! The options of `dmalane bar-map`, and their help.

use clap::Args;
use dmalane::addr::PageSize;
use dmalane::vfio::{Backend, BarAlignment, Bdf};

use crate::bar_map::BarMapArgs;

const EXAMPLES: &str = "\
Examples:
  dmalane bar-map -d vfio:0000:01:00.0                          aligned to the largest page that fits
  dmalane bar-map -d vfio:0000:01:00.0 --align none --times 10  where mmap puts it, ten times
  dmalane bar-map -d vfio:0000:01:00.0 --region 2 --align 2M --json
  dmalane bar-map -d vfio:0000:01:00.0 --way type1              by container and group, where iommufd would be taken

The device must be bound to vfio-pci; `dmalane devices` lists those that are.

Exit status: 0 mapped and unmapped, 1 no such device, no permission or the kernel refused, 2 wrong command line.";

/// Map a BAR of a device for DMA, and say how long that takes.
///
/// A BAR is first mapped into this process, then through the IOMMU, as for another device or a guest. Kernels from 6.15 on do that by the
/// pages that the BAR is mapped with, so it depends on the address. By iommufd (Linux 7) the BAR is given as a dma-buf, and the address does not matter.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct BarMapOptions {
    /// The device: vfio:DOMAIN:BUS:DEVICE.FUNCTION
    #[arg(short, long, value_name = "DEVICE", value_parser = device)]
    device: Bdf,

    /// The BAR, from 0 to 5; by default the largest that can be mapped
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=5))]
    region: Option<u32>,

    /// How the kernel is asked for the device: iommufd, type1, or auto (iommufd where that is there and open to this user; `dmalane doctor`
    /// explains which it is)
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = way)]
    way: Chosen,

    /// The alignment of the address: 4K, 2M, 1G (exactly that), auto (the largest page that this kernel has and that fits), none (where mmap
    /// puts it)
    #[arg(long, value_name = "ALIGN", default_value = "auto", value_parser = align)]
    align: BarAlignment,

    /// How many times it is mapped for DMA and unmapped, from 1 to 1000, as a guest does while it boots
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    times: u32,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// A way, or none in particular. (An `Option` would say to clap that the option may be left out.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Chosen(Option<Backend>);

impl From<BarMapOptions> for BarMapArgs {
    fn from(options: BarMapOptions) -> Self {
        let BarMapOptions { device, region, way: Chosen(way), align, times, json } = options;
        Self { device, region, way, align, times, json }
    }
}

fn device(text: &str) -> Result<Bdf, String> {
    let bdf = text.strip_prefix("vfio:").ok_or("not a device of VFIO: write vfio:0000:01:00.0")?;
    bdf.parse().map_err(|e: dmalane::vfio::BadBdf| e.to_string())
}

fn way(text: &str) -> Result<Chosen, &'static str> {
    match text {
        "auto" => Ok(Chosen(None)),
        "iommufd" => Ok(Chosen(Some(Backend::Iommufd))),
        "type1" => Ok(Chosen(Some(Backend::Type1))),
        _ => Err("not a way: auto, iommufd or type1"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_alignments() {
        assert_eq!(device("vfio:01:00.0").unwrap().to_string(), "0000:01:00.0");
        assert!(device("soft").unwrap_err().contains("vfio:0000:01:00.0"));
        assert!(device("vfio:x").is_err());
        assert_eq!(way("auto"), Ok(Chosen(None)));
        assert_eq!(way("iommufd"), Ok(Chosen(Some(Backend::Iommufd))));
        assert_eq!(way("type1"), Ok(Chosen(Some(Backend::Type1))));
        assert!(way("Type1").is_err());
        assert_eq!(align("auto"), Ok(BarAlignment::LargestPage));
        assert_eq!(align("none"), Ok(BarAlignment::Any));
        assert_eq!(align("4K"), Ok(BarAlignment::Exactly(PageSize::SIZE_4K)));
        assert_eq!(align("1024M"), Ok(BarAlignment::Exactly(PageSize::SIZE_1G)));
        for wrong in ["", "K", "3M", "1K", "-4K", "4", "4k", "1024G", "99999999999999999999G", "é", "0M"] {
            assert!(align(wrong).is_err(), "{wrong:?}");
        }
    }
}
