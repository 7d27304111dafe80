//! Arbitrary bytes as the header of an `.npy` file: the array is all that follows it.

use dmalane_load::container::npy::parse_header;

/// Runs the target on one input.
pub fn target(file: &[u8]) {
    for len in [file.len() as u64, 1 << 40] {
        let Ok(model) = parse_header(file, len, "array") else { continue };
        assert!(model.check().is_ok());
        let [array] = &model.tensors[..] else { panic!("one array") };
        assert_eq!(array.at.bits() + array.len, len);
        assert!(array.shape.len() <= file.len());
    }
}
