//! A file of a model: where it is, and which of its tensors count.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use crate::kept::KeptFile;

/// A file of a model.
#[derive(Clone, Debug)]
pub struct SetFile {
    /// Where it is.
    pub path: PathBuf,
    /// The tensors that an index lists for it, by which the others do not count; `None` for all.
    pub listed: Option<Arc<BTreeSet<String>>>,
    /// The memory that holds it, of a model that a keeper lends.
    pub kept: Option<Arc<KeptFile>>,
}

impl SetFile {
    pub(super) fn whole(path: PathBuf) -> Self {
        Self { path, listed: None, kept: None }
    }
}
