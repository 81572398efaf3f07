//! Types of config values: how each is read, written and described.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};

use tandem_kernels::Format;
use toml::Value;

use super::error::Result;
use super::keys::Key;
use super::reader::Entry;

/// Type and range of a key's value.
pub(super) trait Form: Sized {
    type Value: Clone;

    fn read(&self, entry: Entry) -> Result<Self::Value>;

    /// The TOML value; `None` for a value that the resolved config leaves out.
    fn write(&self, value: &Self::Value) -> Option<Value>;

    /// Type and range in words, for the reference page.
    fn kind(&self) -> String;

    /// A key with a default.
    fn or(self, default: Self::Value) -> Key<Self> {
        Key::new(self, default)
    }

    /// A key without a default; `give` completes "is missing: give".
    fn required(self, give: impl Into<String>) -> Key<Self>
    where
        Self::Value: Default,
    {
        self.or(Self::Value::default()).required_if(true, give)
    }

    /// A key that may be absent.
    fn optional(self) -> Key<Optional<Self>> {
        Optional(self).or(None)
    }

    /// Refuses a value for which there is a reason.
    fn unless<C: Fn(&Self::Value) -> Option<String>>(self, reason: C) -> Checked<Self, C> {
        Checked(self, reason)
    }
}

/// `None` where the key is absent.
pub(super) struct Optional<F>(F);

impl<F: Form> Form for Optional<F> {
    type Value = Option<F::Value>;

    fn read(&self, entry: Entry) -> Result<Self::Value> {
        self.0.read(entry).map(Some)
    }

    fn write(&self, value: &Self::Value) -> Option<Value> {
        value.as_ref().and_then(|value| self.0.write(value))
    }

    fn kind(&self) -> String {
        self.0.kind()
    }
}

/// `None` where the value is 0.
pub(super) struct ZeroIsNone<F>(pub F);

impl<F: Form<Value: Default + PartialEq>> Form for ZeroIsNone<F> {
    type Value = Option<F::Value>;

    fn read(&self, entry: Entry) -> Result<Self::Value> {
        self.0.read(entry).map(|value| (value != F::Value::default()).then_some(value))
    }

    fn write(&self, value: &Self::Value) -> Option<Value> {
        self.0.write(&value.clone().unwrap_or_default())
    }

    fn kind(&self) -> String {
        self.0.kind()
    }
}

/// A form with a condition that depends on other keys.
pub(super) struct Checked<F, C>(F, C);

impl<F: Form, C: Fn(&F::Value) -> Option<String>> Form for Checked<F, C> {
    type Value = F::Value;

    fn read(&self, entry: Entry) -> Result<Self::Value> {
        let value = self.0.read(entry.clone())?;
        self.1(&value).map_or(Ok(value), |reason| Err(entry.conflict(reason)))
    }

    fn write(&self, value: &Self::Value) -> Option<Value> {
        self.0.write(value)
    }

    fn kind(&self) -> String {
        self.0.kind()
    }
}

/// A form of a single key.
pub(super) struct Custom<R, W> {
    kind: &'static str,
    read: R,
    write: W,
}

pub(super) fn custom<T: Clone, O: Into<Option<Value>>>(
    kind: &'static str,
    read: impl Fn(Entry) -> Result<T>,
    write: impl Fn(&T) -> O,
) -> impl Form<Value = T> {
    Custom { kind, read, write: move |value: &T| write(value).into() }
}

impl<T: Clone, R: Fn(Entry) -> Result<T>, W: Fn(&T) -> Option<Value>> Form for Custom<R, W> {
    type Value = T;

    fn read(&self, entry: Entry) -> Result<T> {
        (self.read)(entry)
    }

    fn write(&self, value: &T) -> Option<Value> {
        (self.write)(value)
    }

    fn kind(&self) -> String {
        self.kind.to_owned()
    }
}

/// Every count that fits TOML's integers.
pub(super) const COUNT: RangeInclusive<u64> = 0..=i64::MAX as u64;
/// The same without 0.
pub(super) const AT_LEAST_ONE: RangeInclusive<u64> = 1..=i64::MAX as u64;
/// Numbers above 0.
pub(super) const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

/// An integer in a range.
pub(super) struct Integer<T> {
    range: RangeInclusive<u64>,
    unit: Option<&'static str>,
    of: PhantomData<T>,
}

pub(super) fn integer<T>(range: RangeInclusive<u64>) -> Integer<T> {
    Integer { range, unit: None, of: PhantomData }
}

impl<T> Integer<T> {
    pub fn unit(self, unit: &'static str) -> Self {
        Self { unit: Some(unit), ..self }
    }
}

impl<T: Copy + TryFrom<u64> + TryInto<u64>> Form for Integer<T> {
    type Value = T;

    fn read(&self, entry: Entry) -> Result<T> {
        let number = entry.integer(self.range.clone())?;
        T::try_from(number).map_err(|_| entry.wrong("a smaller integer"))
    }

    fn write(&self, value: &T) -> Option<Value> {
        // The range ends where TOML's integers do.
        (*value).try_into().ok().map(|number: u64| Value::Integer(number as i64))
    }

    fn kind(&self) -> String {
        let (low, high) = (*self.range.start(), *self.range.end());
        let range = if high >= i64::MAX as u64 { format!("≥ {low}") } else { format!("{low} to {high}") };
        in_unit(format!("integer, {range}"), self.unit)
    }
}

