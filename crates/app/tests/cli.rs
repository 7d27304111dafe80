//! The built program as its users meet it.

use std::process::{Command, Output};

use serde_json::Value;

const COMMANDS: [&str; 5] = ["load", "doctor", "devices", "iopt", "completions"];

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    command.args(args).current_dir(env!("CARGO_TARGET_TMPDIR"));
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Fails, says why in one way, and never like a programmer.
fn complains(args: &[&str], status: i32) -> String {
    let output = run(args);
    let text = stderr(&output).to_owned();
    assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
    assert!(text.starts_with("dmalane: "), "{text}");
    assert!(!text.contains("panicked") && !text.contains("Os {"), "{text}");
    assert!(output.stdout.is_empty());
    text
}

#[test]
fn every_help_has_an_example_and_the_exit_status() {
    let general = run(&["--help"]);
    assert!(general.status.success());
    for name in COMMANDS {
        assert!(stdout(&general).contains(name));
        for flag in ["--help", "-h"] {
            let help = run(&[name, flag]);
            assert!(help.status.success() && help.stderr.is_empty());
            assert!(stdout(&help).contains(&format!("Examples:\n  dmalane {name}")), "{}", stdout(&help));
            assert!(stdout(&help).lines().all(|l| l.chars().count() <= 100), "wrapped");
        }
    }
    assert!(stdout(&general).contains("Examples:\n  dmalane load --sample 1GiB --explain --verify"));
    assert!(stdout(&general).contains("Exit status:\n  0  it worked\n  1  the job failed"));
    let version = run(&["--version"]);
    assert_eq!(stdout(&version), format!("dmalane {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_usage_is_2() {
    for args in [
        ["frobnicate"].as_slice(),
        &["load"],
        &["load", "a", "--sample", "1MB"],
        &["load", "a", "--direct", "--buffered"],
        &["load", "a", "--frobnicate"],
        &["load", "a", "--device", "gpu0"],
        &["load", "a", "--fragmentation", "-1"],
        &["doctor", "a", "b"],
        &["completions", "command.com"],
    ] {
        complains(args, 2);
    }
    assert!(complains(&["load"], 2).contains("dmalane load [OPTIONS] --sample <SIZE>\n"));
    assert_eq!(run(&[]).status.code(), Some(2));
    assert!(complains(&["docter"], 2).contains("\nhint: a similar subcommand exists: 'doctor'"));
}

#[test]
fn a_bad_size_is_explained() {
    for (size, why) in [
        ("16M", "M could mean MB (a power of 10) or MiB (a power of 2); say which"),
        ("16XB", "no such unit: XB; use kB, MB, GB, TB (powers of 10), KiB, MiB, GiB, TiB (powers of 2)"),
        ("-16MiB", "a size cannot be negative"),
        ("many", "not a size; write for example 16MiB, 1.5GiB, 90MB or 4096"),
        ("99999999999GiB", "too large"),
        ("0", "at least 1 byte"),
    ] {
        for option in ["--sample", "--gather", "--card-ddr", "--card-hbm"] {
            let text = complains(&["load", option, size], 2);
            assert!(text.starts_with(&format!("dmalane: invalid value '{size}' for '{option} <SIZE>': ")), "{text}");
            assert!(text.contains(why), "{text}");
        }
    }
}

#[test]
fn doctor_reports_this_machine() {
    let report = json(&["doctor", "--json"]);
    assert_eq!((&report["schema"], &report["command"]), (&1.into(), &"doctor".into()));
    assert_eq!(report["can_load"], true);
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|c| c["name"].as_str().unwrap()).collect();
    for name in [
        "hugepages_2m",
        "memlock",
        "io_uring",
        "direct_io",
        "dma_heap",
        "udmabuf",
        "vfio",
        "iommufd",
        "iommu_groups",
        "gpus",
    ] {
        assert!(names.contains(&name), "{name}");
    }
    for check in checks {
        assert!(["ok", "lack", "note"].contains(&check["status"].as_str().unwrap()));
        assert_eq!(check["mend"].is_string(), check["status"] == "lack", "{check}");
        assert!(check["why"].is_string() && check["found"].is_string() && check["needed"].is_boolean());
    }
    let text = run(&["doctor", env!("CARGO_MANIFEST_DIR")]);
    assert!(text.status.success());
    assert!(stdout(&text).contains(env!("CARGO_MANIFEST_DIR")));
}

#[test]
fn a_path_that_is_not_there_is_1() {
    let text = complains(&["doctor", "/no/such/place"], 1);
    assert_eq!(text, "dmalane: cannot look at /no/such/place\ncause: No such file or directory (os error 2)\n");
    assert!(complains(&["doctor", "/dev/null"], 1).contains("\nhint: "));
}

#[test]
fn the_software_card_is_listed_first() {
    let listing = json(&["devices", "--json"]);
    assert_eq!((&listing["schema"], &listing["command"]), (&1.into(), &"devices".into()));
    let soft = &listing["devices"][0];
    assert_eq!((&soft["name"], &soft["kind"]), (&"soft".into(), &"soft_card".into()));
    assert_eq!((&soft["supported"], &soft["channels"]), (&true.into(), &2.into()));
    assert_eq!(soft["memories"][0]["default_bytes"], 64u64 << 30);
    assert!(stdout(&run(&["devices"])).starts_with("soft\n"));
}

#[test]
fn every_field_is_documented() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/formats/json.md");
    let page = std::fs::read_to_string(page).unwrap();
    fn keys(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(key, value)| {
                found.push(key.clone());
                keys(value, found);
            }),
            Value::Array(items) => items.iter().for_each(|item| keys(item, found)),
            _ => {}
        }
    }
    let mut words = Vec::new();
    let report = json(&["doctor", "--json"]);
    keys(&report, &mut words);
    keys(&json(&["devices", "--json"]), &mut words);
    words.extend(report["checks"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap().to_owned()));
    for word in words {
        assert!(page.contains(&format!("`{word}`")), "{word}");
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success());
        assert!(stdout(&output).contains("placement"), "{shell}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    for args in
        [["doctor"].as_slice(), &["doctor", "--json"], &["devices"], &["completions", "bash"], &["load", "--help"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(args).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        assert_eq!(stderr(&output), "", "{args:?}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = command(&["doctor"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "dmalane: cannot write to stdout\ncause: No space left on device (os error 28)\n");
}
