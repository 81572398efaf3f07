//! Types of config values: how each is read, written and described.

use std::fmt;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};

use tandem_kernels::Format;
use toml::Value;

use super::error::Result;
use super::hub::HubPart;
use super::keys::Key;
use super::reader::Entry;

/// Type and range of a value.
#[derive(Clone, Debug)]
pub(crate) enum ValueKind {
    /// An integer in a range.
    Integer(RangeInclusive<u64>),
    /// A finite number in a range.
    Number(Bound<f64>, Bound<f64>),
    /// One of several names.
    Choice(Vec<&'static str>),
    /// Another type, in words.
    Other(&'static str),
}

type Write<'a, T> = Box<dyn Fn(&T) -> Option<Value> + 'a>;

/// Type of a key's value.
pub(super) struct Form<'a, T> {
    pub kind: ValueKind,
    pub unit: Option<&'static str>,
    pub read: Box<dyn Fn(Entry) -> Result<T> + 'a>,
    /// Returns the TOML value; `None` for a value that the resolved config leaves out.
    pub write: Write<'a, T>,
}

impl<'a, T: Clone + 'a> Form<'a, T> {
    fn new<O: Into<Option<Value>>>(
        kind: ValueKind,
        read: impl Fn(Entry) -> Result<T> + 'a,
        write: impl Fn(&T) -> O + 'a,
    ) -> Self {
        Self { kind, unit: None, read: Box::new(read), write: Box::new(move |value| write(value).into()) }
    }

    /// Sets the unit that the reference page shows.
    pub(crate) fn unit(self, unit: &'static str) -> Self {
        Self { unit: Some(unit), ..self }
    }

    /// Refuses a value for which there is a reason.
    pub(crate) fn unless(self, reason: impl Fn(&T) -> Option<String> + 'a) -> Self {
        let read = self.read;
        let read = move |entry: Entry| {
            let value = read(entry.clone())?;
            reason(&value).map_or(Ok(value), |reason| Err(entry.conflict(reason)))
        };
        Self { read: Box::new(read), ..self }
    }

    /// The form with `None` for an absent key.
    pub(crate) fn maybe(self) -> Form<'a, Option<T>> {
        let Self { kind, unit, read, write } = self;
        let write = move |value: &Option<T>| value.as_ref().and_then(&write);
        Form { unit, ..Form::new(kind, move |entry| read(entry).map(Some), write) }
    }

    /// The form with `None` for 0.
    pub(crate) fn zero_is_none(self) -> Form<'a, Option<T>>
    where
        T: Default + PartialEq,
    {
        let Self { kind, unit, read, write } = self;
        let read = move |entry| read(entry).map(|value| (value != T::default()).then_some(value));
        let write = move |value: &Option<T>| write(&value.clone().unwrap_or_default());
        Form { unit, ..Form::new(kind, read, write) }
    }

    /// A key with a default.
    pub(crate) fn or(self, default: T) -> Key<'a, T> {
        Key::new(self, default)
    }

    /// A key that may be absent.
    pub(crate) fn optional(self) -> Key<'a, Option<T>> {
        self.maybe().or(None)
    }

    /// A key without a default; `give` completes "is missing: give".
    pub(crate) fn required(self, give: impl Into<String>) -> Key<'a, T>
    where
        T: Default,
    {
        self.or(T::default()).required_if(true, give)
    }
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Bound::{Excluded, Included, Unbounded};
        match self {
            Self::Integer(range) if *range.end() >= i64::MAX as u64 => {
                write!(f, "integer, ≥ {}", range.start())
            }
            Self::Integer(range) => write!(f, "integer, {} to {}", range.start(), range.end()),
            Self::Number(Included(low), Included(high)) => write!(f, "number, {low} to {high}"),
            Self::Number(low, high) => {
                f.write_str("number")?;
                match low {
                    Included(low) => write!(f, ", ≥ {low}")?,
                    Excluded(low) => write!(f, ", > {low}")?,
                    Unbounded => {}
                }
                match high {
                    Included(high) => write!(f, ", ≤ {high}"),
                    Excluded(high) => write!(f, ", < {high}"),
                    Unbounded => Ok(()),
                }
            }
            Self::Choice(names) => {
                let names: Vec<_> = names.iter().map(|name| format!("`\"{name}\"`")).collect();
                f.write_str(&names.join(", "))
            }
            Self::Other(words) => f.write_str(words),
        }
    }
}

/// Every count that fits TOML's integers.
pub(super) const COUNT: RangeInclusive<u64> = 0..=i64::MAX as u64;
/// The same without 0.
pub(super) const AT_LEAST_ONE: RangeInclusive<u64> = 1..=i64::MAX as u64;
/// Numbers above 0.
pub(super) const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

