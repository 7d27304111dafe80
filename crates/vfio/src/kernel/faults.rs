//! What the IOMMU stopped, from the kernel's log.
//!
//! VFIO tells user space nothing of an access that the IOMMU stopped; the kernel's log does (`/dev/kmsg`, which as a rule only root may
//! read), at a limited rate.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use dmalane_addr::Iova;

use crate::Bdf;

/// An access of a device that the IOMMU stopped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeenFault {
    /// The device.
    pub bdf: Bdf,
    /// Where it reached for; whole pages on some IOMMUs.
    pub at: Iova,
    /// It wanted to write.
    pub write: bool,
    /// The kernel's line.
    pub line: String,
}

/// The kernel's log from now on.
pub struct FaultLog {
    log: File,
}

impl FaultLog {
    /// Opens the log at its end.
    ///
    /// # Errors
    /// The kernel's: who may not read the log gets `PermissionDenied`.
    pub fn open() -> io::Result<Self> {
        let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self { log })
    }

    /// The faults since the last call.
    pub fn take(&mut self) -> Vec<SeenFault> {
        let mut faults = Vec::new();
        let mut record = [0; 8192];
        loop {
            // One record each. EPIPE: some were overwritten before they were read; the next is there.
            match self.log.read(&mut record) {
                Ok(0) => return faults,
                Ok(n) => faults.extend(fault(&String::from_utf8_lossy(&record[..n]))),
                Err(e) if e.raw_os_error() == Some(libc::EPIPE) || e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return faults,
            }
        }
    }
}

/// The fault that a record ("priority,number,time,flags;text") tells of, if it does. Lines of Intel's driver
/// (drivers/iommu/intel/dmar.c) are known.
fn fault(record: &str) -> Option<SeenFault> {
    let line = record.split_once(';')?.1.lines().next()?;
    let rest = line.strip_prefix("DMAR: [DMA ")?;
    let write = rest.starts_with("Write");
    let (_, rest) = rest.split_once("Request device [")?;
    let (device, rest) = rest.split_once(']')?;
    let (_, rest) = rest.split_once("fault addr ")?;
    let digits = rest.split_whitespace().next()?.trim_start_matches("0x");
    Some(SeenFault {
        bdf: device.parse().ok()?,
        at: Iova::new(u64::from_str_radix(digits, 16).ok()?),
        write,
        line: line.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let seen = fault(
            "3,412,5120000,-;DMAR: [DMA Write NO_PASID] Request device [00:03.0] fault addr 0x7f000 [fault reason 0x05] PTE Write access is not set\n",
        );
        let seen = seen.unwrap();
        assert_eq!((seen.bdf.to_string().as_str(), seen.at, seen.write), ("0000:00:03.0", Iova::new(0x7f000), true));
        assert!(seen.line.ends_with("PTE Write access is not set"));
        let read =
            fault("3,1,2,-;DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0x1000 [fault reason 0x06] x");
        assert!(!read.unwrap().write);
        for other in [
            "",
            "no semicolon",
            "6,1,2,-;vfio-pci 0000:00:03.0: enabling device",
            "3,1,2,-;DMAR: [DMA Write] Request device [xx] fault addr 1",
        ] {
            assert_eq!(fault(other), None, "{other}");
        }
    }
}
