//! `[online.server]`: a user's server that generates instead of this process.

use std::ops::Bound::{Excluded, Included};
use std::path::{Path, PathBuf};

use tandem_judge::http;
use tandem_model::{AdapterConfig, AdapterKind};
use toml::Value;

use super::error::Result;
use super::form::{Form, choice, custom, filled, integer, number, path, seconds};
use super::grpo::GrpoConfig;
use super::keys::keys;
use super::online::OnlineConfig;
use super::reader::Entry;
use super::tree::Places;
use super::{AdapterSection, Config};
use crate::objective::{CorrectionMode, PolicyLoss, SamplerCorrection};

/// Protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// vLLM's version of OpenAI's interface.
    Vllm,
    /// SGLang's own interface.
    Sglang,
}

impl ServerKind {
    const NAMES: [(&str, Self); 2] = [("vllm", Self::Vllm), ("sglang", Self::Sglang)];
}

keys! {
    /// A server that generates, and how it is called.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ServerConfig(output: &Path, grpo: Option<GrpoConfig>, overlaps: bool) {
        /// Protocol of the server.
        kind: ServerKind = choice(ServerKind::NAMES).or(ServerKind::Vllm),
        /// Address of the server: vLLM's up to the version, as `"http://127.0.0.1:8000/v1"`,
        /// SGLang's without, as `"http://127.0.0.1:30000"`.
        base_url: String = base_url()
            .required("the server's address, as http://127.0.0.1:8000/v1 for vLLM or http://127.0.0.1:30000 for SGLang")
            .formerly("address")
            .free(),
        /// Name under which the server serves the base model.
        model: String = filled("a name")
            .required("the name under which the server serves the base model (--served-model-name)"),
        /// Environment variable that holds the key, if the server needs one. The key is never
        /// shown.
        api_key_env: Option<String> =
            filled("the name of an environment variable").optional().formerly("key_variable").free(),
        /// Longest time of a request, which generates all completions of a prompt.
        timeout_s: f64 =
            seconds((Excluded(0.0), Included(3e7))).or(600.0).formerly("seconds").free(),
        /// Repetitions of a request that timed out or met a server in trouble (429, 5xx).
        retries: usize = integer(0..=1000).or(5).free(),
        /// Requests in flight, one for each prompt.
        concurrency: usize = integer(1..=4096).or(32).free(),
        /// Folder for each round's adapter, used by one run only. The server must find it at the
        /// same path.
        adapters: PathBuf = path().or(output.join("adapters")).shown("`adapters` in `output`").free(),
        /// With GRPO: use of the ratio of the trainer's probability to the server's, of each token
        /// (`"token_…"`) or of an answer (`"sequence_…"`). It weighs the loss, clamped to the bounds
        /// (`"…_truncate"`) or 0 outside them (`"…_mask"`). `"policy_ratio"` takes the server's
        /// log-probabilities for those of the weights that sampled, so that `grpo.epsilon` clips both. `"none"`
        /// trusts the server.
        importance_sampling: ServerRatio = choice(RATIOS)
            .unless(|ratio| match grpo.map(|grpo| grpo.loss) {
                _ if overlaps && *ratio != ServerRatio::Policy => Some(
                    "with online.overlap the trainer's weights of the time are gone; set \"policy_ratio\", or remove \
                     online.overlap"
                        .to_owned(),
                ),
                Some(PolicyLoss::Vespo) if ratio.weight().is_some_and(CorrectionMode::is_of_answers) => Some(
                    "the loss \"vespo\" weighs whole answers itself; set a \"token_…\" ratio, \"policy_ratio\" or \
                     \"none\""
                        .to_owned(),
                ),
                _ => None,
            })
            .or(match grpo.map(|grpo| grpo.loss) {
                _ if overlaps => ServerRatio::Policy,
                Some(PolicyLoss::Vespo) => ServerRatio::Weight(CorrectionMode::TokenTruncate),
                _ => ServerRatio::Weight(CorrectionMode::SequenceMask),
            })
            .shown("`\"sequence_mask\"`; `\"token_truncate\"` for `vespo`; `\"policy_ratio\"` with `online.overlap`")
            .only(grpo.is_some(), "only method = \"grpo\" compares probabilities; remove it"),
        /// Largest ratio; 0 is no bound.
        importance_sampling_max: Option<f64> = number(0.0..)
            .zero_is_none()
            .or(Some(3.0))
            .only(grpo.is_some() && importance_sampling.weight().is_some(), NO_RATIOS),
        /// Least ratio; 0 is no bound.
        importance_sampling_min: Option<f64> = number(0.0..)
            .unless(|least| match importance_sampling_max {
                Some(most) if *least >= most => Some(format!("it must be below importance_sampling_max = {most}")),
                _ => None,
            })
            .zero_is_none()
            .or(None)
            .only(grpo.is_some() && importance_sampling.weight().is_some(), NO_RATIOS),
    }
}

