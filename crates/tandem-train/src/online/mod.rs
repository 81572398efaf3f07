//! Online preference optimisation: prompts become answers, answers scores, scores pairs, which the step then trains on.
//!
//! A *round* is the answers of one step or, with `online.steps_per_round`, of several, given by the weights before the first of
//! them. Each rank answers its share of the prompts ([`generate`]), the first has all of them judged ([`judging`]), and every rank
//! knows the answers with their scores. From there on everything is a function of these, of the seed and of the step ([`pairs`]).
//!
//! With `[online.server]` the first rank has a server answer all of them instead ([`server`]).
//!
//! With `online.overlap` a round is answered a step early, and judged while that step trains.

pub mod answers;
pub mod generate;
pub mod judging;
pub mod pairs;
mod samples;
pub mod server;
mod shown;
pub mod sources;
mod summary;

use std::time::Instant;

use tandem_comm::Phase;
use tandem_data::order::Batches;
use tandem_model::Walk;
use tandem_model::decode::{Alone, Meet};

pub use answers::{Answer, Answered, Batch, OnlineState};
pub use generate::Generation;
pub use pairs::{Paired, Ranked};
pub use server::Server;
pub use summary::Summary;

use crate::Result;
use crate::config::{Algorithm, Config, OnlineConfig};
use crate::draw::draw;
use crate::mesh::Mesh;
use crate::metrics::MetricsFile;
use crate::prepare::Prepared;
use crate::step::Scorer;
use generate::{Asked, On, Together, exchange, share_of};
use judging::Judging;
use shown::Shown;
use sources::Both;

/// Where an online run's pairs come from.
pub struct Online {
    config: OnlineConfig,
    seed: u64,
    total_steps: u64,
    answering: Answering,
    judging: Judging,
    /// A round that is being judged.
    round: Option<Vec<Batch>>,
    state: OnlineState,
    samples: Option<MetricsFile>,
    /// Prompts that were trained on since this began.
    num_trained: usize,
    /// Of the round that was brought for the next step.
    seconds: Seconds,
}

/// Who answers.
pub enum Answering {
    /// This process; each rank its share of the prompts.
    Own {
        /// How.
        generation: Generation,
        /// Those whose weights are gathered from all of them, so that they generate in step.
        together: Option<Together>,
    },
    /// A server.
    Server(Server),
}

/// What a round took.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds {
    generate: f64,
    judge: f64,
    tokens: usize,
}

/// What a step trains on.
pub struct Ready {
    /// Its prompts, and those that join from earlier steps.
    pub ranked: Vec<Ranked>,
    /// What its own answers come to.
    pub summary: Summary,
    /// Seconds that it took to generate and to wait for judges, and tokens that were generated on all ranks.
    pub took: (f64, f64, usize),
}

impl Online {
    /// A run's, as it goes on from `state`; the file for samples is the first rank's.
    ///
    /// # Panics
    /// If the config is no online run's.
    pub fn new(
        config: &Config,
        answering: Answering,
        judging: Judging,
        samples: Option<MetricsFile>,
        state: OnlineState,
        total_steps: u64,
    ) -> Self {
        Self {
            config: config.online.clone().expect("an online run"),
            seed: config.seed,
            total_steps,
            answering,
            judging,
            round: None,
            state,
            samples,
            num_trained: 0,
            seconds: Seconds::default(),
        }
    }

    /// Takes batches for the steps from `next` on that were answered and judged elsewhere.
    ///
    /// # Panics
    /// If they are not the next steps', in their order, or there are others.
    pub fn give(&mut self, batches: impl IntoIterator<Item = Batch>, next: u64) {
        assert!(self.state.pending.is_empty() && self.round.is_none(), "the next step has answers");
        self.state.pending.extend(batches);
        assert!(
            self.state.pending.iter().map(|batch| batch.step).eq((next..).take(self.state.pending.len()))
        );
    }

