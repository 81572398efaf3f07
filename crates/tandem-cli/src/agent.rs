//! What torchrun's agent wants to know of a rank that failed.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

/// Writes the error to the file that the agent named in `TORCHELASTIC_ERROR_FILE`, in the form in which PyTorch's own
/// processes do: then its summary shows the message instead of an exit code.
pub fn report(error: &anyhow::Error) {
    let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE") else { return };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let extra = json!({ "py_callstack": "", "timestamp": seconds.to_string() });
    let text = json!({ "message": { "message": tandem_train::chain(&**error), "extraInfo": extra } });
    // The message stands on stderr too; a summary that cannot be written must not hide it behind another error.
    let _ = std::fs::write(path, text.to_string());
}
