//! Rewriting of a chat template's source before it is compiled.
//!
//! Three things that the engine lacks are added to the source, as filters (see
//! [`chat_template`](crate::text::chat_template)):
//! * `{% generation %}` becomes a filter block;
//! * operators that copy text (`+`, `~`, `*`) charge their operands to the run's budget, and `~`
//!   joins values as Python prints them;
//! * in a marked template, loops over messages write a mark where a message begins.
//!
//! Comments, raw blocks and string literals stay as they are.

use std::fmt::Write;
use std::ops::Range;

/// Filter that charges a value and returns it.
pub(super) const CHARGE: &str = "__charge";
/// Filter that charges a value and returns its text, as `str` in Python.
pub(super) const CHARGE_TEXT: &str = "__charge_text";
/// Filter that multiplies two values within the budget.
pub(super) const MULTIPLY: &str = "__multiply";
/// Filter that refuses a value which contains the namespace it is stored in.
pub(super) const ACYCLIC: &str = "__acyclic";
/// Filter of a block that charges the text of a loop's or a macro's body.
pub(super) const BODY: &str = "__body";
/// Filter of a `{% generation %}` block.
pub(super) const GENERATION: &str = "__generation";
/// Filters of blocks before a loop, at a loop variable, at an assigned variable, and after a loop.
pub(super) const LOOP_MARKS: [&str; 4] = ["__loop_open", "__loop_item", "__loop_assigned", "__loop_close"];

/// Returns the source with its additions; `marked` adds the marks of loops.
pub(super) fn rewrite(source: &str, marked: bool) -> String {
    // As Jinja, whose templates have one kind of line end.
    let source = &source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len() * 2);
    let mut copied = 0;
    for tag in tags(source) {
        out.push_str(&source[copied..tag.outer.start]);
        copied = tag.outer.end;
        tag.write(&mut out, source, marked);
    }
    out.push_str(&source[copied..]);
    out
}

/// Longest template, in bytes.
const MAX_LENGTH: usize = 256 << 10;
/// Maximum number of tags.
const MAX_TAGS: usize = 5_000;
/// Maximum number of words, literals and signs of a tag. The engine calls itself for each of a chain.
const MAX_TOKENS: usize = 1_000;

/// Refuses a template that is too large to be compiled.
pub(super) fn check(source: &str) -> Result<(), String> {
    if source.len() > MAX_LENGTH {
        return Err(format!(
            "a template of {} bytes; at most {} KiB are read",
            source.len(),
            MAX_LENGTH >> 10
        ));
    }
    let tags = tags(source);
    if tags.len() > MAX_TAGS {
        return Err(format!("a template of {} tags; at most {MAX_TAGS} are allowed", tags.len()));
    }
    let after = tags.last().map_or(0, |tag| tag.outer.end);
    // The rest may begin with a tag that does not end.
    let starts = ["{{", "{%"].into_iter().filter_map(|start| source[after..].find(start));
    let unended = starts.min().map(|start| after + start..source.len());
    for inner in tags.into_iter().map(|tag| tag.inner).chain(unended) {
        let length = tokens(&source[inner.clone()]).len();
        if length > MAX_TOKENS {
            let line = 1 + source[..inner.start].matches('\n').count();
            return Err(format!(
                "line {line}: a tag of {length} words and signs; at most {MAX_TOKENS} are allowed"
            ));
        }
    }
    Ok(())
}

/// Returns whether a template has `{% generation %}` blocks.
pub(super) fn has_generation(source: &str) -> bool {
    tags(source).iter().any(|tag| tag.is_statement && tag.words(source).next() == Some("generation"))
}

/// An expression or a statement: `{{ … }}` or `{% … %}`.
struct Tag {
    is_statement: bool,
    /// The whole tag.
    outer: Range<usize>,
    /// The text between the delimiters and their white-space control.
    inner: Range<usize>,
}

