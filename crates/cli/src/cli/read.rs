//! The options of `dmalane read` and `dmalane inspect`, and their help.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::inspect::InspectArgs;
use crate::load::Device;
use crate::read::{Heap, Pages, Range, ReadArgs, Scheme};
use crate::size::{self, Size};

const READ_EXAMPLES: &str = "\
Examples:
  dmalane read model.safetensors --explain       how it was read, and why that way
  dmalane read shard-*.safetensors --json        a buffer for each file
  dmalane read model.bin --heap memfd --pages thp --gather 16MiB
  dmalane read model.bin --scheme sequential     allocate all of it first, to compare
  dmalane read model.bin --range 1GiB..2GiB --direct
  dmalane read model.bin --map --explain         what registering and mapping each gather costs
  dmalane read model.bin -d soft --verify        and onto the software card, piece by piece; or daemon, vfio:BDF, vfio-user:SOCKET
  zcat model.bin.gz | dmalane read /dev/stdin

Reads files into memory that devices can use, while it is still being allocated, and lets go of it again.

Exit status: 0 read, 1 bad file or no memory, 2 wrong command line.";

const INSPECT_EXAMPLES: &str = "\
Examples:
  dmalane inspect model.safetensors    how much of it is in the page cache
  dmalane inspect $(pidof trainer)     the pages of a process's large buffers
  dmalane inspect ./4711               a file whose name is a number

Exit status: 0 looked at, 1 no such file or process, 2 wrong command line.";

/// Read files into DMA-ready memory while it is being allocated.
#[derive(Args)]
#[command(after_help = READ_EXAMPLES)]
pub struct ReadOptions {
    /// Files to read, each into a buffer of its own
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Where the memory comes from; by default the fastest that gives what is asked for
    #[arg(long, value_enum, default_value_t = Heap::Auto)]
    heap: Heap,

    /// The best pages to try
    #[arg(long, value_enum, default_value_t = Pages::Huge)]
    pages: Pages,

    /// The buffers must be such that another process can map them
    #[arg(long)]
    shareable: bool,

    /// The buffers must be such that a driver can import them as a dma-buf
    #[arg(long)]
    dma_buf: bool,

    /// The NUMA node whose memory it must be
    #[arg(long, value_name = "N")]
    node: Option<u32>,

    /// Pin and map each gather for a device as soon as it is there, with the software host's IOMMU
    #[arg(long)]
    map: bool,

    /// Send what has arrived on to this device at once, while the rest is read; each gather is mapped for it: soft, daemon or daemon:SOCKET,
    /// vfio:BDF or vfio-user:SOCKET
    #[arg(short, long, value_parser = super::device, conflicts_with = "map")]
    device: Option<Device>,

    /// DDR of the software card, by default 64GiB, or asked of a daemon; at most 256GiB; rounded up to 2MiB
    #[arg(long, value_name = "SIZE", value_parser = super::card_memory, allow_hyphen_values = true, requires = "device")]
    card_ddr: Option<Size>,

    /// Read back what the device got, and compare it
    #[arg(long, requires = "device")]
    verify: bool,

    /// The order of allocating and reading
    #[arg(long, value_enum, default_value_t = Scheme::Overlap)]
    scheme: Scheme,

    /// Choose for each file: through the page cache what is in it, past it what is not; this is the default
    #[arg(long, conflicts_with_all = ["direct", "buffered"])]
    auto: bool,

    /// Read with direct I/O or fail
    #[arg(long, conflicts_with = "buffered")]
    direct: bool,

    /// Read through the page cache
    #[arg(long)]
    buffered: bool,

    /// Bytes allocated together before reading into them starts, from 4KiB to 1GiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(2), value_parser = super::gather, allow_hyphen_values = true)]
    gather: Size,

    /// Reads in flight, from 1 to 4096
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    depth: u16,

    /// Bytes per read, from 64KiB to 1GiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(2), value_parser = block, allow_hyphen_values = true)]
    block: Size,

    /// Threads that allocate and read, from 1 to 64; by default one for direct reads, and as many as processors, 4 at most, for copies
    /// out of the page cache
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    threads: Option<u8>,

