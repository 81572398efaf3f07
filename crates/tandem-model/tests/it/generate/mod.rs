//! Generation against the plain forward pass, which has no cache.

mod mixture;
mod policies;
mod ranks;
mod slices;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::{Golden, all, cpu};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind, Prediction, Profile, Segment, ops};
use tandem_model::decode::{Answer, Finish, Flow, NewToken};
use tandem_model::{
    Checkpointing, Decoder, FlatWeights, Generator, GeneratorOptions, LayerExecutor, Request,
    ResidentWeights, Sampling, WeightSource,
};

const OPTIONS: GeneratorOptions = GeneratorOptions {
    max_batch: 8,
    cache_tokens: 200,
    prefill_tokens: 100,
    log_probs: false,
    planned_prefill: None,
};

fn sampling() -> Sampling {
    Sampling { top_k: Some(20), top_p: 0.9, seed: 11, ..Sampling::default() }
}

/// One answer of 8 tokens to each prompt.
fn requests(prompts: Vec<Vec<u32>>, sampling: Sampling) -> Vec<Request> {
    let request = |(number, prompt)| Request {
        prompt,
        number,
        num_answers: 1,
        sampling,
        max_new_tokens: 8,
        stop: Vec::new(),
    };
    (0..).zip(prompts).map(request).collect()
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
    change: impl Fn(&mut Request),
) -> Vec<Answer> {
    let decoder = &golden.decoder;
    let mut generator = Generator::new(decoder, device, DType::F32, options).unwrap();
    let mut source = ResidentWeights::new(decoder, weights, None);
    let mut requests = requests(prompts(golden), sampling());
    requests.iter_mut().for_each(change);
    generator.generate(&mut source, requests, &mut |_| Flow::Continue).unwrap()
}

#[test]
fn greedy_text_is_the_argmax_of_a_full_forward_at_each_token() {
    for &name in all() {
        check_greedy(name, &cpu());
    }
    for name in ["llama", "gpt2", "qwen2-window", "gemma", "qwen3-5"] {
        let device = tandem_cuda_emulator::device(1 << 28).unwrap();
        check_greedy(name, &device);
        // Of the seven steps of three completions all but the first.
        assert_eq!(device.num_graph_launches(), 6, "{name}");
    }
}

