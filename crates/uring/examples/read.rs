//! Reads a file into four recycled buffers and says how fast.
//!
//! ```text
//! cargo run --release -p dmalane-uring --example read -- FILE [auto|direct|buffered] [auto|uring|pread] [ROUNDS]
//! ```

use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_engine::{Channel, Completion, Direction, Transfer};
use dmalane_mem::{AnonHeap, Heap, Part};
use dmalane_uring::{FileChannel, Io, Mode, Options};

const GATHER: usize = 16 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
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
    let mut buffers = Vec::new();
    for _ in 0..4 {
        buffers.push(heap.allocate(GATHER)?.share().into_part());
    }
    for _ in 0..arg(3).map_or(Ok(5), str::parse)? {
        let mut channel = FileChannel::open(path, Options { mode, io, ..Options::default() })?;
        let len = channel.file().metadata()?.len();
        let begin = Instant::now();
        read(&mut channel, len, &mut buffers)?;
        let seconds = begin.elapsed().as_secs_f64();
        println!("{:.0} MB/s, {}, {:?}", len as f64 / 1e6 / seconds, channel.how(), channel.moved());
    }
    Ok(())
}

/// Reads all of the file, and gives the buffers back whole.
fn read(channel: &mut FileChannel, len: u64, buffers: &mut Vec<Part>) -> Result<(), Box<dyn std::error::Error>> {
    let (mut at, mut done) = (0, Vec::new());
    while at < len || channel.in_flight() > 0 {
        // The end of the file does not fill a buffer: then it is read to the end of the file, and no further.
        while let Some(buffer) = buffers.pop_if(|_| at + GATHER as u64 <= len) {
            let far = FileOffset::new(at);
            at += GATHER as u64;
            let _ticket = channel.submit(Transfer { part: buffer, direction: Direction::ToHost, far })?;
        }
        channel.wait(&mut done, Duration::from_secs(60));
        for Completion { transfer, result, .. } in done.drain(..) {
            result?;
            buffers.push(transfer.part);
        }
        if at < len && at + GATHER as u64 > len && channel.in_flight() == 0 {
            let buffer = buffers.pop().ok_or("no buffer")?;
            let (part, rest) = buffer.split_at((len - at) as usize).map_err(|_| "longer than a buffer")?;
            let transfer = Transfer { part, direction: Direction::ToHost, far: FileOffset::new(at) };
            let transfer = dmalane_engine::run(channel, transfer, Duration::from_secs(60))?;
            buffers.push(transfer.part.join(rest).map_err(|_| "not neighbours")?);
            at = len;
        }
    }
    Ok(())
}
