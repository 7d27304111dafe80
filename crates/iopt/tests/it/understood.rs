//! Entries that a device takes for valid and that mean nothing here, in every format: a walk says so, and not that
//! nothing is mapped.

use std::collections::BTreeMap;

use crate::formats::shift;
use dmalane_iopt::{FaultKind, Format, FormatId, walk, with_format};

/// Where an entry is.
#[derive(Clone, Copy)]
enum At {
    Root,
    /// So many levels above the last one.
    Last(u32),
}
use At::{Last, Root};

/// How the names of formats begin, and such an entry of theirs.
const ENTRIES: [(&str, At, u64); 22] = [
    ("agx-uat", Root, 0x8000_0001),                // a block
    ("agx-uat", Last(0), 0x0080_0000_8000_0883),   // no access flag
    ("amd-v1", Root, 0x6000_0000_8000_1c01),       // a table of level 6
    ("amd-v1", Last(0), 0x3000_0000_120f_fe01),    // 2 MiB
    ("amd-v1", Last(0), 0x1000_0000_1234_5001),    // neither IR nor IW
    ("arm64-", Last(0), 0x0060_0000_1230_0f41),    // a block
    ("arm64-s2-", Last(0), 0x0040_0000_1230_073f), // S2AP 0b00
    ("armv7-lpae-s1", Last(0), 0x0060_0000_1230_0f41),
    ("armv7-lpae-s2", Last(0), 0x0040_0000_1230_07fd),
    ("armv7-lpae-s2", Last(0), 0x0040_0000_1230_073f),
    ("armv7-short", Root, 0x0114_0c02),  // a supersection beyond 32 bits
    ("armv7-short", Root, 0x0010_0002),  // a section with AP 0b000
    ("armv7-short", Last(0), 0x1_0001),  // a large page with AP 0b000
    ("armv7-short", Last(0), 0x1002),    // a small page with AP 0b000
    ("riscv-sv", Root, 0x41),            // a table with A
    ("riscv-sv", Last(0), 0x45),         // W without R
    ("riscv-sv", Last(1), 0x4d3 | 0x40), // 2 MiB, not aligned
    ("vtd-second", Last(1), 0x1083),     // 2 MiB, not aligned
    ("vtd-second-48", Root, 0x83),       // PS
    ("vtd-second-57", Root, 0x83),       // PS
    ("x86-64-", Root, 0x83),             // PS
    ("x86-64-", Last(1), 0x2083),        // 2 MiB, not aligned
];

/// One that is not valid in any format, whatever else it holds.
const ABSENT: u64 = 0x1004;

/// Each entry is found at its address, they are all that is found in tables of all levels, and their number.
fn found<F: Format>() -> usize {
    let table = |level: u32| u64::from(level + 1) << 24;
    let mut words = BTreeMap::new();
    let mut put = |level, i: u64, entry: u64| {
        let at = table(level) + i * F::ENTRY_BYTES;
        *words.entry(at & !7).or_insert(0) |= entry << (at % 8 * 8);
    };
    let mut there: Vec<Vec<u64>> = vec![vec![]; F::LEVELS as usize];
    for (_, at, entry) in ENTRIES.into_iter().filter(|(name, ..)| F::NAME.starts_with(name)) {
        let level = if let Last(above) = at { F::LEVELS - 1 - above } else { 0 };
        there[level as usize].push(entry);
    }
    for (level, there) in (0..).zip(&there) {
        if level + 1 < F::LEVELS {
            put(level, 0, F::encode_table(level, table(level + 1)));
        }
        (1..).zip(there).for_each(|(i, entry)| put(level, i, *entry));
        if level > 0 {
            put(level, there.len() as u64 + 1, ABSENT);
        }
    }
    for (level, there) in (0..).zip(&there) {
        let entries = 1 << if level == 0 { F::INPUT_BITS - shift::<F>(0) } else { F::INDEX_BITS };
        for i in 1..entries {
            let fault =
                walk::<F>(table(0), i << shift::<F>(level), |word| Some(words.get(&word).copied().unwrap_or(0)));
            let fault = fault.map_err(|fault| (fault.level, fault.kind)).unwrap_err();
            let kind = if i > there.len() as u64 { FaultKind::NotPresent } else { FaultKind::NotUnderstood };
            assert_eq!(fault, (level, kind), "{}: entry {i} of level {level}", F::NAME);
        }
    }
    there.iter().map(Vec::len).sum()
}

#[test]
fn what_is_valid_and_not_understood_is_said() {
    for format in FormatId::ALL {
        let found = with_format!(*format, F => found::<F>());
        assert!(found > 0, "{format} has no entry in the list above");
    }
}
