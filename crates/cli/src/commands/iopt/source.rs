//! An image on the command line: its file, its format, and where its tables are.

use std::path::PathBuf;

use clap::Args;
use dmalane::iopt::{FormatId, UnknownFormat};

use super::image::Image;
use super::number::Number;
use crate::failure::Failure;
use crate::named::Named;

#[derive(Args)]
pub(super) struct ImageSource {
    /// The image: page tables, written by `dmalane iopt build` or dumped from memory; - for standard input
    #[arg(value_name = "IMAGE")]
    pub(super) image: PathBuf,

    /// The page-table format, as `dmalane iopt formats` names it
    #[arg(short, long, value_parser = FORMAT, hide_possible_values = true)]
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

/// The parser of the name of a page-table format.
pub const FORMAT: Named<FormatId> = Named {
    parse: |text| text.parse().map_err(|e: UnknownFormat| format!("{e}\nhint: `dmalane iopt formats` lists them")),
    names: || FormatId::ALL.iter().map(|format| format.name()).collect(),
};
