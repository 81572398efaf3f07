//! Fresh weights from a seed, distributed as in `transformers`, from a generator of our own.
//!
//! Matrices and tables are normal with the config's `initializer_range`, norms 1, biases 0; the decay of
//! linear attention is drawn as its authors did. GPT-2
//! divides the deviation of matrices that write to the residual stream by `√(2·layers)`. Element
//! `i` of a parameter is a function of (seed, layer, parameter, `i`) alone: the same seed gives the
//! same model whatever the number of threads or ranks.

use rayon::prelude::*;
use tandem_kernels::{DType, Device, MemoryKind};

use crate::Result;
use crate::decoder::Decoder;
use crate::layout::{LayerId, ParamKind};
use crate::random::mix;
use crate::spec::NormKind;
use crate::weights::FlatWeights;

/// Makes fresh weights for every layer, in device memory of the given kind.
pub fn init(decoder: &Decoder, device: &Device, kind: MemoryKind, seed: u64) -> Result<FlatWeights> {
    let mut layers = Vec::new();
    for layer in decoder.layers() {
        let mut flat = device.alloc(kind, 1, decoder.layout(layer).len, DType::F32)?;
        device.host_write(flat.view_mut(), |flat| init_layer(decoder, layer, seed, flat))?;
        layers.push(flat);
    }
    Ok(FlatWeights { layers })
}

/// Fills one layer's flat buffer with fresh weights, padding with zero. A tensor-parallel shard is
/// cut from the whole layer.
pub fn init_layer(decoder: &Decoder, layer: LayerId, seed: u64, flat: &mut [f32]) {
    if decoder.slice().count > 1 {
        let whole = decoder.whole();
        let mut layer_flat = vec![0.0; whole.layout(layer).len];
        init_layer(whole, layer, seed, &mut layer_flat);
        decoder.cut(layer, &layer_flat, flat);
        return;
    }
    let spec = decoder.spec();
    flat.fill(0.0);
    for param in &decoder.layout(layer).params {
        let values = &mut flat[param.range()];
        let stream = (decoder.whole().index(layer) as u64) << 32 | param.part as u64;
        let key = mix(mix(seed) ^ stream);
        if matches!(param.part, ParamKind::DeltaDecayBias | ParamKind::DeltaNormWeight) {
            values.fill(1.0);
        } else if param.part == ParamKind::DeltaDecayLog {
            // The logarithm of numbers uniform in 0.01 to 16.
            for (index, value) in values.iter_mut().enumerate() {
                let part = (mix(key ^ index as u64) >> 11) as f64 / (1u64 << 53) as f64;
                *value = (0.01 + part * (16.0 - 0.01)).ln() as f32;
            }
        } else if param.part.is_norm_weight() {
            values.fill(match spec.norm.kind {
                NormKind::Rms { offset } => 1.0 - offset,
                NormKind::Layer { .. } => 1.0,
            });
        } else if param.decay {
            let residual = matches!(
                param.part,
                ParamKind::OutWeight | ParamKind::DownWeight | ParamKind::DeltaOutWeight
            );
            let std = if residual { spec.init.residual_std } else { spec.init.std };
            normal(key, std, values);
        }
    }
}

/// Returns fresh weights of a score head alone, as [`init_layer`] draws them.
pub(crate) fn init_score(decoder: &Decoder, seed: u64) -> Vec<f32> {
    let whole = decoder.whole();
    let layout = whole.layout(LayerId::Head);
    let mut flat = vec![0.0; layout.len];
    init_layer(whole, LayerId::Head, seed, &mut flat);
    layout.param(ParamKind::ScoreWeight).map_or(Vec::new(), |param| flat[param.range()].to_vec())
}

/// Fills `values` with normal numbers of mean 0, a pair from each counter value (Box and Muller,
/// 1958).
pub(crate) fn normal(key: u64, std: f32, values: &mut [f32]) {
    const BLOCK: usize = 1 << 15;
    values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, values)| {
        for (i, pair) in values.chunks_mut(2).enumerate() {
            let counter = ((block * BLOCK) / 2 + i) as u64;
            // In (0, 1] and [0, 1), 53 bits each.
            let radius = (mix(key ^ (2 * counter)) >> 11) as f64 + 1.0;
            let angle = (mix(key ^ (2 * counter + 1)) >> 11) as f64;
            let scale = 1.0 / (1u64 << 53) as f64;
            let radius = f64::from(std) * (-2.0 * (radius * scale).ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * angle * scale).sin_cos();
            pair[0] = (radius * cos) as f32;
            if let Some(second) = pair.get_mut(1) {
                *second = (radius * sin) as f32;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_normal() {
        let mut values = vec![0.0; 200_001];
        normal(mix(7), 0.5, &mut values);
        let n = values.len() as f64;
        let moment = |k: i32| values.iter().map(|&v| f64::from(v).powi(k)).sum::<f64>() / n;
        // Five standard errors of each moment of N(0, 0.5²). The key is fixed: the outcome is the same everywhere.
        assert!(moment(1).abs() < 5.0 * 0.5 / n.sqrt(), "mean {}", moment(1));
        assert!((moment(2) / 0.25 - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "variance {}", moment(2));
        assert!(
            (moment(4) / 0.0625 - 3.0).abs() < 5.0 * (96.0 / n).sqrt(),
            "kurtosis {}",
            moment(4) / 0.0625
        );
    }

    #[test]
    fn neighbouring_seeds_and_streams_share_nothing() {
        let draw = |key: u64| {
            let mut values = vec![0.0; 4096];
            normal(key, 1.0, &mut values);
            values
        };
        let first = draw(mix(mix(1) ^ 5));
        for key in [mix(mix(1) ^ 6), mix(mix(2) ^ 5)] {
            let other = draw(key);
            let dot: f32 = first.iter().zip(&other).map(|(a, b)| a * b).sum();
            // Five standard errors, of fixed keys.
            assert!(dot.abs() < 5.0 * 64.0, "correlation {}", dot / 4096.0);
            assert!(first.iter().zip(&other).all(|(a, b)| a != b));
        }
    }
}
