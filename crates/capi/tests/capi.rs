//! A program in C against the header and both libraries.

// A V80 for a program that knows nothing of it; that module has the reasons for its unsafe code.
#[path = "../../cli/tests/it/layers.rs"]
mod layers;
#[path = "../../cli/tests/it/supervisor.rs"]
mod supervisor;

use std::path::{Path, PathBuf};
use std::process::Command;

use dmalane_slash::model::{DriverModel, Version, Vrtd};
use layers::{Layers, is_skip};

/// Where cargo has put the libraries: beside this test.
fn libraries() -> PathBuf {
    // By the name that it was started with: `scripts/mesa` starts it through another loader of libraries.
    let test = std::path::absolute(std::env::args_os().next().unwrap()).unwrap();
    test.parent().unwrap().to_owned()
}

/// The newest file whose name begins and ends so.
fn newest(folder: &Path, begins: &str, ends: &str) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().filter_map(Result::ok);
    let fits = files.filter(|f| {
        let name = f.file_name();
        let name = name.to_string_lossy();
        name.starts_with(begins) && name.ends_with(ends)
    });
    fits.max_by_key(|f| f.metadata().and_then(|m| m.modified()).unwrap()).map(|f| f.path())
}

/// Compiles a program, with what `CFLAGS` says too: a sanitizer that the libraries have is one that it needs.
fn compile(compiler: &str, source: &str, name: &str, arguments: &[&str], library: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiled = Command::new(compiler)
        .args(arguments)
        .args(std::env::var("CFLAGS").unwrap_or_default().split_whitespace())
        .args(["-Wall", "-Wextra", "-Werror", "-g", "-I"])
        .arg(here.join("include"))
        .arg(here.join(source))
        .arg("-o")
        .arg(&program)
        .arg(library)
        .args(["-lpthread", "-ldl", "-lm"])
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}

#[test]
fn a_program_in_c() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let folder = libraries();
    for (kind, ends) in [("shared", ".so"), ("static", ".a")] {
        let Some(library) = newest(&folder, "libdmalane_capi", ends) else {
            panic!("no {kind} library in {}", folder.display())
        };
        let program = compile("cc", "tests/capi.c", &format!("capi-{kind}"), &["-std=c11"], &library);
        let ran = Command::new(&program).output().unwrap();
        let (said, status) = (String::from_utf8_lossy(&ran.stdout), ran.status);
        print!("{}", String::from_utf8_lossy(&ran.stderr)); // what was skipped
        assert!(
            status.success() && said.is_empty(),
            "{kind}: {status}\n{said}{}",
            String::from_utf8_lossy(&ran.stderr)
        );
    }
}

/// The example, on a device.
fn example(device: &str) {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let name = format!("device-{}", device.replace(':', "-"));
    let program = compile("cc", "examples/device.c", &name, &["-std=c11"], &library);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, vec![7; 1_000_000]).unwrap();
    let layers = Layers::new();
    let ran = layers.command(&program).arg(device).arg(&file).output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    if ran.status.code() == Some(2) && is_skip(&errors) {
        return;
    }
    assert!(ran.status.success() && said.contains("went there and back"), "{}: {said}{errors}", ran.status);
    assert!(said.contains("1000000 bytes at "), "{said}");
    if device != "soft" {
        layers.check(&ran);
    }
}

#[test]
fn the_example_runs_on_the_software_card() {
    example("soft");
}

#[test]
fn the_example_runs_on_a_gpu() {
    example("vulkan:0");
}

#[test]
fn a_program_in_c_on_a_v80() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/capi.c", "capi-v80", &["-std=c11"], &library);
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let vrtd = Vrtd::new(&model).unwrap();
    let socket = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("vrtd-{}.sock", std::process::id()));
    vrtd.listen(&socket).unwrap();
    for device in ["slash:0", &format!("vrtd:{}#0", socket.display())] {
        let before = model.counts().channels;
        let Some(ran) = supervisor::run(&model, Command::new(&program).arg(device), None) else { return };
        let (said, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success() && said.is_empty(), "{device}: {}\n{said}{errors}", ran.status);
        let moved = model.counts().channels;
        assert!(moved.iter().all(|(channel, bytes)| before.get(channel) < Some(bytes)), "{device}: {moved:?}");
        assert_eq!((model.violations(), model.pairs(), vrtd.lent()), (Vec::new(), 0, Vec::new()), "{device}");
    }
    std::fs::remove_file(socket).unwrap();
}

#[test]
fn the_header_is_right_for_cpp_too() {
    if Command::new("c++").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C++ compiler c++");
        return;
    }
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/dmalane.h");
    let out = Command::new("c++")
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"])
        .arg(header)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
