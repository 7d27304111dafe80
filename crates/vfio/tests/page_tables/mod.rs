//! The tables that Linux makes for a device: found through the registers of its IOMMU, read out of physical memory and
//! walked with `dmalane-iopt`, they must say what was mapped and nothing else.
//!
//! Needs root, `/proc/kcore`, busybox and the kernel parameter `iomem=relaxed`.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use dmalane_addr::{PhysAddr, SgTable};
use dmalane_dma::physical_runs;
use dmalane_iopt::{FaultKind, Format, FormatId, WalkFault, walk, with_format};

use super::*;

/// Input addresses that lead to addresses of physical memory.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Extent {
    at: u64,
    to: u64,
    len: u64,
    access: Access,
}

impl Extent {
    /// True when `next` goes on where this one ends.
    fn continues(&self, next: &Self) -> bool {
        (next.at - self.at, next.access) == (self.len, self.access) && next.to == self.to + self.len
    }
}

impl std::fmt::Debug for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x} -> {:#x}, {:#x} bytes {}", self.at, self.to, self.len, self.access)
    }
}

/// The same, in order and without seams.
fn merged(mut extents: Vec<Extent>) -> Vec<Extent> {
    extents.sort_by_key(|extent| extent.at);
    let mut all: Vec<Extent> = Vec::new();
    for next in extents {
        match all.last_mut() {
            Some(last) if last.continues(&next) => last.len += next.len,
            _ => all.push(next),
        }
    }
    all
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..at + N).unwrap_or_else(|| panic!("{} bytes end before {at:#x}", bytes.len()));
    field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Memory by physical address.
struct Physical {
    core: File,
    /// Where the file has which addresses.
    ram: Vec<(Range<u64>, u64)>,
    /// Pages that were read; `None` for those that are not there.
    pages: RefCell<HashMap<u64, Option<[u8; 4096]>>>,
}

impl Physical {
    fn open() -> Self {
        let core = File::open("/proc/kcore").expect("/proc/kcore, as root");
        let mut header = [0; 64];
        core.read_exact_at(&mut header, 0).unwrap();
        assert_eq!((word::<4>(&header, 0), header[4]), (0x464c_457f, 2), "a 64-bit ELF file");
        let (table, entry, count) = (word::<8>(&header, 0x20), word::<2>(&header, 0x36), word::<2>(&header, 0x38));
        let mut programs = vec![0; (entry * count) as usize];
        core.read_exact_at(&mut programs, table).unwrap();
        let ram = programs.chunks(entry as usize).filter_map(|program| {
            let [offset, first, len] = [0x8, 0x18, 0x20].map(|field| word::<8>(program, field));
            // Only memory has physical addresses; other parts have -1 or 0.
            let is_load = word::<4>(program, 0) == 1;
            let end = first.checked_add(len)?;
            (is_load && first < end && end < 1 << 52).then_some((first..end, offset))
        });
        let ram: Vec<_> = ram.collect();
        assert!(!ram.is_empty(), "/proc/kcore has no memory");
        Self { core, ram, pages: RefCell::default() }
    }

    /// A word of memory.
    fn load(&self, at: u64) -> Option<u64> {
        let mut pages = self.pages.borrow_mut();
        let page = pages.entry(at & !0xfff).or_insert_with_key(|first| {
            let (range, offset) = self.ram.iter().find(|(range, _)| range.contains(first))?;
            let mut page = [0; 4096];
            self.core.read_exact_at(&mut page, offset + (first - range.start)).ok()?;
            Some(page)
        });
        page.as_ref().map(|page| word::<8>(page, at as usize & 0xff8))
    }

    fn memory(&self, at: u64) -> u64 {
        self.load(at).unwrap_or_else(|| panic!("{at:#x} is not in /proc/kcore: {:x?}", self.ram))
    }

