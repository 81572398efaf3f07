//! Declaration of config keys.
//!
//! A key is declared once, in its section's file: name, type, range, default, resume rule, condition
//! and documentation. A section is a function over [`Keys`] that visits its keys in order. The same
//! function reads the section from a file, writes it to the resolved config, and lists it for
//! `docs/config.md`. The macro [`keys!`] writes the function; a key's doc comment is its
//! documentation.

use super::Method;
use super::error::Result;
use super::form::{Form, ValueKind};
use super::reader::Section;

/// Rule for a key whose value differs from that of the run being resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The resumed run differs from one that never stopped: a warning says so.
    Alters,
    /// Storage, speed or frequency of side products: training computes the same.
    Free,
}

/// A key as the reference page shows it.
#[derive(Clone, Debug)]
pub struct KeyRow {
    /// Name within its table.
    pub name: &'static str,
    /// Former name, which is refused with a hint.
    pub former: Option<&'static str>,
    /// Type and range.
    pub kind: String,
    /// Type and range, for the JSON schema.
    pub(crate) value: ValueKind,
    /// Default; `None` for a required key.
    pub default: Option<String>,
    /// Rule for resuming.
    pub resume: Resume,
    /// Methods that have the key; empty for all.
    pub methods: Vec<Method>,
    /// Meaning.
    pub doc: String,
}

/// A key and its value in the resolved config.
pub(super) struct Written {
    pub key: &'static str,
    pub value: toml::Value,
    pub resume: Resume,
}

/// A table: its full name (`online.server`, `judges[0]`; empty for the root) and its keys.
pub(super) struct Table<T> {
    pub name: String,
    pub keys: Vec<T>,
}

/// One of the three things that are done with a section. The first table is the section's own;
/// nested ones follow.
pub(super) enum Keys {
    Read(Section),
    Write(Vec<Table<Written>>),
    List(Vec<Table<KeyRow>>),
}

/// Declaration of a key.
pub(super) struct Key<'a, T> {
    form: Form<'a, T>,
    default: T,
    row: KeyRow,
    /// Value to give, for a required key.
    give: Option<String>,
    /// Reason why the key does not apply, if so.
    refusal: Option<String>,
    is_written: bool,
}

impl<'a, T: Clone + 'a> Key<'a, T> {
    pub(crate) fn new(form: Form<'a, T>, default: T) -> Self {
        let unit = form.unit.map_or(String::new(), |unit| format!(" in {unit}"));
        let row = KeyRow {
            name: "",
            former: None,
            kind: form.kind.to_string().replacen(',', &format!("{unit},"), 1),
            value: form.kind.clone(),
            default: Some((form.write)(&default).map_or("none".to_owned(), |value| cell(&value))),
            resume: Resume::Alters,
            methods: Vec::new(),
            doc: String::new(),
        };
        Self { form, default, row, give: None, refusal: None, is_written: true }
    }

    /// Sets the name where it is not the field's.
    pub(crate) fn named(mut self, name: &'static str) -> Self {
        self.row.name = name;
        self
    }

    /// Sets the former name. It is read from resolved configs and refused elsewhere.
    pub(crate) fn formerly(mut self, name: &'static str) -> Self {
        self.row.former = Some(name);
        self
    }

    /// Sets the reference page's text for a default that depends on other keys.
    pub(crate) fn shown(mut self, text: &str) -> Self {
        self.row.default = Some(text.to_owned());
        self
    }

    /// Lets a resumed run change the key without a warning.
    pub(crate) fn free(mut self) -> Self {
        self.row.resume = Resume::Free;
        self
    }

    /// Makes the key required under a condition; `give` completes "is missing: give".
    pub(crate) fn required_if(mut self, condition: bool, give: impl Into<String>) -> Self {
        if condition {
            self.give = Some(give.into());
            self.row.default = None;
        }
        self
    }

    /// Leaves the key out of the resolved config unless the condition holds.
    pub(crate) fn written_if(mut self, condition: bool) -> Self {
        self.is_written = condition;
        self
    }

    /// Refuses the key, and leaves it out of the resolved config, unless the condition holds. The
    /// first condition that fails names the reason.
    pub(crate) fn only(mut self, condition: bool, reason: impl Into<String>) -> Self {
        self.refusal = self.refusal.or_else(|| (!condition).then(|| reason.into()));
        self
    }

    /// Restricts the key to some methods.
    pub(crate) fn methods(self, method: Method, has_key: fn(Method) -> bool) -> Self {
        let reason = format!("it has no effect with method = \"{method}\"; remove it");
        self.methods_because(method, has_key, reason)
    }

    /// Restricts the key to some methods, with a reason of its own.
    pub(crate) fn methods_because(
        mut self,
        method: Method,
        has_key: fn(Method) -> bool,
        reason: impl Into<String>,
    ) -> Self {
        self.row.methods = Method::all().filter(|method| has_key(*method)).collect();
        self.only(has_key(method), reason)
    }
}

