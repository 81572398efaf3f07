//! Optimiser states in bf16 and 8 bits against what f32 gives, and against the map that other programs use.

mod support;

use support::{Matrix, devices, numbers};
use tandem_kernels::{DType, Device, Dither, Kind, Moment, STATE_BLOCK, StateForm, States, bf16, ops};

const MOMENTS: [Moment; 2] = [Moment::First, Moment::Second];
/// One element, less than a block, blocks and a bit, more than a block of the kernel and a bit.
const LENGTHS: [usize; 4] = [1, 97, 1000, 16_384 + 1031];

const ADAMW: ops::AdamW =
    ops::AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step: 1 };
const RMSPROP: ops::RmsProp =
    ops::RmsProp { learning_rate: 1e-3, alpha: 0.99, eps: 1e-8, weight_decay: 0.02 };

fn vector(device: &Device, values: &[f32]) -> Matrix {
    Matrix::from_values(device, values, (1, values.len()), DType::F32, 0)
}

fn states(device: &Device, moment: Moment, form: StateForm, values: &[f32]) -> States {
    let mut states = States::zeros(device, Kind::Optimizer, moment, form, values.len()).unwrap();
    states.write(0, values);
    states
}

fn read(states: &States) -> Vec<f32> {
    let mut values = vec![f32::NAN; states.len()];
    states.view().read(&mut values);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Numbers over many magnitudes, each block with one of its own; some are zero.
fn wide(seed: u64, len: usize, moment: Moment) -> Vec<f32> {
    let exponents = numbers(seed + 1000, len);
    let number = |(index, (x, e)): (usize, (&f32, &f32))| {
        let block = 10f32.powi((index / STATE_BLOCK % 9) as i32 * 4 - 20);
        let x = x * 10f32.powf(4.0 * e - 4.0) * block;
        if index % 17 == 3 { 0.0 } else { [x, x.abs()][usize::from(moment == Moment::Second)] }
    };
    numbers(seed, len).iter().zip(&exponents).enumerate().map(number).collect()
}

/// The map as bitsandbytes describes it: of each decade the middles of so many equal steps, zero and one.
fn map(moment: Moment) -> Vec<f64> {
    let mut map = vec![0.0, 1.0];
    for decade in 0..7 {
        let steps = if moment == Moment::First { 1 } else { 2 } << decade;
        for step in 0..steps {
            let middle = 0.1 + 0.9 * (f64::from(step) + 0.5) / f64::from(steps);
            let value = middle * 10f64.powi(decade - 6);
            map.push(value);
            if moment == Moment::First {
                map.push(-value);
            }
        }
    }
    map.sort_by(f64::total_cmp);
    map
}

/// What bitsandbytes 0.50.2 prints:
/// ```python
/// for signed in (True, False):
///     m = bitsandbytes.functional.create_dynamic_map(signed).double()
///     print(len(m), m.abs().sum().item(), m[3].item(), m[-2].item())
/// ```
#[test]
fn the_codes_are_those_of_bitsandbytes() {
    let device = Device::cpu(1, 1 << 24).unwrap();
    for (moment, sum, places) in [
        (Moment::First, 75.105_263_172_000_26, [-0.950_781_226_158_142_1, 0.992_968_738_079_071]),
        (Moment::Second, 75.105_263_243_386_9, [2.124_999_809_893_779_5e-6, 0.996_484_398_841_857_9]),
    ] {
        // Every code's value is in a block that holds 1.
        let wanted: Vec<f32> = map(moment).iter().map(|x| *x as f32).collect();
        assert_eq!(wanted.len(), 256);
        let mut found = read(&states(&device, moment, StateForm::EightBit, &wanted));
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

/// Of each block the largest is kept exactly; others go to the nearest code but for f32's rounding of their place, and a second
/// moment never to zero.
fn assert_nearest(what: &str, moment: Moment, values: &[f32], found: &[f32]) {
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
            let is_allowed = |c: &&f64| moment == Moment::First || **c > 0.0;
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
            assert_nearest("written", moment, &values, &read(&kept));
        }
    }
}

#[test]
fn blocks_of_next_to_nothing_are_zero_and_signs_and_ties_are_kept() {
    let device = Device::cpu(1, 1 << 24).unwrap();
    let keep = |moment, values: &[f32]| read(&states(&device, moment, StateForm::EightBit, values));
    for tiny in [0.0, 1e-45, 1e-38, 7e-31] {
        for moment in MOMENTS {
            assert_eq!(keep(moment, &[tiny, 0.0, tiny]), [0.0; 3], "{tiny} {moment:?}");
        }
    }
    assert_eq!(keep(Moment::First, &[-2.0, 1.0, 0.0]), [-2.0, 2.0 * 0.500_781_25, 0.0]);
    // The map reaches 1 on one side only.
    assert_eq!(keep(Moment::First, &[-2.0, 2.0]), [-2.0 * 0.992_968_74, 2.0]);
    assert_eq!(keep(Moment::Second, &[1e-30, 1.0, 0.0]), [3.25e-7, 1.0, 0.0]);
}

/// What a checkpoint does: to f32 and back.
#[test]
fn what_was_read_is_written_as_it_was_kept() {
    for (isa, device) in devices(1) {
        for form in [StateForm::Bf16, StateForm::EightBit] {
            for len in LENGTHS {
                let mut run = Run::new(&device, form, len);
                for step in 1..=4 {
                    run.adamw(&device, step);
                }
                for (moment, kept) in MOMENTS.into_iter().zip([&run.m, &run.v]) {
                    let values = read(kept);
                    let mut again = States::zeros(&device, Kind::Optimizer, moment, form, len).unwrap();
                    // In parts, as they are read from a file.
                    for start in (0..len).step_by(3 * STATE_BLOCK) {
                        again.write(start, &values[start..len.min(start + 3 * STATE_BLOCK)]);
                    }
                    assert_eq!(bits(&read(&again)), bits(&values), "{} {form:?} {len}", isa.name());
                    // And from any element on.
                    for range in [0..len, len / 3..len, len / 2..len / 2 + 1] {
                        let mut part = vec![0.0; range.len()];
                        kept.view().range(range.clone()).read(&mut part);
                        assert_eq!(bits(&part), bits(&values[range]));
                    }
                }
                // Goes on with the same bits.
                let mut resumed = Run::new(&device, form, len);
                resumed.w = vector(&device, &run.w.read(&device));
                resumed.m.write(0, &read(&run.m));
                resumed.v.write(0, &read(&run.v));
                for step in 5..=6 {
                    run.adamw(&device, step);
                    resumed.adamw(&device, step);
                }
                assert!(run.bits(&device) == resumed.bits(&device), "{} {form:?} {len}", isa.name());
            }
        }
    }
}

/// Weights with states that are updated.
struct Run {
    w: Matrix,
    m: States,
    v: States,
}

impl Run {
    fn new(device: &Device, form: StateForm, len: usize) -> Self {
        let zeros = |moment| States::zeros(device, Kind::Optimizer, moment, form, len).unwrap();
        Self { w: vector(device, &numbers(1, len)), m: zeros(Moment::First), v: zeros(Moment::Second) }
    }

    fn adamw(&mut self, device: &Device, step: u64) {
        let len = self.m.len();
        let grad = vector(device, &wide(10 + step, len, Moment::First));
        let config = ops::AdamW { step, ..ADAMW };
        let m = self.m.range_mut(0..len, Dither::new(&[step, 1], 0));
        let v = self.v.range_mut(0..len, Dither::new(&[step, 2], 0));
        ops::adamw(device, &config, 0.5, grad.view(), self.w.view_mut(), m, v, None).unwrap();
    }

    fn bits(&self, device: &Device) -> Vec<u32> {
        [self.w.read(device), read(&self.m), read(&self.v)].iter().flat_map(|x| bits(x)).collect()
    }
}

/// The same update with states in f32 that hold what the others do moves the weights by the same bits; what is kept is what f32
/// has, rounded.
#[test]
fn an_update_is_that_of_f32_with_its_states_rounded() {
    for (isa, device) in devices(2) {
        for form in [StateForm::Bf16, StateForm::EightBit] {
            for len in LENGTHS {
                let what = format!("{} {form:?} {len}", isa.name());
                let mut run = Run::new(&device, form, len);
                for step in 1..=3 {
                    let mut wide = Run::new(&device, StateForm::F32, len);
                    wide.w = vector(&device, &run.w.read(&device));
                    wide.m.write(0, &read(&run.m));
                    wide.v.write(0, &read(&run.v));
                    run.adamw(&device, step);
                    wide.adamw(&device, step);
                    assert_eq!(bits(&run.w.read(&device)), bits(&wide.w.read(&device)), "{what}: weights");
                    for (moment, kept, exact) in
                        [(Moment::First, &run.m, &wide.m), (Moment::Second, &run.v, &wide.v)]
                    {
                        let (kept, exact) = (read(kept), read(exact));
                        if form == StateForm::EightBit {
                            assert_nearest(&what, moment, &exact, &kept);
                            continue;
                        }
                        for (kept, exact) in kept.iter().zip(&exact) {
                            let [down, up] = [0, 0xffff].map(|add| (exact.to_bits() + add) >> 16 << 16);
                            assert!([down, up].contains(&kept.to_bits()), "{what}: {kept} for {exact}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rmsprop_with_kept_states_is_that_of_f32_with_them_rounded() {
    let len = 1000;
    for (isa, device) in devices(2) {
        for form in [StateForm::Bf16, StateForm::EightBit] {
            let start = wide(3, len, Moment::Second);
            let mut kept = states(&device, Moment::Second, form, &start);
            let mut exact = states(&device, Moment::Second, StateForm::F32, &read(&kept));
            let grad = vector(&device, &wide(4, len, Moment::First));
            let [first, second] = [&mut kept, &mut exact].map(|states| {
                let mut w = vector(&device, &numbers(1, len));
                let v = states.range_mut(0..len, Dither::default());
                ops::rmsprop(&device, &RMSPROP, 1.0, grad.view(), w.view_mut(), v, None).unwrap();
                w.read(&device)
            });
            assert_eq!(bits(&first), bits(&second), "{} {form:?}", isa.name());
            for (kept, exact) in read(&kept).into_iter().zip(read(&exact)) {
                // bf16 has 8 bits; the widest step of the map is 1.4 times its smallest number.
                let allowed = if form == StateForm::Bf16 { 1.0 / 128.0 } else { 1.0 };
                assert!((kept - exact).abs() <= allowed * exact, "{} {form:?}: {kept} {exact}", isa.name());
            }
        }
    }
}

/// The bits do not depend on threads, on the level of instructions (but for what the update itself gives: here nothing is
/// rounded before), or on where the buffer is cut.
#[test]
fn what_is_drawn_depends_on_update_and_place_alone() {
    let len = 40_000;
    let values = numbers(5, len);
    let run = |device: &Device, cuts: &[usize], key: u64| {
        let mut v = States::zeros(device, Kind::Optimizer, Moment::Second, StateForm::Bf16, len).unwrap();
        let mut w = vector(device, &vec![0.0; len]);
        let grad = vector(device, &values);
        // Squares of f32, exact in no level's arithmetic but rounded once in each.
        let config = ops::RmsProp { alpha: 0.0, weight_decay: 0.0, ..RMSPROP };
        for part in cuts.windows(2) {
            let range = part[0]..part[1];
            let (grad, w) = (grad.view().col_range(range.clone()), w.view_mut().col_range(range.clone()));
            let v = v.range_mut(range.clone(), Dither::new(&[key], range.start));
            ops::rmsprop(device, &config, 1.0, grad, w, v, None).unwrap();
        }
        bits(&read(&v))
    };
    let mut first = None;
    for threads in [1, 2, 3] {
        for (isa, device) in devices(threads) {
            for cuts in [&[0, len][..], &[0, 1, 700, 16_384, 20_001, len]] {
                let found = run(&device, cuts, 7);
                let expected = first.get_or_insert_with(|| found.clone());
                assert!(*expected == found, "{} on {threads} threads, {cuts:?}", isa.name());
            }
        }
    }
    let device = Device::cpu(1, 1 << 28).unwrap();
    assert!(first != Some(run(&device, &[0, len], 8)), "another update draws other numbers");
}

/// The mean over many numbers drawn is the number; to the nearest it would be off by up to half a step.
#[test]
fn rounding_is_right_in_the_mean() {
    let device = Device::cpu(1, 1 << 28).unwrap();
    let len = 1 << 16;
    for part in [1.0 / 64.0, 0.25, 0.5, 0.9] {
        // `part` of the way from 1 to the next bf16; AdamW with a beta of 0 keeps the gradient.
        let x = 1.0 + part / 128.0;
        let mut m = States::zeros(&device, Kind::Optimizer, Moment::First, StateForm::Bf16, len).unwrap();
        let [mut w, grad, mut v] = [0.0, x, 0.0].map(|x| vector(&device, &vec![x; len]));
        let config = ops::AdamW { beta1: 0.0, ..ADAMW };
        let all = m.range_mut(0..len, Dither::new(&[1, 2, 3], 0));
        ops::adamw(&device, &config, 1.0, grad.view(), w.view_mut(), all, v.view_mut(), None).unwrap();
        let up = read(&m).iter().filter(|&&m| m > 1.0).count() as f64 / len as f64;
        // Four standard deviations of that many draws.
        let allowed = 4.0 * (f64::from(part) * f64::from(1.0 - part) / len as f64).sqrt();
        assert!((up - f64::from(part)).abs() < allowed, "{up} of them rounded up, expected {part}");
    }
}

/// A second moment moves by a thousandth of its distance: less than half a step of bf16.
#[test]
fn second_moments_in_bf16_follow_those_of_f32_where_rounding_to_nearest_would_stand_still() {
    let device = Device::cpu(2, 1 << 28).unwrap();
    let (len, steps) = (4096, 1500);
    let start = vec![1.0; len];
    let [mut kept, mut exact] =
        [StateForm::Bf16, StateForm::F32].map(|form| states(&device, Moment::Second, form, &start));
    let mut nearest = vec![bf16::from_f32(1.0); len];
    let mut w = vector(&device, &vec![0.0; len]);
    let config = ops::RmsProp { alpha: 0.999, weight_decay: 0.0, ..RMSPROP };
    for step in 0..steps {
        let grad: Vec<f32> = numbers(step, len).iter().map(|x| 0.5 * x).collect();
        let flat = vector(&device, &grad);
        for states in [&mut kept, &mut exact] {
            let v = states.range_mut(0..len, Dither::new(&[step], 0));
            ops::rmsprop(&device, &config, 1.0, flat.view(), w.view_mut(), v, None).unwrap();
        }
        for (v, g) in nearest.iter_mut().zip(&grad) {
            *v = bf16::from_f32(0.999 * v.to_f32() + 0.001 * g * g);
        }
    }
    let mean = |values: &[f32]| values.iter().map(|x| f64::from(*x)).sum::<f64>() / len as f64;
    let [kept, exact] = [kept, exact].map(|states| mean(&read(&states)));
    let nearest = mean(&nearest.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    // The mean of the squares is 1/12: 1500 steps of a thousandth bring 1 to 0.29.
    assert!(exact < 0.3, "{exact}");
    // Rounding scatters single ones by some steps; the mean of 4096 by a 64th of that.
    assert!((kept - exact).abs() < 0.003 * exact, "{kept}, in f32 {exact}");
    assert!(nearest > 0.9, "{nearest}: to the nearest it should have stood still");
}

/// Logistic regression with features of very different sizes: the loss after so many steps.
fn logistic(device: &Device, form: StateForm) -> (f64, f64) {
    let (rows, features) = (256, 700);
    let size = |j: usize| 10f32.powi((j % 5) as i32 - 3);
    let mut x = numbers(1, rows * features);
    x.iter_mut().enumerate().for_each(|(index, x)| *x *= size(index % features));
    let truth: Vec<f32> = numbers(2, features).iter().enumerate().map(|(j, t)| t / size(j)).collect();
    let dot =
        |row: &[f32], w: &[f32]| row.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
    let labels: Vec<f64> =
        x.chunks(features).map(|row| if dot(row, &truth) > 0.0 { 1.0 } else { -1.0 }).collect();
    let mut w = vector(device, &vec![0.0; features]);
    let [mut m, mut v] =
        MOMENTS.map(|moment| States::zeros(device, Kind::Optimizer, moment, form, features).unwrap());
    let mut losses = Vec::new();
    for step in 1..=200 {
        let now = w.read(device);
        let (mut loss, mut grad) = (0.0, vec![0.0; features]);
        for (row, y) in x.chunks(features).zip(&labels) {
            let margin = y * dot(row, &now);
            loss += (-margin).exp().ln_1p() / rows as f64;
            let slope = -y / (1.0 + margin.exp()) / rows as f64;
            grad.iter_mut().zip(row).for_each(|(g, x)| *g += slope as f32 * x);
        }
        losses.push(loss);
        let config = ops::AdamW { learning_rate: 3e-2, weight_decay: 0.0, step, ..ADAMW };
        let m = m.range_mut(0..features, Dither::new(&[step, 1], 0));
        let v = v.range_mut(0..features, Dither::new(&[step, 2], 0));
        let grad = vector(device, &grad);
        ops::adamw(device, &config, 1.0, grad.view(), w.view_mut(), m, v, None).unwrap();
    }
    (losses[0], losses[199])
}

#[test]
fn adamw_learns_as_well_with_fewer_bits() {
    let device = Device::cpu(1, 1 << 28).unwrap();
    let (start, exact) = logistic(&device, StateForm::F32);
    assert!((start - 2f64.ln()).abs() < 1e-9 && exact < 0.1 * start, "{start} to {exact}");
    for form in [StateForm::Bf16, StateForm::EightBit] {
        let (_, found) = logistic(&device, form);
        println!("{form:?}: {found}, in f32 {exact}");
        assert!((found - exact).abs() < 0.1 * exact, "{form:?}: {found}, in f32 {exact}");
    }
}

#[test]
fn copies_are_what_was_copied_and_others_are_refused() {
    let device = Device::cpu(1, 1 << 28).unwrap();
    let len = 1000;
    for moment in MOMENTS {
        for (_, form) in StateForm::NAMES {
            let from = states(&device, moment, form, &wide(1, len, moment));
            let part = STATE_BLOCK..len;
            let mut to = from.zeros_like(&device, Kind::Checkpoint, part.len()).unwrap();
            let room = to.range_mut(0..part.len(), Dither::default());
            ops::copy_states(&device, from.view().range(part.clone()), room).unwrap();
            assert_eq!(bits(&read(&to)), bits(&read(&from)[part]));
        }
    }
    let of = |moment, form, len| States::zeros(&device, Kind::Optimizer, moment, form, len).unwrap();
    let from = of(Moment::First, StateForm::EightBit, len);
    for (mut to, start, expected) in [
        (of(Moment::First, StateForm::EightBit, 999), 0, "copy_states: 1000 states into room for 999"),
        (of(Moment::First, StateForm::F32, len), 0, "copy_states: states of one form into another"),
        (
            of(Moment::Second, StateForm::EightBit, len),
            0,
            "copy_states: blocks begin elsewhere, or are of another moment",
        ),
        (
            of(Moment::First, StateForm::EightBit, 999),
            1,
            "copy_states: blocks begin elsewhere, or are of another moment",
        ),
    ] {
        let room = to.len();
        let error = ops::copy_states(
            &device,
            from.view().range(start..len),
            to.range_mut(0..room, Dither::default()),
        );
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
}

#[test]
fn states_that_do_not_fit_are_named() {
    let device = Device::meta();
    let flat = || device.alloc(Kind::Scratch, 1, 512, DType::F32).unwrap();
    let (grad, mut w) = (flat(), flat());
    let of = |moment, len| States::zeros(&device, Kind::Optimizer, moment, StateForm::EightBit, len).unwrap();
    for (m, v, expected) in [
        (of(Moment::First, 511), of(Moment::Second, 512), "adamw: m has 511 elements, expected 512"),
        (of(Moment::First, 512), of(Moment::First, 512), "adamw: v is kept as another moment"),
    ] {
        let (mut m, mut v) = (m, v);
        let (m_len, v_len) = (m.len(), v.len());
        let (m, v) = (m.range_mut(0..m_len, Dither::default()), v.range_mut(0..v_len, Dither::default()));
        let error = ops::adamw(&device, &ADAMW, 1.0, grad.view(), w.view_mut(), m, v, None);
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
}
