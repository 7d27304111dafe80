//! Checks the structure of the workspace: which crate may use which, which files may say `unsafe`, that modules read
//! one way, how every file opens.
//!
//! All checks read the manifests and sources on disk. A broken rule is reported with every place that breaks it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use dmalane::load::CONTAINERS;
use toml::{Table, Value};

#[path = "architecture/circles.rs"]
mod circles;

/// One crate of the workspace.
struct Crate {
    /// The directory under `crates/`. The package is `dmalane-DIR`, or `dmalane` itself.
    dir: &'static str,
    /// The directories of the crates that it may depend on.
    uses: &'static [&'static str],
    /// Those that only its tests may depend on.
    tests_use: &'static [&'static str],
    /// True for the crates that need no operating system.
    no_std: bool,
}

impl Crate {
    const fn std(dir: &'static str, uses: &'static [&'static str]) -> Self {
        Self { dir, uses, tests_use: &[], no_std: false }
    }

    const fn no_std(dir: &'static str, uses: &'static [&'static str]) -> Self {
        Self { no_std: true, ..Self::std(dir, uses) }
    }

    const fn tests_use(self, tests_use: &'static [&'static str]) -> Self {
        Self { tests_use, ..self }
    }

    fn package(&self) -> String {
        if self.dir == "dmalane" { "dmalane".to_owned() } else { format!("dmalane-{}", self.dir) }
    }
}

/// The allowed dependencies. Each crate depends only on crates listed above it, and adapters (`file`, `card`, `vfio`,
/// `vfio-user`, `vulkan`, `cuda`, `slash`) do not depend on each other.
const CRATES: &[Crate] = &[
    Crate::no_std("addr", &[]),
    Crate::no_std("iopt", &["addr"]),
    Crate::no_std("vm", &["addr", "iopt"]),
    Crate::std("dma", &["addr"]),
    Crate::std("queue", &["addr", "dma"]),
    Crate::std("device", &["addr", "iopt", "vm", "dma", "queue"]),
    Crate::std("file", &["addr", "dma", "queue", "device"]),
    Crate::std("card", &["addr", "iopt", "vm", "dma", "queue", "device"]),
    Crate::std("sim", &["addr", "iopt", "dma", "queue", "card"]).tests_use(&["device"]),
    Crate::std("vfio", &["addr", "dma"]).tests_use(&["iopt", "queue", "device"]),
    Crate::std("vfio-user", &["addr", "dma"]),
    Crate::std("daemon", &["addr", "iopt", "dma", "queue", "card", "sim"]),
    Crate::std("vulkan", &["addr", "vm", "dma", "queue", "device"]),
    Crate::std("fake-cuda", &[]),
    Crate::std("cuda", &["addr", "vm", "dma", "queue", "device"]).tests_use(&["fake-cuda"]),
    Crate::std("slash", &["addr", "dma", "queue", "device"]),
    Crate::std("load", &["addr", "vm", "dma", "queue", "device", "file"]).tests_use(&["card", "sim"]),
    Crate::std("keep", &["dma", "daemon", "load"]),
    Crate::std("validate", &["addr", "dma", "queue", "device"]).tests_use(&["file", "card", "sim"]),
    Crate::std(
        "dmalane",
        &[
            "addr",
            "iopt",
            "vm",
            "dma",
            "queue",
            "device",
            "file",
            "card",
            "sim",
            "vfio",
            "vfio-user",
            "daemon",
            "vulkan",
            "cuda",
            "slash",
            "load",
            "keep",
            "validate",
        ],
    )
    .tests_use(&["fake-cuda"]),
    Crate::std("capi", &["addr", "iopt", "vm", "dmalane"]).tests_use(&["fake-cuda", "slash"]),
    Crate::std("cli", &["dmalane"]).tests_use(&["fake-cuda", "slash"]),
    Crate::std("python", &["dmalane"]),
];

/// The crates that others may depend on: part "package" of `scripts/check` compiles them from their packages.
const PUBLISHED: &[&str] = &["addr", "iopt", "vm", "dma", "queue", "device", "vfio", "vfio-user"];

/// The files that may use `unsafe`. A new one needs a reason in its first lines and a full review.
const UNSAFE_FILES: &[&str] = &[
    "bench/src/peers.rs",
    "bench/tests/vfio_user.rs",
    "crates/capi/src/abi.rs",
    "crates/cli/tests/it/supervisor.rs",
    "crates/cuda/src/sys.rs",
    "crates/cuda/src/sys/context.rs",
    "crates/cuda/src/sys/host.rs",
    "crates/daemon/src/fork.rs",
    "crates/daemon/src/guard.rs",
    "crates/daemon/src/table.rs",
    "crates/dma/src/processor.rs",
    "crates/dma/src/slice.rs",
    "crates/dma/src/sys.rs",
    "crates/dma/src/volatile.rs",
    "crates/fake-cuda/src/abi.rs",
    "crates/file/src/ring.rs",
    "crates/keep/src/store.rs",
    "crates/python/src/memory.rs",
    "crates/sim/src/host/directory.rs",
    "crates/slash/src/sys.rs",
    "crates/vfio/src/container.rs",
    "crates/vfio/src/iommufd.rs",
    "crates/vfio/src/peer.rs",
    "crates/vfio/src/sys.rs",
    "crates/vm/tests/allocations.rs",
    "crates/vulkan/src/by_hand.rs",
    "crates/vulkan/src/channel.rs",
    "crates/vulkan/src/gpu.rs",
    "crates/vulkan/src/library.rs",
    "crates/vulkan/src/sparse.rs",
    "crates/vulkan/src/tests/layers.rs",
    "fuzz/src/targets/c_interface.rs",
];

/// The public types of these crates that others build, or match whole: a new field or variant breaks their users. All
/// others are `non_exhaustive`, or have fields that are not public.
const EXHAUSTIVE: &str = "
    Area ArrayOperation BackingFiles CacheHint Cancelled Completion Counters DeviceAddr DeviceInfo Direction
    DlpackDevice DmaFault DriverCopy Entry Forked GatherList HeapStats HostSlice IommuCounters Limits MappableFile
    Needs Operation OperationModel Picked Piece PlanError Random Refused Region RegionSpec Register Route RunError
    Segment Shape SharedOptions Work
";

/// The columns of a line at most; tables and addresses of pages may be longer.
const COLUMNS: usize = 120;

/// Names that say nothing about the contents.
const EMPTY_NAMES: &[&str] = &["common", "util", "utils", "helpers", "misc", "shared"];

#[test]
fn every_crate_is_listed() {
    let mut wrong = Vec::new();
    let found: BTreeSet<String> = directories(&root().join("crates")).into_iter().collect();
    let listed: BTreeSet<String> = CRATES.iter().map(|c| c.dir.to_owned()).collect();
    for dir in found.difference(&listed) {
        wrong.push(format!("crates/{dir} is not in CRATES: add the crates that it may use"));
    }
    for dir in listed.difference(&found) {
        wrong.push(format!("crates/{dir} is in CRATES but not on disk"));
    }
    for dir in &found {
        if EMPTY_NAMES.contains(&dir.as_str()) {
            wrong.push(format!("crates/{dir}: a crate is named after what it holds"));
        }
    }
    for c in CRATES.iter().filter(|c| found.contains(c.dir)) {
        let manifest = manifest(c);
        let name = manifest.get("package").and_then(|p| p.get("name")).and_then(Value::as_str).unwrap_or_default();
        if name != c.package() {
            wrong.push(format!("crates/{} is the package {name:?}, not {:?}", c.dir, c.package()));
        }
        if manifest.get("lints").and_then(|l| l.get("workspace")).and_then(Value::as_bool) != Some(true) {
            wrong.push(format!("crates/{}/Cargo.toml does not inherit the lints of the workspace", c.dir));
        }
    }
    report(&wrong);
}

#[test]
fn every_crate_can_be_packaged() {
    let mut wrong = Vec::new();
    let top: Table = read(&root().join("Cargo.toml")).parse().expect("Cargo.toml");
    let oldest = top["workspace"]["package"]["rust-version"].as_str().map(|version| format!("Rust {version}"));
    let oldest = oldest.expect("a version of Rust");
    for c in CRATES {
        let directory = root().join("crates").join(c.dir);
        let manifest = manifest(c);
        let package = &manifest["package"];
        let own: &[&str] = if PUBLISHED.contains(&c.dir) { &[] } else { &["readme", "publish"] };
        for key in ["version", "edition", "rust-version", "license"].iter().chain(own) {
            if package.get(*key).and_then(|v| v.get("workspace")).and_then(Value::as_bool) != Some(true) {
                wrong.push(format!("crates/{}/Cargo.toml: no {key}.workspace = true", c.dir));
            }
        }
        if PUBLISHED.contains(&c.dir) {
            wrong.extend(["keywords", "categories"].into_iter().filter_map(|key| {
                let count = package.get(key).and_then(Value::as_array).map_or(0, Vec::len);
                (!(1..=5).contains(&count)).then(|| format!("crates/{}/Cargo.toml: {count} {key}, not 1 to 5", c.dir))
            }));
            let readme = fs::read_to_string(directory.join("README.md")).unwrap_or_default();
            let parts = [oldest.as_str(), "## Limits", "## Requirements", "```rust", "unsafe"];
            let missing = parts.iter().filter(|part| !readme.contains(**part));
            wrong.extend(missing.map(|part| format!("crates/{}/README.md says nothing of {part:?}", c.dir)));
            // The example is a program of its own: a reader adds what it uses.
            let used = readme.lines().filter_map(|line| line.strip_prefix("use dmalane_")?.split("::").next());
            let added =
                |name: &str| readme.lines().any(|l| l.contains("cargo add") && words(l).any(|word| word == name));
            let not_added = used.filter(|name| **name != *c.dir.replace('-', "_") && !added(name));
            wrong.extend(not_added.map(|name| format!("crates/{}/README.md: no cargo add of {name}", c.dir)));
            // Those that only our tests and fuzz targets enable are nobody else's.
            let features = manifest.get("features").and_then(Value::as_table).into_iter().flat_map(|all| all.keys());
            let features: BTreeSet<_> =
                features.map(String::as_str).filter(|f| !["default", "fuzzing"].contains(f)).collect();
            let named: BTreeSet<_> =
                readme.split("eature `").skip(1).filter_map(|rest| rest.split('`').next()).collect();
            wrong.extend(features.symmetric_difference(&named).map(|feature| {
                format!("crates/{}: the feature `{feature}` is not in both, Cargo.toml and README.md", c.dir)
            }));
            let library = read(&directory.join("src/lib.rs"));
            if !library.contains("#![doc = include_str!(\"../README.md\")]") {
                wrong.push(format!("crates/{}/src/lib.rs does not begin with the README", c.dir));
            }
            let unpublished = c.uses.iter().filter(|used| !PUBLISHED.contains(used));
            wrong.extend(unpublished.map(|used| format!("crates/{} is published, and uses {used}", c.dir)));
        }
        let description = package.get("description").and_then(Value::as_str).unwrap_or_default();
        if description.is_empty() || words(description).any(|word| word == "and") {
            wrong.push(format!("crates/{}: a description says one thing, without \"and\": {description:?}", c.dir));
        }
        // Links to those of the root, which a package has as files.
        for license in ["LICENSE-MIT", "LICENSE-APACHE"] {
            if fs::read(directory.join(license)).ok() != fs::read(root().join(license)).ok() {
                wrong.push(format!("crates/{0}: no {license} (ln -s ../../{license} crates/{0}/)", c.dir));
            }
        }
    }
    report(&wrong);
}

#[test]
fn edges_point_down() {
    let mut wrong = Vec::new();
    for c in CRATES {
        for edge in edges(&manifest(c)) {
            let Some(target) = CRATES.iter().find(|t| t.package() == edge.package) else {
                if edge.package.starts_with("dmalane") {
                    wrong.push(format!("crates/{}: [{}] names the unknown {}", c.dir, edge.section, edge.package));
                }
                continue; // not ours
            };
            // A crate may be its own dev-dependency, to test with a feature that is off by default.
            let is_test = edge.section.ends_with("dev-dependencies");
            let allowed =
                c.uses.contains(&target.dir) || is_test && (target.dir == c.dir || c.tests_use.contains(&target.dir));
            if !allowed {
                wrong.push(format!("crates/{}: [{}] may not use {}", c.dir, edge.section, edge.package));
            }
        }
    }
    report(&wrong);
}

#[test]
fn the_listed_graph_has_no_cycle() {
    // The list goes from the bottom up: every crate uses only crates above it in the list.
    for (i, c) in CRATES.iter().enumerate() {
        for used in c.uses.iter().chain(c.tests_use) {
            assert!(CRATES[..i].iter().any(|below| below.dir == *used), "{} -> {used} does not point down", c.dir);
        }
    }
}

#[test]
fn product_crates_do_not_depend_on_benches() {
    // bench/ is a separate workspace, so that the projects it compares with stay out of the product.
    let top: Table = read(&root().join("Cargo.toml")).parse().expect("Cargo.toml");
    let list = |key: &str| -> Vec<String> {
        let array = top["workspace"].get(key).and_then(Value::as_array);
        array.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    assert_eq!(list("members"), ["crates/*", "fuzz"]);
    assert_eq!(list("exclude"), ["bench"]);
    let manifest: Table = read(&root().join("bench/Cargo.toml")).parse().expect("bench");
    assert!(manifest.contains_key("workspace"), "bench is not a separate workspace");
}

#[test]
fn unsafe_is_only_in_listed_files() {
    let mut wrong = Vec::new();
    for path in sources() {
        let name = relative(&path);
        let text = read(&path);
        let code = code_only(&text);
        if !UNSAFE_FILES.contains(&name.as_str()) {
            for (i, line) in code.lines().enumerate() {
                if words(line).any(|w| w == "unsafe") {
                    wrong.push(format!("{name}:{}: uses unsafe but is not in UNSAFE_FILES", i + 1));
                }
            }
        } else {
            wrong.extend(undocumented(&name, &text, &code));
            // What stands in for a C library has its callers' contract from that.
            if name != "crates/fake-cuda/src/abi.rs" {
                wrong.extend(duties(&name, &text, &code));
            }
        }
        wrong.extend(permissions(&name, &code));
    }
    report(&wrong);
}

/// The checks of `cargo deny`, which runs at night, as far as lock files and manifests tell: where dependencies come
/// from, that there is one version of each, and their licences.
#[test]
fn dependencies_are_allowed() {
    let deny: Table = read(&root().join("deny.toml")).parse().expect("deny.toml");
    let list = |section: &str, key: &str| deny[section][key].as_array().expect(key).clone();
    let skipped: Vec<_> =
        list("bans", "skip").iter().filter_map(|s| Some(s.get("crate")?.as_str()?.to_owned())).collect();
    let allowed: Vec<_> = list("licenses", "allow").iter().filter_map(|l| Some(l.as_str()?.to_owned())).collect();
    let excepted = list("licenses", "exceptions");
    let mut wrong = Vec::new();
    for workspace in ["", "bench/"] {
        let lock: Table = read(&root().join(format!("{workspace}Cargo.lock"))).parse().expect("a lock file");
        let mut seen = BTreeSet::new();
        for package in lock["package"].as_array().expect("packages") {
            let field = |key: &str| package.get(key).and_then(Value::as_str).unwrap_or_default();
            let (name, version, source) = (field("name"), field("version"), field("source"));
            let known = source.starts_with("registry+") && source.ends_with("-index");
            let ours = source.is_empty() && name.starts_with("dmalane");
            if !(known || ours) {
                wrong.push(format!("{workspace}Cargo.lock: {name} comes from {source:?}"));
            }
            let skip = |rule: &String| {
                let rule = rule.split_once('@');
                rule.is_some_and(|(of, v)| of == name && version.strip_prefix(v).is_some_and(|v| v.starts_with('.')))
            };
            if !skipped.iter().any(skip) && !seen.insert(name.to_owned()) {
                wrong.push(format!("{workspace}Cargo.lock: another version of {name}, {version}"));
            }
        }
        let manifest = root().join(format!("{workspace}Cargo.toml"));
        // Of this platform, so that nothing has to be fetched for others.
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "tree",
            "--locked",
            "--offline",
            "--all-features",
            "--workspace",
            "--prefix=none",
            "--format={p}|{l}",
        ]);
        let tree = cargo.arg("--manifest-path").arg(manifest).output().expect("cargo");
        if !tree.status.success() {
            println!("SKIPPED: licences in {workspace}Cargo.toml: {}", String::from_utf8_lossy(&tree.stderr).trim());
            continue;
        }
        for line in String::from_utf8_lossy(&tree.stdout).lines().filter(|line| !line.is_empty()) {
            let (package, licence) = line.split_once('|').expect("the format above");
            // Of other projects' tests alone, so not in the workspace of the product.
            let name = package.split(' ').next();
            let excepted = excepted.iter().find(|e| e["crate"].as_str() == name && workspace == "bench/");
            let more = excepted.and_then(|e| e["allow"].as_array()).into_iter().flatten().filter_map(Value::as_str);
            let allowed: Vec<&str> = allowed.iter().map(String::as_str).chain(more).collect();
            // Every term of an AND needs one of its alternatives.
            let one = |term: &str| term.split(" OR ").any(|id| allowed.contains(&id.trim_matches(['(', ')', ' '])));
            if !licence.trim_end_matches(" (*)").replace('/', " OR ").split(" AND ").all(one) {
                wrong.push(format!("{package}: licence {licence:?} is not one of {allowed:?}"));
            }
        }
    }
    report(&wrong);
}

