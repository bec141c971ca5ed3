//! The command line of Consort.
fn main() {}
