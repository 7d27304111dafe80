//! The result of a measurement, for its reports.

use dmalane::validate::{ValidateReport, ValidateSettings};

use super::repeat::Spread;

/// The result, for the report.
pub struct ValidateOutcome {
    pub device: String,
    pub notes: Vec<String>,
    pub settings: ValidateSettings,
    pub report: ValidateReport,
    /// For each figure of several measurements, the least and the greatest rate.
    pub spreads: Vec<Spread>,
    /// Everything that was asked for was measured.
    pub complete: bool,
}
