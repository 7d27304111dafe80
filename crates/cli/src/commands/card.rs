//! `dmalane card serve`: the software card as a device of another process.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use dmalane::sim::{CardConfig, Workers};
use dmalane::{CardClient, CardServer, CardServerError};

use crate::device::{CARD_DDR, CARD_HBM, card_memory};
use crate::failure::Failure;
use crate::layout::plain;
use crate::number::within;
use crate::output;
use crate::size::Size;

const EXAMPLES: &str = "\
Examples:
  dmalane card serve --vfio-user /tmp/card

Exit status: 0 success, 1 no socket or no memory, 2 usage error.";

const SERVE_EXAMPLES: &str = "\
Examples:
  dmalane card serve --vfio-user /tmp/card
  dmalane card serve --vfio-user /tmp/card --card-ddr 1GiB --card-hbm 512MiB --once

QEMU 10.1 and later attaches it, if the guest memory is a memfd:
  -object memory-backend-memfd,id=ram,size=1G,share=on -machine memory-backend=ram
  -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"/tmp/card\"}}'
For VFIO in the guest, add: -machine q35,kernel-irqchip=split -device intel-iommu,intremap=on,caching-mode=on
In the guest, bound to vfio-pci: dmalane load -d vfio:BDF. Without QEMU: dmalane load -d vfio-user:/tmp/card

Exit status: 0 the client of --once has disconnected, 1 no socket or no memory, 2 usage error.";

/// Run the software card in its own process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Card {
    #[command(subcommand)]
    command: CardCommand,
}

#[derive(Subcommand)]
enum CardCommand {
    Serve(Serve),
}

/// Serve the software card as a PCI device, over vfio-user.
///
/// Serves one client at a time, each with a new card, until it is stopped. Prints a line per client.
#[derive(Args)]
#[command(after_help = SERVE_EXAMPLES)]
struct Serve {
    /// Socket to listen on; only this user can connect
    #[arg(long, value_name = "SOCKET")]
    vfio_user: PathBuf,

    /// DDR size of the card, at most 256GiB, rounded up to 2MiB
    #[arg(long, value_name = "SIZE", default_value_t = CARD_DDR, value_parser = card_memory)]
    #[arg(allow_hyphen_values = true)]
    card_ddr: Size,

    /// HBM size of the card (two halves), at most 256GiB, rounded up to 4MiB
    #[arg(long, value_name = "SIZE", default_value_t = CARD_HBM, value_parser = card_memory)]
    #[arg(allow_hyphen_values = true)]
    card_hbm: Size,

    /// DMA channels, from 1 to 16
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = within::<u32>(1..=16))]
    channels: u32,

    /// Exit after the first client
    #[arg(long)]
    once: bool,
}

impl Card {
    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let CardCommand::Serve(serve) = self.command;
        serve.run()
    }
}

impl Serve {
    /// Serves clients, one after the other.
    fn run(self) -> Result<ExitCode, Failure> {
        let up = |bytes: u64, unit: u64| bytes.next_multiple_of(unit);
        let config = CardConfig {
            ddr: up(self.card_ddr.bytes(), 2 << 20),
            hbm: up(self.card_hbm.bytes(), 4 << 20),
            channels: self.channels,
            workers: Workers::PerChannel,
        };
        let server = CardServer::bind(&self.vfio_user, config)?;
        output::print(&format!("listening at {}\n", plain(&self.vfio_user.to_string_lossy())))?;
        for client in 1u64.. {
            let line = match server.accept().and_then(CardClient::serve) {
                Ok(Ok(())) => format!("client {client}: disconnected\n"),
                Ok(Err(e)) => format!("client {client}: {e}\n"),
                // An error such as too many open files may be temporary.
                Err(CardServerError::Accept(e)) if !self.once => {
                    std::thread::sleep(Duration::from_millis(100));
                    format!("client {client}: cannot be accepted: {e}\n")
                }
                Err(e) => return Err(e.into()),
            };
            output::print(&line)?;
            if self.once {
                break;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
