//! A head's input, what the operation makes of it, and an f64 reference.

use tandem_kernels::ops::{
    self, ELSEWHERE, HeadGradients, HeadParts, HeadScores, HeadShape, HeadWeights, LowRank, Targets,
};
use tandem_kernels::{DType, Device, Tensor};

use super::super::matrix::{F32, Matrix, Random, poison};

pub struct Case {
    pub hidden: Matrix,
    pub w: Matrix,
    pub bias: Option<Matrix>,
    pub rows: Vec<u32>,
    pub targets: Vec<u32>,
    pub shape: HeadShape,
    pub d_log_prob: Vec<f32>,
    /// Whether gradients are added to `dw`, or overwrite it.
    pub adds_to_weight: bool,
    pub dw: Matrix,
    pub dbias: Matrix,
    /// `h`, `b`, and the sum to which the gradient of `b` is added.
    pub low_rank: Option<[Matrix; 3]>,
}

/// Gradients of the hidden rows, the weights, the bias, and of `h` and `b` where there is a
/// low-rank term.
pub type Gradients = Vec<Matrix>;

impl Case {
    pub fn new(
        rows: usize,
        vocabulary: usize,
        width: usize,
        dtype: DType,
        shape: HeadShape,
        bias: bool,
    ) -> Self {
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
    pub fn adapted(mut self, rank: usize, dtype: DType) -> Self {
        let mut random = Random(31);
        let (rows, vocabulary) = (self.hidden.rows, self.w.rows);
        self.low_rank = Some([
            random.matrix(rows, rank, dtype),
            random.matrix(vocabulary, rank, dtype),
            random.matrix(vocabulary, rank, DType::F32),
        ]);
        self
    }

    pub fn run(&self, device: &Device, dtype: DType) -> (HeadScores, Gradients) {
        self.run_keeping(device, dtype, 0)
    }

    pub fn run_keeping(&self, device: &Device, dtype: DType, budget: usize) -> (HeadScores, Gradients) {
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
        let call = ops::Head::new(hidden.view(), weights, targets, &self.shape);
        let kept = ops::head_keeping(device, call, &mut scores, budget).unwrap();
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
        let call = ops::Head::new(hidden.view(), weights, targets, &self.shape);
        ops::head_backward(device, call, &scores, &self.d_log_prob, Some(kept), gradients).unwrap();
        let all = [dh, dw, db].into_iter().chain(dterm.into_iter().flatten());
        (scores, all.map(|t| Matrix::read(device, t.view())).collect())
    }

    /// The scores of logits that a product has made before.
    pub fn score_logits(&self, device: &Device, dtype: DType) -> HeadScores {
        let (hidden, w) = (self.hidden.tensor(device, dtype), self.w.tensor(device, dtype));
        let bias = self.bias.as_ref().map(|b| b.tensor(device, DType::F32));
        let mut logits = poison(device, self.hidden.rows, self.w.rows, DType::F32);
        let bias = bias.as_ref().map(Tensor::view);
        ops::sharded_linear(device, hidden.view(), w.view(), None, bias, None, logits.view_mut()).unwrap();
        let targets = Targets { rows: &self.rows, targets: &self.targets };
        let mut scores = HeadScores::default();
        ops::score_logits(device, logits.view_mut(), targets, &self.shape, &[], &mut scores).unwrap();
        scores
    }

    /// With the vocabulary cut at `cuts`: each part alone, then joined. Gradients of the hidden
    /// rows are added up in f64.
    pub fn run_in_parts(&self, device: &Device, dtype: DType, cuts: &[usize]) -> (HeadScores, Gradients) {
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
            ops::head_part(device, ops::Head::new(hidden.view(), weights, targets, &self.shape), &mut own, 0)
                .unwrap();
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
            let call = ops::Head::new(
                hidden.view(),
                HeadWeights { weight: w.view(), bias, low_rank },
                Targets { rows: &self.rows, targets },
                &self.shape,
            );
            ops::head_backward(device, call, &scores, &self.d_log_prob, None, gradients).unwrap();
            let add = |sum: &mut Matrix, own: &Tensor| {
                sum.data.iter_mut().zip(Matrix::read(device, own.view()).data).for_each(|(sum, x)| *sum += x);
            };
            add(&mut dhidden, &own);
            if let (Some(sum), Some(own)) = (&mut dterm_h, &own_h) {
                add(sum, own);
            }
            dw.extend(Matrix::read(device, own_dw.view()).data);
            dbias.extend(Matrix::read(device, own_dbias.view()).data);
            if let Some((_, _, db)) = term {
                dterm_b.extend(Matrix::read(device, db.view()).data);
            }
        }
        let dw = Matrix { data: dw, ..self.dw };
        let dbias = Matrix { data: dbias, ..self.dbias };
        let dterm_b = self.low_rank.as_ref().map(|[_, _, db]| Matrix { data: dterm_b, ..*db });
        (scores, [dhidden, dw, dbias].into_iter().chain(dterm_h).chain(dterm_b).collect())
    }

    pub fn reference(&self) -> (Scores, Gradients) {
        let (rows, vocabulary) = (self.hidden.rows, self.w.rows);
        let scale = f64::from(self.shape.logit_scale.unwrap_or(1.0));
        let cap = self.shape.softcap.map(f64::from);
        let mut scores = Scores {
            log_prob: Matrix::zeros(1, self.rows.len()),
            entropy: Matrix::zeros(1, rows),
            mean_logit: Matrix::zeros(1, rows),
            log_sum_squares: Matrix::zeros(1, rows),
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
            scores.log_sum_squares.data[r] = logits.iter().map(|l| (2.0 * (l - lse)).exp()).sum::<f64>().ln();
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

pub struct Scores {
    pub log_prob: Matrix,
    pub entropy: Matrix,
    pub mean_logit: Matrix,
    pub log_sum_squares: Matrix,
    pub hit: Vec<bool>,
}

impl Scores {
    /// Scores are f32 whatever the operands.
    #[track_caller]
    pub fn assert_are(&self, found: &HeadScores, what: &str) {
        row(&found.log_prob).assert_close(&self.log_prob, F32, &format!("log_prob {what}"));
        row(&found.entropy).assert_close(&self.entropy, F32, &format!("entropy {what}"));
        let squares = row(&found.log_sum_squares);
        squares.assert_close(&self.log_sum_squares, F32, &format!("log_sum_squares {what}"));
        // The mean cancels: compare beside the logits, which are of the order of 1.
        assert_eq!(found.mean_logit.len(), self.mean_logit.data.len(), "mean logit {what}");
        for (found, expected) in found.mean_logit.iter().zip(&self.mean_logit.data) {
            assert!((f64::from(*found) - expected).abs() < F32, "mean logit {what}");
        }
        assert_eq!(found.hit, self.hit, "hit {what}");
    }
}

fn row(values: &[f32]) -> Matrix {
    Matrix { rows: 1, cols: values.len(), data: values.iter().map(|&x| f64::from(x)).collect() }
}
