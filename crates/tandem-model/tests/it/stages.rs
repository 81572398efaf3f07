//! The stages of a decoder, one after another, against the whole: every architecture, scores and every gradient.

use std::sync::Arc;

use crate::support::{self, Golden, all, relative_error, train};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, MemoryKind, Tensor};
use tandem_model::{
    Checkpointing, Decoder, FlatWeights, Gradient, LayerExecutor, LayerId, ModelError, PipelineStage,
    PolicyAndReferenceScores, ResidentGradients, ResidentWeights, init,
};

/// One stage with its weights, as they come from the files.
struct Rank {
    decoder: Arc<Decoder>,
    weights: FlatWeights,
    copy: Option<FlatWeights>,
}

impl Rank {
    fn all(golden: &Golden, count: usize, device: &Device, dtype: DType) -> Vec<Self> {
        let whole = Arc::new(golden.decoder.clone());
        let rank = |index| {
            let decoder = Decoder::staged(&whole, PipelineStage { index, count }).unwrap();
            let weights =
                golden.open().weights(&decoder).unwrap().load(&decoder, device, MemoryKind::Master).unwrap();
            let copy = (dtype != DType::F32)
                .then(|| weights.compute_copy(&decoder, device, MemoryKind::Weights, dtype).unwrap());
            Self { decoder, weights, copy }
        };
        (0..count).map(rank).collect()
    }

    fn source(&self) -> ResidentWeights<'_> {
        ResidentWeights::new(&self.decoder, &self.weights, self.copy.as_ref())
    }

    fn walk<'a>(
        &'a self,
        device: &'a Device,
        dtype: DType,
        checkpointing: Checkpointing,
    ) -> LayerExecutor<'a> {
        LayerExecutor::new(&self.decoder, device, dtype, checkpointing)
    }
}

fn numbers(tensor: &Tensor) -> &[f32] {
    tensor.view().as_slice()
}

#[test]
fn stages_score_and_differentiate_as_the_whole_does() {
    for &name in all() {
        let golden = Golden::new(name);
        let (device, forest) = (support::cpu(), golden.forest());
        let d_log_prob = golden.forest_weights(&forest);
        let (whole, count) = (&golden.decoder, golden.decoder.spec().num_layers);
        for (dtype, mode) in [
            (DType::F32, Checkpointing::None),
            (DType::F32, Checkpointing::Block),
            (DType::Bf16, Checkpointing::Selective),
        ] {
            let expected = train(&device, whole, &golden.load(&device), dtype, mode, &forest, &d_log_prob);
            let ranks = Rank::all(&golden, count, &device, dtype);
            let (mut scores, mut kept, mut x) = (HeadScores::default(), Vec::new(), None);
            for rank in &ranks {
                let walk = rank.walk(&device, dtype, mode);
                let out = walk
                    .stage_forward(
                        &mut rank.source(),
                        &forest,
                        x.map(PolicyAndReferenceScores::one),
                        PolicyAndReferenceScores::one(&mut scores),
                        true,
                    )
                    .unwrap();
                (x, _) = (out.0.map(|x| x.policy), kept.push(out.1));
            }
            assert!(x.is_none() && scores == expected.0, "{name} {dtype} {mode:?}: the scores");
            let (mut dx, mut found): (Option<Tensor>, Vec<Vec<Vec<f32>>>) = (None, vec![Vec::new(); count]);
            for (rank, saved) in ranks.iter().zip(kept).rev() {
                let walk = rank.walk(&device, dtype, mode);
                let mut sink = ResidentGradients::zeros(&rank.decoder, &device).unwrap();
                let end = match dx.take() {
                    None => Gradient::OfScores { scores: &scores, d_log_prob: &d_log_prob },
                    Some(dx) => Gradient::OfStream(dx),
                };
                dx = walk.stage_backward(&mut rank.source(), &mut sink, &forest, saved, end).unwrap();
                found[rank.decoder.stage().index] =
                    sink.sums.layers.iter().map(|layer| numbers(layer).to_vec()).collect();
            }
            assert!(dx.is_none(), "{name}: nothing comes before the first stage");
            for layer in whole.layers() {
                let expected = numbers(&expected.1.layers[whole.index(layer)]);
                let holders: Vec<_> = ranks.iter().filter(|r| r.decoder.layers().contains(&layer)).collect();
                let of = |rank: &Rank| &found[rank.decoder.stage().index][rank.decoder.index(layer)];
                match holders[..] {
                    [rank] => {
                        assert_eq!(ranks[0].decoder.owner(layer), rank.decoder.stage().index);
                        assert!(of(rank) == expected, "{name} {dtype} {mode:?}: the {layer}");
                    }
                    [first, last] => {
                        assert!(layer == LayerId::Embedding && whole.spec().head.tied);
                        assert!(first.decoder.owns(layer) && !last.decoder.owns(layer));
                        // Two sums of f32 instead of one, of some 33 terms (scored rows and tokens): 64 roundings of 2^-24.
                        let sum: Vec<f32> = of(first).iter().zip(of(last)).map(|(a, b)| a + b).collect();
                        assert!(
                            relative_error(&sum, expected) <= 64.0 / 16_777_216.0,
                            "{name}: the tied table"
                        );
                    }
                    _ => panic!("{name}: the {layer} is held by {} stages", holders.len()),
                }
            }
        }
    }
}