fn check_greedy(name: &'static str, device: &Device) {
    let golden = Golden::new(name);
    let weights = golden.load(device);
    let decoder = &golden.decoder;
    let walk = LayerExecutor::new(decoder, device, DType::F32, Checkpointing::None);
    let answers = generate(&golden, device, &weights, OPTIONS, |r| r.sampling = Sampling::GREEDY);
    assert_eq!(answers.len(), 3);
    for (prompt, answer) in prompts(&golden).into_iter().zip(answers) {
        assert_eq!((answer.tokens.len(), answer.finish), (8, Finish::Length), "{name}");
        let length = prompt.len() as u32 + 8;
        let mut text = prompt;
        for token in answer.tokens {
            let lengths = vec![length; text.len()];
            let forest = Forest::sequence(text.clone()).and_then(|f| f.with_lengths(lengths)).unwrap();
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

/// Steps whose work is one CUDA graph, while completions begin and end, and grow past a part of attention's keys.
#[test]
fn graphs_have_the_text_and_the_log_probabilities_of_steps_without() {
    for name in ["llama", "qwen2-window", "qwen3-5"] {
        let golden = Golden::changed(name, 200, |_| ());
        let texts = |device: &Device| {
            let weights = golden.load(device);
            let options = GeneratorOptions { max_batch: 3, cache_tokens: 900, log_probs: true, ..OPTIONS };
            [40, 7, 130].map(|max_new_tokens| {
                generate(&golden, device, &weights, options.clone(), |request| {
                    request.max_new_tokens = max_new_tokens + request.number as usize;
                    request.num_answers = 2;
                })
            })
        };
        let device = tandem_cuda_emulator::device(1 << 28).unwrap();
        let with = texts(&device);
        let launched = device.num_graph_launches();
        assert!(launched > 250, "{name}: {launched} graphs");
        // A profile times operations, one by one.
        let profile = Arc::new(Profile::default());
        let device = tandem_cuda_emulator::device(1 << 28).unwrap().profiled(&profile);
        profile.begin(1);
        let without = texts(&device);
        assert_eq!(device.num_graph_launches(), 0, "{name}");
        assert_eq!(with, without, "{name}");
    }
}

#[test]
fn answers_do_not_depend_on_what_else_is_in_the_batch() {
    for name in ["llama", "gpt2", "qwen2-window", "qwen3"] {
        let (golden, device, weights) = Golden::loaded(name);
        let together = generate(&golden, &device, &weights, OPTIONS, |r| r.num_answers = 3);
        assert_eq!(together.len(), 9);
        let distinct: std::collections::BTreeSet<_> = together.iter().map(|a| &a.tokens).collect();
        assert!(distinct.len() > 6, "{name}: answers to one prompt should differ: {together:?}");
        // One at a time; in a cache that holds one prompt with one or two answers; in batches of two.
        for (max_batch, cache_tokens) in [(1, 200), (8, 16), (8, 24), (2, 40)] {
            for prefill_tokens in [1, 100] {
                let cramped = GeneratorOptions { max_batch, cache_tokens, prefill_tokens, ..OPTIONS };
                let found = generate(&golden, &device, &weights, cramped, |r| r.num_answers = 3);
                assert_eq!(found, together, "{name}: batch {max_batch}, cache {cache_tokens}");
            }
        }
    }
}

/// Long prompts with the tokens before and behind windows, and among them short ones.
fn long_prompts(golden: &Golden) -> Vec<Vec<u32>> {
    let vocabulary = golden.decoder.spec().vocab_size as u32;
    let prompt = |length: u32| (0..length).map(|i| (i * i + 7 * i + length) % vocabulary).collect();
    [430, 3, 250, 97, 96].map(prompt).into()
}

/// A model of 500 positions.
fn of_long_texts(name: &'static str) -> Golden {
    Golden::changed(name, 500, |config| {
        let positions = ["n_positions", "max_position_embeddings"].map(|key| config.get(key).map(|_| key));
        positions.into_iter().flatten().for_each(|key| config[key] = 500.into());
    })
}

#[test]
fn a_prompt_in_parts_has_the_bits_of_a_whole_one() {
    for name in ["llama", "gpt2", "qwen2-window", "qwen3-5", "gemma2"] {
        let (golden, device) = (of_long_texts(name), cpu());
        let weights = golden.load(&device);
        for dtype in [DType::F32, DType::Bf16] {
            let copy = weights.compute_copy(&golden.decoder, &device, MemoryKind::Weights, dtype).unwrap();
            let mut source = ResidentWeights::new(&golden.decoder, &weights, Some(&copy));
            let mut texts = |prefill_tokens| {
                let options =
                    GeneratorOptions { cache_tokens: 2000, prefill_tokens, log_probs: true, ..OPTIONS };
                let mut generator = Generator::new(&golden.decoder, &device, dtype, options).unwrap();
                let mut requests = requests(long_prompts(&golden), sampling());
                requests.iter_mut().for_each(|request| request.num_answers = 2);
                generator.generate(&mut source, requests, &mut |_| Flow::Continue).unwrap()
            };
            let whole = texts(1000);
            for prefill_tokens in [1, 200, 300] {
                assert_eq!(texts(prefill_tokens), whole, "{name}, {dtype}, {prefill_tokens} tokens");
            }
        }
    }
    for name in ["llama", "qwen2-window", "qwen3-5"] {
        let device = tandem_cuda_emulator::device(1 << 28).unwrap();
        let golden = of_long_texts(name);
        let weights = golden.load(&device);
        let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
        let [whole, parts] = [1000, 100].map(|prefill_tokens| {
            let options = GeneratorOptions { cache_tokens: 2000, prefill_tokens, log_probs: true, ..OPTIONS };
            let mut generator = Generator::new(&golden.decoder, &device, DType::F32, options).unwrap();
            let requests = requests(long_prompts(&golden), Sampling::GREEDY);
            generator.generate(&mut source, requests, &mut |_| Flow::Continue).unwrap()
        });
        for (whole, part) in whole.iter().zip(&parts) {
            assert_eq!(whole.tokens, part.tokens, "{name}");
            for (a, b) in whole.log_probs.iter().zip(&part.log_probs) {
                assert!((a - b).abs() < 1e-4, "{name}: {a} and {b}");
            }
        }
    }
}

#[test]
fn others_go_on_while_a_long_prompt_is_read() {
    let (golden, device) = (of_long_texts("llama"), cpu());
    let weights = golden.load(&device);
    let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
    let prompts = long_prompts(&golden);
    let options =
        GeneratorOptions { cache_tokens: 510, prefill_tokens: 96, log_probs: true, max_batch: 3, ..OPTIONS };
    let mut generator = Generator::new(&golden.decoder, &device, DType::F32, options.clone()).unwrap();
    let [long, short, other, ..]: [Request; 5] = requests(prompts, sampling()).try_into().unwrap();
    let expected = Generator::new(&golden.decoder, &device, DType::F32, options)
        .unwrap()
        .generate(&mut source, vec![long.clone(), short.clone()], &mut |_| Flow::Continue)
        .unwrap();
    let largest = long.clone();
    let long_number = generator.submit(long.clone()).unwrap();
    let mut ended = Vec::new();
    let mut first_tokens = Vec::new();
    let mut step = |generator: &mut Generator, ended: &mut Vec<Answer>| {
        let mut note = |new: NewToken| {
            if new.index == 0 {
                first_tokens.push(new.request);
            }
            Flow::Continue
        };
        ended.extend(generator.step(&mut source, &mut note).unwrap());
    };
    // The prompt takes five parts; the short one comes between them.
    step(&mut generator, &mut ended);
    let short_number = generator.submit(short.clone()).unwrap();
    while !generator.is_idle() {
        step(&mut generator, &mut ended);
    }
    ended.sort_by_key(|answer| answer.request);
    let texts = |answers: &[Answer]| answers.iter().map(|answer| answer.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(texts(&ended), texts(&expected));
    // One that is given up while it is read leaves its room.
    let [given_up, kept] =
        [long, other].map(|request| generator.submit(Request { num_answers: 2, ..request }).unwrap());
    let mut ended = Vec::new();
    step(&mut generator, &mut ended);
    step(&mut generator, &mut ended);
    let broken = generator.cancel(given_up);
    assert!(broken.iter().all(|answer| answer.tokens.is_empty() && answer.finish == Finish::Interrupted));
    while !generator.is_idle() {
        step(&mut generator, &mut ended);
    }
    assert!(
        ended.len() == 2 && ended.iter().all(|answer| answer.request == kept && answer.tokens.len() == 8)
    );
    // The 430 tokens and 69 of the completion, side by side.
    let last = generator.submit(Request { max_new_tokens: 500, ..largest }).unwrap();
    while !generator.is_idle() {
        step(&mut generator, &mut ended);
    }
    assert_eq!((ended[2].request, ended[2].tokens.len()), (last, 70), "the cache is whole again");
    assert_eq!(first_tokens[..2], [short_number, long_number]);
}

/// Neither a client with many completions of a long prompt nor many long prompts fill the batch.
#[test]
fn long_prompts_are_read_in_turns_and_leave_room() {
    let (golden, device) = (of_long_texts("llama"), cpu());
    let weights = golden.load(&device);
    let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
    let options =
        GeneratorOptions { cache_tokens: 3000, prefill_tokens: 96, log_probs: true, max_batch: 4, ..OPTIONS };
    let mut generator = Generator::new(&golden.decoder, &device, DType::F32, options).unwrap();
    let [long, short, other, ..]: [Request; 5] =
        requests(long_prompts(&golden), sampling()).try_into().unwrap();
    let long = Request { num_answers: 6, ..long };
    let all = vec![long.clone(), other.clone(), long.clone(), short.clone()];
    let expected = generator.generate(&mut source, all.clone(), &mut |_| Flow::Continue).unwrap();
    let first = generator.submit_for(1, all[0].clone()).unwrap();
    for (client, request) in (2..).zip(&all[1..]) {
        generator.submit_for(client, request.clone()).unwrap();
    }
    let (mut begun, mut found) = (Vec::new(), Vec::new());
    while !generator.is_idle() {
        let mut note = |new: NewToken| {
            if new.index == 0 {
                begun.push(new.request - first);
            }
            Flow::Continue
        };
        found.extend(generator.step(&mut source, &mut note).unwrap());
    }
    // Five parts and three; the third waits until one of the two is read.
    assert_eq!(begun[..3], [3, 1, 0], "{begun:?}");
    found.iter_mut().for_each(|answer| answer.request -= first);
    found.sort_by_key(|answer| (answer.request, answer.answer));
    assert_eq!(found, expected);
}

#[test]
fn another_seed_gives_other_text_and_the_same_seed_the_same() {
    let (golden, device, weights) = Golden::loaded("llama");
    let text = |seed| generate(&golden, &device, &weights, OPTIONS, |r| r.sampling.seed = seed);
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn a_stop_token_ends_an_answer_and_is_its_last() {
    let (golden, device, weights) = Golden::loaded("llama");
    let free = generate(&golden, &device, &weights, OPTIONS, |_| ());
    let stop = free[0].tokens[3];
    let stopped = generate(&golden, &device, &weights, OPTIONS, |r| r.stop = vec![stop]);
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
fn tokens_stream_as_they_come_and_the_listener_may_end_a_text() {
    let (golden, device, weights) = Golden::loaded("llama");
    let decoder = &golden.decoder;
    let mut source = ResidentWeights::new(decoder, &weights, None);
    let mut generator = Generator::new(decoder, &device, DType::F32, OPTIONS).unwrap();
    let requests = || requests(prompts(&golden), sampling());
    let mut streamed: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let whole = generator
        .generate(&mut source, requests(), &mut |new: NewToken| {
            let text = streamed.entry(new.request).or_default();
            assert_eq!(new.index, text.len());
            assert_eq!(new.finish, (new.index == 7).then_some(Finish::Length));
            text.push(new.token);
            Flow::Continue
        })
        .unwrap();
    assert_eq!(whole.iter().map(|a| &a.tokens).collect::<Vec<_>>(), streamed.values().collect::<Vec<_>>());
    let ended = generator
        .generate(&mut source, requests(), &mut |new| {
            // The last one's 8 tokens are all that it may have.
            if matches!((new.request, new.index), (1, 2) | (2, 7)) { Flow::End } else { Flow::Continue }
        })
        .unwrap();
    assert_eq!((&ended[1].tokens[..], ended[1].finish), (&whole[1].tokens[..3], Finish::Stop));
    assert_eq!((&ended[2].tokens, ended[2].finish), (&whole[2].tokens, Finish::Stop));
    assert_eq!(&ended[0], &whole[0]);
}

#[test]
fn requests_come_and_go_while_others_are_under_way() {
    let (golden, device, weights) = Golden::loaded("llama");
    let decoder = &golden.decoder;
    let mut source = ResidentWeights::new(decoder, &weights, None);
    let alone = generate(&golden, &device, &weights, OPTIONS, |_| ());
    let mut generator = Generator::new(decoder, &device, DType::F32, OPTIONS).unwrap();
    let [first, second, third]: [Request; 3] = requests(prompts(&golden), sampling()).try_into().unwrap();
    let mut ended = Vec::new();
    let mut step = |generator: &mut Generator| {
        ended.extend(generator.step(&mut source, &mut |_| Flow::Continue).unwrap());
    };
    let first = generator.submit(first).unwrap();
    for _ in 0..3 {
        step(&mut generator);
    }
    let second = generator.submit(second).unwrap();
    step(&mut generator);
    let third = generator.submit(third).unwrap();
    step(&mut generator);
    let broken = generator.cancel(second);
    assert_eq!((&broken[0].tokens[..], broken[0].finish), (&alone[1].tokens[..2], Finish::Interrupted));
    while !generator.is_idle() {
        step(&mut generator);
    }
    let found: Vec<_> = ended.iter().map(|answer| (answer.request, &answer.tokens)).collect();
    assert_eq!(found, [(first, &alone[0].tokens), (third, &alone[2].tokens)]);
    // The cache is whole again.
    let all = requests(prompts(&golden), sampling());
    let again = generator.generate(&mut source, all, &mut |_| Flow::Continue).unwrap();
    assert_eq!(again, alone);
}

/// Generation records the log-probabilities that a training pass computes: both use one model.
/// Completions of a client with many begin between those of the others, with room for one at a time. Models
/// with recurrent states have as many slots as that takes.
#[test]
fn clients_take_turns_and_get_the_same_text() {
    for name in ["llama", "qwen3-5"] {
        let (golden, device, weights) = Golden::loaded(name);
        let asked: Vec<Request> = (0..)
            .zip([5, 1, 2, 1])
            .map(|(number, num_answers)| Request {
                number,
                num_answers,
                ..requests(prompts(&golden), sampling()).remove(number as usize % 3)
            })
            .collect();
        let options = GeneratorOptions { max_batch: 1, ..OPTIONS };
        let mut generator = Generator::new(&golden.decoder, &device, DType::F32, options).unwrap();
        let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
        let expected = generator.generate(&mut source, asked.clone(), &mut |_| Flow::Continue).unwrap();
        let first = generator.submit_for(10, asked[0].clone()).unwrap();
        for (client, request) in [(11, &asked[1]), (12, &asked[2]), (11, &asked[3])] {
            generator.submit_for(client, request.clone()).unwrap();
        }
        let (mut begun, mut found) = (Vec::new(), Vec::new());
        while !generator.is_idle() {
            let mut note = |new: NewToken| {
                if new.index == 0 {
                    begun.push((new.request - first, new.answer));
                }
                Flow::Continue
            };
            found.extend(generator.step(&mut source, &mut note).unwrap());
        }
        let turns = [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (2, 1), (0, 2), (0, 3), (0, 4)];
        assert_eq!(begun, turns, "{name}");
        found.iter_mut().for_each(|answer| answer.request -= first);
        found.sort_by_key(|answer| (answer.request, answer.answer));
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn log_probs_are_those_of_a_training_pass() {
    for &name in all() {
        let (golden, device, weights) = Golden::loaded(name);
        let copy = weights.compute_copy(&golden.decoder, &device, MemoryKind::Weights, DType::Bf16).unwrap();
        let (decoder, device) = (&golden.decoder, &device);
        let mut source = ResidentWeights::new(decoder, &weights, None);
        check_log_probs(&golden, decoder, device, DType::F32, &mut source);
        let mut source = ResidentWeights::new(decoder, &weights, Some(&copy));
        check_log_probs(&golden, decoder, device, DType::Bf16, &mut source);
    }
    let (golden, device) = (Golden::new("llama"), tandem_cuda_emulator::device(1 << 28).unwrap());
    let weights = golden.load(&device);
    let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
    check_log_probs(&golden, &golden.decoder, &device, DType::F32, &mut source);
}

/// Generates, and compares with a training pass; returns the log-probabilities.
fn check_log_probs(
    golden: &Golden,
    decoder: &Decoder,
    device: &Device,
    dtype: DType,
    source: &mut dyn WeightSource,
) -> Vec<f32> {
    let options = GeneratorOptions { log_probs: true, ..OPTIONS };
    let mut generator = Generator::new(decoder, device, dtype, options).unwrap();
    let mut requests = requests(prompts(golden), sampling());
    requests.iter_mut().for_each(|request| request.num_answers = 3);
    let mut told = Vec::new();
    let answers = generator
        .generate(source, requests, &mut |new| {
            told.push((new.request, new.answer, new.index, new.log_prob));
            Flow::Continue
        })
        .unwrap();
    told.sort_by_key(|&(request, answer, index, _)| (request, answer, index));
    let recorded: Vec<f32> = answers.iter().flat_map(|answer| answer.log_probs.clone()).collect();
    assert_eq!(told.iter().map(|told| told.3).collect::<Vec<_>>(), recorded);
    let trained = training_log_probs(golden, decoder, device, dtype, source, &answers);
    let name = golden.name;
    if matches!(device, Device::Cpu(_)) {
        for (found, trained) in recorded.iter().zip(&trained) {
            assert_eq!(found.to_bits(), trained.to_bits(), "{name} {dtype}: {found} and {trained}");
        }
        return recorded;
    }
    // A GPU's products of few rows may differ from products of many: each of the two is off by about what
    // torch's bf16 is.
    let largest = trained.iter().fold(0.0, |largest: f32, trained| largest.max(trained.abs()));
    let allowed = (2.0 * golden.autocast[0] as f32 * largest).max(1e-2);
    let mut errors: Vec<f32> = recorded.iter().zip(&trained).map(|(a, b)| (a - b).abs()).collect();
    errors.sort_by(f32::total_cmp);
    let (most, worst) = (errors[errors.len() * 19 / 20], errors[errors.len() - 1]);
    assert!(
        most <= allowed && worst <= 8.0 * allowed,
        "{name} {dtype}: {most} and {worst}, allowed {allowed}"
    );
    recorded
}

/// The log-probability of each token of three answers to each of the [`prompts`], from a training pass.
fn training_log_probs(
    golden: &Golden,
    decoder: &Decoder,
    device: &Device,
    dtype: DType,
    source: &mut dyn WeightSource,
    answers: &[Answer],
) -> Vec<f32> {
    let (mut tokens, mut segments, mut predictions) = (Vec::new(), Vec::<Segment>::new(), Vec::new());
    // As long as the request allowed.
    let mut lengths = Vec::new();
    for (prompt, answers) in prompts(golden).iter().zip(answers.chunks(3)) {
        let parent = segments.len() as u32;
        let start = tokens.len() as u32;
        tokens.extend(prompt);
        let last = tokens.len() as u32 - 1;
        segments.push(Segment { range: start..last + 1, parent: None, first_position: 0 });
        for answer in answers {
            let start = tokens.len() as u32;
            tokens.extend(&answer.tokens);
            let range = start..tokens.len() as u32;
            for (row, &target) in range.clone().zip(&answer.tokens) {
                let hidden_row = if row == start { last } else { row - 1 };
                predictions.push(Prediction { hidden_row, target, sequence: parent });
            }
            let first_position = prompt.len() as u32;
            segments.push(Segment { range, parent: Some(parent), first_position });
        }
        lengths.resize(tokens.len(), prompt.len() as u32 + 8);
    }
    // The head takes predictions by rows.
    let mut order: Vec<usize> = (0..predictions.len()).collect();
    order.sort_by_key(|&i| predictions[i].hidden_row);
    let sorted = order.iter().map(|&i| predictions[i]).collect();
    let num_sequences = segments.len() as u32;
    let forest = Forest::new(tokens, segments, sorted, num_sequences).unwrap();
    let forest = forest.with_lengths(lengths).unwrap();
    let walk = LayerExecutor::new(decoder, device, dtype, Checkpointing::None);
    let mut scores = HeadScores::default();
    walk.forward(source, &forest, &mut scores).unwrap();
    let mut trained = vec![f32::NAN; order.len()];
    order.iter().zip(&scores.log_prob).for_each(|(&i, &log_prob)| trained[i] = log_prob);
    trained
}

#[test]
fn answers_end_at_the_last_position() {
    let (golden, device, weights) = Golden::loaded("gpt2");
    let answers = generate(&golden, &device, &weights, OPTIONS, |r| r.max_new_tokens = 100);
    for (prompt, answer) in prompts(&golden).iter().zip(answers) {
        assert_eq!((prompt.len() + answer.tokens.len(), answer.finish), (32, Finish::Length));
    }
}

#[test]
fn prompts_that_cannot_be_answered_are_refused() {
    let (golden, device, weights) = Golden::loaded("gpt2");
    let decoder = &golden.decoder;
    let refusal = |prompt: Vec<u32>, options| {
        let mut generator = Generator::new(decoder, &device, DType::F32, options).unwrap();
        let mut source = ResidentWeights::new(decoder, &weights, None);
        let requests = requests(vec![vec![1], prompt], sampling());
        let result = generator.generate(&mut source, requests, &mut |_| panic!("nothing is generated"));
        result.unwrap_err().to_string()
    };
    assert_eq!(refusal(vec![], OPTIONS), "prompt 1: it is empty");
    assert_eq!(
        refusal(vec![1; 32], OPTIONS),
        "prompt 1: it has 32 tokens, which leaves no room for a completion within 32 positions"
    );
    assert_eq!(
        refusal(vec![1; 20], GeneratorOptions { cache_tokens: 26, ..OPTIONS }),
        "prompt 1: it has 20 tokens and its completion up to 8; the cache holds 26"
    );
    let foreign = refusal(vec![1, 1 << 20], OPTIONS);
    assert!(
        foreign.starts_with("prompt 1: token 1048576 is outside the model's vocabulary of "),
        "{foreign}"
    );
    let none = GeneratorOptions { max_batch: 0, ..OPTIONS };
    assert!(Generator::new(decoder, &device, DType::F32, none).is_err());
}

#[test]
fn bf16_generates_too_and_leaves_no_activation_behind() {
    let (golden, device, weights) = Golden::loaded("llama-tied");
    let decoder = &golden.decoder;
    let copy = weights.compute_copy(decoder, &device, MemoryKind::Weights, DType::Bf16).unwrap();
    let mut source = ResidentWeights::new(decoder, &weights, Some(&copy));
    let mut generator = Generator::new(decoder, &device, DType::Bf16, OPTIONS).unwrap();
    let mut run = || {
        let requests = requests(prompts(&golden), Sampling::GREEDY);
        let answers = generator.generate(&mut source, requests, &mut |_| Flow::Continue);
        (answers.unwrap(), device.high_water())
    };
    let first = run();
    assert_eq!(run(), first);
    assert_eq!(device.memory().current[MemoryKind::Activations as usize], 0);
    assert_eq!(device.memory().current[MemoryKind::Head as usize], 0);
}