/// The crates that cargo compiles for a package, itself included, by these kinds of dependencies.
fn compiled(package: &str, edges: &str) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--locked", "--offline", "--prefix=none", "--format={p}", "-p", package, "--edges", edges]);
    let tree = cargo.current_dir(root()).output().expect("cargo");
    let why = String::from_utf8_lossy(&tree.stderr);
    assert!(tree.status.success(), "{why}: `cargo fetch --locked` brings what was not downloaded yet");
    String::from_utf8_lossy(&tree.stdout).into_owned()
}

/// Kernels and VMMs build the first three alone. What is compiled, themselves included, is worth a decision.
#[test]
fn crates_compile_few_others() {
    let all = [("dmalane-addr", 2), ("dmalane-iopt", 3), ("dmalane-vfio", 25), ("dmalane-cli", 110)];
    for (package, most) in all {
        let tree = compiled(package, "normal,build");
        let compiled: BTreeSet<_> = tree.lines().map(|line| line.trim_end_matches(" (*)")).collect();
        assert!((1..=most).contains(&compiled.len()), "{package}, more than {most}: {compiled:?}");
    }
}

/// Built alone, the Python package has no features but those that it asks for.
#[test]
fn the_python_package_has_every_device() {
    let tree = compiled("dmalane-python", "normal");
    let missing = ["cuda", "vulkan", "slash", "daemon", "vfio-user"].map(|device| format!("dmalane-{device} v"));
    let missing: Vec<_> = missing.into_iter().filter(|device| !tree.contains(device)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// A newcomer reads the same sentence wherever he begins.
#[test]
fn the_first_sentence_is_the_same_everywhere() {
    let sentence = "oads model files onto devices from user space, and shows where the time goes";
    let places = ["README.md", "docs/introduction.md", "book.toml", "pyproject.toml", "crates/cli/src/entry.rs"];
    let without = |place: &&str| !read(&root().join(place)).contains(sentence);
    assert_eq!(places.into_iter().filter(without).collect::<Vec<_>>(), [""; 0]);
}

/// Memory that devices or other processes share is accessed by `processor.rs` of crate `dma` alone: safe code could
/// otherwise make atomics of different sizes at one place, which Rust leaves undefined.
#[test]
fn no_atomic_is_made_of_shared_memory() {
    let mut made = Vec::new();
    for path in sources() {
        let (name, code) = (relative(&path), code_only(&read(&path)));
        made.extend(atomics_from_pointers(&code).map(|line| format!("{name}: {}", line.trim())));
    }
    // Of 32 bits only, for processors without assembly of ours.
    let allowed = |line: &String| line.starts_with("crates/dma/src/processor.rs: ") && line.contains("AtomicU32::");
    made.retain(|line| !allowed(line));
    report(&made);
}

/// Lines that make an atomic of a pointer: by its function, or by a cast.
fn atomics_from_pointers(code: &str) -> impl Iterator<Item = &str> {
    let made = |line: &&str| {
        let of = |before: &str| {
            line.match_indices("Atomic").any(|(at, _)| {
                // Without the path of the type.
                let path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
                line[..at].trim_end_matches(path).ends_with(before)
            })
        };
        (line.contains("Atomic") && line.contains("::from_ptr("))
            || ["*const ", "*mut ", "NonNull<"].into_iter().any(of)
            || (line.contains("cast") && of("<"))
            || (line.contains("transmute") && line.contains("Atomic"))
    };
    code.lines().filter(made)
}

#[test]
fn casts_to_atomics_are_seen() {
    let seen = [
        "let a = AtomicU32::from_ptr(p);",
        "let a = &*(p as *const AtomicU8);",
        "let a = p as *mut std::sync::atomic::AtomicU64;",
        "let a = p.cast::<AtomicU32>();",
        "let a: NonNull<core::sync::atomic::AtomicU16> = p.cast();",
        "let a: &AtomicU32 = transmute(p);",
    ];
    let fine = ["static A: AtomicU32 = AtomicU32::new(0);", "let a: Box<AtomicU32> = b;", "p.cast::<u32>()"];
    let code = [&seen[..], &fine[..]].concat().join("\n");
    assert_eq!(atomics_from_pointers(&code).collect::<Vec<_>>(), seen);
}

#[test]
fn unsafe_is_denied_everywhere_else() {
    for file in ["Cargo.toml", "bench/Cargo.toml"] {
        let manifest: Table = read(&root().join(file)).parse().expect(file);
        let lints = manifest.get("workspace").and_then(|w| w.get("lints")).or(manifest.get("lints"));
        let level = lints.and_then(|l| l.get("rust")).and_then(|r| r.get("unsafe_code")).and_then(Value::as_str);
        assert_eq!(level, Some("deny"), "{file}");
    }
}

#[test]
fn crates_without_an_operating_system_say_so() {
    for c in CRATES.iter().filter(|c| c.no_std) {
        let text = read(&root().join("crates").join(c.dir).join("src/lib.rs"));
        assert!(code_only(&text).contains("#![no_std]"), "crates/{}: no #![no_std]", c.dir);
    }
}

#[test]
fn the_text_of_an_error_does_not_contain_its_source() {
    let mut wrong = Vec::new();
    for (place, said, variant) in errors() {
        let field = repeated(&said, &variant);
        wrong.extend(field.map(|field| format!("{place}: the text has {{{field}}}, its source")));
    }
    report(&wrong);
}

/// Users of the command line, of C and of Python read it too.
#[test]
fn the_text_of_an_error_has_no_path_of_rust() {
    let mut wrong = Vec::new();
    for (place, said, _) in errors() {
        let said = said.replace("\\\"", "'");
        let texts = said.split('"').skip(1).step_by(2);
        wrong.extend(texts.filter(|text| text.contains("::")).map(|text| format!("{place}: {text}")));
    }
    report(&wrong);
}

/// The attribute of each error of `thiserror`: its place, its text, and what follows up to the next one.
fn errors() -> Vec<(String, String, String)> {
    let mut found = Vec::new();
    for path in sources().into_iter().filter(|path| relative(path).contains("/src/")) {
        let text = read(&path);
        for (at, _) in text.match_indices("#[error(") {
            let rest = &text[at + "#[error(".len()..];
            let (said, variant) = rest.split_once(")]\n").expect("an attribute ends");
            let place = format!("{}:{}", relative(&path), text[..at].matches('\n').count() + 1);
            let variant = variant.split("#[error(").next().unwrap_or_default();
            found.push((place, said.to_owned(), variant.to_owned()));
        }
    }
    found
}

/// The source in the text of an error of `thiserror`: its attribute, and what follows up to the next one.
fn repeated<'a>(said: &str, variant: &'a str) -> Option<&'a str> {
    let body = variant.trim_start().trim_start_matches("pub ").trim_start_matches(['_', '#']);
    let end = body.find(['(', '{', ','])?;
    let (source, rest) = match body[end..].starts_with('(') {
        true => ("0", body[end..].lines().next()?),
        false => ("source", body[end..].split("\n    },").next()?),
    };
    let marked = rest.split_once("#[source]").or(rest.split_once("#[from]")).map(|(_, field)| field.trim_start());
    let name = marked.and_then(|field| field.split_once(':')).map(|(name, _)| name.trim_start_matches("pub "));
    let source =
        if source == "0" { marked.map(|_| "0") } else { name.or(rest.contains(" source: ").then_some(source)) };
    source.filter(|field| said.contains(&format!("{{{field}}}")) || said.contains(&format!("{{{field}:")))
}

