//! Manifests: every bit that flips is found and named, alone and while loading or reading.

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dmalane::dma::AnonHeap;
use dmalane::file::{FileQueue, Mode};
use dmalane::load::{Difference, Error, Input, Manifest, Problem, RegionKind};
use dmalane::{FileOptions, Placement, ReadOptions, error_chain, open_file};

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// A GGUF file of two tensors with a gap between them and one behind them.
fn gguf(path: &Path) {
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend(2u64.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    for (name, offset) in [("first", 0u64), ("second", 4096)] {
        file.extend((name.len() as u64).to_le_bytes());
        file.extend(name.bytes());
        file.extend(1u32.to_le_bytes());
        file.extend(700u64.to_le_bytes());
        file.extend(0u32.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    file.resize(file.len().next_multiple_of(32), 0);
    let bytes = (0..4096 + 2800 + 500u32).map(|i| (i * 31 % 251) as u8);
    file.extend(bytes);
    fs::write(path, file).unwrap();
}

fn sample(path: &Path, size: u64) {
    dmalane::load::write_sample(&mut fs::File::create(path).unwrap(), size, 7).unwrap();
}

fn open(paths: &[PathBuf]) -> Vec<Input<FileQueue>> {
    paths.iter().map(|path| open_file(path, FileOptions::default()).unwrap()).collect()
}

fn manifest(paths: &[PathBuf]) -> Manifest {
    let made = Manifest::of(&mut open(paths), true, &mut |_| ControlFlow::Continue(())).unwrap();
    let again = Manifest::parse(made.to_json().as_bytes()).unwrap();
    assert_eq!(again, made);
    made
}

fn differs(file: &str, problem: Problem) -> Difference {
    Difference { file: file.to_owned(), problem }
}

fn verify(manifest: &Manifest, paths: &[PathBuf]) -> Vec<Difference> {
    manifest.verify(&mut open(paths), true, &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn a_thousand_flipped_bits_are_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a.safetensors", "b.gguf", "c.bin"].iter().map(|n| folder.path().join(n)).collect();
    sample(&paths[0], 300_000);
    gguf(&paths[1]);
    fs::write(&paths[2], vec![5; 10_000]).unwrap();
    let manifest = manifest(&paths);
    assert_eq!(verify(&manifest, &paths), []);
    let (mut random, mut kinds) = (Random(1), [0, 0, 0]);
    for _ in 0..1000 {
        let file = &manifest.files[random.below(3) as usize];
        // Half of them anywhere, the others in a region chosen first: most regions are small.
        let at = match random.below(2) {
            0 => random.below(file.bytes),
            _ => {
                let filled: Vec<_> = file.regions.iter().filter(|region| region.end > region.start).collect();
                let region = filled[random.below(filled.len() as u64) as usize];
                region.start + random.below(region.end - region.start)
            }
        };
        let hit = file.regions.iter().find(|region| region.start <= at && at < region.end).unwrap();
        kinds[["header", "tensor", "gap"].iter().position(|kind| *kind == hit.part.kind()).unwrap()] += 1;
        let on_disk = fs::File::options().read(true).write(true).open(folder.path().join(&file.name)).unwrap();
        let mut byte = [0];
        on_disk.read_exact_at(&mut byte, at).unwrap();
        on_disk.write_all_at(&[byte[0] ^ 1 << random.below(8)], at).unwrap();
        let (start, end, part) = (hit.start, hit.end, hit.part.clone());
        assert_eq!(verify(&manifest, &paths), [differs(&file.name, Problem::Changed { part, start, end })]);
        on_disk.write_all_at(&byte, at).unwrap();
    }
    assert_eq!(verify(&manifest, &paths), []);
    assert!(kinds.iter().all(|n| *n > 50), "{kinds:?}");
}

#[test]
fn other_lengths_and_other_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a.safetensors", "b.safetensors"].iter().map(|n| folder.path().join(n)).collect();
    paths.iter().for_each(|path| sample(path, 100_000));
    let manifest = manifest(&paths);
    let file = &manifest.files[0];
    let tensor = file.regions.iter().find(|r| r.part.tensor().is_some() && r.end - r.start > 100).unwrap();
    let bytes = fs::read(&paths[0]).unwrap();
    for (len, part) in
        [(0, RegionKind::Header), (7, RegionKind::Header), (tensor.start as usize + 99, tensor.part.clone())]
    {
        fs::write(&paths[0], &bytes[..len]).unwrap();
        let short = differs("a.safetensors", Problem::Short { expected: 100_000, found: len as u64, part });
        assert_eq!(verify(&manifest, &paths), [short]);
    }
    // The bytes that are there are compared all the same.
    let mut longer = [&bytes[..], b"more"].concat();
    longer[3] ^= 1;
    fs::write(&paths[0], longer).unwrap();
    let said: Vec<String> = verify(&manifest, &paths).iter().map(Difference::to_string).collect();
    let end = file.regions[0].end;
    assert_eq!(
        said,
        [
            format!("a.safetensors: header differs (bytes 0..{end})"),
            "a.safetensors: 4 bytes follow its end at 100000".to_owned()
        ]
    );
    fs::write(&paths[0], &bytes).unwrap();
    let other = folder.path().join("c.safetensors");
    sample(&other, 100_000);
    assert_eq!(
        verify(&manifest, &[other, paths[0].clone()]),
        [differs("c.safetensors", Problem::Unlisted), differs("b.safetensors", Problem::Missing(None))]
    );
    let twice = [paths[0].clone(), folder.path().join("./a.safetensors")];
    let error = Manifest::of(&mut open(&twice), false, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(error_chain(&error).contains("is listed twice"), "{error}");
}

#[test]
fn loads_and_reads_are_checked_as_the_bytes_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a.safetensors", "b.safetensors"].iter().map(|n| folder.path().join(n)).collect();
    paths.iter().for_each(|path| sample(path, 9_000_000));
    let manifest = manifest(&paths);
    let mut device = dmalane::open("soft").unwrap();
    let free = device.memory().free_bytes();
    let flip = |path: &Path, at| {
        let file = fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    };
    let differs = |error: &Error| match error {
        Error::Differs { differences } => differences.iter().map(Difference::to_string).collect::<Vec<_>>(),
        other => panic!("{other}"),
    };
    for mode in [Mode::Auto, Mode::Buffered] {
        let read = |manifest: &Manifest| {
            let options = ReadOptions { mode, ..ReadOptions::default() };
            dmalane::Read::files(&paths).options(options).manifest(manifest).into_memory(&AnonHeap::new())
        };
        read(&manifest).unwrap();
        let loaded = device.load_checked(&mut open(&paths), &Placement::Default, &manifest, &mut |_| {}).unwrap();
        assert!(loaded.files.iter().all(|file| file.checksum.is_some()));
        device.unload(loaded).unwrap();
        let hit = manifest.files[1].regions.iter().filter(|region| region.part.tensor().is_some()).nth(1).unwrap();
        flip(&paths[1], hit.start);
        let want = [format!("b.safetensors: {} differs (bytes {}..{})", hit.part, hit.start, hit.end)];
        let error = device.load_checked(&mut open(&paths), &Placement::Default, &manifest, &mut |_| {}).unwrap_err();
        assert_eq!(differs(&error), want);
        assert_eq!(device.memory().free_bytes(), free, "nothing stays on the device");
        assert_eq!(differs(&read(&manifest).unwrap_err()), want);
        flip(&paths[1], hit.start);
    }
    let file = fs::File::options().write(true).open(&paths[0]).unwrap();
    file.set_len(8_999_999).unwrap();
    let error = dmalane::Read::files(&paths).manifest(&manifest).into_memory(&AnonHeap::new()).unwrap_err();
    assert!(differs(&error)[0].starts_with("a.safetensors: ends within tensor"), "{error}");
}

#[test]
fn hostile_manifests_are_refused_with_the_reason() {
    let region = r#"{"kind": "header", "start": 0, "end": 4, "xxh3": "0123456789abcdef"}"#;
    let with = |files: &str| format!(r#"{{"schema": 1, "command": "manifest", "files": [{files}]}}"#);
    let file = |name: &str, bytes: &str, regions: &str| {
        format!(r#"{{"name": "{name}", "bytes": {bytes}, "format": "raw", "regions": [{regions}]}}"#)
    };
    let one = |regions: &str| with(&file("a", "4", regions));
    let tensor = |name: &str, start: u64, end: u64| {
        format!(r#"{{"kind": "tensor", "name": "{name}", "start": {start}, "end": {end}, "xxh3": "0123456789abcdef"}}"#)
    };
    assert!(Manifest::parse(one(region).as_bytes()).is_ok());
    let long = "x".repeat(100_000);
    for (text, says) in [
        (String::new(), "it ends too early"),
        ("[]".to_owned(), "instead of an object"),
        (format!(r#"{{"schema": 1, "x": {}"#, "[".repeat(1_000_000)), "at column"),
        (r#"{"weight_map": {}}"#.to_owned(), "no field \"schema\""),
        (with(""), "lists no files"),
        (with(region), "there is no field"),
        (one(region).replace("\"schema\": 1", "\"schema\": 2, \"schema\": 1"), "duplicate field"),
        (one(region).replace("\"schema\": 1", "\"schema\": 2"), "schema 2 and command"),
        (r#"{"schema": 2, "files": 7}"#.to_owned(), "newer version"),
        (one(region).replace("\"manifest\"", "\"load\""), "command \"load\""),
        (one(&region.replace("\"end\": 4", "\"end\": -4")), "-4 instead of a whole number"),
        (one(&region.replace("\"end\": 4", "\"end\": 4.5")), "4.5 instead of a whole number"),
        (one(&region.replace("\"end\": 4", "\"end\": 99999999999999999999999")), "instead of a whole number"),
        (one(&region.replace("\"end\": 4", "\"end\": \"4\"")), "instead of a whole number"),
        (one(&region.replace("\"end\": 4", &format!("\"end\": \"{long}\""))), "instead of a whole number"),
        (one(&region.replace("header", &long)), "not header, tensor or gap"),
        (one(&region.replace("0123456789abcdef", "0123456789abcde")), "16 hexadecimal digits"),
        (one(&region.replace("0123456789abcdef", &long)), "16 hexadecimal digits"),
        (one(&region.replace("0123456789abcdef\"", "0123456789abcdef\", \"sha256\": \"00\"")), "64 hexadecimal digits"),
        (one(&region.replace("\"start\": 0", "\"start\": 1")), "regions follow without holes"),
        (one(&format!("{region}, {}", tensor("t", 3, 4))), "regions follow without holes"),
        (one(&format!("{region}, {}", tensor("t", 4, 2))), "regions follow without holes"),
        (one(&format!("{region}, {}", tensor("t", 4, 5))), "regions end at 5, and it has 4 bytes"),
        (with(&file("a", "5", region)), "regions end at 4, and it has 5 bytes"),
        (
            with(&file("a", "18446744073709551615", region)),
            "its size, 18446744073709551615 bytes, is more than any file has",
        ),
        (one(&format!("{region}, {}, {}", tensor("t", 4, 4), tensor("t", 4, 4))), "tensor \"t\" is listed twice"),
        (one(r#"{"kind": "tensor", "start": 0, "end": 4, "xxh3": "0123456789abcdef"}"#), "without a name"),
        (one(&region.replace("\"start\"", "\"name\": \"x\", \"start\"")), "with a name"),
        (with(&[file("a", "4", region), file("a", "4", region)].join(", ")), "file \"a\" is listed twice"),
        (with(&file("", "4", region)), "\"\" is not a file name"),
        (with(&file("..", "4", region)), "\"..\" is not a file name"),
        (with(&file("/etc/shadow", "4", region)), "\"/etc/shadow\" is not a file name"),
        (with(&file("a\u{202e}fas", "4", region)), "\"a\\u{202e}fas\" is not a file name"),
        (with(&file("a\\u001b[2J", "4", region)), "\"a\\u{1b}[2J\" is not a file name"),
        (with(&file(&long, "4", region)), "is not a file name"),
    ] {
        let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        let start = &text[..text.len().min(200)];
        assert!(error.contains(says) && error.len() < 500, "{start}\n{error}");
    }
    // Tensors may be called anything, so their names are escaped.
    let bidi = Manifest::parse(one(&tensor("a\u{202e}b\\u0007", 0, 4)).as_bytes()).unwrap();
    assert_eq!(bidi.files[0].regions[0].part.to_string(), "tensor \"a\\u{202e}b\\u{7}\"");
}
