//! `dmalane keep`, `kept` and `drop`: models that stay in memory.

use std::fmt::Display;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use dmalane::load::fill::Event;
use dmalane::load::kept::wire::KeptList;
use dmalane::load::kept::{self, KeepOptions, KeeperClient, KeptTimes, socket_path};
use dmalane::{DeviceSpec, OpenOptions};
use serde_json::json;

use crate::device;
use crate::failure::Failure;
use crate::layout::{Table, count, plain};
use crate::model::{self, ReadMode};
use crate::output;
use crate::progress::Progress;
use crate::size::{binary, duration, rate};

const EXAMPLES: &str = "\
Examples:
  dmalane keep models/llama                `dmalaned keep` is the process that holds it
  dmalane keep model.safetensors --name q4 --manifest model.manifest
  dmalane keep models/llama -d cuda:0      in the GPU's memory: attached to from Python
  dmalane load kept:llama -d soft          from memory: wherever a model is named
  dmalane kept
  dmalane drop llama

A model is read once, hashed, and sealed: nobody can change it; memory of a GPU cannot be sealed, and is lent to your \
own programs alone. Programs attach to it in milliseconds, without a copy. \
DMALANE_KEEP names the keeper's socket.

Exit status: 0 kept, 1 it is not kept, 2 usage error.";

/// Keep a model in memory, for any process to attach to.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Keep {
    /// Files to keep, or the directory or the index of a model
    #[arg(value_name = "MODEL", required = true)]
    files: Vec<PathBuf>,

    /// Its name [default: that of its folder or file]
    #[arg(long, value_name = "NAME", value_parser = |text: &str| kept::check_name(text).map(|()| text.to_owned()))]
    name: Option<String>,

    #[arg(short, long, value_parser = device::NAME, hide_possible_values = true)]
    #[arg(help = "Keep it in memory of this device, which can lend it: cuda:NUMBER")]
    device: Option<DeviceSpec>,

    /// Lend it to other users, too, once the keeper has compared it with its manifest
    #[arg(long)]
    shared: bool,

    /// Compare it with this manifest while it is read
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,

    #[command(flatten)]
    mode: ReadMode,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Show no progress bar
    #[arg(short, long)]
    quiet: bool,
}

impl Keep {
    /// Reads the model, and hands it to the keeper.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let options = KeepOptions {
            name: self.name,
            shared: self.shared,
            manifest: model::manifest(self.manifest.as_deref())?,
            mode: self.mode.mode(),
            socket: None,
        };
        let bar = Progress::new("keep", !(self.quiet || self.json));
        let start = Instant::now();
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |meta| meta.len());
        bar.set_length(model::files(&self.files)?.iter().map(size).sum());
        let watch = |event| {
            if let Event::Arrived { len, .. } = event {
                bar.advance(len);
            }
            ControlFlow::Continue(())
        };
        let kept = match &self.device {
            None => kept::keep(None, &self.files, &options, watch),
            Some(spec) => {
                let mut device = device::open(spec, &OpenOptions::default())?;
                kept::keep(Some(&mut device), &self.files, &options, watch)
            }
        };
        let (model, replaced) = kept.map_err(|e| match model::differs("nothing is kept", &e) {
            Some(failure) => failure,
            None => Failure::because("nothing is kept", &e),
        })?;
        bar.finish();
        let (wall, bytes) = (start.elapsed(), model.bytes());
        let object = || {
            json!({
                "schema": 1, "command": "keep", "name": model.name, "id": model.id, "bytes": bytes,
                "files": model.files.len(), "device": model.device, "replaced": replaced, "wall_s": wall.as_secs_f64(),
            })
        };
        let files = count(model.files.len(), "file");
        let text = || {
            let (name, took) = (&model.name, duration(wall));
            let of = replaced
                .as_ref()
                .map_or(String::new(), |id| format!("In place of another {name}, of hash {}\n", digits(id)));
            format!("Keeps {name}: {files}, {} in {took} ({}): kept:{name}\n{of}", binary(bytes), rate(bytes, wall))
        };
        output::tell(self.json, object, text)
    }
}

