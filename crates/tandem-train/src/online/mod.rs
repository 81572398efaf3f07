//! Online preference optimisation: prompts become answers, answers scores, scores pairs, which the
//! step then trains on.
//!
//! A *round* is the completions of one step or, with `online.steps_per_round`, of several, sampled
//! from the weights before its first step. Each rank generates its share (`generate`), rank 0 has
//! all of them judged (`judging`), and every rank gets completions and scores. Everything after
//! that is a function of these, the seed and the step (`pairs`).
//!
//! With `[online.server]`, rank 0 requests all completions from a server (`server`).
//!
//! With `[online.environment]`, completions are conversations of several turns, whose rewards an environment gives
//! instead of judges (`conversation`).
//!
//! With `online.overlap`, a round is generated and judged on background threads while the step
//! before it trains (`async_round`). It uses the weights before that step's update.

mod advantages;
pub(crate) mod answers;
pub(crate) mod async_round;
pub(crate) mod background_generator;
mod background_task;
pub(crate) mod conversation;
mod evaluation;
pub(crate) mod generate;
pub(crate) mod judging;
mod keepalive;
mod old_log_probs;
pub(crate) mod pairs;
mod render;
mod resample;
mod samples;
pub(crate) mod server;
pub(crate) mod sources;
mod summary;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tandem_comm::Phase;
use tandem_data::order::BatchSampler;
use tandem_judge::Environment;
use tandem_model::LayerExecutor;

pub use answers::{Answer, Batch, CompletedPrompt, OnlineState, Turn};
pub use async_round::{AsyncRound, GenerationBackend};
pub use background_generator::BackgroundGenerator;
pub use generate::Generation;
pub use pairs::Paired;
pub use server::Server;
pub use summary::Summary;

use crate::config::{Algorithm, Config, OnlineConfig};
use crate::draw::draw;
use crate::inputs::RunInputs;
use crate::metrics::{MetricsFile, Split};
use crate::parallel::DeviceMesh;
use crate::recipe::{MicroBatcher, ScoredPrompt};
use crate::step::TrainStep;
use crate::{Result, TrainError};
use advantages::Advantages;
use answers::{asked_of, fill};
use generate::{Asked, GenerationContext, GenerationRequest, LockstepGroup};
use judging::{JudgeRequest, Judging};
use render::SampleRenderer;
use sources::PolicyAndReference;

/// Stands for the choice between the policy's answer and the given one in its seed.
const OWN_ANSWER: u64 = 1 << 62;

/// Source of pairs of an online run.
pub struct Online {
    config: OnlineConfig,
    seed: u64,
    total_steps: u64,
    prepared: Arc<RunInputs>,
    answering: GenerationMode,
    judging: Judging,
    /// A round that is not judged yet.
    round: Option<RoundState>,
    /// Batch of the current step.
    current: Option<Batch>,
    state: OnlineState,
    samples: Option<MetricsFile>,
    /// Prompts that were trained on since this began.
    num_trained: usize,
    /// Prompts whose answers were unlike, but all cut and masked.
    num_masked: usize,
    took: RoundTimings,
}

/// Generation mode.
pub enum GenerationMode {
    /// This process, before it trains; each rank its share of the prompts.
    Before {
        /// The generation backend.
        generation: Box<Generation>,
        /// Ranks with gathered weights, which generate in lockstep.
        together: Option<LockstepGroup>,
        /// Environment of conversations, on rank 0 of a run with one.
        environment: Option<Box<Environment>>,
    },
    /// Background generation.
    Aside(AsyncRound),
}

/// A round on its way.
enum RoundState {
    Asked,
    Answered(Vec<Batch>),
}

/// Seconds that a step waited for generation and judges, and generated tokens over all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundTimings {
    /// Seconds of generating, or of waiting for answers.
    pub generate: f64,
    /// Seconds of waiting for judges.
    pub judge: f64,
    /// Tokens.
    pub tokens: usize,
}

/// Batch of a step.
pub struct TrainingBatch {
    /// Prompts of the step and replayed prompts; one whose answers exceed a micro-batch comes more than once, each time
    /// with other answers.
    pub ranked: Vec<ScoredPrompt>,
    /// Statistics of the step's own completions.
    pub summary: Summary,
}

