//! Tensors: names, types, shapes, and where their bytes are in a file.

use std::sync::Arc;

use dmalane_addr::FileOffset;

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements as the header spells it ("F32"); empty for a blob. Tensors of a file share it.
    pub dtype: Arc<str>,
    /// Its shape; empty for a scalar and for a blob.
    pub shape: Box<[u64]>,
    /// Where its bytes start in the file.
    pub at: FileOffset,
    /// Bytes; may be 0.
    pub len: u64,
}

impl Tensor {
    /// Its shape; of bytes without a type it is their number.
    pub fn dims(&self) -> Vec<u64> {
        if self.dtype.is_empty() { vec![self.len] } else { self.shape.to_vec() }
    }

    /// Bits of an element of a type of safetensors; `None` for GGUF's blocks and for bytes without a type.
    pub fn element_bits(&self) -> Option<u8> {
        element_bits(&self.dtype)
    }

    /// Whether it lies in the file at a multiple of its elements.
    pub(crate) fn is_aligned(&self) -> bool {
        self.at.bits().is_multiple_of(self.element_bytes())
    }

    /// Whole bytes of an element; 1 where those are none, or not known.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.element_bits().map_or(1, |bits| u64::from(bits) / 8).max(1)
    }
}

/// As [`Tensor::element_bits`], of a type by its name.
pub fn element_bits(dtype: &str) -> Option<u8> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

/// The names of types, each once: a file may have millions of tensors.
pub(super) struct TypeNames<T>(pub Vec<(T, Arc<str>)>);

impl<T: PartialEq> TypeNames<T> {
    /// The name of this type, which `name` makes when it is new.
    pub fn get(&mut self, of: T, name: impl FnOnce(&T) -> String) -> Arc<str> {
        if let Some((_, name)) = self.0.iter().find(|(known, _)| *known == of) {
            return name.clone();
        }
        let name: Arc<str> = name(&of).into();
        self.0.push((of, name.clone()));
        name
    }
}
