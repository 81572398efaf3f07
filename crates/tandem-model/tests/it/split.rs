//! A decoder split over ranks against the whole one: every architecture, scores and the gradient of every parameter.

use std::sync::Arc;

use crate::support::table::{Rank, Table, on_ranks, read_shard};
use crate::support::{
    self, GRADIENTS, Golden, SCORES, all, bits, forward_keep, relative_error, tensors, train,
};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind, Prediction, Segment, Tensor};
use tandem_model::spec::QkNorm;
use tandem_model::{
    BatchCapacity, Checkpointing, Decoder, FlatWeights, LayerExecutor, LayerId, ModelError, RankOrder,
    ResidentGradients, ResidentWeights, Result, TensorParallelOps, TensorParallelShard, init,
};

/// Scores, which are the same on all ranks, and the gradients put together; each rank reads its slice from the files.
fn split(golden: &Golden, count: usize, dtype: DType, mode: Checkpointing) -> (HeadScores, FlatWeights) {
    let forest = golden.forest();
    let d_log_prob = golden.forest_weights(&forest);
    split_over(golden, count, dtype, mode, &forest, &d_log_prob)
}

/// As [`split`], of any forest.
fn split_over(
    golden: &Golden,
    count: usize,
    dtype: DType,
    mode: Checkpointing,
    forest: &Forest,
    d_log_prob: &[f32],
) -> (HeadScores, FlatWeights) {
    let whole = Arc::new(golden.decoder.clone());
    let read = |shard| read_shard(golden, &whole, shard);
    split_whole(&whole, count, dtype, mode, forest, d_log_prob, &read)
}

/// As [`split`], of any decoder.
fn split_whole(
    whole: &Arc<Decoder>,
    count: usize,
    dtype: DType,
    mode: Checkpointing,
    forest: &Forest,
    d_log_prob: &[f32],
    read: &(dyn Fn(TensorParallelShard) -> (Device, Arc<Decoder>, FlatWeights) + Sync),
) -> (HeadScores, FlatWeights) {
    let table = Table::new(count);
    let rank = |index: usize| {
        let (device, decoder, weights) = read(TensorParallelShard { index, count });
        let copy = (dtype != DType::F32)
            .then(|| weights.compute_copy(&decoder, &device, MemoryKind::Weights, dtype).unwrap());
        let mut source = ResidentWeights::new(&decoder, &weights, copy.as_ref());
        let mut sink = ResidentGradients::zeros(&decoder, &device).unwrap();
        let this = Rank { index, table: &table };
        let walk = LayerExecutor { split: Some(&this), ..LayerExecutor::new(&decoder, &device, dtype, mode) };
        let (scores, _) = support::step(&walk, &mut source, &mut sink, forest, d_log_prob);
        let flat = sink.sums.layers.iter().map(|l| l.view().as_slice::<f32>().to_vec()).collect::<Vec<_>>();
        (scores, flat)
    };
    let found = on_ranks(0..count, rank);
    assert!(found.iter().all(|(scores, _)| *scores == found[0].0), "ranks of {count} differ");
    let decoder = Decoder::sliced(whole, TensorParallelShard { index: 0, count }).unwrap();
    let device = Device::cpu(1, 64 << 20).unwrap();
    let mut joined = FlatWeights::zeros(whole, &device, MemoryKind::Gradients).unwrap();
    for (layer, flat) in whole.layers().into_iter().zip(&mut joined.layers) {
        let index = whole.index(layer);
        let parts: Vec<f32> = found.iter().flat_map(|(_, layers)| layers[index].clone()).collect();
        decoder.join(layer, &parts, flat.view_mut().into_slice());
        same_where_not_split(whole, layer, &found.iter().map(|(_, l)| &l[index][..]).collect::<Vec<_>>());
    }
    (found[0].0.clone(), joined)
}

