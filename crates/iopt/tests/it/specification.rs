//! A second walker, which knows the formats as tables of bit fields copied from their specifications. It shares no code
//! with the crate and stands in for an MMU where no independent one exists (AMD v1, AGX permissions, 5-level VT-d).
//!
//! Every entry that `decode` may meet is compared: random bits at every level, and whole tables that were mapped.

use crate::formats::{Sizes, sizes};
use dmalane_addr::{Access, Iova, PhysAddr, Segment};
use dmalane_iopt::{Entry, FaultKind, Format, HeapTables, PageTable, walk};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// Bits `0` down to `1` of an entry have the value `2`.
type Field = (u32, u32, u64);
/// All of these.
type All = Vec<Field>;
/// One of these; nothing at all stands for "never".
type Any = Vec<All>;

/// One kind of entry at one level.
struct Row {
    when: All,
    one_of: Any,
    /// The highest and lowest address bit of the entry, and where the lowest one goes in the address.
    address: (u32, u32, u32),
    /// Another piece of it.
    more: Option<(u32, u32, u32)>,
    /// For a leaf, the logarithm of its size and its rights: read, write, execute. `None` for a table.
    leaf: Option<(u32, [Any; 3])>,
}

struct Level {
    /// The address bits that choose the entry.
    index: (u32, u32),
    rows: Vec<Row>,
}

struct Specification {
    entry_bytes: u64,
    levels: Vec<Level>,
}

fn always() -> Any {
    vec![vec![]]
}

fn never() -> Any {
    vec![]
}

fn when(fields: &[Field]) -> Any {
    vec![fields.to_vec()]
}

/// Bits `high` down to `low` are zero, if there are such bits.
fn zero(high: u32, low: u32) -> All {
    if high >= low { vec![(high, low, 0)] } else { vec![] }
}

fn table(when: &[Field], one_of: Any, address: (u32, u32, u32)) -> Row {
    Row { when: when.to_vec(), one_of, address, more: None, leaf: None }
}

fn leaf(when: All, one_of: Any, address: (u32, u32, u32), size: u32, rights: [Any; 3]) -> Row {
    Row { when, one_of, address, more: None, leaf: Some((size, rights)) }
}

/// Levels from the root down: the lowest address bit that each translates, the input bits, and the rows of each.
fn levels(input: u32, shifts: &[u32], rows: impl Fn(u32) -> Vec<Row>) -> Vec<Level> {
    let mut high = input - 1;
    let level = |&low: &u32| {
        let level = Level { index: (high, low), rows: rows(low) };
        high = low - 1;
        level
    };
    shifts.iter().map(level).collect()
}