impl Online {
    /// Creates it from `state`; only rank 0 has a samples file.
    ///
    /// # Panics
    /// The config is not of an online run.
    pub fn new(
        config: &Config,
        prepared: Arc<RunInputs>,
        answering: GenerationMode,
        judging: Judging,
        samples: Option<MetricsFile>,
        state: OnlineState,
        total_steps: u64,
    ) -> Self {
        Self {
            config: config.online.clone().expect("an online run"),
            seed: config.seed,
            total_steps,
            prepared,
            answering,
            judging,
            round: None,
            current: None,
            state,
            samples,
            num_trained: 0,
            num_masked: 0,
            took: RoundTimings::default(),
        }
    }

    /// Takes batches for the steps from `next` on that were answered and judged elsewhere.
    ///
    /// # Panics
    /// The batches are not the next steps' in order, or others exist.
    pub fn give(&mut self, batches: impl IntoIterator<Item = Batch>, next: u64) {
        assert!(self.state.pending.is_empty() && self.round.is_none(), "the next step has answers");
        self.state.pending.extend(batches);
        assert!(
            self.state.pending.iter().map(|batch| batch.step).eq((next..).take(self.state.pending.len()))
        );
    }

    /// Returns the batch of the 0-based step, or `None` if any rank was stopped first. Collective;
    /// every rank gets the same.
    ///
    /// With `online.overlap` the next round is being generated when this returns: the weights must
    /// not change before [`Online::answered`].
    ///
    /// # Errors
    /// Generation or a judge fails, or samples cannot be written.
    pub fn next(
        &mut self,
        step: u64,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        batches: &mut BatchSampler,
        batcher: &mut MicroBatcher,
        stop: &AtomicBool,
    ) -> Result<Option<TrainingBatch>> {
        self.commit();
        self.took = RoundTimings::default();
        if let Some(steps) = self.unanswered(step) {
            // Nothing is replaced or added in batches that were ready before.
            let later = std::mem::take(&mut self.state.pending);
            let made = self.make_round(steps, scorer, mesh, batches, batcher, stop);
            self.state.pending.extend(later);
            if !made? {
                return Ok(None);
            }
        }
        let batch = self.state.pending.pop_front().expect("a round has a batch");
        self.repeat(&batch);
        assert_eq!(batch.step, step, "batches are trained on in their order");
        if self.config.overlap
            && step + 1 < self.total_steps
            && let Some(steps) = self.unanswered(step + 1)
        {
            self.begin(steps, step, scorer, mesh, batches, stop)?;
        }
        let TrainingBatch { ranked, summary } = self.rank(&batch)?;
        self.current = Some(batch);
        Ok(Some(TrainingBatch { ranked: batcher.divide(ranked), summary }))
    }

    /// Returns the steps from the next one on that no batch waits for, if there are some. A run that was resumed with
    /// other rounds, or more steps, may have batches of later steps alone.
    fn unanswered(&self, next: u64) -> Option<Range<u64>> {
        let waiting = self.state.pending.front().map_or(u64::MAX, |batch| batch.step);
        (waiting != next).then_some(next..waiting)
    }

    /// Makes the batches of a round that begins with the first of these steps. False if any rank was stopped.
    fn make_round(
        &mut self,
        steps: Range<u64>,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        batches: &mut BatchSampler,
        batcher: &mut MicroBatcher,
        stop: &AtomicBool,
    ) -> Result<bool> {
        let step = steps.start;
        let is_begun = self.round.is_some() || self.begin(steps, step, scorer, mesh, batches, stop)?;
        if !is_begun || !self.answered(mesh, stop)? || !self.finish_pending(mesh, stop)? {
            return Ok(false);
        }
        if !self.replace_uniform(scorer, mesh, stop)? {
            return Ok(false);
        }
        self.add_old_log_probs(scorer, mesh, batcher)?;
        Ok(true)
    }

    /// Starts generating and judging the round of the first of these 0-based steps, with weights after
    /// `after` steps. Completions that wait for judges are only judged. False if any rank was
    /// stopped.
    fn begin(
        &mut self,
        steps: Range<u64>,
        after: u64,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        batches: &mut BatchSampler,
        stop: &AtomicBool,
    ) -> Result<bool> {
        let round = std::mem::take(&mut self.state.unjudged);
        if round.is_empty() {
            let every = self.config.steps_per_round;
            let next_round = (steps.start / every + 1) * every;
            let steps = steps.start..next_round.min(steps.end).min(self.total_steps);
            let mut batch = |step| {
                let prompt = |&row: &u32| CompletedPrompt { row, answers: Vec::new() };
                Batch {
                    step,
                    answered_after: after,
                    prompts: batches.rows(self.config.batch_of_step(step)).iter().map(prompt).collect(),
                    replaced: 0,
                }
            };
            return self.generate(steps.map(&mut batch).collect(), Split::Train, scorer, mesh, stop);
        }
        if round[0].answered_after == round[0].step {
            // Generated right before this step, which a stop then left out, and its line with it.
            // A round that overlapped the step before stands in the line of that one.
            self.took.tokens += num_tokens(&round);
        }
        self.judge(round, Split::Train)?;
        Ok(true)
    }