#[test]
fn a_source_in_the_text_of_an_error_is_seen() {
    for (said, variant) in [
        ("\"cannot open: {source}\"", "    Open {\n        /// Why.\n        source: io::Error,\n    },\n"),
        ("\"cannot open: {0}\"", "    Open(#[from] io::Error),\n"),
        ("\"{error}\"", "pub struct Failed {\n    /// Why.\n    #[source]\n    pub error: OpError,\n}\n"),
    ] {
        assert!(repeated(said, variant).is_some(), "{variant}");
        assert_eq!(repeated("\"cannot open {path}\"", variant), None);
    }
    assert_eq!(repeated("\"{0}\"", "    Bad(String),\n"), None);
}

#[test]
fn every_file_opens_with_a_doc_sentence() {
    let mut wrong = Vec::new();
    for path in sources() {
        let text = read(&path);
        let first = text.lines().next().unwrap_or_default();
        if !first.starts_with("//! ") {
            wrong.push(format!("{}:1: opens with {first:?}, not with a `//!` sentence", relative(&path)));
        }
    }
    report(&wrong);
}

#[test]
fn lines_end_at_column_120() {
    let mut wrong = Vec::new();
    for path in texts() {
        // rustfmt holds code to this as well, but neither comments nor strings. scripts/docs does it for pages.
        for (i, line) in read(&path).lines().enumerate().filter(|(_, line)| line.chars().count() > COLUMNS) {
            let comment = line.trim_start().trim_start_matches(['/', '!', '#', '*']).trim_start();
            if !comment.starts_with('|') && !line.contains("https://") {
                wrong.push(format!("{}:{}: {} columns", relative(&path), i + 1, line.chars().count()));
            }
        }
    }
    report(&wrong);
}

