//! Opening a device by name.

use std::error::Error;

use dmalane_device::{Device, contents};
use dmalane_file::FileDeviceOptions;
use dmalane_load::{DriveOptions, OpenDevice};
use dmalane_sim::Workers;
use dmalane_slash::SlashOptions;
use dmalane_vulkan::VulkanOptions;
use thiserror::Error;

use crate::{BadDeviceSpec, DeviceSpec};

/// Opens a device by name, for example `soft`, `ram:64MiB` or `vfio:0000:01:00.0`.
///
/// ```
/// let mut device = dmalane::open("ram:64MiB")?;
/// let at = device.memory_mut().reserve(5)?.first();
/// device.write(at, b"hello")?;
/// let mut back = [0; 5];
/// device.read(at, &mut back)?;
/// # assert_eq!(&back, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`OpenError`].
pub fn open(spec: &str) -> Result<OpenDevice, OpenError> {
    OpenOptions::default().open(&spec.parse()?)
}

/// How a device is opened. `None` is the default of its kind; an option that a kind does not have is refused.
#[derive(Clone, Default)]
pub struct OpenOptions {
    /// How it is driven; every kind has that.
    pub drive: DriveOptions,
    /// No page tables and no sparse binding: addresses are card addresses, and all memory is for buffers. For cards and
    /// GPUs through Vulkan; other devices are so anyway, unless their name says otherwise (`cuda:0,vmm`).
    pub flat: bool,
    /// Bits of device virtual addresses of a card with page tables, 32 to 47 (default).
    pub va_bits: Option<u8>,
    /// Entries of each ring of a card, a power of two.
    pub ring: Option<usize>,
    /// Bytes of DDR of the software card, or asked of a daemon.
    pub card_ddr: Option<u64>,
    /// Bytes of HBM of the software card, or asked of a daemon.
    pub card_hbm: Option<u64>,
    /// DMA channels of the software card, 1 to 16.
    pub channels: Option<u32>,
    /// Threads of the software card.
    pub workers: Option<Workers>,
    /// Bytes of the synthetic physical memory of the software card's host.
    pub host_memory: Option<u64>,
    /// How scattered its frames are, 0 to 1.
    pub fragmentation: Option<f64>,
    /// Same seed, same frames.
    pub seed: Option<u64>,
    /// Memory may be allocated where a file or a block device that serves as device memory holds data.
    pub overwrite: bool,
    /// How files are opened as devices.
    pub file: Option<FileDeviceOptions>,
    /// How GPUs are opened.
    pub vulkan: Option<VulkanOptions>,
    /// How cards of the driver SLASH are opened.
    pub slash: Option<SlashOptions>,
}

impl OpenOptions {
    /// Opens a device. A file or a disk is [locked](contents::lock), so it can be open once.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(&self, spec: &DeviceSpec) -> Result<OpenDevice, OpenError> {
        let device = self.device(spec)?;
        if let Some(files) = device.backing_files() {
            contents::lock(&files.written)
                .map_err(|e| OpenError::Device { spec: spec.clone(), source: Box::new(e) })?;
        }
        OpenDevice::new(device, self.drive.clone()).map_err(OpenError::Drive)
    }

    /// Opens a device without driving it: its queues and all of its memory are the caller's. A file or a disk is not
    /// locked.
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenOptions::drive`] does not matter.
    pub fn device(&self, spec: &DeviceSpec) -> Result<Box<dyn Device>, OpenError> {
        if let Some(option) = self.refused(spec) {
            return Err(OpenError::Option { option, kind: spec.kind().name });
        }
        (spec.kind().open)(spec.rest(), self).map_err(|source| OpenError::Device { spec: spec.clone(), source })
    }

    /// The first option that was given and that devices of this kind do not have.
    pub fn refused(&self, spec: &DeviceSpec) -> Option<&'static str> {
        let kind = spec.kind();
        let has = |name: &str| kind.options.contains(&name) || (name == "flat" && kind.always_flat);
        self.given().into_iter().find(|(name, given)| *given && !has(name)).map(|(name, _)| name)
    }

    /// The name of each option that not every kind has, and whether it was given.
    fn given(&self) -> [(&'static str, bool); 14] {
        #[rustfmt::skip]
        let Self {
            drive: _, flat, va_bits, ring, card_ddr, card_hbm, channels, workers, host_memory, fragmentation, seed,
            overwrite, file, vulkan, slash,
        } = self;
        [
            ("flat", *flat),
            ("va-bits", va_bits.is_some()),
            ("ring", ring.is_some()),
            ("card-ddr", card_ddr.is_some()),
            ("card-hbm", card_hbm.is_some()),
            ("channels", channels.is_some()),
            ("workers", workers.is_some()),
            ("host-memory", host_memory.is_some()),
            ("fragmentation", fragmentation.is_some()),
            ("seed", seed.is_some()),
            ("overwrite", *overwrite),
            ("file", file.is_some()),
            ("vulkan", vulkan.is_some()),
            ("slash", slash.is_some()),
        ]
    }
}

/// Why a device was not opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The text names no device.
    #[error(transparent)]
    Spec(#[from] BadDeviceSpec),
    /// An option that devices of this kind do not have.
    #[error("a {kind} device has no option {option}")]
    Option {
        /// Which option.
        option: &'static str,
        /// Which kind.
        kind: &'static str,
    },
    /// It could not be opened.
    #[error("cannot open {spec}: {source}")]
    Device {
        /// Which device.
        spec: DeviceSpec,
        /// The error of its kind: [`dmalane_vfio::Error`], [`dmalane_daemon::ClientError`], [`dmalane_card::Error`] and
        /// so on.
        source: Box<dyn Error + Send + Sync>,
    },
    /// It was opened, and cannot be driven as was asked for.
    #[error(transparent)]
    Drive(dmalane_load::Error),
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::registry::KINDS;

    #[test]
    fn every_option_is_one_of_a_kind() {
        let options: BTreeSet<_> = OpenOptions::default().given().map(|(name, _)| name).into();
        let of_kinds: BTreeSet<_> = KINDS.iter().flat_map(|kind| kind.options).copied().collect();
        assert_eq!(options, of_kinds);
    }
}
