//! Text that is drawn from two models at once.

use tandem_kernels::{DType, Device, Forest, ops};
use tandem_model::decode::{Answer, Flow, SingleRank, Sources};
use tandem_model::{
    Adapter, AdapterKind, Checkpointing, Decoder, FlatWeights, Generator, GeneratorOptions, LayerExecutor,
    Request, ResidentWeights, Result, Sampling, Targets, WeightSource,
};

use super::ranks::{Gathered, Meeting, Rank};
use super::{OPTIONS, prompts, requests, sampling, training_log_probs};
use crate::support::adapted::{Adapted, adapter_weights, config};
use crate::support::{Golden, cpu};

const LOG_PROBS: GeneratorOptions = GeneratorOptions { log_probs: true, ..OPTIONS };

/// Two sources.
pub struct Two<P, R>(pub P, pub R);

impl<P: WeightSource, R: WeightSource> Sources for Two<P, R> {
    fn policy(&mut self) -> &mut dyn WeightSource {
        &mut self.0
    }

    fn reference(&mut self) -> Option<&mut dyn WeightSource> {
        Some(&mut self.1)
    }
}

/// A policy that caps its logits, and a reference of another family, of the same 64 tokens.
struct Models {
    device: Device,
    policy: (Golden, FlatWeights),
    reference: (Golden, FlatWeights),
}

impl Models {
    fn new() -> Self {
        let device = cpu();
        let load = |mut golden: Golden, softcap: Option<f32>| {
            let mut spec = golden.decoder.spec().clone();
            spec.head.shape.softcap = softcap;
            golden.decoder = Decoder::new(spec, 32).unwrap();
            let weights = golden.load(&device);
            (golden, weights)
        };
        let policy = load(Golden::new("llama"), Some(0.3));
        let reference = load(Golden::new("gpt2"), None);
        Self { device, policy, reference }
    }

    fn sources(&self) -> Two<ResidentWeights<'_>, ResidentWeights<'_>> {
        let [policy, reference] = [&self.policy, &self.reference]
            .map(|(golden, weights)| ResidentWeights::new(&golden.decoder, weights, None));
        Two(policy, reference)
    }

    fn walks(&self) -> [LayerExecutor<'_>; 2] {
        [&self.policy, &self.reference].map(|(golden, _)| walk(&golden.decoder, &self.device))
    }

    fn mixed(&self, part: f32, options: GeneratorOptions, requests: Vec<Request>) -> Vec<Answer> {
        let [policy, reference] = self.walks();
        let mut generator = Generator::mixed(policy, reference, part, options).unwrap();
        run(&mut generator, &mut self.sources(), requests).unwrap()
    }

    fn prompts(&self) -> Vec<Vec<u32>> {
        prompts(&self.policy.0)
    }

    /// Mixed logits after a text, from plain forward passes, in f64.
    fn logits(&self, part: f64, text: &[u32]) -> Vec<f64> {
        let mut mixed = vec![0.0; 64];
        for ((golden, weights), part) in [(&self.policy, 1.0 - part), (&self.reference, part)] {
            let forest = Forest::sequence(text.to_vec()).unwrap();
            let mut source = ResidentWeights::new(&golden.decoder, weights, None);
            let walk = walk(&golden.decoder, &self.device);
            let logits = walk.logits(&mut source, &forest, &[text.len() as u32 - 1]).unwrap();
            let cap = golden.decoder.spec().head.shape.softcap.map(f64::from);
            for (sum, logit) in mixed.iter_mut().zip(ops::read_f32(&self.device, logits.view()).unwrap()) {
                let logit = f64::from(logit);
                *sum += part * cap.map_or(logit, |cap| cap * (logit / cap).tanh());
            }
        }
        mixed
    }
}

fn walk<'a>(decoder: &'a Decoder, device: &'a Device) -> LayerExecutor<'a> {
    LayerExecutor::new(decoder, device, DType::F32, Checkpointing::None)
}

fn run(generator: &mut Generator, sources: &mut dyn Sources, requests: Vec<Request>) -> Result<Vec<Answer>> {
    generator.generate_with(sources, &mut SingleRank, requests, &mut |_| Flow::Continue)
}

