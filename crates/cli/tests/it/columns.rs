//! Text fits the reader's terminal: 100 columns at most, fewer in a narrow terminal or by `COLUMNS`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Commands that print text, in this order, and their exit statuses.
pub const COMMANDS: &[(&str, i32)] = &[
    ("load --sample 8MiB -v --verify --list", 0),
    ("load m.safetensors -v --repeat 2 --cold --trace t --report r -d soft", 0),
    ("load m.safetensors -v -d ram:64MiB", 0),
    ("load m.safetensors --dry-run --list", 0),
    ("read m.safetensors -v", 0),
    ("read m.safetensors -v --heap memfd", 0),
    ("inspect m.safetensors", 0),
    ("manifest m.safetensors -o manifest", 0),
    ("verify m.safetensors --manifest manifest", 0),
    ("keep m.safetensors", 1),
    ("kept", 1),
    ("drop m", 1),
    ("vm bench 1MiB 100", 0),
    ("validate -j 1 --placement ddr --buffer-size 64KiB --iterations 1 -v", 0),
    ("doctor", 0),
    ("devices", 0),
    ("iopt formats", 0),
    ("iopt build spec.json -f x86-64-4level -o image --base 0x1a3000", 0),
    ("iopt walk image -f x86-64-4level --root 0x1a3000 0x40000000 0", 0),
    ("iopt dump image -f x86-64-4level --root 0x1a3000", 0),
    ("card --help", 0),
    ("load m.safetensors -d ram:1MiB", 1),
    ("load m.safetensors --trace m.safetensors", 1),
    ("load m.safetensors -d daemon:/nowhere", 1),
    ("load m.safetensors -d file:/dev/shm/no/such/memory", 1),
    ("load m.safetensors -d /dev/xdma0_h2c_0", 2),
    ("load m.safetensors -d soft,ddr=1TiB", 2),
    ("load m.safetensors --placement hbm-third", 2),
    ("validate -d soft,ring=3 --buffer-size 3KiB", 2),
    ("iopt walk image -f x86-65-4level --root 0 0", 2),
];

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    crate::sample(folder.join("m.safetensors"), 8 << 20, 1);
    let mapping = r#"{"va": "0x40000000", "pa": 0, "len": 65536, "access": "rw"}"#;
    std::fs::write(folder.join("spec.json"), format!(r#"{{"schema": 1, "mappings": [{mapping}]}}"#)).unwrap();
    folder
}

fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    command.args(line.split_whitespace()).current_dir(folder).env_remove("COLUMNS");
    command.env("DMALANE_KEEP", folder.join("no-keeper")); // not one that the user runs
    command
}

/// The lines that are too wide, with the command. A command to be copied is in one piece, and so is a word.
fn too_wide(command: &str, text: &str, most: usize) -> Vec<String> {
    let is_command = |line: &str| ["`", "fix: ", "sudo "].iter().any(|mark| line.contains(mark));
    let in_pieces = |line: &&str| line.trim_start().contains(' ') && !is_command(line);
    let wide = text.lines().filter(in_pieces).filter(|line| line.chars().count() > most);
    wide.map(|line| format!("{command}: {line}")).collect()
}

#[test]
fn no_line_is_wider_than_100_columns_or_the_environment_says() {
    // Some commands are enough to see where the width comes from.
    for (columns, most, commands) in
        [(None, 100, COMMANDS), (Some("60"), 60, COMMANDS), (Some("x"), 100, &COMMANDS[..3])]
    {
        let folder = folder("columns");
        let mut wide = Vec::new();
        for (line, status) in commands {
            let mut command = command(&folder, line);
            columns.map(|columns| command.env("COLUMNS", columns));
            let output = command.output().unwrap();
            let [out, err] = [&output.stdout, &output.stderr].map(|bytes| std::str::from_utf8(bytes).unwrap());
            assert_eq!(output.status.code(), Some(*status), "{line}: {err}");
            // In a pipe, messages are in one line unless the environment says otherwise.
            let err = if columns == Some("60") { err } else { "" };
            wide.extend([out, err].into_iter().flat_map(|text| too_wide(line, text, most)));
        }
        assert!(wide.is_empty(), "COLUMNS={columns:?}:\n{}", wide.join("\n"));
    }
}

/// The text that a command shows in a terminal of `columns` columns, without colours.
fn shown(mut command: Command, columns: u16) -> String {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    tcsetwinsize(&master, Winsize { ws_row: 50, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let end = || Stdio::from(slave.try_clone().unwrap());
    let mut child = command.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(end()).stderr(end()).spawn().unwrap();
    drop((slave, command));
    let mut text = Vec::new();
    // It ends with an error when nobody has the other end any more.
    let _ = File::from(master).read_to_end(&mut text);
    child.wait().unwrap();
    // Bars are redrawn in their line.
    String::from_utf8(text).unwrap().replace("\r\n", "\n").replace('\r', "\n").replace("\x1b[2K", "")
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    for (columns, commands) in [(60, COMMANDS), (80, &COMMANDS[..3])] {
        let folder = folder("terminal");
        let mut wide = Vec::new();
        for (line, _) in commands {
            wide.extend(too_wide(line, &shown(command(&folder, line), columns), columns.into()));
        }
        assert!(wide.is_empty(), "{columns} columns:\n{}", wide.join("\n"));
    }
}
