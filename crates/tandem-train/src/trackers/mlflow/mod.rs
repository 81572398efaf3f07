//! MLflow: the run at a tracking server.
//!
//! `trackers.json` keeps the run's id, so a resumed run continues the same one. The server tells which
//! steps it has; these are not sent again, and what it lacks is sent from `metrics.jsonl`.

mod client;

use std::collections::{HashMap, VecDeque};
use std::env;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use tandem_judge::http::{Backoff, Key};

use self::client::{Client, Refusal};
use super::message::{Content, End, Ending, Message, Start, millis};
use super::state::StateFile;
use super::{Earlier, Tracker, Trouble};
use crate::config::MlflowConfig;
use crate::metrics::Record;

const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(60) };

// Limits of a request to log-batch, and of texts in it (`mlflow/utils/validation.py`).
// Of the 1000 entities in a request, a few are left for tags.
const METRICS: usize = 980;
const PARAMS: usize = 100;
const KEY_CHARS: usize = 250;
const PARAM_CHARS: usize = 6000;
const TAG_CHARS: usize = 8000;

/// Earlier records that are read at once.
const PORTION: usize = 1000;

const TOKEN: &str = "MLFLOW_TRACKING_TOKEN";

/// Reads the credentials that MLflow's own clients read: name and password, or a token.
pub(super) fn credentials() -> Result<Option<Key>, String> {
    let read = |name| env::var(name).ok().filter(|value| !value.is_empty());
    if let (Some(user), Some(password)) = (read("MLFLOW_TRACKING_USERNAME"), read("MLFLOW_TRACKING_PASSWORD"))
    {
        return Ok(Some(Key::basic(&user, &password)));
    }
    let wrong =
        |_| format!("logging.mlflow: the environment variable {TOKEN} is no token; correct or unset it");
    read(TOKEN).map(|_| Key::read(TOKEN)).transpose().map_err(wrong)
}

/// Tracker at a server.
pub(super) struct MlflowTracker {
    config: MlflowConfig,
    start: Arc<Start>,
    state: StateFile,
    client: Client,
    run: Option<Run>,
    /// Records of earlier processes of this run.
    earlier: Earlier,
    /// Earlier records that were read and not sent.
    backlog: VecDeque<Arc<Message>>,
    failures: usize,
}

/// The run at the server.
struct Run {
    id: String,
    has_params: bool,
    /// Step up to which the server had each metric when this process found the run.
    known: HashMap<String, u64>,
}

impl MlflowTracker {
    pub(super) fn new(config: &MlflowConfig, start: &Arc<Start>, state: StateFile, earlier: Earlier) -> Self {
        // Checked before the run.
        let client = Client::new(&config.uri, credentials().unwrap_or_default());
        Self {
            config: config.clone(),
            start: start.clone(),
            state,
            client,
            run: None,
            earlier,
            backlog: VecDeque::new(),
            failures: 0,
        }
    }

    /// Sends everything; on an error, what was sent is removed.
    fn send(&mut self, messages: &mut VecDeque<Arc<Message>>) -> Result<(), Refusal> {
        let run = match &mut self.run {
            Some(run) => run,
            None => {
                let run = self.open_run()?;
                self.run.insert(run)
            }
        };
        if !run.has_params {
            let params: Vec<_> = self.start.entries.iter().map(|(key, value)| param(key, value)).collect();
            for params in params.chunks(PARAMS) {
                self.client.log_batch(&run.id, &[], params, &[])?;
            }
            run.has_params = true;
        }
        let send = |messages: &mut VecDeque<Arc<Message>>| {
            while !messages.is_empty() {
                let Batch { num_messages, metrics, tags } = Batch::of(messages, &run.known);
                if metrics.len() + tags.len() > 0 {
                    self.client.log_batch(&run.id, &metrics, &[], &tags)?;
                }
                messages.drain(..num_messages);
            }
            Ok(())
        };
        let message = |record| Arc::new(Message::now(Content::Record(record)));
        loop {
            send(&mut self.backlog)?;
            self.backlog.extend(self.earlier.by_ref().take(PORTION).map(message));
            if self.backlog.is_empty() {
                return send(messages);
            }
        }
    }

    /// Finds the run of an earlier process, or creates one.
    fn open_run(&mut self) -> Result<Run, Refusal> {
        let MlflowConfig { uri, experiment, run } = &self.config;
        let kept = self.state.mlflow();
        if kept["uri"] == uri.as_str()
            && let Some(id) = kept["run_id"].as_str()
            && let Some(stored) = self.client.run(id)?
        {
            self.client.update_run(id, "RUNNING", None)?;
            let known = stored.steps.into_iter().collect();
            return Ok(Run { id: id.to_owned(), has_params: stored.has_params, known });
        }
        let experiment = self.client.experiment(experiment)?;
        let tags = json!([
            tag("mlflow.source.name", "tandem train"),
            tag("mlflow.source.type", "LOCAL"),
            tag("mlflow.user", &env::var("USER").unwrap_or_default()),
            tag("tandem.version", env!("CARGO_PKG_VERSION")),
            tag("tandem.folder", &self.start.output.to_string_lossy()),
            tag("tandem.id", &self.start.id),
        ]);
        let id = self.client.create_run(&experiment, run, millis(SystemTime::now()), &tags)?;
        self.state.set_mlflow(json!({ "uri": uri, "run_id": id }));
        Ok(Run { id, has_params: false, known: HashMap::new() })
    }

