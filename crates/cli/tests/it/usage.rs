//! Wrong command lines end with status 2 before anything is touched, in every command; what only the machine or a file
//! can show to be wrong ends with status 1. Messages are in users' words.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Command lines that cannot be run, by their first word, and what is said about them.
const WRONG: &[(&str, &[(&str, &str)])] = &[
    (
        "",
        &[
            ("frobnicate", "frobnicate"),
            ("--frobnicate", "--frobnicate"),
            ("docter", "a similar subcommand exists: 'doctor'"),
        ],
    ),
    ("keep", &[("", "<MODEL>..."), ("m.bin --name \"a:b\"", "is no name: 1 to 200 letters")]),
    ("kept", &[("x", "unexpected argument 'x'"), ("--json --openmetrics", "cannot be used with")]),
    ("drop", &[("", "<NAME>...")]),
    (
        "load",
        &[
            ("", "--sample <SIZE>"),
            ("m --frobnicate", "--frobnicate"),
            ("m --sample 1MiB", "cannot be used with"),
            ("--sample 1M", "could mean MB"),
            ("--sample 4095", "at least 4KiB"),
            ("- -", "standard input (-) can be read once"),
            ("- --manifest -", "standard input (-) can be read once"),
            ("m -d gpu0", "`dmalane devices`"),
            ("m -d soft:1", "nothing follows it but options"),
            ("m -d sotf", "did you mean soft?"),
            ("m -d vulcan:0", "did you mean vulkan?"),
            ("m -d ram", "ram:SIZE"),
            ("m -d ram:", "size"),
            ("m -d ram:0", "at least 1 byte"),
            ("m -d ram:many", "not a size"),
            ("m -d vfio:zz", "zz"),
            ("m -d vfio-user:", "a socket is missing"),
            ("m -d file:", "a path is missing"),
            ("m -d file:a,c2h=", "the option c2h=PATH of file: a value is missing"),
            ("m -d vulkan:", "the number, name or UUID of a GPU is missing"),
            ("m -d cuda:", "cuda"),
            ("m -d slash:x", "x"),
            ("m -d vrtd:/x#y", "the number of a card follows #"),
            ("m -d daemon:/x,server-uid=me", "not the number of a user"),
            ("m -d ram:1MiB,ddr=1GiB", "ram has no option \"ddr\", which soft and daemon have"),
            ("m -d daemon,fragmentation=1", "daemon has no option \"fragmentation\", which soft has"),
            ("m -d soft,chanels=1", "did you mean channels?"),
            ("m -d soft --overwrite", "--overwrite is for file and qdma, not for soft"),
            ("m --placement nowhere", "--placement nowhere"),
            ("m --placement -half", "--placement"),
            ("m --mm-channel 9", "the device has no channel 9, it has 2, numbered from 0"),
            ("m --mm-channel both", "both"),
            ("m --mm-channel 0,auto", "takes auto or numbers, not both"),
            ("m -d vfio-user:s,ddr=1GiB", "which soft and daemon have"),
            ("m -d soft,fragmentation=1.1", "not a number from 0 to 1"),
            ("m -d soft,channels=17", "not a number from 1 to 16"),
            ("m --chunk 2GiB", "not from 4KiB to 1GiB"),
            ("m -d soft,hbm=2049GiB", "a memory of the card has at most 256GiB"),
            ("m --repeat 0", "is not in 1..=1000"),
            ("m --tensors [", "character"),
            ("m --direct --buffered", "cannot be used with"),
            ("m --dry-run --verify", "cannot be used with"),
            ("m --dry-run --trace t", "cannot be used with"),
            ("m --trace - ", "stdout is for the report"),
            ("m --trace t --report t", "--trace and --report both write t"),
        ],
    ),
    (
        "read",
        &[
            ("", "<FILE>"),
            ("- -", "standard input (-) can be read once"),
            ("m --range 5..5", "it is empty"),
            ("m --range 5", "write START..END"),
            ("m --range 1X..", "no such unit: X"),
            ("m --chunk 0", "not from 4KiB to 1GiB"),
            ("m --heap stack", "anonymous"),
            ("m --pages 3m", "--pages"),
            ("m --manifest x --range 0..1", "cannot be used with"),
            ("m --export fd", "COMMAND"),
            ("m --export memfd -- true", "memfd"),
            ("m --export fd --repeat 2 -- true", "cannot be used with"),
            // Not with the advice to put it behind `--`, where the command of --export is.
            ("m --dry-run", "unexpected argument '--dry-run' found\n\nUsage: "),
            ("m --trace t --report t", "--trace and --report both write t"),
            ("m --report -", "stdout is for the report"),
        ],
    ),
    ("inspect", &[("", "<FILE>"), ("m m", "m")]),
    ("manifest", &[("", "<FILE>"), ("- -", "can be read once"), ("m -o -", "stdout is for the report")]),
    ("verify", &[("", "<FILE>"), ("m", "--manifest"), ("- - --manifest x", "can be read once")]),
    (
        "validate",
        &[
            ("-d gpu0", "`dmalane devices`"),
            ("-j 0", "is not from 1 to 64"),
            ("--buffer-size 5000", "not a multiple of 4 KiB"),
            ("--buffer-size 2GiB", "not from 4 KiB to 1 GiB"),
            ("--buffer-size 4KiB,1M", "could mean MB"),
            ("-d soft,ring=3", "not a power of two from 2 to 65536"),
            ("-d slash:0,ring=16", "not a number from 0 to 15"),
            ("--mm-channel 9", "--mm-channel"),
            ("--duration 0", "not a number of seconds"),
            ("--iterations 0", "iterations: 0 is less than 1"),
            ("--iterations 1 --duration 1", "cannot be used with"),
            ("--overwrite", "--overwrite is for file and qdma, not for soft"),
            ("-d soft,direct", "which file has"),
            ("-d ram:64MiB --placement ddr", "--placement is for a card"),
            ("--pages 3m", "--pages"),
            ("--report -", "stdout is for the report"),
        ],
    ),
    ("doctor", &[("a b", "b")]),
    ("devices", &[("m", "m")]),
    ("vm bench", &[("4KiB", "whole pages of 16KiB"), ("x", "not a size"), ("1MiB 1", "in 2..="), ("-f vax", "vax")]),
    (
        "bar-map",
        &[
            ("", "--device"),
            ("-d soft", "vfio:"),
            ("-d vfio:zz", "zz"),
            ("-d vfio:0000:01:00.0 --region 6", "is not in 0..=5"),
            ("-d vfio:0000:01:00.0 --range 5..5", "it is empty"),
            ("-d vfio:0000:01:00.0 --backend x", "--backend"),
        ],
    ),
    (
        "card",
        &[
            ("serve", "--vfio-user"),
            ("serve --vfio-user s -d soft,channels=0", "not a number from 1 to 16"),
            ("serve --vfio-user s -d soft,ddr=0", "at least 1 byte"),
            ("serve --vfio-user s -d soft,ring=16", "cannot be served: -d takes soft, with ddr, hbm and channels"),
            ("serve --vfio-user s -d ram:1MiB", "ram:1MiB cannot be served"),
        ],
    ),
    (
        "iopt",
        &[
            ("build", "--format"),
            ("build s -f nothing -o i", "`dmalane iopt formats` lists them"),
            ("build s -f arm64-s1-4k -o -", "stdout is for the report"),
            ("build s -f arm64-s1-4k -o i --base x", "--base"),
            ("walk i -f arm64-s1-4k --root 0", "<VA>"),
            ("walk i -f arm64-s1-4k --root x 0", "--root"),
            ("dump", "IMAGE"),
            ("formats m", "m"),
        ],
    ),
    ("vm", &[("bench -f nothing", "nothing"), ("bench --granule 1", "--granule")]),
    ("completions", &[("", "<SHELL>"), ("command.com", "bash")]),
];