    /// Where the tables of a device are, and their format: what its IOMMU is told.
    fn tables_of(&self, bdf: Bdf) -> (FormatId, u64) {
        let text = bdf.to_string();
        let fields = text.split([':', '.']).map(|field| u64::from_str_radix(field, 16).unwrap());
        let [_, bus, device, function] = fields.collect::<Vec<_>>().try_into().unwrap();
        let function = device << 3 | function;
        let (format, root) = if let Some(base) = smmu() {
            self.by_smmu(base, bus << 8 | function)
        } else if let Some(base) = acpi_unit("DMAR", &[0]) {
            self.by_intel(base, bus, function)
        } else {
            let base = acpi_unit("IVRS", &[0x10, 0x11, 0x40]).expect("an IOMMU of Arm, Intel or AMD");
            self.by_amd(base, bus << 8 | function)
        };
        (format.parse().unwrap(), root)
    }

    /// "Intel Virtualization Technology for Directed I/O", revision 5.00, chapter 9.
    fn by_intel(&self, base: u64, bus: u64, function: u64) -> (String, u64) {
        let root = register(base + 0x20, 64);
        if root >> 10 & 3 == 1 {
            return self.by_intel_scalable(root & ADDRESS, bus, function);
        }
        assert_eq!(root >> 10 & 3, 0, "legacy mode: {root:#x}");
        let buses = self.memory((root & ADDRESS) + bus * 16);
        assert_eq!(buses & 1, 1, "a context table of bus {bus}: {buses:#x}");
        let context = (buses & ADDRESS) + function * 16;
        let [low, high] = [context, context + 8].map(|at| self.memory(at));
        assert_eq!(low & 0b1101, 1, "present, to be translated: {low:#x}");
        // The address width: 1 is 39 bits.
        (format!("vtd-second-{}", 30 + 9 * (high & 7)), low & ADDRESS)
    }

    /// In scalable mode a device has a directory of address spaces; one without numbers of them uses the first.
    fn by_intel_scalable(&self, roots: u64, bus: u64, function: u64) -> (String, u64) {
        let present = |at| {
            let entry = self.memory(at);
            assert_eq!(entry & 1, 1, "present: {entry:#x} at {at:#x}");
            entry
        };
        // Two tables a bus, of 128 functions each.
        let contexts = present(roots + bus * 16 + (function >> 7) * 8) & ADDRESS;
        let directory = present(contexts + (function & 0x7f) * 32) & ADDRESS;
        let space = present(directory) & ADDRESS;
        assert_eq!(present(space) >> 6 & 7, 1, "translated by the first stage");
        let stage = self.memory(space + 16);
        (format!("x86-64-{}level", 4 + (stage >> 2 & 3)), stage & ADDRESS)
    }

    fn by_amd(&self, base: u64, device: u64) -> (String, u64) {
        let entry = self.memory((register(base, 64) & ADDRESS) + device * 32);
        assert_eq!(entry & 3, 3, "valid, to be translated: {entry:#x}");
        (format!("amd-v1-{}level", entry >> 9 & 7), entry & ADDRESS)
    }

    /// By the stream table and a context descriptor: "Arm System Memory Management Unit Architecture Specification,
    /// version 3" (IHI 0070), 5.2 and 5.4.
    fn by_smmu(&self, base: u64, stream: u64) -> (String, u64) {
        let (table, layout) = (register(base + 0x80, 64) & BLOCK, register(base + 0x88, 32));
        let entry = match layout >> 16 & 3 {
            0 => table + stream * 64,
            _ => {
                let split = layout >> 6 & 0x1f;
                (self.memory(table + (stream >> split) * 8) & BLOCK) + (stream & ((1 << split) - 1)) * 64
            }
        };
        let stages = self.memory(entry);
        assert_eq!((stages & 0xf, stages >> 59), (0b1011, 0), "valid, the first stage translates: {stages:#x}");
        let context = stages & BLOCK;
        let [control, root] = [context, context + 8].map(|at| self.memory(at));
        assert_eq!(control & 0x3f, 64 - 48, "addresses of 48 bits: {control:#x}");
        let granule = ["4k", "64k", "16k"][(control >> 6 & 3) as usize];
        (format!("arm64-s1-{granule}"), root & BLOCK)
    }
}

