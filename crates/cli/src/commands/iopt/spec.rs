//! The specification of an image: a list of mappings as JSON.

use std::fmt;
use std::fs::Metadata;
use std::path::Path;

use dmalane::addr::Access;
use dmalane::vm::trace::plain_json;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::source::SourceFile;

/// Bytes of a specification, at most.
const MOST: u64 = 256 << 20;

/// One mapping of a specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpecMapping {
    /// Input address.
    pub va: u64,
    /// Output address.
    pub pa: u64,
    /// Bytes; neither end wraps.
    pub len: u64,
    /// The access of the device.
    pub access: Access,
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

/// Reads a number that stands in a text: hexadecimal after `0x`, else decimal.
pub fn number(text: &str) -> Result<u64, String> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // from_str_radix would take a sign.
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err("not a number; write for example 0x80000000 or 4096".to_owned());
    }
    u64::from_str_radix(digits, radix).map_err(|_| "more than 64 bits".to_owned())
}

fn parse(text: &[u8]) -> Result<Vec<SpecMapping>, String> {
    let Unique(spec) = serde_json::from_slice(text).map_err(|e| match e.classify() {
        Category::Data => e.to_string(),
        _ => plain_json(&e, "value"),
    })?;
    let spec = object("the specification", &spec, &["schema", "mappings"])?;
    match spec.get("schema") {
        Some(schema) if *schema == 1 => {}
        Some(schema) => return Err(format!("schema: {schema}, but only 1 is known")),
        None => return Err("schema is missing; this is schema 1".to_owned()),
    }
    let mappings = spec.get("mappings").ok_or("mappings is missing")?;
    let mappings = mappings.as_array().ok_or("mappings: not a list")?;
    mappings.iter().enumerate().map(|(i, m)| mapping(&format!("mappings[{i}]"), m)).collect()
}

fn mapping(name: &str, value: &Value) -> Result<SpecMapping, String> {
    let fields = object(name, value, &["va", "pa", "len", "access"])?;
    let field = |key: &str| fields.get(key).ok_or_else(|| format!("{name}.{key} is missing"));
    let number = |key: &str| {
        let value = field(key)?;
        let number = match value {
            Value::String(text) => self::number(text),
            value => value.as_u64().ok_or_else(|| "not a whole number from 0 to 2^64 - 1".to_owned()),
        };
        number.map_err(|why| format!("{name}.{key}: {value}: {why}"))
    };
    let (va, pa, len) = (number("va")?, number("pa")?, number("len")?);
    if len == 0 {
        return Err(format!("{name}.len: 0: a mapping has at least a page"));
    }
    for (key, start) in [("va", va), ("pa", pa)] {
        if start.checked_add(len - 1).is_none() {
            return Err(format!("{name}.len: {len:#x} bytes from {key} {start:#x} on reach beyond 64 bits"));
        }
    }
    let text = field("access")?;
    let access = text.as_str().unwrap_or_default().parse().map_err(|why| format!("{name}.access: {text}: {why}"))?;
    Ok(SpecMapping { va, pa, len, access })
}

/// The fields of an object that has none but these: a field misspelt must not go unseen.
fn object<'a>(name: &str, value: &'a Value, known: &[&str]) -> Result<&'a Map<String, Value>, String> {
    let fields = value.as_object().ok_or_else(|| format!("{name}: not an object"))?;
    match fields.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(format!("{name}: there is no field {key:?}, only {}", known.join(", "))),
        None => Ok(fields),
    }
}

/// A JSON value whose objects name each field once. (`Value` alone keeps the last of several.)
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        value.deserialize_any(Values).map(Self)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unique(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = object.next_key::<String>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom(format!("duplicate field {key:?}")));
            }
            let Unique(value) = object.next_value()?;
            fields.insert(key, value);
        }
        Ok(fields.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(mapping: &str) -> String {
        parse(format!(r#"{{"schema":1,"mappings":[{mapping}]}}"#).as_bytes()).unwrap_err()
    }

    #[test]
    fn numbers_and_texts() {
        let text = br#"{"schema":1,"mappings":[
            {"va":4096,"pa":"0x8000","len":"8192","access":"rw"},
            {"va":"0xFFFFFFFFFFFFF000","pa":18446744073709547520,"len":4096,"access":"--x"}]}"#;
        let m = parse(text).unwrap();
        assert_eq!(m[0], SpecMapping { va: 4096, pa: 0x8000, len: 8192, access: Access::RW });
        assert_eq!((m[1].va, m[1].pa, m[1].access), (u64::MAX - 4095, u64::MAX - 4095, Access::EXEC));
        assert_eq!(parse(br#"{"schema":1,"mappings":[]}"#), Ok(Vec::new()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let fields = |va, len, access| format!(r#"{{"va":{va},"pa":0,"len":{len},"access":{access}}}"#);
        for (mapping, says) in [
            ("3".to_owned(), "mappings[0]: not an object"),
            (r#"{"va":0}"#.to_owned(), "mappings[0].pa is missing"),
            (fields("-1", "1", "\"r\""), "mappings[0].va: -1: not a whole number"),
            (fields("1.5", "1", "\"r\""), "mappings[0].va: 1.5: not a whole number"),
            (fields("1e3", "1", "\"r\""), "mappings[0].va: 1000.0: not a whole number"),
            (fields("\"0x\"", "1", "\"r\""), "mappings[0].va: \"0x\": not a number"),
            (fields("\"+1\"", "1", "\"r\""), "mappings[0].va: \"+1\": not a number"),
            (fields("\"0x1ffffffffffffffff\"", "1", "\"r\""), "more than 64 bits"),
            (fields("null", "1", "\"r\""), "mappings[0].va: null: "),
            (fields("0", "0", "\"r\""), "mappings[0].len: 0: "),
            (
                fields("4096", "18446744073709551615", "\"r\""),
                "mappings[0].len: 0xffffffffffffffff bytes from va 0x1000",
            ),
            (fields("0", "1", "\"\""), "mappings[0].access: \"\": "),
            (fields("0", "1", "\"rr\""), "mappings[0].access: \"rr\": "),
            (fields("0", "1", "\"R\""), "mappings[0].access: \"R\": "),
            (fields("0", "1", "7"), "mappings[0].access: 7: "),
            (r#"{"va":0,"size":1}"#.to_owned(), "no field \"size\", only va, pa, len, access"),
        ] {
            let refusal = refusal(&mapping);
            assert!(refusal.contains(says), "{mapping}: {refusal}");
        }
        for (spec, says) in [
            ("", "it ends too early"),
            ("[]", "the specification: not an object"),
            ("{\"schema\":1,\n\"schema\":1,\"mappings\":[]}", "duplicate field \"schema\" at line 2"),
            (r#"{"schema":1,"mappings":[{"va":0,"pa":0,"len":4096,"va":4096}]}"#, "duplicate field \"va\""),
            ("{}", "schema is missing"),
            (r#"{"schema":2,"mappings":[]}"#, "schema: 2, but"),
            (r#"{"schema":1}"#, "mappings is missing"),
            (r#"{"schema":1,"mappings":{}}"#, "mappings: not a list"),
        ] {
            let refusal = parse(spec.as_bytes()).unwrap_err();
            assert!(refusal.contains(says), "{spec}: {refusal}");
        }
    }
}
