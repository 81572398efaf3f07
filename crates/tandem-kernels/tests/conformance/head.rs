use tandem_kernels::ops::{
    self, ELSEWHERE, HeadGradients, HeadParts, HeadScores, HeadShape, HeadWeights, LowRank, Targets,
};
use tandem_kernels::{DType, Device, Kind, Tensor};

use crate::matrix::{Matrix, Random, TYPES, cases, device, poison, same_at_every_thread_count};

struct Case {
    hidden: Matrix,
    w: Matrix,
    bias: Option<Matrix>,
    rows: Vec<u32>,
    targets: Vec<u32>,
    shape: HeadShape,
    d_log_prob: Vec<f32>,
    /// What the gradients are added to.
    adds_to_weight: bool,
    dw: Matrix,
    dbias: Matrix,
    /// `h`, `b`, and what the gradient of `b` is added to.
    low_rank: Option<[Matrix; 3]>,
}

/// Gradients of the hidden rows, the weights, the bias, and of `h` and `b` where there is a low-rank term.
type Gradients = Vec<Matrix>;

impl Case {
    fn new(rows: usize, vocabulary: usize, width: usize, dtype: DType, shape: HeadShape, bias: bool) -> Self {
        let mut random = Random(29);
        // Zero, one, two or three predictions a row.
        let mut predictions: Vec<u32> =
            (0..rows as u32).flat_map(|r| vec![r; if rows == 1 { 1 } else { r as usize % 4 }]).collect();
        predictions.sort_unstable();
        Self {
            hidden: random.matrix(rows, width, dtype),
            w: random.matrix(vocabulary, width, dtype),
            bias: bias.then(|| random.matrix(1, vocabulary, DType::F32)),
            targets: predictions.iter().map(|_| random.below(vocabulary) as u32).collect(),
            d_log_prob: predictions.iter().map(|_| random.unit() as f32).collect(),
            rows: predictions,
            shape,
            adds_to_weight: true,
            dw: random.matrix(vocabulary, width, DType::F32),
            dbias: random.matrix(1, vocabulary, DType::F32),
            low_rank: None,
        }
    }

    /// With a low-rank term.
    fn adapted(mut self, rank: usize, dtype: DType) -> Self {
        let mut random = Random(31);
        let (rows, vocabulary) = (self.hidden.rows, self.w.rows);
        self.low_rank = Some([
            random.matrix(rows, rank, dtype),
            random.matrix(vocabulary, rank, dtype),
            random.matrix(vocabulary, rank, DType::F32),
        ]);
        self
    }

    fn run(&self, device: &Device, dtype: DType) -> (HeadScores, Gradients) {
        self.run_keeping(device, dtype, 0)
    }

    fn run_keeping(&self, device: &Device, dtype: DType, budget: usize) -> (HeadScores, Gradients) {
        let (hidden, w) = (self.hidden.tensor(device, dtype), self.w.tensor(device, dtype));
        let bias = self.bias.as_ref().map(|b| b.tensor(device, DType::F32));
        let term = self.low_rank.as_ref().map(|[h, b, _]| [h, b].map(|m| m.tensor(device, dtype)));
        let weights = HeadWeights {
            weight: w.view(),
            bias: bias.as_ref().map(Tensor::view),
            low_rank: term.as_ref().map(|[h, b]| LowRank { h: h.view(), b: b.view() }),
        };
        let targets = Targets { rows: &self.rows, targets: &self.targets };
        let mut scores = HeadScores::default();
        let kept =
            ops::head_keeping(device, hidden.view(), weights, targets, &self.shape, &mut scores, budget)
                .unwrap();
        let mut dh = poison(device, self.hidden.rows, self.hidden.cols, DType::F32);
        let (mut dw, mut db) = (self.dw.tensor(device, DType::F32), self.dbias.tensor(device, DType::F32));
        if !self.adds_to_weight {
            dw = poison(device, self.dw.rows, self.dw.cols, DType::F32);
        }
        let mut dterm = self
            .low_rank
            .as_ref()
            .map(|[h, _, db]| [poison(device, h.rows, h.cols, DType::F32), db.tensor(device, DType::F32)]);
        let [dterm_h, dterm_b] = match &mut dterm {
            Some(both) => both.each_mut().map(|t| Some(t.view_mut())),
            None => [None, None],
        };
        let gradients = HeadGradients {
            hidden: dh.view_mut(),
            weight: Some(dw.view_mut()),
            adds_to_weight: self.adds_to_weight,
            bias: Some(db.view_mut()),
            h: dterm_h,
            b: dterm_b,
        };
        ops::head_backward(
            device,
            hidden.view(),
            weights,
            targets,
            &self.shape,
            &scores,
            &self.d_log_prob,
            Some(kept),
            gradients,
        )
        .unwrap();
        let all = [dh, dw, db].into_iter().chain(dterm.into_iter().flatten());
        (scores, all.map(|t| Matrix::read(t.view())).collect())
    }

