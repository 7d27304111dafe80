//! Timelines and reports that `load` writes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn dmalane(folder: &Path, args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_dmalane")).args(args).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// A file with `n` tensors of one byte.
fn tensors(path: &Path, n: usize) {
    let entry = |i| format!(r#""t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1);
    let header = format!("{{{}}}", (0..n).map(entry).collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..n).map(|i| i as u8));
    fs::write(path, bytes).unwrap();
}

/// Name, begin and end in microseconds, bytes.
type Span = (String, f64, f64, u64);

/// The spans of a trace, by row.
fn spans(trace: &Value) -> BTreeMap<(u64, String), Vec<Span>> {
    let events = trace["traceEvents"].as_array().unwrap();
    let names: BTreeMap<u64, String> = events
        .iter()
        .filter(|e| e["name"] == "thread_name")
        .map(|e| (e["tid"].as_u64().unwrap(), e["args"]["name"].as_str().unwrap().to_owned()))
        .collect();
    let mut rows: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for e in events.iter().filter(|e| e["ph"] == "X") {
        let tid = e["tid"].as_u64().unwrap();
        let (start, took) = (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
        let span = (e["name"].as_str().unwrap().to_owned(), start, start + took, e["args"]["bytes"].as_u64().unwrap());
        rows.entry((tid, names[&tid].clone())).or_default().push(span);
    }
    rows
}

#[test]
fn a_trace_has_every_read_copy_and_bind() {
    let folder = folder("trace");
    for options in [&["--buffered"][..], &["--no-checksum", "--chunk", "1MiB"]] {
        let args = ["load", "--sample", "24MiB", "--json", "--trace", "trace.json", "--force"];
        let report: Value = serde_json::from_slice(&dmalane(&folder, &[&args, options].concat()).stdout).unwrap();
        let trace: Value = serde_json::from_slice(&fs::read(folder.join("trace.json")).unwrap()).unwrap();
        assert!(trace["otherData"]["command"].as_str().unwrap().contains("load --sample 24MiB"));
        let rows = spans(&trace);
        let wall = report["wall_s"].as_f64().unwrap() * 1e6;
        let mut bytes: BTreeMap<(&str, bool), u64> = BTreeMap::new();
        for ((_, track), row) in &rows {
            assert!(row.windows(2).all(|pair| pair[0].2 <= pair[1].1 + 1e-3), "{track}: spans of a row overlap");
            for (stage, start, end, moved) in row {
                assert!(0.0 <= *start && start <= end && *end <= wall + 1.0, "{stage} at {start} of {wall}");
                *bytes.entry((stage, track.contains("in flight"))).or_default() += moved;
            }
        }
        let total = report["bytes"].as_u64().unwrap();
        assert_eq!(bytes[&("read", true)], total, "{options:?}");
        // Not the header, which stays on the host.
        assert!((total - (1 << 20)..total).contains(&bytes[&("transfer", true)]), "{options:?}: {bytes:?}");
        let has = |name: &str| rows.iter().any(|((_, track), row)| track == "binds" && row.iter().any(|s| s.0 == name));
        assert!(has("bind") && bytes.contains_key(&("parse", false)), "{options:?}: {bytes:?}");
        assert_eq!(bytes.contains_key(&("checksum", false)), !options.contains(&"--no-checksum"));
        assert_eq!(channels(&rows), ["channel 0", "channel 1"], "DDR is reached by both");
    }
}

/// The channels that copied anything.
fn channels(rows: &BTreeMap<(u64, String), Vec<Span>>) -> Vec<&str> {
    let tracks = rows.keys().filter_map(|(_, track)| track.strip_suffix(", in flight"));
    tracks.filter(|track| track.starts_with("channel ")).collect()
}

#[test]
fn a_copy_is_on_the_row_of_the_channel_that_made_it() {
    let folder = folder("trace-channels");
    for (channel, placement) in [("1", "ddr"), ("0", "ddr"), ("auto", "hbm1")] {
        let options = ["--mm-channel", channel, "--placement", placement, "--trace", "trace.json", "--force"];
        dmalane(&folder, &[&["load", "--sample", "8MiB"], &options[..]].concat());
        let trace: Value = serde_json::from_slice(&fs::read(folder.join("trace.json")).unwrap()).unwrap();
        let rows = spans(&trace);
        let (expected, bytes) = (if channel == "0" { "channel 0" } else { "channel 1" }, 7 << 20);
        assert_eq!(channels(&rows), [expected], "{placement}");
        let copies = rows.iter().filter(|((_, track), _)| track.starts_with("channel ")).flat_map(|(_, row)| row);
        assert!(copies.map(|span| span.3).sum::<u64>() > bytes, "{placement}");
    }
}

#[test]
fn reading_has_a_timeline_too() {
    let folder = folder("trace-read");
    crate::sample(folder.join("a.safetensors"), 24 << 20, 1);
    let args = ["read", "a.safetensors", "--json", "--trace", "t.json", "--report", "r.html", "--force"];
    let report: Value = serde_json::from_slice(&dmalane(&folder, &args).stdout).unwrap();
    let trace: Value = serde_json::from_slice(&fs::read(folder.join("t.json")).unwrap()).unwrap();
    assert_eq!(trace["traceEvents"][0]["args"]["name"], "dmalane read");
    let rows = spans(&trace);
    let in_flight = rows.iter().filter(|((_, track), _)| track.contains("in flight"));
    let read: u64 = in_flight.flat_map(|(_, row)| row).filter(|span| span.0 == "read").map(|span| span.3).sum();
    assert!(rows.values().flatten().any(|span| span.0 == "allocate") && read <= report["bytes"].as_u64().unwrap());
    let page = fs::read_to_string(folder.join("r.html")).unwrap();
    assert_eq!(unbalanced(&page), [""; 0]);
    assert!(page.contains("<title>dmalane read") && page.contains("a.safetensors"));
    // Standard input is copied to a file first: its timeline is that of reading the file.
    let input = fs::File::open(folder.join("a.safetensors")).unwrap();
    let program = env!("CARGO_BIN_EXE_dmalane");
    let mut cat = Command::new("cat").stdin(input).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let read = Command::new(program)
        .args(["read", "-", "--trace", "pipe.json"])
        .current_dir(&folder)
        .stdin(cat.stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(read.status.success() && cat.wait().unwrap().success(), "{}", String::from_utf8_lossy(&read.stderr));
    let trace: Value = serde_json::from_slice(&fs::read(folder.join("pipe.json")).unwrap()).unwrap();
    assert!(!spans(&trace).is_empty());
    // Never over what is read.
    let before = fs::read(folder.join("a.safetensors")).unwrap();
    let args = ["read", "a.safetensors", "--trace", "a.safetensors", "--force"];
    let output = Command::new(program).args(args).current_dir(&folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("a.safetensors"), "{text}");
    assert!(fs::read(folder.join("a.safetensors")).unwrap() == before);
}

#[test]
fn the_timeline_of_many_tensors_is_bounded() {
    let folder = folder("trace-many");
    tensors(&folder.join("many.safetensors"), 40_000);
    let each = ["--align", "4KiB", "--trace", "trace.json", "--report", "report.html"];
    dmalane(&folder, &[&["load", "many.safetensors"][..], &each].concat());
    let trace: Value = serde_json::from_slice(&fs::read(folder.join("trace.json")).unwrap()).unwrap();
    let rows = spans(&trace);
    assert!(rows.values().all(|row| row.len() <= 1 << 14));
    let binds = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["name"] == "bind");
    assert_eq!(binds.map(|e| e["args"]["count"].as_u64().unwrap()).sum::<u64>(), 40_000);
    let page = fs::metadata(folder.join("report.html")).unwrap().len();
    assert!(page < 8 << 20, "{page} bytes");
}

/// Tags that are open at the end, or closed out of order.
pub fn unbalanced(page: &str) -> Vec<String> {
    let (mut open, mut wrong) = (Vec::new(), Vec::new());
    for tag in page.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').unwrap();
        let name: String = tag.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '/').collect();
        match name.strip_prefix('/') {
            Some(name) if open.pop().as_deref() != Some(name) => wrong.push(name.to_owned()),
            Some(_) => {}
            None if tag.starts_with('!') || tag.ends_with('/') || name == "meta" => {}
            None => open.push(name),
        }
    }
    wrong.extend(open);
    wrong
}