/// DDI 0487, D8: descriptor formats, stage 1 and stage 2.
fn arm64(stage: u32, granule: u32, input: u32, contiguous: bool) -> Specification {
    let (all, blocks): (&[u32], &[u32]) = match granule {
        12 => (&[48, 39, 30, 21, 12], &[30, 21]),
        14 => (&[47, 36, 25, 14], &[25]),
        _ => (&[42, 29, 16], &[29]),
    };
    // Stage 1: the first level that has input bits. Stage 2: up to 4 bits more go to a concatenated root.
    let first = match (stage, granule, input) {
        (1, 12, 52) | (_, 14 | 16, 48 | 52) if (stage, granule, input) != (2, 14, 48) => 0,
        (_, 12, 48) | (2, 12, 52) | (2, 14, 48) => 1,
        (2, 16, 40) => 1,
        (1, 12, 39) | (2, 12 | 14, 40) => 2,
        _ => panic!("not in the table"),
    };
    let rows = move |low: u32| {
        let page = low == granule;
        let kind = if page { 0b11 } else { 0b01 };
        let mut rows = Vec::new();
        if !page {
            rows.push(table(&[(1, 0, 0b11)], always(), (47, granule, granule)));
        }
        // "The Contiguous bit": 16 neighbours, or 128 pages and 32 blocks, or 32. Without hint the bit means nothing.
        let group = match granule {
            12 => 4,
            14 if page => 7,
            _ => 5,
        };
        let hints: &[Option<u64>] = if contiguous { &[Some(0), Some(1)] } else { &[None] };
        for hint in hints.iter().filter(|_| page || blocks.contains(&low)) {
            let hinted: All = hint.iter().map(|&value| (52, 52, value)).collect();
            let low = if *hint == Some(1) { low + group } else { low };
            let (af, address) = ((10, 10, 1), (47, low, low));
            rows.push(if stage == 1 {
                // AP[2:1] = x1: EL0 too; AP[2] = 1: read-only. PXN, UXN.
                let rights = [always(), when(&[(7, 7, 0)]), when(&[(54, 53, 0)])];
                leaf([vec![(1, 0, kind), af, (6, 6, 1)], hinted].concat(), always(), address, low, rights)
            } else {
                // S2AP[0]: read, S2AP[1]: write. XN[1:0] = 00, and readable.
                let some = vec![vec![(6, 6, 1)], vec![(7, 7, 1)]];
                let rights = [when(&[(6, 6, 1)]), when(&[(7, 7, 1)]), when(&[(54, 53, 0), (6, 6, 1)])];
                leaf([vec![(1, 0, kind), af], hinted].concat(), some, address, low, rights)
            });
        }
        rows
    };
    Specification { entry_bytes: 8, levels: levels(input, &all[first..], rows) }
}

/// The same with FEAT_LPA: bits 15:12 of every descriptor are address bits 51:48.
fn with_lpa(mut specification: Specification) -> Specification {
    for row in specification.levels.iter_mut().flat_map(|level| &mut level.rows) {
        row.more = Some((15, 12, 48));
    }
    specification
}

/// The same with FEAT_LPA2 and `DS = 1`: the address goes up to bit 49, and bits 9:8 are address bits 51:50.
fn with_lpa2(mut specification: Specification) -> Specification {
    for row in specification.levels.iter_mut().flat_map(|level| &mut level.rows) {
        row.address.0 = 49;
        row.more = Some((9, 8, 50));
    }
    specification
}

/// The same with `HA = HD = 1`: a leaf with DBM may be written to, and the device says in it when it was.
fn with_dbm(mut specification: Specification) -> Specification {
    for row in specification.levels.iter_mut().flat_map(|level| &mut level.rows) {
        if let Some((_, [_, write, _])) = &mut row.leaf {
            write.push(vec![(51, 51, 1)]);
            row.one_of.push(vec![(51, 51, 1)]);
        }
    }
    specification
}

/// m1n1 `hw/uat.py`, and the rules for permissions from the Linux IOMMU list.
fn agx() -> Specification {
    let rows = |low: u32| {
        if low > 14 {
            return vec![table(&[(1, 0, 0b11)], always(), (47, 14, 14))];
        }
        let (uxn, pxn) = (|v| (54, 54, v), |v| (53, 53, v));
        let page = vec![(1, 0, 0b11), (10, 10, 1), (55, 55, 1), (7, 6, 0b10)];
        let some = vec![vec![uxn(0)], vec![pxn(0)]];
        let rights = [when(&[pxn(0)]), vec![vec![uxn(1), pxn(0)], vec![uxn(0), pxn(1)]], never()];
        vec![leaf(page, some, (47, 14, 14), 14, rights)]
    };
    Specification { entry_bytes: 8, levels: levels(39, &[36, 25, 14], rows) }
}

