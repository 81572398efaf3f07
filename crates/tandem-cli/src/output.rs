//! Output of a command's result, and what becomes of text that others wrote.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;

use anyhow::Context;

use crate::exit::mistake;

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

/// Returns whether stdout may have colours: a terminal that knows them, where the user wants them
/// (<https://no-color.org>).
pub(crate) fn has_colours() -> bool {
    let [no_color, term] = ["NO_COLOR", "TERM"].map(std::env::var_os);
    io::stdout().is_terminal() && allows_colours(no_color.as_deref(), term.as_deref())
}

fn allows_colours(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

/// Writes lines to stdout that a model or a file wrote: as they are to a pipe or a file, [`printable`] on
/// a terminal.
///
/// # Errors
/// As [`print_lines`].
pub(crate) fn print_texts(lines: &[String]) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() {
        return print_lines(lines);
    }
    print_lines(&lines.iter().map(|line| printable(line).into_owned()).collect::<Vec<_>>())
}

/// Returns a text without characters that a terminal obeys instead of showing: control characters but
/// line ends and tabs, and marks that turn the direction of text. They are shown as Rust writes them.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let is_obeyed = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_obeyed(c) {
            // A string's formatter does not fail.
            let _ = write!(shown, "{}", c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Longest message: names of a file may have any length.
const LONGEST_MESSAGE: usize = 16 << 10;

/// Returns a message for a person, [`printable`], and cut in the middle if it is very long.
pub(crate) fn message(text: &str) -> Cow<'_, str> {
    if text.len() <= LONGEST_MESSAGE {
        return printable(text);
    }
    let (mut start, mut end) = (LONGEST_MESSAGE * 3 / 4, text.len() - LONGEST_MESSAGE / 4);
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    while !text.is_char_boundary(end) {
        end += 1;
    }
    Cow::Owned(
        printable(&format!("{} … {} bytes … {}", &text[..start], end - start, &text[end..])).into_owned(),
    )
}

/// Returns a text without characters that end a line or that a terminal obeys: they are shown as Rust writes them.
pub(crate) fn on_one_line(text: &str) -> String {
    printable(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// Refuses to replace a file that is no page, neither by its name nor by how it begins.
pub(crate) fn refuse_other_file(option: &str, path: &Path) -> anyhow::Result<()> {
    const BEGIN: &[u8] = b"<!doctype html>";
    // Reading of a pipe would wait for what is written to it.
    if fs::metadata(path).is_ok_and(|facts| !facts.is_file()) {
        return Err(mistake(format!(
            "{option} {}: it is not a regular file; give another name",
            path.display()
        )));
    }
    let mut begin = [0; BEGIN.len()];
    let is_page = match fs::File::open(path).and_then(|mut file| file.read_exact(&mut begin)) {
        Ok(()) => begin.eq_ignore_ascii_case(BEGIN),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let is_named = path.extension().is_some_and(|name| ["html", "htm"].iter().any(|page| name == *page));
    if is_page || is_named {
        return Ok(());
    }
    Err(mistake(format!(
        "{option} {}: there is a file that is no page, and it would be lost; give another name",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_variable_leaves_colours_and_a_dumb_terminal_has_none() {
        let allows = |no_color: Option<&str>, term: Option<&str>| {
            allows_colours(no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert!(allows(None, Some("xterm")) && allows(Some(""), Some("xterm")) && allows(None, None));
        assert!(!allows(Some("1"), Some("xterm")) && !allows(None, Some("dumb")) && !allows(Some("0"), None));
    }

    #[test]
    fn text_of_others_moves_no_cursor() {
        assert_eq!(printable("a\tb\nü"), "a\tb\nü");
        assert_eq!(
            printable("a\x1b[2Jb\r\u{9b}0m\0\u{202e}c\x07"),
            r"a\u{1b}[2Jb\r\u{9b}0m\u{0}\u{202e}c\u{7}"
        );
    }

    #[test]
    fn a_message_has_a_length() {
        let text = format!("begin{}end", "ü".repeat(1 << 20));
        let short = message(&text);
        assert!(short.len() < LONGEST_MESSAGE + 40, "{}", short.len());
        assert!(short.starts_with("beginü") && short.ends_with("üend") && short.contains(" bytes … "));
    }
}
