//! Settings from the environment, by the names and defaults of `huggingface_hub`.

use std::env;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use ureq::http::Uri;

use crate::error::{HubError, Result};

/// Access token, never shown.
#[derive(Clone)]
pub(crate) struct Token(pub String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Endpoint, cache and rights.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Address of the hub, without a slash at its end.
    pub(crate) endpoint: String,
    /// Folder of the repositories' folders.
    pub(crate) cache: PathBuf,
    pub(crate) token: Option<Token>,
    /// Variable that forbids the network.
    pub(crate) offline: Option<&'static str>,
    /// Pause before the first retry; each further pause is twice as long.
    pub(crate) pause: Duration,
}

/// Variable that `tandem launch` sets for its ranks, whose files it has downloaded.
pub const LAUNCHED: &str = "TANDEM_HUB_OFFLINE";

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` is no address, the token is no token, or no home folder is known.
    pub fn from_environment() -> Result<Self> {
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let uri = endpoint.parse::<Uri>().ok();
        let is_address = uri.is_some_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some_and(|host| !host.is_empty())
        });
        if !is_address || endpoint.contains(['@', '?', '#']) {
            let reason = "is no address; it should be like https://huggingface.co".to_owned();
            return Err(HubError::Setting { variable: "HF_ENDPOINT", reason });
        }
        let home = || match folder("HF_HOME") {
            Some(home) => Ok(home),
            None => match (folder("XDG_CACHE_HOME"), env::home_dir()) {
                (Some(cache), _) => Ok(cache.join("huggingface")),
                (None, Some(home)) => Ok(home.join(".cache/huggingface")),
                (None, None) => {
                    let reason =
                        "is not set, and neither is HOME: set it to a folder for downloads".to_owned();
                    Err(HubError::Setting { variable: "HF_HOME", reason })
                }
            },
        };
        let cache = match folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE")) {
            Some(cache) => cache,
            None => home()?.join("hub"),
        };
        let cache = std::path::absolute(&cache).map_err(HubError::io("find", &cache))?;
        let token = match text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")) {
            Some(token) => Some(token),
            None => {
                let file = folder("HF_TOKEN_PATH").map_or_else(|| Ok(home()?.join("token")), Ok)?;
                fs::read_to_string(file)
                    .ok()
                    .map(|token| token.trim().to_owned())
                    .filter(|token| !token.is_empty())
            }
        };
        if token.as_ref().is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            let reason = "holds no token: it has spaces or other illegal characters".to_owned();
            return Err(HubError::Setting { variable: "HF_TOKEN", reason });
        }
        // As in huggingface_hub, the second counts only where the first is empty.
        let variables = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
        let named = variables.into_iter().find(|name| text(name).is_some()).filter(|name| is_true(name));
        let offline = named.or_else(|| is_true(LAUNCHED).then_some(LAUNCHED));
        Ok(Self { endpoint, cache, token: token.map(Token), offline, pause: Duration::from_secs(1) })
    }

    /// Creates settings for an endpoint and a cache, without a token.
    pub fn new(endpoint: &str, cache: impl Into<PathBuf>) -> Self {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Self { endpoint, cache: cache.into(), token: None, offline: None, pause: Duration::from_secs(1) }
    }

    /// Sets the token.
    #[must_use]
    pub fn with_token(self, token: &str) -> Self {
        Self { token: Some(Token(token.to_owned())), ..self }
    }

    /// Forbids the network.
    #[must_use]
    pub fn offline(self) -> Self {
        Self { offline: Some("HF_HUB_OFFLINE"), ..self }
    }

    /// Sets the pause before the first retry.
    #[must_use]
    pub fn with_pause(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }
}

fn text(name: &str) -> Option<String> {
    env::var(name).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn is_true(name: &str) -> bool {
    text(name).is_some_and(|text| ["1", "ON", "YES", "TRUE"].contains(&text.to_uppercase().as_str()))
}

/// Folder of a variable; `~` is the home folder.
fn folder(name: &str) -> Option<PathBuf> {
    let value = PathBuf::from(env::var_os(name).filter(|value| !value.is_empty())?);
    match value.strip_prefix("~") {
        Ok(rest) => Some(env::home_dir()?.join(rest)),
        Err(_) => Some(value),
    }
}
