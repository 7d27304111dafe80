//! Options in the name of a device: `,key` or `,key=value`, in any order, after what the device is.

use std::error::Error;
use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::str::FromStr;

use dmalane_load::nearest;
use thiserror::Error;

use crate::size::{self, Size};

/// The description of an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptionAbout {
    /// Its name.
    pub key: &'static str,
    /// What follows `=` ("SIZE"); empty for an option without a value.
    pub value: &'static str,
    /// A description for people, with the default in brackets.
    pub about: &'static str,
}

impl Display for OptionAbout {
    /// As it is written: `ddr=SIZE`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key)?;
        if self.value.is_empty() { Ok(()) } else { write!(f, "={}", self.value) }
    }
}

/// An option of a kind of device whose names are parsed into an `S`.
pub struct SpecOption<S> {
    pub(super) about: OptionAbout,
    /// Its value may have commas.
    pub(super) commas: bool,
    /// Takes the value; the error is the reason alone.
    pub(super) set: Box<SetOption<S>>,
}

/// Sets an option to the value in a name.
pub(super) type SetOption<S> = dyn Fn(&mut S, &str) -> Result<(), String>;

impl<S> SpecOption<S> {
    /// An option with a value, of which `value` is the name ("SIZE").
    pub(super) fn valued(
        key: &'static str,
        value: &'static str,
        about: &'static str,
        set: impl Fn(&mut S, &str) -> Result<(), String> + 'static,
    ) -> Self {
        Self { about: OptionAbout { key, value, about }, commas: false, set: Box::new(set) }
    }

    /// An option without a value.
    pub(super) fn flag(key: &'static str, about: &'static str, set: impl Fn(&mut S) + 'static) -> Self {
        Self::valued(key, "", about, move |spec, _| {
            set(spec);
            Ok(())
        })
    }

    /// The value may have commas, as a path may.
    pub(super) fn with_commas(self) -> Self {
        Self { commas: true, ..self }
    }
}

/// A text that names no device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BadDeviceSpec {
    /// No kind has this name.
    #[error("{text:?} is not a device; there are {kinds}{}", meant(*nearest))]
    Kind {
        /// The text.
        text: String,
        /// How devices are named, with commas between them.
        kinds: String,
        /// The kind whose name is like it.
        nearest: Option<&'static str>,
    },
    /// The text after the kind names no device.
    #[error("{text:?} is not {syntax}")]
    Rest {
        /// The text.
        text: String,
        /// How devices of this kind are named.
        syntax: &'static str,
        /// The reason: an error of the crate that drives such devices, or a text.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Devices of this kind have no such option.
    #[error("{kind} has no option {option:?}{others}; its options: {options}{}", meant(*nearest))]
    NoOption {
        /// The name of the kind.
        kind: &'static str,
        /// The option.
        option: String,
        /// Kinds that have it, in words; empty if none has.
        others: String,
        /// Options of this kind, with commas between them; "none".
        options: String,
        /// The option whose name is like it.
        nearest: Option<&'static str>,
    },
    /// The value of an option is wrong.
    #[error("the option {option} of {kind}: {why}")]
    Value {
        /// The name of the kind.
        kind: &'static str,
        /// The option.
        option: OptionAbout,
        /// The reason.
        why: String,
    },
}

fn meant(nearest: Option<&'static str>) -> String {
    nearest.map_or(String::new(), |nearest| format!("; did you mean {nearest}?"))
}

/// A name without its kind: what the device is, and its options by their number, each with its value.
pub(super) type Parts<'a> = (&'a str, Vec<(usize, &'a str)>);

/// Takes a name apart at each comma that one of the options follows. Other commas belong to what is before them where
/// that may have commas: what the device is (`base`), or the value of an option.
pub(super) fn split<'a, S>(
    kind: &'static str,
    text: &'a str,
    base: bool,
    options: &[SpecOption<S>],
) -> Result<Parts<'a>, BadDeviceSpec> {
    let bad = |number: usize, why: &str| {
        let option = options[number].about;
        BadDeviceSpec::Value { kind, option, why: why.to_owned() }
    };
    let (mut what, mut given) = ("", Vec::<(usize, &str)>::new());
    let (mut number, mut rest) = (None, text);
    loop {
        let commas = || rest.match_indices(',').map(|(at, _)| (at, key(&rest[at + 1..])));
        let next = commas().find_map(|(at, word)| Some((at, find(options, word)?)));
        let (part, after) = rest.split_at(next.map_or(rest.len(), |(at, _)| at));
        let allows = number.map_or(base, |number: usize| options[number].commas);
        // A path may have commas, but hardly one with `word=` after it, or with nearly the name of an option.
        let is_option = |at: usize, word: &str| {
            let valued = !word.is_empty() && rest[at + 1 + word.len()..].starts_with('=');
            valued && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        };
        let mut words = commas().take_while(|(at, _)| *at < part.len());
        let foreign =
            words.find(|(at, word)| !allows || is_option(*at, word) || nearest(word, keys_of(options)).is_some());
        if let Some((_, word)) = foreign {
            let own: Vec<_> = options.iter().map(|option| option.about.to_string()).collect();
            let (option, others) = (word.to_owned(), String::new());
            let options_of = if own.is_empty() { "none".to_owned() } else { own.join(", ") };
            let nearest = nearest(word, keys_of(options));
            return Err(BadDeviceSpec::NoOption { kind, option, others, options: options_of, nearest });
        }
        match number {
            None => what = part,
            Some(number) => given.push((number, value(&options[number].about, part).map_err(|why| bad(number, why))?)),
        }
        let Some((_, found)) = next else { return Ok((what, given)) };
        if given.iter().any(|(number, _)| *number == found) || number == Some(found) {
            return Err(bad(found, "it is given twice"));
        }
        (number, rest) = (Some(found), &after[1..]);
    }
}

