//! The assistant's part of a rendered conversation.
//!
//! A template with `{% generation %}` says itself which text is the assistant's. For any other
//! template the source receives marks: a loop that iterates over messages writes a noncharacter
//! where a message begins, and one after the loop. The marked render differs from the real one by
//! these characters alone, so the marks are places in the real text:
//! * a turn is the text of one message's iteration, up to the next message; its end marker belongs
//!   to it, and so does text after the last turn, as Phi-3's EOS;
//! * its header is no part of it: the longest common beginning of the turn and of the template's
//!   generation prompt, without an opening tag of reasoning;
//! * where a turn has no end marker, an EOS token at the start of the next turn's text belongs to
//!   it, as GLM's `<|user|>`.
//!
//! A template that has no loop of its own over the messages is searched for their texts.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use minijinja::value::{Object, ValueKind};
use minijinja::{Environment, State, Value};
use serde_json::json;

use crate::error::DataError;
use crate::source::record::Message;
use crate::text::chat_template::{ChatTemplate, RenderOptions};
use crate::text::template_source::{GENERATION, LOOP_MARKS};

/// Noncharacters, which no text may contain.
const GENERATION_START: char = '\u{fdd0}';
const GENERATION_END: char = '\u{fdd1}';
const ASSISTANT: char = '\u{fdd2}';
const OTHER: char = '\u{fdd3}';
const ASSISTANT_AGAIN: char = '\u{fdd4}';
const OTHER_AGAIN: char = '\u{fdd5}';
const OUTSIDE: char = '\u{fdd6}';
/// Follows a mark once per open loop.
const DEPTH: char = '\u{fdd7}';

/// Opening tags of reasoning. The model writes them, though some generation prompts end with one.
const REASONING: [&str; 6] =
    ["<think>", "<thinking>", "[THINK]", "<|channel>", "<|START_THINKING|>", "<seed:think>"];

/// A rendered conversation with its marks.
#[derive(Debug, Default)]
pub(super) struct MarkedText {
    text: String,
    marks: Vec<Mark>,
}

/// A mark's character, its place and the number of open loops.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: usize,
    kind: char,
    depth: usize,
}

impl MarkedText {
    /// Separates marks and text.
    pub(super) fn parse(marked: &str) -> Self {
        let mut parsed = Self::default();
        for c in marked.chars() {
            match c {
                GENERATION_START..=OUTSIDE => {
                    parsed.marks.push(Mark { at: parsed.text.len(), kind: c, depth: 0 });
                }
                DEPTH => parsed.marks.iter_mut().next_back().into_iter().for_each(|mark| mark.depth += 1),
                c => parsed.text.push(c),
            }
        }
        parsed
    }

    /// Moves the marks to the same places of `text`, which may differ in white space.
    fn onto(mut self, text: &str) -> Option<Self> {
        if self.text == text {
            return Some(self);
        }
        let mut solid = text.char_indices().filter(|(_, c)| !c.is_whitespace());
        let mut marks = self.marks.iter_mut().peekable();
        for (at, c) in self.text.char_indices().filter(|(_, c)| !c.is_whitespace()) {
            let (place, same) = solid.next()?;
            if c != same {
                return None;
            }
            while let Some(mark) = marks.next_if(|mark| mark.at <= at) {
                mark.at = place;
            }
        }
        if solid.next().is_some() {
            return None;
        }
        for mark in marks {
            mark.at = text.len();
        }
        self.text = text.to_string();
        Some(self)
    }

    fn generation_blocks(&self) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for &Mark { at, kind, .. } in &self.marks {
            match (kind, ranges.last_mut()) {
                (GENERATION_START, _) => ranges.push(at..at),
                (GENERATION_END, Some(range)) => range.end = at,
                _ => {}
            }
        }
        ranges
    }

    /// Returns the parts of the text between marks of turns.
    fn parts(&self) -> Vec<(Mark, Range<usize>)> {
        let marks: Vec<_> = self.marks.iter().copied().filter(|mark| mark.kind >= ASSISTANT).collect();
        let end = |i: usize| marks.get(i + 1).map_or(self.text.len(), |next| next.at);
        marks.iter().enumerate().map(|(i, &mark)| (mark, mark.at..end(i))).collect()
    }

    /// Returns the text after the last loop over messages.
    fn tail(&self) -> &str {
        match self.parts().pop() {
            Some((Mark { kind: OUTSIDE, .. }, range)) => &self.text[range],
            _ => "",
        }
    }
}

