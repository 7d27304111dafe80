//! Errors as text, with their causes.

use std::error::Error;

/// The message of an error with those of its causes, separated by colons.
pub fn error_chain(error: &dyn Error) -> String {
    std::iter::successors(Some(error), |&e| e.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
