//! Loads a file (a sample when none is named) onto the software card and prints where each tensor went.

use std::error::Error;

use dmalane::{HostModel, LoadOptions, ModelOptions, Placement};

fn run() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = match std::env::args_os().nth(1) {
        Some(path) => path.into(),
        None => {
            let path = folder.path().join("sample.safetensors");
            dmalane::load::write_sample(&mut std::fs::File::create(&path)?, 8 << 20, 1)?;
            path
        }
    };
    let mut device = dmalane::open("soft")?;
    let options = LoadOptions { placement: Placement::HBM, verify: true };
    let loaded = HostModel::open([path], ModelOptions::default())?.load_onto(&mut device, &options, |_| {})?;
    for t in loaded.files.iter().flat_map(|f| f.tensors()) {
        match t.va {
            Some(va) => {
                println!("{:<28} {:>5} {:?} at {:#x}", t.tensor.name, t.tensor.dtype, t.tensor.shape, va.first())
            }
            None => println!("{:<28} has no bytes", t.tensor.name),
        }
    }
    let report = &loaded.report;
    println!("{} bytes in {:.1} ms, verified", report.bytes, report.wall.as_secs_f64() * 1e3);
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", dmalane::error_chain(&*error));
        std::process::exit(1);
    }
}
