//! A queue of AMD's stock driver for its QDMA: a node that is read and written at card addresses, as any file device.

use std::error::Error;
use std::path::{Path, PathBuf};

use dmalane_file::{FileDevice, FileDeviceOptions, FileDevicePaths};
use rustix::fs::{Access, access};

use super::kind::{Ability, Listed, OpenResult, Spec};
use crate::open_options::OpenOptions;

/// A memory-mapped queue, `qdma:NAME`.
#[derive(Clone, PartialEq, Debug)]
pub struct QdmaSpec {
    /// Its node, such as `/dev/qdma01000-MM-0`.
    pub node: PathBuf,
}

/// The prefix of bus, device and function in the driver's names.
const PREFIX: &str = "qdma";
/// The prefix of a queue's number there: memory-mapped, or streaming.
const MAPPED: &str = "-MM-";
const STREAM: &str = "-ST-";

impl Spec for QdmaSpec {
    const NAME: &'static str = "qdma";
    const SYNTAX: &'static str = "qdma:NAME";
    const ABOUT: &'static str = "a queue of AMD's QDMA driver: 01000-MM-0, 01000 for queue 0, or the path of its node";
    const ABILITIES: &'static [Ability] = &[Ability::KeepsData];

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let (folder, name) = what.rsplit_once('/').unwrap_or(("/dev", what));
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        if name.is_empty() {
            return Err("a queue is missing, such as 01000-MM-0".into());
        }
        if name.contains(STREAM) {
            return Err("a streaming queue has no addresses; one with `mode mm` does".into());
        }
        let queue = if name.contains(MAPPED) { "" } else { "-MM-0" };
        Ok(Self { node: Path::new(folder).join(format!("{PREFIX}{name}{queue}")) })
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        if !self.node.exists() {
            return Err(self.how_to_start().into());
        }
        let default = FileDeviceOptions::default();
        let threads = options.threads.unwrap_or(default.threads);
        let options = FileDeviceOptions { overwrite: options.overwrite, threads, ..default };
        Ok(Box::new(FileDevice::open(FileDevicePaths::same(&self.node), options)?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        let nodes = std::fs::read_dir(root.join("dev")).into_iter().flatten().flatten();
        let listed = |node: std::fs::DirEntry| {
            let name = node.file_name().into_string().ok()?;
            let queue = name.strip_prefix(PREFIX).filter(|queue| queue.contains(MAPPED))?;
            let access = access(node.path(), Access::READ_OK | Access::WRITE_OK);
            Some(Listed {
                name: format!("qdma:{queue}"),
                supported: access.is_ok(),
                about: match access {
                    Ok(()) => "a memory-mapped queue of the driver QDMA".to_owned(),
                    Err(e) => format!("a memory-mapped queue of the driver QDMA, whose node cannot be used: {e}"),
                },
                facts: Vec::new(),
            })
        };
        let mut all: Vec<_> = nodes.filter_map(listed).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

impl QdmaSpec {
    /// The driver makes a node when a queue starts.
    fn how_to_start(&self) -> String {
        let name = self.node.file_name().unwrap_or_default().to_string_lossy();
        let (function, queue) = name.split_once(MAPPED).unwrap_or((&name, "0"));
        format!(
            "there is no {}: `dma-ctl {function} q add idx {queue} mode mm dir bi` and `dma-ctl {function} q start idx \
             {queue} dir bi` make it",
            self.node.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_nodes() {
        for (name, node) in [
            ("01000", "/dev/qdma01000-MM-0"),
            ("qdma01000", "/dev/qdma01000-MM-0"),
            ("qdmavf81000-MM-12", "/dev/qdmavf81000-MM-12"),
            ("/dev/qdma01000-MM-3", "/dev/qdma01000-MM-3"),
            ("folder/01000", "folder/qdma01000-MM-0"),
        ] {
            assert_eq!(QdmaSpec::parse(name).unwrap().node, Path::new(node), "{name}");
        }
        for (name, why) in [("", "a queue is missing"), ("qdma", "a queue is missing"), ("01000-ST-0", "streaming")] {
            assert!(QdmaSpec::parse(name).unwrap_err().to_string().contains(why), "{name}");
        }
    }

    #[test]
    fn nodes_are_listed_and_a_missing_one_says_how_to_start_it() {
        let root = tempfile::tempdir().unwrap();
        let dev = root.path().join("dev");
        assert_eq!(QdmaSpec::list(root.path()), []);
        std::fs::create_dir(&dev).unwrap();
        for name in ["qdma01000-MM-1", "qdma01000-MM-0", "qdma01000-ST-2", "qdma01000", "null"] {
            std::fs::write(dev.join(name), [0; 4096]).unwrap();
        }
        let listed: Vec<_> = QdmaSpec::list(root.path()).into_iter().map(|one| (one.name, one.supported)).collect();
        assert_eq!(listed, [("qdma:01000-MM-0".to_owned(), true), ("qdma:01000-MM-1".to_owned(), true)]);
        let missing = QdmaSpec { node: dev.join("qdma02000-MM-7") };
        let said = missing.open(&OpenOptions::default()).err().unwrap().to_string();
        assert!(said.contains("`dma-ctl qdma02000 q add idx 7 mode mm dir bi`"), "{said}");
    }
}
