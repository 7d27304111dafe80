//! The life of a program: its command line is parsed, it runs, and it says what failed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, ValueHint};
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
        Err(error) => not_run(&near_alone(error.format(&mut command)), command.get_name()),
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
        // More follows `vulkan:`, so a shell adds no space.
        let goes_on = |arg: &clap::Arg| arg.get_possible_values().iter().any(|value| value.get_name().ends_with(':'));
        let command = command.mut_args(|arg| if goes_on(&arg) { arg.value_hint(ValueHint::Other) } else { arg });
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

/// Options of v80-smi that have another name in `validate`.
const V80_SMI: [(&str, &str); 6] = [
    ("--bandwidth-duration", "--duration"),
    ("--bandwidth-iterations", "--iterations"),
    ("--ddr-only", "--placement ddr"),
    ("--hbm-only", "--placement hbm"),
    ("--ring-size-index", "-d slash:N,ring=INDEX"),
    ("--use-qdma-driver", "-d qdma:QUEUE"),
];

/// The error without words that clap proposes for some common letters, and that are not near.
fn near_alone(mut error: clap::Error) -> clap::Error {
    for (wrong, meant) in [
        (ContextKind::InvalidSubcommand, ContextKind::SuggestedSubcommand),
        (ContextKind::InvalidArg, ContextKind::SuggestedArg),
        (ContextKind::InvalidValue, ContextKind::SuggestedValue),
    ] {
        let word = error.get(wrong).map(ToString::to_string);
        let Some((word, proposed)) = word.and_then(|word| Some((word, error.remove(meant)?))) else { continue };
        let proposed = proposed.to_string();
        let begun = proposed.split(", ").find(|other| other.starts_with(&word));
        if let Some(near) = begun.or_else(|| nearest(&word, proposed.split(", "))) {
            error.insert(meant, ContextValue::String(near.to_owned()));
        }
    }
    let word = error.get(ContextKind::InvalidArg).map(ToString::to_string);
    if let Some((_, ours)) = V80_SMI.iter().find(|(theirs, _)| word.as_deref() == Some(theirs)) {
        error.insert(ContextKind::SuggestedArg, ContextValue::String((*ours).to_owned()));
    }
    error
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
        let mut program = command::<P>().disable_help_subcommand(true);
        program.build();
        write_pages(&program, &self.directory)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &clap::Command, folder: &Path) -> io::Result<()> {
    let mut shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.try_for_each(|command| write_pages(command, folder))?;
    let page = clap_mangen::Man::new(command.clone());
    let mut text = Vec::new();
    page.render(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let (options, help) = text.split_once("\n.SH EXTRA\n").unwrap_or((&text, ""));
    // A page is filled, but these lines are to stay: sentences may be wrapped, examples may not.
    let kept = help.lines().map(|line| match line.starts_with(' ') {
        true => format!(".nf\n{line}\n.fi\n"),
        false => format!("{line}\n.br\n"),
    });
    std::fs::write(folder.join(page.get_filename()), format!("{options}\n.SH EXTRA\n{}", kept.collect::<String>()))
}

/// A socket that becomes readable on one of these signals.
///
/// # Errors
/// The kernel's.
pub fn termination(signals: &[i32]) -> Result<UnixStream, Failure> {
    let (receiver, sender) = UnixStream::pair()?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, sender.try_clone()?)?;
    }
    Ok(receiver)
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
