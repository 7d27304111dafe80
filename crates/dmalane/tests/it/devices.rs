//! Every kind of device, opened by name: the suite of all devices, and a load with nothing but the handle.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;

use dmalane::daemon::{Config, Listener, Server};
use dmalane::device::conformance::suite;
use dmalane::device::{AddressSpaceKind, Placement};
use dmalane::load::write_sample;
use dmalane::registry::KINDS;
use dmalane::sim::{CardConfig, Workers};
use dmalane::vulkan::{Messages, VulkanOptions};
use dmalane::{CardServer, DeviceSpec, FileOptions, OpenError, OpenOptions, open_file};
use dmalane_fake_cuda::Fake;

const MIB: u64 = 1 << 20;

/// Options for a small card.
fn small(workers: Option<Workers>) -> OpenOptions {
    OpenOptions { card_ddr: Some(32 * MIB), card_hbm: Some(32 * MIB), workers, ..OpenOptions::default() }
}

/// Runs `test` with a device of each kind that needs no hardware: its name, and options for it.
fn each_kind(mut test: impl FnMut(&str, &OpenOptions)) {
    let folder = tempfile::tempdir().unwrap();
    for workers in [Workers::Inline, Workers::One, Workers::PerChannel] {
        test("soft", &small(Some(workers)));
    }
    test("soft", &OpenOptions { flat: true, ..small(None) });
    test("ram:64MiB", &OpenOptions::default());

    let memory = folder.path().join("memory");
    File::create(&memory).unwrap().set_len(64 * MIB).unwrap();
    // Each test leaves data there.
    test(&format!("file:{}", memory.display()), &OpenOptions { overwrite: true, ..OpenOptions::default() });

    let socket = folder.path().join("daemon");
    let listener = Listener::bind(&socket, 0o600).unwrap();
    let server = Server::new(Config::default(), |_| {}).unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
    test(&format!("daemon:{}", socket.display()), &small(None));
    drop(stop);
    daemon.join().unwrap();

    test(&format!("vfio-user:{}", served(folder.path().join("card"))), &OpenOptions::default());

    // The last two have files lie in several buffers of the driver, sparse ones too.
    for (flat, largest) in [(false, None), (true, None), (true, Some(2 * MIB)), (false, Some(6 * MIB))] {
        on_gpu(flat, largest, &mut test);
    }

    let fake = Fake::turn();
    for binds in ["", ",vmm"] {
        test(&format!("cuda:0{binds},lib={}", fake.path()), &OpenOptions::default());
        fake.assert_clean(binds);
    }
}

/// Runs `test` with the first GPU, if there is one. Any message of the validation layers fails it.
fn on_gpu(flat: bool, largest: Option<u64>, test: &mut impl FnMut(&str, &OpenOptions)) {
    match dmalane::vulkan::gpus() {
        Ok(_) => {}
        Err(e) if std::env::var_os("DMALANE_NEED_GPU").is_none() => return println!("SKIPPED: {e}"),
        Err(e) => panic!("DMALANE_NEED_GPU is set: {e}"),
    }
    let messages = Messages::new();
    let vulkan =
        VulkanOptions { largest, channels: Some(2), validation: Some(messages.clone()), ..VulkanOptions::default() };
    test("vulkan:0", &OpenOptions { flat, vulkan: Some(vulkan), ..OpenOptions::default() });
    let messages = messages.take();
    assert!(messages.is_empty(), "{} messages:\n{}", messages.len(), messages.join("\n"));
}

/// The socket of a card that a thread serves as long as this process runs, to one client at a time.
fn served(socket: PathBuf) -> String {
    let config = CardConfig { ddr: 32 * MIB, hbm: 32 * MIB, workers: Workers::PerChannel, ..CardConfig::default() };
    let server = CardServer::bind(&socket, config).unwrap();
    thread::spawn(move || while server.accept().unwrap().serve().is_ok() {});
    socket.display().to_string()
}