/// A parameter that every rank holds whole has the same gradient on each, bit for bit.
fn same_where_not_split(whole: &Arc<Decoder>, layer: LayerId, parts: &[&[f32]]) {
    let count = parts.len();
    for param in &whole.layout(layer).params {
        let elements = |index: usize| {
            let decoder = Decoder::sliced(whole, TensorParallelShard { index, count }).unwrap();
            let own = decoder.layout(layer).param(param.part).unwrap();
            parts[index][own.range()].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        if !(TensorParallelShard { index: 0, count }).splits(param.part) {
            assert!((1..count).all(|rank| elements(rank) == elements(0)), "{layer} {:?}", param.part);
        }
    }
}

/// Scores and gradients are those of the whole decoder: only f32 sums are cut anew. Tensors whose gradient is less than `floor`
/// of the largest are held to that.
fn same_numbers(
    decoder: &Decoder,
    (scores, found): (&HeadScores, &FlatWeights),
    (expected, gradients): (&HeadScores, &FlatWeights),
    floor: f32,
    what: &str,
) {
    // A mean of logits of both signs may be of any size: it is held to the size of the log-probs, which is that of the logits.
    let beside = |means: &[f32]| [means, &expected.log_prob].concat();
    for (kind, found, expected) in [
        ("log-probs", &scores.log_prob, &expected.log_prob),
        ("entropies", &scores.entropy, &expected.entropy),
        ("mean logits", &beside(&scores.mean_logit), &beside(&expected.mean_logit)),
    ] {
        let error = relative_error(found, expected);
        assert!(error <= SCORES, "{what}: {kind} {error:.1e}");
    }
    assert_eq!(scores.hit, expected.hit, "{what}");
    let (found, expected) = (tensors(decoder, found), tensors(decoder, gradients));
    let largest = |x: &[f32]| x.iter().fold(0f32, |m, x| m.max(x.abs()));
    let least = expected.iter().map(|(_, x)| largest(x)).fold(0.0, f32::max) * floor;
    for ((tensor, mut found), (_, mut expected)) in found.into_iter().zip(expected) {
        found.push(least);
        expected.push(least);
        let error = relative_error(&found, &expected);
        assert!(error <= GRADIENTS, "{what}: gradient of {tensor} {error:.1e}");
    }
}

#[test]
fn a_split_decoder_scores_and_trains_like_the_whole_one() {
    let mut checked = Vec::new();
    for &name in all() {
        let (golden, device, weights) = Golden::loaded(name);
        let forest = golden.forest();
        let d_log_prob = golden.forest_weights(&forest);
        let decoder = &golden.decoder;
        let (expected, gradients) =
            train(&device, decoder, &weights, DType::F32, Checkpointing::None, &forest, &d_log_prob);
        for count in golden.counts() {
            let (scores, found) = split(&golden, count, DType::F32, Checkpointing::None);
            let what = format!("{name} on {count}");
            same_numbers(decoder, (&scores, &found), (&expected, &gradients), 0.0, &what);
            if (TensorParallelShard { index: 0, count }).keeps_bits() {
                assert_eq!(scores, expected, "{what}");
                assert!(bits(&found) == bits(&gradients), "{what}: gradients differ");
            }
            checked.push((name, count));
        }
    }
    assert!(checked.len() >= 9, "{checked:?}");
}

/// The golden's architecture with eight key/value heads, and weights drawn at random.
fn with_eight_heads(golden: &Golden) -> Arc<Decoder> {
    let mut spec = golden.decoder.spec().clone();
    let attention = &mut spec.attention;
    attention.heads = 8 * (attention.heads / attention.kv_heads);
    attention.kv_heads = 8;
    let (queries, keys) = (attention.query_width(), attention.kv_width());
    if let Some(QkNorm::Full { .. }) = attention.qk_norm {
        attention.qk_norm = Some(QkNorm::Full { queries, keys });
    }
    if let Some(linear) = &mut spec.linear_attention {
        let shape = &mut linear.shape;
        shape.value_heads = 8 * (shape.value_heads / shape.key_heads);
        shape.key_heads = 8;
    }
    // Numbers that eight does not divide.
    spec.mlp.width += 3;
    spec.vocab_size += 5;
    Arc::new(Decoder::new(spec, golden.decoder.positions()).unwrap())
}

#[test]
fn any_number_of_ranks_that_keeps_bits_computes_those_of_one() {
    for &name in all() {
        let golden = Golden::new(name);
        let whole = with_eight_heads(&golden);
        let device = support::cpu();
        let weights = init::init(&whole, &device, MemoryKind::Master, 3).unwrap();
        let forest = golden.forest();
        let d_log_prob = golden.forest_weights(&forest);
        for dtype in [DType::F32, DType::Bf16] {
            let mode = Checkpointing::Selective;
            let (expected, gradients) = train(&device, &whole, &weights, dtype, mode, &forest, &d_log_prob);
            for count in [2, 4, 8] {
                let cut = |decoder: &Arc<Decoder>, device: &Device| {
                    let mut part = FlatWeights::zeros(decoder, device, MemoryKind::Master).unwrap();
                    for (layer, part) in decoder.layers().into_iter().zip(&mut part.layers) {
                        let all = weights.layers[whole.index(layer)].view().as_slice();
                        decoder.cut(layer, all, part.view_mut().into_slice());
                    }
                    part
                };
                let read = |shard| {
                    let device = Device::cpu(1, 64 << 20).unwrap();
                    let decoder = Decoder::sliced(&whole, shard).unwrap();
                    let weights = cut(&decoder, &device);
                    (device, decoder, weights)
                };
                let (scores, found) = split_whole(&whole, count, dtype, mode, &forest, &d_log_prob, &read);
                let what = format!("{name} {dtype} on {count}");
                assert_eq!(scores, expected, "{what}");
                for ((tensor, found), (_, expected)) in
                    tensors(&whole, &found).into_iter().zip(tensors(&whole, &gradients))
                {
                    let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{what}: gradient of {tensor}");
                }
            }
        }
    }
}

/// A rank may hold no token, or none of those that are scored; or nothing may be.
#[test]
fn tokens_need_not_divide_evenly() {
    for name in ["llama-tied", "phi", "gpt2", "gpt-neox", "qwen3"] {
        let golden = Golden::new(name);
        let decoder = &golden.decoder;
        let device = support::cpu();
        let weights = golden.load(&device);
        let text = [&golden.prompt[..], &golden.chosen].concat();
        let counts = golden.counts();
        for (len, scored) in
            [(1, 0..0), (2, 0..1), (3, 1..2), (3, 0..2), (5, 0..0), (7, 0..2), (7, 5..6), (7, 2..5)]
        {
            let mut forest = Forest::sequence(text[..len].to_vec()).unwrap();
            forest.predictions.retain(|p| scored.contains(&p.hidden_row));
            let d_log_prob: Vec<f32> = (1..=forest.predictions.len()).map(|i| 0.3 * i as f32 - 0.5).collect();
            for mode in [Checkpointing::None, Checkpointing::Block] {
                let (expected, gradients) =
                    train(&device, decoder, &weights, DType::F32, mode, &forest, &d_log_prob);
                for &count in &counts {
                    let (scores, found) = split_over(&golden, count, DType::F32, mode, &forest, &d_log_prob);
                    let what = format!("{name} on {count}, {len} tokens, {scored:?} of them scored");
                    // Where a token sees itself alone, the gradient of queries and keys is rounding.
                    same_numbers(decoder, (&scores, &found), (&expected, &gradients), 0.01, &what);
                    if (TensorParallelShard { index: 0, count }).keeps_bits() {
                        assert!(scores == expected && bits(&found) == bits(&gradients), "{what}");
                    }
                }
            }
        }
    }
}

/// Ranks that hold nothing.
struct Dry;

impl TensorParallelOps for Dry {
    fn sum(&self, _: &Device, _: &mut Tensor, _: RankOrder) -> Result<()> {
        Ok(())
    }

    fn gather_rows(&self, _: &Device, _: &mut Tensor, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn gather_tokens(&self, _: &Device, _: &mut Tensor, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn sum_tokens(&self, _: &Device, _: &mut Tensor, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn gather(&self, _: &mut [f64]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn what_is_kept_for_backward_is_divided() {
    const TREES: u32 = 16;
    let golden = Golden::new("llama");
    let whole = Arc::new(golden.decoder.clone());
    let (layers, width) = (whole.spec().num_layers, whole.spec().hidden_size);
    let segment = |i: u32| Segment { range: 16 * i..16 * (i + 1), parent: None, first_position: 0 };
    let num_tokens = 16 * TREES;
    let prediction = |row| Prediction { hidden_row: row, target: 1, sequence: 0 };
    let predictions = (0..num_tokens).map(prediction).collect();
    let tokens = vec![3; num_tokens as usize];
    let forest = Forest::new(tokens, (0..TREES).map(segment).collect(), predictions, 1).unwrap();
    let kept = |count: usize, checkpointing: Checkpointing| {
        let device = Device::meta();
        let decoder = match count {
            1 => whole.clone(),
            _ => Decoder::sliced(&whole, TensorParallelShard { index: 1, count }).unwrap(),
        };
        let weights = init::init(&decoder, &device, MemoryKind::Master, 1).unwrap();
        let mut source = ResidentWeights::new(&decoder, &weights, None);
        let split = (count > 1).then_some(&Dry as &dyn TensorParallelOps);
        let walk =
            LayerExecutor { split, ..LayerExecutor::new(&decoder, &device, DType::F32, checkpointing) };
        let saved = forward_keep(&walk, &mut source, &forest, &mut HeadScores::default()).unwrap();
        let kept = device.memory().current[MemoryKind::Activations as usize];
        drop(saved);
        kept
    };
    for mode in [Checkpointing::Selective, Checkpointing::Block] {
        assert_eq!(2 * kept(2, mode), kept(1, mode), "{mode:?}");
    }
    // The outputs of blocks' norms are not kept at all; what the head reads, each rank keeps.
    let norms = 4 * (2 * layers - 1) * num_tokens as usize * width;
    assert_eq!(2 * kept(2, Checkpointing::None), kept(1, Checkpointing::None) - norms);
}

/// Slices have rows of their own, of which one may have more in a smaller batch.
#[test]
fn a_slice_takes_the_same_memory_for_every_batch() {
    for name in ["llama-tied", "phi", "gpt2", "gpt-neox", "qwen3"] {
        let golden = Golden::new(name);
        let whole = Arc::new(golden.decoder.clone());
        let large = golden.forest();
        let room = BatchCapacity { tokens: large.num_tokens(), scored: large.scored_rows().0.len() };
        let taken = |slice: TensorParallelShard, forest: &Forest, room: BatchCapacity, checkpointing| {
            let device = Device::meta();
            let decoder = Decoder::sliced(&whole, slice).unwrap();
            let weights = init::init(&decoder, &device, MemoryKind::Master, 1).unwrap();
            let mut source = ResidentWeights::new(&decoder, &weights, None);
            let mut sink = ResidentGradients::zeros(&decoder, &device).unwrap();
            let split = Some(&Dry as &dyn TensorParallelOps);
            let walk = LayerExecutor {
                split,
                room,
                ..LayerExecutor::new(&decoder, &device, DType::F32, checkpointing)
            };
            let d_log_prob = vec![1.0; forest.predictions.len()];
            let (_, kept) = support::step(&walk, &mut source, &mut sink, forest, &d_log_prob);
            (kept, device.high_water())
        };
        for index in 0..2 {
            for mode in [Checkpointing::None, Checkpointing::Selective, Checkpointing::Block] {
                let taken =
                    |forest: &Forest| taken(TensorParallelShard { index, count: 2 }, forest, room, mode);
                let expected = taken(&large);
                for len in 2..=large.num_tokens() {
                    let forest = Forest::sequence(large.tokens[..len].to_vec()).unwrap();
                    if forest.predictions.len() <= room.scored {
                        let (kept, high_water) = taken(&forest);
                        assert_eq!(kept, expected.0, "{name} {index} {mode:?}, {len} tokens");
                        // Less where an operation takes less while it runs.
                        assert!(high_water <= expected.1, "{name} {index} {mode:?}, {len} tokens");
                    }
                }
            }
        }
    }
}

#[test]
fn checkpointing_changes_no_bit_of_a_split_decoder() {
    for name in ["llama-tied", "phi", "gpt2", "gpt-neox", "qwen3"] {
        let golden = Golden::new(name);
        for dtype in [DType::F32, DType::Bf16] {
            let (scores, gradients) = split(&golden, 2, dtype, Checkpointing::None);
            for mode in [Checkpointing::Selective, Checkpointing::Block] {
                let (other, others) = split(&golden, 2, dtype, mode);
                assert_eq!(scores, other, "{name} {dtype} {mode:?}");
                assert!(bits(&gradients) == bits(&others), "{name} {dtype} {mode:?}: gradients differ");
            }
        }
    }
}

#[test]
fn slices_are_read_from_files_and_drawn_as_the_whole_is() {
    for &name in all() {
        let golden = Golden::new(name);
        let device = support::cpu();
        let whole = Arc::new(golden.decoder.clone());
        let stored = golden.load(&device);
        let drawn = init::init(&whole, &device, MemoryKind::Master, 3).unwrap();
        for count in golden.counts() {
            let slices: Vec<_> = (0..count)
                .map(|index| Decoder::sliced(&whole, TensorParallelShard { index, count }).unwrap())
                .collect();
            let read = |decoder: &Arc<Decoder>| {
                let files = golden.open().weights(decoder).unwrap();
                files.load(decoder, &device, MemoryKind::Master).unwrap()
            };
            let draw = |decoder: &Arc<Decoder>| init::init(decoder, &device, MemoryKind::Master, 3).unwrap();
            let (read, draw): (Vec<_>, Vec<_>) = slices.iter().map(|d| (read(d), draw(d))).unzip();
            for (index, layer) in whole.layers().into_iter().enumerate() {
                for (expected, slices_of) in [(&stored, &read), (&drawn, &draw)] {
                    let expected: &[f32] = expected.layers[index].view().as_slice();
                    let flat = |w: &FlatWeights| w.layers[index].view().as_slice::<f32>().to_vec();
                    let parts: Vec<Vec<f32>> = slices_of.iter().map(flat).collect();
                    let lengths: Vec<usize> = parts.iter().map(Vec::len).collect();
                    assert_eq!(slices[0].slice_lengths(layer), lengths);
                    for (decoder, part) in slices.iter().zip(&parts) {
                        let mut cut = vec![f32::NAN; part.len()];
                        decoder.cut(layer, expected, &mut cut);
                        assert!(cut == *part, "{name}: slice {:?} of the {layer}", decoder.slice());
                    }
                    let mut joined = vec![0.0; expected.len()];
                    slices[0].join(layer, &parts.concat(), &mut joined);
                    assert!(joined == expected, "{name}: the {layer} of {count}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let golden = Golden::new("llama");
    let whole = Arc::new(golden.decoder.clone());
    let refused =
        Decoder::sliced(&whole, TensorParallelShard { index: 0, count: 4 }).unwrap_err().to_string();
    assert_eq!(
        refused,
        "4 attention heads with 2 key/value heads cannot be divided evenly among 4 ranks; numbers that divide them: 1, 2"
    );
    let device = support::cpu();
    let decoder = Decoder::sliced(&whole, TensorParallelShard { index: 1, count: 2 }).unwrap();
    let weights = init::init(&decoder, &device, MemoryKind::Master, 1).unwrap();
    let walk = LayerExecutor::new(&decoder, &device, DType::F32, Checkpointing::None);
    let mut source = ResidentWeights::new(&decoder, &weights, None);
    let alone = walk.forward(&mut source, &golden.forest(), &mut HeadScores::default()).unwrap_err();
    assert!(matches!(&alone, ModelError::Invalid(text) if text.contains("shards")), "{alone}");
}
