mod case;
mod divergence;

use tandem_kernels::ops::{self, HeadGradients, HeadScores, HeadShape, HeadWeights, LowRank, Targets};
use tandem_kernels::{Backend, DType, Device, MemoryKind};

use self::case::{Case, Gradients};
use super::matrix::{Matrix, TYPES, cases, device, poison, same_at_every_thread_count};
use crate::places::Place;

/// A processor with two threads, and a GPU.
fn devices() -> [(Place, Device); 2] {
    let place = Place::processors()[0];
    [(place, device(2)), (Place::cuda(), Place::cuda().device(1, 1 << 28))]
}

#[test]
fn scores_and_gradients() {
    let plain = HeadShape::default();
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    for (place, dtype, tolerance) in cases() {
        for (rows, vocabulary, width) in
            [(1, 2, 1), (1, 97, 20), (5, 1025, 16), (3, 2309, 9), (7, 512, 24), (23, 101, 64), (70, 257, 33)]
        {
            for (shape, bias) in [(plain, false), (plain, true), (shaped, true)] {
                let case = Case::new(rows, vocabulary, width, dtype, shape, bias);
                let (scores, found) = same_at_every_thread_count(place, |device| case.run(device, dtype));
                let (expected, gradients) = case.reference();
                let what = format!("{dtype} {rows}x{vocabulary}x{width} bias {bias} {shape:?}");
                expected.assert_are(&scores, &what);
                found[0].assert_close(&gradients[0], tolerance, &format!("dhidden {what}"));
                found[1].assert_close(&gradients[1], tolerance, &format!("dw {what}"));
                found[2].assert_close(&gradients[2], tolerance, &format!("dbias {what}"));
            }
        }
    }
}

/// On a processor with the bits of the head that has made them.
#[test]
fn scores_of_logits_that_are_there() {
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    for (place, dtype, _) in cases() {
        for (rows, vocabulary) in [(1, 2), (5, 2309), (23, 101)] {
            for (shape, bias) in [(HeadShape::default(), true), (shaped, false)] {
                let case = Case::new(rows, vocabulary, 24, dtype, shape, bias);
                let what = format!("{dtype} {rows}x{vocabulary} bias {bias} {shape:?} {place:?}");
                let found = same_at_every_thread_count(place, |device| case.score_logits(device, dtype));
                case.reference().0.assert_are(&found, &what);
                if place.is_cpu() {
                    assert_eq!(found, case.run(&place.device(1, 1 << 28), dtype).0, "{what}");
                }
            }
        }
    }
}

/// More rows than a chunk has (1024 on a CPU, 4096 on a GPU), and on a CPU more tokens than a strip
/// (1024), the last of them not full.
#[test]
fn several_chunks() {
    for ((dtype, tolerance), (rows, vocabulary, is_gpu)) in
        TYPES.into_iter().flat_map(|of| [(1031, 1100, false), (4103, 40, true)].map(|size| (of, size)))
    {
        let case = Case::new(rows, vocabulary, 16, dtype, HeadShape::default(), true);
        let (expected, gradients) = case.reference();
        for (place, device) in devices().into_iter().filter(|(place, _)| place.is_cpu() != is_gpu) {
            let (scores, found) = case.run(&device, dtype);
            expected.assert_are(&scores, &format!("several chunks, {place:?}"));
            for (found, (expected, name)) in
                found.iter().zip(gradients.iter().zip(["dhidden", "dw", "dbias"]))
            {
                found.assert_close(expected, tolerance, &format!("{name}, {place:?}"));
            }
        }
    }
}

/// More tokens than two of a GPU's widest strips have (8192 each), with a bias and without, whether numbers can
/// be moved four at a time or not.
#[test]
fn several_strips_on_a_gpu() {
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    for (dtype, tolerance) in TYPES {
        for (vocabulary, shape, bias) in
            [(16_384 + 5020, HeadShape::default(), false), (16_384 + 4001, shaped, true)]
        {
            let case = Case::new(5, vocabulary, 8, dtype, shape, bias);
            let compute = |device: &Device| case.run(device, dtype);
            let (scores, found) = same_at_every_thread_count(Place::cuda(), compute);
            let (expected, gradients) = case.reference();
            let what = format!("{dtype}, {vocabulary} tokens, bias {bias}");
            expected.assert_are(&scores, &what);
            for (found, (expected, name)) in
                found.iter().zip(gradients.iter().zip(["dhidden", "dw", "dbias"]))
            {
                found.assert_close(expected, tolerance, &format!("{name} {what}"));
            }
        }
    }
}

