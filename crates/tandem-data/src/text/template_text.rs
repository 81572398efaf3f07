//! Filters and string methods of templates whose result differs between Jinja and minijinja, or that only Jinja
//! and Python have.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::chat_template::text_of;
use crate::text::template_budget::{charge, charge_replacement, check_width, refused};

/// Adds the filters.
pub(super) fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter("upper", |state: &State, value: Value| {
        Ok::<_, Error>(text_of(state, &value)?.to_uppercase())
    });
    environment.add_filter("lower", |state: &State, value: Value| {
        Ok::<_, Error>(text_of(state, &value)?.to_lowercase())
    });
    environment.add_filter("capitalize", |state: &State, value: Value| {
        Ok::<_, Error>(capitalized(&text_of(state, &value)?))
    });
    environment
        .add_filter("title", |state: &State, value: Value| Ok::<_, Error>(title(&text_of(state, &value)?)));
    for name in ["escape", "e"] {
        environment.add_filter(name, |state: &State, value: Value| escape(state, &text_of(state, &value)?));
    }
    environment.add_filter("round", round);
    environment.add_filter("replace", replace);
    environment.add_filter("center", |state: &State, value: Value, width: Option<usize>| {
        padded(state, &text_of(state, &value)?, width.unwrap_or(80), Side::Both, ' ')
    });
    environment.add_filter("wordcount", |state: &State, value: Value| {
        let is_inside = |c: char| c.is_alphanumeric() || c == '_';
        Ok::<_, Error>(
            text_of(state, &value)?.split(|c| !is_inside(c)).filter(|word| !word.is_empty()).count(),
        )
    });
}

/// Calls a method of Python's strings that minijinja lacks; `None` if it is none of them.
pub(super) fn method(
    state: &State,
    text: &str,
    method: &str,
    arguments: &[Value],
) -> Option<Result<Value, Error>> {
    let (first, second) =
        (arguments.first().and_then(Value::as_str), arguments.get(1).and_then(Value::as_str));
    let wrong = || Err(refused(format!("{method}: an argument is missing or of another type")));
    let fill = second.and_then(|fill| fill.chars().next()).unwrap_or(' ');
    let pad = |side, fill| match arguments.first().map(|width| usize::try_from(width.clone())) {
        Some(Ok(width)) => padded(state, text, width, side, fill).map(Value::from),
        _ => wrong(),
    };
    let is_plain = arguments.iter().all(|argument| argument.is_none() || argument.is_undefined());
    Some(match method {
        "strip" if is_plain => Ok(text.trim_matches(is_space).into()),
        "lstrip" if is_plain => Ok(text.trim_start_matches(is_space).into()),
        "rstrip" if is_plain => Ok(text.trim_end_matches(is_space).into()),
        "isspace" if is_plain => Ok((!text.is_empty() && text.chars().all(is_space)).into()),
        "split" if is_plain => {
            let words = text.split(is_space).filter(|word| !word.is_empty());
            Ok(words.map(Value::from).collect())
        }
        "rsplit" => rsplit(text, arguments),
        "splitlines" if !arguments.iter().any(Value::is_kwargs) => {
            let keeps_ends = arguments.first().is_some_and(Value::is_true);
            let kept = |(line, end): (&str, &str)| match keeps_ends {
                true => format!("{line}{end}").into(),
                false => Value::from(line),
            };
            Ok(lines(text).into_iter().map(kept).collect())
        }
        "removeprefix" => {
            first.map_or_else(wrong, |prefix| Ok(text.strip_prefix(prefix).unwrap_or(text).into()))
        }
        "removesuffix" => {
            first.map_or_else(wrong, |suffix| Ok(text.strip_suffix(suffix).unwrap_or(text).into()))
        }
        "partition" => first.map_or_else(wrong, |separator| {
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let separator = if before.len() < text.len() { separator } else { "" };
            Ok([before, separator, after].into_iter().map(Value::from).collect())
        }),
        "rpartition" => first.map_or_else(wrong, |separator| {
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let separator = if after.len() < text.len() { separator } else { "" };
            Ok([before, separator, after].into_iter().map(Value::from).collect())
        }),
        "center" => pad(Side::Both, fill),
        "ljust" => pad(Side::After, fill),
        "rjust" => pad(Side::Before, fill),
        "zfill" => match arguments.first().map(|width| usize::try_from(width.clone())) {
            Some(Ok(width)) => {
                let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
                let filled = padded(state, digits, width.saturating_sub(sign.len()), Side::Before, '0');
                filled.map(|digits| format!("{sign}{digits}").into())
            }
            _ => wrong(),
        },
        "casefold" => Ok(text.to_lowercase().into()),
        "swapcase" => {
            let swap = |c: char| {
                if c.is_uppercase() {
                    c.to_lowercase().collect::<String>()
                } else {
                    c.to_uppercase().collect()
                }
            };
            Ok(text.chars().map(swap).collect::<String>().into())
        }
        "index" => match first.map(|part| text.find(part)) {
            Some(Some(at)) => Ok(text[..at].chars().count().into()),
            Some(None) => Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
            None => wrong(),
        },
        _ => return None,
    })
}