/// Errors are all called `Error`, as in `std`: one in each crate, which its users qualify or rename.
#[test]
fn a_public_name_is_one_type() {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in sources() {
        let name = relative(&path);
        if !name.starts_with("crates/") || !name.contains("/src/") {
            continue;
        }
        // A macro's `$name` is none.
        for line in code_only(&read(&path)).lines().filter(|line| !line.contains('$')) {
            let mut words = line.trim_start().strip_prefix("pub ").into_iter().flat_map(words);
            let kind = words.find(|word| *word != "unsafe");
            if let (Some("struct" | "enum" | "trait" | "type" | "union"), Some(ty)) = (kind, words.next())
                && ty != "Error"
            {
                found.entry(ty.to_owned()).or_default().push(name.clone());
            }
        }
    }
    let twice = found.into_iter().filter(|(_, at)| at.len() > 1);
    report(&twice.map(|(ty, at)| format!("{ty}: {}", at.join(", "))).collect::<Vec<_>>());
}

/// No compiler checks these.
#[test]
fn every_container_is_fuzzed() {
    // The last kind, raw files, has nothing to parse.
    let (raw, kinds) = CONTAINERS.split_last().unwrap();
    assert!(raw.parse_header.is_none());
    let seeds = std::fs::read_dir(root().join("fuzz/seeds/header_cost")).unwrap();
    let seeds: Vec<Vec<u8>> = seeds.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
    let mut wrong = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        let (parse, has) = (kind.parse_header.unwrap(), "no file in fuzz/seeds/header_cost has");
        // A whole file, or one with eight bytes before its header, as the target takes it.
        let parses = |file: &[u8]| [0, 8].iter().any(|more| parse(file, file.len() as u64 + more, "array").is_ok());
        if !seeds.iter().any(|seed| usize::from(seed[0]) == number && parses(&seed[1..])) {
            wrong.push(format!("{}: {has} the byte {number} and then a file that is parsed", kind.name));
        }
    }
    report(&wrong);
}