/// Three answers to each prompt.
pub fn three(prompts: Vec<Vec<u32>>, sampling: Sampling) -> Vec<Request> {
    let mut requests = requests(prompts, sampling);
    requests.iter_mut().for_each(|request| request.num_answers = 3);
    requests
}

#[test]
fn the_ends_are_the_models_by_themselves() {
    let models = Models::new();
    for sampling in [sampling(), Sampling { repetition_penalty: 1.3, ..sampling() }, Sampling::GREEDY] {
        let requests = || three(models.prompts(), sampling);
        let alone = |(golden, weights): &(Golden, FlatWeights)| {
            let mut generator =
                Generator::new(&golden.decoder, &models.device, DType::F32, LOG_PROBS).unwrap();
            run(&mut generator, &mut ResidentWeights::new(&golden.decoder, weights, None), requests())
                .unwrap()
        };
        let (policy, reference) = (alone(&models.policy), alone(&models.reference));
        assert_eq!(models.mixed(0.0, LOG_PROBS, requests()), policy);
        let found = models.mixed(1.0, LOG_PROBS, requests());
        for (found, expected) in found.iter().zip(&reference) {
            assert_eq!(found.tokens, expected.tokens);
        }
        assert_ne!(policy[0].tokens, reference[0].tokens);
    }
}

#[test]
fn log_probs_are_the_policys_own() {
    let models = Models::new();
    let (golden, weights) = &models.policy;
    for part in [0.5, 1.0] {
        let answers = models.mixed(part, LOG_PROBS, three(models.prompts(), sampling()));
        let recorded: Vec<f32> = answers.iter().flat_map(|answer| answer.log_probs.clone()).collect();
        let mut source = ResidentWeights::new(&golden.decoder, weights, None);
        let (decoder, device) = (&golden.decoder, &models.device);
        assert_eq!(recorded, training_log_probs(golden, decoder, device, DType::F32, &mut source, &answers));
    }
}

#[test]
fn greedy_text_is_the_argmax_of_mixed_logits_at_each_token() {
    let models = Models::new();
    let mut texts = Vec::new();
    for part in [0.25, 0.5, 0.75] {
        let answers = models.mixed(part, OPTIONS, requests(models.prompts(), Sampling::GREEDY));
        for (mut text, answer) in models.prompts().into_iter().zip(&answers) {
            for &token in &answer.tokens {
                let logits = models.logits(f64::from(part), &text);
                let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                assert_eq!(best as u32, token, "{part} after {} tokens", text.len());
                text.push(token);
            }
        }
        texts.push(answers);
    }
    assert_ne!(texts[0], texts[2], "the part matters");
}

#[test]
fn draws_follow_the_mixture() {
    const DRAWS: usize = 20_000;
    let models = Models::new();
    let prompt = models.prompts().remove(0);
    let mut requests = requests(vec![prompt.clone()], Sampling { seed: 5, ..Sampling::default() });
    (requests[0].num_answers, requests[0].max_new_tokens) = (DRAWS, 1);
    let mut found = vec![0.0; 64];
    for answer in models.mixed(0.4, GeneratorOptions { max_batch: 1000, ..OPTIONS }, requests) {
        found[answer.tokens[0] as usize] += 1.0 / DRAWS as f64;
    }
    let weights: Vec<f64> = models.logits(0.4, &prompt).iter().map(|logit| logit.exp()).collect();
    let sum: f64 = weights.iter().sum();
    for (token, (found, weight)) in found.iter().zip(weights).enumerate() {
        let expected = weight / sum;
        // Five standard errors.
        let error = 5.0 * (expected * (1.0 - expected) / DRAWS as f64).sqrt();
        assert!((found - expected).abs() < error, "token {token}: {found}, expected {expected}");
    }
}

/// A policy's adapter is the one of the two, and its base alone the other.
struct Shared<'a>(Adapted<'a, ResidentWeights<'a>>);

impl Sources for Shared<'_> {
    fn policy(&mut self) -> &mut dyn WeightSource {
        &mut self.0
    }

    fn reference(&mut self) -> Option<&mut dyn WeightSource> {
        Some(&mut self.0.base)
    }
}

