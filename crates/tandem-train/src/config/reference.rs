//! `[reference]`: the model that the policy is compared with.

use std::ops::Bound::{Excluded, Included};
use std::path::{Path, PathBuf};

use super::error::Result;
use super::form::{AT_LEAST_ONE, choice, integer, number, path_or_name};
use super::hub::HubPart;
use super::keys::{Keys, group, keys};
use super::tree::Places;
use super::{AdapterSection, Config, Method};
use crate::objective::ObjectiveConfig;

keys! {
    /// The reference of a preference run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ReferenceConfig(
        method: Method,
        objective: &ObjectiveConfig,
        unused: Option<&str>,
        adapter: Option<&AdapterSection>
    ) {
        /// Source of the reference's log-probabilities. `"precompute"`: computed once before
        /// training for the rows that the steps read, and cached on disk by content, with the weights then dropped;
        /// not for online runs and the loss `kto`. `"base"`: the policy without its adapter. `"adapter"`: the policy's base with
        /// another adapter. With these two, policy and reference share each layer's pass.
        /// `"model"`: a second set of weights in memory, for distillation the teacher's. `"sync"`: a copy of the policy, pulled
        /// towards it every `sync_steps`; with an adapter, a second adapter on the same base.
        /// `"none"`: for SFT, a reward model or a reference-free loss.
        kind: ReferenceKind = choice(ReferenceKind::NAMES)
            .unless(|kind| refuse_kind(*kind, method, objective, unused, adapter.is_some()))
            .or(default_kind(method, objective, unused, adapter))
            .shown(
                "`\"precompute\"`; online and the loss `kto` `\"model\"`, with an adapter `\"base\"`, with `adapter.start` \
                 `\"adapter\"`",
            ),
        /// Model folder of the reference or its [name of the hub](hub.md), if it is not the policy's
        /// start: for `"model"` and `"precompute"`. For distillation the teacher, which may be of another
        /// size or family with the policy's tokenizer.
        model: Option<PathBuf> = path_or_name(HubPart::Model).optional().shown("the policy's start").only(
            matches!(kind, ReferenceKind::Model | ReferenceKind::Precompute),
            match kind {
                ReferenceKind::None => "a reference model is given, but this run has no reference; remove it".to_owned(),
                kind => format!("kind = {:?} uses the policy's weights; remove it, or set kind = \"model\"", kind.name()),
            },
        ),
        /// Adapter of the reference on the policy's base, as a folder or a name of the hub: for
        /// `"adapter"` and `"precompute"`.
        adapter: Option<PathBuf> = path_or_name(HubPart::Adapter).optional().shown("`adapter.start`").only(
            matches!(kind, ReferenceKind::Adapter | ReferenceKind::Precompute)
                && adapter.is_some()
                && model.is_none(),
            "a reference adapter needs kind = \"adapter\" or \"precompute\", and the base of the policy's [adapter]; \
             remove it, or change the kind",
        ),
        /// Moving reference.
    sync: Sync = group(|now, keys: &mut Keys| Sync::visit(now, keys, kind)),
    }
}

keys! {
    /// Pull of a reference towards the policy.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Sync(kind: ReferenceKind) {
        /// Steps between two pulls.
        steps: u64 = integer(AT_LEAST_ONE)
            .or(Self::default().steps)
            .named("sync_steps")
            .only(kind == ReferenceKind::Sync, ONLY_SYNC),
        /// Result of a pull: `sync_alpha` × policy + (1 − `sync_alpha`) × reference, element by
        /// element; for an adapter, of its factors.
        alpha: f64 = number((Excluded(0.0), Included(1.0)))
            .or(Self::default().alpha)
            .named("sync_alpha")
            .only(kind == ReferenceKind::Sync, ONLY_SYNC),
    }
}

const ONLY_SYNC: &str = "only kind = \"sync\" has it; remove it";

impl Default for Sync {
    /// TRL's `ref_model_sync_steps` and `ref_model_mixup_alpha`.
    fn default() -> Self {
        Self { steps: 512, alpha: 0.6 }
    }
}

/// Source of the reference's log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    /// Computed once before training, for the rows that the steps read, and cached on disk; the weights are then dropped.
    Precompute,
    /// The policy without its adapter.
    Base,
    /// The policy's base with another adapter.
    Adapter,
    /// A second set of weights in memory.
    Model,
    /// A copy of the policy, pulled towards it at intervals.
    Sync,
    /// No reference: SFT, a reward model, or a reference-free loss.
    None,
}