/// `scripts/check fuzz` runs the folders of seeds: a target without one would never run.
#[test]
fn every_fuzz_target_has_a_file_and_seeds() {
    let list = read(&root().join("fuzz/src/lib.rs"));
    let list = list.split("\ntargets! {").nth(1).and_then(|rest| rest.split('}').next()).unwrap();
    let listed: BTreeSet<_> = list.split_whitespace().map(str::to_owned).collect();
    for folder in ["fuzz/src/targets", "fuzz/seeds"] {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let names = entries.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned());
        assert_eq!(names.collect::<BTreeSet<_>>(), listed, "{folder}, and `targets!` of fuzz/src/lib.rs");
    }
}

#[test]
fn exhaustive_types_are_meant() {
    let sources = PUBLISHED.iter().flat_map(|dir| files(&[&format!("crates/{dir}/src")]));
    let found: BTreeSet<String> = sources.flat_map(|path| exhaustive(&read(&path))).collect();
    let listed: BTreeSet<String> = EXHAUSTIVE.split_whitespace().map(str::to_owned).collect();
    let wrong = found.symmetric_difference(&listed);
    report(&wrong.map(|name| format!("{name}: either non_exhaustive or in EXHAUSTIVE")).collect::<Vec<_>>());
}

/// The public enums, and structs with fields that are all public, that are not `non_exhaustive`.
fn exhaustive(text: &str) -> Vec<String> {
    let code = code_only(text);
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let name = |i: usize| {
        let is_enum = lines[i].starts_with("pub enum ");
        let line = lines[i].strip_prefix("pub struct ").or(lines[i].strip_prefix("pub enum "))?;
        let body = lines[i + 1..].iter().take_while(|line| **line != "}").copied();
        let fields: Vec<&str> = match line.split_once('(') {
            Some((_, fields)) => fields.split(", ").collect(),
            None => body.filter(|line| line.ends_with(',') && !is_enum && lines[i].ends_with('{')).collect(),
        };
        let is_open = is_enum || !fields.is_empty() && fields.iter().all(|field| field.starts_with("pub "));
        let mut above = lines[..i].iter().rev().take_while(|line| !line.ends_with([';', '{', '}']));
        (is_open && !above.any(|line| line.contains("non_exhaustive")))
            .then(|| words(line).next().unwrap_or_default().to_owned())
    };
    (0..lines.len()).filter_map(name).collect()
}

