//! The cost of headers, hostile ones too: at most four times their size in memory, and time in proportion to it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_load::Model;
use dmalane_load::container::MAX_PAIRS;
use dmalane_load::container::gguf;
use dmalane_load::container::safetensors::{MAX_DIMS, parse_header};
use peak_alloc::PeakAlloc;
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Tests take turns: the allocator counts for all threads.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that every header may take, however short it is.
const SOME: usize = 64 << 10;
/// Bytes of a header.
const LEN: usize = 1 << 20;

/// Time of this thread for each byte: 20 times what a debug build takes at most, and less than a step that is quadratic
/// in tensors of 30 bytes takes.
const PER_BYTE: Duration = Duration::from_micros(4);

/// Parses a header of `len` bytes, and checks what it takes. Gives whether it succeeded.
fn parses(what: &str, len: usize, parse: impl FnOnce() -> Option<Model>) -> bool {
    let time = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let (before, start) = (MEMORY.current_usage(), time());
    MEMORY.reset_peak_usage();
    let model = parse();
    let (took, bytes) = (time() - start, MEMORY.peak_usage() - before);
    println!(
        "{what}: {:.2} of {len} bytes, {:.0} ns a byte",
        bytes as f64 / len as f64,
        took.as_nanos() as f64 / len as f64
    );
    assert!(bytes <= 4 * len + SOME, "{what}: {bytes} bytes for {len}");
    assert!(took <= PER_BYTE * len as u32, "{what}: {took:?} for {len} bytes");
    model.is_some()
}

/// A JSON object of entries, until it is long enough.
fn object(entry: impl Fn(usize) -> String) -> String {
    let mut text = String::from("{");
    for i in 0.. {
        text += &entry(i);
        if text.len() >= LEN {
            break;
        }
        text.push(',');
    }
    text.push('}');
    text
}

