//! Options of an endpoint, and its default prompt.

use std::path::PathBuf;

use crate::backoff::{Backoff, check_seconds};
use crate::{JudgeError, Result, http};

/// Default prompt.
pub const DEFAULT_TEMPLATE: &str = "\
You compare two answers to one request. The better one is correct, does what was asked, is honest and is clear. \
Neither its length nor its place makes an answer better.

<request>
{prompt}
</request>

<answer_A>
{a}
</answer_A>

<answer_B>
{b}
</answer_B>

Which answer is better? Reply with one word: A, B, or tie.";

/// How to ask an endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct EndpointConfig {
    /// Address up to the version, as `https://api.openai.com/v1`; `/chat/completions` is appended.
    pub base_url: String,
    /// The model's name at the endpoint.
    pub model: String,
    /// Environment variable with the key, if one is needed.
    pub api_key_env: Option<String>,
    /// Prompt with the placeholders `{prompt}`, `{a}` and `{b}`. The last line of the reply should
    /// be A, B or tie alone.
    pub prompt: String,
    /// Maximum tokens of a reply. A reasoning model needs more.
    pub max_tokens: u32,
    /// Timeout of a request.
    pub timeout_s: f64,
    /// Maximum number of retries of a request.
    pub retries: usize,
    /// Pause before a retry; it doubles each time, shortened at random by up to a half.
    pub first_pause_s: f64,
    /// Maximum pause. If the server asks for a longer one (`Retry-After`), the request is given up.
    pub longest_pause_s: f64,
    /// Number of concurrent requests.
    pub concurrency: usize,
    /// Folder of cached replies.
    pub cache: Option<PathBuf>,
    /// Maximum number of requests, retries included, over the judge's life.
    pub budget: Option<u64>,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            base_url: String::new(),
            model: String::new(),
            api_key_env: None,
            prompt: DEFAULT_TEMPLATE.to_owned(),
            max_tokens: 16,
            timeout_s: 60.0,
            retries: 5,
            first_pause_s: 0.5,
            longest_pause_s: 60.0,
            concurrency: 8,
            cache: None,
            budget: None,
        }
    }
}

impl EndpointConfig {
    /// Checks the options.
    pub fn check(&self, judge: &str) -> Result<()> {
        let bad = |key, reason: &str| Err(JudgeError::option(judge, key, reason));
        if let Some(reason) = wrong_with(&self.base_url) {
            return bad("base_url", &reason);
        }
        if self.model.is_empty() {
            return bad("model", "is empty; name the model");
        }
        for place in ["{prompt}", "{a}", "{b}"] {
            if !self.prompt.contains(place) {
                return bad("prompt", &format!("has no `{place}`; it needs {{prompt}}, {{a}} and {{b}}"));
            }
        }
        if self.max_tokens == 0 {
            return bad("max_tokens", "is 0; it should be 1 or more");
        }
        if self.concurrency == 0 {
            return bad("concurrency", "is 0; it should be 1 or more");
        }
        let times = [
            ("timeout_s", self.timeout_s),
            ("first_pause_s", self.first_pause_s),
            ("longest_pause_s", self.longest_pause_s),
        ];
        check_seconds(judge, &times)
    }

    pub(super) fn address(&self) -> String {
        format!("{}/chat/completions", self.base_url.trim_end_matches('/'))
    }

    pub(super) fn backoff(&self) -> Backoff {
        Backoff::from_seconds(self.first_pause_s, self.longest_pause_s)
    }
}

fn wrong_with(base_url: &str) -> Option<String> {
    http::wrong_with(base_url, "api_key_env").or_else(|| {
        let has_path = base_url.trim_end_matches('/').ends_with("/chat/completions");
        has_path.then(|| "ends with /chat/completions; remove that".to_owned())
    })
}
