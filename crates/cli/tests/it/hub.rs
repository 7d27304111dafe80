//! Models where users have them: the cache of Hugging Face's libraries, files with holes, many shards, no `/proc`.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use crate::{WIDE, index, sample, shard};

fn dmalane(line: &str, cache: &Path) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {line}")]).envs(WIDE).env("HF_HUB_CACHE", cache);
    command.env("DMALANE", env!("CARGO_BIN_EXE_dmalane")).output().unwrap()
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

/// A model in a cache: a snapshot of links to blobs.
pub(crate) fn cached(cache: &Path) -> std::path::PathBuf {
    let model = cache.join("models--org--name");
    let snapshot = model.join("snapshots/abcd");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(model.join("blobs")).unwrap();
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::write(model.join("refs/main"), "abcd").unwrap();
    let file = cache.join("new");
    sample(&file, 1 << 20, 1);
    let sum = Command::new("sha256sum").arg(&file).output().unwrap();
    let hash = String::from_utf8_lossy(&sum.stdout)[..64].to_owned();
    let blob = model.join("blobs").join(&hash);
    std::fs::rename(&file, &blob).unwrap();
    symlink(format!("../../blobs/{hash}"), snapshot.join("model.safetensors")).unwrap();
    blob
}

#[test]
fn a_model_of_the_cache_is_named_and_verified_by_its_name() {
    let cache = tempfile::tempdir().unwrap();
    let blob = cached(cache.path());
    let run = |args: &str| dmalane(&format!("$DMALANE {args}"), cache.path());
    for args in [
        "load org/name",
        "load org/name@abcd -d ram:8MiB",
        "read org/name",
        "verify org/name",
        "manifest org/name --sha256",
    ] {
        let output = run(args);
        assert!(output.status.success(), "{args}: {}", text(&output));
    }
    // As a service has it, without a shell.
    let line = format!("env HOME={} HF_HUB_CACHE='~' $DMALANE load org/name", cache.path().display());
    let output = dmalane(&line, cache.path());
    assert!(output.status.success(), "{}", text(&output));
    let path = blob.display().to_string();
    let (loaded, verified) = (run(&format!("load {path}")), run(&format!("verify {path} --json")));
    assert!(text(&loaded).contains("Loaded 5 tensors"), "{}", text(&loaded));
    assert!(text(&verified).contains("\"verified\": true"), "{}", text(&verified));
    // A byte of the last tensor.
    let mut bytes = std::fs::read(&blob).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let says = "model.safetensors: its bytes have SHA-256 ";
    for args in ["verify org/name", "manifest org/name --sha256"] {
        let output = run(args);
        assert!(output.status.code() == Some(1) && text(&output).contains(says), "{args}: {}", text(&output));
    }
    let json = run("verify org/name --json");
    assert!(json.status.code() == Some(1) && text(&json).contains("\"problem\": \"name\""), "{}", text(&json));
    for (args, says) in [
        ("load org/other", "has no such model: hf download org/other"),
        // An extension tells a file.
        ("load org/other.gguf", "cannot open org/other.gguf\ncause: No such file or directory"),
        ("load org/name@v9", "has no revision v9 of it, but abcd: write org/name@REVISION"),
        ("load https://example.org/model.safetensors", "it is a URL: download the file first"),
        ("load hf://org/name", "it is a URL"),
    ] {
        let output = run(args);
        assert!(output.status.code() == Some(1) && text(&output).contains(says), "{args}: {}", text(&output));
    }
    let other = cache.path().join("other.safetensors");
    sample(&other, 1 << 20, 1);
    let output = run(&format!("verify {}", other.display()));
    let says = "other.safetensors with\nhint: --manifest names a manifest";
    assert!(output.status.code() == Some(2) && text(&output).contains(says), "{}", text(&output));
}

#[test]
fn holes_in_place_of_tensors_are_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    sample(&path, 1 << 20, 1);
    let run = |args: &str| text(&dmalane(&format!("$DMALANE load {} {args}", path.display()), folder.path()));
    assert!(!run("").contains("Note:") && run("--json").contains("\"notes\": []"));
    // A download that was given its length, and never finished.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(512 << 10).unwrap();
    file.set_len(1 << 20).unwrap();
    let got = run("");
    assert!(got.contains("m.safetensors: 524288 bytes of its tensors are a hole, which reads as zeroes"), "{got}");
    assert!(run("--json").contains("524288 bytes of its tensors are a hole"));
}

#[test]
fn many_shards_need_few_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let name = |i: u32| format!("s-{i:05}-of-00120.safetensors");
    for i in 1..=120 {
        let letter = char::from_u32(0x4e00 + i).unwrap();
        shard(folder.path().join(name(i)), 4096, letter);
    }
    let names: Vec<String> = (1..=120).map(name).collect();
    index(folder.path(), &names.iter().map(|name| &**name).collect::<Vec<_>>());
    for args in ["load", "load -d ram:8MiB", "read", "manifest"] {
        let line = format!("bash -c 'ulimit -n 64; exec $DMALANE {args} {}'", folder.path().display());
        let output = dmalane(&line, folder.path());
        assert!(output.status.success(), "{args}: {}", text(&output));
    }
}

/// Each is open twice while it is read past the page cache, which has its first pages.
#[test]
fn many_cold_files_need_few_descriptors() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let name = |i: u32| format!("s-{i:05}-of-00200.safetensors");
    for i in 1..=200 {
        shard(folder.path().join(name(i)), 128 << 10, char::from_u32(0x4e00 + i).unwrap());
    }
    for args in ["load --cold", "load --cold --verify -d ram:64MiB", "read --cold", "manifest"] {
        let line = format!("bash -c 'ulimit -n 256; exec $DMALANE {args} {}'", folder.path().display());
        let output = dmalane(&line, folder.path());
        assert!(output.status.success(), "{args}: {}", text(&output));
    }
}

#[test]
fn files_are_read_directly_where_no_proc_is_mounted() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("m.safetensors");
    sample(&path, 1 << 20, 1);
    let direct = |before: &str| dmalane(&format!("{before}$DMALANE read --direct {}", path.display()), folder.path());
    let without = "unshare -Urm sh -c 'mount -t tmpfs none /proc && exec $0 $@' ";
    let can = dmalane(&format!("{without}true"), folder.path());
    if !can.status.success() || !direct("").status.success() {
        return println!("SKIPPED: no namespace of mounts for this user, or no direct I/O here");
    }
    let output = direct(without);
    assert!(output.status.success(), "{}", text(&output));
}