const KEPT_EXAMPLES: &str = "\
Examples:
  dmalane kept
  dmalane kept --json
  dmalane kept --openmetrics               for Prometheus

Exit status: 0 the keeper answered, 1 it did not, 2 usage error.";

/// List the models that are kept.
#[derive(Args)]
#[command(after_help = KEPT_EXAMPLES)]
pub(crate) struct Kept {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print OpenMetrics text
    #[arg(long, conflicts_with = "json")]
    openmetrics: bool,
}

impl Kept {
    /// Asks the keeper.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let listed = connect()?.list().map_err(|e| Failure::because("cannot list what is kept", &e))?;
        if self.openmetrics {
            output::print(&metrics(&listed))?;
            return Ok(ExitCode::SUCCESS);
        }
        let KeptList { models, used, limit, hits, misses, evicted, took } = &listed;
        let object = || {
            json!({
                "schema": 1, "command": "kept", "models": models, "used_bytes": used, "limit_bytes": limit,
                "hits": hits, "misses": misses, "evicted": evicted, "took_us": took,
            })
        };
        output::tell(self.json, object, || {
            let mut table = Table::new("<<>>><<", ["name", "in", "size", "files", "attaches", "used", "hash"]);
            for model in models {
                table.row([
                    plain(&model.name),
                    // The first digits of a GPU's UUID: as many as `cuda:` takes for a name.
                    model
                        .device
                        .as_ref()
                        .map_or_else(|| "host".to_owned(), |on| plain(&on.chars().take(12).collect::<String>())),
                    binary(model.bytes),
                    model.files.to_string(),
                    model.attaches.to_string(),
                    if model.attached {
                        "now".to_owned()
                    } else {
                        duration(Duration::from_secs(model.idle_s)) + " ago"
                    },
                    digits(&model.id).to_owned(),
                ]);
            }
            format!("{}\n{}{} of {}\n", count(models.len(), "model"), table.text(), binary(*used), binary(*limit))
        })
    }
}

/// The first digits of a hash.
fn digits(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// The list as text of OpenMetrics (<https://prometheus.io/docs/specs/om/open_metrics_spec/>).
fn metrics(listed: &KeptList) -> String {
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, value: &dyn Display| {
        let suffix = if kind == "counter" { "_total" } else { "" };
        text += &format!("# TYPE dmalane_kept_{name} {kind}\ndmalane_kept_{name}{suffix} {value}\n");
    };
    add("bytes", "gauge", &listed.used);
    add("limit_bytes", "gauge", &listed.limit);
    add("models", "gauge", &listed.models.len());
    add("attached_models", "gauge", &listed.models.iter().filter(|model| model.attached).count());
    add("hits", "counter", &listed.hits);
    add("misses", "counter", &listed.misses);
    add("evictions", "counter", &listed.evicted);
    let KeptTimes { all, read, hash, transfer } = listed.took;
    for (name, time) in [("keep", all), ("read", read), ("hash", hash), ("transfer", transfer)] {
        add(&format!("{name}_seconds"), "counter", &Duration::from_micros(time).as_secs_f64());
    }
    text + "# EOF\n"
}

const DROP_EXAMPLES: &str = "\
Examples:
  dmalane drop llama

Who is attached keeps its memory, which is freed when the last one ends.

Exit status: 0 dropped, 1 not, 2 usage error.";

/// Let go of a model that is kept.
#[derive(Args)]
#[command(after_help = DROP_EXAMPLES)]
pub(crate) struct Drop {
    /// Its name, or the beginning of its hash
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

impl Drop {
    /// Asks the keeper.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let keeper = connect()?;
        for name in &self.names {
            let failed = |e| Failure::because(format!("cannot drop {}", plain(name)), &e);
            keeper.drop_model(name).map_err(failed)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn connect() -> Result<KeeperClient, Failure> {
    let path = socket_path();
    KeeperClient::connect(&path)
        .map_err(|e| Failure::because(format!("cannot ask the keeper at {}", path.display()), &e))
}
