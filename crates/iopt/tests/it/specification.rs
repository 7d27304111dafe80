//! A second walker, which knows the formats as tables of bit fields copied from their specifications. It shares no code
//! with the crate and stands in for an MMU where no independent one exists (5-level VT-d, a second stage of 16 KiB with
//! 52 bits, the permissions of AGX, kinds of memory and contiguous hints).
//!
//! Every entry that `decode` may meet is compared: random bits at every level, and whole tables that were mapped.

use std::collections::BTreeMap;

use crate::conformance::{check, more};
use crate::formats::{Geometry, MapList, Sizes, accesses, geometry};
use dmalane_addr::{Access, Iova, PhysAddr, Segment};
use dmalane_iopt::{Entry, FaultKind, Format, HeapTables, PageTable, walk, walk_privileged};
use proptest::prelude::*;
use proptest::sample::Index;
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
    /// `None` for a table.
    leaf: Option<Leaf>,
    /// When one of these holds in the entry of a table, leaves below it lose rights: of users, of the privileged.
    limits: Vec<(Any, Access, Access)>,
}

/// The rest of a leaf: its size, its rights and its kind of memory.
struct Leaf {
    /// The logarithm of its size.
    size: u32,
    /// Read, write, execute.
    user: [Any; 3],
    /// The same for privileged accesses, where the format tells them from others.
    privileged: [Any; 3],
    /// The kinds of memory.
    memory: Vec<(Access, Any)>,
}

struct Level {
    /// The address bits that choose the entry.
    index: (u32, u32),
    rows: Vec<Row>,
    /// Rows that walks know and page tables do not; a table with the number of levels that are skipped.
    foreign: Vec<(Row, usize)>,
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
    Row { when: when.to_vec(), one_of, address, more: None, leaf: None, limits: vec![] }
}

fn leaf(when: All, one_of: Any, address: (u32, u32, u32), size: u32, user: [Any; 3]) -> Row {
    let leaf = Leaf { size, user, privileged: [never(), never(), never()], memory: vec![] };
    Row { when, one_of, address, more: None, leaf: Some(leaf), limits: vec![] }
}

impl Row {
    /// A leaf with these rights of privileged accesses.
    fn privileged(mut self, rights: [Any; 3]) -> Self {
        self.leaf.as_mut().unwrap().privileged = rights;
        self
    }

    /// A leaf with these kinds of memory.
    fn memory(mut self, uncached: Any, mmio: Any) -> Self {
        self.leaf.as_mut().unwrap().memory = vec![(Access::UNCACHED, uncached), (Access::MMIO, mmio)];
        self
    }

    /// A table that takes rights of both kinds of access away when the bit has this value.
    fn limit(mut self, bit: u32, value: u64, user: Access, privileged: Access) -> Self {
        self.limits.push((when(&[(bit, bit, value)]), user, privileged));
        self
    }
}

/// Levels from the root down: the lowest address bit that each translates, the input bits, and the rows of each.
fn levels(input: u32, shifts: &[u32], rows: impl Fn(u32) -> Vec<Row>) -> Vec<Level> {
    let mut high = input - 1;
    let level = |&low: &u32| {
        let level = Level { index: (high, low), rows: rows(low), foreign: vec![] };
        high = low - 1;
        level
    };
    shifts.iter().map(level).collect()
}

