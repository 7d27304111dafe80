//! The dmalane command line.
fn main() {}
