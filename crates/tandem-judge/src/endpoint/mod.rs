//! Judge over a chat model at an OpenAI-compatible address, which compares responses in pairs.
//!
//! Models are biased towards the first or second position. Each pair is therefore asked in both
//! orders: a response that wins both has won, all else is a tie. A response's score is its mean
//! share of wins within its group.

mod asker;
mod cache;
mod call;
mod choice;
mod client;
mod config;
mod pairs;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use config::{DEFAULT_TEMPLATE, EndpointConfig};

use self::asker::EndpointClient;
use self::pairs::Pair;
use crate::{Counts, Judge, JudgeError, PromptWithCompletions, Result, Verdict};

/// Judge that asks a chat model.
#[derive(Debug)]
pub struct EndpointJudge {
    config: EndpointConfig,
    asker: Arc<EndpointClient>,
    counts: Counts,
}

impl EndpointJudge {
    /// Reads the key from its environment variable and opens the cache; sends nothing yet.
    pub fn new(name: impl Into<String>, config: EndpointConfig) -> Result<Self> {
        let name = name.into();
        config.check(&name)?;
        let asker = Arc::new(EndpointClient::new(name, &config)?);
        Ok(Self { config, asker, counts: Counts::default() })
    }
}

impl Judge for EndpointJudge {
    fn name(&self) -> &str {
        self.asker.judge()
    }

    fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Verdict>>> {
        let mut pairs = pairs::all_pairs(groups);
        let asked: Vec<usize> = (0..pairs.len()).filter(|index| !pairs[*index].is_same(groups)).collect();
        let bodies = asked.iter().flat_map(|index| pairs[*index].bodies(groups, &self.config)).collect();
        let replies = call::ask_all(&self.asker, bodies, self.config.concurrency, stop)?;
        let mut last = None;
        for (index, both) in asked.iter().zip(replies.as_chunks::<2>().0) {
            let Pair { said, .. } = &mut pairs[*index];
            *said = pairs::PairVerdict::from_replies(both);
            last = said.failure().map(str::to_owned).or(last);
        }
        let has_failed = |index: &usize| pairs[*index].said.failure().is_some();
        if let Some(reason) = last.filter(|_| asked.iter().all(has_failed)) {
            return Err(JudgeError::NoPair {
                judge: self.name().to_owned(),
                address: self.asker.address().to_owned(),
                pairs: asked.len(),
                reason,
            });
        }
        let verdicts = pairs::verdicts(groups, &pairs);
        self.counts.add_verdicts(&verdicts);
        Ok(verdicts)
    }

    fn counts(&self) -> Counts {
        let mut counts = self.asker.counts();
        counts.judged = self.counts.judged;
        counts.unscored = self.counts.unscored;
        counts
    }
}
