use serde_json::Value;

use super::*;
use crate::objective::{CorrectionMode, WholeBatch};

/// Numbers of `goldens/grpo/losses.json`, and what TRL makes of them.
struct Golden(Value);

/// Tokens and answers of a case.
struct Numbers {
    sequence: Vec<u32>,
    policy: Vec<f32>,
    sampled: Vec<f32>,
    served: Option<Vec<f32>>,
    entropy: Vec<f32>,
    reference: Option<Vec<f32>>,
    answers: Vec<PolicyAnswer>,
}

impl Golden {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/grpo/losses.json");
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    fn cases(&self) -> &[Value] {
        self.0["cases"].as_array().unwrap()
    }

    fn options(&self, case: &Value) -> (GrpoOptions, f64) {
        let options = &case["options"];
        let number = |name: &str| options[name].as_f64().unwrap();
        let pair = |value: &Value| [value[0].as_f64().unwrap(), value[1].as_f64().unwrap()];
        let loss = PolicyLoss::NAMES.into_iter().find(|(name, _)| *name == options["loss"]).unwrap().1;
        let sampling = match options["importance_sampling"].as_str().unwrap() {
            "token" => ImportanceSampling::Token,
            _ => ImportanceSampling::Sequence,
        };
        let all = GrpoOptions {
            loss,
            importance_sampling: sampling,
            epsilon: number("epsilon"),
            epsilon_high: number("epsilon_high"),
            delta: options["delta"].as_f64(),
            sapo_temperatures: pair(&options["sapo_temperatures"]),
            vespo: [pair(&options["vespo"][0]), pair(&options["vespo"][1])],
            corrects_kl: options["corrects_kl"].as_bool().unwrap(),
            off_policy_mask_threshold: options["off_policy_mask_threshold"].as_f64(),
            top_entropy: options["top_entropy"].as_f64(),
            correction: options["correction"].as_object().map(|correction| SamplerCorrection {
                mode: match correction["mode"].as_str().unwrap() {
                    "token_truncate" => CorrectionMode::TokenTruncate,
                    "token_mask" => CorrectionMode::TokenMask,
                    "sequence_truncate" => CorrectionMode::SequenceTruncate,
                    _ => CorrectionMode::SequenceMask,
                },
                min: correction["min"].as_f64(),
                max: correction["max"].as_f64(),
            }),
            max_new_tokens: self.0["max_new_tokens"].as_u64().unwrap() as usize,
        };
        (all, number("beta"))
    }

    fn numbers(&self, case: &Value) -> Numbers {
        let rows = |name: &str| -> Vec<Vec<f32>> {
            let rows: Vec<Vec<Option<f32>>> =
                serde_json::from_value(self.0["numbers"][name].clone()).unwrap();
            let known = |row: Vec<Option<f32>>| {
                row.into_iter().map(|number| number.unwrap_or(UNKNOWN_LOG_PROB)).collect()
            };
            rows.into_iter().map(known).collect()
        };
        let is_served = !case["options"]["correction"].is_null();
        let is = |name: &str| case["options"][name].as_bool().unwrap();
        let lengths: Vec<usize> = rows("policy").iter().map(Vec::len).collect();
        let advantages = self.0["advantages"]["group"].as_array().unwrap();
        let answer = |(&length, advantage): (&usize, &Value)| PolicyAnswer {
            advantage: advantage.as_f64().unwrap(),
            is_on_policy: is("on_policy"),
            is_masked: is("mask_truncated") && length == self.0["max_new_tokens"].as_u64().unwrap() as usize,
        };
        let sequence = (0..).zip(&lengths).flat_map(|(sequence, &length)| vec![sequence; length]).collect();
        let has_reference = case["options"]["beta"].as_f64() != Some(0.0);
        Numbers {
            sequence,
            policy: rows("policy").concat(),
            sampled: rows("sampled").concat(),
            served: is_served.then(|| rows("served").concat()),
            entropy: rows("entropy").concat(),
            reference: has_reference.then(|| rows("reference").concat()),
            answers: lengths.iter().zip(advantages).map(answer).collect(),
        }
    }
}

impl Numbers {
    fn loss(&self, options: &GrpoOptions, beta: f64, out: &mut Loss) -> PolicyStats {
        self.loss_above(self.least_entropy(options), options, beta, out)
    }

