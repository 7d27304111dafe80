//! Checks whether files fit a device, and says what helps.

use dmalane::load::Error;
use dmalane::load::fill::FillError;
use dmalane::{DeviceSpec, OpenDevice, Placement};

use crate::device;
use crate::failure::Failure;
use crate::size::binary;

const MORE: &str = "load less at a time, or onto a device with more memory; the software card has what is asked for: \
                    -d soft,ddr=SIZE,hbm=SIZE, or dmalaned --client-ddr SIZE";

/// The failure where the machine has too little memory; `None` for another error.
pub fn no_room(error: &FillError) -> Option<Failure> {
    let FillError::NoRoom { what, wanted, left, limited_by } = error else { return None };
    let message = format!("{what} need {}, and {limited_by} has {} left", binary(*wanted), binary(*left));
    Some(Failure::new(message))
}

/// Checks, before anything is written, that a sample fits the device, with nothing loaded, and the temporary folder.
pub fn check_sample(
    size: u64,
    device: &mut OpenDevice,
    spec: &DeviceSpec,
    placement: &Placement,
) -> Result<(), Failure> {
    let (room, addresses) = (device.memory().room(placement), device.address_space().room());
    let does_not_fit = |have: String| Failure::new(format!("a sample of {} does not fit{have}", binary(size)));
    if size > addresses && addresses < room {
        let failure = does_not_fit(format!(": {spec} has addresses for {}", binary(addresses)));
        return Err(failure.hint(format!("-d {spec},flat takes none")));
    }
    if size > room {
        return Err(does_not_fit(format!(": {spec} has {} for a file", binary(room))).hint(MORE));
    }
    let folder = std::env::temp_dir();
    // Where it cannot be told, writing will tell.
    let free = rustix::fs::statvfs(&folder).map_or(u64::MAX, |s| s.f_bavail.saturating_mul(s.f_frsize));
    if size > free {
        let failure = does_not_fit(format!(" in {}: {} are free", folder.display(), binary(free)));
        return Err(failure.hint("another folder can be set with TMPDIR"));
    }
    Ok(())
}

/// The error of a load, with what helps where the device is too small.
pub fn load_failure(error: &Error) -> Failure {
    let refused = match error {
        Error::Fill(fill) => no_room(fill),
        // Before anything was begun.
        Error::Format { .. } => Some(Failure::because("nothing was loaded", error)),
        _ => None,
    };
    let failed = || Failure::because("the load failed, and nothing of it stays on the device", error);
    let failure = refused.unwrap_or_else(failed);
    match error {
        Error::DeviceMemory { source, .. } if source.is_full() => failure.hint(MORE),
        Error::DeviceMemory { source, .. } => device::with_overwrite_hint(failure, source),
        e if Failure::is_out_of_memory(e) || matches!(e, Error::Fill(FillError::NoRoom { .. })) => failure.hint(
            "the card's memory is this machine's: load less at a time; under ulimit -v a smaller card leaves more \
             (-d soft,ddr=SIZE,hbm=SIZE)",
        ),
        _ => failure,
    }
}
