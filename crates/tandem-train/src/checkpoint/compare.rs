//! Two checkpoints compared element by element, whatever ranks and files hold them.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{CHUNK, Checkpoint, Cursor, TensorSpec};
use crate::error::Result;

/// Result of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Tensors that both have.
    pub num_tensors: usize,
    /// Elements of these.
    pub num_elements: u64,
    /// Tensors with an element of other bits.
    pub num_different: usize,
    /// The first different element, in the order in which the recorded files name their tensors.
    pub element: Option<ElementDifference>,
    /// A tensor that one of the two lacks, or has in another shape, in words.
    pub tensor: Option<String>,
    /// The first different entry of `cursor.json`: key, recorded value, found value.
    pub cursor: Option<(String, String, String)>,
}

/// An element whose bits differ.
#[derive(Clone, Debug, PartialEq)]
pub struct ElementDifference {
    /// The tensor.
    pub tensor: TensorSpec,
    /// Row-major index.
    pub element: usize,
    /// Value in the record.
    pub recorded: f32,
    /// Value that was computed again.
    pub found: f32,
}

impl Comparison {
    /// Returns whether all state has the same bits.
    pub fn is_same(&self) -> bool {
        self.element.is_none() && self.tensor.is_none() && self.cursor.is_none()
    }
}

/// Compares all state of two checkpoints of one step. The clock is left out, and answers that follow from the
/// weights, or what judges say of others; so is the best evaluation if the recorded checkpoint was saved before the
/// evaluation of its step.
///
/// # Errors
/// A file cannot be read.
pub fn compare(recorded: &Checkpoint, found: &Checkpoint) -> Result<Comparison> {
    let mut comparison =
        Comparison { cursor: cursor_difference(recorded.cursor(), found.cursor()), ..Comparison::default() };
    let names = |checkpoint: &Checkpoint| -> BTreeSet<String> {
        checkpoint.tensors().map(|tensor| tensor.name.clone()).collect()
    };
    let (ours, theirs) = (names(recorded), names(found));
    if let Some(name) = ours.symmetric_difference(&theirs).next() {
        let place = if ours.contains(name) { "in the run alone" } else { "in the recomputation alone" };
        comparison.tensor = Some(format!("tensor {name:?} is {place}"));
    }
    let [mut a, mut b] = [vec![0.0f32; CHUNK], vec![0.0f32; CHUNK]];
    for tensor in recorded.tensors().filter(|tensor| theirs.contains(&tensor.name)) {
        if let Err(error) = found.check_tensor(tensor) {
            comparison.tensor.get_or_insert_with(|| error.to_string());
            continue;
        }
        comparison.num_tensors += 1;
        comparison.num_elements += tensor.len() as u64;
        let mut is_different = false;
        for start in (0..tensor.len()).step_by(CHUNK) {
            let length = CHUNK.min(tensor.len() - start);
            let (a, b) = (&mut a[..length], &mut b[..length]);
            recorded.read(&tensor.name, start, a)?;
            found.read(&tensor.name, start, b)?;
            let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
            let Some(index) = a.iter().zip(b.iter()).position(differs) else { continue };
            is_different = true;
            comparison.element.get_or_insert_with(|| ElementDifference {
                tensor: tensor.clone(),
                element: start + index,
                recorded: a[index],
                found: b[index],
            });
            break;
        }
        comparison.num_different += usize::from(is_different);
    }
    Ok(comparison)
}

fn cursor_difference(recorded: &Cursor, found: &Cursor) -> Option<(String, String, String)> {
    let entries = |cursor: &Cursor| -> Map<String, Value> {
        let mut cursor = cursor.beside_weights();
        if recorded.best.as_ref().is_some_and(|best| best.rows.is_empty()) {
            cursor.best.iter_mut().for_each(|best| best.rows.clear());
        }
        let Ok(Value::Object(mut entries)) = serde_json::to_value(cursor) else {
            unreachable!("a cursor is an object")
        };
        entries.remove("seconds");
        if recorded.is_evaluation_due {
            entries.remove("is_evaluation_due");
            entries.remove("best");
        }
        entries
    };
    let (ours, theirs) = (entries(recorded), entries(found));
    let shown = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
    let differs = |key: &&String| ours.get(*key) != theirs.get(*key);
    let key = ours.keys().chain(theirs.keys()).find(differs)?;
    Some((key.clone(), shown(ours.get(key)), shown(theirs.get(key))))
}
