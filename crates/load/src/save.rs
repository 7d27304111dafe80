//! Files that appear whole or not at all, and in place of nothing that is still needed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use tempfile::NamedTempFile;

use crate::Error;

/// A file to write. It appears whole or not at all, under its name, when all of it is written.
///
/// Existing files are safe: a file is replaced only where that was [allowed](Output::replace), never when it is one of
/// the [inputs](Output::excluding), and never through a symbolic link, which others may have planted. A replaced file
/// gives its mode, and its owner and group where that is allowed, to the new one; where its group is not, the new one's
/// group gets no more than all others get.
///
/// ```
/// use dmalane_load::Output;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("trace");
/// Output::new(&path).write(b"one")?;
/// assert!(Output::new(&path).write(b"two").is_err(), "it exists");
/// Output::new(&path).replace(true).write(b"two")?;
/// # assert_eq!(std::fs::read(&path)?, b"two");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Output {
    path: PathBuf,
    replace: bool,
    /// Device and inode of each file that must stay, and how to call it.
    inputs: Vec<((u64, u64), PathBuf)>,
}

impl Output {
    /// A new file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), replace: false, inputs: Vec::new() }
    }

    /// Whether a regular file that is there may be replaced.
    #[must_use]
    pub fn replace(self, replace: bool) -> Self {
        Self { replace, ..self }
    }

    /// Never in place of the file with this metadata, under whichever name it is found; `path` is how errors call it.
    #[must_use]
    pub fn excluding(mut self, path: &Path, meta: &Metadata) -> Self {
        self.inputs.push(((meta.dev(), meta.ino()), path.to_owned()));
        self
    }

    /// Where it goes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are one file, under whichever names.
    pub fn is_same_place(&self, other: &Self) -> bool {
        let resolved = |output: &Self| {
            let (folder, name) = output.place().ok()?;
            Some(fs::canonicalize(folder).ok()?.join(name))
        };
        match (resolved(self), resolved(other)) {
            (Some(here), Some(there)) => here == there,
            // A path that cannot be resolved cannot be written either.
            _ => self.path == other.path,
        }
    }

    /// Whether the file could be written now, and has some room. Nothing of that is left. Writing it checks again.
    ///
    /// # Errors
    /// [`Error::File`] names the path and says what is in the way: no such directory, or one that cannot be written, an
    /// existing file that may not be replaced, an input, something that is not a regular file, a full file system.
    pub fn check(&self) -> Result<(), Error> {
        let begun = || {
            let mut saving = Saving::begin(self)?;
            match rustix::fs::fallocate(saving.file(), FallocateFlags::empty(), 0, ROOM) {
                // Not every file system can be asked.
                Err(full @ (Errno::NOSPC | Errno::DQUOT)) => Err(full.into()),
                _ => Ok(()),
            }
        };
        begun().map_err(|source| self.refusal(source))
    }

    /// Writes the file.
    ///
    /// # Errors
    /// As of [`Output::check`], and what the file system says; nothing has changed.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        self.write_with(|file| file.write_all(bytes))
    }

    /// Writes the file by a function.
    ///
    /// # Errors
    /// As of [`Output::write`], and what `write` returns.
    pub fn write_with(&self, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), Error> {
        let mut saving = self.begin()?;
        let written = write(saving.file());
        written.and_then(|()| saving.finish()).map_err(|source| self.refusal(source))
    }

    /// Begins to write it.
    fn begin(&self) -> Result<Saving<'_>, Error> {
        Saving::begin(self).map_err(|source| self.refusal(source))
    }

    fn refusal(&self, source: io::Error) -> Error {
        Error::File { path: self.path.clone(), what: "save to it", source }
    }

    /// The directory, and the name in it.
    fn place(&self) -> io::Result<(&Path, &OsStr)> {
        let name = self.path.file_name().ok_or_else(|| not_a_file(0o040_000))?;
        Ok((self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")), name))
    }

    /// The file that has the name now; an error if it may not be replaced.
    fn old(&self) -> io::Result<Option<Metadata>> {
        let meta = match fs::symlink_metadata(&self.path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if let Some((_, input)) = self.inputs.iter().find(|(id, _)| *id == (meta.dev(), meta.ino())) {
            return Err(io::Error::other(format!("it is the input {}", input.display())));
        }
        if !meta.is_file() {
            return Err(not_a_file(meta.mode()));
        }
        if !self.replace {
            let what = format!("it exists already, and has {} bytes", meta.len());
            return Err(io::Error::new(ErrorKind::AlreadyExists, what));
        }
        Ok(Some(meta))
    }

    /// The mode of a file that replaces `old`: its own, but nothing for a group that the mode was not made for.
    fn mode(&self, old: &Metadata, same_group: bool) -> u32 {
        let mode = old.mode() & 0o777;
        // The bits of the group are the mask of an access control list, which the new file has not.
        let listed = rustix::fs::lgetxattr(&self.path, "system.posix_acl_access", &mut [0; 1024]);
        match same_group && matches!(listed, Err(Errno::NODATA | Errno::OPNOTSUPP)) {
            true => mode,
            false => (mode & 0o707) | (mode & ((mode & 0o007) << 3)),
        }
    }
}

impl From<&Path> for Output {
    fn from(path: &Path) -> Self {
        Self::new(path)
    }
}

/// Bytes for which there must be room before a file is begun.
const ROOM: u64 = 64 << 10;

fn not_a_file(mode: u32) -> io::Error {
    // `S_IFMT`
    let (kind, what) = match mode & 0o170_000 {
        0o040_000 => (ErrorKind::IsADirectory, "a folder"),
        0o020_000 => (ErrorKind::InvalidInput, "a character device"),
        0o060_000 => (ErrorKind::InvalidInput, "a block device"),
        0o010_000 => (ErrorKind::InvalidInput, "a pipe"),
        0o140_000 => (ErrorKind::InvalidInput, "a socket"),
        0o120_000 => (ErrorKind::InvalidInput, "a symbolic link"),
        _ => (ErrorKind::InvalidInput, "something else"),
    };
    io::Error::new(kind, format!("it is {what}, not a file"))
}

/// A file being written, hidden beside the target, and removed on drop.
struct Saving<'a> {
    output: &'a Output,
    file: NamedTempFile,
}

impl<'a> Saving<'a> {
    fn begin(output: &'a Output) -> io::Result<Self> {
        let ((folder, name), old) = (output.place()?, output.old()?);
        // rw-rw-rw- less the umask, as any new file. One that replaces another is nobody else's before it has its mode.
        let mode = Permissions::from_mode(if old.is_some() { 0o600 } else { 0o666 });
        let mut prefix = OsString::from(".");
        // A file name has at most 255 bytes.
        prefix.push(OsStr::from_bytes(&name.as_bytes()[..name.len().min(200)]));
        prefix.push(".dmalane-");
        let file = tempfile::Builder::new().prefix(&prefix).permissions(mode).tempfile_in(folder);
        // It names a file of which nobody knows.
        let file = file.map_err(|e| {
            let said = e.to_string();
            let said = said.split(" at path ").next().unwrap_or(&said);
            io::Error::new(e.kind(), format!("no file can be made beside it: {said}"))
        })?;
        if let Some(old) = &old {
            // Only root may give files away; who may not keeps what is his, in the file's group if it is one of his.
            let _ = fchown(&file, Some(old.uid()), None);
            let same_group = fchown(&file, None, Some(old.gid())).is_ok();
            let mode = output.mode(old, same_group);
            file.as_file().set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(Self { output, file })
    }

    fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Gives the file its name, when all of it is on the disk: after a power cut there is the old file or the new one.
    fn finish(self) -> io::Result<()> {
        let Self { output, file } = self;
        file.as_file().sync_all()?;
        // A file may have come there meanwhile.
        output.old()?;
        let placed = if output.replace { file.persist(&output.path) } else { file.persist_noclobber(&output.path) };
        placed.map_err(|e| match e.error.kind() {
            ErrorKind::AlreadyExists => io::Error::new(ErrorKind::AlreadyExists, "it exists already"),
            _ => e.error,
        })?;
        // The new file has its name, and is whole, whatever this says.
        let _ = output.place().and_then(|(folder, _)| File::open(folder)?.sync_all());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane_dma::error_chain;
    use std::os::unix::fs::symlink;

    fn save(path: &Path, bytes: &[u8]) -> Result<(), Error> {
        Output::new(path).replace(true).write(bytes)
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_said_to_be_that() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o500)).unwrap();
        // Root may write everywhere but in /proc.
        let at = if rustix::process::geteuid().is_root() { Path::new("/proc/self") } else { folder.path() };
        let text = error_chain(&Output::new(at.join("name")).write(b"x").unwrap_err());
        assert!(text.contains("no file can be made beside it: ") && !text.contains("/proc/self/fd"), "{text}");
    }

    #[test]
    fn replaces_files_where_that_is_allowed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        Output::new(at("new")).write(b"1").unwrap();
        fs::set_permissions(at("new"), Permissions::from_mode(0o600)).unwrap();
        for refused in [Output::new(at("new")).check(), Output::new(at("new")).write(b"x")] {
            assert!(error_chain(&refused.unwrap_err()).contains("it exists already"));
        }
        save(&at("new"), b"22").unwrap();
        assert_eq!(
            (fs::read(at("new")).unwrap(), fs::metadata(at("new")).unwrap().mode() & 0o777),
            (b"22".to_vec(), 0o600)
        );
        symlink("new", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        symlink("round", at("round")).unwrap();
        for (path, why) in [
            (Path::new("/dev/null").to_owned(), "character device"),
            (folder.path().to_owned(), "a folder"),
            (at("missing/x"), "No such file"),
            (at("new/x"), "Not a directory"),
            (at("link"), "a symbolic link"),
            (at("dangling"), "a symbolic link"),
            (at("round"), "a symbolic link"),
            (PathBuf::from("/"), "a folder"),
            (PathBuf::from(""), "a folder"),
        ] {
            let output = Output::new(&path).replace(true);
            let error = error_chain(&output.check().unwrap_err());
            assert!(error.contains(why) && error.contains(&*path.to_string_lossy()), "{error}");
            assert!(output.write(b"x").is_err());
        }
        // An output that is not finished leaves no file.
        let output = Output::new(at("half"));
        let mut half = output.begin().unwrap();
        half.file().write_all(b"half").unwrap();
        drop(half);
        let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["dangling", "link", "new", "round"]);
        assert_eq!(fs::read(at("new")).unwrap(), b"22");
    }

    #[test]
    fn an_input_is_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("model"), b"weights").unwrap();
        fs::hard_link(at("model"), at("hard")).unwrap();
        let model = fs::metadata(at("model")).unwrap();
        for name in ["model", "hard"] {
            let output = Output::new(at(name)).replace(true).excluding(&at("model"), &model);
            for refused in [output.check(), output.write(b"x")] {
                let error = error_chain(&refused.unwrap_err());
                assert!(error.contains("it is the input") && error.ends_with("model"), "{error}");
            }
        }
        // One that comes there while the output is being written.
        let output = Output::new(at("late")).replace(true).excluding(&at("model"), &model);
        let saving = output.begin().unwrap();
        fs::rename(at("model"), at("late")).unwrap();
        assert!(error_chain(&saving.finish().unwrap_err()).contains("it is the input"));
        let output = Output::new(at("fresh"));
        let saving = output.begin().unwrap();
        fs::write(at("fresh"), b"someone else's").unwrap();
        assert_eq!(saving.finish().unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(at("late")).unwrap(), b"weights");
        assert_eq!(fs::read(at("fresh")).unwrap(), b"someone else's");
    }

    #[test]
    fn one_place_is_known_by_each_of_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| Output::new(folder.path().join(name));
        fs::create_dir(folder.path().join("sub")).unwrap();
        symlink("sub", folder.path().join("alias")).unwrap();
        assert!(at("sub/new").is_same_place(&at("alias/new")) && at("sub/../new").is_same_place(&at("new")));
        assert!(!at("sub/new").is_same_place(&at("new")) && !at("sub/a").is_same_place(&at("sub/b")));
        assert!(!at("missing/new").is_same_place(&at("lost/new")), "neither is there");
        assert!(at("missing/new").is_same_place(&at("missing/new")));
    }

    #[test]
    fn names_as_long_as_they_may_be_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n".repeat(255));
        save(&path, b"1").unwrap();
        save(&path, b"2").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"2");
        assert!(save(&folder.path().join("n".repeat(256)), b"x").is_err());
    }
}
