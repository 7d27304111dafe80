//! The report of a command as one page (HTML): answer, sections, machine and command.

mod bars;
mod html;
mod machine;
mod timeline;

use std::time::Duration;

use dmalane::load::StageTimeline;

pub use bars::RateBar;
use html::escape;
pub use machine::Machine;

use crate::failure::Failure;
use crate::layout::Table;
use crate::output::Outputs;

const STYLE: &str = include_str!("page.css");

/// The contents of a page.
pub struct Page<'a> {
    /// The command, such as "dmalane load".
    pub command: &'a str,
    /// The device; empty for none.
    pub device: &'a str,
    /// The line with size and rate, and the line that explains it.
    pub answer: (String, String),
    /// The sections, in order; empty ones are left out.
    pub sections: Vec<Section<'a>>,
}

/// A part of a page.
pub enum Section<'a> {
    /// Which work was under way when, and how long the run took.
    Timeline(&'a StageTimeline, Duration),
    /// Rates, each beside its reference.
    Bars(Vec<RateBar>, String),
    /// A table with its title, and what its columns mean.
    Table(&'a str, Table, &'a str),
}

impl Page<'_> {
    /// The page. It loads nothing from elsewhere and has no scripts.
    pub fn html(&self, machine: &Machine) -> String {
        let title = [self.command, self.device].into_iter().filter(|word| !word.is_empty());
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>{}</title>\n<style>\n{STYLE}",
            escape(&title.collect::<Vec<_>>().join(", "))
        );
        (0..COLOURS).for_each(|i| page += &format!(".c{i}{{--c:var(--c{i});fill:var(--c)}}"));
        let (answer, explanation) = &self.answer;
        page += &format!("\n</style></head><body>\n<p class=\"device\">{}", escape(self.command));
        if !self.device.is_empty() {
            page += &format!(" · {}", escape(self.device));
        }
        page += &format!("</p>\n<h1>{}</h1>\n<p>{}</p>\n", escape(answer.trim()), escape(explanation.trim()));
        self.sections.iter().for_each(|section| page += &section.html());
        page += "<h2>Machine and command</h2>\n<table>\n";
        for (name, value) in machine.rows() {
            page += &format!("<tr><th>{name}</th><td><code>{}</code></td></tr>\n", escape(value));
        }
        page + "</table>\n</body></html>\n"
    }

    /// Writes the page of this machine to the file of `--report`, if there is one.
    pub fn write(&self, outputs: &Outputs, done: &str) -> Result<(), Failure> {
        outputs.write("--report", done, || Ok(self.html(&Machine::this()).into_bytes()))
    }
}

/// The colours of the style: a stage has that of its number.
const COLOURS: usize = 9;

impl Section<'_> {
    fn html(&self) -> String {
        let (title, body, note) = match self {
            Self::Timeline(timeline, wall) => (
                "Timeline",
                timeline::html(timeline, *wall),
                "A row is a thread. Operations in flight together are one row, whose height is their number: click it \
                 to unfold them. Point at a span for its time and size.",
            ),
            Self::Bars(bars, note) if !bars.is_empty() => {
                let of = bars.iter().any(|bar| bar.reference.is_some());
                (if of { "Rates beside their references" } else { "Rates" }, bars::html(bars), note.as_str())
            }
            Self::Table(title, table, note) if !table.is_empty() => (*title, self::table(table), *note),
            Self::Bars(..) | Self::Table(..) => return String::new(),
        };
        let note = if note.is_empty() { String::new() } else { format!("<p class=\"note\">{}</p>\n", escape(note)) };
        format!("<h2>{}</h2>\n{body}{note}", escape(title))
    }
}

/// A table, without its empty columns.
fn table(table: &Table) -> String {
    let line = |(n, cells): (usize, Vec<(bool, &str)>)| {
        let tag = if n == 0 { "th" } else { "td" };
        let class = |is_right| if is_right { " class=\"n\"" } else { "" };
        let cells = cells.into_iter().map(|(right, cell)| format!("<{tag}{}>{}</{tag}>", class(right), escape(cell)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let lines: String = table.cells().enumerate().map(line).collect();
    format!("<div class=\"scroll\"><table>\n{lines}</table></div>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out_of_the_text() {
        assert_eq!(
            escape("<script>\"a\"&'b'\u{1b}\u{202e}\u{e9}"),
            "&lt;script&gt;&quot;a&quot;&amp;&#39;b&#39;\u{fffd}\u{fffd}\u{e9}"
        );
    }

    #[test]
    fn every_text_of_a_page_is_escaped() {
        let evil = "<b>\"&'";
        let bar = RateBar { name: evil.into(), colour: 1, got: 1e9, reference: Some(2e9) };
        let table = |rows: usize| {
            let mut table = Table::new("lr", [evil; 2]);
            (0..rows).for_each(|_| table.row([evil, evil].map(str::to_owned)));
            table
        };
        let page = Page {
            command: evil,
            device: evil,
            answer: (evil.into(), evil.into()),
            sections: vec![
                Section::Bars(vec![bar], evil.to_owned()),
                Section::Table(evil, table(1), evil),
                Section::Table("left out", table(0), evil),
            ],
        };
        let html = page.html(&Machine::this());
        assert!(
            !html.contains("<b>") && !html.contains("left out") && html.matches("&lt;b&gt;").count() >= 12,
            "{html}"
        );
    }
}
