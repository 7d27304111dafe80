//! The built program as its users meet it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    command.args(args).current_dir(env!("CARGO_TARGET_TMPDIR")).envs(crate::WIDE);
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
    let commands = crate::examples::commands(stdout(&general));
    assert!(commands.len() > 10 && commands.contains(&"bar-map"), "{commands:?}");
    for name in commands {
        for flag in ["--help", "-h"] {
            let help = run(&[name, flag]);
            assert!(help.status.success() && help.stderr.is_empty());
            assert!(stdout(&help).contains(&format!("Examples:\n  dmalane {name}")), "{}", stdout(&help));
            let last = if flag == "-h" { "More with --help." } else { "Exit status: 0 " };
            assert!(name == "completions" || stdout(&help).contains(last), "{}", stdout(&help));
            assert!(stdout(&help).lines().all(|l| l.chars().count() <= 100), "wrapped");
            // A line that is too long for its line end leaves a word alone in the next one.
            let lines: Vec<_> = stdout(&help).lines().collect();
            let alone = |text: &&[&str]| !text[0].contains(' ') && !text[0].ends_with(':') && !text[0].is_empty();
            let broken = lines.windows(2).find(|text| alone(text) && !text[1].is_empty());
            assert_eq!(broken, None, "{name}");
            assert!(!stdout(&help).contains("[`"), "a link for rustdoc: {}", stdout(&help));
        }
    }
    assert!(stdout(&general).contains("Examples:\n  dmalane load --sample 1GiB --verify -v"));
    assert!(stdout(&general).contains("Exit status:\n  0  success\n  1  the job failed"));
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
        &["load", "a", "-d", "soft,fragmentation=-1"],
        &["doctor", "a", "b"],
        &["read"],
        &["read", "a", "--direct", "--buffered"],
        &["read", "a", "--heap", "stack"],
        &["read", "a", "--pages", "3m"],
        &["read", "a", "--chunk", "2GiB"],
        &["read", "a", "--range", "5..5"],
        &["inspect"],
        &["inspect", "a", "b"],
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
    ] {
        for option in ["--sample", "--chunk"] {
            let text = complains(&["load", option, size], 2);
            assert!(text.starts_with(&format!("dmalane: invalid value '{size}' for '{option} <SIZE>': ")), "{text}");
            assert!(text.contains(why), "{text}");
        }
        for option in ["ddr", "hbm"] {
            let text = complains(&["load", "-d", &format!("soft,{option}={size}")], 2);
            assert!(text.contains(&format!("the option {option}=SIZE of soft: ")) && text.contains(why), "{text}");
        }
    }
    for (option, size, why) in [
        ("--sample", "0", "a sample needs at least 4KiB"),
        ("--sample", "4095", "a sample needs at least 4KiB"),
        ("--chunk", "0", "not from 4KiB to 1GiB"),
        ("--chunk", "1", "not from 4KiB to 1GiB"),
        ("--chunk", "2GiB", "not from 4KiB to 1GiB"),
        ("-d", "soft,ddr=0", "at least 1 byte"),
        ("-d", "soft,ddr=257GiB", "a memory of the card has at most 256GiB"),
        ("-d", "soft,hbm=1EiB", "a memory of the card has at most 256GiB"),
    ] {
        let text = complains(&["load", option, size], 2);
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn doctor_reports_this_machine() {
    let report = json(&["doctor", "--json"]);
    assert_eq!((&report["schema"], &report["command"]), (&3.into(), &"doctor".into()));
    assert_eq!(report["can_load"], true);
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|c| c["name"].as_str().unwrap()).collect();
    for name in ["hugepages_2m", "memlock", "io_uring", "direct_io", "dma_heap", "udmabuf", "vfio", "iommu_groups"] {
        assert!(names.contains(&name), "{name}");
    }
    for check in checks {
        assert!(["ok", "missing", "note"].contains(&check["status"].as_str().unwrap()));
        let fixable = check["status"] == "missing" || check["status"] == "note" && check["real_devices"] == true;
        assert!(fixable || check["fix"].is_null(), "{check}");
        assert!(check["status"] != "missing" || check["fix"].is_string(), "{check}");
        assert!(check["why"].is_string() && check["found"].is_string() && check["needed"].is_boolean());
    }
    let text = run(&["doctor", env!("CARGO_MANIFEST_DIR")]);
    assert!(text.status.success());
    assert!(stdout(&text).contains(env!("CARGO_MANIFEST_DIR")));
}

#[test]
fn a_path_that_is_not_there_is_1() {
    let text = complains(&["load", &format!("{}/sr", env!("CARGO_MANIFEST_DIR"))], 1);
    assert!(text.ends_with("cause: No such file or directory (os error 2)\n"), "{text}");
    let text = complains(&["doctor", "/no/such/place"], 1);
    assert_eq!(text, "dmalane: cannot look at /no/such/place\ncause: No such file or directory (os error 2)\n");
    assert!(complains(&["doctor", "/dev/null"], 1).contains("\nhint: "));
}

