//! Reads a file into four recycled buffers and says how fast.
//!
//! ```text
//! cargo run --release -p dmalane-file --example read -- FILE [auto|direct|buffered] [auto|uring|pread] [ROUNDS]
//! ```

use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{AnonHeap, BufferSlice, Heap};
use dmalane_file::{FileOptions, FileQueue, Io, Mode};
use dmalane_queue::{Completion, Operation, Queue};

const GATHER: usize = 16 << 20;

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let path = arg(0).ok_or("usage: read FILE [auto|direct|buffered] [auto|uring|pread] [ROUNDS]")?;
    let mode = match arg(1) {
        Some("direct") => Mode::Direct,
        Some("buffered") => Mode::Buffered,
        _ => Mode::Auto,
    };
    let io = match arg(2) {
        Some("uring") => Io::Uring,
        Some("pread") => Io::Pread,
        _ => Io::Auto,
    };
    let heap = AnonHeap::new();
    for _ in 0..arg(3).map_or(Ok(5), str::parse)? {
        let mut buffers = Vec::new();
        for _ in 0..4 {
            buffers.push(heap.allocate(GATHER)?.share().into_slice());
        }
        let begin = Instant::now();
        let mut channel = FileQueue::open(path, FileOptions { mode, io, ..FileOptions::default() })?;
        let len = channel.handle().metadata()?.len();
        read(&mut channel, len, buffers)?;
        let seconds = begin.elapsed().as_secs_f64();
        println!("{:.0} MB/s, {}, {:?}", len as f64 / 1e6 / seconds, channel.how(), channel.moved());
    }
    Ok(())
}

fn read(channel: &mut FileQueue, len: u64, mut buffers: Vec<BufferSlice>) -> Result<(), Box<dyn std::error::Error>> {
    let (mut at, mut done) = (0, Vec::new());
    while at < len || channel.in_flight() > 0 {
        while let Some(buffer) = buffers.pop_if(|_| at < len) {
            let n = (buffer.len() as u64).min(len - at);
            let (part, _) = buffer.split_at(n as usize).expect("n <= len");
            let _ticket = channel.submit(Operation::read(part, FileOffset::new(at)))?;
            at += n;
        }
        channel.wait(&mut done, Duration::from_secs(60));
        for Completion { operation, result, .. } in done.drain(..) {
            result?;
            buffers.extend(operation.into_slice());
        }
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", dmalane_dma::error_chain(&*error));
        std::process::exit(1);
    }
}
