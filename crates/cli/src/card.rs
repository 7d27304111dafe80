//! `dmalane card serve`: the software card as a device of another process.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use dmalane::sim::{CardConfig, Workers};
use dmalane::{CardServer, CardServerError};

use crate::failure::Failure;
use crate::output;

/// What was asked for.
pub struct ServeArgs {
    /// Where to listen.
    pub socket: PathBuf,
    /// Bytes of DDR.
    pub ddr: u64,
    /// Bytes of HBM.
    pub hbm: u64,
    /// DMA channels.
    pub channels: u32,
    /// One client only.
    pub once: bool,
}

/// Serves clients, one after the other.
pub fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    let up = |bytes: u64, unit: u64| bytes.next_multiple_of(unit);
    let config = CardConfig {
        ddr: up(args.ddr, 2 << 20),
        hbm: up(args.hbm, 4 << 20),
        channels: args.channels,
        workers: Workers::PerChannel,
    };
    let server = CardServer::bind(&args.socket, config)?;
    output::print(&format!("listening at {}\n", output::plain(&args.socket.to_string_lossy())))?;
    for client in 1u64.. {
        let line = match server.serve_one() {
            Ok(Ok(())) => format!("client {client}: gone\n"),
            Ok(Err(e)) => format!("client {client}: {e}\n"),
            // Such as too many open files: that may pass.
            Err(CardServerError::Accept(e)) if !args.once => {
                std::thread::sleep(Duration::from_millis(100));
                format!("client {client}: cannot be accepted: {e}\n")
            }
            Err(e) => return Err(e.into()),
        };
        output::print(&line)?;
        if args.once {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}
