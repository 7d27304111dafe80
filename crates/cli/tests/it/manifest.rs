//! `dmalane manifest` and `dmalane verify`, and `--manifest` of the commands that read.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs a command, whose exit status must be this, and gives what it printed and said.
fn dmalane(folder: &Path, line: &str, status: i32) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    let output = command.args(line.split_whitespace()).current_dir(folder).envs(crate::WIDE).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "dmalane {line}\n{said}");
    (String::from_utf8_lossy(&output.stdout).into_owned(), said)
}

fn flip(path: &Path, at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[test]
fn a_difference_is_named_by_every_command_that_reads() {
    let folder = folder("manifest");
    crate::sample(folder.join("model.safetensors"), 3 << 20, 1);
    let (said, _) = dmalane(&folder, "manifest model.safetensors -o m.json", 0);
    assert!(said.starts_with("Wrote m.json: 5 tensors in 1 file, 3 MiB hashed in "), "{said}");
    let (printed, _) = dmalane(&folder, "manifest model.safetensors", 0);
    assert_eq!(printed, fs::read_to_string(folder.join("m.json")).unwrap());
    let (_, said) = dmalane(&folder, "manifest model.safetensors -o m.json", 1);
    let there = format!("it exists already, and has {} bytes", printed.len());
    assert!(said.contains(&there) && said.contains("--force"), "{said}");
    let (_, said) = dmalane(&folder, "manifest model.safetensors --force -o model.safetensors", 1);
    assert!(said.contains("it is the input"), "{said}");
    let hashes: Value = serde_json::from_str(&printed).unwrap();
    let regions = hashes["files"][0]["regions"].as_array().unwrap();
    let last = regions.iter().rfind(|region| region["start"] != region["end"]).unwrap();
    let (at, name) = (last["end"].as_u64().unwrap() - 1, last["name"].as_str().unwrap());
    for line in ["verify model.safetensors", "load model.safetensors", "read model.safetensors"] {
        dmalane(&folder, &format!("{line} --manifest m.json"), 0);
    }
    let (text, _) = dmalane(&folder, "verify -q model.safetensors --manifest m.json", 0);
    assert!(text.starts_with("Verified: "), "{text}");
    let (text, _) = dmalane(&folder, "load model.safetensors --manifest m.json", 0);
    assert!(text.contains("as in the manifest"), "{text}");
    flip(&folder.join("model.safetensors"), at);
    for line in ["verify model.safetensors", "load model.safetensors", "read model.safetensors"] {
        let (printed, said) = dmalane(&folder, &format!("{line} --manifest m.json"), 1);
        assert!(
            printed.is_empty() && said.contains(&format!("cause: model.safetensors: tensor {name:?} differs")),
            "{said}"
        );
    }
    let (json, _) = dmalane(&folder, "verify model.safetensors --manifest m.json --json", 1);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["verified"], &json["differences"][0]["tensor"]), (&false.into(), &name.into()));
    // The file is named as it was given.
    fs::rename(folder.join("model.safetensors"), folder.join("renamed.safetensors")).unwrap();
    for line in ["verify", "load", "read"] {
        let (_, said) = dmalane(&folder, &format!("{line} renamed.safetensors --manifest m.json"), 1);
        assert!(said.contains(&format!("cause: renamed.safetensors: tensor {name:?} differs")), "{said}");
    }
    fs::rename(folder.join("renamed.safetensors"), folder.join("model.safetensors")).unwrap();
    // A header that no longer parses is named too.
    flip(&folder.join("model.safetensors"), at);
    flip(&folder.join("model.safetensors"), 7);
    let (_, said) = dmalane(&folder, "verify model.safetensors --manifest m.json", 1);
    assert!(said.contains("cause: model.safetensors: header differs (bytes 0.."), "{said}");
    dmalane(&folder, "read model.safetensors --manifest m.json --range 0..1", 2);
    dmalane(&folder, "verify model.safetensors", 2);
}

#[test]
fn a_file_that_was_not_downloaded_is_one_of_the_differences() {
    let folder = folder("manifest-pointer");
    fs::create_dir(folder.join("model")).unwrap();
    for (number, shard) in (1..).zip(['a', 'b', 'c']) {
        crate::shard(folder.join(format!("model/m-0000{number}-of-00003.safetensors")), 1 << 20, shard);
    }
    dmalane(&folder, "manifest model -o m.json", 0);
    flip(&folder.join("model/m-00001-of-00003.safetensors"), 0);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n";
    fs::write(folder.join("model/m-00002-of-00003.safetensors"), pointer).unwrap();
    let (printed, said) = dmalane(&folder, "verify model --manifest m.json", 1);
    assert!(printed.is_empty() && said.starts_with("dmalane: 2 differences from the manifest\n"), "{said}");
    let (changed, missing) = (
        "cause: m-00001-of-00003.safetensors: header differs",
        "cause: m-00002-of-00003.safetensors: it is a Git LFS pointer",
    );
    assert!(said.contains(changed) && said.contains(missing) && said.contains("git lfs pull"), "{said}");
    let (json, _) = dmalane(&folder, "verify model --manifest m.json --json", 1);
    let json: Value = serde_json::from_str(&json).unwrap();
    let problems = json["differences"].as_array().unwrap().iter();
    let problems: Vec<_> =
        problems.map(|one| [&one["file"], &one["problem"]].map(|cell| cell.as_str().unwrap())).collect();
    assert_eq!(
        problems,
        [["m-00001-of-00003.safetensors", "changed"], ["m-00002-of-00003.safetensors", "lfs_pointer"]]
    );
}

