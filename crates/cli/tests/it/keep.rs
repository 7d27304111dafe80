//! Models that stay in memory, as users of the programs meet them, and while everybody is killed.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dmalane::addr::CardAddr;
use dmalane::devices::vulkan::VulkanSpec;
use dmalane::dma::VolatileSlice;
use dmalane::load::fill::FillError;
use dmalane::load::kept::{self, Attached, KeepOptions, KeeperClient};
use dmalane::load::{Error, Loaded, LoadedFile};
use dmalane::vulkan::VulkanOptions;
use dmalane::{DeviceSpec, HostModel, ModelOptions, OpenDevice, OpenFile, OpenOptions, error_chain};
use dmalane_fake_cuda::Fake;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{kills, sample, shard};

/// Time after which something that is waited for does not come.
const LONG: Duration = Duration::from_secs(60);

struct Keeping {
    folder: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Keeping {
    fn new(options: &[&str]) -> Self {
        let mut keeping = Self { folder: tempfile::tempdir().unwrap(), daemon: None };
        keeping.start(options);
        keeping
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&mut self, options: &[&str]) {
        let mut command = Command::new(crate::dmalaned());
        command.arg("keep").args(options).env("DMALANE_KEEP", self.socket());
        command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        while !lines.next().expect("it serves").unwrap().contains("keeps up to") {}
        // Its log is read to the end, so that it does not wait for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        self.daemon = Some(child);
    }

    /// Kills the keeper, or stops it in good order.
    fn end(&mut self, signal: Signal) {
        let mut child = self.daemon.take().unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        child.wait().unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.args(args).env("DMALANE_KEEP", self.socket()).envs(crate::WIDE).current_dir(self.folder.path());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The message of a command that fails.
    fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if self.daemon.is_some() {
            self.end(Signal::TERM);
        }
    }
}

#[test]
fn a_model_is_kept_and_used_wherever_one_is_named() {
    let keeping = Keeping::new(&["--memory", "64MiB"]);
    sample(keeping.at("m.safetensors"), 1 << 20, 1);
    let kept = keeping.json(&["keep", "m.safetensors", "--name", "org/m", "--json"]);
    assert_eq!((&kept["schema"], &kept["command"], &kept["name"]), (&1.into(), &"keep".into(), &"org/m".into()));
    let listed = keeping.json(&["kept", "--json"]);
    assert_eq!((&listed["models"][0]["id"], &listed["limit_bytes"]), (&kept["id"], &(64 << 20).into()));
    let metrics = String::from_utf8(keeping.run(&["kept", "--openmetrics"]).stdout).unwrap();
    assert!(metrics.contains("dmalane_kept_models 1\n") && metrics.ends_with("# EOF\n"), "{metrics}");
    for stage in ["keep", "read", "hash"] {
        let took = metrics.lines().find_map(|line| line.strip_prefix(&format!("dmalane_kept_{stage}_seconds_total ")));
        assert!(took.is_some_and(|took| took.parse::<f64>().unwrap() > 0.0), "{metrics}");
    }
    let table = String::from_utf8(keeping.run(&["kept"]).stdout).unwrap();
    assert!(table.contains("org/m") && table.contains("1 model\n"), "{table}");
    // The same manifest from memory as from the file, and a load that is verified against it.
    let of = |path: &str| String::from_utf8(keeping.run(&["manifest", path]).stdout).unwrap();
    let manifest = of("kept:org/m");
    assert_eq!(manifest, of("m.safetensors"));
    std::fs::write(keeping.at("manifest"), &manifest).unwrap();
    let load = ["load", "kept:org/m", "-d", "ram:4MiB", "--manifest", "manifest", "--verify", "--json"];
    assert_eq!(keeping.json(&load)["verified"], true);
    let id = kept["id"].as_str().unwrap();
    assert_eq!(keeping.json(&["read", &format!("kept:{}", &id[..12]), "--json"])["command"], "read");
    let says = keeping.fails(&["load", "kept:other", "-d", "ram:4MiB"]);
    assert!(says.contains("no model \"other\" is kept"), "{says}");
    // A manifest of another file keeps nothing.
    sample(keeping.at("m.safetensors"), 1 << 20, 2);
    let again = |file| keeping.json(&["keep", file, "--name", "org/m", "--json"])["replaced"].clone();
    assert_eq!(again("m.safetensors"), *id, "which model of this name made room is said");
    assert_eq!(again("m.safetensors"), Value::Null, "itself is no other one");
    sample(keeping.at("n.safetensors"), 1 << 20, 1);
    let text = String::from_utf8(keeping.run(&["keep", "n.safetensors", "--name", "org/m"]).stdout).unwrap();
    assert!(text.contains("\nIn place of another org/m, of hash "), "{text}");
    let says = keeping.fails(&["keep", "m.safetensors", "--manifest", "manifest"]);
    assert!(says.contains("nothing is kept: the files differ from the manifest"), "{says}");
    let says = keeping.fails(&["drop", "m"]);
    assert!(says.contains("cannot drop m"), "{says}");
    assert!(keeping.run(&["drop", "org/m"]).status.success());
    assert_eq!(keeping.json(&["kept", "--json"])["models"].as_array().unwrap().len(), 0);
    let holder = holder_of(&keeping.socket());
    assert!(holder.is_some(), "somebody holds models beside the keeper");
    drop(keeping);
    let start = Instant::now();
    while Path::new(&format!("/proc/{}", holder.unwrap())).exists() {
        assert!(start.elapsed() < LONG, "the holder ends with a keeper that ends in good order");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn list(keeping: &Keeping) -> Vec<kept::wire::KeptRow> {
    KeeperClient::connect(&keeping.socket()).unwrap().list().unwrap().models
}

/// The bytes of a tensor on a device.
fn read_back(device: &mut OpenDevice, file: &LoadedFile, index: usize) -> Vec<u8> {
    let mut bytes = vec![0; file.tensor(index).tensor.len as usize];
    let mut sink = |at: u64, view: VolatileSlice<'_>| {
        view.read(&mut bytes[at as usize..][..view.len()]);
    };
    device.read_back(file, index, &mut sink).unwrap();
    bytes
}

#[test]
fn a_model_in_memory_of_a_gpu_is_attached_to_without_a_copy() {
    let (fake, mut keeping) = (Fake::turn(), Keeping::new(&["--memory", "1MiB"]));
    sample(keeping.at("m.safetensors"), 3 << 20, 1);
    let library = fake.path().to_owned();
    let open = |gpu: u32| dmalane::open(&format!("cuda:{gpu},lib={library}")).unwrap();
    let on_gpu = ["keep", "m.safetensors", "-d", "cuda:0", "--json"];
    let output = keeping.command(&on_gpu).env("DMALANE_CUDA_LIB", &library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let kept: Value = serde_json::from_slice(&output.stdout).unwrap();
    let uuid = "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0";
    assert_eq!(kept["device"], uuid);
    // The process that has kept it has ended; now the keeper does, too.
    keeping.end(Signal::KILL);
    keeping.start(&["--memory", "1MiB"]);
    let row = |keeping: &Keeping| keeping.json(&["kept", "--json"])["models"][0].clone();
    let listed = row(&keeping);
    assert_eq!((&listed["device"], &listed["attached"], &listed["id"]), (&uuid.into(), &false.into(), &kept["id"]));
    assert!(listed["bytes"].as_u64() >= Some(2 << 20), "{listed}");
    let table = String::from_utf8(keeping.run(&["kept"]).stdout).unwrap();
    assert!(table.contains("GPU-a0a0a0a0 "), "{table}");
    let says = keeping.fails(&["load", "kept:m", "-d", "ram:8MiB"]);
    assert!(says.contains("\"m\" is kept in memory of GPU-a0a0a0a0-"), "{says}");
    assert!(says.contains("`dmalane keep` without -d keeps it in host memory, too"), "{says}");
    let keeper = KeeperClient::connect(&keeping.socket()).unwrap();
    fake.set("gpus", 2);
    let mut other = open(1);
    let refused = error_chain(&keeper.attach_onto("m", &mut other, false).unwrap_err());
    assert!(refused.contains("GPU-a0a0a0a0-") && refused.contains("and this device is GPU-a1a1a1a1-"), "{refused}");
    drop(other);
    let mut ram = dmalane::open("ram:8MiB").unwrap();
    let refused = error_chain(&keeper.attach_onto("m", &mut ram, false).unwrap_err());
    assert!(refused.contains("cannot lend its memory to other processes"), "{refused}");
    let mut device = open(0);
    // Whoever is told to stop compares nothing.
    device.stop_when(Some(Arc::new(AtomicBool::new(true))));
    let stopped = keeper.attach_onto("m", &mut device, true).unwrap_err();
    assert!(matches!(stopped, Error::Fill(FillError::Cancelled { .. })), "{stopped}");
    device.stop_when(None);
    let loaded = keeper.attach_onto("m", &mut device, true).unwrap();
    let host = HostModel::open([keeping.at("m.safetensors")], ModelOptions::default()).unwrap();
    let file = &loaded.files[0];
    assert!(file.is_lent() && file.tensors().len() == host.tensors().count());
    let is_right = |device: &mut OpenDevice| {
        host.tensors().enumerate().all(|(index, tensor)| {
            let read = host.read(&tensor.name, &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(file.tensor(index).tensor.name, tensor.name);
            read_back(device, file, index) == read.to_vec()
        })
    };
    assert!(is_right(&mut device));
    let at = CardAddr::new(file.tensor(0).va.unwrap().first().bits());
    assert!(device.write(at, b"x").is_err(), "it is lent for reading");
    let calls = ["cuMemCreate", "cuMemcpyDtoDAsync_v2"].map(|call| fake.calls(call));
    assert_eq!((fake.copied(), calls), (0, [0, 0]), "nothing is copied onto the GPU, and nothing allocated");
    // Another keeper knows who is attached, too. A drop takes nothing away from them.
    keeping.end(Signal::KILL);
    keeping.start(&["--memory", "1MiB"]);
    assert_eq!(row(&keeping)["attached"], true);
    assert!(keeping.run(&["drop", "m"]).status.success());
    assert_eq!(row(&keeping), Value::Null);
    assert!(is_right(&mut device));
    device.unload(loaded).unwrap();
    // Bytes that do not arrive on the GPU are not kept.
    let options = KeepOptions { socket: Some(keeping.socket()), ..KeepOptions::default() };
    let keep = |device: &mut OpenDevice, options: &KeepOptions| {
        kept::keep(Some(device), [keeping.at("m.safetensors")], options, |_| ControlFlow::Continue(()))
    };
    fake.lose(1);
    let refused = error_chain(&keep(&mut device, &options).unwrap_err());
    assert!(refused.contains("the bytes that the device gave back: "), "{refused}");
    assert_eq!(row(&keeping), Value::Null);
    let shared = KeepOptions { shared: true, ..options.clone() };
    let refused = error_chain(&keep(&mut device, &shared).unwrap_err());
    assert!(refused.contains("memory of a device cannot be sealed"), "{refused}");
    let (model, _) = keep(&mut device, &options).unwrap();
    let loaded = KeeperClient::connect(&keeping.socket()).unwrap().attach_onto(&model.id, &mut device, false).unwrap();
    assert_eq!(row(&keeping)["attached"], true);
    device.unload(loaded).unwrap();
    assert_eq!(row(&keeping)["attached"], false);
    drop(device);
    fake.assert_clean("kept on the GPU");
}

#[test]
fn models_on_a_gpu_make_room_for_others_unless_somebody_is_attached() {
    let (fake, keeping) = (Fake::turn(), Keeping::new(&["--memory", "1MiB"]));
    for (name, bytes) in [("a", 3 << 20), ("b", 3 << 20), ("c", 5 << 20), ("d", 13 << 20), ("e", 1 << 20)] {
        sample(keeping.at(&format!("{name}.safetensors")), bytes, bytes);
    }
    // In granules of 2 MiB, 4 MiB are free beside a and b.
    fake.set("memory", 12 << 20);
    let options = KeepOptions { socket: Some(keeping.socket()), ..KeepOptions::default() };
    let open = || dmalane::open(&format!("cuda:0,lib={}", fake.path())).unwrap();
    let keep_on = |gpu: &mut OpenDevice, name: &str| {
        let path = keeping.at(&format!("{name}.safetensors"));
        kept::keep(Some(gpu), [path], &options, |_| ControlFlow::Continue(()))
    };
    let keep = |name: &str| keep_on(&mut open(), name);
    let names = || {
        let mut names: Vec<String> = list(&keeping).into_iter().map(|model| model.name).collect();
        names.sort();
        names.concat()
    };
    let keeper = KeeperClient::connect(&keeping.socket()).unwrap();
    keep("a").unwrap();
    keep("b").unwrap();
    let refused = |name: &str| keep(name).unwrap_err().to_string();
    // The one that was used last stays, and so do both while somebody is attached.
    let mut gpu = open();
    let first = keeper.attach_onto("a", &mut gpu, false).unwrap();
    let second = keeper.attach_onto("b", &mut gpu, false).unwrap();
    let text = refused("c");
    assert!(text.contains("2097152 bytes are missing") && text.contains("attached have 0"), "{text}");
    gpu.unload(first).unwrap();
    gpu.unload(second).unwrap();
    let text = refused("d");
    assert!(text.contains("10485760 bytes are missing") && text.contains("attached have 8388608"), "{text}");
    assert_eq!(names(), "ab", "what can never fit takes nothing away");
    // On a device that was open all the time.
    keep_on(&mut gpu, "c").unwrap();
    assert_eq!((names(), keeper.list().unwrap().evicted), ("bc".to_owned(), 1));
    // Another one of its name makes room first, although it was used last.
    sample(keeping.at("c.safetensors"), 5 << 20, 1);
    keep_on(&mut gpu, "c").unwrap();
    assert_eq!(names(), "bc");
    // There is room, but the driver has none.
    fake.fail("cuMemCreate", 1, 2);
    keep_on(&mut gpu, "e").unwrap();
    assert_eq!((names(), keeper.list().unwrap().evicted), ("ce".to_owned(), 3));
    let full = (1..=2).map(|n| fake.fail("cuMemCreate", n, 2)).count();
    let text = error_chain(&keep_on(&mut gpu, "b").unwrap_err());
    assert!(full == 2 && text.contains("cannot keep it in memory of the device: "), "{text}");
    drop(gpu);
    fake.assert_clean("room");
}

#[test]
fn a_gpu_that_is_full_of_kept_models_takes_another_one() {
    let (fake, keeping) = (Fake::turn(), Keeping::new(&["--memory", "1MiB"]));
    // Each process has a driver of its own, so that one fails as another one's models would have it.
    sample(keeping.at("m.safetensors"), 3 << 20, 1);
    let keep = |memory: &str| {
        let mut command = keeping.command(&["keep", "m.safetensors", "-d", "cuda:0"]);
        command.env("DMALANE_CUDA_LIB", fake.path()).env("FAKE_CUDA_MEMORY", memory);
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let says = keep("2097152");
    assert!(says.contains("2097152 bytes are missing on GPU-") && says.contains("attached have 0"), "{says}");
    assert_eq!(keep("268435456"), "");
    let says = keep("2097152");
    assert!(says.contains("cannot keep it in memory of the device"), "after two seconds: {says}");
    assert_eq!(keeping.json(&["kept", "--json"])["evicted"], 1);
    fake.assert_clean("a full GPU");
}

/// Where a driver shares its memory, which lavapipe does in guests alone (`DMALANE_NEED_DMA_BUF`).
#[test]
fn a_model_is_kept_in_memory_of_a_gpu_of_vulkan() {
    let skipped = |why: &str| {
        assert!(std::env::var_os("DMALANE_NEED_DMA_BUF").is_none(), "DMALANE_NEED_DMA_BUF is set: {why}");
        println!("SKIPPED: {why}");
    };
    // The keeper's client takes memory in pieces, of which the other one knows nothing.
    let open = |largest| {
        let options = VulkanOptions { sparse: false, largest, ..VulkanOptions::default() };
        OpenOptions::default().open(&DeviceSpec::new("vulkan:0", VulkanSpec { gpu: "0".to_owned(), options }))
    };
    let mut device = match open(Some(1 << 20)) {
        Ok(device) => device,
        Err(e) => return skipped(&error_chain(&e)),
    };
    if let Err(why) = device.lending() {
        return skipped(&why.to_string());
    }
    let keeping = Keeping::new(&["--memory", "1MiB"]);
    let path = ["a", "b"].map(|name| keeping.at(name));
    shard(&path[0], 3 << 20, 'a');
    shard(&path[1], 5 << 19, 'b');
    let watch = |_| ControlFlow::Continue(());
    let options = KeepOptions { name: Some("m".to_owned()), socket: Some(keeping.socket()), ..KeepOptions::default() };
    let (kept, _) = kept::keep(Some(&mut device), &path, &options, watch).unwrap();
    assert!(kept.device.as_ref().is_some_and(|name| name.starts_with("vulkan:")), "{:?}", kept.device);
    let pieces: Vec<usize> = kept.files.iter().map(|file| file.placed.as_ref().unwrap().pieces.len()).collect();
    assert!(pieces.iter().all(|n| *n > 1) && kept.descriptors() == 2 + pieces.iter().sum::<usize>(), "{pieces:?}");
    let bytes_of = |device: &mut OpenDevice, loaded: &Loaded| {
        loaded.files.iter().map(|file| read_back(device, file, 0)).collect::<Vec<_>>()
    };
    let loaded = kept::attach_or_keep_on(&mut device, &path, &options, false, watch).unwrap().expect("it is kept");
    let bytes = bytes_of(&mut device, &loaded);
    device.unload(loaded).unwrap();
    drop(device);
    let (mut other, keeper) = (open(None).unwrap(), KeeperClient::connect(&keeping.socket()).unwrap());
    let loaded = keeper.attach_onto("m", &mut other, true).unwrap();
    keeper.drop_model("m").unwrap();
    let at = loaded.files[1].tensor(0).va.unwrap().first();
    let at = other.address_space().at(at);
    assert!(other.write(at, &[1; 8]).is_err(), "for reading");
    assert!(bytes_of(&mut other, &loaded) == bytes && bytes[0] != bytes[1]);
    other.unload(loaded).unwrap();
}

/// The unit that packages install, beside a real manager, whose store holds the model.
#[test]
fn a_model_outlives_the_keeper_in_the_store_of_systemd() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/try_keep_service");
    let programs = Path::new(env!("CARGO_BIN_EXE_dmalaned")).parent().unwrap();
    let tried = Command::new(script).arg(programs).output().unwrap();
    let said = String::from_utf8_lossy(&tried.stdout);
    match tried.status.code() {
        Some(77) => println!("SKIPPED: {said}"),
        code => assert!(code == Some(0), "{said}{}", String::from_utf8_lossy(&tried.stderr)),
    }
}

#[test]
fn each_gpu_has_a_copy_of_its_own() {
    let (fake, keeping) = (Fake::turn(), Keeping::new(&["--memory", "8MiB"]));
    fake.set("gpus", 3);
    sample(keeping.at("m.safetensors"), 1 << 20, 1);
    let path = [keeping.at("m.safetensors")];
    let open = |gpu: u32| dmalane::open(&format!("cuda:{gpu},lib={}", fake.path())).unwrap();
    let options = KeepOptions { socket: Some(keeping.socket()), ..KeepOptions::default() };
    let watch = |_| ControlFlow::Continue(());
    let attach = |device: &mut OpenDevice| {
        let before = fake.copied();
        let loaded = kept::attach_or_keep_on(device, &path, &options, true, watch).unwrap().unwrap();
        let bytes = read_back(device, &loaded.files[0], 0);
        device.unload(loaded).unwrap();
        (bytes, fake.copied() > before)
    };
    let [first, second, again] = [1, 0, 1].map(|gpu| attach(&mut open(gpu)));
    assert!(first.0 == second.0 && first.0 == again.0 && !first.0.is_empty());
    assert_eq!([first.1, second.1, again.1], [true, true, false], "neither takes the other one's place");
    let keeper = KeeperClient::connect(&keeping.socket()).unwrap();
    let elsewhere = keeper.attach_onto("m", &mut open(2), false).unwrap_err();
    assert!(error_chain(&elsewhere).contains("and this device is GPU-a2a2a2a2-"), "{elsewhere}");
    // For who can use either, the one in the host's memory is better than another GPU's.
    kept::keep(None, &path, &options, watch).unwrap();
    assert!(keeper.attach_rather("m", Some("GPU-a2")).is_ok() && keeper.attach("m").is_ok());
    assert_eq!(keeping.json(&["kept", "--json"])["models"].as_array().unwrap().len(), 3);
    assert!(keeping.run(&["drop", "m"]).status.success());
    assert_eq!(keeping.json(&["kept", "--json"])["models"].as_array().unwrap().len(), 0);
    fake.assert_clean("one for each GPU");
}

/// Writes an array by columns.
fn by_columns(path: &Path) {
    let head = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }";
    let mut array = b"\x93NUMPY\x01\x00".to_vec();
    array.extend(118_u16.to_le_bytes());
    array.extend(format!("{head:<117}\n").bytes().chain(0..6));
    std::fs::write(path, array).unwrap();
}

#[test]
fn an_array_by_columns_is_not_kept_on_a_gpu() {
    let (fake, keeping) = (Fake::turn(), Keeping::new(&["--memory", "1MiB"]));
    by_columns(&keeping.at("a.npy"));
    let output = keeping.command(&["keep", "a.npy", "-d", "cuda:0"]).env("DMALANE_CUDA_LIB", fake.path()).output();
    let says = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(says.contains("a.npy") && says.contains("by columns"), "{says}");
    fake.assert_clean("an array by columns");
}

#[test]
fn a_keeper_of_another_user_is_asked_before_the_work() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can be two users");
        return;
    }
    let (fake, keeping) = (Fake::turn(), Keeping::new(&["--memory", "1MiB", "--mode", "666"]));
    std::fs::set_permissions(keeping.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    // Refused once it is to be loaded.
    by_columns(&keeping.at("a.npy"));
    // Where everybody may run them.
    for (from, to) in [(env!("CARGO_BIN_EXE_dmalane"), "dmalane"), (fake.path(), "libcuda.so")] {
        std::fs::copy(from, keeping.at(to)).unwrap();
    }
    let mut command = Command::new(keeping.at("dmalane"));
    command.args(["keep", "a.npy", "-d", "cuda:0,lib=./libcuda.so"]).env("DMALANE_KEEP", keeping.socket());
    let output = command.current_dir(keeping.folder.path()).uid(65534).gid(65534).output().unwrap();
    let says = String::from_utf8(output.stderr).unwrap();
    assert!(says.contains("a keeper keeps memory of a device for its own user alone"), "{says}");
    fake.assert_clean("a keeper of another user");
}

#[test]
fn what_an_index_leaves_out_is_not_attached_to_on_a_gpu() {
    let (fake, keeping) = (Fake::turn(), Keeping::new(&["--memory", "1MiB"]));
    let folder = keeping.at("model");
    std::fs::create_dir(&folder).unwrap();
    for letter in ['a', 'b'] {
        crate::shard(folder.join(format!("{letter}.safetensors")), 1 << 20, letter);
    }
    crate::index(&folder, &["a.safetensors", "b.safetensors"]);
    let path = folder.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let map = index["weight_map"].as_object_mut().unwrap();
    let left_out: Vec<String> = map.keys().step_by(2).cloned().collect();
    left_out.iter().for_each(|name| drop(map.remove(name)));
    std::fs::write(&path, index.to_string()).unwrap();
    let options = KeepOptions { socket: Some(keeping.socket()), ..KeepOptions::default() };
    let mut device = dmalane::open(&format!("cuda:0,lib={}", fake.path())).unwrap();
    let watch = |_| ControlFlow::Continue(());
    kept::keep(Some(&mut device), [&folder], &options, watch).unwrap();
    let loaded = KeeperClient::connect(&keeping.socket()).unwrap().attach_onto("model", &mut device, true).unwrap();
    let host = HostModel::open([&folder], ModelOptions::default()).unwrap();
    let there: Vec<_> = loaded.files.iter().flat_map(|file| file.tensors()).map(|t| t.tensor.name.clone()).collect();
    assert_eq!(there, host.tensors().map(|tensor| tensor.name.clone()).collect::<Vec<_>>());
    assert!(!left_out.is_empty() && left_out.iter().all(|name| !there.contains(name)));
    for file in &loaded.files {
        for (index, tensor) in file.tensors().enumerate() {
            let read = host.read(&tensor.tensor.name, &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(read_back(&mut device, file, index), read.to_vec(), "{}", tensor.tensor.name);
        }
    }
    device.unload(loaded).unwrap();
    drop(device);
    fake.assert_clean("an index");
}

#[test]
fn without_a_keeper_it_is_said_how_to_start_one() {
    let mut keeping = Keeping::new(&[]);
    keeping.end(Signal::TERM);
    sample(keeping.at("m.safetensors"), 1 << 20, 1);
    for args in [&["kept"][..], &["keep", "m.safetensors"], &["load", "kept:m", "-d", "ram:4MiB"]] {
        let says = keeping.fails(args);
        assert!(says.contains("(dmalaned keep starts one; "), "{says}");
    }
    // One that cannot load its first model ends.
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalaned"));
    command.args(["keep", "nothing.safetensors"]).env("DMALANE_KEEP", keeping.socket()).envs(crate::WIDE);
    let output = command.output().unwrap();
    let says = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && says.contains("cannot keep nothing.safetensors"), "{says}");
}

/// The process that holds models for the keeper of a socket.
fn holder_of(socket: &Path) -> Option<u32> {
    let held = format!("{}.held", socket.display());
    let is_it = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == held.as_bytes())
    };
    let names = std::fs::read_dir("/proc").unwrap().flatten();
    names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it)
}

