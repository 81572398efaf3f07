//! Low-rank terms against the model that has them in its matrices: the same scores, and the gradients that follow from that
//! model's by the chain rule, in f64.

use std::sync::Arc;

use crate::support::adapted::{Adapted, RANK, adapter_weights, config};
use crate::support::{GRADIENTS, Golden, SCORES, all, relative_error, step, train};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind};
use tandem_model::{
    Adapter, AdapterConfig, AdapterKind, Checkpointing, Decoder, FlatWeights, LayerExecutor, LayerId,
    ParamKind, PolicyAndReferenceScores, ResidentGradients, ResidentWeights, Targets, WeightSource, adapter,
};

/// One parameter in f64.
fn param(
    weights: &FlatWeights,
    decoder: &Decoder,
    layer: LayerId,
    part: ParamKind,
    trained: bool,
) -> Option<Vec<f64>> {
    let layout = if trained { decoder.trained(layer) } else { decoder.layout(layer) };
    let param = layout.param(part)?;
    let flat = weights.layers[decoder.index(layer)].view().as_slice::<f32>();
    Some(flat[param.range()].iter().map(|&x| f64::from(x)).collect())
}

/// Low-rank term of a site's rows of a matrix, in f64.
struct Merged {
    /// `W + s B A`, `[rows, cols]`.
    sum: Vec<f64>,
    /// By row: magnitude over norm, or 1.
    factor: Vec<f64>,
    norm: Vec<f64>,
}

fn merge(w: &[f64], a: &[f64], b: &[f64], m: Option<&[f64]>, scale: f64, cols: usize) -> Merged {
    let rows = w.len() / cols;
    let mut sum = w.to_vec();
    for row in 0..rows {
        for col in 0..cols {
            sum[row * cols + col] +=
                scale * (0..RANK).map(|k| b[row * RANK + k] * a[k * cols + col]).sum::<f64>();
        }
    }
    let norm: Vec<f64> = sum.chunks(cols).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect();
    let factor = norm.iter().enumerate().map(|(row, norm)| m.map_or(1.0, |m| m[row] / norm)).collect();
    Merged { sum, factor, norm }
}

