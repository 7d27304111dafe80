//! Sizes of a format, and table memory that fails: what the suites over all formats share.
#![allow(dead_code)] // each suite uses a part

use dmalane_addr::{Access, Iova, PhysAddr, Segment};
use dmalane_iopt::{Error, Format, HeapTables, PageTable, TableShape, Tables};

/// Calls a macro with a list of formats, as [`dmalane_iopt::formats!`] does with all: those that stand for all where
/// only [`kind`] matters. Tests over all formats take minutes to compile.
macro_rules! stand_ins {
    ($each:ident) => {
        $each! {
            agx_uat: dmalane_iopt::AgxUat;
            amd_v1_4level_groups: dmalane_iopt::AmdV1<4, true>;
            amd_v1_6level: dmalane_iopt::AmdV1<6>;
            arm64_s1_4k: dmalane_iopt::Arm64S1<12>;
            arm64_s1_4k_contiguous: dmalane_iopt::Arm64S1<12, 48, true>;
            arm64_s1_4k_dirty: dmalane_iopt::Arm64S1<12, 48, false, 48, true>;
            arm64_s1_16k_52: dmalane_iopt::Arm64S1<14, 52, false, 52>;
            arm64_s1_16k_contiguous: dmalane_iopt::Arm64S1<14, 48, true>;
            arm64_s1_64k_48_52_contiguous_dirty: dmalane_iopt::Arm64S1<16, 48, true, 52, true>;
            arm64_s1_64k_contiguous: dmalane_iopt::Arm64S1<16, 48, true>;
            arm64_s2_4k_40: dmalane_iopt::Arm64S2<12, 40>;
            arm64_s2_4k_40_contiguous_dirty: dmalane_iopt::Arm64S2<12, 40, true, 48, true>;
            arm64_s2_16k_40: dmalane_iopt::Arm64S2<14, 40>;
            arm64_s2_16k_40_contiguous: dmalane_iopt::Arm64S2<14, 40, true>;
            arm64_s2_64k_40: dmalane_iopt::Arm64S2<16, 40>;
            arm64_s2_64k_40_contiguous: dmalane_iopt::Arm64S2<16, 40, true>;
            arm64_s2_64k_52: dmalane_iopt::Arm64S2<16, 52, false, 52>;
            armv7_lpae_s2: dmalane_iopt::Armv7LpaeS2;
            armv7_short: dmalane_iopt::Armv7;
            riscv_sv39_napot: dmalane_iopt::RiscvSv<3, true>;
            riscv_sv57: dmalane_iopt::RiscvSv<5>;
            vtd_second_48: dmalane_iopt::VtdSecond<4>;
            x86_64_5level: dmalane_iopt::X86_64<5>;
        }
    };
}
pub(crate) use stand_ins;

type Kind = (dmalane_addr::PageSize, Vec<dmalane_addr::PageSize>, u64, Vec<u32>, (u64, bool, u64, u64));

/// All of a format but its encodings, its rights, and the number of levels above the last three.
fn kind<F: Format>() -> Kind {
    let groups: Vec<u32> = F::GROUP_BITS[..F::LEVELS as usize].iter().rev().take(3).copied().collect();
    let sizes: Vec<_> = F::PAGE_SIZES.iter().take(3).collect();
    let bits = (F::DIRTY, F::DIRTY_IS_CLEAR, F::VALID, F::TABLE_BITS);
    (TableShape::of::<F>().table, sizes, F::ENTRY_BYTES, groups, bits)
}

#[test]
fn no_format_is_of_another_kind() {
    macro_rules! kinds {
        ($($name:ident: $format:ty;)*) => { [$(kind::<$format>()),*] };
    }
    let (there, all) = (stand_ins!(kinds), dmalane_iopt::formats!(kinds));
    for (kind, format) in all.iter().zip(dmalane_iopt::FormatId::ALL) {
        assert!(there.contains(kind), "{format} is unlike all in the list above: add it");
    }
}

/// The sizes that a format's cases are built from, and where the spaces end.
pub struct Sizes {
    pub page: u64,
    /// Pages of a table of the last level.
    pub entries: u64,
    /// Bytes that such a table translates. The size of a large leaf, in formats that have one there.
    pub block: u64,
    /// The largest leaf, or a block where that is larger.
    pub large: u64,
    /// Ends of the spaces.
    pub top: u64,
    pub out_top: u64,
}

