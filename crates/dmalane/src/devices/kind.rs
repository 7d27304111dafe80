//! The declaration of a kind of device, and the parsed form of its names.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use dmalane_device::Device;

use super::option::{BadDeviceSpec, OptionAbout, SpecOption, split};
use crate::open_options::OpenOptions;

/// A device, or why it could not be opened.
pub type OpenResult = Result<Box<dyn Device>, Box<dyn Error + Send + Sync>>;

/// A device of one kind by name: the name is parsed into this, and this opens the device.
pub trait Spec: Clone + fmt::Debug + Send + Sync + Sized + 'static {
    /// The first word of its names.
    const NAME: &'static str;
    /// How one is named, without its options ("ram:SIZE").
    const SYNTAX: &'static str;
    /// A description for people.
    const ABOUT: &'static str;
    /// The questions that commands ask of a kind.
    const ABILITIES: &'static [Ability] = &[];
    /// The text after the colon may have commas, as a path may.
    const COMMAS: bool = false;

    /// Parses what stands after the colon, without the options; empty without a colon.
    ///
    /// # Errors
    /// The reason why it names no device.
    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>>;

    /// Returns the options that stand in a name after commas.
    fn options() -> Vec<SpecOption<Self>> {
        Vec::new()
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Those of the crate that drives it.
    fn open(&self, options: &OpenOptions) -> OpenResult;

    /// Lists the devices of this kind on the machine whose `/` is given; none where they cannot be found without being
    /// named.
    fn list(_root: &Path) -> Vec<Listed> {
        Vec::new()
    }
}

/// Properties and needs of a kind of device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ability {
    /// A card: DDR and HBM behind DMA channels.
    Card,
    /// Its memory keeps data while it is closed, as a file does.
    KeepsData,
    /// A driver of this machine must have found it; `dmalane doctor` says what is missing.
    NeedsDriver,
    /// Another process has it ("the daemon"), which must be able to map the memory that is transferred.
    ServedBy(&'static str),
}

/// A kind of device: an entry of [`KINDS`](super::KINDS).
#[derive(Debug)]
pub struct DeviceKind {
    /// The first word of its names.
    pub name: &'static str,
    /// How one is named, without its options ("ram:SIZE").
    pub syntax: &'static str,
    /// A description for people.
    pub about: &'static str,
    /// Its properties and needs.
    pub abilities: &'static [Ability],
    options: fn() -> Vec<OptionAbout>,
    pub(crate) parse: fn(&str) -> Result<AnySpec, BadDeviceSpec>,
    pub(crate) open: fn(&AnySpec, &OpenOptions) -> OpenResult,
    list: fn(&Path) -> Vec<Listed>,
}

impl DeviceKind {
    /// The kind whose names are parsed into an `S`.
    pub(crate) const fn of<S: Spec>() -> Self {
        Self {
            name: S::NAME,
            syntax: S::SYNTAX,
            about: S::ABOUT,
            abilities: S::ABILITIES,
            options: || S::options().iter().map(|option| option.about).collect(),
            parse: |text| parse::<S>(text).map(|spec| Arc::new(spec) as AnySpec),
            open: |spec, options| spec.downcast_ref::<S>().expect("a name of this kind").open(options),
            list: S::list,
        }
    }

    /// The options that stand in its names after commas.
    pub fn options(&self) -> Vec<OptionAbout> {
        (self.options)()
    }

    /// The devices of this kind on the machine whose `/` is given; none where they cannot be found without being named.
    pub fn list(&self, root: &Path) -> Vec<Listed> {
        (self.list)(root)
    }

    /// Whether it has this ability.
    pub fn has(&self, ability: Ability) -> bool {
        self.abilities.contains(&ability)
    }

    /// The process that has devices of this kind; `None` for this process and the kernel.
    pub fn served_by(&self) -> Option<&'static str> {
        self.abilities.iter().find_map(|ability| match ability {
            Ability::ServedBy(who) => Some(*who),
            _ => None,
        })
    }
}

/// A device that was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Listed {
    /// Its name, as [`DeviceSpec`](crate::DeviceSpec) reads it.
    pub name: String,
    /// True when it can be opened.
    pub supported: bool,
    /// A description, or the reason why it cannot be opened.
    pub about: String,
    /// Other facts by name; `None` where there is no value.
    pub facts: Vec<(&'static str, Option<String>)>,
}

/// A [`Spec`] of any kind.
pub(crate) type AnySpec = Arc<dyn Any + Send + Sync>;

/// Parses a name: `NAME`, `NAME:WHAT`, and either with options.
fn parse<S: Spec>(text: &str) -> Result<S, BadDeviceSpec> {
    let rest = text.strip_prefix(S::NAME).unwrap_or_default();
    let (colon, rest) = rest.strip_prefix(':').map_or((false, rest), |rest| (true, rest));
    let options = S::options();
    let (what, given) = split(S::NAME, rest, S::COMMAS, &options)?;
    let parsed = match S::parse(what) {
        Ok(_) if colon && what.is_empty() => Err("nothing follows the colon".into()),
        parsed => parsed,
    };
    let wrong = |source| BadDeviceSpec::Rest { text: text.to_owned(), syntax: S::SYNTAX, source };
    let mut spec = parsed.map_err(wrong)?;
    for (number, value) in given {
        let option = &options[number];
        let wrong = |why| BadDeviceSpec::Value { kind: S::NAME, option: option.about, why };
        (option.set)(&mut spec, value).map_err(wrong)?;
    }
    Ok(spec)
}
