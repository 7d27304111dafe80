//! A GPU in every command: the first of Vulkan under the validation layers, and the fake CUDA driver.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::layers::{Layers, is_skip};

const DMALANE: &str = env!("CARGO_BIN_EXE_dmalane");

/// Runs a command, and gives what it prints; `None`, and why on stdout, where the GPU cannot be opened.
fn run(layers: Option<&Layers>, folder: &Path, line: &str) -> Option<String> {
    let program = Path::new(DMALANE);
    let mut command = layers.map_or_else(|| std::process::Command::new(program), |layers| layers.command(program));
    let output = command.args(line.split_whitespace()).current_dir(folder).output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() && is_skip(&errors) {
        return None;
    }
    assert!(output.status.success(), "{line}: {}\n{text}{errors}", output.status);
    Some(layers.map_or_else(|| text.into_owned(), |layers| layers.check(&output)))
}

/// Takes a device through every command that has one; `None` where it cannot be opened.
fn in_every_command(layers: Option<&Layers>, device: &str) -> Option<()> {
    let folder = tempfile::tempdir().unwrap();
    let run = |line: &str| run(layers, folder.path(), line);
    let json = |line: &str| run(line).map(|text| serde_json::from_str::<Value>(&text).unwrap());
    let loaded = json(&format!("load -d {device} --sample 3MiB --verify --json"))?;
    assert!(loaded["command"] == "load" && loaded["bytes"].as_u64() > Some(2 << 20), "{loaded}");
    let quick = "-j 2 --buffer-size 64KiB --iterations 2";
    let validated = json(&format!("validate -d {device} {quick} --json"))?;
    assert_eq!(validated["passed"], true);
    let reference = validated["reference"].as_str().unwrap();
    assert!(reference.contains("by the device's driver alone"), "{reference}");
    for figure in validated["figures"].as_array().unwrap() {
        assert!(figure["reference_bytes_per_s"].as_f64() > Some(0.0), "{figure}");
    }
    Some(())
}

#[test]
fn vulkan_in_every_command() {
    let layers = Layers::new();
    for how in ["", ",flat,channels=2"] {
        if in_every_command(Some(&layers), &format!("vulkan:0{how}")).is_none() {
            return;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let listed = run(Some(&layers), folder.path(), "devices --json").unwrap();
    assert!(listed.contains("\"vulkan:0\""), "{listed}");
    run(Some(&layers), folder.path(), "doctor").unwrap();
}

/// Over both address spaces, by each queue alone and by both. Where the driver cannot bind, the first space is flat
/// too.
#[test]
#[ignore = "loads 6 GiB: `scripts/nightly gpus`"]
fn a_gibibyte_is_loaded_over_both_spaces() {
    let (layers, folder) = (Layers::new(), tempfile::tempdir().unwrap());
    for (space, queue) in ["", ",flat"].into_iter().flat_map(|space| ["auto", "0", "1"].map(|queue| (space, queue))) {
        let line = format!("load -d vulkan:0{space},channels=2 --mm-channel {queue} --sample 1GiB --verify --json -v");
        let Some(text) = run(Some(&layers), folder.path(), &line) else { return };
        let loaded: Value = serde_json::from_str(&text).unwrap();
        assert!(loaded["bytes"].as_u64() > Some(1000 << 20) && loaded["verified"] == true, "{loaded}");
        let binds = loaded["device_notes"].as_array().unwrap().iter().filter_map(Value::as_str);
        let binds: Vec<_> = binds.filter(|note| note.starts_with("binds") || note.contains("card addresses")).collect();
        println!("1 GiB, queue {queue}, {}: 0 messages of the layers", binds.join("; "));
    }
}

#[test]
fn only_a_machine_without_vulkan_skips_tests() {
    if std::env::var_os("DMALANE_NEED_GPU").is_none() {
        assert!(is_skip("cannot open vulkan:0: Vulkan found no driver (Mesa: apt install mesa-vulkan-drivers)"));
    }
    assert!(!is_skip("cannot open vulkan:0: vkCreateDevice failed: ERROR_INITIALIZATION_FAILED"));
}

#[test]
fn cuda_in_every_command() {
    let library = dmalane_fake_cuda::library();
    for binds in ["", ",vmm"] {
        in_every_command(None, &format!("cuda:0{binds},lib={}", library.display())).unwrap();
    }
}

/// Writes five files with `count` tensors of zeroes, of `bytes` bytes in all, which take no space on the disk.
fn sparse_model(folder: &Path, bytes: u64, count: u64) {
    let (each, len) = (count / 5, bytes / count);
    for shard in 0..5 {
        let tensor = |n: u64| {
            let (start, end) = (n * len, (n + 1) * len);
            format!(r#""layer.{shard}.{n}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{start},{end}]}}"#)
        };
        let mut header = format!("{{{}}}", (0..each).map(tensor).collect::<Vec<_>>().join(","));
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let mut file =
            std::fs::File::create(folder.join(format!("model-0000{}-of-00005.safetensors", shard + 1))).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + each * len).unwrap();
    }
}

/// Loads a model of five files onto the driver in software, which keeps no contents; what that has counted, by name.
fn counts_of_load(bytes: u64, count: u64) -> BTreeMap<String, u64> {
    let folder = tempfile::tempdir().unwrap();
    sparse_model(folder.path(), bytes, count);
    let (library, counts) = (dmalane_fake_cuda::library(), folder.path().join("counts"));
    let mut command = std::process::Command::new(DMALANE);
    command.args(["load", "-d", &format!("cuda:0,lib={}", library.display())]).arg(folder.path());
    command.env("FAKE_CUDA_SETTINGS", "memory 4294967296;idle 1;delay 0").env("FAKE_CUDA_COUNTS", &counts);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&counts).unwrap();
    let pairs = text.lines().map(|line| line.split_once(' ').unwrap());
    pairs.map(|(name, count)| (name.to_owned(), count.parse().unwrap())).collect()
}

/// Of 64 MiB in 100 tensors and of 1 GiB in 10 000: nothing but registered memory is copied from, and memory is
/// registered, allocated and waited for as often. Each file has an allocation, and a wait before that is freed.
#[test]
fn a_load_onto_cuda_registers_and_allocates_as_often_for_every_size() {
    let large = if std::env::var_os("DMALANE_LONG").is_some() { 1 << 30 } else { 256 << 20 };
    for (bytes, count) in [(64 << 20, 100), (large, 10_000)] {
        let counts = counts_of_load(bytes, count);
        let of = |name: &str| counts.get(name).copied().unwrap_or(0);
        assert_eq!((of("copied"), of("unregistered"), of("violations")), (bytes / count * count, 0, 0), "{counts:?}");
        // The staging buffers, of which sources with latency have more than three, and a page to ask the driver.
        assert!((1..=10).contains(&of("cuMemHostRegister_v2")) && of("cuMemHostAlloc") == 0, "{counts:?}");
        let allocated = ["cuMemCreate", "cuMemMap", "cuMemAddressReserve"].map(of);
        let waits = ["cuCtxSynchronize", "cuStreamSynchronize", "cuStreamWaitEvent"].map(of);
        assert_eq!((allocated, waits), ([5, 5, 1], [5, 2, 0]), "{counts:?}");
    }
}
