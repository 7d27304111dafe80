//! The file that `--sample` makes.

use std::fs::File;
use std::io;

use dmalane::load;

use crate::failure::Failure;
use crate::progress::Progress;
use crate::size::Size;

/// The name of a sample.
pub const NAME: &str = "sample.safetensors";

/// The smallest sample.
const LEAST: Size = Size::kib(4);

/// Its contents are the same every time.
const SEED: u64 = 1;

/// Parses the size of a sample.
pub fn size(text: &str) -> Result<Size, String> {
    match text.parse::<Size>() {
        Ok(size) if size.bytes() >= LEAST.bytes() => Ok(size),
        Ok(size) => Err(format!("that is {} bytes; a sample needs at least {LEAST}", size.bytes())),
        Err(e) => Err(e.to_string()),
    }
}

/// Makes a sample in the temporary folder that has no name, so that nothing is left however this process ends. It is
/// written out and dropped from the page cache, so that reading it is reading the disk.
pub fn make(size: u64, shown: bool) -> Result<File, Failure> {
    let folder = std::env::temp_dir();
    let trouble = |what: &str, e: &io::Error| {
        Failure::because(format!("cannot {what} a sample of {size} bytes in {}", folder.display()), e)
            .hint("another folder can be set with TMPDIR")
    };
    let bar = Progress::new("make the sample", shown);
    bar.set_length(size);
    let mut file = tempfile::tempfile().map_err(|e| trouble("create", &e))?;
    load::write_sample(&mut bar.writing(&mut file), size, SEED).map_err(|e| match e.kind() {
        io::ErrorKind::InvalidInput => Failure::new(e.to_string()),
        _ => trouble("write", &e),
    })?;
    file.sync_all().map_err(|e| trouble("write out", &e))?;
    // Advice: where it is refused the sample stays cached, and the reference of --verbose is as warm as the load.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    bar.finish();
    Ok(file)
}
