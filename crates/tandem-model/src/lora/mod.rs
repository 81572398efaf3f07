//! Adapters: the description of low-rank terms that train while the model's own weights, the
//! *base*, are frozen.
//!
//! LoRA (Hu et al. 2021, <https://arxiv.org/abs/2106.09685>) adds to a matrix `W` `[out, in]` the
//! low-rank term `s · B A` with `A` `[r, in]` and `B` `[out, r]`; `s` is `alpha / r`, or `alpha /
//! √r` if rank-stabilised (<https://arxiv.org/abs/2312.03732>). DoRA
//! (<https://arxiv.org/abs/2402.09353>) also gives each row of `W + s · B A` a length of its own.
//! Names, scales and trained modules are those of the `peft` library.
//!
//! One of our matrices may hold several HF modules (q, k and v; gate and up): each is a [`LoraTarget`]
//! with factors of its own. Their `A` are stacked in one parameter, so that one product computes
//! all of them; so are their `B`.

mod targets;

use std::ops::Range;
use std::path::PathBuf;

pub use targets::Targets;
pub(crate) use targets::peft_names;

use crate::layout::{Block, LayerId, LayerLayout, ParamKind, ParamSpec, TensorParallelShard};
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};
use targets::{Module, modules};

/// Configuration of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// LoRA or DoRA.
    pub kind: AdapterKind,
    /// `r`, the rank of each module's term.
    pub rank: usize,
    /// `alpha`: with the rank, the scale of the term.
    pub alpha: f64,
    /// True if the scale is `alpha / √r` instead of `alpha / r`.
    pub rank_stabilized: bool,
    /// Rate at which the inputs of `A` are dropped in training.
    pub dropout: f64,
    /// Modules that get a term.
    pub targets: Targets,
    /// Modules that train whole, beside the adapter, by the ends of their names.
    pub modules_to_save: Vec<String>,
    /// `adapter_config.json` that this was read from, for messages.
    pub file: Option<PathBuf>,
}

/// Kind of adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// A low-rank term.
    Lora,
    /// A low-rank term, and a length for each row.
    Dora,
}

impl AdapterKind {
    /// Every choice with its name in configs.
    pub const NAMES: [(&'static str, Self); 2] = [("lora", Self::Lora), ("dora", Self::Dora)];
}

/// Adapter, resolved for one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    config: AdapterConfig,
    matrices: Vec<Adapted>,
    saved: Vec<ParamKind>,
}

/// Matrix with low-rank terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapted {
    /// The matrix.
    pub part: ParamKind,
    /// Targeted modules of the matrix, in the order of its rows.
    pub sites: Vec<LoraTarget>,
    /// Columns that `A` reads of the whole matrix's, and their number, in a tensor-parallel shard of a
    /// matrix that is divided by columns.
    pub(crate) columns: Option<(Range<usize>, usize)>,
}

/// HF module with a low-rank term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraTarget {
    /// HF name of the module; `{}` stands for the block's index.
    pub module: String,
    /// Rows of the matrix.
    pub rows: Range<usize>,
    /// Rows of the parameter that stacks the `B` of all modules.
    pub b_rows: Range<usize>,
}

impl Adapted {
    /// Returns the rows of the parameter that stacks the `B` of all modules.
    fn b_rows(&self) -> usize {
        self.sites.last().map_or(0, |site| site.b_rows.end)
    }
}

/// Lists the parts of `ranges` within `to`.
fn rows_within(ranges: &[Range<usize>], to: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let clipped = ranges.iter().map(|range| range.start.max(to.start)..range.end.min(to.end));
    clipped.filter(|range| !range.is_empty())
}

/// Returns a message with the keys of `adapter_config.json` in place of those of a run.
fn in_keys_of_peft(reason: &str) -> String {
    reason
        .replace("adapter.targets", "target_modules")
        .replace("adapter.modules_to_save", "modules_to_save")
        .replace("adapter.kind = \"lora\"", "use_dora = false")
}

impl Adapter {
    /// Resolves the targets of an adapter in a model.
    ///
    /// # Errors
    /// The model lacks a module that is named, or cannot have the adapter on it.
    pub fn new(config: AdapterConfig, spec: &DecoderSpec) -> Result<Self> {
        let file = config.file.clone();
        Self::resolve(config, spec).map_err(|error| match (file, error) {
            (Some(file), ModelError::Invalid(reason)) => ModelError::format(&file, in_keys_of_peft(&reason)),
            (_, error) => error,
        })
    }

