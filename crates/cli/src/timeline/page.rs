//! The report of a run as one page: answer, timeline, stages, files, machine and command.

use std::fmt::Write;
use std::time::Duration;

use dmalane::load::{Stage, StageSpan, StageTimeline, Track};

use super::Machine;
use crate::size::{binary, duration};

/// The colour of each stage.
const COLOURS: [&str; Stage::ALL.len()] =
    ["#8c8c8c", "#b08a5a", "#3b7dd8", "#c2a800", "#7f5fc0", "#2f9e8f", "#d9622b", "#c23b6e", "#5a9e2f"];
/// Columns of the drawing, and of the names at its left.
const WIDTH: f64 = 1200.0;
const NAMES: f64 = 170.0;
/// Height of a row, and of the axis.
const ROW: f64 = 15.0;
const AXIS: f64 = 22.0;
/// Rows that a track has at most; what overlaps further is drawn in the last one.
const ROWS: usize = 16;

const STYLE: &str = "\
body{font:15px/1.45 system-ui,sans-serif;max-width:1240px;margin:2em auto;padding:0 1em;color:#1b1b1b;background:#fff}
h1{font-size:1.3em}h2{font-size:1.05em;margin-top:1.8em}
table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
.n{text-align:right;font-variant-numeric:tabular-nums}code{overflow-wrap:anywhere}
svg{width:100%;height:auto;background:#fafafa;border:1px solid #ddd}
svg text{font:11px system-ui,sans-serif;fill:#333}svg line{stroke:#ddd}
.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}.key:first-child{margin-left:0}";

/// The contents of a page besides the timeline.
pub struct Page<'a> {
    /// The command, such as "dmalane load".
    pub command: &'a str,
    /// The device; empty for none.
    pub device: &'a str,
    /// The line with size and rate, and the line that names the bottleneck.
    pub answer: (String, String),
    /// Wall time.
    pub wall: Duration,
    /// The stages, after a line with the names of the columns, and what they mean.
    pub stages: (Vec<Vec<String>>, &'a str),
    /// The files, after a line with the names of the columns.
    pub files: Vec<Vec<String>>,
}

impl Page<'_> {
    /// The page. It loads nothing from elsewhere and has no scripts.
    pub(super) fn html(&self, timeline: &StageTimeline, machine: &Machine) -> String {
        let mut page = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n");
        page += "<meta http-equiv=\"Content-Security-Policy\" ";
        page += "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n";
        page += "<meta name=\"viewport\" content=\"width=device-width\">\n";
        let title = [self.command, self.device].into_iter().filter(|word| !word.is_empty());
        page += &format!("<title>{}</title>\n<style>{STYLE}", escape(&title.collect::<Vec<_>>().join(", ")));
        for (i, colour) in COLOURS.iter().enumerate() {
            page += &format!("\n.s{i}{{fill:{colour};background:{colour}}}");
        }
        page += "</style></head><body>\n";
        let (answer, bottleneck) = &self.answer;
        page += &format!("<h1>{}</h1>\n<p>{}</p>\n", escape(answer.trim()), escape(bottleneck.trim()));
        page += "<h2>Timeline</h2>\n<p>";
        for (i, stage) in Stage::ALL.iter().enumerate().filter(|(i, _)| used(timeline, *i)) {
            page += &format!("<span class=\"key s{i}\"></span>{stage}");
        }
        page += "</p>\n";
        page += &svg(timeline, self.wall);
        page += "<p>A row is a thread, or operations that were in flight: reads of a thread, copies of a channel of \
                 the device. Point at a span for its time and size.</p>\n";
        let (stages, meaning) = &self.stages;
        page += &format!("<h2>Stages</h2>\n{}<p>{}</p>\n", table(stages), escape(meaning));
        page += &format!("<h2>Files</h2>\n{}", table(&self.files));
        page += "<h2>Machine and command</h2>\n<table>\n";
        for (name, value) in machine.rows() {
            page += &format!("<tr><th>{name}</th><td><code>{}</code></td></tr>\n", escape(value));
        }
        page + "</table>\n</body></html>\n"
    }
}

fn used(timeline: &StageTimeline, stage: usize) -> bool {
    timeline.tracks.iter().any(|track| track.work.iter().any(|work| work.stage as usize == stage))
}