/// DDI 0406, figures B3-4 and B3-5.
fn armv7() -> Specification {
    let rows = |low: u32| {
        if low == 20 {
            let section = vec![(1, 1, 1), (18, 18, 0), (11, 10, 0b11)];
            let rights = [always(), when(&[(15, 15, 0)]), when(&[(4, 4, 0)])];
            // Bit 18: supersection, with bits 39:36 of the address in 8:5 and 35:32 in 23:20.
            let of_super = vec![(1, 1, 1), (18, 18, 1), (11, 10, 0b11), (23, 20, 0), (8, 5, 0)];
            let same = [always(), when(&[(15, 15, 0)]), when(&[(4, 4, 0)])];
            return vec![
                table(&[(1, 0, 0b01)], always(), (31, 10, 10)),
                leaf(section, always(), (31, 20, 20), 20, rights),
                leaf(of_super, always(), (31, 24, 24), 24, same),
            ];
        }
        let small = vec![(1, 1, 1), (5, 4, 0b11)];
        let rights = [always(), when(&[(9, 9, 0)]), when(&[(0, 0, 0)])];
        let large = vec![(1, 0, 0b01), (5, 4, 0b11)];
        let rights_of_large = [always(), when(&[(9, 9, 0)]), when(&[(15, 15, 0)])];
        vec![leaf(small, always(), (31, 12, 12), 12, rights), leaf(large, always(), (31, 16, 16), 16, rights_of_large)]
    };
    Specification { entry_bytes: 4, levels: levels(32, &[20, 12], rows) }
}

/// Intel SDM volume 3A, chapter 4: tables "Format of a ... Entry".
fn x86_64(shifts: &[u32]) -> Specification {
    let rows = |low: u32| {
        let rights = [always(), when(&[(1, 1, 1)]), when(&[(63, 63, 0)])];
        let (present, user) = ((0, 0, 1), (2, 2, 1));
        if low == 12 {
            return vec![leaf(vec![present, user], always(), (51, 12, 12), 12, rights)];
        }
        let mut rows = vec![table(&[present, (7, 7, 0)], always(), (51, 12, 12))];
        if low <= 30 {
            let large = [vec![present, user, (7, 7, 1)], zero(low - 1, 13)].concat();
            rows.push(leaf(large, always(), (51, low, low), low, rights));
        }
        rows
    };
    Specification { entry_bytes: 8, levels: levels(shifts[0] + 9, shifts, rows) }
}

/// VT-d, figures "Format for Second-Stage Paging Entries".
fn vtd(shifts: &[u32]) -> Specification {
    let rows = |low: u32| {
        let present = || vec![vec![(0, 0, 1)], vec![(1, 1, 1)]];
        let rights = [when(&[(0, 0, 1)]), when(&[(1, 1, 1)]), never()];
        if low == 12 {
            return vec![leaf(vec![], present(), (51, 12, 12), 12, rights)];
        }
        let mut rows = vec![table(&[(7, 7, 0)], present(), (51, 12, 12))];
        if low <= 30 {
            let large = [vec![(7, 7, 1)], zero(low - 1, 12)].concat();
            rows.push(leaf(large, present(), (51, low, low), low, rights));
        }
        rows
    };
    Specification { entry_bytes: 8, levels: levels(shifts[0] + 9, shifts, rows) }
}

/// AMD 48882, tables "I/O Page Directory Entry" and "I/O Page Translation Entry"; levels counted from 1 at the bottom.
fn amd(input: u32, shifts: &[u32], groups: bool) -> Specification {
    let rows = |low: u32| {
        let level = u64::from((low - 12) / 9 + 1);
        let mut rows = Vec::new();
        if level > 1 {
            rows.push(table(&[(0, 0, 1), (11, 9, level - 1)], always(), (51, 12, 12)));
        }
        if level <= 3 {
            let page = [vec![(0, 0, 1), (11, 9, 0)], zero(low - 1, 12)].concat();
            let some = vec![vec![(61, 61, 1)], vec![(62, 62, 1)]];
            let rights = [when(&[(61, 61, 1)]), when(&[(62, 62, 1)]), never()];
            rows.push(leaf(page, some, (51, low, low), low, rights));
        }
        if level <= 3 && groups {
            // Next Level 7: the lowest zero bit of the address is the highest within the page.
            let page = vec![(0, 0, 1), (11, 9, 7), (low + 3, low + 3, 0), (low + 2, 12, (1 << (low - 9)) - 1)];
            let some = vec![vec![(61, 61, 1)], vec![(62, 62, 1)]];
            let rights = [when(&[(61, 61, 1)]), when(&[(62, 62, 1)]), never()];
            rows.push(leaf(page, some, (51, low + 4, low + 4), low + 4, rights));
        }
        rows
    };
    Specification { entry_bytes: 8, levels: levels(input, shifts, rows) }
}

