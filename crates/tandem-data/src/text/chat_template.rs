//! Chat templates: conversations rendered with Jinja as in transformers 5.
//!
//! Blocks are trimmed (`trim_blocks`, `lstrip_blocks`), values print as in Python, `tojson` is
//! `json.dumps`. `raise_exception`, `strftime_now` (UTC), loop controls and Python's string and
//! dict methods exist. `{% generation %}` marks the assistant's text. Known difference: `~` joins
//! `true` and `none` in lower case.

use std::ops::Range;
use std::path::Path;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde_json::Map;

use crate::error::DataError;
use crate::source::record::Message;
use crate::text::python_text::{JsonStyle, to_json, write_str};
use crate::text::strftime::strftime_now;

/// Inputs of a template besides the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct RenderOptions<'a> {
    /// JSON schemas of functions that the model may call.
    pub tools: Option<&'a serde_json::Value>,
    /// Further variables; they override the tokenizer's special tokens.
    pub kwargs: Option<&'a Map<String, serde_json::Value>>,
    /// Whether to end with the header of a new assistant message.
    pub add_generation_prompt: bool,
}

/// Compiled chat templates: a default one, perhaps one for tool use.
pub struct ChatTemplate {
    environment: Environment<'static>,
    sources: Vec<(String, String)>,
    special_tokens: Vec<(String, String)>,
}

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// Variable that enables the marks, and the marks: noncharacters, which no text may contain.
const MARKING: &str = "__mark_generation";
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

impl ChatTemplate {
    /// Compiles named templates: `default`, and `tool_use` for calls with tools. `special_tokens`
    /// become variables (`bos_token`, `eos_token`, …).
    pub fn new(
        sources: Vec<(String, String)>,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self, DataError> {
        if !sources.iter().any(|(name, _)| name == DEFAULT) {
            let names: Vec<_> = sources.iter().map(|(name, _)| name.as_str()).collect();
            let reason = format!("none of the templates is called `{DEFAULT}`, found: {}", names.join(", "));
            return Err(DataError::Template { reason });
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| write_str(out, value).map_err(Error::from));
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", |value: Value| text_of(&value));
        environment.add_filter("trim", trim);
        environment.add_filter("join", join);
        // In Jinja `none` is not iterable, and anything with a length and an index is a sequence.
        environment
            .add_test("iterable", |value: Value| has_length(&value) || value.kind() == ValueKind::Iterable);
        environment.add_test("sequence", |value: Value| has_length(&value));
        environment.add_filter(MARKING, mark);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| strftime_now(&format));
        for (name, source) in &sources {
            environment
                .add_template_owned(name.clone(), generation_as_filter(source))
                .map_err(|e| DataError::Template { reason: describe(&e) })?;
        }
        Ok(Self { environment, sources, special_tokens })
    }

    /// Reads the template of a model's folder: `chat_template.jinja` with
    /// `additional_chat_templates/tool_use.jinja`, else `chat_template` of `tokenizer_config.json`,
    /// a string or a list of `{name, template}`.
    pub fn from_folder(
        folder: &Path,
        tokenizer_config: &serde_json::Value,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Option<Self>, DataError> {
        let read = |path: &Path| std::fs::read_to_string(path).map_err(DataError::io("reading", path));
        let mut sources = Vec::new();
        let file = folder.join("chat_template.jinja");
        if file.is_file() {
            sources.push((DEFAULT.to_string(), read(&file)?));
            let tool_use = folder.join("additional_chat_templates").join("tool_use.jinja");
            if tool_use.is_file() {
                sources.push((TOOL_USE.to_string(), read(&tool_use)?));
            }
        } else {
            match &tokenizer_config["chat_template"] {
                serde_json::Value::String(source) => sources.push((DEFAULT.to_string(), source.clone())),
                serde_json::Value::Array(named) => {
                    let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_string();
                    sources.extend(named.iter().map(|n| (text(&n["name"]), text(&n["template"]))));
                }
                _ => return Ok(None),
            }
        }
        Self::new(sources, special_tokens).map(Some)
    }

    /// Returns the templates' sources by name.
    pub fn sources(&self) -> &[(String, String)] {
        &self.sources
    }

    /// Returns whether the template itself marks the assistant's text.
    pub fn has_generation_markers(&self, tools: bool) -> bool {
        let name = self.name(tools);
        self.sources.iter().any(|(n, source)| n == name && generation_as_filter(source) != *source)
    }

    /// Renders a conversation.
    pub fn render(&self, messages: &[Message], options: RenderOptions) -> Result<String, DataError> {
        self.run(messages, options, false)
    }

    /// Renders a conversation; also returns the byte ranges inside `{% generation %}` blocks.
    pub fn render_marked(
        &self,
        messages: &[Message],
        options: RenderOptions,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let marked = self.run(messages, options, true)?;
        let mut text = String::with_capacity(marked.len());
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for c in marked.chars() {
            match c {
                c if c == MARKS[0] => ranges.push(text.len()..text.len()),
                c if c == MARKS[1] => {
                    if let Some(range) = ranges.last_mut() {
                        range.end = text.len();
                    }
                }
                c => text.push(c),
            }
        }
        Ok((text, ranges))
    }

    fn name(&self, tools: bool) -> &str {
        let tool_use = tools && self.sources.iter().any(|(name, _)| name == TOOL_USE);
        if tool_use { TOOL_USE } else { DEFAULT }
    }

    fn run(&self, messages: &[Message], options: RenderOptions, marking: bool) -> Result<String, DataError> {
        let mut variables = serde_json::Map::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name.clone(), token.as_str().into());
        }
        for (name, value) in options.kwargs.into_iter().flatten() {
            variables.insert(name.clone(), value.clone());
        }
        variables.insert("tools".into(), options.tools.cloned().unwrap_or_default());
        variables.insert("documents".into(), serde_json::Value::Null);
        variables.entry("add_generation_prompt").or_insert(options.add_generation_prompt.into());
        variables.insert(MARKING.into(), marking.into());
        let messages: Vec<_> = messages.iter().map(with_reasoning_aliases).collect();
        variables.insert("messages".into(), messages.into());
        self.environment
            .get_template(self.name(options.tools.is_some()))
            .and_then(|template| template.render(Value::from_serialize(&variables)))
            .map_err(|e| DataError::Template { reason: describe(&e) })
    }
}