/// A table of which the first row is the head and the first column text; other columns are numbers.
fn table(rows: &[Vec<String>]) -> String {
    let line = |(n, cells): (usize, &Vec<String>)| {
        let tag = if n == 0 { "th" } else { "td" };
        let class = |i: usize| if i == 0 { "" } else { " class=\"n\"" };
        let cells = cells.iter().enumerate().map(|(i, cell)| format!("<{tag}{}>{}</{tag}>", class(i), escape(cell)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    format!("<table>\n{}</table>\n", rows.iter().enumerate().map(line).collect::<String>())
}

/// The timeline as a drawing.
fn svg(timeline: &StageTimeline, wall: Duration) -> String {
    let ends = timeline.tracks.iter().flat_map(|track| &track.work).map(|work| work.end);
    let whole = ends.max().unwrap_or_default().max(wall).as_secs_f64().max(1e-9);
    let scale = (WIDTH - NAMES - 10.0) / whole;
    let tracks: Vec<(&Track, Vec<Vec<StageSpan>>)> =
        timeline.tracks.iter().map(|track| (track, few(track.rows(), whole / (WIDTH - NAMES)))).collect();
    let height = AXIS + tracks.iter().map(|(_, rows)| rows.len() as f64 * ROW + 8.0).sum::<f64>();
    let mut out = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Timeline\">\n");
    let step = tick(whole);
    let digits = (-(step * 1e3).log10().floor()).max(0.0) as usize;
    let mut at = 0.0;
    while at <= whole {
        let x = NAMES + at * scale;
        let _ = writeln!(out, "<line x1=\"{x:.1}\" y1=\"{AXIS}\" x2=\"{x:.1}\" y2=\"{height}\"/>");
        if x < WIDTH - 50.0 {
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"14\">{:.digits$} ms</text>", at * 1e3);
        }
        at += step;
    }
    let mut y = AXIS;
    for (track, rows) in tracks {
        let _ = writeln!(out, "<text x=\"4\" y=\"{:.1}\">{}</text>", y + 11.0, escape(&track.name));
        for row in rows {
            for work in row {
                let (start, end) = (work.start.as_secs_f64(), work.end.as_secs_f64());
                let (x, width) = (NAMES + start * scale, ((end - start) * scale).max(0.4));
                let _ = writeln!(
                    out,
                    "<rect class=\"s{}\" x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{}\">\
                     <title>{}</title></rect>",
                    work.stage as usize,
                    ROW - 2.0,
                    escape(&title(&work)),
                );
            }
            y += ROW;
        }
        y += 8.0;
    }
    out + "</svg>\n"
}

fn title(work: &StageSpan) -> String {
    let times = if work.count > 1 { format!(" ({} times)", work.count) } else { String::new() };
    let bytes = if work.bytes > 0 { format!(", {}", binary(work.bytes)) } else { String::new() };
    let (took, at) = (duration(work.end.saturating_sub(work.start)), duration(work.start));
    format!("{}{times}: {took} at {at}{bytes}", work.stage)
}

/// At most [`ROWS`] rows, in which spans of a stage are one that are not `apart` seconds apart: nobody could see it.
fn few(mut rows: Vec<Vec<StageSpan>>, apart: f64) -> Vec<Vec<StageSpan>> {
    if rows.len() > ROWS {
        let mut rest = rows.split_off(ROWS - 1).concat();
        rest.sort_by_key(|work| work.start);
        rows.push(rest);
    }
    let join = |row: Vec<StageSpan>| {
        let mut joined: Vec<StageSpan> = Vec::new();
        for work in row {
            match joined.last_mut() {
                Some(last)
                    if last.stage == work.stage
                        && work.start.saturating_sub(last.end).as_secs_f64() < apart / 4.0
                        && (last.end.max(work.end) - last.start).as_secs_f64() < apart =>
                {
                    last.end = last.end.max(work.end);
                    (last.bytes, last.count) = (last.bytes + work.bytes, last.count + work.count);
                }
                _ => joined.push(work),
            }
        }
        joined
    };
    rows.into_iter().map(join).collect()
}

/// A round step that cuts `whole` into five to twelve parts.
fn tick(whole: f64) -> f64 {
    let step = 10f64.powf((whole / 10.0).log10().ceil());
    [step / 5.0, step / 2.0, step].into_iter().find(|step| whole / step <= 12.0).unwrap_or(step)
}

/// `text` where HTML and SVG expect text: no markup, no control characters.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            // Also what turns the direction of text, so that a name cannot look like another one.
            c if c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') => {
                out.push('\u{fffd}')
            }
            c => out.push(c),
        }
    }
    out
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
    fn steps_are_round() {
        for (whole, step) in [(1.0, 0.1), (0.9, 0.1), (1.3, 0.2), (4.0, 0.5), (0.0012, 0.0002), (7.0, 1.0)] {
            assert!((tick(whole) / step - 1.0).abs() < 1e-9, "{whole}: {}", tick(whole));
        }
    }

    #[test]
    fn a_drawing_of_a_long_load_stays_small() {
        let work = |i: u64, stage| StageSpan {
            stage,
            start: Duration::from_micros(i * 10),
            end: Duration::from_micros(i * 10 + 35),
            bytes: 5,
            count: 1,
        };
        let stages = [Stage::Read, Stage::Transfer];
        let works = (0..16_384).map(|i| work(i, stages[i as usize % 2]));
        let track = Track { name: "a <b>".to_owned(), work: works.collect() };
        let drawing = svg(&StageTimeline { tracks: vec![track] }, Duration::from_millis(163));
        assert!(drawing.len() < 4 << 20 && drawing.contains("a &lt;b&gt;"), "{} bytes", drawing.len());
        let many = |i: u64| StageSpan { end: Duration::from_secs(1), ..work(i, Stage::Read) };
        let track = Track { name: String::new(), work: (0..1000).map(many).collect() };
        assert_eq!(few(track.rows(), 1e-3).len(), ROWS);
    }
}
