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
    // Ranks of `tandem launch` may have one file: each writes its own and puts it in place whole.
    let mut own = path.clone();
    own.push(format!(".{}", std::process::id()));
    // The message is on stderr already; a failure to write the report must not hide it.
    if std::fs::write(&own, text.to_string()).and_then(|()| std::fs::rename(&own, path)).is_err() {
        let _ = std::fs::remove_file(own);
    }
}