/// Use of the ratio of the trainer's probability to the server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerRatio {
    /// A weight of the loss.
    Weight(CorrectionMode),
    /// Part of the loss's own importance ratio.
    Policy,
    /// None: both are taken for equal.
    None,
}

impl ServerRatio {
    /// Returns how it weighs the loss, if it does.
    pub fn weight(self) -> Option<CorrectionMode> {
        match self {
            Self::Weight(mode) => Some(mode),
            Self::Policy | Self::None => None,
        }
    }
}

const RATIOS: [(&str, ServerRatio); 6] = [
    ("sequence_mask", ServerRatio::Weight(CorrectionMode::SequenceMask)),
    ("sequence_truncate", ServerRatio::Weight(CorrectionMode::SequenceTruncate)),
    ("token_mask", ServerRatio::Weight(CorrectionMode::TokenMask)),
    ("token_truncate", ServerRatio::Weight(CorrectionMode::TokenTruncate)),
    ("policy_ratio", ServerRatio::Policy),
    ("none", ServerRatio::None),
];

const NO_RATIOS: &str = "no ratio of probabilities weighs the loss here; remove it";

impl ServerConfig {
    /// Correction of the answers' probabilities.
    pub fn correction(&self) -> Option<SamplerCorrection> {
        let (min, max) = (self.importance_sampling_min, self.importance_sampling_max);
        self.importance_sampling.weight().map(|mode| SamplerCorrection { mode, min, max })
    }
}

fn base_url<'a>() -> Form<'a, String> {
    let read = |entry: Entry| {
        let text = entry.string()?.trim_end_matches('/').to_owned();
        match http::wrong_with(&text, "online.server.api_key_env") {
            Some(reason) => Err(entry.conflict(format!("it {reason}"))),
            None => Ok(text),
        }
    };
    custom("string", read, |text: &String| Value::from(text.clone()))
}

/// Refuses a server that cannot serve the run.
pub(super) fn check(
    server: &ServerConfig,
    online: &OnlineConfig,
    config: &Config,
    places: &Places,
) -> Result<()> {
    // The folder of a trained adapter is opened later.
    let adapter = config.adapter.as_ref().and_then(AdapterSection::new_adapter);
    let table = if online.algorithm.asks_reference() {
        Some(format!(
            "online.algorithm = {:?} also generates from the reference, which a server does not have; set \"dpo\", \
             or remove this table",
            online.algorithm.name()
        ))
    } else if online.temperature == 0.0 {
        Some(
            "online.temperature = 0 repeats one completion, which servers refuse; raise it, or remove this table"
                .to_owned(),
        )
    } else if config.adapter.is_none() {
        Some(
            "a server loads each round's weights as a LoRA adapter, but every weight trains here; add an \
             [adapter] table, or remove this one"
                .to_owned(),
        )
    } else {
        adapter.and_then(unloadable)
    };
    if let Some(reason) = table {
        return Err(places.conflict("online.server", reason));
    }
    if let Some(reason) = adapter.and_then(|adapter| misread(adapter, server.kind)) {
        return Err(places.conflict("online.server.kind", reason));
    }
    if server.kind == ServerKind::Sglang && server.base_url.ends_with("/v1") {
        let reason = "SGLang's own paths are not under /v1; set the address without it";
        return Err(places.conflict("online.server.base_url", reason));
    }
    Ok(())
}

/// Returns the reason why a server does not load an adapter, or not with its scale, if any.
pub fn unservable(adapter: &AdapterConfig, server: ServerKind) -> Option<String> {
    unloadable(adapter).or_else(|| misread(adapter, server))
}

/// Returns the reason why no server loads an adapter, if any.
fn unloadable(adapter: &AdapterConfig) -> Option<String> {
    if adapter.kind != AdapterKind::Lora {
        return Some(
            "servers load LoRA adapters only; set adapter.kind = \"lora\", or remove [online.server]"
                .to_owned(),
        );
    }
    (!adapter.modules_to_save.is_empty()).then(|| {
        format!(
            "servers load no adapter with modules that train whole ({}); remove adapter.modules_to_save, or \
             [online.server]",
            adapter.modules_to_save.join(", ")
        )
    })
}

/// Returns the reason why a server would generate with other weights than the adapter's, if any.
fn misread(adapter: &AdapterConfig, server: ServerKind) -> Option<String> {
    (adapter.rank_stabilized && server == ServerKind::Sglang).then(|| {
        "SGLang scales every adapter by alpha / rank, even one that asks for alpha / √rank, so it would generate \
         with other weights than those that train; remove adapter.rslora and choose adapter.alpha for it, or \
         remove [online.server]"
            .to_owned()
    })
}
