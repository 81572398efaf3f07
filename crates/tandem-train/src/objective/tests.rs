//! Values against TRL and the original DPO code; derivatives against central differences.

use serde_json::Value as Json;

use super::*;
use crate::metrics::{MetricSums, Record, Split};

const GOLDENS: &str = include_str!("../../tests/data/losses.json");

fn goldens() -> Json {
    serde_json::from_str(GOLDENS).expect("tests/data/losses.json")
}

fn floats(value: &Json) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

pub(crate) fn config(terms: &[(&str, f64)]) -> ObjectiveConfig {
    let terms = terms
        .iter()
        .map(|&(name, weight)| Term { loss: losses::find(name).expect("a known loss"), weight })
        .collect();
    ObjectiveConfig {
        grpo: None,
        distill: None,
        center_rewards_coefficient: None,
        exploration: 0.0,
        terms,
        beta: 0.1,
        next_betas: Vec::new(),
        beta_every: None,
        label_smoothing: 0.0,
        reference_free: false,
        discopop_tau: 0.05,
        simpo_gamma: 0.5,
        dpop_lambda: 50.0,
        desirable_weight: 1.0,
        undesirable_weight: 1.0,
        ld_alpha: None,
        use_weighting: false,
        divergence: Divergence::ReverseKl,
    }
}

/// A deterministic batch whose log ratios have both signs and several magnitudes.
fn batch(seed: u64) -> (Vec<f64>, Vec<f64>, Vec<u32>) {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let reference: Vec<f64> = (0..12).map(|_| -300.0 * uniform() - 5.0).collect();
    let policy = reference.iter().map(|r| r + 24.0 * (uniform() - 0.5)).collect();
    let tokens = (0..12).map(|_| 1 + (60.0 * uniform()) as u32).collect();
    (policy, reference, tokens)
}

fn totals(tokens: &[u32]) -> BatchTotals {
    let chosen_tokens = tokens.iter().step_by(2).map(|&n| u64::from(n)).sum();
    BatchTotals { pairs: tokens.len() as u64 / 2, chosen_tokens }
}

fn whole(pairs: &PairLogProbs, tokens: &[u32], config: &ObjectiveConfig) -> WholeBatch {
    let mut whole = WholeBatch::from(totals(tokens));
    whole.rewards.beta = config.beta;
    whole.complete(config, pairs);
    whole
}

fn loss_of(policy: &[f64], reference: Option<&[f64]>, tokens: &[u32], config: &ObjectiveConfig) -> Loss {
    let pairs = PairLogProbs {
        policy,
        reference,
        answer_tokens: tokens,
        scored_tokens: tokens,
        ..PairLogProbs::default()
    };
    let mut loss = Loss::default();
    preference_loss(&pairs, &whole(&pairs, tokens, config), config, config.beta, &mut loss);
    loss
}

/// How far a unit in the last place of TRL's f32 log-probabilities moves the mean loss. They reach
/// 1,100, where that unit is 1.2e-4, and enter as differences.
fn rounding(loss: &Loss, policy: &[f64]) -> f64 {
    let moved: f64 = loss.d_log_prob.iter().zip(policy).map(|(d, x)| (d * x).abs()).sum();
    f64::from(f32::EPSILON) * moved / loss.weight
}

/// The tolerance that two correct f32 implementations meet on a loss: 1e-5 of the value.
fn assert_near(found: f64, expected: f64, what: &str) {
    assert_within(found, expected, 1e-5 * expected.abs().max(1.0), what);
}

fn assert_within(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((found - expected).abs() <= tolerance, "{what}: {found}, expected {expected}");
}

