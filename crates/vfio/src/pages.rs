//! The page sizes of the running kernel.

use std::fs;
use std::path::Path;

use dmalane_addr::{PageSize, PageSizes};

use crate::sys;

/// The page sizes with which the running kernel can map memory: its base page, its transparent huge page, and those of
/// hugetlbfs. They depend on the architecture and the configuration (4 KiB, 2 MiB, 1 GiB on x86-64; 16 KiB and 32 MiB
/// on some arm64).
pub fn page_sizes() -> PageSizes {
    read(Path::new("/"), sys::base_page())
}

fn read(root: &Path, base: u64) -> PageSizes {
    let mut sizes = PageSizes::from_bits(base);
    let huge = fs::read_to_string(root.join("sys/kernel/mm/transparent_hugepage/hpage_pmd_size"));
    let huge = huge.ok().and_then(|text| text.trim().parse().ok());
    let pools = fs::read_dir(root.join("sys/kernel/mm/hugepages")).into_iter().flatten().filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?.checked_mul(1024)
    });
    for page in huge.into_iter().chain(pools).filter_map(PageSize::new) {
        sizes = sizes.with(page);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_from_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(read(root.path(), 4096), PageSizes::from_bits(1 << 12));
        for pool in ["hugepages-2048kB", "hugepages-1048576kB", "hugepages-3kB", "hugepages-kB", "else"] {
            fs::create_dir_all(root.path().join("sys/kernel/mm/hugepages").join(pool)).unwrap();
        }
        assert_eq!(read(root.path(), 4096), PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30));
        let thp = root.path().join("sys/kernel/mm/transparent_hugepage");
        fs::create_dir_all(&thp).unwrap();
        fs::write(thp.join("hpage_pmd_size"), "33554432\n").unwrap();
        assert!(read(root.path(), 16384).contains(PageSize::from_log2(25).unwrap()));
        assert!(page_sizes().smallest().is_some());
    }
}
