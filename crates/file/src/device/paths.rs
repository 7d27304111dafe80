//! The names of the files that a device consists of.

use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// Which files a device consists of: `PATH[,c2h=PATH]`.
///
/// ```
/// use dmalane_file::FileDevicePaths;
/// let one: FileDevicePaths = "/dev/shm/memory".parse()?;
/// assert_eq!(one.h2c, one.c2h);
/// let two: FileDevicePaths = "/dev/xdma0_h2c_0,c2h=/dev/xdma0_c2h_0".parse()?;
/// assert_eq!((two.h2c.to_str(), two.c2h.to_str()), (Some("/dev/xdma0_h2c_0"), Some("/dev/xdma0_c2h_0")));
/// # Ok::<(), dmalane_file::BadFileDevicePaths>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDevicePaths {
    /// The file that is written.
    pub h2c: PathBuf,
    /// The file that is read.
    pub c2h: PathBuf,
}

/// A text that names no files.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0:?} is not PATH[,c2h=PATH]: {1}")]
pub struct BadFileDevicePaths(String, &'static str);

impl FromStr for FileDevicePaths {
    type Err = BadFileDevicePaths;

    fn from_str(text: &str) -> Result<Self, BadFileDevicePaths> {
        let bad = |why| BadFileDevicePaths(text.to_owned(), why);
        let (mut both, mut h2c, mut c2h) = (None, None, None);
        // A comma that nothing of ours follows belongs to a path.
        let mut rest = text;
        loop {
            let end = [",h2c=", ",c2h="].iter().filter_map(|key| rest.find(key)).min().unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let (place, path) = match (word.strip_prefix("h2c="), word.strip_prefix("c2h=")) {
                (Some(path), _) => (&mut h2c, path),
                (_, Some(path)) => (&mut c2h, path),
                _ => (&mut both, word),
            };
            if path.is_empty() {
                return Err(bad("a path is empty"));
            }
            if place.replace(PathBuf::from(path)).is_some() {
                return Err(bad("a path is given twice"));
            }
            match after.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        let missing = || bad("a direction has no path");
        Ok(Self { h2c: h2c.or_else(|| both.clone()).ok_or_else(missing)?, c2h: c2h.or(both).ok_or_else(missing)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_parsed() {
        let of = |text: &str| {
            text.parse::<FileDevicePaths>().map(|p| (p.h2c.display().to_string(), p.c2h.display().to_string()))
        };
        let pair = |a: &str, b: &str| Ok((a.to_owned(), b.to_owned()));
        assert_eq!(of("/dev/x"), pair("/dev/x", "/dev/x"));
        assert_eq!(of("a,b"), pair("a,b", "a,b"), "a comma is part of a path");
        assert_eq!(of("x,c2h=y"), pair("x", "y"));
        assert_eq!(of("x,h2c=z,c2h=y"), pair("z", "y"));
        assert_eq!(of("h2c=z,c2h=y,1"), pair("z", "y,1"));
        for (bad, why) in [
            ("", "empty"),
            ("x,h2c=", "empty"),
            ("h2c=x", "a direction"),
            ("x,c2h=a,c2h=b", "twice"),
            (",h2c=x", "empty"),
        ] {
            let error = of(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