#[test]
fn losses_and_reward_metrics_equal_trl() {
    let goldens = goldens();
    let mut cases = 0;
    for (model, golden) in goldens["trl"].as_object().expect("models") {
        let (policy, reference) = (floats(&golden["policy"]), floats(&golden["reference"]));
        let tokens: Vec<u32> = floats(&golden["tokens"]).iter().map(|&n| n as u32).collect();
        for case in golden["cases"].as_array().expect("cases") {
            let terms: Vec<(&str, f64)> = case["terms"]
                .as_object()
                .expect("terms")
                .iter()
                .map(|(name, weight)| (name.as_str(), weight.as_f64().expect("a weight")))
                .collect();
            let mut config = config(&terms);
            config.beta = case["beta"].as_f64().expect("beta");
            config.label_smoothing = case["label_smoothing"].as_f64().expect("label_smoothing");
            config.discopop_tau = case["discopop_tau"].as_f64().expect("discopop_tau");
            let name = format!("{model} {}", case["name"]);
            let loss = loss_of(&policy, Some(&reference), &tokens, &config);
            let expected = case["loss"].as_f64().expect("loss");
            assert_within(loss.mean(), expected, 1e-5 * expected.abs() + rounding(&loss, &policy), &name);

            let mut sums = MetricSums::default();
            let pairs = PairLogProbs {
                policy: &policy,
                reference: Some(&reference),
                answer_tokens: &tokens,
                scored_tokens: &tokens,
                ..PairLogProbs::default()
            };
            sums.add_pairs(&pairs, &config, config.beta);
            let mut record = Record::new(1, Split::Train);
            sums.report(&mut record);
            // A reward is the mean of beta times such a difference.
            let largest = policy.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for (metric, expected) in case["metrics"].as_object().expect("metrics") {
                let found = record.get(metric).expect("a metric of TRL's name");
                let expected = expected.as_f64().expect("a number");
                let tolerance = 1e-5 * expected.abs() + config.beta * f64::from(f32::EPSILON) * largest;
                assert_within(found, expected, tolerance, &format!("{name} {metric}"));
            }
            cases += 1;
        }
    }
    assert_eq!(cases, 42, "every case of the file was checked");
}

#[test]
fn sigmoid_with_smoothing_and_without_reference_equals_mitchell_pair_by_pair() {
    let goldens = &goldens()["mitchell"];
    let (policy, reference) = (floats(&goldens["policy"]), floats(&goldens["reference"]));
    let tokens = vec![1; policy.len()];
    for case in goldens["cases"].as_array().expect("cases") {
        let mut config = config(&[("sigmoid", 1.0)]);
        config.beta = case["beta"].as_f64().expect("beta");
        config.label_smoothing = case["label_smoothing"].as_f64().expect("label_smoothing");
        let reference = (case["reference_free"] == false).then_some(&reference[..]);
        let whole = loss_of(&policy, reference, &tokens, &config);
        assert_near(whole.mean(), case["loss"].as_f64().expect("loss"), &case["name"].to_string());
        for (i, expected) in floats(&case["per_pair"]).into_iter().enumerate() {
            let pair = 2 * i..2 * i + 2;
            let one =
                loss_of(&policy[pair.clone()], reference.map(|r| &r[pair.clone()]), &tokens[pair], &config);
            assert_near(one.sum, expected, &format!("{} pair {i}", case["name"]));
        }
    }
}

/// Values of the paper's equation in float64: `goldens/offline_golden.py`.
#[test]
fn dpop_equals_its_equation_pair_by_pair() {
    let file: Json =
        serde_json::from_str(include_str!("../../../../goldens/small/offline.json")).expect("JSON");
    let golden = &file["dpop"];
    let (policy, reference) = (floats(&golden["policy"]), floats(&golden["reference"]));
    for case in golden["cases"].as_array().expect("cases") {
        let mut config = config(&[("dpop", 1.0)]);
        config.beta = case["beta"].as_f64().expect("beta");
        config.dpop_lambda = case["lambda"].as_f64().expect("lambda");
        let loss = loss_of(&policy, Some(&reference), &[1; 8], &config);
        assert_within(loss.mean(), case["loss"].as_f64().expect("loss"), 1e-12, "loss");
        for (found, expected) in loss.d_log_prob.iter().zip(floats(&case["gradient"])) {
            assert_within(found / loss.weight, expected, 1e-12, "derivative");
        }
    }
}

#[test]
fn derivatives_equal_central_differences() {
    for loss in losses::LOSSES.iter().filter(|loss| !loss.unpaired) {
        for (beta, smoothing) in [(0.1, 0.0f64), (0.5, 0.2), (2.0, 0.001)] {
            let mut config = config(&[(loss.name, 0.7)]);
            config.beta = beta;
            config.label_smoothing =
                if loss.smoothing == Smoothing::Positive { smoothing.max(0.01) } else { smoothing };
            let (policy, reference, tokens) = batch(7);
            let exact = loss_of(&policy, Some(&reference), &tokens, &config).d_log_prob;
            let h = 1e-5;
            for s in 0..policy.len() {
                let at = |offset: f64| {
                    let mut moved = policy.clone();
                    moved[s] += offset;
                    loss_of(&moved, Some(&reference), &tokens, &config).sum
                };
                let (up, down) = (at(h), at(-h));
                let difference = (up - down) / (2.0 * h);
                // Cancellation loses eps·|sum|/h; truncation is O(h²) of a third derivative below
                // ~(β/τ)³ of the value.
                let tolerance = 1e-10 * up.abs().max(1.0) + 1e-6 * difference.abs().max(1e-2);
                assert!(
                    (exact[s] - difference).abs() <= tolerance,
                    "{} beta {beta} sequence {s}: {} against {difference}",
                    loss.name,
                    exact[s]
                );
            }
        }
    }
}

