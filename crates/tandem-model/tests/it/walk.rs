//! Properties of forward and backward that hold for every architecture.

use std::cell::RefCell;

use crate::support::{
    self, GRADIENTS, Golden, SCORES, all, backward, bits, by_sequence, cpu, forward_keep, relative_error,
    tensors, train,
};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind};
use tandem_model::{
    BatchCapacity, Checkpointing, Decoder, FlatWeights, GradientSink, LayerExecutor, LayerGradients, LayerId,
    LayerWeights, ResidentGradients, ResidentWeights, Result, WeightSource, init,
};

const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

#[test]
fn a_shared_prompt_scores_and_trains_like_two_sequences() {
    for &name in all() {
        let (golden, device, weights) = Golden::loaded(name);
        let decoder = &golden.decoder;
        let run = |forest: &Forest, d: &[f32]| {
            train(&device, decoder, &weights, DType::F32, Checkpointing::None, forest, d)
        };
        let tree = golden.forest();
        let (scores, gradients) = run(&tree, &golden.forest_weights(&tree));
        let (chosen_weights, rejected_weights) = golden.weights.split_at(golden.chosen.len());
        let (chosen, chosen_gradients) = run(&golden.sequence(&golden.chosen), chosen_weights);
        let (rejected, rejected_gradients) = run(&golden.sequence(&golden.rejected), rejected_weights);
        let separate = [chosen.log_prob, rejected.log_prob].concat();
        let error = relative_error(&by_sequence(&tree, &scores.log_prob), &separate);
        assert!(error <= SCORES, "{name}: log-probs {error:.1e}: only the order of f32 sums may differ");
        let both = tensors(decoder, &chosen_gradients).into_iter();
        for (((tensor, a), (_, b)), (_, found)) in
            both.zip(tensors(decoder, &rejected_gradients)).zip(tensors(decoder, &gradients))
        {
            let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            let error = relative_error(&found, &sum);
            assert!(
                error <= GRADIENTS,
                "{name}: gradient of {tensor} {error:.1e}: only the order of f32 sums may differ"
            );
        }
    }
}

#[test]
fn checkpointing_changes_no_bit() {
    for &name in all() {
        let (golden, device, weights) = Golden::loaded(name);
        let forest = golden.forest();
        let d_log_prob = golden.forest_weights(&forest);
        for dtype in DTYPES {
            let run = |mode| train(&device, &golden.decoder, &weights, dtype, mode, &forest, &d_log_prob);
            let (scores, gradients) = run(Checkpointing::None);
            for mode in [Checkpointing::Selective, Checkpointing::Block] {
                let (other_scores, other) = run(mode);
                assert_eq!(scores, other_scores, "{name} {dtype} {mode:?}");
                assert!(bits(&gradients) == bits(&other), "{name} {dtype} {mode:?}: gradients differ");
            }
        }
    }
}

#[test]
fn evaluation_scores_as_training_does() {
    let (golden, device, weights) = Golden::loaded("llama");
    let forest = golden.forest();
    let decoder = &golden.decoder;
    let (kept, _) = train(
        &device,
        decoder,
        &weights,
        DType::F32,
        Checkpointing::None,
        &forest,
        &golden.forest_weights(&forest),
    );
    let walk = LayerExecutor::new(decoder, &device, DType::F32, Checkpointing::Block);
    let mut scores = HeadScores::default();
    walk.forward(&mut ResidentWeights::new(decoder, &weights, None), &forest, &mut scores).unwrap();
    assert_eq!(scores, kept);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for dtype in DTYPES {
        let run = |threads| {
            let golden = Golden::new("qwen3");
            let device = Device::cpu(threads, 256 << 20).unwrap();
            let weights = golden.load(&device);
            let forest = golden.forest();
            let d = golden.forest_weights(&forest);
            let (scores, sums) =
                train(&device, &golden.decoder, &weights, dtype, Checkpointing::None, &forest, &d);
            (scores, bits(&sums))
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3), "{dtype}");
    }
}

#[test]
fn nothing_scored_gives_no_gradient_but_walks_every_layer() {
    for name in ["llama", "llama-tied"] {
        let (golden, device, weights) = Golden::loaded(name);
        let mut forest = golden.forest();
        forest.predictions.clear();
        let (scores, sums) =
            train(&device, &golden.decoder, &weights, DType::F32, Checkpointing::Selective, &forest, &[]);
        assert!(scores.log_prob.is_empty() && scores.entropy.is_empty());
        assert!(bits(&sums).iter().all(|&b| f32::from_bits(b) == 0.0));
    }
}

