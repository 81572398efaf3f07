//! Generation against the plain forward pass, which has no cache.

mod support;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use support::{ALL, Golden, cpu};
use tandem_kernels::{DType, Device, Forest, Kind, ops};
use tandem_model::decode::{Answer, Finish, NewToken};
use tandem_model::{
    Checkpointing, FlatWeights, Generator, GeneratorOptions, ResidentWeights, Sampling, Walk,
};

const SAMPLING: Sampling = Sampling { temperature: 1.0, top_k: Some(20), top_p: 0.9, seed: 11 };

fn options(sampling: Sampling) -> GeneratorOptions {
    GeneratorOptions {
        sampling,
        num_answers: 1,
        max_new_tokens: 8,
        stop: Vec::new(),
        max_batch: 8,
        cache_tokens: 200,
    }
}

/// Three prompts of different lengths.
fn prompts(golden: &Golden) -> Vec<Vec<u32>> {
    vec![golden.prompt.clone(), golden.chosen.clone(), vec![golden.rejected[0]]]
}

fn generate(
    golden: &Golden,
    device: &Device,
    weights: &FlatWeights,
    options: GeneratorOptions,
) -> Vec<Answer> {
    let decoder = &golden.decoder;
    let mut generator = Generator::new(decoder, device, DType::F32, options).unwrap();
    let mut source = ResidentWeights::new(decoder, weights, None);
    generator.generate(&mut source, &prompts(golden), &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn greedy_text_is_the_argmax_of_a_full_forward_at_each_token() {
    for name in ALL {
        check_greedy(name, &cpu());
    }
    for name in ["llama", "gpt2", "qwen2-window", "gemma"] {
        check_greedy(name, &tandem_emulated::device(1 << 28).unwrap());
    }
}

fn check_greedy(name: &'static str, device: &Device) {
    let golden = Golden::new(name);
    let weights = golden.load(device);
    let decoder = &golden.decoder;
    let walk = Walk::new(decoder, device, DType::F32, Checkpointing::None);
    let answers = generate(&golden, device, &weights, options(Sampling::GREEDY));
    assert_eq!(answers.len(), 3);
    for (prompt, answer) in prompts(&golden).into_iter().zip(answers) {
        assert_eq!((answer.tokens.len(), answer.finish), (8, Finish::Length), "{name}");
        let mut text = prompt;
        for token in answer.tokens {
            let forest = Forest::sequence(text.clone()).unwrap();
            let mut source = ResidentWeights::new(decoder, &weights, None);
            let last = [text.len() as u32 - 1];
            let logits = walk.logits(&mut source, &forest, &last).unwrap();
            let logits = ops::read_f32(device, logits.view()).unwrap();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert_eq!(best as u32, token, "{name} after {} tokens", text.len());
            text.push(token);
        }
    }
}

#[test]
fn answers_do_not_depend_on_what_else_is_in_the_batch() {
    for name in ["llama", "gpt2", "qwen2-window", "qwen3"] {
        let golden = Golden::new(name);
        let device = cpu();
        let weights = golden.load(&device);
        let several = GeneratorOptions { num_answers: 3, ..options(SAMPLING) };
        let together = generate(&golden, &device, &weights, several.clone());
        assert_eq!(together.len(), 9);
        let distinct: std::collections::BTreeSet<_> = together.iter().map(|a| &a.tokens).collect();
        assert!(distinct.len() > 6, "{name}: answers to one prompt should differ: {together:?}");
        // One at a time; in a cache that holds one prompt with one or two answers; in batches of two.
        for (max_batch, cache_tokens) in [(1, 200), (8, 16), (8, 24), (2, 40)] {
            let cramped = GeneratorOptions { max_batch, cache_tokens, ..several.clone() };
            let found = generate(&golden, &device, &weights, cramped);
            assert_eq!(found, together, "{name}: batch {max_batch}, cache {cache_tokens}");
        }
    }
}

#[test]
fn another_seed_gives_other_text_and_the_same_seed_the_same() {
    let golden = Golden::new("llama");
    let device = cpu();
    let weights = golden.load(&device);
    let text = |seed| generate(&golden, &device, &weights, options(Sampling { seed, ..SAMPLING }));
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn a_stop_token_ends_an_answer_and_is_its_last() {
    let golden = Golden::new("llama");
    let device = cpu();
    let weights = golden.load(&device);
    let free = generate(&golden, &device, &weights, options(SAMPLING));
    let stop = free[0].tokens[3];
    let stopped =
        generate(&golden, &device, &weights, GeneratorOptions { stop: vec![stop], ..options(SAMPLING) });
    for (free, stopped) in free.iter().zip(&stopped) {
        match free.tokens.iter().position(|&t| t == stop) {
            Some(at) => {
                assert_eq!((&free.tokens[..=at], Finish::Stop), (&stopped.tokens[..], stopped.finish));
            }
            None => assert_eq!(free, stopped),
        }
    }
    assert_eq!(stopped[0].finish, Finish::Stop);
}

#[test]
fn tokens_stream_as_they_come_and_the_listener_may_break_off() {
    let golden = Golden::new("llama");
    let device = cpu();
    let weights = golden.load(&device);
    let decoder = &golden.decoder;
    let mut source = ResidentWeights::new(decoder, &weights, None);
    let mut generator = Generator::new(decoder, &device, DType::F32, options(SAMPLING)).unwrap();
    let mut streamed: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let whole = generator
        .generate(&mut source, &prompts(&golden), &mut |new: NewToken| {
            let text = streamed.entry(new.prompt).or_default();
            assert_eq!(new.index, text.len());
            text.push(new.token);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(whole.iter().map(|a| &a.tokens).collect::<Vec<_>>(), streamed.values().collect::<Vec<_>>());
    let mut seen = 0;
    let broken = generator
        .generate(&mut source, &prompts(&golden), &mut |_| {
            seen += 1;
            if seen < 8 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })
        .unwrap();
    assert_eq!(broken.iter().map(|a| a.tokens.len()).collect::<Vec<_>>(), [3, 3, 2]);
    for (broken, whole) in broken.iter().zip(&whole) {
        assert_eq!(broken.finish, Finish::Interrupted);
        assert_eq!(broken.tokens, whole.tokens[..broken.tokens.len()]);
    }
    // The cache is whole again.
    let again =
        generator.generate(&mut source, &prompts(&golden), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(again, whole);
}

#[test]
fn answers_end_at_the_last_position() {
    let golden = Golden::new("gpt2");
    let device = cpu();
    let weights = golden.load(&device);
    let long = GeneratorOptions { max_new_tokens: 100, ..options(SAMPLING) };
    for (prompt, answer) in prompts(&golden).iter().zip(generate(&golden, &device, &weights, long)) {
        assert_eq!((prompt.len() + answer.tokens.len(), answer.finish), (32, Finish::Length));
    }
}

#[test]
fn prompts_that_cannot_be_answered_are_refused() {
    let golden = Golden::new("gpt2");
    let device = cpu();
    let weights = golden.load(&device);
    let decoder = &golden.decoder;
    let refusal = |prompt: Vec<u32>, options| {
        let mut generator = Generator::new(decoder, &device, DType::F32, options).unwrap();
        let mut source = ResidentWeights::new(decoder, &weights, None);
        let result = generator.generate(&mut source, &[vec![1], prompt], &mut |_| ControlFlow::Continue(()));
        result.unwrap_err().to_string()
    };
    assert_eq!(refusal(vec![], options(SAMPLING)), "prompt 1 is empty");
    assert_eq!(
        refusal(vec![1; 32], options(SAMPLING)),
        "prompt 1 has 32 tokens, which leaves no room for an answer within 32 positions"
    );
    assert_eq!(
        refusal(vec![1; 20], GeneratorOptions { cache_tokens: 26, ..options(SAMPLING) }),
        "prompt 1 has 20 tokens and its answer up to 8; the cache holds 26"
    );
    assert!(
        Generator::new(decoder, &device, DType::F32, GeneratorOptions { max_batch: 0, ..options(SAMPLING) })
            .is_err()
    );
}

#[test]
fn bf16_generates_too_and_leaves_no_activation_behind() {
    let golden = Golden::new("llama-tied");
    let device = cpu();
    let weights = golden.load(&device);
    let decoder = &golden.decoder;
    let copy = weights.compute_copy(decoder, &device, Kind::Weights, DType::Bf16).unwrap();
    let mut source = ResidentWeights::new(decoder, &weights, Some(&copy));
    let mut generator = Generator::new(decoder, &device, DType::Bf16, options(Sampling::GREEDY)).unwrap();
    let mut run = || {
        let answers = generator.generate(&mut source, &prompts(&golden), &mut |_| ControlFlow::Continue(()));
        (answers.unwrap(), device.high_water())
    };
    let first = run();
    assert_eq!(run(), first);
    assert_eq!(device.memory().current[Kind::Activations as usize], 0);
    assert_eq!(device.memory().current[Kind::Head as usize], 0);
}