pub const fn sizes<F: Format>() -> Sizes {
    let page = F::GRANULE.bytes();
    let block = page << F::INDEX_BITS;
    let largest = 1 << (63 - F::PAGE_SIZES.bits().leading_zeros());
    Sizes {
        page,
        entries: 1 << F::INDEX_BITS,
        block,
        large: if largest > block { largest } else { block },
        top: 1 << F::INPUT_BITS,
        out_top: 1 << F::OUTPUT_BITS,
    }
}

/// Sizes and rights that random values are made from, without the format as a type.
pub struct Geometry {
    pub sizes: Sizes,
    /// [`shift`] of each level.
    pub shifts: Vec<u32>,
    pub accesses: Vec<Access>,
}

pub fn geometry<F: Format>() -> Geometry {
    Geometry { sizes: sizes::<F>(), shifts: (0..F::LEVELS).map(shift::<F>).collect(), accesses: accesses::<F>() }
}

/// Every combination of rights and attributes.
pub fn all_accesses() -> impl Iterator<Item = Access> {
    (0..=Access::all().bits()).map(Access::from_bits_truncate)
}

/// Those that the format supports.
pub fn accesses<F: Format>() -> Vec<Access> {
    all_accesses().filter(|access| F::supports(*access)).collect()
}

/// The number of levels that have leaves.
pub fn leaf_levels<F: Format>() -> u32 {
    (0..F::LEVELS).filter(|&level| F::PAGE_SIZES.bits() >> shift::<F>(level) & 1 == 1).count() as u32
}

/// The bits of the address that an entry of `level` translates lie above these many.
pub fn shift<F: Format>(level: u32) -> u32 {
    u32::from(F::GRANULE.log2()) + (F::LEVELS - 1 - level) * F::INDEX_BITS
}

/// Heap tables whose allocation number `fail_at` (counted from 0) fails.
pub struct Failing {
    pub heap: HeapTables<PhysAddr>,
    pub calls: usize,
    pub fail_at: Option<usize>,
}

impl Failing {
    pub fn new() -> Self {
        Self { heap: HeapTables::new(PhysAddr::new(0x1234_0000)), calls: 0, fail_at: None }
    }
}

impl Tables for Failing {
    type Addr = PhysAddr;

    fn prepare(&mut self, shape: TableShape) -> bool {
        self.heap.prepare(shape)
    }
    fn allocate_root(&mut self) -> Option<PhysAddr> {
        self.heap.allocate_root()
    }
    fn free_root(&mut self, root: PhysAddr) {
        self.heap.free_root(root);
    }

    fn allocate(&mut self) -> Option<PhysAddr> {
        self.calls += 1;
        if self.fail_at == Some(self.calls - 1) { None } else { self.heap.allocate() }
    }
    fn free(&mut self, table: PhysAddr) {
        self.heap.free(table);
    }
    fn load(&self, table: PhysAddr, index: usize) -> u64 {
        self.heap.load(table, index)
    }
    fn store(&mut self, table: PhysAddr, index: usize, entry: u64) {
        self.heap.store(table, index, entry);
    }
    fn reserve(&mut self, tables: usize) -> bool {
        self.heap.reserve(tables)
    }
    // No `edit`: the heap's own is tested by every use of plain HeapTables, the default one here.
}

/// `PageTable::map_sg` with one type of iterator, since each type compiles the walk again, for every format.
pub trait MapList {
    fn map_list(
        &mut self,
        at: Iova,
        segments: impl IntoIterator<Item = Segment<PhysAddr>>,
        access: Access,
    ) -> Result<u64, Error>;
}

impl<F: Format, T: Tables> MapList for PageTable<F, Iova, PhysAddr, T> {
    fn map_list(
        &mut self,
        at: Iova,
        segments: impl IntoIterator<Item = Segment<PhysAddr>>,
        access: Access,
    ) -> Result<u64, Error> {
        self.map_sg(at, segments.into_iter().collect::<Vec<_>>(), access)
    }
}
