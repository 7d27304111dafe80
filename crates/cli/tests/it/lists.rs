//! Lists of tests that name commands, compared with the commands of the help.

use std::collections::BTreeSet;
use std::process::Command;

use crate::examples::commands;

/// Each command that can be run, with its help in one line: `iopt build` and others in place of `iopt`.
pub fn all() -> Vec<(String, String)> {
    let (mut found, mut pending) = (Vec::new(), vec![String::new()]);
    while let Some(name) = pending.pop() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        let output = command.args(name.split_whitespace()).arg("--help").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        match &commands(&help)[..] {
            [] => found.push((name, in_one_line(&help))),
            below => pending.extend(below.iter().map(|next| format!("{name} {next}").trim().to_owned())),
        }
    }
    found
}

fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The commands whose help has these words.
pub fn with(words: &str) -> BTreeSet<String> {
    all().into_iter().filter_map(|(name, help)| help.contains(words).then_some(name)).collect()
}

/// These words are in the help of each command that takes a model by its directory.
pub const MODELS: &str = "the directory or the index of a model";

/// Whether a command line is one of this command, and not of another one whose name goes on.
pub fn runs(line: &str, command: &str) -> bool {
    line.strip_prefix(command).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

#[test]
fn every_text_is_looked_at_for_its_width() {
    for (name, _) in all() {
        // They need a PCI device; serve until they are stopped; print a script.
        let elsewhere = ["bar-map", "card serve", "completions"].contains(&&*name);
        let here = crate::columns::COMMANDS.iter().any(|(line, _)| runs(line, &name));
        assert!(here || elsewhere, "{name} is not in COMMANDS of columns.rs");
        assert!(!here || !elsewhere, "{name} is in COMMANDS of columns.rs, so it is no exception in lists.rs");
    }
}