    fn trouble(&mut self, refusal: Refusal) -> Trouble {
        let uri = &self.config.uri;
        match refusal {
            Refusal::Passing(reason) => {
                self.failures += 1;
                let warning = format!(
                    "logging.mlflow: {uri} does not take records ({reason}); the run goes on and tries again: start \
                     the server, or correct the address and resume. metrics.jsonl has all records"
                );
                Trouble { warning, is_passing: false, pause: Some(BACKOFF.jittered(self.failures)) }
            }
            Refusal::Final { status, message, .. } => {
                let remedy = match status {
                    401 | 403 => {
                        "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and \
                                  MLFLOW_TRACKING_PASSWORD, and resume"
                    }
                    _ => "correct [logging.mlflow] and resume",
                };
                let warning = format!(
                    "logging.mlflow: {uri} refused the run with status {status} ({message}); the run goes on without \
                     it: {remedy}. metrics.jsonl has all records"
                );
                Trouble { warning, is_passing: false, pause: None }
            }
        }
    }
}

impl Tracker for MlflowTracker {
    fn key(&self) -> &'static str {
        "logging.mlflow"
    }

    fn interval(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn deliver(&mut self, messages: &mut VecDeque<Arc<Message>>) -> Result<(), Trouble> {
        match self.send(messages) {
            Ok(()) => {
                self.failures = 0;
                Ok(())
            }
            Err(refusal) => Err(self.trouble(refusal)),
        }
    }

    fn end(&mut self, end: &End, _: Instant) -> Result<(), Trouble> {
        let status = match end.ending {
            Ending::Finished => "FINISHED",
            Ending::Stopped => "KILLED",
            Ending::Failed(_) => "FAILED",
        };
        let ended = self.send(&mut VecDeque::new()).and_then(|()| {
            let id = &self.run.as_ref().expect("as opened").id;
            if let Ending::Failed(reason) = &end.ending {
                self.client.log_batch(id, &[], &[], &[tag("tandem.error", reason)])?;
            }
            self.client.update_run(id, status, Some(millis(end.time)))
        });
        ended.map_err(|refusal| self.trouble(refusal))
    }
}

/// Content of a request that the first messages of a list fill.
struct Batch {
    num_messages: usize,
    metrics: Vec<Value>,
    tags: Vec<Value>,
}

impl Batch {
    fn of(messages: &VecDeque<Arc<Message>>, known: &HashMap<String, u64>) -> Self {
        let mut batch = Self { num_messages: 0, metrics: Vec::new(), tags: Vec::new() };
        for message in messages {
            match &message.content {
                Content::Record(record) => {
                    let metrics = metrics(record, millis(message.time), known);
                    if batch.metrics.len() + metrics.len() + batch.tags.len() > METRICS
                        && batch.num_messages > 0
                    {
                        break;
                    }
                    batch.metrics.extend(metrics);
                }
                Content::Advice(advice) => {
                    let key = format!("tandem.advice.{:?}", advice.trouble);
                    batch.tags.push(tag(&key, &advice.to_string()));
                }
            }
            batch.num_messages += 1;
        }
        batch
    }
}

/// Returns the metrics of a record that the server does not have.
fn metrics(record: &Record, timestamp: u64, known: &HashMap<String, u64>) -> Vec<Value> {
    let (step, split) = (record.step(), record.split().name());
    let is_new = |key: &str| known.get(key).is_none_or(|known| step > *known);
    let named = record.finite_metrics().map(|(name, value)| (metric_name(&format!("{split}/{name}")), value));
    named
        .filter(|(key, _)| is_new(key))
        .map(|(key, value)| json!({ "key": key, "value": value, "timestamp": timestamp, "step": step }))
        .take(METRICS)
        .collect()
}

/// Replaces characters that MLflow refuses; a judge's name may have any.
fn metric_name(name: &str) -> String {
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ' ' | '/');
    name.chars().map(|c| if allowed(c) { c } else { '_' }).take(KEY_CHARS).collect()
}

fn param(key: &str, value: &str) -> Value {
    // A text without the quotes of TOML.
    let text = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    json!({ "key": metric_name(key), "value": beginning(text, PARAM_CHARS) })
}

fn tag(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": beginning(value, TAG_CHARS) })
}

fn beginning(text: &str, num_chars: usize) -> String {
    text.chars().take(num_chars).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Split;
    use crate::trackers::tests::record;

    #[test]
    fn a_batch_has_no_more_metrics_than_a_request_takes() {
        let mut many = Record::new(1, Split::Train);
        for index in 0..400 {
            many.set(&format!("m{index}"), 1.0);
        }
        let message = || Arc::new(Message::now(Content::Record(many.clone())));
        let mut messages: VecDeque<_> = (0..5).map(|_| message()).collect();
        let mut taken = Vec::new();
        while !messages.is_empty() {
            let batch = Batch::of(&messages, &HashMap::new());
            taken.push((batch.num_messages, batch.metrics.len()));
            messages.drain(..batch.num_messages);
        }
        assert_eq!(taken, [(2, 800), (2, 800), (1, 400)]);
    }

    #[test]
    fn steps_that_the_server_has_are_left_out() {
        let messages: VecDeque<_> = (1..=3).map(record).collect();
        let known = HashMap::from([("train/loss".to_owned(), 2)]);
        let batch = Batch::of(&messages, &known);
        let sent: Vec<_> = batch.metrics.iter().map(|m| (m["key"].as_str().unwrap(), &m["step"])).collect();
        assert_eq!(batch.num_messages, 3);
        assert_eq!(sent, [("train/loss", &json!(3))]);
    }

    #[test]
    fn texts_are_cut_and_names_cleaned() {
        let long = param("data.train", &format!("\"{}\"", "é".repeat(7000)));
        assert_eq!(long["value"].as_str().unwrap().chars().count(), PARAM_CHARS);
        assert_eq!(param("judges[0].name", "\"x\"")["key"], "judges_0_.name");
        assert_eq!(metric_name("train/judges/a:b%"), "train/judges/a_b_");
    }
}
