//! The integration tests of this crate, linked once.

mod card;
mod cli;
mod columns;
mod dmalaned;
mod dmalaned_memory;
mod examples;
mod export;
mod gpu;
mod group;
mod help;
mod hub;
mod iopt;
mod keep;
mod layers;
mod lists;
mod manifest;
mod outputs;
mod refused;
mod slash;
mod supervisor;
mod timeline;
mod usage;
mod validate;
mod vm;

/// The daemon's program, which is elsewhere in a guest of scripts/vm.
fn dmalaned() -> std::ffi::OsString {
    std::env::var_os("DMALANE_TEST_DMALANED").unwrap_or_else(|| env!("CARGO_BIN_EXE_dmalaned").into())
}

/// `dmalane` under strace, with this error or value injected into a system call, as `fsync:error=EIO:when=2`.
fn injecting(what: &str) -> std::process::Command {
    let call = what.split(':').next().unwrap();
    let mut strace = std::process::Command::new("strace");
    strace.args(["-f", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &format!("inject={what}")]);
    strace.arg(env!("CARGO_BIN_EXE_dmalane"));
    strace
}

/// The environment of a program that reads messages: each cause is in a line.
const WIDE: [(&str, &str); 1] = [("COLUMNS", "10000")];

/// Makes a model of this size at a path.
fn sample(path: impl AsRef<std::path::Path>, size: u64, seed: u64) {
    dmalane::load::write_sample(&mut std::fs::File::create(path).unwrap(), size, seed).unwrap();
}

/// Makes a shard of a model: a sample whose tensors are called by `letter` and their names in a sample.
fn shard(path: impl AsRef<std::path::Path>, size: u64, letter: char) {
    let mut bytes = Vec::new();
    dmalane::load::write_sample(&mut bytes, size, 1).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..end]).unwrap();
    let named = header.into_iter().map(|(name, about)| match name.as_str() {
        "__metadata__" => (name, about),
        _ => (format!("{letter}.{name}"), about),
    });
    let header = serde_json::to_vec(&named.collect::<serde_json::Map<_, _>>()).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[end..]].concat();
    std::fs::write(path, file).unwrap();
}

/// Writes `model.safetensors.index.json` of these shards of a folder.
fn index(folder: &std::path::Path, shards: &[&str]) {
    let mut map = serde_json::Map::new();
    for name in shards {
        let bytes = std::fs::read(folder.join(name)).unwrap();
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..end]).unwrap();
        let tensors = header.into_iter().map(|(tensor, _)| tensor).filter(|tensor| tensor != "__metadata__");
        map.extend(tensors.map(|tensor| (tensor, serde_json::Value::from(*name))));
    }
    let text = serde_json::json!({"metadata": {}, "weight_map": map}).to_string();
    std::fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
}

/// How often tests kill a program: 50 times, or as often as `DMALANE_KILLS` says.
fn kills() -> u64 {
    std::env::var("DMALANE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(50)
}