    fn resolve(config: AdapterConfig, spec: &DecoderSpec) -> Result<Self> {
        let modules = modules(spec);
        let targets = config.targets.find(&modules)?;
        let saved = targets::saved(&config.modules_to_save, &modules, spec)?;
        let mut matrices: Vec<Adapted> = Vec::new();
        for module in targets {
            let Module { name, part, rows, .. } = module;
            let part = *part;
            let is_table =
                part == ParamKind::HeadWeight && spec.head.tied && saved.contains(&ParamKind::TokenTable);
            if saved.contains(&part) || is_table {
                return Err(ModelError::Invalid(format!(
                    "adapter.targets and adapter.modules_to_save both name {name}; it trains whole or by a low-rank term, not both"
                )));
            }
            let has_magnitude = part.low_rank().is_some_and(|parts| parts.magnitude.is_some());
            if config.kind == AdapterKind::Dora && !has_magnitude {
                return Err(ModelError::Invalid(format!(
                    "adapter.targets names {name}: DoRA of the token table or the head is not supported; remove it, or set adapter.kind = \"lora\""
                )));
            }
            let add = |adapted: &mut Adapted| {
                let start = adapted.b_rows();
                let b_rows = start..start + rows.len();
                adapted.sites.push(LoraTarget { module: name.clone(), rows: rows.clone(), b_rows });
            };
            match matrices.iter_mut().find(|adapted| adapted.part == part) {
                Some(adapted) => add(adapted),
                None => {
                    matrices.push(Adapted { part, sites: Vec::new(), columns: None });
                    matrices.iter_mut().last().map(add);
                }
            }
        }
        Ok(Self { config, matrices, saved })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Returns the factor on the low-rank terms.
    pub fn scale(&self) -> f32 {
        let rank = self.config.rank as f64;
        (self.config.alpha / if self.config.rank_stabilized { rank.sqrt() } else { rank }) as f32
    }

    /// Returns the matrices with low-rank terms.
    pub fn matrices(&self) -> &[Adapted] {
        &self.matrices
    }

    /// Returns the terms of a matrix, if it has any.
    pub fn get(&self, part: ParamKind) -> Option<&Adapted> {
        self.matrices.iter().find(|adapted| adapted.part == part)
    }

    /// Returns the parts of the base that train whole.
    pub fn saved(&self) -> &[ParamKind] {
        &self.saved
    }

    /// Returns the adapter of a tensor-parallel shard of a whole decoder: the modules' rows are those of
    /// the shard. `param` finds a matrix of the whole model.
    pub(crate) fn sliced(
        &self,
        slice: TensorParallelShard,
        whole: &DecoderSpec,
        param: &dyn Fn(ParamKind) -> Option<ParamSpec>,
    ) -> Self {
        let mut own = self.clone();
        for adapted in &mut own.matrices {
            let ranges = slice.ranges(whole, adapted.part).expect("matrices are divided");
            if adapted.part.is_divided_by_columns() {
                let matrix = param(adapted.part).expect("the adapter was resolved for this model");
                adapted.columns = ranges.first().map(|columns| (columns.clone(), matrix.cols));
                continue;
            }
            let mut start = 0;
            for site in &mut adapted.sites {
                let before: usize = rows_within(&ranges, &(0..site.rows.start)).map(|rows| rows.len()).sum();
                let len: usize = rows_within(&ranges, &site.rows).map(|rows| rows.len()).sum();
                (site.rows, site.b_rows) = (before..before + len, start..start + len);
                start += len;
            }
        }
        own
    }

    /// Returns the block of one of the adapter's whole parameters that a tensor-parallel shard holds. Of
    /// a matrix divided by rows it holds its rows of `B` and their magnitudes, of one divided by columns
    /// its columns of `A`, of the token table its tokens' rows of `A`; the rest is whole. `None` for
    /// parameters of the base.
    pub(crate) fn block(
        &self,
        slice: TensorParallelShard,
        whole: &DecoderSpec,
        param: &ParamSpec,
    ) -> Option<Block> {
        let (adapted, parts) = self.matrices.iter().find_map(|adapted| {
            let parts = adapted.part.low_rank()?;
            let has_part = [parts.a, parts.b].contains(&param.part) || parts.magnitude == Some(param.part);
            has_part.then_some((adapted, parts))
        })?;
        let all = Block::all(param);
        let Some(own) = slice.ranges(whole, adapted.part) else { return Some(all) };
        let is_a = param.part == parts.a;
        if adapted.part.is_divided_by_columns() {
            return Some(if is_a { Block { cols: own, ..all } } else { all });
        }
        if adapted.part == ParamKind::TokenTable {
            return Some(if is_a { Block { rows: own, ..all } } else { all });
        }
        let outputs = || {
            adapted.sites.iter().flat_map(|site| {
                let place = |row: usize| site.b_rows.start + row - site.rows.start;
                rows_within(&own, &site.rows).map(move |rows| place(rows.start)..place(rows.end))
            })
        };
        Some(match param.part {
            _ if is_a => all,
            part if part == parts.b => Block { rows: outputs().collect(), ..all },
            _ => Block { cols: outputs().collect(), ..all },
        })
    }

    /// Lays out the trained parameters of a layer whose base is laid out as `base`.
    pub(crate) fn layout(&self, spec: &DecoderSpec, layer: LayerId, base: &LayerLayout) -> LayerLayout {
        let mut parts = Vec::new();
        // A tied head multiplies by the embedding layer's table, so its term lies there.
        let tied_head = (layer == LayerId::Embedding && spec.head.tied).then_some((
            ParamKind::HeadWeight,
            spec.vocab_size,
            spec.hidden_size,
        ));
        let params = base.params.iter().map(|param| (param.part, param.rows, param.cols));
        for (part, rows, cols) in params.chain(tied_head) {
            if self.saved.contains(&part) {
                parts.push((part, rows, cols));
            }
            let Some((adapted, names)) = self.get(part).zip(part.low_rank()) else { continue };
            let (rank, b_rows) = (self.config.rank, adapted.b_rows());
            // peft looks a table up by the columns of `A`; ours are rows.
            let a = if part == ParamKind::TokenTable {
                (names.a, rows, rank)
            } else {
                (names.a, adapted.sites.len() * rank, cols)
            };
            let b =
                if part == ParamKind::TokenTable { (names.b, cols, rank) } else { (names.b, b_rows, rank) };
            parts.extend([a, b]);
            if let Some(magnitude) = names.magnitude.filter(|_| self.config.kind == AdapterKind::Dora) {
                parts.push((magnitude, 1, b_rows));
            }
        }
        LayerLayout::new(&parts, (!spec.head.tied).then_some(ParamKind::TokenTable))
    }
}