/// Finds the tags outside comments and raw blocks.
fn tags(source: &str) -> Vec<Tag> {
    let mut tags = Vec::new();
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        at = start + 1;
        let rest = &source[start..];
        if rest.starts_with("{#") {
            at = rest.find("#}").map_or(source.len(), |end| start + end + 2);
            continue;
        }
        let is_statement = rest.starts_with("{%");
        if !is_statement && !rest.starts_with("{{") {
            continue;
        }
        let close = if is_statement { "%}" } else { "}}" };
        let Some(length) = tag_length(&rest[2..], close) else { return tags };
        let (mut from, mut to) = (start + 2, start + 2 + length);
        at = to + 2;
        if source[from..to].starts_with(['-', '+']) {
            from += 1;
        }
        if source[from..to].ends_with(['-', '+']) {
            to -= 1;
        }
        let tag = Tag { is_statement, outer: start..at, inner: from..to };
        if is_statement && tag.words(source).next() == Some("raw") {
            let end = source[at..].match_indices("{%").find(|(i, _)| {
                let text = source[at + i + 2..].trim_start_matches(['-', '+']).trim_start();
                text.starts_with("endraw")
            });
            at = end.map_or(source.len(), |(i, _)| at + i + 2);
            continue;
        }
        tags.push(tag);
    }
    tags
}

/// Returns the bytes up to a tag's end, which no bracket or string literal hides.
fn tag_length(text: &str, close: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut i, mut depth) = (0, 0usize);
    while i < bytes.len() {
        if depth == 0 && text.as_bytes()[i..].starts_with(close.as_bytes()) {
            return Some(i);
        }
        match bytes[i] {
            b'"' | b'\'' => i = string_end(bytes, i) - 1,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        i += 1;
    }
    None
}

/// Returns the end of the string literal that starts at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < bytes.len() && bytes[i] != bytes[start] {
        i += if bytes[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(bytes.len())
}

impl Tag {
    fn words<'s>(&self, source: &'s str) -> impl Iterator<Item = &'s str> {
        source[self.inner.clone()]
            .split(|c: char| c.is_whitespace() || "(),=".contains(c))
            .filter(|w| !w.is_empty())
    }

    fn write(&self, out: &mut String, source: &str, marked: bool) {
        let opening = &source[self.outer.start..self.inner.start];
        let closing = &source[self.inner.end..self.outer.end];
        let inner = &source[self.inner.clone()];
        if !self.is_statement {
            let _ = write!(out, "{opening}{}{closing}", charged(inner));
            return;
        }
        let words: Vec<_> = self.words(source).take(4).collect();
        let block = |filter: &str, opening: &str, closing: &str| {
            format!("{opening} filter {filter} %}}{{% endfilter {closing}")
        };
        match words[..] {
            ["generation"] => {
                let _ = write!(out, "{opening} filter {GENERATION} {closing}");
            }
            ["endgeneration"] => {
                let _ = write!(out, "{opening} endfilter {closing}");
            }
            ["for", name, ..] => {
                let mut opening = opening;
                if marked {
                    out.push_str(&block(LOOP_MARKS[0], opening, "%}"));
                    opening = "{%";
                }
                let _ = write!(out, "{opening}{}%}}", charged(inner));
                let single = words.get(2) == Some(&"in");
                if marked && single {
                    out.push_str(&block(&format!("{}({name})", LOOP_MARKS[1]), "{%", "%}"));
                }
                out.push_str(&block(
                    &format!("{BODY}({})", body_length(source, self.outer.end)),
                    "{%",
                    closing,
                ));
            }
            ["endfor"] if marked => {
                let _ = write!(out, "{opening}{inner}%}}{}", block(LOOP_MARKS[3], "{%", closing));
            }
            ["macro" | "call" | "block", ..] => {
                let length = body_length(source, self.outer.end);
                let _ = write!(out, "{opening}{}%}}", charged(inner));
                out.push_str(&block(&format!("{BODY}({length})"), "{%", closing));
            }
            ["set", name, ..] => {
                let Some((target, value)) = assignment(inner) else {
                    let _ = write!(out, "{opening}{inner}{closing}");
                    return;
                };
                if let Some((object, _)) = target.trim()["set".len()..].trim().split_once('.') {
                    let value = charged(value);
                    let _ = write!(out, "{opening}{target}=({value})|{ACYCLIC}({object}) {closing}");
                } else if marked && !target.contains(',') {
                    let _ = write!(out, "{opening}{target}={}%}}", charged(value));
                    out.push_str(&block(&format!("{}({name})", LOOP_MARKS[2]), "{%", closing));
                } else {
                    let _ = write!(out, "{opening}{target}={}{closing}", charged(value));
                }
            }
            _ => {
                let _ = write!(out, "{opening}{}{closing}", charged(inner));
            }
        }
    }
}