#[test]
fn a_reference_may_be_the_policys_base() {
    let (golden, device) = (Golden::new("llama"), cpu());
    let base = golden.load(&device);
    let lora = config(AdapterKind::Lora, Targets::AllLinear, &[]);
    let adapter = Adapter::new(lora, golden.decoder.spec()).unwrap();
    let decoder = golden.decoder.clone().with_adapter(adapter);
    let weights = adapter_weights(&decoder, &device, &base);
    let plain = || ResidentWeights::new(&golden.decoder, &base, None);
    let policy =
        || Adapted { decoder: &decoder, base: plain(), weights: &weights, copy: None, fetched: Vec::new() };
    let requests = || three(prompts(&golden), sampling());
    let both = |part| {
        let walk = walk(&decoder, &device);
        let mut generator = Generator::mixed(walk, walk, part, OPTIONS).unwrap();
        run(&mut generator, &mut Shared(policy()), requests()).unwrap()
    };
    let alone = |decoder: &Decoder, sources: &mut dyn Sources| {
        let mut generator = Generator::new(decoder, &device, DType::F32, OPTIONS).unwrap();
        run(&mut generator, sources, requests()).unwrap()
    };
    assert_eq!(both(0.0), alone(&decoder, &mut policy()));
    assert_eq!(both(1.0), alone(&golden.decoder, &mut plain()));
    assert_ne!(both(0.0), both(1.0));
}

#[test]
fn ranks_walk_both_in_step() {
    let models = Models::new();
    let alone = models.mixed(0.5, LOG_PROBS, three(models.prompts(), sampling()));
    let meeting = Meeting::new(2);
    let rank = |requests: Vec<Request>| {
        let [policy, reference] = models.walks();
        let Two(policy_weights, reference_weights) = models.sources();
        let gathered = |weights| Gathered { weights, meeting: &meeting, fetched: 0 };
        let mut sources = Two(gathered(policy_weights), gathered(reference_weights));
        let mut generator = Generator::mixed(policy, reference, 0.5, LOG_PROBS).unwrap();
        let mut meet = Rank(&meeting);
        let answers =
            generator.generate_with(&mut sources, &mut meet, requests, &mut |_| Flow::Continue).unwrap();
        (answers, sources.0.fetched, sources.1.fetched)
    };
    let (busy, idle) = std::thread::scope(|scope| {
        let idle = scope.spawn(|| rank(Vec::new()));
        (rank(three(models.prompts(), sampling())), idle.join().unwrap())
    });
    assert_eq!(busy.0, alone);
    assert_eq!((idle.0.len(), idle.1, idle.2), (0, busy.1, busy.2));
}

#[test]
fn what_cannot_be_mixed_is_refused() {
    let models = Models::new();
    let [policy, reference] = models.walks();
    let refusal =
        |part| Generator::mixed(policy, reference, part, OPTIONS).err().expect("refused").to_string();
    assert_eq!(refusal(1.5), "the reference's part of a mixture is 1.5, expected 0 to 1");
    assert!(refusal(f32::NAN).contains("is NaN"));
    let mut spec = reference.decoder.spec().clone();
    spec.vocab_size += 1;
    let larger = Decoder::new(spec, 32).unwrap();
    let error = Generator::mixed(policy, walk(&larger, &models.device), 0.5, OPTIONS).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the policy has a vocabulary of 64 tokens and the reference one of 65; a mixture needs the same tokens"
    );
    let mut generator = Generator::mixed(policy, reference, 0.5, OPTIONS).unwrap();
    let Two(mut one, _) = models.sources();
    let error = run(&mut generator, &mut one, requests(models.prompts(), sampling())).unwrap_err();
    assert_eq!(error.to_string(), "a mixture needs the reference's weights too");
    assert!(generator.is_idle());
    // Text ends where the shorter of the two does.
    let short = Decoder::new(policy.decoder.spec().clone(), 12).unwrap();
    for (policy, reference) in
        [(policy, walk(&short, &models.device)), (walk(&short, &models.device), policy)]
    {
        let mut generator = Generator::mixed(policy, reference, 0.5, OPTIONS).unwrap();
        let weights = &models.policy.1;
        let [policy, reference] =
            [policy, reference].map(|walk| ResidentWeights::new(walk.decoder, weights, None));
        let mut sources = Two(policy, reference);
        let answers = run(&mut generator, &mut sources, requests(vec![vec![1; 9]], sampling())).unwrap();
        assert_eq!(answers[0].tokens.len(), 3);
    }
}
