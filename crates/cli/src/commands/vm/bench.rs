//! `dmalane vm bench`: single pages of a large buffer, bound and unbound.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use dmalane::addr::{Access, CardAddr, DeviceVa, PageSize, Segment, Span};
use dmalane::device::{AddressSpaceKind, Placement, SpaceError};
use dmalane::iopt::{FormatId, HeapTables};
use dmalane::vm::{BindRequest, Bo, Error, any_vm};
use dmalane::{DeviceSpec, OpenOptions};

use crate::commands::iopt::FORMAT;
use crate::device;
use crate::failure::Failure;
use crate::layout::plain;
use crate::output;
use crate::size::Size;

pub(super) const EXAMPLES: &str = "\
Examples:
  dmalane vm bench                            4 GiB, 100000 binds, in tables of Apple's GPUs
  dmalane vm bench 256MiB 10000 --format x86-64-4level
  dmalane vm bench 256MiB 10000 -d soft       in the address space of a device

Exit status: 0 measured, 1 the device or the tables refused it, 2 usage error.";

/// The least page that is bound: that of Apple's GPUs.
const PAGE: u64 = 16 << 10;
/// Pages of a buffer at most.
const MOST: u64 = 1 << 24;

/// Bind random pages of a large buffer, unbind them, and print how long that took.
///
/// One call binds the first page, a second one all others, each at the next address, and a third one unbinds them, as
/// in the test of a pull request for Linux's driver of Apple GPUs (AsahiLinux/linux 495), whose lines it prints. The
/// time of the first bind contains the index of the buffer's segments. Without a device no two pages of the buffer
/// follow each other in memory.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Bench {
    /// Size of the buffer, in whole pages of 16KiB or what the device has
    #[arg(value_name = "BO_SIZE", default_value = "4GiB")]
    bo_size: Size,

    /// Pages to bind
    #[arg(value_name = "BINDS", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(2..=MOST))]
    binds: u64,

    /// The page-table format, as `dmalane iopt formats` names it
    #[arg(short, long, value_parser = FORMAT, hide_possible_values = true, default_value = "agx-uat")]
    format: FormatId,

    #[arg(short, long, value_name = "DEVICE", conflicts_with = "format", value_parser = device::NAME)]
    #[arg(hide_possible_values = true, help = device::help("Bind in the address space of a device"))]
    device: Option<DeviceSpec>,
}

/// Memory for page tables without a device.
const TABLE_BYTES: u64 = 256 << 20;

/// How a page is bound, and where the buffer and the addresses lie.
struct Place {
    name: String,
    page: u64,
    first: DeviceVa,
    segments: Vec<Segment<CardAddr>>,
}

