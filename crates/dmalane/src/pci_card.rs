//! A card as a PCI device: one that the kernel hands out, or one that another process serves.

use std::path::Path;

use dmalane_vfio::user::UserBus;
use dmalane_vfio::{Bdf, Container, Error, VfioBus};

use crate::CARD_PCI_ID;

const WANTED: &str = "a dmalane card (PCI ID 4c44:0001)";

/// The card that is this PCI function, bound to vfio-pci: memory is mapped for it through the kernel's IOMMU.
///
/// # Errors
/// Those of [`Container::open`], each with what helps; [`Error::WrongDevice`] for a function that is something else, which stays untouched;
/// those of [`VfioBus::new`].
pub fn open_pci_card(bdf: &Bdf) -> Result<VfioBus, Error> {
    let device = Container::new().open(bdf)?;
    match device.id()? {
        CARD_PCI_ID => VfioBus::new(device),
        other => Err(Error::WrongDevice { bdf: *bdf, wanted: WANTED, found: number(other) }),
    }
}

/// The card that a process serves at this socket over vfio-user, as `dmalane card serve` does.
///
/// # Errors
/// Those of [`UserBus::connect`]; [`Error::WrongServed`] for another device.
pub fn connect_pci_card(socket: &Path) -> Result<UserBus, Error> {
    let bus = UserBus::connect(socket)?;
    match bus.id()? {
        CARD_PCI_ID => Ok(bus),
        other => Err(Error::WrongServed { path: socket.to_owned(), wanted: WANTED, found: number(other) }),
    }
}

fn number((vendor, device): (u16, u16)) -> String {
    format!("{vendor:04x}:{device:04x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_the_number() {
        assert!(WANTED.contains(&number(CARD_PCI_ID)));
    }
}
