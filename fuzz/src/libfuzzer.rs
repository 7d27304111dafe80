//! The target that the variable `DMALANE_TARGET` names, guided by coverage; `scripts/fuzz` builds and runs it.
#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("DMALANE_TARGET").unwrap_or_default();
    dmalane_fuzz::target(&name).unwrap_or_else(|| panic!("DMALANE_TARGET={name}: no such target"))
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET(bytes));
