//! Targets of an adapter: modules of a model, by their HF names.

use std::ops::Range;
use std::sync::Arc;

use regex::Regex;

use super::Adapter;
use crate::families::{Family, family_named, pieces};
use crate::layout::{LayerId, LayerLayout, ParamKind};
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};

/// Modules that get a low-rank term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// Every linear layer of every block: all matrices but token table and head.
    AllLinear,
    /// Modules whose names are these or end with them, as `q_proj` or `self_attn.q_proj`.
    Names(Vec<String>),
    /// Modules whose whole names match this regular expression, as `.*\.(q|v)_proj`.
    Pattern(String),
}

/// HF module with a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Module {
    /// HF name; `{}` stands for the block's index.
    pub(super) name: String,
    /// Name in memory, if `transformers` renames the module.
    other_name: Option<String>,
    /// Parameter that holds its weight.
    pub(super) part: ParamKind,
    /// Rows of that parameter.
    pub(super) rows: Range<usize>,
    /// True if the parameter has no other rows.
    pub(super) is_whole: bool,
    /// Blocks that have it; every block's index, if it lies outside the blocks.
    blocks: Arc<[usize]>,
}

/// Lists every module of a model that has a weight, those of all blocks once.
pub(super) fn modules(spec: &DecoderSpec) -> Vec<Module> {
    let family = family_named(spec.family).expect("specs come from families");
    let mut modules = Vec::new();
    for (layer, blocks) in kinds_of_layers(spec) {
        let mut layout = LayerLayout::from_spec(spec, layer);
        if layer == LayerId::Head && spec.head.tied {
            let head = LayerLayout::new(&[(ParamKind::HeadWeight, spec.vocab_size, spec.hidden_size)], None);
            layout.params.extend(head.params);
        }
        for param in layout.params.iter().filter(|param| is_weight(param.part)) {
            let found = pieces(family, spec, layer, &LayerLayout { params: vec![*param], ..layout.clone() });
            let is_whole = found.len() == 1;
            let mut row = 0;
            for (piece, name) in found.iter().zip(family.modules(param.part)) {
                let (part, rows) = (param.part, row..row + piece.rows);
                let other_name = family.name_in_memory(&name);
                let of_block = name.contains("{}");
                let known = modules.iter_mut().find(|module: &&mut Module| of_block && module.name == name);
                match known {
                    // Blocks of several kinds have it.
                    Some(module) => module.blocks = sorted(&module.blocks, &blocks),
                    None => modules.push(Module {
                        name,
                        other_name,
                        part,
                        rows,
                        is_whole,
                        blocks: blocks.clone(),
                    }),
                }
                row += piece.rows;
            }
        }
    }
    modules
}

/// Returns whether a part is the weight of a module, rather than a bias or a parameter beside modules.
fn is_weight(part: ParamKind) -> bool {
    part.weight_of_bias().is_none() && !matches!(part, ParamKind::DeltaDecayLog | ParamKind::DeltaDecayBias)
}

/// Lists a layer of each kind, with the blocks of that kind; for a layer that is no block, all of them.
fn kinds_of_layers(spec: &DecoderSpec) -> Vec<(LayerId, Arc<[usize]>)> {
    let blocks = |is_linear: bool| -> Arc<[usize]> {
        (0..spec.num_layers).filter(|&i| spec.linear_attention(i).is_some() == is_linear).collect()
    };
    let mut kinds = [blocks(false), blocks(true)];
    kinds.sort_unstable_by_key(|blocks| blocks.first().copied());
    let all: Arc<[usize]> = (0..spec.num_layers).collect();
    let of_blocks = kinds.into_iter().filter_map(|blocks| Some((LayerId::Block(*blocks.first()?), blocks)));
    let first = std::iter::once((LayerId::Embedding, all.clone()));
    first.chain(of_blocks).chain(std::iter::once((LayerId::Head, all))).collect()
}

/// Joins two lists of blocks, in order.
fn sorted(some: &[usize], others: &[usize]) -> Arc<[usize]> {
    let mut all = [some, others].concat();
    all.sort_unstable();
    all.into()
}

