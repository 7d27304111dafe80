//! Opening a device by name.

use std::error::Error;

use dmalane_device::{Device, contents};
use dmalane_load::OpenDevice;
use thiserror::Error;

use crate::devices::BadDeviceSpec;
use crate::open_options::OpenOptions;
use crate::spec::DeviceSpec;

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
        spec.open(self).map_err(|source| OpenError::Device { spec: spec.clone(), source })
    }
}

/// Why a device was not opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The text names no device.
    #[error(transparent)]
    Spec(#[from] BadDeviceSpec),
    /// It could not be opened.
    #[error("cannot open {spec}")]
    Device {
        /// Which device.
        spec: DeviceSpec,
        /// The error of its kind: [`dmalane_vfio::Error`], [`dmalane_card::Error`] and so on.
        source: Box<dyn Error + Send + Sync>,
    },
    /// It was opened, and cannot be driven as was asked for.
    #[error(transparent)]
    Drive(dmalane_load::Error),
}
