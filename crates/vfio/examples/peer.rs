//! Lets one device reach the BAR of another, as a VMM does for two devices of a guest.
//!
//! ```text
//! cargo run -p dmalane-vfio --example peer -- 0000:01:00.0 2 0000:02:00.0
//! ```
//!
//! The first device has the BAR of that number. Through iommufd the kernel exports it as a dma-buf (Linux 7 with
//! `CONFIG_VFIO_PCI_DMABUF`); type 1 maps it by its address.

use std::error::Error;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use dmalane_addr::Access;
use dmalane_vfio::{BarAlignment, Bdf, VfioContainer};

/// The region of the configuration space, and the command register in it.
const CONFIG: u32 = 7;
const COMMAND: u64 = 4;
/// In the command register.
const MEMORY: u16 = 1 << 1;

/// Maps a BAR of `owner` for `other`, and again after the device was away.
pub fn share(container: &VfioContainer, owner: &Bdf, bar: u32, other: &Bdf) -> Result<(), Box<dyn Error>> {
    // What is mapped through a container is mapped for all of its devices.
    let (owner, _other) = (container.open(owner)?, container.open(other)?);
    let mut command = [0; 2];
    owner.read_region(CONFIG, COMMAND, &mut command)?;
    let off = u16::from_le_bytes(command) & !MEMORY;
    let decode = |on: bool| owner.write_region(CONFIG, COMMAND, &(off | (u16::from(on) * MEMORY)).to_le_bytes());
    decode(true)?;

    let bar = Arc::new(owner.map_bar(bar, None, BarAlignment::LargestPage)?);
    match bar.dma_buf() {
        Ok(dma_buf) => println!("dma-buf {}, for whoever else imports it", dma_buf.as_raw_fd()),
        Err(why) => println!("{}", dmalane_dma::error_chain(&why)),
    }
    let mut peer = container.map_peer(&bar, 0..bar.len(), Access::RW)?;
    let span = peer.span();
    println!("{span} is the BAR, by {}", peer.method());
    assert!(peer.is_mapped() && span.len() == bar.len());

    // The guest resets the device, or moves the BAR: with a dma-buf that ends the mapping. Whoever emulates the command
    // register sees when memory decoding returns.
    decode(false)?;
    assert!(bar.load_u32(0).is_err(), "an error, not SIGBUS");
    decode(true)?;
    peer.renew()?;
    assert!(peer.is_mapped() && peer.span() == span, "at the same addresses");
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [owner, bar, other] = &*args else { return Err("usage: peer BDF BAR BDF, each bound to vfio-pci".into()) };
    share(&VfioContainer::new(), &owner.parse()?, bar.parse()?, &other.parse()?)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", dmalane_dma::error_chain(&*error));
        std::process::exit(1);
    }
}