/// The value in `key=value`, or why there is none.
fn value<'a>(option: &OptionAbout, text: &'a str) -> Result<&'a str, &'static str> {
    match (text.split_once('='), option.value.is_empty()) {
        (None, true) => Ok(""),
        (Some((_, value)), false) if !value.is_empty() => Ok(value),
        (Some(_), true) => Err("it has no value"),
        _ => Err("a value is missing"),
    }
}

/// The name of the option that a text begins with.
fn key(text: &str) -> &str {
    text.split(['=', ',']).next().unwrap_or_default()
}

fn keys_of<S>(options: &[SpecOption<S>]) -> impl Iterator<Item = &'static str> {
    options.iter().map(|option| option.about.key)
}

fn find<S>(options: &[SpecOption<S>], key: &str) -> Option<usize> {
    keys_of(options).position(|other| other == key)
}

/// A number in a range.
pub(super) fn number<T>(text: &str, range: RangeInclusive<T>) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("not a number from {} to {}", range.start(), range.end()))
}

/// Purpose of the option `server-uid`.
pub(super) const SERVER_UID: &str = "a user that the socket may belong to, besides root and you";

/// The number of a user.
pub(super) fn uid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "not the number of a user".to_owned())
}

/// Bytes, at least one.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    size::nonzero(text).map(Size::bytes).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> [SpecOption<()>; 3] {
        let valued = |key| SpecOption::valued(key, "X", "", |_, _| Ok(()));
        [valued("ddr"), valued("lib").with_commas(), SpecOption::flag("direct", "", |_| ())]
    }

    #[test]
    fn options_follow_commas_and_other_commas_belong_to_paths() {
        let of = |text| split("kind", text, true, &options()).unwrap();
        assert_eq!(of(""), ("", vec![]));
        assert_eq!(of("/a,b"), ("/a,b", vec![]));
        assert_eq!(of("/a,b,direct,ddr=1"), ("/a,b", vec![(2, ""), (0, "1")]));
        assert_eq!(of(",lib=/a,b/c=d,ddr=1"), ("", vec![(1, "/a,b/c=d"), (0, "1")]));
        assert_eq!(of("/ddr=1,direct"), ("/ddr=1", vec![(2, "")]));
    }

    #[test]
    fn wrong_options_are_named() {
        let of = |text, base| split("kind", text, base, &options()).unwrap_err();
        let unknown = |text, base| match of(text, base) {
            BadDeviceSpec::NoOption { option, .. } => option,
            other => panic!("{text}: {other}"),
        };
        assert_eq!(unknown("0,flat", false), "flat");
        assert_eq!(unknown("0,ddr=1,flat=2", false), "flat");
        assert_eq!(unknown(",", false), "");
        assert_eq!(unknown("/a,b,size=1", true), "size");
        assert_eq!(unknown("/a,b,dirct", true), "dirct");
        assert_eq!(unknown("/a,lib=/b,dirct", true), "dirct");
        for (text, wrong) in [
            ("0,ddr", "a value is missing"),
            ("0,ddr=", "a value is missing"),
            ("0,direct=1", "it has no value"),
            ("0,ddr=1,direct,ddr=2", "it is given twice"),
            ("0,ddr=1,ddr=2", "it is given twice"),
        ] {
            assert!(matches!(of(text, true), BadDeviceSpec::Value { why, .. } if why == wrong), "{text}");
        }
    }

    #[test]
    fn words_that_are_alike_are_found() {
        let kinds = ["soft", "vfio", "vfio-user", "vulkan"];
        let meant = |word| nearest(word, kinds.into_iter());
        assert_eq!(
            ["sof", "softt", "sfot", "vulcan", "vfio_user"].map(meant),
            [Some("soft"), Some("soft"), Some("soft"), Some("vulkan"), Some("vfio-user")]
        );
        assert_eq!(["", "x", "soft", "metal", "video"].map(meant), [None; 5]);
    }
}
