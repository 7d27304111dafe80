//! Which tensors of which files are a model, by what the files hold.

use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom};
use std::ops::ControlFlow;
use std::path::Path;

use dmalane_dma::error_chain;
use dmalane_load::{HostModel, ModelOptions, OpenFile};

/// A safetensors file of tensors of one float each.
fn safetensors(tensors: &[(&str, f32)]) -> Vec<u8> {
    let place = |(i, (name, _)): (usize, &(&str, f32))| {
        let value = serde_json::json!({"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]});
        ((*name).to_owned(), value)
    };
    let header: serde_json::Map<_, _> = tensors.iter().enumerate().map(place).collect();
    let text = serde_json::to_vec(&header).unwrap();
    let data = tensors.iter().flat_map(|(_, value)| value.to_le_bytes());
    (text.len() as u64).to_le_bytes().into_iter().chain(text).chain(data).collect()
}

/// A GGUF file of one tensor, part `no` of `count`, which has `all` tensors.
fn part(name: &str, no: u16, count: u16, all: i32) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend([1u64, 3].map(u64::to_le_bytes).concat());
    for (key, value) in [("split.no", no), ("split.count", count)] {
        file.extend([text(key), 2u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat());
    }
    file.extend([text("split.tensors.count"), 5u32.to_le_bytes().to_vec(), all.to_le_bytes().to_vec()].concat());
    file.extend([text(name), 1u32.to_le_bytes().to_vec(), 8u64.to_le_bytes().to_vec()].concat());
    file.extend([0u32.to_le_bytes().to_vec(), 0u64.to_le_bytes().to_vec()].concat());
    file.resize(file.len().next_multiple_of(32) + 32, 0);
    file
}

fn index(pairs: &[(&str, &str)]) -> Vec<u8> {
    let map: BTreeMap<&str, &str> = pairs.iter().copied().collect();
    serde_json::to_vec(&serde_json::json!({"weight_map": map})).unwrap()
}

/// The names and first values of a model in a folder of these files, or why there is none.
fn loaded(files: &[(&str, Vec<u8>)], path: &str) -> Result<Vec<(String, f32)>, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let open = |path: &Path| HostModel::open([path], ModelOptions::default());
    let model = open(&folder.path().join(path)).map_err(|e| error_chain(&e))?;
    let mut tensors: Vec<(String, f32)> = model
        .tensors()
        .map(|tensor| {
            let bytes = model.read(&tensor.name, &mut |_| ControlFlow::Continue(())).unwrap().to_vec();
            (tensor.name.clone(), f32::from_le_bytes(bytes[..4].try_into().unwrap()))
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(tensors)
}

#[test]
fn the_index_says_which_file_has_a_tensor() {
    let stale = [
        ("a.safetensors", safetensors(&[("w", 1.0)])),
        ("b.safetensors", safetensors(&[("v", 2.0), ("w", -1.0), ("x", 9.0)])),
    ];
    let with =
        |pairs: &[(&str, &str)]| loaded(&[&stale[..], &[("m.safetensors.index.json", index(pairs))]].concat(), ".");
    let all = |values: &[(&str, f32)]| Ok(values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect());
    assert_eq!(with(&[("w", "a.safetensors"), ("v", "b.safetensors")]), all(&[("v", 2.0), ("w", 1.0)]));
    assert_eq!(with(&[("w", "b.safetensors")]), all(&[("w", -1.0)]));
    let missing = with(&[("w", "a.safetensors"), ("v", "b.safetensors"), ("gone", "b.safetensors")]).unwrap_err();
    assert!(missing.contains("b.safetensors") && missing.contains("it does not have: \"gone\""), "{missing}");
    let elsewhere = with(&[("w", "a.safetensors"), ("v", "a.safetensors"), ("x", "b.safetensors")]).unwrap_err();
    assert!(
        elsewhere.contains("a.safetensors: ") && elsewhere.contains("\"v\" (it is in b.safetensors)"),
        "{elsewhere}"
    );
}

#[test]
fn a_split_gguf_has_all_its_parts() {
    let name = |n: u16| format!("q-{n:05}-of-00002.gguf");
    let parts = |all: i32| [(name(1), part("a", 0, 2, all)), (name(2), part("b", 1, 2, all))];
    let named = |files: &[(String, Vec<u8>)], path: &str| {
        let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(name, bytes)| (&**name, bytes.clone())).collect();
        loaded(&files, path).map(|tensors| tensors.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
    };
    for path in [".", &name(1)] {
        assert_eq!(named(&parts(2), path), Ok(vec!["a".to_owned(), "b".to_owned()]), "{path}");
    }
    let few = named(&parts(3), ".").unwrap_err();
    assert!(few.contains("has 2 tensors in them, not the 3"), "{few}");
    // Whatever a part is called.
    let renamed = named(&[("one.gguf".to_owned(), part("a", 1, 2, 2))], "one.gguf").unwrap_err();
    assert!(renamed.contains("split into 2 parts, of which this is 2 and 1 are missing"), "{renamed}");
    // Numbers that no file has.
    let last = named(&[("one.gguf".to_owned(), part("a", u16::MAX, 2, -1))], "one.gguf").unwrap_err();
    assert!(last.contains("of which this is 65536 and 1, 2 are missing"), "{last}");
    let twice = named(&[(name(1), part("a", 0, 2, 2)), (name(2), part("b", 0, 2, 2))], ".").unwrap_err();
    assert!(twice.contains("part 1 of 2, and so is another file"), "{twice}");
}

#[test]
fn files_of_no_known_kind_are_models_only_where_raw_ones_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, what) in [
        ("pytorch_model.bin", &b"PK\x03\x04\x14\0\0\0\0\0archive"[..], "this is a ZIP file (a PyTorch checkpoint?)"),
        ("config.json", b"{\"model_type\": \"llama\"}", "this is a JSON text"),
        ("weights", b"neither nor", "this is no file of a known kind (safetensors, "),
        // What a name does not say, the first bytes do.
        ("blob", &safetensors(&[("w", 1.0)]), ""),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let open = |refuse_raw| HostModel::open([&path], ModelOptions { refuse_raw, ..ModelOptions::default() });
        assert!(open(false).is_ok(), "{name}");
        match open(true) {
            Ok(model) => assert!(what.is_empty() && model.tensors().count() == 1, "{name}"),
            Err(error) => assert!(!what.is_empty() && error_chain(&error).contains(what), "{name}: {error}"),
        }
    }
}

#[test]
fn what_is_odd_about_a_file_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let notes = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        HostModel::open([&path], ModelOptions::default()).unwrap().notes()
    };
    let file = part("t", 0, 1, 1);
    assert!(notes(&file).is_empty());
    let joined = notes(&[&file[..], &file].concat());
    let says = format!("m.gguf: {} bytes behind its last tensor belong to none", file.len());
    assert!(joined.len() == 1 && joined[0].contains(&says), "{joined:?}");
    // The position of a file that was handed in is its owner's.
    let mut handed = std::fs::File::open(&path).unwrap();
    handed.seek(SeekFrom::Start(5)).unwrap();
    let given = OpenFile::new("given.gguf", handed.try_clone().unwrap());
    let model = HostModel::of_files([given], ModelOptions::default()).unwrap();
    assert_eq!((model.notes().len(), handed.stream_position().unwrap()), (1, 5));
    // Notes are about the file that was opened, and no other of its name.
    let whole = folder.path().join("n.gguf");
    std::fs::write(&whole, &file).unwrap();
    let model = HostModel::open([&whole], ModelOptions::default()).unwrap();
    std::fs::remove_file(&whole).unwrap();
    std::fs::File::create(&whole).unwrap().set_len(1 << 20).unwrap();
    assert!(model.notes().is_empty(), "{:?}", model.notes());
    // A stale copy is no loss; a tensor of no list is.
    for (name, bytes) in [
        ("a.safetensors", safetensors(&[("x", 1.0), ("y", 2.0), ("z", 3.0)])),
        ("b.safetensors", safetensors(&[("y", 4.0)])),
        ("m.safetensors.index.json", index(&[("x", "a.safetensors"), ("y", "b.safetensors")])),
    ] {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let model = HostModel::open([folder.path().join("m.safetensors.index.json")], ModelOptions::default()).unwrap();
    let [note] = &model.notes()[..] else { panic!("{:?}", model.notes()) };
    assert!(note.ends_with("a.safetensors: a tensor is left out that the index does not list: \"z\""), "{note}");
}

#[test]
fn a_pipe_that_took_the_place_of_a_file_is_told_and_waited_for_by_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, safetensors(&[("w", 1.0)])).unwrap();
    let model = HostModel::open([&path], ModelOptions::default()).unwrap();
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let error = error_chain(&model.files()[0].open().unwrap_err());
    assert!(error.contains("it was changed or replaced meanwhile"), "{error}");
}
