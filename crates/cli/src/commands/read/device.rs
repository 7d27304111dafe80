//! The device that gets what `dmalane read --device` has read.

use std::fs::Metadata;
use std::path::PathBuf;

use dmalane::device::MemoryError;
use dmalane::load::fill::Filled;
use dmalane::queue::{DeviceAddr, QueueAddr};
use dmalane::{DeviceSpec, OpenDevice, OpenOptions, Placement};

use crate::device;
use crate::failure::Failure;
use crate::room::LoadRoom;
use crate::size::binary;

/// Bytes that are read back at a time.
const STEP: usize = 2 << 20;

/// A device with room for some buffers.
pub struct ReadTarget {
    /// The device.
    pub device: OpenDevice,
    /// Where each buffer goes.
    pub to: Vec<DeviceAddr>,
}

impl ReadTarget {
    /// Opens the device, of which none of the inputs may be the memory, and takes room for buffers of these lengths.
    pub fn open<'a>(
        spec: &DeviceSpec,
        options: &OpenOptions,
        inputs: impl IntoIterator<Item = &'a (PathBuf, Metadata)>,
        buffers: &[u64],
    ) -> Result<Self, Failure> {
        let mut device = device::open(spec, options)?;
        device::check_inputs(spec, device.backing_files(), inputs)?;
        let more = LoadRoom::of(&mut device, spec, &Placement::Default).more(buffers);
        let hint = more.unwrap_or_else(|| "read less at a time with --range".to_owned());
        let mut to = Vec::new();
        for len in buffers {
            // A buffer of no bytes goes nowhere.
            let place = device.memory_mut().reserve((*len).max(1)).map_err(|e| match e {
                MemoryError::Full { .. } => {
                    Failure::new(format!("the device has no {} left for a file", binary(*len))).hint(&hint)
                }
                e => device::with_overwrite_hint(Failure::because(format!("cannot write to {spec}"), &e), &e),
            })?;
            to.push(DeviceAddr::Card(place.first()));
        }
        Ok(Self { device, to })
    }

    /// Reads everything back from the device and compares it.
    pub fn verify(&mut self, filled: &Filled) -> Result<(), Failure> {
        let (mut back, mut here) = (vec![0; STEP], vec![0; STEP]);
        for (buffer, to) in filled.buffers.iter().zip(&self.to) {
            for at in (0..buffer.len()).step_by(STEP) {
                let n = STEP.min(buffer.len() - at);
                let place = to.advance(at as u64).ok_or_else(|| Failure::new("a buffer runs past the device"))?;
                let read = self.device.read(place, &mut back[..n]);
                read.map_err(|e| Failure::because("cannot read back from the device", &e))?;
                if let Some(view) = buffer.as_volatile_slice().sub(at, n) {
                    view.read(&mut here[..n]);
                }
                if back[..n] != here[..n] {
                    let message = format!("the device does not have what was read, from byte {at} of a buffer on");
                    return Err(Failure::new(message).hint("please report it"));
                }
            }
        }
        Ok(())
    }
}
