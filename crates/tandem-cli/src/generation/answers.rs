//! The answers to many prompts, all at once.

use tandem_data::text_stream::TextStream;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::decode::{Finish, Flow};
use tandem_model::{ModelError, Request, Sampling};

use super::{Loaded, Room};
use crate::args::{ComputeArguments, WeightArguments};

/// Answers under way at once, at most; it bounds the memory of the cache.
const MAX_BATCH: usize = 64;

/// What is wanted of answers.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
    /// Strings that end one.
    pub stop: &'a [String],
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answered {
    /// Its text.
    pub text: String,
    /// How many tokens it has, without the stop token.
    pub tokens: usize,
    /// Whether it ended by itself, not by the limit of length.
    pub is_ended: bool,
}

/// An answer to each prompt. The model is in memory only meanwhile. `watch` is told after each token how many answers are done; if
/// it says so, they end there, and there are none.
///
/// # Errors
/// If the model or its adapter cannot be read, a prompt does not fit, or the device is not there or too small.
pub fn all(
    weights: &WeightArguments,
    tokenizer: Tokenizer,
    prompts: Vec<Vec<u32>>,
    wanted: &Wanted<'_>,
    compute: &ComputeArguments,
    watch: &mut dyn FnMut(usize) -> Flow,
) -> tandem_train::Result<Option<Vec<Answered>>> {
    let positions = prompts.iter().map(Vec::len).max().unwrap_or_default() + wanted.max_new_tokens;
    let cache_tokens = positions * prompts.len().clamp(1, MAX_BATCH);
    let room = Room { positions, cache_tokens, max_batch: MAX_BATCH, log_probs: false };
    let model = Loaded::open(weights, tokenizer, room, compute)?;
    let (tokenizer, mut generator, mut source) = (model.tokenizer(), model.generator()?, model.source());
    let mut under_way = Vec::new();
    for (number, prompt) in prompts.into_iter().enumerate() {
        let request = Request {
            prompt,
            number: number as u64,
            num_answers: 1,
            sampling: wanted.sampling,
            max_new_tokens: wanted.max_new_tokens,
            stop: tokenizer.eos_ids().to_vec(),
        };
        generator.submit(request).map_err(|error| match error {
            ModelError::Invalid(problem) => ModelError::Invalid(format!("prompt {number}: {problem}")),
            other => other,
        })?;
        under_way.push((TextStream::new(tokenizer, wanted.stop), Answered::default()));
    }
    let (mut failure, mut done) = (None, 0);
    while !generator.is_idle() {
        if watch(done) == Flow::End {
            return Ok(None);
        }
        // Requests have the numbers of their prompts: the generator is new.
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
            done += 1;
        }
    }
    watch(done);
    Ok(Some(under_way.into_iter().map(|(_, answered)| answered).collect()))
}
