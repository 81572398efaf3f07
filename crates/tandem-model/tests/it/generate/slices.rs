//! Ranks that generate one text together, each with a slice of the model.

use std::sync::Arc;

use tandem_kernels::DType;
use tandem_model::decode::{Answer, Flow, SingleRank};
use tandem_model::{
    Checkpointing, Decoder, Generator, GeneratorOptions, LayerExecutor, ResidentWeights, Sampling,
    TensorParallelShard,
};

use super::mixture::{Two, three};
use super::{OPTIONS, prompts, sampling};
use crate::support::table::{Rank, Table, on_ranks, read_shard};
use crate::support::{Golden, SCORES, all, cpu};

const LOG_PROBS: GeneratorOptions = GeneratorOptions { log_probs: true, ..OPTIONS };

/// The answers of all ranks, each of which has a slice; with a part, of a mixture with itself.
fn split(
    golden: &Golden,
    count: usize,
    options: &GeneratorOptions,
    sampling: Sampling,
    part: Option<f32>,
) -> Vec<Answer> {
    let table = Table::new(count);
    let whole = Arc::new(golden.decoder.clone());
    let rank = |index: usize| {
        let (device, decoder, weights) = read_shard(golden, &whole, TensorParallelShard { index, count });
        let source = || ResidentWeights::new(&decoder, &weights, None);
        let this = Rank { index, table: &table };
        let walk = LayerExecutor {
            split: Some(&this),
            ..LayerExecutor::new(&decoder, &device, DType::F32, Checkpointing::None)
        };
        let mut generator = match part {
            None => Generator::over(walk, options.clone()).unwrap(),
            Some(part) => Generator::mixed(walk, walk, part, options.clone()).unwrap(),
        };
        let (mut both, requests) = (Two(source(), source()), three(prompts(golden), sampling));
        generator.generate_with(&mut both, &mut SingleRank, requests, &mut |_| Flow::Continue).unwrap()
    };
    let found = on_ranks(0..count, rank);
    assert!(found.iter().all(|answers| *answers == found[0]), "{}: ranks differ", golden.name);
    found.into_iter().next().unwrap()
}

fn whole(golden: &Golden, sampling: Sampling) -> Vec<Answer> {
    let device = cpu();
    let weights = golden.load(&device);
    let mut source = ResidentWeights::new(&golden.decoder, &weights, None);
    let mut generator = Generator::new(&golden.decoder, &device, DType::F32, LOG_PROBS).unwrap();
    let requests = three(prompts(golden), sampling);
    generator.generate(&mut source, requests, &mut |_| Flow::Continue).unwrap()
}

/// The same text, and its log-probabilities but for sums of f32 that are cut anew.
fn same(found: &[Answer], expected: &[Answer], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((found.request, found.answer), (expected.request, expected.answer));
        assert_eq!(found.tokens, expected.tokens, "{what}");
        for (found, expected) in found.log_probs.iter().zip(&expected.log_probs) {
            let error = f64::from((found - expected).abs() / expected.abs().max(1.0));
            assert!(error <= SCORES, "{what}: {found}, expected {expected}");
        }
    }
}

#[test]
fn slices_give_the_text_of_the_whole() {
    let mut checked = 0;
    for &name in all() {
        let golden = Golden::new(name);
        for sampling in [Sampling::GREEDY, sampling()] {
            let expected = whole(&golden, sampling);
            for count in golden.counts() {
                let what = format!("{name} on {count}");
                same(&split(&golden, count, &LOG_PROBS, sampling, None), &expected, &what);
                checked += 1;
            }
        }
    }
    assert!(checked >= 18);
}

/// Steps of few texts, and prompts of few tokens: a rank may have no row of them.
#[test]
fn a_rank_may_have_no_row() {
    for name in ["llama", "gpt2", "phi"] {
        let golden = Golden::new(name);
        let expected = whole(&golden, sampling());
        for (max_batch, cache_tokens) in [(1, 200), (3, 24)] {
            let options = GeneratorOptions { max_batch, cache_tokens, prefill_tokens: 1, ..LOG_PROBS };
            for count in golden.counts() {
                same(&split(&golden, count, &options, sampling(), None), &expected, name);
            }
        }
    }
}

#[test]
fn slices_of_two_models_are_mixed() {
    let golden = Golden::new("llama");
    let expected = whole(&golden, sampling());
    same(&split(&golden, 2, &LOG_PROBS, sampling(), Some(0.5)), &expected, "with itself");
}

#[test]
fn a_slice_alone_is_refused() {
    let (golden, device) = (Golden::new("llama"), cpu());
    let whole = Arc::new(golden.decoder);
    let slice = Decoder::sliced(&whole, TensorParallelShard { index: 1, count: 2 }).unwrap();
    let error = Generator::new(&slice, &device, DType::F32, OPTIONS).err().unwrap().to_string();
    assert_eq!(error, "one of 2 tensor-parallel shards of a decoder cannot run alone");
}