/// Splits `set target = value`; a `set` block has no value.
fn assignment(inner: &str) -> Option<(&str, &str)> {
    let bytes = inner.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        match bytes[i] {
            b'|' | b'"' | b'\'' | b'(' => return None,
            b'=' => return Some((&inner[..i], &inner[i + 1..])),
            _ => i += 1,
        }
    }
    None
}

/// Returns a bound on the text that one run of a loop's or macro's body writes by itself: all text
/// outside tags and comments from there on.
fn body_length(source: &str, start: usize) -> usize {
    let rest = &source[start..];
    let mut text = 0;
    let mut copied = 0;
    for tag in tags(rest) {
        text += plain_length(&rest[copied..tag.outer.start]);
        copied = tag.outer.end;
    }
    text + plain_length(&rest[copied..])
}

/// Returns the bytes of a text outside comments, without surrounding white space.
fn plain_length(text: &str) -> usize {
    let mut length = 0;
    let mut rest = text;
    while let Some(start) = rest.find("{#") {
        length += rest[..start].trim().len();
        rest = rest[start..].find("#}").map_or("", |end| &rest[start + end + 2..]);
    }
    length + rest.trim().len()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Name,
    Number,
    Text,
    Open,
    Close,
    Operator,
}

/// Words that end no operand.
const KEYWORDS: [&str; 12] =
    ["if", "elif", "else", "in", "is", "not", "and", "or", "for", "set", "do", "filter"];

/// Rewrites an expression's operators that copy text.
fn charged(text: &str) -> String {
    let tokens = tokens(text);
    let at = |i: usize| tokens.get(i).map_or("", |(_, range)| &text[range.clone()]);
    let ends_operand = |i: usize| match tokens[i].0 {
        Kind::Name => !KEYWORDS.contains(&at(i)),
        Kind::Operator | Kind::Open => false,
        Kind::Number | Kind::Text | Kind::Close => true,
    };
    let multiplies = |i: usize| matches!(at(i), "*" | "/" | "//" | "%" | "**");
    let literal = |i: usize, j: usize| i == j && matches!(tokens[i].0, Kind::Number | Kind::Text);
    // (byte, order, inserted text)
    let mut insertions: Vec<(usize, String)> = Vec::new();
    let mut removed: Vec<usize> = Vec::new();
    for i in 1..tokens.len() {
        if !matches!(at(i), "+" | "~" | "*") || !ends_operand(i - 1) {
            continue;
        }
        let left = operand_start(text, &tokens, i - 1);
        let Some(right) = operand_end(text, &tokens, i + 1) else { continue };
        let follows = |next: &str| at(right + 1) == next;
        if at(i) == "*" {
            let (mut first, mut last) = (left, right);
            while first > 1 && multiplies(first - 1) && ends_operand(first - 2) {
                first = operand_start(text, &tokens, first - 2);
            }
            while at(last + 1) == "**" {
                let Some(end) = operand_end(text, &tokens, last + 2) else { break };
                last = end;
            }
            if at(last + 1) != "is" {
                insertions.push((tokens[first].1.start, "(".into()));
                insertions.push((tokens[i].1.start, format!(")|{MULTIPLY}(")));
                insertions.push((tokens[last].1.end, ")".into()));
                removed.push(i);
            }
            continue;
        }
        let filter = |alone: bool| if at(i) == "~" && alone { CHARGE_TEXT } else { CHARGE };
        let product = left > 0 && multiplies(left - 1);
        let tested = left > 0 && at(left - 1) == "is";
        if !literal(left, i - 1) && !tested {
            insertions.push((tokens[i - 1].1.end, format!("|{}", filter(!product))));
        }
        let chained = follows("+") || follows("~");
        if !literal(i + 1, right) && !chained && !follows("is") && !multiplies(right + 1) {
            insertions.push((tokens[right].1.end, format!("|{}", filter(true))));
        }
    }
    insertions.sort_by_key(|(byte, _)| *byte);
    let mut out = String::with_capacity(text.len() + 16 * insertions.len());
    let mut copied = 0;
    for (byte, inserted) in insertions {
        out.push_str(&text[copied..byte]);
        out.push_str(&inserted);
        copied = byte;
        // The operator that became a filter's parenthesis.
        if removed.iter().any(|&i| tokens[i].1.start == byte && inserted.ends_with('(')) {
            copied += 1;
        }
    }
    out.push_str(&text[copied..]);
    out
}

