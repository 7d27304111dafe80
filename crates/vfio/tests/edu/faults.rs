//! IOMMU faults, from the kernel's log.
//!
//! VFIO does not report an access that the IOMMU stopped. The kernel's log does (`/dev/kmsg`, which usually only root
//! may read), at a limited rate.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use dmalane_addr::Iova;
use dmalane_vfio::Bdf;

/// An access of a device that the IOMMU stopped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IommuFault {
    /// The device.
    pub bdf: Bdf,
    /// The IOVA; on some IOMMUs only the page.
    pub at: Iova,
    /// The access was a write.
    pub write: bool,
    /// The kernel's line.
    pub line: String,
}

/// The kernel's log, from the moment it was opened.
pub struct FaultLog {
    log: File,
    parser: Parser,
}

impl FaultLog {
    /// Opens the log at its end.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without permission to read the log.
    pub fn open() -> io::Result<Self> {
        let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self { log, parser: Parser::default() })
    }

    /// Returns the faults since the last call. One copy may cause many faults, and the kernel drops reports above its
    /// rate limit.
    pub fn take(&mut self) -> Vec<IommuFault> {
        let mut faults = Vec::new();
        let mut record = [0; 8192];
        loop {
            // Each read returns one record. EPIPE: records were overwritten before they were read; the next read
            // continues after them.
            match self.log.read(&mut record) {
                Ok(0) => return faults,
                Ok(n) => faults.extend(self.parser.fault(&String::from_utf8_lossy(&record[..n]))),
                Err(e) if e.raw_os_error() == Some(libc::EPIPE) || e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return faults,
            }
        }
    }
}

/// Parses records of the log.
#[derive(Default)]
struct Parser {
    /// A fault of an SMMU, whose second record is still to come.
    arm: Option<IommuFault>,
}

impl Parser {
    /// Parses a record ("priority,number,time,flags;text") and returns a fault if the record completes one. Supports
    /// Intel's driver (drivers/iommu/intel/dmar.c) and Arm's for the SMMUv3
    /// (drivers/iommu/arm/arm-smmu-v3/arm-smmu-v3.c, since Linux 6.14; before, its messages did not name the device).
    fn fault(&mut self, record: &str) -> Option<IommuFault> {
        let line = record.split_once(';')?.1.lines().next()?;
        if let Some(rest) = line.strip_prefix("arm-smmu-v3 ") {
            let (_, rest) = rest.split_once(": ")?;
            if let Some(event) = rest.strip_prefix("event: F_") {
                self.arm = smmu(event).map(|(bdf, at)| IommuFault { bdf, at, write: false, line: line.to_owned() });
                return None;
            }
            // The second record has the direction: "unpriv data write s1 ...".
            let write = match rest.split_whitespace().nth(2)? {
                "write" => true,
                "read" => false,
                _ => return None,
            };
            return self.arm.take().map(|fault| IommuFault { write, ..fault });
        }
        intel(line)
    }
}

fn intel(line: &str) -> Option<IommuFault> {
    let rest = line.strip_prefix("DMAR: [DMA ")?;
    let write = rest.starts_with("Write");
    let (_, rest) = rest.split_once("Request device [")?;
    let (device, rest) = rest.split_once(']')?;
    let (_, rest) = rest.split_once("fault addr ")?;
    let at = hex(rest.split_whitespace().next()?)?;
    Some(IommuFault { bdf: device.parse().ok()?, at, write, line: line.to_owned() })
}

/// Device and address of "TRANSLATION client: 0000:00:02.0 sid: 0x10 ssid: 0x0 iova: 0x1000 ipa: 0x0".
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

    fn fault(record: &str) -> Option<IommuFault> {
        Parser::default().fault(record)
    }

    #[test]
    fn records_of_an_smmu() {
        let records = [
            "3,1,2,-;arm-smmu-v3 9050000.smmuv3: event 0x10 received:\n SUBSYSTEM=platform\n",
            "3,2,2,-;arm-smmu-v3 9050000.smmuv3: \t0x0000001000000010",
            "3,3,2,-;arm-smmu-v3 9050000.smmuv3: event: F_TRANSLATION client: 0000:00:02.0 \
             sid: 0x10 ssid: 0x0 iova: 0x1010 ipa: 0x0\n SUBSYSTEM=platform",
            "6,4,2,-;usb 1-1: something else between",
            "3,5,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data write s1 \"CD fetch\" stag: 0x0",
            "3,6,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data write s1 \"CD fetch\" stag: 0x0",
            "3,7,2,-;arm-smmu-v3 9050000.smmuv3: event: F_PERMISSION client: 0000:01:00.0 \
             sid: 0x100 ssid: 0x0 iova: 0xffffffff0 ipa: 0x0",
            "3,8,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data read s1 \"\" stag: 0x0",
            "3,9,2,-;arm-smmu-v3 9050000.smmuv3: event: C_BAD_STE client: (unassigned sid) sid: 0x1 ssid: 0x0",
            "3,9,2,-;arm-smmu-v3 9050000.smmuv3: event: F_TRANSLATION client: (unassigned sid) \
             sid: 0x1 ssid: 0x0 iova: 0x0 ipa: 0x0",
            "3,9,2,-;arm-smmu-v3 9050000.smmuv3: unpriv data read s1 \"\" stag: 0x0",
        ];
        let mut parser = Parser::default();
        let seen: Vec<_> = records.into_iter().filter_map(|record| parser.fault(record)).collect();
        let seen: Vec<_> = seen.iter().map(|f| (f.bdf.to_string(), f.at.bits(), f.write)).collect();
        assert_eq!(
            seen,
            [("0000:00:02.0".to_owned(), 0x1010, true), ("0000:01:00.0".to_owned(), 0xf_ffff_fff0, false)]
        );
    }

    #[test]
    fn records_of_intel() {
        let seen = fault(
            "3,412,5120000,-;DMAR: [DMA Write NO_PASID] Request device [00:03.0] \
             fault addr 0x7f000 [fault reason 0x05] PTE Write access is not set\n",
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
