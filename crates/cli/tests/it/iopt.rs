//! `dmalane iopt` as its users meet it: images are built, walked and dumped, and bad ones are refused.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Two with the same page sizes and limits, for what is said of each.
const FORMATS: [&str; 2] = ["arm64-s1-4k", "x86-64-4level"];

/// All of them, as they are listed.
fn formats() -> Vec<String> {
    let listed: Value = serde_json::from_str(&Place::mappings(json!([])).text("formats --json")).unwrap();
    listed["formats"].as_array().unwrap().iter().map(|of| of["format"].as_str().unwrap().to_owned()).collect()
}

/// A directory with the specification `spec.json`.
struct Place(TempDir);

impl Place {
    fn new(spec: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("spec.json"), spec).unwrap();
        Self(dir)
    }

    fn mappings(mappings: Value) -> Self {
        Self::new(&json!({"schema": 1, "mappings": mappings}).to_string())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.arg("iopt").args(line.split_whitespace()).current_dir(self.0.path()).envs(crate::WIDE).output().unwrap()
    }

    fn text(&self, line: &str) -> String {
        let output = self.run(line);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && stderr.is_empty(), "{line}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.text(&format!("{line} --json"))).unwrap()
    }

    fn complains(&self, line: &str, status: i32) -> String {
        let output = self.run(line);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{line}: {stderr}");
        assert!(stderr.starts_with("dmalane: ") && !stderr.contains("panicked"), "{stderr}");
        assert!(output.stdout.is_empty(), "what failed must not look like a result");
        stderr
    }
}

fn three() -> Value {
    json!([
        {"va": "0x200000", "pa": "0x40000000", "len": "0x401000", "access": "rw"},
        {"va": 4096, "pa": 0, "len": 8192, "access": "r"},
        {"va": "0x40000000", "pa": "0x80000000", "len": "0x40000000", "access": "rx"},
    ])
}

#[test]
fn what_was_built_is_found_again() {
    for format in FORMATS {
        let place = Place::mappings(three());
        let built = place.json(&format!("build spec.json --format {format} -o image.bin"));
        assert_eq!((&built["schema"], &built["command"]), (&1.into(), &"iopt build".into()));
        assert_eq!((&built["format"], &built["image"]), (&format.into(), &"image.bin".into()));
        assert_eq!((&built["root"], &built["base"]), (&"0x80000000".into(), &"0x80000000".into()));
        // Root, one below it for 512 GiB, one for 1 GiB, and two last ones, for the pages at 0x1000 and at 0x600000.
        assert_eq!((&built["tables"], &built["bytes"]), (&5.into(), &(5 * 4096).into()));
        assert_eq!(fs::metadata(place.path("image.bin")).unwrap().len(), 5 * 4096);
        let leaf = |page: u64, count: u64| json!({"page_bytes": page, "count": count});
        assert_eq!(built["leaves"], json!([leaf(4096, 3), leaf(2 << 20, 2), leaf(1 << 30, 1)]));
        assert_eq!(built["mapped_bytes"], (1 << 30) + 0x401000 + 8192);
        let registers = built["registers"].as_array().unwrap();
        assert!(registers.iter().any(|r| r["value"] == "0x80000000"), "{registers:?}");

        let image = format!("image.bin --format {format} --root 0x80000000");
        let walk = place.json(&format!("walk {image} 0x5fffff 0x600fff 0x601000 4096 0 0x7fffffff 0xffffffffffffffff"));
        let translations = walk["translations"].as_array().unwrap();
        let found = |va: &str, pa: &str, page: u64, access: &str| {
            json!({
                "va": va, "pa": pa, "page_bytes": page, "access": access, "fault": null,
            })
        };
        assert_eq!(translations[0], found("0x5fffff", "0x403fffff", 2 << 20, "rw-"));
        assert_eq!(translations[1], found("0x600fff", "0x40400fff", 4096, "rw-"));
        assert_eq!(translations[2]["fault"], json!({"level": 3, "kind": "not_present"}));
        assert_eq!(translations[2]["pa"], Value::Null);
        assert_eq!(translations[3], found("0x1000", "0x0", 4096, "r--"));
        assert_eq!(translations[4]["fault"]["kind"], "not_present");
        assert_eq!(translations[5], found("0x7fffffff", "0xbfffffff", 1 << 30, "r-x"));
        assert_eq!(translations[6]["fault"], json!({"level": 0, "kind": "out_of_range"}));

        let run = |va: &str, pa: &str, len: u64, access: &str, page: u64, count: u64| {
            json!({
                "va": va, "pa": pa, "len": len, "access": access, "page_bytes": page, "count": count,
            })
        };
        let dump = place.json(&format!("dump {image}"));
        assert_eq!(dump["mapped_bytes"], built["mapped_bytes"]);
        assert_eq!(
            dump["runs"],
            json!([
                run("0x1000", "0x0", 8192, "r--", 4096, 2),
                run("0x200000", "0x40000000", 4 << 20, "rw-", 2 << 20, 2),
                run("0x600000", "0x40400000", 4096, "rw-", 4096, 1),
                run("0x40000000", "0x80000000", 1 << 30, "r-x", 1 << 30, 1),
            ])
        );
    }
}

