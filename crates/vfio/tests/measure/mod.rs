//! The cost of mapping host memory: `scripts/vm dma-map` prints the table.

use super::*;

const LEN: usize = 1 << 30;
const ROUNDS: usize = 3;
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Maps and unmaps, and prints a row of the table. The device accesses the memory while it is mapped.
fn row(backend: Backend, by_address: bool, memory: &str, buf: &SharedBuf) {
    let container = VfioContainer::with_backend(backend);
    let edu = edu_in(&container, edus()[0]);
    let call = match (backend, by_address || buf.export().is_none()) {
        (Backend::Type1, _) => "VFIO_IOMMU_MAP_DMA",
        (_, true) => "IOMMU_IOAS_MAP",
        (_, false) => "IOMMU_IOAS_MAP_FILE",
    };
    if by_address {
        container.map_by_address();
    }
    let times: Vec<(u128, u128)> = (0..ROUNDS)
        .map(|round| {
            let pinned = edu.bus().pin(&buf.reference()).unwrap();
            let began = Instant::now();
            let mapping = edu.bus().map(pinned, Access::RW).unwrap();
            let map = began.elapsed();
            let bytes = pattern(round as u64 + 1, 2000);
            buf.as_volatile_slice().sub(LEN - 2000, 2000).unwrap().write(&bytes);
            let at = |offset: usize| mapping.span().first().checked_add(offset as u64).unwrap();
            edu.copy(Direction::FromHost, at(LEN - 2000), CardAddr::new(0), 2000).unwrap();
            edu.copy(Direction::ToHost, at(LEN / 2 + 5), CardAddr::new(0), 2000).unwrap();
            let mut got = vec![0; 2000];
            buf.as_volatile_slice().sub(LEN / 2 + 5, 2000).unwrap().read(&mut got);
            assert!(got == bytes, "{backend} {memory}");
            let began = Instant::now();
            drop(mapping);
            (map.as_nanos(), began.elapsed().as_nanos())
        })
        .collect();
    assert_eq!((container.mapped_bytes(), container.failed_unmaps(), left_behind(&container)), (0, 0, 0));
    let (first, map) = (times[0].0, times.iter().map(|t| t.0).min().unwrap());
    let unmap = times.iter().map(|t| t.1).min().unwrap();
    let (major, minor) = release();
    let times = format!(r#""first_ns":{first},"map_ns":{map},"unmap_ns":{unmap}"#);
    println!(r#"ROW {{"kernel":"{major}.{minor}","memory":"{memory}","call":"{call}",{times}}}"#);
}

#[test]
fn mapping_of_host_memory() {
    type Make = fn() -> Box<dyn Heap>;
    let kinds: [(&str, PageKind, Make); 4] = [
        ("4 KiB, anonymous", PageKind::Base, || Box::new(AnonHeap::starting_at(PageKind::Base))),
        ("4 KiB, memfd", PageKind::Base, || Box::new(MemfdHeap::starting_at(PageKind::Base))),
        ("2 MiB, memfd", PageKind::Hugetlb2M, || Box::new(MemfdHeap::starting_at(PageKind::Hugetlb2M))),
        ("1 GiB, memfd", PageKind::Hugetlb1G, || Box::new(MemfdHeap::starting_at(PageKind::Hugetlb1G))),
    ];
    for (memory, kind, make) in kinds {
        let before = fs::read_to_string(POOL).unwrap();
        if kind == PageKind::Hugetlb2M {
            fs::write(POOL, (LEN >> 21).to_string()).unwrap();
        }
        let buf = make().allocate(LEN).unwrap();
        assert_eq!(buf.backing().kind, kind, "{:?}", buf.backing().passed_over);
        let buf = buf.share();
        row(Backend::Type1, false, memory, &buf);
        row(Backend::Iommufd, true, memory, &buf);
        if buf.export().is_some() {
            row(Backend::Iommufd, false, memory, &buf);
        }
        drop(buf);
        fs::write(POOL, before.trim()).unwrap();
    }
}
