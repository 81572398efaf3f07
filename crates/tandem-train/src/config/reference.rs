//! `[reference]`: what the policy is compared with.

use std::path::{Path, PathBuf};

use super::error::ConfigError;
use super::reader::Section;
use super::{Method, ObjectiveConfig};

/// The reference of a preference run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferenceConfig {
    /// How its log-probabilities are had.
    pub kind: ReferenceKind,
    /// Its model folder: for `model`, and for `precompute` from other weights than the policy's. `None` means the policy's
    /// own starting weights.
    pub model: Option<PathBuf>,
}

/// How the reference's log-probabilities are had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    /// Computed once before training, kept on disk by content, its weights then dropped.
    Precompute,
    /// A second set of weights in memory.
    Model,
    /// There is none: SFT, or a reference-free loss.
    None,
}

impl ReferenceKind {
    /// The name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Precompute => "precompute",
            Self::Model => "model",
            Self::None => "none",
        }
    }
}

pub(super) fn parse(
    mut section: Section,
    method: Method,
    objective: &ObjectiveConfig,
    policy: &Path,
) -> Result<ReferenceConfig, ConfigError> {
    use ReferenceKind::{Model, None as NoReference, Precompute};
    let unneeded = method == Method::Sft || objective.reference_free;
    let kind_entry = section.take("kind");
    let kind = match &kind_entry {
        None if unneeded => NoReference,
        None => Precompute,
        Some(entry) => entry.one_of_with(
            &[("precompute", Precompute), ("model", Model), ("none", NoReference)],
            &[
                ("base", "a reference that is the policy without its adapter is not there yet; \"precompute\", \"model\" and \"none\" are"),
                ("adapter", "a second adapter as the reference is not there yet; \"precompute\", \"model\" and \"none\" are"),
                ("sync", "a reference that follows the policy is not there yet; \"precompute\", \"model\" and \"none\" are"),
            ],
        )?,
    };
    if let Some(entry) = &kind_entry {
        match (kind, method) {
            (Precompute | Model, Method::Sft) => {
                return Err(entry.conflict("method = \"sft\" has no reference; remove the [reference] table"));
            }
            (Precompute | Model, Method::Dpo) if objective.reference_free => {
                return Err(entry.conflict(
                    "objective.reference_free = true leaves the reference unused; write kind = \"none\" or drop one of the two",
                ));
            }
            (NoReference, Method::Dpo) if !objective.reference_free => {
                return Err(entry.conflict(
                    "without a reference the loss needs objective.reference_free = true; set it, or kind = \"precompute\"",
                ));
            }
            _ => {}
        }
    }
    let model = match section.take("model") {
        None => None,
        Some(entry) if kind == NoReference => {
            return Err(entry
                .conflict("a reference model is given, but there is no reference in this run; remove it"));
        }
        Some(entry) => Some(entry.path()?),
    };
    section.finish()?;
    // The policy's own folder, written out, means the same as leaving the key away.
    Ok(ReferenceConfig { kind, model: model.filter(|m| m != policy) })
}
