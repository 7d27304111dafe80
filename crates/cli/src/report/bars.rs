//! Rates as bars beside their references, and lines over the size of buffers.

use std::fmt::Write;

use super::html::escape;
use crate::size::{binary, per_second};

/// A rate beside its reference.
pub struct RateBar {
    /// The stage or figure with this rate.
    pub name: String,
    /// The number of its colour.
    pub colour: usize,
    /// Bytes per second.
    pub got: f64,
    /// The reference rate, in bytes per second.
    pub reference: Option<f64>,
}

/// Values over the size of buffers.
pub struct Chart {
    /// Its title.
    pub title: String,
    /// Values are seconds; else bytes per second.
    pub times: bool,
    /// In the order in which they are drawn.
    pub lines: Vec<ChartLine>,
}

/// A line of a chart.
#[derive(Clone)]
pub struct ChartLine {
    /// Its name in the key.
    pub name: String,
    /// The number of its colour.
    pub colour: usize,
    /// Drawn with dashes.
    pub dashed: bool,
    /// Bytes of a buffer, and the value.
    pub points: Vec<(u64, f64)>,
}

/// A row for each rate.
pub fn bars(bars: &[RateBar]) -> String {
    let most = bars.iter().flat_map(|bar| [Some(bar.got), bar.reference]).flatten().fold(1.0, f64::max);
    let mut out = String::from("<div class=\"bars\">\n");
    for RateBar { name, colour, got, reference } in bars {
        let width = |rate: f64| rate / most * 100.0;
        let bar =
            reference.map_or(String::new(), |r| format!("<i class=\"ref\" style=\"width:{:.2}%\"></i>", width(r)));
        let of = reference
            .map_or(String::new(), |r| format!(" <small>{:.0} % of {}</small>", got / r * 100.0, per_second(r)));
        let _ = writeln!(
            out,
            "<div><span>{}</span><span class=\"meter\"><i class=\"got c{colour}\" style=\"width:{:.2}%\"></i>{bar}\
             </span><span class=\"n\">{}</span><span class=\"n of\">{of}</span></div>",
            escape(name),
            width(*got),
            per_second(*got),
        );
    }
    out + "</div>\n"
}

/// The drawings side by side, as many as there is room for.
pub fn charts(charts: &[Chart]) -> String {
    let each = charts.iter().map(|chart| format!("<div><h3>{}</h3>{}</div>\n", escape(&chart.title), chart.svg()));
    format!("<div class=\"charts\">\n{}</div>\n", each.collect::<String>())
}

/// A time in seconds, to three digits.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => short(s * 1e6, "us"),
        s if s < 1.0 => short(s * 1e3, "ms"),
        s => short(s, "s"),
    }
}

/// Bytes per second, to three digits.
fn rate(bytes: f64) -> String {
    if bytes < 1e9 { short(bytes / 1e6, "MB/s") } else { short(bytes / 1e9, "GB/s") }
}

fn short(value: f64, unit: &str) -> String {
    let whole = (value - value.round()).abs() < 1e-6;
    let digits = [100.0, 10.0].into_iter().filter(|most| !whole && value < *most).count();
    format!("{value:.digits$} {unit}")
}

/// The drawing, and its margins: left, right, top, bottom.
const SIZE: (f64, f64) = (360.0, 210.0);
const MARGIN: (f64, f64, f64, f64) = (62.0, 14.0, 12.0, 26.0);
/// Names of sizes that fit below a drawing.
const NAMES: usize = 5;

