//! The card as a PCI device: bound to vfio-pci, or served by another process.

use std::path::Path;

use dmalane_vfio::{Bdf, VfioBus, VfioContainer};
use dmalane_vfio_user::UserBus;
use thiserror::Error;

use crate::card_server::CARD_PCI_ID;

/// Why a PCI device cannot be opened as a card.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PciCardError {
    /// The device cannot be opened through the kernel's VFIO.
    #[error(transparent)]
    Vfio(#[from] dmalane_vfio::Error),
    /// The device cannot be opened over vfio-user.
    #[error(transparent)]
    VfioUser(#[from] dmalane_vfio_user::Error),
    /// It is another device.
    #[error("{device} is not a dmalane card (PCI ID {}): {}", id(CARD_PCI_ID), id(*found))]
    NotACard {
        /// The function, or the socket of the process that serves it.
        device: String,
        /// Its vendor and device number.
        found: (u16, u16),
    },
}

/// Opens the card that is bound to vfio-pci. Its memory is mapped through the kernel's IOMMU driver.
///
/// # Errors
/// Those of [`VfioContainer::open`] and [`VfioBus::new`]; [`PciCardError::NotACard`] for another device, which is not
/// touched.
pub fn open_pci_card(bdf: &Bdf) -> Result<VfioBus, PciCardError> {
    let device = VfioContainer::new().open(bdf)?;
    match device.id()? {
        CARD_PCI_ID => Ok(VfioBus::new(device)?),
        found => Err(PciCardError::NotACard { device: bdf.to_string(), found }),
    }
}

/// Connects to the card that a process of one of these users serves over vfio-user, as `dmalane card serve` does.
///
/// # Errors
/// Those of [`UserBus::connect`]; [`PciCardError::NotACard`] for another device.
pub fn connect_pci_card(socket: &Path, trusted: &[u32]) -> Result<UserBus, PciCardError> {
    let bus = UserBus::connect(socket, trusted)?;
    match bus.id()? {
        CARD_PCI_ID => Ok(bus),
        found => Err(PciCardError::NotACard { device: format!("the device behind {}", socket.display()), found }),
    }
}

fn id((vendor, device): (u16, u16)) -> String {
    format!("{vendor:04x}:{device:04x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_both_ids() {
        let error = PciCardError::NotACard { device: "0000:01:00.0".to_owned(), found: (0x10ee, 0x50b4) };
        assert_eq!(error.to_string(), "0000:01:00.0 is not a dmalane card (PCI ID 4c44:0001): 10ee:50b4");
    }
}