    /// Only these bytes of each file, for example 0..4096, 1GiB.. or ..1MiB
    #[arg(long, value_name = "START..END", value_parser = range)]
    range: Option<Range>,

    /// Refuse what needs more memory than this
    #[arg(long, value_name = "SIZE", value_parser = size::nonzero, allow_hyphen_values = true)]
    limit: Option<Size>,

    /// Give up after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,

    /// Do not hash what is read
    #[arg(long)]
    no_checksum: bool,

    /// Say how it was read, why that way, and how long what took
    #[arg(long)]
    explain: bool,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// Show what of a file is in the page cache, or what pages the buffers of a process have.
#[derive(Args)]
#[command(after_help = INSPECT_EXAMPLES)]
pub struct InspectOptions {
    /// A file, or the number of a process
    #[arg(value_name = "FILE|PID")]
    what: PathBuf,

    /// Mappings of at least this size count as buffers
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(1), value_parser = size::nonzero)]
    least: Size,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl ReadOptions {
    /// What does not go together and clap cannot know.
    pub fn conflict(&self) -> Option<String> {
        match &self.device {
            Some(card @ Device::Pci(_)) if self.card_ddr.is_some() => {
                Some(format!("--card-ddr is for a card in this process: {card} is as it is"))
            }
            _ => None,
        }
    }
}

impl From<ReadOptions> for ReadArgs {
    fn from(options: ReadOptions) -> Self {
        use dmalane::file::Mode;
        Self {
            files: options.files,
            heap: options.heap,
            pages: options.pages,
            shareable: options.shareable,
            dma_buf: options.dma_buf,
            node: options.node,
            map: options.map,
            device: options.device,
            card_ddr: options.card_ddr.map(Size::bytes),
            verify: options.verify,
            range: options.range,
            explain: options.explain,
            json: options.json,
            quiet: options.quiet,
            options: dmalane::ReadOptions {
                mode: match (options.buffered, options.direct) {
                    (true, _) => Mode::Buffered,
                    (_, true) => Mode::Direct,
                    _ => Mode::Auto,
                },
                scheme: options.scheme.into(),
                gather: options.gather.bytes(),
                depth: options.depth.into(),
                block: options.block.bytes() as usize,
                threads: options.threads.map(usize::from),
                checksum: !options.no_checksum,
                timeout: options.timeout,
                limit: options.limit.map(Size::bytes),
            },
        }
    }
}

impl From<InspectOptions> for InspectArgs {
    fn from(options: InspectOptions) -> Self {
        Self { what: options.what, least: options.least.bytes(), json: options.json }
    }
}

fn block(text: &str) -> Result<Size, String> {
    match text.parse::<Size>() {
        Ok(size) if (64 << 10..=1 << 30).contains(&size.bytes()) => Ok(size),
        Ok(_) => Err("not from 64KiB to 1GiB".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn range(text: &str) -> Result<Range, String> {
    let (start, end) = text.split_once("..").ok_or("write START..END, and leave out what is not bounded")?;
    let bound = |text: &str| match text {
        "" => Ok(None),
        text => text.parse::<Size>().map(|size| Some(size.bytes())).map_err(|e| format!("{text}: {e}")),
    };
    match (bound(start)?.unwrap_or(0), bound(end)?) {
        (start, Some(end)) if start >= end => Err("it ends before it starts".to_owned()),
        (start, end) => Ok(Range { start, end }),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("not a time".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(range("4096..1MiB"), Ok(Range { start: 4096, end: Some(1 << 20) }));
        assert_eq!(range("1GiB.."), Ok(Range { start: 1 << 30, end: None }));
        assert_eq!(range("..9"), Ok(Range { start: 0, end: Some(9) }));
        assert_eq!(range(".."), Ok(Range { start: 0, end: None }));
        for bad in ["", "5", "5..5", "6..5", "x..", "..16M", "-1.."] {
            assert!(range(bad).is_err(), "{bad}");
        }
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "1e99", "soon"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
