//! Requests of MLflow's REST interface (`mlflow/protos/service.proto`, version 2.0 of the paths).

use std::time::Duration;

use serde_json::{Value, json};
use tandem_judge::http::{Http, Key};

/// Longest time of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Longest reply: a run with its metrics and parameters.
const LONGEST_REPLY: u64 = 16 << 20;

/// Client of one server.
pub(super) struct Client {
    http: Http,
    uri: String,
}

/// A request without success.
#[derive(Debug, PartialEq)]
pub(super) enum Refusal {
    /// No reply came, or one that says to try later.
    Passing(String),
    /// The server refuses the request.
    Final {
        /// HTTP status.
        status: u16,
        /// `error_code` of the reply.
        code: String,
        /// Its message.
        message: String,
    },
}

/// State of a run at the server.
pub(super) struct StoredRun {
    pub has_params: bool,
    /// Metrics with the step of their last value.
    pub steps: Vec<(String, u64)>,
}

impl Client {
    pub(super) fn new(uri: &str, key: Option<Key>) -> Self {
        Self { http: Http::new(uri, key, TIMEOUT, 1, LONGEST_REPLY), uri: uri.to_owned() }
    }

    /// Returns the id of the experiment, which is created if there is none.
    pub(super) fn experiment(&self, name: &str) -> Result<String, Refusal> {
        let by_name = || self.get(&format!("experiments/get-by-name?experiment_name={}", encoded(name)));
        let found = match by_name() {
            Err(Refusal::Final { code, .. }) if code == "RESOURCE_DOES_NOT_EXIST" => {
                match self.post("experiments/create", &json!({ "name": name })) {
                    // Another run was faster.
                    Err(Refusal::Final { code, .. }) if code == "RESOURCE_ALREADY_EXISTS" => by_name()?,
                    created => return text(&created?, "/experiment_id"),
                }
            }
            found => found?,
        };
        text(&found, "/experiment/experiment_id")
    }

    /// Creates a run and returns its id.
    pub(super) fn create_run(
        &self,
        experiment: &str,
        name: &str,
        time: u64,
        tags: &Value,
    ) -> Result<String, Refusal> {
        let body = json!({ "experiment_id": experiment, "run_name": name, "start_time": time, "tags": tags });
        text(&self.post("runs/create", &body)?, "/run/info/run_id")
    }

    /// Returns the state of a run; `None` if the server has no such run.
    pub(super) fn run(&self, id: &str) -> Result<Option<StoredRun>, Refusal> {
        let run = match self.get(&format!("runs/get?run_id={}", encoded(id))) {
            Err(Refusal::Final { code, .. }) if code == "RESOURCE_DOES_NOT_EXIST" => return Ok(None),
            run => run?,
        };
        if run.pointer("/run/info/lifecycle_stage").is_some_and(|stage| stage == "deleted") {
            return Ok(None);
        }
        let list = |at| run.pointer(at).and_then(Value::as_array).into_iter().flatten();
        // An integer of 64 bits may be a text in JSON.
        let step = |metric: &Value| match &metric["step"] {
            Value::String(text) => text.parse().ok(),
            number => number.as_u64(),
        };
        let steps = list("/run/data/metrics")
            .filter_map(|metric| Some((metric["key"].as_str()?.to_owned(), step(metric)?)))
            .collect();
        Ok(Some(StoredRun { has_params: list("/run/data/params").next().is_some(), steps }))
    }

    /// Sets the status of a run, and its end if it has one.
    pub(super) fn update_run(&self, id: &str, status: &str, end: Option<u64>) -> Result<(), Refusal> {
        let mut body = json!({ "run_id": id, "status": status });
        if let Some(time) = end {
            body["end_time"] = time.into();
        }
        self.post("runs/update", &body).map(drop)
    }

    pub(super) fn log_batch(
        &self,
        id: &str,
        metrics: &[Value],
        params: &[Value],
        tags: &[Value],
    ) -> Result<(), Refusal> {
        let body = json!({ "run_id": id, "metrics": metrics, "params": params, "tags": tags });
        self.post("runs/log-batch", &body).map(drop)
    }

    fn get(&self, path: &str) -> Result<Value, Refusal> {
        self.read(self.http.get(&self.url(path)))
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value, Refusal> {
        self.read(self.http.post(&self.url(path), &body.to_string()))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.uri)
    }

    fn read(&self, reply: Result<tandem_judge::http::Reply, String>) -> Result<Value, Refusal> {
        let reply = reply.map_err(Refusal::Passing)?;
        let message = || self.http.message(&reply);
        if reply.may_pass() {
            return Err(Refusal::Passing(format!("status {}: {}", reply.status, message())));
        }
        match serde_json::from_str::<Value>(&reply.text) {
            Ok(value) if reply.status == 200 => Ok(value),
            value => {
                let code = value.ok().and_then(|value| value["error_code"].as_str().map(str::to_owned));
                let code = code.unwrap_or_default();
                Err(Refusal::Final { status: reply.status, code, message: message() })
            }
        }
    }
}

/// Returns a text that a reply has to have.
fn text(reply: &Value, at: &str) -> Result<String, Refusal> {
    reply.pointer(at).and_then(Value::as_str).map(str::to_owned).ok_or_else(|| Refusal::Final {
        status: 200,
        code: String::new(),
        message: format!("the reply has no {at}; is this an MLflow server?"),
    })
}

/// Percent-encodes a value of a query (RFC 3986).
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_travel_in_a_query() {
        assert_eq!(encoded("zephyr-7b"), "zephyr-7b");
        assert_eq!(encoded("a b&c=d/é"), "a%20b%26c%3Dd%2F%C3%A9");
    }
}
