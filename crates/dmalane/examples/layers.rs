//! Uses three layers alone: a heap, the software host, and a device that reads what is mapped and nothing else.

use std::error::Error;

use dmalane::addr::{Access, Iova};
use dmalane::dma::{AnonHeap, DeviceMem, Heap, Registrar};
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
    device.read_bytes(mapping.span().first(), &mut bytes)?;
    println!("the device reads {:?}", String::from_utf8_lossy(&bytes));
    for refused in [device.write_bytes(mapping.span().first(), &bytes), device.read_bytes(Iova::new(0), &mut bytes)] {
        println!("{}", refused.expect_err("neither is mapped for that"));
    }
    Ok(())
}