/// Logits kept for backward, all of them or those of the first chunks, save a product and change no
/// bit. With a softcap nothing is kept.
#[test]
fn kept_logits_change_no_bit() {
    let plain = HeadShape::default();
    let capped = HeadShape { softcap: Some(2.0), logit_scale: None };
    for (place, device) in devices() {
        for (shape, dtype) in [(plain, DType::F32), (plain, DType::Bf16), (capped, DType::F32)] {
            if !place.is_cpu() && dtype == DType::F32 {
                continue;
            }
            let case = Case::new(2100, 101, 16, dtype, shape, false);
            let row_bytes = 101 * 4;
            let (scores, gradients) = case.run_keeping(&device, dtype, 0);
            // One chunk of 1024 rows, two of them and a part of the third, everything.
            for rows in [1024, 2090, 2100] {
                let (kept_scores, kept_gradients) = case.run_keeping(&device, dtype, rows * row_bytes);
                assert_eq!(kept_scores, scores, "{rows} rows in {dtype}, {place:?}");
                for (kept, computed) in kept_gradients.iter().zip(&gradients) {
                    assert!(kept.data == computed.data, "{rows} rows in {dtype}, {place:?}");
                }
            }
        }
    }
}

/// A vocabulary in parts, the last of a single token, gives what the whole one gives.
#[test]
fn parts_of_a_vocabulary_are_joined() {
    let plain = HeadShape::default();
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    for (dtype, tolerance) in TYPES {
        for (rows, vocabulary, cuts) in
            [(1, 2, &[1][..]), (23, 101, &[40]), (23, 101, &[1, 64, 100]), (70, 257, &[86, 171])]
        {
            for (shape, bias) in [(plain, false), (plain, true), (shaped, true)] {
                let case = Case::new(rows, vocabulary, 16, dtype, shape, bias);
                let (expected, gradients) = case.reference();
                for (place, device) in devices() {
                    let (scores, found) = case.run_in_parts(&device, dtype, cuts);
                    let what =
                        format!("{dtype} {place:?} {rows}x{vocabulary} at {cuts:?} bias {bias} {shape:?}");
                    expected.assert_are(&scores, &what);
                    for (found, (expected, name)) in
                        found.iter().zip(gradients.iter().zip(["dhidden", "dw", "dbias"]))
                    {
                        found.assert_close(expected, tolerance, &format!("{name} {what}"));
                    }
                }
            }
        }
    }
}

/// A low-rank term: whole, kept and recomputed logits over several chunks, and a vocabulary in
/// parts.
#[test]
fn a_low_rank_term() {
    const NAMES: [&str; 5] = ["dhidden", "dw", "dbias", "dh", "db"];
    let plain = HeadShape::default();
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    let check = |what: &str, tolerance: f64, (scores, found): (HeadScores, Gradients), case: &Case| {
        let (expected, gradients) = case.reference();
        expected.assert_are(&scores, what);
        assert_eq!(found.len(), NAMES.len(), "{what}");
        for ((found, expected), name) in found.iter().zip(&gradients).zip(NAMES) {
            found.assert_close(expected, tolerance, &format!("{name} {what}"));
        }
    };
    for (place, dtype, tolerance) in cases() {
        for (rows, vocabulary, rank) in [(1, 97, 4), (23, 101, 8), (70, 257, 40)] {
            for (shape, bias) in [(plain, false), (shaped, true)] {
                let what =
                    format!("{dtype} {place:?} {rows}x{vocabulary}, rank {rank}, bias {bias} {shape:?}");
                let case = Case::new(rows, vocabulary, 16, dtype, shape, bias).adapted(rank, dtype);
                let found = same_at_every_thread_count(place, |device| case.run(device, dtype));
                check(&what, tolerance, found, &case);
                let device = place.device(2, 1 << 28);
                let found = case.run_in_parts(&device, dtype, &[1, 64]);
                check(&format!("{what}, in parts"), tolerance, found, &case);
            }
        }
    }
    for (place, device) in devices() {
        for (dtype, tolerance) in TYPES.into_iter().skip(usize::from(!place.is_cpu())) {
            let case = Case::new(2100, 101, 16, dtype, plain, true).adapted(8, dtype);
            let (scores, gradients) = case.run_keeping(&device, dtype, 0);
            for rows in [1024, 2100] {
                let kept = case.run_keeping(&device, dtype, rows * 101 * 4);
                assert!(
                    kept == (scores.clone(), gradients.clone()),
                    "{rows} rows kept in {dtype}, {place:?}"
                );
            }
            check(&format!("{dtype} {place:?}, several chunks"), tolerance, (scores, gradients), &case);
        }
    }
}

