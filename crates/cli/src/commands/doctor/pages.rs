//! Checks of huge pages.

use dmalane::dma::{NoPages, PageKind};

use super::check::{Check, Subject};
use super::hardware::kernel_option;
use super::host::HOST_BUFFERS;
use crate::probe::Probe;
use crate::size::binary;

const POOLS: &str = "/sys/kernel/mm/hugepages";
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";

/// One pool of reserved pages.
struct Pool {
    total: u64,
    free: u64,
    /// Free or to be had on demand, and not promised to anybody.
    usable: u64,
}

fn pool(probe: &Probe, kib: u64) -> Option<Pool> {
    let number = |name| probe.number(format!("{POOLS}/hugepages-{kib}kB/{name}"));
    let (total, free) = (number("nr_hugepages")?, number("free_hugepages")?);
    let on_demand =
        number("nr_overcommit_hugepages").unwrap_or(0).saturating_sub(number("surplus_hugepages").unwrap_or(0));
    let promised = number("resv_hugepages").unwrap_or(0);
    Some(Pool { total, free, usable: free.saturating_sub(promised).saturating_add(on_demand) })
}

pub fn reserved_2m(probe: &Probe) -> Check {
    let subject = Subject::useful(
        "hugepages_2m",
        "the best buffers for direct I/O: few segments, few page-table leaves, zeroed fastest",
    );
    let Some(Pool { total, free, usable }) = pool(probe, 2048) else {
        return subject.missing("the kernel has none", kernel_option("CONFIG_HUGETLBFS"));
    };
    let need = HOST_BUFFERS >> 21;
    let found = format!("{free} free of {total}");
    if usable >= need {
        return subject.ok(format!("{found} ({} usable)", binary(usable.saturating_mul(2 << 20))));
    }
    subject.missing(
        format!("{found}; a load with the default --chunk takes {need}"),
        reserve(probe, 2048, HOST_BUFFERS).unwrap_or_default(),
    )
}

/// The command that reserves the huge pages of `kib` KiB that buffers of `bytes` bytes lack; `None` where there are
/// enough.
fn reserve(probe: &Probe, kib: u64, bytes: u64) -> Option<String> {
    let Pool { total, usable, .. } = pool(probe, kib)?;
    let lacking = bytes.div_ceil(kib << 10).checked_sub(usable).filter(|lacking| *lacking > 0)?;
    let wanted = total.saturating_add(lacking);
    Some(format!("echo {wanted} | sudo tee {POOLS}/hugepages-{kib}kB/nr_hugepages"))
}

/// Why buffers of `bytes` bytes in all do not have these pages, with the command of [`reserve`] where it helps: for at
/// least the bytes that `doctor` counts. `command` writes it, for [`wrap`](crate::layout::wrap) as one word.
pub fn why_not((kind, why): &(PageKind, NoPages), bytes: u64, command: fn(&str) -> String) -> String {
    let kib = if *kind == PageKind::Hugetlb1G { 1 << 20 } else { 2048 };
    match why {
        NoPages::NotReserved { .. } => match reserve(&Probe::machine(), kib, bytes.max(HOST_BUFFERS)) {
            Some(fix) => format!("{kind}: too few are free; more with: {}", command(&fix)),
            None => format!("{kind}: too few were free"),
        },
        _ => format!("{kind}: {why}"),
    }
}

pub fn transparent(probe: &Probe) -> Check {
    let subject = Subject::useful("thp", "transparent huge pages take over where no reserved ones are left");
    setting(probe, subject, "enabled", "madvise", &["always", "madvise"])
}

pub fn transparent_shared(probe: &Probe) -> Check {
    let subject = Subject::useful(
        "shmem_thp",
        "transparent huge pages for shared memory, which is what the software card's memory is",
    );
    setting(probe, subject, "shmem_enabled", "advise", &["always", "within_size", "advise", "force"])
}

fn setting(probe: &Probe, subject: Subject, file: &str, best: &str, good: &[&str]) -> Check {
    match (probe.choice(format!("{TRANSPARENT}/{file}")), probe.text(format!("{TRANSPARENT}/{file}"))) {
        (Some(choice), _) if good.contains(&choice.as_str()) => subject.ok(choice),
        (Some(choice), _) if ["never", "deny"].contains(&choice.as_str()) => {
            subject.missing(choice, format!("echo {best} | sudo tee {TRANSPARENT}/{file}"))
        }
        (_, Some(_)) => subject.note("a setting that this program does not know"),
        (_, None) => subject.missing("the kernel has none", kernel_option("CONFIG_TRANSPARENT_HUGEPAGE")),
    }
}
