//! Rates as bars beside their references.

use std::fmt::Write;

use super::html::escape;
use crate::size::per_second;

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

/// A row for each rate.
pub fn html(bars: &[RateBar]) -> String {
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
