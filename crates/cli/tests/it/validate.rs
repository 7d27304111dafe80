//! `dmalane validate` as its users meet it.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

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
        let replaced =
            pair[0] == "--buffer-size" && given("--sweep") || pair[0] == "--iterations" && given("--duration");
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
    assert_eq!((&value["schema"], &value["command"], &value["passed"]), (&4.into(), &"validate".into(), &true.into()));
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
        assert!(table.contains(&format!("integrity  {memory}")), "{table}");
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
    assert!(table.contains("2 channels, the card works in the threads that poll"), "-v: {table}");
    assert!(!ok(&["--pages", "4k"]).contains("the threads that poll"));
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
    let once = |args: &[&str]| with(&[args, &["--read", "--ddr-only"]].concat());
    assert_eq!(of(&with(&[]), "memory"), ["DDR", "HBM", "HBM+DDR"]);
    assert_eq!(of(&with(&["--ddr-only"]), "memory"), ["DDR"]);
    assert_eq!(of(&with(&["--hbm-only"]), "memory"), ["HBM"]);
    for (args, ways) in [
        (&["--read"][..], &["read"][..]),
        (&["--write"], &["write"]),
        (&["--bidirectional"], &["both"]),
        (&["--read", "--write"], &["read", "write"]),
    ] {
        assert_eq!(of(&with(&[args, &["--ddr-only"]].concat()), "direction"), ways);
    }
    let one = once(&["-j", "1", "--iterations", "7"]);
    assert_eq!((&one["settings"]["threads"], &figures(&one)[0]["read"]["buffers"]), (&1.into(), &7.into()));
    assert_eq!(one["settings"]["iterations"], 7);
    let timed = once(&["--duration", "0.01"]);
    assert_eq!(timed["settings"]["duration_s"], 0.01);
    assert_eq!(once(&["--unregistered"])["settings"]["registered"], false);
    assert_eq!(once(&["--registered"])["settings"]["registered"], true);
    assert_eq!(once(&["--raw-transfer-test"])["settings"]["raw"], true);
    assert_eq!(once(&["--channel-allocation", "paired"])["settings"]["allocation"], "paired");
    assert_eq!(once(&["--starting-offset", "1MiB"])["settings"]["starting_offset"], 1 << 20);
    for channels in ["auto", "0", "1", "0,1,0,1", "0,0,1,auto"] {
        assert!(!figures(&once(&["--mm-channel", channels])).is_empty());
    }
    assert!(
        once(&["-d", &format!("{SMALL},ring=16,workers=each")])["notes"][0]
            .as_str()
            .unwrap()
            .contains("a thread for each channel of the card, rings of 16")
    );
    let sweep = once(&["--sweep", "4KiB,64KiB,MUL4"]);
    let sizes: Vec<u64> = figures(&sweep).iter().map(|f| f["buffer_bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [4096, 16384, 65536]);
    let both = json(&["--read", "--ddr-only", "--pages", "4k,2m"]);
    let skipped = both["skipped"].as_array().unwrap().len();
    assert_eq!(figures(&both).len() + skipped, 2, "figures on both kinds of pages, or why not: {both}");
}

#[test]
fn options_of_v80_smi_mean_the_same() {
    let with = |args: &[&str]| json(&[args, &["--pages", "4k", "--ddr-only"]].concat());
    let placed = with(&["--offset", "512KiB", "--starting-offset", "4KiB", "--mm-channel", "0,1,0,1", "-R"]);
    let settings = &placed["settings"];
    assert_eq!((&settings["offset"], &settings["starting_offset"]), (&(512 << 10).into(), &4096.into()));
    assert_eq!(settings["channels"], serde_json::json!([0, 1, 0, 1]));
    assert!(placed["no_effect"][0].as_str().unwrap().contains("no device is ever reset"), "{placed}");
    // Reading has a buffer a thread, both at once two: N threads and 2 N.
    let buffers = |way: usize, rate: &str| figures(&placed)[way][rate]["buffers"].clone();
    assert_eq!((buffers(0, "read"), buffers(2, "read"), buffers(2, "write")), (4.into(), 4.into(), 4.into()));
    assert_eq!((&placed["integrity"][0]["ok"], &placed["integrity"][0]["threads"]), (&4.into(), &4.into()));
    let paired = with(&["--channel-allocation", "paired", "--channel-region-stride", "1MiB", "--raw-transfer-test"]);
    assert_eq!(paired["settings"]["channel_region_stride"], 1 << 20);
    let ignored = with(&["--channel-region-stride", "1MiB"]);
    assert!(ignored["no_effect"][0].as_str().unwrap().contains("only --channel-allocation paired"), "{ignored}");
    // --bandwidth-duration goes before --bandwidth-iterations, unless it is 0.
    let stops = |args: &[&str]| {
        let all: Vec<_> = ["-j", "1", "--buffer-size", "4KiB", "--read", "--ddr-only", "--pages", "4k", "--json"]
            .into_iter()
            .chain(args.iter().copied())
            .collect();
        let output = run(&all);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        (value["settings"]["iterations"].as_u64(), value["settings"]["duration_s"].as_f64())
    };
    assert_eq!(stops(&["--bandwidth-iterations", "3"]), (Some(3), None));
    assert_eq!(stops(&["--bandwidth-duration", "0"]), (Some(1), None));
    assert_eq!(stops(&["--bandwidth-duration", "0", "--bandwidth-iterations", "2"]), (Some(2), None));
    assert_eq!(stops(&["--bandwidth-duration", "0.01", "--bandwidth-iterations", "2"]), (None, Some(0.01)));
    assert_eq!(stops(&["--duration", "0.01"]), (None, Some(0.01)));
}

#[test]
fn a_v80_takes_the_options_of_its_own_tool() {
    let words = ["--ddr-only", "--raw-transfer-test", "--mm-channel", "0,1,0,1", "-j", "2"];
    let on = |device: &str, words: &[&str]| run(&[&["-d", device, "--buffer-size", "4KiB"], words].concat());
    if !PathBuf::from("/dev/slash_qdma_ctl99").exists() {
        // Everything is understood; only the card is missing.
        let output = on("slash:99,ring=11", &words);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("cannot open slash:99,ring=11"), "{said}");
    }
}

