//! Limits of headers, and texts of them that go into messages.

/// The longest header that is accepted, in bytes: the limit of the format's own library.
pub const MAX_HEADER: u64 = 100_000_000;

/// Pairs of metadata, at most.
pub const MAX_PAIRS: usize = 10_000;

/// Characters of a name or a reason that go into a message: headers are hostile, and may be one name of 100 MB.
const SHORT: usize = 200;

pub(crate) fn short(text: &str) -> String {
    match text.char_indices().nth(SHORT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