/// Returns whether `target` names the module `name`.
fn is_meant(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl Module {
    /// Returns the name by which `peft` finds the module.
    pub(super) fn known_name(&self) -> &str {
        self.other_name.as_deref().unwrap_or(&self.name)
    }

    /// Lists the names of the module in one block.
    fn names(&self, index: usize) -> impl Iterator<Item = String> {
        let names = std::iter::once(self.name.as_str()).chain(self.other_name.as_deref());
        names.map(move |name| name.replace("{}", &index.to_string()))
    }

    /// Returns the number of its blocks in which the module matches; for a module outside the blocks,
    /// all or none.
    fn count(&self, is_meant: impl Fn(&str) -> bool) -> usize {
        self.blocks.iter().filter(|&&index| self.names(index).any(|name| is_meant(&name))).count()
    }
}

/// Returns the targets as `peft` finds them, and the names of the modules that train whole. A target
/// is the last word of a name if it is unambiguous, else as much of it as all blocks share. In a
/// vision–language model, whose other parts have modules of the same names, the targets are a
/// pattern.
pub(crate) fn peft_names(adapter: &Adapter, spec: &DecoderSpec) -> (Targets, Vec<String>) {
    let modules = modules(spec);
    let sees = family_named(spec.family).is_some_and(Family::sees);
    let sites = || adapter.matrices().iter().flat_map(|adapted| &adapted.sites);
    let is_target = |module: &Module| sites().any(|site| site.module == module.name);
    let end = |name: &str| name.split_once("{}.").map_or(name, |(_, end)| end).to_owned();
    let mut targets: Vec<String> = Vec::new();
    for module in modules.iter().filter(|module| is_target(module)) {
        let name = module.known_name();
        let word = name.rsplit('.').next().unwrap_or(name);
        let is_unmistakable =
            modules.iter().filter(|other| is_meant(other.known_name(), word)).all(is_target);
        let name = match () {
            () if sees => regex::escape(name).replace(r"\{\}", r"\d+"),
            () if is_unmistakable => word.to_owned(),
            () => end(name),
        };
        if !targets.contains(&name) {
            targets.push(name);
        }
    }
    let targets = if sees { Targets::Pattern(targets.join("|")) } else { Targets::Names(targets) };
    let saved = adapter.saved();
    let is_copied =
        |part| part == ParamKind::HeadWeight && spec.head.tied && saved.contains(&ParamKind::TokenTable);
    let is_saved = |module: &&Module| saved.contains(&module.part) || is_copied(module.part);
    (targets, modules.iter().filter(is_saved).map(|module| end(module.known_name())).collect())
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
    /// Returns the targeted modules, in the order of the model.
    ///
    /// # Errors
    /// If a name is no module's or that of a module without a matrix, or a module matches in some
    /// blocks only.
    pub(super) fn find<'m>(&self, modules: &'m [Module]) -> Result<Vec<&'m Module>> {
        let is_linear =
            |module: &&Module| module.part.low_rank().is_some_and(|parts| parts.magnitude.is_some());
        match self {
            Self::AllLinear => Ok(modules.iter().filter(is_linear).collect()),
            Self::Names(names) => {
                for name in names {
                    if modules.iter().all(|module| module.count(|full| full.ends_with(name.as_str())) == 0) {
                        return Err(unknown("targets", name, modules));
                    }
                }
                matching(modules, |full| names.iter().any(|name| is_meant(full, name)))
            }
            Self::Pattern(pattern) => {
                let regex = Regex::new(&format!("^(?:{pattern})$")).map_err(|error| {
                    let reason = error.to_string();
                    let reason = reason.lines().last().unwrap_or_default().trim_start_matches("error: ");
                    ModelError::Invalid(format!(
                        "adapter.targets: {pattern:?} is not a valid regular expression: {reason}"
                    ))
                })?;
                let found = matching(modules, |full| regex.is_match(full))?;
                if found.is_empty() {
                    return Err(ModelError::Invalid(format!(
                        "adapter.targets: {pattern:?} matches no module's full name, as in {}",
                        modules
                            .iter()
                            .find(is_linear)
                            .map_or("", |module| module.name.as_str())
                            .replace("{}", "0")
                    )));
                }
                Ok(found)
            }
        }
    }
}

