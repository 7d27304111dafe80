//! Options from a configuration file and from the environment, as if they stood on the command line.
//!
//! An option on the command line wins over `DMALANE_COMMAND_OPTION`, that over `DMALANE_OPTION`, and that over the
//! file. Options that contradict the command line are left out.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::failure::Failure;

/// Names the configuration file; empty for none.
const FILE: &str = "DMALANE_CONFIG";
/// Bytes of a configuration file.
const MOST: u64 = 1 << 20;
/// Options that lose data are given for each command.
const NEVER: [&str; 2] = ["force", "overwrite"];
/// The commands for which a general `device` is meant. To others the option says something else: where a copy goes, or
/// what is watched.
const OF_DEVICE: [&str; 2] = ["load", "validate"];

/// Whether a setting for every command is one for this command.
fn is_meant(path: &[String], name: &str) -> bool {
    name != "device" || matches!(path, [command] if OF_DEVICE.contains(&&**command))
}

/// The environment of this process, or of a test.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Where the configuration file of this user is, or would be: `$DMALANE_CONFIG`, or `dmalane.toml` in
/// `$XDG_CONFIG_HOME` or `~/.config`.
pub fn path(environment: Environment<'_>) -> Option<PathBuf> {
    let path = match environment(FILE) {
        Some(path) => PathBuf::from(path),
        None => {
            let folder = environment("XDG_CONFIG_HOME").filter(|folder| !folder.is_empty()).map(PathBuf::from);
            let home = || Some(PathBuf::from(environment("HOME")?).join(".config"));
            folder.or_else(home)?.join("dmalane.toml")
        }
    };
    Some(path).filter(|path| !path.as_os_str().is_empty())
}

/// A configuration file.
struct File {
    path: PathBuf,
    text: String,
}

impl File {
    /// The file of this user, if there is one.
    fn find(environment: Environment<'_>) -> Result<Option<Self>, Failure> {
        let Some(path) = path(environment) else { return Ok(None) };
        let named = environment(FILE).is_some();
        match read(&path, named) {
            Ok(text) => Ok(text.map(|text| Self { path, text })),
            // HOME may be another user's, as under some ways to change the user.
            Err(e) if !named && matches!(e.kind(), NotFound | NotADirectory | PermissionDenied) => Ok(None),
            Err(e) => Err(Failure::because(format!("cannot read {}", path.display()), &e)),
        }
    }

    /// An error at a byte of the file.
    fn wrong(&self, at: usize, why: &str) -> Failure {
        let before = &self.text.as_bytes()[..at.min(self.text.len())];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() + 1;
        Failure::usage(format!("{}:{line}:{column}: {why}", self.path.display()))
    }

    /// The option that a key of a table for these commands means, as it would stand on the command line.
    fn option(
        &self,
        commands: &[&Command],
        key: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<Setting, Failure> {
        let name = &**key.get_ref();
        let (at, of) = (key.span().start, commands.last().map_or("", |command| command.get_name()));
        let Some(arg) = commands.iter().flat_map(|command| option(command, name)).next() else {
            let known = if commands.len() == 1 { format!("no option of `{of}`") } else { "no option".to_owned() };
            return Err(self.wrong(at, &format!("{name} is {known}")).hint("--help lists the options of a command"));
        };
        if NEVER.contains(&name) {
            return Err(self.wrong(at, &format!("{name} may lose data, so it must be given with each command")));
        }
        let text = |value: &DeValue<'_>| match value {
            DeValue::String(text) => Some(text.to_string()),
            DeValue::Integer(number) => Some(number.to_string()),
            DeValue::Float(number) => Some(number.to_string()),
            _ => None,
        };
        let values = match (value.get_ref(), is_flag(arg)) {
            (DeValue::Boolean(on), true) => Values::Flag(*on),
            (DeValue::Array(all), false) => {
                let all = all.iter().map(|value| text(value.get_ref()).ok_or(value.span().start));
                let all = all.collect::<Result<Vec<_>, _>>();
                Values::List(all.map_err(|at| self.wrong(at, "not a text or a number"))?)
            }
            (value, false) if text(value).is_some() => Values::List(text(value).into_iter().collect()),
            (_, true) => return Err(self.wrong(value.span().start, &format!("{name} is true or false"))),
            (_, false) => return Err(self.wrong(value.span().start, &format!("{name} is a text or a number"))),
        };
        let setting = Setting { name: name.to_owned(), values };
        // A value that no option of this name takes is an error now, with its place.
        match setting.refused_by_all(commands) {
            Some(why) => Err(self.wrong(value.span().start, &why)),
            None => Ok(setting),
        }
    }

