//! The figures of a validation as sections of a page.

use dmalane::validate::{Directions, Figure};

use super::outcome::ValidateOutcome;
use super::report::{self, direction};
use crate::report::{RateBar, Section};
use crate::size::binary;

/// The sections, in order.
pub fn sections(outcome: &ValidateOutcome) -> Vec<Section<'_>> {
    vec![
        Section::Bars(
            outcome.report.figures.iter().map(bar).collect(),
            format!("Reference: {}.", outcome.report.reference),
        ),
        Section::Table("Figures", report::figures(outcome), report::MEANING),
        Section::Table("Integrity", report::integrity(outcome), ""),
    ]
}

fn bar(f: &Figure) -> RateBar {
    // Blue, orange, green.
    let colour = match f.directions {
        Directions::Read => 2,
        Directions::Write => 6,
        Directions::Both => 8,
    };
    let name = format!("{} {}, {}, {}", f.phase, direction(f.directions), binary(f.buffer), f.pages);
    RateBar { name, colour, got: f.total(), reference: f.reference }
}
