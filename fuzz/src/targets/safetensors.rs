//! Arbitrary bytes as a safetensors file: the loader reads what the format's own library reads.
//!
//! The plan for the card then keeps tensors apart.

use dmalane_addr::Address;
use dmalane_load::container::safetensors::{MAX_DIMS, header_len, parse_header};
use dmalane_load::{Layout, Model};
use safetensors::SafeTensors;

/// Runs the target on one input.
pub fn target(file: &[u8]) {
    let parsed = parse(file);
    let reference = SafeTensors::read_metadata(file);
    let (Some(model), Ok((header, metadata))) = (&parsed, &reference) else {
        if beyond_limits(file) && parsed.is_none() || parsed.is_some() && !is_json(file) {
            return;
        }
        assert_eq!(parsed.is_some(), reference.is_ok(), "ours: {parsed:?}, the library: {reference:?}");
        return;
    };

    assert!(model.check().is_ok());

    // The same tensors, at the same bytes.
    let data = 8 + *header as u64;
    assert_eq!(model.tensors.len(), metadata.tensors().len());
    let mut next = data;
    for tensor in &model.tensors {
        let info = metadata.info(&tensor.name).expect("a tensor that the library does not see");
        assert_eq!(tensor.at.bits(), data + info.data_offsets.0 as u64);
        assert_eq!(tensor.len, (info.data_offsets.1 - info.data_offsets.0) as u64);
        assert_eq!(*tensor.dtype, *info.dtype.to_string());
        assert!(tensor.shape.iter().eq(info.shape.iter().map(|d| *d as u64).collect::<Vec<_>>().iter()));
        assert_eq!(tensor.at.bits(), next, "tensors tile the file");
        next += tensor.len;
        if let Some(last) = tensor.len.checked_sub(1) {
            for offset in [0, last] {
                let at = tensor.at.checked_add(offset).unwrap();
                assert_eq!(model.tensor_at(at).map(|t| &t.name), Some(&tensor.name));
            }
        }
    }
    assert_eq!(next, file.len() as u64);

    // On the card they do not overlap, in device virtual memory neither.
    let layout = Layout::new(model, Default::default(), u64::MAX).expect("a file that is in memory fits 64 bits");
    assert_eq!(layout.places.len(), model.tensors.len());
    let (mut bo, mut va) = (0, 0);
    for (place, tensor) in layout.places.iter().zip(&model.tensors) {
        let (_, at) = layout.address(place).expect("each is part of a run");
        assert!(place.bo_offset >= bo && (at >= va || tensor.len == 0));
        bo = place.bo_offset + tensor.len;
        va = at + tensor.len;
    }
    assert!(layout.bo_len >= model.tensors.iter().map(|t| t.len).sum());
}

/// Files that the loader refuses and the library accepts: shapes of many dimensions, and a type that is an object.
fn beyond_limits(file: &[u8]) -> bool {
    let text: Vec<u8> = file.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let has = |needle: &[u8]| text.windows(needle.len()).any(|window| window == needle);
    let longest = text.split(|byte| matches!(byte, b'[' | b']')).map(|list| list.split(|byte| *byte == b',').count());
    has(br#""dtype":{"#) || longest.max().unwrap_or(0) > MAX_DIMS
}

/// Whether the header is JSON to the library everywhere: the loader does not look into fields that nobody reads.
fn is_json(file: &[u8]) -> bool {
    let header = file.split_first_chunk().and_then(|(len, rest)| rest.get(..usize::from_le_bytes(*len)));
    header.is_some_and(|header| serde_json::from_slice::<serde_json::Value>(header).is_ok())
}

/// The file as the loader reads it: the length field first, then the header alone.
fn parse(file: &[u8]) -> Option<Model> {
    let len = file.len() as u64;
    let mut prefix = [0; 8];
    let known = file.len().min(8);
    prefix[..known].copy_from_slice(&file[..known]);
    let header = header_len(prefix, len).ok()? as usize;
    parse_header(&file[8..8 + header], len).ok()
}
