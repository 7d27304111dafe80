//! A V80 over the model of its driver: loads to each memory, checked on the card.

use std::fs::{self, File};
use std::path::Path;

use dmalane::device::Placement;
use dmalane::devices::{KINDS, Listed};
use dmalane::load::{DriveOptions, write_sample};
use dmalane::slash::model::{DriverModel, Version, Vrtd};
use dmalane::slash::{HBM, SlashDevice, SlashOptions};
use dmalane::{FileOptions, OpenDevice, open_file};

const MIB: u64 = 1 << 20;

#[test]
fn files_are_loaded_to_each_memory_by_the_channels_of_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_sample(&mut File::create(&path).unwrap(), 24 * MIB + 123, 1).unwrap();
    let cases = [("ddr", [1, 2]), ("hbm0", [1, 1]), ("hbm1", [2, 2]), ("hbm", [1, 2])];
    for (lent, (placement, channels)) in [false, true].into_iter().flat_map(|lent| cases.map(|case| (lent, case))) {
        let model = DriverModel::new(Version::KNOWN).unwrap();
        let vrtd = Vrtd::new(&model).unwrap();
        let options = SlashOptions::default();
        let device = match lent {
            false => SlashDevice::with(model.kernel(), model.node().unwrap(), options),
            true => SlashDevice::from_vrtd_socket(vrtd.connect().unwrap(), 0, model.kernel(), options),
        };
        let device = device.unwrap();
        let mut device = OpenDevice::new(Box::new(device), DriveOptions::default()).unwrap();
        let mut inputs = [open_file(&path, FileOptions::default()).unwrap()];
        let placement: Placement = placement.parse().unwrap();
        let loaded = device.load(&mut inputs, &placement, &mut |_| {}).unwrap();
        // By its own queues, and then behind their back.
        device.verify(&loaded, &mut inputs, &mut |_| {}).unwrap();
        let file = fs::read(&path).unwrap();
        for tensor in loaded.files[0].tensors() {
            // An empty tensor has no address.
            let Some(va) = tensor.va else { continue };
            let mut there = vec![0; tensor.tensor.len as usize];
            model.peek(va.first().bits(), &mut there);
            let from = tensor.tensor.at.bits() as usize;
            assert!(there == file[from..from + there.len()], "{placement}: {}", tensor.tensor.name);
        }
        let counts = model.counts();
        let moved = |channel: u32| counts.channels.get(&channel).copied().unwrap_or(0);
        // The policy begins with those that the placement names, and moves work to one that is idle.
        assert!(channels.iter().all(|c| moved(*c) > MIB), "{placement}: {counts:?}");
        assert!(counts.small < MIB, "first bytes of a few operations: {counts:?}");
        let range = loaded.files[0].ranges[0];
        let border = HBM.0 + HBM.1 / 2;
        let crosses = range.first().bits() < border && range.last().bits() > border;
        assert_eq!(crosses, placement == Placement::HBM, "{placement}: {range:?}");
        assert!(counts.buffers.1 <= 8, "few buffers: {counts:?}");
        assert_eq!(vrtd.lent().is_empty(), !lent);
        device.unload(loaded).unwrap();
        assert!(vrtd.lent().is_empty(), "given back once nothing is loaded");
        drop((device, inputs));
        assert_eq!((model.violations(), model.pairs(), model.counts().buffers.0), (Vec::new(), 0, 0));
    }
}

/// Lists the devices of a kind on a machine whose file system is `root`.
fn listed(root: &Path, kind: &str) -> Vec<Listed> {
    KINDS.iter().find(|k| k.name == kind).unwrap().list(root)
}

#[test]
fn cards_are_listed_with_their_address_or_with_why_not() {
    let root = tempfile::tempdir().unwrap();
    let place = |path: &str| root.path().join(path);
    assert!(listed(root.path(), "slash").is_empty() && listed(root.path(), "vrtd").is_empty());
    let class = place("sys/class/slash/slash_qdma_ctl_0000:61:00.1");
    for folder in [&class, &place("dev"), &place("run")] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(class.join("uevent"), "DEVNAME=slash_qdma_ctl1\n").unwrap();
    fs::write(place("dev/slash_qdma_ctl1"), "").unwrap();
    // Its target is missing, so that root cannot use it either.
    std::os::unix::fs::symlink("nothing", place("dev/slash_qdma_ctl4")).unwrap();
    let [good, closed] = listed(root.path(), "slash").try_into().unwrap();
    assert_eq!((good.name.as_str(), good.supported), ("slash:1", true));
    assert_eq!(good.facts, [("pci", Some("0000:61:00.1".to_owned()))]);
    assert_eq!((closed.name.as_str(), closed.supported), ("slash:4", false));
    assert!(closed.about.contains("cannot be used: No such file"), "{}", closed.about);

    let socket = place("run/vrtd.sock");
    fs::write(&socket, "").unwrap();
    let [nobody] = listed(root.path(), "vrtd").try_into().unwrap();
    assert!(!nobody.supported && nobody.about.contains("is it running"), "{}", nobody.about);
    fs::remove_file(&socket).unwrap();
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let vrtd = Vrtd::new(&model).unwrap();
    vrtd.listen(&socket).unwrap();
    let [card] = listed(root.path(), "vrtd").try_into().unwrap();
    assert_eq!((card.name.as_str(), card.supported), ("vrtd:/run/vrtd.sock#0", true));
    assert_eq!(card.facts, [("pci", Some("0000:61:00.0".to_owned()))]);
    vrtd.deny("query");
    let [denied] = listed(root.path(), "vrtd").try_into().unwrap();
    assert!(!denied.supported && denied.about.contains("query-devices = yes"), "{}", denied.about);
}