/// A finite number in a range.
pub(super) struct Number {
    range: (Bound<f64>, Bound<f64>),
    unit: Option<&'static str>,
}

pub(super) fn number(range: impl RangeBounds<f64>) -> Number {
    Number { range: (range.start_bound().cloned(), range.end_bound().cloned()), unit: None }
}

/// A time above 0.
pub(super) fn seconds() -> Number {
    number(POSITIVE).seconds()
}

impl Number {
    pub fn seconds(self) -> Self {
        Self { unit: Some("seconds"), ..self }
    }

    fn words(&self) -> String {
        use Bound::{Excluded, Included, Unbounded};
        let of = self.unit.map_or(String::new(), |unit| format!(" of {unit}"));
        match self.range {
            (Unbounded, Unbounded) => format!("a finite number{of}"),
            (Excluded(0.0), Unbounded) => format!("a positive number{of}"),
            (Included(low), Included(high)) => format!("a number{of} from {low} to {high}"),
            (low, high) => {
                let low = match low {
                    Included(low) => format!(" of at least {low}"),
                    Excluded(low) => format!(" above {low}"),
                    Unbounded => String::new(),
                };
                let high = match high {
                    Included(high) => format!(", at most {high}"),
                    Excluded(high) => format!(" and below {high}"),
                    Unbounded => String::new(),
                };
                format!("a number{of}{low}{high}")
            }
        }
    }
}

impl Form for Number {
    type Value = f64;

    fn read(&self, entry: Entry) -> Result<f64> {
        entry.number(&self.words(), |x| self.range.contains(&x))
    }

    fn write(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn kind(&self) -> String {
        use Bound::{Excluded, Included, Unbounded};
        let range = match self.range {
            (Unbounded, Unbounded) => return in_unit("number".to_owned(), self.unit),
            (Included(low), Included(high)) => format!("{low} to {high}"),
            (low, high) => {
                let low = match low {
                    Included(low) => Some(format!("≥ {low}")),
                    Excluded(low) => Some(format!("> {low}")),
                    Unbounded => None,
                };
                let high = match high {
                    Included(high) => Some(format!("≤ {high}")),
                    Excluded(high) => Some(format!("< {high}")),
                    Unbounded => None,
                };
                low.into_iter().chain(high).collect::<Vec<_>>().join(", ")
            }
        };
        in_unit(format!("number, {range}"), self.unit)
    }
}

fn in_unit(kind: String, unit: Option<&str>) -> String {
    unit.map_or_else(|| kind.clone(), |unit| format!("{kind} {unit}"))
}

/// `true` or `false`.
pub(super) struct Boolean;

impl Form for Boolean {
    type Value = bool;

    fn read(&self, entry: Entry) -> Result<bool> {
        entry.boolean()
    }

    fn write(&self, value: &bool) -> Option<Value> {
        Some((*value).into())
    }

    fn kind(&self) -> String {
        "boolean".to_owned()
    }
}

/// One of several names.
pub(super) struct Choice<T>(Vec<(&'static str, T)>);

pub(super) fn choice<T: Copy>(names: impl AsRef<[(&'static str, T)]>) -> Choice<T> {
    Choice(names.as_ref().to_vec())
}

/// A format of frozen weights; `None` is "auto".
pub(super) fn format() -> Choice<Option<Format>> {
    let formats = Format::ALL.map(|format| (format.name(), Some(format)));
    choice([&[("auto", None)], &formats[..]].concat())
}

impl<T: Copy + PartialEq> Form for Choice<T> {
    type Value = T;

    fn read(&self, entry: Entry) -> Result<T> {
        entry.one_of(&self.0)
    }

    fn write(&self, value: &T) -> Option<Value> {
        self.0.iter().find(|(_, choice)| choice == value).map(|(name, _)| (*name).into())
    }

    fn kind(&self) -> String {
        self.0.iter().map(|(name, _)| format!("`\"{name}\"`")).collect::<Vec<_>>().join(", ")
    }
}

/// A path, made absolute.
pub(super) struct AnyPath;

impl Form for AnyPath {
    type Value = PathBuf;

    fn read(&self, entry: Entry) -> Result<PathBuf> {
        entry.path()
    }

    fn write(&self, value: &PathBuf) -> Option<Value> {
        Some(path_value(value))
    }

    fn kind(&self) -> String {
        "path".to_owned()
    }
}

/// A path as TOML. It came from a TOML string joined to the current directory, so it is UTF-8
/// wherever that directory is.
pub(super) fn path_value(path: &Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

/// A string.
pub(super) struct Text;

impl Form for Text {
    type Value = String;

    fn read(&self, entry: Entry) -> Result<String> {
        entry.string().map(str::to_owned)
    }

    fn write(&self, value: &String) -> Option<Value> {
        Some(value.clone().into())
    }

    fn kind(&self) -> String {
        "string".to_owned()
    }
}

/// A string that is not empty; `expected` describes it.
pub(super) fn filled(expected: &'static str) -> impl Form<Value = String> {
    let read = move |entry: Entry| match entry.string()? {
        "" => Err(entry.wrong(expected)),
        text => Ok(text.to_owned()),
    };
    custom("string", read, |text: &String| Value::from(text.clone()))
}

/// A list of strings as TOML.
pub(super) fn texts_value(texts: &[String]) -> Value {
    Value::Array(texts.iter().map(|text| text.clone().into()).collect())
}