/// Memfds that a process has open.
fn memfds(pid: u32) -> usize {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let is_memfd = |path: PathBuf| path.to_string_lossy().starts_with("/memfd:");
    open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(is_memfd)).count()
}

fn bytes_of(lent: Attached) -> Vec<u8> {
    let files = lent.into_files().into_iter().map(|file| OpenFile::of(&file).unwrap()).collect::<Vec<_>>();
    let model = HostModel::of_files(files, ModelOptions::default()).unwrap();
    let tensors = model.read_all(None, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    tensors.iter().flat_map(|tensor| tensor.to_vec()).collect()
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[test]
fn a_holder_that_is_killed_is_replaced() {
    let mut keeping = Keeping::new(&["--memory", "16MiB"]);
    sample(keeping.at("m.safetensors"), 1 << 20, 1);
    let kept = keeping.json(&["keep", "m.safetensors", "--json"]);
    let (holder, start) = (holder_of(&keeping.socket()).unwrap(), Instant::now());
    kill_process(Pid::from_raw(holder.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let has_all = |pid: u32| pid != holder && memfds(pid) == 3;
    while !holder_of(&keeping.socket()).is_some_and(has_all) {
        assert!(start.elapsed() < LONG, "another one holds the description, the manifest and the file");
        std::thread::sleep(Duration::from_millis(5));
    }
    keeping.end(Signal::KILL);
    keeping.start(&["--memory", "16MiB"]);
    assert_eq!(keeping.json(&["kept", "--json"])["models"][0]["id"], kept["id"]);
}

#[test]
fn whoever_is_killed_no_byte_differs_and_nothing_is_lost() {
    let mut keeping = Keeping::new(&["--memory", "16MiB"]);
    let expected: Vec<Vec<u8>> = (0..4)
        .map(|n| {
            let path = keeping.at(&format!("m{n}.safetensors"));
            sample(&path, 2 << 20, n);
            let model = HostModel::open([&path], ModelOptions::default()).unwrap();
            let all = model.read_all(None, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
            all.iter().flat_map(|tensor| tensor.to_vec()).collect()
        })
        .collect();
    assert!(keeping.run(&["keep", "m0.safetensors"]).status.success());
    // Attached all the time: it makes no room.
    let held = KeeperClient::connect(&keeping.socket()).unwrap().attach("m0").unwrap();
    let (stop, attached, slowest) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let socket = keeping.socket();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(7);
            while !stop.load(Ordering::Relaxed) {
                let n = random.below(4);
                let start = Instant::now();
                let lent = KeeperClient::connect(&socket).and_then(|keeper| keeper.attach(&format!("m{n}")));
                slowest.fetch_max(start.elapsed().as_millis() as u64, Ordering::Relaxed);
                if let Ok(lent) = lent {
                    assert!(bytes_of(lent) == expected[n as usize], "m{n} differs");
                    attached.fetch_add(1, Ordering::Relaxed);
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        // The keeper, a client, or both, as many times each.
        for kill in 0..3 * kills() {
            let n = random.below(3) + 1;
            let (keeper, client) = (kill % 3 != 1, kill % 3 != 0 || random.below(2) == 0);
            let client = client.then(|| match random.below(2) {
                0 => keeping.command(&["keep", &format!("m{n}.safetensors")]),
                _ => keeping.command(&["read", &format!("kept:m{n}")]),
            });
            let client = client.map(|mut client| client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            if keeper {
                keeping.end(Signal::KILL);
                keeping.start(&["--memory", "16MiB"]);
            }
            if let Some(mut client) = client {
                if kill % 3 != 0 {
                    let _ = client.kill();
                }
                client.wait().unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let keeper = KeeperClient::connect(&socket).unwrap();
    assert!(bytes_of(held) == expected[0], "who is attached never notices");
    assert!(bytes_of(keeper.attach("m0").unwrap()) == expected[0], "it was taken back each time");
    assert!(attached.load(Ordering::Relaxed) > 0);
    println!("{} attached, the slowest in {} ms", attached.into_inner(), slowest.load(Ordering::Relaxed));
    assert!(slowest.into_inner() < LONG.as_millis() as u64);
    // The keeper and the holder have the memory of what is listed, and no other, as soon as it is closed.
    let wanted = || keeper.list().unwrap().models.iter().map(|model| model.files + 2).sum::<usize>();
    let (daemon, holder) = (keeping.daemon.as_ref().unwrap().id(), holder_of(&socket).unwrap());
    let start = Instant::now();
    while [memfds(daemon), memfds(holder)] != [wanted(); 2] {
        let found = [memfds(daemon), memfds(holder)];
        assert!(start.elapsed() < LONG, "{found:?}, and {} are listed", wanted());
        std::thread::sleep(Duration::from_millis(10));
    }
}