/// Writes down what is asked of a source and a sink, in one order.
struct Witness<'a, T> {
    inner: T,
    calls: &'a RefCell<Vec<(&'static str, LayerId)>>,
}

impl<T: WeightSource> WeightSource for Witness<'_, T> {
    fn prefetch(&mut self, layer: LayerId) -> Result<()> {
        self.calls.borrow_mut().push(("prefetch", layer));
        self.inner.prefetch(layer)
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.calls.borrow_mut().push(("fetch", layer));
        self.inner.fetch(layer)
    }

    fn release(&mut self, layer: LayerId) {
        self.inner.release(layer);
    }
}

impl<T: GradientSink> GradientSink for Witness<'_, T> {
    fn open(&mut self, layer: LayerId) -> Result<LayerGradients<'_>> {
        self.inner.open(layer)
    }

    fn emit(&mut self, layer: LayerId) -> Result<()> {
        self.calls.borrow_mut().push(("emit", layer));
        self.inner.emit(layer)
    }
}

/// Ranks meet in these calls: one that has no batch must make those of one that has.
#[test]
fn an_idle_walk_makes_the_calls_of_one_that_computes_and_every_announced_layer_is_fetched() {
    for &name in all() {
        let (golden, device, weights) = Golden::loaded(name);
        let decoder = &golden.decoder;
        let (dtype, checkpointing) = (DType::F32, Checkpointing::None);
        let walk = LayerExecutor::new(decoder, &device, dtype, checkpointing);
        let calls_of = |forest: Option<&Forest>| {
            let calls = RefCell::new(Vec::new());
            let source = ResidentWeights::new(decoder, &weights, None);
            let source = &mut Witness { inner: source, calls: &calls };
            let sink = ResidentGradients::zeros(decoder, &device).unwrap();
            let sink = &mut Witness { inner: sink, calls: &calls };
            if let Some(forest) = forest {
                let d_log_prob = vec![1.0; forest.predictions.len()];
                support::step(&walk, source, sink, forest, &d_log_prob);
            } else {
                walk.idle_forward(source).unwrap();
                walk.idle_backward(source, sink, None).unwrap();
            }
            calls.into_inner()
        };
        let (forest, mut unscored) = (golden.forest(), golden.forest());
        unscored.predictions.clear();
        let calls = calls_of(Some(&forest));
        assert_eq!(calls, calls_of(None), "{name}");
        assert_eq!(calls, calls_of(Some(&unscored)), "{name}, nothing scored");
        for (place, (what, layer)) in calls.iter().enumerate() {
            assert!(
                *what != "prefetch" || calls[place..].contains(&("fetch", *layer)),
                "{name}: {layer} is announced and never fetched"
            );
        }
    }
}

#[test]
fn gradients_of_a_wrong_length_are_refused() {
    let (golden, device, weights) = Golden::loaded("llama");
    let decoder = &golden.decoder;
    let walk = LayerExecutor::new(decoder, &device, DType::F32, Checkpointing::None);
    let mut source = ResidentWeights::new(decoder, &weights, None);
    let mut sink = ResidentGradients::zeros(decoder, &device).unwrap();
    let (forest, mut scores) = (golden.forest(), HeadScores::default());
    let saved = forward_keep(&walk, &mut source, &forest, &mut scores).unwrap();
    let refused = backward(&walk, &mut source, &mut sink, &forest, saved, &scores, &[1.0]).unwrap_err();
    assert_eq!(refused.to_string(), "1 gradients for 12 predictions");
}

/// Forward and backward, and what they left allocated.
fn step(device: &Device, decoder: &Decoder, weights: &FlatWeights, mode: Checkpointing, forest: &Forest) {
    let d_log_prob = vec![1.0; forest.predictions.len()];
    train(device, decoder, weights, DType::Bf16, mode, forest, &d_log_prob);
}

