//! A model of the link between a host and a card, to try policies on and to understand measurements with.
//!
//! A [`Link`] is a set of [`Limit`]s: what each channel moves each way, what each half of a memory takes and gives,
//! what all of them share; each may change over time. Nothing else is modelled but a latency.
//!
//! - [`Sim`] runs real [`Split`](dmalane::queue::Split)s and policies over it in virtual time; [`Rig`] is one ready to
//!   use.
//! - [`best_rate`] says what no policy can exceed, as the optimum of a linear programme.
//! - [`Slow`] hangs real channels off a modelled link, in real time; [`Throttle`] is the clockwork inside.
//! - [`fit`] goes the other way: from measured rates to the limits that explain them; [`measure`] makes those rates.
//! - [`assumptions`] are the links that may be behind the V80's measured rates.

pub mod assumptions;
pub mod fit;
pub mod measure;
mod model;
mod optimum;
mod sim;
mod slow;
#[cfg(test)]
mod tests;
mod throttle;

pub use model::{Half, Limit, Link, Memory, Stream, Streams};
#[cfg(test)]
pub use optimum::best_rate;
pub use optimum::{Demand, shortest};
pub use sim::{LinkCopy, Rig};
pub use slow::Slow;
use throttle::Throttle;
