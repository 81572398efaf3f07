//! Progress of preparing data, reported to an observer.

/// Observer of long work. All methods do nothing by default.
pub trait Progress: Sync {
    /// Called when work on `total` bytes of input begins.
    fn start(&self, what: &str, total: u64) {
        let _ = (what, total);
    }

    /// Called after `bytes` and `rows` more are done.
    fn advance(&self, bytes: u64, rows: u64) {
        let _ = (bytes, rows);
    }

    /// Called when the work ends.
    fn finish(&self) {}

    /// Called with a message for the user.
    fn note(&self, message: &str) {
        let _ = message;
    }
}

/// Observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}
