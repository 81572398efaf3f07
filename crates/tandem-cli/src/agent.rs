//! Error report of a failed rank for torchrun's agent.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

/// Writes the error to the file named by `TORCHELASTIC_ERROR_FILE` in PyTorch's format. The agent's
/// summary then shows the message instead of an exit code.
pub(crate) fn report(error: &anyhow::Error) {
    let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE") else { return };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let extra = json!({ "py_callstack": "", "timestamp": seconds.to_string() });
    let text = json!({ "message": { "message": tandem_train::chain(&**error), "extraInfo": extra } });
    // The message is on stderr already; a failure to write the report must not hide it.
    let _ = std::fs::write(path, text.to_string());
}
