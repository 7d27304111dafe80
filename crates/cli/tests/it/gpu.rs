//! A GPU in every command: the first of Vulkan under the validation layers, and the fake CUDA driver.

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