#[test]
fn both_units_are_printed_and_named() {
    let table = ok(&["--pages", "4k", "--ddr-only", "--mb"]);
    let (_, units) = table.split_once("MB/s of 2^20 bytes (v80-smi), then MB/s of 10^6 bytes").expect(&table);
    let line = units.lines().find(|line| line.starts_with("DDR") && line.contains(" both ")).unwrap();
    let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [_buffer, read, write, total, read_6, write_6, total_6] = numbers[..] else { panic!("{line}") };
    for (binary, decimal) in [(read, read_6), (write, write_6), (total, total_6)] {
        assert!((decimal / binary / 1.048_576 - 1.0).abs() < 1e-3, "{line}");
    }
    assert!((read + write - total).abs() < 0.02, "{line}");
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    let one = json(&["--pages", "4k", "--ddr-only", "--read"]);
    let rate = &figures(&one)[0]["read"];
    let of = |unit: &str| rate[unit].as_f64().unwrap();
    assert!((of("mib_per_s") * 1_048_576.0 / of("bytes_per_s") - 1.0).abs() < 1e-4, "{rate}");
    assert!((of("mb_per_s") * 1e6 / of("bytes_per_s") - 1.0).abs() < 1e-4, "{rate}");
}

#[test]
fn a_repeated_measurement_has_a_median_and_a_spread() {
    let words = ["--pages", "4k", "--repeat", "3", "--read", "--ddr-only"];
    let figure = json(&words)["figures"][0].clone();
    let [least, median, greatest] =
        ["least", "total", "greatest"].map(|name| figure[format!("{name}_bytes_per_s")].as_f64().unwrap());
    assert!(least <= median && median <= greatest && least < greatest, "{figure}");
    let table = ok(&words);
    assert!(table.contains(" spread ") && table.contains(".."), "{table}");
    assert!(!ok(&["--pages", "4k", "--read", "--ddr-only"]).contains("spread"));
}