#[test]
fn the_software_card_is_listed_first() {
    let listing = json(&["devices", "--json"]);
    assert_eq!((&listing["schema"], &listing["command"]), (&1.into(), &"devices".into()));
    let soft = &listing["devices"][0];
    assert_eq!((&soft["name"], &soft["kind"]), (&"soft".into(), &"soft".into()));
    assert_eq!((&soft["supported"], &soft["channels"]), (&true.into(), &"2".into()));
    assert_eq!(soft["memory"], "ddr 64 GiB, hbm 32 GiB (allocated as they fill)");
    assert!(stdout(&run(&["devices"])).starts_with("soft\n"));
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

/// A folder of its own for the files of a test, which is emptied first.
fn folder(name: &str) -> std::path::PathBuf {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    folder
}

#[test]
fn what_cannot_be_written_is_told_before_anything_is_loaded() {
    let folder = folder("cannot-write");
    std::fs::write(folder.join("a"), "a").unwrap();
    std::fs::write(folder.join("b"), "b").unwrap();
    let run = |args: &[&str], status| {
        let output = command(&[&["load"], args].concat()).current_dir(&folder).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(status), 0), "{}", stderr(&output));
        stderr(&output).to_owned()
    };
    // The file is not there either, which is not looked at.
    let text = run(&["missing", "--trace", "no/such/place"], 1);
    assert!(text.starts_with("dmalane: cannot write no/such/place\ncause: ") && !text.contains("missing"), "{text}");
    assert!(run(&["a", "--trace", "/dev/null"], 1).starts_with("dmalane: cannot write /dev/null\n"));
    let text = run(&["a", "--trace", "-"], 2);
    assert!(text.contains("\nhint: name a file, or ./- for a file of that name\n"), "{text}");
}

#[test]
fn a_sample_that_does_not_fit_is_not_written() {
    for (device, placement) in [("soft,ddr=2MiB", "ddr"), ("soft,hbm=4MiB", "hbm-half")] {
        let load = |device| ["load", "--sample", "3MiB", "-d", device, "--placement", placement];
        let text = complains(&load(device), 1);
        assert!(text.starts_with("dmalane: a sample of 3 MiB does not fit: "), "{text}");
        assert!(text.contains("\nhint: load less at a time, or onto a device with more memory;"), "{text}");
    }
    let disk = rustix::fs::statvfs(std::env::temp_dir()).unwrap();
    let gib = ((disk.f_bavail * disk.f_frsize) >> 30) + 2;
    if gib < 250 {
        let text = complains(&["load", "--sample", &format!("{gib}GiB"), "-d", "soft,ddr=256GiB"], 1);
        assert!(text.contains(&format!("a sample of {gib} GiB does not fit in ")), "{text}");
    }
}

#[test]
fn a_full_card_says_what_helps() {
    let folder = folder("full");
    for name in ["a", "b", "c"] {
        std::fs::File::create(folder.join(name)).unwrap().set_len(5 << 20).unwrap();
    }
    for (placement, option) in [("ddr", "ddr"), ("hbm-half", "hbm"), ("hbm", "hbm")] {
        let device = format!("soft,{option}=8MiB");
        let args = ["load", "a", "b", "c", "--placement", placement, "-d", &device];
        let output = command(&args).current_dir(&folder).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("\nhint: load less at a time, or onto a device with more memory;"), "{text}");
    }
}

#[test]
fn a_file_that_cannot_be_opened_is_named_once() {
    let text = complains(&["load", "/no/such/file"], 1);
    assert_eq!(text, "dmalane: cannot open /no/such/file\ncause: No such file or directory (os error 2)\n");
    let text = complains(&["load", "/"], 1);
    assert!(text.starts_with("dmalane: /: cannot find its model\ncause: it holds no "), "{text}");
    let folder = folder("torch");
    std::fs::write(folder.join("pytorch_model.bin"), b"PK\x03\x04").unwrap();
    let text = complains(&["load", folder.to_str().unwrap()], 1);
    let advice = "; pytorch_model.bin may be a checkpoint of PyTorch: save its tensors as safetensors, ";
    assert!(text.contains(advice), "{text}");
}

#[test]
fn limits_of_the_shell_are_named() {
    let limited = |limit: &str, args: &str| {
        let line = format!("{limit}; exec {} load {args}", env!("CARGO_BIN_EXE_dmalane"));
        let output = Command::new("sh").args(["-c", &line]).current_dir(folder("limits")).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        stderr(&output).to_owned()
    };
    let text = limited("ulimit -v 4000000", "--sample 1MiB");
    assert!(text.contains("\nhint: ") && text.contains("soft,ddr=SIZE,hbm=SIZE, now 64 GiB and 32 GiB"), "{text}");
    let many = "truncate -s 4096 a; for i in 1 2 3 4 5; do set -- \"$@\" a a a a; done; ulimit -n 8";
    let text = limited(many, "\"$@\"");
    assert!(text.contains("ulimit -n"), "{text}");
}

#[test]
fn a_device_without_an_mmu_takes_a_load() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory");
    std::fs::File::create(&file).unwrap().set_len(4 << 20).unwrap();
    for device in ["ram:4MiB".to_owned(), format!("file:{}", file.display())] {
        let output = run(&["load", "--sample", "1MiB", "-d", &device, "--verify", "--quiet"]);
        assert!(output.status.success(), "{device}: {}", stderr(&output));
        assert!(stdout(&output).contains("read back from the device's memory (it has no MMU)"), "{}", stdout(&output));
    }
    let text = complains(&["load", "--sample", "8MiB", "-d", "ram:4MiB", "--quiet"], 1);
    assert!(text.contains("4 MiB"), "{text}");
}

