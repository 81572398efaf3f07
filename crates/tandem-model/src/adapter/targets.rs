//! Which modules of a model an adapter is for, by the names that HF gives them.

use std::ops::Range;

use crate::families::{family_named, pieces};
use crate::layout::{LayerId, LayerLayout, Part};
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};

/// The modules that get a low-rank term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// Every linear layer of every block: all matrices but token table and head.
    AllLinear,
    /// Modules whose names are these or end with them, as `q_proj` or `self_attn.q_proj`.
    Names(Vec<String>),
}

/// An HF module with parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Module {
    /// Its name; `{}` stands for the block's index.
    pub(super) name: &'static str,
    /// The parameter that is its weight, or a part of it.
    pub(super) part: Part,
    /// Its rows of that parameter.
    pub(super) rows: Range<usize>,
    /// Whether the parameter has no other rows.
    pub(super) is_whole: bool,
}

/// Every module of a model that has a weight, a block's once.
pub(super) fn modules(spec: &DecoderSpec) -> Vec<Module> {
    let family = family_named(spec.family).expect("specs come from families");
    let mut modules = Vec::new();
    for layer in [LayerId::Embedding, LayerId::Block(0), LayerId::Head] {
        let mut layout = LayerLayout::of(spec, layer);
        if layer == LayerId::Head && spec.head.tied {
            layout = LayerLayout::new(&[(Part::HeadWeight, spec.vocab_size, spec.hidden_size)], None);
        }
        let names = |part: Part| family.names(part);
        for param in &layout.params {
            let found = pieces(family, spec, layer, &LayerLayout { params: vec![*param], ..layout.clone() });
            let is_whole = found.len() == 1;
            let mut row = 0;
            for (piece, name) in found.iter().zip(names(param.part)) {
                let Some(name) = name.strip_suffix(".weight") else { continue };
                modules.push(Module { name, part: param.part, rows: row..row + piece.rows, is_whole });
                row += piece.rows;
            }
        }
    }
    modules
}

/// Whether a module of that name is meant by `target`.
fn is_meant(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether `target` means a module in every block, or in none.
fn matches(module: &Module, target: &str, num_layers: usize) -> Result<bool> {
    let named = |index: usize| module.name.replace("{}", &index.to_string());
    let count = (0..num_layers).filter(|&index| is_meant(&named(index), target)).count();
    if count == 0 || count == num_layers {
        return Ok(count > 0);
    }
    Err(ModelError::Invalid(format!(
        "adapter.targets: {target:?} names a module of some blocks only; every block has the same adapter, name the end that all of them share"
    )))
}

fn unknown(key: &str, name: &str, modules: &[Module]) -> ModelError {
    let mut known: Vec<_> = modules.iter().filter_map(|module| module.name.rsplit('.').next()).collect();
    known.dedup();
    ModelError::Invalid(format!(
        "adapter.{key}: no module of this model is called {name:?}; its modules: {}",
        known.join(", ")
    ))
}

impl Targets {
    /// The modules that are meant, in the order of the model.
    ///
    /// # Errors
    /// If a name is no module's, or that of something without a matrix.
    pub(super) fn find<'m>(&self, modules: &'m [Module], num_layers: usize) -> Result<Vec<&'m Module>> {
        let names = match self {
            Self::AllLinear => {
                let is_linear =
                    |module: &&Module| module.part.low_rank().is_some_and(|parts| parts.magnitude.is_some());
                return Ok(modules.iter().filter(is_linear).collect());
            }
            Self::Names(names) => names,
        };
        let mut meant = vec![false; modules.len()];
        for name in names {
            let mut found = false;
            for (module, meant) in modules.iter().zip(&mut meant) {
                if !matches(module, name, num_layers)? {
                    continue;
                }
                if module.part.low_rank().is_none() {
                    return Err(ModelError::Invalid(format!(
                        "adapter.targets: {} is no linear layer and no token table; name it in adapter.modules_to_save to train it whole",
                        module.name
                    )));
                }
                (found, *meant) = (true, true);
            }
            if !found {
                return Err(unknown("targets", name, modules));
            }
        }
        Ok(modules.iter().zip(meant).filter(|(_, meant)| *meant).map(|(module, _)| module).collect())
    }
}

/// The parts of the modules that train whole: weights, and biases where there are some.
///
/// # Errors
/// If a name is no module's, or that of one which shares a parameter with others.
pub(super) fn saved(names: &[String], modules: &[Module], spec: &DecoderSpec) -> Result<Vec<Part>> {
    let mut parts = Vec::new();
    for name in names {
        let found: Vec<_> = modules.iter().filter(|module| is_meant(module.name, name)).collect();
        if found.is_empty() {
            return Err(unknown("modules_to_save", name, modules));
        }
        for module in found {
            if !module.is_whole {
                return Err(ModelError::Invalid(format!(
                    "adapter.modules_to_save: {} is kept in one matrix with its neighbours, which cannot train apart; name it in adapter.targets",
                    module.name
                )));
            }
            if module.part == Part::HeadWeight && spec.head.tied {
                return Err(ModelError::Invalid(format!(
                    "adapter.modules_to_save: {} is the token table of this model (tie_word_embeddings); name that one",
                    module.name
                )));
            }
            parts.push(module.part);
            parts.extend(bias_of(module.part).filter(|&bias| has_part(spec, bias)));
        }
    }
    parts.sort_unstable();
    parts.dedup();
    Ok(parts)
}

fn has_part(spec: &DecoderSpec, part: Part) -> bool {
    let layers = [LayerId::Embedding, LayerId::Block(0), LayerId::Head];
    layers.into_iter().any(|layer| LayerLayout::of(spec, layer).param(part).is_some())
}

/// The bias of the module that has this weight.
pub(crate) const fn bias_of(weight: Part) -> Option<Part> {
    Some(match weight {
        Part::Norm1Weight => Part::Norm1Bias,
        Part::Norm2Weight => Part::Norm2Bias,
        Part::FinalNormWeight => Part::FinalNormBias,
        Part::QkvWeight => Part::QkvBias,
        Part::OutWeight => Part::OutBias,
        Part::UpWeight => Part::UpBias,
        Part::DownWeight => Part::DownBias,
        Part::HeadWeight => Part::HeadBias,
        _ => return None,
    })
}
