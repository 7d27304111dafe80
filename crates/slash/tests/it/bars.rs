//! BARs: their length, their registers, and the brackets around each access.

use dmalane_slash::model::{DriverModel, Version};
use dmalane_slash::{Bar, Error};

#[test]
fn each_access_has_a_begin_and_an_end() {
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let bar = Bar::with(model.kernel(), &model.control().unwrap(), 0).unwrap();
    let end = bar.len();
    bar.write32(8, 0x1234_5678).unwrap();
    bar.write32(end - 4, 7).unwrap();
    let other = Bar::with(model.kernel(), &model.control().unwrap(), 0).unwrap();
    assert_eq!(
        (other.read32(8).unwrap(), other.read32(end - 4).unwrap(), other.read32(0).unwrap()),
        (0x1234_5678, 7, 0)
    );
    for offset in [1, 2, end - 3, end, u64::MAX - 3, u64::MAX] {
        assert!(matches!(bar.read32(offset), Err(Error::NoRegister { bar: 0, .. })), "{offset}");
        assert!(matches!(bar.write32(offset, 1), Err(Error::NoRegister { .. })), "{offset}");
    }
    // Those that were refused, too.
    assert_eq!((model.counts().accesses, model.violations()), (17, Vec::new()));
    assert!(Bar::with(model.kernel(), &model.control().unwrap(), 1).unwrap_err().to_string().contains("GET_BAR_FD"));
    assert!(Bar::with(model.kernel(), &model.node().unwrap(), 0).is_err(), "the other node");
}
