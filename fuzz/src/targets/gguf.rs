//! Arbitrary bytes as a GGUF header: tensors are no more than its bytes describe, and of those that pass the check,
//! each byte is found in its tensor.

use dmalane_addr::Address;
use dmalane_load::Layout;
use dmalane_load::container::gguf::parse_header;

/// Runs the target on one input.
pub fn target(file: &[u8]) {
    // A header may be cut off, and tensors may lie in a larger file than the bytes that are here.
    for len in [file.len() as u64, 1 << 40] {
        let Ok(model) = parse_header(file, len) else { continue };
        assert!(model.tensors.len() * 24 <= file.len());
        if model.check().is_err() {
            continue;
        }
        for tensor in model.tensors.iter().filter(|tensor| tensor.len > 0) {
            let last = tensor.at.checked_add(tensor.len - 1).expect("within the file");
            for at in [tensor.at, last] {
                assert_eq!(model.tensor_at(at).map(|found| &found.name), Some(&tensor.name));
            }
        }
        if let Some(layout) = Layout::new(&model, Default::default(), u64::MAX) {
            assert_eq!(layout.places.len(), model.tensors.len());
        }
    }
}
