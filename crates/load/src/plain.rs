//! Errors of JSON in the words of users, who need not know the parser or the types of this program.

use serde_json::error::Category;

use crate::container::short;

/// Describes an error of a JSON parser. `variant` is the word for a value of which there are only a few.
pub fn plain_json(error: &serde_json::Error, variant: &str) -> String {
    let text = error.to_string();
    // The place is said last; a value may hold the same words.
    let text = text.rsplit_once(" at line ").map_or(&*text, |(text, _)| text);
    // "FOUND, expected WANTED": what is found may be a text of the file, in which there may be anything.
    let (found, wanted) = text.rsplit_once(", expected ").unwrap_or((text, ""));
    let wanted = match wanted {
        "a sequence" => "a list".to_owned(),
        "a map" => "an object".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number".to_owned(),
        name if name.starts_with("struct ") => "an object".to_owned(),
        other => other.replace("a tuple of size", "a list of"),
    };
    let invalid = found.strip_prefix("invalid type: ").or(found.strip_prefix("invalid value: "));
    let says = match (invalid, error.classify()) {
        (Some("sequence"), _) => format!("a list instead of {wanted}"),
        (Some("map"), _) => format!("an object instead of {wanted}"),
        (Some(value), _) => {
            let value =
                ["integer ", "string ", "floating point ", "boolean "].iter().find_map(|w| value.strip_prefix(w));
            let value = value.map_or("null".to_owned(), |value| short(value.trim_matches(['"', '`'])));
            format!("{value} instead of {wanted}")
        }
        (None, Category::Eof) => "it ends too early".to_owned(),
        (None, Category::Syntax) => format!("not JSON ({})", short(found)),
        (None, _) if found.starts_with("invalid length ") && wanted.is_empty() => short(found),
        (None, _) if found.starts_with("invalid length ") => format!("a list of another length instead of {wanted}"),
        (None, _) => short(found)
            .replace("missing field", "there is no field")
            .replace("unknown variant", &format!("unknown {variant}")),
    };
    let line = if error.line() > 1 { format!("line {}, ", error.line()) } else { String::new() };
    format!("{}, at {line}column {}", says.replace('`', "\""), error.column())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize, Debug)]
    #[allow(dead_code)] // parsed only
    struct Thing {
        number: u32,
        list: Vec<u64>,
        pair: (usize, usize),
        kind: Option<Kind>,
    }

    #[derive(Deserialize, Debug)]
    enum Kind {
        #[serde(rename = "one")]
        One,
    }

    #[test]
    fn no_type_of_a_program_is_named() {
        let long = format!(r#"{{"number": "{}"}}"#, "\u{e9}".repeat(1000));
        for (text, said) in [
            ("", "it ends too early, at column 0"),
            ("{\n\"number\": }", "not JSON (expected value), at line 2, column 11"),
            ("[1]", "a list of another length instead of an object, at column 3"),
            ("{}", "there is no field \"number\", at column 2"),
            (r#"{"number": "x"}"#, "x instead of a whole number, at column 14"),
            (
                r#"{"number": "at line 5, expected u8"}"#,
                "at line 5, expected u8 instead of a whole number, at column 35",
            ),
            (r#"{"number": -1}"#, "-1 instead of a whole number, at column 13"),
            (r#"{"number": 4294967296}"#, "4294967296 instead of a whole number, at column 21"),
            (r#"{"number": 1.5}"#, "1.5 instead of a whole number, at column 14"),
            (r#"{"number": null}"#, "null instead of a whole number, at column 15"),
            (r#"{"number": {}}"#, "an object instead of a whole number, at column 11"),
            (r#"{"list": 1}"#, "1 instead of a list, at column 10"),
            (r#"{"pair": [1]}"#, "a list of another length instead of a list of 2, at column 12"),
            (r#"{"kind": "two"}"#, "unknown thing \"two\", at column 14"),
            (&long, &format!("{}... instead of a whole number, at column 2013", "\u{e9}".repeat(200))),
        ] {
            let error = serde_json::from_str::<Thing>(text).unwrap_err();
            assert_eq!(plain_json(&error, "thing"), said, "{error}");
        }
    }
}
