//! Every kind of device, opened by name: the suite of all devices, and a load with nothing but the handle.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;

use dmalane::addr::CardAddr;
use dmalane::daemon::{Config, Listener, Server};
use dmalane::device::conformance::suite;
use dmalane::device::{AddressSpaceKind, Placement};
use dmalane::devices::vulkan::VulkanSpec;
use dmalane::devices::{Ability, KINDS};
use dmalane::load::{Error, Part, write_sample};
use dmalane::sim::{CardConfig, Workers};
use dmalane::vulkan::VulkanOptions;
use dmalane::{CardServer, DeviceSpec, FileOptions, HostModel, OpenOptions, error_chain, open_file};
use dmalane_fake_cuda::Fake;

const MIB: u64 = 1 << 20;

/// A small card.
const SMALL: &str = "soft,ddr=32MiB,hbm=32MiB";

/// Runs `test` with a device of each kind that needs no hardware, and options for it.
pub(crate) fn each_kind(mut test: impl FnMut(&DeviceSpec, &OpenOptions)) {
    let (default, folder) = (OpenOptions::default(), tempfile::tempdir().unwrap());
    for how in ["", ",flat"] {
        test(&format!("{SMALL}{how}").parse().unwrap(), &default);
    }
    test(&"ram:64MiB".parse().unwrap(), &default);

    let memory = folder.path().join("memory");
    File::create(&memory).unwrap().set_len(64 * MIB).unwrap();
    // Each test leaves data there.
    let overwrite = OpenOptions { overwrite: true, ..default.clone() };
    test(&format!("file:{}", memory.display()).parse().unwrap(), &overwrite);
    let node = folder.path().join("qdma01000-MM-0");
    std::fs::rename(memory, &node).unwrap();
    test(&format!("qdma:{}", node.display()).parse().unwrap(), &overwrite);

    let socket = folder.path().join("daemon");
    let listener = Listener::bind(&socket, 0o600, false).unwrap();
    let server = Server::new(Config::default(), |_| {}).unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let daemon = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
    test(&format!("daemon:{},ddr=32MiB,hbm=32MiB", socket.display()).parse().unwrap(), &default);
    drop(stop);
    daemon.join().unwrap();

    test(&format!("vfio-user:{}", served(folder.path().join("card"))).parse().unwrap(), &default);

    // The last two have files lie in several buffers of the driver, sparse ones too.
    for (sparse, largest) in [(true, None), (false, None), (false, Some(2 * MIB)), (true, Some(6 * MIB))] {
        on_gpu(sparse, largest, |spec| test(spec, &default));
    }

    let fake = Fake::turn();
    for binds in ["", ",vmm"] {
        test(&format!("cuda:0{binds},lib={}", fake.path()).parse().unwrap(), &default);
        fake.assert_clean(binds);
    }
}

/// Runs `test` with the first GPU, if there is one.
fn on_gpu(sparse: bool, largest: Option<u64>, test: impl FnOnce(&DeviceSpec)) {
    match dmalane::vulkan::gpus() {
        Ok(_) => {}
        Err(e) if std::env::var_os("DMALANE_NEED_GPU").is_none() => return println!("SKIPPED: {e}"),
        Err(e) => panic!("DMALANE_NEED_GPU is set: {e}"),
    }
    let options = VulkanOptions { sparse, largest, channels: Some(2), ..VulkanOptions::default() };
    test(&DeviceSpec::new("vulkan:0", VulkanSpec { gpu: "0".to_owned(), options }));
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
    let refused = || dmalane::open(&name).err().map(|e| error_chain(&e)).unwrap();
    let first = dmalane::open(&name).unwrap();
    assert!(refused().contains("another open device of this process, has locked it"), "{}", refused());
    drop(first);
    dmalane::open(&name).unwrap();
}

