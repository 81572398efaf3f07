//! JSON of a request, read within bounds: a body of some megabytes must not become hundreds in memory, and a
//! field that is given twice must not lose one value.

use std::cell::{Cell, RefCell};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::{ApiError, clip};

/// Most JSON values of a request beside those of its prompts.
const MOST_VALUES: usize = 1 << 16;

/// A prompt as it was sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Fields of a request.
#[derive(Debug, Default)]
pub(super) struct Body {
    /// `prompt`, if it is there and not null.
    pub prompt: Option<Vec<Prompt>>,
    /// All other fields.
    pub fields: Map<String, Value>,
}

/// Parses a request with at most `max_prompts` prompts.
pub(super) fn read(bytes: &[u8], max_prompts: usize) -> Result<Body, ApiError> {
    let (values, field) = (Cell::new(MOST_VALUES), RefCell::new(None));
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let request = RequestVisitor { values: &values, field: &field, max_prompts };
    let body = parser.deserialize_map(request).and_then(|body| parser.end().map(|()| body));
    body.map_err(|error| {
        if bytes.trim_ascii_start().first().is_some_and(|&first| first != b'{') && error.is_data() {
            return ApiError::invalid(None, "the request body is not a JSON object");
        }
        // The parser repeats values that it did not expect.
        let why = clip(&error.to_string());
        match field.take().filter(|_| error.is_data()) {
            Some(name) => ApiError::invalid(Some(&name), format!("`{}`: {why}", clip(&name))),
            None => ApiError::invalid(None, format!("the request body is not JSON: {why}")),
        }
    })
}

struct RequestVisitor<'a> {
    /// Number of values that may follow.
    values: &'a Cell<usize>,
    /// Field that is being read.
    field: &'a RefCell<Option<String>>,
    max_prompts: usize,
}

impl<'de> Visitor<'de> for RequestVisitor<'_> {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut body = Body::default();
        let mut has_prompt = false;
        while let Some(name) = map.next_key::<String>()? {
            self.field.replace(Some(name.clone()));
            if name == "prompt" {
                if std::mem::replace(&mut has_prompt, true) {
                    return Err(A::Error::custom("it is given twice"));
                }
                body.prompt = map.next_value_seed(PromptsVisitor { most: self.max_prompts })?;
            } else {
                insert(&mut body.fields, name, map.next_value_seed(BoundedValue(self.values))?)?;
            }
        }
        self.field.replace(None);
        Ok(body)
    }
}

fn insert<E: Error>(fields: &mut Map<String, Value>, name: String, value: Value) -> Result<(), E> {
    match fields.insert(name, value) {
        None => Ok(()),
        Some(_) => Err(E::custom("it is given twice")),
    }
}

