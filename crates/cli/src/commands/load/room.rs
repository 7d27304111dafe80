//! What fits a card, and which option makes room.

use dmalane::file::FileQueue;
use dmalane::load::{Error, Input, Layout, Placement};

use crate::device::{CARD_MOST, Device};
use crate::failure::Failure;
use crate::size::{Size, binary};

/// The memory that a load can use.
pub struct Room<'a> {
    /// Bytes of DDR.
    pub ddr: u64,
    /// Bytes of HBM.
    pub hbm: u64,
    /// The memory that gets the tensors.
    pub placement: Placement,
    /// Whose memory it is.
    pub device: &'a Device,
}

impl Room<'_> {
    /// Checks, before anything is written, that a sample fits the card and the temporary folder.
    pub fn check_sample(&self, size: u64) -> Result<(), Failure> {
        let room = self.largest_file();
        if size > room {
            let have = format!("the card has {} for it", binary(room));
            let failure = Failure::new(format!("a sample of {} does not fit the card: {have}", binary(size)));
            return Err(failure.hint(self.hint(&[size])));
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

    /// The error of a load, with what helps where the card is too small.
    pub fn load_failure(&self, error: &Error, inputs: &[Input<FileQueue>]) -> Failure {
        let failure = Failure::because("the load failed, and nothing of it stays on the card", error);
        match error {
            Error::CardFull { .. } => {
                let layouts = inputs.iter().map(|i| Layout::new(&i.model().ok()?).map(|l| l.bo_len));
                match layouts.collect::<Option<Vec<_>>>() {
                    Some(files) => failure.hint(self.hint(&files)),
                    None => failure,
                }
            }
            e if Failure::is_out_of_memory(e) => failure.hint(
                "the card's memory is this machine's: load less at a time; under ulimit -v a smaller --card-ddr or \
                 --card-hbm leaves more",
            ),
            _ => failure,
        }
    }

    /// Bytes of the largest file that fits an empty card.
    fn largest_file(&self) -> u64 {
        let ddr = self.ddr.next_multiple_of(2 << 20);
        let half = self.hbm.next_multiple_of(4 << 20) / 2;
        let tables = tables(ddr, 2 * half);
        match self.placement {
            // The tables are where there is most room.
            Placement::Ddr if ddr >= half => ddr.saturating_sub(tables),
            Placement::Ddr => ddr,
            Placement::HbmHalf => half,
            Placement::Hbm if ddr >= half => 2 * half,
            Placement::Hbm => 2 * half.saturating_sub(tables),
        }
    }

    /// Which option gives the card room for `files` of so many bytes, and a size that is enough for all of them.
    fn hint(&self, files: &[u64]) -> String {
        const SLACK: u64 = 4 << 20;
        let padded = || files.iter().map(|bytes| bytes.saturating_add(SLACK));
        let total = padded().fold(0, u64::saturating_add);
        let (option, needed, other) = match self.placement {
            Placement::Ddr => ("--card-ddr", total, self.hbm),
            // Each file goes to the half with more room, which then has at most half of the largest file more than half
            // of all.
            Placement::HbmHalf => ("--card-hbm", total.saturating_add(padded().max().unwrap_or(0)), self.ddr),
            Placement::Hbm => ("--card-hbm", total, self.ddr),
        };
        // Tables for the larger card; in HBM both halves lose what one gives to them.
        let tables = tables(needed.saturating_add(needed / 16).saturating_add(SLACK).min(1 << 40), other);
        let enough = needed.saturating_add(tables.saturating_mul(2)).saturating_add(SLACK);
        if enough > CARD_MOST.bytes() {
            return format!("that is more than {option} can be ({CARD_MOST}): load less at a time");
        }
        let enough = Size::about(enough);
        match self.device {
            Device::Soft => format!("{option} {enough} is enough"),
            Device::Daemon(_) => format!(
                "{option} {enough} is enough, if the daemon gives a client as much (dmalaned --client-{})",
                option.trim_start_matches("--card-")
            ),
            _ => format!("load less at a time, or onto a card with more ({enough} is enough)"),
        }
    }
}

/// What the device's page tables take of a card.
fn tables(ddr: u64, hbm: u64) -> u64 {
    ((ddr + hbm) / 128).max(128 << 10)
}