    /// Starts a step's answers again where later steps train on them too.
    fn repeat(&mut self, batch: &Batch) {
        let (every, times) = (self.config.steps_per_round, self.config.num_iterations());
        let (is_last, again) = ((batch.step / every) % times + 1 == times, batch.step + every);
        let is_given = self.state.pending.back().is_some_and(|last| last.step >= again);
        if !is_last && !is_given && again < self.total_steps {
            self.state.pending.push_back(Batch { step: again, ..batch.clone() });
        }
    }

    /// Starts generating and judging a round of a split. False if any rank was stopped.
    fn generate(
        &mut self,
        mut round: Vec<Batch>,
        split: Split,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
    ) -> Result<bool> {
        let num_answers =
            if split == Split::Train { self.config.num_answers } else { self.config.eval_answers };
        let asked = asked_of(&round, split, num_answers, |request| self.is_asked(request));
        if let GenerationMode::Aside(aside) = &mut self.answering {
            aside.begin(round, asked, self.judging.begin()?, scorer, mesh, &self.prepared)?;
            self.round = Some(RoundState::Asked);
            return Ok(true);
        }
        let began = Instant::now();
        let answers = self.answer(&asked, scorer, mesh, stop)?;
        self.took.generate += began.elapsed().as_secs_f64();
        let Some(answers) = answers else { return Ok(false) };
        fill(&mut round, &asked, answers);
        self.took.tokens += num_tokens(&round);
        self.judge(round, split)?;
        Ok(true)
    }

    /// Returns whether the policy answers a prompt; a distillation leaves others their given completions.
    fn is_asked(&self, request: &GenerationRequest) -> bool {
        let GenerationRequest { step, row } = *request;
        let share = self.config.algorithm.distill().map_or(1.0, |distill| distill.lmbda);
        // 53 bits are a number of [0, 1).
        let drawn = draw(&[self.seed, step, OWN_ANSWER, u64::from(row)]) >> 11;
        (drawn as f64) < share * (1u64 << 53) as f64
    }

    /// Has a round of a split judged.
    fn judge(&mut self, round: Vec<Batch>, split: Split) -> Result<()> {
        if let Some(judges) = self.judging.begin()? {
            let prompts = round.iter().flat_map(|batch| &batch.prompts);
            // A closed channel means the receiver failed and reports that itself.
            let _ = judges.send(JudgeRequest::new(
                prompts,
                &SampleRenderer::new(&self.prepared, split, &self.config.stop),
            )?);
        }
        self.round = Some(RoundState::Answered(round));
        Ok(())
    }

    /// This process's answers.
    fn answer(
        &mut self,
        asked: &Asked,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let GenerationMode::Before { generation, together, environment } = &mut self.answering else {
            unreachable!("others answer aside")
        };
        scorer.progress.begin_phase(Phase::Generate);
        scorer.placement.device.begin_phase("generate");
        scorer.placement.device.set_place(format_args!("generation"));
        let TrainStep { placement, decoder, dtype, checkpointing, policy, reference, progress, .. } = scorer;
        let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
        let (on, mut sources) = (
            GenerationContext { executor, inputs: &self.prepared, progress },
            PolicyAndReference::new(policy, reference),
        );
        let together = together.as_mut();
        if self.config.environment.is_some() {
            return generation.converse(
                environment.as_deref_mut(),
                &on,
                &mut sources,
                together,
                mesh,
                stop,
                asked,
            );
        }
        generation.answer(&on, &mut sources, together, mesh, stop, asked)
    }

