//! The shortest time in which a link can move a set of bytes, whatever the policy.
//!
//! Bytes may be shared out between the channels at will and moment by moment, which makes it a linear programme: for
//! each period in which the capacities do not change, each half and direction, each channel, the bytes that go that
//! way. No limit may move more than its capacity times the length of the period, every byte must be moved, and the
//! length of the last period is to be as small as possible.

use std::time::Duration;

use dmalane::queue::Direction;
use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};
use thiserror::Error;

use super::{Half, Link, Stream};

/// Bytes to be moved between the host and a half.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Demand {
    /// Which half.
    pub half: Half,
    /// Which way.
    pub direction: Direction,
    /// How many.
    pub bytes: u64,
}

/// The solver gave up.
#[derive(Clone, PartialEq, Debug, Error)]
#[error("the linear programme could not be solved: {0}")]
pub struct Unsolved(String);

/// The shortest time, in seconds, in which `link` can move all of `demands` over `channels` (an empty list for all of
/// them), from time 0 on. Latency is not counted.
///
/// # Errors
/// [`Unsolved`] when the solver fails.
pub fn shortest(link: &Link, demands: &[Demand], channels: &[usize]) -> Result<f64, Unsolved> {
    // One period more after another: a programme grows with its periods, and the first ones mostly do.
    let (mut ends, mut t) = (Vec::new(), Duration::ZERO);
    loop {
        let next = link.next_change(t);
        if let Some(seconds) = solve(link, demands, channels, &ends, next)? {
            return Ok(seconds);
        }
        // Only a period that ends can be too short.
        t = next.ok_or_else(|| Unsolved("no channel may be used".into()))?;
        ends.push(t);
    }
}

/// The total rate, in bytes per second, that goes with [`shortest`].
///
/// # Errors
/// As [`shortest`].
#[cfg(test)]
pub fn best_rate(link: &Link, demands: &[Demand], channels: &[usize]) -> Result<f64, Unsolved> {
    let bytes: u64 = demands.iter().map(|d| d.bytes).sum();
    Ok(bytes as f64 / shortest(link, demands, channels)?)
}

/// The programme for a move that ends in the period after `ends`; `None` when it cannot end by `last`.
fn solve(
    link: &Link,
    demands: &[Demand],
    channels: &[usize],
    ends: &[Duration],
    last: Option<Duration>,
) -> Result<Option<f64>, Unsolved> {
    // Units that keep the numbers near 1: all bytes together, and the seconds that they would take at 1 GB/s.
    let bytes = demands.iter().map(|d| d.bytes).sum::<u64>() as f64;
    if bytes == 0.0 {
        return Ok(Some(0.0));
    }
    let second = bytes / 1e9;
    let in_units = |t: Duration| t.as_secs_f64() / second;
    let capacity_in_units = |c: f64| c * second / bytes;
    let mut p = Problem::new(OptimizationDirection::Minimize);
    let begin = ends.last().copied().unwrap_or(Duration::ZERO);
    let longest = last.map_or(f64::INFINITY, |l| in_units(l - begin));
    let tail = p.add_var(1.0, (0.0, longest));
    let used = |c: &usize| channels.is_empty() || channels.contains(c);
    let mut flows: Vec<(usize, usize, Stream, Variable)> = Vec::new();
    for period in 0..=ends.len() {
        for (d, demand) in demands.iter().enumerate() {
            for channel in (0..link.channels()).filter(used) {
                let stream = Stream { channel, half: demand.half, direction: demand.direction };
                flows.push((period, d, stream, p.add_var(0.0, (0.0, f64::INFINITY))));
            }
        }
    }
    for (d, demand) in demands.iter().enumerate() {
        let moved: Vec<(Variable, f64)> = flows.iter().filter(|f| f.1 == d).map(|f| (f.3, 1.0)).collect();
        p.add_constraint(&moved[..], ComparisonOp::Eq, demand.bytes as f64 / bytes);
    }
    for period in 0..=ends.len() {
        let start = if period == 0 { Duration::ZERO } else { ends[period - 1] };
        for limit in link.limits() {
            let mut sum: Vec<(Variable, f64)> =
                flows.iter().filter(|f| f.0 == period && limit.streams.contain(&f.2)).map(|f| (f.3, 1.0)).collect();
            if sum.is_empty() {
                continue;
            }
            let capacity = capacity_in_units(limit.at(start));
            let most = match ends.get(period) {
                Some(end) => capacity * in_units(*end - start),
                None => {
                    sum.push((tail, -capacity));
                    0.0
                }
            };
            p.add_constraint(&sum[..], ComparisonOp::Le, most);
        }
    }
    match p.solve().map(|outcome| outcome.into_solution()) {
        Ok(Ok(solution)) => Ok(Some((in_units(begin) + solution[tail]) * second)),
        Ok(Err(_)) => Err(Unsolved("the solver was interrupted".into())),
        Err(microlp::Error::Infeasible) => Ok(None),
        Err(e) => Err(Unsolved(e.to_string())),
    }
}
