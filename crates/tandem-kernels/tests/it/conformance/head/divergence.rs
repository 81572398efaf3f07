//! The divergence of two heads beside an f64 reference.

use tandem_kernels::ops::{
    self, DivergenceSide, HeadDivergence, HeadGradients, HeadScores, HeadShape, HeadWeights, LowRank,
    RowDivergence, Targets,
};
use tandem_kernels::{DType, Device, KernelError, MemoryKind, Tensor};

use super::super::matrix::{F32, Matrix, Random, TYPES, poison, same_at_every_thread_count};
use super::devices;
use crate::places::Place;

const PLAIN: HeadShape = HeadShape { softcap: None, logit_scale: None };
const BETAS: [f32; 4] = [0.0, 0.1, 0.5, 1.0];

/// One model's operands.
struct Side {
    hidden: Matrix,
    w: Matrix,
    bias: Option<Matrix>,
    shape: HeadShape,
    /// `h` and `b`.
    low_rank: Option<[Matrix; 2]>,
}

/// The tensors of a side, with log Σ exp of its logits.
struct Loaded {
    hidden: Tensor,
    w: Tensor,
    bias: Option<Tensor>,
    low_rank: Option<[Tensor; 2]>,
    shape: HeadShape,
    scores: HeadScores,
}

impl Side {
    fn new(random: &mut Random, rows: usize, vocabulary: usize, width: usize, dtype: DType) -> Self {
        let hidden = random.matrix(rows, width, dtype);
        let w = random.matrix(vocabulary, width, dtype);
        Self { hidden, w, bias: None, shape: PLAIN, low_rank: None }
    }

    fn load(&self, device: &Device, dtype: DType) -> Loaded {
        let [hidden, w] = [&self.hidden, &self.w].map(|m| m.tensor(device, dtype));
        let bias = self.bias.as_ref().map(|bias| bias.tensor(device, DType::F32));
        let low_rank = self.low_rank.as_ref().map(|both| both.each_ref().map(|m| m.tensor(device, dtype)));
        let mut loaded =
            Loaded { hidden, w, bias, low_rank, shape: self.shape, scores: HeadScores::default() };
        let mut scores = HeadScores::default();
        let side = loaded.side();
        let targets = Targets { rows: &[], targets: &[] };
        ops::head(device, ops::Head::new(side.hidden, side.weights, targets, &side.shape), &mut scores)
            .unwrap();
        loaded.scores = scores;
        loaded
    }

    fn raw(&self, row: usize) -> Vec<f64> {
        let dot = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
        let scale = f64::from(self.shape.logit_scale.unwrap_or(1.0));
        let of = |v: usize| {
            let term = self.low_rank.as_ref().map_or(0.0, |[h, b]| dot(h.row(row), b.row(v)));
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias.data[v]);
            scale * (dot(self.hidden.row(row), self.w.row(v)) + term + bias)
        };
        (0..self.w.rows).map(of).collect()
    }

    /// Log-probabilities, and the derivative of each logit by its product.
    fn log_probabilities(&self, row: usize) -> (Vec<f64>, Vec<f64>) {
        let (raw, scale) = (self.raw(row), f64::from(self.shape.logit_scale.unwrap_or(1.0)));
        let cap = self.shape.softcap.map(f64::from);
        let logits: Vec<f64> = raw.iter().map(|&l| cap.map_or(l, |cap| cap * (l / cap).tanh())).collect();
        let lse = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
        let slope = |l: &f64| scale * cap.map_or(1.0, |cap| 1.0 - (l / cap).tanh().powi(2));
        (logits.iter().map(|l| l - lse).collect(), raw.iter().map(slope).collect())
    }
}

impl Loaded {
    fn side(&self) -> DivergenceSide<'_> {
        let weights = HeadWeights {
            weight: self.w.view(),
            bias: self.bias.as_ref().map(Tensor::view),
            low_rank: self.low_rank.as_ref().map(|[h, b]| LowRank { h: h.view(), b: b.view() }),
        };
        let log_sum_exp = &self.scores.log_sum_exp;
        DivergenceSide { hidden: self.hidden.view(), weights, shape: self.shape, log_sum_exp }
    }
}

/// Two models, and a derivative by each row.
struct Case {
    student: Side,
    teacher: Side,
    d: Vec<f32>,
    beta: f32,
}

