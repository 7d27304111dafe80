//! A model of the link between a host and a card, to try policies on and to understand measurements with.
//!
//! A [`Link`] is a set of [`Limit`]s: what each channel moves each way, what each half of a memory takes and gives,
//! what all of them share; each may change over time. Nothing else is modelled but a latency.
//!
//! - [`Sim`] runs real [`Split`](dmalane_queue::Split)s and policies over it in virtual time; [`Rig`] is one ready to
//!   use.
//! - [`best_rate`] says what no policy can exceed, as the optimum of a linear programme.
//! - [`Slow`] hangs real channels off a modelled link, in real time; [`Throttle`] is the clockwork inside.
//! - [`fit`] goes the other way: from measured rates to the limits that explain them.
//! - [`assumptions`] are the links that may be behind the V80's measured rates.
//!
//! ```
//! use std::time::Duration;
//! use dmalane_queue::{BalancePolicy, Direction};
//! use dmalane_validate::link::{LinkCopy, Demand, Half, Limit, Link, Rig, Streams, best_rate};
//!
//! // Two channels of which one is slower.
//! let channel = |c, rate| Limit::constant(format!("channel {c}"), Streams { channel: Some(c), ..Streams::ALL }, rate);
//! let link = Link::new(2, vec![channel(0, 12e9), channel(1, 6e9)], Duration::from_micros(2))?;
//!
//! let mut rig = Rig::new(link.clone(), BalancePolicy::new(Half::areas()));
//! let copy = LinkCopy { at: Half::Ddr0.at(0), direction: Direction::FromHost, bytes: 64 << 20 };
//! let got = rig.run(&[copy])?.rate;
//!
//! let demand = Demand { half: Half::Ddr0, direction: Direction::FromHost, bytes: 64 << 20 };
//! let best = best_rate(&link, &[demand], &[])?;
//! assert!((best - 18e9).abs() < 1.0 && got > 0.97 * best);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod assumptions;
pub mod fit;
mod model;
mod optimum;
mod sim;
mod slow;
mod throttle;

pub use model::{Half, Limit, Link, Memory, ModelError, Stream, Streams};
pub use optimum::{Demand, Unsolved, best_rate, shortest};
pub use sim::{LinkCopy, Rig, RigRun, Sim, SimQueue};
pub use slow::Slow;
pub use throttle::Throttle;