    /// The least entropy of the tokens that are learnt from.
    fn least_entropy(&self, options: &GrpoOptions) -> Option<f32> {
        let is_counted = |&(&sequence, _): &(&u32, &f32)| !self.answers[sequence as usize].is_masked;
        let counted = self.sequence.iter().zip(&self.entropy).filter(is_counted);
        let mut entropies: Vec<f32> = counted.map(|(_, &entropy)| entropy).collect();
        let mut whole = WholeBatch::default();
        whole.set_least_entropy(options.top_entropy?, &mut entropies);
        whole.least_entropy
    }

    fn loss_above(
        &self,
        least_entropy: Option<f32>,
        options: &GrpoOptions,
        beta: f64,
        out: &mut Loss,
    ) -> PolicyStats {
        let tokens = PolicyTokens {
            sequence: &self.sequence,
            policy: &self.policy,
            sampled: &self.sampled,
            served: self.served.as_deref(),
            high_entropy: least_entropy.map(|least| (&self.entropy[..], least)),
            reference: self.reference.as_deref(),
        };
        grpo_loss(&tokens, &self.answers, options, beta, out)
    }

    /// The answers of a range alone.
    fn part(&self, range: std::ops::Range<usize>) -> Self {
        let is_in = |&(_, &sequence): &(usize, &u32)| range.contains(&(sequence as usize));
        let kept: Vec<usize> =
            self.sequence.iter().enumerate().filter(is_in).map(|(token, _)| token).collect();
        let of = |values: &[f32]| kept.iter().map(|&token| values[token]).collect::<Vec<_>>();
        Self {
            sequence: kept.iter().map(|&token| self.sequence[token] - range.start as u32).collect(),
            policy: of(&self.policy),
            sampled: of(&self.sampled),
            served: self.served.as_deref().map(of),
            entropy: of(&self.entropy),
            reference: self.reference.as_deref().map(of),
            answers: self.answers[range].to_vec(),
        }
    }
}

/// The derivative of the mean by each token's log-probability.
fn gradient(numbers: &Numbers, out: &Loss) -> Vec<f64> {
    let of = |(&sequence, own): (&u32, &f64)| (out.d_log_prob[sequence as usize] + own) / out.weight;
    numbers.sequence.iter().zip(&out.d_token).map(of).collect()
}

#[test]
fn loss_gradient_and_metrics_are_trls() {
    let golden = Golden::read();
    let mut losses = Vec::new();
    for case in golden.cases() {
        let ((options, beta), numbers) = (golden.options(case), golden.numbers(case));
        let mut out = Loss::default();
        let stats = numbers.loss(&options, beta, &mut out);
        losses.push(options.loss.name());
        let what = &case["options"];
        let close = |name: &str, found: f64, expected: &Value| {
            let expected = expected.as_f64().unwrap();
            // TRL averages 0 and 1 in f32.
            assert!(
                (found - expected).abs() < 1e-7 * expected.abs().max(1.0),
                "{name} {found}, TRL {expected}: {what}"
            );
        };
        close("loss", out.mean(), &case["loss"]);
        let expected: Vec<Vec<Value>> = serde_json::from_value(case["gradient"].clone()).unwrap();
        for (found, expected) in gradient(&numbers, &out).into_iter().zip(expected.concat()) {
            close("gradient", found, &expected);
        }
        for (name, expected) in case["metrics"].as_object().unwrap() {
            let found = match name.as_str() {
                "entropy" => continue,
                "kl" => stats.kl / stats.tokens,
                "clip_ratio/low_mean" => stats.clipped[0] / stats.ratios,
                "clip_ratio/high_mean" | "cispo_clip_ratio" => stats.clipped[1] / stats.ratios,
                "clip_ratio/region_mean" => (stats.clipped[0] + stats.clipped[1]) / stats.ratios,
                "clip_ratio/low_min" => stats.clipped_range[0],
                "clip_ratio/high_max" => stats.clipped_range[1],
                "vespo/phi_seq_mean" => stats.phi / stats.answers[0],
                "sampling/importance_sampling_ratio/min" => stats.correction.range[0],
                "sampling/importance_sampling_ratio/mean" => stats.correction.sum / stats.correction.count,
                "sampling/importance_sampling_ratio/max" => stats.correction.range[1],
                other => panic!("TRL reports {other}"),
            };
            close(name, found, expected);
        }
    }
    for (name, _) in PolicyLoss::NAMES {
        assert!(losses.contains(&name), "no case of {name}");
    }
}