#[test]
fn the_texts() {
    let place = Place::mappings(three());
    let built = place.text("build spec.json -f x86-64-4level -o image.bin --base 0x9000");
    assert_eq!(
        built,
        "image      image.bin, 20 KiB at 0x9000\nformat     x86-64-4level\ntables     5\n\
         leaves     3 x 4 KiB, 2 x 2 MiB, 1 x 1 GiB\nroot       0x9000\n\
         registers  CR3        0x9000\n           CR4        0x20\n           IA32_EFER  0x900\n"
    );
    let image = "image.bin -f x86-64-4level --root 0x9000";
    assert_eq!(
        place.text(&format!("walk {image} 0x200000 0x300000000000")),
        "0x200000 -> 0x40000000  rw-  2 MiB\n0x300000000000 -> fault at level 0: no mapping\n"
    );
    assert_eq!(
        place.text(&format!("dump {image}")),
        "0x00001000..=0x00002fff -> 0x0  r--  2 x 4 KiB\n\
         0x00200000..=0x005fffff -> 0x40000000  rw-  2 x 2 MiB\n\
         0x00600000..=0x00600fff -> 0x40400000  rw-  1 x 4 KiB\n\
         0x40000000..=0x7fffffff -> 0x80000000  r-x  1 x 1 GiB\n\
         4 runs, 1.00 GiB mapped\n"
    );
}

/// Tables of AMD's IOMMU as others write them: pages of 8 KiB and 512 GiB, levels that are skipped, 64 bits.
#[test]
fn tables_of_others() {
    let place = Place::mappings(json!([]));
    let write = |entries: &[(usize, u64)]| {
        let mut image = vec![0; 8192];
        entries.iter().for_each(|(i, entry)| image[8 * i..8 * i + 8].copy_from_slice(&entry.to_le_bytes()));
        fs::write(place.path("image.bin"), image).unwrap();
    };
    let (last, page) = (0x6000_0000_8000_1201, 0x7000_0000_1234_4e01);
    // 2 MiB in a table of 4 KiB, as nobody writes it.
    let other = 0x3000_0000_120f_fe01;
    write(&[(0, last), (1, 0x7000_0080_0000_0001), (512 + 4, page), (512 + 5, page), (512 + 8, other)]);
    let image = "image.bin -f amd-v1-4level --root 0x80000000";
    assert_eq!(
        place.text(&format!("dump {image}")),
        "0x0000004000..=0x0000005fff -> 0x12344000  rw-  1 x 8 KiB\n\
         0x8000000000..=0xffffffffff -> 0x8000000000  rw-  1 x 512 GiB\n\
         2 runs, 512 GiB mapped, valid but not understood: 1\n"
    );
    assert_eq!(place.json(&format!("dump {image}"))["not_understood"], 1);
    assert_eq!(
        place.text(&format!("walk {image} 0x5123 0x8000 0x9000 0x205123")),
        "0x5123 -> 0x12345123  rw-  8 KiB\n\
         0x8000 -> fault at level 3: an entry that is valid, but not understood\n\
         0x9000 -> fault at level 3: no mapping\n\
         0x205123 -> fault at level 0: no mapping\n"
    );
    write(&[(127, last), (512 + 4, page)]);
    assert_eq!(
        place.text("dump image.bin -f amd-v1-6level --root 0x80000000"),
        "0xfe00000000004000..=0xfe00000000005fff -> 0x12344000  rw-  1 x 8 KiB\n1 run, 8 KiB mapped\n"
    );
}