/// A value in a cell of the reference page.
fn cell(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(x) if *x != 0.0 && x.abs() < 1e-3 => format!("{x:e}"),
        toml::Value::Float(x) => x.to_string(),
        toml::Value::String(_) | toml::Value::Array(_) => format!("`{value}`"),
        other => other.to_string(),
    }
}

impl Keys {
    pub(crate) fn write() -> Self {
        Self::Write(vec![Table::new(String::new())])
    }

    pub(crate) fn list() -> Self {
        Self::List(vec![Table::new(String::new())])
    }

    /// Visits a key. `now` is its value in a config that is written. Returns the value that is read
    /// or written; a listed key has its default.
    pub(crate) fn key<T: Clone>(
        &mut self,
        name: &'static str,
        doc: &str,
        key: Key<'_, T>,
        now: Option<T>,
    ) -> Result<T> {
        let Key { form, default, mut row, give, refusal, is_written } = key;
        if row.name.is_empty() {
            row.name = name;
        }
        match self {
            Self::Read(section) => match (section.take_renamed(row.name, row.former)?, refusal, give) {
                (Some(entry), Some(reason), _) => Err(entry.conflict(reason)),
                (Some(entry), None, _) => (form.read)(entry),
                (None, None, Some(give)) => Err(section.missing(row.name, &give)),
                (None, ..) => Ok(default),
            },
            Self::Write(tables) => {
                let value = now.unwrap_or(default);
                if refusal.is_none() && is_written {
                    let written = |value| Written { key: row.name, value, resume: row.resume };
                    tables[0].keys.extend((form.write)(&value).map(written));
                }
                Ok(value)
            }
            Self::List(tables) => {
                doc.trim().clone_into(&mut row.doc);
                tables[0].keys.push(row);
                Ok(default)
            }
        }
    }

    /// Returns whether a file has the second of two exclusive keys rather than the first. Both in one
    /// place contradict each other; an override replaces the file's choice.
    pub(crate) fn has_second(&mut self, first: &'static str, second: &'static str) -> Result<bool> {
        if let Self::Read(section) = self { section.has_second(first, second) } else { Ok(false) }
    }

    /// Visits a nested table; an absent one is empty.
    pub(crate) fn table<T>(
        &mut self,
        name: &'static str,
        now: Option<&T>,
        visit: impl FnOnce(Option<&T>, &mut Self) -> Result<T>,
    ) -> Result<T> {
        let full = |outer: &str| if outer.is_empty() { name.to_owned() } else { format!("{outer}.{name}") };
        let mut inner = match self {
            Self::Read(section) => Self::Read(section.section(name)?),
            Self::Write(tables) => Self::Write(vec![Table::new(full(&tables[0].name))]),
            Self::List(tables) => Self::List(vec![Table::new(full(&tables[0].name))]),
        };
        let value = visit(now, &mut inner)?;
        self.close(inner)?;
        Ok(value)
    }

