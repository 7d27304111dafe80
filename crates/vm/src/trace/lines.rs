//! Lines of a text, of which none takes more memory than it may.

use std::io::{self, BufRead, Read};
use std::prelude::v1::*;

use super::MAX_LINE;

/// A line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line<'a> {
    /// Its bytes, without the end of the line.
    Bytes(&'a [u8]),
    /// One that was longer than [`MAX_LINE`].
    TooLong,
}

/// Reads line after line.
#[derive(Debug)]
pub struct Lines<R> {
    from: R,
    line: Vec<u8>,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    /// The lines of a text.
    pub fn new(from: R) -> Self {
        Self { from, line: Vec::new(), number: 0 }
    }

    /// The number of the line that was read last, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The next line; `None` at the end. A last line without its end is a line.
    ///
    /// # Errors
    /// When reading fails.
    #[allow(clippy::should_implement_trait)] // an Iterator's items could not lend the line
    pub fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        self.line.clear();
        // A byte more than a line may have, for its end.
        let got = self.from.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut self.line)?;
        if got == 0 {
            return Ok(None);
        }
        self.number += 1;
        let line = self.line.strip_suffix(b"\n");
        if line.is_none() && got > MAX_LINE {
            self.from.skip_until(b'\n')?;
            return Ok(Some(Line::TooLong));
        }
        let line = line.unwrap_or(&self.line);
        Ok(Some(Line::Bytes(line.strip_suffix(b"\r").unwrap_or(line))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    #[test]
    fn lines_of_all_lengths() {
        let long = vec![b'x'; MAX_LINE + 1];
        let text = [b"a\n\r\n\nb\r\n".as_slice(), &long, b"\n", &long[1..], b"\nend"].concat();
        for buffer in [1021, 64 << 10] {
            let mut lines = Lines::new(BufReader::with_capacity(buffer, text.as_slice()));
            for expected in [b"a".as_slice(), b"", b"", b"b"] {
                assert_eq!(lines.next().unwrap(), Some(Line::Bytes(expected)));
            }
            assert_eq!(lines.next().unwrap(), Some(Line::TooLong));
            assert_eq!(lines.next().unwrap(), Some(Line::Bytes(&long[1..])));
            assert_eq!(lines.next().unwrap(), Some(Line::Bytes(b"end")));
            assert_eq!((lines.number(), lines.next().unwrap()), (7, None));
        }
        assert_eq!(Lines::new(b"".as_slice()).next().unwrap(), None);
    }
}
