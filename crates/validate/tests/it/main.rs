//! The integration tests of this crate, linked once.

mod fit_link;
mod link_fit;
mod link_optimum;
mod link_policy;
mod link_v80;
mod slow_link;