    /// The file's settings for the command `path` (`load`, or `iopt build`). All of the file is checked.
    fn settings(&self, program: &Command, path: &[String]) -> Result<Vec<Setting>, Failure> {
        let root = DeTable::parse(&self.text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            self.wrong(at, e.message())
        })?;
        let (mut general, mut special) = (Vec::new(), Vec::new());
        let every: Vec<&Command> = commands(program);
        for (key, value) in root.get_ref() {
            match (value.get_ref(), program.find_subcommand(&**key.get_ref())) {
                (DeValue::Table(table), Some(command)) => {
                    let rest = path.split_first().filter(|(first, _)| **first == *command.get_name()).map(|all| all.1);
                    self.table(command, table, rest, &mut special)?;
                }
                (DeValue::Table(_), None) => {
                    return Err(self.wrong(key.span().start, &format!("no command is called {}", key.get_ref())));
                }
                _ => general.push(self.option(&every, key, value)?),
            }
        }
        general.retain(|setting| is_meant(path, &setting.name));
        // The more special comes first, and the first wins.
        special.append(&mut general);
        Ok(special)
    }

    /// The table of a command; `path` are the subcommands that are run, if it is this command.
    fn table(
        &self,
        command: &Command,
        table: &DeTable<'_>,
        path: Option<&[String]>,
        found: &mut Vec<Setting>,
    ) -> Result<(), Failure> {
        for (key, value) in table {
            match (value.get_ref(), command.find_subcommand(&**key.get_ref())) {
                (DeValue::Table(table), Some(command)) => {
                    let rest = path.and_then(|path| path.split_first());
                    let rest = rest.filter(|(first, _)| **first == *command.get_name()).map(|all| all.1);
                    self.table(command, table, rest, found)?;
                }
                _ => {
                    let setting = self.option(&[command], key, value)?;
                    if path.is_some_and(<[String]>::is_empty) {
                        found.push(setting);
                    }
                }
            }
        }
        Ok(())
    }
}

/// An option and its value.
#[derive(Clone, PartialEq, Debug)]
struct Setting {
    name: String,
    values: Values,
}

#[derive(Clone, PartialEq, Debug)]
enum Values {
    Flag(bool),
    List(Vec<String>),
}

impl Setting {
    /// The words of a command line that mean the same.
    fn words(&self, arg: &Arg) -> Vec<OsString> {
        let name = &self.name;
        match &self.values {
            Values::Flag(on) => on.then(|| format!("--{name}").into()).into_iter().collect(),
            Values::List(all) if matches!(arg.get_action(), ArgAction::Append) => {
                all.iter().map(|value| format!("--{name}={value}").into()).collect()
            }
            Values::List(all) => vec![format!("--{name}={}", all.join(",")).into()],
        }
    }

    /// Why none of these commands takes this value.
    fn refused_by_all(&self, commands: &[&Command]) -> Option<String> {
        let mut options = commands.iter().filter_map(|command| option(command, &self.name));
        let first = self.refused(options.next()?)?;
        options.all(|arg| self.refused(arg).is_some()).then_some(first)
    }

    /// Why the option does not take this value.
    fn refused(&self, arg: &Arg) -> Option<String> {
        // Only the value is of interest here, and not what the option needs or excludes.
        let value = Arg::new("value").long("value").action(arg.get_action().clone());
        let value = value.value_parser(arg.get_value_parser().clone()).value_delimiter(arg.get_value_delimiter());
        let alone = Command::new("alone").disable_help_flag(true).arg(value);
        let same = Self { name: "value".to_owned(), values: self.values.clone() };
        let error = alone.try_get_matches_from(std::iter::once("alone".into()).chain(same.words(arg))).err()?;
        let text = error.render().to_string();
        let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        Some(line.replace("--value <value>", &format!("--{}", self.name)))
    }
}

