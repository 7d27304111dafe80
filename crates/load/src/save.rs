//! Files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use crate::Error;

/// Whether [`OpenDevice::save`](crate::OpenDevice::save) can save to `path`: in a folder that exists, a new file, or a
/// regular file that is then replaced (through a symbolic link, the file that it names). This can change before the
/// save.
///
/// # Errors
/// [`Error::File`] names `path` and what is in the way.
pub fn check_target(path: &Path) -> Result<(), Error> {
    Target::new(path).map(drop).map_err(|source| refusal(path, source))
}

/// Writes a file that appears whole or not at all, where [`check_target`] allows it.
///
/// # Errors
/// [`Error::File`] names `path`.
pub fn save_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut saving = Saving::begin(path)?;
    let written = saving.file().write_all(bytes);
    written.and_then(|()| saving.finish()).map_err(|source| refusal(path, source))
}

fn refusal(path: &Path, source: io::Error) -> Error {
    Error::File { path: path.to_owned(), what: "save to it", source }
}

/// Where a file is going to be.
struct Target {
    path: PathBuf,
    folder: PathBuf,
    /// Mode and owner of the file that is there now.
    old: Option<fs::Metadata>,
}

impl Target {
    fn new(path: &Path) -> io::Result<Self> {
        // Through a symbolic link, so that the link stays.
        let path = match fs::symlink_metadata(path) {
            Ok(meta) if meta.is_symlink() => fs::canonicalize(path)?,
            _ => path.to_owned(),
        };
        let old = match fs::metadata(&path) {
            Ok(meta) => Some(meta),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        if let Some(kind) = old.as_ref().filter(|m| !m.is_file()).map(|m| kind(m.file_type())) {
            return Err(io::Error::other(format!("it is {kind}, not a file")));
        }
        if path.file_name().is_none() {
            return Err(io::Error::other("it names no file"));
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
        if !fs::metadata(&folder).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", folder.display())))?.is_dir()
        {
            return Err(io::Error::other(format!("{} is not a folder", folder.display())));
        }
        Ok(Self { path, folder, old })
    }

    /// A name beside the target that nothing has.
    fn beside(&self, attempt: u32) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!(".dmalane-{}-{attempt}", std::process::id()));
        self.folder.join(name)
    }
}

fn kind(of: fs::FileType) -> &'static str {
    match of {
        t if t.is_dir() => "a folder",
        t if t.is_char_device() => "a character device",
        t if t.is_block_device() => "a block device",
        t if t.is_fifo() => "a pipe",
        t if t.is_socket() => "a socket",
        _ => "something else",
    }
}

/// A file being written that has no name yet where the file system can do that, so that nothing is left of it however
/// this process ends; elsewhere a hidden one beside the target.
pub(crate) struct Saving {
    target: Target,
    file: File,
    /// Its name, where it needs one; removed on drop.
    named: Option<tempfile::TempPath>,
}

impl Saving {
    pub(crate) fn begin(path: &Path) -> Result<Self, Error> {
        Self::begin_at(path).map_err(|source| refusal(path, source))
    }

    fn begin_at(path: &Path) -> io::Result<Self> {
        let target = Target::new(path)?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, named) = match rustix::fs::open(&target.folder, flags, Mode::from_raw_mode(0o666)) {
            Ok(fd) => (File::from(fd), None),
            // Kernels and file systems without unnamed files say so in several ways.
            Err(_) => {
                let path = target.beside(0);
                let mut builder = tempfile::Builder::new();
                let (prefix, folder) = (path.file_name().unwrap_or_default(), &target.folder);
                // rw-rw-rw- less the umask, as any new file.
                let builder = builder.prefix(prefix).permissions(Permissions::from_mode(0o666));
                let (file, path) = builder.tempfile_in(folder).map_err(|e| io::Error::from(e.kind()))?.into_parts();
                (file, Some(path))
            }
        };
        if let Some(old) = &target.old {
            file.set_permissions(old.permissions())?;
            // Only root may give files away; who may not keeps what is his.
            let _ = std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()));
        }
        Ok(Self { target, file, named })
    }

    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name, replacing what has it now.
    pub(crate) fn finish(self) -> io::Result<()> {
        if let Some(path) = self.named {
            return path.persist(&self.target.path).map_err(|e| e.error);
        }
        // A link cannot replace a file, a rename can.
        let source = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        for attempt in 0.. {
            let beside = self.target.beside(attempt);
            match rustix::fs::linkat(CWD, &source, CWD, &beside, AtFlags::SYMLINK_FOLLOW) {
                Err(rustix::io::Errno::EXIST) if attempt < 100 => continue,
                other => other?,
            }
            return fs::rename(&beside, &self.target.path).inspect_err(|_| drop(fs::remove_file(&beside)));
        }
        Err(ErrorKind::AlreadyExists.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn replaces_files_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        save_bytes(&at("new"), b"1").unwrap();
        fs::set_permissions(at("new"), Permissions::from_mode(0o600)).unwrap();
        save_bytes(&at("new"), b"22").unwrap();
        assert_eq!(
            (fs::read(at("new")).unwrap(), fs::metadata(at("new")).unwrap().mode() & 0o777),
            (b"22".to_vec(), 0o600)
        );
        symlink("new", at("link")).unwrap();
        save_bytes(&at("link"), b"333").unwrap();
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert_eq!(fs::read(at("new")).unwrap(), b"333");
        for (path, why) in [
            (Path::new("/dev/null").to_owned(), "character device"),
            (folder.path().to_owned(), "a folder"),
            (at("missing/x"), "No such file"),
            (at("new/x"), "Not a directory"),
            (PathBuf::from("/"), "a folder"),
        ] {
            let error = check_target(&path).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(&*path.to_string_lossy()), "{error}");
            assert!(save_bytes(&path, b"x").is_err());
        }
        symlink("nowhere", at("dangling")).unwrap();
        assert!(check_target(&at("dangling")).is_err());
        // What is not finished leaves nothing.
        let mut half = Saving::begin(&at("half")).unwrap();
        half.file().write_all(b"half").unwrap();
        drop(half);
        let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["dangling", "link", "new"]);
    }
}
