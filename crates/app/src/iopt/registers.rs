//! The values to program beside a page table, until the formats say them themselves.

use dmalane::iopt::{Arm64S1_4k, Format, X86_64_4Level};
use serde::Serialize;

/// A register and its value.
#[derive(Clone, Serialize)]
pub struct Register {
    /// As the architecture calls it.
    pub name: &'static str,
    #[serde(serialize_with = "super::report::as_hex")]
    /// The whole register, or for a name with a dot that field.
    pub value: u64,
}

/// What to program for the tables at `root`.
pub fn of<F: Format>(root: u64) -> Vec<Register> {
    let values: &[(&'static str, u64)] = match F::NAME {
        Arm64S1_4k::NAME => &[
            ("TTBR0_EL1", root),
            // T0SZ 16, IRGN0 and ORGN0 write-back, SH0 inner, TG0 4 KiB, EPD1, IPS 48 bits, HPD0
            ("TCR_EL1", 16 | 0b01 << 8 | 0b01 << 10 | 0b11 << 12 | 1 << 23 | 0b101 << 32 | 1 << 41),
            ("MAIR_EL1", 0xff),
        ],
        X86_64_4Level::NAME => &[("CR3", root), ("IA32_EFER.NXE", 1)],
        _ => &[],
    };
    values.iter().map(|&(name, value)| Register { name, value }).collect()
}
