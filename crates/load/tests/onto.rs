//! Parts of tensors read onto a device: every byte at its place, and none beside it.

use std::ops::ControlFlow;
use std::path::Path;

use dmalane_device::{Device, RamDevice};
use dmalane_file::{FileOptions, Mode};
use dmalane_load::{Error, HostModel, Manifest, ModelOptions, OpenDevice, Part, open_file};
use dmalane_queue::DeviceAddr;
use proptest::prelude::*;

const MEMORY: u64 = 4 << 20;

/// A safetensors file of these tensors of bytes.
fn write(path: &Path, tensors: &[(String, u64)], seed: u64) {
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, len) in tensors {
        let value = serde_json::json!({"dtype": "U8", "shape": [len], "data_offsets": [at, at + len]});
        header.insert(name.clone(), value);
        at += len;
    }
    let text = serde_json::to_vec(&header).unwrap();
    let data = (0..at).map(|n| (n.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
    let bytes: Vec<u8> = (text.len() as u64).to_le_bytes().into_iter().chain(text).chain(data).collect();
    std::fs::write(path, bytes).unwrap();
}

fn device() -> (OpenDevice, DeviceAddr) {
    let mut device = OpenDevice::new(Box::new(RamDevice::new(MEMORY).unwrap()), Default::default()).unwrap();
    let at = device.memory_mut().reserve(MEMORY).unwrap().first();
    (device, at.into())
}

fn go(_: dmalane_load::fill::Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The reference copies byte by byte out of the file.
    #[test]
    fn parts_land_where_they_are_to(
        sizes in prop::collection::vec(
            prop::collection::vec(prop_oneof![0u64..100, 0u64..60_000, Just(300_000)], 1..6),
            1..4,
        ),
        cuts in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index, bool, u8)>(), 18),
        mode in prop_oneof![Just(Mode::Auto), Just(Mode::Direct), Just(Mode::Buffered)],
    ) {
        let folder = tempfile::tempdir_in(".").unwrap();
        let mut paths = Vec::new();
        for (f, sizes) in sizes.iter().enumerate() {
            let tensors: Vec<_> = sizes.iter().enumerate().map(|(t, len)| (format!("{f}.{t}"), *len)).collect();
            paths.push(folder.path().join(format!("{f}.safetensors")));
            write(&paths[f], &tensors, f as u64 * 7919);
        }
        let model = HostModel::open(&paths, ModelOptions { mode, ..ModelOptions::default() }).unwrap();
        let (mut device, place) = device();
        let (mut parts, mut expected, mut to) = (Vec::new(), vec![0xa5; MEMORY as usize], 0);
        for (tensor, (a, b, whole, gap)) in model.tensors().zip(&cuts) {
            let (a, b) = (a.index(tensor.len as usize + 1) as u64, b.index(tensor.len as usize + 1) as u64);
            let bytes = if *whole { 0..tensor.len } else { a.min(b)..a.max(b) };
            to += u64::from(*gap);
            parts.push(Part { name: tensor.name.clone(), bytes: bytes.clone(), to });
            let file = std::fs::read(model.find(&tensor.name).unwrap().0.path()).unwrap();
            let from = (tensor.at.bits() + bytes.start) as usize;
            let len = (bytes.end - bytes.start) as usize;
            expected[to as usize..][..len].copy_from_slice(&file[from..from + len]);
            to += len as u64;
        }
        // Their order says nothing.
        parts.reverse();
        device.write(place, &vec![0xa5; MEMORY as usize]).unwrap();
        for _ in 0..2 {
            model.read_parts_onto(&mut device, place, &parts, &mut go).unwrap();
            let mut found = vec![0; MEMORY as usize];
            device.read(place, &mut found).unwrap();
            prop_assert!(found == expected);
        }
    }
}

