//! Chat templates: conversations rendered with Jinja as in transformers 5.
//!
//! Blocks are trimmed (`trim_blocks`, `lstrip_blocks`), values print as in Python, `tojson` is
//! `json.dumps`. `raise_exception`, `strftime_now` (UTC), loop controls and Python's string and
//! dict methods exist. `{% generation %}` marks the assistant's text; other templates are marked by
//! `assistant_turns`. A run is bounded in steps, in copied text and in depth.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use serde_json::Map;

use crate::error::DataError;
use crate::source::record::Message;
use crate::text::assistant_turns::{self, MarkedText};
use crate::text::python_text::{JsonStyle, to_json, write_repr, write_str};
use crate::text::strftime::strftime_now;
use crate::text::template_budget::{
    Bounded, MAX_COPIED, MAX_DEPTH, MAX_STEPS, charge, charge_replacement, charge_value, check_acyclic,
    check_format, check_width, multiply, refused,
};
use crate::text::template_source::{
    self, ACYCLIC, BODY, CHARGE, CHARGE_TEXT, MULTIPLY, has_generation, rewrite,
};
use crate::text::template_text;

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

/// Limit of a template's text.
const MAX_TEMPLATE: u64 = 1 << 20;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// Suffix of a template's name in its marked form.
pub(super) const MARKED: &str = ".marked";

