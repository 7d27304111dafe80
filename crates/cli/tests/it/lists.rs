//! Lists that name commands, in `cli.md`, `json.md` and tests, compared with what each command's help says.

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
            [] => found.push((name, help.split_whitespace().collect::<Vec<_>>().join(" "))),
            below => pending.extend(below.iter().map(|next| format!("{name} {next}").trim().to_owned())),
        }
    }
    found
}

/// The commands whose help has all of these words.
pub fn with(words: &[&str]) -> BTreeSet<String> {
    let has = |(name, help): (String, String)| words.iter().all(|word| help.contains(word)).then_some(name);
    all().into_iter().filter_map(has).collect()
}

fn page(name: &str) -> String {
    std::fs::read_to_string(format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn the_page_names_the_commands_that_share_an_option() {
    let page = page("reference/cli.md");
    for (before, after, words) in [
        ("## Device names\n\n", " take the same names", &["`dmalane devices` describes them"][..]),
        ("## Standard input\n\n", " and\n`--manifest` read", &["standard input"]),
        ("## Models of several files\n\n", " take a directory", &["directory", "index"]),
        ("`--csv` (", ")", &["--csv"]),
        ("`--repeat N` (", ")", &["--repeat"]),
    ] {
        let named = page.split_once(before).and_then(|(_, rest)| rest.split_once(after)).expect(before).0;
        // Names are between backquotes.
        let named: BTreeSet<String> = named.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        assert_eq!(named, with(words), "cli.md between {before:?} and {after:?}, and each help with {words:?}");
    }
}

#[test]
fn the_page_has_a_section_for_each_json_object() {
    let page = page("formats/json.md");
    for name in with(&["--json"]) {
        let has = |line: &str| line.starts_with("## ") && line.contains(&format!("{name} --json`"));
        assert!(page.lines().any(has), "json.md has no heading with `dmalane {name} --json`");
    }
}

#[test]
fn every_text_is_looked_at_for_its_width() {
    for (name, _) in all() {
        // They need a PCI device; serve until they are stopped; print a script.
        let elsewhere = ["bar-map", "card serve", "completions"].contains(&&*name);
        let here = crate::columns::COMMANDS.iter().any(|(line, _)| line.starts_with(&name));
        assert!(elsewhere != here, "{name}, and COMMANDS of columns.rs");
    }
}