impl Chart {
    fn svg(&self) -> String {
        let ((width, height), (left, right, top, bottom)) = (SIZE, MARGIN);
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let mut sizes: Vec<u64> = points().map(|point| point.0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let log = |size: u64| (size.max(1) as f64).log2();
        let (first, last) = (sizes.first().copied().map_or(0.0, log), sizes.last().copied().map_or(0.0, log));
        let x = |size: u64| left + (log(size) - first) / (last - first).max(1e-9) * (width - left - right);
        let ticks = ticks(points().map(|point| point.1));
        let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
        let y = |value: f64| height - bottom - (value / low).ln() / (high / low).ln() * (height - top - bottom);
        let name = |value: f64| if self.times { time(value) } else { rate(value) };
        let title = escape(&self.title);
        let mut out = format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">");
        for value in &ticks {
            let (y, end) = (y(*value), width - right);
            let _ = write!(out, "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{end}\" y2=\"{y:.1}\"/>");
            let (x, y, name) = (left - 6.0, y + 4.0, name(*value));
            let _ = write!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{name}</text>");
        }
        for size in sizes.iter().step_by(sizes.len().div_ceil(NAMES).max(1)) {
            let (x, y) = (x(*size), height - 8.0);
            let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", binary(*size));
        }
        for ChartLine { name: line, colour, dashed, points } in &self.lines {
            let dash = if *dashed { " dash" } else { "" };
            let _ = write!(out, "<g class=\"c{colour}\"><polyline class=\"{}\" points=\"", dash.trim());
            points.iter().for_each(|(size, value)| {
                let _ = write!(out, "{:.1},{:.1} ", x(*size), y(*value));
            });
            out += "\"/>";
            for (size, value) in points {
                let (x, y, r) = (x(*size), y(*value), if *dashed { 1.5 } else { 2.5 });
                let what = format!("{line}: {} at {}", name(*value), binary(*size));
                let _ = write!(
                    out,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\"><title>{}</title></circle>",
                    escape(&what)
                );
            }
            out += "</g>";
        }
        out + "</svg>"
    }
}

/// Values of a logarithmic axis with a line across the drawing: 1, 2 and 5 times powers of 10, or for a wide range the
/// powers alone. All others are between the first and the last.
fn ticks(values: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let most = values.clone().fold(f64::MIN_POSITIVE, f64::max).max(1e-9);
    let least = values.fold(most, f64::min).max(most / 1e9);
    let powers = least.log10().floor() as i32..=most.log10().ceil() as i32;
    let within = |ticks: Vec<f64>| {
        let first = ticks.iter().rposition(|tick| *tick <= least).unwrap_or(0);
        let last = ticks.iter().position(|tick| *tick >= most).unwrap_or(ticks.len() - 1).max(first + 1);
        ticks[first..=last.min(ticks.len() - 1)].to_vec()
    };
    let fine = within(powers.clone().flat_map(|power| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(power))).collect());
    match fine.len() {
        0..=9 => fine,
        _ => within(powers.map(|power| 10f64.powi(power)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_lie_between_round_ticks() {
        for values in [&[1.0, 9.9e9][..], &[2.1e10, 3e10], &[5e-7], &[1e-3, 1e-3], &[2e9, 5e9], &[1e9]] {
            let ticks = ticks(values.iter().copied());
            let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
            let round = 1.0 + 1e-9;
            assert!(values.iter().all(|v| low <= v * round && *v <= high * round), "{values:?} {ticks:?}");
            assert!((2..=11).contains(&ticks.len()) && low < high, "{values:?} {ticks:?}");
        }
        assert_eq!(ticks([1.5e9, 1.2e10].into_iter()), [1e9, 2e9, 5e9, 1e10, 2e10]);
    }

    #[test]
    fn values_have_three_digits() {
        let all = [1e-6, 1.23456e-5, 2.5e-2, 0.0999, 7.0].map(time);
        assert_eq!(all, ["1 us", "12.3 us", "25 ms", "99.9 ms", "7 s"]);
        assert_eq!([1e7, 4.27e7, 1e9, 2.345e10].map(rate), ["10 MB/s", "42.7 MB/s", "1 GB/s", "23.4 GB/s"]);
    }

    #[test]
    fn a_single_size_and_no_line_at_all_are_drawn() {
        let line = ChartLine { name: "read".into(), colour: 2, dashed: false, points: vec![(4096, 1e9)] };
        for lines in [vec![line], Vec::new()] {
            let svg = Chart { title: String::new(), times: false, lines }.svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
