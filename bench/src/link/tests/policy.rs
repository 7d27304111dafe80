//! Policies over modelled links, beside what no policy can exceed.

use dmalane::queue::{AddressPolicy, BalancePolicy};

use crate::link::assumptions::{all, demands, loads};
use crate::link::{Half, Rig, best_rate};

#[test]
fn balancing_comes_close_to_the_optimum() {
    let mut missed = Vec::new();
    for bytes in [64u64 << 20, 256 << 20] {
        for a in all() {
            for load in loads(bytes) {
                let mut address = Rig::new(a.link.clone(), AddressPolicy::new(Half::areas()));
                let fixed = address.run(&load.copies).unwrap();
                let mut rig = Rig::new(a.link.clone(), BalancePolicy::new(Half::areas()));
                let mut got = Vec::new();
                for _ in 0..4 {
                    let run = rig.run(&load.copies).unwrap();
                    let best = best_rate(&a.link.after(run.began), &demands(&load.copies), &[]).unwrap();
                    got.push((run.rate / 1e9, best / 1e9));
                }
                let best0 = got[0].1;
                let worst = got.iter().map(|(r, b)| r / b).fold(f64::INFINITY, f64::min);
                println!(
                    "{:>4} MiB {:<18} {:<18} address {:5.2}  balance {:5.2} {:5.2} best {:5.2} ({:.3})",
                    bytes >> 20,
                    a.name,
                    load.name,
                    fixed.rate / 1e9,
                    got[0].0,
                    got[3].0,
                    best0,
                    worst
                );
                if worst < 0.97 {
                    missed.push(format!("{} {} {bytes} {worst}", a.name, load.name));
                }
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