#[test]
fn what_a_load_says() {
    let folder = folder("says");
    std::fs::write(folder.join("raw.bin"), [7; 5000]).unwrap();
    let load = |args: &[&str]| {
        let output = command(&[&["load"], args].concat()).current_dir(&folder).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).to_owned()
    };
    let text = load(&["raw.bin", "--list", "--trace", "binds"]);
    assert!(text.starts_with("Bottleneck: ") && text.contains("\nLoaded 1 tensor in 1 file (4.88 KiB) in "), "{text}");
    assert!(text.contains("\nraw.bin: raw, one run of bytes; XXH3 "), "{text}");
    assert!(folder.join("binds").exists());
    assert!(text.contains("\ntensor   dtype  shape  bytes  device VA\nraw.bin  "), "{text}");
    let text = load(&["--sample", "8MiB", "-v", "--verify", "--list"]);
    assert!(text.contains("\nsample.safetensors: safetensors, 5 tensors; XXH3 "), "{text}");
    let row = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap().split_whitespace().collect::<Vec<_>>();
    // stage, busy, wall, of wall and its %, size and its unit, rate, reference and what was reached of it
    assert_eq!(row("bind ")[7..], ["-"], "{text}");
    assert_eq!(row("verify ")[3], "-", "{text}");
    assert!(matches!(row("read ").last(), Some(&"%" | &"disturbed")), "{text}");
    let whole = "\nThe whole command took ";
    assert!(text.contains(whole) && text.contains(": make the sample ") && text.contains(", the rest "), "{text}");
    assert!(text.contains("the first touch of 1") && text.contains("References of this run: "), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");

    let report = json(&["load", "--sample", "8MiB", "-v", "--verify", "--json"]);
    assert_eq!(report["files"][0]["format"], "safetensors");
    let stage = |name: &str| report["stages"].as_array().unwrap().iter().find(|s| s["stage"] == name).unwrap().clone();
    assert_eq!(report["workers"], 1);
    assert!(stage("verify")["share"].is_null() && stage("map")["bytes_per_s"].is_null());
    let references = &report["references"];
    let [copy, touch] = ["copy_bytes_per_s", "first_touch_bytes_per_s"].map(|c| references[c].as_f64().unwrap());
    let (bytes, touched) =
        (stage("transfer")["bytes"].as_f64().unwrap(), report["card"]["touched_bytes"].as_f64().unwrap());
    let best = bytes / (bytes / copy + touched / touch);
    assert!((stage("transfer")["reference_bytes_per_s"].as_f64().unwrap() / best - 1.0).abs() < 1e-6);
    // The counters are those of the load, whatever came after it.
    let without = json(&["load", "--sample", "8MiB", "--json"]);
    assert_eq!(report["host"]["iommu_leaves"], without["host"]["iommu_leaves"]);
    assert_eq!(report["card"]["touched_bytes"], without["card"]["touched_bytes"]);
}

#[test]
fn what_reading_says() {
    let folder = folder("reading");
    let bytes: Vec<u8> = (0..5_000_000u32).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(folder.join("a"), &bytes).unwrap();
    std::fs::write(folder.join("b"), b"").unwrap();
    let read = |args: &[&str]| command(&[&["read"], args].concat()).current_dir(&folder).output().unwrap();
    let json = |args: &[&str]| -> Value {
        let output = read(&[args, &["--json"]].concat());
        assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    // Every method gives the same bytes, and `dmalane load` agrees.
    let loaded = command(&["load", "a", "--json"]).current_dir(&folder).output().unwrap();
    let hash = serde_json::from_slice::<Value>(&loaded.stdout).unwrap()["files"][0]["xxh3"].clone();
    for args in [
        ["a"].as_slice(),
        &["a", "b", "a"],
        &["a", "--buffered"],
        &["a", "--chunk", "4096"],
        &["a", "--pages", "1g", "--heap", "memfd"],
    ] {
        let report = json(args);
        assert_eq!((&report["schema"], &report["command"]), (&5.into(), &"read".into()));
        assert_eq!((&report["files"][0]["xxh3"], &report["files"][0]["bytes"]), (&hash, &5_000_000.into()), "{args:?}");
        let file = &report["files"][0];
        let moved = file["direct_bytes"].as_u64().unwrap() + file["buffered_bytes"].as_u64().unwrap();
        assert_eq!(moved, 5_000_000, "{args:?}");
    }
    assert_eq!(json(&["a", "--heap", "memfd"])["memory"]["shareable"], true);
    assert_eq!(json(&["a", "--no-checksum"])["files"][0]["xxh3"], Value::Null);
    assert_eq!(json(&["a", "--range", "1000..3000"])["bytes"], 2000);
    let text = stdout(&read(&["a", "-v"])).to_owned();
    for word in [
        "\nRead 1 file (4.77 MiB) into memory in ",
        "\na: 4.77 MiB; XXH3 ",
        "\nheap       anonymous (up to ",
        "\npages ",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let piped = Command::new("sh")
        .args(["-c", &format!("cat a | {} read /dev/stdin --json", env!("CARGO_BIN_EXE_dmalane"))])
        .current_dir(&folder)
        .output()
        .unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&piped.stdout).unwrap()["files"][0]["xxh3"], hash);

    let fails = |args: &[&str]| {
        let output = read(args);
        let text = stderr(&output).to_owned();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{args:?}: {text}");
        assert!(text.starts_with("dmalane: ") && !text.contains("panicked"), "{text}");
        text
    };
    assert_eq!(fails(&["c"]), "dmalane: cannot open c\ncause: No such file or directory (os error 2)\n");
    assert!(fails(&["/"]).contains("it holds no *.safetensors.index.json"));
    assert_eq!(
        fails(&["a", "--range", "0..6MB"]),
        "dmalane: --range 0..6000000 does not lie in a: the file ends before, at 5000000\n"
    );
    let shm = std::path::Path::new("/dev/shm").exists();
    if shm {
        let text = fails(&["/dev/shm/../shm/../../etc/../dev/shm/.", "--direct"]);
        assert!(text.contains("it holds no *.safetensors.index.json"), "{text}");
    }
    // There may be such a heap.
    let output = read(&["a", "--heap", "dma-heap"]);
    assert!(output.status.success() || stderr(&output).starts_with("dmalane: no dma-buf heap on this machine\n"));
    // More than this machine has, by far: refused, and nothing killed.
    match std::fs::File::create(folder.join("huge")).unwrap().set_len(1 << 42) {
        Ok(()) => {
            let text = fails(&["huge"]);
            assert!(text.contains("4 TiB") || text.contains("cannot allocate"), "{text}");
        }
        Err(e) => println!("SKIPPED: no file of 4 TiB: {e}"),
    }
}

