//! Lines of a text, of which none takes more memory than it may.

use std::io::{self, BufRead, ErrorKind};
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
        let (mut any, mut too_long) = (false, false);
        loop {
            let got = match self.from.fill_buf() {
                Ok(got) => got,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if got.is_empty() {
                break;
            }
            any = true;
            let end = got.iter().position(|b| *b == b'\n');
            let fragment = &got[..end.unwrap_or(got.len())];
            too_long |= self.line.len() + fragment.len() > MAX_LINE;
            if !too_long {
                self.line.extend_from_slice(fragment);
            }
            let used = fragment.len() + usize::from(end.is_some());
            self.from.consume(used);
            if end.is_some() {
                break;
            }
        }
        if !any {
            return Ok(None);
        }
        self.number += 1;
        if too_long {
            return Ok(Some(Line::TooLong));
        }
        let line = self.line.strip_suffix(b"\r").unwrap_or(&self.line);
        Ok(Some(Line::Bytes(line)))
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
