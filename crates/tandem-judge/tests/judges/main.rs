//! Every kind of judge, working and not.

mod panel;
mod rules;
mod support;