/// The options that the configuration file of this user sets, a line each: numbers, switches and well-known words with
/// their values; of other texts, which may be names of files, only that they are set.
pub fn safe_settings() -> Vec<String> {
    let file = match File::find(&|name| std::env::var_os(name)) {
        Ok(Some(file)) => file,
        Ok(None) => return vec!["no configuration file".to_owned()],
        Err(_) => return vec!["the configuration file cannot be read".to_owned()],
    };
    match DeTable::parse(&file.text) {
        Ok(table) => safe_values("", table.get_ref()),
        Err(_) => vec!["the configuration file is not TOML".to_owned()],
    }
}

fn safe_values(section: &str, table: &DeTable<'_>) -> Vec<String> {
    const WORDS: [&str; 7] = ["auto", "soft", "hbm", "ddr", "4k", "2m", "paired"];
    let mut all = Vec::new();
    for (key, value) in table {
        let key = format!("{section}{}", key.get_ref());
        let known = |text: &str| WORDS.contains(&text) || text.parse::<crate::size::Size>().is_ok();
        match value.get_ref() {
            DeValue::Table(inner) => all.extend(safe_values(&format!("{key}."), inner)),
            DeValue::Boolean(value) => all.push(format!("{key} = {value}")),
            DeValue::Integer(value) => all.push(format!("{key} = {value}")),
            DeValue::String(text) if known(text) => all.push(format!("{key} = {text}")),
            _ => all.push(format!("{key} is set")),
        }
    }
    all
}

/// The text of a configuration file. `None` for a file of another user in a default place (`sudo -E` keeps HOME): an
/// option such as `cuda:0,lib=PATH` would let that user run code as this one.
fn read(path: &Path, named: bool) -> std::io::Result<Option<String>> {
    let file = std::fs::File::open(path)?;
    let meta = file.metadata()?;
    let ours = [0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
    if !(named || ours && meta.is_file()) {
        return Ok(None);
    }
    let mut text = String::new();
    file.take(MOST + 1).read_to_string(&mut text)?;
    match text.len() as u64 {
        0..=MOST => Ok(Some(text)),
        _ => Err(std::io::Error::other(format!("a configuration file has at most {MOST} bytes"))),
    }
}

/// The option of this long name.
fn option<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(name) && name != "help" && name != "version")
}

fn is_flag(arg: &Arg) -> bool {
    !arg.get_action().takes_values()
}

/// All commands below this one.
fn commands(program: &Command) -> Vec<&Command> {
    program.get_subcommands().flat_map(|command| std::iter::once(command).chain(commands(command))).collect()
}

/// The environment's setting of an option.
fn from_environment(
    environment: Environment<'_>,
    path: &[String],
    all: &[&Command],
    arg: &Arg,
    name: &str,
) -> Result<Option<Setting>, Failure> {
    let upper = |text: &str| text.to_uppercase().replace('-', "_");
    let special = format!("DMALANE_{}_{}", upper(&path.join("_")), upper(name));
    let general = format!("DMALANE_{}", upper(name));
    let found = [(special, true), (general, false)];
    let found = found
        .into_iter()
        .filter(|(_, special)| *special || is_meant(path, name))
        .find_map(|(name, special)| Some((environment(&name)?, name, special)));
    let Some((value, variable, special)) = found.filter(|_| !NEVER.contains(&name)) else { return Ok(None) };
    let wrong = |why: &str| Failure::usage(format!("{variable}: {why}"));
    let value = value.into_string().map_err(|_| wrong("not UTF-8"))?;
    let values = match (is_flag(arg), value.as_str()) {
        (true, "1" | "true") => Values::Flag(true),
        (true, "" | "0" | "false") => Values::Flag(false),
        (true, _) => return Err(wrong("it is 1 or 0")),
        (false, _) => Values::List(vec![value]),
    };
    let setting = Setting { name: name.to_owned(), values };
    match setting.refused(arg) {
        None => Ok(Some(setting)),
        // Options of one name may take different values: `load -d` and `bar-map -d`.
        Some(_) if !special && setting.refused_by_all(all).is_none() => Ok(None),
        Some(why) => Err(wrong(&why)),
    }
}

