//! `dmalane card serve`: the software card as a device of another process.

use std::io::{ErrorKind, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use dmalane::devices::soft::SoftSpec;
use dmalane::sim::{CardConfig, Workers};
use dmalane::{CardClient, CardServer, CardServerError, DeviceSpec, error_chain};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::device;
use crate::failure::Failure;
use crate::layout::plain;
use crate::output;
use crate::program::termination;

const EXAMPLES: &str = "\
Examples:
  dmalane card serve --vfio-user /tmp/card
  dmalane card serve --vfio-user /tmp/card -d soft,ddr=1GiB,hbm=512MiB --once

QEMU 10.1 and later attaches it, if the guest memory is a memfd:
  -object memory-backend-memfd,id=ram,size=1G,share=on -machine memory-backend=ram
  -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"/tmp/card\"}}'
For VFIO in the guest, add -machine q35,kernel-irqchip=split
  -device intel-iommu,intremap=on,caching-mode=on
In the guest, bound to vfio-pci: dmalane load -d vfio:BDF. Without QEMU: dmalane load -d vfio-user:/tmp/card

Exit status: 0 terminated by SIGTERM or SIGINT, or the client of --once has disconnected; 1 no socket or no memory; \
2 usage error.";

/// Run the software card in its own process.
#[derive(Subcommand)]
#[command(after_help = EXAMPLES)]
pub(crate) enum Card {
    Serve(Serve),
}

/// Serve the software card as a PCI device, over vfio-user.
///
/// Serves one client at a time, each with a new card, until it is stopped. Prints a line per client.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Serve {
    /// Socket to listen on; only this user can connect
    #[arg(long, value_name = "SOCKET")]
    vfio_user: PathBuf,

    /// The card: soft, with any of ,ddr=SIZE ,hbm=SIZE and ,channels=N
    #[arg(short, long, value_name = "CARD", default_value = "soft", value_parser = device::NAME)]
    #[arg(hide_possible_values = true)]
    device: DeviceSpec,

    /// Exit after the first client
    #[arg(long)]
    once: bool,
}

impl Card {
    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let Self::Serve(serve) = self;
        serve.run()
    }
}

impl Serve {
    /// Serves clients, one after the other.
    fn run(self) -> Result<ExitCode, Failure> {
        let config = CardConfig { workers: Workers::PerChannel, ..card(&self.device)?.config };
        let mut stop = termination(&[SIGINT, SIGTERM])?;
        let server = CardServer::bind(&self.vfio_user, config).map_err(|e| match &e {
            CardServerError::Listen { source, .. } if source.kind() == ErrorKind::AddrInUse => {
                Failure::from(e).hint("another program listens there: choose another path")
            }
            _ => e.into(),
        })?;
        let server = Arc::new(server);
        let stopped = Arc::downgrade(&server);
        std::thread::Builder::new().spawn(move || {
            let _ = stop.read(&mut [0]);
            stopped.upgrade().inspect(|server| server.remove_socket());
            std::process::exit(0)
        })?;
        output::print(&format!("listening at {}\n", plain(&self.vfio_user.to_string_lossy())))?;
        for client in 1u64.. {
            let line = match server.accept().and_then(CardClient::serve) {
                Ok(Ok(())) => format!("client {client}: disconnected\n"),
                Ok(Err(e)) => format!("client {client}: {}\n", error_chain(&e)),
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

/// The card of a name that has nothing of its driver's, which is the client's.
fn card(spec: &DeviceSpec) -> Result<&SoftSpec, Failure> {
    let only = |card: &&SoftSpec| **card == SoftSpec { config: card.config, ..SoftSpec::default() };
    let card = spec.get::<SoftSpec>().filter(only);
    card.ok_or_else(|| Failure::usage(format!("{spec} cannot be served: -d takes soft, with ddr, hbm and channels")))
}