/// No gradient goes through what is estimated over the batch, so it stays as it is.
#[test]
fn derivatives_of_labelled_completions_equal_central_differences() {
    for loss in losses::LOSSES.iter().filter(|loss| loss.unpaired) {
        let mut config = config(&[(loss.name, 0.7)]);
        (config.desirable_weight, config.undesirable_weight) = (1.5, 0.25);
        let (policy, reference, tokens) = batch(5);
        let labels = [true, false, false, true, true, false];
        let pairs = PairLogProbs {
            policy: &policy,
            reference: Some(&reference),
            answer_tokens: &tokens,
            scored_tokens: &tokens,
            labels: &labels,
            ..PairLogProbs::default()
        };
        let mut whole = WholeBatch::from(totals(&tokens));
        let so_far = RewardMean { mean: 0.3, count: 10 };
        whole.rewards = BatchRewards { so_far, beta: config.beta, learns: true };
        whole.complete(&config, &pairs);
        let loss_of = |policy: &[f64]| {
            let mut out = Loss::default();
            preference_loss(&PairLogProbs { policy, ..pairs }, &whole, &config, config.beta, &mut out);
            out
        };
        let exact = loss_of(&policy).d_log_prob;
        for s in 0..policy.len() {
            let at = |offset: f64| {
                let mut moved = policy.clone();
                moved[s] += offset;
                loss_of(&moved).sum
            };
            let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
            let tolerance = 1e-9 + 1e-6 * difference.abs();
            assert!((exact[s] - difference).abs() <= tolerance, "{} sequence {s}", loss.name);
            assert_eq!(exact[s] == 0.0, s % 2 == 1, "{}: a mismatched completion has no gradient", loss.name);
        }
    }
}

#[test]
fn derivatives_of_weighted_pairs_and_of_a_likelihood_of_its_own_equal_central_differences() {
    let config = config(&[("sigmoid", 0.7), ("sft", 0.3), ("ipo", 0.01)]);
    let (policy, reference, tokens) = batch(9);
    let (likelihood, counts) = ([-30.0, -80.5, -4.0, -12.0, -66.0, -9.0], [9, 30, 2, 7, 41, 5]);
    let weights = [0.5, 2.0, 0.125, 1.0, 3.0, 0.75];
    let loss_of = |policy: &[f64], likelihood: &[f64]| {
        let batch = PairLogProbs {
            policy,
            reference: Some(&reference),
            answer_tokens: &tokens,
            scored_tokens: &tokens,
            likelihood: Some(Likelihood { log_prob: likelihood, tokens: &counts }),
            weights: Some(&weights),
            ..PairLogProbs::default()
        };
        let mut out = Loss::default();
        preference_loss(&batch, &totals(&tokens).into(), &config, config.beta, &mut out);
        out
    };
    let exact = loss_of(&policy, &likelihood);
    let near = |found: f64, up: f64, down: f64, what: &str| {
        let difference = (up - down) / 2e-5;
        assert_within(found, difference, 1e-8 + 1e-6 * difference.abs(), what);
    };
    for s in 0..policy.len() {
        let at = |offset: f64| {
            let mut moved = policy.clone();
            moved[s] += offset;
            loss_of(&moved, &likelihood).sum
        };
        near(exact.d_log_prob[s], at(1e-5), at(-1e-5), "a log-probability");
    }
    for i in 0..likelihood.len() {
        let at = |offset: f64| {
            let mut moved = likelihood;
            moved[i] += offset;
            loss_of(&policy, &moved).sum
        };
        near(exact.d_likelihood[i], at(1e-5), at(-1e-5), "a likelihood");
    }
    let mut spread = exact.clone();
    let pairs: Vec<[u32; 2]> = (0..6).map(|i| [2 * i, 2 * i + 1]).collect();
    spread.spread(&pairs, &[12, 13, 14, 15, 16, 17], 18);
    for (i, d) in exact.d_likelihood.iter().enumerate() {
        assert_eq!(
            [spread.d_likelihood[2 * i], spread.d_likelihood[12 + i]],
            [*d; 2],
            "chosen and its prompt"
        );
        assert_eq!(spread.d_likelihood[2 * i + 1], 0.0, "rejected");
    }
}

