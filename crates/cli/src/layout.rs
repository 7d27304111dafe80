//! Text for people: tables, wrapped sentences and colours, as wide as the reader's terminal.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{IsTerminal, stderr, stdout};
use std::os::fd::AsFd;

use clap::builder::styling::{AnsiColor, Style};

/// The most columns that a line of text takes.
const WIDEST: usize = 100;
/// Columns of a terminal that are used, however few it has.
const NARROWEST: usize = 20;

/// Something that is right.
const GOOD: Style = AnsiColor::Green.on_default();
/// Something that is missing or wrong.
const BAD: Style = AnsiColor::Red.on_default().bold();

/// `text` in the colour of what is right. [`print`](crate::output::print) removes colours that nobody sees.
pub fn good(text: &str) -> String {
    format!("{GOOD}{text}{GOOD:#}")
}

/// `text` in the colour of what is missing or wrong.
pub fn bad(text: &str) -> String {
    format!("{BAD}{text}{BAD:#}")
}

/// Columns of the terminal that shows stdout; `None` for a pipe or a file.
pub fn terminal() -> Option<usize> {
    width(&stdout())
}

fn width(of: &(impl IsTerminal + AsFd)) -> Option<usize> {
    let told = || terminal_size::terminal_size_of(of).map(|(w, _)| w.0.into()).filter(|columns| *columns > 0);
    of.is_terminal().then(|| named().or_else(told).map_or(WIDEST, |columns| columns.max(NARROWEST)))
}

/// The columns that the environment asks for, also where there is no terminal.
fn named() -> Option<usize> {
    let columns: usize = std::env::var("COLUMNS").ok()?.parse().ok()?;
    (columns > 0).then(|| columns.max(NARROWEST))
}

/// Columns for a sentence.
fn columns() -> usize {
    limit().map_or(WIDEST, |columns| columns.min(WIDEST))
}

/// `text` in lines that fit the terminal, each but the first indented by `indent` columns. A word that does not fit a
/// line is not divided, nor is an [`unbroken`] text.
pub fn wrap(text: &str, indent: usize) -> String {
    wrap_to(text, indent, columns())
}

/// The lines of a message for stderr, no wider than the terminal that shows it, or elsewhere as the environment says:
/// each cause in a line. Text in backquotes, a command to be copied, stays on one line.
pub fn wrap_message(text: &str) -> String {
    let columns = match width(&stderr()) {
        Some(columns) => columns.min(WIDEST),
        None => named().unwrap_or(u16::MAX.into()),
    };
    wrap_message_to(text, columns)
}

fn wrap_message_to(text: &str, columns: usize) -> String {
    let commands_whole = |line: &str| {
        let pieces = line.split('`').enumerate();
        pieces
            .map(|(i, piece)| if i % 2 == 1 { unbroken(piece) } else { piece.to_owned() })
            .collect::<Vec<_>>()
            .join("`")
    };
    let lines: String = text.lines().map(|line| wrap_to(&commands_whole(line), 2, columns)).collect();
    spaced(&lines).into_owned()
}

fn wrap_to(text: &str, indent: usize, columns: usize) -> String {
    let indent = " ".repeat(indent);
    let options = textwrap::Options::new(columns)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(textwrap::WordSplitter::NoHyphenation);
    textwrap::fill(text, options) + "\n"
}

/// A space at which no line is divided, until [`spaced`]: a control character, which [`plain`] keeps out of names.
const GLUE: char = '\u{1}';

/// Text with its spaces, after all that may divide its lines.
pub fn spaced(text: &str) -> Cow<'_, str> {
    // A list of tensors may be long, and is not copied.
    if text.contains(GLUE) { text.replace(GLUE, " ").into() } else { text.into() }
}

/// The lines of a report, no wider than the terminal that shows stdout; elsewhere as they are, unless the environment
/// names a width.
pub fn fit(text: &str) -> Cow<'_, str> {
    match limit() {
        Some(columns) => fit_to(text, columns).into(),
        None => text.into(),
    }
}

/// Columns that lines of stdout may have: those of its terminal, or those that the environment names.
pub fn limit() -> Option<usize> {
    terminal().or_else(named)
}

