//! Every example in every `--help` runs as it is printed, or is listed here with the reason why it cannot.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

const DMALANE: &str = env!("CARGO_BIN_EXE_dmalane");
const DMALANED: &str = env!("CARGO_BIN_EXE_dmalaned");

/// Examples that contain one of these texts do not run here, and why.
const ELSEWHERE: &[(&str, &str)] = &[
    ("${fpath[1]}", "needs zsh"),
    ("vfio:", "needs a PCI device; tests/vm"),
    ("vfio-user:", "needs a served card; tests/it/card.rs"),
    ("card serve", "serves until it is stopped; tests/it/card.rs"),
    ("daemon:", "needs a daemon; tests/it/dmalaned.rs"),
    ("systemctl", "needs systemd"),
    ("dmalaned status", "needs a daemon; tests/it/dmalaned.rs"),
    ("dmalaned", "serves until it is stopped; tests/it/dmalaned.rs"),
    ("-d cuda:", "needs a GPU; tests/it/keep.rs"),
    ("/dev/xdma", "needs a character device of a DMA engine"),
    ("/dev/shm/memory", "needs a file outside of the test's folder; tests/it/validate.rs"),
    ("/mnt/models", "needs a folder of that name; tests/it/cli.rs"),
];

/// Arguments that shrink what takes long, with the same code: the first is replaced by the second.
const SHORTER: &[(&str, &str)] = &[
    ("--sample 1GiB", "--sample 8MiB"),
    ("--sample 64MiB", "--sample 8MiB"),
    ("--buffer-size 64MiB", "--buffer-size 64KiB"),
    ("--offset 64MiB", "--offset 64KiB"),
    ("--buffer-size 4KiB,64KiB,1MiB,16MiB", "--buffer-size 4KiB,64KiB"),
];

fn help(program: &str, words: &[String]) -> String {
    let output = Command::new(program).args(words).arg("--help").output().unwrap();
    assert!(output.status.success(), "{program} {words:?} --help");
    String::from_utf8(output.stdout).unwrap()
}

/// The block of a help below a heading, up to the next empty line.
fn block<'a>(help: &'a str, heading: &str) -> impl Iterator<Item = &'a str> {
    let lines = help.lines().skip_while(move |line| !line.starts_with(heading)).skip(1);
    lines.take_while(|line| !line.is_empty())
}

/// The examples of a command and of its subcommands.
fn examples(program: &str, words: &[String], found: &mut Vec<String>) {
    let help = help(program, words);
    let before = found.len();
    // Lines that are indented further show output.
    found.extend(block(&help, "Examples:").filter_map(|line| {
        let line = line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?;
        // Text behind several spaces is a comment.
        Some(line.split("  ").next().unwrap_or(line).to_owned())
    }));
    assert!(found.len() > before, "{program} {words:?} has no examples");
    for name in commands(&help) {
        examples(program, &[words, &[name.to_owned()]].concat(), found);
    }
}

/// The commands that a help lists.
pub fn commands(help: &str) -> Vec<&str> {
    // Descriptions that do not fit a line are indented further.
    let lists =
        ["Commands:", "Models:", "Models that stay in memory:", "Devices:", "For authors of drivers:", "Other:"];
    let names = lists
        .iter()
        .flat_map(|heading| block(help, heading))
        .filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?.split(' ').next());
    names.filter(|name| *name != "help").collect()
}