/// Command lines that could be right elsewhere: nothing is there, or it is not of the right kind.
const FAILS: &[&str] = &[
    "keep nothing.bin",
    "kept",
    "drop nothing",
    "load missing",
    "load m missing",
    "load m --trace missing/m",
    "load m --manifest missing",
    "load m --tensors nothing",
    "load m -d vfio:ffff:1f:1f.7",
    "load m -d vfio-user:missing",
    "load m -d daemon:missing",
    "load m -d file:missing",
    "load m -d file:folder/m",
    "load m -d ram:4KiB",
    "load m -d vrtd:missing#0",
    "load m -d slash:99",
    "read missing",
    "read folder",
    "read m --range 1GiB..",
    "read m --trace missing/t",
    "inspect missing",
    "inspect folder",
    "manifest missing",
    "verify m --manifest missing",
    "validate -d file:missing",
    "validate -d file:folder/m",
    "validate --report missing/p",
    "doctor missing",
    "bar-map -d vfio:ffff:1f:1f.7",
    "card serve --vfio-user missing/s",
    "iopt build missing -f arm64-s1-4k -o i",
    "iopt walk missing -f arm64-s1-4k --root 0 0",
    "iopt dump m -f arm64-s1-4k --root 0x40000000",
    "iopt build /dev/zero -f arm64-s1-4k -o i",
    "iopt build pipe -f arm64-s1-4k -o i",
    "iopt build m -f arm64-s1-4k -o i",
    "iopt build list -f arm64-s1-4k -o i",
    "vm bench 1MiB 2 -d ram:1MiB",
    "verify m --manifest pipe",
    "verify m --manifest list",
    "verify m --manifest object",
    "verify m --manifest schema",
    "verify m --manifest /dev/zero",
    "load pipe",
    "load shape.safetensors",
    "load dtype.safetensors",
    "load offsets.safetensors",
    "load negative.safetensors",
    "load list.safetensors",
    "load list.safetensors.index.json",
    "load map.safetensors.index.json",
    "load name.safetensors.index.json",
    "load object.safetensors.index.json",
];

