//! Outputs never destroy inputs: ways to point the files that commands write at files that must stay.

use std::any::TypeId;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::examples::WRITES;
use crate::lists;

const INDEX: &str = "indexed/a.safetensors.index.json";

/// Files that must stay as they are, by their contents.
struct Place {
    folder: PathBuf,
    precious: Vec<(PathBuf, Vec<u8>)>,
}

impl Place {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("sub")).unwrap();
        let mut place = Self { folder, precious: Vec::new() };
        crate::sample(place.at("model.safetensors"), 1 << 20, 1);
        let spec = r#"{"schema": 1, "mappings": [{"va": 1048576, "pa": 0, "len": 4096, "access": "rw"}]}"#;
        fs::write(place.at("boot.json"), spec).unwrap();
        fs::write(place.at("sub/model.safetensors"), b"another model").unwrap();
        fs::write(place.at("card.img"), vec![7; 4 << 20]).unwrap();
        fs::hard_link(place.at("model.safetensors"), place.at("hard")).unwrap();
        symlink("model.safetensors", place.at("link")).unwrap();
        symlink("link", place.at("link-to-link")).unwrap();
        fs::create_dir(place.at("open")).unwrap();
        fs::set_permissions(place.at("open"), fs::Permissions::from_mode(0o1777)).unwrap();
        symlink("../sub/model.safetensors", place.at("open/planted")).unwrap();
        fs::create_dir(place.at("indexed")).unwrap();
        fs::copy(place.at("model.safetensors"), place.at("indexed/a.safetensors")).unwrap();
        fs::write(place.at(INDEX), r#"{"weight_map": {"tensor": "a.safetensors"}}"#).unwrap();
        place.dmalane("manifest -q model.safetensors -o weights", 0);
        for name in ["model.safetensors", "boot.json", "sub/model.safetensors", "card.img", INDEX, "weights"] {
            let path = place.at(name);
            let bytes = fs::read(&path).unwrap();
            place.precious.push((path, bytes));
        }
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Runs a command, whose exit status must be this, and gives what it said. After ` < ` comes its input.
    fn dmalane(&self, line: &str, status: i32) -> String {
        let (words, stdin) = line.split_once(" < ").unwrap_or((line, "/dev/null"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.args(words.split_whitespace()).current_dir(&self.folder).envs(crate::WIDE);
        command.stdin(fs::File::open(self.at(stdin)).unwrap());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "dmalane {line}\n{said}");
        said
    }

    fn stays(&self, line: &str) {
        for (path, bytes) in &self.precious {
            assert!(fs::read(path).unwrap() == *bytes, "{} changed by: dmalane {line}", path.display());
        }
        let hidden = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with('.');
        assert_eq!(fs::read_dir(&self.folder).unwrap().filter(|e| hidden(e.as_ref().unwrap())).count(), 0, "{line}");
    }
}

#[test]
fn an_output_that_is_an_input_or_exists_is_refused() {
    let place = Place::new("outputs");
    let card = "-d file:card.img";
    symlink("sub", place.at("alias")).unwrap();
    let mut writers = Vec::new();
    for (name, help) in lists::all().into_iter().filter(|(_, help)| help.contains("--force")) {
        let has = |option: &str| ["<", "[<"].iter().any(|value| help.contains(&format!("{option} {value}")));
        let options = WRITES.into_iter().filter(|option| has(option) || help.contains(&format!("{option}, --")));
        let of_it: Vec<_> = options.map(|option| (name.clone(), option)).collect();
        assert!(!of_it.is_empty(), "WRITES has no output of {name}");
        writers.extend(of_it);
    }
    for (line, why) in [
        // The input itself, under each of its names.
        ("load model.safetensors --trace ./model.safetensors --force", "it is the input"),
        ("load model.safetensors --trace sub/../model.safetensors --force", "it is the input"),
        ("load model.safetensors --trace link-to-link --force", "it is a symbolic link"),
        ("load link --trace model.safetensors --force", "it is the input"),
        ("load hard --trace model.safetensors --force", "it is the input"),
        ("load model.safetensors --trace model.safetensors --force", "it is the input"),
        ("load model.safetensors --trace hard --force", "it is the input"),
        ("load boot.json model.safetensors --trace boot.json --force", "it is the input"),
        ("load model.safetensors --report hard --force", "it is the input"),
        ("iopt build boot.json --format x86-64-4level -o boot.json --force", "it is the input"),
        ("manifest model.safetensors -o link --force", "it is a symbolic link"),
        // The index of a model, and a manifest.
        (&format!("load {INDEX} --trace {INDEX} --force"), "it is the input"),
        (&format!("load indexed --trace {INDEX} --force"), "it is the input"),
        (&format!("manifest {INDEX} -o {INDEX} --force"), "it is the input"),
        ("load model.safetensors --manifest weights --report weights --force", "it is the input"),
        ("read model.safetensors --manifest weights --trace weights --force", "it is the input"),
        // The manifest on standard input.
        ("load model.safetensors --manifest - --trace weights --force < weights", "it is the input stdin"),
        ("read model.safetensors --manifest - --trace weights --force < weights", "it is the input stdin"),
        ("load - --trace model.safetensors --force < model.safetensors", "it is the input stdin"),
        ("manifest - -o model.safetensors --force < hard", "it is the input stdin"),
        // The memory of the device.
        (&format!("load boot.json {card} --trace card.img --force --overwrite"), "it is the input device memory"),
        ("validate -d file:card.img --overwrite --report card.img --force", "it is the input"),
        // Files that exist, without --force.
        // With --force it would be refused as well, so nobody is told to use that.
        ("load model.safetensors --trace model.safetensors", "it is the input model.safetensors"),
        ("load model.safetensors --trace hard", "it is the input model.safetensors"),
        ("load boot.json --trace hard", "it exists already"),
        ("load boot.json --trace link", "it is a symbolic link"),
        ("load boot.json --trace sub/model.safetensors", "it exists already"),
        ("load --sample 4KiB --trace boot.json", "it exists already"),
        ("load --sample 4KiB --report boot.json", "it exists already"),
        ("iopt build boot.json --format x86-64-4level -o model.safetensors", "it exists already"),
        ("iopt build boot.json --format x86-64-4level -o link", "it is a symbolic link"),
        ("validate --report boot.json", "it exists already"),
        ("manifest model.safetensors -o boot.json", "it exists already"),
        ("read model.safetensors --trace boot.json", "it exists already"),
        ("read model.safetensors --report boot.json", "it exists already"),
        // A link that others may have planted.
        ("validate --report open/planted --force", "it is a symbolic link"),
        // One name for two outputs.
        ("load boot.json --trace sub/new --report sub/new", "both write sub/new"),
        ("load boot.json --trace sub/new --report ./sub/new", "both write ./sub/new"),
        ("load boot.json --trace sub/../new --report new", "both write new"),
        ("load boot.json --report alias/new --trace sub/new --force", "both write alias/new"),
        ("read boot.json --trace alias/new --report sub/new", "both write sub/new"),
    ] {
        let status = if why.starts_with("both") { 2 } else { 1 };
        let said = place.dmalane(line, status);
        assert!(said.contains(why), "dmalane {line}\n{said}");
        if why.contains("exists") {
            assert!(said.contains("--force replaces it"), "{said}");
        }
        if why.contains("a symbolic link") {
            assert!(said.contains("hint: name the file that it stands for"), "{said}");
        }
        place.stays(line);
        let is = |name: &str, option: &str| lists::runs(line, name) && line.contains(&format!(" {option} "));
        writers.retain(|(name, option)| !(why.contains("exists") && is(name, option)));
    }
    assert!(writers.is_empty(), "of {writers:?} no output exists already");
}

#[test]
fn data_in_device_memory_are_not_overwritten_unasked() {
    let place = Place::new("device-memory");
    for line in ["load boot.json -d file:card.img", "validate -d file:card.img -j 1 --buffer-size 64KiB"] {
        let said = place.dmalane(line, 1);
        assert!(said.contains("holds data") && said.contains("--overwrite"), "{said}");
        place.stays(line);
    }
    let said = place.dmalane("load boot.json --overwrite", 2);
    assert!(said.contains("--overwrite is for file"), "{said}");
    fs::File::create(place.at("empty.img")).unwrap().set_len(4 << 20).unwrap();
    place.dmalane("load boot.json -d file:empty.img --verify", 0);
    place.dmalane("load boot.json -d file:empty.img --verify", 1);
    place.dmalane("load boot.json -d file:empty.img --verify --overwrite", 0);
}

#[test]
fn a_file_is_not_read_onto_itself() {
    let place = Place::new("onto-itself");
    fs::hard_link(place.at("card.img"), place.at("other-name")).unwrap();
    for line in ["load card.img -d file:card.img --overwrite", "load boot.json card.img -d file:other-name --overwrite"]
    {
        let said = place.dmalane(line, 1);
        assert!(said.contains(" is the memory of the device"), "{said}");
        place.stays(line);
    }
}

/// Arguments that may name a file, of commands with a device: a line where it is the device's memory, and its refusal.
/// `m` is a manifest that is large enough for a device.
const DEVICE_MEMORY: &[(&str, &str, &str, &str)] = &[
    ("load", "files", "load m -d file:m --overwrite", "m is the memory of the device"),
    ("load", "files", "load - -d file:m --overwrite < m", "stdin is the memory of the device"),
    ("load", "manifest", "load boot.json --manifest m -d file:m --overwrite", "m is the memory of the device"),
    ("load", "manifest", "load boot.json --manifest - -d file:m --overwrite < m", "stdin is the memory of the device"),
    ("load", "trace", "load boot.json --trace m -d file:m --overwrite --force", "it is the input device memory"),
    ("load", "report", "load boot.json --report m -d file:m --overwrite --force", "it is the input device memory"),
    ("validate", "report", "validate --report m -d file:m --overwrite --force", "it is the input device memory"),
];

/// Arguments that name no file, though their types would let them, and commands without such arguments: why none can be
/// the device's memory.
const NEVER_DEVICE_MEMORY: &[(&str, &str, &str)] = &[
    ("card serve", "vfio_user", "its device is the software card"),
    ("bar-map", "", "its devices are those of VFIO"),
    ("keep", "files", "it takes devices that lend their memory: GPUs"),
    ("keep", "manifest", "as its files"),
    ("keep", "name", "it names no file"),
    ("vm bench", "", "it binds memory of a device, and writes none"),
];

/// The arguments that may name a file, by their types, of each command that takes a device; one without a name where
/// there is none.
fn files_of_commands_with_devices(command: &clap::Command, name: &str, found: &mut BTreeSet<(String, String)>) {
    let of_type = |arg: &clap::Arg, types: &[TypeId]| types.iter().any(|id| arg.get_value_parser().type_id() == *id);
    let is_device =
        |arg: &&clap::Arg| of_type(arg, &[TypeId::of::<dmalane::DeviceSpec>()]) || arg.get_short() == Some('d');
    if command.get_arguments().any(|arg| is_device(&arg)) {
        let texts = [TypeId::of::<PathBuf>(), TypeId::of::<OsString>(), TypeId::of::<String>()];
        let files = command.get_arguments().filter(|arg| of_type(arg, &texts));
        let mut files: Vec<_> = files.map(|arg| arg.get_id().to_string()).collect();
        if files.is_empty() {
            files.push(String::new());
        }
        found.extend(files.into_iter().map(|file| (name.to_owned(), file)));
    }
    for below in command.get_subcommands() {
        files_of_commands_with_devices(below, format!("{name} {}", below.get_name()).trim(), found);
    }
}

#[test]
fn a_file_that_is_device_memory_is_no_input_and_no_output() {
    let mut place = Place::new("device-memory-apart");
    place.dmalane("manifest -q boot.json -o m", 0);
    let mut bytes = fs::read(place.at("m")).unwrap();
    bytes.resize(4 << 20, b'\n');
    fs::write(place.at("m"), &bytes).unwrap();
    place.precious.push((place.at("m"), bytes));
    // Good as what it is.
    place.dmalane("verify boot.json --manifest m", 0);

    let mut wanted = BTreeSet::new();
    files_of_commands_with_devices(&dmalane_cli::definition(), "", &mut wanted);
    let pair = |command: &str, argument: &str| (command.to_owned(), argument.to_owned());
    let lines = DEVICE_MEMORY.iter().map(|(command, argument, ..)| pair(command, argument));
    let never = NEVER_DEVICE_MEMORY.iter().map(|(command, argument, _)| pair(command, argument));
    assert_eq!(wanted, lines.chain(never).collect(), "DEVICE_MEMORY and NEVER_DEVICE_MEMORY have one line each");
    for (.., line, why) in DEVICE_MEMORY {
        let said = place.dmalane(line, if why.contains("cannot be used") { 2 } else { 1 });
        assert!(said.contains(why), "dmalane {line}\n{said}");
        place.stays(line);
    }
}

#[test]
fn force_replaces_what_is_no_input() {
    let place = Place::new("forced");
    fs::write(place.at("old"), b"old").unwrap();
    for line in
        ["load -q model.safetensors --trace old --force", "iopt build boot.json --format x86-64-4level -o old --force"]
    {
        place.dmalane(line, 0);
        assert_ne!(fs::read(place.at("old")).unwrap(), b"old", "{line}");
        fs::write(place.at("old"), b"old").unwrap();
        place.stays(line);
    }
}

#[test]
fn a_file_that_does_not_reach_the_disk_replaces_nothing() {
    let place = Place::new("outputs-synced");
    fs::write(place.at("old"), b"old").unwrap();
    for line in
        ["load -q model.safetensors --trace old --force", "iopt build boot.json --format x86-64-4level -o old --force"]
    {
        // As NFS says where a quota is exceeded.
        let mut strace = crate::injecting("fsync:error=EDQUOT:when=1");
        let Ok(output) = strace.args(line.split(' ')).current_dir(&place.folder).output() else {
            return println!("SKIPPED: no strace");
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("quota exceeded"), "{line}: {said}");
        assert_eq!(fs::read(place.at("old")).unwrap(), b"old");
        place.stays(line);
    }
}

/// A killed process can leave a part of its file, under a hidden name beside it.
#[test]
fn a_killed_load_leaves_the_old_files_or_the_new_ones() {
    const NAMES: [&str; 2] = ["trace", "report"];
    let place = Place::new("killed");
    let outputs = NAMES.map(|name| format!("--{name} {name}")).join(" ");
    let line = format!("load -q model.safetensors -d soft,ddr=16MiB,hbm=4MiB {outputs}");
    let begun = Instant::now();
    place.dmalane(&line, 0);
    let whole = begun.elapsed();
    let is_new = |name: &str, bytes: &[u8]| match name {
        "trace" => serde_json::from_slice::<serde_json::Value>(bytes).is_ok(),
        _ => bytes.starts_with(b"<!doctype html>") && bytes.ends_with(b"</html>\n"),
    };
    let (mut old, mut new) = (0, 0);
    for kill in 0..crate::kills() {
        // Every other run replaces nothing.
        let replaces = kill % 2 == 0;
        for name in NAMES {
            fs::remove_file(place.at(name)).unwrap_or_default();
            if replaces {
                fs::write(place.at(name), "old").unwrap();
            }
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.args(line.split_whitespace()).args(replaces.then_some("--force")).current_dir(&place.folder);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // The golden ratio spreads the moments evenly over a run.
        std::thread::sleep(whole.mul_f64(kill as f64 * 0.618_033_988_75 % 1.0));
        child.kill().unwrap();
        child.wait().unwrap();
        for name in NAMES {
            match fs::read(place.at(name)) {
                Ok(bytes) if replaces && bytes == b"old" => old += 1,
                Err(_) if !replaces => old += 1,
                Ok(bytes) if is_new(name, &bytes) => new += 1,
                other => panic!("kill {kill}: {name} is neither old nor new: {other:?}"),
            }
        }
        for hidden in fs::read_dir(&place.folder).unwrap().flatten() {
            if hidden.file_name().to_string_lossy().starts_with('.') {
                fs::remove_file(hidden.path()).unwrap();
            }
        }
        place.stays(&line);
    }
    println!("{old} outputs were old and {new} new");
    assert!(old > 0, "all runs were killed after their end");
}

#[test]
fn a_full_file_system_keeps_what_is_there() {
    let place = Place::new("full");
    fs::create_dir(place.at("disk")).unwrap();
    let mounted = "mount -t tmpfs -o size=64k none disk && head -c 16k card.img >disk/old || exit 96
        head -c 1M /dev/zero >disk/filler 2>&-
        \"$@\"; status=$?
        head -c 16k card.img | cmp -s - disk/old || status=97
        [ \"$(ls -A disk | tr '\\n' ' ')\" = 'filler old ' ] || status=98
        exit $status";
    for line in [
        "load -q model.safetensors --trace disk/old --force",
        "load -q model.safetensors --report disk/old --force",
        "read model.safetensors --trace disk/old --force",
        "read model.safetensors --report disk/old --force",
        "iopt build boot.json --format x86-64-4level -o disk/old --force",
        "manifest model.safetensors -o disk/old --force",
        "validate -d ram:1MiB -j 1 --buffer-size 4KiB --iterations 1 --pages 4k --report disk/old --force",
        "load -q model.safetensors --trace disk/new",
    ] {
        let mut command = Command::new("unshare");
        command.args(["-rm", "sh", "-c", mounted, "sh", env!("CARGO_BIN_EXE_dmalane")]).args(line.split_whitespace());
        let output = match command.current_dir(&place.folder).output() {
            Ok(output) if output.status.code() == Some(96) => return println!("SKIPPED: no tmpfs can be mounted"),
            Ok(output) if output.stderr.starts_with(b"unshare:") => return println!("SKIPPED: no namespaces"),
            Ok(output) => output,
            Err(e) => return println!("SKIPPED: no unshare: {e}"),
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("No space left"), "dmalane {line}: {output:?}");
        place.stays(line);
    }
}

#[test]
fn a_new_file_gives_no_other_group_the_rights_of_the_old_one() {
    use std::os::unix::fs::{MetadataExt, chown};
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // Where other users may run it.
    fs::copy(env!("CARGO_BIN_EXE_dmalane"), at("dmalane")).unwrap();
    fs::write(at("boot.json"), r#"{"schema": 1, "mappings": []}"#).unwrap();
    let (bob, users, secret) = (61_000, 61_001, 61_002);
    for (groups, acl, mode, expected) in [
        (secret, false, 0o4640, (secret, 0o640)),
        (users, false, 0o4640, (users, 0o600)),
        (users, false, 0o664, (users, 0o644)),
        (secret, true, 0o660, (secret, 0o600)),
    ] {
        fs::write(at("old"), b"old").unwrap();
        if chown(at("old"), Some(61_003), Some(secret)).is_err() {
            return println!("SKIPPED: not root");
        }
        fs::set_permissions(at("old"), fs::Permissions::from_mode(mode)).unwrap();
        // u::rw-, u:BOB:rw-, g::---, m::rw-, o::---
        let entries = [(1u16, 6u16, u32::MAX), (2, 6, bob), (4, 0, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
        let list = entries
            .iter()
            .flat_map(|(tag, may, id)| [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat());
        let list: Vec<u8> = 2u32.to_le_bytes().into_iter().chain(list).collect();
        let name = "system.posix_acl_access";
        if acl && rustix::fs::setxattr(at("old"), name, &list, rustix::fs::XattrFlags::empty()).is_err() {
            println!("SKIPPED: no access control lists");
            continue;
        }
        let mut setpriv = Command::new("setpriv");
        setpriv.args([format!("--reuid={bob}"), format!("--regid={users}"), format!("--groups={groups}")]);
        setpriv.arg(at("dmalane")).args("iopt build boot.json --format x86-64-4level -o old --force".split(' '));
        let Ok(output) = setpriv.current_dir(folder.path()).output() else { return println!("SKIPPED: no setpriv") };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let meta = fs::metadata(at("old")).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (bob, expected.0, expected.1), "{mode:o}");
        fs::remove_file(at("old")).unwrap();
    }
}
