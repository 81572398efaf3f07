//! The hub against a local server that speaks its interface. huggingface.co is not contacted.

mod downloads;
mod errors;
mod python;
mod server;
mod splits;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tandem_hub::{Hub, HubError, HubName, ModelFiles, Progress, Settings};

/// Progress that remembers notices and the first byte count of each file.
#[derive(Default)]
pub(crate) struct Log {
    pub notices: Vec<String>,
    pub starts: Vec<(String, u64)>,
}

impl Progress for Log {
    fn bytes(&mut self, file: &str, done: u64, _: Option<u64>) {
        if self.starts.last().is_none_or(|(last, _)| last != file) {
            self.starts.push((file.to_owned(), done));
        }
    }

    fn notice(&mut self, text: &str) {
        self.notices.push(text.to_owned());
    }
}

pub(crate) fn settings(endpoint: &str, cache: &Path) -> Settings {
    Settings::new(endpoint, cache).with_pause(Duration::from_millis(1))
}

pub(crate) fn name(text: &str) -> HubName {
    HubName::explicit(&format!("hf://{text}")).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn model(settings: Settings, text: &str) -> Result<PathBuf, HubError> {
    Hub::new(settings).model(&name(text), ModelFiles::Whole, &mut Log::default())
}

/// Message of an error and its causes.
pub(crate) fn message<T>(result: Result<T, HubError>) -> String {
    result.err().expect("an error").to_string()
}
