//! Models and data sets of the Hugging Face hub.
//!
//! * A [`HubName`] is `owner/name`, `owner/name@revision` or `hf://owner/name@revision/rest`.
//! * A [`Hub`] is one endpoint and one cache, by default those that the environment names.
//!   [`Hub::model`] and [`Hub::rows`] return local paths; missing files are downloaded first.
//!
//! The cache has the layout of Python's `huggingface_hub`, so both use each other's files:
//!
//! ```text
//! hub/models--owner--name/refs/main                   the branch's commit
//!                         snapshots/<commit>/<file>   link to ../../blobs/<etag>
//!                         blobs/<etag>                contents; <etag>.incomplete while downloading
//! hub/.locks/models--owner--name/<etag>.lock          held during a download
//! ```
//!
//! A blob gets its name only after its size and hash were checked: an interrupted download, a full
//! disk or another process leaves at most an `.incomplete` file, which the next download continues.

#![warn(unreachable_pub)]

mod cache;
mod client;
mod dataset;
mod download;
mod error;
mod hub;
mod model;
mod name;
mod settings;

pub use error::{HubError, Result};
pub use hub::{Hub, Progress};
pub use model::ModelFiles;
pub use name::HubName;
pub use settings::{LAUNCHED, Settings};
