//! Updates of weights whose states are kept in fewer bits.

use tandem_kernels::cpu::Isa;
use tandem_kernels::exact::FixedPointSum;
use tandem_kernels::{
    AdamMoment, DType, Device, MemoryKind, STATE_BLOCK, StateForm, States, StochasticRounding, bf16, ops,
};

use super::codes::assert_nearest;
use super::{LENGTHS, MOMENTS, bits, read, states, wide};
use crate::support::{ADAMW, LION, Matrix, Place, RMSPROP, SGD, devices, numbers, vector};

/// Round trip of a checkpoint: to f32 and back.
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
                    let values = read(&device, kept);
                    let mut again = States::zeros(&device, MemoryKind::Optimizer, moment, form, len).unwrap();
                    // In parts, as they are read from a file.
                    for start in (0..len).step_by(3 * STATE_BLOCK) {
                        let part = &values[start..len.min(start + 3 * STATE_BLOCK)];
                        device.write_states(part, &mut again, start).unwrap();
                    }
                    assert_eq!(bits(&read(&device, &again)), bits(&values), "{} {form:?} {len}", isa.name());
                    // And from any element on.
                    for range in [0..len, len / 3..len, len / 2..len / 2 + 1] {
                        let mut part = vec![0.0; range.len()];
                        device.read_states(kept.view().range(range.clone()), &mut part).unwrap();
                        assert_eq!(bits(&part), bits(&values[range]));
                    }
                }
                // Goes on with the same bits.
                let mut resumed = Run::new(&device, form, len);
                resumed.w = vector(&device, &run.w.read(&device));
                device.write_states(&read(&device, &run.m), &mut resumed.m, 0).unwrap();
                device.write_states(&read(&device, &run.v), &mut resumed.v, 0).unwrap();
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
        let zeros = |moment| States::zeros(device, MemoryKind::Optimizer, moment, form, len).unwrap();
        Self {
            w: vector(device, &numbers(1, len)),
            m: zeros(AdamMoment::First),
            v: zeros(AdamMoment::Second),
        }
    }

    fn adamw(&mut self, device: &Device, step: u64) {
        let len = self.m.len();
        let grad = vector(device, &wide(10 + step, len, AdamMoment::First));
        let config = ops::AdamW { step, ..ADAMW };
        let m = self.m.range_mut(0..len, StochasticRounding::new(&[step, 1], 0));
        let v = self.v.range_mut(0..len, StochasticRounding::new(&[step, 2], 0));
        ops::adamw(device, &config, ops::Update::new(grad.view(), 0.5, self.w.view_mut(), None), m, v)
            .unwrap();
    }

    fn bits(&self, device: &Device) -> Vec<u32> {
        [self.w.read(device), read(device, &self.m), read(device, &self.v)]
            .iter()
            .flat_map(|x| bits(x))
            .collect()
    }
}