#[test]
fn a_mean_of_rewards_is_that_of_all_batches() {
    let rewards = [0.5, -1.25, 3.0, 0.0, 2.5];
    let mean = RewardMean::default()
        .with(rewards[..2].iter().sum(), 2)
        .with(0.0, 0)
        .with(rewards[2..].iter().sum(), 3);
    assert_eq!(mean.count, 5);
    assert!((mean.mean - rewards.iter().sum::<f64>() / 5.0).abs() < 1e-15, "{}", mean.mean);
}

const DIVERGENCES: [Divergence; 6] = [
    Divergence::ReverseKl,
    Divergence::ForwardKl,
    Divergence::JensenShannon,
    Divergence::Alpha(0.3),
    Divergence::Alpha(1.0),
    Divergence::Alpha(2.0),
];

#[test]
fn divergences_stand_for_the_ratio_as_their_definitions_say() {
    // f′ at t = π / π_ref, up to the constant that makes it 0 at t = 1.
    let definition = |divergence, t: f64| match divergence {
        Divergence::ReverseKl => t.ln(),
        Divergence::ForwardKl => 1.0 - 1.0 / t,
        Divergence::JensenShannon => (2.0 * t / (1.0 + t)).ln(),
        Divergence::Alpha(1.0) => t.ln(),
        Divergence::Alpha(alpha) => (t.powf(alpha - 1.0) - 1.0) / (alpha - 1.0),
    };
    for divergence in DIVERGENCES {
        for (chosen, rejected) in [(0.0f64, 0.0f64), (1.5, -2.0), (-3.0, 0.25), (6.0, 5.0)] {
            let config = ObjectiveConfig { divergence, ..config(&[("sigmoid", 1.0)]) };
            let found = loss_of(&[chosen - 9.0, rejected - 7.0], Some(&[-9.0, -7.0]), &[5, 6], &config).sum;
            let [chosen, rejected] = [chosen, rejected].map(|ratio| definition(divergence, ratio.exp()));
            let expected = (-0.1 * (chosen - rejected)).exp().ln_1p();
            assert!((found - expected).abs() < 1e-12, "{divergence:?}: {found}, expected {expected}");
        }
    }
}

#[test]
fn derivatives_under_every_divergence_equal_central_differences() {
    for divergence in DIVERGENCES {
        for loss in losses::LOSSES.iter().filter(|loss| loss.any_divergence) {
            let mut config = ObjectiveConfig { divergence, ..config(&[(loss.name, 0.7)]) };
            config.label_smoothing = if loss.smoothing == Smoothing::Positive { 0.01 } else { 0.0 };
            let (reference, tokens) = ([-9.0, -7.0], [5, 6]);
            for policy in [[-8.2, -8.1], [-10.5, -6.6]] {
                let exact = loss_of(&policy, Some(&reference), &tokens, &config).d_log_prob;
                for s in 0..2 {
                    let at = |offset: f64| {
                        let mut moved = policy;
                        moved[s] += offset;
                        loss_of(&moved, Some(&reference), &tokens, &config).sum
                    };
                    let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
                    assert!(
                        (exact[s] - difference).abs() <= 1e-8 + 1e-6 * difference.abs(),
                        "{} {divergence:?} sequence {s}: {} against {difference}",
                        loss.name,
                        exact[s]
                    );
                }
            }
        }
    }
}

#[test]
fn a_batch_may_be_cut_anywhere() {
    let (policy, reference, tokens) = batch(3);
    let config = config(&[("sigmoid", 0.8), ("aot", 0.3), ("aot_unpaired", 0.2), ("sft", 1.0)]);
    let all = PairLogProbs { policy: &policy, reference: Some(&reference), ..PairLogProbs::default() };
    let of_batch = self::whole(&all, &tokens, &config);
    let whole = loss_of(&policy, Some(&reference), &tokens, &config);
    for cut in (2..policy.len()).step_by(2) {
        let (mut sum, mut weight, mut gradient, mut part) = (0.0, 0.0, Vec::new(), Loss::default());
        for range in [0..cut, cut..policy.len()] {
            let pairs = PairLogProbs {
                policy: &policy[range.clone()],
                reference: Some(&reference[range.clone()]),
                answer_tokens: &tokens[range.clone()],
                scored_tokens: &tokens[range.clone()],
                first_pair: range.start / 2,
                ..PairLogProbs::default()
            };
            preference_loss(&pairs, &of_batch, &config, config.beta, &mut part);
            sum += part.sum;
            weight += part.weight;
            gradient.extend_from_slice(&part.d_log_prob);
        }
        assert_eq!((weight, &gradient), (whole.weight, &whole.d_log_prob));
        // The order of one addition differs.
        assert!(
            (sum - whole.sum).abs() <= 1e-14 * whole.sum.abs(),
            "cut at {cut}: {sum} against {}",
            whole.sum
        );
    }
}