    /// Waits for the round in progress, if any; afterwards no thread reads the weights. False if
    /// any rank was stopped: the current step is then skipped and the state before it is kept.
    pub fn answered(&mut self, mesh: &mut DeviceMesh, stop: &AtomicBool) -> Result<bool> {
        if let (Some(RoundState::Asked), GenerationMode::Aside(aside)) = (&self.round, &mut self.answering) {
            let began = Instant::now();
            let progress = mesh.world().progress();
            progress.begin_phase(Phase::Generate);
            let answered = aside.end(progress, stop)?;
            self.took.generate += began.elapsed().as_secs_f64();
            self.took.tokens += answered.as_deref().map_or(0, num_tokens);
            self.round = answered.map(RoundState::Answered);
            if self.round.is_none() {
                self.current.take().into_iter().for_each(|batch| self.state.pending.push_front(batch));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits for judging in progress. False if any rank was stopped before: unjudged completions
    /// are kept.
    pub fn finish_pending(&mut self, mesh: &mut DeviceMesh, stop: &AtomicBool) -> Result<bool> {
        self.commit();
        let Some(RoundState::Answered(mut round)) = self.round.take() else { return Ok(true) };
        let began = Instant::now();
        mesh.world().progress().begin_phase(Phase::Judge);
        let prompts = round.iter_mut().flat_map(|batch| &mut batch.prompts);
        let is_judged = self.judging.end(prompts, mesh.world(), stop)?;
        match is_judged {
            true => {
                let later = std::mem::replace(&mut self.state.pending, round.into());
                self.state.pending.extend(later);
            }
            false => self.state.unjudged = round,
        }
        self.took.judge += began.elapsed().as_secs_f64();
        Ok(is_judged)
    }

    /// Timings of the current step's round.
    pub fn took(&self) -> RoundTimings {
        self.took
    }

    /// Drains stderr lines of judges' commands.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.judging.lines()
    }

    /// Prompts that were trained on since this began.
    pub fn num_trained(&self) -> usize {
        self.num_trained
    }

    /// Prompts with better and worse answers since this began, none of them in the loss: all were cut.
    pub fn num_masked(&self) -> usize {
        self.num_masked
    }

    /// State for a checkpoint. No round may be in progress ([`Online::finish_pending`]).
    pub fn state(&self) -> &OnlineState {
        &self.state
    }

    /// The pairs of a prompt that a step trains on; none where it trains on every answer.
    fn pair(&self, step: u64, answered: &CompletedPrompt) -> Paired {
        if matches!(self.config.algorithm, Algorithm::Grpo(_) | Algorithm::Distill(_)) {
            return Paired::default();
        }
        Paired::new(answered, self.config.pairs, draw(&[self.seed, step, u64::from(answered.row)]))
    }

    /// Adds the last step's batch to the replay buffer.
    fn commit(&mut self) {
        let Some(Batch { step, prompts, .. }) = self.current.take() else { return };
        if self.config.replay_size == 0 {
            return;
        }
        for answered in prompts {
            if !self.pair(step, &answered).pairs.is_empty() {
                self.state.replay.push_back(answered);
            }
        }
        let excess = self.state.replay.len().saturating_sub(self.config.replay_size);
        self.state.replay.drain(..excess);
    }

    /// Returns the file of samples, on rank 0.
    pub(crate) fn samples_file(&mut self) -> Option<&mut MetricsFile> {
        self.samples.as_mut()
    }

    /// The pairs of a batch, with earlier prompts that join; writes samples.
    fn rank(&mut self, batch: &Batch) -> Result<TrainingBatch> {
        let OnlineConfig { replay_per_step, samples_every, .. } = self.config;
        let prepared = &*self.prepared;
        let make = |answered: &CompletedPrompt| self.pair(batch.step, answered);
        let rank = |answered: &CompletedPrompt, paired: &Paired| {
            let prompt = prepared.train.prompt_tokens(answered.row as usize);
            match self.config.algorithm {
                Algorithm::Dpo => paired.rank(answered, prompt, answered.answers.len()),
                Algorithm::Xpo { .. } => paired.rank(answered, prompt, 1),
                Algorithm::NashMd { .. } => ScoredPrompt::for_nash(answered, prompt),
                Algorithm::Grpo(_) => unreachable!("groups are compared within a batch"),
                Algorithm::Distill(_) if answered.answers.is_empty() => {
                    ScoredPrompt::given(&prepared.train, answered.row)
                }
                Algorithm::Distill(_) => ScoredPrompt::own(answered, prompt),
            }
        };
        let grpo = self.config.algorithm.grpo();
        let compared = grpo.map(|grpo| Advantages::new(&batch.prompts, grpo, self.config.max_new_tokens));
        let paired: Vec<Paired> = batch.prompts.iter().map(make).collect();
        let names = self.judging.names();
        let mut summary = Summary::new(batch, &paired, names);
        if self.config.algorithm.distill().is_some() {
            summary.add_own_answers(batch);
        }
        let mut ranked: Vec<ScoredPrompt> = match (grpo, &compared) {
            (Some(grpo), Some(compared)) => {
                summary.add_groups(batch, compared, grpo);
                let prompt = |answered: &CompletedPrompt| prepared.train.prompt_tokens(answered.row as usize);
                compared.train_on(
                    batch,
                    grpo,
                    self.config.server.as_ref().map(|server| server.importance_sampling),
                    prompt,
                )
            }
            _ => batch.prompts.iter().zip(&paired).map(|(answered, paired)| rank(answered, paired)).collect(),
        };
        for index in drawn(self.state.replay.len(), replay_per_step, draw(&[self.seed, batch.step])) {
            let earlier = &self.state.replay[index];
            // A random pair of this step may be a tie.
            let again = rank(earlier, &make(earlier));
            summary.add_replayed(usize::from(again.weight() > 0));
            ranked.push(again);
        }
        ranked.retain(|ranked| ranked.weight() > 0);
        match (grpo, &compared) {
            (Some(grpo), Some(compared)) => {
                // A group with equal rewards teaches nothing, nor does one of which no answer is in the loss.
                let groups = batch.prompts.iter().zip(&compared.is_uniform);
                for (prompt, _) in groups.filter(|(_, is_uniform)| !**is_uniform) {
                    match prompt.answers.iter().all(|answer| grpo.is_masked(answer.is_ended)) {
                        true => self.num_masked += 1,
                        false => self.num_trained += 1,
                    }
                }
            }
            _ => self.num_trained += ranked.len(),
        }
        let step = batch.step + 1;
        if let Some(file) = &mut self.samples
            && samples_every.is_some_and(|every| step.is_multiple_of(every) || step == 1)
        {
            let has_pairs = self.config.algorithm.distill().is_none();
            for line in samples::lines(
                step,
                batch,
                has_pairs.then_some(&paired[..]),
                compared.as_ref(),
                names,
                &SampleRenderer::new(prepared, Split::Train, &self.config.stop),
            )? {
                file.write_line(&line)?;
            }
        }
        Ok(TrainingBatch { ranked, summary })
    }
}

/// Refuses completions of a checkpoint that were generated under settings with which the run could not train on them.
///
/// # Errors
/// One is longer than a completion may be, or one of Nash-MD's two is missing.
pub fn check_state(state: &OnlineState, config: &OnlineConfig) -> Result<()> {
    let refused = |key: &str, found: String| {
        let reason = format!(
            "online.{key}: {found} completions that the checkpoint keeps for coming steps; resume with the value that the \
             run had, or start anew with --overwrite"
        );
        Err(TrainError::Mismatch { reason })
    };
    let rounds = state.pending.iter().chain(&state.unjudged).flat_map(|batch| &batch.prompts);
    for prompt in rounds.chain(&state.replay) {
        let longest = prompt.answers.iter().map(|answer| answer.tokens.len()).max().unwrap_or(0);
        if longest > config.max_new_tokens && config.environment.is_none() {
            let limit = config.max_new_tokens;
            return refused("max_new_tokens", format!("{limit} is less than the {longest} tokens of"));
        }
        if matches!(config.algorithm, Algorithm::NashMd { .. }) && prompt.answers.len() != 2 {
            let count = prompt.answers.len();
            return refused(
                "algorithm",
                format!("\"nash_md\" compares two, and there are prompts with {count}"),
            );
        }
    }
    Ok(())
}

/// Sampled tokens of a round.
fn num_tokens(round: &[Batch]) -> usize {
    let prompts = round.iter().flat_map(|batch| &batch.prompts);
    prompts.flat_map(|answered| &answered.answers).map(Answer::num_sampled).sum()
}

/// Samples distinct numbers below `among`, sorted; all of them if too few.
fn drawn(among: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut all: Vec<usize> = (0..among).collect();
    let count = count.min(among);
    for i in 0..count {
        let other = i + (draw(&[seed, i as u64]) % (among - i) as u64) as usize;
        all.swap(i, other);
    }
    all.truncate(count);
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::drawn;

    #[test]
    fn what_is_drawn_is_different_and_there() {
        for seed in 0..50 {
            let some = drawn(7, 3, seed);
            assert!(some.len() == 3 && some.is_sorted_by(|a, b| a < b) && some[2] < 7, "{some:?}");
        }
        assert_eq!(drawn(3, 9, 1), [0, 1, 2]);
        assert_eq!(drawn(0, 2, 1), [] as [usize; 0]);
        let first: Vec<_> = (0..40).map(|seed| drawn(4, 1, seed)[0]).collect();
        assert!((0..4).all(|n| first.contains(&n)), "{first:?}");
    }
}