/// RISC-V privileged architecture: figures of the page table entries, and the steps of "Virtual Address Translation
/// Process".
fn riscv(shifts: &[u32], napot: bool) -> Specification {
    let rows = |low: u32| {
        let (r, w, x) = (|v| (1, 1, v), |v| (2, 2, v), |v| (3, 3, v));
        let (valid, reserved) = ((0, 0, 1), (63, 54, 0));
        let mut rows = Vec::new();
        if low > 12 {
            // A pointer: R, W, X, and D, A, U, which are reserved there.
            rows.push(table(&[valid, reserved, (4, 1, 0), (7, 6, 0)], always(), (53, 10, 12)));
        }
        let page = [vec![valid, reserved, (4, 4, 1), (6, 6, 1)], zero(low - 3, 10)].concat();
        let some = vec![vec![r(1)], vec![w(0), x(1)]];
        let rights = [when(&[r(1)]), when(&[w(1)]), when(&[x(1)])];
        if napot && low == 12 {
            // "Svnapot": N, and ppn[0][3:0] = 1000.
            let page = vec![valid, (62, 54, 0), (63, 63, 1), (4, 4, 1), (6, 6, 1), (13, 10, 0b1000)];
            let some = vec![vec![r(1)], vec![w(0), x(1)]];
            let rights = [when(&[r(1)]), when(&[w(1)]), when(&[x(1)])];
            rows.push(leaf(page, some, (53, 14, 16), 16, rights));
        }
        rows.push(leaf(page, some, (53, low - 2, low), low, rights));
        rows
    };
    Specification { entry_bytes: 8, levels: levels(shifts[0] + 9, shifts, rows) }
}

/// The table for `arm64-STAGE-GRANULE`, then bits of input and of output unless they are 48, then `contiguous` and
/// `dirty`.
fn arm64_by_name(name: &str) -> Option<Specification> {
    let mut words = name.strip_prefix("arm64-s")?.split('-');
    let stage = words.next()?.parse().ok()?;
    let granule = words.next()?.strip_suffix('k')?.parse::<u32>().ok()?.ilog2() + 10;
    let (mut bits, mut contiguous, mut dirty) = (Vec::new(), false, false);
    for word in words {
        match word {
            "contiguous" => contiguous = true,
            "dirty" => dirty = true,
            number => bits.push(number.parse().ok()?),
        }
    }
    let input = *bits.first().unwrap_or(&48);
    let mut specification = arm64(stage, granule, input, contiguous);
    if bits.last() == Some(&52) {
        specification = if granule == 16 { with_lpa(specification) } else { with_lpa2(specification) };
    }
    Some(if dirty { with_dbm(specification) } else { specification })
}

