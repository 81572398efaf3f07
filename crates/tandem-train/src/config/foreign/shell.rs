//! Commands of a shell script: words without quotation marks, redirections and the shell's operators, and
//! with the variables that the script assigns.

use std::collections::HashMap;

/// A command up to the shell's next operator.
pub(super) struct Command {
    /// Line of the first word's logical line, from 1.
    pub line: usize,
    pub words: Vec<Word>,
    /// Whether a quotation mark stays open until the end of the line.
    pub is_open: bool,
}

/// A word of a command.
#[derive(Clone, Default)]
pub(super) struct Word {
    pub text: String,
    /// First variable, as it is written, whose value the script does not tell.
    pub unknown: Option<String>,
}

/// Returns the commands of a text in their order.
pub(super) fn commands(text: &str) -> Vec<Command> {
    let mut variables = HashMap::new();
    let mut commands = Vec::new();
    // Open compound commands: what they assign may never run.
    let mut depth = 0_usize;
    for (line, text) in logical_lines(text) {
        let mut lexer = Lexer { rest: &text, variables: &mut variables, words: Vec::new(), word: None };
        let mut is_conditional = false;
        loop {
            let before = lexer.rest;
            let end = lexer.command();
            let words = std::mem::take(&mut lexer.words);
            match words.first().map(|word| word.text.as_str()) {
                Some("if" | "case" | "for" | "while" | "until" | "select" | "function") => depth += 1,
                Some("fi" | "esac" | "done") => depth = depth.saturating_sub(1),
                _ => {}
            }
            // The variable of a loop has several values.
            if let [word, variable, ..] = &words[..]
                && word.text == "for"
            {
                lexer.variables.remove(&variable.text);
            }
            lexer.assign(&words, depth > 0 || is_conditional);
            // The command behind `||`, or behind a test's `&&`, may not run.
            let read = &before[..before.len() - lexer.rest.len()];
            let is_test = words.first().is_some_and(|word| matches!(word.text.as_str(), "[" | "[[" | "test"));
            is_conditional = lexer.rest.starts_with('|') && read.ends_with('|')
                || lexer.rest.starts_with('&') && read.ends_with('&') && is_test
                || is_conditional && words.is_empty();
            if !words.is_empty() {
                commands.push(Command { line, words, is_open: end == End::OpenQuote });
            }
            if end != End::Operator {
                break;
            }
        }
    }
    commands
}

/// Lines with their continuations, and the number of their first.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut continues = false;
    for (index, line) in text.lines().enumerate() {
        let (line_text, goes_on) = match line.trim_end().strip_suffix('\\') {
            Some(start) => (start, true),
            None => (line, false),
        };
        match lines.last_mut().filter(|_| continues) {
            Some((_, all)) => {
                all.push(' ');
                all.push_str(line_text.trim());
            }
            None => lines.push((index + 1, line_text.trim().trim_start_matches("$ ").to_owned())),
        }
        continues = goes_on;
    }
    lines
}

/// Returns name and value of `NAME=value` before or instead of a command.
pub(super) fn assignment(word: &str) -> Option<(&str, &str)> {
    word.split_once('=').filter(|(name, _)| !name.is_empty() && !name.starts_with('-') && !name.contains('/'))
}

#[derive(PartialEq)]
enum End {
    Line,
    Operator,
    OpenQuote,
}

struct Lexer<'a> {
    rest: &'a str,
    variables: &'a mut HashMap<String, String>,
    words: Vec<Word>,
    /// The word that is being read.
    word: Option<Word>,
}