#[test]
fn csv_and_plot() {
    let plot = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("validate.svg");
    let _ = std::fs::remove_file(&plot);
    let csv = ok(&["--csv", "--pages", "4k", "--sweep", "4KiB,32KiB,MUL", "--plot", plot.to_str().unwrap()]);
    let mut lines = csv.lines();
    let head: Vec<&str> = lines.next().unwrap().split(',').collect();
    assert_eq!(head[..5], ["memory", "buffer_bytes", "pages", "direction", "read_bytes_per_s"]);
    let rows: Vec<Vec<&str>> = lines.map(|l| l.split(',').collect()).collect();
    assert_eq!(rows.len(), 3 * 4 * 3);
    for row in rows {
        assert_eq!(row.len(), head.len());
        let total: f64 = row[6].parse().unwrap();
        assert!(total > 0.0 && row[9].parse::<f64>().unwrap() > 0.0, "{row:?}");
        assert_eq!((row[3] == "write", row[3] == "read"), (row[4].is_empty(), row[5].is_empty()));
    }
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("HBM+DDR both, 4KiB pages") && svg.contains("GB/s"));
    assert!(complains(&["--plot", "/nowhere/x.svg"], 1).contains("cannot write /nowhere/x.svg"));
}

#[test]
fn a_file_is_measured_and_left_as_it_was() {
    let (file, device) = file(1 << 20);
    let before: Vec<u8> = (0..1u32 << 20).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(file.path(), &before).unwrap();
    let said = complains(&["-d", &device], 1);
    assert!(said.contains("holds data") && said.contains("--restore backs the data up"), "{said}");
    let plain = json(&["-d", &device, "--restore"]);
    assert!(plain["notes"][0].as_str().unwrap().contains("was not tried"), "{plain}");
    assert!(figures(&plain).iter().all(|f| f["memory"] == "device" && f["reference_bytes_per_s"].as_f64() > Some(0.0)));
    let probed = json(&["-d", &format!("{device},probe-at=512KiB"), "--restore", "--read"]);
    let note = probed["notes"][0].as_str().unwrap();
    assert!(note.starts_with("by ") && !note.contains("probed"), "{note}");
    assert!(
        ok(&["-d", &device, "--restore", "--read", "-v"])
            .contains("pread and pwrite on threads (io_uring was not tried")
    );
    let both = format!("{device},c2h={}", file.path().display());
    assert!(!figures(&json(&["-d", &both, "--restore", "--read"])).is_empty());
    assert!(std::fs::read(file.path()).unwrap() == before);
}

#[test]
fn a_file_is_not_written_to_choose_a_backend() {
    let (file, device) = file(1 << 20);
    std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
    let path = file.path().display().to_string();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-e", "trace=pwrite64,io_uring_enter", "-P", &path, env!("CARGO_BIN_EXE_dmalane"), "validate"]);
    let probed = format!("{device},probe-at=256KiB");
    let args = ["-d", &probed, "-j", "1", "--buffer-size", "64KiB"];
    let Ok(output) = strace.args(args).output() else {
        return println!("SKIPPED: no strace");
    };
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("holds data"), "{said}");
    assert!(!said.contains("pwrite64("), "{said}");
    assert!(std::fs::read(file.path()).unwrap() == vec![7; 1 << 20]);
}

