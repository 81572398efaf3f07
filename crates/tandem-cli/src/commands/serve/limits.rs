//! Limits of requests, connections and times.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tandem_train::size;

use crate::args::count;
use crate::exit::mistake;

/// Bytes of a prompt for each token of the context. Tokens of ordinary text have 3 to 5. While it is
/// tokenised, a byte takes about 250 bytes of memory.
const PROMPT_BYTES: usize = 16;
/// Least default of the tokens of a request, and of its completions of the whole context.
const REQUEST_TOKENS: usize = 1 << 16;
const WHOLE_COMPLETIONS: usize = 16;
/// Descriptors beside those of connections: files, the poll, standard streams, and connections that
/// are refused.
const OTHER_FILES: u64 = 128;

/// Limits of what clients may send, hold and wait for.
#[derive(Clone, Debug, Args)]
pub(crate) struct LimitArguments {
    /// Most prompts of a request.
    #[arg(long, value_name = "COUNT", default_value = "64", value_parser = count)]
    pub max_prompts: NonZeroUsize,
    /// Most completions of a prompt: the largest `n` of a request.
    #[arg(long, value_name = "COUNT", default_value = "128", value_parser = count)]
    pub max_n: NonZeroUsize,
    /// Most tokens that a request may ask for: prompts × `n` × `max_tokens`; default: 65536, or
    /// 16 times --context if that is more.
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub max_request_tokens: Option<NonZeroUsize>,
    /// Most bytes of a prompt or a conversation, looked at before its tokens are counted; default: 16 for
    /// each token of --context.
    #[arg(long, value_name = "BYTES", value_parser = count)]
    pub max_prompt_bytes: Option<NonZeroUsize>,
    /// Most stop strings of a request.
    #[arg(long, value_name = "COUNT", default_value = "16", value_parser = count)]
    pub max_stop_strings: NonZeroUsize,
    /// Most bytes of a stop string.
    #[arg(long, value_name = "BYTES", default_value = "256", value_parser = count)]
    pub max_stop_bytes: NonZeroUsize,
    /// Largest body of a request. All bodies that are being read may have 16 times as much together, beside
    /// 64 KiB of each.
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = body_size)]
    pub max_body: usize,
    /// Most connections; further ones get 429.
    #[arg(long, value_name = "COUNT", default_value = "512", value_parser = count)]
    pub max_connections: NonZeroUsize,
    /// Most requests that wait for their first token; further ones get 429.
    #[arg(long, value_name = "COUNT", default_value = "128", value_parser = count)]
    pub max_queue: NonZeroUsize,
    /// Seconds that the header of a request may take, from its first byte (of a new connection: from its
    /// start).
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub header_timeout: Duration,
    /// Seconds that the body of a request may take.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub body_timeout: Duration,
    /// Seconds after which a connection is closed on which nothing happens: no request begins, or no
    /// byte of a response is taken.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub idle_timeout: Duration,
    /// Seconds that requests in progress have after Ctrl-C, SIGTERM or SIGHUP. A second signal ends at once.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds_or_none)]
    pub drain_timeout: Duration,
}

impl LimitArguments {
    /// Returns the most tokens that a request may ask for, with this many positions.
    pub(super) fn request_tokens(&self, positions: usize) -> usize {
        let default = REQUEST_TOKENS.max(positions.saturating_mul(WHOLE_COMPLETIONS));
        self.max_request_tokens.map_or(default, NonZeroUsize::get)
    }

    /// Returns the most bytes of a prompt, with this many positions.
    pub(super) fn prompt_bytes(&self, positions: usize) -> usize {
        self.max_prompt_bytes.map_or(positions.saturating_mul(PROMPT_BYTES), NonZeroUsize::get)
    }

    /// Raises the limit of open files for all connections.
    ///
    /// # Errors
    /// If it may not be raised so far.
    pub(super) fn allow_connections(&self) -> anyhow::Result<()> {
        let connections = self.max_connections;
        let needed = connections.get() as u64 + OTHER_FILES;
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        // `None` is no limit.
        let Some(now) = current.filter(|&current| current < needed) else { return Ok(()) };
        setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum }).map_err(|error| {
            mistake(format!(
                "--max-connections {connections} needs {needed} open files; this process may have {now}, and not more: {error}; \
                 allow fewer connections, or raise the limit (ulimit -n)"
            ))
        })
    }
}

/// Longest time of a flag, a day.
const LONGEST: u64 = 86_400;

fn seconds(text: &str) -> Result<Duration, String> {
    match seconds_or_none(text)? {
        Duration::ZERO => Err("expected at least 1 second".to_owned()),
        time => Ok(time),
    }
}

fn seconds_or_none(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|&seconds| seconds <= LONGEST);
    seconds.map(Duration::from_secs).ok_or_else(|| format!("expected whole seconds, at most {LONGEST}"))
}

fn body_size(text: &str) -> Result<usize, &'static str> {
    let size = size::parse(text).ok_or("expected a size with its unit, for example 4MiB")?;
    usize::try_from(size).ok().filter(|size| (1..=1 << 30).contains(size)).ok_or("expected at most 1GiB")
}