#[test]
fn every_kind_takes_the_suite() {
    let mut taken = BTreeSet::new();
    each_kind(|spec, options| {
        println!("{spec}");
        suite(|| options.device(spec).unwrap());
        // `validate` asks the kind whether there is data to keep.
        let has_files = options.device(spec).unwrap().backing_files().is_some();
        assert_eq!(has_files, spec.kind().has(Ability::KeepsData), "{spec}");
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
    each_kind(|spec, options| {
        println!("{spec}");
        let mut device = options.open(spec).unwrap();
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
        // Of the memory of a GPU of Vulkan the driver has an estimate, which other programs change.
        let is_estimate = spec.kind().name == "vulkan";
        assert!(is_estimate || device.memory().free_bytes() == free);
    });
}

#[test]
fn a_file_is_not_read_onto_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_sample(&mut File::create(&path).unwrap(), 2 * MIB, 1).unwrap();
    let (before, is_own) = (std::fs::read(&path).unwrap(), |e: &Error| matches!(e, Error::OwnMemory { .. }));
    let options = OpenOptions { overwrite: true, ..OpenOptions::default() };
    let mut device = options.open(&format!("file:{}", path.display()).parse().unwrap()).unwrap();
    let model = HostModel::open([&path], Default::default()).unwrap();
    assert!(is_own(&model.load_onto(&mut device, &Default::default(), |_| {}).unwrap_err()));
    let first = model.tensors().next().unwrap();
    let part = Part { name: first.name.clone(), bytes: 0..first.len, to: 0 };
    let watch = &mut |_| ControlFlow::Continue(());
    assert!(is_own(&model.read_parts_onto(&mut device, CardAddr::new(0).into(), &[part], watch).unwrap_err()));
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn sizes_of_the_software_card_are_rounded_up_to_what_the_help_says() {
    let card = OpenOptions::default().device(&"soft,ddr=1,hbm=1,flat".parse().unwrap()).unwrap();
    let regions: Vec<_> = card.regions().iter().map(|region| (&*region.name, region.span.len())).collect();
    assert_eq!(regions, [("ddr", 2 * MIB), ("hbm0", 2 * MIB), ("hbm1", 2 * MIB)]);
}

#[test]
fn striped_buffers_need_an_mmu() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_sample(&mut File::create(&path).unwrap(), 5 * MIB, 1).unwrap();
    let load = |flat, placement: &str| {
        let options = OpenOptions { flat, ..OpenOptions::default() };
        let mut device = options.open(&SMALL.parse().unwrap()).unwrap();
        let mut inputs = [open_file(&path, FileOptions::default()).unwrap()];
        let loaded = device.load(&mut inputs, &placement.parse().unwrap(), &mut |_| {});
        loaded.map(drop).map_err(|e| error_chain(&e))
    };
    assert_eq!(load(false, "hbm"), Ok(()));
    assert_eq!(load(true, "hbm1"), Ok(()));
    let error = load(true, "hbm").unwrap_err();
    assert!(error.contains("its memory must be contiguous"), "{error}");
    let error = load(true, "nvm").unwrap_err();
    assert!(error.contains("no nvm memory, only ddr, hbm, hbm0, hbm1"), "{error}");
}

#[test]
fn a_queue_that_is_not_there_is_refused() {
    for (queues, why) in [
        ("2", "the device has no queue 2, it has 2"),
        ("0,auto", "queues are chosen by `auto` or by numbers, not by both"),
    ] {
        let drive = dmalane::load::DriveOptions { queues: queues.parse().unwrap(), ..Default::default() };
        let error = OpenOptions { drive, ..OpenOptions::default() }.open(&SMALL.parse().unwrap()).err().unwrap();
        assert_eq!(error.to_string(), why);
    }
}

#[test]
fn what_cannot_be_opened_says_which_device() {
    let gpus = ["vulkan:no such GPU", "cuda:0,lib=/nowhere"];
    for name in ["daemon:/nowhere", "vfio-user:/nowhere", "file:/nowhere", "ram:8EiB"].into_iter().chain(gpus) {
        let error = error_chain(&dmalane::open(name).err().unwrap());
        assert!(error.starts_with(&format!("cannot open {name}: ")), "{error}");
    }
}
