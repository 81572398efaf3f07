//! Responses that the policy gives while it trains, and what Online DPO, XPO and Nash-MD make of them.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::{Map, Value};
use tandem_data::forest::{ForestBuilder, RowCounts};
use tandem_data::token_cache::TokenCache;
use tandem_judge::{Candidate, Judge, JudgeError, Prompt, PromptWithCompletions, Rule, RuleJudge};
use tandem_model::{ModelFolder, Result as ModelResult};

use super::dpo::pair_loss;
use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch, chain, grpo};
use crate::Result;
use crate::config::{Algorithm, Config, JudgeKind, Pairs};
use crate::metrics::{MetricSums, Sides};
use crate::objective::{Loss, PolicyAnswer, TokenLogProbs, nash_md_loss};

pub(super) struct Online;

impl Recipe for Online {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        DatasetRow::Prompt(cache.prompt(row).0)
    }

    /// Opens a model at the temperature of the answers, where their log-probabilities are compared.
    fn open_folder(&self, config: &Config, path: &Path) -> ModelResult<ModelFolder> {
        let folder = ModelFolder::open(path)?;
        match config.online.as_ref().filter(|online| online.algorithm.grpo().is_some()) {
            Some(online) => folder.with_temperature(online.temperature as f32),
            None => Ok(folder),
        }
    }

    /// Asks the rules that compare responses with a column of the row whether it is there.
    fn check_rows(&self, config: &Config, rows: &TokenCache) -> Result<()> {
        let of_rows = config.judges.iter().filter_map(|section| match &section.kind {
            JudgeKind::Rule(rule @ (Rule::Exact(_) | Rule::Regex(_))) => Some((&section.name, rule)),
            _ => None,
        });
        let mut judges = of_rows
            .map(|(name, rule)| RuleJudge::new(name, rule.clone()))
            .collect::<Result<Vec<_>, JudgeError>>()?;
        for row in 0..if judges.is_empty() { 0 } else { rows.num_rows() } {
            let mut fields: Map<String, Value> =
                serde_json::from_slice(rows.prompt(row).1).expect("it was written as JSON");
            fields.remove("prompt");
            let place = rows.origin(row).to_string();
            // The row is what is asked about: any response will do.
            let answer = Candidate { text: "", tokens: 0, is_ended: true };
            let group = PromptWithCompletions {
                place: &place,
                prompt: Prompt::Text(""),
                row: &fields,
                answers: vec![answer],
            };
            for judge in &mut judges {
                judge.judge(std::slice::from_ref(&group), &AtomicBool::new(false))?;
            }
        }
        Ok(())
    }

    fn no_held_out_rows(&self) -> &'static str {
        "an online run answers its held-out prompts while it trains; `tandem eval --judge` tells how often a model's \
         answers are better than another's"
    }

    fn add_row(
        &self,
        _cache: &TokenCache,
        _rows: [usize; 2],
        _layout: &RowLayout,
        _forest: &mut ForestBuilder,
        _micro: &mut MicroBatch,
    ) {
        unreachable!("an online run trains on prompts with responses, not on rows of a data set")
    }

    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
        if let Some(options) = &terms.objective.grpo {
            grpo::loss(batch, options, terms, out);
            let totals = &terms.whole.totals;
            // TRL, too, divides by 1 where no token counts.
            return (options.divisor(totals.pairs as f64, totals.chosen_tokens as f64) as u64).max(1);
        }
        let advantages = &batch.micro.advantages;
        if advantages.is_empty() {
            return pair_loss(batch, terms, out);
        }
        let sequence: Vec<u32> = batch.micro.forest.predictions.iter().map(|p| p.sequence).collect();
        let (policy, reference) = (&batch.scores.log_prob, &batch.reference_scores.log_prob);
        nash_md_loss(&TokenLogProbs { sequence: &sequence, policy, reference }, advantages, terms.beta, out);
        terms.whole.totals.pairs
    }

    fn add_metrics(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, sums: &mut MetricSums) {
        if terms.objective.grpo.is_some() {
            // They come with the loss.
            return;
        }
        sums.add_pairs(&batch.log_probs.pairs(), terms.objective, terms.beta);
        batch.add_tokens(Sides::Single, sums);
        sums.add_answers(&batch.log_probs.policy, batch.log_probs.reference.as_deref());
    }

    fn num_responses(&self, config: &Config) -> usize {
        let online = config.online.as_ref().expect("an online run");
        match online.algorithm {
            Algorithm::Grpo(_) | Algorithm::Distill(_) => online.num_answers,
            _ if online.pairs == Pairs::All => online.num_answers,
            Algorithm::NashMd { .. } => 1,
            Algorithm::Dpo | Algorithm::Xpo { .. } => 2,
        }
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        forest.push_answers(&row.prompt, &vec![&row.chosen[..]; row.num_responses], 0);
    }

    fn label_assumed(&self, config: &Config, _num_rows: usize, num_sequences: usize, micro: &mut MicroBatch) {
        let algorithm = config.online.as_ref().map(|online| online.algorithm);
        match algorithm {
            Some(Algorithm::Grpo(_)) => micro.answers = grpo::assumed(num_sequences),
            Some(Algorithm::NashMd { .. }) => {
                micro.pairs = chain(num_sequences);
                micro.advantages = vec![0.0; num_sequences];
            }
            _ => micro.pairs = chain(num_sequences),
        }
    }
}