/// Fills `reasoning_content` and `thinking` from any of the three names of reasoning, as
/// transformers.
fn with_reasoning_aliases(message: &Message) -> serde_json::Value {
    let mut message = message.clone();
    let found = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|&k| message.get(k).cloned());
    if let Some(reasoning) = found {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert("reasoning_content".into(), reasoning);
    }
    message.into()
}

/// Turns `{% generation %}` into a filter block, which keeps white-space control and receives the
/// block's text.
fn generation_as_filter(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        let word = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        out.push_str(&rest[..start + 2]);
        out.push_str(&match word {
            "generation" => tag.replace("generation", &format!("filter {MARKING}")),
            "endgeneration" => tag.replace("endgeneration", "endfilter"),
            _ => tag.to_string(),
        });
        rest = &rest[start + length..];
    }
    out.push_str(rest);
    out
}

fn mark(state: &State, text: String) -> String {
    match state.lookup(MARKING) {
        Some(marking) if marking.is_true() => format!("{}{text}{}", MARKS[0], MARKS[1]),
        _ => text,
    }
}

fn text_of(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(&mut text, value)?;
    Ok(text)
}

fn trim(value: Value, characters: Option<String>) -> Result<String, Error> {
    let text = text_of(&value)?;
    Ok(match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)).to_string(),
        None => text.trim().to_string(),
    })
}

fn join(values: Value, separator: Option<String>, kwargs: Kwargs) -> Result<String, Error> {
    let attribute: Option<String> = kwargs.get("attribute")?;
    kwargs.assert_all_used()?;
    let mut text = String::new();
    for (i, value) in values.try_iter()?.enumerate() {
        if i > 0 {
            text.push_str(separator.as_deref().unwrap_or_default());
        }
        let value = attribute.as_ref().map_or(Ok(value.clone()), |name| value.get_attr(name))?;
        write_str(&mut text, &value)?;
    }
    Ok(text)
}

fn has_length(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

fn tojson(value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    // Python: tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False).
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ascii = argument(0, "ensure_ascii")?;
    let indent = argument(1, "indent")?.map(usize::try_from).transpose()?;
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?;
    kwargs.assert_all_used()?;
    let mut style = JsonStyle::new(indent);
    style.ascii = ascii.is_some_and(|v| v.is_true());
    style.sort_keys = sort_keys.is_some_and(|v| v.is_true());
    if let Some(separators) = separators {
        style.item = separators.get_item(&Value::from(0))?.to_string();
        style.key = separators.get_item(&Value::from(1))?.to_string();
    }
    let undefined = || Error::new(ErrorKind::BadSerialization, "tojson of a value that has no JSON form");
    to_json(&value, &style).map(Value::from_safe_string).ok_or_else(undefined)
}

fn describe(error: &Error) -> String {
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let mut text =
        format!("{line}{}", error.detail().map_or_else(|| error.kind().to_string(), str::to_string));
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    text
}
