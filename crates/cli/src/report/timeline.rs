//! The timeline of a run as strips, a row for each thread; operations in flight together are one row that unfolds.

use std::fmt::Write;
use std::time::Duration;

use dmalane::load::{Stage, StageSpan, StageTimeline, Track};

use super::html::{escape, key};
use crate::size::{binary, duration};

/// Width of a strip in units of its drawing, which is stretched to the page.
const WIDTH: f64 = 1000.0;
/// Columns in which operations in flight are counted.
const COLUMNS: usize = 400;
/// Rows that a track unfolds to at most; what overlaps further is drawn in the last one.
const ROWS: usize = 16;

/// The timeline of a run that took `wall`.
pub fn html(timeline: &StageTimeline, wall: Duration) -> String {
    let ends = timeline.tracks.iter().flat_map(|track| &track.work).map(|work| work.end);
    let whole = ends.max().unwrap_or_default().max(wall).as_secs_f64().max(1e-9);
    let used =
        |stage: usize| timeline.tracks.iter().any(|track| track.work.iter().any(|work| work.stage as usize == stage));
    let names: Vec<_> = Stage::ALL.iter().map(Stage::to_string).collect();
    let mut out = key(names.iter().map(String::as_str).enumerate().filter(|(stage, _)| used(*stage)));
    let step = tick(whole);
    let digits = (-(step * 1e3).log10().floor()).max(0.0) as usize;
    let _ = writeln!(out, "<div style=\"--tick:{:.4}%\">", step / whole * 100.0);
    out += "<div class=\"axis\"><span></span><div>";
    for i in (0..).take_while(|i| f64::from(*i) * step < whole * 0.96) {
        let at = f64::from(i) * step;
        let _ = write!(out, "<span style=\"left:{:.2}%\">{:.digits$} ms</span>", at / whole * 100.0, at * 1e3);
    }
    out += "</div></div>\n";
    timeline.tracks.iter().for_each(|track| out += &lanes(track, whole));
    out + "</div>\n"
}

/// A round step that cuts `whole` into five to twelve parts.
fn tick(whole: f64) -> f64 {
    let step = 10f64.powf((whole / 10.0).log10().ceil());
    [step / 5.0, step / 2.0, step].into_iter().find(|step| whole / step <= 12.0).unwrap_or(step)
}

/// A track: a lane, or a count of what was in flight that unfolds to lanes.
fn lanes(track: &Track, whole: f64) -> String {
    let name = escape(&track.name);
    let rows = track.rows();
    let together = rows.len();
    let mut lanes = few(rows, whole / WIDTH).into_iter().map(|row| spans(&row, whole));
    if together <= 1 {
        return lane(&name, &lanes.next().unwrap_or_default());
    }
    let folded = in_flight(track, together, whole);
    let numbered = lanes.enumerate().map(|(i, drawing)| lane(&format!("{} of {together}", i + 1), &drawing));
    format!(
        "<details><summary><span class=\"name\">{name} <small>up to {together}</small></span>{folded}</summary>\n{}\
         </details>\n",
        numbered.collect::<String>()
    )
}

fn lane(name: &str, drawing: &str) -> String {
    format!("<div class=\"lane\"><span class=\"name\">{name}</span>{drawing}</div>\n")
}

fn strip(height: usize, drawing: &str) -> String {
    format!("<svg class=\"strip\" viewBox=\"0 0 {WIDTH} {height}\" preserveAspectRatio=\"none\">{drawing}</svg>")
}

/// Spans that do not overlap.
fn spans(row: &[StageSpan], whole: f64) -> String {
    let mut out = String::new();
    for work in row {
        let (x, end) = (work.start.as_secs_f64() / whole * WIDTH, work.end.as_secs_f64() / whole * WIDTH);
        let _ = write!(
            out,
            "<rect class=\"c{}\" x=\"{x:.2}\" width=\"{:.2}\" height=\"1\"><title>{}</title></rect>",
            work.stage as usize,
            (end - x).max(0.4),
            escape(&title(work)),
        );
    }
    strip(1, &out)
}

fn title(work: &StageSpan) -> String {
    let times = if work.count > 1 { format!(" ({} times)", work.count) } else { String::new() };
    let bytes = if work.bytes > 0 { format!(", {}", binary(work.bytes)) } else { String::new() };
    let (took, at) = (duration(work.end.saturating_sub(work.start)), duration(work.start));
    format!("{}{times}: {took} at {at}{bytes}", work.stage)
}