/// Adds the options of the configuration file and of the environment to a command line that was parsed.
///
/// # Errors
/// The file cannot be read, or it or the environment says what no command understands: with the place.
pub fn complete(
    program: &mut Command,
    words: Vec<OsString>,
    matches: &ArgMatches,
    environment: Environment<'_>,
) -> Result<Vec<OsString>, Failure> {
    // So that help and arguments of subcommands are known.
    program.build();
    let (mut path, mut command, mut matches) = (Vec::new(), &*program, matches);
    while let Some((name, below)) = matches.subcommand() {
        let Some(found) = command.find_subcommand(name) else { break };
        (command, matches) = (found, below);
        path.push(name.to_owned());
    }
    if !path.is_empty()
        && command.get_arguments().all(|arg| option(command, arg.get_long().unwrap_or_default()).is_none())
    {
        // `completions`, with which a shell starts, has no options.
        return Ok(words);
    }
    let file = File::find(environment)?;
    let settings = file.map_or(Ok(Vec::new()), |file| file.settings(program, &path))?;
    if path.is_empty() {
        return Ok(words);
    }
    let given = |arg: &Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let mut used: Vec<&Arg> = command.get_arguments().filter(|arg| given(arg)).collect();
    let mut added = Vec::new();
    let every = commands(program);
    let options: Vec<&Arg> = command.get_arguments().filter(|arg| arg.get_long().is_some()).collect();
    let mut add = |arg: &'_ Arg, setting: &Setting, used: &mut Vec<&_>| {
        let excludes = |a: &Arg, b: &Arg| command.get_arg_conflicts_with(a).iter().any(|c| c.get_id() == b.get_id());
        let clashes = |other: &&Arg| other.get_id() == arg.get_id() || excludes(arg, other) || excludes(other, arg);
        if used.iter().any(clashes) {
            return false;
        }
        added.extend(setting.words(arg));
        true
    };
    for arg in &options {
        let name = arg.get_long().unwrap_or_default();
        if let Some(setting) = from_environment(environment, &path, &every, arg, name)?
            && add(arg, &setting, &mut used)
        {
            used.push(arg);
        }
    }
    for setting in &settings {
        if let Some(arg) = options.iter().find(|arg| arg.get_long() == Some(&setting.name))
            && setting.refused(arg).is_none()
            && add(arg, setting, &mut used)
        {
            used.push(arg);
        }
    }
    // Behind the name of the command, before anything that might end its options.
    let mut words = words;
    let mut at = 0;
    for name in &path {
        at += 1 + words[at..].iter().skip(1).position(|word| word == OsStr::new(name)).unwrap_or(0);
    }
    words.splice(at + 1..at + 1, added);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn program() -> Command {
        let flag = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
        let number = clap::value_parser!(u8);
        let load = Command::new("load")
            .arg(Arg::new("file").action(ArgAction::Append))
            .arg(Arg::new("chunk").long("chunk").value_parser(number))
            .arg(flag("direct").conflicts_with("buffered"))
            .args(["buffered", "json", "force"].map(flag));
        Command::new("dmalane")
            .subcommand(load)
            .subcommand(Command::new("read").arg(flag("json")))
            .subcommand(Command::new("map").arg(Arg::new("chunk").long("chunk").value_parser(["all"])))
    }

    /// The words after those of the file and the environment were added.
    fn words(line: &str, file: &str, environment: &[(&str, &str)]) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, file).unwrap();
        let mut all: HashMap<&str, OsString> = environment.iter().map(|(k, v)| (*k, (*v).into())).collect();
        all.insert("DMALANE_CONFIG", path.clone().into());
        let line: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let matches = program().try_get_matches_from(&line).unwrap();
        let done = complete(&mut program(), line, &matches, &|name| all.get(name).cloned());
        match done {
            Ok(words) => Ok(words.join(OsStr::new(" ")).into_string().unwrap()),
            Err(e) => Err(e.text("x").replace(path.to_str().unwrap(), "c.toml")),
        }
    }

    #[test]
    fn the_command_line_wins_over_the_environment_and_that_over_the_file() {
        let file = "json = true\n[load]\nchunk = 3\n[read]\njson = false\n";
        let with = |line: &str, environment: &[(&str, &str)]| words(line, file, environment).unwrap();
        assert_eq!(with("dmalane load f", &[]), "dmalane load --chunk=3 --json f");
        assert_eq!(with("dmalane load f --chunk 4", &[]), "dmalane load --json f --chunk 4");
        assert_eq!(with("dmalane load f", &[("DMALANE_CHUNK", "5")]), "dmalane load --chunk=5 --json f");
        let both = [("DMALANE_CHUNK", "5"), ("DMALANE_LOAD_CHUNK", "6"), ("DMALANE_LOAD_JSON", "0")];
        assert_eq!(with("dmalane load f", &both), "dmalane load --chunk=6 f");
        assert_eq!(with("dmalane read", &[]), "dmalane read", "its own table wins");
        assert_eq!(words("dmalane load f", "", &[]).unwrap(), "dmalane load f");
    }

    #[test]
    fn a_general_value_is_for_the_commands_that_take_it() {
        for (value, load, map) in
            [("3", "dmalane load --chunk=3 f", "dmalane map"), ("\"all\"", "dmalane load f", "dmalane map --chunk=all")]
        {
            let environment = [("DMALANE_CHUNK", value.trim_matches('"'))];
            for (line, expected) in [("dmalane load f", load), ("dmalane map", map)] {
                assert_eq!(words(line, &format!("chunk = {value}"), &[]).unwrap(), expected);
                assert_eq!(words(line, "", &environment).unwrap(), expected);
            }
        }
    }

    #[test]
    fn what_contradicts_the_command_line_is_left_out() {
        let file = "[load]\ndirect = true\n";
        assert_eq!(words("dmalane load f", file, &[]).unwrap(), "dmalane load --direct f");
        assert_eq!(words("dmalane load f --buffered", file, &[]).unwrap(), "dmalane load f --buffered");
        let direct = [("DMALANE_DIRECT", "1")];
        assert_eq!(words("dmalane load f --buffered", "", &direct).unwrap(), "dmalane load f --buffered");
    }

    #[test]
    fn what_nobody_understands_is_refused_with_its_place() {
        for (file, said) in [
            ("[load]\nchnk = 3\n", "c.toml:2:1: chnk is no option of `load`"),
            ("# all\nchnk = 3\n", "c.toml:2:1: chnk is no option\n"),
            ("[lod]\n", "c.toml:1:2: no command is called lod"),
            ("[load]\nchunk = 300\n", "c.toml:2:9: invalid value '300'"),
            ("[load]\nchunk = true\n", "c.toml:2:9: chunk is a text or a number"),
            ("[load]\njson = \"yes\"\n", "c.toml:2:8: json is true or false"),
            ("[load]\nforce = true\n", "c.toml:2:1: force may lose data"),
            ("[load\n", "c.toml:1:6: "),
        ] {
            // Whatever command is run.
            for line in ["dmalane load f", "dmalane read"] {
                let text = words(line, file, &[]).unwrap_err();
                assert!(text.contains(said), "{file}: {text}");
            }
        }
        let text = words("dmalane load f", "", &[("DMALANE_CHUNK", "x")]).unwrap_err();
        assert!(text.contains("DMALANE_CHUNK: invalid value 'x'"), "{text}");
        let text = words("dmalane load f", "", &[("DMALANE_JSON", "yes")]).unwrap_err();
        assert!(text.contains("DMALANE_JSON: it is 1 or 0"), "{text}");
    }

    #[test]
    fn texts_that_may_be_names_are_not_repeated() {
        let text = "device = \"file:/home/alice/x\"\nthreads = 4\n[load]\nchunk = \"1MiB\"\njson = true\n\
                    [validate]\npages = [\"4k\"]\nmm-channel = \"auto\"\n[iopt.build]\nformat = \"secret\"\n";
        let mut all = safe_values("", DeTable::parse(text).unwrap().get_ref());
        all.sort();
        let expected = [
            "device is set",
            "iopt.build.format is set",
            "load.chunk = 1MiB",
            "load.json = true",
            "threads = 4",
            "validate.mm-channel = auto",
            "validate.pages is set",
        ];
        assert_eq!(all, expected);
    }
}
