//! Attaching to a model in memory of a device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::client::{KeeperClient, Lent, manifest_of};
use super::describe::PREFIX;
use super::error::KeepError;
use crate::device::{Loaded, OpenDevice};
use crate::error::Error;
use crate::manifest::refuse;
use crate::report::Report;

impl KeeperClient {
    /// Attaches to a model that is in memory of this device: nothing is read or copied. Its tensors have addresses of
    /// this process's own, which are for reading alone, until it is unloaded or dropped. With `verify` they are read
    /// back, and their hashes compared with the manifest.
    ///
    /// # Errors
    /// [`Error::Kept`], for a model in other memory, too; [`Error::Differs`].
    pub fn attach_onto(&self, name: &str, device: &mut OpenDevice, verify: bool) -> Result<Loaded, Error> {
        let here = device.lending().map_err(cannot_take)?.device().to_owned();
        map_onto(device, self.lent(name, Some(&here))?, verify)
    }
}

/// Maps the memory of a model that is in memory of this device.
pub(super) fn map_onto(device: &mut OpenDevice, lent: Lent, verify: bool) -> Result<Loaded, Error> {
    device.check_process()?;
    let lending = device.lending().map_err(cannot_take)?;
    let Lent { model, first, manifest, files } = lent.on(Some(lending.device()))?;
    let mut fds = files.into_iter();
    let bad = |why: &str| KeepError::Bad { what: format!("{PREFIX}{}", model.name), why: why.to_owned() };
    let manifest = manifest_of(&model, &manifest)?;
    if manifest.files.len() != model.files.len() {
        return Err(bad("it has other files than its manifest").into());
    }
    // The keeper has locked it, as long as anybody holds it.
    let counted = Arc::new(first);
    let mut loaded = Loaded { files: Vec::new(), report: Report::default() };
    for (entry, of) in model.files.iter().zip(&manifest.files) {
        let places = entry.placed.as_ref().filter(|_| entry.name == of.name);
        let places = places.ok_or_else(|| bad("it has other files than its manifest"))?;
        // The lengths first: behind the last one, no descriptor is taken, which is another file's.
        let pieces: Vec<(&u64, OwnedFd)> = places.lens().iter().zip(fds.by_ref()).collect();
        let pieces: Vec<_> = pieces.iter().map(|(len, fd)| (fd.as_fd(), **len)).collect();
        let take = || lending.take(&pieces).map_err(cannot_take);
        let memory = (places.bytes > 0).then(take).transpose()?;
        let listed = entry.listed();
        let mut contents = of.contents();
        let counts = |name: &str| listed.as_ref().is_none_or(|names| names.contains(name));
        let offsets = places.offsets.iter().copied().zip(&contents.tensors);
        let offsets: Vec<u64> = offsets.filter(|(_, tensor)| counts(&tensor.name)).map(|(at, _)| at).collect();
        contents.tensors.retain(|tensor| counts(&tensor.name));
        let lent = memory.map(|memory| (memory, counted.clone()));
        let file = device.lent_file(model.path(entry), Arc::new(contents), offsets.into_iter(), lent);
        loaded.files.push(file.ok_or_else(|| bad("its tensors lie beyond its memory"))?);
    }
    if verify {
        refuse(device.differences(&loaded, &manifest)?)?;
    }
    Ok(loaded)
}

fn cannot_take(source: Box<dyn std::error::Error + Send + Sync>) -> KeepError {
    KeepError::Device { what: "take memory of the device", source }
}
