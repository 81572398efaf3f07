//! A plan for a terminal, a browser and a program.

pub mod json;
pub mod page;
pub mod picture;
pub mod text;