#[test]
fn nothing_mapped_is_an_image_too() {
    let place = Place::mappings(json!([]));
    let built = place.json("build spec.json -f arm64-s1-4k -o image.bin");
    assert_eq!((&built["tables"], &built["mapped_bytes"]), (&1.into(), &0.into()));
    let dump = place.json("dump image.bin -f arm64-s1-4k --root 0x80000000");
    assert_eq!(dump["runs"], json!([]));
}

#[test]
fn every_format_builds_walks_and_dumps() {
    assert!(formats().len() > FORMATS.len());
    for format in formats() {
        let place = Place::mappings(json!([
            {"va": "0x1ff0000", "pa": "0x7ff0000", "len": "0x30000", "access": "rw"},
            {"va": 0, "pa": 0, "len": "0x10000", "access": "r"},
        ]));
        let built = place.json(&format!("build spec.json --format {format} -o image.bin"));
        assert_eq!((&built["format"], &built["mapped_bytes"]), (&Value::from(&*format), &0x40000.into()));
        assert!(!built["registers"].as_array().unwrap().is_empty(), "{format}");
        assert_eq!(built["bytes"], fs::metadata(place.path("image.bin")).unwrap().len());
        let image = format!("image.bin --format {format} --root 0x80000000");
        let walk = place.json(&format!("walk {image} 0x201ffff 0x2020000"));
        assert_eq!(walk["translations"][0]["pa"], "0x801ffff", "{format}");
        assert_eq!(walk["translations"][1]["fault"]["kind"], "not_present", "{format}");
        let dump = place.json(&format!("dump {image}"));
        let runs: Vec<_> =
            dump["runs"].as_array().unwrap().iter().map(|r| (&r["va"], &r["pa"], &r["access"])).collect();
        let expected = [("0x0", "0x0", "r--"), ("0x1ff0000", "0x7ff0000", "rw-")];
        let expected: Vec<_> = expected.map(|(va, pa, a)| [va, pa, a].map(Value::from)).into();
        assert_eq!(runs, expected.iter().map(|[va, pa, a]| (va, pa, a)).collect::<Vec<_>>(), "{format}");
        // Nothing but noise: an answer or an error.
        let noise: Vec<u8> = (0..1u32 << 16).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(place.path("noise"), noise).unwrap();
        place.text(&format!("walk noise --format {format} --root 0 0 0x1000000 0xffffffffffffffff"));
        assert!(place.run(&format!("dump noise --format {format} --root 0")).status.code().is_some_and(|c| c < 2));
    }
}

