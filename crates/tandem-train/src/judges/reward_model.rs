//! Scoring texts with a reward model: a folder's weights, frozen, and one number for each text.

use std::path::Path;
use std::sync::Arc;

use tandem_data::forest::ForestBuilder;
use tandem_kernels::ops::{HeadScores, MANY_TREES};
use tandem_kernels::{DType, Device, Format};
use tandem_model::{Checkpointing, Decoder, LayerExecutor, ModelFolder};

use crate::weights::FrozenWeights;
use crate::weights::initial_weights::InitialWeights;
use crate::{Result, TrainError};

/// Texts that begin alike: their common beginning is computed once.
#[derive(Clone, Copy, Debug)]
pub struct Answers<'a> {
    /// Common prefix; may be empty.
    pub prompt: &'a [u32],
    /// Continuations.
    pub answers: &'a [&'a [u32]],
}

/// A reward model, ready to score.
pub struct RewardModel {
    device: Device,
    decoder: Arc<Decoder>,
    dtype: DType,
    weights: FrozenWeights,
    builder: ForestBuilder,
    scores: HeadScores,
}

impl RewardModel {
    /// Loads a `transformers` sequence classifier with one label, for texts of up to `max_length`
    /// tokens. Block matrices are stored in `format`; `dtype` is the compute type; the score is
    /// f32.
    pub fn open(
        folder: &Path,
        device: &Device,
        format: Format,
        dtype: DType,
        max_length: usize,
    ) -> Result<Self> {
        // A folder without a score head is refused, not initialised.
        let folder = ModelFolder::open_reward(folder, 0)?;
        if folder.begins_score_head() {
            let reason = format!(
                "{} is a language model, which has no head that scores texts; take a reward model, as method = \"reward\" trains it",
                folder.path().display()
            );
            return Err(TrainError::Mismatch { reason });
        }
        let decoder = Decoder::new(folder.spec().clone(), max_length)?;
        let decoder = Arc::new(decoder.alone_on(device.backend()));
        let start = match device.is_meta() {
            true => InitialWeights::dry(folder.quantised()),
            false => InitialWeights::from_folder(&folder, &decoder)?,
        };
        let weights = start.resident(&decoder, device, format, dtype)?;
        let (builder, scores) = (ForestBuilder::default(), HeadScores::default());
        Ok(Self { device: device.clone(), decoder, dtype, weights, builder, scores })
    }

    /// Dry run of scoring texts of `tokens` tokens in total, or of the longest one.
    pub fn dry_run(&mut self, tokens: usize) -> Result<()> {
        let longest = self.decoder.positions();
        let tokens = tokens.max(longest);
        let any = u32::from(self.decoder.spec().head.pad() == Some(0));
        let few = tokens.div_ceil(longest)..=MANY_TREES.min(tokens);
        for count in few.chain([tokens]) {
            let text = vec![any; tokens.div_ceil(count).min(longest)];
            let answers = [&text[..]];
            self.score(&vec![Answers { prompt: &[], answers: &answers }; count])?;
        }
        Ok(())
    }

    /// The score of each text, group by group: of its last token that is not padding. They go
    /// through the model together, so how many come at once decides how much memory that takes.
    ///
    /// # Errors
    /// A text is empty or too long, a token is outside the vocabulary, or memory runs out.
    pub fn score(&mut self, groups: &[Answers]) -> Result<Vec<f32>> {
        let (longest, pad) = (self.decoder.positions(), self.decoder.spec().head.pad());
        for (index, Answers { prompt, answers }) in groups.iter().enumerate() {
            let lengths = answers.iter().map(|answer| prompt.len() + answer.len());
            if let Some(length) = lengths.into_iter().find(|length| !(1..=longest).contains(length)) {
                let reason = format!("a text of group {index} has {length} tokens, expected 1 to {longest}");
                return Err(TrainError::Mismatch { reason });
            }
        }
        // A text is scored as alone: where its rotation depends on its length, others share none of it.
        let at_once = if self.decoder.rotates_by_length() { 1 } else { usize::MAX };
        for Answers { prompt, answers } in groups {
            answers.chunks(at_once).for_each(|answers| self.builder.push_ends(prompt, answers, pad));
        }
        if self.builder.num_sequences() == 0 {
            return Ok(Vec::new());
        }
        let forest = self.builder.finish()?;
        let executor = LayerExecutor::new(&self.decoder, &self.device, self.dtype, Checkpointing::None);
        executor.forward(&mut self.weights, &forest, &mut self.scores)?;
        let mut scores = vec![0.0; forest.num_sequences as usize];
        for (prediction, &score) in forest.predictions.iter().zip(&self.scores.log_prob) {
            scores[prediction.sequence as usize] = score;
        }
        Ok(scores)
    }
}