/// Any value, while values are left.
#[derive(Clone, Copy)]
struct BoundedValue<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for BoundedValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<Value, D::Error> {
        let left = self.0.get().checked_sub(1);
        self.0.set(left.ok_or_else(|| {
            D::Error::custom(format!("the request has more than {MOST_VALUES} values beside its prompts"))
        })?);
        parser.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for BoundedValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("it is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format!("`{}` in it is given twice", clip(&name))));
            }
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

/// A text, token ids, or a list of either; `None` for null.
struct PromptsVisitor {
    most: usize,
}

impl<'de> DeserializeSeed<'de> for PromptsVisitor {
    type Value = Option<Vec<Prompt>>;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<Self::Value, D::Error> {
        parser.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Option<Vec<Prompt>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("text, token ids, or a list of either")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(vec![Prompt::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let (mut prompts, mut tokens) = (Vec::new(), Vec::new());
        while let Some(item) = items.next_element_seed(ItemVisitor)? {
            match item {
                Item::Token(token) => tokens.push(token),
                Item::Prompt(_) if prompts.len() == self.most => {
                    let most = self.most;
                    return Err(A::Error::custom(format!("it has more than {most} prompts (--max-prompts)")));
                }
                Item::Prompt(prompt) => prompts.push(prompt),
            }
            if !prompts.is_empty() && !tokens.is_empty() {
                return Err(A::Error::custom("a list has either token ids or prompts"));
            }
        }
        match (tokens.is_empty(), prompts.is_empty()) {
            (true, true) => Err(A::Error::custom("the list is empty, expected at least one token or prompt")),
            (true, false) => Ok(Some(prompts)),
            (false, _) => Ok(Some(vec![Prompt::Tokens(tokens)])),
        }
    }
}

enum Item {
    Token(u32),
    Prompt(Prompt),
}

#[derive(Clone, Copy)]
struct ItemVisitor;

impl<'de> DeserializeSeed<'de> for ItemVisitor {
    type Value = Item;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<Item, D::Error> {
        parser.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("text, a token id, or a list of token ids")
    }

    fn visit_u64<E: Error>(self, token: u64) -> Result<Item, E> {
        let token = u32::try_from(token).map_err(|_| E::custom(format!("{token} is no token id")))?;
        Ok(Item::Token(token))
    }

    fn visit_str<E>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Prompt(Prompt::Text(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = items.next_element::<u32>()? {
            tokens.push(token);
        }
        if tokens.is_empty() {
            return Err(A::Error::custom("a prompt of it is an empty list"));
        }
        Ok(Item::Prompt(Prompt::Tokens(tokens)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(json: &str) -> Option<Vec<Prompt>> {
        read(format!("{{\"prompt\": {json}}}").as_bytes(), 3).unwrap().prompt
    }

    fn error(json: &str) -> String {
        read(json.as_bytes(), 3).unwrap_err().body()["error"].to_string()
    }

    #[test]
    fn prompts_are_texts_or_tokens() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(prompt("null"), None);
        assert_eq!(prompt("\"a\\u0062\""), Some(vec![text("ab")]));
        assert_eq!(prompt("[1, 4294967295]"), Some(vec![Prompt::Tokens(vec![1, u32::MAX])]));
        assert_eq!(prompt("[\"\", [7]]"), Some(vec![text(""), Prompt::Tokens(vec![7])]));
    }

    #[test]
    fn prompts_of_other_types_are_refused() {
        for (json, says) in [
            ("5", "expected text, token ids"),
            ("{}", "expected text, token ids"),
            ("[]", "the list is empty"),
            ("[[]]", "an empty list"),
            ("[-1]", "invalid type: integer `-1`"),
            ("[1.5]", "1.5"),
            ("[4294967296]", "4294967296 is no token id"),
            ("[[4294967296]]", "4294967296"),
            ("[1, \"a\"]", "either token ids or prompts"),
            ("[[[1]]]", "invalid type: sequence"),
            ("[\"a\", null]", "invalid type: null"),
            ("[\"\", \"\", \"\", \"\"]", "more than 3 prompts"),
        ] {
            let error = error(&format!("{{\"prompt\": {json}}}"));
            assert!(error.contains(says) && error.contains("\"param\":\"prompt\""), "{json}: {error}");
        }
    }

    #[test]
    fn a_field_is_given_once() {
        for json in ["{\"n\": 1, \"n\": 2}", "{\"prompt\": \"a\", \"prompt\": \"b\"}"] {
            assert!(error(json).contains("it is given twice"), "{json}");
        }
        let nested = error("{\"messages\": [{\"role\": \"user\", \"role\": \"system\"}]}");
        assert!(nested.contains("`role` in it is given twice") && nested.contains("messages"), "{nested}");
    }

    #[test]
    fn values_are_counted_and_depth_is_bounded() {
        let many = format!("{{\"stop\": [{}1]}}", "1,".repeat(1 << 16));
        assert!(error(&many).contains("more than 65536 values"));
        let deep = format!("{{\"stop\": {}", "[".repeat(1 << 20));
        assert!(error(&deep).contains("recursion limit exceeded"));
        let deep = format!("{{\"prompt\": {}", "[".repeat(1 << 20));
        assert!(error(&deep).contains("invalid type: sequence"));
    }

    #[test]
    fn what_is_not_an_object_is_refused() {
        for json in ["[]", "1", "\"a\"", "null", " [1]"] {
            assert!(error(json).contains("is not a JSON object"), "{json}");
        }
        for json in ["", "{", "{\"n\": NaN}", "{\"n\": 1e999}", "{} {}", "{\"n\": \"\u{0}\"}", "\u{feff}{}"] {
            assert!(error(json).contains("is not JSON"), "{json}");
        }
        let long = error(&format!("{{\"prompt\": {{\"{}\": 1}}}}", "x".repeat(9000)));
        assert!(long.len() < 1000, "{long}");
    }
}
