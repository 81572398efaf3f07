//! Completions of many prompts in one batch.

use tandem_data::text_stream::TextStream;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::decode::{Finish, Flow};
use tandem_model::{ModelError, Request, Sampling};

use super::loaded::positions_of;
use super::{GenerationLimits, Loaded};
use crate::args::{ComputeArguments, WeightArguments};

/// Largest number of completions in progress; it bounds the memory of the KV cache.
const MAX_BATCH: usize = 64;

/// Sampling options and limits of completions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// Sampling options.
    pub sampling: Sampling,
    /// Most tokens of a completion, which also ends where the model's context ends.
    pub max_new_tokens: usize,
    /// Stop strings.
    pub stop: &'a [String],
    /// Whether a completion's text goes on from its prompt's, rather than beginning anew.
    pub continues: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CompletionText {
    /// Its text.
    pub text: String,
    /// Number of tokens, without the stop token.
    pub tokens: usize,
    /// Whether the model ended the completion, not the length limit.
    pub is_ended: bool,
}

/// Follows completions while they are generated.
pub(crate) trait Watch {
    /// Takes the number of finished completions, before each token. [`Flow::End`] stops all.
    fn step(&mut self, done: usize) -> Flow;

    /// Takes the finished completion of a prompt, counted from 0.
    fn finished(&mut self, _prompt: usize, _answer: &CompletionText) {}
}

impl<F: FnMut(usize) -> Flow> Watch for F {
    fn step(&mut self, done: usize) -> Flow {
        self(done)
    }
}

/// Generates one completion per prompt. The model is in memory only during this call. If `watch` stops, the
/// result is `None`.
pub(crate) fn all(
    weights: &WeightArguments,
    tokenizer: Tokenizer,
    prompts: Vec<Vec<u32>>,
    wanted: &Wanted<'_>,
    compute: &ComputeArguments,
    watch: &mut dyn Watch,
) -> tandem_train::Result<Option<Vec<CompletionText>>> {
    let context = positions_of(&weights.model, usize::MAX)?;
    if let Some((number, prompt)) = prompts.iter().enumerate().find(|(_, prompt)| prompt.len() >= context) {
        return Err(ModelError::Invalid(format!(
            "prompt {number} has {} tokens, which leaves no room in the model's context of {context} \
             (max_position_embeddings): shorten it",
            prompt.len()
        ))
        .into());
    }
    let length = |prompt: &Vec<u32>| prompt.len().saturating_add(wanted.max_new_tokens).min(context);
    let mut lengths: Vec<usize> = prompts.iter().map(length).collect();
    lengths.sort_unstable_by_key(|&length| std::cmp::Reverse(length));
    let positions = lengths.first().copied().unwrap_or(1);
    // The longest that may be in progress together.
    let cache_tokens = lengths.iter().take(MAX_BATCH).sum::<usize>().max(1);
    let room = GenerationLimits { positions, cache_tokens, max_batch: MAX_BATCH, log_probs: false };
    let model = Loaded::open(weights, tokenizer, room, compute)?;
    let (tokenizer, mut generator, mut source) = (model.tokenizer(), model.generator()?, model.source());
    let mut under_way = Vec::new();
    for (number, prompt) in prompts.into_iter().enumerate() {
        let max_new_tokens = wanted.max_new_tokens.min(context - prompt.len());
        let before = if wanted.continues { &prompt[..] } else { &[] };
        let text = TextStream::continuing(tokenizer, wanted.stop, before);
        let request = Request {
            prompt,
            number: number as u64,
            num_answers: 1,
            sampling: wanted.sampling,
            max_new_tokens,
            stop: tokenizer.eos_ids().to_vec(),
        };
        generator.submit(request).map_err(|error| match error {
            ModelError::Invalid(problem) => ModelError::Invalid(format!("prompt {number}: {problem}")),
            other => other,
        })?;
        under_way.push((text, CompletionText::default()));
    }
    let (mut failure, mut done) = (None, 0);
    while !generator.is_idle() {
        if watch.step(done) == Flow::End {
            return Ok(None);
        }
        // The generator is new, so request ids are prompt indices.
        let ended = generator.step(&mut source, &mut |new| {
            let (text, answered) = &mut under_way[new.request];
            match text.push(new.token) {
                Ok(piece) => answered.text += &piece,
                Err(error) => failure = Some(error),
            }
            if text.is_ended() || failure.is_some() { Flow::End } else { Flow::Continue }
        })?;
        if let Some(error) = failure {
            return Err(error.into());
        }
        for answer in ended {
            let (text, answered) = &mut under_way[answer.request];
            answered.text += &text.finish()?;
            answered.tokens = tokenizer.without_end(&answer.tokens).len();
            answered.is_ended = answer.finish == Finish::Stop;
            watch.finished(answer.request, answered);
            done += 1;
        }
    }
    watch.step(done);
    Ok(Some(under_way.into_iter().map(|(_, answered)| answered).collect()))
}