/// A prompt with its responses that are in pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoredPrompt {
    /// The data set's row.
    pub row: u32,
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The answers' tokens.
    pub answers: Vec<Vec<u32>>,
    /// Ranges of each answer that the policy sampled, where an environment wrote the rest.
    pub turns: Vec<Vec<[u32; 2]>>,
    /// The better and the worse answer of each pair.
    pub pairs: Vec<[u32; 2]>,
    /// The answers that are the reference's own, for XPO.
    pub explored: Vec<u32>,
    /// Nash-MD only: preference of each completion over the mixture's, minus one half.
    pub advantages: Vec<f64>,
    /// Policy gradients only: each answer as it was sampled.
    pub policy: Vec<SampledAnswer>,
    /// Distillation only: who wrote the answers.
    pub author: Option<Author>,
}

/// Author of the answers that a distillation trains on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Author {
    /// The policy gave them for this batch.
    Policy,
    /// The data set has them.
    Data,
}

/// An answer as it was sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledAnswer {
    /// Its place among the answers.
    pub answer: PolicyAnswer,
    /// Log-probabilities of its sampled tokens under the weights that sampled it.
    pub sampled: Vec<f32>,
    /// The same by the server that sampled it, if the loss corrects for that.
    pub served: Option<Vec<f32>>,
}

impl ScoredPrompt {
    /// Weight in a mean: the number of pairs, or of answers where there are none.
    pub fn weight(&self) -> usize {
        let has_pairs = self.advantages.is_empty() && self.policy.is_empty() && self.author.is_none();
        if has_pairs { self.pairs.len() } else { self.answers.len() }
    }

    /// Tokens that a mean over tokens counts: of chosen answers, of all that a policy gradient takes, or of all
    /// answers of a distillation.
    pub fn num_counted_tokens(&self) -> usize {
        if self.author.is_some() {
            return (0..self.answers.len()).map(|answer| self.num_sampled(answer)).sum();
        }
        let chosen = self.pairs.iter().map(|&[chosen, _]| self.answers[chosen as usize].len());
        let taken = self.policy.iter().enumerate().filter(|(_, sampled)| !sampled.answer.is_masked);
        chosen.sum::<usize>() + taken.map(|(answer, _)| self.num_sampled(answer)).sum::<usize>()
    }

    /// Tokens of an answer that the policy sampled.
    fn num_sampled(&self, answer: usize) -> usize {
        match self.turns.get(answer).map_or(&[][..], Vec::as_slice) {
            [] => self.answers[answer].len(),
            turns => turns.iter().map(|[begin, end]| (end - begin) as usize).sum(),
        }
    }

    /// Returns whether its answers may be in several micro-batches: none is compared with another.
    pub fn is_divisible(&self) -> bool {
        self.pairs.is_empty() && self.answers.len() > 1
    }

    /// Number of its first answers that fit this many tokens together with the prompt.
    pub fn answers_within(&self, tokens: usize, share_prefix: bool) -> usize {
        let mut used = if share_prefix { self.prompt.len() } else { 0 };
        let copy = self.prompt.len() - used;
        let fits = |answer: &&Vec<u32>| {
            used += copy + answer.len();
            used <= tokens
        };
        self.answers.iter().take_while(fits).count()
    }

    /// Takes its first answers away, with a copy of the prompt.
    pub fn split_first(&mut self, answers: usize) -> Self {
        fn take<T>(all: &mut Vec<T>, count: usize) -> Vec<T> {
            all.drain(..count.min(all.len())).collect()
        }
        assert!(self.is_divisible(), "answers that are compared stay together");
        Self {
            row: self.row,
            prompt: self.prompt.clone(),
            answers: take(&mut self.answers, answers),
            turns: take(&mut self.turns, answers),
            pairs: Vec::new(),
            explored: Vec::new(),
            advantages: take(&mut self.advantages, answers),
            policy: take(&mut self.policy, answers),
            author: self.author,
        }
    }

    /// Counts of what it adds to a forest.
    pub fn counts(&self, share_prefix: bool) -> RowCounts {
        let lengths: Vec<usize> = self.answers.iter().map(Vec::len).collect();
        RowCounts::for_answers(self.prompt.len(), &lengths, share_prefix)
    }

    /// Adds the responses, generated under the limit `max_new_tokens`, to a forest, and their labels to the
    /// micro-batch.
    pub(super) fn add_to(
        &self,
        share_prefix: bool,
        max_new_tokens: usize,
        forest: &mut ForestBuilder,
        micro: &mut MicroBatch,
    ) {
        let first = forest.num_sequences() as u32;
        micro.pairs.extend(self.pairs.iter().map(|pair| pair.map(|answer| first + answer)));
        micro.explored.extend(self.explored.iter().map(|answer| first + answer));
        micro.advantages.extend(&self.advantages);
        for SampledAnswer { answer, sampled, served } in &self.policy {
            micro.answers.push(*answer);
            micro.sampled.push(sampled.clone());
            micro.served.extend(served.clone());
        }
        micro.answer_tokens.extend((0..self.answers.len()).map(|answer| self.num_sampled(answer) as u32));
        micro.sequence_tokens += self.counts(share_prefix).sequence_tokens;
        let answers: Vec<&[u32]> = self.answers.iter().map(Vec::as_slice).collect();
        let turns: Vec<&[[u32; 2]]> = self.turns.iter().map(Vec::as_slice).collect();
        // A given text has the length that it has.
        let max_new_tokens = if self.author == Some(Author::Data) { 0 } else { max_new_tokens };
        forest.push_conversations(&self.prompt, &answers, &turns, max_new_tokens);
    }
}