impl ChatTemplate {
    /// Compiles named templates: `default`, and `tool_use` for calls with tools. `special_tokens`
    /// become variables (`bos_token`, `eos_token`, …).
    pub fn new(
        sources: Vec<(String, String)>,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self, DataError> {
        Self::compile(sources, special_tokens).map_err(|(_, reason)| DataError::Template { reason })
    }

    /// Compiles templates; an error comes with the name of the template, where it is of one.
    fn compile(
        sources: Vec<(String, String)>,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self, (String, String)> {
        if !sources.iter().any(|(name, _)| name == DEFAULT) {
            let names: Vec<_> = sources.iter().map(|(name, _)| name.as_str()).collect();
            let reason = format!("none of the templates is called `{DEFAULT}`, found: {}", names.join(", "));
            return Err((String::new(), reason));
        }
        let mut environment = environment();
        for (name, source) in &sources {
            let broken = |reason| (name.clone(), reason);
            template_source::check(source).map_err(broken)?;
            for (name, marked) in [(name.clone(), false), (format!("{name}{MARKED}"), true)] {
                let added = environment.add_template_owned(name, rewrite(source, marked));
                added.map_err(|e| broken(describe(&e)))?;
            }
        }
        Ok(Self { environment, sources, special_tokens })
    }

    /// Reads the templates of a model's folder: those of `chat_template` of `tokenizer_config.json`, a string, a list
    /// of `{name, template}` or an object of templates by name, unless there is a `chat_template.jinja`; and in either
    /// case, before others of its name, `additional_chat_templates/tool_use.jinja`.
    pub fn from_folder(
        folder: &Path,
        tokenizer_config: &serde_json::Value,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Option<Self>, DataError> {
        let read = |path: &Path| match path.symlink_metadata() {
            Ok(_) => {
                tandem_files::read_text(path, MAX_TEMPLATE).map(Some).map_err(DataError::io("reading", path))
            }
            Err(_) => Ok(None),
        };
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
        let mut sources: Vec<(String, String)> = Vec::new();
        let file = folder.join("chat_template.jinja");
        let source = read(&file)?;
        let file = if source.is_some() { file } else { folder.join("tokenizer_config.json") };
        match (source, &tokenizer_config["chat_template"]) {
            (Some(source), _) => sources.push((DEFAULT.to_string(), source)),
            (None, serde_json::Value::String(source)) => sources.push((DEFAULT.to_string(), source.clone())),
            (None, serde_json::Value::Array(named)) => {
                sources.extend(named.iter().map(|n| (text(&n["name"]), text(&n["template"]))));
            }
            (None, serde_json::Value::Object(named)) => {
                sources.extend(named.iter().map(|(name, template)| (name.clone(), text(template))));
            }
            (None, serde_json::Value::Null) => return Ok(None),
            (None, other) => {
                let shown: String = other.to_string().chars().take(60).collect();
                let reason = format!(
                    "`chat_template` is {shown}, expected a template, or a list or object of named ones"
                );
                return Err(DataError::Tokenizer { path: file, reason });
            }
        }
        let tool_use = folder.join("additional_chat_templates").join("tool_use.jinja");
        let of_tools = read(&tool_use)?;
        let is_apart = of_tools.is_some();
        if let Some(source) = of_tools {
            sources.retain(|(name, _)| name != TOOL_USE);
            sources.push((TOOL_USE.to_string(), source));
        }
        let compiled = Self::compile(sources, special_tokens).map_err(|(name, reason)| {
            let file = if is_apart && name == TOOL_USE { &tool_use } else { &file };
            DataError::Template { reason: format!("{}: {reason}", file.display()) }
        });
        compiled.map(Some)
    }

    /// Returns the templates' sources by name.
    pub fn sources(&self) -> &[(String, String)] {
        &self.sources
    }

    /// Returns whether a template names this role.
    pub(crate) fn names_role(&self, role: &str) -> bool {
        let quoted = ['"', '\''].map(|mark| format!("{mark}{role}{mark}"));
        self.sources.iter().any(|(_, source)| quoted.iter().any(|role| source.contains(role)))
    }

    /// Refuses a template that writes the same text for every conversation.
    pub(crate) fn check_reads_messages(&self, tools: bool) -> Result<(), DataError> {
        let name = self.name(tools);
        let source = self.sources.iter().find(|(known, _)| known == name).map_or("", |(_, source)| source);
        if source.contains("messages") {
            return Ok(());
        }
        let shown: String = source.chars().take(60).collect();
        Err(DataError::Template {
            reason: format!(
                "the template `{name}` never reads `messages`, so every conversation would be the same text; found \
                 {shown:?}; give the model's own template, or data.chat_template"
            ),
        })
    }

    /// Returns whether the template itself marks the assistant's text.
    pub fn has_generation_markers(&self, tools: bool) -> bool {
        let name = self.name(tools);
        self.sources.iter().any(|(n, source)| n == name && has_generation(source))
    }

    /// Renders a conversation.
    pub fn render(&self, messages: &[Message], options: RenderOptions) -> Result<String, DataError> {
        self.run(messages, options, false)
    }

    /// Renders a conversation with the marks of turns and generation blocks.
    pub(super) fn render_marked(
        &self,
        messages: &[Message],
        options: RenderOptions,
    ) -> Result<MarkedText, DataError> {
        self.run(messages, options, true).map(|text| MarkedText::parse(&text))
    }

    /// Renders a conversation; also returns the byte ranges of the assistant's turns. `ends` are
    /// the texts of the EOS tokens.
    pub fn render_with_turns(
        &self,
        messages: &[Message],
        options: RenderOptions,
        ends: &[String],
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        assistant_turns::render(self, messages, options, ends)
    }

    fn name(&self, tools: bool) -> &str {
        let tool_use = tools && self.sources.iter().any(|(name, _)| name == TOOL_USE);
        if tool_use { TOOL_USE } else { DEFAULT }
    }

    /// Returns the template that a row's `chat_template_kwargs` name.
    fn named(&self, chosen: &serde_json::Value) -> Result<&str, DataError> {
        let names = || self.sources.iter().map(|(name, _)| name.as_str());
        names().find(|name| chosen.as_str() == Some(name)).ok_or_else(|| {
            let all = names().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
            let reason = format!(
                "`chat_template` of chat_template_kwargs is {chosen}, expected the name of a template: {all}"
            );
            DataError::Template { reason }
        })
    }

    fn run(&self, messages: &[Message], options: RenderOptions, marked: bool) -> Result<String, DataError> {
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
        let messages: Vec<_> = messages.iter().map(with_reasoning_aliases).collect();
        variables.insert("messages".into(), messages.into());
        let name = match options.kwargs.and_then(|kwargs| kwargs.get("chat_template")) {
            None | Some(serde_json::Value::Null) => self.name(options.tools.is_some()),
            Some(chosen) => self.named(chosen)?,
        };
        let name = if marked { format!("{name}{MARKED}") } else { name.to_string() };
        self.environment
            .get_template(&name)
            .and_then(|template| template.render(Value::from_serialize(&variables)))
            .map_err(|e| DataError::Template { reason: describe(&e) })
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_recursion_limit(MAX_DEPTH);
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        charge_value(state, value)?;
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_string);
        match (method, value.as_str(), text(arguments.first()), text(arguments.get(1))) {
            ("replace", Some(value), Some(old), Some(new)) => charge_replacement(state, value, &old, &new)?,
            ("format", Some(format), ..) => check_format(state, format, arguments)?,
            ("join", Some(separator), ..) => {
                let items = arguments.first().and_then(Value::len).unwrap_or(0);
                charge(state, separator.len().saturating_mul(items))?;
                for item in arguments.first().into_iter().flat_map(Value::try_iter).flatten() {
                    charge_value(state, &item)?;
                }
            }
            _ => {}
        }
        match value.as_str().and_then(|text| template_text::method(state, text, method, arguments)) {
            Some(outcome) => outcome,
            None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
        }
    });
    environment.set_formatter(|out, state, value| {
        if let Some(text) = value.as_str() {
            charge(state, text.len())?;
            return out.write_str(text).map_err(Error::from);
        }
        write_str(&mut Bounded::new(out, state), value).map_err(|_| too_large())
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |state: &State, value: Value| text_of(state, &value));
    environment.add_filter("pprint", |state: &State, value: Value| -> Result<String, Error> {
        let mut text = String::new();
        write_repr(&mut Bounded::new(&mut text, state), &value, 0).map_err(|_| too_large())?;
        Ok(text)
    });
    template_text::add_filters(&mut environment);
    environment.add_filter("trim", trim);
    environment.add_filter("int", |state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs| {
        if let Some(based) = template_text::in_base(&value, &positional, &kwargs)? {
            return Ok(based);
        }
        number(state, &value, &positional, &kwargs, Value::from(0), filters::int)
    });
    environment.add_filter(
        "float",
        |state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs| {
            number(state, &value, &positional, &kwargs, Value::from(0.0), filters::float)
        },
    );
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("format", |state: &State, format: Value, values: Rest<Value>| {
        check_format(state, format.as_str().unwrap_or_default(), &values)?;
        filters::format(state, &format, values)
    });
    environment.add_filter("batch", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        filters::batch(state, value, check_width(count)?, fill)
    });
    environment.add_filter("slice", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        filters::slice(state, value, check_width(count)?, fill)
    });
    environment.add_filter(CHARGE, |state: &State, value: Value| {
        charge_value(state, &value)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(CHARGE_TEXT, |state: &State, value: Value| text_of(state, &value));
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(ACYCLIC, |state: &State, value: Value, target: Value| {
        check_acyclic(state, &value, &target)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(BODY, |state: &State, _: Value, length: usize| {
        charge(state, length)?;
        Ok::<_, Error>("")
    });
    // In Jinja `none` is not iterable, and anything with a length and an index is a sequence.
    environment
        .add_test("iterable", |value: Value| has_length(&value) || value.kind() == ValueKind::Iterable);
    environment.add_test("sequence", |value: Value| has_length(&value));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| strftime_now(&format));
    assistant_turns::add_marks(&mut environment);
    environment
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

fn too_large() -> Error {
    refused("a value nested too deeply, or too large a text".into())
}

pub(super) fn text_of(state: &State, value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(&mut Bounded::new(&mut text, state), value).map_err(|_| too_large())?;
    Ok(text)
}

fn trim(state: &State, value: Value, characters: Option<String>) -> Result<String, Error> {
    let text = text_of(state, &value)?;
    Ok(match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)).to_string(),
        None => text.trim_matches(template_text::is_space).to_string(),
    })
}

/// Converts as Jinja: white space around a number is skipped, and a default stands for what is none.
fn number(
    state: &State,
    value: &Value,
    positional: &[Value],
    kwargs: &Kwargs,
    default: Value,
    convert: fn(&State, &Value) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let named: Option<Value> = kwargs.get("default")?;
    kwargs.assert_all_used()?;
    let default = positional.first().cloned().or(named).unwrap_or(default);
    let value = value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()));
    Ok(convert(state, &value).unwrap_or(default))
}

