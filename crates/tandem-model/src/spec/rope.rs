//! Rotary tables of a layer, and the rows of them that the tokens of a batch take.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tandem_kernels::Forest;
use tandem_kernels::ops::RopeTable;

use super::{RotaryScaling, RotarySpec};

/// Batches whose own tables are kept: those between forward and backward in a pipeline, of several ranks.
const KEPT: usize = 8;

/// Properties of a batch's tokens on which rotary embeddings depend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenPlaces<'a> {
    /// Position of each token.
    pub(crate) positions: &'a [u32],
    /// Length of each token's text.
    pub(crate) lengths: &'a [u32],
}

impl<'a> TokenPlaces<'a> {
    pub(crate) fn of_forest(forest: &'a Forest) -> Self {
        Self { positions: &forest.positions, lengths: &forest.lengths }
    }
}

/// Tables of cosines and sines.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    /// Table of the queries, and of the keys unless they have their own.
    pub(crate) queries: RopeTable,
    /// Table of the keys, if queries are scaled by position.
    pub(crate) keys: Option<RopeTable>,
}

/// Tables for a batch, and each token's row in them.
pub(crate) struct Rotation<'a> {
    pub(crate) tables: Arc<Tables>,
    pub(crate) rows: Cow<'a, [u32]>,
}

/// Rotary embedding of a layer in a model for texts of up to a number of tokens.
#[derive(Debug)]
pub(crate) struct Rope {
    spec: RotarySpec,
    /// Rows by position: of texts that rotate alike, then of longer ones if these rotate alike too.
    tables: Arc<Tables>,
    longer: Longer,
}

/// Rotation of texts that are longer than those that rotate alike.
#[derive(Debug)]
enum Longer {
    /// There is none, or all texts rotate alike.
    None,
    /// Texts of more than `short` tokens have rows of their own, after as many of the others.
    OneTable { short: u32 },
    /// Texts of more than `short` tokens rotate by their length: such a batch has a table of its own, with
    /// a row for each token.
    ByLength { short: u32, kept: Mutex<VecDeque<BatchTables>> },
}

/// Tables of one batch.
#[derive(Debug)]
struct BatchTables {
    positions: Vec<u32>,
    lengths: Vec<u32>,
    tables: Arc<Tables>,
}

impl Rope {
    /// Makes the tables of a model for texts of up to `positions` tokens.
    pub(crate) fn new(spec: &RotarySpec, positions: usize) -> Self {
        let boundary = spec.scaling.same_up_to().filter(|&boundary| boundary < positions);
        let short = boundary.unwrap_or(positions);
        let of_short = spec.inverse_frequencies(short);
        let rows = (0..short as u32).map(|position| (position, &of_short[..]));
        let (tables, longer) = match boundary.map(|boundary| boundary as u32) {
            None => (Tables::new(spec, rows), Longer::None),
            Some(short) if matches!(spec.scaling, RotaryScaling::Dynamic { .. }) => {
                (Tables::new(spec, rows), Longer::ByLength { short, kept: Mutex::default() })
            }
            Some(short) => {
                let of_long = spec.inverse_frequencies(positions);
                let long_rows = (0..positions as u32).map(|position| (position, &of_long[..]));
                (Tables::new(spec, rows.chain(long_rows)), Longer::OneTable { short })
            }
        };
        Self { spec: spec.clone(), tables: Arc::new(tables), longer }
    }

    /// Returns whether a text rotates otherwise than a shorter one.
    pub(crate) fn depends_on_length(&self) -> bool {
        !matches!(self.longer, Longer::None)
    }

    /// Returns the tables for a batch, and the row of each token.
    pub(crate) fn rotation<'a>(&self, places: TokenPlaces<'a>) -> Rotation<'a> {
        let TokenPlaces { positions, lengths } = places;
        let has_longer = |short: &u32| lengths.iter().any(|length| length > short);
        match &self.longer {
            Longer::OneTable { short } if has_longer(short) => {
                let row =
                    |(position, length): (&u32, &u32)| position + if length > short { *short } else { 0 };
                let rows = positions.iter().zip(lengths).map(row).collect();
                Rotation { tables: self.tables.clone(), rows }
            }
            Longer::ByLength { short, kept } if has_longer(short) => {
                let tables = self.batch_tables(*short, kept, places);
                Rotation { tables, rows: (0..positions.len() as u32).collect() }
            }
            _ => Rotation { tables: self.tables.clone(), rows: positions.into() },
        }
    }

    /// Returns the tables with a row for each token. Every layer of a pass asks for the same ones.
    fn batch_tables(
        &self,
        short: u32,
        kept: &Mutex<VecDeque<BatchTables>>,
        places: TokenPlaces,
    ) -> Arc<Tables> {
        let TokenPlaces { positions, lengths } = places;
        let lock = || kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |batch: &&BatchTables| batch.positions == positions && batch.lengths == lengths;
        if let Some(batch) = lock().iter().find(is_it) {
            return batch.tables.clone();
        }
        let mut frequencies: Vec<(u32, Vec<f32>)> = Vec::new();
        let mut sets = Vec::with_capacity(lengths.len());
        for length in lengths.iter().map(|&length| length.max(short)) {
            // Tokens of a text follow one another.
            let set = frequencies.iter().rposition(|(known, _)| *known == length).unwrap_or_else(|| {
                frequencies.push((length, self.spec.inverse_frequencies(length as usize)));
                frequencies.len() - 1
            });
            sets.push(set);
        }
        let rows = positions.iter().zip(&sets).map(|(&position, &set)| (position, &frequencies[set].1[..]));
        let tables = Arc::new(Tables::new(&self.spec, rows));
        let mut kept = lock();
        kept.truncate(KEPT - 1);
        let (positions, lengths) = (positions.to_vec(), lengths.to_vec());
        kept.push_front(BatchTables { positions, lengths, tables: tables.clone() });
        tables
    }
}

impl Tables {
    /// Makes tables of rows, each a position with inverse frequencies.
    fn new<'f>(spec: &RotarySpec, rows: impl Iterator<Item = (u32, &'f [f32])> + Clone) -> Self {
        let table = RopeTable::from_rows(spec.dims, rows.clone()).with_pairs(spec.pairs);
        let attention_factor = spec.scaling.attention_factor() as f32;
        let table = if attention_factor == 1.0 { table } else { table.scaled(|_| attention_factor) };
        let Some(scale) = spec.query_scale else { return Self { queries: table, keys: None } };
        let factors: Vec<f32> = rows.map(|(position, _)| scale.factor(position)).collect();
        if factors.iter().all(|&factor| factor == 1.0) {
            return Self { queries: table, keys: None };
        }
        Self { queries: table.clone().scaled(|row| factors[row]), keys: Some(table) }
    }
}