/// The table for a format, by its name.
fn specification<F: Format>() -> Specification {
    const SHIFTS: [u32; 6] = [57, 48, 39, 30, 21, 12];
    let last = |n: usize| &SHIFTS[6 - n..];
    match F::NAME {
        "agx-uat" => agx(),
        "amd-v1-3level" => amd(39, last(3), false),
        "amd-v1-4level" => amd(48, last(4), false),
        "amd-v1-5level" => amd(57, last(5), false),
        "amd-v1-6level" => amd(63, last(6), false),
        "amd-v1-3level-groups" => amd(39, last(3), true),
        "amd-v1-4level-groups" => amd(48, last(4), true),
        "armv7-short" => armv7(),
        "riscv-sv39" => riscv(last(3), false),
        "riscv-sv39-napot" => riscv(last(3), true),
        "riscv-sv48" => riscv(last(4), false),
        "riscv-sv48-napot" => riscv(last(4), true),
        "riscv-sv57" => riscv(last(5), false),
        "riscv-sv57-napot" => riscv(last(5), true),
        "vtd-second-39" => vtd(last(3)),
        "vtd-second-48" => vtd(last(4)),
        "vtd-second-57" => vtd(last(5)),
        "x86-64-4level" => x86_64(last(4)),
        "x86-64-5level" => x86_64(last(5)),
        name => arm64_by_name(name).unwrap_or_else(|| panic!("no table for {name}")),
    }
}

fn bits(value: u64, high: u32, low: u32) -> u64 {
    value >> low & (u64::MAX >> (63 - (high - low)))
}

fn holds(entry: u64, all: &All) -> bool {
    all.iter().all(|&(high, low, value)| bits(entry, high, low) == value)
}

fn one_holds(entry: u64, any: &Any) -> bool {
    any.iter().any(|all| holds(entry, all))
}

impl Level {
    /// The row for an entry, and the address in it.
    fn read(&self, entry: u64) -> Option<(&Row, u64)> {
        let row = self.rows.iter().find(|row| holds(entry, &row.when) && one_holds(entry, &row.one_of))?;
        let (high, low, to) = row.address;
        let more = row.more.map_or(0, |(high, low, to)| bits(entry, high, low) << to);
        Some((row, bits(entry, high, low) << to | more))
    }
}

fn rights(entry: u64, row: &[Any; 3]) -> Access {
    let mut access = Access::empty();
    for (any, right) in row.iter().zip([Access::READ, Access::WRITE, Access::EXEC]) {
        access.set(right, one_holds(entry, any));
    }
    access
}

impl Specification {
    /// Address, size as a logarithm, and rights, or nothing for a fault.
    fn walk(&self, root: u64, at: u64, load: impl Fn(u64) -> u64) -> Option<(u64, u32, Access)> {
        let mut table = root;
        for level in &self.levels {
            let index = bits(at, level.index.0, level.index.1);
            let byte = table + index * self.entry_bytes;
            let entry = bits(load(byte & !7), (byte % 8 * 8 + self.entry_bytes * 8 - 1) as u32, (byte % 8 * 8) as u32);
            let (row, address) = level.read(entry)?;
            match &row.leaf {
                None => table = address,
                Some((size, any)) => return Some((address | at & ((1 << size) - 1), *size, rights(entry, any))),
            }
        }
        None
    }
}

/// One entry, as the format and as the table reads it.
fn entries_agree<F: Format>(entry: u64) -> Result<(), TestCaseError> {
    let spec = specification::<F>();
    prop_assert_eq!(spec.levels.len() as u32, F::LEVELS);
    let entry = if spec.entry_bytes == 4 { entry & 0xffff_ffff } else { entry };
    for (n, level) in spec.levels.iter().enumerate() {
        let expected = match level.read(entry) {
            None => Entry::Invalid,
            Some((Row { leaf: None, .. }, next)) => Entry::Table(next),
            Some((Row { leaf: Some((_, any)), .. }, out)) => Entry::Leaf { out, access: rights(entry, any) },
        };
        prop_assert_eq!(F::decode(n as u32, entry), expected, "{:#x} at level {}", entry, n);
    }
    Ok(())
}

/// Where to, what, how.
type List = (u64, Vec<(u64, u64)>, Access);

