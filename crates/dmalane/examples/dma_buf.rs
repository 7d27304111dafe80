//! Reads a file into a dma-buf, which drivers of GPUs, NICs and cameras import: `dma_buf [FILE]`.

use std::error::Error;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use dmalane::dma::{DmaHeap, Heap, MemfdHeap, error_chain, export_dma_buf};
use dmalane::load::{ReadOptions, alloc_and_read};

fn run() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "/proc/self/exe".to_owned());
    let file = File::open(&path)?;

    // The kernel's heap, whose memory is a dma-buf from the start; else a memfd, whose pages /dev/udmabuf wraps.
    let heap: Arc<dyn Heap> = match DmaHeap::open("system") {
        Ok(heap) => Arc::new(heap),
        Err(why) => {
            println!("a memfd, since {}", error_chain(&why));
            Arc::new(MemfdHeap::importable(None))
        }
    };
    // A udmabuf has 64 MiB at most, unless its module is told otherwise.
    let wanted = file.metadata()?.len().min(64 << 20);
    let filled = alloc_and_read(&heap, &file, ..wanted, &ReadOptions::default())?;
    println!("{wanted} bytes of {path}: {}", filled.method);

    // While a device may write, volatile reads; between its transfers, told to the kernel with `cpu_access`.
    let buffer = filled.buffer.shared();
    let mut first = [0; 4];
    buffer.as_volatile_slice().sub(0, 4).ok_or("a file of 4 bytes or more")?.read(&mut first);
    let mut expected = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut expected, 0)?;
    assert_eq!(first, expected);

    match export_dma_buf(&buffer.reference()) {
        Ok(dma_buf) => println!("descriptor {} is a dma-buf of it", dma_buf.as_raw_fd()),
        Err(why) => println!("SKIPPED: no dma-buf of the memfd: {why}"),
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", error_chain(&*error));
        std::process::exit(1);
    }
}