/// Gradients of a term that is not there are refused, and so is a term of other rows.
#[test]
fn a_low_rank_term_must_fit() {
    let device = Device::meta();
    let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::F32).unwrap();
    let (hidden, w, h, b) = (alloc(3, 4), alloc(7, 4), alloc(2, 2), alloc(7, 2));
    let targets = Targets { rows: &[0], targets: &[5] };
    let mut scores = HeadScores::default();
    let weights = HeadWeights {
        low_rank: Some(LowRank { h: h.view(), b: b.view() }),
        ..HeadWeights::new(w.view(), None)
    };
    let shape = HeadShape::default();
    let error =
        ops::head(&device, ops::Head::new(hidden.view(), weights, targets, &shape), &mut scores).unwrap_err();
    assert_eq!(error.to_string(), "head: h is 2x2, expected 3x2");
    let weights = HeadWeights::new(w.view(), None);
    ops::head(&device, ops::Head::new(hidden.view(), weights, targets, &shape), &mut scores).unwrap();
    let (mut dhidden, mut db) = (alloc(3, 4), alloc(7, 2));
    let gradients = HeadGradients {
        hidden: dhidden.view_mut(),
        weight: None,
        adds_to_weight: true,
        bias: None,
        h: None,
        b: Some(db.view_mut()),
    };
    let (hidden, d) = (hidden.view(), [1.0]);
    let call = ops::Head::new(hidden, weights, targets, &shape);
    let error = ops::head_backward(&device, call, &scores, &d, None, gradients);
    let found = error.unwrap_err().to_string();
    assert_eq!(found, "head_backward: gradients of a low-rank term that the head lacks");
}

/// A tied table receives the head's gradient on top of another's: two calls add up.
#[test]
fn gradients_of_the_weights_accumulate() {
    for (place, device) in devices() {
        let mut case = Case::new(9, 101, 16, DType::F32, HeadShape::default(), false);
        let once = case.run(&device, DType::F32).1.swap_remove(1);
        let first = std::mem::replace(&mut case.dw, once.clone());
        let twice = case.run(&device, DType::F32).1.swap_remove(1);
        let data = once.data.iter().zip(&first.data).map(|(once, first)| 2.0 * once - first).collect();
        twice.assert_close(&Matrix { data, ..once }, 1e-6, &format!("twice, {place:?}"));
    }
}

/// Over several chunks and strips, too.
#[test]
fn the_weights_gradient_overwrites_where_it_is_not_to_add() {
    for (dtype, (place, device)) in TYPES.into_iter().flat_map(|(dtype, _)| devices().map(|on| (dtype, on))) {
        let mut case = Case::new(1031, 1100, 16, dtype, HeadShape::default(), false);
        case.dw = Matrix::zeros(1100, 16);
        let added = case.run(&device, dtype).1.swap_remove(1);
        case.adds_to_weight = false;
        let written = case.run(&device, dtype).1.swap_remove(1);
        assert!(added.data == written.data, "{dtype} {place:?}");
    }
}

/// The first of equal logits counts as the largest, as in `argmax`.
#[test]
fn ties_go_to_the_first() {
    for (_, device) in devices() {
        ties_go_to_the_first_on(&device);
    }
}

fn ties_go_to_the_first_on(device: &Device) {
    // The last is more than a strip of a GPU.
    for vocabulary in [5, 37, 1009, 2500, 40_000] {
        let mut w = Matrix::zeros(vocabulary, 2);
        let (first, second) = (vocabulary / 2, vocabulary - 1);
        *w.at(first, 0) = 1.0;
        *w.at(second, 0) = 1.0;
        let hidden = Matrix { rows: 1, cols: 2, data: vec![1.0, 0.0] };
        let (h, w) = (hidden.tensor(device, DType::F32), w.tensor(device, DType::F32));
        let mut scores = HeadScores::default();
        let targets = Targets { rows: &[0, 0, 0], targets: &[0, first as u32, second as u32] };
        let call = ops::Head::new(h.view(), HeadWeights::new(w.view(), None), targets, &HeadShape::default());
        ops::head(device, call, &mut scores).unwrap();
        assert_eq!(scores.hit, [false, true, false], "vocabulary {vocabulary}");
        // The first of equals stays the first when the other is in another part, whichever part it
        // is in.
        let mut case = Case::new(1, vocabulary, 2, DType::F32, HeadShape::default(), false);
        (case.hidden, case.w) = (hidden, Matrix::read(device, w.view()));
        (case.rows, case.targets) = (vec![0; 3], vec![0, first as u32, second as u32]);
        case.d_log_prob = vec![1.0; 3];
        for cut in [1, first, first + 1, second] {
            let (scores, _) = case.run_in_parts(device, DType::F32, &[cut]);
            assert_eq!(scores.hit, [false, true, false], "vocabulary {vocabulary} cut at {cut}");
        }
    }
}

