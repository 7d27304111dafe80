//! A file as a device, in the suite of all devices.

use std::fs::File;
use std::path::Path;

use dmalane_device::Device;
use dmalane_device::conformance::{suite, suite_aligned};
use dmalane_dma::error_chain;
use dmalane_file::{FileDevice, FileDeviceError, FileDeviceOptions, FileDevicePaths};
use tempfile::NamedTempFile;

/// Opens new files of 1 MiB in `folder`, each as a device.
fn opener(folder: &str, options: FileDeviceOptions) -> impl FnMut() -> Box<dyn Device> {
    let mut files = Vec::new();
    let folder = folder.to_owned();
    move || {
        let file = NamedTempFile::new_in(&folder).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let paths = FileDevicePaths { h2c: file.path().to_owned(), c2h: file.path().to_owned() };
        files.push(file);
        Box::new(FileDevice::open(paths, options).unwrap())
    }
}

const DISK: &str = env!("CARGO_TARGET_TMPDIR");

#[test]
fn through_the_page_cache() {
    suite(opener(DISK, FileDeviceOptions::default()));
}

#[test]
fn past_the_page_cache() {
    let options = FileDeviceOptions { direct: true, ..FileDeviceOptions::default() };
    let probe = NamedTempFile::new_in(DISK).unwrap();
    let paths = FileDevicePaths { h2c: probe.path().to_owned(), c2h: probe.path().to_owned() };
    match FileDevice::open(paths, options) {
        Err(error) => println!("SKIPPED: {error}"),
        Ok(_) => suite_aligned(&mut opener(DISK, options), 4096),
    }
}

#[test]
fn regions_are_whole_pages_of_the_file() {
    let length = |bytes: u64| {
        let file = NamedTempFile::new_in(DISK).unwrap();
        file.as_file().set_len(bytes).unwrap();
        let paths = FileDevicePaths { h2c: file.path().to_owned(), c2h: file.path().to_owned() };
        let device = match FileDevice::open(paths, FileDeviceOptions::default()) {
            Err(FileDeviceError::TooSmall { len, .. }) => return Err(len),
            other => other.unwrap(),
        };
        let written = device.backing_files().unwrap().written;
        assert_eq!(written.metadata().unwrap().len(), bytes);
        Ok(device.regions()[0].span.len())
    };
    assert_eq!((length(0), length(4095), length(10_000)), (Err(0), Err(4095), Ok(8192)));
    // Of two files, the one that is too small is named.
    let [large, small] = [8192, 100].map(|bytes| {
        let file = NamedTempFile::new_in(DISK).unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    });
    for (h2c, c2h) in [(&large, &small), (&small, &large)] {
        let paths = FileDevicePaths { h2c: h2c.path().to_owned(), c2h: c2h.path().to_owned() };
        match FileDevice::open(paths, FileDeviceOptions::default()) {
            Err(FileDeviceError::TooSmall { path, len }) => assert_eq!((&*path, len), (small.path(), 100)),
            other => panic!("{other:?}"),
        }
    }
    if Path::new("/dev/null").exists() && File::options().write(true).open("/dev/null").is_ok() {
        let paths = FileDevicePaths { h2c: "/dev/null".into(), c2h: "/dev/null".into() };
        let device = FileDevice::open(paths, FileDeviceOptions::default()).unwrap();
        assert!(device.regions()[0].span.len() > 1 << 62, "it does not say how long it is");
    }
}

#[test]
fn memory_that_holds_data_is_not_allocated() {
    let file = tempfile::NamedTempFile::new_in(DISK).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.as_file(), b"precious", 300_000).unwrap();
    let open = |overwrite| {
        let paths = FileDevicePaths { h2c: file.path().into(), c2h: file.path().into() };
        FileDevice::open(paths, FileDeviceOptions { overwrite, ..FileDeviceOptions::default() }).unwrap()
    };
    let mut memory = open(false).memory();
    let free = memory.free_bytes();
    // Up to the data, and once more: this device's own bytes are nobody's.
    for _ in 0..2 {
        let front = memory.reserve(256 << 10).unwrap();
        std::os::unix::fs::FileExt::write_all_at(file.as_file(), b"own", front.first().bits()).unwrap();
        let error = memory.reserve(256 << 10).unwrap_err();
        let dmalane_device::MemoryError::Driver { source, .. } = &error else { panic!("{error}") };
        assert!(source.is::<dmalane_file::HoldsData>() && error_chain(&error).contains("holds data there"), "{error}");
        memory.free([dmalane_addr::Segment { addr: front.first(), len: front.len() }]).unwrap();
        assert_eq!(memory.free_bytes(), free);
    }
    assert_eq!(memory.reserve(200 << 10).unwrap().first().bits(), 0);
    assert!(open(false).memory().reserve(4096).is_err(), "for the next one they are data");
    assert!(open(true).memory().reserve(1 << 20).is_ok());
}
