//! Fixed-point sums: the same bits in any order, the value to 2⁻⁴⁸, and what is out of range is
//! seen.

use proptest::prelude::*;

use crate::support::{ADAMW, Place, RMSPROP, devices, numbers, processors, vector};
use tandem_kernels::exact::{FRACTION_BITS, FixedPointSum, limit};
use tandem_kernels::ops::{self, Gradient};
use tandem_kernels::{Backend, DType, Device, MemoryKind, SquareSum};

fn sum_of(device: &Device, terms: &[Vec<f32>]) -> FixedPointSum {
    let mut sums = FixedPointSum::new(device, MemoryKind::Gradients, terms[0].len()).unwrap();
    for (i, term) in terms.iter().enumerate() {
        ops::exact_sum(device, vector(device, term).view(), sums.view_mut(), i > 0, limit(terms.len()))
            .unwrap();
    }
    assert!(device.take_in_range().unwrap());
    sums
}

/// Terms of very different magnitudes.
fn terms(len: usize, count: usize) -> Vec<Vec<f32>> {
    let scaled = |i: usize| {
        let numbers = numbers(i as u64 + 1, len);
        numbers.iter().zip(0..).map(|(x, j)| x * 10f32.powi((i as i32 * 7 + j) % 12 - 9)).collect()
    };
    (0..count).map(scaled).collect()
}

