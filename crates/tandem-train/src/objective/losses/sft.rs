//! The likelihood of the chosen answers, as one term among preference losses (RPO, MPO).

use crate::objective::{ObjectiveConfig, Pair, Value};

/// The negative log-probability per chosen token, a mean over the tokens of the *global* batch. TRL
/// takes the mean within each accumulation step, so its value depends on how a batch is cut; for
/// one step both agree.
pub(crate) fn sft_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    Value { loss: -pair.likelihood * pair.pairs_per_token, d_chosen: -pair.pairs_per_token, d_rejected: 0.0 }
}