fn join(state: &State, values: Value, separator: Option<String>, kwargs: Kwargs) -> Result<String, Error> {
    let attribute: Option<String> = kwargs.get("attribute")?;
    let named: Option<String> = kwargs.get("d")?;
    kwargs.assert_all_used()?;
    let separator = separator.or(named).unwrap_or_default();
    let mut text = String::new();
    let mut out = Bounded::new(&mut text, state);
    for (i, value) in values.try_iter()?.enumerate() {
        let value = attribute.as_ref().map_or(Ok(value.clone()), |name| value.get_attr(name))?;
        let separator = if i > 0 { separator.as_str() } else { "" };
        out.write_str(separator).and_then(|()| write_str(&mut out, &value)).map_err(|_| too_large())?;
    }
    Ok(text)
}

/// Indents lines, as Jinja: all but the first, and no blank ones, unless the flags say so.
fn indent(state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        match positional.get(index) {
            Some(value) => Ok(Some(value.clone())),
            None => kwargs.get::<Option<Value>>(name),
        }
    };
    let width = argument(0, "width")?.unwrap_or_else(|| Value::from(4));
    let first = argument(1, "first")?.is_some_and(|v| v.is_true());
    let blank = argument(2, "blank")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let padding = match width.as_str() {
        Some(padding) => padding.to_string(),
        None => {
            let width = i64::try_from(width.clone())
                .map_err(|_| refused(format!("indent needs a width, found {}", width.kind())))?;
            " ".repeat(check_width(usize::try_from(width).unwrap_or(0))?)
        }
    };
    // Without it, an empty last line would be none.
    let text = text_of(state, &value)? + "\n";
    let lines = template_text::lines(&text);
    charge(state, padding.len().saturating_mul(lines.len()))?;
    let mut out = String::new();
    for (i, (line, _)) in lines.into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 || first) && (blank || i == 0 || !line.is_empty()) {
            out.push_str(&padding);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn has_length(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

fn tojson(state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    // Python: tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False).
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ascii = argument(0, "ensure_ascii")?;
    let indent = argument(1, "indent")?.map(usize::try_from).transpose()?.map(check_width).transpose()?;
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?;
    kwargs.assert_all_used()?;
    let mut style = JsonStyle::new(indent);
    style.max_length = MAX_COPIED;
    style.ascii = ascii.is_some_and(|v| v.is_true());
    style.sort_keys = sort_keys.is_some_and(|v| v.is_true());
    if let Some(separators) = separators {
        style.item = separators.get_item(&Value::from(0))?.to_string();
        style.key = separators.get_item(&Value::from(1))?.to_string();
    }
    let undefined = || {
        Error::new(ErrorKind::BadSerialization, "tojson of a value that has no JSON form, or is too large")
    };
    let text = to_json(&value, &style).ok_or_else(undefined)?;
    charge(state, text.len())?;
    Ok(Value::from_safe_string(text))
}

fn describe(error: &Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("the template runs for more than {MAX_STEPS} steps; a conversation needs far fewer");
    }
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