#[test]
fn a_sum_has_the_same_bits_in_every_order_on_every_level_and_number_of_threads() {
    for len in [1, 97, 16_384 + 1031] {
        let mut terms = terms(len, 9);
        let mut first: Option<Vec<i64>> = None;
        for threads in [1, 3] {
            for (isa, device) in devices(threads) {
                for _ in 0..3 {
                    terms.rotate_left(2);
                    terms.swap(0, 5);
                    let found = sum_of(&device, &terms).read(&device).unwrap();
                    let expected = first.get_or_insert_with(|| found.clone());
                    assert!(*expected == found, "{len} on {} with {threads} threads", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_sum_is_exact_up_to_one_unit_for_each_term() {
    let terms = terms(1000, 9);
    let unit = 0.5f64.powi(FRACTION_BITS as i32);
    for (isa, device) in devices(2) {
        let sums = sum_of(&device, &terms);
        for (j, sum) in sums.read(&device).unwrap().into_iter().enumerate() {
            let expected: f64 = terms.iter().map(|term| f64::from(term[j])).sum();
            let found = sum as f64 * unit;
            assert!((found - expected).abs() <= 9.0 * unit, "{} {j}: {found} {expected}", isa.name());
        }
    }
}

#[test]
fn what_is_out_of_range_is_told() {
    for (isa, device) in devices(2) {
        for (bad, good) in
            [(f32::NAN, false), (f32::INFINITY, false), (-1e6, false), (8000.0, true), (8200.0, false)]
        {
            let mut values = numbers(1, 40_000);
            values[39_998] = bad;
            let mut sums = FixedPointSum::new(&device, MemoryKind::Gradients, values.len()).unwrap();
            for add in [false, true] {
                ops::exact_sum(&device, vector(&device, &values).view(), sums.view_mut(), add, limit(2))
                    .unwrap();
                assert_eq!(device.take_in_range().unwrap(), good, "{bad} on {}", isa.name());
                assert!(device.take_in_range().unwrap(), "what was told is forgotten");
            }
        }
    }
}

/// Optimisers read a sum as the f32 nearest to it.
#[test]
fn optimisers_and_norms_read_sums_as_the_nearest_f32() {
    for (isa, device) in devices(2) {
        for len in [1, 97, 16_384 + 1031] {
            let sums = sum_of(&device, &terms(len, 3));
            let unit = 0.5f64.powi(FRACTION_BITS as i32);
            let rounded = sums.read(&device).unwrap().into_iter().map(|sum| (sum as f64 * unit) as f32);
            let rounded: Vec<f32> = rounded.collect();
            let plain = vector(&device, &rounded);
            let squares = |x: Gradient| ops::sum_of_squares(&device, x).unwrap().to_bits();
            assert_eq!(squares(sums.view().into()), squares(plain.view().into()), "{len} {}", isa.name());
            let updated = |grad: Gradient| {
                let rmsprop = ops::RmsProp { weight_decay: 0.0, ..RMSPROP };
                let [mut w, mut m, mut v] = [1, 2, 3].map(|seed| {
                    vector(&device, &numbers(seed, len).iter().map(|x| x.abs()).collect::<Vec<_>>())
                });
                let update = ops::Update::new(grad, 0.5, w.view_mut(), None);
                ops::adamw(&device, &ADAMW, update, m.view_mut().into(), v.view_mut().into()).unwrap();
                let update = ops::Update::new(grad, 0.5, w.view_mut(), None);
                ops::rmsprop(&device, &rmsprop, update, v.view_mut().into()).unwrap();
                [w, m, v].map(|x| x.read(&device))
            };
            assert!(updated(sums.view().into()) == updated(plain.view().into()), "{len} {}", isa.name());
        }
    }
}

#[test]
fn squares_add_up_to_the_same_bits_wherever_they_are_cut_and_in_any_order() {
    let mut sums = Vec::new();
    for (isa, device) in devices(2) {
        let len = 3 * ops::SQUARES_BLOCK + 77;
        // Magnitudes from 2⁻⁴⁰ to 2¹⁸.
        let scale = |i: usize| 2f32.powi((i % 59) as i32 - 40);
        let values: Vec<f32> = numbers(1, len).iter().enumerate().map(|(i, x)| x * scale(i)).collect();
        let x = vector(&device, &values);
        let whole = ops::block_squares(&device, &[x.view().into()]).unwrap();
        let expected: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((whole.value() - expected).abs() <= 1e-13 * expected, "{}", isa.name());
        for cut in [0, 1, 5000, ops::SQUARES_BLOCK + 3, len] {
            let halves = [cut..len, 0..cut].map(|range| x.view().col_range(range).into());
            let together = ops::block_squares(&device, &halves).unwrap();
            assert_eq!(together, whole, "{} {cut}", isa.name());
            let [left, right] =
                halves.map(|half| ops::block_squares(&device, &[half]).unwrap().to_integers());
            let apart = std::array::from_fn(|i| left[i] + right[i]);
            assert_eq!(SquareSum::from_integers(apart, 0.0).value(), whole.value(), "{} {cut}", isa.name());
        }
        sums.push(whole);
    }
    assert!(sums.windows(2).all(|pair| pair[0] == pair[1]), "devices agree");
}

/// Large and small magnitudes, zeros, and a term out of range.
#[test]
fn the_last_terms_are_added_and_squared_in_one_pass() {
    let len = 2 * ops::SQUARES_BLOCK + 1031;
    let made = |seed: u64, scale: f32| -> Vec<f32> { numbers(seed, len).iter().map(|x| x * scale).collect() };
    for (isa, device) in processors(2) {
        for (first, last) in [
            (made(1, 1e-3), made(2, 1e-4)),
            (made(3, 30.0), made(4, 1e-9)),
            (vec![0.0; len], terms(len, 1).remove(0)),
        ] {
            let last_view = vector(&device, &last);
            let mut expected = sum_of(&device, &[first.clone(), last.clone()]);
            let mut found = sum_of(&device, &[first]);
            let squares =
                ops::exact_sum_squares(&device, last_view.view(), Some(found.view_mut()), true, limit(2))
                    .unwrap();
            assert!(found.read(&device).unwrap() == expected.read(&device).unwrap(), "{}", isa.name());
            assert_eq!(
                squares,
                ops::block_squares(&device, &[expected.view().into()]).unwrap(),
                "{}",
                isa.name()
            );
            // Over the sums of earlier steps.
            expected = sum_of(&device, std::slice::from_ref(&last));
            let of_sums = ops::block_squares(&device, &[expected.view().into()]).unwrap();
            let squares =
                ops::exact_sum_squares(&device, last_view.view(), Some(found.view_mut()), false, limit(2))
                    .unwrap();
            assert!(found.read(&device).unwrap() == expected.read(&device).unwrap(), "{}", isa.name());
            assert_eq!(squares, of_sums, "{}", isa.name());
            // Terms alone, in the memory of sums.
            let mut room = found.view_mut().into_terms();
            ops::cast(&device, last_view.view(), room.reborrow()).unwrap();
            let alone = found.view().terms();
            let squares = ops::exact_sum_squares(&device, alone, None, false, limit(1)).unwrap();
            assert_eq!(squares, of_sums, "{}", isa.name());
            assert_eq!(
                ops::block_squares(&device, &[Gradient::Terms(alone)]).unwrap(),
                of_sums,
                "{}",
                isa.name()
            );
            assert!(device.take_in_range().unwrap());
        }
        let mut bad = made(5, 1.0);
        bad[len - 2] = f32::NAN;
        let bad = vector(&device, &bad);
        ops::exact_sum_squares(&device, bad.view(), None, false, limit(1)).unwrap();
        assert!(!device.take_in_range().unwrap(), "{}", isa.name());
    }
    let gpu = Place::cuda().device(1, 1 << 24);
    let x = vector(&gpu, &[1.0]);
    let refused = ops::exact_sum_squares(&gpu, x.view(), None, false, 1.0).unwrap_err().to_string();
    assert!(refused.contains("in two operations"), "{refused}");
}

/// Rows that tokens look up become what their sums of two terms are read as; others stay the first term.
#[test]
fn a_look_up_adds_the_second_term_to_the_first() {
    let (vocabulary, width, tokens) = (40, 97, 61);
    // Not all rows: some have several tokens, the token after the last is elsewhere.
    let ids: Vec<u32> = (0..tokens).map(|t| if t == 50 { ops::ELSEWHERE } else { t * t % 40 }).collect();
    let first = terms(vocabulary * width, 1).remove(0);
    for (isa, device) in devices(2) {
        for scale in [1.0, 1e-7] {
            let dx: Vec<f32> = numbers(3, ids.len() * width).iter().map(|x| x * scale).collect();
            let dx = vector(&device, &dx);
            let dx = || dx.view().reshape(ids.len(), width);
            let zeros = vec![0.0; vocabulary * width];
            let [mut second, mut both] = [&zeros, &first].map(|x| vector(&device, x));
            ops::embedding_backward(&device, &ids, 1.5, dx(), second.view_mut().reshape(vocabulary, width))
                .unwrap();
            let table = both.view_mut().reshape(vocabulary, width);
            ops::embedding_backward_exact(&device, &ids, 1.5, dx(), table, limit(2)).unwrap();
            assert!(device.take_in_range().unwrap(), "{}", isa.name());
            let sums = sum_of(&device, &[first.clone(), second.read(&device)]);
            let unit = 0.5f64.powi(FRACTION_BITS as i32);
            let rounded = sums.read(&device).unwrap().into_iter().map(|sum| (sum as f64 * unit) as f32);
            for (i, (found, rounded)) in both.read(&device).into_iter().zip(rounded).enumerate() {
                let is_looked_up = ids.contains(&((i / width) as u32));
                let expected = if is_looked_up { rounded } else { first[i] };
                assert_eq!(found.to_bits(), expected.to_bits(), "{i} on {}", isa.name());
            }
            let squares = |x: Gradient| ops::block_squares(&device, &[x]).unwrap();
            assert_eq!(squares(Gradient::Terms(both.view())), squares(sums.view().into()), "{}", isa.name());
        }
        for (bad, good) in [(f32::NAN, false), (f32::INFINITY, false), (8000.0, true), (-8200.0, false)] {
            let mut values = vec![1.0; 3 * width];
            values[width + 5] = bad;
            let (dx, mut table) = (vector(&device, &values), vector(&device, &first));
            let table = table.view_mut().reshape(vocabulary, width);
            let dx = dx.view().reshape(3, width);
            ops::embedding_backward_exact(&device, &[7, 3, 7], 1.0, dx, table, limit(2)).unwrap();
            assert_eq!(device.take_in_range().unwrap(), good, "{bad} on {}", isa.name());
        }
    }
}

/// The only terms of sums are read as sums of them would be: by every optimizer's kernel and by norms.
#[test]
fn the_only_terms_are_read_as_their_sums() {
    let len = ops::SQUARES_BLOCK + 1031;
    for (isa, device) in devices(2) {
        for terms in [terms(len, 1).remove(0), numbers(7, len).iter().map(|x| x * 1e-13).collect()] {
            let sums = sum_of(&device, std::slice::from_ref(&terms));
            let plain = vector(&device, &terms);
            let squares = |x: Gradient| ops::block_squares(&device, &[x]).unwrap();
            assert_eq!(squares(Gradient::Terms(plain.view())), squares(sums.view().into()), "{}", isa.name());
            let updated = |grad: Gradient| {
                let [mut w, mut m, mut v] = [1, 2, 3].map(|seed| {
                    vector(&device, &numbers(seed, len).iter().map(|x| x.abs()).collect::<Vec<_>>())
                });
                let update = ops::Update::new(grad, 0.5, w.view_mut(), None);
                ops::adamw(&device, &ADAMW, update, m.view_mut().into(), v.view_mut().into()).unwrap();
                let update = ops::Update::new(grad, 0.5, w.view_mut(), None);
                ops::rmsprop(&device, &RMSPROP, update, v.view_mut().into()).unwrap();
                [w, m, v].map(|x| x.read(&device))
            };
            assert!(updated(Gradient::Terms(plain.view())) == updated(sums.view().into()), "{}", isa.name());
            ops::check_terms(&device, plain.view(), limit(1)).unwrap();
            assert!(device.take_in_range().unwrap(), "{}", isa.name());
        }
        for bad in [f32::NAN, f32::NEG_INFINITY, 16_500.0] {
            let mut terms = numbers(8, len);
            terms[len - 2] = bad;
            ops::check_terms(&device, vector(&device, &terms).view(), limit(1)).unwrap();
            assert!(!device.take_in_range().unwrap(), "{bad} {}", isa.name());
        }
    }
}

/// Addresses of terms and sums do not change results.
#[test]
fn terms_and_sums_are_read_from_any_element_on() {
    for (isa, device) in devices(2) {
        let (len, values) = (3001, numbers(1, 6007));
        let x = vector(&device, &values);
        let all = sum_of(&device, std::slice::from_ref(&values));
        for start in [0, 1, 2, 3, 7] {
            let what = format!("from {start} on {}", isa.name());
            let range = start..start + len;
            let moved = vector(&device, &values[range.clone()]);
            let mut expected = FixedPointSum::new(&device, MemoryKind::Gradients, len).unwrap();
            ops::exact_sum(&device, moved.view(), expected.view_mut(), false, limit(3)).unwrap();
            let expected = expected.read(&device).unwrap();
            let mut found = FixedPointSum::new(&device, MemoryKind::Gradients, len).unwrap();
            let terms = x.view().col_range(range.clone());
            for (add, times) in [(false, 1), (true, 2)] {
                ops::exact_sum(&device, terms, found.view_mut(), add, limit(3)).unwrap();
                let expected: Vec<i64> = expected.iter().map(|sum| sum * times).collect();
                assert!(found.read(&device).unwrap() == expected, "{what}, {times} times");
            }
            ops::exact_merge(&device, all.view().range(range.clone()), found.view_mut(), true).unwrap();
            let sums: Vec<i64> = expected.iter().map(|sum| sum * 3).collect();
            assert!(found.read(&device).unwrap() == sums, "{what}, merged");
            let mut copied = FixedPointSum::new(&device, MemoryKind::Gradients, len).unwrap();
            ops::exact_merge(&device, all.view().range(range.clone()), copied.view_mut(), false).unwrap();
            assert!(copied.read(&device).unwrap() == expected, "{what}, copied");
            let squares = |x: Gradient| ops::sum_of_squares(&device, x).unwrap().to_bits();
            let of_terms = squares(moved.view().into());
            assert_eq!(squares(x.view().col_range(range.clone()).into()), of_terms, "{what}");
            let of_sums = squares(copied.view().into());
            assert_eq!(squares(all.view().range(range).into()), of_sums, "{what}");
        }
    }
}

/// A GPU's sums of blocks lie in its memory until they are read.
#[test]
fn a_dry_run_counts_what_sums_of_squares_take() {
    for (device, meta) in [
        (Device::cpu(1, 1 << 24).unwrap(), Device::meta()),
        (Place::cuda().device(1, 1 << 24), Device::meta_of(Backend::Cuda)),
    ] {
        for device in [&device, &meta] {
            let x = device.zeros(MemoryKind::Scratch, 1, 10 * ops::SQUARES_BLOCK + 1, DType::F32).unwrap();
            assert_eq!(ops::sum_of_squares(device, x.view()).unwrap(), 0.0);
        }
        assert_eq!(device.memory(), meta.memory());
        assert_eq!(device.high_water(), meta.high_water());
    }
}

/// Terms of any magnitude below the limit, in an order, and where a sum of sums is cut.
fn any_terms() -> impl Strategy<Value = (Vec<Vec<f32>>, Vec<usize>, usize)> {
    let sizes = (1..7_usize, 1..40_usize);
    sizes.prop_flat_map(|(count, len)| {
        let term = prop_oneof![
            -1.0..1.0_f32,
            (-60..11_i32, any::<bool>()).prop_map(|(e, negative)| if negative {
                -2f32.powi(e)
            } else {
                2f32.powi(e)
            }),
            any::<f32>().prop_filter("in range", |x| x.abs() < limit(8)),
        ];
        let order = Just((0..count).collect::<Vec<_>>()).prop_shuffle();
        (prop::collection::vec(prop::collection::vec(term, len), count), order, 0..=count)
    })
}

/// The sum's definition: each term in units of 2⁻⁴⁸, cut towards zero. In i128 nothing overflows.
fn reference(terms: &[Vec<f32>]) -> Vec<i128> {
    let fixed = |x: f32| (f64::from(x) * 2f64.powi(FRACTION_BITS as i32)).trunc() as i128;
    (0..terms[0].len()).map(|j| terms.iter().map(|term| fixed(term[j])).sum()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_and_grouping_of_any_terms_gives_the_same_integers((terms, order, cut) in any_terms()) {
        let expected = reference(&terms);
        let shuffled: Vec<Vec<f32>> = order.iter().map(|&i| terms[i].clone()).collect();
        for (isa, device) in processors(2) {
            for terms in [&terms, &shuffled] {
                let found = sum_of(&device, terms).read(&device).unwrap();
                let found: Vec<i128> = found.into_iter().map(i128::from).collect();
                prop_assert_eq!(&found, &expected, "{}", isa.name());
            }
            // As ranks add up: sums of some terms, and then their sum.
            let groups = [&shuffled[..cut], &shuffled[cut..]];
            let sums = groups.iter().filter(|group| !group.is_empty()).map(|group| sum_of(&device, group));
            let mut total = vec![0_i64; expected.len()];
            for sum in sums {
                total.iter_mut().zip(sum.read(&device).unwrap()).for_each(|(total, sum)| *total += sum);
            }
            let total: Vec<i128> = total.into_iter().map(i128::from).collect();
            prop_assert_eq!(&total, &expected, "{}", isa.name());
        }
    }

    /// Squares are exact where f64 has room for them: numbers of 12 bits at one scale.
    #[test]
    fn any_cut_of_squares_gives_the_same_exact_sum(
        values in prop::collection::vec(-4000..4000_i32, 1..3000),
        at in any::<prop::sample::Index>(),
    ) {
        let exact: i64 = values.iter().map(|&x| i64::from(x) * i64::from(x)).sum();
        let scaled: Vec<f32> = values.iter().map(|&x| x as f32 * 2f32.powi(-20)).collect();
        let cut = at.index(values.len() + 1);
        for (isa, device) in processors(2) {
            let x = vector(&device, &scaled);
            let mut sum = SquareSum::default();
            for range in [0..cut, cut..values.len()] {
                sum.add(&ops::block_squares(&device, &[x.view().col_range(range).into()]).unwrap());
            }
            prop_assert_eq!(sum.value(), exact as f64 * 2f64.powi(-40), "{}", isa.name());
        }
    }
}
