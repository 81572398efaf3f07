//! Every kind of judge, working and not.

mod cache;
mod command;
mod endpoint;
mod panel;
mod rules;
mod server;
mod support;
