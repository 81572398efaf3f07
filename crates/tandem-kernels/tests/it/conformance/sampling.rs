use tandem_kernels::ops::{self, Draw, HeadShape};
use tandem_kernels::{DType, Device, KernelError};

use crate::places::Place;
use crate::support::{Matrix, numbers};

fn gpu() -> Device {
    Place::cuda().device(1, 1 << 26)
}

/// Samples from rows of one length, which begin at any element.
fn sampled(device: &Device, rows: &[Vec<f32>], shape: &HeadShape, draws: &[Draw]) -> Vec<Option<u32>> {
    let size = (rows.len(), rows[0].len());
    let logits = Matrix::from_values(device, &rows.concat(), size, DType::F32, 3);
    let tokens = ops::sample(device, logits.view(), shape, draws).unwrap();
    assert!(logits.padding_is_intact(device));
    tokens
}

/// Scale and softcap in f64.
fn shaped(logit: f32, shape: &HeadShape) -> f64 {
    let scaled = f64::from(logit) * f64::from(shape.logit_scale.unwrap_or(1.0));
    shape.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
}

#[test]
fn a_token_is_drawn_at_its_place_among_the_weights() {
    let device = gpu();
    let shapes = [HeadShape::default(), HeadShape { logit_scale: Some(0.3), softcap: Some(4.0) }];
    for (vocabulary, shape) in
        [1, 31, 512, 513, 9001].into_iter().flat_map(|n| shapes.map(|shape| (n, shape)))
    {
        for temperature in [1.0f32, 0.25, 3.0] {
            let uniforms = [0.0, 0.25, 0.5, 0.75, 0.97, 1.0 - 1e-12];
            let row = |seed: u64| -> Vec<f32> {
                let mut row: Vec<f32> = numbers(seed, vocabulary).into_iter().map(|x| 12.0 * x).collect();
                // A mixture leaves tokens out.
                if vocabulary > 30 {
                    row[vocabulary / 2..vocabulary / 2 + 7].fill(f32::NEG_INFINITY);
                }
                row
            };
            let rows: Vec<Vec<f32>> = (0..uniforms.len() as u64).map(row).collect();
            let draws = uniforms.map(|uniform| Draw { temperature, uniform });
            let tokens = sampled(&device, &rows, &shape, &draws);
            assert_eq!(tokens, sampled(&device, &rows, &shape, &draws), "the same again");
            for ((row, token), uniform) in rows.iter().zip(&tokens).zip(uniforms) {
                let largest = row.iter().map(|&l| shaped(l, &shape)).fold(f64::MIN, f64::max);
                let weight = |&l: &f32| ((shaped(l, &shape) - largest) / f64::from(temperature)).exp();
                let weights: Vec<f64> = row.iter().map(weight).collect();
                let (total, token) = (weights.iter().sum::<f64>(), token.expect("numbers") as usize);
                let before: f64 = weights[..token].iter().sum();
                let (at, slack) = (uniform * total, 2e-6 * total);
                assert!(
                    weights[token] > 0.0,
                    "{vocabulary} {temperature} {uniform}: token {token} has no weight"
                );
                assert!(
                    before <= at + slack && at <= before + weights[token] + slack,
                    "{vocabulary} {temperature} {uniform}: token {token} has {before} to {}, not {at}",
                    before + weights[token]
                );
            }
        }
    }
}

#[test]
fn the_likeliest_token_is_the_first_of_equals() {
    let device = gpu();
    let greedy = Draw { temperature: 0.0, uniform: 0.9 };
    for (vocabulary, expected) in [(1, 0), (40, 33), (3000, 1700)] {
        let mut row: Vec<f32> = (0..vocabulary).map(|i| -(i as f32) / 7.0 - 1.0).collect();
        row[expected] = 2.5;
        row[vocabulary - 1] = 2.5;
        let tokens = sampled(&device, &[row.clone(), row], &HeadShape::default(), &[greedy; 2]);
        assert_eq!(tokens, [Some(expected as u32); 2], "of {vocabulary}");
    }
}

#[test]
fn rows_without_a_token_are_told_and_do_not_disturb_others() {
    let device = gpu();
    let good: Vec<f32> = (0..700).map(|i| if i == 600 { 50.0 } else { 0.0 }).collect();
    for temperature in [0.0, 1.0] {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut wrong = good.clone();
            wrong[699] = bad;
            let rows = [good.clone(), wrong, vec![f32::NEG_INFINITY; 700], good.clone()];
            let draws = [Draw { temperature, uniform: 0.5 }; 4];
            let tokens = sampled(&device, &rows, &HeadShape::default(), &draws);
            assert_eq!(tokens, [Some(600), None, None, Some(600)], "{bad} at {temperature}");
        }
    }
}

#[test]
fn wrong_operands_and_a_cpu_are_refused() {
    let device = gpu();
    let refusal = |device: &Device, draws: usize| -> KernelError {
        let logits = Matrix::from_values(device, &[0.0; 6], (2, 3), DType::F32, 0);
        let draws = vec![Draw { temperature: 1.0, uniform: 0.5 }; draws];
        ops::sample(device, logits.view(), &HeadShape::default(), &draws).unwrap_err()
    };
    assert!(matches!(refusal(&device, 3), KernelError::Shape { found_rows: 2, expected_rows: 3, .. }));
    let cpu = Device::cpu(1, 1 << 20).unwrap();
    assert!(refusal(&cpu, 2).to_string().contains("a CPU's host samples by itself"));
}