#[test]
fn a_report_is_one_page_in_which_names_are_text() {
    let folder = folder("report");
    let name = "<script>alert(1)<!-- & \"'.safetensors";
    crate::sample(folder.join(name), 16 << 20, 1);
    let report = ["load", name, "--no-checksum", "--report", "report.html", "--repeat", "2", "--json"];
    let json: Value = serde_json::from_slice(&dmalane(&folder, &report).stdout).unwrap();
    assert!(json["references"]["read_bytes_per_s"].as_f64().unwrap() > 0.0, "measured without -v");
    let page = fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(page.contains("&lt;script&gt;alert(1)&lt;!-- &amp; &quot;&#39;.safetensors"));
    for never in ["<script", "<!--", "http:", "https:", "src=", "url("] {
        assert!(!page.contains(never), "{never}");
    }
    assert_eq!(unbalanced(&page), [""; 0]);
    for there in ["<svg ", "Bottleneck: ", "<th>command</th>", "worker 0", "transfer", "<th>kernel</th>", "default-src"]
    {
        assert!(page.contains(there), "{there}");
    }
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "headless_shell"];
    let given = std::env::var("DMALANE_CHROMIUM").ok();
    let mut found = given.iter().map(String::as_str).chain(names);
    let works = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    let Some(chromium) = found.find(works) else { return println!("SKIPPED: no chromium") };
    // Kept, so that somebody can look at it.
    let check = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("check");
    fs::create_dir_all(&check).unwrap();
    let picture = check.join("report.png");
    let _ = fs::remove_file(&picture);
    let output = Command::new(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1600"])
        .args(["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"])
        .args(["--disable-sync", &format!("--user-data-dir={}", folder.join("chromium").display())])
        .arg(format!("--screenshot={}", picture.display()))
        .arg(format!("file://{}/report.html", folder.display()))
        .output()
        .unwrap();
    let size = fs::metadata(&picture).map_or(0, |meta| meta.len());
    assert!(output.status.success() && size > 10_000, "{size}: {}", String::from_utf8_lossy(&output.stderr));
}