/// A name of at most four characters.
fn name(mut i: usize) -> String {
    let mut name = String::new();
    loop {
        name.push(char::from(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"[i % 64]));
        i /= 64;
        if i == 0 {
            return name;
        }
    }
}

#[test]
fn a_header_takes_at_most_four_times_its_size() {
    let _turn = turn();
    let zeros = |n: usize| vec!["0"; n].join(",");
    let long = "x".repeat(LEN);
    let one =
        |name: &str, more: &str| format!(r#"{{"{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]{more}}}}}"#);
    let described =
        |i: usize, shape: &str| format!(r#""{}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#, name(i));
    let dims = zeros(MAX_DIMS);
    let headers = [
        ("empty tensors", object(|i| described(i, "0")), true),
        ("tensors of many dimensions", object(|i| described(i, &dims)), true),
        ("one name", object(|_| described(0, "0")), true),
        ("a shape", format!(r#"{{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[0,0]}}}}"#, zeros(LEN / 2)), false),
        ("a name", one(&long, ""), true),
        ("a name with escapes", one(&"\\n".repeat(LEN / 2), ""), true),
        ("another field", one("a", &format!(r#","x":[{}]"#, zeros(LEN / 2))), true),
        ("another field's name", one("a", &format!(r#","{long}":0"#)), true),
        ("a type", format!(r#"{{"a":{{"dtype":"{long}","shape":[0],"data_offsets":[0,0]}}}}"#), false),
        ("depth", "[".repeat(LEN), false),
        ("depth of a field", one("a", &format!(r#","x":{}"#, "[".repeat(LEN))), false),
        ("pairs", format!(r#"{{"__metadata__":{}}}"#, object(|i| format!(r#""{}":"""#, name(i)))), false),
        ("a pair", format!(r#"{{"__metadata__":{{"{long}":"{long}"}}}}"#), true),
        ("bad tensors", object(|i| format!(r#""{}":0"#, name(i))), false),
        ("a bad end", object(|i| described(i, "0")) + "]", false),
        ("overlaps", object(|i| described(i, "1").replace("[0,0]}", &format!("[{i},{}]}}", i + 1 + i % 2))), false),
    ];
    for (what, header, good) in headers {
        let len = header.len();
        let parsed = parses(what, len, || parse_header(header.as_bytes(), 8 + len as u64).ok());
        assert_eq!(parsed, good, "{what}");
    }
}

#[test]
fn limits_are_named() {
    let _turn = turn();
    let with =
        |n: usize| format!(r#"{{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[0,0]}}}}"#, vec!["0"; n].join(","));
    let parse = |header: String| parse_header(header.as_bytes(), 8 + header.len() as u64);
    assert_eq!(parse(with(MAX_DIMS)).unwrap().tensors[0].shape[..], [0; MAX_DIMS]);
    assert!(parse(with(MAX_DIMS + 1)).unwrap_err().to_string().contains("more than 64 dimensions"));
    let pairs = |n: usize| {
        let pairs: Vec<_> = (0..n).map(|i| format!(r#""k{i}":"v""#)).collect();
        format!(r#"{{"__metadata__":{{{}}}}}"#, pairs.join(","))
    };
    assert_eq!(parse(pairs(MAX_PAIRS)).unwrap().metadata.unwrap().len(), MAX_PAIRS);
    assert!(parse(pairs(MAX_PAIRS + 1)).unwrap_err().to_string().contains("more than 10000 pairs"));
    // As the format's own library: the last of one name counts, and descriptions may be lists.
    let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":["U8",[0],[0,0]]}"#;
    assert_eq!(parse(twice.to_owned()).unwrap().tensors[0].len, 0);
}

#[test]
fn a_gguf_header_takes_at_most_four_times_its_size() {
    let _turn = turn();
    let header = |tensors: u64, pairs: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(pairs.to_le_bytes());
        bytes
    };
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.bytes());
    };
    let check = |what: &str, file: &[u8], good: bool| {
        let parsed = parses(what, file.len(), || gguf::parse_header(file, file.len() as u64).ok());
        assert_eq!(parsed, good, "{what}");
    };
    // An array of empty texts, and one of arrays.
    for kind in [8u32, 9] {
        let mut file = header(0, 1);
        text(&mut file, "a");
        file.extend([9u32.to_le_bytes(), kind.to_le_bytes()].concat());
        let n = if kind == 8 { LEN / 8 } else { LEN / 12 };
        file.extend((n as u64).to_le_bytes());
        let element = if kind == 8 { vec![0; 8] } else { [0; 12].to_vec() };
        file.extend(element.repeat(n));
        check("GGUF array", &file, true);
    }
    // As many pairs as there may be, of bytes and of the numbers that are longest as text.
    for (kind, value) in
        [(0u32, &[255][..]), (1, &[128]), (7, &[0]), (11, &i64::MIN.to_le_bytes()), (12, &[1, 0, 0, 0, 0, 0, 0, 0])]
    {
        let mut file = header(0, MAX_PAIRS as u64);
        for i in 0..MAX_PAIRS {
            text(&mut file, &name(i));
            file.extend([&kind.to_le_bytes(), value].concat());
        }
        file.resize(file.len().next_multiple_of(32), 0);
        check(&format!("GGUF pairs of type {kind}"), &file, true);
    }
    // Tensors of the shortest names, of no dimension and of eight; names of which two are the same; of a type that
    // nobody knows, so that scalars may be of no bytes, and of a type for each.
    for (dims, same, types, good) in
        [(0u32, 1, 1, true), (1, 1, 1, true), (8, 1, 1, true), (1, 2, 1, false), (0, 1, usize::MAX, false)]
    {
        let n = LEN / (28 + 8 * dims as usize);
        let mut file = header(n as u64, 0);
        for i in 0..n {
            text(&mut file, &name(i / same));
            let kind = (2313 + (i % types) as u32).to_le_bytes();
            file.extend([&dims.to_le_bytes()[..], &vec![0; 8 * dims as usize], &kind, &[0; 8]].concat());
        }
        file.resize(file.len().next_multiple_of(32), 0);
        check(&format!("GGUF tensors of {dims} dimensions"), &file, good);
    }
}
