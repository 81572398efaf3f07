//! Ranks that generate side by side over weights that all of them have to fetch together.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use tandem_kernels::{DType, Device};
use tandem_model::decode::{Answer, Flow, Lockstep};
use tandem_model::{
    Checkpointing, Generator, GeneratorOptions, LayerExecutor, LayerId, LayerWeights, ModelError, Request,
    ResidentWeights, Result, Sampling, WeightSource,
};

use super::{OPTIONS, requests, sampling};
use crate::support::table::on_ranks;
use crate::support::{Golden, all, cpu};

/// Meeting of ranks, as threads: each says its next action, and none continues before all have.
pub struct Meeting {
    ranks: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Default)]
struct Round {
    number: usize,
    put: Vec<String>,
    last: Vec<String>,
}

impl Meeting {
    pub fn new(ranks: usize) -> Self {
        Self { ranks, round: Mutex::default(), changed: Condvar::new() }
    }

    /// Actions of all ranks. A rank that comes alone fails after a while.
    fn put(&self, what: String) -> Result<Vec<String>> {
        let mut round = self.round.lock().unwrap();
        let number = round.number;
        round.put.push(what.clone());
        if round.put.len() == self.ranks {
            round.last = std::mem::take(&mut round.put);
            round.number += 1;
            self.changed.notify_all();
        }
        let limit = Duration::from_secs(300);
        let (round, waited) =
            self.changed.wait_timeout_while(round, limit, |round| round.number == number).unwrap();
        if waited.timed_out() {
            return Err(ModelError::store(format!("only {:?} came to {what}", round.put)));
        }
        Ok(round.last.clone())
    }

    /// All ranks do the same.
    fn same(&self, what: String) -> Result<()> {
        let all = self.put(what)?;
        if all.iter().all(|other| *other == all[0]) {
            return Ok(());
        }
        Err(ModelError::store(format!("ranks do different things: {all:?}")))
    }
}

/// Weights that no rank gets before all have asked for the same layer.
pub struct Gathered<'a> {
    pub weights: ResidentWeights<'a>,
    pub meeting: &'a Meeting,
    pub fetched: usize,
}

impl WeightSource for Gathered<'_> {
    fn prefetch(&mut self, layer: LayerId) -> Result<()> {
        self.meeting.same(format!("prefetch the {layer}"))
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.fetched += 1;
        self.meeting.same(format!("fetch the {layer}"))?;
        self.weights.fetch(layer)
    }

    fn release(&mut self, _: LayerId) {}
}

pub struct Rank<'a>(pub &'a Meeting);

impl Lockstep for Rank<'_> {
    fn any(&mut self, mine: bool) -> Result<bool> {
        let all = self.0.put(mine.to_string())?;
        assert!(all.iter().all(|one| ["true", "false"].contains(&&one[..])), "ranks are elsewhere: {all:?}");
        Ok(all.iter().any(|one| one == "true"))
    }
}

/// Seven prompts of 1 to 7 tokens, two answers to each, of 1 to 7 tokens.
fn seven(golden: &Golden) -> Vec<Request> {
    let prompts = (1..=7).map(|len| golden.prompt[..len].to_vec()).collect();
    let mut requests = requests(prompts, sampling());
    for (request, tokens) in requests.iter_mut().zip([3, 7, 1, 5, 2, 6, 4]) {
        (request.num_answers, request.max_new_tokens) = (2, tokens);
    }
    requests
}

/// The answers to all requests, of which each rank answers as many as `dealt` says, and the layers that were fetched.
fn generate(golden: &Golden, options: &GeneratorOptions, dealt: &[usize]) -> (Vec<Answer>, usize) {
    let meeting = Meeting::new(dealt.len());
    let mut requests = seven(golden).into_iter();
    let shares: Vec<Vec<Request>> =
        dealt.iter().map(|&count| requests.by_ref().take(count).collect()).collect();
    let meeting = &meeting;
    let rank = |share: Vec<Request>| {
        let device = Device::cpu(1, 64 << 20).unwrap();
        let weights = golden.load(&device);
        let weights = ResidentWeights::new(&golden.decoder, &weights, None);
        let mut source = Gathered { weights, meeting, fetched: 0 };
        let mut generator = Generator::new(&golden.decoder, &device, DType::F32, options.clone()).unwrap();
        let answers =
            generator.generate_with(&mut source, &mut Rank(meeting), share, &mut |_| Flow::Continue).unwrap();
        (answers, source.fetched)
    };
    let found = on_ranks(shares, rank);
    let (mut answers, fetched) = (Vec::new(), found[0].1);
    for (&count, (own, their_fetched)) in dealt.iter().zip(found) {
        assert_eq!((own.len(), their_fetched), (2 * count, fetched));
        let first = answers.len() / 2;
        answers.extend(own.into_iter().map(|answer| Answer { request: first + answer.request, ..answer }));
    }
    (answers, fetched)
}