/// Renders a conversation; also returns the byte ranges of the assistant's turns.
pub(super) fn render(
    template: &ChatTemplate,
    messages: &[Message],
    options: RenderOptions,
    ends: &[String],
) -> Result<(String, Vec<Range<usize>>), DataError> {
    let text = template.render(messages, options)?;
    if !messages.iter().any(is_assistant) {
        return Ok((text, Vec::new()));
    }
    let marked = template.render_marked(messages, options)?.onto(&text);
    if template.has_generation_markers(options.tools.is_some()) {
        let marked = marked.ok_or(DataError::AssistantNotFound)?;
        let ranges = marked.generation_blocks();
        return Ok((text, ranges));
    }
    let header = header(template, messages, options);
    let turns = marked.map(|marked| turns(&marked, &header, ends)).unwrap_or_default();
    if !turns.is_empty() {
        return Ok((text, turns));
    }
    let turns = searched(&text, messages, ends).ok_or(DataError::AssistantNotFound)?;
    Ok((text, turns))
}

fn is_assistant(message: &Message) -> bool {
    message.get("role").and_then(serde_json::Value::as_str).is_some_and(is_assistant_role)
}

fn is_assistant_role(role: &str) -> bool {
    matches!(role, "assistant" | "model" | "chatbot")
}

/// Returns what the template writes before an assistant's turn: its generation prompt after the
/// messages before the first turn.
fn header(template: &ChatTemplate, messages: &[Message], options: RenderOptions) -> String {
    let first = messages.iter().position(is_assistant).unwrap_or(0);
    let user: Message = [("role", json!("user")), ("content", json!("Hello"))]
        .map(|(key, value)| (key.to_string(), value))
        .into_iter()
        .collect();
    let question = [user];
    let before = if first == 0 { &question[..] } else { &messages[..first] };
    let with_prompt = RenderOptions { add_generation_prompt: true, ..options };
    // A template that refuses these messages has no header that can be learned.
    let (Ok(text), Ok(prompt)) = (template.render(before, options), template.render(before, with_prompt))
    else {
        return String::new();
    };
    let header = match prompt.strip_prefix(&text) {
        Some(header) => header.to_string(),
        None => template.render_marked(before, with_prompt).map(|m| m.tail().to_string()).unwrap_or_default(),
    };
    let end = REASONING.iter().filter_map(|tag| header.find(tag)).min().unwrap_or(header.len());
    header[..end].to_string()
}

fn turns(marked: &MarkedText, header: &str, ends: &[String]) -> Vec<Range<usize>> {
    let text = &marked.text;
    // Whether the message at hand of each open loop has written nothing yet.
    let mut fresh: Vec<bool> = Vec::new();
    let mut parts: Vec<(Mark, Range<usize>)> = Vec::new();
    for (mark, range) in marked.parts() {
        fresh.resize(fresh.len().max(mark.depth + 1), false);
        let begins = matches!(mark.kind, ASSISTANT | OTHER) || fresh[mark.depth];
        fresh[mark.depth] = begins && range.is_empty();
        let kind = match mark.kind {
            ASSISTANT_AGAIN if begins => ASSISTANT,
            OTHER_AGAIN if begins => OTHER,
            kind => kind,
        };
        if !range.is_empty() {
            parts.push((Mark { kind, ..mark }, range));
        }
    }
    let mut turns: Vec<Range<usize>> = Vec::new();
    for (i, (mark, range)) in parts.iter().enumerate() {
        let mut range = range.clone();
        let before = i.checked_sub(1).map(|before| parts[before].0.kind);
        match mark.kind {
            ASSISTANT => {
                let turn = &text[range.clone()];
                // A first turn may begin with what begins the whole text.
                let found = if before.is_none() && !header.is_empty() { turn.find(header) } else { None };
                range.start += found.map_or_else(|| common(turn, header), |at| at + header.len());
            }
            ASSISTANT_AGAIN => {}
            OUTSIDE if i + 1 == parts.len() && matches!(before, Some(ASSISTANT | ASSISTANT_AGAIN)) => {
                range.end = range.start + text[range.clone()].trim_end().len();
            }
            _ => continue,
        }
        let ended = ends.iter().any(|end| text[range.clone()].trim_end().ends_with(end.as_str()));
        if !ended && parts.get(i + 1).is_some_and(|(mark, _)| mark.kind == OTHER) {
            let next = &text[range.end..];
            let end = ends.iter().filter(|end| next.starts_with(end.as_str())).map(String::len).max();
            range.end += end.unwrap_or(0);
        }
        match turns.last_mut() {
            _ if range.is_empty() => {}
            Some(turn) if turn.end == range.start => turn.end = range.end,
            _ => turns.push(range),
        }
    }
    turns
}