#[test]
fn exhaustive_types_are_seen() {
    let text = "/// A.\npub struct A<T> {\n    /// B.\n    pub b: T,\n}\n\
                pub struct C {\n    pub d: u8,\n    e: u8,\n}\n\
                #[non_exhaustive]\npub struct F;\npub struct G;\npub struct H(u8);\npub struct I(pub u8);\n\
                #[error(\"x\")]\n#[non_exhaustive]\npub enum J {}\npub enum K {\n    L(u8),\n}\n";
    assert_eq!(exhaustive(text), ["A", "I", "K"]);
}

#[test]
fn the_ten_longest_files() {
    let mut lengths: Vec<(usize, String)> =
        sources().iter().map(|path| (read(path).lines().count(), relative(path))).collect();
    lengths.sort_by(|a, b| b.cmp(a));
    // This never fails on a long file; scripts/check prints these lines for reviewers.
    println!("LONGEST {} files, {} lines", lengths.len(), lengths.iter().map(|(n, _)| n).sum::<usize>());
    for (lines, name) in lengths.iter().take(10) {
        println!("LONGEST {lines:5} {name}");
    }
    assert!(lengths.len() > CRATES.len(), "the sources were not found below {}", root().display());
}

/// A dependency in a manifest.
struct Edge {
    /// `dependencies`, `dev-dependencies` or `build-dependencies`, with the target as a prefix if there is one.
    section: String,
    package: String,
}

