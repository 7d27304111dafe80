//! Text for people: tables, wrapped sentences and colours, as wide as the reader's terminal.

use std::fmt::Display;
use std::io::{IsTerminal, stderr, stdout};
use std::os::fd::AsFd;

use clap::builder::styling::{AnsiColor, Style};

/// The most columns that a line of text takes.
const WIDEST: usize = 100;

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
    of.is_terminal().then(|| terminal_size::terminal_size_of(of).map_or(WIDEST, |(w, _)| w.0.max(20).into()))
}

/// Columns for a sentence.
fn columns() -> usize {
    terminal().map_or(WIDEST, |terminal| terminal.min(WIDEST))
}

/// `text` in lines that fit the terminal, each but the first indented by `indent` columns. A word that does not fit a
/// line is not divided, nor is an [`unbroken`] text.
pub fn wrap(text: &str, indent: usize) -> String {
    wrap_to(text, indent, columns())
}

/// The lines of a message for stderr, as wide as the terminal that shows it. Elsewhere a program finds each cause in a
/// line.
pub fn wrap_message(text: &str) -> String {
    let Some(columns) = width(&stderr()) else { return text.replace(GLUE, " ") };
    text.lines().map(|line| wrap_to(line, 2, columns.min(WIDEST))).collect()
}

fn wrap_to(text: &str, indent: usize, columns: usize) -> String {
    let indent = " ".repeat(indent);
    let options = textwrap::Options::new(columns)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(textwrap::WordSplitter::NoHyphenation);
    let mut text = textwrap::fill(text, options).replace(GLUE, " ");
    text.push('\n');
    text
}

/// A space at which [`wrap`] does not divide a line: a control character, which [`plain`](crate::output::plain) keeps
/// out of names.
const GLUE: char = '\u{1}';

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

/// `text` with at most so many characters.
pub fn cut_end(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => format!("{}...", text.chars().take(most.saturating_sub(3)).collect::<String>()),
        false => text.to_owned(),
    }
}

/// The stage with the largest share of the wall time, as a line; start-up is what no stage took. Nothing without
/// stages.
pub fn bottleneck<S: Display>(stages: impl Iterator<Item = (S, f64)>) -> String {
    let stages: Vec<_> = stages.map(|(stage, share)| (stage.to_string(), share.min(1.0))).collect();
    let rest = 1.0 - stages.iter().map(|(_, share)| share).sum::<f64>();
    match stages.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((stage, share)) if share >= rest => format!("Bottleneck: {stage} ({:.0} % of wall time)\n", share * 100.0),
        Some(_) => format!("Bottleneck: start-up ({:.0} % of wall time)\n", rest * 100.0),
        None => String::new(),
    }
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

    /// The lines. Columns in which no row has anything are left out.
    pub fn text(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let empty = |column: &usize| self.rows.len() > 1 && self.rows[1..].iter().all(|row| row[*column].is_empty());
        let shown: Vec<usize> = (0..columns).filter(|column| !empty(column)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells = shown.iter().map(|&column| match self.align.as_bytes().get(column) {
                Some(b'r') => format!("{:>width$}", row[column], width = widths[column]),
                _ => format!("{:<width$}", row[column], width = widths[column]),
            });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_wrapped_and_words_are_not() {
        assert_eq!(wrap_to("one two three", 2, 9), "one two\n  three\n");
        assert_eq!(wrap_to("a /a/long/path", 1, 6), "a\n /a/long/path\n");
        assert_eq!(wrap_to(&format!("with: {}", unbroken("echo 1 | tee x")), 2, 9), "with:\n  echo 1 | tee x\n");
        assert!(wrap(&"word ".repeat(99), 4).lines().all(|line| line.len() <= WIDEST));
    }

    #[test]
    fn names_are_whole_in_pipes_and_cut_at_the_front_on_terminals() {
        let name = format!("{}.mlp.7.weight", "x".repeat(80));
        assert_eq!(cut_front(&name, None), name);
        let cut = cut_front(&name, Some(100));
        assert!(cut.starts_with("...x") && cut.ends_with(".mlp.7.weight") && cut.len() == 50, "{cut}");
        assert_eq!(cut_front("short", Some(80)), "short");
        assert_eq!((cut_end("12345678", 8), cut_end("123456789", 8)), ("12345678".into(), "12345...".into()));
        assert_eq!(cut_front(&"\u{e9}".repeat(60), Some(100)).chars().count(), 50);
    }

    #[test]
    fn the_bottleneck_is_the_largest_share_or_none_of_the_stages() {
        let text = |stages: &[(&'static str, f64)]| bottleneck(stages.iter().copied());
        assert_eq!(text(&[("read", 0.1), ("transfer", 0.82)]), "Bottleneck: transfer (82 % of wall time)\n");
        assert_eq!(text(&[("read", 0.02), ("checksum", 0.03)]), "Bottleneck: start-up (95 % of wall time)\n");
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn tables_are_aligned_without_their_empty_columns() {
        let mut table = Table::new("lrr", ["name", "ms", "none"]);
        table.row(["a\u{e9}".to_owned(), "1.5".to_owned(), String::new()]);
        table.row(["longer".to_owned(), "12.25".to_owned(), String::new()]);
        assert_eq!(table.text(), "name       ms\na\u{e9}        1.5\nlonger  12.25\n");
    }
}
