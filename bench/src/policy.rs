//! Split policies over modelled links, in virtual time, beside what no policy can exceed.
//!
//! Nothing here is timed: the rates follow from the model, so they are the same on every machine and in every run.

use std::time::Duration;

use crate::link::assumptions::{Assumption, Workload, all, demands, loads, toggling};
use crate::link::{Half, LinkCopy, Rig, shortest};
use crate::report::Report;
use dmalane::queue::{AddressPolicy, BalancePolicy, Direction};

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of each transfer in the table; the goals are over 64, 256 and 1024 MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    mib: u64,
}

/// Batches one after another: the policy learns from each.
const BATCHES: usize = 4;
const SIZES: [u64; 3] = [64 << 20, 256 << 20, 1 << 30];

type Seconds = Vec<f64>;

/// The time of each batch, and the shortest possible.
fn batches<P: dmalane::queue::Policy + 'static>(
    a: &Assumption,
    copies: &[LinkCopy],
    policy: P,
) -> Result<(Seconds, Seconds), Box<dyn std::error::Error>> {
    let mut rig = Rig::new(a.link.clone(), policy);
    let (mut took, mut best) = (Vec::new(), Vec::new());
    for _ in 0..BATCHES {
        let run = rig.run(copies)?;
        took.push(run.seconds);
        best.push(shortest(&a.link.after(run.began), &demands(copies), &[])?);
        if took.last() < best.last().map(|b| b * 0.999_999).as_ref() {
            return Err(format!("{}: faster than the optimum, so the optimum is wrong", a.name).into());
        }
    }
    Ok((took, best))
}

/// The worst batch: the optimum's time as a part of what it took.
fn worst(took: &[f64], best: &[f64]) -> f64 {
    best.iter().zip(took).map(|(b, t)| b / t).fold(f64::INFINITY, f64::min)
}

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let mut report = Report::new("policy");
    let areas = Half::areas;
    for a in all() {
        for Workload { name, copies } in loads(options.mib << 20) {
            let (by_address, _) = batches(&a, &copies, AddressPolicy::new(areas()))?;
            let (ours, best) = batches(&a, &copies, BalancePolicy::new(areas()))?;
            let (case, bytes) = (format!("{}: {name}", a.name), copies.iter().map(|c| c.bytes).sum());
            report.row(&case, "before: by address", bytes, &by_address[..1]);
            report.row(&case, "ours: balanced, first batch", bytes, &ours[..1]);
            report.row(&case, "ours: balanced, later batches", bytes, &ours[1..]);
            report.row(&case, "floor: the optimum, first batch", bytes, &best[..1]);
        }
    }
    for a in all() {
        let (mut of_optimum, mut of_address) = (f64::INFINITY, f64::INFINITY);
        for bytes in SIZES {
            for Workload { copies, .. } in loads(bytes) {
                let (by_address, _) = batches(&a, &copies, AddressPolicy::new(areas()))?;
                let (ours, best) = batches(&a, &copies, BalancePolicy::new(areas()))?;
                of_optimum = of_optimum.min(worst(&ours, &best));
                of_address = of_address.min(worst(&ours, &by_address));
            }
        }
        let from = "from 64 MiB up, worst load and batch";
        report.at_least(&format!("{}: balanced / optimum, {from}", a.name), 0.97, of_optimum);
        if a.equal {
            report.at_least(&format!("{}: balanced / by address, {from}", a.name), 0.98, of_address);
        }
    }
    for a in all() {
        for kib in [256u64, 1024, 4096] {
            let copies = [LinkCopy { at: Half::Ddr0.at(0), direction: Direction::ToHost, bytes: kib << 10 }];
            let (by_address, _) = batches(&a, &copies, AddressPolicy::new(areas()))?;
            let (ours, best) = batches(&a, &copies, BalancePolicy::new(areas()))?;
            let case = format!("{}: DDR {kib} KiB", a.name);
            report.note(&case, "by address / optimum", worst(&by_address, &best));
            report.note(&case, "balanced / optimum, first batch", worst(&ours[..1], &best));
            report.note(&case, "balanced / optimum, later batches", worst(&ours[1..], &best[1..]));
        }
    }
    for micros in [100, 300, 3000, 10_000] {
        let a = toggling(Duration::from_micros(micros));
        for Workload { name, copies } in loads(SIZES[0]) {
            let (ours, best) = batches(&a, &copies, BalancePolicy::new(areas()))?;
            let case = format!("toggling every {micros} us: {name}");
            report.note(&case, "balanced / optimum, worst batch", worst(&ours, &best));
        }
    }
    Ok(report)
}
