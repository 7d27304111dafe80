//! The result of a measurement, for its reports.

use dmalane::validate::{ValidateReport, ValidateSettings};

/// The result, for the report.
pub struct ValidateOutcome {
    pub device: String,
    pub notes: Vec<String>,
    pub settings: ValidateSettings,
    pub report: ValidateReport,
    /// Everything that was asked for was measured.
    pub complete: bool,
}