/// Logits of ±1e4: log-probabilities stay finite and the gradient is that of a one-hot
/// distribution.
#[test]
fn large_logits() {
    for (_, device) in devices() {
        let hidden = Matrix { rows: 1, cols: 1, data: vec![1e4] };
        let w = Matrix { rows: 3, cols: 1, data: vec![1.0, -1.0, 0.5] };
        let (h, w) = (hidden.tensor(&device, DType::F32), w.tensor(&device, DType::F32));
        let mut scores = HeadScores::default();
        let targets = Targets { rows: &[0, 0], targets: &[0, 1] };
        let weights = HeadWeights::new(w.view(), None);
        ops::head(&device, ops::Head::new(h.view(), weights, targets, &HeadShape::default()), &mut scores)
            .unwrap();
        assert_eq!(scores.log_prob, [0.0, -2e4]);
        assert_eq!(scores.entropy, [0.0]);
    }
}

#[test]
fn not_a_number_stays_one() {
    for (place, dtype, _) in cases() {
        let device = place.device(2, 1 << 28);
        let mut case = Case::new(3, 101, 16, dtype, HeadShape::default(), false);
        *case.hidden.at(1, 3) = f64::NAN;
        let (scores, gradients) = case.run(&device, dtype);
        let dhidden = &gradients[0];
        assert!(scores.log_sum_exp[1].is_nan() && scores.log_sum_exp[0].is_finite(), "{dtype} {place:?}");
        for (row, log_prob) in case.rows.iter().zip(&scores.log_prob) {
            assert_eq!(log_prob.is_nan(), *row == 1, "{dtype} {place:?}");
        }
        assert!(dhidden.row(1).iter().all(|x| x.is_nan()), "{dtype} {place:?}");
        assert!(dhidden.row(2).iter().all(|x| x.is_finite()), "{dtype} {place:?}");
    }
}

#[test]
fn nothing_to_score() {
    for (_, device) in devices() {
        let hidden = poison(&device, 0, 4, DType::F32);
        let w = Matrix::zeros(7, 4).tensor(&device, DType::F32);
        let mut scores = HeadScores::default();
        let targets = Targets { rows: &[], targets: &[] };
        let weights = HeadWeights::new(w.view(), None);
        let call = ops::Head::new(hidden.view(), weights, targets, &HeadShape::default());
        ops::head(&device, call, &mut scores).unwrap();
        assert_eq!(scores, HeadScores::default());
    }
}

#[test]
fn a_target_outside_the_vocabulary_is_refused() {
    let device = Device::meta();
    let hidden = device.alloc(MemoryKind::Activations, 1, 4, DType::F32).unwrap();
    let w = device.alloc(MemoryKind::Weights, 7, 4, DType::F32).unwrap();
    let targets = Targets { rows: &[0], targets: &[7] };
    let mut scores = HeadScores::default();
    let call =
        ops::Head::new(hidden.view(), HeadWeights::new(w.view(), None), targets, &HeadShape::default());
    let error = ops::head(&device, call, &mut scores).unwrap_err();
    assert_eq!(error.to_string(), "head: target 7 is outside the vocabulary of 7");
}

/// The dry run sees the strip of a chunk's logits that the head takes, and no more than a GPU's few
/// numbers of each row.
#[test]
fn a_dry_run_counts_the_chunk() {
    for (backend, rows, strip, of_row) in [(Backend::Cpu, 1024, 1024, 0), (Backend::Cuda, 4096, 8192, 72)] {
        let chunk = bytes_of_a_dry_run(backend);
        let expected = rows * strip * 4 + 5000 * of_row;
        assert!(
            (expected..expected + 192).contains(&chunk),
            "{chunk} bytes of {rows} rows of {strip} logits"
        );
    }
}

/// Returns the scratch bytes of a dry run of 5000 rows and a vocabulary of 32000.
fn bytes_of_a_dry_run(backend: Backend) -> usize {
    let device = Device::meta_of(backend);
    let hidden = device.alloc(MemoryKind::Activations, 5000, 64, DType::Bf16).unwrap();
    let w = device.alloc(MemoryKind::Weights, 32_000, 64, DType::Bf16).unwrap();
    let before = device.memory().total();
    let mut scores = HeadScores::default();
    let targets = Targets { rows: &[3], targets: &[5] };
    let call =
        ops::Head::new(hidden.view(), HeadWeights::new(w.view(), None), targets, &HeadShape::default());
    ops::head(&device, call, &mut scores).unwrap();
    let head = MemoryKind::ALL.iter().position(|k| *k == MemoryKind::Head).unwrap();
    assert_eq!(device.memory().total(), before, "the chunk is returned");
    device.memory().at_peak[head]
}