#[test]
fn sft_is_a_mean_over_the_tokens_of_the_whole_batch() {
    let (log_prob, tokens) = ([-3.0, -10.0, -1.5], [2, 7, 1]);
    let mut whole = Loss::default();
    likelihood_loss(&log_prob, &tokens, &mut whole);
    assert_eq!((whole.mean(), &whole.d_log_prob[..]), (1.45, &[-1.0; 3][..]));
    let (mut a, mut b) = (Loss::default(), Loss::default());
    likelihood_loss(&log_prob[..1], &tokens[..1], &mut a);
    likelihood_loss(&log_prob[1..], &tokens[1..], &mut b);
    assert_eq!((a.sum + b.sum) / (a.weight + b.weight), whole.mean());
}

#[test]
fn the_value_at_the_start_is_exact() {
    let expected = [
        ("sigmoid", 2f64.ln()),
        ("sigmoid_norm", 2f64.ln()),
        ("robust", 2f64.ln()),
        ("hinge", 1.0),
        ("ipo", 25.0),
        ("nca_pair", 2.0 * 2f64.ln()),
        ("bco_pair", 2.0 * 2f64.ln()),
        ("sppo_hard", 50.0),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("discopop", 0.5 * 2f64.ln() + 0.5),
        ("dpop", 2f64.ln()),
        ("aot", 2f64.ln()),
        ("aot_unpaired", 2f64.ln()),
        ("kto", 0.5),
        ("apo_zero_unpaired", 0.5),
        ("bco", 2f64.ln()),
    ];
    let (policy, _, tokens) = batch(11);
    for (name, value) in expected {
        let config = config(&[(name, 1.0)]);
        let start = exact_at_start(&config).expect("fixed at the start");
        assert!((start - value).abs() < 1e-12, "{name}: {start}, expected {value}");
        // And it is what a batch shows when policy and reference agree.
        assert!((loss_of(&policy, Some(&policy), &tokens, &config).mean() - start).abs() < 1e-12, "{name}");
    }
    let mixed = config(&[("sigmoid", 2.0), ("ipo", 0.1)]);
    assert!((exact_at_start(&mixed).expect("fixed") - (2.0 * 2f64.ln() + 2.5)).abs() < 1e-12);
}

#[test]
fn the_start_is_unknown_for_losses_of_the_log_probability_itself() {
    assert_eq!(exact_at_start(&config(&[("sigmoid", 1.0), ("sft", 1.0)])), None);
    assert_eq!(
        exact_at_start(&ObjectiveConfig { reference_free: true, ..config(&[("sigmoid", 1.0)]) }),
        None
    );
}

#[test]
fn extreme_margins_stay_finite() {
    for loss in losses::LOSSES {
        for margin in [-1e4, -800.0, 800.0, 1e4] {
            let mut config = config(&[(loss.name, 1.0)]);
            config.beta = 1.0;
            config.label_smoothing = if loss.smoothing == Smoothing::Unused { 0.0 } else { 0.1 };
            let found = loss_of(&[margin, 0.0], Some(&[0.0, 0.0]), &[5, 5], &config);
            assert!(
                found.sum.is_finite() && found.d_log_prob.iter().all(|d| d.is_finite()),
                "{} {margin}",
                loss.name
            );
        }
    }
}

#[test]
fn a_nan_log_probability_reaches_every_loss() {
    for loss in losses::LOSSES {
        let mut config = config(&[(loss.name, 1.0)]);
        config.label_smoothing = if loss.smoothing == Smoothing::Unused { 0.0 } else { 0.1 };
        let found = loss_of(&[f64::NAN, -1.0], Some(&[-1.0, -1.0]), &[5, 5], &config);
        assert!(found.sum.is_nan(), "{} hides a NaN as {}", loss.name, found.sum);
    }
}