impl ReferenceKind {
    const NAMES: [(&str, Self); 6] = [
        ("precompute", Self::Precompute),
        ("base", Self::Base),
        ("adapter", Self::Adapter),
        ("model", Self::Model),
        ("sync", Self::Sync),
        ("none", Self::None),
    ];

    /// Name in the config.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).expect("every kind has a name").0
    }
}

fn default_kind(
    method: Method,
    objective: &ObjectiveConfig,
    unused: Option<&str>,
    adapter: Option<&AdapterSection>,
) -> ReferenceKind {
    if !method.has_reference() || unused.is_some() {
        return ReferenceKind::None;
    }
    if method == Method::Distill {
        return ReferenceKind::Model;
    }
    // Nothing can be computed in advance for completions that are generated during training or that depend on
    // the batch.
    if !method.generates() && !objective.needs_mismatched() {
        return ReferenceKind::Precompute;
    }
    // The policy's start, as for the precomputed one.
    match adapter {
        None => ReferenceKind::Model,
        Some(adapter) if adapter.folder().is_some() => ReferenceKind::Adapter,
        Some(_) => ReferenceKind::Base,
    }
}

fn refuse_kind(
    kind: ReferenceKind,
    method: Method,
    objective: &ObjectiveConfig,
    unused: Option<&str>,
    has_adapter: bool,
) -> Option<String> {
    use ReferenceKind::{Adapter, Base, None as NoReference, Precompute};
    let reason = match kind {
        kind if method == Method::Distill && kind != ReferenceKind::Model => {
            "method = \"distill\" learns whole distributions of another model, the teacher; set kind = \"model\", and \
             reference.model"
        }
        NoReference if method == Method::Grpo && unused.is_none() => {
            "without a reference objective.beta must be 0; set it, or choose another kind"
        }
        NoReference if method.has_reference() && unused.is_none() => {
            "without a reference the loss needs objective.reference_free = true; set it, or choose another kind"
        }
        NoReference => return None,
        _ if !method.has_reference() => {
            return Some(format!("method = \"{method}\" has no reference; remove the [reference] table"));
        }
        _ if unused.is_some() => {
            return unused.map(|unused| {
                format!("{unused} leaves the reference unused; set kind = \"none\", or remove one of the two")
            });
        }
        Precompute if objective.needs_mismatched() => {
            "the loss \"kto\" scores prompts with completions of other rows of the batch, so nothing can be computed in \
             advance; set kind = \"model\", \"sync\" or, with an [adapter], \"base\" or \"adapter\", or use the losses \
             \"bco\" and \"apo_zero_unpaired\" alone"
        }
        Precompute if method.generates() => {
            "completions are generated while the policy trains, so nothing can be computed in advance; set kind = \
             \"model\", \"sync\" or, with an [adapter], \"base\" or \"adapter\""
        }
        Base | Adapter if !has_adapter => {
            "full training changes the weights that the reference would share; add an [adapter] table, or set kind = \
             \"precompute\", \"model\" or \"sync\""
        }
        _ => return None,
    };
    Some(reason.to_owned())
}

impl ReferenceConfig {
    /// Drops a model that is the policy's own folder: it means the same as no model.
    pub(super) fn without_policy(self, policy: &Path, adapter: Option<&AdapterSection>) -> Self {
        let is_own = |model: &PathBuf| model == policy && !starts_trained(adapter);
        Self { model: self.model.filter(|model| !is_own(model)), ..self }
    }
}

fn starts_trained(adapter: Option<&AdapterSection>) -> bool {
    adapter.is_some_and(|adapter| adapter.folder().is_some())
}

/// Refuses a reference that is not there or that is ambiguous.
pub(super) fn check(config: &Config, places: &Places) -> Result<()> {
    let reference = &config.reference;
    let starts_trained = starts_trained(config.adapter.as_ref());
    let reason = match reference.kind {
        ReferenceKind::Adapter if reference.adapter.is_none() && !starts_trained => {
            "no adapter is named; set reference.adapter, or adapter.start, and the reference keeps a copy of it"
        }
        ReferenceKind::Model if reference.model.is_none() && starts_trained => {
            "the policy starts from an adapter; kind = \"adapter\" keeps a copy of it on the same base, and \
             reference.model names another model"
        }
        _ => return Ok(()),
    };
    Err(places.conflict("reference.kind", reason))
}
