//! What a real kernel does with the devices of a guest; run by `scripts/vm`.

#[test]
fn devices_are_bound() {
    let bound: Vec<_> = std::fs::read_dir("/sys/bus/pci/drivers/vfio-pci")
        .expect("the driver")
        .filter_map(|e| e.ok()?.file_name().into_string().ok().filter(|name| name.contains(':')))
        .collect();
    assert_eq!(bound.len(), 4, "{bound:?}");
}

mod bare {
    #[test]
    fn without_modules_there_is_no_vfio() {
        assert!(!std::path::Path::new("/sys/bus/pci/drivers/vfio-pci").exists());
    }
}