/// Words of programmers.
const NEVER: &[&str] = &[
    "panicked",
    "usize",
    "u64",
    "u32",
    "f64",
    "Os {",
    "Some(",
    "None",
    "Err(",
    "unknown variant",
    "::",
    "RUST_",
    "struct ",
    "a sequence",
    "a map of",
    "a tuple",
    "invalid type",
    "field `",
];

/// Files that are JSON, but not of the form that is expected: of a safetensors file, its header.
const FILES: &[(&str, &str)] = &[
    ("list", "[1]"),
    ("object", "{}"),
    ("schema", r#"{"schema": "x"}"#),
    ("shape.safetensors", r#"{"a":{"dtype":"U8","shape":["x"],"data_offsets":[0,0]}}"#),
    ("dtype.safetensors", r#"{"a":{"dtype":"U9","shape":[1],"data_offsets":[0,1]}}"#),
    ("offsets.safetensors", r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}}"#),
    ("negative.safetensors", r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":{}}}"#),
    ("list.safetensors", "[1]"),
    ("list.safetensors.index.json", "[]"),
    ("map.safetensors.index.json", r#"{"weight_map":[1]}"#),
    ("name.safetensors.index.json", r#"{"weight_map":{"a":1}}"#),
    ("object.safetensors.index.json", "{}"),
];

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("usage");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("folder")).unwrap();
    fs::write(folder.join("m"), vec![7; 100_000]).unwrap();
    fs::write(folder.join("folder/m"), vec![7; 100]).unwrap();
    for (name, text) in FILES {
        let header =
            if name.ends_with(".safetensors") { (text.len() as u64).to_le_bytes().to_vec() } else { Vec::new() };
        fs::write(folder.join(name), [&header, text.as_bytes()].concat()).unwrap();
    }
    assert!(Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap().success());
    folder
}

/// Runs it, and gives its status and its message, if these are as they should be.
fn run(folder: &Path, line: &str) -> Result<(i32, String), String> {
    let output = Command::new(env!("CARGO_BIN_EXE_dmalane"))
        .args(line.split_whitespace())
        .current_dir(folder)
        .envs(crate::WIDE)
        .env("DMALANE_KEEP", folder.join("no-keeper")) // not one that the user runs
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let never = NEVER.iter().find(|word| text.contains(**word));
    match (output.status.code(), never) {
        (_, Some(word)) => Err(format!("{line}: says {word}: {text}")),
        (Some(status), None) if output.stdout.is_empty() && text.starts_with("dmalane: ") => Ok((status, text)),
        _ => Err(format!("{line}: {} {text} {}", output.status, String::from_utf8_lossy(&output.stdout))),
    }
}

/// All files of a folder with their contents.
fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        match entry.metadata().unwrap() {
            meta if meta.is_dir() => all.extend(files(&entry.path())),
            meta => all.push((entry.path(), meta.len())),
        }
    }
    all.sort();
    all
}

#[test]
fn wrong_usage_is_2_and_everything_else_is_1() {
    let folder = folder();
    let before = files(&folder);
    let mut wrong = Vec::new();
    for (command, lines) in WRONG {
        for (line, said) in *lines {
            match run(&folder, &format!("{command} {line}")) {
                Ok((2, text)) if text.contains(said) => {}
                Ok((status, text)) => wrong.push(format!("{command} {line}: {status} without {said:?}: {text}")),
                Err(error) => wrong.push(error),
            }
        }
    }
    for line in FAILS {
        match run(&folder, line) {
            Ok((1, _)) => {}
            Ok((status, text)) => wrong.push(format!("{line}: {status}: {text}")),
            Err(error) => wrong.push(error),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(files(&folder), before, "nothing was written");
}

#[test]
fn near_words_are_proposed_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    for (line, said) in [
        ("laod", Some("a similar subcommand exists: 'load'")),
        ("kep", Some("a similar subcommand exists: 'ke")),
        ("lsit", None),
        ("compare", None),
        ("load m --verfy", Some("a similar argument exists: '--verify'")),
        ("load m --dry", Some("a similar argument exists: '--dry-run'")),
        ("read m --heap memdf", Some("a similar value exists: 'memfd'")),
        ("read m --heap stack", None),
        ("vm bench 1MiB -f arm", None),
        ("load m -d vulkna:0", Some("did you mean vulkan?")),
        ("load m -d video", None),
    ] {
        let (_, text) = run(folder.path(), line).unwrap();
        let proposed = text.contains("similar") || text.contains("did you mean");
        assert!(proposed == said.is_some() && text.contains(said.unwrap_or_default()), "{line}: {text}");
    }
}

#[test]
fn errors_are_as_wide_as_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    for line in ["load --chunk x", "load m -d gpu0", "validate --buffer-size 4KiB,8K", "load"] {
        std::fs::write(folder.path().join("m"), "x").unwrap();
        let shell = format!("stty rows 24 cols 60; {} {line}", env!("CARGO_BIN_EXE_dmalane"));
        let mut command = Command::new("script");
        let output = match command.args(["-qec", &shell, "/dev/null"]).current_dir(folder.path()).output() {
            Ok(output) => output,
            Err(e) => return println!("SKIPPED: no script: {e}"),
        };
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            text.contains("dmalane: ") && text.lines().all(|l| l.trim_end().chars().count() <= 60),
            "{line}: {text}"
        );
    }
}

#[test]
fn every_command_is_in_both_lists() {
    let wrong = WRONG.iter().flat_map(|(name, lines)| lines.iter().map(move |(line, _)| format!("{name} {line}")));
    let wrong: Vec<String> = wrong.collect();
    for (command, _) in crate::lists::all() {
        assert!(wrong.iter().any(|line| crate::lists::runs(line, &command)), "{command} is not in WRONG");
        // These read nothing that can be missing.
        let never = ["devices", "completions", "iopt formats"].contains(&&*command);
        let fails = FAILS.iter().any(|line| crate::lists::runs(line, &command));
        assert!(fails || never, "{command} is not in FAILS");
        assert!(!fails || !never, "{command} is in FAILS, so it is no exception");
    }
}