/// Returns the first token of the operand whose last token is `end`: names, calls, subscripts and
/// filters.
fn operand_start(text: &str, tokens: &[(Kind, Range<usize>)], end: usize) -> usize {
    let mut i = end;
    loop {
        if tokens[i].0 == Kind::Close {
            let mut depth = 1;
            while i > 0 && depth > 0 {
                i -= 1;
                match tokens[i].0 {
                    Kind::Close => depth += 1,
                    Kind::Open => depth -= 1,
                    _ => {}
                }
            }
            // A call or a subscript continues to the left; a parenthesis of its own does not.
            let callable = i > 0
                && (tokens[i - 1].0 == Kind::Close
                    || tokens[i - 1].0 == Kind::Text
                    || tokens[i - 1].0 == Kind::Name && !KEYWORDS.contains(&&text[tokens[i - 1].1.clone()]));
            if callable {
                i -= 1;
                continue;
            }
            return i;
        }
        match i.checked_sub(1).map(|before| &text[tokens[before].1.clone()]) {
            Some("." | "|") if i >= 2 => i -= 2,
            _ => return i,
        }
    }
}

/// Returns the last token of the operand that starts at `start`.
fn operand_end(text: &str, tokens: &[(Kind, Range<usize>)], start: usize) -> Option<usize> {
    let at = |i: usize| tokens.get(i).map_or("", |(_, range)| &text[range.clone()]);
    let mut i = start;
    while matches!(at(i), "-" | "+" | "not") {
        i += 1;
    }
    if tokens.get(i)?.0 == Kind::Open {
        i = closing(tokens, i)?;
    }
    loop {
        match at(i + 1) {
            "." | "|" => i += 2,
            "(" | "[" => i = closing(tokens, i + 1)?,
            _ => return (i < tokens.len()).then_some(i),
        }
    }
}