/// Returns the modules that match. Each must be a matrix, and match in every block.
fn matching(modules: &[Module], is_meant: impl Fn(&str) -> bool) -> Result<Vec<&Module>> {
    let mut found = Vec::new();
    for module in modules {
        let count = module.count(&is_meant);
        if count == 0 {
            continue;
        }
        let name = &module.name;
        let num_blocks = module.blocks.len();
        if count < num_blocks {
            return Err(ModelError::Invalid(format!(
                "adapter.targets: {name} matches in {count} of {num_blocks} blocks; every block has the same adapter, \
                 name the suffix that all of them share"
            )));
        }
        if module.part.low_rank().is_none() {
            return Err(ModelError::Invalid(format!(
                "adapter.targets: {name} is neither a linear layer nor a token table; name it in adapter.modules_to_save to train it whole"
            )));
        }
        found.push(module);
    }
    Ok(found)
}

/// Returns the parts of modules that train whole: weights, and biases if there are any. As for `peft`, a name
/// means every module whose name ends in these letters. A tied head may be named beside the token table.
///
/// # Errors
/// If a name is no module's or that of a module that shares a parameter, or a module matches in
/// some blocks only.
pub(super) fn saved(names: &[String], modules: &[Module], spec: &DecoderSpec) -> Result<Vec<ParamKind>> {
    for name in names {
        if modules.iter().all(|module| module.count(|full| is_meant(full, name)) == 0) {
            return Err(unknown("modules_to_save", name, modules));
        }
    }
    let mut parts = Vec::new();
    for module in modules {
        let count = module.count(|full| names.iter().any(|name| full.ends_with(name.as_str())));
        if count == 0 {
            continue;
        }
        let refused = |reason: &str| {
            Err(ModelError::Invalid(format!("adapter.modules_to_save: {} {reason}", module.name)))
        };
        if count < module.blocks.len() {
            return refused("matches in some blocks only; name the suffix that all of them share");
        }
        if !module.is_whole {
            return refused(
                "is kept in one matrix with its neighbours, which cannot train apart; name it in adapter.targets",
            );
        }
        if module.part == ParamKind::HeadWeight && spec.head.tied {
            if parts.contains(&ParamKind::TokenTable) {
                continue;
            }
            return refused("is the token table of this model (tie_word_embeddings); name that one");
        }
        parts.push(module.part);
        parts.extend(module.part.bias().filter(|&bias| has_part(spec, bias)));
    }
    parts.sort_unstable();
    parts.dedup();
    Ok(parts)
}