impl Case {
    /// The teacher is wider than the student.
    fn new(rows: usize, vocabulary: usize, width: usize, dtype: DType, beta: f32) -> Self {
        let mut random = Random(41);
        let student = Side::new(&mut random, rows, vocabulary, width, dtype);
        let teacher = Side::new(&mut random, rows, vocabulary, width + 7, dtype);
        Self { student, teacher, d: (0..rows).map(|_| random.unit() as f32).collect(), beta }
    }

    /// Both models with a bias, a scale and a softcap; the student with a low-rank term.
    fn shaped(mut self, dtype: DType) -> Self {
        let mut random = Random(43);
        let (rows, vocabulary) = (self.student.hidden.rows, self.student.w.rows);
        self.student.shape = HeadShape { softcap: Some(2.0), logit_scale: Some(0.7) };
        self.teacher.shape = HeadShape { softcap: Some(3.0), logit_scale: Some(1.2) };
        for side in [&mut self.student, &mut self.teacher] {
            side.bias = Some(random.matrix(1, vocabulary, DType::F32));
        }
        self.student.low_rank = Some([random.matrix(rows, 5, dtype), random.matrix(vocabulary, 5, dtype)]);
        self
    }

    /// The sums of each row, and the gradients of hidden rows, weights, bias, `h` and `b`, as far as
    /// they are there; the weights' sums start at 1.
    fn run(&self, device: &Device, dtype: DType) -> (Vec<RowDivergence>, Vec<Matrix>) {
        let (student, teacher) = (self.student.load(device, dtype), self.teacher.load(device, dtype));
        let call = HeadDivergence { student: student.side(), teacher: teacher.side(), beta: self.beta };
        let mut rows = Vec::new();
        ops::head_divergence(device, call, &mut rows).unwrap();
        let (hidden, w) = (&self.student.hidden, &self.student.w);
        let ones =
            |rows, cols| Matrix { rows, cols, data: vec![1.0; rows * cols] }.tensor(device, DType::F32);
        let mut of_hidden = poison(device, hidden.rows, hidden.cols, DType::F32);
        let mut of_weight = ones(w.rows, w.cols);
        let mut of_bias = self.student.bias.as_ref().map(|_| ones(1, w.rows));
        let mut of_term = self
            .student
            .low_rank
            .as_ref()
            .map(|[h, b]| [poison(device, h.rows, h.cols, DType::F32), ones(b.rows, b.cols)]);
        let [of_h, of_b] = match &mut of_term {
            Some(both) => both.each_mut().map(|t| Some(t.view_mut())),
            None => [None, None],
        };
        let gradients = HeadGradients {
            hidden: of_hidden.view_mut(),
            weight: Some(of_weight.view_mut()),
            adds_to_weight: true,
            bias: of_bias.as_mut().map(Tensor::view_mut),
            h: of_h,
            b: of_b,
        };
        ops::head_divergence_backward(device, call, &rows, &self.d, gradients).unwrap();
        let all = [of_hidden, of_weight].into_iter().chain(of_bias).chain(of_term.into_iter().flatten());
        (rows, all.map(|t| Matrix::read(device, t.view())).collect())
    }

