//! Every kind of judge, working and not.

mod command;
mod panel;
mod rules;
mod support;
