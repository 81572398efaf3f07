//! The token cache: tokenising a data set into a file that later runs and all ranks map.

mod cache_file;
mod checksum;
pub mod prepare;
pub mod token_cache;
