//! `dmalane vm` as its users meet it: traces are replayed, recorded ones too, and bad ones are refused.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const HEADER: &str = r#"{"trace":"dmalane-vm","version":1,"format":"agx-uat","null_page":{"pa":"0x4000","len":16384}}"#;
const BO: &str = r#"{"op":"bo","id":1,"segments":[{"pa":"0x100000000","len":"0x40000"}]}"#;
const BIND: &str = r#"{"op":"bind","va":"0x8000","bo":1,"offset":"0x4000","len":"0xc000","access":"rw"}"#;

/// A directory with traces.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Writes `trace.jsonl`.
    fn with(lines: &[&str]) -> Self {
        let place = Self::new();
        std::fs::write(place.path("trace.jsonl"), lines.join("\n")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.args(line.split_whitespace()).current_dir(self.0.path());
        command
    }

    fn run(&self, line: &str) -> (i32, String, String) {
        told(self.command(line).output().unwrap())
    }

    /// The JSON of a replay that may have refused something.
    fn json(&self, line: &str) -> (i32, Value) {
        let (status, stdout, stderr) = self.run(&format!("{line} --json"));
        assert_eq!(stderr.is_empty(), status == 0, "{stderr}");
        (status, serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}")))
    }
}

fn told(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(stderr.is_empty() || stderr.starts_with("dmalane: "), "{stderr}");
    (output.status.code().unwrap(), stdout, stderr)
}

#[test]
fn a_replay_prints_results_and_the_mapping() {
    let place = Place::with(&[
        HEADER,
        BO,
        BIND,
        "",
        r#"{"op":"bind","va":"0x8000","bo":1,"len":"0x4000","access":"r"}"#,
        r#"{"op":"repeat","va":"0x40000","bo":1,"offset":"0x8000","page":16384,"len":"0x10000","access":"r"}"#,
        r#"{"op":"null","va":"0x80000","len":32768}"#,
        concat!(
            r#"{"op":"batch","ops":[{"op":"unbind_bo","bo":1},"#,
            r#"{"op":"bind","va":"0x8000","bo":1,"offset":"0x40000","len":16384,"access":"rw"}]}"#
        ),
        r#"{"op":"prefetch","va":"0x8000","len":16384}"#,
        "not JSON",
    ]);
    let (status, text, stderr) = place.run("vm replay trace.jsonl");
    assert_eq!(status, 1);
    assert_eq!(stderr, "dmalane: trace.jsonl: 2 of 8 operations refused, the first in line 8\n");
    let expected = "\
line 2      bo        ok
line 3      bind      ok
line 5      bind      ok
line 6      repeat    ok
line 7      null      ok
line 8      batch     beyond_bo (ERANGE): operation 1: 16384 bytes from offset 0x40000 of buffer 1, to be bound at \
device VA 0x8000, reach beyond its 262144 bytes
line 9      prefetch  ok
line 10     -         bad_line (EINVAL): not an object
0x8000..=0xbfff -> 0x100000000  r--  16 KiB leaves  bo 1 + 0x0
0xc000..=0x13fff -> 0x100008000  rw-  16 KiB leaves  bo 1 + 0x8000
0x40000..=0x4ffff -> 0x100008000  r--  16 KiB leaves  bo 1 + 0x8000, 16 KiB again and again
0x80000..=0x87fff -> 0x4000  r--  16 KiB leaves  null
8 operations, 2 refused; 4 bindings, 4 runs, 144 KiB mapped
";
    assert_eq!(text, expected);

    let (status, json) = place.json("vm replay trace.jsonl");
    assert_eq!(status, 1);
    assert_eq!(
        (&json["schema"], &json["command"], &json["format"]),
        (&1.into(), &"vm replay".into(), &"agx-uat".into())
    );
    assert_eq!((&json["operations"], &json["refused"]), (&8.into(), &2.into()));
    assert_eq!((&json["bindings"], &json["mapped_bytes"]), (&4.into(), &147_456.into()));
    assert!(json["stopped"].is_null());
    assert_eq!(json["range"], serde_json::json!({"va": "0x0", "len": 1u64 << 39}));
    let results = json["results"].as_array().unwrap();
    assert_eq!(results[0], serde_json::json!({"line": 2, "op": "bo", "result": "ok"}));
    assert_eq!(results[2], serde_json::json!({"line": 5, "op": "bind", "result": "ok", "unmapped_bytes": 16384}));
    assert_eq!((&results[5]["index"], &results[5]["errno"]), (&1.into(), &"ERANGE".into()));
    assert_eq!((&results[7]["op"], &results[7]["result"]), (&Value::Null, &"bad_line".into()));
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(
        runs[1],
        serde_json::json!({"va": "0xc000", "len": 32768, "bo": 1, "offset": "0x8000", "repeat": null,
            "pa": "0x100008000", "access": "rw-", "leaf": 16384})
    );
    assert_eq!((&runs[2]["repeat"], &runs[3]["bo"]), (&16384.into(), &Value::Null));
}