#[test]
fn uneven_ranks_give_the_answers_of_one() {
    for name in ["llama", "llama-tied", "gpt2"] {
        let golden = Golden::new(name);
        let free = GeneratorOptions { log_probs: true, ..OPTIONS };
        // In cramped ones prompts that are kept lie in the way of others, and steps pass in which a rank computes nothing.
        let cramped = GeneratorOptions { max_batch: 3, cache_tokens: 16, prefill_tokens: 4, ..free.clone() };
        let (alone, _) = generate(&golden, &free, &[7]);
        assert_eq!(alone.len(), 14);
        for dealt in [&[7, 0][..], &[0, 7], &[4, 3], &[1, 0, 6]] {
            for options in [&free, &cramped] {
                let (found, _) = generate(&golden, options, dealt);
                assert_eq!(found, alone, "{name}, {dealt:?}");
            }
        }
    }
}

#[test]
fn ranks_walk_no_more_than_the_longest_of_them() {
    let golden = Golden::new("llama");
    let (_, alone) = generate(&golden, &OPTIONS, &[7]);
    let (_, beside_none) = generate(&golden, &OPTIONS, &[7, 0]);
    assert_eq!(beside_none, alone);
}

#[test]
fn nobody_walks_where_nobody_has_something() {
    let golden = Golden::new("llama");
    let (answers, fetched) = generate(&golden, &OPTIONS, &[0, 0]);
    assert_eq!((answers, fetched), (Vec::new(), 0));
}

/// Writes down what a walk asks for.
struct Recorder<'a> {
    weights: ResidentWeights<'a>,
    calls: Vec<(&'static str, LayerId)>,
}

impl WeightSource for Recorder<'_> {
    fn prefetch(&mut self, layer: LayerId) -> Result<()> {
        self.calls.push(("prefetch", layer));
        self.weights.prefetch(layer)
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.calls.push(("fetch", layer));
        self.weights.fetch(layer)
    }

    fn release(&mut self, layer: LayerId) {
        self.calls.push(("release", layer));
    }
}

#[test]
fn a_walk_of_generation_asks_for_what_an_idle_one_does() {
    for &name in all() {
        let (golden, device) = (Golden::new(name), cpu());
        let (decoder, weights) = (&golden.decoder, golden.load(&device));
        let record = |run: &mut dyn FnMut(&mut Recorder)| {
            let weights = ResidentWeights::new(decoder, &weights, None);
            let mut recorder = Recorder { weights, calls: Vec::new() };
            run(&mut recorder);
            recorder.calls
        };
        let walk = LayerExecutor::new(decoder, &device, DType::F32, Checkpointing::None);
        let idle = record(&mut |recorder| walk.idle_forward(recorder).unwrap());
        for tokens in [1, 2] {
            let found = record(&mut |recorder| {
                let mut generator = Generator::new(decoder, &device, DType::F32, OPTIONS).unwrap();
                let mut requests = requests(vec![golden.prompt.clone()], Sampling::GREEDY);
                requests[0].max_new_tokens = tokens;
                generator.generate(recorder, requests, &mut |_| Flow::Continue).unwrap();
            });
            assert_eq!(found, idle.repeat(tokens), "{name}");
        }
    }
}

/// Loses the others at the `left`-th meeting from now.
struct Lost {
    left: usize,
}

impl Lockstep for Lost {
    fn any(&mut self, mine: bool) -> Result<bool> {
        self.left = self.left.checked_sub(1).ok_or_else(|| ModelError::store("a rank is lost"))?;
        Ok(mine)
    }
}

#[test]
fn a_lost_rank_ends_generation_and_leaves_nothing_under_way() {
    let (golden, device) = (Golden::new("llama"), cpu());
    let weights = golden.load(&device);
    let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
    let mut generator = Generator::new(&golden.decoder, &device, DType::F32, OPTIONS).unwrap();
    let whole = generator.generate(&mut source, seven(&golden), &mut |_| Flow::Continue).unwrap();
    for left in 0..7 {
        let result =
            generator.generate_with(&mut source, &mut Lost { left }, seven(&golden), &mut |_| Flow::Continue);
        assert_eq!(result.unwrap_err().to_string(), "a rank is lost");
        assert!(generator.is_idle());
        let again = generator.generate(&mut source, seven(&golden), &mut |_| Flow::Continue).unwrap();
        assert_eq!(again, whole);
    }
}