    /// The same in f64. The gradient follows from that of −Σ w log p, of any weights w: w_v is minus
    /// the derivative by p_v, times p_v.
    fn reference(&self) -> (Vec<RowDivergence>, Vec<Matrix>) {
        let (student, beta) = (&self.student, f64::from(self.beta));
        let ones = |rows, cols| Matrix { rows, cols, data: vec![1.0; rows * cols] };
        let (hidden, w) = (&student.hidden, &student.w);
        let (mut of_hidden, mut of_weight) = (Matrix::zeros(hidden.rows, hidden.cols), ones(w.rows, w.cols));
        let mut of_bias = ones(1, w.rows);
        let mut of_term = student
            .low_rank
            .as_ref()
            .map(|[h, b]| (h, b, [Matrix::zeros(h.rows, h.cols), ones(b.rows, b.cols)]));
        let mut rows = Vec::new();
        for r in 0..hidden.rows {
            let ((log_p, slopes), (log_q, _)) =
                (student.log_probabilities(r), self.teacher.log_probabilities(r));
            let log_m: Vec<f64> = log_p
                .iter()
                .zip(&log_q)
                .map(|(p, q)| ((1.0 - beta) * p.exp() + beta * q.exp()).ln())
                .collect();
            let kl = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a.exp() * (a - b)).sum() };
            let mixes = beta != 0.0 && beta != 1.0;
            rows.push(RowDivergence {
                forward_kl: kl(&log_q, &log_p),
                reverse_kl: kl(&log_p, &log_q),
                to_mixture: if mixes { [kl(&log_q, &log_m), kl(&log_p, &log_m)] } else { [0.0; 2] },
            });
            // Derivative by p_v, constants that the normalisation removes left in.
            let by_p: Vec<f64> = (0..w.rows)
                .map(|v| {
                    let (p, q, m) = (log_p[v].exp(), log_q[v].exp(), log_m[v].exp());
                    match self.beta {
                        0.0 => -q / p,
                        1.0 => log_p[v] - log_q[v] + 1.0,
                        _ => {
                            -beta * q * (1.0 - beta) / m
                                + (1.0 - beta) * (log_p[v] - log_m[v] + 1.0 - p * (1.0 - beta) / m)
                        }
                    }
                })
                .collect();
            let mean: f64 = log_p.iter().zip(&by_p).map(|(p, d)| p.exp() * d).sum();
            for v in 0..w.rows {
                let d = f64::from(self.d[r]) * log_p[v].exp() * (by_p[v] - mean) * slopes[v];
                of_bias.data[v] += d;
                for c in 0..hidden.cols {
                    *of_hidden.at(r, c) += d * w.row(v)[c];
                    *of_weight.at(v, c) += d * hidden.row(r)[c];
                }
                if let Some((h, b, [dh, db])) = &mut of_term {
                    for c in 0..h.cols {
                        *dh.at(r, c) += d * b.row(v)[c];
                        *db.at(v, c) += d * h.row(r)[c];
                    }
                }
            }
        }
        let of_bias = student.bias.as_ref().map(|_| of_bias);
        let of_term = of_term.into_iter().flat_map(|(_, _, both)| both);
        (rows, [of_hidden, of_weight].into_iter().chain(of_bias).chain(of_term).collect())
    }

    #[track_caller]
    fn check(&self, place: Place, dtype: DType, tolerance: f64) {
        let (found, gradients) = same_at_every_thread_count(place, |device| self.run(device, dtype));
        let (expected, of_reference) = self.reference();
        let (rows, vocabulary) = (self.student.hidden.rows, self.student.w.rows);
        let what =
            format!("{dtype} {place:?} {rows}x{vocabulary} beta {} {:?}", self.beta, self.student.shape);
        for (found, expected) in found.iter().zip(&expected) {
            let numbers = |row: &RowDivergence| {
                let beta = f64::from(self.beta);
                [row.forward_kl, row.reverse_kl, row.to_mixture[0], row.to_mixture[1], row.jsd(beta)]
            };
            // Beside logits, whose rounding it has.
            for (found, expected) in numbers(found).into_iter().zip(numbers(expected)) {
                assert!((found - expected).abs() <= F32 * expected.max(1.0), "{found} {expected} {what}");
            }
        }
        for (i, (found, expected)) in gradients.iter().zip(&of_reference).enumerate() {
            // Sums of the weights start at 1; hidden rows may have derivatives that all but cancel.
            found.assert_close_beside(0.1, expected, tolerance, &format!("gradient {i} {what}"));
        }
    }
}

#[test]
fn divergences_and_gradients_of_two_heads() {
    for place in Place::all() {
        for (dtype, tolerance) in TYPES {
            for (rows, vocabulary, width) in [(1, 2, 1), (5, 1025, 16), (3, 2309, 9), (23, 101, 33)] {
                for beta in BETAS {
                    Case::new(rows, vocabulary, width, dtype, beta).check(place, dtype, tolerance);
                    Case::new(rows, vocabulary, width, dtype, beta)
                        .shaped(dtype)
                        .check(place, dtype, tolerance);
                }
            }
        }
    }
}

/// More rows than a chunk has (1024 on a CPU, 4096 on a GPU), and more tokens than a strip (1024, and 8192).
#[test]
fn several_chunks_and_strips_of_two_heads() {
    for (dtype, tolerance) in TYPES {
        Case::new(1031, 1100, 16, dtype, 0.3).check(Place::processors()[0], dtype, tolerance);
        Case::new(4103, 40, 8, dtype, 0.3).check(Place::cuda(), dtype, tolerance);
        Case::new(3, 16_384 + 4001, 8, dtype, 0.3).shaped(dtype).check(Place::cuda(), dtype, tolerance);
    }
}