/// A form of a single key; `kind` describes its type.
pub(super) fn custom<'a, T: Clone + 'a, O: Into<Option<Value>>>(
    kind: &'static str,
    read: impl Fn(Entry) -> Result<T> + 'a,
    write: impl Fn(&T) -> O + 'a,
) -> Form<'a, T> {
    Form::new(ValueKind::Other(kind), read, write)
}

pub(super) fn integer<'a, T>(range: RangeInclusive<u64>) -> Form<'a, T>
where
    T: Copy + TryFrom<u64> + TryInto<u64> + 'a,
{
    let kind = ValueKind::Integer(range.clone());
    let read = move |entry: Entry| {
        T::try_from(entry.integer(range.clone())?).map_err(|_| entry.wrong("a smaller integer"))
    };
    // The range ends where TOML's integers do.
    Form::new(kind, read, |value| (*value).try_into().ok().map(|number: u64| Value::Integer(number as i64)))
}

pub(super) fn number<'a>(range: impl RangeBounds<f64>) -> Form<'a, f64> {
    number_of("a number", range)
}

pub(super) fn seconds<'a>(range: impl RangeBounds<f64>) -> Form<'a, f64> {
    number_of("a number of seconds", range).unit("seconds")
}

fn number_of<'a>(noun: &str, range: impl RangeBounds<f64>) -> Form<'a, f64> {
    use Bound::{Excluded, Included, Unbounded};
    let bounds = (range.start_bound().cloned(), range.end_bound().cloned());
    let words = match bounds {
        (Unbounded, _) => noun.replacen(' ', " finite ", 1),
        (Excluded(0.0), Unbounded) => noun.replacen(' ', " positive ", 1),
        (Excluded(low), Unbounded) => format!("{noun} above {low}"),
        (Included(low), Unbounded) => format!("{noun} of at least {low}"),
        (Included(low), Included(high)) => format!("{noun} from {low} to {high}"),
        (Excluded(low), Included(high)) => format!("{noun} above {low}, at most {high}"),
        (Included(low), Excluded(high)) => format!("{noun} of at least {low} and below {high}"),
        (Excluded(low), Excluded(high)) => format!("{noun} above {low} and below {high}"),
    };
    let read = move |entry: Entry| entry.number(&words, |x| bounds.contains(x));
    Form::new(ValueKind::Number(bounds.0, bounds.1), read, |value| Value::from(*value))
}

/// `true` or `false`.
pub(super) fn boolean<'a>() -> Form<'a, bool> {
    custom("boolean", |entry| entry.boolean(), |value| Value::from(*value))
}

pub(super) fn choice<'a, T>(names: impl AsRef<[(&'static str, T)]>) -> Form<'a, T>
where
    T: Copy + PartialEq + 'a,
{
    let names = names.as_ref().to_vec();
    let kind = ValueKind::Choice(names.iter().map(|(name, _)| *name).collect());
    let written = names.clone();
    let write = move |value: &T| written.iter().find(|(_, v)| v == value).map(|(name, _)| Value::from(*name));
    Form::new(kind, move |entry| entry.one_of(&names), write)
}

/// A format of frozen weights; `None` is "auto".
pub(super) fn format<'a>() -> Form<'a, Option<Format>> {
    let formats = Format::ALL.map(|format| (format.name(), Some(format)));
    choice([&[("auto", None)], &formats[..]].concat())
}

/// A path, made absolute.
pub(super) fn path<'a>() -> Form<'a, PathBuf> {
    custom("path", |entry| entry.path(), |path| path_value(path))
}

/// A path, made absolute, or a name of the hub.
pub(super) fn path_or_name<'a>(part: HubPart) -> Form<'a, PathBuf> {
    custom("path or name of the hub", move |entry| entry.path_or_name(part), |path| path_value(path))
}

/// A path as TOML. It came from a TOML string joined to the current directory, so it is UTF-8
/// wherever that directory is.
pub(super) fn path_value(path: &Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

pub(super) fn text<'a>() -> Form<'a, String> {
    custom("string", |entry| entry.string().map(str::to_owned), |text| Value::from(text.clone()))
}

/// A string that is not empty; `expected` describes it.
pub(super) fn filled<'a>(expected: &'static str) -> Form<'a, String> {
    let read = move |entry: Entry| match entry.string()? {
        "" => Err(entry.wrong(expected)),
        text => Ok(text.to_owned()),
    };
    Form { read: Box::new(read), ..text() }
}

/// A list of strings as TOML.
pub(super) fn texts_value(texts: &[String]) -> Value {
    Value::Array(texts.iter().map(|text| text.clone().into()).collect())
}
