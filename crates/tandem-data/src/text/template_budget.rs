//! Bounds on a chat template's run: steps, copied text, and depth of values.
//!
//! A template comes with a model from anywhere. The engine counts its steps; the text that it
//! copies or writes is counted here. Both bounds are far above what conversations need.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use minijinja::value::{Object, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Maximum instructions of a run.
pub(super) const MAX_STEPS: u64 = 10_000_000;
/// Maximum bytes that a run copies or writes, intermediate values included.
pub(super) const MAX_COPIED: usize = 256 << 20;
/// Maximum depth of nested values, and of macros that call each other.
pub(super) const MAX_DEPTH: usize = 100;
/// Maximum characters of one padding or indent.
const MAX_WIDTH: usize = 10_000;
/// Bytes that an item of a list counts for.
const ITEM: usize = 16;

/// Maximum time of a run. The engine counts a step of any size as one, so steps on huge texts take long.
const MAX_TIME: Duration = Duration::from_secs(5);

/// Bytes that a run has copied or written, and its beginning.
#[derive(Debug)]
struct Copied(AtomicUsize, Instant);

impl Object for Copied {}

/// Counts `bytes` of a run.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    let copied = state.get_or_set_temp_object("copied", || Copied(AtomicUsize::new(0), Instant::now()));
    if copied.1.elapsed() > MAX_TIME {
        return Err(refused(format!("the template runs for more than {} seconds", MAX_TIME.as_secs())));
    }
    let before = copied.0.fetch_add(bytes.min(MAX_COPIED), Ordering::Relaxed);
    if before.saturating_add(bytes) <= MAX_COPIED {
        return Ok(());
    }
    Err(refused(format!("the template writes or copies more than {} MiB of text", MAX_COPIED >> 20)))
}

/// Charges a value's size: the bytes of text, the items of a list.
pub(super) fn charge_value(state: &State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => charge(state, text.len()),
        None => charge(state, ITEM * (1 + value.len().unwrap_or(0))),
    }
}

/// Refuses a width that no prompt needs.
pub(super) fn check_width(width: usize) -> Result<usize, Error> {
    if width <= MAX_WIDTH {
        return Ok(width);
    }
    Err(refused(format!("a width of {width} characters; at most {MAX_WIDTH} are allowed")))
}

/// Refuses a value that contains `target`, or is nested too deeply.
pub(super) fn check_acyclic(state: &State, value: &Value, target: &Value) -> Result<(), Error> {
    if value.as_object().is_none() {
        return Ok(());
    }
    let mut open = vec![(value.clone(), 0)];
    while let Some((value, depth)) = open.pop() {
        if state.perform_test("sameas", &[value.clone(), target.clone()])? {
            return Err(refused("a namespace that contains itself".into()));
        }
        if depth > MAX_DEPTH {
            return Err(refused(format!("values nested more than {MAX_DEPTH} deep")));
        }
        let map = value.kind() == ValueKind::Map;
        if map || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            charge_value(state, &value)?;
            for item in value.try_iter()? {
                let item = if map { value.get_item(&item).unwrap_or_default() } else { item };
                if item.as_object().is_some() {
                    open.push((item, depth + 1));
                }
            }
        }
    }
    Ok(())
}

/// Multiplies as Python, within the budget.
pub(super) fn multiply(state: &State, left: Value, right: Value) -> Result<Value, Error> {
    let is_sequence =
        |v: &Value| matches!(v.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable);
    let (repeated, count) = if is_sequence(&left) { (&left, &right) } else { (&right, &left) };
    if is_sequence(repeated) {
        let times = i64::try_from(count.clone())
            .map_err(|_| refused(format!("a {} cannot be multiplied by {count}", repeated.kind())))?;
        let times = usize::try_from(times).unwrap_or(0);
        return match repeated.as_str() {
            Some(text) => {
                charge(state, text.len().saturating_mul(times))?;
                Ok(Value::from(text.repeat(times)))
            }
            None => {
                let items: Vec<Value> = repeated.try_iter()?.collect();
                charge(state, ITEM.saturating_mul(items.len()).saturating_mul(times))?;
                Ok(std::iter::repeat_n(items, times).flatten().collect())
            }
        };
    }
    let unfit = || refused(format!("{left} * {right} is not a number"));
    if let (Ok(a), Ok(b)) = (i128::try_from(left.clone()), i128::try_from(right.clone()))
        && left.is_integer()
        && right.is_integer()
    {
        return a.checked_mul(b).map(Value::from).ok_or_else(unfit);
    }
    match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
        (Ok(a), Ok(b)) => Ok(Value::from(a * b)),
        _ => Err(unfit()),
    }
}

/// Charges the text of a method's or a filter's replacement.
pub(super) fn charge_replacement(state: &State, text: &str, old: &str, new: &str) -> Result<(), Error> {
    let matches = if new.len() > old.len() { text.matches(old).count() } else { 0 };
    charge(state, text.len().saturating_add(matches.saturating_mul(new.len())))
}

/// Charges a formatted text; refuses widths that no prompt needs, in the format or the arguments.
pub(super) fn check_format(state: &State, format: &str, values: &[Value]) -> Result<(), Error> {
    let longest = values.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
    charge(state, format.len().saturating_add(format.matches(['%', '{']).count().saturating_mul(longest)))?;
    if values.iter().any(|value| value.as_object().is_some()) {
        return Err(refused("formatting of a list or a mapping".into()));
    }
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        check_width(digits.parse().unwrap_or(usize::MAX))?;
    }
    if format.contains('*') || format.contains(":{") {
        for value in values {
            if let Ok(width) = i64::try_from(value.clone()) {
                check_width(usize::try_from(width.saturating_abs()).unwrap_or(usize::MAX))?;
            }
        }
    }
    Ok(())
}

/// Creates an error of a template that asks for too much.
pub(super) fn refused(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Writer that fails beyond the run's budget.
pub(super) struct Bounded<'a, 'b> {
    out: &'a mut dyn Write,
    state: &'a State<'b, 'b>,
}

impl<'a, 'b> Bounded<'a, 'b> {
    pub(super) fn new(out: &'a mut dyn Write, state: &'a State<'b, 'b>) -> Self {
        Self { out, state }
    }
}

impl Write for Bounded<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(self.state, text.len()).map_err(|_| fmt::Error)?;
        self.out.write_str(text)
    }
}