/// Address bits of a table of 4 KiB.
const ADDRESS: u64 = (1 << 52) - (1 << 12);

/// Address bits of what an SMMU has, in blocks of 64 bytes.
const BLOCK: u64 = (1 << 52) - (1 << 6);

/// A word of registers, of so many bits.
fn register(at: u64, bits: u32) -> u64 {
    let output = Command::new("devmem").args([format!("{at:#x}"), bits.to_string()]).output().expect("busybox");
    let text = String::from_utf8_lossy(&output.stdout);
    let value = text.trim().strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    value.unwrap_or_else(|| panic!("the kernel needs iomem=relaxed: {output:?}"))
}

/// The registers of an SMMU that the device tree names.
fn smmu() -> Option<u64> {
    let nodes = fs::read_dir("/sys/firmware/devicetree/base").ok()?;
    nodes.flatten().find_map(|node| u64::from_str_radix(node.file_name().to_str()?.strip_prefix("smmuv3@")?, 16).ok())
}

/// The registers of the first IOMMU in one of ACPI's tables, whose entries are of these types. Where they say it, both
/// makers' tables are alike.
fn acpi_unit(table: &str, types: &[u8]) -> Option<u64> {
    let table = fs::read(format!("/sys/firmware/acpi/tables/{table}")).ok()?;
    let mut at = 48;
    while at < table.len() {
        if types.contains(&table[at]) {
            return Some(word::<8>(&table, at + 8));
        }
        at += (word::<2>(&table, at + 2) as usize).max(4);
    }
    panic!("an ACPI table of {} bytes without an IOMMU", table.len());
}

/// The runs that the tables map, and the bytes mapped by leaves of each size.
#[derive(Debug)]
struct Found {
    format: FormatId,
    extents: Vec<Extent>,
    sizes: BTreeMap<u64, u64>,
}

/// Goes from leaf to leaf and from hole to hole, as `dmalane iopt dump` does.
fn dump<F: Format>(format: FormatId, root: u64, load: impl Fn(u64) -> Option<u64>) -> Found {
    let (mut extents, mut sizes, mut at) = (Vec::new(), BTreeMap::new(), 0u64);
    loop {
        let len = match walk::<F>(root, at, &load) {
            Ok(leaf) => {
                let len = leaf.size.bytes() - (at & (leaf.size.bytes() - 1));
                let last = walk::<F>(root, at + len - 1, &load).map(|leaf| leaf.to);
                assert_eq!(last, Ok(leaf.to + len - 1), "the last byte of {leaf:?} at {at:#x}");
                extents.push(Extent { at, to: leaf.to, len, access: leaf.access });
                *sizes.entry(leaf.size.bytes()).or_default() += len;
                len
            }
            Err(WalkFault { kind: FaultKind::OutOfRange, .. }) => break,
            Err(WalkFault { kind: FaultKind::NotPresent, level, .. }) => {
                let bytes = F::GRANULE.bytes() << ((F::LEVELS - 1 - level) * F::INDEX_BITS);
                bytes - (at & (bytes - 1))
            }
            Err(fault) => panic!("{fault}"),
        };
        match at.checked_add(len) {
            Some(next) => at = next,
            None => break,
        }
    }
    Found { format, extents: merged(extents), sizes }
}

/// The tables of a device, as they are now.
fn tables(bdf: Bdf) -> Found {
    let physical = Physical::open();
    let (format, root) = physical.tables_of(bdf);
    let found = with_format!(format, F => dump::<F>(format, root, |at| physical.load(at)));
    let bytes: u64 = found.extents.iter().map(|extent| extent.len).sum();
    let pages = physical.pages.borrow().len();
    println!("{} at {root:#x}: {} runs, {bytes:#x} bytes, {pages} pages of tables", format.name(), found.extents.len());
    println!("  bytes by size of leaf: {:x?}", found.sizes);
    found
}

