//! The list of formats, and what the suites over them share.
#![allow(dead_code)] // each suite uses a part

use dmalane_addr::PhysAddr;
use dmalane_iopt::{Format, HeapTables, TableShape, Tables};

/// A format joins all suites with one line here.
macro_rules! for_each_format {
    ($suite:ident) => {
        $suite!(agx_uat, dmalane_iopt::AgxUat);
        $suite!(amd_v1_3level, dmalane_iopt::AmdV1<3>);
        $suite!(amd_v1_4level, dmalane_iopt::AmdV1_4Level);
        $suite!(amd_v1_6level, dmalane_iopt::AmdV1<6>);
        $suite!(amd_v1_3level_groups, dmalane_iopt::AmdV1<3, true>);
        $suite!(amd_v1_4level_groups, dmalane_iopt::AmdV1<4, true>);
        $suite!(arm64_s1_4k, dmalane_iopt::Arm64S1_4k);
        $suite!(arm64_s1_4k_39, dmalane_iopt::Arm64S1<12, 39>);
        $suite!(arm64_s1_16k, dmalane_iopt::Arm64S1_16k);
        $suite!(arm64_s1_64k, dmalane_iopt::Arm64S1_64k);
        $suite!(arm64_s1_4k_dirty, dmalane_iopt::Arm64S1<12, 48, false, 48, true>);
        $suite!(arm64_s1_64k_52_contiguous_dirty, dmalane_iopt::Arm64S1<16, 48, true, 52, true>);
        $suite!(arm64_s2_4k_40_contiguous_dirty, dmalane_iopt::Arm64S2<12, 40, true, 48, true>);
        $suite!(arm64_s1_4k_52, dmalane_iopt::Arm64S1<12, 52, false, 52>);
        $suite!(arm64_s1_16k_52_contiguous, dmalane_iopt::Arm64S1<14, 52, true, 52>);
        $suite!(arm64_s2_4k_52_contiguous, dmalane_iopt::Arm64S2<12, 52, true, 52>);
        $suite!(arm64_s2_16k_52, dmalane_iopt::Arm64S2<14, 52, false, 52>);
        $suite!(arm64_s1_64k_52, dmalane_iopt::Arm64S1<16, 52, false, 52>);
        $suite!(arm64_s2_64k_52, dmalane_iopt::Arm64S2<16, 48, true, 52>);
        $suite!(arm64_s2_4k, dmalane_iopt::Arm64S2_4k);
        $suite!(arm64_s2_4k_40, dmalane_iopt::Arm64S2<12, 40>);
        $suite!(arm64_s2_16k, dmalane_iopt::Arm64S2_16k);
        $suite!(arm64_s2_64k, dmalane_iopt::Arm64S2_64k);
        $suite!(arm64_s1_4k_contiguous, dmalane_iopt::Arm64S1<12, 48, true>);
        $suite!(arm64_s1_16k_contiguous, dmalane_iopt::Arm64S1<14, 48, true>);
        $suite!(arm64_s1_64k_contiguous, dmalane_iopt::Arm64S1<16, 48, true>);
        $suite!(arm64_s2_4k_contiguous, dmalane_iopt::Arm64S2<12, 40, true>);
        $suite!(armv7, dmalane_iopt::Armv7);
        $suite!(riscv_sv39, dmalane_iopt::RiscvSv39);
        $suite!(riscv_sv39_napot, dmalane_iopt::RiscvSv<3, true>);
        $suite!(riscv_sv48, dmalane_iopt::RiscvSv48);
        $suite!(riscv_sv57, dmalane_iopt::RiscvSv57);
        $suite!(vtd_second_39, dmalane_iopt::VtdSecond39);
        $suite!(vtd_second_48, dmalane_iopt::VtdSecond48);
        $suite!(vtd_second_57, dmalane_iopt::VtdSecond57);
        $suite!(x86_64_4level, dmalane_iopt::X86_64_4Level);
        $suite!(x86_64_5level, dmalane_iopt::X86_64_5Level);
    };
}

/// The sizes that a format's cases are built from, and where the spaces end.
pub struct Sizes {
    pub page: u64,
    /// Pages of a table of the last level.
    pub entries: u64,
    /// What such a table translates. The size of a large leaf, in formats that have one there.
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
    // No `update`: the heap's own is tested by every use of plain HeapTables, the default one here.
}