    /// Visits a nested table that may be absent.
    pub(crate) fn optional_table<T>(
        &mut self,
        name: &'static str,
        now: Option<&Option<T>>,
        visit: impl FnOnce(Option<&T>, &mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        let is_there = match self {
            Self::Read(section) => section.has(name),
            Self::Write(_) => now.is_some_and(Option::is_some),
            Self::List(_) => true,
        };
        is_there.then(|| self.table(name, now.and_then(Option::as_ref), visit)).transpose()
    }

    /// Refuses a table that does not apply.
    pub(crate) fn refuse(&mut self, name: &'static str, reason: &str) -> Result<()> {
        match self {
            Self::Read(section) => section.take(name).map_or(Ok(()), |entry| Err(entry.conflict(reason))),
            _ => Ok(()),
        }
    }

    /// Visits an array of tables, which must not be empty; `give` says what to write. The reference
    /// page lists none of it.
    pub(crate) fn tables<T>(
        &mut self,
        name: &'static str,
        give: &str,
        now: Option<&Vec<T>>,
        visit: impl Fn(Option<&T>, &mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut values = Vec::new();
        let items = match self {
            Self::Read(section) => {
                let entry = section.take(name).ok_or_else(|| section.missing(name, give))?;
                let wrong = entry.wrong(format!("one [[{name}]] table or more"));
                Some(entry.items_of_list().filter(|items| !items.is_empty()).ok_or(wrong)?)
            }
            _ => None,
        };
        for item in items.into_iter().flatten() {
            let mut inner = Self::Read(item.section()?);
            values.push(visit(None, &mut inner)?);
            inner.finish()?;
        }
        for (index, value) in now.into_iter().flatten().enumerate() {
            let mut inner = Self::Write(vec![Table::new(format!("{name}[{index}]"))]);
            values.push(visit(Some(value), &mut inner)?);
            self.close(inner)?;
        }
        Ok(values)
    }

    fn close(&mut self, inner: Self) -> Result<()> {
        match (self, inner) {
            (Self::Write(tables), Self::Write(inner)) => tables.extend(inner),
            (Self::List(tables), Self::List(inner)) => tables.extend(inner),
            (_, inner) => inner.finish()?,
        }
        Ok(())
    }

    /// Refuses the keys of a table that were not read.
    pub(crate) fn finish(self) -> Result<()> {
        if let Self::Read(section) = self { section.finish() } else { Ok(()) }
    }
}

impl<T> Table<T> {
    fn new(name: String) -> Self {
        Self { name, keys: Vec::new() }
    }
}

/// The right side of a field in [`keys!`].
pub(super) trait Declaration<T> {
    fn visit(self, name: &'static str, doc: &str, keys: &mut Keys, now: Option<&T>) -> Result<T>;
}

impl<T: Clone> Declaration<T> for Key<'_, T> {
    fn visit(self, name: &'static str, doc: &str, keys: &mut Keys, now: Option<&T>) -> Result<T> {
        keys.key(name, doc, self, now.cloned())
    }
}

/// A field that several keys or a table make up.
pub(super) struct Group<V>(V);

pub(super) fn group<T, V: FnOnce(Option<&T>, &mut Keys) -> Result<T>>(visit: V) -> Group<V> {
    Group(visit)
}

impl<T, V: FnOnce(Option<&T>, &mut Keys) -> Result<T>> Declaration<T> for Group<V> {
    fn visit(self, _: &'static str, _: &str, keys: &mut Keys, now: Option<&T>) -> Result<T> {
        (self.0)(now, keys)
    }
}

/// Declares the keys of a section. A declaration may name the context, which are arguments, and the
/// fields or keys before it. Three forms:
///
/// * a struct with a key, or a [`group`] of keys, for each field;
/// * the same for a struct of another module;
/// * `let`: variables with the values of keys, each followed by its value in `now`.
macro_rules! keys {
    ($(#[$meta:meta])* pub struct $name:ident($($context:ident: $type:ty),* $(,)?) {
        $($(#[doc = $doc:literal])* $field:ident: $of:ty = $key:expr,)+
    }) => {
        $(#[$meta])*
        pub struct $name { $($(#[doc = $doc])* pub $field: $of,)+ }

        impl $name {
            keys! { fn visit($($context: $type),*) -> $name { $($(#[doc = $doc])* $field = $key,)+ } }
        }
    };
    (fn $function:ident($($context:ident: $type:ty),*) -> $name:ident {
        $($(#[doc = $doc:literal])* $field:ident = $key:expr,)+
    }) => {
        pub(in crate::config) fn $function(
            now: Option<&$name>,
            keys: &mut $crate::config::keys::Keys,
            $($context: $type),*
        ) -> $crate::config::error::Result<$name> {
            $(let $field = $crate::config::keys::Declaration::visit(
                $key, stringify!($field), concat!($($doc),*), keys, now.map(|now| &now.$field),
            )?;)+
            Ok($name { $($field),+ })
        }
    };
    (let $keys:ident, $now:ident; $($(#[doc = $doc:literal])* $name:ident = $key:expr, $value:expr;)+) => {
        $(let $name = {
            let key = $key;
            $keys.key(stringify!($name), concat!($($doc),*), key, $now.and_then(|$now| Some($value)))?
        };)+
    };
}
pub(super) use keys;
