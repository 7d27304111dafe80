//! Formats that stand for all: tests of a VM over all of them take half a minute each to compile.

use dmalane_addr::PageSize;
use dmalane_iopt::{Format, FormatId, TableShape, with_format};

/// Calls a macro with a list of formats, a line `name: Type;` each, which [`dmalane_iopt::formats!`] does with all: one
/// or more of each family, of which one has each [`geometry`]. What is in parentheses comes before the list.
macro_rules! geometries {
    ($each:ident $(($($before:tt)*))?) => {
        $each! {
            $($($before)*)?
            agx_uat: dmalane_iopt::AgxUat;
            amd_v1_4level_groups: dmalane_iopt::AmdV1<4, true>;
            amd_v1_6level: dmalane_iopt::AmdV1<6>;
            arm64_s1_4k: dmalane_iopt::Arm64S1<12>;
            arm64_s1_4k_contiguous: dmalane_iopt::Arm64S1<12, 48, true>;
            arm64_s1_16k: dmalane_iopt::Arm64S1<14>;
            arm64_s1_16k_52_contiguous: dmalane_iopt::Arm64S1<14, 52, true, 52>;
            arm64_s1_64k: dmalane_iopt::Arm64S1<16>;
            arm64_s1_64k_48_52_contiguous_dirty: dmalane_iopt::Arm64S1<16, 48, true, 52, true>;
            arm64_s2_4k_40: dmalane_iopt::Arm64S2<12, 40>;
            armv7_lpae_s1: dmalane_iopt::Armv7LpaeS1;
            armv7_short: dmalane_iopt::Armv7;
            riscv_sv39: dmalane_iopt::RiscvSv<3>;
            riscv_sv57_napot: dmalane_iopt::RiscvSv<5, true>;
            vtd_second_39: dmalane_iopt::VtdSecond<3>;
            x86_64_5level: dmalane_iopt::X86_64<5>;
        }
    };
}
pub(crate) use geometries;

/// What of a format decides what a VM does: sizes of tables and pages, and groups, from the last level up. What entries
/// look like does not, nor how many levels are above those that a test reaches.
fn geometry<F: Format>() -> (PageSize, Vec<PageSize>, u64, Vec<u32>) {
    let groups = F::GROUP_BITS[..F::LEVELS as usize].iter().rev().take(2).copied().collect();
    (TableShape::of::<F>().table, F::PAGE_SIZES.iter().take(2).collect(), F::ENTRY_BYTES, groups)
}

#[test]
fn no_format_has_another_geometry() {
    macro_rules! all {
        ($($name:ident: $format:ty;)*) => { [$(geometry::<$format>()),*] };
    }
    let there = geometries!(all);
    for format in FormatId::ALL {
        let is_there = there.contains(&with_format!(*format, F => geometry::<F>()));
        assert!(is_there, "{format} is unlike all in the list above: add it");
    }
}
