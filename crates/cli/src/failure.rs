//! The error of a command: message, causes, hints and exit status.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use rustix::io::Errno;

use crate::layout::{plain, wrap_message};

/// The exit status of a command line that cannot be run.
pub const USAGE: u8 = 2;

/// A message, what caused it, what may help, and the exit status. Any error turns into one with `?`.
pub struct Failure {
    message: String,
    causes: Vec<String>,
    hints: Vec<String>,
    status: u8,
}

impl Failure {
    /// A failure that nothing else caused, with exit status 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: plain(&message.into()), causes: Vec::new(), hints: Vec::new(), status: 1 }
    }

    /// Options that contradict each other or the device, with exit status [`USAGE`].
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(message).status(USAGE)
    }

    /// A failure with the error that caused it, and the errors that caused that one.
    pub fn because(message: impl Into<String>, cause: &(dyn Error + 'static)) -> Self {
        let io = chain(cause).filter_map(|error| error.downcast_ref());
        let hints = io.filter_map(help).map(str::to_owned).collect();
        let causes = chain(cause).map(|error| plain(&error.to_string())).collect();
        Self { causes, hints, ..Self::new(message) }
    }

    /// A failure whose message is that of an error, with the errors that caused it.
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let mut failure = Self::because("", error);
        failure.message = failure.causes.remove(0);
        failure
    }

    /// Adds a cause.
    #[must_use]
    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.causes.push(plain(&cause.into()));
        self
    }

    /// Whether the kernel had no memory to give, somewhere below `error`.
    pub fn is_out_of_memory(error: &(dyn Error + 'static)) -> bool {
        let io = |error: &(dyn Error + 'static)| error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        chain(error).any(|error| io(error) == Some(std::io::ErrorKind::OutOfMemory))
    }

    /// Adds something that the user can do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(plain(&hint.into()));
        self
    }

    /// Replaces the exit status.
    #[must_use]
    pub fn status(mut self, status: u8) -> Self {
        self.status = status;
        self
    }

    /// Prints the failure of this program to stderr, and gives its exit status.
    pub fn report(&self, program: &str) -> ExitCode {
        // A closed stderr leaves nobody to tell.
        let _ = std::io::stderr().write_all(wrap_message(&self.text(program)).as_bytes());
        ExitCode::from(self.status)
    }

    /// The lines that are printed.
    pub fn text(&self, program: &str) -> String {
        let mut text = format!("{program}: {}\n", self.message);
        for (label, lines) in [("cause", &self.causes), ("hint", &self.hints)] {
            for line in lines {
                text.push_str(&format!("{label}: {line}\n"));
            }
        }
        text
    }
}

/// An error and what caused it.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// Fixes for some of the kernel's errors, whatever the request.
fn help(error: &std::io::Error) -> Option<&'static str> {
    match Errno::from_io_error(error)? {
        Errno::MFILE => Some("too many files are open at a time: raise the limit with ulimit -n, or name fewer files"),
        _ => None,
    }
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::of(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fmt, io};

    #[derive(Debug)]
    struct Outer(io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("shard 3 is cut short")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn message_causes_and_hints_are_a_line_each() {
        let inner = io::Error::other("end of file at 4096");
        let failure = Failure::because("cannot load a.safetensors", &Outer(inner)).hint("fetch it again");
        assert_eq!(
            failure.text("dmalane"),
            "dmalane: cannot load a.safetensors\ncause: shard 3 is cut short\ncause: end of file at 4096\n\
             hint: fetch it again\n"
        );
        let failure = Failure::because("cannot open x", &io::Error::from_raw_os_error(Errno::MFILE.raw_os_error()));
        assert!(
            failure
                .text("dmalane")
                .contains("\nhint: too many files are open at a time: raise the limit with ulimit -n")
        );
        let failure: Failure = Outer(io::Error::other("x\x1b[2Jy\nz")).into();
        assert_eq!(failure.text("dmalane"), "dmalane: shard 3 is cut short\ncause: x\\u{1b}[2Jy\\nz\n");
    }
}
