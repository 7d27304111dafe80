//! The shipped program and a V80: unmodified and without privileges, under a supervisor that answers for the driver.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};

use dmalane_slash::model::{Counts, DriverModel, Fault, Version, Vrtd};
use dmalane_slash::{DDR, HBM, Request};
use serde_json::Value;

use crate::supervisor::{self, Reads};

const MIB: u64 = 1 << 20;

/// A file without repetitions within a page, of this many bytes.
fn file(name: &str, len: u64) -> PathBuf {
    use std::io::Write;
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    for at in (0..len).step_by(4096) {
        file.write_all(&page(at)[..(len - at).min(4096) as usize]).unwrap();
    }
    drop(file);
    path
}

/// The bytes of the file at a multiple of 4 KiB.
fn page(at: u64) -> [u8; 4096] {
    let mut page = [0; 4096];
    for (i, word) in page.chunks_exact_mut(8).enumerate() {
        let mixed = (at + i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
    }
    page
}

/// Compares the card with the file.
fn assert_there(model: &DriverModel, first: u64, len: u64, what: &str) {
    let mut some = vec![0; MIB as usize];
    for at in (0..len).step_by(MIB as usize) {
        let some = &mut some[..(len - at).min(MIB) as usize];
        model.peek(first + at, some);
        for (i, there) in some.chunks(4096).enumerate() {
            let at = at + 4096 * i as u64;
            assert!(there == &page(at)[..there.len()], "{what}: byte {at}");
        }
    }
}

#[test]
fn the_program_has_no_privileges() {
    if let Some(closed) = supervisor::closed_to_others() {
        println!("SKIPPED: {} is closed to other users, so that programs run as root", closed.display());
        return;
    }
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let output = supervisor::run(&model, Command::new("cat").arg("/proc/self/status"), None);
    let Some(output) = output else { return };
    let status = String::from_utf8(output.stdout).unwrap();
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    println!("user {}, capabilities {}", line("Uid:"), line("CapEff:"));
    assert!(!line("Uid:").starts_with("0\t") && line("CapEff:") == "0000000000000000", "{status}");
}

fn dmalane(model: &DriverModel, args: &[&str]) -> Option<Output> {
    supervisor::run(model, Command::new(env!("CARGO_BIN_EXE_dmalane")).args(args).envs(crate::WIDE), None)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder that all users may use, as whom the program runs.
fn open_folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    folder
}

/// The card of a vrtd that listens in a folder of its own, and the folder.
fn lent(model: &DriverModel) -> (Vrtd, String, tempfile::TempDir) {
    let (vrtd, folder) = (Vrtd::new(model).unwrap(), open_folder());
    let socket = folder.path().join("vrtd.sock");
    vrtd.listen(&socket).unwrap();
    (vrtd, format!("vrtd:{}#0", socket.display()), folder)
}

/// Loads a raw file to each placement, and checks bytes and counts: by the node without io_uring, which counts what is
/// read to where, and through vrtd as it is.
fn load_everywhere(name: &str, len: u64) {
    let path = file(name, len);
    // Its start on the card, or none for across the border of the halves; and the channels that the placement names.
    let half = HBM.0 + HBM.1 / 2;
    let cases: [(&str, Option<u64>, &[u32]); 4] = [
        ("ddr", Some(DDR.0), &[1, 2]),
        ("hbm0", Some(HBM.0), &[1]),
        ("hbm1", Some(half), &[2]),
        ("hbm", None, &[1, 2]),
    ];
    for ((placement, first, channels), lends) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let model = DriverModel::new(Version::KNOWN).unwrap();
        let (vrtd, lent, _folder) = lent(&model);
        let device = if lends { &lent } else { "slash:0" };
        let args = ["load", path.to_str().unwrap(), "-d", device, "--placement", placement, "--json"];
        let mut program = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        program.args(args);
        let mut reads = Reads::default();
        let output = supervisor::run(&model, &mut program, (!lends).then_some(&mut reads));
        let Some(output) = output else { return };
        assert!(output.status.success(), "{placement}: {}", text(&output));
        // The driver's buffers take the whole file from the kernel, and nothing else takes any of it.
        println!("{reads:?}");
        assert!(lends || reads.buffers == len && reads.elsewhere < 64 << 10, "{placement}: {reads:?} of {len} bytes");
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let at = json["files"][0]["tensors"][0]["device_va"].as_u64().unwrap();
        let there = first.map_or(at < half && at + len > half, |first| at == first);
        assert!(there, "{placement}: {at:#x}, halves meet at {half:#x}");
        assert_there(&model, at, len, placement);
        let Counts { calls, channels: moved, small, buffers, .. } = model.counts();
        let (transfers, all): (u64, u64) = (calls[Request::Transfer.name()], calls.values().sum());
        println!("{placement}: {all} calls, {transfers} transfers, {moved:?} bytes, {buffers:?} buffers");
        // Each byte went to the card once, and none through a page of the queues.
        assert_eq!((moved.values().sum::<u64>(), small), (len, 0), "{placement}");
        // The policy moves work to the channel that the supervisor happens to serve first.
        assert!(channels.iter().all(|c| moved.get(c).is_some_and(|bytes| *bytes >= MIB)), "{placement}: {moved:?}");
        // A call moves a slot of 2 MiB, or a channel's half of it; besides, what opens and closes the card.
        assert!(transfers <= len / MIB + 8, "{placement}: {transfers} transfers of {} MiB", len / MIB);
        assert!(all - transfers <= 20 + 8 * vrtd.requests().get(&10).unwrap_or(&0), "{placement}: {calls:?}");
        assert!(buffers.1 <= 8, "{placement}: {buffers:?}");
        assert_eq!((model.pairs(), vrtd.lent()), (0, Vec::new()), "{placement}: queue pairs were deleted");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_file_is_loaded_to_each_memory_without_a_copy() {
    load_everywhere("slash-small", 24 * MIB + 12_345);
}

#[test]
#[ignore = "1 GiB for each placement: scripts/nightly"]
fn a_gibibyte_is_loaded_to_each_memory_without_a_copy() {
    load_everywhere("slash-large", 1 << 30);
}

/// The counts of system calls of a load under strace, by name.
fn traced(model: &DriverModel, len: u64) -> Option<BTreeMap<String, u64>> {
    let (folder, path) = (open_folder(), file(&format!("slash-traced-{len}"), len));
    let counts = folder.path().join("counts");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-o"]).arg(&counts).arg(env!("CARGO_BIN_EXE_dmalane")).arg("load").arg(&path);
    let output = supervisor::run(model, strace.args(["-d", "slash:0", "--placement", "hbm0"]), None)?;
    std::fs::remove_file(path).unwrap();
    if text(&output).contains("ptrace") {
        println!("SKIPPED: {}", text(&output).trim());
        return None;
    }
    assert!(output.status.success(), "{}", text(&output));
    let counts = std::fs::read_to_string(counts).unwrap();
    // % time, seconds, usecs/call, calls, errors or nothing, syscall
    let words = counts.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    Some(words.filter_map(|words| Some((words.last()?.to_string(), words.get(3)?.parse().ok()?))).collect())
}

#[test]
fn system_calls_per_mib_are_a_read_and_a_transfer_for_each_slot() {
    if Command::new("strace").arg("-V").output().is_err() {
        println!("SKIPPED: there is no strace");
        return;
    }
    let model = || DriverModel::new(Version::KNOWN).unwrap();
    let (Some(less), Some(more)) = (traced(&model(), 16 * MIB), traced(&model(), 80 * MIB)) else { return };
    // The cost of 64 MiB more: the other costs of a load are in both.
    let of = |name: &str| {
        let count = |counts: &BTreeMap<String, u64>| counts.get(name).copied().unwrap_or(0);
        count(&more).saturating_sub(count(&less))
    };
    let (ioctls, reads) = (of("ioctl"), ["pread64", "preadv", "preadv2", "io_uring_enter"].map(of));
    println!("64 MiB take {ioctls} ioctls, reads {reads:?}, futexes {}; {more:?}", of("futex"));
    // A slot of 2 MiB takes one transfer, or two where both channels share it.
    assert!((1..=64 + 8).contains(&ioctls), "{less:?} {more:?}");
    // And one read; that of a ring can also take one call to wait for it.
    assert!((1..=64 + 8).contains(&reads.iter().sum::<u64>()), "{less:?} {more:?}");
}

/// Validates both ways, each memory and both, with each size; the program compares the bytes of each.
fn sweep(sizes: &str, count: usize, threads: &str) {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let args = ["validate", "-d", "slash:0", "--buffer-size", sizes, "-j", threads, "--iterations", "1", "--json"];
    let Some(output) = dmalane(&model, &args) else { return };
    assert!(output.status.success(), "{}", text(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = json["figures"].as_array().unwrap();
    println!("{} figures, {:?}", figures.len(), model.counts());
    let integrity = json["integrity"].as_array().unwrap();
    let right = integrity.iter().all(|one| one["ok"] == one["threads"]);
    assert!(json["passed"] == true && integrity.len() >= 3 * count && right, "{integrity:?}");
    // HBM, DDR and both; read, write and both ways. The driver has one kind of pages.
    let mut kinds: Vec<String> = figures
        .iter()
        .map(|figure| [&figure["memory"], &figure["direction"]].map(Value::to_string).join(" "))
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!((kinds.len(), figures.len()), (9, 9 * count), "{kinds:?}");
    assert!(model.counts().channels.len() == 2 && model.pairs() == 0);
    assert_eq!(model.violations(), Vec::<String>::new());
}

#[test]
fn validate_sweeps_all_memory_in_each_direction() {
    sweep("4KiB,16KiB,64KiB,256KiB,1MiB", 5, "4");
}

#[test]
#[ignore = "up to 64 MiB for each of 8 threads: scripts/nightly"]
fn validate_sweeps_all_memory_in_each_direction_up_to_64_mib() {
    let sizes: Vec<_> = (0..15).map(|power| (4096u64 << power).to_string()).collect();
    sweep(&sizes.join(","), 15, "8");
}

#[test]
fn load_and_validate_use_both_channels() {
    let (model, len) = (DriverModel::new(Version::KNOWN).unwrap(), 5 * MIB + 7);
    let path = file("slash-load-raw", len);
    let Some(output) = dmalane(&model, &["load", path.to_str().unwrap(), "-d", "slash:0", "--json"]) else { return };
    assert!(output.status.success(), "{}", text(&output));
    assert_there(&model, DDR.0, len, "load");
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let args = "validate -d slash:0,ring=3 --buffer-size 1MiB --iterations 2 -v";
    let output = dmalane(&model, &args.split(' ').collect::<Vec<_>>()).unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(model.counts().rings, [[3; 3]; 2]);
    let moved = model.counts().channels;
    assert!(moved.len() == 2 && model.pairs() == 0, "{moved:?}");
    // The same of a lent card, within the memory that was granted.
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let (vrtd, device, _folder) = lent(&model);
    let args = ["validate", "-d", &device, "-j", "2", "--buffer-size", "1MiB", "--iterations", "2", "--offset", "2MiB"];
    let output = dmalane(&model, &args).unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(model.counts().channels.len() == 2 && model.pairs() == 0 && vrtd.lent().is_empty());
    assert_eq!(vrtd.requests()[&10], 3, "a piece of each memory");
    // A version that is not known.
    let old = DriverModel::new(Version { info: 60, ..Version::KNOWN }).unwrap();
    let output = dmalane(&old, &["load", path.to_str().unwrap(), "-d", "slash:0"]).unwrap();
    let error = text(&output);
    assert!(output.status.code() == Some(1) && error.contains("INFO has 60 bytes"), "{error}");
}

#[test]
fn a_card_that_stops_answering_is_told_and_its_queues_are_stopped() {
    let path = file("slash-fails", 32 * MIB);
    for (fault, says) in [
        (Fault::Fails(libc::ETIME), "TRANSFER failed"),
        (Fault::Short, " bytes (TRANSFER)"),
        (Fault::Gone, "the queue cannot be stopped"),
    ] {
        let model = DriverModel::new(Version::KNOWN).unwrap();
        let mut left = 5;
        model.fail(move |request| {
            left -= i32::from(request == Request::Transfer);
            (left == 0 && request == Request::Transfer).then_some(fault)
        });
        let args = ["load", path.to_str().unwrap(), "-d", "slash:0"];
        let Some(output) = dmalane(&model, &args) else { return };
        let error = text(&output);
        assert_eq!(output.status.code(), Some(1), "{fault:?}: {error}");
        assert!(error.contains(says) && !error.contains("panicked"), "{fault:?}: {error}");
        assert!(!model.goes_on(), "{fault:?}: the queue pair was stopped");
        assert_eq!(model.pairs() == 0, fault != Fault::Gone, "{fault:?}");
    }
}