/// Equal distributions have no divergence and no gradient, up to rounding, although the mean of the
/// logits differs.
#[test]
fn equal_distributions() {
    for ((place, device), beta) in devices().into_iter().flat_map(|on| BETAS.map(|beta| (on.clone(), beta))) {
        let mut case = Case::new(9, 1100, 16, DType::F32, beta);
        let (hidden, w) = (case.student.hidden.clone(), case.student.w.clone());
        let bias = Some(Matrix { rows: 1, cols: 1100, data: vec![3.0; 1100] });
        case.teacher = Side { hidden, w, bias, shape: PLAIN, low_rank: None };
        let (rows, gradients) = case.run(&device, DType::F32);
        for row in &rows {
            let numbers = [row.forward_kl, row.reverse_kl, row.to_mixture[0], row.to_mixture[1]];
            assert!(numbers.iter().all(|x| x.abs() < 5e-6), "{place:?} beta {beta}: {row:?}");
        }
        assert!(gradients[0].data.iter().all(|x| x.abs() < 1e-5), "{place:?} beta {beta}");
    }
}

/// Distributions far apart, of logits in the thousands: the reverse divergence is what the numbers
/// say, and nothing is infinite.
#[test]
fn distant_distributions() {
    let one = |data: Vec<f64>, cols| Matrix { rows: data.len() / cols, cols, data };
    for ((place, device), beta) in devices().into_iter().flat_map(|on| BETAS.map(|beta| (on.clone(), beta))) {
        let side = |sign: f64| Side {
            hidden: one(vec![sign], 1),
            w: one(vec![2e3, -2e3, 0.0], 1),
            bias: None,
            shape: PLAIN,
            low_rank: None,
        };
        let case = Case { student: side(1.0), teacher: side(-1.0), d: vec![1.0], beta };
        let (rows, gradients) = case.run(&device, DType::F32);
        assert_eq!((rows[0].forward_kl, rows[0].reverse_kl), (4e3, 4e3));
        if beta == 0.5 {
            let [teacher, student] = rows[0].to_mixture;
            assert!((teacher - 2f64.ln()).abs() < 1e-6 && (student - 2f64.ln()).abs() < 1e-6);
        }
        assert!(gradients.iter().all(|g| g.data.iter().all(|x| x.is_finite())), "{place:?} beta {beta}");
    }
}

#[test]
fn not_a_number_stays_one_in_a_divergence() {
    for ((place, device), beta) in devices().into_iter().flat_map(|on| BETAS.map(|beta| (on.clone(), beta))) {
        let mut case = Case::new(3, 101, 16, DType::F32, beta);
        *case.student.hidden.at(1, 3) = f64::NAN;
        let (rows, gradients) = case.run(&device, DType::F32);
        let is_nan: Vec<bool> = rows.iter().map(|row| row.jsd(f64::from(beta)).is_nan()).collect();
        assert_eq!(is_nan, [false, true, false], "{place:?} beta {beta}");
        assert!(gradients[0].row(1).iter().all(|x| x.is_nan()), "{place:?} beta {beta}");
        assert!(gradients[0].row(2).iter().all(|x| x.is_finite()), "{place:?} beta {beta}");
    }
}

#[test]
fn two_heads_must_fit() {
    let device = Device::meta();
    let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::F32).unwrap();
    let (hidden, own, w, other) = (alloc(3, 4), alloc(7, 4), alloc(7, 4), alloc(8, 4));
    let sums = [0.0; 3];
    let side = |w: &Tensor, sums: &[f32], beta: f32| -> Result<(), KernelError> {
        fn of<'a>(hidden: &'a Tensor, w: &'a Tensor, log_sum_exp: &'a [f32]) -> DivergenceSide<'a> {
            let weights = HeadWeights::new(w.view(), None);
            DivergenceSide { hidden: hidden.view(), weights, shape: PLAIN, log_sum_exp }
        }
        let student = of(&hidden, &own, &[0.0; 3]);
        let call = HeadDivergence { student, teacher: of(&hidden, w, sums), beta };
        ops::head_divergence(&device, call, &mut Vec::new())
    };
    side(&w, &sums, 0.5).unwrap();
    let said = |found: Result<(), KernelError>| found.unwrap_err().to_string();
    assert_eq!(
        said(side(&other, &sums, 0.5)),
        "head_divergence: the student has 3 rows of 7 tokens, the teacher 3 of 8"
    );
    assert_eq!(said(side(&w, &sums[..2], 0.5)), "head_divergence: 2 sums of exponentials of 3 rows");
    assert_eq!(said(side(&w, &sums, 1.5)), "head_divergence: beta 1.5 is outside 0..=1");
}
