//! The command, run as users run it.

mod bad_input;
mod book;
mod commands;
mod curves;
mod documentation;
mod example_plans;
mod examples;
mod hostile;
mod hub;
#[path = "../../../tandem-hub/tests/it/server.rs"]
#[allow(dead_code, reason = "the faults are for the tests of tandem-hub")]
mod hub_server;
mod init;
mod interruption;
mod judged;
mod messages;
mod plan;
mod processes;
mod scaled;
mod serve;
mod verify;
mod watch;
mod workshop;