/// A buffer, and where its pages are: found when all of it is mapped, so that they stay there.
struct Memory {
    buf: SharedBuf,
    runs: OnceCell<SgTable<PhysAddr>>,
}

impl Memory {
    fn new(heap: &dyn Heap, kind: PageKind, len: usize) -> Self {
        let buf = heap.allocate(len).unwrap();
        assert_eq!(buf.backing().kind, kind, "{:?}", buf.backing().passed_over);
        Self { buf: buf.share(), runs: OnceCell::new() }
    }

    /// The physical addresses of a range.
    fn extents(&self, range: &Range<usize>, at: u64, access: Access) -> Vec<Extent> {
        let runs = self.runs.get_or_init(|| physical_runs(&self.buf).unwrap());
        let (mut extents, mut start) = (Vec::new(), 0);
        for run in runs.segments() {
            let (first, last) = (range.start.max(start) as u64, range.end.min(start + run.len as usize) as u64);
            if first < last {
                let to = run.addr.bits() + (first - start as u64);
                extents.push(Extent { at: at + first - range.start as u64, to, len: last - first, access });
            }
            start += run.len as usize;
        }
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), range.len() as u64);
        extents
    }
}

/// Mappings, with the places that the tables should have.
struct Mapped {
    container: VfioContainer,
    mappings: Vec<(Mapping, Vec<Extent>)>,
}

impl Mapped {
    /// Maps a part of a buffer; of each buffer all of it first.
    fn map(&mut self, memory: &Memory, range: Range<usize>, at: u64, access: Access) {
        let pinned = self.container.pin_range(&memory.buf.reference(), range.clone()).unwrap();
        let mapping = self.container.map_at(Iova::new(at), pinned, access).unwrap_or_else(|e| panic!("{at:#x}: {e}"));
        self.mappings.push((mapping, memory.extents(&range, at, access)));
    }

    fn check(&self, bdf: Bdf, others: &[Extent]) -> Found {
        let mut found = tables(bdf);
        // What may be written may be read too: a leaf of a processor's tables cannot say more, and Linux 6.12 makes no
        // other for VT-d.
        let is = |start| found.format.name().starts_with(start);
        let (processor, vtd) = (is("arm64") || is("x86-64"), is("vtd"));
        let implied = if processor || vtd && release() < (7, 0) { Access::READ } else { Access::empty() };
        if processor {
            // Linux has kinds of memory of its own, by a register of the SMMU, and lets a device fetch instructions.
            found.extents.iter_mut().for_each(|extent| extent.access &= Access::RW);
            found.extents = merged(found.extents);
        }
        let mapped = self.mappings.iter().flat_map(|(_, extents)| extents).chain(others);
        let wanted = merged(mapped.map(|extent| Extent { access: extent.access | implied, ..*extent }).collect());
        let differs = found.extents.iter().zip(&wanted).find(|(found, wanted)| found != wanted);
        assert_eq!(differs, None, "the tables have the first, the second was mapped");
        assert_eq!(found.extents.len(), wanted.len(), "{:?}", found.extents.last());
        found
    }
}