/// A copy of a tied table is drawn like the first.
#[test]
fn stages_of_random_weights_are_those_of_the_whole() {
    for name in ["llama", "llama-tied", "gpt2"] {
        let whole = Arc::new(Golden::new(name).decoder);
        let device = support::cpu();
        let expected = init::init(&whole, &device, MemoryKind::Master, 7).unwrap();
        for index in 0..2 {
            let decoder = Decoder::staged(&whole, PipelineStage { index, count: 2 }).unwrap();
            let found = init::init(&decoder, &device, MemoryKind::Master, 7).unwrap();
            assert_eq!(found.layers.len(), decoder.layers().len());
            for (layer, flat) in decoder.layers().into_iter().zip(&found.layers) {
                assert!(
                    numbers(flat) == numbers(&expected.layers[whole.index(layer)]),
                    "{name}: the {layer}"
                );
            }
        }
    }
}

#[test]
fn a_stage_refuses_what_is_not_for_it() {
    let golden = Golden::new("llama");
    let (device, forest) = (support::cpu(), golden.forest());
    let ranks = Rank::all(&golden, 2, &device, DType::F32);
    let walks: Vec<_> = ranks.iter().map(|r| r.walk(&device, DType::F32, Checkpointing::None)).collect();
    let scores = &mut HeadScores::default();
    let says = |error: ModelError, expected: &str| {
        assert!(matches!(&error, ModelError::Invalid(text) if text.contains(expected)), "{error}");
    };
    says(walks[0].forward(&mut ranks[0].source(), &forest, scores).unwrap_err(), "stage 0 of 2");
    says(walks[1].logits(&mut ranks[1].source(), &forest, &[0]).err().unwrap(), "stage 1 of 2");
    let alone = walks[1].stage_forward(
        &mut ranks[1].source(),
        &forest,
        None,
        PolicyAndReferenceScores::one(scores),
        true,
    );
    says(alone.err().unwrap(), "begins with the residual stream of the stage before");
    let x = || device.zeros(MemoryKind::Activations, forest.num_tokens(), 3, DType::F32).unwrap();
    let wide = walks[1].stage_forward(
        &mut ranks[1].source(),
        &forest,
        Some(PolicyAndReferenceScores::one(x())),
        PolicyAndReferenceScores::one(scores),
        true,
    );
    says(wide.err().unwrap(), "a stage was given");
    let first = walks[0].stage_forward(
        &mut ranks[0].source(),
        &forest,
        Some(PolicyAndReferenceScores::one(x())),
        PolicyAndReferenceScores::one(scores),
        true,
    );
    says(first.err().unwrap(), "every stage but the first");
    let (_, saved) = walks[0]
        .stage_forward(&mut ranks[0].source(), &forest, None, PolicyAndReferenceScores::one(scores), true)
        .unwrap();
    let mut sink = ResidentGradients::zeros(&ranks[0].decoder, &device).unwrap();
    let end = Gradient::OfScores { scores, d_log_prob: &golden.forest_weights(&forest) };
    let back = walks[0].stage_backward(&mut ranks[0].source(), &mut sink, &forest, saved, end);
    says(back.err().unwrap(), "the last stage begins backward with its scores");
}
