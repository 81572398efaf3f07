//! Messages of a command on stderr, as lines for a person or as JSON for a program.
//!
//! Every crate speaks through `tracing`. Results go to stdout (`output`), answers of a conversation to
//! the terminal; neither is a log.

use std::fmt::{self, Write as _};
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::output::{message, printable};

/// Options about messages, of every command.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct LogArguments {
    /// Form of the messages on stderr.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT", overrides_with = "log_format")]
    pub log_format: LogFormat,
    /// Show warnings and errors only.
    #[arg(long, short, global = true, overrides_with = "quiet")]
    pub quiet: bool,
    /// Show also what was found, opened and measured.
    #[arg(long, short, global = true, overrides_with = "verbose", conflicts_with = "quiet")]
    pub verbose: bool,
}

/// Form of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for a person, and a live line on a terminal.
    Text,
    /// An object per line: time, level, message, and metrics where they are.
    Json,
}

/// Name of the field with an object of JSON.
const METRICS: &str = "metrics";

/// Live line that other lines must not cross.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

impl LogArguments {
    /// Begins to write messages. Before this, and for `--help`, there are none.
    pub(crate) fn begin(self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::WARN,
            (_, true) => LevelFilter::DEBUG,
            _ => LevelFilter::INFO,
        };
        let rank = std::env::var("RANK").ok().and_then(|rank| rank.parse().ok());
        let lines = Lines { format: self.log_format, level, rank };
        // Only tests could have set another one.
        let _ = tracing::subscriber::set_global_default(Registry::default().with(lines));
    }

    /// The options again, for a command that this one starts.
    pub(crate) fn words(self) -> Vec<String> {
        let format = (self.log_format == LogFormat::Json).then_some("--log-format=json");
        let level = [(self.quiet, "--quiet"), (self.verbose, "--verbose")];
        let level = level.into_iter().filter_map(|(is_set, word)| is_set.then_some(word));
        format.into_iter().chain(level).map(str::to_owned).collect()
    }
}

/// Returns whether a live line has its place: a person looks at a terminal and wants to know.
pub(crate) fn is_live() -> bool {
    std::io::IsTerminal::is_terminal(&std::io::stderr())
        && tracing::enabled!(target: "tandem::live", Level::INFO)
}

/// Registers the live line, or none.
pub(crate) fn set_bar(bar: Option<ProgressBar>) {
    *BAR.lock().unwrap_or_else(PoisonError::into_inner) = bar;
}

/// Writes a line above the live one.
fn write(line: &str) {
    // Where nobody reads stderr any longer, work goes on.
    let write = || drop(writeln!(std::io::stderr().lock(), "{line}"));
    match &*BAR.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(bar) if !bar.is_hidden() => bar.suspend(write),
        _ => write(),
    }
}

/// Writer of events as lines.
struct Lines {
    format: LogFormat,
    level: LevelFilter,
    /// Rank of this process, where a launcher started it.
    rank: Option<u64>,
}

impl<S: Subscriber> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        let is_own = metadata.target().starts_with("tandem");
        // A live line among objects could not be parsed.
        let is_shown = metadata.target() != "tandem::live" || self.format == LogFormat::Text;
        is_own && is_shown && *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        write(&match self.format {
            LogFormat::Text => fields.text(event.metadata()),
            LogFormat::Json => fields.json(event.metadata(), self.rank),
        });
    }
}

/// Message and fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let value = format!("{value:?}");
        match field.name() {
            "message" => self.message = value,
            name => self.others.push((name, value)),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.others.push((name, value.to_owned())),
        }
    }
}

impl Fields {
    fn text(self, metadata: &Metadata<'_>) -> String {
        let message = message(&self.message);
        let mut line = match *metadata.level() {
            Level::ERROR => format!("error: {message}"),
            Level::WARN => format!("warning: {message}"),
            Level::INFO => message.into_owned(),
            _ => format!("debug: {message}"),
        };
        for (name, value) in self.others.iter().filter(|(name, _)| *name != METRICS) {
            let _ = write!(line, "  {name} {}", printable(value));
        }
        line
    }

    fn json(self, metadata: &Metadata<'_>, rank: Option<u64>) -> String {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let level = metadata.level().as_str().to_lowercase();
        let mut object = Map::new();
        object.insert("time".to_owned(), time.into());
        object.insert("level".to_owned(), level.into());
        object.extend(rank.map(|rank| ("rank".to_owned(), rank.into())));
        object.insert("message".to_owned(), self.message.into());
        for (name, value) in self.others {
            let parsed = (name == METRICS).then(|| serde_json::from_str(&value).ok()).flatten();
            object.insert(name.to_owned(), parsed.unwrap_or(Value::String(value)));
        }
        Value::Object(object).to_string()
    }
}
