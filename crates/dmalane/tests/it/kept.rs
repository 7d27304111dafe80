//! Kept models that go to a device: from the memory that they are in, where the device reaches it.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use dmalane::device::Placement;
use dmalane::dma::{Heap, MemfdHeap};
use dmalane::load::kept::KeptFile;
use dmalane::load::{Input, Loaded, Manifest, OpenDevice, OpenFile, Part, SetFile, Stage, write_sample};
use dmalane::{FileOptions, HostModel, ModelOptions, error_chain};
use dmalane_fake_cuda::Fake;

use crate::devices::each_kind;

const MIB: u64 = 1 << 20;

/// The bytes of a sample, and the sample in sealed memory.
fn sample(len: u64) -> (Vec<u8>, SetFile) {
    let mut bytes = Vec::new();
    write_sample(&mut bytes, len, 1).unwrap();
    let memory = MemfdHeap::importable(None).allocate(bytes.len()).unwrap().share();
    memory.as_volatile_slice().sub(0, bytes.len()).unwrap().write(&bytes);
    let path = Path::new("kept:m/m.safetensors");
    let kept = KeptFile::new(path, memory.seal().unwrap(), bytes.len() as u64).unwrap();
    (bytes, SetFile { path: path.to_owned(), listed: None, kept: Some(Arc::new(kept)) })
}

fn input(file: &SetFile) -> [Input<dmalane::file::FileQueue>; 1] {
    [OpenFile::of(file).unwrap().into_input(FileOptions::default()).unwrap()]
}

/// Loads a kept file; says whether its bytes went through staging buffers.
fn load(device: &mut OpenDevice, file: &SetFile) -> (Loaded, bool) {
    let loaded = device.load(&mut input(file), &Placement::Default, &mut |_| {}).unwrap();
    let read = loaded.report.stages.iter().find(|stage| stage.stage == Stage::Read).map_or(0, |stage| stage.bytes);
    let staged = loaded.report.staging.0 > 0;
    assert_eq!(read, if staged { file.kept.as_ref().unwrap().len } else { 0 });
    (loaded, staged)
}

#[test]
fn devices_read_kept_files_where_they_are_if_they_can() {
    let (bytes, file) = sample(5 * MIB + 123);
    let (mut in_place, mut staged) = (BTreeSet::new(), BTreeSet::new());
    each_kind(|spec, options| {
        println!("{spec}");
        let mut device = options.open(spec).unwrap();
        let (loaded, is_staged) = load(&mut device, &file);
        if is_staged { &mut staged } else { &mut in_place }.insert(spec.kind().name);
        for (index, tensor) in loaded.files[0].model.tensors.iter().enumerate() {
            device
                .read_back(&loaded.files[0], index, &mut |offset, view| {
                    let mut there = vec![0; view.len()];
                    view.read(&mut there);
                    let at = (tensor.at.bits() + offset) as usize;
                    assert!(there == bytes[at..at + there.len()], "{}", tensor.name);
                })
                .unwrap();
        }
        device.verify(&loaded, &mut input(&file), &mut |_| {}).unwrap();
        // The hashes are those of the bytes.
        let mut manifest = Manifest::of(&mut input(&file), false, &mut |_| ControlFlow::Continue(())).unwrap();
        let again = device.load_checked(&mut input(&file), &Placement::Default, &manifest, &mut |_| {}).unwrap();
        assert_eq!(again.files[0].checksum, loaded.files[0].checksum);
        assert!(loaded.files[0].checksum.is_some());
        manifest.files[0].regions[1].digest.xxh3 ^= 1;
        let error = device.load_checked(&mut input(&file), &Placement::Default, &manifest, &mut |_| {}).unwrap_err();
        assert!(error_chain(&error).contains("differs"), "{}", error_chain(&error));
    });
    // The daemon and other processes get descriptors, and this memory is not theirs to write.
    assert_eq!(staged, ["daemon", "vfio-user"].into());
    assert!(in_place.is_superset(&["cuda", "file", "qdma", "ram", "soft"].into()), "{in_place:?}");
}

#[test]
fn a_file_is_registered_once_for_all_gpus_of_a_process() {
    let fake = Fake::turn();
    let (_, file) = sample(5 * MIB);
    let registered = || fake.calls("cuMemHostRegister_v2");
    let open = |gpu: u32| dmalane::open(&format!("cuda:{gpu},lib={}", fake.path())).unwrap();
    fake.set("gpus", 2);
    // For the sake of a small part it is not.
    let copied = fake.copied();
    let model = HostModel::of_files([OpenFile::of(&file).unwrap()], ModelOptions::default()).unwrap();
    let name = model.tensors().max_by_key(|tensor| tensor.len).unwrap().name.clone();
    let mut device = open(0);
    let at = device.memory_mut().reserve(4096).unwrap().first();
    let part = [Part { name, bytes: 0..4096, to: 0 }];
    model.read_parts_onto(&mut device, at.into(), &part, &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(device.staging_backing().is_some() && fake.copied() - copied == 4096);
    drop((model, device));
    let mut devices = [open(0), open(1)];
    let (before, copied) = (registered(), fake.copied());
    for device in &mut devices {
        for _ in 0..2 {
            let (loaded, staged) = load(device, &file);
            assert!(!staged);
            device.unload(loaded).unwrap();
        }
    }
    assert_eq!(registered() - before, 1);
    let tensors = fake.copied() - copied;
    assert!(tensors > 4 * 5 * MIB - 64 * 1024 && tensors <= 4 * 5 * MIB + 64 * 1024, "{tensors}");
    // Either of the two ends it: the device, or whoever is attached.
    let ended = || fake.calls("cuMemHostUnregister");
    let [first, mut second] = devices;
    let before = ended();
    drop(first);
    assert_eq!(ended(), before, "the other one has it");
    drop(file);
    assert_eq!(ended(), before + 1);
    let (_, file) = sample(MIB);
    let (loaded, _) = load(&mut second, &file);
    second.unload(loaded).unwrap();
    drop(second);
    assert_eq!(ended(), before + 2, "before the file");
    drop(file);
    fake.assert_clean("kept files");
}

#[test]
fn a_gpu_that_cannot_register_what_is_to_be_read_alone_gets_it_through_staging_buffers() {
    let fake = Fake::turn();
    let (_, file) = sample(5 * MIB);
    for what in ["read-only-register", "host-register"] {
        fake.set(what, 0);
        let mut device = dmalane::open(&format!("cuda:0,lib={}", fake.path())).unwrap();
        let (loaded, staged) = load(&mut device, &file);
        assert!(staged, "{what}");
        device.verify(&loaded, &mut input(&file), &mut |_| {}).unwrap();
        drop((loaded, device));
        fake.assert_clean(what);
    }
}