impl Bench {
    pub fn run(self) -> Result<ExitCode, Failure> {
        match &self.device {
            None => self.in_tables()?,
            Some(spec) => self.on_device(spec)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn in_tables(&self) -> Result<(), Failure> {
        let no_vm = |e: Error| Failure::because(format!("no tables of {}", self.format), &e);
        let whole = Span::new(DeviceVa::new(0), 1 << self.format.facts().input_bits).expect("at most 63 bits");
        let limit = TABLE_BYTES / self.format.facts().shape.table.bytes();
        let tables = HeapTables::with_limit(CardAddr::new(0), limit as usize);
        let mut vm = any_vm(self.format, whole, None, tables).map_err(no_vm)?;
        let (page, first) = (self.page(vm.granule())?, vm.range().first());
        let pages = self.bo_size.bytes() / page;
        // An odd factor and a power of two: each place is taken once, and no two in a row are neighbours.
        let place = |i: u64| i.wrapping_mul(0x9e37_79b1) % pages.next_power_of_two();
        let segments = (0..pages).map(|i| Segment { addr: CardAddr::new(place(i) * page), len: page }).collect();
        let place = Place { name: format!("{} page tables", self.format), page, first, segments };
        self.measure(place, |requests| {
            let committed = vm.apply(requests, false).map_err(|e| e.error)?;
            vm.invalidated(committed); // no device walks these tables
            Ok(())
        })
    }

    fn on_device(&self, spec: &DeviceSpec) -> Result<(), Failure> {
        let mut device = OpenOptions::default().device(spec).map_err(|e| device::cannot_open(&e))?;
        let (name, mut memory, space) = (device.info().name, device.memory(), device.address_space());
        if space.kind() == AddressSpaceKind::Flat {
            return Err(Failure::new(format!("{spec} has no address space to bind in")));
        }
        let page = self.page(space.page())?;
        let table = memory.allocate(self.bo_size.bytes(), &Placement::Default);
        let table = table.map_err(|e| Failure::because("no memory for the buffer", &e))?;
        let refused = |e: SpaceError| Failure::because(format!("{spec} refused it"), &e);
        let range = space.reserve(&table, self.binds * page).map_err(refused)?;
        let place = Place { name, page, first: range.first(), segments: table.segments().collect() };
        let measured = self.measure(place, |requests| {
            space.apply(&requests)?;
            space.settle()
        });
        space.release(range).map_err(refused)?;
        measured
    }

    /// Bytes of a page where the least one is this.
    fn page(&self, least: PageSize) -> Result<u64, Failure> {
        let (page, size) = (least.bytes().max(PAGE), self.bo_size.bytes());
        match size / page {
            pages if (1..=MOST).contains(&pages) && size.is_multiple_of(page) => Ok(page),
            _ => Err(Failure::usage(format!("BO_SIZE is not 1 to 2^24 whole pages of {}", Size::new(page)))),
        }
    }

    fn measure(
        &self,
        Place { name, page, first, segments }: Place,
        mut apply: impl FnMut(Vec<BindRequest>) -> Result<(), SpaceError>,
    ) -> Result<(), Failure> {
        let (size, binds) = (self.bo_size.bytes(), self.binds);
        let pages = size / page;
        let mut number = 42u64;
        let offsets = (0..binds).map(|_| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            page * ((number >> 33) % pages)
        });
        let offsets: Vec<u64> = offsets.collect();
        let va = |i: u64| first + i * page;
        let unbinds = (0..binds).filter_map(|i| Span::new(va(i), page)).map(BindRequest::Unbind).collect::<Vec<_>>();

        // As in the kernel, whose first bind of a buffer in a VM makes the index.
        let begun = Instant::now();
        let bo = Bo::of_segments(1, segments).map_err(|e| Failure::because("the buffer has no index", &e))?;
        let (bo, index) = (Arc::new(bo), begun.elapsed());
        let bind = |(i, offset): (u64, u64)| BindRequest::Bind {
            va: va(i),
            bo: bo.clone(),
            offset,
            len: page,
            access: Access::RW,
        };
        let mut binds: Vec<_> = (0..).zip(offsets).map(bind).collect();
        let others = binds.split_off(1);
        let mut timed = |requests: Vec<BindRequest>| {
            let begun = Instant::now();
            apply(requests).map_err(|e| Failure::because("refused", &e))?;
            Ok::<_, Failure>(begun.elapsed())
        };
        let (first, others, unbinds) = (timed(binds)? + index, timed(others)?, timed(unbinds)?);
        let binds = self.binds;
        let mut out = format!("Testing on {} with BO size {size} ({pages} pages) with {binds} binds\n", plain(&name));
        out += &format!(" first bind: {}ns\n", first.as_nanos());
        out += &line("other binds", "bind", binds - 1, others);
        out += &line("unbinds", "unbind", binds, unbinds);
        output::print_text(&out)
    }
}

/// A line about operations, and the time that they took together.
fn line(what: &str, each: &str, operations: u64, took: Duration) -> String {
    let ns = (took.as_secs_f64() * 1e9).max(1.0) / operations as f64;
    format!(" {what}: {}ns per {each}: {ns:.1}ns {:.6}Mop/s\n", took.as_nanos(), 1e3 / ns)
}