    /// What the 0-based step trains on. Every rank calls this, and gets the same.
    ///
    /// # Errors
    /// If generating fails, a judge cannot go on, samples cannot be written, or a rank is lost.
    pub fn next(
        &mut self,
        step: u64,
        scorer: &mut Scorer,
        mesh: &mut Mesh,
        prepared: &Prepared,
        batches: &mut Batches,
    ) -> Result<Ready> {
        self.seconds = Seconds::default();
        if self.state.pending.is_empty() {
            if self.round.is_none() {
                self.begin(step, step, scorer, mesh, prepared, batches)?;
            }
            self.settle(mesh)?;
        }
        let batch = self.state.pending.pop_front().expect("a round has a batch");
        assert_eq!(batch.step, step, "batches are trained on in their order");
        if self.config.overlap && self.state.pending.is_empty() && step + 1 < self.total_steps {
            self.begin(step + 1, step, scorer, mesh, prepared, batches)?;
        }
        self.rank(batch, prepared)
    }

    /// Answers a round that begins with the 0-based step `first`, by weights that have taken `after` steps, and has the judges begin.
    fn begin(
        &mut self,
        first: u64,
        after: u64,
        scorer: &mut Scorer,
        mesh: &mut Mesh,
        prepared: &Prepared,
        batches: &mut Batches,
    ) -> Result<()> {
        let began = Instant::now();
        let steps = first..(first + self.config.steps_per_round).min(self.total_steps);
        let mut asked = Vec::new();
        let mut counts = Vec::new();
        for step in steps.clone() {
            let rows = batches.rows(step);
            counts.push(rows.len());
            asked.extend(rows.iter().map(|&row| Asked { step, row }));
        }
        scorer.progress.enter(Phase::Generate);
        scorer.homes.device.enter("generate");
        scorer.homes.device.note(format_args!("generation"));
        let answers = self.answer(&asked, after, scorer, mesh, prepared)?;
        let tokens = answers.iter().flatten().map(|answer| answer.tokens.len()).sum::<usize>();
        let mut answered =
            asked.iter().zip(answers).map(|(asked, answers)| Answered { row: asked.row, answers });
        let round: Vec<Batch> = steps
            .zip(counts)
            .map(|(step, count)| Batch {
                step,
                answered_after: after,
                prompts: answered.by_ref().take(count).collect(),
            })
            .collect();
        self.seconds.generate += began.elapsed().as_secs_f64();
        self.seconds.tokens += tokens;
        let prompts = round.iter().flat_map(|batch| &batch.prompts);
        self.judging.begin(prompts, &shown(&self.config, prepared))?;
        self.round = Some(round);
        Ok(())
    }

    /// The answers to prompts, by weights that have taken `after` steps.
    fn answer(
        &mut self,
        asked: &[Asked],
        after: u64,
        scorer: &mut Scorer,
        mesh: &mut Mesh,
        prepared: &Prepared,
    ) -> Result<Vec<Vec<Answer>>> {
        let (generation, together) = match &mut self.answering {
            Answering::Server(server) => return server.answer(asked, after, scorer, mesh, prepared),
            Answering::Own { generation, together } => (generation, together),
        };
        let Scorer { homes, decoder, dtype, checkpointing, policy, reference, progress, .. } = scorer;
        let meet: &mut dyn Meet = match together {
            Some(together) => together,
            None => &mut Alone,
        };
        let data = mesh.data();
        let mine = &asked[share_of(asked.len(), data.rank(), data.size())];
        let walk = Walk::new(decoder, &homes.device, *dtype, *checkpointing);
        let walk = Walk { split: mesh.split(), ..walk };
        let on = On { walk, prompts: &prepared.train, tokenizer: &prepared.tokenizer, progress };
        let own = generation.answer(&on, &mut Both::of(policy, reference), meet, mine)?;
        exchange(own, asked.len(), self.config.num_answers, mesh.data())
    }

