//! Every architecture against transformers in f64: logits, log-probs, and the gradient of every parameter.
//! The numbers come from `goldens/model_golden.py`.

use crate::support::{GRADIENTS, Golden, SCORES, all, by_sequence, cpu, relative_error, tensors_on, train};

use tandem_kernels::{DType, Device, MemoryKind, ops};
use tandem_model::{Checkpointing, LayerExecutor, ResidentWeights};

/// Runs `check` on every golden and reports all that fail at once.
fn each(mut check: impl FnMut(&Golden) -> Vec<String>) {
    let failures: Vec<String> = all().iter().flat_map(|name| check(&Golden::new(name))).collect();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

fn beyond(golden: &Golden, what: &str, error: f64, tolerance: f64) -> Option<String> {
    (error > tolerance).then(|| format!("{}: {what}: {error:.2e} > {tolerance:.0e}", golden.name))
}

#[test]
fn logits_in_f32() {
    each(|golden| {
        let device = cpu();
        let weights = golden.load(&device);
        let decoder = &golden.decoder;
        let mut source = ResidentWeights::new(decoder, &weights, None);
        let walk = LayerExecutor::new(decoder, &device, DType::F32, Checkpointing::None);
        let mut failures = Vec::new();
        for (side, answer) in [("chosen", &golden.chosen), ("rejected", &golden.rejected)] {
            let forest = golden.sequence(answer);
            let rows: Vec<u32> = (0..forest.num_tokens() as u32).collect();
            let logits = walk.logits(&mut source, &forest, &rows).unwrap();
            let mut logits = ops::read_f32(&device, logits.view()).unwrap();
            ops::shape_logits(&device, &mut logits, &decoder.spec().head.shape).unwrap();
            let error = relative_error(&logits, &golden.expected(&format!("logits/{side}")));
            failures.extend(beyond(golden, &format!("logits of {side}"), error, SCORES));
        }
        failures
    });
}

/// Log-probs and gradients of the tree with a shared prompt; returns what is beyond the tolerances.
fn gradients(golden: &Golden, device: &Device, dtype: DType, tolerances: [f64; 2]) -> Vec<String> {
    let weights = golden.load(device);
    let forest = golden.forest();
    let d_log_prob = golden.forest_weights(&forest);
    let decoder = &golden.decoder;
    let (scores, sums) = train(device, decoder, &weights, dtype, Checkpointing::None, &forest, &d_log_prob);
    let log_prob = by_sequence(&forest, &scores.log_prob);
    let error = relative_error(&log_prob, &golden.expected("log_prob"));
    // Models whose residual stream no norm bounds are worse in anybody's bf16.
    let least = if dtype == DType::Bf16 { golden.autocast.map(|error| 1.5 * error) } else { [0.0; 2] };
    let [log_prob_tolerance, gradient_tolerance] = [0, 1].map(|i| tolerances[i].max(least[i]));
    let mut failures: Vec<String> =
        beyond(golden, "log-probs", error, log_prob_tolerance).into_iter().collect();
    let mut found: Vec<(String, Vec<f32>)> = tensors_on(device, decoder, &sums);
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let names: Vec<&String> = found.iter().map(|(name, _)| name).collect();
    assert_eq!(names, golden.parameters().iter().collect::<Vec<_>>(), "{}", golden.name);
    for (name, gradient) in &found {
        let error = relative_error(gradient, &golden.expected(&format!("gradient/{name}")));
        failures.extend(beyond(golden, &format!("gradient of {name}"), error, gradient_tolerance));
    }
    failures
}

#[test]
fn log_probs_and_gradients_of_a_shared_prompt_in_f32() {
    // f32 rounding, relative to each tensor's largest element.
    each(|golden| gradients(golden, &cpu(), DType::F32, [SCORES, GRADIENTS]));
}

#[test]
fn log_probs_and_gradients_of_linear_attention_on_an_emulated_gpu() {
    let device = tandem_cuda_emulator::device(1 << 28).unwrap();
    let failures = gradients(&Golden::new("qwen3-5"), &device, DType::F32, [SCORES, GRADIENTS]);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn log_probs_and_gradients_of_a_shared_prompt_in_bf16() {
    // bf16 has 8 bits (2^-9 = 2e-3 per rounding); two blocks round some ten times on the way to a log-prob, and
    // again on the way back.
    each(|golden| gradients(golden, &cpu(), DType::Bf16, [1e-2, 6e-2]));
}

#[test]
fn entropy_and_mean_logit_agree_with_the_logits() {
    each(|golden| {
        let device = cpu();
        let weights = golden.load(&device);
        let forest = golden.sequence(&golden.chosen);
        let d_log_prob = vec![0.0; forest.predictions.len()];
        let (scores, _) =
            train(&device, &golden.decoder, &weights, DType::F32, Checkpointing::None, &forest, &d_log_prob);
        let logits = golden.expected("logits/chosen");
        let rows = logits.chunks_exact(golden.decoder.spec().vocab_size).skip(golden.prompt.len() - 1);
        let mut entropy = Vec::new();
        let mut mean = Vec::new();
        for row in rows.take(golden.chosen.len()) {
            let total: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            let expected: f64 = row.iter().map(|&l| f64::from(l).exp() / total * f64::from(l)).sum();
            entropy.push((total.ln() - expected) as f32);
            mean.push((row.iter().map(|&l| f64::from(l)).sum::<f64>() / row.len() as f64) as f32);
        }
        let entropy = relative_error(&scores.entropy, &entropy);
        let mean = relative_error(&scores.mean_logit, &mean);
        // A mean of logits of both signs loses digits against its terms: hence ten times the logits' tolerance.
        [beyond(golden, "entropy", entropy, SCORES), beyond(golden, "mean logit", mean, 10.0 * SCORES)]
            .into_iter()
            .flatten()
            .collect()
    });
}

#[test]
fn an_untied_token_table_needs_no_copy_in_the_compute_type() {
    let golden = Golden::new("llama");
    let device = cpu();
    let copy = golden
        .load(&device)
        .compute_copy(&golden.decoder, &device, MemoryKind::Weights, DType::Bf16)
        .unwrap();
    let embedding = golden.decoder.index(tandem_model::LayerId::Embedding);
    assert_eq!(copy.layers[embedding].cols(), 0);
}

#[test]
fn no_look_up_trains_the_row_of_the_padding_token() {
    let gradients = |name, padding: Option<u32>| {
        let golden = Golden::changed(name, 32, |config| config["pad_token_id"] = padding.into());
        let device = cpu();
        let (forest, weights) = (golden.forest(), golden.load(&device));
        let d_log_prob = golden.forest_weights(&forest);
        let decoder = &golden.decoder;
        let (_, sums) =
            train(&device, decoder, &weights, DType::F32, Checkpointing::None, &forest, &d_log_prob);
        (tensors_on(&device, decoder, &sums), decoder.spec().hidden_size, forest.tokens[0])
    };
    // Of `Gemma`, the head is tied; GPT-2's class gives no padding to its table.
    for (name, is_tied, table) in [
        ("llama", false, "model.embed_tokens.weight"),
        ("gemma", true, "model.embed_tokens.weight"),
        ("gpt2", true, "transformer.wte.weight"),
    ] {
        let (plain, width, token) = gradients(name, None);
        let (padded, ..) = gradients(name, Some(token));
        let row = token as usize * width..(token as usize + 1) * width;
        for ((tensor, plain), (_, padded)) in plain.iter().zip(&padded) {
            if tensor != table || name == "gpt2" {
                assert_eq!(plain, padded, "{name}: {tensor}");
                continue;
            }
            assert_eq!(plain[..row.start], padded[..row.start], "{name}");
            assert_eq!(plain[row.end..], padded[row.end..], "{name}");
            assert_ne!(plain[row.clone()], padded[row.clone()], "{name}");
            assert_eq!(padded[row.clone()].iter().all(|&x| x == 0.0), !is_tied, "{name}");
        }
    }
}

/// transformers gives a class's default where the key is absent, and none where it is `null`.
#[test]
fn a_padding_token_of_null_is_none() {
    let padding = |change: &dyn Fn(&mut serde_json::Value)| {
        let golden = Golden::changed("gemma", 32, change);
        golden.decoder.spec().embedding.padding
    };
    let absent = padding(&|config| drop(config.as_object_mut().unwrap().remove("pad_token_id")));
    assert_eq!(absent, Some(0));
    assert_eq!(padding(&|config| config["pad_token_id"] = serde_json::Value::Null), None);
    assert_eq!(padding(&|config| config["pad_token_id"] = 5.into()), Some(5));
    // torch counts from the end.
    let last = Golden::changed("llama", 32, |config| config["pad_token_id"] = (-1).into());
    let spec = last.decoder.spec();
    assert_eq!(spec.embedding.padding, Some(spec.vocab_size as u32 - 1));
}

/// transformers reads neither key for this class.
#[test]
fn gpt_neox_has_no_heads_of_their_own_for_keys_and_values() {
    let change = |config: &mut serde_json::Value| {
        config["num_key_value_heads"] = 2.into();
        config["head_dim"] = 6.into();
    };
    let spec = |golden: Golden| golden.decoder.spec().clone();
    assert_eq!(spec(Golden::changed("gpt-neox", 32, change)), spec(Golden::new("gpt-neox")));
}
