//! Every kind of judge, working and not.

mod cache;
mod command;
mod endpoint;
mod environment;
mod panel;
mod rules;
mod server;
mod support;
