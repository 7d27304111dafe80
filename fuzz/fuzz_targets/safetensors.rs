//! Arbitrary bytes as a safetensors file: whatever the header says, the plan stays within the file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok((header, metadata)) = safetensors::SafeTensors::read_metadata(bytes) else { return };
    let data = (bytes.len() - 8 - header) as u64;
    for (_, tensor) in metadata.tensors() {
        assert!(tensor.data_offsets.1 as u64 <= data);
    }
});