#[test]
fn a_file_is_open_once() {
    let folder = tempfile::tempdir().unwrap();
    let memory = folder.path().join("memory");
    File::create(&memory).unwrap().set_len(MIB).unwrap();
    let name = format!("file:{}", memory.display());
    let refused = || dmalane::open(&name).err().map(|e| e.to_string()).unwrap();
    let first = dmalane::open(&name).unwrap();
    assert!(refused().contains("another open device of this process, has locked it"), "{}", refused());
    drop(first);
    dmalane::open(&name).unwrap();
}

#[test]
fn every_kind_takes_the_suite() {
    let mut taken = BTreeSet::new();
    each_kind(|name, options| {
        println!("{name}");
        let spec: DeviceSpec = name.parse().unwrap();
        suite(|| options.device(&spec).unwrap());
        // `validate` asks the options whether there is data to keep.
        if options.device(&spec).unwrap().backing_files().is_some() {
            let has = |option| spec.kind().options.contains(option);
            assert!(["file", "overwrite"].iter().all(has), "{name} has files, and not the options of such a device");
        }
        taken.insert(spec.kind().name);
    });
    let missing = KINDS.iter().map(|kind| kind.name).filter(|name| !taken.contains(name));
    let has_gpu = dmalane::vulkan::gpus().is_ok();
    let missing: Vec<_> = missing.filter(|name| has_gpu || *name != "vulkan").collect();
    // crates/slash and slash.rs beside this file test slash and vrtd; vfio needs hardware (scripts/vm).
    let missing: BTreeSet<_> = missing.into_iter().collect();
    assert_eq!(missing, ["slash", "vfio", "vrtd"].into(), "a kind without a line in `each_kind`");
}

#[test]
fn every_kind_is_loaded_to_verified_and_unloaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_sample(&mut File::create(&path).unwrap(), 5 * MIB + 123, 1).unwrap();
    each_kind(|name, options| {
        println!("{name}");
        let mut device = options.open(&name.parse().unwrap()).unwrap();
        let free = device.memory().free_bytes();
        let mut inputs = [open_file(&path, FileOptions::default()).unwrap()];
        let loaded = device.load(&mut inputs, &Placement::Default, &mut |_| {}).unwrap();
        device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
        // A tensor by its name, and its bytes at its address.
        let file = &loaded.files[0];
        let largest = file.tensors().max_by_key(|t| t.tensor.len).unwrap();
        let found = &loaded[&largest.tensor.name];
        assert_eq!(found.va, largest.va);
        assert!(loaded.get("no such tensor").is_none());
        let va = found.va.unwrap();
        let at = device.address_space().at(va.first());
        let mut bytes = vec![0; va.len() as usize];
        device.read(at, &mut bytes).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert!(bytes == whole[largest.tensor.at.bits() as usize..][..bytes.len()]);
        // Without an MMU, tensors lie where their memory is.
        if device.address_space().kind() == AddressSpaceKind::Flat {
            let segments: Vec<_> = file.bo.as_ref().unwrap().sg().segments().collect();
            assert_eq!((segments.len(), segments[0].addr.bits()), (1, file.ranges[0].first().bits()));
        }
        let longest = device.address_space().longest();
        assert!(file.ranges.iter().all(|range| range.len() <= longest));
        assert_eq!(file.ranges.len() > 1, longest < 5 * MIB, "several ranges where one is too short");
        device.unload(loaded).unwrap();
        assert_eq!(device.memory().free_bytes(), free);
    });
}

