//! An image on the command line: its file, its format, and where its tables are.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Args, Command};
use dmalane::iopt::FormatId;
use dmalane::vm::trace::Number;

use super::image::Image;
use crate::failure::Failure;

#[derive(Args)]
pub(super) struct ImageSource {
    /// The image: page tables, written by `dmalane iopt build` or dumped from memory; - for standard input
    #[arg(value_name = "IMAGE")]
    pub(super) image: PathBuf,

    /// The page-table format, as `dmalane iopt formats` names it
    #[arg(short, long, value_parser = FormatName, hide_possible_values = true)]
    pub(super) format: FormatId,

    /// The address of the root table
    #[arg(long, value_name = "ADDR")]
    pub(super) root: Number,

    /// The address of the first byte of the image [default: that of the root]
    #[arg(long, value_name = "ADDR")]
    pub(super) base: Option<Number>,

    /// Translate unprivileged accesses: pages for privileged ones fault
    #[arg(long)]
    pub(super) user: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
}

impl ImageSource {
    pub(super) fn base(&self) -> u64 {
        self.base.unwrap_or(self.root).0
    }

    pub(super) fn read(&self) -> Result<Image, Failure> {
        let image = Image::read(&self.image, self.base())?;
        if image.entry(self.root.0).is_none() {
            return Err(Failure::new(format!(
                "the root at {:#x} is not in {}, which holds {:#x} bytes from {:#x} on",
                self.root.0,
                self.image.display(),
                image.len(),
                self.base()
            ))
            .hint("--base is the address of the first byte of the image"));
        }
        Ok(image)
    }
}

/// Parses the name of a page-table format, and tells completion scripts the names.
#[derive(Clone)]
pub struct FormatName;

impl TypedValueParser for FormatName {
    type Value = FormatId;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<FormatId, clap::Error> {
        let parse = |text: &str| {
            let parsed = text.parse::<FormatId>();
            parsed.map_err(|e| format!("{e}\nhint: `dmalane iopt formats` lists them"))
        };
        parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(FormatId::ALL.iter().map(|format| PossibleValue::new(format.name()))))
    }
}
