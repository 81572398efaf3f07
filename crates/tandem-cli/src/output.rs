//! Output of a command's result.

use std::io::{self, Write};

use anyhow::Context;

/// Writes lines to stdout. A reader that closes the pipe early (`tandem data run.toml | head`) is
/// no error.
///
/// # Errors
/// If stdout cannot be written for another reason, such as a full disk behind it.
pub(crate) fn print_lines(lines: &[String]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let written = lines.iter().try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}