#[test]
fn a_signal_leaves_a_file_as_it_was() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (file, device) = file(1 << 20);
        let before: Vec<u8> = (0..1u32 << 20).map(|i| (i ^ i >> 8) as u8).collect();
        std::fs::write(file.path(), &before).unwrap();
        let (plot, runtime) = (file.path().with_extension("svg"), crate::top::folder());
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.env("XDG_RUNTIME_DIR", runtime.path());
        command.args([
            "validate",
            "-d",
            &device,
            "--restore",
            "-j",
            "2",
            "--buffer-size",
            "64KiB",
            "--read",
            "--duration",
            "600",
        ]);
        command.args(["--pages", "4k", "--plot", plot.to_str().unwrap()]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        // Into the measurement, where nothing else would end it.
        crate::top::jobs(runtime.path(), 1, |job| job["phase"].as_str().is_some_and(|at| at.ends_with(": reading")));
        assert!(std::fs::read(file.path()).unwrap() != before, "it writes");
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "dmalane: interrupted\n");
        assert!(text(&output.stdout).contains("2/2 OK\nincomplete"), "{}", text(&output.stdout));
        assert!(std::fs::read(file.path()).unwrap() == before);
        assert!(!plot.exists(), "no empty picture");
    }
}

#[test]
fn a_killed_run_loses_nothing() {
    let (file, device) = file(1 << 20);
    let before: Vec<u8> = (0..1u32 << 20).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(file.path(), &before).unwrap();
    let backup = file.path().with_file_name(format!(".{}.dmalane-backup", file.path().file_name().unwrap().display()));
    let args = ["-d", &device, "--restore", "-j", "2", "--buffer-size", "64KiB", "--read", "--pages", "4k"];
    let validate = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.arg("validate").args(args).args(["--iterations", "3"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let start = Instant::now();
    assert!(validate().wait().unwrap().success());
    let (mut whole, mut left, mut state) = (start.elapsed(), 0, 42u64);
    let kills = crate::kills();
    for kill in 0..kills {
        let mut child = validate();
        // Knuth's MMIX generator: moments of a whole run, before, in and after the backup, the writes, the restoring.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = whole.mul_f64((state >> 33) as f64 / f64::from(1u32 << 31));
        std::thread::sleep(moment);
        // On a machine that becomes busy or idle, runs take longer or shorter than the first one.
        whole = if child.try_wait().unwrap().is_some() { whole.min(moment) } else { whole.mul_f64(1.05) };
        child.kill().unwrap();
        child.wait().unwrap();
        let was_left = backup.exists();
        left += usize::from(was_left);
        let next = || run(&["-d", &device, "-j", "1", "--buffer-size", "4KiB", "--iterations", "1"]).stderr;
        // Half of them find a file that somebody has written since, as by `cp new card.img`.
        if was_left && kill % 2 == 1 {
            let new: Vec<u8> = before.iter().map(|byte| byte ^ 1).collect();
            std::fs::write(file.path(), &new).unwrap();
            let said = next();
            let said = text(&said);
            assert!(said.contains("the device was written since") && said.contains("--recover"), "{said}");
            assert!(std::fs::read(file.path()).unwrap() == new && backup.exists(), "after kill {kill}");
            let said = run(&["-d", &device, "--recover"]);
            assert!(text(&said.stdout).starts_with("Restored bytes 0..262144 of file:"), "{}", text(&said.stdout));
            assert!(said.status.success() && backup_holds(&said.stdout, &new), "{}", text(&said.stdout));
            // The rest was not backed up, and is as it was written.
            let now = std::fs::read(file.path()).unwrap();
            assert!(now[..1 << 18] == before[..1 << 18] && now[1 << 18..] == new[1 << 18..], "after kill {kill}");
            std::fs::write(file.path(), &before).unwrap();
        } else {
            // Whatever is asked for, a backup is restored first; without --restore nothing is overwritten after that.
            let said = next();
            let said = text(&said);
            assert_eq!(said.contains("restored the data of an earlier run"), was_left, "{said}");
            assert!(said.contains("holds data"), "{said}");
        }
        assert!(std::fs::read(file.path()).unwrap() == before && !backup.exists(), "after kill {kill}");
    }
    println!("{left} of {kills} runs were killed with a backup on the disk");
    assert!(left > 0, "no run was killed in the middle");
}

/// Whether the backup that this output names holds these bytes, and removes it.
fn backup_holds(said: &[u8], bytes: &[u8]) -> bool {
    let path = text(said).split(" are in ").nth(1).and_then(|rest| rest.lines().next()).unwrap();
    let holds = std::fs::read(path).unwrap();
    std::fs::remove_file(path).unwrap();
    holds.windows(512).any(|window| window == &bytes[..512])
}

#[test]
fn a_backup_of_a_disk_is_not_restored_onto_another() {
    let folder = tempfile::tempdir().unwrap();
    let losetup = |args: &[&str]| Command::new("losetup").args(args).current_dir(folder.path()).output();
    let disk = |name: &str| match losetup(&["--find", "--show", name]) {
        Ok(output) if output.status.success() => Some(text(&output.stdout).trim().to_owned()),
        _ => None,
    };
    let images = ["one", "other"].map(|name| (folder.path().join(name), vec![name.len() as u8; 1 << 20]));
    images.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let Some(first) = disk("one") else { return println!("SKIPPED: no loop devices") };
    let device = format!("file:{first}");
    let args = ["validate", "-d", &device, "--restore", "-j", "1", "--buffer-size", "64KiB", "--duration", "600"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    let mut child = child.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while std::fs::read(&first).unwrap() == images[0].1 && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let detached = losetup(&["--detach", &first]).unwrap();
    assert!(detached.status.success(), "{}", text(&detached.stderr));
    // Most often it gets the same number.
    let second = disk("other").unwrap();
    let said = run(&["-d", &format!("file:{second}"), "-j", "1", "--buffer-size", "4KiB", "--iterations", "1"]);
    let (bytes, said) = (std::fs::read(&second).unwrap(), text(&said.stderr).to_owned());
    let recovered = run(&["-d", &format!("file:{second}"), "--recover"]);
    let restored = std::fs::read(&second).unwrap();
    losetup(&["--detach", &second]).unwrap();
    assert!(bytes == images[1].1, "{said}");
    if second == first {
        assert!(said.contains("it is of another file or disk"), "{said}");
        assert!(restored[..1 << 17] == images[0].1[..1 << 17] && backup_holds(&recovered.stdout, &images[1].1));
        // The only copy, if that was the wrong disk.
        let recovered = text(&recovered.stdout);
        let backup = recovered.split(" from ").nth(1).and_then(|rest| rest.lines().next()).unwrap();
        assert!(recovered.contains("was kept, because"), "{recovered}");
        std::fs::remove_file(backup).unwrap();
    }
}

#[test]
fn a_file_whose_backup_would_be_another_users_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let card = folder.path().join("card");
    std::fs::write(&card, vec![7; 1 << 20]).unwrap();
    // As on a file system that is mounted for one user, and used by another.
    let mut strace = crate::injecting("geteuid:retval=61000");
    strace.args(["validate", "-d", &format!("file:{}", card.display()), "--restore"]);
    let Ok(output) = strace.args(["-j", "1", "--buffer-size", "64KiB", "--iterations", "1"]).output() else {
        return println!("SKIPPED: no strace");
    };
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("new files are another user's"), "{said}");
    assert!(std::fs::read(&card).unwrap() == vec![7; 1 << 20]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
}

#[test]
fn a_folder_that_cannot_be_synchronised_keeps_no_backup() {
    let folder = tempfile::tempdir().unwrap();
    let card = folder.path().join("card");
    std::fs::write(&card, vec![7; 1 << 20]).unwrap();
    // The backup, its folder, the restored file, the folder.
    for (injected, status) in [("EINVAL:when=2", 0), ("EIO:when=2", 1), ("EIO:when=4", 0), ("EIO:when=3", 1)] {
        let mut strace = crate::injecting(&format!("fsync:error={injected}"));
        strace.args(["validate", "-d", &format!("file:{}", card.display()), "--restore"]);
        let Ok(output) = strace.args(["-j", "1", "--buffer-size", "64KiB", "--iterations", "1"]).output() else {
            return println!("SKIPPED: no strace");
        };
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{injected}: {said}");
        assert!(std::fs::read(&card).unwrap() == vec![7; 1 << 20], "{injected}");
        let names = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, if injected == "EIO:when=3" { 2 } else { 1 }, "{injected}: {said}");
    }
}

#[test]
fn an_error_of_the_device_is_not_said_to_be_one_of_the_backup() {
    let (file, device) = file(1 << 20);
    std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
    let path = file.path().display().to_string();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-o", "/dev/null", "-P", &path, "-e", "inject=pread64:error=EIO"]);
    strace.args([env!("CARGO_BIN_EXE_dmalane"), "validate", "-d", &device, "--restore"]);
    let Ok(output) = strace.args(["-j", "1", "--buffer-size", "64KiB"]).envs(crate::WIDE).output() else {
        return println!("SKIPPED: no strace");
    };
    let said = text(&output.stderr);
    assert!(said.contains("nothing was written: the device cannot be read at byte 0: Input/output"), "{said}");
}

#[test]
fn a_file_without_a_place_for_a_backup_is_not_written() {
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    let data = vec![7; 1 << 20];
    let args = ["--restore", "-j", "1", "--buffer-size", "64KiB", "--iterations", "1"];
    // Inherited by the command.
    let memory = std::fs::File::from(memfd_create("memory", MemfdFlags::empty()).unwrap());
    memory.write_all_at(&data, 0).unwrap();
    let output = run(&[&["-d", &format!("file:/proc/self/fd/{}", memory.as_raw_fd())], &args[..]].concat());
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("the file has no name beside which"), "{said}");
    let mut now = vec![0; 1 << 20];
    memory.read_exact_at(&mut now, 0).unwrap();
    assert!(now == data && !std::path::Path::new("/.memfd:memory (deleted).dmalane-backup").exists());

    let folder = tempfile::tempdir().unwrap();
    let (card, apart) = (folder.path().join("card"), folder.path().join("apart"));
    std::fs::write(&card, &data).unwrap();
    std::fs::create_dir(&apart).unwrap();
    std::fs::write(apart.join("card"), b"").unwrap();
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", "mount --bind card apart/card || exit 77; exec \"$@\"", "sh"]);
    command.args([env!("CARGO_BIN_EXE_dmalane"), "validate", "-d", "file:apart/card"]).args(args);
    match command.current_dir(folder.path()).envs(crate::WIDE).output() {
        Ok(output) if output.status.code() != Some(77) && !text(&output.stderr).starts_with("unshare") => {
            let said = text(&output.stderr);
            assert!(output.status.code() == Some(1) && said.contains("mounted apart from its folder"), "{said}");
            assert!(std::fs::read(&card).unwrap() == data && std::fs::read_dir(&apart).unwrap().count() == 1);
        }
        _ => println!("SKIPPED: no mount namespace"),
    }
}