/// A table with leaves of all sizes, as the format and as the tables read it, inside and outside of what is mapped.
fn images_agree<F: Format>(lists: &[List], probes: &[u64]) -> Result<(), TestCaseError> {
    let spec = specification::<F>();
    let mut table = PageTable::<F, Iova, PhysAddr, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
    let mut all: Vec<u64> = probes.to_vec();
    for (at, list, access) in lists {
        let segments = list.iter().map(|&(out, len)| Segment { addr: PhysAddr::new(out), len });
        if let Ok(len) = table.map_sg(Iova::new(*at), segments, *access) {
            all.extend([*at, at + len - 1, at + len / 2, at + len, at.wrapping_sub(1)]);
        }
    }
    let load = |word| table.tables().read(word);
    for at in all.into_iter().filter(|at| at >> F::INPUT_BITS == 0) {
        let ours = walk::<F>(table.root().bits(), at, load);
        let theirs = spec.walk(table.root().bits(), at, |word| load(word).expect("within the tables"));
        match ours {
            Ok(w) => prop_assert_eq!(Some((w.to, u32::from(w.size.log2()), w.access)), theirs, "{:#x}", at),
            Err(fault) => {
                prop_assert_eq!(fault.kind, FaultKind::NotPresent);
                prop_assert_eq!(theirs, None, "{:#x}", at);
            }
        }
    }
    Ok(())
}

/// Bits that are likely to make sense: a few set, a few cleared, around what the formats write.
fn entry<F: Format>() -> impl Strategy<Value = u64> {
    let mut made = vec![0, 1, 2, 3, u64::MAX];
    for level in 0..F::LEVELS {
        made.push(F::encode_table(level.min(F::LEVELS - 2), 0x1234_0000));
        for access in (0..8).map(Access::from_bits_truncate).filter(|a| F::supports(*a)) {
            made.push(F::encode_leaf(level, 0, access));
            made.push(F::encode_member(level, 0, access));
            made.push(F::encode_leaf(
                level,
                0xffff_ffff_ffff_ffff << (63 - F::PAGE_SIZES.bits().leading_zeros()),
                access,
            ));
        }
    }
    let flips = prop::collection::vec(0u32..64, 0..5);
    prop_oneof![
        1 => any::<u64>(),
        4 => (prop::sample::select(made), flips).prop_map(|(e, flips)| flips.iter().fold(e, |e, bit| e ^ 1 << bit)),
    ]
}

fn list<F: Format>() -> impl Strategy<Value = List> {
    let Sizes { page, block, large, top, entries, .. } = sizes::<F>();
    let accesses: Vec<Access> = (0..8).map(Access::from_bits_truncate).filter(|a| F::supports(*a)).collect();
    let at = prop_oneof![
        (0u64..8, 0..entries).prop_map(move |(b, p)| b * block + p * page),
        (0u64..4).prop_map(move |n| n * large),
        (0u64..3, 1..entries).prop_map(move |(b, p)| top - 3 * block + b * block + p * page),
    ];
    let segments = prop_oneof![
        prop::collection::vec((0u64..64).prop_map(move |f| (f * page, page)), 1..20),
        (0u64..8, 1u64..3).prop_map(move |(b, n)| vec![(b * block, n * block)]),
    ];
    let leaf = (0u64..4, 0u64..4).prop_map(move |(at, to)| (at * large, vec![(to * large, large)]));
    (prop_oneof![3 => (at, segments), 1 => leaf], prop::sample::select(accesses)).prop_map(|((at, s), a)| (at, s, a))
}

macro_rules! by_table {
    ($($module:ident: $format:ty;)*) => {$(
        mod $module {
            use super::*;
            type F = $format;

            proptest! {
                #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

                #[test]
                fn entries_agree(entry in entry::<F>()) {
                    super::entries_agree::<F>(entry)?;
                }
            }

            proptest! {
                #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

                #[test]
                fn images_agree(
                    lists in prop::collection::vec(list::<F>(), 1..8),
                    probes in prop::collection::vec(0..sizes::<F>().top, 200),
                ) {
                    super::images_agree::<F>(&lists, &probes)?;
                }
            }
        }
    )*};
}

dmalane_iopt::formats!(by_table);
