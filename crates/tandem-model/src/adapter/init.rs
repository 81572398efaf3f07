//! Fresh weights of an adapter from a seed, distributed as in the `peft` library, from a generator
//! of our own.
//!
//! `A` is uniform in `±1/√in` and `B` zero, so that the adapter adds nothing at first. The token
//! table's `A` is zero and its `B` normal. An element is a function of (seed, layer, parameter,
//! module, index) alone: the same seed gives the same adapter whatever the number of ranks, and
//! whatever else is a target.

use rayon::prelude::*;

use crate::decoder::Decoder;
use crate::init::normal;
use crate::layout::{LayerId, ParamKind};
use crate::random::mix;

/// Fills the flat buffer of a layer's trained parameters with fresh weights. Padding, magnitudes
/// and modules that train whole become zero: the latter two follow from the base. A tensor-parallel shard is cut from the whole layer.
///
/// # Panics
/// If the decoder has no adapter, or the buffer is not of the layer's length.
pub fn init_layer(decoder: &Decoder, layer: LayerId, seed: u64, flat: &mut [f32]) {
    let adapter = decoder.adapter().expect("a decoder with an adapter");
    let layout = decoder.trained(layer);
    assert_eq!(flat.len(), layout.len, "the {layer}'s buffer of what trains");
    if decoder.slice().count > 1 {
        let whole = decoder.whole();
        let mut all = vec![0.0; whole.trained(layer).len];
        init_layer(whole, layer, seed, &mut all);
        decoder.cut_trained(layer, &all, flat);
        return;
    }
    flat.fill(0.0);
    let index = decoder.whole().index(layer) as u64;
    let stream = |part: ParamKind, site: u64| mix(mix(mix(seed) ^ (index << 32 | part as u64)) ^ site);
    for adapted in adapter.matrices() {
        let parts = adapted.part.low_rank().expect("it has terms");
        if adapted.part == ParamKind::TokenTable {
            if let Some(b) = layout.param(parts.b) {
                normal(stream(parts.b, 0), 1.0, &mut flat[b.range()]);
            }
            continue;
        }
        let Some(a) = layout.param(parts.a) else { continue };
        let bound = 1.0 / (a.cols as f64).sqrt();
        let len = adapter.config().rank * a.cols;
        for (values, site) in flat[a.range()].chunks_mut(len).zip(&adapted.sites) {
            uniform(stream(parts.a, site.rows.start as u64), bound, values);
        }
    }
}

/// Fills `values` with uniform numbers between `-bound` and `bound`.
fn uniform(key: u64, bound: f64, values: &mut [f32]) {
    const BLOCK: usize = 1 << 15;
    values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, values)| {
        for (value, counter) in values.iter_mut().zip((block * BLOCK) as u64..) {
            let unit = (mix(key ^ counter) >> 11) as f64 / (1u64 << 53) as f64;
            *value = (bound * (2.0 * unit - 1.0)) as f32;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uniform() {
        let mut values = vec![0.0; 100_001];
        uniform(mix(3), 0.25, &mut values);
        let n = values.len() as f64;
        let moment = |k: i32| values.iter().map(|&v| f64::from(v).powi(k)).sum::<f64>() / n;
        assert!(values.iter().all(|v| v.abs() <= 0.25));
        // Five standard errors of each moment of U(-b, b): b²/3 and b⁴·4/45. The key is fixed.
        assert!(moment(1).abs() < 5.0 * (0.0625 / 3.0 / n).sqrt(), "mean {}", moment(1));
        let variance = 0.0625 / 3.0;
        assert!(
            (moment(2) - variance).abs() < 5.0 * (0.0625f64.powi(2) * 4.0 / 45.0 / n).sqrt(),
            "{}",
            moment(2)
        );
        let neighbours: f64 = values.windows(2).map(|w| f64::from(w[0] * w[1])).sum::<f64>() / n;
        assert!(neighbours.abs() < 5.0 * variance / n.sqrt(), "correlation {neighbours}");
    }
}
