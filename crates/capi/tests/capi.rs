//! A program in C against the header and both libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo has put the libraries: beside this test.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
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

/// Compiles and runs `capi.c`; `Ok` when it found everything right.
fn run(compiler: &str, name: &str, arguments: &[&str], library: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiled = Command::new(compiler)
        .args(arguments)
        .args(["-Wall", "-Wextra", "-Werror", "-g", "-I"])
        .arg(here.join("include"))
        .arg(here.join("tests/capi.c"))
        .arg("-o")
        .arg(&program)
        .arg(library)
        .args(["-lpthread", "-ldl", "-lm"])
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().unwrap();
    let (said, status) = (String::from_utf8_lossy(&ran.stdout), ran.status);
    assert!(status.success() && said.is_empty(), "{name}: {status}\n{said}{}", String::from_utf8_lossy(&ran.stderr));
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
        run("cc", &format!("capi-{kind}"), &["-std=c11"], &library);
    }
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
