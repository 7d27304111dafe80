//! Files without structure: one tensor with the file's name.

use std::sync::Arc;

use dmalane_addr::FileOffset;

use super::file::ContainerFile;
use super::format_error::FormatError;
use super::model::{Container, Model};
use super::tensor::Tensor;
use crate::error::Error;

/// The kind: it takes the files that no other kind does.
pub static CONTAINER: Container = Container {
    name: "raw",
    title: "raw",
    extensions: &[],
    magic: &[],
    resembles: None,
    in_folders: false,
    parse_header: None,
    parse,
};

/// The whole file as a tensor without a type.
pub(super) fn parse(file: &ContainerFile<'_>) -> Result<Model, Error> {
    if file.len == 0 {
        return Err(file.bad(FormatError::Empty));
    }
    let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (dtype, shape, at, len) = (Arc::default(), Box::default(), FileOffset::new(0), file.len);
    let tensors = vec![Arc::new(Tensor { name, dtype, shape, at, len })];
    Ok(Model { len, tensors, metadata: None, by_columns: false, container: &CONTAINER })
}