/// Checks scores and every gradient of an adapter against the merged model's.
fn check(name: &'static str, config: AdapterConfig) {
    let (golden, device, base) = Golden::loaded(name);
    let adapter = Adapter::new(config.clone(), golden.decoder.spec()).unwrap();
    let scale = f64::from(adapter.scale());
    let decoder = golden.decoder.clone().with_adapter(adapter.clone());
    let weights = adapter_weights(&decoder, &device, &base);
    // The model with the terms in its matrices.
    let mut merged = golden.load(&device);
    let mut sites = Vec::new();
    for layer in decoder.layers() {
        for saved in &decoder.trained(layer).params {
            if let Some(own) = golden.decoder.layout(layer).param(saved.part) {
                let values = param(&weights, &decoder, layer, saved.part, true).unwrap();
                let flat = merged.layers[decoder.index(layer)].view_mut().into_slice::<f32>();
                flat[own.range()].iter_mut().zip(values).for_each(|(to, from)| *to = from as f32);
            }
        }
        for adapted in adapter.matrices() {
            let Some(own) = golden.decoder.layout(layer).param(adapted.part).copied() else { continue };
            let parts = adapted.part.low_rank().unwrap();
            let of = |part| param(&weights, &decoder, layer, part, true);
            let Some((a, b)) = of(parts.a).zip(of(parts.b)) else { continue };
            let m = parts.magnitude.and_then(of);
            let w = param(&base, &golden.decoder, layer, adapted.part, false).unwrap();
            for (index, site) in adapted.sites.iter().enumerate() {
                let cols = own.cols;
                let (w, a, b) = if adapted.part == ParamKind::TokenTable {
                    // The table's term is A's row times B transposed.
                    let vocab = own.rows;
                    let transposed: Vec<f64> =
                        (0..RANK * cols).map(|i| b[i % cols * RANK + i / cols]).collect();
                    (w[..vocab * cols].to_vec(), transposed, a.clone())
                } else {
                    (
                        w[site.rows.start * cols..site.rows.end * cols].to_vec(),
                        a[index * RANK * cols..(index + 1) * RANK * cols].to_vec(),
                        b[site.b_rows.start * RANK..site.b_rows.end * RANK].to_vec(),
                    )
                };
                let m = m.as_ref().map(|m| &m[site.b_rows.clone()]);
                let made = merge(&w, &a, &b, m, scale, cols);
                let flat = merged.layers[decoder.index(layer)].view_mut().into_slice::<f32>();
                let start = own.offset + site.rows.start * cols;
                for (i, x) in made.sum.iter().enumerate() {
                    flat[start + i] = (made.factor[i / cols] * x) as f32;
                }
                sites.push((layer, adapted.part, index, site.clone(), a, b, made));
            }
        }
    }
    let forest = golden.forest();
    let d_log_prob = golden.forest_weights(&forest);
    let (scores, gradients) =
        train(&device, &golden.decoder, &merged, DType::F32, Checkpointing::None, &forest, &d_log_prob);
    for mode in [Checkpointing::None, Checkpointing::Block] {
        let (found_scores, found) =
            run(&device, &decoder, &base, &weights, DType::F32, mode, &forest, &d_log_prob);
        let error = relative_error(&found_scores.log_prob, &scores.log_prob);
        assert!(error <= SCORES, "{name} {config:?}: scores {error:.1e}");
        for (layer, part, index, site, a, b, made) in &sites {
            let cols = a.len() / RANK;
            let dw = param(&gradients, &golden.decoder, *layer, *part, false).unwrap();
            let dw = &dw[site.rows.start * cols..site.rows.end * cols];
            let dsum: Vec<f64> = dw.iter().enumerate().map(|(i, d)| made.factor[i / cols] * d).collect();
            let rows = dsum.len() / cols;
            let mut da = vec![0.0; RANK * cols];
            let mut db = vec![0.0; rows * RANK];
            for row in 0..rows {
                for k in 0..RANK {
                    for col in 0..cols {
                        da[k * cols + col] += scale * b[row * RANK + k] * dsum[row * cols + col];
                        db[row * RANK + k] += scale * a[k * cols + col] * dsum[row * cols + col];
                    }
                }
            }
            let parts = part.low_rank().unwrap();
            let own = |part| param(&found, &decoder, *layer, part, true).unwrap();
            let (found_a, found_b) = (own(parts.a), own(parts.b));
            let (found_a, found_b) = if *part == ParamKind::TokenTable {
                let transposed = (0..RANK * cols).map(|i| found_b[i % cols * RANK + i / cols]).collect();
                (transposed, found_a)
            } else {
                let a = found_a[index * RANK * cols..(index + 1) * RANK * cols].to_vec();
                (a, found_b[site.b_rows.start * RANK..site.b_rows.end * RANK].to_vec())
            };
            close(&found_a, &da, &format!("{name} {layer} {part:?} A {config:?}"));
            close(&found_b, &db, &format!("{name} {layer} {part:?} B {config:?}"));
            if let Some(magnitude) = parts.magnitude.filter(|_| config.kind == AdapterKind::Dora) {
                let dm: Vec<f64> = (0..rows)
                    .map(|row| {
                        let range = row * cols..(row + 1) * cols;
                        let dot: f64 =
                            dw[range.clone()].iter().zip(&made.sum[range]).map(|(d, w)| d * w).sum();
                        dot / made.norm[row]
                    })
                    .collect();
                close(&own(magnitude)[site.b_rows.clone()], &dm, &format!("{name} {layer} {part:?} m"));
            }
        }
        for &part in adapter.saved() {
            for layer in decoder.layers() {
                let Some(expected) = param(&gradients, &golden.decoder, layer, part, false) else { continue };
                let found = param(&found, &decoder, layer, part, true).unwrap();
                close(&found, &expected, &format!("{name} {layer} {part:?} saved"));
            }
        }
    }
}

/// Two f32 computations of one gradient.
fn close(found: &[f64], expected: &[f64], what: &str) {
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let error = relative_error(&narrow(found), &narrow(expected));
    assert!(error <= GRADIENTS, "{what}: {error:.1e}");
}

fn run(
    device: &Device,
    decoder: &Decoder,
    base: &FlatWeights,
    weights: &FlatWeights,
    dtype: DType,
    mode: Checkpointing,
    forest: &Forest,
    d_log_prob: &[f32],
) -> (HeadScores, FlatWeights) {
    let plain = Decoder::new(decoder.spec().clone(), decoder.positions()).unwrap();
    let copies = |weights: &FlatWeights, decoder: &Decoder| {
        (dtype != DType::F32)
            .then(|| weights.compute_copy(decoder, device, MemoryKind::Weights, dtype).unwrap())
    };
    let (base_copy, copy) = (copies(base, &plain), copies(weights, decoder));
    let base = ResidentWeights::new(&plain, base, base_copy.as_ref());
    let mut source = Adapted { decoder, base, weights, copy: copy.as_ref(), fetched: Vec::new() };
    let mut sink = ResidentGradients::zeros(decoder, device).unwrap();
    let walk = LayerExecutor::new(decoder, device, dtype, mode);
    let (scores, _) = step(&walk, &mut source, &mut sink, forest, d_log_prob);
    (scores, sink.sums)
}