#[test]
fn parts_that_cannot_be_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &[("a".to_owned(), 10_000), ("b".to_owned(), 0)], 1);
    let model = HostModel::open([&path], ModelOptions::default()).unwrap();
    let (mut device, place) = device();
    let mut read = |place, parts: &[(&str, std::ops::Range<u64>, u64)]| {
        let part = |(name, bytes, to): &(&str, std::ops::Range<u64>, u64)| Part {
            name: (*name).to_owned(),
            bytes: bytes.clone(),
            to: *to,
        };
        let parts: Vec<Part> = parts.iter().map(part).collect();
        model.read_parts_onto(&mut device, place, &parts, &mut go).map_err(|e| e.to_string())
    };
    assert_eq!(read(place, &[]), Ok(()));
    assert_eq!(read(place, &[("b", 0..0, 5)]), Ok(()));
    assert!(read(place, &[("c", 0..0, 0)]).unwrap_err().contains("\"c\""));
    assert!(read(place, &[("a", 5..10_001, 0)]).unwrap_err().contains("does not lie within the 10000 bytes"));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 6..5;
    assert!(read(place, &[("a", backwards, 0)]).unwrap_err().contains("does not lie within"));
    let twice = read(place, &[("a", 0..10, 0), ("a", 9..20, 100)]).unwrap_err();
    assert!(twice.contains("two parts have the byte at"), "{twice}");
    assert!(read(place, &[("a", 0..10, u64::MAX)]).unwrap_err().contains("behind the last device address"));
    let last = DeviceAddr::Card(dmalane_addr::CardAddr::new(u64::MAX - 8));
    assert!(read(last, &[("a", 0..10, 0)]).unwrap_err().contains("behind the last device address"));
    assert!(read(last, &[("a", 0..9, 0)]).is_err(), "the device has no such memory");
    assert_eq!(read(place, &[("a", 0..10, 0)]), Ok(()), "an error leaves a device that works");
}

#[test]
fn tensors_are_compared_with_a_manifest_on_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &[("a".to_owned(), 300_000), ("b".to_owned(), 5000)], 1);
    let mut inputs = [open_file(&path, FileOptions::default()).unwrap()];
    let manifest = Manifest::of(&mut inputs, false, &mut |_| ControlFlow::Continue(())).unwrap();
    let part = |name: &str, bytes: std::ops::Range<u64>, to| Part { name: name.to_owned(), bytes, to };
    let (mut device, place) = device();
    let options = ModelOptions { manifest, ..ModelOptions::default() };
    let model = HostModel::open([&path], options.clone()).unwrap();
    let both = [part("b", 0..5000, 0), part("a", 0..300_000, 8192)];
    model.read_parts_onto(&mut device, place, &both, &mut go).unwrap();
    let cut = model.read_parts_onto(&mut device, place, &[part("a", 1..5, 0)], &mut go);
    assert!(matches!(cut, Err(Error::Unchecked)), "{cut:?}");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let model = HostModel::open([&path], options).unwrap();
    model.read_parts_onto(&mut device, place, &both[1..], &mut go).unwrap();
    match model.read_parts_onto(&mut device, place, &both, &mut go) {
        Err(Error::Differs { differences }) => assert!(format!("{differences:?}").contains("\"b\"")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn staging_is_registered_once_however_small_the_first_part_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &[("small".to_owned(), 10), ("large".to_owned(), 3_000_000)], 1);
    let model = HostModel::open([&path], ModelOptions::default()).unwrap();
    let ram = RamDevice::new(MEMORY).unwrap();
    let mut device = OpenDevice::new(Box::new(ram) as Box<dyn Device>, Default::default()).unwrap();
    let place = device.memory_mut().reserve(MEMORY).unwrap().first().into();
    let mut read = |name: &str, len| {
        let parts = [Part { name: name.to_owned(), bytes: 0..len, to: 0 }];
        model.read_parts_onto(&mut device, place, &parts, &mut go).unwrap();
        device.heap().stats().buffers
    };
    let first = read("small", 10);
    assert_eq!([read("large", 3_000_000), read("small", 9), read("large", 5)], [first; 3]);
}
