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
    lines: Lines,
}

impl FaultLog {
    /// Opens the log at its end.
    ///
    /// # Errors
    /// The kernel's: who may not read the log gets `PermissionDenied`.
    pub fn open() -> io::Result<Self> {
        let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self { log, lines: Lines::default() })
    }

    /// The faults since the last call. An IOMMU that stops each word of a copy may report many of them, and the kernel drops what exceeds its rate.
    pub fn take(&mut self) -> Vec<SeenFault> {
        let mut faults = Vec::new();
        let mut record = [0; 8192];
        loop {
            // One record each. EPIPE: some were overwritten before they were read; the next is there.
            match self.log.read(&mut record) {
                Ok(0) => return faults,
                Ok(n) => faults.extend(self.lines.fault(&String::from_utf8_lossy(&record[..n]))),
                Err(e) if e.raw_os_error() == Some(libc::EPIPE) || e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return faults,
            }
        }
    }
}

/// What is known of a fault whose second line is still to come.
#[derive(Default)]
struct Lines {
    arm: Option<SeenFault>,
}

impl Lines {
    /// The fault that a record ("priority,number,time,flags;text") tells of, or ends to tell of. Known are the lines of Intel's driver
    /// (drivers/iommu/intel/dmar.c) and of Arm's for the SMMUv3 (drivers/iommu/arm/arm-smmu-v3/arm-smmu-v3.c, from Linux 6.14 on; before, it
    /// printed the words of the event, which do not name the device).
    fn fault(&mut self, record: &str) -> Option<SeenFault> {
        let line = record.split_once(';')?.1.lines().next()?;
        if let Some(rest) = line.strip_prefix("arm-smmu-v3 ") {
            let (_, rest) = rest.split_once(": ")?;
            if let Some(event) = rest.strip_prefix("event: F_") {
                self.arm = smmu(event).map(|(bdf, at)| SeenFault { bdf, at, write: false, line: line.to_owned() });
                return None;
            }
            // Says of what was announced whether it was a read: "unpriv data write s1 ...".
            let write = match rest.split_whitespace().nth(2)? {
                "write" => true,
                "read" => false,
                _ => return None,
            };
            return self.arm.take().map(|fault| SeenFault { write, ..fault });
        }
        intel(line)
    }
}

fn intel(line: &str) -> Option<SeenFault> {
    let rest = line.strip_prefix("DMAR: [DMA ")?;
    let write = rest.starts_with("Write");
    let (_, rest) = rest.split_once("Request device [")?;
    let (device, rest) = rest.split_once(']')?;
    let (_, rest) = rest.split_once("fault addr ")?;
    let at = hex(rest.split_whitespace().next()?)?;
    Some(SeenFault { bdf: device.parse().ok()?, at, write, line: line.to_owned() })
}

/// Of "TRANSLATION client: 0000:00:02.0 sid: 0x10 ssid: 0x0 iova: 0x1000 ipa: 0x0": device and address.
fn smmu(event: &str) -> Option<(Bdf, Iova)> {
    let field = |name: &str| event.split_once(name)?.1.split_whitespace().next();
    Some((field(" client: ")?.parse().ok()?, hex(field(" iova: ")?)?))
}

fn hex(digits: &str) -> Option<Iova> {
    u64::from_str_radix(digits.trim_start_matches("0x"), 16).ok().map(Iova::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(record: &str) -> Option<SeenFault> {
        Lines::default().fault(record)
    }

    #[test]
    fn two_lines_of_an_smmu() {
        let said = [
            "3,1,2,-;arm-smmu-v3 9050000.smmuv3: event 0x10 received:\n SUBSYSTEM=platform\n",
            "3,2,2,-;arm-smmu-v3 9050000.smmuv3: \t0x0000001000000010",
            "3,3,2,-;arm-smmu-v3 9050000.smmuv3: event: F_TRANSLATION client: 0000:00:02.0 sid: 0x10 ssid: 0x0 iova: 0x1010 ipa: 0x0\n SUBSYSTEM=platform",
            "6,4,2,-;usb 1-1: something else between",
            "3,5,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data write s1 \"CD fetch\" stag: 0x0",
            "3,6,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data write s1 \"CD fetch\" stag: 0x0",
            "3,7,2,-;arm-smmu-v3 9050000.smmuv3: event: F_PERMISSION client: 0000:01:00.0 sid: 0x100 ssid: 0x0 iova: 0xffffffff0 ipa: 0x0",
            "3,8,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data read s1 \"\" stag: 0x0",
            "3,9,2,-;arm-smmu-v3 9050000.smmuv3: event: C_BAD_STE client: (unassigned sid) sid: 0x1 ssid: 0x0",
            "3,9,2,-;arm-smmu-v3 9050000.smmuv3: event: F_TRANSLATION client: (unassigned sid) sid: 0x1 ssid: 0x0 iova: 0x0 ipa: 0x0",
            "3,9,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data read s1 \"\" stag: 0x0",
        ];
        let mut lines = Lines::default();
        let seen: Vec<_> = said.into_iter().filter_map(|record| lines.fault(record)).collect();
        let seen: Vec<_> = seen.iter().map(|f| (f.bdf.to_string(), f.at.bits(), f.write)).collect();
        assert_eq!(
            seen,
            [("0000:00:02.0".to_owned(), 0x1010, true), ("0000:01:00.0".to_owned(), 0xf_ffff_fff0, false)]
        );
    }

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
