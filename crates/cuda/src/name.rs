//! How a GPU is named, and how it is used.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A GPU by name: `N` or its UUID, then `,vmm` for [`Binds::CuMemMap`], then `,lib=PATH` for another library of the
/// driver.
///
/// ```
/// use dmalane_cuda::{Binds, GpuName, Which};
/// let name: GpuName = "1,vmm".parse()?;
/// assert_eq!((&name.which, name.binds), (&Which::Number(1), Binds::CuMemMap));
/// assert!("GPU-2918fc3f-fcbc-3130-da30-c5d0e1ccbe32".parse::<GpuName>().is_ok());
/// # Ok::<(), dmalane_cuda::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuName {
    /// Which GPU.
    pub which: Which,
    /// The kind of its address space.
    pub binds: Binds,
    /// The library of the driver; `None` for that of [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE), else
    /// [`LIBRARY`](crate::LIBRARY).
    pub library: Option<String>,
}

/// One GPU among several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Which {
    /// In the driver's order.
    Number(u32),
    /// `GPU-` and 32 hexadecimal digits with hyphens, as `nvidia-smi -L` prints it, or the first of them.
    Uuid(String),
}

/// How buffers are bound in the device's address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Binds {
    /// Buffers are seen where their memory lies.
    #[default]
    Flat,
    /// Buffers are bound by `cuMemMap`, in pages of 2 MiB: read-only where that was asked for, scattered memory
    /// contiguous. Memory is allocated in pages, too.
    CuMemMap,
}

impl GpuName {
    /// A GPU by number, flat.
    pub const fn number(number: u32) -> Self {
        Self { which: Which::Number(number), binds: Binds::Flat, library: None }
    }
}

impl FromStr for GpuName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Name(text.to_owned());
        // A path may contain commas, so it comes last.
        let (rest, library) = match text.split_once(",lib=") {
            Some((_, "")) => return Err(bad()),
            Some((rest, path)) => (rest, Some(path.to_owned())),
            None => (text, None),
        };
        let (which, binds) = match rest.split_once(',') {
            Some((which, "vmm")) => (which, Binds::CuMemMap),
            Some(_) => return Err(bad()),
            None => (rest, Binds::Flat),
        };
        let digits = |text: &str| text.len() >= 4 && text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        let which = match which.strip_prefix("GPU-") {
            Some(uuid) if digits(uuid) => Which::Uuid(which.to_ascii_lowercase().replacen("gpu", "GPU", 1)),
            Some(_) => return Err(bad()),
            None => Which::Number(which.parse().map_err(|_| bad())?),
        };
        Ok(Self { which, binds, library })
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        let read = |text: &str| text.parse::<GpuName>().map(|n| (n.which.to_string(), n.binds, n.library));
        assert_eq!(read("0"), Ok(("0".into(), Binds::Flat, None)));
        assert_eq!(read("3,vmm,lib=/a,b"), Ok(("3".into(), Binds::CuMemMap, Some("/a,b".into()))));
        assert_eq!(read("GPU-2918FC3F,lib=x"), Ok(("GPU-2918fc3f".into(), Binds::Flat, Some("x".into()))));
        for bad in ["", "x", "-1", "0,", "0,flat", "0,vmm,", "0,lib=", "GPU-", "GPU-12", "GPU-xyzw", "4294967296"] {
            assert_eq!(read(bad), Err(Error::Name(bad.to_owned())), "{bad}");
        }
    }
}