#[test]
fn the_top_of_the_space() {
    let page = json!([{"va": "0xfffffffff000", "pa": "0xfffffffff000", "len": 4096, "access": "rwx"}]);
    let place = Place::mappings(page);
    for format in FORMATS {
        place.json(&format!("build spec.json -f {format} -o image.bin --force"));
        let dump = place.json(&format!("dump image.bin -f {format} --root 0x80000000"));
        assert_eq!(dump["runs"][0]["va"], "0xfffffffff000");
        assert_eq!(dump["runs"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn a_bad_mapping_is_named() {
    let good = json!({"va": 0, "pa": 0, "len": 8192, "access": "rw"});
    let line = "build spec.json -f arm64-s1-4k -o image.bin";
    for (bad, says) in [
        (
            json!({"va": 4096, "pa": 0, "len": 4096, "access": "rw"}),
            "mappings[1]: 0x1000 is already mapped by mappings[0]",
        ),
        (
            json!({"va": "0x12345", "pa": 0, "len": 4096, "access": "rw"}),
            "mappings[1]: IOVA 0x12345: not a multiple of 4 KiB",
        ),
        (
            json!({"va": 8192, "pa": 1, "len": 4096, "access": "rw"}),
            "mappings[1]: physical address 0x1, length 0x1000: not a multiple of 4 KiB",
        ),
        (json!({"va": 8192, "pa": 0, "len": 100, "access": "rw"}), "length 0x64: not a multiple of 4 KiB"),
        (
            json!({"va": 8192, "pa": 4096, "len": 0xffff_ffff_ffff_f000u64, "access": "r"}),
            "mappings[1]: physical address 0x1000, length 0xfffffffffffff000: beyond 48 bits of output address",
        ),
        (
            json!({"va": 8192, "pa": 0, "len": 4096, "access": "w"}),
            "mappings[1]: arm64-s1-4k cannot express access -w-",
        ),
        (
            json!({"va": "0xfffffffff000", "pa": 0, "len": 8192, "access": "r"}),
            "mappings[1]: IOVA 0xfffffffff000, length 0x2000: beyond 48 bits of input address",
        ),
        (json!({"va": 8192, "pa": "0x1000000000000", "len": 4096, "access": "r"}), "beyond 48 bits of output address"),
        (json!({"va": 8192, "pa": 0, "len": 0, "access": "r"}), "mappings[1]: an empty range at "),
        (json!({"va": 8192, "pa": 0, "len": 4096}), "there is no field \"access\""),
    ] {
        let place = Place::mappings(json!([good, bad]));
        let text = place.complains(line, 1);
        assert!(text.starts_with("dmalane: spec.json: ") && text.contains(says), "{text}");
        assert!(!place.path("image.bin").exists(), "a refused specification left an image");
    }
    // A table of 64 KiB for each page.
    let pages: Vec<_> = (0..4096u64).map(|i| json!({"va": i << 29, "pa": 0, "len": 65536, "access": "r"})).collect();
    let place = Place::mappings(json!(pages));
    let text = place.complains("build spec.json -f arm64-s1-64k -o image.bin", 1);
    assert!(text.starts_with("dmalane: spec.json: mappings[409"), "{text}");
    assert!(text.contains("the tables outgrow 256 MiB"), "{text}");
    assert!(!place.path("image.bin").exists());
    assert!(Place::new("{").complains(line, 1).contains("spec.json: it ends too early"));
    assert!(
        Place::new("{").complains("build other.json -f arm64-s1-4k -o image.bin", 1).contains("cannot open other.json")
    );
    let place = Place::mappings(three());
    for base in ["0x80000001", "0x1000000000000", "0xffffffffffffffff"] {
        let text = place.complains(&format!("{line} --base {base}"), 1);
        assert!(text.contains("there can be no tables at --base") && text.contains(base), "{text}");
        assert!(text.contains("\nhint: the root is aligned to its size, here 4 KiB\n"), "{text}");
    }
    assert!(
        place
            .complains("build spec.json -f arm64-s1-4k -o no/such/image.bin", 1)
            .contains("cannot write no/such/image.bin")
    );
}

#[test]
fn wrong_usage_is_2() {
    let place = Place::mappings(three());
    for line in [
        "",
        "build",
        "build spec.json -o image.bin",
        "build spec.json -f arm64-s1-4k",
        "build spec.json -f arm64-s1-5k -o image.bin",
        "build spec.json -f arm64-s1-4k -o image.bin --base -1",
        "build spec.json -f arm64-s1-4k -o image.bin --base 0xg",
        "walk image.bin -f arm64-s1-4k 0",
        "walk image.bin -f arm64-s1-4k --root 0x80000000",
        "walk image.bin -f arm64-s1-4k --root 0x80000000 0x10000000000000000",
        "dump image.bin -f arm64-s1-4k",
    ] {
        let output = place.run(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(output.stdout.is_empty());
    }
    let text = place.complains("build spec.json -f arm64-s1-5k -o image.bin", 2);
    assert!(text.contains("hint: `dmalane iopt formats` lists them"), "{text}");
}

#[test]
fn a_hostile_image_is_an_answer_or_an_error() {
    let place = Place::mappings(json!([]));
    let all = "0 0x1000 0x7fffffffffff 0xffffffffffff 0x8000000000000000 0xffffffffffffffff";
    let word = |entry: u64, count: usize| entry.to_le_bytes().repeat(count);
    let mut noise = 1u64;
    let mut next = || {
        noise = noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        noise
    };
    let random: Vec<u8> = (0..8192).flat_map(|_| next().to_le_bytes()).collect();
    let tables: Vec<u8> = (0..4096).flat_map(|_| (next() & 0x7000 | 0x67).to_le_bytes()).collect();
    for (name, bytes) in [
        ("ones", word(u64::MAX, 512)),
        ("loop", word(0x67, 512)), // a table, in both formats, at 0: where the image is
        ("beyond", word(0xffff_ffff_f067, 512)),
        ("short", word(0x67, 3)),
        ("odd", vec![0xff; 4095]),
        ("random", random),
        ("tables", tables),
    ] {
        fs::write(place.path(name), bytes).unwrap();
        for format in FORMATS {
            place.text(&format!("walk {name} -f {format} --root 0 {all}"));
            for line in [
                format!("walk {name} -f {format} --root 0x1000000 --base 0 0"),
                format!("dump {name} -f {format} --root 7"),
            ] {
                assert!(place.complains(&line, 1).contains("the root at"));
            }
            let dump = place.run(&format!("dump {name} -f {format} --root 0"));
            let stderr = String::from_utf8(dump.stderr).unwrap();
            match dump.status.code() {
                Some(0) => assert!(stderr.is_empty()),
                Some(1) => assert!(
                    (stderr.contains("more than") || stderr.contains("no end after")) && stderr.contains("\nhint: "),
                    "{name}: {stderr}"
                ),
                _ => panic!("{name}: {stderr}"),
            }
        }
    }
    fs::write(place.path("empty"), "").unwrap();
    assert!(place.complains("dump empty -f arm64-s1-4k --root 0", 1).contains("holds 0x0 bytes"));
    assert!(place.complains("dump nowhere -f arm64-s1-4k --root 0", 1).contains("cannot open nowhere"));
    assert!(place.complains("dump . -f arm64-s1-4k --root 0", 1).contains("Is a directory"));
    let huge = fs::File::create(place.path("huge")).unwrap();
    huge.set_len((4 << 30) + 1).unwrap(); // sparse
    drop(huge);
    assert!(place.complains("dump huge -f arm64-s1-4k --root 0", 1).contains("huge has more than 4 GiB"));
}

#[test]
fn every_help_has_an_example() {
    let place = Place::mappings(json!([]));
    for name in ["build", "walk", "dump"] {
        let help = place.text(&format!("{name} --help"));
        assert!(help.contains(&format!("Examples:\n  dmalane iopt {name}")), "{help}");
        assert!(help.contains("Exit status: 0"), "{help}");
        assert!(help.lines().all(|l| l.chars().count() <= 100), "wrapped");
    }
}

/// Tables that others wrote, as a device reads them: 4 MiB by boot tables as kernels have them, for privileged
/// accesses; then user pages under tables that limit them.
#[test]
fn rights_of_all_levels() {
    let place = Place::mappings(json!([]));
    let mut words = vec![0u64; 4 * 512];
    // Four tables: P, R/W, then what each level says. Two blocks of 2 MiB (P, R/W, PS), not for users, executable.
    (words[0], words[512], words[1024], words[1025]) = (0x1003, 0x2003, 0x83, 0x20_0083);
    // For users, all of it, down to a page under a table that is read-only, and one under a table with XD.
    words[0] |= 4;
    words[512] |= 4;
    (words[1026], words[1536], words[1027]) = (0x3005, 0x4067, 1 << 63 | 0x3007);
    let image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    fs::write(place.path("image.bin"), image).unwrap();
    let image = "image.bin --base 0 --root 0 -f x86-64-4level";
    assert_eq!(
        place.text(&format!("walk {image} 0x201234 0x400010 0x600010")),
        "0x201234 -> 0x201234  rwx,privileged  2 MiB\n\
         0x400010 -> 0x4010  r-x  4 KiB\n\
         0x600010 -> 0x4010  rw-  4 KiB\n"
    );
    assert_eq!(
        place.text(&format!("walk {image} --user 0x201234 0x400010")),
        "0x201234 -> fault at level 2: no permission\n0x400010 -> 0x4010  r-x  4 KiB\n"
    );
    assert_eq!(place.json(&format!("walk {image} --user 0"))["translations"][0]["fault"]["kind"], "denied");
    let dump = place.text(&format!("dump {image}"));
    assert!(dump.starts_with("0x000000..=0x3fffff -> 0x0  rwx,privileged  2 x 2 MiB\n"), "{dump}");
    assert!(place.text(&format!("dump {image} --user")).ends_with("2 runs, 8 KiB mapped\n"));
}

#[test]
fn kinds_of_memory() {
    let mapping = json!([{"va": 0, "pa": "0x9000000", "len": 4096, "access": "rw,mmio"}]);
    let place = Place::mappings(mapping);
    let built = place.json("build spec.json -f arm64-s1-4k -o image.bin");
    let mair = built["registers"].as_array().unwrap().iter().find(|r| r["name"] == "MAIR_EL1").unwrap();
    assert_eq!(mair["value"], "0x4404ff");
    let walk = place.text("walk image.bin -f arm64-s1-4k --root 0x80000000 0x10");
    assert_eq!(walk, "0x10 -> 0x9000010  rw-,mmio  4 KiB\n");
    let says = place.complains("build spec.json -f vtd-second-48 -o other.bin", 1);
    assert!(says.contains("mappings[0]: vtd-second-48 cannot express access rw-,mmio"), "{says}");
}

#[test]
fn a_field_that_stands_there_twice() {
    let place = Place::new(r#"{"schema":1,"mappings":[{"va":0,"va":4096,"pa":0,"len":4096,"access":"r"}]}"#);
    let says = place.complains("build spec.json -f x86-64-4level -o image.bin", 1);
    assert!(says.contains("spec.json: duplicate field \"va\", at column"), "{says}");
}

#[test]
fn standard_input_is_a_file_as_others() {
    let place = Place::mappings(three());
    let build = "--format x86-64-4level -o";
    place.text(&format!("build spec.json {build} image"));
    let piped = |line: &str, from: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.args(line.split_whitespace()).current_dir(place.0.path());
        let output = command.stdin(std::fs::File::open(place.path(from)).unwrap()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, _, said) = piped(&format!("iopt build - {build} again"), "spec.json");
    assert_eq!(status, Some(0), "{said}");
    let bytes = |name: &str| std::fs::read(place.path(name)).unwrap();
    assert!(bytes("again") == bytes("image"));
    let dump = "--format x86-64-4level --root 0x80000000";
    let (status, dumped, said) = piped(&format!("iopt dump - {dump}"), "image");
    assert_eq!((status, dumped), (Some(0), place.text(&format!("dump image {dump}"))), "{said}");
    assert_eq!(piped(&format!("iopt build - {build} -"), "spec.json").0, Some(2), "stdout is for the report");
}