fn shell(line: &str, folder: &Path) -> std::process::Output {
    let path = format!("{}:{}", Path::new(DMALANE).parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.args(["-ec", line]).current_dir(folder).env("PATH", path).env("HOME", folder);
    command.env("DMALANE_KEEP", folder.join("keep.sock"));
    command.output().unwrap()
}

/// A folder with the files that the examples name.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    crate::sample(folder.path().join("model.safetensors"), 4 << 20, 1);
    crate::hub::cached(&folder.path().join(".cache/huggingface/hub"));
    for (name, letter) in [("shard-1.safetensors", 'a'), ("shard-2.safetensors", 'b')] {
        crate::shard(folder.path().join(name), 4 << 20, letter);
    }
    let make = "\
        cp model.safetensors weights.bin; cp model.safetensors model.bin; cp model.bin 4711
        gzip -k model.bin model.safetensors
        mkdir -p models/minilm models/llama; cp model.safetensors models/minilm/model.safetensors
        cp model.safetensors models/llama/model.safetensors
        dmalane manifest model.safetensors -o model.manifest
        printf 'GGUF\\003\\000\\000\\000%s' > model.gguf; head -c 16 /dev/zero >> model.gguf
        mkdir -p .local/share/bash-completion/completions .config/fish/completions
        printf '%s' '{\"schema\": 1, \"mappings\": [{\"va\": \"0x40000000\", \"pa\": 0, \"len\": \
        65536, \"access\": \"rw\"}]}' > boot.json
        dmalane iopt build boot.json --format x86-64-4level -o ram.bin --base 0x1a3000
        head -c 1716224 /dev/zero > ram; cat ram.bin >> ram; mv ram ram.bin; gzip -k ram.bin";
    let output = shell(make, folder.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

/// A keeper of models in a folder.
struct Keeping(std::process::Child);

impl Keeping {
    fn at(folder: &Path) -> Self {
        let socket = folder.join("keep.sock");
        let mut command = Command::new(DMALANED);
        command.arg("keep").env("DMALANE_KEEP", &socket).env_remove("NOTIFY_SOCKET").stderr(Stdio::null());
        let keeper = Self(command.spawn().unwrap());
        let begun = Instant::now();
        while dmalane::load::kept::KeeperClient::connect(&socket).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(5));
        }
        keeper
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Options that name a file to write.
pub const WRITES: [&str; 3] = ["--trace", "--report", "-o"];

/// The results of some examples.
#[derive(Default)]
struct Done {
    ran: usize,
    wrong: Vec<String>,
    /// Why others did not run.
    reasons: Vec<&'static str>,
}

/// Runs examples one after the other, in a folder of their own.
fn run(examples: Vec<String>) -> Done {
    let folder = folder();
    let _keeper = Keeping::at(folder.path());
    let mut done = Done::default();
    for example in examples {
        if let Some((text, _)) = ELSEWHERE.iter().find(|(text, _)| example.contains(text)) {
            // Completions of the daemon need no daemon.
            if !example.contains("completions") || *text == "${fpath[1]}" {
                done.reasons.push(text);
                continue;
            }
        }
        if example.contains("| jq") && !shell("jq --version", folder.path()).status.success() {
            println!("SKIPPED: no jq for: {example}");
            continue;
        }
        let mut line = example.clone();
        for (long, short) in SHORTER {
            line = line.replace(long, short);
        }
        if line.starts_with("dmalane validate") {
            line += if line.contains("-j") { "" } else { " -j 1" };
            line += if line.contains("--buffer-size") { "" } else { " --buffer-size 64KiB" };
            line += if line.contains("--iterations") { "" } else { " --duration 0.001" };
        }
        // Another example may have dropped it.
        if line.contains("kept:llama") || line.contains("drop llama") {
            line = format!("dmalane keep -q models/llama >/dev/null; {line}");
        }
        // Without --force, an example may not replace what another one wrote.
        let words: Vec<&str> = line.split_whitespace().collect();
        for pair in words.windows(2).filter(|pair| WRITES.contains(&pair[0])) {
            let _ = std::fs::remove_file(folder.path().join(pair[1]));
        }
        let output = shell(&line, folder.path());
        done.ran += 1;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            // Older kernels have no cachestat.
            false if example.contains("inspect") && error.contains("cachestat") => {
                println!("SKIPPED: no cachestat for: {example}");
            }
            // jq prints this for a field that is not there.
            true if output.stdout.split(|b| *b == b'\n').any(|line| line == b"null") => {
                done.wrong.push(format!("{example}\nprints null"));
            }
            true => {}
            false => done.wrong.push(format!("{example}\n{error}")),
        }
    }
    done
}

#[test]
fn every_example_runs_as_printed() {
    let mut found = Vec::new();
    examples(DMALANE, &[], &mut found);
    examples(DMALANED, &[], &mut found);
    assert!(found.len() > 50, "{found:#?}");
    // Those that take as long as all others together run beside them.
    let (long, short): (Vec<_>, Vec<_>) = found.into_iter().partition(|example| example.contains("validate"));
    let both = std::thread::scope(|s| [long, short].map(|part| s.spawn(|| run(part))).map(|part| part.join().unwrap()));
    let wrong = both.iter().flat_map(|done| done.wrong.iter().cloned()).collect::<Vec<_>>();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(both.iter().map(|done| done.ran).sum::<usize>() > 30);
    let reasons: Vec<&str> = both.iter().flat_map(|done| done.reasons.iter().copied()).collect();
    let unused: Vec<_> = ELSEWHERE.iter().map(|(text, _)| *text).filter(|text| !reasons.contains(text)).collect();
    assert_eq!(unused, [""; 0], "no example needs these reasons");
}