/// Where a weight is held, by the same sums with that weight; here for losses that hold none.
#[test]
fn derivatives_are_those_of_finite_differences() {
    const STEP: f32 = 1.0 / 4096.0;
    let golden = Golden::read();
    let mut num_tried = 0;
    for case in golden.cases() {
        let ((options, beta), mut numbers) = (golden.options(case), golden.numbers(case));
        let is_held = matches!(options.loss, PolicyLoss::Cispo | PolicyLoss::Vespo);
        if is_held || numbers.answers[0].is_on_policy {
            continue;
        }
        let mut out = Loss::default();
        numbers.loss(&options, beta, &mut out);
        let expected = gradient(&numbers, &out);
        for token in 0..expected.len() {
            let before = numbers.policy[token];
            let mut means = [STEP, -STEP].map(|step| {
                numbers.policy[token] = before + step;
                numbers.loss(&options, beta, &mut out);
                (f64::from(before + step), out.mean())
            });
            numbers.policy[token] = before;
            means.sort_by(|a, b| a.0.total_cmp(&b.0));
            let found = (means[1].1 - means[0].1) / (means[1].0 - means[0].0);
            let close = (found - expected[token]).abs() < 1e-3 * expected[token].abs().max(1e-3);
            assert!(close, "token {token}: {found}, not {}: {}", expected[token], case["options"]);
            num_tried += 1;
        }
    }
    assert!(num_tried > 200, "{num_tried} derivatives");
}

/// As in TRL, tokens that a server gave no log-probability for say nothing of how far it is off policy.
#[test]
fn tokens_without_a_log_probability_are_no_evidence() {
    let golden = Golden::read();
    let is_corrected = |case: &&Value| !case["options"]["correction"].is_null();
    let case = golden.cases().iter().find(is_corrected).expect("answers of a server");
    let ((mut options, _), mut numbers) = (golden.options(case), golden.numbers(case));
    options.off_policy_mask_threshold = Some(0.5);
    numbers.answers.iter_mut().for_each(|answer| (answer.advantage, answer.is_on_policy) = (-1.0, false));
    // The policy has left both generators far behind.
    numbers.policy.iter_mut().for_each(|log_prob| *log_prob = -9.0);
    numbers.sampled.iter_mut().for_each(|log_prob| *log_prob = -1.0);
    let mut loss = |served: f32| {
        numbers.served.iter_mut().flatten().for_each(|log_prob| *log_prob = served);
        let mut out = Loss::default();
        // Without the divergence to the reference the loss of answers that are left out is 0.
        (numbers.loss(&options, 0.0, &mut out), out.sum)
    };
    let (known, sum) = loss(-1.0);
    assert!(known.known == known.tokens && known.tokens > 0.0 && sum == 0.0, "{known:?} {sum}");
    let (unknown, sum) = loss(UNKNOWN_LOG_PROB);
    assert!(unknown.known == 0.0 && unknown.ratio == 0.0 && sum != 0.0, "{unknown:?} {sum}");
    assert_eq!(unknown.difference, [0.0; 2]);
}

#[test]
fn a_cut_batch_has_the_loss_of_the_whole() {
    let golden = Golden::read();
    for case in golden.cases() {
        let ((options, beta), numbers) = (golden.options(case), golden.numbers(case));
        let [mut whole, mut first, mut second] = [(); 3].map(|()| Loss::default());
        let least = numbers.least_entropy(&options);
        let stats = numbers.loss(&options, beta, &mut whole);
        let parts = [
            numbers.part(0..2).loss_above(least, &options, beta, &mut first),
            numbers.part(2..6).loss_above(least, &options, beta, &mut second),
        ];
        let close = |a: f64, b: f64| {
            assert!((a - b).abs() < 1e-12 * a.abs().max(1.0), "{a}, {b}: {}", case["options"]);
        };
        close(whole.sum, first.sum + second.sum);
        assert_eq!(whole.d_token, [first.d_token, second.d_token].concat());
        assert_eq!(whole.d_log_prob, [first.d_log_prob, second.d_log_prob].concat());
        close(stats.kl, parts[0].kl + parts[1].kl);
        close(whole.weight, options.divisor(6.0, parts[0].tokens + parts[1].tokens));
        // Also where no token of a part counts.
        close(whole.weight, first.weight + second.weight);
        let mut none = numbers.part(0..2);
        none.answers.iter_mut().for_each(|answer| answer.is_masked = true);
        let mut masked = Loss::default();
        let stats = none.loss_above(least, &options, beta, &mut masked);
        assert_eq!((masked.sum, masked.weight), (0.0, options.divisor(2.0, 0.0)));
        assert_eq!(stats.tokens, 0.0);
    }
}
