//! Declaration of config keys.
//!
//! A key is declared once, in its section's file: name, type, range, default, resume rule,
//! condition and documentation. A section is a function over [`Keys`] that names its keys in order.
//! The same function reads the section from a file, writes it to the resolved config and lists it
//! for `docs/config.md`. The macro [`keys!`] writes that function from a list of fields; the doc
//! comment of a field is the key's documentation.

use super::Method;
use super::error::Result;
use super::form::Form;
use super::reader::{Entry, Section};

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

/// A key's declaration without its name and documentation.
pub(super) struct Key<F: Form> {
    form: F,
    default: F::Value,
    name: Option<&'static str>,
    former: Option<&'static str>,
    give: Option<String>,
    shown: Option<&'static str>,
    resume: Resume,
    methods: Vec<Method>,
    refusal: Option<String>,
    is_written: bool,
}

impl<F: Form> Key<F> {
    pub fn new(form: F, default: F::Value) -> Self {
        Self {
            form,
            default,
            name: None,
            former: None,
            give: None,
            shown: None,
            resume: Resume::Alters,
            methods: Vec::new(),
            refusal: None,
            is_written: true,
        }
    }

    /// Sets the name where it is not the field's.
    pub fn named(self, name: &'static str) -> Self {
        Self { name: Some(name), ..self }
    }

    /// Sets the former name. It is read from resolved configs and refused elsewhere.
    pub fn formerly(self, name: &'static str) -> Self {
        Self { former: Some(name), ..self }
    }

    /// Sets the reference page's text for a default that depends on other keys.
    pub fn shown(self, text: &'static str) -> Self {
        Self { shown: Some(text), ..self }
    }

    /// Lets a resumed run change the key without a warning.
    pub fn free(self) -> Self {
        Self { resume: Resume::Free, ..self }
    }

    /// Makes the key required under a condition; `give` completes "is missing: give".
    pub fn required_if(self, condition: bool, give: impl Into<String>) -> Self {
        Self { give: condition.then(|| give.into()), ..self }
    }

    /// Leaves the key out of the resolved config unless the condition holds.
    pub fn written_if(self, condition: bool) -> Self {
        Self { is_written: condition, ..self }
    }

    /// Refuses the key, and leaves it out of the resolved config, unless the condition holds. The
    /// first condition that fails names the reason.
    pub fn only(self, condition: bool, reason: impl Into<String>) -> Self {
        let refusal = self.refusal.or_else(|| (!condition).then(|| reason.into()));
        Self { refusal, ..self }
    }

    /// Restricts the key to some methods.
    pub fn methods(self, method: Method, has_key: fn(Method) -> bool) -> Self {
        self.methods_because(method, has_key, format!("has no effect with method = \"{method}\"; remove it"))
    }

    /// Restricts the key to some methods, with a reason of its own.
    pub fn methods_because(
        self,
        method: Method,
        has_key: fn(Method) -> bool,
        reason: impl Into<String>,
    ) -> Self {
        let methods = Method::all().filter(|method| has_key(*method)).collect();
        Self { methods, ..self }.only(has_key(method), reason)
    }

    fn row(&self, name: &'static str, doc: &str) -> KeyRow {
        let default =
            || self.form.write(&self.default).map_or_else(|| "none".to_owned(), |value| code(&value));
        KeyRow {
            name,
            former: self.former,
            kind: self.form.kind(),
            default: match (self.shown, &self.give) {
                (Some(text), _) => Some(text.to_owned()),
                (None, Some(_)) => None,
                (None, None) => Some(default()),
            },
            resume: self.resume,
            methods: self.methods.clone(),
            doc: doc.trim().to_owned(),
        }
    }
}

/// A value in a cell of the reference page.
fn code(value: &toml::Value) -> String {
    if value.is_str() || value.is_array() { format!("`{value}`") } else { value.to_string() }
}

impl Keys {
    pub fn write() -> Self {
        Self::Write(vec![Table::new(String::new())])
    }

    pub fn list() -> Self {
        Self::List(vec![Table::new(String::new())])
    }

    /// Visits a key. `now` is its value in a config that is written. Returns the value that is read
    /// or written; a listed key has its default.
    pub fn key<F: Form>(
        &mut self,
        name: &'static str,
        doc: &str,
        key: Key<F>,
        now: Option<&F::Value>,
    ) -> Result<F::Value> {
        let name = key.name.unwrap_or(name);
        match self {
            Self::Read(section) => match (section.take_renamed(name, key.former)?, key.refusal, key.give) {
                (Some(entry), Some(reason), _) => Err(entry.conflict(reason)),
                (Some(entry), None, _) => key.form.read(entry),
                (None, None, Some(give)) => Err(section.missing(name, &give)),
                (None, ..) => Ok(key.default),
            },
            Self::Write(tables) => {
                let value = now.unwrap_or(&key.default);
                if key.refusal.is_none() && key.is_written {
                    let resume = key.resume;
                    let written = key.form.write(value).map(|value| Written { key: name, value, resume });
                    tables[0].keys.extend(written);
                }
                Ok(value.clone())
            }
            Self::List(tables) => {
                tables[0].keys.push(key.row(name, doc));
                Ok(key.default)
            }
        }
    }

