//! Arbitrary bytes as a GGUF header: tensors lie within the file and do not overlap, and are no more than its bytes
//! describe.

use dmalane_load::Layout;
use dmalane_load::container::gguf::parse_header;

/// Runs the target on one input.
pub fn target(file: &[u8]) {
    // A header may be cut off, and tensors may lie in a larger file than the bytes that are here.
    for len in [file.len() as u64, 1 << 40] {
        let Ok(model) = parse_header(file, len) else { continue };
        let mut end = 0;
        for tensor in &model.tensors {
            assert!(tensor.at.bits() >= end, "{} overlaps the one before", tensor.name);
            end = tensor.at.bits() + tensor.len;
        }
        assert!(end <= len);
        assert!(model.tensors.len() * 24 <= file.len());
        if let Some(layout) = Layout::new(&model, u64::MAX) {
            assert_eq!(layout.places.len(), model.tensors.len());
        }
    }
}
