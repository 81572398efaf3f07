//! The book: its commands run, its links lead somewhere, its generated pages and its error messages are the
//! program's.

#[allow(dead_code, reason = "the program's own test of commands uses the rest")]
mod blocks;
mod errors;
mod links;
mod metrics;
mod run;