/// Splits a text from its end, as Python's `str.rsplit(sep=None, maxsplit=-1)`.
fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = separator.map_or_else(|| kwargs.get::<Option<Value>>("sep"), |given| Ok(Some(given)))?;
    let most = most.map_or_else(|| kwargs.get::<Option<i64>>("maxsplit"), |given| Ok(Some(given)))?;
    kwargs.assert_all_used()?;
    let separator = separator.filter(|separator| !separator.is_none());
    let separator = match separator.as_ref().map(Value::as_str) {
        None => None,
        Some(Some(separator)) if !separator.is_empty() => Some(separator),
        Some(_) => return Err(refused("rsplit: the separator must be a text that is not empty".into())),
    };
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let (mut parts, mut rest) = (Vec::new(), text);
    loop {
        if separator.is_none() {
            rest = rest.trim_end_matches(is_space);
            if rest.is_empty() {
                break;
            }
        }
        let split = match separator {
            _ if parts.len() == most => None,
            Some(separator) => rest.rsplit_once(separator),
            None => rest.rsplit_once(is_space),
        };
        let Some((before, part)) = split else {
            parts.push(rest);
            break;
        };
        parts.push(part);
        rest = before;
    }
    Ok(parts.into_iter().rev().map(Value::from).collect())
}

/// Returns whether Python's `str.isspace` holds for a character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Lists the lines of a text with their ends, as Python's `str.splitlines`.
pub(super) fn lines(text: &str) -> Vec<(&str, &str)> {
    let is_end =
        |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let first = rest[at..].chars().next().map_or(1, char::len_utf8);
        let end = at + if rest[at..].starts_with("\r\n") { 2 } else { first };
        lines.push((&rest[..at], &rest[at..end]));
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push((rest, ""));
    }
    lines
}

/// Reads a text in the base that `int` is given, if that is not ten; `None` if it is no number there.
pub(super) fn in_base(value: &Value, positional: &[Value], kwargs: &Kwargs) -> Result<Option<Value>, Error> {
    let base = match positional.get(1) {
        Some(base) => u32::try_from(base.clone())?,
        None => kwargs.get::<Option<u32>>("base")?.unwrap_or(10),
    };
    if !(2..=36).contains(&base) {
        return Err(refused(format!("int: the base must be from 2 to 36, found {base}")));
    }
    let Some(text) = value.as_str().filter(|_| base != 10) else { return Ok(None) };
    let text = text.trim().to_lowercase();
    let prefix = [(2, "0b"), (8, "0o"), (16, "0x")]
        .iter()
        .find(|(of, _)| *of == base)
        .map_or("", |(_, prefix)| prefix);
    Ok(i64::from_str_radix(text.strip_prefix(prefix).unwrap_or(&text), base).ok().map(Value::from))
}

/// Makes the first character upper case, and the others lower.
fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(characters.as_str().to_lowercase().chars()).collect()
}

/// Capitalises words. They begin after white space, hyphens and opening brackets, as in Jinja.
fn title(text: &str) -> String {
    let ends = |c: char| is_space(c) || "-([{<".contains(c);
    text.split_inclusive(ends).map(capitalized).collect()
}

/// Escapes for HTML as Python's MarkupSafe.
fn escape(state: &State, text: &str) -> Result<Value, Error> {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            other => escaped.push(other),
        }
    }
    charge(state, escaped.len())?;
    Ok(Value::from_safe_string(escaped))
}

/// Rounds halves to even, as Python; `ceil` and `floor` round up and down.
fn round(value: f64, positional: Rest<Value>, kwargs: Kwargs) -> Result<f64, Error> {
    let precision = match positional.first() {
        Some(precision) => i32::try_from(precision.clone())?,
        None => kwargs.get::<Option<i32>>("precision")?.unwrap_or(0),
    };
    let method = match positional.get(1) {
        Some(method) => method.to_string(),
        None => kwargs.get::<Option<String>>("method")?.unwrap_or_else(|| "common".to_owned()),
    };
    kwargs.assert_all_used()?;
    let scale = 10f64.powi(precision);
    match method.as_str() {
        "ceil" => Ok((value * scale).ceil() / scale),
        "floor" => Ok((value * scale).floor() / scale),
        // The shortest decimal of so many digits is what Python rounds to.
        "common" if precision > 0 => {
            let mut text = String::new();
            write!(text, "{value:.*}", precision.min(400) as usize).expect("a string grows");
            text.parse().map_err(|_| refused(format!("round: {value} is no number")))
        }
        "common" => Ok((value * scale).round_ties_even() / scale),
        other => Err(refused(format!("round: method must be common, ceil or floor, found {other}"))),
    }
}

fn replace(
    state: &State,
    value: Value,
    old: Value,
    new: Value,
    count: Option<usize>,
) -> Result<String, Error> {
    let [text, old, new] = [&value, &old, &new].map(|value| text_of(state, value));
    let (text, old, new) = (text?, old?, new?);
    charge_replacement(state, &text, &old, &new)?;
    Ok(count.map_or_else(|| text.replace(&old, &new), |count| text.replacen(&old, &new, count)))
}

/// Sides on which a text is filled up.
#[derive(Clone, Copy)]
enum Side {
    Before,
    After,
    Both,
}

fn padded(state: &State, text: &str, width: usize, side: Side, fill: char) -> Result<String, Error> {
    let missing = check_width(width)?.saturating_sub(text.chars().count());
    charge(state, text.len() + missing * fill.len_utf8())?;
    let before = match side {
        Side::Before => missing,
        Side::After => 0,
        // As CPython: of an odd number one more is before, if the width is odd.
        Side::Both => missing / 2 + (missing & width & 1),
    };
    let fill = |count: usize| std::iter::repeat_n(fill, count);
    Ok(fill(before).chain(text.chars()).chain(fill(missing - before)).collect())
}
