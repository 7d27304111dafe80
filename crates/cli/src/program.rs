//! The life of a program: its command line is parsed, it runs, and it says what failed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser};
use clap_complete::Shell;
use dmalane::load::nearest;

use crate::failure::{Failure, USAGE};
use crate::layout::{shell_words, wrap_message};
use crate::output;
use crate::progress;

/// Parses a command line, the program's name first, as `P` and runs it; reports what fails.
pub fn start<P: Parser>(words: Vec<OsString>, run: impl FnOnce(P) -> Result<ExitCode, Failure>) -> ExitCode {
    progress::begin();
    let mut command = command::<P>();
    for (found, meant) in misspelt(&command, std::env::vars_os().map(|(name, _)| name)) {
        let _ = writeln!(std::io::stderr(), "{}: {found} is not read; did you mean {meant}?", command.get_name());
    }
    let parsed = command.try_get_matches_from_mut(words).and_then(|matches| P::from_arg_matches(&matches));
    let result = match parsed {
        Ok(program) => run(program),
        Err(error) => not_run(&error.format(&mut command), command.get_name()),
    };
    result.unwrap_or_else(|failure| failure.report(command.get_name()))
}

/// The command line of `P`. A negative number is a wrong value and not an option; `-h` shows the first examples, and
/// `--help` all that there is to say.
pub fn command<P: CommandFactory>() -> clap::Command {
    fn shaped(mut command: clap::Command) -> clap::Command {
        if let Some(long) = command.get_after_help().map(ToString::to_string) {
            command = command.after_help(first_examples(&long)).after_long_help(long);
        }
        let takes = |arg: &clap::Arg| arg.get_action().takes_values() && !arg.is_positional();
        let command = command.mut_args(|arg| if takes(&arg) { arg.allow_negative_numbers(true) } else { arg });
        command.mut_subcommands(shaped)
    }
    let program = P::command();
    let name = program.get_name();
    let completions = format!(
        "Examples:\n  {name} completions bash > ~/.local/share/bash-completion/completions/{name}\n  \
         {name} completions zsh > \"${{fpath[1]}}/_{name}\"\n  \
         {name} completions fish > ~/.config/fish/completions/{name}.fish"
    );
    program.mut_subcommand("completions", |command| command.after_help(completions)).mut_subcommands(shaped)
}

/// Variables of the environment that nothing reads, each with the one that is probably meant.
fn misspelt(program: &clap::Command, found: impl Iterator<Item = OsString>) -> Vec<(String, String)> {
    let commands = program.get_subcommands().flat_map(|command| command.get_subcommands().chain([command]));
    let read = commands.flat_map(clap::Command::get_arguments).filter_map(|arg| arg.get_env()?.to_str());
    let read: BTreeSet<&str> = read.filter_map(|name| name.strip_prefix("DMALANE_")).collect();
    let found = found.filter_map(|name| name.to_str()?.strip_prefix("DMALANE_").map(str::to_owned));
    found
        .filter(|name| !read.contains(&**name))
        .filter_map(|name| {
            Some((format!("DMALANE_{name}"), format!("DMALANE_{}", nearest(&name, read.iter().copied())?)))
        })
        .collect()
}

/// The first examples of a help.
fn first_examples(help: &str) -> String {
    let lines = help.lines().take_while(|line| !line.is_empty());
    let first: Vec<&str> = lines.filter(|line| !line.starts_with("   ")).take(4).collect();
    format!("{}\n\nMore with --help.", first.join("\n"))
}

/// Prints the help or version that was asked for, or reports the usage error in the form of a [`Failure`].
fn not_run(error: &clap::Error, name: &str) -> Result<ExitCode, Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        output::written(error.print())?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").map_or(text.clone(), |rest| format!("{name}: {rest}"));
    // clap advises to put what looks like an option behind `--`, but there `read` has a command.
    let advice = text.lines().find(|line| line.starts_with("  tip: to pass '") && text.contains("-- <COMMAND>"));
    let text = advice.map_or(text.clone(), |line| text.replace(&format!("{line}\n\n"), ""));
    // A closed stderr leaves nobody to tell.
    let _ = std::io::stderr().write_all(wrap_message(&text.replace("\n  tip: ", "\nhint: ")).as_bytes());
    Ok(ExitCode::from(USAGE))
}

/// Print a completion script for a shell.
#[derive(Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    /// Prints the script for the program `P`.
    ///
    /// # Errors
    /// Stdout cannot be written.
    pub fn run<P: CommandFactory>(self) -> Result<ExitCode, Failure> {
        // Into memory first: the generator panics when a pipe breaks.
        let mut script = Vec::new();
        let mut program = command::<P>();
        let name = program.get_name().to_owned();
        clap_complete::generate(self.shell, &mut program, name, &mut script);
        output::print(&String::from_utf8_lossy(&script))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Write manual pages.
#[derive(Args)]
pub struct Man {
    /// The directory to write to
    directory: PathBuf,
}

impl Man {
    /// Writes a page for each command of the program `P`.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn run<P: CommandFactory>(self) -> Result<ExitCode, Failure> {
        clap_mangen::generate_to(command::<P>(), self.directory)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The words of this process as a shell would take them.
pub fn command_line() -> String {
    let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    shell_words(&words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_told_and_one_of_others_is_not() {
        let read = |name| clap::Arg::new("device").long("device").env(name);
        let program = clap::Command::new("p").subcommand(clap::Command::new("load").arg(read("DMALANE_DEVICE")));
        let told = |names: &[&str]| misspelt(&program, names.iter().map(OsString::from));
        assert_eq!(told(&["DMALANE_DEVCE"]), [("DMALANE_DEVCE".to_owned(), "DMALANE_DEVICE".to_owned())]);
        // Those of `read --export` and of tests, and what is read.
        assert_eq!(told(&["DMALANE_DEVICE", "DMALANE_SIZE", "DMALANE_FD", "DMALANE_TEST_ONLY", "PATH"]), []);
    }
}
