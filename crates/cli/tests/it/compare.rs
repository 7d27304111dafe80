//! `dmalane compare`: loaders that are there, loaders that are not, and one that returns wrong bytes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    crate::sample(folder.join("model.safetensors"), 3 << 20, 1);
    folder
}

fn dmalane(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    command.args(line.split_whitespace()).current_dir(folder).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn loader<'a>(result: &'a Value, name: &str) -> &'a Value {
    result["loaders"].as_array().unwrap().iter().find(|loader| loader["name"] == name).unwrap_or(&Value::Null)
}

fn script(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn our_loaders_have_the_same_bytes() {
    let folder = folder("compare-ours");
    fs::write(folder.join("other.bin"), vec![3; 200_000]).unwrap();
    let line = "compare model.safetensors other.bin --rounds 2 --json --python ./none";
    let output = dmalane(&folder, line);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result = json(&output);
    for name in ["dmalane", "dmalane-memfd", "dmalane-buffered", "plain-read", "cat"] {
        let loader = loader(&result, name);
        assert_eq!(loader["skipped"], Value::Null, "{loader}");
        assert_eq!((&loader["bytes_right"], &loader["dma_ready"]), (&true.into(), &(name != "cat").into()), "{name}");
        for cache in ["cold", "warm"] {
            let runs = &loader[cache];
            assert_eq!(runs["runs_s"].as_array().unwrap().len(), 2);
            let at = |field: &str| runs[field].as_f64().unwrap();
            assert!(at("fastest_s") > 0.0 && at("fastest_s") <= at("median_s") && at("median_s") <= at("slowest_s"));
            assert!(at("peak_rss_bytes") > 1e6, "{runs}");
        }
    }
    // A file system without direct I/O has no such loader.
    let direct = loader(&result, "dmalane-direct");
    assert!(direct["bytes_right"] == true || direct["skipped"].is_string(), "{direct}");
    let absent = &loader(&result, "safetensors-mmap")["skipped"];
    assert!(absent.as_str().unwrap().starts_with("cannot run ./none: "), "{absent}");
}

#[test]
fn a_loader_that_returns_wrong_bytes_is_named() {
    let folder = folder("compare-wrong");
    let sample = |hash: &str| {
        let rest = r#""cpu_s":0.1,"peak_rss_bytes":1,"memory":"private memory","dma_ready":true"#;
        format!(r#"echo 'library chatter'; echo '{{"seconds":0.25,{rest},"sha256":"{hash}"}}'"#)
    };
    script(&folder, "wrong", &sample(&"0".repeat(64)));
    script(&folder, "silent", "exit 0");
    script(&folder, "fails", "echo 'no such \x1b[2J card' >&2; exit 3");
    script(&folder, "slow", "exec sleep 100");
    script(&folder, "huge", "exec cat /dev/zero");
    script(&folder, "honest", r#"echo '{"skipped": "needs a card"}'"#);
    let with: String =
        ["wrong", "silent", "fails", "slow", "huge", "honest"].map(|n| format!(" --with {n}=./{n}")).concat();
    let only: String =
        ["wrong", "silent", "fails", "slow", "huge", "honest", "plain-read"].map(|n| format!(" --only {n}")).concat();
    let line = format!("compare model.safetensors --rounds 1 --timeout 8 --report out.html{with}{only}");
    let output = dmalane(&folder, &format!("{line} --json"));
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("dmalane: not the bytes of the files: wrong\n"), "{said}");
    let result = json(&output);
    assert_eq!(
        (&loader(&result, "wrong")["bytes_right"], &loader(&result, "plain-read")["bytes_right"]),
        (&false.into(), &true.into())
    );
    for (name, why) in [
        ("silent", "prints no result"),
        ("fails", "fails (exit status: 3): no such \u{fffd}[2J card"),
        ("slow", "did not end within 8 s"),
        ("honest", "needs a card"),
    ] {
        let skipped = loader(&result, name)["skipped"].as_str().unwrap().to_owned();
        assert!(skipped.contains(why), "{name}: {skipped}");
    }
    assert!(loader(&result, "huge")["skipped"].is_string());
    assert_eq!(result["reported"], "out.html");
    let page = fs::read_to_string(folder.join("out.html")).unwrap();
    assert!(
        page.contains("<b>WRONG</b>") && page.contains("did not end within 8 s") && !page.contains("http"),
        "{page}"
    );
    let none = dmalane(&folder, "compare model.safetensors --rounds 1 --only none --with none=false");
    assert_eq!(none.status.code(), Some(1));
    let (report, said) = (String::from_utf8_lossy(&none.stdout), String::from_utf8_lossy(&none.stderr));
    assert!(report.contains(": none cold, none warm") && report.contains("fails (exit status: 1)\n"), "{report}");
    assert!(said.contains("no loader could run here"), "{said}");
    let text = dmalane(&folder, "compare model.safetensors --rounds 1 --only plain-read --only cat --report text.html");
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.ends_with("\nReport: text.html\n"), "{text}");
    assert!(
        text.starts_with("Fastest into DMA-ready memory: plain-read cold, plain-read warm (3.00 MiB in 1"),
        "{text}"
    );
    assert!(text.contains("cat: nothing is kept, which is not DMA-ready"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    // Loaders are told how much memory to touch before their clock starts: what they need, and as much page cache.
    script(
        &folder,
        "told",
        r#"rest='"cpu_s":0,"peak_rss_bytes":1,"memory":"","dma_ready":true'
echo "{\"seconds\":$((DMALANE_COMPARE_TOUCH + 1)),$rest}""#,
    );
    let told = json(&dmalane(&folder, "compare model.safetensors --rounds 1 --only told --with told=./told --json"));
    let size = fs::metadata(folder.join("model.safetensors")).unwrap().len();
    assert_eq!(loader(&told, "told")["warm"]["median_s"].as_f64(), Some(2.0 * size as f64 + 1.0));
    let csv = dmalane(&folder, "compare model.safetensors --rounds 1 --only plain-read --csv");
    assert_eq!(String::from_utf8_lossy(&csv.stdout).lines().count(), 3);
    for wrong in ["compare model.safetensors --only nobody", "compare", "compare model.safetensors --with x"] {
        assert_eq!(dmalane(&folder, wrong).status.code(), Some(2), "{wrong}");
    }
    assert_eq!(dmalane(&folder, "compare missing").status.code(), Some(1));
}

#[test]
fn standard_input_is_compared_under_a_name() {
    let folder = folder("compare-stdin");
    fs::copy(folder.join("model.safetensors"), folder.join("named-otherwise")).unwrap();
    for line in [
        "cat model.safetensors | dmalane compare -",
        "dmalane compare - < model.safetensors",
        "dmalane compare - < named-otherwise",
    ] {
        let options =
            "--rounds 1 --json --python ./none --only dmalane --only plain-read --only mine --with mine=./mine";
        // What a loader gets has a name that it can open, of the right kind, and the bytes.
        let answer = r#"rest='"cpu_s":0,"peak_rss_bytes":1,"memory":"","dma_ready":true'
case "$1" in *.safetensors) cmp -s "$1" model.safetensors && echo "{\"seconds\":1,$rest}";; esac"#;
        script(&folder, "mine", answer);
        let program = Path::new(env!("CARGO_BIN_EXE_dmalane")).parent().unwrap();
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-ec", &format!("{line} {options}")]).current_dir(&folder).env("PATH", path);
        // It hashes nothing, so its bytes are not those of the files.
        let output = shell.env("TMPDIR", &folder).output().unwrap();
        let result = json(&output);
        assert_eq!(result["files"], serde_json::json!(["stdin.safetensors"]), "{line}");
        for ours in ["dmalane", "plain-read"] {
            assert_eq!(loader(&result, ours)["bytes_right"], true, "{line}: {}", loader(&result, ours));
        }
        assert_eq!(loader(&result, "mine")["skipped"], Value::Null, "{line}");
        let left = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with("dmalane-compare-")), "{line}");
    }
    let mut empty = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    let output = empty.args(["compare", "-"]).stdin(std::process::Stdio::null()).output().unwrap();
    assert!(output.status.code() == Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stderr).contains("stdin is not a file with bytes in it"));
}