/// How many operations of each stage were in flight, on average of each column, one stage above another.
fn in_flight(track: &Track, most: usize, whole: f64) -> String {
    let column = whole / COLUMNS as f64;
    let mut counts = vec![[0.0; COLUMNS]; Stage::ALL.len()];
    for work in &track.work {
        let (start, end) = (work.start.as_secs_f64() / column, work.end.as_secs_f64() / column);
        let columns = counts[work.stage as usize].iter_mut().enumerate();
        for (i, count) in columns.take(end.ceil() as usize).skip(start as usize) {
            *count += (end.min(i as f64 + 1.0) - start.max(i as f64)).max(0.0);
        }
    }
    let mut below = [0.0; COLUMNS];
    let mut out = String::new();
    for (stage, counts) in counts.iter().enumerate().filter(|(_, counts)| counts.iter().any(|n| *n > 0.0)) {
        // Along the top to the right, and back along the top of the stage below.
        let x = |i: usize| i as f64 / COLUMNS as f64 * WIDTH;
        let y = |count: f64| most as f64 - count;
        let _ = write!(out, "<path class=\"c{stage}\" d=\"M0 {:.2}", y(below[0]));
        (0..COLUMNS).for_each(|i| {
            let _ = write!(out, "V{:.2}H{:.1}", y(below[i] + counts[i]), x(i + 1));
        });
        (0..COLUMNS).rev().for_each(|i| {
            let _ = write!(out, "V{:.2}H{:.1}", y(below[i]), x(i));
        });
        let times: u64 = track.work.iter().filter(|work| work.stage as usize == stage).map(|work| work.count).sum();
        let _ = write!(out, "Z\"><title>{}: {times} times</title></path>", Stage::ALL[stage]);
        below.iter_mut().zip(counts).for_each(|(below, count)| *below += count);
    }
    strip(most, &out)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn work(i: u64, stage: Stage) -> StageSpan {
        let (start, end) = (Duration::from_micros(i * 10), Duration::from_micros(i * 10 + 35));
        StageSpan { stage, start, end, bytes: 5, count: 1 }
    }

    #[test]
    fn steps_are_round() {
        for (whole, step) in [(1.0, 0.1), (0.9, 0.1), (1.3, 0.2), (4.0, 0.5), (0.0012, 0.0002), (7.0, 1.0)] {
            assert!((tick(whole) / step - 1.0).abs() < 1e-9, "{whole}: {}", tick(whole));
        }
    }

    #[test]
    fn a_drawing_of_a_long_load_stays_small() {
        let stages = [Stage::Read, Stage::Transfer];
        let works = (0..16_384).map(|i| work(i, stages[i as usize % 2]));
        let track = Track { name: "a <b>".to_owned(), work: works.collect() };
        let drawing = html(&StageTimeline { tracks: vec![track] }, Duration::from_millis(163));
        assert!(drawing.len() < 4 << 20 && drawing.contains("a &lt;b&gt; <small>up to 4<"), "{} bytes", drawing.len());
        let many = |i: u64| StageSpan { end: Duration::from_secs(1), ..work(i, Stage::Read) };
        let track = Track { name: String::new(), work: (0..1000).map(many).collect() };
        assert_eq!(few(track.rows(), 1e-3).len(), ROWS);
    }

    #[test]
    fn what_is_in_flight_is_stacked_and_counted() {
        let span = |stage, start, end| StageSpan {
            stage,
            start: Duration::from_millis(start),
            end: Duration::from_millis(end),
            bytes: 0,
            count: 1,
        };
        let work = vec![span(Stage::Read, 0, 4), span(Stage::Read, 0, 2), span(Stage::Transfer, 2, 4)];
        let drawing = in_flight(&Track { name: String::new(), work }, 2, 4e-3);
        // Two reads, then one of them below a copy.
        let read = Stage::Read as usize;
        assert!(drawing.contains(&format!("<path class=\"c{read}\" d=\"M0 2.00V0.00H2.5V0.00H5.0")), "{drawing}");
        assert!(drawing.contains("H500.0V1.00H502.5") && drawing.contains("read: 2 times"), "{drawing}");
        let alone = Track { name: "x".into(), work: vec![span(Stage::Bind, 0, 1), span(Stage::Bind, 1, 2)] };
        assert!(!lanes(&alone, 4e-3).contains("<details"));
    }
}