#[test]
fn a_device_with_a_backup_is_left_alone() {
    let folder = tempfile::Builder::new().prefix("with space").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, backup) = (folder.path().join("card"), folder.path().join(".card.dmalane-backup"));
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let device = format!("file:{}", path.display());
    std::fs::write(&backup, b"not a backup").unwrap();
    for words in [
        &["load", "--sample", "4KiB", "-d", &device, "--overwrite"][..],
        &["read", "/proc/self/exe", "-d", &device, "--overwrite"],
        &["validate", "-d", &device, "--overwrite"],
        &["validate", "-d", &device, "--restore"],
        &["validate", "-d", &device, "--recover"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_dmalane")).args(words).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("cause: the backup was made on 20"), "{said}");
        // It cannot be restored, whichever command says so.
        assert!(said.contains("it is damaged") && !said.contains("--recover\n"), "{words:?}: {said}");
        assert!(said.contains(&format!("rm '{}'", backup.display())), "{said}");
        assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0), "{words:?}");
        assert_eq!(std::fs::read(&backup).unwrap(), b"not a backup");
    }
    // It can be read, with a warning.
    let name = path.to_str().unwrap();
    let warned = format!("dmalane: warning: {name} holds test data of a `dmalane validate --restore` that did not end");
    let warned = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_dmalane")).args(words).envs(crate::WIDE).output().unwrap();
        let said = text(&output.stderr).to_owned();
        // `inspect` needs Linux 6.5.
        assert!(output.status.success() || words[0] == "inspect", "{said}");
        said.contains(&warned) && said.contains(&format!("validate -d '{device}' --recover\n"))
    };
    for words in [&["load", name][..], &["read", name], &["inspect", name], &["manifest", name]] {
        assert!(warned(words), "{words:?}");
    }
    std::fs::remove_file(&backup).unwrap();
    assert!(!warned(&["read", name]));
    let output = run(&["-d", &device, "--recover"]);
    assert!(output.status.code() == Some(1), "there is none: {}", text(&output.stderr));
}

