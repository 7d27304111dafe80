//! Lists that name commands, in `cli.md`, `json.md` and tests, compared with what each command's help says.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

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

/// The names of all fields in an object, and in those within it, but for those that a file has named.
pub fn keys(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let within = |key: &str, value| if key == "metadata" { Vec::new() } else { keys(value) };
            fields.iter().flat_map(|(key, value)| [vec![key.clone()], within(key, value)].concat()).collect()
        }
        Value::Array(items) => items.iter().flat_map(keys).collect(),
        _ => Vec::new(),
    }
}

/// A page of the documentation.
pub fn page(name: &str) -> String {
    std::fs::read_to_string(format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn the_page_names_the_commands_that_share_an_option() {
    let page = in_one_line(&page("reference/cli.md"));
    for (before, after, words) in [
        ("## Device names ", " take the same names", "`dmalane devices` describes them"),
        ("## Standard input ", " and `--manifest` read", "; - for standard input"),
        ("## Models of several files ", " take a directory", MODELS),
        ("`--csv` (", ")", "--csv"),
        ("`--repeat N` (", ")", "--repeat"),
    ] {
        let named = page.split_once(before).and_then(|(_, rest)| rest.split_once(after));
        let (named, _) = named.unwrap_or_else(|| panic!("cli.md has no {before:?} with {after:?} behind it"));
        // Names are between backquotes.
        let named: BTreeSet<String> = named.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        assert_eq!(named, with(words), "cli.md between {before:?} and {after:?}, and each help with {words:?}");
    }
}

#[test]
fn the_page_has_a_section_for_each_json_object() {
    let page = page("formats/json.md");
    for name in with("--json") {
        let has = |line: &str| line.starts_with("## ") && line.contains(&format!("{name} --json`"));
        assert!(page.lines().any(has), "json.md has no heading with `dmalane {name} --json`");
    }
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