    /// Visits a nested table; an absent one is empty.
    pub fn table<T>(
        &mut self,
        name: &'static str,
        now: Option<&T>,
        visit: impl FnOnce(Option<&T>, &mut Self) -> Result<T>,
    ) -> Result<T> {
        let mut inner = self.open(name)?;
        let value = visit(now, &mut inner)?;
        self.close(inner)?;
        Ok(value)
    }

    /// Visits a nested table that the file may leave out.
    pub fn optional_table<T>(
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

    /// Visits a nested table that the file must have, may not have where there is a `refusal`.
    pub fn table_unless<T>(
        &mut self,
        name: &'static str,
        refusal: Option<String>,
        now: Option<&Option<T>>,
        visit: impl FnOnce(Option<&T>, &mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        match (&mut *self, refusal) {
            (Self::Read(section), Some(reason)) => match section.take(name) {
                Some(entry) => Err(entry.conflict(reason)),
                None => Ok(None),
            },
            (Self::Write(_), Some(_)) => Ok(None),
            _ => self.table(name, now.and_then(Option::as_ref), visit).map(Some),
        }
    }

    /// Visits an array of tables, which must not be empty. The reference page lists none of it.
    pub fn tables<T>(
        &mut self,
        name: &'static str,
        refusal: Option<String>,
        give: Option<&str>,
        now: Option<&Vec<T>>,
        visit: impl Fn(Option<&T>, &mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        match self {
            Self::Read(section) => match (section.take(name), refusal, give) {
                (Some(entry), Some(reason), _) => Err(entry.conflict(reason)),
                (Some(entry), None, _) => read_tables(entry, name, visit),
                (None, None, Some(give)) => Err(section.missing(name, give)),
                (None, ..) => Ok(Vec::new()),
            },
            Self::Write(tables) => {
                let values = now.into_iter().flatten().enumerate();
                values
                    .map(|(index, value)| {
                        let mut inner = Self::Write(vec![Table::new(format!("{name}[{index}]"))]);
                        let value = visit(Some(value), &mut inner)?;
                        if let Self::Write(inner) = inner {
                            tables.extend(inner);
                        }
                        Ok(value)
                    })
                    .collect()
            }
            Self::List(_) => Ok(Vec::new()),
        }
    }

    /// Visits two keys of which a file may have one. Both in one place contradict each other; an
    /// override replaces the file's choice whichever of the two it names. `give` makes one required.
    pub fn either<F: Form, G: Form>(
        &mut self,
        (first, first_doc, first_form): (&'static str, &str, F),
        (second, second_doc, second_form): (&'static str, &str, G),
        default: Either<F::Value, G::Value>,
        give: Option<&'static str>,
        now: Option<Either<F::Value, G::Value>>,
    ) -> Result<Either<F::Value, G::Value>> {
        match self {
            Self::Read(section) => {
                let (a, b) = match (section.take(first), section.take(second)) {
                    (Some(a), Some(b)) => match (a.is_override(), b.is_override()) {
                        (true, false) => (Some(a), None),
                        (false, true) => (None, Some(b)),
                        _ => {
                            let reason = format!("`{}` is given too; remove one of the two", a.key);
                            return Err(b.conflict(reason));
                        }
                    },
                    one => one,
                };
                match (a, b, give) {
                    (Some(entry), ..) => first_form.read(entry).map(Either::First),
                    (None, Some(entry), _) => second_form.read(entry).map(Either::Second),
                    (None, None, Some(give)) => Err(section.missing(first, give)),
                    (None, None, None) => Ok(default),
                }
            }
            Self::Write(tables) => {
                let now = now.unwrap_or(default);
                let (key, value) = match &now {
                    Either::First(value) => (first, first_form.write(value)),
                    Either::Second(value) => (second, second_form.write(value)),
                };
                let written = value.map(|value| Written { key, value, resume: Resume::Alters });
                tables[0].keys.extend(written);
                Ok(now)
            }
            Self::List(tables) => {
                let shown = match &default {
                    Either::First(value) if give.is_none() => first_form.write(value),
                    _ => None,
                };
                let row = |name, doc: &str, kind, default| KeyRow {
                    name,
                    former: None,
                    kind,
                    default,
                    resume: Resume::Alters,
                    methods: Vec::new(),
                    doc: doc.to_owned(),
                };
                let other = Some(format!("see `{first}`"));
                let shown = shown.map_or(format!("this or `{second}`"), |value| code(&value));
                tables[0].keys.push(row(first, first_doc, first_form.kind(), Some(shown)));
                tables[0].keys.push(row(second, second_doc, second_form.kind(), other));
                Ok(default)
            }
        }
    }

    /// Refuses the keys of a table that were not read.
    pub fn finish(self) -> Result<()> {
        if let Self::Read(section) = self { section.finish() } else { Ok(()) }
    }

    fn open(&mut self, name: &'static str) -> Result<Self> {
        let full = |outer: &str| if outer.is_empty() { name.to_owned() } else { format!("{outer}.{name}") };
        Ok(match self {
            Self::Read(section) => Self::Read(section.section(name)?),
            Self::Write(tables) => Self::Write(vec![Table::new(full(&tables[0].name))]),
            Self::List(tables) => Self::List(vec![Table::new(full(&tables[0].name))]),
        })
    }

    fn close(&mut self, inner: Self) -> Result<()> {
        match (self, inner) {
            (Self::Write(tables), Self::Write(inner)) => tables.extend(inner),
            (Self::List(tables), Self::List(inner)) => tables.extend(inner),
            (_, inner) => inner.finish()?,
        }
        Ok(())
    }
}

fn read_tables<T>(
    entry: Entry,
    name: &str,
    visit: impl Fn(Option<&T>, &mut Keys) -> Result<T>,
) -> Result<Vec<T>> {
    let wrong = entry.wrong(format!("one [[{name}]] table or more"));
    if !entry.is_list() {
        return Err(wrong);
    }
    let mut values = Vec::new();
    for item in entry.items() {
        let mut keys = Keys::Read(item.section()?);
        values.push(visit(None, &mut keys)?);
        keys.finish()?;
    }
    if values.is_empty() { Err(wrong) } else { Ok(values) }
}

impl<T> Table<T> {
    fn new(name: String) -> Self {
        Self { name, keys: Vec::new() }
    }
}

/// One of two exclusive keys.
pub(super) enum Either<A, B> {
    First(A),
    Second(B),
}

/// The right side of a field in [`keys!`].
pub(super) trait Declaration<T> {
    fn visit(self, name: &'static str, doc: &str, keys: &mut Keys, now: Option<&T>) -> Result<T>;
}

impl<F: Form> Declaration<F::Value> for Key<F> {
    fn visit(
        self,
        name: &'static str,
        doc: &str,
        keys: &mut Keys,
        now: Option<&F::Value>,
    ) -> Result<F::Value> {
        keys.key(name, doc, self, now)
    }
}

/// A field that several keys make up.
pub(super) struct Group<V>(V);

pub(super) fn group<T, V: FnOnce(Option<&T>, &mut Keys) -> Result<T>>(visit: V) -> Group<V> {
    Group(visit)
}

impl<T, V: FnOnce(Option<&T>, &mut Keys) -> Result<T>> Declaration<T> for Group<V> {
    fn visit(self, _: &'static str, _: &str, keys: &mut Keys, now: Option<&T>) -> Result<T> {
        (self.0)(now, keys)
    }
}

/// A field that is no key.
pub(super) struct Fixed<T>(pub T);

impl<T> Declaration<T> for Fixed<T> {
    fn visit(self, _: &'static str, _: &str, _: &mut Keys, _: Option<&T>) -> Result<T> {
        Ok(self.0)
    }
}

/// Declares the keys of a section: `field: Type = declaration`, with the section's context as
/// arguments. A declaration may name the arguments and the fields before it. The second form
/// declares the keys of a struct of another module.
macro_rules! keys {
    ($(#[$meta:meta])* pub struct $name:ident($($context:ident: $type:ty),*) {
        $($(#[doc = $doc:literal])* $field:ident: $of:ty = $key:expr,)+
    }) => {
        $(#[$meta])*
        pub struct $name { $($(#[doc = $doc])* pub $field: $of,)+ }

        impl $name {
            pub(in crate::config) fn visit(
                now: Option<&Self>,
                keys: &mut $crate::config::keys::Keys,
                $($context: $type),*
            ) -> $crate::config::error::Result<Self> {
                $(let $field = $crate::config::keys::Declaration::visit(
                    $key, stringify!($field), concat!($($doc),*), keys, now.map(|now| &now.$field),
                )?;)+
                Ok(Self { $($field),+ })
            }
        }
    };
    (fn $function:ident($($context:ident: $type:ty),*) -> $name:ident {
        $($(#[doc = $doc:literal])* $field:ident = $key:expr,)+
    }) => {
        fn $function(
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
}
pub(super) use keys;