fn has_part(spec: &DecoderSpec, part: ParamKind) -> bool {
    kinds_of_layers(spec)
        .into_iter()
        .any(|(layer, _)| LayerLayout::from_spec(spec, layer).param(part).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::families::family_of;

    /// Returns the spec of one of the golden models.
    fn spec(name: &str) -> DecoderSpec {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/models").join(name);
        let golden: serde_json::Value =
            serde_json::from_slice(&std::fs::read(file.with_extension("json")).unwrap()).unwrap();
        let config = Config::parse(&file, &golden["config"].to_string()).unwrap();
        family_of(&config).unwrap().spec(&config).unwrap()
    }

    fn found(model: &str, targets: &Targets) -> Result<Vec<String>> {
        let spec = spec(model);
        let modules = modules(&spec);
        Ok(targets.find(&modules)?.into_iter().map(|module| module.name.clone()).collect())
    }

    fn names(names: &[&str]) -> Targets {
        Targets::Names(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn pattern(text: &str) -> Targets {
        Targets::Pattern(text.to_owned())
    }

    #[test]
    fn all_linear_means_every_linear_layer_but_the_head() {
        let llama = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        let expected: [(&str, &[&str]); 8] = [
            ("llama", &llama),
            ("llama-tied", &llama),
            ("qwen2-window", &llama),
            ("qwen3", &llama),
            ("gemma", &llama),
            ("phi", &["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]),
            ("gpt2", &["c_attn", "c_proj", "c_fc", "c_proj"]),
            ("gpt-neox", &["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ];
        for (model, ends) in expected {
            let all = found(model, &Targets::AllLinear).unwrap();
            let last: Vec<_> = all.iter().map(|name| name.rsplit('.').next().unwrap()).collect();
            assert_eq!(last, ends, "{model}");
            assert!(all.iter().all(|name| name.contains("{}")), "{model}: {all:?}");
        }
    }

    #[test]
    fn a_name_means_the_modules_that_end_with_it() {
        assert_eq!(
            found("gpt2", &names(&["c_proj"])).unwrap(),
            ["transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"]
        );
        assert_eq!(found("gpt2", &names(&["mlp.c_proj"])).unwrap(), ["transformer.h.{}.mlp.c_proj"]);
        assert_eq!(found("gpt-neox", &names(&["dense"])).unwrap(), ["gpt_neox.layers.{}.attention.dense"]);
        assert_eq!(
            found("phi", &names(&["lm_head", "embed_tokens"])).unwrap(),
            ["model.embed_tokens", "lm_head"]
        );
        // transformers 5 calls it lm_head, its files embed_out.
        assert_eq!(found("gpt-neox", &names(&["lm_head"])).unwrap(), ["embed_out"]);
        assert_eq!(found("gpt-neox", &names(&["embed_out"])).unwrap(), ["embed_out"]);
        // As peft writes them when there are many.
        let both = names(&["model.layers.0.mlp.fc1", "model.layers.1.mlp.fc1"]);
        assert_eq!(found("phi", &both).unwrap(), ["model.layers.{}.mlp.fc1"]);
    }

    #[test]
    fn a_pattern_matches_whole_names() {
        assert_eq!(
            found("llama", &pattern(r".*\.(q|v)_proj")).unwrap(),
            ["model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.v_proj"]
        );
        assert_eq!(found("gpt-neox", &pattern("lm_head|embed_in")).unwrap(), ["embed_out"]);
        assert_eq!(
            found("gpt2", &pattern(r"transformer\.h\.\d+\.(attn|mlp)\.c_proj")).unwrap(),
            ["transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"]
        );
        let error = |model: &str, text: &str| found(model, &pattern(text)).unwrap_err().to_string();
        assert!(error("llama", "q_proj").contains("as in model.layers.0.self_attn.q_proj"));
        assert!(error("llama", "(?!x).*").contains("look-around"), "{}", error("llama", "(?!x).*"));
        assert!(error("llama", r".*norm").contains("is neither a linear layer"));
    }

    #[test]
    fn some_blocks_only_are_refused() {
        for targets in [names(&["layers.1.self_attn.q_proj"]), pattern(r".*\.1\..*q_proj")] {
            let error = found("llama", &targets).unwrap_err().to_string();
            assert!(error.contains("self_attn.q_proj matches in 1 of 2 blocks"), "{error}");
        }
        assert!(
            found("llama", &names(&["q_proj", "c_attn"])).unwrap_err().to_string().contains("\"c_attn\"")
        );
    }

    #[test]
    fn whole_modules_are_found_with_their_biases() {
        let saved_of = |model: &str, names: &[&str]| {
            let spec = spec(model);
            let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
            saved(&names, &modules(&spec), &spec)
        };
        assert_eq!(saved_of("phi", &["lm_head"]).unwrap(), [ParamKind::HeadWeight, ParamKind::HeadBias]);
        assert_eq!(saved_of("gpt2", &["wte", "ln_f"]).unwrap().len(), 3);
        assert_eq!(saved_of("llama-tied", &["embed_tokens", "lm_head"]).unwrap(), [ParamKind::TokenTable]);
        assert_eq!(saved_of("gpt-neox", &["lm_head"]).unwrap(), [ParamKind::HeadWeight]);
        let norms = [ParamKind::Norm1Weight, ParamKind::Norm2Weight, ParamKind::FinalNormWeight];
        let found = saved_of("llama", &["norm"]).unwrap();
        assert!(found.len() == 3 && norms.iter().all(|norm| found.contains(norm)), "{found:?}");
        assert_eq!(saved_of("llama", &["model.norm"]).unwrap().len(), 1);
        let refused = |model, name: &str| saved_of(model, &[name]).unwrap_err().to_string();
        assert!(refused("llama-tied", "lm_head").contains("is the token table"));
        assert!(refused("llama", "q_proj").contains("cannot train apart"));
        assert!(refused("llama", "layers.0.input_layernorm").contains("some blocks only"));
        assert!(refused("llama", "ln_f").contains("no module"));
    }
}
