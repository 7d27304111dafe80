//! `dmalane validate` as its users meet it.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    command.arg("validate").args(args).current_dir(env!("CARGO_TARGET_TMPDIR")).envs(crate::WIDE).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

const SMALL: &str = "soft,ddr=8MiB,hbm=8MiB";

/// Runs on a small card with short measurements.
fn quick(args: &[&str]) -> Vec<String> {
    let quick = ["-j", "2", "--buffer-size", "64KiB", "--iterations", "2", "-d", SMALL];
    // An option that is given replaces the one here.
    let given = |option: &str| args.contains(&option);
    let mut all: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
    for pair in quick.chunks(2) {
        let replaced = pair[0] == "--iterations" && given("--duration");
        if !given(pair[0]) && !replaced {
            all.extend(pair.iter().map(|a| (*a).to_owned()));
        }
    }
    all
}

fn ok(args: &[&str]) -> String {
    let all = quick(args);
    let output = run(&all.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(output.status.success() && output.stderr.is_empty(), "{all:?}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

fn json(args: &[&str]) -> Value {
    let value: Value = serde_json::from_str(&ok(&[args, &["--json"]].concat())).unwrap();
    assert_eq!((&value["schema"], &value["command"], &value["passed"]), (&5.into(), &"validate".into(), &true.into()));
    value
}

/// Fails, says why and what helps, and prints nothing else.
fn complains(args: &[&str], status: i32) -> String {
    let all = quick(args);
    let output = run(&all.iter().map(String::as_str).collect::<Vec<_>>());
    let said = text(&output.stderr).to_owned();
    assert_eq!(output.status.code(), Some(status), "{all:?}: {said}");
    assert!(said.starts_with("dmalane: ") && !said.contains("panicked") && !said.contains("Os {"), "{said}");
    assert!(output.stdout.is_empty());
    said
}

#[test]
fn options_of_v80_smi_lead_to_ours() {
    for (theirs, ours) in [("--use-qdma-driver", "'-d qdma:QUEUE'"), ("--bandwidth-duration=2", "'--duration'")] {
        let said = complains(&[theirs], 2);
        assert!(said.contains("unexpected argument") && said.contains(ours), "{said}");
    }
}

fn figures(value: &Value) -> &Vec<Value> {
    value["figures"].as_array().unwrap()
}

fn file(len: u64) -> (tempfile::NamedTempFile, String) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(len).unwrap();
    let device = format!("file:{}", file.path().display());
    (file, device)
}

#[test]
fn the_table_has_integrity_and_figures_for_each_memory() {
    let table = ok(&["--pages", "4k", "-v"]);
    for memory in ["HBM ", "DDR ", "HBM+DDR "] {
        assert!(table.lines().any(|l| l.starts_with(memory) && l.ends_with("2/2 OK")), "{table}");
        for way in ["read", "write", "both"] {
            let line = table.lines().find(|l| l.starts_with(memory) && l.contains(&format!("KiB  {way} ")));
            let line = line.unwrap_or_else(|| panic!("{memory} {way}: {table}"));
            assert!(line.contains(" %  ") && line.contains("64 KiB"), "{line}");
        }
    }
    assert_eq!(table.matches("2/2 OK").count(), 3);
    assert!(
        table.starts_with("Data intact: reads up to ") && table.contains("\nreference (ref): the faster of plain"),
        "{table}"
    );
    assert!(table.contains("GB/s of all threads together; ") && table.contains("a resolution of 1 %"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    assert!(table.contains("2 channels, one thread for the card, helped by those that poll"), "-v: {table}");
    assert!(!ok(&["--pages", "4k"]).contains("those that poll"));
}

#[test]
fn every_option_does_what_it_says() {
    let of = |value: &Value, field: &str| {
        let mut all: Vec<String> = figures(value).iter().map(|f| f[field].as_str().unwrap().to_owned()).collect();
        all.sort();
        all.dedup();
        all
    };
    let with = |args: &[&str]| json(&[args, &["--pages", "4k"]].concat());
    // For what neither the memory nor the direction matters to.
    let once = |args: &[&str]| with(&[args, &["--direction", "read", "--placement", "ddr"]].concat());
    assert_eq!(of(&with(&[]), "memory"), ["DDR", "HBM", "HBM+DDR"]);
    assert_eq!(of(&with(&["--placement", "ddr"]), "memory"), ["DDR"]);
    assert_eq!(of(&with(&["--placement", "hbm"]), "memory"), ["HBM"]);
    for (args, ways) in [
        (&["--direction", "read"][..], &["read"][..]),
        (&["--direction", "write"], &["write"]),
        (&["--direction", "both"], &["both"]),
        (&["--direction", "read,write"], &["read", "write"]),
    ] {
        assert_eq!(of(&with(&[args, &["--placement", "ddr"]].concat()), "direction"), ways);
    }
    let one = once(&["-j", "1", "--iterations", "7"]);
    assert_eq!((&one["settings"]["threads"], &figures(&one)[0]["read"]["buffers"]), (&1.into(), &7.into()));
    assert_eq!(one["settings"]["iterations"], 7);
    let deep = once(&["-j", "1", "--iodepth", "4", "--iterations", "7"]);
    assert_eq!((&deep["settings"]["iodepth"], &figures(&deep)[0]["read"]["buffers"]), (&4.into(), &28.into()));
    let timed = once(&["--duration", "0.01"]);
    assert_eq!(timed["settings"]["duration_s"], 0.01);
    assert_eq!(once(&["--raw-transfer-test"])["settings"]["raw"], true);
    assert_eq!(once(&["--channel-allocation", "paired"])["settings"]["allocation"], "paired");
    assert_eq!(once(&["--starting-offset", "1MiB"])["settings"]["starting_offset"], 1 << 20);
    for channels in ["auto", "0", "1", "0,1,0,1", "0,0,1,auto"] {
        assert!(!figures(&once(&["--mm-channel", channels])).is_empty());
    }
    assert!(
        once(&["-d", &format!("{SMALL},ring=16")])["notes"][0]
            .as_str()
            .unwrap()
            .contains("one thread for the card, helped by those that poll, rings of 16")
    );
    let sweep = once(&["--buffer-size", "4KiB,16KiB,64KiB"]);
    let sizes: Vec<u64> = figures(&sweep).iter().map(|f| f["buffer_bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [4096, 16384, 65536]);
    let both = json(&["--direction", "read", "--placement", "ddr", "--pages", "4k,2m"]);
    let skipped = both["skipped"].as_array().unwrap().len();
    assert_eq!(figures(&both).len() + skipped, 2, "figures on both kinds of pages, or why not: {both}");
}

#[test]
fn options_of_v80_smi_mean_the_same() {
    let with = |args: &[&str]| json(&[args, &["--pages", "4k", "--placement", "ddr"]].concat());
    let placed = with(&["--offset", "512KiB", "--starting-offset", "4KiB", "--mm-channel", "0,1,0,1"]);
    let settings = &placed["settings"];
    assert_eq!((&settings["offset"], &settings["starting_offset"]), (&(512 << 10).into(), &4096.into()));
    assert_eq!(settings["channels"], serde_json::json!([0, 1, 0, 1]));
    // Reading has a buffer a thread, both at once two: N threads and 2 N.
    let buffers = |way: usize, rate: &str| figures(&placed)[way][rate]["buffers"].clone();
    assert_eq!((buffers(0, "read"), buffers(2, "read"), buffers(2, "write")), (4.into(), 4.into(), 4.into()));
    assert_eq!((&placed["integrity"][0]["ok"], &placed["integrity"][0]["threads"]), (&4.into(), &4.into()));
    let paired = with(&["--channel-allocation", "paired", "--channel-region-stride", "1MiB", "--raw-transfer-test"]);
    assert_eq!(paired["settings"]["channel_region_stride"], 1 << 20);
}

#[test]
fn a_v80_takes_the_options_of_its_own_tool() {
    let words = ["--placement", "ddr", "--raw-transfer-test", "--mm-channel", "0,1,0,1", "-j", "2"];
    let on = |device: &str, words: &[&str]| run(&[&["-d", device, "--buffer-size", "4KiB"], words].concat());
    if !PathBuf::from("/dev/slash_qdma_ctl99").exists() {
        // Everything is understood; only the card is missing.
        let output = on("slash:99,ring=11", &words);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("cannot open slash:99,ring=11"), "{said}");
    }
}

#[test]
fn lines_have_at_most_100_columns() {
    let table = ok(&["--pages", "4k", "--placement", "ddr"]);
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
}

#[test]
fn a_report_over_sizes() {
    let page = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("validate.html");
    let _ = std::fs::remove_file(&page);
    let report = json(&["--pages", "4k", "--buffer-size", "4KiB,8KiB,16KiB,32KiB", "--report", page.to_str().unwrap()]);
    assert_eq!(figures(&report).len(), 3 * 4 * 3);
    for figure in figures(&report) {
        let positive = |name: &str| figure[name].as_f64().is_some_and(|rate| rate > 0.0);
        assert!(positive("total_bytes_per_s") && positive("reference_bytes_per_s"), "{figure}");
        let is = |way: &str| figure["direction"] == way;
        assert_eq!((is("write"), is("read")), (figure["read"].is_null(), figure["write"].is_null()));
    }
    let html = std::fs::read_to_string(page).unwrap();
    assert_eq!(crate::timeline::unbalanced(&html), [""; 0]);
    assert_eq!(html.matches("class=\"ref\"").count(), 3 * 4 * 3, "a bar beside its reference for each figure");
    for there in ["HBM+DDR both, 8 KiB, 4 KiB pages", "2/2 OK", "default-src"] {
        assert!(html.contains(there), "{there}");
    }
    assert!(complains(&["--report", "/nowhere/x.html"], 1).contains("cannot write /nowhere/x.html"));
}

#[test]
fn a_file_that_holds_data_is_measured_when_asked_for() {
    let (file, device) = file(1 << 20);
    let before: Vec<u8> = (0..1u32 << 20).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(file.path(), &before).unwrap();
    let said = complains(&["-d", &device], 1);
    assert!(said.contains("holds data") && said.contains("hint: --overwrite measures it all the same"), "{said}");
    assert!(std::fs::read(file.path()).unwrap() == before);
    let plain = json(&["-d", &device, "--overwrite"]);
    assert_eq!(plain["notes"][0], "by buffered I/O, pread and pwrite on threads");
    assert!(figures(&plain).iter().all(|f| f["memory"] == "device" && f["reference_bytes_per_s"].as_f64() > Some(0.0)));
    assert!(ok(&["-d", &device, "--overwrite", "--direction", "read", "-v"]).contains("pread and pwrite on threads"));
    let both = format!("{device},c2h={}", file.path().display());
    assert!(!figures(&json(&["-d", &both, "--overwrite", "--direction", "read"])).is_empty());
    // What is beyond the buffers stays.
    assert!(std::fs::read(file.path()).unwrap()[1 << 19..] == before[1 << 19..]);
}

#[test]
fn a_signal_ends_a_measurement_and_its_results_are_printed() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (file, device) = file(1 << 20);
        let before: Vec<u8> = (0..1u32 << 20).map(|i| (i ^ i >> 8) as u8).collect();
        std::fs::write(file.path(), &before).unwrap();
        let page = file.path().with_extension("html");
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.args([
            "validate",
            "-d",
            &device,
            "--overwrite",
            "-j",
            "2",
            "--buffer-size",
            "64KiB",
            "--direction",
            "read",
            "--duration",
            "600",
        ]);
        command.args(["--pages", "4k", "--report", page.to_str().unwrap()]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        // Into the measurement, where nothing else would end it.
        let begun = std::time::Instant::now();
        while std::fs::read(file.path()).unwrap() == before {
            assert!(begun.elapsed().as_secs() < 60, "it does not begin");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert!(std::fs::read(file.path()).unwrap() != before, "it writes");
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "dmalane: interrupted\n");
        assert!(text(&output.stdout).contains("Incomplete\n"), "{}", text(&output.stdout));
        let html = std::fs::read_to_string(page).unwrap();
        assert!(html.contains("<h1>Incomplete</h1>") && html.contains("2/2 OK"), "{html}");
    }
}

#[test]
fn a_device_in_use_is_left_alone() {
    use rustix::fs::{FlockOperation, flock};
    let (file, device) = file(1 << 20);
    // As another process that has the device open.
    let other = file.reopen().unwrap();
    flock(&other, FlockOperation::LockExclusive).unwrap();
    for words in
        [&["load", "--sample", "4KiB", "-d", &device, "--overwrite"][..], &["validate", "-d", &device, "--overwrite"]]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_dmalane")).args(words).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("in use as a device: another"), "{words:?}: {said}");
        assert!(std::fs::read(file.path()).unwrap().iter().all(|byte| *byte == 0), "{words:?}");
    }
}

#[test]
fn a_character_device_needs_to_be_asked_for() {
    for consent in [&["--starting-offset", "0"][..], &["--overwrite"]] {
        let all = quick(&[&["-d", "file:/dev/zero"], consent].concat());
        let output = run(&all.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(text(&output.stderr).contains("integrity check failed"), "{}", text(&output.stderr));
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn a_bad_command_line_is_explained() {
    let (_file, file) = file(1 << 20);
    for (args, why) in [
        (&["-j", "0"][..], "threads: 0 is not from 1 to 64"),
        (&["-j", "18446744073709551615"], "threads: 18446744073709551615 is not from 1 to 64"),
        (&["--buffer-size", "5000"], "not a multiple of 4 KiB"),
        (&["--buffer-size", "0"], "not from 4 KiB to 1 GiB"),
        (&["--buffer-size", "2GiB"], "not from 4 KiB to 1 GiB"),
        (&["--offset", "1"], "offset: 1 is not a multiple of 4 KiB"),
        (&["--offset", "32KiB"], "less than a buffer, so buffers would overlap"),
        (&["--starting-offset", "1"], "not a multiple of 4 KiB"),
        (&["--channel-allocation", "paired", "--channel-region-stride", "0"], "not a multiple of 4 KiB above 0"),
        (&["-d", "slash:0,ring=16"], "not a number from 0 to 15"),
        (&["--channel-region-stride", "1MiB"], "--channel-region-stride needs --channel-allocation paired"),
        (&["--buffer-size", "4KiB,6KiB"], "not a multiple of 4 KiB"),
        (&["--buffer-size", "4KiB,"], "not a size"),
        (&["--mm-channel", "both"], "neither `auto` nor a channel"),
        (&["--channel-allocation", "random"], "possible values: auto, paired"),
        (&["--iterations", "0"], "iterations: 0 is less than 1"),
        (&["--duration", "0"], "not a number of seconds from 0.000001"),
        (&["--duration", "-1"], "not a number of seconds from 0.000001"),
        (&["--iterations", "1", "--duration", "1"], "cannot be used with"),
        (&["--placement", "device"], "possible values: hbm, ddr, hbm+ddr"),
        (&["--direction", "sideways"], "possible values: read, write, both"),
        (&["-d", "gpu0"], "ram:SIZE"),
        (&["-d", "file:"], "a path is missing"),
        (&["-d", "file:x,c2h="], "a value is missing"),
        (&["-d", "file:x,ring=16"], "which soft and daemon and vfio and vfio-user and slash and vrtd have"),
        (&["-d", "file:x", "--placement", "hbm"], "--placement is for a card"),
        (&["-d", "file:x", "--raw-transfer-test"], "--raw-transfer-test is for a card"),
        (&["-d", "file:x", "--channel-allocation", "paired"], "--channel-allocation is for a card"),
        (&["--overwrite"], "--overwrite is for file and qdma, not for soft"),
        (&["--report", "-"], "stdout is for the report"),
        (&["-d", "soft,ring=3"], "not a power of two from 2 to 65536"),
        (&["-d", "soft,ring=-1"], "not a power of two from 2 to 65536"),
        (&["-d", "soft,ring=many"], "not a power of two from 2 to 65536"),
        (&["--mm-channel", "2"], "no channel 2"),
        (&["--mm-channel", "0,1"], "2 channels for 4 buffer positions"),
        (&["--mm-channel", "0,1,0,2"], "no channel 2"),
        (&["-d", &file, "--mm-channel", "1"], "no channel 1, it has 1"),
    ] {
        let said = complains(args, 2);
        assert!(said.contains(why), "{args:?}: {said}");
    }
}

#[test]
fn what_cannot_be_measured_is_explained_with_a_way_out() {
    let (small, device) = file(100_000);
    let folder = format!("file:{}", env!("CARGO_TARGET_TMPDIR"));
    let missing = format!("file:{}/missing", env!("CARGO_TARGET_TMPDIR"));
    let hint = "hint: there are 4 buffers";
    for (args, why, way_out) in [
        (
            &["--buffer-size", "4MiB", "--placement", "ddr"][..],
            "DDR has 8 MiB",
            "--buffer-size 2MiB, fewer of them (-j, --iodepth), or a device with more memory",
        ),
        (&["--buffer-size", "4MiB", "--placement", "hbm"], "HBM has 8 MiB", hint),
        (&["--starting-offset", "8MiB", "--placement", "ddr"], "DDR has 8 MiB", "a smaller --starting-offset"),
        // More than a card can have.
        (&["--starting-offset", "1TiB", "--placement", "ddr"], "DDR has 8 MiB", "or a device with more memory"),
        (&["--offset", "4MiB", "--placement", "ddr"], "DDR has 8 MiB", "buffers lie at 4 positions"),
        (
            &["--channel-allocation", "paired", "--offset", "4MiB"],
            "the region of a channel has 4 MiB",
            "--channel-region-stride",
        ),
        (&["-d", &device], "has 96 KiB", "--buffer-size 24KiB, fewer of them (-j, --iodepth), or a device with more"),
        (&["-d", &missing], "No such file", "hint: `truncate -s 1GiB "),
        (&["-d", &folder], "is a directory, which has no addresses", ""),
        (&["-d", "file:/dev/zero"], "/dev/zero is a character device", "hint: name the first address that may"),
    ] {
        let said = complains(args, 1);
        assert!(said.contains(why) && said.contains(way_out), "{args:?}: {said}");
    }
    assert_eq!(small.as_file().metadata().unwrap().len(), 100_000);
    // A file that may not be written, where that stops us.
    let mut permissions = small.as_file().metadata().unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(small.path(), permissions).unwrap();
    match std::fs::File::options().write(true).open(small.path()) {
        Ok(_) => println!("SKIPPED: root may write to read-only files"),
        Err(_) => {
            let said = complains(&["-d", &device, "--buffer-size", "4KiB"], 1);
            assert!(said.contains("Permission denied") && said.contains("you need both permissions"), "{said}");
        }
    }
}

#[test]
fn the_short_help_fits_a_screen() {
    for (flag, most) in [("-h", 60), ("--help", 200)] {
        let help = run(&[flag]);
        let lines = text(&help.stdout).lines().count();
        assert!(lines <= most && text(&help.stdout).contains("Examples:"), "{flag}: {lines} lines");
    }
    assert!(text(&run(&["-h"]).stdout).contains("(see more with '--help')"));
}
