//! The target that the variable `DMALANE_TARGET` names, guided by coverage; `scripts/fuzz` builds and runs it.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
static TARGET: std::sync::LazyLock<fn(&[u8])> = std::sync::LazyLock::new(|| {
    let name = std::env::var("DMALANE_TARGET").unwrap_or_default();
    dmalane_fuzz::target(&name).unwrap_or_else(|| panic!("DMALANE_TARGET={name}: no such target"))
});

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET(bytes));

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    eprintln!("built without libFuzzer: see scripts/fuzz");
    std::process::ExitCode::FAILURE
}
