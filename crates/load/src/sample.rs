//! Sample models, for trying things out without one.

use std::io::{self, Write};

/// Writes a safetensors file of exactly `size` bytes: embeddings, layers of large and small tensors, an empty tensor,
/// and bytes that do not repeat. The same seed gives the same bytes.
///
/// # Errors
/// `InvalidInput` when `size` is too small for the header (4 KiB is enough); what `out` returns.
pub fn write_sample(out: &mut impl Write, size: u64, seed: u64) -> io::Result<()> {
    let (header, data) = sample_header(size).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("a sample of {size} bytes is too small: 4 KiB at least"))
    })?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    let mut block = vec![0; 1 << 20];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut left = data;
    while left > 0 {
        for word in block.chunks_exact_mut(8) {
            // xorshift64 (Marsaglia, "Xorshift RNGs", 2003): cheap, and never the same block twice.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let n = left.min(block.len() as u64) as usize;
        out.write_all(&block[..n])?;
        left -= n as u64;
    }
    out.flush()
}

/// A header whose tensors fill the rest of `size` exactly, and how many bytes that is.
fn sample_header(size: u64) -> Option<(String, u64)> {
    // Layers of about 64 MiB, at most 64 of them, at least one.
    let layers = (size >> 26).clamp(1, 64);
    // The header's length depends on the digits of the sizes in it; this much is always enough.
    let header_len = (1024 + layers * 512).next_multiple_of(8).min((size / 2) & !7);
    let data = size.checked_sub(8 + header_len)?;
    let mut entries = vec![r#""__metadata__":{"made_by":"dmalane load --sample"}"#.to_owned()];
    let mut at = 0;
    let mut add = |name: String, dtype: &str, width: u64, len: u64| {
        let len = len / width * width;
        let (start, end) = (at, at + len);
        let shape = if dtype == "U8" { format!("[{len}]") } else { format!("[1,{}]", len / width) };
        entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#));
        at = end;
    };
    let layer = data / (layers + 1);
    for i in 0..layers {
        add(format!("layers.{i}.attention.weight"), "F16", 2, layer / 3);
        add(format!("layers.{i}.mlp.weight"), "BF16", 2, layer / 2);
        add(format!("layers.{i}.norm.bias"), "F32", 4, layer.min(4096) / 8);
    }
    add("empty".into(), "F32", 4, 0);
    let rest = data.checked_sub(at)?;
    let entries_end = at;
    // The last tensor takes whatever is left, so that the file has exactly the size asked for.
    entries.push(format!(
        r#""embeddings.weight":{{"dtype":"U8","shape":[{rest}],"data_offsets":[{entries_end},{data}]}}"#
    ));
    let json = format!("{{{}}}", entries.join(","));
    let padding = (header_len as usize).checked_sub(json.len())?;
    Some((json + &" ".repeat(padding), data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::safetensors::{header_len, parse_header};

    #[test]
    fn samples_are_valid_and_exactly_as_long_as_asked() {
        for size in [4096u64, 4097, 100_001, 1 << 20, (64 << 20) + 3, 200 << 20] {
            let mut bytes = Vec::new();
            write_sample(&mut bytes, size, 1).unwrap();
            assert_eq!(bytes.len() as u64, size);
            let header = header_len(bytes[..8].try_into().unwrap(), size).unwrap() as usize;
            let model = parse_header(&bytes[8..8 + header], size).unwrap();
            assert!(model.tensors.len() >= 5 && model.tensors.iter().any(|t| t.len == 0));
        }
        for size in [0, 1, 100, 500] {
            assert!(write_sample(&mut Vec::new(), size, 1).is_err(), "{size}");
        }
    }
}