#[test]
fn what_inspect_says() {
    let folder = folder("inspect");
    let file = folder.join("f");
    std::fs::write(&file, vec![1; 1 << 20]).unwrap();
    let path = file.to_str().unwrap();
    let output = run(&["inspect", path]);
    if output.status.success() {
        assert!(stdout(&output).contains("100.0 % in the page cache"), "{}", stdout(&output));
    } else {
        println!("SKIPPED: {}", stderr(&output));
    }
    assert_eq!(
        complains(&["inspect", "/no/such/file"], 1),
        "dmalane: cannot open /no/such/file\ncause: No such file or directory (os error 2)\n"
    );
    assert!(complains(&["inspect", "/"], 1).contains("it holds no *.safetensors.index.json, *.safetensors"));
    assert!(complains(&["inspect", "/dev/null"], 1).contains("it is not a regular file"));
}

#[test]
fn of_a_part_of_a_model_only_that_part_is_read() {
    let folder = folder("part");
    let load = |line: &str| {
        let output = command(&["load"]).args(line.split(' ')).current_dir(&folder).output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        output
    };
    crate::sample(folder.join("m.safetensors"), 8 << 20, 1);
    let json = |line: &str| -> Value { serde_json::from_slice(&load(line).stdout).unwrap() };
    let whole = json("m.safetensors --json");
    let tensors = whole["files"][0]["tensors"].as_array().unwrap();
    // Not all of them, and not neighbours.
    let bytes = |tensor: &Value| tensor["bytes"].as_u64().unwrap();
    let (first, last) = (&tensors[0], &tensors[tensors.len() - 1]);
    let wanted = bytes(first) + bytes(last);
    let names = [first, last].map(|tensor| format!("--tensors {}", tensor["name"].as_str().unwrap())).join(" ");
    let part = json(&format!("m.safetensors {names} --no-checksum --verify --json --buffered"));
    let read = part["read_bytes"].as_u64().unwrap();
    assert!((wanted..wanted + 4 * 4096).contains(&read), "{read} of {wanted}");
    assert!(wanted + (1 << 20) < whole["bytes"].as_u64().unwrap(), "{wanted} is not all");
    // All is hashed, so all is read, and said to be.
    let text = stdout(&load(&format!("m.safetensors {names} --verify"))).to_owned();
    assert!(text.contains("8 MiB read for "), "{text}");
    for device in ["ram:64MiB", "soft"] {
        let direct = json(&format!("m.safetensors {names} --no-checksum --verify --json --chunk 64KiB -d {device}"));
        assert_eq!((&direct["read_bytes"], &direct["verified"]), (&part["read_bytes"], &true.into()), "{device}");
    }
}

/// A GGUF file with two tensors of floats, `first` and `second`, of 64 and 32 elements.
fn gguf() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let tensor = |name: &str, elements: u64, offset: u64| {
        [&text(name)[..], &1u32.to_le_bytes(), &elements.to_le_bytes(), &0u32.to_le_bytes(), &offset.to_le_bytes()]
            .concat()
    };
    let mut file = [&b"GGUF"[..], &3u32.to_le_bytes(), &2u64.to_le_bytes(), &1u64.to_le_bytes()].concat();
    file.extend([&text("general.name")[..], &8u32.to_le_bytes(), &text("tiny")].concat());
    file.extend([tensor("first", 64, 0), tensor("second", 32, 256)].concat());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend((0..384u32).map(|i| i as u8));
    file
}

#[test]
fn models_come_as_people_have_them() {
    let folder = folder("models");
    let at = |name: &str| folder.join(name);
    let size = |path: &Path| std::fs::metadata(path).unwrap().len();
    let run = |line: &str, status| {
        let args: Vec<&str> = line.split_whitespace().collect();
        let output = command(&args).current_dir(&folder).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{line}: {}", stderr(&output));
        format!("{}{}", stdout(&output), stderr(&output))
    };
    std::fs::create_dir_all(at("sharded")).unwrap();
    crate::shard(at("sharded/model-1.safetensors"), 1 << 20, 'a');
    crate::shard(at("sharded/model-2.safetensors"), 2 << 20, 'b');
    std::fs::write(at("sharded/config.json"), "{}").unwrap();
    std::fs::write(at("sharded/old.safetensors"), "not part of the model").unwrap();
    crate::index(&at("sharded"), &["model-2.safetensors", "model-1.safetensors"]);
    for named in ["sharded", "sharded/model.safetensors.index.json"] {
        let said = run(&format!("load {named} --verify"), 0);
        assert!(said.contains("in 2 files") && said.contains("sharded/model-1.safetensors: safetensors"), "{said}");
    }
    // What is no part of the model is left out, and said where details are.
    let said = run("load sharded -v", 0);
    assert!(said.contains("sharded/old.safetensors: not listed by the index"), "{said}");
    let report: Value = serde_json::from_str(&run("load sharded --json", 0)).unwrap();
    assert_eq!(report["left_out"][0]["file"], "sharded/old.safetensors");
    run("manifest sharded -o sharded.manifest", 0);
    for named in ["sharded", "sharded/model.safetensors.index.json"] {
        let said = run(&format!("read {named} --manifest sharded.manifest"), 0);
        assert!(said.contains("sharded/model-1.safetensors") && said.contains("sharded/model-2.safetensors"), "{said}");
        let said = run(&format!("read {named} --export fd -- printenv DMALANE_SIZE"), 0);
        let sizes = ["sharded/model-1.safetensors", "sharded/model-2.safetensors"].map(|f| size(&at(f)).to_string());
        assert_eq!(said.trim_end(), sizes.join(" "));
        let inspected = command(&["inspect", named]).current_dir(&folder).output().unwrap();
        let said = stdout(&inspected);
        match inspected.status.success() {
            true => assert_eq!(said.matches("in the page cache").count(), 3, "{said}"),
            false => println!("SKIPPED: {}", stderr(&inspected)),
        }
    }
    std::fs::create_dir_all(at("none")).unwrap();
    // Those that take a model by its directory, with what they need beside it.
    let commands = crate::lists::with(crate::lists::MODELS).into_iter();
    let commands: Vec<String> = commands.map(|name| name.replace("verify", "verify --manifest whole")).collect();
    let names = ["model.safetensors", "pytorch_model.bin"];
    for name in names {
        std::fs::copy(at("sharded/model-1.safetensors"), at(name)).unwrap();
    }
    run("manifest model.safetensors pytorch_model.bin -o whole", 0);
    for command in &commands {
        let said = run(&format!("{command} none"), 1);
        // Other kinds may stand beside these.
        assert!(said.contains("it holds no *.safetensors.index.json, *.safetensors"), "{said}");
        assert!(said.contains("*.gguf") && said.contains(" file"), "{said}");
    }
    std::fs::write(at("none/model.gguf"), gguf()).unwrap();
    let said = run("load none --verify --list", 0);
    assert!(said.contains("gguf, 2 tensors") && said.contains("Verified 2 tensors"), "{said}");
    assert!(said.lines().any(|l| l.starts_with("second") && l.contains("F32") && l.contains("[32]")), "{said}");
    assert!(said.lines().any(|l| l == "general.name = tiny"), "{said}");
    for line in ["load none --json", "load none --dry-run --json"] {
        let report: serde_json::Value = serde_json::from_str(&run(line, 0)).unwrap();
        assert_eq!(report["files"][0]["metadata"], serde_json::json!({ "general.name": "tiny" }));
    }
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n";
    for name in names {
        std::fs::write(at(name), pointer).unwrap();
        for command in &commands {
            let said = run(&format!("{command} {name}"), 1);
            assert!(
                said.contains("a Git LFS pointer to a file of 548105171 bytes") && said.contains("git lfs pull"),
                "{said}"
            );
            assert!(!said.contains("the load failed"), "nothing was begun: {said}");
        }
    }
    std::fs::write(at("empty.bin"), "").unwrap();
    for line in ["load empty.bin", "load empty.bin --dry-run"] {
        assert!(run(line, 1).starts_with("dmalane: nothing was loaded\ncause: "), "{line}");
    }
    // As it is, where somebody wants just that.
    let pointer = std::fs::File::open(at("model.safetensors")).unwrap();
    let output = command(&["read", "-", "--json"]).stdin(pointer).output().unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["bytes"], 72);
}