impl Lexer<'_> {
    /// Reads words up to an operator or the end of the line.
    fn command(&mut self) -> End {
        // The next word is the file of a redirection.
        let mut is_file = false;
        loop {
            let next = self.next();
            let ends_word = next.is_none_or(|c| c.is_whitespace() || "|&;()<>".contains(c));
            if ends_word {
                match self.word.take() {
                    Some(_) if std::mem::take(&mut is_file) => {}
                    // The number of `2>`.
                    Some(word)
                        if matches!(next, Some('<' | '>'))
                            && word.text.chars().all(|c| c.is_ascii_digit()) => {}
                    Some(word) => self.words.push(word),
                    None => {}
                }
            }
            match next {
                None => return End::Line,
                Some('#') if self.word.is_none() => return End::Line,
                Some('<' | '>') => {
                    self.redirection();
                    is_file = true;
                }
                Some('&') if self.rest.starts_with('>') => {
                    self.redirection();
                    is_file = true;
                }
                Some('|' | '&' | ';' | '(' | ')') => return End::Operator,
                Some(_) if ends_word => {}
                Some('\'') => {
                    let Some((text, rest)) = self.rest.split_once('\'') else { return End::OpenQuote };
                    self.rest = rest;
                    self.open().text.push_str(text);
                }
                Some('"') => {
                    if !self.quoted() {
                        return End::OpenQuote;
                    }
                }
                Some('\\') => {
                    let escaped = self.next();
                    self.open().text.extend(escaped);
                }
                Some(c @ ('$' | '`')) => self.expand(c, false),
                Some(c) => self.open().text.push(c),
            }
        }
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let next = chars.next();
        self.rest = chars.as_str();
        next
    }

    fn open(&mut self) -> &mut Word {
        self.word.get_or_insert_default()
    }

    /// Passes over the signs of a redirection, as `>>`, `>&` and `<<<`.
    fn redirection(&mut self) {
        self.rest = self.rest.trim_start_matches(['<', '>', '&', '|']);
    }

    /// Reads text between double quotation marks; false if the second one is missing.
    fn quoted(&mut self) -> bool {
        self.open();
        loop {
            match self.next() {
                None => return false,
                Some('"') => return true,
                Some('\\') if self.rest.starts_with(['$', '`', '"', '\\']) => {
                    let escaped = self.next();
                    self.open().text.extend(escaped);
                }
                Some(c @ ('$' | '`')) => self.expand(c, true),
                Some(c) => self.open().text.push(c),
            }
        }
    }

    /// Puts a variable's value into the word, or several words of a value with blanks outside of quotation marks.
    fn expand(&mut self, sign: char, is_quoted: bool) {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let rest = self.rest;
        let (len, name) = match rest.chars().next() {
            _ if sign == '`' => (rest.find('`').map_or(rest.len(), |end| end + 1), ""),
            Some('{') => {
                let end = rest.find('}').unwrap_or(rest.len());
                ((end + 1).min(rest.len()), &rest[1..end])
            }
            Some('(') => (closing(rest), ""),
            Some(c) if is_name(c) && !c.is_ascii_digit() => {
                let len = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
                (len, &rest[..len])
            }
            Some(c) if c.is_ascii_digit() || "@*#?$!-".contains(c) => (1, &rest[..1]),
            _ => (0, ""),
        };
        let written = format!("{sign}{}", &rest[..len]);
        self.rest = &rest[len..];
        match self.variables.get(name).cloned() {
            Some(value) if is_quoted => self.open().text.push_str(&value),
            Some(value) => {
                let mut parts = value.split_whitespace().peekable();
                while let Some(part) = parts.next() {
                    self.open().text.push_str(part);
                    if parts.peek().is_some() {
                        self.words.extend(self.word.take());
                    }
                }
            }
            None => {
                let word = self.open();
                word.text.push_str(&written);
                if len > 0 {
                    word.unknown.get_or_insert(written);
                }
            }
        }
    }

    /// Keeps what a command of assignments alone says; where it may not run, the value is unknown.
    fn assign(&mut self, words: &[Word], may_not_run: bool) {
        let is_keyword = |word: &Word| matches!(word.text.as_str(), "then" | "else" | "do" | "{" | "elif");
        let words = if words.first().is_some_and(is_keyword) { &words[1..] } else { words };
        let is_export =
            |word: &Word| matches!(word.text.as_str(), "export" | "readonly" | "declare" | "local");
        let words = if words.first().is_some_and(is_export) { &words[1..] } else { words };
        if words.iter().any(|word| assignment(&word.text).is_none()) {
            return;
        }
        for word in words {
            let Some((name, value)) = assignment(&word.text) else { continue };
            match word.unknown {
                None if !may_not_run => self.variables.insert(name.to_owned(), value.to_owned()),
                _ => self.variables.remove(name),
            };
        }
    }
}

/// Returns the length of a text in parentheses, those inside included.
fn closing(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' if depth == 1 => return at + 1,
            ')' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}