#[test]
fn files_of_a_model_that_are_missing_are_named() {
    let folder = folder("manifest-shards");
    fs::create_dir(folder.join("model")).unwrap();
    for shard in ['a', 'b'] {
        crate::shard(folder.join(format!("model/{shard}.safetensors")), 1 << 20, shard);
    }
    crate::index(&folder.join("model"), &["a.safetensors", "b.safetensors"]);
    dmalane(&folder, "manifest model --sha256 -o m.json", 0);
    dmalane(&folder, "verify model --manifest m.json", 0);
    let (text, _) = dmalane(&folder, "verify model/a.safetensors --manifest m.json", 0);
    assert!(text.starts_with("Verified in part: 1 file, ") && text.contains("Not checked: 1 file of"), "{text}");
    fs::remove_file(folder.join("model/b.safetensors")).unwrap();
    flip(&folder.join("model/a.safetensors"), 0);
    let (_, said) = dmalane(&folder, "verify model --manifest m.json", 1);
    let both = "cause: a.safetensors: header differs (bytes 0..";
    assert!(said.contains(both) && said.contains("cause: b.safetensors: is missing\n"), "{said}");
    std::os::unix::fs::symlink("../blobs/gone", folder.join("model/b.safetensors")).unwrap();
    let (_, said) = dmalane(&folder, "verify model --manifest m.json", 1);
    assert!(said.contains("b.safetensors: is missing: it is a link to ../blobs/gone\n"), "{said}");
    fs::remove_file(folder.join("model/b.safetensors")).unwrap();
    let (_, said) = dmalane(&folder, "verify model/a.safetensors --manifest m.json", 1);
    assert!(said.contains("hint: Not checked: 1 file of the manifest not named"), "{said}");
    let (_, said) = dmalane(&folder, "manifest model", 1);
    assert!(said.contains("a file that is not there: b.safetensors"), "{said}");
    // Nothing is there of a name that is not right.
    let (_, said) = dmalane(&folder, "verify q-00001-of-00003.gguf --manifest m.json", 1);
    assert!(said.contains("3 parts of 3 are missing") && !said.contains("difference"), "{said}");
    flip(&folder.join("model/a.safetensors"), 0);
    fs::copy(folder.join("model/a.safetensors"), folder.join("model/c.safetensors")).unwrap();
    crate::index(&folder.join("model"), &["c.safetensors"]);
    let (_, said) = dmalane(&folder, "verify model --manifest m.json", 1);
    assert!(said.contains("b.safetensors: is missing") && said.contains("c.safetensors: is not in the"), "{said}");
    fs::write(folder.join("m.json"), "{\"schema\": 1, \"\u{202e}\": \"\u{1b}[2J\"}").unwrap();
    let (_, said) = dmalane(&folder, "load model/a.safetensors --manifest m.json", 1);
    assert!(
        said.starts_with("dmalane: m.json: cannot be used\ncause: this is no manifest, but a JSON text ("),
        "{said}"
    );
    fs::write(folder.join("m.json"), "{\"schema\": 1, \"command\": \"manifest\", \"\u{202e}\": \"\u{1b}[2J\"}")
        .unwrap();
    let (_, said) = dmalane(&folder, "load model/a.safetensors --manifest m.json", 1);
    assert!(said.starts_with("dmalane: m.json: cannot be used\ncause: bad manifest: "), "{said}");
    let (_, said) = dmalane(&folder, "verify model/a.safetensors --manifest model/a.safetensors", 1);
    assert!(said.contains("this is no manifest, but a safetensors file (not JSON"), "{said}");
    assert!(said.contains("): `dmalane manifest MODEL` writes one"), "{said}");
    // Of an empty standard input.
    let (_, said) = dmalane(&folder, "load model/a.safetensors --manifest -", 1);
    assert!(
        said.starts_with("dmalane: stdin: cannot be used\ncause: this is no manifest (it ends too early"),
        "{said}"
    );
    // A file without an end.
    let (_, said) = dmalane(&folder, "verify model --manifest /dev/zero", 1);
    assert!(said.contains("/dev/zero is a character device, which has no end"), "{said}");
}