/// Returns the length of a header at the start of a turn, where white space may surround it.
fn common(turn: &str, header: &str) -> usize {
    let header = header.trim_start();
    let start = turn.len() - turn.trim_start().len();
    let same: usize = turn[start..]
        .chars()
        .zip(header.chars())
        .take_while(|(a, b)| a == b)
        .map(|(c, _)| c.len_utf8())
        .sum();
    let shared = &turn[start..start + same];
    // A tag that only begins like the header's is the turn's.
    let whole = match shared.rfind(['<', '[']) {
        Some(tag) if same < header.len() && !shared[tag..].contains(['>', ']']) => tag,
        _ => same,
    };
    if whole == 0 { 0 } else { start + whole }
}

/// Searches for the messages' texts in their order; a turn ends after an EOS token that follows.
fn searched(text: &str, messages: &[Message], ends: &[String]) -> Option<Vec<Range<usize>>> {
    let mut turns = Vec::new();
    let mut from = 0;
    for message in messages {
        let content = message.get("content").and_then(serde_json::Value::as_str).unwrap_or_default().trim();
        let answer = content.rsplit("</think>").next().unwrap_or_default().trim();
        let found =
            [content, answer].iter().find_map(|part| Some((from + text[from..].find(part)?, part.len())));
        match (found, is_assistant(message)) {
            (Some((start, length)), true) if length > 0 => {
                let mut end = start + length;
                let rest = text[end..].trim_start();
                if let Some(token) = ends.iter().find(|token| rest.starts_with(token.as_str())) {
                    end = text.len() - rest.len() + token.len();
                }
                turns.push(start..end);
                from = end;
            }
            (None, true) => return None,
            (Some((start, length)), _) => from = start + length,
            (None, false) => {}
        }
    }
    Some(turns)
}

/// Loops that are open, with the role of the message at hand.
#[derive(Debug, Default)]
struct Loops(Mutex<Vec<OpenLoop>>);

#[derive(Clone, Copy, Debug, Default)]
struct OpenLoop {
    /// Whether the message at hand is the assistant's; `None` in a loop over other things.
    assistant: Option<bool>,
    /// Whether the message was assigned in the loop's body.
    assigned: bool,
}

impl Object for Loops {}

/// Adds the filters that write marks.
pub(super) fn add_marks(environment: &mut Environment<'static>) {
    fn with_loops<R>(state: &State, act: impl FnOnce(&mut Vec<OpenLoop>) -> R) -> R {
        let loops = state.get_or_set_temp_object("loops", Loops::default);
        act(&mut loops.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
    fn written(mark: char, depth: usize) -> String {
        std::iter::once(mark).chain(std::iter::repeat_n(DEPTH, depth)).collect()
    }
    fn begin(loops: &mut [OpenLoop], assistant: bool, assigned: bool) -> String {
        let depth = loops.len();
        if let Some(top) = loops.last_mut() {
            *top = OpenLoop { assistant: Some(assistant), assigned };
        }
        written(if assistant { ASSISTANT } else { OTHER }, depth)
    }
    let [open, item, assigned, close] = LOOP_MARKS;
    environment.add_filter(open, |state: &State, _: Value| {
        with_loops(state, |loops| loops.push(OpenLoop::default()));
        ""
    });
    environment.add_filter(item, |state: &State, _: Value, item: Value| {
        with_loops(state, |loops| match (loops.last_mut(), role(&item)) {
            (Some(_), Some(assistant)) => begin(loops, assistant, false),
            _ => String::new(),
        })
    });
    environment.add_filter(assigned, |state: &State, _: Value, value: Value| {
        with_loops(state, |loops| match (loops.last_mut(), role(&value)) {
            (Some(top), Some(assistant)) if top.assistant.is_none() || top.assigned => {
                begin(loops, assistant, true)
            }
            _ => String::new(),
        })
    });
    environment.add_filter(close, |state: &State, _: Value| {
        with_loops(state, |loops| {
            let closed = loops.pop().unwrap_or_default();
            let outer = loops.iter().rposition(|open| open.assistant.is_some());
            match (closed.assistant, outer.map(|i| (loops[i].assistant, i + 1))) {
                (None, _) => String::new(),
                (_, Some((Some(true), depth))) => written(ASSISTANT_AGAIN, depth),
                (_, Some((_, depth))) => written(OTHER_AGAIN, depth),
                (_, None) => OUTSIDE.to_string(),
            }
        })
    });
    environment.add_filter(GENERATION, |state: &State, text: String| {
        // The loops of a marked template are known; a plain one has none.
        match state.name().ends_with(super::chat_template::MARKED) {
            true => format!("{GENERATION_START}{text}{GENERATION_END}"),
            false => text,
        }
    });
}

/// Returns whether a message is the assistant's, or `None` if the value is no message.
fn role(value: &Value) -> Option<bool> {
    if value.kind() != ValueKind::Map {
        return None;
    }
    let role = value.get_attr("role").ok()?;
    role.as_str().map(is_assistant_role)
}
