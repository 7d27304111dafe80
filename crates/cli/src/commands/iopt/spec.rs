//! The specification of an image: a list of mappings as JSON.

use std::fs::Metadata;
use std::path::Path;

use dmalane::addr::Access;
use dmalane::load::plain_json;
use serde::de::{Deserialize, Deserializer, Error};

use super::number::Number;
use crate::failure::Failure;
use crate::source::SourceFile;

/// Bytes of a specification, at most.
const MOST: u64 = 256 << 20;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    schema: u64,
    mappings: Vec<SpecMapping>,
}

/// One mapping of a specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpecMapping {
    /// Input address.
    pub va: Number,
    /// Output address.
    pub pa: Number,
    /// Bytes.
    pub len: Number,
    /// The access of the device.
    #[serde(deserialize_with = "access")]
    pub access: Access,
}

fn access<'de, D: Deserializer<'de>>(value: D) -> Result<Access, D::Error> {
    let text = String::deserialize(value)?;
    text.parse().map_err(|why| D::Error::custom(format_args!("{text:?}: {why}")))
}

/// Reads the specification in a file; with it come the file's metadata.
pub fn read(path: &Path) -> Result<(Vec<SpecMapping>, Metadata), Failure> {
    let file = SourceFile::open(path)?;
    let meta = file.file.metadata()?;
    Ok((parse(&file.read(MOST)?).map_err(|what| wrong(path, what))?, meta))
}

/// A specification that cannot be used, and why.
pub fn wrong(path: &Path, what: String) -> Failure {
    Failure::new(format!("{}: {what}", path.display()))
}

fn parse(text: &[u8]) -> Result<Vec<SpecMapping>, String> {
    let Spec { schema, mappings } = serde_json::from_slice(text).map_err(|e| plain_json(&e, "value"))?;
    if schema != 1 {
        return Err(format!("schema: {schema}, but only 1 is known"));
    }
    Ok(mappings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_texts() {
        let text = br#"{"schema":1,"mappings":[
            {"va":4096,"pa":"0x8000","len":"8192","access":"rw"},
            {"va":"0xFFFFFFFFFFFFF000","pa":18446744073709547520,"len":4096,"access":"--x"}]}"#;
        let m = parse(text).unwrap();
        let [va, pa, len] = [4096, 0x8000, 8192].map(Number);
        assert_eq!(m[0], SpecMapping { va, pa, len, access: Access::RW });
        assert_eq!((m[1].va.0, m[1].pa.0, m[1].access), (u64::MAX - 4095, u64::MAX - 4095, Access::EXEC));
        assert_eq!(parse(br#"{"schema":1,"mappings":[]}"#), Ok(Vec::new()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let fields = |va, len, access| format!(r#"{{"va":{va},"pa":0,"len":{len},"access":{access}}}"#);
        for (mapping, says) in [
            ("3".to_owned(), "3 instead of an object, at column 25"),
            (r#"{"va":0}"#.to_owned(), "there is no field \"pa\""),
            (fields("-1", "1", "\"r\""), "-1 instead of a number from 0 to 2^64 - 1"),
            (fields("1.5", "1", "\"r\""), "1.5 instead of a number"),
            (fields("1e3", "1", "\"r\""), "1000.0 instead of a number"),
            (fields("\"0x\"", "1", "\"r\""), "0x instead of a number"),
            (fields("\"+1\"", "1", "\"r\""), "+1 instead of a number"),
            (fields("\"0x1ffffffffffffffff\"", "1", "\"r\""), "0x1ffffffffffffffff instead of a number"),
            (fields("null", "1", "\"r\""), "null instead of a number"),
            (fields("0", "1", "\"\""), "\"\": "),
            (fields("0", "1", "\"rr\""), "\"rr\": "),
            (fields("0", "1", "\"R\""), "\"R\": "),
            (fields("0", "1", "7"), "7 instead of "),
            (r#"{"va":0,"size":1}"#.to_owned(), "unknown field \"size\""),
            (r#"{"va":0,"pa":0,"len":4096,"va":4096}"#.to_owned(), "duplicate field \"va\""),
        ] {
            let refusal = parse(format!(r#"{{"schema":1,"mappings":[{mapping}]}}"#).as_bytes()).unwrap_err();
            assert!(refusal.contains(says), "{mapping}: {refusal}");
        }
        for (spec, says) in [
            ("", "it ends too early"),
            ("3", "3 instead of an object"),
            ("{\"schema\":1,\n\"schema\":1,\"mappings\":[]}", "duplicate field \"schema\", at line 2"),
            ("{}", "there is no field \"schema\""),
            (r#"{"schema":2,"mappings":[]}"#, "schema: 2, but"),
            (r#"{"schema":1}"#, "there is no field \"mappings\""),
            (r#"{"schema":1,"mappings":{}}"#, "an object instead of a list"),
        ] {
            let refusal = parse(spec.as_bytes()).unwrap_err();
            assert!(refusal.contains(says), "{spec}: {refusal}");
        }
    }
}
