//! Checks whether files fit a device, and names what has more room.

use dmalane::addr::PageSize;
use dmalane::device::AddressSpaceKind;
use dmalane::devices::soft;
use dmalane::file::FileQueue;
use dmalane::load::fill::FillError;
use dmalane::load::{Error, Input};
use dmalane::{DeviceSpec, OpenDevice, Placement};

use crate::device;
use crate::failure::Failure;
use crate::size::{Size, binary};

/// Bytes, at most, of the gaps between the tensors of a sample: some 33 KiB for each of its up to 64 layers.
fn sample_gaps(size: u64) -> u64 {
    (128 << 10) + (size / 64).min(4 << 20)
}

/// The failure where the machine has too little memory; `None` for another error.
pub fn no_room(error: &FillError) -> Option<Failure> {
    let FillError::NoRoom { what, wanted, left, limited_by } = error else { return None };
    let message = format!("{what} need {}, and {limited_by} has {} left", binary(*wanted), binary(*left));
    Some(Failure::new(message))
}

/// The memory that a load can use.
pub struct LoadRoom<'a> {
    /// Bytes of the largest file that fits the empty device.
    largest_file: u64,
    /// Bytes of all regions outside the group that gets the tensors.
    elsewhere: u64,
    /// Bytes of the largest of them.
    largest_elsewhere: u64,
    /// The memory that gets the tensors, and the group of regions that it is in.
    placement: &'a Placement,
    group: String,
    /// Bytes of addresses, where the device has fewer of them than of memory.
    addresses: Option<u64>,
    /// One region that files have to themselves: no MMU, and so no page tables.
    plain: bool,
    /// The device with this memory.
    spec: &'a DeviceSpec,
}

impl<'a> LoadRoom<'a> {
    /// The memory of a device with nothing loaded.
    pub fn of(device: &mut OpenDevice, spec: &'a DeviceSpec, placement: &'a Placement) -> Self {
        let flat = device.address_space().kind() == AddressSpaceKind::Flat;
        let addresses = device.address_space().room();
        let memory = device.memory();
        let plain = flat && memory.regions().count() == 1;
        let group = match placement {
            Placement::Named(name) | Placement::OneOf(name) => name.to_string(),
            _ => memory.regions().next().map_or(String::new(), |region| region.group.to_string()),
        };
        let others = memory.regions().filter(|region| region.group != group);
        let others: Vec<u64> = others.map(|region| region.span.len()).collect();
        let largest_elsewhere = others.iter().copied().max().unwrap_or(0);
        let elsewhere = others.into_iter().fold(0, u64::saturating_add);
        let room = memory.room(placement);
        let (largest_file, addresses) = (room.min(addresses), (addresses < room).then_some(addresses));
        Self { largest_file, addresses, plain, elsewhere, largest_elsewhere, placement, group, spec }
    }

    /// Checks, before anything is written, that a sample fits the device and the temporary folder.
    pub fn check_sample(&self, size: u64) -> Result<(), Failure> {
        let room = self.largest_file;
        if let Some(addresses) = self.addresses.filter(|most| size > *most) {
            let have = format!("{} has addresses for {}", self.spec, binary(addresses));
            let failure = Failure::new(format!("a sample of {} does not fit: {have}", binary(size)));
            return Err(failure.hint(format!("-d {},flat takes none", self.spec)));
        }
        if size > room {
            let have = format!("{} has {} for a file", self.spec, binary(room));
            let failure = Failure::new(format!("a sample of {} does not fit: {have}", binary(size)));
            let gaps = if self.plain { sample_gaps(size) } else { 0 };
            return Err(failure.hint(self.hint(&[size.saturating_add(gaps)])));
        }
        let folder = std::env::temp_dir();
        // Where it cannot be told, writing will tell.
        let free = rustix::fs::statvfs(&folder).map_or(u64::MAX, |s| s.f_bavail.saturating_mul(s.f_frsize));
        if size > free {
            let message = format!("a sample of {} does not fit in {}", binary(size), folder.display());
            return Err(Failure::new(format!("{message}: {} are free", binary(free)))
                .hint("another folder can be set with TMPDIR"));
        }
        Ok(())
    }

    /// The error of a load, with what helps where the device is too small.
    pub fn load_failure(&self, error: &Error, device: &mut OpenDevice, inputs: &[Input<FileQueue>]) -> Failure {
        let refused = match error {
            Error::Fill(fill) => no_room(fill),
            // Before anything was begun.
            Error::Format { .. } => Some(Failure::because("nothing was loaded", error)),
            _ => None,
        };
        let failed = || Failure::because("the load failed, and nothing of it stays on the device", error);
        let failure = refused.unwrap_or_else(failed);
        match error {
            Error::DeviceMemory { source: dmalane::device::MemoryError::Full { .. }, .. } => {
                let mut bytes = |i: &Input<_>| device.layout(i.source.model().ok()?).map(|layout| layout.bo_len);
                match inputs.iter().map(&mut bytes).collect::<Option<Vec<_>>>() {
                    Some(files) => failure.hint(self.hint(&files)),
                    None => failure,
                }
            }
            Error::DeviceMemory { source, .. } => device::with_overwrite_hint(failure, source),
            e if Failure::is_out_of_memory(e) || matches!(e, Error::Fill(FillError::NoRoom { .. })) => failure.hint(
                "the card's memory is this machine's: load less at a time; under ulimit -v a smaller card leaves more \
                 (-d soft,ddr=SIZE,hbm=SIZE)",
            ),
            _ => failure,
        }
    }

    /// The device that has room for files of these sizes.
    fn hint(&self, files: &[u64]) -> String {
        match self.more(files) {
            Some(what) => what,
            None if self.spec.kind().options().iter().any(|option| option.key == self.group) => {
                let (group, most) = (&self.group, Size::new(soft::MOST));
                format!("that is more than {group}=SIZE can be ({most}): load less at a time")
            }
            None => format!(
                "load less at a time, or onto a device with more ({} is enough)",
                Size::about(self.enough(files))
            ),
        }
    }

    /// A device with room for buffers of these sizes; `None` where no name gives one.
    pub fn more(&self, buffers: &[u64]) -> Option<String> {
        Some(format!("{} is enough", self.spec.more(&self.group, self.enough(buffers))?))
    }

    /// Bytes of the group in which files of these sizes fit, and the page tables.
    fn enough(&self, files: &[u64]) -> u64 {
        const SLACK: u64 = 4 << 20;
        let slack = if self.plain { 0 } else { SLACK };
        // A long file begins at a large page.
        let end = files.iter().fold(slack, |end: u64, bytes| {
            let large = *bytes >= PageSize::SIZE_2M.bytes();
            let align = if large { PageSize::SIZE_2M } else { PageSize::SIZE_16K };
            let first = align.round_up(end.saturating_add(slack)).unwrap_or(u64::MAX);
            first.saturating_add(PageSize::SIZE_16K.round_up((*bytes).max(1)).unwrap_or(u64::MAX))
        });
        let needed = match self.placement {
            // Each file goes to the half with more room, which then has at most half of the largest file more than half
            // of all.
            Placement::OneOf(_) => end.saturating_add(files.iter().copied().max().unwrap_or(0)).saturating_add(slack),
            _ => end,
        };
        // Page tables lie at the end of the longest region of the card, so often not here. They take a 128th of the
        // card; in HBM both halves lose what one gives to them.
        match self.plain || needed < self.largest_elsewhere {
            true => needed,
            false => needed.saturating_add(needed.saturating_add(self.elsewhere) / 32),
        }
    }
}
