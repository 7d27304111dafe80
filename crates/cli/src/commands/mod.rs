//! The commands. A new one is a file here, its `mod` line, and a line in `commands!`.

mod bar_map;
mod card;
mod devices;
mod doctor;
mod inspect;
mod iopt;
mod load;
mod manifest;
mod read;
mod validate;
mod verify;
mod vm;

use std::process::ExitCode;

use crate::failure::Failure;

/// Makes the enum of all commands, in the order of the help. Each holds its options and has `run(self)`.
macro_rules! commands {
    ($($module:ident::$Command:ident,)+) => {
        /// A command with its options.
        #[derive(clap::Subcommand)]
        pub(crate) enum Commands {
            $($Command(Box<$module::$Command>),)+
        }

        impl Commands {
            /// Runs the command.
            ///
            /// # Errors
            /// Any failure of the command.
            pub fn run(self) -> Result<ExitCode, Failure> {
                match self {
                    $(Self::$Command(command) => command.run(),)+
                }
            }
        }
    };
}

commands! {
    load::Load,
    read::Read,
    inspect::Inspect,
    manifest::Manifest,
    verify::Verify,
    validate::Validate,
    doctor::Doctor,
    devices::Devices,
    bar_map::BarMap,
    card::Card,
    iopt::Iopt,
    vm::Vm,
}
