//! `dmalane vm bench` as its users meet it.

use std::process::Command;

fn run(line: &str) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_dmalane")).args(line.split_whitespace()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked"), "{stderr}");
    (output.status.code().unwrap(), stdout, stderr)
}

#[test]
fn a_bench_prints_the_lines_of_the_original_program() {
    for (args, name) in [
        ("256MiB 1000", "agx-uat page tables"),
        ("268435456 1000 --format x86-64-4level", "x86-64-4level page tables"),
        ("256MiB 1000 -d soft", "software card"),
    ] {
        let (status, text, stderr) = run(&format!("vm bench {args}"));
        assert_eq!((status, &*stderr), (0, ""));
        let [head, first, others, unbinds] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert!(head.starts_with(&format!("Testing on {name}")), "{head}");
        assert!(head.ends_with(" with BO size 268435456 (16384 pages) with 1000 binds"), "{head}");
        assert!(first.starts_with(" first bind: ") && first.ends_with("ns"), "{first}");
        assert!(others.starts_with(" other binds: ") && others.contains("ns per bind: "), "{others}");
        assert!(unbinds.starts_with(" unbinds: ") && unbinds.ends_with("Mop/s"), "{unbinds}");
    }
    for (args, status, why) in [
        ("256MiB 1000 -d ram:1GiB", 1, "ram:1GiB has no address space to bind in"),
        ("1GiB 1000 -d soft,ddr=2MiB,hbm=4MiB", 1, "no memory for the buffer"),
        ("4KiB", 2, "BO_SIZE is not 1 to 2^24 whole pages of 16KiB"),
        ("20KiB", 2, "BO_SIZE is not 1 to 2^24 whole pages of 16KiB"),
        ("1TiB", 2, "BO_SIZE is not 1 to 2^24 whole pages of 16KiB"),
        ("4GiB 1", 2, "1 is not in 2..="),
        ("4GiB 1000 -d soft -f agx-uat", 2, "cannot be used with"),
    ] {
        let (got, stdout, stderr) = run(&format!("vm bench {args}"));
        assert_eq!((got, &*stdout), (status, ""), "{args}: {stderr}");
        assert!(stderr.contains(why), "{args}: {stderr}");
    }
}
