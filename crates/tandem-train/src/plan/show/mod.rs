//! A plan for a terminal, a browser and a program.

pub(crate) mod json;
pub mod operations;
pub mod page;
pub(crate) mod picture;
pub mod text;