#[test]
fn a_dry_run_counts_the_memory_that_a_run_takes() {
    for &name in all() {
        let golden = Golden::new(name);
        let forest = golden.forest();
        for mode in [Checkpointing::None, Checkpointing::Selective, Checkpointing::Block] {
            let usage = |device: Device| {
                let weights = init::init(&golden.decoder, &device, MemoryKind::Master, 1).unwrap();
                step(&device, &golden.decoder, &weights, mode, &forest);
                let usage = device.memory();
                let place = |kind: MemoryKind| usage.at_peak[kind as usize];
                (
                    usage.current,
                    place(MemoryKind::Activations),
                    place(MemoryKind::Master),
                    place(MemoryKind::Gradients),
                )
            };
            assert_eq!(usage(Device::meta()), usage(cpu()), "{name} {mode:?}");
        }
    }
}

#[test]
fn checkpointing_takes_less_memory_and_steps_leave_none() {
    let golden = Golden::new("gpt-neox");
    let forest = golden.forest();
    let peak = |mode| {
        let device = cpu();
        let weights = golden.load(&device);
        step(&device, &golden.decoder, &weights, mode, &forest);
        let (after_one, high_water) = (device.memory(), device.high_water());
        step(&device, &golden.decoder, &weights, mode, &forest);
        assert_eq!(device.memory().current[MemoryKind::Activations as usize], 0, "{mode:?}");
        assert_eq!(device.memory(), after_one, "{mode:?}");
        assert_eq!(device.high_water(), high_water, "{mode:?}");
        after_one.at_peak[MemoryKind::Activations as usize]
    };
    let peaks = [Checkpointing::None, Checkpointing::Selective, Checkpointing::Block].map(peak);
    assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
}

/// Forward and backward with room for more: scores, gradients, what is kept between the two, and the highest address.
fn in_room(
    device: &Device,
    golden: &Golden,
    forest: &Forest,
    room: BatchCapacity,
    (dtype, mode): (DType, Checkpointing),
) -> (HeadScores, FlatWeights, [usize; MemoryKind::ALL.len()], usize) {
    let decoder = &golden.decoder;
    let weights = init::init(decoder, device, MemoryKind::Master, 1).unwrap();
    let copy = (dtype != DType::F32)
        .then(|| weights.compute_copy(decoder, device, MemoryKind::Weights, dtype).unwrap());
    let mut source = ResidentWeights::new(decoder, &weights, copy.as_ref());
    let mut sink = ResidentGradients::zeros(decoder, device).unwrap();
    let walk = LayerExecutor { room, ..LayerExecutor::new(decoder, device, dtype, mode) };
    let d_log_prob = vec![1.0; forest.predictions.len()];
    let (scores, kept) = support::step(&walk, &mut source, &mut sink, forest, &d_log_prob);
    (scores, sink.sums, kept, device.high_water())
}

#[test]
fn a_forest_takes_the_memory_of_the_largest_and_gives_the_same_bits() {
    for &name in all() {
        let golden = Golden::new(name);
        let large = golden.forest();
        let small = Forest::sequence(large.tokens[..3].to_vec()).unwrap();
        let room = BatchCapacity { tokens: large.num_tokens(), scored: large.scored_rows().0.len() };
        for dtype in DTYPES {
            for mode in [Checkpointing::None, Checkpointing::Selective, Checkpointing::Block] {
                let run =
                    |device: Device, forest, room| in_room(&device, &golden, forest, room, (dtype, mode));
                let what = format!("{name} {dtype} {mode:?}");
                let taken = |forest, room| {
                    let (_, _, kept, high_water) = run(Device::meta(), forest, room);
                    (kept, high_water)
                };
                let (exact, own) =
                    (taken(&large, BatchCapacity::default()), taken(&small, BatchCapacity::default()));
                assert_eq!(taken(&large, room), exact, "{what}");
                let (kept, high_water) = taken(&small, room);
                // Less where an operation takes less while it runs.
                assert!(kept == exact.0 && high_water <= exact.1, "{what}");
                assert!(
                    own.0[MemoryKind::Activations as usize] < kept[MemoryKind::Activations as usize],
                    "{what}"
                );
                let [(scores, gradients, ..), (others, other, ..)] =
                    [BatchCapacity::default(), room].map(|room| run(cpu(), &small, room));
                assert_eq!(scores, others, "{what}");
                assert!(bits(&gradients) == bits(&other), "{what}: gradients differ");
            }
        }
    }
}