/// Every dependency of a manifest, including those in `[target]` tables.
fn edges(manifest: &Table) -> Vec<Edge> {
    let mut tables: Vec<(String, &Table)> = vec![(String::new(), manifest)];
    for (target, table) in manifest.get("target").and_then(Value::as_table).into_iter().flatten() {
        tables.extend(table.as_table().map(|t| (format!("target.{target}."), t)));
    }
    let mut edges = Vec::new();
    for (prefix, table) in tables {
        for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (key, value) in table.get(kind).and_then(Value::as_table).into_iter().flatten() {
                // A rename keeps the real name under `package`.
                let package = value.get("package").and_then(Value::as_str).unwrap_or(key);
                edges.push(Edge { section: format!("{prefix}{kind}"), package: package.to_owned() });
            }
        }
    }
    edges
}

/// The uses of `unsafe` in a listed file without a safety comment. Clippy checks blocks and impls too; this also
/// requires a `# Safety` section on every unsafe function, private ones included.
fn undocumented(name: &str, text: &str, code: &str) -> Vec<String> {
    let text: Vec<&str> = text.lines().collect();
    let code: Vec<&str> = code.lines().collect();
    let mut wrong = Vec::new();
    for (i, line) in code.iter().enumerate() {
        if !words(line).any(|w| w == "unsafe") {
            continue;
        }
        let is_fn = line.contains("unsafe fn ") || line.contains("unsafe extern");
        let wanted: &[&str] = if is_fn { &["# Safety", "SAFETY:"] } else { &["SAFETY:"] };
        // Up through the comments, attributes and earlier lines of the same statement.
        let above = (0..i).rev().take_while(|&j| {
            let (code, text) = (code[j].trim(), text[j].trim());
            !text.is_empty() && !code.ends_with([';', '{', '}'])
        });
        if !std::iter::once(i).chain(above).any(|j| wanted.iter().any(|w| text[j].contains(w))) {
            wrong.push(format!("{name}:{}: unsafe without {}", i + 1, wanted.join(" or ")));
        }
    }
    wrong
}

/// The safety comments in safe functions that lean on the caller, who has no duty there.
fn duties(name: &str, text: &str, code: &str) -> Vec<String> {
    let text: Vec<&str> = text.lines().collect();
    let code: Vec<&str> = code.lines().collect();
    let mut wrong = Vec::new();
    for (i, line) in text.iter().enumerate().filter(|(_, line)| line.trim_start().starts_with("// SAFETY:")) {
        let more = text[i + 1..].iter().take_while(|line| line.trim_start().starts_with("//"));
        let leans = std::iter::once(line).chain(more).any(|line| words(line).any(|w| w == "caller" || w == "callers"));
        let function = code[..i].iter().rev().find(|line| words(line).any(|w| w == "fn") && !line.contains("fn("));
        if leans && function.is_some_and(|line| !line.contains("unsafe ")) {
            wrong.push(format!("{name}:{}: a duty of the caller of a function that is not unsafe", i + 1));
        }
    }
    wrong
}

/// The lines that allow `unsafe_code`, other than the inner attribute of a listed file.
fn permissions(name: &str, code: &str) -> Vec<String> {
    let listed = UNSAFE_FILES.contains(&name);
    let allows = |line: &str| {
        (line.contains("allow(") || line.contains("expect(")) && words(line).any(|word| word == "unsafe_code")
    };
    let lines = code.lines().enumerate().filter(|(_, line)| allows(line) && !(listed && line.starts_with("#![")));
    lines.map(|(i, line)| format!("{name}:{}: {} outside of UNSAFE_FILES", i + 1, line.trim())).collect()
}

