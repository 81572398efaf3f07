//! How far preparation is, told to whoever wants to know: the library assumes no terminal.

/// Hears about the progress of long work. All methods do nothing unless overridden.
pub trait Progress: Sync {
    /// Work on `total` bytes of input begins.
    fn start(&self, what: &str, total: u64) {
        let _ = (what, total);
    }

    /// So many bytes and rows are done since the last call.
    fn advance(&self, bytes: u64, rows: u64) {
        let _ = (bytes, rows);
    }

    /// The work is over.
    fn finish(&self) {}

    /// Something that the user should read.
    fn note(&self, message: &str) {
        let _ = message;
    }
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}
