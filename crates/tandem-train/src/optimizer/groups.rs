//! Settings of each parameter, from the groups of the config.

use std::collections::HashMap;
use std::ops::Range;

use regex::Regex;
use tandem_model::{Decoder, LayerId, ParamKind, ParamSpec, trained_names};

use crate::config::{ParameterGroup, TrainConfig};
use crate::{Result, TrainError};

/// How one parameter trains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterSettings {
    /// Factor on the learning rate.
    pub learning_rate_factor: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether it keeps its first values.
    pub frozen: bool,
}

/// Settings of all parameters of a run.
pub struct ParameterGroups {
    weight_decay: f64,
    /// Parameters of a group.
    grouped: HashMap<(LayerId, ParamKind), ParameterGroup>,
}

impl ParameterGroups {
    /// Finds the group of each parameter: the first whose pattern is in the name of its tensors.
    ///
    /// # Errors
    /// A pattern names no parameter, or only some tensors of one; nothing is left to train.
    pub fn new(config: &TrainConfig, decoder: &Decoder) -> Result<Self> {
        let patterns: Vec<Regex> = config
            .groups
            .iter()
            .map(|group| Regex::new(&group.parameters).expect("checked when the config was read"))
            .collect();
        let mut grouped = HashMap::new();
        let mut used = vec![false; patterns.len()];
        let mut trains = patterns.is_empty();
        for layer in decoder.whole().layers() {
            let mut found: HashMap<ParamKind, (Option<usize>, String)> = HashMap::new();
            for (part, name) in trained_names(decoder.whole(), layer) {
                let index = patterns.iter().position(|pattern| pattern.is_match(&name));
                for (used, pattern) in used.iter_mut().zip(&patterns) {
                    *used |= pattern.is_match(&name);
                }
                match found.get(&part) {
                    Some((other, _)) if *other == index => {}
                    Some((other, first)) => {
                        let index = index.or(*other).expect("one of the two has a group");
                        let reason = format!(
                            "it separates {name:?} from {first:?}, which are one parameter here; name both or none"
                        );
                        return Err(wrong(&config.groups[index], &reason));
                    }
                    None => drop(found.insert(part, (index, name))),
                }
            }
            for (part, (index, _)) in found {
                let group = index.map(|index| &config.groups[index]);
                trains |= group.is_none_or(|group| !group.frozen && group.learning_rate_factor > 0.0);
                grouped.extend(group.map(|group| ((layer, part), group.clone())));
            }
        }
        if let Some(unused) = used.iter().position(|used| !used) {
            let layer = decoder.whole().layers().into_iter().find_map(|layer| {
                trained_names(decoder.whole(), layer).first().map(|(_, name)| name.clone())
            });
            let reason = format!(
                "it is in the name of no parameter that trains; a name is, for example, {:?}",
                layer.unwrap_or_default()
            );
            return Err(wrong(&config.groups[unused], &reason));
        }
        match config.groups.last() {
            Some(group) if !trains => Err(wrong(
                group,
                "every parameter is frozen, or has a learning_rate_factor of 0; nothing is left to train",
            )),
            _ => Ok(Self { weight_decay: config.weight_decay, grouped }),
        }
    }

    /// How a parameter trains.
    pub fn of(&self, layer: LayerId, param: &ParamSpec) -> ParameterSettings {
        let group = self.grouped.get(&(layer, param.part));
        let own = group.and_then(|group| group.weight_decay);
        ParameterSettings {
            learning_rate_factor: group.map_or(1.0, |group| group.learning_rate_factor),
            weight_decay: own.unwrap_or(if param.decay { self.weight_decay } else { 0.0 }),
            frozen: group.is_some_and(|group| group.frozen),
        }
    }

    /// Elements of a rank's layer whose parameters are frozen.
    pub fn frozen(&self, decoder: &Decoder, layer: LayerId) -> Vec<Range<usize>> {
        let params = decoder.trained(layer).params.iter();
        params.filter(|param| self.of(layer, param).frozen).map(ParamSpec::range).collect()
    }
}

fn wrong(group: &ParameterGroup, reason: &str) -> TrainError {
    TrainError::Group { parameters: group.parameters.clone(), reason: reason.to_owned() }
}
