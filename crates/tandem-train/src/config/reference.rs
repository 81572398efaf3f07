//! `[reference]`: what the policy is compared with.

use std::path::{Path, PathBuf};

use super::error::ConfigError;
use super::reader::Section;
use super::{AdapterSection, Method, ObjectiveConfig};

/// The reference of a preference run.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceConfig {
    /// How its log-probabilities are had.
    pub kind: ReferenceKind,
    /// Its model folder: for `model`, and for `precompute` from other weights than the policy's. `None` means the policy's
    /// own starting weights.
    pub model: Option<PathBuf>,
    /// Its adapter on the policy's base: for `adapter`, and for `precompute`. `None` means the one that the policy's starts from.
    pub adapter: Option<PathBuf>,
    /// How a reference follows the policy: for `sync`.
    pub sync: Sync,
}

/// How a reference follows the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sync {
    /// Steps between two pulls.
    pub steps: u64,
    /// What a pull leaves: `alpha · policy + (1 − alpha) · reference`.
    pub alpha: f64,
}

impl Default for Sync {
    /// As TRL's `ref_model_sync_steps` and `ref_model_mixup_alpha`.
    fn default() -> Self {
        Self { steps: 512, alpha: 0.6 }
    }
}

/// How the reference's log-probabilities are had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    /// Computed once before training, kept on disk by content, its weights then dropped.
    Precompute,
    /// The policy without its adapter.
    Base,
    /// The policy's base with another adapter.
    Adapter,
    /// A second set of weights in memory.
    Model,
    /// What the policy was, pulled towards it every now and then.
    Sync,
    /// There is none: SFT, a reward model, or a reference-free loss.
    None,
}

impl ReferenceKind {
    const NAMES: [(&'static str, Self); 6] = [
        ("precompute", Self::Precompute),
        ("base", Self::Base),
        ("adapter", Self::Adapter),
        ("model", Self::Model),
        ("sync", Self::Sync),
        ("none", Self::None),
    ];

    /// The name in the config.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).expect("every kind has a name").0
    }
}

pub(super) fn parse(
    mut section: Section,
    method: Method,
    objective: &ObjectiveConfig,
    policy: &Path,
    adapter: Option<&AdapterSection>,
) -> Result<ReferenceConfig, ConfigError> {
    use ReferenceKind::{Adapter, Base, Model, None as NoReference, Precompute};
    let unneeded = !method.has_reference() || objective.reference_free;
    let kind_entry = section.take("kind");
    let kind = match &kind_entry {
        None if unneeded => NoReference,
        // Nothing can be computed beforehand of answers that are yet to be given.
        None if method == Method::Online && adapter.is_some() => Base,
        None if method == Method::Online => Model,
        None => Precompute,
        Some(entry) => entry.one_of(&ReferenceKind::NAMES)?,
    };
    if let Some(entry) = &kind_entry {
        match (kind, method) {
            (NoReference, Method::Dpo | Method::Online) if !objective.reference_free => {
                return Err(entry.conflict(
                    "without a reference the loss needs objective.reference_free = true; set it, or kind = \"precompute\"",
                ));
            }
            (NoReference, _) => {}
            (_, Method::Sft | Method::Reward) => {
                let reason = format!("method = \"{method}\" has no reference; remove the [reference] table");
                return Err(entry.conflict(reason));
            }
            _ if objective.reference_free => {
                return Err(entry.conflict(
                    "objective.reference_free = true leaves the reference unused; write kind = \"none\" or drop one of the two",
                ));
            }
            (Precompute, Method::Online) => {
                return Err(entry.conflict(
                    "answers are generated while the policy trains, so that nothing can be computed of them before; write kind = \"model\", \"sync\" or, with an [adapter], \"base\" or \"adapter\"",
                ));
            }
            (Base | Adapter, _) if adapter.is_none() => {
                return Err(entry.conflict(
                    "full training changes the weights that the reference would share; give an [adapter], or kind = \"precompute\", \"model\" or \"sync\"",
                ));
            }
            _ => {}
        }
    }
    let model = match section.take("model") {
        None => None,
        Some(entry) if !matches!(kind, Model | Precompute) => {
            let reason = if kind == NoReference {
                "a reference model is given, but there is no reference in this run; remove it".to_owned()
            } else {
                format!(
                    "kind = {:?} takes the policy's weights; remove it, or set kind = \"model\"",
                    kind.name()
                )
            };
            return Err(entry.conflict(reason));
        }
        Some(entry) => Some(entry.path()?),
    };
    let own = match section.take("adapter") {
        None => None,
        Some(entry) if !matches!(kind, Adapter | Precompute) || adapter.is_none() || model.is_some() => {
            return Err(entry.conflict(
                "a reference adapter is for kind = \"adapter\" or \"precompute\", on the base that the policy's [adapter] is on; remove it, or change the kind",
            ));
        }
        Some(entry) => Some(entry.path()?),
    };
    let starts_trained = adapter.is_some_and(|adapter| adapter.folder().is_some());
    if let Some(entry) = &kind_entry {
        if kind == Adapter && own.is_none() && !starts_trained {
            return Err(entry.conflict(
                "which adapter? give reference.adapter, or adapter.start, of which the reference then stays a copy",
            ));
        }
        if kind == Model && model.is_none() && starts_trained {
            return Err(entry.conflict(
                "the policy starts from an adapter; kind = \"adapter\" keeps a copy of it on the same base, reference.model names another model",
            ));
        }
    }
    let sync = sync(&mut section, kind)?;
    section.finish()?;
    // The policy's own folder, written out, means the same as leaving the key away.
    let is_own = |model: &PathBuf| model == policy && !starts_trained;
    Ok(ReferenceConfig { kind, model: model.filter(|model| !is_own(model)), adapter: own, sync })
}

fn sync(section: &mut Section, kind: ReferenceKind) -> Result<Sync, ConfigError> {
    let (steps, alpha) = (section.take("sync_steps"), section.take("sync_alpha"));
    if let Some(entry) = steps.iter().chain(&alpha).next().filter(|_| kind != ReferenceKind::Sync) {
        return Err(entry.conflict("only kind = \"sync\" has it; remove it"));
    }
    let default = Sync::default();
    Ok(Sync {
        steps: steps.map_or(Ok(default.steps), |e| e.integer(1..=i64::MAX as u64))?,
        alpha: alpha.map_or(Ok(default.alpha), |e| {
            e.number("a number above 0, at most 1", |x| x > 0.0 && x <= 1.0)
        })?,
    })
}
