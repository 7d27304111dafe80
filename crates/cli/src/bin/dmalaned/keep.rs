//! `dmalaned keep`: holds models in memory, and lends them.

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::channel;
use std::thread;

use clap::Args;
use dmalane::dma::room;
use dmalane::keep::{Holder, Keeper, KeeperConfig, Store, hold, inherited};
use dmalane::load::kept::{self, KeepOptions, socket_path};
use dmalane_cli::failure::Failure;
use dmalane_cli::program::termination;
use dmalane_cli::size::{self, Size, binary};
use rustix::fs::{FlockOperation, flock};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::serve::{listen, mode, say};
use crate::system;

const EXAMPLES: &str = "\
Examples:
  dmalaned keep models/llama               load it once; then: dmalane load kept:llama -d cuda:0
  dmalaned keep --memory 64GiB             nothing yet: `dmalane keep` adds models
  dmalane kept                             what is kept

Memory is sealed: nobody can change it. When the keeper is killed, the models stay, in the store of systemd's service
(FileDescriptorStoreMax=) or in a process that holds them; the next keeper takes them back, and compares them with \
their manifests. When it is stopped (SIGTERM), they are gone once nobody is attached.

Exit status: 0 terminated by SIGTERM or SIGINT, 1 it could not run, 2 usage error.";

/// Keep models in memory, and lend them to any process without a copy.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Keep {
    /// Models to load first
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,

    /// Socket to listen on [default: keep.sock in $XDG_RUNTIME_DIR/dmalane, or in /run/dmalane]
    #[arg(long, value_name = "PATH", env = "DMALANE_KEEP", hide_env_values = true)]
    #[arg(default_value_os_t = socket_path(), hide_default_value = true)]
    socket: PathBuf,

    /// File mode of the socket, in octal: others may connect with 666
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    mode: u32,

    /// Memory for all models [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = size::nonzero)]
    memory: Option<Size>,

    /// Percent of it that one user may have [default: 75; 100, where only one user may connect]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    user_share: Option<u32>,
}

impl Keep {
    /// Keeps until the process is terminated.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let Self { models, socket, mode, .. } = self;
        let has = rustix::system::sysinfo();
        let has = (has.totalram as u64).saturating_mul(has.mem_unit.into());
        if let Some(memory) = self.memory.map(Size::bytes).filter(|memory| *memory > has) {
            let (memory, has) = (binary(memory), binary(has));
            return Err(Failure::usage(format!("--memory: this machine has {has} of memory, and not {memory}")));
        }
        // Before anything else is opened: these have numbers.
        let passed = inherited();
        let descriptors = system::raise_file_limit().and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        let alone = mode & 0o077 == 0;
        let user_percent = self.user_share.unwrap_or(if alone { 100 } else { 75 });
        let (connections, of_all) = (256, if alone { 1 } else { 4 });
        let config = KeeperConfig {
            memory: 0,
            user_percent,
            connections,
            user_connections: connections / of_all,
            // Others are for connections, for what is lent, and for a model that is hashed.
            user_descriptors: descriptors / 2 / of_all,
        };
        let mut stop = termination(&[SIGTERM, SIGINT, SIGHUP])?;
        if let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            // Where it cannot be made, listening fails and says so.
            let _ = DirBuilder::new().recursive(true).mode(0o755).create(folder);
        }
        let lock = File::create(format!("{}.lock", socket.display())).map_err(|e| {
            Failure::because(format!("cannot listen at {}", socket.display()), &e)
                .hint("--socket or DMALANE_KEEP names another place")
        })?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Failure::new(format!("another keeper is listening at {}", socket.display())));
        }
        let listener = listen(&socket, mode, true)?;
        let mut keeper = Keeper::new(config, say).with_store(store(&socket, passed)?);
        let half = || room().map(|room| room.bytes.saturating_add(keeper.bytes()) / 2);
        let no_limit = || Failure::usage("the kernel does not say how much memory is free: --memory says how much");
        let memory = self.memory.map(Size::bytes).or_else(half).ok_or_else(no_limit)?;
        keeper.limit(memory);
        say(&format!("keeps up to {} at {}", binary(memory), socket.display()));
        system::notify("READY=1");
        let (ends, end) = UnixStream::pair()?;
        let mut orderly = ends.try_clone()?;
        let (tell, told) = channel();
        let first = thread::Builder::new().spawn(move || {
            for model in &models {
                let options = KeepOptions { socket: Some(socket.clone()), ..KeepOptions::default() };
                if let Err(e) = kept::attach_or_keep([model], &options, |_| ControlFlow::Continue(())) {
                    let _ = tell.send(Failure::because(format!("cannot keep {}", model.display()), &e));
                    let _ = ends.shutdown(Shutdown::Both);
                    break;
                }
            }
            // Closed, it would end the keeper.
            ends
        })?;
        thread::Builder::new().spawn(move || {
            let _ = stop.read(&mut [0]);
            // It reads this, and frees what it holds.
            let _ = orderly.write_all(&[0]);
        })?;
        keeper.run(listener, end.as_fd()).map_err(|e| Failure::because("the keeper cannot go on", &e))?;
        drop(first);
        match told.try_recv() {
            Ok(failure) => Err(failure),
            Err(_) => {
                say("stopped");
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// Where models outlive this process.
fn store(socket: &Path, passed: Vec<(String, OwnedFd)>) -> Result<Store, Failure> {
    if let Some(store) = Store::of_manager(passed)? {
        return Ok(store);
    }
    let start: fn(&Path) -> std::io::Result<()> = |path| {
        let mut holder = Command::new("/proc/self/exe");
        holder.arg0("dmalaned").arg("hold").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Not interrupted with this process by a terminal.
        let mut holder = holder.process_group(0).spawn()?;
        thread::Builder::new().spawn(move || holder.wait()).map(drop)
    };
    let holder = Holder { path: PathBuf::from(format!("{}.held", socket.display())), start };
    Store::of_holder(holder).map_err(|e| Failure::because("cannot start the process that holds models", &e))
}

/// Hold the memory of models for a keeper.
#[derive(Args)]
pub struct Hold {
    path: PathBuf,
}

impl Hold {
    /// Holds until a keeper ends in good order.
    pub fn run(self) -> Result<ExitCode, Failure> {
        system::raise_file_limit();
        hold(&listen(&self.path, 0o600, true)?)?;
        Ok(ExitCode::SUCCESS)
    }
}