#[test]
fn standard_input_is_a_file_of_load_read_and_inspect() {
    let folder = folder("stdin");
    let model = folder.join("m.safetensors");
    crate::sample(&model, 3 << 20, 1);
    let shell = |line: &str| {
        let line = line.replace("dmalane", env!("CARGO_BIN_EXE_dmalane"));
        Command::new("sh").args(["-c", &line]).current_dir(&folder).output().unwrap()
    };
    let json = |line: &str| -> Value {
        let output = shell(line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let hash = json("dmalane load m.safetensors --json")["files"][0]["xxh3"].clone();
    // From a pipe and from a file, by each command, once and more often.
    for line in [
        "cat m.safetensors | dmalane load - --verify --json",
        "dmalane load - --verify --json < m.safetensors",
        "cat m.safetensors | dmalane load - --repeat 2 --json",
        "cat m.safetensors | dmalane read - --json",
        "dmalane read - --json < m.safetensors",
        "cat m.safetensors | dmalane read - --json --repeat 2",
    ] {
        assert_eq!(json(line)["files"][0]["xxh3"], hash, "{line}");
    }
    let loaded = json("cat m.safetensors | dmalane load - --json");
    assert_eq!((&loaded["tensors"], &loaded["files"][0]["path"]), (&5.into(), &"stdin.safetensors".into()));
    // What is in the page cache is read from there, as when the file is named; so is the copy of a pipe.
    std::fs::read(&model).unwrap();
    for line in ["load m.safetensors", "load - < m.safetensors", "read - < m.safetensors"] {
        let (command, rest) = line.split_once(' ').unwrap();
        assert_eq!(json(&format!("dmalane {command} --json {rest}"))["files"][0]["direct"], false, "{line}");
    }
    assert_eq!(json("cat m.safetensors | dmalane load --json -")["files"][0]["direct"], false);
    let output = shell("dmalane load - - < m.safetensors");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_eq!(
        json("dmalane manifest m.safetensors | dmalane verify m.safetensors --manifest - --json")["verified"],
        true
    );
    // A copy that is not in the time is in the report.
    assert!(shell("dmalane manifest - -o made < m.safetensors").status.success());
    let bytes = std::fs::metadata(&model).unwrap().len();
    for (line, copied) in [
        ("cat m.safetensors | dmalane load - --json", bytes),
        ("cat m.safetensors | dmalane read - --json", bytes),
        ("cat m.safetensors | dmalane verify - --manifest made --json", bytes),
        ("dmalane load - --json < m.safetensors", 0),
    ] {
        let report = json(line);
        assert_eq!(report["copied_first_bytes"], copied, "{line}");
        assert_eq!(report["copied_first_s"].as_f64().unwrap() > 0.0, copied > 0, "{line}");
    }
    for line in ["load -", "read -", "manifest - -o made --force", "verify - --manifest made"] {
        let said = shell(&format!("cat m.safetensors | dmalane {line}"));
        assert!(stdout(&said).contains("Copied to a temporary file first: 3 MiB in "), "{line}: {}", stdout(&said));
        let said = shell(&format!("dmalane {line} < m.safetensors"));
        assert!(said.status.success() && !stdout(&said).contains("Copied"), "{line}: {}", stdout(&said));
    }
    // A pipe with a name: read to its end, which is at once where nobody writes.
    let line = "bash -c 'dmalane load --json <(cat m.safetensors)'";
    if Command::new("bash").arg("--version").output().is_ok() {
        assert_eq!(json(line)["files"][0]["xxh3"], hash);
    }
    assert!(shell("mkfifo pipe").status.success());
    for command in ["load", "read", "read --range 0..9", "read --repeat 2", "manifest"] {
        let output = shell(&format!("timeout 60 dmalane {command} pipe"));
        assert_eq!(output.status.code(), Some(1), "{command}: {}", stderr(&output));
        assert!(stderr(&output).contains("pipe is a pipe that nobody writes to"), "{}", stderr(&output));
    }
    // A writer that is slow.
    let line = "(sleep 0.2; cat m.safetensors) > pipe & exec 3<pipe; dmalane read --json pipe";
    assert_eq!(json(line)["files"][0]["xxh3"], hash);
    let output = shell("dmalane inspect - < m.safetensors");
    assert!(output.status.success() || stderr(&output).contains("which part of stdin is cached"));
}

#[test]
fn sources_without_a_true_size_are_read_to_their_end() {
    // The kernel says 0 bytes of the first and 4096 of the second.
    for path in ["/proc/version", "/sys/kernel/mm/transparent_hugepage/enabled"] {
        let Ok(bytes) = std::fs::read(path) else { continue };
        for command in ["load", "read"] {
            let report = json(&[command, path, "--json"]);
            assert_eq!(report["bytes"], bytes.len(), "{command} {path}");
        }
    }
    for args in [&["load", "/dev/zero"][..], &["read", "/dev/zero"], &["read", "/dev/zero", "--range", "..9"]] {
        assert!(complains(args, 1).contains("/dev/zero is a character device, which has no end"), "{args:?}");
    }
    // It ends at once.
    let text = complains(&["read", "/proc/version", "--manifest", "/dev/null"], 1);
    assert!(!text.contains("no end") && !text.contains("nobody writes"), "{text}");
    assert_eq!(json(&["read", "/dev/null", "--json"])["bytes"], 0);
}

#[test]
fn a_range_behind_the_end_is_an_error() {
    let folder = folder("behind");
    std::fs::write(folder.join("f"), [1; 5000]).unwrap();
    let path = folder.join("f");
    let path = path.to_str().unwrap();
    for range in ["5000..", "1GiB..", "0..5001", "4999..8KiB"] {
        let text = complains(&["read", path, "--range", range], 1);
        assert!(text.contains("the file ends before, at 5000"), "{text}");
    }
    assert_eq!(json(&["read", path, "--range", "4999..5000", "--json"])["bytes"], 1);
    let piped = Command::new("sh")
        .args(["-c", &format!("head -c 10 {path} | {} read - --range 99..", env!("CARGO_BIN_EXE_dmalane"))])
        .output()
        .unwrap();
    assert_eq!(piped.status.code(), Some(1));
    for (line, said) in [
        ("head -c 10 f | dmalane read - --range 0..100", "0..100 does not lie in stdin: the file ends before, at 10\n"),
        ("head -c 10 f | dmalane read - --range 5..100", "5..100 does not lie in stdin: the file ends before, at 10\n"),
        ("head -c 10 f | dmalane read - --range 50..100", "50..100 does not lie in stdin: the file ends before"),
        ("dmalane read - --range 0..6000 < f", "0..6000 does not lie in stdin: the file ends before, at 5000\n"),
        (
            "cat f | dmalane read - --range 0..3000000",
            "0..3000000 does not lie in stdin: the file ends before, at 5000\n",
        ),
    ] {
        let line = line.replace("dmalane", env!("CARGO_BIN_EXE_dmalane"));
        let output = Command::new("sh").args(["-c", &line]).current_dir(&folder).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(stderr(&output).starts_with(&format!("dmalane: --range {said}")), "{line}: {}", stderr(&output));
    }
}

#[test]
fn runs_are_repeated_and_their_median_is_reported() {
    let report = json(&["load", "--sample", "1MiB", "--repeat", "3", "--json"]);
    let walls: Vec<f64> = report["runs_s"].as_array().unwrap().iter().map(|wall| wall.as_f64().unwrap()).collect();
    assert_eq!((walls.len(), &report["wall_s"]), (3, &report["median_s"]));
    let mut sorted = walls.clone();
    sorted.sort_by(f64::total_cmp);
    let said = ["fastest_s", "median_s", "slowest_s"].map(|name| report[name].as_f64().unwrap());
    assert_eq!(said.to_vec(), sorted);
    let text = run(&["read", env!("CARGO_BIN_EXE_dmalaned"), "--repeat", "2"]);
    assert!(stdout(&text).contains("\nMedian of 2 runs: "), "{}", stdout(&text));
}

#[test]
fn cold_runs_begin_with_nothing_cached_or_say_what_is() {
    let folder = folder("cold");
    let model = folder.join("m.safetensors");
    // Just written: dirty.
    crate::sample(&model, 2 << 20, 1);
    let (model, size) = (model.to_str().unwrap(), std::fs::metadata(&model).unwrap().len());
    let opened = std::fs::File::open(model).unwrap();
    for command in ["read", "load"] {
        let report = json(&[command, model, "--cold", "--repeat", "3", "--json"]);
        let walls: Vec<f64> = report["runs_s"].as_array().unwrap().iter().map(|wall| wall.as_f64().unwrap()).collect();
        let average = report["average_s"].as_f64().unwrap();
        assert!((average - walls.iter().sum::<f64>() / 3.0).abs() < 1e-8, "{report}");
        match rustix::fs::fstatfs(&opened).unwrap().f_type {
            0x0102_1994 => println!("SKIPPED: the tests' folder is in memory"),
            _ => assert_eq!(report["cold_cached_bytes"], 0),
        }
        assert_eq!(json(&[command, model, "--json"])["cold_cached_bytes"], Value::Null);
    }
    assert!(complains(&["load", model, "--cold", "--dry-run"], 2).contains("cannot be used with"));
    // Memory is where files of a tmpfs are: nothing can be dropped.
    let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("SKIPPED: no /dev/shm") };
    let copy = place.path().join("m").to_str().unwrap().to_owned();
    std::fs::copy(model, &copy).unwrap();
    assert_eq!(json(&["read", &copy, "--cold", "--json"])["cold_cached_bytes"], size.next_multiple_of(4096));
    let output = run(&["read", &copy, "--cold"]);
    let text = stdout(&output);
    let line = text.lines().find(|line| line.starts_with("Average of 1 cold run: ")).expect(text);
    assert!(line.contains(" ns; ") && line.ends_with(" stayed in the page cache"), "{text}");
}

#[test]
fn a_part_of_a_model_is_loaded() {
    let folder = folder("part");
    let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    for (name, seed) in [("a.safetensors", 1), ("b.safetensors", 2)] {
        crate::sample(at(name), 2 << 20, seed);
    }
    let names = |report: &Value| -> Vec<String> {
        let files = report["files"].as_array().unwrap().iter();
        files.flat_map(|f| f["tensors"].as_array().unwrap()).map(|t| t["name"].as_str().unwrap().to_owned()).collect()
    };
    let part = ["load", &at("a.safetensors"), "--tensors", "*.mlp.*", "--tensors", "emb*", "--verify", "--json"];
    let report = json(&part);
    assert_eq!((names(&report).len(), &report["tensors"]), (2, &2.into()), "{report}");
    let text = complains(&["load", &at("a.safetensors"), "--tensors", "nothing*"], 1);
    assert!(text.contains("no tensor is called nothing*") && text.contains("--dry-run --list"), "{text}");
    assert!(complains(&["load", "a", "--tensors", "a[b"], 2).contains("at character"));
}

#[test]
fn a_dry_run_says_where_everything_would_be() {
    let folder = folder("dry");
    let model = folder.join("m.safetensors").to_str().unwrap().to_owned();
    crate::sample(&model, 2 << 20, 1);
    for device in ["soft", "ram:64MiB"] {
        let plan = json(&["load", &model, "-d", device, "--dry-run", "--json"]);
        let loaded = json(&["load", &model, "-d", device, "--json"]);
        assert_eq!((&plan["dry_run"], &plan["tensors"]), (&true.into(), &loaded["tensors"]));
        assert_eq!(plan["files"][0]["tensors"], loaded["files"][0]["tensors"], "the same addresses on {device}");
    }
    let text = run(&["load", &model, "--dry-run", "--list"]);
    let text = stdout(&text);
    assert!(text.starts_with("Would load 5 tensors in 1 file onto soft: 2"), "{text}");
    assert!(text.contains("\nembeddings.weight ") && text.lines().all(|line| line.len() <= 100), "{text}");
    assert!(complains(&["load", &model, "-d", "ram:1MiB", "--dry-run"], 1).contains("\nhint: load less at a time"));
    complains(&["load", &model, "--dry-run", "--trace", "x"], 2);
    // A file device keeps its bytes.
    let memory = folder.join("memory");
    std::fs::write(&memory, vec![7; 4 << 20]).unwrap();
    let device = format!("file:{}", memory.display());
    let planned = run(&["load", &model, "-d", &device, "--dry-run", "--overwrite"]);
    assert!(planned.status.success() && std::fs::read(&memory).unwrap() == vec![7; 4 << 20]);
}

/// The list of tensors is printed, and not made first: it took 2.5 KB of memory for each.
#[test]
fn a_report_of_many_tensors_takes_little_memory() {
    let path = folder("many").join("m.safetensors");
    let tensor = |i| format!("\"t{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    let header = format!("{{{}}}", (0..100_000).map(tensor).collect::<Vec<_>>().join(","));
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    let program = env!("CARGO_BIN_EXE_dmalane");
    let line = format!("ulimit -v 200000; exec {program} load \"$0\" -d ram:1MiB --dry-run --json");
    let output = Command::new("sh").args(["-c", &line]).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tensors = report["files"][0]["tensors"].as_array().unwrap();
    assert_eq!((tensors.len(), &report["tensors"], &tensors[99_999]["bytes"]), (100_000, &100_000.into(), &0.into()));
}

#[test]
fn devices_that_are_not_there_come_with_a_way_to_them() {
    let model = folder("hints").join("m.bin");
    std::fs::write(&model, [7; 5000]).unwrap();
    let small = model.with_file_name("small");
    std::fs::write(&small, [0; 4095]).unwrap();
    let small = small.to_str().unwrap();
    for (device, status, hint) in [
        ("/dev/xdma0_h2c_0", 2, "did you mean `-d file:/dev/xdma0_h2c_0`?"),
        ("0000:01:00.0", 2, "did you mean `-d vfio:0000:01:00.0`?"),
        ("cuda:0,lib=/nowhere/libcuda.so", 1, "`dmalane doctor` says what this machine lacks for it"),
        ("daemon:/nowhere", 1, "`dmalaned --socket SOCKET` shares a card"),
        (
            "file:/dev/xdma0_h2c_0",
            1,
            "the driver makes this node; once its module is loaded, `ls /dev/xdma*` lists its nodes",
        ),
        ("file:/nowhere/memory", 1, "`truncate -s 1GiB /nowhere/memory` makes a file"),
        (&*format!("file:{small}"), 1, &*format!("`truncate -s 1GiB {small}` makes a file")),
    ] {
        let text = complains(&["load", model.to_str().unwrap(), "-d", device], status);
        assert!(text.contains(&format!("hint: {hint}")), "{device}: {text}");
    }
}

/// Quadratic work would take hours, and a copy of each name for each step more memory than this.
#[test]
fn sixty_thousand_tensors_take_little_time_and_memory() {
    let path = folder("tensors").join("m.safetensors");
    // One of ten has bytes.
    let tensor = |i: u32| {
        let (start, len) = (i.div_ceil(10) * 16, if i.is_multiple_of(10) { 16 } else { 0 });
        let end = start + len;
        format!("\"model.layers.{i}.weight\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{start},{end}]}}")
    };
    let header = format!("{{{}}}", (0..60_000).map(tensor).collect::<Vec<_>>().join(","));
    let data = vec![7; 6_000 * 16];
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
    let program = env!("CARGO_BIN_EXE_dmalane");
    for (line, shows) in [
        ("inspect \"$0\"", "in the page cache"),
        ("load \"$0\" -d ram:100MiB --verify", "60000 tensors"),
        ("load \"$0\" -d ram:100MiB --list", "model.layers.59999.weight"),
        ("load \"$0\" -d soft,ddr=256MiB,hbm=4MiB", "60000 tensors"),
        ("read \"$0\"", "GB/s"),
        ("manifest \"$0\"", "model.layers.59999.weight"),
    ] {
        let line = format!("ulimit -v 1000000 -t 20; exec {program} {line}");
        let output = Command::new("sh").args(["-c", &line]).arg(&path).output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        assert!(stdout(&output).contains(shows), "{line}");
    }
}

#[test]
fn the_device_may_come_from_the_environment() {
    let with = |variable: &str, args: &[&str]| command(args).env(variable, "ram:9MiB").output().unwrap();
    let device = |output: Output| serde_json::from_slice::<Value>(&output.stdout).unwrap()["device"].clone();
    let sample = ["load", "--sample", "1MiB", "--json"];
    assert_eq!(device(with("DMALANE_DEVICE", &sample)), "ram:9MiB");
    assert_eq!(device(with("DMALANE_DEVICE", &[&sample[..], &["-d", "ram:7MiB"]].concat())), "ram:7MiB");
    // To other commands, the option means something else.
    let file = folder("environment").join("file");
    std::fs::write(&file, "bytes").unwrap();
    for args in [&["vm", "bench", "1MiB", "2"][..], &["read", file.to_str().unwrap()]] {
        let output = with("DMALANE_DEVICE", args);
        assert!(output.status.code() != Some(2) && !stdout(&output).contains("ram:9MiB"), "{args:?}: {output:?}");
    }
    let wrong = command(&sample).env("DMALANE_DEVICE", "gpu0").output().unwrap();
    assert!(wrong.status.code() == Some(2) && stderr(&wrong).contains("--device"), "{}", stderr(&wrong));
}

/// As in a container whose processes are limited.
#[test]
fn models_are_loaded_where_there_can_be_no_more_threads() {
    for device in ["ram:128MiB", "soft"] {
        let mut load = command(&["load", "-d", device, "--sample", "64MiB", "--verify"]);
        // No thread can have a stack of so many bytes.
        let output = load.env("RUST_MIN_STACK", (1u64 << 60).to_string()).output().unwrap();
        match device {
            "soft" => assert!(stderr(&output).contains("cannot start a worker"), "{}", stderr(&output)),
            _ => assert!(output.status.success(), "{}", stderr(&output)),
        }
    }
}

#[test]
fn nothing_is_coloured_where_it_is_not_wanted() {
    let sample = ["load", "--sample", "1MiB", "--verify"];
    let colours = |variable: &str| {
        let output = command(&sample).env(variable, "1").output().unwrap();
        stdout(&output).contains('\x1b')
    };
    assert_eq!((colours("NO_COLOR"), colours("CLICOLOR_FORCE"), colours("UNRELATED")), (false, true, false));
}

#[test]
fn devices_and_formats_are_completed() {
    let script = run(&["completions", "bash"]);
    assert!(stdout(&script).contains("arm64-s1-4k"));
    // As bash calls it. Behind a kind comes what it is of, and no space.
    let completed = |word: &str| {
        let line = format!("{}\nCOMP_WORDS=(dmalane load -d {word}) COMP_CWORD=3", stdout(&script));
        let line = format!("{line}\ncompopt() {{ echo \"$@\"; }}; _dmalane dmalane {word} -d; echo ${{COMPREPLY[@]}}");
        stdout(&Command::new("bash").args(["-c", &line]).output().unwrap()).to_owned()
    };
    for kind in dmalane::devices::KINDS {
        let said = completed(kind.name);
        let words: Vec<_> = said.split_whitespace().collect();
        let name = |word: &&&str| word.trim_end_matches(':') == kind.name;
        assert!(words.starts_with(&["-o", "nospace"]) && words.iter().any(|word| name(&word)), "{}: {said}", kind.name);
    }
    assert_eq!(completed("vul"), "-o nospace\nvulkan:\n");
}

#[test]
fn hints_about_memory_agree() {
    let report = json(&["doctor", "--json"]);
    let pages = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == "hugepages_2m").unwrap();
    // In a container followed by a remark.
    let fix = pages["fix"].as_str().and_then(|fix| fix.split("    #").next());
    let Some(fix) = fix else { return println!("SKIPPED: there are enough huge pages") };
    let load = run(&["load", "--sample", "1MiB", "-v"]);
    let text = stdout(&load).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!text.contains("not hugetlb 2 MiB: too few") || text.contains(fix), "{fix}: {text}");
    let said = format!("hugetlb 2 MiB: too few are free; more with: {fix}");
    let path = folder("hints").join("f");
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    let path = path.to_str().unwrap();
    let loaded = json(&["load", path, "--json"])["host"]["page_backing_fallbacks"].to_string();
    let read = json(&["read", path, "--json"])["memory"]["page_backing_fallbacks"].to_string();
    let verbose = run(&["read", path, "-v"]);
    let verbose = stdout(&verbose).split_whitespace().collect::<Vec<_>>().join(" ");
    for text in [loaded, read, verbose] {
        assert!(!text.contains("hugetlb 2 MiB") || text.contains(&said), "{said}: {text}");
    }
}
