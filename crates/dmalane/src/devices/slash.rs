//! An AMD V80 that the driver SLASH drives.

use std::error::Error;
use std::path::Path;

use dmalane_slash::{Node, SlashDevice, SlashOptions};
use rustix::fs::{Access, access};

use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::{SpecOption, number};
use crate::open_options::OpenOptions;

/// A card of this machine, `slash:N`.
#[derive(Clone, PartialEq, Debug)]
pub struct SlashSpec {
    /// Its node.
    pub node: Node,
    /// How it is opened.
    pub options: SlashOptions,
}

/// The option of a V80's rings.
pub(super) fn ring<S: Spec>(of: fn(&mut S) -> &mut SlashOptions) -> SpecOption<S> {
    let about = "size of the DMA rings: an index, 0 to 15, into the table of the QDMA [15]";
    SpecOption::valued("ring", "INDEX", about, move |spec, text| number(text, 0..=15).map(|it| of(spec).ring = it))
}

impl Spec for SlashSpec {
    const NAME: &'static str = "slash";
    const SYNTAX: &'static str = "slash:N";
    const ABOUT: &'static str = "an AMD V80 of the driver SLASH (/dev/slash_qdma_ctlN)";
    const ABILITIES: &'static [Ability] = &[Ability::Card, Ability::NeedsDriver];

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        Ok(Self { node: what.parse()?, options: SlashOptions::default() })
    }

    fn options() -> Vec<SpecOption<Self>> {
        vec![ring(|spec: &mut Self| &mut spec.options)]
    }

    fn open(&self, _: &OpenOptions) -> OpenResult {
        Ok(Box::new(SlashDevice::open(self.node, self.options)?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        let listed = |node: Node| {
            let access = access(node.path(root), Access::READ_OK | Access::WRITE_OK);
            Listed {
                name: format!("slash:{node}"),
                supported: access.is_ok(),
                about: match access {
                    Ok(()) => "an AMD V80 of the driver SLASH: ddr 32 GiB, hbm 32 GiB, 2 channels".to_owned(),
                    Err(e) => format!("an AMD V80 of the driver SLASH, whose node cannot be used: {e}"),
                },
                facts: vec![("pci", node.pci(root))],
            }
        };
        dmalane_slash::nodes(root).into_iter().map(listed).collect()
    }
}