#[test]
fn stdin_and_other_formats() {
    let place = Place::new();
    for format in ["agx-uat", "x86-64-4level", "riscv-sv48", "arm64-s1-64k"] {
        let mut child = place
            .command(&format!("vm replay - --format {format} --json"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let trace = [r#"{"trace":"dmalane-vm","version":1}"#, BO, BIND].join("\n");
        child.stdin.take().unwrap().write_all(trace.as_bytes()).unwrap();
        let (status, text, _) = told(child.wait_with_output().unwrap());
        let json: Value = serde_json::from_str(&text).unwrap();
        // The bind is not made of 64 KiB pages.
        assert_eq!(status, i32::from(format == "arm64-s1-64k"), "{text}");
        assert_eq!((&json["trace"], &json["format"]), (&"stdin".into(), &format.into()));
    }
}

#[test]
fn what_is_no_trace() {
    let deep = "[".repeat(100_000);
    for (lines, says) in [
        (&[][..], "the file is empty"),
        (&["{}"], "there is no field \"trace\""),
        (&["\x7fELF"], "line 1 is not the first line"),
        (&[deep.as_str()], "line 1 is not the first line"),
        (&[r#"{"trace":"dmalane-vm","version":7}"#], "version 7; only 1 is known"),
        (&[r#"{"trace":"dmalane-vm","version":1}"#], "does not say which page-table format"),
        (&[r#"{"trace":"dmalane-vm","version":1,"format":"vax"}"#], "the page-table format \"vax\" is unknown"),
        (&[r#"{"trace":"dmalane-vm","version":1,"format":"agx-uat","range":{"va":1,"len":2}}"#], "cannot be made"),
        (
            &[r#"{"trace":"dmalane-vm","version":1,"format":"agx-uat","range":{"va":0,"len":"0x8000004000"}}"#],
            "cannot be",
        ),
    ] {
        let place = Place::with(lines);
        let (status, stdout, stderr) = place.run("vm replay trace.jsonl --json");
        assert_eq!((status, stdout.as_str()), (1, ""), "{stderr}");
        assert!(stderr.contains(says) && stderr.contains("trace.jsonl"), "{stderr}");
    }
    let place = Place::new();
    for (line, status, says) in [
        ("vm replay missing.jsonl", 1, "cannot open missing.jsonl"),
        ("vm replay .", 1, "Is a directory"),
        ("vm replay", 2, "TRACE"),
        ("vm", 2, "replay"),
        ("vm replay a --format vax", 2, "vax"),
    ] {
        let output = place.command(line).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(status) && stderr.contains(says), "{line}: {stderr}");
    }
}

#[test]
fn a_reader_that_has_seen_enough() {
    let lines = [vec![HEADER, BO], vec![BIND; 20_000]].concat();
    let place = Place::with(&lines);
    for json in ["", " --json"] {
        let mut child = place
            .command(&format!("vm replay trace.jsonl{json}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_load_is_recorded() {
    let place = Place::new();
    let (status, text, stderr) = place.run("load --sample 5MiB --record binds.jsonl --json -d soft,ddr=1GiB,hbm=1GiB");
    assert_eq!((status, stderr.as_str()), (0, ""));
    let load: Value = serde_json::from_str(&text).unwrap();
    let (status, replay) = place.json("vm replay binds.jsonl");
    assert_eq!((status, &replay["refused"]), (0, &0.into()));
    assert_eq!(replay["format"], "x86-64-4level");
    let number = |v: &Value| u64::from_str_radix(v.as_str().unwrap().strip_prefix("0x").unwrap(), 16).unwrap();
    let runs: Vec<_> =
        replay["runs"].as_array().unwrap().iter().map(|r| (number(&r["va"]), r["len"].as_u64().unwrap())).collect();
    let tensors: Vec<_> =
        load["files"].as_array().unwrap().iter().flat_map(|f| f["tensors"].as_array().unwrap()).collect();
    assert!(!tensors.is_empty());
    // A tensor of no bytes is bound nowhere.
    for tensor in tensors.into_iter().filter(|t| t["bytes"] != 0) {
        let (va, bytes) = (tensor["device_va"].as_u64().unwrap(), tensor["bytes"].as_u64().unwrap());
        // Every byte of it lies in runs that follow each other.
        let mut at = va;
        while at < va + bytes {
            let (first, len) = runs.iter().find(|(first, len)| (*first..first + len).contains(&at)).unwrap();
            at = first + len;
        }
    }
    let leaves = |v: &Value| {
        v["card"]["device_leaves"]
            .as_array()
            .unwrap()
            .iter()
            .map(|l| l["page_bytes"].as_u64().unwrap() * l["count"].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(replay["mapped_bytes"].as_u64().unwrap(), leaves(&load));
}

#[test]
fn a_load_that_fails_records_nothing() {
    let place = Place::new();
    std::fs::write(place.path("bad.safetensors"), b"1234567").unwrap();
    let (status, ..) = place.run("load bad.safetensors --record binds.jsonl");
    assert_eq!((status, place.path("binds.jsonl").exists()), (1, false));
    for to in [".", "missing/x", "/dev/null"] {
        let (status, stdout, stderr) = place.run(&format!("load --sample 4KiB --record {to}"));
        assert!(status == 1 && stdout.is_empty() && stderr.contains("cannot write "), "{stderr}");
    }
}

#[test]
fn lines_are_refused_for_what_earlier_lines_say() {
    let destroy = r#"{"op":"destroy","id":1}"#;
    let unfinished = BO.replace("]}", r#"],"more":true}"#);
    for (lines, line, says) in [
        (&[HEADER, BO, BIND, BO][..], 4, "there is a buffer object 1 already"),
        (&[HEADER, BO, BIND, &destroy.replace('1', "2")], 4, "there is no buffer object 2"),
        (&[HEADER, BO, BIND, destroy, destroy], 5, "there is no buffer object 1"),
        (&[HEADER, BO, BIND, destroy, BIND], 5, "there is no buffer object 1"),
        (&[HEADER, &unfinished, BIND], 3, "there is no buffer object 1"),
        (&[HEADER, BO, BIND, r#"{"op":"unbind_bo","bo":2}"#], 4, "there is no buffer object 2"),
        (&[HEADER, BO, BIND, r#"{"op":"merge","va":0,"len":0}"#], 4, "a bind of no bytes at device VA 0x0"),
        (&[HEADER, BO, BIND, &BIND.replace("0xc000", "0x0")], 4, "a bind of no bytes at device VA 0x8000"),
        (
            &[HEADER, BO, BIND, r#"{"op":"batch","ops":[{"op":"destroy","id":1}]}"#],
            4,
            "destroy cannot stand in a batch",
        ),
    ] {
        let place = Place::with(lines);
        let (status, text, stderr) = place.run("vm replay trace.jsonl");
        let refused: Vec<_> = text.lines().filter(|text| text.starts_with("line ") && !text.ends_with(" ok")).collect();
        assert!(status == 1 && stderr.contains(&format!("the first in line {line}")), "{line}: {stderr}");
        assert!(refused.len() == 1 && refused[0].contains(says), "{says}: {text}");
    }
}

#[test]
fn times_as_the_original_report_prints_them() {
    let batch = |op: &str| {
        let each = |page: u64| op.replace("VA", &(page << 14).to_string());
        let ops: Vec<_> = (1..100).map(each).collect();
        format!(r#"{{"op":"batch","ops":[{}]}}"#, ops.join(","))
    };
    let bind = r#"{"op":"bind","va":VA,"bo":1,"len":16384,"access":"rw"}"#;
    let unbind = r#"{"op":"unbind","va":VA,"len":16384}"#;
    let place = Place::with(&[
        HEADER,
        BO,
        &bind.replace("VA", "0"),
        &batch(bind),
        &bind.replace("VA", "1"), // refused: not counted
        &batch(unbind),
        &unbind.replace("VA", "0"),
    ]);
    let (_, text, _) = place.run("vm replay trace.jsonl --times");
    let lines: Vec<_> = text.lines().rev().take(4).collect();
    // The line of `bo`.
    assert!(lines[0].starts_with(" others: "), "{text}");
    for (line, start, each) in
        [(lines[2], " other binds: ", "ns per bind: "), (lines[1], " unbinds: ", "ns per unbind: ")]
    {
        assert!(line.starts_with(start) && line.contains(each) && line.ends_with("Mop/s"), "{line}");
    }
    assert!(lines[3].starts_with(" first bind: ") && lines[3].ends_with("ns"), "{text}");

    let (_, json) = place.json("vm replay trace.jsonl --times");
    let times = &json["times"];
    for (name, operations) in [("first_bind", 1), ("other_binds", 99), ("unbinds", 100), ("others", 1)] {
        let timed = &times[name];
        assert_eq!(timed["operations"], operations, "{name}");
        let (ns, each) = (timed["ns"].as_f64().unwrap(), timed["ns_per_operation"].as_f64().unwrap());
        assert!((ns / f64::from(operations) - each).abs() < 0.01 * each, "{timed}");
        assert!((each * timed["mops"].as_f64().unwrap() - 1e3).abs() < 1.0, "{timed}");
    }
    assert!(place.json("vm replay trace.jsonl").1["times"].is_null());
}

#[test]
fn a_recorded_load_in_every_format_that_can_hold_it() {
    let place = Place::new();
    let load =
        |to, bits| place.run(&format!("load --sample 5MiB -q --record {to} -d soft,ddr=1GiB,hbm=1GiB,va-bits={bits}"));
    assert_eq!((load("binds.jsonl", 47).0, load("short.jsonl", 32).0), (0, 0));
    for format in dmalane::iopt::FormatId::ALL {
        let name = format.name();
        let coarse = !format.page_sizes().contains(dmalane::addr::PageSize::SIZE_4K);
        let long = format.input_bits() > 32;
        for (trace, held) in [("binds.jsonl", long), ("short.jsonl", true)] {
            let (status, text, stderr) = place.run(&format!("vm replay {trace} --format {name}"));
            // Tensors are bound at multiples of 4 KiB.
            assert_eq!(status == 0, held && !coarse, "{name}: {text} {stderr}");
            assert_eq!(stderr.contains("soft,va-bits=32"), !held, "{name}: {stderr}");
        }
    }
    let (status, _, stderr) = load("x.jsonl", 31);
    assert!(status == 2 && stderr.contains("from 32 to 47"), "{stderr}");
    // A trace that says which range it needs.
    let place = Place::with(&[r#"{"trace":"dmalane-vm","version":1,"range":{"va":0,"len":"0x10000000000"}}"#]);
    let (status, _, stderr) = place.run("vm replay trace.jsonl --format riscv-sv39");
    assert!(status == 1 && stderr.contains("soft,va-bits=39"), "{stderr}");
}

#[test]
fn leaves_depend_on_how_they_were_bound_until_they_are_merged() {
    let header = r#"{"trace":"dmalane-vm","version":1,"format":"x86-64-4level"}"#;
    let bo = r#"{"op":"bo","id":1,"segments":[{"pa":"0x40000000","len":"0x200000"}]}"#;
    let bind = |first: u64, len: u64| {
        let va = 0x4000_0000 + first;
        format!(r#"{{"op":"bind","va":{va},"bo":1,"offset":{first},"len":{len},"access":"rw"}}"#)
    };
    let merge = r#"{"op":"merge","va":"0x40000000","len":"0x200000"}"#;
    let leaf = |lines: &[&str]| {
        let place = Place::with(&[&[header, bo], lines].concat());
        let (status, json) = place.json("vm replay trace.jsonl");
        assert_eq!((status, json["runs"].as_array().unwrap().len()), (0, 1));
        json["runs"][0]["leaf"].as_u64().unwrap()
    };
    let (whole, low, high) = (bind(0, 2 << 20), bind(0, 1 << 20), bind(1 << 20, 1 << 20));
    assert_eq!(leaf(&[&whole]), 2 << 20);
    assert_eq!(leaf(&[&low, &high]), 4096);
    assert_eq!(leaf(&[&low, &high, merge]), 2 << 20);
}

#[test]
fn messages_without_words_of_the_parser() {
    for (line, says) in [
        (r#"{"op":"bnd","va":1}"#, "unknown operation \"bnd\", at column 11"),
        (r#"{"op":"bind","va":"x","bo":1}"#, "x instead of a number from 0 to 2^64 - 1, as 4096 or \"0x1000\""),
        (r#"{"op":"bind","va":-1}"#, "-1 instead of a number from"),
        (r#"{"op":"bind","va":[1]}"#, "a list instead of a number from"),
        (r#"{"op":"bind","vaa":1}"#, "unknown field \"vaa\", at column"),
        (r#"{"op":"bo","id":1,"segments":{"pa":1}}"#, "an object instead of a list"),
        (r#"{"op":"bo","id":1,"segments":[{"pa":1}]}"#, "there is no field \"len\""),
        (r#"{"op":"bo","id":1,"segments":[],"more":1}"#, "1 instead of true or false"),
        (r#"{"op":"batch","ops":null}"#, "batch needs a field ops"),
        (r#"{"op":"batch","ops":[null]}"#, "null instead of an object"),
        (r#"{"op":"bind","access":"rq"}"#, "not letters out of"),
        (r#"{"op":"bind""#, "it ends too early"),
        (r#"{"op":bind}"#, "not JSON"),
    ] {
        let (_, text, _) = Place::with(&[HEADER, line]).run("vm replay trace.jsonl");
        assert!(text.contains(says), "{line}: {text}");
        for word in ["variant", "usize", "u64", "struct", "sequence", "EOF", "`"] {
            assert!(!text.contains(word), "{line}: {text}");
        }
    }
}

#[test]
fn a_bench_prints_the_lines_of_the_original_program() {
    let place = Place::new();
    for (args, name) in [
        ("256MiB 1000", "agx-uat page tables"),
        ("268435456 1000 --format x86-64-4level", "x86-64-4level page tables"),
        ("256MiB 1000 -d soft", "software card"),
    ] {
        let (status, text, stderr) = place.run(&format!("vm bench {args}"));
        assert_eq!((status, &*stderr), (0, ""));
        let [head, first, others, unbinds] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert!(head.starts_with(&format!("Testing on {name}")), "{head}");
        assert!(head.ends_with(" with BO size 268435456 (16384 pages) with 1000 binds"), "{head}");
        assert!(first.starts_with(" first bind: ") && first.ends_with("ns"), "{first}");
        assert!(others.starts_with(" other binds: ") && others.contains("ns per bind: "), "{others}");
        assert!(unbinds.starts_with(" unbinds: ") && unbinds.ends_with("Mop/s"), "{unbinds}");
    }
    for (args, status, why) in [
        ("256MiB 1000 -d ram:1GiB", 1, "ram:1GiB has no address space to bind in"),
        ("1GiB 1000 -d soft,ddr=2MiB,hbm=4MiB", 1, "no memory for the buffer"),
        ("4KiB", 2, "BO_SIZE is not 1 to 2^24 whole pages of 16KiB"),
        ("20KiB", 2, "BO_SIZE is not 1 to 2^24 whole pages of 16KiB"),
        ("1TiB", 2, "BO_SIZE is not 1 to 2^24 whole pages of 16KiB"),
        ("4GiB 1", 2, "not a whole number from 2 to"),
        ("4GiB 1000 -d soft -f agx-uat", 2, "cannot be used with"),
    ] {
        let (got, stdout, stderr) = place.run(&format!("vm bench {args}"));
        assert_eq!((got, &*stdout), (status, ""), "{args}: {stderr}");
        assert!(stderr.contains(why), "{args}: {stderr}");
    }
}