/// The lines of a report, of at most `columns` columns.
pub fn fit_to(text: &str, columns: usize) -> String {
    let fit = |line: &str| {
        let words = line.trim_start();
        match words.contains(' ') && textwrap::core::display_width(line) > columns {
            true => wrap_to(line, line.len() - words.len() + 2, columns),
            false => format!("{line}\n"),
        }
    };
    text.lines().map(fit).collect()
}

/// `text` for [`wrap`], which keeps it on one line: a command to be copied.
pub fn unbroken(text: &str) -> String {
    text.replace(' ', &GLUE.to_string())
}

/// `name` whole where it is read by a program, else its last characters, which tell long names of a model apart.
pub fn cut_front(name: &str, terminal: Option<usize>) -> String {
    let Some(most) = terminal.map(|columns| (columns / 2).clamp(12, WIDEST / 2)) else { return name.to_owned() };
    let len = name.chars().count();
    match len > most {
        true => format!("...{}", name.chars().skip(len - (most - 3)).collect::<String>()),
        false => name.to_owned(),
    }
}

/// The stage with the largest share of the wall time, and that share; start-up is what no stage took. None without
/// stages.
pub fn bottleneck<S: Display>(stages: impl Iterator<Item = (S, f64)>) -> Option<(String, f64)> {
    let stages: Vec<_> = stages.map(|(stage, share)| (stage.to_string(), share.min(1.0))).collect();
    let rest = 1.0 - stages.iter().map(|(_, share)| share).sum::<f64>();
    let most = stages.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(if most.1 >= rest { most } else { ("start-up".to_owned(), rest) })
}

/// A number of things that are called `what`, of which the plural takes an s.
pub fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Rows of cells in aligned columns.
pub struct Table {
    /// `l` or `r` for each column: aligned to the left or to the right.
    align: &'static str,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this head; `align` has an `l` (left) or `r` (right) for each column.
    pub fn new<const N: usize>(align: &'static str, head: [&str; N]) -> Self {
        Self { align, rows: vec![head.map(str::to_owned).to_vec()] }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }

    /// The lines. Columns in which no row has anything are left out. Those that do not fit the terminal follow as
    /// another table, with the first column again; text in the last column goes on in the next line.
    pub fn text(&self) -> String {
        self.text_within(limit().unwrap_or(usize::MAX))
    }

    /// Whether it has a head alone.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// The cells of each row, the head first, without empty columns, and whether each is aligned to the right.
    pub fn cells(&self) -> impl Iterator<Item = Vec<(bool, &str)>> {
        let shown = self.shown();
        self.rows.iter().map(move |row| shown.iter().map(|&i| (self.is_right(i), row[i].as_str())).collect())
    }

    /// The columns in which a row has anything.
    fn shown(&self) -> Vec<usize> {
        let empty = |column: &usize| !self.is_empty() && self.rows[1..].iter().all(|row| row[*column].is_empty());
        (0..self.rows[0].len()).filter(|column| !empty(column)).collect()
    }

    fn is_right(&self, column: usize) -> bool {
        self.align.as_bytes().get(column) == Some(&b'r')
    }

