//! The names of the files that a device consists of.

use std::path::PathBuf;

/// Which files a device consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDevicePaths {
    /// The file that is written.
    pub h2c: PathBuf,
    /// The file that is read.
    pub c2h: PathBuf,
}

impl FileDevicePaths {
    /// One file for both directions.
    pub fn same(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self { h2c: path.clone(), c2h: path }
    }
}
