//! Files that are called as a container and are something else: what they are, and what to do.

use super::format_error::FormatError;
use super::model::Container;

/// Something that is no container: how a file of it begins, what it is, and what to do.
struct Foreign {
    begins: &'static [&'static [u8]],
    what: &'static str,
    hint: &'static str,
}

/// The advice for a checkpoint that runs code when it is opened.
pub(crate) const CONVERT: &str = "save its tensors as safetensors, with a program that you trust to open it";

/// Formats: PKWARE's APPNOTE, RFC 1952, RFC 8878, the first bytes of bzip2 and xz, the opcode PROTO of Python's
/// `pickletools`.
const FOREIGN: &[Foreign] = &[
    Foreign { begins: &[b"PK\x03\x04", b"PK\x05\x06"], what: "a ZIP file (a PyTorch checkpoint?)", hint: CONVERT },
    Foreign {
        begins: &[b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"],
        what: "a pickle (PyTorch?)",
        hint: CONVERT,
    },
    Foreign { begins: &[b"\x1f\x8b"], what: "compressed by gzip", hint: "unpack it: gunzip" },
    Foreign { begins: &[b"\x28\xb5\x2f\xfd"], what: "compressed by zstd", hint: "unpack it: unzstd" },
    Foreign { begins: &[b"BZh"], what: "compressed by bzip2", hint: "unpack it: bunzip2" },
    Foreign { begins: &[b"\xfd7zXZ\0"], what: "compressed by xz", hint: "unpack it: unxz" },
    Foreign {
        begins: &[b"<!doctype html", b"<html", b"<head"],
        what: "a web page (HTML)",
        hint: "what was downloaded is an answer to people, such as a login: look at it, and download the file again",
    },
    Foreign {
        begins: &[b"<?xml", b"<error"],
        what: "an XML text",
        hint: "perhaps a server's error in place of the file: look at it, and download the file again",
    },
    Foreign { begins: &[b"{", b"["], what: "a JSON text", hint: "tensors are in the files beside it" },
    Foreign {
        begins: &[b"# xet version"],
        what: "a Xet pointer, not the file",
        hint: "download the file itself, with hf download",
    },
    Foreign {
        begins: &[&[0; 16]],
        what: "empty: its first bytes are zero",
        hint: "a download that never finished? Download it again",
    },
];

/// Refuses a file that is called as a file of `kind`, and begins as something else.
pub(super) fn refuse(kind: &Container, head: &[u8], all: &[&'static Container]) -> Result<(), FormatError> {
    if kind.begins(head) {
        return Ok(());
    }
    if let Some(other) = all.iter().find(|other| **other != kind && other.begins(head)) {
        let hint = format!("give it the extension .{}", other.extensions.first().unwrap_or(&""));
        return Err(FormatError::foreign(&format!("a {} file", other.title), &hint));
    }
    match foreign(head) {
        Some(Foreign { what, hint, .. }) => Err(FormatError::foreign(what, hint)),
        None => Ok(()),
    }
}

fn foreign(head: &[u8]) -> Option<&'static Foreign> {
    let text = head.trim_ascii_start().to_ascii_lowercase();
    let begins = |start: &&[u8]| head.starts_with(start) || text.starts_with(start);
    FOREIGN.iter().find(|foreign| foreign.begins.iter().any(begins))
}

/// In words, what begins so; empty for what nothing is known of.
pub(super) fn what(head: &[u8], all: &[&'static Container]) -> String {
    match all.iter().find(|kind| kind.begins(head)) {
        Some(kind) => format!("a {} file", kind.title),
        None => foreign(head).map_or(String::new(), |foreign| foreign.what.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::{CONTAINERS, gguf, npy, safetensors};

    #[test]
    fn what_a_file_really_is_is_said() {
        let refused = |kind: &'static Container, head: &[u8]| match refuse(kind, head, CONTAINERS) {
            Ok(()) => None,
            Err(error) => Some(error.to_string()),
        };
        for (head, says) in [
            (&b"PK\x03\x04\x14\0\0\0\0\0archive"[..], "a ZIP file (a PyTorch checkpoint?): save its tensors"),
            (b"\x80\x02}q\0X\x01\0\0\0wq\x01]", "a pickle"),
            (b"\x1f\x8b\x08\0\0\0\0\0", "compressed by gzip: unpack it: gunzip"),
            (b"\n <!DOCTYPE html>", "a web page"),
            (b"<Error><Code>Acc", "an XML text"),
            (b"{\"weight_map\": {", "a JSON text"),
            (b"# xet version 0\n", "a Xet pointer"),
            (&[0; 16], "empty: its first bytes are zero"),
            (b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", "a GGUF file: give it the extension .gguf"),
            (b"\x93NUMPY\x01\0v\0{'desc", "a NumPy file"),
        ] {
            let error = refused(&safetensors::CONTAINER, head).unwrap_or_default();
            assert!(error.contains(&format!("this is {says}")), "{head:?}: {error}");
        }
        let tensors = b"\x40\0\0\0\0\0\0\0{\"w\": {\"";
        assert!(refused(&gguf::CONTAINER, tensors).unwrap().contains("a safetensors file"));
        // What is as its name says, and what is nothing known: its parser says what is wrong.
        for (kind, head) in [
            (&safetensors::CONTAINER, &tensors[..]),
            (&safetensors::CONTAINER, b"\x40\0\0\0\0\0\0\0nonsense"),
            (&gguf::CONTAINER, b"GGUF\x03\0\0\0"),
            (&npy::CONTAINER, b"nonsense"),
            (&npy::CONTAINER, b""),
        ] {
            assert_eq!(refused(kind, head), None, "{head:?}");
        }
    }
}