fn closing(tokens: &[(Kind, Range<usize>)], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (i, (kind, _)) in tokens.iter().enumerate().skip(open) {
        match kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

fn tokens(text: &str) -> Vec<(Kind, Range<usize>)> {
    let bytes = text.as_bytes();
    let mut tokens: Vec<(Kind, Range<usize>)> = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        let start = i;
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80;
        let kind = match bytes[i] {
            b if b.is_ascii_whitespace() => {
                i += 1;
                continue;
            }
            b'"' | b'\'' => {
                i = string_end(bytes, i);
                Kind::Text
            }
            b if b.is_ascii_digit() => {
                while i < bytes.len()
                    && (word(bytes[i])
                        || bytes[i] == b'.' && bytes.get(i + 1).is_some_and(u8::is_ascii_digit))
                {
                    i += 1;
                }
                Kind::Number
            }
            b if word(b) => {
                while i < bytes.len() && word(bytes[i]) {
                    i += 1;
                }
                Kind::Name
            }
            b'(' | b'[' | b'{' => {
                i += 1;
                Kind::Open
            }
            b')' | b']' | b'}' => {
                i += 1;
                Kind::Close
            }
            _ => {
                let double = ["**", "//", "==", "!=", "<=", ">="].iter().any(|op| text[i..].starts_with(op));
                i += if double { 2 } else { 1 };
                Kind::Operator
            }
        };
        tokens.push((kind, start..i));
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::chat_template::{ChatTemplate, RenderOptions};

    #[test]
    fn operands_of_copying_operators_are_charged() {
        let cases = [
            (" a + b ", " a|__charge + b|__charge "),
            (" 'x' ~ m.a[0](1)|f(2) ~ 'y' ", " 'x' ~ m.a[0](1)|f(2)|__charge_text ~ 'y' "),
            (" a * b + 1 ", " (a )|__multiply( b)|__charge + 1 "),
            (" a / b * c ", " (a / b )|__multiply( c) "),
            (" a*b*c**d ", " ((a)|__multiply(b))|__multiply(c**d) "),
            (" -a + (b if c else d) ", " -a|__charge + (b if c else d)|__charge "),
            (" x[-1:] + y is defined ", " x[-1:]|__charge + y is defined "),
            ("if a ~ \"+\" == b", "if a|__charge_text ~ \"+\" == b"),
            (" f(a + b) ", " f(a|__charge + b|__charge) "),
            (" a + [b] ", " a|__charge + [b]|__charge "),
        ];
        for (source, expected) in cases {
            assert_eq!(charged(source), expected);
        }
    }

    #[test]
    fn templates_that_would_overflow_the_engine_are_refused() {
        let chain = |length| format!("a\n{{{{ 1{} }}}}", " + 1".repeat(length));
        check(&chain(499)).unwrap();
        let error = "line 2: a tag of 1001 words and signs; at most 1000 are allowed";
        assert_eq!(check(&chain(500)).unwrap_err(), error);
        let unended = chain(500).replace('}', " ");
        assert!(check(&unended).unwrap_err().starts_with("line 2: a tag of 100"));
        let error = "a template of 5001 tags; at most 5000 are allowed";
        assert_eq!(check(&"{{ a }}".repeat(5001)).unwrap_err(), error);
        check(&" ".repeat(MAX_LENGTH + 1)).unwrap_err();
        check("{# {{ #}").unwrap();
    }

    /// In a thread of 2 MiB, as tests and servers have them.
    #[test]
    fn the_longest_chains_fit_a_stack() {
        let chains = [
            "not ".repeat(990) + "1",
            "-".repeat(990) + "1",
            "1".to_owned() + &"+1".repeat(490),
            "1".to_owned() + &"|string".repeat(490),
            "messages".to_owned() + &".a".repeat(490),
            "messages".to_owned() + &"[0]".repeat(330),
            "1".to_owned() + &" and 1".repeat(490),
        ];
        for chain in chains {
            let sources = vec![("default".to_owned(), format!("{{{{ {chain} }}}}"))];
            let run =
                ChatTemplate::new(sources, Vec::new()).and_then(|t| t.render(&[], RenderOptions::default()));
            // Some compute something, others are an error of the engine; none ends the process.
            let _ = std::hint::black_box(run);
        }
    }

    #[test]
    fn comments_raw_blocks_and_literals_stay() {
        let source =
            "{# {% generation %} a + b #}{% raw %}{{ a + b }}{% generation %}{% endraw %}{{ '%} }} + ' }}";
        assert_eq!(rewrite(source, true), source);
        assert!(!has_generation(source));
        assert!(has_generation("{{ '{% raw %}' }}{%- generation -%}"));
        assert_eq!(
            rewrite("{%- generation +%}x{% endgeneration -%}", false),
            "{%- filter __generation +%}x{% endfilter -%}"
        );
    }
}