#[test]
fn the_kernels_tables_say_what_was_mapped() {
    const ACCESS: [Access; 3] = [Access::RW, Access::READ, Access::WRITE];
    let (bdf, container, small) = (edus()[0], container(), page() as u64);
    let _device = container.open(&bdf).unwrap();
    let last = container.iova_ranges().last().unwrap().last().bits();
    println!("addresses up to {last:#x}");
    let mut all = Mapped { container: container.clone(), mappings: Vec::new() };
    all.check(bdf, &[]);

    // Where the tables grow with the addresses, as those of AMD's IOMMU do, they are read at every number of levels.
    let pages = Memory::new(&AnonHeap::starting_at(PageKind::Base), PageKind::Base, 64 * page());
    for (bits, format) in [(38, "amd-v1-3level"), (47, "amd-v1-4level"), (56, "amd-v1-5level")] {
        if 1 << bits < last - (1 << 30) {
            all.map(&pages, 0..64 * page(), (1 << bits) + (1 << 20), Access::RW);
            let found = all.check(bdf, &[]).format.name();
            assert!(found == format || !found.starts_with("amd"), "{found} with addresses of {bits} bits");
        }
    }
    // Pages of the kernel: across 4 GiB, across the first table of the third level, and up to the last page but one
    // (the last of 64 bits is not handed out).
    for at in [(4 << 30) - 32 * small, (256 << 30) - 32 * small, last - (65 * small - 1)] {
        all.map(&pages, 0..64 * page(), at, Access::RW);
    }
    // Single ones in another order, some of them with holes between, in each kind of access.
    for i in 0..64 {
        let slot = ((i * 37 + 11) % 64) as u64;
        for at in [0x10_0000 + slot * small, 0x8000_0000 + slot * 2 * small] {
            all.map(&pages, i * page()..(i + 1) * page(), at, ACCESS[i % 3]);
        }
    }
    // Pages of 2 MiB, in their place and a page beside it.
    let huge = Memory::new(&MemfdHeap::starting_at(PageKind::Hugetlb2M), PageKind::Hugetlb2M, 4 << 20);
    all.map(&huge, 0..4 << 20, 6 << 30, Access::RW);
    all.map(&huge, 0..4 << 20, (7 << 30) + small, Access::READ);
    // A page of 1 GiB, in its place and beside it; a part of each power of two, in its place; and one that is none.
    let giant = Memory::new(&MemfdHeap::starting_at(PageKind::Hugetlb1G), PageKind::Hugetlb1G, 1 << 30);
    all.map(&giant, 0..1 << 30, 32 << 30, Access::RW);
    all.map(&giant, 0..1 << 30, (64 << 30) + (2 << 20), Access::READ);
    for log in page().ilog2() as usize..30 {
        all.map(&giant, 1 << log..2 << log, (8 << 30) + (1 << log), ACCESS[log % 2]);
    }
    all.map(&giant, 5 * page()..1591 * page(), (16 << 30) + 5 * small, Access::READ);
    // Memory of a device.
    let file = functions(FILE_BAR.0)[0];
    let bar = Arc::new(container.open(&file).unwrap().map_bar(FILE_BAR.1, None, BarAlignment::LargestPage).unwrap());
    let resource = fs::read_to_string(format!("/sys/bus/pci/devices/{file}/resource")).unwrap();
    let line = resource.lines().nth(FILE_BAR.1 as usize).unwrap();
    let to = u64::from_str_radix(line.split_whitespace().next().unwrap().trim_start_matches("0x"), 16).unwrap();
    let peer = container.map_peer(&bar, 0..bar.len(), Access::RW).unwrap();
    let peers = [Extent { at: peer.span().first().bits(), to, len: bar.len(), access: Access::RW }];

    // The kernel uses every size that there is, up to that of the largest page: AMD's IOMMU has all powers of two.
    let found = all.check(bdf, &peers);
    let sizes: Vec<u64> = match found.format.name().starts_with("amd") {
        true => (12..=30).map(|log| 1 << log).collect(),
        false => found.format.facts().page_sizes.iter().map(PageSize::bytes).collect(),
    };
    assert_eq!(found.sizes.into_keys().collect::<Vec<_>>(), sizes);
    // Without every second one.
    let mut number = 0;
    all.mappings.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    all.check(bdf, &peers);
    drop(peer);
    all.mappings.clear();
    all.check(bdf, &[]);
}
