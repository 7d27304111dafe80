//! Memory use of this process, as the kernel counts it.

use crate::room::bytes_of;

/// The memory of this process, from `/proc/self/status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Footprint {
    /// Anonymous memory present, in bytes (`RssAnon`).
    pub anonymous: u64,
    /// Shared memory present, memfds included, in bytes (`RssShmem`).
    pub shared: u64,
    /// hugetlbfs pages mapped, in bytes (`HugetlbPages`; not part of the two above).
    pub hugetlb: u64,
}

/// Reads the current memory use; `None` where `/proc` is not mounted.
pub fn footprint() -> Option<Footprint> {
    Some(parse(&std::fs::read_to_string("/proc/self/status").ok()?))
}

fn parse(status: &str) -> Footprint {
    let field = |name| bytes_of(status, name).unwrap_or(0);
    Footprint { anonymous: field("RssAnon"), shared: field("RssShmem"), hugetlb: field("HugetlbPages") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernel_format() {
        let text = "VmRSS:\t 100 kB\nRssAnon:\t      96 kB\nRssShmem:\t 4 kB\nHugetlbPages:\t    2048 kB\n";
        assert_eq!(parse(text), Footprint { anonymous: 96 << 10, shared: 4 << 10, hugetlb: 2 << 20 });
        assert_eq!(parse(""), Footprint::default());
        assert!(footprint().unwrap().anonymous > 0);
    }
}
