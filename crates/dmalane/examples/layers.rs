//! Uses three layers alone: a heap, the software host, and a device that reads what is mapped and nothing else.

use std::error::Error;

use dmalane::addr::{Access, Iova};
use dmalane::dma::{AnonHeap, DeviceMem, Heap, HeldMem, Registrar};
use dmalane::sim::{HostConfig, SoftHost};

fn main() -> Result<(), Box<dyn Error>> {
    let heap = AnonHeap::new();
    let mut buf = heap.allocate(4 << 20)?;
    buf[..5].copy_from_slice(b"hello");
    println!("4 MiB of {}", buf.backing().kind);

    let host: SoftHost = SoftHost::new(HostConfig::default())?;
    let mapping = host.map(host.pin(&buf.share().reference())?, Access::READ)?;
    let pages = mapping.pinned().pages().map_or(0, |p| p.segment_count());
    println!("{pages} segments, mapped at {} by {:?}", mapping.span(), host.stats().leaves);

    let mut device = host.port();
    let mut bytes = [0; 5];
    device.hold().read_bytes(mapping.span().first(), &mut bytes)?;
    println!("the device reads {:?}", String::from_utf8_lossy(&bytes));
    let written = device.hold().write_bytes(mapping.span().first(), &bytes);
    let read = device.hold().read_bytes(Iova::new(0), &mut bytes);
    for refused in [written, read] {
        println!("{}", refused.expect_err("neither is mapped for that"));
    }
    Ok(())
}
