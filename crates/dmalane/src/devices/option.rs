//! Options in the name of a device: `,key` or `,key=value`, in any order, after what the device is.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::str::FromStr;

use dmalane_load::nearest;

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

/// Reason why the options of a name are refused.
#[derive(Debug, PartialEq)]
pub(super) enum BadOption {
    /// There is none of this name.
    Unknown { word: String },
    /// Its value, or that it has one, or none.
    Value { option: OptionAbout, why: String },
}

/// A name without its kind: what the device is, and its options by their number, each with its value.
pub(super) type Parts<'a> = (&'a str, Vec<(usize, &'a str)>);

/// Takes a name apart at each comma that one of the options follows. Other commas belong to what is before them where
/// that may have commas: what the device is (`base`), or the value of an option.
pub(super) fn split<'a, S>(text: &'a str, base: bool, options: &[SpecOption<S>]) -> Result<Parts<'a>, BadOption> {
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
            return Err(BadOption::Unknown { word: word.to_owned() });
        }
        match number {
            None => what = part,
            Some(number) => given.push((number, value(&options[number].about, part)?)),
        }
        let Some((_, found)) = next else { return Ok((what, given)) };
        if given.iter().any(|(number, _)| *number == found) || number == Some(found) {
            return Err(BadOption::Value { option: options[found].about, why: "it is given twice".to_owned() });
        }
        (number, rest) = (Some(found), &after[1..]);
    }
}

/// The value in `key=value`.
fn value<'a>(option: &OptionAbout, text: &'a str) -> Result<&'a str, BadOption> {
    let bad = |why: &str| Err(BadOption::Value { option: *option, why: why.to_owned() });
    match (text.split_once('='), option.value.is_empty()) {
        (None, true) => Ok(""),
        (Some((_, value)), false) if !value.is_empty() => Ok(value),
        (Some(_), true) => bad("it has no value"),
        _ => bad("a value is missing"),
    }
}

/// The name of the option that a text begins with.
fn key(text: &str) -> &str {
    text.split(['=', ',']).next().unwrap_or_default()
}

pub(super) fn keys_of<S>(options: &[SpecOption<S>]) -> impl Iterator<Item = &'static str> {
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
        let of = |text| split(text, true, &options()).unwrap();
        assert_eq!(of(""), ("", vec![]));
        assert_eq!(of("/a,b"), ("/a,b", vec![]));
        assert_eq!(of("/a,b,direct,ddr=1"), ("/a,b", vec![(2, ""), (0, "1")]));
        assert_eq!(of(",lib=/a,b/c=d,ddr=1"), ("", vec![(1, "/a,b/c=d"), (0, "1")]));
        assert_eq!(of("/ddr=1,direct"), ("/ddr=1", vec![(2, "")]));
    }

    #[test]
    fn wrong_options_are_named() {
        let of = |text, base| split(text, base, &options()).unwrap_err();
        let unknown = |word: &str| BadOption::Unknown { word: word.to_owned() };
        assert_eq!(of("0,flat", false), unknown("flat"));
        assert_eq!(of("0,ddr=1,flat=2", false), unknown("flat"));
        assert_eq!(of(",", false), unknown(""));
        assert_eq!(of("/a,b,size=1", true), unknown("size"));
        assert_eq!(of("/a,b,dirct", true), unknown("dirct"));
        assert_eq!(of("/a,lib=/b,dirct", true), unknown("dirct"));
        for (text, wrong) in [
            ("0,ddr", "a value is missing"),
            ("0,ddr=", "a value is missing"),
            ("0,direct=1", "it has no value"),
            ("0,ddr=1,direct,ddr=2", "it is given twice"),
            ("0,ddr=1,ddr=2", "it is given twice"),
        ] {
            assert!(matches!(of(text, true), BadOption::Value { why, .. } if why == wrong), "{text}");
        }
    }

    #[test]
    fn words_that_are_alike_are_found() {
        let kinds = ["soft", "vfio", "vfio-user", "vulkan"];
        let meant = |word| nearest(word, kinds.into_iter());
        assert_eq!(
            ["sof", "softt", "sfot", "vulcan", "vfio_user"].map(meant),
            [Some("soft"), Some("soft"), None, Some("vulkan"), Some("vfio-user")]
        );
        assert_eq!(["", "x", "soft", "metal"].map(meant), [None; 4]);
    }
}