    /// Waits until what is being judged is judged: then nothing is under way.
    ///
    /// # Errors
    /// If a judge cannot go on, or a rank is lost.
    pub fn settle(&mut self, mesh: &mut Mesh) -> Result<()> {
        let Some(mut round) = self.round.take() else { return Ok(()) };
        let began = Instant::now();
        mesh.world().progress().enter(Phase::Judge);
        let counts: Vec<usize> = round.iter().map(|batch| batch.prompts.len()).collect();
        let mut prompts: Vec<Answered> =
            round.iter_mut().flat_map(|batch| std::mem::take(&mut batch.prompts)).collect();
        self.judging.end(&mut prompts, mesh.world())?;
        let mut prompts = prompts.into_iter();
        for (batch, count) in round.iter_mut().zip(counts) {
            batch.prompts = prompts.by_ref().take(count).collect();
        }
        self.state.pending.extend(round);
        self.seconds.judge += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// What judges' commands have written to stderr since this was called.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.judging.lines()
    }

    /// Prompts that were trained on since this began.
    pub fn num_trained(&self) -> usize {
        self.num_trained
    }

    /// What a checkpoint keeps. Nothing may be under way ([`Online::settle`]).
    pub fn state(&self) -> &OnlineState {
        &self.state
    }

    /// Makes pairs of a batch, lets earlier prompts join, and writes samples.
    fn rank(&mut self, batch: Batch, prepared: &Prepared) -> Result<Ready> {
        let OnlineConfig { pairs, replay_size, replay_per_step, samples_every, .. } = self.config;
        let seed = |answered: &Answered| draw(&[self.seed, batch.step, u64::from(answered.row)]);
        let make = |answered: &Answered| Paired::of(answered, pairs, seed(answered));
        let rank = |answered: &Answered, paired: &Paired| {
            let prompt = prepared.train.prompt(answered.row as usize).0;
            match self.config.algorithm {
                Algorithm::Dpo => paired.rank(answered, prompt, answered.answers.len()),
                Algorithm::Xpo { .. } => paired.rank(answered, prompt, 1),
                Algorithm::NashMd { .. } => Ranked::of_nash(answered, prompt),
            }
        };
        let paired: Vec<Paired> = batch.prompts.iter().map(make).collect();
        let names = self.judging.names();
        let mut summary = Summary::of(&batch, &paired, names);
        let mut ranked: Vec<Ranked> =
            batch.prompts.iter().zip(&paired).map(|(answered, paired)| rank(answered, paired)).collect();
        for index in drawn(self.state.replay.len(), replay_per_step, draw(&[self.seed, batch.step])) {
            let earlier = &self.state.replay[index];
            ranked.push(rank(earlier, &make(earlier)));
            summary.add_replayed(1);
        }
        ranked.retain(|ranked| ranked.weight() > 0);
        self.num_trained += ranked.len();
        let step = batch.step + 1;
        if let Some(file) = &mut self.samples
            && samples_every.is_some_and(|every| step.is_multiple_of(every) || step == 1)
        {
            for line in samples::lines(step, &batch, &paired, names, &shown(&self.config, prepared))? {
                file.write_line(&line)?;
            }
        }
        if replay_size > 0 {
            let with_pairs =
                batch.prompts.into_iter().zip(&paired).filter(|(_, paired)| !paired.pairs.is_empty());
            self.state.replay.extend(with_pairs.map(|(answered, _)| answered));
            let excess = self.state.replay.len().saturating_sub(replay_size);
            self.state.replay.drain(..excess);
        }
        let Seconds { generate, judge, tokens } = self.seconds;
        Ok(Ready { ranked, summary, took: (generate, judge, tokens) })
    }
}

fn shown<'a>(config: &'a OnlineConfig, prepared: &'a Prepared) -> Shown<'a> {
    Shown { prompts: &prepared.train, tokenizer: &prepared.tokenizer, stop: &config.stop }
}

/// So many different numbers below `among`, or all of them, in order.
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
