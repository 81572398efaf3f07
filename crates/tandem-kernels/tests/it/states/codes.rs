//! What is kept of a state: codes of 8 bits, the nearest ones, and copies of them.

use tandem_kernels::{
    AdamMoment, Device, MemoryKind, STATE_BLOCK, StateForm, States, StochasticRounding, ops,
};

use super::{LENGTHS, MOMENTS, bits, read, states, wide};
use crate::support::devices;

/// The map as bitsandbytes describes it: of each decade the middles of so many equal steps, zero and one.
fn map(moment: AdamMoment) -> Vec<f64> {
    let mut map = vec![0.0, 1.0];
    for decade in 0..7 {
        let steps = if moment == AdamMoment::First { 1 } else { 2 } << decade;
        for step in 0..steps {
            let middle = 0.1 + 0.9 * (f64::from(step) + 0.5) / f64::from(steps);
            let value = middle * 10f64.powi(decade - 6);
            map.push(value);
            if moment == AdamMoment::First {
                map.push(-value);
            }
        }
    }
    map.sort_by(f64::total_cmp);
    map
}

/// Output of bitsandbytes 0.50.2:
/// ```python
/// for signed in (True, False):
///     m = bitsandbytes.functional.create_dynamic_map(signed).double()
///     print(len(m), m.abs().sum().item(), m[3].item(), m[-2].item())
/// ```
#[test]
fn the_codes_are_those_of_bitsandbytes() {
    let device = Device::cpu(1, 1 << 24).unwrap();
    for (moment, sum, places) in [
        (AdamMoment::First, 75.105_263_172_000_26, [-0.950_781_226_158_142_1, 0.992_968_738_079_071]),
        (AdamMoment::Second, 75.105_263_243_386_9, [2.124_999_809_893_779_5e-6, 0.996_484_398_841_857_9]),
    ] {
        // Every code's value is in a block that holds 1.
        let wanted: Vec<f32> = map(moment).iter().map(|x| *x as f32).collect();
        assert_eq!(wanted.len(), 256);
        let mut found = read(&device, &states(&device, moment, StateForm::EightBit, &wanted));
        assert_eq!(bits(&found), bits(&wanted), "a code's value is kept as it is");
        found.sort_by(f32::total_cmp);
        found.dedup();
        assert_eq!(found.len(), 256, "all are different");
        let total: f64 = found.iter().map(|x| f64::from(x.abs())).sum();
        assert!((total - sum).abs() < 1e-6, "{moment:?}: {total}");
        for (place, expected) in [3, 254].into_iter().zip(places) {
            let x = f64::from(found[place]);
            assert!(
                (x - expected).abs() < 2e-7 * expected.abs(),
                "{moment:?} {place}: {x}, expected {expected}"
            );
        }
    }
}

/// Checks that a block's largest value is exact and that others have the nearest code, but for f32's
/// rounding of their quotient. A second moment never becomes zero.
pub fn assert_nearest(what: &str, moment: AdamMoment, values: &[f32], found: &[f32]) {
    let map = map(moment);
    for (block, found) in values.chunks(STATE_BLOCK).zip(found.chunks(STATE_BLOCK)) {
        let scale = f64::from(*block.iter().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap());
        for (&x, &y) in block.iter().zip(found) {
            let what = format!("{what}, {moment:?}: {x} in a block up to {scale} is kept as {y}");
            if scale.abs() < 2f64.powi(-100) {
                assert!(y == 0.0, "{what}");
                continue;
            }
            if x == 0.0 || x.abs() == scale.abs() as f32 && block.iter().all(|other| *other != -x) {
                assert!(x == y, "{what}");
                continue;
            }
            let place = f64::from(x) / scale;
            let distance = |c: &f64| (c - place).abs();
            let is_allowed = |c: &&f64| moment == AdamMoment::First || **c > 0.0;
            let nearest = map.iter().filter(is_allowed).map(distance).fold(f64::INFINITY, f64::min);
            let off = distance(&(f64::from(y) / scale));
            assert!(
                off <= nearest + 1e-6 * place.abs() + 1e-12,
                "{what}: off by {off}, {nearest} was possible"
            );
        }
    }
}

#[test]
fn eight_bits_are_the_nearest_code() {
    let device = Device::cpu(1, 1 << 24).unwrap();
    for moment in MOMENTS {
        for len in LENGTHS {
            let values = wide(len as u64, len, moment);
            let kept = states(&device, moment, StateForm::EightBit, &values);
            assert_nearest("written", moment, &values, &read(&device, &kept));
        }
    }
}

#[test]
fn blocks_of_next_to_nothing_are_zero_and_signs_and_ties_are_kept() {
    let device = Device::cpu(1, 1 << 24).unwrap();
    let keep = |moment, values: &[f32]| read(&device, &states(&device, moment, StateForm::EightBit, values));
    for tiny in [0.0, 1e-45, 1e-38, 7e-31] {
        for moment in MOMENTS {
            assert_eq!(keep(moment, &[tiny, 0.0, tiny]), [0.0; 3], "{tiny} {moment:?}");
        }
    }
    assert_eq!(keep(AdamMoment::First, &[-2.0, 1.0, 0.0]), [-2.0, 2.0 * 0.500_781_25, 0.0]);
    // The map reaches 1 on one side only.
    assert_eq!(keep(AdamMoment::First, &[-2.0, 2.0]), [-2.0 * 0.992_968_74, 2.0]);
    assert_eq!(keep(AdamMoment::Second, &[1e-30, 1.0, 0.0]), [3.25e-7, 1.0, 0.0]);
}

#[test]
fn copies_are_what_was_copied_and_others_are_refused() {
    let len = 1000;
    for (isa, device) in devices(1) {
        for moment in MOMENTS {
            for (_, form) in StateForm::NAMES {
                let from = states(&device, moment, form, &wide(1, len, moment));
                let part = STATE_BLOCK..len;
                let mut to = from.zeros_like(&device, MemoryKind::Checkpoint, part.len()).unwrap();
                let room = to.range_mut(0..part.len(), StochasticRounding::default());
                ops::copy_states(&device, from.view().range(part.clone()), room).unwrap();
                let what = format!("{} {moment:?} {form:?}", isa.name());
                assert_eq!(bits(&read(&device, &to)), bits(&read(&device, &from)[part]), "{what}");
            }
        }
    }
    let device = Device::cpu(1, 1 << 28).unwrap();
    let of = |moment, form, len| States::zeros(&device, MemoryKind::Optimizer, moment, form, len).unwrap();
    let from = of(AdamMoment::First, StateForm::EightBit, len);
    for (mut to, start, expected) in [
        (
            of(AdamMoment::First, StateForm::EightBit, 999),
            0,
            "copy_states: 1000 states to copy, room for 999",
        ),
        (of(AdamMoment::First, StateForm::F32, len), 0, "copy_states: states of one form into another"),
        (
            of(AdamMoment::Second, StateForm::EightBit, len),
            0,
            "copy_states: blocks begin elsewhere, or are of another moment",
        ),
        (
            of(AdamMoment::First, StateForm::EightBit, 999),
            1,
            "copy_states: blocks begin elsewhere, or are of another moment",
        ),
    ] {
        let room = to.len();
        let error = ops::copy_states(
            &device,
            from.view().range(start..len),
            to.range_mut(0..room, StochasticRounding::default()),
        );
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
}
