//! The help of all commands of both programs: few options, and pages that fit a screen.

use std::process;

use clap::{ArgAction, Command};

/// Options of all commands of `dmalane` and of both programs, at most, without `--help` and `--version`.
const OPTIONS: [usize; 2] = [118, 139];
/// Lines of a help before "More with --help".
const LINES: usize = 60;

/// Each command that can be run, by its words.
fn commands(of: &Command, words: &str, found: &mut Vec<(String, Command)>) {
    for below in of.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help") {
        let words = format!("{words} {}", below.get_name());
        match below.has_subcommands() {
            true => commands(below, &words, found),
            false => found.push((words, below.clone())),
        }
    }
}

fn all() -> Vec<(String, Command)> {
    let mut found = Vec::new();
    commands(&dmalane_cli::definition(), "dmalane", &mut found);
    found
}

#[test]
fn there_are_few_options() {
    let asks = |action: &ArgAction| {
        matches!(action, ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version)
    };
    let options = |command: &Command| {
        command.get_arguments().filter(|arg| !arg.is_positional() && !asks(arg.get_action())).count()
    };
    let counts: Vec<_> = all().iter().map(|(words, command)| (options(command), words.clone())).collect();
    let sum: usize = counts.iter().map(|(count, _)| count).sum();
    assert!(sum <= OPTIONS[0], "{sum} options: {counts:#?}");
    let is_option = |line: &&str| line.starts_with('-') && !line.contains("--help") && !line.contains("--version");
    let of_daemon = |help: &String| help.lines().map(str::trim_start).filter(is_option).count();
    let both = sum + daemon().iter().map(of_daemon).sum::<usize>();
    assert!(both <= OPTIONS[1], "{both} options, {sum} of them of dmalane");
}

/// The short help of each command of `dmalaned`, which is no library.
fn daemon() -> Vec<String> {
    let help = |words: &[&str]| {
        let said = process::Command::new(env!("CARGO_BIN_EXE_dmalaned")).args(words).arg("-h").output().unwrap();
        String::from_utf8(said.stdout).unwrap()
    };
    let own = help(&[]);
    let listed = own.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let below: Vec<_> = names.filter_map(|line| line.split(' ').next()).filter(|name| *name != "help").collect();
    assert!(below.contains(&"status") && below.contains(&"keep"), "{own}");
    below.into_iter().map(|name| help(&[name])).chain([own.clone()]).collect()
}

#[test]
fn a_short_help_fits_a_screen_and_names_the_long_one() {
    for (words, command) in all() {
        let mut command = command.max_term_width(100);
        let short = command.render_help().to_string();
        assert!(short.lines().count() <= LINES, "{words} -h has {} lines:\n{short}", short.lines().count());
        assert!(short.contains("More with --help"), "{words}:\n{short}");
        assert_ne!(short, command.render_long_help().to_string(), "{words}: there is more");
    }
    for short in daemon() {
        assert!(short.lines().count() <= LINES, "{short}");
    }
}

/// What people use first comes before the headings.
#[test]
fn the_first_options_are_few() {
    for (words, command) in all() {
        let plain = |arg: &&clap::Arg| !arg.is_positional() && arg.get_help_heading().is_none();
        let first: Vec<_> = command.get_arguments().filter(plain).map(|arg| arg.get_id().to_string()).collect();
        assert!(first.len() <= 11, "{words}: {first:?}");
    }
}