#[test]
fn the_pages_name_every_kind() {
    let page = |path: &str| {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
        std::fs::read_to_string(path).unwrap()
    };
    let names = |text: &str, kind: &str| text.contains(&format!("`{kind}`")) || text.contains(&format!("`{kind}:"));
    for path in ["README.md", "docs/reference/cli.md"] {
        let rows: String = page(path).lines().filter(|line| line.starts_with("| `")).collect();
        let missing: Vec<_> = KINDS.iter().map(|kind| kind.name).filter(|kind| !names(&rows, kind)).collect();
        assert!(missing.is_empty(), "{path} has no row of {missing:?}");
    }
    for path in ["docs/how-to/load.md", "docs/how-to/replay-binds.md"] {
        // Lines may be wrapped anywhere.
        let text = page(path).split_whitespace().collect::<Vec<_>>().join(" ");
        let list = text.split_once("flat addresses (").unwrap().1.split_once("GPUs without").unwrap().0;
        let flat = KINDS.iter().filter(|kind| names(list, kind.name)).map(|kind| kind.name);
        let expected = KINDS.iter().filter(|kind| kind.always_flat).map(|kind| kind.name);
        assert_eq!(flat.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{path}");
    }
}

#[test]
fn sizes_of_the_software_card_are_rounded_up_to_what_the_help_says() {
    let options = OpenOptions { card_ddr: Some(1), card_hbm: Some(1), flat: true, ..OpenOptions::default() };
    let card = options.device(&"soft".parse().unwrap()).unwrap();
    let regions: Vec<_> = card.regions().iter().map(|region| (&*region.name, region.span.len())).collect();
    assert_eq!(regions, [("ddr", 2 * MIB), ("hbm0", 2 * MIB), ("hbm1", 2 * MIB)]);
}

#[test]
fn striped_buffers_need_an_mmu() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_sample(&mut File::create(&path).unwrap(), 5 * MIB, 1).unwrap();
    let load = |flat, placement: &str| {
        let mut device = OpenOptions { flat, ..small(None) }.open(&"soft".parse().unwrap()).unwrap();
        let mut inputs = [open_file(&path, FileOptions::default()).unwrap()];
        let loaded = device.load(&mut inputs, &placement.parse().unwrap(), &mut |_| {});
        loaded.map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(load(false, "hbm"), Ok(()));
    assert_eq!(load(true, "hbm1"), Ok(()));
    let error = load(true, "hbm").unwrap_err();
    assert!(error.contains("its memory must be contiguous"), "{error}");
    let error = load(true, "nvm").unwrap_err();
    assert!(error.contains("no nvm memory, only ddr, hbm0, hbm1"), "{error}");
}

#[test]
fn options_of_other_kinds_are_refused_by_name() {
    for (name, options, option) in [
        ("ram:1MiB", small(None), "card-ddr"),
        ("ram:1MiB", OpenOptions { ring: Some(16), ..OpenOptions::default() }, "ring"),
        ("file:/dev/zero", OpenOptions { seed: Some(1), ..OpenOptions::default() }, "seed"),
        ("vfio:0000:01:00.0", OpenOptions { workers: Some(Workers::One), ..OpenOptions::default() }, "workers"),
        ("daemon", OpenOptions { fragmentation: Some(0.0), ..OpenOptions::default() }, "fragmentation"),
        ("soft", OpenOptions { file: Some(Default::default()), ..OpenOptions::default() }, "file"),
    ] {
        let spec: DeviceSpec = name.parse().unwrap();
        let error = options.open(&spec).err().unwrap();
        assert!(matches!(&error, OpenError::Option { option: refused, .. } if *refused == option), "{name}: {error}");
        assert_eq!(error.to_string(), format!("a {} device has no option {option}", spec.kind().name));
    }
    let no_queue = OpenOptions {
        drive: dmalane::load::DriveOptions { queues: "2".parse().unwrap(), ..Default::default() },
        ..small(None)
    };
    let error = no_queue.open(&"soft".parse().unwrap()).err().unwrap();
    assert_eq!(error.to_string(), "the device has no queue 2, it has 2");
}

#[test]
fn what_cannot_be_opened_says_which_device() {
    let gpus = ["vulkan:no such GPU", "cuda:0,lib=/nowhere"];
    for name in ["daemon:/nowhere", "vfio-user:/nowhere", "file:/nowhere", "ram:8EiB"].into_iter().chain(gpus) {
        let error = dmalane::open(name).err().unwrap().to_string();
        assert!(error.starts_with(&format!("cannot open {name}: ")), "{error}");
    }
}
