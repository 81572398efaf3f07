//! How far preparation is, told to whoever wants to know: the library assumes no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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

/// A bar on standard error; nothing is drawn where that is not a terminal, but notes are written.
pub struct Bar {
    bar: ProgressBar,
}

impl Default for Bar {
    fn default() -> Self {
        Self { bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()) }
    }
}

impl Progress for Bar {
    fn start(&self, what: &str, total: u64) {
        let template = "{msg} [{bar:30}] {percent}% {bytes}/{total_bytes}, {eta} left";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        self.bar.set_style(style.progress_chars("=> "));
        self.bar.set_length(total);
        self.bar.set_message(what.to_string());
        self.bar.reset();
    }

    fn advance(&self, bytes: u64, _rows: u64) {
        self.bar.inc(bytes);
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn note(&self, message: &str) {
        if self.bar.is_hidden() {
            eprintln!("{message}");
        } else {
            self.bar.println(message);
        }
    }
}