/// DDI 0487, D8: descriptor formats, stage 1 and stage 2; DDI 0406, B3.6: `v7`.
fn arm64(stage: u32, granule: u32, input: u32, contiguous: bool, v7: bool) -> Specification {
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
        (1, 12, 32) => 2,
        (1, 12, 39) | (2, 12 | 14, 40) => 2,
        _ => panic!("not in the table"),
    };
    let top = if v7 { 39 } else { 47 };
    let rows = move |low: u32| {
        let page = low == granule;
        let kind = if page { 0b11 } else { 0b01 };
        let mut rows = Vec::new();
        if !page {
            let next = table(&[(1, 0, 0b11)], always(), (top, granule, granule));
            // PXNTable; UXNTable, or XNTable for all; APTable[0]: not EL0; APTable[1]: read-only.
            let exec = if v7 { Access::EXEC } else { Access::empty() };
            rows.push(match stage {
                1 => next
                    .limit(59, 1, Access::empty(), Access::EXEC)
                    .limit(60, 1, Access::EXEC, exec)
                    .limit(61, 1, Access::RW, Access::empty())
                    .limit(62, 1, Access::WRITE, Access::WRITE),
                _ => next,
            });
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
            let (af, address) = ((10, 10, 1), (top, low, low));
            rows.push(if stage == 1 {
                // AP[2:1] = x1: EL0 too; AP[2] = 1: read-only. PXN, UXN.
                let user = [when(&[(6, 6, 1)]), when(&[(6, 6, 1), (7, 7, 0)]), when(&[(54, 54, 0)])];
                let pxn = if v7 { when(&[(54, 53, 0)]) } else { when(&[(53, 53, 0)]) };
                leaf([vec![(1, 0, kind), af], hinted].concat(), always(), address, low, user)
                    .privileged([always(), when(&[(7, 7, 0)]), pxn])
                    .memory(when(&[(4, 2, 2)]), when(&[(4, 2, 1)]))
            } else {
                // S2AP[0]: read, S2AP[1]: write. XN[1:0] = 00, and readable.
                let some = vec![vec![(6, 6, 1)], vec![(7, 7, 1)]];
                let rights = [when(&[(6, 6, 1)]), when(&[(7, 7, 1)]), when(&[(54, 53, 0), (6, 6, 1)])];
                // MemAttr: 0b0101 non-cacheable, 0b00xx device.
                leaf([vec![(1, 0, kind), af], hinted].concat(), some, address, low, rights)
                    .memory(when(&[(5, 2, 0b0101)]), when(&[(5, 4, 0)]))
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
        if let Some(Leaf { user: [_, user, _], privileged: [_, privileged, _], .. }) = &mut row.leaf {
            for write in [user, privileged] {
                // AP[2] or S2AP[1], or DBM.
                let dbm = |all: &All| all.iter().map(|f| if f.0 == 7 { (51, 51, 1) } else { *f }).collect();
                *write = [write.clone(), write.iter().map(dbm).collect()].concat();
            }
            row.one_of.push(vec![(51, 51, 1)]);
            // The device sets the access flag.
            row.when.retain(|field| field.0 != 10);
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

/// DDI 0406, figures B3-4 and B3-5, "Access permissions" and "Memory attributes" without remapping.
fn armv7() -> Specification {
    /// A leaf, of which these are the lowest bits of AP, AP[2], XN, PXN (if it is here) and TEX.
    fn page(kind: All, address: (u32, u32, u32), size: u32, at: [u32; 4], pxn: Option<u32>) -> Row {
        let [ap, ap2, xn, tex] = at;
        let executable = (xn, xn, 0);
        let not_pxn: All = [vec![executable], pxn.iter().map(|&bit| (bit, bit, 0)).collect()].concat();
        // AP = 1x: users may read, with 11 also write; 01: only the privileged.
        let some = vec![vec![(ap + 1, ap + 1, 1)], vec![(ap + 1, ap, 0b01)]];
        let user = [
            when(&[(ap + 1, ap + 1, 1)]),
            when(&[(ap + 1, ap, 3), (ap2, ap2, 0)]),
            when(&[(ap + 1, ap + 1, 1), executable]),
        ];
        let registers = vec![vec![(tex + 2, tex, 0), (3, 3, 0)], vec![(tex + 2, tex, 0b010), (3, 2, 0)]];
        leaf(kind, some, address, size, user)
            .privileged([always(), when(&[(ap2, ap2, 0)]), vec![not_pxn]])
            .memory(when(&[(tex + 2, tex, 0b001), (3, 2, 0)]), registers)
    }
    let rows = |low: u32| {
        if low == 20 {
            let section = vec![(1, 1, 1), (18, 18, 0)];
            // Bit 18: supersection, with bits 39:36 of the address in 8:5 and 35:32 in 23:20.
            let of_super = vec![(1, 1, 1), (18, 18, 1), (23, 20, 0), (8, 5, 0)];
            return vec![
                table(&[(1, 0, 0b01)], always(), (31, 10, 10)).limit(2, 1, Access::empty(), Access::EXEC),
                page(section, (31, 20, 20), 20, [10, 15, 4, 12], Some(0)),
                page(of_super, (31, 24, 24), 24, [10, 15, 4, 12], Some(0)),
            ];
        }
        vec![
            page(vec![(1, 1, 1)], (31, 12, 12), 12, [4, 9, 0, 6], None),
            page(vec![(1, 0, 0b01)], (31, 16, 16), 16, [4, 9, 15, 12], None),
        ]
    };
    Specification { entry_bytes: 4, levels: levels(32, &[20, 12], rows) }
}

/// Intel SDM volume 3A, chapter 4: tables "Format of a ... Entry".
fn x86_64(shifts: &[u32]) -> Specification {
    let rows = |low: u32| {
        let (present, user) = ((0, 0, 1), (2, 2, 1));
        let rights = |more: All| {
            [
                vec![more.clone()],
                vec![[more.clone(), vec![(1, 1, 1)]].concat()],
                vec![[more, vec![(63, 63, 0)]].concat()],
            ]
        };
        // PCD and PWT as an index into the PAT after reset: 3 is UC, 2 is UC-.
        let page = |when: All, address, size| {
            leaf(when, always(), address, size, rights(vec![user]))
                .privileged(rights(vec![]))
                .memory(self::when(&[(4, 3, 0b10)]), self::when(&[(4, 3, 0b11)]))
        };
        if low == 12 {
            return vec![page(vec![present], (51, 12, 12), 12)];
        }
        let mut rows = vec![
            table(&[present, (7, 7, 0)], always(), (51, 12, 12))
                .limit(1, 0, Access::WRITE, Access::WRITE)
                .limit(2, 0, Access::RIGHTS, Access::empty())
                .limit(63, 1, Access::EXEC, Access::EXEC),
        ];
        if low <= 30 {
            let large = [vec![present, (7, 7, 1)], zero(low - 1, 13)].concat();
            rows.push(page(large, (51, low, low), low));
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
        let none = Access::empty();
        let mut rows = vec![table(&[(7, 7, 0)], present(), (51, 12, 12)).limit(0, 0, Access::READ, none).limit(
            1,
            0,
            Access::WRITE,
            none,
        )];
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
    let none = Access::empty();
    let next = |to: u64| {
        let next = table(&[(0, 0, 1), (11, 9, to)], always(), (51, 12, 12));
        next.limit(61, 0, Access::READ, none).limit(62, 0, Access::WRITE, none)
    };
    let page = |low: u32, size: u32| {
        let when = match size {
            _ if size == low => [vec![(0, 0, 1), (11, 9, 0)], zero(low - 1, 12)].concat(),
            // Next Level 7: the lowest zero bit of the address is the highest within the page.
            13 => vec![(0, 0, 1), (11, 9, 7), (12, 12, 0)],
            _ => vec![(0, 0, 1), (11, 9, 7), (size - 1, size - 1, 0), (size - 2, 12, (1 << (size - 13)) - 1)],
        };
        let some = vec![vec![(61, 61, 1)], vec![(62, 62, 1)]];
        let rights = [when_bit(61), when_bit(62), never()];
        leaf(when, some, (51, size, size), size, rights)
    };
    let level = |low: u32| u64::from((low - 12) / 9 + 1);
    let is_known = |low: u32, size: u32| low <= 30 && (size == low || groups && size == low + 4);
    let rows = |low: u32| {
        let table = (low > 12).then(|| next(level(low) - 1));
        table
            .into_iter()
            .chain((low..low + 5).filter(|&size| is_known(low, size)).map(|size| page(low, size)))
            .collect()
    };
    let mut levels = levels(input, shifts, rows);
    for (level_here, &low) in levels.iter_mut().zip(shifts) {
        let sizes = (low..low + 9).filter(|&size| size < 52 && !is_known(low, size));
        let skips = (1..level(low).max(2) - 1).map(|to| (next(to), (level(low) - 1 - to) as usize));
        level_here.foreign = sizes.map(|size| (page(low, size), 0)).chain(skips).collect();
    }
    Specification { entry_bytes: 8, levels }
}

fn when_bit(bit: u32) -> Any {
    when(&[(bit, bit, 1)])
}

/// RISC-V privileged architecture: figures of the page table entries, and the steps of "Virtual Address Translation
/// Process"; "Svnapot", "Svpbmt".
fn riscv(shifts: &[u32], napot: bool, pbmt: bool) -> Specification {
    let rows = |low: u32| {
        let valid = (0, 0, 1);
        let mut rows = Vec::new();
        if low > 12 {
            // A pointer: R, W, X, and D, A, U, which are reserved there.
            rows.push(table(&[valid, (63, 54, 0), (4, 1, 0), (7, 6, 0)], always(), (53, 10, 12)));
        }
        // PBMT: 1 is NC, 2 is IO, 3 is reserved.
        for memory in if pbmt { vec![0, 1, 2] } else { vec![0] } {
            let page = |more: All, address, size| {
                let all = [vec![valid, (62, 61, memory), (60, 54, 0), (6, 6, 1)], more].concat();
                let some = vec![vec![(1, 1, 1)], vec![(2, 2, 0), (3, 3, 1)]];
                // U: 1 for users, 0 for the supervisor.
                let rights = |user| [1, 2, 3].map(|bit| when(&[(4, 4, user), (bit, bit, 1)]));
                let of = |kind| if memory == kind { always() } else { never() };
                leaf(all, some, address, size, rights(1)).privileged(rights(0)).memory(of(1), of(2))
            };
            rows.push(page([vec![(63, 63, 0)], zero(low - 3, 10)].concat(), (53, low - 2, low), low));
            if napot && low == 12 {
                // N, and ppn[0][3:0] = 1000.
                rows.push(page(vec![(63, 63, 1), (13, 10, 0b1000)], (53, 14, 16), 16));
            }
        }
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
    let mut specification = arm64(stage, granule, input, contiguous, false);
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
        "armv7-lpae-s1" => arm64(1, 12, 32, false, true),
        "armv7-lpae-s2" => arm64(2, 12, 40, false, true),
        "armv7-short" => armv7(),
        "riscv-sv39" => riscv(last(3), false, false),
        "riscv-sv39-napot" => riscv(last(3), true, false),
        "riscv-sv48" => riscv(last(4), false, false),
        "riscv-sv48-napot" => riscv(last(4), true, false),
        "riscv-sv48-pbmt" => riscv(last(4), false, true),
        "riscv-sv57" => riscv(last(5), false, false),
        "riscv-sv57-napot" => riscv(last(5), true, false),
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
        self.rows.iter().find_map(|row| Some((row, row.read(entry)?)))
    }
}

impl Row {
    /// The address in an entry, if it is one of this row.
    fn read(&self, entry: u64) -> Option<u64> {
        let (high, low, to) = self.address;
        let more = self.more.map_or(0, |(high, low, to)| bits(entry, high, low) << to);
        let is = holds(entry, &self.when) && one_holds(entry, &self.one_of);
        is.then(|| bits(entry, high, low) << to | more)
    }
}

impl Leaf {
    /// The access that the leaf grants below table entries, each of which takes rights away; none if each access
    /// faults.
    fn access(&self, entry: u64, limits: &[(Access, Access)]) -> Access {
        let rights = |any: &[Any; 3], of: fn(&(Access, Access)) -> Access| {
            let mut access = Access::empty();
            for (any, right) in any.iter().zip([Access::READ, Access::WRITE, Access::EXEC]) {
                access.set(right, one_holds(entry, any));
            }
            limits.iter().fold(access, |access, limit| access - of(limit))
        };
        let (user, privileged) = (rights(&self.user, |limit| limit.0), rights(&self.privileged, |limit| limit.1));
        // Of a page that users may only execute, and the privileged may read, the latter is said.
        let access =
            if user.intersects(Access::RW) || privileged.is_empty() { user } else { privileged | Access::PRIVILEGED };
        let memory = self.memory.iter().filter(|(_, any)| one_holds(entry, any));
        if access.is_empty() { access } else { memory.fold(access, |access, (kind, _)| access | *kind) }
    }
}

impl Specification {
    /// Address, size as a logarithm, and access, which is empty when no access is permitted; nothing for another fault.
    fn walk(&self, root: u64, at: u64, load: impl Fn(u64) -> Option<u64>) -> Option<(u64, u32, Access)> {
        let (mut table, mut limits, mut skip) = (root, Vec::new(), 0);
        for level in &self.levels {
            if skip > 0 {
                skip -= 1;
                if bits(at, level.index.0, level.index.1) != 0 {
                    return None;
                }
                continue;
            }
            let index = bits(at, level.index.0, level.index.1);
            let byte = table.checked_add(index * self.entry_bytes)?;
            let low = byte % 8 * 8;
            let entry = bits(load(byte & !7)?, (low + self.entry_bytes * 8 - 1) as u32, low as u32);
            let foreign = || level.foreign.iter().find_map(|(row, skip)| Some((row, row.read(entry)?, *skip)));
            let (row, address, skipped) = level.read(entry).map(|(row, address)| (row, address, 0)).or_else(foreign)?;
            skip = skipped;
            match &row.leaf {
                None => table = address,
                Some(leaf) => {
                    return Some((address | at & ((1 << leaf.size) - 1), leaf.size, leaf.access(entry, &limits)));
                }
            }
            limits.extend(row.limits.iter().filter(|(any, ..)| one_holds(entry, any)).map(|&(_, u, p)| (u, p)));
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
            Some((Row { leaf: Some(leaf), .. }, out)) => match leaf.access(entry, &[]) {
                access if access.is_empty() => Entry::Invalid,
                access => Entry::Leaf { out, access },
            },
        };
        prop_assert_eq!(F::decode(n as u32, entry), expected, "{:#x} at level {}", entry, n);
    }
    Ok(())
}

/// Where to, what, how.
type List = (u64, Vec<(u64, u64)>, Access);

/// A table with leaves of all sizes, as the format and as the tables read it, inside and outside of what is mapped;
/// then again with bits flipped in words of the tables, as others might have written them.
fn images_agree<F: Format>(lists: &[List], probes: &[u64], flips: &[(Index, u32)]) -> Result<(), TestCaseError> {
    let spec = specification::<F>();
    let mut table = PageTable::<F, Iova, PhysAddr, _>::new(HeapTables::new(PhysAddr::new(0x1234_0000))).unwrap();
    let mut all: Vec<u64> = probes.to_vec();
    for (at, list, access) in lists {
        let segments = list.iter().map(|&(out, len)| Segment { addr: PhysAddr::new(out), len });
        if let Ok(len) = table.map_list(Iova::new(*at), segments, *access) {
            all.extend([*at, at + len - 1, at + len / 2, at + len, at.wrapping_sub(1)]);
        }
    }
    let root = table.root().bits();
    let words = (root..).step_by(8).map_while(|at| Some((at, table.tables().read(at)?)));
    let used: Vec<u64> = words.filter(|(_, word)| *word != 0).map(|(at, _)| at).collect();
    let mut changed = BTreeMap::new();
    for flip in [None].into_iter().chain(flips.chunks(8).map(Some)) {
        if !used.is_empty() {
            for (index, bit) in flip.into_iter().flatten() {
                let at = *index.get(&used);
                *changed.entry(at).or_insert_with(|| table.tables().read(at).unwrap()) ^= 1 << bit;
            }
        }
        for &at in all.iter().filter(|at| *at >> F::INPUT_BITS == 0) {
            let load = |word| changed.get(&word).copied().or_else(|| table.tables().read(word));
            let theirs = spec.walk(root, at, load);
            let any = walk_privileged::<F>(root, at, load);
            match (any, theirs) {
                (Ok(w), theirs) => {
                    prop_assert_eq!(Some((w.to, u32::from(w.size.log2()), w.access)), theirs, "{:#x}", at)
                }
                (Err(fault), None) => prop_assert!(fault.kind != FaultKind::Denied || flip.is_some()),
                (Err(fault), Some((.., access))) => {
                    prop_assert!(access.is_empty() && flip.is_some(), "{:#x}: {}, not {}", at, fault, access);
                }
            }
            // An unprivileged access gets the same, or is refused, or may execute what it may not read.
            match walk::<F>(root, at, load) {
                Ok(w) if w.access.rights() == Access::EXEC => prop_assert_eq!(any.map(|any| any.to), Ok(w.to)),
                Ok(w) => prop_assert!(any == Ok(w) && !w.access.contains(Access::PRIVILEGED)),
                Err(fault) if any.is_ok() => prop_assert_eq!(fault.kind, FaultKind::Denied),
                Err(fault) => prop_assert_eq!(any, Err(fault)),
            }
        }
    }
    Ok(())
}

/// The bits in which what others write may differ from what is written here: all, most often those that mean rights and
/// kinds of memory somewhere.
fn flip() -> impl Strategy<Value = (Index, u32)> {
    let known = prop::sample::select(vec![0u32, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 51, 53, 54, 59, 60, 61, 62, 63]);
    (any::<Index>(), prop_oneof![3 => known, 1 => 0u32..64])
}

/// Bits that are likely to make sense: a few set, a few cleared, around what the formats write.
fn entry<F: Format>() -> BoxedStrategy<u64> {
    let mut made = vec![0, 1, 2, 3, u64::MAX];
    for level in 0..F::LEVELS {
        made.push(F::encode_table(level.min(F::LEVELS - 2), 0x1234_0000));
        for access in accesses::<F>() {
            made.push(F::encode_leaf(level, 0, access));
            made.push(F::encode_member(level, 0, access));
            made.push(F::encode_leaf(
                level,
                0xffff_ffff_ffff_ffff << (63 - F::PAGE_SIZES.bits().leading_zeros()),
                access,
            ));
        }
    }
    near(made)
}

fn near(made: Vec<u64>) -> BoxedStrategy<u64> {
    let flips = prop::collection::vec(0u32..64, 0..5);
    prop_oneof![
        1 => any::<u64>(),
        4 => (prop::sample::select(made), flips).prop_map(|(e, flips)| flips.iter().fold(e, |e, bit| e ^ 1 << bit)),
    ]
    .boxed()
}

fn list(g: &Geometry) -> BoxedStrategy<List> {
    let Sizes { page, block, large, top, entries, .. } = g.sizes;
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
    (prop_oneof![3 => (at, segments), 1 => leaf], prop::sample::select(g.accesses.clone()))
        .prop_map(|((at, s), a)| (at, s, a))
        .boxed()
}

/// Lists to map, addresses to look at, bits to flip.
type Image = (Vec<List>, Vec<u64>, Vec<(Index, u32)>);

fn images(g: &Geometry) -> BoxedStrategy<Image> {
    let probes = prop::collection::vec(0..g.sizes.top, 100);
    (prop::collection::vec(list(g), 1..8), probes, prop::collection::vec(flip(), 0..32)).boxed()
}

macro_rules! by_table {
    ($($module:ident: $format:ty;)*) => {$(
        mod $module {
            use super::*;
            type F = $format;

            #[test]
            fn entries_agree() {
                check(more(2000), entry::<F>(), &super::entries_agree::<F>);
            }

            #[test]
            fn images_agree() {
                check(more(24), images(&geometry::<F>()), &|(lists, probes, flips)| {
                    super::images_agree::<F>(&lists, &probes, &flips)
                });
            }
        }
    )*};
}

dmalane_iopt::formats!(by_table);