/// The text with comments, strings and character literals blanked out; line numbers stay the same.
fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let mut out = String::with_capacity(text.len());
    let mut i = 0;
    while i < chars.len() {
        let end = if at(i) == '/' && at(i + 1) == '/' {
            (i..chars.len()).find(|&j| at(j) == '\n').unwrap_or(chars.len())
        } else if at(i) == '/' && at(i + 1) == '*' {
            end_of_comment(&chars, i)
        } else if at(i) == '"' {
            end_of_quoted(&chars, i, '"')
        } else if at(i) == 'r' && !after_word(&chars, i) && raw_hashes(&chars, i + 1).is_some() {
            end_of_raw(&chars, i)
        } else if at(i) == '\'' && (at(i + 1) == '\\' || at(i + 2) == '\'') {
            end_of_quoted(&chars, i, '\'') // and not a lifetime, which has no closing quote
        } else {
            out.push(at(i));
            i += 1;
            continue;
        };
        out.extend(chars[i..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
        i = end;
    }
    out
}

/// Block comments nest.
fn end_of_comment(chars: &[char], start: usize) -> usize {
    let (mut i, mut depth) = (start, 0);
    while i < chars.len() {
        match (chars[i], chars.get(i + 1)) {
            ('/', Some('*')) => (depth, i) = (depth + 1, i + 2),
            ('*', Some('/')) => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    chars.len()
}

fn end_of_quoted(chars: &[char], start: usize, quote: char) -> usize {
    let mut i = start + 1;
    while i < chars.len() && chars[i] != quote {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

/// The number of hashes of the raw string whose `r` is just before `i`, if there is one.
fn raw_hashes(chars: &[char], i: usize) -> Option<usize> {
    let hashes = chars[i.min(chars.len())..].iter().take_while(|&&c| c == '#').count();
    (chars.get(i + hashes) == Some(&'"')).then_some(hashes)
}

fn end_of_raw(chars: &[char], start: usize) -> usize {
    let hashes = raw_hashes(chars, start + 1).unwrap_or(0);
    let closes =
        |j: &usize| chars[*j] == '"' && chars[*j + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes;
    (start + hashes + 2..chars.len()).find(closes).map_or(chars.len(), |j| j + 1 + hashes)
}

/// True when the character belongs to a word that began before it (`br"..."` and `cr"..."` excepted).
fn after_word(chars: &[char], i: usize) -> bool {
    let word = |j: usize| chars[j].is_alphanumeric() || chars[j] == '_';
    match i {
        0 => false,
        1 => word(0) && !matches!(chars[0], 'b' | 'c'),
        _ => word(i - 1) && (word(i - 2) || !matches!(chars[i - 1], 'b' | 'c')),
    }
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("two levels up").to_owned()
}

fn manifest(c: &Crate) -> Table {
    let path = root().join("crates").join(c.dir).join("Cargo.toml");
    read(&path).parse().unwrap_or_else(|e| panic!("{}: {e}", relative(&path)))
}

fn directories(of: &Path) -> Vec<String> {
    let entries = fs::read_dir(of).unwrap_or_else(|e| panic!("{}: {e}", of.display()));
    let directories = entries.filter_map(Result::ok).filter(|e| e.path().is_dir());
    directories.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// Every Rust file of the repository: crates with their tests and examples, benches, fuzz targets, bindings.
fn sources() -> Vec<PathBuf> {
    let mut found = files(&["crates", "bench", "fuzz", "tests", "bindings", "docs", "scripts"]);
    found.retain(|path| path.extension().is_some_and(|e| e == "rs"));
    found
}

/// The files that people write: sources, manifests, scripts; no pages, seeds or lists.
fn texts() -> Vec<PathBuf> {
    let mut found = files(&["crates", "bench", "fuzz", "tests", "bindings", "scripts", "packaging", "python"]);
    found.retain(|path| {
        let written = ["rs", "py", "pyi", "c", "h", "toml", "config"];
        path.extension().map_or(path.starts_with(root().join("scripts")), |e| written.iter().any(|w| e == *w))
    });
    found.extend(["Cargo.toml", "pyproject.toml", "tests/vm/init"].map(|name| root().join(name)));
    found
}

/// Every file below these directories, without what is built or hidden.
fn files(directories: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending: Vec<PathBuf> = directories.iter().map(|d| root().join(d)).collect();
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok) {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if name == "target" || name.starts_with('.') {
                continue;
            }
            if path.is_dir() {
                pending.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).to_string_lossy().into_owned()
}

fn report(wrong: &[String]) {
    assert!(wrong.is_empty(), "{} places break this rule:\n  {}", wrong.len(), wrong.join("\n  "));
}

#[test]
fn the_reader_of_sources_sees_code_only() {
    let text = r####"
// unsafe 1
/* unsafe /* unsafe */ unsafe */ let a = "unsafe \" unsafe"; let b = r#"unsafe " unsafe"#; let c = br"unsafe";
let d = '"'; let e: &'static str = "unsafe"; let f = '\''; fn g<'a>(r: &'a u8) {}
unsafe { h() } // unsafe_code
"####;
    let code = code_only(text);
    assert_eq!(code.lines().count(), text.lines().count());
    let said: Vec<usize> =
        code.lines().enumerate().filter(|(_, l)| words(l).any(|w| w == "unsafe")).map(|(i, _)| i).collect();
    assert_eq!(said, [4], "{code}");
    assert!(code.contains("fn g<'a>(r: &'a u8) {}"), "{code}");
}

#[test]
fn the_rules_for_unsafe_see_what_is_missing() {
    let text = "// SAFETY: because\nunsafe { a() };\nunsafe { b() };\n/// # Safety\n/// x\nunsafe fn c() {}\n";
    assert_eq!(undocumented("x.rs", text, &code_only(text)), ["x.rs:3: unsafe without SAFETY:"]);
    let text = "fn a() {\n// SAFETY: the\n// caller\nb();\n}\nunsafe fn c() {\n// SAFETY: the caller\nb();}\n";
    let wrong = ["x.rs:2: a duty of the caller of a function that is not unsafe"];
    assert_eq!(duties("x.rs", text, &code_only(text)), wrong);
    let text = "#![allow(unsafe_code)]\n#[allow(unsafe_code)]\nfn f() {}\n#![expect(dead_code)]\n";
    assert_eq!(permissions("crates/dma/src/lib.rs", text).len(), 2);
    assert_eq!(
        permissions("crates/dma/src/sys.rs", text),
        ["crates/dma/src/sys.rs:2: #[allow(unsafe_code)] outside of UNSAFE_FILES"]
    );
    let manifest: Table = "[target.'cfg(unix)'.dev-dependencies]\nx = { package = \"dmalane-card\" }".parse().unwrap();
    assert_eq!(edges(&manifest)[0].package, "dmalane-card");
    assert!(edges(&manifest)[0].section.ends_with(".dev-dependencies"));
}