    fn text_within(&self, most: usize) -> String {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        let shown = self.shown();
        let mut parts: Vec<(usize, Vec<usize>)> = Vec::new();
        for &column in &shown {
            match parts.last_mut() {
                Some((taken, part)) if part.len() < 2 || *taken + 2 + widths[column] <= most => {
                    *taken += 2 + widths[column];
                    part.push(column);
                }
                Some(_) => parts.push((widths[shown[0]] + 2 + widths[column], vec![shown[0], column])),
                None => parts.push((widths[column], vec![column])),
            }
        }
        let line = |row: &Vec<String>, part: &[usize]| {
            let cells = part.iter().map(|&column| match self.is_right(column) {
                true => format!("{:>width$}", row[column], width = widths[column]),
                false => format!("{:<width$}", row[column], width = widths[column]),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            match part.last() {
                // Text in the last column goes on below.
                Some(&last) if !self.is_right(last) => {
                    wrap_to(line.trim_end(), line.chars().count() - widths[last], most)
                }
                _ => format!("{}\n", line.trim_end()),
            }
        };
        let lines = |(_, part): &(usize, Vec<usize>)| self.rows.iter().map(|row| line(row, part)).collect::<String>();
        parts.iter().map(lines).collect::<Vec<_>>().join("\n")
    }
}

/// Whether a character could drive a terminal, or change the direction of the text around it.
pub fn drives(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `text` with the characters escaped with which a file name could [drive](drives) the terminal.
pub fn plain(text: &str) -> String {
    match text.chars().any(drives) {
        true => text.chars().map(|c| if drives(c) { c.escape_default().to_string() } else { c.to_string() }).collect(),
        false => text.to_owned(),
    }
}

/// Words as a shell reads them back.
pub fn shell_words(words: &[impl AsRef<str>]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    let quoted = words.iter().map(AsRef::as_ref).map(|word| match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(shell_words(&["dmalane", "a b", "it's", "", "--x=1"]), r"dmalane 'a b' 'it'\''s' '' --x=1");
    }

    #[test]
    fn sentences_are_wrapped_and_words_are_not() {
        assert_eq!(wrap_to("one two three", 2, 9), "one two\n  three\n");
        assert_eq!(wrap_to("a /a/long/path", 1, 6), "a\n /a/long/path\n");
        let command = wrap_to(&format!("with: {}", unbroken("echo 1 | tee x")), 2, 9);
        assert_eq!(spaced(&command), "with:\n  echo 1 | tee x\n");
        assert_eq!(spaced(&fit_to(&command, 9)), "with:\n  echo 1 | tee x\n");
        assert_eq!(fit_to("  one two three\n\nfour\n", 9), "  one two\n    three\n\nfour\n");
        assert!(wrap(&"word ".repeat(99), 4).lines().all(|line| line.len() <= WIDEST));
    }

    #[test]
    fn names_are_whole_in_pipes_and_cut_at_the_front_on_terminals() {
        let name = format!("{}.mlp.7.weight", "x".repeat(80));
        assert_eq!(cut_front(&name, None), name);
        let cut = cut_front(&name, Some(100));
        assert!(cut.starts_with("...x") && cut.ends_with(".mlp.7.weight") && cut.len() == 50, "{cut}");
        assert_eq!(cut_front("short", Some(80)), "short");
        assert_eq!(cut_front(&"\u{e9}".repeat(60), Some(100)).chars().count(), 50);
    }

    #[test]
    fn the_bottleneck_is_the_largest_share_or_none_of_the_stages() {
        let of = |stages: &[(&'static str, f64)]| bottleneck(stages.iter().copied());
        assert_eq!(of(&[("read", 0.1), ("transfer", 0.82)]), Some(("transfer".to_owned(), 0.82)));
        assert_eq!(of(&[("read", 0.25), ("checksum", 0.25)]), Some(("start-up".to_owned(), 0.5)));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn tables_are_aligned_without_their_empty_columns() {
        let mut table = Table::new("lrr", ["name", "ms", "none"]);
        table.row(["a\u{e9}".to_owned(), "1.5".to_owned(), String::new()]);
        table.row(["longer".to_owned(), "12.25".to_owned(), String::new()]);
        let text = "name       ms\na\u{e9}        1.5\nlonger  12.25\n";
        assert_eq!((table.text_within(13), table.text_within(1)), (text.to_owned(), text.to_owned()));
    }

    #[test]
    fn columns_that_do_not_fit_follow_as_another_table() {
        let mut table = Table::new("lrrr", ["name", "ms", "GB/s", "share"]);
        table.row(["read", "1", "2.5", "80 %"].map(str::to_owned));
        let parts = "name  ms  GB/s\nread   1   2.5\n\nname  share\nread   80 %\n";
        assert_eq!((table.text_within(14), table.text_within(20)), (parts.to_owned(), parts.to_owned()));
        assert_eq!(table.text_within(21), "name  ms  GB/s  share\nread   1   2.5   80 %\n");
    }

    #[test]
    fn messages_are_wrapped_and_commands_are_not() {
        let text = "dmalane: it is full\nhint: to have more: `make it --large` or wait\n";
        let lines = "dmalane: it is\n  full\nhint: to have\n  more:\n  `make it --large`\n  or wait\n";
        assert_eq!(wrap_message_to(text, 14), lines);
    }
}