/// The same update with states in f32 that hold what the others do moves the weights by the same
/// bits; what is kept is what f32 has, rounded.
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
                    device.write_states(&read(&device, &run.m), &mut wide.m, 0).unwrap();
                    device.write_states(&read(&device, &run.v), &mut wide.v, 0).unwrap();
                    run.adamw(&device, step);
                    wide.adamw(&device, step);
                    assert_eq!(bits(&run.w.read(&device)), bits(&wide.w.read(&device)), "{what}: weights");
                    for (moment, kept, exact) in
                        [(AdamMoment::First, &run.m, &wide.m), (AdamMoment::Second, &run.v, &wide.v)]
                    {
                        let (kept, exact) = (read(&device, kept), read(&device, exact));
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

/// Results of one step on a device: weights, their copy, states.
fn step_of(
    device: &Device,
    forms: [StateForm; 2],
    (len, start): (usize, usize),
    is_exact: bool,
    copied: Option<DType>,
) -> Vec<u32> {
    let range = start..start + len;
    // 8 bits begin with a block, whatever the others do.
    let [mut m, mut v] = [(AdamMoment::First, forms[0]), (AdamMoment::Second, forms[1])]
        .map(|(moment, form)| states(device, moment, form, &wide(3, start + len, moment)));
    let all = wide(4, start + len, AdamMoment::First);
    let (grad, mut w) = (vector(device, &all), vector(device, &numbers(5, start + len)));
    let mut copy = copied.map(|dtype| Matrix::new(device, 6, (1, start + len), dtype, 0));
    let mut sums = FixedPointSum::new(device, MemoryKind::Gradients, start + len).unwrap();
    ops::exact_sum(device, grad.view(), sums.view_mut(), false, f32::INFINITY).unwrap();
    for step in 1..=2 {
        let grad = || match is_exact {
            true => ops::Gradient::from(sums.view()),
            false => grad.view().into(),
        };
        let config = ops::AdamW { step, ..ADAMW };
        let [m, v] = [(&mut m, 1), (&mut v, 2)].map(|(states, what)| {
            states.range_mut(range.clone(), StochasticRounding::new(&[step, what], start))
        });
        let master = w.view_mut().col_range(range.clone());
        let copy_view = copy.as_mut().map(|copy| copy.view_mut().col_range(range.clone()));
        let update = ops::Update::new(grad().range(range.clone()), 0.5, master, copy_view);
        ops::adamw(device, &config, update, m, v).unwrap();
    }
    let of_v = v.range_mut(range.clone(), StochasticRounding::new(&[3], start));
    let master = w.view_mut().col_range(range.clone());
    let grad = grad.view().col_range(range.clone());
    ops::rmsprop(device, &RMSPROP, ops::Update::new(grad, 2.0, master, None), of_v).unwrap();
    for step in 4..=6 {
        let master = w.view_mut().col_range(range.clone());
        let update = ops::Update::new(grad, 2.0, master, None);
        let of_m = m.range_mut(range.clone(), StochasticRounding::new(&[step], start));
        let momentum = ops::Momentum { momentum: 0.9, dampening: 0.1, nesterov: false, step };
        match step {
            4 => ops::lion(device, &LION, update, of_m).unwrap(),
            5 => ops::sgd(device, &ops::Sgd { momentum: Some(momentum), ..SGD }, update, Some(of_m)).unwrap(),
            _ => ops::sgd(device, &SGD, update, None).unwrap(),
        }
    }
    let copy = copy.map(|copy| copy.read(device)).unwrap_or_default();
    [w.read(device), copy, read(device, &m), read(device, &v)].iter().flat_map(|x| bits(x)).collect()
}

/// Whoever multiplies and adds with one rounding has the same bits, in every form, from any element
/// on.
#[test]
fn an_update_has_the_same_bits_in_every_place() {
    let forms = StateForm::NAMES.map(|(_, form)| form);
    let fuses = |place: &Place| !cfg!(target_arch = "x86_64") || *place != Place::Cpu(Isa::Portable);
    let devices: Vec<_> = devices(1).into_iter().filter(|(place, _)| fuses(place)).collect();
    let mut cases = Vec::new();
    for (m, form) in forms.into_iter().flat_map(|m| forms.map(|v| (m, v))).enumerate() {
        let starts = if [form.0, form.1].contains(&StateForm::EightBit) { [0, 512] } else { [0, 3] };
        for (start, len) in starts.into_iter().flat_map(|start| LENGTHS.iter().map(move |len| (start, *len)))
        {
            let copied = [None, Some(DType::F32), Some(DType::Bf16)][(m + len) % 3];
            cases.push(([form.0, form.1], (len, start), len % 2 == 1, copied));
        }
    }
    for (forms, place, is_exact, copied) in cases {
        let mut first = None;
        for (isa, device) in &devices {
            let found = step_of(device, forms, place, is_exact, copied);
            let expected = first.get_or_insert_with(|| found.clone());
            assert!(*expected == found, "{forms:?} {place:?} {is_exact} {copied:?} on {}", isa.name());
        }
    }
}

#[test]
fn rmsprop_with_kept_states_is_that_of_f32_with_them_rounded() {
    let len = 1000;
    for (isa, device) in devices(2) {
        for form in [StateForm::Bf16, StateForm::EightBit] {
            let start = wide(3, len, AdamMoment::Second);
            let mut kept = states(&device, AdamMoment::Second, form, &start);
            let mut exact = states(&device, AdamMoment::Second, StateForm::F32, &read(&device, &kept));
            let grad = vector(&device, &wide(4, len, AdamMoment::First));
            let [first, second] = [&mut kept, &mut exact].map(|states| {
                let mut w = vector(&device, &numbers(1, len));
                let v = states.range_mut(0..len, StochasticRounding::default());
                ops::rmsprop(&device, &RMSPROP, ops::Update::new(grad.view(), 1.0, w.view_mut(), None), v)
                    .unwrap();
                w.read(&device)
            });
            assert_eq!(bits(&first), bits(&second), "{} {form:?}", isa.name());
            for (kept, exact) in read(&device, &kept).into_iter().zip(read(&device, &exact)) {
                // bf16 has 8 bits; the widest step of the map is 1.4 times its smallest number.
                let allowed = if form == StateForm::Bf16 { 1.0 / 128.0 } else { 1.0 };
                assert!((kept - exact).abs() <= allowed * exact, "{} {form:?}: {kept} {exact}", isa.name());
            }
        }
    }
}

/// The bits do not depend on threads, on the level of instructions (but for what the update itself
/// gives: here nothing is rounded before), or on where the buffer is cut.
#[test]
fn what_is_drawn_depends_on_update_and_place_alone() {
    let len = 40_000;
    let values = numbers(5, len);
    let run = |device: &Device, cuts: &[usize], key: u64| {
        let mut v =
            States::zeros(device, MemoryKind::Optimizer, AdamMoment::Second, StateForm::Bf16, len).unwrap();
        let mut w = vector(device, &vec![0.0; len]);
        let grad = vector(device, &values);
        // Squares of f32, exact in no level's arithmetic but rounded once in each.
        let config = ops::RmsProp { alpha: 0.0, weight_decay: 0.0, ..RMSPROP };
        for part in cuts.windows(2) {
            let range = part[0]..part[1];
            let (grad, w) = (grad.view().col_range(range.clone()), w.view_mut().col_range(range.clone()));
            let v = v.range_mut(range.clone(), StochasticRounding::new(&[key], range.start));
            ops::rmsprop(device, &config, ops::Update::new(grad, 1.0, w, None), v).unwrap();
        }
        bits(&read(device, &v))
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

/// The mean over many numbers drawn is the number; to the nearest it would be off by up to half a
/// step.
#[test]
fn rounding_is_right_in_the_mean() {
    let device = Device::cpu(1, 1 << 28).unwrap();
    let len = 1 << 16;
    for part in [1.0 / 64.0, 0.25, 0.5, 0.9] {
        // `part` of the way from 1 to the next bf16; AdamW with a beta of 0 keeps the gradient.
        let x = 1.0 + part / 128.0;
        let mut m =
            States::zeros(&device, MemoryKind::Optimizer, AdamMoment::First, StateForm::Bf16, len).unwrap();
        let [mut w, grad, mut v] = [0.0, x, 0.0].map(|x| vector(&device, &vec![x; len]));
        let config = ops::AdamW { beta1: 0.0, ..ADAMW };
        let all = m.range_mut(0..len, StochasticRounding::new(&[1, 2, 3], 0));
        let update = ops::Update::new(grad.view(), 1.0, w.view_mut(), None);
        ops::adamw(&device, &config, update, all, v.view_mut().into()).unwrap();
        let up = read(&device, &m).iter().filter(|&&m| m > 1.0).count() as f64 / len as f64;
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
        [StateForm::Bf16, StateForm::F32].map(|form| states(&device, AdamMoment::Second, form, &start));
    let mut nearest = vec![bf16::from_f32(1.0); len];
    let mut w = vector(&device, &vec![0.0; len]);
    let config = ops::RmsProp { alpha: 0.999, weight_decay: 0.0, ..RMSPROP };
    for step in 0..steps {
        let grad: Vec<f32> = numbers(step, len).iter().map(|x| 0.5 * x).collect();
        let flat = vector(&device, &grad);
        for states in [&mut kept, &mut exact] {
            let v = states.range_mut(0..len, StochasticRounding::new(&[step], 0));
            ops::rmsprop(&device, &config, ops::Update::new(flat.view(), 1.0, w.view_mut(), None), v)
                .unwrap();
        }
        for (v, g) in nearest.iter_mut().zip(&grad) {
            *v = bf16::from_f32(0.999 * v.to_f32() + 0.001 * g * g);
        }
    }
    let mean = |values: &[f32]| values.iter().map(|x| f64::from(*x)).sum::<f64>() / len as f64;
    let [kept, exact] = [kept, exact].map(|states| mean(&read(&device, &states)));
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
        MOMENTS.map(|moment| States::zeros(device, MemoryKind::Optimizer, moment, form, features).unwrap());
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
        let m = m.range_mut(0..features, StochasticRounding::new(&[step, 1], 0));
        let v = v.range_mut(0..features, StochasticRounding::new(&[step, 2], 0));
        let grad = vector(device, &grad);
        ops::adamw(device, &config, ops::Update::new(grad.view(), 1.0, w.view_mut(), None), m, v).unwrap();
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
fn states_that_do_not_fit_are_named() {
    let device = Device::meta();
    let flat = || device.alloc(MemoryKind::Scratch, 1, 512, DType::F32).unwrap();
    let (grad, mut w) = (flat(), flat());
    let of = |moment, len| {
        States::zeros(&device, MemoryKind::Optimizer, moment, StateForm::EightBit, len).unwrap()
    };
    for (m, v, expected) in [
        (of(AdamMoment::First, 511), of(AdamMoment::Second, 512), "adamw: m has 511 elements, expected 512"),
        (of(AdamMoment::First, 512), of(AdamMoment::First, 512), "adamw: v has the states of another moment"),
    ] {
        let (mut m, mut v) = (m, v);
        let (m_len, v_len) = (m.len(), v.len());
        let (m, v) = (
            m.range_mut(0..m_len, StochasticRounding::default()),
            v.range_mut(0..v_len, StochasticRounding::default()),
        );
        let error = ops::adamw(&device, &ADAMW, ops::Update::new(grad.view(), 1.0, w.view_mut(), None), m, v);
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
}