#[test]
fn lora_is_the_merged_model_in_every_family() {
    for &name in all() {
        check(name, config(AdapterKind::Lora, Targets::AllLinear, &[]));
    }
}

#[test]
fn dora_is_the_merged_model_in_every_family() {
    for &name in all() {
        check(name, config(AdapterKind::Dora, Targets::AllLinear, &[]));
    }
}

#[test]
fn some_modules_of_a_fused_matrix_are_adapted() {
    for kind in [AdapterKind::Lora, AdapterKind::Dora] {
        for name in ["llama", "llama-biases", "qwen2-window", "qwen3"] {
            let names = ["q_proj", "v_proj", "up_proj"].map(str::to_owned).to_vec();
            check(name, config(kind, Targets::Names(names), &["input_layernorm", "o_proj"]));
        }
    }
}

#[test]
fn tables_norms_and_heads_train_too() {
    let names = |names: &[&str]| Targets::Names(names.iter().map(|&n| n.to_owned()).collect());
    check("llama", config(AdapterKind::Lora, names(&["embed_tokens", "down_proj"]), &["norm", "lm_head"]));
    check("gpt2", config(AdapterKind::Lora, names(&["c_fc"]), &["wte", "ln_1", "ln_f"]));
    check("gemma", config(AdapterKind::Lora, names(&["gate_proj"]), &["embed_tokens"]));
    check("phi", config(AdapterKind::Lora, names(&["embed_tokens", "dense"]), &["lm_head"]));
}

#[test]
fn a_fresh_adapter_changes_nothing_and_the_base_goes_along() {
    for name in ["llama", "llama-tied", "phi", "gpt2", "qwen3"] {
        for kind in [AdapterKind::Lora, AdapterKind::Dora] {
            for dtype in [DType::F32, DType::Bf16] {
                let (golden, device, base) = Golden::loaded(name);
                let adapter =
                    Adapter::new(config(kind, Targets::AllLinear, &[]), golden.decoder.spec()).unwrap();
                let decoder = Arc::new(golden.decoder.clone().with_adapter(adapter));
                let copies = |weights: &FlatWeights, decoder: &Decoder| {
                    (dtype != DType::F32)
                        .then(|| weights.compute_copy(decoder, &device, MemoryKind::Weights, dtype).unwrap())
                };
                let base_copy = copies(&base, &golden.decoder);
                let mut weights = FlatWeights::zeros(&decoder, &device, MemoryKind::Master).unwrap();
                let mut plain = ResidentWeights::new(&golden.decoder, &base, base_copy.as_ref());
                for (index, layer) in decoder.layers().into_iter().enumerate() {
                    let flat = &mut weights.layers[index];
                    adapter::init_layer(&decoder, layer, 7, flat.view_mut().into_slice());
                    let own = plain.fetch(layer).unwrap();
                    adapter::copy_base(&decoder, &device, None, &own, layer, flat).unwrap();
                }
                let copy = copies(&weights, &decoder);
                let forest = golden.forest();
                let walk = LayerExecutor::new(&golden.decoder, &device, dtype, Checkpointing::None);
                let mut expected = HeadScores::default();
                walk.forward(&mut plain, &forest, &mut expected).unwrap();
                let mut source = Adapted {
                    decoder: &decoder,
                    base: plain,
                    weights: &weights,
                    copy: copy.as_ref(),
                    fetched: Vec::new(),
                };
                let walk = LayerExecutor::new(&decoder, &device, dtype, Checkpointing::None);
                let (mut scores, mut reference) = (HeadScores::default(), HeadScores::default());
                let streams =
                    PolicyAndReferenceScores { policy: &mut scores, reference: Some(&mut reference) };
                walk.stage_forward(&mut source, &forest, None, streams, false).unwrap();
                assert_eq!(reference, expected, "{name} {dtype}: the base by itself");
                match kind {
                    AdapterKind::Lora => assert_eq!(scores, expected, "{name} {dtype}: fresh LoRA"),
                    // The residual is added after the scaling, not within the product.
                    AdapterKind::Dora => {
                        let error = relative_error(&scores.log_prob, &expected.log_prob);
                        let most = if dtype == DType::F32 { SCORES } else { 1e-2 };
                        assert!(error <= most, "{name} {dtype}: fresh DoRA {error:.1e}");
                    }
                }
                // Each layer once for both; the head's norm, and its matrix wherever that is.
                let num_blocks = decoder.spec().num_layers;
                assert_eq!(source.fetched.len(), num_blocks + 3, "{name}: {:?}", source.fetched);
            }
        }
    }
}