    /// With the vocabulary cut at `cuts`: each part alone, then joined. Gradients of the hidden rows are added up in f64.
    fn run_in_parts(&self, device: &Device, dtype: DType, cuts: &[usize]) -> (HeadScores, Gradients) {
        let hidden = self.hidden.tensor(device, dtype);
        let part = |tokens: &std::ops::Range<usize>| {
            let rows = |m: &Matrix| m.data[tokens.start * m.cols..tokens.end * m.cols].to_vec();
            let cols =
                |m: &Matrix| Matrix { rows: 1, cols: tokens.len(), data: m.data[tokens.clone()].to_vec() };
            let matrix = |m: &Matrix| Matrix { rows: tokens.len(), cols: m.cols, data: rows(m) };
            let place = |&t: &u32| {
                let here = tokens.contains(&(t as usize));
                if here { t - tokens.start as u32 } else { ELSEWHERE }
            };
            let targets: Vec<u32> = self.targets.iter().map(place).collect();
            let bias = self.bias.as_ref().map(|b| cols(b).tensor(device, DType::F32));
            let gradients = [matrix(&self.dw), cols(&self.dbias)].map(|m| m.tensor(device, DType::F32));
            let term = self.low_rank.as_ref().map(|[h, b, db]| {
                let [h, b] = [h.tensor(device, dtype), matrix(b).tensor(device, dtype)];
                (h, b, matrix(db).tensor(device, DType::F32))
            });
            (matrix(&self.w).tensor(device, dtype), bias, targets, gradients, term)
        };

        let ends = cuts.iter().copied().chain([self.w.rows]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let mut parts: Vec<_> = starts.zip(ends).map(|(a, b)| part(&(a..b))).collect();
        let (count, rows, predictions) = (parts.len(), self.hidden.rows, self.rows.len());
        let mut told = Vec::new();
        for (index, (w, bias, targets, _, term)) in parts.iter().enumerate() {
            let targets = Targets { rows: &self.rows, targets };
            let weights = HeadWeights {
                weight: w.view(),
                bias: bias.as_ref().map(Tensor::view),
                low_rank: term.as_ref().map(|(h, b, _)| LowRank { h: h.view(), b: b.view() }),
            };
            let mut own = HeadParts::new(index, count, rows, predictions);
            ops::head_part(device, hidden.view(), weights, targets, &self.shape, &mut own, 0).unwrap();
            let len = own.numbers_mut().len() / count;
            told.extend_from_slice(&own.numbers_mut()[index * len..(index + 1) * len]);
        }
        let mut all = HeadParts::new(0, count, rows, predictions);
        all.numbers_mut().copy_from_slice(&told);
        let mut scores = HeadScores::default();
        all.join(&self.rows, self.w.rows, &mut scores);
        let mut dhidden = Matrix::zeros(rows, self.hidden.cols);
        let mut dterm_h = self.low_rank.as_ref().map(|[h, ..]| Matrix::zeros(rows, h.cols));
        let (mut dw, mut dbias, mut dterm_b) = (Vec::new(), Vec::new(), Vec::new());
        for (w, bias, targets, [own_dw, own_dbias], term) in &mut parts {
            let mut own = poison(device, rows, self.hidden.cols, DType::F32);
            let mut own_h = term.as_ref().map(|(h, ..)| poison(device, rows, h.cols(), DType::F32));
            let (low_rank, own_b) = match term {
                Some((h, b, db)) => (Some(LowRank { h: h.view(), b: b.view() }), Some(db)),
                None => (None, None),
            };
            let gradients = HeadGradients {
                hidden: own.view_mut(),
                weight: Some(own_dw.view_mut()),
                adds_to_weight: true,
                bias: Some(own_dbias.view_mut()),
                h: own_h.as_mut().map(Tensor::view_mut),
                b: own_b.map(|db| db.view_mut()),
            };
            let bias = bias.as_ref().map(Tensor::view);
            ops::head_backward(
                device,
                hidden.view(),
                HeadWeights { weight: w.view(), bias, low_rank },
                Targets { rows: &self.rows, targets },
                &self.shape,
                &scores,
                &self.d_log_prob,
                None,
                gradients,
            )
            .unwrap();
            let add = |sum: &mut Matrix, own: &Tensor| {
                sum.data.iter_mut().zip(Matrix::read(own.view()).data).for_each(|(sum, x)| *sum += x);
            };
            add(&mut dhidden, &own);
            if let (Some(sum), Some(own)) = (&mut dterm_h, &own_h) {
                add(sum, own);
            }
            dw.extend(Matrix::read(own_dw.view()).data);
            dbias.extend(Matrix::read(own_dbias.view()).data);
            if let Some((_, _, db)) = term {
                dterm_b.extend(Matrix::read(db.view()).data);
            }
        }
        let dw = Matrix { data: dw, ..self.dw };
        let dbias = Matrix { data: dbias, ..self.dbias };
        let dterm_b = self.low_rank.as_ref().map(|[_, _, db]| Matrix { data: dterm_b, ..*db });
        (scores, [dhidden, dw, dbias].into_iter().chain(dterm_h).chain(dterm_b).collect())
    }

    fn reference(&self) -> (Scores, Gradients) {
        let (rows, vocabulary) = (self.hidden.rows, self.w.rows);
        let scale = f64::from(self.shape.logit_scale.unwrap_or(1.0));
        let cap = self.shape.softcap.map(f64::from);
        let mut scores = Scores {
            log_prob: Matrix::zeros(1, self.rows.len()),
            entropy: Matrix::zeros(1, rows),
            mean_logit: Matrix::zeros(1, rows),
            hit: vec![false; self.rows.len()],
        };
        let mut dh = Matrix::zeros(rows, self.hidden.cols);
        let (mut dw, mut db) = (self.dw.clone(), self.dbias.clone());
        let mut dterm =
            self.low_rank.as_ref().map(|[h, b, db]| (h, b, [Matrix::zeros(h.rows, h.cols), db.clone()]));
        for r in 0..rows {
            let raw: Vec<f64> = (0..vocabulary)
                .map(|v| {
                    let dot = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
                    let product = dot(self.hidden.row(r), self.w.row(v));
                    let term = self.low_rank.as_ref().map_or(0.0, |[h, b, _]| dot(h.row(r), b.row(v)));
                    scale * (product + term + self.bias.as_ref().map_or(0.0, |b| b.data[v]))
                })
                .collect();
            let logits: Vec<f64> = raw.iter().map(|&l| cap.map_or(l, |cap| cap * (l / cap).tanh())).collect();
            let lse = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
            scores.entropy.data[r] = -logits.iter().map(|l| (l - lse).exp() * (l - lse)).sum::<f64>();
            scores.mean_logit.data[r] = logits.iter().sum::<f64>() / vocabulary as f64;
            let mut d = vec![0.0; vocabulary];
            for (i, _) in self.rows.iter().enumerate().filter(|(_, row)| **row as usize == r) {
                let target = self.targets[i] as usize;
                scores.log_prob.data[i] = logits[target] - lse;
                scores.hit[i] = (0..vocabulary).all(|v| v == target || logits[v] < logits[target]);
                for v in 0..vocabulary {
                    let indicator = f64::from(u8::from(v == target));
                    d[v] += f64::from(self.d_log_prob[i]) * (indicator - (logits[v] - lse).exp());
                }
            }
            for v in 0..vocabulary {
                let d = d[v] * scale * cap.map_or(1.0, |cap| 1.0 - (raw[v] / cap).tanh().powi(2));
                db.data[v] += d;
                if let Some((h, b, [dh, db])) = &mut dterm {
                    for c in 0..h.cols {
                        *dh.at(r, c) += d * b.row(v)[c];
                        *db.at(v, c) += d * h.row(r)[c];
                    }
                }
                for c in 0..self.hidden.cols {
                    *dh.at(r, c) += d * self.w.row(v)[c];
                    *dw.at(v, c) += d * self.hidden.row(r)[c];
                }
            }
        }
        let dterm = dterm.into_iter().flat_map(|(_, _, both)| both);
        (scores, [dh, dw, db].into_iter().chain(dterm).collect())
    }
}

struct Scores {
    log_prob: Matrix,
    entropy: Matrix,
    mean_logit: Matrix,
    hit: Vec<bool>,
}

fn row(values: &[f32]) -> Matrix {
    Matrix { rows: 1, cols: values.len(), data: values.iter().map(|&x| f64::from(x)).collect() }
}

#[test]
fn scores_and_gradients() {
    let plain = HeadShape::default();
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    for (isa, dtype, tolerance) in cases() {
        for (rows, vocabulary, width) in
            [(1, 2, 1), (1, 97, 20), (5, 1025, 16), (3, 2309, 9), (23, 101, 64), (70, 257, 33)]
        {
            for (shape, bias) in [(plain, false), (plain, true), (shaped, true)] {
                let case = Case::new(rows, vocabulary, width, dtype, shape, bias);
                let (scores, found) = same_at_every_thread_count(isa, |device| case.run(device, dtype));
                let (expected, gradients) = case.reference();
                let what = format!("{dtype} {rows}x{vocabulary}x{width} bias {bias} {shape:?}");
                // Scores are f32 whatever the operands.
                row(&scores.log_prob).assert_close(&expected.log_prob, 2e-6, &format!("log_prob {what}"));
                row(&scores.entropy).assert_close(&expected.entropy, 4e-6, &format!("entropy {what}"));
                // The mean cancels: compare beside the logits, which are of the order of 1.
                for (found, expected) in scores.mean_logit.iter().zip(&expected.mean_logit.data) {
                    assert!((f64::from(*found) - expected).abs() < 4e-6, "mean logit {what}");
                }
                assert_eq!(scores.hit, expected.hit, "hit {what}");
                found[0].assert_close(&gradients[0], tolerance, &format!("dhidden {what}"));
                found[1].assert_close(&gradients[1], tolerance, &format!("dw {what}"));
                found[2].assert_close(&gradients[2], tolerance, &format!("dbias {what}"));
            }
        }
    }
}

/// More rows than a chunk has and more tokens than a strip (1024 each), the last of them not full.
#[test]
fn several_chunks() {
    for (dtype, tolerance) in TYPES {
        let case = Case::new(1031, 1100, 16, dtype, HeadShape::default(), false);
        let device = device(2);
        let (scores, found) = case.run(&device, dtype);
        let (expected, gradients) = case.reference();
        row(&scores.log_prob).assert_close(&expected.log_prob, 4e-6, "log_prob");
        found[0].assert_close(&gradients[0], tolerance, "dhidden");
        found[1].assert_close(&gradients[1], tolerance, "dw");
    }
}

/// Logits kept for backward, all of them or those of the first chunks, save a product and change no bit. With a softcap
/// nothing is kept.
#[test]
fn kept_logits_change_no_bit() {
    let device = device(2);
    let capped = HeadShape { softcap: Some(2.0), logit_scale: None };
    for (shape, dtype) in
        [(HeadShape::default(), DType::F32), (HeadShape::default(), DType::Bf16), (capped, DType::F32)]
    {
        let case = Case::new(2100, 101, 16, dtype, shape, false);
        let row_bytes = 101 * 4;
        let (scores, gradients) = case.run_keeping(&device, dtype, 0);
        // One chunk of 1024 rows, two of them and a part of the third, everything.
        for rows in [1024, 2090, 2100] {
            let (kept_scores, kept_gradients) = case.run_keeping(&device, dtype, rows * row_bytes);
            assert_eq!(kept_scores, scores, "{rows} rows in {dtype}");
            for (kept, computed) in kept_gradients.iter().zip(&gradients) {
                assert!(kept.data == computed.data, "{rows} rows in {dtype}");
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
                let (scores, found) = case.run_in_parts(&device(2), dtype, cuts);
                let (expected, gradients) = case.reference();
                let what = format!("{dtype} {rows}x{vocabulary} at {cuts:?} bias {bias} {shape:?}");
                row(&scores.log_prob).assert_close(&expected.log_prob, 2e-6, &format!("log_prob {what}"));
                row(&scores.entropy).assert_close(&expected.entropy, 4e-6, &format!("entropy {what}"));
                for (found, expected) in scores.mean_logit.iter().zip(&expected.mean_logit.data) {
                    assert!((f64::from(*found) - expected).abs() < 4e-6, "mean logit {what}");
                }
                assert_eq!(scores.hit, expected.hit, "hit {what}");
                for (found, (expected, name)) in
                    found.iter().zip(gradients.iter().zip(["dhidden", "dw", "dbias"]))
                {
                    found.assert_close(expected, tolerance, &format!("{name} {what}"));
                }
            }
        }
    }
}

/// A low-rank term: whole, kept and recomputed logits over several chunks, and a vocabulary in parts.
#[test]
fn a_low_rank_term() {
    const NAMES: [&str; 5] = ["dhidden", "dw", "dbias", "dh", "db"];
    let plain = HeadShape::default();
    let shaped = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
    let check = |what: &str, tolerance: f64, (scores, found): (HeadScores, Gradients), case: &Case| {
        let (expected, gradients) = case.reference();
        row(&scores.log_prob).assert_close(&expected.log_prob, 4e-6, &format!("log_prob {what}"));
        row(&scores.entropy).assert_close(&expected.entropy, 4e-6, &format!("entropy {what}"));
        assert_eq!(scores.hit, expected.hit, "hit {what}");
        assert_eq!(found.len(), NAMES.len(), "{what}");
        for ((found, expected), name) in found.iter().zip(&gradients).zip(NAMES) {
            found.assert_close(expected, tolerance, &format!("{name} {what}"));
        }
    };
    for (isa, dtype, tolerance) in cases() {
        for (rows, vocabulary, rank) in [(1, 97, 4), (23, 101, 8), (70, 257, 40)] {
            for (shape, bias) in [(plain, false), (shaped, true)] {
                let what = format!("{dtype} {isa:?} {rows}x{vocabulary}, rank {rank}, bias {bias} {shape:?}");
                let case = Case::new(rows, vocabulary, 16, dtype, shape, bias).adapted(rank, dtype);
                let found = same_at_every_thread_count(isa, |device| case.run(device, dtype));
                check(&what, tolerance, found, &case);
                let device = Device::cpu_with_isa(2, 1 << 28, isa).unwrap();
                let found = case.run_in_parts(&device, dtype, &[1, 64]);
                check(&format!("{what}, in parts"), tolerance, found, &case);
            }
        }
    }
    let device = device(2);
    for (dtype, tolerance) in TYPES {
        let case = Case::new(2100, 101, 16, dtype, plain, true).adapted(8, dtype);
        let (scores, gradients) = case.run_keeping(&device, dtype, 0);
        for rows in [1024, 2100] {
            let kept = case.run_keeping(&device, dtype, rows * 101 * 4);
            assert!(kept == (scores.clone(), gradients.clone()), "{rows} rows kept in {dtype}");
        }
        check(&format!("{dtype}, several chunks"), tolerance, (scores, gradients), &case);
    }
}

/// Gradients of a term that is not there are refused, and so is a term of other rows.
#[test]
fn a_low_rank_term_must_fit() {
    let device = Device::meta();
    let alloc = |rows, cols| device.alloc(Kind::Scratch, rows, cols, DType::F32).unwrap();
    let (hidden, w, h, b) = (alloc(3, 4), alloc(7, 4), alloc(2, 2), alloc(7, 2));
    let targets = Targets { rows: &[0], targets: &[5] };
    let mut scores = HeadScores::default();
    let weights = HeadWeights {
        low_rank: Some(LowRank { h: h.view(), b: b.view() }),
        ..HeadWeights::new(w.view(), None)
    };
    let shape = HeadShape::default();
    let error = ops::head(&device, hidden.view(), weights, targets, &shape, &mut scores).unwrap_err();
    assert_eq!(error.to_string(), "head: h is 2x2, expected 3x2");
    let weights = HeadWeights::new(w.view(), None);
    ops::head(&device, hidden.view(), weights, targets, &shape, &mut scores).unwrap();
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
    let error = ops::head_backward(&device, hidden, weights, targets, &shape, &scores, &d, None, gradients);
    let found = error.unwrap_err().to_string();
    assert_eq!(found, "head_backward: gradients of a low-rank term that the head lacks");
}

/// A tied table receives the head's gradient on top of another's: two calls add up.
#[test]
fn gradients_of_the_weights_accumulate() {
    let device = device(2);
    let mut case = Case::new(9, 101, 16, DType::F32, HeadShape::default(), false);
    let once = case.run(&device, DType::F32).1.swap_remove(1);
    let first = std::mem::replace(&mut case.dw, once.clone());
    let twice = case.run(&device, DType::F32).1.swap_remove(1);
    let data = once.data.iter().zip(&first.data).map(|(once, first)| 2.0 * once - first).collect();
    twice.assert_close(&Matrix { data, ..once }, 1e-6, "twice");
}

/// Over several chunks and strips, too.
#[test]
fn the_weights_gradient_overwrites_where_it_is_not_to_add() {
    for (dtype, _) in TYPES {
        let mut case = Case::new(1031, 1100, 16, dtype, HeadShape::default(), false);
        case.dw = Matrix::zeros(1100, 16);
        let device = device(2);
        let added = case.run(&device, dtype).1.swap_remove(1);
        case.adds_to_weight = false;
        let written = case.run(&device, dtype).1.swap_remove(1);
        assert!(added.data == written.data, "{dtype}");
    }
}

/// Of equal logits the first is the largest, as `argmax` counts.
#[test]
fn ties_go_to_the_first() {
    let device = device(2);
    for vocabulary in [5, 37, 1009, 2500] {
        let mut w = Matrix::zeros(vocabulary, 2);
        let (first, second) = (vocabulary / 2, vocabulary - 1);
        *w.at(first, 0) = 1.0;
        *w.at(second, 0) = 1.0;
        let hidden = Matrix { rows: 1, cols: 2, data: vec![1.0, 0.0] };
        let (h, w) = (hidden.tensor(&device, DType::F32), w.tensor(&device, DType::F32));
        let mut scores = HeadScores::default();
        let targets = Targets { rows: &[0, 0, 0], targets: &[0, first as u32, second as u32] };
        ops::head(
            &device,
            h.view(),
            HeadWeights::new(w.view(), None),
            targets,
            &HeadShape::default(),
            &mut scores,
        )
        .unwrap();
        assert_eq!(scores.hit, [false, true, false], "vocabulary {vocabulary}");
        // The first of equals stays the first when the other is in another part, whichever part it is in.
        let mut case = Case::new(1, vocabulary, 2, DType::F32, HeadShape::default(), false);
        (case.hidden, case.w) = (hidden, Matrix::read(w.view()));
        (case.rows, case.targets) = (vec![0; 3], vec![0, first as u32, second as u32]);
        case.d_log_prob = vec![1.0; 3];
        for cut in [1, first, first + 1, second] {
            let (scores, _) = case.run_in_parts(&device, DType::F32, &[cut]);
            assert_eq!(scores.hit, [false, true, false], "vocabulary {vocabulary} cut at {cut}");
        }
    }
}

/// Logits of ±1e4: log-probabilities stay finite and the gradient is that of a one-hot distribution.
#[test]
fn large_logits() {
    let device = device(1);
    let hidden = Matrix { rows: 1, cols: 1, data: vec![1e4] };
    let w = Matrix { rows: 3, cols: 1, data: vec![1.0, -1.0, 0.5] };
    let (h, w) = (hidden.tensor(&device, DType::F32), w.tensor(&device, DType::F32));
    let mut scores = HeadScores::default();
    let targets = Targets { rows: &[0, 0], targets: &[0, 1] };
    ops::head(
        &device,
        h.view(),
        HeadWeights::new(w.view(), None),
        targets,
        &HeadShape::default(),
        &mut scores,
    )
    .unwrap();
    assert_eq!(scores.log_prob, [0.0, -2e4]);
    assert_eq!(scores.entropy, [0.0]);
}

#[test]
fn not_a_number_stays_one() {
    for (isa, dtype, _) in cases() {
        let device = Device::cpu_with_isa(2, 1 << 28, isa).unwrap();
        let mut case = Case::new(3, 101, 16, dtype, HeadShape::default(), false);
        *case.hidden.at(1, 3) = f64::NAN;
        let (scores, gradients) = case.run(&device, dtype);
        let dhidden = &gradients[0];
        assert!(scores.log_sum_exp[1].is_nan() && scores.log_sum_exp[0].is_finite(), "{dtype} {isa:?}");
        for (row, log_prob) in case.rows.iter().zip(&scores.log_prob) {
            assert_eq!(log_prob.is_nan(), *row == 1, "{dtype} {isa:?}");
        }
        assert!(dhidden.row(1).iter().all(|x| x.is_nan()), "{dtype} {isa:?}");
        assert!(dhidden.row(2).iter().all(|x| x.is_finite()), "{dtype} {isa:?}");
    }
}

#[test]
fn nothing_to_score() {
    let device = device(2);
    let hidden = poison(&device, 0, 4, DType::F32);
    let w = Matrix::zeros(7, 4).tensor(&device, DType::F32);
    let mut scores = HeadScores::default();
    let targets = Targets { rows: &[], targets: &[] };
    ops::head(
        &device,
        hidden.view(),
        HeadWeights::new(w.view(), None),
        targets,
        &HeadShape::default(),
        &mut scores,
    )
    .unwrap();
    assert_eq!(scores, HeadScores::default());
}

#[test]
fn a_target_outside_the_vocabulary_is_refused() {
    let device = Device::meta();
    let hidden = device.alloc(Kind::Activations, 1, 4, DType::F32).unwrap();
    let w = device.alloc(Kind::Weights, 7, 4, DType::F32).unwrap();
    let targets = Targets { rows: &[0], targets: &[7] };
    let mut scores = HeadScores::default();
    let error = ops::head(
        &device,
        hidden.view(),
        HeadWeights::new(w.view(), None),
        targets,
        &HeadShape::default(),
        &mut scores,
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "head: target 7 is outside the vocabulary of 7");
}

/// The dry run sees the strip of a chunk's logits that the head takes, and no more.
#[test]
fn a_dry_run_counts_the_chunk() {
    let device = Device::meta();
    let hidden = device.alloc(Kind::Activations, 3000, 64, DType::Bf16).unwrap();
    let w = device.alloc(Kind::Weights, 32_000, 64, DType::Bf16).unwrap();
    let before = device.memory().total();
    let mut scores = HeadScores::default();
    let targets = Targets { rows: &[3], targets: &[5] };
    ops::head(
        &device,
        hidden.view(),
        HeadWeights::new(w.view(), None),
        targets,
        &HeadShape::default(),
        &mut scores,
    )
    .unwrap();
    let head = Kind::ALL.iter().position(|k| *k == Kind::Head).unwrap();
    let chunk = device.memory().at_peak[head];
    assert!((4 << 20..(4 << 20) + 128).contains(&chunk), "{chunk} bytes of 1024 rows of 1024 logits");
    assert_eq!(device.memory().total(), before, "the chunk is returned");
}