#[test]
fn a_device_in_use_is_left_alone() {
    use rustix::fs::{FlockOperation, flock};
    let (file, device) = file(1 << 20);
    // As another process that has the device open.
    let other = file.reopen().unwrap();
    flock(&other, FlockOperation::LockExclusive).unwrap();
    for words in [
        &["load", "--sample", "4KiB", "-d", &device, "--overwrite"][..],
        &["read", "/proc/self/exe", "-d", &device, "--overwrite"],
        &["validate", "-d", &device, "--overwrite"],
        &["validate", "-d", &device, "--restore"],
        &["validate", "-d", &device, "--recover"],
    ] {
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
fn limits_are_named() {
    let found = json(&["--emulate", "half-egress-14", "--fit", "--read", "--ddr-only", "--pages", "4k"]);
    assert_eq!(found["fit"]["points"].as_array().unwrap().len(), 36);
    let answers = found["fit"]["answers"].as_array().unwrap();
    let questions: Vec<&str> = answers.iter().map(|a| a["question"].as_str().unwrap()).collect();
    // The answers are tested where a busy machine may have another try.
    assert_eq!(questions, ["duplex_halves", "together_capped", "hbm_reads_slow"]);
    assert!(found["reference"].as_str().unwrap().contains("optimum"));
    assert!(found["notes"][1].as_str().unwrap().contains("divided by 50"));
}

#[test]
fn a_bad_command_line_is_explained() {
    let (_file, file) = file(1 << 20);
    for (args, why) in [
        (&["-j", "0"][..], "not a whole number from 1 to 64"),
        (&["-j", "65"], "not a whole number from 1 to 64"),
        (&["--buffer-size", "5000"], "not a multiple of 4KiB"),
        (&["--buffer-size", "0"], "not from 4KiB to 1GiB"),
        (&["--buffer-size", "2GiB"], "not from 4KiB to 1GiB"),
        (&["--offset", "1"], "not a multiple of 4KiB"),
        (&["--offset", "32KiB"], "less than a buffer, so buffers would overlap"),
        (&["--starting-offset", "1"], "not a multiple of 4KiB"),
        (&["--channel-allocation", "paired", "--channel-region-stride", "0"], "not a multiple of 4 KiB above 0"),
        (&["-d", "slash:0,ring=16"], "not a number from 0 to 15"),
        (&["--bandwidth-iterations", "1", "--duration", "1"], "cannot be used with"),
        (&["--bandwidth-duration", "-1"], "not a number of seconds above 0"),
        (&["--sweep", "4KiB,64KiB,MUL1"], "never ends"),
        (&["--sweep", "4KiB,64KiB,ADD0"], "never ends"),
        (&["--sweep", "0,64KiB,MUL"], "never ends"),
        (&["--sweep", "64KiB,4KiB,MUL"], "ends before it begins"),
        (&["--sweep", "4KiB,64KiB"], "FIRST,LAST,MUL"),
        (&["--sweep", "4KiB,64KiB,TIMES"], "neither MUL"),
        (&["--sweep", "4KiB,1GiB,ADD"], "more than 1000 sizes"),
        (&["--sweep", "6KiB,64KiB,MUL"], "not a multiple of 4KiB"),
        (&["--sweep", "4KiB,64KiB,MUL", "--buffer-size", "4KiB"], "cannot be used with"),
        (&["--mm-channel", "both"], "neither `auto` nor a channel"),
        (&["--channel-allocation", "random"], "possible values: auto, paired"),
        (&["--iterations", "0"], "not a whole number of at least 1"),
        (&["--duration", "0"], "not a number of seconds above 0"),
        (&["--duration", "-1"], "not a number of seconds above 0"),
        (&["--iterations", "1", "--duration", "1"], "cannot be used with"),
        (&["--ddr-only", "--hbm-only"], "cannot be used with"),
        (&["--registered", "--unregistered"], "cannot be used with"),
        (&["--json", "--csv"], "cannot be used with"),
        (&["--emulate", "wire"], "the links are half-egress-14"),
        (&["-d", "gpu0"], "ram:SIZE"),
        (&["-d", "file:"], "a path is missing"),
        (&["-d", "file:x,c2h="], "a value is missing"),
        (&["-d", "file:x", "--fit"], "--fit is for a card"),
        (&["-d", "file:x,ring=16"], "which soft and daemon and vfio and vfio-user and slash and vrtd have"),
        (&["-d", "file:x", "--hbm-only"], "--hbm-only is for a card"),
        (&["-d", "file:x", "--raw-transfer-test"], "--raw-transfer-test is for a card"),
        (&["-d", "file:x", "--channel-allocation", "paired"], "--channel-allocation is for a card"),
        (&["--overwrite"], "--overwrite is for a file, not for soft"),
        (&["-d", "file:x,probe-at=1M"], "could mean"),
        (&["--plot", "-"], "stdout is for the report"),
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
    let hint = "hint: each thread needs two buffers";
    for (args, why, way_out) in [
        (
            &["--buffer-size", "4MiB", "--ddr-only"][..],
            "DDR has 8388608 bytes",
            "--buffer-size 2MiB, fewer threads (-j), or -d soft,ddr=16MiB,hbm=8MiB",
        ),
        (&["--buffer-size", "4MiB", "--hbm-only"], "HBM has 8388608 bytes", hint),
        (&["--starting-offset", "8MiB", "--ddr-only"], "DDR has 8388608 bytes", "a smaller --starting-offset"),
        // More than a card can have.
        (&["--starting-offset", "1TiB", "--ddr-only"], "DDR has 8388608 bytes", "or a device with more memory"),
        (&["--offset", "4MiB", "--ddr-only"], "DDR has 8388608 bytes", "buffers lie at 2 x 2 positions"),
        (
            &["--channel-allocation", "paired", "--offset", "4MiB"],
            "the region of a channel has 4194304",
            "--channel-region-stride",
        ),
        (&["-d", &device], "has 98304 bytes", "--buffer-size 24KiB, fewer threads (-j), or a file of 256KiB"),
        (&["-d", "file:/dev/zero,probe-at=0"], "cannot probe at 0x0", "hint: for example file:PATH,probe-at=1MiB"),
        (&["-d", "file:/dev/zero,probe-at=1MiB"], "does not keep what is written", "hint: name the file of each"),
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
