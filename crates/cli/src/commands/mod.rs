//! The commands. A new one is a file here, its `mod` line, and a line in `commands!`.

mod bar_map;
mod card;
mod devices;
pub mod doctor;
mod inspect;
mod iopt;
mod keep;
mod load;
mod manifest;
mod read;
mod validate;
mod verify;
mod vm;

use std::process::ExitCode;

use clap::Subcommand;

use crate::failure::Failure;
use crate::layout::wrap;

/// Makes the enum of all commands, in the groups and in the order of the help. Each holds its options and has
/// `run(self)`; those that are subcommands are marked.
macro_rules! commands {
    ($($group:literal: $($(#[$kind:meta])? $module:ident::$Command:ident)+;)+) => {
        /// A command with its options.
        #[derive(clap::Subcommand)]
        pub(crate) enum Commands {
            $($($(#[$kind])? $Command(Box<$module::$Command>),)+)+
        }

        /// Each group, and the number of its commands.
        const GROUPS: &[(&str, usize)] = &[$(($group, [$(stringify!($module)),+].len())),+];

        impl Commands {
            /// Runs the command.
            ///
            /// # Errors
            /// Any failure of the command.
            pub fn run(self) -> Result<ExitCode, Failure> {
                match self {
                    $($(Self::$Command(command) => command.run(),)+)+
                }
            }
        }
    };
}

commands! {
    "Models": load::Load read::Read verify::Verify manifest::Manifest inspect::Inspect;
    "Models that stay in memory": keep::Keep keep::Kept keep::Drop;
    "Devices": validate::Validate devices::Devices doctor::Doctor;
    "For authors of drivers": #[command(subcommand)] iopt::Iopt #[command(subcommand)] vm::Vm bar_map::BarMap
        #[command(subcommand)] card::Card;
}

/// The help of the program, with the commands in their groups.
pub(crate) fn help_template() -> String {
    let all = Commands::augment_subcommands(clap::Command::new(""));
    let width = all.get_subcommands().map(|command| command.get_name().len()).max().unwrap_or(0);
    let mut commands = all.get_subcommands();
    let mut text = String::from("{about-with-newline}\n{usage-heading} {usage}\n");
    for (group, len) in GROUPS {
        text += &format!("\n{group}:\n");
        for command in commands.by_ref().take(*len) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            text += &wrap(&format!("  {:width$}  {about}", command.get_name()), width + 4);
        }
    }
    text += "\nOther:\n  completions  Print a completion script for a shell\n";
    text + "\nOptions:\n{options}{after-help}"
}
