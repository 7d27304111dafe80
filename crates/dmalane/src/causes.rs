//! Errors as text, with their causes.

use std::error::Error;

/// The message of an error with those of its causes that it does not repeat, separated by colons.
pub fn error_chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&e| e.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}
